"""The config of a run: its sections, and the passes that make it of settings."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, SerializeAsAny, create_model

from sparring import algorithms, envs, phases, policies, world_models
from sparring.algorithms.configs import GRPOConfig, PPOConfig
from sparring.collect.configs import RolloutConfig
from sparring.config.checks import problems_of
from sparring.config.inherit import USUAL, inherited_notes, inherited_settings, phase_defaults, run_folder
from sparring.config.legacy import aliases_for, phase_of, rename, why_not
from sparring.config.resolve import config_class, import_module, import_path, path_of
from sparring.config.section import Schema, Section
from sparring.config.text import Setting, flatten, read_settings, to_yaml
from sparring.data.configs import BufferConfig
from sparring.envs.configs import GymConfig, TabletopConfig
from sparring.errors import UserError
from sparring.phases.configs import (
    AdversarialConfig,
    EvaluationConfig,
    ImitateConfig,
    StudentConfig,
    TeacherConfig,
    TrainingConfig,
)
from sparring.policies.configs import ActorCriticConfig, FlowConfig, PI0PolicyConfig
from sparring.policies.native.config import NativeVLAConfig
from sparring.policies.vla.config import VLAConfig
from sparring.record.configs import LoggingConfig
from sparring.rewards.configs import OriginalRewardsConfig, RewardsConfig
from sparring.world_models.configs import TokenWorldModelConfig


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


class _NoConfig(Section):
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
        return _loaded_as_it_is, (self.dump(),)

    def dump(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        return to_yaml(self.dump(), SCHEMA.comments(self))


def load_config(
    source: str | Path | dict | None = None,
    overrides: list[Setting] | None = None,
    phase: str | None = None,
    *,
    inherit: bool = True,
    to_run: bool = True,
) -> Config:
    """A file or a (nested) dict plus overrides, checked as a whole; what is not given keeps its default.

    `inherit=False`: nothing comes with what it starts from, as a saved config holds that already. `to_run=False`: a
    config that is only looked at need not say what it starts from.
    """
    if isinstance(source, dict):
        settings = [Setting(key, value, "Python") for key, value in flatten(source).items()]
    else:
        settings = read_settings(source) if source else []
    settings += overrides or []
    if phase:
        settings.append(Setting("phase", phase, "command line"))
    return configure(settings, inherit, to_run)[0]


def configure(settings: list[Setting], inherit: bool, to_run: bool = True) -> tuple[Config, list[str]]:
    """The config that settings describe, later ones winning, and notes on settings that were not read as given."""
    schema, phase = schema_for(settings), phase_of(settings) or "finetune"
    renamed = rename(settings, schema)
    inherited = inherited_settings(phase, renamed.settings) if inherit else []
    settings = inherited + renamed.settings
    settings = phase_defaults(phase, settings) + settings
    config = schema.build(settings, check=lambda config: problems_of(config, to_run))
    return config, renamed.notes() + inherited_notes(inherited, config)


def schema_for(settings: list[Setting]) -> Schema:
    """The schema as these settings mean it: what `batch_size` is short for depends on the phase and the algorithm."""
    return replace(SCHEMA, aliases=aliases_for(settings))


def _loaded_as_it_is(values: dict[str, Any]) -> Config:
    return load_config(values, inherit=False)


# section -> name -> its config class; none of them imports torch
_CLASSES: dict[str, dict[str, type[Section]]] = {
    "env": {"tabletop": TabletopConfig},
    "policy": {
        "actor_critic": ActorCriticConfig,
        "flow": FlowConfig,
        "vla": VLAConfig,
        "native_vla": NativeVLAConfig,
        "pi0": PI0PolicyConfig,
    },
    "world_model": {"token": TokenWorldModelConfig},
    "rewards": {"default": RewardsConfig, "original": OriginalRewardsConfig},
}


def _env_class(name: Any) -> type[Section]:
    if isinstance(name, str) and name.startswith("gym:"):
        _check_gym_id(name.removeprefix("gym:"))
        return GymConfig
    return _class_of("env", name, envs.ENVS)


def _class_of(section: str, name: Any, known: dict[str, str]) -> type[Section]:
    """The config class of a built-in name, or of a class of one's own: what its first parameter is annotated with."""
    name = USUAL[section] if name is None else name
    if not isinstance(name, str):
        raise UserError(f"expected one of: {', '.join(known)}, or your.module:Class")
    if name in _CLASSES[section]:
        return _CLASSES[section][name]
    kind = section.replace("_", " ")
    thing = import_path(path_of(name, known, kind), kind)
    if section == "env" and _makes_gymnasium_envs(thing):
        return GymConfig
    cls = config_class(thing, kind)
    if "name" in cls.model_fields:
        return cls
    # `name` chose the class, so its config must be able to hold it
    field = Field(description="your.module:Class")
    return create_model(cls.__name__, __base__=cls, __doc__=cls.__doc__, name=(str, field))


def _rewards_class(name: Any) -> type[Section]:
    # the class itself refuses any other name
    return _CLASSES["rewards"].get(name if isinstance(name, str) else "default", RewardsConfig)


def _algorithm_class(name: Any) -> type[Section]:
    return config_class(import_path(name, "algorithm"), "algorithm") if ":" in str(name) else _NoConfig


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


def _makes_gymnasium_envs(thing: Any) -> bool:
    """A function, or a class that is one or looks like one; without importing gymnasium."""
    if not isinstance(thing, type):
        return callable(thing)
    return hasattr(thing, "observation_space") or any(base.__module__.startswith("gymnasium") for base in thing.__mro__)


def kinds_with(key: str) -> list[str]:
    """The names of built-in envs, policies, ... whose config has this key."""
    section, _, leaf = key.partition(".")
    classes = _CLASSES.get(section, {}) | ({"gym:<id>": GymConfig} if section == "env" else {})
    leaf = leaf.partition(".")[0]
    return [f"{section}.name={name}" for name, config in classes.items() if leaf in config.model_fields]


def _explain(key: str, setting: Setting) -> str | None:
    """What is to be said of a key that is unknown here: it is one of the originals, or of another env, policy, ..."""
    others = kinds_with(key)
    ours = "" if setting.as_written == key else f"as {key} "
    known = f"unknown key; {ours}it is a key of {' and '.join(others)}" if others else None
    return why_not(setting.as_written, setting.value) or known


SCHEMA = Schema(
    root=Config,
    pickers={
        "env": ("env.name", _env_class),
        "policy": ("policy.name", lambda name: _class_of("policy", name, policies.POLICIES)),
        "world_model": ("world_model.name", lambda name: _class_of("world_model", name, world_models.WORLD_MODELS)),
        "rewards": ("rewards.name", _rewards_class),
        "algorithm_config": ("algorithm", _algorithm_class),
    },
    aliases=aliases_for([]),
    explain=_explain,
)
