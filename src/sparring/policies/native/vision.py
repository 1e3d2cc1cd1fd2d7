"""The vision encoder: a picture as a row of patches, in the shape of SigLIP."""

import torch
from torch import nn
from torch.nn import functional as F

_EPSILON = 1e-6


class VisionEncoder(nn.Module):
    """Pictures [N, 3, S, S] in [-1, 1] -> what is seen in each patch, [N, P, W]."""

    def __init__(self, image_size: int, patch_size: int, width: int, layers: int, heads: int, mlp: int):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch_size, patch_size)
        self.count = (image_size // patch_size) ** 2
        self.places = nn.Parameter(torch.randn(self.count, width) * 0.02)
        self.blocks = nn.ModuleList(VisionBlock(width, heads, mlp) for _ in range(layers))
        self.norm = LayerNorm(width, _EPSILON)

    def forward(self, images: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        # [N, 3, S, S] -> [N, W, s, s] -> [N, P, W]
        x = self.patches(images.to(dtype)).flatten(2).mT + self.places.to(dtype)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class LayerNorm(nn.LayerNorm):
    """In fp32, whatever the precision of the rest and of its weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


class VisionBlock(nn.Module):
    def __init__(self, width: int, heads: int, mlp: int):
        super().__init__()
        self.heads = heads
        self.attention_norm = LayerNorm(width, _EPSILON)
        # queries, keys and values, one product instead of three
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = LayerNorm(width, _EPSILON)
        self.up = nn.Linear(width, mlp)
        self.down = nn.Linear(mlp, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mix(x)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        # [N, P, 3W] -> 3 x [N, heads, P, d]
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(_attend(q, k, v).transpose(1, 2).flatten(2))


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    if q.dtype != torch.float32:
        return F.scaled_dot_product_attention(q, k, v)
    # fused kernels choose their way by the batch's size: in fp32 the parity gate would notice
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v
