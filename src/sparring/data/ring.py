"""VLABuffer: a ring [capacity, N] of the newest transitions, for one writer and one reader.

Transitions are numbered from 0 for ever. Every observation is kept once: that of number t + 1 is the next one of number
t, and only the true last observations of episodes are kept beside. So a transition can be read once its next
observation is known: when the next one is added, or after `close`.

Readable are always the numbers oldest <= t < newest, and these two are all that writer and reader agree on; there is no
lock. The writer moves `oldest` before it overwrites anything, and `newest` after it has written. The reader copies,
looks at `oldest` again and discards what was overtaken meanwhile. (That stores become visible in the order they were
made is a promise of x86; elsewhere the many steps of the interpreter between them have to do.)
"""

import logging
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch
from tensordict import TensorDict

from sparring.data.buffer import RowWriter, check_continues, check_fits, check_transition, check_whole, leaves
from sparring.processes.storage import (
    Column,
    Key,
    Layout,
    Memory,
    empty,
    gigabytes,
    half_of_free_ram,
    shared_memory_folder,
)

# ---- The rows of a ring, by transition number: where they lie and how they are written and copied.
#
# Number t lies in row t % R, columns and observation alike. Its next observation is that of number t + 1, or, where the
# episode ended, a slot that row t names. Who may touch which row when is not decided here but in ring.py.


def ring_layout(td: TensorDict, rows: int, slots: int) -> Layout:
    """Room for transitions like `td` [N]; only shapes and types count, so a td on "meta" will do."""
    columns = {("control",): Column((3,), torch.int64), ("slot",): Column((rows, len(td)), torch.int64)}
    for key, value in leaves(td.exclude("noise", ("next", "observation"))):
        columns["row", *key] = Column((rows, *value.shape), value.dtype)
    # at the end, as most of it may never be touched
    for key, value in leaves(td["observation"]):
        columns["final", *key] = Column((slots, *value.shape[1:]), value.dtype)
    return Layout.of(columns)


def slot_bytes(layout: Layout) -> int:
    """Of the last observation of one episode."""
    finals = [column for key, column in layout.columns.items() if key[0] == "final"]
    return sum(prod(column.shape[1:]) * column.dtype.itemsize for column in finals)


def row_bytes(layout: Layout) -> int:
    """Of everything but the last observations of episodes: what is sure to be used."""
    return sum(column.nbytes for key, column in layout.columns.items() if key[0] != "final")


