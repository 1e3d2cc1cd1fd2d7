"""Action distributions: features -> a chunk of actions and its score.

Every head scores the sample as it was drawn (clipping belongs to the env) and reports, per chunk position, the terms
the parity gate compares: `log_prob [B, C]`, `mean [B, C, ...]` with `std` broadcastable to it, `z2 [B, C]` (sum of
squared standardised samples) and `dims [B, C]` (how many numbers were scored).
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


@dataclass
class Score:
    """How likely a chunk is, unreduced over its positions."""

    log_prob: torch.Tensor
    entropy: torch.Tensor
    mean: torch.Tensor
    std: torch.Tensor
    z2: torch.Tensor
    dims: torch.Tensor


class GaussianHead(nn.Module):
    """Independent normals, one learned standard deviation per action dim."""

    def __init__(self, features: int, chunk: int, action_dim: int, init_std: float):
        super().__init__()
        self.chunk, self.action_dim = chunk, action_dim
        self.noise_size = chunk * action_dim
        self.linear = _small_output(features, chunk * action_dim)
        self.log_std = nn.Parameter(torch.full((action_dim,), math.log(init_std)))

    def act(self, features: torch.Tensor, noise: torch.Tensor | None) -> tuple[torch.Tensor, Score]:
        mean = self._mean(features)
        if noise is None:
            action = self._to_action(mean)
            return action, self._score(mean, action)
        # uniform -> normal through the inverse of its distribution function
        normal = torch.special.ndtri(noise).view_as(mean)
        action = self._to_action(mean + self.log_std.exp() * normal)
        return action, self._score(mean, action)

    def score(self, features: torch.Tensor, action: torch.Tensor) -> Score:
        return self._score(self._mean(features), action)

    def _mean(self, features):
        # [B, F] -> [B, C, A]
        return self.linear(features).unflatten(-1, (self.chunk, self.action_dim))

    def _score(self, mean, sample) -> Score:
        std = self.log_std.exp()
        z2 = ((sample - mean) / std).square()
        # [B, C, A] -> [B, C], accumulated in float64
        terms = -0.5 * z2 - self.log_std - LOG_SQRT_2PI
        log_prob = terms.sum(-1, dtype=torch.float64).float()
        entropy = (self.log_std + 0.5 + LOG_SQRT_2PI).sum().expand(log_prob.shape)
        dims = torch.full_like(log_prob, self.action_dim)
        return Score(log_prob, entropy, mean, std, z2.sum(-1), dims)

    def _to_action(self, sample):
        return sample


class SquashedGaussianHead(GaussianHead):
    """tanh of normals: never outside [-1, 1]. Scored in action space, i.e. with tanh's Jacobian."""

    # atanh of float32 numbers this close to 1 is still finite and exact enough to score
    limit = 1.0 - 1e-6

    def _to_action(self, sample):
        return torch.tanh(sample).clamp(-self.limit, self.limit)

    def _score(self, mean, action) -> Score:
        # from the action that was emitted, in acting and in replay alike
        sample = torch.atanh(action)
        score = super()._score(mean, sample)
        # log(1 - tanh(x)^2), in a form that neither overflows nor cancels
        log_slope = 2.0 * (math.log(2.0) - sample - nn.functional.softplus(-2.0 * sample))
        # the entropy of a squashed normal has no closed form; -log p of the sample estimates it
        score.log_prob = (score.log_prob.double() - log_slope.sum(-1, dtype=torch.float64)).float()
        score.entropy = -score.log_prob
        return score


class StateDependentHead(GaussianHead):
    """Generalised state-dependent exploration (gSDE): the noise is a random linear function of the features.

    The function stays the same for several decisions (the policy's `noise_hold`), so that a robot explores along
    smooth arcs instead of trembling. Scored as the normal it is for any one decision.
    """

    def __init__(self, features: int, chunk: int, action_dim: int, init_std: float):
        super().__init__(features, chunk, action_dim, init_std)
        self.noise_size = features * chunk * action_dim
        # of the weights of that function: [F, C * A]
        self.log_std = nn.Parameter(torch.full((features, chunk * action_dim), math.log(init_std)))

    def act(self, features: torch.Tensor, noise: torch.Tensor | None) -> tuple[torch.Tensor, Score]:
        mean = self._mean(features)
        if noise is None:
            return mean, self._score(mean, mean, features)
        # [B, F, C * A]: each robot's own random function
        weights = torch.special.ndtri(noise).unflatten(-1, self.log_std.shape) * self.log_std.exp()
        action = mean + torch.einsum("bf,bfa->ba", features, weights).view_as(mean)
        return action, self._score(mean, action, features)

    def score(self, features: torch.Tensor, action: torch.Tensor) -> Score:
        return self._score(self._mean(features), action, features)

    def _score(self, mean, action, features) -> Score:
        # the features are trained to act, not to widen the noise
        variance = features.detach().square() @ (2 * self.log_std).exp() + 1e-6
        std = variance.sqrt().view_as(mean)
        z2 = ((action - mean) / std).square()
        log_prob = (-0.5 * z2 - std.log() - LOG_SQRT_2PI).sum(-1, dtype=torch.float64).float()
        entropy = (std.log() + 0.5 + LOG_SQRT_2PI).sum(-1)
        return Score(log_prob, entropy, mean, std, z2.sum(-1), torch.full_like(log_prob, self.action_dim))


class DiscreteHead(nn.Module):
    """One of n actions per step of the chunk; an action is its index."""

    def __init__(self, features: int, chunk: int, choices: int):
        super().__init__()
        self.chunk, self.choices = chunk, choices
        self.noise_size = chunk
        self.linear = _small_output(features, chunk * choices)

    def act(self, features: torch.Tensor, noise: torch.Tensor | None) -> tuple[torch.Tensor, Score]:
        # [B, C, n]
        log_probs = self._log_probs(features)
        if noise is None:
            index = log_probs.argmax(-1)
        else:
            # the first index whose cumulative probability passes the uniform number
            below = log_probs.exp().cumsum(-1) < noise[..., None]
            index = below.sum(-1).clamp_max(self.choices - 1)
        return index[..., None].float(), self._score(log_probs, index)

    def score(self, features: torch.Tensor, action: torch.Tensor) -> Score:
        return self._score(self._log_probs(features), action[..., 0].long())

    def _log_probs(self, features):
        return self.linear(features).unflatten(-1, (self.chunk, self.choices)).log_softmax(-1)

    def _score(self, log_probs, index) -> Score:
        log_prob = log_probs.gather(-1, index[..., None])[..., 0]
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        one = torch.ones_like(log_prob)
        # there is no sigma here: the gate compares log-probabilities as they are
        return Score(log_prob, entropy, log_probs, one[..., None], torch.zeros_like(log_prob), one)


def _small_output(features: int, outputs: int) -> nn.Linear:
    """A fresh policy is near its mean everywhere, so that early exploration is even."""
    linear = nn.Linear(features, outputs)
    nn.init.orthogonal_(linear.weight, 0.01)
    nn.init.zeros_(linear.bias)
    return linear
