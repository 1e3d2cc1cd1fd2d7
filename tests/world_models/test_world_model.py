"""The token world model: its outputs, its inputs, its losses and its memory."""

import math
from dataclasses import replace

import pytest
import torch
from doubles_moving import SPEC, make, moving_windows

from sparring.errors import UserError
from sparring.world_models import token_model
from sparring.world_models.configs import PRESETS, TokenWorldModelConfig
from sparring.world_models.world_model import make_world_model


def deterministic(**settings):
    """A model without randomness in its loss: one member, which learns from all windows."""
    return make(members=1, **settings)


def test_shapes_and_types_of_the_outputs():
    model = make()
    assert (model.cameras, model.members) == (("head", "wrist"), 2)
    # two cameras of four patches each, and four registers
    assert model.memory_size == (8 + 4) * 4
    td = moving_windows(3, 1)[:, 0]
    before = td.clone()
    predicted, scored = model.predict(td), model.score(td)
    shapes = {"state": (3, 2), "reward": (3,), "terminated": (3,), "success": (3,), "memory": (3, 48)}
    assert {name: tuple(predicted[name].shape) for name in shapes} == shapes
    for camera in model.cameras:
        for output in (predicted, model.reconstruct(td)):
            assert output["image", camera].dtype == torch.uint8 and output["image", camera].shape == (3, 3, 32, 32)
    for name in ("error", "entropy", "disagreement", "surprise", "accuracy"):
        assert scored[name].shape == (3,) and scored[name].dtype == torch.float32
    assert model.correct_tokens(td)["right"].shape == model.correct_tokens(td)["copied"].shape == (3, 8)
    assert (td == before).all() and set(td.keys()) == set(before.keys())


def test_all_methods_return_the_same_memory():
    model = make()
    td = moving_windows(3, 1)[:, 0]
    td["memory", "world_model"] = torch.randn(3, model.memory_size)
    td["is_first"] = torch.tensor([False, False, True])
    memory = model.observe(td)
    assert torch.equal(model.predict(td)["memory"], memory) and torch.equal(model.score(td)["memory"], memory)
    window = td[:, None].set("mask", torch.ones(3, 1, dtype=torch.bool))
    model.loss(window)
    torch.testing.assert_close(window["memory_after"][:, 0], memory)
    td["memory", "world_model"] = torch.zeros(3, model.memory_size)
    cleared = model.observe(td)
    assert torch.equal(cleared[2], memory[2]) and not torch.allclose(cleared[0], memory[0])


def test_predictions_depend_on_action_state_and_memory():
    model = make()
    td = moving_windows(2, 1)[:, 0]
    td["memory", "world_model"] = torch.zeros(2, model.memory_size)
    td["is_first"] = torch.zeros(2, dtype=torch.bool)
    error = model.score(td)["error"]
    for key in ("action", ("observation", "state"), ("memory", "world_model")):
        other = td.clone()
        other[key] = other[key] + 0.5
        other["action"] = other["action"] - (1.5 if key == "action" else 0.0)
        assert not torch.allclose(model.score(other)["error"], error), key


def test_actions_are_clipped_as_by_the_env():
    model = make()
    td = moving_windows(2, 1)[:, 0]
    wild = td.clone()
    wild["action"] = td["action"] * 7
    assert torch.equal(model.observe(wild), model.observe(td))


def test_a_masked_camera_has_no_effect():
    model = make()
    td, other = moving_windows(3, 1)[:, 0], moving_windows(3, 1)[:, 0]
    other["observation", "image", "head"] = 255 - other["observation", "image", "head"]
    assert torch.equal(model.observe(td, without=("head",)), model.observe(other, without=("head",)))
    assert not torch.allclose(model.observe(td), model.observe(other))
    assert not torch.allclose(model.observe(td), model.observe(td, without=("head",)))


def test_camera_dropout_masks_a_camera():
    model = make(camera_dropout=0.999999)
    window = moving_windows(3, 1)
    model.loss(window)
    torch.testing.assert_close(window["memory_after"][:, 0], model.observe(window[:, 0], without=("head",)))
    model = make(camera_dropout=0.999999, dropped_cameras=("wrist",))
    model.loss(window)
    torch.testing.assert_close(window["memory_after"][:, 0], model.observe(window[:, 0], without=("wrist",)))


def test_two_windows_with_carried_memory_equal_one_window():
    model = deterministic()
    whole = moving_windows(4, 6)
    loss = loss_of_all_steps(model, whole)
    first, second = whole[:, :2].clone(), whole[:, 2:].clone()
    loss_1 = loss_of_all_steps(model, first)
    entered = torch.zeros(4, 4, model.memory_size)
    entered[:, 0] = first["memory_after"][:, -1]
    second["memory", "world_model"] = entered
    loss_2 = loss_of_all_steps(model, second)
    torch.testing.assert_close(second["memory_after"], whole["memory_after"][:, 2:])
    assert loss == pytest.approx((2 * loss_1 + 4 * loss_2) / 6, rel=1e-5)
    second["memory", "world_model"] = torch.zeros_like(entered)
    assert loss_of_all_steps(model, second) != pytest.approx(loss_2, rel=1e-5)


