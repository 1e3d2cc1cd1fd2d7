"""Measures of images, world models and explorers, on cases computed by hand."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from doubles import CountingBackend, counting_env
from doubles_world_model import CopyingConfig, CopyingWorldModel
from tensordict import TensorDict

from sparring.config.schema import load_config
from sparring.config.text import parse_overrides
from sparring.contract import EnvSpec
from sparring.envs.env import Env, make_env
from sparring.evaluation.exploration import _entropy, _explore, _showing_objects, compare_with_random
from sparring.evaluation.images import _CoveredObjects, _is_object, _SeenObjects, changed, ssim
from sparring.evaluation.play import held_out_episodes
from sparring.evaluation.world_model import WorldModelEvaluation, _compare, _measure, _skill, _squared_error, _Tally
from sparring.policies.random import RandomPolicy


def flat(value: int, size: int = 16) -> torch.Tensor:
    return torch.full((1, 3, size, size), value, dtype=torch.uint8)


def test_ssim_of_an_image_with_itself_is_one():
    image = torch.randint(0, 256, (2, 3, 24, 24), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    assert torch.allclose(ssim(image, image), torch.ones(2, dtype=torch.double))


def test_ssim_of_two_uniform_images_is_their_brightness_term():
    # no variance: (2 a b + C1) / (a^2 + b^2 + C1)
    a, b = 51 / 255, 204 / 255
    expected = (2 * a * b + 1e-4) / (a * a + b * b + 1e-4)
    assert float(ssim(flat(51), flat(204))[0]) == pytest.approx(expected, abs=1e-9)


def test_ssim_of_a_negative_is_below_zero():
    board = ((torch.arange(16)[:, None] + torch.arange(16)) % 2 * 255).to(torch.uint8).expand(1, 3, 16, 16)
    assert float(ssim(board, 255 - board)[0]) < -0.9


def test_ssim_in_one_window_by_hand():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 256, (2, 1, 3, 11, 11)).astype(np.uint8)
    offset = np.arange(11) - 5
    weight = np.exp(-(offset[:, None] ** 2 + offset**2) / (2 * 1.5**2))
    weight /= weight.sum()
    values = []
    for x, y in zip(a[0] / 255, b[0] / 255, strict=True):
        mx, my = (weight * x).sum(), (weight * y).sum()
        vx, vy = (weight * (x - mx) ** 2).sum(), (weight * (y - my) ** 2).sum()
        cov = (weight * (x - mx) * (y - my)).sum()
        values.append((2 * mx * my + 1e-4) * (2 * cov + 9e-4) / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4)))
    assert float(ssim(torch.from_numpy(a), torch.from_numpy(b))[0]) == pytest.approx(np.mean(values), abs=1e-9)


def test_psnr_by_hand():
    error = _squared_error(flat(0), flat(51))
    assert float(error.mean()) == pytest.approx(0.04)
    tally = _Tally()
    tally.add("mse", error)
    tally.add("none", torch.zeros(3))
    # JSON has no infinity
    assert tally.psnr("mse") == pytest.approx(13.979, abs=1e-3) and tally.psnr("none") is None


def test_pixel_has_changed_if_one_channel_did():
    before, after = flat(100), flat(100)
    after[0, 1, 2, 3], after[0, 0, 5, 5], after[0, 2, 7, 7] = 109, 108, 0
    assert changed(before, after).nonzero().tolist() == [[0, 2, 3], [0, 7, 7]]


def test_objects_are_neither_robot_nor_screen_nor_marker():
    numbers = torch.tensor([0, 1, 2, 3, 9, 254, 255, 253], dtype=torch.uint8).view(1, 1, 2, 4)
    assert _is_object(numbers).flatten().tolist() == [False, False, False, True, True, False, False, True]


def segmentation(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.uint8).view(1, 1, 1, len(numbers))


def test_hidden_objects_were_visible_before_and_are_not_now():
    seen, here = _SeenObjects(1), torch.tensor([True])
    # one camera sees object 3; no camera has seen object 4
    first = seen.hidden({"a": segmentation(3, 2), "b": segmentation(1, 1)}, {"a": segmentation(3, 4)}, here)
    assert first["a"].tolist() == [[[False, False]]]
    # no camera sees 3 now: its pixels in both next frames are of a hidden object, those of 4 are not
    now, after = {"a": segmentation(1, 2), "b": segmentation(1, 1)}, {"a": segmentation(3, 4), "b": segmentation(2, 3)}
    hidden = seen.hidden(now, after, here)
    assert hidden["a"].tolist() == [[[True, False]]] and hidden["b"].tolist() == [[[False, True]]]
    # one camera sees it, so it is not hidden
    hidden = seen.hidden({"a": segmentation(1, 3), "b": segmentation(1, 1)}, after, here)
    assert not hidden["a"].any() and not hidden["b"].any()
    # robot, scenery and screen are never objects
    hidden = seen.hidden({"a": segmentation(1, 1)}, {"a": segmentation(2, 254)}, here)
    assert not hidden["a"].any()


def test_covered_objects_reappear_at_their_pixels():
    positions, here = _CoveredObjects((2, 1, 3)), torch.tensor([False, True])
    # object 3, object 4 and the robot, without earlier frames
    assert not positions.pixels(segmentation(3, 4, 2), segmentation(3, 3, 3), here).any()
    # the robot covers both; 3 reappears at its pixel, 4 at another one
    covered = positions.pixels(segmentation(2, 2, 2), segmentation(3, 3, 4), here)
    assert covered.tolist() == [[[True, False, False]]]
    # still visible, another object reappears, or not covered but gone
    assert not positions.pixels(segmentation(3, 1, 2), segmentation(3, 4, 1), here).any()
    # another object was visible at this pixel since
    positions.pixels(segmentation(4, 2, 2), segmentation(2, 2, 2), here)
    assert positions.pixels(segmentation(2, 2, 2), segmentation(3, 4, 2), here).tolist() == [[[False, True, False]]]
    # the other episode has no earlier frames
    assert not positions.pixels(segmentation(2, 2, 2), segmentation(3, 4, 4), torch.tensor([True, False])).any()


# ---- world models


def still_then_moving(episodes: int = 2, steps: int = 8) -> TensorDict:
    """[E, T]: a grey head image of 20 x 20 whose upper half brightens by 10 per decision; a constant wrist image.

    The second episode ends after 7 decisions.
    """
    level = torch.arange(steps + 1) * 10 + 50
    head = torch.full((episodes, steps + 1, 3, 20, 20), 100, dtype=torch.uint8)
    head[:, :, :, :10] = level[:, None, None, None].to(torch.uint8)
    wrist = torch.full_like(head, 30)
    image = {"head": head, "wrist": wrist}
    state = torch.zeros(episodes, steps + 1, 1)
    action = torch.arange(episodes)[:, None].expand(-1, steps)[..., None, None].float()
    return TensorDict(
        {
            "observation": {"image": {c: v[:, :-1] for c, v in image.items()}, "state": state[:, :-1]},
            "next": {"observation": {"image": {c: v[:, 1:] for c, v in image.items()}, "state": state[:, 1:]}},
            "action": action.clone(),
            "is_first": (torch.arange(steps) == 0).expand(episodes, -1).clone(),
            "mask": torch.arange(steps) < torch.tensor([steps, steps - 1])[:, None],
        },
        [episodes, steps],
    )


SPEC = EnvSpec({"image/head": ((3, 20, 20), "uint8"), "image/wrist": ((3, 20, 20), "uint8")}, 1)


def copier(brighter: float = 0.0) -> CopyingWorldModel:
    return CopyingWorldModel(CopyingConfig(brighter=brighter), SPEC, 1)


def test_copying_model_equals_the_copy_baseline():
    figures = _measure(copier(), still_then_moving())
    head, wrist = figures["cameras"]["head"], figures["cameras"]["wrist"]
    assert figures["transitions"] == 15
    assert head["changed_mse_ratio"] == pytest.approx(1.0) and head["changed_share"] == pytest.approx(0.5)
    # half of the pixels have an error of 10
    assert head["psnr"]["prediction"] == pytest.approx(-10 * math.log10(0.5 * (10 / 255) ** 2))
    assert head["psnr"]["prediction"] == head["psnr"]["copy"] and head["ssim"]["ceiling"] == 1.0
    # the wrist image never changes: no ratio, no skill
    assert wrist["changed_mse_ratio"] is None and wrist["changed_share"] == 0 and wrist["skill"] is None
    # copying predicts the wrist's tokens and none of the head's
    assert figures["tokens"]["accuracy"] == figures["tokens"]["accuracy_copy"] == 0.5
    assert figures["tokens"]["accuracy_changed"] == 0.0


def test_better_prediction_has_a_lower_ratio():
    """Brighter by 5 halves the error of pixels that change by 10."""
    head = _measure(copier(5.0), still_then_moving())["cameras"]["head"]
    assert head["changed_mse_ratio"] == pytest.approx(0.25)
    assert head["psnr"]["prediction"] == pytest.approx(-20 * math.log10(5 / 255))


def test_ratio_by_episode():
    """Brighter by 5: half of an error of 10. In the second episode nothing moves, so there is no ratio."""
    episodes = still_then_moving()
    for seen in (episodes["observation"], episodes["next", "observation"]):
        seen["image", "head"][1] = 100
    first, second = WorldModelEvaluation.ratio_by_episode(copier(5.0), episodes).tolist()
    assert first == pytest.approx(0.25) and math.isnan(second)
    assert WorldModelEvaluation.ratio_by_episode(copier(), still_then_moving()).tolist() == [1, 1]


def test_open_loop_uses_only_its_own_predictions():
    figures = _measure(copier(10.0), still_then_moving())["open_loop"]
    # one ahead: the upper half is right, the lower half is wrong by 10
    assert figures["1"]["head"]["mse_ratio"] == pytest.approx(1.0)
    # after 5 decisions of context 3 remain, so none is 5 steps ahead
    assert figures["5"]["head"] == {"psnr": {"prediction": None, "copy": None}, "mse_ratio": None}
    long = _measure(copier(10.0), still_then_moving(steps=12))["open_loop"]
    # five ahead: copying is wrong by 50 in the upper half, the model by 50 in the lower
    assert long["5"]["head"]["psnr"]["copy"] == pytest.approx(-10 * math.log10(0.5 * (50 / 255) ** 2))
    assert long["5"]["head"]["mse_ratio"] == pytest.approx(1.0)


def test_memory_is_carried_through_an_episode():
    seen = []

    class Watched(CopyingWorldModel):
        def score(self, td, without=()):
            seen.append(td["memory", "world_model"][:, 0].tolist())
            return super().score(td)

    _measure(Watched(CopyingConfig(), SPEC, 1), still_then_moving())
    # each with the true and with shuffled actions, which do not change the memory; the last with one robot left
    expected = [[float(t)] * 2 for t in range(7) for _ in range(2)] + [[7.0]]
    assert seen == expected


def test_gap_of_shuffled_actions():
    """The double's error grows with |action|: 0 in one episode, 1 in the other; shuffling swaps them."""
    figures = _measure(copier(), still_then_moving())["shuffled_actions"]
    # true: 8 decisions of action 0 and 7 of action 1 -> 7/15; shuffled, at 7 times both -> 1/2
    assert figures["cross_entropy_gap"] == pytest.approx(0.5 - 7 / 15, abs=1e-6)
    # predictions do not depend on the action here; the last decision has no partner
    assert figures["changed_mse_ratio_gap"]["head"] == pytest.approx(0.0, abs=1e-6)


