"""Windows of episodes: shuffled, sequential, and mixed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from tensordict import TensorDict

from sparring.data.buffer import check_whole
from sparring.data.episode_files import Column, Record
from sparring.data.episode_segment import Segment
from sparring.data.episodes import EpisodeStore
from sparring.errors import UserError

# ---- Windows: slices of time [B, L] out of stored episodes, for training through a memory.
#
# A window never crosses the end of an episode. Where it is shorter than L (the whole episode is, or its last steps are
# left) it is filled up, and `mask` is true only at steps to learn from. With `burn_in` = k a batch has k more
# columns in front, for bringing the memory up to date without learning: `burn_in` is true at those that hold a step.
# Column k is always where learning starts. `is_first` is true where the memory is to be cleared: at the start of an
# episode, and at the first step of a window whose memory is neither stored nor carried.


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


# ---- SequentialWindows: whole episodes in time order, window after window, so that a memory can be carried along.


_NOWHERE = (-1, 0)


class SequentialWindows:
    """Iterating gives one pass over the store in batches [B, L]; every step is served exactly once in it.

    Row b is a stream: its windows follow one another through an episode, and then through the next one. The memory
    after one batch enters the same rows of the following one; `is_first` tells where it is to be cleared. Towards the
    end of a pass streams run out of episodes: their rows are empty (`mask` false).

    The order of the episodes is a new one in every pass. Episodes appended during a pass come in the next one; those
    deleted are skipped. A pass that was interrupted goes on where it stopped, also from a `state_dict`. Whoever makes
    batches ahead of their use keeps the state after each of them, as BatchBuilder does.
    """

    def __init__(
        self, store: EpisodeStore, length: int, batch_size: int, seed: int = 0, keys: Sequence[str] | None = None
    ):
        check_whole("batch_size", batch_size)
        self.store, self.batch_size, self.seed = store, batch_size, seed
        self.reader = WindowReader(length, burn_in=0, memory=None, keys=keys)
        self._passes = 0
        # numbers of the episodes that no stream has begun yet
        self._waiting: list[int] = []
        # of each stream: (number of its episode, its next step)
        self._streams = [_NOWHERE] * batch_size
        self._under_way = False

    def __iter__(self) -> Iterator[TensorDict]:
        if not self._under_way:
            self._begin()
        while windows := self._advance():
            yield self.reader.read(windows)

    def state_dict(self) -> dict:
        return {
            "passes": self._passes,
            "waiting": list(self._waiting),
            "streams": [list(stream) for stream in self._streams],
            "under_way": self._under_way,
        }

    def load_state_dict(self, state: dict) -> None:
        self._passes, self._waiting, self._under_way = state["passes"], list(state["waiting"]), state["under_way"]
        self._streams = [tuple(stream) for stream in state["streams"]]

    def _begin(self) -> None:
        check_not_empty(self.store)
        order = np.random.default_rng([self.seed, self._passes]).permutation(self.store.numbers)
        # taken from the end
        self._waiting = order[::-1].tolist()
        self._streams = [_NOWHERE] * self.batch_size
        self._under_way = True

    def _advance(self) -> list[Window]:
        """The next window of every stream; none at the end of a pass."""
        with self.store.lock:
            windows = [self._next_of(b) for b in range(self.batch_size)]
        if any(window.store is not None for window in windows):
            return windows
        self._under_way = False
        self._passes += 1
        return []

    def _next_of(self, b: int) -> Window:
        number, step = self._streams[b]
        while True:
            episode = self.store.position(number)
            if episode is not None and step < self.store.locate(episode)[1].steps:
                self._streams[b] = (number, step + self.reader.length)
                return Window(self.store, *self.store.locate(episode), step)
            if not self._waiting:
                self._streams[b] = _NOWHERE
                return Window(None, None, None, 0)
            number, step = self._waiting.pop(), 0


# ---- PrioritizedWindows: windows that taught the most are drawn more often (Schaul et al., 2016).


# so that nothing is given up for ever
_LEAST = 1e-6
# of every window: a name for ever, the number of its episode, its first step, its priority
_FIELDS = np.dtype([("index", "i8"), ("number", "i8"), ("start", "i8"), ("priority", "f8")])


class PrioritizedWindows:
    """`sample` draws window i with probability p_i^alpha / sum; `update(index, priority)` sets p_i.

    Every episode is cut into windows of `length` steps, the last one pushed back into it. A batch also has `index` and
    `weight` = (W * probability)^-beta over its largest in the batch, of W windows: multiplied into a loss, it makes up
    for the uneven drawing (wholly at beta = 1). New windows have the highest priority given so far.
    """

    def __init__(
        self,
        store: EpisodeStore,
        length: int,
        burn_in: int = 0,
        memory: Memory = "rebuilt",
        keys: Sequence[str] | None = None,
        alpha: float = 0.6,
        beta: float = 0.4,
    ):
        self.store, self.memory = store, memory
        self.reader = WindowReader(length, burn_in, memory, keys)
        self.alpha, self.beta = alpha, beta
        self._highest, self._next_index = 1.0, 0
        # [W]
        self._windows = np.empty(0, _FIELDS)
        # the store's episodes that these are windows of
        self._numbers: np.ndarray | None = None

    def __len__(self) -> int:
        """How many windows there are."""
        with self.store.lock:
            self._follow_store()
            return len(self._windows)

    def sample(self, batch_size: int, generator: torch.Generator) -> TensorDict:
        check_whole("batch_size", batch_size)
        windows = self.pick(batch_size, generator)
        batch = self.reader.read(windows)
        mark_draw(batch, windows)
        return batch

    def pick(self, count: int, generator: torch.Generator) -> list[Window]:
        with self.store.lock:
            check_memory(self.store, self.reader, self.memory)
            self._follow_store()
            drawn, weight = self._draw(count, generator)
            episodes = np.searchsorted(self.store.numbers, drawn["number"]).tolist()
            where = [self.store.locate(episode) for episode in episodes]
        columns = (column.tolist() for column in (drawn["start"], weight, drawn["index"]))
        return [Window(self.store, *at, *rest) for at, *rest in zip(where, *columns, strict=True)]

    def _draw(self, count: int, generator: torch.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Windows and their weights."""
        mass = (self._windows["priority"] + _LEAST) ** self.alpha
        ends = np.cumsum(mass)
        drawn = torch.rand(count, generator=generator, dtype=torch.float64).numpy() * ends[-1]
        i = np.minimum(np.searchsorted(ends, drawn, side="right"), len(ends) - 1)
        weight = (len(ends) * mass[i] / ends[-1]) ** -self.beta
        return self._windows[i], weight / weight.max()

    def update(self, index, priority) -> None:
        """Priorities of the windows with these indices; those that were deleted meanwhile are passed over.

        `index` as a batch has it, [B, k+L], or one of each window, [B] or [B, 1]. `priority` is one of each window, [B]
        or [B, 1], or one of each step, [B, L] or [B, k+L]: then the largest of a window counts.
        """
        # also as a loss gives them: on a GPU, with a gradient
        index = torch.as_tensor(index).cpu().numpy()
        priority = torch.as_tensor(priority).detach().cpu().double().numpy()
        index, priority = _one_each(index, priority)
        if not (np.isfinite(priority) & (priority >= 0)).all():
            raise UserError(f"priorities must be finite and 0 or more, got {priority[:8].tolist()}")
        with self.store.lock:
            self._follow_store()
            i = np.searchsorted(self._windows["index"], index)
            known = np.isin(index, self._windows["index"])
            self._windows["priority"][i[known]] = priority[known]
            self._highest = max(self._highest, float(priority.max(initial=0)))

    def state_dict(self) -> dict:
        columns = {name: torch.from_numpy(self._windows[name].copy()) for name in _FIELDS.names}
        return {"highest": self._highest, "next_index": self._next_index, "windows": columns}

    def load_state_dict(self, state: dict) -> None:
        self._highest, self._next_index = state["highest"], state["next_index"]
        self._windows = np.empty(len(state["windows"]["index"]), _FIELDS)
        for name, column in state["windows"].items():
            self._windows[name] = column.numpy()
        self._numbers = None

    def _follow_store(self) -> None:
        """Windows of new episodes come, those of deleted ones go."""
        numbers = self.store.numbers
        if numbers is self._numbers:
            return
        kept = self._windows[np.isin(self._windows["number"], numbers)]
        newest = kept["number"].max(initial=-1)
        new = np.flatnonzero(numbers > newest)
        self._windows = np.concatenate([kept, *(self._windows_of(i) for i in new.tolist())])
        self._numbers = numbers

    def _windows_of(self, i: int) -> np.ndarray:
        record, length = self.store.locate(i)[1], self.reader.length
        starts = np.minimum(np.arange(0, record.steps, length), max(record.steps - length, 0))
        windows = np.empty(len(starts), _FIELDS)
        windows["index"] = np.arange(len(starts)) + self._next_index
        windows["number"], windows["start"], windows["priority"] = record.number, starts, self._highest
        self._next_index += len(starts)
        return windows