class Rows:
    """Views into the memory of a ring: R rows of N envs."""

    def __init__(self, memory: Memory, layout: Layout):
        self.memory, self.layout = memory, layout
        views = layout.views(memory.data)
        # what writer and reader agree on, see ring.py
        self.control = views["control",].numpy()
        # [R, N]: where the last observation of an episode is, -1: the episode went on
        self.slot = views["slot",]
        self.rows, self.envs = self.slot.shape
        self.columns = {key[1:]: view for key, view in views.items() if key[0] == "row"}
        self.final = {key[1:]: view for key, view in views.items() if key[0] == "final"}
        self.slots = len(next(iter(self.final.values())))
        self.observation = {key[1:]: view for key, view in self.columns.items() if key[0] == "observation"}
        self._writer = RowWriter({key: partial(column.select, 0) for key, column in self.columns.items()})

    # ---- writing

    def write(self, number: int, td: TensorDict) -> None:
        """A transition [N] whose episodes go on; its next observation is that of number + 1."""
        row = number % self.rows
        self._writer.write(row, td)
        self.slot[row].fill_(-1)

    def write_observation(self, number: int, observation: TensorDict) -> None:
        for key, column in self.observation.items():
            value, row = observation.get(key), column[number % self.rows]
            check_fits(("observation", *key), value, row)
            row.copy_(value)

    def write_finals(self, number: int, ended: torch.Tensor, slots: list[int], observation: TensorDict) -> None:
        """The last observations of the envs `ended` [F], out of `observation` [N], into `slots` [F]."""
        for key, column in self.final.items():
            last = observation.get(key).index_select(0, ended).to(column.device)
            # row by row: scattering all of them in one call takes twice as long
            for slot, value in zip(slots, last.unbind(0), strict=True):
                column.select(0, slot).copy_(value)
        self.slot[number % self.rows].index_copy_(0, ended.cpu(), torch.tensor(slots))

    # ---- copying

    def observation_at(self, number: int) -> TensorDict:
        """[N]"""
        row = number % self.rows
        return _nested({key: column[row].clone() for key, column in self.observation.items()}, [self.envs])

    def copy(self, first: int, count: int, following: bool, out: TensorDict | None = None) -> TensorDict:
        """Numbers `first` to `first + count - 1`, [count, N]; `following`: with `next/observation`.

        `out` is written into if it has this shape.
        """
        into = {} if out is None or out.batch_size != (count, self.envs) else dict(leaves(out))
        columns = {key: self._span(column, first, count, into.get(key)) for key, column in self.columns.items()}
        if following:
            (step, env), slots = self.ends(first, count)
            for key, column in self.observation.items():
                there = ("next", "observation", *key)
                columns[there] = self._span(column, first + 1, count, into.get(there))
                columns[there][step, env] = self.final[key][slots].to(columns[there].device)
        return _nested(columns, [count, self.envs])

    def gather(self, number: torch.Tensor, env: torch.Tensor) -> TensorDict:
        """Transition `number` [B] of `env` [B], with `next/observation`."""
        here = number % self.rows * self.envs + env
        there = (number + 1) % self.rows * self.envs + env
        # [R, N, ...] -> [R*N, ...] -> [B, ...]
        batch = {key: column.flatten(0, 1).index_select(0, here) for key, column in self.columns.items()}
        slot = self.slot.flatten().index_select(0, here)
        ended = (slot >= 0).nonzero()[:, 0]
        for key, column in self.observation.items():
            seen = batch["next", "observation", *key] = column.flatten(0, 1).index_select(0, there)
            seen[ended] = self.final[key][slot[ended]]
        return _nested(batch, [len(number)])

    def ends(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(step, env) [2, F] of the episodes' ends among these, and the slots [F] of their last observations."""
        slot = self._span(self.slot, first, count)
        at = (slot >= 0).nonzero().T
        return at, slot[at[0], at[1]]

    def finals(self, slots: torch.Tensor) -> TensorDict:
        """[F] -> last observations [F]"""
        return _nested({key: column[slots] for key, column in self.final.items()}, [len(slots)])

    def _span(self, column: torch.Tensor, first: int, count: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """A copy in time order across the seam of the ring."""
        if out is None:
            out = empty((count, *column.shape[1:]), column.dtype)
        start = first % self.rows
        before_seam = min(count, self.rows - start)
        out[:before_seam].copy_(column[start : start + before_seam])
        if before_seam < count:
            out[before_seam:].copy_(column[: count - before_seam])
        return out


def _nested(columns: Mapping[Key, torch.Tensor], batch_size: list[int]) -> TensorDict:
    td = TensorDict({}, batch_size)
    for key, column in columns.items():
        td.set(key, column)
    return td


# ---- VLABuffer: a ring [capacity, N] of the newest transitions, for one writer and one reader.
#
# Transitions are numbered from 0 for ever. Every observation is kept once: that of number t + 1 is the next one of
# number
# t, and only the true last observations of episodes are kept beside. So a transition can be read once its next
# observation is known: when the next one is added, or after `close`.
#
# Readable are always the numbers oldest <= t < newest, and these two are all that writer and reader agree on; there is
# no
# lock. The writer moves `oldest` before it overwrites anything, and `newest` after it has written. The reader copies,
# looks at `oldest` again and discards what was overtaken meanwhile. (That stores become visible in the order they were
# made is a promise of x86; elsewhere the many steps of the interpreter between them have to do.)


log = logging.getLogger(__name__)

# entries of Rows.control
_NEWEST, _OLDEST, _SLOTS_USED = range(3)
_EMPTY = "the ring holds no transition that can be read; add() to it, and close() it or add() again"


@dataclass(frozen=True)
class RingHandle:
    """What another process needs to read a ring."""

    file: Path
    layout: Layout


class VLABuffer:
    """`add` transitions [N] or rollouts [T, N] for ever; read the newest `capacity` of them at any time.

    `steps`: how many decisions `rollout` serves. `final_slots`: how many last observations of episodes it can hold; by
    default every decision may end one, and the newest, which cannot be read yet; for memory is touched only when used.
    With fewer, the oldest transitions go when slots run out. A ring of more than `memory_limit` bytes (default: half of
    the free RAM) lies in a file in `folder`; a `shared` one can be read by another process.
    """

    def __init__(
        self,
        capacity: int,
        steps: int | None = None,
        final_slots: int | None = None,
        memory_limit: int | None = None,
        folder: Path | str | None = None,
        shared: bool = False,
    ):
        check_whole("capacity", capacity)
        check_whole("steps", capacity if steps is None else steps)
        self.capacity, self.steps = capacity, steps or capacity
        self.final_slots, self.memory_limit, self.shared = final_slots, memory_limit, shared
        self.folder = Path(folder or tempfile.gettempdir())
        self.writes = True
        # the number of the next transition
        self._count = 0
        self._closed = False
        # number and slots of each transition with an episode's end, the oldest first
        self._ends: deque[tuple[int, list[int]]] = deque()
        self._free_slots: list[int] = []
        self._rows: Rows | None = None
        # rows are in RAM; what they are served as is where the transitions came from
        self._device = torch.device("cpu")
        # the newest rollout, and the memory it was copied into
        self._rollout: TensorDict | None = None
        self._copied: TensorDict | None = None

    @classmethod
    def attach(cls, handle: RingHandle) -> "VLABuffer":
        """The ring of another process, to read from."""
        rows = Rows(Memory.open(handle.file, handle.layout.nbytes), handle.layout)
        ring = cls(rows.rows - 1)
        ring._rows, ring.writes = rows, False
        return ring

    def handle(self) -> RingHandle:
        if self._rows is None or self._rows.memory.file is None:
            raise RuntimeError("only a ring that was made with shared=True, and allocated, can be read elsewhere")
        return RingHandle(self._rows.memory.file, self._rows.layout)

    def allocate(self, td: TensorDict) -> None:
        """Make room for transitions like `td` [N], having said how much; `add` does so when it has to."""
        slots = self.final_slots or (self.capacity + 1) * len(td)
        if slots < len(td):
            raise ValueError(f"final_slots={slots} cannot hold the last observations of {len(td)} envs at once")
        layout = ring_layout(td, self.capacity + 1, slots)
        needed = row_bytes(layout)
        limit = half_of_free_ram() if self.memory_limit is None else self.memory_limit
        folder = self.folder if needed > limit else shared_memory_folder() if self.shared else None
        log.info(
            f"buffer: {self.capacity:,} x {len(td)} transitions, {gigabytes(needed)} in {folder or 'RAM'}, "
            f"and {gigabytes(slot_bytes(layout))} for each end of an episode"
        )
        if folder is None:
            memory = Memory.in_ram(layout.nbytes)
        else:
            memory = Memory.in_file(layout.nbytes, needed, folder, self.shared)
        rows = Rows(memory, layout)
        rows.control[:] = 0
        self._device = td["next", "reward"].device
        # last: a reading thread goes by it
        self._rows = rows

    def bytes(self) -> int:
        """Memory that is in use once all rows are written."""
        if self._rows is None:
            return 0
        layout = self._rows.layout
        return row_bytes(layout) + int(self._rows.control[_SLOTS_USED]) * slot_bytes(layout)

    # ---- writing

    def add(self, td: TensorDict) -> None:
        """A transition [N] or a rollout [T, N], with `next/*`; it must go on where the last one led to."""
        check_transition(td)
        if td.batch_dims == 2:
            for transition in td.unbind(0):
                self.add(transition)
            self.close(td[-1]["next"])
            return
        self._check_writer()
        if self._rows is None:
            self.allocate(td)
        if self._closed:
            self._check_continues(td["observation"])
        number, rows = self._count, self._rows
        self._evict(number - self.capacity)
        rows.write(number, td)
        self._keep_finals(number, td.get("next"))
        rows.control[_NEWEST] = number
        self._count, self._closed, self._rollout = number + 1, False, None

    def close(self, td: TensorDict) -> None:
        """The observation [N] after the newest transition, which can be read from now on."""
        self._check_writer()
        if self._rows is None:
            raise RuntimeError("there is no transition that this could follow; add() one first")
        self._evict(self._count - self.capacity)
        self._rows.write_observation(self._count, td["observation"])
        self._rows.control[_NEWEST] = self._count
        self._closed, self._rollout = True, None

    def clear(self) -> None:
        """Forget all transitions; what is added next may start anywhere."""
        self._check_writer()
        self._closed, self._rollout = False, None
        if self._rows is not None:
            self._evict(self._count)
            self._rows.control[_NEWEST] = self._count

    # ---- reading

    def __len__(self) -> int:
        """Decisions of each env that can be read."""
        newest, oldest = self._interval()
        return newest - oldest

    def is_full(self) -> bool:
        return len(self) == self.capacity

    def get(self, flatten: bool = True, following: bool = False, out: TensorDict | None = None) -> TensorDict:
        """A copy of all there is, at most the newest `capacity`: `[T, N]`, or `[T*N]` in time order.

        `following` adds `next/observation`. With a writer at work, the oldest few may be gone before they are copied.
        `out`: what an earlier `get(flatten=False)` returned, to be overwritten; memory in use is faster than new.
        """
        rollout = self._newest(self.capacity, following, out)
        return rollout.flatten(0, 1) if flatten else rollout

    def windows(self, length: int, following: bool = False) -> Iterator[TensorDict]:
        """What is stored now in slices of time `[length, N]`, the oldest first; a shorter rest is left out."""
        check_whole("length", length)
        end, first = self._interval()
        while first + length <= end:
            window = self._rows.copy(first, length, following)
            oldest = int(self._rows.control[_OLDEST])
            if first < oldest:
                first = oldest
            else:
                yield self._serve(window)
                first += length

    def sample(self, batch_size: int, generator: torch.Generator | None = None) -> TensorDict:
        """`[B]` transitions with `next/observation`, each stored one as likely as the others."""
        number, env = self._draw(batch_size, generator)
        batch = self._rows.gather(number, env)
        while (overtaken := number < int(self._rows.control[_OLDEST])).any():
            number[overtaken], env[overtaken] = self._draw(int(overtaken.sum()), generator)
            batch[overtaken] = self._rows.gather(number[overtaken], env[overtaken])
        return self._serve(batch)

    # ---- the newest rollout, for those who collect and train in turns

    def start(self) -> None:
        """A rollout begins; the ring keeps what it has."""

    def rollout(self) -> TensorDict:
        """The newest `steps` decisions [T, N] and the columns that were `set`; overwritten by the next rollout."""
        self._check_writer()
        if self._rollout is None:
            self._copied = self._newest(self.steps, False, self._copied)
            self._rollout = self._copied.copy()
        return self._rollout.copy()

    def set(self, key, value: torch.Tensor) -> None:
        """Attach a column [T, N] to the newest rollout; it is gone with the next add."""
        self.rollout()
        self._rollout.set(key, value)

    @property
    def last(self) -> TensorDict:
        """`observation` after the newest transition, [N]."""
        if not len(self):
            raise RuntimeError(_EMPTY)
        observation = self._rows.observation_at(int(self._rows.control[_NEWEST]))
        return self._serve(TensorDict({"observation": observation}, observation.batch_size))

    def finals(self) -> tuple[torch.Tensor, TensorDict] | None:
        """(step, env) [2, F] of the episodes' ends in the newest rollout, and their true last observations [F]."""
        newest, oldest = self._interval()
        first = max(oldest, newest - self.steps)
        at, slots = self._rows.ends(first, newest - first)
        return (at.to(self._device), self._serve(self._rows.finals(slots))) if len(slots) else None

    # ---- the writer's part

    def _evict(self, oldest: int) -> None:
        """Numbers below `oldest` are not to be read any more, and their slots are free."""
        if oldest > self._rows.control[_OLDEST]:
            self._rows.control[_OLDEST] = oldest
        while self._ends and self._ends[0][0] < oldest:
            self._free_slots += self._ends.popleft()[1]

    def _keep_finals(self, number: int, following: TensorDict) -> None:
        """Where episodes ended, their last observations go into slots."""
        done = following.get("terminated") | following.get("truncated")
        if done.any():
            ended = done.nonzero()[:, 0]
            slots = [self._take_slot() for _ in range(len(ended))]
            self._rows.write_finals(number, ended, slots, following.get("observation"))
            self._ends.append((number, slots))

    def _take_slot(self) -> int:
        """One that was used before, if there is one: memory that was never touched costs nothing."""
        control = self._rows.control
        if not self._free_slots and control[_SLOTS_USED] < self._rows.slots:
            control[_SLOTS_USED] += 1
            return int(control[_SLOTS_USED]) - 1
        while not self._free_slots:
            self._evict(int(control[_OLDEST]) + 1)
        return self._free_slots.pop()

    def _check_continues(self, observation: TensorDict) -> None:
        """A reader may be looking at the observation that `close` wrote, so the next row must hold the same."""
        rows, row = self._rows, self._count % self._rows.rows
        # what an ended episode is followed by is nobody's next observation
        goes_on = rows.slot[(self._count - 1) % rows.rows] < 0
        check_continues({key: column[row] for key, column in rows.observation.items()}, observation, goes_on)

    def _check_writer(self) -> None:
        if not self.writes:
            raise RuntimeError("this ring is read from here and written elsewhere; use get, windows or sample")

    # ---- the reader's part

    def _interval(self) -> tuple[int, int]:
        """(newest, oldest), read in this order: the other way round they could be more than a ring apart."""
        if self._rows is None:
            return 0, 0
        control = self._rows.control
        while True:
            newest, oldest = int(control[_NEWEST]), int(control[_OLDEST])
            # unless the writer came all the way round in between, which is no empty ring
            if oldest < newest or newest == int(control[_NEWEST]):
                return newest, min(newest, oldest)

    def _newest(self, steps: int, following: bool, out: TensorDict | None) -> TensorDict:
        while True:
            newest, oldest = self._interval()
            first = max(oldest, newest - steps)
            if first == newest:
                raise RuntimeError(_EMPTY)
            rollout = self._rows.copy(first, newest - first, following, out)
            overtaken = max(0, int(self._rows.control[_OLDEST]) - first)
            if overtaken < newest - first:
                return self._serve(rollout[overtaken:] if overtaken else rollout)

    def _draw(self, batch_size: int, generator: torch.Generator | None) -> tuple[torch.Tensor, torch.Tensor]:
        newest, oldest = self._interval()
        if newest == oldest:
            raise RuntimeError(_EMPTY)
        index = torch.randint((newest - oldest) * self._rows.envs, (batch_size,), generator=generator)
        return oldest + index // self._rows.envs, index % self._rows.envs

    def _serve(self, td: TensorDict) -> TensorDict:
        return td if self._device.type == "cpu" else td.to(self._device)
