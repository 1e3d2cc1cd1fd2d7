"""LoRA: only adapters learn; peft opens a folder of saved adapters; adapters merge into the weights."""

import copy
import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sparring import load_vla_model
from sparring.errors import UserError
from sparring.policies.configs import LoraConfig
from sparring.policies.lora import _learned as adapter_weights
from sparring.policies.lora import adapt, load_adapters, merge, save_adapters
from sparring.policies.pi0 import load_pi0


class Net(nn.Module):
    """A convolution, an embedding, torch's transformer encoder and a head."""

    def __init__(self):
        super().__init__()
        self.see = nn.Conv2d(3, 8, 4, stride=4)
        self.words = nn.Embedding(10, 8)
        self.trunk = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=True
        )
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, image, words):
        seen = self.see(image).flatten(2).mT
        return self.head(self.trunk(torch.cat([seen, self.words(words)], 1)).mean(1))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(5, 3, 8, 8, generator=generator), torch.randint(10, (5, 4), generator=generator)


def randomized(net):
    """Randomise the adapters, which initially change nothing."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in adapter_weights(net).values():
            weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    return net


def trainable(net):
    return {name for name, parameter in net.named_parameters() if parameter.requires_grad}


def test_new_adapters_do_not_change_the_output(net, inputs):
    before = net(*inputs)
    adapt(net, LoraConfig(lora_r=2))
    torch.testing.assert_close(net(*inputs), before, atol=1e-6, rtol=0)
    assert not torch.allclose(randomized(net)(*inputs), before, atol=1e-3)


def test_by_default_all_linear_layers_have_adapters_and_only_these_learn(net):
    adapt(net, LoraConfig(lora_r=2))
    layers = {f"trunk.layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)} | {"head.0", "head.2"}
    assert trainable(net) == {f"{name}.lora_{side}.default.weight" for name in layers for side in "AB"}


@pytest.mark.parametrize(
    ("patterns", "layers"),
    [
        (["head"], {"head.0", "head.2"}),
        (["linear1"], {"trunk.layers.0.linear1", "trunk.layers.1.linear1"}),
        (["*.1.linear?"], {"trunk.layers.1.linear1", "trunk.layers.1.linear2"}),
        ([r"trunk\.layers\.[1-9]\.linear1", "head.2"], {"trunk.layers.1.linear1", "head.2"}),
        (["see", "words"], {"see", "words"}),
    ],
)
def test_targets_match_by_suffix_glob_and_regex(net, patterns, layers):
    adapt(net, LoraConfig(lora_r=2, lora_targets=patterns))
    assert {name.partition(".lora_")[0] for name in trainable(net)} == layers


def test_modules_to_save_learn_in_full_and_in_float32(net):
    net.bfloat16()
    adapt(net, LoraConfig(lora_r=2, lora_targets=["trunk", "head"], modules_to_save=["head"]))
    assert {"head.0.weight", "head.0.bias"} < trainable(net) and not any("head.0.lora" in n for n in trainable(net))
    kinds = {p.dtype for p in net.parameters() if p.requires_grad}
    assert kinds == {torch.float32} and net.trunk.layers[0].linear1.base_layer.weight.dtype == torch.bfloat16


def test_modules_to_save_may_name_single_weights(net, inputs, tmp_path):
    settings = LoraConfig(lora_r=2, lora_targets=["head"], modules_to_save=["see.bias", "head.0.bias", "head.2.weight"])
    base = copy.deepcopy(net)
    adapt(net, settings)
    adapters = {f"head.0.lora_{side}.default.weight" for side in "AB"}
    assert trainable(net) == adapters | {"see.bias", "head.0.base_layer.bias", "head.2.weight"}
    save_adapters(randomized(net), tmp_path)
    load_adapters(base, tmp_path)
    assert torch.equal(base(*inputs), net(*inputs)) and trainable(base) == trainable(net)


@pytest.mark.parametrize("frozen", ["head.0", "head.0.weight", "head.0.*"])
def test_frozen_parts_have_no_adapters_and_no_trainable_weights(net, frozen):
    adapt(
        net, LoraConfig(lora_r=2, lora_targets=["head.0", "linear1"], modules_to_save=["see"]), frozen=[frozen, "see"]
    )
    layers = {name.partition(".lora_")[0] for name in trainable(net)}
    assert layers == {"trunk.layers.0.linear1", "trunk.layers.1.linear1"}


def test_a_frozen_bias_does_not_freeze_adapters(net):
    adapt(net, LoraConfig(lora_r=2, lora_targets=["head.0"]), frozen=["head.0.bias"])
    assert trainable(net) == {f"head.0.lora_{side}.default.weight" for side in "AB"}


def test_one_step_changes_adapters_and_nothing_else(net, inputs):
    adapt(net, LoraConfig(lora_r=2, modules_to_save=["head.2"]))
    randomized(net)
    before = copy.deepcopy(net.state_dict())
    net(*inputs).square().sum().backward()
    torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1).step()
    changed = {key for key, value in net.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == trainable(net)


def test_adapters_have_the_same_effect_in_eval_mode_as_in_training(net, inputs):
    """torch's encoder layers have a fast path for inference that does not call their linear layers."""
    adapt(net, LoraConfig(lora_r=2))
    randomized(net)
    with torch.no_grad():
        evaluated = net.eval()(*inputs)
    torch.testing.assert_close(evaluated, net.train()(*inputs), atol=1e-6, rtol=0)


