"""Encoders: which inputs their features depend on, and which specs they refuse."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from sparring.algorithms.configs import PPOConfig
from sparring.algorithms.ppo import PPO
from sparring.collect.collector import Collector
from sparring.contract import EnvSpec
from sparring.data.buffer import RolloutBuffer
from sparring.envs.backend import EpisodeSeeds
from sparring.envs.configs import TabletopConfig
from sparring.envs.env import Env
from sparring.envs.tabletop.backend import Tabletop
from sparring.errors import UserError
from sparring.policies.actor_critic import ActorCritic
from sparring.policies.configs import ActorCriticConfig
from sparring.policies.encoders import InstructionEncoder, ObservationEncoder
from sparring.runs.checkpoint import load_spec

STATE, POINTS = ("observation", "state"), ("observation", "points")


def spec_of(state=8, points=20, hands=1, **more) -> EnvSpec:
    """Hand positions are entries 2, 3, 4 and 5, 6, 7 of the state, in metres x 4."""
    observation = {"state": ((state,), "float32")} | ({"points": ((points, 6), "float32")} if points else {})
    return EnvSpec(observation | more, 2, hand_entries=tuple(range(2, 2 + 3 * hands)), hand_scale=4.0)


def encoder_of(spec, **config) -> ObservationEncoder:
    torch.manual_seed(0)
    return ObservationEncoder(ActorCriticConfig(normalize_observations=False, **config), spec).eval()


def observations(spec, batch=5) -> TensorDict:
    torch.manual_seed(1)
    observation = {name: torch.rand(batch, *shape) for name, (shape, _) in spec.observation.items()}
    return TensorDict({"observation": observation}, [batch])


# ---- points


def test_features_ignore_the_order_of_points_but_not_their_positions_and_colours():
    spec = spec_of()
    encoder, td = encoder_of(spec), observations(spec)
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
def test_in_the_gripper_frame_only_positions_relative_to_the_hand_matter(hands):
    spec = spec_of(hands=hands)
    td = observations(spec)
    shift = torch.tensor([0.3, -0.2, 0.1])
    all_shifted = td.clone()
    all_shifted[POINTS][..., :3] += shift
    all_shifted[STATE][:, 2 : 2 + 3 * hands] += 4 * shift.repeat(hands)
    points_shifted = td.clone()
    points_shifted[POINTS][..., :3] += shift

    def change(frame, other):
        encoder = encoder_of(spec, point_frame=frame)
        return (encoder(other) - encoder(td))[:, :128].abs().max().item()

    assert change("gripper", all_shifted) < 1e-5
    assert change("gripper", points_shifted) > 1e-2
    assert change("world", all_shifted) > 1e-2


def test_with_two_arms_features_depend_on_the_position_of_each_hand():
    spec = spec_of(hands=2)
    encoder, td = encoder_of(spec, point_frame="gripper"), observations(spec)
    for hand in (2, 5):
        moved = td.clone()
        moved[STATE][:, hand] += 1.0
        assert (encoder(moved) - encoder(td))[:, :128].abs().max() > 1e-2


@pytest.mark.parametrize("task", ["lift_d0", "lift_tray_d0"])
def test_the_hand_entries_of_the_tabletop_are_the_hand_positions(task):
    env = Tabletop(TabletopConfig(task=task, threads=1), 2)
    state = env.reset(EpisodeSeeds(0))["state"]
    hands = state[:, list(env.spec.hand_entries)] / env.spec.hand_scale
    np.testing.assert_allclose(hands, env.situation().hands.reshape(2, -1), atol=1e-6)
    env.close()


def test_a_spec_loads_as_saved_and_hand_entries_are_optional(tmp_path):
    spec = spec_of(hands=2)
    (tmp_path / "spec.json").write_text(json.dumps(asdict(spec)))
    assert load_spec(tmp_path) == spec
    older = {name: value for name, value in asdict(spec).items() if not name.startswith("hand")}
    (tmp_path / "spec.json").write_text(json.dumps(older))
    assert load_spec(tmp_path).hand_entries == ()


def test_the_gripper_frame_needs_hand_entries():
    with pytest.raises(UserError, match="point_frame=gripper.*hand_entries.*point_frame=world"):
        encoder_of(replace(spec_of(), hand_entries=()), point_frame="gripper")


def test_images_can_be_switched_off():
    spec = spec_of(**{"image/head": ((3, 48, 48), "uint8")})
    assert ("observation", "image", "head") in encoder_of(spec).in_keys
    blind = encoder_of(spec, use_images=False)
    assert blind.in_keys == [POINTS, STATE] and blind.images is None
    only_images = EnvSpec({"image/head": ((3, 48, 48), "uint8")}, 2)
    with pytest.raises(UserError, match="reads none.*image/head.*use_images=true"):
        encoder_of(only_images, use_images=False)


# ---- language

TEXTS = ("put the red cube on the blue cube", "put the blue cube on the red cube", "lift", "")


def language(texts, features=16) -> InstructionEncoder:
    torch.manual_seed(2)
    return InstructionEncoder(EnvSpec({"task": ((), "int64")}, 2, instructions=texts), features)


def of_tasks(*indices) -> TensorDict:
    return TensorDict({"observation": {"task": torch.tensor(indices)}}, [len(indices)])


def test_instructions_have_distinct_features_even_if_only_the_word_order_differs():
    apart = torch.pdist(language(TEXTS)(of_tasks(0, 1, 2, 3)))
    assert apart.shape == (6,) and apart.min() > 0.05


def test_instruction_features_depend_on_the_words_alone():
    """Not on the batch or on the env's other instructions: weights transfer to another set of instructions."""
    one, other = language(TEXTS), language(("a much longer instruction than any of the others", TEXTS[1], TEXTS[0]))
    other.load_state_dict(one.state_dict(), strict=True)
    torch.testing.assert_close(other(of_tasks(2, 1)), one(of_tasks(0, 1)), atol=1e-6, rtol=0)
    task = of_tasks(1, 0, 3, 1)
    assert torch.equal(one(task)[:1], one(task[:1])) and torch.equal(one(task)[0], one(task)[3])


