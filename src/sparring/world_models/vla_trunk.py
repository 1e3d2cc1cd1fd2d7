"""The transformer of a pretrained VLA in place of the trunk's own block.

Letters: N rows, T tokens, W width of the world model, V width of the VLA.
"""

import torch
from torch import nn

from sparring.policies.lora import adapt
from sparring.policies.native.checkpoint import load_into, read_model
from sparring.policies.native.gemma import Layer, RMSNorm, attend, rotation
from sparring.policies.native.presets import Sizes
from sparring.world_models.configs import TokenWorldModelConfig

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
