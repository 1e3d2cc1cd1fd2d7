"""Problems that span sections of a config: each a dotted key and what is wrong with it. Torch-free."""

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
        holds = f"holds less than one decision of each of the {robots} robots"
        yield "buffer.size", f"{holds}; expected >= {robots}, or a smaller rollout.n_envs"
    tasks = len(getattr(config.env, "task", ()))
    if tasks > 1 and robots % tasks and phase != "imitate":
        dealt = f"cannot be dealt out evenly over the {tasks} tasks of env.task"
        yield "rollout.n_envs", f"{robots} robots {dealt}; expected a multiple of {tasks}"
    yield from _unread(config)
    if phase == "imitate":
        for key in ("total_timesteps", "num_episodes"):
            if getattr(config.training, key):
                yield (
                    f"training.{key}",
                    f"no robot acts in imitate; say how long with training.iterations, and training.{key}=null",
                )
    else:
        yield from _rollout(config)
        yield from _async(config)
        yield from _groups(config)
    if phase == "teacher":
        if config.rollout.n_episodes_per_batch:
            yield "rollout.n_episodes_per_batch", "the teacher collects by rollout.steps; leave it out"
        if getattr(config.env, "cameras", None) == ():
            wanted = "expected cameras, e.g. env.cameras=[head,wrist]"
            yield "env.cameras", f"a world model predicts pictures; {wanted}"
    if phase in ("student", "adversarial"):
        yield from _rewards(config)
    if config.rewards.terms and phase != "finetune":
        yield "rewards.terms", f"terms by import path go with finetune only, not with {phase}; leave them out"
    elif config.rewards.terms and config.rollout.mode != "sync":
        yield "rewards.terms", f"do not go with rollout.mode={config.rollout.mode}; use sync, or leave them out"
    sources = [getattr(config.adversarial, f"replay_{source}") for source in ("random", "past", "newest")]
    if phase == "adversarial" and not any(sources):
        yield "adversarial.replay_newest", "the world model is given nothing to learn from; weigh a source"
    key, expected = _STARTS_FROM.get(phase, ("", ""))
    if to_run and key and not getattr(getattr(config, phase), key):
        yield f"{phase}.{key}", expected


_TEACHER = "expected the run folder of a teacher, e.g. --teacher_checkpoint outputs/teacher_rl"
_TEACHER += "; train one with `sparring train teacher`"
_DEMOS = "expected the folder(s) of demonstrations to imitate; record some with `sparring demos TASK --episodes N`"
# phase -> the key of its section that it cannot do without, and what is expected there
_STARTS_FROM = {"imitate": ("demos", _DEMOS), "student": ("teacher", _TEACHER), "adversarial": ("teacher", _TEACHER)}


def _unread(config: "Config") -> Problems:
    """Settings of an algorithm that is not in use. A saved config has them all: only those that somebody changed."""
    in_use = type(config.algorithm_section).model_fields
    section = "algorithm_config" if ":" in config.algorithm else config.algorithm
    others = {("ppo", "ppo_epochs"): "epochs", ("grpo", "epochs"): "ppo_epochs"}
    for name in algorithms.ALGORITHMS:
        for key, value in getattr(config, name) if name != config.algorithm else ():
            field = type(getattr(config, name)).model_fields[key]
            if value == PHASE_DEFAULTS.get(config.phase, {}).get(f"{name}.{key}", field.default):
                continue
            same = next((k for k in (key, others.get((name, key))) if k in in_use), None)
            instead = f"set {section}.{same}" if same else f"leave it out, or say algorithm={name}"
            yield f"{name}.{key}", f"is not read with algorithm={config.algorithm}; {instead}"


