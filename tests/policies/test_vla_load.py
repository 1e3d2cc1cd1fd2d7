"""load_vla_model: every format gives the same weights, mismatches are listed, pickled code is not executed."""

import json
import os
import time
from typing import NamedTuple

import pytest
import torch
from doubles_vla import DIMS, STATE, RaisesInInit, Samples, Tied
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from torch import nn

from sparring import VLAModelInterface, load_vla_model
from sparring.errors import UserError
from sparring.policies.vla.load import _DeviceHooks as DeviceHooks
from sparring.policies.vla.load import move_to_devices
from sparring.policies.vla.policy import _cast_frozen
from sparring.policies.weights import WeightsFit

SIZES = {"action_dim": DIMS, "proprio_dim": STATE}


@pytest.fixture
def source():
    torch.manual_seed(7)
    return Samples()


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(model, source):
    ours, theirs = model.state_dict(), source.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def error_of(path, model="doubles_vla:Samples", config=SIZES, **settings):
    with pytest.raises(UserError) as caught:
        load_vla_model(path, model, config, **settings)
    return str(caught.value)


def write_shards(folder, given):
    names, half = list(given), len(given) // 2
    files = {"a.safetensors": names[:half], "b.safetensors": names[half:]}
    for file, part in files.items():
        save_file({name: given[name] for name in part}, folder / file)
    file_of = {name: file for file, part in files.items() for name in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    return index


# ---- formats


def test_a_model_has_the_interface():
    assert issubclass(Samples, VLAModelInterface) and not issubclass(nn.Linear, VLAModelInterface)


def test_safetensors(source, tmp_path):
    save_file(weights(source), tmp_path / "x.safetensors")
    model = load_vla_model(tmp_path / "x.safetensors", "doubles_vla.Samples", SIZES)
    assert type(model) is Samples and same(model, source)


def test_shards_by_their_index_and_by_their_folder(source, tmp_path):
    index = write_shards(tmp_path, weights(source))
    assert same(load_vla_model(index, Samples, SIZES), source)
    assert same(load_vla_model(tmp_path, Samples, SIZES), source)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_shards_of_a_wrapped_model(source, tmp_path, prefix):
    index = write_shards(tmp_path, {prefix + name: tensor for name, tensor in weights(source).items()})
    assert same(load_vla_model(index, Samples, SIZES), source)


class Module(nn.Module):
    """Its only part has the name of a prefix that wrappers add."""

    def __init__(self):
        super().__init__()
        self.module = Samples()

    def forward(self, observations): ...

    def get_value(self, observations): ...

    def evaluate_actions(self, observations, actions): ...


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_part_may_have_the_name_of_a_wrapper_prefix(tmp_path, prefix):
    source = Module()
    save_file({prefix + name: tensor for name, tensor in weights(source).items()}, tmp_path / "x.safetensors")
    assert same(load_vla_model(tmp_path / "x.safetensors", Module), source)


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".bin"])
@pytest.mark.parametrize("inside", [None, "model", "state_dict", "model_state_dict"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
def test_pickled_tensors(source, tmp_path, suffix, inside, prefix):
    given = {prefix + name: tensor for name, tensor in weights(source).items()}
    file = tmp_path / f"x{suffix}"
    torch.save({inside: given, "step": 3} if inside else given, file)
    assert same(load_vla_model(file, Samples, SIZES), source)


def test_settings_of_the_model_are_read_from_the_folder(tmp_path):
    torch.manual_seed(7)
    source = Samples(width=24)
    settings = {"model_type": "samples", "transformers_version": "5", "width": 24, **SIZES}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    save_file(weights(source), tmp_path / "model.safetensors")
    assert same(load_vla_model(tmp_path, Samples), source)
    assert "24" in error_of(tmp_path, config={"width": 16})


def test_from_pretrained_of_the_class_is_used_and_made_strict(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")

    class TinyConfig(transformers.PretrainedConfig):
        model_type = "tiny_vla"

        def __init__(self, width=4, **more):
            self.width = width
            super().__init__(**more)

    class Tiny(transformers.PreTrainedModel):
        config_class = TinyConfig

        def __init__(self, config):
            super().__init__(config)
            self.linear = nn.Linear(config.width, 1)
            self.post_init()

        def _init_weights(self, module): ...

        def forward(self, observations): ...

        def get_value(self, observations): ...

        def evaluate_actions(self, observations, actions): ...

    class Wider(Tiny):
        def __init__(self, config):
            super().__init__(config)
            self.extra = nn.Linear(2, 2)
            self.post_init()

    torch.manual_seed(3)
    source = Tiny(TinyConfig(width=6))
    source.save_pretrained(tmp_path)
    assert same(load_vla_model(tmp_path, Tiny), source)
    error = error_of(tmp_path, Wider, None)
    assert "2 missing from it:\n  extra.bias\n  extra.weight" in error
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"width": 5}))
    assert "1 of another shape:\n  linear.weight: [1, 6] in it, [1, 5] in the model" in error_of(tmp_path, Tiny, None)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.warns(UserWarning, match="was loaded only in part"):
        assert load_vla_model(tmp_path, Wider, strict=False).linear.in_features == 6


