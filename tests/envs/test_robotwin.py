"""RoboTwin's adapter, on a double of its repository whose signatures are those of its published source."""

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from sim_signatures import parameters

from sparring.contract import text_of
from sparring.envs.backend import EpisodeSeeds
from sparring.envs.configs import GymConfig
from sparring.envs.gym import GymRobot
from sparring.envs.sims import robotwin
from sparring.envs.workers import WORKER, ProcessBackend

DOUBLE = Path(__file__).parents[1] / "doubles" / "robotwin_repo"
# of github.com/RoboTwin-Platform/RoboTwin at commit cf47ab5697c81c39f78522ba24102f789b6bce5e
SIGNATURES = {
    "envs/_base_task.py": {
        "Base_Task._init_task_env_": ["self", "table_xy_bias", "table_height_bias", "**kwags"],
        "Base_Task.load_robot": ["self", "**kwags"],
        "Base_Task._update_render": ["self"],
        "Base_Task.get_obs": ["self"],
        "Base_Task.get_arm_pose": ["self", "arm_tag"],
        "Base_Task.close_env": ["self", "clear_cache"],
        "Base_Task.take_action": ["self", "action", "action_type"],
    },
    "envs/beat_block_hammer.py": {"beat_block_hammer.setup_demo": ["self", "**kwags"]},
    "envs/robot/robot.py": {
        "Robot.__init__": ["self", "scene", "need_topp", "**kwargs"],
        "Robot.set_planner": ["self", "scene"],
        "Robot.get_left_arm_jointState": ["self"],
        "Robot.get_right_arm_jointState": ["self"],
        "Robot.get_left_tcp_pose": ["self"],
        "Robot.get_right_tcp_pose": ["self"],
    },
    "envs/robot/planner.py": {
        "MplibPlanner.__init__": [
            *("self", "urdf_path", "srdf_path", "move_group", "robot_origion_pose", "robot_entity", "planner_type"),
            "scene",
        ],
        "MplibPlanner.plan_grippers": ["self", "now_val", "target_val"],
    },
}


@pytest.fixture
def worker(monkeypatch):
    """A process like a worker's: the adapter changes its folder, its sys.path and its GPU."""
    monkeypatch.setenv(WORKER, "0")
    monkeypatch.setenv("ROBOTWIN_ROOT", str(DOUBLE))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    folder, paths = os.getcwd(), list(sys.path)
    yield
    os.chdir(folder)
    sys.path[:] = paths
    for name in [name for name in sys.modules if name.partition(".")[0] == "envs"]:
        del sys.modules[name]


def robot(name="beat_block_hammer", **kwargs) -> GymRobot:
    return GymRobot(GymConfig(name=f"robotwin:{name}", kwargs=kwargs))


def joints(one) -> np.ndarray:
    return one._observation["state"][:4]


@pytest.mark.parametrize(("file", "name"), [(file, name) for file, found in SIGNATURES.items() for name in found])
def test_the_double_has_the_signatures_of_robotwin(file, name):
    assert parameters(DOUBLE / file, name) == SIGNATURES[file][name]


@pytest.mark.sims
def test_the_signatures_are_those_of_the_repository():
    if "ROBOTWIN_ROOT" not in os.environ:
        pytest.skip("needs RoboTwin's repository in ROBOTWIN_ROOT: docs/simulators.md")
    for file, functions in SIGNATURES.items():
        assert {name: parameters(Path(os.environ["ROBOTWIN_ROOT"], file), name) for name in functions} == functions


