"""Gymnasium envs as backends: spaces, actions, chunks, ends of episodes, states, frames."""

import importlib

import numpy as np
import pytest
from gymnasium import spaces

from sparring.envs.backend import EpisodeSeeds
from sparring.envs.configs import GymConfig
from sparring.envs.gym import ActionMap, GymRobot, pack, unpack
from sparring.envs.gym_batch import SerialBackend
from sparring.errors import UserError

DOUBLES = f"{__package__ + '.' if __package__ else ''}gym_doubles"


def backend(name="Counter", num_envs=1, max_episode_steps=None, success_return=None, **kwargs):
    name = name if ":" in name else f"{DOUBLES}:{name}"
    config = GymConfig(name=name, kwargs=kwargs, success_return=success_return)
    return SerialBackend(config, num_envs, max_episode_steps)


def chunks(num_envs=1, steps=1, value=0.0, dim=1):
    return np.full((num_envs, steps, dim), value, np.float32)


# --- spaces


def test_spec_of_known_envs():
    cartpole = backend("gym:CartPole-v1").spec
    assert cartpole.observation == {"state": ((4,), "float32")}
    assert (cartpole.action_dim, cartpole.discrete_actions) == (1, 2)
    assert (cartpole.max_episode_steps, cartpole.control_hz) == (500, 50.0)
    pendulum = backend("gym:Pendulum-v1", max_episode_steps=7).spec
    assert (pendulum.action_dim, pendulum.discrete_actions, pendulum.max_episode_steps) == (1, 0, 7)
    counter = backend().spec
    assert (counter.max_episode_steps, counter.control_hz) == (0, 7.0)


# --- actions


def test_box_actions_are_clipped_then_mapped_onto_the_bounds():
    space = spaces.Box(np.array([0, -2, -np.inf], np.float32), np.array([10, 2, np.inf], np.float32))
    actions = ActionMap(space, "test")
    # [N=1, C=3, A=3]
    ours = np.array([[[-1, 0.5, 0.25], [0, 3, 9], [1, -1, -0.5]]], np.float32)
    assert np.array(actions.decode(ours)[0]).tolist() == [[0, 1, 0.25], [5, 2, 1], [10, -2, -0.5]]
    shaped = ActionMap(spaces.Box(-1, 1, (2, 3)), "test").decode(np.zeros((4, 5, 6), np.float32))
    assert np.shape(shaped) == (4, 5, 2, 3) and shaped[0][0].dtype == np.float32
    with pytest.raises(ValueError, match="action for test holds NaN or inf"):
        actions.decode(ours * np.nan)


def test_discrete_actions_are_rounded_and_checked():
    actions = ActionMap(spaces.Discrete(3, start=5), "test")
    assert actions.decode(np.array([[[0.0], [1.6]], [[1.0], [0.4]]], np.float32)) == [[5, 7], [6, 5]]
    for wrong in (3.0, -1.0, np.nan):
        with pytest.raises(ValueError, match=r"of test is not an index in 0\.\.2"):
            actions.decode(np.full((1, 1, 1), wrong, np.float32))
    with pytest.raises(ValueError, match="action space .* is not supported; expected a Box, Discrete"):
        ActionMap(spaces.Text(3), "test")


def test_several_discrete_actions_are_one_index_over_their_combinations():
    actions = ActionMap(spaces.MultiDiscrete([2, 3], start=[0, 5]), "test")
    assert (actions.dim, actions.discrete) == (1, 6)
    decoded = np.array(actions.decode(np.arange(6, dtype=np.float32).reshape(1, 6, 1))[0])
    assert decoded.tolist() == [[0, 5], [0, 6], [0, 7], [1, 5], [1, 6], [1, 7]]
    buttons = ActionMap(spaces.MultiBinary(3), "test")
    assert buttons.discrete == 8 and np.array(buttons.decode(np.float32([[[5]]]))[0]).tolist() == [[1, 0, 1]]
    with pytest.raises(ValueError, match="1000000 combinations, at most 4096"):
        ActionMap(spaces.MultiDiscrete([100, 100, 100]), "test")


