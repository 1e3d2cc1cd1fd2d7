"""Reading checkpoints of others. Nothing in them is ever executed: tensors and plain values only."""

import json
import pickle
import re
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from sparring.errors import UserError

Weights = dict[str, torch.Tensor]

_PICKLED = (".pth", ".pt", ".bin", ".ckpt")
_INDEX = ".index.json"
# in a folder, the first that is there
_IN_FOLDER = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "model.pt",
    "model.pth",
)
# where training scripts put the weights, beside optimisers and counters
_INSIDE = ("model", "state_dict", "model_state_dict", "module")
# what wrappers put before every name
_WRAPPED = ("module.", "_orig_mod.")


def weights_of(path: str | Path) -> Path:
    """The file that holds the weights, or tells where they are: `path`, or the one in this folder."""
    path = Path(path)
    if not path.exists():
        near = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
        there = f"in '{path.parent}' there are: {', '.join(sorted(near)[:10]) or 'no files'}"
        raise UserError(f"policy.model_path '{path}' does not exist; {there if path.parent.is_dir() else 'check it'}")
    if path.is_file():
        return path
    found = next((path / name for name in _IN_FOLDER if (path / name).is_file()), None)
    if found is None:
        raise UserError(f"policy.model_path '{path}': this folder has no weights; expected {', '.join(_IN_FOLDER)}")
    return found


def read_weights(path: str | Path, own: Collection[str] = ()) -> Weights:
    """Names and tensors, on the CPU; without what wrappers put before names, unless the model's `own` are so."""
    weights = _read(weights_of(path))
    for prefix in _WRAPPED:
        if weights.keys().isdisjoint(own) and all(name.startswith(prefix) for name in weights):
            weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return weights


def _read(file: Path) -> Weights:
    if file.name.endswith(_INDEX):
        return _read_shards(file)
    if file.suffix == ".safetensors":
        return _read_safetensors(file)
    if file.suffix in _PICKLED:
        return _read_pickled(file)
    raise UserError(
        f"policy.model_path '{file}': '{file.suffix}' is no kind of weights; expected .safetensors, .safetensors.index"
        f".json, {', '.join(_PICKLED)}, or a folder in Hugging Face format"
    )


def _read_shards(index: Path) -> Weights:
    try:
        places = json.loads(index.read_text())["weight_map"]
        shards = sorted(set(places.values()))
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        raise UserError(f"'{index}': is no index of weights; expected JSON with a 'weight_map'") from None
    outside = [name for name in shards if not isinstance(name, str) or Path(name).name != name]
    if outside:
        raise UserError(f"'{index}': names files outside its folder ({outside[0]!r}); shards must lie beside it")
    absent = [name for name in shards if not (index.parent / name).is_file()]
    if absent:
        raise UserError(
            f"'{index}': {len(absent)} of {len(shards)} shards are missing: {', '.join(absent)}; fetch them"
        )
    weights: Weights = {}
    for name in shards:
        weights |= _read(index.parent / name)
    lost = [name for name in places if name not in weights]
    if lost:
        raise UserError(f"'{index}': its shards do not hold {', '.join(lost)}, which it names; fetch them again")
    return weights


def _read_safetensors(file: Path) -> Weights:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"'{file}' cannot be read as safetensors ({_first_line(error)}); fetch it again") from None


def _read_pickled(file: Path) -> Weights:
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        code = re.search(r"GLOBAL (\S+)", str(error))
        if code is None:
            raise UserError(f"'{file}' cannot be read: it is damaged, or no torch checkpoint; fetch it again") from None
        raise UserError(_refusal(file, code.group(1))) from None
    except (RuntimeError, EOFError, OSError, KeyError, ValueError) as error:
        raise UserError(
            f"'{file}' cannot be read as a torch checkpoint ({_first_line(error)}); fetch it again"
        ) from None
    inside = loaded
    for name in _INSIDE:
        if isinstance(inside, dict) and isinstance(inside.get(name), dict):
            inside = inside[name]
    if not isinstance(inside, dict) or not inside or not all(isinstance(x, torch.Tensor) for x in inside.values()):
        holds = ", ".join(map(str, list(inside)[:8])) if isinstance(inside, dict) else f"a {type(inside).__name__}"
        raise UserError(
            f"'{file}': holds {holds or 'nothing'}; expected names with tensors, at its top or under "
            f"{', '.join(_INSIDE)}"
        )
    return inside


def _refusal(file: Path, code: str) -> str:
    safe = file.with_suffix(".safetensors")
    convert = (
        "import torch; from safetensors.torch import save_file; "
        f"m = torch.load('{file}', map_location='cpu', weights_only=False); "
        "m = m.state_dict() if hasattr(m, 'state_dict') else m; "
        f"save_file({{k: v.clone().contiguous() for k, v in m.items()}}, '{safe}')"
    )
    return (
        f"'{file}' is refused: it holds pickled code ({code}), and to load it would be to run it. If you trust whoever "
        f'made it, convert it once, where that code is installed: python -c "{convert}"; then give '
        f"policy.model_path={safe}"
    )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
