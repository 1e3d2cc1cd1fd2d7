"""Control and kinematics of the arms: commands `[n, 7]` (six joint angles, one finger opening in metres) from actions,
inverse kinematics of the hand, and forward kinematics. A row is an arm; the arms of a robot are adjacent, left first.
The numba kernels release the GIL and equal `mj_kinematics` and `mj_jacSite` up to rounding. Letters: n robots or arms,
R arms of a robot, B bodies, J joints, M frames fixed to bodies."""

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
from numba import njit

from sparring.envs.tabletop.scene import ARM_BASE, ARM_JOINTS, FINGER_TRAVEL, HAND_SITE, SINGLE, Mount, Scene

JOINT_STEP, FINGER_STEP, HAND_STEP, TURN_STEP = 0.05, 0.01, 0.02, 0.1
APPROACH = 2  # largest step of a command towards an absolute target, relative to the largest step of delta_qpos
_LARGEST_LEAD = 0.3  # radians that a command may be ahead of the arm: the command of a blocked arm does not wind up
_LOWEST = 0.008  # metres; lowest height of a hand in the hand modes: the fingertips are 7 mm below the hand's site
_DAMPING = 1e-3
_UPRIGHT_GAIN = 0.5  # part of the deviation from pointing down that each step corrects
_POINTING_DOWN = np.diag([-1.0, 1.0, -1.0])  # columns: the axes of a hand that points down
_FREE, _BALL, _SLIDE = 0, 1, 2  # values of mujoco.mjtJoint


class _Control:
    """Computes the next command, within the joint limits; this base class is delta_qpos (joint steps)."""

    action_dim = ARM_JOINTS + 1
    step = np.array([JOINT_STEP] * ARM_JOINTS + [FINGER_STEP])  # for an action of 1 and env.action_scale=1

    def __init__(self, hands: "HandMover", scale: float):
        self._hands, self._step = hands, self.step * scale
        low, high = hands.model.jnt_range[:ARM_JOINTS].T
        self._low, self._high = np.append(low, 0.0), np.append(high, FINGER_TRAVEL)

    def __call__(self, command: np.ndarray, action: np.ndarray, qpos: np.ndarray) -> np.ndarray:
        """Commands `[n, 7]`, actions `[n, action_dim]` and positions `[n, 8]` -> new commands `[n, 7]`."""
        target = self._target(command, action, qpos)
        joints, current = target[:, :ARM_JOINTS], qpos[:, :ARM_JOINTS]
        np.clip(joints, current - _LARGEST_LEAD, current + _LARGEST_LEAD, out=joints)
        return np.clip(target, self._low, self._high, out=target)

    def _target(self, command: np.ndarray, action: np.ndarray, qpos: np.ndarray) -> np.ndarray:
        return command + action * self._step


class _Qpos(_Control):
    """Joint targets: -1 and 1 are the limits of a joint. The command approaches them by at most `step`."""

    step = _Control.step * APPROACH

    def _target(self, command: np.ndarray, action: np.ndarray, qpos: np.ndarray) -> np.ndarray:
        target = self._low + (action + 1) / 2 * (self._high - self._low)
        return command + np.clip(target - command, -self._step, self._step)


class _DeltaEePos(_Control):
    """Hand steps; the hand keeps pointing down. Inverse kinematics at the commanded pose: lag does not accumulate."""

    action_dim = 4
    step = np.array([HAND_STEP] * 3 + [FINGER_STEP])

    def _target(self, command: np.ndarray, action: np.ndarray, qpos: np.ndarray) -> np.ndarray:
        step = action * self._step
        return command + np.concatenate([self._hands.upright(command, qpos, step[:, :3]), step[:, -1:]], axis=1)


class _DeltaEe(_Control):
    """Hand steps and rotations (rotation vectors in the axes of the table)."""

    action_dim = 7
    step = np.array([HAND_STEP] * 3 + [TURN_STEP] * 3 + [FINGER_STEP])

    def _target(self, command: np.ndarray, action: np.ndarray, qpos: np.ndarray) -> np.ndarray:
        step = action * self._step
        return command + np.concatenate([self._hands.turned(command, qpos, step[:, :6]), step[:, -1:]], axis=1)


