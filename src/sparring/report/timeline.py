"""Who was at which stage when: how busy each was over the whole run, and the last turns one by one."""

from collections import deque

import numpy as np

from sparring.report.tail import Follower

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
