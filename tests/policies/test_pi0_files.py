"""pi0's files: weights, adapters, image processors and tokenizers are loaded, saved, and refused if damaged."""

import shutil

import numpy as np
import pytest
import tiny_pi0
import torch
from pi0_cases import INSTRUCTIONS, LORA, Cameras, make, seen, update
from safetensors.torch import load_file, save_file
from tiny_pi0 import IMAGE_TOKENS

from sparring.contract import EnvSpec
from sparring.errors import UserError
from sparring.policies.configs import PI0PolicyConfig
from sparring.policies.lora import load_adapters, merge, save_adapters
from sparring.policies.native.config import NativeVLAConfig
from sparring.policies.native.policy import NativeVLA
from sparring.policies.pi0 import ImagePreparation, PI0Policy
from sparring.runs.checkpoint import save_checkpoint
from sparring.runs.fits import load_weights


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_pi0.write(tmp_path_factory.mktemp("pi0"))


# ---- images


def pil_processor(**settings):
    """An image processor of transformers with pi0's settings; its PI0ImageProcessor needs torchvision."""
    from transformers.image_processing_backends import PilBackend

    settings = {"size": {"max_height": 16, "max_width": 16}, "resample": 3} | settings
    backend = PilBackend(
        do_resize=True,
        do_rescale=True,
        rescale_factor=1 / 255,
        do_normalize=True,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        do_pad=True,
        pad_size={"height": 16, "width": 16},
        **settings,
    )
    return lambda images: torch.from_numpy(np.stack(backend([i.numpy() for i in images])["pixel_values"])).float()


@pytest.mark.parametrize("shape", [(20, 24), (40, 31), (16, 16), (9, 13)])
@pytest.mark.parametrize("size", [{"max_height": 16, "max_width": 16}, {"height": 16, "width": 16}])
@pytest.mark.parametrize("resample", [2, 3])
def test_images_are_prepared_as_by_the_image_processor(tmp_path, shape, size, resample):
    (tmp_path / "preprocessor_config.json").write_text("{}")
    tiny_pi0.edit_json(tmp_path / "preprocessor_config.json", size=size, resample=resample)
    images = torch.randint(0, 256, (4, 3, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    ours, theirs = ImagePreparation(tmp_path, 16)(images), pil_processor(size=size, resample=resample)(images)
    # PIL computes in fixed point: one step of 255 where a number is halfway between two
    off = (ours - theirs).abs()
    assert off.max() < 2.1 / 255 and (off > 1e-5).float().mean() < 0.06


def native_of(folder, **settings):
    return NativeVLA(NativeVLAConfig(model_path=str(folder), **settings), Cameras(1).spec, 3).eval()


# ---- loading and saving


def test_sharded_weights_load_like_a_single_file(checkpoint, tmp_path):
    tiny_pi0.write(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    one, many = make(checkpoint).state_dict(), make(tmp_path).state_dict()
    assert one.keys() == many.keys() and all(torch.equal(one[key], many[key]) for key in one)


def test_a_checkpoint_of_a_run_loads_back_strictly(checkpoint, tmp_path):
    policy = make(checkpoint, **LORA)
    update(policy)
    saved = save_checkpoint(tmp_path, 1, policy, {}, "", Cameras(1).spec)
    again = make(checkpoint, stir=False, **LORA)
    load_weights(again, saved)
    td = seen()
    with torch.no_grad():
        assert torch.equal(again.act(td.clone())["action"], policy.act(td.clone())["action"])
        assert torch.equal(again.value(td), policy.value(td))
    with pytest.raises(UserError, match="does not fit this model"):
        load_weights(make(checkpoint), saved)


def test_adapters_alone_and_merged_make_the_same_policy(checkpoint, tmp_path):
    from peft import PeftModel
    from transformers import PI0ForConditionalGeneration

    # peft renames adapters of embed_action_time twice when it loads them for a pi0, and so finds none
    policy, td = make(checkpoint, lora_targets=["model", "action_out_proj"], **LORA), seen()
    save_adapters(policy.model, tmp_path / "adapters")
    opened = PeftModel.from_pretrained(PI0ForConditionalGeneration.from_pretrained(checkpoint), tmp_path / "adapters")
    plain = make(checkpoint, stir=False)
    load_adapters(plain.model, tmp_path / "adapters")
    with torch.no_grad():
        action = policy.act(td.clone())["action"]
        assert torch.equal(plain.act(td.clone())["action"], action)
        plain.model = opened.eval().base_model.model
        assert (plain.act(td.clone())["action"] - action).abs().max() < 1e-5
        merge(policy.model)
        assert (policy.act(td.clone())["action"] - action).abs().max() < 1e-5
        # saved like any pi0 of transformers
        policy.model.save_pretrained(tmp_path / "merged")
        merged = make(tmp_path / "merged", stir=False, tokenizer=str(checkpoint))
        assert (merged.act(td.clone())["action"] - action).abs().max() < 1e-5


# ---- bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_path": None}, "policy.model_path is not set"),
        ({"model_path": "lerobot/pi0_base"}, "model_path=lerobot/pi0_base: .*no config.json"),
        ({"tokenizer": "nowhere"}, "policy.tokenizer=nowhere: .*has no tokenizer"),
        ({"cameras": ["haed"]}, "policy.cameras: this env has no camera 'haed'; it has head, wrist"),
        ({"horizon": 9}, "policy.horizon=9: .* 4 steps"),
        ({"dtype": "bf16"}, "policy.dtype=bf16 needs policy.precision=bf16"),
        ({"frozen": ["vision_twoer"]}, "policy.frozen: 'vision_twoer' matches no part .* nearest: .*vision_tower"),
        ({"frozen": ["vlm"], "lora_r": 2}, "policy.frozen=.* is not read with policy.lora_r"),
        ({"lora_r": 2, "lora_targets": ["q_prj"]}, "policy.lora_targets: 'q_prj' matches no part .* nearest: q_proj"),
    ],
)
def test_bad_settings_are_refused(checkpoint, settings, message):
    with pytest.raises(UserError, match=message):
        PI0Policy(PI0PolicyConfig(**{"model_path": str(checkpoint)} | settings), Cameras(1).spec, 3)


@pytest.mark.parametrize(
    ("change", "chunk", "message"),
    [
        ({"action_dim": 5}, 3, r"this env's action has 5 numbers, .*at most 4 \(max_action_dim\)"),
        ({"state": 9}, 3, "state has 9 numbers, .*at most 8"),
        ({}, 5, "rollout.action_steps=5 is more than .* 4 "),
        ({"images": False}, 3, "needs images"),
    ],
)
def test_envs_that_do_not_fit_are_refused(checkpoint, change, chunk, message):
    shown = {"state": ((change.get("state", 5),), "float32")}
    shown |= {"image/head": ((3, 16, 16), "uint8")} if change.get("images", True) else {}
    with pytest.raises(UserError, match=message):
        make(checkpoint, EnvSpec(shown, change.get("action_dim", 3)), chunk)


def test_bad_checkpoints_are_refused(checkpoint, tmp_path):
    folder = tmp_path / "copy"

    def assert_refused(message, **settings):
        with pytest.raises(UserError, match=message):
            make(folder, **settings)

    shutil.copytree(checkpoint, folder)
    weights = load_file(folder / "model.safetensors")
    name = "action_out_proj.weight"
    save_file({key: w for key, w in weights.items() if key != name}, folder / "model.safetensors", {"format": "pt"})
    assert_refused(f"do not fit its config.json: 1 missing: {name}")
    save_file(weights | {"extra": torch.ones(1)}, folder / "model.safetensors", {"format": "pt"})
    assert_refused("1 unexpected: extra")
    save_file(weights | {name: torch.ones(3, 16)}, folder / "model.safetensors", {"format": "pt"})
    assert_refused(f"1 of another shape: {name}")
    (folder / "model.safetensors").write_bytes(b"broken")
    assert_refused("cannot be loaded as pi0")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    assert_refused("cannot be loaded as pi0")
    (folder / "pytorch_model.bin").unlink()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "preprocessor_config.json").write_text('{"size": {"height": 32, "width": 32}}')
    assert_refused("its image processor makes images of 32x32, .* 16x16")
    for settings, message in (
        ("[]", "preprocessor_config.json' holds a list, expected names mapped to values"),
        ('{"image_processor": 3}', "image_processor is 3, expected names"),
        ('{"size": 16}', "its image processor has size=16; expected height and width"),
        ('{"resample": []}', "resample=.*; expected 2 or 3"),
        ('{"image_mean": 0.5}', "its image processor has image_mean=0.5; expected 3 numbers"),
    ):
        (folder / "preprocessor_config.json").write_text(settings)
        assert_refused(message)
    (folder / "preprocessor_config.json").unlink()
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert_refused("has no tokenizer .*policy.tokenizer=bytes")
    assert make(folder, tokenizer="bytes").prompts.ids.shape == (3, 2 * IMAGE_TOKENS + len(INSTRUCTIONS[2]) + 2)
    tiny_pi0.edit_json(folder / "config.json", model_type="llama")
    assert_refused("config.json has model_type='llama', expected 'pi0'")
    (folder / "config.json").write_text("{")
    assert_refused("cannot be read")
    (folder / "config.json").write_text("[]")
    assert_refused("config.json' holds a list, expected names mapped to values")


