"""A transformer over the steps of an action chunk, conditioned by adaptive layer norm (DiT).

Letters: B rows, H steps of a chunk, A action dims, W width.
"""

import math

import torch
from torch import nn


class ActionTransformer(nn.Module):
    """(noisy chunk, time, condition) -> one vector per step of the chunk. A fresh one answers zero."""

    def __init__(self, horizon: int, action_dim: int, width: int, layers: int, heads: int, dropout: float = 0.0):
        super().__init__()
        self.input = nn.Linear(action_dim, width)
        self.position = nn.Parameter(torch.randn(horizon, width) * 0.02)
        self.time = TimeEmbedding(width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = _zeroed(nn.Linear(width, 2 * width))
        self.output = _zeroed(nn.Linear(width, action_dim))

    def forward(self, x: torch.Tensor, t: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        # [B, H, A], [B], [B, W] -> [B, H, A]
        tokens = self.input(x) + self.position
        # what is known of a row beside its tokens: [B, 1, W]
        about = nn.functional.silu(self.time(t) + condition)[:, None]
        for block in self.blocks:
            tokens = block(tokens, about)
        shift, scale = self.modulation(about).chunk(2, -1)
        return self.output(torch.addcmul(shift, self.norm(tokens), 1 + scale))


class Block(nn.Module):
    """Attention and an MLP, both shifted, scaled and gated by the condition. A fresh one changes nothing."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(approximate="tanh"), nn.Dropout(dropout), nn.Linear(2 * width, width)
        )
        self.modulation = _zeroed(nn.Linear(width, 6 * width))

    def forward(self, tokens: torch.Tensor, about: torch.Tensor) -> torch.Tensor:
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.modulation(about).chunk(6, -1)
        tokens = torch.addcmul(tokens, gate_1, self.attend(torch.addcmul(shift_1, self.norm(tokens), 1 + scale_1)))
        return torch.addcmul(tokens, gate_2, self.mlp(torch.addcmul(shift_2, self.norm(tokens), 1 + scale_2)))

    def attend(self, tokens: torch.Tensor) -> torch.Tensor:
        # [B, H, 3W] -> [3, B, heads, H, W / heads]
        split = self.queries_keys_values(tokens).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        queries, keys, values = split.unbind(0)
        # in plain steps: chunks are short, and fused kernels round differently for other batch sizes
        weights = (queries @ keys.transpose(-1, -2) * (keys.shape[-1] ** -0.5)).softmax(-1)
        attended = weights @ values
        return self.attended(attended.transpose(1, 2).flatten(2))


class TimeEmbedding(nn.Module):
    """A time in [0, 1] as sines of many wavelengths, then an MLP."""

    def __init__(self, width: int):
        super().__init__()
        frequencies = torch.exp(torch.linspace(0, math.log(1000.0), width // 2))
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.mlp = nn.Sequential(nn.Linear(2 * (width // 2), width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        # [B] -> [B, W]
        angles = t[:, None] * self.frequencies
        return self.mlp(torch.cat([angles.sin(), angles.cos()], -1))


def _zeroed(linear: nn.Linear) -> nn.Linear:
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
