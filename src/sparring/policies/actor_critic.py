"""ActorCritic: an encoder of observations, an actor with one of several heads, and a critic.

A head maps features to a distribution over chunks. Samples are scored as drawn, before the env clips them.
Letters: B decisions, C chunk positions, A action dims, F features."""

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from sparring.contract import EnvSpec
from sparring.errors import UserError
from sparring.normalize import Normalizer
from sparring.policies.configs import ActorCriticConfig
from sparring.policies.critic import PRIVILEGED, Critic
from sparring.policies.encoders import STATE, ObservationEncoder, mlp
from sparring.policies.policy import Loss, Policy

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
_LEAST_STD = 0.05  # smallest standard deviation that imitation fits, so that the policy can explore in fine-tuning

# the mean [B, C, ...] and the log of the standard deviation, broadcastable to it (None for heads without one)
Parameters = tuple[torch.Tensor, Any]


class EncodedPolicy(Policy):
    critic: Critic

    @property
    def normalized_keys(self) -> list[tuple[str, ...]]:  # type: ignore[override]
        return [key for key in self.in_keys if key in (STATE, PRIVILEGED)]

    def critic_parameters(self) -> list[nn.Parameter]:
        return list(self.critic.parameters())

    def _normalizers(self) -> dict[str, nn.Module | None]:
        return {"observation/privileged": self.critic.privileged}

    def _precision(self):
        if self.config.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(next(self.critic.parameters()).device.type, torch.bfloat16)


