"""What a call should give, and how far a result may be from it: NumPy's extended precision, none of the package's code.

Extended precision (64 bits of fraction, powers of 10 up to 4932) holds every intermediate value, of float64 too. Beside
each value goes a bound on what rounding in the dtype of computation may make of it. The rules for what overflows there
are those of :func:`multimax.multimax`.

Shapes: R rows, K entries, N the order of sigma.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Wide = NDArray[np.longdouble]
Flags = NDArray[np.bool_]
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
LARGEST = {
    "float64": np.finfo(np.float64).max,
    "float32": np.finfo(np.float32).max,
    "bfloat16": 3.3895313892515355e38,
    "float16": 65504.0,
}
SMALLEST = {"float64": 2.3e-308, "float32": 1.2e-38, "bfloat16": 1.2e-38, "float16": 6e-8}
UNSURE = 0.05  # rounding of the scores beyond this says nothing of the weights
NOTHING = np.longdouble(0)


class Bounded(NamedTuple):
    """A value and its bound: a result within it is right. Infinite for what is not compared."""

    value: Wide
    bound: Wide


def wide(values: object) -> Wide:
    """In extended precision."""
    return np.asarray(values, dtype=np.longdouble)


class Sigma:
    """sigma of rows x, (R, K), where `part`, with parameters (R, N, 2) each, as computed in a dtype; off is how far x
    itself may be from its true value. by_autograd: powers that may overflow leave a result open even where their
    coefficient is 0, since autograd multiplies them out first; and so do terms at 0, which stands where x is masked or
    ignored."""

    def __init__(
        self,
        x: Wide,
        part: Flags,
        coefs: Wide,
        knots: Wide,
        compute: str,
        off: Wide | None = None,
        *,
        by_autograd: bool = False,
    ) -> None:
        self.part, self.coefs, self.knots, self.compute = part, coefs, knots, compute
        self.eps, self.largest = np.longdouble(EPS[compute]), np.longdouble(LARGEST[compute])
        self.x = x = np.where(part, x, 0)
        self.off = np.where(part, wide(0) if off is None else off, 0)
        self.unclear = np.zeros(x.shape, dtype=bool)  # whether it overflows depends on the order of operations
        self.astray = np.zeros(len(x), dtype=bool)  # rows in which 0 may leave NaN in gradients
        self.orders = range(coefs.shape[1])
        narrow = np.float64 if compute == "float64" else np.float32
        value, plain = x, x.astype(narrow)  # exactly, and line by line in the dtype
        self._look(x)
        size = np.abs(x)
        self.slope, self.slope_size, self.slope_off = (np.full_like(x, first) for first in (1, 1, 0))
        for n in self.orders:
            for side, sign in ((0, -1), (1, 1)):
                coef, u, near = coefs[:, n, side, None], self.distance(n, side), self.near(n, side)
                if by_autograd:
                    self.unclear |= part & (u ** (n + 1) > self.largest / 1e12)
                    at_zero = np.maximum(np.abs(coef), 1) * np.maximum(-sign * knots[:, n, side, None], 0) ** (n + 1)
                    self.astray |= (at_zero > self.largest / 1e12)[:, 0]
                self._look(sign * (x - knots[:, n, side, None]), u)
                knot = knots[:, n, side, None].astype(narrow)
                narrow_u = np.maximum(sign * (x.astype(narrow) - knot), narrow(0))
                term, plain_term = coef * np.ones_like(x), coef.astype(narrow) * np.ones_like(plain)
                for _ in range(n + 1):
                    term, plain_term = term * u, plain_term * narrow_u
                    self._look(term)
                value, plain = value + term, plain + plain_term
                self._look(value)
                size = size + np.abs(term)
                steep = (n + 1) * np.abs(coef) * self.power(n, side, n)
                self._look(steep)
                self.slope = self.slope + sign * (n + 1) * coef * self.power(n, side, n)
                self.slope_size = self.slope_size + steep + np.where(near, np.abs(coef), 0)
                self.slope_off = self.slope_off + np.where(near, np.abs(coef), 0)
                if n:
                    bend = (n + 1) * n * np.abs(coef) * self.power(n, side, n - 1)
                    self.slope_off = self.slope_off + bend * self.blur(n, side)
        self.value, self.plain = value, plain
        self.slope_off = self.slope_off + 4 * (n + 2) * self.eps * self.slope_size
        blur = sum(self.blur(n, side) for n in self.orders for side in (0, 1))
        self.error = 4 * (n + 2) * self.eps * size + self.slope_size * (self.off + blur)

    def _look(self, *values: Wide) -> None:
        for value in values:
            size = np.abs(value)
            self.unclear |= self.part & (size > self.largest / 16) & (size < self.largest * 16)

    def distance(self, n: int, side: int) -> Wide:
        """How far x is below a lower knot, or above an upper one; 0 on its other side."""
        sign = -1 if side == 0 else 1
        distance: Wide = np.maximum(sign * (self.x - self.knots[:, n, side, None]), 0)
        return distance

    def blur(self, n: int, side: int) -> Wide:
        """How far a distance may be off."""
        return self.eps * (np.abs(self.x) + np.abs(self.knots[:, n, side, None])) + self.off

    def near(self, n: int, side: int) -> Flags:
        """Where x may be on either side of a knot."""
        return np.abs(self.x - self.knots[:, n, side, None]) <= self.off

    def power(self, n: int, side: int, exponent: int) -> Wide:
        """A power of the distance, 0 where it is 0, even to the power of 0."""
        u = self.distance(n, side)
        return np.where(u > 0, u**exponent, NOTHING)

    def rows(self) -> tuple[Flags, Flags]:
        """Which rows are NaN, and which are not compared."""
        with np.errstate(invalid="ignore"):
            broken = (self.part & (self.plain == np.inf)).any(1)
            # of terms that overflow to both sides; a fused product may not
            mixed = (self.part & np.isnan(self.plain)).any(1)
        return broken, (self.unclear & self.part).any(1) | mixed


class Weights:
    """softmax of scores, (R, K), where `part`, with their errors; -inf, by overflow, is a weight of 0."""

    def __init__(self, scores: Wide, error: Wide, part: Flags, compute: str) -> None:
        eps, reach = EPS[compute], 800 if compute == "float64" else 120
        self.eps = eps
        scores = np.where(part, scores, -np.inf)
        alive = np.isfinite(scores)
        self.top = np.where(alive.any(1), np.max(np.where(alive, scores, -np.inf), axis=1, initial=-np.inf), 0)
        shifted = np.where(alive, scores - self.top[:, None], -np.inf)
        leads = (
            np.where(alive, shifted + error, -np.inf)
            > -np.max(np.where(alive & (shifted == 0), error, 0), axis=1, initial=0, keepdims=True) - reach
        )
        self.unsure = np.max(np.where(leads & alive, error, 0), axis=1, initial=0)
        power = np.exp(shifted)
        total = power.sum(1)
        self.log_sum = self.top + np.log(np.where(total > 0, total, 1))
        self.p = power / np.where(total > 0, total, 1)[:, None]
        rel = np.expm1(np.minimum(2 * self.unsure, 1)) + (8 + np.sqrt(part.shape[1])) * eps
        self.error = np.where(leads, self.p * rel[:, None] + SMALLEST[compute], self.p)  # or 0, by underflow
        self.loose = self.unsure > UNSURE
        self.log_error = self.unsure + 8 * eps * (1 + np.abs(self.top))  # of the log-sum

    def backward(self, grad: Wide, grad_error: Wide | None = None) -> Bounded:
        """The gradient of the scores from that of the weights."""
        size = np.abs(grad)
        slack = 4 * self.eps * size + (0 if grad_error is None else grad_error)
        dot, dot_size = (self.p * grad).sum(1, keepdims=True), (self.p * size).sum(1, keepdims=True)
        dot_error = (self.error * size + self.p * slack).sum(1, keepdims=True) + 16 * self.eps * dot_size
        error = self.error * (size + dot_size) + self.p * (slack + dot_error)
        return Bounded(self.p * (grad - dot), error)


def to_input(sigma: Sigma, ds: Bounded) -> Bounded:
    """The gradient of x from that of sigma(x). 0 times anything is 0."""
    value, error = np.where(sigma.part, ds.value, 0), np.where(sigma.part, ds.bound, 0)
    zero = (value == 0) & (error == 0)
    bound = error * sigma.slope_size + np.abs(value) * sigma.slope_off
    multiples = np.abs(sigma.coefs) * np.arange(1, sigma.coefs.shape[1] + 1)[:, None]  # which the slope is made of
    beyond = (sigma.slope_size > sigma.largest / 16) | (multiples > sigma.largest / 16).any((1, 2))[:, None]
    bound = np.where(beyond, np.inf, bound)
    return Bounded(np.where(zero, 0, value * sigma.slope), np.where(zero, 0, bound))


def to_parameters(sigma: Sigma, ds: Bounded) -> tuple[Bounded, Bounded]:
    """The gradients of coefs and knots, (R, N, 2) each, of each row."""
    value, error = np.where(sigma.part, ds.value, 0), np.where(sigma.part, ds.bound, 0)
    zero = (value == 0) & (error == 0)
    found = [np.zeros(sigma.coefs.shape, dtype=np.longdouble) for _ in range(4)]
    for n in sigma.orders:
        for side, sign in ((0, 1), (1, -1)):
            at = (slice(None), n, side)
            factor = sign * (n + 1) * sigma.coefs[at]
            for place, exponent, outer in ((0, n + 1, wide(1)), (1, n, factor)):
                u = sigma.power(n, side, exponent)
                rough = error * u + np.abs(value) * u * 8 * (n + 2) * sigma.eps
                if exponent:
                    rough = rough + np.abs(value) * exponent * sigma.power(n, side, exponent - 1) * sigma.blur(n, side)
                else:
                    rough = rough + np.abs(value) * sigma.near(n, side)
                size = np.where(zero, 0, np.abs(value) * u).sum(1)
                found[2 * place][at] = np.where(zero, 0, value * u).sum(1) * outer
                bound = np.where(zero, 0, rough).sum(1) + 64 * sigma.eps * size
                bound = (bound + np.where(size > 0, SMALLEST[sigma.compute], 0)) * np.abs(outer)
                # sums or powers that may overflow on the way
                far = np.maximum(size, np.max(np.where(zero, 0, u * (np.abs(value) > 0)), axis=1, initial=0))
                beyond = np.maximum(far, far * np.abs(outer)) > sigma.largest / 64
                beyond |= np.abs(outer) > sigma.largest / 16
                found[2 * place + 1][at] = np.where(beyond, np.inf, bound)
    return Bounded(found[0], found[1]), Bounded(found[2], found[3])


def projection(x: Wide, part: Flags, alpha: float) -> tuple[Wide, Flags]:
    """Entmax of rows by bisection, and which rows have an entry next to the edge of the support."""
    z = np.where(part, (alpha - 1) * x, -np.inf)
    top = np.where(part.any(1), np.max(z, axis=1, initial=-np.inf), 0)[:, None]
    z = np.where(part, z - top, -np.inf)
    low, high = np.full((len(x), 1), -1, dtype=np.longdouble), np.zeros((len(x), 1), dtype=np.longdouble)
    for _ in range(120):
        tau = (low + high) / 2
        total = (np.maximum(z - tau, 0) ** (1 / wide(alpha - 1))).sum(1, keepdims=True)
        low, high = np.where(total >= 1, tau, low), np.where(total >= 1, high, tau)
    tau = (low + high) / 2
    p = np.maximum(z - tau, 0) ** (1 / wide(alpha - 1))
    total = p.sum(1, keepdims=True)
    edge = (part & (np.abs(z - tau) < 1e-3)).any(1)
    return p / np.where(total > 0, total, 1), edge