@pytest.mark.parametrize(
    ("visible", "number", "rank", "ranks", "expected"),
    [
        ("4,5,6", 0, 0, 1, "4"),
        ("4,5,6", 4, 0, 1, "5"),
        # each of two processes of --gpus has half of the GPUs for its workers
        ("4,5,6,7", 0, 1, 2, "5"),
        ("4,5,6,7", 1, 1, 2, "7"),
        ("3", 1, 1, 2, "3"),
        ("", 1, 0, 1, ""),
    ],
)
def test_each_worker_gets_one_gpu(monkeypatch, visible, number, rank, ranks, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv(WORKER, str(number))
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    for _ in range(2):  # a worker makes several robots
        robotwin._choose_gpu()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


def test_a_relative_root_also_serves_the_second_robot_of_a_worker(worker, monkeypatch):
    monkeypatch.chdir(DOUBLE.parent)
    for _ in range(2):  # the first one changes the folder
        assert robot(root=DOUBLE.name, cameras=[]).spec.action_dim == 4


def test_gpus_are_counted_if_none_are_selected(monkeypatch, tmp_path):
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(robotwin, "_GPUS", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")  # monkeypatch restores it
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv(WORKER, "3")
    robotwin._choose_gpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"


def test_the_gpu_is_chosen_before_robotwin_is_imported(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    config = GymConfig(name="robotwin:beat_block_hammer", workers=2, kwargs={"root": str(DOUBLE), "cameras": []})
    backend = ProcessBackend(config, 2)
    try:
        shown = backend.reset(EpisodeSeeds(0, total_envs=2))
        # the double puts the GPU that it saw at import into the poses of the hands
        assert shown["state"][:, 4].tolist() == [4, 5]
        step = backend.step(np.array([[[0.5, 0.0, 0.5, 0.0]], [[1.0, 0.0, 1.0, 0.0]]], np.float32))
        assert step.success.tolist() == [False, True] and step.reward[:, 0].tolist() == [0, 1]
    finally:
        backend.close()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5"


def test_observations_instructions_and_limits(worker, capsys):
    one = robot(depth=True)
    assert one.spec.max_episode_steps == 400 and one.spec.action_dim == 4
    assert one.spec.observation["state"] == ((18,), "float32")
    one.reset(0)
    arrays = {key: np.zeros((1, *shape), dtype) for key, (shape, dtype) in one.spec.observation.items()}
    looked = one.env.inner.looked
    one.write(arrays, 0)
    assert one.env.inner.looked == looked + 1  # once for all cameras
    assert text_of(arrays["instruction"][0]) == "use the arm to grab the hammer and beat the block"
    assert arrays["image/head_camera"].shape == (1, 3, 12, 16) and (arrays["image/head_camera"] == 20).all()
    assert (arrays["depth/right_camera"] == 1.25).all()
    one.step([np.zeros(4, np.float32)] * 3, np.zeros(3))
    assert one.env.inner.looked == looked + 1  # only the observations of decisions are drawn
    assert one.render().shape == (24, 32, 3) and capsys.readouterr().out == ""


def test_targets_and_displacements_of_joints(worker):
    one = robot(cameras=[])
    one.reset(0)
    # [-1, 1] is the range of the joints, -3 to 2, and of the grippers, 0 to 1
    one.step(one.actions.decode(np.array([[[-1, 1, 0.4, 0]]]))[0], np.zeros(1))
    np.testing.assert_allclose(joints(one), [-3, 1, 0.5, 0.5])
    other = robot(cameras=[], control_mode="delta_qpos", delta=0.2)
    other.reset(0)
    before = joints(other)
    other.step(other.actions.decode(np.array([[[1, 1, -0.5, -1]]]))[0], np.zeros(1))
    np.testing.assert_allclose(joints(other), [before[0] + 0.2, 1, before[2] - 0.1, 0], atol=1e-6)


def test_the_planner_is_made_only_for_poses_of_the_hands(worker):
    one = robot(cameras=[], control_mode="delta_qpos")
    compiled = sys.modules["envs.robot.robot"].COMPILED
    assert not compiled and one.env.inner.need_plan is False
    assert one.env.inner.robot.left_planner is one.env.inner.robot.left_mplib_planner


def test_poses_of_the_hands_are_planned(worker):
    one = robot(cameras=[], control_mode="ee")
    assert sys.modules["envs.robot.robot"].COMPILED == [True] and one.env.inner.need_plan is True
    assert one.spec.action_dim == 16 and one.env.action_space.low.tolist() == ([-1] * 7 + [0]) * 2
    one.reset(0)
    assert one.step([np.full(16, 0.5, np.float32)], np.zeros(1)) == (1, False, False, False)


def test_unstable_starts_are_skipped_and_starts_depend_on_the_seed(worker):
    one, starts = robot(cameras=[]), []
    for seed in (1, 2, 3, 1):
        one.reset(seed)
        starts.append(float(joints(one)[0]))
        assert one.env.inner.arguments["seed"] % 2 == 0
    assert starts[0] == starts[3] and len(set(starts)) == 3
    assert one.env.inner.opened > 5 and one.env.inner.closed == one.env.inner.opened - 1


def test_success_ends_the_episode_and_a_restored_state_continues_it(worker):
    one = robot(cameras=[])
    one.reset(3)
    one.step([np.array([0.5, 0, 1.5, 0], np.float32)], np.zeros(1))
    saved = one.state()
    other, reward = robot(cameras=[]), np.zeros(1)
    other.set_state(saved)
    assert other.env.inner.robot.q == [0.5, 0, 1.5, 0] and other._elapsed == 1
    assert other.step([np.array([1.5, 0, 1.5, 0], np.float32)], reward) == (1, True, False, True) and reward[0] == 1


def test_poses_of_cameras_and_grippers(worker):
    env = robot().env
    intrinsics, pose = env.camera_model("head_camera")
    assert intrinsics.tolist() == [[20, 0, 0], [0, 20, 0], [0, 0, 1]] and (pose == np.eye(4)).all()
    turned = [[0, -1, 0, 1], [1, 0, 0, 2], [0, 0, 1, 3], [0, 0, 0, 1]]
    np.testing.assert_allclose(env.gripper_pose(), turned, atol=1e-12)
    np.testing.assert_allclose(env.gripper_pose("right")[:3], np.eye(4)[:3] + [[0, 0, 0, x] for x in (-1, 2, 3)])


def test_settings_replace_those_of_the_task_config(worker):
    one = robot(cameras=[], settings={"domain_randomization": {"random_light": True}})
    assert one.env.inner.arguments["domain_randomization"] == {"random_light": True}


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("beat_block_hammer", {"root": "/nowhere"}, "'/nowhere' is not the folder of RoboTwin; git clone"),
        ("juggle", {}, "robotwin:juggle is unknown; RoboTwin has beat_block_hammer"),
        ("beat_block_hammer", {"task_config": "demo"}, "task_config='demo' is unknown; RoboTwin has demo_clean"),
        ("beat_block_hammer", {"cameras": "top"}, "'top' is unknown; RoboTwin has left_camera, right_camera, head"),
        ("beat_block_hammer", {"control_mode": "pose"}, "control_mode='pose'; expected qpos or delta_qpos or ee"),
    ],
)
def test_wrong_names_and_arguments_are_refused(worker, name, kwargs, message):
    with pytest.raises(ValueError, match=message):
        robot(name, **kwargs)


def test_missing_assets_are_named(worker, tmp_path):
    copy = shutil.copytree(DOUBLE, tmp_path / "repo", ignore=shutil.ignore_patterns("assets", "__pycache__"))
    with pytest.raises(ValueError, match="RoboTwin's assets are missing: .*; bash scripts/_download_assets.sh"):
        robot(root=str(copy))


def test_it_runs_in_workers_only(monkeypatch):
    monkeypatch.delenv(WORKER, raising=False)
    with pytest.raises(ValueError, match="RoboTwin needs env.vectorize=process: it changes the folder and the GPU"):
        robot(root=str(DOUBLE))
