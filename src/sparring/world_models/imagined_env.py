"""ImaginedEnv: a world model as an Env. Letters: N robots, C steps of a chunk, K robots that start an episode."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from tensordict import TensorDict

from sparring.contract import EnvSpec
from sparring.data.episodes import EpisodeStore
from sparring.envs.backend import Arrays, EpisodeSeeds, Step
from sparring.envs.env import Env
from sparring.errors import UserError
from sparring.world_models.world_model import WorldModel

# seeds of K episodes -> their start states: `observation` [K] and `memory` [K, D]
Starts = Callable[[Sequence[int]], TensorDict]


class ImaginedEnv(Env):
    """`num_envs` robots simulated by `model`, from start states of `starts`. Each of the C steps of a chunk gets 1/C of
    the predicted reward. An episode ends if its predicted probability exceeds 0.5, or after `max_decisions`."""

    def __init__(self, model: WorldModel, spec: EnvSpec, starts: Starts, num_envs: int, max_decisions: int, **placed):
        """`spec`: that of the real env; `placed`: keyword arguments of Env."""
        super().__init__(_Imagination(model, spec, starts, num_envs, max_decisions), **placed)  # type: ignore[arg-type]


class StoredStarts:
    """Start states from stored episodes, uniform over all steps; the model computes the memory from earlier steps."""

    def __init__(self, model: WorldModel, store: EpisodeStore, looks_back: int = 16):
        self.model, self.store, self.looks_back = model, store, looks_back

    def __call__(self, seeds: Sequence[int]) -> TensorDict:
        return torch.cat([self._one(seed) for seed in seeds])  # type: ignore[return-value]

    def _one(self, seed: int) -> TensorDict:
        if not self.store.num_steps:
            raise UserError(f"'{self.store.folder}' holds no episode to start from; record some first")
        step = int(np.random.default_rng(seed).integers(self.store.num_steps))
        number = int(np.searchsorted(self.store.ends, step, side="right"))
        episode = self.store.episode(number)
        step -= int(self.store.ends[number]) - len(episode)
        memory = self.model.empty_memory(1)
        for t in range(max(step - self.looks_back, 0), step):
            seen = episode[t : t + 1].to(memory.device)
            memory = self.model.observe(seen.set(("memory", "world_model"), memory))
        observation = episode["observation"][step : step + 1].clone()
        return TensorDict({"observation": observation, "memory": memory.cpu()}, [1])


class GivenStarts:
    """Start states drawn from these observations [K], with an empty memory."""

    def __init__(self, model: WorldModel, observations: TensorDict):
        self.model, self.observations = model, observations

    def __call__(self, seeds: Sequence[int]) -> TensorDict:
        picked = [int(np.random.default_rng(seed).integers(len(self.observations))) for seed in seeds]
        memory = self.model.empty_memory(len(picked)).cpu()
        return TensorDict({"observation": self.observations[picked].clone(), "memory": memory}, [len(picked)])


class _Imagination:
    def __init__(self, model: WorldModel, spec: EnvSpec, starts: Starts, num_envs: int, max_decisions: int):
        self.model, self.starts, self.num_envs, self.max_decisions = model, starts, num_envs, max_decisions
        predicted = {f"image/{camera}" for camera in model.cameras} | {"state", "task", "instruction"}
        shown = {name: kind for name, kind in spec.observation.items() if name in predicted}
        self.spec = replace(spec, observation=shown, max_episode_steps=0)  # the limit is counted in decisions
        self.seeds = EpisodeSeeds(0)
        # [N]: decisions so far in the current episode, and the number of the episode
        self.decisions, self.episodes = np.zeros(num_envs, np.int64), np.zeros(num_envs, np.int64)
        self.observation: Arrays = {}
        self.memory = np.zeros((num_envs, model.memory_size), np.float32)

    def reset(self, seeds: EpisodeSeeds) -> Arrays:
        self.seeds = seeds
        self.episodes[:] = 0
        kinds = self.spec.observation.items()
        self.observation = {name: np.zeros((self.num_envs, *shape), dtype) for name, (shape, dtype) in kinds}
        self._begin(np.arange(self.num_envs))
        return dict(self.observation)

    def step(self, action: np.ndarray) -> Step:
        td = TensorDict({"action": action, "memory": {"world_model": self.memory}}, [self.num_envs])
        for name, values in self.observation.items():
            td["observation", *name.split("/")] = torch.from_numpy(values)
        predicted = self.model.predict(td.to(self.model.empty_memory(0).device))
        success = predicted["success"].numpy(force=True) > 0.5
        terminated = (predicted["terminated"].numpy(force=True) > 0.5) | success
        self.decisions += 1
        truncated = (self.decisions >= self.max_decisions) & ~terminated
        # [N] -> [N, C]: spread evenly, because on a single step gamma would discount the whole reward alike
        chunk = action.shape[1]
        reward = np.repeat(predicted["reward"].numpy(force=True)[:, None] / chunk, chunk, axis=1)
        for name in self.observation.keys() - {"task", "instruction"}:
            self.observation[name] = predicted[tuple(name.split("/"))].numpy(force=True)
        self.memory = predicted["memory"].numpy(force=True)
        ended = np.flatnonzero(terminated | truncated)
        final = {name: values[ended] for name, values in self.observation.items()}
        self.episodes[ended] += 1
        self._begin(ended)
        executed = np.full(self.num_envs, chunk, np.int64)
        return Step(dict(self.observation), reward, executed, terminated, truncated, success, ended, final)

    def record(self, envs: list[int]) -> None:
        """Records no frames: only the observations exist."""

    def render(self, env: int) -> np.ndarray | None:
        return None

    def state(self) -> Arrays:
        own: Arrays = {"decisions": self.decisions.copy(), "episodes": self.episodes.copy()}
        own |= {"memory": self.memory.copy(), "seeds": self.seeds.to_array()}
        return own | {f"observation/{name}": values.copy() for name, values in self.observation.items()}

    def set_state(self, state: Arrays) -> None:
        own: Arrays = {"decisions": self.decisions, "episodes": self.episodes, "memory": self.memory}
        own |= {f"observation/{name}": values for name, values in self.observation.items()}
        if unlike := [n for n, mine in own.items() if (state[n].shape, state[n].dtype) != (mine.shape, mine.dtype)]:
            raise UserError(f"this state is from another env: {', '.join(unlike)} differ in shape or dtype")
        self.seeds = EpisodeSeeds.from_array(state["seeds"])
        self.decisions, self.episodes = state["decisions"].copy(), state["episodes"].copy()
        self.memory = state["memory"].copy()
        self.observation = {name: state[f"observation/{name}"].copy() for name in self.spec.observation}

    def close(self) -> None: ...

    def _begin(self, robots: np.ndarray) -> None:
        if not len(robots):
            return
        started = self.starts([self.seeds(int(robot), int(self.episodes[robot])) for robot in robots])
        for name, values in self.observation.items():  # fresh arrays
            values = self.observation[name] = values.copy()
            values[robots] = started["observation", *name.split("/")].numpy(force=True)
        self.memory = self.memory.copy()
        self.memory[robots] = started["memory"].numpy(force=True)
        self.decisions[robots] = 0
