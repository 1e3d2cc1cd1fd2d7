"""Buffers of recent transitions: a single rollout, or a ring of the newest decisions.

Both store every observation once: the next observation of a transition is the observation of the following row. Only
the last observations of ended episodes are stored separately. T decisions, N robots, F ended episodes.
"""

import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator
from math import prod
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from sparring.errors import UserError
from sparring.processes.memory import free_ram

log = logging.getLogger(__name__)

Key = tuple[str, ...]


class RolloutBuffer:
    """`add` T transitions [N] or one rollout [T, N], then `get` it, then `clear`.

    T is `steps`, or less if the rollout is closed early. The first `add` allocates the memory, which is then reused.
    """

    def __init__(self, steps: int):
        check_whole("steps", steps)
        self.steps = self.capacity = self._transition_rows = steps
        self._count = 0  # the number of the next transition; number t is stored in row t % (capacity + 1)
        self._closed = False  # whether the observation after the newest transition is stored
        # rows [R, N], and the same columns as nested dicts
        self._transition: Any = None
        self._observation: Any = None
        self._columns: dict = {}
        self._attached: dict[Key | str, torch.Tensor] = {}
        # number of a transition -> the robots [F] whose episodes it ended, and their last observations [F]
        self._ends: dict[int, tuple[torch.Tensor, TensorDict]] = {}
        # device of the rows, and device of the transitions that are added and returned
        self._memory = self._device = torch.device("cpu")

    def __len__(self) -> int:
        """Stored decisions per robot."""
        return self._count

    def is_full(self) -> bool:
        return len(self) == self.capacity

    def add(self, td: TensorDict) -> None:
        """Add a transition [N] or a rollout [T, N], with `next/*`.

        After `close` it must start with the observation that `close` stored. Without `close` this is assumed, because
        comparing each step with the next would cost as much as storing it.
        """
        if not isinstance(td, TensorDictBase) or td.batch_dims not in (1, 2):
            got = f"a TensorDict {list(td.batch_size)}" if isinstance(td, TensorDictBase) else type(td).__name__
            raise TypeError(f"expected a TensorDict: a transition [N] or a rollout [T, N], with next/*; got {got}")
        if td.batch_dims == 2:
            for transition in td.unbind(0):
                self.add(transition)
            self.close(td[-1]["next"])
            return
        self._make_room()
        if self._transition is None:
            self._allocate(td)
        if self._closed:
            self._check_continues(td["observation"])
        self._write(self._columns, td)
        following = td.get("next")
        done = following.get("terminated") | following.get("truncated")
        if done.any():
            ended = done.nonzero()[:, 0]
            # leaf by leaf, several times faster than indexing a TensorDict
            last = TensorDict({}, [len(ended)])
            for key, value in leaves(following.get("observation")):
                last.set(key, value.index_select(0, ended).to(self._memory))
            self._ends[self._count] = ended.to(self._memory), last
        self._count += 1
        self._closed = False

    def close(self, td: TensorDict) -> None:
        """Store the observation [N] after the last transition and end the rollout, even before `steps` decisions."""
        if self._observation is None:
            raise RuntimeError("the buffer has no transition; add() one first")
        self._write({"observation": self._columns["observation"]}, td)
        self._closed = True

    def clear(self) -> None:
        """Drop all transitions; the next one may start with any observation."""
        self._count, self._closed = 0, False
        self._ends, self._attached = {}, {}

    def get(self, flatten: bool = True, following: bool = False) -> TensorDict:
        """`[T, N]`, or `[T*N]` in time order, as views. `following` adds `next/observation`, a copy."""
        self._check_readable()
        rollout = self._read(len(self), following)
        for key, value in self._attached.items():
            rollout.set(key, value)
        return rollout.flatten(0, 1) if flatten else rollout

    def windows(self, length: int, following: bool = False) -> Iterator[TensorDict]:
        """Slices of time `[length, N]`, oldest first; a shorter remainder is dropped."""
        check_whole("length", length)
        rollout = self.get(flatten=False, following=following)
        for first in range(0, len(rollout) - length + 1, length):
            yield rollout[first : first + length]

    def sample(self, batch_size: int, generator: torch.Generator | None = None) -> TensorDict:
        """`[B]` transitions with `next/observation`, drawn uniformly."""
        self._check_readable()
        self._check_next_known()
        rows, envs = self._observation.batch_size
        index = torch.randint(len(self) * envs, (batch_size,), generator=generator).to(self._memory)
        number, env = self._newest() - len(self) + index // envs, index % envs
        batch = self._transition[number % rows, env]
        batch.set("observation", self._observation[number % rows, env])
        for key, value in self._attached.items():
            batch.set(key, value.flatten(0, 1)[index])
        following = self._observation[(number + 1) % rows, env]
        ended = batch["next", "terminated"] | batch["next", "truncated"]
        number, env = number[ended], env[ended]
        if (found := self._ended_at(number.unique().tolist())) is not None:
            (end_number, end_env), last = found
            following[ended] = last[torch.searchsorted(end_number * envs + end_env, number * envs + env)]
        batch["next", "observation"] = following
        return self._serve(batch)

    def start(self) -> None:
        """Begin a rollout."""
        self.clear()

    def rollout(self) -> TensorDict:
        """The rollout `[T, N]` with the attached columns."""
        return self.get(flatten=False)

    def set(self, key: Key | str, value: torch.Tensor) -> None:
        """Attach a computed column [T, N] to the current rollout."""
        self._attached[key] = value

    def finals(self) -> tuple[torch.Tensor, TensorDict] | None:
        """(step, env) [2, F] of the episodes that ended in the newest rollout, and their last observations [F]."""
        newest = self._newest()
        first = newest - min(len(self), self.steps)
        if (found := self._ended_at(range(first, newest))) is None:
            return None
        at, last = found
        at[0] -= first
        return at.to(self._device), self._serve(last)

    @property
    def last(self) -> TensorDict:
        """`observation` after the last transition, [N]."""
        if not self._closed:
            raise RuntimeError(f"the observation after transition {self._count} is missing; add() and close() first")
        return TensorDict({"observation": self._observation[self._count]}, self._observation.batch_size[1:])

    def bytes(self) -> int:
        return sum(_bytes(part) for part in (self._transition, self._observation) if part is not None)

    def _newest(self) -> int:
        """1 + the number of the newest transition that can be read."""
        return self._count

    def _write(self, columns: dict, td: TensorDict) -> None:
        if missing := _write_row(columns, self._count % (self.capacity + 1), td):
            raise KeyError(f"the transition has no {', '.join(sorted(missing))}; earlier ones had")

    def _make_room(self) -> None:
        if self.is_full():
            raise RuntimeError(f"the rollout is full ({self.steps} decisions); get() and clear() it first")

    def _check_readable(self) -> None:
        if not (self.is_full() or self._closed):
            stored = f"{self._count} of {self.steps} decisions"
            raise RuntimeError(f"the rollout has {stored}; add() the others first, or close() it")

    def _check_next_known(self) -> None:
        if not self._closed:
            raise RuntimeError("the observation after the last transition is missing; close() the rollout first")

    def _read(self, steps: int, following: bool) -> TensorDict:
        """The newest `steps` transitions, [steps, N]."""
        first = self._newest() - steps
        rollout = self._span(self._transition, first, steps)
        rollout.set("observation", self._span(self._observation, first, steps))
        if following:
            self._check_next_known()
            true_next = self._span(self._observation, first + 1, steps, copied=True)
            if (found := self._ended_at(range(first, first + steps))) is not None:
                (number, env), last = found
                true_next[number - first, env] = last
            rollout.get("next").set("observation", true_next)
        return self._serve(rollout)

    def _span(self, rows: TensorDict, first: int, count: int, copied: bool = False) -> TensorDict:
        span = rows[first : first + count]
        return span.clone() if copied else span

    def _ended_at(self, numbers: Iterable[int]) -> tuple[torch.Tensor, TensorDict] | None:
        """(number, env) [2, F] of the episodes that ended at these transitions, and their last observations [F]."""
        ends = [(number, *self._ends[number]) for number in numbers if number in self._ends]
        if not ends:
            return None
        at = torch.cat([torch.stack([torch.full_like(env, number), env]) for number, env, _ in ends], 1)
        return at, torch.cat([last for *_, last in ends])  # type: ignore[return-value]

    def _check_continues(self, observation: TensorDict) -> None:
        """Raise if `observation` [N] differs from the one that `close` stored, for robots whose episodes continue."""
        row = self._observation[self._count % (self.capacity + 1)]
        continues = torch.ones(len(row), dtype=torch.bool, device=self._memory)
        if self._count - 1 in self._ends:
            continues[self._ends[self._count - 1][0]] = False
        for key, stored in leaves(row):
            given = observation.get(key).to(self._memory)[continues]
            if torch.equal(stored[continues], given):
                continue
            wrong = "differs from the observation after the last transition; clear() the buffer first"
            if given.isnan().any():
                wrong = "contains NaN; fix the env, or its normalisation"
            raise RuntimeError(f"{'/'.join(('observation', *key))} {wrong}")

    @torch.inference_mode(False)
    def _allocate(self, td: TensorDict) -> None:
        """Log the size of the memory for transitions like `td` [N], and allocate it."""
        transition, observation = td.exclude("observation", ("next", "observation"), "noise"), td["observation"]
        self._device = td["next", "reward"].device
        rows = self._transition_rows
        needed = rows * _bytes(transition) + (self.capacity + 1) * _bytes(observation)
        new, where = self._allocator(needed, observation)
        log.info(f"buffer: {self.capacity:,} x {len(td)} transitions, {_readable_size(needed)} in {where}")
        self._transition, self._observation = (
            # [N, ...] -> [rows, N, ...]
            part.apply(lambda x, count=count: new((count, *x.shape), x.dtype), batch_size=[count, len(td)])
            for part, count in ((transition, rows), (observation, self.capacity + 1))
        )
        self._columns = self._transition.to_dict() | {"observation": self._observation.to_dict()}

    def _allocator(self, needed: int, observation: TensorDict):
        """A function (shape, dtype) -> tensor, and a description of where it allocates."""
        self._memory = device = self._device
        return lambda shape, dtype: _empty(shape, dtype, device).zero_(), "RAM" if device.type == "cpu" else str(device)

    def _serve(self, td: TensorDict) -> TensorDict:
        return td if self._memory == self._device else td.to(self._device)


