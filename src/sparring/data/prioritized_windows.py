"""PrioritizedWindows: windows that taught the most are drawn more often (Schaul et al., 2016)."""

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDict

from sparring.data.episodes import EpisodeStore
from sparring.data.sizes import check_whole
from sparring.data.windows import Memory, Window, WindowReader, check_memory, mark_draw
from sparring.errors import UserError

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
