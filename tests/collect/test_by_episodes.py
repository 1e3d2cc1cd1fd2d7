"""Rollouts of complete episodes: episodes per robot, valid rows, and training on valid rows only."""

import numpy as np
import pytest
import torch
from doubles import CountingBackend, IdentityBackend, LinearPolicy
from tensordict import TensorDict

from sparring.algorithms.advantages import gae
from sparring.algorithms.configs import PPOConfig
from sparring.algorithms.ppo import PPO
from sparring.collect.collector import Collector
from sparring.config.schema import load_config
from sparring.config.section import ConfigError
from sparring.data.buffer import RolloutBuffer
from sparring.envs.backend import EpisodeSeeds
from sparring.envs.env import Env
from sparring.errors import UserError
from sparring.phases.finetune import Finetune
from sparring.policies.actor_critic import ActorCritic
from sparring.policies.configs import ActorCriticConfig
from sparring.processes.distributed import Distributed


def by_episodes(lengths=(3, 5), episodes=2, chunk=1, steps=10, group_size=1):
    env = Env(CountingBackend(lengths), group_size=group_size)
    collector = Collector(env, LinearPolicy(chunk), seed=0, chunk=chunk, episodes=episodes)
    buffer = RolloutBuffer(steps)
    collector.collect(buffer)
    return collector, buffer


def test_rows_after_the_last_episode_of_a_robot_are_invalid():
    collector, buffer = by_episodes()
    rollout = buffer.get(flatten=False)
    # env 0 has ended 2 episodes of 3 steps after 6 decisions, env 1 2 of 5 after 10
    assert rollout.batch_size == (10, 2)
    assert rollout["valid"].T.tolist() == [[True] * 6 + [False] * 4, [True] * 10]
    assert rollout["episode"].T.tolist() == [[0, 0, 0, 2, 2, 2, 4, 4, 4, 6], [1] * 5 + [3] * 5]
    ended = collector.drain_episodes()
    assert sorted((e.env, e.steps) for e in ended) == [(0, 3), (0, 3), (1, 5), (1, 5)]
    assert collector.env_steps == 2 * 3 + 2 * 5


def test_collection_stops_when_all_robots_are_done():
    _, buffer = by_episodes(lengths=(3, 4), episodes=1, steps=50)
    assert len(buffer) == 4 and not buffer.is_full()
    rollout = buffer.get(flatten=False, following=True)
    assert rollout.batch_size == (4, 2) and len(buffer.get()) == 8
    # (env, episode, step): the true next observation, also in the last row
    assert rollout["next", "observation", "state"][:, 1].tolist() == [[1, 0, step] for step in (1, 2, 3, 4)]
    assert rollout["next", "value"][:, 1].tolist() == [1001, 1002, 1003, 1004]
    assert [len(w) for w in buffer.windows(2)] == [2, 2]
    assert buffer.sample(20, torch.Generator().manual_seed(0))["next", "observation", "state"].shape == (20, 3)


def test_every_batch_starts_episodes_with_new_seeds_and_noise():
    env = Env(CountingBackend((2, 2)))
    collector, buffer, started = Collector(env, LinearPolicy(), seed=5, episodes=3), RolloutBuffer(6), []
    actions = []
    for _ in range(3):
        collector.collect(buffer)
        seeds = env.backend.seeds
        started += [seeds(robot, episode) for episode in range(3) for robot in range(2)]
        actions.append(buffer.get(flatten=False)["action"].clone())
        assert buffer.get(flatten=False)["is_first"][0].all()
    expected_seeds = EpisodeSeeds(5, total_envs=2)
    assert started == [expected_seeds(robot, episode) for episode in range(9) for robot in range(2)]
    assert len(set(started)) == 18
    # and with other noise
    assert not torch.equal(actions[0], actions[1])


def test_noise_does_not_depend_on_when_other_robots_are_done():
    actions = []
    for lengths in ((3, 3), (3, 5)):
        env = Env(CountingBackend(lengths))
        collector, buffer = Collector(env, LinearPolicy(), seed=0, episodes=1), RolloutBuffer(5)
        for _ in range(2):
            collector.collect(buffer)
        actions.append(buffer.get(flatten=False)["action"][:3, 0])
    assert torch.equal(*actions)


