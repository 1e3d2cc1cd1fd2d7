"""The forward pass by Hopper kernels."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from sparring.policies.native.model import Inputs, Layer, NativeModel, VisionEncoder, rotation

# ---- What the vision encoder does, in the way that is fast on GPUs; nothing is learned here.


# numbers of a patch are filled up to so many: rows of 16 bytes in bf16
_VISION_MULTIPLE = 8


def see(vision: VisionEncoder, images: torch.Tensor, dtype: torch.dtype, gelu_product) -> torch.Tensor:
    """`vision(images, dtype)`; `gelu_product(x, weight, bias)` is a product with the activation after it."""
    x = cut_and_embedded(vision, images.to(dtype)) + vision.places.to(dtype)
    for block in vision.blocks:
        x = block.mix(x)
        x = x + block.down(gelu_product(block.mlp_norm(x), block.up.weight, block.up.bias))
    return vision.norm(x)


def cut_and_embedded(vision: VisionEncoder, images: torch.Tensor) -> torch.Tensor:
    """`vision.patches` of images [N, 3, S, S] as a product, [N, P, W]: a convolution takes ten times as long."""
    size = vision.patches.kernel_size[0]
    count = images.shape[-1] // size
    # [N, 3, S, S] -> [N, 3, s, p, s, p] -> [N, s, s, 3, p, p] -> [N, P, 3 * p * p]
    cut = images.unflatten(3, (count, size)).unflatten(2, (count, size)).permute(0, 2, 4, 1, 3, 5)
    cut = cut.flatten(3).flatten(1, 2)
    room = -cut.shape[-1] % _VISION_MULTIPLE
    return F.linear(F.pad(cut, (0, room)), F.pad(vision.patches.weight.flatten(1), (0, room)), vision.patches.bias)


# ---- Deciding by kernels of our own, beside a cache that stays where it is: for acting on GPUs; nothing is learned
# here.
#
# State and memory do not depend on noise or time, but a pass of their own costs as many kernels as a denoising step. So
# they are tokens of each step here, and do not see the actions beside them.


# a step of up to so many tokens (of all rows) is bound by the number of kernels
FEW = 256
# whether a product that ends with few units of the GPU busy is cut in two
WAVES = True
# the cache's tokens are so many: products of odd sizes are slow
_MULTIPLE = 16
# what the library's products are cut into
_TILE = (128, 256)


class Cache(NamedTuple):
    """What denoising attends to, like `Prefix`, and room for what a step adds to it."""

    # [B, layers, kv heads, C, d] each
    keys: torch.Tensor
    values: torch.Tensor
    # [B, C] bool: all that follow images and words are seen
    mask: torch.Tensor
    # [B, W] float32, or None where it was not asked for
    features: torch.Tensor | None
    # state and memory, [B, 1 or 2, expert width]
    told: torch.Tensor
    # what they and the actions are turned by, [B, room, d/2] each
    cos: torch.Tensor
    sin: torch.Tensor


class Around(NamedTuple):
    """What a layer's tokens come from and attend to."""

    # of this layer, [B, kv heads, C, d] each; the tokens' own are written from `at` on
    keys: torch.Tensor
    values: torch.Tensor
    at: int
    # [B, C], and how many of the tokens do not see the rest
    seen: torch.Tensor
    told: int
    # cos and sin, [B, at least T, d/2] each
    turns: tuple[torch.Tensor, torch.Tensor]


