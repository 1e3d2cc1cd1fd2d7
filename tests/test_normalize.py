import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.data.statistics import number_statistics
from sparring.normalize import Normalizer, RunningNormalizer
from sparring.policies.policy import Policy


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5), offset=st.floats(-1e4, 1e4))
def test_many_updates_equal_one_over_all_data(sizes, offset):
    torch.manual_seed(len(sizes))
    parts = [torch.randn(size, 3) * 2 + offset for size in sizes]
    normalizer = RunningNormalizer(3)
    for part in parts:
        normalizer.update(part)
    everything = torch.cat(parts).double()
    torch.testing.assert_close(normalizer.mean, everything.mean(0), atol=1e-6, rtol=1e-9)
    torch.testing.assert_close(normalizer.var, everything.var(0, unbiased=False), atol=1e-5, rtol=1e-6)


def test_identity_before_data_and_clipped_after():
    normalizer = RunningNormalizer(1, clip=2.0)
    assert normalizer(torch.tensor([[1.5]])).item() == 1.5
    normalizer.update(torch.tensor([[0.0], [2.0]]))
    assert normalizer(torch.tensor([[2.0]])).item() == 1.0
    assert normalizer(torch.tensor([[100.0]])).item() == 2.0


def test_constant_input_is_not_amplified():
    normalizer = RunningNormalizer(1)
    normalizer.update(torch.full((10, 1), 5.0))
    assert abs(normalizer(torch.tensor([[5.001]])).item()) < 0.01


def test_state_dict_contains_the_statistics():
    first, second = RunningNormalizer(2), RunningNormalizer(2)
    first.update(torch.randn(50, 2) * 3 + 1)
    second.load_state_dict(first.state_dict())
    x = torch.randn(4, 2)
    assert torch.equal(first(x), second(x))


@pytest.mark.parametrize("mode", ["mean_std", "min_max", "quantile"])
@pytest.mark.parametrize("running", [False, True], ids=["actions", "state"])
def test_inverse_restores_the_input_in_every_mode(mode, running):
    rows = np.random.default_rng(0).normal([3.0, -0.2, 5.0], [2.0, 0.01, 0.0], (1000, 3)).astype(np.float32)
    normalizer = RunningNormalizer(3) if running else Normalizer(3)
    normalizer.fit(number_statistics(rows), mode)
    x = torch.from_numpy(rows)
    y = normalizer(x)
    torch.testing.assert_close(normalizer.inverse(y), x, rtol=1e-6, atol=1e-6)
    # the constant third column is not blown up
    varying = y[:, :2].double()
    assert (y[:, 2] == 0).all()
    if mode == "mean_std":
        assert varying.mean(0).abs().max() < 1e-4 and (varying.std(0, unbiased=False) - 1).abs().max() < 1e-4
    elif mode == "min_max":
        torch.testing.assert_close(varying.amax(0), -varying.amin(0), rtol=1e-4, atol=0)
        assert (varying.amax(0) - 1).abs().max() < 1e-4
    else:
        assert ((varying.abs() <= 1).double().mean(0) - 0.98).abs().max() < 2e-3 and varying.abs().max() > 1.05


@pytest.mark.parametrize("mode", ["mean_std", "min_max", "quantile"])
@pytest.mark.parametrize("action_mode", ["mean_std", "min_max"])
def test_observations_and_actions_have_separate_modes(mode, action_mode):
    statistics = number_statistics(np.random.default_rng(1).exponential(1.0, (500, 2)))
    state, privileged, action = RunningNormalizer(2), RunningNormalizer(2), Normalizer(2)
    names = ("observation/state", "observation/privileged", "action")
    policy = Policy()
    policy._normalizers = lambda: dict(zip(names, (state, privileged, action), strict=True))
    policy.fit_normalizers({name: statistics for name in names}, mode, action_mode)
    expected = {name: Normalizer(2) for name in {mode, action_mode}}
    for name, normalizer in expected.items():
        normalizer.fit(statistics, name)
    assert torch.equal(state.scale, expected[mode].scale) and torch.equal(privileged.shift, expected[mode].shift)
    assert torch.equal(action.scale, expected[action_mode].scale)
    # after fit, update changes nothing
    state.update(torch.randn(50, 2) * 9)
    assert torch.equal(state.scale, expected[mode].scale)


def test_memory_limits_the_weight_of_old_numbers():
    # 2 updates' worth of old zeros and one of new numbers, whose mean is 6
    normalizer = RunningNormalizer(1, memory=2)
    for _ in range(5):
        normalizer.update(torch.zeros(4, 1))
    normalizer.update(torch.tensor([[4.0], [8.0], [4.0], [8.0]]))
    assert normalizer.mean.item() == pytest.approx(2.0) and normalizer.count.item() == 12
    assert normalizer.var.item() == pytest.approx((2 * 16 + 2 * 64) / 12 - 4)
    # an empty update changes nothing
    normalizer.update(torch.zeros(0, 1))
    assert normalizer.mean.item() == pytest.approx(2.0) and normalizer.count.item() == 12
