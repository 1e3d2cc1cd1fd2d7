"""ManiSkill through its adapter: observations, actions, success, cameras and exact states."""

import inspect

import numpy as np
import pytest
from maniskill_double import SIGNATURES

from sparring.envs.backend import EpisodeSeeds
from sparring.envs.configs import GymConfig
from sparring.envs.gym import GymRobot
from sparring.envs.gym_batch import SerialBackend

pytestmark = pytest.mark.sims
pytest.importorskip("mani_skill", reason="needs ManiSkill: docs/simulators.md")


def robot(name="PickCube-v1", **kwargs) -> GymRobot:
    return GymRobot(GymConfig(name=f"maniskill:{name}", kwargs=kwargs))


def play(robot, actions):
    """(reward, terminated, truncated, success, state) of each step."""
    found, reward = [], np.zeros(1, np.float32)
    for action in actions:
        _, *ends = robot.step([action], reward)
        found.append((float(reward[0]), *ends, robot._observation["state"].tolist()))
    return found


def random_actions(count, dims=8) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, (count, dims)).astype(np.float32)


def test_the_signatures_of_the_double_are_those_of_maniskill():
    from mani_skill.envs.sapien_env import BaseEnv
    from mani_skill.envs.scene import ManiSkillScene
    from mani_skill.sensors.camera import Camera

    owners = {one.__name__: one for one in (BaseEnv, ManiSkillScene, Camera)}
    for name, expected in SIGNATURES.items():
        owner, method = name.split(".")
        assert list(inspect.signature(getattr(owners[owner], method)).parameters) == expected, name


def test_observations_rewards_and_limits():
    one = robot()
    assert one.spec.observation == {"state": ((42,), "float32"), "instruction": ((256,), "uint8")}
    assert one.spec.action_dim == 8 and one.spec.max_episode_steps == 50 and one.spec.control_hz == 20
    one.reset(0)
    rewards = [reward for reward, *_ in play(one, random_actions(20))]
    assert all(0 < reward < 1 for reward in rewards) and len(set(rewards)) == 20


def test_starts_depend_on_the_seed_alone():
    one, other = robot(), robot()
    one.reset(3)
    first = one._observation["state"].copy()
    play(one, random_actions(5))
    one.reset(4)
    assert not np.array_equal(one._observation["state"], first)
    other.reset(3)
    assert np.array_equal(other._observation["state"], first)


@pytest.mark.parametrize(
    ("name", "control_mode", "dims"),
    [("PickCube-v1", None, 8), ("PushCube-v1", "pd_ee_delta_pose", 7), ("TwoRobotPickCube-v1", None, 16)],
)
def test_a_restored_state_continues_bit_identically(name, control_mode, dims):
    one, actions = robot(name, control_mode=control_mode), random_actions(40, dims)
    assert one.spec.action_dim == dims
    one.reset(5)
    play(one, actions[:25])
    saved = one.state()
    expected = play(one, actions[25:])
    other = robot(name, control_mode=control_mode)
    other.set_state(saved)
    assert play(other, actions[25:]) == expected


def closer_to_the_goal(one) -> np.ndarray:
    """An action of pd_ee_delta_pos that pushes the cube of PushCube-v1 along x: first behind it, then through it."""
    inner = one.env._inner
    hand, cube = inner.agent.tcp.pose.p[0].numpy(), inner.obj.pose.p[0].numpy()
    behind = cube + [-0.12, 0, 0]
    at_height = abs(hand[2] - 0.02) < 0.02
    if hand[0] > cube[0] - 0.06 and not at_height:
        target = np.array([behind[0], cube[1], 0.15])
    elif not at_height:
        target = np.array([behind[0], cube[1], 0.02])
    else:
        target = np.array([cube[0] + 0.2, cube[1], 0.02])
    return np.append(np.clip((target - hand) / 0.1, -1, 1), -1).astype(np.float32)


@pytest.mark.parametrize(
    ("kwargs", "ends"), [({}, (False, True)), ({"reward": "sparse"}, (True, False)), ({"at_success": "continue"}, None)]
)
def test_a_solved_task_ends_the_episode_as_asked(kwargs, ends):
    one = robot("PushCube-v1", control_mode="pd_ee_delta_pos", **kwargs)
    one.reset(1)
    for _ in range(49):
        ((reward, terminated, truncated, success, _),) = play(one, [closer_to_the_goal(one)])
        if success or terminated or truncated:
            break
    assert success and one._elapsed > 5
    assert (terminated, truncated) == (ends or (False, False))
    if kwargs.get("reward") == "sparse":
        assert reward == 1
    if not ends:
        assert play(one, [np.zeros(4, np.float32)])[0][3]  # once solved, an episode counts as a success to its end


