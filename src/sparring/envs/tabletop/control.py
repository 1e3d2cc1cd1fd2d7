"""What an action means: it moves the commanded joint positions and finger opening, which the motors then follow.

A command is `[n, 7]`: six joint angles and one finger opening in metres. The last action opens (+) or closes (-).
"""

import numpy as np
from numba import njit

from sparring.envs.tabletop.kinematics import Kinematics, point_jacobian, select
from sparring.envs.tabletop.scene import ARM_JOINTS, FINGER_TRAVEL

JOINT_STEP = 0.05
HAND_STEP = 0.02
FINGER_STEP = 0.01
# a command runs at most this far ahead of the arm, so that a blocked arm does not wind up
LEASH = 0.3
_DAMPING = 1e-3
_UPRIGHTING = 0.5
# columns are the hand's axes when it points down: the fingers at the table, the camera outwards
_POINTING_DOWN = np.diag([-1.0, 1.0, -1.0])


class DeltaQpos:
    """Seven actions: a step of each joint, and of the fingers."""

    action_dim = ARM_JOINTS + 1

    def __init__(self, model, scale: float):
        self._step = np.array([JOINT_STEP] * ARM_JOINTS + [FINGER_STEP]) * scale
        self._limits = _Limits(model)

    def __call__(self, command: np.ndarray, action: np.ndarray, qpos: np.ndarray) -> np.ndarray:
        return self._limits(command + action * self._step, qpos)


class DeltaEePos:
    """Four actions: a step of the hand along x, y, z, and of the fingers; the hand keeps pointing down.

    Damped least squares at the commanded pose, not at the measured one: the hand's lag does not leak into its path.
    """

    action_dim = 4

    def __init__(self, model, scale: float, kinematics: Kinematics, site: int):
        self._scale = scale
        self._kinematics = kinematics
        self._hand = select(kinematics.sites, [site])
        self._limits = _Limits(model)

    def __call__(self, command: np.ndarray, action: np.ndarray, qpos: np.ndarray) -> np.ndarray:
        commanded = qpos.copy()
        commanded[:, :ARM_JOINTS] = command[:, :ARM_JOINTS]
        poses = self._kinematics(commanded)
        pos, mat = poses.frames(self._hand)
        twist = _twist(action * (HAND_STEP * self._scale), mat[:, 0], _POINTING_DOWN)
        joints = _damped_least_squares(point_jacobian(poses, ARM_JOINTS, pos[:, 0]), twist)

        target = command.copy()
        target[:, :ARM_JOINTS] += joints
        target[:, -1] += action[:, -1] * (FINGER_STEP * self._scale)
        return self._limits(target, qpos)


class _Limits:
    def __init__(self, model):
        low, high = model.jnt_range[:ARM_JOINTS].T
        self._low, self._high = np.append(low, 0.0), np.append(high, FINGER_TRAVEL)

    def __call__(self, command: np.ndarray, qpos: np.ndarray) -> np.ndarray:
        joints, near = command[:, :ARM_JOINTS], qpos[:, :ARM_JOINTS]
        np.clip(joints, near - LEASH, near + LEASH, out=joints)
        return np.clip(command, self._low, self._high, out=command)


@njit(nogil=True, cache=True)
def _twist(move, mat, upright):
    """`[n, 6]`: the wanted step, and the small turn that takes axes `[n, 3, 3]` part of the way to `upright`."""
    twist = np.zeros((mat.shape[0], 6))
    for i in range(mat.shape[0]):
        twist[i, :3] = move[i, :3]
        # half the sum of the cross products of each axis with where it should be
        for k in range(3):
            for r in range(3):
                p, q = (r + 1) % 3, (r + 2) % 3
                twist[i, 3 + r] += 0.5 * _UPRIGHTING * (mat[i, p, k] * upright[q, k] - mat[i, q, k] * upright[p, k])
    return twist


@njit(nogil=True, cache=True)
def _damped_least_squares(jacobian, twist):
    """`[n, k]`: joint steps J^T (J J^T + damping I)^-1 twist."""
    # in plain loops: numba's matrix product would need scipy
    n, rows, joints = jacobian.shape
    steps, square = np.zeros((n, joints)), np.empty((rows, rows))
    for i in range(n):
        for r in range(rows):
            for c in range(rows):
                square[r, c] = _DAMPING if r == c else 0.0
                for j in range(joints):
                    square[r, c] += jacobian[i, r, j] * jacobian[i, c, j]
        solution = _solve_positive(square, twist[i].copy())
        for j in range(joints):
            for r in range(rows):
                steps[i, j] += jacobian[i, r, j] * solution[r]
    return steps


@njit(nogil=True, cache=True)
def _solve_positive(a, b):
    """x of a x = b for a positive definite a, which needs no pivoting; overwrites both."""
    n = len(b)
    for k in range(n):
        for r in range(k + 1, n):
            factor = a[r, k] / a[k, k]
            for c in range(k, n):
                a[r, c] -= factor * a[k, c]
            b[r] -= factor * b[k]
    for r in range(n - 1, -1, -1):
        for c in range(r + 1, n):
            b[r] -= a[r, c] * b[c]
        b[r] /= a[r, r]
    return b
