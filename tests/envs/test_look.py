"""Appearances, depth, segmentation and the noise screen of the renderer."""

import colorsys
import hashlib

import numpy as np
import pytest

from sparring.envs.backend import EpisodeSeeds
from sparring.envs.configs import TabletopConfig
from sparring.envs.tabletop.arm import Kinematics
from sparring.envs.tabletop.backend import Tabletop
from sparring.envs.tabletop.randomize import rotations
from sparring.envs.tabletop.render.geometry import PLANE
from sparring.envs.tabletop.render.raster import draw
from sparring.envs.tabletop.render.renderer import (
    GOAL,
    NOTHING,
    OBJECTS,
    ROBOT,
    SCENERY,
    Renderer,
    point_clouds,
    side_by_side,
)
from sparring.envs.tabletop.scene import BALL, HOME, Part, Scene
from sparring.errors import UserError

CAMERAS = ("head", "wrist")
SCREEN = Part(
    '<geom name="screen" type="box" size="0.01 0.16 0.09" pos="-0.30 0.30 0.12" rgba="0.1 0.1 0.1 1"'
    ' contype="0" conaffinity="0"/>'
)
ALL_SWITCHES = ("appearance", "background", "light", "camera_pose")


def _renderer(*parts, threads=1, marker=BALL):
    model = Scene(scenery=parts).compile()
    return Renderer(model, Kinematics(model), threads, marker)


def _cube(rgb):
    geom = f'<geom type="box" size="0.022 0.022 0.022" mass="0.06" rgba="{rgb} 1"/>'
    return Part(f"<body><freejoint/>{geom}</body>")


def _cubes():
    return _cube("0.86 0.18 0.16"), _cube("0.15 0.35 0.85")


def _qpos(n, *objects):
    """Arms near home, objects `(x, y, z)` upright."""
    arm = np.concatenate([HOME + np.random.default_rng(0).uniform(-0.3, 0.3, (n, 6)), np.full((n, 2), 0.04)], 1)
    return np.concatenate([arm, *(np.tile([*at, 1, 0, 0, 0], (n, 1)) for at in objects)], 1)


def _goal(n):
    return np.tile([0.1, 0.1, 0.1], (n, 1))


def test_images_of_the_standard_appearance_never_change():
    views = _renderer(*_cubes()).views(_qpos(4, (0, -0.1, 0.022), (0.1, 0.05, 0.022)), _goal(4), CAMERAS, 64)
    digests = {name: hashlib.blake2b(pixels.tobytes(), digest_size=8).hexdigest() for name, pixels in views.items()}
    assert digests == {"rgb/head": "10015c3d3db5907f", "rgb/wrist": "edf46b6260dcadff"}


def test_the_default_is_the_standard_appearance():
    renderer, qpos = _renderer(*_cubes()), _qpos(3, (0, -0.1, 0.022), (0.1, 0.05, 0.022))
    plain = renderer.views(qpos, _goal(3), CAMERAS, 48)
    same = renderer.views(qpos, _goal(3), CAMERAS, 48, renderer.standard_appearance(3))
    for name in plain:
        np.testing.assert_array_equal(plain[name], same[name])


def test_each_switch_changes_its_fields_and_nothing_else():
    renderer = _renderer(*_cubes(), SCREEN)
    standard = renderer.standard_appearance(1).rows(0)
    everything = renderer.random_appearance(np.random.default_rng(7), ALL_SWITCHES)
    changes = {
        "appearance": {"rgb"},
        "background": {"background", "rgb"},
        "light": {"sun", "light"},
        "camera_pose": {"camera_pos", "camera_turn"},
    }
    floor = renderer._shapes.kind == PLANE
    for switch, fields in changes.items():
        look = renderer.random_appearance(np.random.default_rng(7), [switch])
        for name, value in look._asdict().items():
            drawn, usual = getattr(everything, name), getattr(standard, name)
            if switch == "background" and name == "rgb":
                drawn = np.where(floor[:, None], drawn, usual)
            np.testing.assert_array_equal(value, drawn if name in fields else usual)
            assert (name in fields) == (not np.array_equal(value, usual))


