"""Loads a custom VLA model from a class and a checkpoint; every mismatch is an error that explains the fix."""

import difflib
import inspect
import pickle
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from tensordict import TensorDictBase
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from sparring.config.resolve import resolve
from sparring.errors import UserError, describe_error
from sparring.policies.weights import (
    WeightsFit,
    match_names,
    match_parameters,
    read_json,
    read_weights,
    refuse_code_of_adapters,
    weights_file,
)
from sparring.processes.memory import explain_oom, oom_message

# keys of a Hugging Face config.json that are not constructor arguments
_NOT_SETTINGS = ("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "auto_map")
# exceptions of a constructor that does not fit its arguments
_CONSTRUCTOR_ERRORS = (TypeError, ValueError, KeyError, AttributeError, ImportError, OSError)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# the methods of the documented interface, and of a flow head
_DOCUMENTED = {
    "forward": "forward(observations) -> [B, action_dim]",
    "get_value": "get_value(observations) -> [B, 1]",
    "evaluate_actions": "evaluate_actions(observations, actions) -> (log_prob [B], entropy [B])",
}
_FLOW = {
    "encode": "encode(observations) -> (features [B, F], prefix)",
    "denoise": "denoise(x, t, prefix) -> velocity [B, H, A]",
}


def load_vla_model(
    model_path: str | Path | None,
    model_class: str | type,
    model_config: Mapping | None = None,
    *,
    strict: bool = True,
    dtype: str | None = None,
    device_map: str | Mapping[str, str] = "cpu",
    frozen: Iterable[str] = (),
    defaults: Mapping | None = None,
) -> nn.Module:
    """Load a model with its weights; docs/vla.md describes the parameters.
    `defaults`: values of constructor arguments that are in neither `model_config` nor the folder's config.json."""
    cls = import_model_class(model_class)
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"dtype '{dtype}' is unknown; expected {' or '.join(DTYPES)}")
    with explain_oom(f"loading '{model_path}'"):
        model = _load(cls, model_path, dict(model_config or {}), defaults or {}, strict)
        for weight in match_parameters(model, frozen, "policy.frozen"):
            weight.requires_grad_(False)
        if dtype is not None:
            model.to(DTYPES[dtype])
        move_to_devices(model, device_map)
    return model


def import_model_class(model_class: str | type | None) -> type:
    """Import 'package.module:Class' or 'package.module.Class', and check that it has the interface of a VLA model."""
    if not isinstance(model_class, type):
        if not model_class:
            raise UserError("policy.model_class is not set; give your class, e.g. my.models:MyVLA")
        module, _, name = model_class.rpartition(":" if ":" in model_class else ".")
        if not module:
            raise UserError(f"policy.model_class '{model_class}' is not an import path; expected package.module:Class")
        found = resolve(f"{module}:{name}", {}, "policy.model_class")
        if not isinstance(found, type):
            raise UserError(f"policy.model_class '{model_class}' is a {type(found).__name__}; expected a class")
        model_class = found
    _check_interface(model_class)
    return model_class


def _check_interface(model_class: type) -> None:
    where = f"policy.model_class '{model_class.__module__}:{model_class.__qualname__}'"
    if not issubclass(model_class, nn.Module):
        raise UserError(f"{where} is not a torch.nn.Module; expected class {model_class.__name__}(nn.Module)")
    missing, missing_flow = _missing(model_class, _DOCUMENTED), _missing(model_class, _FLOW)
    if missing and missing_flow:
        methods = ", ".join(_DOCUMENTED[name] for name in missing)
        has_one = len(missing_flow) == 1
        flow = f"the missing {_FLOW[missing_flow[0]]} of a flow head" if has_one else "encode and denoise"
        problem = "does not have the interface of a VLA model"
        raise UserError(f"{where} {problem}; add {methods} (or {flow}, see docs/vla.md)")


def _missing(model_class: type, methods: dict[str, str]) -> list[str]:
    # nn.Module.forward only raises NotImplementedError
    return [name for name in methods if getattr(model_class, name, None) in (None, nn.Module.forward)]


def _load(cls: type, path: str | Path | None, settings: dict, defaults: Mapping, strict: bool) -> nn.Module:
    defaults = {name: value for name, value in defaults.items() if name in inspect.signature(cls).parameters}
    if path is None:
        return _construct(cls, defaults | settings)
    folder = Path(path) if Path(path).is_dir() else None
    if folder is not None and hasattr(cls, "from_pretrained"):
        return _from_pretrained(cls, folder, settings, strict)
    file, saved = weights_file(path), {}
    if folder is not None and (folder / "config.json").is_file():
        saved = read_json(folder / "config.json")
        saved = {name: v for name, v in saved.items() if name not in _NOT_SETTINGS and not name.startswith("_")}
    model = _construct(cls, defaults | saved | settings)
    weights = read_weights(file, model.state_dict())
    fit = WeightsFit.of(model.state_dict(), weights)
    reshaped = {name for name, _, _ in fit.reshaped}
    fitting = {name: tensor for name, tensor in weights.items() if name not in reshaped}
    if not strict and not fitting.keys() & model.state_dict().keys():
        raise UserError(f"'{file}': none of its {len(weights)} tensors fits the model:\n{fit}")
    hint = "use the policy.model_config that it was made with, or load the fitting part with policy.strict=false"
    _check_fit(fit, file, strict, hint)
    model.load_state_dict(fitting, strict=False)
    return model


