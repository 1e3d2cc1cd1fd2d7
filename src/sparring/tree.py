"""The one config tree that every phase and every document uses."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, SerializeAsAny, create_model

from sparring import algorithms, envs, phases, policies, rewards, world_models
from sparring.algorithms.configs import GRPOConfig, PPOConfig
from sparring.collect.configs import RolloutConfig, rollout_mistakes
from sparring.config import Section, Tree
from sparring.config_text import Setting, flatten, read_settings, to_yaml
from sparring.data.configs import BufferConfig
from sparring.envs.configs import GymConfig
from sparring.errors import UserError
from sparring.phases.configs import (
    AdversarialConfig,
    EvaluationConfig,
    ImitateConfig,
    StudentConfig,
    TeacherConfig,
    TrainingConfig,
)
from sparring.phases.defaults import DEFAULTS
from sparring.record.configs import LoggingConfig
from sparring.resolve import config_class, import_module, import_path, path_of
from sparring.rewards.configs import reward_mistakes


def _known_phase(name: str) -> str:
    phase = phases.ALIASES.get(name, name)
    if phase not in phases.PHASES:
        raise ValueError(f"this phase is unknown; one of: {', '.join(phases.PHASES)}")
    return phase


def _known_algorithm(name: str) -> str:
    path_of(name, algorithms.ALGORITHMS, "algorithm")
    return name


def _known_device(name: str) -> str:
    kind, _, index = name.partition(":")
    if not (name in ("auto", "cpu", "cuda") or (kind == "cuda" and index.isdigit())):
        raise ValueError("expected auto, cpu, cuda or cuda:<index>")
    return name


class NoConfig(Section):
    """Of an algorithm of your own (algorithm=your.module:Class); the built-in ones have sections by their names."""


class Config(Section):
    """A run."""

    phase: Annotated[str, AfterValidator(_known_phase)] = Field("finetune", description="stage of training")
    algorithm: Annotated[str, AfterValidator(_known_algorithm)] = Field(
        "ppo", description="what updates the policy: ppo, grpo, or your.module:Class"
    )
    seed: int = Field(0, ge=0, lt=2**31, description="of weights, episodes and noise; evaluation has its own episodes")
    device: Annotated[str, AfterValidator(_known_device)] = Field("auto", description="auto, cpu, cuda or cuda:<index>")
    threads: int = Field(0, ge=0, description="CPU threads of the networks; 0: one without images, else torch's choice")
    pretrained: str | None = Field(None, description="checkpoint folder or weights file to start from")
    output: str | None = Field(None, description="run folder; null: <OUTPUT_BASE or outputs>/<phase>_rl")
    resume: str = Field("auto", description="auto: go on where the folder stopped; never: start anew; or a checkpoint")
    env: SerializeAsAny[Section]
    rollout: RolloutConfig
    buffer: BufferConfig
    policy: SerializeAsAny[Section]
    world_model: SerializeAsAny[Section]
    ppo: PPOConfig
    grpo: GRPOConfig
    algorithm_config: SerializeAsAny[Section]
    imitate: ImitateConfig
    teacher: TeacherConfig
    student: StudentConfig
    adversarial: AdversarialConfig
    rewards: SerializeAsAny[Section]
    training: TrainingConfig
    evaluation: EvaluationConfig
    logging: LoggingConfig

    @property
    def algorithm_section(self) -> Section:
        """The config of the algorithm in use."""
        return self.algorithm_config if ":" in self.algorithm else getattr(self, self.algorithm)

    @property
    def rollout_steps(self) -> int:
        """Decisions of each robot between two updates."""
        if self.buffer.size is None:
            return self.rollout.steps
        holds = self.buffer.size // self.rollout.n_envs
        # a ring holds older ones beside the newest rollout
        return min(holds, self.rollout.steps) if self.buffer.type == "vla" else holds

    @property
    def run_folder(self) -> Path:
        return run_folder(self.output, self.phase)

    def dump(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        return to_yaml(self.dump(), TREE.comments(self))


def run_folder(output: str | None, phase: str) -> Path:
    return Path(output) if output else Path(os.environ.get("OUTPUT_BASE", "outputs")) / f"{phase}_rl"


# what a section is where nobody names another
USUAL = {"env": "tabletop", "policy": "actor_critic", "world_model": "token"}
# other spellings, mostly those of the documents this system comes from (docs/from-the-originals.md)
ALIASES = {
    "task_name": "env.task",
    "cameras": "env.cameras",
    "pretrained_policy_path": "pretrained",
    "output_dir": "output",
    "training.device": "device",
    "teacher.output_dir": "output",
    "teacher_checkpoint": "student.teacher",
    "teacher_path": "student.teacher",
    # `rewards=original` is a preset
    "rewards": "rewards.name",
    "num_envs": "rollout.n_envs",
    "rl_training.num_epochs": "training.iterations",
    "trainer.iterations": "training.iterations",
    "trainer.buffer_size": "buffer.size",
    "trainer.buffer_type": "buffer.type",
    "buffer_size": "buffer.size",
    "buffer_type": "buffer.type",
    "algorithm.name": "algorithm",
    "algorithm.cfg.learning_rate": "ppo.policy_lr",
    "algorithm.cfg.n_epochs": "ppo.ppo_epochs",
    "algorithm.cfg.batch_size": "ppo.mini_batch_size",
    "batch_size": "ppo.mini_batch_size",
    "learning_rate": "ppo.policy_lr",
    "training.batch_size": "ppo.mini_batch_size",
    "training.learning_rate": "ppo.policy_lr",
    "training.steps_per_episode": "rollout.max_episode_steps",
    "steps_per_episode": "rollout.max_episode_steps",
    "n_epochs": "ppo.ppo_epochs",
    "environment.control_mode": "env.control_mode",
    "environment.task": "env.task",
    **{
        f"{section}.{key}": f"ppo.{key}"
        for section in ("rl_training.ppo_trainer", "algorithm.cfg")
        for key in PPOConfig.model_fields
    },
    **{f"rl_training.rollout_collector.{key}": f"rollout.{key}" for key in RolloutConfig.model_fields},
}
# words that mean something else with grpo
_GRPO_NAMES = {f"ppo.{name}": f"grpo.{name}" for name in GRPOConfig.model_fields} | {"ppo.ppo_epochs": "grpo.epochs"}
GRPO_ALIASES = {
    alias: _GRPO_NAMES[key]
    for alias, key in ALIASES.items()
    if key in _GRPO_NAMES and not alias.startswith("rl_training.ppo_trainer.")
}
# words that mean something else where there is no RL
PHASE_ALIASES = {
    phase: {
        f"{prefix}{key}": f"{phase}.{key}" for prefix in ("", "training.") for key in ("batch_size", "learning_rate")
    }
    for phase in ("imitate", "teacher", "adversarial")
}
PHASE_ALIASES["adversarial"] |= {
    "teacher_checkpoint": "adversarial.teacher",
    "teacher_path": "adversarial.teacher",
    "student_checkpoint": "adversarial.student",
    "student_path": "adversarial.student",
}
PHASE_ALIASES["teacher"] |= {f"{prefix}sequential_training": "teacher.sequential" for prefix in ("", "training.")}


def load_config(
    source: str | Path | dict | None = None, overrides: list[Setting] | None = None, phase: str | None = None
) -> Config:
    """A file or a (nested) dict plus overrides, checked as a whole; what is not given keeps its default."""
    return build_config(given_settings(source, overrides, phase))


def given_settings(
    source: str | Path | dict | None, overrides: list[Setting] | None, phase: str | None
) -> list[Setting]:
    if isinstance(source, dict):
        settings = [Setting(key, value, "Python") for key, value in flatten(source).items()]
    else:
        settings = read_settings(source) if source else []
    settings += overrides or []
    if phase:
        settings.append(Setting("phase", phase, "command line"))
    return settings


def build_config(settings: list[Setting], to_run: bool = True) -> Config:
    """`to_run=False`: what is only to be looked at need not say what it starts from."""
    tree = tree_of(settings)
    tree = tree if to_run else replace(tree, check=_mistakes)
    return tree.build(_phase_defaults(settings) + settings)


def tree_of(settings: list[Setting]) -> Tree:
    """The tree as these settings mean it: what `batch_size` is short for depends on the phase and the algorithm."""
    algorithm = next((s.value for s in reversed(settings) if s.key in ("algorithm", "algorithm.name")), None)
    more = GRPO_ALIASES if algorithm == "grpo" else {}
    more = more | PHASE_ALIASES.get(_phase_of(settings), {})
    return replace(TREE, aliases=ALIASES | more) if more else TREE


def _phase_of(settings: list[Setting]) -> Any:
    phase = next((s.value for s in reversed(settings) if s.key == "phase"), None)
    return phases.ALIASES.get(phase, phase)


def _phase_defaults(settings: list[Setting]) -> list[Setting]:
    """What the phase means where nobody says otherwise; other envs and policies than the usual have other settings."""
    phase, names = _phase_of(settings), {s.key: s.value for s in settings}
    others = tuple(f"{section}." for section, name in USUAL.items() if names.get(f"{section}.name", name) != name)
    values = DEFAULTS.get(phase, {}).items()
    return [Setting(key, value, f"phase {phase}") for key, value in values if not key.startswith(others)]


def _env_config(name: Any) -> type[Section]:
    if isinstance(name, str) and name.startswith("gym:"):
        _check_gym_id(name.removeprefix("gym:"))
        return GymConfig
    return _config_of(name, USUAL["env"], envs.ENVS, envs.CONFIGS, "env")


def _policy_config(name: Any) -> type[Section]:
    return _config_of(name, USUAL["policy"], policies.POLICIES, policies.CONFIGS, "policy")


def _world_model_config(name: Any) -> type[Section]:
    return _config_of(name, USUAL["world_model"], world_models.WORLD_MODELS, world_models.CONFIGS, "world model")


def _rewards_config(name: Any) -> type[Section]:
    # of any other name it is said which there are
    return import_path(rewards.CONFIGS.get(name, rewards.CONFIGS["default"]), "rewards config")


def _algorithm_config(name: Any) -> type[Section]:
    return _section_of(import_path(name, "algorithm"), "algorithm") if ":" in str(name) else NoConfig


def _config_of(name: Any, default: str, known: dict, configs: dict, kind: str) -> type[Section]:
    """Built-in configs come without their class, so that validation never imports torch."""
    name = default if name is None else name
    if not isinstance(name, str):
        raise UserError(f"expected one of: {', '.join(known)}, or your.module:Class")
    if name in configs:
        return import_path(configs[name], f"{kind} config")
    thing = import_path(path_of(name, known, kind), kind)
    if kind == "env" and _makes_gymnasium_envs(thing):
        return GymConfig
    return _named(_section_of(thing, kind))


def _check_gym_id(name: str) -> None:
    """'CartPole-v1', the unversioned 'CartPole', or 'your.module:Drawer-v0', which is registered on import."""
    import gymnasium

    module, _, env_id = name.rpartition(":")
    if module:
        import_module(module, f"env 'gym:{name}'")
    if any(env_id == spec.name for spec in gymnasium.registry.values()):
        return
    try:
        gymnasium.spec(env_id)
    except gymnasium.error.Error as error:
        raise UserError(f"gymnasium does not know it ({' '.join(str(error).split())})") from None


def _elsewhere(key: str) -> list[str]:
    """The names of built-in envs, policies, ... whose config has this key."""
    section, _, leaf = key.partition(".")
    kinds = {"env": envs, "policy": policies, "world_model": world_models, "rewards": rewards}
    configs = kinds[section].CONFIGS if section in kinds else {}
    classes = {name: import_path(path, f"{section} config") for name, path in configs.items()}
    classes |= {"gym:<id>": GymConfig} if section == "env" else {}
    leaf = leaf.partition(".")[0]
    return [f"{section}.name={name}" for name, config in classes.items() if leaf in config.model_fields]


def _makes_gymnasium_envs(thing: Any) -> bool:
    """A function, or a class that is one or looks like one; told without importing gymnasium."""
    if not isinstance(thing, type):
        return callable(thing)
    return hasattr(thing, "observation_space") or any(base.__module__.startswith("gymnasium") for base in thing.__mro__)


def _section_of(cls: Any, kind: str) -> type[Section]:
    section = config_class(cls, kind)
    if not (isinstance(section, type) and issubclass(section, Section)):
        raise UserError(
            f"{kind} '{cls.__module__}:{cls.__name__}': its config {section} must be a sparring.config.Section, "
            "e.g. class MyConfig(Section)"
        )
    return section


def _named(section: type[Section]) -> type[Section]:
    """`name` chose the class, so its config must be able to hold it; a config of one's own need not declare it."""
    if "name" in section.model_fields:
        return section
    name = Field(description="your.module:Class")
    return create_model(section.__name__, __base__=section, __doc__=section.__doc__, name=(str, name))


