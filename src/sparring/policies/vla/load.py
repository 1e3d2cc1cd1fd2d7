"""Loads somebody's VLA and reports what fitted."""

import difflib
import heapq
import importlib.util
import inspect
import json
import pickle
import pkgutil
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn

from sparring.config.resolve import describe_error, import_path
from sparring.errors import UserError
from sparring.policies.encoders import freeze
from sparring.policies.vla import interface as parts
from sparring.policies.vla.interface import check_interface
from sparring.policies.vla.weights import read_weights, weights_of
from sparring.processes.memory_errors import memory_told, shortage

# ---- Do these weights fit this model? What is wrong is told at once, each name with its nearest.


# names that are told of each kind of mistake, and others that one is compared with letter by letter
_MOST, _LIKELY = 20, 8


@dataclass(frozen=True)
class Fit:
    """What a checkpoint and a model do not have in common."""

    # of the model, not in the checkpoint
    missing: tuple[str, ...]
    # of the checkpoint, not in the model
    unexpected: tuple[str, ...]
    # (name, shape in the checkpoint, shape in the model)
    reshaped: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]

    @property
    def exact(self) -> bool:
        return not (self.missing or self.unexpected or self.reshaped)

    def __str__(self) -> str:
        lines = _listed("missing from it", self.missing, self.unexpected)
        lines += _listed("unknown to the model", self.unexpected, self.missing)
        if self.reshaped:
            lines.append(f"{len(self.reshaped)} of another shape:")
            lines += [
                f"  {name}: {list(given)} in it, {list(here)} in the model"
                for name, given, here in self.reshaped[:_MOST]
            ]
            lines += _more(self.reshaped)
        return "\n".join(lines)


def fit_of(model: nn.Module, weights: dict[str, torch.Tensor]) -> Fit:
    expected = model.state_dict()
    # weights that two names share are often saved under one of them
    given = {expected[name].data_ptr() for name in weights if name in expected and expected[name].numel()}
    missing = [n for n, x in expected.items() if n not in weights and not (x.numel() and x.data_ptr() in given)]
    reshaped = [
        (name, tuple(weights[name].shape), tuple(tensor.shape))
        for name, tensor in expected.items()
        if name in weights and weights[name].shape != tensor.shape
    ]
    return Fit(tuple(missing), tuple(name for name in weights if name not in expected), tuple(reshaped))


def load_into(model: nn.Module, weights: dict[str, torch.Tensor], source: str, strict: bool) -> Fit:
    """Strict: all or nothing. Else what fits, and the rest is told by whoever asked."""
    fit = fit_of(model, weights)
    if strict and not fit.exact:
        raise UserError(
            f"'{source}' does not fit the model:\n{fit}\ngive the policy.model_config that it was made with, or load "
            "what fits with policy.strict=false"
        )
    reshaped = {name for name, _, _ in fit.reshaped}
    fitting = {name: tensor for name, tensor in weights.items() if name not in reshaped}
    if not fitting.keys() & model.state_dict().keys():
        raise UserError(f"'{source}': not one of its {len(weights)} tensors fits the model:\n{fit}")
    model.load_state_dict(fitting, strict=False)
    return fit


def _listed(what: str, names: tuple[str, ...], others: tuple[str, ...]) -> list[str]:
    if not names:
        return []
    lines = [f"{len(names)} {what}:"]
    for name in names[:_MOST]:
        near = difflib.get_close_matches(name, _likely(name, others), n=1)
        lines.append(f"  {name}" + (f" (nearest: {near[0]})" if near else ""))
    return lines + _more(names)


def _more(names: tuple) -> list[str]:
    return [f"  and {len(names) - _MOST} more"] if len(names) > _MOST else []


def _likely(name: str, others: tuple[str, ...]) -> list[str]:
    """Those that begin and end most alike: to compare all letters of thousands of names takes minutes."""

    def alike(other: str) -> int:
        return len(commonprefix([name, other])) + len(commonprefix([name[::-1], other[::-1]]))

    return heapq.nlargest(_LIKELY, others, key=alike)


# ---- load_vla_model: from a checkpoint and a class to a module that is ready to be trained, or a sentence why not.


