"""Do these weights fit this model? All that is wrong is told at once, each name with its nearest."""

import difflib
from dataclasses import dataclass

import torch
from torch import nn

from sparring.errors import UserError


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
                f"  {name}: {list(given)} in it, {list(here)} in the model" for name, given, here in self.reshaped
            ]
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
    for name in names:
        near = difflib.get_close_matches(name, others, n=1)
        lines.append(f"  {name}" + (f" (nearest: {near[0]})" if near else ""))
    return lines
