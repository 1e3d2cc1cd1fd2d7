"""Cameras and saved states of envs that hold a MuJoCo model and its data."""

import atexit
import contextlib
import functools
import importlib
import os
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from sparring.envs.sims.arguments import camera_list, camera_spaces, check_depth, check_size
from sparring.envs.tabletop.render.mujoco import windowless_gl
from sparring.envs.tabletop.scene import load_mujoco

# what resets change in a model, e.g. the place of a door
_MODEL = (
    "body_pos",
    "body_quat",
    "site_pos",
    "site_quat",
    "geom_pos",
    "geom_quat",
    "geom_size",
    "geom_rgba",
    "eq_data",
)
_PLAIN = (bool, int, float, str, np.ndarray, np.generic, type(None))


@contextlib.contextmanager
def without_gl() -> Iterator[None]:
    """For the import of packages that choose a GL library of their own or set MUJOCO_GL, also for child processes."""
    load_mujoco()
    before, os.environ["MUJOCO_GL"] = os.environ.get("MUJOCO_GL"), "disable"
    try:
        yield
    finally:
        del os.environ["MUJOCO_GL"]
        if before is not None:
            os.environ["MUJOCO_GL"] = before


class Cameras:
    """Draws cameras of a model without a window, shadows, reflections and antialiasing, which take most of the time.
    Geoms of the groups `hidden` are not drawn."""

    def __init__(self, model: Any, height: int, width: int, hidden: tuple[int, ...] = ()):
        import mujoco

        self._mujoco, self.model = mujoco, model
        self._shape = (height, width, 3)
        self._gl = importlib.import_module(f"mujoco.{windowless_gl()}").GLContext(width, height)
        self._gl.make_current()
        samples, model.vis.quality.offsamples = model.vis.quality.offsamples, 0
        model.vis.global_.offheight = max(model.vis.global_.offheight, height)
        model.vis.global_.offwidth = max(model.vis.global_.offwidth, width)
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        self._context.readDepthMap = mujoco.mjtDepthMap.mjDEPTH_ZEROFAR  # more precise for far points
        model.vis.quality.offsamples = samples
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._scene = mujoco.MjvScene(model, maxgeom=model.ngeom + model.nsite + 100)
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            self._scene.flags[flag] = 0
        self._options = mujoco.MjvOption()
        self._options.geomgroup[list(hidden)] = 0
        atexit.register(self._gl.free)  # before EGL ends, which is also registered

    def draw(self, data: Any, camera: str) -> tuple[np.ndarray, np.ndarray]:
        """Image uint8 [H, W, 3] and depth float32 [H, W] along the optical axis, metres; 0 where nothing is."""
        mujoco = self._mujoco
        view = mujoco.MjvCamera()
        view.type, view.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, self.model.camera(camera).id
        self._gl.make_current()
        everything = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(self.model, data, self._options, None, view, everything, self._scene)
        pixels, depth = np.empty(self._shape, np.uint8), np.empty(self._shape[:2], np.float32)
        rectangle = mujoco.MjrRect(0, 0, self._shape[1], self._shape[0])
        mujoco.mjr_render(rectangle, self._scene, self._context)
        mujoco.mjr_readPixels(pixels, depth, rectangle, self._context)
        # the buffer has 1 at the near plane and 0 at the far one, linear in 1 / distance
        planes = self.model.vis.map
        near, far = planes.znear * self.model.stat.extent, planes.zfar * self.model.stat.extent
        metres = near * far / (near + depth * (far - near))
        return pixels[::-1], np.where(depth > 0, metres, 0.0).astype(np.float32)[::-1]

    def close(self) -> None:
        atexit.unregister(self._gl.free)
        self._gl.make_current()
        self._context.free()
        self._gl.free()


def pose(position: np.ndarray, rotation: np.ndarray) -> np.ndarray:
    """[4, 4]."""
    matrix = np.eye(4)
    matrix[:3, :3], matrix[:3, 3] = rotation, position
    return matrix


