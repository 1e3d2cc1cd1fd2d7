"""A transformer layer in the shape of Gemma, taken apart so that two of them can share one attention.

Letters: B rows, T tokens, L keys, d numbers of a head.
"""

import torch
from torch import nn
from torch.nn import functional as F

_EPSILON, _BASE = 1e-6, 10_000.0
# cos and sin, [B, T, 1, d/2] each
Rotation = tuple[torch.Tensor, torch.Tensor]


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        # 0: leaves the scale at 1
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + _EPSILON)
        return (y * (1.0 + self.weight.float())).to(x.dtype)


class Layer(nn.Module):
    """`project` before the attention, `finish` after it; keys and values of others may be among those attended to."""

    def __init__(self, width: int, mlp: int, heads: int, kv_heads: int, head_dim: int):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.attention_norm = RMSNorm(width)
        # one product instead of three, and one instead of two
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, width, bias=False)
        self.mlp_norm = RMSNorm(width)
        self.gate_up = nn.Linear(width, 2 * mlp, bias=False)
        self.down = nn.Linear(mlp, width, bias=False)

    def project(self, x: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [B, T, heads, d], keys and values [B, kv heads, T, d]."""
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], 2)
        return rotate(q, rotation), rotate(k, rotation).transpose(1, 2), v.transpose(1, 2)

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = x + self.out(attended)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.gelu(gate, approximate="tanh") * up)


def rotation(positions: torch.Tensor, head_dim: int) -> Rotation:
    """Of tokens at `positions` [B, T]: what a head's numbers are turned by (RoPE)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = (positions[..., None].float() / _BASE**exponents)[:, :, None]
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, by: Rotation) -> torch.Tensor:
    # [B, T, heads, d]: number i and i + d/2 are turned together
    cos, sin = by
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Queries [B, T, heads, d] over keys and values [B, kv heads, L, d], of which `seen` [B, L] count: [B, T, heads*d].

    Heads that share keys are stacked as if they were more queries: no key is copied.
    """
    batch, tokens, heads, size = q.shape
    shared = k.shape[1]
    # [B, T, kv * g, d] -> [B, kv, T * g, d]; a view where all heads share one
    q = q.unflatten(2, (shared, -1)).transpose(1, 2).reshape(batch, shared, -1, size)
    scores = (q @ k.mT).float() * size**-0.5
    weights = torch.softmax(scores.masked_fill(~seen[:, None, None], float("-inf")), -1).to(v.dtype)
    # [B, kv, T * g, d] -> [B, T, kv * g * d]
    return (weights @ v).unflatten(2, (tokens, -1)).transpose(1, 2).reshape(batch, tokens, heads * size)
