"""multimax_cross_entropy, and that of a linear layer: drawn, given to the package, and compared with the oracle."""

from typing import Any, NamedTuple

import numpy as np
import oracle
import torch
from common import (
    DTYPES,
    Differences,
    broadcast,
    compare_parameters,
    computing,
    layout,
    masked,
    numbers,
    only,
    parameters,
    pick,
    product,
    torch_dtype,
)
from numpy.random import Generator
from oracle import Bounded, Flags, Sigma, Weights, Wide, wide
from torch import Tensor

import multimax


class Setting(NamedTuple):
    """What is asked of R rows of C classes."""

    target: Tensor
    options: dict[str, Any]  # for the call
    q: Wide  # (R, C), what the loss wants of each class
    counts: Flags  # (R,), False where ignored
    divisors: tuple[float, float]  # of the rows' losses and of their squared log-sums; 0 if no row counts

    def __str__(self) -> str:
        """For a case's label."""
        said = {name: value for name, value in self.options.items() if name != "weight"}
        weight = self.options["weight"] is not None
        return " ".join(f"{name}={value}" for name, value in {**said, "weight": weight}.items())


def setting(rng: Generator, count: int, classes: int, dtype: str) -> Setting:
    """Targets and options, drawn."""
    compute = torch_dtype(computing(dtype))
    smoothing, z_loss = pick(rng, (0.0, 0.0, 0.1, 1.0)), pick(rng, (0.0, 0.0, 0.01))
    weight = torch.from_numpy(rng.uniform(0.1, 2, classes)).to(compute) if rng.random() < 0.3 else None
    soft = bool(rng.random() < 0.3)
    ignore = -100 if soft else pick(rng, (-100, 0))
    wanted = np.zeros((count, classes), dtype=np.longdouble)
    counts = np.ones(count, dtype=bool)
    if soft:
        target = torch.softmax(torch.from_numpy(rng.standard_normal((count, classes))), -1).to(compute)
        wanted = wide(target.double().numpy())
    else:
        target = torch.from_numpy(rng.integers(0, classes, count))
        target[torch.from_numpy(rng.random(count) < 0.2)] = ignore
        counts = target.numpy() != ignore
        wanted[np.arange(count)[counts], target.numpy()[counts]] = 1
    by_class = wide(np.ones(classes)) if weight is None else wide(weight.double().numpy())
    q = np.where(counts[:, None], by_class * (wanted * (1 - smoothing) + np.longdouble(smoothing) / classes), 0)
    reduction = pick(rng, ("none", "none", "sum", "mean"))
    divisors = (1.0, 1.0)
    if reduction == "mean":
        counted = float(counts.sum())
        divisors = (counted if soft else float(by_class[target.numpy()[counts]].sum()), counted)
    options = {
        "weight": weight,
        "ignore_index": ignore,
        "label_smoothing": smoothing,
        "z_loss": z_loss,
        "reduction": reduction,
        "return_stats": bool(rng.random() < 0.3),
    }
    return Setting(target, options, q, counts, divisors)


