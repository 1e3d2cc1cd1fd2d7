"""Where everything is: forward kinematics of N robots at once, from joint positions alone.

`mujoco.rollout` hands back joint positions only. These few lines of numba turn them into the poses of bodies, hands,
cameras and shapes, and into the Jacobian for moving the hand, without the interpreter lock and without an MjData per
robot. They agree with `mj_kinematics` and `mj_jacSite` to rounding.

Letters: n robots, B bodies, J joints, M frames fixed to bodies (geoms, sites or cameras).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit

# values of mujoco.mjtJoint
_FREE, _BALL, _SLIDE = 0, 1, 2


class Chain(NamedTuple):
    """The tree of bodies and joints; the fields are MjModel's."""

    body_parent: np.ndarray
    body_pos: np.ndarray
    body_quat: np.ndarray
    body_jntadr: np.ndarray
    body_jntnum: np.ndarray
    jnt_type: np.ndarray
    jnt_qposadr: np.ndarray
    jnt_pos: np.ndarray
    jnt_axis: np.ndarray
    qpos0: np.ndarray


@dataclass(frozen=True)
class Frames:
    """Poses fixed to bodies: which body, and where on it."""

    # [M], [M, 3], [M, 3, 3]
    body: np.ndarray
    pos: np.ndarray
    mat: np.ndarray


@dataclass(frozen=True)
class BodyPoses:
    """Where the bodies and the joints of n robots are, in the world."""

    # [n, B, 3], [n, B, 3, 3]
    pos: np.ndarray
    mat: np.ndarray
    # [n, J, 3] each; zero for free joints
    anchor: np.ndarray
    axis: np.ndarray

    def frames(self, frames: Frames) -> tuple[np.ndarray, np.ndarray]:
        """Positions `[n, M, 3]` and rotations `[n, M, 3, 3]` of fixed frames."""
        return _attach(self.pos, self.mat, frames.body, frames.pos, frames.mat)


class Kinematics:
    def __init__(self, model):
        if np.any(model.jnt_type == _BALL):
            raise ValueError("the scene has a ball joint; kinematics.py knows hinge, slide and free joints only")
        self.chain = Chain(
            model.body_parentid.astype(np.int64),
            model.body_pos.copy(),
            model.body_quat.copy(),
            model.body_jntadr.astype(np.int64),
            model.body_jntnum.astype(np.int64),
            model.jnt_type.astype(np.int64),
            model.jnt_qposadr.astype(np.int64),
            model.jnt_pos.copy(),
            model.jnt_axis.copy(),
            model.qpos0.copy(),
        )
        self.geoms = _frames(model.geom_bodyid, model.geom_pos, model.geom_quat)
        self.sites = _frames(model.site_bodyid, model.site_pos, model.site_quat)
        self.cameras = _frames(model.cam_bodyid, model.cam_pos, model.cam_quat)

    def __call__(self, qpos: np.ndarray) -> BodyPoses:
        """Joint positions `[n, nq]` to poses."""
        return BodyPoses(*_forward(self.chain, np.ascontiguousarray(qpos)))


def select(frames: Frames, index: list[int]) -> Frames:
    return Frames(frames.body[index], frames.pos[index], frames.mat[index])


def point_jacobian(poses: BodyPoses, joints: int, point: np.ndarray) -> np.ndarray:
    """`[n, 6, joints]`: velocity (3) and turning (3) of a point `[n, 3]` per unit speed of the first hinge joints."""
    return _jacobian(poses.anchor, poses.axis, joints, point)


def _frames(body: np.ndarray, pos: np.ndarray, quat: np.ndarray) -> Frames:
    mat = np.empty((len(pos), 3, 3))
    for i in range(len(pos)):
        _quat_to_mat(quat[i], mat[i])
    return Frames(body.astype(np.int64), pos.copy(), mat)


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
            parent = chain.body_parent[b]
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
                # axis is still zero: this only rotates
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
                    # the body turns about the joint, not about its own origin
                    _offset(anchor[i, j], mat[i, b], chain.jnt_pos[j], -1.0, pos[i, b])
    return pos, mat, anchor, axis


@njit(nogil=True, cache=True)
def _place_free(seven, pos, quat):
    norm = np.sqrt(seven[3] ** 2 + seven[4] ** 2 + seven[5] ** 2 + seven[6] ** 2)
    for k in range(3):
        pos[k] = seven[k]
    for k in range(4):
        quat[k] = seven[3 + k] / norm


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
