"""The native VLA as a policy: parity, imitation, checkpoints and errors."""

import json

import pytest
import torch
from doubles_native import SMALL, Instructed, make_native, rollout_of_native
from parity_cases import DIMS, METHODS, STATE, RandomEnv, gate
from tensordict import TensorDict

from sparring.algorithms.configs import PPOConfig
from sparring.algorithms.ppo import PPO
from sparring.collect.collector import Collector
from sparring.config.schema import load_config
from sparring.contract import EnvSpec
from sparring.data.buffer import RolloutBuffer
from sparring.envs.env import Env
from sparring.errors import UserError
from sparring.policies.native.checkpoint import save_model
from sparring.policies.native.config import NativeVLAConfig
from sparring.policies.native.policy import NativeVLA
from sparring.policies.policy import make_policy

# ---- the parity gate


# setting the flags below makes torch warn of missing GPUs
pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration")


@pytest.fixture(autouse=True)
def plain_bf16(request):
    """Disable oneDNN's bf16 kernels: their rounding differs between CPUs and between batch sizes."""
    with torch.backends.mkldnn.flags(enabled="bf16" not in request.node.name):
        yield


@pytest.mark.parametrize("method", METHODS)
def test_every_method_passes_the_gate(method):
    policy, buffer = rollout_of_native(padding=2, horizon=5, **METHODS[method])
    gate(policy, buffer).check(1e-4)


