"""Attention's forward in Triton: an online softmax over blocks of keys.

A program has a block of queries of one head. Where there are few queries, it has those of all heads that share a key
head (PACK), and several programs share the keys (SPLIT), whose results `merge` puts together.
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
    sequence_of,
    tile_of,
)
from multimax.ops.jit import dot, narrow


@triton.jit
def _tiles(
    acc, top, total, begin, end, real, q, k_, k_row, v_, v_row, i, keys, first, last, width, value_width,
    mask, mask_row, mask_column, bias, bias_row, bias_column, coefs, knots, scale, seed, head, below,
    ORDER: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, EDGE: tl.constexpr,
    FLOOR: tl.constexpr, MASK_FLOOR: tl.constexpr, BIAS_FLOOR: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, EVEN: tl.constexpr, SKIP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The keys from begin to end, some of which lie outside of the band if EDGE."""
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
            _, s = modulated(
                z, i, j, inside, mask, mask_row, mask_column, bias, bias_row, bias_column, coefs, knots, scale,
                ORDER, MASK, BIAS, EDGE, MASK_FLOOR, BIAS_FLOOR,
            )  # fmt: skip
            higher = tl.maximum(top, tl.max(s, 1))
            base = tl.where(higher <= FLOOR * UNIT, 0.0, higher)  # nothing but masked scores
            p = tl.exp2(s * (LOG2_E * REACH) - (base * (LOG2_E * REACH))[:, None])
            # subtracted first: 1 if the largest stays, where a fused product would leave its rounding, tile after tile
            factor = tl.exp2((top - base) * (LOG2_E * REACH))
            more = tl.sum(p, 1)
            v = load_rows(v_, column, v_row, dv, there, value_width, EDGE, EVEN)
            if not SKIP or any_of(real & (more != 0)):  # if all weights are 0, nothing changes
                total = total * factor + more
                if DROPOUT:
                    p = tl.where(kept(seed, head, i, j, below), p, 0.0)
                acc = dot(narrow(p, v.dtype), v, acc * factor[:, None], PRECISION)
                top = higher
    return acc, top, total