def loss_of_all_steps(model, window) -> float:
    """The sum of losses without that of images, which are predicted for some steps only."""
    metrics = model.loss(window)[1]
    return sum(value.item() for name, value in metrics.items() if name.startswith("loss_") and name != "loss_pictures")


def test_without_memory_steps_are_independent():
    model = deterministic(remembers=False)
    window, split = moving_windows(4, 3), moving_windows(4, 3)
    split["is_first"][:] = True
    assert torch.equal(gradient(model, window), gradient(model, split))
    td = window[:, 1].set(("memory", "world_model"), torch.randn(4, model.memory_size))
    assert torch.equal(model.observe(td), model.observe(td.exclude("memory")))


def test_only_steps_in_the_mask_affect_the_gradient():
    model = deterministic()
    window = moving_windows(4, 5)
    window["mask"][:, 3:] = False
    short = moving_windows(4, 5)[:, :3].clone()
    expected = gradient(model, short)
    torch.testing.assert_close(gradient(model, window), expected)
    # values in padded columns do not matter
    window["action"][:, 3:] = 0.3
    window["next", "reward"][:, 3:] = 99.0
    torch.testing.assert_close(gradient(model, window), expected)
    # masked steps before the others still change the memory
    window["mask"][:] = True
    window["mask"][:, 0] = False
    other = window.clone()
    other["action"][:, 0] *= -1
    assert not torch.allclose(gradient(model, window), gradient(model, other))


def test_gradients_pass_back_through_the_memory_to_where_it_was_cleared():
    model = deterministic()
    window = moving_windows(4, 3)
    window["mask"][:, :2] = False
    gru = model.trunk.gru.weight_ih
    model.loss(window)[0].backward()
    assert gru.grad.abs().max() > 0
    gru.grad = None
    window["is_first"][:, 2] = True
    model.loss(window)[0].backward()
    assert gru.grad.abs().max() == 0


def gradient(model, window) -> torch.Tensor:
    model.zero_grad()
    # the same random steps each time
    torch.manual_seed(0)
    model.loss(window)[0].backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_scores_by_hand(monkeypatch):
    """Two members, one digit of two values: the truth has probability 0.9 in one member and 0.3 in the other."""
    model = make(levels=(2,), tokenizer="context_fsq")
    td = moving_windows(1, 1)[:, 0]
    truth = model._digits(*(model._features(td[key])[1].flatten(0, 1) for key in IMAGES))
    probability = torch.tensor([0.9, 0.3])
    # [M, N, P, K, L]: the probability that each member gives to the truth
    log_probs = torch.stack([probability, 1 - probability], -1)[:, None, None, None].expand(-1, 1, 8, 1, -1)
    log_probs = torch.where(truth[..., None].bool(), log_probs.flip(-1), log_probs).log()
    monkeypatch.setattr(model, "_predictions", lambda tokens: (log_probs, None))
    scored = model.score(td)
    own = (entropy(0.9) + entropy(0.3)) / 2
    expected = {
        "error": -math.log(0.6),
        "entropy": entropy(0.6),
        "disagreement": entropy(0.6) - own,
        "surprise": -math.log(0.6) - own,
        "accuracy": 1.0,
    }
    assert {name: scored[name].item() for name in expected} == pytest.approx(expected, rel=1e-5)


IMAGES = (("observation", "image"), ("next", "observation", "image"))


def entropy(p: float) -> float:
    return -p * math.log(p) - (1 - p) * math.log(1 - p)


def test_identical_members_do_not_disagree():
    model = make(members=3)
    td = moving_windows(2, 1)[:, 0]
    assert (model.score(td)["disagreement"] > 1e-4).all()
    for member in model.ensemble[1:]:
        member.load_state_dict(model.ensemble[0].state_dict())
    assert model.score(td)["disagreement"].abs().max() < 1e-5


