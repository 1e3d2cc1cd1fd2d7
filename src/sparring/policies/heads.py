"""Action heads: Gaussian, gSDE and discrete tokens."""

import math
from dataclasses import dataclass

import torch
from torch import nn

# ---- Action distributions: features -> a chunk of actions and its score.
#
# A head says how actions are distributed (`parameters`), draws one (`sample`) and scores one (`score`). The sample is
# scored as it was drawn: clipping belongs to the env. A `Score` is unreduced over chunk positions, and holds the terms
# that the parity gate compares.
#
# Letters: B decisions, C chunk positions, A action dims, F features.


LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
# a policy that imitates keeps at least this standard deviation, to explore with later
LEAST_STD = 0.05

# the mean [B, C, ...] and the log of the standard deviation, broadcastable to it (None where there is none)
Parameters = tuple[torch.Tensor, torch.Tensor | None]


@dataclass
class Score:
    """How likely a chunk is, position by position: all [B, C]."""

    # float64: what a ratio is the difference of
    log_prob: torch.Tensor
    entropy: torch.Tensor
    # (x - mean)^2 / sigma^2, still per dim [B, C, A]; None where there is no sigma
    squares: torch.Tensor | None
    # how many numbers of each position were scored
    dims: int

    @property
    def z2(self) -> torch.Tensor:
        return torch.zeros_like(self.entropy) if self.squares is None else self.squares.sum(-1)


class GaussianHead(nn.Module):
    """Independent normals, one learned standard deviation per action dim."""

    # whether log_std is a function of the weights alone, so that a trace need not hold it
    constant_std = True

    def __init__(self, features: int, chunk: int, action_dim: int, init_std: float):
        super().__init__()
        self.chunk, self.action_dim = chunk, action_dim
        self.noise_size = chunk * action_dim
        self.linear = small_output(features, chunk * action_dim)
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

    def score(self, parameters: Parameters, action: torch.Tensor) -> Score:
        mean, log_std = parameters
        squares = ((action - mean) * (-log_std).exp()).square()
        # [B, C, A] -> [B, C], accumulated in float64; the volume is one number where log_std is one vector
        volume = log_std.sum(-1, dtype=torch.float64) + self.action_dim * LOG_SQRT_2PI
        log_prob = torch.sub(-volume, squares.sum(-1, dtype=torch.float64), alpha=0.5)
        entropy = (volume + 0.5 * self.action_dim).float().expand(log_prob.shape)
        return Score(log_prob, entropy, squares, self.action_dim)

    def imitation(self, parameters: Parameters, action: torch.Tensor) -> dict[str, torch.Tensor]:
        """Terms `[B, C]` of a loss: the mean's error, and the width that its errors call for."""
        mean, log_std = parameters
        squares = (action - mean).square()
        # the negative log-likelihood, of which only the width learns: a mean under it would be learnt ever faster
        width = log_std + 0.5 * squares.detach().clamp_min(LEAST_STD**2) * (-2 * log_std).exp()
        return {"error": squares.mean(-1), "width": width.mean(-1)}


