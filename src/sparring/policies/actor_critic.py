"""The Gaussian and token actor-critic."""

import contextlib
from collections.abc import Mapping

import numpy as np
import torch
from tensordict import TensorDict
from torch import nn

from sparring.errors import UserError
from sparring.normalize import Normalizer, fit_all
from sparring.policies.configs import ActorCriticConfig
from sparring.policies.critic import PRIVILEGED, Critic
from sparring.policies.encoders import STATE, ObservationEncoder, mlp
from sparring.policies.heads import (
    DiscreteHead,
    GaussianHead,
    Parameters,
    Score,
    SquashedGaussianHead,
    StateDependentHead,
    TokenHead,
)
from sparring.policies.policy import Policy, executed_mask

# ---- What policies with an encoder of observations and a critic share.


class EncodedPolicy(Policy):
    """The encoder's and the critic's normalisers, the critic's parameters, and the precision of the networks."""

    encoder: ObservationEncoder
    critic: Critic

    @property
    def normalized_keys(self) -> list[tuple[str, ...]]:
        return [key for key in self.in_keys if key in (STATE, PRIVILEGED)]

    def update_normalizers(self, td: TensorDict, sum_over_processes) -> None:
        self.encoder.update_normalizer(td, sum_over_processes)
        self.critic.update_normalizer(td, sum_over_processes)

    def critic_parameters(self) -> list[nn.Parameter]:
        return list(self.critic.parameters())

    def _fit(self, statistics, action_normalizer: Normalizer | None, state: str, action: str) -> None:
        """Those that are not fitted yet: the others came with weights that know them."""
        normalizers = (self.encoder.normalizer, self.critic.privileged, action_normalizer)
        unfitted = [None if getattr(each, "fitted", False) else each for each in normalizers]
        fit_all(statistics, *unfitted, state, action)

    def _precision(self):
        """Around the networks, in acting and in scoring alike."""
        if self.config.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(next(self.critic.parameters()).device.type, torch.bfloat16)


# ---- The plain policy: an encoder, an actor and a critic.


