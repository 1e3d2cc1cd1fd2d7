"""The file format of episodes: segments, each an append-only data file and its append-only index.

folder/
  meta.json              the columns (name, dtype, shape of a row) and their checksum
  segment-000000.data    episodes in sequence: a header with the number of steps, then one column after another
  segment-000000.index   one line per complete episode: checksum, then JSON
  segment-000000.deleted the renamed index of a segment that is being deleted
  damaged/               files moved aside by a repair
  writer.lock            held by the single process that writes

A line of the index is written after its data: an episode cut short by a crash has no line and is never read. The line
contains a checksum of the data, which is compared before an episode is first read: it detects data that did not reach
the disk before a power failure, and data that changed later. Numbers and offsets have no gaps, so that missing and
moved lines are detected. All columns of a segment share one file, because a memory map keeps its file open and a
process may open only about a thousand files.
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
# columns start at multiples of this, so that any dtype can be viewed in place
_ALIGNMENT = 64
# header of every episode: a mark and the number of steps
_HEADER = struct.Struct("<8sQ")
_MARK = b"episode\n"
HEADER_BYTES = _HEADER.size


@dataclass(frozen=True)
class EpisodeColumn:
    """One key of an episode of T steps: T rows, or T+1 for an observation."""

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
    """The columns of an episode and the position of each in the bytes (block) of the episode."""

    def __init__(self, columns: Iterable[EpisodeColumn]):
        self.columns = tuple(sorted(columns, key=lambda column: column.name))
        self._places: dict[int, tuple[dict[str, int], int]] = {}

    def offsets(self, steps: int) -> dict[str, int]:
        """The start of each column in the block of an episode."""
        return self._offsets_and_end(steps)[0]

    def block_bytes(self, steps: int) -> int:
        return self._offsets_and_end(steps)[1]

    def _offsets_and_end(self, steps: int) -> tuple[dict[str, int], int]:
        if steps not in self._places:
            offsets, end = {}, _aligned(HEADER_BYTES)
            for column in self.columns:
                offsets[column.name] = end
                end += _aligned((steps + column.extra) * column.row_bytes)
            self._places[steps] = offsets, end
        return self._places[steps]

    @staticmethod
    def header_steps(header: bytes) -> int | None:
        """Number of steps in this header; None if it is not a header."""
        if len(header) < HEADER_BYTES or not header.startswith(_MARK):
            return None
        return _HEADER.unpack(header)[1]

    def block(self, rows: dict[str, list[np.ndarray]], steps: int) -> list:
        """The bytes of an episode as buffers in the order of writing; contiguous rows are not copied."""
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
        """None if no episode was stored yet."""
        try:
            content = json.loads((folder / META).read_text())
            kind, columns = content["format"], content["columns"]
            # earlier versions wrote no checksum
            if "checksum" in content and content["checksum"] != _checksum(columns):
                raise ValueError("its checksum does not match its columns")
            layout = cls(EpisodeColumn(c["name"], c["dtype"], tuple(c["shape"])) for c in columns)
            layout.block_bytes(1)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            advice = "copy it again, or from another store with the same columns"
            raise UserError(f"'{folder / META}' cannot be read ({error}); {advice}") from None
        if kind != _FORMAT:
            advice = f"expected format {_FORMAT}; read it with the version that wrote it"
            raise UserError(f"'{folder}' has episodes of format {kind}; {advice}")
        return layout


@dataclass(frozen=True)
class EpisodeRecord:
    """One line of an index: a complete episode."""

    number: int
    offset: int
    size: int
    steps: int
    crc: int
    info: dict
    # bytes before it of damaged episodes that a repair dropped
    gap: int = 0

    @property
    def end(self) -> int:
        return self.offset + self.size

    def follows(self, last: "EpisodeRecord | None") -> bool:
        """Whether its line may follow that of `last` (None: be the first), with no line missing between them."""
        adjoins = self.offset - self.gap == (last.end if last else 0)
        in_order = last is None or self.number == last.number + 1 or self.gap > 0 and self.number > last.number
        return adjoins and in_order

    def line(self) -> bytes:
        text = json.dumps(asdict(self)).encode()
        return b"%08x %s\n" % (zlib.crc32(text), text)

    @classmethod
    def parse(cls, line: bytes) -> "EpisodeRecord | None":
        """None for an incomplete or damaged line."""
        checksum, _, text = line.removesuffix(b"\n").partition(b" ")
        if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
            return None
        return cls(**json.loads(text))


def _checksum(columns: list[dict]) -> str:
    return f"{zlib.crc32(json.dumps(columns, sort_keys=True).encode()):08x}"


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
