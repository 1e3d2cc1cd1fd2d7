"""From actions to joint targets."""

import numpy as np
from numba import njit

from sparring.envs.tabletop.arm import ARM_BASE, ARM_JOINTS, FINGER_TRAVEL, HAND_SITE, SINGLE, Mount
from sparring.envs.tabletop.kinematics import Kinematics, point_jacobian, select
from sparring.envs.tabletop.scene import compile_scene

# ---- What an action means: it moves the commanded joint positions and finger opening, which the motors then follow.
#
# A command is `[n, 7]`: six joint angles and one finger opening in metres. The last action opens (+) or closes (-).
# Rows
# are arms: those of a robot with two arms stand one after the other, the left one first.
#
# ============  ====  =====================================================  ==================================
# mode          dims  action, each in [-1, 1]                                1 means (times env.action_scale)
# ============  ====  =====================================================  ==================================
# delta_qpos    6+1   a step of each joint; of the fingers                   0.05 rad; 1 cm
# delta_ee_pos  3+1   a step of the hand along x, y, z; of the fingers       2 cm; 1 cm. The hand points down,
# turned as its `Mount` says
# delta_ee      6+1   the same, and a turn about x, y, z; of the fingers     2 cm, 0.1 rad; 1 cm
# qpos          6+1   where each joint should be, -1 and 1 are its limits;   approached by at most 0.1 rad, 2 cm
# the opening, -1 closed to 1 open                       a step
# ============  ====  =====================================================  ==================================
#
# Turns are rotation vectors in the world's axes.


JOINT_STEP = 0.05
HAND_STEP = 0.02
TURN_STEP = 0.1
FINGER_STEP = 0.01
# an absolute command is approached at most this many times faster than one that is moved step by step
APPROACH = 2
# a command runs at most this far ahead of the arm, so that a blocked arm does not wind up
LEASH = 0.3
# a hand that is commanded by its own position goes no lower, metres: the finger tips are 7 mm below it
LOWEST = 0.008
_DAMPING = 1e-3
_UPRIGHTING = 0.5
# columns are the hand's axes when it points down: the fingers at the table, the camera outwards
POINTING_DOWN = np.diag([-1.0, 1.0, -1.0])


def make_control(mode: str, hands: "HandMover", scale: float) -> "DeltaQpos | DeltaEePos | DeltaEe | Qpos":
    return CONTROLS[mode](hands, scale)


class DeltaQpos:
    action_dim = ARM_JOINTS + 1

    def __init__(self, hands: "HandMover", scale: float):
        self._step = np.array([JOINT_STEP] * ARM_JOINTS + [FINGER_STEP]) * scale
        self._limits = _Limits(hands.model)

    def __call__(self, command: np.ndarray, action: np.ndarray, qpos: np.ndarray) -> np.ndarray:
        return self._limits(command + action * self._step, qpos)


class Qpos:
    action_dim = ARM_JOINTS + 1

    def __init__(self, hands: "HandMover", scale: float):
        self._step = np.array([JOINT_STEP] * ARM_JOINTS + [FINGER_STEP]) * (APPROACH * scale)
        self._limits = _Limits(hands.model)

    def __call__(self, command: np.ndarray, action: np.ndarray, qpos: np.ndarray) -> np.ndarray:
        low, high = self._limits.low, self._limits.high
        target = low + (action + 1) / 2 * (high - low)
        return self._limits(command + np.clip(target - command, -self._step, self._step), qpos)


class DeltaEePos:
    """Damped least squares at the commanded pose, not the measured one: the hand's lag does not leak into its path."""

    action_dim = 4

    def __init__(self, hands: "HandMover", scale: float):
        self._scale = scale
        self._hands = hands
        self._limits = _Limits(hands.model)

    def __call__(self, command: np.ndarray, action: np.ndarray, qpos: np.ndarray) -> np.ndarray:
        target = command.copy()
        target[:, :ARM_JOINTS] += self._hands.upright(command, qpos, action[:, :3] * (HAND_STEP * self._scale))
        target[:, -1] += action[:, -1] * (FINGER_STEP * self._scale)
        return self._limits(target, qpos)


class DeltaEe:
    action_dim = 7

    def __init__(self, hands: "HandMover", scale: float):
        self._step = np.array([HAND_STEP] * 3 + [TURN_STEP] * 3 + [FINGER_STEP]) * scale
        self._hands = hands
        self._limits = _Limits(hands.model)

    def __call__(self, command: np.ndarray, action: np.ndarray, qpos: np.ndarray) -> np.ndarray:
        step, target = action * self._step, command.copy()
        target[:, :ARM_JOINTS] += self._hands.turned(command, qpos, step[:, :6])
        target[:, -1] += step[:, -1]
        return self._limits(target, qpos)


