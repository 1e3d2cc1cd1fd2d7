"""The `buffer` section. Torch-free."""

from typing import Literal

from pydantic import Field

from sparring.config import Section


class BufferConfig(Section):
    """Where rollouts are kept."""

    type: Literal["standard"] = Field("standard", description="standard: one rollout, used once")
    size: int | None = Field(
        None, gt=0, description="decisions over all envs of a process; null: rollout.steps x rollout.n_envs"
    )
