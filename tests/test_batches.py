"""Batches come in the same order, off the training thread, and say what went wrong."""

import threading
import time

import pytest
import torch
from doubles_stream import Stream
from tensordict import TensorDict

from sparring.data.batches import BatchBuilder
from sparring.data.ring import VLABuffer


class Numbers:
    """A store that notes who asks, and fails at its `broken`th batch."""

    def __init__(self, broken=None):
        self.broken, self.asked_by = broken, []

    def sample(self, batch_size, generator):
        self.asked_by.append(threading.current_thread().name)
        if len(self.asked_by) - 1 == self.broken:
            raise OSError("the disk is gone")
        return TensorDict({"x": torch.rand(batch_size, generator=generator)}, [batch_size])


def drawn(builder, batches):
    return [next(builder)["x"].tolist() for _ in range(batches)]


def wait_until(condition):
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_batches_are_a_function_of_the_seed():
    with BatchBuilder(Numbers(), 3, seed=1) as a, BatchBuilder(Numbers(), 3, seed=1, prefetch=5) as b:
        first = drawn(a, 4)
        assert first == drawn(b, 4)
        assert len({tuple(batch) for batch in first}) == 4
    with BatchBuilder(Numbers(), 3, seed=2) as other:
        assert drawn(other, 1)[0] not in first


def test_a_resumed_builder_goes_on_with_the_same_batches():
    with BatchBuilder(Numbers(), 3, seed=1) as builder:
        drawn(builder, 2)
        state = builder.state_dict()
        expected = drawn(builder, 3)
        # also one that has prefetched something else already
        with BatchBuilder(Numbers(), 3, seed=7) as resumed:
            drawn(resumed, 5)
            resumed.load_state_dict(state)
            assert drawn(resumed, 3) == expected


def test_it_works_ahead_in_a_thread_of_its_own_and_no_further():
    store = Numbers()
    with BatchBuilder(store, 3, prefetch=2) as builder:
        next(builder)
        wait_until(lambda: len(store.asked_by) == 3)
        time.sleep(0.05)
        assert len(store.asked_by) == 3
        assert set(store.asked_by) == {"batches_0"}


def test_an_error_surfaces_at_once_and_again():
    store = Numbers(broken=2)
    with BatchBuilder(store, 3, prefetch=3) as builder:
        next(builder)
        wait_until(lambda: len(store.asked_by) >= 4)
        # batch 1 is ready, but the store is broken
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone"):
                next(builder)


def test_close_ends_the_thread():
    builder = BatchBuilder(Numbers(), 3)
    next(builder)
    before = [thread for thread in threading.enumerate() if thread.name.startswith("batches")]
    builder.close()
    assert before and not any(thread.is_alive() for thread in before)
    with pytest.raises(RuntimeError, match="after shutdown"):
        next(builder)


def test_windows_come_in_order_until_they_end_and_resume_where_they_were():
    windows = [TensorDict({"x": torch.full((2,), float(i))}, [2]) for i in range(5)]
    with BatchBuilder(windows) as builder:
        assert [x[0] for x in drawn(builder, 2)] == [0, 1]
        state = builder.state_dict()
        assert [float(w["x"][0]) for w in builder] == [2, 3, 4]
        assert list(builder) == []
        builder.load_state_dict(state)
        assert [x[0] for x in drawn(builder, 2)] == [2, 3]


def test_batches_of_a_ring_have_their_next_observations():
    ring, stream = VLABuffer(8), Stream(2)
    for number in range(12):
        ring.add(stream.step(["terminated", "go on"] if number == 6 else None))
    with BatchBuilder(ring, 32) as builder:
        batch = next(builder)
    state, following = batch["observation", "state"], batch["next", "observation", "state"]
    ended = (state[:, 0] == 6) & (state[:, 1] == 0)
    assert ended.any()
    assert torch.equal(following[:, 0] - state[:, 0], torch.where(ended, 0.5, 1.0))


@pytest.mark.parametrize("arguments", [{"source": Numbers()}, {"source": [], "batch_size": 3}])
def test_a_batch_size_goes_with_sampling(arguments):
    with pytest.raises(ValueError, match="batch_size goes with a store"):
        BatchBuilder(**arguments)


def test_at_least_the_batch_that_is_asked_for_is_made():
    with pytest.raises(ValueError, match="prefetch=0: expected at least 1"):
        BatchBuilder(Numbers(), 3, prefetch=0)
