"""Point clouds compared with depths computed by hand and a brute-force sampler."""

import numpy as np

from sparring.envs.tabletop.arm import Kinematics
from sparring.envs.tabletop.render.renderer import CROP_HIGH, CROP_LOW, Renderer, point_clouds
from sparring.envs.tabletop.scene import HOME, Scene

EVERYWHERE = np.full(3, -10.0), np.full(3, 10.0)


def _camera(n=1, cameras=1):
    """At the origin, looking down -z."""
    return np.zeros((n, cameras, 3)), np.tile(np.eye(3), (n, cameras, 1, 1))


def _farthest(points, centre, count):
    """Brute force: indices of farthest-point sampling."""
    chosen = [int(((points - centre) ** 2).sum(1).argmin())]
    while len(chosen) < min(count, len(points)):
        away = ((points[:, None] - points[chosen]) ** 2).sum(2).min(1)
        chosen.append(int(away.argmax()))
    return [chosen[k % len(chosen)] for k in range(count)]


def test_pixels_are_unprojected_to_their_positions():
    depth = np.zeros((1, 1, 4, 4), np.float32)
    rgb = np.zeros((1, 1, 3, 4, 4), np.uint8)
    # the top left pixel and the one right of and below the centre; all others have no depth
    depth[0, 0, 0, 0], depth[0, 0, 2, 2] = 2.0, 4.0
    rgb[0, 0, :, 0, 0] = 255, 0, 51
    cloud = point_clouds(depth, rgb, *_camera(), np.array([0.5]), *EVERYWHERE, 2)[0]
    # pixel centres are at -0.75, -0.25, 0.25, 0.75 of the half width, which is 0.5 at distance 1
    expected = [[-0.75, 0.75, -2, 1, 0, 0.2], [0.5, -0.5, -4, 0, 0, 0]]
    np.testing.assert_allclose(cloud, expected, rtol=1e-6)
    assert cloud.dtype == np.float32


def test_sampling_agrees_with_brute_force():
    rng = np.random.default_rng(0)
    depth = rng.uniform(0.5, 2, (3, 2, 12, 12)).astype(np.float32)
    rgb = rng.integers(0, 256, (3, 2, 3, 12, 12), dtype=np.uint8)
    low, high = np.array([-0.4, -0.5, -1.6]), np.array([0.5, 0.3, -0.6])
    clouds = point_clouds(depth, rgb, *_camera(3, 2), np.array([0.5, 0.6]), low, high, 40)
    for i in range(3):
        seen = []
        for c, tangent in enumerate((0.5, 0.6)):
            x = ((np.arange(12) + 0.5) / 6 - 1) * tangent
            u, v = np.meshgrid(x, -x)
            seen.append(
                np.stack([u, v, -np.ones_like(u)], -1).reshape(-1, 3) * depth[i, c].reshape(-1, 1).astype(float)
            )
        points = np.concatenate(seen)
        colours = rgb[i].transpose(0, 2, 3, 1).reshape(-1, 3) / 255
        inside = ((points > low) & (points < high)).all(axis=1)
        assert 60 < inside.sum() < 200
        chosen = _farthest(points[inside], (low + high) / 2, 40)
        expected = np.concatenate([points[inside], colours[inside]], 1)[chosen]
        np.testing.assert_allclose(clouds[i], expected, rtol=1e-6, atol=1e-7)


def test_few_points_are_repeated_and_an_empty_cloud_is_zeros():
    depth = np.zeros((2, 1, 4, 4), np.float32)
    depth[0, 0, 1, :3] = 1.0
    rgb = np.full((2, 1, 3, 4, 4), 255, np.uint8)
    clouds = point_clouds(depth, rgb, *_camera(2), np.array([1.0]), *EVERYWHERE, 8)
    assert len(np.unique(clouds[0], axis=0)) == 3
    np.testing.assert_array_equal(clouds[0], clouds[0, [0, 1, 2, 0, 1, 2, 0, 1]])
    assert (clouds[1] == 0).all()


def test_clouds_of_the_scene_show_the_goal_and_not_the_table():
    model = Scene().compile()
    qpos = np.concatenate([HOME + np.random.default_rng(0).uniform(-0.2, 0.2, (5, 6)), np.full((5, 2), 0.04)], 1)
    goal = np.random.default_rng(1).uniform([0.0, -0.2, 0.05], [0.2, 0.2, 0.2], (5, 3))
    clouds = []
    for threads in (1, 2):
        renderer = Renderer(model, Kinematics(model), threads)
        clouds.append(renderer.views(qpos, goal, ("head", "wrist"), 64, points=256)["points"])
        renderer.close()
    np.testing.assert_array_equal(*clouds)
    points, colours = clouds[0][..., :3], clouds[0][..., 3:]
    assert points.shape == (5, 256, 3) and (points > CROP_LOW).all() and (points < CROP_HIGH).all()
    for i in range(5):
        green = (colours[i, :, 1] > 1.5 * colours[i, :, 0]) & (colours[i, :, 1] > 1.3 * colours[i, :, 2])
        assert green.any()
        # points on the ball are 2 cm from its centre
        np.testing.assert_allclose(np.linalg.norm(points[i, green] - goal[i], axis=1), 0.02, atol=1e-4)
