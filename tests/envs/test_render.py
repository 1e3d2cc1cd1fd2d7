"""The renderer on scenes whose pixels can be computed by hand, and compared with mujoco's rays on the real scene."""

import numpy as np
import pytest

from sparring.envs.tabletop.arm import Kinematics
from sparring.envs.tabletop.randomize import AMBIENT, BACKGROUND, SKY, SUN, TO_SUN, Appearance
from sparring.envs.tabletop.render.geometry import BOX, CAPSULE, CYLINDER, ELLIPSOID, PLANE, SPHERE, TILE, TILE_CONTRAST
from sparring.envs.tabletop.render.raster import Shapes, draw
from sparring.envs.tabletop.render.renderer import Renderer
from sparring.envs.tabletop.scene import HOME, Scene, load_mujoco

RED, BLUE = (0.9, 0.1, 0.1), (0.1, 0.1, 0.9)
# turns a shape's z axis onto the world's y axis: seen from the side
LYING = np.array([[1.0, 0, 0], [0, 0, 1], [0, -1, 0]])
SIZE = 65


def _picture(*shapes, camera=(0, 0, 0)):
    """Shapes (kind, size, position, rotation, colour), from a camera that looks down -z, 45 degrees to each side."""
    kinds, sizes, positions, rotations, colours = zip(*shapes, strict=True)
    nothing = np.zeros(len(kinds), bool)
    table = Shapes(
        np.array(kinds),
        np.array([(*size, 0, 0)[:3] for size in sizes], float),
        np.array(colours),
        casts=nothing,
        ground=-1,
        label=nothing.astype(np.uint8),
        screen=-1,
    )
    out = np.zeros((1, 1, 3, SIZE, SIZE), np.uint8)
    no_depth, no_labels = np.zeros((1, 0, 1, SIZE, SIZE), np.float32), np.zeros((1, 0, 1, SIZE, SIZE), np.uint8)
    pos, mat = np.array(positions, float)[None], np.array(rotations, float)[None]
    eye, axes = np.array(camera, float)[None, None], np.eye(3)[None, None]
    look = Appearance.standard(table.rgb, 1, 1)
    draw(table, pos, mat, eye, axes, np.array([1.0]), look, 0, 1, out, no_depth, no_labels)
    return out[0, 0].transpose(1, 2, 0)


def _colour(rgb, normal):
    normal = np.array(normal, float)
    light = AMBIENT + SKY * normal[2] + SUN * max(0.0, normal @ TO_SUN)
    return np.floor(255 * np.minimum(np.array(rgb) * light, 1) + 0.5).astype(np.uint8)


def _covered(picture):
    return (picture != _background()).any(axis=2)


def _background():
    return np.floor(255 * BACKGROUND + 0.5).astype(np.uint8)


def _tangents():
    """Offsets of pixel centres from the image centre, at distance 1."""
    x = (np.arange(SIZE) + 0.5) / SIZE * 2 - 1
    return np.meshgrid(x, -x)


def test_a_sphere_has_the_right_outline_and_shade():
    picture = _picture((SPHERE, (1,), (0, 0, -2), np.eye(3), RED))
    # the outline of a ball at distance 2 r is a cone of 30 degrees
    x, y = _tangents()
    np.testing.assert_array_equal(_covered(picture), np.hypot(x, y) < np.tan(np.pi / 6))
    np.testing.assert_array_equal(picture[32, 32], _colour(RED, (0, 0, 1)))
    np.testing.assert_array_equal(picture[0, 0], _background())


@pytest.mark.parametrize("kind", [CYLINDER, CAPSULE])
def test_tube_from_its_end(kind):
    picture = _picture((kind, (0.5, 1.0), (0, 0, -3), np.eye(3), RED))
    x, y = _tangents()
    # the near end of a cylinder is a disc at distance 2; that of a capsule, a ball around there
    outline = 0.25 if kind == CYLINDER else 0.5 / np.sqrt(2**2 - 0.5**2)
    np.testing.assert_array_equal(_covered(picture), np.hypot(x, y) < outline)
    np.testing.assert_array_equal(picture[32, 32], _colour(RED, (0, 0, 1)))