def _check(config: Config) -> list[tuple[str, str]]:
    return _mistakes(config) + _missing(config)


def _missing(config: Config) -> list[tuple[str, str]]:
    """What the phase starts from, where it was not given."""
    key, expected = _STARTS_FROM.get(config.phase, (None, ""))
    given = key is None or getattr(getattr(config, config.phase), key)
    return [] if given else [(f"{config.phase}.{key}", expected)]


def _mistakes(config: Config) -> list[tuple[str, str]]:
    """Mistakes that span sections."""
    robots, size = config.rollout.n_envs, config.buffer.size
    mistakes = []
    if size and size < robots:
        holds = f"holds less than one decision of each of the {robots} robots"
        mistakes.append(("buffer.size", f"{holds}; expected >= {robots}, or a smaller rollout.n_envs"))
    tasks = len(getattr(config.env, "task", ()))
    if tasks > 1 and robots % tasks:
        dealt = f"cannot be dealt out evenly over the {tasks} tasks of env.task"
        mistakes.append(("rollout.n_envs", f"{robots} robots {dealt}; expected a multiple of {tasks}"))
    return mistakes + _unread(config) + _CHECKS.get(config.phase, rollout_mistakes)(config)


def _unread(config: Config) -> list[tuple[str, str]]:
    """Settings of an algorithm that is not in use. A saved config has them all: only those that somebody changed."""
    mistakes = []
    for name in algorithms.ALGORITHMS:
        for key, value in getattr(config, name) if name != config.algorithm else ():
            field = Config.model_fields[name].annotation.model_fields[key]
            if value != DEFAULTS.get(config.phase, {}).get(f"{name}.{key}", field.default):
                why = f"is not read with algorithm={config.algorithm}; {_instead(config, name, key)}"
                mistakes.append((f"{name}.{key}", why))
    return mistakes


