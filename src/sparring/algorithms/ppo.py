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

# what a minibatch holds beside the observations the policy declares
_LEARNED_FROM = ["action", "log_prob", "value", "advantage", "return", ("next", "executed")]


class Algorithm:
    """The parts that PPO and GRPO hold, their minibatches and gradient steps, and what is saved of them."""

    # of the config, where the settings are
    section = "algorithm_config"

    def __init__(
        self, config: AlgorithmConfig, policy: Policy, distributed: Distributed | None, seed: int, groups: list[tuple]
    ):
        """`groups` of parameters that learn, each with its learning rate."""
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
        """The setting to lower where it diverges."""
        return f"{self.section}.policy_lr={self.config.policy_lr:g}"

    def gate(self, parity: Parity) -> Parity:
        """Refuses what the collecting process measured where it is too much; the worst of all processes."""
        return self.parity_gate.check(parity)

    @property
    def version(self) -> int:
        """Of the weights and normalisers: a rollout stamped with an older one is stale."""
        return self.updates + self.warmups

    def warm_up(self, rollout: TensorDict) -> None:
        """Fit normalisers to a rollout [T, N] that nothing else is learned from."""
        Decisions(rollout.flatten(0, 1)).update_normalizers(self.policy, self.distributed)
        self.warmups += 1

    def expect_stale(self) -> None:
        """For a loop that counts versions and collects stale decisions; updates then always tell their age."""
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
        """`epochs` times all decisions in a random order; ends after an epoch whose `terms` are past the target KL.

        With the weight of each minibatch beside those that other processes take at the same time: 1 on average, 0 where
        the decisions of this process are not `counted`. So each decision counts alike, in whichever process it is.
        """
        target, columns = self.config.target_kl, decisions.columns([*self.policy.in_keys, *keys])
        # a function of (seed, process, update): nothing to save
        shuffle = torch.Generator().manual_seed((self.seed * 1_000_003 + self.updates) * 1009 + self.distributed.rank)
        # processes step together, so one that has fewer decisions takes smaller minibatches
        held = self.distributed.gather_objects([(len(decisions), counted)])
        count = max(-(-number // self.config.mini_batch_size) for number, _ in held)
        for _ in range(epochs):
            done = len(terms)
            order = decisions.rows[torch.randperm(len(decisions), generator=shuffle).to(decisions.rows.device)]
            # evenly: a last one of few decisions would weigh as much as the others
            for number, index in enumerate(order.repeat(-(-count // len(order))).tensor_split(count)):
                batch = decisions.gather(columns, index)
                if self.parity_gate.parity is None:
                    batch["trace"] = decisions.flat["trace"][index]
                yield batch, _weight(held, self.distributed.rank, number, count)
            # averaged over the decisions of all processes, which must all decide alike
            if target is not None:
                own = LossTerms.kl(terms[done:]) * _weight(held, self.distributed.rank)
                if self.distributed.mean({"kl": own})["kl"] > target:
                    return

    def gradient_step(self, batch: TensorDict, loss, learning: list | None = None, weight: float = 1.0) -> "LossTerms":
        """On a minibatch of this `weight`, after its parity where it is the first; `learning`: the groups that change,
        None: all."""
        terms = LossTerms.joined(self.step.backward(batch, loss, self.config.micro_batch_size))
        self.parity_gate.require_passed()
        terms.scalars["grad_norm"] = self.step.apply(learning, weight)
        return terms

    def steps_taken(self, terms: list["LossTerms"]) -> tuple[list["LossTerms"], dict[str, float]]:
        """At the end of an update: the terms of its gradient steps without those that were left out, and how many."""
        left_out = self.step.end_update()
        if left_out:
            terms = [term for term in terms if term.scalars["grad_norm"].isfinite()]
        return terms, {"steps_skipped": float(left_out)} if self.step.skips else {}


def _weight(held: list[tuple[int, bool]], rank: int, number: int = 0, count: int = 1) -> float:
    """Of the decisions of process `rank` in minibatch `number` of `count`, over the average of all processes.

    `held`: of each process how many decisions it holds, and whether they count. Fractions: exactly 1 where all are
    alike.
    """
    shares = []
    for decisions, counted in held:
        # as in minibatches(): repeated where there are more minibatches than decisions, and split evenly
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
                f"ppo.entropy_coef={config.entropy_coef}: nothing that {name} learns changes its "
                "entropy; set it to 0, or take a policy that learns its noise (policy.method=flow_noise)"
            )
        if config.critic_warmup_updates and not policy.critic_parameters():
            why = f"{name} does not say which parameters are its critic's; override critic_parameters()"
            raise UserError(f"ppo.critic_warmup_updates={config.critic_warmup_updates}: {why}")
        # that of normalize_value, and how much was added to all its values: a resumed run collects anew what it judged
        self.critic, self.level = getattr(policy, "critic", None) if config.normalize_value else None, 0.0
        if config.normalize_value and not isinstance(self.critic, Critic):
            own = "judges by something of its own, not by a `critic` that is a sparring.policies.critic.Critic"
            raise UserError(f"ppo.normalize_value=true: {name} {own}; leave it out")
        actor, critic = policy.actor_parameters(), policy.critic_parameters()
        # GRPO, which may have had it before, lets the critic rest
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
        """One update; `progress` in [0, 1] of the run drives the schedules."""
        config, policy, distributed = self.config, self.policy, self.distributed
        lr_factor = schedule(config.lr_schedule, progress, self.updates, config.warmup_updates)
        self.step.scale_lr(lr_factor)
        clip = config.clip_ratio * schedule(config.clip_schedule, progress)

        self.scorer.freeze_reference()
        if self.critic is not None:
            self._shift_values(rollout, self.critic)
        # age, and log-probs and values by the present weights
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
        # the critic alone while it warms up; its gradients come from its own loss only
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
        """A critic that knows nothing yet takes long to get far from 0, and bootstraps wrong values meanwhile."""
        if self.updates == 0 and not critic.returns.count:
            self.level = missing_level(rollout, self.config.gamma, self.distributed.sum)
            critic.shift_by(self.level)
        if self.level and (self.updates == 0 or self.off_policy.expected):
            # what it judged before it was raised, which also comes later where robots are ahead
            stamped = rollout.get("version", None)
            missing = self.level * (self.updates == 0 if stamped is None else stamped <= self.warmups)
            rollout["value"] = rollout["value"] + missing
            rollout["next", "value"] = rollout["next", "value"] + missing

    def _with_advantages(self, rollout: TensorDict) -> TensorDict:
        """With `advantage` and `return`.

        V-trace, where the rollout is stale, estimates what the present policy is worth, so that its values are the
        present critic's. GAE takes all of them from the critic of those who acted: they belong together.
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
    """Of one minibatch, detached and left on the device: reading a number there would make the CPU wait."""

    # by name: "loss", "policy_loss", ...
    scalars: dict[str, Tensor]
    # [B], or [B, S] where denoising steps count one by one
    log_ratio: Tensor
    # of stale decisions, before any cap: [B], [B, S] or [B, 1]; None where none was weighed
    weight: Tensor | None = None

    def __post_init__(self):
        self.scalars = {name: scalar.detach() for name, scalar in self.scalars.items()}
        self.log_ratio = self.log_ratio.detach()

    @staticmethod
    def joined(parts: "list[tuple[LossTerms, float]]") -> "LossTerms":
        """Of micro-batches and their shares of a minibatch, as if they had been one."""
        (first, _), *others = parts
        if not others:
            return first
        scalars: dict = {name: sum(part.scalars[name] * share for part, share in parts) for name in first.scalars}
        weights = [part.weight for part, _ in parts if part.weight is not None]
        log_ratio = torch.cat([part.log_ratio for part, _ in parts])
        return LossTerms(scalars, log_ratio, torch.cat(weights) if weights else None)

    @staticmethod
    def reference_kl(batch: TensorDict, scored: TensorDict) -> Tensor:
        """Of the present policy to a frozen one, `reference_log_prob`; r = reference / present."""
        return _approximate_kl((batch["reference_log_prob"] - scored["log_prob"]).float())

    @staticmethod
    def kl(terms: "list[LossTerms]") -> float:
        """Of minibatches together."""
        return float(_approximate_kl(torch.cat([term.log_ratio for term in terms])))

    @staticmethod
    def means(terms: "list[LossTerms]", low: float, high: float) -> dict[str, float]:
        """Metrics of an update, over its minibatches; clipped is what left [1 - low, 1 + high]."""
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
    """The loss of a minibatch [B], and its terms. `scored`: evaluate() of it; `unit`: of values, in the loss."""
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


def _approximate_kl(log_ratio: Tensor) -> Tensor:
    """KL(p || q) from samples of p, `mean((r - 1) - log r)` with r = q/p: never negative."""
    log_ratio = log_ratio.clamp_max(LARGEST_LOG_RATIO)
    return (log_ratio.exp() - 1 - log_ratio).mean()


def _value_loss(value_clip: float | None, batch: TensorDict, value: Tensor) -> Tensor:
    if value_clip is None:
        return nn.functional.mse_loss(value, batch["return"])
    # a stale decision is clipped around the value of the critic with which the update began
    before = batch["value"] if batch.get("proximal_value", None) is None else batch["proximal_value"]
    clipped = before + (value - before).clamp(-value_clip, value_clip)
    return torch.max((value - batch["return"]).square(), (clipped - batch["return"]).square()).mean()
