"""A folder with a native VLA: its weights and its sizes. Also reads transformers' pi0."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import safetensors
from safetensors.torch import load_file, save_file
from torch import nn

from sparring.errors import UserError
from sparring.policies.lora import refuse_adapters
from sparring.policies.native.convert import Weights, from_transformers
from sparring.policies.native.model import NativeModel
from sparring.policies.native.presets import Sizes
from sparring.policies.pi0.checkpoint import load_pi0, read_json

_SIZES, _WEIGHTS, _THEIR_CONFIG, TOKENIZER = "native_vla.json", "model.safetensors", "config.json", "tokenizer.json"


def save_model(model: NativeModel, folder: str | Path, tokenizer: str | Path | None = None) -> None:
    """Weights and sizes, for policy.model_path; with the `tokenizer.json` of a folder, where the model has one."""
    refuse_adapters(model, "save_model")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, folder / _WEIGHTS)
    (folder / _SIZES).write_text(json.dumps(asdict(model.sizes), indent=2) + "\n")
    if tokenizer is not None:
        shutil.copyfile(Path(tokenizer) / TOKENIZER, folder / TOKENIZER)


class Saved(NamedTuple):
    weights: Weights
    sizes: Sizes
    # how a pi0 plans, where it is one
    horizon: int | None = None
    sampling_steps: int | None = None


def read_model(folder: str | Path, key: str = "policy.model_path") -> Saved:
    """Of a folder that `save_model` wrote, or that transformers saved a pi0 to. `key`: what it was given as."""
    path = Path(folder).expanduser()
    if (path / _SIZES).is_file():
        return _read_own(path)
    config = path / _THEIR_CONFIG
    if config.is_file():
        kind = read_json(config).get("model_type")
        if kind != "pi0":
            hint = "; for another one see policy.name=vla" if key.startswith("policy.") else ""
            raise UserError(f"{key}={folder} holds a model of type {kind!r}, expected 'pi0'{hint}")
        pi0 = load_pi0(folder, dtype="auto", key=key)
        return Saved(*from_transformers(pi0), pi0.config.chunk_size, pi0.config.num_inference_steps)
    missing = "a file, not a folder" if path.is_file() else "no such folder"
    found = ", ".join(sorted(each.name for each in path.iterdir())[:8]) if path.is_dir() else missing
    raise UserError(
        f"{key}={folder}: neither {_SIZES} (a native VLA) nor {_THEIR_CONFIG} (transformers' pi0) is there "
        f"({found}); give a folder with one of them"
    )


def is_own(folder: str | Path) -> bool:
    return (Path(folder).expanduser() / _SIZES).is_file()


def _read_own(path: Path) -> Saved:
    try:
        sizes = Sizes(**read_json(path / _SIZES))
        return Saved(load_file(path / _WEIGHTS), sizes)
    except (UserError, TypeError, OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path} is no whole checkpoint of a native VLA: {error}") from error


def load_into(model: nn.Module, weights: Weights, folder: str, key: str = "policy.model_path") -> None:
    """Strictly; a memory may be new."""
    own = model.state_dict()
    missing = [name for name in own if name not in weights and not name.startswith("memory_in.")]
    unexpected = [name for name in weights if name not in own]
    reshaped = [
        f"{name} {tuple(value.shape)} instead of {tuple(own[name].shape)}"
        for name, value in weights.items()
        if name in own and value.shape != own[name].shape
    ]
    wrong = {"missing": missing, "unexpected": unexpected, "of another shape": reshaped}
    told = [f"{len(names)} {kind}: {', '.join(names[:5])}" for kind, names in wrong.items() if names]
    if told:
        raise UserError(f"the weights in {key}={folder} do not fit: {'; '.join(told)}")
    model.load_state_dict(weights, strict=False)