def test_dropout_of_adapters_is_off_in_eval_mode(net, inputs):
    adapt(net, LoraConfig(lora_r=2, lora_dropout=0.5))
    randomized(net).eval()
    assert torch.equal(net(*inputs), net(*inputs))
    net.train()
    assert not torch.equal(net(*inputs), net(*inputs))


@pytest.mark.parametrize("targets", [[], ["see", "words", "linear1"]])
def test_merging_gives_a_plain_network_with_the_same_outputs(net, inputs, targets):
    keys = list(net.state_dict())
    adapt(net, LoraConfig(lora_r=2, lora_targets=targets))
    with_adapters = randomized(net)(*inputs)
    merge(net)
    assert list(net.state_dict()) == keys
    assert (net(*inputs) - with_adapters).abs().max() < 1e-5
    with pytest.raises(UserError, match="no LoRA adapters"):
        merge(net)


CONFIG = LoraConfig(lora_r=2, lora_alpha=5, lora_targets=["see", "words", "linear?"], modules_to_save=["head.2"])


def test_adapters_saved_alone_reproduce_the_network_from_its_base(net, inputs, tmp_path):
    base = copy.deepcopy(net)
    adapt(net, CONFIG)
    save_adapters(randomized(net), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    adapted = copy.deepcopy(base)
    # into a network without adapters, and into one with other adapters
    load_adapters(adapted, tmp_path)
    adapt(base, CONFIG)
    load_adapters(base, tmp_path)
    for again in (adapted, base):
        assert torch.equal(again(*inputs), net(*inputs)) and trainable(again) == trainable(net)


def test_peft_opens_saved_adapters(net, inputs, tmp_path):
    from peft import PeftModel

    base = copy.deepcopy(net)
    # no fast path of torch, which bypasses the adapters
    base.trunk.use_nested_tensor = False
    for layer in base.trunk.layers:
        layer.activation_relu_or_gelu = 0
    adapt(net, CONFIG)
    save_adapters(randomized(net), tmp_path)
    opened = PeftModel.from_pretrained(base, tmp_path).eval()
    torch.testing.assert_close(opened(*inputs), net(*inputs), atol=1e-6, rtol=0)
    opened.save_pretrained(tmp_path / "peft")
    again = Net().eval()
    again.load_state_dict({k: v for k, v in copy.deepcopy(opened.unload()).state_dict().items()}, strict=True)
    load_adapters(again, tmp_path / "peft")
    torch.testing.assert_close(again(*inputs), net(*inputs), atol=1e-6, rtol=0)


def test_a_state_dict_loads_back_strictly(net, inputs):
    adapt(net, CONFIG)
    state = copy.deepcopy(randomized(net).state_dict())
    torch.manual_seed(9)
    other = Net().eval()
    adapt(other, CONFIG)
    other.load_state_dict(state, strict=True)
    assert torch.equal(other(*inputs), net(*inputs))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"lora_r": 2, "lora_targets": ["linaer1"]},
            "policy.lora_targets: 'linaer1' matches no part .* nearest: linear1",
        ),
        ({"lora_r": 2, "modules_to_save": ["haed"]}, "policy.modules_to_save: 'haed' matches no part .* nearest: head"),
        ({"lora_r": 2, "modules_to_save": ["head.1"]}, "'head.1' has no weights"),
        ({"lora_r": 2, "lora_targets": ["self_attn"]}, "lora_targets=.*no selected layer"),
        ({"lora_r": 2, "lora_targets": ["head"], "modules_to_save": ["head"]}, "lora_targets=.*no selected layer"),
        ({"lora_targets": ["head"]}, "policy.lora_targets=.* has no effect without LoRA; set policy.lora_r"),
        ({"modules_to_save": ["head"]}, "policy.modules_to_save=.* has no effect without LoRA"),
        ({"lora_alpha": 8.0}, "policy.lora_alpha=8.0 has no effect without LoRA"),
        ({"lora_dropout": 0.1}, "policy.lora_dropout=0.1 has no effect without LoRA"),
        ({"lora_r": -1}, "lora_r=-1"),
        ({"lora_alpha": 0}, "lora_alpha=0"),
        ({"lora_dropout": 1.0}, "lora_dropout=1.0"),
    ],
)
def test_bad_settings_are_refused(net, settings, message):
    with pytest.raises(UserError, match=message):
        adapt(net, LoraConfig(**settings))


