"""Draw analytic shapes into a z-buffer and shade them, without the GIL or GL. Rays have depth 1: the ray parameter t is
the depth. A pixel shows the nearest entry into a shape beyond NEAR. Threads do not change the result."""

from typing import NamedTuple

import numpy as np
from numba import njit

from sparring.envs.tabletop.render.geometry import (
    BOX,
    CAPSULE,
    CYLINDER,
    ELLIPSOID,
    FAR,
    NEAR,
    PLANE,
    SPHERE,
    box_window,
    half_extent,
    hit,
    rotate_back,
    shape_window,
)

_SHADOW, _SHADOW_BLUR = 0.32, 0.012
_CELLS = 16, 9  # of the noise: along the longest side of the screen, along its second longest side


class Shapes(NamedTuple):
    """The shapes to draw, the same for every robot. Sizes are MuJoCo's: radius and half lengths."""

    kind: np.ndarray  # [G]
    size: np.ndarray  # [G, 3]
    rgb: np.ndarray  # [G, 3]
    casts: np.ndarray  # [G] bool: casts a soft shadow straight down onto the top of the ground
    ground: int  # index of the box that shadows fall on (-1: no shadows)
    label: np.ndarray  # [G] uint8: its label in a segmentation
    screen: int  # index of the box that can show noise (-1: none)


@njit(nogil=True, cache=True, error_model="numpy")
def draw(shapes, pos, mat, camera_pos, camera_mat, tangents, look, first, last, rgb, depth, segmentation):
    """Draw robots `first` to `last` - 1 of n: shapes at `[n, G, 3]`, `[n, G, 3, 3]`, cameras at `[n, C, 3]`, `[n, C, 3,
    3]`. Fill `rgb` uint8 `[C, n, 3, H, W]`, `depth` float32 `[C, n, 1, H, W]` (0: nothing) and `segmentation` uint8
    `[C, n, 1, H, W]`, except outputs without rows. `tangents [C]`: tangents of half the vertical fields of view."""
    height, width = rgb.shape[3], rgb.shape[4]
    count = shapes.kind.shape[0]
    nearest, light = np.empty((height, width)), np.empty((height, width))
    shape_at = np.empty((height, width), np.int64)
    corners = np.empty((8, 3))
    for c in range(tangents.shape[0]):
        tangent = tangents[c]
        us = (np.arange(width) + 0.5 - 0.5 * width) * (2 * tangent / height)
        vs = (0.5 * height - np.arange(height) - 0.5) * (2 * tangent / height)
        for i in range(first, last):
            eye, axes = camera_pos[i, c], camera_mat[i, c]
            nearest[:] = FAR
            light[:] = 1.0
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
                    _draw_shadows(shapes, pos[i], mat[i], eye, axes, tangent, us, vs, light, shape_at, corners)
                _paint(look.rgb[i], look.background[i], light, shape_at, rgb[c, i])
                if shapes.screen >= 0 and look.noise[i] >= 0:
                    _draw_noise(shapes, pos[i], mat[i], eye, axes, us, vs, look.noise[i], nearest, shape_at, rgb[c, i])
            if depth.shape[1] > 0:
                _copy_depth(nearest, depth[c, i, 0])
            if segmentation.shape[1] > 0:
                _copy_labels(shapes.label, shape_at, segmentation[c, i, 0])


@njit(nogil=True, cache=True, error_model="numpy")
def _draw_shape(kind, size, pos, mat, eye, axes, sun, strengths, g, window, us, vs, nearest, light, shape_at):
    # the camera, its axes, the sun and the sky, in the axes of the shape
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
    """Draw the pixels of a window. Inlined for a constant `kind`: each kind gets a branch-free, vectorized loop."""
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


@njit(nogil=True, cache=True, error_model="numpy")
def _paint(rgb, background, light, shape_at, out):
    """Write colours `[G, 3]` times light as bytes `[3, H, W]`; shape G is the background."""
    count = rgb.shape[0]
    colours = np.empty(count + 1)
    for c in range(3):
        for g in range(count):
            colours[g] = 255 * rgb[g, c]
        colours[count] = 255 * background[c]
        for y in range(light.shape[0]):
            row_light, row_shape, row = light[y], shape_at[y], out[c, y]
            for x in range(len(row)):
                value = colours[row_shape[x]] * row_light[x]
                row[x] = np.uint8((value if value < 255.0 else 255.0) + 0.5)


