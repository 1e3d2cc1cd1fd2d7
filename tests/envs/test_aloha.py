"""gym-aloha through its adapter: joint targets, success, cameras and exact states."""

import numpy as np
import pytest
from gym_doubles import observed

from sparring.cli.main import main
from sparring.envs.configs import GymConfig
from sparring.envs.gym import GymRobot
from sparring.envs.sims.aloha import TASKS

pytestmark = pytest.mark.sims
mujoco = pytest.importorskip("mujoco")
if not mujoco.__version__.startswith("3."):
    pytest.skip(f"gym-aloha 0.1.5 needs mujoco 3.8.1, here is {mujoco.__version__}", allow_module_level=True)
pytest.importorskip("gym_aloha", reason="needs gym-aloha: docs/simulators.md")
CUBE, PEG = TASKS
CAMERAS = ["top", "angle", "left_wrist", "right_wrist"]


def robot(name=CUBE, **kwargs) -> GymRobot:
    return GymRobot(GymConfig(name=f"aloha:{name}", kwargs=kwargs))


def play(one, steps, seed=0):
    """(reward, success, state) of each step, of small random movements."""
    found, reward, rng = [], np.zeros(1, np.float32), np.random.default_rng(seed)
    for _ in range(steps):
        target = one.env._observed()["state"][:14] + 0.1 * rng.standard_normal(14)
        _, _, _, success = one.step([target.astype(np.float32)], reward)
        found.append((float(reward[0]), success, one._observation["state"].tolist()))
    return found


@pytest.mark.parametrize("name", TASKS)
def test_a_restored_state_continues_bit_identically(name):
    one, other = robot(name), robot(name)
    one.reset(5)
    play(one, 20)
    saved = one.state()
    expected = play(one, 50, seed=1)
    other.reset(9)
    play(other, 7, seed=2)
    other.set_state(saved)
    assert play(other, 50, seed=1) == expected


def test_starts_depend_on_the_seed_alone_also_in_the_same_process():
    one, other = robot(), robot(PEG)
    one.reset(3)
    first = one._observation["state"]
    other.reset(4)  # gym-aloha keeps the next start in a variable of its module
    one.reset(4)
    assert not np.array_equal(one._observation["state"], first)
    one.reset(3)
    assert np.array_equal(one._observation["state"], first)


def test_the_state_has_joints_and_objects_and_actions_reach_the_start_pose():
    full, own, pegs = robot(), robot(state="robot"), robot(PEG)
    for each in (full, own, pegs):
        each.reset(1)
    state = full._observation["state"]
    assert own._observation["state"].tolist() == state[:14].tolist() and len(state) == 21
    assert pegs._observation["state"].shape == (28,)
    # x in 0..0.2, y in 0.4..0.6, as gym-aloha draws them
    assert 0 <= state[14] <= 0.2 and 0.4 <= state[15] <= 0.6 and state[17:].tolist() == [1, 0, 0, 0]
    low, high = full.env.action_space.low, full.env.action_space.high
    assert (low[:14] <= state[:14]).all() and (state[:14] <= high[:14]).all()
    # the elbow starts at 1.16 rad, outside of gym-aloha's own action space of -1..1
    assert np.isclose(state[2], 1.16) and (low[6], high[6], low[13], high[13]) == (0, 1, 0, 1)
    for _ in range(50):
        full.step([state[:14].astype(np.float32)], np.zeros(1))
    assert np.abs(full._observation["state"][:6] - state[:6]).max() < 0.05


@pytest.mark.parametrize(("kind", "rewards"), [("dense", [0, 2, 4]), ("sparse", [0, 0, 1])])
def test_rewards_and_success_are_those_of_gym_aloha(kind, rewards):
    one = robot(reward=kind)
    one.reset(0)
    hold, found, of_task = one._observation["state"][:14].astype(np.float32), [], [0, 2, 4]
    one.env.inner._env.task.get_reward = lambda physics: of_task[len(found)]
    for given in of_task:
        reward = np.zeros(1)
        _, terminated, _, success = one.step([hold], reward)
        assert terminated == success == (given == 4)
        found.append(reward[0])
    assert found == rewards


def test_a_simulation_that_diverges_ends_the_episode():
    one, rng, ended = robot(PEG), np.random.default_rng(2), False
    one.reset(2)
    for _ in range(300):
        before = one._observation["state"]
        target = rng.uniform(one.env.action_space.low, one.env.action_space.high).astype(np.float32)
        _, ended, _, success = one.step([target], np.zeros(1))
        if ended:
            break
    # it is observed and drawn as it was before the step that diverged
    assert ended and not success and np.array_equal(one._observation["state"], before)
    assert np.array_equal(one.env._simulation[1].qpos[:6], before[:6])
    one.reset(2)
    assert len(play(one, 3)) == 3


def test_only_the_frames_of_decisions_are_drawn(monkeypatch):
    one, drawn = robot(cameras=CAMERAS, image_size=32), []
    frame = np.zeros((32, 32, 3), np.uint8), np.ones((32, 32), np.float32)
    one.env._views.draw = lambda camera, size: drawn.append(camera) or frame
    # its own step draws three images
    physics = one.env.inner._env.physics
    monkeypatch.setattr(type(physics), "render", lambda *args, **kwargs: pytest.fail("gym-aloha drew an image"))
    one.reset(0)
    observed(one)
    one.step([one._observation["state"][:14].astype(np.float32)] * 4, np.zeros(4))
    observed(one)
    assert drawn == sorted(CAMERAS) * 2


def test_images_are_upright_and_depth_is_in_metres():
    one = robot(cameras=["top", "angle"], image_size=128, depth=True)
    one.reset(3)
    if one.render() is None:
        pytest.skip(one.no_picture)
    shown, cube = observed(one), one._observation["state"][14:17]
    for camera in ("top", "angle"):
        intrinsics, pose = one.env.camera_model(camera)
        at = pose[:3, :3].T @ (cube - pose[:3, 3])
        column, row = (intrinsics @ at / at[2])[:2].astype(int)
        red, *others = shown[f"image/{camera}"][:, row, column].astype(int)
        assert red > 150 and max(others) < 60
        # its sides are 4 cm
        assert 0 < at[2] - shown[f"depth/{camera}"][0, row, column] < 0.04
    assert one.env.gripper_pose()[0, 3] > 0.1  # the right arm stands at x = 0.47 m
    one.close()


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("AlohaFold-v0", {}, "aloha:AlohaFold-v0 is unknown; expected AlohaTransferCube-v0, AlohaInsertion-v0"),
        (CUBE, {"cameras": ["wrist"]}, "'wrist' is unknown; this env has .*top, angle"),
        (CUBE, {"state": "pixels"}, "state='pixels'; expected full"),
        (CUBE, {"reward": "best"}, "reward='best'; expected dense or sparse"),
        (CUBE, {"view": 1}, "unexpected keyword argument 'view'"),
    ],
)
def test_wrong_names_and_arguments_are_refused(name, kwargs, message):
    with pytest.raises(ValueError, match=message):
        robot(name, **kwargs)


def test_check_finds_nothing_wrong(capsys):
    assert main(["check", f"aloha:{CUBE}", "rollout.max_episode_steps=8"]) == 0, capsys.readouterr().out
    assert "role of 'state': Box [21] float64 -> state, 21 numbers" in capsys.readouterr().out
    spec = robot().spec
    assert spec.max_episode_steps == 300 and spec.control_hz == 50 and spec.action_dim == 14
