"""Curves and the timeline, reduced to a bounded size, from files to which a run appends lines."""

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from operator import itemgetter
from pathlib import Path

import numpy as np
import orjson

from sparring.processes.files import open_regular
from sparring.processes.rows import RowCheck

BUCKETS = 1024
AXES = ("update", "total_steps", "episode", "timestamp")  # the possible x axes
BINS = 480
_LAST_TIME = 1e11  # seconds: a larger value is not a valid time
CLOSE = 1200  # number of spans that are distinguishable on a screen
# stages within a rollout (collect), whose spans are written for the first updates only
FINE = ("simulate", "infer")
# values of empty buckets, and operations that join two buckets: counts, sums, minima, maxima
_EMPTY = (0.0, 0.0, np.inf, -np.inf)
_JOIN = (np.add, np.add, np.minimum, np.maximum)
BLOCK = 1 << 19  # a block and its rows fit into the processor's cache: a quarter faster than blocks of 4 MB
_FINGERPRINT = 64  # number of last bytes kept to detect a changed file: every line ends with a time and a checksum


class Tail:
    """Reads the lines that were appended since the last call. An incomplete last line is read at the next call."""

    def __init__(self, path: Path):
        self.path = path
        self.offset = 0
        self._seen = b""
        self._rows = RowCheck()
        self._is_old: bool | None = None  # an earlier version wrote it, without checksums
        self._unreadable = 0
        self._problem: str | None = None

    def was_cut(self) -> bool:
        """Whether lines that were read are gone: a resumed run removes the lines after its checkpoint."""
        if not self.offset:
            return False
        try:
            with open_regular(self.path) as file:
                file.seek(self.offset - len(self._seen))
                return file.read(len(self._seen)) != self._seen
        except OSError:
            return True

    def damage(self, count: int) -> list[str]:
        """The damage found in the file, a clause each. `count`: the number of rows that were written, at least."""
        if self._problem:
            return [f"{self.path.name} cannot be read ({self._problem})"]
        left_out = self._rows.skipped + self._unreadable
        found = [f"lines that could not be read, and are left out: {left_out}"] if left_out else []
        lost = self._rows.count_lost(count)
        found += [*self._rows.missing, *([f"the last {lost} of {count} rows are missing"] if lost else [])]
        return [f"{self.path.name}: {what}" for what in found]

    def rows(self) -> Iterator[list[dict]]:
        self._problem = None
        try:
            file = open_regular(self.path)
        except OSError as error:  # it does not exist yet, or cannot be read
            self._problem = error.strerror if os.path.lexists(self.path) else None
            return
        with file:
            end = os.fstat(file.fileno()).st_size  # lines written from now on are left for the next call
            file.seek(self.offset)
            rest = b""
            while (left := end - self.offset - len(rest)) > 0 and (block := file.read(min(BLOCK, left))):
                text, newline, torn = (rest + block).rpartition(b"\n")
                rest = torn
                if newline:
                    self.offset += len(text) + 1
                    self._seen = (text + newline)[-_FINGERPRINT:]
                    yield self._parsed(text)

    def _parsed(self, text: bytes) -> list[dict]:
        lines, rows = [line for line in text.split(b"\n") if line.strip()], []
        if self._is_old is None:
            self._is_old = not any(map(RowCheck.number, lines))
        good = lines if self._is_old else [line for line in lines if self._rows.is_intact(line)]
        for line in good:
            with suppress(orjson.JSONDecodeError):
                rows.append(orjson.loads(line))
        rows = [row for row in rows if isinstance(row, dict)]
        self._unreadable += len(good) - len(rows)
        for row in rows:
            row.pop("row", None)
            row.pop("crc", None)
        return rows


class Follower(ABC):
    """Accumulates the rows of a growing file, and starts over if the file was cut."""

    def __init__(self, path: Path):
        self.path = path
        self.starts = 0
        self._begin()

    def refresh(self) -> None:
        if self.tail.was_cut():
            self._begin()
        for rows in self.tail.rows():
            self.add(rows)

    @property
    def stamp(self) -> tuple:
        return self.starts, self.tail.offset

    @abstractmethod
    def forget(self) -> None:
        """Drop everything that was accumulated."""

    @abstractmethod
    def add(self, rows: list[dict]) -> None:
        """Accumulate the next rows."""

    def _begin(self) -> None:
        self.starts += 1
        self.tail = Tail(self.path)
        self.forget()


