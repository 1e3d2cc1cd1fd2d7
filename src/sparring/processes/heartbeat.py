"""Heartbeats and watchdogs: one process finds out that another one hangs. No torch, no numpy.

Each rank of `--gpus N` writes a row of whole numbers in a file that all of them map; the launcher measures by its own
clock how long these stay the same. The collecting process shows its learner by when each of its stages has to be over;
what a process does with envs of its own, a thread of it watches in the same way, and the guard of a command (guard.py).
"""

import atexit
import contextlib
import logging
import math
import mmap
import os
import signal
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from sparring.errors import StageFailed, visible

if TYPE_CHECKING:
    import numpy as np

log = logging.getLogger("sparring.env")

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
# seconds to make the env and the policy: weights of gigabytes are read
MAKING_S = 1800.0
# stages that can hang, in words
DOING = {
    "collect": "collecting",
    "load": "loading weights, or a checkpoint",
    "report": "telling of a rollout (the env's state, films)",
    "make": "making the env and the policy",
    "reset": "resetting the env",
    "simulate": "simulating (a step of the env)",
    "infer": "deciding (the policy's act)",
    "complete": "completing a rollout (the policy's complete and value)",
    "gate": "scoring a rollout again (for the parity gate)",
    "share": "handing over a rollout",
    "wait": "waiting for weights",
    "render": "drawing the env",
    "state": "asking the env where it is, or putting it back",
    "close": "closing the env",
    "rollout": "waiting for a rollout",
}
# of a process's own envs, in the order of their columns; and those that are broken off where a run was asked to stop
OWN = ("make", "reset", "simulate", "render", "state", "close", "rollout")
_BROKEN_OFF = ("reset", "simulate", "rollout")
# how often the thread looks; how long after a deadline it acts: whoever waits for a worker has noticed by then; and how
# much later it ends the process, if that had no effect
_WATCH_S, _AFTER_S, _END_S = 0.2, 0.5, 3.0


def overdue(stage: str, group: int, watchdog_s: float) -> str:
    """The sentence about a stage whose deadline has passed."""
    limit = f"rollout.watchdog_s={watchdog_s:g} seconds, the first time {FIRST_TIME} times as long"
    limit = f"{MAKING_S:g} seconds" if stage == "make" else limit
    return f"{DOING[stage]} has not come to an end, in group {group}; it is given {limit}"


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


def is_first_report(sentence: str) -> bool:
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
        self._columns = {stage: column for column, stage in enumerate(stages)}
        self._known: set[tuple[int, str]] = set()
        # since when no stage has been seen at work
        self.idle_since: float | None = None

    def enter(self, lane: int, stage: str, patience_s: float | None = None) -> None:
        if (column := self._columns.get(stage)) is not None:
            patience_s = patience_s or self.watchdog_s * (1 if (lane, stage) in self._known else FIRST_TIME)
            self.table[lane, column] = time.monotonic() + patience_s

    def leave(self, lane: int, stage: str) -> None:
        if (column := self._columns.get(stage)) is not None:
            self.table[lane, column] = 0
            self._known.add((lane, stage))

    def look(self, now: float | None = None) -> tuple[tuple[int, str] | None, float]:
        """A lane and its stage that is late; and for how many seconds no stage has been at work."""
        # one copy: a stage may end at any time
        now, table = now or time.monotonic(), self.table.copy()
        self.idle_since = None if table.any() else self.idle_since or now
        late = ((table > 0) & (table < now)).nonzero()
        first = (int(late[0][0]), self.stages[int(late[1][0])]) if len(late[0]) else None
        return first, now - (self.idle_since or now)


