"""Evaluation: exact number of episodes, held-out seeds, confidence intervals."""

import json

import pytest
import torch
from doubles import CountingBackend, LinearPolicy

from sparring.config.schema import load_config
from sparring.envs.backend import EpisodeSeeds
from sparring.envs.env import Env, make_env
from sparring.evaluation.play import evaluate, play, wilson
from sparring.policies.actor_critic import ActorCritic


@pytest.mark.parametrize(
    "successes, episodes, low, high",
    [
        (95, 100, 0.8882, 0.9785),  # the figure of formulas.md
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (139, 139, 0.9731, 1.0),
    ],
)
def test_wilson_intervals(successes, episodes, low, high):
    rate = wilson(successes, episodes)
    assert (round(rate.low, 4), round(rate.high, 4)) == (low, high)


def test_wilson_refuses_invalid_counts():
    for successes, episodes in ((1, 0), (3, 2), (-1, 2)):
        with pytest.raises(ValueError, match="expected episodes >= 1"):
            wilson(successes, episodes)


@pytest.mark.parametrize("episodes", [1, 2, 5, 7])
def test_short_episodes_are_not_favoured(episodes):
    """Env 0's episodes are 10 times shorter, but both envs contribute equally."""
    played, _ = play(LinearPolicy(), Env(CountingBackend((2, 20))), episodes, seed=0)
    assert len(played) == episodes
    assert sum(e.env == 0 for e in played) == (episodes + 1) // 2


def test_episodes_do_not_depend_on_the_number_of_robots():
    """With two tasks; the reward of a fixed policy identifies an episode by its goal."""
    config = load_config({"env": {"task": ["reach_d0", "reach_d2"]}, "rollout": {"n_envs": 2}})
    rewards = {}
    for robots in (2, 4, 6):
        env = make_env(config.env, robots, max_episode_steps=3)
        played, _ = play(ActorCritic(config.policy, env.spec, 1).requires_grad_(False), env, 12, seed=5)
        rewards[robots] = sorted((env.spec.task_names[e.task], round(e.reward, 3)) for e in played)
        torch.manual_seed(0)
    assert [task for task, _ in rewards[2]] == ["reach_d0"] * 6 + ["reach_d2"] * 6
    assert len(set(rewards[2])) == 12 and rewards[4] == rewards[6]


def test_number_of_robots_must_be_a_multiple_of_the_tasks():
    with pytest.raises(ValueError, match="3 robots cannot be divided evenly among the 2 tasks.*a multiple of 2"):
        load_config({"env": {"task": ["reach_d0", "reach_d1"]}, "rollout": {"n_envs": 3}})


def test_evaluation_without_episode_ends_is_stopped(monkeypatch):
    monkeypatch.setattr("sparring.evaluation.play.NEVER_ENDING", 30)
    with pytest.raises(ValueError, match="no episode ended in 30 decisions.*rollout.max_episode_steps"):
        play(LinearPolicy(), Env(CountingBackend((1000, 1000))), 1, seed=0)


def test_training_and_evaluation_seeds_are_disjoint():
    train, held_out = EpisodeSeeds(0, "train"), EpisodeSeeds(0, "eval")
    a = {train(0, k) for k in range(5000)}
    b = {held_out(0, k) for k in range(5000)}
    assert len(a) == len(b) == 5000 and not a & b
    assert max(a) < 2**31 <= min(b)


def test_evaluation_reports_policy_and_random_with_intervals(tmp_path):
    config = load_config({"env": {"task": ["reach_d0"]}})
    env = make_env(config.env, 4, max_episode_steps=10)
    policy = ActorCritic(config.policy, env.spec, 1)
    evaluation = evaluate(policy, env, episodes=6, seed=1, videos=1)
    written = json.loads(evaluation.write(tmp_path / "evaluation.json").read_text())
    assert set(written["scores"]) == {"policy", "random"}
    score = written["scores"]["policy"]["reach_d0"]
    assert score["success"]["episodes"] == 6 and score["steps"] == 10
    assert "95 % interval" in evaluation.table() and "random" in evaluation.table()
    # one video: the initial frame and one per step
    assert len(evaluation.videos) == 1 and len(evaluation.videos[0].frames) == 11
    assert evaluation.videos[0].rendered().frames[0].shape == (256, 512, 3)
    again = evaluate(policy, env, episodes=6, seed=1)
    assert again.scores == evaluation.scores
    assert evaluate(policy, env, episodes=6, seed=2).scores != evaluation.scores


def test_env_without_success_has_no_rate(tmp_path):
    env = make_env(load_config({"env": {"name": "gym:Pendulum-v1"}}).env, 2, max_episode_steps=3)
    evaluation = evaluate(LinearPolicy(), env, episodes=4, baseline=False)
    (score,) = json.loads(evaluation.write(tmp_path / "evaluation.json").read_text())["scores"]["policy"].values()
    assert score["success"] == {"successes": None, "episodes": 4, "rate": None, "low": None, "high": None}
    assert score["steps"] == 3


def test_evaluation_keeps_the_mode_of_the_policy():
    policy = LinearPolicy().train()
    play(policy, Env(CountingBackend()), 2, seed=0)
    assert policy.training
