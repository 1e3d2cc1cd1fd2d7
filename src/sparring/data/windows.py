"""Windows: slices of time [B, L] from stored episodes, for training policies and models with a memory.

A window never crosses the end of an episode. A shorter one is padded, and `mask` is true only at steps to learn from.
With `burn_in` = k, a batch has k more columns in front that only update the memory: `burn_in` is true at those with a
step, and learning always starts in column k. `is_first` is true where the memory must be cleared: at the start of an
episode, and at the start of a window whose memory is neither stored nor carried over.
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
# (episode number, step) of a stream without an episode
_NO_EPISODE = (-1, 0)


class _Window(NamedTuple):
    """Steps `first` to `end` of an episode, for column `at` of a batch; empty by default."""

    # the location of the episode, which stays valid after deletion, and the offsets of its columns
    segment: Segment | None = None
    record: EpisodeRecord | None = None
    offsets: dict[str, int] = {}
    first: int = 0
    end: int = 0
    at: int = 0

    def prefetch(self, columns: list[EpisodeColumn]) -> None:
        if self.end > self.first:
            for column in columns:
                self.segment.prefetch(*self._bytes(column))

    def verify(self) -> None:
        if self.segment is not None and self.record is not None:
            self.segment.verify(self.record)

    def copy(self, row: np.ndarray, column: EpisodeColumn) -> None:
        """Copy the steps into a row of bytes, with zeros before and after them."""
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
    """Copies windows from mapped files into a batch, in a single copy. memory=None: the memory is carried over."""

    def __init__(self, length: int, burn_in: int, memory: Memory | None, keys: Sequence[str] | None):
        check_whole("length", length)
        check_whole("burn_in", burn_in, least=0)
        if memory not in (None, *get_args(Memory)):
            raise ValueError(f"memory={memory!r}: expected 'stored' or 'rebuilt'")
        self.length, self.burn_in, self.clears_memory = length, burn_in, memory == "rebuilt"
        self.keys = None if keys is None else frozenset(keys)

    def columns(self, store: EpisodeStore) -> list[EpisodeColumn]:
        """The requested columns, in the order of the store's layout."""
        if store.layout is None:
            raise _no_episode(store)
        columns, wanted = store.layout.columns, self.keys
        known = [column.name for column in columns] + [f"next/{column.name}" for column in columns if column.extra]
        missing = sorted((wanted or set()) - set(known))
        if missing:
            raise UserError(f"'{store.folder}' has no {', '.join(missing)}; found {', '.join(known)}")
        return [c for c in columns if wanted is None or c.name in wanted or f"next/{c.name}" in wanted]

    def window(self, store: EpisodeStore, episode: int, start: int) -> _Window:
        """`length` steps of an episode from `start` on, and `burn_in` steps before."""
        segment, record = store.locate(episode)
        first, end = max(start - self.burn_in, 0), min(start + self.length, record.steps)
        at = self.burn_in - (start - first)
        return _Window(segment, record, store.layout.offsets(record.steps), first, end, at)

    def read(self, store: EpisodeStore, windows: Sequence[_Window]) -> TensorDict:
        """The batch [B, k+L]; all windows have the columns of `store`."""
        size, columns = self.burn_in + self.length, self.columns(store)
        for window in windows:
            window.prefetch(columns)
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
    """Random windows from the whole store: `sample(batch_size, generator) -> [B, k+L]`.

    A step is drawn uniformly from all steps, and a window is placed randomly around it, then shifted to lie within the
    episode. Windows are therefore full if the episode is long enough, a step near the end of an episode is drawn at
    least half as often as one in the middle, and long episodes are drawn more often than short ones.

    memory=stored: the memory before a window is `memory/*` in its first column. rebuilt: the memory starts empty
    (`is_first`), and `burn_in` steps update it. keys: the columns to read (None: all). newest: read only this number of
    newest episodes (None: all).
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
        """Draw windows; a function of the generator and the store."""
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
        """Raise if the store is empty, or has no memory although memory=stored."""
        if not len(self.store):
            raise _no_episode(self.store)
        names = [column.name for column in self.reader.columns(self.store)]
        if self.memory == "stored" and not any(name.startswith("memory/") for name in names):
            raise UserError(
                f"memory=stored needs a 'memory/...' key; read from '{self.store.folder}': {', '.join(names)}. "
                "Record it, add it to keys, or use memory=rebuilt with a burn_in"
            )


class SequentialWindows:
    """Complete episodes in time order, so that a memory can be carried over from batch to batch.

    One iteration is one pass over the store in batches [B, L], each step exactly once. Row b is a stream: consecutive
    windows of one episode, then of the next one. The memory after a batch belongs to the same rows of the next batch;
    `is_first` marks where to clear it. Streams without further episodes yield empty rows (`mask` false). Every pass has
    a new order of episodes. Episodes appended during a pass are part of the next one; deleted ones are skipped. An
    interrupted pass continues where it stopped, also from a `state_dict`.
    """

    def __init__(
        self, store: EpisodeStore, length: int, batch_size: int, seed: int = 0, keys: Sequence[str] | None = None
    ):
        check_whole("batch_size", batch_size)
        self.store, self.batch_size, self.seed = store, batch_size, seed
        self.reader = _WindowReader(length, burn_in=0, memory=None, keys=keys)
        self._passes = 0
        # numbers of the episodes that no stream has begun
        self._waiting: list[int] = []
        # per stream: (number of its episode, next step)
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
        # reversed, because streams pop from the end
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
    """Draws each row of a batch from one of several sources, by weight:
    `MixedWindows({random: 0.5, explorers: 0.3, newest: 0.2}).sample(batch_size, generator)`.

    The source of each row is drawn independently, so that even small weights get their share in expectation. `source`
    is its index among the sources. An empty source with a weight above 0 is an error.
    """

    def __init__(self, sources: Mapping[ShuffledWindows, float]):
        self.sources = tuple(sources)
        for source in self.sources:
            if not isinstance(source, ShuffledWindows):
                raise UserError(f"expected ShuffledWindows and their weights; got {type(source).__name__}")
        self.weights = torch.tensor(list(sources.values()), dtype=torch.float64)
        if not self.sources or (self.weights < 0).any() or not 0 < float(self.weights.sum()) < float("inf"):
            raise UserError(f"expected weights >= 0, and at least one > 0; got {self.weights.tolist()}")
        kinds = {(s.reader.length, s.reader.burn_in, s.reader.clears_memory) for s in self.sources}
        if len(kinds) > 1:
            got = f"(length, burn_in, rebuilt): {kinds}"
            raise UserError(f"all sources must have the same length, burn_in and kind of memory; got {got}")
        keys = {s.reader.keys for s in self.sources}
        if len(keys) > 1:
            got = " and ".join("all" if of is None else ", ".join(sorted(of)) for of in keys)
            raise UserError(f"all sources must have the same keys; got {got}")

    def sample(self, batch_size: int, generator: torch.Generator) -> TensorDict:
        check_whole("batch_size", batch_size)
        used = [source for source, weight in zip(self.sources, self.weights.tolist(), strict=True) if weight > 0]
        self._check_columns(used)
        # [B], sorted, since the order of rows does not matter: each source is then sampled once
        source = torch.multinomial(self.weights, batch_size, replacement=True, generator=generator).sort().values
        counts = torch.bincount(source, minlength=len(self.sources)).tolist()
        windows = []
        for sampler, count in zip(self.sources, counts, strict=True):
            windows += sampler.pick(count, generator) if count else []
        batch = used[0].reader.read(used[0].store, windows)
        # [B] -> [B, k+L]; a copy, since an expanded tensor cannot be pinned for a GPU
        batch["source"] = source[:, None].expand(batch.batch_size).contiguous()
        return batch

    def _check_columns(self, used: list[ShuffledWindows]) -> None:
        """Raise if columns differ; checked for each batch, because a source gets its columns with its first episode."""
        layouts = {str(s.store.folder): set(s.reader.columns(s.store)) for s in used}
        common = set.intersection(*layouts.values())
        other = {f"{folder}: {c.name} {c.dtype} {list(c.shape)}" for folder, cs in layouts.items() for c in cs - common}
        if other:
            raise UserError(f"the sources differ in {'; '.join(sorted(other))}; set keys=[...] to common keys")


def _no_episode(store: EpisodeStore) -> UserError:
    return UserError(f"'{store.folder}' has no episodes; record some, then refresh()")
