"""Launches of the kernels: how their work is cut into tiles.

Letters: B rows, T tokens, K and N width before and after a product, C tokens of the cache, d numbers of a head,
R = T times the heads that share keys.
"""

import math

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from sparring.policies.native.hopper import kernels

# how each kernel cuts its work, for up to so many tokens (M) of a step; measured on an H200
TILES = {
    64: {
        "project": {"BLOCK_M": 64, "BLOCK_N": 16, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4},
        "attend": {"BLOCK_M": 16, "BLOCK_N": 128, "SPLITS": 5, "num_warps": 8, "num_stages": 2},
        "out": {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 128, "SPLITS": 4, "num_warps": 4, "num_stages": 4},
        "gate": {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4},
        "down": {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 128, "SPLITS": 4, "num_warps": 4, "num_stages": 4},
    },
    math.inf: {
        "project": {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4},
        "attend": {"BLOCK_M": 64, "BLOCK_N": 32, "SPLITS": 2, "num_warps": 4, "num_stages": 2},
        "out": {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "SPLITS": 2, "num_warps": 4, "num_stages": 4},
        "gate": {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3},
        "down": {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "SPLITS": 2, "num_warps": 4, "num_stages": 4},
    },
}
_GATED = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "BAND": 16, "num_warps": 8, "num_stages": 4}
_COUNTERS = 1 << 16  # tiles of a product that several programs may share
_OVERLAP = 64  # for up to so many tokens a kernel starts while the one before it ends


@torch.library.custom_op("sparring::gelu_product", mutates_args=())
def _gelu_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """gelu(x [N, P, K] @ weight.T + bias) by the library; one piece for the compiler: the activation stays fused."""
    return torch._addmm_activation(bias, x.flatten(0, 1), weight.t(), use_gelu=True).view(*x.shape[:2], -1)


@_gelu_product.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:2], len(weight))