def _one_each(index: np.ndarray, priority: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[B] each."""
    shapes, rows = f"index {list(index.shape)}, priority {list(priority.shape)}", index.shape[:1] == priority.shape[:1]
    if not rows or not {index.ndim, priority.ndim} <= {1, 2} or 0 in (index.size, priority.size):
        raise UserError(f"expected one index [B] and one priority [B], or [B, steps], of each window; got {shapes}")
    index, priority = index.reshape(len(index), -1), priority.reshape(len(priority), -1)
    if (index != index[:, :1]).any():
        raise UserError(f"a row of index [B, steps] names one window, but it holds several; got {shapes}")
    return index[:, 0], priority.max(axis=1)


# ---- MixedWindows: each row of a batch from one of several sources, by weight.


Sampler = ShuffledWindows | PrioritizedWindows


class MixedWindows:
    """`MixedWindows({random: 0.5, explorers: 0.3, newest: 0.2}).sample(batch_size, generator)`.

    The source of every row is drawn by itself, so a batch holds each weight's share in expectation, however small.
    `source` is its place among the sources; `weight` and `index` are those of a prioritised source, else 1 and -1.
    A source without a step is an error while its weight is above 0.
    """

    def __init__(self, sources: Mapping[Sampler, float]):
        self.sources = tuple(sources)
        others = [type(source).__name__ for source in self.sources if not isinstance(source, Sampler)]
        if others:
            raise UserError(f"expected ShuffledWindows or PrioritizedWindows and their weights; got {others[0]}")
        self.weights = torch.tensor(list(sources.values()), dtype=torch.float64)
        if not self.sources or (self.weights < 0).any() or not 0 < float(self.weights.sum()) < float("inf"):
            raise UserError(f"weights must be 0 or more, and one above 0; got {self.weights.tolist()}")
        kinds = {(s.reader.length, s.reader.burn_in, s.reader.clears_memory) for s in self.sources}
        if len(kinds) > 1:
            raise UserError(
                f"all sources must have one length, burn_in and kind of memory; got (length, burn_in, rebuilt): {kinds}"
            )
        keys = {s.reader.keys for s in self.sources}
        if len(keys) > 1:
            told = " and ".join("all" if of is None else ", ".join(sorted(of)) for of in keys)
            raise UserError(f"all sources must be asked for the same keys; got {told}")

    def sample(self, batch_size: int, generator: torch.Generator) -> TensorDict:
        check_whole("batch_size", batch_size)
        self._check_columns()
        # [B], sorted: the order of rows says nothing, and each source is asked once
        source = torch.multinomial(self.weights, batch_size, replacement=True, generator=generator).sort().values
        counts = torch.bincount(source, minlength=len(self.sources)).tolist()
        windows = []
        for sampler, count in zip(self.sources, counts, strict=True):
            windows += sampler.pick(count, generator) if count else []
        batch = self.sources[0].reader.read(windows)
        set_rows(batch, "source", source)
        mark_draw(batch, windows)
        return batch

    def _check_columns(self) -> None:
        """Rows of one batch need the same columns; a source may have got its first episode only just now."""
        used = [s for s, weight in zip(self.sources, self.weights.tolist(), strict=True) if weight > 0]
        layouts = {str(s.store.folder): set(s.reader.columns(s.store)) for s in used}
        common = set.intersection(*layouts.values())
        other = {f"{folder}: {c.name} {c.dtype} {list(c.shape)}" for folder, cs in layouts.items() for c in cs - common}
        if other:
            raise UserError(f"the sources differ in {'; '.join(sorted(other))}; read common keys only, with keys=[...]")
