"""The `training` and `evaluation` sections. Torch-free."""

from pydantic import Field

from sparring.config import Section


class TrainingConfig(Section):
    """How long a run lasts and how often it speaks. Training ends at the first limit that is reached."""

    total_timesteps: int | None = Field(
        None, gt=0, description="env steps over all robots and processes; null: 150000 where no other limit is given"
    )
    num_episodes: int | None = Field(None, gt=0, description="episodes over all robots and processes; null: no limit")
    iterations: int | None = Field(None, gt=0, description="updates; null: no limit")
    save_every: int = Field(50, gt=0, description="updates between checkpoints; the last state is always saved")
    keep_checkpoints: int = Field(2, gt=0, description="newest checkpoints that are kept")
    log_every: int = Field(1, gt=0, description="updates between lines of metrics")


class EvaluationConfig(Section):
    """Held-out episodes, with their own seeds."""

    episodes: int = Field(100, gt=0, description="episodes of an evaluation, exactly")
    every: int = Field(0, ge=0, description="updates between evaluations during training; 0: only at the end")
    baseline: bool = Field(True, description="evaluate random actions on the same seeds beside the policy")
