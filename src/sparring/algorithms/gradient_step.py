"""GradientStep: where parameters are laid out, and gradients are averaged over processes, clipped and applied."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from sparring.processes.distributed import Distributed


class GradientStep:
    """The optimiser of some parameters: zero, backward, average, clip, step.

    `groups`: torch's parameter groups, of which empty ones are left out. `settings`: of the optimiser. `memory(doing,
    rows)`: a context that explains where memory runs out.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        distributed: Distributed,
        max_grad_norm: float,
        optimizer: type[torch.optim.Optimizer] = torch.optim.Adam,
        micro_batch_size: int | None = None,
        memory: Callable[[str, int], AbstractContextManager] = lambda doing, rows: nullcontext(),
        foreach: bool | None = None,
        **settings,
    ):
        groups = [group for group in groups if group["params"]]
        self.distributed, self.max_grad_norm, self.micro_batch_size = distributed, max_grad_norm, micro_batch_size
        self.memory, self.foreach = memory, foreach
        with memory("making room for gradients", 0):
            self.groups = [_FlatParameters(group["params"]) for group in groups]
        vectors = [group | {"params": [flat.vector]} for group, flat in zip(groups, self.groups, strict=True)]
        self.optimizer = optimizer(vectors, fused=True, **settings)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.groups for parameter in group.parameters]

    def __call__(self, loss: Tensor) -> Tensor:
        """One step down a loss; the norm of its gradients before they were clipped."""
        self._zero()
        loss.backward()
        return self.apply()

    def backward(self, batch: TensorDict, loss: Callable[[TensorDict], tuple[Tensor, Any]]) -> list[tuple[Any, float]]:
        """Gradients of a batch, added up over its micro-batches: what `loss` says of each, and its share."""
        self._zero()
        parts = batch.split(self.micro_batch_size) if self.micro_batch_size else [batch]
        terms = []
        for part in parts:
            share = len(part) / len(batch)
            with self.memory("working out gradients", len(part)):
                cost, term = loss(part)
                (cost if len(parts) == 1 else cost * share).backward()
            terms.append((term, share))
        return terms

    def apply(self, learning: "list[_FlatParameters] | None" = None) -> Tensor:
        """A step with the gradients of all processes; their norm before they are clipped.

        `learning`: the groups that change; the others rest. None: all.
        """
        learning = self.groups if learning is None else learning
        for group in learning:
            self.distributed.average_(group.vector.grad)
        norm = nn.utils.clip_grad_norm_([g.vector for g in learning], self.max_grad_norm, foreach=self.foreach)
        # without a gradient Adam leaves values and moments as they are
        resting = [(g.vector, g.vector.grad) for g in self.groups if not any(g is other for other in learning)]
        for vector, _ in resting:
            vector.grad = None
        with self.memory("taking a gradient step", 0):
            self.optimizer.step()
        for vector, gradient in resting:
            vector.grad = gradient
        return norm

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def scale_lr(self, factor: float) -> None:
        """Each group learns with this part of its own `base_lr`."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)

    def _zero(self) -> None:
        for group in self.groups:
            group.check()
            group.vector.grad.zero_()


class _FlatParameters:
    """`vector` holds the values and `vector.grad` the gradients; the parameters themselves become views into both.

    Clipping and Adam are then a few operations instead of a few per tensor, which is a sixth of the time of a small
    minibatch on a CPU and many kernel launches on a GPU. Processes average one tensor per gradient step, and weights
    that no loss reads have gradients of 0 in it: none waits for them.
    """

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


def schedule(kind: str, progress: float, update: int = 0, warmup: int = 0) -> float:
    """What is left of a value after `progress` in [0, 1] of a run; it rises from 1/w to 1 over the first w updates.

    A function of progress and of the update, counted from 0: nothing to save or restore.
    """
    progress = min(max(progress, 0.0), 1.0)
    if kind == "linear":
        left = 1.0 - progress
    elif kind == "cosine":
        left = 0.5 * (1.0 + math.cos(math.pi * progress))
    elif kind == "constant":
        left = 1.0
    else:
        raise ValueError(f"schedule '{kind}' is unknown; one of: constant, linear, cosine")
    return left * (min(1.0, (update + 1) / warmup) if warmup else 1.0)
