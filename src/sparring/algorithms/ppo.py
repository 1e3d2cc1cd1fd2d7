"""Proximal policy optimisation (formulas.md, section 2)."""

import torch
from tensordict import TensorDict
from torch import nn

from sparring.algorithms.configs import PPOConfig
from sparring.algorithms.gradient_step import scheduled
from sparring.algorithms.losses import LossTerms, clipped_policy_loss, mean_terms, reference_kl, spread
from sparring.algorithms.off_policy import ages_of, counted, present_values, ratio_and_weight, weight_of
from sparring.algorithms.returns import gae, missing_level, vtrace
from sparring.algorithms.scoring import valid_rows
from sparring.algorithms.updater import Updater, actor_parameters
from sparring.errors import UserError
from sparring.policies.critic import Critic
from sparring.policies.policy import Policy
from sparring.processes.distributed import Distributed

# what a minibatch holds beside the observations the policy declares
LEARNED_FROM = ["action", "log_prob", "value", "advantage", "return", ("next", "executed")]


class PPO(Updater):
    """Clipped PPO. `update` takes a rollout [T, N] and changes the policy in place."""

    config: PPOConfig
    section = "ppo"

    def __init__(self, config: PPOConfig, policy: Policy, distributed: Distributed | None = None, seed: int = 0):
        if config.entropy_coef and not policy.learns_entropy:
            raise UserError(
                f"ppo.entropy_coef={config.entropy_coef}: nothing that {type(policy).__name__} learns changes its "
                "entropy; set it to 0, or take a policy that learns its noise (policy.method=flow_noise)"
            )
        if config.normalize_value and not isinstance(getattr(policy, "critic", None), Critic):
            raise UserError(
                f"ppo.normalize_value=true: {type(policy).__name__} judges by something of its own, not by a `critic` "
                "that is a sparring.policies.critic.Critic; leave it out"
            )
        # GRPO, which may have had it before, lets the critic rest
        for parameter in policy.critic_parameters():
            parameter.requires_grad_(True)
        super().__init__(config, policy, distributed, seed)
        # what normalize_value has added to every value; a run that goes on collects anew what was judged before
        self.level = 0.0

    def update(self, rollout: TensorDict, progress: float = 0.0) -> dict[str, float]:
        """One update; `progress` in [0, 1] of the run drives the schedules."""
        config = self.config
        lr = self._begin(progress)
        clip = config.clip_ratio * scheduled(config.clip_schedule, progress)
        stale = self._look_back(rollout)
        if config.normalize_value:
            self._begin_at_level(rollout)
        rollout = self._judge(rollout, corrected=bool(stale))
        flat = rollout.flatten(0, 1)
        rows = valid_rows(flat)
        unit = 1.0
        if config.normalize_value:
            unit = self.policy.critic.fit_returns(flat["return"][rows], self.distributed.sum)

        def loss(batch, scored):
            return ppo_loss(config, clip, batch, scored, self.policy.step_weights, unit)

        keys = LEARNED_FROM + self._score_by_reference(flat, rows) + stale
        terms, parity = self._learn(
            flat, rows, keys, config.ppo_epochs, loss, self._learning(), config.normalize_advantage
        )
        aged = self._stale_metrics(flat, rows, terms)
        self._end(flat, rows)
        means = mean_terms(terms, clip, clip) | {"explained_variance": _explained_variance(flat, rows)}
        means["gradient_steps"] = float(len(terms))
        if flat.get("valid", None) is not None:
            means["valid_fraction"] = len(rows) / len(flat)
        told = {"lr": lr, "parity": parity.drift, "parity_ratio": parity.ratio}
        for name in ("advantage", "return"):
            told |= spread(name, flat[name][rows], self.distributed)
        return self.distributed.mean(means) | told | aged

    def _begin_at_level(self, rollout: TensorDict) -> None:
        """A critic that knows nothing yet takes long to get far from 0, and bootstraps wrong values meanwhile."""
        critic = self.policy.critic
        if self.updates == 0 and not critic.returns.count:
            self.level = missing_level(rollout, self.config.gamma, self.distributed.sum)
            critic.raise_by(self.level)
        if self.level and (self.updates == 0 or self.expects_stale):
            # what it judged before it was raised, which also comes later where robots are ahead
            missing = self.level * (ages_of(rollout, self.updates) >= self.updates)
            rollout["value"] = rollout["value"] + missing
            rollout["next", "value"] = rollout["next", "value"] + missing

    def _judge(self, rollout: TensorDict, corrected: bool) -> TensorDict:
        """With `advantage` and `return`.

        V-trace, where the rollout is to be `corrected`, tells what the present policy is worth, so that its values are
        the present critic's. GAE takes all of them from the critic of those who acted: they belong together.
        """
        config = self.config
        if corrected and config.correction == "vtrace":
            flat = rollout.flatten(0, 1)
            weight = weight_of(config, flat["log_prob"], flat["proximal_log_prob"]).view(rollout.batch_size)
            rollout = present_values(rollout, rollout["proximal_value"])
            judged = vtrace(rollout, config.gamma, config.gae_lambda, weight, config.rho_bar, config.c_bar)
        else:
            judged = gae(rollout, config.gamma, config.gae_lambda)
        rollout["advantage"], rollout["return"] = judged
        return rollout

    def _groups(self) -> list[tuple[list[nn.Parameter], float]]:
        config, critic = self.config, self.policy.critic_parameters()
        actor, critic_lr = actor_parameters(self.policy), config.critic_lr or config.policy_lr
        if config.critic_warmup_updates and not critic:
            raise UserError(
                f"ppo.critic_warmup_updates={config.critic_warmup_updates}: {type(self.policy).__name__} does not say "
                "which parameters are its critic's; override critic_parameters()"
            )
        if critic_lr == config.policy_lr and not config.critic_warmup_updates:
            return [(actor + critic, config.policy_lr)]
        return [(actor, config.policy_lr), (critic, critic_lr)]

    def _learning(self):
        """The critic alone while it warms up; its gradients come from its own loss only."""
        return [self.flat[-1][0]] if self.updates < self.config.critic_warmup_updates else None


