"""Builds the parts of a phase: env, algorithm, collector and buffer; loads world models and episodes of other runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from sparring.algorithms import ALGORITHMS
from sparring.algorithms.configs import AlgorithmConfig
from sparring.algorithms.ppo import Algorithm
from sparring.algorithms.scoring import Scorer
from sparring.collect.collector import Collector
from sparring.collect.groups import GroupedCollector, GroupedEnv
from sparring.collect.remote.learner import ReceivedRollout, RemoteCollector, RemoteEnv
from sparring.config.resolve import build, resolve
from sparring.config.schema import Config
from sparring.data.buffer import RolloutBuffer, VLABuffer
from sparring.data.episodes import EpisodeStore
from sparring.envs.env import Env, make_training_env
from sparring.errors import UserError
from sparring.policies.policy import Policy, make_policy
from sparring.processes.distributed import Distributed
from sparring.runs.checkpoint import checkpoint_folder, load_spec
from sparring.runs.fits import load_part
from sparring.world_models.imagined_env import ImaginedEnv, StoredStarts
from sparring.world_models.world_model import WorldModel, make_world_model


@dataclass(frozen=True)
class _ActorFactory:
    """Builds env, policy, collector and buffer in the actor process of `rollout.mode=async`, to which it is sent.

    `make_training_env` gets it instead of `Distributed`, which cannot be sent.
    """

    config: Config
    device: torch.device
    rank: int
    world_size: int

    @property
    def random_seed(self) -> int:
        return self.config.seed + self.rank

    def __call__(self) -> tuple[Collector | GroupedCollector, RolloutBuffer, Scorer | None]:
        """Returns collector, buffer, and a scorer for algorithms with the parity gate: it scores rollouts again before
        they are stale."""
        config = self.config
        env = _build_local_env(config, self)
        policy = make_policy(config.policy, env.spec, config.rollout.action_steps, self.device).eval()
        collector, buffer = _build_local_collector(config, env, policy)
        algorithm = resolve(config.algorithm, ALGORITHMS, "algorithm")
        gated = isinstance(algorithm, type) and issubclass(algorithm, Algorithm) and config.rollout.staleness
        section = cast(AlgorithmConfig, config.algorithm_section)
        return collector, buffer, Scorer(section, policy, Distributed("cpu")) if gated else None


def build_env(
    config: Config, distributed: Distributed, device: torch.device | None = None
) -> Env | GroupedEnv | RemoteEnv:
    """Build the env of the config, in this process or in an actor process, which acts on `device` (None: that of
    `distributed`)."""
    if config.rollout.mode == "sync":
        return _build_local_env(config, distributed)
    names = {"env.name": config.env.name, "policy.name": config.policy.name, "algorithm": config.algorithm}
    for key, name in names.items():
        refuse_of_script(name, f"{key}={name!r}", "rollout.mode=sync")
    device = device or distributed.device
    return RemoteEnv(_ActorFactory(config, device, distributed.rank, distributed.world_size), config)


def refuse_of_script(name: str, shown: str, instead: str) -> None:
    """Raise UserError if the class `name` is defined in the script: the actor process cannot import that."""
    if name.startswith("__main__:"):
        what = "is defined in the script or notebook itself, which the actor process cannot import"
        raise UserError(f"{shown} {what}; move the class to a module, or use {instead}")


def _build_local_env(config: Config, distributed: Distributed | _ActorFactory) -> Env | GroupedEnv:
    rollout = config.rollout
    process = cast(Distributed, distributed)  # _ActorFactory has the attributes that envs need
    if rollout.groups > 1:
        return GroupedEnv([make_training_env(config, process, group) for group in range(rollout.groups)])
    env = make_training_env(config, process)
    return _build_imagined_env(config, env, distributed) if rollout.imagined else env


def _build_imagined_env(config: Config, env: Env, distributed: Distributed | _ActorFactory) -> ImaginedEnv:
    """Build an env of as many robots as `env`, simulated by the world model of `rollout.imagined`; closes `env`.

    Episodes start at random steps of the episodes from which the world model learned.
    """
    path, rollout = cast(str, config.rollout.imagined), config.rollout
    model = load_teacher(path, "rollout.imagined", config, env).to(distributed.device).requires_grad_(False).eval()
    starts = StoredStarts(model, open_episodes(path, "rollout.imagined", env))
    robots = {"first_env": env.first_env, "total_envs": env.total_envs, "group_size": env.group_size}
    decisions = rollout.imagined_decisions
    imagined = ImaginedEnv(model, env.spec, starts, env.num_envs, decisions, device=env.device, **robots)
    # the config of the real env, for evaluations
    imagined.config = env.config
    env.close()
    return imagined


def build_algorithm(config: Config, section, policy: Policy, distributed: Distributed):
    """`section`: the section of `config.algorithm`, which a phase may have changed."""
    seed = config.seed
    algorithm = build(section, ALGORITHMS, policy, distributed, seed, kind="algorithm", name=config.algorithm)
    if isinstance(algorithm, Algorithm):
        algorithm.step.skips = config.training.skip_nonfinite_steps
    return algorithm


def build_collector(config: Config, env: Env | GroupedEnv | RemoteEnv, policy: Policy):
    """Build the collector and the buffer that it fills."""
    rollout = config.rollout
    if rollout.mode == "async":
        folder = Path(config.buffer.folder) if config.buffer.folder else None
        collector = RemoteCollector(cast(RemoteEnv, env), policy, rollout.staleness, rollout.least_ess, folder)
        return collector, ReceivedRollout(env.device)
    return _build_local_collector(config, cast(Env | GroupedEnv, env), policy)


def _build_local_collector(
    config: Config, env: Env | GroupedEnv, policy: Policy
) -> tuple[Collector | GroupedCollector, RolloutBuffer]:
    rollout = config.rollout
    # maximum number of decisions of a rollout; episodes per robot if rollouts are limited by episodes
    steps, episodes = config.rollout_steps, None
    if rollout.n_episodes_per_batch:
        episodes = rollout.n_episodes_per_batch // rollout.n_envs
        steps = episodes * (rollout.imagined_decisions if rollout.imagined else _episode_decisions(config, env))
    envs = cast(GroupedEnv, env).envs if rollout.groups > 1 else [cast(Env, env)]
    collectors = [Collector(each, policy, config.seed, chunk=rollout.action_steps, episodes=episodes) for each in envs]
    section = "algorithm_config" if ":" in config.algorithm else config.algorithm
    for each in collectors:
        each.advice = f"lower {section}.policy_lr={getattr(config.algorithm_section, 'policy_lr', '')}"
    collector = GroupedCollector(cast(GroupedEnv, env), collectors) if rollout.groups > 1 else collectors[0]
    return collector, _build_buffer(config, steps)


def _build_buffer(config: Config, steps: int) -> RolloutBuffer:
    """Build a buffer for `steps` decisions per robot; a ring that is too large for RAM is a file in the run folder."""
    buffer = config.buffer
    if buffer.type == "standard":
        return RolloutBuffer(steps)
    capacity = buffer.size // config.rollout.n_envs if buffer.size else steps
    limit = None if buffer.memory_limit_gb is None else int(buffer.memory_limit_gb * 1e9)
    return VLABuffer(capacity, steps, limit, buffer.folder or config.run_folder)


def _episode_decisions(config: Config, env: Env | GroupedEnv) -> int:
    if not env.spec.max_episode_steps:
        raise UserError("rollout.n_episodes_per_batch needs an env with a time limit; set rollout.max_episode_steps")
    return -(-env.spec.max_episode_steps // config.rollout.action_steps)


def load_teacher(path: str, key: str, config: Config, env: Env) -> WorldModel:
    """Load the world model of another run, which must have the same config and an env like this one.

    `key`: the name of the setting with `path`.
    """
    model = make_world_model(config.world_model, env.spec, config.rollout.action_steps)
    load_part(model, "world_model", path, key, config, env)
    if not model.ready:
        raise UserError(
            f"{key}={path}: the tokenizer of this world model is not trained yet, so it cannot predict; resume its "
            "training (the same command again), or train another one with a smaller world_model.tokenizer_steps"
        )
    return model


def open_episodes(path: str, key: str, env: Env, rank: int = 0) -> EpisodeStore:
    """Open the episodes from which a world model learned; after training in several processes, those of process `rank`.

    Raises UserError if `env` has other instructions, because episodes contain their indices.
    """
    checkpoint = checkpoint_folder(path)
    instructions = load_spec(checkpoint).instructions
    if instructions != env.spec.instructions:
        shown = [", ".join(repr(text) for text in texts[:3]) for texts in (instructions, env.spec.instructions)]
        advice = "remove env.task (the world model determines it), or train a world model on this task"
        raise UserError(f"{key}={path}: its episodes are of other tasks: {shown[0]}, here {shown[1]}; {advice}")
    found = [folder / "episodes" for folder in (checkpoint, checkpoint.parent) if (folder / "episodes").is_dir()]
    if not found:
        advice = "give the run folder in which the world model was trained"
        raise UserError(f"{key}={path}: there is no folder 'episodes' with its training data; {advice}")
    own = found[0].with_name(f"episodes-{rank}")
    store = EpisodeStore(own if rank and own.is_dir() else found[0], read_only=True)
    if not len(store):
        raise UserError(f"{key}={path}: no episodes in '{store.folder}'; train the world model again")
    return store