def test_objects_and_hidden_objects():
    episodes = still_then_moving()
    # an object in the upper left corner of head: visible, covered by the robot at times 2 and 3, visible from 4 on
    there = torch.tensor([True, True, False, False, True, True, True, True, True])
    head = torch.ones(2, 9, 1, 20, 20, dtype=torch.uint8)
    head[:, there, :, :4, :4], head[:, ~there, :, :4, :4] = 3, 2
    segmentation = {"head": head, "wrist": torch.ones_like(head)}
    for camera, numbers in segmentation.items():
        episodes["observation", "segmentation", camera] = numbers[:, :-1]
        episodes["next", "observation", "segmentation", camera] = numbers[:, 1:]
    found = _measure(copier(5.0), episodes)["cameras"]
    assert found["head"]["object_mse"]["prediction"] == pytest.approx((5 / 255) ** 2)
    assert found["head"]["object_mse"]["copy"] == pytest.approx((10 / 255) ** 2)
    # in both episodes it reappears once, with 16 pixels
    assert found["head"]["hidden_object_mse"]["pixels"] == 32 and found["wrist"]["hidden_object_mse"]["pixels"] == 0
    assert found["head"]["returning_object_mse"]["pixels"] == found["head"]["covered_object_mse"]["pixels"] == 32
    assert found["head"]["hidden_object_mse"]["prediction"] == pytest.approx((5 / 255) ** 2)
    assert found["wrist"]["hidden_object_mse"]["prediction"] is None
    # if the other camera sees it all the time, it returns but was not hidden
    for side, numbers in ((("observation",), slice(0, -1)), (("next", "observation"), slice(1, None))):
        seen_there = torch.full_like(head, 3)[:, numbers]
        episodes[*side, "segmentation", "wrist"] = seen_there
    found = _measure(copier(5.0), episodes)["cameras"]["head"]
    assert found["hidden_object_mse"]["pixels"] == 0 and found["returning_object_mse"]["pixels"] == 32
    # without segmentation there is no value
    assert _measure(copier(), still_then_moving())["cameras"]["head"]["object_mse"]["prediction"] is None


