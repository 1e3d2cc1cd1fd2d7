"""Env: converts a backend's arrays to TensorDicts of the contract. `make_env` creates it from the `env` section."""

import logging
from typing import TYPE_CHECKING

import numpy as np
import torch
from tensordict import TensorDict

from sparring.config.resolve import build
from sparring.config.section import Section
from sparring.contract import EnvSpec
from sparring.envs import ENVS
from sparring.envs.backend import Arrays, Backend, EpisodeSeeds, Step
from sparring.envs.configs import GymConfig
from sparring.errors import StageFailed, UserError
from sparring.processes.child import error_report, usable_cores
from sparring.processes.heartbeat import DOING, MAKING_S, OwnStage

if TYPE_CHECKING:
    from sparring.config.schema import Config
    from sparring.processes.distributed import Distributed

log = logging.getLogger("sparring.env")


class Env:
    """N robots in a simulator, stepped together. In training, the robots of a group share their start states."""

    def __init__(
        self,
        backend: Backend,
        device: str | torch.device = "cpu",
        first_env: int = 0,
        total_envs: int = 0,
        group_size: int = 1,
    ):
        self.backend = backend
        self.device = torch.device(device)
        self.first_env = first_env
        self.total_envs = total_envs or backend.num_envs
        self.group_size = group_size
        self.config: Section | None = None  # the `env` section it was created from, if any
        self.last: Step | None = None  # the last step as numpy arrays, for statistics and videos
        self.group = 0  # its number among `rollout.groups`; the watchdog has a deadline for each group and stage

    @property
    def num_envs(self) -> int:
        return self.backend.num_envs

    @property
    def spec(self) -> EnvSpec:
        return self.backend.spec

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.spec.instructions

    def reset(self, seed: int, split: str = "train", first_episode: int = 0) -> TensorDict:
        """Start episode `first_episode` of every robot."""
        group_size = self.group_size if split == "train" else 1
        log.debug("resets %d robots to episode %d of seed %d, %s", self.num_envs, first_episode, seed, split)
        seeds = EpisodeSeeds(seed, split, self.first_env, self.total_envs, group_size, first_episode)
        with _Watched("reset", self.group):
            observation = self.backend.reset(seeds)
        return self._root(observation, np.ones(self.num_envs, bool))

    def step(self, td: TensorDict) -> TensorDict:
        """`next/*` is the result of the action; the root is the input of the next decision, after auto-reset."""
        with _Watched("simulate", self.group):
            step = self.backend.step(td["action"].numpy(force=True))
        is_first = np.zeros(self.num_envs, bool)
        is_first[step.ended] = True
        root = self._root(step.observation, is_first)
        following: dict[str, TensorDict | torch.Tensor] = {}
        following["observation"] = self._true_next(root["observation"], step.ended, step.final)
        for name in ("reward", "executed", "terminated", "truncated", "success"):
            following[name] = self._tensor(getattr(step, name))
        self.last = step
        return root.set("next", TensorDict(following, [self.num_envs]))

    def state(self) -> Arrays | None:
        with _Watched("state", self.group):
            return self.backend.state()

    def set_state(self, state: Arrays) -> None:
        with _Watched("state", self.group):
            self.backend.set_state(state)

    def close(self) -> None:
        with _Watched("close", self.group):
            self.backend.close()

    def render(self, robot: int) -> np.ndarray | None:
        with _Watched("render", self.group):
            return self.backend.render(robot)

    def _root(self, observation: Arrays, is_first: np.ndarray) -> TensorDict:
        tensors = self._observation(observation, self.num_envs)
        return TensorDict({"observation": tensors, "is_first": self._tensor(is_first)}, [self.num_envs])

    def _observation(self, arrays: Arrays, rows: int) -> TensorDict:
        nested: dict = {}
        for name, value in arrays.items():
            group, _, leaf = name.partition("/")
            if leaf:
                nested.setdefault(group, {})[leaf] = self._tensor(value)
            else:
                nested[name] = self._tensor(value)
        return TensorDict(nested, [rows])

    def _true_next(self, observation: TensorDict, ended: np.ndarray, final: Arrays) -> TensorDict:
        """The root observation itself if no episode ended, else a copy with the true last observations."""
        if not len(ended):
            return observation
        for name in observation.keys(True, True):
            entry = name if isinstance(name, str) else "/".join(name)
            if entry not in final:
                given = f"Step.final has no {entry!r}, but {', '.join(final) or 'nothing'}"
                raise UserError(f"{given}; give every entry of Step.observation in it")
        for name, value in final.items():
            if len(value) != len(ended):
                given = f"Step.final[{name!r}] has {len(value)} rows, but {len(ended)} episodes ended"
                raise UserError(f"{given}; give one row for each robot in Step.ended, in that order")
        observation = observation.clone()
        observation[self._tensor(ended)] = self._observation(final, len(ended))
        return observation

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.to(self.device)