class Curves:
    """Buckets of equally many rows, each with mean, minimum and maximum; joins pairs if there are too many."""

    def __init__(self):
        self.rows = 0
        self.width = 1  # rows per bucket
        self.names: dict[str, int] = {}
        self.count, self.sum, self.least, self.most = (np.zeros((0, BUCKETS)) for _ in _EMPTY)  # [K, BUCKETS]

    def add(self, rows: list[dict]) -> None:
        if not rows:
            return
        for name in sorted(set().union(*rows) - self.names.keys()):
            self.names[name] = len(self.names)
        self._make_room(self.rows + len(rows))
        values = _columns(rows, list(self.names))
        bucket = (self.rows + np.arange(len(rows))) // self.width
        first = np.flatnonzero(np.diff(bucket, prepend=-1))
        places, there = bucket[first], np.isfinite(values)
        self.count[:, places] += np.add.reduceat(there, first, axis=1, dtype=float)
        self.sum[:, places] += np.add.reduceat(np.where(there, values, 0), first, axis=1)
        least = np.minimum.reduceat(np.where(there, values, np.inf), first, axis=1)
        self.least[:, places] = np.minimum(self.least[:, places], least)
        most = np.maximum.reduceat(np.where(there, values, -np.inf), first, axis=1)
        self.most[:, places] = np.maximum(self.most[:, places], most)
        self.rows += len(rows)

    def __contains__(self, name: str) -> bool:
        return name in self.names and bool(self.count[self.names[name]].any())

    def mean(self, name: str) -> float | None:
        k = self.names.get(name)
        return float(self.sum[k].sum() / self.count[k].sum()) if name in self else None

    def first(self, name: str) -> float | None:
        """The minimum, which for times is the first."""
        return float(self.least[self.names[name]].min()) if name in self else None

    def points(self, began: float | None = None) -> dict:
        """`axes`: name -> [B]; `curves`: name -> mean, low, high [B], the last two if buckets hold several rows.
        Times are relative to `began`, by default to the first time."""
        used = -(-self.rows // self.width)
        with np.errstate(invalid="ignore"):
            means = self.sum[:, :used] / np.where(self.count[:, :used] > 0, self.count[:, :used], np.nan)
        curves = {}
        for name in sorted(name for name in self.names if name not in AXES and name in self):
            k = self.names[name]
            curves[name] = {"mean": _short(means[k])}
            if self.width > 1:
                curves[name] |= {"low": _short(self.least[k, :used]), "high": _short(self.most[k, :used])}
        axes = {name: means[self.names[name]] for name in AXES if name in self}
        if "timestamp" in axes:
            axes["timestamp"] = axes["timestamp"] - (self.first("timestamp") if began is None else began)
        axes = {name: _short(values) for name, values in axes.items()}
        return {"rows": self.rows, "width": self.width, "axes": axes, "curves": curves}

    def _make_room(self, rows: int) -> None:
        held = [self.count, self.sum, self.least, self.most]
        if more := len(self.names) - len(self.count):
            held = [np.concatenate([h, np.full((more, BUCKETS), e)]) for h, e in zip(held, _EMPTY, strict=True)]
        while rows > BUCKETS * self.width:
            self.width *= 2
            for buckets, join, empty in zip(held, _JOIN, _EMPTY, strict=True):
                buckets[:, : BUCKETS // 2] = join(buckets[:, ::2], buckets[:, 1::2])
                buckets[:, BUCKETS // 2 :] = empty
        self.count, self.sum, self.least, self.most = held


def _columns(rows: list[dict], names: list[str]) -> np.ndarray:
    try:
        # rows usually have the same keys: itemgetter is much faster than a lookup per name and row
        return np.array(list(map(itemgetter(*names), rows)), float).reshape(len(rows), -1).T
    except (KeyError, TypeError, ValueError):
        return np.array([_numbers([row.get(name) for row in rows]) for name in names])


def _numbers(values: list) -> np.ndarray:
    try:
        return np.array(values, float)
    except (TypeError, ValueError):
        return np.array([value if isinstance(value, int | float) else np.nan for value in values], float)


def _short(values: np.ndarray) -> np.ndarray:
    """As float32: seven digits are enough for a plot, and take half the space."""
    with np.errstate(over="ignore"):
        return np.where(np.isfinite(values), values, np.nan).astype(np.float32)


class Timeline(Follower):
    """Stages over time, from `timeline.jsonl`: shares of the whole run in bins, and the last spans one by one."""

    def lanes(self) -> dict | None:
        """`lanes`: who, stage, busy share of each bin `[B]`, spans of the close-up `[[begin, end], ...]`."""
        if not self.busy or self.began is None:
            return None
        used = 1 + max((np.flatnonzero(busy)[-1] for busy in self.busy.values() if busy.any()), default=0)
        # start when every lane has data: spans of one group are written after those of another
        firsts: dict[tuple[str, str], float] = {}
        for who, stage, begin, _ in self.close:
            if stage in FINE:
                firsts.setdefault((who, stage), begin)
        began = max(firsts.values(), default=self.began)
        close = [(who, stage, max(begin, began), end) for who, stage, begin, end in self.close if end > began]
        lanes = []
        for who, stage in sorted(self.busy, key=_order):
            turns = [[begin - began, end - began] for *lane, begin, end in close if lane == [who, stage]]
            busy = self.busy[who, stage]
            lane = {"who": who, "stage": stage, "share": np.round(busy[:used] / self.width, 3).astype(np.float32)}
            lanes.append(lane | {"seconds": float(busy.sum()), "turns": np.round(np.array(turns).reshape(-1, 2), 6)})
        return {"lanes": lanes, "bin_seconds": self.width, "close_began": began - self.began}

    def forget(self) -> None:
        self.began: float | None = None
        self.width = 0.05  # seconds of a bin
        self.busy: dict[tuple[str, str], np.ndarray] = {}  # (who, stage) -> [BINS]
        self.close: deque[tuple[str, str, float, float]] = deque(maxlen=CLOSE)  # (who, stage, begin, end)
        self._since_fine: list[tuple[str, str, float, float]] = []

    def add(self, rows: list[dict]) -> None:
        named = (row for row in rows if row.keys() >= {"who", "stage", "begin", "end"})
        spans = [(row["who"], row["stage"], row["begin"], row["end"]) for row in named]
        spans = [span for span in spans if _is_turn(*span)]
        if not spans:
            return
        if self.began is None:
            self.began = min(begin for _, _, begin, _ in spans)
        # the close-up ends with the last fine span; without them, its spans would soon be hours apart
        for span in spans:
            self._since_fine.append(span)
            if span[1] in FINE:
                self.close.extend(self._since_fine)
                self._since_fine.clear()
        del self._since_fine[: -len(FINE) * 4]
        last = max(end for *_, end in spans) - self.began
        while last >= BINS * self.width:
            self.width *= 2
            for busy in self.busy.values():
                busy[: BINS // 2] = busy[::2] + busy[1::2]
                busy[BINS // 2 :] = 0
        times: dict[tuple[str, str], list] = {}
        for who, stage, begin, end in spans:
            times.setdefault((who, stage), []).append((begin, end))
        for lane, turns in times.items():
            begin, end = (np.array(turns).T - self.began).clip(0)  # [S] each
            self.busy.setdefault(lane, np.zeros(BINS))[:] += _spread(begin, end, self.width)


def _is_turn(who: object, stage: object, begin: object, end: object) -> bool:
    is_timed = isinstance(begin, float) and isinstance(end, float) and 0 <= begin <= end < _LAST_TIME
    return is_timed and isinstance(who, str) and isinstance(stage, str)


def _spread(begin: np.ndarray, end: np.ndarray, width: float) -> np.ndarray:
    first, last = (np.minimum(times // width, BINS - 1).astype(int) for times in (begin, end))
    busy = np.zeros(BINS)
    within = first == last
    np.add.at(busy, first[within], (end - begin)[within])
    first, last, begin, end = first[~within], last[~within], begin[~within], end[~within]
    np.add.at(busy, first, (first + 1) * width - begin)
    np.add.at(busy, last, end - last * width)
    steps = np.zeros(BINS + 1)  # full bins in between
    np.add.at(steps, first + 1, width)
    np.add.at(steps, last, -width)
    return busy + np.cumsum(steps)[:BINS]


def _order(lane: tuple[str, str]) -> tuple:
    """Sort collectors before learners, and stages in the order of execution."""
    who, stage = lane
    stages = ("reset", "collect", "simulate", "infer", "complete", "wait", "learn")
    return who.startswith("learner"), who, stages.index(stage) if stage in stages else len(stages), stage
