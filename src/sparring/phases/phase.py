"""What every phase is to the loop that runs it."""

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
    """How far a run has come, over all processes."""

    updates: int = 0
    env_steps: int = 0
    episodes: int = 0

    @property
    def by_limit(self) -> dict[str, int]:
        """What is counted, by the field of `training` that limits it."""
        return {"total_timesteps": self.env_steps, "num_episodes": self.episodes, "iterations": self.updates}

    @staticmethod
    def describe(counts: dict[str, int]) -> str:
        units = {"total_timesteps": "env steps", "num_episodes": "episodes", "iterations": "updates"}
        return " or ".join(f"{count:,} {units[name]}" for name, count in counts.items())

    def passed(self, limits: dict[str, int]) -> str:
        """That there is nothing to train, where one of the limits is reached."""
        name, limit = next((name, limit) for name, limit in limits.items() if self.by_limit[name] >= limit)
        made = self.by_limit[name]
        than = f"more than {limit:,}" if made > limit else "which is the limit"
        done = f"{self.describe({name: made})} are done already, {than}: nothing to train"
        return f"{done}; give more than {made:,} (training.{name})"


class Phase:
    """One stage of training, built by `from_config(config, distributed)`. It returns numbers; the run writes them."""

    model: nn.Module  # saved as model.safetensors
    env: Env
    distributed: Distributed
    progress: Progress
    default_limit: tuple[str, int]  # for a run without a limit of its own: a field of `training` and its value
    learns_from: str  # for people to read
    accuracy: str | None = None  # the metric that is written as `avg_acc`; None: nothing here is right or wrong
    # which evaluation it has, of `evaluated_model`
    evaluation: Literal["policy", "exploration", "world_model"] = "policy"
    # whether the newest step has begun to learn; where it failed before, what was learned can be saved
    learning: bool = True

    @property
    def preparing(self) -> str | None:
        """What it learns before its accuracy means anything, for people to read; None: nothing."""
        return None

    @property
    def evaluated_model(self) -> nn.Module:
        return self.model

    def step(self, fraction: float) -> dict[str, float]:
        """Collect and update once; `fraction` in [0, 1] of the run drives schedules. Advances `progress`."""
        raise NotImplementedError

    def state_dict(self) -> dict:
        """All that the next step depends on, apart from the model, and that is the same in every process."""
        raise NotImplementedError

    def process_state(self) -> dict:
        """What this process alone knows, such as where its robots are."""
        raise NotImplementedError

    def load_state_dict(self, state: dict, process_state: dict) -> list[str]:
        """Continue from both. Returns messages about what could not be restored."""
        raise NotImplementedError

    def record_video(self, episodes: int) -> None:
        """Record the next episode of each of so many robots, from its beginning."""

    def drain_videos(self) -> list[EpisodeVideo]:
        """Films that ended since the last call."""
        return []

    def drain_spans(self) -> list[Span]:
        """The timeline since the last call."""
        return []

    def pictures(self) -> Prediction | None:
        """What its world model predicts now; changes nothing. None: it has no world model, or no episode yet."""
        return None