class HalfBlind(CopyingWorldModel):
    """Can predict without the head camera; then it adds 20 to the last frame instead of 5."""

    dispensable = ("head",)

    def predict(self, td, without=()):
        predicted = super().predict(td)
        if without:
            assert without == ("head",)
            predicted["image", "wrist"] = td["observation", "image", "wrist"] + 20
        return predicted


def test_hidden_objects_with_an_explorers_camera_alone():
    episodes = still_then_moving()
    # an object that head always sees, and wrist not at times 2 and 3
    there = torch.tensor([True, True, False, False, True, True, True, True, True])
    head = torch.full((2, 9, 1, 20, 20), 3, dtype=torch.uint8)
    wrist = torch.ones_like(head)
    wrist[:, there, :, :4, :4] = 3
    for camera, numbers in {"head": head, "wrist": wrist}.items():
        episodes["observation", "segmentation", camera] = numbers[:, :-1]
        episodes["next", "observation", "segmentation", camera] = numbers[:, 1:]
    figures = _measure(HalfBlind(CopyingConfig(brighter=5.0), SPEC, 1), episodes)
    assert figures["cameras"]["wrist"]["hidden_object_mse"]["pixels"] == 0
    found = figures["half_blind"]
    assert found["without"] == ["head"] and list(found["cameras"]) == ["wrist"]
    assert found["cameras"]["wrist"]["pixels"] == 32 and found["cameras"]["wrist"]["copy"] == 0
    assert found["cameras"]["wrist"]["prediction"] == pytest.approx((20 / 255) ** 2)
    assert _measure(copier(), episodes)["half_blind"] == {"without": [], "cameras": {}}
    compared = _compare(figures, figures)["half_blind"]["cameras"]
    assert compared == {"wrist": {"hidden_object_mse": 0.0}}


