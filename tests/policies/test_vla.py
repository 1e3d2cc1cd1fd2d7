"""VLAPolicy: the parity gate, the documented inputs of its models, and errors that state the fix."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from doubles_native import Instructed, make_native
from doubles_vla import INSTRUCTIONS, RandomCameraEnv, Sized, config
from parity_cases import DIMS, REPLAY, STATE, gate
from safetensors.torch import load_file, save_file
from tensordict import TensorDict

from sparring import load_policy
from sparring.algorithms.configs import PPOConfig
from sparring.algorithms.ppo import PPO
from sparring.algorithms.scoring import ParityError
from sparring.cli.main import main
from sparring.collect.collector import Collector
from sparring.config.schema import load_config
from sparring.data.buffer import RolloutBuffer
from sparring.envs.env import Env
from sparring.errors import UserError
from sparring.policies.configs import ActorCriticConfig, FlowConfig, VLAConfig
from sparring.policies.native.config import NativeVLAConfig
from sparring.policies.policy import make_policy
from sparring.policies.vla.policy import VLAPolicy

ROOT = Path(__file__).parents[2]
MODELS = ["Plain", "TakesDeterministic", "Samples", "StepByStep", "Flows"]


def make(model="Samples", chunk=1, padding=0, **settings):
    torch.manual_seed(0)
    return make_policy(config(model, **settings), RandomCameraEnv(1, padding).spec, chunk)


def rollout(model="Samples", chunk=1, num_envs=8, padding=0, **settings):
    env = Env(RandomCameraEnv(num_envs, padding), "cpu")
    policy = make(model, chunk, padding, **settings)
    buffer = RolloutBuffer(-(-REPLAY // num_envs))
    Collector(env, policy, seed=0, chunk=chunk).collect(buffer)
    return policy, buffer


def make_td(batch=6, seed=0):
    """Observations of one decision."""
    backend = RandomCameraEnv(batch)
    backend.rng = np.random.default_rng(seed)
    observation = TensorDict({}, [batch])
    for name, value in backend._observe().items():
        observation[tuple(name.split("/"))] = torch.from_numpy(value)
    return TensorDict({"observation": observation}, [batch])


def noisy(policy, td, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return td.clone().set("noise", torch.rand(len(td), policy.noise_size, generator=generator).clamp(1e-4, 1 - 1e-4))


@pytest.mark.parametrize("kind", [ActorCriticConfig, FlowConfig, NativeVLAConfig, VLAConfig])
@pytest.mark.parametrize("greedy", [True, False])
def test_actions_of_all_built_in_policies_have_no_autograd_graph(kind, greedy):
    if kind is NativeVLAConfig:
        policy, td = make_native(), Env(Instructed(2)).reset(0)
    else:
        spec = RandomCameraEnv(1).spec
        policy, td = make() if kind is VLAConfig else make_policy(kind(use_images=False), spec, 1), make_td(2)
    policy.train()
    done = policy.act(td if greedy else noisy(policy, td))
    assert not any(value.requires_grad for value in done.values(True, True))
    assert "not clipped" in type(policy).act.__doc__


def error_of(*arguments, **settings):
    with pytest.raises(UserError) as caught:
        make(*arguments, **settings)
    return str(caught.value)


def test_the_error_of_a_model_that_fails_lists_its_observations():
    torch.manual_seed(0)
    env = Env(RandomCameraEnv(2), "cpu")
    policy = make_policy(config(observation_keys={"rgb": None}), env.spec, 1)
    with pytest.raises(UserError) as caught:
        Collector(env, policy, 0).decide()
    error = str(caught.value)
    assert error.startswith("Samples failed with the observations ") and f"proprio [2, {STATE}]" in error
    assert "vla_cases.py, line " in error and "policy.observation_keys" in error


# ---- the parity gate


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("chunk", "padding", "num_envs"), [(1, 0, 1), (4, 2, 8)])
def test_every_kind_of_model_passes_the_gate(model, chunk, padding, num_envs):
    # also one robot: 8 rows are often bit-identical to 256 rows, one row is not
    policy, buffer = rollout(model, chunk, num_envs, padding)
    gate(policy, buffer).check(1e-4)
    actions = buffer.get()["action"]
    assert actions.shape[1:] == (chunk, DIMS + padding) and (actions[..., DIMS:] == 0).all()


@pytest.mark.parametrize("model", MODELS)
def test_the_gate_passes_in_bf16_with_frozen_weights_in_bf16(model):
    frozen = {"frozen": ("trunk" if model == "Flows" else "vision",), "dtype": "bf16"}
    policy, buffer = rollout(model, num_envs=1, precision="bf16", **frozen)
    dtypes = {p.requires_grad: p.dtype for p in policy.model.parameters()}
    assert dtypes == {False: torch.bfloat16, True: torch.float32}
    gate(policy, buffer).check(0.05)


def test_a_model_whose_scores_do_not_match_its_draws_is_refused():
    with pytest.raises(ParityError):
        gate(*rollout("SamplesWider")).check(1e-4)
    with pytest.raises(ParityError):
        gate(*rollout("DropsOut")).check(1e-4)


@pytest.mark.parametrize("model", ["Plain", "Samples", "StepByStep"])
def test_the_gate_detects_a_small_change_of_weights(model):
    policy, buffer = rollout(model, 4)
    gate(policy, buffer).check(1e-4)
    with torch.no_grad():
        policy.model.mean.bias += 1e-3
    with pytest.raises(ParityError, match="drift"):
        gate(policy, buffer).check(1e-4)


def test_normalised_actions_and_states_pass_the_gate():
    torch.manual_seed(0)
    env = Env(RandomCameraEnv(8), "cpu")
    policy = make_policy(config(normalize_actions=True, normalize_observations=True), env.spec, 4)
    statistics = {"action": {"mean": np.full(DIMS, 0.3), "std": np.full(DIMS, 2.0)}}
    statistics["observation/state"] = {"mean": np.ones(STATE), "std": np.full(STATE, 3.0)}
    policy.fit_normalizers(statistics, "mean_std", "mean_std")
    td = make_td()
    assert torch.allclose(policy.observations(td)["proprio"], (td["observation", "state"] - 1) / 3)
    own = policy.model(policy.observations(td)).view(6, 4, DIMS)
    assert torch.allclose(policy.act(td)["action"], own * 2 + 0.3, atol=1e-6)
    buffer = RolloutBuffer(32)
    Collector(env, policy, seed=0, chunk=4).collect(buffer)
    gate(policy, buffer).check(1e-4)


def test_log_probs_are_those_of_torch_and_only_executed_steps_count():
    policy, buffer = rollout("StepByStep", 4)
    flat = buffer.get()
    with torch.no_grad():
        distribution = policy.model.distribution(policy.observations(flat))
        terms = distribution.log_prob(flat["action"].flatten(1)).view(-1, 4, DIMS).sum(-1)
    executed = flat["next", "executed"]
    assert set(executed.tolist()) == {3, 4}
    expected = torch.stack([row[:n].sum() for row, n in zip(terms, executed, strict=True)])
    assert torch.allclose(flat["log_prob"].float(), expected, atol=1e-4)
    whole, buffer = rollout("Samples", 4)
    flat = buffer.get()
    with torch.no_grad():
        log_prob, _ = whole.model.evaluate_actions(whole.observations(flat), flat["action"].flatten(1))
    assert torch.allclose(flat["log_prob"].float(), log_prob, atol=1e-4)
    assert (flat["trace", "dims"] == torch.tensor([4.0 * DIMS, 0, 0, 0])).all()


# ---- drawing


@pytest.mark.parametrize("model", ["Plain", "TakesDeterministic", "Samples"])
def test_an_action_depends_on_its_own_noise_alone(model):
    policy, td = make(model), make_td()
    together = policy.act(noisy(policy, td))["action"]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    again = policy.act(noisy(policy, td))["action"]
    assert torch.equal(together, again) and torch.equal(torch.get_rng_state(), before)
    some = policy.act(noisy(policy, td)[2:4])["action"]
    assert torch.allclose(together[2:4], some, atol=1e-6)
    others = policy.act(noisy(policy, td, seed=1))["action"]
    assert ((together - others).abs() > 1e-3).all(-1).all()


def test_draws_by_batch_are_repeatable_for_the_same_batch_only():
    policy, td = make("Plain", draws="batch"), make_td()
    together = policy.act(noisy(policy, td))["action"]
    assert torch.equal(together, policy.act(noisy(policy, td))["action"])
    assert not torch.allclose(together[2:4], policy.act(noisy(policy, td)[2:4])["action"], atol=1e-3)


def test_draws_have_the_models_spread():
    policy = make("Plain")
    td = make_td(1).expand(500).contiguous()
    actions = policy.act(noisy(policy, td))["action"][:, 0]
    assert torch.allclose(actions.std(0), torch.full((DIMS,), np.exp(-0.5)), rtol=0.1)


@pytest.mark.parametrize("model", ["TakesDeterministic", "Samples"])
def test_greedy_is_the_mode(model):
    policy, td = make(model), make_td()
    expected = policy.model.distribution(policy.observations(td)).mean
    assert torch.equal(policy.act(td)["action"][:, 0], expected)


def test_greedy_actions_of_a_model_that_always_draws_are_repeatable():
    policy, td = make("Plain"), make_td()
    assert torch.equal(policy.act(td.clone())["action"], policy.act(td.clone())["action"])


def test_a_model_that_never_draws_is_refused():
    policy = make("AlwaysMean")
    policy.act(make_td())
    with pytest.raises(UserError, match="AlwaysMean.forward .*same action.*add sample"):
        policy.act(noisy(policy, make_td()))


# ---- inputs of a model


def test_a_model_receives_the_documented_keys():
    td = make_td()
    inputs = make(chunk=1).observations(td)
    assert set(inputs.keys()) == {"rgb", "depth", "proprio", "language", "language_mask"}
    assert inputs["rgb"].shape == (6, 2, 3, 8, 8) and inputs["rgb"].dtype == torch.float32
    assert torch.equal(inputs["rgb"][:, 1], td["observation", "image", "wrist"].float() / 255)
    assert inputs["depth"].shape == (6, 1, 8, 8) and torch.equal(inputs["proprio"], td["observation", "state"])
    for row, mask, task in zip(inputs["language"], inputs["language_mask"], td["observation", "task"], strict=True):
        text = INSTRUCTIONS[int(task)].encode()
        assert bytes(row.tolist()) == text.ljust(7, b"\0") and mask.sum() == len(text)


def test_custom_observation_keys():
    keys = {"rgb": ["image/wrist", "image/head"], "eyes": "image/head", "depth": None, "words": "task"}
    policy = make(observation_keys=keys, images="uint8", max_tokens=9)
    td = make_td()
    inputs = policy.observations(td)
    assert set(inputs.keys()) == {"rgb", "eyes", "proprio", "language", "language_mask", "words", "words_mask"}
    assert torch.equal(inputs["rgb"][:, 0], td["observation", "image", "wrist"]) and inputs["eyes"].dtype == torch.uint8
    assert inputs["language"].shape == (6, 9)
    assert ("observation", "depth", "head") not in policy.in_keys and len(policy.in_keys) == 4


def test_instructions_as_text():
    td = make_td()
    inputs = make(tokenizer="text").observations(td)
    assert list(inputs["language"]) == [INSTRUCTIONS[i] for i in td["observation", "task"].tolist()]
    assert list(inputs[1:3]["language"]) == list(inputs["language"])[1:3]


def test_custom_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    vocabulary = {"[UNK]": 0, "push": 1, "lift": 2, "it": 3}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    policy = make(tokenizer=str(tmp_path))
    assert policy.observations.instructions.ids.tolist() == [[1, 0], [2, 3]]
    assert policy.observations.instructions.mask.tolist() == [[True, False], [True, True]]


def test_a_checkpoint_for_another_number_of_actions_is_refused(tmp_path):
    save_file(Sized(action_dim=5).state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"action_dim": 5}')
    assert error_of("Sized", model_path=str(tmp_path)).startswith("Sized.action_dim=5, but a decision takes 3 numbers")


def test_constructors_receive_the_dims_of_the_env():
    assert make(chunk=3).model.mean.out_features == 3 * DIMS
    assert make("WholeConfig", model_settings={"action_dim": DIMS}).model.mean.out_features == DIMS


# ---- learning


@pytest.mark.parametrize("model", ["Samples", "Flows"])
def test_an_update_changes_what_is_not_frozen(model):
    frozen = "trunk" if model == "Flows" else "vision"
    policy, buffer = rollout(model, frozen=(frozen,))
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    metrics = PPO(PPOConfig(mini_batch_size=64, ppo_epochs=1), policy).update(buffer.rollout())
    assert metrics["parity"] <= 1e-4
    changed = {name for name, p in policy.named_parameters() if not torch.equal(p, before[name])}
    still = set(before) - changed
    assert still == {name for name in before if name.startswith(f"model.{frozen}.")}


def test_critic_warmup_changes_the_critic_parts_alone():
    policy, buffer = rollout()
    assert policy.critic_parameters() == list(policy.model.value_head.parameters())
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    PPO(PPOConfig(mini_batch_size=256, ppo_epochs=1, critic_warmup_updates=1), policy).update(buffer.rollout())
    changed = {name for name, p in policy.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"model.value_head.weight", "model.value_head.bias"}


def test_frozen_parts_stay_in_eval_mode_during_training():
    policy = make(frozen=("vision",)).train()
    assert not policy.model.vision.training and policy.model.joints.training


def test_only_adapters_and_the_value_head_learn_with_lora():
    pytest.importorskip("peft")
    policy, buffer = rollout(lora_r=2, lora_targets=("mean", "joints", "vision.1"), frozen=("vision",), dtype="bf16",
                             precision="bf16")  # fmt: skip
    gate(policy, buffer).check(0.05)
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    PPO(PPOConfig(mini_batch_size=64, ppo_epochs=2, parity_tolerance=0.05), policy).update(buffer.rollout())
    changed = {name for name, p in policy.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {n for n in before if ("lora_" in n and "vision" not in n) or "value_head" in n}
    assert len(changed) == 6
    # new adapters add nothing: only now do they have an effect
    buffer = RolloutBuffer(32)
    Collector(Env(RandomCameraEnv(8), "cpu"), policy, seed=1).collect(buffer)
    assert policy.model.mean.lora_B["default"].weight.abs().max() > 0
    gate(policy, buffer).check(0.05)


def test_with_lora_parts_have_the_names_of_the_model_itself():
    pytest.importorskip("peft")
    policy = make(lora_r=2, frozen=("vision.1.weight",), critic_parts=("value_head.weight", "value_head.bias"),
                  modules_to_save=("log_std",))  # fmt: skip
    learning = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    adapters = {f"{layer}.lora_{side}.default.weight" for layer in ("joints", "mean") for side in "AB"}
    assert learning == adapters | {"log_std", "value_head.weight", "value_head.bias"}
    assert policy.critic_parameters() == list(policy.model.value_head.parameters())
    # an adapter changes the name of the weight that it is added to
    policy = make(lora_r=2, critic_parts=("value_head.bias",))
    assert policy.critic_names == ["value_head.base_layer.bias"]
    assert error_of(lora_r=2, critic_parts=("vale_head",)).startswith(
        "policy.critic_parts: 'vale_head' matches no part"
    )


@pytest.mark.parametrize("model", ["Samples", "StepByStep", "Flows"])
def test_imitation_learns_the_demonstrated_action(model):
    policy, td = make(model, chunk=2), make_td(32)
    generator = torch.Generator().manual_seed(0)
    td["action"] = torch.full((32, 2, DIMS), 0.4)
    td["valid"] = torch.ones(32, 2, dtype=torch.bool)
    td["valid"][:4, 1] = False
    td["action"][:4, 1] = 50.0
    optimizer = torch.optim.Adam(policy.model.parameters(), 0.02)
    for _ in range(150):
        loss, _ = policy.imitation_loss(td, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    error = (policy.act(td.select("observation"))["action"] - 0.4).abs().mean()
    assert error < (0.2 if model == "Flows" else 0.05)


# ---- errors


def test_wrong_class_paths():
    assert error_of(model_class=None).startswith("policy.model_class is not set")
    assert error_of(model_class="Samples") == (
        "policy.model_class 'Samples' is not an import path; expected package.module:Class"
    )
    assert error_of(model_class="doubles_vl:Samples") == (
        "policy.model_class 'doubles_vl:Samples': no module 'doubles_vl'; is it in this folder or on PYTHONPATH? "
        "(nearest: doubles_vla)"
    )
    assert error_of(model_class="sparring.policies.flw.FlowPolicy").endswith("(nearest: sparring.policies.flow)")
    assert error_of(model_class="doubles_vla.Sample") == (
        "policy.model_class 'doubles_vla:Sample': module 'doubles_vla' has no 'Sample'; nearest: Samples"
    )
    assert "policy.model_class 'doubles_vla:config' is a function" in error_of(model_class="doubles_vla:config")


def test_classes_without_the_interface():
    assert "is not a torch.nn.Module; expected class NotAModule(nn.Module)" in error_of("NotAModule")
    text = error_of("Valueless")
    assert "add get_value(observations) -> [B, 1], evaluate_actions(observations, actions) -> (log_prob [B]" in text
    assert "forward(" not in text
    text = error_of("HalfAFlow")
    assert "forward(observations) -> [B, action_dim], get_value" in text and "the missing denoise(x, t, prefix)" in text


def test_action_dims_that_do_not_match():
    assert error_of(action_dim=7, chunk=2).startswith(
        "policy.action_dim=7, but a decision takes 6 numbers: 2 steps (rollout.action_steps) of the env's 3 action "
    )
    assert error_of(action_dim=7, chunk=2).endswith("policy.model_config.action_dim=6")
    assert error_of(action_dim=9, chunk=2).endswith(", or set rollout.action_steps=3")
    with pytest.raises(UserError, match=r"OddActions: shape of the actions=\[6, 6\], but a decision takes 3"):
        make("OddActions").act(make_td())
    with pytest.raises(UserError, match="'doubles_vla:Flows' has a flow head; .*make_policy"):
        VLAPolicy(config("Flows"), RandomCameraEnv(1).spec, 1)
    error = error_of("Flows", model_settings={"action_dim": 5})
    assert "Flows.denoise fails for chunks [1, 1, 3]" in error and "1 steps" in error


def test_scores_of_odd_shapes():
    policy = make("OddValue")
    with pytest.raises(UserError, match=r"OddValue: get_value has shape \[6, 2\], expected \[6, 1\]"):
        policy.value(make_td())
    policy = make("OddScore")
    td = policy.observations(make_td())
    with pytest.raises(UserError, match="OddScore.evaluate_actions returned a Tensor; expected two tensors"):
        policy._evaluate(td, torch.zeros(6, 1, DIMS))


def test_constructors_that_cannot_be_called():
    error = error_of(model_settings={"widht": 3})
    assert error.endswith("does not take policy.model_config.widht; nearest: width")
    assert error_of("Flows", model_settings={"zzz": 3}).endswith("it takes action_dim, steps, width")
    assert "doubles_vla:RaisesInInit': the constructor failed: ValueError: no" in error_of("RaisesInInit")


def test_a_constructor_may_take_a_config_and_single_settings():
    model = make("ConfigAndMore", model_settings={"width": 24}).model
    assert (model.mean.in_features, model.mean.out_features) == (24, DIMS)


def test_missing_observations_are_refused():
    error = error_of(observation_keys={"rgb": "image/haed"})
    assert "policy.observation_keys.rgb: " in error and error.endswith("'image/haed'; nearest: image/head")
    assert "[3, 8, 8] and [5] cannot be stacked" in error_of(observation_keys={"rgb": ["image/head", "state"]})
    nothing = dict.fromkeys(("rgb", "depth", "proprio", "language"))
    assert "policy.observation_keys leaves the model no observation" in error_of(observation_keys=nothing)


def test_missing_tokenizers(tmp_path):
    error = error_of(tokenizer=str(tmp_path))
    assert f"'{tmp_path}' has no tokenizer" in error and error.endswith("policy.tokenizer=bytes")
    assert "policy.tokenizer=checkpoint needs policy.model_path" in error_of(tokenizer="checkpoint")
    assert error_of(max_tokens=4).startswith("policy.max_tokens=4, but an instruction has 7 tokens; ")


def test_settings_without_an_effect_are_refused():
    assert "policy.sampling_steps=8: only models with encode and denoise read it" in error_of(sampling_steps=8)
    assert "policy.draws=batch: only models without encode" in error_of("Flows", draws="batch")
    assert "set policy.precision=bf16 too" in error_of(dtype="bf16")
    assert "has no effect without LoRA" in error_of(modules_to_save=("value_head",))
    assert "policy.critic_parts: 'vale_head' matches no part of the model; nearest: value_head" in error_of(
        critic_parts=("vale_head",)
    )


# ---- configs and the example


def test_the_documented_config_keys_are_accepted():
    inner = {"vision_encoder": "resnet50", "language_model": "gpt2-medium", "freeze_vision_encoder": False}
    vla = {"model_path": "checkpoints/x.pth", "model_class": "vla_models.GPTVLAModel", "model_config": inner}
    policy = load_config({"policy": {"name": "vla", "action_dim": 7, "vla_config": vla}}).policy
    assert policy.model_settings == inner and policy.action_dim == 7
    assert (policy.model_path, policy.model_class) == ("checkpoints/x.pth", "vla_models.GPTVLAModel")
    assert load_config({"policy": {"name": "vla", "model_config": {"a": {"b": 1}}}}).policy.model_settings == {
        "a": {"b": 1}
    }
    with pytest.raises(UserError, match="policy.vla_config.model_pth .*nearest: policy.model_path"):
        load_config({"policy": {"name": "vla", "vla_config": {"model_pth": "x"}}})
    for wrong in (3, [None], ["image/head", None], []):
        with pytest.raises(UserError, match="expected names of observations"):
            load_config({"policy": {"name": "vla", "observation_keys": {"rgb": wrong}}})
    assert load_config({"policy": {"name": "vla", "observation_keys": {"rgb": None}}}).policy.observation_keys


def test_the_example_trains_and_loads(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    subprocess.run([sys.executable, "examples/gpt_vla.py", "outputs/gpt_vla"], check=True)
    assert json.loads((tmp_path / "outputs/gpt_vla/config.json").read_text())["action_dim"] == 7
    argv = ["train", "finetune", "--config", "configs/vla_example.json", "--output", "run", "training.iterations=1"]
    argv += ["rollout.n_envs=2", "rollout.steps=8", "ppo.ppo_epochs=1", "ppo.mini_batch_size=8", "env.threads=1"]
    argv += ["evaluation.episodes=1", "evaluation.baseline=false", "rollout.render_episodes=0", "threads=1"]
    assert main([*argv, "policy.frozen=[vision]"]) == 0, capsys.readouterr().err
    before, after = load_file("outputs/gpt_vla/model.safetensors"), load_policy("run").model.state_dict()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if name.startswith("vision.")}