class OwnStages:
    """What this process does with its own envs: a thread watches by when each stage has to be over.

    Where it waits for a worker, whoever waits calls `check`. Any other hang is broken off by a signal, whose handler
    raises in the main thread: simulators in Python, and calls of the system, wake up. If that has no effect, a process
    that is ours (a command) is ended.
    """

    # who is watched now; None: nobody, or by another process
    now: "OwnStages | None" = None
    # whether the process may be ended
    is_ours = False

    def __init__(self, lanes: int, watchdog_s: float):
        """A lane for each thread that has envs."""
        import numpy as np

        # what the guard reads: since when this process ends, and has reported why; and the table
        size = 8 * (1 + lanes * len(OWN))
        self._file = os.memfd_create("stages") if hasattr(os, "memfd_create") else -1
        if self._file >= 0:
            weakref.finalize(self, os.close, self._file)
            os.ftruncate(self._file, size)
        self._shared = np.frombuffer(mmap.mmap(self._file, size))
        self.deadlines = StageDeadlines(self._shared[1:].reshape(lanes, len(OWN)), OWN, watchdog_s)
        # what is broken off if it is at work then: somebody asked to stop before
        self.stop_at = math.inf
        # gives what is to be called with the error that ends the process, or None
        self.last_words: Callable[[], Callable[[StageFailed], None] | None] = lambda: None
        self._thread: threading.Thread | None = None
        # of the clock: until then nothing is late
        self._patient_until = 0.0
        # whether envs are the main thread's, which a signal wakes
        self._wakes = False

    @property
    def has_hung(self) -> bool:
        """Whether something never came back, which would hold up the end of the process."""
        return bool(self.deadlines.table.any())

    def watch(self) -> None:
        if self.is_ours and OwnStages.now is not self:
            # which reads this file
            from sparring.processes.guard import start_guard

            start_guard(self, self._file, self.deadlines.watchdog_s)
        OwnStages.now, self.stop_at = self, math.inf
        self._wakes = threading.current_thread() is threading.main_thread()
        if self._wakes:
            # ignored by who does not handle it, as by programs that an env starts
            signal.signal(signal.SIGURG, lambda *_: self.check(_AFTER_S))
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._look_on, name="watchdog", daemon=True)
            self._thread.start()

    def end_reported(self) -> None:
        """This process reports how it ends itself, and ends soon: its guard sees to that only."""
        self._shared[0] = time.monotonic()

    def check(self, after_s: float = 0.0) -> None:
        """Raises StageFailed where a stage is late, by so many seconds."""
        if (why := self._late(after_s)) is not None:
            # once: what is done to leave is not broken off. An env that takes no notice is told again; one of a group,
            # in a thread of its own, does not notice
            table = self.deadlines.table
            table[table > 0] = (
                time.monotonic() + FIRST_TIME * self.deadlines.watchdog_s if len(table) == 1 else math.inf
            )
            self.stop_at = math.inf
            raise StageFailed(why)

    def _late(self, after_s: float = 0.0) -> str | None:
        now = time.monotonic() - after_s
        if now < self._patient_until:
            return None
        late, _ = self.deadlines.look(now)
        if late:
            group, stage = late
            return overdue(stage, group, self.deadlines.watchdog_s)
        busy = [stage for stage in _BROKEN_OFF if self.deadlines.table[:, OWN.index(stage)].any()]
        return f"asked to stop, it broke off {DOING[busy[0]]}" if busy and now > self.stop_at else None

    def _look_on(self) -> None:
        last = time.monotonic()
        while OwnStages.now is self:
            time.sleep(_WATCH_S)
            now = time.monotonic()
            # this process was stopped itself, as by Ctrl-Z: what took so long is given its time again
            if now - last > 10 * _WATCH_S:
                self._patient_until = now + self.deadlines.watchdog_s
            last = now
            if self._late(_AFTER_S + _END_S) is not None and self.is_ours:
                self._end_process()
            elif self._late(_AFTER_S) is not None and self._wakes:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)

    def _end_process(self) -> None:
        why = self._late() or ""
        error = StageFailed(f"{why}, and nothing but the end of the process ends it")
        if (tell := self.last_words()) is not None:
            tell(error)
        self.end_reported()
        print(f"sparring: {visible(error)}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)


class OwnStage:
    """Around what this process does with envs of its own. (A class: it is entered for each step of an env.)"""

    def __init__(self, stage: str, lane: int = 0, patience_s: float | None = None):
        self.stage, self.lane, self.patience_s = stage, lane, patience_s

    def __enter__(self) -> None:
        self.stages = OwnStages.now
        if self.stages is not None:
            self.stages.deadlines.enter(self.lane, self.stage, self.patience_s)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if self.stages is not None:
            self.stages.deadlines.leave(self.lane, self.stage)
