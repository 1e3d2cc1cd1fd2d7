"""Point clouds: back-project what the cameras see, crop it to a box, thin it out by farthest-point sampling."""

import numpy as np
from numba import njit

# above the table: its top and the floor are left out
CROP_LOW, CROP_HIGH = np.array([-0.50, -0.55, 0.004]), np.array([0.50, 0.55, 0.80])


@njit(nogil=True, cache=True, error_model="numpy")
def point_clouds(depth, rgb, camera_pos, camera_mat, tangent, low, high, count):
    """Depths `[n, C, S, S]`, colours `[n, C, 3, S, S]` and cameras `[n, C, 3]`, `[n, C, 3, 3]` with tangents `[C]` ->
    float32 `[n, count, 6]`: x, y, z, r, g, b. Too few points are repeated; none give zeros."""
    n, cameras, size = depth.shape[0], depth.shape[1], depth.shape[2]
    cloud = np.empty((cameras * size * size, 6))
    out = np.empty((n, count, 6), np.float32)
    for i in range(n):
        found = 0
        for c in range(cameras):
            found = _back_project(
                depth[i, c], rgb[i, c], camera_pos[i, c], camera_mat[i, c], tangent[c], low, high, cloud, found
            )
        _farthest(cloud[:found], 0.5 * (low + high), out[i])
    return out


@njit(nogil=True, cache=True, error_model="numpy")
def _back_project(depth, rgb, eye, axes, tangent, low, high, cloud, found):
    """Append the pixels that lie in the box to `cloud`; how many it holds then."""
    size = depth.shape[0]
    for y in range(size):
        for x in range(size):
            t = np.float64(depth[y, x])
            if t <= 0:
                continue
            u, v = (x + 0.5 - 0.5 * size) * 2 * tangent / size, (0.5 * size - y - 0.5) * 2 * tangent / size
            inside = True
            for k in range(3):
                cloud[found, k] = eye[k] + t * (axes[k, 0] * u + axes[k, 1] * v - axes[k, 2])
                inside &= low[k] < cloud[found, k] < high[k]
                cloud[found, 3 + k] = rgb[k, y, x] / 255
            if inside:
                found += 1
    return found


@njit(nogil=True, cache=True, error_model="numpy")
def _farthest(cloud, centre, out):
    """Each point is the farthest from those before it, the first the nearest to `centre`; of equals the first wins."""
    found, count = cloud.shape[0], out.shape[0]
    if found == 0:
        out[:] = 0
        return
    xs, ys, zs = cloud[:, 0].copy(), cloud[:, 1].copy(), cloud[:, 2].copy()
    away = np.full(found, np.inf)
    _approach(xs, ys, zs, centre[0], centre[1], centre[2], away)
    at = np.argmin(away)
    away[:] = np.inf
    chosen = min(found, count)
    for p in range(chosen):
        out[p] = cloud[at]
        _approach(xs, ys, zs, xs[at], ys[at], zs[at], away)
        at = np.argmax(away)
    for p in range(chosen, count):
        out[p] = out[p - chosen]


@njit(nogil=True, cache=True, error_model="numpy")
def _approach(xs, ys, zs, x, y, z, away):
    for k in range(len(away)):
        dx, dy, dz = xs[k] - x, ys[k] - y, zs[k] - z
        squared = dx * dx + dy * dy + dz * dz
        away[k] = squared if squared < away[k] else away[k]
