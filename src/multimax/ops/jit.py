"""The arithmetic of MultiMax in Triton: sigma, its slope, and the sums behind the parameters' gradients.

Imported by kernels only, since it needs Triton. Parameters are tuples: lower and upper entry of each order, as they lie
in memory. An entry is a number, or a column of numbers where each row has a set of its own.
"""

import triton
import triton.language as tl

from multimax.ops import kernels

INTERPRETED = tl.constexpr(kernels.INTERPRETED)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 rounded to a dtype, to nearest. The interpreter cuts bfloat16 off: there the bits that go are rounded
    before."""
    if INTERPRETED:
        if dtype == tl.bfloat16:
            bits = x.to(tl.uint32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b. The interpreter would multiply bfloat16's bits."""
    if INTERPRETED:
        if a.dtype == tl.bfloat16:
            a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def load_params(at, ORDER: tl.constexpr, dtype: tl.constexpr):
    """One set of coefs or knots, (order, 2) at a pointer, as a tuple."""
    found = ()
    for n in tl.static_range(2 * ORDER):
        found = found + (tl.load(at + n).to(dtype),)
    return found


@triton.jit
def relu(x):
    """max(x, 0), NaN where x is NaN."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sigma(x, coefs, knots, ORDER: tl.constexpr):
    """Equation 6, each term multiplied out from its coefficient: where the power would overflow, a coefficient of zero
    still gives zero."""
    result = x
    for n in tl.static_range(ORDER):
        lower = relu(knots[2 * n] - x)
        upper = relu(x - knots[2 * n + 1])
        lower_term, upper_term = coefs[2 * n] * lower, coefs[2 * n + 1] * upper
        for _ in tl.static_range(n):
            lower_term, upper_term = lower_term * lower, upper_term * upper
        result += lower_term + upper_term
    return result


@triton.jit
def slope(x, coefs, knots, ORDER: tl.constexpr):
    """d sigma / dx, with relu's slope 0 at 0 as in torch."""
    result = 1.0
    for n in tl.static_range(ORDER):
        lower = relu(knots[2 * n] - x)
        upper = relu(x - knots[2 * n + 1])
        lower_term, upper_term = coefs[2 * n] * (n + 1), coefs[2 * n + 1] * (n + 1)
        for _ in tl.static_range(n):
            lower_term, upper_term = lower_term * lower, upper_term * upper
        if n == 0:  # the power is 1, or 0 where the term is not there
            lower_term, upper_term = tl.where(lower > 0, lower_term, 0.0), tl.where(upper > 0, upper_term, 0.0)
        result = result - lower_term + upper_term
    return result


@triton.jit
def param_terms(x, ds, coefs, knots, ORDER: tl.constexpr):
    """What each score adds to the gradients of coefs and knots, given that of sigma: 4 per order, as
    (coef, coef, knot, knot) of lower and upper term."""
    found = ()
    for n in tl.static_range(ORDER):
        lower = relu(knots[2 * n] - x)
        upper = relu(x - knots[2 * n + 1])
        lower_power, upper_power = ds, ds
        lower_knot, upper_knot = ds * (coefs[2 * n] * (n + 1)), ds * (coefs[2 * n + 1] * -(n + 1))
        for _ in tl.static_range(n):
            lower_power, upper_power = lower_power * lower, upper_power * upper
            lower_knot, upper_knot = lower_knot * lower, upper_knot * upper
        if n == 0:
            lower_knot, upper_knot = tl.where(lower > 0, lower_knot, 0.0), tl.where(upper > 0, upper_knot, 0.0)
        found = found + (lower_power * lower, upper_power * upper, lower_knot, upper_knot)
    return found
