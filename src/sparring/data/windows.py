"""Windows: slices of time [B, L] out of stored episodes, for training through a memory.

A window never crosses the end of an episode. Where it is shorter than L (the whole episode is, or its last steps are
left) it is filled up, and `mask` is true only at steps to learn from. With `burn_in` = k a batch has k more
columns in front, for bringing the memory up to date without learning: `burn_in` is true at those that hold a step.
Column k is always where learning starts. `is_first` is true where the memory is to be cleared: at the start of an
episode, and at the first step of a window whose memory is neither stored nor carried.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from tensordict import TensorDict

from sparring.data.episode_files import Column, Record
from sparring.data.episode_segment import Segment
from sparring.data.episodes import EpisodeStore
from sparring.data.sizes import check_whole
from sparring.errors import UserError

Memory = Literal["stored", "rebuilt"]


class Window(NamedTuple):
    """Steps of one episode from `start` on, none without a store; `weight` and `index` are of a prioritised draw."""

    store: EpisodeStore | None
    # where the episode is; they stay valid when it is deleted
    segment: Segment | None
    record: Record | None
    start: int
    weight: float = 1.0
    index: int = -1


class WindowReader:
    """Copies windows out of their files: the one copy between disk and batch. memory=None: it is carried along."""

    def __init__(self, length: int, burn_in: int, memory: Memory | None, keys: Sequence[str] | None):
        check_whole("length", length)
        check_whole("burn_in", burn_in, least=0)
        if memory not in (None, *get_args(Memory)):
            raise ValueError(f"memory={memory!r}: expected 'stored' or 'rebuilt'")
        clears_memory = memory == "rebuilt"
        self.length, self.burn_in, self.clears_memory = length, burn_in, clears_memory
        self.keys = None if keys is None else frozenset(keys)

    def columns(self, store: EpisodeStore) -> list[Column]:
        """Those asked for, in the order of the store's layout."""
        if store.layout is None:
            raise _no_episode(store)
        known = [column.name for column in store.layout.columns]
        known += [f"next/{column.name}" for column in store.layout.columns if column.extra]
        missing = sorted((self.keys or set()) - set(known))
        if missing:
            raise UserError(f"'{store.folder}' has no {', '.join(missing)}; it has {', '.join(known)}")
        return [column for column in store.layout.columns if self._wanted(column)]

    def read(self, windows: Sequence[Window]) -> TensorDict:
        """[B, k+L]; at least one of the windows has steps."""
        size = self.burn_in + self.length
        spans = [self._span(window) for window in windows]
        columns = self.columns(next(w.store for w in windows if w.store is not None))
        for span in spans:
            span.expect(columns)
        batch = TensorDict({}, [len(windows), size])
        for column in columns:
            values = torch.empty(len(windows), size + column.extra, *column.shape, dtype=_torch_dtype(column))
            # [B, bytes]
            rows = values.flatten(1).numpy().view(np.uint8)
            for row, span in zip(rows, spans, strict=True):
                span.copy(row, column)
            self._set(batch, column, values)
        return self._mark(batch, spans)

    def _span(self, window: Window) -> "_Span":
        if window.store is None:
            return _Span(None, 0, {}, 0, 0, self.burn_in)
        record = window.record
        first = max(window.start - self.burn_in, 0)
        end = min(window.start + self.length, record.steps)
        at = self.burn_in - (window.start - first)
        return _Span(window.segment, record.offset, window.store.layout.offsets(record.steps), first, end, at)

    def _wanted(self, column: Column) -> bool:
        return self.keys is None or column.name in self.keys or f"next/{column.name}" in self.keys

    def _set(self, batch: TensorDict, column: Column, values: torch.Tensor) -> None:
        """An observation and the next one are two views of the same rows."""
        key = tuple(column.name.split("/"))
        size = self.burn_in + self.length
        if self.keys is None or column.name in self.keys:
            batch.set(key, values[:, :size])
        if column.extra and (self.keys is None or f"next/{column.name}" in self.keys):
            batch.set(("next", *key), values[:, 1:])

    def _mark(self, batch: TensorDict, spans: list["_Span"]) -> TensorDict:
        # [B, 1] each
        first, end, column = torch.tensor([(s.first, s.end, s.at) for s in spans]).T.unsqueeze(-1)
        # [1, k+L]
        at = torch.arange(batch.batch_size[1])[None]
        holds_step = (at >= column) & (at < column + end - first)
        batch["mask"] = holds_step & (at >= self.burn_in)
        if self.burn_in:
            batch["burn_in"] = holds_step & (at < self.burn_in)
        batch["is_first"] = (at == column) & ((first == 0) | self.clears_memory)
        return batch


