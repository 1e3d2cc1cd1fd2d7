"""Mistakes that span sections of a config. Torch-free."""

from typing import Any

from sparring import algorithms
from sparring.collect.configs import rollout_mistakes
from sparring.config.phase_defaults import DEFAULTS
from sparring.rewards.configs import reward_mistakes


def mistakes(config: Any) -> list[tuple[str, str]]:
    """Everything that keeps a run from beginning: (dotted key, what is wrong with it)."""
    return mistakes_of_settings(config) + _missing(config)


def _missing(config: Any) -> list[tuple[str, str]]:
    """What the phase starts from, where it was not given."""
    key, expected = _STARTS_FROM.get(config.phase, (None, ""))
    given = key is None or getattr(getattr(config, config.phase), key)
    return [] if given else [(f"{config.phase}.{key}", expected)]


def mistakes_of_settings(config: Any) -> list[tuple[str, str]]:
    """Those of settings that were given."""
    robots, size = config.rollout.n_envs, config.buffer.size
    found = []
    if size and size < robots:
        holds = f"holds less than one decision of each of the {robots} robots"
        found.append(("buffer.size", f"{holds}; expected >= {robots}, or a smaller rollout.n_envs"))
    tasks = len(getattr(config.env, "task", ()))
    # where no robot acts, an evaluation takes as many as it needs
    if tasks > 1 and robots % tasks and config.phase != "imitate":
        dealt = f"cannot be dealt out evenly over the {tasks} tasks of env.task"
        found.append(("rollout.n_envs", f"{robots} robots {dealt}; expected a multiple of {tasks}"))
    return found + _unread(config) + _CHECKS.get(config.phase, rollout_mistakes)(config)


def _unread(config: Any) -> list[tuple[str, str]]:
    """Settings of an algorithm that is not in use. A saved config has them all: only those that somebody changed."""
    found = []
    for name in algorithms.ALGORITHMS:
        for key, value in getattr(config, name) if name != config.algorithm else ():
            field = type(getattr(config, name)).model_fields[key]
            if value != DEFAULTS.get(config.phase, {}).get(f"{name}.{key}", field.default):
                why = f"is not read with algorithm={config.algorithm}; {_instead(config, name, key)}"
                found.append((f"{name}.{key}", why))
    return found


def _instead(config: Any, name: str, key: str) -> str:
    """What to do where `key` of the algorithm `name` is not read."""
    other_name = {("ppo", "ppo_epochs"): "epochs", ("grpo", "epochs"): "ppo_epochs"}.get((name, key))
    section = "algorithm_config" if ":" in config.algorithm else config.algorithm
    for same in (key, other_name):
        if same in type(config.algorithm_section).model_fields:
            return f"set {section}.{same}"
    return f"leave it out, or say algorithm={name}"


def _check_imitate(config: Any) -> list[tuple[str, str]]:
    found = []
    for key in ("total_timesteps", "num_episodes"):
        if getattr(config.training, key):
            found.append((f"training.{key}", "no robot acts in imitate; say how long with training.iterations"))
    return found


def _check_teacher(config: Any) -> list[tuple[str, str]]:
    found = rollout_mistakes(config)
    if config.rollout.n_episodes_per_batch:
        found.append(("rollout.n_episodes_per_batch", "the teacher collects by rollout.steps; leave it out"))
    if getattr(config.env, "cameras", None) == ():
        found.append(
            ("env.cameras", "a world model predicts pictures; expected cameras, e.g. env.cameras=[head,wrist]")
        )
    return found


def _check_student(config: Any) -> list[tuple[str, str]]:
    return rollout_mistakes(config) + reward_mistakes(config, learns=False)


def _check_adversarial(config: Any) -> list[tuple[str, str]]:
    found = rollout_mistakes(config) + reward_mistakes(config, learns=True)
    weights = [getattr(config.adversarial, f"replay_{source}") for source in ("random", "past", "newest")]
    if not any(weights):
        found.append(("adversarial.replay_newest", "the world model is given nothing to learn from; weigh a source"))
    return found


_TEACHER = (
    "expected the run folder of a teacher, e.g. --teacher_checkpoint outputs/teacher_rl; train one with "
    "`sparring train teacher`"
)
_DEMOS = "expected the folder(s) of demonstrations to imitate; record some with `sparring demos TASK --episodes N`"
# phase -> the key of its section that it cannot do without, and what is expected there
_STARTS_FROM = {"imitate": ("demos", _DEMOS), "student": ("teacher", _TEACHER), "adversarial": ("teacher", _TEACHER)}

# of phases that do not collect rollouts as RL does, or need more
_CHECKS = {
    "imitate": _check_imitate,
    "teacher": _check_teacher,
    "student": _check_student,
    "adversarial": _check_adversarial,
}
