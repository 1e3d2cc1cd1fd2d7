"""All parameters of an optimiser as one long vector.

Clipping and Adam are then a few operations instead of a few per tensor, which is a sixth of the time of a small
minibatch on a CPU and many kernel launches on a GPU. Processes average one tensor per gradient step, and weights that
no loss reads have gradients of 0 in it: none waits for them.
"""

import math

import torch
from torch import nn

# ---- How learning rates and clip ranges change over a run. Functions of progress: nothing to save or restore.


def scheduled(kind: str, progress: float) -> float:
    """What is left of a value after `progress` in [0, 1] of a run."""
    progress = min(max(progress, 0.0), 1.0)
    if kind == "linear":
        return 1.0 - progress
    if kind == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    if kind == "constant":
        return 1.0
    raise ValueError(f"schedule '{kind}' is unknown; one of: constant, linear, cosine")


def warmup(update: int, warmup_updates: int) -> float:
    """Rises from 1/w to 1 over the first w updates (update counts from 0)."""
    return min(1.0, (update + 1) / warmup_updates) if warmup_updates else 1.0


# ---- All parameters of an optimiser as one long vector.
#
# Clipping and Adam are then a few operations instead of a few per tensor, which is a sixth of the time of a small
# minibatch on a CPU and many kernel launches on a GPU. Processes average one tensor per gradient step, and weights that
# no loss reads have gradients of 0 in it: none waits for them.


class FlatParameters:
    """`vector` holds the values and `vector.grad` the gradients; the parameters themselves become views into both."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        self.vector = nn.Parameter(torch.cat([p.detach().flatten() for p in parameters]))
        self.vector.grad = torch.zeros_like(self.vector)
        sizes = [p.numel() for p in parameters]
        values, gradients = self.vector.detach().split(sizes), self.vector.grad.split(sizes)
        for parameter, value, gradient in zip(parameters, values, gradients, strict=True):
            parameter.data = value.view_as(parameter)
            parameter.grad = gradient.view_as(parameter)

    def check(self) -> None:
        """A module that was moved or cast since has new tensors, which an optimiser of the vector would not reach."""
        start = self.vector.data_ptr()
        if self.parameters[0].data_ptr() != start or self.parameters[0].grad is None:
            raise RuntimeError("the policy was moved, cast or its gradients dropped after its algorithm was made")