CONTROLS = {"delta_qpos": _Control, "delta_ee_pos": _DeltaEePos, "delta_ee": _DeltaEe, "qpos": _Qpos}


class HandMover:
    """Computes hand poses and joint steps `[n, 6]` that move hands. `model` is an arm at ARM_BASE; the kinematics of
    other arms differ in their base only."""

    def __init__(self, mounts: tuple[Mount, ...] = SINGLE):
        self.model = Scene().compile()
        self._kinematics = Kinematics(self.model)
        self._frame = self._kinematics.sites.pick([self.model.site(HAND_SITE).id])
        self._shift = np.array([np.subtract(mount.base, ARM_BASE) for mount in mounts])  # [R, 3]
        self.pointing_down = about_z(np.array([mount.hand_yaw for mount in mounts])) @ _POINTING_DOWN  # [R, 3, 3]

    def where(self, arms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Arm positions `[n, R, 8]` -> positions `[n, R, 3]` and axes `[n, R, 3, 3]` of the hands."""
        n, count, _ = arms.shape
        pos, mat = self._kinematics(arms.reshape(n * count, -1)).frames(self._frame)
        return pos.reshape(n, count, 3) + self._shift, mat.reshape(n, count, 3, 3)

    def upright(self, command: np.ndarray, qpos: np.ndarray, move: np.ndarray) -> np.ndarray:
        """Joint steps for a translation `move` `[n, 3]` and a rotation towards pointing down."""
        pos, mat, jacobian = self._commanded(command, qpos)
        return _damped_least_squares(jacobian, _twist(_above_table(move, pos), mat, self.pointing_down))

    def turned(self, command: np.ndarray, qpos: np.ndarray, twist: np.ndarray) -> np.ndarray:
        """Joint steps for a `twist` `[n, 6]`: a translation and a rotation vector."""
        pos, _, jacobian = self._commanded(command, qpos)
        return _damped_least_squares(jacobian, _above_table(twist, pos))

    def _commanded(self, command: np.ndarray, qpos: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Position `[n, 3]`, axes `[n, 3, 3]` and Jacobian of the hand of an arm at ARM_BASE, at the commanded pose."""
        commanded = qpos.copy()
        commanded[:, :ARM_JOINTS] = command[:, :ARM_JOINTS]
        poses = self._kinematics(commanded)
        pos, mat = poses.frames(self._frame)
        return pos[:, 0], mat[:, 0], poses.jacobian(ARM_JOINTS, pos[:, 0])


def _above_table(move: np.ndarray, pos: np.ndarray) -> np.ndarray:
    """Limit steps `[n, 3 or more]` so that they move no commanded hand `[n, 3]` below _LOWEST."""
    move = move.copy()
    move[:, 2] = np.maximum(move[:, 2], np.minimum(_LOWEST - pos[:, 2], 0))
    return move


def about_z(angle: np.ndarray) -> np.ndarray:
    """`[n]` radians -> rotation matrices `[n, 3, 3]` about z."""
    cos, sin, zero = np.cos(angle), np.sin(angle), np.zeros(len(angle))
    return np.stack([cos, -sin, zero, sin, cos, zero, zero, zero, zero + 1], axis=1).reshape(-1, 3, 3)


@dataclass(frozen=True)
class _Frames:
    body: np.ndarray  # [M]
    pos: np.ndarray  # [M, 3]
    mat: np.ndarray  # [M, 3, 3]

    def pick(self, index: list[int]) -> "_Frames":
        return _Frames(self.body[index], self.pos[index], self.mat[index])


@dataclass(frozen=True)
class _BodyPoses:
    pos: np.ndarray  # [n, B, 3]
    mat: np.ndarray  # [n, B, 3, 3]
    anchor: np.ndarray  # [n, J, 3]; zero for free joints
    axis: np.ndarray  # [n, J, 3]; zero for free joints

    def frames(self, frames: _Frames) -> tuple[np.ndarray, np.ndarray]:
        """Positions `[n, M, 3]` and rotations `[n, M, 3, 3]` of fixed frames."""
        return _attach(self.pos, self.mat, frames.body, frames.pos, frames.mat)

    def jacobian(self, joints: int, point: np.ndarray) -> np.ndarray:
        """`[n, 6, joints]`: linear and angular velocity of a point `[n, 3]` per unit speed of the first hinges."""
        return _jacobian(self.anchor, self.axis, joints, point)


_Chain = namedtuple(  # the tree of bodies and joints, with fields of MjModel
    "_Chain", "body_parentid body_pos body_quat body_jntadr body_jntnum jnt_type jnt_qposadr jnt_pos jnt_axis qpos0"
)


class Kinematics:
    """Forward kinematics: joint positions `[n, nq]` to poses."""

    def __init__(self, model):
        if np.any(model.jnt_type == _BALL):
            raise ValueError("the scene has a ball joint; expected hinge, slide and free joints only")
        fields = [getattr(model, name) for name in _Chain._fields]
        self._chain = _Chain(*(x.astype(np.int64) if x.dtype.kind in "iu" else x.copy() for x in fields))
        self.geoms = _frames(model.geom_bodyid, model.geom_pos, model.geom_quat)
        self.sites = _frames(model.site_bodyid, model.site_pos, model.site_quat)
        self.cameras = _frames(model.cam_bodyid, model.cam_pos, model.cam_quat)

    def __call__(self, qpos: np.ndarray) -> _BodyPoses:
        return _BodyPoses(*_forward(self._chain, np.ascontiguousarray(qpos)))


def _frames(body: np.ndarray, pos: np.ndarray, quat: np.ndarray) -> _Frames:
    mat = np.empty((len(pos), 3, 3))
    for i in range(len(pos)):
        _quat_to_mat(quat[i], mat[i])
    return _Frames(body.astype(np.int64), pos.copy(), mat)


@njit(nogil=True, cache=True)
def _forward(chain, qpos):
    n, bodies, joints = qpos.shape[0], chain.body_pos.shape[0], chain.jnt_type.shape[0]
    pos, mat = np.zeros((n, bodies, 3)), np.zeros((n, bodies, 3, 3))
    anchor, axis = np.zeros((n, joints, 3)), np.zeros((n, joints, 3))
    quat, turn = np.zeros((bodies, 4)), np.zeros(4)
    quat[0, 0] = 1.0
    for i in range(n):
        _quat_to_mat(quat[0], mat[i, 0])
        for b in range(1, bodies):
            parent = chain.body_parentid[b]
            _offset(pos[i, parent], mat[i, parent], chain.body_pos[b], 1.0, pos[i, b])
            _quat_product(quat[parent], chain.body_quat[b], quat[b])
            _quat_to_mat(quat[b], mat[i, b])
            first = chain.body_jntadr[b]
            for j in range(first, first + chain.body_jntnum[b]):
                adr = chain.jnt_qposadr[j]
                if chain.jnt_type[j] == _FREE:
                    _place_free(qpos[i, adr : adr + 7], pos[i, b], quat[b])
                    _quat_to_mat(quat[b], mat[i, b])
                    continue
                moved = qpos[i, adr] - chain.qpos0[adr]
                _offset(pos[i, b], mat[i, b], chain.jnt_pos[j], 1.0, anchor[i, j])
                _offset(axis[i, j], mat[i, b], chain.jnt_axis[j], 1.0, axis[i, j])
                if chain.jnt_type[j] == _SLIDE:
                    for k in range(3):
                        pos[i, b, k] += moved * axis[i, j, k]
                else:
                    sine = np.sin(moved / 2)
                    turn[0] = np.cos(moved / 2)
                    for k in range(3):
                        turn[k + 1] = sine * chain.jnt_axis[j, k]
                    _quat_product(quat[b], turn, quat[b])
                    _quat_to_mat(quat[b], mat[i, b])
                    _offset(anchor[i, j], mat[i, b], chain.jnt_pos[j], -1.0, pos[i, b])
    return pos, mat, anchor, axis


@njit(nogil=True, cache=True)
def _place_free(pose, pos, quat):
    norm = np.sqrt(pose[3] ** 2 + pose[4] ** 2 + pose[5] ** 2 + pose[6] ** 2)
    for k in range(3):
        pos[k] = pose[k]
    for k in range(4):
        quat[k] = pose[3 + k] / norm


@njit(nogil=True, cache=True)
def _attach(body_pos, body_mat, body, local_pos, local_mat):
    n, m = body_pos.shape[0], body.shape[0]
    pos, mat = np.empty((n, m, 3)), np.empty((n, m, 3, 3))
    for i in range(n):
        for f in range(m):
            outer, inner = body_mat[i, body[f]], local_mat[f]
            _offset(body_pos[i, body[f]], outer, local_pos[f], 1.0, pos[i, f])
            for r in range(3):
                for c in range(3):
                    mat[i, f, r, c] = outer[r, 0] * inner[0, c] + outer[r, 1] * inner[1, c] + outer[r, 2] * inner[2, c]
    return pos, mat


@njit(nogil=True, cache=True)
def _jacobian(anchor, axis, joints, point):
    n = point.shape[0]
    jacobian = np.empty((n, 6, joints))
    for i in range(n):
        for j in range(joints):
            a = axis[i, j]
            x, y, z = point[i, 0] - anchor[i, j, 0], point[i, 1] - anchor[i, j, 1], point[i, 2] - anchor[i, j, 2]
            jacobian[i, 0, j] = a[1] * z - a[2] * y
            jacobian[i, 1, j] = a[2] * x - a[0] * z
            jacobian[i, 2, j] = a[0] * y - a[1] * x
            jacobian[i, 3, j], jacobian[i, 4, j], jacobian[i, 5, j] = a[0], a[1], a[2]
    return jacobian


@njit(nogil=True, cache=True)
def _offset(origin, mat, vector, sign, out):
    """out = origin + sign * mat @ vector; out may be origin."""
    x, y, z = sign * vector[0], sign * vector[1], sign * vector[2]
    for r in range(3):
        out[r] = origin[r] + mat[r, 0] * x + mat[r, 1] * y + mat[r, 2] * z


@njit(nogil=True, cache=True)
def _quat_product(a, b, out):
    w = a[0] * b[0] - a[1] * b[1] - a[2] * b[2] - a[3] * b[3]
    x = a[0] * b[1] + a[1] * b[0] + a[2] * b[3] - a[3] * b[2]
    y = a[0] * b[2] - a[1] * b[3] + a[2] * b[0] + a[3] * b[1]
    z = a[0] * b[3] + a[1] * b[2] - a[2] * b[1] + a[3] * b[0]
    out[0], out[1], out[2], out[3] = w, x, y, z


@njit(nogil=True, cache=True)
def _quat_to_mat(q, out):
    w, x, y, z = q[0], q[1], q[2], q[3]
    out[0, 0], out[0, 1], out[0, 2] = 1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)
    out[1, 0], out[1, 1], out[1, 2] = 2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)
    out[2, 0], out[2, 1], out[2, 2] = 2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)


@njit(nogil=True, cache=True)
def _twist(move, mat, uprights):
    """`[n, 6]`: `move` and a rotation of axes `[n, 3, 3]` towards `uprights [R, 3, 3]`; row i belongs to arm i % R."""
    twist = np.zeros((mat.shape[0], 6))
    for i in range(mat.shape[0]):
        twist[i, :3] = move[i, :3]
        upright = uprights[i % uprights.shape[0]]
        for k in range(3):
            for r in range(3):
                p, q = (r + 1) % 3, (r + 2) % 3
                twist[i, 3 + r] += 0.5 * _UPRIGHT_GAIN * (mat[i, p, k] * upright[q, k] - mat[i, q, k] * upright[p, k])
    return twist


@njit(nogil=True, cache=True)
def _damped_least_squares(jacobian, twist):
    """Joint steps `[n, k]`: J^T (J J^T + damping I)^-1 twist."""
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
    """Solve a x = b for a positive definite a; overwrites both."""
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
