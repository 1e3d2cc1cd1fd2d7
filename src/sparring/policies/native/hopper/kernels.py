"""Triton kernels for acting on Hopper GPUs; launch.py says what each does, to which shapes.

With few tokens, weights and launches are the bound: our products fuse turns, sums and the activation. With many, the
GPU's library multiplies, and kernels here do only what lies between its products. Letters: as in launch.py, M = B * T.
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
def project(
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
def gate(
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
def gated(
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
def turn(
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
def weigh(
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
