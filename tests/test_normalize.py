import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.normalize import RunningNormalizer


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


def test_a_constant_input_is_not_blown_up():
    normalizer = RunningNormalizer(1)
    normalizer.update(torch.full((10, 1), 5.0))
    assert abs(normalizer(torch.tensor([[5.001]])).item()) < 0.01


def test_statistics_travel_with_the_weights():
    first, second = RunningNormalizer(2), RunningNormalizer(2)
    first.update(torch.randn(50, 2) * 3 + 1)
    second.load_state_dict(first.state_dict())
    x = torch.randn(4, 2)
    assert torch.equal(first(x), second(x))