def test_only_distinct_instructions_are_encoded():
    encoder, rows = language(TEXTS), []
    encoder.neighbours.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    encoder(of_tasks(*[0] * 1000))
    assert rows == [4]


def test_the_encoder_reads_the_task_only_with_language_features():
    spec = replace(spec_of(points=0, task=((), "int64")), instructions=TEXTS)
    assert encoder_of(spec).in_keys == [STATE]
    encoder = encoder_of(spec, language_features=16)
    assert encoder.in_keys == [STATE, ("observation", "task")] and encoder.size == 8 + 16
    td = observations(spec, batch=4).set(("observation", "task"), torch.tensor([0, 1, 2, 0]))
    td[STATE][:] = 1.0
    features = encoder(td)
    assert torch.equal(features[0], features[3]) and not torch.equal(features[0], features[1])


def test_free_text_has_the_features_of_the_same_listed_instruction():
    listed, rows = language(TEXTS), []
    free = InstructionEncoder(EnvSpec({"instruction": ((64,), "uint8")}, 2), 16)
    free.load_state_dict(listed.state_dict(), strict=True)
    free.neighbours.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    text = torch.zeros(5, 64, dtype=torch.uint8)
    for row, index in enumerate((2, 0, 2, 3, 1)):
        text[row, : len(TEXTS[index])] = torch.tensor(list(TEXTS[index].encode()), dtype=torch.uint8)
    features = free(TensorDict({"observation": {"instruction": text}}, [5]))
    torch.testing.assert_close(features, listed(of_tasks(2, 0, 2, 3, 1)), atol=1e-6, rtol=0)
    assert rows == [4]  # distinct texts


def test_language_features_need_instructions_of_limited_length():
    with pytest.raises(UserError, match="language_features=.*set it to 0"):
        encoder_of(spec_of(), language_features=16)
    with pytest.raises(UserError, match="has 300 bytes, at most 256"):
        language(("x" * 300,))


# ---- in a policy

ENV = TabletopConfig(
    task=("lift_d0", "push_d0"), cameras=("head",), image_size=36, points=32, object_state="hidden", threads=1
)


def trained(updates=1, **config):
    """Train a policy that has all encoders; return it, its buffer, the changed parameters and the metrics."""
    torch.manual_seed(0)
    env = Env(Tabletop(ENV, 4, 6))
    policy = ActorCritic(ActorCriticConfig(channels=(4, 4, 4), language_features=8, **config), env.spec, 2).eval()
    before = {name: value.detach().clone() for name, value in policy.named_parameters()}
    ppo, buffer = PPO(PPOConfig(mini_batch_size=8), policy), RolloutBuffer(6)
    collector = Collector(env, policy, seed=0, chunk=2)
    for _ in range(updates):
        collector.collect(buffer)
        metrics = ppo.update(buffer.get(flatten=False))
        collector.version += 1
    moved = {name for name, value in policy.named_parameters() if not torch.equal(value, before[name])}
    env.backend.close()
    return policy, buffer, moved, metrics


def test_all_encoders_learn_and_pass_the_parity_gate():
    policy, _, moved, metrics = trained(updates=2, point_frame="gripper", dropout=0.5)
    assert moved == {name for name, _ in policy.named_parameters()}
    assert metrics["parity"] <= 1e-5


def test_a_frozen_encoder_keeps_its_weights_and_builds_no_graph():
    policy, buffer, moved, _ = trained(freeze_encoder=True)
    frozen = {name for name, _ in policy.named_parameters() if name.startswith("encoder.")}
    assert len(frozen) > 10 and not moved & frozen
    assert moved == {name for name, _ in policy.named_parameters()} - frozen
    assert not policy.encoder(buffer.get()).requires_grad


def test_dropout_zeroes_image_and_point_features_in_training_only():
    policy, buffer, _, _ = trained(dropout=0.5, image_features=64, point_features=64)
    td, encoder = buffer.get(), policy.encoder
    assert torch.equal(encoder(td), encoder(td))
    still = encoder(td)
    encoder.train()
    dropped = encoder(td)
    points = dropped[:, 64:128]
    assert 0.4 < (points == 0).float().mean() < 0.6
    torch.testing.assert_close(points[points != 0], 2 * still[:, 64:128][points != 0])
    assert torch.equal(dropped[:, 128:], still[:, 128:])
