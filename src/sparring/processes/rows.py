"""JSON with checksums, so that what was altered or lost is found: files of rows that are only appended to, and
documents that are replaced as a whole.

{"update": 3, "avg_loss": 0.5, "timestamp": 1700000000.0, "row": 3, "crc": "1a2b3c4d"}

`row` counts from 1; `crc` is the CRC-32 of the others, as `json.dumps` writes them.
"""

import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparring.processes.files import flush, open_regular, read_small, refuse_special, write_whole

_ENDING = re.compile(rb', "row": ([1-9][0-9]{0,14}), "crc": "([0-9a-f]{8})"\}$')
_CHECKSUM = 20  # bytes of it at the end of a row, with the bracket
_LONGEST = 60  # bytes of an ending
_NAMED = 3  # altered rows that a message lists
_NEAR_THE_END = 1 << 16  # bytes in which the last row is looked for first
_DIGITS = 19  # a longer integer is no count of anything


class RowCheck:
    """Follows the lines of a file: which rows are as they were written and in their places, and which are missing."""

    def __init__(self) -> None:
        self.last = 0  # number of the last good row
        self.left_out = 0  # lines that are not good
        # rows that are not as they were written; rows that are not there; lines that are none of these
        self._altered: list[str] = []
        self._missing: list[str] = []
        self._out_of_place: list[str] = []
        self._since = 0  # lines after the last good row that are no rows

    def is_good(self, line: bytes) -> bool:
        """Of the next line. One that is not is altered, or a row that comes twice or too late."""
        number = self.number(line)
        if number is None or number <= self.last:
            self.left_out += 1
            self._since += number is None
            self._out_of_place += [f"row {number} again"] if number else []
            return False
        # altered lines in between are what is left of rows that were there
        altered = min(self._since, number - self.last - 1)
        self._altered += map(str, range(self.last + 1, self.last + 1 + altered))
        self._out_of_place += [f"a line after row {self.last}"] * (self._since - altered)
        first = self.last + 1 + altered
        if first < number:
            self._missing.append(f"{first}" if first + 1 == number else f"{first}-{number - 1}")
        self.last, self._since = number, 0
        return True

    def lost_of(self, count: int) -> int:
        """How many of so many rows are not there at the end."""
        return max(0, count - self.last - self._since)

    @property
    def missing(self) -> list[str]:
        """A clause, where rows in between are."""
        return [f"rows missing: {_some(self._missing)}"] if self._missing else []

    @property
    def damage(self) -> list[str]:
        """A clause for each kind."""
        altered = [*self._altered, *map(str, range(self.last + 1, self.last + 1 + self._since))]
        verb = (
            f"row {_some(altered)} is not as it was"
            if len(altered) == 1
            else f"rows {_some(altered)} are not as they were"
        )
        found = [f"{verb} written"] if altered else []
        return found + self.missing + ([f"out of place: {_some(self._out_of_place)}"] if self._out_of_place else [])

    @staticmethod
    def number(line: bytes) -> int | None:
        """None: the row is another than the one its checksum was made of, or has none."""
        ending = _ENDING.search(line[-_LONGEST:])
        if ending is None or int(ending[2], 16) != zlib.crc32(line[:-_CHECKSUM] + b"}"):
            return None
        return int(ending[1])


@dataclass(frozen=True)
class RowFile:
    """One writer; whoever reads may meet a last row without its end."""

    path: Path

    @property
    def last(self) -> int:
        """The number of the last row that is as it was written; 0: there is none."""
        for most in (_NEAR_THE_END, None):
            lines = self._content(most).split(b"\n")[:-1]
            if number := next(filter(None, map(RowCheck.number, reversed(lines))), 0):
                return number
        return 0

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """A torn row, which a full disk may have left, keeps a line of its own."""
        refuse_special(self.path)
        texts = [json.dumps(row | {"row": number}) for number, row in enumerate(rows, self.last + 1)]
        lines = [f'{text[:-1]}, "crc": "{_checksum(text)}"}}\n' for text in texts]
        try:
            with self.path.open("ab+") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(end - 1, 0))
                torn = b"" if file.read(1) in (b"", b"\n") else b"\n"
                file.write(torn + "".join(lines).encode())
        except OSError as error:  # writing itself names no file
            error.filename = str(self.path)
            raise

    def read(self) -> list[dict[str, Any]]:
        """The rows that are as they were written."""
        return [row for _, row in self._rows() if row is not None]

    def flush(self) -> None:
        """Onto the disk: a checkpoint counts on them."""
        if self.path.exists():
            flush(self.path)

    def go_back(self, count: int, cut: bool = True) -> list[str]:
        """Cut what came after so many rows, and a torn end. What is lost or altered of them: a clause each."""
        check, end, last, found = RowCheck(), 0, dict[str, Any](), list[str]()
        content = self._content()
        for line in content.split(b"\n")[:-1]:
            if cut and max(check.last + 1, RowCheck.number(line) or 0) > count:
                break
            last = (_row(line) if check.is_good(line) else None) or last
            end += len(line) + 1
        if end < len(content):
            os.truncate(self.path, end)
        if lost := check.lost_of(count):
            after = f"update {last['update']}" if "update" in last else f"row {check.last}"
            found.append(f"rows after {after if check.last else 'the beginning'} are lost ({lost} of {count})")
        return found + check.damage

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Drop intact rows that are not wanted, and a torn end."""
        rows, content = list(self._rows()), self._content()
        kept = b"".join(line + b"\n" for line, row in rows if row is None or wanted(row))
        if kept != content:
            write_whole(self.path, kept)

    def _content(self, most: int | None = None) -> bytes:
        """Of the end, so many bytes; None: all."""
        if not self.path.exists():
            return b""
        with open_regular(self.path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most) if most else 0)
            return file.read()

    def _rows(self) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
        """Lines that have an end; None: altered, or out of place."""
        check = RowCheck()
        for line in self._content().split(b"\n")[:-1]:
            yield line, _row(line) if check.is_good(line) else None


@dataclass(frozen=True)
class Document:
    """Replaced as a whole; its checksum is its last value. One without, of earlier versions, is believed."""

    path: Path

    def write(self, content: dict[str, Any]) -> None:
        write_whole(self.path, json.dumps(content | {"crc": _checksum(json.dumps(content))}, indent=2) + "\n")

    def read(self) -> tuple[dict[str, Any], str | None]:
        """What it says; or nothing, and what is wrong with it."""
        name = self.path.name
        if not os.path.lexists(self.path):
            return {}, f"{name} is missing"
        try:
            content = json.loads(
                read_small(self.path), parse_int=lambda text: int(text) if len(text) < _DIGITS else None
            )
        except (OSError, ValueError, RecursionError) as error:
            return {}, f"{name} cannot be read ({getattr(error, 'strerror', None) or 'it is not JSON'})"
        crc = content.pop("crc", None) if isinstance(content, dict) else None
        if not isinstance(content, dict) or crc is not None and crc != _checksum(json.dumps(content)):
            return {}, f"{name} is damaged: it is not as it was written"
        return content, None


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def _row(line: bytes) -> dict[str, Any] | None:
    """None: no JSON, though its checksum is right: nothing that was written here."""
    try:
        return {name: value for name, value in json.loads(line).items() if name not in ("row", "crc")}
    except (ValueError, RecursionError):
        return None


def _some(numbers: list[str]) -> str:
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return f"{', '.join(numbers[:_NAMED])}{more}"
