"""Draw analytic shapes into a z-buffer: one call without the interpreter lock, no GL.

Each shape is visited once: its bounding box is projected to the screen, and each pixel's ray inside that rectangle is
intersected with the shape in closed form. Rays have depth 1 in front of the camera, so the ray parameter t is the
depth. What a pixel shows is its nearest intersection beyond NEAR that enters a shape; from inside a shape one sees out.

Rows (robots) are independent and nothing is summed across them: any split over threads gives the same bytes.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

# values of mujoco.mjtGeom
PLANE, SPHERE, CAPSULE, CYLINDER, BOX = 0, 2, 3, 5, 6
NEAR = 0.004
FAR = 1e9
# light = ambient + sky * (how much a face looks up) + sun * (how much it looks to the sun)
AMBIENT, SKY, SUN = 0.48, 0.12, 0.46
TO_SUN = np.array([0.35, -0.45, 0.82]) / np.linalg.norm([0.35, -0.45, 0.82])
TILE, TILE_CONTRAST = 0.3, 0.05
BACKGROUND = np.array([0.80, 0.85, 0.90])
SHADOW, SHADOW_BLUR = 0.32, 0.012


class Shapes(NamedTuple):
    """What is drawn, the same for every robot. Sizes are MuJoCo's: radius and half lengths."""

    # [G], [G, 3], [G, 3]
    kind: np.ndarray
    size: np.ndarray
    rgb: np.ndarray
    # [G] bool: throws a soft shadow straight down onto the top of the `ground` box (-1: no shadows)
    casts: np.ndarray
    ground: int


@njit(nogil=True, cache=True, error_model="numpy")
def draw(shapes, pos, mat, camera_pos, camera_mat, tangent, out):
    """Shapes at `[n, G, 3]`, `[n, G, 3, 3]`, seen by a camera at `[n, 3]`, `[n, 3, 3]`, into out uint8 `[n, 3, H, W]`.

    `tangent` is that of half the vertical field of view.
    """
    height, width = out.shape[2], out.shape[3]
    depth = np.empty((height, width))
    light = np.empty((height, width))
    shape_at = np.empty((height, width), np.int64)
    for i in range(out.shape[0]):
        depth[:] = FAR
        light[:] = 1.0
        shape_at[:] = -1
        for g in range(shapes.kind.shape[0]):
            _draw_shape(shapes, g, pos[i, g], mat[i, g], camera_pos[i], camera_mat[i], tangent, depth, light, shape_at)
        if shapes.ground >= 0:
            _draw_shadows(shapes, pos[i], mat[i], camera_pos[i], camera_mat[i], tangent, light, shape_at)
        for y in range(height):
            for x in range(width):
                g = shape_at[y, x]
                for c in range(3):
                    value = BACKGROUND[c] if g < 0 else shapes.rgb[g, c] * light[y, x]
                    out[i, c, y, x] = np.uint8(255 * min(value, 1.0) + 0.5)


