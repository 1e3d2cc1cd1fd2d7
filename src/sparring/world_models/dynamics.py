"""Networks of the token world model."""

import torch
from torch import nn

from sparring.policies.lora import adapt
from sparring.policies.native.checkpoint import load_into, read_model
from sparring.policies.native.config import Sizes
from sparring.policies.native.model import Layer, RMSNorm, attend, rotation
from sparring.world_models.configs import TokenWorldModelConfig

# ---- The building blocks of tokenizer and dynamics. Feature maps keep their channels last.
#
# Letters: F frames, h x w places of a feature map, c channels, W width of a transformer.


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


# ---- The transformer of a pretrained VLA in place of the trunk's own block.
#
# Letters: N rows, T tokens, W width of the world model, V width of the VLA.


_KEY = "world_model.trunk"


class VLATrunk(nn.Module):
    """Tokens `[N, T, W]` through the VLA's layers and back, beside the straight path.

    The maps in and out are new and learn. The layers learn by LoRA, or in full where there is none.
    """

    def __init__(self, config: TokenWorldModelConfig, width: int):
        super().__init__()
        weights, sizes, *_ = read_model(config.trunk, _KEY)
        self.into = nn.Linear(width, sizes.width)
        self.base = Layers(sizes)
        load_into(self.base, {name: w for name, w in weights.items() if name.startswith("trunk")}, config.trunk, _KEY)
        adapt(self.base, config, "world_model")
        self.back = nn.Linear(sizes.width, width)
        if config.precision == "bf16":
            # it is computed with in bf16 anyway; what learns needs finer steps
            for weight in self.base.parameters():
                weight.data = weight.data.to(torch.float32 if weight.requires_grad else torch.bfloat16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens + self.back(self.base(self.into(tokens)))


class Layers(nn.Module):
    """What runs over images and words in a native VLA, by the same names; here over other tokens `[N, T, V]`."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.head_dim = sizes.head_dim
        shape = (sizes.width, sizes.mlp, sizes.heads, sizes.kv_heads, sizes.head_dim)
        self.trunk = nn.ModuleList(Layer(*shape) for _ in range(sizes.layers))
        self.trunk_norm = RMSNorm(sizes.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # all see each other, as images and words do
        seen = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        turns = rotation(torch.arange(x.shape[1], device=x.device)[None], self.head_dim)
        for layer in self.trunk:
            x = layer.finish(x, attend(*layer.project(x, turns), seen))
        return self.trunk_norm(x)


# ---- Dynamics: patch features, the decision and the memory -> the digits of all next tokens at once.
#
# A trunk that is shared mixes what is seen with what is remembered and updates the memory; separate members read the
# result and predict. Only the trunk runs step by step through time.
# Letters: N rows, P patches of all cameras, R registers, W width, m numbers of memory of each patch and register.


# tokens of the trunk that belong to no patch, for what the memory keeps of the scene as a whole
REGISTERS = 4


class Trunk(nn.Module):
    """One transformer block over everything, and a GRU at each patch and register: the memory `[N, (P + R) * m]`.

    The memory of a patch is what that part of a camera's view showed before (behind the arm, say); what one camera saw
    comes to the others through attention. It is the only history of frames there is.
    """

    def __init__(self, patches: int, width: int, heads: int, memory_channels: int):
        super().__init__()
        self.slots, self.memory_channels = patches + REGISTERS, memory_channels
        self.registers = nn.Parameter(torch.randn(REGISTERS, width) * 0.3)
        self.remembered = nn.Linear(memory_channels, width)
        # or a VLA's transformer instead (vla_trunk.py)
        self.block: nn.Module = Attention(width, heads)
        self.norm = nn.LayerNorm(width)
        self.gru = nn.GRUCell(width, memory_channels)
        with torch.no_grad():
            # PyTorch's second gate keeps: start by keeping most, so that something lasts long enough to be of use
            self.gru.bias_hh[memory_channels : 2 * memory_channels] += 2.0

    @property
    def memory_size(self) -> int:
        return self.slots * self.memory_channels

    def forward(
        self, patches: torch.Tensor, decision: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, P, W], [N, 1 + P, W], [N, D] -> tokens [N, 1 + P + R, W], the decision's first, and the memory after."""
        memory = memory.view(len(memory) * self.slots, self.memory_channels)
        seen = torch.cat([patches, self.registers.expand(len(patches), -1, -1)], 1)
        # the decision is told to each patch at once, and not left for attention to find
        decision, of_patches = decision[:, :1], decision[:, 1:]
        told = torch.cat([of_patches, decision.expand(-1, REGISTERS, -1)], 1)
        known = seen + self.remembered(memory).view_as(seen) + told
        tokens = self.block(torch.cat([decision, known], 1))
        news = self.norm(tokens[:, 1:]).flatten(0, 1)
        return tokens, self.gru(news, memory).view(len(tokens), -1).float()


class Member(nn.Module):
    """One opinion of what comes next: a transformer of its own with heads for tokens and for the rest."""

    def __init__(self, patches: int, width: int, layers: int, heads: int, outputs: int, others: int):
        super().__init__()
        self.patches = patches
        self.blocks = nn.Sequential(*(Attention(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.tokens = nn.Linear(width, outputs)
        self.others = nn.Linear(width, others)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """-> [N, P, outputs] of the patches, [N, others] of the decision."""
        tokens = self.norm(self.blocks(tokens))
        return self.tokens(tokens[:, 1 : 1 + self.patches]), self.others(tokens[:, 0])
