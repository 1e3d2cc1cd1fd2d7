"""Measures of pictures, world models and explorers, on cases that can be worked out by hand."""

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


def test_ssim_of_a_picture_with_itself_is_one():
    picture = torch.randint(0, 256, (2, 3, 24, 24), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    assert torch.allclose(ssim(picture, picture), torch.ones(2, dtype=torch.double))


def test_ssim_of_two_plain_pictures_is_their_brightness_term():
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


def test_a_pixel_has_changed_when_one_colour_did():
    before, after = flat(100), flat(100)
    after[0, 1, 2, 3], after[0, 0, 5, 5], after[0, 2, 7, 7] = 109, 108, 0
    assert changed(before, after).nonzero().tolist() == [[0, 2, 3], [0, 7, 7]]


def test_objects_are_neither_robot_nor_screen_nor_marker():
    numbers = torch.tensor([0, 1, 2, 3, 9, 254, 255, 253], dtype=torch.uint8).view(1, 1, 2, 4)
    assert _is_object(numbers).flatten().tolist() == [False, False, False, True, True, False, False, True]


def segmentation(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.uint8).view(1, 1, 1, len(numbers))


def test_hidden_objects_were_seen_before_and_are_not_now():
    seen, here = _SeenObjects(1), torch.tensor([True])
    # object 3 is seen by one camera; 4 has never been seen
    first = seen.hidden({"a": segmentation(3, 2), "b": segmentation(1, 1)}, {"a": segmentation(3, 4)}, here)
    assert first["a"].tolist() == [[[False, False]]]
    # nobody sees 3 now: both cameras' pixels of it in the next frame are of a hidden object, 4's are not
    now, after = {"a": segmentation(1, 2), "b": segmentation(1, 1)}, {"a": segmentation(3, 4), "b": segmentation(2, 3)}
    hidden = seen.hidden(now, after, here)
    assert hidden["a"].tolist() == [[[True, False]]] and hidden["b"].tolist() == [[[False, True]]]
    # one camera sees it: hidden from nobody, though the other does not show it
    hidden = seen.hidden({"a": segmentation(1, 3), "b": segmentation(1, 1)}, after, here)
    assert not hidden["a"].any() and not hidden["b"].any()
    # robot, scenery and screen are no objects, however they come and go
    hidden = seen.hidden({"a": segmentation(1, 1)}, {"a": segmentation(2, 254)}, here)
    assert not hidden["a"].any()


def test_covered_objects_come_back_where_they_were():
    places, here = _CoveredObjects((2, 1, 3)), torch.tensor([False, True])
    # object 3, object 4 and the robot: nothing was there before
    assert not places.pixels(segmentation(3, 4, 2), segmentation(3, 3, 3), here).any()
    # the robot stands in front of both; 3 comes back where it was, and 4 shows in another place
    covered = places.pixels(segmentation(2, 2, 2), segmentation(3, 3, 4), here)
    assert covered.tolist() == [[[True, False, False]]]
    # it is seen already, or is not what comes back, or was not covered but gone: the table is seen there
    assert not places.pixels(segmentation(3, 1, 2), segmentation(3, 4, 1), here).any()
    # something else was seen there since
    places.pixels(segmentation(4, 2, 2), segmentation(2, 2, 2), here)
    assert places.pixels(segmentation(2, 2, 2), segmentation(3, 4, 2), here).tolist() == [[[False, True, False]]]
    # the other episode has seen nothing of all that
    assert not places.pixels(segmentation(2, 2, 2), segmentation(3, 4, 4), torch.tensor([True, False])).any()


# ---- world models


def still_then_moving(episodes: int = 2, steps: int = 8) -> TensorDict:
    """[E, T]: a grey head picture of 20 x 20 whose upper half brightens by 10 a decision; a wrist that never changes.

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


def test_a_model_that_copies_is_as_good_as_copying():
    figures = _measure(copier(), still_then_moving())
    head, wrist = figures["cameras"]["head"], figures["cameras"]["wrist"]
    assert figures["transitions"] == 15
    assert head["changed_mse_ratio"] == pytest.approx(1.0) and head["changed_share"] == pytest.approx(0.5)
    # half of the pixels are wrong by 10
    assert head["psnr"]["prediction"] == pytest.approx(-10 * math.log10(0.5 * (10 / 255) ** 2))
    assert head["psnr"]["prediction"] == head["psnr"]["copy"] and head["ssim"]["ceiling"] == 1.0
    # the wrist's picture never changes: nothing to tell
    assert wrist["changed_mse_ratio"] is None and wrist["changed_share"] == 0 and wrist["skill"] is None
    # copying foretells the wrist's tokens and none of the head's
    assert figures["tokens"]["accuracy"] == figures["tokens"]["accuracy_copy"] == 0.5
    assert figures["tokens"]["accuracy_changed"] == 0.0


def test_a_model_that_knows_better_is_seen_to():
    """Brighter by 5 halves the error of what changes by 10, and is wrong about what does not."""
    head = _measure(copier(5.0), still_then_moving())["cameras"]["head"]
    assert head["changed_mse_ratio"] == pytest.approx(0.25)
    assert head["psnr"]["prediction"] == pytest.approx(-20 * math.log10(5 / 255))


def test_the_ratio_of_each_episode():
    """Brighter by 5: half of an error of 10. In the second episode nothing moves, so there is no ratio."""
    episodes = still_then_moving()
    for seen in (episodes["observation"], episodes["next", "observation"]):
        seen["image", "head"][1] = 100
    first, second = WorldModelEvaluation.ratio_by_episode(copier(5.0), episodes).tolist()
    assert first == pytest.approx(0.25) and math.isnan(second)
    assert WorldModelEvaluation.ratio_by_episode(copier(), still_then_moving()).tolist() == [1, 1]


def test_open_loop_sees_only_its_own_predictions():
    figures = _measure(copier(10.0), still_then_moving())["open_loop"]
    # one ahead: the upper half is right, the lower half is wrong by 10
    assert figures["1"]["head"]["mse_ratio"] == pytest.approx(1.0)
    # it looks on for 5 decisions; of the 3 left, none is 5 or more ahead
    assert figures["5"]["head"] == {"psnr": {"prediction": None, "copy": None}, "mse_ratio": None}
    long = _measure(copier(10.0), still_then_moving(steps=12))["open_loop"]
    # five ahead: copying is wrong by 50 in the upper half, the model by 50 in the lower
    assert long["5"]["head"]["psnr"]["copy"] == pytest.approx(-10 * math.log10(0.5 * (50 / 255) ** 2))
    assert long["5"]["head"]["mse_ratio"] == pytest.approx(1.0)


def test_memory_is_carried_through_an_episode_and_not_into_the_next():
    seen = []

    class Watched(CopyingWorldModel):
        def score(self, td, without=()):
            seen.append(td["memory", "world_model"][:, 0].tolist())
            return super().score(td)

    _measure(Watched(CopyingConfig(), SPEC, 1), still_then_moving())
    # each time with the true actions and with another robot's, which is not remembered; the last with one robot left
    expected = [[float(t)] * 2 for t in range(7) for _ in range(2)] + [[7.0]]
    assert seen == expected


def test_shuffled_actions_cost_what_they_cost():
    """The double's error grows with |action|: 0 in one episode and 1 in the other; shuffled, they change places."""
    figures = _measure(copier(), still_then_moving())["shuffled_actions"]
    # true: 8 decisions of action 0 and 7 of action 1 -> 7/15; shuffled, at 7 times both: 1/2
    assert figures["cross_entropy_gap"] == pytest.approx(0.5 - 7 / 15, abs=1e-6)
    # predictions do not depend on the action here, but the last decision has none to be shuffled with
    assert figures["changed_mse_ratio_gap"]["head"] == pytest.approx(0.0, abs=1e-6)


def test_objects_and_hidden_objects():
    episodes = still_then_moving()
    # an object in the upper left corner of head: seen at first, behind the robot at times 2 and 3, back from 4 on
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
    # in both episodes it comes back once, of 16 pixels
    assert found["head"]["hidden_object_mse"]["pixels"] == 32 and found["wrist"]["hidden_object_mse"]["pixels"] == 0
    assert found["head"]["returning_object_mse"]["pixels"] == found["head"]["covered_object_mse"]["pixels"] == 32
    assert found["head"]["hidden_object_mse"]["prediction"] == pytest.approx((5 / 255) ** 2)
    assert found["wrist"]["hidden_object_mse"]["prediction"] is None
    # where the other camera saw it meanwhile, it only comes back to this one
    for side, numbers in ((("observation",), slice(0, -1)), (("next", "observation"), slice(1, None))):
        seen_there = torch.full_like(head, 3)[:, numbers]
        episodes[*side, "segmentation", "wrist"] = seen_there
    found = _measure(copier(5.0), episodes)["cameras"]["head"]
    assert found["hidden_object_mse"]["pixels"] == 0 and found["returning_object_mse"]["pixels"] == 32
    # without segmentation there is nothing to say
    assert _measure(copier(), still_then_moving())["cameras"]["head"]["object_mse"]["prediction"] is None


class HalfBlind(CopyingWorldModel):
    """Does without the head camera at times, and is then 20 brighter than the last frame instead of 5."""

    dispensable = ("head",)

    def predict(self, td, without=()):
        predicted = super().predict(td)
        if without:
            assert without == ("head",)
            predicted["image", "wrist"] = td["observation", "image", "wrist"] + 20
        return predicted


def test_hidden_objects_with_an_explorers_camera_alone():
    episodes = still_then_moving()
    # an object that head shows all the time, and wrist not at times 2 and 3
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


def test_two_models_are_compared_by_how_much_worse_the_other_is():
    better, worse = (_measure(copier(brighter), still_then_moving()) for brighter in (5.0, 0.0))
    found = _compare(better, worse)
    assert found["cameras"]["head"]["changed_mse_ratio"] == pytest.approx(0.75)
    assert _compare(worse, better)["cameras"]["head"]["changed_mse_ratio"] == pytest.approx(-0.75)
    assert found["cameras"]["wrist"]["changed_mse_ratio"] is None


def test_skill_by_hand():
    assert _skill(prediction=25.0, copy=20.0, ceiling=30.0) == 0.5
    assert _skill(prediction=18.0, copy=20.0, ceiling=30.0) == pytest.approx(-0.2)
    # a tokenizer that is worse than copying says nothing about the prediction
    assert _skill(prediction=25.0, copy=26.9, ceiling=25.9) is None


def test_held_out_episodes_are_whole_exact_in_number_and_of_other_seeds():
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
    """State: the position of a hand, times 4: 5 cm further in x at every step. It touches things at steps 2, 3."""

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
    # steps 1..5 are five places; 3, 3 and 5 of them in an episode
    assert found.voxels == 5 and found.voxels_per_episode == pytest.approx(11 / 3)
    # x was in bins 3 (3 times), 5, 7 (3 times each), 9 and 11 (once each); y and z never changed
    shares = np.array([3, 3, 3, 1, 1]) / 11
    assert found.state_entropy == pytest.approx(-(shares * np.log(shares)).sum() / 3)


class PushingBackend(HandBackend):
    """Beside it two objects: one moves with the hand from step 2 on, the other stays."""

    def __init__(self, lengths):
        super().__init__(lengths)
        observation = self.spec.observation | {"privileged": ((7,), "float32")}
        self.spec = replace(self.spec, observation=observation, object_entries=(1, 2, 3, 4, 5, 6))

    def _observe(self):
        seen = super()._observe()
        pushed, still = seen["state"].copy(), np.full_like(seen["state"], 0.1)
        pushed[:, 0] = np.where(self.count >= 2, pushed[:, 0], 0.1)
        return seen | {"privileged": np.concatenate([still[:, :1], pushed, still], 1)}


def test_places_that_objects_are_brought_to():
    env = Env(PushingBackend(lengths=(3, 5)))
    found = _explore(RandomPolicy(env.spec, 1), env, episodes=3, seed=0)
    # one object at steps 2, 3 in all episodes and 4, 5 in the long one: four places; where it began is none
    assert found.object_voxels == 4
    assert _explore(RandomPolicy(env.spec, 1), Env(HandBackend((3, 5))), 3, seed=0).object_voxels is None


def test_the_suite_tells_where_objects_are_only_when_asked():
    config = load_config(None, parse_overrides(["env.task=explore", "env.object_state=hidden"])).env
    hidden, shown = make_env(config, 2), make_env(_showing_objects(config), 2)
    assert hidden.spec.object_entries == () and len(shown.spec.object_entries) == 3 * 6
    assert shown.spec.observation["state"] == hidden.spec.observation["state"]
    td = shown.reset(seed=0)
    places = td["observation", "privileged"][:, list(shown.spec.object_entries)].view(2, -1, 3) / 4
    # on the table, all in different places
    assert (places[..., 2].abs() < 0.2).all() and places[0].unique(dim=0).shape[0] == 6
    hidden.close(), shown.close()


def test_an_explorer_beside_random_ones_on_the_same_episodes():
    env = Env(HandBackend(lengths=(3, 5)))
    found = compare_with_random(RandomPolicy(env.spec, 1), env, episodes=2, seed=0)
    assert list(found) == ["policy", "uniform", "coloured 0.8", "coloured 0.9", "coloured 0.95", "coloured 0.98"]
    assert found["policy"] == found["uniform"] == found["coloured 0.9"]


def test_entropy_by_hand():
    assert _entropy(Counter({1: 5})) == 0
    assert _entropy(Counter({1: 2, 2: 2})) == pytest.approx(math.log(2))


def test_episodes_that_are_too_short_for_an_open_loop():
    episodes = still_then_moving()
    # some are longer; of these here none is
    episodes["mask"][:, 4:] = False
    assert _measure(copier(), episodes)["open_loop"]["1"]["head"]["mse_ratio"] is None