@njit(nogil=True, cache=True, error_model="numpy")
def _draw_shape(shapes, g, pos, mat, camera_pos, camera_mat, tangent, depth, light, shape_at):
    kind, size = shapes.kind[g], shapes.size[g]
    height, width = depth.shape
    half = _half_extent(kind, size)
    x0, x1, y0, y1 = 0, width, 0, height
    if kind != PLANE:
        x0, x1, y0, y1 = _screen_box(pos, mat, half, camera_pos, camera_mat, tangent, height, width)
    # the camera, its axes and the sun, as the shape sees them
    ox, oy, oz = _rotate_back(mat, camera_pos[0] - pos[0], camera_pos[1] - pos[1], camera_pos[2] - pos[2])
    rx, ry, rz = _rotate_back(mat, camera_mat[0, 0], camera_mat[1, 0], camera_mat[2, 0])
    ux, uy, uz = _rotate_back(mat, camera_mat[0, 1], camera_mat[1, 1], camera_mat[2, 1])
    bx, by, bz = _rotate_back(mat, camera_mat[0, 2], camera_mat[1, 2], camera_mat[2, 2])
    sx, sy, sz = _rotate_back(mat, TO_SUN[0], TO_SUN[1], TO_SUN[2])
    upx, upy, upz = mat[2, 0], mat[2, 1], mat[2, 2]
    pixel = 2 * tangent / height
    for y in range(y0, y1):
        v = (0.5 * height - y - 0.5) * pixel
        for x in range(x0, x1):
            u = (x + 0.5 - 0.5 * width) * pixel
            dx, dy, dz = rx * u + ux * v - bx, ry * u + uy * v - by, rz * u + uz * v - bz
            t, nx, ny, nz = _hit(kind, size, ox, oy, oz, dx, dy, dz)
            if t < NEAR or t >= depth[y, x]:
                continue
            depth[y, x] = t
            shape_at[y, x] = g
            bright = AMBIENT + SKY * (nx * upx + ny * upy + nz * upz) + SUN * max(0.0, nx * sx + ny * sy + nz * sz)
            if kind == PLANE:
                odd = (np.floor((ox + t * dx) / TILE) + np.floor((oy + t * dy) / TILE)) % 2
                bright *= 1 - TILE_CONTRAST * odd
            light[y, x] = bright


@njit(nogil=True, cache=True, error_model="numpy")
def _hit(kind, size, ox, oy, oz, dx, dy, dz):
    """Where the ray o + t d enters the shape: (t, outward normal); t = FAR when it misses."""
    if kind == BOX:
        return _hit_box(size, ox, oy, oz, dx, dy, dz)
    if kind == PLANE:
        return (-oz / dz if dz < 0 else FAR), 0.0, 0.0, 1.0
    if kind == SPHERE:
        return _hit_ball(size[0], ox, oy, oz, dx, dy, dz)
    return _hit_tube(kind, size[0], size[1], ox, oy, oz, dx, dy, dz)


@njit(nogil=True, cache=True, error_model="numpy")
def _hit_box(size, ox, oy, oz, dx, dy, dz):
    # a ray parallel to a slab divides by zero: +-inf then says "always inside" or "never", as it should
    sx, sy, sz = np.copysign(size[0], dx), np.copysign(size[1], dy), np.copysign(size[2], dz)
    near_x, near_y, near_z = (-sx - ox) / dx, (-sy - oy) / dy, (-sz - oz) / dz
    far_x, far_y, far_z = (sx - ox) / dx, (sy - oy) / dy, (sz - oz) / dz
    t = max(near_x, near_y, near_z)
    if not t <= min(far_x, far_y, far_z):
        return FAR, 0.0, 0.0, 0.0
    if t == near_x:
        return t, -np.sign(dx), 0.0, 0.0
    if t == near_y:
        return t, 0.0, -np.sign(dy), 0.0
    return t, 0.0, 0.0, -np.sign(dz)


@njit(nogil=True, cache=True, error_model="numpy")
def _hit_ball(radius, ox, oy, oz, dx, dy, dz):
    a = dx * dx + dy * dy + dz * dz
    b = ox * dx + oy * dy + oz * dz
    q = b * b - a * (ox * ox + oy * oy + oz * oz - radius * radius)
    if q <= 0:
        return FAR, 0.0, 0.0, 0.0
    t = (-b - np.sqrt(q)) / a
    return t, (ox + t * dx) / radius, (oy + t * dy) / radius, (oz + t * dz) / radius


