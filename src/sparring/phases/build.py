"""Builds env, policy, collector and buffer of a phase."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from sparring.algorithms import ALGORITHMS
from sparring.algorithms.ppo import Algorithm
from sparring.algorithms.scoring import Scorer
from sparring.collect.collector import Collector
from sparring.collect.groups import GroupedCollector, GroupedEnv
from sparring.collect.remote.learner import ReceivedRollout, RemoteCollector, RemoteEnv
from sparring.config.resolve import resolve
from sparring.data.buffer import Buffer, make_buffer
from sparring.envs.env import Env, make_training_env
from sparring.errors import LeftAlone, OtherFailed, UserError
from sparring.phases.from_runs import episodes_of, load_teacher
from sparring.policies.policy import Policy, make_policy
from sparring.processes.distributed import Distributed
from sparring.world_models.imagined_env import ImaginedEnv, StoredStarts

# ---- From the `algorithm` of a config to an Algorithm.


def make_algorithm(name: str, config, policy, distributed, seed: int):
    return resolve(name, ALGORITHMS, "algorithm")(config, policy, distributed, seed)


# ---- `rollout.imagined`: robots act in what a world model predicts, instead of in the env.


def imagine(env: Env, config, distributed: Distributed) -> ImaginedEnv:
    """As many robots as in `env`, which is closed, in the imagination of the world model of `rollout.imagined`.

    Episodes begin somewhere in those that the world model learned from.
    """
    path, rollout = config.rollout.imagined, config.rollout
    model = load_teacher(path, "rollout.imagined", config, env).to(distributed.device).requires_grad_(False).eval()
    starts = StoredStarts(model, episodes_of(path, "rollout.imagined", env))
    imagined = ImaginedEnv(
        model,
        env.spec,
        starts,
        env.num_envs,
        rollout.imagined_decisions,
        device=env.device,
        first_env=env.first_env,
        total_envs=env.total_envs,
        group_size=env.group_size,
    )
    # what it imagines; evaluations are made in the true one
    imagined.config = env.config
    env.close()
    return imagined


# ---- What acts in a run that learns from robots: here, in groups, or in a process of its own.


@dataclass(frozen=True)
class Seat:
    """Which of the processes of a run; travels to another one, where `Distributed` cannot be."""

    device: torch.device
    rank: int
    world_size: int


@dataclass(frozen=True)
class Acting:
    """All that the collecting process is told: called there, it makes what acts."""

    config: object
    seat: Seat

    @property
    def device(self) -> torch.device:
        return self.seat.device

    @property
    def random_seed(self) -> int:
        return self.config.seed + self.seat.rank

    def __call__(self) -> tuple[Collector | GroupedCollector, Buffer, Scorer | None]:
        config = self.config
        env = make_robots(config, self.seat)
        policy = make_policy(config.policy, env.spec, config.rollout.action_steps, self.seat.device).eval()
        return make_collector(config, env, policy), make_rollout_buffer(config, env), self._scorer(policy)

    def _scorer(self, policy: Policy) -> Scorer | None:
        """Who scores rollouts again before they are stale, for algorithms that have the gate."""
        algorithm = resolve(self.config.algorithm, ALGORITHMS, "algorithm")
        gated = isinstance(algorithm, type) and issubclass(algorithm, Algorithm)
        if not (gated and self.config.rollout.staleness):
            return None
        return Scorer(self.config.algorithm_section, policy, Distributed("cpu"))


def make_robots(config, seat: Distributed | Seat) -> Env | GroupedEnv:
    """As many robots as the config asks for, in this process."""
    rollout = config.rollout
    if rollout.groups > 1:
        return GroupedEnv([make_training_env(config, seat, group) for group in range(rollout.groups)])
    env = make_training_env(config, seat)
    return imagine(env, config, seat) if rollout.imagined else env


def act_apart(config, distributed: Distributed) -> RemoteEnv:
    """As many robots in a process of their own, which this one hears of."""
    names = {"env.name": config.env.name, "policy.name": config.policy.name, "algorithm": config.algorithm}
    for key, name in names.items():
        if name.startswith("__main__:"):
            raise UserError(
                f"{key}={name!r} is defined in the script or notebook itself, which the collecting process cannot "
                "import; move the class to a module, or use rollout.mode=sync"
            )
    acting = Acting(config, Seat(distributed.device, distributed.rank, distributed.world_size))
    return RemoteEnv(acting, config)


@contextmanager
def together(distributed: Distributed) -> Iterator[None]:
    """Around collecting: all processes stop together where one of them has lost its robots, and can then save together.

    Robots need not be alike fast, and the others are waited for.
    """
    failure = None
    try:
        yield
    except Exception as error:  # whatever envs and policies raise; raised again below
        failure = error
    try:
        distributed.barrier()
    except LeftAlone as gone:
        # both are told
        raise gone from failure
    if distributed.max(float(failure is not None)):
        raise failure or OtherFailed("another process of this run has failed to collect")


def make_collector(config, env: Env | GroupedEnv | RemoteEnv, policy: Policy):
    if isinstance(env, RemoteEnv):
        folder = Path(config.buffer.folder) if config.buffer.folder else None
        return RemoteCollector(env, policy, config.rollout.staleness, config.rollout.least_ess, folder)
    envs = env.envs if isinstance(env, GroupedEnv) else [env]
    chunk, (_, episodes) = config.rollout.action_steps, rollout_length(config, env)
    collectors = [Collector(env, policy, config.seed, chunk=chunk, episodes=episodes) for env in envs]
    return GroupedCollector(env, collectors) if isinstance(env, GroupedEnv) else collectors[0]


def make_rollout_buffer(config, env: Env | GroupedEnv | RemoteEnv) -> Buffer | ReceivedRollout:
    if isinstance(env, RemoteEnv):
        return ReceivedRollout(env.device)
    steps, _ = rollout_length(config, env)
    return make_buffer(config.buffer, steps, config.rollout.n_envs, config.run_folder)


def rollout_length(config, env) -> tuple[int, int | None]:
    """Decisions of a rollout, at most; episodes of each robot in it, where it goes by episodes."""
    rollout = config.rollout
    if not rollout.n_episodes_per_batch:
        return config.rollout_steps, None
    episodes = rollout.n_episodes_per_batch // rollout.n_envs
    if rollout.imagined:
        return episodes * rollout.imagined_decisions, episodes
    return episodes * _decisions_of_an_episode(env, rollout.action_steps), episodes


def _decisions_of_an_episode(env, chunk: int) -> int:
    limit = env.spec.max_episode_steps
    if not limit:
        raise UserError(
            "rollout.n_episodes_per_batch: this env does not say how long its episodes may last; "
            "set rollout.max_episode_steps"
        )
    return -(-limit // chunk)