class Expected:
    """The loss of rows x, (R, C), where `part`, and the gradient of sigma(x); `lost` is where x is NaN."""

    def __init__(self, asked: Setting, sigma: Sigma, lost: Flags, impl: str, dtype: str) -> None:
        self.asked, self.sigma, q, counts = asked, sigma, asked.q, asked.counts
        self.eps = oracle.EPS[sigma.compute]
        self.by_autograd = impl != "cpu" and dtype != sigma.compute
        self.dtype = dtype
        nan, unclear = sigma.rows()
        self.weights = weights = Weights(
            np.where(sigma.plain == -np.inf, -np.inf, sigma.value), sigma.error, sigma.part, sigma.compute
        )
        dead = (~sigma.part & ~lost) | (sigma.plain == -np.inf)
        clear = counts & ~unclear
        self.nan = counts & (lost.any(1) | (clear & nan))
        self.infinite = clear & ~self.nan & (dead & (q > 0)).any(1)
        # an infinite loss leaves its gradients open, as does a row of which something has sunk
        self.loose = counts & (unclear | weights.loose) & ~self.nan & ~self.infinite
        self.open = self.nan | self.infinite | self.loose | (counts & (sigma.part & dead).any(1))
        z_loss, log_sum = asked.options["z_loss"], weights.log_sum
        self.mass = q.sum(1)
        score = np.where(dead, 0, q * sigma.value).sum(1)
        size = np.where(dead, 0, q * np.abs(sigma.value)).sum(1) + self.mass * np.abs(log_sum)
        unsure = weights.unsure + 8 * self.eps * (1 + np.abs(weights.top))
        self.of_rows = Bounded(
            self.mass * log_sum - score,
            np.where(dead, 0, q * sigma.error).sum(1) + self.mass * unsure + 32 * self.eps * size,
        )
        squares = np.where(counts, z_loss * log_sum**2, 0)
        self.of_squares = Bounded(squares, 2 * z_loss * np.abs(log_sum) * unsure + 32 * self.eps * squares)

    def compare_loss(self, differences: Differences, found: Tensor) -> None:
        """The loss, reduced as was asked."""
        parts = [Bounded(*(t / d for t in part)) for part, d in zip(self.both(), self.asked.divisors, strict=True)]
        value, bound = (np.where(self.asked.counts, a + b, 0) for a, b in zip(*parts, strict=True))
        value, bound = np.where(self.infinite, np.inf, value), np.where(self.infinite, 0, bound)
        value, bound, nan = np.where(self.loose, 0, value), np.where(self.loose, np.inf, bound), self.nan
        if self.asked.options["reduction"] != "none":
            size = np.abs(np.where(self.infinite, 0, value)).sum()
            value, bound, nan = value.sum(), bound.sum() + 32 * self.eps * size, nan.any()
            if np.isinf(value) and self.loose.any():  # what is loose may be NaN
                bound = np.longdouble(np.inf)
        differences.compare("loss", found, Bounded(value, bound), nan)

    def both(self) -> tuple[Bounded, Bounded]:
        """The rows' losses, and z_loss times their squared log-sums."""
        return self.of_rows, self.of_squares

    def gradient(self, upstream: Tensor) -> Bounded:
        """Of sigma(x), (R, C), from that of the loss."""
        up = np.where(self.asked.counts, wide(upstream.double().numpy()), 0)
        pull, pull_z = (up / divisor for divisor in self.asked.divisors)
        weights, q, eps = self.weights, self.asked.q, self.eps
        twice = 2 * self.asked.options["z_loss"] * pull_z
        outer = (pull * self.mass + twice * weights.log_sum)[:, None]
        size = (np.abs(pull) * self.mass + np.abs(twice * weights.log_sum))[:, None]
        outer_error = (np.abs(twice) * weights.log_error)[:, None] + 8 * eps * size
        both = np.abs(pull)[:, None] * q + weights.p * size
        error = weights.error * size + weights.p * outer_error + 8 * eps * both
        if self.by_autograd:  # autograd adds parts that were rounded
            error = error + 4 * oracle.EPS[self.dtype] * both
        return Bounded(weights.p * outer - pull[:, None] * q, error)


def upstream(rng: Generator, loss: Tensor) -> Tensor:
    """The gradient of the loss."""
    return numbers(rng, tuple(loss.shape), "float32", False).to(loss.dtype)


def given(result: Any, stats: bool) -> Tensor:
    """The loss alone."""
    loss: Tensor = result[0] if stats else result
    return loss


def loss(rng: Generator, hard: bool) -> tuple[str, Differences]:
    """multimax_cross_entropy."""
    dtype = pick(rng, DTYPES)
    count, classes = int(rng.integers(1, 6)), pick(rng, (2, 3, 9, 17, 33, 100, 300))
    coefs, knots = parameters(rng, (), dtype, hard)
    x = layout(rng, numbers(rng, (count, classes), dtype, hard))
    asked = setting(rng, count, classes, dtype)
    impl = pick(rng, ("cpu", "cpu", "torch", "reference"))
    label = f"loss {dtype} {(count, classes)} order={coefs.shape[0]} {asked} impl={impl}"
    leaves = [t.detach().requires_grad_() for t in (x, coefs, knots)]
    result = multimax.multimax_cross_entropy(leaves[0], asked.target, *leaves[1:], impl=impl, **asked.options)
    found = given(result, asked.options["return_stats"])
    up = upstream(rng, found)
    of_x, *of_params = torch.autograd.grad(found, leaves, up)

    differences = Differences()
    if not all(asked.divisors):
        return label, differences  # a mean of nothing
    compute = computing(dtype)
    rough = wide(x.detach().double().numpy())
    lost = np.isnan(rough)
    sets = [broadcast(t.to(torch_dtype(compute)), (count,), count) for t in (coefs, knots)]
    part = ~masked(x.detach()) & ~lost
    sigma = Sigma(np.where(lost, 0, rough), part, *sets, compute, by_autograd=impl != "cpu")
    expected = Expected(asked, sigma, lost, impl, dtype)
    expected.compare_loss(differences, found)
    ds = expected.gradient(up)
    open_rows = expected.open[:, None] & np.ones_like(part)
    differences.compare("gradient of input", of_x, only(oracle.to_input(sigma, ds), ~open_rows))
    compare_parameters(differences, sigma, ds, not expected.open.any(), (of_params[0], of_params[1]), (count,))
    return label, differences