def test_random_colours_are_broad_but_a_red_cube_stays_red():
    renderer = _renderer(*_cubes(), SCREEN)
    labels, standard = renderer._shapes.label, renderer._shapes.rgb
    looks = [renderer.random_appearance(np.random.default_rng(seed), ALL_SWITCHES).rgb for seed in range(200)]
    rgb = np.array(looks)
    assert rgb.min() >= 0 and rgb.max() <= 1
    for g in range(len(labels)):
        if labels[g] >= OBJECTS and g != renderer._shapes.screen:
            hue = colorsys.rgb_to_hsv(*standard[g])[0]
            turned = [(colorsys.rgb_to_hsv(*one[g])[0] - hue + 0.5) % 1 - 0.5 for one in rgb]
            assert 0.015 < np.abs(turned).max() < 0.021
            assert np.abs(rgb[:, g] - standard[g]).max() < 0.2
        elif g != renderer._shapes.screen:
            assert (rgb[:, g].std(axis=0) > 0.18).all()
            assert max(colorsys.rgb_to_hsv(*one[g])[1] for one in rgb) < 0.56


def test_the_colour_of_the_table_is_never_close_to_that_of_the_goal():
    renderer = _renderer()
    table, goal = renderer._shapes.ground, renderer._shapes.label == GOAL
    looks = [renderer.random_appearance(np.random.default_rng(seed), ALL_SWITCHES).rgb for seed in range(200)]
    apart = [np.linalg.norm(rgb[table] - rgb[goal][0]) for rgb in looks]
    # without a minimum distance the smallest is 0.23
    assert 0.35 <= min(apart) < 0.36


def test_random_light_and_cameras_stay_in_their_ranges():
    renderer = _renderer(*_cubes())
    looks = [renderer.random_appearance(np.random.default_rng(seed), ALL_SWITCHES) for seed in range(200)]
    sun, light = np.array([look.sun for look in looks]), np.array([look.light for look in looks])
    np.testing.assert_allclose(np.linalg.norm(sun, axis=1), 1)
    assert sun[:, 2].min() > np.sin(np.deg2rad(25)) and np.ptp(sun[:, 0]) > 1.2 and np.ptp(sun[:, 1]) > 1.2
    assert light.min() > 0 and (light.sum(axis=1) < 1.25).all()
    reach = {"head": (0.02, 2.0), "wrist": (0.005, 1.0)}
    for m, name in enumerate(renderer.cameras):
        pos = np.abs([look.camera_pos[m] for look in looks]).max()
        turn = np.rad2deg(np.abs([look.camera_turn[m] for look in looks]).max())
        assert 0.9 * reach[name][0] < pos <= reach[name][0] and 0.9 * reach[name][1] < turn <= reach[name][1]


def test_side_by_side_images_have_a_border():
    black = {name: np.zeros((1, 3, 32, 32), np.uint8) for name in ("head", "left", "right")}
    pale = side_by_side(black).min(axis=(0, 2)) > 200
    assert np.flatnonzero(pale).tolist() == [14, 15, 16, 17, 30, 31, 32, 33]


def test_rotations_turn_about_their_vector():
    turned = rotations(np.array([[0, 0, np.pi / 2], [0, 0, 0], [0.3, -0.2, 0.1]]))
    np.testing.assert_allclose(turned[0], [[0, -1, 0], [1, 0, 0], [0, 0, 1]], atol=1e-15)
    np.testing.assert_array_equal(turned[1], np.eye(3))
    np.testing.assert_allclose(turned[2] @ turned[2].T, np.eye(3), atol=1e-15)
    np.testing.assert_allclose(turned[2] @ [0.3, -0.2, 0.1], [0.3, -0.2, 0.1])


def test_a_moved_camera_shifts_the_image_by_the_parallax():
    renderer, qpos, goal = _renderer(), _qpos(1), _goal(1)
    # 5 cm to the right: a point 1 m away moves to the left by 0.05 / tangent of the half width of the image
    look = renderer.standard_appearance(1)
    look.camera_pos[0, renderer.cameras.index("head"), 0] = 0.05
    kinds = ("depth", "segmentation")
    before = renderer.views(qpos, goal, ("head",), 256, kinds=kinds)
    after = renderer.views(qpos, goal, ("head",), 256, look, kinds)
    at = [np.argwhere(views["segmentation/head"][0, 0] == GOAL).mean(axis=0) for views in (before, after)]
    depth = before["depth/head"][0, 0][before["segmentation/head"][0, 0] == GOAL].mean()
    expected = 0.05 / depth / np.tan(np.deg2rad(43) / 2) * 128
    assert at[0][1] - at[1][1] == pytest.approx(expected, rel=0.05)
    assert at[0][0] == pytest.approx(at[1][0], abs=0.5)


