"""The row functions in Triton.

A program handles some rows of (rows, K). Rows are counted over up to four axes, each with a stride for every tensor, so
that layouts need no copies. Rows that fit a tile are read once; longer ones in pieces, with a running maximum and sum.
"""

import triton
import triton.language as tl

from multimax.ops.jit import load_params, narrow, param_terms, sigma, slope

MULTIMAX = tl.constexpr(0)
LOG_MULTIMAX = tl.constexpr(1)
MODULATE = tl.constexpr(2)


@triton.jit
def _offset(row, size1, size2, size3, stride0, stride1, stride2, stride3):
    """Where a row lies, from its number over four axes, the last of which counts first."""
    i3 = row % size3
    rest = row // size3
    i2 = rest % size2
    rest = rest // size2
    i1 = rest % size1
    i0 = rest // size1
    return i0 * stride0 + i1 * stride1 + i2 * stride2 + i3 * stride3


@triton.jit
def _places(first, rows, columns, column):
    """Where the entries of rows in those columns lie: further than 32 bits count, maybe."""
    return first + rows[:, None] + columns[None, :].to(tl.int64) * column


@triton.jit
def _entries(
    x_, mask, x_rows, m_rows, real, start, length, x_column, m_column,
    HAS_MASK: tl.constexpr, FLOOR: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A piece of each row: its columns, which entries are there, the entries, and which of them take no part."""
    columns = start + tl.arange(0, BLOCK)
    there = real[:, None] & (columns < length)[None, :]
    x = tl.load(_places(x_, x_rows, columns, x_column), mask=there, other=0.0).to(WIDE)
    off = (x <= FLOOR) | (there == 0)
    if HAS_MASK:
        on = tl.load(_places(mask, m_rows, columns, m_column), mask=there, other=0)
        off = off | (on == 0)
    return columns, there, x, off


@triton.jit
def _scores(x, off, coefs, knots, ORDER: tl.constexpr):
    """sigma(x), -inf where masked; sigma of a masked entry is never taken."""
    return tl.where(off, float("-inf"), sigma(tl.where(off, 0.0, x), coefs, knots, ORDER))


@triton.jit
def _added(s, top, total):
    """A row's largest score and its sum of exp(score - largest), with one more piece."""
    higher = tl.maximum(top, tl.max(s, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, total * tl.exp(top - base) + tl.sum(tl.exp(s - base[:, None]), 1)


@triton.jit
def _result(x, s, off, top, norm, KIND: tl.constexpr):
    """The row function of that kind, of its scores."""
    if KIND == MULTIMAX:
        return tl.where(off, 0.0, tl.exp(s - top[:, None]) * norm[:, None])
    elif KIND == LOG_MULTIMAX:
        return tl.where(off, float("-inf"), (s - top[:, None]) - norm[:, None])
    else:
        return tl.where(off, x, s)


@triton.jit
def forward(
    x_, mask, coefs_, knots_, y_, stats,
    rows, length, size1, size2, size3,
    x0, x1, x2, x3, x_column,
    m0, m1, m2, m3, m_column,
    s0, s1, s2, s3,
    y0, y1, y2, y3, y_column,
    r0, r1, r2, r3,
    KIND: tl.constexpr, ORDER: tl.constexpr, HAS_MASK: tl.constexpr, HAS_STATS: tl.constexpr,
    SETS: tl.constexpr, FLOOR: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ONE_TILE: tl.constexpr,
):  # fmt: skip
    """The row function of that kind, and of each row its largest score and the sum of exp(score - largest)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    x_rows = _offset(row, size1, size2, size3, x0, x1, x2, x3)
    y_rows = _offset(row, size1, size2, size3, y0, y1, y2, y3)
    m_rows = _offset(row, size1, size2, size3, m0, m1, m2, m3)
    if SETS:
        sets = tl.where(real, _offset(row, size1, size2, size3, s0, s1, s2, s3), 0)[:, None] * (2 * ORDER)
        coefs, knots = load_params(coefs_ + sets, ORDER, WIDE), load_params(knots_ + sets, ORDER, WIDE)
    else:
        coefs, knots = load_params(coefs_, ORDER, WIDE), load_params(knots_, ORDER, WIDE)

    top = tl.full((ROWS,), float("-inf"), WIDE)
    total = tl.zeros((ROWS,), WIDE)
    norm = total
    if KIND != MODULATE:
        if ONE_TILE:
            columns, there, x, off = _entries(
                x_, mask, x_rows, m_rows, real, 0, length, x_column, m_column, HAS_MASK, FLOOR, WIDE, BLOCK
            )
            s = _scores(x, off, coefs, knots, ORDER)
            top, total = _added(s, top, total)
        else:
            for start in range(0, length, BLOCK):
                columns, there, x, off = _entries(
                    x_, mask, x_rows, m_rows, real, start, length, x_column, m_column, HAS_MASK, FLOOR, WIDE, BLOCK
                )
                top, total = _added(_scores(x, off, coefs, knots, ORDER), top, total)
        top = tl.where(top == float("-inf"), 0.0, top)
        empty = total == 0
        total = tl.where(empty, 1.0, total)
        norm = tl.where(empty, 0.0, 1.0 / total if KIND == MULTIMAX else tl.log(total))
        if HAS_STATS:
            at = _offset(row, size1, size2, size3, r0, r1, r2, r3)
            tl.store(stats + at, top, mask=real)
            tl.store(stats + rows + at, norm, mask=real)

    if ONE_TILE and KIND != MODULATE:
        y = _result(x, s, off, top, norm, KIND)
        tl.store(_places(y_, y_rows, columns, y_column), narrow(y, y_.dtype.element_ty), mask=there)
    else:
        for start in range(0, length, BLOCK):
            columns, there, x, off = _entries(
                x_, mask, x_rows, m_rows, real, start, length, x_column, m_column, HAS_MASK, FLOOR, WIDE, BLOCK
            )
            y = _result(x, _scores(x, off, coefs, knots, ORDER), off, top, norm, KIND)
            tl.store(
                _places(y_, y_rows, columns, y_column),
                narrow(y, y_.dtype.element_ty),
                mask=there,
            )


@triton.jit
def _weights(
    saved, saved_rows, columns, saved_column, s, top, norm, there,
    KIND: tl.constexpr, HAS_STATS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The forward's weights: from its output, or again from the rows' statistics."""
    if HAS_STATS:
        if KIND == MULTIMAX:
            return tl.exp(s - top[:, None]) * norm[:, None]
        else:
            return tl.exp((s - top[:, None]) - norm[:, None])
    else:
        y = tl.load(_places(saved, saved_rows, columns, saved_column), mask=there, other=0.0).to(WIDE)
        return y if KIND == MULTIMAX else tl.exp(y)


@triton.jit
def backward(
    grad_, x_, saved, mask, coefs_, knots_, out_, sums,
    rows, length, size1, size2, size3,
    g0, g1, g2, g3, g_column,
    x0, x1, x2, x3, x_column,
    y0, y1, y2, y3, y_column,
    m0, m1, m2, m3, m_column,
    s0, s1, s2, s3,
    o0, o1, o2, o3, o_column,
    KIND: tl.constexpr, ORDER: tl.constexpr, HAS_MASK: tl.constexpr, HAS_STATS: tl.constexpr, PARAMS: tl.constexpr,
    SETS: tl.constexpr, FLOOR: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of x, and of the parameters one partial sum per program, or per row if there are several sets."""
    program = tl.program_id(0).to(tl.int64)
    row = program * ROWS + tl.arange(0, ROWS)
    real = row < rows
    x_rows = _offset(row, size1, size2, size3, x0, x1, x2, x3)
    g_rows = _offset(row, size1, size2, size3, g0, g1, g2, g3)
    y_rows = _offset(row, size1, size2, size3, y0, y1, y2, y3)
    m_rows = _offset(row, size1, size2, size3, m0, m1, m2, m3)
    o_rows = _offset(row, size1, size2, size3, o0, o1, o2, o3)
    if SETS:
        sets = tl.where(real, _offset(row, size1, size2, size3, s0, s1, s2, s3), 0)[:, None] * (2 * ORDER)
        coefs, knots = load_params(coefs_ + sets, ORDER, WIDE), load_params(knots_ + sets, ORDER, WIDE)
    else:
        coefs, knots = load_params(coefs_, ORDER, WIDE), load_params(knots_, ORDER, WIDE)
    top = tl.zeros((ROWS,), WIDE)
    norm = tl.zeros((ROWS,), WIDE)
    if HAS_STATS:  # (2, rows)
        top = tl.load(saved + y_rows, mask=real, other=0.0)
        norm = tl.load(saved + rows + y_rows, mask=real, other=0.0)

    # A row that fits a tile stays in the cache from the first loop, of one turn then, to the second.
    dot = tl.zeros((ROWS,), WIDE)
    if KIND != MODULATE:
        for start in range(0, length, BLOCK):
            columns, there, x, off = _entries(
                x_, mask, x_rows, m_rows, real, start, length, x_column, m_column, HAS_MASK, FLOOR, WIDE, BLOCK
            )
            g = tl.load(_places(grad_, g_rows, columns, g_column), mask=there, other=0.0).to(WIDE)
            g = tl.where(off, 0.0, g)
            if KIND == MULTIMAX:
                s = _scores(x, off, coefs, knots, ORDER)
                g = g * _weights(saved, y_rows, columns, y_column, s, top, norm, there, KIND, HAS_STATS, WIDE)
            dot += tl.sum(tl.where(off, 0.0, g), 1)

    parts = ()
    for _ in tl.static_range(4 * ORDER):
        parts = parts + (tl.zeros((ROWS,), WIDE),)
    for start in range(0, length, BLOCK):
        columns, there, x, off = _entries(
            x_, mask, x_rows, m_rows, real, start, length, x_column, m_column, HAS_MASK, FLOOR, WIDE, BLOCK
        )
        ds = tl.load(_places(grad_, g_rows, columns, g_column), mask=there, other=0.0).to(WIDE)
        safe = tl.where(off, 0.0, x)
        if KIND != MODULATE:
            s = tl.where(off, float("-inf"), sigma(safe, coefs, knots, ORDER))
            p = _weights(saved, y_rows, columns, y_column, s, top, norm, there, KIND, HAS_STATS, WIDE)
            ds = p * (ds - dot[:, None]) if KIND == MULTIMAX else ds - p * dot[:, None]
            off = off | (s == float("-inf"))
        ds = tl.where(off, 0.0, ds)
        dx = tl.where(ds == 0, 0.0, ds * slope(safe, coefs, knots, ORDER))
        tl.store(
            _places(out_, o_rows, columns, o_column),
            narrow(dx, out_.dtype.element_ty),
            mask=there,
        )
        if PARAMS:
            terms = param_terms(tl.where(ds == 0, 0.0, safe), ds, coefs, knots, ORDER)  # whatever overflows
            more = ()
            for j in tl.static_range(4 * ORDER):
                more = more + (parts[j] + tl.sum(terms[j], 1),)
            parts = more
    if PARAMS:
        for j in tl.static_range(4 * ORDER):
            if SETS:
                tl.store(sums + row * (4 * ORDER) + j, parts[j], mask=real)
            else:
                tl.store(sums + program * (4 * ORDER) + j, tl.sum(parts[j], 0))
