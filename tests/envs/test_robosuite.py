"""robosuite through its adapter: observations, success, cameras, point clouds, exact states, the expert of Lift."""

import logging
import random

import numpy as np
import pytest
from gym_doubles import observed

from sparring.cli.main import main
from sparring.contract import text_of
from sparring.envs.backend import EpisodeSeeds
from sparring.envs.configs import GymConfig
from sparring.envs.gym import GymRobot
from sparring.envs.gym_batch import SerialBackend
from sparring.envs.sims.robosuite import INSTRUCTIONS, import_robosuite, is_old

pytestmark = pytest.mark.sims
mujoco = pytest.importorskip("mujoco")
if not mujoco.__version__.startswith("3."):
    pytest.skip(f"robosuite 1.5.2 needs mujoco 3.8.1, here is {mujoco.__version__}", allow_module_level=True)
pytest.importorskip("robosuite", reason="needs robosuite: docs/simulators.md")
if is_old(import_robosuite()):
    pytest.skip("tests of robosuite 1.5.2; here is an older one, for MimicGen", allow_module_level=True)


def robot(name="Lift", points=0, **kwargs) -> GymRobot:
    return GymRobot(GymConfig(name=f"robosuite:{name}", kwargs=kwargs, points=points))


def play(one, steps, seed=0):
    """(reward, success, state) of each of some random steps."""
    found, reward, rng = [], np.zeros(1, np.float32), np.random.default_rng(seed)
    for _ in range(steps):
        (actions,) = one.actions.decode(rng.uniform(-1, 1, (1, 1, one.actions.dim)))
        _, _, _, success = one.step(actions, reward)
        found.append((float(reward[0]), success, one._observation["state"].tolist()))
    return found


def test_every_task_of_robosuite_has_an_instruction():
    from robosuite.environments.base import REGISTERED_ENVS

    registered = {name for name, made in REGISTERED_ENVS.items() if made.__module__.startswith("robosuite.")}
    assert registered == set(INSTRUCTIONS) and max(map(len, INSTRUCTIONS.values())) <= 128


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("Lift", {}),
        ("Door", {}),
        ("NutAssemblySingle", {}),  # draws a nut in each episode
        ("PickPlaceSingle", {}),  # makes some observations from earlier ones
        ("TwoArmHandover", {}),
        ("Lift", {"controller": "JOINT_POSITION", "robots": "Sawyer", "control_freq": 10}),
        ("Lift", {"controller": "WHOLE_BODY_IK"}),
    ],
)
def test_a_restored_state_continues_bit_identically(name, kwargs):
    one, other = robot(name, **kwargs), robot(name, **kwargs)
    one.reset(5)
    play(one, 20)
    saved = one.state()
    assert not any(array.dtype.hasobject for array in saved.values())  # checkpoints cannot hold them
    expected = play(one, 50, seed=1)
    other.reset(9)
    play(other, 7, seed=2)
    other.set_state(saved)
    assert play(other, 50, seed=1) == expected


def test_a_restored_state_of_wipe_has_the_markers_that_are_wiped():
    one, other, reward = robot("Wipe"), robot("Wipe"), np.zeros((2, 10))
    one.reset(1)
    inner = one.env.inner
    inner.wiped_markers += inner.model.mujoco_arena.markers[3:5]
    down = np.array([0, 0, -1, 0, 0, 0], np.float32)
    for _ in range(12):  # down to the table: the reward has the force
        one.step([down], reward[0])
    other.set_state(one.state())
    wiped = [marker.root_body for marker in inner.wiped_markers]
    assert len(wiped) >= 2 and [marker.root_body for marker in other.env.inner.wiped_markers] == wiped
    for each, rewards in zip((one, other), reward, strict=True):
        for step in range(10):
            each.step([down], rewards[step : step + 1])
    assert reward[0].tolist() == reward[1].tolist() and len(set(reward[0])) > 5


def test_wipe_ends_where_robosuite_ends_it(monkeypatch):
    one = robot("Wipe")
    one.reset(1)
    still = [np.zeros(6, np.float32)]
    assert one.step(still, np.zeros(1))[1:] == (False, False, False)
    monkeypatch.setattr(one.env.inner, "_check_terminated", lambda: True)
    assert one.step(still, np.zeros(1))[1:] == (True, False, False)


