import os
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from sparring.envs.backend import EpisodeSeeds, drawn
from sparring.envs.configs import TabletopConfig
from sparring.envs.registered import register
from sparring.envs.tabletop import observe
from sparring.envs.tabletop.arm import CONTROLS, HandMover
from sparring.envs.tabletop.backend import Tabletop
from sparring.envs.tabletop.tasks.base import Situation
from sparring.envs.tabletop.tasks.registry import TASKS, describe, find
from sparring.errors import UserError

REACHES = ["reach_d0", "reach_d1", "reach_d2"]


def _tabletop(num_envs=3, max_episode_steps=None, seed=0, split="train", **config):
    env = Tabletop(TabletopConfig(**{"threads": 1, **config}), num_envs, max_episode_steps)
    return env, env.reset(EpisodeSeeds(seed, split, total_envs=num_envs))


def _actions(env, steps, chunk=1, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, (steps, env.num_envs, chunk, env.spec.action_dim))


def _assert_same(one, other):
    assert one.keys() == other.keys()
    for key in one:
        np.testing.assert_array_equal(one[key], other[key], err_msg=key)


def _block(state, name):
    """A block of observation/state in metres, radians and seconds."""
    place = observe.layout()[name]
    return state[:, place] / observe.scales()[place]


def test_the_spec_matches_the_observations():
    env, observation = _tabletop(cameras=("head", "wrist"), image_size=32)
    assert list(env.spec.observation) == ["state", "image/head", "image/wrist", "task"]
    for key, (shape, dtype) in env.spec.observation.items():
        assert observation[key].shape == (3, *shape) and observation[key].dtype == dtype
    assert env.spec.control_hz == 25 and env.spec.max_episode_steps == 50 and env.spec.action_dim == 7
    step = env.step(_actions(env, 1)[0])
    assert step.reward.dtype == np.float32 and step.executed.dtype == np.int64
    hidden, _ = _tabletop(object_state="hidden")
    assert env.spec.observation["state"][0] == (36,) and hidden.spec.observation["state"][0] == (30,)


