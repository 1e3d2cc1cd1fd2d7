"""Triton kernels for acting on Hopper GPUs, their tile sizes, and their launches (`Kernels`).

With few tokens, reading weights and launching kernels dominates: the kernels here fuse products with RoPE, sums and the
activation. With many tokens, cuBLAS computes most products, and the kernels here do the rest.
Letters: B rows, T tokens, M = B * T, K and N width before and after a product, C tokens of the cache, d size of a
head, R = T times the heads that share keys."""

import math

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

# tile sizes of each kernel, for up to that many tokens (M) of a step; the fastest ones measured on an H200
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
_GATE_MANY = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "BAND": 16, "num_warps": 8, "num_stages": 4}
_COUNTERS = 1 << 16  # maximum number of tiles whose sum is split over several programs
_OVERLAP = 64  # up to this many tokens, a kernel starts before the previous one ends (programmatic dependent launch)
_EPSILON = tl.constexpr(1e-6)
_MASKED = tl.constexpr(-1e30)


@torch.library.custom_op("sparring::gelu_product", mutates_args=())
def _gelu_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """gelu(x [N, P, K] @ weight.T + bias) by cuBLAS; a custom op, so that the compiler keeps the activation fused."""
    return torch._addmm_activation(bias, x.flatten(0, 1), weight.t(), use_gelu=True).view(*x.shape[:2], -1)


@_gelu_product.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:2], len(weight))