@triton.jit
def forward(
    q_, k_, v_, coefs_, knots_, mask_, bias_, query_starts, key_starts, seed_, out_, rest_, stats, parts,
    programs, heads, group, queries, keys, width, value_width, sequences, splits, split_keys,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    mask_batch, mask_head, mask_row, mask_column, bias_batch, bias_head, bias_row, bias_column,
    stats_batch, stats_head, plane, scale, below, kept_scale, left, right,
    ORDER: tl.constexpr, SETS: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, DROPOUT: tl.constexpr, VARLEN: tl.constexpr, REST: tl.constexpr,
    PACK: tl.constexpr, SPLIT: tl.constexpr, FLOOR: tl.constexpr, MASK_FLOOR: tl.constexpr, BIAS_FLOOR: tl.constexpr,
    PRECISION: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """Output, what rounding took from it (REST), and of each row the largest s and the sum of exp(s - largest); of a
    part of the keys, if SPLIT, to `parts` instead."""
    tile, outer = tile_of(programs)
    part = 0
    if SPLIT:
        part = tile % splits
        tile = tile // splits
    b = outer // (heads // group if PACK else heads)
    head = outer % (heads // group if PACK else heads)
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
    limit = queries
    if PACK:  # rows are (head in the group, query)
        limit = queries * group
        key_head = head
        row_head = head * group + row // queries
        i = row % queries
        low, high = 0, queries - 1
    else:
        key_head = head // group
        row_head = tl.full((BLOCK_M,), head, tl.int32)
        i = row
        low, high = tile * BLOCK_M, min(tile * BLOCK_M + BLOCK_M, queries) - 1
    if tile * BLOCK_M >= limit:
        return
    real = row < limit
    if not VARLEN:
        b64 = b.to(tl.int64)
        q_ += b64 * q_batch
        k_ += b64 * k_batch
        v_ += b64 * v_batch
        out_ += b64 * o_batch
        rest_ += b64 * o_batch
        mask_ += b64 * mask_batch
        bias_ += b64 * bias_batch
        stats += b64 * stats_batch
    k_ += key_head.to(tl.int64) * k_head
    v_ += key_head.to(tl.int64) * v_head
    d = tl.arange(0, D)
    dv = tl.arange(0, DV)
    at = (row_head.to(tl.int64) * q_head + (first_query + i).to(tl.int64) * q_row)[:, None]
    q = tl.load(q_ + at + d[None, :], mask=real[:, None] & (d < width)[None, :], other=0.0)
    if PACK:
        mask = mask_ + (row_head.to(tl.int64) * mask_head)[:, None]
        bias = bias_ + (row_head.to(tl.int64) * bias_head)[:, None]
        seed_head = (b * heads + row_head)[:, None]
        set_at = (row_head * (2 * ORDER))[:, None] if SETS else 0
    else:
        mask = mask_ + head.to(tl.int64) * mask_head
        bias = bias_ + head.to(tl.int64) * bias_head
        seed_head = b * heads + head
        set_at = head * (2 * ORDER) if SETS else 0
    if PACK and SETS:  # rows that are not there have no head
        set_at = tl.where(real[:, None], set_at, 0)
    coefs, knots = load_curve(coefs_, knots_, set_at, ORDER)
    scale = scale * UNIT
    seed = tl.load(seed_).to(tl.uint64, bitcast=True) if DROPOUT else 0

    first, last = band(queries, keys, left, right, CAUSAL, LEFT, RIGHT)
    start = max(low + first, 0) // BLOCK_N * BLOCK_N
    stop = min(max(high + last, 0), keys)
    # tiles within the band, of keys that are all there
    full_start = tl.cdiv(max(high + first, 0), BLOCK_N) * BLOCK_N
    full_stop = min(max(low + last, 0), keys) // BLOCK_N * BLOCK_N
    if SPLIT:
        start = max(start, part * split_keys)
        stop = min(stop, (part + 1) * split_keys)
        full_start = max(full_start, start)
        full_stop = min(full_stop, stop)
    if PACK or MASK != 0 or BIAS:  # rows that are not there must not be read of a mask
        full_start = max(start, stop)
    full_start = max(full_start, start)
    full_stop = max(full_start, full_stop)

    acc = tl.zeros((BLOCK_M, DV), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    column_i = tl.where(real, i, 0x40000000)[:, None]  # those that are not there see no key at an edge
    begins = (start, full_start, full_stop)  # an edge of the band, what lies within it, and the other edge
    ends = (min(full_start, stop), full_stop, stop)
    for zone in tl.static_range(0 if LEFT or PACK or MASK != 0 or BIAS else 1, 1 if PACK or MASK != 0 or BIAS else 3):
        acc, top, total = _tiles(
            acc, top, total, begins[zone], ends[zone], real, q, k_, k_row, v_, v_row, column_i, keys, first, last,
            width, value_width, mask, mask_row, mask_column, bias, bias_row, bias_column, coefs, knots, scale,
            seed, seed_head, below,
            ORDER, MASK, BIAS, DROPOUT, zone != 1, FLOOR, MASK_FLOOR, BIAS_FLOOR, PRECISION, D, DV, EVEN, SKIP, BLOCK_N,
        )  # fmt: skip

    if DROPOUT:
        acc = acc * kept_scale
    top = top * REACH
    stat = row_head.to(tl.int64) * stats_head + first_query + i
    if SPLIT:
        # (splits, rows in stats' order, 2 + DV): the largest, the sum, the output without its norm
        home = parts + ((part * plane + stat + b * stats_batch) * (2 + DV))
        tl.store(home, top, mask=real)
        tl.store(home + 1, total, mask=real)
        tl.store(home[:, None] + 2 + dv[None, :], acc, mask=real[:, None])
    else:
        top = tl.where(total == 0, 0.0, top)  # nothing took part
        norm = tl.where(total == 0, 0.0, 1.0 / total)
        tl.store(stats + stat, top, mask=real)
        tl.store(stats + plane + stat, total, mask=real)
        acc = acc * norm[:, None]
        home = (row_head.to(tl.int64) * o_head + (first_query + i).to(tl.int64) * o_row)[:, None] + dv[None, :]
        there = real[:, None] & (dv < value_width)[None, :]
        rounded = narrow(acc, out_.dtype.element_ty)
        tl.store(out_ + home, rounded, mask=there)
        if REST:
            tl.store(rest_ + home, narrow(acc - rounded.to(tl.float32), rest_.dtype.element_ty), mask=there)


@triton.jit
def merge(
    parts, out_, rest_, stats, heads, queries, value_width, splits, plane, o_batch, o_head, o_row,
    FLOOR: tl.constexpr, REST: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """One row of attention from what its parts of the keys gave."""
    row = tl.program_id(0).to(tl.int64)
    dv = tl.arange(0, DV)
    top = float("-inf")
    for part in range(splits):
        top = tl.maximum(top, tl.load(parts + (part * plane + row) * (2 + DV)))
    base = tl.where(top <= FLOOR, 0.0, top)
    total = 0.0
    acc = tl.zeros((DV,), tl.float32)
    for part in range(splits):
        at = parts + (part * plane + row) * (2 + DV)
        factor = tl.exp2((tl.load(at) - base) * LOG2_E)
        total += tl.load(at + 1) * factor
        acc += tl.load(at + 2 + dv) * factor
    tl.store(stats + row, tl.where(total == 0, 0.0, base))
    tl.store(stats + plane + row, total)
    acc = acc * tl.where(total == 0, 0.0, 1.0 / total)
    b, h, i = row // queries // heads, row // queries % heads, row % queries
    home = b * o_batch + h * o_head + i * o_row + dv
    rounded = narrow(acc, out_.dtype.element_ty)
    tl.store(out_ + home, rounded, mask=dv < value_width)
    if REST:
        tl.store(rest_ + home, narrow(acc - rounded.to(tl.float32), rest_.dtype.element_ty), mask=dv < value_width)
