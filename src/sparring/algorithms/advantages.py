"""Advantages from rewards (GAE, V-trace), and off-policy corrections for decisions taken by older weights.

Discounting happens here and nowhere else. An off-policy update involves three policies: the behaviour policy that acted
(`log_prob`), the proximal policy at the beginning of the update, and the policy that learns. `w = proximal / behaviour`
corrects for changes before the update and is constant during it; `r = learning / proximal` is PPO's clipped ratio.
V-trace uses `rho`, a truncated w, instead of w.
"""

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from sparring.algorithms.configs import AlgorithmConfig, PPOConfig
from sparring.algorithms.scoring import Decisions, Scorer
from sparring.errors import UserError

# `missing_level` returns 0 if the mean of 1 - gamma^n (1 - terminated) is below this
_LEAST_KEPT = 1e-3
# log ratios are clamped here: exp(89) overflows float32, and then even a clipped gradient is NaN
LARGEST_LOG_RATIO = 20.0


@torch.no_grad()
def gae(rollout: TensorDict, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over decisions; decision k executes n_k env steps.

    delta_k = sum_{i<n_k} gamma^i r_i + gamma^{n_k} V_next - V_k    (V_next = 0 when terminated, not when truncated)
    A_k     = delta_k + gamma^{n_k} lambda (1 - done_k) A_{k+1}
    Returns (advantage, return), both [T, N]. Decisions that are not `valid` have advantage 0 and do not propagate
    later rewards."""
    delta, discount, same_episode = _deltas(rollout, gamma)
    advantage = _backwards(delta, discount * gae_lambda * same_episode)
    return advantage, advantage + rollout["value"]


@torch.no_grad()
def vtrace(
    rollout: TensorDict, gamma: float, gae_lambda: float, weight: Tensor, rho_bar: float, c_bar: float
) -> tuple[Tensor, Tensor]:
    """V-trace over decisions. `weight` [T, N]: probability under the current weights / under the behaviour policy.

    rho_k = min(rho_bar, weight_k), c_k = lambda min(c_bar, weight_k), delta_k as in `gae`
    vs_k - V_k = rho_k delta_k + gamma^{n_k} c_k (1 - done_k) (vs_{k+1} - V_{k+1})
    A_k        = delta_k + gamma^{n_k} lambda (1 - done_k) (vs_{k+1} - V_{k+1})
    Returns (A, vs). A is not multiplied by rho; the loss does that. With lambda = 1, A is the
    `r + gamma vs_{k+1} - V_k` of the paper. With weights of 1, the result equals that of `gae`."""
    delta, discount, same_episode = _deltas(rollout, gamma)
    carry = discount * gae_lambda * same_episode
    off = _backwards(weight.clamp_max(rho_bar) * delta, weight.clamp_max(c_bar) * carry)
    advantage = delta.clone()
    advantage[:-1] += carry[:-1] * off[1:]
    return advantage, rollout["value"] + off


@torch.no_grad()
def missing_level(rollout: TensorDict, gamma: float, sum_over_processes=lambda tensor: tensor) -> float:
    """The constant to add to all values so that the deltas of `gae` have mean 0.

    mean(delta) / mean(1 - gamma^{n_k} (1 - terminated_k)). For a critic that is 0 everywhere, this is the constant that
    fits best. Returns 0 if almost nothing terminates or is discounted: the result would depend on a few episodes."""
    delta, discount, _ = _deltas(rollout, gamma)
    # the part of an added constant that the bootstrapped next value does not cancel
    kept = 1 - discount * (~rollout["next", "terminated"]).float()
    valid = rollout.get("valid", None)
    if valid is not None:
        kept = torch.where(valid, kept, 0.0)
    sums = torch.stack([delta.double().sum(), kept.double().sum(), kept.new_tensor(kept.numel()).double()])
    missing, kept, decisions = sum_over_processes(sums).tolist()
    return missing / kept if kept > _LEAST_KEPT * decisions else 0.0


def _deltas(rollout: TensorDict, gamma: float) -> tuple[Tensor, Tensor, Tensor]:
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


def _backwards(gain: Tensor, carry: Tensor) -> Tensor:
    """`x_k = gain_k + carry_k x_{k+1}`, [T, N]."""
    total = torch.empty_like(gain)
    running = torch.zeros_like(gain[0])
    for t in reversed(range(len(gain))):
        running = gain[t] + carry[t] * running
        total[t] = running
    return total


def _chunk_rewards(reward: Tensor, gamma: float) -> Tensor:
    """`sum_i gamma^i r_i` over the steps of a chunk: [..., C] -> [...]. Steps after the end carry 0."""
    powers = gamma ** torch.arange(reward.shape[-1], device=reward.device, dtype=reward.dtype)
    return (reward * powers).sum(-1)


@dataclass
class OffPolicy:
    """Finds stale decisions, scores them under the current weights, and reports their importance weights."""

    config: AlgorithmConfig
    scorer: Scorer
    # whether stale data will be collected: metrics then include staleness even if all data is on-policy
    expected: bool = False

    def check_correctable(self) -> None:
        """Raise for a policy whose stale decisions cannot be corrected."""
        policy, section = self.scorer.policy, self.scorer.section
        if self.config.correction == "none" or policy.scores_all:
            return
        raise UserError(
            f"{section}.correction={self.config.correction}: {type(policy).__name__} scores only some of its "
            "denoising steps (policy.method=flow_sde_one_step, or fewer policy.denoising_steps than there are) or none "
            "(fpo), and such scores give no ratio of two policies, so stale decisions cannot be corrected. Set "
            f"policy.method=flow_sde or flow_noise, learn on-policy, or set {section}.correction=none. "
            "In your own training loop, set collector.version=algorithm.version, or on-policy data counts as stale"
        )

    def annotate(self, rollout: TensorDict, version: int) -> list[str]:
        """Add `age` (how many versions the behaviour weights are behind `version`) and the keys for the correction.

        Returns the added keys; none if the whole rollout [T, N] is on-policy in every process."""
        stamped = rollout.get("version", None)
        age = torch.zeros_like(rollout["next", "executed"]) if stamped is None else (version - stamped).clamp_min(0)
        # the same branch in every process: all must return the same metrics
        if self.scorer.distributed.max(float(age.max())) == 0:
            # another algorithm may have annotated it before
            rollout.pop("age", None)
            return []
        rollout["age"] = age
        if self.config.correction == "none":
            return ["age"]
        self.check_correctable()
        if self.config.proximal == "interpolated":
            return ["age"]
        decisions, policy = Decisions(rollout.flatten(0, 1)), self.scorer.policy
        old = decisions.where(decisions["age"] > 0)
        # on-policy decisions keep their stored log-prob and value
        log_prob, value = decisions.flat["log_prob"].clone(), decisions.flat["value"].clone()
        for index, scored in self.scorer.parts(policy, old, "scoring stale decisions"):
            log_prob[index], value[index] = scored["log_prob"].to(log_prob.dtype), scored["value"].to(value.dtype)
        rollout["proximal_log_prob"] = log_prob.unflatten(0, rollout.batch_size)
        rollout["proximal_value"] = value.unflatten(0, rollout.batch_size)
        return ["age", "proximal_log_prob", "proximal_value"]

    def for_vtrace(self, rollout: TensorDict) -> tuple[TensorDict, Tensor]:
        """An annotated rollout with the values of the current critic, and its weights w [T, N].

        `next/value` is the value of the next row. At the end of an episode or of the rollout the stored one stays."""
        flat, following, value = rollout.flatten(0, 1), rollout["next"], rollout["proximal_value"]
        weight = _weight(self.config, flat["log_prob"], flat["proximal_log_prob"]).view(rollout.batch_size)
        goes_on = ~(following["terminated"] | following["truncated"])[:-1]
        after = following["value"].clone()
        after[:-1] = torch.where(goes_on, value[1:], after[:-1])
        return rollout.copy().set("value", value).set("next", following.copy().set("value", after)), weight

    def metrics(self, decisions: Decisions, weights: list[Tensor | None]) -> dict[str, float]:
        """Staleness and importance weights over all processes; empty for on-policy training.

        `weights`: those of the minibatches. `ess`: the effective sample size of the capped weights as a share of the
        decisions, `(sum w)^2 / (N sum w^2)`. The other metrics describe the weights before the cap."""
        config, distributed = self.config, self.scorer.distributed
        if decisions.flat.get("age", None) is None:
            # an on-policy update, in a run that also has stale ones
            ages = {"staleness_mean": 0.0, "staleness_max": 0.0, "parity_skipped": 0.0}
            ones = {"ess": 1.0, "weight_mean": 1.0, "weight_max": 1.0, "weight_masked": 0.0}
            return (ages if config.correction == "none" else ages | ones) if self.expected else {}
        age = decisions["age"]
        ages = {"staleness_mean": float(age.float().mean()), "parity_skipped": float((age > 0).float().mean())}
        ages = distributed.mean(ages) | {"staleness_max": distributed.max(float(age.max()))}
        weighed = [weight for weight in weights if weight is not None]
        if not weighed:
            return ages
        weight = torch.cat(weighed).flatten().double()
        used = _counted(config, weight)
        past = (weight > _cap(config)).double()
        sums = torch.stack([torch.ones_like(weight), weight, past, used, used.square()]).sum(1)
        number, total, masked, effective, squares = distributed.sum(sums).tolist()
        ages |= {"ess": effective**2 / (number * squares) if squares else 0.0, "weight_mean": total / number}
        return ages | {"weight_max": distributed.max(float(weight.max())), "weight_masked": masked / number}


def ratio_and_weight(
    config: AlgorithmConfig, batch: TensorDict, scored: TensorDict
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`log r` of a minibatch, w before the cap, and w as used in the loss; w is None for on-policy or uncorrected data.

    All are [B], or [B, S] where denoising steps are scored one by one."""
    acted, present = batch["log_prob"], scored["log_prob"]
    if config.correction == "none" or batch.get("age", None) is None:
        # subtracted in the precision of the scores (maybe float64), since the difference is small
        return (present - acted).float(), None, None
    if config.proximal == "interpolated":
        # A-3PO: interpolate between behaviour and learning policy by version. The learning weights are on their way to
        # the version after the proximal one, which is `age` versions after the behaviour policy:
        # alpha = (v_learning - 1 - v_acted) / (v_learning - v_acted) = age / (age + 1)
        alpha = batch["age"] / (batch["age"] + 1.0)
        # [B] -> [B, 1] to broadcast with [B, S]
        proximal = acted + alpha.view(-1, *[1] * (acted.dim() - 1)) * (present.detach() - acted)
    else:
        proximal = batch["proximal_log_prob"]
    weight = _weight(config, acted, proximal)
    return (present - proximal).float(), weight, _counted(config, weight)


def _weight(config: AlgorithmConfig, acted: Tensor, proximal: Tensor) -> Tensor:
    """`w = proximal / behaviour` from log-probs [B] or [B, S]; V-trace has one weight per decision, [B] or [B, 1]."""
    log_weight = (proximal - acted).float()
    if config.correction == "vtrace" and log_weight.dim() == 2:
        log_weight = log_weight.sum(-1, keepdim=True)
    return log_weight.clamp_max(LARGEST_LOG_RATIO).exp()


def _counted(config: AlgorithmConfig, weight: Tensor) -> Tensor:
    """The weight used in the loss: `decoupled` sets weights above the cap to 0, the others truncate them."""
    cap = _cap(config)
    return torch.where(weight > cap, 0.0, weight) if config.correction == "decoupled" else weight.clamp_max(cap)


def _cap(config: AlgorithmConfig) -> float:
    return config.rho_bar if isinstance(config, PPOConfig) and config.correction == "vtrace" else config.weight_cap