class Kernels:
    """On one device. A layer of few tokens takes project, attend, add, gate; one of many turn, weigh, gated."""

    def __init__(self, device: torch.device):
        self.counters = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)  # zero before and after each kernel
        self.gelu_product = _gelu_product

    def norm(self, x, scale) -> torch.Tensor:
        out, width = torch.empty_like(x), x.shape[2]
        rows = x.numel() // width
        kernels.normed[(rows,)](x, scale, out, width, BLOCK=triton.next_power_of_2(width), **_overlap(x, rows))
        return out

    def project(self, x, weight, turns, q, keys, values, at: int) -> None:
        """Queries, keys and values of tokens x [B, T, K], turned, where they belong: q [B, T, heads, d], and the cache
        [B, kv heads, C, d] from token `at` on. Turns: cos and sin [B, at least T, d/2]."""
        batch, tokens, width = x.shape
        heads, size = q.shape[2:]
        shared, room = keys.shape[1:3]
        tile = _tile("project", x, batch * tokens, N=size // 2, K=width)
        grid = (triton.cdiv(batch * tokens, tile["BLOCK_M"]), (heads + 2 * shared) * (size // 2 // tile["BLOCK_N"]))
        kernels.project[grid](
            x, weight, *turns, q, keys, values, batch * tokens, tokens, at, room, keys.stride(0) // size,
            turns[0].shape[1],
            K=width, HEADS=heads, KV=shared, D=size, **tile,
        )  # fmt: skip

    def attend(self, q, keys, values, seen, states: int, at: int) -> torch.Tensor:
        """Queries [B, T, heads, d] over the cache's `at` tokens that are `seen` [B, C], and the T after them:
        [B, T, heads * d]. The first `states` of the T see only the cache and each other."""
        batch, tokens, heads, size = q.shape
        shared, room = keys.shape[1:3]
        tile = _tile("attend", q, batch * tokens)
        splits, out = tile["SPLITS"], torch.empty_like(q)
        parts, sums = (q.new_empty((splits, batch * tokens * heads, n), dtype=torch.float32) for n in (size, 2))
        grid = (triton.cdiv(tokens * (heads // shared), tile["BLOCK_M"]), splits, batch * shared)
        kernels.attend[grid](
            q, keys, values, seen, out, parts, sums, self.counters, tokens, states, at, room, keys.stride(0) // size,
            size**-0.5,
            HEADS=heads, KV=shared, D=size, BLOCKS=triton.cdiv(at + tokens, tile["BLOCK_N"] * splits), **tile,
        )  # fmt: skip
        return out.flatten(2)

    def gate(self, x, weight) -> torch.Tensor:
        """[B, T, K] -> [B, T, N], by weight [2 N, K]."""
        batch, tokens, width = x.shape
        wide = len(weight) // 2
        tile = _tile("gate", x, batch * tokens, N=wide, K=width)
        out = x.new_empty(batch, tokens, wide)
        grid = (triton.cdiv(batch * tokens, tile["BLOCK_M"]), wide // tile["BLOCK_N"])
        kernels.gate[grid](x, weight, out, batch * tokens, K=width, N=wide, **tile)
        return out

    def add(self, name: str, x, y, weight) -> torch.Tensor:
        """x [B, T, N] + y [B, T, K] @ weight.T; `name` of the tile: out or down."""
        rows, (wide, width) = x.shape[0] * x.shape[1], weight.shape
        tile = _tile(name, x, rows, N=wide, K=width)
        splits, out = tile["SPLITS"], torch.empty_like(x)
        parts = x.new_empty((splits, rows, wide) if splits > 1 else 1, dtype=torch.float32)
        grid = (triton.cdiv(rows, tile["BLOCK_M"]), wide // tile["BLOCK_N"], splits)
        kernels.add[grid](x, y, weight, out, parts, self.counters, rows, K=width, N=wide, **tile)
        return out

    def turn(self, qkv, turns, heads: int, keys, values, at: int) -> torch.Tensor:
        """What `project` does after its product, which is [B, T, (heads + 2 kv heads) * d]; queries as
        [B, kv heads, R, d], as if heads that share keys were more queries."""
        batch, tokens = qkv.shape[:2]
        shared, room, size = keys.shape[1:]
        q = qkv.new_empty(batch, shared, tokens * (heads // shared), size)
        kernels.turn[(batch * tokens,)](
            qkv, *turns, q, keys, values, tokens, at, room, keys.stride(0) // size, turns[0].shape[1],
            HEADS=heads, KV=shared, D=size, BLOCK=triton.next_power_of_2(heads + 2 * shared), num_warps=4,
        )  # fmt: skip
        return q

    def weigh(self, scores, seen, tokens: int, states: int, at: int, scale: float) -> None:
        """Scores [B * kv heads, R, L] of T tokens become weights that sum to 1, in place. Who is seen: as `attend`.
        L is at least `at` + T; what lies beyond gets 0."""
        count, rows, width = scores.shape
        block = triton.next_power_of_2(width)
        # [1 or more rows, L] at once
        several = max(4096 // block, 1)
        kernels.weigh[(triton.cdiv(rows, several), count)](
            scores, seen, rows, width, at + tokens, states, at, seen.shape[1], scale,
            KV=count // len(seen), GROUP=rows // tokens, BLOCK_M=several, BLOCK_N=block, num_warps=4,
        )  # fmt: skip

    def gated(self, x, weight) -> torch.Tensor:
        batch, tokens, width = x.shape
        wide = len(weight) // 2
        tile = _GATED | {"BLOCK_N": math.gcd(wide, _GATED["BLOCK_N"]), "BLOCK_K": math.gcd(width, _GATED["BLOCK_K"])}
        rows, columns, inner = tile["BLOCK_M"], tile["BLOCK_N"], tile["BLOCK_K"]
        out = x.new_empty(batch * tokens, wide)
        kernels.gated[(triton.cdiv(batch * tokens, rows) * (wide // columns),)](
            TensorDescriptor.from_tensor(x.view(batch * tokens, width), [rows, inner]),
            TensorDescriptor.from_tensor(weight, [columns, inner]),
            TensorDescriptor.from_tensor(out, [rows, columns]),
            batch * tokens, K=width, N=wide, **tile,
        )  # fmt: skip
        return out.view(batch, tokens, wide)


def _tile(name: str, x, rows: int, N: int = 0, K: int = 0) -> dict:
    """How a kernel is launched. Tiles are narrower where the sizes are no multiples."""
    tile = next(tiles for most, tiles in TILES.items() if rows <= most)[name] | _overlap(x, rows)
    if K:
        if K % (16 * tile.get("SPLITS", 1)):
            tile["SPLITS"] = 1
        tile["BLOCK_N"] = math.gcd(N, tile["BLOCK_N"])
        tile["BLOCK_K"] = math.gcd(K // tile.get("SPLITS", 1), tile["BLOCK_K"])
    return tile


def _overlap(x, rows: int) -> dict:
    early = rows <= _OVERLAP and x.is_cuda
    return {"EARLY": early, "launch_pdl": early} if early else {"EARLY": False}
