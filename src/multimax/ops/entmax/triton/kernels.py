"""Entmax in Triton.

With u = x - max x (halved for entmax15), the weights are a power of r = max(u - tau, 0), where tau makes them sum to
1: sparsemax y = r, entmax15 y = r^2; and for any alpha > 1, with a = alpha - 1, entmax y = max(a u + tau, 0)^(1 / a),
or, for alpha near 1, max(1 + a (u - tau), 0)^(1 / a). What the backward needs of the forward are two numbers per row,
max x and tau: NaN for a row with NaN or +inf, and a tau that leaves nothing for a row that is masked as a whole.

A program handles some rows. Rows that fit a tile are read once; longer ones in pieces, once for each step.
"""

import triton
import triton.language as tl

SPARSEMAX = tl.constexpr(0)
ENTMAX15 = tl.constexpr(1)
ENTMAX = tl.constexpr(2)
STEPS = tl.constexpr(200)  # at most: no method here needs as many


@triton.jit
def _entries(at, columns, length, real, WIDE: tl.constexpr):
    """A piece of each row; -inf for what is not there."""
    there = real[:, None] & (columns < length)[None, :]
    return tl.load(at + columns[None, :], mask=there, other=float("-inf")).to(WIDE)


@triton.jit
def _from_the_largest(x, top, KIND: tl.constexpr, FLOOR: tl.constexpr):
    """u, -inf where masked."""
    u = x - top[:, None]
    if KIND == ENTMAX15:
        u = u * 0.5
    return tl.where(x <= FLOOR, float("-inf"), u)


@triton.jit
def _alpha(alpha_, row, real, KIND: tl.constexpr, WIDE: tl.constexpr):
    """alpha - 1 of each row, and whether alpha is near 1."""
    alpha = tl.full(row.shape, 2.0, WIDE)
    if KIND == ENTMAX:
        alpha = tl.load(alpha_ + row, mask=real, other=2.0)
    return alpha - 1.0, alpha < 1.25


@triton.jit
def _power(u, tau, a, near):
    """y = r^(1 / a), where r is not 0, and scaled u, r and its logarithm there.

    r is 1 at the largest entry if that takes everything, and length^-a if all are equal. For small a both are close to
    1: so r = 1 + a (u - tau), whose logarithm is taken without 1. For larger a, r may be tiny: so r = a u + tau, with
    tau itself as small.
    """
    a, near = a[:, None], near[:, None]
    t = tau[:, None]
    w = a * tl.where(near, u - t, u)
    r = w + tl.where(near, 1.0, t)
    on = r > 0
    w = tl.where(on, w, 0.0)
    r = tl.where(on, r, 1.0)
    log_r = tl.log(r) + tl.where(near & on, (w - (r - 1.0)) / r, 0.0)  # near: of 1 + w, with what r has lost of w
    return tl.where(on, tl.exp(log_r / a), 0.0), w, r, log_r, on


@triton.jit
def _weights(u, tau, a, near, KIND: tl.constexpr):
    """y."""
    if KIND == ENTMAX:
        y, _w, _r, _log_r, _on = _power(u, tau, a, near)
        return y
    else:
        r = tl.maximum(u - tau[:, None], 0.0)
        return r if KIND == SPARSEMAX else r * r


@triton.jit
def _sums_of(u, tau, a, near, KIND: tl.constexpr):
    """What is added up for a step: y, and its derivative by u, up to a constant."""
    if KIND == ENTMAX:
        y, _w, r, _log_r, on = _power(u, tau, a, near)
        return y, tl.where(on, y / r, 0.0)
    else:
        r = tl.maximum(u - tau[:, None], 0.0)
        if KIND == SPARSEMAX:
            return r, (r > 0).to(r.dtype)
        else:
            return r * r, r


@triton.jit
def _middle(low, high):
    """Of an interval: on a logarithmic scale as long as it is wide."""
    return tl.where(high > 4.0 * low, tl.sqrt(low) * tl.sqrt(high), low + (high - low) * 0.5)


@triton.jit
def _expm1(x):
    """exp(x) - 1, as exact as the logarithm is (Kahan): an error of exp is one of log(exp) too."""
    e = tl.exp(x)
    inside = (e != 1.0) & (e > 0)
    return tl.where(inside, (e - 1.0) * (x / tl.log(tl.where(inside, e, 2.0))), tl.where(e == 1.0, x, -1.0))


