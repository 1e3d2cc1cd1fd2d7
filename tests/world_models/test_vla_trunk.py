"""A world model on the transformer of a VLA: its outputs, which weights learn, and which folders it accepts."""

import json
from itertools import repeat
from types import SimpleNamespace

import pytest
import tiny_pi0
import torch
from doubles_moving import SPEC, moving_windows
from doubles_native import make_inputs, make_model
from safetensors.torch import load_file, save_file

from sparring.algorithms.world_model import WorldModelLearner
from sparring.config.section import ConfigError
from sparring.errors import UserError
from sparring.policies.native.checkpoint import save_model
from sparring.processes.distributed import Distributed
from sparring.world_models.configs import TokenWorldModelConfig
from sparring.world_models.world_model import make_world_model

SIZES = {"channels": 16, "width": 32, "layers": 1, "heads": 2, "members": 1, "memory_channels": 4}


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    folder = tmp_path_factory.mktemp("native")
    save_model(make_model(), folder)
    return folder


@pytest.fixture(scope="module")
def pi0(tmp_path_factory):
    return tiny_pi0.write(tmp_path_factory.mktemp("pi0"))


def make(trunk, **settings):
    torch.manual_seed(0)
    settings = SIZES | {"tokenizer_steps": 0, "camera_dropout": 0.0, "trunk": str(trunk)} | settings
    return make_world_model(TokenWorldModelConfig(**settings), SPEC, chunk=2).eval()


def train(model, steps: int) -> list[float]:
    """The losses of `steps` gradient steps on one batch, without the loss of images, which are of random steps."""
    learner = WorldModelLearner(SimpleNamespace(learning_rate=3e-3), model, Distributed("cpu"), "teacher")
    batch, losses = moving_windows(6, 3), []
    for _ in range(steps):
        metrics = learner.update(repeat(batch), 1, 0.0)
        losses.append(sum(v for name, v in metrics.items() if name.startswith("loss_") and name != "loss_pictures"))
    return losses


def copy_weights(model) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in model.named_parameters()}


def test_the_layers_are_loaded_from_the_checkpoint(native):
    """With the VLA's word embeddings as inputs they give its features."""
    vla, block = make_model(), make(native).trunk.block
    inputs = make_inputs(cameras=0, lengths=(7, 7, 7))
    with torch.no_grad():
        words = vla.words(inputs.tokens) * vla.sizes.width**0.5
        torch.testing.assert_close(block.base(words).mean(1), vla.features(inputs))


def test_a_pi0_of_transformers_can_be_the_trunk(pi0):
    model = make(pi0, lora_r=2)
    theirs = tiny_pi0.make_model().model.vlm.language_model.layers[1].self_attn
    joined = torch.cat([part.weight for part in (theirs.q_proj, theirs.k_proj, theirs.v_proj)])
    assert torch.equal(model.trunk.block.base.trunk[1].qkv.base_layer.weight, joined)
    losses = train(model, 3)
    assert losses[-1] < losses[0]


def test_with_lora_the_model_learns_and_the_base_is_unchanged(native):
    model = make(native, lora_r=4)
    before = copy_weights(model)
    losses = train(model, 30)
    assert losses[-1] < losses[0] / 3
    unchanged = {name for name, weight in model.named_parameters() if torch.equal(weight, before[name])}
    frozen = {name for name in before if name.startswith("trunk.block.base.") and ".lora_" not in name}
    # the tokenizer is trained; all else learns: adapters, input and output layers, members, heads, the memory
    assert unchanged == frozen | {name for name in before if name.startswith("tokenizer.")}
    saved = load_file(native / "model.safetensors")
    for name in ("trunk.0.qkv", "trunk.1.down"):
        assert torch.equal(model.get_submodule(f"trunk.block.base.{name}").base_layer.weight, saved[f"{name}.weight"])


def test_without_lora_all_weights_learn_except_the_tokenizer(native):
    model = make(native)
    before = copy_weights(model)
    train(model, 2)
    unchanged = {name for name, weight in model.named_parameters() if torch.equal(weight, before[name])}
    assert unchanged == {name for name in before if name.startswith("tokenizer.")}


