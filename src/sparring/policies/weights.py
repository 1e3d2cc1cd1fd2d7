"""Weights of checkpoints: reads files without executing code, compares them with a model, selects weights by name."""

import difflib
import fnmatch
import heapq
import json
import math
import pickle
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from sparring.errors import UserError

Weights = dict[str, torch.Tensor]

_PICKLED = (".pth", ".pt", ".bin", ".ckpt")
_INDEX = ".index.json"
# files with weights in a folder; the first existing one is read
_IN_FOLDER: tuple[str, ...] = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
_IN_FOLDER += ("pytorch_model.bin.index.json", "model.pt", "model.pth")
# keys under which training scripts store the weights, next to optimiser states and counters
_INSIDE = ("model", "state_dict", "model_state_dict", "module")
_WRAPPED = ("module.", "_orig_mod.")  # prefixes that wrappers add to every name
# maximum number of names that an error lists: one per line, in a sentence; and of candidates for the nearest name
_MOST_LINES, _MOST_IN_SENTENCE, _CANDIDATES = 20, 6, 8


@dataclass(frozen=True)
class WeightsFit:
    """Differences between a checkpoint and a model; `reshaped`: (name, shape in the checkpoint, in the model)."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    reshaped: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]

    @classmethod
    def of(cls, expected: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], new: tuple[str, ...] = ()):
        # weights with two names are often saved under one of them
        given = {expected[name].data_ptr() for name in weights if name in expected and expected[name].numel()}
        missing = [n for n, x in expected.items() if n not in weights and not (x.numel() and x.data_ptr() in given)]
        unlike = [n for n, x in expected.items() if n in weights and weights[n].shape != x.shape]
        reshaped = [(name, tuple(weights[name].shape), tuple(expected[name].shape)) for name in unlike]
        missing = [name for name in missing if not name.startswith(new)] if new else missing
        return cls(tuple(missing), tuple(name for name in weights if name not in expected), tuple(reshaped))

    @classmethod
    def of_transformers(cls, info: dict, new: tuple[str, ...] = ()):
        reshaped = tuple((name, tuple(given), tuple(here)) for name, given, here in info.get("mismatched_keys", ()))
        missing = sorted(name for name in info["missing_keys"] if not (new and name.startswith(new)))
        return cls(tuple(missing), tuple(sorted(info["unexpected_keys"])), reshaped)

    @staticmethod
    def some(names: Sequence[str]) -> str:
        """List the first names, and the number of the others."""
        more = len(names) - _MOST_IN_SENTENCE
        return ", ".join(names[:_MOST_IN_SENTENCE]) + (f" and {more} more" if more > 0 else "")

    @property
    def exact(self) -> bool:
        return not (self.missing or self.unexpected or self.reshaped)

    @property
    def sentence(self) -> str:
        """One line with the first names of each kind: '2 missing: a, b; 1 of another shape: c [2] instead of [3]'."""
        reshaped = [f"{name} {list(given)} instead of {list(here)}" for name, given, here in self.reshaped]
        kinds = {"missing": self.missing, "unexpected": self.unexpected, "of another shape": tuple(reshaped)}
        return "; ".join(f"{len(names)} {kind}: {self.some(names)}" for kind, names in kinds.items() if names)

    def __str__(self) -> str:
        reshaped = [f"{name}: {list(given)} in it, {list(here)} in the model" for name, given, here in self.reshaped]
        kinds = {
            "missing from it": [name + _nearest_of(name, self.unexpected) for name in self.missing[:_MOST_LINES]],
            "unknown to the model": [name + _nearest_of(name, self.missing) for name in self.unexpected[:_MOST_LINES]],
            "of another shape": reshaped[:_MOST_LINES],
        }
        lines = []
        for (kind, listed), names in zip(kinds.items(), (self.missing, self.unexpected, self.reshaped), strict=True):
            lines += [f"{len(names)} {kind}:", *(f"  {line}" for line in listed)] if names else []
            lines += [f"  and {len(names) - _MOST_LINES} more"] if len(names) > _MOST_LINES else []
        return "\n".join(lines)


def load_strictly(model: nn.Module, weights: Weights, source: str, new: tuple[str, ...] = ()) -> None:
    """Load all weights of the model and no others; weights whose names begin with one of `new` may be missing."""
    fit = WeightsFit.of(model.state_dict(), weights, new)
    if not fit.exact:
        raise UserError(f"the weights in {source} do not fit the model: {fit.sentence}")
    model.load_state_dict(weights, strict=False)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Load the state of an optimiser after checking that it fits its parameters and settings.

    torch checks neither shapes nor values, and a fused step reads past the end of a moment that is too small.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    try:
        saved_groups, saved = state["param_groups"], state["state"]
        numbers = [list(group["params"]) for group in saved_groups]
        wrong = [] if list(map(len, numbers)) == list(map(len, groups)) else ["it has other groups of parameters"]
        for group, current in zip(saved_groups, optimizer.param_groups, strict=False):
            # all settings but the learning rate, which a schedule changes: torch would load any of them (`maximize`)
            fixed = {"betas", "eps", "weight_decay", "base_lr"} & current.keys() | group.keys() - {"params", "lr"}
            unlike = [key for key in sorted(fixed) if group[key] != current.get(key)]
            wrong += [f"{key} is {group[key]}, expected {current.get(key)}" for key in unlike]
            wrong += [] if 0 <= group["lr"] < math.inf else [f"lr is {group['lr']}"]
        for number, parameter in zip(sum(numbers, []), sum(groups, []), strict=False):
            # empty before the first gradient step
            for name, value in saved.get(number, {}).items():
                wrong += [f"{name} of parameter {number} {fault}" for fault in _moment_errors(name, value, parameter)]
            if saved.get(number) and not {"step", "exp_avg", "exp_avg_sq"} <= saved[number].keys():
                wrong.append(f"moments of parameter {number} are missing")
    except (KeyError, TypeError, AttributeError) as error:
        wrong = [f"it has another format ({type(error).__name__}: {error})"]
    if wrong:
        raise UserError(f"the saved optimiser does not fit this run's optimiser: {WeightsFit.some(wrong)}")
    optimizer.load_state_dict(state)


def _moment_errors(name: str, value: torch.Tensor, parameter: torch.Tensor) -> Iterator[str]:
    shape, dtype = (torch.Size(), torch.float32) if name == "step" else (parameter.shape, parameter.dtype)
    if (value.shape, value.dtype) != (shape, dtype):
        yield f"is {list(value.shape)} {value.dtype}, expected {list(shape)} {dtype}"
    elif not bool(value.isfinite().all()):
        yield "holds NaN or infinity"
    elif name != "exp_avg" and bool((value < 0).any()):
        yield "is negative"


def _nearest_of(name: str, others: tuple[str, ...]) -> str:
    # preselect by common prefix and suffix: a full comparison of thousands of names takes minutes
    def similarity(other: str) -> int:
        return len(commonprefix([name, other])) + len(commonprefix([name[::-1], other[::-1]]))

    near = difflib.get_close_matches(name, heapq.nlargest(_CANDIDATES, others, key=similarity), n=1)
    return f" (nearest: {near[0]})" if near else ""


def match_names(names: Iterable[str], patterns: Iterable[str], key: str) -> list[str]:
    """Return the `names` that a pattern selects, in their order; UserError if a pattern selects none.
    A pattern is a name, the end of a name (after a dot), a glob or a regex; it selects everything inside a part too."""
    names = list(names)
    # a part is a prefix of names that ends before a dot
    parts = list(dict.fromkeys(part for name in names for part in _path(name)))
    selected: set[str] = set()
    for pattern in patterns:
        found = {part for part in parts if name_matches(pattern, part)}
        if not found:
            # nearest among whole names and their last parts: q_prj is near q_proj
            ends = {part.rpartition(".")[2]: part for part in parts} | {part: part for part in parts}
            near = [m for text in (pattern, pattern.split(".")[-1]) for m in difflib.get_close_matches(text, ends, n=1)]
            hint = f"nearest: {near[0]}" if near else f"it has {', '.join(p for p in parts if '.' not in p)}"
            raise UserError(f"{key}: '{pattern}' matches no part of the model; {hint}")
        selected |= found
    return [name for name in names if not selected.isdisjoint(_path(name))]


def name_matches(pattern: str, name: str) -> bool:
    """Whether a pattern selects `name` itself, not only a part that contains it."""
    # with a leading dot on both sides, one glob matches whole names and ends after a dot
    if fnmatch.fnmatchcase(f".{name}", f"*.{pattern}") or fnmatch.fnmatchcase(name, pattern):
        return True
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error:  # a glob such as *.q_proj is not a valid regex
        return False


def match_parameters(model: nn.Module, patterns: Iterable[str], key: str) -> list[nn.Parameter]:
    parameters = dict(model.named_parameters())
    return [parameters[name] for name in match_names(parameters, patterns, key)]


def _path(name: str) -> list[str]:
    """'a.b.c' -> 'a', 'a.b', 'a.b.c'."""
    steps = name.split(".")
    return [".".join(steps[:count]) for count in range(1, len(steps) + 1)]


def weights_file(path: str | Path) -> Path:
    """The file with the weights or their index: `path`, or a file in the folder `path`."""
    path = Path(path)
    if not path.exists():
        near = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
        files = f"'{path.parent}' contains: {', '.join(sorted(near)[:10]) or 'no files'}"
        raise UserError(f"policy.model_path '{path}' does not exist; {files if path.parent.is_dir() else 'check it'}")
    if path.is_file():
        return path
    found = next((path / name for name in _IN_FOLDER if (path / name).is_file()), None)
    if found is None:
        raise UserError(f"policy.model_path '{path}': the folder has no weights; expected {', '.join(_IN_FOLDER)}")
    return found


def read_weights(path: str | Path, own: Collection[str] = ()) -> Weights:
    """Read names and tensors to the CPU; removes prefixes of wrappers unless the model's `own` names have them."""
    weights = _read(weights_file(path))
    for prefix in _WRAPPED:
        if weights.keys().isdisjoint(own) and all(name.startswith(prefix) for name in weights):
            weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return weights