class ActorCritic(EncodedPolicy):
    """Actor and critic share the encoder (normaliser, CNN) and nothing else."""

    def __init__(self, config: ActorCriticConfig, spec, chunk: int):
        super().__init__()
        self.config, self.chunk, self.horizon = config, chunk, chunk
        self.encoder = ObservationEncoder(config, spec)
        self.actor = mlp(self.encoder.size, config.hidden, config.activation)
        self.dropout = nn.Dropout(config.dropout)
        self.critic = Critic(config, spec, self.encoder.size, config.normalize_observations)
        self.in_keys = self.encoder.in_keys + self.critic.in_keys
        width = config.hidden[-1] if config.hidden else self.encoder.size
        self.head = _head(config, spec, width, chunk)
        # entries of an action that mean nothing to the env: zero, and not scored
        self.padding = spec.action_padding
        self.action_normalizer = _action_normalizer(config, self.head)
        self.noise_size = self.head.noise_size
        if isinstance(self.head, StateDependentHead):
            self.noise_hold = config.sde_sample_freq

    def act(self, td: TensorDict) -> TensorDict:
        features, latent = self._think(td)
        parameters = mean, log_std = self.head.parameters_of(latent)
        noise = td.get("noise", None)
        action = self.head.mode(mean) if noise is None else self.head.sample(latent, parameters, noise)
        if self.action_normalizer is not None:
            action = self.action_normalizer.inverse(action)
        if self.padding:
            action = nn.functional.pad(action, (0, self.padding))
        trace = {"mean": mean} if self.head.constant_std else {"mean": mean, "log_std": log_std}
        if self.encoder.is_costly and noise is not None:
            # the encoder is dear and has just run; a cheap one `complete` asks again, for all decisions at once
            td.set("value", self.critic(features, td))
        td.set("action", action)
        return td.set("trace", TensorDict(trace, td.batch_size))

    def complete(self, td: TensorDict) -> TensorDict:
        log_std = self.head.log_std if self.head.constant_std else td["trace", "log_std"]
        score = self.head.score((td["trace", "mean"], log_std), self._scored(td["action"]))
        value = td.get("value", None)
        trace = {"log_prob": score.log_prob, "z2": score.z2, "dims": torch.full_like(score.z2, score.dims)}
        return TensorDict(
            {
                "log_prob": self._executed_sum(score.log_prob, td),
                "value": self.value(td) if value is None else value,
                "trace": TensorDict(trace, td.batch_size),
            },
            td.batch_size,
        )

    def evaluate(self, td: TensorDict) -> TensorDict:
        features, latent = self._think(td)
        parameters = self.head.parameters_of(latent)
        score = self.head.score(parameters, self._scored(td["action"]))
        scored = {
            "log_prob": self._executed_sum(score.log_prob, td),
            "entropy": self._executed_sum(score.entropy, td),
            "value": self.critic(features, td),
        }
        if td.get("trace", None) is not None:
            scored["trace"] = _trace(parameters, score, td.batch_size)
        return TensorDict(scored, td.batch_size)

    def value(self, td: TensorDict) -> torch.Tensor:
        with self._precision():
            features = self.encoder(td)
        return self.critic(features.float(), td)

    def imitation_loss(
        self, td: TensorDict, generator: torch.Generator
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        parameters = self.head.parameters_of(self._think(td)[1])
        action, valid = self._scored(td["action"]), td["valid"].float()
        # [B, C]
        if isinstance(self.head, GaussianHead):
            terms = self.head.imitation(parameters, action)
        else:
            terms = {"cross_entropy": -self.head.score(parameters, action).log_prob}
        losses = {name: (term * valid).sum() / valid.sum() for name, term in terms.items()}
        return sum(losses.values()), {f"{name}_loss": loss.detach() for name, loss in losses.items()}

    def fit_normalizers(self, statistics: Mapping[str, Mapping[str, np.ndarray]], state: str, action: str) -> None:
        self._fit(statistics, self.action_normalizer, state, action)

    def _think(self, td: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
        """Features for the critic, and those that the head turns into actions; densities are never below fp32."""
        with self._precision():
            features = self.encoder(td)
            latent = self.dropout(self.actor(features))
        return features.float(), latent.float()

    def _scored(self, action: torch.Tensor) -> torch.Tensor:
        # [B, C, A] -> [B, C, A without padding]
        action = action[..., : action.shape[-1] - self.padding]
        return action if self.action_normalizer is None else self.action_normalizer(action)

    def _executed_sum(self, per_position: torch.Tensor, td: TensorDict) -> torch.Tensor:
        # [B, C] -> [B]
        return per_position[:, 0] if self.chunk == 1 else (per_position * executed_mask(td, self.chunk)).sum(-1)


def _head(config, spec, width, chunk):
    kind = config.distribution
    if kind == "auto":
        kind = "discrete" if spec.discrete_actions else "gaussian"
    if (kind == "discrete") != bool(spec.discrete_actions):
        takes = f"one of {spec.discrete_actions} choices" if spec.discrete_actions else "continuous actions"
        raise UserError(f"policy.distribution={kind}, but the env takes {takes}; set policy.distribution=auto")
    if kind == "discrete":
        return DiscreteHead(width, chunk, spec.discrete_actions)
    if kind == "tokens":
        return TokenHead(width, chunk, spec.action_dim - spec.action_padding, config.bins)
    head_class = {"gaussian": GaussianHead, "squashed": SquashedGaussianHead, "gsde": StateDependentHead}[kind]
    return head_class(width, chunk, spec.action_dim - spec.action_padding, config.init_std)


def _action_normalizer(config, head) -> Normalizer | None:
    if not config.normalize_actions:
        return None
    if not isinstance(head, GaussianHead) or isinstance(head, SquashedGaussianHead):
        raise UserError(
            "policy.normalize_actions=true scales the actions of gaussian and gsde policies only; "
            "set it to false, or policy.distribution=gaussian"
        )
    return Normalizer(head.action_dim)


def _trace(parameters: Parameters, score: Score, batch_size) -> TensorDict:
    mean, log_std = parameters
    std = torch.ones_like(mean) if log_std is None else log_std.exp().expand_as(mean)
    dims = torch.full_like(score.z2, score.dims)
    return TensorDict({"mean": mean, "std": std, "z2": score.z2, "dims": dims}, batch_size)