def test_each_robot_has_its_own_appearance():
    renderer, qpos = _renderer(*_cubes(), SCREEN), np.tile(_qpos(1, (0, -0.1, 0.022), (0.1, 0.05, 0.022)), (5, 1))
    looks = renderer.standard_appearance(5)
    for row in range(1, 5):
        drawn = renderer.random_appearance(np.random.default_rng(row), ALL_SWITCHES)
        for field, value in zip(looks, drawn, strict=True):
            field[row] = value
    kinds = ("rgb", "depth", "segmentation")
    together = renderer.views(qpos, _goal(5), CAMERAS, 32, looks, kinds)
    split = _renderer(*_cubes(), SCREEN, threads=3)
    again = split.views(qpos, _goal(5), CAMERAS, 32, looks, kinds)
    split.close()
    for name, pixels in together.items():
        np.testing.assert_array_equal(pixels, again[name])
        alone = renderer.views(qpos[3:4], _goal(1), CAMERAS, 32, looks.rows([3]), kinds)[name]
        np.testing.assert_array_equal(pixels[3:4], alone)
        assert len(np.unique(pixels.reshape(5, -1), axis=0)) == 5


def test_depth_is_along_the_optical_axis():
    renderer, qpos = _renderer(), _qpos(2)
    depth = renderer.views(qpos, _goal(2), ("head",), 65, kinds=("depth", "segmentation"))
    assert depth["depth/head"].dtype == np.float32 and depth["depth/head"].shape == (2, 1, 65, 65)
    _, _, pos, mat = renderer._poses(qpos, _goal(2), renderer.standard_appearance(2), [0])
    eye, axes = pos[0, 0], mat[0, 0]
    table = depth["segmentation/head"][0, 0] == SCENERY
    v, u = np.meshgrid(*[np.tan(np.deg2rad(43) / 2) * s * (np.arange(65) - 32) / 32.5 for s in (-1, 1)], indexing="ij")
    rays = np.stack([u, v, -np.ones_like(u)], -1) @ axes.T
    z = eye[2] + depth["depth/head"][0, 0] * rays[..., 2]
    # scenery is the table's top, its edge and legs, or the floor
    top, floor = np.abs(z) < 1e-5, np.abs(z + 0.72) < 1e-5
    assert top[table].sum() > 500 and floor[table].sum() > 300 and (top | floor)[table].mean() > 0.9


def test_the_background_has_depth_zero():
    renderer, qpos = _renderer(), _qpos(1)
    look = renderer.standard_appearance(1)
    # turn the head camera upside up: it sees the sky
    look.camera_turn[0, 0] = [2.0, 0, 0]
    views = renderer.views(qpos, _goal(1), ("head",), 16, look, ("rgb", "depth", "segmentation"))
    assert (views["depth/head"] == 0).all() and (views["segmentation/head"] == NOTHING).all()
    assert (views["rgb/head"][0, :, 3, 3] == np.floor(255 * look.background[0] + 0.5)).all()


def test_segmentation_labels_objects_robot_and_goal():
    cap = Part(
        '<body name="bell" pos="0 0 0.1"><freejoint/><geom type="box" size="0.03 0.03 0.03" mass="1"/>'
        '<body pos="0 0 0.05"><joint type="slide" axis="0 0 1"/><geom type="sphere" size="0.02" mass="0.1"/></body>'
        "</body>"
    )
    renderer = _renderer(*_cubes(), cap)
    qpos = np.concatenate([_qpos(1, (0.05, -0.2, 0.022), (0.15, 0.1, 0.022), (0.2, -0.1, 0.03)), np.zeros((1, 1))], 1)
    views = renderer.views(qpos, np.array([[0.0, 0.25, 0.2]]), ("head",), 128, kinds=("rgb", "segmentation"))
    labels, rgb = views["segmentation/head"][0, 0], views["rgb/head"][0].astype(int)
    assert set(np.unique(labels)) <= {NOTHING, SCENERY, ROBOT, OBJECTS, OBJECTS + 1, OBJECTS + 2, GOAL}
    red, green, blue = (rgb[:, labels == label].mean(axis=1) for label in (OBJECTS, GOAL, OBJECTS + 1))
    assert red.argmax() == 0 and green.argmax() == 1 and blue.argmax() == 2
    # the box and the cap on its slide are one object
    assert (labels == OBJECTS + 2).sum() > 100
    rows = np.flatnonzero((labels == OBJECTS + 2).any(axis=1))
    assert len(rows) == np.ptp(rows) + 1
    assert renderer._shapes.label[-3:].tolist() == [OBJECTS + 2, OBJECTS + 2, GOAL]