def ppo_loss(
    config: PPOConfig,
    clip: float,
    batch: TensorDict,
    scored: TensorDict,
    step_weights: torch.Tensor | None = None,
    unit: float = 1.0,
) -> tuple[torch.Tensor, LossTerms]:
    """The loss to minimise for a minibatch [B] and what evaluate() says of it now. `unit`: of values, in that loss."""
    log_ratio, weight = ratio_and_weight(config, batch, scored)
    used = None if weight is None else counted(config, weight)
    policy_loss = clipped_policy_loss(log_ratio, batch["advantage"], clip, clip, step_weights, config.dual_clip, used)
    value_loss = _value_loss(config.value_clip, batch, scored["value"])
    entropy = scored["entropy"].mean()
    loss = torch.add(policy_loss, value_loss, alpha=config.value_loss_coef / unit**2)
    if config.entropy_coef:
        loss = loss - config.entropy_coef * entropy
    scalars = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
    if config.kl_coef:
        scalars["reference_kl"] = reference_kl(batch, scored)
        loss = loss + config.kl_coef * scalars["reference_kl"]
    scalars = {"loss": loss} | scalars
    return loss, LossTerms({name: scalar.detach() for name, scalar in scalars.items()}, log_ratio.detach(), weight)


def _value_loss(value_clip: float | None, batch: TensorDict, value: torch.Tensor) -> torch.Tensor:
    if value_clip is None:
        return nn.functional.mse_loss(value, batch["return"])
    # of stale decisions, the critic's with which the update began, not of who acted
    before = batch["value"] if batch.get("proximal_value", None) is None else batch["proximal_value"]
    clipped = before + (value - before).clamp(-value_clip, value_clip)
    return torch.max((value - batch["return"]).square(), (clipped - batch["return"]).square()).mean()


def _explained_variance(flat: TensorDict, rows: torch.Tensor) -> float:
    """1: the critic foresaw every return; 0: no better than their mean."""
    returns, values = flat["return"][rows], flat["value"][rows]
    spread = returns.var()
    return float(1 - (returns - values).var() / spread) if spread > 0 else 0.0