def test_the_camera_model_and_the_depth_find_the_cube():
    one = robot(cameras="base_camera", depth=True, image_size=64)
    one.reset(2)
    assert one.render() is not None, one.no_picture
    arrays = {key: np.zeros((1, *shape), dtype) for key, (shape, dtype) in one.spec.observation.items()}
    one.write(arrays, 0)
    image, depth = arrays["image/base_camera"][0].astype(int), arrays["depth/base_camera"][0, 0]
    red = ((image[0] > 120) & (image[1:].max(0) < 60)).nonzero()  # the table is brown
    cube = one.env._inner.cube.pose.p[0].numpy()
    intrinsics, pose = one.env.camera_model("base_camera")
    seen = np.linalg.inv(pose) @ np.append(cube, 1)
    column, row, _ = intrinsics @ seen[:3] / seen[2]
    assert len(red[0]) and np.hypot(row - 0.5 - red[0].mean(), column - 0.5 - red[1].mean()) < 1.5
    # its centre is up to 4 cm behind its surface
    assert 0 < seen[2] - depth[red].mean() < 0.04
    assert one.render().shape == (256, 256, 3)


def test_the_hand_is_where_the_gripper_is():
    one = robot(control_mode="pd_ee_delta_pos")
    one.reset(0)
    before = one.env.gripper_pose()
    play(one, [np.array([0, 0, 1, 1], np.float32)] * 5)
    moved = one.env.gripper_pose()
    assert moved[2, 3] > before[2, 3] + 0.1 and np.allclose(moved[:2, 3], before[:2, 3], atol=0.02)
    assert np.allclose(moved[:3, :3] @ moved[:3, :3].T, np.eye(3), atol=1e-5) and moved[2, 2] < -0.9  # it points down


def test_only_the_frames_of_decisions_are_drawn():
    one = robot(cameras=["base_camera"], image_size=16)
    drawn, draw = [], one.env._simulation.draw
    one.env._simulation.draw = lambda camera: drawn.append(camera) or draw(camera)
    arrays = {key: np.zeros((1, *shape), dtype) for key, (shape, dtype) in one.spec.observation.items()}
    one.reset(0)
    one.write(arrays, 0)
    one.step(list(random_actions(4)), np.zeros(4))
    one.write(arrays, 0)
    assert drawn == ["base_camera"] * 2 and arrays["image/base_camera"].std() > 5


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("PickCube-v9", {}, "maniskill:PickCube-v9 is unknown; ManiSkill has .*PickCube-v1"),
        ("PickCube-v1", {"cameras": ["head"]}, "'head' is unknown; this env has base_camera"),
        ("PickCube-v1", {"state": "images"}, "state='images'; expected full or robot"),
        ("PickCube-v1", {"control_mode": "hand"}, "control_mode: hand not in supported modes"),
        ("PickCube-v1", {"depth": True}, "depth=true needs env.kwargs.cameras"),
        ("PickCube-v1", {"view": 1}, "unexpected keyword argument 'view'"),
        ("TurnFaucet-v1", {}, "download: python -m mani_skill.utils.download_asset TurnFaucet-v1"),
    ],
)
def test_wrong_names_and_arguments_are_refused(name, kwargs, message, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on standard input"))
    with pytest.raises(ValueError, match=message):
        robot(name, **kwargs)


def test_workers_give_the_same_results_as_one_process():
    from sparring.envs.workers import ProcessBackend

    config = GymConfig(name="maniskill:PickCube-v1", workers=2)
    serial, workers = SerialBackend(config, 2, 6), ProcessBackend(config, 2, 6)
    try:
        seeds, rng = EpisodeSeeds(2, total_envs=2), np.random.default_rng(0)
        assert (serial.reset(seeds)["state"] == workers.reset(seeds)["state"]).all()
        for _ in range(4):
            action = rng.uniform(-1, 1, (2, 2, 8)).astype(np.float32)
            one, other = serial.step(action), workers.step(action)
            assert (one.observation["state"] == other.observation["state"]).all()
            assert (one.reward == other.reward).all() and one.ended.tolist() == other.ended.tolist()
    finally:
        workers.close()
