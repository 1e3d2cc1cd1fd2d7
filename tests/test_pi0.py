"""pi0 through transformers: it does what transformers does, and scores what it did."""

import copy
import shutil

import numpy as np
import pytest
import tiny_pi0
import torch
from parity_cases import METHODS, Drifting, gate
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from tiny_pi0 import ACTIONS, CHUNK, IMAGE_TOKENS, STATES, STEPS

from sparring.algorithms.configs import PPOConfig
from sparring.algorithms.ppo import PPO
from sparring.checkpoint import load_weights, save_checkpoint
from sparring.collect.collector import Collector
from sparring.data.rollout import RolloutBuffer
from sparring.envs.backend import EnvSpec
from sparring.envs.env import Env
from sparring.errors import UserError
from sparring.policies.lora import load_adapters, merge, save_adapters
from sparring.policies.pi0.images import ImagePreparation
from sparring.policies.pi0.policy import PI0Policy
from sparring.policies.pi0_configs import PI0PolicyConfig

INSTRUCTIONS = ("push the block", "lift it", "stack the red block onto the green one")
LORA = {"lora_r": 2, "lora_alpha": 4, "lora_dropout": 0.5}


class Told(Drifting):
    """The parity cases' env with two cameras and instructions."""

    def __init__(self, num_envs: int, padding: int = 0):
        super().__init__(num_envs, padding=padding)
        shown = self.spec.observation | {f"image/{name}": ((3, 20, 24), "uint8") for name in ("head", "wrist")}
        shown["task"] = ((), "int64")
        self.spec = EnvSpec(
            shown,
            self.spec.action_dim,
            action_padding=padding,
            instructions=INSTRUCTIONS,
            task_names=("push", "lift", "stack"),
            max_episode_steps=7,
        )

    def _observe(self):
        seen, n = super()._observe(), self.num_envs
        images = {f"image/{name}": self.rng.integers(0, 256, (n, 3, 20, 24), np.uint8) for name in ("head", "wrist")}
        return seen | images | {"task": self.rng.integers(0, 3, n)}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return tiny_pi0.write(tmp_path_factory.mktemp("pi0"))


def make(checkpoint, spec=None, chunk=3, stir=True, **settings):
    torch.manual_seed(0)
    policy = PI0Policy(PI0PolicyConfig(model_path=str(checkpoint), **settings), spec or Told(1).spec, chunk).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in policy.named_parameters() if stir else ():
            # away from the start, where adapters and noise nets change nothing
            if parameter.abs().max() == 0 and not name.startswith("critic"):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return policy


