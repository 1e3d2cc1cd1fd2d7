"""Draw analytic shapes into a z-buffer: one call without the interpreter lock, no GL.

Each shape is visited once: the pixels it can cover are found (project.py), and the ray of each is intersected with the
shape in closed form (surfaces.py). Rays have depth 1 in front of the camera, so the ray parameter t is the depth. What
a pixel shows is its nearest intersection beyond NEAR that enters a shape; from inside a shape one sees out.

Rows (robots) are independent and nothing is summed across them: any split over threads gives the same bytes.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from sparring.envs.tabletop.project import NEAR, rotate_back, shape_window
from sparring.envs.tabletop.shade import draw_shadows, draw_static, paint
from sparring.envs.tabletop.surfaces import BOX, CAPSULE, CYLINDER, ELLIPSOID, FAR, PLANE, SPHERE, hit


class Shapes(NamedTuple):
    """What is drawn, the same for every robot. Sizes are MuJoCo's: radius and half lengths."""

    # [G], [G, 3], [G, 3]
    kind: np.ndarray
    size: np.ndarray
    rgb: np.ndarray
    # [G] bool: throws a soft shadow straight down onto the top of the `ground` box (-1: no shadows)
    casts: np.ndarray
    ground: int
    # [G] uint8: its number in a segmentation
    label: np.ndarray
    # the box that may show static (-1: none)
    screen: int


@njit(nogil=True, cache=True, error_model="numpy")
def draw(shapes, pos, mat, camera_pos, camera_mat, tangents, look, first, last, rgb, depth, segmentation):
    """Robots `first` to `last` of n: shapes at `[n, G, 3]`, `[n, G, 3, 3]`, cameras at `[n, C, 3]`, `[n, C, 3, 3]`.

    Fills uint8 `[C, n, 3, H, W]`, float32 `[C, n, 1, H, W]` (0: nothing there) and uint8 `[C, n, 1, H, W]`; those of
    them that have no rows are left out. Tangents `[C]` are those of half the vertical fields of view.
    """
    height, width = rgb.shape[3], rgb.shape[4]
    count = shapes.kind.shape[0]
    nearest, light = np.empty((height, width)), np.empty((height, width))
    shape_at = np.empty((height, width), np.int64)
    corners = np.empty((8, 3))
    for c in range(tangents.shape[0]):
        tangent = tangents[c]
        # where pixels are on a screen at distance 1
        us = (np.arange(width) + 0.5 - 0.5 * width) * (2 * tangent / height)
        vs = (0.5 * height - np.arange(height) - 0.5) * (2 * tangent / height)
        for i in range(first, last):
            eye, axes = camera_pos[i, c], camera_mat[i, c]
            nearest[:] = FAR
            light[:] = 1.0
            # the background counts as one shape more
            shape_at[:] = count
            for g in range(count):
                window = shape_window(
                    shapes.kind[g], shapes.size[g], pos[i, g], mat[i, g], eye, axes, tangent, height, width, corners
                )
                if window[0] < window[1] and window[2] < window[3]:
                    _draw_shape(
                        shapes.kind[g], shapes.size[g], pos[i, g], mat[i, g], eye, axes, look.sun[i], look.light[i], g,
                        window, us, vs, nearest, light, shape_at,
                    )  # fmt: skip
            if rgb.shape[1] > 0:
                if shapes.ground >= 0:
                    draw_shadows(shapes, pos[i], mat[i], eye, axes, tangent, us, vs, light, shape_at, corners)
                paint(look.rgb[i], look.background[i], light, shape_at, rgb[c, i])
                if shapes.screen >= 0 and look.noise[i] >= 0:
                    draw_static(shapes, pos[i], mat[i], eye, axes, us, vs, look.noise[i], nearest, shape_at, rgb[c, i])
            if depth.shape[1] > 0:
                _copy_depth(nearest, depth[c, i, 0])
            if segmentation.shape[1] > 0:
                _copy_labels(shapes.label, shape_at, segmentation[c, i, 0])


@njit(nogil=True, cache=True, error_model="numpy")
def _draw_shape(kind, size, pos, mat, eye, axes, sun, strengths, g, window, us, vs, nearest, light, shape_at):
    # the camera, its axes, the sun and the sky, as the shape sees them
    ray = (
        rotate_back(mat, eye[0] - pos[0], eye[1] - pos[1], eye[2] - pos[2]),
        rotate_back(mat, axes[0, 0], axes[1, 0], axes[2, 0]),
        rotate_back(mat, axes[0, 1], axes[1, 1], axes[2, 1]),
        rotate_back(mat, axes[0, 2], axes[1, 2], axes[2, 2]),
    )
    lit = (
        rotate_back(mat, sun[0], sun[1], sun[2]),
        (mat[2, 0], mat[2, 1], mat[2, 2]),
        (strengths[0], strengths[1], strengths[2]),
    )
    half = (size[0], size[1], size[2])
    if kind == BOX:
        _scan(BOX, half, ray, lit, g, window, us, vs, nearest, light, shape_at)
    elif kind == CAPSULE:
        _scan(CAPSULE, half, ray, lit, g, window, us, vs, nearest, light, shape_at)
    elif kind == CYLINDER:
        _scan(CYLINDER, half, ray, lit, g, window, us, vs, nearest, light, shape_at)
    elif kind == SPHERE:
        _scan(SPHERE, half, ray, lit, g, window, us, vs, nearest, light, shape_at)
    elif kind == ELLIPSOID:
        _scan(ELLIPSOID, half, ray, lit, g, window, us, vs, nearest, light, shape_at)
    elif kind == PLANE:
        _scan(PLANE, half, ray, lit, g, window, us, vs, nearest, light, shape_at)


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _scan(kind, size, ray, lit, g, window, us, vs, nearest, light, shape_at):
    """Visit the pixels of a window.

    Inlined where `kind` is a constant: each kind gets a loop of its own, without branches, in vector instructions.
    """
    (ox, oy, oz), (rx, ry, rz), (ux, uy, uz), (bx, by, bz) = ray
    (sx, sy, sz), (upx, upy, upz), (ambient, sky, sun) = lit
    x0, x1, y0, y1 = window
    across = us[x0:x1]
    for y in range(y0, y1):
        v = vs[y]
        row_nearest, row_light, row_shape = nearest[y, x0:x1], light[y, x0:x1], shape_at[y, x0:x1]
        for x in range(len(across)):
            u = across[x]
            dx, dy, dz = rx * u + ux * v - bx, ry * u + uy * v - by, rz * u + uz * v - bz
            t, nx, ny, nz, tone = hit(kind, size, ox, oy, oz, dx, dy, dz)
            facing = nx * sx + ny * sy + nz * sz
            bright = ambient + sky * (nx * upx + ny * upy + nz * upz) + sun * (facing if facing > 0 else 0.0)
            seen = (t >= NEAR) & (t < row_nearest[x])
            row_nearest[x] = t if seen else row_nearest[x]
            row_light[x] = bright * tone if seen else row_light[x]
            row_shape[x] = g if seen else row_shape[x]


@njit(nogil=True, cache=True, error_model="numpy")
def _copy_depth(nearest, out):
    for y in range(out.shape[0]):
        for x in range(out.shape[1]):
            out[y, x] = nearest[y, x] if nearest[y, x] < FAR else 0.0


@njit(nogil=True, cache=True, error_model="numpy")
def _copy_labels(label, shape_at, out):
    for y in range(out.shape[0]):
        for x in range(out.shape[1]):
            out[y, x] = label[shape_at[y, x]] if shape_at[y, x] < len(label) else 0
