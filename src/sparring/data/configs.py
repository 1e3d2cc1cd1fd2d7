"""The `buffer` section. Torch-free."""

from typing import Literal

from pydantic import Field

from sparring.config.section import Section


class BufferConfig(Section):
    """Where rollouts are kept."""

    type: Literal["standard", "vla"] = Field(
        "standard", description="standard: one rollout, used once; vla: a ring of the newest decisions"
    )
    size: int | None = Field(
        None, gt=0, description="decisions over all envs of a process; null: rollout.steps x rollout.n_envs"
    )
    memory_limit_gb: float | None = Field(
        None, gt=0, description="a ring larger than this lies in a file; null: half of the free RAM"
    )
    folder: str | None = Field(None, description="where that file lies; null: the run folder")
