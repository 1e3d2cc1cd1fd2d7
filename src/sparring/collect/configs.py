"""The `rollout` section. Torch-free."""

from typing import Literal

from pydantic import Field

from sparring.config.section import Section


class RolloutConfig(Section):
    """How experience is collected."""

    n_envs: int = Field(16, gt=0, description="robots per process (per GPU)")
    steps: int = Field(128, gt=0, description="decisions of each robot between two updates")
    n_episodes_per_batch: int | None = Field(
        None, gt=0, description="whole episodes between two updates, per process, instead of steps; null: by steps"
    )
    group_size: int = Field(1, gt=0, description="robots whose training episodes start alike, for grpo")
    max_episode_steps: int | None = Field(None, gt=0, description="time limit of an episode; null: the task's own")
    action_steps: int = Field(1, gt=0, description="env steps per decision: the length of an action chunk")
    imagined: str | None = Field(
        None, description="run of a world model: robots act in what it predicts (finetune); null: in the env"
    )
    imagined_decisions: int = Field(16, gt=0, description="time limit of an imagined episode; predictions fade")
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
    groups: int = Field(1, gt=0, description="robots in so many groups: while one simulates, another is decided for")
    watchdog_s: float = Field(
        60.0, gt=0, description="seconds without a sign of life of the collecting process, or a rank, that end a run"
    )
    render_episodes: int = Field(
        2, ge=0, description="videos of training episodes (after checkpoints) and of each evaluation"
    )


def rollout_mistakes(config) -> list[tuple[str, str]]:
    """Settings of a run that do not go together: (key, what is wrong)."""
    rollout, mistakes = config.rollout, []
    if rollout.imagined and config.phase != "finetune":
        mistakes.append(("rollout.imagined", f"{config.phase} acts in the env; leave it out, or train finetune"))
    episodes, group, robots = rollout.n_episodes_per_batch, rollout.group_size, rollout.n_envs
    if episodes and episodes % robots:
        shared = f"{episodes} episodes cannot be shared out evenly over the {robots} robots of rollout.n_envs"
        mistakes.append(("rollout.n_episodes_per_batch", f"{shared}; expected a multiple of {robots}"))
    if episodes and (config.buffer.type != "standard" or config.buffer.size):
        needs = "rollout.n_episodes_per_batch needs buffer.type=standard, and no buffer.size"
        mistakes.append(("buffer.type", f"{needs}: its rollouts are as long as their episodes"))
    if robots % group:
        split = f"{robots} robots cannot be put into groups of {group}"
        mistakes.append(("rollout.group_size", f"{split}; {_what_fits(robots, group)}"))
    if group > 1 and not episodes:
        mistakes.append(("rollout.group_size", "groups play whole episodes; set rollout.n_episodes_per_batch too"))
    if group > 1 and len(getattr(config.env, "task", ())) > 1:
        mistakes.append(("rollout.group_size", "robots of a group start alike, so env.task must be a single task"))
    if config.algorithm == "grpo" and (not episodes or group < 2):
        mistakes.append(("algorithm", "grpo needs rollout.n_episodes_per_batch, and rollout.group_size of 2 or more"))
    return mistakes + _async_mistakes(config) + _group_mistakes(config)


def _async_mistakes(config) -> list[tuple[str, str]]:
    rollout = config.rollout
    given = [n for n in ("staleness", "least_ess") if getattr(rollout, n) != RolloutConfig.model_fields[n].default]
    if rollout.mode == "sync":
        told = "is read with rollout.mode=async only; set that too, or leave it out"
        return [(f"rollout.{name}", told) for name in given]
    mistakes = []
    if config.phase != "finetune":
        mistakes.append(("rollout.mode", f"async goes with finetune only, not with {config.phase}; use sync"))
    if "least_ess" in given and not rollout.staleness:
        mistakes.append(("rollout.least_ess", "rollout.staleness=0 leaves nothing to pace; leave it out"))
    weighs_nothing = getattr(config.algorithm_section, "correction", None) == "none"
    # 0 asks for what is so without weights
    if "least_ess" in given and rollout.least_ess and weighs_nothing:
        why = f"{config.algorithm}.correction=none weighs nothing, so nothing is paced"
        mistakes.append(("rollout.least_ess", f"{why}; set another correction, or leave it out"))
    return mistakes


def _group_mistakes(config) -> list[tuple[str, str]]:
    rollout, mistakes = config.rollout, []
    groups, tasks = rollout.groups, len(getattr(config.env, "task", ())) or 1
    if groups == 1:
        return []
    if config.phase != "finetune":
        mistakes.append(("rollout.groups", f"{config.phase} has one group of robots; leave it out"))
    if rollout.imagined or rollout.n_episodes_per_batch:
        other = "rollout.imagined" if rollout.imagined else "rollout.n_episodes_per_batch"
        mistakes.append(("rollout.groups", f"does not go with {other}; leave one of them out"))
    if rollout.n_envs % (groups * tasks):
        each = f", each with a multiple of {tasks} for env.task" if tasks > 1 else ""
        split = f"{rollout.n_envs} robots cannot be put into {groups} groups{each}"
        mistakes.append(("rollout.groups", f"{split}; {_what_fits(rollout.n_envs, groups, tasks)}"))
    return mistakes


def _what_fits(robots: int, parts: int, tasks: int = 1) -> str:
    """Numbers instead of `parts`, and of robots that go with it; each part holds a multiple of `tasks`."""
    fitting = [n for n in range(1, robots + 1) if robots % (n * tasks) == 0]
    shown = f"expected one of {', '.join(map(str, fitting))}, or " if fitting else "expected "
    # the next ones below and above
    fewer = robots // (parts * tasks) * parts * tasks
    return f"{shown}rollout.n_envs={fewer or ''}{' or ' if fewer else ''}{fewer + parts * tasks}"
