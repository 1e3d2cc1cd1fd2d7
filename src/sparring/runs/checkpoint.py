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
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from sparring.config.text import read_settings
from sparring.contract import EnvSpec
from sparring.errors import UserError
from sparring.processes.files import flush
from sparring.runs.listing import why_no_checkpoint

# settings of an env that leave all shapes as they are and change what an action does
SAME_MEANING = ("control_mode", "action_scale")
# of a critic: what checkpoints had not before ppo.normalize_value, and that changes nothing until it is fitted
_LATER = "critic.returns."


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
        what = (
            f"'{found}': no config.yaml is beside it"
            if found.is_file()
            else f"'{found}' has weights but no config.yaml"
        )
        raise CheckpointError(f"{what}, to tell what it holds weights of; give a run folder or a checkpoint folder")
    return folder


def weights_file(path: Path) -> Path | None:
    if path.is_file():
        return path
    return next((path / name for name in ("model.safetensors", "model.pt") if (path / name).is_file()), None)


# in the names of LoRA's weights
_ADAPTER = ".lora_"


@dataclass(frozen=True)
class Loaded:
    """What came of loading weights."""

    tensors: int
    # those of the model that were not there, and may be new
    new: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.tensors} tensors, all that there are" + (f"; new: {_some(list(self.new))}" if self.new else "")


def load_weights(
    model: nn.Module,
    path: str | Path,
    prefix: str = "",
    may_be_new: tuple[str, ...] = (),
    of_plain: bool = False,
) -> Loaded:
    """Strictly: every key present, none left over, every shape equal; or nothing is changed and all is told.

    A part of the model whose name (with a dot) is in `may_be_new` keeps its fresh weights where none of them are given.
    `prefix`: of a checkpoint that holds several models, whose keys begin so. `of_plain`: a model with LoRA adapters
    also takes weights of one without, and its adapters are new then.
    """
    file = weights_file(find_checkpoint(path))
    expected = model.state_dict()
    later = tuple({key[: key.index(_LATER) + len(_LATER)] for key in expected if _LATER in key})
    may_be_new += later
    given = {key.removeprefix(prefix): w for key, w in read_weights(file).items() if key.startswith(prefix)}
    if of_plain and not any(_ADAPTER in key for key in given):
        given = _beside_adapters(given, expected)
        may_be_new += tuple(key for key in expected if _ADAPTER in key)
    absent = tuple(part for part in may_be_new if not any(key.startswith(part) for key in given))
    new = tuple(key for key in expected if absent and key.startswith(absent))
    missing = [key for key in expected if key not in given and key not in new]
    unexpected = [key for key in given if key not in expected]
    reshaped = [
        f"{key} {list(given[key].shape)} instead of {list(expected[key].shape)}"
        for key in expected
        if key in given and given[key].shape != expected[key].shape
    ]
    problems = {"missing": missing, "unexpected": unexpected, "of another shape": reshaped}
    told = "; ".join(f"{len(keys)} {what}: {_some(keys)}" for what, keys in problems.items() if keys)
    if told:
        raise CheckpointError(
            f"'{file}' does not fit this model: {told}. Use the config it was trained with (config.yaml beside it)"
        )
    # what is not in `given` may be new
    model.load_state_dict(given, strict=not new)
    return Loaded(len(given), tuple(key for key in new if not key.startswith(later)))


def _beside_adapters(given: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of a plain network, by the names they have in one with LoRA adapters: those are new then."""
    plain = {key.replace(".base_layer.", "."): key for key in expected}
    return {plain.get(key, key): weight for key, weight in given.items()}


def load_pretrained(model: nn.Module, path: str | Path, env) -> Loaded:
    """The weights of another run, in an env that must show and accept what its env did."""
    found = find_checkpoint(path)
    folder = found.parent if found.is_file() else found
    differences = []
    if (folder / "spec.json").is_file():
        differences += spec_differences(load_spec(folder), env.spec)
    if (folder / "config.yaml").is_file():
        trained = {setting.key: setting.value for setting in read_settings(folder / "config.yaml")}
        # a padded state does not tell by its shape what is in it
        for key in (*SAME_MEANING, "object_state"):
            now = getattr(env.config, key, None)
            if trained.get(f"env.{key}", now) != now:
                differences.append(f"env.{key} was {trained[f'env.{key}']} and is {now}")
    if differences:
        raise CheckpointError(
            "\n".join(
                [f"pretrained={path}: was trained in another env; leave out what you gave, or train another:"]
                + differences
            )
        )
    return load_weights(model, path, may_be_new=getattr(model, "may_be_new", ()), of_plain=True)


def spec_differences(trained: EnvSpec, now: EnvSpec) -> list[str]:
    """What a policy sees and does, where it differs; in words."""
    shown = sorted(trained.observation.keys() | now.observation.keys())
    found = [
        f"observation/{name} was {_shape(trained, name)} and is {_shape(now, name)}"
        for name in shown
        if trained.observation.get(name) != now.observation.get(name)
    ]
    for name in ("action_dim", "discrete_actions", "action_padding"):
        then, present = getattr(trained, name), getattr(now, name)
        found += [f"{name} was {then} and is {present}"] if then != present else []
    return found


def _shape(spec: EnvSpec, name: str) -> str:
    if name not in spec.observation:
        return "not there"
    shape, dtype = spec.observation[name]
    return f"{list(shape)} {dtype}"


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix != ".safetensors":
        loaded = _torch_load(file)
        return loaded["model"] if isinstance(loaded.get("model"), dict) else loaded
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"'{file}' cannot be read as weights: {_first_line(error)}") from None


def load_training_state(checkpoint: Path) -> dict:
    file = checkpoint / "training_state.pt"
    if not file.is_file():
        raise CheckpointError(
            f"'{checkpoint}' has no training_state.pt, so a run cannot go on from it; "
            f"to start from its weights alone: pretrained={checkpoint}"
        )
    return _torch_load(file)


def _torch_load(file: Path) -> dict:
    """Tensors and plain values only: nothing in the file can run."""
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # an unpickler that meets broken bytes may raise anything
        raise CheckpointError(
            f"'{file}' cannot be read: it is damaged, or holds more than tensors and plain values; use another one"
        ) from error
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
    for name in {"task_names", "instructions", "hand_entries", "object_entries", "film_cameras"} & values.keys():
        values[name] = tuple(values[name])
    return EnvSpec(**values)


def _some(keys: list[str], most: int = 6) -> str:
    return ", ".join(keys[:most]) + (f" and {len(keys) - most} more" if len(keys) > most else "")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
