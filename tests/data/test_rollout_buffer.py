import logging

import pytest
import torch
from doubles import LinearPolicy, counting_env
from doubles_stream import Stream

from sparring.collect.collector import Collector
from sparring.data import buffer as rollout
from sparring.data.buffer import RolloutBuffer


def filled(steps=4):
    collector = Collector(counting_env(), LinearPolicy(), seed=0)
    buffer = RolloutBuffer(steps)
    collector.collect(buffer)
    return collector, buffer


def test_get_before_full_and_add_after_full_raise_errors():
    collector, buffer = filled()
    transition = collector.decide()
    with pytest.raises(RuntimeError, match="the rollout is full"):
        buffer.add(transition)
    buffer.clear()
    assert not buffer.is_full()
    with pytest.raises(RuntimeError, match="has 0 of 4 decisions"):
        buffer.get()


def test_the_size_is_logged_before_it_is_allocated(caplog, monkeypatch):
    transition = Collector(counting_env(), LinearPolicy(), seed=0).decide()
    monkeypatch.setattr(rollout, "_readable_size", lambda nbytes: f"{nbytes} bytes")
    buffer = RolloutBuffer(4)
    with caplog.at_level(logging.INFO, "sparring.data.buffer"):
        buffer.add(transition)
    (record,) = [record for record in caplog.records if record.name == "sparring.data.buffer"]
    assert record.getMessage() == f"buffer: 4 x 2 transitions, {buffer.bytes()} bytes in RAM"


def test_get_returns_views_and_observations_are_stored_once():
    _, buffer = filled()
    flat, again = buffer.get(), buffer.get(flatten=False)
    assert flat["observation", "state"].data_ptr() == again["observation", "state"].data_ptr()
    assert ("next", "observation") not in flat.keys(True)
    # T+1 rows of 2 envs x 3 float32 numbers, not 2 T rows
    assert buffer._observation["state"].shape == (5, 2, 3)


def test_memory_is_reused_by_the_next_rollout():
    collector, buffer = filled()
    before, size = buffer.get()["action"].data_ptr(), buffer.bytes()
    collector.collect(buffer)
    assert buffer.get()["action"].data_ptr() == before
    assert buffer.bytes() == size


def test_added_columns_are_dropped_with_their_rollout():
    collector, buffer = filled()
    before = buffer.get()["value"].clone()
    buffer.set("extra", torch.ones(4, 2))
    assert buffer.get()["extra"].shape == (8,) and buffer.get(flatten=False)["extra"].shape == (4, 2)
    collector.collect(buffer)
    assert buffer.get().get("extra", None) is None
    # values belong to the observations of the new rollout, not to those of the last one
    assert not torch.equal(buffer.get()["value"], before)


def test_keys_written_into_a_rollout_are_absent_from_the_next():
    collector, buffer = filled()
    rollout = buffer.get(flatten=False)
    rollout["advantage"] = torch.ones(4, 2)
    collector.collect(buffer)
    assert buffer.get().get("advantage", None) is None


def test_true_next_observations_are_returned_on_request():
    _, buffer = filled(steps=6)
    state = buffer.get(flatten=False)["observation", "state"]
    following = buffer.get(flatten=False, following=True)["next", "observation", "state"]
    # episodes of 3 and 5 steps: (env, episode, step) advances by one step, also at the end of an episode
    assert torch.equal(following, state + torch.tensor([0.0, 0.0, 1.0]))
    assert ("next", "observation") not in buffer.get().keys(True)
    batch = buffer.sample(200, torch.Generator().manual_seed(0))
    assert torch.equal(batch["next", "observation", "state"][:, 2], batch["observation", "state"][:, 2] + 1)
    assert len(batch["observation", "state"].unique(dim=0)) == 12
    assert [w["observation", "state"][:, 0, 2].tolist() for w in buffer.windows(4)] == [[0, 1, 2, 0]]


def test_sampling_needs_the_last_next_observation():
    _, other = filled(steps=4)
    buffer = RolloutBuffer(4)
    for transition in other.get(flatten=False, following=True).unbind(0):
        buffer.add(transition)
    with pytest.raises(RuntimeError, match=r"close\(\) the rollout first"):
        buffer.sample(3)


def test_a_transition_after_a_closed_rollout_must_continue_it():
    buffer, stream = RolloutBuffer(6), Stream(2)
    for _ in range(2):
        buffer.add(stream.step(["go on", "terminated"]))
    buffer.close(stream.root())
    assert torch.equal(buffer.last["observation", "state"], stream.root()["observation", "state"])
    stream.jump()
    with pytest.raises(RuntimeError, match=r"differs .*; clear\(\) the buffer"):
        buffer.add(stream.step())
    stream.clock = 2
    continuing = stream.step(["truncated", "truncated"])
    # env 1 began a new episode, which may start in any state
    continuing["observation", "state"][1] = 7
    buffer.add(continuing)
    buffer.close(stream.root())
    stream.jump()
    buffer.add(stream.step())
    assert len(buffer) == 4
