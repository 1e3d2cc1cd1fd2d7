"""Denoising by kernels of our own, beside a cache that stays where it is: for acting on GPUs; nothing is learned here.

State and memory do not depend on noise or time, but a pass of their own costs as many kernels as a denoising step. So
they are tokens of each step here, and do not see the actions beside them.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from sparring.policies.native.gemma import rotation
from sparring.policies.native.model import Inputs, NativeModel


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


def fits(model: NativeModel) -> bool:
    """Whether kernels can be used: the expert has no adapters beside its weights, and its sizes can be cut up."""
    products = (product for layer in model.expert for product in (layer.qkv, layer.out, layer.gate_up, layer.down))
    sizes = model.sizes
    whole = sizes.expert_width % 16 == 0 and sizes.expert_mlp % 16 == 0 and sizes.head_dim in (32, 64, 128, 256)
    return whole and all(type(product) is nn.Linear for product in products)


class Steps:
    """What `NativeModel.prefix` and `velocity` do. Shapes as in `launches`."""

    def __init__(self, model: NativeModel, room: int, compile_it: Callable):
        """`room`: the most tokens of a step (state, memory, a chunk). `compile_it(function)` makes it fast."""
        from sparring.policies.native import launches

        self.model, self.room, self._kernels = model, room, launches
        self.prefix, self._embed, self._emit = compile_it(self.prefix), compile_it(self._embed), compile_it(model.emit)
        self._counters = torch.zeros(launches.COUNTERS, dtype=torch.int32, device=model.words.weight.device)

    def prefix(self, inputs: Inputs, features: bool = True) -> Cache:
        seen, keys, values, mean = self.model.see(inputs, features)
        following = seen.sum(1, keepdim=True) + torch.arange(self.room, device=seen.device)
        # [B, room, 1, d/2] -> [B, room, d/2]
        turns = (turn[:, :, 0].contiguous() for turn in rotation(following, self.model.sizes.head_dim))
        keys, values = (torch.stack([F.pad(x, (0, 0, 0, self.room)) for x in each], 1) for each in (keys, values))
        return Cache(keys, values, F.pad(seen, (0, self.room), value=True), mean, self.model.told(inputs), *turns)

    def velocity(self, x: torch.Tensor, t: torch.Tensor, cache: Cache) -> torch.Tensor:
        dims, told = x.shape[-1], cache.told.shape[1]
        x = self._embed(x, t, cache.told)
        if x.shape[1] > self.room:
            raise ValueError(f"a step of {x.shape[1]} tokens, but the cache has room for {self.room}")
        for number in range(len(self.model.expert)):
            x = self.layer(number, x, cache)
        return self._emit(x[:, told:], dims)

    def layer(self, number: int, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        layer, kernels = self.model.expert[number], self._kernels
        keys, values, told = cache.keys[:, number], cache.values[:, number], cache.told.shape[1]
        at = keys.shape[2] - self.room
        q = x.new_empty(*x.shape[:2], layer.heads, layer.head_dim)
        turns = cache.cos, cache.sin
        kernels.project(x, layer.attention_norm.weight, layer.qkv.weight, turns, q, keys, values, at)
        attended = kernels.attend(q, keys, values, cache.mask, told, at, self._counters)
        x = kernels.add("out", x, attended, layer.out.weight, self._counters)
        wide = kernels.gate(x, layer.mlp_norm.weight, layer.gate_up.weight)
        return kernels.add("down", x, wide, layer.down.weight, self._counters)

    def _embed(self, x: torch.Tensor, t: torch.Tensor, told: torch.Tensor) -> torch.Tensor:
        return torch.cat([told, self.model.embed(x, t)], 1)
