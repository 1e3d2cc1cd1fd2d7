"""From rewards to advantages. Discounting happens here and nowhere else."""

import torch
from tensordict import TensorDict

# of a value, on average, below which its level is not worked out
_LEAST_KEPT = 1e-3


def _chunk_rewards(reward: torch.Tensor, gamma: float) -> torch.Tensor:
    """`sum_i gamma^i r_i` over the steps of a chunk: [..., C] -> [...]. Steps after the end carry 0."""
    powers = gamma ** torch.arange(reward.shape[-1], device=reward.device, dtype=reward.dtype)
    return (reward * powers).sum(-1)


@torch.no_grad()
def gae(rollout: TensorDict, gamma: float, gae_lambda: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation over decisions, decision k executing n_k steps.

    delta_k = sum_{i<n_k} gamma^i r_i + gamma^{n_k} V_next - V_k    (V_next = 0 when terminated, not when truncated)
    A_k     = delta_k + gamma^{n_k} lambda (1 - done_k) A_{k+1}
    Returns (advantage, return), both [T, N]. Decisions that are not `valid` have advantage 0, and nothing passes
    through them.
    """
    delta, discount, same_episode = _deltas(rollout, gamma)
    advantage = _backwards(delta, discount * gae_lambda * same_episode)
    return advantage, advantage + rollout["value"]


@torch.no_grad()
def vtrace(
    rollout: TensorDict, gamma: float, gae_lambda: float, weight: torch.Tensor, rho_bar: float, c_bar: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """V-trace over decisions, `weight` [T, N] the likelihood of each by present weights over that by those that acted.

    rho_k = min(rho_bar, weight_k), c_k = lambda min(c_bar, weight_k), delta_k as in `gae`
    vs_k - V_k = rho_k delta_k + gamma^{n_k} c_k (1 - done_k) (vs_{k+1} - V_{k+1})
    A_k        = delta_k + gamma^{n_k} lambda (1 - done_k) (vs_{k+1} - V_{k+1})
    Returns (A, vs). A is not weighted by rho: whoever learns from it does that. With lambda = 1 it is the
    `r + gamma vs_{k+1} - V_k` of the paper; with this lambda, weights of 1 give what `gae` does.
    """
    delta, discount, same_episode = _deltas(rollout, gamma)
    carry = discount * gae_lambda * same_episode
    off = _backwards(weight.clamp_max(rho_bar) * delta, weight.clamp_max(c_bar) * carry)
    advantage = delta.clone()
    advantage[:-1] += carry[:-1] * off[1:]
    return advantage, rollout["value"] + off


@torch.no_grad()
def missing_level(rollout: TensorDict, gamma: float, sum_over_processes=lambda tensor: tensor) -> float:
    """What all values lack: with so much added to each of them, the deltas of `gae` have mean 0.

    mean(delta) / mean(1 - gamma^{n_k} (1 - terminated_k)); of a critic that says 0 everywhere, the one value that fits
    best. 0 where hardly anything ends or is discounted: it would hang on a few episodes.
    """
    delta, discount, _ = _deltas(rollout, gamma)
    # of a value that is added, what is not added again by the next one
    kept = 1 - discount * (~rollout["next", "terminated"]).float()
    valid = rollout.get("valid", None)
    if valid is not None:
        kept = torch.where(valid, kept, 0.0)
    sums = torch.stack([delta.double().sum(), kept.double().sum(), kept.new_tensor(kept.numel()).double()])
    missing, kept, decisions = sum_over_processes(sums).tolist()
    return missing / kept if kept > _LEAST_KEPT * decisions else 0.0


def _deltas(rollout: TensorDict, gamma: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """delta_k, gamma^{n_k} and 1 - done_k, all [T, N]."""
    following = rollout["next"]
    discount = gamma ** following["executed"].float()
    alive = (~following["terminated"]).float()
    same_episode = (~(following["terminated"] | following["truncated"])).float()
    delta = _chunk_rewards(following["reward"], gamma) + discount * alive * following["value"] - rollout["value"]
    valid = rollout.get("valid", None)
    if valid is not None:
        delta = torch.where(valid, delta, 0.0)
    return delta, discount, same_episode


def _backwards(gain: torch.Tensor, carry: torch.Tensor) -> torch.Tensor:
    """`x_k = gain_k + carry_k x_{k+1}`, [T, N]."""
    total = torch.empty_like(gain)
    running = torch.zeros_like(gain[0])
    for t in reversed(range(len(gain))):
        running = gain[t] + carry[t] * running
        total[t] = running
    return total