def test_shape_of_actions_is_checked():
    env = backend(num_envs=2)
    env.reset(EpisodeSeeds(0))
    with pytest.raises(ValueError, match=r"shape \(2, 1\); expected \[2, C, 1\]"):
        env.step(np.zeros((2, 1), np.float32))


# --- episodes


def test_episode_ends_mid_chunk_and_the_next_one_starts_from_its_own_seed():
    env, seeds = backend(num_envs=2, length=3), EpisodeSeeds(5, total_envs=2)
    first = env.reset(seeds)["state"]
    assert first.tolist() == [[0, seeds(0, 0) % 1000, -1], [0, seeds(1, 0) % 1000, -1]]

    step = env.step(chunks(2, steps=2, value=-1.0))
    assert step.observation["state"][:, 0].tolist() == [2, 2]
    assert step.reward.tolist() == [[10, 20], [10, 20]] and step.executed.tolist() == [2, 2]
    assert step.ended.size == 0 and step.final["state"].shape == (0, 3)

    step = env.step(chunks(2, steps=2, value=1.0))
    assert step.reward.tolist() == [[30, 0], [30, 0]] and step.executed.tolist() == [1, 1]
    assert step.terminated.all() and not step.truncated.any() and not step.success.any()
    assert step.ended.tolist() == [0, 1]
    # +1 is the upper bound, 10
    assert step.final["state"].tolist() == [[3, seeds(0, 0) % 1000, 10], [3, seeds(1, 0) % 1000, 10]]
    assert step.observation["state"].tolist() == [[0, seeds(0, 1) % 1000, -1], [0, seeds(1, 1) % 1000, -1]]
    assert (step.reward.dtype, step.executed.dtype, step.success.dtype) == (np.float32, np.int64, bool)


def test_reset_starts_over_at_episode_0():
    env, seeds = backend(length=1), EpisodeSeeds(1)
    start = env.reset(seeds)["state"]
    assert env.step(chunks()).observation["state"][0, 1] == seeds(0, 1) % 1000
    assert (env.reset(seeds)["state"] == start).all()


def test_results_of_a_step_are_not_changed_by_the_next():
    env = backend()
    first = env.reset(EpisodeSeeds(0))
    one, two = env.step(chunks()), env.step(chunks())
    assert first["state"][0, 0] == 0
    assert one.observation["state"][0, 0] == 1 and one.reward[0, 0] == 10
    assert two.observation["state"][0, 0] == 2 and two.reward[0, 0] == 20


def test_env_may_truncate_itself():
    env = backend(length=2, truncates=True)
    env.reset(EpisodeSeeds(0))
    step = env.step(chunks(steps=2))
    assert step.truncated.tolist() == [True] and step.terminated.tolist() == [False]


def test_max_episode_steps_truncates():
    env = backend(max_episode_steps=2, length=100)
    assert env.spec.max_episode_steps == 2
    env.reset(EpisodeSeeds(0))
    for _ in range(2):
        step = env.step(chunks(steps=5))
        assert step.truncated.tolist() == [True] and step.terminated.tolist() == [False]
        assert step.executed.tolist() == [2] and step.final["state"][0, 0] == 2


def test_max_episode_steps_replaces_the_limit_of_a_registered_env():
    for limit, expected in ((None, 200), (3, 3), (250, 250)):
        env = backend("gym:Pendulum-v1", max_episode_steps=limit)
        env.reset(EpisodeSeeds(0))
        assert env.step(chunks(steps=300)).executed.tolist() == [expected]


