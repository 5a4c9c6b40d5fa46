"""What all cases share: how inputs are drawn, and how results are compared with the oracle's."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import oracle
import torch
from numpy.random import Generator
from oracle import Bounded, Flags, Sigma, Wide, wide
from torch import Tensor

DTYPES = ("float32", "float64", "bfloat16", "float16")
LENGTHS = (1, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 129, 257)


class Differences(list[str]):
    """What differed, in words."""

    def compare(self, name: str, got: Tensor, want: Bounded, nan: Flags | None = None) -> None:
        """A result of the package with the oracle's value, NaN where that is wanted."""
        dtype = str(got.dtype).removeprefix("torch.")
        found = wide(got.detach().double().numpy())
        if found.shape != want.value.shape:
            self.append(f"{name}: shape {found.shape} instead of {want.value.shape}")
            return
        with np.errstate(invalid="ignore", over="ignore"):
            bound = want.bound + np.abs(want.value) * 2 * oracle.EPS[dtype] + oracle.SMALLEST[dtype]
            open_end = ~(np.abs(want.value) + bound < oracle.LARGEST[dtype] / 2)  # may round to infinity
            exact = (want.value == 0) & (want.bound == 0)
            right = np.where(exact, found == 0, np.abs(found - want.value) <= bound)
            right |= open_end & ~np.isnan(found)
            right = np.where(np.isinf(want.value), found == want.value, right)
            right |= np.isinf(want.bound)  # not compared
        if nan is not None:
            right = np.where(nan, np.isnan(found), right)
        if right.all():
            return
        wrong = ~right
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        expected = (
            "nan" if nan is not None and nan[at] else f"{float(want.value[at]):.9g} within {float(bound[at]):.3g}"
        )
        self.append(
            f"{name}: {int(wrong.sum())} of {wrong.size} differ, first {at}: {float(found[at]):.9g}, not {expected}"
        )