class ActorCritic(EncodedPolicy):
    """Actor and critic share only the encoder (normalizer, CNN)."""

    config: ActorCriticConfig

    def __init__(self, config: ActorCriticConfig, spec: EnvSpec, chunk: int):
        super().__init__()
        self.config, self.chunk, self.horizon = config, chunk, chunk
        self.encoder = ObservationEncoder(config, spec)
        self.actor = mlp(self.encoder.size, config.hidden, config.activation)
        self.dropout = nn.Dropout(config.dropout)
        self.critic = Critic(config, spec, self.encoder.size, config.normalize_observations)
        self.in_keys = [*self.encoder.in_keys, *self.critic.in_keys]
        self.head = _make_head(config, spec, config.hidden[-1] if config.hidden else self.encoder.size, chunk)
        self.padding = spec.action_padding  # trailing action entries that the env ignores: zero, and not scored
        self.action_normalizer = None
        if config.normalize_actions:
            if not self.head.takes_scaled_actions:
                advice = "set it to false, or set policy.distribution=gaussian"
                raise UserError(f"policy.normalize_actions=true scales gaussian and gsde actions only; {advice}")
            self.action_normalizer = Normalizer(self.head.action_dim)
        self.noise_size = self.head.noise_size
        self.noise_hold = config.sde_sample_freq if self.head.holds_noise else 1

    @torch.no_grad()
    def act(self, td: TensorDict) -> TensorDict:
        """Add actions that are not clipped (the env clips them) and carry no autograd graph."""
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
            # a cheap encoder runs again in `complete`, for all decisions at once; a costly one should run only once
            td.set("value", self.critic(features, td))
        td.set("action", action)
        return td.set("trace", TensorDict(trace, td.batch_size))

    def complete(self, td: TensorDict) -> TensorDict:
        log_std = self.head.log_std if self.head.constant_std else td["trace", "log_std"]
        score = self.head.score((td["trace", "mean"], log_std), self._scored(td["action"]))
        value = td.get("value", None)
        trace = {"log_prob": score.log_prob, "z2": score.z2, "dims": torch.full_like(score.z2, score.dims)}
        completed = {"value": self.value(td) if value is None else value, "trace": TensorDict(trace, td.batch_size)}
        return TensorDict(completed | {"log_prob": self._executed_sum(score.log_prob, td)}, td.batch_size)

    def evaluate(self, td: TensorDict) -> TensorDict:
        features, latent = self._encode(td)
        parameters = mean, log_std = self.head.parameters_of(latent)
        score = self.head.score(parameters, self._scored(td["action"]))
        log_prob, entropy = (self._executed_sum(part, td) for part in (score.log_prob, score.entropy))
        scored = {"log_prob": log_prob, "entropy": entropy, "value": self.critic(features, td)}
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
        terms = self.head.imitation(parameters, self._scored(td["action"]))  # [B, C] each
        losses = {name: (term * valid).sum() / valid.sum() for name, term in terms.items()}
        return sum(losses.values()), {f"{name}_loss": loss.detach() for name, loss in losses.items()}

    def _normalizers(self) -> dict[str, nn.Module | None]:
        own = {"observation/state": self.encoder.normalizer, "action": self.action_normalizer}
        return super()._normalizers() | own

    def _encode(self, td: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
        """Features for the critic, and features for the head; both at least fp32, so that log-probs are."""
        with self._precision():
            features = self.encoder(td)
            latent = self.dropout(self.actor(features))
        return features.float(), latent.float()

    def _scored(self, action: torch.Tensor) -> torch.Tensor:
        action = action[..., : action.shape[-1] - self.padding]  # [B, C, A without padding]
        return action if self.action_normalizer is None else self.action_normalizer(action)


def _make_head(config: ActorCriticConfig, spec: EnvSpec, features: int, chunk: int) -> "_GaussianHead | _TokenHead":
    kind, choices, dims = config.distribution, spec.discrete_actions, spec.action_dim - spec.action_padding
    if kind == "auto":
        kind = "discrete" if choices else "gaussian"
    if (kind == "discrete") != bool(choices):
        takes = f"one of {choices} choices" if choices else "continuous actions"
        raise UserError(f"policy.distribution={kind}, but the env takes {takes}; set policy.distribution=auto")
    if kind == "discrete":
        return _DiscreteHead(features, chunk, choices)
    if kind == "tokens":
        return _TokenHead(features, chunk, dims, config.bins)
    head_class = {"gaussian": _GaussianHead, "squashed": _SquashedGaussianHead, "gsde": _StateDependentHead}[kind]
    return head_class(features, chunk, dims, config.init_std)


@dataclass
class _Score:
    """Log-prob and entropy of a chunk per position, [B, C]."""

    log_prob: torch.Tensor  # float64: log ratios are differences of two log-probs
    entropy: torch.Tensor
    squares: torch.Tensor | None  # (x - mean)^2 / sigma^2 per dim [B, C, A]; None for heads without a sigma
    dims: int  # scored numbers per position

    @property
    def z2(self) -> torch.Tensor:
        return torch.zeros_like(self.entropy) if self.squares is None else self.squares.sum(-1)


class _ActionHead(nn.Module):
    constant_std = True  # whether log_std depends only on the weights, so that a trace need not store it
    holds_noise = False  # whether several decisions share one noise (`Policy.noise_hold`)
    takes_scaled_actions = False  # whether it supports policy.normalize_actions

    def __init__(self, features: int, chunk: int, action_dim: int, outputs: int):
        """`outputs`: network outputs per action dim."""
        super().__init__()
        self.chunk, self.action_dim = chunk, action_dim
        self.noise_size = chunk * action_dim
        # small initial weights: the mean of a fresh policy is near 0 in every state, so early exploration is uniform
        self.linear = nn.Linear(features, chunk * action_dim * outputs)
        nn.init.orthogonal_(self.linear.weight, 0.01)
        nn.init.zeros_(self.linear.bias)


class _GaussianHead(_ActionHead):
    takes_scaled_actions = True

    def __init__(self, features: int, chunk: int, action_dim: int, init_std: float):
        super().__init__(features, chunk, action_dim, outputs=1)
        self.log_std = nn.Parameter(torch.full((action_dim,), math.log(init_std)))

    def parameters_of(self, features: torch.Tensor) -> Parameters:
        return self.linear(features).view(-1, self.chunk, self.action_dim), self.log_std  # [B, C, A], [A]

    def mode(self, mean: torch.Tensor) -> torch.Tensor:
        return mean

    def sample(self, features: torch.Tensor, parameters: Parameters, noise: torch.Tensor) -> torch.Tensor:
        mean, log_std = parameters
        # uniform -> normal by the inverse of its distribution function
        return torch.addcmul(mean, log_std.exp(), torch.special.ndtri(noise).view_as(mean))

    def score(self, parameters: Parameters, action: torch.Tensor) -> _Score:
        mean, log_std = parameters
        squares = ((action - mean) * (-log_std).exp()).square()
        # [B, C, A] -> [B, C], accumulated in float64; the volume is a scalar if log_std is one vector [A]
        volume = log_std.sum(-1, dtype=torch.float64) + self.action_dim * LOG_SQRT_2PI
        log_prob = torch.sub(-volume, squares.sum(-1, dtype=torch.float64), alpha=0.5)
        entropy = (volume + 0.5 * self.action_dim).float().expand(log_prob.shape)
        return _Score(log_prob, entropy, squares, self.action_dim)

    def imitation(self, parameters: Parameters, action: torch.Tensor) -> dict[str, torch.Tensor]:
        mean, log_std = parameters
        squares = (action - mean).square()
        # negative log-likelihood, for the width only: for the mean its gradient grows as the width shrinks
        width = log_std + 0.5 * squares.detach().clamp_min(_LEAST_STD**2) * (-2 * log_std).exp()
        return {"error": squares.mean(-1), "width": width.mean(-1)}


class _SquashedGaussianHead(_GaussianHead):
    """tanh of a normal: always inside [-1, 1]. Scored in action space, i.e. with tanh's Jacobian."""

    takes_scaled_actions = False
    limit = 1.0 - 1e-6  # up to here atanh of float32 numbers is finite and precise enough to score
    # atanh of demonstrated actions at the bounds is infinite: they are clamped to this
    imitated_limit = 0.99

    def mode(self, mean: torch.Tensor) -> torch.Tensor:
        return torch.tanh(mean).clamp(-self.limit, self.limit)

    def sample(self, features: torch.Tensor, parameters: Parameters, noise: torch.Tensor) -> torch.Tensor:
        return self.mode(super().sample(features, parameters, noise))

    def score(self, parameters: Parameters, action: torch.Tensor) -> _Score:
        sample = torch.atanh(action)  # from the stored action both in acting and in updates, so that both agree
        score = super().score(parameters, sample)
        score.log_prob = score.log_prob - _log_slope(sample).sum(-1, dtype=torch.float64)
        # the normal's entropy plus log slope at this reparameterised sample, so that the gradient reaches mean and std
        mean, log_std = parameters
        z = ((sample - mean) * (-log_std).exp()).detach()
        score.entropy = score.entropy + _log_slope(mean + log_std.exp() * z).sum(-1)
        return score

    def imitation(self, parameters: Parameters, action: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().imitation(parameters, torch.atanh(action.clamp(-self.imitated_limit, self.imitated_limit)))


def _log_slope(x: torch.Tensor) -> torch.Tensor:
    """log(1 - tanh(x)^2), in a form without overflow or cancellation."""
    return 2.0 * (math.log(2.0) - x - nn.functional.softplus(-2.0 * x))


class _StateDependentHead(_GaussianHead):
    """gSDE: the noise is a random linear function of the features; the function stays fixed for several decisions."""

    constant_std = False
    holds_noise = True

    def __init__(self, features: int, chunk: int, action_dim: int, init_std: float):
        super().__init__(features, chunk, action_dim, init_std)
        self.noise_size = features * chunk * action_dim
        # log std of that function's weights: [F, C * A]
        self.log_std = nn.Parameter(torch.full((features, chunk * action_dim), math.log(init_std)))

    def parameters_of(self, features: torch.Tensor) -> Parameters:
        mean, _ = super().parameters_of(features)
        # detached: only the mean trains the features, not the noise
        variance = features.detach().square() @ (2 * self.log_std).exp() + 1e-6
        return mean, 0.5 * variance.log().view_as(mean)

    def sample(self, features: torch.Tensor, parameters: Parameters, noise: torch.Tensor) -> torch.Tensor:
        mean, _ = parameters
        # [B, F, C * A]: one random function per robot
        weights = torch.special.ndtri(noise).unflatten(-1, self.log_std.shape) * self.log_std.exp()
        return mean + torch.einsum("bf,bfa->ba", features, weights).view_as(mean)


class _TokenHead(_ActionHead):
    """Uniform bins in [-1, 1], sampled in parallel; an action is a bin's centre. `mean` holds log-probs; no sigma."""

    log_std = None

    def __init__(self, features: int, chunk: int, action_dim: int, bins: int):
        super().__init__(features, chunk, action_dim, outputs=bins)
        self.bins = bins

    def parameters_of(self, features: torch.Tensor) -> Parameters:
        # [B, F] -> [B, C, A, bins]
        return self.linear(features).unflatten(-1, (self.chunk, self.action_dim, self.bins)).log_softmax(-1), None

    def mode(self, mean: torch.Tensor) -> torch.Tensor:
        return self._centre(mean.argmax(-1))

    def sample(self, features: torch.Tensor, parameters: Parameters, noise: torch.Tensor) -> torch.Tensor:
        log_probs = parameters[0]
        # the first bin whose cumulative probability exceeds the uniform number
        below = log_probs.exp().cumsum(-1) < noise.view(log_probs.shape[:-1])[..., None]
        return self._centre(below.sum(-1).clamp_max(self.bins - 1))

    def score(self, parameters: Parameters, action: torch.Tensor) -> _Score:
        log_probs = parameters[0]
        # [B, C, A] -> [B, C], accumulated in float64
        chosen = log_probs.gather(-1, self._bin(action)[..., None])[..., 0]
        entropy = -(log_probs.exp() * log_probs).sum((-1, -2))
        return _Score(chosen.sum(-1, dtype=torch.float64), entropy, None, self.action_dim)

    def imitation(self, parameters: Parameters, action: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"cross_entropy": -self.score(parameters, action).log_prob}

    def _centre(self, index: torch.Tensor) -> torch.Tensor:
        return (2 * index + 1).float() / self.bins - 1

    def _bin(self, action: torch.Tensor) -> torch.Tensor:
        # actions are bin centres, half a bin away from the edges: rounding cannot select another bin
        return ((action + 1) * (self.bins / 2)).floor().clamp(0, self.bins - 1).long()


class _DiscreteHead(_TokenHead):
    def __init__(self, features: int, chunk: int, choices: int):
        super().__init__(features, chunk, 1, choices)

    def _centre(self, index: torch.Tensor) -> torch.Tensor:
        return index.float()

    def _bin(self, action: torch.Tensor) -> torch.Tensor:
        return action.long()
