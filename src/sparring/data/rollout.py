"""RolloutBuffer: one rollout [T, N], used once.

Every image is kept once: `observation` is [T+1, N] (the last row is where the next rollout begins), and the true last
observations of episodes that ended on the way sit in a compact list beside it. Memory is allocated on the first add
and written in place from then on.
"""

import logging
from collections.abc import Iterator

import torch
from tensordict import TensorDict

from sparring.data.buffer import check_transition
from sparring.data.row_writer import RowWriter, check_continues, leaves
from sparring.data.sizes import check_whole
from sparring.data.storage import empty, gigabytes

log = logging.getLogger(__name__)


class RolloutBuffer:
    """`add` T transitions [N], or a rollout of them, then `get` them, then `clear`.

    T is `steps`, or less where the rollout is closed early.
    """

    def __init__(self, steps: int):
        check_whole("steps", steps)
        self.steps = steps
        self.position = 0
        self._closed = False
        self._observation: TensorDict | None = None
        self._transition: TensorDict | None = None
        self._writer: RowWriter | None = None
        self._columns: dict[tuple[str, ...] | str, torch.Tensor] = {}
        # (step, env) of each true last observation, and these observations
        self.final_at: list[torch.Tensor] = []
        self.final: list[TensorDict] = []

    def __len__(self) -> int:
        """Decisions of each env that it holds."""
        return self.position

    def is_full(self) -> bool:
        return self.position == self.steps

    def add(self, td: TensorDict) -> None:
        """A transition [N] or a rollout [T, N], with `next/*`.

        Of `next/observation` only what no other row holds is kept. After `close` it must go on where the last one led
        to; without `close` it is taken to do so, for comparing each step with the next costs as much as storing it.
        """
        check_transition(td)
        if td.batch_dims == 2:
            for transition in td.unbind(0):
                self.add(transition)
            self.close(td[-1]["next"])
            return
        if self.is_full():
            raise RuntimeError(f"the rollout already holds its {self.steps} decisions; get() and clear() it first")
        if self._transition is None:
            self._allocate(td)
        if self._closed:
            self._check_continues(td["observation"])
        self._writer.write(self.position, td)
        following = td.get("next")
        done = following.get("terminated") | following.get("truncated")
        if done.any():
            ended = done.nonzero()[:, 0]
            self.final_at.append(torch.stack([torch.full_like(ended, self.position), ended]))
            # leaf by leaf: indexing a TensorDict takes several times as long
            last = TensorDict({}, [len(ended)])
            for key, value in leaves(following.get("observation")):
                last.set(key, value.index_select(0, ended))
            self.final.append(last)
        self.position += 1
        self._closed = False

    def close(self, td: TensorDict) -> None:
        """The observation [N] after the last transition: row T. There may be fewer than `steps` before it."""
        if self._observation is None:
            raise RuntimeError("there is no transition that this could follow; add() one first")
        self._observation[self.position] = td["observation"]
        self._closed = True

    def set(self, key, value: torch.Tensor) -> None:
        """Attach a column [T, N] that is worked out after the fact; it is gone with the rollout."""
        self._columns[key] = value

    @property
    def last(self) -> TensorDict:
        """`observation` after the last transition, [N]."""
        if not self._closed:
            raise RuntimeError(f"after {self.position} transitions nothing is known yet; add() and close() the rollout")
        return TensorDict({"observation": self._observation[self.position]}, self._observation.batch_size[1:])

    def get(self, flatten: bool = True, following: bool = False) -> TensorDict:
        """`[T, N]`, or `[T*N]` in time order; views, not copies. `following` adds `next/observation`, a copy."""
        self._check_complete()
        rollout = self._transition.copy() if self.is_full() else self._transition[: self.position]
        rollout.set("observation", self._observation[: self.position])
        for key, value in self._columns.items():
            rollout.set(key, value)
        if following:
            rollout["next"] = rollout["next"].copy().set("observation", self._following())
        return rollout.flatten(0, 1) if flatten else rollout

    def rollout(self) -> TensorDict:
        """`[T, N]`, with the columns that were `set`."""
        return self.get(flatten=False)

    def windows(self, length: int, following: bool = False) -> Iterator[TensorDict]:
        """Slices of time `[length, N]`, the oldest first; a shorter rest is left out."""
        check_whole("length", length)
        rollout = self.get(flatten=False, following=following)
        for first in range(0, self.position - length + 1, length):
            yield rollout[first : first + length]

    def sample(self, batch_size: int, generator: torch.Generator | None = None) -> TensorDict:
        """`[B]` transitions with `next/observation`, each stored one as likely as the others."""
        flat = self.get()
        index = torch.randint(len(flat), (batch_size,), generator=generator).to(flat["next", "reward"].device)
        batch = flat[index]
        batch["next", "observation"] = self._following(index)
        return batch

    def finals(self) -> tuple[torch.Tensor, TensorDict] | None:
        """(step, env) [2, F] of the episodes that ended, and their true last observations [F]."""
        return (torch.cat(self.final_at, 1), torch.cat(self.final)) if self.final else None

    def start(self) -> None:
        """A rollout begins."""
        self.clear()

    def clear(self) -> None:
        self.position, self._closed = 0, False
        self.final_at, self.final, self._columns = [], [], {}

    def bytes(self) -> int:
        stores = [s for s in (self._observation, self._transition) if s is not None]
        return sum(tensor.nbytes for store in stores for tensor in store.values(True, True))

    def _following(self, index: torch.Tensor | None = None) -> TensorDict:
        """The true next observations, [T, N], or [B] of the flat `index`."""
        if not self._closed:
            raise RuntimeError("where the last transition led to is not known yet; close() the rollout first")
        envs = self._observation.batch_size[1]
        # the row below is what follows, where no episode ended
        following = self._observation[1 : self.position + 1].flatten(0, 1)
        following = following.clone() if index is None else following[index]
        if self.final:
            (step, env), final = self.finals()
            # [T*N]: which of the last observations, -1: none
            which = torch.full((self.position * envs,), -1, device=step.device)
            which[step * envs + env] = torch.arange(len(step), device=step.device)
            which = which if index is None else which[index]
            ended = which >= 0
            following[ended] = final[which[ended]]
        return following.unflatten(0, (self.position, envs)) if index is None else following

    def _check_complete(self) -> None:
        if not (self.is_full() or self._closed):
            raise RuntimeError(
                f"the rollout holds {self.position} of {self.steps} decisions; add() the rest first, or close() it"
            )

    def _check_continues(self, observation: TensorDict) -> None:
        row = self._observation[self.position]
        goes_on = torch.ones(len(row), dtype=torch.bool, device=observation.get(leaves(row)[0][0]).device)
        for step, env in self.final_at:
            goes_on[env[step == self.position - 1]] = False
        check_continues(dict(leaves(row)), observation, goes_on)

    @torch.inference_mode(False)
    def _allocate(self, td: TensorDict) -> None:
        transition = td.exclude("observation", ("next", "observation"), "noise").clone(recurse=False)
        needed = self.steps * _bytes(transition) + (self.steps + 1) * _bytes(td.select("observation"))
        log.info(f"buffer: {self.steps:,} x {len(td)} transitions, {gigabytes(needed)} in {_place(td)}")
        self._transition = _zeros(transition, self.steps)
        self._observation = _zeros(td.select("observation"), self.steps + 1)["observation"]
        columns = leaves(TensorDict({**self._transition, "observation": self._observation[:-1]}, [self.steps]))
        # rows as views made once: a handful of plain copies is all that `add` does
        self._writer = RowWriter({key: column.unbind(0).__getitem__ for key, column in columns})


def _bytes(td: TensorDict) -> int:
    return sum(value.nbytes for _, value in leaves(td))


def _place(td: TensorDict) -> str:
    device = td["next", "reward"].device
    return "RAM" if device.type == "cpu" else str(device)


def _zeros(td: TensorDict, rows: int) -> TensorDict:
    # [N, ...] -> [rows, N, ...]
    return td.apply(lambda x: empty((rows, *x.shape), x.dtype, x.device).zero_(), batch_size=[rows, *td.batch_size])