def torch_dtype(name: str) -> torch.dtype:
    """A dtype by name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def pick(rng: Generator, choices: Iterable[Any]) -> Any:
    """One of several."""
    choices = list(choices)
    return choices[int(rng.integers(len(choices)))]


def numbers(rng: Generator, shape: tuple[int, ...], dtype: str, hard: bool) -> Tensor:
    """Numbers of that dtype, some or all of them extreme if hard."""
    largest = oracle.LARGEST[dtype]
    x = rng.standard_normal(shape) * pick(rng, (1, 1, 3, 10))
    if hard:
        kind = int(rng.integers(7))
        if kind == 0:
            x = rng.standard_normal(shape) * 10.0 ** rng.uniform(0, np.log10(largest))
        elif kind == 1:
            x = rng.uniform(-1, 1, shape) * largest
        elif kind == 2:
            x = np.full(shape, rng.standard_normal() * 10.0 ** rng.uniform(-5, 5))
        elif kind == 3:
            x = x * 10.0 ** rng.uniform(-45, 0)
        else:
            special = [0.0, -0.0, 1e4, -1e4, largest, -largest, largest / 4, -largest / 4, -np.inf, -largest / 2]
            special += [largest / 1e3, -largest / 1e3, np.sqrt(largest), -np.sqrt(largest)]
            special += [np.nan, np.inf] if kind == 6 else []
            spots = rng.random(shape) < pick(rng, (0.02, 0.2, 0.7))
            x = np.where(spots, rng.choice(special, shape), x)
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.asarray(x)).to(torch_dtype(dtype))


def parameters(rng: Generator, lead: tuple[int, ...], dtype: str, hard: bool) -> tuple[Tensor, Tensor]:
    """Coefs and knots of orders 1 to 4, up to the limits of what is computed in if hard."""
    order = pick(rng, (1, 2, 2, 3, 4))
    shape = (*lead, order, 2)
    kind = pick(rng, DTYPES[:2] if dtype != "float64" else ("float64",))
    largest = oracle.LARGEST[computing(dtype)]
    coefs, knots = rng.standard_normal(shape) * pick(rng, (0.05, 0.3, 1)), rng.standard_normal(shape)
    if hard:
        scale = pick(rng, (0, 1, 30, 1e6, 1e30, largest / 4, 1e-30))
        coefs = np.where(rng.random(shape) < 0.5, rng.standard_normal(shape) * scale, coefs)
        coefs = np.where(rng.random(shape) < 0.2, 0, coefs)
        scale = pick(rng, (0, 1, 1e3, 1e18, largest / 4))
        knots = np.where(rng.random(shape) < 0.4, rng.uniform(-1, 1, shape) * scale, knots)
    made = (torch.from_numpy(np.asarray(t)).to(torch_dtype(kind)) for t in (coefs, knots))
    coefs_t, knots_t = made
    return coefs_t, knots_t


def layout(rng: Generator, x: Tensor) -> Tensor:
    """The same values with other strides."""
    kind = int(rng.integers(4))
    if kind == 1 and x.ndim > 1:
        a, b = (int(d) for d in rng.choice(x.ndim, 2, replace=False))
        return x.transpose(a, b).contiguous().transpose(a, b)
    if kind == 2:
        return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]
    if kind == 3 and x.ndim:
        return torch.cat([torch.full_like(x[..., :1], torch.nan), x], -1)[..., 1:]
    return x


def masked(x: Tensor) -> Flags:
    """By value."""
    limit = -oracle.LARGEST[str(x.dtype).removeprefix("torch.")] / 2
    found: Flags = x.double().numpy() <= limit
    return found


def computing(dtype: str) -> str:
    """The dtype of computation."""
    return "float64" if dtype == "float64" else "float32"


def only(want: Bounded, compared: Flags) -> Bounded:
    """The same, with nothing to compare elsewhere."""
    return Bounded(want.value, np.where(compared, want.bound, np.inf))


def broadcast(t: Tensor, others: tuple[int, ...], count: int) -> Wide:
    """Parameters for each row, (R, N, 2)."""
    return wide(t.double().expand(*others, *t.shape[-2:]).reshape(count, *t.shape[-2:]).numpy())


def compare_parameters(
    differences: Differences,
    sigma: Sigma,
    ds: Bounded,
    settled: bool,
    got: tuple[Tensor, Tensor],
    others: tuple[int, ...],
) -> None:
    """The parameters' gradients, unless a row leaves them open."""
    if not settled or sigma.astray.any():
        return
    for name, want, found in zip(("coefs", "knots"), oracle.to_parameters(sigma, ds), got, strict=True):
        lead = found.shape[:-2]
        value, bound = (t.reshape(*others, *t.shape[1:]) for t in want)
        if lead:
            axes = tuple(i for i, size in enumerate(lead) if size == 1)
            value, bound = (t.sum(axes, keepdims=True) for t in (value, bound))
        else:
            axes = tuple(range(len(others)))
            value, bound = value.sum(axes), bound.sum(axes)
        # the sum of rows may overflow where each does not
        size = np.abs(value) + bound
        open_end = ~(size <= sigma.largest / 64)  # NaN of a coefficient that is infinite, too
        bound = np.where(open_end, np.inf, bound + 64 * sigma.eps * size)
        bound = np.where(size == 0, 0, bound + oracle.SMALLEST[sigma.compute])
        differences.compare(f"gradient of {name}", found, Bounded(value, bound))


def product(equation: str, a: Bounded, b: Wide, compute: str) -> Bounded:
    """A product with what is exact; not compared where its sums may overflow."""
    value, size = np.einsum(equation, a.value, b), np.einsum(equation, np.abs(a.value), np.abs(b))
    bound = np.einsum(equation, a.bound, np.abs(b)) + 64 * oracle.EPS[compute] * size
    return Bounded(value, np.where(size + bound < oracle.LARGEST[compute] / 64, bound, np.inf))
