"""Pictures of the robots: poses from kinematics.py, pixels from raster.py, robots split over threads."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from sparring.envs.tabletop.kinematics import Kinematics
from sparring.envs.tabletop.raster import BOX, CAPSULE, CYLINDER, PLANE, SPHERE, Shapes, draw
from sparring.envs.tabletop.scene import BALL, CAMERAS, Marker

PICTURE_SIZE = 256
# a disc lies on the table and is as flat as a sticker
_DISC_HALF_HEIGHT = 0.001


class Renderer:
    def __init__(self, model, kinematics: Kinematics, threads: int, marker: Marker | None = BALL):
        self._kinematics = kinematics
        self._marker = marker
        self._shapes = _shapes(model, marker)
        # camera -> (index, tangent of half its field of view)
        self._cameras = {
            name: (model.camera(name).id, float(np.tan(np.deg2rad(model.camera(name).fovy[0]) / 2))) for name in CAMERAS
        }
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def images(self, qpos: np.ndarray, goal: np.ndarray, cameras: tuple[str, ...], size: int) -> dict[str, np.ndarray]:
        """Robots `[n, nq]` and their goals `[n, 3]` as each camera sees them: uint8 `[n, 3, size, size]`."""
        n = len(qpos)
        poses = self._kinematics(qpos)
        geom_pos, geom_mat = poses.frames(self._kinematics.geoms)
        camera_pos, camera_mat = poses.frames(self._kinematics.cameras)
        pos, mat = geom_pos, geom_mat
        if self._marker is not None:
            # the goal is the last shape
            pos = np.concatenate([pos, goal[:, None]], axis=1)
            mat = np.concatenate([mat, np.broadcast_to(np.eye(3), (n, 1, 3, 3))], axis=1)

        images = {name: np.empty((n, 3, size, size), np.uint8) for name in cameras}
        jobs = []
        for rows in _slices(n, self._threads):
            for name, out in images.items():
                index, tangent = self._cameras[name]
                camera = camera_pos[rows, index].copy(), camera_mat[rows, index].copy()
                jobs.append((self._shapes, pos[rows], mat[rows], *camera, tangent, out[rows]))
        if self._pool is None or len(jobs) == 1:
            for job in jobs:
                draw(*job)
        else:
            for future in [self._pool.submit(draw, *job) for job in jobs]:
                future.result()
        return images

    def picture(self, qpos: np.ndarray, goal: np.ndarray) -> np.ndarray:
        """One robot for a person to look at: `[256, 512, 3]`, head and wrist side by side, smoothed edges."""
        images = self.images(qpos, goal, CAMERAS, 2 * PICTURE_SIZE)
        # [3, H, 2 W]
        double = np.concatenate([images[name][0] for name in CAMERAS], axis=2)
        # average each 2 x 2 block
        blocks = double.reshape(3, PICTURE_SIZE, 2, len(CAMERAS) * PICTURE_SIZE, 2)
        return blocks.mean(axis=(2, 4)).round().astype(np.uint8).transpose(1, 2, 0).copy()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def _shapes(model, marker: Marker | None) -> Shapes:
    """The model's geoms, then the goal."""
    unknown = set(model.geom_type.tolist()) - {PLANE, SPHERE, CAPSULE, CYLINDER, BOX}
    if unknown:
        raise ValueError(f"geoms of mjtGeom types {sorted(unknown)}: raster.py draws planes, balls, tubes, boxes")
    shapes = Shapes(
        kind=model.geom_type.astype(np.int64),
        size=model.geom_size.astype(np.float64),
        rgb=model.geom_rgba[:, :3].astype(np.float64),
        # the arm's solid shapes and the objects; not the world's (table, legs, floor), nor decoration
        casts=(model.geom_bodyid > 0) & (model.geom_contype > 0),
        ground=int(model.geom("table").id),
    )
    return shapes if marker is None else _with_marker(shapes, marker)


def _with_marker(shapes: Shapes, marker: Marker) -> Shapes:
    ball = marker.kind == "ball"
    return Shapes(
        kind=np.append(shapes.kind, SPHERE if ball else CYLINDER),
        size=np.vstack([shapes.size, [marker.radius, 0.0 if ball else _DISC_HALF_HEIGHT, 0.0]]),
        rgb=np.vstack([shapes.rgb, marker.rgb]),
        casts=np.append(shapes.casts, ball),
        ground=shapes.ground,
    )


def _slices(n: int, parts: int) -> list[slice]:
    """`range(n)` cut into at most `parts` slices of nearly equal length."""
    edges = np.linspace(0, n, min(n, parts) + 1).round().astype(int)
    return [slice(lo, hi) for lo, hi in zip(edges[:-1], edges[1:], strict=True)]
