"""Privileged object poses, padding, how policies use both, and the Gymnasium interface."""

import subprocess
import sys

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from tensordict import TensorDict

from sparring.config.schema import load_config
from sparring.envs.backend import EpisodeSeeds
from sparring.envs.configs import TabletopConfig
from sparring.envs.env import make_env
from sparring.envs.registered import register
from sparring.envs.tabletop import observe
from sparring.envs.tabletop.backend import Tabletop
from sparring.envs.tabletop.tasks.registry import TASKS
from sparring.errors import UserError
from sparring.policies.configs import ActorCriticConfig
from sparring.policies.policy import make_policy
from sparring.runs.run import Run


def _env_and_observation(**config):
    env = Tabletop(TabletopConfig(**{"task": "stack_d0", "threads": 1} | config), 3)
    return env, env.reset(EpisodeSeeds(0, total_envs=3))


def test_object_poses_are_in_the_state_or_privileged_or_hidden():
    _, together = _env_and_observation()
    apart_env, separate = _env_and_observation(object_state="privileged")
    _, hidden = _env_and_observation(object_state="hidden")
    robot, world = len(observe.scales(world=False)), len(observe.scales(objects=2, robot=False))
    assert (robot, world) == (30, 36) and apart_env.spec.observation["privileged"] == ((36,), "float32")
    np.testing.assert_array_equal(together["state"], np.concatenate([separate["state"], separate["privileged"]], 1))
    np.testing.assert_array_equal(hidden["state"], separate["state"])
    assert "privileged" not in hidden and "privileged" not in together


def _image_policy():
    config = load_config({"env": {"task": "push_d0", "cameras": ["head"], "object_state": "privileged", "threads": 1}})
    env = make_env(config.env, 8)
    torch.manual_seed(0)
    return make_policy(ActorCriticConfig(), env.spec, 1), env.reset(0)


def test_actions_of_an_image_policy_do_not_depend_on_privileged_poses():
    policy, td = _image_policy()
    noise = torch.rand(8, policy.noise_size)
    shuffled = td.clone()
    # poses of other robots, entries in reverse order
    shuffled["observation", "privileged"] = td["observation", "privileged"][torch.arange(7, -1, -1)].flip(-1)
    assert (shuffled["observation", "privileged"] != td["observation", "privileged"]).any()
    with torch.no_grad():
        one, two = policy.act(td.clone().set("noise", noise)), policy.act(shuffled.set("noise", noise))
    assert torch.equal(one["action"], two["action"]) and torch.equal(one["trace", "mean"], two["trace", "mean"])
    # the critic does read them
    assert (one["value"] != two["value"]).any()


def test_a_trained_image_policy_needs_no_privileged_poses_to_act():
    policy, td = _image_policy()
    td["observation"].pop("privileged")
    with torch.no_grad():
        assert policy.act(td)["action"].shape == (8, 1, 7)


def test_padding_is_zero_ignored_and_not_scored():
    plain_env, plain = _env_and_observation()
    env, padded = _env_and_observation(pad_state=80, pad_action=32)
    assert padded["state"].shape == (3, 80) and not padded["state"][:, 66:].any()
    np.testing.assert_array_equal(padded["state"][:, :66], plain["state"])
    assert (env.spec.action_dim, env.spec.action_padding) == (32, 25)
    action = np.random.default_rng(0).uniform(-1, 1, (3, 1, 32))
    one, two = env.step(action), plain_env.step(action[..., :7])
    np.testing.assert_array_equal(one.observation["state"][:, :66], two.observation["state"])

    policy = make_policy(ActorCriticConfig(), env.spec, 1)
    td = TensorDict({"observation": {"state": torch.from_numpy(padded["state"])}}, [3])
    with torch.no_grad():
        td = policy.act(td.set("noise", torch.rand(3, policy.noise_size)))
        td["next"] = TensorDict({"executed": torch.ones(3, dtype=torch.int64)}, [3])
        before = policy.evaluate(td)
        assert td["action"].shape == (3, 1, 32) and not td["action"][..., 7:].any()
        assert (before["trace", "dims"] == 7).all()
        td["action"][..., 7:] = 5.0
        assert torch.equal(policy.evaluate(td)["log_prob"], before["log_prob"])


def test_padding_to_a_shorter_length_is_refused():
    with pytest.raises(UserError, match="env.pad_state=10 .*66 entries"):
        _env_and_observation(pad_state=10)
    with pytest.raises(UserError, match="env.pad_action=3 .*7 entries"):
        _env_and_observation(pad_action=3)


@pytest.mark.parametrize("cameras", [[], ["head"]])
def test_training_with_padding_and_a_privileged_critic(cameras):
    config = load_config(
        {
            "env": {"task": "lift_d0", "object_state": "privileged", "pad_state": 40, "pad_action": 9, "threads": 1}
            | {"cameras": cameras, "image_size": 36},
            "rollout": {"n_envs": 4, "steps": 8},
            "ppo": {"mini_batch_size": 16, "ppo_epochs": 2},
        }
    )
    run = Run(config, folder=False, quiet=True)
    for _ in range(2):
        # the parity gate checks each update
        assert np.isfinite(run.phase.step(0.0)["loss"])
    assert run.phase.policy.critic.privileged.count > 0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("task", list(TASKS))
