"""What every phase is to the loop that runs it."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import nn

from sparring.collect.camera import Film
from sparring.collect.timing import Span
from sparring.envs.env import Env
from sparring.phases.replay import Foretold


@dataclass
class Progress:
    """How far a run has come, over all processes."""

    updates: int = 0
    env_steps: int = 0
    episodes: int = 0


class Phase(Protocol):
    """One stage of training. Returns numbers; writing them down is the run's business."""

    # what is saved as model.safetensors, and where it acts
    model: nn.Module
    env: Env
    progress: Progress
    # of a run that was given no limit of its own: a field of `training` and its value
    default_limit: tuple[str, int]
    # in words
    learns_from: str
    # of a policy: whether what it explores is measured, rather than what it achieves
    explores: bool
    # which of its metrics is told as `avg_acc`; None: nothing here is right or wrong
    accuracy: str | None

    def step(self, fraction: float) -> dict[str, float]:
        """Collect and update once; `fraction` in [0, 1] of the run drives schedules. Advances `progress`."""

    def state_dict(self) -> dict:
        """All that the next step depends on beside the model and is the same in every process."""

    def process_state(self) -> dict:
        """What this process alone knows: where its robots are."""

    def load_state_dict(self, state: dict, process_state: dict) -> list[str]:
        """Go on from both; returns what could not be restored, in words."""


@runtime_checkable
class Collects(Protocol):
    """A phase whose robots act before it learns from what they did."""

    # whether the newest step came so far; one that failed before left all that was learned as it was: it can be saved
    learning: bool


@runtime_checkable
class Filmed(Protocol):
    """A phase whose robots can be watched while they learn."""

    def film(self, episodes: int) -> None:
        """Record the next episode of each of so many robots, from its beginning."""

    def drain_films(self) -> list[Film]:
        """Those that ended since the last call."""


@runtime_checkable
class Timed(Protocol):
    """A phase that can tell what it did when."""

    def drain_spans(self) -> list[Span]:
        """Since the last call."""


@runtime_checkable
class ShowsPictures(Protocol):
    """A phase that can show what its world model foretells."""

    def pictures(self) -> Foretold | None:
        """As it is now; changes nothing. None: there is no episode yet."""
