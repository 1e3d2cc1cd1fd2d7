"""Scripted experts: `Expert(env, noise=0.1)()` returns actions. `Task.expert` computes the next targets of the hands;
`Expert` converts them to actions of the env's control mode. An expert has no memory and uses the true object poses."""

from collections.abc import Callable
from numbers import Real

import numpy as np

from sparring.envs.tabletop.arm import APPROACH, FINGER_STEP, HAND_STEP, JOINT_STEP, TURN_STEP, HandMover, about_z
from sparring.envs.tabletop.backend import Tabletop
from sparring.envs.tabletop.scene import ARM_JOINTS, FINGER_TRAVEL
from sparring.envs.tabletop.tasks.base import HandTarget, Situation, distance
from sparring.errors import UserError
from sparring.noise import keyed_uniform


class Expert:
    """Computes actions `[N, 1, A]` for the current state of `env`. `noise` is a standard deviation relative to the
    largest step (for qpos: the largest step of delta_qpos, so that both modes have the same noise in radians)."""

    def __init__(self, env: Tabletop, noise: float | Real = 0.0, seed: int = 0):
        if not (isinstance(noise, Real) and 0 <= float(noise) < np.inf):
            raise UserError(f"Expert(noise={noise!r}): expected a number >= 0, relative to the largest step, e.g. 0.1")
        self._env, self._noise, self._seed = env, noise, seed
        self._mover = HandMover(env.mounts)
        self._low, self._high = self._mover.model.jnt_range[:ARM_JOINTS].T
        self._absolute = env.config.control_mode == "qpos"
        self._joint_step = JOINT_STEP * env.config.action_scale * (APPROACH if self._absolute else 1)
        tasks = env.robot_tasks()
        without = {task.name for task in tasks if task.expert is None}
        if without:
            raise UserError(f"there is no expert for {', '.join(sorted(without))}; choose another of `sparring tasks`")
        self._rows: dict[Callable[[Situation], HandTarget], list[int]] = {}
        for row, task in enumerate(tasks):
            self._rows.setdefault(task.expert, []).append(row)  # type: ignore[arg-type]

    def __call__(self) -> np.ndarray:
        now = self._env.situation()
        padding = self._env.spec.action_padding
        step = np.zeros((self._env.num_envs, self._env.spec.action_dim - padding))
        for expert, rows in self._rows.items():
            step[rows] = self._steps(expert(Situation(*(values[rows] for values in now))), rows)
        if self._noise:
            arm = [1 / APPROACH] * ARM_JOINTS + [1.0]  # noise=1 relative to the largest step of qpos
            unit = np.tile(arm, len(self._env.mounts)) if self._absolute else np.ones(1)
            step += self._noise * unit * _keyed_normal(self._seed, self._env.step_keys(), step.shape[1])
        action = np.clip(step, -1, 1)
        if self._absolute:
            action = np.clip(self._targets(action), -1, 1)
        return np.pad(action, ((0, 0), (0, padding)))[:, None]

    def _steps(self, target: HandTarget, rows: list[int]) -> np.ndarray:
        """Convert targets to steps `[n, R * A]` in the env's control mode; 1 is the largest step."""
        command, arm = (values[rows] for values in self._env.arms())
        pos, mat = self._mover.where(np.concatenate([command[..., :ARM_JOINTS], arm[..., ARM_JOINTS:]], axis=2))
        down = np.broadcast_to(self._mover.pointing_down, mat.shape)
        # one row per arm: [n, R, ...] -> [m, ...] with m = n * R
        command, arm, pos = (values.reshape(-1, values.shape[-1]) for values in (command, arm, pos))
        mat, down = mat.reshape(-1, 3, 3), down.reshape(-1, 3, 3)
        point, yaw, grip, speed = target.point.reshape(-1, 3), *(values.reshape(-1) for values in target[1:])
        scale, mode = self._env.config.action_scale, self._env.config.control_mode
        move = _at_most(point - pos, HAND_STEP * speed * scale)
        turn = 0.25 * np.cross(mat, about_z(yaw) @ down, axis=1).sum(axis=2)
        turn = _at_most(turn, np.full(len(pos), TURN_STEP * scale))
        if mode == "delta_ee_pos":
            steps = [move / (HAND_STEP * scale)]
        elif mode == "delta_ee":
            steps = [move / (HAND_STEP * scale), turn / (TURN_STEP * scale)]
        else:
            steps = [self._joint_steps(command, arm, move, turn, distance(point, pos)) / self._joint_step]
        return np.concatenate([*steps, grip[:, None]], axis=1).reshape(len(rows), -1)

    def _joint_steps(self, command, arm, move: np.ndarray, turn: np.ndarray, away: np.ndarray) -> np.ndarray:
        """Joint steps `[m, 6]` for hands that are `away` `[m]` metres from their targets."""
        joints = self._mover.turned(command, arm, np.concatenate([move, turn], axis=1))
        # near the target, all joints are scaled alike, which keeps the direction of the hand
        slowed = joints / np.maximum(np.abs(joints).max(axis=1, keepdims=True) / self._joint_step, 1)
        return np.where(away[:, None] > 0.06, np.clip(joints, -self._joint_step, self._joint_step), slowed)

    def _targets(self, step: np.ndarray) -> np.ndarray:
        command, _ = self._env.arms()
        step = step.reshape(command.shape)  # [N, R * A] -> [N, R, A]
        joints = command[..., :ARM_JOINTS] + step[..., :ARM_JOINTS] * self._joint_step
        opening = command[..., -1:] + step[..., -1:] * FINGER_STEP * self._env.config.action_scale
        part = (joints - self._low) / (self._high - self._low)
        return 2 * np.concatenate([part, opening / FINGER_TRAVEL], axis=2).reshape(len(step), -1) - 1


def _keyed_normal(seed: int, step_keys: np.ndarray, size: int) -> np.ndarray:
    """`[N, size]` standard normal numbers; a row depends only on the seed and the robot's step key."""
    one, other = np.split(keyed_uniform(seed, step_keys, np.zeros(1), 2 * size)[0].astype(np.float64), 2, axis=1)
    return np.sqrt(-2 * np.log(one)) * np.cos(2 * np.pi * other)


def _at_most(vectors: np.ndarray, length: np.ndarray) -> np.ndarray:
    size = np.linalg.norm(vectors, axis=1)
    return vectors * np.minimum(1, length / np.maximum(size, 1e-9))[:, None]
