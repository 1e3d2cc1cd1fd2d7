"""JSON with checksums, to detect altered and lost data: append-only files of rows, and documents that are replaced as a
whole.

{"update": 3, "avg_loss": 0.5, "timestamp": 1700000000.0, "row": 3, "crc": "1a2b3c4d"}

`row` counts from 1; `crc` is the CRC-32 of the other keys, as `json.dumps` writes them.
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
_CHECKSUM = 20  # bytes of the checksum at the end of a row, including the bracket
_LONGEST = 60  # maximum size in bytes of the end of a row
_NAMED = 3  # rows that a message lists
_NEAR_THE_END = 1 << 16  # bytes at the end that are searched first for the last row
_DIGITS = 19  # longer integers are not read


class RowCheck:
    """Checks the lines of a file in order: which rows are intact and in order, and which are missing."""

    def __init__(self) -> None:
        self.last = 0  # number of the last intact row
        self.skipped = 0  # number of other lines
        # altered rows, missing rows, and lines that are neither
        self._altered: list[str] = []
        self._missing: list[str] = []
        self._out_of_place: list[str] = []
        self._since = 0  # lines after the last intact row that are not rows

    def is_intact(self, line: bytes) -> bool:
        """Check the next line. False if it is altered, or a row that was repeated or moved."""
        number = self.number(line)
        if number is None or number <= self.last:
            self.skipped += 1
            self._since += number is None
            self._out_of_place += [f"row {number} again"] if number else []
            return False
        # lines in between that are not rows are altered rows, as far as row numbers are missing
        altered = min(self._since, number - self.last - 1)
        self._altered += map(str, range(self.last + 1, self.last + 1 + altered))
        self._out_of_place += [f"a line after row {self.last}"] * (self._since - altered)
        first = self.last + 1 + altered
        if first < number:
            self._missing.append(f"{first}" if first + 1 == number else f"{first}-{number - 1}")
        self.last, self._since = number, 0
        return True

    def count_lost(self, count: int) -> int:
        """The number of rows missing at the end, if there should be `count`."""
        return max(0, count - self.last - self._since)

    @property
    def missing(self) -> list[str]:
        """A clause about missing rows in between; empty if there are none."""
        return [f"rows missing: {_some(self._missing)}"] if self._missing else []

    @property
    def damage(self) -> list[str]:
        """One clause per kind of damage."""
        altered = [*self._altered, *map(str, range(self.last + 1, self.last + 1 + self._since))]
        text = f"row {_some(altered)} is altered" if len(altered) == 1 else f"rows {_some(altered)} are altered"
        found = [text] if altered else []
        return found + self.missing + ([f"out of place: {_some(self._out_of_place)}"] if self._out_of_place else [])

    @staticmethod
    def number(line: bytes) -> int | None:
        """The number of a row; None if its checksum does not match or is missing."""
        ending = _ENDING.search(line[-_LONGEST:])
        if ending is None or int(ending[2], 16) != zlib.crc32(line[:-_CHECKSUM] + b"}"):
            return None
        return int(ending[1])


@dataclass(frozen=True)
class RowFile:
    """A file of rows with one writer. Readers may see an incomplete last row."""

    path: Path

    @property
    def last(self) -> int:
        """The number of the last intact row; 0 if there is none."""
        for most in (_NEAR_THE_END, None):
            lines = self._content(most).split(b"\n")[:-1]
            if number := next(filter(None, map(RowCheck.number, reversed(lines))), 0):
                return number
        return 0

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Append rows. An incomplete last row, e.g. from a full disk, is ended with a newline first."""
        refuse_special(self.path)
        texts = [json.dumps(row | {"row": number}) for number, row in enumerate(rows, self.last + 1)]
        lines = [f'{text[:-1]}, "crc": "{_checksum(text)}"}}\n' for text in texts]
        try:
            with self.path.open("ab+") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(end - 1, 0))
                torn = b"" if file.read(1) in (b"", b"\n") else b"\n"
                file.write(torn + "".join(lines).encode())
        except OSError as error:  # an error of writing does not name the file
            error.filename = str(self.path)
            raise

    def read(self) -> list[dict[str, Any]]:
        """The intact rows."""
        return [row for _, row in self._rows() if row is not None]

    def flush(self) -> None:
        """Flush to the disk, because checkpoints refer to the rows."""
        if self.path.exists():
            flush(self.path)

    def rewind(self, count: int, cut: bool = True) -> list[str]:
        """Remove an incomplete end, and with `cut` all rows after the first `count`. Returns clauses about lost and
        altered rows."""
        check, end, last, found = RowCheck(), 0, dict[str, Any](), list[str]()
        content = self._content()
        for line in content.split(b"\n")[:-1]:
            if cut and max(check.last + 1, RowCheck.number(line) or 0) > count:
                break
            last = (_row(line) if check.is_intact(line) else None) or last
            end += len(line) + 1
        if end < len(content):
            os.truncate(self.path, end)
        if lost := check.count_lost(count):
            after = f"update {last['update']}" if "update" in last else f"row {check.last}"
            found.append(f"rows after {after if check.last else 'the beginning'} are lost ({lost} of {count})")
        return found + check.damage

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Remove intact rows that are not wanted, and an incomplete end."""
        rows, content = list(self._rows()), self._content()
        kept = b"".join(line + b"\n" for line, row in rows if row is None or wanted(row))
        if kept != content:
            write_whole(self.path, kept)

    def _content(self, most: int | None = None) -> bytes:
        """The last `most` bytes; None: all."""
        if not self.path.exists():
            return b""
        with open_regular(self.path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most) if most else 0)
            return file.read()

    def _rows(self) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
        """Complete lines with their rows; None for altered and misplaced ones."""
        check = RowCheck()
        for line in self._content().split(b"\n")[:-1]:
            yield line, _row(line) if check.is_intact(line) else None


@dataclass(frozen=True)
class Document:
    """A file that is replaced as a whole, with the checksum as its last value. Earlier versions wrote no checksum."""

    path: Path

    def write(self, content: dict[str, Any]) -> None:
        write_whole(self.path, json.dumps(content | {"crc": _checksum(json.dumps(content))}, indent=2) + "\n")

    def read(self) -> tuple[dict[str, Any], str | None]:
        """The content and None; if it is missing or damaged, an empty dict and the reason."""
        name = self.path.name
        if not os.path.lexists(self.path):
            return {}, f"{name} is missing"
        try:
            content = json.loads(
                read_small(self.path), parse_int=lambda text: int(text) if len(text) < _DIGITS else None
            )
        except (OSError, ValueError, RecursionError) as error:
            return {}, f"{name} cannot be read ({getattr(error, 'strerror', None) or 'not JSON'})"
        crc = content.pop("crc", None) if isinstance(content, dict) else None
        if not isinstance(content, dict) or crc is not None and crc != _checksum(json.dumps(content)):
            return {}, f"{name} is damaged: its checksum does not match"
        return content, None


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def _row(line: bytes) -> dict[str, Any] | None:
    """A row without its number and checksum; None for invalid JSON with a correct checksum, which we never write."""
    try:
        return {name: value for name, value in json.loads(line).items() if name not in ("row", "crc")}
    except (ValueError, RecursionError):
        return None


def _some(numbers: list[str]) -> str:
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return f"{', '.join(numbers[:_NAMED])}{more}"
