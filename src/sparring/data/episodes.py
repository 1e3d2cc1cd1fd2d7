"""EpisodeStore: complete episodes in a folder, appended by one process and read by any number.

Every observation is stored once: an episode of T steps has T+1 rows of `observation/*` and T rows of every other key.
Reading takes a slice of a memory map, without decoding or copying. episode_files.py defines the file format.
"""

import logging
import os
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from sparring.data.buffer import leaves
from sparring.data.episode_files import META, EpisodeColumn, EpisodeLayout, EpisodeRecord
from sparring.data.episode_segment import Segment, open_segments
from sparring.errors import UserError
from sparring.processes.files import take_lock

log = logging.getLogger(__name__)


class EpisodeStore:
    """`append` episodes; `episode(i)` is a TensorDict [T] with `observation/*`, `next/observation/*` and other keys.

    The single writer locks the folder until `close`. On opening it drops and logs an incomplete end that a crash left.
    Other damage raises an error; with `repair`, complete episodes are kept and the rest is moved aside.
    Readers open the folder with `read_only` and see its content as of the last `refresh`. Beyond `max_bytes`, the
    oldest segments are deleted. Episode numbers start at 0 and are never reused; `episode(i)` counts from the oldest
    stored episode.
    """

    def __init__(
        self,
        folder: str | Path,
        read_only: bool = False,
        max_bytes: int | None = None,
        segment_bytes: int = 256 * 2**20,
        repair: bool = False,
    ):
        if read_only and repair:
            raise UserError("repair=True changes files and read_only=True forbids that; give only one of them")
        self.folder = Path(folder)
        self.read_only, self.max_bytes = read_only, max_bytes
        # a segment, which is deleted as a whole, is at most an eighth of the limit
        self.segment_bytes = min(segment_bytes, max_bytes // 8) if max_bytes else segment_bytes
        self.layout: EpisodeLayout | None = None
        # held while the list of episodes changes, and by threads during several lookups that belong together
        self.lock = threading.RLock()
        self._segments: list[Segment] = []
        self._where: list[tuple[Segment, EpisodeRecord]] = []
        self._numbers: np.ndarray | None
        self._ends: np.ndarray | None
        self._lock: int | None = None
        self._logged = False
        if read_only and not self.folder.is_dir():
            raise UserError(f"'{folder}' does not exist; give a folder that an EpisodeStore has written")
        if not read_only:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"'{folder}': cannot create the folder ({error.strerror}); give another one") from None
        Segment.refuse_special_files(self.folder)
        if not read_only:
            self._lock = take_lock(self.folder)
        try:
            self._segments = open_segments(self.folder, read_only, repair)
            self.refresh()
        except UserError:
            self.close()
            raise
        self.next_number = int(self.numbers[-1]) + 1 if len(self) else 0

    def __len__(self) -> int:
        return len(self._where)

    @property
    def num_steps(self) -> int:
        with self.lock:
            return int(self.ends[-1]) if len(self) else 0

    def bytes(self) -> int:
        """Size on disk."""
        return sum(segment.data_end + segment.index_end for segment in self._segments)

    def episode(self, i: int) -> TensorDict:
        """Views into the file: do not keep them longer than needed, and do not write to them."""
        segment, record = self.locate(i)
        segment.verify(record)
        episode = TensorDict({}, [record.steps])
        for column in self.layout.columns:
            start = record.offset + self.layout.offsets(record.steps)[column.name]
            rows = record.steps + column.extra
            raw = segment.bytes[start : start + rows * column.row_bytes]
            values = torch.from_numpy(raw.view(column.dtype).reshape(rows, *column.shape))
            key = tuple(column.name.split("/"))
            episode.set(key, values[: record.steps])
            if column.extra:
                episode.set(("next", *key), values[1:])
        return episode

    def info(self, i: int) -> dict:
        """The `info` of an episode that was given to `append`."""
        return self.locate(i)[1].info

    def position(self, number: int) -> int | None:
        """The index of the episode with this number among the stored ones; None if it was deleted."""
        numbers = self.numbers
        i = int(np.searchsorted(numbers, number))
        return i if i < len(numbers) and numbers[i] == number else None

    def locate(self, i: int) -> tuple[Segment, EpisodeRecord]:
        """The segment of episode `i`, and its record there."""
        try:
            return self._where[i]
        except IndexError:
            raise IndexError(f"episode {i} of {len(self)} in '{self.folder}'") from None

    def append(self, episode: TensorDict, **info) -> int:
        """Store an episode [T] with information about it (task, source, success, seed); returns its number."""
        self._require_writer()
        steps, rows = _rows_of(episode)
        layout = self._fitting_layout(rows, steps)
        pieces, size = layout.block(rows, steps), layout.block_bytes(steps)
        crc = reduce(lambda crc, piece: zlib.crc32(piece, crc), pieces, 0)
        record = EpisodeRecord(self.next_number, 0, size, steps, crc, info)
        line = len(record.line())
        with self.lock:
            # only after the episode has passed all checks
            if layout is not self.layout:
                layout.save(self.folder)
                self.layout = layout
            record = replace(record, offset=self._make_room(size, line))
            self._segments[-1].append(record, pieces)
            self._where.append((self._segments[-1], record))
            self.next_number += 1
            self._arrays_changed()
        return record.number

    def refresh(self) -> None:
        """Update a reader to what the writer has added and deleted; the writer is always up to date."""
        with self.lock:
            known = {segment.number: segment for segment in self._segments}
            numbers = Segment.numbers(self.folder, ".index")
            # loaded after the segments were listed, since the writer saves it before the first segment; the layout of a
            # store without episodes can still change
            self.layout = (self.layout if len(self) else None) or EpisodeLayout.load(self.folder)
            if numbers and self.layout is None:
                raise UserError(f"'{self.folder}' has episodes but no {META}; copy the folder again")
            found = [known.get(number) or Segment(self.folder, number) for number in numbers]
            self._segments = [segment for segment in found if segment.refresh_if_present()]
            self._list_episodes()

    def rewind(self, next_number: int) -> None:
        """Delete the episodes from this number on; no process may be reading, and no views of them may exist."""
        self._require_writer()
        if next_number > self.next_number:
            raise UserError(
                f"'{self.folder}' has episodes up to number {self.next_number - 1}, but the run resumes at number "
                f"{next_number}: the folder is of another run or lost its end; start the run from scratch"
            )
        with self.lock:
            for segment in self._segments:
                segment.cut(sum(record.number < next_number for record in segment.records))
            self._list_episodes()
            self.next_number = next_number

    def state_dict(self) -> dict:
        """Flushes first, so that all episodes it refers to are on the disk."""
        self.flush()
        return {"next_number": self.next_number, "first_number": int(self.numbers[0]) if len(self) else None}

    def load_state_dict(self, state: dict) -> None:
        self.rewind(state["next_number"])
        if self.next_number and not len(self):
            text = "%s: all %d episodes of the checkpoint were deleted to make room for later ones (max_bytes)"
            log.warning(text, self.folder, self.next_number)
        # checkpoints of earlier versions have no first_number
        elif "first_number" in state and len(self) and self.numbers[0] > state["first_number"]:
            text = "%s: episodes %d to %d of the checkpoint were deleted to make room for later ones (max_bytes)"
            log.warning(text, self.folder, state["first_number"], self.numbers[0] - 1)

    def flush(self) -> None:
        """Flush to the disk, against power failure; a killed process loses nothing in any case."""
        for segment in self._segments:
            segment.flush()

    def close(self) -> None:
        """Flush to the disk and release the lock of the folder."""
        if self._lock is None:
            return
        for segment in self._segments:
            segment.close()
        os.close(self._lock)
        self._lock = None

    @property
    def numbers(self) -> np.ndarray:
        """Numbers of the stored episodes [E], ascending; they do not change when older episodes are deleted."""
        with self.lock:
            if self._numbers is None:
                self._numbers = np.array([record.number for _, record in self._where], np.int64)
            return self._numbers

    @property
    def ends(self) -> np.ndarray:
        """Cumulative number of steps of the stored episodes, [E]."""
        with self.lock:
            if self._ends is None:
                self._ends = np.cumsum([record.steps for _, record in self._where], dtype=np.int64)
            return self._ends

    def _list_episodes(self) -> None:
        self._segments = [segment for segment in self._segments if segment.records]
        self._where = [(segment, record) for segment in self._segments for record in segment.records]
        self._arrays_changed()

    def _arrays_changed(self) -> None:
        self._numbers = self._ends = None

    def _require_writer(self) -> None:
        if self._lock is None:
            raise UserError(f"'{self.folder}' is read-only or closed; open it with EpisodeStore(folder)")

    def _fitting_layout(self, rows: dict[str, list[np.ndarray]], steps: int) -> EpisodeLayout:
        """The layout of the store, or a new one if there is no episode yet."""
        columns = (EpisodeColumn(name, first.dtype.name, first.shape[1:]) for name, (first, *_) in rows.items())
        layout = EpisodeLayout(columns)
        if len(self):
            assert self.layout is not None
            if layout.columns != self.layout.columns:
                raise UserError(f"episode does not match '{self.folder}': {_differences(self.layout, layout)}")
            layout = self.layout
        size = layout.block_bytes(steps)
        if self.max_bytes and size > self.segment_bytes:
            raise UserError(
                f"an episode of {steps} steps takes {size / 1e6:,.1f} MB, but with max_bytes={self.max_bytes} at most "
                f"{self.segment_bytes / 1e6:,.1f} MB are allowed (an eighth); set max_bytes to {8 * size} or more"
            )
        return layout

    def _make_room(self, size: int, line: int) -> int:
        """Begin a new segment or delete old ones if needed; returns the offset of the next episode in the last one."""
        if not self._logged:
            step, limit = sum(column.row_bytes for column in self.layout.columns), "no limit"  # type: ignore[misc]
            if self.max_bytes:
                limit = f"at most {self.max_bytes / 1e6:,.1f} MB, about {self.max_bytes // step:,} steps"
            log.info("episodes in %s: %s bytes per step, %s", self.folder, f"{step:,}", limit)
            self._logged = True
        if not self._segments or self._segments[-1].data_end + size > self.segment_bytes:
            for segment in self._segments[-1:]:
                segment.close()
            number = self._segments[-1].number + 1 if self._segments else 0
            self._segments.append(Segment(self.folder, number))
        # the line has no offset yet, which takes at most 20 digits
        while self.max_bytes and self.bytes() + size + line + 20 > self.max_bytes:
            oldest = self._segments.pop(0)
            del self._where[: len(oldest.records)]
            self._arrays_changed()
            oldest.delete()
        return self._segments[-1].data_end


