"""Gymnasium envs stepped one after another, in this process (`SerialBackend`) or in a worker. Letters: N robots, C
steps of a chunk, A action dims."""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from sparring.contract import EnvSpec
from sparring.envs.backend import Arrays, EpisodeSeeds, Picture, Step
from sparring.envs.configs import GymConfig
from sparring.envs.gym import GymRobot, pack, unpack
from sparring.errors import UserError
from sparring.processes.memory import Column

Frames = dict[int, list[Picture]]


class SerialBackend:
    """N gymnasium envs in this process."""

    def __init__(self, config: GymConfig, num_envs: int, max_episode_steps: int | None = None):
        self.num_envs = num_envs
        self._batch = GymBatch(config, range(num_envs), max_episode_steps)
        self.spec, self.robots = self._batch.spec, self._batch.robots
        self._arrays = StepArrays.allocate(self.spec, num_envs, chunk=1)
        self.record, self.render, self.no_picture = self._batch.record, self._batch.render, self._batch.no_picture
        self.state, self.set_state, self.close = self._batch.state, self._batch.set_state, self._batch.close

    def reset(self, seeds: EpisodeSeeds) -> Arrays:
        self._batch.reset(seeds, self._arrays)
        return self._arrays.observed()

    def step(self, action: np.ndarray) -> Step:
        if chunk := self._arrays.other_chunk(action):
            self._arrays = StepArrays.allocate(self.spec, self.num_envs, chunk)
        self._arrays.action[:] = action
        frames = self._batch.step(self._arrays)
        if self._batch.reports_success and not self.spec.reports_success:
            self.spec = replace(self.spec, reports_success=True)
        return self._arrays.to_step(frames)


@dataclass
class StepArrays:
    """The input and output arrays of a step; processes can share them."""

    action: np.ndarray  # [N, C, A] float32
    reward: np.ndarray  # [N, C] float32
    executed: np.ndarray  # [N] int64
    # [N] bool
    terminated: np.ndarray
    truncated: np.ndarray
    success: np.ndarray
    observation: Arrays  # [N, ...] each
    final: Arrays  # [N, ...] each: the last observation of episodes that ended in this step; other rows are outdated

    @classmethod
    def allocate(cls, spec: EnvSpec, num_envs: int, chunk: int) -> "StepArrays":
        columns = cls.columns(spec, num_envs, chunk)
        return cls.of({key: np.zeros(column.shape, column.dtype) for key, column in columns.items()})

    @classmethod
    def columns(cls, spec: EnvSpec, num_envs: int, chunk: int) -> dict[tuple[str, ...], Column]:
        shapes: dict[tuple[str, ...], tuple[tuple[int, ...], str]]
        shapes = {("action",): ((num_envs, chunk, spec.action_dim), "float32")}
        shapes |= {("reward",): ((num_envs, chunk), "float32"), ("executed",): ((num_envs,), "int64")}
        shapes |= {(name,): ((num_envs,), "bool") for name in ("terminated", "truncated", "success")}
        for group in ("observation", "final"):
            shapes |= {(group, key): ((num_envs, *shape), kind) for key, (shape, kind) in spec.observation.items()}
        return {key: Column(shape, np.dtype(kind)) for key, (shape, kind) in shapes.items()}

    @classmethod
    def of(cls, arrays: dict[tuple[str, ...], np.ndarray]) -> "StepArrays":
        whole: dict[str, Any] = {key[0]: array for key, array in arrays.items() if len(key) == 1}
        for group in ("observation", "final"):
            whole[group] = {key[1]: array for key, array in arrays.items() if key[0] == group}
        return cls(**whole)

    def other_chunk(self, action: np.ndarray) -> int:
        """C of an action `[N, C, A]` if it needs new arrays; 0: it fits into these."""
        shape, (robots, chunk, dims) = np.shape(action), self.action.shape
        if len(shape) != 3 or shape[0] != robots or shape[1] < 1 or shape[2] != dims:
            expected = f"expected [{robots}, C, {dims}]: robots, steps of the chunk (at least 1), action dims"
            raise UserError(f"action has shape {shape}; {expected}")
        return 0 if shape[1] == chunk else shape[1]

    def observed(self) -> Arrays:
        return {key: value.copy() for key, value in self.observation.items()}

    def to_step(self, frames: Frames) -> Step:
        ended = (self.terminated | self.truncated).nonzero()[0]
        flags = (self.terminated.copy(), self.truncated.copy(), self.success.copy())
        final = {key: value[ended] for key, value in self.final.items()}
        return Step(self.observed(), self.reward.copy(), self.executed.copy(), *flags, ended, final, frames)


