"""ManiSkill's GPU simulator as a backend: `env.name=maniskill:PickCube-v1 env.vectorize=gpu`.

Written against ManiSkill 3.0.1 and tested with a double; it has not been run, as it needs an NVIDIA GPU and SAPIEN's
PhysX library, which SAPIEN downloads. Letters: N robots, C steps of a chunk, A action dims, K ended episodes."""

from typing import Any

import numpy as np

from sparring.contract import EnvSpec
from sparring.envs.backend import Arrays, EpisodeSeeds, Step
from sparring.envs.configs import GymConfig
from sparring.envs.gym import ActionMap, cannot_be_created
from sparring.envs.sims.maniskill import Simulation, Task
from sparring.errors import UserError

_PREFIX = "maniskill:"


class ManiSkillBatch:
    """All robots take each step together. A robot whose episode ends within a chunk is still moved by the simulator;
    what happens to it is not reported, and it is reset after the chunk.

    Robots that are reset together draw their start states from one seed, made of the seeds of their episodes. So runs
    repeat, but an episode starts in another state if another number of robots is used."""

    def __init__(self, config: GymConfig, num_envs: int, max_episode_steps: int | None = None):
        if not config.name.startswith(_PREFIX):
            raise UserError(f"env.vectorize=gpu is for {_PREFIX}TASK; env.name={config.name} needs serial or process")
        if config.roles or config.points or config.success_return is not None:
            without = "env.roles, env.points and env.success_return"
            raise UserError(f"{without} are not for env.vectorize=gpu; use serial or process")
        self.num_envs = num_envs
        try:
            self._task = Task(config.name.removeprefix(_PREFIX), **config.kwargs)
        except TypeError as error:
            raise UserError(cannot_be_created(config, error)) from None
        self._simulation = Simulation(self._task, num_envs, on_gpu=True)
        self._limit = max_episode_steps or self._simulation.limit or 0
        self._actions = ActionMap(self._simulation.action_space, config.name)
        self.spec = EnvSpec(
            observation=_observation(self._task, self._simulation.state.shape[1]),
            action_dim=self._actions.dim,
            task_names=(config.name,),
            max_episode_steps=self._limit,
            reports_success=self._simulation.reports_success,
            control_hz=float(self._simulation.inner.control_freq),
            action_low=self._actions.low,
            action_high=self._actions.high,
            state_entries=(("state", self._simulation.state.shape[1]),),
        )
        self._seeds: EpisodeSeeds | None = None
        self._recorded: list[int] = []
        # [N]: number and length of the current episode, and whether it has succeeded
        self._episodes, self._elapsed = np.zeros((2, num_envs), np.int64)
        self._succeeded = np.zeros(num_envs, bool)

    def reset(self, seeds: EpisodeSeeds) -> Arrays:
        self._seeds = seeds
        self._episodes[:] = 0
        self._begin(np.arange(self.num_envs))
        return self._observed()

    def step(self, action: np.ndarray) -> Step:
        if self._seeds is None:
            raise RuntimeError("stepped before the first reset; call reset(seeds) first")
        chunk = action.shape[1]
        shape = (self.num_envs,)
        reward, executed = np.zeros((self.num_envs, chunk), np.float32), np.zeros(shape, np.int64)
        terminated, truncated = np.zeros((2, *shape), bool)
        final = {key: np.zeros((*shape, *each), kind) for key, (each, kind) in self.spec.observation.items()}
        frames: dict[int, list[Any]] = {env: [] for env in self._recorded}
        # [N, C, A]: [-1, 1] -> the range of the env
        scaled = np.array(self._actions.decode(action))
        for k in range(chunk):
            running = ~(terminated | truncated)
            if not running.any():
                break
            rewards, solved, failed = self._advance(scaled[:, k])
            reward[running, k] = rewards[running]
            executed += running
            self._elapsed += running
            self._succeeded |= solved & running
            terminated |= running & (failed | (solved & (self._task.at_success == "terminate")))
            truncated |= running & solved & (self._task.at_success == "truncate")
            if self._limit:
                truncated |= running & (self._elapsed >= self._limit)
            if (now := running & (terminated | truncated)).any():
                for key, values in self._observed().items():
                    final[key][now] = values[now]
            for env in frames:
                if running[env] and (picture := self.render(env)) is not None:
                    frames[env].append(picture)
        success, ended = self._succeeded.copy(), np.flatnonzero(terminated | truncated)
        if len(ended):
            self._episodes[ended] += 1
            self._begin(ended)
        last = {key: values[ended] for key, values in final.items()}
        return Step(self._observed(), reward, executed, terminated, truncated, success, ended, last, frames)

    def record(self, envs: list[int]) -> None:
        self._recorded = list(envs)

    def render(self, env: int) -> np.ndarray | None:
        return self._simulation.inner.render_rgb_array()[env].cpu().numpy()

    def state(self) -> None:
        """The GPU simulator does not repeat itself exactly."""

    def set_state(self, state: Arrays) -> None:
        raise RuntimeError("ManiSkill's GPU simulator has no state to restore")

    def close(self) -> None:
        self._simulation.inner.close()

    def _advance(self, action: np.ndarray) -> list[np.ndarray]:
        """One step of all robots -> (reward, solved, failed) [N]."""
        import torch

        given = torch.as_tensor(action, dtype=torch.float32, device=self._simulation.inner.device)
        return [each.cpu().numpy() for each in self._simulation.step(given)]

    def _begin(self, envs: np.ndarray) -> None:
        import torch

        assert self._seeds is not None
        self._elapsed[envs], self._succeeded[envs] = 0, False
        seeds = [self._seeds(int(env), int(self._episodes[env])) for env in envs]
        device = self._simulation.inner.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            # ManiSkill's own seeding of some of its robots takes the seed of the first robot of all
            torch.manual_seed(int(np.random.SeedSequence(seeds).generate_state(1)[0]))
            self._simulation.reset(None, {"env_idx": torch.as_tensor(envs, device=device)})

    def _observed(self) -> Arrays:
        """[N, ...] each."""
        task = self._task
        shown = {"state": self._simulation.state.cpu().numpy().astype(np.float32)}
        for camera in task.cameras:
            found = self._simulation.draw(camera)
            shown[f"image/{camera}"] = np.ascontiguousarray(found["rgb"].cpu().numpy().transpose(0, 3, 1, 2))
            if task.depth:
                shown[f"depth/{camera}"] = found["depth"].cpu().numpy()[:, None]
        if task.instruction is not None:
            text = np.frombuffer(task.instruction.encode(), np.uint8)
            row = np.pad(text, (0, 4 * task.text_length - len(text)))
            shown["instruction"] = np.tile(row, (self.num_envs, 1))
        return shown


def _observation(task: Task, state: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """The same as that of one robot on the CPU."""
    size = (task.image_size, task.image_size)
    shown: dict[str, tuple[tuple[int, ...], str]] = {"state": ((state,), "float32")}
    for camera in task.cameras:
        shown[f"image/{camera}"] = (3, *size), "uint8"
        if task.depth:
            shown[f"depth/{camera}"] = (1, *size), "float32"
    if task.instruction is not None:
        shown["instruction"] = (4 * task.text_length,), "uint8"
    return shown
