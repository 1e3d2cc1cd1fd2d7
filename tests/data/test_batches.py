"""Batches come in a reproducible order, from another thread, and with the errors of their source."""

import threading
import time
from itertools import islice

import pytest
import torch
from doubles_episodes import numbered_episode
from doubles_stream import Stream
from tensordict import TensorDict

from sparring.data.batches import BatchBuilder
from sparring.data.buffer import VLABuffer
from sparring.data.episodes import EpisodeStore
from sparring.data.windows import SequentialWindows


class Numbers:
    """A store that records the calling thread and fails `failures` times after `broken` batches."""

    def __init__(self, broken=0, failures=0):
        self.broken, self.failures, self.callers = broken, failures, []

    def sample(self, batch_size, generator):
        self.callers.append(threading.current_thread().name)
        if self.broken < len(self.callers) <= self.broken + self.failures:
            raise OSError("the disk is gone")
        return TensorDict({"x": torch.rand(batch_size, generator=generator)}, [batch_size])


def take(builder, batches):
    return [next(builder)["x"].tolist() for _ in range(batches)]


def wait_until(condition):
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_batches_are_a_function_of_the_seed():
    with BatchBuilder(Numbers(), 3, seed=1) as a, BatchBuilder(Numbers(), 3, seed=1, prefetch=5) as b:
        first = take(a, 4)
        assert first == take(b, 4)
        assert len({tuple(batch) for batch in first}) == 4
    with BatchBuilder(Numbers(), 3, seed=2) as other:
        assert take(other, 1)[0] not in first


def test_a_resumed_builder_continues_with_the_same_batches():
    with BatchBuilder(Numbers(), 3, seed=1) as builder:
        take(builder, 2)
        state = builder.state_dict()
        expected = take(builder, 3)
        # also by a builder that has already prefetched other batches
        with BatchBuilder(Numbers(), 3, seed=7) as resumed:
            take(resumed, 5)
            resumed.load_state_dict(state)
            assert take(resumed, 3) == expected


def test_batches_are_prefetched_in_a_thread_up_to_the_limit():
    store = Numbers()
    with BatchBuilder(store, 3, prefetch=2) as builder:
        next(builder)
        wait_until(lambda: len(store.callers) == 3)
        time.sleep(0.05)
        assert len(store.callers) == 3
        assert set(store.callers) == {"batches_0"}


def test_an_error_is_raised_at_once_and_repeatedly():
    store = Numbers(broken=3, failures=1000)
    with BatchBuilder(store, 3, prefetch=3) as builder:
        # batch 3 is requested once batch 0 is returned
        next(builder)
        wait_until(lambda: builder._pending[-1].done())
        # batch 1 is ready, but the store is broken
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone"):
                next(builder)


@pytest.mark.parametrize("prefetch", [1, 3])
def test_a_batch_that_failed_is_requested_again(prefetch):
    with BatchBuilder(Numbers(), 3) as uninterrupted:
        expected = take(uninterrupted, 6)
    store, batches, errors = Numbers(broken=2, failures=2), [], 0
    with BatchBuilder(store, 3, prefetch=prefetch) as builder:
        while len(batches) < 6:
            try:
                batches.append(next(builder)["x"].tolist())
            except OSError:
                errors += 1
            assert builder.state_dict()["consumed"] == len(batches)
    assert batches == expected and 1 <= errors <= 2


def test_a_ring_that_is_empty_at_first_can_be_read_later():
    ring, stream = VLABuffer(4), Stream(2)
    with BatchBuilder(ring, 3) as builder:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no readable transition"):
                next(builder)
        ring.add(stream.step())
        ring.close(stream.root())
        assert next(builder)["observation", "state"][:, 0].tolist() == [0, 0, 0]
        assert builder.consumed == 1


@pytest.mark.parametrize("prefetch", [1, 2])
def test_the_error_of_an_iterator_is_raised(prefetch):
    def source():
        yield TensorDict({"x": torch.zeros(2)}, [2])
        # the consumer is already waiting
        time.sleep(0.05)
        raise OSError("the disk is gone")

    with BatchBuilder(source(), prefetch=prefetch) as builder:
        next(builder)
        for _ in range(3):
            with pytest.raises(OSError, match="the disk is gone"):
                next(builder)
        assert builder.consumed == 1


def test_windows_in_time_order_resume_on_the_same_and_on_a_new_builder(tmp_path):
    store = EpisodeStore(tmp_path)
    for number in range(6):
        store.append(numbered_episode(number, 8))

    def windows():
        return SequentialWindows(store, 4, 2, seed=3)

    def states(batches):
        return [batch["observation", "state"].tolist() for batch in batches]

    expected = states(windows())
    with BatchBuilder(windows()) as builder:
        first = states(islice(builder, 2))
        state = builder.state_dict()
        middle = states(islice(builder, 2))
        # this episode is part of the next pass only
        store.append(numbered_episode(6, 8))
        builder.load_state_dict(state)
        assert first + states(builder) == expected and middle == expected[2:4]
    with BatchBuilder(windows()) as fresh:
        fresh.load_state_dict(state)
        assert fresh.consumed == 2
        assert first + states(fresh) == expected


def test_different_seeds_and_batch_numbers_give_different_draws():
    store = Numbers()
    with BatchBuilder(store, 3, seed=4295) as one, BatchBuilder(store, 3, seed=0) as other:
        # 4295 * 1000003 minus 2^32
        assert one._draw(0)["x"].tolist() != other._draw(45589)["x"].tolist()
    with BatchBuilder(store, 3, seed=2**63) as large:
        take(large, 1)


def test_close_ends_the_thread():
    # other tests in this process may have left builders open
    others = set(threading.enumerate())
    builder = BatchBuilder(Numbers(), 3)
    next(builder)
    started = set(threading.enumerate()) - others
    builder.close()
    assert started and not any(thread.is_alive() for thread in started)
    with pytest.raises(RuntimeError, match="after shutdown"):
        next(builder)


def test_windows_come_in_order_and_can_be_resumed():
    windows = [TensorDict({"x": torch.full((2,), float(i))}, [2]) for i in range(5)]
    with BatchBuilder(windows) as builder:
        assert [x[0] for x in take(builder, 2)] == [0, 1]
        state = builder.state_dict()
        assert [float(w["x"][0]) for w in builder] == [2, 3, 4]
        assert list(builder) == []
        builder.load_state_dict(state)
        assert [x[0] for x in take(builder, 2)] == [2, 3]


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
def test_a_batch_size_is_for_sources_with_sample_only(arguments):
    with pytest.raises(ValueError, match="expected batch_size if the source has sample"):
        BatchBuilder(**arguments)


def test_prefetch_must_be_at_least_1():
    with pytest.raises(ValueError, match="prefetch=0: expected at least 1"):
        BatchBuilder(Numbers(), 3, prefetch=0)
