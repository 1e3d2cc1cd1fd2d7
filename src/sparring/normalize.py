"""Input normalisation, as module buffers that are saved with the weights."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

# statistics of a dataset -> (the value mapped to 0, the value mapped to 1)
_FITS = {
    "mean_std": lambda s: (s["mean"], s["mean"] + s["std"]),
    "min_max": lambda s: ((s["min"] + s["max"]) / 2, s["max"]),
    "quantile": lambda s: ((s["q01"] + s["q99"]) / 2, s["q99"]),
}


class Normalizer(nn.Module):
    """(x - shift) * scale; the identity until it is fitted."""

    def __init__(self, size: int):
        super().__init__()
        self.shift = nn.Buffer(torch.zeros(size))
        self.scale = nn.Buffer(torch.ones(size))
        self.fitted = nn.Buffer(torch.zeros((), dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.shift) * self.scale

    def inverse(self, y: torch.Tensor) -> torch.Tensor:
        return y / self.scale + self.shift

    def fit(self, statistics: Mapping[str, np.ndarray], mode: str) -> None:
        """Mean 0 and std 1 (`mean_std`), or the range of a dataset in [-1, 1] (`min_max`; `quantile`: 1 % to 99 %)."""
        zero, one = (torch.from_numpy(np.asarray(x, np.float64).reshape(-1)) for x in _FITS[mode](statistics))
        self._set(zero, one - zero)
        self.fitted.fill_(True)

    def describe(self) -> str:
        ends = torch.stack([self.shift.min(), self.shift.max(), self.scale.min(), self.scale.max()]).tolist()
        return "{} numbers, shifted by {:.4g} to {:.4g}, scaled by {:.4g} to {:.4g}".format(len(self.shift), *ends)

    def _set(self, shift: torch.Tensor, unit: torch.Tensor) -> None:
        self.shift.copy_(shift)
        # do not scale the rounding noise of a constant up
        self.scale.copy_(torch.where(unit > 1e-4, 1 / unit.clamp_min(1e-4), torch.ones_like(unit)))


class RunningNormalizer(Normalizer):
    """Mean 0 and std 1 over all inputs of `update`, clipped to +-`clip`; does not change after `fit`.
    `memory`: earlier inputs weigh at most as much as this number of updates."""

    def __init__(self, size: int, clip: float = 10.0, memory: int | None = None):
        super().__init__(size)
        self.clip, self.memory = clip, memory
        self.mean = nn.Buffer(torch.zeros(size, dtype=torch.float64))
        self.var = nn.Buffer(torch.ones(size, dtype=torch.float64))
        self.count = nn.Buffer(torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x - self.shift) * self.scale).clamp(-self.clip, self.clip)

    def describe(self) -> str:
        return f"{super().describe()}, by {int(self.count):,} observations"

    @torch.no_grad()
    def update(self, x: torch.Tensor, sum_over_processes=lambda tensor: tensor) -> None:
        if self.fitted:
            return
        x = x.double()
        offset = x - self.mean  # sums about the current mean avoid cancellation, and add up exactly over processes
        moments = torch.cat([offset.sum(0), offset.square().sum(0), offset.new_full((1,), len(x))])
        first, second, count = sum_over_processes(moments).split([len(self.mean), len(self.mean), 1])
        before: torch.Tensor = self.count
        if self.memory is not None:
            before = torch.where(count[0] > 0, before.clamp_max(self.memory * count[0]), before)
        total = before + count[0]
        delta = first / total
        spread = self.var * before + second - delta.square() * total
        self.mean.add_(delta)
        self.var.copy_((spread / total).clamp_min(0.0))
        self.count.copy_(total)
        self._set(self.mean, self.var.sqrt())