@pytest.mark.parametrize("num_envs", [1, 16])
def test_the_gate_passes_with_one_robot_and_with_many(num_envs):
    gate(*rollout_of_native(num_envs)).check(1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_in_bf16_the_drift_is_within_the_documented_tolerance(method):
    policy, buffer = rollout_of_native(precision="bf16", **METHODS[method])
    gate(policy, buffer).check(0.05)
    flat = buffer.get()
    scored = policy.evaluate(flat)
    assert scored["trace", "mean"].dtype == torch.float32 and scored["log_prob"].dtype == torch.float64
    exact = make_native(**METHODS[method]).evaluate(flat)
    assert 1e-4 < (scored["trace", "mean"] - exact["trace", "mean"]).abs().max() < 0.1
    assert policy.encode(flat[:2])[1]["keys"].dtype == torch.bfloat16


def test_an_update_changes_all_but_frozen_weights():
    policy, buffer = rollout_of_native(frozen=("vision.*", "words.weight"))
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    PPO(PPOConfig(mini_batch_size=64, ppo_epochs=1), policy).update(buffer.rollout())
    after = policy.state_dict()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert not any(name.startswith(("model.vision.", "model.words.")) for name in changed)
    learned = ("model.trunk.0.qkv", "model.expert.1.down", "model.state_in", "model.action_out", "critic.output")
    assert all(f"{name}.weight" in changed for name in learned)


@pytest.mark.parametrize("method", ["flow_sde", "flow_noise"])
@pytest.mark.parametrize("backend", [Instructed, RandomEnv])
def test_every_trainable_weight_has_a_gradient(method, backend):
    """Weight decay alone would change a weight without a gradient in imitation."""
    env = Env(backend(2))
    policy, buffer = make_native(env.spec, method=method, memory_size=3), RolloutBuffer(4)
    Collector(env, policy, seed=0, chunk=4).collect(buffer)
    scored = policy.evaluate(buffer.get())
    (scored["log_prob"].sum() + scored["value"].sum()).backward()
    for name, weight in policy.named_parameters():
        assert (weight.grad is not None) == weight.requires_grad, name
    last_layer_learns = policy.model.trunk[-1].down.weight.requires_grad
    assert last_layer_learns == (method == "flow_noise") and policy.model.trunk[-1].qkv.weight.requires_grad


def test_with_bf16_precision_frozen_weights_are_bf16():
    policy = make_native(precision="bf16", frozen=("trunk.*",))
    types = {name: weight.dtype for name, weight in policy.model.named_parameters()}
    assert types["trunk.0.qkv.weight"] == torch.bfloat16 and types["expert.0.qkv.weight"] == torch.float32
    assert all(weight.dtype == torch.float32 for weight in policy.critic.parameters())


def test_the_critic_does_not_shape_the_network():
    policy, buffer = rollout_of_native(num_envs=2)
    flat = buffer.get()[:8]
    torch.testing.assert_close(policy.evaluate(flat)["value"], policy.value(flat))
    for value in (policy.evaluate(flat)["value"], policy.value(flat)):
        policy.zero_grad()
        value.square().sum().backward()
        assert all(weight.grad is None for weight in policy.model.parameters())
        assert policy.critic.output.weight.grad.abs().max() > 0


# ---- inputs


def test_actions_depend_on_every_input():
    policy = make_native()
    observed = Env(Instructed(3)).reset(0).select("observation")
    action = policy.act(observed.clone())["action"]
    for key, other in (
        (("observation", "image", "head"), lambda x: 255 - x),
        (("observation", "image", "wrist"), lambda x: 255 - x),
        (("observation", "state"), lambda x: x + 1),
        (("observation", "task"), lambda x: (x + 1) % 3),
    ):
        changed = observed.clone()
        changed[key] = other(changed[key])
        assert (policy.act(changed)["action"] - action).abs().amax((1, 2)).min() > 1e-4, key


def test_an_env_may_have_a_state_only_or_an_image_only():
    policy = make_native(RandomEnv(1).spec)
    observed = Env(RandomEnv(4)).reset(0).select("observation")
    assert policy.act(observed)["action"].shape == (4, 4, DIMS)
    # <begin> and the state
    assert policy.encode(observed)[1]["mask"].sum(1).tolist() == [2] * 4
    camera = EnvSpec({"image/head": ((3, 32, 32), "uint8")}, DIMS)
    policy = NativeVLA(NativeVLAConfig(**SMALL), camera, 1)
    td = TensorDict({"observation": {"image": {"head": torch.zeros(2, 3, 32, 32, dtype=torch.uint8)}}}, [2])
    assert policy.act(td)["action"].shape == (2, 1, DIMS)


def test_images_are_resized_and_scaled():
    encoder = make_native().encoder
    images = torch.zeros(1, 3, 36, 36, dtype=torch.uint8)
    images[:, :, :18] = 255
    scaled = encoder._scaled(images)
    assert scaled.shape == (1, 3, 32, 32)
    assert (scaled[:, :, :15] - 1).abs().max() < 1e-6 and (scaled[:, :, 17:] + 1).abs().max() < 1e-6
    same = torch.arange(32 * 32 * 3).remainder(256).to(torch.uint8).view(1, 3, 32, 32)
    torch.testing.assert_close(encoder._scaled(same), same.float() / 127.5 - 1)


def test_a_memory_adds_a_token_to_the_prefix():
    policy = make_native(memory_size=5)
    observed = Env(Instructed(3)).reset(0).select("observation")
    without = policy.act(observed.clone())["action"]
    # [B, 5]
    memory = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    with_memory = observed.clone().set(("memory", "policy"), memory)
    _, prefix = policy.encode(with_memory)
    # 2 cameras of 4 patches, <begin> and 13 bytes, the state, the memory
    assert prefix["mask"].sum(1).tolist() == [8 + 14 + 2, 8 + 8 + 2, 8 + 1 + 2]
    action = policy.act(with_memory.clone())["action"]
    other = policy.act(with_memory.clone().set(("memory", "policy"), memory + 1))["action"]
    assert (action - without).abs().max() > 1e-4 and (action - other).abs().max() > 1e-4
    assert ("memory", "policy") in policy.in_keys and ("memory", "policy") not in make_native().in_keys


# ---- imitation


def test_imitation_overfits_two_samples():
    """Two instructions with the same images and state: the words alone determine the action."""
    spec = Instructed(2).spec
    torch.manual_seed(0)
    policy = NativeVLA(NativeVLAConfig(**SMALL, normalize_actions=False, sampling_steps=10), spec, 2)
    observed = Env(Instructed(2)).reset(0).select("observation")
    for name in (("image", "head"), ("image", "wrist"), ("state",)):
        observed["observation", *name][1] = observed["observation", *name][0]
    action = torch.tensor([[[0.5, -0.5, 0.2]] * 2, [[-0.5, 0.5, 0.4]] * 2])
    batch = observed.clone().update({"action": action, "valid": torch.ones(2, 2, dtype=torch.bool)})
    # several noises for each sample
    many = batch.repeat_interleave(8, 0)
    optimizer, generator = torch.optim.Adam(policy.parameters(), 3e-3), torch.Generator().manual_seed(0)
    for _ in range(150):
        loss, _ = policy.imitation_loss(many, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (policy.act(observed.clone())["action"] - action).abs().max() < 0.1
    swapped = observed.clone()
    swapped["observation", "task"] = swapped["observation", "task"].flip(0)
    assert (policy.act(swapped)["action"] - action.flip(0)).abs().max() < 0.1


# ---- checkpoints


def test_a_loaded_policy_acts_like_the_saved_one(tmp_path):
    policy = make_native()
    save_model(policy.model, tmp_path)
    torch.manual_seed(1)
    loaded = NativeVLA(NativeVLAConfig(model_path=str(tmp_path)), Instructed(1).spec, 4).eval()
    loaded.actions.load_state_dict(policy.actions.state_dict())
    loaded.encoder.load_state_dict(policy.encoder.state_dict())
    observed = Env(Instructed(3)).reset(0).select("observation")
    assert torch.equal(policy.act(observed.clone())["action"], loaded.act(observed.clone())["action"])


def test_a_memory_can_be_added_to_a_checkpoint_but_not_removed(tmp_path):
    save_model(make_native().model, tmp_path)
    policy = NativeVLA(NativeVLAConfig(model_path=str(tmp_path), memory_size=3), Instructed(1).spec, 4)
    assert policy.model.memory_in.in_features == 3
    save_model(policy.model, tmp_path)
    with pytest.raises(UserError, match="memory_size=0, but .* need memory_size=3"):
        NativeVLA(NativeVLAConfig(model_path=str(tmp_path)), Instructed(1).spec, 4)


def test_the_policy_is_chosen_by_name():
    config = load_config({"policy": {"name": "native_vla", "layers": 1}})
    policy = make_policy(config.policy, Instructed(1).spec, 4)
    assert isinstance(policy, NativeVLA) and len(policy.model.trunk) == 1


# ---- errors


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"frozen": ("eyes.*",)}, r"policy.frozen: 'eyes.\*' matches no part of the model; it has vision, "),
        ({"lora_targets": ("vision",)}, "policy.lora_targets=.* has no effect without LoRA; set policy.lora_r"),
        ({"vision_heads": 3}, "vision_width=32 cannot be split into policy.vision_heads=3"),
        ({"patch_size": 10}, "image_size=32 cannot be split into policy.patch_size=10"),
        ({"kv_heads": 3}, "heads=4 cannot be split into policy.kv_heads=3"),
        ({"max_state_dim": STATE - 1}, "state has 5 .*max_state_dim=4; set policy.max_state_dim=5"),
        ({"max_action_dim": DIMS - 1}, "actions have 3 .*max_action_dim=2; set policy.max_action_dim=3"),
        ({"text_tokens": 5}, "'lift the cube'... has 14 tokens, but policy.text_tokens=5"),
        ({"vocabulary": 100}, "token 256 .* 100 embeddings; set policy.vocabulary=258"),
        ({"model_path": "/nowhere"}, r"model_path=/nowhere: neither native_vla.json .* \(no such folder\)"),
        ({"tokenizer": "/nowhere"}, r"tokenizer=/nowhere: /nowhere/tokenizer.json .*or to bytes"),
        ({"horizon": 2}, "horizon=2 is shorter"),
    ],
)
def test_invalid_settings_are_refused(wrong, message):
    with pytest.raises(UserError, match=message):
        NativeVLA(NativeVLAConfig(**SMALL | wrong), Instructed(1).spec, 4)


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path):
    save_model(make_native().model, tmp_path)

    def load(**config):
        return NativeVLA(NativeVLAConfig(model_path=str(tmp_path), **config), Instructed(1).spec, 4)

    with pytest.raises(UserError, match=r"policy.width=96 \(saved: 48\).*policy.model_path="):
        load(width=96)
    wide = EnvSpec({"state": ((9,), "float32")}, DIMS)
    with pytest.raises(UserError, match="max_state_dim=6; .*policy.model_path="):
        NativeVLA(NativeVLAConfig(model_path=str(tmp_path)), wide, 4)
    sizes = json.loads((tmp_path / "native_vla.json").read_text())
    (tmp_path / "native_vla.json").write_text(json.dumps(sizes | {"layers": 3}))
    with pytest.raises(UserError, match=r"do not fit .*\d+ missing: trunk.2.attention_norm.weight"):
        load()
    (tmp_path / "native_vla.json").write_text(json.dumps(sizes | {"mlp": 63}))
    with pytest.raises(UserError, match=r"of another shape: .*trunk.0.down.weight \[48, 64\] instead of \[48, 63\]"):
        load()
    (tmp_path / "native_vla.json").write_text("{")
    with pytest.raises(UserError, match="no valid checkpoint of a native VLA"):
        load()
    (tmp_path / "native_vla.json").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="holds a model of type 'llama', expected 'pi0'"):
        load()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch_size": 0}, "policy.patch_size=0: expected a whole number above 0"),
        ({"width": "a"}, "policy.width='a': expected a whole number above 0"),
        ({"head_dim": 15}, "policy.head_dim=15: expected an even number"),
        ({"depth": 3}, "unexpected keyword argument 'depth'"),
        ([], "holds a list, expected names mapped to values"),
    ],
)
def test_invalid_sizes_in_a_checkpoint_are_reported_with_its_folder(tmp_path, change, message):
    save_model(make_native().model, tmp_path)
    file = tmp_path / "native_vla.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change if change else change))
    with pytest.raises(UserError, match=f"{tmp_path} holds no valid checkpoint of a native VLA: .*{message}"):
        NativeVLA(NativeVLAConfig(model_path=str(tmp_path)), Instructed(1).spec, 4)