class GymBatch:
    """Steps the robots with the numbers `envs` in the whole batch. Its `StepArrays` hold only these robots."""

    def __init__(self, config: GymConfig, envs: range, max_episode_steps: int | None):
        self.name, self.envs = config.name, envs
        self.robots = [GymRobot(config, max_episode_steps) for _ in envs]
        self.spec = self.robots[0].spec
        self._decode = self.robots[0].actions.decode
        self._floats = [key for key, (_, dtype) in self.spec.observation.items() if dtype == "float32"]
        self._seeds: EpisodeSeeds | None = None
        self._episodes = [0] * len(envs)
        self._recorded: list[int] = []

    @property
    def reports_success(self) -> bool:
        return self.robots[0].reports_success

    def reset(self, seeds: EpisodeSeeds, arrays: StepArrays) -> None:
        self._seeds = seeds
        self._episodes = [0] * len(self.envs)
        arrays.reward.fill(0.0)
        for row in range(len(self.envs)):
            self._start_episode(row, arrays)
        self._check(arrays, ended=[])

    def begin(self, seeds: EpisodeSeeds, episodes: list[int], arrays: StepArrays) -> None:
        """Begin these episodes, in place of a batch that died."""
        self._seeds, self._episodes = seeds, episodes
        for row in range(len(self.envs)):
            self._start_episode(row, arrays)

    def step(self, arrays: StepArrays) -> Frames:
        if self._seeds is None:
            raise RuntimeError(f"{self.name} was stepped before its first reset; call reset(seeds) first")
        arrays.reward.fill(0.0)
        steps = enumerate(self._decode(arrays.action))
        ended = [row for row, actions in steps if self._step_robot(row, actions, arrays)]
        self._check(arrays, ended)
        return {env: self._robot(env).frames for env in self._recorded if self._robot(env).frames}

    def record(self, envs: list[int]) -> None:
        self._recorded = [env for env in envs if env in self.envs]
        for env, robot in zip(self.envs, self.robots, strict=True):
            robot.recording, robot.frames = env in self._recorded, []

    def render(self, env: int) -> np.ndarray | None:
        return self._robot(env).render()

    def no_picture(self, env: int) -> str | None:
        return self._robot(env).no_picture

    def state(self) -> Arrays | None:
        if self._seeds is None:
            raise RuntimeError(f"{self.name} has no state before its first reset; call reset(seeds) first")
        seeds = {item.name: getattr(self._seeds, item.name) for item in fields(self._seeds)}
        state = {f"seeds/{key}": value for key, value in pack(seeds).items()}
        for env, robot, episode in zip(self.envs, self.robots, self._episodes, strict=True):
            part = robot.state()
            if part is None:
                return None
            state.update({f"{env}/{key}": value for key, value in part.items()})
            state[f"{env}/episode"] = np.array(episode)
        return state

    def set_state(self, state: Arrays) -> None:
        self._seeds = EpisodeSeeds(**unpack(below(state, "seeds")))
        for row, (env, robot) in enumerate(zip(self.envs, self.robots, strict=True)):
            if f"{env}/episode" not in state:
                saved = sum(key.endswith("/episode") for key in state)
                raise UserError(f"the saved state has {saved} robots and no robot {env}; create {saved} to restore it")
            robot.set_state(below(state, str(env)))
            self._episodes[row] = int(state[f"{env}/episode"])

    def close(self) -> None:
        for robot in self.robots:
            robot.close()

    def _robot(self, env: int) -> GymRobot:
        return self.robots[env - self.envs.start]

    def _start_episode(self, row: int, arrays: StepArrays) -> None:
        assert self._seeds is not None
        try:
            self.robots[row].reset(self._seeds(self.envs[row], self._episodes[row]))
            self.robots[row].write(arrays.observation, row)
        except BaseException as error:
            error.add_note(f"in env {self.envs[row]} ({self.name})")
            raise

    def _step_robot(self, row: int, actions: list[Any], arrays: StepArrays) -> bool:
        robot = self.robots[row]
        try:
            executed, terminated, truncated, success = robot.step(actions, arrays.reward[row])
            arrays.executed[row], arrays.success[row] = executed, success
            arrays.terminated[row], arrays.truncated[row] = terminated, truncated
            ended = terminated or truncated
            robot.write(arrays.final if ended else arrays.observation, row)
        except BaseException as error:
            error.add_note(f"in env {self.envs[row]} ({self.name})")
            raise
        if ended:
            self._episodes[row] += 1
            self._start_episode(row, arrays)
        return ended

    def _check(self, arrays: StepArrays, ended: list[int]) -> None:
        all_rows = range(len(self.envs))
        self._check_finite("reward", arrays.reward, all_rows)
        for key in self._floats:
            self._check_finite("observation", arrays.observation[key], all_rows)
            if ended:
                self._check_finite("final observation", arrays.final[key][ended], ended)

    def _check_finite(self, what: str, values: np.ndarray, rows: list[int] | range) -> None:
        """Raise for NaN or inf. One call per batch is much cheaper than one per robot."""
        finite = np.isfinite(values)
        if np.count_nonzero(finite) == finite.size:
            return
        wrong = int(np.argwhere(~finite)[0][0])
        env, found = self.envs[rows[wrong]], values[wrong]
        advice = "the simulation has diverged or divided by zero: let the env terminate such episodes"
        raise UserError(f"the {what} of env {env} ({self.name}) holds NaN or inf: {found}; {advice}")


def below(state: Arrays, prefix: str) -> Arrays:
    return {key.removeprefix(f"{prefix}/"): value for key, value in state.items() if key.startswith(f"{prefix}/")}
