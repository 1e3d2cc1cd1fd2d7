"""VLAPolicy: what it scores is what it did, its models are told what is documented, and its errors say what to do."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from doubles_native import Instructed, make_native
from doubles_vla import INSTRUCTIONS, Seeing, Sized, config
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
MODELS = ["Plain", "Told", "Samples", "StepByStep", "Flows"]


def made(model="Samples", chunk=1, padding=0, **settings):
    torch.manual_seed(0)
    return make_policy(config(model, **settings), Seeing(1, padding).spec, chunk)


def rollout(model="Samples", chunk=1, num_envs=8, padding=0, **settings):
    env = Env(Seeing(num_envs, padding), "cpu")
    policy = made(model, chunk, padding, **settings)
    buffer = RolloutBuffer(-(-REPLAY // num_envs))
    Collector(env, policy, seed=0, chunk=chunk).collect(buffer)
    return policy, buffer


def seen(batch=6, seed=0):
    """A decision, as an env would show it."""
    backend = Seeing(batch)
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
        spec = Seeing(1).spec
        policy, td = made() if kind is VLAConfig else make_policy(kind(use_images=False), spec, 1), seen(2)
    policy.train()
    done = policy.act(td if greedy else noisy(policy, td))
    assert not any(value.requires_grad for value in done.values(True, True))
    assert "not clipped" in type(policy).act.__doc__


def sentence(*arguments, **settings):
    with pytest.raises(UserError) as caught:
        made(*arguments, **settings)
    return str(caught.value)


def test_a_model_that_is_not_made_for_what_it_is_shown_says_what_that_was():
    torch.manual_seed(0)
    env = Env(Seeing(2), "cpu")
    policy = make_policy(config(observation_keys={"rgb": None}), env.spec, 1)
    with pytest.raises(UserError) as caught:
        Collector(env, policy, 0).decide()
    told = str(caught.value)
    assert told.startswith("Samples failed with the observations ") and f"proprio [2, {STATE}]" in told
    assert "vla_cases.py, line " in told and "policy.observation_keys" in told


# ---- the parity gate


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("chunk", "padding", "num_envs"), [(1, 0, 1), (4, 2, 8)])
def test_every_kind_of_model_passes_the_gate(model, chunk, padding, num_envs):
    # one robot: 8 rows are often computed bit for bit as 256 are, and one row is not
    policy, buffer = rollout(model, chunk, num_envs, padding)
    gate(policy, buffer).check(1e-4)
    actions = buffer.get()["action"]
    assert actions.shape[1:] == (chunk, DIMS + padding) and (actions[..., DIMS:] == 0).all()


@pytest.mark.parametrize("model", MODELS)
def test_in_bf16_too_with_frozen_weights_in_bf16(model):
    frozen = {"frozen": ("trunk" if model == "Flows" else "vision",), "dtype": "bf16"}
    policy, buffer = rollout(model, num_envs=1, precision="bf16", **frozen)
    dtypes = {p.requires_grad: p.dtype for p in policy.model.parameters()}
    assert dtypes == {False: torch.bfloat16, True: torch.float32}
    gate(policy, buffer).check(0.05)


def test_a_model_that_draws_otherwise_than_it_scores_is_refused():
    with pytest.raises(ParityError):
        gate(*rollout("Lies")).check(1e-4)
    with pytest.raises(ParityError):
        gate(*rollout("DropsOut")).check(1e-4)


@pytest.mark.parametrize("model", ["Plain", "Samples", "StepByStep"])
def test_the_gate_sees_a_small_change_of_weights(model):
    policy, buffer = rollout(model, 4)
    gate(policy, buffer).check(1e-4)
    with torch.no_grad():
        policy.model.mean.bias += 1e-3
    with pytest.raises(ParityError, match="drift"):
        gate(policy, buffer).check(1e-4)


def test_normalised_actions_and_states_pass_it():
    torch.manual_seed(0)
    env = Env(Seeing(8), "cpu")
    policy = make_policy(config(normalize_actions=True, normalize_observations=True), env.spec, 4)
    statistics = {"action": {"mean": np.full(DIMS, 0.3), "std": np.full(DIMS, 2.0)}}
    statistics["observation/state"] = {"mean": np.ones(STATE), "std": np.full(STATE, 3.0)}
    policy.fit_normalizers(statistics, "mean_std", "mean_std")
    td = seen()
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


@pytest.mark.parametrize("model", ["Plain", "Told", "Samples"])
def test_an_action_follows_from_its_own_noise_alone(model):
    policy, td = made(model), seen()
    together = policy.act(noisy(policy, td))["action"]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    again = policy.act(noisy(policy, td))["action"]
    assert torch.equal(together, again) and torch.equal(torch.get_rng_state(), before)
    some = policy.act(noisy(policy, td)[2:4])["action"]
    assert torch.allclose(together[2:4], some, atol=1e-6)
    others = policy.act(noisy(policy, td, seed=1))["action"]
    assert ((together - others).abs() > 1e-3).all(-1).all()


def test_drawn_by_batches_it_is_repeatable_as_a_whole():
    policy, td = made("Plain", draws="batch"), seen()
    together = policy.act(noisy(policy, td))["action"]
    assert torch.equal(together, policy.act(noisy(policy, td))["action"])
    assert not torch.allclose(together[2:4], policy.act(noisy(policy, td)[2:4])["action"], atol=1e-3)


def test_draws_have_the_models_spread():
    policy = made("Plain")
    td = seen(1).expand(500).contiguous()
    actions = policy.act(noisy(policy, td))["action"][:, 0]
    assert torch.allclose(actions.std(0), torch.full((DIMS,), np.exp(-0.5)), rtol=0.1)


@pytest.mark.parametrize("model", ["Told", "Samples"])
def test_greedy_is_the_mode(model):
    policy, td = made(model), seen()
    expected = policy.model.distribution(policy.observations(td)).mean
    assert torch.equal(policy.act(td)["action"][:, 0], expected)


def test_greedy_of_a_model_that_always_draws_is_one_draw():
    policy, td = made("Plain"), seen()
    assert torch.equal(policy.act(td.clone())["action"], policy.act(td.clone())["action"])


def test_a_model_that_never_draws_is_refused():
    policy = made("Mute")
    policy.act(seen())
    with pytest.raises(UserError, match="Mute.forward .*same action.*add sample"):
        policy.act(noisy(policy, seen()))


# ---- what a model is told


def test_the_documented_keys():
    td = seen()
    told = made(chunk=1).observations(td)
    assert set(told.keys()) == {"rgb", "depth", "proprio", "language", "language_mask"}
    assert told["rgb"].shape == (6, 2, 3, 8, 8) and told["rgb"].dtype == torch.float32
    assert torch.equal(told["rgb"][:, 1], td["observation", "image", "wrist"].float() / 255)
    assert told["depth"].shape == (6, 1, 8, 8) and torch.equal(told["proprio"], td["observation", "state"])
    for row, mask, task in zip(told["language"], told["language_mask"], td["observation", "task"], strict=True):
        text = INSTRUCTIONS[int(task)].encode()
        assert bytes(row.tolist()) == text.ljust(7, b"\0") and mask.sum() == len(text)


def test_keys_of_ones_own():
    keys = {"rgb": ["image/wrist", "image/head"], "eyes": "image/head", "depth": None, "words": "task"}
    policy = made(observation_keys=keys, images="uint8", max_tokens=9)
    td = seen()
    told = policy.observations(td)
    assert set(told.keys()) == {"rgb", "eyes", "proprio", "language", "language_mask", "words", "words_mask"}
    assert torch.equal(told["rgb"][:, 0], td["observation", "image", "wrist"]) and told["eyes"].dtype == torch.uint8
    assert told["language"].shape == (6, 9)
    assert ("observation", "depth", "head") not in policy.in_keys and len(policy.in_keys) == 4


def test_instructions_as_text():
    td = seen()
    told = made(tokenizer="text").observations(td)
    assert list(told["language"]) == [INSTRUCTIONS[i] for i in td["observation", "task"].tolist()]
    assert list(told[1:3]["language"]) == list(told["language"])[1:3]


def test_a_tokenizer_of_ones_own(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    vocabulary = {"[UNK]": 0, "push": 1, "lift": 2, "it": 3}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    policy = made(tokenizer=str(tmp_path))
    assert policy.observations.tokens.ids.tolist() == [[1, 0], [2, 3]]
    assert policy.observations.tokens.mask.tolist() == [[True, False], [True, True]]


def test_a_checkpoint_for_other_actions_is_told_so(tmp_path):
    save_file(Sized(action_dim=5).state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"action_dim": 5}')
    assert sentence("Sized", model_path=str(tmp_path)).startswith("Sized.action_dim=5, but a decision takes 3 numbers")


def test_constructors_are_offered_what_the_env_knows():
    assert made(chunk=3).model.mean.out_features == 3 * DIMS
    assert made("WholeConfig", model_settings={"action_dim": DIMS}).model.mean.out_features == DIMS


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


def test_the_critics_part_learns_at_its_own_pace():
    policy, buffer = rollout()
    assert policy.critic_parameters() == list(policy.model.value_head.parameters())
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    PPO(PPOConfig(mini_batch_size=256, ppo_epochs=1, critic_warmup_updates=1), policy).update(buffer.rollout())
    changed = {name for name, p in policy.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"model.value_head.weight", "model.value_head.bias"}


def test_frozen_parts_rest_while_others_are_in_training():
    policy = made(frozen=("vision",)).train()
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
    # fresh adapters add nothing: only now do they take part
    buffer = RolloutBuffer(32)
    Collector(Env(Seeing(8), "cpu"), policy, seed=1).collect(buffer)
    assert policy.model.mean.lora_B["default"].weight.abs().max() > 0
    gate(policy, buffer).check(0.05)


def test_parts_are_named_as_in_the_model_itself_with_lora():
    pytest.importorskip("peft")
    policy = made(lora_r=2, frozen=("vision.1.weight",), critic_parts=("value_head.weight", "value_head.bias"),
                  modules_to_save=("log_std",))  # fmt: skip
    learning = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    adapters = {f"{layer}.lora_{side}.default.weight" for layer in ("joints", "mean") for side in "AB"}
    assert learning == adapters | {"log_std", "value_head.weight", "value_head.bias"}
    assert policy.critic_parameters() == list(policy.model.value_head.parameters())
    # a weight beside an adapter: its name is another then
    policy = made(lora_r=2, critic_parts=("value_head.bias",))
    assert policy.critic_names == ["value_head.base_layer.bias"]
    assert sentence(lora_r=2, critic_parts=("vale_head",)).startswith(
        "policy.critic_parts: 'vale_head' matches no part"
    )


@pytest.mark.parametrize("model", ["Samples", "StepByStep", "Flows"])
def test_imitation_pulls_towards_what_was_shown(model):
    policy, td = made(model, chunk=2), seen(32)
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


# ---- mistakes


def test_wrong_class_paths():
    assert sentence(model_class=None).startswith("policy.model_class is not set")
    assert sentence(model_class="Samples") == (
        "policy.model_class 'Samples' is not an import path; expected package.module:Class"
    )
    assert sentence(model_class="doubles_vl:Samples") == (
        "policy.model_class 'doubles_vl:Samples': no module 'doubles_vl'; is it in this folder or on PYTHONPATH? "
        "(nearest: doubles_vla)"
    )
    assert sentence(model_class="sparring.policies.flw.FlowPolicy").endswith("(nearest: sparring.policies.flow)")
    assert sentence(model_class="doubles_vla.Sample") == (
        "policy.model_class 'doubles_vla:Sample': module 'doubles_vla' has no 'Sample'; nearest: Samples"
    )
    assert "policy.model_class 'doubles_vla:config' is a function" in sentence(model_class="doubles_vla:config")


def test_classes_without_the_interface():
    assert "is not a torch.nn.Module; expected class NotAModule(nn.Module)" in sentence("NotAModule")
    told = sentence("Valueless")
    assert "add get_value(observations) -> [B, 1], evaluate_actions(observations, actions) -> (log_prob [B]" in told
    assert "forward(" not in told
    told = sentence("HalfAFlow")
    assert "forward(observations) -> [B, action_dim], get_value" in told and "the missing denoise(x, t, prefix)" in told


def test_action_dims_that_do_not_match():
    assert sentence(action_dim=7, chunk=2).startswith(
        "policy.action_dim=7, but a decision takes 6 numbers: 2 steps (rollout.action_steps) of the env's 3 action "
    )
    assert sentence(action_dim=7, chunk=2).endswith("policy.model_config.action_dim=6")
    assert sentence(action_dim=9, chunk=2).endswith(", or set rollout.action_steps=3")
    with pytest.raises(UserError, match=r"OddActions: shape of the actions=\[6, 6\], but a decision takes 3"):
        made("OddActions").act(seen())
    with pytest.raises(UserError, match="'doubles_vla:Flows' has a flow head; .*make_policy"):
        VLAPolicy(config("Flows"), Seeing(1).spec, 1)
    told = sentence("Flows", model_settings={"action_dim": 5})
    assert "Flows.denoise fails for chunks [1, 1, 3]" in told and "1 steps" in told


def test_scores_of_odd_shapes():
    policy = made("OddValue")
    with pytest.raises(UserError, match=r"OddValue: get_value has shape \[6, 2\], expected \[6, 1\]"):
        policy.value(seen())
    policy = made("OddScore")
    td = policy.observations(seen())
    with pytest.raises(UserError, match="OddScore.evaluate_actions returned a Tensor; expected two tensors"):
        policy._evaluate(td, torch.zeros(6, 1, DIMS))


def test_constructors_that_cannot_be_called():
    told = sentence(model_settings={"widht": 3})
    assert told.endswith("does not take policy.model_config.widht; nearest: width")
    assert sentence("Flows", model_settings={"zzz": 3}).endswith("it takes action_dim, steps, width")
    assert "doubles_vla:Fussy': the constructor failed: ValueError: no" in sentence("Fussy")


def test_a_constructor_may_name_settings_beside_its_config():
    model = made("ConfigAndMore", model_settings={"width": 24}).model
    assert (model.mean.in_features, model.mean.out_features) == (24, DIMS)


def test_observations_that_there_are_not():
    told = sentence(observation_keys={"rgb": "image/haed"})
    assert "policy.observation_keys.rgb: " in told and told.endswith("'image/haed'; nearest: image/head")
    assert "[3, 8, 8] and [5] cannot be stacked" in sentence(observation_keys={"rgb": ["image/head", "state"]})
    nothing = dict.fromkeys(("rgb", "depth", "proprio", "language"))
    assert "policy.observation_keys leaves the model no observation" in sentence(observation_keys=nothing)


def test_missing_tokenizers(tmp_path):
    told = sentence(tokenizer=str(tmp_path))
    assert f"'{tmp_path}' has no tokenizer" in told and told.endswith("policy.tokenizer=bytes")
    assert "policy.tokenizer=checkpoint needs policy.model_path" in sentence(tokenizer="checkpoint")
    assert sentence(max_tokens=4).startswith("policy.max_tokens=4, but an instruction has 7 tokens; ")


def test_settings_that_would_not_be_read():
    assert "policy.sampling_steps=8: only models with encode and denoise read it" in sentence(sampling_steps=8)
    assert "policy.draws=batch: only models without encode" in sentence("Flows", draws="batch")
    assert "set policy.precision=bf16 too" in sentence(dtype="bf16")
    assert "has no effect without LoRA" in sentence(modules_to_save=("value_head",))
    assert "policy.critic_parts: 'vale_head' matches no part of the model; nearest: value_head" in sentence(
        critic_parts=("vale_head",)
    )


# ---- configs and the example


def test_the_documents_keys_are_accepted():
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


def test_the_example_trains_and_comes_back(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    subprocess.run([sys.executable, "examples/gpt_vla.py", "outputs/gpt_vla"], check=True)
    assert json.loads((tmp_path / "outputs/gpt_vla/config.json").read_text())["action_dim"] == 7
    words = ["train", "finetune", "--config", "configs/vla_example.json", "--output", "run", "training.iterations=1"]
    words += ["rollout.n_envs=2", "rollout.steps=8", "ppo.ppo_epochs=1", "ppo.mini_batch_size=8", "env.threads=1"]
    words += ["evaluation.episodes=1", "evaluation.baseline=false", "rollout.render_episodes=0", "threads=1"]
    assert main([*words, "policy.frozen=[vision]"]) == 0, capsys.readouterr().err
    before, after = load_file("outputs/gpt_vla/model.safetensors"), load_policy("run").model.state_dict()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if name.startswith("vision.")}
