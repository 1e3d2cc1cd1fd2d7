"""The sections `rollout` and `buffer`. Torch-free."""

from typing import Literal

from pydantic import Field

from sparring.config.section import Section


class RolloutConfig(Section):
    """How experience is collected."""

    n_envs: int = Field(16, gt=0, le=100_000, description="robots per process (per GPU)")
    steps: int = Field(128, gt=0, le=10**6, description="decisions of each robot between two updates")
    n_episodes_per_batch: int | None = Field(
        None,
        gt=0,
        le=10**6,
        description="whole episodes between two updates, per process, instead of steps; null: by steps",
    )
    group_size: int = Field(1, gt=0, le=100_000, description="robots whose training episodes start alike, for grpo")
    max_episode_steps: int | None = Field(
        None, gt=0, le=10**9, description="time limit of an episode; null: the task's own"
    )
    action_steps: int = Field(1, gt=0, le=10_000, description="env steps per decision: the length of an action chunk")
    imagined: str | None = Field(
        None, description="run of a world model: robots act in what it predicts (finetune); null: in the env"
    )
    imagined_decisions: int = Field(
        16, gt=0, le=10**6, description="time limit of an imagined episode; predictions fade"
    )
    mode: Literal["sync", "async"] = Field(
        "sync", description="sync: collect and learn in turns; async: at the same time, in two processes"
    )
    staleness: int = Field(
        1, ge=0, le=100, description="updates that a rollout may be behind (async); 0: as sync, bit for bit"
    )
    least_ess: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="where stale rollouts are worth less than this share of their decisions, robots wait for weights",
    )
    groups: int = Field(
        1, gt=0, le=10_000, description="robots in so many groups: while one simulates, another is decided for"
    )
    watchdog_s: float = Field(
        60.0,
        gt=0,
        description="seconds without a sign of life of an env, the collecting process or a rank that end a run",
    )
    render_episodes: int = Field(
        2, ge=0, le=10_000, description="videos of training episodes (after checkpoints) and of each evaluation"
    )


class BufferConfig(Section):
    """Where rollouts are kept."""

    type: Literal["standard", "vla"] = Field(
        "standard", description="standard: one rollout, used once; vla: a ring of the newest decisions"
    )
    size: int | None = Field(
        None, gt=0, le=10**9, description="decisions over all envs of a process; null: rollout.steps x rollout.n_envs"
    )
    memory_limit_gb: float | None = Field(
        None, gt=0, description="a ring larger than this lies in a file; null: half of the free RAM"
    )
    folder: str | None = Field(None, description="where that file lies; null: the run folder")
