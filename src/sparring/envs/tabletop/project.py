"""Which pixels a shape can cover: exact for balls and ellipsoids, the box around it for the others."""

import numpy as np
from numba import njit

from sparring.envs.tabletop.surfaces import ELLIPSOID, FAR, PLANE, SPHERE, half_extent

# what is nearer is not drawn
NEAR = 0.004


@njit(nogil=True, cache=True, error_model="numpy")
def rotate_back(mat, x, y, z):
    return (
        mat[0, 0] * x + mat[1, 0] * y + mat[2, 0] * z,
        mat[0, 1] * x + mat[1, 1] * y + mat[2, 1] * z,
        mat[0, 2] * x + mat[1, 2] * y + mat[2, 2] * z,
    )


@njit(nogil=True, cache=True, error_model="numpy")
def shape_window(kind, size, pos, mat, camera_pos, camera_mat, tangent, height, width, corners):
    """Pixel ranges (x0, x1, y0, y1) that hold all of a shape. `corners` is room for eight points."""
    if kind == PLANE:
        return 0, width, 0, height
    half = half_extent(kind, size)
    if kind in (SPHERE, ELLIPSOID):
        x, y, z = rotate_back(camera_mat, pos[0] - camera_pos[0], pos[1] - camera_pos[1], pos[2] - camera_pos[2])
        # the ellipsoid's matrix in the camera's axes: the sum of its half axes' outer products
        xx, yy, zz, xz, yz = 0.0, 0.0, 0.0, 0.0, 0.0
        for k in range(3):
            ax, ay, az = rotate_back(camera_mat, mat[0, k] * half[k], mat[1, k] * half[k], mat[2, k] * half[k])
            xx, yy, zz, xz, yz = xx + ax * ax, yy + ay * ay, zz + az * az, xz + ax * az, yz + ay * az
        if -z - np.sqrt(zz) >= NEAR:
            left, right = _tangents(x, z, xx, xz, zz)
            low, high = _tangents(y, z, yy, yz, zz)
            return _pixels(left, right, low, high, tangent, height, width)
    return box_window(pos, mat, half, camera_pos, camera_mat, tangent, height, width, corners)


@njit(nogil=True, cache=True, error_model="numpy")
def _tangents(x, z, xx, xz, zz):
    """The u of the two planes x + u z = 0 through the camera that touch an ellipsoid at (x, z)."""
    # (x + u z)^2 = xx + 2 u xz + u^2 zz
    a, b, c = z * z - zz, x * z - xz, x * x - xx
    root = np.sqrt(max(b * b - a * c, 0.0))
    return (-b - root) / a, (-b + root) / a


@njit(nogil=True, cache=True, error_model="numpy")
def box_window(pos, mat, half, camera_pos, camera_mat, tangent, height, width, corners):
    """Of a box: its corners, as far as they are in front of the near plane."""
    for k in range(8):
        a = half[0] if k & 1 else -half[0]
        b = half[1] if k & 2 else -half[1]
        c = half[2] if k & 4 else -half[2]
        corners[k, 0], corners[k, 1], corners[k, 2] = rotate_back(
            camera_mat,
            pos[0] + mat[0, 0] * a + mat[0, 1] * b + mat[0, 2] * c - camera_pos[0],
            pos[1] + mat[1, 0] * a + mat[1, 1] * b + mat[1, 2] * c - camera_pos[1],
            pos[2] + mat[2, 0] * a + mat[2, 1] * b + mat[2, 2] * c - camera_pos[2],
        )
    # the rectangle grows by each corner in front of the camera, and by each point where an edge passes the near plane
    left, right, low, high = FAR, -FAR, FAR, -FAR
    for k in range(8):
        x, y, ahead = corners[k, 0], corners[k, 1], -corners[k, 2]
        if ahead < NEAR:
            continue
        left, right = min(left, x / ahead), max(right, x / ahead)
        low, high = min(low, y / ahead), max(high, y / ahead)
        for bit in (1, 2, 4):
            other = k ^ bit
            if -corners[other, 2] < NEAR:
                part = (ahead - NEAR) / (ahead + corners[other, 2])
                u = (x + part * (corners[other, 0] - x)) / NEAR
                v = (y + part * (corners[other, 1] - y)) / NEAR
                left, right, low, high = min(left, u), max(right, u), min(low, v), max(high, v)
    return _pixels(left, right, low, high, tangent, height, width)


@njit(nogil=True, cache=True, error_model="numpy")
def _pixels(left, right, low, high, tangent, height, width):
    scale = 0.5 * height / tangent
    return (
        int(min(max(np.floor(0.5 * width + left * scale), 0.0), width)),
        int(min(max(np.ceil(0.5 * width + right * scale), 0.0), width)),
        int(min(max(np.floor(0.5 * height - high * scale), 0.0), height)),
        int(min(max(np.ceil(0.5 * height - low * scale), 0.0), height)),
    )
