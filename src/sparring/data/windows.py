"""Windows: slices of time [B, L] out of stored episodes, for training through a memory.

A window never crosses the end of an episode. A shorter one is filled up, and `mask` is true only at steps to learn
from. With `burn_in` = k a batch has k more columns in front, which bring the memory up to date without learning:
`burn_in` is true at those that hold a step. Column k is always where learning starts. `is_first` is true where to clear
the memory: at the start of an episode, and of a window whose memory is neither stored nor carried.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from tensordict import TensorDict

from sparring.data.buffer import check_whole
from sparring.data.episode_files import EpisodeColumn, EpisodeRecord
from sparring.data.episode_segment import Segment
from sparring.data.episodes import EpisodeStore
from sparring.errors import UserError

Memory = Literal["stored", "rebuilt"]
# (episode number, step) of a stream that has no episode
_NO_EPISODE = (-1, 0)


class _Window(NamedTuple):
    """Steps `first` to `end` of an episode, which go to column `at` of a batch; by default none."""

    # where the episode is, which stays valid when it is deleted, and where in it each column
    segment: Segment | None = None
    record: EpisodeRecord | None = None
    offsets: dict[str, int] = {}
    first: int = 0
    end: int = 0
    at: int = 0

    def expect(self, columns: list[EpisodeColumn]) -> None:
        if self.end > self.first:
            for column in columns:
                self.segment.expect(*self._bytes(column))

    def verify(self) -> None:
        if self.segment is not None and self.record is not None:
            self.segment.verify(self.record)

    def copy(self, row: np.ndarray, column: EpisodeColumn) -> None:
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

    def _bytes(self, column: EpisodeColumn) -> tuple[int, int]:
        """(start, size) in the segment."""
        start = self.record.offset + self.offsets[column.name] + self.first * column.row_bytes
        return start, (self.end - self.first + column.extra) * column.row_bytes


class _WindowReader:
    """Copies windows out of their files: the one copy between disk and batch. memory=None: it is carried along."""

    def __init__(self, length: int, burn_in: int, memory: Memory | None, keys: Sequence[str] | None):
        check_whole("length", length)
        check_whole("burn_in", burn_in, least=0)
        if memory not in (None, *get_args(Memory)):
            raise ValueError(f"memory={memory!r}: expected 'stored' or 'rebuilt'")
        self.length, self.burn_in, self.clears_memory = length, burn_in, memory == "rebuilt"
        self.keys = None if keys is None else frozenset(keys)

    def columns(self, store: EpisodeStore) -> list[EpisodeColumn]:
        """Those asked for, in the order of the store's layout."""
        if store.layout is None:
            raise _no_episode(store)
        columns, wanted = store.layout.columns, self.keys
        known = [column.name for column in columns] + [f"next/{column.name}" for column in columns if column.extra]
        missing = sorted((wanted or set()) - set(known))
        if missing:
            raise UserError(f"'{store.folder}' has no {', '.join(missing)}; it has {', '.join(known)}")
        return [c for c in columns if wanted is None or c.name in wanted or f"next/{c.name}" in wanted]

    def window(self, store: EpisodeStore, episode: int, start: int) -> _Window:
        """`length` steps of an episode from `start` on, and `burn_in` before."""
        segment, record = store.locate(episode)
        first, end = max(start - self.burn_in, 0), min(start + self.length, record.steps)
        at = self.burn_in - (start - first)
        return _Window(segment, record, store.layout.offsets(record.steps), first, end, at)

    def read(self, store: EpisodeStore, windows: Sequence[_Window]) -> TensorDict:
        """[B, k+L]; all columns are laid out as those of `store`."""
        size, columns = self.burn_in + self.length, self.columns(store)
        for window in windows:
            window.expect(columns)
        for window in windows:
            window.verify()
        batch = TensorDict({}, [len(windows), size])
        for column in columns:
            dtype = torch.from_numpy(np.empty(0, column.dtype)).dtype
            values = torch.empty(len(windows), size + column.extra, *column.shape, dtype=dtype)
            # [B, bytes]
            rows = values.flatten(1).numpy().view(np.uint8)
            for row, window in zip(rows, windows, strict=True):
                window.copy(row, column)
            # an observation and the next one are two views of the same rows
            key = tuple(column.name.split("/"))
            if self.keys is None or column.name in self.keys:
                batch.set(key, values[:, :size])
            if column.extra and (self.keys is None or f"next/{column.name}" in self.keys):
                batch.set(("next", *key), values[:, 1:])
        return self._mark(batch, windows)

    def _mark(self, batch: TensorDict, windows: Sequence[_Window]) -> TensorDict:
        # [B, 1] each
        first, end, column = torch.tensor([(w.first, w.end, w.at) for w in windows]).T.unsqueeze(-1)
        # [1, k+L]
        at = torch.arange(batch.batch_size[1])[None]
        holds_step = (at >= column) & (at < column + end - first)
        batch["mask"] = holds_step & (at >= self.burn_in)
        if self.burn_in:
            batch["burn_in"] = holds_step & (at < self.burn_in)
        batch["is_first"] = (at == column) & ((first == 0) | self.clears_memory)
        return batch


