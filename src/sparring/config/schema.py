"""The one config tree that every phase and every document uses."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, SerializeAsAny, create_model

from sparring import algorithms, envs, phases, policies, rewards, world_models
from sparring.algorithms.configs import GRPOConfig, PPOConfig
from sparring.collect.configs import RolloutConfig
from sparring.config.checks import mistakes, mistakes_of_settings
from sparring.config.legacy import ALIASES, GRPO_ALIASES, PHASE_ALIASES, Reading, read_as_ours, why_not
from sparring.config.phase_defaults import DEFAULTS
from sparring.config.resolve import config_class, import_module, import_path, path_of
from sparring.config.section import Section, Tree
from sparring.config.text import Setting, flatten, read_settings, to_yaml
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
from sparring.record.configs import LoggingConfig


def _known_phase(name: str) -> str:
    phase = phases.ALIASES.get(name, name)
    if phase not in phases.PHASES:
        raise ValueError(phases.unknown_phase(name))
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
        return self.buffer.rollout_steps(self.rollout.steps, self.rollout.n_envs)

    @property
    def run_folder(self) -> Path:
        return run_folder(self.output, self.phase)

    def __reduce__(self):
        # by its values, for other processes: sections of your own classes are made here and known nowhere else
        return load_config, (self.dump(),)

    def dump(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        return to_yaml(self.dump(), TREE.comments(self))


def run_folder(output: str | None, phase: str) -> Path:
    return Path(output) if output else Path(os.environ.get("OUTPUT_BASE", "outputs")) / f"{phase}_rl"


# what a section is where nobody names another
USUAL = {"env": "tabletop", "policy": "actor_critic", "world_model": "token"}


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
    settings = reading_of(settings).settings
    tree = tree_of(settings)
    tree = tree if to_run else replace(tree, check=mistakes_of_settings)
    return tree.build(_phase_defaults(settings) + settings)


def reading_of(settings: list[Setting]) -> Reading:
    """These settings in our words, as the phase they name means them."""
    return read_as_ours(settings, tree_of(settings), _phase_of(settings) or "finetune")


def tree_of(settings: list[Setting]) -> Tree:
    """The tree as these settings mean it: what `batch_size` is short for depends on the phase and the algorithm."""
    phase = _phase_of(settings)
    named = ("algorithm", "algorithm.name", f"{phase}.algorithm")
    algorithm = next((s.value for s in reversed(settings) if s.key in named), None)
    more = GRPO_ALIASES if algorithm == "grpo" else {}
    more = more | PHASE_ALIASES.get(phase, {})
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


def _explained(key: str, setting: Setting) -> str | None:
    """What is to be said of a key that is unknown here: it is one of the originals, or of another env, policy, ..."""
    others = kinds_with(key)
    ours = "" if setting.as_written == key else f"as {key} "
    known = f"unknown key; {ours}it is a key of {' and '.join(others)}" if others else None
    return why_not(setting.as_written, setting.value) or known


def kinds_with(key: str) -> list[str]:
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
    check=mistakes,
    explain=_explained,
)