def test_modules_named_in_an_adapter_config_are_not_imported(net, tmp_path, monkeypatch):
    # peft imports these modules; older versions import any module
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron/core.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    adapt(net, CONFIG)
    save_adapters(net, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    config |= {"megatron_config": {"a": 1}, "megatron_core": "megatron.core"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file({"linear.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "pi0"}))

    class Pretrained(Net):
        from_pretrained = get_value = evaluate_actions = lambda *_: None

    for load in (
        lambda: load_adapters(Net(), tmp_path),
        lambda: load_pi0(tmp_path),
        lambda: load_vla_model(tmp_path, Pretrained),
    ):
        with pytest.raises(UserError, match="adapter_config.json' names a module to import"):
            load()
    assert "megatron" not in sys.modules


def test_adapters_that_do_not_fit_are_refused_and_change_nothing(net, tmp_path):
    adapt(net, CONFIG)
    save_adapters(net, tmp_path)
    other = Net()
    adapt(other, CONFIG.model_copy(update={"lora_r": 3}))
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(UserError, match=r"do not fit .*see.lora_A.weight \[2, 3, 4, 4\] instead of \[3, 3, 4, 4\]"):
        load_adapters(other, tmp_path)
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())
    with pytest.raises(UserError, match="no adapter_config.json"):
        load_adapters(Net(), tmp_path / "elsewhere")
    with pytest.raises(UserError, match="cannot be read as adapters"):
        load_adapters(other, tmp_path / "elsewhere")
    for config, message in (
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"peft_type": "NEW"}', "cannot be read"),
        ('{"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3}', ".*PREFIX_TUNING, expected LORA"),
    ):
        (tmp_path / "adapter_config.json").write_text(config)
        with pytest.raises(UserError, match=f"the adapter_config.json in '{tmp_path}' {message}"):
            load_adapters(Net(), tmp_path)
    with pytest.raises(UserError, match="already has LoRA adapters"):
        adapt(other, CONFIG)
    with pytest.raises(UserError, match="no LoRA adapters"):
        adapter_weights(Net())


def test_a_file_may_hold_one_of_two_tied_weights(tmp_path):
    def tied() -> nn.ModuleDict:
        pair = nn.ModuleDict({"words": nn.Linear(4, 4, bias=False), "last": nn.Linear(4, 4, bias=False)})
        pair["last"].weight = pair["words"].weight
        return nn.ModuleDict({"pair": pair, "body": nn.Linear(4, 4)})

    settings = LoraConfig(lora_r=2, lora_targets=("body",), modules_to_save=("pair",))
    net, other = tied(), tied()
    adapt(net, settings)
    adapt(other, settings)
    save_adapters(randomized(net), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    weights = load_file(file)
    del weights["base_model.model.pair.last.weight"]
    save_file(weights, file)
    load_adapters(other, tmp_path)
    assert all(torch.equal(w, adapter_weights(net)[name]) for name, w in adapter_weights(other).items())
    assert other["pair"]["last"].weight is other["pair"]["words"].weight


def test_weights_without_adapters_load_into_a_model_with_new_adapters(tmp_path):
    from safetensors.torch import save_file

    from sparring.runs.checkpoint import CheckpointError
    from sparring.runs.fits import load_weights

    def net():
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    torch.manual_seed(0)
    plain, adapted = net(), net()
    file = tmp_path / "model.safetensors"
    save_file(plain.state_dict(), file)
    adapt(adapted, LoraConfig(lora_r=2))
    with pytest.raises(CheckpointError, match="missing: 0.base_layer.weight"):
        load_weights(adapted, file)
    loaded = load_weights(adapted, file, may_lack_adapters=True)
    tensors, new = loaded.split("; new: ")
    assert tensors == "all 4 tensors"
    assert len(new.split(", ")) == 4 and all("lora_" in name for name in new.split(", "))
    x = torch.randn(5, 3)
    torch.testing.assert_close(adapted(x), plain(x))
    # a file that has adapters must have all of them
    both = {name: w.clone() for name, w in adapted.state_dict().items()}
    del both["0.lora_A.default.weight"]
    save_file(both, file)
    with pytest.raises(CheckpointError, match="1 missing: 0.lora_A"):
        load_weights(adapted, file, may_lack_adapters=True)
