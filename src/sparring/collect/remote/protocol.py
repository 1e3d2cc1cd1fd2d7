"""Messages between a learner and its collecting process.

Learner: Start; calls (method, arguments) to be answered; Begin; then Notices at any time.
Collecting process: the spec of its env; answers; then a Report for every rollout. A Failure, at any time, is its last.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparring.algorithms.scoring import Parity
from sparring.collect.camera import Episode, Film
from sparring.collect.collector import Span
from sparring.collect.remote.weights import WeightsHandle
from sparring.contract import EnvSpec
from sparring.processes.shared_memory import SharedHandle

# stages that can hang, in the order of their columns in the shared table of deadlines
WATCHED = ("make", "reset", "simulate", "infer", "complete", "gate", "share")
# what the collecting process gets to close its envs before it is killed
CLOSE_S = 5.0


@dataclass(frozen=True)
class Start:
    """What the process is made with. `factory()` makes the collector, its buffer, and the scorer of the parity gate."""

    factory: Any
    threads: int
    staleness: int
    watchdog_s: float
    # where rollouts lie; None: in RAM
    folder: Path | None
    # [groups, len(WATCHED)], see StageDeadlines
    deadlines: SharedHandle


@dataclass(frozen=True)
class Begin:
    """Collect from now on, beginning with the rollout of this number."""

    number: int
    weights: WeightsHandle
    films: int
    # how far rollouts may be behind
    staleness: int


@dataclass(frozen=True)
class Notice:
    """There is a new version of the weights, or robots are to be filmed; None: as before."""

    version: int | None = None
    # of rollouts that begin from now on
    staleness: int | None = None
    films: int | None = None


@dataclass(frozen=True)
class Failure:
    message: str
    stage: str
    # None: a mistake that a person can mend, which needs none
    traceback: str | None


@dataclass(frozen=True)
class Report:
    """A finished rollout, which lies in its slot of the shared memory."""

    number: int
    version: int
    decisions: int
    env_steps: int
    spec: EnvSpec
    # all that the next rollout depends on; its large tensors lie in shared memory
    state: dict
    metrics: dict[str, float]
    # measured by the weights that collected it; None: the learner measures it itself
    parity: Parity | None
    episodes: list[Episode] = field(repr=False)
    films: list[Film] = field(repr=False)
    spans: list[Span] = field(repr=False)
    # with the first: where rollouts lie, and the large tensors of states
    rollouts: SharedHandle | None = None
    states: SharedHandle | None = None
