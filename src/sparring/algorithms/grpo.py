"""Group-relative policy optimisation: compares episodes with the same start state."""

import logging
from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from sparring.algorithms.advantages import ratio_and_weight
from sparring.algorithms.configs import GRPOConfig
from sparring.algorithms.gradient_step import schedule
from sparring.algorithms.ppo import Algorithm, LossTerms, clipped_policy_loss
from sparring.algorithms.scoring import Decisions
from sparring.errors import UserError
from sparring.policies.policy import Policy
from sparring.processes.distributed import Distributed

_log = logging.getLogger(__name__)

# keys of a minibatch, in addition to the observations that the policy declares
_LEARNED_FROM = ["action", "log_prob", "advantage", ("next", "executed")]


class GRPO(Algorithm):
    """PPO without a critic: the advantage of an episode is its reward relative to its group.

    `update` takes a rollout [T, N] of whole episodes.
    """

    config: GRPOConfig
    section = "grpo"

    def __init__(self, config: GRPOConfig, policy: Policy, distributed: Distributed | None = None, seed: int = 0):
        for parameter in policy.critic_parameters():
            parameter.requires_grad_(False)
        super().__init__(config, policy, distributed, seed, [(policy.actor_parameters(), config.policy_lr)])

    def update(self, rollout: TensorDict, progress: float = 0.0) -> dict[str, float]:
        """One update. `progress`: the fraction of the run in [0, 1], for the schedules."""
        config, policy, distributed = self.config, self.policy, self.distributed
        lr_factor = schedule(config.lr_schedule, progress, self.updates, config.warmup_updates)
        self.step.scale_lr(lr_factor)

        self.scorer.freeze_reference()
        # adds age, and log-probs under the current weights
        stale = self.off_policy.annotate(rollout, self.version)
        groups = _compare_groups(rollout, config.advantage_eps)
        rollout["advantage"] = groups.advantage
        # [T, N] -> [T*N]
        valid = Decisions(rollout.flatten(0, 1))
        decisions = valid.where(groups.kept.flatten()[valid.rows])
        counted = len(decisions) > 0
        skipped = not distributed.max(counted)
        if skipped:
            _log.warning("update %s skipped: in every group all episodes have the same reward", self.updates + 1)
        # a process whose groups were all dropped takes part with weight 0, because the other processes wait for it
        decisions = decisions if counted else valid
        keys = _LEARNED_FROM + stale + ([] if skipped else self.scorer.add_reference(decisions))
        self.parity_gate.begin_update(decisions, whole=skipped)

        def loss(batch: TensorDict) -> tuple[Tensor, LossTerms]:
            scored = policy.evaluate(batch)
            self.parity_gate.compare(batch, scored)
            return grpo_loss(config, batch, scored, policy.step_weights)

        terms: list[LossTerms] = []
        for batch, weight in self.minibatches(decisions, keys, 0 if skipped else config.epochs, terms, counted):
            terms.append(self.gradient_step(batch, loss, weight=weight))

        terms, left_out = self.steps_taken(terms)
        off_policy = self.off_policy.metrics(decisions, [term.weight for term in terms])
        valid.update_normalizers(policy, distributed)
        self.updates += 1
        means = LossTerms.means(terms, config.clip_low, config.clip_high)
        means |= {"groups_dropped": float(groups.dropped), "valid_fraction": len(valid) / len(valid.flat)}
        spread = {} if skipped else decisions.spread("advantage", distributed)
        metrics = {"lr": config.policy_lr * lr_factor} | self.parity_gate.metrics() | spread | off_policy | left_out
        return distributed.mean(means) | metrics


class _Groups(NamedTuple):
    # [T, N]: the same for all decisions of an episode; 0 where not valid or dropped
    advantage: Tensor
    # [T, N] bool: decisions of groups whose episodes differ in reward
    kept: Tensor
    dropped: int


@torch.no_grad()
def _compare_groups(rollout: TensorDict, eps: float) -> _Groups:
    """`A_i = (R_i - mean_g) / (std_g + eps)`: R is the undiscounted reward of an episode, g its group."""
    if rollout.get("group", None) is None:
        why = "this rollout has no groups; set rollout.n_episodes_per_batch and rollout.group_size"
        raise UserError(f"GRPO compares whole episodes with the same start state, and {why}")
    valid = rollout["valid"]
    # [V]: the index, from 0, of the episode of each valid decision
    _, episode = rollout["episode"][valid].unique(return_inverse=True)
    _, group_of_decision = rollout["group"][valid].unique(return_inverse=True)
    reward = rollout["next", "reward"].double().sum(-1)[valid]
    total = reward.new_zeros(int(episode.max()) + 1).index_add(0, episode, reward)
    group = torch.zeros(len(total), dtype=torch.long, device=total.device).scatter(0, episode, group_of_decision)
    size = torch.bincount(group).double()
    mean = torch.zeros_like(size).index_add(0, group, total) / size
    off = total - mean[group]
    std = (torch.zeros_like(size).index_add(0, group, off.square()) / (size - 1).clamp_min(1)).sqrt()
    # tests for exactly equal rewards, which rounding of the mean could hide
    worst = torch.zeros_like(size).scatter_reduce(0, group, total, "amin", include_self=False)
    best = torch.zeros_like(size).scatter_reduce(0, group, total, "amax", include_self=False)
    differs = best > worst
    advantage = torch.where(differs[group], off / (std[group] + eps), 0.0).float()
    # [V] -> [T, N]
    everywhere = torch.zeros(valid.shape, device=valid.device)
    everywhere[valid] = advantage[episode]
    kept = valid.clone()
    kept[valid] = differs[group_of_decision]
    return _Groups(everywhere, kept, int((~differs).sum()))


def grpo_loss(
    config: GRPOConfig, batch: TensorDict, scored: TensorDict, step_weights: Tensor | None = None
) -> tuple[Tensor, LossTerms]:
    """The loss of a minibatch [B], and its terms. `scored`: evaluate() of the minibatch."""
    log_ratio, weight, counted = ratio_and_weight(config, batch, scored)
    low, high = config.clip_low, config.clip_high
    loss = clipped_policy_loss(log_ratio, batch["advantage"], low, high, step_weights, weight=counted)
    scalars = {"policy_loss": loss, "entropy": scored["entropy"].mean()}
    if config.kl_coef:
        scalars["reference_kl"] = LossTerms.reference_kl(batch, scored)
        loss = loss + config.kl_coef * scalars["reference_kl"]
    return loss, LossTerms({"loss": loss} | scalars, log_ratio, weight)
