"""What a learner and its collecting process say to each other.

Learner: Start; calls (method, arguments) to be answered; Begin; then NewVersion and FilmNext at any time.
Collecting process: Made; answers; then a Report for every rollout. A Failure, at any time, is its last word.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sparring.algorithms.parity import Parity
from sparring.collect.camera import Film
from sparring.collect.episodes import Episode
from sparring.collect.shared import SharedHandle
from sparring.collect.snapshot import SnapshotHandle
from sparring.collect.stages import Span
from sparring.envs.backend import EnvSpec

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
