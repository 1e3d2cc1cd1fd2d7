"""Large tensors of a message go through shared memory, the rest through the pipe."""

import pickle

import torch

from sparring.collect.remote.protocol import LARGE, TensorSlots, _InSlot
from sparring.processes.memory import SharedMemory


def message(number: int, size: int = LARGE) -> dict:
    large = torch.full((size,), number, dtype=torch.uint8)
    return {"groups": [{"root": {"image": large}, "env": None}, {"small": torch.tensor([number])}], "version": number}


def same(one: dict, other: dict) -> bool:
    images = [got["groups"][0]["root"]["image"] for got in (one, other)]
    small = [got["groups"][1]["small"] for got in (one, other)]
    return torch.equal(*images) and torch.equal(*small) and one["version"] == other["version"]


def test_received_tensors_equal_those_sent_and_bypass_the_pipe(tmp_path):
    slots = TensorSlots(2, tmp_path)
    sent = [slots.extract(message(number), number) for number in (4, 5)]
    assert sent[0]["groups"][0]["root"]["image"] == _InSlot(("groups", "0", "root", "image"))
    assert len(pickle.dumps(sent[0])) < 2000
    shared = SharedMemory.attach(slots.shared.handle)
    assert all(same(TensorSlots.restore(got, shared, got["version"]), message(got["version"])) for got in sent)
    # no file is left
    assert not list(tmp_path.iterdir())


def test_reused_slot_does_not_change_a_received_message(tmp_path):
    slots = TensorSlots(2, tmp_path)
    got = TensorSlots.restore(slots.extract(message(0), 0), slots.shared, 0)
    slots.extract(message(1), 1)
    slots.extract(message(2), 2)
    assert same(got, message(0))


def test_tensor_that_does_not_fit_stays_in_its_message(tmp_path):
    slots = TensorSlots(1, tmp_path)
    slots.extract(message(0), 0)
    longer = slots.extract(message(1, LARGE + 1), 1)
    assert same(longer, message(1, LARGE + 1))
    assert same(TensorSlots.restore(longer, slots.shared, 1), message(1, LARGE + 1))
    new = {"other": torch.zeros(LARGE)}
    assert slots.extract(new, 2)["other"] is new["other"]


def test_without_large_tensors_in_the_first_message_no_slots_are_used(tmp_path):
    # only the first message can name the shared memory
    slots = TensorSlots(1, tmp_path)
    small = {"version": 3}
    assert slots.extract(small, 0) == small
    assert same(slots.extract(message(1), 1), message(1)) and slots.shared is None
    assert same(TensorSlots.restore(message(1), None, 1), message(1))
