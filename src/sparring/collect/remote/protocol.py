"""Messages between learner and actor, and the actor's end of the pipe."""

import os
import select
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sparring.algorithms.parity import Parity
from sparring.collect.camera import Episode, Film
from sparring.collect.remote.weights import SnapshotHandle
from sparring.collect.timing import Span
from sparring.contract import EnvSpec
from sparring.processes.shared_memory import SharedHandle, pack, receive, send_packed

# ---- What a learner and its collecting process say to each other.
#
# Learner: Start; calls (method, arguments) to be answered; Begin; then NewVersion and FilmNext at any time.
# Collecting process: Made; answers; then a Report for every rollout. A Failure, at any time, is its last word.


# stages that can hang, in the order of their columns in the shared table of deadlines
WATCHED = ("make", "reset", "simulate", "infer", "complete", "gate", "share")
# how much longer they may take the first time: things are compiled
FIRST_TIME = 10
# what the collecting process gets to close its envs before it is killed
CLOSE_S = 5.0
# seconds to make the env and the policy: weights of gigabytes are read
MAKING_S = 1800.0


@dataclass(frozen=True)
class Start:
    """What the process is made with. `acting()` makes the collector, its buffer, and who scores rollouts again."""

    acting: Callable
    threads: int
    staleness: int
    watchdog_s: float
    # where rollouts lie; None: in shared memory
    folder: Path | None
    # [groups, len(WATCHED)]: by when each stage has to be over; 0: it is not at work
    deadlines: SharedHandle


@dataclass(frozen=True)
class Made:
    spec: EnvSpec


@dataclass(frozen=True)
class Begin:
    """Collect from now on, beginning with this rollout."""

    number: int
    weights: SnapshotHandle
    films: int
    # how far rollouts may be behind
    staleness: int


@dataclass(frozen=True)
class NewVersion:
    version: int
    # of rollouts that begin from now on
    staleness: int


@dataclass(frozen=True)
class FilmNext:
    robots: int


@dataclass(frozen=True)
class Failure:
    told: str
    stage: str
    # None: a mistake that a person can mend, which needs none
    traceback: str | None


@dataclass(frozen=True)
class Report:
    """Of a finished rollout, which lies in the shared places."""

    number: int
    version: int
    decisions: int
    env_steps: int
    spec: EnvSpec
    # all that the next rollout depends on; its large tensors lie in shared memory
    state: dict
    figures: dict[str, float]
    # of what the weights decided that collected it; None: the learner looks itself
    parity: Parity | None
    episodes: list[Episode] = field(repr=False)
    films: list[Film] = field(repr=False)
    spans: list[Span] = field(repr=False)
    # with the first: where rollouts lie, and large tensors of states
    places: SharedHandle | None = None
    parcels: SharedHandle | None = None


# ---- The collecting process's end of the pipe to its learner.


# what is left of a hung process to end in peace, after the learner hung up
LEAVE_S = 1.0


class HungUp(Exception):
    """The learner is not there any more."""


class ActorPipe:
    """The pipe to the learner.

    What is said is sent by a thread of its own: a learner that is busy does not hold up the robots. Another listens to
    what the learner says, and a third for when it hangs up, as it also does when it dies.
    """

    def __init__(self, connection: Connection):
        self.connection = connection
        self.version, self.staleness, self.films, self.hung_up = -1, 0, 0, False
        # it has heard of the end, and puts the robots away
        self.ending = False
        # what there is to put away then, in whatever the robots are at
        self.at_hang_up: Callable[[], None] = lambda: None
        self._news = threading.Condition()
        self._sender = ThreadPoolExecutor(1)
        threading.Thread(target=self._leave, daemon=True).start()

    def say(self, message: Any) -> None:
        """As it is now; it may change before it is sent."""
        self._sender.submit(self._send, pack(message))

    def finish(self) -> None:
        """When all that was said is sent, or nobody is there to hear it."""
        self._sender.shutdown()

    def hear(self) -> Any:
        try:
            return receive(self.connection)
        except (EOFError, OSError):
            raise HungUp from None

    def listen(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()

    def _send(self, text: bytes) -> None:
        try:
            send_packed(self.connection, text)
        except OSError:
            self._hang_up()

    def _listen(self) -> None:
        with suppress(HungUp):
            while True:
                message = self.hear()
                with self._news:
                    if isinstance(message, NewVersion):
                        self.version, self.staleness = message.version, message.staleness
                    else:
                        self.films = message.robots
                    self._news.notify()

    def _leave(self) -> None:
        """Whoever waits for this process does not wait for robots in the middle of something."""
        gone = select.poll()
        # of no event but the end, which is always told
        gone.register(self.connection.fileno(), 0)
        gone.poll()
        self._hang_up()
        time.sleep(LEAVE_S)
        closing = threading.Thread(target=self.at_hang_up, daemon=True)
        closing.start()
        closing.join(LEAVE_S)
        if self.ending:
            closing.join(CLOSE_S - LEAVE_S)
        os._exit(1)

    def _hang_up(self) -> None:
        with self._news:
            self.hung_up = True
            self._news.notify()

    def wait_for_turn(self, number: int) -> None:
        """Until the rollout of this number may begin."""
        with self._news:
            self._news.wait_for(lambda: self.hung_up or self.version >= number - self.staleness)
        self.check()

    def check(self) -> None:
        if self.hung_up:
            raise HungUp

    def take_films(self) -> int:
        with self._news:
            films, self.films = self.films, 0
        return films