CONTROLS = {"delta_qpos": DeltaQpos, "delta_ee_pos": DeltaEePos, "delta_ee": DeltaEe, "qpos": Qpos}


class HandMover:
    """Where the hands are, and joint steps `[n, 6]` that move them.

    Arms differ in where they stand only, so one arm's kinematics serve for all: `model` holds it alone, at ARM_BASE.
    """

    def __init__(self, mounts: tuple[Mount, ...] = SINGLE):
        self.model = compile_scene()
        self._kinematics = Kinematics(self.model)
        self._frame = select(self._kinematics.sites, [self.model.site(HAND_SITE).id])
        # [R, 3], [R, 3, 3]
        self._shift = np.array([np.subtract(mount.base, ARM_BASE) for mount in mounts])
        self.pointing_down = about_z(np.array([mount.hand_yaw for mount in mounts])) @ POINTING_DOWN

    def where(self, arms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions `[n, R, 3]` and axes `[n, R, 3, 3]` of the hands of robots whose arms stand as `[n, R, 8]`."""
        n, count, _ = arms.shape
        pos, mat = self._kinematics(arms.reshape(n * count, -1)).frames(self._frame)
        return pos.reshape(n, count, 3) + self._shift, mat.reshape(n, count, 3, 3)

    def _pose(self, command: np.ndarray, qpos: np.ndarray):
        """Where the hand would be if the arm stood at ARM_BASE and as commanded: `[n, 3]`, `[n, 3, 3]`, all bodies."""
        commanded = qpos.copy()
        commanded[:, :ARM_JOINTS] = command[:, :ARM_JOINTS]
        poses = self._kinematics(commanded)
        pos, mat = poses.frames(self._frame)
        return pos[:, 0], mat[:, 0], poses

    def upright(self, command: np.ndarray, qpos: np.ndarray, move: np.ndarray) -> np.ndarray:
        """By `move` `[n, 3]`, and part of the way back to pointing down."""
        pos, mat, poses = self._pose(command, qpos)
        twist = _twist(_above_table(move, pos), mat, self.pointing_down)
        return _damped_least_squares(point_jacobian(poses, ARM_JOINTS, pos), twist)

    def turned(self, command: np.ndarray, qpos: np.ndarray, twist: np.ndarray) -> np.ndarray:
        """By `twist` `[n, 6]`: a step and a rotation vector."""
        pos, _, poses = self._pose(command, qpos)
        return _damped_least_squares(point_jacobian(poses, ARM_JOINTS, pos), _above_table(twist, pos))


class _Limits:
    def __init__(self, model):
        low, high = model.jnt_range[:ARM_JOINTS].T
        self.low, self.high = np.append(low, 0.0), np.append(high, FINGER_TRAVEL)

    def __call__(self, command: np.ndarray, qpos: np.ndarray) -> np.ndarray:
        joints, near = command[:, :ARM_JOINTS], qpos[:, :ARM_JOINTS]
        np.clip(joints, near - LEASH, near + LEASH, out=joints)
        return np.clip(command, self.low, self.high, out=command)


def _above_table(move: np.ndarray, pos: np.ndarray) -> np.ndarray:
    """Steps `[n, 3 or more]` that command no hand at `[n, 3]` to go below LOWEST.

    A command that sinks into the table would press the fingers onto it, and no small action would lift them again.
    """
    move = move.copy()
    move[:, 2] = np.maximum(move[:, 2], np.minimum(LOWEST - pos[:, 2], 0))
    return move


def about_z(angle: np.ndarray) -> np.ndarray:
    """`[n]` radians -> `[n, 3, 3]`"""
    cos, sin, zero = np.cos(angle), np.sin(angle), np.zeros(len(angle))
    return np.stack([cos, -sin, zero, sin, cos, zero, zero, zero, zero + 1], axis=1).reshape(-1, 3, 3)


@njit(nogil=True, cache=True)
def _twist(move, mat, uprights):
    """`[n, 6]`: the wanted step, and the small turn that takes axes `[n, 3, 3]` part of the way to those of its arm.

    `uprights` is `[R, 3, 3]`; arms take turns over the rows.
    """
    twist = np.zeros((mat.shape[0], 6))
    for i in range(mat.shape[0]):
        twist[i, :3] = move[i, :3]
        upright = uprights[i % uprights.shape[0]]
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
