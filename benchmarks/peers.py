"""The sides of ppo_throughput.py: the loops of Sparring and of SB3, each as an object that runs one iteration."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import gymnasium
import numpy as np
import torch
from stable_baselines3 import PPO as SB3PPO
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv

from sparring.algorithms.configs import PPOConfig
from sparring.algorithms.ppo import PPO
from sparring.contract import EnvSpec
from sparring.data.buffer import RolloutBuffer
from sparring.envs.backend import Arrays, EpisodeSeeds, Step
from sparring.envs.configs import TabletopConfig
from sparring.envs.env import Env
from sparring.envs.tabletop.backend import Tabletop
from sparring.phases.finetune import Finetune
from sparring.policies.actor_critic import ActorCritic
from sparring.policies.configs import ActorCriticConfig
from sparring.processes.distributed import Distributed


@dataclass(frozen=True)
class Workload:
    """Sizes and hyperparameters of collection and learning, the same for both libraries."""

    robots: int
    steps: int
    minibatch: int
    epochs: int
    gamma: float = 0.97
    gae_lambda: float = 0.95
    learning_rate: float = 3e-4

    @property
    def env_steps(self) -> int:
        return self.robots * self.steps

    def __str__(self) -> str:
        return f"{self.robots} x {self.steps}, minibatch {self.minibatch}, {self.epochs} epochs"


@dataclass(frozen=True)
class Seconds:
    """Times of one iteration."""

    collect: float
    update: float

    @property
    def total(self) -> float:
        return self.collect + self.update


class Ours:
    """Sparring's `finetune` phase on a backend, with SB3's default network."""

    def __init__(self, backend, work: Workload):
        self.env = Env(backend)
        self.policy = ActorCritic(ActorCriticConfig(init_std=1.0, normalize_observations=False), backend.spec, chunk=1)
        algorithm = PPO(_ppo_config(work), self.policy)
        self.phase = Finetune(self.env, self.policy, algorithm, RolloutBuffer(work.steps), Distributed("cpu"))

    def iterate(self) -> Seconds:
        metrics = self.phase.step(0.0)
        return Seconds(metrics["collect_seconds"], metrics["update_seconds"])

    def parameters(self) -> int:
        return _count(self.policy)

    def close(self) -> None:
        self.env.close()


class SB3:
    """PPO of stable-baselines3 on a VecEnv; collection and training are called directly, without logging."""

    def __init__(self, env: VecEnv, work: Workload):
        kind = "MultiInputPolicy" if isinstance(env.observation_space, gymnasium.spaces.Dict) else "MlpPolicy"
        self.model = SB3PPO(
            kind,
            env,
            n_steps=work.steps,
            batch_size=work.minibatch,
            n_epochs=work.epochs,
            gamma=work.gamma,
            gae_lambda=work.gae_lambda,
            learning_rate=work.learning_rate,
            device="cpu",
        )
        _, self.callback = self.model._setup_learn(10**9)

    def iterate(self) -> Seconds:
        model = self.model
        started = time.perf_counter()
        model.collect_rollouts(model.env, self.callback, model.rollout_buffer, model.n_steps)
        collected = time.perf_counter()
        model.train()
        return Seconds(collected - started, time.perf_counter() - collected)

    def parameters(self) -> int:
        return _count(self.model.policy)

    def close(self) -> None:
        self.model.env.close()


class NativeVecEnv(VecEnv):
    """A Sparring backend as a VecEnv of SB3: numpy in, numpy out, no other code of Sparring."""

    def __init__(self, backend):
        self.backend = backend
        (size,), _ = backend.spec.observation["state"]
        super().__init__(
            backend.num_envs,
            gymnasium.spaces.Box(-np.inf, np.inf, (size,), np.float32),
            gymnasium.spaces.Box(-1.0, 1.0, (backend.spec.action_dim,), np.float32),
        )

    def reset(self) -> np.ndarray:
        return self.backend.reset(EpisodeSeeds(0, total_envs=self.num_envs))["state"]

    def step_async(self, actions: np.ndarray) -> None:
        self.actions = actions

    def step_wait(self):
        # [N, A] -> [N, C=1, A]
        step = self.backend.step(self.actions[:, None])
        infos: list[dict] = [{} for _ in range(self.num_envs)]
        for row, env in enumerate(step.ended):
            truncated = bool(step.truncated[env] and not step.terminated[env])
            infos[env] = {"TimeLimit.truncated": truncated, "terminal_observation": step.final["state"][row]}
        return step.observation["state"], step.reward[:, 0], step.terminated | step.truncated, infos

    def close(self) -> None:
        self.backend.close()

    def get_attr(self, attr_name, indices=None):
        return [None] * self.num_envs

    def set_attr(self, attr_name, value, indices=None) -> None: ...

    def env_method(self, method_name, *args, indices=None, **kwargs):
        return [None] * self.num_envs

    def env_is_wrapped(self, wrapper_class, indices=None):
        return [False] * self.num_envs


class FreeEnv:
    """A backend that takes no time: an iteration then measures the loop around the env, and learning."""

    def __init__(self, like: EnvSpec, num_envs: int):
        self.spec, self.num_envs = like, num_envs
        (size,), _ = like.observation["state"]
        state = np.random.default_rng(0).standard_normal((num_envs, size)).astype(np.float32)
        self._observation = {"state": state, "task": np.zeros(num_envs, np.int64)}
        never, no_envs = np.zeros(num_envs, bool), np.zeros(0, np.int64)
        reward, executed = np.zeros((num_envs, 1), np.float32), np.ones(num_envs, np.int64)
        self._step = Step(self._observation, reward, executed, never, never, never, no_envs, {})

    def reset(self, seeds: EpisodeSeeds) -> Arrays:
        return self._observation

    def step(self, action: np.ndarray) -> Step:
        return self._step

    def close(self) -> None: ...


def tabletop(robots: int, cameras: tuple[str, ...] = (), threads: int = 0) -> Tabletop:
    return Tabletop(TabletopConfig(task="reach_d0", cameras=cameras, threads=threads), robots)


def gym_processes(robots: int, cameras: tuple[str, ...] = ()) -> SubprocVecEnv:
    """The same task as users of SB3 run it: one gymnasium env per process."""
    return SubprocVecEnv([_GymMaker(cameras)] * robots)


@dataclass(frozen=True)
class _GymMaker:
    """A class, because it must be picklable for the worker processes."""

    cameras: tuple[str, ...]

    def __call__(self) -> gymnasium.Env:
        from sparring.envs.registered import register

        register()
        return gymnasium.make("sparring/reach_d0", cameras=self.cameras)


def bare_loop(backend, policy: ActorCritic, steps: int) -> Callable[[], float]:
    """A loop that only acts: the backend and the layers of the policy, no TensorDict, no log-prob, nothing stored.

    The returned function makes `steps` decisions and returns their seconds.
    """
    observation = backend.reset(EpisodeSeeds(0, total_envs=backend.num_envs))
    images = policy.encoder.images

    @torch.no_grad()
    def run() -> float:
        nonlocal observation
        started = time.perf_counter()
        for _ in range(steps):
            features = torch.from_numpy(observation["state"])
            if images is not None:
                features = torch.cat([images(torch.from_numpy(observation["image/head"])), features], 1)
            mean = policy.head.linear(policy.actor(features))
            policy.critic(features, None)
            action = mean + policy.head.log_std.exp() * torch.randn_like(mean)
            # [N, A] -> [N, C=1, A]
            observation = backend.step(action[:, None].numpy()).observation
        return time.perf_counter() - started

    return run


def _ppo_config(work: Workload) -> PPOConfig:
    return PPOConfig(
        ppo_epochs=work.epochs,
        mini_batch_size=work.minibatch,
        policy_lr=work.learning_rate,
        gamma=work.gamma,
        gae_lambda=work.gae_lambda,
    )


def _count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
