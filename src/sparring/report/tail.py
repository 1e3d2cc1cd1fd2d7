"""New whole lines of a JSONL file that another process writes."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import orjson

BLOCK = 1 << 19  # a block and its rows fit into a processor's cache: a quarter faster than blocks of 4 MB
_FINGERPRINT = 64  # last bytes that were read, to know them again: every line ends with a time


class Tail:
    """Reads on where it stopped. A last line without its end is left for the next time."""

    def __init__(self, path: Path):
        self.path = path
        self.offset = 0
        self.unreadable = 0
        self._seen = b""

    def was_cut(self) -> bool:
        """Whether lines that were read are gone: a resumed run removes those after its checkpoint."""
        if not self.offset:
            return False
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset - len(self._seen))
                return file.read(len(self._seen)) != self._seen
        except FileNotFoundError:
            return True

    def rows(self) -> Iterator[list[dict]]:
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            end = os.fstat(file.fileno()).st_size  # a line that is being written now is for the next time
            file.seek(self.offset)
            rest = b""
            while (left := end - self.offset - len(rest)) > 0 and (block := file.read(min(BLOCK, left))):
                text, newline, torn = (rest + block).rpartition(b"\n")
                rest = torn
                if newline:
                    self.offset += len(text) + 1
                    self._seen = (text + newline)[-_FINGERPRINT:]
                    yield self._parsed(text)

    def _parsed(self, text: bytes) -> list[dict]:
        lines, rows = text.split(b"\n"), []
        for line in lines:
            try:
                rows.append(orjson.loads(line))
            except orjson.JSONDecodeError:
                pass
        rows = [row for row in rows if isinstance(row, dict)]
        if len(rows) < len(lines):
            # a resumed run may leave an empty line where a torn one was cut
            self.unreadable += sum(bool(line.strip()) for line in lines) - len(rows)
        return rows


class Follower(ABC):
    """Adds up the rows of a file that grows, and starts anew when it was cut."""

    def __init__(self, path: Path):
        self.path = path
        self.starts = 0
        self._begin()

    def refresh(self) -> None:
        if self.tail.was_cut():
            self._begin()
        for rows in self.tail.rows():
            self.add(rows)

    @property
    def stamp(self) -> tuple:
        return self.starts, self.tail.offset

    @property
    def unreadable(self) -> int:
        return self.tail.unreadable

    @abstractmethod
    def forget(self) -> None:
        """Start anew."""

    @abstractmethod
    def add(self, rows: list[dict]) -> None:
        """Rows that follow."""

    def _begin(self) -> None:
        self.starts += 1
        self.tail = Tail(self.path)
        self.forget()
