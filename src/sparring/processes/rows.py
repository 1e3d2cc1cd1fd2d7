"""Files of JSON rows that are only appended to. Each row ends with a checksum, so that one that was altered is found.

{"update": 3, "avg_loss": 0.5, "timestamp": 1700000000.0, "crc": "1a2b3c4d"}

`crc` is the CRC-32 of the row without it, as `json.dumps` writes it.
"""

import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparring.processes.files import flush, open_regular, write_whole

_CHECKSUM = re.compile(rb', "crc": "([0-9a-f]{8})"\}')
_LENGTH = 20  # of such an ending
_NAMED = 3  # altered rows that a message lists


@dataclass(frozen=True)
class RowFile:
    """One writer; whoever reads may meet a last row without its end."""

    path: Path

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """A torn row, which a full disk may have left, keeps a line of its own."""
        texts = [json.dumps(row) for row in rows]
        lines = [f'{text[:-1]}, "crc": "{zlib.crc32(text.encode()):08x}"}}\n' for text in texts]
        with self.path.open("ab+") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(end - 1, 0))
            torn = b"" if file.read(1) in (b"", b"\n") else b"\n"
            file.write(torn + "".join(lines).encode())

    def read(self) -> list[dict[str, Any]]:
        """The rows that are as they were written."""
        return [row for _, row in self._rows() if row is not None]

    def flush(self) -> None:
        """Onto the disk: a checkpoint counts on them."""
        if self.path.exists():
            flush(self.path)

    def go_back(self, size: int) -> list[str]:
        """Cut what came after the file had this size. What is lost or altered of the rows before: a clause each."""
        if self.size > size:
            os.truncate(self.path, size)
        whole, rows, found = self._cut_torn(), list(self._rows()), list[str]()
        if whole < size:
            last: dict[str, Any] = next((row for _, row in reversed(rows) if row), {})
            after = f"update {last['update']}" if "update" in last else f"row {len(rows)}"
            found.append(f"rows after {after if rows else 'the beginning'} are lost ({size - whole} bytes)")
        if altered := [str(number) for number, (_, row) in enumerate(rows, 1) if row is None]:
            more = f" and {len(altered) - _NAMED} more" if len(altered) > _NAMED else ""
            found.append(f"row {', '.join(altered[:_NAMED])}{more} is not as it was written (its checksum is another)")
        return found

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Drop intact rows that are not wanted, and a torn end."""
        self._cut_torn()
        rows = list(self._rows())
        kept = [line for line, row in rows if row is None or wanted(row)]
        if len(kept) < len(rows):
            write_whole(self.path, "".join(line.decode(errors="replace") + "\n" for line in kept))

    @staticmethod
    def is_altered(line: bytes) -> bool:
        """Whether a row is another than the one its checksum was made of; one without a checksum is not."""
        ending = _CHECKSUM.fullmatch(line[-_LENGTH:])
        return ending is not None and int(ending[1], 16) != zlib.crc32(line[:-_LENGTH] + b"}")

    def _content(self) -> bytes:
        if not self.path.exists():
            return b""
        with open_regular(self.path) as file:
            return file.read()

    def _rows(self) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
        """Lines that have an end; None: altered."""
        text = self._content()
        for line in text.split(b"\n")[:-1]:
            intact = _CHECKSUM.fullmatch(line[-_LENGTH:]) and not self.is_altered(line)
            yield line, {k: v for k, v in json.loads(line).items() if k != "crc"} if intact else None

    def _cut_torn(self) -> int:
        """How many bytes are left, where a last row without its end is gone."""
        text = self._content()
        whole = text.rfind(b"\n") + 1
        if whole < len(text):
            os.truncate(self.path, whole)
        return whole
