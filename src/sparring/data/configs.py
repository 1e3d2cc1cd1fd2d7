"""The `buffer` section: where rollouts are kept, and how much of them.

Torch-free, as all configs are.
"""

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

    def decisions(self, n_envs: int) -> int | None:
        """Decisions of each env that `size` leaves room for; None: as many as a rollout has."""
        return self.size // n_envs if self.size else None

    def rollout_steps(self, steps: int, n_envs: int) -> int:
        """Decisions of a rollout: the standard buffer is one rollout, so its size decides; a ring may hold several."""
        holds = self.decisions(n_envs)
        if holds is None:
            return steps
        return min(holds, steps) if self.type == "vla" else holds

    @property
    def memory_limit(self) -> int | None:
        """In bytes."""
        return None if self.memory_limit_gb is None else int(self.memory_limit_gb * 1e9)