def linear(rng: Generator, hard: bool) -> tuple[str, Differences]:
    """linear_multimax_cross_entropy, and its backward twice."""
    dtype = pick(rng, DTYPES)
    count, classes = int(rng.integers(1, 8)), pick(rng, (2, 3, 9, 17, 33, 100))
    width = pick(rng, (1, 3, 8, 20))
    extreme = hard and dtype in ("float32", "float64")
    h = layout(rng, numbers(rng, (count, width), dtype, extreme and rng.random() < 0.3))
    w = layout(rng, numbers(rng, (classes, width), dtype, extreme and rng.random() < 0.3))
    bias = numbers(rng, (classes,), dtype, False) if rng.random() < 0.5 else None
    if bias is not None and rng.random() < 0.3:
        bias[torch.from_numpy(rng.random(classes) < 0.2)] = -torch.inf
    coefs, knots = parameters(rng, (), dtype, hard)
    asked = setting(rng, count, classes, dtype)
    chunk, impl = pick(rng, (None, 1, 2, 3)), pick(rng, ("cpu", "cpu", "torch", "reference"))
    label = (
        f"linear loss {dtype} {(count, width, classes)} bias={bias is not None} order={coefs.shape[0]} {asked} "
        f"chunk={chunk} impl={impl}"
    )
    names = ["input", "linear_weight", "coefs", "knots", "linear_bias"]
    tensors = [t for t in (h, w, coefs, knots, bias) if t is not None]
    leaves = dict(zip(names, (t.detach().requires_grad_() for t in tensors), strict=False))
    result = multimax.linear_multimax_cross_entropy(
        target=asked.target, chunk=chunk, impl=impl, **leaves, **asked.options
    )
    found = given(result, asked.options["return_stats"])
    up = upstream(rng, found)
    first = torch.autograd.grad(found, list(leaves.values()), up, retain_graph=True)
    second = torch.autograd.grad(found, list(leaves.values()), up)
    grads = dict(zip(leaves, first, strict=True))
    differences = Differences()
    for name, one, other in zip(leaves, first, second, strict=True):
        if not torch.equal(one.nan_to_num(nan=1.5), other.nan_to_num(nan=1.5)):
            differences.append(f"gradient of {name}: the second backward differs")

    compute = computing(dtype)
    eps = oracle.EPS[compute]
    wide_h, wide_w = (wide(t.double().numpy()) for t in (h, w))
    added = wide(np.zeros(classes)) if bias is None else wide(bias.double().numpy())
    absent = np.broadcast_to(added == -np.inf, (count, classes))
    added = np.where(added == -np.inf, 0, added)
    x = wide_h @ wide_w.T + added
    size = np.abs(wide_h) @ np.abs(wide_w).T + np.abs(added)
    # how products overflow is not the library's to say, nor whether one is masked next to the limit
    if not (size < oracle.LARGEST[dtype] / 64).all() or not all(asked.divisors):
        return label + " (not compared)", differences
    off = (width + 4) * eps * size
    if dtype != compute:  # logits are rounded, once more for the bias
        off = off + oracle.EPS[dtype] * (size + np.abs(x)) + oracle.SMALLEST[dtype]
    sets = [broadcast(t.to(torch_dtype(compute)), (count,), count) for t in (coefs, knots)]
    sigma = Sigma(x, ~absent, *sets, compute, off, by_autograd=impl != "cpu")
    expected = Expected(asked, sigma, np.zeros_like(absent), impl, dtype)
    expected.compare_loss(differences, found)
    ds = expected.gradient(up)
    dx = oracle.to_input(sigma, ds)
    settled = not expected.open.any()
    if dtype != compute:
        blur = 4 * oracle.EPS[dtype] * np.abs(dx.value) + np.where(dx.bound > 0, oracle.SMALLEST[dtype], 0)
        fits = np.abs(dx.value) < oracle.LARGEST[dtype] / 2  # it stands in that dtype
        dx = Bounded(dx.value, np.where(fits, dx.bound + blur, np.inf))
    of_h = product("rc,cd->rd", dx, wide_w, compute)
    differences.compare("gradient of input", grads["input"], only(rounded(of_h, dtype), ~expected.open[:, None]))
    if settled:
        of_w = product("rc,rd->cd", dx, wide_h, compute)
        differences.compare("gradient of linear_weight", grads["linear_weight"], rounded(of_w, dtype))
        if bias is not None:
            of_bias = product("rc,r->c", dx, wide(np.ones(count)), compute)
            differences.compare("gradient of linear_bias", grads["linear_bias"], rounded(of_bias, dtype))
    compare_parameters(differences, sigma, ds, settled, (grads["coefs"], grads["knots"]), (count,))
    return label, differences


def rounded(sums: Bounded, dtype: str) -> Bounded:
    """Sums of which each chunk's part was rounded to that dtype."""
    if dtype in ("float32", "float64"):
        return sums
    return Bounded(sums.value, sums.bound * 2 + 8 * oracle.EPS[dtype] * np.abs(sums.value))
