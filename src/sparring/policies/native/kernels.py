"""A denoising step's layer as five kernels of Triton's, for GPUs; compiled code takes a dozen, and copies the cache.

A small batch is bound by how many kernels there are and by reading weights: norms, turns, sums and the activation ride
on the products. Importing this needs triton, which torch brings where there are GPUs.

Letters: B rows, T tokens of a step, M = B * T, K and N width before and after a product, C tokens that the cache holds,
d numbers of a head.
"""

import triton
import triton.language as tl

_EPSILON = tl.constexpr(1e-6)
_NOTHING = tl.constexpr(-1e30)


@triton.jit
def _wait(EARLY: tl.constexpr):
    """Until what the kernel before has written is there; the next one may come and wait, too."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def normed(x, scale, out, K, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    _wait(EARLY)
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(x + row * K + columns, mask=columns < K, other=0.0).to(tl.float32)
    factor = 1.0 + tl.load(scale + columns, mask=columns < K, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / K + _EPSILON) * factor
    tl.store(out + row * K + columns, value.to(out.dtype.element_ty), mask=columns < K)


@triton.jit
def _twice(x, scale, weight, rows, M, first, second, K: tl.constexpr, NORM: tl.constexpr, BLOCK_K: tl.constexpr):
    """Two products with rows of x [M, K]: weight's rows `first` and `second`. NORM: of normed x, scaled at the end."""
    left = tl.zeros([rows.shape[0], first.shape[0]], tl.float32)
    right = tl.zeros([rows.shape[0], first.shape[0]], tl.float32)
    squares = tl.zeros([rows.shape[0]], tl.float32)
    for start in range(0, K, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        value = tl.load(x + rows[:, None] * K + inner[None, :], mask=rows[:, None] < M, other=0.0)
        if NORM:
            exact = value.to(tl.float32)
            squares += tl.sum(exact * exact, 1)
            value = (exact * (1.0 + tl.load(scale + inner).to(tl.float32))[None, :]).to(weight.dtype.element_ty)
        left = tl.dot(value, tl.load(weight + first[None, :] * K + inner[:, None]), left, input_precision="ieee")
        right = tl.dot(value, tl.load(weight + second[None, :] * K + inner[:, None]), right, input_precision="ieee")
    if NORM:
        size = tl.rsqrt(squares / K + _EPSILON)[:, None]
        left, right = left * size, right * size
    # rounded as if it had been stored
    kind = weight.dtype.element_ty
    return left.to(kind).to(tl.float32), right.to(kind).to(tl.float32)


@triton.jit
def project(
    x, scale, weight, cos, sin, q, keys, values, M, T, at, C, stride, turns,
    K: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
    NORM: tl.constexpr, EARLY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Norm, product and turn; queries to q [M, HEADS, D], keys and values [B, KV, C, D] from token `at` on.

    Rows of the batch lie `stride` tokens apart there.
    """
    _wait(EARLY)
    HALF: tl.constexpr = D // 2
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head, part = tl.program_id(1) // (HALF // BLOCK_N), tl.program_id(1) % (HALF // BLOCK_N)
    # number i and i + d/2 of a head are turned together
    number = part * BLOCK_N + tl.arange(0, BLOCK_N)
    first = head * D + number
    left, right = _twice(x, scale, weight, rows, M, first, first + HALF, K, NORM, BLOCK_K)
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
def gate(
    x, scale, weight, out, M,
    K: tl.constexpr, N: tl.constexpr,
    NORM: tl.constexpr, EARLY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Norm, product and gelu(first half) * second half: [M, K] -> [M, N]."""
    _wait(EARLY)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    gate, up = _twice(x, scale, weight, rows, M, columns, columns + N, K, NORM, BLOCK_K)
    # 0.5 (1 + tanh(z)) = sigmoid(2 z)
    open_ = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    kind = out.dtype.element_ty
    product = open_.to(kind).to(tl.float32) * up
    tl.store(out + rows[:, None] * N + columns[None, :], product.to(kind), mask=(rows < M)[:, None])


@triton.jit
def _last(counter, SPLITS: tl.constexpr):
    """Whether the others that share this counter have stored their part. It is zero again after the last."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.atomic_xchg(counter, 0)
    return last


@triton.jit
def add(
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
def attend(
    q, keys, values, seen, out, parts, sums, counters, T, told, at, C, stride, scale,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
    BLOCKS: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Heads that share keys are stacked as if they were more queries. The first `told` tokens do not see the rest."""
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
        shown = shown & ((token >= told)[:, None] | (index < at + told)[None, :])
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
