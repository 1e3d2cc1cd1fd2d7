"""MuJoCo's renderer compared with the suite's; skipped without GL."""

import os
import subprocess
import sys

import numpy as np
import pytest

from sparring.envs.configs import TabletopConfig
from sparring.envs.tabletop.arm import Kinematics
from sparring.envs.tabletop.backend import Tabletop
from sparring.envs.tabletop.render import mujoco as mujoco_render
from sparring.envs.tabletop.render.renderer import GOAL, OBJECTS, Renderer
from sparring.envs.tabletop.scene import HOME, Marker, Part, Scene
from sparring.errors import UserError

CUBE = Part('<body><freejoint/><geom type="box" size="0.03 0.03 0.03" mass="0.1" rgba="0.86 0.18 0.16 1"/></body>')
QPOS = np.array([[*HOME, 0.04, 0.04, x, -0.15, 0.03, 1, 0, 0, 0] for x in (0.0, 0.1)])
GOALS = np.array([[0.05, 0.2, 0.03], [0.15, 0.1, 0.1]])
CAMERAS = ("head", "wrist")


@pytest.fixture(scope="module")
def model():
    return Scene(scenery=(CUBE,)).compile()


@pytest.fixture(scope="module")
def mujoco_renderer(model):
    try:
        renderer = mujoco_render.MujocoRenderer(model)
    except UserError as error:
        pytest.skip(str(error))
    yield renderer
    renderer.close()


def test_objects_are_at_the_same_pixels_as_with_the_suites_renderer(model, mujoco_renderer):
    own = Renderer(model, Kinematics(model), threads=1)
    labels = own.views(QPOS, GOALS, CAMERAS, 96, kinds=("segmentation",))
    views = mujoco_renderer.views(QPOS, GOALS, CAMERAS, 96)
    for i in range(2):
        rgb, label = views["rgb/head"][i].astype(int), labels["segmentation/head"][i, 0]
        red = (rgb[0] > 1.8 * rgb[1]) & (rgb[0] > 1.8 * rgb[2]) & (np.abs(rgb[1] - rgb[2]) < 40)
        green = (rgb[1] > 1.5 * rgb[0]) & (rgb[1] > 1.2 * rgb[2])
        for seen, expected in ((red, label == OBJECTS), (green, label == GOAL)):
            assert expected.sum() > 8
            assert (seen & expected).sum() / (seen | expected).sum() > 0.7
    assert views["rgb/wrist"].shape == (2, 3, 96, 96) and views["rgb/wrist"].dtype == np.uint8
    assert views["rgb/wrist"].std() > 10


def test_appearances_change_colours_and_not_the_model(model, mujoco_renderer):
    before = model.geom_rgba.copy()
    own = Renderer(model, Kinematics(model), threads=1)
    look = own.standard_appearance(2)
    plain = mujoco_renderer.views(QPOS, GOALS, ("head",), 64)["rgb/head"]
    same = mujoco_renderer.views(QPOS, GOALS, ("head",), 64, look)["rgb/head"]
    np.testing.assert_array_equal(plain, same)
    look.rgb[1, model.geom("table").id] = [0.1, 0.2, 0.9]
    blue = mujoco_renderer.views(QPOS, GOALS, ("head",), 64, look)["rgb/head"].astype(int)
    np.testing.assert_array_equal(plain[0], blue[0])
    assert ((blue[1, 2] - blue[1, 0]) > 60).mean() > 0.3
    np.testing.assert_array_equal(mujoco_renderer.views(QPOS, GOALS, ("head",), 64)["rgb/head"], plain)
    np.testing.assert_array_equal(model.geom_rgba, before)


def test_images_have_the_size_of_the_other_renderer(model, mujoco_renderer):
    picture = mujoco_renderer.picture(QPOS[:1], GOALS[:1])
    assert picture.shape == (256, 512, 3) and picture.dtype == np.uint8 and picture.std() > 20


def test_a_disc_is_rendered(model, mujoco_renderer):
    disc = mujoco_render.MujocoRenderer(model, Marker("disc", 0.05))
    rgb = disc.views(QPOS[:1], np.array([[0.1, 0.1, 0.001]]), ("head",), 64)["rgb/head"][0].astype(int)
    disc.close()
    assert ((rgb[1] > 1.5 * rgb[0]) & (rgb[1] > 1.2 * rgb[2])).sum() > 20


def test_the_error_of_a_broken_mujoco_gl_names_it():
    code = """
from sparring.envs.tabletop.scene import Scene
from sparring.errors import UserError
try:
    Scene().compile()
except UserError as error:
    print(error)
"""
    environment = {**os.environ, "MUJOCO_GL": "no_such_gl"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.startswith("MUJOCO_GL=no_such_gl does not work here ("), done.stderr
    assert "unset it" in done.stdout and "MUJOCO_GL=egl" in done.stdout


def test_the_error_without_gl_names_packages_to_install(model, monkeypatch):
    probes, run = [], subprocess.run
    monkeypatch.setattr(mujoco_render, "_WINDOWLESS", ("no_such_module",))
    monkeypatch.setattr(subprocess, "run", lambda *given, **more: probes.append(given) or run(*given, **more))
    mujoco_render._working_gl.cache_clear()
    try:
        for _ in range(2):
            with pytest.raises(
                UserError, match="drawing needs OpenGL by EGL or OSMesa.*libegl1 libgl1.*osmesa6"
            ) as raised:
                mujoco_render.windowless_gl()
        assert "env." not in str(raised.value)  # adapters of other simulators draw with it too
        with pytest.raises(
            UserError, match="env.video_renderer=mujoco: drawing needs .* set env.video_renderer=builtin"
        ):
            Tabletop(TabletopConfig(video_renderer="mujoco"), 1)
        assert len(probes) == 1  # a probe takes seconds
    finally:
        mujoco_render._working_gl.cache_clear()
