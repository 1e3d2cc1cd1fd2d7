"""Gradient steps on a world model: what moves, what stays, what is saved, and that it learns."""

import copy
from types import SimpleNamespace

import torch
from doubles_moving import SPEC, make, moving_windows

from sparring.algorithms.world_model import WorldModelLearner
from sparring.processes.distributed import Distributed


def learner_of(model, learning_rate: float = 4e-3) -> WorldModelLearner:
    return WorldModelLearner(SimpleNamespace(learning_rate=learning_rate), model, Distributed("cpu"), "teacher")


def batches(rows: int = 8, steps: int = 4, first: int = 0):
    while True:
        yield moving_windows(rows, steps, seed=first)
        first += 1


def split(model) -> tuple[dict, dict]:
    """Copies of the tokenizer's weights, and of the others."""
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    tokens = {name: p for name, p in weights.items() if name.startswith("tokenizer.")}
    return tokens, {name: p for name, p in weights.items() if name not in tokens}


def same(one: dict, other: dict) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_first_the_tokenizer_learns_then_all_but_it():
    model = make(tokenizer_steps=3)
    learner, data = learner_of(model), batches()
    tokens, others = split(model)
    metrics = learner.update(data, 3, 0.0)
    assert "loss_tokenizer" in metrics and "loss_tokens" not in metrics
    learned_tokens, untouched = split(model)
    assert not same(tokens, learned_tokens) and same(others, untouched)
    metrics = learner.update(data, 3, 0.0)
    assert "loss_tokens" in metrics and "loss_tokenizer" not in metrics
    frozen, learned = split(model)
    # to the bit: neither momentum nor weight decay may move what has stopped to learn
    assert same(learned_tokens, frozen) and not same(untouched, learned)
    assert int(model.steps) == 6


def test_metrics_of_a_part_that_began_in_between():
    metrics = learner_of(make(tokenizer_steps=2)).update(batches(), 3, 0.0)
    assert {"loss_tokenizer", "loss_tokens", "accuracy", "loss", "grad_norm", "lr"} <= metrics.keys()


def test_the_learning_rate_rises_and_falls():
    learner, data = learner_of(make(), 1.0e-3), batches(2, 2)
    assert abs(learner.update(data, 1, 0.0)["lr"] - 1e-3 / 50) < 1e-9
    assert abs(learner.update(data, 1, 0.5)["lr"] - 0.5e-3 * 2 / 50) < 1e-9


def test_the_tokenizer_comes_to_rest_before_it_stops():
    learner, data = learner_of(make(tokenizer_steps=20), 1e-3), batches(2, 2)
    learner.update(data, 19, 0.0)
    # twice as fast as the rest, but a twentieth of it is left (and the 20th of 50 steps in which it rises)
    assert abs(learner.update(data, 1, 0.0)["lr"] - 1e-3 * 2 * 0.05 * 20 / 50) < 1e-9
    assert abs(learner.update(data, 1, 0.0)["lr"] - 1e-3 / 50) < 1e-9


def test_saved_and_loaded_it_takes_the_same_next_step():
    for steps in (2, 4, 5):  # while the tokenizer learns, just when it stops, and after
        model = make(tokenizer_steps=4)
        learner = learner_of(model)
        learner.update(batches(), steps, 0.1)
        other = make(seed=1, tokenizer_steps=4)
        other_learner = learner_of(other)
        other.load_state_dict(model.state_dict())
        # as from a file: an optimiser that is handed the other's own tensors would share them
        other_learner.load_state_dict(copy.deepcopy(learner.state_dict()))
        for each in (learner, other_learner):
            torch.manual_seed(7)
            each.update(batches(first=100), 2, 0.2)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_it_learns_what_actions_do():
    """Better than copying on what it has not seen, and worse when told the wrong action."""
    model = make(tokenizer_steps=100, members=2)
    learner, data = learner_of(model), batches()
    learner.update(data, 220, 0.2)
    learner.update(data, 80, 0.8)
    td = moving_windows(64, 1, seed=10**6)[:, 0]
    predicted = model.predict(td)
    other = td.clone()
    other["action"] = -td["action"]
    misled = model.predict(other)
    for camera in model.cameras:
        now, true = td["observation", "image", camera].float(), td["next", "observation", "image", camera].float()
        error, copied, wrong = (
            (picture.float() - true).square().mean()
            for picture in (predicted["image", camera], now, misled["image", camera])
        )
        assert error < 0.3 * copied < wrong
    told, scored = model.correct_tokens(td), model.score(td)
    assert told["right"].float().mean() > 0.9 > told["copied"].float().mean()
    assert (scored["error"] < model.score(other)["error"]).float().mean() > 0.9
    assert (predicted["state"] - td["next", "observation", "state"]).abs().mean() < 0.25
    assert (predicted["reward"] - td["next", "reward"].sum(-1)).abs().mean() < 0.25
    assert predicted["terminated"].max() < 0.2


def test_it_remembers():
    """A colour that is shown once is asked for three frames later: without a memory nobody can know it."""
    windows = {}
    for name in ("memory", "none"):
        model = make(tokenizer_steps=50, members=1, memory_channels=8)
        learner = learner_of(model)
        learner.update(flashes(cleared=name == "none"), 200, 0.3)
        window = next(flashes(cleared=name == "none", first=10**6))
        model.loss(window)
        windows[name] = error_of_last(model, window)
    assert windows["memory"] < 0.3 * windows["none"]


def error_of_last(model, window) -> float:
    entered = window["memory_after"][:, -2]
    last = window[:, -1].set(("memory", "world_model"), entered)
    return model.score(last)["error"].mean().item()


def flashes(cleared: bool, first: int = 0):
    """[B, 4]: the first frame is red or blue, the next three are grey, and then the first one's colour comes back."""
    while True:
        generator = torch.Generator().manual_seed(first)
        first += 1
        window = moving_windows(8, 4)
        red = torch.randint(0, 2, (8,), generator=generator).bool()
        frames = torch.full((8, 5, 3, 32, 32), 128, dtype=torch.uint8)
        for t in (0, 4):
            frames[red, t] = torch.tensor([220, 40, 40], dtype=torch.uint8)[:, None, None]
            frames[~red, t] = torch.tensor([40, 40, 220], dtype=torch.uint8)[:, None, None]
        for camera in ("head", "wrist"):
            window["observation", "image", camera] = frames[:, :4]
            window["next", "observation", "image", camera] = frames[:, 1:]
        # when it will come back is told; which colour is not
        clock = torch.arange(5.0).expand(8, -1)[..., None].expand(-1, -1, 2)
        window["observation", "state"], window["next", "observation", "state"] = clock[:, :4], clock[:, 1:]
        window["is_first"] = torch.ones(8, 4, dtype=torch.bool) if cleared else window["is_first"]
        yield window


def test_the_doubles_say_what_the_spec_does():
    window = moving_windows(2, 3)
    for name, (shape, _) in SPEC.observation.items():
        assert window["observation", *name.split("/")].shape[2:] == shape
