"""Point clouds of gymnasium envs with depth: which entries become points, what an env must offer, and real cameras."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from sparring.cli.main import main
from sparring.envs.backend import EpisodeSeeds
from sparring.envs.configs import GymConfig
from sparring.envs.gym import GymRobot
from sparring.envs.gym_batch import SerialBackend
from sparring.envs.workers import ProcessBackend
from sparring.errors import UserError

SIZE = 4
# a gripper at (0, 0, 1), turned by 90 degrees about z
GRIPPER = np.array([[0, -1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 1.0]])


class Depths(gymnasium.Env):
    """Two cameras at the origin and at x = 10 that look along z; every pixel is `far` metres away, or 1 if one is."""

    def __init__(self, head=(SIZE, SIZE), wrist=(SIZE, SIZE), image=(SIZE, SIZE, 3), lazy=False):
        entries = {"head_depth": spaces.Box(0, 9, (*head, 1)), "wrist_depth": spaces.Box(0, 9, wrist)}
        entries |= {f"{name}": spaces.Box(0, 255, image, np.uint8) for name in ("head", "wrist")}
        self.observation_space = spaces.Dict(entries)
        self.action_space = spaces.Box(-1, 1, (2,))
        self.lazy, self.far, self.drawn = lazy, 2.0, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.far = 2.0
        return self.observed(), {}

    def step(self, action):
        self.far += 1
        return self.observed(), 0.0, False, False, {}

    def observed(self):
        shown = {}
        for name, space in self.observation_space.items():
            value = self.far if name.endswith("depth") else 51 if name == "head" else 255
            picture = np.full(space.shape, value, space.dtype)
            shown[name] = (
                (lambda name=name, picture=picture: self.drawn.append(name) or picture) if self.lazy else picture
            )
        return shown

    def camera_model(self, name):
        pose = np.eye(4)
        pose[0, 3] = {"head": 0, "wrist": 10}[name]
        return np.array([[4, 0, 2], [0, 4, 2], [0, 0, 1]]), pose

    def gripper_pose(self):
        return GRIPPER


class NoMethods(Depths):
    camera_model = gripper_pose = None  # type: ignore[assignment]


class NoGripper(Depths):
    gripper_pose = None  # type: ignore[assignment]


class Flat(Depths):
    def camera_model(self, name):
        return np.eye(4), np.eye(4)


class Unknown(Depths):
    def camera_model(self, name):
        return {}[name]


def config_of(kind="Depths", **settings) -> GymConfig:
    return GymConfig(name=f"{__name__}:{kind}", **{"points": 40} | settings)


def points_of(**settings) -> np.ndarray:
    backend = SerialBackend(config_of(**settings), 1)
    return backend.reset(EpisodeSeeds(0))["points"][0]


# x or y of pixel centres at depth 2: (0.5 - 2) / 4 * 2, ...
ROWS = np.array([-0.75, -0.25, 0.25, 0.75])


def test_all_pixels_of_all_cameras_become_points_with_their_colours():
    cloud = points_of(points=32)
    expected = sorted((x + 10 * k, y, 2.0, g, g, g) for k, g in ((0, 0.2), (1, 1.0)) for x in ROWS for y in ROWS)
    np.testing.assert_allclose(sorted(map(tuple, cloud.tolist())), expected, rtol=1e-6)


def test_settings_crop_and_choose_the_frame():
    box = {"points": 16, "points_low": [9, -1, 0], "points_high": [11, 1, 3]}
    cloud = points_of(**box)
    assert cloud[:, 0].min() == 9.25 and (cloud[:, 3:] == 1).all() and len(np.unique(cloud, axis=0)) == 16
    # the gripper's x axis is the world's y axis, its y axis the world's -x axis
    seen = points_of(**box, points_frame="gripper")
    np.testing.assert_allclose(seen[:, :3], np.stack([cloud[:, 1], -cloud[:, 0], cloud[:, 2] - 1], 1))


def test_points_follow_the_steps_and_depth_is_an_observation_only_by_its_role():
    backend = SerialBackend(config_of(roles={"wrist_depth": "depth/wrist"}), 2)
    assert set(backend.spec.observation) == {"image/head", "image/wrist", "depth/wrist", "points"}
    assert backend.spec.observation["points"] == ((40, 6), "float32")
    assert (backend.reset(EpisodeSeeds(0))["points"][..., 2] == 2).all()
    step = backend.step(np.zeros((2, 3, 2), np.float32))
    assert (step.observation["points"][..., 2] == 5).all() and (step.observation["depth/wrist"] == 5).all()


def test_images_and_depths_of_decisions_are_drawn_once():
    backend = SerialBackend(config_of(kwargs={"lazy": True}), 1)
    env = backend.robots[0].env
    backend.reset(EpisodeSeeds(0))
    backend.step(np.zeros((1, 4, 2), np.float32))
    assert sorted(env.drawn) == sorted(["head", "head_depth", "wrist", "wrist_depth"] * 2)


def test_workers_give_the_same_points_as_one_process():
    serial, workers = SerialBackend(config_of(), 2), ProcessBackend(config_of(workers=2), 2)
    try:
        for backend in (serial, workers):
            backend.reset(EpisodeSeeds(0))
        steps = [backend.step(np.zeros((2, 1, 2), np.float32)) for backend in (serial, workers)]
        np.testing.assert_array_equal(*(step.observation["points"] for step in steps))
    finally:
        workers.close()


def test_points_have_no_colours_without_an_image_of_the_same_size():
    assert points_of(kwargs={"image": (8, 8, 3)}).shape == (40, 3)
    assert points_of(roles={"head": "ignore"}).shape == (40, 3)
    # one camera only
    assert points_of(roles={"head": "ignore", "head_depth": "ignore"}).shape == (40, 6)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("NoMethods", {}, r"has no method camera_model\(name\) -> \(intrinsics \[3, 3\], pose \[4, 4\]\); add it"),
        ("NoGripper", {"points_frame": "gripper"}, r"has no method gripper_pose\(\) .*or set env.points_frame=world"),
        ("Depths", {"roles": {"head_depth": "ignore", "wrist_depth": "ignore"}}, "has no depth; adapters add them by"),
        ("Depths", {"kwargs": {"wrist": (4, 5)}}, r"several sizes \(depth/head \[4, 4\], depth/wrist \[4, 5\]\)"),
        (
            "Depths",
            {"roles": {"wrist_depth": "depth/head"}},
            "'head_depth' and 'wrist_depth' .* the same role depth/head",
        ),
    ],
)
def test_what_an_env_lacks_is_reported(kind, settings, message):
    with pytest.raises(UserError, match=message):
        GymRobot(config_of(kind, **settings))


def test_points_of_its_own_and_stacks_are_refused():
    own = {"roles": {"head_depth": "points", "head": "ignore"}, "kwargs": {"head": (4, 3)}}
    with pytest.raises(UserError, match=r"'head_depth'|\[P, 3 or 6\]"):
        GymRobot(config_of(**own))
    gymnasium.register("Stacked-v0", lambda: gymnasium.wrappers.FrameStackObservation(Depths(), 2))
    with pytest.raises(UserError, match="env.points=40: gym:Stacked-v0 stacks frames"):
        GymRobot(GymConfig(name="gym:Stacked-v0", points=40))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("Flat", r"camera_model\('head'\)\[0\] .* expected finite numbers \[3, 3\]"),
        ("Unknown", r"camera_model\('head'\) .* failed: KeyError: 'head' .*; expected \(intrinsics \[3, 3\], pose"),
    ],
)
def test_wrong_camera_models_are_reported(kind, message):
    with pytest.raises(UserError, match=message):
        SerialBackend(config_of(kind), 1).reset(EpisodeSeeds(0))


def test_a_box_without_volume_is_refused():
    assert config_of(points_low=[0, 0, 0]).points_high is None
    with pytest.raises(ValueError, match=r"expected more than points_low=\[0.0, 0.0, 0.0\] in x, y and z"):
        config_of(points_low=[0, 0, 0], points_high=[1, 0, 1])


def test_check_shows_the_points(capsys):
    main(["check", f"{__name__}:Depths", "env.points=64", "rollout.max_episode_steps=5"])
    printed = capsys.readouterr().out
    assert "observation/points: [64, 6] float32" in printed
    assert (
        "role of 'head_depth': Box [4, 4, 1] float32 -> points, 64 of all depths, with colours, in the frame" in printed
    )


def meta_world(**settings) -> tuple[GymRobot, dict[str, np.ndarray]]:
    pytest.importorskip("metaworld", reason="needs Meta-World: docs/simulators.md")
    cameras = ["corner", "corner2", "topview"]
    kwargs = {"cameras": cameras, "depth": True, "image_size": 128}
    robot = GymRobot(GymConfig(name="metaworld:drawer-open-v3", kwargs=kwargs, **settings))
    robot.reset(0)
    if robot.render() is None:
        pytest.skip(robot.no_picture)
    return robot, {key: np.zeros((1, *shape), dtype) for key, (shape, dtype) in robot.spec.observation.items()}


def test_cameras_of_meta_world_agree():
    from sparring.envs.points import point_clouds

    robot, _ = meta_world()
    on_table = {"low": [-0.5, 0.4, -0.3], "high": [0.5, 0.8, 0.01]}
    views = {}
    for name in ("corner", "corner2", "topview"):
        image, depth = robot.env._views.draw(name, 128)
        views[name] = (depth, *robot.env.camera_model(name))
        depth, intrinsics, pose = views[name]
        # the top of the table is at z = 0
        top = point_clouds(depth[None, None], intrinsics[None], pose[None, None], 2000, **on_table)[0]
        assert len(np.unique(top, axis=0)) > 600 and (abs(top[:, 2]) < 1e-4).mean() > 0.95
    # what one camera sees is at the same place for the others, or hidden behind something nearer
    for first, second in (("corner", "corner2"), ("corner2", "topview"), ("topview", "corner")):
        depth, intrinsics, pose = views[first]
        box = {"low": [-0.3, 0.4, 0.01], "high": [0.3, 0.9, 0.5]}
        world = np.unique(point_clouds(depth[None, None], intrinsics[None], pose[None, None], 2000, **box)[0], axis=0)
        depth, intrinsics, pose = views[second]
        x, y, z = (np.linalg.inv(pose) @ np.c_[world, np.ones(len(world))].T)[:3]
        u, v, _ = np.floor(intrinsics @ [x / z, y / z, np.ones_like(z)]).astype(int)
        shown = (z > 0) & (u >= 1) & (u < 127) & (v >= 1) & (v < 127)
        assert shown.mean() > 0.9
        # the depths of a pixel and its neighbours, as the point is not at its centre
        around = np.stack([depth[v[shown] + i, u[shown] + j] for i in (-1, 0, 1) for j in (-1, 0, 1)])
        assert (abs(around - z[shown]).min(0) < 0.02).mean() > 0.5
        assert (around.min(0) < z[shown] + 0.02).all()
    robot.close()


def test_meta_world_has_points_in_the_frame_of_its_gripper():
    robot, arrays = meta_world(points=256, points_low=[-0.5, 0.3, 0.01], points_high=[0.5, 0.95, 0.6])
    robot.write(arrays, 0)
    world = arrays["points"][0].copy()
    assert world.shape == (256, 6) and (world[:, :3] > [-0.5, 0.3, 0.01]).all() and (world[:, :3] < 0.95).all()
    # the drawer is at x = 0, y = 0.9; the hand is above the table
    assert (np.linalg.norm(world[:, :3] - robot.env._env.tcp_center, axis=1) < 0.06).any()
    robot.close()
    robot, arrays = meta_world(
        points=256, points_low=[-0.5, 0.3, 0.01], points_high=[0.5, 0.95, 0.6], points_frame="gripper"
    )
    robot.write(arrays, 0)
    pose = robot.env.gripper_pose()
    np.testing.assert_allclose(arrays["points"][0, :, :3] @ pose[:3, :3].T + pose[:3, 3], world[:, :3], atol=1e-6)
    # fingers are beside the point between them
    assert np.linalg.norm(arrays["points"][0, :, :3], axis=1).min() < 0.06
    # depths are not observations
    assert "depth/corner" not in robot.spec.observation
    robot.close()