class Kernels:
    """Launches kernels: norm; project, attend, add, gate for few tokens; rotate, softmax, gate_many for many."""

    def __init__(self, device: torch.device):
        self.counters = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)  # every kernel resets them to zero
        self.gelu_product = _gelu_product

    def norm(self, x, scale) -> torch.Tensor:
        out, width = torch.empty_like(x), x.shape[2]
        rows = x.numel() // width
        _rms_norm[(rows,)](x, scale, out, width, BLOCK=triton.next_power_of_2(width), **_overlap(x, rows))
        return out

    def project(self, x, weight, rope, q, keys, values, at: int) -> None:
        """Write rotated queries of tokens x [B, T, K] to q [B, T, heads, d], and their rotated keys and their values to
        the cache [B, kv heads, C, d] from token `at` on. `rope`: cos and sin [B, at least T, d/2]."""
        batch, tokens, width = x.shape
        heads, size = q.shape[2:]
        kv_heads, length = keys.shape[1:3]
        tile = _tile("project", x, batch * tokens, N=size // 2, K=width)
        grid = (triton.cdiv(batch * tokens, tile["BLOCK_M"]), (heads + 2 * kv_heads) * (size // 2 // tile["BLOCK_N"]))
        _project[grid](
            x, weight, *rope, q, keys, values, batch * tokens, tokens, at, length, keys.stride(0) // size,
            rope[0].shape[1],
            K=width, HEADS=heads, KV=kv_heads, D=size, **tile,
        )  # fmt: skip

    def attend(self, q, keys, values, mask, state_count: int, at: int) -> torch.Tensor:
        """Attention of queries [B, T, heads, d] over the first `at` + T tokens of the cache, with `mask` [B, C]:
        [B, T, heads * d]. The first `state_count` of the T tokens attend only to the cache and to each other."""
        batch, tokens, heads, size = q.shape
        kv_heads, length = keys.shape[1:3]
        tile = _tile("attend", q, batch * tokens)
        splits, out = tile["SPLITS"], torch.empty_like(q)
        parts, sums = (q.new_empty((splits, batch * tokens * heads, n), dtype=torch.float32) for n in (size, 2))
        grid = (triton.cdiv(tokens * (heads // kv_heads), tile["BLOCK_M"]), splits, batch * kv_heads)
        _attend[grid](
            q, keys, values, mask, out, parts, sums, self.counters, tokens, state_count, at, length,
            keys.stride(0) // size, size**-0.5,
            HEADS=heads, KV=kv_heads, D=size, BLOCKS=triton.cdiv(at + tokens, tile["BLOCK_N"] * splits), **tile,
        )  # fmt: skip
        return out.flatten(2)

    def gate(self, x, weight) -> torch.Tensor:
        """gelu(x @ first half of weight.T) * (x @ second half): [B, T, K] -> [B, T, N], by weight [2 N, K]."""
        batch, tokens, width = x.shape
        out_width = len(weight) // 2
        tile = _tile("gate", x, batch * tokens, N=out_width, K=width)
        out = x.new_empty(batch, tokens, out_width)
        grid = (triton.cdiv(batch * tokens, tile["BLOCK_M"]), out_width // tile["BLOCK_N"])
        _gate[grid](x, weight, out, batch * tokens, K=width, N=out_width, **tile)
        return out

    def add(self, name: str, x, y, weight) -> torch.Tensor:
        """x [B, T, N] + y [B, T, K] @ weight.T; `name`: out or down, for the tile sizes."""
        rows, (out_width, width) = x.shape[0] * x.shape[1], weight.shape
        tile = _tile(name, x, rows, N=out_width, K=width)
        splits, out = tile["SPLITS"], torch.empty_like(x)
        parts = x.new_empty((splits, rows, out_width) if splits > 1 else 1, dtype=torch.float32)
        grid = (triton.cdiv(rows, tile["BLOCK_M"]), out_width // tile["BLOCK_N"], splits)
        _add[grid](x, y, weight, out, parts, self.counters, rows, K=width, N=out_width, **tile)
        return out

    def rotate(self, qkv, rope, heads: int, keys, values, at: int) -> torch.Tensor:
        """The second part of `project`, for a product qkv [B, T, (heads + 2 kv heads) * d]. Returns queries
        [B, kv heads, R, d]: heads that share keys are stacked as additional queries."""
        batch, tokens = qkv.shape[:2]
        kv_heads, length, size = keys.shape[1:]
        q = qkv.new_empty(batch, kv_heads, tokens * (heads // kv_heads), size)
        _rotate[(batch * tokens,)](
            qkv, *rope, q, keys, values, tokens, at, length, keys.stride(0) // size, rope[0].shape[1],
            HEADS=heads, KV=kv_heads, D=size, BLOCK=triton.next_power_of_2(heads + 2 * kv_heads), num_warps=4,
        )  # fmt: skip
        return q

    def softmax(self, scores, mask, tokens: int, state_count: int, at: int, scale: float) -> None:
        """Masked softmax of scores [B * kv heads, R, L] of T tokens, in place; the mask is that of `attend`.
        L is at least `at` + T; later entries get weight 0."""
        count, rows, width = scores.shape
        block = triton.next_power_of_2(width)
        block_rows = max(4096 // block, 1)
        _softmax[(triton.cdiv(rows, block_rows), count)](
            scores, mask, rows, width, at + tokens, state_count, at, mask.shape[1], scale,
            KV=count // len(mask), GROUP=rows // tokens, BLOCK_M=block_rows, BLOCK_N=block, num_warps=4,
        )  # fmt: skip

    def gate_many(self, x, weight) -> torch.Tensor:
        """`gate` for many tokens."""
        batch, tokens, width = x.shape
        out_width = len(weight) // 2
        rows, columns, inner = (_GATE_MANY[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
        columns, inner = math.gcd(out_width, columns), math.gcd(width, inner)
        tile = _GATE_MANY | {"BLOCK_N": columns, "BLOCK_K": inner}
        out = x.new_empty(batch * tokens, out_width)
        _gate_many[(triton.cdiv(batch * tokens, rows) * (out_width // columns),)](
            TensorDescriptor.from_tensor(x.view(batch * tokens, width), [rows, inner]),
            TensorDescriptor.from_tensor(weight, [columns, inner]),
            TensorDescriptor.from_tensor(out, [rows, columns]),
            batch * tokens, K=width, N=out_width, **tile,
        )  # fmt: skip
        return out.view(batch, tokens, out_width)


def _tile(name: str, x, rows: int, N: int = 0, K: int = 0) -> dict:
    """Launch settings of a kernel. Tiles are narrowed to divide sizes that are not multiples of them."""
    tile = next(tiles for limit, tiles in TILES.items() if rows <= limit)[name] | _overlap(x, rows)
    if K:
        if K % (16 * tile.get("SPLITS", 1)):
            tile["SPLITS"] = 1
        tile["BLOCK_N"] = math.gcd(N, tile["BLOCK_N"])
        tile["BLOCK_K"] = math.gcd(K // tile.get("SPLITS", 1), tile["BLOCK_K"])
    return tile


def _overlap(x, rows: int) -> dict:
    early = rows <= _OVERLAP and x.is_cuda
    return {"EARLY": early, "launch_pdl": early} if early else {"EARLY": False}


@triton.jit
def _wait(EARLY: tl.constexpr):
    """Wait for the results of the previous kernel, then allow the next one to start."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _rms_norm(x, scale, out, K, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    _wait(EARLY)
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(x + row * K + columns, mask=columns < K, other=0.0).to(tl.float32)
    factor = 1.0 + tl.load(scale + columns, mask=columns < K, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / K + _EPSILON) * factor
    tl.store(out + row * K + columns, value.to(out.dtype.element_ty), mask=columns < K)


@triton.jit
def _two_products(x, weight, rows, M, first, second, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Two products of rows of x [M, K]: with the rows `first` and `second` of weight."""
    left = tl.zeros([rows.shape[0], first.shape[0]], tl.float32)
    right = tl.zeros([rows.shape[0], first.shape[0]], tl.float32)
    for start in range(0, K, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        value = tl.load(x + rows[:, None] * K + inner[None, :], mask=rows[:, None] < M, other=0.0)
        left = tl.dot(value, tl.load(weight + first[None, :] * K + inner[:, None]), left, input_precision="ieee")
        right = tl.dot(value, tl.load(weight + second[None, :] * K + inner[:, None]), right, input_precision="ieee")
    # round like a product that is stored
    dtype = weight.dtype.element_ty
    return left.to(dtype).to(tl.float32), right.to(dtype).to(tl.float32)


@triton.jit
def _project(
    x, weight, cos, sin, q, keys, values, M, T, at, C, stride, rope_rows,
    K: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
    EARLY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Product and RoPE; queries to q [M, HEADS, D], keys and values to [B, KV, C, D] from `at` on. `stride`: rows of
    size D per batch row of the cache."""
    _wait(EARLY)
    HALF: tl.constexpr = D // 2
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head, part = tl.program_id(1) // (HALF // BLOCK_N), tl.program_id(1) % (HALF // BLOCK_N)
    # dims i and i + d/2 of a head are rotated as a pair
    dim = part * BLOCK_N + tl.arange(0, BLOCK_N)
    first = head * D + dim
    left, right = _two_products(x, weight, rows, M, first, first + HALF, K, BLOCK_K)
    batch, token, valid = rows // T, rows % T, (rows < M)[:, None]
    angle = (batch * rope_rows + token)[:, None] * HALF + dim[None, :]
    if head < HEADS + KV:
        cosine, sine = tl.load(cos + angle, mask=valid), tl.load(sin + angle, mask=valid)
        left, right = left * cosine - right * sine, right * cosine + left * sine
    dtype = q.dtype.element_ty
    if head < HEADS:
        offset = (rows * HEADS + head)[:, None] * D + dim[None, :]
        tl.store(q + offset, left.to(dtype), mask=valid)
        tl.store(q + offset + HALF, right.to(dtype), mask=valid)
    elif head < HEADS + KV:
        offset = (batch * stride + (head - HEADS) * C + at + token)[:, None] * D + dim[None, :]
        tl.store(keys + offset, left.to(dtype), mask=valid)
        tl.store(keys + offset + HALF, right.to(dtype), mask=valid)
    else:
        offset = (batch * stride + (head - HEADS - KV) * C + at + token)[:, None] * D + dim[None, :]
        tl.store(values + offset, left.to(dtype), mask=valid)
        tl.store(values + offset + HALF, right.to(dtype), mask=valid)


@triton.jit
def _gelu_gate(gate, up, dtype: tl.constexpr):
    # 0.5 (1 + tanh(z)) = sigmoid(2 z)
    gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return (gate.to(dtype).to(tl.float32) * up).to(dtype)


@triton.jit
def _gate(
    x, weight, out, M,
    K: tl.constexpr, N: tl.constexpr,
    EARLY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Product and gelu(first half) * second half: [M, K] -> [M, N]."""
    _wait(EARLY)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    gate, up = _two_products(x, weight, rows, M, columns, columns + N, K, BLOCK_K)
    product = _gelu_gate(gate, up, out.dtype.element_ty)
    tl.store(out + rows[:, None] * N + columns[None, :], product, mask=(rows < M)[:, None])


@triton.jit
def _gate_many(
    x, weight, out, M,
    K: tl.constexpr, N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """`_gate` for many tokens. x, weight and out are tensor descriptors, so that the GPU's TMA engine copies tiles."""
    # programs of a band of row tiles run at the same time, so that they share weights in the cache
    tile, row_tiles, column_tiles = tl.program_id(0), tl.cdiv(M, BLOCK_M), N // BLOCK_N
    first = tile // (BAND * column_tiles) * BAND
    band_rows = tl.minimum(row_tiles - first, BAND)
    row = (first + tile % (BAND * column_tiles) % band_rows) * BLOCK_M
    column = tile % (BAND * column_tiles) // band_rows * BLOCK_N
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        value = x.load([row, start])
        gate = tl.dot(value, weight.load([column, start]).T, gate)
        up = tl.dot(value, weight.load([N + column, start]).T, up)
    dtype = out.dtype
    out.store([row, column], _gelu_gate(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), dtype))


@triton.jit
def _is_last(counter, SPLITS: tl.constexpr):
    """Whether all other programs that share this counter have stored their part. The last one resets the counter."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.atomic_xchg(counter, 0)
    return last


@triton.jit
def _add(
    x, y, weight, out, parts, counters, M,
    K: tl.constexpr, N: tl.constexpr,
    SPLITS: tl.constexpr, EARLY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x [M, N] + y [M, K] @ weight.T; SPLITS programs share a tile, and the last one sums in a fixed order."""
    _wait(EARLY)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    valid = (rows < M)[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K // SPLITS, BLOCK_K):
        inner = split * (K // SPLITS) + start + tl.arange(0, BLOCK_K)
        value = tl.load(y + rows[:, None] * K + inner[None, :], mask=valid, other=0.0)
        other = tl.load(weight + columns[None, :] * K + inner[:, None])
        total = tl.dot(value, other, total, input_precision="ieee")
    offset = rows[:, None] * N + columns[None, :]
    is_last = True
    if SPLITS > 1:
        tl.store(parts + split * M * N + offset, total, mask=valid)
        is_last = _is_last(counters + tl.program_id(0) * (N // BLOCK_N) + tl.program_id(1), SPLITS)
        if is_last:
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for part in range(SPLITS):
                total += tl.load(parts + part * M * N + offset, mask=valid, cache_modifier=".cg")
    if is_last:
        dtype = out.dtype.element_ty
        before = tl.load(x + offset, mask=valid).to(tl.float32)
        tl.store(out + offset, (before + total.to(dtype).to(tl.float32)).to(dtype), mask=valid)


@triton.jit
def _attend(
    q, keys, values, mask, out, parts, sums, counters, T, state_count, at, C, stride, scale,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
    BLOCKS: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention; heads that share keys are stacked as queries. The first `state_count` tokens ignore the others."""
    _wait(EARLY)
    GROUP: tl.constexpr = HEADS // KV
    batch, kv_head, split = tl.program_id(2) // KV, tl.program_id(2) % KV, tl.program_id(1)
    row, dims = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D)
    token, valid = row // GROUP, row < T * GROUP
    # row of q and out, [B * T * HEADS, D]
    offset = (batch * T + token) * HEADS + kv_head * GROUP + row % GROUP
    query = tl.load(q + offset[:, None] * D + dims[None, :], mask=valid[:, None], other=0.0)
    cached = (batch * stride + kv_head * C) * D
    length = at + T
    row_max = tl.full([BLOCK_M], _MASKED, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, D], tl.float32)
    for block in range(BLOCKS):
        index = (split * BLOCKS + block) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = index < length
        key = tl.load(keys + cached + index[None, :] * D + dims[:, None], mask=inside[None, :], other=0.0)
        score = tl.dot(query, key, input_precision="ieee").to(q.dtype.element_ty).to(tl.float32) * scale
        visible = (tl.load(mask + batch * C + index, mask=inside, other=0) != 0)[None, :]
        visible = visible & ((token >= state_count)[:, None] | (index < at + state_count)[None, :])
        score = tl.where(visible, score, _MASKED)
        new_max = tl.maximum(row_max, tl.max(score, 1))
        weight = tl.where(visible, tl.exp(score - new_max[:, None]), 0.0)
        rescale = tl.exp(row_max - new_max)
        total, row_max = total * rescale + tl.sum(weight, 1), new_max
        value = tl.load(values + cached + index[:, None] * D + dims[None, :], mask=inside[:, None], other=0.0)
        mixed = tl.dot(weight.to(value.dtype), value, mixed * rescale[:, None], input_precision="ieee")
    is_last = True
    if SPLITS > 1:
        count = tl.num_programs(2) // KV * T * HEADS
        tl.store(parts + (split * count + offset)[:, None] * D + dims[None, :], mixed, mask=valid[:, None])
        tl.store(sums + (split * count + offset) * 2, row_max, mask=valid)
        tl.store(sums + (split * count + offset) * 2 + 1, total, mask=valid)
        is_last = _is_last(counters + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0), SPLITS)
        if is_last:
            row_max = tl.full([BLOCK_M], _MASKED, tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            mixed = tl.zeros([BLOCK_M, D], tl.float32)
            for other in range(SPLITS):
                source = other * count + offset
                other_max = tl.load(sums + source * 2, mask=valid, other=_MASKED, cache_modifier=".cg")
                other_total = tl.load(sums + source * 2 + 1, mask=valid, other=0.0, cache_modifier=".cg")
                part = tl.load(
                    parts + source[:, None] * D + dims[None, :], mask=valid[:, None], other=0.0, cache_modifier=".cg"
                )
                new_max = tl.maximum(row_max, other_max)
                own_scale, other_scale = tl.exp(row_max - new_max), tl.exp(other_max - new_max)
                total, row_max = total * own_scale + other_total * other_scale, new_max
                mixed = mixed * own_scale[:, None] + part * other_scale[:, None]
    if is_last:
        mixed = mixed / tl.where(valid, total, 1.0)[:, None]
        tl.store(out + offset[:, None] * D + dims[None, :], mixed.to(out.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _rotate(
    qkv, cos, sin, q, keys, values, T, at, C, stride, rope_rows,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """RoPE of a token's heads [HEADS + 2 KV, D]; queries to q [B, KV, T, HEADS / KV, D], the rest as in `_project`."""
    HALF: tl.constexpr = D // 2
    GROUP: tl.constexpr = HEADS // KV
    batch, token = (tl.program_id(0) // T).to(tl.int64), tl.program_id(0) % T
    head, dim = tl.arange(0, BLOCK)[:, None], tl.arange(0, HALF)[None, :]
    pointer = qkv + tl.program_id(0).to(tl.int64) * (HEADS + 2 * KV) * D + head * D + dim
    valid = head < HEADS + 2 * KV
    left = tl.load(pointer, mask=valid, other=0.0).to(tl.float32)
    right = tl.load(pointer + HALF, mask=valid, other=0.0).to(tl.float32)
    angle = (batch * rope_rows + token) * HALF + dim
    cosine = tl.where(head < HEADS + KV, tl.load(cos + angle), 1.0)
    sine = tl.where(head < HEADS + KV, tl.load(sin + angle), 0.0)
    dtype = q.dtype.element_ty
    first, second = (left * cosine - right * sine).to(dtype), (right * cosine + left * sine).to(dtype)
    pointer = q + (((batch * KV + head // GROUP) * T + token) * GROUP + head % GROUP) * D + dim
    tl.store(pointer, first, mask=head < HEADS)
    tl.store(pointer + HALF, second, mask=head < HEADS)
    pointer = keys + (batch * stride + (head - HEADS) * C + at + token) * D + dim
    tl.store(pointer, first, mask=(head >= HEADS) & (head < HEADS + KV))
    tl.store(pointer + HALF, second, mask=(head >= HEADS) & (head < HEADS + KV))
    pointer = values + (batch * stride + (head - HEADS - KV) * C + at + token) * D + dim
    tl.store(pointer, first, mask=(head >= HEADS + KV) & valid)
    tl.store(pointer + HALF, second, mask=(head >= HEADS + KV) & valid)


@triton.jit
def _softmax(
    scores, mask, rows, width, length, state_count, at, C, scale,
    KV: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Masked softmax of scores [B * KV, rows, width], in place; the mask is that of `_attend`."""
    row, index = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    pointer = scores + (tl.program_id(1).to(tl.int64) * rows + row)[:, None] * width + index[None, :]
    valid = (row < rows)[:, None] & (index < width)[None, :]
    inside = index < length
    visible = (tl.load(mask + tl.program_id(1) // KV * C + index, mask=inside, other=0) != 0) & inside
    visible = visible[None, :] & ((row // GROUP >= state_count)[:, None] | (index < at + state_count)[None, :])
    score = tl.where(visible, tl.load(pointer, mask=valid, other=0.0).to(tl.float32) * scale, _MASKED)
    weight = tl.where(visible, tl.exp(score - tl.max(score, 1)[:, None]), 0.0)
    weight = weight / tl.sum(weight, 1)[:, None]
    tl.store(pointer, weight.to(scores.dtype.element_ty), mask=valid)
