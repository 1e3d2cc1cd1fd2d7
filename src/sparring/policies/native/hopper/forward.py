"""The native VLA's forward pass by kernels for acting on Hopper GPUs; nothing is learned here.

State and memory are tokens of each denoising step: a pass of their own would cost as many kernels."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from sparring.policies.native.model import GemmaLayer, Inputs, NativeModel, rotation

FEW = 256  # a step of up to so many tokens (of all rows) is bound by the number of kernels
_MULTIPLE = 16  # the cache's length is a multiple of this: products of odd sizes are slow
_PATCH_MULTIPLE = 8  # numbers of a patch are padded to a multiple of this: rows of 16 bytes in bf16
_TILE = (128, 256)  # tiles of the GPU library's products


class Cache(NamedTuple):
    """What denoising attends to, with room for a step's tokens: keys, values [B, layers, kv heads, C, d] and their mask
    [B, C]; tokens of state and memory [B, 1 or 2, expert width]; cos and sin [B, room, d/2]."""

    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor
    features: torch.Tensor | None
    states: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


class _LayerCache(NamedTuple):
    """What the tokens of one layer attend to: keys and values [B, kv heads, C, d], to which they add theirs from `at`
    on; those `seen` [B, C]. The first `states` of them do not see the rest. Turns: cos and sin [B, at least T, d/2]."""

    keys: torch.Tensor
    values: torch.Tensor
    at: int
    seen: torch.Tensor
    states: int
    turns: tuple[torch.Tensor, torch.Tensor]


def _has_hopper(weight: torch.Tensor) -> bool:
    """bf16 on a Hopper GPU, with a Triton that supports its copy engine."""
    if not weight.is_cuda or torch.version.hip is not None or weight.dtype != torch.bfloat16:
        return False
    hopper = torch.cuda.get_device_capability(weight.device)[0] == 9
    return hopper and find_spec("triton") is not None and find_spec("triton.tools.tensor_descriptor") is not None


class HopperForward:
    """What `NativeModel.prefix` and `velocity` do. Shapes as in kernels.py."""

    def __init__(self, model: NativeModel, room: int, compile_it: Callable):
        """`room`: the most tokens of a step (state, memory, a chunk). `compile_it(function)` makes it fast."""
        from sparring.policies.native.hopper.kernels import Kernels

        self.model, self.room = model, room
        self._begin, self._pool = compile_it(self._begin), compile_it(model.pool)  # type: ignore[method-assign]
        self._embed, self._emit = compile_it(self._embed), compile_it(model.emit)  # type: ignore[method-assign]
        device = model.words.weight.device
        self._kernels = Kernels(device)
        on_gpu = device.type == "cuda"
        self._units = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1

    @staticmethod
    def can_run(model: NativeModel) -> bool:
        """Whether kernels can be used: on this GPU, by weights without adapters, and for these sizes."""
        sizes = model.sizes
        widths = (sizes.width, sizes.mlp, sizes.expert_width, sizes.expert_mlp)
        whole = all(width % 64 == 0 for width in widths) and sizes.head_dim in (32, 64, 128, 256)
        layers = (*model.trunk, *model.expert)
        products: list[Any] = [each for layer in layers for each in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        products += [block.up for block in model.vision.blocks]
        plain = all(type(product) is nn.Linear for product in products) and type(model.vision.patches) is nn.Conv2d
        return whole and plain and _has_hopper(model.words.weight)

    def prefix(self, inputs: Inputs, features: bool = True) -> Cache:
        x, seen, turns, states, cos, sin = self._begin(inputs)
        length, room = seen.shape[1], cos.shape[1]
        sizes, trunk = self.model.sizes, self.model.trunk
        shape = (len(x), len(trunk), sizes.kv_heads, length + room, sizes.head_dim)
        keys, values = x.new_empty(shape), x.new_empty(shape)
        keys[..., length:, :].zero_()  # what no step writes to gets no weight, but must be a number
        values[..., length:, :].zero_()
        mask = F.pad(seen, (0, room), value=True)
        for number, layer in enumerate(trunk):
            cache = _LayerCache(keys[:, number], values[:, number], 0, mask, 0, turns)
            q = self._project(layer, x, cache)
            if features or number < len(trunk) - 1:
                x = self._finish(layer, x, self._attend(q, x.shape[1], cache))
        return Cache(keys, values, mask, self._pool(x, seen) if features else None, states, cos, sin)

    def velocity(self, x: torch.Tensor, t: torch.Tensor, cache: Cache) -> torch.Tensor:
        dims, states = x.shape[-1], cache.states.shape[1]
        x = self._embed(x, t, cache.states)
        if x.shape[1] > self.room:
            raise ValueError(f"a step of {x.shape[1]} tokens, but the cache has room for {self.room}")
        turns = cache.cos, cache.sin
        at = cache.keys.shape[3] - cache.cos.shape[1]
        layer_of = self._few if x.shape[0] * x.shape[1] <= FEW else self._many
        for number, layer in enumerate(self.model.expert):
            around = _LayerCache(cache.keys[:, number], cache.values[:, number], at, cache.mask, states, turns)
            x = layer_of(layer, x, around)
        return self._emit(x[:, states:], dims)

    def _begin(self, inputs: Inputs):
        model = self.model
        see = partial(_see_patches, model.vision, gelu_product=self._kernels.gelu_product)
        x, seen, turns = model.prompt(inputs, see)
        room = self.room + -(seen.shape[1] + self.room) % _MULTIPLE
        following = rotation(seen.sum(1, keepdim=True) + torch.arange(room, device=seen.device), model.sizes.head_dim)
        # [B, T, 1, d/2] -> [B, T, d/2]
        turn, place = (tuple(wave[:, :, 0].contiguous() for wave in each) for each in (turns, following))
        return x, seen, turn, model.state_tokens(inputs), *place

    def _embed(self, x: torch.Tensor, t: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return torch.cat([states, self.model.embed(x, t)], 1)

    def _few(self, layer: GemmaLayer, x: torch.Tensor, cache: _LayerCache) -> torch.Tensor:
        kernels, (keys, values, at, seen, states, turns) = self._kernels, cache
        q = x.new_empty(*x.shape[:2], layer.heads, layer.head_dim)
        kernels.project(kernels.norm(x, layer.attention_norm.weight), layer.qkv.weight, turns, q, keys, values, at)
        x = kernels.add("out", x, kernels.attend(q, keys, values, seen, states, at), layer.out.weight)
        wide = kernels.gate(kernels.norm(x, layer.mlp_norm.weight), layer.gate_up.weight)
        return kernels.add("down", x, wide, layer.down.weight)

    def _many(self, layer: GemmaLayer, x: torch.Tensor, cache: _LayerCache) -> torch.Tensor:
        return self._finish(layer, x, self._attend(self._project(layer, x, cache), x.shape[1], cache))

    def _project(self, layer: GemmaLayer, x: torch.Tensor, cache: _LayerCache) -> torch.Tensor:
        """Queries [B, kv heads, R, d]."""
        qkv = layer.qkv(self._kernels.norm(x, layer.attention_norm.weight))
        return self._kernels.turn(qkv, cache.turns, layer.heads, cache.keys, cache.values, cache.at)

    def _attend(self, q: torch.Tensor, tokens: int, cache: _LayerCache) -> torch.Tensor:
        """[B, kv heads, R, d] -> [B, T, heads * d]."""
        batch, shared, _, size = q.shape
        length = cache.at + tokens
        length += -length % _MULTIPLE
        # [B, kv, C, d] -> [B * kv, L, d]: a view where all heads share keys
        keys, values = (cached[:, :, :length].flatten(0, 1) for cached in (cache.keys, cache.values))
        scores = torch.bmm(q.flatten(0, 1), keys.mT)
        self._kernels.weigh(scores, cache.seen, tokens, cache.states, cache.at, size**-0.5)
        mixed = torch.bmm(scores, values).view(batch, shared, tokens, -1)  # from [B * kv, T * g, d]
        return mixed.transpose(1, 2).reshape(batch, tokens, -1)

    def _finish(self, layer: GemmaLayer, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        kernels = self._kernels
        self._add(x, attended, layer.out.weight)
        self._add(x, kernels.gated(kernels.norm(x, layer.mlp_norm.weight), layer.gate_up.weight), layer.down.weight)
        return x

    def _add(self, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> None:
        """y [B, T, K] @ weight.T to x [B, T, N]."""
        x, y, rows = x.view(-1, x.shape[2]), y.flatten(0, 1), x.shape[0] * x.shape[1]
        # where the sum is long, a product that would end with few units of the GPU busy is cut in two
        whole = _full_rows(rows, len(weight), self._units) if weight.shape[1] > 2 * len(weight) else rows
        x[:whole].addmm_(y[:whole], weight.t())
        if whole < rows:
            x[whole:].addmm_(y[whole:], weight.t())


def _full_rows(rows: int, width: int, units: int) -> int:
    """Of a product [rows, width]: how many keep all of a GPU's units busy to the end, if the rest is little."""
    high, wide = _TILE
    across = -(-width // wide)
    tiles = -(-rows // high) * across
    whole = tiles // units * units // across * high
    return whole if 0 < rows - whole <= rows // 16 else rows


def _see_patches(vision: Any, images: torch.Tensor, dtype: torch.dtype, gelu_product: Callable) -> torch.Tensor:
    """`vision(images, dtype)`; `gelu_product(x, weight, bias)` is a product with the activation after it."""
    x = _embed_patches(vision, images.to(dtype)) + vision.places.to(dtype)
    for block in vision.blocks:
        x = block.mix(x)
        x = x + block.down(gelu_product(block.mlp_norm(x), block.up.weight, block.up.bias))
    return vision.norm(x)


def _embed_patches(vision: Any, images: torch.Tensor) -> torch.Tensor:
    """`vision.patches` of images [N, 3, S, S] as a product, [N, P, W]: a convolution takes ten times as long."""
    size = vision.patches.kernel_size[0]
    count = images.shape[-1] // size
    # [N, 3, S, S] -> [N, 3, s, p, s, p] -> [N, s, s, 3, p, p] -> [N, P, 3 * p * p]
    cut = images.unflatten(3, (count, size)).unflatten(2, (count, size)).permute(0, 2, 4, 1, 3, 5)
    cut = cut.flatten(3).flatten(1, 2)
    room = -cut.shape[-1] % _PATCH_MULTIPLE
    weight, bias = F.pad(vision.patches.weight.flatten(1), (0, room)), vision.patches.bias
    return F.linear(F.pad(cut, (0, room)), weight, bias)
