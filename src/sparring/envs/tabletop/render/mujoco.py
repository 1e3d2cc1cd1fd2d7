"""Video frames from MuJoCo's OpenGL renderer: more realistic than raster.py, slower, and different on each driver."""

import copy
import functools
import importlib
import subprocess
import sys

import numpy as np

from sparring.envs.tabletop.randomize import TO_SUN, Appearance
from sparring.envs.tabletop.render.renderer import PICTURE_SIZE, goal_shape, side_by_side
from sparring.envs.tabletop.scene import BALL, Marker, load_mujoco
from sparring.errors import UserError

_WINDOWLESS = ("egl", "osmesa")  # modules of mujoco that can create a context without a window, the faster first
_PROBE = """
import os
os.environ["MUJOCO_GL"] = "disable"
import mujoco.{name}
context = mujoco.{name}.GLContext(8, 8)
context.make_current()
context.free()
"""
_ROOM_FOR_GEOMS = 50


class MujocoRenderer:
    """Has `picture` and the rgb `views` of renderer.Renderer; it uses the colours of a look and ignores the rest."""

    def __init__(self, model, marker: Marker | None = BALL):
        self._mujoco = load_mujoco()
        self.cameras = tuple(model.camera(i).name for i in range(model.ncam))
        self._gl = importlib.import_module(f"mujoco.{windowless_gl()}").GLContext(1, 1)
        self._model = copy.copy(model)  # a copy, because its colours and light are changed
        self._rgba = self._model.geom_rgba.copy()
        headlight = self._model.vis.headlight
        headlight.ambient[:], headlight.diffuse[:], headlight.specular[:] = 0.40, 0.25, 0.10
        # a shadow map of the table only: sharper, and a quarter of the cost
        self._model.vis.map.shadowclip, self._model.vis.quality.shadowsize = 0.8 / model.stat.extent, 2048
        self._options = self._mujoco.MjvOption()
        self._options.sitegroup[:] = 0
        self._data = self._mujoco.MjData(self._model)
        self._marker = marker
        self._scene = self._mujoco.MjvScene(self._model, maxgeom=model.ngeom + _ROOM_FOR_GEOMS)
        self._gl.make_current()
        self._context = self._mujoco.MjrContext(self._model, self._mujoco.mjtFontScale.mjFONTSCALE_100)
        self._mujoco.mjr_setBuffer(self._mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)

    def views(
        self, qpos: np.ndarray, goal: np.ndarray, cameras: tuple[str, ...], size: int, look: Appearance | None = None
    ) -> dict[str, np.ndarray]:
        """Robots `[n, nq]` and their goals `[n, 3]` -> "rgb/<camera>" uint8 `[n, 3, size, size]`."""
        self._gl.make_current()
        self._mujoco.mjr_resizeOffscreen(size, size, self._context)
        views = {f"rgb/{name}": np.empty((len(qpos), 3, size, size), np.uint8) for name in cameras}
        for i in range(len(qpos)):
            rgb = self._rgba[:, :3] if look is None else look.rgb[i]
            self._model.geom_rgba[:, :3] = rgb[: self._model.ngeom]
            self._data.qpos[:] = qpos[i]
            for update in (self._mujoco.mj_kinematics, self._mujoco.mj_comPos, self._mujoco.mj_camlight):
                update(self._model, self._data)
            marker_rgb = None if self._marker is None else (self._marker.rgb if look is None else rgb[-1])
            for name in cameras:
                views[f"rgb/{name}"][i] = self._draw(name, size, goal[i], marker_rgb).transpose(2, 0, 1)
        return views

    def picture(self, qpos: np.ndarray, goal: np.ndarray, look: Appearance | None = None) -> np.ndarray:
        return side_by_side(self.views(qpos, goal, self.cameras, 2 * PICTURE_SIZE, look))

    def close(self) -> None:
        if self._context is not None:
            self._gl.make_current()
            self._context.free()
            self._gl.free()
            self._context = None

    def _draw(self, camera: str, size: int, goal: np.ndarray, marker_rgb) -> np.ndarray:
        mujoco, scene = self._mujoco, self._scene
        view = mujoco.MjvCamera()
        view.type, view.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, self.cameras.index(camera)
        everything = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(self._model, self._data, self._options, None, view, everything, scene)
        sun = scene.lights[scene.nlight]
        sun.type, sun.headlight, sun.castshadow = mujoco.mjtLightType.mjLIGHT_DIRECTIONAL, False, True
        sun.pos[:], sun.dir[:] = 3 * TO_SUN, -TO_SUN
        sun.ambient[:], sun.diffuse[:], sun.specular[:] = 0.0, 0.5, 0.2
        scene.nlight += 1
        if marker_rgb is not None:
            assert self._marker is not None
            kind, shape = goal_shape(self._marker)
            rgba, geom = np.array([*marker_rgb, 1.0], np.float32), scene.geoms[scene.ngeom]
            mujoco.mjv_initGeom(geom, kind, np.array(shape), goal, np.eye(3).ravel(), rgba)
            scene.ngeom += 1
        pixels = np.empty((size, size, 3), np.uint8)
        rectangle = mujoco.MjrRect(0, 0, size, size)
        mujoco.mjr_render(rectangle, scene, self._context)
        mujoco.mjr_readPixels(pixels, None, rectangle, self._context)
        return pixels[::-1]


def windowless_gl() -> str:
    """The module of mujoco that can create a GL context."""
    if (name := _working_gl()) is None:
        install = "install one (apt install libegl1 libgl1, or apt install libosmesa6)"
        raise UserError(f"drawing needs OpenGL by EGL or OSMesa, and neither works here; {install}")
    return name


@functools.cache
def _working_gl() -> str | None:
    """Tried in another process, because a failed import has side effects; once, as it takes seconds."""
    for name in _WINDOWLESS:
        probe = [sys.executable, "-P", "-c", _PROBE.format(name=name)]
        try:
            if subprocess.run(probe, capture_output=True, timeout=60).returncode == 0:
                return name
        except subprocess.TimeoutExpired:
            continue
    return None
