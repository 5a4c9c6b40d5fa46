"""What attention's forward and backward have in common in Triton: sequences, bands, masks, dropout.

For query i and key j: x = scale q k + bias, s = sigma(x) + mask, p = softmax(s). i and j come as a column and a row of
indices, or the other way round where a tile is transposed.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)

# Scores are scaled by UNIT, so that max(b - x, 0) is a clamp between 0 and 1, which GPUs do along with the subtraction:
# half of the instructions of sigma. Beyond 2^30 from a knot a term grows no further; there float32 has no digits left
# for a softmax anyway. And -inf stays -inf under sigma, whatever the coefficients: no score has to be looked at for it.
REACH = tl.constexpr(2.0**30)
UNIT = tl.constexpr(2.0**-30)
STEEP = tl.constexpr(2.0**120)


@triton.jit
def tile_of(programs):
    """A program's tile, and which batch and head: one dim of the grid for both, as the others end at 65535."""
    tiles = tl.num_programs(0) // programs
    return tl.program_id(0) % tiles, tl.program_id(0) // tiles


@triton.jit
def sequence_of(tile, starts, sequences, BLOCK: tl.constexpr):
    """Of packed sequences: the one that a tile of rows belongs to, and which of its tiles it is. Sequence b has the
    tiles from starts[b] // BLOCK + b on, which is room enough for every length: the host need not know them."""
    low = 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) // BLOCK + middle <= tile:
            low = middle
        else:
            high = middle
    return low, tile - (tl.load(starts + low) // BLOCK + low).to(tl.int32)


@triton.jit
def band(queries, keys, left, right, CAUSAL: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Key j takes part for query i if i + first <= j < i + last."""
    diagonal = keys - queries
    first = -queries
    last = keys
    if LEFT:
        first = diagonal - left
    if RIGHT:
        last = diagonal + right + 1
    if CAUSAL:
        last = min(last, 1)
    return first, last


@triton.jit
def _mix(z):
    """64 bits in, 64 bits out, each depending on all (the finaliser of splitmix64)."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def kept(seed, head, i, j, below):
    """Which weights dropout keeps: a hash of seed, head, query and key alone, as in the reference."""
    z = _mix(seed + (head.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15)
    z = _mix(z + (i.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15)
    first, second = z.to(tl.uint32), (z >> 32).to(tl.uint32)
    h = (j.to(tl.uint32) * 0x9E3779B1) ^ first
    h = (h ^ (h >> 16)) * 0x85EBCA6B + second
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    h = h ^ (h >> 16)
    return h >= below


@triton.jit
def any_of(rows):
    """Whether any of some rows has what is asked for."""
    return tl.max(rows.to(tl.int32), 0) > 0


@triton.jit
def at_scores(first, i, j, row, column):
    """Where the scores of queries i and keys j lie: further than 32 bits count, maybe."""
    return first + i.to(tl.int64) * row + j.to(tl.int64) * column


@triton.jit
def any_left(mask, i, j, there, row, column, MASK: tl.constexpr, MASK_FLOOR: tl.constexpr):
    """Whether a mask leaves anything of a tile; NaN counts."""
    m = tl.load(at_scores(mask, i, j, row, column), mask=there, other=0)
    on = (m != 0) if MASK == 1 else ((m.to(tl.float32) <= MASK_FLOOR) == 0)
    return any_of(tl.max((on & there).to(tl.int32), 1))


@triton.jit
def load_curve(coefs_, knots_, at, ORDER: tl.constexpr):
    """Coefs and knots of one set, or of one for each row: the knots scaled, and the coefs as `sigma` needs them."""
    coefs = ()
    knots = ()
    for n in tl.static_range(2 * ORDER):
        c = tl.load(coefs_ + at + n).to(tl.float32)
        coefs = coefs + (c * REACH if n // 2 == 1 else c,)
        knots = knots + (tl.load(knots_ + at + n).to(tl.float32) * UNIT,)
    return coefs, knots


@triton.jit
def distances(x, knots, n: tl.constexpr):
    """max(b_n - x, 0) and max(x - d_n, 0), scaled."""
    return tl.clamp(knots[2 * n] - x, 0.0, 1.0), tl.clamp(x - knots[2 * n + 1], 0.0, 1.0)


@triton.jit
def sigma(x, coefs, knots, ORDER: tl.constexpr):
    """Equation 6 on scaled scores: UNIT sigma(x / UNIT)."""
    result = x
    for n in tl.static_range(ORDER):
        lower, upper = distances(x, knots, n)
        lower_factor, upper_factor = coefs[2 * n], coefs[2 * n + 1]
        if n == 1:
            lower_factor, upper_factor = lower_factor * lower, upper_factor * upper
        for _ in tl.static_range(n if n > 1 else 0):
            lower_factor, upper_factor = lower_factor * (lower * REACH), upper_factor * (upper * REACH)
        result += lower_factor * lower
        result += upper_factor * upper
    return result


@triton.jit
def slope(x, coefs, knots, ORDER: tl.constexpr):
    """The slope of sigma, with relu's slope 0 at 0 as in torch."""
    result = 1.0
    for n in tl.static_range(ORDER):
        lower, upper = distances(x, knots, n)
        if n == 0:  # 1 where the term is there
            lower, upper = tl.clamp(lower * STEEP, 0.0, 1.0), tl.clamp(upper * STEEP, 0.0, 1.0)
        lower_factor, upper_factor = coefs[2 * n] * (n + 1), coefs[2 * n + 1] * (n + 1)
        for _ in tl.static_range(n - 1 if n > 1 else 0):
            lower_factor, upper_factor = lower_factor * (lower * REACH), upper_factor * (upper * REACH)
        if n > 1:
            lower, upper = lower * REACH, upper * REACH
        result -= lower_factor * lower
        result += upper_factor * upper
    return result


@triton.jit
def param_terms(x, ds, knots, ORDER: tl.constexpr):
    """What each score adds to the parameters' gradients, given that of sigma, without the factors of `param_factors`:
    4 per order, (coef, coef, knot, knot) of lower and upper term."""
    found = ()
    for n in tl.static_range(ORDER):
        lower, upper = distances(x, knots, n)
        if n == 0:
            terms = (
                ds * lower, ds * upper,
                ds * tl.clamp(lower * STEEP, 0.0, 1.0), ds * tl.clamp(upper * STEEP, 0.0, 1.0),
            )  # fmt: skip
        else:
            lower_knot, upper_knot = ds * lower, ds * upper
            for _ in tl.static_range(n - 1):
                lower_knot, upper_knot = lower_knot * (lower * REACH), upper_knot * (upper * REACH)
            terms = (lower_knot * lower, upper_knot * upper, lower_knot, upper_knot)
        found = found + terms
    return found


@triton.jit
def param_factors(coefs, ORDER: tl.constexpr):
    """What the sums of `param_terms` have to be multiplied with."""
    found = ()
    for n in tl.static_range(ORDER):
        if n == 0:
            found = found + (REACH, REACH, coefs[0], -coefs[1])
        else:
            # coefs of order 2 are scaled already
            unit = 1.0 if n == 1 else REACH
            power = REACH * REACH
            found = found + (power, power, (n + 1) * coefs[2 * n] * unit, -(n + 1) * coefs[2 * n + 1] * unit)
    return found


@triton.jit
def load_rows(at, row, stride, d, there, width, EDGE: tl.constexpr, EVEN: tl.constexpr):
    """Rows of a matrix, zeros beyond their end: if EDGE there may be such, and unless EVEN they are of another width
    than the tile."""
    pointers = at + row[:, None].to(tl.int64) * stride + d[None, :]
    if EVEN:
        if EDGE:
            return tl.load(pointers, mask=there[:, None], other=0.0)
        return tl.load(pointers)
    return tl.load(pointers, mask=there[:, None] & (d < width)[None, :], other=0.0)


@triton.jit
def modulated(
    z, i, j, inside, mask, mask_row, mask_column, bias, bias_row, bias_column, coefs, knots, scale,
    ORDER: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, EDGE: tl.constexpr,
    MASK_FLOOR: tl.constexpr, BIAS_FLOOR: tl.constexpr,
):  # fmt: skip
    """x and s, scaled; s is -inf where a mask excludes. mask and bias point to the tile's own head."""
    x = z * scale
    if BIAS:
        added = tl.load(at_scores(bias, i, j, bias_row, bias_column), mask=inside, other=0.0).to(tl.float32)
        x = tl.where(added <= BIAS_FLOOR, float("-inf"), x + added * UNIT)
    s = sigma(x, coefs, knots, ORDER)
    if MASK == 1:
        on = tl.load(at_scores(mask, i, j, mask_row, mask_column), mask=inside, other=0)
        s = tl.where(on != 0, s, float("-inf"))
    if MASK == 2:
        m = tl.load(at_scores(mask, i, j, mask_row, mask_column), mask=inside, other=0.0).to(tl.float32)
        # what was masked before stays so, whatever is added
        s = tl.where((m <= MASK_FLOOR) | (s == float("-inf")), float("-inf"), s + m * UNIT)
    if EDGE:
        s = tl.where(inside, s, float("-inf"))
    return x, s
