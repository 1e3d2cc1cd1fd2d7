"""How episodes lie on disk: segments, each a data file and an index, both only ever appended to.

folder/
  meta.json              the columns: name, dtype, shape of a row
  segment-000000.data    episodes one after another: a header with the number of steps, then column after column
  segment-000000.index   a line for every whole episode: checksum, then JSON
  writer.lock            held by the one process that writes

A line of the index is written after its data: what is cut short by a crash has no line, and is never read. A line also
holds the checksum of its data, which tells after a power cut whether they reached the disk. All columns of a segment
share one file, because a memory map keeps its file open and a process may open only about a thousand.
"""

import json
import os
import struct
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from sparring.errors import UserError

META = "meta.json"
_FORMAT = 1
# columns start at multiples of it, so that any dtype can be viewed in place
_ALIGNMENT = 64
# at the start of every episode: a mark and its number of steps
_HEADER = struct.Struct("<8sQ")
_MARK = b"episode\n"


@dataclass(frozen=True)
class Column:
    """One key of an episode of T steps: T rows, or T+1 of an observation."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def extra(self) -> int:
        return int(self.name.startswith("observation/"))

    @cached_property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


class Layout:
    """Which columns an episode has and where each of them lies in its block."""

    def __init__(self, columns: Iterable[Column]):
        self.columns = tuple(sorted(columns, key=lambda column: column.name))
        self._places: dict[int, tuple[dict[str, int], int]] = {}

    def offsets(self, steps: int) -> dict[str, int]:
        """Where each column begins in the block of an episode of `steps` steps."""
        return self._place(steps)[0]

    def block_bytes(self, steps: int) -> int:
        return self._place(steps)[1]

    def _place(self, steps: int) -> tuple[dict[str, int], int]:
        if steps not in self._places:
            offsets, end = {}, _aligned(_HEADER.size)
            for column in self.columns:
                offsets[column.name] = end
                end += _aligned((steps + column.extra) * column.row_bytes)
            self._places[steps] = offsets, end
        return self._places[steps]

    @property
    def step_bytes(self) -> int:
        return sum(column.row_bytes for column in self.columns)

    def block(self, rows: dict[str, list[np.ndarray]], steps: int) -> list:
        """The bytes of an episode as buffers in the order in which they are written; no copies of contiguous rows."""
        pieces: list = [_HEADER.pack(_MARK, steps)]
        position = _HEADER.size
        for name, start in self.offsets(steps).items():
            parts = [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in rows[name]]
            pieces += [bytes(start - position), *parts]
            position = start + sum(part.nbytes for part in parts)
        return [*pieces, bytes(self.block_bytes(steps) - position)]

    def save(self, folder: Path) -> None:
        content = {"format": _FORMAT, "columns": [asdict(column) for column in self.columns]}
        partial = folder / f".partial-{META}"
        partial.write_text(json.dumps(content, indent=1) + "\n")
        _flush(partial)
        partial.replace(folder / META)
        _flush(folder)

    @classmethod
    def load(cls, folder: Path) -> "Layout | None":
        """None where nothing was stored yet."""
        try:
            content = json.loads((folder / META).read_text())
        except FileNotFoundError:
            return None
        if content["format"] != _FORMAT:
            raise UserError(
                f"'{folder}' holds episodes of format {content['format']}, but this version reads format {_FORMAT}; "
                "read them with the version that wrote them"
            )
        return cls(Column(c["name"], c["dtype"], tuple(c["shape"])) for c in content["columns"])


@dataclass(frozen=True)
class Record:
    """One line of an index: a whole episode."""

    number: int
    offset: int
    size: int
    steps: int
    crc: int
    info: dict

    @property
    def end(self) -> int:
        return self.offset + self.size

    def line(self) -> bytes:
        text = json.dumps(asdict(self)).encode()
        return b"%08x %s\n" % (zlib.crc32(text), text)

    @classmethod
    def parse(cls, line: bytes) -> "Record | None":
        """None for a line that was cut short or damaged."""
        checksum, _, text = line.removesuffix(b"\n").partition(b" ")
        if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
            return None
        return cls(**json.loads(text))


class Segment:
    """A data file and its index. `records` are its whole episodes, `bytes` their data, mapped into memory."""

    def __init__(self, folder: Path, number: int):
        stem = folder / f"segment-{number:06d}"
        self.number = number
        self.data_path, self.index_path = stem.with_suffix(".data"), stem.with_suffix(".index")
        self.records: list[Record] = []
        # copy-on-write, since torch takes no read-only memory: a write stays in this process
        self.bytes = np.empty(0, np.uint8)
        self._line_ends: list[int] = []
        self._files: tuple[int, int] | None = None

    @property
    def data_end(self) -> int:
        return self.records[-1].end if self.records else 0

    @property
    def index_end(self) -> int:
        return self._line_ends[-1] if self.records else 0

    def disk_bytes(self) -> int:
        return self.data_end + self.index_end

    def refresh(self) -> None:
        """Take in what the writer has added since; FileNotFoundError where it has deleted the segment."""
        lines = self._unread_lines()
        size = self.data_path.stat().st_size
        for line in lines:
            record = Record.parse(line)
            if record is None or record.end > size:
                break
            self._take(record, line)
        self._map()

    def append(self, record: Record, pieces: list) -> None:
        """Data first, then the line that makes them count."""
        data, index = self._files = self._files or self._open()
        line = record.line()
        try:
            position = record.offset
            for piece in pieces:
                position = _write(data, piece, position)
            _write(index, line, self.index_end)
        except OSError:
            # a full disk: what was written of it must not lie under the next episode
            self.cut(len(self.records))
            raise
        self._take(record, line)
        self._map()

    def undamaged(self) -> int:
        """How many of its episodes have the data that their checksums promise, up to the first that has not."""
        if not self.records:
            return 0
        # read, not mapped: all of it would stay in this process's memory
        with open(self.data_path, "rb") as file:
            for count, record in enumerate(self.records):
                file.seek(record.offset)
                if zlib.crc32(file.read(record.size)) != record.crc:
                    return count
        return len(self.records)

    def torn(self, layout: Layout) -> tuple[int, int]:
        """(steps, bytes) behind the last whole episode: what a crash has cut short, as far as can be told."""
        size = self.data_path.stat().st_size
        lines = self._unread_lines() if self.index_path.exists() else []
        lost = {record.offset: record.steps for line in lines if (record := Record.parse(line))}
        position = self.data_end
        with open(self.data_path, "rb") as file:
            while position < size:
                file.seek(position)
                header = file.read(_HEADER.size)
                if len(header) < _HEADER.size or not header.startswith(_MARK):
                    break
                lost[position] = _HEADER.unpack(header)[1]
                position += layout.block_bytes(lost[position])
        return sum(lost.values()), max(size - self.data_end, 0)

    def forget(self, count: int) -> None:
        """All but the first `count` episodes; the files stay as they are."""
        del self.records[count:], self._line_ends[count:]

    def cut(self, count: int) -> None:
        """Keep the first `count` episodes and the files no longer than they are; nobody may be reading the others."""
        self.forget(count)
        if not self.records:
            self.delete()
            return
        os.truncate(self.index_path, self.index_end)
        os.truncate(self.data_path, self.data_end)
        self._map()

    def flush(self) -> None:
        """Onto the disk; the index last."""
        for file in self._files or ():
            os.fsync(file)

    def close(self) -> None:
        """Flush, and let go of what is only needed for writing."""
        self.flush()
        for file in self._files or ():
            os.close(file)
        self._files = None

    def delete(self) -> None:
        """The index first: without it the data count as gone. Maps of other processes stay valid."""
        self.close()
        self.index_path.unlink(missing_ok=True)
        self.data_path.unlink(missing_ok=True)

    def _open(self) -> tuple[int, int]:
        flags = os.O_RDWR | (0 if self.records else os.O_CREAT | os.O_TRUNC)
        return os.open(self.data_path, flags, 0o644), os.open(self.index_path, flags, 0o644)

    def _unread_lines(self) -> list[bytes]:
        with open(self.index_path, "rb") as file:
            file.seek(self.index_end)
            return file.read().splitlines(keepends=True)

    def _take(self, record: Record, line: bytes) -> None:
        self._line_ends.append(self.index_end + len(line))
        self.records.append(record)

    def _map(self) -> None:
        if len(self.bytes) != self.data_end:
            self.bytes = np.asarray(np.memmap(self.data_path, np.uint8, "c", shape=(self.data_end,)))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def checksum(pieces: list) -> int:
    """Of the pieces, one after another."""
    total = 0
    for piece in pieces:
        total = zlib.crc32(piece, total)
    return total


def segment_numbers(folder: Path, suffix: str) -> list[int]:
    """Of the segments that have such a file, ascending."""
    return sorted(int(path.stem.removeprefix("segment-")) for path in folder.glob(f"segment-*{suffix}"))


def _write(file: int, piece, position: int) -> int:
    """All of it, at `position`; returns where it ends."""
    view = memoryview(piece)
    while len(view):
        written = os.pwrite(file, view, position)
        view, position = view[written:], position + written
    return position


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