class Views:
    """Cameras of a simulation as observations of a gymnasium env, each with its depth if `depth`. They are functions
    that draw: only what is read is drawn. `simulation` returns the current model and its data; when the model changes,
    what was made for the one before is freed."""

    def __init__(
        self,
        simulation: Callable[[], tuple[Any, Any]],
        cameras: list[str] | str,
        size: int,
        depth: bool,
        hidden: tuple[int, ...] = (),
        names: Mapping[str, str] | None = None,
        turns: Mapping[str, tuple[int, int]] | None = None,
    ):
        """Geoms of the groups `hidden` are not drawn. `names`: name of a camera here -> in the model. `turns`: camera
        -> (rows, columns), -1 where they are reversed."""
        if names is None:
            model, _ = simulation()
            names = {model.camera(index).name: model.camera(index).name for index in range(model.ncam)}
        self.cameras = camera_list(cameras, names)
        check_size(size)
        check_depth(depth, self.cameras)
        self._simulation, self._size, self._depth, self._hidden = simulation, size, depth, hidden
        self._names, self._turns = names, turns or {}
        self._drawn: dict[int, Cameras] = {}  # size -> its cameras

    def spaces(self) -> dict[str, spaces.Space]:
        return camera_spaces(self.cameras, self._size, self._depth)

    def observed(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for camera in self.cameras:
            # one drawing has image and depth
            draw = functools.cache(functools.partial(self.draw, camera, self._size))
            found[camera] = lambda draw=draw: draw()[0]
            if self._depth:
                found[f"{camera}_depth"] = lambda draw=draw: draw()[1]
        return found

    def draw(self, camera: str, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Image [size, size, 3] and depth [size, size]."""
        model, data = self._simulation()
        if size in self._drawn and self._drawn[size].model is not model:
            self._drawn.pop(size).close()
        if size not in self._drawn:
            self._drawn[size] = Cameras(model, size, size, self._hidden)
        image, depth = self._drawn[size].draw(data, self._names[camera])
        rows, columns = self._turns.get(camera, (1, 1))
        return image[::rows, ::columns], depth[::rows, ::columns]

    def camera_model(self, camera: str) -> tuple[np.ndarray, np.ndarray]:
        """Intrinsics [3, 3] in pixels and pose [4, 4] of the camera in the model, without its turn, as
        points.point_clouds has them."""
        model, data = self._simulation()
        name, side = self._names[camera], self._size
        focal = side / (2 * np.tan(np.deg2rad(model.camera(name).fovy[0]) / 2))
        intrinsics = np.array([[focal, 0, side / 2], [0, focal, side / 2], [0, 0, 1]])
        # MuJoCo's cameras look along -z with y up
        return intrinsics, pose(data.camera(name).xpos, data.camera(name).xmat.reshape(3, 3) * [1, -1, -1])

    def close(self) -> None:
        for cameras in self._drawn.values():
            cameras.close()
        self._drawn = {}


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """For simulators that draw from the global generators of Python and numpy, which get their states back."""
    before = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def saved_state(model: Any, data: Any, owners: list[Any]) -> dict[str, Any]:
    """The simulation, what resets changed in the model, and the plain attributes of `owners`."""
    import mujoco

    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    simulation = np.empty(mujoco.mj_stateSize(model, kind))
    mujoco.mj_getState(model, data, simulation, kind)
    own = []
    for owner in owners:
        own.append({name: value for name, value in vars(owner).items() if _is_plain(value) and name != "render_mode"})
    changed = {name: getattr(model, name).copy() for name in _MODEL}
    # sensors of forces are of the step before, and simulators read them in the next one
    return {"simulation": simulation, "sensors": data.sensordata.copy(), "model": changed, "own": own}


def restore_state(model: Any, data: Any, owners: list[Any], saved: dict[str, Any]) -> None:
    import mujoco

    for name, value in saved["model"].items():
        getattr(model, name)[:] = value
    mujoco.mj_setState(model, data, saved["simulation"], mujoco.mjtState.mjSTATE_INTEGRATION)
    mujoco.mj_forward(model, data)
    # again: mj_forward has changed qacc_warmstart
    mujoco.mj_setState(model, data, saved["simulation"], mujoco.mjtState.mjSTATE_INTEGRATION)
    data.sensordata[:] = saved["sensors"]
    for owner, plain in zip(owners, saved["own"], strict=True):
        vars(owner).update(plain)


def _is_plain(value: Any) -> bool:
    """A view of the simulation is not plain: the reset before `restore_state` makes it again."""
    if not isinstance(value, _PLAIN) or (isinstance(value, np.ndarray) and value.dtype.hasobject):
        return False
    while isinstance(value, np.ndarray):
        value = value.base
        if value is not None and not isinstance(value, np.ndarray):
            return False
    return True