@triton.jit
def _step(tau, low, high, first, second, a, near, KIND: tl.constexpr):
    """The next tau and interval, and whether that was the last step.

    Newton's method from below on the norm of r, the sum of r (sparsemax), the root of the sum of r^2 (entmax15), or
    (sum of y)^a (alpha <= 2). The norm is convex in tau, so no step goes too far, and from one step to the next
    norm - 1 or the slope falls to a half at least. The last step may well go back, by what rounding had taken too far.
    For alpha > 2 the norm is not convex, and the interval in which tau lies is halved.
    """
    if KIND == SPARSEMAX:
        new = tau + (first - 1.0) / second
        last = (new > tau) == 0
    elif KIND == ENTMAX15:
        norm = tl.sqrt(first)
        new = tau + (first - 1.0) / (norm + 1.0) / second * norm
        last = (new > tau) == 0
    else:
        change = -_expm1(-a * tl.log(first)) * first / second
        by_newton = tau + tl.where(near, change / a, -change)
        high = tl.where(first >= 1.0, tau, high)
        low = tl.where(first >= 1.0, low, tau)
        middle = _middle(low, high)
        halved = (middle > low) & (middle < high)
        new = tl.where(a > 1.0, tl.where(halved, middle, high), by_newton)
        last = tl.where(a > 1.0, halved, tl.where(near, by_newton > tau, by_newton < tau)) == 0
    return new, low, high, last


