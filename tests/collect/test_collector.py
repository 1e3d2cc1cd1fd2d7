"""The order of collected data, checked with an env that counts."""

import numpy as np
import torch
from doubles import CountingBackend, LinearPolicy, counting_env

from sparring.collect.collector import Collector
from sparring.data.buffer import RolloutBuffer
from sparring.envs.env import Env


def collected(steps=6, lengths=(3, 5), chunk=1):
    env = counting_env(lengths)
    policy = LinearPolicy(chunk)
    collector = Collector(env, policy, seed=0, chunk=chunk)
    buffer = RolloutBuffer(steps)
    collector.collect(buffer)
    return env, policy, collector, buffer


def test_rows_hold_the_observation_of_their_action():
    _, _, _, buffer = collected()
    states = buffer.get(flatten=False)["observation", "state"]
    # env 0 has episodes of 3 steps, env 1 of 5: (episode, step) at each decision
    assert states[:, 0, 1:].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert states[:, 1, 1:].tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [0, 4], [1, 0]]


def test_flattened_rows_keep_time_order_per_env():
    _, _, _, buffer = collected()
    flat = buffer.get(flatten=True)["observation", "state"]
    assert flat[:, 0].tolist() == [0, 1] * 6
    assert flat[::2, 2].tolist() == [0, 1, 2, 0, 1, 2]


def test_env_receives_the_stored_actions():
    env, _, _, buffer = collected()
    stored = buffer.get(flatten=False)["action"].numpy()
    assert np.array_equal(stored, np.stack(env.backend.seen_actions))


def test_rewards_and_episode_ends_are_in_the_row_of_their_action():
    _, _, _, buffer = collected()
    following = buffer.get(flatten=False)["next"]
    assert following["reward"][:, 0, 0].tolist() == [1, 2, 3, 1, 2, 3]
    assert following["reward"][:, 1, 0].tolist() == [101, 102, 103, 104, 105, 101]
    assert following["terminated"][:, 0].tolist() == [False, False, True] * 2
    assert following["truncated"][:, 1].tolist() == [False] * 4 + [True, False]


def test_next_value_is_of_the_true_next_observation():
    _, _, _, buffer = collected()
    value = buffer.get(flatten=False)["next", "value"]
    # env 0 ends its episodes at (0, 3) and (1, 3): value 10 * episode + step, not that of the new episode
    assert value[:, 0].tolist() == [1, 2, 3, 11, 12, 13]
    # env 1 is truncated at (0, 5); the rollout ends at (1, 1)
    assert value[:, 1].tolist() == [1001, 1002, 1003, 1004, 1005, 1011]


def test_critic_runs_once_for_the_last_row_and_once_for_all_final_observations():
    _, policy, _, _ = collected()
    last, final = policy.value_inputs
    assert last.tolist() == [[0, 2, 0], [1, 1, 1]]
    assert final.tolist() == [[0, 0, 3], [1, 0, 5], [0, 1, 3]]


def test_second_rollout_continues_the_first():
    env, _, collector, buffer = collected(steps=2)
    collector.collect(buffer)
    assert buffer.get(flatten=False)["observation", "state"][:, 1, 2].tolist() == [2, 3]
    assert collector.env_steps == 8


def test_chunks_end_with_the_episode_and_only_executed_actions_are_scored():
    _, _, collector, buffer = collected(steps=4, lengths=(3, 5), chunk=2)
    rollout = buffer.get(flatten=False)
    assert rollout["next", "executed"][:, 0].tolist() == [2, 1, 2, 1]
    assert rollout["next", "reward"][:, 0].tolist() == [[1, 2], [3, 0], [1, 2], [3, 0]]
    assert rollout["next", "executed"][:, 1].tolist() == [2, 2, 1, 2]
    # per-position log-probs are -1 and -2: both, or the first alone
    assert rollout["log_prob"][:, 0].tolist() == [-3, -1, -3, -1]
    assert collector.env_steps == 6 + 7


def test_ended_episodes_have_reward_steps_and_success():
    _, _, collector, _ = collected()
    first, *_ = episodes = collector.drain_episodes()
    assert (first.env, first.reward, first.steps, first.success) == (0, 1 + 2 + 3, 3, True)
    assert [(e.env, e.reward, e.steps, e.success) for e in episodes if e.env == 1] == [(1, 515, 5, False)]
    assert collector.drain_episodes() == []


def test_is_first_marks_the_start_of_every_episode():
    _, _, _, buffer = collected()
    assert buffer.get(flatten=False)["is_first"].T.tolist() == [
        [True, False, False, True, False, False],
        [True, False, False, False, False, True],
    ]


def test_version_is_that_of_the_acting_weights():
    _, _, collector, buffer = collected()
    assert buffer.get()["version"].unique().tolist() == [0]
    collector.version = 7
    collector.collect(buffer)
    assert buffer.get()["version"].unique().tolist() == [7]


def test_noise_depends_on_env_and_decision_not_on_batching():
    """Two processes with one env each draw the noise of one process with two envs."""
    _, _, _, together = collected(lengths=(3, 3))
    alone = []
    for rank in range(2):
        env = Env(CountingBackend((3,)), first_env=rank, total_envs=2)
        buffer = RolloutBuffer(6)
        Collector(env, LinearPolicy(), seed=0).collect(buffer)
        alone.append(buffer.get(flatten=False)["action"])
    assert torch.equal(together.get(flatten=False)["action"], torch.cat(alone, 1))


def test_noise_hold_repeats_noise_over_decisions():
    env, policy = counting_env(), LinearPolicy()
    policy.noise_hold = 3
    buffer = RolloutBuffer(6)
    Collector(env, policy, seed=0).collect(buffer)
    action = buffer.get(flatten=False)["action"][:, 0, 0, 0]
    assert len(action.unique()) == 2 and len(action[:3].unique()) == 1


def test_state_dict_restores_the_collector_exactly():
    env, policy, collector, buffer = collected(steps=4)
    state = collector.state_dict()
    collector.collect(buffer)
    expected = buffer.get(flatten=False).clone()
    again = Collector(counting_env(), policy, seed=0)
    again.env.reset(0)
    assert again.load_state_dict(state)
    other = RolloutBuffer(4)
    again.collect(other)
    assert (other.get(flatten=False) == expected).all()