def test_comparison_of_models_gives_the_increase_of_error():
    better, worse = (_measure(copier(brighter), still_then_moving()) for brighter in (5.0, 0.0))
    found = _compare(better, worse)
    assert found["cameras"]["head"]["changed_mse_ratio"] == pytest.approx(0.75)
    assert _compare(worse, better)["cameras"]["head"]["changed_mse_ratio"] == pytest.approx(-0.75)
    assert found["cameras"]["wrist"]["changed_mse_ratio"] is None


def test_skill_by_hand():
    assert _skill(prediction=25.0, copy=20.0, ceiling=30.0) == 0.5
    assert _skill(prediction=18.0, copy=20.0, ceiling=30.0) == pytest.approx(-0.2)
    # with a tokenizer worse than copying, skill is undefined
    assert _skill(prediction=25.0, copy=26.9, ceiling=25.9) is None


def test_held_out_episodes_are_complete_and_use_evaluation_seeds():
    env = counting_env(lengths=(3, 5))
    episodes = held_out_episodes(env, RandomPolicy(env.spec, 1), 5, seed=0, chunk=1)
    # robot 0 plays numbers 0, 2 and 4, robot 1 numbers 1 and 3
    assert sorted(episodes["mask"].sum(1).tolist()) == [3, 3, 3, 5, 5] and episodes.shape == (5, 5)
    for episode in episodes:
        steps = int(episode["mask"].sum())
        assert episode["observation", "state"][:steps, 2].tolist() == list(range(steps))
        assert int(episode["next", "observation", "state"][steps - 1, 2]) == steps
        assert episode["is_first"].nonzero().flatten().tolist() == [0]
    assert env.backend.seeds.split == "eval"