def test_each_member_learns_from_other_random_windows_in_each_step(monkeypatch):
    model, batch, weights = make(members=3), moving_windows(40, 2), []
    mean = token_model._mean
    monkeypatch.setattr(token_model, "_mean", lambda values, weight: (weights.append(weight), mean(values, weight))[1])
    for _ in range(20):
        model.loss(batch.clone())
    # [steps, M, B, T]: the same windows for all losses and all time steps
    used = torch.stack([w for i, w in enumerate(weights) if i % (len(weights) // 20) == 0])
    assert used.shape == (20, 3, 40, 2) and torch.equal(used[..., 0], used[..., 1])
    assert 0.72 < float(used.mean()) < 0.78
    # different for two members and in two steps; after all steps each member has learned from every window
    assert not torch.equal(used[0, 0], used[0, 1]) and not torch.equal(used[0, 0], used[1, 0])
    assert bool(used.amax(0).all())


def test_values_that_a_digit_does_not_have_are_never_predicted():
    model = make(levels=(8, 3))
    logits, _ = model._predictions(torch.randn(2, 1 + 8 + 4, 32))
    assert logits.softmax(-1)[..., 1, 3:].max() == 0 and logits.softmax(-1)[..., 0, :].min() > 0


def test_instructions_are_matched_by_their_words():
    model, other = make(), make(1, replace(SPEC, instructions=SPEC.instructions[::-1]))
    other.load_state_dict(model.state_dict())
    td = moving_windows(2, 1)[:, 0]
    swapped = td.clone()
    swapped["observation", "task"] = 1 - td["observation", "task"]
    torch.testing.assert_close(other.observe(swapped), model.observe(td))
    assert not torch.allclose(model.observe(swapped), model.observe(td))


@pytest.mark.parametrize("settings", [{"tokenizer": "vq"}, {"tokenizer": "fsq"}, {"precision": "bf16"}])
def test_other_tokenizers_and_precisions(settings):
    model = make(**settings, tokenizer_steps=1).train()
    window = moving_windows(2, 3)
    for expected in ("loss_tokenizer", "loss_tokens"):
        loss, metrics = model.loss(window)
        assert expected in metrics and loss.isfinite() and loss.dtype == torch.float32
    assert window["memory_after"].shape == (2, 3, model.memory_size)
    assert model.score(window[:, 0])["error"].isfinite().all()


def test_an_env_may_have_one_camera_and_no_state():
    spec = replace(SPEC, observation={"image/wrist": ((3, 16, 48), "uint8")}, discrete_actions=3)
    model = make(spec=spec)
    td = moving_windows(2, 1)[:, 0].exclude("observation", "next")
    td["observation", "image", "wrist"] = torch.zeros(2, 3, 16, 48, dtype=torch.uint8)
    td["action"] = torch.tensor([[[0.0], [2.0]], [[1.0], [1.0]]])
    assert model.predict(td)["image", "wrist"].shape == (2, 3, 16, 48)
    assert "state" not in set(model.predict(td).keys())


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        (
            {"state": ((2,), "float32")},
            r"has none; it must observe image/<name> \(env.name=tabletop: env.cameras=\[head,wrist\]\)",
        ),
        ({"image/head": ((3, 40, 40), "uint8")}, "images of 40x40 pixels"),
        ({"image/head": ((3, 32, 32), "uint8"), "image/wrist": ((3, 64, 64), "uint8")}, "cameras of one size"),
    ],
)
def test_envs_that_it_cannot_predict_are_refused(observation, message):
    with pytest.raises(UserError, match=message):
        make(spec=replace(SPEC, observation=observation))


@pytest.mark.parametrize(("preset", "least", "most"), [("tiny", 8e5, 1.4e6), ("small", 2e7, 3e7)])
def test_presets_have_the_documented_size(preset, least, most):
    shapes = {"image/head": ((3, 64, 64), "uint8"), "image/wrist": ((3, 64, 64), "uint8"), "state": ((30,), "float32")}
    model = make_world_model(TokenWorldModelConfig(preset=preset), replace(SPEC, observation=shapes), 4)
    assert least < sum(parameter.numel() for parameter in model.parameters()) < most
    assert model.members == PRESETS[preset]["members"]
    chosen = make_world_model(TokenWorldModelConfig(preset=preset, members=1), replace(SPEC, observation=shapes), 4)
    assert chosen.members == 1


def test_settle_ends_the_training_of_the_tokenizer():
    model = make(tokenizer_steps=5).train()
    assert not model.ready
    model.loss(moving_windows(2, 2))
    assert model.preparing == "tokenizer 20 % trained"
    model.settle()
    assert model.preparing is None
    assert model.ready and int(model.steps) == 5
    model.loss(moving_windows(2, 2))
    model.settle()
    assert int(model.steps) == 6


def test_accuracies_count_steps_in_the_mask_only(monkeypatch):
    model = deterministic()
    batch = moving_windows(2, 6)
    # windows that end after their first step, as sequential ones may
    batch["mask"][:, 1:] = False
    monkeypatch.setattr(model, "_digits", lambda before, after: torch.zeros(len(before) // 2, 8, 3, dtype=torch.int64))
    accuracies = {float(model.loss(batch.clone())[1]["accuracy_copy"]) for _ in range(8)}
    assert accuracies == {1.0}


def test_a_rare_reward_is_predicted_at_its_scale():
    model = make()
    batch = moving_windows(4, 500)
    batch["next", "reward"].zero_()
    batch["next", "reward"][0, 0, 0] = 1.0
    model.update_normalizers(batch, lambda tensor: tensor)
    assert float(model.rewards.inverse(model.rewards(torch.ones(1, 1)))) == pytest.approx(1.0, rel=1e-4)
