"""Phase: the interface between a stage of training and the loop that runs it."""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from sparring.collect.camera import EpisodeVideo
from sparring.collect.collector import Span
from sparring.envs.env import Env
from sparring.phases.replay import Prediction
from sparring.processes.distributed import Distributed


@dataclass
class Progress:
    """The progress of a run, over all processes."""

    updates: int = 0
    env_steps: int = 0
    episodes: int = 0

    @property
    def by_limit(self) -> dict[str, int]:
        """The counts by the field of `training` that limits each of them."""
        return {"total_timesteps": self.env_steps, "num_episodes": self.episodes, "iterations": self.updates}

    @staticmethod
    def describe(counts: dict[str, int]) -> str:
        units = {"total_timesteps": "env steps", "num_episodes": "episodes", "iterations": "updates"}
        return " or ".join(f"{count:,} {units[name]}" for name, count in counts.items())

    def passed(self, limits: dict[str, int]) -> str:
        """Returns the message for a run that has reached one of the limits already."""
        name, limit = next((name, limit) for name, limit in limits.items() if self.by_limit[name] >= limit)
        count = self.by_limit[name]
        compared = f"more than {limit:,}" if count > limit else "which is the limit"
        done = f"{self.describe({name: count})} are done already, {compared}: nothing to train"
        return f"{done}; set training.{name} to more than {count:,}"


class Phase:
    """One stage of training, built by `from_config(config, distributed)`. It returns metrics; the run writes them."""

    model: nn.Module  # saved as model.safetensors
    env: Env
    distributed: Distributed
    progress: Progress
    default_limit: tuple[str, int]  # for a run whose config has no limit: a field of `training` and its value
    learns_from: str  # the source of training data and the algorithm as text, for the log
    accuracy: str | None = None  # the metric that is written as `avg_acc`; None: this phase has no accuracy
    # the kind of evaluation of `evaluated_model`
    evaluation: Literal["policy", "exploration", "world_model", "actions"] = "policy"
    # whether the newest step has begun to learn; if it failed before that, the weights can be saved
    learning: bool = True

    @property
    def preparing(self) -> str | None:
        """The stage of training before accuracies are valid, as text; None: there is none, or it is finished."""
        return None

    @property
    def evaluated_model(self) -> nn.Module:
        return self.model

    def step(self, fraction: float) -> dict[str, float]:
        """Collect and update once, and advance `progress`. `fraction` of the run in [0, 1], for schedules."""
        raise NotImplementedError

    def state_dict(self) -> dict:
        """The state that is the same in every process, without the model."""
        raise NotImplementedError

    def process_state(self) -> dict:
        """The state of this process only, such as the states of its robots."""
        raise NotImplementedError

    def load_state_dict(self, state: dict, process_state: dict) -> list[str]:
        """Continue from both. Returns messages about what could not be restored."""
        raise NotImplementedError

    def record_video(self, episodes: int) -> None:
        """Record the next episode of each of so many robots, from its beginning."""

    def drain_videos(self) -> list[EpisodeVideo]:
        """Videos that ended since the last call."""
        return []

    def drain_spans(self) -> list[Span]:
        """The timeline since the last call."""
        return []

    def newest_prediction(self) -> Prediction | None:
        """The world model's prediction of the newest episode; None: no world model, or no episode yet."""
        return None