def test_cameras_on_the_hand_are_of_the_latest_step():
    one = robot()
    one.reset(1)
    one.step([np.array([1, 1, -1, 0, 0, 0, 1], np.float32)] * 5, np.zeros(5))
    _, seen = one.env.camera_model("robot0_eye_in_hand")
    mujoco.mj_forward(*one.env._simulation)
    assert np.allclose(one.env.camera_model("robot0_eye_in_hand")[1], seen, rtol=0, atol=1e-12)


def test_robosuite_logs_have_one_filter():
    before = len(logging.getLogger("robosuite_logs").filters)
    import_robosuite()
    assert len(logging.getLogger("robosuite_logs").filters) == before


def test_starts_depend_on_the_seed_alone():
    one, other = robot("NutAssemblySingle"), robot("NutAssemblySingle")
    before = random.getstate(), np.random.get_state()[1].tolist()
    one.reset(3)
    first = play(one, 5)
    one.reset(4)
    assert play(one, 5) != first
    other.reset(3)
    assert play(other, 5) == first
    # the generators of this process are not those of the env
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_the_state_is_that_of_the_latest_step_and_ends_with_the_objects():
    full, own = robot(), robot(state="robot")
    for each in (full, own):
        each.reset(1)
        for _ in range(18):  # the expert reaches the cube and moves it
            each.step([each.env.expert_action()], np.zeros(1))
    state, data = full._observation["state"], full.env.inner.sim.data
    assert own._observation["state"].tolist() == state[:32].tolist()
    joints = data.qpos[:7]
    assert state[:21].tolist() == [*np.cos(joints), *np.sin(joints), *data.qvel[:7]]
    assert state[21:24].tolist() == full.env.gripper_pose()[:3, 3].tolist()
    # [42]: 32 of the robot, position and quaternion of the cube, gripper to cube
    cube = data.get_joint_qpos("cube_joint0")
    assert state[32:35].tolist() == cube[:3].tolist() and len(state) == 42
    assert np.allclose(state[39:42], cube[:3] - state[21:24], atol=1e-12)


def test_rewards_are_dense_or_end_the_episode():
    dense, sparse = robot(), robot(reward="sparse")
    for each in (dense, sparse):
        each.reset(2)
    rewards = np.zeros((2, 60))
    for step in range(60):
        action = [dense.env.expert_action()]
        if not rewards[1].any():
            _, terminated, _, success = sparse.step(action, rewards[1, step : step + 1])
            assert terminated == success == (rewards[1, step] == 1)
        _, terminated, _, success = dense.step(action, rewards[0, step : step + 1])
        assert not terminated and success == rewards[1].any()
    first = int(np.argmax(rewards[1]))
    # dense: robosuite's own, up to 1 once the cube is lifted
    assert 15 < first < 40 and rewards[1].sum() == 1
    assert (rewards[0, :first] < 1).all() and (rewards[0, first:] == 1).all()


def test_the_expert_of_lift_succeeds_from_every_start():
    one = robot(reward="sparse")
    for seed in range(8):
        one.reset(seed)
        assert any(one.step([one.env.expert_action()], np.zeros(1))[3] for _ in range(40))
    assert not hasattr(robot(controller="OSC_POSITION").env, "expert_action")


def test_cameras_have_the_geometry_that_robosuite_computes():
    pytest.importorskip("h5py", reason="robosuite's camera functions need h5py")
    from robosuite.utils.camera_utils import get_camera_extrinsic_matrix, get_camera_intrinsic_matrix

    one = robot(cameras=["frontview", "robot0_eye_in_hand"], image_size=48)
    one.reset(0)
    play(one, 5)
    sim = one.env.inner.sim
    sim.forward()
    for camera in ("frontview", "robot0_eye_in_hand"):
        intrinsics, pose = one.env.camera_model(camera)
        assert np.allclose(intrinsics, get_camera_intrinsic_matrix(sim, camera, 48, 48))
        assert np.allclose(pose, get_camera_extrinsic_matrix(sim, camera), atol=1e-9)


