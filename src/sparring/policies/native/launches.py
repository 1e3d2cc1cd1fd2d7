"""Launches of the kernels of a denoising step: how their work is cut into tiles.

Letters: B rows, T tokens of a step, K and N width before and after a product, C tokens that the cache holds, d numbers
of a head.
"""

import math

import torch
import triton

from sparring.policies.native import kernels

# how each kernel cuts its work, for up to so many tokens (M) of a step
TILES = {
    64: {
        "project": {"BLOCK_M": 64, "BLOCK_N": 16, "BLOCK_K": 128, "NORM": True, "num_warps": 4, "num_stages": 4},
        "attend": {"BLOCK_M": 16, "BLOCK_N": 64, "SPLITS": 5, "num_warps": 4, "num_stages": 2},
        "out": {"BLOCK_M": 64, "BLOCK_N": 16, "BLOCK_K": 128, "SPLITS": 2, "num_warps": 4, "num_stages": 4},
        "gate": {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 128, "NORM": True, "num_warps": 4, "num_stages": 3},
        "down": {"BLOCK_M": 64, "BLOCK_N": 16, "BLOCK_K": 128, "SPLITS": 4, "num_warps": 4, "num_stages": 4},
    },
    512: {
        "project": {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 128, "NORM": True, "num_warps": 4, "num_stages": 3},
        "attend": {"BLOCK_M": 32, "BLOCK_N": 64, "SPLITS": 2, "num_warps": 8, "num_stages": 2},
        "out": {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 128, "SPLITS": 2, "num_warps": 4, "num_stages": 4},
        "gate": {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "NORM": True, "num_warps": 4, "num_stages": 4},
        "down": {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 128, "SPLITS": 4, "num_warps": 4, "num_stages": 4},
    },
    math.inf: {
        "project": {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 64, "NORM": False, "num_warps": 8, "num_stages": 3},
        "attend": {"BLOCK_M": 64, "BLOCK_N": 64, "SPLITS": 1, "num_warps": 8, "num_stages": 2},
        "out": {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "SPLITS": 1, "num_warps": 4, "num_stages": 4},
        "gate": {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 64, "NORM": False, "num_warps": 8, "num_stages": 3},
        "down": {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "SPLITS": 1, "num_warps": 4, "num_stages": 4},
    },
}
# tiles of a product that several programs may share
COUNTERS = 1 << 16
# a kernel starts while the one before it ends, where GPUs can do that
OVERLAP = True


def project(x, scale, weight, turns, q, keys, values, at: int) -> None:
    """Queries, keys and values of tokens x [B, T, K], turned, where they belong: q [B, T, heads, d], and the cache
    [B, kv heads, C, d] from token `at` on. Turns: cos and sin [B, at least T, d/2]."""
    batch, tokens, width = x.shape
    heads, size = q.shape[2:]
    shared, room = keys.shape[1:3]
    tile = _tile("project", x, batch * tokens, N=size // 2, K=width)
    x = x if tile["NORM"] else _norm(x, scale)
    grid = (triton.cdiv(batch * tokens, tile["BLOCK_M"]), (heads + 2 * shared) * (size // 2 // tile["BLOCK_N"]))
    kernels.project[grid](
        x, scale, weight, *turns, q, keys, values, batch * tokens, tokens, at, room, keys.stride(0) // size,
        turns[0].shape[1],
        K=width, HEADS=heads, KV=shared, D=size, **tile,
    )  # fmt: skip


def attend(q, keys, values, seen, told: int, at: int, counters) -> torch.Tensor:
    """Queries [B, T, heads, d] over the cache's `at` tokens that are `seen` [B, C], and the T after them: [B, T, heads
    * d]. The first `told` of the T see only the cache and each other."""
    batch, tokens, heads, size = q.shape
    shared, room = keys.shape[1:3]
    tile = _tile("attend", q, batch * tokens)
    splits, out = tile["SPLITS"], torch.empty_like(q)
    parts, sums = (q.new_empty((splits, batch * tokens * heads, n), dtype=torch.float32) for n in (size, 2))
    grid = (triton.cdiv(tokens * (heads // shared), tile["BLOCK_M"]), splits, batch * shared)
    kernels.attend[grid](
        q, keys, values, seen, out, parts, sums, counters, tokens, told, at, room, keys.stride(0) // size,
        size**-0.5,
        HEADS=heads, KV=shared, D=size, BLOCKS=triton.cdiv(at + tokens, tile["BLOCK_N"] * splits), **tile,
    )  # fmt: skip
    return out.flatten(2)


def gate(x, scale, weight) -> torch.Tensor:
    """[B, T, K] -> [B, T, N], by weight [2 N, K]."""
    batch, tokens, width = x.shape
    wide = len(weight) // 2
    tile = _tile("gate", x, batch * tokens, N=wide, K=width)
    x = x if tile["NORM"] else _norm(x, scale)
    out = x.new_empty(batch, tokens, wide)
    grid = (triton.cdiv(batch * tokens, tile["BLOCK_M"]), wide // tile["BLOCK_N"])
    kernels.gate[grid](x, scale, weight, out, batch * tokens, K=width, N=wide, **tile)
    return out


def add(name: str, x, y, weight, counters) -> torch.Tensor:
    """x [B, T, N] + y [B, T, K] @ weight.T; `name` of the tile: out or down."""
    rows, (wide, width) = x.shape[0] * x.shape[1], weight.shape
    tile = _tile(name, x, rows, N=wide, K=width)
    splits, out = tile["SPLITS"], torch.empty_like(x)
    parts = x.new_empty((splits, rows, wide) if splits > 1 else 1, dtype=torch.float32)
    grid = (triton.cdiv(rows, tile["BLOCK_M"]), wide // tile["BLOCK_N"], splits)
    kernels.add[grid](x, y, weight, out, parts, counters, rows, K=width, N=wide, **tile)
    return out


def _tile(name: str, x, rows: int, N: int = 0, K: int = 0) -> dict:
    """How a kernel is launched. Tiles are narrower where the sizes are no multiples."""
    tile = next(tiles for most, tiles in TILES.items() if rows <= most)[name] | _overlap(x)
    if K:
        if K % (16 * tile.get("SPLITS", 1)):
            tile["SPLITS"] = 1
        tile["BLOCK_N"] = math.gcd(N, tile["BLOCK_N"])
        tile["BLOCK_K"] = math.gcd(K // tile.get("SPLITS", 1), tile["BLOCK_K"])
    return tile


def _overlap(x) -> dict:
    early = OVERLAP and x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
    return {"EARLY": early, "launch_pdl": early} if early else {"EARLY": False}


def _norm(x, scale) -> torch.Tensor:
    out, width = torch.empty_like(x), x.shape[2]
    kernels.normed[(x.numel() // width,)](x, scale, out, width, BLOCK=triton.next_power_of_2(width), **_overlap(x))
    return out
