"""Heartbeats and watchdogs: one process finds out that another one hangs. No torch, no numpy.

Each rank of `--gpus N` writes a row of whole numbers in a file that all of them map; the launcher measures by its own
clock how long these stay the same. The collecting process shows its learner by when each of its stages has to be over.
"""

import atexit
import contextlib
import mmap
import os
import threading
import time
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

# names the file, in the environment of the ranks
FILE = "SPARRING_HEARTBEATS"
# of a row: beats of the heart (by a thread, so a rank that computes for minutes still lives); collectives entered so
# far; where the rank is now; updates so far
BEATS, ENTERED, PLACE, UPDATES, COLUMNS = range(5)
# where a rank is: in no collective; in one that all must reach soon; in one where some may come minutes later
ELSEWHERE, TOGETHER, PATIENT = range(3)
# how much longer everything may take the first time, when things are read and compiled; and when a rank leaves, whose
# heart no longer beats while its libraries are put away
FIRST_TIME = 10
_BEAT_S = 0.2
# seconds until a rank must have begun: libraries are read from slow disks
_BEGIN_S = 600.0


@cache
def own_heartbeat() -> memoryview | None:
    """The row of this rank, whose heart begins to beat with the first call; None where nobody launched it."""
    if FILE not in os.environ:
        return None
    row = _rows(Path(os.environ[FILE]))[int(os.environ["RANK"])]

    def beat() -> None:
        while True:
            row[BEATS] += 1
            time.sleep(_BEAT_S)

    threading.Thread(target=beat, daemon=True).start()
    atexit.register(row.__setitem__, UPDATES, 0)
    return row


def is_first_to_say(sentence: str) -> bool:
    """Of the ranks that were launched together: an error that all of them have is shown once."""
    if FILE not in os.environ:
        return True
    said = Path(os.environ[FILE]).with_name(f"said-{zlib.crc32(sentence.encode()):08x}")
    # a launcher that has gone has taken the folder along
    with contextlib.suppress(FileNotFoundError):
        try:
            said.touch(exist_ok=False)
        except FileExistsError:
            return False
    return True


def _rows(file: Path) -> list[memoryview]:
    """Of all ranks, in a mapped file."""
    with open(file, "r+b") as opened:
        numbers = memoryview(mmap.mmap(opened.fileno(), 0)).cast("q")
    return [numbers[first : first + COLUMNS] for first in range(0, len(numbers), COLUMNS)]


class _Rank:
    """As the launcher sees it: for how many seconds it has shown the same."""

    def __init__(self, row: memoryview):
        self.row, self.seen = row, [0] * COLUMNS
        self.silent = self.still = 0.0

    def look(self, seconds: float) -> None:
        now, before = self.row.tolist(), self.seen
        self.silent = self.silent + seconds if now[BEATS] == before[BEATS] else 0.0
        moved = (now[ENTERED], now[PLACE]) != (before[ENTERED], before[PLACE])
        self.still = 0.0 if moved else self.still + seconds
        self.seen = now


class Watchdog:
    """Finds the ranks that hang, by the heartbeats in `file`, which it makes. Call `look` often."""

    def __init__(self, file: Path, ranks: int, watchdog_s: float):
        file.write_bytes(bytes(8 * COLUMNS * ranks))
        self.watchdog_s, self.ranks = watchdog_s, [_Rank(row) for row in _rows(file)]

    def look(self, alive: list[int], seconds: float) -> tuple[list[int], str] | None:
        """The ranks that hang, and why one thinks so; `seconds` went by since the last call."""
        watched = {rank: self.ranks[rank] for rank in alive}
        for rank in watched.values():
            rank.look(seconds)
        patience = self.watchdog_s * (1 if all(rank.seen[UPDATES] for rank in watched.values()) else FIRST_TIME)
        silent = [n for n, rank in watched.items() if rank.silent > (patience if rank.seen[BEATS] else _BEGIN_S)]
        if silent:
            return silent, "gave no sign of life"
        if not any(rank.seen[PLACE] == TOGETHER and rank.still > patience for rank in watched.values()):
            return None
        missing = [n for n, rank in watched.items() if rank.seen[PLACE] == ELSEWHERE]
        if missing:
            return missing, "did not come to where the others wait for it"
        if all(rank.still > patience for rank in watched.values()):
            return alive, "wait for each other"
        return None


class StageDeadlines:
    """By when each stage has to be over: a table `[lanes, stages]` that one process writes and another watches.

    0 where a stage is not at work. The first time it may take ten times as long.
    """

    def __init__(self, table: "np.ndarray", stages: Sequence[str], watchdog_s: float):
        self.table, self.stages, self.watchdog_s = table, stages, watchdog_s
        self._known: set[tuple[int, str]] = set()
        # since when no stage has been seen at work
        self.idle_since: float | None = None

    def enter(self, lane: int, stage: str, patience_s: float | None = None) -> None:
        if stage in self.stages:
            patience_s = patience_s or self.watchdog_s * (1 if (lane, stage) in self._known else FIRST_TIME)
            self.table[lane, self.stages.index(stage)] = time.monotonic() + patience_s

    def leave(self, lane: int, stage: str) -> None:
        if stage in self.stages:
            self.table[lane, self.stages.index(stage)] = 0
            self._known.add((lane, stage))

    def look(self) -> tuple[tuple[int, str] | None, float]:
        """A lane and its stage that is late; and for how many seconds no stage has been at work."""
        # one copy: a stage may end at any time
        now, table = time.monotonic(), self.table.copy()
        self.idle_since = None if table.any() else self.idle_since or now
        late = ((table > 0) & (table < now)).nonzero()
        first = (int(late[0][0]), self.stages[int(late[1][0])]) if len(late[0]) else None
        return first, now - (self.idle_since or now)
