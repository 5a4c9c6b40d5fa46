"""The rows of the losses in Triton; csrc/loss/loss.h has the formulas, and the order of the sums.

A program handles some rows, piece by piece. Each place of a piece carries sums of its own, which are put together at
the end: so rows are read once, and nothing is exchanged between threads on the way.
"""

import triton
import triton.language as tl

from multimax.ops.jit import load_params, param_terms, sigma, slope

TOP = tl.constexpr(0)
TOTAL = tl.constexpr(1)
SCORE = tl.constexpr(2)
MASS = tl.constexpr(3)
DOT = tl.constexpr(4)
SPREAD = tl.constexpr(5)
BEST = tl.constexpr(6)


@triton.jit
def _wanted(
    target, weight, row, columns, there, target_stride,
    INDICES: tl.constexpr, HAS_WEIGHT: tl.constexpr, UNIFORM: tl.constexpr, SHARE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """q of a piece, but for an index."""
    q = tl.full(there.shape, UNIFORM, WIDE)
    if not INDICES:
        q += SHARE * tl.load(target + row[:, None] * target_stride + columns[None, :], mask=there, other=0.0).to(WIDE)
    if HAS_WEIGHT:
        q *= tl.load(weight + columns[None, :], mask=there, other=0.0)
    return tl.where(there, q, 0.0)


@triton.jit
def _times(a, b):
    """a b, and 0 where a is 0, whatever b."""
    return tl.where(a == 0.0, 0.0, a * b)


@triton.jit
def _target_of(target, row, real, length, first_class, ignore_index, INDICES: tl.constexpr):
    """Which rows count, and the entry that their index points to; -1 if it lies in another part of the row, or
    nowhere: no index, however wrong, reaches memory that is not the row's."""
    entry = tl.full(row.shape, -1, tl.int64)
    counted = real
    if INDICES:
        index = tl.load(target + row, mask=real, other=0)
        counted = real & (index != ignore_index)
        here = counted & (index >= first_class) & (index < first_class + length)
        entry = tl.where(here, index - first_class, -1)
    return counted, entry


@triton.jit
def forward(
    x_, target, weight, coefs_, knots_, planes,
    rows, length, x_stride, target_stride, first_class, ignore_index,
    ORDER: tl.constexpr, INDICES: tl.constexpr, HAS_WEIGHT: tl.constexpr, UNIFORM: tl.constexpr, SHARE: tl.constexpr,
    FULL: tl.constexpr, FLOOR: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums of each row, (7, rows); 0 for rows that do not count."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    coefs, knots = load_params(coefs_, ORDER, WIDE), load_params(knots_, ORDER, WIDE)
    counted, entry = _target_of(target, row, real, length, first_class, ignore_index, INDICES)
    x_rows = x_ + row[:, None] * x_stride
    DENSE: tl.constexpr = UNIFORM != 0 or not INDICES

    top = tl.full((ROWS, BLOCK), float("-inf"), WIDE)
    total = tl.zeros((ROWS, BLOCK), WIDE)
    mass = tl.zeros((ROWS, BLOCK), WIDE)
    dot = tl.zeros((ROWS, BLOCK), WIDE)
    spread = tl.zeros((ROWS, BLOCK), WIDE)
    best = tl.zeros((ROWS, BLOCK), tl.int32)
    for start in range(0, length, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        there = counted[:, None] & (columns < length)[None, :]
        x = tl.load(x_rows + columns[None, :], mask=there, other=float("-inf")).to(WIDE)
        off = x <= FLOOR
        s = tl.where(off, float("-inf"), sigma(tl.where(off, 0.0, x), coefs, knots, ORDER))
        higher = s > top
        absent = s == float("-inf")
        below = tl.where(absent, 0.0, tl.where(higher, top - s, s - top))  # of the lower of the two
        e = tl.where(absent, 0.0, tl.exp(below))
        if DENSE:
            q = _wanted(target, weight, row, columns, there, target_stride, INDICES, HAS_WEIGHT, UNIFORM, SHARE, WIDE)
            # what is not there and not wanted costs nothing; what is wanted all the same, infinitely much
            dot += tl.where(higher, _times(mass, below), _times(q, tl.where(absent, s, below)))
            mass += tl.where(off, 0.0, q)
        if FULL:
            spread = tl.where(higher, _times(e, spread + _times(total, below)), spread + _times(e, below))
            best = tl.where(higher, columns[None, :].to(tl.int32), best)
        total = tl.where(higher, total * e + 1.0, total + e)
        top = tl.where(higher, s, top)

    largest = tl.max(top, 1)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    below = tl.where(top == largest[:, None], 0.0, top - base[:, None])
    e = tl.exp(below)
    # nothing finite to measure from: NaN, as a NaN among the entries gives
    whole = tl.where(largest == float("inf"), float("nan"), tl.sum(_times(total, e), 1))
    tl.store(planes + TOP * rows + row, tl.where(counted, largest, 0.0), mask=real)
    tl.store(planes + TOTAL * rows + row, whole, mask=real)

    found = entry >= 0
    x_found = tl.load(x_ + row * x_stride + entry, mask=found, other=0.0).to(WIDE)
    off_found = x_found <= FLOOR
    score = tl.where(off_found, float("-inf"), sigma(tl.where(off_found, 0.0, x_found), coefs, knots, ORDER))
    tl.store(planes + SCORE * rows + row, tl.where(found, score, 0.0), mask=real)

    nothing = tl.zeros((ROWS,), WIDE)
    tl.store(planes + MASS * rows + row, tl.sum(mass, 1) if DENSE else nothing, mask=real)
    tl.store(planes + DOT * rows + row, tl.sum(dot + _times(mass, below), 1) if DENSE else nothing, mask=real)
    spread = _times(e, spread + _times(total, below))
    tl.store(planes + SPREAD * rows + row, tl.sum(spread, 1) if FULL else nothing, mask=real)
    first = tl.min(tl.where(top == largest[:, None], best, length), 1)
    first = tl.where(largest == float("-inf"), -1, first + first_class).to(WIDE)
    tl.store(planes + BEST * rows + row, tl.where(counted, first, 0.0) if FULL else nothing, mask=real)


@triton.jit
def backward(
    x_, target, weight, coefs_, knots_, top_, total_, scale_, p_scale_, out_, parts,
    rows, length, x_stride, target_stride, out_stride, first_class, ignore_index,
    ORDER: tl.constexpr, INDICES: tl.constexpr, HAS_WEIGHT: tl.constexpr, UNIFORM: tl.constexpr, SHARE: tl.constexpr,
    PARAMS: tl.constexpr, FLOOR: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of x, which may be written over it, and one partial sum per program of those of the parameters.

    That of s is p_scale p - scale q. An entry is read and written once, by the same thread.
    """
    program = tl.program_id(0).to(tl.int64)
    row = program * ROWS + tl.arange(0, ROWS)
    real = row < rows
    coefs, knots = load_params(coefs_, ORDER, WIDE), load_params(knots_, ORDER, WIDE)
    counted, entry = _target_of(target, row, real, length, first_class, ignore_index, INDICES)
    x_rows = x_ + row[:, None] * x_stride
    out_rows = out_ + row[:, None] * out_stride
    DENSE: tl.constexpr = UNIFORM != 0 or not INDICES

    top = tl.load(top_ + row, mask=real, other=0.0).to(WIDE)
    scale = tl.load(scale_ + row, mask=real, other=0.0)
    p_scale = tl.load(p_scale_ + row, mask=real, other=0.0) / tl.load(total_ + row, mask=real, other=1.0).to(WIDE)
    wish = SHARE * scale
    if HAS_WEIGHT:
        wish *= tl.load(weight + entry, mask=entry >= 0, other=0.0)

    sums = ()
    for _ in tl.static_range(4 * ORDER if PARAMS else 0):
        sums = sums + (tl.zeros((ROWS, BLOCK), WIDE),)
    for start in range(0, length, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = real[:, None] & (columns < length)[None, :]
        there = counted[:, None] & inside
        x = tl.load(x_rows + columns[None, :], mask=there, other=float("-inf")).to(WIDE)
        off = x <= FLOOR
        x = tl.where(off, 0.0, x)  # 0 * inf would be NaN
        ds = tl.exp(sigma(x, coefs, knots, ORDER) - top[:, None]) * p_scale[:, None]
        if DENSE:
            q = _wanted(target, weight, row, columns, there, target_stride, INDICES, HAS_WEIGHT, UNIFORM, SHARE, WIDE)
            ds -= scale[:, None] * q
        if INDICES:
            ds = tl.where(columns[None, :] == entry[:, None], ds - wish[:, None], ds)
        ds = tl.where(off, 0.0, ds)
        dx = tl.where(off, 0.0, ds * slope(x, coefs, knots, ORDER))
        tl.store(out_rows + columns[None, :], dx.to(out_.dtype.element_ty), mask=inside)
        if PARAMS:
            terms = param_terms(x, ds, coefs, knots, ORDER)
            more = ()
            for j in tl.static_range(4 * ORDER):
                more = more + (sums[j] + terms[j],)
            sums = more
    if PARAMS:
        for j in tl.static_range(4 * ORDER):
            tl.store(parts + program * (4 * ORDER) + j, tl.sum(tl.sum(sums[j], 1), 0))
