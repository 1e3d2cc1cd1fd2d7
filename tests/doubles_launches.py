"""What the kernels of a denoising step do, in plain torch: same arguments, same buffers."""

import torch
from torch.nn import functional as F

from sparring.policies.native.gemma import rotate

COUNTERS = 1


def project(x, scale, weight, turns, q, keys, values, at):
    tokens, shared = x.shape[1], keys.shape[1]
    heads = F.linear(_normed(x, scale), weight).unflatten(-1, (-1, q.shape[-1]))
    turns = [turn[:, :tokens, None] for turn in turns]
    query, key, value = heads.split([q.shape[2], shared, shared], 2)
    q.copy_(rotate(query, turns))
    keys[:, :, at : at + tokens] = rotate(key, turns).transpose(1, 2)
    values[:, :, at : at + tokens] = value.transpose(1, 2)


def attend(q, keys, values, seen, told, at, counters):
    tokens, group = q.shape[1], q.shape[2] // keys.shape[1]
    # [B, heads, T, C]
    shown = seen[:, None, None, : at + tokens].repeat(1, 1, tokens, 1)
    shown[:, :, :told, at + told :] = False
    keys, values = (cached[:, :, : at + tokens].repeat_interleave(group, 1) for cached in (keys, values))
    return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, shown).transpose(1, 2).flatten(2)


def gate(x, scale, weight):
    first, second = F.linear(_normed(x, scale), weight).chunk(2, -1)
    return F.gelu(first, approximate="tanh") * second


def add(name, x, y, weight, counters):
    return x + F.linear(y, weight)


def _normed(x, scale):
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * (1.0 + scale.float())).to(x.dtype)