@njit(nogil=True, cache=True, error_model="numpy")
def _draw_shadows(shapes, pos, mat, eye, axes, tangent, us, vs, light, shape_at, corners):
    """Darken the ground below each caster: a soft spot or streak, wider and paler the higher the caster is."""
    height, width = light.shape
    level = pos[shapes.ground, 2] + shapes.size[shapes.ground, 2]
    ground_x, ground_y = _ground_points(shapes.ground, level, eye, axes, us, vs, shape_at)
    shade = np.zeros((height, width))  # of the darkest shadow at each pixel
    level_axes = np.eye(3)
    centre = np.empty(3)
    for g in range(shapes.kind.shape[0]):
        if not shapes.casts[g] or pos[g, 2] < level:
            continue
        radius, along, axis = _streak(half_extent(shapes.kind[g], shapes.size[g]))
        ax, ay = mat[g, 0, axis] * along, mat[g, 1, axis] * along
        reach = radius + _SHADOW_BLUR + 0.25 * (pos[g, 2] - level)
        centre[0], centre[1], centre[2] = pos[g, 0], pos[g, 1], level
        x0, x1, y0, y1 = box_window(
            centre, level_axes, (abs(ax) + reach, abs(ay) + reach, 0.0), eye, axes, tangent, height, width, corners
        )
        streak = (pos[g, 0], pos[g, 1], ax, ay, reach, 2 * _SHADOW * radius / reach)
        for y in range(y0, y1):
            _darken(streak, ground_x[y, x0:x1], ground_y[y, x0:x1], shade[y, x0:x1])
    light *= 1 - shade


@njit(nogil=True, cache=True, error_model="numpy")
def _darken(streak, ground_x, ground_y, shade):
    cx, cy, ax, ay, reach, strength = streak
    squared = ax * ax + ay * ay
    per_length = 1 / squared if squared > 1e-12 else 0.0
    for x in range(len(shade)):
        px, py = ground_x[x] - cx, ground_y[x] - cy
        part = (px * ax + py * ay) * per_length
        part = 1.0 if part > 1.0 else (-1.0 if part < -1.0 else part)
        px, py = px - part * ax, py - part * ay
        fade = 1 - np.sqrt(px * px + py * py) / reach
        dark = strength * (fade if fade < 0.5 else 0.5)
        shade[x] = dark if dark > shade[x] else shade[x]


@njit(nogil=True, cache=True, error_model="numpy")
def _ground_points(ground, level, eye, axes, us, vs, shape_at):
    """World x and y of the ground at each pixel; FAR if the pixel shows another shape."""
    ground_x, ground_y = np.empty(shape_at.shape), np.empty(shape_at.shape)
    rx, ry, rz = axes[0, 0], axes[1, 0], axes[2, 0]
    ux, uy, uz = axes[0, 1], axes[1, 1], axes[2, 1]
    bx, by, bz = axes[0, 2], axes[1, 2], axes[2, 2]
    ox, oy, oz = eye[0], eye[1], eye[2]
    for y in range(len(vs)):
        v, row_x, row_y, row_shape = vs[y], ground_x[y], ground_y[y], shape_at[y]
        for x in range(len(us)):
            u = us[x]
            t = (level - oz) / (rz * u + uz * v - bz)
            is_ground = row_shape[x] == ground
            row_x[x] = ox + t * (rx * u + ux * v - bx) if is_ground else FAR
            row_y[x] = oy + t * (ry * u + uy * v - by) if is_ground else FAR
    return ground_x, ground_y


@njit(nogil=True, cache=True, error_model="numpy")
def _streak(half):
    axis = 1 if half[1] > half[2] else 2
    radius = min(half[0], half[3 - axis])
    return radius, max(half[axis] - radius, 0.0), axis


@njit(nogil=True, cache=True, error_model="numpy")
def _draw_noise(shapes, pos, mat, eye, axes, us, vs, noise, nearest, shape_at, out):
    """Draw cells of random colours on a box, without shading. The pattern depends on `noise` alone."""
    size, centre, own_axes = shapes.size[shapes.screen], pos[shapes.screen], mat[shapes.screen]
    long, thin = np.argmax(size), np.argmin(size)
    other = 3 - long - thin
    for y in range(len(vs)):
        for x in range(len(us)):
            if shape_at[y, x] != shapes.screen:
                continue
            t, u, v = nearest[y, x], us[x], vs[y]
            point = rotate_back(
                own_axes,
                eye[0] - centre[0] + t * (axes[0, 0] * u + axes[0, 1] * v - axes[0, 2]),
                eye[1] - centre[1] + t * (axes[1, 0] * u + axes[1, 1] * v - axes[1, 2]),
                eye[2] - centre[2] + t * (axes[2, 0] * u + axes[2, 1] * v - axes[2, 2]),
            )
            column = _cell(point[long], size[long], _CELLS[0])
            row = _cell(point[other], size[other], _CELLS[1])
            bits = _hash(np.uint64(noise), np.uint64(row * _CELLS[0] + column))
            for c in range(3):
                out[c, y, x] = (bits >> np.uint64(8 * c)) & np.uint64(255)


@njit(nogil=True, cache=True, error_model="numpy")
def _cell(at, half, cells):
    return min(max(int(np.floor((at / half + 1) * 0.5 * cells)), 0), cells - 1)


@njit(nogil=True, cache=True)
def _hash(a, b):
    x = a * np.uint64(0x9E3779B97F4A7C15) + (b + np.uint64(1)) * np.uint64(0xD1B54A32D192ED03)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
