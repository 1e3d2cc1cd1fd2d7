"""Images and point clouds of the robots: poses from arm.py, pixels from raster.py, robots split over threads."""

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba import njit

from sparring.envs.backend import SEAM
from sparring.envs.points import farthest
from sparring.envs.tabletop.arm import Kinematics
from sparring.envs.tabletop.randomize import Appearance, rotations
from sparring.envs.tabletop.render.geometry import BOX, CAPSULE, CYLINDER, ELLIPSOID, PLANE, SPHERE
from sparring.envs.tabletop.render.raster import Shapes, draw
from sparring.envs.tabletop.scene import BALL, SCREEN, Marker
from sparring.errors import UserError

PICTURE_SIZE = 256
KINDS = {"rgb": (3, np.uint8), "depth": (1, np.float32), "segmentation": (1, np.uint8)}  # channels and type of a pixel
# bounds of the points of a cloud: above the table, without its top and the floor
CROP_LOW, CROP_HIGH = np.array([-0.50, -0.55, 0.004]), np.array([0.50, 0.55, 0.80])
# labels of a segmentation; the k-th free body has OBJECTS + k
NOTHING, SCENERY, ROBOT, OBJECTS, SCREEN_LABEL, GOAL = 0, 1, 2, 3, 254, 255

_SEAM_COLOUR = (250, 250, 248)  # of the line between the images of two cameras
_FREE_JOINT = 0
_DISC_HALF_HEIGHT = 0.001  # metres


