"""Proximal policy optimisation (formulas.md, section 2)."""

from collections import defaultdict

import torch
from tensordict import TensorDict
from torch import nn

from sparring.algorithms.configs import PPOConfig
from sparring.algorithms.parity import measure_parity, worst
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
        self.model = self.distributed.wrap(policy)
        critic = policy.critic_parameters()
        critic_ids = {id(p) for p in critic}
        rest = [p for p in policy.parameters() if p.requires_grad and id(p) not in critic_ids]
        critic_lr = config.critic_lr or config.policy_lr
        groups = [{"params": rest, "base_lr": config.policy_lr}, {"params": critic, "base_lr": critic_lr}]
        self.optimizer = torch.optim.Adam(
            [g | {"lr": g["base_lr"]} for g in groups if g["params"]], eps=config.adam_eps, fused=True
        )
        self.parameters = [p for g in self.optimizer.param_groups for p in g["params"]]
        self.shuffle = torch.Generator().manual_seed(seed + self.distributed.rank)
        self.updates = 0
        self.checked_whole_rollout = False

    def update(self, rollout: TensorDict, progress: float = 0.0) -> dict[str, float]:
        """One update from fresh experience; `progress` in [0, 1] of the run drives the schedules."""
        config = self.config
        lr = self._set_learning_rates(progress)
        clip = config.clip_ratio * scheduled(config.clip_schedule, progress)
        rollout["advantage"], rollout["return"] = gae(rollout, config.gamma, config.gae_lambda)
        flat = rollout.flatten(0, 1)
        parity = self._whole_parity(flat)
        batch_keys = flat.select(*self.policy.in_keys, *LEARNED_FROM)
        logs: dict[str, list[torch.Tensor]] = defaultdict(list)
        gradient_steps = 0
        for _ in range(config.ppo_epochs):
            kls = []
            order = torch.randperm(len(flat), generator=self.shuffle).to(flat["action"].device)
            for index in order.split(config.mini_batch_size):
                batch = batch_keys[index]
                scored = self.model(batch)
                if parity is None:
                    parity = self._minibatch_parity(flat, index, scored)
                loss, terms = ppo_loss(config, clip, batch, scored)
                terms["grad_norm"] = self._gradient_step(loss)
                gradient_steps += 1
                kls.append(terms["approx_kl"])
                for name, value in terms.items():
                    logs[name].append(value)
            if self._past_target_kl(kls):
                break
        self.policy.update_normalizers(flat, self.distributed.sum)
        self.updates += 1
        means = {name: float(torch.stack(values).mean()) for name, values in logs.items()}
        means |= {"explained_variance": _explained_variance(flat), "gradient_steps": float(gradient_steps)}
        return self.distributed.mean(means) | {"lr": lr, "parity": parity.drift, "parity_ratio": parity.ratio}

    def score(self, flat: TensorDict) -> TensorDict:
        """evaluate() of a whole rollout, in minibatches, without gradients."""
        keys = [*self.policy.in_keys, "action", ("next", "executed")]
        with torch.no_grad():
            return torch.cat([self.policy.evaluate(part) for part in flat.select(*keys).split(4096)])

    def state_dict(self) -> dict:
        return {"optimizer": self.optimizer.state_dict(), "updates": self.updates, "shuffle": self.shuffle.get_state()}

    def load_state_dict(self, state: dict) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]
        self.shuffle.set_state(state["shuffle"])

    def _set_learning_rates(self, progress: float) -> float:
        config = self.config
        factor = scheduled(config.lr_schedule, progress) * warmup(self.updates, config.warmup_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
        return config.policy_lr * factor

    def _gradient_step(self, loss: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
        self.optimizer.step()
        return norm.detach()

    def _past_target_kl(self, kls: list[torch.Tensor]) -> bool:
        """Every process must answer alike, so the KL is averaged over them first."""
        if self.config.target_kl is None:
            return False
        kl = self.distributed.mean({"kl": float(torch.stack(kls).mean())})["kl"]
        return kl > self.config.target_kl

    def _whole_parity(self, flat: TensorDict):
        """The gate over every stored decision, once per process; later updates check their first minibatch for free."""
        if self.checked_whole_rollout:
            return None
        self.checked_whole_rollout = True
        scored = self.score(flat)
        parts = zip(flat.split(4096), scored.split(4096), strict=True)
        return self._gate(worst([measure_parity(acted, again) for acted, again in parts]))

    def _minibatch_parity(self, flat: TensorDict, index: torch.Tensor, scored: TensorDict):
        acted = flat.select("trace", "log_prob", ("next", "executed"))[index]
        return self._gate(measure_parity(acted, scored))

    def _gate(self, parity):
        parity.drift = self.distributed.max(parity.drift)
        parity.check(self.config.parity_tolerance)
        return parity


def ppo_loss(
    config: PPOConfig, clip: float, batch: TensorDict, scored: TensorDict
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss to minimise for a minibatch [B] and what evaluate() says of it now."""
    advantage = batch["advantage"]
    if config.normalize_advantage and len(advantage) > 1:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    log_ratio = scored["log_prob"] - batch["log_prob"]
    ratio = log_ratio.exp()
    gain = torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    policy_loss = -gain.mean()
    value_loss = _value_loss(config.value_clip, batch, scored["value"])
    entropy = scored["entropy"].mean()
    loss = policy_loss + config.value_loss_coef * value_loss - config.entropy_coef * entropy
    with torch.no_grad():
        terms = {
            "loss": loss.detach(),
            "policy_loss": policy_loss.detach(),
            "value_loss": value_loss.detach(),
            "entropy": entropy.detach(),
            "approx_kl": ((ratio - 1) - log_ratio).mean(),
            "clip_fraction": ((ratio - 1).abs() > clip).float().mean(),
        }
    return loss, terms


def _value_loss(value_clip: float | None, batch: TensorDict, value: torch.Tensor) -> torch.Tensor:
    error = (value - batch["return"]).square()
    if value_clip is not None:
        clipped = batch["value"] + (value - batch["value"]).clamp(-value_clip, value_clip)
        error = torch.max(error, (clipped - batch["return"]).square())
    return error.mean()


def _explained_variance(flat: TensorDict) -> float:
    """1: the critic foresaw every return; 0: no better than their mean."""
    spread = flat["return"].var()
    return float(1 - (flat["return"] - flat["value"]).var() / spread) if spread > 0 else 0.0