def _check_fit(fit: WeightsFit, source: Path, strict: bool, hint: str) -> None:
    if strict and not fit.exact:
        raise UserError(f"'{source}' does not fit the model:\n{fit}\n{hint}")
    if not fit.exact:
        warnings.warn(f"'{source}' was loaded only in part:\n{fit}", stacklevel=4)


def _construct(cls: type, settings: dict) -> nn.Module:
    """`cls(**settings)`; if it has a parameter `model_config` or `config`, that gets all settings it does not name."""
    parameters = inspect.signature(cls).parameters
    where = f"policy.model_class '{cls.__module__}:{cls.__qualname__}'"
    whole = next((name for name in ("model_config", "config") if name in parameters and name not in settings), None)
    named = {name: value for name, value in settings.items() if name in parameters}
    given = {whole: {n: v for n, v in settings.items() if n not in named}, **named} if whole else settings
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [name for name in given if name not in parameters and not open_ended]
    plain = [name for name, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    needed = [name for name in plain if parameters[name].default is inspect.Parameter.empty and name not in given]
    if unknown:
        near = [m for name in unknown for m in difflib.get_close_matches(name, parameters, n=1)]
        hint = f"nearest: {', '.join(near)}" if near else f"it takes {', '.join(parameters) or 'nothing'}"
        raise UserError(f"{where}: the constructor does not take policy.model_config.{', '.join(unknown)}; {hint}")
    if needed:
        advice = f"set policy.model_config.{needed[0]}"
        raise UserError(f"{where}: the constructor also needs {', '.join(needed)}; {advice}")
    try:
        return cls(**given)
    except UserError:
        raise
    except (RuntimeError, *_CONSTRUCTOR_ERRORS) as error:
        if isinstance(error, RuntimeError) and oom_message(error):
            raise
        raise UserError(f"{where}: the constructor failed: {describe_error(error)}") from error


def _from_pretrained(cls: type, folder: Path, settings: dict, strict: bool) -> nn.Module:
    """Load with the class's from_pretrained. transformers reports mismatches; for other classes, compare names here."""
    weights_file(folder)
    refuse_code_of_adapters(folder)
    transformers = any(base.__module__ == "transformers.modeling_utils" for base in cls.__mro__)
    more = dict.fromkeys(("local_files_only", "output_loading_info", "ignore_mismatched_sizes"), True)
    try:
        loaded = cls.from_pretrained(folder, **settings, **(more if transformers else {}))  # type: ignore[attr-defined]
    except (RuntimeError, *_CONSTRUCTOR_ERRORS, SafetensorError, pickle.UnpicklingError) as error:
        if oom_message(error):
            raise
        where = f"policy.model_class '{cls.__module__}:{cls.__qualname__}'"
        raise UserError(f"{where}: from_pretrained('{folder}') failed: {describe_error(error)}") from error
    if transformers:
        model, fit = loaded[0], WeightsFit.of_transformers(loaded[1])
    else:
        model, own = loaded, loaded.state_dict()
        fit = WeightsFit.of(own, read_weights(folder, own))
    _check_fit(fit, folder, strict, "load the fitting part with policy.strict=false")
    return model


def move_to_devices(model: nn.Module, devices: str | Mapping[str, str]) -> None:
    """Move a model to a device, or parts of it to fixed devices: hooks move their inputs there and outputs back."""
    if isinstance(devices, str):
        model.to(_device(devices))
        return
    modules = dict(model.named_modules())
    for pattern, name in devices.items():
        device = _device(name)
        parts = match_names([n for n in modules if n], [pattern], "policy.device_map")
        # only the outermost matches: their submodules move with them
        for part in (n for n in parts if not any(n.startswith(f"{other}.") for other in parts)):
            module = modules[part]
            if any(p.requires_grad for p in module.parameters()):
                raise UserError(
                    f"policy.device_map: '{part}' learns, and learning weights must be on the run's device; freeze it "
                    f"(policy.frozen=[{part}]), or remove it from the map"
                )
            module.to(device)
            hooks = _DeviceHooks(device)
            module.register_forward_pre_hook(hooks.before, with_kwargs=True)
            module.register_forward_hook(hooks.after)
            module._apply = hooks.ignore  # a later .to() of the whole model must not move it


class _DeviceHooks:
    def __init__(self, device: torch.device):
        self.device = self.caller_device = device

    def before(self, module, args, kwargs):
        devices = (x.device for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
        self.caller_device = next(devices, self.device)
        return _moved((args, kwargs), self.device)

    def after(self, module, args, output):
        return _moved(output, self.caller_device)

    def ignore(self, fn, recurse=True):
        return None


def _moved(values, device: torch.device):
    return tree_map(
        lambda value: value.to(device) if hasattr(value, "to") else value,
        values,
        is_leaf=lambda value: isinstance(value, TensorDictBase),
    )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise UserError(f"policy.device_map: '{name}' is not a device; expected cpu, cuda or cuda:<index>") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"policy.device_map: '{name}', but torch finds {torch.cuda.device_count()} GPUs")
    return device