def test_damaged_files_are_refused(tmp_path):
    pytest.importorskip("tokenizers")
    save_model(make_native().model, tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(UserError, match="tokenizer.json' cannot be read as a tokenizer"):
        NativeVLA(NativeVLAConfig(model_path=str(tmp_path)), Instructed(1).spec, 4)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="no valid checkpoint of a native VLA"):
        NativeVLA(NativeVLAConfig(model_path=str(tmp_path)), Instructed(1).spec, 4)


# ---- adapters


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 0.05)])
def test_with_adapters_only_they_and_the_critic_learn(precision, tolerance):
    pytest.importorskip("peft")
    policy, buffer = rollout_of_native(lora_r=2, precision=precision)
    gate(policy, buffer).check(tolerance)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    PPO(PPOConfig(mini_batch_size=64, ppo_epochs=1, parity_tolerance=tolerance), policy).update(buffer.rollout())
    changed = {name for name, value in policy.state_dict().items() if not torch.equal(value, before[name])}
    learned = {name for name in changed if name.startswith("model.")}
    assert learned and all("lora_" in name for name in learned) and "critic.output.weight" in changed
    adapted = {name.partition(".")[0] for name, _ in policy.model.named_parameters() if "lora_" in name}
    assert {"vision", "trunk", "expert", "projector", "action_out"} <= adapted
    if precision == "bf16":
        types = {"lora_" in name: weight.dtype for name, weight in policy.model.named_parameters()}
        assert types == {True: torch.float32, False: torch.bfloat16}


def test_frozen_parts_have_no_adapters():
    pytest.importorskip("peft")
    policy = make_native(lora_r=2, frozen=("vision", "projector.weight", "memory_in"), memory_size=3,
                         modules_to_save=("memory_in", "state_in"))  # fmt: skip
    learning = {name.partition(".")[0] for name, weight in policy.model.named_parameters() if weight.requires_grad}
    assert "state_in" in learning and "trunk" in learning
    assert learning.isdisjoint({"vision", "projector", "memory_in"})
