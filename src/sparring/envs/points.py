"""Point clouds from depth images and camera poses, of numpy arrays on the CPU or of tensors on a GPU.

Both use the same expressions in float64 and the same rule of choice, so they select the same points.
Letters: n robots, C cameras, H, W image size, M = C * H * W pixels."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numba import njit


def point_clouds(
    depth: Any,
    intrinsics: Any,
    poses: Any,
    count: int,
    colors: Any = None,
    low: Any = None,
    high: Any = None,
    frame: Any = None,
) -> Any:
    """Back-project the pixels, crop the points to a box of the world and select some by farthest-point sampling.

    `depth`: `[n, C, H, W]` metres along the optical axis; 0, negative or not finite: no measurement. `intrinsics`: `[C,
    3, 3]` or `[n, C, 3, 3]` in pixels, whose centres are at halves (the middle of an image is W / 2, H / 2). `poses`:
    `[n, C, 4, 4]`, camera to world, where a camera has x to the right, y down and z forward. `colors`: uint8 `[n, C, H,
    W, 3]`. `low`, `high`: `[3]`. `frame`: `[n, 4, 4]`, the pose in the world of the frame in which points are returned.
    Returns float32 `[n, count, 3 or 6]`: x, y, z in metres, r, g, b in 0..1. If there are too few points, they are
    repeated; without any, the result is zeros.

    The first point is the nearest to the middle of the box (along an axis without limits, the middle of the points),
    each other one the farthest from those before; ties: lowest index. Tensors give a tensor on their device.
    """
    inputs = (depth, intrinsics, poses, count, colors, low, high, frame)
    if isinstance(depth, np.ndarray):
        with np.errstate(invalid="ignore", over="ignore"):  # pixels without a measurement
            real = partial(np.asarray, dtype=np.float64)
            return _clouds(np, real, np.take_along_axis, _farthest, *inputs).astype(np.float32)
    import torch

    if depth.is_cuda:
        from sparring.envs.points_gpu import farthest_on_gpu as sampler
    else:

        def sampler(points, inside, centre, count):
            return torch.from_numpy(_farthest(points.numpy(), inside.numpy(), centre.numpy(), count))

    real = partial(torch.as_tensor, dtype=torch.float64, device=depth.device)
    return _clouds(torch, real, torch.take_along_dim, sampler, *inputs).float()


def _clouds(
    xp: Any, real: Callable, take: Callable, sampler: Callable,
    depth: Any, intrinsics: Any, poses: Any, count: int, colors: Any, low: Any, high: Any, frame: Any,
) -> Any:  # fmt: skip
    """`point_clouds` with functions of numpy or torch, in float64. Only elementwise operations, one after the other: a
    matrix product or a fused multiply-add would round differently on each device."""
    n, _, height, width = depth.shape
    columns, rows = real(np.arange(width) + 0.5), real(np.arange(height) + 0.5)[:, None]
    # [..., C, 3, 3] -> [..., C, 3, 3, 1, 1], so that each entry broadcasts over the pixels
    k, pose = real(intrinsics)[..., None, None], real(poses)[..., None, None]
    v = (rows - k[..., 1, 2, :, :]) / k[..., 1, 1, :, :]
    u = (columns - k[..., 0, 2, :, :] - k[..., 0, 1, :, :] * v) / k[..., 0, 0, :, :]
    rays = [pose[:, :, i, 0] * u + pose[:, :, i, 1] * v + pose[:, :, i, 2] for i in range(3)]
    # [n, C, H, W] -> [n, 3, M]
    points = xp.stack([(pose[:, :, i, 3] + depth * ray).reshape(n, -1) for i, ray in enumerate(rays)], 1)
    least = [-math.inf] * 3 if low is None else [float(x) for x in low]
    most = [math.inf] * 3 if high is None else [float(x) for x in high]
    inside = depth.reshape(n, -1) > 0
    for i in range(3):
        inside = inside & (points[:, i] > least[i]) & (points[:, i] < most[i])
    centre = xp.stack([_middle(xp, points[:, i], inside, least[i], most[i]) for i in range(3)], 1)
    chosen = sampler(points, inside, centre, count)  # [n, count]: pixels
    cloud = [take(points[:, i], chosen, 1) for i in range(3)]  # [n, count] each
    if frame is not None:
        at = real(frame)[..., None]
        offset = [axis - at[:, i, 3] for i, axis in enumerate(cloud)]
        # its axes are the columns of the rotation
        cloud = [sum(at[:, k, i] * offset[k] for k in range(3)) for i in range(3)]
    if colors is not None:
        cloud += [real(take(colors[..., i].reshape(n, -1), chosen, 1)) / 255 for i in range(3)]
    out = xp.stack(cloud, 2)
    out[~inside.any(1)] = 0.0
    return out


def _middle(xp: Any, points: Any, inside: Any, least: float, most: float) -> Any:
    """`[n]`: the middle of the box along one axis; of the points `[n, M]` if it has no limits there."""
    if math.isfinite(least) and math.isfinite(most):
        return xp.full_like(points[:, 0], 0.5 * (least + most))
    return 0.5 * (xp.amin(xp.where(inside, points, math.inf), 1) + xp.amax(xp.where(inside, points, -math.inf), 1))


@njit(nogil=True, cache=True, error_model="numpy")
def _farthest(points, inside, centre, count):
    """Indices `[n, count]` among those `inside` `[n, M]` of points `[n, 3, M]`."""
    chosen = np.zeros((len(points), count), np.int64)
    for i in range(len(points)):
        pixels = np.flatnonzero(inside[i])
        if len(pixels):
            xs, ys, zs = points[i, 0][pixels], points[i, 1][pixels], points[i, 2][pixels]
            chosen[i] = pixels[farthest(xs, ys, zs, centre[i], count)]
    return chosen


@njit(nogil=True, cache=True, error_model="numpy")
def farthest(xs, ys, zs, centre, count):
    """Indices `[count]` of at least one point. The first is the nearest to `centre`, each other one the farthest from
    those before; ties: lowest index. If there are too few points, they are repeated."""
    away = np.full(len(xs), np.inf)
    _update_distances(xs, ys, zs, centre[0], centre[1], centre[2], away)
    at = np.argmin(away)
    away[:] = np.inf
    chosen = np.empty(count, np.int64)
    distinct = min(len(xs), count)
    for p in range(distinct):
        chosen[p] = at
        _update_distances(xs, ys, zs, xs[at], ys[at], zs[at], away)
        at = np.argmax(away)
    for p in range(distinct, count):
        chosen[p] = chosen[p - distinct]
    return chosen


@njit(nogil=True, cache=True, error_model="numpy")
def _update_distances(xs, ys, zs, x, y, z, away):
    for k in range(len(away)):
        dx, dy, dz = xs[k] - x, ys[k] - y, zs[k] - z
        squared = dx * dx + dy * dy + dz * dz
        away[k] = squared if squared < away[k] else away[k]
