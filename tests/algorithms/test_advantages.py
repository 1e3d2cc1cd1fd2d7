"""GAE and the level correction against values computed by hand."""

import pytest
import torch
from tensordict import TensorDict

from sparring.algorithms.advantages import _chunk_rewards, gae, missing_level

GAMMA, LAMBDA = 0.5, 0.5


def rollout(reward, value, next_value, terminated, truncated, executed=None) -> TensorDict:
    """Lists [T][N] (reward: [T][N][C])."""
    reward = torch.tensor(reward, dtype=torch.float32)
    executed = torch.ones(reward.shape[:2], dtype=torch.int64) if executed is None else torch.tensor(executed)
    following = {
        "reward": reward,
        "value": torch.tensor(next_value, dtype=torch.float32),
        "terminated": torch.tensor(terminated),
        "truncated": torch.tensor(truncated),
        "executed": executed,
    }
    return TensorDict(
        {"value": torch.tensor(value, dtype=torch.float32), "next": TensorDict(following, reward.shape[:2])},
        reward.shape[:2],
    )


def test_termination_ignores_the_next_value():
    # delta_1 = 2 + 0 - 4 = -2 (terminated: V_next=8 is ignored); delta_0 = 1 + .5*4 - 2 = 1
    td = rollout([[[1]], [[2]]], [[2], [4]], [[4], [8]], [[False], [True]], [[False], [False]])
    advantage, returns = gae(td, GAMMA, LAMBDA)
    # A_0 = 1 + .5*.5*(-2) = .5
    assert advantage.flatten().tolist() == [0.5, -2.0]
    assert returns.flatten().tolist() == [2.5, 2.0]


def test_truncation_bootstraps_from_the_final_observation():
    # delta_1 = 2 + .5*8 - 4 = 2
    td = rollout([[[1]], [[2]]], [[2], [4]], [[4], [8]], [[False], [False]], [[False], [True]])
    assert gae(td, GAMMA, LAMBDA)[0].flatten().tolist() == [1 + 0.25 * 2, 2.0]


def test_advantage_does_not_leak_over_an_auto_reset():
    # the episode ends at t=0 by truncation: V_next is of its own final observation (6), and A_1 of the next
    # episode (100 - 1 = 99) must not reach t=0
    td = rollout([[[1]], [[100]]], [[2], [1]], [[6], [0]], [[False], [False]], [[True], [False]])
    assert gae(td, GAMMA, LAMBDA)[0].flatten().tolist() == [1 + 0.5 * 6 - 2, 99.0]


def test_chunks_discount_per_executed_step():
    # 3-step chunk, all executed: 1 + .5*2 + .25*4 = 3; V_next gets .5^3
    whole = rollout([[[1, 2, 4]]], [[1]], [[8]], [[False]], [[False]], executed=[[3]])
    assert gae(whole, GAMMA, LAMBDA)[0].item() == 3 + 0.125 * 8 - 1
    # truncated after 2 steps: 1 + .5*2 = 2; V_next gets .5^2
    cut = rollout([[[1, 2, 0]]], [[1]], [[8]], [[False]], [[True]], executed=[[2]])
    assert gae(cut, GAMMA, LAMBDA)[0].item() == 2 + 0.25 * 8 - 1
    # terminated after 2 steps: no V_next
    dead = rollout([[[1, 2, 0]]], [[1]], [[8]], [[True]], [[False]], executed=[[2]])
    assert gae(dead, GAMMA, LAMBDA)[0].item() == 1


def test_the_trace_between_chunks_decays_per_executed_step():
    # delta_1 = 4 - 2 = 2 (terminated); delta_0 = (1 + .5) + .25*2 - 1 = 1; A_0 = 1 + .25*.5*2
    td = rollout([[[1, 1]], [[4, 0]]], [[1], [2]], [[2], [0]], [[False], [True]], [[False], [False]], [[2], [1]])
    assert gae(td, GAMMA, LAMBDA)[0].flatten().tolist() == [1.25, 2.0]


def test_two_envs_out_of_phase_do_not_mix():
    # env 0 terminates at t=0, env 1 at t=1
    td = rollout(
        [[[1], [1]], [[1], [1]]],
        [[0, 0], [0, 0]],
        [[9, 4], [4, 9]],
        [[True, False], [False, True]],
        [[False, False], [False, False]],
    )
    # env 0: A_1 = 1 + .5*4 = 3, A_0 = 1; env 1: A_1 = 1, A_0 = 1 + .5*4 + .25*1
    assert gae(td, GAMMA, LAMBDA)[0].tolist() == [[1.0, 3.25], [3.0, 1.0]]


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_chunk_rewards_are_a_discounted_sum(gamma):
    assert _chunk_rewards(torch.tensor([[1.0, 10.0]]), gamma).item() == pytest.approx(1 + gamma * 10)


def test_the_missing_level_by_hand():
    # delta: 1 + .5*4 - 2 = 1, 2 - 4 = -2; a level L added to all values lowers the deltas by .5 L and L
    td = rollout([[[1]], [[2]]], [[2], [4]], [[4], [8]], [[False], [True]], [[False], [False]])
    assert missing_level(td, GAMMA) == pytest.approx((1 - 2) / 1.5)
    td["valid"] = torch.tensor([[True], [False]])
    assert missing_level(td, GAMMA) == pytest.approx(1 / 0.5)
    # two processes with the same rollout
    assert missing_level(td, GAMMA, lambda tensor: 2 * tensor) == pytest.approx(1 / 0.5)


def test_one_end_in_two_thousand_decisions_gives_no_level():
    ends = torch.zeros(32, 64, dtype=torch.bool)
    ends[0, 0] = True
    zeros, ones = torch.zeros(32, 64).tolist(), torch.ones(32, 64, 1).tolist()
    assert missing_level(rollout(ones, zeros, zeros, ends.tolist(), torch.zeros_like(ends).tolist()), 1.0) == 0.0
    ends[:, 0] = True
    assert missing_level(rollout(ones, zeros, zeros, ends.tolist(), torch.zeros_like(ends).tolist()), 1.0) == 64.0


def test_the_missing_level_is_zero_if_it_is_undetermined():
    td = rollout([[[1]]], [[2]], [[4]], [[False]], [[False]])
    assert missing_level(td, gamma=1.0) == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_with_the_missing_level_advantages_of_one_step_have_mean_0(seed):
    torch.manual_seed(seed)
    shape = (7, 5)
    ends = torch.rand(shape) < 0.2
    td = rollout(
        torch.rand(*shape, 3).tolist(),
        torch.randn(shape).tolist(),
        torch.randn(shape).tolist(),
        ends.tolist(),
        (~ends & (torch.rand(shape) < 0.2)).tolist(),
        torch.randint(1, 4, shape).tolist(),
    )
    level = missing_level(td, 0.9)
    td["value"] += level
    td["next", "value"] += level
    assert gae(td, 0.9, 0.0)[0].mean().item() == pytest.approx(0, abs=1e-5)
