"""Any number of rows as curves of few points: every bucket of rows keeps its mean, its least and its most."""

from operator import itemgetter

import numpy as np

from sparring.report.tail import Follower

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