# ---- explorers


class HandBackend(CountingBackend):
    """State: 4 x the position of a hand, which moves 5 cm in x per step. Contact at steps 2 and 3."""

    def __init__(self, lengths):
        super().__init__(lengths)
        self.spec = replace(self.spec, hand_entries=(0, 1, 2), hand_scale=4.0)

    def step(self, action):
        step = super().step(action)
        before = np.where(np.isin(np.arange(self.num_envs), step.ended), self.lengths, self.count)
        step.contact = np.isin(before, (2, 3))
        return step

    def _observe(self):
        x = self.count * 0.05 * 4 + 0.1
        return {"state": np.stack([x, x * 0, x * 0], 1).astype(np.float32)}


def test_exploration_by_hand():
    env = Env(HandBackend(lengths=(3, 5)))
    found = _explore(RandomPolicy(env.spec, 1), env, episodes=3, seed=0)
    # robot 0 plays two episodes of 3 steps, robot 1 one of 5; each touches something at two of its steps
    assert found.decisions == 11 and found.contact == pytest.approx(6 / 11)
    # steps 1..5 are five voxels; an episode reaches 3, 3 or 5 of them
    assert found.voxels == 5 and found.voxels_per_episode == pytest.approx(11 / 3)
    # x was in bins 3 (3 times), 5, 7 (3 times each), 9 and 11 (once each); y and z never changed
    shares = np.array([3, 3, 3, 1, 1]) / 11
    assert found.state_entropy == pytest.approx(-(shares * np.log(shares)).sum() / 3)


class PushingBackend(HandBackend):
    """With two objects: one moves with the hand from step 2 on, the other stays."""

    def __init__(self, lengths):
        super().__init__(lengths)
        observation = self.spec.observation | {"privileged": ((7,), "float32")}
        self.spec = replace(self.spec, observation=observation, object_entries=(1, 2, 3, 4, 5, 6))

    def _observe(self):
        seen = super()._observe()
        pushed, still = seen["state"].copy(), np.full_like(seen["state"], 0.1)
        pushed[:, 0] = np.where(self.count >= 2, pushed[:, 0], 0.1)
        return seen | {"privileged": np.concatenate([still[:, :1], pushed, still], 1)}


def test_object_voxels():
    env = Env(PushingBackend(lengths=(3, 5)))
    found = _explore(RandomPolicy(env.spec, 1), env, episodes=3, seed=0)
    # one object, at steps 2 and 3 in all episodes and 4 and 5 in the long one: four voxels without its start
    assert found.object_voxels == 4
    assert _explore(RandomPolicy(env.spec, 1), Env(HandBackend((3, 5))), 3, seed=0).object_voxels is None


def test_object_positions_are_observed_only_on_request():
    config = load_config(None, parse_overrides(["env.task=explore", "env.object_state=hidden"])).env
    hidden, shown = make_env(config, 2), make_env(_showing_objects(config), 2)
    assert hidden.spec.object_entries == () and len(shown.spec.object_entries) == 3 * 6
    assert shown.spec.observation["state"] == hidden.spec.observation["state"]
    td = shown.reset(seed=0)
    positions = td["observation", "privileged"][:, list(shown.spec.object_entries)].view(2, -1, 3) / 4
    # on the table, at different positions
    assert (positions[..., 2].abs() < 0.2).all() and positions[0].unique(dim=0).shape[0] == 6
    hidden.close(), shown.close()


def test_explorer_is_compared_with_random_baselines():
    env = Env(HandBackend(lengths=(3, 5)))
    found = compare_with_random(RandomPolicy(env.spec, 1), env, episodes=2, seed=0)
    assert list(found) == ["policy", "uniform", "coloured 0.8", "coloured 0.9", "coloured 0.95", "coloured 0.98"]
    assert found["policy"] == found["uniform"] == found["coloured 0.9"]


def test_entropy_by_hand():
    assert _entropy(Counter({1: 5})) == 0
    assert _entropy(Counter({1: 2, 2: 2})) == pytest.approx(math.log(2))


def test_open_loop_of_short_episodes_is_undefined():
    episodes = still_then_moving()
    # no valid decision remains
    episodes["mask"][:, 4:] = False
    assert _measure(copier(), episodes)["open_loop"]["1"]["head"]["mse_ratio"] is None
