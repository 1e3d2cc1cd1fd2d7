"""GradientStep: lays parameters out flat, averages gradients over processes, clips them, applies them if finite."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from sparring.errors import Diverged
from sparring.policies.weights import load_optimizer
from sparring.processes.distributed import Distributed

# keys computed from the env's observations and rewards; the absolute value above which the error mentions them
_OF_ENV, _LARGE = ("observation", "next", "advantage", "return"), 1e6


@dataclass
class _Step:
    """An attempted gradient step. On a GPU its norm is copied asynchronously until `arrived`; None: already copied."""

    batch: TensorDict
    loss: Tensor
    norm: Tensor
    arrived: torch.cuda.Event | None = None
    judged: bool = False

    def known_norm(self) -> float:
        if self.arrived is not None:
            self.arrived.synchronize()
        return float(self.norm)


class GradientStep:
    """Zero, backward, average, clip, step, for the parameter `groups` of a torch optimiser; drops empty groups.

    If the loss or the gradient of any process is not finite, no process takes the step and all raise Diverged: at
    once on a CPU; before the next step or in `end_update` on a GPU, to avoid a synchronisation.
    """

    # how many non-finite steps of an update are skipped before it raises
    skips = 0

    def __init__(
        self,
        groups: list[dict[str, Any]],
        distributed: Distributed,
        max_grad_norm: float,
        rate: str,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
        memory: Callable[[str, int], AbstractContextManager] = lambda doing, rows: nullcontext(),
        foreach: bool | None = None,
        **settings,
    ):
        """`rate`: the setting to lower if training diverges. `memory(doing, rows)`: a context that explains an
        out-of-memory error. `foreach`: as in `clip_grad_norm_`; on a GPU its value changes the summation order."""
        self.distributed, self.max_grad_norm, self.rate = distributed, max_grad_norm, rate
        self.memory, self.foreach = memory, foreach
        groups = [group for group in groups if group["params"]]
        with memory("allocating gradients", 0):
            self.groups = [_FlatParameters(group["params"]) for group in groups]
        vectors = [group | {"params": [flat.vector]} for group, flat in zip(groups, self.groups, strict=True)]
        self.optimizer = optimizer(vectors, fused=True, **settings)
        # in this update: attempted steps, skipped steps, and the newest step
        self.tried = self.left_out = 0
        self._newest: _Step | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.groups for parameter in group.parameters]

    def __call__(self, batch: TensorDict, loss: Tensor) -> Tensor:
        """One step on the loss of a batch; returns the norm of its gradients before clipping."""
        self._zero()
        loss.backward()
        self._learned_from = batch, loss.detach()
        return self.apply()

    def backward(self, batch: TensorDict, loss: Callable, micro_batch_size: int | None) -> list[tuple[Any, float]]:
        """Accumulate gradients of `loss(part) -> loss, terms` over micro-batches; returns (terms, share) of each."""
        self._zero()
        parts = batch.split(micro_batch_size) if micro_batch_size else [batch]
        terms, losses = [], []
        for part in parts:
            share = len(part) / len(batch)
            with self.memory("computing gradients", len(part)):
                cost, term = loss(part)
                cost = cost if len(parts) == 1 else cost * share
                cost.backward()
            terms.append((term, share))
            losses.append(cost.detach())
        self._learned_from = batch, sum(losses[1:], losses[0])
        return terms

    def apply(self, learning: "list[_FlatParameters] | None" = None, weight: float = 1.0) -> Tensor:
        """Average the gradients over processes, clip and step; returns the norm. `learning`: groups to update; None:
        all. `weight`: the weight of this process's gradients, 1 on average over the processes."""
        learning = self.groups if learning is None else learning
        for group in self.groups:
            # Adam skips parameters without a gradient: values and moments stay
            group.vector.grad = None
        batch, loss = self._learned_from
        del self._learned_from  # a batch of images is large, so it is freed before robots act
        at_once = loss.device.type == "cpu"
        looks = at_once and self.distributed.world_size == 1
        if not looks:
            # adds 0, or NaN for a non-finite loss: every process detects it in the averaged gradient, without another
            # all-reduce
            learning[0].gradient[:1].add_(loss * 0)
        for group in learning:
            group.vector.grad = group.gradient
            if weight != 1:
                group.gradient.mul_(weight)
            self.distributed.average_(group.gradient)
        norm = nn.utils.clip_grad_norm_([g.vector for g in learning], self.max_grad_norm, foreach=self.foreach)
        if looks and not math.isfinite(loss):
            norm = norm * math.nan
        self._judge()
        step = self._newest = _Step(batch, loss, norm)
        self.tried += 1
        if at_once:
            is_finite = self._judge()
        else:
            is_finite = True
            # with found_inf = 1, a fused step on a GPU changes neither weights nor moments
            self.optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
            step.norm = norm.to("cpu", non_blocking=True)
            step.arrived = torch.cuda.current_stream(norm.device).record_event()
        if is_finite:
            with self.memory("applying a gradient step", 0):
                self.optimizer.step()
        return norm

    def end_update(self) -> int:
        """Check the last step and the weights; returns how many steps of the update were skipped as non-finite."""
        self._judge()
        # the largest absolute value, without allocating a tensor of the same size
        if not all(torch.linalg.vector_norm(group.vector.detach(), math.inf).isfinite() for group in self.groups):
            raise self._diverged(f"weights are NaN or infinite after gradient step {self.tried} of this update")
        left_out, self.left_out, self.tried, self._newest = self.left_out, 0, 0, None
        return left_out

    def _judge(self) -> bool:
        """Check the newest step once. False: it was skipped; raises Diverged after more than `skips` of them."""
        step = self._newest
        if step is None or step.judged:
            return True
        step.judged, norm = True, step.known_norm()
        if math.isfinite(norm):
            return True
        self.left_out += 1
        if self.left_out > self.skips:
            loss = float(step.loss)
            spoiled = f"the norm of the gradient is {norm:g}" if math.isfinite(loss) else f"the loss is {loss:g}"
            raise self._diverged(f"{spoiled} in gradient step {self.tried} of this update, which was not taken")
        return False

    def _diverged(self, what: str) -> Diverged:
        step = self._newest
        if step is None:
            return Diverged(f"training has diverged: {what}; lower {self.rate}")
        items = step.batch.items(include_nested=True, leaves_only=True)
        floats = [
            (key if isinstance(key, tuple) else (key,), value) for key, value in items if value.dtype.is_floating_point
        ]
        most = {key: float(cast(Tensor, value).abs().max()) for key, value in floats if len(value)}
        found = [f"{'/'.join(key)} is not finite" for key, value in most.items() if not math.isfinite(value)]
        large = {key: value for key, value in most.items() if key[0] in _OF_ENV and _LARGE < value < math.inf}
        found += [f"the largest number in {'/'.join(key)} is {value:.2g}" for key, value in large.items()]
        advice = f"check the training data: {', '.join(found)}; or lower {self.rate}" if found else f"lower {self.rate}"
        about = {"gradient_step": self.tried, "loss": float(step.loss), "grad_norm": step.known_norm()}
        about["learning_rate"] = self.optimizer.param_groups[0]["lr"]
        return Diverged(f"training has diverged: {what}; {advice}", step.batch, about)

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def scale_lr(self, factor: float) -> None:
        """Set the learning rate of each group to this fraction of its `base_lr`."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_optimizer(self.optimizer, state)

    def _zero(self) -> None:
        for group in self.groups:
            # a module that was moved or cast since has new tensors, which the optimiser would not update
            first = group.parameters[0]
            if first.data_ptr() != group.vector.data_ptr() or first.grad is None:
                raise RuntimeError("the policy was moved, cast or its gradients dropped after its algorithm was made")
            group.gradient.zero_()


class _FlatParameters:
    """`vector` holds the values and `gradient` the gradients; the parameters become views into both.

    Clipping and Adam then take a few operations in total instead of a few per tensor. This saves a sixth of the time of
    a small minibatch on a CPU, and many kernel launches on a GPU. Processes average one tensor per gradient step.
    Parameters that do not occur in a loss have zero gradients in it, so no process waits for a missing gradient.
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
    """The factor of a setting after `progress` in [0, 1] of a run; it rises to 1 over the first `warmup` updates."""
    progress = min(max(progress, 0.0), 1.0)
    left = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
    if kind not in left:
        raise ValueError(f"schedule '{kind}' is unknown; one of: constant, linear, cosine")
    return left[kind] * (min(1.0, (update + 1) / warmup) if warmup else 1.0)
