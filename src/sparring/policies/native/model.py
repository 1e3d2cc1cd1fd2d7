"""The native VLA's network: vision tower (SigLIP), language model and action expert (both Gemma).

Image and text tokens attend to each other; state and memory attend to these and to each other; actions attend to all.
So only actions depend on noise and time, and all else (the prefix) is cached. In each layer the expert attends to the
prefix's keys and values of that layer.
Letters: B rows, N cameras, T tokens, L keys or tokens of the prefix, d size of a head, H steps of a chunk,
A action dims, W width."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from sparring.policies.native.config import Sizes

_EPSILON, _BASE = 1e-6, 10_000.0  # epsilon of all norms; base of the rotary position embedding (RoPE)
_PERIODS = (4e-3, 4.0)  # shortest and longest period of the sines that encode the time
_MULTIPLE = 8  # the number of keys is padded to a multiple of this: rows of 16 bytes in bf16
Rotation = tuple[torch.Tensor, torch.Tensor]  # cos and sin, [B, T, 1, d/2] each


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))  # added to 1: 0 means unit scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + _EPSILON)
        return (y * (1.0 + self.weight.float())).to(x.dtype)


class GemmaLayer(nn.Module):
    """A layer as `project` and `finish`, so that the attention between them can use keys and values of other tokens."""

    def __init__(self, width: int, mlp: int, heads: int, kv_heads: int, head_dim: int):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.attention_norm = RMSNorm(width)
        # fused projections: one product instead of three (qkv), or instead of two (gate_up)
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, width, bias=False)
        self.mlp_norm = RMSNorm(width)
        self.gate_up = nn.Linear(width, 2 * mlp, bias=False)
        self.down = nn.Linear(mlp, width, bias=False)

    def project(self, x: torch.Tensor, rope: Rotation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [B, T, heads, d], keys and values [B, kv heads, T, d]."""
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], 2)
        return _rotate(q, rope), _rotate(k, rope).transpose(1, 2), v.transpose(1, 2)

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = x + self.out(attended)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.gelu(gate, approximate="tanh") * up)


def rotation(positions: torch.Tensor, head_dim: int) -> Rotation:
    """Rotary position embedding of tokens at `positions` [B, T]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = (positions[..., None].float() / _BASE**exponents)[:, :, None]
    return angles.cos(), angles.sin()


def _rotate(x: torch.Tensor, rope: Rotation) -> torch.Tensor:
    cos, sin = rope  # dims i and i + d/2 of x [B, T, heads, d] are rotated as a pair
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention of queries [B, T, heads, d] over masked keys and values [B, kv heads, L, d] -> [B, T, heads*d].
    Heads that share keys are stacked as additional queries, so that keys are not copied."""
    batch, tokens, heads, size = q.shape
    shared = k.shape[1]
    # [B, T, kv * g, d] -> [B, kv, T * g, d]; a view if kv = 1
    q = q.unflatten(2, (shared, -1)).transpose(1, 2).reshape(batch, shared, -1, size)
    scores = (q @ k.mT).float() * size**-0.5
    weights = torch.softmax(scores.masked_fill(~mask[:, None, None], float("-inf")), -1).to(v.dtype)
    # [B, kv, T * g, d] -> [B, T, kv * g * d]
    return (weights @ v).unflatten(2, (tokens, -1)).transpose(1, 2).reshape(batch, tokens, heads * size)