def refuse_code_of_adapters(folder: Path) -> None:
    """Raise if the folder's adapter_config.json names a module: peft, also through transformers, would import it."""
    file = folder / "adapter_config.json"
    if file.is_file() and read_json(file).get("megatron_config"):
        why = "names a module to import (megatron_core), but loading weights must not import code"
        raise UserError(f"'{file}' {why}; set its megatron_config to null if the adapters do not need it")


def read_json(file: Path) -> dict:
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"'{file}' cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"'{file}' holds a {type(values).__name__}, expected names mapped to values; download it again")
    return values


def _read(file: Path) -> Weights:
    if file.name.endswith(_INDEX):
        return _read_shards(file)
    if file.suffix == ".safetensors":
        try:
            return load_file(file)
        except (OSError, SafetensorError) as error:
            raise UserError(f"'{file}' cannot be read ({_first_line(error)}); download it again") from None
    if file.suffix in _PICKLED:
        return _read_pickled(file)
    kinds = f".safetensors, .safetensors{_INDEX}, {', '.join(_PICKLED)}, or a folder in Hugging Face format"
    raise UserError(f"policy.model_path '{file}': '{file.suffix}' is not a format of weights; expected {kinds}")


def _read_shards(index: Path) -> Weights:
    try:
        shard_of = json.loads(index.read_text())["weight_map"]
        shards = sorted(set(shard_of.values()))
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        raise UserError(f"'{index}' is not an index of weights; expected JSON with a 'weight_map'") from None
    outside = [name for name in shards if not isinstance(name, str) or Path(name).name != name]
    if outside:
        raise UserError(f"'{index}' names files outside its folder ({outside[0]!r}); put shards next to it")
    gone = [name for name in shards if not (index.parent / name).is_file()]
    if gone:
        raise UserError(f"'{index}': {len(gone)} of {len(shards)} shards are missing: {', '.join(gone)}; download them")
    weights: Weights = {}
    for name in shards:
        weights |= _read(index.parent / name)
    lost = [name for name in shard_of if name not in weights]
    if lost:
        raise UserError(f"'{index}': the shards do not hold {', '.join(lost)}; download them again")
    return weights


