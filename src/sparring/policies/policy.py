"""Policy: turns observations into action chunks, and scores chunks taken before."""

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
Loss = tuple[torch.Tensor, dict[str, torch.Tensor]]  # a loss, and numbers to log


class Policy(nn.Module):
    """Base class. A class of your own takes (config, spec, chunk) and overrides act, evaluate, value.
    `act` and `evaluate` must agree on the numbers: the parity gate refuses to train otherwise."""

    reports_sampled: bool = False  # whether sampled and greedy behaviour differ enough for an evaluation to show both
    chunk: int = 1  # steps of an action chunk that a decision executes
    horizon: int = 1  # steps it plans, of which the first `chunk` are executed; demonstrations have as many
    # what evaluate reads besides the action, so what minibatches gather: observation/*, memory/policy, trace/*
    in_keys: list[tuple[str, ...]]
    normalized_keys: list[tuple[str, ...]] | None = None  # those of them that update_normalizers reads; None: all
    noise_size: int = 0  # uniform random numbers of a decision
    start_size: int = 0  # uniform random numbers that a greedy decision starts from, given in `start`
    # numbers of memory/policy, carried from one decision of an episode to the next (`remember`); 0: none
    memory_size: int = 0
    noise_hold: int = 1  # decisions over which a robot's noise stays the same
    may_be_new: tuple[str, ...] = ()  # parts that `pretrained` weights need not have, each with a dot at its end
    learns_entropy: bool = True  # whether its weights change its entropy, so that a bonus on it means something
    averages_log_prob: bool = False  # whether `log_prob` is a mean over what was scored instead of a sum
    # whether it scores all that was drawn, so that a ratio compares two policies; else it learns from fresh data only
    scores_all: bool = True

    @property
    def step_weights(self) -> torch.Tensor | None:
        """[S], weights of advantages where each denoising step is an action of its own and `log_prob` is [B, S]."""
        return None

    def act(self, td: TensorDict) -> TensorDict:
        """Adds `action` to a decision `td [N]`, and what scoring it needs to `trace/*`; maybe `log_prob` and `value`.
        Greedy without `noise` in `td`; then `start` (uniform numbers) is the start of a policy that denoises.
        The actions need not be clipped to what the env accepts, as the env clips them, and no gradient is taken of
        them: `evaluate` is what losses read, so those of the built-in policies carry no autograd graph."""
        raise NotImplementedError

    def complete(self, td: TensorDict) -> TensorDict:
        """What `act` left open, of a rollout `[B]`: executed steps' `log_prob`, `value`, `trace/{log_prob,z2,dims}`."""
        log_prob = td.get(("trace", "log_prob"), None)
        if log_prob is None:
            missing = f"{type(self).__name__}.act did not write trace/log_prob [N, C], of each step of a chunk"
            raise UserError(f"{missing}; write it there, or work out log_prob for a whole rollout in complete()")
        return TensorDict({"log_prob": self._executed_sum(log_prob, td)}, td.batch_size)

    def evaluate(self, td: TensorDict) -> TensorDict:
        """A *new* TensorDict [B] with log_prob, value and entropy of `td`'s actions by the present weights;
        where `td` has a `trace`, also trace/{mean,std,z2,dims}, which the parity gate compares."""
        raise NotImplementedError

    def value(self, td: TensorDict) -> torch.Tensor:
        """V of `td/observation` (and memory/policy), [B]."""
        raise NotImplementedError

    def remember(self, td: TensorDict) -> torch.Tensor:
        """`memory/policy` [N, memory_size] of the decision after `td [N]`, from `in_keys` and action alone."""
        raise UserError(f"{type(self).__name__} has memory_size={self.memory_size} and no remember()")

    def imitation_loss(self, td: TensorDict, generator: torch.Generator) -> Loss:
        """`td [B]`: `observation`, `action [B, horizon, A]`, and `valid [B, horizon]`, false past the episode's end."""
        raise UserError(f"{type(self).__name__} cannot imitate: it has no imitation_loss()")

    def fit_normalizers(self, statistics: Statistics, state: str, action: str) -> None:
        """To statistics of "observation/state", "observation/privileged" and "action"; fitted normalizers stay: they
        came with weights that rely on them. `state` and `action`: mean_std, min_max or quantile."""
        for name, normalizer in self._normalizers().items():
            if isinstance(normalizer, Normalizer) and not normalizer.fitted and name in statistics:
                normalizer.fit(statistics[name], action if name == "action" else state)

    def update_normalizers(self, td: TensorDict, sum_over_processes) -> None:
        """Fold the observations of a rollout into running statistics. Called between two versions of the weights."""
        for name, normalizer in self._normalizers().items():
            if isinstance(normalizer, RunningNormalizer):
                normalizer.update(td[tuple(name.split("/"))], sum_over_processes)

    @property
    def wants_statistics(self) -> bool:
        """Whether it normalises observations by running statistics that have seen none yet."""
        running = [n for n in self._normalizers().values() if isinstance(n, RunningNormalizer)]
        return any(not normalizer.fitted and not normalizer.count for normalizer in running)

    def _normalizers(self) -> dict[str, nn.Module | None]:
        """Of "observation/state", "observation/privileged" and "action", as far as there are any."""
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
    """`[B, C]` float: 1 for the steps of the chunk that were executed."""
    executed = td["next", "executed"]
    return (torch.arange(chunk, device=executed.device) < executed[..., None]).float()


def make_policy(config: Section, spec: EnvSpec, chunk: int, device: str | torch.device = "cpu") -> Policy:
    """A fresh policy for an env with this spec, acting in chunks of `chunk` steps."""
    with explain_oom(f"making the policy ({getattr(config, 'name', '')})"):
        policy = build(config, POLICIES, spec, chunk, kind="policy")
    with explain_oom(f"moving the policy to {device}", policy):
        return policy.to(device)
