"""The plain policy: an encoder of observations, an actor with a head of its choice, and a critic."""

import contextlib

import torch
from tensordict import TensorDict
from torch import nn

from sparring.contract import EnvSpec
from sparring.errors import UserError
from sparring.normalize import Normalizer, fit_all
from sparring.policies.configs import ActorCriticConfig
from sparring.policies.critic import PRIVILEGED, Critic
from sparring.policies.encoders import STATE, ObservationEncoder, mlp
from sparring.policies.heads import make_head
from sparring.policies.policy import Loss, Policy, Statistics


class EncodedPolicy(Policy):
    critic: Critic

    def normalizers(self) -> tuple[Normalizer | None, nn.Module | None, Normalizer | None]:
        """Normalizers of observation/state, of observation/privileged and of actions."""
        raise NotImplementedError

    @property
    def normalized_keys(self) -> list[tuple[str, ...]]:
        return [key for key in self.in_keys if key in (STATE, PRIVILEGED)]

    def fit_normalizers(self, statistics: Statistics, state: str, action: str) -> None:
        # fitted ones came with weights that rely on them
        unfitted = [None if getattr(each, "fitted", False) else each for each in self.normalizers()]
        fit_all(statistics, *unfitted, state, action)

    def update_normalizers(self, td: TensorDict, sum_over_processes) -> None:
        state_normalizer = self.normalizers()[0]
        if state_normalizer is not None:
            state_normalizer.update(td[STATE], sum_over_processes)
        self.critic.update_normalizer(td, sum_over_processes)

    def critic_parameters(self) -> list[nn.Parameter]:
        return list(self.critic.parameters())

    def _precision(self):
        if self.config.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(next(self.critic.parameters()).device.type, torch.bfloat16)


class ActorCritic(EncodedPolicy):
    """Actor and critic share the encoder (normalizer, CNN) and nothing else."""

    def __init__(self, config: ActorCriticConfig, spec: EnvSpec, chunk: int):
        super().__init__()
        self.config, self.chunk, self.horizon = config, chunk, chunk
        self.encoder = ObservationEncoder(config, spec)
        self.actor = mlp(self.encoder.size, config.hidden, config.activation)
        self.dropout = nn.Dropout(config.dropout)
        self.critic = Critic(config, spec, self.encoder.size, config.normalize_observations)
        self.in_keys = self.encoder.in_keys + self.critic.in_keys
        self.head = make_head(config, spec, config.hidden[-1] if config.hidden else self.encoder.size, chunk)
        self.padding = spec.action_padding  # entries of an action that mean nothing to the env: zero, and not scored
        self.action_normalizer = None
        if config.normalize_actions:
            if not self.head.takes_scaled_actions:
                raise UserError(
                    "policy.normalize_actions=true scales the actions of gaussian and gsde policies only; "
                    "set it to false, or policy.distribution=gaussian"
                )
            self.action_normalizer = Normalizer(self.head.action_dim)
        self.noise_size = self.head.noise_size
        self.noise_hold = config.sde_sample_freq if self.head.holds_noise else 1

    def act(self, td: TensorDict) -> TensorDict:
        features, latent = self._encode(td)
        parameters = mean, log_std = self.head.parameters_of(latent)
        noise = td.get("noise", None)
        action = self.head.mode(mean) if noise is None else self.head.sample(latent, parameters, noise)
        if self.action_normalizer is not None:
            action = self.action_normalizer.inverse(action)
        if self.padding:
            action = nn.functional.pad(action, (0, self.padding))
        trace = {"mean": mean} if self.head.constant_std else {"mean": mean, "log_std": log_std}
        if self.encoder.is_costly and noise is not None:
            # `complete` runs a cheap encoder once more, for all decisions at once; a costly one has just run
            td.set("value", self.critic(features, td))
        td.set("action", action)
        return td.set("trace", TensorDict(trace, td.batch_size))

    def complete(self, td: TensorDict) -> TensorDict:
        log_std = self.head.log_std if self.head.constant_std else td["trace", "log_std"]
        score = self.head.score((td["trace", "mean"], log_std), self._scored(td["action"]))
        value = td.get("value", None)
        trace = {"log_prob": score.log_prob, "z2": score.z2, "dims": torch.full_like(score.z2, score.dims)}
        completed = {
            "log_prob": self._executed_sum(score.log_prob, td),
            "value": self.value(td) if value is None else value,
            "trace": TensorDict(trace, td.batch_size),
        }
        return TensorDict(completed, td.batch_size)

    def evaluate(self, td: TensorDict) -> TensorDict:
        features, latent = self._encode(td)
        parameters = mean, log_std = self.head.parameters_of(latent)
        score = self.head.score(parameters, self._scored(td["action"]))
        scored = {
            "log_prob": self._executed_sum(score.log_prob, td),
            "entropy": self._executed_sum(score.entropy, td),
            "value": self.critic(features, td),
        }
        if td.get("trace", None) is not None:
            std = torch.ones_like(mean) if log_std is None else log_std.exp().expand_as(mean)
            trace = {"mean": mean, "std": std, "z2": score.z2, "dims": torch.full_like(score.z2, score.dims)}
            scored["trace"] = TensorDict(trace, td.batch_size)
        return TensorDict(scored, td.batch_size)

    def value(self, td: TensorDict) -> torch.Tensor:
        with self._precision():
            features = self.encoder(td)
        return self.critic(features.float(), td)

    def imitation_loss(self, td: TensorDict, generator: torch.Generator) -> Loss:
        parameters, valid = self.head.parameters_of(self._encode(td)[1]), td["valid"].float()
        # [B, C] each
        terms = self.head.imitation(parameters, self._scored(td["action"]))
        losses = {name: (term * valid).sum() / valid.sum() for name, term in terms.items()}
        return sum(losses.values()), {f"{name}_loss": loss.detach() for name, loss in losses.items()}

    def normalizers(self) -> tuple[Normalizer | None, nn.Module | None, Normalizer | None]:
        return self.encoder.normalizer, self.critic.privileged, self.action_normalizer

    def _encode(self, td: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
        """Features for the critic, and those that the head turns into actions; densities are never below fp32."""
        with self._precision():
            features = self.encoder(td)
            latent = self.dropout(self.actor(features))
        return features.float(), latent.float()

    def _scored(self, action: torch.Tensor) -> torch.Tensor:
        # [B, C, A] -> [B, C, A without padding]
        action = action[..., : action.shape[-1] - self.padding]
        return action if self.action_normalizer is None else self.action_normalizer(action)