def _differences(old: EpisodeLayout, new: EpisodeLayout) -> str:
    was, now = ({c.name: f"{c.dtype} {list(c.shape)}" for c in layout.columns} for layout in (old, new))
    names = sorted(name for name in was.keys() | now.keys() if was.get(name) != now.get(name))
    found = [f"{name} is {now.get(name, 'missing')}, was {was.get(name, 'missing')}" for name in names]
    return "; ".join(found) + "; give another folder, or exclude keys that differ"


def _rows_of(episode: TensorDict) -> tuple[int, dict[str, list[np.ndarray]]]:
    """(T, name -> its rows, in parts): T+1 rows of an observation, T rows of other keys."""
    if not isinstance(episode, TensorDictBase):
        raise UserError(f"episode: expected a TensorDict [T], got {type(episode).__name__}")
    if episode.batch_dims != 1:
        advice = "append the episodes of each robot separately, or give transitions [N] to an EpisodeRecorder"
        raise UserError(f"episode: expected a TensorDict [T] of one robot, got {list(episode.batch_size)}; {advice}")
    (steps,) = episode.batch_size
    if not steps:
        raise UserError("episode: expected at least one step, got none")
    rows = {}
    for key, value in leaves(episode.exclude(("next", "observation"))):
        name = "/".join(key)
        if value.dtype == torch.bfloat16:
            raise UserError(f"{name} is bfloat16, which cannot be stored; append it as float16 or float32")
        values = value.numpy(force=True)
        rows[name] = [values]
        if key[0] == "observation":
            following = episode.get(("next", *key), None)
            if following is None:
                raise UserError(f"the episode has no 'next/{name}'; add it, since its last row is stored")
            following = following.numpy(force=True)
            if not np.array_equal(values[1:], following[:-1]):
                if values.dtype.kind == "f" and np.isnan(values).any():
                    raise UserError(f"{name} contains NaN, which cannot be stored; fix the env, or skip the episode")
                why = "so these are not the steps of one episode in time order; append each episode separately"
                raise UserError(f"{name}: row t+1 differs from row t of next/{name}, {why}")
            rows[name].append(following[-1:])
    return steps, rows


