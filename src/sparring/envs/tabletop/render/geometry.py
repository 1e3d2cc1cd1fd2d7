"""Pixel windows of shapes, and ray intersections in closed form. `hit` takes the size of a shape and a ray o + t d in
the shape's axes, and returns t (FAR: no hit), outward normal and tone. No early returns, so that loops vectorize."""

import numpy as np
from numba import njit

PLANE, SPHERE, CAPSULE, ELLIPSOID, CYLINDER, BOX = 0, 2, 3, 4, 5, 6  # values of mujoco.mjtGeom
FAR = 1e9
TILE, TILE_CONTRAST = 0.3, 0.05  # of the floor: side of a tile in metres, and contrast of neighbours
NEAR = 0.004  # nearer surfaces are not drawn


@njit(nogil=True, cache=True, error_model="numpy")
def rotate_back(mat, x, y, z):
    return (
        mat[0, 0] * x + mat[1, 0] * y + mat[2, 0] * z,
        mat[0, 1] * x + mat[1, 1] * y + mat[2, 1] * z,
        mat[0, 2] * x + mat[1, 2] * y + mat[2, 2] * z,
    )


@njit(nogil=True, cache=True, error_model="numpy")
def shape_window(kind, size, pos, mat, camera_pos, camera_mat, tangent, height, width, corners):
    """Pixel ranges (x0, x1, y0, y1) that contain a shape. `corners` is a buffer for eight points."""
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
    a, b, c = z * z - zz, x * z - xz, x * x - xx  # (x + u z)^2 = xx + 2 u xz + u^2 zz
    root = np.sqrt(max(b * b - a * c, 0.0))
    return (-b - root) / a, (-b + root) / a


@njit(nogil=True, cache=True, error_model="numpy")
def box_window(pos, mat, half, camera_pos, camera_mat, tangent, height, width, corners):
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
    # the rectangle contains each corner in front of the camera and each point where an edge crosses the near plane
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


@njit(nogil=True, cache=True, error_model="numpy")
def hit(kind, size, ox, oy, oz, dx, dy, dz):
    if kind == BOX:
        return _hit_box(size, ox, oy, oz, dx, dy, dz)
    if kind == CAPSULE:
        return _hit_capsule(size, ox, oy, oz, dx, dy, dz)
    if kind == CYLINDER:
        return _hit_cylinder(size, ox, oy, oz, dx, dy, dz)
    if kind == SPHERE:
        return _hit_ball(size, ox, oy, oz, dx, dy, dz)
    if kind == ELLIPSOID:
        return _hit_ellipsoid(size, ox, oy, oz, dx, dy, dz)
    return _hit_plane(size, ox, oy, oz, dx, dy, dz)


@njit(nogil=True, cache=True, error_model="numpy")
def _hit_plane(size, ox, oy, oz, dx, dy, dz):
    t = -oz / dz if dz < 0 else FAR
    tiles = np.floor((ox + t * dx) / TILE) + np.floor((oy + t * dy) / TILE)
    odd = tiles - 2 * np.floor(0.5 * tiles)
    return t, 0.0, 0.0, 1.0, 1 - TILE_CONTRAST * odd


@njit(nogil=True, cache=True, error_model="numpy")
def _hit_box(size, ox, oy, oz, dx, dy, dz):
    near_x, far_x = _slab(size[0], ox, dx)
    near_y, far_y = _slab(size[1], oy, dy)
    near_z, far_z = _slab(size[2], oz, dz)
    t = near_x if near_x > near_y else near_y
    t = near_z if near_z > t else t
    leaves = far_x if far_x < far_y else far_y
    leaves = far_z if far_z < leaves else leaves
    on_x = t == near_x
    on_y = (t == near_y) & (not on_x)
    nx = (-1.0 if dx > 0 else 1.0) if on_x else 0.0
    ny = (-1.0 if dy > 0 else 1.0) if on_y else 0.0
    nz = 0.0 if on_x | on_y else (-1.0 if dz > 0 else 1.0)
    return (t if t <= leaves else FAR), nx, ny, nz, 1.0