class _Span(NamedTuple):
    """Steps `first` to `end` of an episode, which go to column `at` of a batch."""

    segment: Segment | None
    # where in the segment the episode is, and where in the episode each column
    offset: int
    offsets: dict[str, int]
    first: int
    end: int
    at: int

    def expect(self, columns: list[Column]) -> None:
        if self.end > self.first:
            for column in columns:
                self.segment.expect(*self._bytes(column))

    def copy(self, row: np.ndarray, column: Column) -> None:
        """Into a row of bytes, with zeros around them."""
        if self.end == self.first:
            row[:] = 0
            return
        start, size = self._bytes(column)
        low = self.at * column.row_bytes
        row[low : low + size] = self.segment.bytes[start : start + size]
        if size < len(row):
            row[:low] = 0
            row[low + size :] = 0

    def _bytes(self, column: Column) -> tuple[int, int]:
        """(start, size) in the segment."""
        start = self.offset + self.offsets[column.name] + self.first * column.row_bytes
        return start, (self.end - self.first + column.extra) * column.row_bytes


class ShuffledWindows:
    """Windows from anywhere in the store: `sample(batch_size, generator) -> [B, k+L]`.

    A step is drawn uniformly from all steps, and the window laid around it at random, pushed back into the episode
    where it would stick out. So windows are full wherever the episode is long enough, a step near the end of an episode
    is seen at least half as often as one in the middle, and long episodes are drawn more often than short ones.

    memory=stored: the memory that enters a window is `memory/*` in its first column. rebuilt: it is empty there
    (`is_first`), and `burn_in` steps bring it up to date. keys: what to read; None: all that is stored. newest: from so
    many of the newest episodes only; None: from all.
    """

    def __init__(
        self,
        store: EpisodeStore,
        length: int,
        burn_in: int = 0,
        memory: Memory = "rebuilt",
        keys: Sequence[str] | None = None,
        newest: int | None = None,
    ):
        if newest is not None:
            check_whole("newest", newest)
        self.store = store
        self.memory, self.newest = memory, newest
        self.reader = WindowReader(length, burn_in, memory, keys)

    def sample(self, batch_size: int, generator: torch.Generator) -> TensorDict:
        check_whole("batch_size", batch_size)
        return self.reader.read(self.pick(batch_size, generator))

    def pick(self, count: int, generator: torch.Generator) -> list[Window]:
        """Which windows; the same for the same generator and store."""
        with self.store.lock:
            check_memory(self.store, self.reader, self.memory)
            length, ends = self.reader.length, self.store.ends
            older = max(len(ends) - self.newest, 0) if self.newest else 0
            first = int(ends[older - 1]) if older else 0
            step = first + torch.randint(self.store.num_steps - first, (count,), generator=generator).numpy()
            before = torch.randint(length, (count,), generator=generator).numpy()
            episode = np.searchsorted(ends, step, side="right")
            steps = np.diff(ends, prepend=0)[episode]
            start = step - (ends[episode] - steps) - before
            start = np.clip(start, 0, np.maximum(steps - length, 0))
            where = map(self.store.locate, episode.tolist())
            return [Window(self.store, *at, first) for at, first in zip(where, start.tolist(), strict=True)]


def mark_draw(batch: TensorDict, windows: Sequence[Window]) -> None:
    """Add `index` and `weight` of a prioritised draw."""
    set_rows(batch, "index", torch.tensor([window.index for window in windows]))
    set_rows(batch, "weight", torch.tensor([window.weight for window in windows]))


def set_rows(batch: TensorDict, key: str, values: torch.Tensor) -> None:
    """[B] -> [B, k+L]; a copy, since a row of one number repeated cannot be pinned for a GPU."""
    batch[key] = values[:, None].expand(batch.batch_size).contiguous()


def check_not_empty(store: EpisodeStore) -> None:
    if not len(store):
        raise _no_episode(store)


def _no_episode(store: EpisodeStore) -> UserError:
    return UserError(f"'{store.folder}' holds no episode; record some, or refresh() after they were recorded")


def check_memory(store: EpisodeStore, reader: WindowReader, memory: Memory) -> None:
    """There is something to read, and the memory if it is to be read."""
    check_not_empty(store)
    names = [column.name for column in reader.columns(store)]
    if memory == "stored" and not any(name.startswith("memory/") for name in names):
        raise UserError(
            f"memory=stored needs a 'memory/...' key, but '{store.folder}' gives {', '.join(names)}; "
            "record it, ask for it in keys, or use memory=rebuilt with a burn_in"
        )


def _torch_dtype(column: Column) -> torch.dtype:
    return torch.from_numpy(np.empty(0, column.dtype)).dtype
