"""GradientStep: how parameters are laid out, and gradients averaged over processes, clipped and applied."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from sparring.policies.weights import load_optimizer
from sparring.processes.distributed import Distributed


class GradientStep:
    """Zero, backward, average, clip, step: the optimiser of torch's parameter `groups`, empty ones left out."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        distributed: Distributed,
        max_grad_norm: float,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
        memory: Callable[[str, int], AbstractContextManager] = lambda doing, rows: nullcontext(),
        foreach: bool | None = None,
        **settings,
    ):
        """`memory(doing, rows)`: a context that explains a lack of it. `foreach`: of clipping; both sum on a GPU in an
        order of their own."""
        self.distributed, self.max_grad_norm, self.memory, self.foreach = distributed, max_grad_norm, memory, foreach
        groups = [group for group in groups if group["params"]]
        with memory("making room for gradients", 0):
            self.groups = [_FlatParameters(group["params"]) for group in groups]
        vectors = [group | {"params": [flat.vector]} for group, flat in zip(groups, self.groups, strict=True)]
        self.optimizer = optimizer(vectors, fused=True, **settings)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.groups for parameter in group.parameters]

    def __call__(self, loss: Tensor) -> Tensor:
        """One step on a loss; the norm of its gradients before they were clipped."""
        self._zero()
        loss.backward()
        return self.apply()

    def backward(self, batch: TensorDict, loss: Callable, micro_batch_size: int | None) -> list[tuple[Any, float]]:
        """Gradients of `loss(part) -> loss, terms`, summed over micro-batches: (terms, share of the batch) of each."""
        self._zero()
        parts = batch.split(micro_batch_size) if micro_batch_size else [batch]
        terms = []
        for part in parts:
            share = len(part) / len(batch)
            with self.memory("working out gradients", len(part)):
                cost, term = loss(part)
                (cost if len(parts) == 1 else cost * share).backward()
            terms.append((term, share))
        return terms

    def apply(self, learning: "list[_FlatParameters] | None" = None, weight: float = 1.0) -> Tensor:
        """A step with the gradients of all processes; their norm. `learning`: the groups that change; None: all.
        `weight` of this process's gradients, 1 on average over the processes."""
        learning = self.groups if learning is None else learning
        for group in self.groups:
            # without a gradient Adam leaves values and moments as they are
            group.vector.grad = None
        for group in learning:
            group.vector.grad = group.gradient
            if weight != 1:
                group.gradient.mul_(weight)
            self.distributed.average_(group.gradient)
        norm = nn.utils.clip_grad_norm_([g.vector for g in learning], self.max_grad_norm, foreach=self.foreach)
        with self.memory("taking a gradient step", 0):
            self.optimizer.step()
        return norm

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def scale_lr(self, factor: float) -> None:
        """Each group learns with this part of its `base_lr`."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_optimizer(self.optimizer, state)

    def _zero(self) -> None:
        for group in self.groups:
            # a module that was moved or cast since has new tensors, which the optimiser would not reach
            first = group.parameters[0]
            if first.data_ptr() != group.vector.data_ptr() or first.grad is None:
                raise RuntimeError("the policy was moved, cast or its gradients dropped after its algorithm was made")
            group.gradient.zero_()


class _FlatParameters:
    """`vector` holds the values and `gradient` the gradients; the parameters themselves become views into both.

    Clipping and Adam are then a few operations instead of a few per tensor, which is a sixth of the time of a small
    minibatch on a CPU and many kernel launches on a GPU. Processes average one tensor per gradient step, and weights
    that no loss reads have gradients of 0 in it: none waits for them.
    """

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        self.vector = nn.Parameter(torch.cat([p.detach().flatten() for p in parameters]))
        self.gradient = self.vector.grad = torch.zeros_like(self.vector)
        sizes = [p.numel() for p in parameters]
        values, gradients = self.vector.detach().split(sizes), self.gradient.split(sizes)
        for parameter, value, gradient in zip(parameters, values, gradients, strict=True):
            parameter.data, parameter.grad = value.view_as(parameter), gradient.view_as(parameter)


def schedule(kind: str, progress: float, update: int = 0, warmup: int = 0) -> float:
    """What is left of a value after `progress` in [0, 1] of a run; it rises over the first `warmup` updates."""
    progress = min(max(progress, 0.0), 1.0)
    left = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
    if kind not in left:
        raise ValueError(f"schedule '{kind}' is unknown; one of: constant, linear, cosine")
    return left[kind] * (min(1.0, (update + 1) / warmup) if warmup else 1.0)