@pytest.mark.parametrize("kind", [CYLINDER, CAPSULE])
def test_tube_from_its_side(kind):
    picture = _picture((kind, (0.5, 1.02), (0, 0, -3), LYING, RED))
    covered = _covered(picture)
    x, y = _tangents()
    # across: a tangent to the circle at distance 3; up: the near rim at 2.5, or a tangent to the ball at the end
    across = covered[32].sum()
    assert across == (np.abs(x[32]) < 0.5 / np.sqrt(3**2 - 0.5**2)).sum()
    ball = np.tan(np.arctan2(1.02, 3) + np.arcsin(0.5 / np.hypot(1.02, 3)))
    assert covered[:, 32].sum() == (np.abs(y[:, 32]) < (1.02 / 2.5 if kind == CYLINDER else ball)).sum()
    np.testing.assert_array_equal(picture[32, 32], _colour(RED, (0, 0, 1)))


def test_ellipsoid_has_the_right_outline_and_shade():
    turn = np.array([[np.cos(0.5), -np.sin(0.5), 0], [np.sin(0.5), np.cos(0.5), 0], [0, 0, 1]])
    half, centre = np.array([0.9, 0.3, 0.6]), np.array([0.3, -0.2, -2.0])
    picture = _picture((ELLIPSOID, half, centre, turn, RED))
    x, y = _tangents()
    rays = np.stack([x, y, -np.ones_like(x)], -1)
    # a ray hits if its distance from the ellipsoid's centre in the space of the unit sphere is below 1
    d, o = (rays @ turn) / half, (-centre @ turn) / half
    along = (d @ o) / (d * d).sum(-1)
    hit = ((o - along[..., None] * d) ** 2).sum(-1) < 1
    np.testing.assert_array_equal(_covered(picture), hit)
    # the normal is the gradient of the quadratic form at the point of intersection
    t = -along - np.sqrt(along**2 - ((o * o).sum() - 1) / (d * d).sum(-1), where=hit, out=np.zeros_like(along))
    normal = ((o + t[..., None] * d) / half) @ turn.T
    normal /= np.linalg.norm(normal, axis=-1, keepdims=True)
    expected = np.array([_colour(RED, n) for n in normal[hit]])
    assert hit.sum() > 200
    np.testing.assert_allclose(picture[hit].astype(int), expected, atol=1)


def test_an_ellipsoid_of_equal_axes_is_a_sphere_also_at_the_near_plane():
    for centre in [(0.2, 0.1, -1.5), (0.6, 0.1, -0.3)]:
        ball = _picture((SPHERE, (0.5,), centre, np.eye(3), RED))
        same = _picture((ELLIPSOID, (0.5, 0.5, 0.5), centre, LYING, RED))
        assert _covered(ball).any()
        assert np.abs(ball.astype(int) - same).max() <= 1


def test_box_shows_its_front_and_its_side():
    # the right face is at x = -0.5, from z = -1 to -3: it fills tangents -0.5 .. -0.5/3 of the middle row
    picture = _picture((BOX, (0.5, 0.5, 1.0), (-1, 0, -2), np.eye(3), RED))
    x, _ = _tangents()
    row = picture[32]
    np.testing.assert_array_equal(row[x[32] < -0.51], np.tile(_colour(RED, (0, 0, 1)), ((x[32] < -0.51).sum(), 1)))
    side = (x[32] > -0.5) & (x[32] < -0.5 / 3)
    np.testing.assert_array_equal(row[side], np.tile(_colour(RED, (1, 0, 0)), (side.sum(), 1)))
    assert not _covered(picture)[32][x[32] > -0.5 / 3].any()


def test_plane_has_tiles():
    picture = _picture((PLANE, (1,), (0, 0, -TILE), np.eye(3), RED))
    bright = AMBIENT + SKY + SUN * TO_SUN[2]
    # at distance one tile each quadrant of the image is one tile
    even, odd = picture[10, 60], picture[10, 10]
    assert even[0] == round(255 * 0.9 * bright) and odd[0] == round(255 * 0.9 * bright * (1 - TILE_CONTRAST))


def test_the_nearer_shape_wins_in_either_order():
    near = (BOX, (0.2, 0.2, 0.2), (0, 0, -1.2), np.eye(3), RED)
    far = (SPHERE, (1,), (0, 0, -3), np.eye(3), BLUE)
    one, other = _picture(near, far), _picture(far, near)
    np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(one[32, 32], _colour(RED, (0, 0, 1)))
    assert one[32, 46, 2] > one[32, 46, 0]


def test_shapes_behind_or_around_the_camera():
    behind = (SPHERE, (1,), (0, 0, 2), np.eye(3), RED)
    around = (BOX, (1, 1, 1), (0, 0, 0), np.eye(3), RED)
    ahead = (SPHERE, (1,), (0, 0, -2), np.eye(3), BLUE)
    np.testing.assert_array_equal(_picture(behind, around, ahead), _picture(ahead))