def test_screen_noise_is_a_function_of_its_seed():
    renderer, qpos = _renderer(SCREEN), np.tile(_qpos(1), (4, 1))
    look = renderer.standard_appearance(4)
    look.noise[:] = [5, 5, 6, -1]
    views = renderer.views(qpos, _goal(4), ("head",), 128, look, ("rgb", "segmentation"))
    rgb = views["rgb/head"].astype(int)
    np.testing.assert_array_equal(rgb[0], rgb[1])
    changed = (rgb[0] != rgb[2]).any(axis=0)
    off = (rgb[0] != rgb[3]).any(axis=0)
    # only the screen changes, and all of it except cells that are equal by chance
    assert off.sum() > 300 and not (changed & ~off).any() and changed.sum() > 0.95 * off.sum()
    colours = np.unique(rgb[0][:, off], axis=1)
    assert 60 < colours.shape[1] <= 16 * 9 and 100 < colours.mean() < 155
    assert rgb[3][:, off].max() < 40
    np.testing.assert_array_equal(rgb[3], renderer.views(qpos[:1], _goal(1), ("head",), 128)["rgb/head"][0])


def test_kernels_are_compiled_once():
    """Compiling takes seconds: array types must not depend on the number of robots or cameras or the appearance."""
    _renderer().views(_qpos(3), _goal(3), CAMERAS, 8, points=4)
    compiled = len(draw.signatures), len(point_clouds.signatures)
    for renderer in (_renderer(), _renderer(Part('<camera name="above" pos="0 0 1.2"/>'), marker=None)):
        for n in (1, 2, 5):
            for cameras in (("head",), ("wrist",), renderer.cameras):
                renderer.views(_qpos(n), _goal(n), cameras, 8)
                renderer.views(_qpos(n), _goal(n), cameras, 8, renderer.standard_appearance(n), points=4)
        renderer.views(_qpos(2), _goal(2), CAMERAS, 8, renderer.standard_appearance(4).rows([3, 1]), ("depth",))
    assert compiled == (len(draw.signatures), len(point_clouds.signatures))


def test_an_appearance_needs_a_row_per_robot():
    renderer = _renderer()
    with pytest.raises(ValueError, match="1 rows for 2 robots"):
        renderer.views(_qpos(2), _goal(2), CAMERAS, 16, renderer.standard_appearance(1))


def test_unknown_cameras_and_views_are_refused():
    with pytest.raises(UserError, match="camera 'side'; .*head, wrist"):
        _renderer().views(_qpos(1), _goal(1), ("side",), 16)
    with pytest.raises(UserError, match="'normals'.*rgb, depth, segmentation"):
        _renderer().views(_qpos(1), _goal(1), CAMERAS, 16, kinds=("rgb", "normals"))


def test_robots_of_different_scenes_are_rendered_together_with_their_appearances():
    env = Tabletop(TabletopConfig(task=("lift_d0", "stack_d0"), threads=1), 4)
    env.reset(EpisodeSeeds(0, total_envs=4))
    world, rows, kinds = env._world, np.arange(4), ("rgb", "segmentation")
    plain = world.views(rows, env._goal, ("head",), 96, kinds)
    # robots 1 and 3 have two cubes
    blue = (plain["segmentation/head"] == OBJECTS + 1).sum(axis=(1, 2, 3))
    assert (blue[1::2] > 5).all() and (blue[::2] == 0).all()
    np.testing.assert_array_equal(plain["rgb/head"], world.views(rows, env._goal, ("head",), 96)["rgb/head"])
    group = world._groups[world._group[3]]
    group.appearance = group.renderer().standard_appearance(2)
    group.appearance.background[:], group.appearance.rgb[1] = 0, 0
    painted = world.views(rows, env._goal, ("head",), 96)["rgb/head"]
    np.testing.assert_array_equal(painted[:3], plain["rgb/head"][:3])
    assert painted[3].max() == 0 and env.render(3)[:, :250].max() == 0
    env.close()


def test_render_shows_all_cameras():
    second = Part('<camera name="above" pos="0 0 1.2" fovy="60"/>')
    renderer = _renderer(second)
    picture = renderer.picture(_qpos(1), _goal(1))
    assert picture.shape == (256, 3 * 256, 3) and picture.dtype == np.uint8
    views = renderer.views(_qpos(1), _goal(1), renderer.cameras, 256)
    for k, name in enumerate(renderer.cameras):
        part = picture[:, 256 * k : 256 * (k + 1)].astype(int)
        # except for smoothed edges it equals the camera's view
        assert (np.abs(part - views[f"rgb/{name}"][0].transpose(1, 2, 0)) <= 2).mean() > 0.9