@triton.jit
def forward(
    x_, alpha_, y_, stats, rows, length,
    KIND: tl.constexpr, FLOOR: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ONE_TILE: tl.constexpr,
):  # fmt: skip
    """The weights, and the largest entry and tau of each row."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    columns = tl.arange(0, BLOCK)
    x_rows = x_ + row[:, None] * length
    a, near = _alpha(alpha_, row, real, KIND, WIDE)

    if ONE_TILE:
        x = _entries(x_rows, columns, length, real, WIDE)
        top = tl.max(tl.where(x == x, x, float("-inf")), 1)
        nans = tl.max((x != x).to(tl.int32), 1)
    else:
        tops = tl.full((ROWS, BLOCK), float("-inf"), WIDE)
        each_nans = tl.zeros((ROWS, BLOCK), tl.int32)
        for start in range(0, length, BLOCK):
            x = _entries(x_rows, start + columns, length, real, WIDE)
            tops = tl.where(x > tops, x, tops)
            each_nans = each_nans | (x != x).to(tl.int32)
        top = tl.max(tops, 1)
        nans = tl.max(each_nans, 1)
    bad = (nans > 0) | (top == float("inf"))
    usual = (top > FLOOR) & (bad == 0)
    top = tl.where(usual, top, 0.0)
    if ONE_TILE:
        u = _from_the_largest(x, top, KIND, FLOOR)

    low = tl.zeros((ROWS,), WIDE)
    high = tl.full((ROWS,), 1.0, WIDE)
    tau = tl.full((ROWS,), -1.0, WIDE)
    nothing = tl.full((ROWS,), float("inf"), WIDE)
    if KIND == ENTMAX:
        smallest: tl.constexpr = 2.0**-1022 if tl.float64 == WIDE else 2.0**-126
        log_length = tl.log(tl.full((ROWS,), 0.0, WIDE) + length)
        low = tl.maximum(tl.exp(-a * log_length), smallest)
        tau = tl.where(near, 0.0, tl.where(a > 1.0, _middle(low, high), 1.0))
        nothing = tl.where(near, nothing, -nothing)
    moving = (usual & real).to(tl.int32)
    left = tl.max(moving, 0) * STEPS
    while left > 0:
        if ONE_TILE:
            y, slope = _sums_of(u, tau, a, near, KIND)
        else:
            y = tl.zeros((ROWS, BLOCK), WIDE)
            slope = tl.zeros((ROWS, BLOCK), WIDE)
            for start in range(0, length, BLOCK):
                piece = _entries(x_rows, start + columns, length, real, WIDE)
                more_y, more_slope = _sums_of(_from_the_largest(piece, top, KIND, FLOOR), tau, a, near, KIND)
                y += more_y
                slope += more_slope
        new, low, high, last = _step(tau, low, high, tl.sum(y, 1), tl.sum(slope, 1), a, near, KIND)
        tau = tl.where(moving > 0, new, tau)
        moving = tl.where(last, 0, moving)
        left = tl.where(tl.max(moving, 0) > 0, left - 1, 0)
    tau = tl.where(usual, tau, tl.where(bad, float("nan"), nothing))
    tl.store(stats + 2 * row, top, mask=real)
    tl.store(stats + 2 * row + 1, tau, mask=real)

    y_rows = y_ + row[:, None] * length
    for start in range(0, length, BLOCK):
        there = real[:, None] & (start + columns < length)[None, :]
        if ONE_TILE:
            weights = tl.where(bad[:, None] & ((x <= FLOOR) == 0), float("nan"), _weights(u, tau, a, near, KIND))
        else:
            piece = _entries(x_rows, start + columns, length, real, WIDE)
            weights = _weights(_from_the_largest(piece, top, KIND, FLOOR), tau, a, near, KIND)
            weights = tl.where(bad[:, None] & ((piece <= FLOOR) == 0), float("nan"), weights)
        tl.store(y_rows + (start + columns)[None, :], weights.to(y_.dtype.element_ty), mask=there)


@triton.jit
def _derivatives(u, tau, a, near, KIND: tl.constexpr, WITH_ALPHA: tl.constexpr):
    """The weights' derivative by u, up to a constant, that by alpha, up to a multiple of the former, and where they are
    not 0.

    The latter is y (w / r - log r) / a^2 with w = r - 1, or y (1 - log r) / a^2. For small w the two terms of the
    former are nearly equal; there w / (1 + w) - log(1 + w) = -w^2 / 2 + 2 w^3 / 3 - 3 w^4 / 4 + ...
    """
    if KIND == ENTMAX:
        y, w, r, log_r, on = _power(u, tau, a, near)
        by_u = y / r
        by_alpha = by_u
        if WITH_ALPHA:
            small: tl.constexpr = 0.003 if u.dtype == tl.float64 else 0.1
            series = tl.zeros_like(w)
            for k in tl.static_range(7):
                series = series * w + (1 if k % 2 else -1) * (7 - k) / (8 - k)
            close = tl.where(w > -small, series * w * w, w / r - log_r)
            by_alpha = y * tl.where(near[:, None], close, 1.0 - log_r) / (a * a)[:, None]
        return by_u, by_alpha, on
    else:
        r = u - tau[:, None]
        by_u = r if KIND == ENTMAX15 else tl.full(r.shape, 1.0, r.dtype)
        return by_u, by_u, r > 0


@triton.jit
def backward(
    grad_, x_, stats, alpha_, out_, of_alpha_, rows, length,
    KIND: tl.constexpr, WITH_ALPHA: tl.constexpr, FLOOR: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, ONE_TILE: tl.constexpr,
):  # fmt: skip
    """The gradients of x and alpha.

    With w the weights' derivative by u and h that by alpha, mean = sum(w grad) / sum(w): dx = w (grad - mean) and
    dalpha = sum(h (grad - mean)).
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    columns = tl.arange(0, BLOCK)
    x_rows = x_ + row[:, None] * length
    grad_rows = grad_ + row[:, None] * length
    out_rows = out_ + row[:, None] * length
    a, near = _alpha(alpha_, row, real, KIND, WIDE)
    top = tl.load(stats + 2 * row, mask=real, other=0.0)
    tau = tl.load(stats + 2 * row + 1, mask=real, other=0.0)
    bad = tau != tau

    wg = tl.zeros((ROWS, BLOCK), WIDE)
    ws = tl.zeros((ROWS, BLOCK), WIDE)
    for start in range(0, length, BLOCK):
        u = _from_the_largest(_entries(x_rows, start + columns, length, real, WIDE), top, KIND, FLOOR)
        by_u, by_alpha, on = _derivatives(u, tau, a, near, KIND, False)
        g = tl.load(grad_rows + (start + columns)[None, :], mask=on, other=0.0).to(WIDE)
        wg += tl.where(on, by_u * g, 0.0)
        ws += tl.where(on, by_u, 0.0)
    total = tl.sum(ws, 1)
    mean = tl.sum(wg, 1) / tl.where(total == 0.0, 1.0, total)  # no support: nothing of it is used

    of_alpha = tl.zeros((ROWS, BLOCK), WIDE)
    for start in range(0, length, BLOCK):
        there = real[:, None] & (start + columns < length)[None, :]
        x = _entries(x_rows, start + columns, length, real, WIDE)
        u = _from_the_largest(x, top, KIND, FLOOR)
        by_u, by_alpha, on = _derivatives(u, tau, a, near, KIND, WITH_ALPHA)
        g = tl.load(grad_rows + (start + columns)[None, :], mask=on, other=0.0).to(WIDE)
        dx = tl.where(on, by_u * (g - mean[:, None]), 0.0)
        if WITH_ALPHA:
            of_alpha += tl.where(on, by_alpha * (g - mean[:, None]), 0.0)
        dx = tl.where(bad[:, None] & ((x <= FLOOR) == 0), float("nan"), dx)
        tl.store(out_rows + (start + columns)[None, :], dx.to(out_.dtype.element_ty), mask=there)
    if WITH_ALPHA:
        tl.store(of_alpha_ + row, tl.where(bad, float("nan"), tl.sum(of_alpha, 1)), mask=real)
