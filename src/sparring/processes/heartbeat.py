"""Heartbeats and watchdogs: detect processes and stages that hang. No torch, no numpy.

Each rank of `--gpus N` writes a row of integers into a file that all of them map; the launcher measures with its own
clock how long they do not change. The actor process writes deadlines of its stages for the learner. A thread watches
the deadlines of envs in its own process, and so does the guard of a command (guard.py).
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

# environment variable of the ranks with the path of the file
FILE = "SPARRING_HEARTBEATS"
# columns of a row: heartbeats (by a thread, so that a rank that computes for minutes counts as alive); number of
# entered collectives; current place; number of updates; and the number of columns
BEATS, ENTERED, PLACE, UPDATES, COLUMNS = range(5)
# place of a rank: in no collective; in one that all must reach soon; in one that some may reach minutes later
OUTSIDE, COLLECTIVE, BARRIER = range(3)
# factor of timeouts for the first time, which includes loading and compiling, and for the end of a rank, whose
# heartbeat stops while its libraries are unloaded
FIRST_TIME = 10
_BEAT_S = 0.2
# timeout of the start of a rank, which may load libraries from slow disks
_BEGIN_S = 600.0
# timeout of making the env and the policy, which may load gigabytes of weights
MAKING_S = 1800.0
# stages that can hang, as text for messages
DOING = {
    "collect": "collecting",
    "load": "loading weights, or a checkpoint",
    "report": "reporting a rollout (the env's state, videos)",
    "make": "making the env and the policy",
    "reset": "resetting the env",
    "simulate": "simulating (a step of the env)",
    "infer": "deciding (the policy's act)",
    "complete": "completing a rollout (the policy's complete and value)",
    "gate": "scoring a rollout again (for the parity gate)",
    "share": "handing over a rollout",
    "wait": "waiting for weights",
    "render": "drawing the env",
    "state": "saving or restoring the state of the env",
    "close": "closing the env",
    "rollout": "waiting for a rollout",
}
# stages of the envs of this process, in the order of their columns; stages that are interrupted if a run must stop
OWN = ("make", "reset", "simulate", "render", "state", "close", "rollout")
_INTERRUPTED = ("reset", "simulate", "rollout")
# period of the thread; its delay after a deadline, until which code that waits for a worker has raised by itself; and
# the time after that until it ends the process
_WATCH_S, _AFTER_S, _END_S = 0.2, 0.5, 3.0


def overdue(stage: str, group: int, watchdog_s: float) -> str:
    """A sentence about a stage whose deadline has passed."""
    setting = f"rollout.watchdog_s={watchdog_s:g}, the first time {FIRST_TIME} times as long; "
    limit, setting = (MAKING_S, "") if stage == "make" else (watchdog_s, setting)
    return f"{DOING[stage]} has not finished within {limit:g} seconds ({setting}group {group})"


@cache
def own_heartbeat() -> memoryview | None:
    """The row of this rank; the first call starts its heartbeat. None without a launcher."""
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


def is_first_report(message: str) -> bool:
    """Whether no other rank of this launch has reported this message, so that a common error is shown once."""
    if FILE not in os.environ:
        return True
    mark = Path(os.environ[FILE]).with_name(f"reported-{zlib.crc32(message.encode()):08x}")
    # without the folder, the launcher has ended
    with contextlib.suppress(FileNotFoundError):
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            return False
    return True


def _rows(file: Path) -> list[memoryview]:
    """The rows of all ranks, in a mapped file."""
    with open(file, "r+b") as opened:
        numbers = memoryview(mmap.mmap(opened.fileno(), 0)).cast("q")
    return [numbers[first : first + COLUMNS] for first in range(0, len(numbers), COLUMNS)]


class _Rank:
    """A rank as seen by the launcher: seconds without a heartbeat (`silent`) and at the same place (`still`)."""

    def __init__(self, row: memoryview):
        self.row, self.seen = row, [0] * COLUMNS
        self.silent = self.still = 0.0

    def update(self, seconds: float) -> None:
        now, before = self.row.tolist(), self.seen
        self.silent = self.silent + seconds if now[BEATS] == before[BEATS] else 0.0
        moved = (now[ENTERED], now[PLACE]) != (before[ENTERED], before[PLACE])
        self.still = 0.0 if moved else self.still + seconds
        self.seen = now


class Watchdog:
    """Detects ranks that hang, by the heartbeats in `file`, which it creates. Call `check` often."""

    def __init__(self, file: Path, ranks: int, watchdog_s: float):
        file.write_bytes(bytes(8 * COLUMNS * ranks))
        self.watchdog_s, self.ranks = watchdog_s, [_Rank(row) for row in _rows(file)]

    def check(self, alive: list[int], seconds: float) -> tuple[list[int], str] | None:
        """The ranks that hang, and the evidence; `seconds`: time since the last call."""
        watched = {rank: self.ranks[rank] for rank in alive}
        for rank in watched.values():
            rank.update(seconds)
        timeout_s = self.watchdog_s * (1 if all(rank.seen[UPDATES] for rank in watched.values()) else FIRST_TIME)
        silent = [n for n, rank in watched.items() if rank.silent > (timeout_s if rank.seen[BEATS] else _BEGIN_S)]
        if silent:
            return silent, "had no heartbeat"
        if not any(rank.seen[PLACE] == COLLECTIVE and rank.still > timeout_s for rank in watched.values()):
            return None
        missing = [n for n, rank in watched.items() if rank.seen[PLACE] == OUTSIDE]
        if missing:
            return missing, "did not enter the collective of the others"
        if all(rank.still > timeout_s for rank in watched.values()):
            return alive, "waited for each other"
        return None


class StageDeadlines:
    """Deadlines of stages: a table `[groups, stages]` that one process writes and another one watches.

    0: the stage is not running. Its first time may take ten times as long.
    """

    def __init__(self, table: "np.ndarray", stages: Sequence[str], watchdog_s: float):
        self.table, self.stages, self.watchdog_s = table, stages, watchdog_s
        self._columns = {stage: column for column, stage in enumerate(stages)}
        self._known: set[tuple[int, str]] = set()
        # start of the current time without a running stage
        self.idle_since: float | None = None

    def enter(self, group: int, stage: str, timeout_s: float | None = None) -> None:
        if (column := self._columns.get(stage)) is not None:
            timeout_s = timeout_s or self.watchdog_s * (1 if (group, stage) in self._known else FIRST_TIME)
            self.table[group, column] = time.monotonic() + timeout_s

    def leave(self, group: int, stage: str) -> None:
        if (column := self._columns.get(stage)) is not None:
            self.table[group, column] = 0
            self._known.add((group, stage))

    def check(self, now: float | None = None) -> tuple[tuple[int, str] | None, float]:
        """A group and its stage that is late, if any; and the seconds since any stage was running."""
        # a copy, because a stage may end at any time
        now, table = now or time.monotonic(), self.table.copy()
        self.idle_since = None if table.any() else self.idle_since or now
        late = ((table > 0) & (table < now)).nonzero()
        first = (int(late[0][0]), self.stages[int(late[1][0])]) if len(late[0]) else None
        return first, now - (self.idle_since or now)


class OwnStages:
    """Stages of the envs in this process, whose deadlines a thread watches.

    Code that waits for a worker calls `check`. Any other hang is interrupted by a signal, whose handler raises in the
    main thread: this wakes simulators in Python, and system calls. If it has no effect, the process is ended, provided
    that it belongs to a command of ours.
    """

    # the watched instance; None: none, or another process watches
    now: "OwnStages | None" = None
    # whether the process may be ended
    is_ours = False

    def __init__(self, groups: int, watchdog_s: float):
        """One group per thread that has envs."""
        import numpy as np

        # read by the guard: the time at which this process reported its end (or 0), then the table
        size = 8 * (1 + groups * len(OWN))
        self._file = os.memfd_create("stages") if hasattr(os, "memfd_create") else -1
        if self._file >= 0:
            weakref.finalize(self, os.close, self._file)
            os.ftruncate(self._file, size)
        self._shared = np.frombuffer(mmap.mmap(self._file, size))
        self.deadlines = StageDeadlines(self._shared[1:].reshape(groups, len(OWN)), OWN, watchdog_s)
        # after a request to stop: the time at which stages of _INTERRUPTED are interrupted
        self.stop_at = math.inf
        # returns a function to call with the error that ends the process, or None
        self.on_end: Callable[[], Callable[[StageFailed], None] | None] = lambda: None
        self._thread: threading.Thread | None = None
        # nothing counts as late before this time
        self._late_from = 0.0
        # whether the envs run in the main thread, which a signal can interrupt
        self._can_interrupt = False

    @property
    def has_hung(self) -> bool:
        """Whether a stage is still running, which would block the end of the process."""
        return bool(self.deadlines.table.any())

    def watch(self) -> None:
        if self.is_ours and OwnStages.now is not self:
            # imported here, because it imports this file
            from sparring.processes.guard import start_guard

            start_guard(self, self._file, self.deadlines.watchdog_s)
        OwnStages.now, self.stop_at = self, math.inf
        self._can_interrupt = threading.current_thread() is threading.main_thread()
        if self._can_interrupt:
            # SIGURG, because processes without a handler, such as programs of an env, ignore it
            signal.signal(signal.SIGURG, lambda *_: self.check(_AFTER_S))
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._watch_deadlines, name="watchdog", daemon=True)
            self._thread.start()

    def end_reported(self) -> None:
        """This process has reported its end: the guard only checks that it ends soon."""
        self._shared[0] = time.monotonic()

    def check(self, after_s: float = 0.0) -> None:
        """Raise StageFailed if a stage is late by more than `after_s` seconds."""
        if (why := self._late(after_s)) is not None:
            # raise once, so that the clean-up is not interrupted; if the env catches the error, raise again later. With
            # several groups, envs run in their own threads and cannot catch it
            table = self.deadlines.table
            table[table > 0] = (
                time.monotonic() + FIRST_TIME * self.deadlines.watchdog_s if len(table) == 1 else math.inf
            )
            self.stop_at = math.inf
            raise StageFailed(why)

    def _late(self, after_s: float = 0.0) -> str | None:
        now = time.monotonic() - after_s
        if now < self._late_from:
            return None
        late, _ = self.deadlines.check(now)
        if late:
            group, stage = late
            return overdue(stage, group, self.deadlines.watchdog_s)
        busy = [stage for stage in _INTERRUPTED if self.deadlines.table[:, OWN.index(stage)].any()]
        return f"stop requested: {DOING[busy[0]]} was interrupted" if busy and now > self.stop_at else None

    def _watch_deadlines(self) -> None:
        last = time.monotonic()
        while OwnStages.now is self:
            time.sleep(_WATCH_S)
            now = time.monotonic()
            # if this process itself was stopped (Ctrl-Z), running stages get their whole time again
            if now - last > 10 * _WATCH_S:
                self._late_from = now + self.deadlines.watchdog_s
            last = now
            if self._late(_AFTER_S + _END_S) is not None and self.is_ours:
                self._end_process()
            elif self._late(_AFTER_S) is not None and self._can_interrupt:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)

    def _end_process(self) -> None:
        why = self._late() or ""
        error = StageFailed(f"{why}, and cannot be interrupted: this process ends")
        if (report := self.on_end()) is not None:
            report(error)
        self.end_reported()
        print(f"sparring: {visible(error)}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)


class OwnStage:
    """Context of one stage of the envs in this process. (A class, because it is entered for each step of an env.)"""

    def __init__(self, stage: str, group: int = 0, timeout_s: float | None = None):
        self.stage, self.group, self.timeout_s = stage, group, timeout_s

    def __enter__(self) -> None:
        self.stages = OwnStages.now
        if self.stages is not None:
            self.stages.deadlines.enter(self.group, self.stage, self.timeout_s)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if self.stages is not None:
            self.stages.deadlines.leave(self.group, self.stage)
