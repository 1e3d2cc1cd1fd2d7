"""Large tensors of a message go through shared memory, the rest of it otherwise."""

import pickle

import torch

from sparring.processes.shared_memory import LARGE, Elsewhere, Parcels, SharedTensors, received


def message(number: int, size: int = LARGE) -> dict:
    large = torch.full((size,), number, dtype=torch.uint8)
    return {"groups": [{"root": {"image": large}, "env": None}, {"small": torch.tensor([number])}], "version": number}


def same(one: dict, other: dict) -> bool:
    images = [told["groups"][0]["root"]["image"] for told in (one, other)]
    small = [told["groups"][1]["small"] for told in (one, other)]
    return torch.equal(*images) and torch.equal(*small) and one["version"] == other["version"]


def test_what_arrives_is_what_was_sent_and_the_pipe_carries_none_of_it(tmp_path):
    parcels = Parcels(2, tmp_path)
    sent = [parcels.send(message(number), number) for number in (4, 5)]
    assert sent[0]["groups"][0]["root"]["image"] == Elsewhere(("groups", "0", "root", "image"))
    assert len(pickle.dumps(sent[0])) < 2000
    shared = SharedTensors.attach(parcels.shared.handle())
    assert all(same(received(told, shared, told["version"]), message(told["version"])) for told in sent)
    # nothing is left on the disk
    assert not list(tmp_path.iterdir())


def test_a_place_is_written_again_without_changing_what_was_received(tmp_path):
    parcels = Parcels(2, tmp_path)
    got = received(parcels.send(message(0), 0), parcels.shared, 0)
    parcels.send(message(1), 1)
    parcels.send(message(2), 2)
    assert same(got, message(0))


def test_what_does_not_fit_stays_in_its_message(tmp_path):
    parcels = Parcels(1, tmp_path)
    parcels.send(message(0), 0)
    longer = parcels.send(message(1, LARGE + 1), 1)
    assert same(longer, message(1, LARGE + 1))
    assert same(received(longer, parcels.shared, 1), message(1, LARGE + 1))
    new = {"other": torch.zeros(LARGE)}
    assert parcels.send(new, 2)["other"] is new["other"]


def test_where_the_first_message_has_nothing_large_all_stays_in_messages(tmp_path):
    # the receiver is told with the first one where large tensors lie
    parcels = Parcels(1, tmp_path)
    small = {"version": 3}
    assert parcels.send(small, 0) == small
    assert same(parcels.send(message(1), 1), message(1)) and parcels.shared is None
    assert same(received(message(1), None, 1), message(1))
