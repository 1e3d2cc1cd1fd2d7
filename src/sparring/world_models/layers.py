"""The building blocks of tokenizer and dynamics. Feature maps keep their channels last.

Letters: F frames, h x w places of a feature map, c channels, W width of a transformer.
"""

import torch
from torch import nn

# pixels a side of one place of a feature map, and of what one token tells of
CELL, PATCH = 4, 16
# places a side of a token
SIDE = PATCH // CELL


class FrameStem(nn.Module):
    """Pictures -> feature maps: every 4 x 4 pixels become one place, which then looks at its neighbours."""

    def __init__(self, channels: int):
        super().__init__()
        self.patches = nn.Sequential(
            nn.Linear(3 * CELL * CELL, 2 * channels), nn.SiLU(), nn.Linear(2 * channels, channels)
        )
        self.block = ConvBlock(channels)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        # [F, 3, H, W] in 0..1 -> [F, h, w, 48] -> [F, h, w, c]
        return self.block(self.patches(cut(images) - 0.5))


class ConvBlock(nn.Module):
    """A 3 x 3 convolution beside the straight path."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.around = nn.Conv2d(channels, channels, 3, padding=1)
        self.output = nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # [F, h, w, c]; the convolution wants its channels in front, which is a matter of strides only
        around = self.around(nn.functional.silu(self.norm(x)).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return x + self.output(nn.functional.silu(around))


class Attention(nn.Module):
    """A transformer's block over tokens `[N, P, W]`."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        # [N, P, 3W] -> three of [N, heads, P, W / heads]
        split = self.queries_keys_values(self.norm_1(tokens)).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = split.permute(2, 0, 3, 1, 4).unbind(0)
        # in plain steps: of so few tokens a CPU learns three times as fast that way as by the fused kernel
        weights = (queries @ keys.transpose(-1, -2) * keys.shape[-1] ** -0.5).softmax(-1)
        tokens = tokens + self.attended((weights.to(values.dtype) @ values).transpose(1, 2).flatten(2))
        return tokens + self.mlp(self.norm_2(tokens))


def cut(images: torch.Tensor) -> torch.Tensor:
    """[F, k, H, W] -> [F, h, w, 16k]: the pixels of each place, as its channels."""
    frames, channels, height, width = images.shape
    cells = images.reshape(frames, channels, height // CELL, CELL, width // CELL, CELL)
    return cells.permute(0, 2, 4, 1, 3, 5).reshape(frames, height // CELL, width // CELL, -1)


def paste(cells: torch.Tensor) -> torch.Tensor:
    """The way back: [F, h, w, 16k] -> [F, k, H, W]."""
    frames, height, width, size = cells.shape
    cells = cells.reshape(frames, height, width, size // CELL**2, CELL, CELL).permute(0, 3, 1, 4, 2, 5)
    return cells.reshape(frames, -1, height * CELL, width * CELL)


def merge_cells(cells: torch.Tensor) -> torch.Tensor:
    """[F, h, w, c] -> [F, P, 16c]: the 4 x 4 places that one token tells of, as its features."""
    frames, height, width, channels = cells.shape
    blocks = cells.reshape(frames, height // SIDE, SIDE, width // SIDE, SIDE, channels).permute(0, 1, 3, 2, 4, 5)
    return blocks.reshape(frames, -1, SIDE**2 * channels)


def split_cells(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The way back: [F, P, 16c] -> [F, h, w, c]."""
    frames, _, size = tokens.shape
    blocks = tokens.reshape(frames, height // SIDE, width // SIDE, SIDE, SIDE, size // SIDE**2)
    return blocks.permute(0, 1, 3, 2, 4, 5).reshape(frames, height, width, -1)
