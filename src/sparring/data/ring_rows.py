"""The rows of a ring, by transition number: where they lie and how they are written and copied.

Number t lies in row t % R, columns and observation alike. Its next observation is that of number t + 1, or, where the
episode ended, a slot that row t names. Who may touch which row when is not decided here but in ring.py.
"""

from collections.abc import Mapping
from functools import partial
from math import prod

import torch
from tensordict import TensorDict

from sparring.data.row_writer import RowWriter, check_fits, leaves
from sparring.data.storage import Column, Key, Layout, Memory, empty


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