class ShuffledWindows:
    """Windows from anywhere in the store: `sample(batch_size, generator) -> [B, k+L]`.

    A step is drawn uniformly from all steps, and the window laid around it at random, pushed back into the episode
    where it would stick out. So windows are full wherever the episode is long enough, a step near the end of an episode
    is seen at least half as often as one in the middle, and long episodes are drawn more often than short ones.

    memory=stored: the memory that enters a window is `memory/*` in its first column. rebuilt: it is empty there
    (`is_first`), and `burn_in` steps bring it up to date. keys: what to read (None: all); newest: from so many of the
    newest episodes only (None: from all).
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
        self.store, self.memory, self.newest = store, memory, newest
        self.reader = _WindowReader(length, burn_in, memory, keys)

    def sample(self, batch_size: int, generator: torch.Generator) -> TensorDict:
        check_whole("batch_size", batch_size)
        return self.reader.read(self.store, self.pick(batch_size, generator))

    def pick(self, count: int, generator: torch.Generator) -> list[_Window]:
        """Which windows; the same for the same generator and store."""
        with self.store.lock:
            self._check_memory()
            length, ends = self.reader.length, self.store.ends
            older = max(len(ends) - self.newest, 0) if self.newest else 0
            first = int(ends[older - 1]) if older else 0
            step = first + torch.randint(self.store.num_steps - first, (count,), generator=generator).numpy()
            before = torch.randint(length, (count,), generator=generator).numpy()
            episode = np.searchsorted(ends, step, side="right")
            steps = np.diff(ends, prepend=0)[episode]
            start = np.clip(step - (ends[episode] - steps) - before, 0, np.maximum(steps - length, 0))
            at = zip(episode.tolist(), start.tolist(), strict=True)
            return [self.reader.window(self.store, episode, first) for episode, first in at]

    def _check_memory(self) -> None:
        """There is something to read, and the memory if it is to be read."""
        if not len(self.store):
            raise _no_episode(self.store)
        names = [column.name for column in self.reader.columns(self.store)]
        if self.memory == "stored" and not any(name.startswith("memory/") for name in names):
            raise UserError(
                f"memory=stored needs a 'memory/...' key, but '{self.store.folder}' gives {', '.join(names)}; "
                "record it, ask for it in keys, or use memory=rebuilt with a burn_in"
            )


class SequentialWindows:
    """Whole episodes in time order, so that a memory can be carried along.

    Iterating gives one pass over the store in batches [B, L]; every step is served exactly once. Row b is a stream: its
    windows follow one another through an episode, then through the next one. The memory after a batch enters the same
    rows of the next batch; `is_first` says where to clear it. Streams that run out of episodes give empty rows (`mask`
    false). Every pass has a new order of episodes. Those appended during a pass come in the next one; those deleted are
    skipped. An interrupted pass goes on where it stopped, also from a `state_dict`.
    """

    def __init__(
        self, store: EpisodeStore, length: int, batch_size: int, seed: int = 0, keys: Sequence[str] | None = None
    ):
        check_whole("batch_size", batch_size)
        self.store, self.batch_size, self.seed = store, batch_size, seed
        self.reader = _WindowReader(length, burn_in=0, memory=None, keys=keys)
        self._passes = 0
        # numbers of the episodes that no stream has begun yet
        self._waiting: list[int] = []
        # of each stream: (number of its episode, its next step)
        self._streams: list[tuple[int, int]] = [_NO_EPISODE] * batch_size
        self._under_way = False

    def __iter__(self) -> Iterator[TensorDict]:
        if not self._under_way:
            self._begin()
        while windows := self._advance():
            yield self.reader.read(self.store, windows)

    def state_dict(self) -> dict:
        streams = [list(stream) for stream in self._streams]
        now = {"passes": self._passes, "under_way": self._under_way}
        return now | {"waiting": list(self._waiting), "streams": streams}

    def load_state_dict(self, state: dict) -> None:
        self._passes, self._waiting, self._under_way = state["passes"], list(state["waiting"]), state["under_way"]
        self._streams = [tuple(stream) for stream in state["streams"]]

    def _begin(self) -> None:
        if not len(self.store):
            raise _no_episode(self.store)
        order = np.random.default_rng([self.seed, self._passes]).permutation(self.store.numbers)
        # taken from the end
        self._waiting = order[::-1].tolist()
        self._streams, self._under_way = [_NO_EPISODE] * self.batch_size, True

    def _advance(self) -> list[_Window]:
        """The next window of every stream; none at the end of a pass."""
        with self.store.lock:
            windows = [self._next_of(b) for b in range(self.batch_size)]
        if any(window.segment is not None for window in windows):
            return windows
        self._under_way = False
        self._passes += 1
        return []

    def _next_of(self, b: int) -> _Window:
        number, step = self._streams[b]
        while True:
            episode = self.store.position(number)
            if episode is not None and step < self.store.locate(episode)[1].steps:
                self._streams[b] = (number, step + self.reader.length)
                return self.reader.window(self.store, episode, step)
            if not self._waiting:
                self._streams[b] = _NO_EPISODE
                return _Window()
            number, step = self._waiting.pop(), 0


class MixedWindows:
    """Each row of a batch from one of several sources, by weight:
    `MixedWindows({random: 0.5, explorers: 0.3, newest: 0.2}).sample(batch_size, generator)`.

    The source of every row is drawn by itself, so a batch holds each weight's share in expectation, however small.
    `source` is its place among the sources. A source without a step is an error while its weight is above 0.
    """

    def __init__(self, sources: Mapping[ShuffledWindows, float]):
        self.sources = tuple(sources)
        for source in self.sources:
            if not isinstance(source, ShuffledWindows):
                raise UserError(f"expected ShuffledWindows and their weights; got {type(source).__name__}")
        self.weights = torch.tensor(list(sources.values()), dtype=torch.float64)
        if not self.sources or (self.weights < 0).any() or not 0 < float(self.weights.sum()) < float("inf"):
            raise UserError(f"weights must be 0 or more, and one above 0; got {self.weights.tolist()}")
        kinds = {(s.reader.length, s.reader.burn_in, s.reader.clears_memory) for s in self.sources}
        if len(kinds) > 1:
            got = f"(length, burn_in, rebuilt): {kinds}"
            raise UserError(f"all sources must have one length, burn_in and kind of memory; got {got}")
        keys = {s.reader.keys for s in self.sources}
        if len(keys) > 1:
            got = " and ".join("all" if of is None else ", ".join(sorted(of)) for of in keys)
            raise UserError(f"all sources must be asked for the same keys; got {got}")

    def sample(self, batch_size: int, generator: torch.Generator) -> TensorDict:
        check_whole("batch_size", batch_size)
        used = [source for source, weight in zip(self.sources, self.weights.tolist(), strict=True) if weight > 0]
        self._check_columns(used)
        # [B], sorted: the order of rows says nothing, and each source is asked once
        source = torch.multinomial(self.weights, batch_size, replacement=True, generator=generator).sort().values
        counts = torch.bincount(source, minlength=len(self.sources)).tolist()
        windows = []
        for sampler, count in zip(self.sources, counts, strict=True):
            windows += sampler.pick(count, generator) if count else []
        batch = used[0].reader.read(used[0].store, windows)
        # [B] -> [B, k+L]; a copy, since a row of one number repeated cannot be pinned for a GPU
        batch["source"] = source[:, None].expand(batch.batch_size).contiguous()
        return batch

    def _check_columns(self, used: list[ShuffledWindows]) -> None:
        """Rows of one batch need the same columns; a source may have got its first episode only just now."""
        layouts = {str(s.store.folder): set(s.reader.columns(s.store)) for s in used}
        common = set.intersection(*layouts.values())
        other = {f"{folder}: {c.name} {c.dtype} {list(c.shape)}" for folder, cs in layouts.items() for c in cs - common}
        if other:
            raise UserError(f"the sources differ in {'; '.join(sorted(other))}; read common keys only, with keys=[...]")


def _no_episode(store: EpisodeStore) -> UserError:
    return UserError(f"'{store.folder}' holds no episode; record some, or refresh() after they were recorded")
