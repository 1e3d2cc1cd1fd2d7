"""Curves and the timeline of a report."""

from collections import deque
from operator import itemgetter

import numpy as np

from sparring.report.tail import Follower

# ---- Who was at which stage when: how busy each was over the whole run, and the last turns one by one.


BINS = 480
# turns that can be told apart on a screen
CLOSE = 1200
# of these every turn is written for the first updates only; a rollout (collect) is made of them
FINE = ("simulate", "infer")


class Timeline(Follower):
    """Lanes of `timeline.jsonl`: one for every stage of everyone."""

    def lanes(self) -> dict | None:
        """`lanes`: who, stage, busy seconds of each bin `[B]`, turns of the close look `[[begin, end], ...]`."""
        if not self.busy:
            return None
        used = 1 + max((np.flatnonzero(busy)[-1] for busy in self.busy.values() if busy.any()), default=0)
        began = self._close_began()
        close = [(who, stage, max(begin, began), end) for who, stage, begin, end in self.close if end > began]
        lanes = []
        for who, stage in sorted(self.busy, key=_order):
            turns = [[begin - began, end - began] for *lane, begin, end in close if lane == [who, stage]]
            busy = self.busy[who, stage]
            lanes.append(
                {
                    "who": who,
                    "stage": stage,
                    "share": np.round(busy[:used] / self.width, 3).astype(np.float32),
                    "seconds": float(busy.sum()),
                    "turns": np.round(np.array(turns).reshape(-1, 2), 6),
                }
            )
        return {"lanes": lanes, "bin_seconds": self.width, "close_began": began - self.began}

    def _close_began(self) -> float:
        """From when on every lane is there: turns of one group are written after those of another."""
        firsts: dict[tuple[str, str], float] = {}
        for who, stage, begin, _ in self.close:
            if stage in FINE:
                firsts.setdefault((who, stage), begin)
        return max(firsts.values(), default=self.began)

    def forget(self) -> None:
        self.began: float | None = None
        # seconds of a bin
        self.width = 0.05
        # (who, stage) -> [BINS]
        self.busy: dict[tuple[str, str], np.ndarray] = {}
        # (who, stage, begin, end)
        self.close: deque[tuple[str, str, float, float]] = deque(maxlen=CLOSE)
        self._since_fine: list[tuple[str, str, float, float]] = []

    def add(self, rows: list[dict]) -> None:
        spans = [(row["who"], row["stage"], row["begin"], row["end"]) for row in rows if _is_span(row)]
        if not spans:
            return
        if self.began is None:
            self.began = min(begin for _, _, begin, _ in spans)
        self._look_closely(spans)
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
            # [S], [S]
            begin, end = (np.array(turns).T - self.began).clip(0)
            self.busy.setdefault(lane, np.zeros(BINS))[:] += _spread(begin, end, self.width)

    def _look_closely(self, spans: list[tuple]) -> None:
        """Keep the last turns while there are fine ones; without them they would soon be hours apart."""
        for span in spans:
            self._since_fine.append(span)
            if span[1] in FINE:
                self.close.extend(self._since_fine)
                self._since_fine.clear()
        # what followed the last fine one by far is of no use
        del self._since_fine[: -len(FINE) * 4]


def _is_span(row: dict) -> bool:
    return isinstance(row.get("begin"), float) and isinstance(row.get("end"), float) and row.keys() >= {"who", "stage"}


