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
from sparring.policies import POLICIES
from sparring.processes.memory_errors import explain_oom

Statistics = Mapping[str, Mapping[str, np.ndarray]]
# a loss, and numbers to log
Loss = tuple[torch.Tensor, dict[str, torch.Tensor]]


class Policy(nn.Module):
    """What every policy offers. A class of your own takes (config, spec, chunk) and overrides act, evaluate, value.

    `act` and `evaluate` must agree: scoring what was just sampled, with the same weights, gives the same numbers
    (the parity gate refuses to train otherwise).
    """

    # whether sampled and greedy behaviour differ enough for an evaluation to show both
    reports_sampled: bool = False
    # steps of an action chunk that a decision executes
    chunk: int = 1
    # steps it plans, of which the first `chunk` are executed; demonstrations have as many
    horizon: int = 1
    # what evaluate reads besides the action, so what minibatches gather: observation/*, memory/policy, trace/*
    in_keys: list[tuple[str, ...]]
    # those of them that update_normalizers reads; None: all
    normalized_keys: list[tuple[str, ...]] | None = None
    # uniform random numbers of a decision
    noise_size: int = 0
    # uniform random numbers that a greedy decision starts from, given in `start`
    start_size: int = 0
    # numbers of memory/policy, carried from one decision of an episode to the next (`remember`); 0: none
    memory_size: int = 0
    # decisions over which a robot's noise stays the same
    noise_hold: int = 1
    # parts that `pretrained` weights need not have, each with a dot at its end
    may_be_new: tuple[str, ...] = ()
    # whether its weights change its entropy, so that a bonus on it means something
    learns_entropy: bool = True
    # whether `log_prob` is a mean over what was scored instead of a sum
    averages_log_prob: bool = False
    # whether it scores all that was drawn, so that a ratio of two scores compares two policies; else only fresh data
    # can be learned from
    scores_all: bool = True

    @property
    def step_weights(self) -> torch.Tensor | None:
        """[S], weights of advantages where each denoising step is an action of its own and `log_prob` is [B, S]."""
        return None

    def act(self, td: TensorDict) -> TensorDict:
        """Adds `action` to a decision `td [N]`, and what scoring it again needs to `trace/*`.

        Without `noise` in it, acts greedily; a policy whose mode depends on its start reads that from `start`
        (uniform numbers, as `noise`). `log_prob` and `value` may be added too, or left to `complete`.
        """
        raise NotImplementedError

    def complete(self, td: TensorDict) -> TensorDict:
        """What `act` left open, for a whole rollout `[B]` at once: `log_prob`, `value`, `trace/{log_prob,z2,dims}`.

        `log_prob` is that of the executed part of a chunk, best in float64. Called with the weights that acted.
        """
        log_prob = td.get(("trace", "log_prob"), None)
        if log_prob is None:
            raise UserError(
                f"{type(self).__name__}.act did not write trace/log_prob [N, C], the log-prob of each step of a chunk; "
                "write it there, or work out log_prob for a whole rollout in complete()"
            )
        return TensorDict({"log_prob": self._executed_sum(log_prob, td)}, td.batch_size)

    def evaluate(self, td: TensorDict) -> TensorDict:
        """A *new* TensorDict [B] with the log_prob, value and entropy of `td`'s actions by the present weights.

        Where `td` has a `trace`, also trace/{mean,std,z2,dims}, for the parity gate to compare.
        """
        raise NotImplementedError

    def value(self, td: TensorDict) -> torch.Tensor:
        """V of `td/observation` (and memory/policy), [B]."""
        raise NotImplementedError

    def remember(self, td: TensorDict) -> torch.Tensor:
        """`memory/policy` [N, memory_size] of the decision after `td [N]`, from its `in_keys` and action alone.

        An episode begins with zeros. No gradients pass through it: a decision is scored with the memory that it had.
        """
        raise UserError(f"{type(self).__name__} has memory_size={self.memory_size} and no remember()")

    def imitation_loss(self, td: TensorDict, generator: torch.Generator) -> Loss:
        """How far it is from what a demonstrator did.

        `td [B]`: `observation`, `action [B, horizon, A]`, and `valid [B, horizon]`, false past the episode's end.
        """
        raise UserError(f"{type(self).__name__} cannot imitate: it has no imitation_loss()")

    def fit_normalizers(self, statistics: Statistics, state: str, action: str) -> None:
        """To demonstrations: "observation/state", "observation/privileged" and "action" -> their statistics.

        `state` and `action`: mean_std, min_max or quantile. Normalizers that are fitted already stay as they are.
        """

    def update_normalizers(self, td: TensorDict, sum_over_processes) -> None:
        """Fold the observations of a rollout into running statistics. Called between two versions of the weights."""

    def critic_parameters(self) -> list[nn.Parameter]:
        """Those that learn with critic_lr."""
        return []

    def actor_parameters(self) -> list[nn.Parameter]:
        """Those that learn and are not the critic's."""
        critic = {id(p) for p in self.critic_parameters()}
        return [p for p in self.parameters() if p.requires_grad and id(p) not in critic]

    def _executed_sum(self, per_position: torch.Tensor, td: TensorDict) -> torch.Tensor:
        # [B, C] -> [B]
        chunk = per_position.shape[-1]
        return per_position[:, 0] if chunk == 1 else (per_position * executed_mask(td, chunk)).sum(-1)


def executed_mask(td: TensorDict, chunk: int) -> torch.Tensor:
    """`[B, C]` float: 1 for the steps of the chunk that were executed."""
    executed = td["next", "executed"]
    return (torch.arange(chunk, device=executed.device) < executed[..., None]).float()


def make_policy(config: Section, spec: EnvSpec, chunk: int, device: str | torch.device = "cpu") -> Policy:
    """A fresh policy for an env with this spec, acting in chunks of `chunk` steps."""
    with explain_oom(f"making the policy ({config.name})"):
        policy = build(config, POLICIES, spec, chunk, kind="policy")
    with explain_oom(f"moving the policy to {device}", policy):
        return policy.to(device)


class MemoryTraces(nn.Module):
    """A memory without weights: running means of observations over short and long spans of an episode.

    A decision is scored from its own row, so gradients could not reach whatever wrote the memory. How it is written is
    therefore fixed, and policies learn to read it. Number 0 is a clock, t / (t + 1) at decision t; each other one
    follows a random projection of the observations: their mean until that is longer than its span, an exponential
    average from then on. (An exponential average from zeros would hardly show what was seen once.)

    Letters: B decisions, M numbers of memory, D numbers of an observation.
    """

    # decisions over which the slowest trace averages; the fastest holds the last decision alone
    longest_span = 100

    def __init__(self, inputs: int, size: int):
        super().__init__()
        # [M - 1, D] of length 1, always the same: weights that have learned to read them load anywhere
        directions = np.random.default_rng(0).standard_normal((size - 1, inputs))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        self.register_buffer("directions", torch.from_numpy(directions).float(), persistent=False)
        rates = 1 / np.geomspace(self.longest_span, 1, size - 1)
        self.register_buffer("rates", torch.from_numpy(rates).float(), persistent=False)

    @torch.no_grad()
    def forward(self, memory: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """The memory that entered a decision [B, M], and its observations [B, D] -> that of the next one [B, M]."""
        clock, traces = memory[:, :1], memory[:, 1:]
        # 1 / (t + 1): the share of the newest in a mean
        rates = torch.maximum(1 - clock, self.rates)
        return torch.cat([1 / (2 - clock), traces.lerp(seen @ self.directions.T, rates)], 1)
