"""Action heads: features -> a distribution over action chunks; a sample is scored as it was drawn, before clipping.

Letters: B decisions, C chunk positions, A action dims, F features.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

from sparring.contract import EnvSpec
from sparring.errors import UserError
from sparring.policies.configs import ActorCriticConfig

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
_LEAST_STD = 0.05  # an imitating policy keeps at least this standard deviation, to explore with later

# the mean [B, C, ...] and the log of the standard deviation, broadcastable to it (None where there is none)
Parameters = tuple[torch.Tensor, torch.Tensor | None]


def make_head(config: ActorCriticConfig, spec: EnvSpec, width: int, chunk: int) -> "_ActionHead":
    kind, choices, dims = config.distribution, spec.discrete_actions, spec.action_dim - spec.action_padding
    if kind == "auto":
        kind = "discrete" if choices else "gaussian"
    if (kind == "discrete") != bool(choices):
        takes = f"one of {choices} choices" if choices else "continuous actions"
        raise UserError(f"policy.distribution={kind}, but the env takes {takes}; set policy.distribution=auto")
    if kind == "discrete":
        return _DiscreteHead(width, chunk, choices)
    if kind == "tokens":
        return _TokenHead(width, chunk, dims, config.bins)
    head_class = {"gaussian": _GaussianHead, "squashed": _SquashedGaussianHead, "gsde": _StateDependentHead}[kind]
    return head_class(width, chunk, dims, config.init_std)


@dataclass
class _Score:
    """How likely a chunk is, position by position: all [B, C]."""

    log_prob: torch.Tensor  # float64: a ratio is a difference of two
    entropy: torch.Tensor
    squares: torch.Tensor | None  # (x - mean)^2 / sigma^2, still per dim [B, C, A]; None where there is no sigma
    dims: int  # how many numbers of each position were scored

    @property
    def z2(self) -> torch.Tensor:
        return torch.zeros_like(self.entropy) if self.squares is None else self.squares.sum(-1)


class _ActionHead(nn.Module):
    constant_std = True  # whether log_std depends on the weights alone, so that a trace need not hold it
    holds_noise = False  # whether it draws one noise for several decisions (`Policy.noise_hold`)
    takes_scaled_actions = False  # whether its actions may be scaled as demonstrations are (policy.normalize_actions)

    def __init__(self, features: int, outputs: int, noise_size: int):
        super().__init__()
        self.noise_size = noise_size
        # a fresh policy is near its mean everywhere, so that early exploration is even
        self.linear = nn.Linear(features, outputs)
        nn.init.orthogonal_(self.linear.weight, 0.01)
        nn.init.zeros_(self.linear.bias)

    def imitation(self, parameters: Parameters, action: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"cross_entropy": -self.score(parameters, action).log_prob}


class _GaussianHead(_ActionHead):
    takes_scaled_actions = True

    def __init__(self, features: int, chunk: int, action_dim: int, init_std: float):
        super().__init__(features, chunk * action_dim, chunk * action_dim)
        self.chunk, self.action_dim = chunk, action_dim
        self.log_std = nn.Parameter(torch.full((action_dim,), math.log(init_std)))

    def parameters_of(self, features: torch.Tensor) -> Parameters:
        # [B, F] -> [B, C, A]
        return self.linear(features).view(-1, self.chunk, self.action_dim), self.log_std

    def mode(self, mean: torch.Tensor) -> torch.Tensor:
        return mean

    def sample(self, features: torch.Tensor, parameters: Parameters, noise: torch.Tensor) -> torch.Tensor:
        mean, log_std = parameters
        # uniform -> normal through the inverse of its distribution function
        return torch.addcmul(mean, log_std.exp(), torch.special.ndtri(noise).view_as(mean))

    def score(self, parameters: Parameters, action: torch.Tensor) -> _Score:
        mean, log_std = parameters
        squares = ((action - mean) * (-log_std).exp()).square()
        # [B, C, A] -> [B, C], accumulated in float64; the volume is one number where log_std is one vector
        volume = log_std.sum(-1, dtype=torch.float64) + self.action_dim * LOG_SQRT_2PI
        log_prob = torch.sub(-volume, squares.sum(-1, dtype=torch.float64), alpha=0.5)
        entropy = (volume + 0.5 * self.action_dim).float().expand(log_prob.shape)
        return _Score(log_prob, entropy, squares, self.action_dim)

    def imitation(self, parameters: Parameters, action: torch.Tensor) -> dict[str, torch.Tensor]:
        mean, log_std = parameters
        squares = (action - mean).square()
        # the negative log-likelihood, of which only the width learns: a mean under it would be learnt ever faster
        width = log_std + 0.5 * squares.detach().clamp_min(_LEAST_STD**2) * (-2 * log_std).exp()
        return {"error": squares.mean(-1), "width": width.mean(-1)}


class _SquashedGaussianHead(_GaussianHead):
    """tanh of normals: never outside [-1, 1]. Scored in action space, i.e. with tanh's Jacobian."""

    takes_scaled_actions = False
    limit = 1.0 - 1e-6  # atanh of float32 numbers this close to 1 is still finite and exact enough to score
    # demonstrated actions at the bounds would have their mean at infinity; this close to 1 is as good
    imitated_limit = 0.99

    def mode(self, mean: torch.Tensor) -> torch.Tensor:
        return torch.tanh(mean).clamp(-self.limit, self.limit)

    def sample(self, features: torch.Tensor, parameters: Parameters, noise: torch.Tensor) -> torch.Tensor:
        return self.mode(super().sample(features, parameters, noise))

    def score(self, parameters: Parameters, action: torch.Tensor) -> _Score:
        sample = torch.atanh(action)  # from the action that was emitted, in acting and in replay alike
        score = super().score(parameters, sample)
        score.log_prob = score.log_prob - _log_slope(sample).sum(-1, dtype=torch.float64)
        # the normal's entropy plus log slope, estimated on this reparameterised sample: its gradient widens the policy
        mean, log_std = parameters
        z = ((sample - mean) * (-log_std).exp()).detach()
        score.entropy = score.entropy + _log_slope(mean + log_std.exp() * z).sum(-1)
        return score

    def imitation(self, parameters: Parameters, action: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().imitation(parameters, torch.atanh(action.clamp(-self.imitated_limit, self.imitated_limit)))


def _log_slope(x: torch.Tensor) -> torch.Tensor:
    """log(1 - tanh(x)^2), in a form that neither overflows nor cancels."""
    return 2.0 * (math.log(2.0) - x - nn.functional.softplus(-2.0 * x))


class _StateDependentHead(_GaussianHead):
    """gSDE: the noise is a random linear function of the features, which stays the same for several decisions."""

    constant_std = False
    holds_noise = True

    def __init__(self, features: int, chunk: int, action_dim: int, init_std: float):
        super().__init__(features, chunk, action_dim, init_std)
        self.noise_size = features * chunk * action_dim
        # of the weights of that function: [F, C * A]
        self.log_std = nn.Parameter(torch.full((features, chunk * action_dim), math.log(init_std)))

    def parameters_of(self, features: torch.Tensor) -> Parameters:
        mean, _ = super().parameters_of(features)
        # the features are trained to act, not to widen the noise
        variance = features.detach().square() @ (2 * self.log_std).exp() + 1e-6
        return mean, 0.5 * variance.log().view_as(mean)

    def sample(self, features: torch.Tensor, parameters: Parameters, noise: torch.Tensor) -> torch.Tensor:
        mean, _ = parameters
        # [B, F, C * A]: each robot's own random function
        weights = torch.special.ndtri(noise).unflatten(-1, self.log_std.shape) * self.log_std.exp()
        return mean + torch.einsum("bf,bfa->ba", features, weights).view_as(mean)


class _TokenHead(_ActionHead):
    """Uniform bins in [-1, 1], drawn in parallel; an action is a bin's centre. The mean is the log-probs: no sigma."""

    log_std = None

    def __init__(self, features: int, chunk: int, action_dim: int, bins: int):
        super().__init__(features, chunk * action_dim * bins, chunk * action_dim)
        self.chunk, self.action_dim, self.bins = chunk, action_dim, bins

    def parameters_of(self, features: torch.Tensor) -> Parameters:
        # [B, F] -> [B, C, A, bins]
        return self.linear(features).unflatten(-1, (self.chunk, self.action_dim, self.bins)).log_softmax(-1), None

    def mode(self, mean: torch.Tensor) -> torch.Tensor:
        return self._centre(mean.argmax(-1))

    def sample(self, features: torch.Tensor, parameters: Parameters, noise: torch.Tensor) -> torch.Tensor:
        log_probs = parameters[0]
        # the first bin whose cumulative probability passes the uniform number
        below = log_probs.exp().cumsum(-1) < noise.view(log_probs.shape[:-1])[..., None]
        return self._centre(below.sum(-1).clamp_max(self.bins - 1))

    def score(self, parameters: Parameters, action: torch.Tensor) -> _Score:
        log_probs = parameters[0]
        # [B, C, A] -> [B, C], accumulated in float64
        chosen = log_probs.gather(-1, self._bin(action)[..., None])[..., 0]
        entropy = -(log_probs.exp() * log_probs).sum((-1, -2))
        return _Score(chosen.sum(-1, dtype=torch.float64), entropy, None, self.action_dim)

    def _centre(self, index: torch.Tensor) -> torch.Tensor:
        return (2 * index + 1).float() / self.bins - 1

    def _bin(self, action: torch.Tensor) -> torch.Tensor:
        # a centre is half a bin away from the next one: no rounding reaches there
        return ((action + 1) * (self.bins / 2)).floor().clamp(0, self.bins - 1).long()


class _DiscreteHead(_TokenHead):
    def __init__(self, features: int, chunk: int, choices: int):
        super().__init__(features, chunk, 1, choices)

    def _centre(self, index: torch.Tensor) -> torch.Tensor:
        return index.float()

    def _bin(self, action: torch.Tensor) -> torch.Tensor:
        return action.long()
