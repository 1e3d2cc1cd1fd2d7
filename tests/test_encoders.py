"""Encoders: what they depend on, what they do not, and what they refuse."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from sparring.algorithms.configs import PPOConfig
from sparring.algorithms.ppo import PPO
from sparring.checkpoint import load_spec
from sparring.collect.collector import Collector
from sparring.data.rollout import RolloutBuffer
from sparring.envs.backend import EnvSpec, EpisodeSeeds
from sparring.envs.configs import TabletopConfig
from sparring.envs.env import Env
from sparring.envs.tabletop.backend import Tabletop
from sparring.errors import UserError
from sparring.policies.actor_critic import ActorCritic
from sparring.policies.configs import ActorCriticConfig
from sparring.policies.encoders import ObservationEncoder

STATE, POINTS = ("observation", "state"), ("observation", "points")


def spec_of(state=8, points=20, hands=1, **more) -> EnvSpec:
    """Hands stand at entries 2, 3, 4 and 5, 6, 7 of the state, in metres x 4."""
    observation = {"state": ((state,), "float32")} | ({"points": ((points, 6), "float32")} if points else {})
    return EnvSpec(observation | more, 2, hand_entries=tuple(range(2, 2 + 3 * hands)), hand_scale=4.0)


def encoder_of(spec, **config) -> ObservationEncoder:
    torch.manual_seed(0)
    return ObservationEncoder(ActorCriticConfig(normalize_observations=False, **config), spec).eval()


def seen(spec, batch=5) -> TensorDict:
    torch.manual_seed(1)
    observation = {name: torch.rand(batch, *shape) for name, (shape, _) in spec.observation.items()}
    return TensorDict({"observation": observation}, [batch])


# ---- points


def test_the_order_of_points_does_not_matter_but_each_of_them_may():
    spec = spec_of()
    encoder, td = encoder_of(spec), seen(spec)
    features = encoder(td)
    assert features.shape == (5, 128 + 8) and encoder.in_keys == [POINTS, STATE]
    shuffled = td.clone().set(POINTS, td[POINTS][:, torch.randperm(20)])
    assert torch.equal(encoder(shuffled), features)
    moved = td.clone()
    moved[POINTS][:, 3, :3] += 0.5
    assert (encoder(moved) - features)[:, :128].abs().amax(1).min() > 1e-3
    painted = td.clone()
    painted[POINTS][:, :, 3] += 0.5
    assert (encoder(painted) - features)[:, :128].abs().amax(1).min() > 1e-3


@pytest.mark.parametrize("hands", [1, 2])
def test_in_the_grippers_frame_only_where_things_are_from_the_hand_matters(hands):
    spec = spec_of(hands=hands)
    td = seen(spec)
    shift = torch.tensor([0.3, -0.2, 0.1])
    together = td.clone()
    together[POINTS][..., :3] += shift
    together[STATE][:, 2 : 2 + 3 * hands] += 4 * shift.repeat(hands)
    alone = td.clone()
    alone[POINTS][..., :3] += shift

    def change(frame, other):
        encoder = encoder_of(spec, point_frame=frame)
        return (encoder(other) - encoder(td))[:, :128].abs().max().item()

    assert change("gripper", together) < 1e-5
    assert change("gripper", alone) > 1e-2
    assert change("world", together) > 1e-2


def test_with_two_arms_points_are_told_from_each_hand():
    spec = spec_of(hands=2)
    encoder, td = encoder_of(spec, point_frame="gripper"), seen(spec)
    for hand in (2, 5):
        moved = td.clone()
        moved[STATE][:, hand] += 1.0
        assert (encoder(moved) - encoder(td))[:, :128].abs().max() > 1e-2


@pytest.mark.parametrize("task", ["lift_d0", "lift_tray_d0"])
def test_the_tabletop_says_where_its_hands_are(task):
    env = Tabletop(TabletopConfig(task=task, threads=1), 2)
    state = env.reset(EpisodeSeeds(0))["state"]
    hands = state[:, list(env.spec.hand_entries)] / env.spec.hand_scale
    np.testing.assert_allclose(hands, env.situation().hands.reshape(2, -1), atol=1e-6)
    env.close()


def test_a_spec_is_read_back_whole_and_one_without_hands_too(tmp_path):
    spec = spec_of(hands=2)
    (tmp_path / "spec.json").write_text(json.dumps(asdict(spec)))
    assert load_spec(tmp_path) == spec
    older = {name: value for name, value in asdict(spec).items() if not name.startswith("hand")}
    (tmp_path / "spec.json").write_text(json.dumps(older))
    assert load_spec(tmp_path).hand_entries == ()


def test_a_frame_that_nobody_knows_is_refused():
    with pytest.raises(UserError, match="point_frame=gripper.*hand_entries.*point_frame=world"):
        encoder_of(replace(spec_of(), hand_entries=()), point_frame="gripper")


def test_images_can_be_left_unread():
    spec = spec_of(**{"image/head": ((3, 48, 48), "uint8")})
    assert ("observation", "image", "head") in encoder_of(spec).in_keys
    blind = encoder_of(spec, use_images=False)
    assert blind.in_keys == [POINTS, STATE] and blind.images is None
    only_images = EnvSpec({"image/head": ((3, 48, 48), "uint8")}, 2)
    with pytest.raises(UserError, match="reads nothing.*image/head.*use_images=true"):
        encoder_of(only_images, use_images=False)