@njit(nogil=True, cache=True, error_model="numpy")
def _hit_tube(kind, radius, half, ox, oy, oz, dx, dy, dz):
    """A cylinder along z with flat ends, or a capsule with round ones."""
    a = dx * dx + dy * dy
    b = ox * dx + oy * dy
    q = b * b - a * (ox * ox + oy * oy - radius * radius)
    # outside the endless cylinder: nothing of either kind is hit
    if q < 0:
        return FAR, 0.0, 0.0, 0.0
    t = (-b - np.sqrt(q)) / a if a > 0 else -FAR
    z = oz + t * dz
    if abs(z) <= half:
        return t, (ox + t * dx) / radius, (oy + t * dy) / radius, 0.0
    # The ray enters the endless cylinder beyond an end; the only end it can enter by is that one.
    end = half if z > 0 else -half
    if a == 0:
        end = -half if dz > 0 else half
    if kind == CAPSULE:
        return _hit_ball_at(end, radius, ox, oy, oz, dx, dy, dz)
    # away from the end, or along it
    if end * dz >= 0:
        return FAR, 0.0, 0.0, 0.0
    t = (end - oz) / dz
    x, y = ox + t * dx, oy + t * dy
    if x * x + y * y > radius * radius:
        return FAR, 0.0, 0.0, 0.0
    return t, 0.0, 0.0, np.sign(end)


@njit(nogil=True, cache=True, error_model="numpy")
def _hit_ball_at(z, radius, ox, oy, oz, dx, dy, dz):
    return _hit_ball(radius, ox, oy, oz - z, dx, dy, dz)


@njit(nogil=True, cache=True, error_model="numpy")
def _half_extent(kind, size):
    """Half lengths of the box around a shape, in its own axes."""
    if kind == BOX:
        return size[0], size[1], size[2]
    if kind == SPHERE:
        return size[0], size[0], size[0]
    return size[0], size[0], size[1] + (size[0] if kind == CAPSULE else 0.0)


@njit(nogil=True, cache=True, error_model="numpy")
def _screen_box(pos, mat, half, camera_pos, camera_mat, tangent, height, width):
    """Pixel ranges (x0, x1, y0, y1) that hold all of a box that is in front of the near plane."""
    corners = np.empty((8, 3))
    for k in range(8):
        a = half[0] if k & 1 else -half[0]
        b = half[1] if k & 2 else -half[1]
        c = half[2] if k & 4 else -half[2]
        corners[k, 0], corners[k, 1], corners[k, 2] = _rotate_back(
            camera_mat,
            pos[0] + mat[0, 0] * a + mat[0, 1] * b + mat[0, 2] * c - camera_pos[0],
            pos[1] + mat[1, 0] * a + mat[1, 1] * b + mat[1, 2] * c - camera_pos[1],
            pos[2] + mat[2, 0] * a + mat[2, 1] * b + mat[2, 2] * c - camera_pos[2],
        )
    # the rectangle grows by each corner in front of the camera, and by each point where an edge passes the near plane
    left, right, low, high = FAR, -FAR, FAR, -FAR
    for k in range(8):
        x, y, ahead = corners[k, 0], corners[k, 1], -corners[k, 2]
        if ahead >= NEAR:
            left, right = min(left, x / ahead), max(right, x / ahead)
            low, high = min(low, y / ahead), max(high, y / ahead)
        for bit in (1, 2, 4):
            other = k ^ bit
            if ahead >= NEAR and -corners[other, 2] < NEAR:
                part = (ahead - NEAR) / (ahead + corners[other, 2])
                u = (x + part * (corners[other, 0] - x)) / NEAR
                v = (y + part * (corners[other, 1] - y)) / NEAR
                left, right, low, high = min(left, u), max(right, u), min(low, v), max(high, v)
    scale = 0.5 * height / tangent
    return (
        int(min(max(np.floor(0.5 * width + left * scale), 0.0), width)),
        int(min(max(np.ceil(0.5 * width + right * scale), 0.0), width)),
        int(min(max(np.floor(0.5 * height - high * scale), 0.0), height)),
        int(min(max(np.ceil(0.5 * height - low * scale), 0.0), height)),
    )


