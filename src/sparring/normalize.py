"""Running mean and standard deviation, kept as module buffers so that they travel with the weights."""

import torch
from torch import nn


class RunningNormalizer(nn.Module):
    """(x - mean) / std over everything `update` has seen, clipped to +-`clip`. Identity before the first update.

    Statistics change only in `update`, which an algorithm calls between two versions of the weights: acting and
    scoring see the same numbers.
    """

    def __init__(self, size: int, clip: float = 10.0):
        super().__init__()
        self.clip = clip
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("var", torch.ones(size, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        # what forward needs, in float32
        self.register_buffer("shift", torch.zeros(size))
        self.register_buffer("scale", torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x - self.shift) * self.scale).clamp(-self.clip, self.clip)

    @torch.no_grad()
    def update(self, x: torch.Tensor, sum_over_processes=lambda tensor: tensor) -> None:
        """Fold in `x [B, size]`, of all processes together."""
        x = x.double()
        # sums about the present mean: no cancellation, and processes add up exactly
        offset = x - self.mean
        moments = torch.cat([offset.sum(0), offset.square().sum(0), offset.new_full((1,), len(x))])
        first, second, count = sum_over_processes(moments).split([len(self.mean), len(self.mean), 1])
        total = self.count + count[0]
        delta = first / total
        spread = self.var * self.count + second - delta.square() * total
        self.mean += delta
        self.var.copy_((spread / total).clamp_min(0.0))
        self.count.copy_(total)
        self.shift.copy_(self.mean)
        # a constant input stays a constant, it is not blown up
        self.scale.copy_(torch.where(self.var > 1e-8, self.var.clamp_min(1e-8).rsqrt(), torch.ones_like(self.var)))
