"""The native VLA's forward pass with kernels for Hopper GPUs; for acting only, without gradients.

State and memory are tokens of each denoising step: a separate pass for them would launch as many kernels again."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from sparring.policies.native.model import GemmaLayer, Inputs, NativeModel, rotation

FEW_TOKENS = 256  # up to this many tokens (of all rows), the time of a step depends on the number of kernels
_MULTIPLE = 16  # the cache's length is a multiple of this: products of odd sizes are slow
_PATCH_MULTIPLE = 8  # the size of a patch is padded to a multiple of this: rows of 16 bytes in bf16
_TILE = (128, 256)  # tile size (rows, columns) of cuBLAS products


class Cache(NamedTuple):
    """Cache for denoising, with room for the tokens of a step: keys, values [B, layers, kv heads, C, d] and their mask
    [B, C]; tokens of state and memory [B, 1 or 2, expert width]; cos and sin of RoPE [B, room, d/2]."""

    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor
    features: torch.Tensor | None
    states: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


class _LayerCache(NamedTuple):
    """Cache of one layer: keys and values [B, kv heads, C, d], where the step's tokens write theirs from `at` on, and
    their mask [B, C]. The first `state_count` tokens of a step do not attend to the others. `rope`: cos and sin of RoPE
    [B, at least T, d/2]."""

    keys: torch.Tensor
    values: torch.Tensor
    at: int
    mask: torch.Tensor
    state_count: int
    rope: tuple[torch.Tensor, torch.Tensor]


def _has_hopper(weight: torch.Tensor) -> bool:
    """Whether this is bf16 on a Hopper GPU, with a Triton that supports tensor descriptors (its copy engine)."""
    if not weight.is_cuda or torch.version.hip is not None or weight.dtype != torch.bfloat16:
        return False
    hopper = torch.cuda.get_device_capability(weight.device)[0] == 9
    return hopper and find_spec("triton") is not None and find_spec("triton.tools.tensor_descriptor") is not None


class HopperForward:
    """Equivalent to `NativeModel.prefix` and `velocity`. Shapes as in kernels.py."""

    def __init__(self, model: NativeModel, room: int, compile_it: Callable):
        """`room`: maximum tokens of a step (state, memory, a chunk). `compile_it(function)`: a compiled function."""
        from sparring.policies.native.hopper.kernels import Kernels

        self.model, self.room = model, room
        self._begin, self._pool = compile_it(self._begin), compile_it(model.pool)  # type: ignore[method-assign]
        self._embed, self._emit = compile_it(self._embed), compile_it(model.emit)  # type: ignore[method-assign]
        device = model.words.weight.device
        self._kernels = Kernels(device)
        on_gpu = device.type == "cuda"
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1

    @staticmethod
    def can_run(model: NativeModel) -> bool:
        """Whether the kernels support this GPU, these sizes and these weights (without adapters)."""
        sizes = model.sizes
        widths = (sizes.width, sizes.mlp, sizes.expert_width, sizes.expert_mlp)
        fits = all(width % 64 == 0 for width in widths) and sizes.head_dim in (32, 64, 128, 256)
        layers = (*model.trunk, *model.expert)
        products: list[Any] = [each for layer in layers for each in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        products += [block.up for block in model.vision.blocks]
        plain = all(type(product) is nn.Linear for product in products) and type(model.vision.patches) is nn.Conv2d
        return fits and plain and _has_hopper(model.words.weight)

    def prefix(self, inputs: Inputs, features: bool = True) -> Cache:
        x, mask, rope, states, cos, sin = self._begin(inputs)
        length, room = mask.shape[1], cos.shape[1]
        sizes, trunk = self.model.sizes, self.model.trunk
        shape = (len(x), len(trunk), sizes.kv_heads, length + room, sizes.head_dim)
        keys, values = x.new_empty(shape), x.new_empty(shape)
        keys[..., length:, :].zero_()  # unused entries get weight 0, but 0 * NaN would be NaN
        values[..., length:, :].zero_()
        cache_mask = F.pad(mask, (0, room), value=True)
        for number, layer in enumerate(trunk):
            cache = _LayerCache(keys[:, number], values[:, number], 0, cache_mask, 0, rope)
            q = self._project(layer, x, cache)
            if features or number < len(trunk) - 1:
                x = self._finish(layer, x, self._attend(q, x.shape[1], cache))
        return Cache(keys, values, cache_mask, self._pool(x, mask) if features else None, states, cos, sin)

    def velocity(self, x: torch.Tensor, t: torch.Tensor, cache: Cache) -> torch.Tensor:
        dims, state_count = x.shape[-1], cache.states.shape[1]
        x = self._embed(x, t, cache.states)
        if x.shape[1] > self.room:
            raise ValueError(f"a step has {x.shape[1]} tokens, but the cache has room for {self.room}")
        rope = cache.cos, cache.sin
        at = cache.keys.shape[3] - cache.cos.shape[1]
        run_layer = self._few_tokens if x.shape[0] * x.shape[1] <= FEW_TOKENS else self._many_tokens
        for number, layer in enumerate(self.model.expert):
            layer_cache = _LayerCache(cache.keys[:, number], cache.values[:, number], at, cache.mask, state_count, rope)
            x = run_layer(layer, x, layer_cache)
        return self._emit(x[:, state_count:], dims)

    def _begin(self, inputs: Inputs):
        model = self.model
        vision = partial(_encode_images, model.vision, gelu_product=self._kernels.gelu_product)
        x, mask, rope = model.prompt(inputs, vision)
        room = self.room + -(mask.shape[1] + self.room) % _MULTIPLE
        following = rotation(mask.sum(1, keepdim=True) + torch.arange(room, device=mask.device), model.sizes.head_dim)
        # [B, T, 1, d/2] -> [B, T, d/2]
        own, later = (tuple(part[:, :, 0].contiguous() for part in pair) for pair in (rope, following))
        return x, mask, own, model.state_tokens(inputs), *later

    def _embed(self, x: torch.Tensor, t: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return torch.cat([states, self.model.embed(x, t)], 1)

    def _few_tokens(self, layer: GemmaLayer, x: torch.Tensor, cache: _LayerCache) -> torch.Tensor:
        kernels, (keys, values, at, mask, state_count, rope) = self._kernels, cache
        q = x.new_empty(*x.shape[:2], layer.heads, layer.head_dim)
        kernels.project(kernels.norm(x, layer.attention_norm.weight), layer.qkv.weight, rope, q, keys, values, at)
        x = kernels.add("out", x, kernels.attend(q, keys, values, mask, state_count, at), layer.out.weight)
        hidden = kernels.gate(kernels.norm(x, layer.mlp_norm.weight), layer.gate_up.weight)
        return kernels.add("down", x, hidden, layer.down.weight)

    def _many_tokens(self, layer: GemmaLayer, x: torch.Tensor, cache: _LayerCache) -> torch.Tensor:
        return self._finish(layer, x, self._attend(self._project(layer, x, cache), x.shape[1], cache))

    def _project(self, layer: GemmaLayer, x: torch.Tensor, cache: _LayerCache) -> torch.Tensor:
        """Return queries [B, kv heads, R, d]; write keys and values to the cache."""
        qkv = layer.qkv(self._kernels.norm(x, layer.attention_norm.weight))
        return self._kernels.rotate(qkv, cache.rope, layer.heads, cache.keys, cache.values, cache.at)

    def _attend(self, q: torch.Tensor, tokens: int, cache: _LayerCache) -> torch.Tensor:
        """Attention of queries [B, kv heads, R, d] -> [B, T, heads * d]."""
        batch, shared, _, size = q.shape
        length = cache.at + tokens
        length += -length % _MULTIPLE
        # [B, kv, C, d] -> [B * kv, L, d]: a view if kv = 1
        keys, values = (cached[:, :, :length].flatten(0, 1) for cached in (cache.keys, cache.values))
        scores = torch.bmm(q.flatten(0, 1), keys.mT)
        self._kernels.softmax(scores, cache.mask, tokens, cache.state_count, cache.at, size**-0.5)
        mixed = torch.bmm(scores, values).view(batch, shared, tokens, -1)  # from [B * kv, T * g, d]
        return mixed.transpose(1, 2).reshape(batch, tokens, -1)

    def _finish(self, layer: GemmaLayer, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        kernels = self._kernels
        self._add(x, attended, layer.out.weight)
        hidden = kernels.gate_many(kernels.norm(x, layer.mlp_norm.weight), layer.gate_up.weight)
        self._add(x, hidden, layer.down.weight)
        return x

    def _add(self, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> None:
        """Add y [B, T, K] @ weight.T to x [B, T, N], in place."""
        x, y, rows = x.view(-1, x.shape[2]), y.flatten(0, 1), x.shape[0] * x.shape[1]
        # products with large K are split in two if the last tiles would keep only a few multiprocessors busy
        full = _full_rows(rows, len(weight), self._processors) if weight.shape[1] > 2 * len(weight) else rows
        x[:full].addmm_(y[:full], weight.t())
        if full < rows:
            x[full:].addmm_(y[full:], weight.t())


def _full_rows(rows: int, width: int, processors: int) -> int:
    """The rows of a product [rows, width] that fill all multiprocessors, if at most 1/16 of the rows remain."""
    tile_rows, tile_columns = _TILE
    columns = -(-width // tile_columns)
    tiles = -(-rows // tile_rows) * columns
    full = tiles // processors * processors // columns * tile_rows
    return full if 0 < rows - full <= rows // 16 else rows


def _encode_images(vision: Any, images: torch.Tensor, dtype: torch.dtype, gelu_product: Callable) -> torch.Tensor:
    """Equivalent to `vision(images, dtype)`; `gelu_product(x, weight, bias)` fuses a product and its activation."""
    x = _embed_patches(vision, images.to(dtype)) + vision.places.to(dtype)
    for block in vision.blocks:
        x = block.mix(x)
        x = x + block.down(gelu_product(block.mlp_norm(x), block.up.weight, block.up.bias))
    return vision.norm(x)


def _embed_patches(vision: Any, images: torch.Tensor) -> torch.Tensor:
    """`vision.patches(images)` of [N, 3, S, S] as a product, [N, P, W]: the convolution takes ten times as long."""
    size = vision.patches.kernel_size[0]
    count = images.shape[-1] // size
    # [N, 3, S, S] -> [N, 3, s, p, s, p] -> [N, s, s, 3, p, p] -> [N, P, 3 * p * p]
    patches = images.unflatten(3, (count, size)).unflatten(2, (count, size)).permute(0, 2, 4, 1, 3, 5)
    patches = patches.flatten(3).flatten(1, 2)
    padding = -patches.shape[-1] % _PATCH_MULTIPLE
    weight, bias = F.pad(vision.patches.weight.flatten(1), (0, padding)), vision.patches.bias
    return F.linear(F.pad(patches, (0, padding)), weight, bias)