def _spread(begin: np.ndarray, end: np.ndarray, width: float) -> np.ndarray:
    """Seconds in each of BINS bins that turns `[S]` took."""
    first, last = (np.minimum(times // width, BINS - 1).astype(int) for times in (begin, end))
    busy = np.zeros(BINS)
    within = first == last
    np.add.at(busy, first[within], (end - begin)[within])
    first, last, begin, end = first[~within], last[~within], begin[~within], end[~within]
    np.add.at(busy, first, (first + 1) * width - begin)
    np.add.at(busy, last, end - last * width)
    # whole bins between them
    steps = np.zeros(BINS + 1)
    np.add.at(steps, first + 1, width)
    np.add.at(steps, last, -width)
    return busy + np.cumsum(steps)[:BINS]


def _order(lane: tuple[str, str]) -> tuple:
    """Those who collect above those who learn; stages as they follow each other."""
    who, stage = lane
    stages = ("reset", "collect", "simulate", "infer", "complete", "wait", "learn")
    return who.startswith("learner"), who, stages.index(stage) if stage in stages else len(stages), stage


# ---- Any number of rows as curves of few points: every bucket of rows keeps its mean, its least and its most.


BUCKETS = 1024
# what a curve may be drawn over
AXES = ("update", "total_steps", "episode", "timestamp")


class Curves:
    """Buckets of equally many rows. When there would be too many, pairs become one."""

    def __init__(self):
        self.rows = 0
        # rows of a bucket
        self.width = 1
        self.names: dict[str, int] = {}
        # [K, BUCKETS]
        self.count, self.sum, self.least, self.most = _empty(0)

    def add(self, rows: list[dict]) -> None:
        """Rows that follow; a column that a row lacks, or where it has no number, is missing there."""
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
        """Whether any row has a number there."""
        return name in self.names and bool(self.count[self.names[name]].any())

    def mean(self, name: str) -> float | None:
        """Over all rows."""
        if name not in self:
            return None
        k = self.names[name]
        return float(self.sum[k].sum() / self.count[k].sum())

    def ends(self, name: str) -> tuple[float, float] | None:
        """Of the first and the last bucket that have one."""
        if name not in self:
            return None
        k = self.names[name]
        at = np.flatnonzero(self.count[k])[[0, -1]]
        first, last = (self.sum[k, at] / self.count[k, at]).tolist()
        return first, last

    def last(self, name: str) -> float | None:
        ends = self.ends(name)
        return ends and ends[1]

    def first(self, name: str) -> float | None:
        """Its least, which of times is the first."""
        return float(self.least[self.names[name]].min()) if name in self else None

    def points(self, began: float | None = None) -> dict:
        """`axes`: name -> [B]; `curves`: name -> mean, low, high [B], the last two where buckets hold several rows.

        Times are told from `began` on, or else from the first.
        """
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
        """For so many rows and for every name."""
        more = len(self.names) - len(self.count)
        if more:
            held = (self.count, self.sum, self.least, self.most)
            pairs = zip(held, _empty(more), strict=True)
            self.count, self.sum, self.least, self.most = (np.concatenate(pair) for pair in pairs)
        while rows > BUCKETS * self.width:
            self.width *= 2
            for held, join in (
                (self.count, np.add),
                (self.sum, np.add),
                (self.least, np.minimum),
                (self.most, np.maximum),
            ):
                held[:, : BUCKETS // 2] = join(held[:, ::2], held[:, 1::2])
            half = slice(BUCKETS // 2, None)
            self.count[:, half], self.sum[:, half], self.least[:, half], self.most[:, half] = 0, 0, np.inf, -np.inf


class Table(Follower):
    """The curves of a JSONL file."""

    def forget(self) -> None:
        self.curves = Curves()

    def add(self, rows: list[dict]) -> None:
        self.curves.add(rows)


def _empty(names: int) -> list[np.ndarray]:
    """Counts, sums, least and most of nothing."""
    return [np.full((names, BUCKETS), value) for value in (0.0, 0.0, np.inf, -np.inf)]


def _columns(rows: list[dict], names: list[str]) -> np.ndarray:
    """`[K, R]`; nan where there is no number."""
    try:
        # rows mostly are all alike: some times faster than to ask each for every name
        return np.array(list(map(itemgetter(*names), rows)), float).reshape(len(rows), -1).T
    except (KeyError, TypeError, ValueError):
        return np.array([_numbers([row.get(name) for row in rows]) for name in names])


def _numbers(values: list) -> np.ndarray:
    """`[R]`, also where there are words or lists among them."""
    try:
        return np.array(values, float)
    except (TypeError, ValueError):
        return np.array([value if isinstance(value, int | float) else np.nan for value in values], float)


def _short(values: np.ndarray) -> np.ndarray:
    """Seven digits are more than can be seen, and take half the space."""
    with np.errstate(over="ignore"):
        return np.where(np.isfinite(values), values, np.nan).astype(np.float32)