class _Watched(OwnStage):
    """Marks an error of an env with the stage in which it was raised."""

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        super().__exit__(kind, error, trace)
        if error is None or isinstance(error, KeyboardInterrupt):
            return
        if not isinstance(error, Exception):
            # such as sys.exit of a simulator: it must not end this process, possibly with exit code 0
            raise StageFailed(f"{DOING[self.stage]} failed: the env {error_report(error)[0]}") from error
        error.failed_at = self.stage  # type: ignore[attr-defined]
        if isinstance(error, UserError):
            # with the env that it was
            error.args, error.__notes__ = (error_report(error)[0],), []
            # what an env returns is no mistake in a command
            error.exit_code = 1 if self.stage in ("reset", "simulate") else error.exit_code


_GYM_BACKENDS = {
    "serial": "sparring.envs.gym_batch:SerialBackend",
    "process": "sparring.envs.workers:ProcessBackend",
    "gpu": "sparring.envs.sims.maniskill_gpu:ManiSkillBatch",
}


def make_env(
    config: Section,
    num_envs: int,
    max_episode_steps: int | None = None,
    device: str | torch.device = "cpu",
    first_env: int = 0,
    total_envs: int = 0,
    group_size: int = 1,
) -> Env:
    """Create the robots of this process: `num_envs` of `total_envs` over all processes, the first with the number
    `first_env`. Each group of `group_size` robots shares its start states in training."""
    if not isinstance(config, Section):
        raise UserError(f"make_env: got {config!r}; expected the env section of a config, e.g. load_config().env")
    if num_envs < 1:
        raise UserError(f"make_env: num_envs={num_envs}; expected >= 1")
    if num_envs % group_size:
        raise UserError(f"make_env: num_envs={num_envs}; expected a multiple of group_size={group_size}")
    known, name = (_GYM_BACKENDS, config.vectorize) if isinstance(config, GymConfig) else (ENVS, config.name)  # type: ignore[attr-defined]
    with _Watched("make", timeout_s=MAKING_S):
        backend = build(config, known, num_envs, max_episode_steps, kind="env", name=name)
    env = Env(backend, device, first_env, total_envs, group_size)
    env.config = config
    last = env.first_env + num_envs - 1
    log.debug("made robots %d to %d of %d: %s", env.first_env, last, env.total_envs, config.name)  # type: ignore[attr-defined]
    return env


def make_training_env(config: "Config", distributed: "Distributed", group: int = 0) -> Env:
    """Create this process's share of the robots of a run, or one of its `rollout.groups`."""
    rollout = config.rollout
    robots = rollout.n_envs // rollout.groups
    env = config.env
    if rollout.groups > 1:
        cores = usable_cores(rollout.groups)  # groups simulate at the same time and share the cores
        setting = "workers" if isinstance(env, GymConfig) else "threads"
        env = env.model_copy(update={setting: cores}) if getattr(env, setting, None) == 0 else env
    first, total = distributed.rank * rollout.n_envs + group * robots, distributed.world_size * rollout.n_envs
    made = make_env(env, robots, rollout.max_episode_steps, distributed.device, first, total, rollout.group_size)
    made.group = group
    return made
