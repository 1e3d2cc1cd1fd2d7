"""Proximal policy optimisation (formulas.md, section 2)."""

from dataclasses import astuple, dataclass

import torch
from tensordict import TensorDict
from torch import nn

from sparring.algorithms.configs import PPOConfig
from sparring.algorithms.flat import FlatParameters
from sparring.algorithms.parity import Parity, measure_parity, worst
from sparring.algorithms.returns import gae
from sparring.algorithms.schedules import scheduled, warmup
from sparring.distributed import Distributed
from sparring.policies.policy import Policy

# what a minibatch holds beside the observations the policy declares
LEARNED_FROM = ["action", "log_prob", "value", "advantage", "return", ("next", "executed")]


class PPO:
    """Clipped PPO. `update` takes a rollout [T, N] and changes the policy in place."""

    def __init__(self, config: PPOConfig, policy: Policy, distributed: Distributed | None = None, seed: int = 0):
        self.config, self.policy = config, policy
        self.distributed = distributed or Distributed("cpu")
        # first of all: wrapping moves the module and makes all processes start from the same weights
        self.model = self.distributed.wrap(policy)
        critic = policy.critic_parameters()
        critic_ids = {id(p) for p in critic}
        rest = [p for p in policy.parameters() if p.requires_grad and id(p) not in critic_ids]
        groups = [(rest, config.policy_lr), (critic, config.critic_lr or config.policy_lr)]
        if groups[0][1] == groups[1][1]:
            groups = [(rest + critic, config.policy_lr)]
        self.flat = [(FlatParameters(parameters), lr) for parameters, lr in groups if parameters]
        self.optimizer = torch.optim.Adam(
            [{"params": [flat.vector], "lr": lr, "base_lr": lr} for flat, lr in self.flat],
            eps=config.adam_eps,
            fused=True,
        )
        self.seed = seed
        self.updates = 0
        self.checked_whole_rollout = False

    def update(self, rollout: TensorDict, progress: float = 0.0) -> dict[str, float]:
        """One update from fresh experience; `progress` in [0, 1] of the run drives the schedules."""
        config = self.config
        for parameters, _ in self.flat:
            parameters.check()
        lr = self._set_learning_rates(progress)
        clip = config.clip_ratio * scheduled(config.clip_schedule, progress)
        rollout["advantage"], rollout["return"] = gae(rollout, config.gamma, config.gae_lambda)
        flat = rollout.flatten(0, 1)
        parity = self._whole_parity(flat)
        learned_from = {key: flat.get(key) for key in [*self.policy.in_keys, *LEARNED_FROM]}
        terms: list[LossTerms] = []
        # a function of (seed, process, update): nothing to save
        shuffle = torch.Generator().manual_seed((self.seed * 1_000_003 + self.updates) * 1009 + self.distributed.rank)
        for _ in range(config.ppo_epochs):
            first_of_epoch = len(terms)
            order = torch.randperm(len(flat), generator=shuffle).to(flat["action"].device)
            for index in order.split(config.mini_batch_size):
                batch = _gather(learned_from, index)
                if parity is None:
                    batch["trace"] = flat["trace"][index]
                scored = self.model(batch)
                if parity is None:
                    parity = self._gate(measure_parity(batch, scored))
                loss, term = ppo_loss(config, clip, batch, scored)
                term.grad_norm = self._gradient_step(loss)
                terms.append(term)
            if self._past_target_kl(terms[first_of_epoch:]):
                break
        self.policy.update_normalizers(flat, self.distributed.sum)
        self.updates += 1
        means = mean_terms(terms, clip) | {"explained_variance": _explained_variance(flat)}
        means["gradient_steps"] = float(len(terms))
        return self.distributed.mean(means) | {"lr": lr, "parity": parity.drift, "parity_ratio": parity.ratio}

    def score(self, flat: TensorDict) -> TensorDict:
        """evaluate() of a whole rollout, in minibatches, without gradients."""
        # the whole trace: selecting an entry of it beside would leave that one only
        read = [key for key in self.policy.in_keys if key[0] != "trace"]
        keys = [*read, "action", "trace", ("next", "executed")]
        with torch.no_grad():
            return torch.cat([self.policy.evaluate(part) for part in flat.select(*keys).split(4096)])

    def state_dict(self) -> dict:
        return {"optimizer": self.optimizer.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]

    def _set_learning_rates(self, progress: float) -> float:
        config = self.config
        factor = scheduled(config.lr_schedule, progress) * warmup(self.updates, config.warmup_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
        return config.policy_lr * factor

    def _gradient_step(self, loss: torch.Tensor) -> torch.Tensor:
        """The norm of the gradients before they are clipped."""
        gradients = [flat.vector.grad for flat, _ in self.flat]
        for gradient in gradients:
            gradient.zero_()
        loss.backward()
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
        shrink = (self.config.max_grad_norm / (norm + 1e-6)).clamp_max(1.0)
        for gradient in gradients:
            gradient.mul_(shrink)
        self.optimizer.step()
        return norm

    def _past_target_kl(self, epoch: list["LossTerms"]) -> bool:
        """Every process must answer alike, so the KL is averaged over them first."""
        if self.config.target_kl is None:
            return False
        kl = approximate_kl(torch.cat([term.log_ratio for term in epoch]))
        return self.distributed.mean({"kl": float(kl)})["kl"] > self.config.target_kl

    def _whole_parity(self, flat: TensorDict):
        """The gate over every stored decision, once per process; later updates check their first minibatch for free."""
        if self.checked_whole_rollout:
            return None
        self.checked_whole_rollout = True
        scored = self.score(flat)
        parts = zip(flat.split(4096), scored.split(4096), strict=True)
        return self._gate(worst([measure_parity(acted, again) for acted, again in parts]))

    def _gate(self, parity: Parity) -> Parity:
        # all processes must stop together, whichever of them found the fault
        parity = Parity(*(self.distributed.max(value) for value in astuple(parity)))
        parity.check(self.config.parity_tolerance)
        return parity


def _gather(columns: dict, index: torch.Tensor) -> TensorDict:
    """Rows `index` of every column, as a TensorDict: a third of the time that indexing one takes."""
    batch = TensorDict({}, [len(index)])
    for key, column in columns.items():
        batch.set(key, column.index_select(0, index))
    return batch


@dataclass
class LossTerms:
    """Of one minibatch, detached and left on the device: reading a number there would make the CPU wait."""

    loss: torch.Tensor
    policy_loss: torch.Tensor
    value_loss: torch.Tensor
    entropy: torch.Tensor
    # [B]
    log_ratio: torch.Tensor
    grad_norm: torch.Tensor | None = None


def ppo_loss(config: PPOConfig, clip: float, batch: TensorDict, scored: TensorDict) -> tuple[torch.Tensor, LossTerms]:
    """The loss to minimise for a minibatch [B] and what evaluate() says of it now."""
    advantage = batch["advantage"]
    if config.normalize_advantage and len(advantage) > 1:
        std, mean = torch.std_mean(advantage)
        advantage = (advantage - mean) / (std + 1e-8)
    cost = -advantage
    log_ratio = scored["log_prob"] - batch["log_prob"]
    ratio = log_ratio.exp()
    # -min(r A, clip(r) A)
    policy_loss = torch.max(ratio * cost, ratio.clamp(1 - clip, 1 + clip) * cost).mean()
    value_loss = _value_loss(config.value_clip, batch, scored["value"])
    entropy = scored["entropy"].mean()
    loss = torch.add(policy_loss, value_loss, alpha=config.value_loss_coef)
    if config.entropy_coef:
        loss = loss - config.entropy_coef * entropy
    return loss, LossTerms(*(x.detach() for x in (loss, policy_loss, value_loss, entropy, log_ratio)))


def approximate_kl(log_ratio: torch.Tensor) -> torch.Tensor:
    """KL(old || new) from samples of the old policy, `mean((r - 1) - log r)`: never negative."""
    return (log_ratio.exp() - 1 - log_ratio).mean()


def mean_terms(terms: list[LossTerms], clip: float) -> dict[str, float]:
    """What an update did, as means over its minibatches."""
    names = ("loss", "policy_loss", "value_loss", "entropy", "grad_norm")
    means = {name: float(torch.stack([getattr(term, name) for term in terms]).mean()) for name in names}
    log_ratio = torch.cat([term.log_ratio for term in terms])
    means["approx_kl"] = float(approximate_kl(log_ratio))
    means["clip_fraction"] = float(((log_ratio.exp() - 1).abs() > clip).float().mean())
    return means


def _value_loss(value_clip: float | None, batch: TensorDict, value: torch.Tensor) -> torch.Tensor:
    if value_clip is None:
        return nn.functional.mse_loss(value, batch["return"])
    clipped = batch["value"] + (value - batch["value"]).clamp(-value_clip, value_clip)
    return torch.max((value - batch["return"]).square(), (clipped - batch["return"]).square()).mean()


def _explained_variance(flat: TensorDict) -> float:
    """1: the critic foresaw every return; 0: no better than their mean."""
    spread = flat["return"].var()
    return float(1 - (flat["return"] - flat["value"]).var() / spread) if spread > 0 else 0.0