def test_images_are_upright_and_depth_is_in_metres():
    one = robot(cameras=["agentview", "frontview"], image_size=128, depth=True)
    one.reset(3)
    if one.render() is None:
        pytest.skip(one.no_picture)
    shown, cube = observed(one), one.env.inner.sim.data.get_joint_qpos("cube_joint0")[:3]
    for camera in ("agentview", "frontview"):
        intrinsics, pose = one.env.camera_model(camera)
        # the cube in the frame of the camera, and its pixel
        at = pose[:3, :3].T @ (cube - pose[:3, 3])
        column, row = (intrinsics @ at / at[2])[:2].astype(int)
        red, *others = shown[f"image/{camera}"][:, row, column].astype(int)
        assert red > max(others) + 40
        # its nearest surface is at most half a diagonal before its middle
        assert 0 < at[2] - shown[f"depth/{camera}"][0, row, column] < 0.04
    one.close()


def test_point_clouds_have_the_cube_where_it_is():
    config = GymConfig(name="robosuite:Lift", kwargs={"cameras": ["agentview"], "depth": True}, points=256)
    box = {"points_low": (-0.3, -0.3, 0.81), "points_high": (0.3, 0.3, 1.2)}
    one = GymRobot(config.model_copy(update=box))
    one.reset(3)
    if one.render() is None:
        pytest.skip(one.no_picture)
    points, cube = observed(one)["points"], one.env.inner.sim.data.get_joint_qpos("cube_joint0")[:3]
    red = points[(points[:, 3] > 0.4) & (points[:, 4] < 0.25), :3]
    # its sides are 4.0 to 4.4 cm, and it is turned
    assert len(red) > 10 and (np.abs(red - cube) < [0.032, 0.032, 0.023]).all()
    assert points[:, 2].min() > 0.81 and points[:, 2].max() - 0.9 > 0.05  # no table, and the gripper above
    one.close()


def test_only_the_frames_of_decisions_are_drawn():
    one, drawn = robot(cameras=["agentview"], image_size=32, depth=True), []
    frame = np.zeros((32, 32, 3), np.uint8), np.ones((32, 32), np.float32)
    one.env._views.draw = lambda camera, size: drawn.append(camera) or frame
    one.reset(0)
    observed(one)
    one.step(list(np.zeros((4, 7), np.float32)), np.zeros(4))
    shown = observed(one)
    assert drawn == ["agentview"] * 2 and (shown["depth/agentview"] == 1).all()


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("Lfit", {}, "robosuite:Lfit is unknown; expected Lift, Stack"),
        ("Lift", {"robots": "Pandas"}, "'Pandas' is unknown; robosuite has .*Panda,"),
        ("TwoArmLift", {"robots": "Panda"}, "robosuite refuses TwoArmLift with robots=.* must be bimanual"),
        ("Lift", {"controller": "OSC"}, "controller='OSC' is unknown; robosuite has .*OSC_POSE, IK_POSE, BASIC"),
        ("Lift", {"cameras": "head"}, "'head' is unknown; this env has frontview, birdview, agentview"),
        ("Lift", {"state": "images"}, "state='images'; expected full"),
        ("Lift", {"reward": "shaped"}, "reward='shaped'; expected dense"),
        ("Lift", {"image_size": 2}, "image_size=2; expected a whole number of pixels, 8 to 4096"),
        ("Lift", {"image_size": 64.0}, "image_size=64.0; expected a whole number"),
        ("Lift", {"depth": True}, "depth=true needs env.kwargs.cameras"),
        ("Lift", {"control_freq": 1000}, "control_freq=1000; expected actions per second, above 0 and at most 500"),
        ("Lift", {"control_freq": 333}, "control_freq=333: .* the nearest are 250, 500"),
        ("Lift", {"control_freq": "20"}, "control_freq='20'; expected actions"),
        ("Lift", {"view": 1}, "unexpected keyword argument 'view'"),
    ],
)
def test_wrong_names_and_arguments_are_refused(name, kwargs, message):
    with pytest.raises(ValueError, match=message):
        robot(name, **kwargs)


def test_check_finds_nothing_wrong_and_the_instruction_is_observed(capsys):
    assert main(["check", "robosuite:Stack", "rollout.max_episode_steps=8"]) == 0, capsys.readouterr().out
    printed = capsys.readouterr().out
    assert "role of 'state': Box [55] float64 -> state, 55 numbers" in printed
    assert "the same seed and actions give the same trajectories" in printed
    backend = SerialBackend(GymConfig(name="robosuite:Stack", kwargs={"control_freq": 10}), 1)
    shown = backend.reset(EpisodeSeeds(0))
    assert text_of(shown["instruction"][0]) == INSTRUCTIONS["Stack"] and backend.spec.control_hz == 10
    assert backend.spec.max_episode_steps == 500
