"""Cameras and saved states of envs that hold a MuJoCo model and its data."""

import importlib
from typing import Any

import numpy as np

from sparring.envs.tabletop.render.mujoco import windowless_gl

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


class Cameras:
    """Draws cameras of a model without a window, shadows, reflections and antialiasing, which take most of the time."""

    def __init__(self, model: Any, height: int, width: int):
        import mujoco

        self._mujoco, self._model = mujoco, model
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
        self._scene = mujoco.MjvScene(model, maxgeom=model.ngeom + 100)
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            self._scene.flags[flag] = 0
        self._options = mujoco.MjvOption()

    def draw(self, data: Any, camera: str) -> tuple[np.ndarray, np.ndarray]:
        """Image uint8 [H, W, 3] and depth float32 [H, W] along the optical axis, metres; 0 where nothing is."""
        mujoco = self._mujoco
        view = mujoco.MjvCamera()
        view.type, view.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, self._model.camera(camera).id
        self._gl.make_current()
        everything = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(self._model, data, self._options, None, view, everything, self._scene)
        pixels, depth = np.empty(self._shape, np.uint8), np.empty(self._shape[:2], np.float32)
        rectangle = mujoco.MjrRect(0, 0, self._shape[1], self._shape[0])
        mujoco.mjr_render(rectangle, self._scene, self._context)
        mujoco.mjr_readPixels(pixels, depth, rectangle, self._context)
        # the buffer has 1 at the near plane and 0 at the far one, linear in 1 / distance
        planes = self._model.vis.map
        near, far = planes.znear * self._model.stat.extent, planes.zfar * self._model.stat.extent
        metres = near * far / (near + depth * (far - near))
        return pixels[::-1], np.where(depth > 0, metres, 0.0).astype(np.float32)[::-1]

    def close(self) -> None:
        self._gl.make_current()
        self._context.free()
        self._gl.free()


def camera_model(model: Any, data: Any, camera: str, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Intrinsics [3, 3] in pixels and pose [4, 4] of a camera with a field of view, as points.point_clouds has them."""
    focal = height / (2 * np.tan(np.deg2rad(model.camera(camera).fovy[0]) / 2))
    intrinsics = np.array([[focal, 0, width / 2], [0, focal, height / 2], [0, 0, 1]])
    # MuJoCo's cameras look along -z with y up
    return intrinsics, pose(data.camera(camera).xpos, data.camera(camera).xmat.reshape(3, 3) * [1, -1, -1])


def pose(position: np.ndarray, rotation: np.ndarray) -> np.ndarray:
    """[4, 4]."""
    matrix = np.eye(4)
    matrix[:3, :3], matrix[:3, 3] = rotation, position
    return matrix


def saved_state(env: Any) -> dict[str, Any]:
    """The simulation, what resets changed in the model, and the env's own plain attributes."""
    import mujoco

    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    simulation = np.empty(mujoco.mj_stateSize(env.model, kind))
    mujoco.mj_getState(env.model, env.data, simulation, kind)
    own = {name: value for name, value in vars(env).items() if isinstance(value, _PLAIN) and name != "render_mode"}
    # a view of the simulation is not a value: the reset before `restore_state` makes it again
    own = {name: value for name, value in own.items() if not np.may_share_memory(value, env.data.xpos)}
    return {"simulation": simulation, "model": {name: getattr(env.model, name).copy() for name in _MODEL}, "own": own}


def restore_state(env: Any, saved: dict[str, Any]) -> None:
    import mujoco

    for name, value in saved["model"].items():
        getattr(env.model, name)[:] = value
    mujoco.mj_setState(env.model, env.data, saved["simulation"], mujoco.mjtState.mjSTATE_INTEGRATION)
    mujoco.mj_forward(env.model, env.data)
    # again: mj_forward has changed qacc_warmstart
    mujoco.mj_setState(env.model, env.data, saved["simulation"], mujoco.mjtState.mjSTATE_INTEGRATION)
    vars(env).update(saved["own"])