@njit(nogil=True, cache=True, error_model="numpy")
def _hit_ball(size, ox, oy, oz, dx, dy, dz):
    radius = size[0]
    t = _enter_ball(radius, ox, oy, oz, dx, dy, dz)
    return t, (ox + t * dx) / radius, (oy + t * dy) / radius, (oz + t * dz) / radius, 1.0


@njit(nogil=True, cache=True, error_model="numpy")
def _hit_ellipsoid(size, ox, oy, oz, dx, dy, dz):
    a, b, c = size  # dividing every axis by its half length gives a ball of radius 1 and keeps t
    t = _enter_ball(1.0, ox / a, oy / b, oz / c, dx / a, dy / b, dz / c)
    # the gradient of (x/a)^2 + (y/b)^2 + (z/c)^2
    nx, ny, nz = (ox + t * dx) / (a * a), (oy + t * dy) / (b * b), (oz + t * dz) / (c * c)
    length = np.sqrt(nx * nx + ny * ny + nz * nz)
    return t, nx / length, ny / length, nz / length, 1.0


@njit(nogil=True, cache=True, error_model="numpy")
def _hit_capsule(size, ox, oy, oz, dx, dy, dz):
    radius, half = size[0], size[1]
    side, z = _enter_tube(radius, ox, oy, oz, dx, dy, dz)
    end = half if z > 0 else -half  # a ray that enters the infinite tube beyond an end can only enter there
    ball = _enter_ball(radius, ox, oy, oz - end, dx, dy, dz)
    on_side = abs(z) <= half
    t = side if on_side else ball
    nz = 0.0 if on_side else (oz - end + t * dz) / radius
    return t, (ox + t * dx) / radius, (oy + t * dy) / radius, nz, 1.0


@njit(nogil=True, cache=True, error_model="numpy")
def _hit_cylinder(size, ox, oy, oz, dx, dy, dz):
    radius, half = size[0], size[1]
    side, z = _enter_tube(radius, ox, oy, oz, dx, dy, dz)
    end = half if z > 0 else -half
    lid = (end - oz) / dz
    x, y = ox + lid * dx, oy + lid * dy
    by_lid = (x * x + y * y <= radius * radius) & (end * dz < 0)  # not if it leaves there or is parallel to it
    on_side = abs(z) <= half
    t = side if on_side else (lid if by_lid else FAR)
    nx = (ox + t * dx) / radius if on_side else 0.0
    ny = (oy + t * dy) / radius if on_side else 0.0
    nz = 0.0 if on_side else (1.0 if end > 0 else -1.0)
    return (FAR if side == FAR else t), nx, ny, nz, 1.0  # if the infinite tube is missed: side = FAR, |z| > half


@njit(nogil=True, cache=True, error_model="numpy")
def _slab(half, o, d):
    # for a ray parallel to the slab, the division by zero gives +-inf: inside for all t or for none, which is correct
    one, other = (-half - o) / d, (half - o) / d
    return (one, other) if one < other else (other, one)


@njit(nogil=True, cache=True, error_model="numpy")
def _enter_ball(radius, ox, oy, oz, dx, dy, dz):
    a = dx * dx + dy * dy + dz * dz
    b = ox * dx + oy * dy + oz * dz
    q = b * b - a * (ox * ox + oy * oy + oz * oz - radius * radius)
    t = (-b - np.sqrt(q if q > 0 else 0.0)) / a
    return t if q > 0 else FAR


@njit(nogil=True, cache=True, error_model="numpy")
def _enter_tube(radius, ox, oy, oz, dx, dy, dz):
    """(t, z at t) of the entry into an infinite tube along z; for a ray parallel to the axis t is -FAR."""
    a = dx * dx + dy * dy
    b = ox * dx + oy * dy
    q = b * b - a * (ox * ox + oy * oy - radius * radius)
    t = (-b - np.sqrt(q if q > 0 else 0.0)) / a if a > 0 else -FAR
    t = t if q >= 0 else FAR
    return t, oz + t * dz


@njit(nogil=True, cache=True, error_model="numpy")
def half_extent(kind, size):
    if kind in (BOX, ELLIPSOID):
        return size[0], size[1], size[2]
    if kind == SPHERE:
        return size[0], size[0], size[0]
    return size[0], size[0], size[1] + (size[0] if kind == CAPSULE else 0.0)
