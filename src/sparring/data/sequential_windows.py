"""SequentialWindows: whole episodes in time order, window after window, so that a memory can be carried along."""

from collections.abc import Iterator, Sequence

import numpy as np
from tensordict import TensorDict

from sparring.data.episodes import EpisodeStore
from sparring.data.sizes import check_whole
from sparring.data.windows import Window, WindowReader, check_not_empty

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
