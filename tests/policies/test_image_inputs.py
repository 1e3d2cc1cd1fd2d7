"""Inputs of policies: images of any size; a wrong dtype or shape raises a one-line error."""

import pytest
import torch
from tensordict import TensorDict

from sparring.config.schema import load_config
from sparring.contract import ContractError, EnvSpec
from sparring.policies.policy import make_policy

SHAPES = {"image/head": (3, 40, 56), "image/wrist": (3, 64, 48), "image/side": (3, 40, 56)}
SPEC = EnvSpec({name: (shape, "uint8") for name, shape in SHAPES.items()} | {"state": ((5,), "float32")}, 2)
NATIVE = {"name": "native_vla", "image_size": 32, "patch_size": 16, "vision_layers": 1, "layers": 1, "memory_size": 7}
POLICIES = {
    "actor_critic": {"name": "actor_critic", "channels": [4, 4], "image_features": 8},
    "keypoints": {"name": "actor_critic", "channels": [4, 4], "image_features": 8, "image_encoder": "keypoints"},
    "flow": {"name": "flow", "channels": [4, 4], "image_features": 8, "width": 32},
    "native_vla": NATIVE,
}


def policy_of(name):
    torch.manual_seed(0)
    return make_policy(load_config({"policy": POLICIES[name]}, inherit=False).policy, SPEC, 1).eval()


def make_observations(batch=2):
    generator = torch.Generator().manual_seed(0)
    images = {
        name.partition("/")[2]: torch.randint(0, 256, (batch, *shape), dtype=torch.uint8, generator=generator)
        for name, shape in SHAPES.items()
    }
    return TensorDict({"observation": {"image": images, "state": torch.zeros(batch, 5)}}, [batch])


@pytest.mark.parametrize("name", POLICIES)
def test_cameras_may_differ_in_size_and_features_depend_on_each(name):
    policy = policy_of(name)

    @torch.no_grad()
    def features(td):
        return policy.encode(td)[0] if hasattr(policy, "encode") else policy.encoder(td)

    with torch.no_grad():
        assert policy.act(make_observations())["action"].shape == (2, policy.chunk, 2)
        if policy.memory_size:
            assert policy.remember(make_observations()).shape == (2, policy.memory_size)
    before = features(make_observations())
    for camera in ("head", "wrist", "side"):
        other = make_observations()
        other["observation", "image", camera] = 255 - other["observation", "image", camera]
        assert (features(other) - before).abs().max() > 1e-5


@pytest.mark.parametrize("name", POLICIES)
def test_imitation_takes_cameras_of_different_sizes(name):
    policy, td = policy_of(name), make_observations()
    td["action"] = torch.zeros(2, policy.horizon, 2)
    td["valid"] = torch.ones(2, policy.horizon, dtype=torch.bool)
    loss, _ = policy.imitation_loss(td, torch.Generator().manual_seed(0))
    loss.backward()
    assert loss.isfinite() and any(weight.grad is not None for weight in policy.parameters())


WRONG_IMAGES = {
    "a range of 0 to 1": (
        lambda image: image / 255,
        "observation/image/head is float32 [2, 3, 40, 56] with values of 0 to 1, expected uint8 [B, 3, 40, 56] with "
        "values of 0 to 255; convert it: (image * 255).round().byte()",
    ),
    "floats to 255": (lambda image: image.float(), "; convert it: image.round().byte()"),
    "whole numbers": (lambda image: image.long(), "; convert it: image.byte()"),
    "channels last": (
        lambda image: image.movedim(1, -1),
        "is uint8 [2, 40, 56, 3], expected uint8 [B, 3, 40, 56] with values of 0 to 255; put the channels first: "
        "image.movedim(-1, -3)",
    ),
    "both": (lambda image: image.movedim(1, -1) / 255, "image.movedim(-1, -3), and convert it: (image * 255)"),
    "another size": (lambda image: image[..., ::2], "[2, 3, 40, 28], expected uint8 [B, 3, 40, 56] with values of 0"),
    "four channels": (
        lambda image: torch.cat([image, image[:, :1]], 1),
        "is uint8 [2, 4, 40, 56], expected uint8 [B, 3, 40, 56] with values of 0 to 255; give 3 channels, it has 4: "
        "image[:, :3]",
    ),
    "one channel": (lambda image: image[:, :1], "values of 0 to 255; give 3 channels, it has 1"),
    "one channel and another size": (lambda image: image[:, :1, :8], "it has 1, and resize it to the size"),
    "no colours": (lambda image: image[:, 0], "is uint8 [2, 40, 56], expected"),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("case", WRONG_IMAGES)
def test_wrong_images_raise_a_one_line_error(name, case):
    change, message = WRONG_IMAGES[case]
    td = make_observations()
    td["observation", "image", "head"] = change(td["observation", "image", "head"])
    with pytest.raises(ContractError) as caught:
        policy_of(name).act(td)
    assert message in str(caught.value) and str(caught.value).startswith("observation/image/head is ")


WRONG_STATES = {
    "another size": (
        lambda state: state[:, :4],
        "observation/state is float32 [2, 4], expected float32 [B, 5]; give the shape that the policy was built for",
    ),
    "numpy's numbers": (
        lambda state: state.numpy().astype("float64"),
        "observation/state is float64 [2, 5], expected float32 [B, 5]; convert it: state.to(torch.float32)",
    ),
    "both": (
        lambda state: state.double()[:, 1:],
        "is float64 [2, 4], expected float32 [B, 5]; give the shape that the policy was built for,"
        " and convert it: state.to(",
    ),
    "NaN": (lambda state: state.log(), "observation/state holds NaN or infinity, expected finite float32 numbers"),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("case", WRONG_STATES)
def test_a_wrong_state_raises_a_one_line_error(name, case):
    change, message = WRONG_STATES[case]
    td = make_observations()
    td["observation", "state"] = change(td["observation", "state"])
    with pytest.raises(ContractError) as caught:
        policy_of(name).act(td)
    assert message in str(caught.value) and str(caught.value).startswith("observation/state ")


@pytest.mark.parametrize("name", POLICIES)
def test_a_missing_state_is_refused_by_name(name):
    with pytest.raises(ContractError, match=r"^observation/state is missing; expected float32 \[B, 5\]$"):
        policy_of(name).act(make_observations().exclude(("observation", "state")))


def test_a_missing_image_is_refused_by_name():
    with pytest.raises(ContractError, match=r"observation/image/wrist is missing; expected uint8 \[B, 3, 64, 48\]"):
        policy_of("flow").act(make_observations().exclude(("observation", "image", "wrist")))