def test_some_layers_may_have_adapters_and_one_may_learn_in_full(native):
    model = make(native, lora_r=4, lora_targets=("qkv",), modules_to_save=("trunk_norm",))
    trainable = {name for name, p in model.trunk.block.base.named_parameters() if p.requires_grad}
    adapters = {f"trunk.{layer}.qkv.lora_{part}.default.weight" for layer in (0, 1) for part in "AB"}
    assert trainable == adapters | {"trunk_norm.weight"}


def test_in_bf16_frozen_weights_are_bf16(native):
    model = make(native, lora_r=4, precision="bf16")
    kinds = {name.partition(".lora_")[1]: p.dtype for name, p in model.trunk.block.base.named_parameters()}
    assert kinds == {"": torch.bfloat16, ".lora_": torch.float32}
    td = moving_windows(3, 1)[:, 0]
    exact, rounded = make(native, lora_r=4).score(td)["error"], model.score(td)["error"]
    assert rounded.dtype == torch.float32 and not torch.equal(exact, rounded)
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.05)
    losses = train(model, 10)
    assert losses[-1] < losses[0] / 1.5


def test_loaded_weights_give_the_same_outputs(native):
    model, other = make(native, lora_r=4), make(native, lora_r=4)
    train(model, 2)
    td = moving_windows(3, 1)[:, 0]
    assert not torch.equal(other.score(td)["error"], model.score(td)["error"])
    other.load_state_dict(model.state_dict())
    assert (other.predict(td) == model.predict(td)).all() and (other.score(td) == model.score(td)).all()


@pytest.mark.parametrize(
    "given",
    [{"lora_r": 4}, {"lora_targets": ("qkv",)}, {"modules_to_save": ("trunk_norm",)}, {"lora_alpha": 8.0}],
)
def test_lora_needs_a_trunk(given):
    with pytest.raises(ConfigError, match="applies to the transformer.*world_model.trunk"):
        TokenWorldModelConfig(**given)


def test_a_pattern_without_a_match_is_refused(native):
    with pytest.raises(UserError, match="world_model.lora_targets: 'q_proj' matches no part"):
        make(native, lora_r=4, lora_targets=("q_proj",))
    with pytest.raises(UserError, match="world_model.lora_targets=.* without LoRA; set world_model.lora_r"):
        make(native, lora_targets=("qkv",))


def test_folders_without_a_valid_vla_are_refused(native, pi0, tmp_path):
    with pytest.raises(UserError, match="world_model.trunk=.*nowhere: neither native_vla.json.*no such folder"):
        make(tmp_path / "nowhere")
    sizes = json.loads((native / "native_vla.json").read_text())
    (tmp_path / "native_vla.json").write_text(json.dumps(sizes))
    with pytest.raises(UserError, match="no valid checkpoint of a native VLA"):
        make(tmp_path)
    # the weights have other sizes than native_vla.json
    (tmp_path / "native_vla.json").write_text(json.dumps(sizes | {"mlp": 32}))
    save_file(load_file(native / "model.safetensors"), tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"weights in world_model.trunk=.* 4 of another shape: .*trunk.0.down.weight"):
        make(tmp_path)
    (tmp_path / "native_vla.json").write_text(json.dumps(sizes | {"layers": 3}))
    with pytest.raises(UserError, match="6 missing: trunk.2"):
        make(tmp_path)
    (tmp_path / "pi0").mkdir()
    (tmp_path / "pi0/config.json").write_text((pi0 / "config.json").read_text())
    with pytest.raises(UserError, match="world_model.trunk=.* cannot be loaded as pi0: .*no file named"):
        make(tmp_path / "pi0")
    (tmp_path / "pi0/config.json").write_text("[]")
    with pytest.raises(UserError, match="config.json' holds a list, expected names mapped to values"):
        make(tmp_path / "pi0")
    (tmp_path / "pi0/config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UserError, match="world_model.trunk=.* holds a model of type 'gpt2', expected 'pi0'"):
        make(tmp_path / "pi0")
