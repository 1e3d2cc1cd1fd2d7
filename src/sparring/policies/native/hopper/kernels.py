"""Triton kernels for acting on Hopper GPUs, and their launches (`Kernels`): how their work is cut into tiles.

With few tokens, weights and launches are the bound: our products fuse turns, sums and the activation. With many, the
GPU's library multiplies, and kernels here do only what lies between its products.
Letters: B rows, T tokens, M = B * T, K and N width before and after a product, C tokens of the cache, d numbers of a
head, R = T times the heads that share keys."""

import math

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

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
_EPSILON = tl.constexpr(1e-6)
_NOTHING = tl.constexpr(-1e30)


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
        _normed[(rows,)](x, scale, out, width, BLOCK=triton.next_power_of_2(width), **_overlap(x, rows))
        return out

    def project(self, x, weight, turns, q, keys, values, at: int) -> None:
        """Queries, keys and values of tokens x [B, T, K], turned, where they belong: q [B, T, heads, d], and the cache
        [B, kv heads, C, d] from token `at` on. Turns: cos and sin [B, at least T, d/2]."""
        batch, tokens, width = x.shape
        heads, size = q.shape[2:]
        shared, room = keys.shape[1:3]
        tile = _tile("project", x, batch * tokens, N=size // 2, K=width)
        grid = (triton.cdiv(batch * tokens, tile["BLOCK_M"]), (heads + 2 * shared) * (size // 2 // tile["BLOCK_N"]))
        _project[grid](
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
        _attend[grid](
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
        _gate[grid](x, weight, out, batch * tokens, K=width, N=wide, **tile)
        return out

    def add(self, name: str, x, y, weight) -> torch.Tensor:
        """x [B, T, N] + y [B, T, K] @ weight.T; `name` of the tile: out or down."""
        rows, (wide, width) = x.shape[0] * x.shape[1], weight.shape
        tile = _tile(name, x, rows, N=wide, K=width)
        splits, out = tile["SPLITS"], torch.empty_like(x)
        parts = x.new_empty((splits, rows, wide) if splits > 1 else 1, dtype=torch.float32)
        grid = (triton.cdiv(rows, tile["BLOCK_M"]), wide // tile["BLOCK_N"], splits)
        _add[grid](x, y, weight, out, parts, self.counters, rows, K=width, N=wide, **tile)
        return out

    def turn(self, qkv, turns, heads: int, keys, values, at: int) -> torch.Tensor:
        """What `project` does after its product, which is [B, T, (heads + 2 kv heads) * d]; queries as
        [B, kv heads, R, d], as if heads that share keys were more queries."""
        batch, tokens = qkv.shape[:2]
        shared, room, size = keys.shape[1:]
        q = qkv.new_empty(batch, shared, tokens * (heads // shared), size)
        _turn[(batch * tokens,)](
            qkv, *turns, q, keys, values, tokens, at, room, keys.stride(0) // size, turns[0].shape[1],
            HEADS=heads, KV=shared, D=size, BLOCK=triton.next_power_of_2(heads + 2 * shared), num_warps=4,
        )  # fmt: skip
        return q

    def weigh(self, scores, seen, tokens: int, states: int, at: int, scale: float) -> None:
        """Scores [B * kv heads, R, L] of T tokens become weights that sum to 1, in place. Who is seen: as `attend`.
        L is at least `at` + T; what lies beyond gets 0."""
        count, rows, width = scores.shape
        block = triton.next_power_of_2(width)
        several = max(4096 // block, 1)  # rows at once
        _weigh[(triton.cdiv(rows, several), count)](
            scores, seen, rows, width, at + tokens, states, at, seen.shape[1], scale,
            KV=count // len(seen), GROUP=rows // tokens, BLOCK_M=several, BLOCK_N=block, num_warps=4,
        )  # fmt: skip

    def gated(self, x, weight) -> torch.Tensor:
        batch, tokens, width = x.shape
        wide = len(weight) // 2
        tile = _GATED | {"BLOCK_N": math.gcd(wide, _GATED["BLOCK_N"]), "BLOCK_K": math.gcd(width, _GATED["BLOCK_K"])}
        rows, columns, inner = tile["BLOCK_M"], tile["BLOCK_N"], tile["BLOCK_K"]
        out = x.new_empty(batch * tokens, wide)
        _gated[(triton.cdiv(batch * tokens, rows) * (wide // columns),)](
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


@triton.jit
def _wait(EARLY: tl.constexpr):
    """Until what the kernel before has written is there; the next one may come and wait, too."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _normed(x, scale, out, K, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    _wait(EARLY)
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(x + row * K + columns, mask=columns < K, other=0.0).to(tl.float32)
    factor = 1.0 + tl.load(scale + columns, mask=columns < K, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / K + _EPSILON) * factor
    tl.store(out + row * K + columns, value.to(out.dtype.element_ty), mask=columns < K)


@triton.jit
def _twice(x, weight, rows, M, first, second, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Two products with rows of x [M, K]: weight's rows `first` and `second`."""
    left = tl.zeros([rows.shape[0], first.shape[0]], tl.float32)
    right = tl.zeros([rows.shape[0], first.shape[0]], tl.float32)
    for start in range(0, K, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        value = tl.load(x + rows[:, None] * K + inner[None, :], mask=rows[:, None] < M, other=0.0)
        left = tl.dot(value, tl.load(weight + first[None, :] * K + inner[:, None]), left, input_precision="ieee")
        right = tl.dot(value, tl.load(weight + second[None, :] * K + inner[:, None]), right, input_precision="ieee")
    # rounded as if it had been stored
    kind = weight.dtype.element_ty
    return left.to(kind).to(tl.float32), right.to(kind).to(tl.float32)


@triton.jit
def _project(
    x, weight, cos, sin, q, keys, values, M, T, at, C, stride, turns,
    K: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
    EARLY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Product and turn; queries to q [M, HEADS, D], keys and values [B, KV, C, D] from `at` on, rows `stride` apart."""
    _wait(EARLY)
    HALF: tl.constexpr = D // 2
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head, part = tl.program_id(1) // (HALF // BLOCK_N), tl.program_id(1) % (HALF // BLOCK_N)
    # number i and i + d/2 of a head are turned together
    number = part * BLOCK_N + tl.arange(0, BLOCK_N)
    first = head * D + number
    left, right = _twice(x, weight, rows, M, first, first + HALF, K, BLOCK_K)
    batch, token, there = rows // T, rows % T, (rows < M)[:, None]
    angle = (batch * turns + token)[:, None] * HALF + number[None, :]
    if head < HEADS + KV:
        along, across = tl.load(cos + angle, mask=there), tl.load(sin + angle, mask=there)
        left, right = left * along - right * across, right * along + left * across
    kind = q.dtype.element_ty
    if head < HEADS:
        place = (rows * HEADS + head)[:, None] * D + number[None, :]
        tl.store(q + place, left.to(kind), mask=there)
        tl.store(q + place + HALF, right.to(kind), mask=there)
    elif head < HEADS + KV:
        place = (batch * stride + (head - HEADS) * C + at + token)[:, None] * D + number[None, :]
        tl.store(keys + place, left.to(kind), mask=there)
        tl.store(keys + place + HALF, right.to(kind), mask=there)
    else:
        place = (batch * stride + (head - HEADS - KV) * C + at + token)[:, None] * D + number[None, :]
        tl.store(values + place, left.to(kind), mask=there)
        tl.store(values + place + HALF, right.to(kind), mask=there)


@triton.jit
def _open(gate, up, kind: tl.constexpr):
    # 0.5 (1 + tanh(z)) = sigmoid(2 z)
    gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return (gate.to(kind).to(tl.float32) * up).to(kind)


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
    gate, up = _twice(x, weight, rows, M, columns, columns + N, K, BLOCK_K)
    product = _open(gate, up, out.dtype.element_ty)
    tl.store(out + rows[:, None] * N + columns[None, :], product, mask=(rows < M)[:, None])


@triton.jit
def _gated(
    x, weight, out, M,
    K: tl.constexpr, N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """The same for many tokens. x, weight and out are descriptors: the GPU's own engine copies tiles as they say."""
    # tiles of a band of rows run side by side: they share weights
    tile, down, across = tl.program_id(0), tl.cdiv(M, BLOCK_M), N // BLOCK_N
    first = tile // (BAND * across) * BAND
    height = tl.minimum(down - first, BAND)
    row = (first + tile % (BAND * across) % height) * BLOCK_M
    column = tile % (BAND * across) // height * BLOCK_N
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        value = x.load([row, start])
        gate = tl.dot(value, weight.load([column, start]).T, gate)
        up = tl.dot(value, weight.load([N + column, start]).T, up)
    kind = out.dtype
    out.store([row, column], _open(gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32), kind))


@triton.jit
def _last(counter, SPLITS: tl.constexpr):
    """Whether the others that share this counter have stored their part. It is zero again after the last."""
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
    """x [M, N] + y [M, K] @ weight.T; SPLITS programs share a tile, and the last one sums, always in the same order."""
    _wait(EARLY)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    there = (rows < M)[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K // SPLITS, BLOCK_K):
        inner = split * (K // SPLITS) + start + tl.arange(0, BLOCK_K)
        value = tl.load(y + rows[:, None] * K + inner[None, :], mask=there, other=0.0)
        other = tl.load(weight + columns[None, :] * K + inner[:, None])
        total = tl.dot(value, other, total, input_precision="ieee")
    place = rows[:, None] * N + columns[None, :]
    finishes = True
    if SPLITS > 1:
        tl.store(parts + split * M * N + place, total, mask=there)
        finishes = _last(counters + tl.program_id(0) * (N // BLOCK_N) + tl.program_id(1), SPLITS)
        if finishes:
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for part in range(SPLITS):
                total += tl.load(parts + part * M * N + place, mask=there, cache_modifier=".cg")
    if finishes:
        kind = out.dtype.element_ty
        before = tl.load(x + place, mask=there).to(tl.float32)
        tl.store(out + place, (before + total.to(kind).to(tl.float32)).to(kind), mask=there)


@triton.jit
def _attend(
    q, keys, values, seen, out, parts, sums, counters, T, states, at, C, stride, scale,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
    BLOCKS: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Heads that share keys are stacked as if they were more queries. The first `states` tokens do not see the rest."""
    _wait(EARLY)
    GROUP: tl.constexpr = HEADS // KV
    batch, shared, split = tl.program_id(2) // KV, tl.program_id(2) % KV, tl.program_id(1)
    row, dims = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D)
    token, there = row // GROUP, row < T * GROUP
    # of q and out, [B * T * HEADS, D]
    place = (batch * T + token) * HEADS + shared * GROUP + row % GROUP
    query = tl.load(q + place[:, None] * D + dims[None, :], mask=there[:, None], other=0.0)
    cached = (batch * stride + shared * C) * D
    length = at + T
    most = tl.full([BLOCK_M], _NOTHING, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, D], tl.float32)
    for block in range(BLOCKS):
        index = (split * BLOCKS + block) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = index < length
        key = tl.load(keys + cached + index[None, :] * D + dims[:, None], mask=inside[None, :], other=0.0)
        score = tl.dot(query, key, input_precision="ieee").to(q.dtype.element_ty).to(tl.float32) * scale
        shown = (tl.load(seen + batch * C + index, mask=inside, other=0) != 0)[None, :]
        shown = shown & ((token >= states)[:, None] | (index < at + states)[None, :])
        score = tl.where(shown, score, _NOTHING)
        highest = tl.maximum(most, tl.max(score, 1))
        weight = tl.where(shown, tl.exp(score - highest[:, None]), 0.0)
        fade = tl.exp(most - highest)
        total, most = total * fade + tl.sum(weight, 1), highest
        value = tl.load(values + cached + index[:, None] * D + dims[None, :], mask=inside[:, None], other=0.0)
        mixed = tl.dot(weight.to(value.dtype), value, mixed * fade[:, None], input_precision="ieee")
    finishes = True
    if SPLITS > 1:
        count = tl.num_programs(2) // KV * T * HEADS
        tl.store(parts + (split * count + place)[:, None] * D + dims[None, :], mixed, mask=there[:, None])
        tl.store(sums + (split * count + place) * 2, most, mask=there)
        tl.store(sums + (split * count + place) * 2 + 1, total, mask=there)
        finishes = _last(counters + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0), SPLITS)
        if finishes:
            most = tl.full([BLOCK_M], _NOTHING, tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            mixed = tl.zeros([BLOCK_M, D], tl.float32)
            for other in range(SPLITS):
                from_ = other * count + place
                theirs = tl.load(sums + from_ * 2, mask=there, other=_NOTHING, cache_modifier=".cg")
                sum_ = tl.load(sums + from_ * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
                part = tl.load(
                    parts + from_[:, None] * D + dims[None, :], mask=there[:, None], other=0.0, cache_modifier=".cg"
                )
                highest = tl.maximum(most, theirs)
                mine, yours = tl.exp(most - highest), tl.exp(theirs - highest)
                total, most = total * mine + sum_ * yours, highest
                mixed = mixed * mine[:, None] + part * yours[:, None]
    if finishes:
        mixed = mixed / tl.where(there, total, 1.0)[:, None]
        tl.store(out + place[:, None] * D + dims[None, :], mixed.to(out.dtype.element_ty), mask=there[:, None])


@triton.jit
def _turn(
    qkv, cos, sin, q, keys, values, T, at, C, stride, turns,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token's heads [HEADS + 2 KV, D]: turned queries to q [B, KV, T, HEADS / KV, D], the rest as `project`."""
    HALF: tl.constexpr = D // 2
    GROUP: tl.constexpr = HEADS // KV
    batch, token = (tl.program_id(0) // T).to(tl.int64), tl.program_id(0) % T
    head, number = tl.arange(0, BLOCK)[:, None], tl.arange(0, HALF)[None, :]
    place = qkv + tl.program_id(0).to(tl.int64) * (HEADS + 2 * KV) * D + head * D + number
    there = head < HEADS + 2 * KV
    left = tl.load(place, mask=there, other=0.0).to(tl.float32)
    right = tl.load(place + HALF, mask=there, other=0.0).to(tl.float32)
    angle = (batch * turns + token) * HALF + number
    along = tl.where(head < HEADS + KV, tl.load(cos + angle), 1.0)
    across = tl.where(head < HEADS + KV, tl.load(sin + angle), 0.0)
    kind = q.dtype.element_ty
    first, second = (left * along - right * across).to(kind), (right * along + left * across).to(kind)
    place = q + (((batch * KV + head // GROUP) * T + token) * GROUP + head % GROUP) * D + number
    tl.store(place, first, mask=head < HEADS)
    tl.store(place + HALF, second, mask=head < HEADS)
    place = keys + (batch * stride + (head - HEADS) * C + at + token) * D + number
    tl.store(place, first, mask=(head >= HEADS) & (head < HEADS + KV))
    tl.store(place + HALF, second, mask=(head >= HEADS) & (head < HEADS + KV))
    place = values + (batch * stride + (head - HEADS - KV) * C + at + token) * D + number
    tl.store(place, first, mask=(head >= HEADS + KV) & there)
    tl.store(place + HALF, second, mask=(head >= HEADS + KV) & there)


@triton.jit
def _weigh(
    scores, seen, rows, width, length, states, at, C, scale,
    KV: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Scores [B * KV, rows, width] become weights, where they are; who sees whom is as in `attend`."""
    row, index = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    place = scores + (tl.program_id(1).to(tl.int64) * rows + row)[:, None] * width + index[None, :]
    there = (row < rows)[:, None] & (index < width)[None, :]
    inside = index < length
    shown = (tl.load(seen + tl.program_id(1) // KV * C + index, mask=inside, other=0) != 0) & inside
    shown = shown[None, :] & ((row // GROUP >= states)[:, None] | (index < at + states)[None, :])
    score = tl.where(shown, tl.load(place, mask=there, other=0.0).to(tl.float32) * scale, _NOTHING)
    weight = tl.where(shown, tl.exp(score - tl.max(score, 1)[:, None]), 0.0)
    weight = weight / tl.sum(weight, 1)[:, None]
    tl.store(place, weight.to(scores.dtype.element_ty), mask=there)