@pytest.mark.parametrize("key", ["success", "is_success"])
def test_success_comes_from_info(key):
    env = backend("Succeeds", key=key, length=3)
    env.reset(EpisodeSeeds(0))
    assert not env.spec.reports_success
    assert [bool(env.step(chunks()).success[0]) for _ in range(4)] == [False, True, True, False]
    assert env.spec.reports_success


@pytest.mark.parametrize("wanted, expected", [(60.0, True), (60.5, False)])
def test_success_by_return_is_judged_at_the_end_of_each_episode(wanted, expected):
    env = backend(length=3, success_return=wanted)
    assert env.spec.reports_success
    env.reset(EpisodeSeeds(0))
    # an episode returns 10 + 20 + 30 = 60
    for _ in range(2):
        assert [bool(env.step(chunks()).success[0]) for _ in range(3)] == [False, False, expected]


# --- errors


@pytest.mark.parametrize("how, what", [("nan", "observation"), ("inf", "reward")])
def test_nan_and_inf_are_refused_by_name(how, what):
    seeds = EpisodeSeeds(0, total_envs=3)
    env = backend("Breaks", num_envs=3, how=how, only_seed=seeds(1, 0))
    env.reset(seeds)
    env.step(chunks(3))
    with pytest.raises(ValueError, match=rf"the {what} of env 1 \(.*gym_doubles:Breaks\) holds NaN or inf"):
        env.step(chunks(3))


def test_nan_in_a_final_observation_is_refused():
    env = backend("Breaks", max_episode_steps=2, how="nan")
    env.reset(EpisodeSeeds(0))
    with pytest.raises(ValueError, match="the final observation of env 0"):
        env.step(chunks(steps=2))


def test_error_of_an_env_keeps_its_type_and_names_the_env():
    seeds = EpisodeSeeds(0, total_envs=2)
    env = backend("Breaks", num_envs=2, how="raise", only_seed=seeds(1, 0))
    env.reset(seeds)
    with pytest.raises(ZeroDivisionError, match="the gripper fell off") as caught:
        env.step(chunks(2, steps=2))
    assert caught.value.__notes__ == [f"in env 1 ({DOUBLES}:Breaks)"]


def test_bad_names_and_order():
    with pytest.raises(ValueError, match="expected gym:<gymnasium id>, metaworld:<task>, .* or your.module:Class"):
        SerialBackend(GymConfig(name="CartPole-v1"), 1)
    with pytest.raises(UserError, match="a dict, expected a gymnasium.Env"):
        backend("builtins:dict")
    with pytest.raises(RuntimeError, match="before its first reset"):
        backend().step(chunks())


# --- frames


def test_recorded_envs_give_a_frame_per_executed_step():
    env = backend(num_envs=3, length=3)
    env.reset(EpisodeSeeds(0))
    assert env.step(chunks(3)).frames == {}
    env.record([2])
    step = env.step(chunks(3, steps=4))
    # steps 2 and 3, then the episode ends
    assert list(step.frames) == [2] and [frame[0, 0, 0] for frame in step.frames[2]] == [2, 3]
    assert step.frames[2][0].shape == (4, 6, 3) and step.frames[2][0].dtype == np.uint8
    env.record([])
    assert env.step(chunks(3)).frames == {}
    assert (env.render(0) == 1).all()


def test_an_env_without_its_renderer_continues_without_frames():
    robot = GymRobot(GymConfig(name=f"{DOUBLES}:CannotDraw"))
    robot.reset(0)
    assert robot.render() is None and robot.no_picture.startswith(
        'pygame is not installed; pip install "sparring[gym]"'
    )

    env = backend("CannotDraw")
    env.reset(EpisodeSeeds(0))
    env.record([0])
    assert env.step(chunks()).frames == {} and env.render(0) is None
    assert env.no_picture(0).startswith("pygame is not installed; pip")


