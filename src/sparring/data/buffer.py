"""Rollout buffers: what a buffer is, and one rollout on the learner's device."""

import logging
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral
from pathlib import Path
from typing import Protocol

import torch
from tensordict import TensorDict, TensorDictBase

from sparring.config.resolve import resolve
from sparring.data import BUFFERS
from sparring.data.configs import BufferConfig
from sparring.processes.storage import empty, gigabytes

# ---- Sizes that a caller gives.


def check_whole(name: str, value: int, least: int = 1) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r}: expected a whole number of {least} or more")


# ---- Buffer: what every store of recent experience can do.


def check_transition(td: TensorDict) -> None:
    if not isinstance(td, TensorDictBase) or td.batch_dims not in (1, 2):
        got = f"a TensorDict {list(td.batch_size)}" if isinstance(td, TensorDictBase) else type(td).__name__
        raise TypeError(f"expected a TensorDict: a transition [N] or a rollout [T, N], with next/*; got {got}")


class Buffer(Protocol):
    """Transitions of N envs, in time order.

    The first half is for anyone. The second serves the newest rollout to those who collect and train in turns.
    """

    # decisions of a rollout, at most
    steps: int

    def add(self, td: TensorDict) -> None:
        """A transition [N] or a rollout [T, N], with `next/*`."""

    def close(self, td: TensorDict) -> None:
        """The observation [N] after the last transition."""

    def get(self, flatten: bool = True, following: bool = False) -> TensorDict:
        """All there is: `[T, N]`, or `[T*N]` in time order; `following` adds `next/observation`."""

    def windows(self, length: int, following: bool = False) -> Iterator[TensorDict]:
        """Slices of time `[length, N]`, the oldest first."""

    def sample(self, batch_size: int, generator: torch.Generator | None = None) -> TensorDict:
        """`[B]` transitions with `next/observation`, each stored one as likely as the others."""

    def is_full(self) -> bool: ...

    def clear(self) -> None: ...

    def bytes(self) -> int: ...

    def start(self) -> None:
        """A rollout begins."""

    def rollout(self) -> TensorDict:
        """The newest `steps` decisions `[T, N]`, and the columns that were `set`."""

    def set(self, key, value: torch.Tensor) -> None:
        """Attach a column [T, N] to the newest rollout; it is gone with it."""

    def finals(self) -> tuple[torch.Tensor, TensorDict] | None:
        """(step, env) [2, F] of the episodes that ended in the newest rollout, and their last observations [F]."""

    @property
    def last(self) -> TensorDict:
        """`observation` after the last transition, [N]."""


# ---- Writing one transition into the rows of a store, leaf by leaf.
#
# Looking up nested keys of a TensorDict costs more than copying a small leaf, so a transition is walked through once,
# in
# step with a tree of the columns.


# row number -> that row of a column
RowOf = Callable[[int], torch.Tensor]


class RowWriter:
    """Columns by nested key; what a transition has beyond them is left out, and nothing is cast or repeated to fit."""

    def __init__(self, columns: Mapping[tuple[str, ...], RowOf]):
        self._keys = set(columns)
        self._tree: dict = {}
        for (*branch, leaf), row_of in columns.items():
            node = self._tree
            for name in branch:
                node = node.setdefault(name, {})
            row = row_of(0)
            node[leaf] = row_of, row.dtype, row.nbytes, (*branch, leaf)

    def write(self, row: int, td: TensorDict) -> None:
        if _write(self._tree, row, td) < len(self._keys):
            missing = sorted("/".join(key) for key in self._keys - {key for key, _ in leaves(td)})
            raise KeyError(f"the transition lacks {', '.join(missing)}, which earlier ones had")


def leaves(td: TensorDict) -> list[tuple[tuple[str, ...], torch.Tensor]]:
    items = td.items(include_nested=True, leaves_only=True)
    return [(key if isinstance(key, tuple) else (key,), value) for key, value in items]


def check_fits(key: tuple[str, ...], value: torch.Tensor, row: torch.Tensor) -> None:
    if value.shape != row.shape or value.dtype != row.dtype:
        raise ValueError(
            f"{'/'.join(key)} is {value.dtype} {list(value.shape)}, but in the first transition it was "
            f"{row.dtype} {list(row.shape)}; all of one buffer must be alike"
        )


def check_continues(
    row: Mapping[tuple[str, ...], torch.Tensor], observation: TensorDict, goes_on: torch.Tensor
) -> None:
    """`observation` [N] is what was stored in `row` [N] as the one after the last transition, where `goes_on` [N]."""
    for key, stored in row.items():
        given = observation.get(key).to(stored.device)[goes_on]
        if torch.equal(stored[goes_on], given):
            continue
        name = "/".join(("observation", *key))
        if given.isnan().any():
            raise RuntimeError(f"{name} holds NaN, which equals nothing; mend the env, or what it is normalised with")
        raise RuntimeError(
            f"{name} is not what the last transition led to; clear() the buffer before adding what starts elsewhere"
        )


def _write(tree: dict, row: int, td: TensorDict) -> int:
    """How many columns were written."""
    written = 0
    for name, value in td.items():
        node = tree.get(name)
        if node is None:
            continue
        if type(node) is dict:
            written += _write(node, row, value)
        else:
            row_of, dtype, nbytes, key = node
            # of one type and size nothing can be cast or repeated; looking at the shape would take twice as long
            if value.dtype is not dtype or value.nbytes != nbytes:
                check_fits(key, value, row_of(row))
            row_of(row).copy_(value)
            written += 1
    return written


# ---- RolloutBuffer: one rollout [T, N], used once.
#
# Every image is kept once: `observation` is [T+1, N] (the last row is where the next rollout begins), and the true last
# observations of episodes that ended on the way sit in a compact list beside it. Memory is allocated on the first add
# and written in place from then on.


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


# ---- From the `buffer` section to a buffer.


def make_buffer(buffer: BufferConfig, steps: int, n_envs: int, folder: Path) -> Buffer:
    """For rollouts of `steps` decisions of `n_envs` robots; `folder`: where a ring goes that is too large for RAM."""
    cls = resolve(buffer.type, BUFFERS, "buffer")
    if buffer.type == "standard":
        return cls(steps)
    capacity = buffer.size // n_envs if buffer.size else steps
    limit = None if buffer.memory_limit_gb is None else int(buffer.memory_limit_gb * 1e9)
    return cls(capacity, steps, memory_limit=limit, folder=buffer.folder or folder)
