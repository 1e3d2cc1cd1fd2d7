"""What a model must offer to be trained here, and how it is told when it does not."""

import inspect
from typing import Protocol, runtime_checkable

import torch
from tensordict import TensorDict
from torch import nn

from sparring.errors import UserError


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
