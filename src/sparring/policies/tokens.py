"""Actions as tokens: every number of a chunk is one of a few bins."""

import torch
from torch import nn

from sparring.policies.heads import Parameters, Score, small_output


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
