"""From what each pixel shows, and how bright it is, to bytes: soft shadows, colours, the static of a screen."""

import numpy as np
from numba import njit

from sparring.envs.tabletop.project import box_window, rotate_back
from sparring.envs.tabletop.surfaces import FAR, half_extent

SHADOW, SHADOW_BLUR = 0.32, 0.012
# of the static: along the longest side of the screen and along the next
CELLS = 16, 9


@njit(nogil=True, cache=True, error_model="numpy")
def paint(rgb, background, light, shape_at, out):
    """Colours `[G, 3]` times light into bytes `[3, H, W]`; shape G is the background."""
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
def draw_shadows(shapes, pos, mat, eye, axes, tangent, us, vs, light, shape_at, corners):
    """Darken the ground below each caster: a soft spot or streak that tells how high above the table a thing is."""
    height, width = light.shape
    level = pos[shapes.ground, 2] + shapes.size[shapes.ground, 2]
    ground_x, ground_y = _ground_points(shapes.ground, level, eye, axes, us, vs, shape_at)
    # how much of the light each pixel loses: the darkest shadow counts, they do not add up
    lost = np.zeros((height, width))
    level_axes = np.eye(3)
    centre = np.empty(3)
    for g in range(shapes.kind.shape[0]):
        if not shapes.casts[g] or pos[g, 2] < level:
            continue
        # seen from above, every caster is a streak: a segment, thickened by a radius
        radius, along, axis = _streak(half_extent(shapes.kind[g], shapes.size[g]))
        ax, ay = mat[g, 0, axis] * along, mat[g, 1, axis] * along
        reach = radius + SHADOW_BLUR + 0.25 * (pos[g, 2] - level)
        centre[0], centre[1], centre[2] = pos[g, 0], pos[g, 1], level
        x0, x1, y0, y1 = box_window(
            centre, level_axes, (abs(ax) + reach, abs(ay) + reach, 0.0), eye, axes, tangent, height, width, corners
        )
        streak = (pos[g, 0], pos[g, 1], ax, ay, reach, 2 * SHADOW * radius / reach)
        for y in range(y0, y1):
            _darken(streak, ground_x[y, x0:x1], ground_y[y, x0:x1], lost[y, x0:x1])
    light *= 1 - lost


@njit(nogil=True, cache=True, error_model="numpy")
def _darken(streak, ground_x, ground_y, lost):
    cx, cy, ax, ay, reach, strength = streak
    squared = ax * ax + ay * ay
    per_length = 1 / squared if squared > 1e-12 else 0.0
    for x in range(len(lost)):
        px, py = ground_x[x] - cx, ground_y[x] - cy
        part = (px * ax + py * ay) * per_length
        part = 1.0 if part > 1.0 else (-1.0 if part < -1.0 else part)
        px, py = px - part * ax, py - part * ay
        # below zero out of reach, where it loses against the zero that is there
        fade = 1 - np.sqrt(px * px + py * py) / reach
        dark = strength * (fade if fade < 0.5 else 0.5)
        lost[x] = dark if dark > lost[x] else lost[x]


@njit(nogil=True, cache=True, error_model="numpy")
def _ground_points(ground, level, eye, axes, us, vs, shape_at):
    """World x and y of what each pixel shows of the ground; far away where it shows something else."""
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
            there = row_shape[x] == ground
            row_x[x] = ox + t * (rx * u + ux * v - bx) if there else FAR
            row_y[x] = oy + t * (ry * u + uy * v - by) if there else FAR
    return ground_x, ground_y


@njit(nogil=True, cache=True, error_model="numpy")
def _streak(half):
    """(radius, half length, axis) of the thickened segment that stands for a box of these half lengths."""
    axis = 1 if half[1] > half[2] else 2
    radius = min(half[0], half[3 - axis])
    return radius, max(half[axis] - radius, 0.0), axis


@njit(nogil=True, cache=True, error_model="numpy")
def draw_static(shapes, pos, mat, eye, axes, us, vs, noise, nearest, shape_at, out):
    """Cells of random colours on a box; it shines by itself. The picture is a function of `noise` alone."""
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
            column = _cell(point[long], size[long], CELLS[0])
            row = _cell(point[other], size[other], CELLS[1])
            bits = _hash(np.uint64(noise), np.uint64(row * CELLS[0] + column))
            for c in range(3):
                out[c, y, x] = (bits >> np.uint64(8 * c)) & np.uint64(255)


@njit(nogil=True, cache=True, error_model="numpy")
def _cell(at, half, cells):
    return min(max(int(np.floor((at / half + 1) * 0.5 * cells)), 0), cells - 1)


@njit(nogil=True, cache=True)
def _hash(a, b):
    """SplitMix64's finaliser over both numbers."""
    x = a * np.uint64(0x9E3779B97F4A7C15) + (b + np.uint64(1)) * np.uint64(0xD1B54A32D192ED03)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