class Lenient(Samples):
    """Ignores mismatches, as huggingface_hub's mixin does; a subclass loads strictly."""

    strict = False

    @classmethod
    def from_pretrained(cls, folder, **settings):
        model = cls(**settings)
        model.load_state_dict(load_file(folder / "model.safetensors"), strict=cls.strict)
        return model


class Strict(Lenient):
    strict = True


def test_from_pretrained_of_any_class_is_made_strict(source, tmp_path):
    save_file(weights(source), tmp_path / "model.safetensors")
    assert same(load_vla_model(tmp_path, Lenient, SIZES), source)
    given = weights(source) | {"value_heed.weight": torch.zeros(1)}
    del given["value_head.weight"]
    save_file(given, tmp_path / "model.safetensors")
    text = error_of(tmp_path, Lenient)
    assert "1 missing from it:\n  value_head.weight" in text and "1 unknown to the model:\n  value_heed.weight" in text
    with pytest.warns(UserWarning, match="was loaded only in part"):
        assert torch.equal(load_vla_model(tmp_path, Lenient, SIZES, strict=False).mean.weight, source.mean.weight)
    assert f"from_pretrained('{tmp_path}') failed: RuntimeError" in error_of(tmp_path, Strict)


def test_shared_weights_may_be_saved_once(tmp_path):
    source = Tied()
    given = weights(source)
    del given["readout.weight"]
    save_file(given, tmp_path / "x.safetensors")
    model = load_vla_model(tmp_path / "x.safetensors", Tied, SIZES)
    assert same(model, source) and model.readout.weight is model.words.weight


def test_without_a_path_weights_are_new():
    torch.manual_seed(7)
    model = load_vla_model(None, Samples, SIZES)
    torch.manual_seed(7)
    assert same(model, Samples())


# ---- dtype, devices, frozen


def test_dtype_and_frozen_parts(source, tmp_path):
    save_file(weights(source), tmp_path / "x.safetensors")
    model = load_vla_model(tmp_path / "x.safetensors", Samples, SIZES, dtype="bf16", frozen=["vision", "*.bias"])
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {n for n in weights(source) if n.startswith("vision.") or n.endswith(".bias")}
    assert "dtype 'int8' is unknown; expected fp32 or bf16" in error_of(None, dtype="int8")
    assert error_of(None, frozen=["visoin"]) == (
        "policy.frozen: 'visoin' matches no part of the model; nearest: vision"
    )
    assert error_of(None, frozen=["*.weigth"]).startswith("policy.frozen: '*.weigth' matches no part of the model; ")


def test_a_part_on_another_device(source):
    """meta stands for a GPU: outputs return to the caller's device, and the part stays on its own."""
    model = load_vla_model(None, Samples, SIZES, frozen=["vision"], device_map={"vision": "meta"})
    assert model.to("cpu").vision[1].weight.device.type == "meta"
    assert model.joints.weight.device.type == "cpu"
    on_cpu = load_vla_model(None, Samples, SIZES, frozen=["vision"], device_map={"vision": "cpu"})
    on_cpu.vision.load_state_dict(source.vision.state_dict())
    x = torch.rand(2, 2 * 3 * 8 * 8)
    assert torch.equal(on_cpu.vision(x), source.vision(x))
    error = error_of(None, device_map={"vision": "cpu"})
    assert error.startswith("policy.device_map: 'vision' learns") and "policy.frozen=[vision]" in error
    assert "'gpu' is not a device; expected cpu, cuda or cuda:<index>" in error_of(None, device_map="gpu")
    assert "'cuda:9', but torch finds 0 GPUs" in error_of(None, device_map="cuda:9")


class Answer(NamedTuple):
    mean: torch.Tensor
    seen: TensorDict


@pytest.mark.parametrize("kind", [dict, lambda state: TensorDict(state, [3])])
def test_moving_keeps_the_type_of_a_structure(kind):
    """To the device of a part and back; meta stands for a GPU."""
    elsewhere, structure = DeviceHooks(torch.device("meta")), kind({"state": torch.zeros(3, 4)})
    (moved,), _ = elsewhere.before(None, (structure,), {})
    assert type(moved) is type(structure) and moved["state"].device.type == "meta"
    assert elsewhere.caller_device.type == "cpu"
    answer = DeviceHooks(torch.device("meta")).after(None, (), Answer(torch.zeros(3), structure))
    assert type(answer) is Answer and answer.mean.device.type == answer.seen["state"].device.type == "meta"


def test_outputs_of_transformers_keep_their_type():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    model = nn.ModuleDict({"part": nn.Identity()})
    move_to_devices(model, {"part": "cpu"})
    output = outputs.BaseModelOutput(last_hidden_state=torch.zeros(2, 3))
    assert type(model["part"](output)) is outputs.BaseModelOutput


