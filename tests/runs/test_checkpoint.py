"""Checkpoints are complete or absent; loading is strict; damage is detected."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from small_runs import seal
from torch import nn

from sparring.contract import EnvSpec
from sparring.normalize import RunningNormalizer
from sparring.processes.manifest import HashedFile, read_manifest, sign
from sparring.runs import checkpoint as module
from sparring.runs.checkpoint import (
    CheckpointError,
    checkpoints,
    damage_of,
    find_checkpoint,
    load_spec,
    load_training_state,
    remove_old,
    save_checkpoint,
)
from sparring.runs.fits import load_weights

SPEC = EnvSpec({"state": ((3,), "float32"), "image/head": ((3, 8, 8), "uint8")}, 2, instructions=("go",))


def saved(folder, update=1, model=None):
    return save_checkpoint(folder, update, model or nn.Linear(3, 2), {"n": update}, "seed: 1\n", SPEC)


def test_saved_checkpoint_loads_equally(tmp_path):
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    path = saved(tmp_path, 3, model)
    load_weights(other, path)
    assert torch.equal(model.weight, other.weight)
    assert load_training_state(path) == {"n": 3}
    assert load_spec(path) == SPEC
    assert sorted(p.name for p in path.iterdir()) == [
        "config.yaml",
        "manifest.json",
        "model.safetensors",
        "spec.json",
        "training_state.pt",
    ]


def test_newest_checkpoint_is_by_number(tmp_path):
    for update in (9, 10, 100):
        saved(tmp_path, update)
    (tmp_path / ".partial-checkpoint-200").mkdir()
    (tmp_path / "checkpoint-notes").mkdir()
    assert [p.name for p in checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10", "checkpoint-100"]
    assert find_checkpoint(tmp_path).name == "checkpoint-100"
    remove_old(tmp_path, 1, tmp_path / "checkpoint-100")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-100", "checkpoint-notes"]


@pytest.mark.parametrize("fails", ["rmtree", "rename"])
def test_interrupted_removal_leaves_no_damaged_checkpoint(tmp_path, monkeypatch, fails):
    for update in (1, 2):
        saved(tmp_path, update)

    def half(folder, **_):
        (folder / "config.yaml").unlink()

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(*(module.shutil, "rmtree", half) if fails == "rmtree" else (module.Path, "rename", fail))
    remove_old(tmp_path, 1, tmp_path / "checkpoint-2")
    assert [path.name for path in checkpoints(tmp_path) if damage_of(path)] == []
    monkeypatch.undo()
    # the next removal completes it
    remove_old(tmp_path, 1, tmp_path / "checkpoint-2")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


def test_torchs_error_of_a_full_disk_becomes_an_oserror(tmp_path, monkeypatch):
    words = "[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"

    def fail(*_):
        raise RuntimeError(words)

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="cannot be written; is the disk full") as error:
        saved(tmp_path)
    assert error.value.errno == errno.EIO and error.value.filename.endswith("checkpoint-1")
    assert list(tmp_path.iterdir()) == []
    words = "CUDA error: out of memory"
    with pytest.raises(RuntimeError, match="out of memory"):
        saved(tmp_path)


def test_strict_loading_reports_all_differences_and_changes_nothing(tmp_path):
    path = saved(tmp_path, model=nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(1, 1)}))
    model = nn.ModuleDict({"a": nn.Linear(4, 2), "c": nn.Linear(1, 1)})
    before = model["a"].weight.clone()
    with pytest.raises(CheckpointError) as error:
        load_weights(model, path)
    for words in ("2 missing: c.weight, c.bias", "2 unexpected: b.bias, b.weight", "a.weight [2, 3] instead of [2, 4]"):
        assert words in str(error.value)
    assert torch.equal(before, model["a"].weight)


def test_model_pt_is_read_without_running_code(tmp_path):
    model = nn.Linear(3, 2)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = nn.Linear(3, 2)
    load_weights(other, tmp_path)
    assert torch.equal(model.weight, other.weight)
    torch.save(model, tmp_path / "model.pt")  # a pickled module is code
    with pytest.raises(CheckpointError, match="model.pt' cannot be read: it is damaged, or holds more than tensors"):
        load_weights(other, tmp_path)


def test_damaged_and_missing_files_are_reported(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        find_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        find_checkpoint(tmp_path)
    path = saved(tmp_path)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:40])
    with pytest.raises(CheckpointError, match="'.*checkpoint-1' is damaged: model.safetensors has 40 bytes, expected"):
        load_weights(nn.Linear(3, 2), path)
    (path / "training_state.pt").unlink()
    with pytest.raises(CheckpointError, match="pretrained="):
        load_training_state(path)


def test_sigkill_during_a_save_keeps_the_earlier_checkpoint(tmp_path):
    """The child dies inside torch.save, with half of the new checkpoint on disk."""
    child = textwrap.dedent("""
        import os, signal, sys, torch
        from pathlib import Path
        from torch import nn
        from sparring.runs.checkpoint import save_checkpoint
        from sparring.envs.backend import EnvSpec
        folder, spec = Path(sys.argv[1]), EnvSpec({}, 1)
        save_checkpoint(folder, 1, nn.Linear(3, 2), {"n": 1}, "", spec)
        def half_a_save(state, file):
            file.write(b"half")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        torch.save = half_a_save
        save_checkpoint(folder, 2, nn.Linear(3, 2), {"n": 2}, "", spec)
    """)
    done = subprocess.run([sys.executable, "-c", child, str(tmp_path)], env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / ".partial-checkpoint-2" / "training_state.pt").exists()
    assert find_checkpoint(tmp_path).name == "checkpoint-1"
    assert load_training_state(find_checkpoint(tmp_path)) == {"n": 1}
    # a new save writes the second one and removes the partial folder
    saved(tmp_path, 2)
    remove_old(tmp_path, 5, tmp_path / "checkpoint-2")
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["checkpoint-1", "checkpoint-2"]


def test_tied_weights_are_saved_and_an_update_is_written_once(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    path = saved(tmp_path, 1, model)
    written = (path / "model.safetensors").stat().st_mtime_ns
    assert saved(tmp_path, 1, model) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == written
    other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    load_weights(other, tmp_path)  # a run folder will do
    assert torch.equal(other[1].weight, model[0].weight)


def test_unreadable_states_are_reported(tmp_path):
    path = saved(tmp_path)
    (path / "training_state.pt").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="checkpoint-1' is damaged: training_state.pt has 4 bytes"):
        load_training_state(path)
    (path / "spec.json").write_text("{")
    with pytest.raises(CheckpointError, match="spec.json' cannot be read"):
        load_spec(path)


WRITTEN = json.dumps({"observation": {"state": [[3], "float32"]}, "action_dim": 2, "video_cameras": ["head"]})


@pytest.mark.parametrize(
    "content, why",
    [
        (b"{}", "observation: Field required"),
        (b"[]", "Input should be an object"),
        (WRITTEN[:-1] + ', "more": 1}', "more: Unexpected keyword argument"),
        (WRITTEN.replace('{"state": [[3], "float32"]}', "[1]"), "observation: Input should be an object"),
        (WRITTEN.replace("2,", '"two",'), "action_dim: Input should be a valid integer"),
        (WRITTEN.replace("head", "\\ud800"), "Invalid JSON"),
        (b"\xff" + WRITTEN.encode(), "Invalid JSON"),
        (3000 * b"[", "Invalid JSON: recursion limit"),
        (b" " * (17 << 20), "larger than the limit of 17 MB"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else "",
)
def test_invalid_spec_is_refused(tmp_path, content, why):
    (tmp_path / "spec.json").write_bytes(WRITTEN.encode())
    assert load_spec(tmp_path) == EnvSpec({"state": ((3,), "float32")}, 2, video_cameras=("head",))
    (tmp_path / "spec.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=f"spec.json' cannot be read: {why}"):
        load_spec(tmp_path)


# ---- manifests


class Network(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        self.normalizer = RunningNormalizer(3)
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Parameter(torch.randn(4, 3, generator=generator))
        self.second = nn.Parameter(torch.randn(4, 3, generator=generator))
        self.normalizer.update(torch.randn(10, 3, generator=generator))


def test_manifest_lists_files_tensors_update_and_config(tmp_path):
    path = saved(tmp_path, 3, Network())
    manifest = read_manifest(path)
    assert sorted(manifest["files"]) == ["config.yaml", "model.safetensors", "spec.json", "training_state.pt"]
    assert manifest["update"] == 3 and manifest["config"] == manifest["files"]["config.yaml"]["sha256"]
    assert manifest["tensors"]["first"] == ["F32", [4, 3]] and manifest["tensors"]["normalizer.count"] == ["F64", []]
    assert damage_of(path) == []


def flipped(file, bit):
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "training_state.pt", "config.yaml", "spec.json", "manifest.json"]
)
def test_flipped_bits_are_detected(tmp_path, name, monkeypatch):
    """A damaged checkpoint is refused by name; for a run the previous one is used, with a warning."""
    warnings = []
    monkeypatch.setattr(module.log, "warning", lambda words, *values: warnings.append(words % values))
    saved(tmp_path, 1, Network(1))
    path = saved(tmp_path, 2, Network(2))
    whole, file = {each.name: each.read_bytes() for each in path.iterdir()}, path / name
    bits = 8 * len(whole[name])
    for bit in random.Random(0).sample(range(bits), min(bits, 60)):
        flipped(file, bit)
        module._reported.clear()
        try:
            found = find_checkpoint(tmp_path)
        finally:
            damaged = damage_of(path)
            file.write_bytes(whole[name])
        # signature and spaces of a manifest do not affect the content
        if name == "manifest.json" and not damaged:
            assert found == path
            continue
        assert damaged and found.name == "checkpoint-1" and "checkpoint-1 is used instead" in warnings[-1]
        assert "'" + str(path) + "' is damaged (" in warnings[-1]
        flipped(file, bit)
        with pytest.raises(CheckpointError, match="checkpoint-2' is damaged: .*; use another checkpoint"):
            load_weights(Network(), path)
        file.write_bytes(whole[name])
    assert find_checkpoint(tmp_path) == path and len(warnings) > 20


def replaced_by_a_folder(path, name):
    (path / name).unlink()
    (path / name).mkdir()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path, name: (path / name).unlink(),
        lambda path, name: (path / name).write_bytes(b""),
        lambda path, name: (path / name).write_bytes((path / name).read_bytes()[:-2]),
        lambda path, name: (path / name).write_bytes((path / name).read_bytes() + b"xyz"),
        lambda path, name: (path / name).write_bytes(bytes(len((path / name).read_bytes()))),
        replaced_by_a_folder,
    ],
    ids=["gone", "empty", "cut", "longer", "zeros", "a folder"],
)
@pytest.mark.parametrize(
    "name", ["model.safetensors", "training_state.pt", "config.yaml", "spec.json", "manifest.json"]
)
def test_damaged_files_are_never_used(tmp_path, damage, name):
    saved(tmp_path, 1)
    path = saved(tmp_path, 2)
    damage(path, name)
    with pytest.raises(CheckpointError, match="checkpoint-2' is damaged"):
        find_checkpoint(path)
    assert find_checkpoint(tmp_path).name == "checkpoint-1"


def test_exchanged_files_of_checkpoints_are_detected(tmp_path):
    for update in (4, 8):
        saved(tmp_path, update, Network(update))
    four, eight = checkpoints(tmp_path)
    shutil.copytree(four, tmp_path / "checkpoint-0005")
    shutil.copytree(four, tmp_path / "checkpoint-6")
    assert damage_of(tmp_path / "checkpoint-6") == ["it was saved as checkpoint-4"]
    assert damage_of(tmp_path / "checkpoint-0005") == ["it was saved as checkpoint-4"]
    for name in ("model.safetensors", "training_state.pt"):
        shutil.copy(eight / name, tmp_path / "checkpoint-6" / name)
        assert any(name in what for what in damage_of(tmp_path / "checkpoint-6"))
    # a copy under another name is valid
    assert damage_of(shutil.copytree(four, tmp_path / "best")) == []
    shutil.rmtree(eight)
    (tmp_path / "checkpoint-7").mkdir()
    (tmp_path / "checkpoint-9").write_text("")
    assert find_checkpoint(tmp_path) == four


def test_run_with_only_damaged_checkpoints_is_refused(tmp_path):
    for update in (1, 2):
        (saved(tmp_path, update) / "spec.json").unlink()
    with pytest.raises(
        CheckpointError, match="all of its checkpoints are damaged:\n  checkpoint-2: spec.json is missing"
    ):
        find_checkpoint(tmp_path)


def test_bare_weights_need_no_manifest_but_checkpoints_do(tmp_path):
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    (tmp_path / "theirs").mkdir()
    save_file(model.state_dict(), tmp_path / "theirs/model.safetensors")
    for path in (tmp_path / "theirs", tmp_path / "theirs/model.safetensors"):
        load_weights(other, path)
        assert torch.equal(model.weight, other.weight)
    path = saved(tmp_path, 1, model)
    (path / "manifest.json").unlink()
    for given in (path, path / "model.safetensors", path.rename(tmp_path / "renamed")):
        with pytest.raises(CheckpointError, match="it has no manifest.json" if given.exists() else "does not exist"):
            find_checkpoint(given)


def test_large_models_are_saved_in_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SHARD_BYTES", 60)
    path, other = saved(tmp_path, 1, Network(1)), Network()
    shards = sorted(file.name for file in path.glob("*.safetensors"))
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors" and len(shards) == 4
    weight_map = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map.keys() == Network().state_dict().keys() and sorted(set(weight_map.values())) == shards
    load_weights(other, path)
    assert all(
        torch.equal(a, b) for a, b in zip(Network(1).state_dict().values(), other.state_dict().values(), strict=True)
    )
    (path / shards[1]).unlink()
    with pytest.raises(CheckpointError, match=f"{shards[1]} is missing"):
        load_weights(other, path)


@pytest.mark.parametrize("name", ["model.safetensors", "model-00009-of-00009.safetensors", "model.pt"])
@pytest.mark.parametrize("kind", ["checkpoint", "trusted"])
def test_unlisted_weight_files_are_damage(tmp_path, monkeypatch, name, kind):
    """`model.safetensors` would be loaded instead of the shards."""
    monkeypatch.setattr(module, "SHARD_BYTES", 60)
    path, other = saved(tmp_path, 1, Network(1)), Network()
    if kind == "trusted":
        (path / "manifest.json").unlink()
        sign(path, "config.yaml", [file.name for file in path.iterdir()])
    load_weights(other, path)
    save_file(Network(2).state_dict(), path / name)
    assert damage_of(path) == [f"{name} is not in manifest.json"]
    with pytest.raises(CheckpointError, match="is damaged"):
        load_weights(other, path)
    (path / name).unlink()
    assert damage_of(path) == []


@pytest.mark.parametrize("weight_map", ["[" * 3000, '{"a": [1]}', "[]", '"' + "x" * (17 << 20) + '"'], ids=len)
def test_invalid_index_is_refused(tmp_path, weight_map):
    file = tmp_path / "model.safetensors.index.json"
    file.write_text(f'{{"weight_map": {weight_map}}}')
    with pytest.raises(CheckpointError, match="cannot be read as an index of weights"):
        load_weights(Network(), tmp_path)


def test_weight_files_equal_those_of_safetensors(tmp_path):
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for dtype in module._DTYPES:
        for name, shape in {"b": (3, 5), "a": (), "empty": (0, 4), 'é"\n/': (7,)}.items():
            values = torch.randint(0, 100, shape, generator=generator)
            weights[f"{name}.{dtype}"] = values.to(dtype) if dtype != torch.bool else values > 50
    with HashedFile(tmp_path / "ours") as file:
        module._write_weights(file, weights)
    assert (tmp_path / "ours").read_bytes() == save(weights)
    # views and tied weights, which safetensors refuses
    whole = torch.arange(24.0).reshape(4, 6)
    views = {"whole": whole, "tied": whole, "part": whole[1:3], "transposed": whole.T, "strided": whole[:, ::2]}
    with HashedFile(tmp_path / "ours") as file:
        module._write_weights(file, views)
    alone = {name: value.clone().contiguous() for name, value in views.items()}
    assert (tmp_path / "ours").read_bytes() == save(alone)
    assert all(torch.equal(value, views[name]) for name, value in load_file(tmp_path / "ours").items())


def to(dtype):
    return lambda weights: {name: tensor.to(dtype) for name, tensor in weights.items()}


def put(name, value):
    def edit(weights):
        weights[name].view(-1)[0] = value
        return weights

    return edit


WEIGHTS = {
    "one NaN": (put("first", float("nan")), "NaN, infinite or impossible numbers in first; use another checkpoint"),
    "one inf": (put("first", float("inf")), "NaN, infinite or impossible numbers in first"),
    "normaliser NaN": (put("normalizer.mean", float("nan")), "in normalizer.mean"),
    "normaliser inf": (put("normalizer.scale", float("inf")), "in normalizer.scale"),
    "variance negative": (put("normalizer.var", -1.0), "in normalizer.var .negative."),
    "count negative": (put("normalizer.count", -5), "in normalizer.count .negative."),
    "float16": (to(torch.float16), "of another dtype: .*first float16 instead of float32"),
    "float64": (to(torch.float64), "of another dtype: .*first float64 instead of float32"),
    "int8": (to(torch.int8), "of another dtype"),
    "bool": (to(torch.bool), "of another dtype"),
    "float8": (to(torch.float8_e4m3fn), "of another dtype"),
    "missing": (lambda weights: {n: w for n, w in weights.items() if n != "first"}, "1 missing: first"),
    "added": (lambda weights: weights | {"extra": torch.zeros(3)}, "1 unexpected: extra"),
    "transposed": (lambda weights: weights | {"first": weights["first"].T.contiguous()}, r"first \[3, 4\] instead of"),
    "a row more": (lambda weights: weights | {"first": torch.zeros(5, 3)}, r"first \[5, 3\] instead of \[4, 3\]"),
}


@pytest.mark.parametrize(("edit", "message"), WEIGHTS.values(), ids=WEIGHTS.keys())
def test_unusable_weights_are_refused_with_and_without_a_manifest(tmp_path, edit, message):
    path, model = saved(tmp_path, 1, Network()), Network(5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(edit(load_file(path / "model.safetensors")), path / "model.safetensors")
    with pytest.raises(CheckpointError, match="checkpoint-1' is damaged: model.safetensors "):
        load_weights(model, path)
    seal(path)
    bare = shutil.copy(path / "model.safetensors", tmp_path / "bare.safetensors")
    for given in (path, bare):
        with pytest.raises(CheckpointError, match=message):
            load_weights(model, given)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_infinite_mask_is_no_damage(tmp_path):
    model = nn.Linear(3, 2)
    model.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    assert module.not_finite(model, model.state_dict()) is None
    model.mask[0] = float("nan")
    assert module.not_finite(model, model.state_dict()) == "mask"


def test_damaged_checkpoint_is_renamed_when_its_update_is_saved_again(tmp_path):
    for update in (1, 2, 3):
        saved(tmp_path, update, Network(update))
    flipped(tmp_path / "checkpoint-3/model.safetensors", 800)
    broken = (tmp_path / "checkpoint-3/model.safetensors").read_bytes()
    # a damaged checkpoint does not count as kept
    remove_old(tmp_path, 1, tmp_path / "checkpoint-2")
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-3"]
    saved(tmp_path, 3, Network(3))
    assert damage_of(tmp_path / "checkpoint-3") == []
    assert (tmp_path / "damaged-checkpoint-3/model.safetensors").read_bytes() == broken
    flipped(tmp_path / "checkpoint-3/model.safetensors", 800)
    saved(tmp_path, 3, Network(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("checkpoint-2", "checkpoint-3", "damaged-checkpoint-3", "damaged-checkpoint-3-2")
    ]


def test_unchanged_checkpoint_is_verified_once(tmp_path, monkeypatch):
    path, read = saved(tmp_path, 1), []
    monkeypatch.setattr(module, "damage", lambda folder, manifest, names: read.extend(names) or [])
    for _ in range(3):
        load_weights(nn.Linear(3, 2), path)
        find_checkpoint(tmp_path)
    assert sorted(read) == ["config.yaml", "model.safetensors", "spec.json", "training_state.pt"]
