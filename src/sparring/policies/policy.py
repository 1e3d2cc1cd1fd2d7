"""Policy: maps observations to action chunks, and scores earlier chunks."""

from collections.abc import Mapping

import numpy as np
import torch
from tensordict import TensorDict
from torch import nn

from sparring.config.resolve import build
from sparring.config.section import Section
from sparring.contract import EnvSpec
from sparring.errors import UserError
from sparring.normalize import Normalizer, RunningNormalizer
from sparring.policies import POLICIES
from sparring.processes.memory import explain_oom

Statistics = Mapping[str, Mapping[str, np.ndarray]]
Loss = tuple[torch.Tensor, dict[str, torch.Tensor]]  # a loss, and values to log


class Policy(nn.Module):
    """Base class. A custom class takes (config, spec, chunk) and overrides act, evaluate and value.
    `act` and `evaluate` must compute the same log-probs: otherwise the parity gate stops the training."""

    reports_sampled: bool = False  # whether evaluations also report sampled actions, which differ from greedy ones
    chunk: int = 1  # env steps of an action chunk that a decision executes
    horizon: int = 1  # planned steps; the first `chunk` of them are executed. Demonstrations have chunks of this length
    # keys that evaluate reads in addition to `action`; minibatches hold these: observation/*, memory/policy, trace/*
    in_keys: list[tuple[str, ...]]
    normalized_keys: list[tuple[str, ...]] | None = None  # those in_keys that update_normalizers reads; None: all
    noise_size: int = 0  # uniform random numbers per decision
    start_size: int = 0  # uniform random numbers in `start`, the initial noise of a greedy decision
    # size of memory/policy, which is carried from one decision of an episode to the next (`remember`); 0: none
    memory_size: int = 0
    noise_hold: int = 1  # consecutive decisions for which a robot keeps its noise
    may_be_new: tuple[str, ...] = ()  # parts that `pretrained` weights may lack, each with a trailing dot
    learns_entropy: bool = True  # whether the entropy depends on the weights, so that an entropy bonus has an effect
    averages_log_prob: bool = False  # whether `log_prob` is a mean over the scored numbers instead of a sum
    # whether all drawn numbers are scored, so that a ratio compares two policies; False: on-policy data only
    scores_all: bool = True

    @property
    def step_weights(self) -> torch.Tensor | None:
        """[S] weights of advantages if each denoising step is a separate action and `log_prob` is [B, S]; else None."""
        return None

    def act(self, td: TensorDict) -> TensorDict:
        """Add `action` to decisions `td [N]`, the data for scoring it to `trace/*`, and optionally `log_prob`, `value`.
        Without `noise` in `td`, actions are greedy; `start` (uniform numbers) is then the initial noise of denoising.
        Actions need not be clipped: the env clips them. Losses use `evaluate`, not the actions, so the actions of
        built-in policies carry no autograd graph."""
        raise NotImplementedError

    def complete(self, td: TensorDict) -> TensorDict:
        """Compute what `act` left out, for a rollout `[B]`: `log_prob` of executed steps, `value`, more of `trace`."""
        log_prob = td.get(("trace", "log_prob"), None)
        if log_prob is None:
            missing = f"{type(self).__name__}.act did not write trace/log_prob [N, C], one per step of a chunk"
            raise UserError(f"{missing}; write it there, or compute log_prob for a whole rollout in complete()")
        return TensorDict({"log_prob": self._executed_sum(log_prob, td)}, td.batch_size)

    def evaluate(self, td: TensorDict) -> TensorDict:
        """Return a *new* TensorDict [B]: log_prob, value and entropy of `td`'s actions under the current weights.
        If `td` has a `trace`, add trace/{mean,std,z2,dims}, which the parity gate compares."""
        raise NotImplementedError

    def value(self, td: TensorDict) -> torch.Tensor:
        """Return V of `td/observation` (and memory/policy), [B]."""
        raise NotImplementedError

    def remember(self, td: TensorDict) -> torch.Tensor:
        """Return `memory/policy` [N, memory_size] of the decision after `td [N]`; reads `in_keys` and `action` only."""
        raise UserError(f"{type(self).__name__} has memory_size={self.memory_size} and no remember(); implement it")

    def imitation_loss(self, td: TensorDict, generator: torch.Generator) -> Loss:
        """`td [B]`: `observation`, `action [B, horizon, A]` and `valid [B, horizon]`, false after the episode's end."""
        raise UserError(f"{type(self).__name__} cannot imitate: it has no imitation_loss(); implement it")

    def fit_normalizers(self, statistics: Statistics, state: str, action: str) -> None:
        """Fit to statistics of "observation/state", "observation/privileged" and "action". Fitted normalizers stay:
        they were loaded with weights that depend on them. `state` and `action`: mean_std, min_max or quantile."""
        for name, normalizer in self._normalizers().items():
            if isinstance(normalizer, Normalizer) and not normalizer.fitted and name in statistics:
                normalizer.fit(statistics[name], action if name == "action" else state)

    def update_normalizers(self, td: TensorDict, sum_over_processes) -> None:
        """Add the observations of a rollout to running statistics. Called between two versions of the weights."""
        for name, normalizer in self._normalizers().items():
            if isinstance(normalizer, RunningNormalizer):
                normalizer.update(td[tuple(name.split("/"))], sum_over_processes)

    @property
    def needs_statistics(self) -> bool:
        """Whether it normalises observations by running statistics that are still empty."""
        running = [n for n in self._normalizers().values() if isinstance(n, RunningNormalizer)]
        return any(not normalizer.fitted and not normalizer.count for normalizer in running)

    def _normalizers(self) -> dict[str, nn.Module | None]:
        """Return the normalizers of "observation/state", "observation/privileged" and "action" that exist."""
        return {}

    def critic_parameters(self) -> list[nn.Parameter]:
        return []

    def actor_parameters(self) -> list[nn.Parameter]:
        critic = {id(p) for p in self.critic_parameters()}
        return [p for p in self.parameters() if p.requires_grad and id(p) not in critic]

    def _executed_sum(self, per_position: torch.Tensor, td: TensorDict) -> torch.Tensor:
        chunk = per_position.shape[-1]  # [B, C] -> [B]
        return per_position[:, 0] if chunk == 1 else (per_position * executed_mask(td, chunk)).sum(-1)


def executed_mask(td: TensorDict, chunk: int) -> torch.Tensor:
    """Return `[B, C]` float: 1 for executed steps of the chunk, else 0."""
    executed = td["next", "executed"]
    return (torch.arange(chunk, device=executed.device) < executed[..., None]).float()


def make_policy(config: Section, spec: EnvSpec, chunk: int, device: str | torch.device = "cpu") -> Policy:
    """Create a policy for an env with this spec; it acts in chunks of `chunk` steps."""
    with explain_oom(f"making the policy ({getattr(config, 'name', '')})"):
        policy = build(config, POLICIES, spec, chunk, kind="policy")
    with explain_oom(f"moving the policy to {device}", policy):
        return policy.to(device)
