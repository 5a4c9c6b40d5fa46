"""What attention's forward and backward have in common in Triton: sequences, bands, masks, dropout.

For query i and key j: x = scale q k + bias, s = sigma(x) + mask, p = softmax(s). i and j come as a column and a row of
indices, or the other way round where a tile is transposed.
"""

import triton
import triton.language as tl

from multimax.ops.jit import sigma

LOG2_E = tl.constexpr(1.4426950408889634)


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
def any_left(mask, i, j, there, row, column, MASK: tl.constexpr, MASK_FLOOR: tl.constexpr):
    """Whether a mask leaves anything of a tile; NaN counts."""
    m = tl.load(mask + i * row + j * column, mask=there, other=0)
    on = (m != 0) if MASK == 1 else ((m.to(tl.float32) <= MASK_FLOOR) == 0)
    return tl.max(tl.max((on & there).to(tl.int32), 1), 0) > 0


@triton.jit
def modulated(
    z, i, j, inside, mask, mask_row, mask_column, bias, bias_row, bias_column, coefs, knots, scale,
    ORDER: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, EDGE: tl.constexpr,
    FLOOR: tl.constexpr, MASK_FLOOR: tl.constexpr, BIAS_FLOOR: tl.constexpr,
):  # fmt: skip
    """x, 0 where its value masks it, and s, -inf where anything does. mask and bias point to the tile's own head."""
    x = z * scale
    if BIAS:
        added = tl.load(bias + i * bias_row + j * bias_column, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(added <= BIAS_FLOOR, float("-inf"), x + added)
    off = x <= FLOOR
    x = tl.where(off, 0.0, x)  # sigma of a masked score is never taken
    s = tl.where(off, float("-inf"), sigma(x, coefs, knots, ORDER))
    if MASK == 1:
        on = tl.load(mask + i * mask_row + j * mask_column, mask=inside, other=0)
        s = tl.where(on != 0, s, float("-inf"))
    if MASK == 2:
        m = tl.load(mask + i * mask_row + j * mask_column, mask=inside, other=0.0).to(tl.float32)
        # what was masked before stays so, whatever is added
        s = tl.where((m <= MASK_FLOOR) | (s == float("-inf")), float("-inf"), s + m)
    if EDGE:
        s = tl.where(inside, s, float("-inf"))
    return x, s
