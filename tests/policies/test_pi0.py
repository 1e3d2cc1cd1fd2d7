"""pi0 through transformers: it acts like transformers and passes the parity gate."""

import numpy as np
import pytest
import tiny_pi0
import torch
from parity_cases import METHODS, gate
from pi0_cases import INSTRUCTIONS, LORA, Cameras, make, rollout, seen, update
from tiny_pi0 import ACTIONS, CHUNK, IMAGE_TOKENS, STATES, STEPS

from sparring.contract import EnvSpec


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_pi0.write(tmp_path_factory.mktemp("pi0"))


# ---- it acts like transformers


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_ode_is_sample_actions_with_the_same_noise(checkpoint, attention):
    """With as many action dims as the checkpoint has; instructions of different lengths."""
    from transformers import AutoTokenizer, PI0ForConditionalGeneration

    spec = EnvSpec(Cameras(1).spec.observation, ACTIONS, instructions=INSTRUCTIONS)
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
    # our prepared images: PIL rounds a few pixels differently, which test_pi0_files.py checks
    expected = theirs.sample_actions(
        state=torch.nn.functional.pad(td["observation", "state"], (0, STATES - 5)),
        input_ids=torch.cat([images, text["input_ids"]], 1),
        pixel_values=torch.stack([policy.prepare(td["observation", "image", name]) for name in ("head", "wrist")], 1),
        noise=torch.special.ndtri(td["start"]).view(5, CHUNK, ACTIONS),
        attention_mask=torch.cat([torch.ones_like(images), text["attention_mask"]], 1),
        pixel_attention_mask=torch.ones(5, 2, dtype=torch.bool),
    )
    assert policy.sampling_steps == STEPS and policy.horizon == CHUNK
    assert (expected.std() > 0.3) and (acted - expected[:, :3]).abs().max() < 1e-5


def test_actions_depend_on_instructions_images_state_and_cameras(checkpoint):
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


# ---- the parity gate


@pytest.mark.parametrize("lora", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("method", METHODS)
def test_the_gate_passes_in_fp32(checkpoint, method, lora):
    settings = METHODS[method] | lora
    policy = make(checkpoint, Cameras(1, padding=2).spec, **settings)
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
    # it did compute in bf16
    assert 1e-4 < apart < 0.2


def test_only_the_envs_action_dims_are_scored(checkpoint):
    policy = make(checkpoint, Cameras(1, padding=2).spec)
    flat = rollout(policy, padding=2).get()
    assert flat["action"].shape[1:] == (3, 5) and (flat["action"][..., 3:] == 0).all()
    assert (flat["trace", "dims"] == 3 * STEPS).all()


def test_the_prefix_is_computed_once_per_decision_and_once_per_row_of_an_update(checkpoint):
    policy = make(checkpoint)
    prefixes, denoised = [], []
    policy.model.model.vlm.register_forward_hook(lambda _, __, kwargs, ___: prefixes.append(1), with_kwargs=True)
    policy.model.model.dit.register_forward_hook(
        lambda _, __, kwargs, out: denoised.append(len(kwargs["inputs_embeds"])), with_kwargs=True
    )
    td = seen(4)
    td["noise"] = torch.rand(4, policy.noise_size)
    policy.act(td)
    assert len(prefixes) == 1 and denoised == [4] * STEPS
    flat = rollout(policy, num_envs=4, decisions=8).get()
    prefixes.clear(), denoised.clear()
    policy.evaluate(flat)
    # all denoising states of all decisions in one pass
    assert len(prefixes) == 1 and denoised == [8 * STEPS]


def test_denoising_does_not_change_the_prefix(checkpoint):
    policy, td = make(checkpoint), seen()
    with torch.no_grad():
        _, prefix = policy.encode(td)
        kept = prefix.clone()
        x, t = torch.randn(5, CHUNK, 3), torch.rand(5)
        assert torch.equal(policy.denoise(x, t, prefix), policy.denoise(x, t, prefix))
    assert all(torch.equal(prefix[key], value) for key, value in kept.items())


# ---- what learns


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


def test_without_lora_all_used_weights_learn_except_frozen_parts(checkpoint):
    policy = make(checkpoint, frozen=["vision_tower", "*.dit.layers.0"])
    changed, _ = update(policy)
    learns = {f"model.{name}" for name, p in policy.model.named_parameters() if p.requires_grad}
    assert {key for key in changed if key.startswith("model.")} == learns
    assert not any("vision_tower" in key or "dit.layers.0" in key for key in changed)
    assert any("dit.layers.1" in key for key in changed)


def test_imitation_lowers_the_loss(checkpoint):
    policy, td = make(checkpoint), seen(16)
    td["action"], td["valid"] = torch.full((16, CHUNK, 3), 0.5), torch.ones(16, CHUNK, dtype=torch.bool)
    optimizer = torch.optim.Adam([p for p in policy.parameters() if p.requires_grad], 3e-3)
    losses = []
    for step in range(30):
        loss, metrics = policy.imitation_loss(td, torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(metrics["flow_matching"].item())
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:3])
