"""The inference kernels in plain torch, with the same arguments and buffers."""

import torch
from torch.nn import functional as F

from sparring.policies.native.model import _rotate as rotate


class Kernels:
    def __init__(self, device):
        pass

    @staticmethod
    def norm(x, scale):
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * (1.0 + scale.float())).to(x.dtype)

    @staticmethod
    def project(x, weight, turns, q, keys, values, at):
        q.copy_(_turned(F.linear(x, weight), turns, q.shape[2], keys, values, at))

    @staticmethod
    def rotate(qkv, turns, heads, keys, values, at):
        q = _turned(qkv, turns, heads, keys, values, at)
        # [B, T, kv * g, d] -> [B, kv, T * g, d]
        return q.unflatten(2, (keys.shape[1], -1)).transpose(1, 2).flatten(2, 3)

    @staticmethod
    def softmax(scores, seen, tokens, states, at, scale):
        batch, length = len(seen), scores.shape[2]
        # [B, kv, T, g, L]
        each = scores.view(batch, -1, tokens, scores.shape[1] // tokens, length)
        hidden = _hidden(seen[:, :length], tokens, states, at)[:, None, :, None]
        each.copy_(torch.softmax((each.float() * scale).masked_fill(hidden, float("-inf")), -1))

    @staticmethod
    def attend(q, keys, values, seen, states, at):
        tokens, group = q.shape[1], q.shape[2] // keys.shape[1]
        # [B, heads, T, C]
        shown = ~_hidden(seen, tokens, states, at)[:, None]
        keys, values = (cached.repeat_interleave(group, 1) for cached in (keys, values))
        return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, shown).transpose(1, 2).flatten(2)

    @staticmethod
    def gate(x, weight):
        first, second = F.linear(x, weight).chunk(2, -1)
        return F.gelu(first, approximate="tanh") * second

    gate_many = gate

    @staticmethod
    def gelu_product(x, weight, bias):
        return F.gelu(F.linear(x, weight, bias), approximate="tanh")

    @staticmethod
    def add(name, x, y, weight):
        return x + F.linear(y, weight)


def _turned(qkv, turns, heads, keys, values, at):
    tokens, shared, size = qkv.shape[1], keys.shape[1], keys.shape[-1]
    turns = [turn[:, :tokens, None] for turn in turns]
    query, key, value = qkv.unflatten(-1, (-1, size)).split([heads, shared, shared], 2)
    keys[:, :, at : at + tokens] = rotate(key, turns).transpose(1, 2)
    values[:, :, at : at + tokens] = value.transpose(1, 2)
    return rotate(query, turns)


def _hidden(seen, tokens, states, at):
    """[B, T, L]."""
    hidden = ~seen[:, None].repeat(1, tokens, 1)
    hidden[:, :, at + tokens :] = True
    hidden[:, :states, at + states :] = True
    return hidden