@pytest.mark.parametrize("make_policy", [make, native_of])
def test_damaged_checkpoints_are_refused_by_both_policies(checkpoint, tmp_path, make_policy):
    """policy.name=pi0 and native_vla raise the same errors."""
    folder = tmp_path / "copy"
    shutil.copytree(checkpoint, folder)

    def assert_refused(message):
        with pytest.raises(UserError, match=f"policy.model_path={folder}.*{message}"):
            make_policy(folder)

    weights = load_file(folder / "model.safetensors")
    name = "action_out_proj.weight"
    save_file(weights | {"extra": torch.ones(1)}, folder / "model.safetensors", {"format": "pt"})
    assert_refused("1 unexpected: extra")
    save_file(weights | {name: torch.ones(3, 16)}, folder / "model.safetensors", {"format": "pt"})
    assert_refused(f"1 of another shape: {name}")
    (folder / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes()[:-100])
    assert_refused("cannot be loaded as pi0")
    shutil.copy(checkpoint / "model.safetensors", folder)
    for wrong in ({"chunk_size": "many"}, {"vlm_config": []}):
        shutil.copy(checkpoint / "config.json", folder)
        tiny_pi0.edit_json(folder / "config.json", **wrong)
        assert_refused("cannot be loaded as pi0")


# ---- the native VLA with such a checkpoint


def test_the_native_vla_acts_like_pi0(checkpoint):
    """Horizon, denoising steps and image preparation come from the checkpoint."""
    pi0, native = make(checkpoint, normalize_actions=False), native_of(checkpoint, normalize_actions=False)
    assert (native.horizon, native.sampling_steps) == (tiny_pi0.CHUNK, tiny_pi0.STEPS)
    td = seen()
    with torch.no_grad():
        torch.testing.assert_close(native.act(td.clone())["action"], pi0.act(td.clone())["action"], atol=1e-4, rtol=0)
    other = native_of(checkpoint, horizon=6, sampling_steps=2)
    assert (other.horizon, other.sampling_steps) == (6, 2)
