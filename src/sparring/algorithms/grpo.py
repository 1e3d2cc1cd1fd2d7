"""Group-relative policy optimisation (formulas.md, section 2): episodes that began alike judge each other."""

import logging
from dataclasses import dataclass

import torch
from tensordict import TensorDict

from sparring.algorithms.configs import GRPOConfig
from sparring.algorithms.losses import LossTerms, clipped_policy_loss, mean_terms, reference_kl, spread
from sparring.algorithms.off_policy import counted, ratio_and_weight
from sparring.algorithms.scoring import valid_rows
from sparring.algorithms.updater import Updater
from sparring.errors import UserError
from sparring.policies.policy import Policy
from sparring.processes.distributed import Distributed

log = logging.getLogger(__name__)

# what a minibatch holds beside the observations the policy declares
LEARNED_FROM = ["action", "log_prob", "advantage", ("next", "executed")]


class GRPO(Updater):
    """PPO without a critic: the advantage of an episode is how it did beside the others of its group.

    `update` takes a rollout [T, N] of whole episodes.
    """

    config: GRPOConfig
    section = "grpo"

    def __init__(self, config: GRPOConfig, policy: Policy, distributed: Distributed | None = None, seed: int = 0):
        for parameter in policy.critic_parameters():
            parameter.requires_grad_(False)
        super().__init__(config, policy, distributed, seed)

    def update(self, rollout: TensorDict, progress: float = 0.0) -> dict[str, float]:
        """One update; `progress` as PPO's."""
        config = self.config
        lr = self._begin(progress)
        stale = self._look_back(rollout)
        groups = compare_groups(rollout, config.advantage_eps)
        rollout["advantage"] = groups.advantage
        flat = rollout.flatten(0, 1)
        valid = valid_rows(flat)
        counts = {"groups_dropped": float(groups.dropped), "valid_fraction": len(valid) / len(flat)}
        rows = valid[groups.kept.flatten()[valid]]
        if self.distributed.max(len(rows)) == 0:
            aged = self._stale_metrics(flat, valid, [])
            return self._skip(flat, valid, counts) | {"lr": lr} | aged
        # the others wait for a process all of whose groups were dropped: its decisions take part with advantages of 0
        rows = rows if len(rows) else valid
        keys = LEARNED_FROM + self._score_by_reference(flat, rows) + stale

        def loss(batch, scored):
            return grpo_loss(config, batch, scored, self.policy.step_weights)

        terms, parity = self._learn(flat, rows, keys, config.epochs, loss)
        aged = self._stale_metrics(flat, rows, terms)
        self._end(flat, valid)
        means = mean_terms(terms, config.clip_low, config.clip_high) | counts | {"gradient_steps": float(len(terms))}
        told = {"lr": lr, "parity": parity.drift, "parity_ratio": parity.ratio}
        told |= spread("advantage", flat["advantage"][rows], self.distributed)
        return self.distributed.mean(means) | told | aged

    def _skip(self, flat: TensorDict, valid: torch.Tensor, counts: dict[str, float]) -> dict[str, float]:
        """No group tells good from bad: nothing is learned, though the gate looks on."""
        log.warning("update %s skipped: in each group all episodes earned the same reward", self.updates + 1)
        parity = self._whole_parity(flat, valid)
        self._end(flat, valid)
        means = self.distributed.mean(counts | {"gradient_steps": 0.0})
        return means | {"parity": parity.drift, "parity_ratio": parity.ratio}


@dataclass
class Groups:
    # [T, N]: of each decision, the same for all of an episode; 0 where not valid or dropped
    advantage: torch.Tensor
    # [T, N] bool: of groups that tell good from bad
    kept: torch.Tensor
    dropped: int


@torch.no_grad()
def compare_groups(rollout: TensorDict, eps: float) -> Groups:
    """`A_i = (R_i - mean_g) / (std_g + eps)`, R the undiscounted reward of an episode, g those that began alike."""
    if rollout.get("group", None) is None:
        raise UserError(
            "GRPO compares whole episodes that began alike, and this rollout does not say which did; "
            "set rollout.n_episodes_per_batch and rollout.group_size"
        )
    valid = rollout["valid"]
    # numbers of the episodes that count, from 0; which [V] decisions are theirs
    _, episode = rollout["episode"][valid].unique(return_inverse=True)
    _, group_of_decision = rollout["group"][valid].unique(return_inverse=True)
    reward = rollout["next", "reward"].double().sum(-1)[valid]
    total = reward.new_zeros(int(episode.max()) + 1).index_add(0, episode, reward)
    group = torch.zeros(len(total), dtype=torch.long, device=total.device).scatter(0, episode, group_of_decision)
    size = torch.bincount(group).double()
    mean = torch.zeros_like(size).index_add(0, group, total) / size
    off = total - mean[group]
    std = (torch.zeros_like(size).index_add(0, group, off.square()) / (size - 1).clamp_min(1)).sqrt()
    # exactly equal rewards, whatever rounding makes of their mean
    worst = torch.zeros_like(size).scatter_reduce(0, group, total, "amin", include_self=False)
    best = torch.zeros_like(size).scatter_reduce(0, group, total, "amax", include_self=False)
    tells = best > worst
    advantage = torch.where(tells[group], off / (std[group] + eps), 0.0).float()
    # [V] -> [T, N]
    everywhere = torch.zeros(valid.shape, device=valid.device)
    everywhere[valid] = advantage[episode]
    kept = valid.clone()
    kept[valid] = tells[group_of_decision]
    return Groups(everywhere, kept, int((~tells).sum()))


def grpo_loss(
    config: GRPOConfig, batch: TensorDict, scored: TensorDict, step_weights: torch.Tensor | None = None
) -> tuple[torch.Tensor, LossTerms]:
    """The loss to minimise for a minibatch [B] and what evaluate() says of it now."""
    log_ratio, weight = ratio_and_weight(config, batch, scored)
    used = None if weight is None else counted(config, weight)
    loss = policy_loss = clipped_policy_loss(
        log_ratio, batch["advantage"], config.clip_low, config.clip_high, step_weights, weight=used
    )
    scalars = {"policy_loss": policy_loss, "entropy": scored["entropy"].mean()}
    if config.kl_coef:
        scalars["reference_kl"] = reference_kl(batch, scored)
        loss = loss + config.kl_coef * scalars["reference_kl"]
    scalars = {"loss": loss} | scalars
    return loss, LossTerms({name: scalar.detach() for name, scalar in scalars.items()}, log_ratio.detach(), weight)
