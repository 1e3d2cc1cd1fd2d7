"""The built-in simulator: robots at a table. A step handles all robots at once; a reset handles them one by one."""

from collections.abc import Callable
from zlib import crc32

import numpy as np

from sparring.contract import EnvSpec
from sparring.envs.backend import Arrays, EpisodeSeeds, Picture, Step, drawn
from sparring.envs.configs import TabletopConfig
from sparring.envs.tabletop.arm import CONTROLS, HandMover
from sparring.envs.tabletop.observe import HAND_SCALE, Observations, padded
from sparring.envs.tabletop.randomize import Domain
from sparring.envs.tabletop.scene import ARM_JOINTS, CONTROL_HZ, Mount
from sparring.envs.tabletop.tasks.base import Situation, Task
from sparring.envs.tabletop.tasks.explore import place_clutter
from sparring.envs.tabletop.tasks.registry import TASKS
from sparring.envs.tabletop.world import World
from sparring.errors import UserError
from sparring.processes.child import usable_cores

_NO_CLUTTER = np.empty((0, 7))


class Tabletop:
    """A `Backend` (see envs/backend.py)."""

    def __init__(self, config: TabletopConfig, num_envs: int, max_episode_steps: int | None = None):
        self.num_envs = num_envs
        self.config = config
        self._tasks = [TASKS[name] for name in config.task]
        if "clutter" in config.domain_randomization:
            self._tasks = [Domain.cluttered(task) for task in self._tasks]
        self.mounts = _embodiment(self._tasks, config.cameras)
        # robot i has task i % number of tasks; the config ensures a multiple of that number in every process
        self._task = np.arange(num_envs) % len(self._tasks)
        scenes = [task.scene for task in self._tasks]
        own_scenes, threads = [scenes[k] for k in self._task], config.threads or usable_cores()
        self._world = World(own_scenes, threads, config.video_renderer, possible=scenes)
        self._domain = Domain(config.domain_randomization, self._world) if config.domain_randomization else None
        self._observations = Observations(config, self._world, len(self.mounts))
        self._hand_mover = HandMover(self.mounts)
        self._control = CONTROLS[config.control_mode](self._hand_mover, config.action_scale)
        self._recorded: list[int] = []

        limits = np.array([max_episode_steps or task.max_episode_steps for task in self._tasks])
        self.spec = self._make_spec(int(limits.max()))
        self._limit = limits[self._task]
        self._hold = np.array([task.hold for task in self._tasks])[self._task]
        self._first_phrasing = np.cumsum([0] + [len(task.instructions) for task in self._tasks])
        self._all = np.arange(num_envs)

        self._seeds: EpisodeSeeds | None = None
        self._closed = False
        self._command = np.zeros((num_envs, len(self.mounts), ARM_JOINTS + 1))
        self._goal = np.zeros((num_envs, 3))
        # steps since the start of the episode, and the number of latest consecutive steps that satisfied the task
        self._elapsed, self._streak = np.zeros((2, num_envs), np.int64)
        self._episode, self._phrasing = np.zeros((2, num_envs), np.int64)
        self._episode_seed = np.zeros(num_envs, np.uint64)
        self._hands, self._hand_axes = np.zeros((2, num_envs, len(self.mounts), 3))

    def reset(self, seeds: EpisodeSeeds) -> Arrays:
        self._seeds = seeds
        self._episode[:] = 0
        self._begin(self._all)
        return self._observe(self._all)

    def step(self, action: np.ndarray) -> Step:
        action = self._checked(action)
        chunk = action.shape[1]
        reward = np.zeros((self.num_envs, chunk), np.float32)
        executed = np.zeros(self.num_envs, np.int64)
        truncated, contact = np.zeros((2, self.num_envs), bool)
        frames: dict[int, list[Picture]] = {env: [] for env in self._recorded}
        rows = self._all
        for c in range(chunk):
            reward[rows, c] = self._advance(rows, action[rows, c])
            executed[rows] += 1
            contact[rows] |= self._world.touched(rows)
            for env in self._recorded:
                if not truncated[env]:
                    frames[env].append(self._world.picture(env, self._goal[[env]]))
            truncated[rows] = self._elapsed[rows] >= self._limit[rows]
            rows = np.flatnonzero(~truncated)
            if not len(rows):
                break
        success = self._succeeded(self._all)
        observation, ended = self._observe(self._all), np.flatnonzero(truncated)
        final = {key: value[ended] for key, value in observation.items()}
        if len(ended):
            self._episode[ended] += 1
            self._begin(ended)
            for key, value in self._observe(ended).items():
                observation[key][ended] = value
        terminated = np.zeros(self.num_envs, bool)
        return Step(observation, reward, executed, terminated, truncated, success, ended, final, frames, contact)

    def record(self, envs: list[int]) -> None:
        self._recorded = sorted(envs)

    def render(self, env: int) -> np.ndarray:
        return drawn(self._world.picture(env, self._goal[[env]]))

    def sketch(self, env: int) -> Callable[[], np.ndarray] | None:
        return self._world.picture(env, self._goal[[env]]) if self._world.draws_later else None  # type: ignore[return-value]

    def situation(self) -> Situation:
        return self._situation(self._all)

    def arms(self) -> tuple[np.ndarray, np.ndarray]:
        """Commands `[N, R, 7]` and joint positions `[N, R, 8]` of all robots."""
        return self._command.copy(), self._world.arms(self._all)

    def robot_tasks(self) -> list[Task]:
        return [self._tasks[index] for index in self._task]

    def step_keys(self) -> np.ndarray:
        """`[N]`: a key of each robot's current step, from the seed of its episode and the number of the step."""
        return self._episode_seed << np.uint64(20) | self._elapsed.astype(np.uint64)

    def state(self) -> Arrays:
        seeds = self._started()
        state = {"physics": self._world.state(), "command": self._command.reshape(self.num_envs, -1).copy()}
        own = {name: values.copy() for name, values in self._own_state().items()}
        return state | own | {"task": self._task_names(), "seeds": seeds.to_array()}

    def set_state(self, state: Arrays) -> None:
        given, mine = state["physics"].shape, self._world.state().shape
        if given != mine:
            sizes = f"{given[0]} robots with {given[1]} numbers each, but this env has {mine[0]} with {mine[1]}"
            raise UserError(f"this state has {sizes}; create the env with the config and num_envs of the saved env")
        own = {"command": self._command.reshape(self.num_envs, -1)} | self._own_state()
        if unlike := [n for n, mine in own.items() if (state[n].shape, state[n].dtype) != (mine.shape, mine.dtype)]:
            raise UserError(f"this state is from another env: {', '.join(unlike)} differ in shape or dtype")
        if not np.isfinite(state["physics"]).all():
            raise UserError("this state is damaged: 'physics' holds NaN or infinity; use another saved state")
        if not np.array_equal(state["task"], self._task_names()):
            tasks = f"env.task={list(self.config.task)}"
            raise UserError(f"this state was saved with other tasks than {tasks}; create the env with the same tasks")
        self._world.set_state(state["physics"])
        self._command[:] = state["command"].reshape(self._command.shape)
        for name, values in self._own_state().items():
            values[:] = state[name]
        self._seeds = EpisodeSeeds.from_array(state["seeds"])
        for row in self._all:
            self._episode_seed[row] = seed = self._seeds(int(row), int(self._episode[row]))
            if self._domain is not None:
                self._domain.begin(int(row), seed)
        self._locate_hands(self._all)
        self._update_noise(self._all)

    def _own_state(self) -> Arrays:
        own = {"goal": self._goal, "elapsed": self._elapsed, "streak": self._streak, "episode": self._episode}
        return own | {"phrasing": self._phrasing}

    def close(self) -> None:
        self._world.close()
        self._closed = True

    def _make_spec(self, max_episode_steps: int) -> EnvSpec:
        actions = self._control.action_dim * len(self.mounts)
        action_dim = padded("env.pad_action", self.config.pad_action, actions)
        return EnvSpec(
            observation={**self._observations.spec, "task": ((), "int64")},
            action_dim=action_dim,
            action_padding=action_dim - actions,
            task_names=tuple(task.name for task in self._tasks for _ in task.instructions),
            instructions=tuple(text for task in self._tasks for text in task.instructions),
            max_episode_steps=max_episode_steps,
            reports_success=any(task.reports_success for task in self._tasks),
            control_hz=CONTROL_HZ,
            video_cameras=self._world.cameras,
            hand_entries=self._observations.hand_entries,
            hand_scale=HAND_SCALE,
            object_entries=self._observations.object_entries,
        )

    def _task_names(self) -> np.ndarray:
        """`[N]`: a hash of each robot's task name."""
        return np.array([crc32(task.name.encode()) for task in self.robot_tasks()])

    def _started(self) -> EpisodeSeeds:
        if self._closed:
            raise UserError("this env was closed; make a new one")
        if self._seeds is None:
            raise RuntimeError("no episode has started; call reset(seeds) or set_state(state) first")
        return self._seeds

    def _checked(self, action: np.ndarray) -> np.ndarray:
        self._started()
        action = np.asarray(action, np.float64)
        expected = (self.num_envs, self.spec.action_dim)
        if action.ndim != 3 or action.shape[1] < 1 or (action.shape[0], action.shape[2]) != expected:
            shape = f"[N, C, A] = [{expected[0]}, C >= 1, {expected[1]}]"
            raise UserError(f"action has shape {action.shape}; {self.config.control_mode} expects {shape}")
        if np.isnan(action).any():
            wrong = np.flatnonzero(np.isnan(action).any(axis=(1, 2)))
            raise UserError(f"actions of robots {wrong.tolist()} hold NaN; the policy that computed them has diverged")
        return np.clip(action[..., : expected[1] - self.spec.action_padding], -1.0, 1.0)

    def _begin(self, rows: np.ndarray) -> None:
        seeds = self._started()
        for row in rows:
            self._episode_seed[row] = seed = seeds(int(row), int(self._episode[row]))
            rng = np.random.default_rng(seed)
            task = self._tasks[self._task[row]]
            start = task.start(rng)
            self._goal[row] = start.goal
            self._command[row] = np.reshape(start.arm, (len(self.mounts), -1))[:, : ARM_JOINTS + 1]
            self._phrasing[row] = self._first_phrasing[self._task[row]] + rng.integers(len(task.instructions))
            # drawn last: clutter does not change the start
            clutter = place_clutter(rng, task.scene, start) if task.scene.clutter else _NO_CLUTTER
            self._world.place(row, start, clutter)
            if self._domain is not None:
                self._domain.begin(row, seed)
        self._elapsed[rows] = self._streak[rows] = 0
        self._locate_hands(rows)
        self._update_noise(rows)

    def _advance(self, rows: np.ndarray, action: np.ndarray) -> np.ndarray:
        # [n, R, ...] -> [n * R, ...]
        parts = (self._command[rows], action.reshape(len(rows), len(self.mounts), -1), self._world.arms(rows))
        command = self._control(*(part.reshape(-1, part.shape[-1]) for part in parts))
        self._command[rows] = command.reshape(parts[0].shape)
        motors = np.concatenate([command, command[:, -1:]], axis=1)  # both fingers of a hand follow one command
        self._world.advance(rows, motors.reshape(len(rows), -1))
        self._locate_hands(rows)
        reward, satisfied = self._score(rows)
        self._elapsed[rows] += 1
        self._streak[rows] = (self._streak[rows] + 1) * satisfied
        self._update_noise(rows)
        return self._succeeded(rows) if self.config.reward == "sparse" else reward

    def _update_noise(self, rows: np.ndarray) -> None:
        if self.config.noise_screen:
            self._world.set_noise(rows, self.step_keys()[rows])

    def _succeeded(self, rows: np.ndarray) -> np.ndarray:
        return (self._elapsed[rows] >= self._limit[rows]) & (self._streak[rows] >= self._hold[rows])

    def _situation(self, rows: np.ndarray) -> Situation:
        pos, quat, _ = self._world.objects(rows)
        widths = self._world.arms(rows)[:, :, ARM_JOINTS:].sum(axis=2)
        grips, moving = self._command[rows, :, -1], self._world.mechanisms(rows)
        return Situation(self._hands[rows], self._goal[rows], widths, grips, pos, quat, *moving)

    def _score(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        now = self._situation(rows)
        if len(self._tasks) == 1:
            return self._tasks[0].score(now)
        reward, satisfied = np.zeros(len(rows)), np.zeros(len(rows), bool)
        for index, task in enumerate(self._tasks):
            mine = self._task[rows] == index
            reward[mine], satisfied[mine] = task.score(Situation(*(values[mine] for values in now)))
        return reward, satisfied

    def _locate_hands(self, rows: np.ndarray) -> None:
        self._hands[rows], mat = self._hand_mover.where(self._world.arms(rows))
        self._hand_axes[rows] = mat[..., 2]

    def _observe(self, rows: np.ndarray) -> Arrays:
        goal, time_left = self._goal[rows], 1 - self._elapsed[rows] / self._limit[rows]
        arms = (self._command[rows], self._hands[rows], self._hand_axes[rows])
        return {**self._observations.observe(rows, *arms, goal, time_left), "task": self._phrasing[rows].copy()}


def _embodiment(tasks: list[Task], cameras: tuple[str, ...]) -> tuple[Mount, ...]:
    first = tasks[0].scene
    for task in tasks:
        if task.scene.arms != first.arms:
            counts = f"{tasks[0].name} has {len(first.arms)} arm(s) and {task.name} has {len(task.scene.arms)}"
            raise UserError(f"env.task mixes robots: {counts}; mix only tasks with the same number of arms")
    missing = [camera for camera in cameras if camera not in first.cameras]
    if missing:
        available = ", ".join(first.cameras)
        raise UserError(f"env.cameras has {', '.join(missing)}, but the robot of {tasks[0].name} has only {available}")
    return first.arms
