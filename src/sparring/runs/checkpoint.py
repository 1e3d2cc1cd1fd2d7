"""Checkpoints: written whole or not at all, read strictly.

checkpoint-<n>/
  model.safetensors     weights and normaliser statistics
  training_state.pt     optimiser, counters, random states, where the robots are (tensors and plain values only)
  config.yaml           the resolved config of the run
  spec.json             what the env showed and accepted, so that the policy can be rebuilt without it
"""

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from sparring.contract import EnvSpec
from sparring.errors import UserError
from sparring.processes.files import flush
from sparring.processes.manifest import entry, write_manifest
from sparring.runs.listing import why_no_checkpoint


class CheckpointError(UserError):
    """A checkpoint that cannot be used, and why."""


def save_checkpoint(folder: Path, update: int, model: nn.Module, state: dict, config_yaml: str, spec: EnvSpec) -> Path:
    """Write `folder/checkpoint-<update>`. Killed at any moment, it leaves the earlier ones as they were."""
    target = folder / f"checkpoint-{update}"
    if target.exists():  # the same update saved twice holds the same
        return target
    partial = folder / f".partial-checkpoint-{update}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    # cloned, because safetensors refuses tensors that share memory: tied weights, or views of one vector
    weights = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, partial / "model.safetensors")
    torch.save(state, partial / "training_state.pt")
    (partial / "config.yaml").write_text(config_yaml)
    (partial / "spec.json").write_text(json.dumps(asdict(spec), indent=2))
    write_manifest(partial, "checkpoint", {path.name: entry(path) for path in sorted(partial.iterdir())})
    for path in (*partial.iterdir(), partial):
        flush(path)
    partial.rename(target)
    flush(folder)
    return target


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run folder, oldest first."""
    found = [path for path in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def remove_old(folder: Path, keep: int) -> None:
    """Keep the newest checkpoints, and none of what an interrupted save left behind."""
    for path in [*checkpoints(folder)[:-keep], *folder.glob(".partial-checkpoint-*")]:
        shutil.rmtree(path, ignore_errors=True)


def find_checkpoint(path: str | Path) -> Path:
    """A checkpoint folder itself, or the newest one of a run folder."""
    path = Path(path)
    if weights_file(path):
        return path
    if not path.exists():
        raise CheckpointError(f"'{path}' does not exist; give a run folder or a checkpoint folder")
    found = checkpoints(path) if path.is_dir() else []
    if not found:
        nothing = f"'{path}' holds no checkpoint (no checkpoint-<n> folder, no model.safetensors or model.pt)"
        raise CheckpointError(why_no_checkpoint(path) or nothing)
    return found[-1]


def checkpoint_folder(path: str | Path) -> Path:
    """Like `find_checkpoint`, but always a folder with a config, from which a policy can be rebuilt."""
    found = find_checkpoint(path)
    folder = found.parent if found.is_file() else found
    if not (folder / "config.yaml").is_file():
        lacks = ": no config.yaml is beside it" if found.is_file() else " has weights but no config.yaml"
        advice = "give a run folder or a checkpoint folder"
        raise CheckpointError(f"'{found}'{lacks}, to tell what it holds weights of; {advice}")
    return folder


def weights_file(path: Path) -> Path | None:
    if path.is_file():
        return path
    return next((path / name for name in ("model.safetensors", "model.pt") if (path / name).is_file()), None)


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix != ".safetensors":
        loaded = _torch_load(file)
        return loaded["model"] if isinstance(loaded.get("model"), dict) else loaded
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        why = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"'{file}' cannot be read as weights: {why}") from None


def load_training_state(checkpoint: Path) -> dict:
    file = checkpoint / "training_state.pt"
    if not file.is_file():
        advice = f"to start from its weights alone: pretrained={checkpoint}"
        raise CheckpointError(f"'{checkpoint}' has no training_state.pt, so a run cannot go on from it; {advice}")
    return _torch_load(file)


def _torch_load(file: Path) -> dict:
    """Tensors and plain values only: nothing in the file can run."""
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # an unpickler that meets broken bytes may raise anything
        why = "it is damaged, or holds more than tensors and plain values; use another one"
        raise CheckpointError(f"'{file}' cannot be read: {why}") from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"'{file}' cannot be read: it holds a {type(loaded).__name__}, not names with tensors")
    return loaded


def load_spec(checkpoint: Path) -> EnvSpec:
    file = checkpoint / "spec.json"
    if not file.is_file():
        raise CheckpointError(f"'{checkpoint}' has no spec.json; it was not written by this library")
    try:
        values = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise CheckpointError(f"'{file}' cannot be read: {error}") from None
    values["observation"] = {name: (tuple(shape), dtype) for name, (shape, dtype) in values["observation"].items()}
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return EnvSpec(**given)