class Renderer:
    """Draws n robots at once. Letters: G shapes (the goal last), M cameras of the model, C requested cameras."""

    def __init__(self, model, kinematics: Kinematics, threads: int, marker: Marker | None = BALL):
        self.cameras = tuple(model.camera(i).name for i in range(model.ncam))
        self._tangents = np.tan(np.deg2rad(model.cam_fovy) / 2)
        self._kinematics, self._marker, self._shapes = kinematics, marker, _shapes(model, marker)
        self._wrist = model.cam_bodyid > 0
        self._standard = self.standard_appearance(1)  # all rows are equal; it grows to the largest n so far
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads - 1) if threads > 1 else None

    def standard_appearance(self, n: int) -> Appearance:
        return Appearance.standard(self._shapes.rgb, len(self.cameras), n)

    def random_appearance(self, rng: np.random.Generator, switches: Collection[str]) -> Appearance:
        label, floor = self._shapes.label, self._shapes.kind == PLANE
        keep, goal = label >= OBJECTS, label == GOAL  # keep colours that an instruction may name, and the screen's
        return self.standard_appearance(1).rows(0).randomized(rng, switches, keep, goal, floor, self._wrist)

    def views(
        self,
        qpos: np.ndarray,
        goal: np.ndarray,
        cameras: tuple[str, ...],
        size: int,
        look: Appearance | None = None,
        kinds: tuple[str, ...] = ("rgb",),
        points: int = 0,
    ) -> dict[str, np.ndarray]:
        """Robots `[n, nq]` and goals `[n, 3]` -> "rgb/<camera>" uint8 `[n, 3, S, S]`, "depth/<camera>" float32 `[n, 1,
        S, S]` (metres along the optical axis, 0: nothing), "segmentation/<camera>" uint8 `[n, 1, S, S]`, "points"
        float32 `[n, points, 6]` (x, y, z in metres, r, g, b in 0..1, above the table)."""
        if unknown := set(kinds) - set(KINDS):
            raise UserError(f"unknown views {sorted(unknown)}; expected some of {', '.join(KINDS)}")
        if missing := [name for name in cameras if name not in self.cameras]:
            raise UserError(f"unknown camera {missing[0]!r}; expected some of {', '.join(self.cameras)}")
        n, index = len(qpos), [self.cameras.index(name) for name in cameras]
        if look is None:
            if len(self._standard.noise) < n:
                self._standard = self.standard_appearance(n)
            look = self._standard.rows(slice(n))
        elif len(look.noise) != n:
            raise ValueError(f"look has {len(look.noise)} rows for {n} robots; expected one per robot")
        pos, mat, camera_pos, camera_mat = self._poses(qpos, goal, look, index)
        needed = (*kinds, "rgb", "depth") if points else kinds
        out = {  # [C, n, channels, S, S]; a kind without rows is not drawn
            kind: np.empty((len(index), n if kind in needed else 0, channels, size, size), dtype)
            for kind, (channels, dtype) in KINDS.items()
        }
        tangents, count = self._tangents[index], max(1, min(n, self._threads))
        parts = [(n * k // count, n * (k + 1) // count) for k in range(count)]  # robots of each thread: first, last + 1
        places = (self._shapes, pos, mat, camera_pos, camera_mat, tangents, look)
        self._run(draw, [(*places, first, last, *out.values()) for first, last in parts])
        views = {f"{kind}/{name}": out[kind][c] for c, name in enumerate(cameras) for kind in kinds}
        if points:
            # [C, n, 1, S, S] -> [n, C, S, S] and [C, n, 3, S, S] -> [n, C, 3, S, S]
            depth, rgb = np.concatenate(out["depth"], axis=1), np.stack(out["rgb"], axis=1)  # type: ignore[call-overload]
            inputs = (depth, rgb, camera_pos, camera_mat)
            jobs = [(*(each[a:b] for each in inputs), tangents, CROP_LOW, CROP_HIGH, points) for a, b in parts]
            views["points"] = np.concatenate(self._run(point_clouds, jobs))
        return views

    def picture(self, qpos: np.ndarray, goal: np.ndarray, look: Appearance | None = None) -> np.ndarray:
        return side_by_side(self.views(qpos, goal, self.cameras, 2 * PICTURE_SIZE, look))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def _poses(self, qpos: np.ndarray, goal: np.ndarray, look: Appearance, index: list[int]) -> tuple[np.ndarray, ...]:
        """Poses of the shapes `[n, G, 3]`, `[n, G, 3, 3]` and of the cameras `[n, C, 3]`, `[n, C, 3, 3]`."""
        poses = self._kinematics(qpos)
        pos, mat = poses.frames(self._kinematics.geoms)
        camera_pos, camera_mat = poses.frames(self._kinematics.cameras)
        if self._marker is not None:
            pos = np.concatenate([pos, goal[:, None]], axis=1)
            mat = np.concatenate([mat, np.broadcast_to(np.eye(3), (len(pos), 1, 3, 3))], axis=1)
        if look.camera_pos.any() or look.camera_turn.any():
            camera_pos = camera_pos + (camera_mat @ look.camera_pos[..., None])[..., 0]
            camera_mat = camera_mat @ rotations(look.camera_turn)
        # contiguous: numba would compile the kernel again for another layout
        return pos, mat, camera_pos.take(index, 1), camera_mat.take(index, 1)

    def _run(self, function, jobs: list[tuple]) -> list:
        others = [self._pool.submit(function, *job) for job in jobs[1:]]
        return [function(*jobs[0]), *(future.result() for future in others)]


def side_by_side(views: dict[str, np.ndarray]) -> np.ndarray:
    """Join the M images `[3, 2 H, 2 W]` of the first robot into a frame `[H, M W, 3]`: average 2 x 2 pixels, add lines
    between cameras."""
    double = np.concatenate([pixels[0] for pixels in views.values()], axis=2).astype(np.uint16)
    # [3, 2 H, 2 M W] -> [3, H, M W], in integers: `mean` of blocks takes ten times as long
    rows = double[:, ::2] + double[:, 1::2]
    sums = rows[:, :, ::2] + rows[:, :, 1::2]
    picture = np.ascontiguousarray(((sums + 2) // 4).astype(np.uint8).transpose(1, 2, 0))
    for seam in range(1, len(views)):
        middle = seam * picture.shape[1] // len(views)
        picture[:, middle - SEAM : middle + SEAM] = _SEAM_COLOUR
    return picture


def goal_shape(marker: Marker) -> tuple[int, tuple[float, float, float]]:
    if marker.kind == "ball":
        return SPHERE, (marker.radius, 0.0, 0.0)
    return CYLINDER, (marker.radius, _DISC_HALF_HEIGHT, 0.0)


def _shapes(model, marker: Marker | None) -> Shapes:
    unknown = set(model.geom_type.tolist()) - {PLANE, SPHERE, CAPSULE, ELLIPSOID, CYLINDER, BOX}
    if unknown:
        expected = "plane, sphere, capsule, ellipsoid, cylinder, box"
        raise ValueError(f"the scene has geoms of mjtGeom types {sorted(unknown)}; expected {expected}")
    names = [model.geom(i).name for i in range(model.ngeom)]
    screen = names.index(SCREEN) if SCREEN in names else -1
    free = [int(body) for body, kind in zip(model.jnt_bodyid, model.jnt_type, strict=True) if kind == _FREE_JOINT]
    number = {0: SCENERY} | {body: OBJECTS + k for k, body in enumerate(free)}
    label = np.array([number.get(int(root), ROBOT) for root in model.body_rootid[model.geom_bodyid]], np.uint8)
    label[np.arange(len(label)) == screen] = SCREEN_LABEL
    shapes = Shapes(
        kind=model.geom_type.astype(np.int64),
        size=model.geom_size.astype(np.float64),
        rgb=model.geom_rgba[:, :3].astype(np.float64),
        casts=(model.geom_bodyid > 0) & (model.geom_contype > 0),  # neither scenery nor decoration
        ground=int(model.geom("table").id),
        label=label,
        screen=screen,
    )
    if marker is None:
        return shapes
    kind, size = goal_shape(marker)
    return shapes._replace(
        kind=np.append(shapes.kind, kind),
        size=np.vstack([shapes.size, size]),
        rgb=np.vstack([shapes.rgb, marker.rgb]),
        casts=np.append(shapes.casts, marker.kind == "ball"),
        label=np.append(shapes.label, np.uint8(GOAL)),
    )


@njit(nogil=True, cache=True, error_model="numpy")
def point_clouds(depth, rgb, camera_pos, camera_mat, tangent, low, high, count):
    """Back-project the pixels, crop the points to a box and select some by farthest-point sampling. Depths `[n, C, S,
    S]`, colours `[n, C, 3, S, S]` and cameras `[n, C, 3]`, `[n, C, 3, 3]` with tangents `[C]` -> float32 `[n, count,
    6]`: x, y, z, r, g, b. If there are too few points, they are repeated; without any, the result is zeros."""
    n, cameras, size = depth.shape[0], depth.shape[1], depth.shape[2]
    cloud = np.empty((cameras * size * size, 6))
    out = np.empty((n, count, 6), np.float32)
    for i in range(n):
        found = 0
        for c in range(cameras):
            eye, axes = camera_pos[i, c], camera_mat[i, c]
            found = _back_project(depth[i, c], rgb[i, c], eye, axes, tangent[c], low, high, cloud, found)
        if found == 0:
            out[i] = 0
            continue
        xs, ys, zs = cloud[:found, 0].copy(), cloud[:found, 1].copy(), cloud[:found, 2].copy()
        for p, chosen in enumerate(farthest(xs, ys, zs, 0.5 * (low + high), count)):
            out[i, p] = cloud[chosen]
    return out


@njit(nogil=True, cache=True, error_model="numpy")
def _back_project(depth, rgb, eye, axes, tangent, low, high, cloud, found):
    """Append the pixels inside the box to `cloud`, which has `found` points; return its new number of points."""
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