def _rollout(config: "Config") -> Problems:
    rollout, buffer = config.rollout, config.buffer
    episodes, group, robots = rollout.n_episodes_per_batch, rollout.group_size, rollout.n_envs
    if rollout.imagined and config.phase != "finetune":
        yield "rollout.imagined", f"{config.phase} acts in the env; leave it out, or train finetune"
    if episodes and episodes % robots:
        shared = f"{episodes} episodes cannot be shared out evenly over the {robots} robots of rollout.n_envs"
        yield "rollout.n_episodes_per_batch", f"{shared}; expected a multiple of {robots}"
    if episodes and (buffer.type != "standard" or buffer.size):
        needs = "rollout.n_episodes_per_batch needs buffer.type=standard, and no buffer.size"
        yield "buffer.type", f"{needs}: its rollouts are as long as their episodes"
    if robots % group:
        split = f"{robots} robots cannot be put into groups of {group}"
        yield "rollout.group_size", f"{split}; {_what_fits(robots, group)}"
    if group > 1 and not episodes:
        yield "rollout.group_size", "groups play whole episodes; set rollout.n_episodes_per_batch too"
    if group > 1 and len(getattr(config.env, "task", ())) > 1:
        yield "rollout.group_size", "robots of a group start alike, so env.task must be a single task"
    if config.algorithm == "grpo" and (not episodes or group < 2):
        yield "algorithm", "grpo needs rollout.n_episodes_per_batch, and rollout.group_size of 2 or more"


def _async(config: "Config") -> Problems:
    rollout, fields = config.rollout, RolloutConfig.model_fields
    given = [name for name in ("staleness", "least_ess") if getattr(rollout, name) != fields[name].default]
    if rollout.mode == "sync":
        for name in given:
            yield f"rollout.{name}", "is read with rollout.mode=async only; set that too, or leave it out"
        return
    if config.phase != "finetune":
        yield "rollout.mode", f"async goes with finetune only, not with {config.phase}; use sync"
    if "least_ess" in given and not rollout.staleness:
        yield "rollout.least_ess", "rollout.staleness=0 leaves nothing to pace; leave it out"
    if "least_ess" in given and rollout.least_ess and getattr(config.algorithm_section, "correction", None) == "none":
        why = f"{config.algorithm}.correction=none weighs nothing, so nothing is paced"
        yield "rollout.least_ess", f"{why}; set another correction, or leave it out"


def _groups(config: "Config") -> Problems:
    rollout = config.rollout
    groups, tasks = rollout.groups, len(getattr(config.env, "task", ())) or 1
    if groups == 1:
        return
    if config.phase != "finetune":
        yield "rollout.groups", f"{config.phase} has one group of robots; leave it out"
    if rollout.imagined or rollout.n_episodes_per_batch:
        other = "rollout.imagined" if rollout.imagined else "rollout.n_episodes_per_batch"
        yield "rollout.groups", f"does not go with {other}; leave one of them out"
    if rollout.n_envs % (groups * tasks):
        each = f", each with a multiple of {tasks} for env.task" if tasks > 1 else ""
        split = f"{rollout.n_envs} robots cannot be put into {groups} groups{each}"
        yield "rollout.groups", f"{split}; {_what_fits(rollout.n_envs, groups, tasks)}"


def _what_fits(robots: int, parts: int, tasks: int = 1) -> str:
    fitting = [n for n in range(1, robots + 1) if robots % (n * tasks) == 0]
    shown = f"expected one of {', '.join(map(str, fitting))}, or " if fitting else "expected "
    fewer = robots // (parts * tasks) * parts * tasks
    return f"{shown}rollout.n_envs={fewer or ''}{' or ' if fewer else ''}{fewer + parts * tasks}"


def _rewards(config: "Config") -> Problems:
    rewards = config.rewards
    if rewards.learning_progress and config.phase == "student":
        why = "the world model is frozen in this phase, so it makes no progress that could be paid for"
        yield "rewards.learning_progress", f"{why}; set it to 0, or train adversarial"
    if not any(getattr(rewards, name) for name in TERMS):
        yield "rewards.name", f"{rewards.name} pays for nothing here; give a weight to {', '.join(TERMS)}"
