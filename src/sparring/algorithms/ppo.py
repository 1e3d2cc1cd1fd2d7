"""Proximal policy optimisation."""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from sparring.algorithms.advantages import LARGEST_LOG_RATIO, OffPolicy, gae, missing_level, ratio_and_weight, vtrace
from sparring.algorithms.configs import AlgorithmConfig, PPOConfig
from sparring.algorithms.gradient_step import GradientStep, schedule
from sparring.algorithms.scoring import Decisions, Parity, ParityGate, Scorer
from sparring.errors import UserError
from sparring.policies.critic import Critic
from sparring.policies.policy import Policy
from sparring.processes.distributed import Distributed

# keys of a minibatch, in addition to the observations that the policy declares
_LEARNED_FROM = ["action", "log_prob", "value", "advantage", "return", ("next", "executed")]


class Algorithm:
    """What PPO and GRPO share: minibatches, gradient steps and saved state."""

    # the config section with its settings
    section = "algorithm_config"

    def __init__(
        self, config: AlgorithmConfig, policy: Policy, distributed: Distributed | None, seed: int, groups: list[tuple]
    ):
        """`groups`: (trainable parameters, their learning rate)."""
        self.config, self.policy, self.seed = config, policy, seed
        self.distributed = distributed or Distributed("cpu")
        self.distributed.broadcast_weights(policy)
        self.scorer = Scorer(config, policy, self.distributed, self.section)
        self.parity_gate = ParityGate(self.scorer)
        self.off_policy = OffPolicy(config, self.scorer)
        rated = [{"params": parameters, "lr": lr, "base_lr": lr} for parameters, lr in groups]
        settings: dict[str, Any] = {"memory": self.scorer.memory, "foreach": False, "eps": config.adam_eps}
        self.step = GradientStep(rated, self.distributed, config.max_grad_norm, self.rate, **settings)
        self.updates = 0
        # rollouts that only fitted normalisers
        self.warmups = 0

    @property
    def rate(self) -> str:
        """The settings to lower if training diverges, for the error message."""
        return f"{self.section}.policy_lr={self.config.policy_lr:g}"

    def gate(self, parity: Parity) -> Parity:
        """Check a parity that the actor process measured; returns the worst over all processes."""
        return self.parity_gate.check(parity)

    @property
    def version(self) -> int:
        """The version of weights and normalisers. A rollout stamped with an older version is stale."""
        return self.updates + self.warmups

    def warm_up(self, rollout: TensorDict) -> None:
        """Fit the normalisers to a rollout [T, N] that is not used for gradient steps."""
        Decisions(rollout.flatten(0, 1)).update_normalizers(self.policy, self.distributed)
        self.warmups += 1

    def expect_stale(self) -> None:
        """For loops that collect off-policy data: refuse policies that cannot be corrected, always log staleness."""
        self.off_policy.check_correctable()
        self.off_policy.expected = True

    def state_dict(self) -> dict:
        state = {"optimizer": self.step.state_dict(), "updates": self.updates, "warmups": self.warmups}
        return state | {"reference": self.scorer.reference_state()}

    def load_state_dict(self, state: dict) -> None:
        self.step.load_state_dict(state["optimizer"])
        self.updates, self.warmups = state["updates"], state.get("warmups", 0)
        if state["reference"] is not None:
            self.scorer.load_reference(state["reference"])

    def minibatches(
        self, decisions: Decisions, keys: list, epochs: int, terms: list["LossTerms"], counted: bool = True
    ) -> Iterator[tuple[TensorDict, float]]:
        """Yield (minibatch, weight) for `epochs` shuffled passes; stop after an epoch whose KL exceeds the target.

        `terms` collects the loss terms of the gradient steps. The weight makes every decision count equally, whichever
        process holds it: it is 1 on average over the processes, and 0 where a process's decisions are not `counted`.
        """
        target, columns = self.config.target_kl, decisions.columns([*self.policy.in_keys, *keys])
        # seeded by (seed, update, process), so there is no generator state to save
        shuffle = torch.Generator().manual_seed((self.seed * 1_000_003 + self.updates) * 1009 + self.distributed.rank)
        # all processes take the same number of steps: a process with fewer decisions takes smaller minibatches
        held = self.distributed.gather_objects([(len(decisions), counted)])
        count = max(-(-number // self.config.mini_batch_size) for number, _ in held)
        for _ in range(epochs):
            done = len(terms)
            order = decisions.rows[torch.randperm(len(decisions), generator=shuffle).to(decisions.rows.device)]
            # split evenly: a small last minibatch would weigh as much as a full one
            for number, index in enumerate(order.repeat(-(-count // len(order))).tensor_split(count)):
                batch = decisions.gather(columns, index)
                if self.parity_gate.parity is None:
                    batch["trace"] = decisions.flat["trace"][index]
                yield batch, _weight(held, self.distributed.rank, number, count)
            # averaged over all processes, so that all of them stop together
            if target is not None:
                own = LossTerms.kl(terms[done:]) * _weight(held, self.distributed.rank)
                if self.distributed.mean({"kl": own})["kl"] > target:
                    return

    def gradient_step(self, batch: TensorDict, loss, learning: list | None = None, weight: float = 1.0) -> "LossTerms":
        """One step on a minibatch with this `weight`. The first one of an update must pass the parity gate.

        `learning`: the parameter groups to update; None: all.
        """
        terms = LossTerms.joined(self.step.backward(batch, loss, self.config.micro_batch_size))
        self.parity_gate.require_passed()
        terms.scalars["grad_norm"] = self.step.apply(learning, weight)
        return terms

    def steps_taken(self, terms: list["LossTerms"]) -> tuple[list["LossTerms"], dict[str, float]]:
        """End an update: the terms of the steps taken, and the number of skipped (non-finite) steps as a metric."""
        left_out = self.step.end_update()
        if left_out:
            terms = [term for term in terms if term.scalars["grad_norm"].isfinite()]
        return terms, {"steps_skipped": float(left_out)} if self.step.skips else {}


def _weight(held: list[tuple[int, bool]], rank: int, number: int = 0, count: int = 1) -> float:
    """The number of decisions of process `rank` in minibatch `number` of `count`, relative to the mean over processes.

    `held`: (number of decisions, whether they count) of each process. Computed with fractions, so that equal shares
    give exactly 1.
    """
    shares = []
    for decisions, counted in held:
        # as in minibatches(): repeated if there are more minibatches than decisions, then split evenly
        repeats = -(-count // decisions)
        size, larger = divmod(decisions * repeats, count)
        shares.append(Fraction((size + (number < larger)) * counted, repeats))
    return float(shares[rank] * len(shares) / sum(shares))


class PPO(Algorithm):
    """Clipped PPO. `update` takes a rollout [T, N] and changes the policy in place."""

    config: PPOConfig
    section = "ppo"

    def __init__(self, config: PPOConfig, policy: Policy, distributed: Distributed | None = None, seed: int = 0):
        name = type(policy).__name__
        if config.entropy_coef and not policy.learns_entropy:
            raise UserError(
                f"ppo.entropy_coef={config.entropy_coef}: the entropy of {name} does not depend on its parameters; "
                "set it to 0, or use a policy with learned noise (policy.method=flow_noise)"
            )
        if config.critic_warmup_updates and not policy.critic_parameters():
            why = f"{name}.critic_parameters() is empty; override it to return the critic's parameters"
            raise UserError(f"ppo.critic_warmup_updates={config.critic_warmup_updates}: {why}")
        # used by normalize_value: the critic, and the constant added to its values. The constant is not saved: after a
        # resume, the rollout that it applies to is collected again
        self.critic, self.level = getattr(policy, "critic", None) if config.normalize_value else None, 0.0
        if config.normalize_value and not isinstance(self.critic, Critic):
            own = "needs a policy whose `critic` is a sparring.policies.critic.Critic"
            raise UserError(f"ppo.normalize_value=true {own}; {name} has none. Remove the setting")
        actor, critic = policy.actor_parameters(), policy.critic_parameters()
        # GRPO freezes the critic of a policy, and this policy may come from a GRPO run
        for parameter in critic:
            parameter.requires_grad_(True)
        groups = [(actor, config.policy_lr), (critic, config.critic_lr or config.policy_lr)]
        if groups[0][1] == groups[1][1] and not config.critic_warmup_updates:
            groups = [(actor + critic, config.policy_lr)]
        super().__init__(config, policy, distributed, seed, groups)

    @property
    def rate(self) -> str:
        critic = self.config.critic_lr
        return super().rate + (f" or ppo.critic_lr={critic:g}" if critic else "")

    def update(self, rollout: TensorDict, progress: float = 0.0) -> dict[str, float]:
        """One update. `progress`: the fraction of the run in [0, 1], for the schedules."""
        config, policy, distributed = self.config, self.policy, self.distributed
        lr_factor = schedule(config.lr_schedule, progress, self.updates, config.warmup_updates)
        self.step.scale_lr(lr_factor)
        clip = config.clip_ratio * schedule(config.clip_schedule, progress)

        self.scorer.freeze_reference()
        if self.critic is not None:
            self._shift_values(rollout, self.critic)
        # adds `age` (the staleness in versions), and log-probs and values under the current weights
        stale = self.off_policy.annotate(rollout, self.version)
        rollout = self._with_advantages(rollout)
        # [T, N] -> [T*N]
        decisions = Decisions(rollout.flatten(0, 1))
        unit = 1.0 if self.critic is None else self.critic.fit_returns(decisions["return"], distributed.sum)
        keys = _LEARNED_FROM + self.scorer.add_reference(decisions) + stale
        self.parity_gate.begin_update(decisions)

        def loss(batch: TensorDict) -> tuple[Tensor, LossTerms]:
            scored = policy.evaluate(batch)
            self.parity_gate.compare(batch, scored)
            return ppo_loss(config, clip, batch, scored, policy.step_weights, unit)

        terms: list[LossTerms] = []
        # during warm-up only the critic learns; its gradients come from its own loss only
        learning = self.step.groups[-1:] if self.updates < config.critic_warmup_updates else None
        for batch, weight in self.minibatches(decisions, keys, config.ppo_epochs, terms):
            if config.normalize_advantage and len(batch) > 1:
                std, mean = torch.std_mean(batch["advantage"])
                batch["advantage"] = (batch["advantage"] - mean) / (std + 1e-8)
            terms.append(self.gradient_step(batch, loss, learning, weight))

        terms, skipped = self.steps_taken(terms)
        off_policy = self.off_policy.metrics(decisions, [term.weight for term in terms])
        decisions.update_normalizers(policy, distributed)
        self.updates += 1
        means, spread = LossTerms.means(terms, clip, clip), decisions["return"].var()
        missed = (decisions["return"] - decisions["value"]).var()
        means["explained_variance"] = float(1 - missed / spread) if spread > 0 else 0.0
        if decisions.flat.get("valid", None) is not None:
            means["valid_fraction"] = len(decisions) / len(decisions.flat)
        spreads = decisions.spread("advantage", distributed) | decisions.spread("return", distributed)
        metrics = {"lr": config.policy_lr * lr_factor} | self.parity_gate.metrics() | spreads | off_policy | skipped
        return distributed.mean(means) | metrics

    def _shift_values(self, rollout: TensorDict, critic: Critic) -> None:
        """Start the critic at the mean return: an untrained one is slow to leave 0 and bootstraps wrong values."""
        if self.updates == 0 and not critic.returns.count:
            self.level = missing_level(rollout, self.config.gamma, self.distributed.sum)
            critic.shift_by(self.level)
        if self.level and (self.updates == 0 or self.off_policy.expected):
            # values computed before the shift; in asynchronous collection they also arrive later
            stamped = rollout.get("version", None)
            missing = self.level * (self.updates == 0 if stamped is None else stamped <= self.warmups)
            rollout["value"] = rollout["value"] + missing
            rollout["next", "value"] = rollout["next", "value"] + missing

    def _with_advantages(self, rollout: TensorDict) -> TensorDict:
        """Add `advantage` and `return`.

        For a stale rollout, V-trace estimates the value of the current policy and uses values of the current critic.
        GAE uses the values that were stored when the decisions were taken.
        """
        config = self.config
        if config.correction == "vtrace" and rollout.get("age", None) is not None:
            rollout, weight = self.off_policy.for_vtrace(rollout)
            estimates = vtrace(rollout, config.gamma, config.gae_lambda, weight, config.rho_bar, config.c_bar)
        else:
            estimates = gae(rollout, config.gamma, config.gae_lambda)
        rollout["advantage"], rollout["return"] = estimates
        return rollout


@dataclass
class LossTerms:
    """Loss terms of one minibatch, detached. They stay on the device: reading a number would make the CPU wait."""

    # by name: "loss", "policy_loss", ...
    scalars: dict[str, Tensor]
    # [B], or [B, S] where denoising steps are scored one by one
    log_ratio: Tensor
    # importance weights of stale decisions before any cap: [B], [B, S] or [B, 1]; None if there are none
    weight: Tensor | None = None

    def __post_init__(self):
        self.scalars = {name: scalar.detach() for name, scalar in self.scalars.items()}
        self.log_ratio = self.log_ratio.detach()

    @staticmethod
    def joined(parts: "list[tuple[LossTerms, float]]") -> "LossTerms":
        """Combine the terms of micro-batches, each with its share of the minibatch."""
        (first, _), *others = parts
        if not others:
            return first
        scalars: dict = {name: sum(part.scalars[name] * share for part, share in parts) for name in first.scalars}
        weights = [part.weight for part, _ in parts if part.weight is not None]
        log_ratio = torch.cat([part.log_ratio for part, _ in parts])
        return LossTerms(scalars, log_ratio, torch.cat(weights) if weights else None)

    @staticmethod
    def reference_kl(batch: TensorDict, scored: TensorDict) -> Tensor:
        """KL from the current policy to the frozen reference (`reference_log_prob`), with r = reference / current."""
        return _approximate_kl((batch["reference_log_prob"] - scored["log_prob"]).float())

    @staticmethod
    def kl(terms: "list[LossTerms]") -> float:
        """Approximate KL over several minibatches."""
        return float(_approximate_kl(torch.cat([term.log_ratio for term in terms])))

    @staticmethod
    def means(terms: "list[LossTerms]", low: float, high: float) -> dict[str, float]:
        """Metrics averaged over the minibatches of an update. A ratio outside [1 - low, 1 + high] counts as clipped."""
        if not terms:
            return {"gradient_steps": 0.0}
        means = {name: float(torch.stack([term.scalars[name] for term in terms]).mean()) for name in terms[0].scalars}
        off = torch.cat([term.log_ratio for term in terms]).exp() - 1
        clipped = float(((off > high) | (off < -low)).float().mean())
        return means | {"approx_kl": LossTerms.kl(terms), "clip_fraction": clipped, "gradient_steps": float(len(terms))}


def ppo_loss(
    config: PPOConfig,
    clip: float,
    batch: TensorDict,
    scored: TensorDict,
    step_weights: Tensor | None = None,
    unit: float = 1.0,
) -> tuple[Tensor, LossTerms]:
    """The loss of a minibatch [B], and its terms.

    `scored`: evaluate() of the minibatch; `unit`: the scale of values, by whose square the value loss is divided.
    """
    log_ratio, weight, counted = ratio_and_weight(config, batch, scored)
    advantage, dual_clip = batch["advantage"], config.dual_clip
    policy_loss = clipped_policy_loss(log_ratio, advantage, clip, clip, step_weights, dual_clip, counted)
    value_loss = _value_loss(config.value_clip, batch, scored["value"])
    entropy = scored["entropy"].mean()
    loss = torch.add(policy_loss, value_loss, alpha=config.value_loss_coef / unit**2)
    if config.entropy_coef:
        loss = loss - config.entropy_coef * entropy
    scalars = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
    if config.kl_coef:
        scalars["reference_kl"] = LossTerms.reference_kl(batch, scored)
        loss = loss + config.kl_coef * scalars["reference_kl"]
    return loss, LossTerms({"loss": loss} | scalars, log_ratio, weight)


def clipped_policy_loss(
    log_ratio: Tensor,
    advantage: Tensor,
    low: float,
    high: float,
    step_weights: Tensor | None = None,
    dual_clip: float | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """`-mean min(r A, clip(r, 1 - low, 1 + high) A)`, A the advantage [B].

    If `log_ratio` is [B, S], each pair (decision, denoising step) is clipped separately, with the advantage
    A * step_weights. With `dual_clip` c, the objective for A < 0 is bounded below by c A, however large the ratio is.
    `weight`: importance weights that multiply the clipped objective.
    """
    # [B], or [B, 1] * [S]
    cost = -advantage if step_weights is None else -advantage[:, None] * step_weights
    ratio = log_ratio.clamp_max(LARGEST_LOG_RATIO).exp()
    loss = torch.max(ratio * cost, ratio.clamp(1 - low, 1 + high) * cost)
    if dual_clip is not None:
        loss = torch.where(cost > 0, torch.min(loss, dual_clip * cost), loss)
    return loss.mean() if weight is None else (weight * loss).mean()


def _approximate_kl(log_ratio: Tensor) -> Tensor:
    """KL(p || q) from samples of p, `mean((r - 1) - log r)` with r = q/p: never negative."""
    log_ratio = log_ratio.clamp_max(LARGEST_LOG_RATIO)
    return (log_ratio.exp() - 1 - log_ratio).mean()


def _value_loss(value_clip: float | None, batch: TensorDict, value: Tensor) -> Tensor:
    if value_clip is None:
        return nn.functional.mse_loss(value, batch["return"])
    # stale decisions are clipped around the value of the critic at the beginning of the update
    before = batch["value"] if batch.get("proximal_value", None) is None else batch["proximal_value"]
    clipped = before + (value - before).clamp(-value_clip, value_clip)
    return torch.max((value - batch["return"]).square(), (clipped - batch["return"]).square()).mean()
