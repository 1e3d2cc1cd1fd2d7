"""From rewards to advantages (formulas.md, section 2). Discounting happens here and nowhere else."""

import torch
from tensordict import TensorDict


def chunk_rewards(reward: torch.Tensor, gamma: float) -> torch.Tensor:
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
    following = rollout["next"]
    discount = gamma ** following["executed"].float()
    alive = (~following["terminated"]).float()
    same_episode = (~(following["terminated"] | following["truncated"])).float()
    delta = chunk_rewards(following["reward"], gamma) + discount * alive * following["value"] - rollout["value"]
    valid = rollout.get("valid", None)
    if valid is not None:
        delta = torch.where(valid, delta, 0.0)
    carry = discount * gae_lambda * same_episode
    advantage = torch.empty_like(delta)
    running = torch.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        running = delta[t] + carry[t] * running
        advantage[t] = running
    return advantage, advantage + rollout["value"]
