"""Do these weights fit this model? What is wrong is told at once, each name with its nearest."""

import difflib
import heapq
from dataclasses import dataclass
from os.path import commonprefix

import torch
from torch import nn

from sparring.errors import UserError

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