@njit(nogil=True, cache=True, error_model="numpy")
def _rotate_back(mat, x, y, z):
    return (
        mat[0, 0] * x + mat[1, 0] * y + mat[2, 0] * z,
        mat[0, 1] * x + mat[1, 1] * y + mat[2, 1] * z,
        mat[0, 2] * x + mat[1, 2] * y + mat[2, 2] * z,
    )


@njit(nogil=True, cache=True, error_model="numpy")
def _draw_shadows(shapes, pos, mat, camera_pos, camera_mat, tangent, light, shape_at):
    """Darken the ground below each caster: a soft spot or streak that tells how high above the table a thing is."""
    height, width = light.shape
    level = pos[shapes.ground, 2] + shapes.size[shapes.ground, 2]
    ground_x, ground_y = _ground_points(shapes.ground, level, camera_pos, camera_mat, tangent, shape_at)
    # how much of the light each pixel loses: the darkest shadow counts, they do not add up
    lost = np.zeros((height, width))
    level_axes = np.eye(3)
    for g in range(shapes.kind.shape[0]):
        if not shapes.casts[g] or pos[g, 2] < level:
            continue
        # seen from above, every caster is a streak: a segment, thickened by a radius
        radius, along, axis = _streak(_half_extent(shapes.kind[g], shapes.size[g]))
        ax, ay = mat[g, 0, axis] * along, mat[g, 1, axis] * along
        reach = radius + SHADOW_BLUR + 0.25 * (pos[g, 2] - level)
        strength = 2 * SHADOW * radius / reach
        cx, cy = pos[g, 0], pos[g, 1]
        x0, x1, y0, y1 = _screen_box(
            np.array([cx, cy, level]),
            level_axes,
            (abs(ax) + reach, abs(ay) + reach, 0.0),
            camera_pos,
            camera_mat,
            tangent,
            height,
            width,
        )
        squared = ax * ax + ay * ay
        per_length = 1 / squared if squared > 1e-12 else 0.0
        for y in range(y0, y1):
            for x in range(x0, x1):
                px, py = ground_x[y, x] - cx, ground_y[y, x] - cy
                part = min(1.0, max(-1.0, (px * ax + py * ay) * per_length))
                px, py = px - part * ax, py - part * ay
                away = px * px + py * py
                if away < reach * reach:
                    fade = min(0.5, 1 - np.sqrt(away) / reach)
                    lost[y, x] = max(lost[y, x], strength * fade)
    light *= 1 - lost


@njit(nogil=True, cache=True, error_model="numpy")
def _ground_points(ground, level, camera_pos, camera_mat, tangent, shape_at):
    """World x and y of what each pixel shows of the ground; far away where it shows something else."""
    height, width = shape_at.shape
    ground_x, ground_y = np.full((height, width), FAR), np.full((height, width), FAR)
    pixel = 2 * tangent / height
    for y in range(height):
        v = (0.5 * height - y - 0.5) * pixel
        for x in range(width):
            if shape_at[y, x] == ground:
                u = (x + 0.5 - 0.5 * width) * pixel
                t = (level - camera_pos[2]) / (camera_mat[2, 0] * u + camera_mat[2, 1] * v - camera_mat[2, 2])
                dx = camera_mat[0, 0] * u + camera_mat[0, 1] * v - camera_mat[0, 2]
                dy = camera_mat[1, 0] * u + camera_mat[1, 1] * v - camera_mat[1, 2]
                ground_x[y, x], ground_y[y, x] = camera_pos[0] + t * dx, camera_pos[1] + t * dy
    return ground_x, ground_y


@njit(nogil=True, cache=True, error_model="numpy")
def _streak(half):
    """(radius, half length, axis) of the thickened segment that stands for a box of these half lengths."""
    axis = 1 if half[1] > half[2] else 2
    radius = min(half[0], half[3 - axis])
    return radius, max(half[axis] - radius, 0.0), axis