def _instead(config: Config, name: str, key: str) -> str:
    """What to do where `key` of the algorithm `name` is not read."""
    other_name = {("ppo", "ppo_epochs"): "epochs", ("grpo", "epochs"): "ppo_epochs"}.get((name, key))
    section = "algorithm_config" if ":" in config.algorithm else config.algorithm
    for same in (key, other_name):
        if same in type(config.algorithm_section).model_fields:
            return f"set {section}.{same}"
    return f"leave it out, or say algorithm={name}"


def _check_imitate(config: Config) -> list[tuple[str, str]]:
    mistakes = []
    for key in ("total_timesteps", "num_episodes"):
        if getattr(config.training, key):
            mistakes.append((f"training.{key}", "no robot acts in imitate; say how long with training.iterations"))
    return mistakes


def _check_teacher(config: Config) -> list[tuple[str, str]]:
    mistakes = rollout_mistakes(config)
    if config.rollout.n_episodes_per_batch:
        mistakes.append(("rollout.n_episodes_per_batch", "the teacher collects by rollout.steps; leave it out"))
    if getattr(config.env, "cameras", None) == ():
        mistakes.append(
            ("env.cameras", "a world model predicts pictures; expected cameras, e.g. env.cameras=[head,wrist]")
        )
    return mistakes


def _check_student(config: Config) -> list[tuple[str, str]]:
    return rollout_mistakes(config) + reward_mistakes(config, learns=False)


def _check_adversarial(config: Config) -> list[tuple[str, str]]:
    mistakes = rollout_mistakes(config) + reward_mistakes(config, learns=True)
    weights = [getattr(config.adversarial, f"replay_{source}") for source in ("random", "past", "newest")]
    if not any(weights):
        mistakes.append(("adversarial.replay_newest", "the world model is given nothing to learn from; weigh a source"))
    return mistakes


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

TREE = Tree(
    root=Config,
    pickers={
        "env": ("env.name", _env_config),
        "policy": ("policy.name", _policy_config),
        "world_model": ("world_model.name", _world_model_config),
        "rewards": ("rewards.name", _rewards_config),
        "algorithm_config": ("algorithm", _algorithm_config),
    },
    aliases=ALIASES,
    check=_check,
    elsewhere=_elsewhere,
)
