"""How episodes lie on disk: segments, each a data file and an index, both only ever appended to.

folder/
  meta.json              the columns: name, dtype, shape of a row; and a checksum of that
  segment-000000.data    episodes one after another: a header with the number of steps, then column after column
  segment-000000.index   a line for every whole episode: checksum, then JSON
  segment-000000.deleted what was the index of a segment whose data are just being deleted
  damaged/               what a repair has put aside
  writer.lock            held by the one process that writes

A line of the index is written after its data: what is cut short by a crash has no line, and is never read. A line also
holds the checksum of its data, which tells after a power cut whether they reached the disk, and later whether they are
still what was written: it is compared before an episode is first read. Numbers and offsets follow each other without
gaps, so that no line can be missing or moved unseen. All columns of a segment share one file, because a memory map
keeps its file open and a process may open only about a thousand.
"""

import json
import struct
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from sparring.errors import UserError
from sparring.processes.files import write_whole

META = "meta.json"
_FORMAT = 1
# columns start at multiples of it, so that any dtype can be viewed in place
_ALIGNMENT = 64
# at the start of every episode: a mark and its number of steps
_HEADER = struct.Struct("<8sQ")
_MARK = b"episode\n"
HEADER_BYTES = _HEADER.size


@dataclass(frozen=True)
class EpisodeColumn:
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


class EpisodeLayout:
    """Which columns an episode has and where each of them lies in its block."""

    def __init__(self, columns: Iterable[EpisodeColumn]):
        self.columns = tuple(sorted(columns, key=lambda column: column.name))
        self._places: dict[int, tuple[dict[str, int], int]] = {}

    def offsets(self, steps: int) -> dict[str, int]:
        """Where each column begins in the block of an episode."""
        return self._place(steps)[0]

    def block_bytes(self, steps: int) -> int:
        return self._place(steps)[1]

    def _place(self, steps: int) -> tuple[dict[str, int], int]:
        if steps not in self._places:
            offsets, end = {}, _aligned(HEADER_BYTES)
            for column in self.columns:
                offsets[column.name] = end
                end += _aligned((steps + column.extra) * column.row_bytes)
            self._places[steps] = offsets, end
        return self._places[steps]

    @staticmethod
    def header_steps(header: bytes) -> int | None:
        """Steps of the episode that begins with these bytes; None where none does."""
        if len(header) < HEADER_BYTES or not header.startswith(_MARK):
            return None
        return _HEADER.unpack(header)[1]

    def block(self, rows: dict[str, list[np.ndarray]], steps: int) -> list:
        """The bytes of an episode as buffers in the order in which they are written; no copies of contiguous rows."""
        pieces: list = [_HEADER.pack(_MARK, steps)]
        position = HEADER_BYTES
        for name, start in self.offsets(steps).items():
            parts = [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in rows[name]]
            pieces += [bytes(start - position), *parts]
            position = start + sum(part.nbytes for part in parts)
        return [*pieces, bytes(self.block_bytes(steps) - position)]

    def save(self, folder: Path) -> None:
        columns = [asdict(column) for column in self.columns]
        content = {"format": _FORMAT, "columns": columns, "checksum": _checksum(columns)}
        write_whole(folder / META, json.dumps(content, indent=1) + "\n", sync=True)

    @classmethod
    def load(cls, folder: Path) -> "EpisodeLayout | None":
        """None where nothing was stored yet."""
        try:
            content = json.loads((folder / META).read_text())
            kind, columns = content["format"], content["columns"]
            # earlier versions wrote none
            if "checksum" in content and content["checksum"] != _checksum(columns):
                raise ValueError("its checksum is not that of its columns")
            layout = cls(EpisodeColumn(c["name"], c["dtype"], tuple(c["shape"])) for c in columns)
            layout.block_bytes(1)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            advice = "copy it again, or from another store of the same columns"
            raise UserError(f"'{folder / META}' cannot be read ({error}); {advice}") from None
        if kind != _FORMAT:
            why = f"but this version reads format {_FORMAT}; read them with the version that wrote them"
            raise UserError(f"'{folder}' holds episodes of format {kind}, {why}")
        return layout


@dataclass(frozen=True)
class EpisodeRecord:
    """One line of an index: a whole episode."""

    number: int
    offset: int
    size: int
    steps: int
    crc: int
    info: dict
    # bytes before it that are no episode any more: a repair left them out
    gap: int = 0

    @property
    def end(self) -> int:
        return self.offset + self.size

    def follows(self, last: "EpisodeRecord | None") -> bool:
        """Whether its line may stand after that of `last`, or first in an index (None): none is missing between."""
        begins = self.offset - self.gap == (last.end if last else 0)
        return begins and (last is None or self.number == last.number + 1 or self.gap > 0 and self.number > last.number)

    def line(self) -> bytes:
        text = json.dumps(asdict(self)).encode()
        return b"%08x %s\n" % (zlib.crc32(text), text)

    @classmethod
    def parse(cls, line: bytes) -> "EpisodeRecord | None":
        """None for a line that was cut short or damaged."""
        checksum, _, text = line.removesuffix(b"\n").partition(b" ")
        if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
            return None
        return cls(**json.loads(text))


def _checksum(columns: list[dict]) -> str:
    return f"{zlib.crc32(json.dumps(columns, sort_keys=True).encode()):08x}"


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
