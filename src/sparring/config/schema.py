"""The config of a run: its sections, and how it is built from settings."""

import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field, SerializeAsAny, create_model

from sparring import algorithms, envs, phases, policies, world_models
from sparring.algorithms.configs import GRPOConfig, PPOConfig
from sparring.collect.configs import BufferConfig, RolloutConfig
from sparring.config.checks import problems_of
from sparring.config.inherit import PHASE_DEFAULTS, USUAL, inherited_settings
from sparring.config.legacy import ALIASES, rename, why_not
from sparring.config.resolve import config_class, import_module, resolve
from sparring.config.section import Schema, Section
from sparring.config.text import Setting, flatten, read_settings, to_yaml
from sparring.envs.configs import DatasetConfig, GymConfig, TabletopConfig
from sparring.errors import UserError
from sparring.phases import configs as phase_configs
from sparring.phases.configs import LoggingConfig
from sparring.policies.configs import ActorCriticConfig, FlowConfig, PI0PolicyConfig, VLAConfig
from sparring.policies.native.config import NativeVLAConfig
from sparring.rewards.configs import OriginalRewardsConfig, RewardsConfig
from sparring.world_models.configs import TokenWorldModelConfig


def _known_phase(name: str) -> str:
    phase = phases.ALIASES.get(name, name)
    if phase not in phases.PHASES:
        raise ValueError(phases.unknown_phase(name))
    return phase


def _known_device(name: str) -> str:
    kind, _, index = name.partition(":")
    if not (name in ("auto", "cpu", "cuda") or (kind == "cuda" and index.isdigit())):
        raise ValueError("expected auto, cpu, cuda or cuda:<index>")
    return name


if TYPE_CHECKING:
    _Chosen = Any  # a section whose class, and therefore keys, depend on a name in the config
else:
    _Chosen = SerializeAsAny[Section]


class _NoConfig(Section):
    """Settings of algorithm=your.module:Class; each built-in algorithm has a section with its name."""