def test_every_task_is_a_gymnasium_env(task):
    register()
    env = gymnasium.make(f"sparring/{task}", render_mode="rgb_array")
    check_env(env.unwrapped)
    env.close()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kwargs", [{}, {"cameras": ("head", "wrist"), "image_size": 32, "depth": True, "points": 8}])
def test_many_robots_are_a_gymnasium_vector_env(kwargs):
    register()
    env = gymnasium.make_vec("sparring/lift_d0", num_envs=3, episode_steps=5, render_mode="rgb_array", **kwargs)
    first, _ = env.reset(seed=3)
    again, _ = env.reset(seed=3)
    assert env.observation_space.contains(first) and env.num_envs == 3
    for name in first if kwargs else ():
        np.testing.assert_array_equal(first[name], again[name])
    env.action_space.seed(0)
    for number in range(1, 6):
        observation, reward, terminated, truncated, infos = env.step(env.action_space.sample())
        assert env.observation_space.contains(observation) and reward.shape == (3,)
        assert (truncated == (number == 5)).all() and not terminated.any()
    # the last observation of the ended episodes, and the first of the next ones
    final = infos["final_obs"][1]
    final, begun = (final["state"], observation["state"][1]) if kwargs else (final, observation[1])
    at = observe.layout()["time_left"]
    assert final[at] == 0 and begun[at] == 1 and infos["_final_obs"].all() and infos["success"].shape == (3,)
    assert len(env.render()) == 3
    env.close()


def test_a_gymnasium_episode_has_the_given_length_and_ends_with_its_own_image():
    register()
    env = gymnasium.make("sparring/lift_d0", render_mode="rgb_array", episode_steps=4)
    env.reset(seed=0)
    images = []
    for number in range(1, 5):
        observation, _, _, truncated, _ = env.step(np.zeros(7, np.float32))
        images.append(env.render())
        assert truncated == (number == 4)
    assert observation[observe.layout()["time_left"]] == 0
    # nothing moves, so nothing changes; the next episode begins elsewhere
    moved = [(one != two).mean() for one, two in zip(images[:-1], images[1:], strict=True)]
    assert moved[-1] < 0.01
    env.reset()
    assert (env.render() != images[-1]).mean() > moved[-1]


def test_wrong_arguments_of_gymnasium_raise_a_one_line_error():
    register()
    with pytest.raises(UserError, match="render_mode='human': expected None or 'rgb_array'"):
        gymnasium.make_vec("sparring/lift_d0", num_envs=2, render_mode="human")
    with pytest.raises(UserError, match="episode_steps=0: expected a number of steps above 0"):
        gymnasium.make("sparring/lift_d0", episode_steps=0)
    with pytest.raises(UserError, match=r"camera_s=\('head',\) is an unknown key; nearest: cameras"):
        gymnasium.make("sparring/lift_d0", camera_s=("head",))
    for make in (gymnasium.make, gymnasium.make_vec):
        with pytest.raises(UserError, match="'sparring/lift_d0' and task='stack_d0' .*'sparring/stack_d0'"):
            make("sparring/lift_d0", task="stack_d0")


def test_gymnasium_mixes_tasks_if_the_first_is_that_of_the_id():
    register()
    env = gymnasium.make_vec("sparring/lift_d0", num_envs=2, task=("lift_d0", "stack_d0"))
    assert [task.name for task in env.unwrapped._backend.robot_tasks()] == ["lift_d0", "stack_d0"]
    env.close()


def test_gymnasium_finds_tasks_by_module_and_id():
    code = "import gymnasium; print(gymnasium.make('sparring.envs.registered:sparring/lift_d0').reset(seed=0)[0].shape)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "(51,)", done.stderr


def test_infos_of_gymnasium_have_the_instruction_of_each_episode():
    register()
    one = gymnasium.make("sparring/lift_d0")
    texts = one.unwrapped._backend.spec.instructions
    received = {one.reset(seed=seed)[1]["instruction"] for seed in range(20)}
    assert len(received) > 1 and received <= set(texts)

    many = gymnasium.make_vec("sparring/lift_d0", num_envs=4, task=("lift_d0", "push_d0"), episode_steps=2)
    backend, idle = many.unwrapped._backend, np.zeros((4, 7), np.float32)
    begun = [many.reset(seed=0)[1]]
    assert "instruction" not in many.step(idle)[4]
    begun.append(many.step(idle)[4])
    for infos in begun:
        assert infos["_instruction"].all()
        assert all(infos["instruction"][k] in TASKS["push_d0"].instructions for k in (1, 3))
    expected = [backend.spec.instructions[k] for k in backend.state()["phrasing"]]
    assert begun[1]["instruction"].tolist() == expected


def test_both_gymnasium_interfaces_give_the_same_steps():
    register()
    many = gymnasium.make_vec("sparring/push_d1", num_envs=1)
    one = gymnasium.make("sparring/push_d1")
    a, b = many.reset(seed=11)[0][0], one.reset(seed=11)[0]
    np.testing.assert_array_equal(a, b)
    action = np.full(7, 0.3, np.float32)
    np.testing.assert_array_equal(many.step(action[None])[0][0], one.step(action)[0])


def test_stable_baselines3_trains_on_an_env_without_changes():
    sb3 = pytest.importorskip("stable_baselines3")
    register()
    env = gymnasium.make("sparring/reach_d0", cameras=("head",), image_size=36)
    model = sb3.PPO("MultiInputPolicy", env, n_steps=64, batch_size=32, n_epochs=1, seed=0)
    model.learn(128)
    assert model.num_timesteps == 128
