"""Random policies: uniform in each step, correlated over time if coloured, a function of their noise alone."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from sparring.contract import EnvSpec
from sparring.noise import keyed_uniform
from sparring.policies.random import ColouredNoise, RandomPolicy

SPEC = EnvSpec({"state": ((3,), "float32")}, action_dim=2)


def play(policy, decisions, robots, first=(0,), seed=0):
    """[T, N, C, A]; episodes begin at the decisions in `first`."""
    noise = torch.from_numpy(keyed_uniform(seed, robots, np.arange(decisions), policy.noise_size))
    actions = []
    for t in range(decisions):
        is_first = torch.full((len(robots),), t in first)
        td = TensorDict({"noise": noise[t], "is_first": is_first}, [len(robots)])
        actions.append(policy.act(td)["action"])
    return torch.stack(actions)


def test_every_step_is_uniform_and_correlated_with_earlier_ones():
    robots = np.arange(64)
    actions = play(ColouredNoise(SPEC, 4, torch.full((64,), 0.9)), 400, robots)
    # [T, N, C, A] -> [N, T*C, A]
    steps = actions.transpose(0, 1).flatten(1, 2)
    assert steps.abs().max() < 1
    quantiles = torch.quantile(steps[:, :, 0].flatten()[:50_000], torch.tensor([0.1, 0.5, 0.9]))
    assert torch.allclose(quantiles, torch.tensor([-0.8, 0.0, 0.8]), atol=0.05)
    normal = torch.special.ndtri((steps.double() + 1) / 2)
    for lag, expected in ((1, 0.9), (4, 0.9**4), (12, 0.9**12)):
        assert float((normal[:, lag:] * normal[:, :-lag]).mean()) == pytest.approx(expected, abs=0.03)


def test_without_correlation_it_is_uniform_noise():
    robots = np.arange(3)
    coloured = play(ColouredNoise(SPEC, 2, torch.zeros(3)), 5, robots)
    assert torch.allclose(coloured, play(RandomPolicy(SPEC, 2), 5, robots), atol=1e-6)


def test_two_steps_by_hand():
    policy = ColouredNoise(SPEC, 2, torch.tensor([0.6]))
    # normal numbers 1 and -1: x = 1, then 0.6 * 1 + 0.8 * -1 = -0.2
    uniform = torch.special.ndtr(torch.tensor([1.0, 1.0, -1.0, -1.0]))
    td = TensorDict({"noise": uniform[None], "is_first": torch.tensor([True])}, [1])
    expected = 2 * torch.special.ndtr(torch.tensor([[1.0, 1.0], [-0.2, -0.2]])) - 1
    assert torch.allclose(policy.act(td)["action"][0], expected, atol=1e-5)
    # the next decision continues from -0.2: 0.6 * -0.2 + 0.8 * 1 = 0.68
    td["is_first"] = torch.tensor([False])
    assert torch.allclose(policy.last, torch.full((1, 2), -0.2), atol=1e-5)
    assert policy.act(td)["action"][0, 0, 0] == pytest.approx(2 * 0.7517 - 1, abs=1e-3)


def test_an_episode_does_not_depend_on_the_previous_one():
    fresh = play(ColouredNoise(SPEC, 1, torch.full((2,), 0.99)), 1, np.arange(2))
    policy = ColouredNoise(SPEC, 1, torch.full((2,), 0.99))
    policy.last.fill_(5.0)
    assert torch.equal(play(policy, 1, np.arange(2)), fresh)


def test_a_robots_actions_do_not_depend_on_the_other_robots():
    alone = play(ColouredNoise(SPEC, 3, torch.full((1,), 0.9)), 20, np.array([5]), first=(0, 7))
    together = play(ColouredNoise(SPEC, 3, torch.full((8,), 0.9)), 20, np.arange(8), first=(0, 7))
    assert torch.equal(alone[:, 0], together[:, 5])


def test_a_resumed_policy_continues_with_the_same_actions():
    original = ColouredNoise(SPEC, 1, torch.full((2,), 0.9))
    play(original, 3, np.arange(2))
    resumed = ColouredNoise(SPEC, 1, torch.full((2,), 0.9))
    resumed.load_state_dict(original.state_dict())
    assert torch.equal(play(original, 2, np.arange(2), first=()), play(resumed, 2, np.arange(2), first=()))


def test_discrete_actions_are_whole_numbers():
    spec = EnvSpec({"state": ((3,), "float32")}, action_dim=1, discrete_actions=3)
    actions = play(ColouredNoise(spec, 1, torch.full((8,), 0.5)), 100, np.arange(8))
    assert set(actions.flatten().tolist()) == {0.0, 1.0, 2.0}


def test_a_share_is_spread_evenly():
    share_of = ColouredNoise.share_of
    assert share_of(6, 0.5).tolist() == [True, False, True, False, True, False]
    assert share_of(4, 0.25).sum() == 1 and share_of(5, 1.0).all() and not share_of(5, 0.0).any()
    # two processes of three robots select the same ones as one process of six
    assert torch.equal(
        torch.cat([share_of(3, 0.3), share_of(3, 0.3, first=3)]),
        share_of(6, 0.3),
    )
    # with two tasks, assigned in turn, half of the robots of each
    assert share_of(8, 0.5, tasks=2).tolist() == [True, False, False, True, True, False, False, True]