def test_without_opengl_rendering_is_tried_once(recwarn):
    gym_doubles = importlib.import_module(DOUBLES)
    env = backend("HasNoOpenGL", num_envs=2)
    env.reset(EpisodeSeeds(0))
    env.record([0, 1])
    # no robot of this process tries again
    for batch in (env, backend("HasNoOpenGL")):
        assert batch.step(chunks(2)).frames == {} if batch is env else batch.reset(EpisodeSeeds(0))
        assert batch.render(0) is None and "(no OpenGL); install the GL library EGL or OSMesa" in batch.no_picture(0)
    assert gym_doubles.HasNoOpenGL.tries == 1
    # no warning: the reason is in no_picture
    assert [str(warning.message) for warning in recwarn] == []


def test_an_env_whose_render_fails_continues_and_gives_the_reason():
    env = backend("RenderRaises")
    env.reset(EpisodeSeeds(0))
    env.record([0])
    assert env.step(chunks()).frames == {}
    assert "render() of" in env.no_picture(0) and "failed: KeyError: 'camera' (" in env.no_picture(0)


@pytest.mark.parametrize("function", ["make_env", "make_env_in_mode"])
def test_an_env_made_by_a_function_is_rendered(function):
    env = backend(function)
    env.reset(EpisodeSeeds(0))
    assert env.render(0).shape == (4, 6, 3) and env.no_picture(0) is None


def test_an_env_without_a_render_mode_gives_the_requirement():
    env = SerialBackend(GymConfig(name=f"{DOUBLES}:Shows", kwargs={"space": spaces.Discrete(2), "value": 1}), 1)
    env.reset(EpisodeSeeds(0))
    assert env.render(0) is None
    assert "render_mode=None, expected 'rgb_array'; the env must accept render_mode" in env.no_picture(0)


# --- state


@pytest.mark.parametrize("name", ["gym:CartPole-v1", "gym:Pendulum-v1", "Counter"])
def test_fresh_backend_continues_bit_identically_from_a_state(name):
    kwargs = {"num_envs": 3, "max_episode_steps": 30}
    actions = np.random.default_rng(0).integers(0, 2, (60, 3, 2, 1)).astype(np.float32)
    old, new = backend(name, **kwargs), backend(name, **kwargs)
    old.reset(EpisodeSeeds(3, total_envs=3))
    for action in actions[:20]:
        old.step(action)
    state = old.state()
    assert all(isinstance(value, np.ndarray) and not value.dtype.hasobject for value in state.values())
    new.set_state(state)
    for action in actions[20:]:
        one, two = old.step(action), new.step(action)
        assert (one.observation["state"] == two.observation["state"]).all()
        assert (one.reward == two.reward).all() and (one.truncated == two.truncated).all()
        assert (one.final["state"] == two.final["state"]).all()


def test_an_env_that_cannot_save_has_no_state():
    env = SerialBackend(GymConfig(name=f"{DOUBLES}:Shows", kwargs={"space": spaces.Discrete(2), "value": 1}), 1)
    env.reset(EpisodeSeeds(0))
    assert env.state() is None


def test_state_of_another_number_of_envs_is_refused():
    small, large = backend(num_envs=1), backend(num_envs=2)
    small.reset(EpisodeSeeds(0))
    with pytest.raises(ValueError, match="has 1 robots and no robot 1;"):
        large.set_state(small.state())


def test_pack_keeps_types_and_every_bit():
    value = {
        "a": (1, [2.5, None, True, "x"]),
        "b": {"deep": np.arange(3)},
        "big": 2**127 + 1,
        "scalar": np.float32(0.1),
        "tenth": 0.1,
    }
    again = unpack(pack(value))
    assert again["a"] == value["a"] and isinstance(again["a"], tuple) and again["big"] == value["big"]
    assert again["b"]["deep"].tolist() == [0, 1, 2] and again["tenth"] == 0.1
    assert again["scalar"] == value["scalar"] and again["scalar"].dtype == np.float32
    with pytest.raises(TypeError, match="an env state holds a set"):
        pack({"x": {1}})