class EpisodeRecorder:
    """`add` every transition that `Collector.decide` returns; each episode is appended to the store when it ends.

    Transitions are kept without a copy until their episodes have ended: do not write to them. Episodes that were
    already running at the first `add` are skipped. `seeds(env, episode)` returns the seed of the k-th episode of an
    env; `tasks` are the instructions that `observation/task` indexes. Seed, task, `source` and success are stored with
    the episode. `exclude`: keys that only acting and scoring need.
    """

    def __init__(
        self,
        store: EpisodeStore,
        num_envs: int,
        source: str = "",
        tasks: Sequence[str] = (),
        seeds: Callable[[int, int], int] | None = None,
        exclude: Sequence[str] = ("noise", "trace"),
    ):
        self.store, self.num_envs, self.source = store, num_envs, source
        self.tasks, self.seeds, self.exclude = tuple(tasks), seeds, tuple(exclude)
        # transitions since the start of the oldest running episode, without `next/observation`
        self._steps: list[TensorDict] = []
        # per robot: the index of the first of these in its episode (-1: unknown), and the number of episodes before it
        self._first = [-1] * num_envs
        self._episode = [-1] * num_envs

    def add(self, td: TensorDict) -> None:
        td = td.exclude(*self.exclude).cpu()
        for env in td["is_first"].nonzero()[:, 0].tolist():
            self._first[env] = len(self._steps)
            self._episode[env] += 1
        last = td["next", "observation"]
        self._steps.append(td.exclude(("next", "observation")))
        ended = td["next", "terminated"] | td["next", "truncated"]
        for env in ended.nonzero()[:, 0].tolist():
            if self._first[env] >= 0:
                self._append(env, last[env])
            self._first[env] = -1
        if ended.any():
            # drop the transitions before all running episodes
            oldest = min((first for first in self._first if first >= 0), default=len(self._steps))
            del self._steps[:oldest]
            self._first = [first - oldest if first >= 0 else -1 for first in self._first]

    def state_dict(self) -> dict:
        """The running episodes."""
        steps = [step.clone().to_dict() for step in self._steps]
        return {"steps": steps, "first": list(self._first), "episode": list(self._episode)}

    def load_state_dict(self, state: dict) -> None:
        self._steps = [TensorDict(step, [self.num_envs]) for step in state["steps"]]
        self._first, self._episode = list(state["first"]), list(state["episode"])

    def _append(self, env: int, last: TensorDict) -> None:
        steps = self._steps[self._first[env] :]
        episode = TensorDict({}, [len(steps)])
        for key in steps[0].keys(True, True):
            rows = [step.get(key)[env] for step in steps]
            if key[0] != "observation":
                episode.set(key, torch.stack(rows))
                continue
            # [T+1, ...]: the only copy of the images before writing
            rows_and_last = torch.stack([*rows, last.get(key[1:])])
            episode.set(key, rows_and_last[:-1])
            episode.set(("next", *key), rows_and_last[1:])
        info = {"source": self.source, "success": bool(episode["next", "success"][-1])}
        task = episode.get(("observation", "task"), None)
        if self.tasks:
            info["task"] = self.tasks[0 if task is None else int(task[0])]
        if self.seeds is not None:
            info["seed"] = int(self.seeds(env, self._episode[env]))
        self.store.append(episode, **info)
