"""Dynamics: patch features, a decision and the memory -> the digits of all next tokens. A shared trunk updates the
memory step by step; the ensemble members predict from its tokens. Letters: N rows, P patches of all cameras, R
registers, W width, V width of a VLA, m memory channels of each patch and register."""

import math
from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import nn

from sparring.contract import EnvSpec
from sparring.normalize import RunningNormalizer
from sparring.policies.encoders import InstructionEncoder, self_attention
from sparring.policies.lora import adapt
from sparring.policies.native.checkpoint import read_model
from sparring.policies.native.config import Sizes
from sparring.policies.native.model import GemmaLayer, RMSNorm, attend, rotation
from sparring.policies.weights import load_strictly
from sparring.world_models.configs import TokenWorldModelConfig

_KEY = "world_model.trunk"
_REGISTERS = 4  # tokens of the trunk without a patch, for memory about the scene as a whole


class DecisionEncoder(nn.Module):
    """`td [N]` -> `[N, 1 + P, W]`: encodes action, state and instruction as a decision token and one per patch."""

    def __init__(self, spec: EnvSpec, chunk: int, width: int, language_features: int, patches: int):
        super().__init__()
        shown = spec.observation
        self.choices = spec.discrete_actions
        self.state_size = math.prod(shown["state"][0]) if "state" in shown else 0
        self.normalizer = RunningNormalizer(self.state_size)
        instructed = language_features and ("task" in shown or "instruction" in shown)
        self.language = InstructionEncoder(spec, language_features) if instructed else None
        action_size = chunk * (self.choices or spec.action_dim)
        inputs = action_size + self.state_size + (language_features if instructed else 0)
        hidden = 2 * width
        self.mlp = nn.Sequential(nn.Linear(inputs, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU())
        self.tokens = nn.Linear(hidden, (1 + patches) * width)
        self.width = width

    def forward(self, td: TensorDict) -> torch.Tensor:
        parts = [self._action(td["action"])]
        if self.state_size:
            parts.append(self.normalizer(td["observation", "state"].flatten(1)))
        if self.language is not None:
            parts.append(self.language(td))
        return self.tokens(self.mlp(torch.cat(parts, -1))).unflatten(-1, (-1, self.width))

    def _action(self, action: torch.Tensor) -> torch.Tensor:
        # [N, C, A] -> [N, C * A], as the env executes them: clipped, or one-hot for discrete actions
        if self.choices:
            return nn.functional.one_hot(action[..., 0].long(), self.choices).flatten(1).float()
        return action.clamp(-1, 1).flatten(1)


class Trunk(nn.Module):
    """A transformer block over all tokens, and a GRU at each patch and register: the memory `[N, (P + R) * m]`."""

    def __init__(self, config: TokenWorldModelConfig, patches: int, width: int, heads: int, memory_channels: int):
        super().__init__()
        self.slots, self.memory_channels = patches + _REGISTERS, memory_channels
        self.registers = nn.Parameter(torch.randn(_REGISTERS, width) * 0.3)
        self.remembered = nn.Linear(memory_channels, width)
        self.block: nn.Module = _Attention(width, heads)
        self.norm = nn.LayerNorm(width)
        self.gru = nn.GRUCell(width, memory_channels)
        with torch.no_grad():
            # a bias of 2 on the update gate: at first the memory keeps most of its old value
            self.gru.bias_hh[memory_channels : 2 * memory_channels] += 2.0
        if config.trunk is not None:
            self.block = _VLATrunk(config, config.trunk, width)

    @property
    def memory_size(self) -> int:
        return self.slots * self.memory_channels

    def forward(
        self, patches: torch.Tensor, decision: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, P, W], [N, 1 + P, W], [N, D] -> tokens [N, 1 + P + R, W] (decision token first), memory after [N, D]."""
        memory = memory.view(len(memory) * self.slots, self.memory_channels)
        seen = torch.cat([patches, self.registers.expand(len(patches), -1, -1)], 1)
        decision, of_patches = decision[:, :1], decision[:, 1:]
        decisions = torch.cat([of_patches, decision.expand(-1, _REGISTERS, -1)], 1)
        inputs = seen + self.remembered(memory).view_as(seen) + decisions
        tokens = self.block(torch.cat([decision, inputs], 1))
        updates = self.norm(tokens[:, 1:]).flatten(0, 1)
        return tokens, self.gru(updates, memory).view(len(tokens), -1).float()


class EnsembleMember(nn.Module):
    def __init__(self, patches: int, width: int, layers: int, heads: int, outputs: int, others: int):
        super().__init__()
        self.patches = patches
        self.blocks = nn.Sequential(*(_Attention(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.tokens = nn.Linear(width, outputs)
        self.others = nn.Linear(width, others)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """-> [N, P, outputs] from the patches, [N, others] from the decision token."""
        tokens = self.norm(self.blocks(tokens))
        return self.tokens(tokens[:, 1 : 1 + self.patches]), self.others(tokens[:, 0])


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        projected = self.queries_keys_values(self.norm_1(tokens))
        tokens = tokens + self.attended(self_attention(projected, self.heads))
        return tokens + self.mlp(self.norm_2(tokens))


class _VLATrunk(nn.Module):
    """Passes tokens `[N, T, W]` through a VLA's layers as a residual block; trained by LoRA or in full."""

    def __init__(self, config: TokenWorldModelConfig, folder: str, width: int):
        super().__init__()
        weights, sizes, *_ = read_model(folder, _KEY)
        self.into = nn.Linear(width, sizes.width)
        self.base = _Layers(sizes)
        own = {name: w for name, w in weights.items() if name.startswith("trunk")}
        load_strictly(self.base, own, f"{_KEY}={folder}")
        adapt(self.base, config, "world_model")
        self.back = nn.Linear(sizes.width, width)
        if config.precision == "bf16":
            for weight in self.base.parameters():
                weight.data = weight.data.to(torch.float32 if weight.requires_grad else torch.bfloat16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens + self.back(self.base(self.into(tokens)))


class _Layers(nn.Module):
    """The layers of a native VLA, with its weight names, applied to tokens `[N, T, V]`."""

    trunk: Sequence[GemmaLayer]

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.head_dim = sizes.head_dim
        shape = (sizes.width, sizes.mlp, sizes.heads, sizes.kv_heads, sizes.head_dim)
        self.trunk = nn.ModuleList(GemmaLayer(*shape) for _ in range(sizes.layers))  # type: ignore[assignment]
        self.trunk_norm = RMSNorm(sizes.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        angles = rotation(torch.arange(x.shape[1], device=x.device)[None], self.head_dim)
        for layer in self.trunk:
            q, k, v = layer.project(x, angles)
            x = layer.finish(x, attend(q, k, v, seen))
        return self.trunk_norm(x)