class SquashedGaussianHead(GaussianHead):
    """tanh of normals: never outside [-1, 1]. Scored in action space, i.e. with tanh's Jacobian."""

    # atanh of float32 numbers this close to 1 is still finite and exact enough to score
    limit = 1.0 - 1e-6
    # demonstrated actions at the bounds would have their mean at infinity; this close to 1 is as good
    imitated_limit = 0.99

    def mode(self, mean: torch.Tensor) -> torch.Tensor:
        return torch.tanh(mean).clamp(-self.limit, self.limit)

    def sample(self, features: torch.Tensor, parameters: Parameters, noise: torch.Tensor) -> torch.Tensor:
        return self.mode(super().sample(features, parameters, noise))

    def score(self, parameters: Parameters, action: torch.Tensor) -> Score:
        # from the action that was emitted, in acting and in replay alike
        sample = torch.atanh(action)
        score = super().score(parameters, sample)
        score.log_prob = score.log_prob - _log_slope(sample).sum(-1, dtype=torch.float64)
        # the normal's entropy plus the mean of log slope, which has no closed form: estimated on this sample, moved
        # with mean and std as if it were drawn again, so that its gradient widens the policy
        mean, log_std = parameters
        z = ((sample - mean) * (-log_std).exp()).detach()
        score.entropy = score.entropy + _log_slope(mean + log_std.exp() * z).sum(-1)
        return score

    def imitation(self, parameters: Parameters, action: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().imitation(parameters, torch.atanh(action.clamp(-self.imitated_limit, self.imitated_limit)))


class StateDependentHead(GaussianHead):
    """Generalised state-dependent exploration (gSDE): the noise is a random linear function of the features.

    The function stays the same for several decisions (the policy's `noise_hold`), so that a robot explores along
    smooth arcs instead of trembling. Scored as the normal it is for any one decision.
    """

    constant_std = False

    def __init__(self, features: int, chunk: int, action_dim: int, init_std: float):
        super().__init__(features, chunk, action_dim, init_std)
        self.noise_size = features * chunk * action_dim
        # of the weights of that function: [F, C * A]
        self.log_std = nn.Parameter(torch.full((features, chunk * action_dim), math.log(init_std)))

    def parameters_of(self, features: torch.Tensor) -> Parameters:
        mean = self.linear(features).view(-1, self.chunk, self.action_dim)
        # the features are trained to act, not to widen the noise
        variance = features.detach().square() @ (2 * self.log_std).exp() + 1e-6
        return mean, 0.5 * variance.log().view_as(mean)

    def sample(self, features: torch.Tensor, parameters: Parameters, noise: torch.Tensor) -> torch.Tensor:
        mean, _ = parameters
        # [B, F, C * A]: each robot's own random function
        weights = torch.special.ndtri(noise).unflatten(-1, self.log_std.shape) * self.log_std.exp()
        return mean + torch.einsum("bf,bfa->ba", features, weights).view_as(mean)


class DiscreteHead(nn.Module):
    """One of n actions per step of the chunk; an action is its index. There is no sigma: the mean is the log-probs."""

    constant_std = True
    log_std = None

    def __init__(self, features: int, chunk: int, choices: int):
        super().__init__()
        self.chunk, self.choices = chunk, choices
        self.noise_size = chunk
        self.linear = small_output(features, chunk * choices)

    def parameters_of(self, features: torch.Tensor) -> Parameters:
        # [B, F] -> [B, C, n]
        return self.linear(features).view(-1, self.chunk, self.choices).log_softmax(-1), None

    def mode(self, mean: torch.Tensor) -> torch.Tensor:
        return mean.argmax(-1, keepdim=True).float()

    def sample(self, features: torch.Tensor, parameters: Parameters, noise: torch.Tensor) -> torch.Tensor:
        # the first index whose cumulative probability passes the uniform number
        below = parameters[0].exp().cumsum(-1) < noise[..., None]
        return below.sum(-1, keepdim=True).clamp_max(self.choices - 1).float()

    def score(self, parameters: Parameters, action: torch.Tensor) -> Score:
        log_probs = parameters[0]
        log_prob = log_probs.gather(-1, action.long())[..., 0].double()
        return Score(log_prob, -(log_probs.exp() * log_probs).sum(-1), None, 1)


def _log_slope(x: torch.Tensor) -> torch.Tensor:
    """log(1 - tanh(x)^2), in a form that neither overflows nor cancels."""
    return 2.0 * (math.log(2.0) - x - nn.functional.softplus(-2.0 * x))


def small_output(features: int, outputs: int) -> nn.Linear:
    """A fresh policy is near its mean everywhere, so that early exploration is even."""
    linear = nn.Linear(features, outputs)
    nn.init.orthogonal_(linear.weight, 0.01)
    nn.init.zeros_(linear.bias)
    return linear


# ---- Actions as tokens: every number of a chunk is one of a few bins.


class TokenHead(nn.Module):
    """Uniform bins in [-1, 1]; each dim of each position is drawn by itself, all in parallel.

    An action is its bin's centre, which tells the bin again exactly; any other number is scored as the bin it lies in,
    so demonstrations need no conversion. There is no sigma: the mean is the log-probs, as in DiscreteHead.
    """

    constant_std = True
    log_std = None

    def __init__(self, features: int, chunk: int, action_dim: int, bins: int):
        super().__init__()
        self.shape = (chunk, action_dim, bins)
        self.action_dim, self.bins = action_dim, bins
        self.noise_size = chunk * action_dim
        self.linear = small_output(features, chunk * action_dim * bins)

    def parameters_of(self, features: torch.Tensor) -> Parameters:
        # [B, F] -> [B, C, A, bins]
        return self.linear(features).unflatten(-1, self.shape).log_softmax(-1), None

    def mode(self, mean: torch.Tensor) -> torch.Tensor:
        return self._centre(mean.argmax(-1))

    def sample(self, features: torch.Tensor, parameters: Parameters, noise: torch.Tensor) -> torch.Tensor:
        log_probs = parameters[0]
        # the first bin whose cumulative probability passes the uniform number
        below = log_probs.exp().cumsum(-1) < noise.view(log_probs.shape[:-1])[..., None]
        return self._centre(below.sum(-1).clamp_max(self.bins - 1))

    def score(self, parameters: Parameters, action: torch.Tensor) -> Score:
        log_probs = parameters[0]
        # [B, C, A] -> [B, C], accumulated in float64
        chosen = log_probs.gather(-1, self._bin(action)[..., None])[..., 0]
        entropy = -(log_probs.exp() * log_probs).sum((-1, -2))
        return Score(chosen.sum(-1, dtype=torch.float64), entropy, None, self.action_dim)

    def _centre(self, index: torch.Tensor) -> torch.Tensor:
        return (2 * index + 1).float() / self.bins - 1

    def _bin(self, action: torch.Tensor) -> torch.Tensor:
        # a centre is half a bin away from the next one: no rounding reaches there
        return ((action + 1) * (self.bins / 2)).floor().clamp(0, self.bins - 1).long()
