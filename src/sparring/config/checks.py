"""Checks across sections of a config. Each problem is a dotted key and an explanation. Torch-free."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sparring import algorithms
from sparring.collect.configs import RolloutConfig
from sparring.config.inherit import PHASE_DEFAULTS
from sparring.rewards import TERMS

if TYPE_CHECKING:
    from sparring.config.schema import Config

Problems = Iterator[tuple[str, str]]


def problems_of(config: "Config", to_run: bool = True) -> Problems:
    robots, size, phase = config.rollout.n_envs, config.buffer.size, config.phase
    if size and size < robots:
        small = f"is less than one decision for each of the {robots} robots"
        yield "buffer.size", f"{small}; expected >= {robots}, or a smaller rollout.n_envs"
    tasks = len(getattr(config.env, "task", ()))
    if tasks > 1 and robots % tasks and phase != "imitate":
        uneven = f"cannot be divided evenly among the {tasks} tasks of env.task"
        yield "rollout.n_envs", f"{robots} robots {uneven}; expected a multiple of {tasks}"
    yield from _unread(config)
    if phase == "imitate":
        for key in ("total_timesteps", "num_episodes"):
            if getattr(config.training, key):
                yield (
                    f"training.{key}",
                    f"imitate has no env steps; set training.iterations instead, and training.{key}=null",
                )
    else:
        yield from _rollout(config)
        yield from _async(config)
        yield from _groups(config)
    if phase == "teacher":
        if config.rollout.n_episodes_per_batch:
            yield "rollout.n_episodes_per_batch", "the teacher collects rollout.steps decisions; remove it"
        if getattr(config.env, "cameras", None) == ():
            example = "expected cameras, e.g. env.cameras=[head,wrist]"
            yield "env.cameras", f"a world model predicts images; {example}"
    if phase in ("student", "adversarial"):
        yield from _rewards(config)
    if config.rewards.terms and phase != "finetune":
        yield "rewards.terms", f"terms by import path are for finetune only, not for {phase}; remove them"
    elif config.rewards.terms and config.rollout.mode != "sync":
        yield "rewards.terms", f"are not supported by rollout.mode={config.rollout.mode}; use sync, or remove them"
    sources = [getattr(config.adversarial, f"replay_{source}") for source in ("random", "past", "newest")]
    if phase == "adversarial" and not any(sources):
        yield "adversarial.replay_newest", "all replay weights are 0; set one above 0 so that the world model has data"
    key, expected = _STARTS_FROM.get(phase, ("", ""))
    if to_run and key and not getattr(getattr(config, phase), key):
        yield f"{phase}.{key}", expected


_TEACHER = "expected the run folder of a teacher, e.g. --teacher_checkpoint outputs/teacher_rl"
_TEACHER += "; train one with `sparring train teacher`"
_DEMOS = "expected the folder(s) of demonstrations to imitate; record some with `sparring demos TASK --episodes N`"
# phase -> its required key, and the expected value
_STARTS_FROM = {"imitate": ("demos", _DEMOS), "student": ("teacher", _TEACHER), "adversarial": ("teacher", _TEACHER)}


def _unread(config: "Config") -> Problems:
    """Settings of an unused algorithm that differ from their defaults (a saved config contains all of them)."""
    in_use = type(config.algorithm_section).model_fields
    section = "algorithm_config" if ":" in config.algorithm else config.algorithm
    others = {("ppo", "ppo_epochs"): "epochs", ("grpo", "epochs"): "ppo_epochs"}
    for name in algorithms.ALGORITHMS:
        for key, value in getattr(config, name) if name != config.algorithm else ():
            field = type(getattr(config, name)).model_fields[key]
            if value == PHASE_DEFAULTS.get(config.phase, {}).get(f"{name}.{key}", field.default):
                continue
            same = next((k for k in (key, others.get((name, key))) if k in in_use), None)
            instead = f"set {section}.{same}" if same else f"remove it, or set algorithm={name}"
            yield f"{name}.{key}", f"is not used by algorithm={config.algorithm}; {instead}"


def _rollout(config: "Config") -> Problems:
    rollout, buffer = config.rollout, config.buffer
    episodes, group, robots = rollout.n_episodes_per_batch, rollout.group_size, rollout.n_envs
    if rollout.imagined and config.phase != "finetune":
        yield "rollout.imagined", f"is for finetune; {config.phase} acts in the env; remove it, or train finetune"
    if episodes and episodes % robots:
        uneven = f"{episodes} episodes cannot be divided evenly among the {robots} robots of rollout.n_envs"
        yield "rollout.n_episodes_per_batch", f"{uneven}; expected a multiple of {robots}"
    if episodes and (buffer.type != "standard" or buffer.size):
        needs = "rollout.n_episodes_per_batch needs buffer.type=standard without buffer.size"
        yield "buffer.type", f"{needs}: the episodes determine the length of a rollout"
    if robots % group:
        split = f"{robots} robots cannot be divided into groups of {group}"
        yield "rollout.group_size", f"{split}; {_valid_splits(robots, group)}"
    if group > 1 and not episodes:
        yield "rollout.group_size", "groups need whole episodes; also set rollout.n_episodes_per_batch"
    if group > 1 and len(getattr(config.env, "task", ())) > 1:
        yield "rollout.group_size", "the robots of a group share a start state; expected a single task in env.task"
    if config.algorithm == "grpo" and (not episodes or group < 2):
        yield "algorithm", "grpo needs rollout.n_episodes_per_batch and rollout.group_size >= 2"


def _async(config: "Config") -> Problems:
    rollout, fields = config.rollout, RolloutConfig.model_fields
    given = [name for name in ("staleness", "least_ess") if getattr(rollout, name) != fields[name].default]
    if rollout.mode == "sync":
        for name in given:
            yield f"rollout.{name}", "is for rollout.mode=async; set that as well, or remove it"
        return
    if config.phase != "finetune":
        yield "rollout.mode", f"async is for finetune, not for {config.phase}; use sync"
    if "least_ess" in given and not rollout.staleness:
        yield "rollout.least_ess", "has no effect with rollout.staleness=0; remove it"
    if "least_ess" in given and rollout.least_ess and getattr(config.algorithm_section, "correction", None) == "none":
        why = f"{config.algorithm}.correction=none computes no importance weights, which this setting needs"
        yield "rollout.least_ess", f"{why}; set another correction, or remove it"


def _groups(config: "Config") -> Problems:
    rollout = config.rollout
    groups, tasks = rollout.groups, len(getattr(config.env, "task", ())) or 1
    if groups == 1:
        return
    if config.phase != "finetune":
        yield "rollout.groups", f"is for finetune; {config.phase} has one group of robots; remove it"
    if rollout.imagined or rollout.n_episodes_per_batch:
        other = "rollout.imagined" if rollout.imagined else "rollout.n_episodes_per_batch"
        yield "rollout.groups", f"cannot be combined with {other}; remove one of them"
    if rollout.n_envs % (groups * tasks):
        each = f", each with a multiple of {tasks} for env.task" if tasks > 1 else ""
        split = f"{rollout.n_envs} robots cannot be divided into {groups} groups{each}"
        yield "rollout.groups", f"{split}; {_valid_splits(rollout.n_envs, groups, tasks)}"


def _valid_splits(robots: int, parts: int, tasks: int = 1) -> str:
    fitting = [n for n in range(1, robots + 1) if robots % (n * tasks) == 0]
    shown = f"expected one of {', '.join(map(str, fitting))}, or " if fitting else "expected "
    fewer = robots // (parts * tasks) * parts * tasks
    return f"{shown}rollout.n_envs={fewer or ''}{' or ' if fewer else ''}{fewer + parts * tasks}"


def _rewards(config: "Config") -> Problems:
    rewards = config.rewards
    if rewards.learning_progress and config.phase == "student":
        why = "the world model is frozen in this phase, so its learning progress is always 0"
        yield "rewards.learning_progress", f"{why}; set it to 0, or train adversarial"
    if not any(getattr(rewards, name) for name in TERMS):
        yield "rewards.name", f"all terms of rewards={rewards.name} have weight 0; set one of {', '.join(TERMS)}"
