"""The clipped loss that PPO and GRPO share, and what is told of it."""

import math
from dataclasses import dataclass

import torch
from tensordict import TensorDict

from sparring.processes.distributed import Distributed

# a ratio of e^20 counts as any larger one: exp(89) overflows float32, and then even a clipped gradient is NaN
LARGEST_LOG_RATIO = 20.0


@dataclass
class LossTerms:
    """Of one minibatch, detached and left on the device: reading a number there would make the CPU wait."""

    # by name: "loss", "policy_loss", ...
    scalars: dict[str, torch.Tensor]
    # [B], or [B, S] where denoising steps count one by one
    log_ratio: torch.Tensor
    # of stale decisions, before any cap: [B], [B, S] or [B, 1]; None where none was weighed
    weight: torch.Tensor | None = None


def clipped_policy_loss(
    log_ratio: torch.Tensor,
    advantage: torch.Tensor,
    low: float,
    high: float,
    step_weights: torch.Tensor | None = None,
    dual_clip: float | None = None,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """`-mean min(r A, clip(r, 1 - low, 1 + high) A)`, A the advantage [B].

    Where `log_ratio` is [B, S], each pair (decision, step) is clipped by itself and has the advantage A * weight of the
    step. With `dual_clip` c the gain of a bad decision is never below c A, however large its ratio is. What is clipped
    counts `weight` times, where there is one.
    """
    # [B], or [B, 1] * [S]
    cost = -advantage if step_weights is None else -advantage[:, None] * step_weights
    ratio = log_ratio.clamp_max(LARGEST_LOG_RATIO).exp()
    loss = torch.max(ratio * cost, ratio.clamp(1 - low, 1 + high) * cost)
    if dual_clip is not None:
        loss = torch.where(cost > 0, torch.min(loss, dual_clip * cost), loss)
    return loss.mean() if weight is None else (weight * loss).mean()


def approximate_kl(log_ratio: torch.Tensor) -> torch.Tensor:
    """KL(p || q) from samples of p, `mean((r - 1) - log r)` with r = q/p: never negative."""
    log_ratio = log_ratio.clamp_max(LARGEST_LOG_RATIO)
    return (log_ratio.exp() - 1 - log_ratio).mean()


def reference_kl(batch: TensorDict, scored: TensorDict) -> torch.Tensor:
    """Of the present policy to a frozen one, `reference_log_prob` of its own; r = reference / present."""
    return approximate_kl((batch["reference_log_prob"] - scored["log_prob"]).float())


def join_terms(parts: list[LossTerms], shares: list[float]) -> LossTerms:
    """Of micro-batches, as if they had been one; `shares` of the minibatch that they hold."""
    if len(parts) == 1:
        return parts[0]
    scalars = {
        name: sum(part.scalars[name] * share for part, share in zip(parts, shares, strict=True))
        for name in parts[0].scalars
    }
    weight = None if parts[0].weight is None else torch.cat([part.weight for part in parts])
    return LossTerms(scalars, torch.cat([part.log_ratio for part in parts]), weight)


def mean_terms(terms: list[LossTerms], low: float, high: float) -> dict[str, float]:
    """What an update did, as means over its minibatches."""
    means = {name: float(torch.stack([term.scalars[name] for term in terms]).mean()) for name in terms[0].scalars}
    log_ratio = torch.cat([term.log_ratio for term in terms])
    off = log_ratio.exp() - 1
    means["approx_kl"] = float(approximate_kl(log_ratio))
    means["clip_fraction"] = float(((off > high) | (off < -low)).float().mean())
    return means


def spread(name: str, values: torch.Tensor, distributed: Distributed) -> dict[str, float]:
    """Mean and standard deviation of `values [B]` of all processes together, as metrics."""
    values = values.double()
    sums = torch.stack([torch.ones_like(values), values, values.square()]).sum(1)
    count, total, squares = distributed.sum(sums).tolist()
    mean = total / count
    return {f"{name}_mean": mean, f"{name}_std": math.sqrt(max(0.0, squares / count - mean**2))}
