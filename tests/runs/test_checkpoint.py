"""Checkpoints are whole or absent, and loading is strict."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from sparring.contract import EnvSpec
from sparring.runs.checkpoint import (
    CheckpointError,
    checkpoints,
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


def test_what_is_saved_is_what_is_loaded(tmp_path):
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


def test_newest_is_by_number_not_by_name(tmp_path):
    for update in (9, 10, 100):
        saved(tmp_path, update)
    (tmp_path / ".partial-checkpoint-200").mkdir()
    (tmp_path / "checkpoint-notes").mkdir()
    assert [p.name for p in checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10", "checkpoint-100"]
    assert find_checkpoint(tmp_path).name == "checkpoint-100"
    remove_old(tmp_path, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-100", "checkpoint-notes"]


def test_strict_loading_reports_all_and_changes_nothing(tmp_path):
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


def test_torn_and_missing_files_are_told(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        find_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        find_checkpoint(tmp_path)
    path = saved(tmp_path)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:40])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_weights(nn.Linear(3, 2), path)
    (path / "training_state.pt").unlink()
    with pytest.raises(CheckpointError, match="pretrained="):
        load_training_state(path)


def test_kill_9_while_writing_leaves_the_earlier_checkpoint_alone(tmp_path):
    """The child dies inside torch.save, with half of the new checkpoint on disk."""
    child = textwrap.dedent("""
        import os, signal, sys, torch
        from pathlib import Path
        from torch import nn
        from sparring.runs.checkpoint import save_checkpoint
        from sparring.envs.backend import EnvSpec
        folder, spec = Path(sys.argv[1]), EnvSpec({}, 1)
        save_checkpoint(folder, 1, nn.Linear(3, 2), {"n": 1}, "", spec)
        def half_a_save(state, path):
            Path(path).write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        torch.save = half_a_save
        save_checkpoint(folder, 2, nn.Linear(3, 2), {"n": 2}, "", spec)
    """)
    done = subprocess.run([sys.executable, "-c", child, str(tmp_path)], env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / ".partial-checkpoint-2" / "training_state.pt").exists()
    assert find_checkpoint(tmp_path).name == "checkpoint-1"
    assert load_training_state(find_checkpoint(tmp_path)) == {"n": 1}
    # going on: the second one is written again, and the remains are gone
    saved(tmp_path, 2)
    remove_old(tmp_path, keep=5)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["checkpoint-1", "checkpoint-2"]


def test_tied_weights_are_saved_and_an_equal_update_is_not_written_twice(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    path = saved(tmp_path, 1, model)
    written = (path / "model.safetensors").stat().st_mtime_ns
    assert saved(tmp_path, 1, model) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == written
    other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    load_weights(other, tmp_path)  # a run folder will do
    assert torch.equal(other[1].weight, model[0].weight)


def test_unreadable_states_are_told(tmp_path):
    path = saved(tmp_path)
    (path / "training_state.pt").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="training_state.pt' cannot be read"):
        load_training_state(path)
    (path / "spec.json").write_text("{")
    with pytest.raises(CheckpointError, match="spec.json' cannot be read"):
        load_spec(path)