# of a Hugging Face config.json, not for constructors
_NOT_SETTINGS = ("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "auto_map")
# what code of somebody else's making may raise where it does not fit what it is given
_OF_A_CONSTRUCTOR = (TypeError, ValueError, KeyError, AttributeError, ImportError, OSError)


def load_vla_model(
    model_path: str | Path | None,
    model_class: str | type,
    model_config: Mapping | None = None,
    *,
    strict: bool = True,
    dtype: str | None = None,
    device_map: str | Mapping[str, str] = "cpu",
    frozen: Iterable[str] = (),
    usual: Mapping | None = None,
) -> nn.Module:
    """A model with its weights.

    `model_path`: .safetensors, a `.safetensors.index.json` with its shards, .pth/.pt/.bin (tensors only), or a folder
    in Hugging Face format; None: fresh weights. `model_class`: "package.module:Class", dotted, or the class.
    `model_config`: what it is constructed with. `strict`: every weight is there and none left over, or UserError with
    all names; else what fits is loaded, and a warning has the names. `dtype`: fp32 or bf16; None: the class's own.
    `device_map`: a device, or {pattern: device} of frozen parts. `frozen`: patterns of names that do not learn.
    `usual`: settings that a constructor is given if it takes them, and neither `model_config` nor the folder has them.
    """
    cls = class_of(model_class)
    check_interface(cls)
    with memory_told(f"loading '{model_path}'"):
        model = _loaded(cls, model_path, dict(model_config or {}), usual or {}, strict)
        freeze(model, frozen)
        if dtype is not None:
            model.to(parts.dtype_of(dtype))
        parts.place(model, device_map)
    return model


def class_of(model_class: str | type | None) -> type:
    """'package.module:Class' or 'package.module.Class' -> Class."""
    if isinstance(model_class, type):
        return model_class
    if not model_class:
        raise UserError("policy.model_class is not given; expected your class, e.g. policy.model_class=my.models:MyVLA")
    module, _, name = model_class.rpartition(":" if ":" in model_class else ".")
    if not module:
        raise UserError(f"policy.model_class '{model_class}': is no import path; expected package.module:Class")
    _check_module(module, model_class)
    found = import_path(f"{module}:{name}", "policy.model_class")
    if not isinstance(found, type):
        raise UserError(f"policy.model_class '{model_class}': is a {type(found).__name__}, not a class")
    return found


def _check_module(module: str, given: str) -> None:
    """That there is such a module; else its nearest neighbour is named. What goes wrong inside it is told by import."""
    package = None
    for depth, part in enumerate(module.split("."), 1):
        name = ".".join(module.split(".")[:depth])
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return
        if spec is None:
            near = difflib.get_close_matches(part, [m.name for m in pkgutil.iter_modules(package)], n=1)
            prefix = ".".join(module.split(".")[: depth - 1] + near)
            hint = f" (nearest: {prefix})" if near else ""
            raise UserError(
                f"policy.model_class '{given}': no module '{name}'; is it in this folder or on PYTHONPATH?{hint}"
            )
        package = spec.submodule_search_locations


def _loaded(cls: type, path: str | Path | None, settings: dict, usual: Mapping, strict: bool) -> nn.Module:
    taken = {name: value for name, value in usual.items() if name in inspect.signature(cls).parameters}
    if path is None:
        return construct(cls, taken | settings)
    folder = Path(path) if Path(path).is_dir() else None
    if folder is not None and hasattr(cls, "from_pretrained"):
        return _from_pretrained(cls, folder, settings, strict)
    file = weights_of(path)
    model = construct(cls, taken | (_settings_in(folder) if folder is not None else {}) | settings)
    fit = load_into(model, read_weights(file, model.state_dict()), str(file), strict)
    _warn(fit, file)
    return model


def construct(cls: type, settings: dict) -> nn.Module:
    """`cls(**settings)`; of a class that takes `model_config` or `config` as a whole, `cls(settings)`.

    What such a class names beside it is taken out of the whole.
    """
    parameters = inspect.signature(cls).parameters
    where = f"policy.model_class '{cls.__module__}:{cls.__qualname__}'"
    whole = next((name for name in ("model_config", "config") if name in parameters and name not in settings), None)
    named = {name: value for name, value in settings.items() if name in parameters}
    given = {whole: {n: v for n, v in settings.items() if n not in named}, **named} if whole else settings
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [name for name in given if name not in parameters and not open_ended]
    needed = [
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and name not in given
    ]
    if unknown:
        near = [m for name in unknown for m in difflib.get_close_matches(name, parameters, n=1)]
        hint = f"nearest: {', '.join(near)}" if near else f"it takes {', '.join(parameters) or 'nothing'}"
        raise UserError(f"{where}: its constructor does not take policy.model_config.{', '.join(unknown)}; {hint}")
    if needed:
        raise UserError(
            f"{where}: its constructor also needs {', '.join(needed)}; give policy.model_config.{needed[0]}"
        )
    try:
        return cls(**given)
    except UserError:
        raise
    except RuntimeError as error:
        if shortage(error):
            raise
        raise UserError(f"{where}: constructing it failed: {describe_error(error)}") from error
    except _OF_A_CONSTRUCTOR as error:
        raise UserError(f"{where}: constructing it failed: {describe_error(error)}") from error


def _from_pretrained(cls: type, folder: Path, settings: dict, strict: bool) -> nn.Module:
    """By the class itself. transformers is made to say what did not fit; others may say nothing of it."""
    weights_of(folder)
    transformers = any(base.__module__ == "transformers.modeling_utils" for base in cls.__mro__)
    more = dict.fromkeys(("local_files_only", "output_loading_info", "ignore_mismatched_sizes"), True)
    more = more if transformers else {}
    try:
        loaded = cls.from_pretrained(folder, **settings, **more)
    except (RuntimeError, *_OF_A_CONSTRUCTOR, SafetensorError, pickle.UnpicklingError) as error:
        if shortage(error):
            raise
        where = f"policy.model_class '{cls.__module__}:{cls.__qualname__}'"
        raise UserError(f"{where}: from_pretrained('{folder}') failed: {describe_error(error)}") from error
    if transformers:
        model, fit = loaded[0], _told_fit(loaded[1])
    else:
        model, fit = loaded, fit_of(loaded, read_weights(folder, loaded.state_dict()))
    if strict and not fit.exact:
        raise UserError(f"'{folder}' does not fit the model:\n{fit}\nload what fits with policy.strict=false")
    _warn(fit, folder)
    return model


def _told_fit(told: dict) -> Fit:
    reshaped = tuple((name, tuple(given), tuple(here)) for name, given, here in told.get("mismatched_keys", ()))
    return Fit(tuple(sorted(told["missing_keys"])), tuple(sorted(told["unexpected_keys"])), reshaped)


def _settings_in(folder: Path) -> dict:
    """What config.json says of how the model was made."""
    file = folder / "config.json"
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"'{file}' cannot be read: {error}") from None
    return {name: value for name, value in values.items() if name not in _NOT_SETTINGS and not name.startswith("_")}


def _warn(fit: Fit, source: Path) -> None:
    if not fit.exact:
        warnings.warn(f"'{source}' was loaded in part:\n{fit}", stacklevel=3)
