"""Point clouds from depth images and camera poses, of numpy arrays on the CPU or of tensors on a GPU.

Both use the same expressions in float64 and the same rule of choice, so they select the same points.
Letters: n robots, C cameras, H, W image size, M = C * H * W pixels."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numba import njit

from sparring.envs.backend import Arrays
from sparring.envs.configs import GymConfig
from sparring.errors import UserError, describe_error


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
            real: Callable = partial(np.asarray, dtype=np.float64)
            return _clouds(np, real, np.take_along_axis, _farthest, *inputs).astype(np.float32)
    import torch

    real = partial(torch.as_tensor, dtype=torch.float64, device=depth.device)
    return _clouds(torch, real, torch.take_along_dim, _farthest_of_tensors, *inputs).float()


class EnvCloud:
    """The point cloud of a gymnasium env. `camera_model(name)` of the env returns the intrinsics `[3, 3]` and the pose
    `[4, 4]` of a camera at the latest step, `gripper_pose()` the pose of the gripper, as `point_clouds` has them."""

    def __init__(self, env: Any, config: GymConfig, shapes: dict[str, tuple[int, ...]], stacked: bool):
        """`shapes`: of the env's images and depths, by their roles."""
        self._env, self._config, self.count = env, config, config.points
        self.depth = {key: np.zeros(shape, np.float32) for key, shape in shapes.items() if key.startswith("depth/")}
        given, sizes = f"env.points={config.points}: {config.name}", {depth.shape[1:] for depth in self.depth.values()}
        if stacked:
            raise UserError(f"{given} stacks frames; set env.points=0, or remove FrameStackObservation")
        if not self.depth:
            advice = "adapters add them by env.kwargs.depth=true, env.roles={KEY: depth/CAMERA} declares others"
            raise UserError(f"{given} has no depth; {advice}")
        if len(sizes) > 1:
            listed = ", ".join(f"{key} {list(depth.shape[1:])}" for key, depth in self.depth.items())
            raise UserError(
                f"{given} has depths of several sizes ({listed}); give all of them one size, or ignore some"
            )
        methods = {"camera_model": "camera_model(name) -> (intrinsics [3, 3], pose [4, 4])"}
        methods |= {"gripper_pose": "gripper_pose() -> pose [4, 4]"} if config.points_frame == "gripper" else {}
        for name, signature in methods.items():
            if not callable(getattr(env, name, None)):
                advice = "or set env.points_frame=world" if name == "gripper_pose" else "or set env.points=0"
                raise UserError(f"{given} has no method {signature}; add it (docs/simulators.md), {advice}")
        self._images = [key.replace("depth/", "image/", 1) for key in self.depth]
        self._colored = all(shapes.get(key, ())[1:] in sizes for key in self._images)
        self.shape = (config.points, 6 if self._colored else 3)

    def write(self, arrays: Arrays, row: int) -> None:
        """Write the points of row `row`, from the images and depths there and the other depths in `depth`."""
        config, frame = self._config, None
        # [1, C, H, W]
        depth = np.stack([arrays[key][row, 0] if key in arrays else own[0] for key, own in self.depth.items()])[None]
        colors = None
        if self._colored:
            # [C, 3, H, W] -> [1, C, H, W, 3]
            colors = np.moveaxis(np.stack([arrays[key][row] for key in self._images]), 1, -1)[None]
        cameras = [self._camera(key.removeprefix("depth/")) for key in self.depth]
        intrinsics, poses = (np.stack(each) for each in zip(*cameras, strict=True))
        if config.points_frame == "gripper":
            frame = self._matrix(self._env.gripper_pose(), 4, "gripper_pose()")[None]
        low, high = config.points_low, config.points_high
        clouds = point_clouds(depth, intrinsics, poses[None], self.count, colors, low, high, frame)
        arrays["points"][row] = clouds[0]

    def describe(self) -> str:
        frame, colored = self._config.points_frame, "with" if self._colored else "without"
        return f"points, {self.count} of all depths, {colored} colours, in the frame of the {frame}"

    def _camera(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        method = f"camera_model({name!r})"
        try:
            intrinsics, pose = self._env.camera_model(name)
        except (LookupError, TypeError, ValueError) as error:
            expected = "expected (intrinsics [3, 3], pose [4, 4])"
            raise UserError(f"{method} of {self._config.name} failed: {describe_error(error)}; {expected}") from error
        return self._matrix(intrinsics, 3, f"{method}[0]"), self._matrix(pose, 4, f"{method}[1]")

    def _matrix(self, value: Any, size: int, name: str) -> np.ndarray:
        matrix = np.asarray(value, np.float64)
        if matrix.shape != (size, size) or not np.isfinite(matrix).all():
            expected = f"expected finite numbers [{size}, {size}]"
            raise UserError(f"{name} of {self._config.name} is {matrix.tolist()}; {expected}")
        return matrix


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


def _farthest_of_tensors(points: Any, inside: Any, centre: Any, count: int) -> Any:
    if points.is_cuda:
        from sparring.envs.points_gpu import farthest_on_gpu

        return farthest_on_gpu(points, inside, centre, count)
    import torch

    return torch.from_numpy(_farthest(points.numpy(), inside.numpy(), centre.numpy(), count))


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
