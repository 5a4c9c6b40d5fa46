"""Attention's backward in Triton: the weights of a tile again, and the gradients that follow from them.

With the forward's largest s and sums, p = exp(s - top) / total, dp = grad_out v (times dropout), ds = p (dp - delta)
and dx = ds sigma'(x). `of_query` has a block of queries and goes over the keys: gradients of the query, and a partial
sum of the parameters' gradients for each program. `of_key` has a block of keys and goes over the queries of all heads
that share it. `of_bias` has a tile of the bias and goes over all that share it. Nothing is added to by two programs.
"""

import triton
import triton.language as tl

from multimax.ops.attention.triton.scores import (
    LOG2_E,
    REACH,
    UNIT,
    any_left,
    any_of,
    band,
    kept,
    load_curve,
    load_rows,
    modulated,
    param_factors,
    param_terms,
    sequence_of,
    slope,
    tile_of,
)
from multimax.ops.jit import dot, narrow


@triton.jit
def prepare(
    grad_, out_, rest_, grad_lse, stats, delta_, rows, heads, queries, value_width,
    g_batch, g_head, g_row, o_batch, o_head, o_row,
    REST: tl.constexpr, LSE: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Four planes, of which this writes three. Of each row, in the order of stats: delta, which is the sum of grad_out
    out, less the gradient of the log-sum; the largest s, to the base 2, infinite where there is nothing, so that all
    weights are 0; and 1 / total. Not one log-sum: beside a large s, total would be lost."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = row < rows
    b, h, i = row // queries // heads, row // queries % heads, row % queries
    dv = tl.arange(0, DV)
    there = real[:, None] & (dv < value_width)[None, :]
    grad = tl.load(grad_ + (b * g_batch + h * g_head + i * g_row)[:, None] + dv[None, :], mask=there, other=0.0)
    at = (b * o_batch + h * o_head + i * o_row)[:, None] + dv[None, :]
    out = tl.load(out_ + at, mask=there, other=0.0).to(tl.float32)
    if REST:
        out += tl.load(rest_ + at, mask=there, other=0.0).to(tl.float32)
    result = tl.sum(grad.to(tl.float32) * out, 1)
    if LSE:
        result -= tl.load(grad_lse + row, mask=real, other=0.0)
    tl.store(delta_ + row, result, mask=real)
    total = tl.load(stats + rows + row, mask=real, other=0.0)
    top = tl.load(stats + row, mask=real, other=0.0) * LOG2_E
    tl.store(delta_ + rows + row, tl.where(total == 0, float("inf"), top), mask=real)
    tl.store(delta_ + 2 * rows + row, tl.where(total == 0, 0.0, 1.0 / total), mask=real)


@triton.jit
def _folded(t, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums along the rows, four for each: those of columns 2c and 2c + 1 of every eight, which one thread holds in the
    tiles of tensor cores and need not ask the others for."""
    return tl.sum(tl.sum(tl.reshape(t, (ROWS, COLUMNS // 8, 4, 2)), 3), 1)


@triton.jit
def _query_tiles(
    dq, parts, left, mean, begin, end, q, grad, top, norm, minus, k_, k_row, v_, v_row, i, keys, first, last, width,
    value_width, mask, mask_row, mask_column, bias, bias_row, bias_column, coefs, knots, scale, seed, head, below,
    kept_scale,
    ORDER: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, PARAMS: tl.constexpr,
    EDGE: tl.constexpr, FLOOR: tl.constexpr, MASK_FLOOR: tl.constexpr, BIAS_FLOOR: tl.constexpr,
    PRECISION: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """The keys from begin to end. minus is delta times norm."""
    d = tl.arange(0, D)
    dv = tl.arange(0, DV)
    for start in range(begin, end, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)
        j = column[None, :]
        there = column < keys
        inside = (j >= i + first) & (j < i + last) & (j < keys) if EDGE else (i >= 0) & (j >= 0)
        wanted = True
        if MASK != 0:
            wanted = any_left(mask, i, j, inside, mask_row, mask_column, MASK, MASK_FLOOR)
        if wanted:
            k = load_rows(k_, column, k_row, d, there, width, EDGE, EVEN)
            z = dot(q, tl.trans(k), None, PRECISION)
            x, s = modulated(
                z, i, j, inside, mask, mask_row, mask_column, bias, bias_row, bias_column, coefs, knots, scale,
                ORDER, MASK, BIAS, EDGE, MASK_FLOOR, BIAS_FLOOR,
            )  # fmt: skip
            p = tl.exp2(s * (LOG2_E * REACH) - top[:, None])  # but for its norm
            v = load_rows(v_, column, v_row, dv, there, value_width, EDGE, EVEN)
            if not SKIP or any_of(tl.sum(p, 1) != 0):  # if all weights are 0, so are the gradients
                dp = dot(grad, tl.trans(v), None, PRECISION)
                if DROPOUT:
                    dp = tl.where(kept(seed, head, i, j, below), dp * kept_scale, 0.0)
                ds = p * (dp * norm[:, None] - minus[:, None])
                dx = ds * slope(x, coefs, knots, ORDER)
                dq = dot(narrow(dx, k.dtype), k, dq, PRECISION)
                if PARAMS or BIAS:
                    left += _folded(ds, BLOCK_M, BLOCK_N)
                if PARAMS:
                    finite = tl.maximum(x, FLOOR * UNIT) if BIAS else x  # a bias may mask: 0 * inf would be NaN
                    mean += _folded(p * finite, BLOCK_M, BLOCK_N)
                    terms = param_terms(x, ds, knots, ORDER)
                    more = ()
                    for n in tl.static_range(4 * ORDER):
                        more = more + (parts[n] + _folded(terms[n], BLOCK_M, BLOCK_N),)
                    parts = more
    return dq, parts, left, mean


@triton.jit
def of_query(
    grad_, grad_lse, q_, k_, v_, coefs_, knots_, mask_, bias_, query_starts, key_starts, seed_, delta_, dq_, sums,
    programs, heads, group, queries, keys, width, value_width, sequences, tiles,
    g_batch, g_head, g_row, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, d_batch, d_head,
    d_row,
    mask_batch, mask_head, mask_row, mask_column, bias_batch, bias_head, bias_row, bias_column,
    stats_batch, stats_head, plane, scale, below, kept_scale, left, right,
    ORDER: tl.constexpr, SETS: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, DROPOUT: tl.constexpr, VARLEN: tl.constexpr, PARAMS: tl.constexpr,
    LSE: tl.constexpr, FLOOR: tl.constexpr, MASK_FLOOR: tl.constexpr, BIAS_FLOOR: tl.constexpr,
    PRECISION: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of queries, and its share of the parameters' gradients."""
    tile, outer = tile_of(programs)
    b = outer // heads
    head = outer % heads
    # (heads, batches, tiles, order, 2, 2): what one set of parameters gets lies together
    batches = programs // heads
    home = sums + ((head * batches + b).to(tl.int64) * tiles + tile) * (4 * ORDER)
    first_query = 0
    if VARLEN:
        b, tile = sequence_of(tile, query_starts, sequences, BLOCK_M)
        first_query = tl.load(query_starts + b).to(tl.int32)
        first_key = tl.load(key_starts + b).to(tl.int32)
        queries = tl.load(query_starts + b + 1).to(tl.int32) - first_query
        keys = tl.load(key_starts + b + 1).to(tl.int32) - first_key
        k_ += first_key.to(tl.int64) * k_row
        v_ += first_key.to(tl.int64) * v_row
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < queries
    b64, head64 = b.to(tl.int64), head.to(tl.int64)
    key_head = (head // group).to(tl.int64)
    if not VARLEN:
        grad_ += b64 * g_batch
        q_ += b64 * q_batch
        k_ += b64 * k_batch
        v_ += b64 * v_batch
        dq_ += b64 * d_batch
        mask_ += b64 * mask_batch
        bias_ += b64 * bias_batch
        delta_ += b64 * stats_batch
        grad_lse += b64 * stats_batch
    at = head64 * stats_head + first_query + row
    d = tl.arange(0, D)
    dv = tl.arange(0, DV)
    q = load_rows(q_ + head64 * q_head, first_query + row, q_row, d, real, width, True, EVEN)
    grad = load_rows(grad_ + head64 * g_head, first_query + row, g_row, dv, real, value_width, True, EVEN)
    delta = tl.load(delta_ + at, mask=real, other=0.0)
    top = tl.load(delta_ + plane + at, mask=real, other=float("inf"))
    norm = tl.load(delta_ + 2 * plane + at, mask=real, other=0.0)
    set_at = head * (2 * ORDER) if SETS else 0
    coefs, knots = load_curve(coefs_, knots_, set_at, ORDER)
    seed = tl.load(seed_).to(tl.uint64, bitcast=True) if DROPOUT else 0
    k_ += key_head * k_head
    v_ += key_head * v_head
    mask_ += head64 * mask_head
    bias_ += head64 * bias_head

    low, high = tile * BLOCK_M, min(tile * BLOCK_M + BLOCK_M, queries) - 1
    unit_scale = scale * UNIT
    first, last = band(queries, keys, left, right, CAUSAL, LEFT, RIGHT)
    start = max(low + first, 0) // BLOCK_N * BLOCK_N
    stop = min(max(high + last, 0), keys)
    full_start = max(tl.cdiv(max(high + first, 0), BLOCK_N) * BLOCK_N, start)
    full_stop = max(min(max(low + last, 0), keys) // BLOCK_N * BLOCK_N, full_start)
    if tile * BLOCK_M >= queries:  # a tile of packed sequences that there is no need for
        stop = start
        full_start = start
        full_stop = start
    if MASK != 0 or BIAS:
        full_start = max(start, stop)
        full_stop = full_start
    dq = tl.zeros((BLOCK_M, D), tl.float32)
    much = tl.zeros((BLOCK_M, 4), tl.float32)
    mean = tl.zeros((BLOCK_M, 4), tl.float32)
    parts = ()
    for _ in tl.static_range(4 * ORDER):
        parts = parts + (tl.zeros((BLOCK_M, 4), tl.float32),)
    i = tl.where(real, row, 0x40000000)[:, None]  # rows that are not there see no key at an edge
    begins = (start, full_start, full_stop)  # an edge of the band, what lies within it, and the other edge
    ends = (min(full_start, stop), full_stop, stop)
    for zone in tl.static_range(0 if LEFT or MASK != 0 or BIAS else 1, 1 if MASK != 0 or BIAS else 3):
        dq, parts, much, mean = _query_tiles(
            dq, parts, much, mean, begins[zone], ends[zone], q, grad, top, norm, delta * norm, k_, k_row, v_, v_row, i,
            keys, first, last, width, value_width, mask_, mask_row, mask_column, bias_, bias_row, bias_column, coefs,
            knots, unit_scale, seed, b * heads + head, below, kept_scale,
            ORDER, MASK, BIAS, DROPOUT, PARAMS, zone != 1, FLOOR, MASK_FLOOR, BIAS_FLOOR, PRECISION, D, DV, EVEN,
            BLOCK_M, BLOCK_N, SKIP,
        )  # fmt: skip
    there = real[:, None] & (d < width)[None, :]
    pointers = dq_ + head64 * d_head + (first_query + row).to(tl.int64)[:, None] * d_row + d[None, :]
    tl.store(pointers, narrow(dq * scale, dq_.dtype.element_ty), mask=there)
    extra = tl.sum(much, 1)
    if LSE:
        extra -= tl.load(grad_lse + at, mask=real, other=0.0)
    if BIAS:  # delta without its error, for of_bias; see below
        tl.store(delta_ + 3 * plane + at, delta + extra, mask=real)
    if PARAMS:
        # A row's ds add up to 0, or to the gradient of its log-sum, but for the rounding of delta, which all of them
        # share and the parameters' sums would show. What there is too much of it is taken out at the row's mean x; see
        # csrc/attention/backward.h.
        extra = tl.where(real & (top != float("inf")), -extra, 0.0)
        terms = param_terms(tl.sum(mean, 1) * norm, extra, knots, ORDER)
        factors = param_factors(coefs, ORDER)
        for n in tl.static_range(4 * ORDER):
            tl.store(home + n, tl.sum(tl.sum(parts[n], 1) + terms[n], 0) * factors[n])


@triton.jit
def _key_tiles(
    dk, dv, begin, end, k, v, q_, q_row, grad_, g_row, delta_, plane, j, queries, keys, first, last,
    width, value_width, mask, mask_row, mask_column, bias, bias_row, bias_column, coefs, knots, scale, seed, head,
    below, kept_scale,
    ORDER: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, EDGE: tl.constexpr,
    FLOOR: tl.constexpr, MASK_FLOOR: tl.constexpr, BIAS_FLOOR: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """The queries from begin to end. Tiles are transposed: keys along their rows."""
    d = tl.arange(0, D)
    dv_ = tl.arange(0, DV)
    for start in range(begin, end, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        i = row[None, :]
        there = row < queries
        inside = (j >= i + first) & (j < i + last) & (j < keys) & (i < queries) if EDGE else (i >= 0) & (j >= 0)
        wanted = True
        if MASK != 0:
            wanted = any_left(mask, i, j, inside, mask_row, mask_column, MASK, MASK_FLOOR)
        if wanted:
            q = load_rows(q_, row, q_row, d, there, width, EDGE, EVEN)
            z = dot(k, tl.trans(q), None, PRECISION)
            x, s = modulated(
                z, i, j, inside, mask, mask_row, mask_column, bias, bias_row, bias_column, coefs, knots, scale,
                ORDER, MASK, BIAS, EDGE, MASK_FLOOR, BIAS_FLOOR,
            )  # fmt: skip
            top = tl.load(delta_ + plane + row, mask=there, other=float("inf"))
            p = tl.exp2(s * (LOG2_E * REACH) - top[None, :])
            grad = load_rows(grad_, row, g_row, dv_, there, value_width, EDGE, EVEN)
            norm = tl.load(delta_ + 2 * plane + row, mask=there, other=0.0)
            minus = tl.load(delta_ + row, mask=there, other=0.0) * norm
            if not SKIP or any_of(tl.sum(p, 1) != 0):
                dp = dot(v, tl.trans(grad), None, PRECISION)
                factor = norm[None, :]
                if DROPOUT:
                    factor = tl.where(kept(seed, head, i, j, below), kept_scale, 0.0) * factor
                weights = p * factor
                if MASK != 0 or BIAS or EDGE:  # a row's NaN does not reach what it does not see
                    weights = tl.where(s == float("-inf"), 0.0, weights)
                dv = dot(narrow(weights, grad.dtype), grad, dv, PRECISION)
                dx = p * (dp * factor - minus[None, :]) * slope(x, coefs, knots, ORDER)
                dk = dot(narrow(dx, q.dtype), q, dk, PRECISION)
    return dk, dv


@triton.jit
def of_key(
    grad_, q_, k_, v_, coefs_, knots_, mask_, bias_, query_starts, key_starts, seed_, delta_, dk_, dv_,
    programs, heads, group, queries, keys, width, value_width, sequences,
    g_batch, g_head, g_row, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    mask_batch, mask_head, mask_row, mask_column, bias_batch, bias_head, bias_row, bias_column,
    stats_batch, stats_head, plane, scale, below, kept_scale, left, right,
    ORDER: tl.constexpr, SETS: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, DROPOUT: tl.constexpr, VARLEN: tl.constexpr,
    FLOOR: tl.constexpr, MASK_FLOOR: tl.constexpr, BIAS_FLOOR: tl.constexpr,
    PRECISION: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of keys and values."""
    tile, outer = tile_of(programs)
    key_heads = heads // group
    b = outer // key_heads
    key_head = outer % key_heads
    first_query = 0
    first_query64 = 0
    first_key = 0
    if VARLEN:
        b, tile = sequence_of(tile, key_starts, sequences, BLOCK_N)
        first_query = tl.load(query_starts + b).to(tl.int32)
        first_key = tl.load(key_starts + b).to(tl.int32)
        queries = tl.load(query_starts + b + 1).to(tl.int32) - first_query
        keys = tl.load(key_starts + b + 1).to(tl.int32) - first_key
        first_query64 = first_query.to(tl.int64)
    if tile * BLOCK_N >= keys:
        return
    b64, key_head64 = b.to(tl.int64), key_head.to(tl.int64)
    if not VARLEN:
        grad_ += b64 * g_batch
        q_ += b64 * q_batch
        k_ += b64 * k_batch
        v_ += b64 * v_batch
        dk_ += b64 * dk_batch
        dv_ += b64 * dv_batch
        mask_ += b64 * mask_batch
        bias_ += b64 * bias_batch
        delta_ += b64 * stats_batch
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    there = column < keys
    d = tl.arange(0, D)
    dv = tl.arange(0, DV)
    k = load_rows(k_ + key_head64 * k_head, first_key + column, k_row, d, there, width, True, EVEN)
    v = load_rows(v_ + key_head64 * v_head, first_key + column, v_row, dv, there, value_width, True, EVEN)
    seed = tl.load(seed_).to(tl.uint64, bitcast=True) if DROPOUT else 0

    unit_scale = scale * UNIT
    first, last = band(queries, keys, left, right, CAUSAL, LEFT, RIGHT)
    low, high = tile * BLOCK_N, min(tile * BLOCK_N + BLOCK_N, keys) - 1
    # queries that see any of these keys, and those that see all of them
    start = min(max(low - last + 1, 0), queries) // BLOCK_M * BLOCK_M
    stop = min(max(high - first + 1, 0), queries)
    full_start = max(tl.cdiv(max(high - last + 1, 0), BLOCK_M) * BLOCK_M, start)
    full_stop = max(min(max(low - first + 1, 0), queries) // BLOCK_M * BLOCK_M, full_start)
    if MASK != 0 or BIAS:
        full_start = max(start, stop)
        full_stop = full_start
    begins = (start, full_start, full_stop)
    ends = (min(full_start, stop), full_stop, stop)
    grad_k = tl.zeros((BLOCK_N, D), tl.float32)
    grad_v = tl.zeros((BLOCK_N, DV), tl.float32)
    j = column[:, None]
    for member in range(group):
        head = key_head * group + member
        head64 = head.to(tl.int64)
        set_at = head * (2 * ORDER) if SETS else 0
        coefs, knots = load_curve(coefs_, knots_, set_at, ORDER)
        q_at = q_ + head64 * q_head + first_query64 * q_row
        grad_at = grad_ + head64 * g_head + first_query64 * g_row
        delta_at = delta_ + head64 * stats_head + first_query
        mask = mask_ + head64 * mask_head
        bias = bias_ + head64 * bias_head
        for zone in tl.static_range(0 if RIGHT or CAUSAL or MASK != 0 or BIAS else 1, 1 if MASK != 0 or BIAS else 3):
            grad_k, grad_v = _key_tiles(
                grad_k, grad_v, begins[zone], ends[zone], k, v, q_at, q_row, grad_at, g_row, delta_at, plane,
                j, queries, keys, first, last, width, value_width, mask, mask_row, mask_column, bias,
                bias_row, bias_column, coefs, knots, unit_scale, seed, b * heads + head, below, kept_scale,
                ORDER, MASK, BIAS, DROPOUT, zone != 1, FLOOR, MASK_FLOOR, BIAS_FLOOR, PRECISION, D, DV, EVEN,
                BLOCK_M, SKIP,
            )  # fmt: skip
    at = (first_key + column).to(tl.int64)[:, None]
    pointers = dk_ + key_head64 * dk_head + at * dk_row + d[None, :]
    tl.store(pointers, narrow(grad_k * scale, dk_.dtype.element_ty), mask=there[:, None] & (d < width)[None, :])
    pointers = dv_ + key_head64 * dv_head + at * dv_row + dv[None, :]
    tl.store(pointers, narrow(grad_v, dv_.dtype.element_ty), mask=there[:, None] & (dv < value_width)[None, :])


@triton.jit
def of_bias(
    grad_, q_, k_, v_, coefs_, knots_, mask_, bias_, seed_, delta_, out_,
    programs, grid_keys, heads, group, queries, keys, width, value_width, shared_batches, shared_heads, query_tiles,
    key_tiles, g_batch, g_head, g_row, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row, mask_column, bias_batch, bias_head, bias_row, bias_column,
    o_batch, o_head, o_row, o_column, stats_batch, stats_head, plane, scale, below, kept_scale, left, right,
    ORDER: tl.constexpr, SETS: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, DROPOUT: tl.constexpr, SHARED_ROWS: tl.constexpr,
    SHARED_COLUMNS: tl.constexpr, FLOOR: tl.constexpr, MASK_FLOOR: tl.constexpr, BIAS_FLOOR: tl.constexpr,
    PRECISION: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of the bias: sums over the batches, heads, queries and keys that share it."""
    tile, outer = tile_of(programs)
    first_query_tile = tile // grid_keys
    first_key_tile = tile % grid_keys
    first_batch = outer // (heads // shared_heads) * shared_batches
    first_head = outer % (heads // shared_heads) * shared_heads
    d = tl.arange(0, D)
    dv = tl.arange(0, DV)
    seed = tl.load(seed_).to(tl.uint64, bitcast=True) if DROPOUT else 0
    unit_scale = scale * UNIT
    first, last = band(queries, keys, left, right, CAUSAL, LEFT, RIGHT)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for next_batch in range(shared_batches):
        b = first_batch + next_batch
        for next_head in range(shared_heads):
            head = first_head + next_head
            b64, head64 = b.to(tl.int64), head.to(tl.int64)
            key_head = (head // group).to(tl.int64)
            set_at = head * (2 * ORDER) if SETS else 0
            coefs, knots = load_curve(coefs_, knots_, set_at, ORDER)
            for query_tile in range(first_query_tile, first_query_tile + query_tiles):
                row = query_tile * BLOCK_M + tl.arange(0, BLOCK_M)
                real = row < queries
                q = load_rows(q_ + b64 * q_batch + head64 * q_head, row, q_row, d, real, width, True, EVEN)
                grad = load_rows(grad_ + b64 * g_batch + head64 * g_head, row, g_row, dv, real, value_width, True, EVEN)
                at = b64 * stats_batch + head64 * stats_head + row
                top = tl.load(delta_ + plane + at, mask=real, other=float("inf"))
                norm = tl.load(delta_ + 2 * plane + at, mask=real, other=0.0)
                minus = tl.load(delta_ + 3 * plane + at, mask=real, other=0.0) * norm
                i = row[:, None]
                for key_tile in range(first_key_tile, first_key_tile + key_tiles):
                    column = key_tile * BLOCK_N + tl.arange(0, BLOCK_N)
                    j = column[None, :]
                    there = column < keys
                    inside = (j >= i + first) & (j < i + last) & (j < keys) & (i < queries)
                    if any_of(tl.max(inside.to(tl.int32), 1)):
                        k = load_rows(
                            k_ + b64 * k_batch + key_head * k_head, column, k_row, d, there, width, True, EVEN
                        )
                        v = load_rows(
                            v_ + b64 * v_batch + key_head * v_head, column, v_row, dv, there, value_width, True, EVEN
                        )
                        z = dot(q, tl.trans(k), None, PRECISION)
                        x, s = modulated(
                            z, i, j, inside, mask_ + b64 * mask_batch + head64 * mask_head, mask_row, mask_column,
                            bias_ + b64 * bias_batch + head64 * bias_head, bias_row, bias_column, coefs, knots,
                            unit_scale,
                            ORDER, MASK, True, True, MASK_FLOOR, BIAS_FLOOR,
                        )  # fmt: skip
                        p = tl.exp2(s * (LOG2_E * REACH) - top[:, None])
                        dp = dot(grad, tl.trans(v), None, PRECISION)
                        if DROPOUT:
                            dp = tl.where(kept(seed, b * heads + head, i, j, below), dp * kept_scale, 0.0)
                        dx = p * (dp * norm[:, None] - minus[:, None]) * slope(x, coefs, knots, ORDER)
                        total += tl.where(inside, dx, 0.0)
    row = first_query_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    column = first_key_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    home = out_ + first_batch.to(tl.int64) * o_batch + first_head.to(tl.int64) * o_head
    if SHARED_ROWS and SHARED_COLUMNS:
        tl.store(home, tl.sum(tl.sum(total, 1), 0))
    elif SHARED_ROWS:
        tl.store(home + column * o_column, tl.sum(total, 0), mask=column < keys)
    elif SHARED_COLUMNS:
        tl.store(home + row.to(tl.int64) * o_row, tl.sum(total, 1), mask=row < queries)
    else:
        there = (row < queries)[:, None] & (column < keys)[None, :]
        tl.store(home + row.to(tl.int64)[:, None] * o_row + column[None, :] * o_column, total, mask=there)