def seen(batch=5, spec=None, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (spec or Told(1).spec).observation
    made = {
        name: rng.integers(0, 3 if name == "task" else 256, (batch, *shape)).astype(kind)
        if kind != "float32"
        else rng.standard_normal((batch, *shape)).astype(kind)
        for name, (shape, kind) in shapes.items()
    }
    td = TensorDict({}, [batch])
    for name, value in made.items():
        td["observation", *name.split("/")] = torch.from_numpy(value)
    return td


def rollout(policy, num_envs=4, decisions=32, padding=0):
    env, buffer = Env(Told(num_envs, padding), "cpu"), RolloutBuffer(decisions // num_envs)
    Collector(env, policy, seed=0, chunk=policy.chunk).collect(buffer)
    return buffer


# ---- it does what transformers does


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_ode_is_sample_actions_with_the_same_noise(checkpoint, attention):
    """With as many action dims as the checkpoint has; instructions of different lengths."""
    from transformers import AutoTokenizer, PI0ForConditionalGeneration

    spec = EnvSpec(Told(1).spec.observation, ACTIONS, instructions=INSTRUCTIONS)
    policy = make(checkpoint, spec, attention=attention)
    td = seen(spec=spec)
    td["start"] = torch.rand(5, policy.start_size, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        acted = policy.act(td.clone())["action"]

    theirs = PI0ForConditionalGeneration.from_pretrained(checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    texts = [INSTRUCTIONS[i] for i in td["observation", "task"].tolist()]
    text = tokenizer([f"<bos>{each}\n" for each in texts], padding=True, return_tensors="pt", add_special_tokens=False)
    images = torch.full((5, 2 * IMAGE_TOKENS), theirs.config.vlm_config.image_token_id)
    # PIL rounds a few pixels differently, which is another test
    expected = theirs.sample_actions(
        state=torch.nn.functional.pad(td["observation", "state"], (0, STATES - 5)),
        input_ids=torch.cat([images, text["input_ids"]], 1),
        pixel_values=torch.stack([policy.prepare(td["observation", "image", name]) for name in ("head", "wrist")], 1),
        noise=torch.special.ndtri(td["start"]).view(5, CHUNK, ACTIONS),
        attention_mask=torch.cat([torch.ones_like(images), text["attention_mask"]], 1),
        pixel_attention_mask=torch.ones(5, 2, dtype=torch.bool),
    )
    assert policy.grid.steps == STEPS and policy.horizon == CHUNK
    assert (expected.std() > 0.3) and (acted - expected[:, :3]).abs().max() < 1e-5


def pil_processor(**settings):
    """transformers' own, with pi0's settings; its PI0ImageProcessor needs torchvision."""
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


def test_sharded_weights_load_alike(checkpoint, tmp_path):
    tiny_pi0.write(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    one, many = make(checkpoint).state_dict(), make(tmp_path).state_dict()
    assert one.keys() == many.keys() and all(torch.equal(one[key], many[key]) for key in one)


def test_instructions_images_state_and_cameras_matter(checkpoint):
    policy, td = make(checkpoint), seen()
    with torch.no_grad():
        base = policy.act(td.clone())["action"]
        for change in ("task", "state", ("image", "head"), ("image", "wrist")):
            key, other = ("observation", *(change if isinstance(change, tuple) else (change,))), td.clone()
            other[key] = 2 - other[key] if change == "task" else other[key].roll(1, 0)
            rows = (other[key] != td[key]).flatten(1).any(1) if change != "task" else other[key] != td[key]
            assert ((policy.act(other)["action"] - base).abs().flatten(1).amax(1) > 1e-4)[rows].all(), change
        swapped = make(checkpoint, cameras=["wrist", "head"]).act(td.clone())["action"]
    assert (swapped - base).abs().max() > 1e-3


# ---- it scores what it did


@pytest.mark.parametrize("lora", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("method", METHODS)
def test_the_gate_passes_in_fp32(checkpoint, method, lora):
    settings = METHODS[method] | lora
    policy = make(checkpoint, Told(1, padding=2).spec, **settings)
    parity = gate(policy, rollout(policy, padding=2))
    parity.check(1e-4)
    assert parity.dims == 0


@pytest.mark.parametrize("lora", [{}, LORA, LORA | {"dtype": "bf16"}], ids=["full", "lora", "lora on bf16 weights"])
@pytest.mark.parametrize("num_envs", [1, 4])
def test_the_gate_passes_in_bf16(checkpoint, lora, num_envs):
    policy = make(checkpoint, precision="bf16", **lora)
    buffer = rollout(policy, num_envs)
    gate(policy, buffer).check(0.05)
    flat = buffer.get()
    exact = make(checkpoint, **{key: value for key, value in lora.items() if key != "dtype"})
    apart = (policy.evaluate(flat)["trace", "mean"] - exact.evaluate(flat)["trace", "mean"]).abs().max()
    # it is bf16 indeed
    assert 1e-4 < apart < 0.2


def test_only_the_envs_action_dims_are_scored(checkpoint):
    policy = make(checkpoint, Told(1, padding=2).spec)
    flat = rollout(policy, padding=2).get()
    assert flat["action"].shape[1:] == (3, 5) and (flat["action"][..., 3:] == 0).all()
    assert (flat["trace", "dims"] == 3 * STEPS).all()


def test_the_prefix_is_computed_once_per_decision_and_once_per_row_of_an_update(checkpoint):
    policy = make(checkpoint)
    read, denoised = [], []
    policy.model.model.vlm.register_forward_hook(lambda _, __, kwargs, ___: read.append(1), with_kwargs=True)
    policy.model.model.dit.register_forward_hook(
        lambda _, __, kwargs, out: denoised.append(len(kwargs["inputs_embeds"])), with_kwargs=True
    )
    td = seen(4)
    td["noise"] = torch.rand(4, policy.noise_size)
    policy.act(td)
    assert len(read) == 1 and denoised == [4] * STEPS
    flat = rollout(policy, num_envs=4, decisions=8).get()
    read.clear(), denoised.clear()
    policy.evaluate(flat)
    # all denoising states of all decisions in one pass
    assert len(read) == 1 and denoised == [8 * STEPS]


def test_no_denoising_step_sees_what_another_left_behind(checkpoint):
    policy, td = make(checkpoint), seen()
    with torch.no_grad():
        _, prefix = policy.encode(td)
        kept = prefix.clone()
        x, t = torch.randn(5, CHUNK, 3), torch.rand(5)
        assert torch.equal(policy.denoise(x, t, prefix), policy.denoise(x, t, prefix))
    assert all(torch.equal(prefix[key], value) for key, value in kept.items())


# ---- what learns


def update(policy, **ppo):
    algorithm = PPO(PPOConfig(mini_batch_size=16, ppo_epochs=1, policy_lr=1e-2, critic_lr=1e-2, **ppo), policy)
    before = copy.deepcopy(policy.state_dict())
    metrics = algorithm.update(rollout(policy).rollout(), 0.0)
    after = policy.state_dict()
    return {key for key in after if not torch.equal(after[key], before[key])}, metrics


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_ppo_update_changes_adapters_and_the_value_head_and_nothing_else(checkpoint, dtype):
    settings = {"precision": dtype, "dtype": dtype, "normalize_observations": False} | LORA
    policy = make(checkpoint, **settings)
    changed, metrics = update(policy, parity_tolerance=1e-4 if dtype == "fp32" else 0.05)
    adapters = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    assert all(".lora_" in name for name in adapters)
    # trunk and head: vision, language, action expert and its projections
    for part in ("vision_tower", "language_model", "model.dit.", "embed_action_time", "action_out_proj"):
        assert any(part in name for name in adapters), part
    assert changed == {f"model.{name}" for name in adapters} | {
        f"critic.{name}" for name, _ in policy.critic.named_parameters()
    }


def test_without_lora_all_that_is_read_learns_but_the_frozen_parts(checkpoint):
    policy = make(checkpoint, frozen=["vision_tower", "*.dit.layers.0"])
    changed, _ = update(policy)
    learns = {f"model.{name}" for name, p in policy.model.named_parameters() if p.requires_grad}
    assert {key for key in changed if key.startswith("model.")} == learns
    assert not any("vision_tower" in key or "dit.layers.0" in key for key in changed)
    assert any("dit.layers.1" in key for key in changed)


def test_it_imitates(checkpoint):
    policy, td = make(checkpoint), seen(16)
    td["action"], td["valid"] = torch.full((16, CHUNK, 3), 0.5), torch.ones(16, CHUNK, dtype=torch.bool)
    optimizer = torch.optim.Adam([p for p in policy.parameters() if p.requires_grad], 3e-3)
    losses = []
    for step in range(30):
        loss, told = policy.imitation_loss(td, torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(told["flow_matching"].item())
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:3])


# ---- in and out


def test_a_checkpoint_of_a_run_loads_back_strictly(checkpoint, tmp_path):
    policy = make(checkpoint, **LORA)
    update(policy)
    saved = save_checkpoint(tmp_path, 1, policy, {}, "", Told(1).spec)
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
        # as any other pi0
        policy.model.save_pretrained(tmp_path / "merged")
        merged = make(tmp_path / "merged", stir=False, tokenizer=str(checkpoint))
        assert (merged.act(td.clone())["action"] - action).abs().max() < 1e-5


# ---- bad input


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model_path": None}, "policy.model_path is needed"),
        ({"model_path": "lerobot/pi0_base"}, "no config.json in such a folder; download the checkpoint first"),
        ({"tokenizer": "nowhere"}, "policy.tokenizer=nowhere holds no tokenizer"),
        ({"cameras": ["haed"]}, "policy.cameras: this env has no camera 'haed'; it has head, wrist"),
        ({"horizon": 9}, "policy.horizon=9: the checkpoint plans chunks of 4 steps"),
        ({"dtype": "bf16"}, "policy.dtype=bf16 needs policy.precision=bf16"),
        ({"frozen": ["vision_twoer"]}, "policy.frozen: 'vision_twoer' matches no part .* nearest: .*vision_tower"),
        ({"frozen": ["vlm"], "lora_r": 2}, "policy.frozen=.* is not read with policy.lora_r"),
        ({"lora_r": 2, "lora_targets": ["q_prj"]}, "policy.lora_targets: 'q_prj' matches no part .* nearest: q_proj"),
    ],
)
def test_bad_settings(checkpoint, settings, said):
    with pytest.raises(UserError, match=said):
        PI0Policy(PI0PolicyConfig(**{"model_path": str(checkpoint)} | settings), Told(1).spec, 3)


@pytest.mark.parametrize(
    ("change", "chunk", "said"),
    [
        ({"action_dim": 5}, 3, r"this env's action has 5 numbers, the checkpoint takes 4 at most \(max_action_dim\)"),
        ({"state": 9}, 3, r"this env's state has 9 numbers, the checkpoint takes 8 at most"),
        ({}, 5, "rollout.action_steps=5 is more than the 4 steps that the checkpoint plans"),
        ({"images": False}, 3, "looks at images, but this env shows none"),
    ],
)
def test_envs_that_do_not_fit(checkpoint, change, chunk, said):
    shown = {"state": ((change.get("state", 5),), "float32")}
    shown |= {"image/head": ((3, 16, 16), "uint8")} if change.get("images", True) else {}
    with pytest.raises(UserError, match=said):
        make(checkpoint, EnvSpec(shown, change.get("action_dim", 3)), chunk)


def test_bad_checkpoints(checkpoint, tmp_path):
    folder = tmp_path / "copy"

    def told(said, **settings):
        with pytest.raises(UserError, match=said):
            make(folder, **settings)

    shutil.copytree(checkpoint, folder)
    weights = load_file(folder / "model.safetensors")
    name = "action_out_proj.weight"
    save_file({key: w for key, w in weights.items() if key != name}, folder / "model.safetensors", {"format": "pt"})
    told(f"do not fit its config.json: 1 missing: {name}")
    save_file(weights | {"extra": torch.ones(1)}, folder / "model.safetensors", {"format": "pt"})
    told("1 unexpected: extra")
    save_file(weights | {name: torch.ones(3, 16)}, folder / "model.safetensors", {"format": "pt"})
    told(f"1 of another shape: {name}")
    (folder / "model.safetensors").write_bytes(b"broken")
    told("cannot be loaded as pi0")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    told("cannot be loaded as pi0")
    (folder / "pytorch_model.bin").unlink()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "preprocessor_config.json").write_text('{"size": {"height": 32, "width": 32}}')
    told("its image processor makes images of 32x32, its vision model reads 16x16")
    (folder / "preprocessor_config.json").unlink()
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    told("holds no tokenizer .*policy.tokenizer=bytes reads texts byte by byte")
    assert make(folder, tokenizer="bytes").prompts.ids.shape == (3, 2 * IMAGE_TOKENS + len(INSTRUCTIONS[2]) + 2)
    tiny_pi0.edit_json(folder / "config.json", model_type="llama")
    told("config.json says model_type='llama', expected 'pi0'")
    (folder / "config.json").write_text("{")
    told("cannot be read")
