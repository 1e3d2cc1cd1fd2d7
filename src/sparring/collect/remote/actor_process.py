"""The collecting process as its learner sees it: started, listened to, watched, ended."""

import logging
import os
import select
import subprocess
import sys
import time
import weakref
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparring.collect.remote.protocol import CLOSE_S, FIRST_TIME, MAKING_S, WATCHED, Failure, Made, Report, Start
from sparring.errors import StageFailed, UserError
from sparring.processes.child import ChildWords, hint_of_death, outputs
from sparring.processes.shared_memory import SharedTensors, receive, send
from sparring.processes.storage import Column

log = logging.getLogger("sparring.env")

# how often a learner that waits looks whether the other still lives, and is not late
LOOK_S = 0.2
# what it gets to leave by itself when it hangs, which takes it 1 s
CLOSE_HUNG_S = 2.0
# of the learner's rank; the collecting process belongs to no group of processes
_NOT_INHERITED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_DOING = {
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
}


class ActorProcess:
    """Whatever ends it other than `close` is raised, as a StageFailed, in who listens next."""

    def __init__(self, acting, config):
        rollout = config.rollout
        self.watchdog_s = rollout.watchdog_s
        table = SharedTensors.make({("deadlines",): Column((rollout.groups, len(WATCHED)), torch.float64)})
        self._deadlines = table.tensors["deadlines",].numpy()
        self._deadlines[0, WATCHED.index("make")] = time.monotonic() + MAKING_S
        self.connection, theirs = Pipe()
        self.process = subprocess.Popen(
            # a fresh interpreter, as for workers of envs: scripts need no `if __name__ == "__main__"`
            [
                sys.executable,
                "-u",
                "-X",
                "faulthandler",
                "-P",
                "-m",
                "sparring.collect.remote.actor",
                str(theirs.fileno()),
            ],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=_environment(),
            # out of the terminal's foreground group: Ctrl-C reaches the learner only
            process_group=0,
            **outputs(),
        )
        theirs.close()
        self.words = ChildWords(self.process, "collecting process")
        log.debug("collecting process started as process %s", self.process.pid)
        # also runs when this is garbage, and when the interpreter ends
        self._finalizer = weakref.finalize(self, _end, self.connection, self.process, CLOSE_S)
        # since when it has been seen at no stage, and how much longer than usual that may last
        self._at_nothing_since: float | None = None
        self._known = False
        folder = Path(config.buffer.folder) if config.buffer.folder else None
        threads = config.threads or 1
        self.say(Start(acting, threads, rollout.staleness, self.watchdog_s, folder, table.handle()))
        # kept until the other has opened it
        self._table = table

    def made(self) -> Made:
        """When it has made its robots."""
        return self._answer()

    def call(self, method: str, *arguments: Any) -> Any:
        """The answer of a method of the actor's, before it collects."""
        self.say((method, arguments))
        return self._answer()

    def say(self, message: Any) -> None:
        try:
            send(self.connection, message, self._wait_for_room)
        except (BrokenPipeError, ConnectionResetError):
            # whoever listens next is told how it died
            pass

    def heard(self, wait: bool) -> list[Report]:
        """Reports that have come; with `wait`, at least one message is waited for."""
        reports = [self._answer()] if wait else []
        while self.connection.poll():
            reports.append(self._answer())
        self._check_alive()
        return reports

    def close(self, patience_s: float = CLOSE_S) -> None:
        if self._finalizer.detach():
            _end(self.connection, self.process, patience_s)

    def _answer(self) -> Any:
        try:
            message = receive(self.connection, self._wait)
        except (EOFError, ConnectionResetError):
            raise self._death() from None
        self._at_nothing_since = None
        self._known = self._known or isinstance(message, Report)
        if isinstance(message, Failure):
            raise self._failed(message)
        return message

    def _wait(self) -> None:
        while not self.connection.poll(LOOK_S):
            self._check_alive()
            self._check_in_time()

    def _wait_for_room(self) -> None:
        room = select.poll()
        room.register(self.connection.fileno(), select.POLLOUT)
        while not room.poll(1000 * LOOK_S):
            self._check_alive()
            self._check_in_time()

    def _check_alive(self) -> None:
        if self.process.poll() is not None and not self.connection.poll():
            raise self._death()

    def _check_in_time(self) -> None:
        # looked at once: a stage may end meanwhile
        now, deadlines = time.monotonic(), self._deadlines.copy()
        for group, stage in np.argwhere((deadlines > 0) & (deadlines < now)):
            self.close(CLOSE_HUNG_S)
            given = f"rollout.watchdog_s={self.watchdog_s:g} seconds, the first time {FIRST_TIME} times as long"
            given = f"{MAKING_S:g} seconds" if WATCHED[stage] == "make" else given
            raise StageFailed(
                f"the collecting process failed: {_DOING[WATCHED[stage]]} has not come to an end, in group {group}; "
                f"it is given {given}"
            )
        self._check_at_something(now, bool(deadlines.any()))

    def _check_at_something(self, now: float, at_work: bool) -> None:
        """Between two stages hardly any time goes by, and it is not the weights that it waits for: we wait for it."""
        if at_work:
            self._at_nothing_since = None
            return
        self._at_nothing_since = self._at_nothing_since or now
        patience = self.watchdog_s * (1 if self._known else FIRST_TIME)
        if now - self._at_nothing_since > patience:
            doing = "is stopped, by a signal (SIGSTOP)" if _is_stopped(self.process) else "does nothing"
            self.close(CLOSE_HUNG_S)
            given = f"{patience:g} seconds (rollout.watchdog_s; the first time {FIRST_TIME} times as long)"
            raise StageFailed(f"the collecting process failed: it {doing}, for {given}")

    def _failed(self, failure: Failure) -> UserError:
        self.close()
        if failure.stage == "make" and failure.traceback is None:
            return UserError(failure.told)
        trace = f"\n\nTraceback of the collecting process:\n{failure.traceback}" if failure.traceback else ""
        return StageFailed(f"the collecting process failed: {_DOING[failure.stage]}: {failure.told}{trace}")

    def _death(self) -> StageFailed:
        self.close()
        code = self.process.returncode
        hint = hint_of_death(code)
        log.debug("collecting process died with exit code %s", code)
        return StageFailed(
            f"the collecting process failed: it died with exit code {code}{hint}{self.words.last_words()}"
        )


def _end(connection, process: subprocess.Popen, patience_s: float) -> None:
    connection.close()
    try:
        process.wait(0 if _is_stopped(process) else patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _is_stopped(process: subprocess.Popen) -> bool:
    """By a signal: it cannot put anything away."""
    if process.poll() is not None or not hasattr(os, "waitid"):
        return False
    try:
        return os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        # it has ended since, and cannot be stopped any more
        return False


def _environment() -> dict[str, str]:
    """It imports what the learner can."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    return kept | {"PYTHONPATH": path}