def test_chunks_that_end_early_are_counted_by_executed_steps():
    collector, buffer = by_episodes(lengths=(3, 5), episodes=1, chunk=2, steps=3)
    rollout = buffer.get(flatten=False)
    assert rollout["valid"].T.tolist() == [[True, True, False], [True, True, True]]
    assert collector.env_steps == 3 + 5


def test_episodes_that_do_not_end_in_the_rollout_raise():
    with pytest.raises(UserError, match=r"after 4 decisions robots \[1\] have not ended their 1 episodes"):
        by_episodes(episodes=1, steps=4)


def test_invalid_rows_do_not_affect_the_update():
    """Rewards, values, actions and observations after the last episode have no effect."""
    results = []
    for filler in (0.0, float("nan")):
        torch.manual_seed(0)
        env = Env(UnevenIdentity(4))
        policy = ActorCritic(ActorCriticConfig(hidden=(8,)), env.spec, 1)
        buffer = RolloutBuffer(16)
        Collector(env, policy, seed=0, episodes=2).collect(buffer)
        rollout = buffer.get(flatten=False)
        wrong = ~rollout["valid"]
        assert wrong.float().mean() > 0.2
        for key in ("log_prob", "value", "action", ("next", "reward"), ("next", "value"), ("observation", "state")):
            rollout[key][wrong] = filler
        rollout["trace", "mean"][wrong] = filler
        ppo = PPO(PPOConfig(mini_batch_size=16, ppo_epochs=2, target_kl=1.0), policy)
        results.append([ppo.update(rollout), {k: v.clone() for k, v in policy.state_dict().items()}])
    (metrics, weights), (other_metrics, other_weights) = results
    assert metrics == other_metrics and metrics["valid_fraction"] == pytest.approx(float((~wrong).float().mean()))
    for name, weight in weights.items():
        assert torch.equal(weight, other_weights[name]) and weight.isfinite().all(), name
    # 2 episodes of each robot, of 4 or 8 steps
    assert weights["encoder.normalizer.count"] == 2 * (4 + 8 + 4 + 8)


class UnevenIdentity(IdentityBackend):
    """Episodes of even robots last 4 steps, those of odd robots 8."""

    def reset(self, seeds):
        self.counts = np.zeros(self.num_envs, int)
        return super().reset(seeds)

    def step(self, action):
        step = super().step(action)
        self.counts += 1
        step.truncated = self.counts % np.where(np.arange(self.num_envs) % 2, 8, 4) == 0
        step.ended = np.flatnonzero(step.truncated)
        step.final = {name: value[step.ended] for name, value in step.observation.items()}
        return step


def test_gae_ignores_invalid_rows():
    following = {
        "reward": torch.tensor([[[1.0]], [[100.0]]]),
        "value": torch.tensor([[3.0], [7.0]]),
        "terminated": torch.zeros(2, 1, dtype=torch.bool),
        "truncated": torch.zeros(2, 1, dtype=torch.bool),
        "executed": torch.ones(2, 1, dtype=torch.int64),
    }
    td = TensorDict({"value": torch.ones(2, 1), "next": TensorDict(following, [2, 1])}, [2, 1])
    td["valid"] = torch.tensor([[True], [False]])
    advantage, _ = gae(td, 0.5, 0.5)
    assert advantage.flatten().tolist() == [1 + 0.5 * 3 - 1, 0.0]


def test_restored_collector_continues_with_the_next_batch():
    collector, buffer = by_episodes()
    state = collector.state_dict()
    collector.collect(buffer)
    expected = buffer.get(flatten=False).clone()
    again = Collector(Env(CountingBackend((3, 5))), LinearPolicy(), seed=0, episodes=2)
    assert again.load_state_dict(state)
    other = RolloutBuffer(10)
    again.collect(other)
    assert (other.get(flatten=False) == expected).all()
    assert again.env.backend.seeds == collector.env.backend.seeds and again.env_steps == collector.env_steps