def _read_pickled(file: Path) -> Weights:
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        code = re.search(r"GLOBAL (\S+)", str(error))
        if code is None:
            raise UserError(f"'{file}' is damaged, or not a torch checkpoint; download it again") from None
        safe = file.with_suffix(".safetensors")
        convert = (
            f"import torch; from safetensors.torch import save_file; m = torch.load('{file}', map_location='cpu', "
            "weights_only=False); m = m.state_dict() if hasattr(m, 'state_dict') else m; "
            f"save_file({{k: v.clone().contiguous() for k, v in m.items()}}, '{safe}')"
        )
        raise UserError(
            f"'{file}' is refused: it holds pickled code ({code.group(1)}), which runs when the file is loaded. If you "
            f'trust the author, convert the file once, with that code installed: python -c "{convert}"; then set '
            f"policy.model_path={safe}"
        ) from None
    except (RuntimeError, EOFError, OSError, KeyError, ValueError) as error:
        raise UserError(f"'{file}' cannot be read ({_first_line(error)}); download it again") from None
    inside = loaded
    for name in _INSIDE:
        if isinstance(inside, dict) and isinstance(inside.get(name), dict):
            inside = inside[name]
    if not isinstance(inside, dict) or not inside or not all(isinstance(x, torch.Tensor) for x in inside.values()):
        holds = ", ".join(map(str, list(inside)[:8])) if isinstance(inside, dict) else f"a {type(inside).__name__}"
        expected = f"names mapped to tensors, at the top level or under {', '.join(_INSIDE)}"
        raise UserError(f"'{file}' holds {holds or 'nothing'}; expected {expected}")
    return inside


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