class Config(Section):
    """The config of a run."""

    phase: Annotated[str, AfterValidator(_known_phase)] = Field("finetune", description="training phase")
    algorithm: str = Field("ppo", description="algorithm that updates the policy: ppo, grpo or your.module:Class")
    seed: int = Field(0, ge=0, lt=2**31, description="seed of weights, noise and episodes (evaluation: another split)")
    device: Annotated[str, AfterValidator(_known_device)] = Field("auto", description="auto, cpu, cuda or cuda:<index>")
    threads: int = Field(
        0, ge=0, description="CPU threads of the networks; 0: one on the CPU without images, otherwise torch's default"
    )
    pretrained: str | None = Field(None, description="checkpoint folder or weights file to start from")
    output: str | None = Field(None, min_length=1, description="run folder; null: <OUTPUT_BASE or outputs>/<phase>_rl")
    resume: str = Field(
        "auto", min_length=1, description="auto: resume the run folder; never: start from scratch; or a checkpoint"
    )
    env: _Chosen
    rollout: RolloutConfig
    buffer: BufferConfig
    policy: _Chosen
    world_model: _Chosen
    ppo: PPOConfig
    grpo: GRPOConfig
    algorithm_config: _Chosen
    imitate: phase_configs.ImitateConfig
    teacher: phase_configs.TeacherConfig
    student: phase_configs.StudentConfig
    adversarial: phase_configs.AdversarialConfig
    rewards: SerializeAsAny[RewardsConfig]
    training: phase_configs.TrainingConfig
    evaluation: phase_configs.EvaluationConfig
    logging: LoggingConfig

    @property
    def algorithm_section(self) -> Section:
        return self.algorithm_config if ":" in self.algorithm else getattr(self, self.algorithm)

    @property
    def rollout_steps(self) -> int:
        """Decisions per robot in a rollout. A standard buffer contains one rollout, so buffer.size overrides steps."""
        steps, size = self.rollout.steps, self.buffer.size
        if size is None:
            return steps
        capacity = size // self.rollout.n_envs
        return min(capacity, steps) if self.buffer.type == "vla" else capacity

    @property
    def run_folder(self) -> Path:
        return Path(self.output or Path(os.environ.get("OUTPUT_BASE") or "outputs") / f"{self.phase}_rl")

    def __reduce__(self):
        # by value, because the classes of user-defined sections are created at run time
        return partial(load_config, inherit=False), (self.dump(),)

    def dump(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        sections = {name: type(value) for name, value in self if isinstance(value, Section)}
        comments = {key: info.description for key, info in SCHEMA.keys(sections).items() if info.description}
        comments |= {name: cls.__doc__.strip().splitlines()[0] for name, cls in sections.items() if cls.__doc__}
        return to_yaml(self.dump(), comments)


def load_config(
    source: str | Path | dict | None = None,
    overrides: list[Setting] | None = None,
    phase: str | None = None,
    *,
    inherit: bool = True,
    to_run: bool = True,
) -> Config:
    """Load a file or a (nested) dict plus overrides, and check all of it. `inherit=False`: take no settings from the
    runs that the config starts from. `to_run=False`: the runs or datasets that it starts from may be missing."""
    if isinstance(source, dict):
        settings = [Setting(key, value, "Python") for key, value in flatten(source).items()]
    else:
        settings = read_settings(source) if source else []
    settings += overrides or []
    if phase:
        settings.append(Setting("phase", phase, "command line"))
    return configure(settings, inherit, to_run)[0]


def configure(settings: list[Setting], inherit: bool, to_run: bool = True) -> tuple[Config, list[str]]:
    """The config for settings (later ones override earlier ones), and notes on settings that were not used as given."""
    renamed = rename(settings, SCHEMA)
    inherited = inherited_settings(renamed.phase, renamed.settings) if inherit else []
    settings = inherited + renamed.settings
    settings = _phase_defaults(renamed.phase, settings) + settings
    config = renamed.schema.build(settings, check=lambda config: problems_of(config, to_run))
    return config, renamed.notes() + _inherited_notes(inherited, config)


def _phase_defaults(phase: str, settings: list[Setting]) -> list[Setting]:
    names = {s.key: s.value for s in settings}
    others = tuple(f"{section}." for section, name in USUAL.items() if names.get(f"{section}.name", name) != name)
    values = dict(PHASE_DEFAULTS.get(phase, {}))
    if phase == "finetune" and (names.get("rewards.terms") or any(key.startswith("rewards.terms.") for key in names)):
        # terms are added to the env's own reward
        values["rewards.task_reward"] = 1.0
    return [Setting(key, value, f"phase {phase}") for key, value in values.items() if not key.startswith(others)]


def _inherited_notes(inherited: list[Setting], config: Config) -> list[str]:
    lines: dict[str, list[str]] = {}
    for setting in inherited:
        section, _, key = setting.key.partition(".")
        part = getattr(config, section)
        field, value = type(part).model_fields.get(key), part.model_dump(mode="json").get(key)
        if field is None or value != setting.value:
            continue
        # each kind of policy has its own config class, whose default `name` is that kind
        usual = USUAL.get(section) if key == "name" else field.default
        if value != (list(usual) if isinstance(usual, tuple) else usual):
            shown = f"[{','.join(map(str, value))}]" if isinstance(value, list) else value
            lines.setdefault(setting.source, []).append(f"{setting.key}={shown}")
    return [f"from {source}: {' '.join(keys)}" for source, keys in lines.items()]


# section -> name -> its config class; none of them imports torch
CLASSES: dict[str, dict[str, type[Section]]] = {
    "env": {"tabletop": TabletopConfig, "dataset": DatasetConfig},
    "policy": {"actor_critic": ActorCriticConfig, "flow": FlowConfig, "vla": VLAConfig},
    "world_model": {"token": TokenWorldModelConfig},
    "rewards": {"default": RewardsConfig, "original": OriginalRewardsConfig},
}
CLASSES["policy"] |= {"native_vla": NativeVLAConfig, "pi0": PI0PolicyConfig}


def _env_class(name: Any) -> type[Section]:
    if isinstance(name, str) and name.startswith("gym:"):
        _check_gym_id(name.removeprefix("gym:"))
        return GymConfig
    if isinstance(name, str) and name.partition(":")[0] in envs.SIMS:
        return GymConfig
    known = envs.ENVS | {"gym:ID": ""} | {f"{prefix}:TASK": "" for prefix in envs.SIMS}
    if isinstance(name, str) and ":" not in name and name not in known and find_spec("gymnasium"):
        import gymnasium

        if any(name in (spec.id, spec.name) for spec in gymnasium.registry.values()):
            choices = f"known: {', '.join(known)}, or your.module:Class"
            raise UserError(f"unknown env '{name}'; did you mean gym:{name}? {choices}")
    return _class_of("env", name, known)


def _class_of(section: str, name: Any, known: dict[str, str]) -> type[Section]:
    """The config class for a built-in name, or for a user-defined class: the annotation of its first parameter."""
    name = USUAL[section] if name is None else name
    if not isinstance(name, str):
        raise UserError(f"expected one of: {', '.join(known)}, or your.module:Class")
    if name in CLASSES[section]:
        return CLASSES[section][name]
    kind = section.replace("_", " ")
    found = resolve(name, known, kind)
    if section == "env" and _makes_gymnasium_envs(found):
        return GymConfig
    cls = config_class(found, kind)
    if "name" in cls.model_fields:
        return cls
    field = Field(description="your.module:Class")  # `name` selected the class, so its config needs this field
    return create_model(cls.__name__, __base__=cls, __doc__=cls.__doc__, name=(str, field))


def _algorithm_class(name: Any) -> type[Section]:
    if name is None or isinstance(name, (list, dict)) or name in algorithms.ALGORITHMS:
        return _NoConfig
    return config_class(resolve(str(name), algorithms.ALGORITHMS, "algorithm"), "algorithm")


def _check_gym_id(name: str) -> None:
    """Check 'CartPole-v1', the unversioned 'CartPole', or 'your.module:Drawer-v0', which importing registers."""
    import gymnasium

    module, _, env_id = name.rpartition(":")
    if module:
        import_module(module, f"env 'gym:{name}'", f"pip install {module.partition('.')[0].replace('_', '-')}")
    if any(env_id == spec.name for spec in gymnasium.registry.values()):
        return
    try:
        gymnasium.spec(env_id)
    except gymnasium.error.Error as error:
        example = "as in gym:gymnasium_robotics:FetchReach-v4"
        hint = "" if module else f"; if a package registers it, write gym:<package>:{env_id}, {example}"
        raise UserError(f"not registered in gymnasium ({' '.join(str(error).split())}){hint}") from None


def _makes_gymnasium_envs(found: Any) -> bool:
    """True for a function, a gymnasium class, or a class with the same interface; does not import gymnasium."""
    if not isinstance(found, type):
        return callable(found)
    return hasattr(found, "observation_space") or any(base.__module__.startswith("gymnasium") for base in found.__mro__)


def kinds_with(key: str) -> list[str]:
    section, _, leaf = key.partition(".")
    classes = CLASSES.get(section, {}) | ({"gym:<id>": GymConfig} if section == "env" else {})
    leaf = leaf.partition(".")[0]
    return [f"{section}.name={name}" for name, config in classes.items() if leaf in config.model_fields]


def _explain(key: str, setting: Setting) -> str | None:
    others = kinds_with(key)
    ours = "" if setting.as_written == key else f"as {key} "
    known = f"unknown key; {ours}it is a key of {' and '.join(others)}" if others else None
    if len(others) > 1:
        known = f"{known}; add one of them, e.g. {others[0]}"
    return why_not(setting.as_written, setting.value) or known


SCHEMA = Schema(
    root=Config,
    pickers={
        "env": ("env.name", _env_class),
        "policy": ("policy.name", lambda name: _class_of("policy", name, policies.POLICIES)),
        "world_model": ("world_model.name", lambda name: _class_of("world_model", name, world_models.WORLD_MODELS)),
        # for an unknown name the class itself raises
        "rewards": ("rewards.name", lambda name: CLASSES["rewards"].get(str(name), RewardsConfig)),
        "algorithm_config": ("algorithm", _algorithm_class),
    },
    aliases=ALIASES,
    explain=_explain,
)