def test_robots_of_a_group_share_seeds_in_training_only():
    seeds = EpisodeSeeds(0, total_envs=6, group_size=3)
    numbers = [[seeds(robot, episode) for robot in range(6)] for episode in range(2)]
    for row in numbers:
        assert len(set(row[:3])) == len(set(row[3:])) == 1
    assert len({*numbers[0], *numbers[1]}) == 4
    # a second process has the next groups
    halves = [EpisodeSeeds(0, "train", first, 6, 3)(0, 1) for first in (0, 3)]
    assert halves == numbers[1][::3]
    env = Env(CountingBackend((3, 3)), group_size=2)
    env.reset(0, "eval")
    assert env.backend.seeds.group_size == 1


def finetune(**more):
    settings = {"n_envs": 4, "n_episodes_per_batch": 8, "max_episode_steps": 6, "group_size": 2} | more
    config = load_config({"rollout": settings, "env": {"cameras": ["head"], "image_size": 40, "threads": 1}})
    return Finetune.from_config(config, Distributed("cpu"))


def test_first_observations_of_a_group_are_bit_identical():
    phase = finetune()
    phase.collector.collect(phase.buffer)
    rollout = phase.buffer.get(flatten=False)
    assert rollout.batch_size == (12, 4) and rollout["is_first"][[0, 6]].all()
    for start in (0, 6):
        observation = rollout["observation"][start]
        for key in observation.keys(True, True):
            assert torch.equal(observation[key][::2], observation[key][1::2]), key
        assert not torch.equal(observation["state"][0], observation["state"][2])
    # their actions differ
    assert not torch.equal(rollout["action"][0, 0], rollout["action"][0, 1])
    assert not torch.equal(rollout["observation", "state"][0], rollout["observation", "state"][6])
    assert rollout["group"][0].tolist() == [0, 0, 1, 1] and rollout["group"][6].tolist() == [2, 2, 3, 3]


def test_env_state_includes_groups_and_episode_numbers():
    phase, other = finetune(max_episode_steps=1), finetune(max_episode_steps=1)
    phase.env.reset(0, first_episode=5)
    other.env.set_state(phase.env.state())
    act = TensorDict({"action": torch.zeros(4, 1, phase.env.spec.action_dim)}, [4])
    # the episode ends after one step; the observation is the first of the next episode
    begun, again = (p.env.step(act)["observation", "state"] for p in (phase, other))
    assert torch.equal(begun, again) and torch.equal(begun[::2], begun[1::2])


def test_env_without_a_time_limit_is_refused():
    config = load_config(
        {"env": {"name": "test_by_episodes:Endless"}, "rollout": {"n_envs": 1, "n_episodes_per_batch": 1}}
    )
    with pytest.raises(UserError, match="time limit; set rollout.max_episode_steps"):
        Finetune.from_config(config, Distributed("cpu"))


class Endless(CountingBackend):
    def __init__(self, config: ActorCriticConfig, num_envs, max_episode_steps):
        super().__init__((0,) * num_envs)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout": {"n_envs": 4, "n_episodes_per_batch": 6}}, "6 episodes cannot be divided evenly among the 4"),
        (
            {"rollout": {"n_envs": 4, "group_size": 3, "n_episodes_per_batch": 4}},
            "groups of 3; expected one of 1, 2, 4, or ",
        ),
        ({"rollout": {"n_envs": 4, "group_size": 2}}, "also set rollout.n_episodes_per_batch"),
        (
            {"rollout": {"n_envs": 4, "n_episodes_per_batch": 4}, "buffer": {"type": "vla"}},
            "needs buffer.type=standard",
        ),
        ({"algorithm": "grpo"}, "grpo needs rollout.n_episodes_per_batch and rollout.group_size >= 2"),
        (
            {
                "rollout": {"n_envs": 4, "n_episodes_per_batch": 4, "group_size": 2},
                "env": {"task": ["reach_d0", "reach_d1"]},
            },
            "single task in env.task",
        ),
    ],
)
def test_incompatible_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        load_config(settings)