def test_the_state_follows_its_layout():
    env, observation = _tabletop()
    state = env.step(np.ones((3, 1, 7))).observation["state"]
    qpos = env._world._groups[0].physics.qpos(np.arange(3))
    np.testing.assert_allclose(_block(state, "joints"), qpos[:, :6], rtol=1e-5)
    np.testing.assert_allclose(_block(state, "fingers"), qpos[:, 6:], rtol=1e-5)
    np.testing.assert_allclose(
        _block(state, "joint_speeds"), env._world.arms(np.arange(3), speeds=True)[:, 0, :6], rtol=1e-5
    )
    # one full action moves each commanded joint by 0.05 from where the arm started
    commanded = _block(observation["state"], "joints") + 0.05
    np.testing.assert_allclose(_block(state, "commanded_joints"), commanded, atol=1e-6)
    np.testing.assert_allclose(_block(state, "commanded_fingers"), 0.04, rtol=1e-6)
    goal, hand = _block(state, "goal"), _block(state, "hand")
    np.testing.assert_allclose(_block(state, "goal_from_hand"), goal - hand, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(_block(state, "hand_axis"), axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(_block(state, "time_left"), 1 - 1 / 50, rtol=1e-6)


def test_reward_by_hand():
    hand, nothing = np.array([[0, 0, 0], [0, 0.03, 0], [1e3, 0, 0]]), np.zeros((3, 0, 3))
    now = Situation(hand[:, None], np.zeros((3, 3)), np.zeros((3, 1)), np.zeros((3, 1)), nothing, nothing)
    reward, satisfied = find("reach_d0").score(now)
    np.testing.assert_allclose(reward, [1.0, 0.7 * (1 - np.tanh(0.15)), 0.0], atol=1e-12)
    assert satisfied.tolist() == [True, False, False]


@pytest.mark.parametrize("task", ["reach_d0", "reach_d1", "reach_d2"])
def test_moving_straight_to_the_goal_succeeds(task):
    env, observation = _tabletop(20, task=task, control_mode="delta_ee_pos")
    for _ in range(50):
        towards = _block(observation["state"], "goal_from_hand") / 0.02
        step = env.step(np.concatenate([0.7 * towards, np.zeros((20, 1))], axis=1)[:, None])
        observation = step.observation
    assert step.success.all() and step.truncated.all() and not step.terminated.any()
    assert (step.reward > 0.95).all()
    # the hand still points down
    assert (_block(step.final["state"], "hand_axis")[:, 2] < -0.99).all()


def test_doing_nothing_fails():
    env, _ = _tabletop(20, task="reach_d2")
    for _ in range(50):
        step = env.step(np.zeros((20, 1, 7)))
    assert step.success.mean() < 0.2


def test_success_needs_the_last_five_steps():
    env, _ = _tabletop(2, max_episode_steps=8)
    near, far = env.situation().hand.copy(), np.full((2, 3), 0.5)
    still = np.zeros((2, 1, 7))
    for number in range(1, 9):
        # robot 0 is at its goal in steps 4..8, robot 1 in 5..8
        env._goal[0] = near[0] if number >= 4 else far[0]
        env._goal[1] = near[1] if number >= 5 else far[1]
        step = env.step(still)
    assert step.ended.tolist() == [0, 1] and step.success.tolist() == [True, False]


def test_replay_is_bit_identical():
    one, first = _tabletop(cameras=("head",), image_size=16, max_episode_steps=5)
    other, again = _tabletop(cameras=("head",), image_size=16, max_episode_steps=5)
    _assert_same(first, again)
    for action in _actions(one, 12):
        a, b = one.step(action), other.step(action)
        _assert_same(a.observation, b.observation)
        _assert_same(a.final, b.final)
        np.testing.assert_array_equal(a.reward, b.reward)


@pytest.mark.parametrize("mode", list(CONTROLS))
def test_number_of_threads_changes_nothing(mode):
    envs = [_tabletop(5, threads=threads, control_mode=mode, max_episode_steps=6)[0] for threads in (1, 2, 3)]
    for action in _actions(envs[0], 10, chunk=2):
        steps = [env.step(action) for env in envs]
        for step in steps[1:]:
            _assert_same(steps[0].observation, step.observation)
            np.testing.assert_array_equal(steps[0].reward, step.reward)


def test_set_state_restores_the_env():
    env, _ = _tabletop(max_episode_steps=7)
    actions = _actions(env, 20)
    for action in actions[:5]:
        env.step(action)
    state = env.state()
    once = [env.step(action) for action in actions[5:]]
    env.set_state(state)
    for action, before in zip(actions[5:], once, strict=True):
        after = env.step(action)
        _assert_same(before.observation, after.observation)
        np.testing.assert_array_equal(before.reward, after.reward)
        np.testing.assert_array_equal(before.success, after.success)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("command", lambda x: x[:1], "command .*shape"),
        ("elapsed", lambda x: x[:1], "elapsed .*shape"),
        ("goal", lambda x: x.astype(np.int8), "goal .*dtype"),
        ("physics", lambda x: x * np.nan, "'physics' holds NaN"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(name, change, message):
    env, _ = _tabletop()
    state = env.state()
    with pytest.raises(UserError, match=message):
        env.set_state(state | {name: change(state[name])})
    _assert_same(env.state(), state)


_CONTINUE = """
import sys, numpy as np
from sparring.envs.configs import TabletopConfig
from sparring.envs.tabletop.backend import Tabletop
saved = dict(np.load(sys.argv[1]))
env = Tabletop(TabletopConfig(threads=2, control_mode="delta_ee_pos", task=("reach_d0", "reach_d2")), 3, 7)
env.set_state({key[6:]: value for key, value in saved.items() if key.startswith("state/")})
steps = [env.step(action) for action in saved["actions"]]
np.savez(sys.argv[2], state=[s.observation["state"] for s in steps], reward=[s.reward for s in steps])
assert "torch" not in sys.modules
"""


def test_a_fresh_process_continues_bit_identically(tmp_path):
    tasks = ("reach_d0", "reach_d2")
    env, _ = _tabletop(max_episode_steps=7, control_mode="delta_ee_pos", task=tasks, split="eval", seed=5)
    actions = _actions(env, 15)
    for action in actions[:4]:
        env.step(action)
    saved = {f"state/{key}": value for key, value in env.state().items()}
    np.savez(tmp_path / "in.npz", actions=actions[4:], **saved)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _CONTINUE, str(tmp_path / "in.npz"), str(tmp_path / "out.npz")]
    subprocess.run(command, check=True, env=environment)
    there, here = np.load(tmp_path / "out.npz"), [env.step(action) for action in actions[4:]]
    np.testing.assert_array_equal(there["state"], [step.observation["state"] for step in here])
    np.testing.assert_array_equal(there["reward"], [step.reward for step in here])


def test_a_chunk_equals_its_single_steps():
    chunked, _ = _tabletop()
    single, _ = _tabletop()
    chunk = _actions(chunked, 1, chunk=3)[0]
    whole = chunked.step(chunk)
    parts = [single.step(chunk[:, c : c + 1]) for c in range(3)]
    np.testing.assert_array_equal(whole.reward, np.concatenate([part.reward for part in parts], axis=1))
    _assert_same(whole.observation, parts[-1].observation)
    _assert_same(chunked.state(), single.state())
    assert whole.executed.tolist() == [3, 3, 3]


def test_an_episode_that_ends_inside_a_chunk_skips_the_rest():
    env, _ = _tabletop(max_episode_steps=5, cameras=("head",), image_size=16)
    # robot 1 is two steps ahead
    state = env.state()
    state["elapsed"][1] = 2
    env.set_state(state)
    chunk = _actions(env, 1, chunk=4)[0]
    step = env.step(chunk)
    assert step.executed.tolist() == [4, 3, 4] and step.ended.tolist() == [1]
    assert step.truncated.tolist() == [False, True, False] and not step.terminated.any()
    assert step.reward[1, 3] == 0 and (step.reward[1, :3] > 0).all() and (step.reward[[0, 2]] > 0).all()

    # its final observation is the true third one; the root is the first of its next episode
    twin, _ = _tabletop(max_episode_steps=5, cameras=("head",), image_size=16)
    twin.set_state(state)
    third = twin.step(chunk[:, :2])
    third = twin.step(chunk[:, 2:3])
    _assert_same(third.final, step.final)
    assert _block(step.final["state"], "time_left")[0, 0] == 0
    assert _block(step.observation["state"], "time_left")[1, 0] == 1
    assert (step.final["image/head"][0] != step.observation["image/head"][1]).any()


def test_episode_k_starts_from_seed_k():
    env, _ = _tabletop(4, max_episode_steps=2)
    env.step(np.zeros((4, 1, 7)))
    second = env.step(np.zeros((4, 1, 7))).observation
    # episode 1 of robot 3 of 4 is episode number 7, so robot 7 of 8 begins with it
    _, many = _tabletop(8)
    np.testing.assert_array_equal(many["state"][4:], second["state"])


def test_training_and_evaluation_never_share_a_start():
    _, train = _tabletop(50, split="train")
    _, held_out = _tabletop(50, split="eval")
    goals = np.concatenate([_block(o["state"], "goal") for o in (train, held_out)])
    assert len(np.unique(goals, axis=0)) == 100


@pytest.mark.parametrize("task", REACHES)
def test_goals_stay_in_their_ranges(task):
    _, observation = _tabletop(100, task=task)
    goal = _block(observation["state"], "goal")
    assert (goal >= np.array(find(task).low) - 1e-6).all() and (goal <= np.array(find(task).high) + 1e-6).all()
    # and cover them
    assert (np.ptp(goal, axis=0) > 0.9 * np.subtract(find(task).high, find(task).low)).all()


def test_several_tasks_are_assigned_in_turn():
    env, observation = _tabletop(5, task=("reach_d0", "reach_d2"))
    assert [env.spec.task_names[index] for index in observation["task"]] == ["reach_d0", "reach_d2"] * 2 + ["reach_d0"]
    assert env.spec.task_names == ("reach_d0",) * 3 + ("reach_d2",) * 3 and len(env.spec.instructions) == 6
    alone, _ = _tabletop(5, task="reach_d0")
    action = _actions(env, 1)[0]
    np.testing.assert_array_equal(env.step(action).reward[::2], alone.step(action).reward[::2])


def test_actions_are_clipped():
    one, _ = _tabletop()
    other, _ = _tabletop()
    _assert_same(one.step(np.full((3, 1, 7), 9.0)).observation, other.step(np.ones((3, 1, 7))).observation)


@pytest.mark.parametrize("mode", list(CONTROLS))
def test_extreme_actions_keep_the_state_finite_and_bounded(mode):
    env, _ = _tabletop(4, control_mode=mode, action_scale=4.0)
    for action in np.sign(_actions(env, 100)):
        # the same extreme action for ten steps
        state = env.step(np.repeat(action, 10, axis=1)).observation["state"]
        assert np.isfinite(state).all() and np.abs(state).max() < 20


def test_control_modes_have_their_action_dims():
    dims = {mode: control.action_dim for mode, control in CONTROLS.items()}
    assert dims == {"delta_qpos": 7, "delta_ee_pos": 4, "delta_ee": 7, "qpos": 7}


def test_errors_state_the_fix():
    with pytest.raises(ValueError, match="'raech_d1'.*did you mean 'reach_d1'.*one of: reach_d0, "):
        _tabletop(task="raech_d1")
    env, _ = _tabletop()
    action = np.zeros((3, 2, 7))
    action[[0, 2], 1, 3] = np.nan
    with pytest.raises(ValueError, match=r"robots \[0, 2\] hold NaN"):
        env.step(action)
    with pytest.raises(ValueError, match=r"delta_qpos .*\[N, C, A\] = \[3, C >= 1, 7\]"):
        env.step(np.zeros((3, 1, 4)))
    with pytest.raises(ValueError, match="has 2 robots .* this env has 3 "):
        env.set_state(_tabletop(2)[0].state())
    with pytest.raises(RuntimeError, match="call reset"):
        Tabletop(TabletopConfig(threads=1), 1).step(np.zeros((1, 1, 7)))


def test_a_closed_env_raises_an_error():
    env, _ = _tabletop(1)
    env.close()
    env.close()
    with pytest.raises(UserError, match="this env was closed"):
        env.step(np.zeros((1, 1, 7)))
    with pytest.raises(UserError, match="this env was closed"):
        env.reset(EpisodeSeeds(0))


def test_infinite_actions_are_clipped():
    env, _ = _tabletop()
    other, _ = _tabletop()
    action = np.full((3, 1, 7), np.inf)
    action[:, :, 0] = -np.inf
    _assert_same(env.step(action).observation, other.step(np.sign(action)).observation)


def test_recording_gives_a_frame_per_executed_step():
    env, _ = _tabletop(max_episode_steps=4)
    env.record([2, 0])
    step = env.step(_actions(env, 1, chunk=3)[0])
    assert sorted(step.frames) == [0, 2] and [len(f) for f in step.frames.values()] == [3, 3]
    np.testing.assert_array_equal(drawn(step.frames[2][-1]), env.render(2))
    assert env.render(0).shape == (256, 512, 3) and env.render(0).dtype == np.uint8
    # the episode ends after one more step: its last frame is not of the next episode
    last = env.step(_actions(env, 1, chunk=3)[0])
    assert len(last.frames[0]) == 1 and (drawn(last.frames[0][0]) != env.render(0)).any()
    env.record([])
    assert env.step(_actions(env, 1)[0]).frames == {}


def test_describe_lists_every_task():
    rows = describe()
    assert [row[0] for row in rows] == list(TASKS)
    assert rows[0][1] == "move the hand to the green ball" and "goal x -0.16..-0.04 m" in rows[0][2]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("task", ["reach_d0", "lift_d2"])
@pytest.mark.parametrize("kwargs", [{}, {"cameras": ("head", "wrist"), "image_size": 32}])
def test_gymnasium(kwargs, task):
    register()
    register()
    env = gymnasium.make(f"sparring/{task}", render_mode="rgb_array", **kwargs)
    check_env(env.unwrapped)
    first, info = env.reset(seed=7)
    again, _ = env.reset(seed=7)
    other, _ = env.reset()
    if kwargs:
        assert first["head"].shape == (32, 32, 3) and (first["head"] == again["head"]).all()
        first, again, other = first["state"], again["state"], other["state"]
    assert (first == again).all() and (first != other).any()
    for number in range(1, 51):
        observation, _, terminated, truncated, info = env.step(env.action_space.sample())
        assert not terminated and truncated == (number == 50)
    state = observation["state"] if kwargs else observation
    assert state[observe.layout()["time_left"]] == 0 and info["success"] in (True, False)
    assert env.render().shape == (256, 512, 3)
    env.close()


@pytest.mark.parametrize("mode", ["delta_ee_pos", "delta_ee"])
def test_a_hand_that_moves_down_stops_above_the_table_and_moves_up_at_once(mode):
    env, _ = _tabletop(1, control_mode=mode, max_episode_steps=1000)
    down = np.zeros((1, 1, env.spec.action_dim))
    down[..., 2] = -1
    for _ in range(60):
        env.step(down)
    # 7 mm is where the finger tips would touch
    assert 0.006 < env.situation().hand[0, 2] < 0.012
    for _ in range(3):
        env.step(-down)
    assert env.situation().hand[0, 2] > 0.03


def _hand_after(mode, action, steps=40):
    """The displacement of the hand, the commanded joints and the hand's axes once the motors have followed."""
    env, _ = _tabletop(1, control_mode=mode, max_episode_steps=1000)
    before = env.situation().hand[0].copy()
    env.step(np.array(action, float)[None, None])
    for _ in range(steps):
        env.step(np.array(action, float)[None, None] if mode == "qpos" else np.zeros((1, 1, len(action))))
    command, arm = env.arms()
    _, mat = HandMover().where(arm)
    return env.situation().hand[0] - before, command[0, 0], mat[0, 0]


def test_one_delta_ee_action_moves_or_turns_the_hand():
    moved, _, _ = _hand_after("delta_ee", [1, 0, 0, 0, 0, 0, 0])
    np.testing.assert_allclose(moved, [0.02, 0, 0], atol=2e-3)
    _, _, before = _hand_after("delta_ee", [0] * 7)
    moved, _, after = _hand_after("delta_ee", [0, 0, 0, 0, 0, 1, 0])
    np.testing.assert_allclose(moved, 0, atol=1e-3)
    # 0.1 rad about the world's z axis
    turned = after @ before.T
    assert np.arctan2(turned[1, 0], turned[0, 0]) == pytest.approx(0.1, abs=0.01)
    assert turned[2, 2] == pytest.approx(1, abs=1e-3)


def test_qpos_moves_to_the_commanded_joints():
    action = [0.1, 0, 0.2, 0.5, 0, -0.1, -1]
    _, command, _ = _hand_after("qpos", action)
    # the middles of the joints' ranges, plus part of their half widths
    middle, half = np.array([0, 0, 1.35, 0, 0, 0]), np.array([2.6, 1.6, 1.45, 2, 1.6, 3])
    np.testing.assert_allclose(command[:6], middle + half * action[:6], atol=1e-6)
    assert command[6] == 0
    # at most 0.1 rad per step
    _, near, _ = _hand_after("qpos", [1] * 7, steps=0)
    _, still, _ = _hand_after("delta_qpos", [0] * 7, steps=0)
    np.testing.assert_allclose(near[:6] - still[:6], 0.1, atol=1e-6)