class VLABuffer(RolloutBuffer):
    """A ring: `add` any number of transitions [N] or rollouts [T, N]; read copies of the newest `capacity` at any time.

    The newest transition can be read once its next observation is known: after the next `add`, or after `close`.
    `steps`: decisions that `rollout` returns. A ring of more than `memory_limit` bytes (default: half of the free RAM)
    is stored in a file in `folder`. One thread may write while others read.
    """

    def __init__(
        self, capacity: int, steps: int | None = None, memory_limit: int | None = None, folder: Path | str | None = None
    ):
        check_whole("capacity", capacity)
        super().__init__(capacity if steps is None else steps)
        # one row more than can be read, for the newest transition without a next observation
        self.capacity, self._transition_rows = capacity, capacity + 1
        self.memory_limit = memory_limit
        self.folder = Path(folder or tempfile.gettempdir())
        self._rollout: TensorDict | None = None  # a copy of the newest one
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """Decisions per robot that can be read."""
        return min(self._newest(), self.capacity)

    def add(self, td: TensorDict) -> None:
        with self._lock:
            super().add(td)
            self._drop_overwritten()

    def close(self, td: TensorDict) -> None:
        """Store the observation [N] after the newest transition, which can then be read."""
        with self._lock:
            super().close(td)
            self._drop_overwritten()

    def clear(self) -> None:
        with self._lock:
            super().clear()
            self._rollout = None

    def get(self, flatten: bool = True, following: bool = False) -> TensorDict:
        """A copy of the newest decisions, at most `capacity`: `[T, N]`, or `[T*N]` in time order.

        `following` adds `next/observation`.
        """
        with self._lock:
            return super().get(flatten, following)

    def sample(self, batch_size: int, generator: torch.Generator | None = None) -> TensorDict:
        with self._lock:
            return super().sample(batch_size, generator)

    def start(self) -> None:
        """Begin a rollout; the ring keeps its content."""

    def rollout(self) -> TensorDict:
        """A copy of the newest `steps` decisions [T, N], with the attached columns."""
        if self._rollout is None:
            self._check_readable()
            self._rollout = self._read(min(len(self), self.steps), following=False)
        return self._rollout.copy()

    def set(self, key: Key | str, value: torch.Tensor) -> None:
        """Attach a column [T, N] to the newest rollout; the next `add` drops it."""
        self.rollout()
        self._rollout.set(key, value)

    @property
    def last(self) -> TensorDict:
        """`observation` after the newest transition that can be read, [N]."""
        self._check_readable()
        row = self._observation[self._newest() % (self.capacity + 1)]
        return self._serve(TensorDict({"observation": row.clone()}, row.batch_size))

    def bytes(self) -> int:
        """Memory in use after all rows have been written."""
        return super().bytes() + sum(_bytes(last) for _, last in self._ends.values())

    def _newest(self) -> int:
        return self._count if self._closed else max(self._count - 1, 0)

    def _make_room(self) -> None:
        """Nothing to check: the newest transition overwrites the oldest one."""

    def _drop_overwritten(self) -> None:
        self._rollout = None
        oldest = self._newest() - len(self)
        while self._ends and (first := next(iter(self._ends))) < oldest:
            del self._ends[first]

    def _check_readable(self) -> None:
        if not len(self):
            raise RuntimeError("the ring has no readable transition; add() one, then close() or add() another")

    def _check_next_known(self) -> None:
        """Nothing to check: only transitions with a next observation can be read."""

    def _span(self, rows: TensorDict, first: int, count: int, copied: bool = True) -> TensorDict:
        """A copy in time order, also if the rows wrap around the end of the ring."""
        start = first % (self.capacity + 1)
        until_end = rows[start : start + count]
        rest = count - len(until_end)
        return torch.cat([until_end, rows[:rest]]) if rest else until_end.clone()  # type: ignore[return-value]

    def _allocator(self, needed: int, observation: TensorDict):
        """Allocates in RAM or in a file; last observations of episodes are always in RAM."""
        limit = free_ram() // 2 if self.memory_limit is None else self.memory_limit
        each = _readable_size(_bytes(observation) // len(observation))
        if needed <= limit:
            return _empty, f"RAM, plus {each} for the final observation of each ended episode"
        self.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise UserError(
                f"the buffer needs {_readable_size(needed)}, but {self.folder} has {_readable_size(free)} free; "
                "choose a smaller buffer.size, or another buffer.folder"
            )
        return self._mapped, f"{self.folder}, plus {each} of RAM for the final observation of each ended episode"

    def _mapped(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in a deleted file: the system frees its space when the process ends, even by a crash."""
        if not prod(shape):
            return torch.empty(shape, dtype=dtype)
        handle, file = tempfile.mkstemp(prefix="sparring-buffer-", suffix=".bin", dir=self.folder)
        try:
            return torch.from_file(file, shared=True, size=prod(shape), dtype=dtype).view(shape)
        finally:
            os.unlink(file)
            os.close(handle)


def check_whole(name: str, value: int, least: int = 1) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r}: expected a whole number >= {least}")


def leaves(td: TensorDict) -> list[tuple[Key, torch.Tensor]]:
    items = td.items(include_nested=True, leaves_only=True)
    return [(key if isinstance(key, tuple) else (key,), value) for key, value in items]  # type: ignore[misc]


def _write_row(columns: dict, row: int, td: TensorDict, path: Key = ()) -> list[str]:
    """Copy `td` [N] into a row without casting or broadcasting. Returns the columns that `td` does not have."""
    # one walk through both trees: looking up nested keys of a TensorDict takes longer than copying a small leaf
    values, missing = dict(td.items()), []
    for name, column in columns.items():
        if (value := values.get(name)) is None:
            missing.append("/".join((*path, name)))
        elif isinstance(column, dict):
            missing += _write_row(column, row, value, (*path, name))  # type: ignore[arg-type]
        else:
            target = column[row]
            if value.shape != target.shape or value.dtype != target.dtype:
                raise ValueError(
                    f"{'/'.join((*path, name))} is {value.dtype} {list(value.shape)}, but in the first transition it "
                    f"was {target.dtype} {list(target.shape)}; all transitions of a buffer must have the same columns"
                )
            target.copy_(value)
    return missing


def _bytes(td: TensorDict) -> int:
    return sum(value.nbytes for _, value in leaves(td))


def _readable_size(nbytes: int) -> str:
    """With two digits: '1.3 GB', '52 MB', '1.2 kB'."""
    unit, size = next((pair for pair in (("GB", 1e9), ("MB", 1e6)) if nbytes >= pair[1] / 2), ("kB", 1e3))
    return f"{nbytes / size:,.{0 if nbytes >= 10 * size else 1}f} {unit}"


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """A large uninitialised tensor. In RAM it is allocated by numpy, which requests huge pages, unlike torch: the first
    write to the memory is then four times as fast, later writes are 10 % faster."""
    if torch.device(device).type != "cpu" or not prod(shape):
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.empty(prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(*shape)
