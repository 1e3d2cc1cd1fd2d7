"""What a VLA model offers, and models wrapped into it."""

import inspect
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from sparring.errors import UserError
from sparring.policies.encoders import matching

# ---- What a model must offer to be trained here, and how it is told when it does not.


@runtime_checkable
class VLAModelInterface(Protocol):
    """A torch module with these three methods. Nothing is inherited: having them is enough.

    `observations` is a TensorDict [B] with, where the env shows them:
        rgb             [B, 3, H, W] of one camera, [B, cameras, 3, H, W] of several; float in 0..1, or uint8
        depth           [B, 1, H, W], or [B, cameras, 1, H, W]; metres
        proprio         [B, S] float32
        language        [B, L] int64, the instruction's bytes with zeros after them; or the tokenizer's ids, or texts
        language_mask   [B, L] bool, where there is a token

    It may also have:
        sample(observations, noise [B, noise_size]) -> actions, or (actions, log_prob)
            Draws with the uniform numbers it is given, `noise_size` (default: action_dim) of them. Much faster and
            better repeatable than drawing in `forward`.
        imitation_loss(observations, actions, valid [B, C]) -> a scalar
            Default: the mean of -log_prob.
    """

    def forward(self, observations: TensorDict) -> torch.Tensor:
        """Actions [B, action_dim]. With a keyword `deterministic` it is told whether to draw or to give the mode."""
        ...

    def get_value(self, observations: TensorDict) -> torch.Tensor:
        """[B, 1]."""
        ...

    def evaluate_actions(self, observations: TensorDict, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob [B] and entropy [B]; of chunks better [B, C] each, so that only executed steps count."""
        ...


@runtime_checkable
class FlowModelInterface(Protocol):
    """A model that denoises needs these two only: drawing, scoring and the value are done for it."""

    def encode(self, observations: TensorDict) -> tuple[torch.Tensor, torch.Tensor | TensorDict]:
        """Features [B, F] for the value head, and what `denoise` is told, a row per decision."""
        ...

    def denoise(self, x: torch.Tensor, t: torch.Tensor, prefix: torch.Tensor | TensorDict) -> torch.Tensor:
        """[B, H, A], [B] -> the velocity noise - action, [B, H, A]; t = 1 is noise, 0 the action."""
        ...


_DOCUMENTED = {
    "forward": "forward(observations) -> [B, action_dim]",
    "get_value": "get_value(observations) -> [B, 1]",
    "evaluate_actions": "evaluate_actions(observations, actions) -> (log_prob [B], entropy [B])",
}
_FLOW = {
    "encode": "encode(observations) -> (features [B, F], prefix)",
    "denoise": "denoise(x, t, prefix) -> velocity [B, H, A]",
}


def denoises(model: type | nn.Module) -> bool:
    """Whether a model, or its class, has a flow head."""
    return not _missing(model, _FLOW)


def check_interface(model_class: type) -> None:
    """Before anything is loaded."""
    where = f"policy.model_class '{model_class.__module__}:{model_class.__qualname__}'"
    if not issubclass(model_class, nn.Module):
        raise UserError(f"{where}: is no torch.nn.Module; expected class {model_class.__name__}(nn.Module)")
    missing = _missing(model_class, _DOCUMENTED)
    if not missing or denoises(model_class):
        return
    told = ", ".join(_DOCUMENTED[name] for name in missing)
    flow = "encode and denoise"
    half = _missing(model_class, _FLOW)
    if len(half) == 1:
        flow = f"of a flow head the missing {_FLOW[half[0]]}"
    raise UserError(f"{where}: does not have the interface of a VLA model; add {told} (or {flow}, see docs/vla.md)")


def takes(function, keyword: str) -> bool:
    """Whether a function has a parameter of that name."""
    return keyword in inspect.signature(function).parameters


def _missing(model: type | nn.Module, methods: dict[str, str]) -> list[str]:
    # every nn.Module has a `forward`, which only says that there is none
    return [name for name in methods if getattr(model, name, None) is None or _is_stub(model, name)]


def _is_stub(model: type | nn.Module, name: str) -> bool:
    method = getattr(model, name)
    return name == "forward" and getattr(method, "__func__", method) is nn.Module.forward


# ---- Parts of a model, told by patterns of their names: which learn, in what dtype, on which device.


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def dtype_of(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise UserError(f"dtype '{name}' is not known; expected {' or '.join(DTYPES)}")
    return DTYPES[name]


def cast(model: nn.Module, dtype: str) -> None:
    """Frozen weights to `dtype`; those that learn stay in float32, where small steps are not lost."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else dtype_of(dtype))


def rest(model: nn.Module) -> None:
    """Wholly frozen parts act as in evaluation, whatever is done with the others: no dropout, no new statistics."""
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(p.requires_grad for p in parameters):
            module.eval()


def place(model: nn.Module, devices: str | Mapping[str, str]) -> None:
    """Move a model; or parts of it, which then stay where they are and are handed what they read."""
    if isinstance(devices, str):
        model.to(_device(devices))
        return
    modules = dict(model.named_modules())
    for pattern, name in devices.items():
        device = _device(name)
        means = matching([n for n in modules if n], [pattern], "policy.device_map")
        # the outermost of them: what is below goes along
        for part in (n for n in means if not any(n.startswith(f"{other}.") for other in means)):
            _pin(modules[part], part, device)


def _pin(module: nn.Module, name: str, device: torch.device) -> None:
    if any(p.requires_grad for p in module.parameters()):
        raise UserError(
            f"policy.device_map: '{name}' learns, and what learns is on the device of the run; freeze it "
            f"(policy.frozen=[{name}]), or leave it out of the map"
        )
    module.to(device)
    elsewhere = _Elsewhere(device)
    module.register_forward_pre_hook(elsewhere.before, with_kwargs=True)
    module.register_forward_hook(elsewhere.after)
    # a later .to() of the whole passes it by
    module._apply = elsewhere.stay


class _Elsewhere:
    """A part on a device of its own: brought what it reads, and its answer taken back to where that came from."""

    def __init__(self, device: torch.device):
        self.device = self.reader = device

    def before(self, module, args, kwargs):
        told = (x.device for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
        self.reader = next(told, self.device)
        return _moved((args, kwargs), self.device)

    def after(self, module, args, output):
        return _moved(output, self.reader)

    def stay(self, fn, recurse=True):
        return None


def _moved(values, device: torch.device):
    """In structures of any kind, which come back as the kind they were."""
    return tree_map(
        lambda value: value.to(device) if hasattr(value, "to") else value,
        values,
        is_leaf=lambda value: isinstance(value, TensorDictBase),
    )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise UserError(f"policy.device_map: '{name}' is no device; expected cpu, cuda or cuda:<index>") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"policy.device_map: '{name}', but torch sees {torch.cuda.device_count()} GPUs")
    return device
