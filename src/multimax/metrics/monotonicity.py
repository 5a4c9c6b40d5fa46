"""Whether sigma rises: the least slope that it has on an interval, found exactly for any order."""

import math
from itertools import pairwise

import torch
from torch import Tensor

from multimax.ops import checks

Polynomial = list[float]  # coefficients of t^0, t^1, ...


def _value(polynomial: Polynomial, t: float) -> float:
    total = 0.0
    for coefficient in reversed(polynomial):
        total = total * t + coefficient
    return total


def _slope(coefs: list[list[float]], knots: list[list[float]], left: float, middle: float) -> Polynomial:
    """The slope of sigma in the piece around `middle`, as a polynomial in t = x - left."""
    slope = [1.0] + [0.0] * (len(coefs) - 1)
    for n, ((lower, upper), (b, d)) in enumerate(zip(coefs, knots, strict=True), 1):
        for k in range(n):
            # n (b - x)^(n - 1) and n (x - d)^(n - 1), by the binomial formula
            choose = n * math.comb(n - 1, k)
            if middle < b:
                slope[k] -= lower * choose * (b - left) ** (n - 1 - k) * (-1) ** k
            if middle > d:
                slope[k] += upper * choose * (left - d) ** (n - 1 - k)
    return slope


def _turns(polynomial: Polynomial) -> list[float]:
    """Where a polynomial may have a minimum: the real parts of its derivative's roots."""
    derivative = [k * coefficient for k, coefficient in enumerate(polynomial)][1:]
    while derivative and derivative[-1] == 0:
        derivative.pop()
    degree = len(derivative) - 1
    if degree < 1:
        return []
    *others, leading = derivative
    companion = torch.diag(torch.ones(degree - 1, dtype=torch.float64), -1)
    companion[:, -1] = torch.tensor([-lower / leading for lower in others], dtype=torch.float64)
    if not companion.isfinite().all():  # the leading term is negligible
        return _turns(polynomial[:-1])
    roots: list[float] = torch.linalg.eigvals(companion).real.tolist()
    return roots


def least_slope(coefs: Tensor, knots: Tensor, low: float, high: float) -> tuple[float, float]:
    r"""The least slope of sigma between two scores, and where it is. Sigma rises there if the slope is not negative.

    .. math:: \min_{low \le x \le high} \sigma'(x), \qquad
        \sigma'(x) = 1 - \sum_n n\, c_n \max(b_n - x, 0)^{n-1} + \sum_n n\, e_n \max(x - d_n, 0)^{n-1}

    Between two neighbouring knots the slope is a polynomial of degree N - 1, so its minimum is at an end or where its
    derivative has a root: exact for any order, up to the rounding of float64, and not by sampling. At a knot of the
    first order, where the slope jumps, both sides count.

    Args:
        coefs: (N, 2), one set.
        knots: (N, 2).
        low: the least score, finite.
        high: the largest score, finite, not below low.

    Returns:
        (slope, x).

    Example:
        >>> import multimax
        >>> from multimax.metrics import least_slope
        >>> coefs, knots = multimax.from_paper(t_b=[2.0, 1.0], t_d=[0.5, 0.9], b=[0.0, 0.0], d=[1.0, 1.0])
        >>> slope, x = least_slope(coefs, knots, -5, 5)
        >>> round(slope, 4), x  # 0.5 - 2 * 0.1 * (5 - 1)
        (-0.3, 5.0)
    """
    checks.single_set(coefs, knots)
    checks.finite_interval(low, high)
    c, k = (parameter.detach().to("cpu", torch.float64).tolist() for parameter in (coefs, knots))
    inside = sorted({knot for both in k for knot in both if low < knot < high})
    least = (math.inf, float(low))
    for left, right in pairwise([float(low), *inside, float(high)]):
        slope = _slope(c, k, left, (left + right) / 2)
        # a point that is not a minimum does no harm, so roots need not be told apart from nearly real ones
        for t in [0.0, right - left, *(turn for turn in _turns(slope) if 0 < turn < right - left)]:
            least = min(least, (_value(slope, t), min(left + t, right)))
    return least