def fits(model: NativeModel) -> bool:
    """Whether kernels can be used: here, by weights that have no adapters beside them, and of these sizes."""
    sizes = model.sizes
    widths = (sizes.width, sizes.mlp, sizes.expert_width, sizes.expert_mlp)
    whole = all(width % 64 == 0 for width in widths) and sizes.head_dim in (32, 64, 128, 256)
    layers = (*model.trunk, *model.expert)
    products = [product for layer in layers for product in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    products += [block.up for block in model.vision.blocks]
    plain = all(type(product) is nn.Linear for product in products) and type(model.vision.patches) is nn.Conv2d
    return whole and plain and runs_on(model.words.weight)


def runs_on(weight: torch.Tensor) -> bool:
    """In bf16, on a GPU of Hopper's generation (tiles do not fit into the memory of others), with a Triton that can
    use its engine for copies."""
    if not weight.is_cuda or torch.version.hip is not None or weight.dtype != torch.bfloat16:
        return False
    hopper = torch.cuda.get_device_capability(weight.device)[0] == 9
    return hopper and find_spec("triton") is not None and find_spec("triton.tools.tensor_descriptor") is not None


class Steps:
    """What `NativeModel.prefix` and `velocity` do. Shapes as in `launches`."""

    def __init__(self, model: NativeModel, room: int, compile_it: Callable):
        """`room`: the most tokens of a step (state, memory, a chunk). `compile_it(function)` makes it fast."""
        from sparring.policies.native.hopper import launch as launches

        self.model, self.room, self._kernels = model, room, launches
        self._begin, self._mean = compile_it(self._begin), compile_it(model.mean)
        self._embed, self._emit = compile_it(self._embed), compile_it(model.emit)
        device = model.words.weight.device
        self._counters = torch.zeros(launches.COUNTERS, dtype=torch.int32, device=device)
        on_gpu = device.type == "cuda"
        self._units = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1

    def prefix(self, inputs: Inputs, features: bool = True) -> Cache:
        x, seen, turns, told, cos, sin = self._begin(inputs)
        length, room = seen.shape[1], cos.shape[1]
        sizes, trunk = self.model.sizes, self.model.trunk
        shape = (len(x), len(trunk), sizes.kv_heads, length + room, sizes.head_dim)
        keys, values = x.new_empty(shape), x.new_empty(shape)
        # what no step writes to gets no weight, but must be a number
        keys[..., length:, :].zero_()
        values[..., length:, :].zero_()
        mask = F.pad(seen, (0, room), value=True)
        for number, layer in enumerate(trunk):
            around = Around(keys[:, number], values[:, number], 0, mask, 0, turns)
            q = self._project(layer, x, around)
            if features or number < len(trunk) - 1:
                x = self._finish(layer, x, self._attend(q, x.shape[1], around))
        return Cache(keys, values, mask, self._mean(x, seen) if features else None, told, cos, sin)

    def velocity(self, x: torch.Tensor, t: torch.Tensor, cache: Cache) -> torch.Tensor:
        dims, told = x.shape[-1], cache.told.shape[1]
        x = self._embed(x, t, cache.told)
        if x.shape[1] > self.room:
            raise ValueError(f"a step of {x.shape[1]} tokens, but the cache has room for {self.room}")
        turns = cache.cos, cache.sin
        at = cache.keys.shape[3] - cache.cos.shape[1]
        layer_of = self._few if x.shape[0] * x.shape[1] <= FEW else self._many
        for number, layer in enumerate(self.model.expert):
            around = Around(cache.keys[:, number], cache.values[:, number], at, cache.mask, told, turns)
            x = layer_of(layer, x, around)
        return self._emit(x[:, told:], dims)

    def _begin(self, inputs: Inputs):
        """All before the first layer: one piece for the compiler."""
        model, look = self.model, self._kernels.gelu_product
        x, seen, turns = model.shown(inputs, partial(see, model.vision, gelu_product=look))
        room = self.room + -(seen.shape[1] + self.room) % _MULTIPLE
        following = rotation(seen.sum(1, keepdim=True) + torch.arange(room, device=seen.device), model.sizes.head_dim)
        # [B, T, 1, d/2] -> [B, T, d/2]
        turns, following = (tuple(turn[:, :, 0].contiguous() for turn in each) for each in (turns, following))
        return x, seen, turns, model.told(inputs), *following

    def _embed(self, x: torch.Tensor, t: torch.Tensor, told: torch.Tensor) -> torch.Tensor:
        return torch.cat([told, self.model.embed(x, t)], 1)

    # ---- a layer of few tokens

    def _few(self, layer: Layer, x: torch.Tensor, around: Around) -> torch.Tensor:
        kernels, (keys, values, at, seen, told, turns) = self._kernels, around
        q = x.new_empty(*x.shape[:2], layer.heads, layer.head_dim)
        kernels.project(kernels.norm(x, layer.attention_norm.weight), layer.qkv.weight, turns, q, keys, values, at)
        attended = kernels.attend(q, keys, values, seen, told, at, self._counters)
        x = kernels.add("out", x, attended, layer.out.weight, self._counters)
        wide = kernels.gate(kernels.norm(x, layer.mlp_norm.weight), layer.gate_up.weight)
        return kernels.add("down", x, wide, layer.down.weight, self._counters)

    # ---- a layer of many

    def _many(self, layer: Layer, x: torch.Tensor, around: Around) -> torch.Tensor:
        return self._finish(layer, x, self._attend(self._project(layer, x, around), x.shape[1], around))

    def _project(self, layer: Layer, x: torch.Tensor, around: Around) -> torch.Tensor:
        """Queries [B, kv heads, R, d]."""
        qkv = layer.qkv(self._kernels.norm(x, layer.attention_norm.weight))
        return self._kernels.turn(qkv, around.turns, layer.heads, around.keys, around.values, around.at)

    def _attend(self, q: torch.Tensor, tokens: int, around: Around) -> torch.Tensor:
        """[B, kv heads, R, d] -> [B, T, heads * d]."""
        batch, shared, _, size = q.shape
        length = around.at + tokens
        length += -length % _MULTIPLE
        # [B, kv, C, d] -> [B * kv, L, d]: a view where all heads share keys
        keys, values = (cached[:, :, :length].flatten(0, 1) for cached in (around.keys, around.values))
        scores = torch.bmm(q.flatten(0, 1), keys.mT)
        self._kernels.weigh(scores, around.seen, tokens, around.told, around.at, size**-0.5)
        # [B * kv, T * g, d] -> [B, T, kv * g * d]
        mixed = torch.bmm(scores, values).view(batch, shared, tokens, -1)
        return mixed.transpose(1, 2).reshape(batch, tokens, -1)

    def _finish(self, layer: Layer, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Written over x."""
        kernels = self._kernels
        self._add(x, attended, layer.out.weight)
        self._add(x, kernels.gated(kernels.norm(x, layer.mlp_norm.weight), layer.gate_up.weight), layer.down.weight)
        return x

    def _add(self, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> None:
        """y [B, T, K] @ weight.T to x [B, T, N]."""
        x, y, rows = x.view(-1, x.shape[2]), y.flatten(0, 1), x.shape[0] * x.shape[1]
        # where the sum is long it pays to do the rest in another way
        whole = full_rows(rows, len(weight), self._units) if WAVES and weight.shape[1] > 2 * len(weight) else rows
        x[:whole].addmm_(y[:whole], weight.t())
        if whole < rows:
            x[whole:].addmm_(y[whole:], weight.t())


def full_rows(rows: int, width: int, units: int) -> int:
    """Of a product [rows, width]: how many keep all of a GPU's units busy to the end, if the rest is little."""
    high, wide = _TILE
    across = -(-width // wide)
    tiles = -(-rows // high) * across
    whole = tiles // units * units // across * high
    return whole if 0 < rows - whole <= rows // 16 else rows