def test_a_box_that_passes_the_camera_is_drawn_up_to_the_edge():
    # a long beam just below the camera: from far ahead to behind it, half width 0.1, its top 0.1 lower
    picture = _picture((BOX, (0.1, 0.1, 10), (0, -0.2, 0), np.eye(3), RED))
    x, y = _tangents()
    # on its top, |x| < 0.1 where depth = 0.1 / -y: a wedge of 45 degrees; it ends at depth 10
    inside = (-y > 0.011) & (np.abs(x) < -y - 1e-6)
    assert _covered(picture)[inside].all()
    assert not _covered(picture)[(y > 0) | (np.abs(x) > -y + 1e-6)].any()


def test_real_scene_agrees_with_mujocos_rays():
    mujoco = load_mujoco()
    model = Scene().compile()
    data, size = mujoco.MjData(model), 48
    renderer = Renderer(model, Kinematics(model), threads=1)
    # no shadows, and the goal outside the images
    renderer._shapes = renderer._shapes._replace(ground=-1)
    qpos = _noisy_homes()
    images = renderer.views(qpos, np.full((3, 3), 1e3), ("head", "wrist"), size)
    for i in range(3):
        data.qpos[:] = qpos[i]
        mujoco.mj_forward(model, data)
        for camera in ("head", "wrist"):
            expected = _by_mujoco_rays(mujoco, model, data, camera, size)
            wrong = np.abs(images[f"rgb/{camera}"][i].transpose(1, 2, 0).astype(int) - expected).max(axis=2) > 2
            # rays that graze an edge may fall on either side of it
            assert wrong.mean() < 0.003, (camera, wrong.sum())


def _noisy_homes():
    noise = np.random.default_rng(0).uniform(-0.4, 0.4, (3, 6))
    return np.concatenate([HOME + noise, np.full((3, 2), 0.04)], axis=1)


def _by_mujoco_rays(mujoco, model, data, camera, size):
    index = model.camera(camera).id
    tangent = np.tan(np.deg2rad(model.cam_fovy[index]) / 2)
    x = ((np.arange(size) + 0.5) / size * 2 - 1) * tangent
    u, v = np.meshgrid(x, -x)
    rays = np.stack([u, v, -np.ones_like(u)], -1).reshape(-1, 3) @ data.cam_xmat[index].reshape(3, 3).T
    n = len(rays)
    geom, distance, normal = np.zeros(n, np.int32), np.zeros(n), np.zeros(3 * n)
    mujoco.mj_multiRay(
        model, data, data.cam_xpos[index], rays.ravel(), None, True, -1, geom, distance, normal, n, mujoco.mjMAXVAL
    )
    normal = normal.reshape(-1, 3)
    light = AMBIENT + SKY * normal[:, 2] + SUN * np.maximum(0, normal @ TO_SUN)
    point = data.cam_xpos[index] + distance[:, None] * rays
    odd = np.floor(point[:, :2] / TILE).sum(axis=1) % 2
    light *= 1 - TILE_CONTRAST * odd * (geom == model.geom("floor").id)
    rgb = model.geom_rgba[geom, :3] * light[:, None]
    rgb[geom < 0] = BACKGROUND
    return (255 * np.minimum(rgb, 1) + 0.5).astype(int).reshape(size, size, 3)


def test_the_goal_casts_a_shadow_on_the_table():
    model = Scene().compile()
    renderer = Renderer(model, Kinematics(model), threads=1)
    home = np.array([[*HOME, 0.04, 0.04]])
    low, far = np.array([[0.1, -0.2, 0.03]]), np.array([[0.0, 0.0, 1e3]])
    lit = renderer.views(home, far, ("head",), 96)["rgb/head"].astype(int)
    shaded = renderer.views(home, low, ("head",), 96)["rgb/head"].astype(int)
    darker = ((lit - shaded) > 5).all(axis=1).sum()
    assert darker > 10


def test_any_number_of_threads_gives_the_same_bytes():
    model = Scene().compile()
    qpos, goal = np.repeat(_noisy_homes(), 3, axis=0)[:7], np.random.default_rng(1).uniform(0, 0.2, (7, 3))
    pictures = []
    for threads in (1, 2, 3):
        renderer = Renderer(model, Kinematics(model), threads)
        pictures.append(renderer.views(qpos, goal, ("head", "wrist"), 32))
        renderer.close()
    for other in pictures[1:]:
        for camera in ("head", "wrist"):
            np.testing.assert_array_equal(pictures[0][f"rgb/{camera}"], other[f"rgb/{camera}"])