def test_only_floating_numbers_are_cast():
    model = nn.Linear(2, 2).requires_grad_(False)
    model.table = nn.Parameter(torch.arange(300), requires_grad=False)
    _cast_frozen(model, "bf16")
    assert model.weight.dtype == torch.bfloat16 and model.table.dtype == torch.int64


# ---- what does not fit


def test_hundreds_of_mismatches_are_reported_quickly():
    """Twenty of each kind are listed, each with the nearest name."""
    names = [f"model.layers.{i}.self_attn.{part}_proj.weight" for i in range(100) for part in "qkvo"]
    began = time.monotonic()
    error = str(WeightsFit(tuple(names), tuple(f"policy.{name}" for name in names), ()))
    assert time.monotonic() - began < 5
    assert error.startswith(f"400 missing from it:\n  {names[0]} (nearest: policy.{names[0]})\n")
    assert error.count("\n  and 380 more") == 2 and len(error.splitlines()) == 2 * 22


def test_all_mismatches_are_listed(source, tmp_path):
    given = weights(source)
    given["value_heed.weight"] = given.pop("value_head.weight")
    given["mean.weight"] = torch.zeros(2, 16)
    del given["log_std"]
    file = tmp_path / "x.safetensors"
    save_file(given, file)
    assert error_of(file).startswith(
        f"'{file}' does not fit the model:\n"
        "2 missing from it:\n  log_std\n  value_head.weight (nearest: value_heed.weight)\n"
        "1 unknown to the model:\n  value_heed.weight (nearest: value_head.weight)\n"
        "1 of another shape:\n  mean.weight: [2, 16] in it, [3, 16] in the model\n"
    )
    assert error_of(file).endswith("policy.strict=false")
    with pytest.warns(UserWarning, match="2 missing from it"):
        model = load_vla_model(file, Samples, SIZES, strict=False)
    assert torch.equal(model.joints.weight, source.joints.weight) and model.mean.weight.shape == (3, 16)
    save_file({"other": torch.zeros(1)}, file)
    assert "none of its 1 tensors fits the model" in error_of(file, strict=False)


def test_many_missing_names_are_all_listed(tmp_path):
    save_file({"joints.weight": torch.zeros(16, STATE)}, tmp_path / "x.safetensors")
    error = error_of(tmp_path / "x.safetensors")
    assert all(name in error for name in Samples().state_dict() if name != "joints.weight")


# ---- what cannot be read


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


def test_pickled_code_is_refused_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"weights": Bomb()}, "bomb.pth")
    error = error_of("bomb.pth")
    assert error.startswith("'bomb.pth' is refused: it holds pickled code (")
    assert "system" in error and error.endswith("policy.model_path=bomb.safetensors")
    assert not (tmp_path / "exploded").exists()


def test_the_command_in_the_error_converts_the_file(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(source, "whole.pth")
    error = error_of("whole.pth")
    assert "pickled code (vla_cases.Samples)" in error
    code = error.split('python -c "')[1].split('";')[0]
    exec(code, {})
    assert same(load_vla_model("whole.safetensors", Samples, SIZES), source)


def test_files_that_are_not_weights_are_refused(source, tmp_path):
    (tmp_path / "here.txt").write_text("x")
    assert error_of(tmp_path / "gone.pth") == (
        f"policy.model_path '{tmp_path}/gone.pth' does not exist; '{tmp_path}' contains: here.txt"
    )
    assert "'.txt' is not a format of weights; expected .safetensors" in error_of(tmp_path / "here.txt")
    assert "the folder has no weights; expected model.safetensors, " in error_of(tmp_path)
    for name in ("x.safetensors", "x.pth"):
        (tmp_path / name).write_bytes(b"nothing of the kind")
        assert "download it again" in error_of(tmp_path / name)
    torch.save(weights(source), tmp_path / "cut.pth")
    (tmp_path / "cut.pth").write_bytes((tmp_path / "cut.pth").read_bytes()[:2000])
    assert "download it again" in error_of(tmp_path / "cut.pth")
    torch.save({"step": 3, "epoch": 4}, tmp_path / "none.pth")
    assert "holds step, epoch; expected names mapped to tensors, " in error_of(tmp_path / "none.pth")


def test_invalid_indices_are_refused(source, tmp_path):
    index = write_shards(tmp_path, weights(source))
    (tmp_path / "b.safetensors").unlink()
    assert "1 of 2 shards are missing: b.safetensors" in error_of(index)
    index.write_text(json.dumps({"weight_map": {"mean.weight": "../b.safetensors"}}))
    assert "names files outside its folder ('../b.safetensors')" in error_of(index)
    index.write_text(json.dumps({"weight_map": {"nobody": "a.safetensors"}}))
    assert "the shards do not hold nobody" in error_of(index)
    index.write_text("[]")
    assert "is not an index of weights; expected JSON with a 'weight_map'" in error_of(index)


def test_constructors(tmp_path):
    assert "the constructor failed: ValueError: no" in error_of(None, RaisesInInit, {"action_dim": 3})
    assert error_of(None, RaisesInInit, {}).endswith("also needs action_dim; set policy.model_config.action_dim")
