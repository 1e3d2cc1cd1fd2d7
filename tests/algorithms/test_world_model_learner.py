"""Gradient steps on a world model: which parts learn, the learning rate, resume, and learned predictions."""

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


def all_equal(one: dict, other: dict) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_the_tokenizer_learns_first_and_then_everything_else():
    model = make(tokenizer_steps=3)
    learner, data = learner_of(model), batches()
    tokens, others = split(model)
    metrics = learner.update(data, 3, 0.0)
    assert "loss_tokenizer" in metrics and "loss_tokens" not in metrics
    learned_tokens, untouched = split(model)
    assert not all_equal(tokens, learned_tokens) and all_equal(others, untouched)
    metrics = learner.update(data, 3, 0.0)
    assert "loss_tokens" in metrics and "loss_tokenizer" not in metrics
    frozen, learned = split(model)
    # bit-identical: neither momentum nor weight decay may change what no longer learns
    assert all_equal(learned_tokens, frozen) and not all_equal(untouched, learned)
    assert int(model.steps) == 6


def test_an_update_in_which_the_tokenizer_finishes_has_the_metrics_of_both_parts():
    metrics = learner_of(make(tokenizer_steps=2)).update(batches(), 3, 0.0)
    assert {"loss_tokenizer", "loss_tokens", "accuracy", "loss", "grad_norm", "lr"} <= metrics.keys()


def test_the_learning_rate_warms_up_and_decays():
    learner, data = learner_of(make(), 1.0e-3), batches(2, 2)
    assert abs(learner.update(data, 1, 0.0)["lr"] - 1e-3 / 50) < 1e-9
    assert abs(learner.update(data, 1, 0.5)["lr"] - 0.5e-3 * 2 / 50) < 1e-9


def test_the_learning_rate_of_the_tokenizer_decays_before_it_stops():
    learner, data = learner_of(make(tokenizer_steps=20), 1e-3), batches(2, 2)
    learner.update(data, 19, 0.0)
    # twice the rate of the rest, times the last twentieth of its decay, times step 20 of 50 of the warm-up
    assert abs(learner.update(data, 1, 0.0)["lr"] - 1e-3 * 2 * 0.05 * 20 / 50) < 1e-9
    assert abs(learner.update(data, 1, 0.0)["lr"] - 1e-3 / 50) < 1e-9


def test_a_loaded_learner_takes_the_same_next_steps():
    for steps in (2, 4, 5):  # while the tokenizer learns, just when it stops, and after
        model = make(tokenizer_steps=4)
        learner = learner_of(model)
        learner.update(batches(), steps, 0.1)
        other = make(seed=1, tokenizer_steps=4)
        other_learner = learner_of(other)
        other.load_state_dict(model.state_dict())
        # a copy, as from a file: otherwise both optimisers would share tensors
        other_learner.load_state_dict(copy.deepcopy(learner.state_dict()))
        for each in (learner, other_learner):
            torch.manual_seed(7)
            each.update(batches(first=100), 2, 0.2)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_the_model_learns_the_effect_of_actions():
    """On held-out windows it predicts better than copying the frame, and worse with the wrong action."""
    model = make(tokenizer_steps=100, members=2)
    learner, data = learner_of(model), batches()
    learner.update(data, 220, 0.2)
    learner.update(data, 80, 0.8)
    td = moving_windows(64, 1, seed=10**6)[:, 0]
    predicted = model.predict(td)
    other = td.clone()
    other["action"] = -td["action"]
    with_wrong_action = model.predict(other)
    for camera in model.cameras:
        now, true = td["observation", "image", camera].float(), td["next", "observation", "image", camera].float()
        error, copied, wrong = (
            (image.float() - true).square().mean()
            for image in (predicted["image", camera], now, with_wrong_action["image", camera])
        )
        assert error < 0.3 * copied < wrong
    tokens, scored = model.correct_tokens(td), model.score(td)
    assert tokens["right"].float().mean() > 0.9 > tokens["copied"].float().mean()
    assert (scored["error"] < model.score(other)["error"]).float().mean() > 0.9
    assert (predicted["state"] - td["next", "observation", "state"]).abs().mean() < 0.25
    assert (predicted["reward"] - td["next", "reward"].sum(-1)).abs().mean() < 0.25
    assert predicted["terminated"].max() < 0.2


def test_the_model_learns_to_use_its_memory():
    """A colour that is shown once returns three frames later: it is predictable with a memory only."""
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
    memory = window["memory_after"][:, -2]
    last = window[:, -1].set(("memory", "world_model"), memory)
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
        # the state shows when the colour returns, not which one
        clock = torch.arange(5.0).expand(8, -1)[..., None].expand(-1, -1, 2)
        window["observation", "state"], window["next", "observation", "state"] = clock[:, :4], clock[:, 1:]
        window["is_first"] = torch.ones(8, 4, dtype=torch.bool) if cleared else window["is_first"]
        yield window


def test_the_shapes_of_the_windows_are_those_of_the_spec():
    window = moving_windows(2, 3)
    for name, (shape, _) in SPEC.observation.items():
        assert window["observation", *name.split("/")].shape[2:] == shape
