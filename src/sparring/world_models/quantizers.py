"""Vectors -> discrete codes that gradients pass straight through.

A token is K digits with at most L values each: K numbers of an FSQ code, or one index of a VQ codebook. `codes` are
what a decoder reads: the quantised numbers themselves, or the codebook's vectors.
"""

import torch
from torch import nn


class FSQ(nn.Module):
    """Finite scalar quantisation: each number is squashed to (-1, 1) and rounded to one of its levels."""

    def __init__(self, levels: tuple[int, ...]):
        super().__init__()
        self.digits, self.values, self.size = len(levels), max(levels), len(levels)
        self.register_buffer("most", torch.tensor(levels, dtype=torch.float32) - 1, persistent=False)
        # [K, L]: which values a digit has, and what number each stands for
        value = torch.arange(self.values)
        self.register_buffer("valid", value <= self.most[:, None], persistent=False)
        self.register_buffer("numbers", 2 * value / self.most[:, None] - 1, persistent=False)

    def forward(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[.., K] -> codes [.., K], digits [.., K] and a loss of its own (none)."""
        squashed = torch.tanh(z)
        digits = ((squashed + 1) / 2 * self.most).round()
        codes = squashed + (2 * digits / self.most - 1 - squashed).detach()
        return codes, digits.long(), z.new_zeros(())

    def codes(self, digits: torch.Tensor) -> torch.Tensor:
        return 2 * digits / self.most - 1

    def expected(self, probabilities: torch.Tensor) -> torch.Tensor:
        """[.., K, L] -> the mean code [.., K]."""
        return (probabilities * self.numbers).sum(-1)


class VQ(nn.Module):
    """The nearest vector of a learned codebook."""

    def __init__(self, codebook_size: int, size: int = 16, commitment: float = 0.25):
        super().__init__()
        self.digits, self.values, self.size, self.commitment = 1, codebook_size, size, commitment
        # normalised inputs and a codebook of the same scale: nearly all vectors are somebody's nearest from the start
        self.norm = nn.LayerNorm(size, elementwise_affine=False)
        self.codebook = nn.Parameter(torch.randn(codebook_size, size))
        self.register_buffer("valid", torch.ones(1, codebook_size, dtype=torch.bool), persistent=False)

    def forward(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[.., E] -> codes [.., E], digits [.., 1], and what pulls codebook and encoder together."""
        z = self.norm(z)
        # the square of z is the same for all candidates
        distance = self.codebook.square().sum(-1) - 2 * z @ self.codebook.T
        digits = distance.argmin(-1, keepdim=True)
        nearest = self.codes(digits)
        apart = (nearest - z.detach()).square().mean() + self.commitment * (nearest.detach() - z).square().mean()
        return z + (nearest - z).detach(), digits, apart

    def codes(self, digits: torch.Tensor) -> torch.Tensor:
        return self.codebook[digits[..., 0]]

    def expected(self, probabilities: torch.Tensor) -> torch.Tensor:
        # [.., 1, V] -> [.., E]
        return probabilities[..., 0, :] @ self.codebook
