"""The one config tree that every phase and every document uses."""

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, SerializeAsAny

from sparring import algorithms, envs, phases, policies
from sparring.algorithms.configs import PPOConfig
from sparring.collect.configs import RolloutConfig
from sparring.config import Section, Tree
from sparring.config_text import Setting, read_settings, to_yaml
from sparring.data.configs import BufferConfig
from sparring.phases.configs import EvaluationConfig, TrainingConfig
from sparring.record.configs import LoggingConfig
from sparring.resolve import config_class, import_path, path_of


def _known_phase(name: str) -> str:
    if name not in phases.PHASES:
        state = "is not built yet" if name in phases.PLANNED else "is unknown"
        raise ValueError(f"this phase {state}; one of: {', '.join(phases.PHASES)}")
    return name


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
        "ppo", description="what updates the policy: ppo, or your.module:Class"
    )
    seed: int = Field(0, ge=0, lt=2**31, description="of weights, episodes and noise; evaluation has its own episodes")
    device: Annotated[str, AfterValidator(_known_device)] = Field("auto", description="auto, cpu, cuda or cuda:<index>")
    threads: int = Field(0, ge=0, description="CPU threads of the networks, per process; 0: torch's own choice")
    pretrained: str | None = Field(None, description="checkpoint folder or weights file to start from")
    output: str | None = Field(None, description="run folder; null: <OUTPUT_BASE or outputs>/<phase>_rl")
    resume: str = Field("auto", description="auto: go on where the folder stopped; never: start anew; or a checkpoint")
    env: SerializeAsAny[Section]
    rollout: RolloutConfig
    buffer: BufferConfig
    policy: SerializeAsAny[Section]
    ppo: PPOConfig
    algorithm_config: SerializeAsAny[Section]
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
        return self.buffer.size // self.rollout.n_envs if self.buffer.size else self.rollout.steps

    @property
    def run_folder(self) -> Path:
        base = os.environ.get("OUTPUT_BASE", "outputs")
        return Path(self.output) if self.output else Path(base) / f"{self.phase}_rl"

    def dump(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        return to_yaml(self.dump(), TREE.comments(self))


# other spellings, mostly those of the documents this system comes from (docs/from-the-originals.md)
ALIASES = {
    "task_name": "env.task",
    "pretrained_policy_path": "pretrained",
    "output_dir": "output",
    "training.device": "device",
    "teacher.output_dir": "output",
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


def load_config(
    source: str | Path | dict | None = None, overrides: list[Setting] | None = None, phase: str | None = None
) -> Config:
    """A file or a (nested) dict plus overrides, checked as a whole; what is not given keeps its default."""
    if isinstance(source, dict):
        settings = [Setting(key, value, "Python") for key, value in _leaves(source)]
    else:
        settings = read_settings(source) if source else []
    settings += overrides or []
    if phase:
        settings.append(Setting("phase", phase, "command line"))
    return TREE.build([_canonical(s) for s in settings])


def env_config_class(given: dict[str, Any]) -> type[Section]:
    name = given.get("env.name", "tabletop")
    if isinstance(name, str) and name.startswith("gym:"):
        return import_path("sparring.envs.configs:GymConfig", "env config")
    return _config_of(name, envs.ENVS, envs.CONFIGS, "env")


def policy_config_class(given: dict[str, Any]) -> type[Section]:
    return _config_of(given.get("policy.name", "actor_critic"), policies.POLICIES, policies.CONFIGS, "policy")


def algorithm_config_class(given: dict[str, Any]) -> type[Section]:
    name = given.get("algorithm", "ppo")
    return config_class(import_path(name, "algorithm"), "algorithm") if ":" in str(name) else NoConfig


def _config_of(name, known, configs, kind) -> type[Section]:
    """Built-in configs come without their class, so that validation never imports torch."""
    if name in configs:
        return import_path(configs[name], f"{kind} config")
    if not isinstance(name, str):
        raise ValueError(f"expected text, got {name!r}")
    cls = import_path(path_of(name, known, kind), kind)
    if hasattr(cls, "observation_space") or any(base.__module__.startswith("gymnasium") for base in cls.__mro__):
        return import_path("sparring.envs.configs:GymConfig", "env config")
    return config_class(cls, kind)


def _leaves(values: dict, prefix: str = ""):
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + str(key), value


def _canonical(setting: Setting) -> Setting:
    """Aliases are resolved before sections are picked, since `name` decides the class."""
    key = ALIASES.get(setting.key, setting.key)
    value = phases.ALIASES.get(setting.value, setting.value) if key == "phase" else setting.value
    return Setting(key, value, setting.source)


def _check(config: Config) -> list[str]:
    """Mistakes that span sections."""
    mistakes = []
    if config.buffer.size and config.buffer.size < config.rollout.n_envs:
        mistakes.append(
            f"buffer.size = {config.buffer.size}: holds less than one decision of each of the {config.rollout.n_envs} "
            f"robots; set buffer.size >= {config.rollout.n_envs} or lower rollout.n_envs"
        )
    return mistakes


TREE = Tree(
    root=Config,
    pickers={"env": env_config_class, "policy": policy_config_class, "algorithm_config": algorithm_config_class},
    aliases=ALIASES,
    check=_check,
)
