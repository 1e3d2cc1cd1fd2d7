"""The sections `rollout` and `buffer`. Imports no torch."""

from typing import Literal

from pydantic import Field

from sparring.config.section import Section


class RolloutConfig(Section):
    """Collection of rollouts."""

    n_envs: int = Field(16, gt=0, le=100_000, description="robots per process (per GPU)")
    steps: int = Field(128, gt=0, le=10**6, description="decisions per robot between two updates")
    n_episodes_per_batch: int | None = Field(
        None,
        gt=0,
        le=10**6,
        description="complete episodes per process between two updates, instead of steps; null: use steps",
    )
    group_size: int = Field(1, gt=0, le=100_000, description="robots that share the start states of episodes (grpo)")
    max_episode_steps: int | None = Field(
        None, gt=0, le=10**9, description="time limit of an episode in env steps; null: that of the task"
    )
    action_steps: int = Field(1, gt=0, le=10_000, description="env steps per decision: the length of an action chunk")
    imagined: str | None = Field(
        None, description="run folder of a world model that simulates the robots (finetune); null: the env"
    )
    imagined_decisions: int = Field(
        16, gt=0, le=10**6, description="time limit of an imagined episode in decisions; prediction errors accumulate"
    )
    mode: Literal["sync", "async"] = Field(
        "sync", description="sync: collect and learn in turns; async: in parallel, in two processes"
    )
    staleness: int = Field(
        1, ge=0, le=100, description="maximum staleness of a rollout in updates (async); 0: same results as sync"
    )
    least_ess: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="minimum effective sample size, as a share of decisions; below it, robots wait for newer weights",
    )
    groups: int = Field(
        1, gt=0, le=10_000, description="number of groups of robots: one is simulated while the policy acts for another"
    )
    watchdog_s: float = Field(
        60.0,
        gt=0,
        description="timeout in seconds of an env, the actor process or a rank, after which the run ends",
    )
    render_episodes: int = Field(
        2, ge=0, le=10_000, description="videos of training episodes (after checkpoints) and of each evaluation"
    )


class BufferConfig(Section):
    """Storage of rollouts."""

    type: Literal["standard", "vla"] = Field(
        "standard", description="standard: one rollout, used once; vla: a ring of the newest decisions"
    )
    size: int | None = Field(
        None, gt=0, le=10**9, description="decisions over all robots of a process; null: rollout.steps x rollout.n_envs"
    )
    memory_limit_gb: float | None = Field(
        None, gt=0, description="a larger ring is stored in a file; null: half of the free RAM"
    )
    folder: str | None = Field(None, description="folder of that file; null: the run folder")