class _VisionEncoder(nn.Module):
    """Images [N, 3, S, S] in [-1, 1] -> features of each patch, [N, P, W]."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        width = sizes.vision_width
        self.patches = nn.Conv2d(3, width, sizes.patch_size, sizes.patch_size)
        self.count = (sizes.image_size // sizes.patch_size) ** 2
        self.places = nn.Parameter(torch.randn(self.count, width) * 0.02)
        blocks = (_VisionBlock(width, sizes.vision_heads, sizes.vision_mlp) for _ in range(sizes.vision_layers))
        self.blocks = nn.ModuleList(blocks)
        self.norm = _LayerNorm(width, _EPSILON)

    def forward(self, images: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        # [N, 3, S, S] -> [N, W, s, s] -> [N, P, W]
        x = self.patches(images.to(dtype)).flatten(2).mT + self.places.to(dtype)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class _LayerNorm(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


class _VisionBlock(nn.Module):
    def __init__(self, width: int, heads: int, mlp: int):
        super().__init__()
        self.heads = heads
        self.attention_norm = _LayerNorm(width, _EPSILON)
        self.qkv = nn.Linear(width, 3 * width)  # fused: one product instead of three
        self.out = nn.Linear(width, width)
        self.mlp_norm = _LayerNorm(width, _EPSILON)
        self.up = nn.Linear(width, mlp)
        self.down = nn.Linear(mlp, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mix(x)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        # [N, P, 3W] -> 3 x [N, heads, P, d]
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if q.dtype != torch.float32:
            attended = F.scaled_dot_product_attention(q, k, v)
        else:
            # fused kernels round differently for other batch sizes, which would fail the parity gate in fp32
            attended = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Inputs(NamedTuple):
    """Images [B, N, 3, S, S] in [-1, 1]; token ids [B, T] and their mask (bool); state and memory [B, ...]."""

    images: torch.Tensor
    tokens: torch.Tensor
    text: torch.Tensor
    state: torch.Tensor
    memory: torch.Tensor | None = None


class Prefix(NamedTuple):
    keys: torch.Tensor  # [B, layers, kv heads, L, d]
    values: torch.Tensor  # the same
    mask: torch.Tensor  # [B, L] bool: false for padding of the text and of L
    features: torch.Tensor | None  # [B, W] float32: the mean of the last layer's tokens; None if not requested


class NativeModel(nn.Module):
    """Computes in autocast's dtype if autocast is enabled, otherwise in the dtype of its weights."""

    trunk: Sequence[GemmaLayer]
    expert: Sequence[GemmaLayer]

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.sizes = sizes
        self.vision = _VisionEncoder(sizes)
        self.projector = nn.Linear(sizes.vision_width, sizes.width)
        self.words = nn.Embedding(sizes.vocabulary, sizes.width)
        nn.init.normal_(self.words.weight, std=sizes.width**-0.5)  # unit norm after scaling by sqrt(width)
        shape = (sizes.heads, sizes.kv_heads, sizes.head_dim)
        trunk = nn.ModuleList(GemmaLayer(sizes.width, sizes.mlp, *shape) for _ in range(sizes.layers))
        self.trunk = trunk  # type: ignore[assignment]
        self.trunk_norm = RMSNorm(sizes.width)
        width = sizes.expert_width
        expert = nn.ModuleList(GemmaLayer(width, sizes.expert_mlp, *shape) for _ in range(sizes.layers))
        self.expert = expert  # type: ignore[assignment]
        self.expert_norm = RMSNorm(width)
        self.state_in = nn.Linear(sizes.max_state_dim, width)
        self.memory_in = nn.Linear(sizes.memory_size, width) if sizes.memory_size else None
        self.action_in = nn.Linear(sizes.max_action_dim, width)
        self.time_in = nn.Linear(2 * width, width)
        self.time_out = nn.Linear(width, width)
        self.action_out = nn.Linear(width, sizes.max_action_dim)
        nn.init.zeros_(self.action_out.weight)  # the initial velocity is 0
        nn.init.zeros_(self.action_out.bias)

    def prefix(self, inputs: Inputs, features: bool = True) -> Prefix:
        mask, keys, values, mean = self._run_trunk(inputs, features)
        x = self.state_tokens(inputs)
        rope = rotation(_next_positions(mask, x.shape[1]), self.sizes.head_dim)
        mask = _extend_mask(mask, x.shape[1])
        for number, layer in enumerate(self.expert):
            q, k, v = layer.project(x, rope)
            keys[number], values[number] = _extend(keys[number], k), _extend(values[number], v)
            if number < len(self.expert) - 1:  # the last layer's output for these tokens is not used
                x = layer.finish(x, attend(q, keys[number], values[number], mask))
        return Prefix(torch.stack(keys, 1), torch.stack(values, 1), mask, mean)

    def features(self, inputs: Inputs) -> torch.Tensor:
        return self._run_trunk(inputs, features=True)[-1]

    def velocity(self, x: torch.Tensor, t: torch.Tensor, prefix: Prefix) -> torch.Tensor:
        """The velocity of actions [B, H, A] at times [B], in float32; A may be less than max_action_dim."""
        dims, x = x.shape[-1], self.embed(x, t)
        rope = rotation(_next_positions(prefix.mask, x.shape[1]), self.sizes.head_dim)
        mask = _extend_mask(prefix.mask, x.shape[1])
        for number, layer in enumerate(self.expert):
            q, k, v = layer.project(x, rope)
            k, v = _extend(prefix.keys[:, number], k), _extend(prefix.values[:, number], v)
            x = layer.finish(x, attend(q, k, v, mask))
        return self.emit(x, dims)

    def sample(self, inputs: Inputs, noise: torch.Tensor, steps: int) -> torch.Tensor:
        prefix = self.prefix(inputs, features=False)
        return self.integrate(noise, steps, lambda x, t: self.velocity(x, t, prefix))

    @staticmethod
    def integrate(noise: torch.Tensor, steps: int, velocity) -> torch.Tensor:
        """Integrate the ODE from `noise` [B, H, A] to actions, in float32."""
        x = noise.float()
        for step in range(steps):
            x = x - velocity(x, x.new_full((len(x),), 1 - step / steps)) / steps
        return x

    def _run_trunk(self, inputs: Inputs, features: bool):
        """The mask of image and text tokens [B, L], their keys and values in each layer, and features [B, W]."""
        x, mask, rope = self.prompt(inputs, self.vision)
        keys, values = [], []
        for number, layer in enumerate(self.trunk):
            q, k, v = layer.project(x, rope)
            keys.append(k)
            values.append(v)
            if features or number < len(self.trunk) - 1:
                x = layer.finish(x, attend(q, k, v, mask))
        return mask, keys, values, self.pool(x, mask) if features else None

    def prompt(self, inputs: Inputs, vision):
        """Embed images (with `vision`) and text: tokens [B, L, W], their mask [B, L] and their rotation."""
        dtype, cameras, mask = self._dtype(), inputs.images.shape[1], inputs.text
        x = self.words(inputs.tokens).to(dtype) * self.sizes.width**0.5
        if cameras:
            patches = self.projector(vision(inputs.images.flatten(0, 1), dtype))  # [B * N, P, W]
            x = torch.cat([patches.view(len(x), -1, self.sizes.width), x], 1)
            mask = F.pad(mask, (cameras * self.vision.count, 0), value=True)
        return x, mask, rotation(mask.cumsum(1) - 1, self.sizes.head_dim)

    def pool(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Features [B, W]: the mean over the last layer's tokens in the mask."""
        counted = mask[..., None].float()
        return (self.trunk_norm(x).float() * counted).sum(1) / counted.sum(1)

    def state_tokens(self, inputs: Inputs) -> torch.Tensor:
        """Embed state and memory as tokens, [B, 1 or 2, expert width]."""
        tokens = [self.state_in(_padded(inputs.state, self.sizes.max_state_dim, self._dtype()))]
        if self.memory_in is not None and inputs.memory is not None:
            tokens.append(self.memory_in(inputs.memory.to(tokens[0].dtype)))
        return torch.stack(tokens, 1)

    def embed(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """Embed actions [B, H, A] at times [B] as tokens [B, H, expert width]."""
        dtype = self._dtype()
        action = self.action_in(_padded(x, self.sizes.max_action_dim, dtype))
        time = _time_encoding(t, self.sizes.expert_width).to(dtype)[:, None].expand_as(action)
        return self.time_out(F.silu(self.time_in(torch.cat([action, time], -1))))

    def emit(self, x: torch.Tensor, dims: int) -> torch.Tensor:
        """Map the last layer's tokens to a velocity [B, H, dims]."""
        return self.action_out(self.expert_norm(x))[..., :dims].float()

    def _dtype(self) -> torch.dtype:
        device = self.words.weight.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.words.weight.dtype


def _padded(x: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    return F.pad(x.to(dtype), (0, size - x.shape[-1]))


def _extend(cached: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Append keys or values of more tokens, and masked zeros up to _MULTIPLE: products of odd sizes are slow."""
    padding = -(cached.shape[2] + new.shape[2]) % _MULTIPLE  # L is dim 2 of [B, kv heads, L, d]
    return torch.cat([cached, new, new.new_zeros(*new.shape[:2], padding, new.shape[3])], 2)


def _extend_mask(mask: torch.Tensor, count: int) -> torch.Tensor:
    mask = F.pad(mask, (0, count), value=True)
    return F.pad(mask, (0, -mask.shape[1] % _MULTIPLE), value=False)


def _next_positions(mask: torch.Tensor, count: int) -> torch.Tensor:
    """[B, count]: positions of the tokens that follow those in `mask` [B, L]."""
    return mask.sum(1, keepdim=True) + torch.arange(count, device=mask.device)


def _time_encoding(t: torch.Tensor, width: int) -> torch.Tensor:
    # [B] -> [B, width], in float32: the highest frequency has 250 periods between 0 and 1
    shortest, longest = _PERIODS
    fractions = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float32, device=t.device)
    angles = 1.0 / (shortest * (longest / shortest) ** fractions) * 2 * math.pi * t[:, None].float()
    return torch.cat([angles.sin(), angles.cos()], 1)
