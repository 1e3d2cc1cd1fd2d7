"""The ring buffer compared with a list, its memory, files, threads and errors."""

import logging
import shutil
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from doubles_stream import Stream
from hypothesis import given, settings
from hypothesis import strategies as st

import sparring.data.buffer as buffer_module
from sparring.data.buffer import RolloutBuffer, VLABuffer
from sparring.errors import UserError


class ListModel:
    """A ring as a list of transitions; the last one is readable once its next observation is known."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.stored, self.closed = [], False

    def add(self, transition):
        self.stored = self.stored[-self.capacity :]
        self.stored.append(transition)
        self.closed = False

    def close(self):
        self.stored = self.stored[-self.capacity :]
        self.closed = True

    def clear(self):
        self.stored, self.closed = [], False

    @property
    def readable(self):
        return self.stored if self.closed else self.stored[:-1]


def all_equal(ours, expected):
    keys = set(expected.keys(True, True))
    assert set(ours.keys(True, True)) == keys
    return all(torch.equal(ours[key], expected[key]) and ours[key].dtype == expected[key].dtype for key in keys)


def check_against(model, ring, window):
    expected = model.readable
    assert len(ring) == len(expected)
    assert ring.is_full() == (len(expected) == model.capacity)
    if not expected:
        with pytest.raises(RuntimeError, match="no readable transition"):
            ring.get()
        return
    windows = list(ring.windows(window, following=True))
    assert len(windows) == len(expected) // window
    for number, slice_of_time in enumerate(windows):
        assert all_equal(slice_of_time, torch.stack(expected[number * window : (number + 1) * window]))
    stacked = torch.stack(expected)
    assert all_equal(ring.get(flatten=False, following=True), stacked)
    assert all_equal(ring.get(), stacked.flatten(0, 1).exclude(("next", "observation")))
    sampled = ring.sample(5, torch.Generator().manual_seed(0))
    found = {(int(t["observation", "state"][n, 0]), n): t[n] for t in expected for n in range(len(t))}
    for row in sampled:
        assert all_equal(row, found[int(row["observation", "state"][0]), int(row["observation", "state"][1])])


ENVS = 2
MASKS = st.lists(st.sampled_from(["go on", "terminated", "truncated"]), min_size=ENVS, max_size=ENVS)
OPERATIONS = st.one_of(
    st.tuples(st.just("add"), MASKS),
    st.tuples(st.just("rollout"), st.lists(MASKS, min_size=1, max_size=7)),
    st.tuples(st.just("close"), st.none()),
    st.tuples(st.just("clear"), st.none()),
)


@settings(max_examples=120, deadline=None)
@given(st.integers(1, 5), st.lists(OPERATIONS, max_size=30), st.integers(1, 3))
def test_any_sequence_of_operations_reads_like_a_list(capacity, operations, window):
    ring, model, stream = VLABuffer(capacity), ListModel(capacity), Stream(ENVS)
    for operation, argument in operations:
        if operation == "add":
            transition = stream.step(argument)
            ring.add(transition)
            model.add(transition.exclude("noise"))
        elif operation == "rollout":
            rollout = [stream.step(mask) for mask in argument]
            ring.add(torch.stack(rollout))
            for transition in rollout:
                model.add(transition.exclude("noise"))
            model.close()
        elif operation == "close" and model.stored:
            ring.close(stream.root())
            model.close()
        elif operation == "clear":
            ring.clear()
            model.clear()
            stream.jump()
        check_against(model, ring, window)


def test_the_newest_transition_waits_for_its_next_observation():
    ring, stream = VLABuffer(3), Stream(2)
    ring.add(stream.step())
    assert len(ring) == 0
    ring.add(stream.step())
    assert len(ring) == 1
    ring.close(stream.root())
    assert len(ring) == 2 and not ring.is_full()


def test_a_transition_that_does_not_continue_is_refused_until_cleared():
    ring, stream = VLABuffer(3), Stream(2)
    ring.add(stream.step())
    ring.close(stream.root())
    stream.jump()
    with pytest.raises(RuntimeError, match=r"observation/.* differs .*; clear\(\)"):
        ring.add(stream.step())
    # NaN is reported as such, not as another env state
    stream.clock, broken = 1, Stream(2).root()
    broken["observation", "state"][0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="observation/state contains NaN"):
        ring.add(stream.step().update(broken))
    ring.clear()
    ring.add(stream.step())
    # an episode that ended is followed by anything
    ring.close(stream.step(["truncated", "terminated"])["next"])


def test_every_transition_is_drawn_equally_often():
    ring, stream = VLABuffer(4), Stream(2)
    for _ in range(7):
        ring.add(stream.step())
    states = ring.sample(8000, torch.Generator().manual_seed(0))["observation", "state"]
    clocks, counts = states[:, :2].unique(dim=0, return_counts=True)
    # 4 decisions of 2 robots; the standard deviation of a count is 30
    assert clocks[:, 0].unique().tolist() == [2, 3, 4, 5] and len(counts) == 8
    assert (counts - 1000).abs().max() < 150


def test_observations_are_stored_once_and_the_size_is_logged_first(caplog, monkeypatch):
    stream = Stream(2)
    transition = stream.step()
    ring = VLABuffer(50)
    assert ring.bytes() == 0
    monkeypatch.setattr(buffer_module, "_readable_size", lambda nbytes: f"{nbytes} bytes")
    with caplog.at_level(logging.INFO, "sparring.data.buffer"):
        ring.add(transition)
    size = ring.bytes()
    assert f" transitions, {size} bytes in RAM, plus 20 bytes for" in caplog.text
    for _ in range(60):
        ring.add(stream.step())
    assert ring.bytes() == size
    # 12 bytes of image and 2 float32 numbers in each of the 51 rows of 2 robots
    assert ring._observation.bytes() == 51 * 2 * (12 + 8)
    ring.add(stream.step(["terminated", "go on"]))
    assert ring.bytes() == size + 12 + 8
    for _ in range(60):
        ring.add(stream.step())
    # final observations are freed with their transitions
    assert ring.bytes() == size


def test_a_rollout_can_be_added_to_another_buffer():
    stream, rollout, ring = Stream(2), RolloutBuffer(6), VLABuffer(6)
    for mask in (None, ["terminated", "go on"], None, None, ["truncated"] * 2, None):
        rollout.add(stream.step(mask))
    rollout.close(stream.root())
    whole = rollout.get(flatten=False, following=True)
    ring.add(whole)
    assert ring.is_full()
    assert all_equal(ring.get(flatten=False, following=True), whole)
    again = RolloutBuffer(6)
    again.add(ring.get(flatten=False, following=True))
    assert all_equal(again.get(flatten=False, following=True), whole)


# ---- size and file


def test_the_size_and_the_place_are_logged(caplog, tmp_path):
    transition = Stream(2).step()
    with caplog.at_level(logging.INFO, "sparring.data.buffer"):
        VLABuffer(2000).add(transition)
        VLABuffer(2000, memory_limit=1000, folder=tmp_path).add(transition)
    ram, file = (record.getMessage() for record in caplog.records)
    assert ram.startswith("buffer: 2,000 x 2 transitions, ") and "kB in RAM, plus 0.0 kB for" in ram
    assert f"kB in {tmp_path}" in file


def test_a_large_ring_is_in_a_file_that_is_deleted_with_it(tmp_path):
    stream, model = Stream(2), deque(maxlen=5)
    ring = VLABuffer(5, memory_limit=0, folder=tmp_path)
    for number in range(12):
        model.append(stream.step(["terminated", "go on"] if number % 3 == 0 else None))
        ring.add(model[-1])
    ring.close(stream.root())
    # the file has no name, so that even a killed process leaves nothing
    assert list(tmp_path.iterdir()) == []
    assert f"{tmp_path}/sparring-buffer-" in Path("/proc/self/maps").read_text()
    assert all_equal(ring.get(flatten=False, following=True), torch.stack(list(model)).exclude("noise"))
    del ring
    assert f"{tmp_path}/sparring-buffer-" not in Path("/proc/self/maps").read_text()


def test_a_folder_without_room_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    ring = VLABuffer(2000, memory_limit=0, folder=tmp_path)
    with pytest.raises(UserError, match=r"the buffer needs 0\.\d MB|the buffer needs \d+ kB, but .* has 1\.0 kB free"):
        ring.add(Stream(2).step())
    assert list(tmp_path.iterdir()) == []


# ---- a thread that reads while another one writes


def test_a_reader_thread_gets_complete_transitions_only():
    ring, stream = VLABuffer(8), Stream(4)
    for _ in range(10):
        ring.add(stream.step())
    stop, torn = threading.Event(), []

    def read():
        """Return the number of reads."""
        generator = torch.Generator().manual_seed(0)
        for times in count():
            if stop.is_set():
                return times
            batch = ring.sample(16, generator)
            clock = batch["observation", "state"][:, 0]
            torn.extend((batch["action"][:, 0, 0] != clock).nonzero().tolist())
            torn.extend((batch["observation", "image"][:, 0, 0, 0] != clock % 251).nonzero().tolist())

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read)
        for number in range(3000):
            ring.add(stream.step(["terminated"] * 4 if number % 5 == 0 else None))
        stop.set()
    # raises exceptions of the reader
    assert reader.result() > 10
    assert torn == []


def test_the_newest_rollout_is_copied_once_and_added_columns_are_dropped_with_it():
    ring, stream = VLABuffer(5, steps=2), Stream(2)
    for number in range(4):
        ring.add(stream.step(["go on", "truncated"] if number == 2 else None))
    ring.close(stream.root())
    rollout = ring.rollout()
    assert rollout["observation", "state"][:, 0, 0].tolist() == [2, 3]
    assert ring.rollout()["action"].data_ptr() == rollout["action"].data_ptr()
    ring.set("value", torch.ones(2, 2))
    assert ring.rollout()["value"].shape == (2, 2)
    at, final = ring.finals()
    assert at.tolist() == [[0], [1]] and final["state"].tolist() == [[2.5, 1.0]]
    assert torch.equal(ring.last["observation", "state"], stream.root()["observation", "state"])
    ring.add(stream.step())
    ring.close(stream.root())
    assert ring.rollout().get("value", None) is None
    ring.add(stream.step())
    # the rollout before the newest one, then the newest one, which is readable once it is closed
    assert ring.rollout()["observation", "state"][:, 0, 0].tolist() == [3, 4]
    ring.close(stream.root())
    assert ring.rollout()["observation", "state"][:, 0, 0].tolist() == [4, 5]


def test_a_transition_must_have_the_keys_of_the_first_one():
    ring, stream = VLABuffer(4), Stream(2)
    ring.add(stream.step())
    with pytest.raises(KeyError, match="has no action, next/reward; earlier ones had"):
        ring.add(stream.step().exclude("action", ("next", "reward")))
    # keys that the first transition did not have are dropped
    ring.add(stream.step().set("extra", torch.zeros(2)))
    assert ring.get().get("extra", None) is None


@pytest.mark.parametrize("make", [VLABuffer, RolloutBuffer])
def test_invalid_sizes_and_transitions_are_refused(make):
    for size in (0, -1, 2.5, "4", True, None):
        with pytest.raises(ValueError, match="expected a whole number >= 1"):
            make(size)
    buffer = make(4)
    for wrong, message in (({"action": 1}, "got dict"), (Stream(2).step()[0], "got a TensorDict \\[\\]")):
        with pytest.raises(TypeError, match=f"a transition \\[N\\] or a rollout .* {message}"):
            buffer.add(wrong)
    with pytest.raises(RuntimeError, match="add\\(\\)"):
        _ = buffer.last
    with pytest.raises(RuntimeError, match="add\\(\\) one first"):
        buffer.close(Stream(2).step()["next"])
    # also the last observation of a rollout that is not full
    transition = Stream(2).step()
    buffer.add(transition)
    buffer.close(transition["next"])
    assert (buffer.last["observation"] == transition["next", "observation"]).all()


@pytest.mark.parametrize("make", [VLABuffer, RolloutBuffer])
def test_windows_without_a_length_are_refused(make):
    buffer, stream = make(2), Stream(2)
    for _ in range(2):
        buffer.add(stream.step())
    buffer.close(stream.root())
    with pytest.raises(ValueError, match="length"):
        next(buffer.windows(0))


def test_nothing_is_cast_or_repeated_to_fit():
    for buffer in (VLABuffer(4), RolloutBuffer(4)):
        stream = Stream(2)
        buffer.add(stream.step())
        floats = stream.step()
        floats["observation", "image"] = floats["observation", "image"] / 255
        with pytest.raises(
            ValueError, match=r"observation/image is torch.float32 \[2, 3, 2, 2\], but .* torch.uint8 \["
        ):
            buffer.add(floats)
        with pytest.raises(ValueError, match=r"is torch.* \[1.*\], but in the first transition it was torch.* \[2"):
            buffer.add(Stream(1).step())
        stream.clock = 1
        buffer.add(stream.step())
        buffer.close(stream.root())
        assert len(buffer) == 2
    with pytest.raises(ValueError, match=r"observation/\w+ is torch.* \[1"):
        VLABuffer.close(ring_of(2), Stream(1).root())


def ring_of(envs):
    ring = VLABuffer(4)
    ring.add(Stream(envs).step())
    return ring


def test_a_key_of_zero_entries_is_stored():
    for buffer in (VLABuffer(2), RolloutBuffer(2)):
        stream = Stream(2)
        for _ in range(2):
            transition = stream.step(["terminated", "go on"])
            for observation in (transition["observation"], transition["next", "observation"]):
                observation["nothing"] = torch.zeros(2, 0)
            buffer.add(transition)
        buffer.close(transition["next"])
        assert buffer.get(flatten=False, following=True)["next", "observation", "nothing"].shape == (2, 2, 0)


def test_reading_an_empty_ring_raises_an_error():
    with pytest.raises(RuntimeError, match="no readable transition"):
        VLABuffer(4).sample(1)
    with pytest.raises(RuntimeError, match="no readable transition"):
        next(VLABuffer(4).windows(1))
