"""The other functions of the field: against slow loops, the `entmax` package, their limits, and the rules for all."""

import copy
import itertools
import math
import pickle
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import entmax as package
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from multimax.oversmoothing import attn_scale
from torch import Tensor, nn

import multimax
from machine import needs_kernels
from multimax import reweighting
from multimax.ops.entmax import reference


@pytest.fixture(autouse=True)
def one_thread(same_start: None) -> None:
    """Many small operations: where threads matter, tests set their own number."""
    torch.set_num_threads(1)


INF, NAN = math.inf, math.nan
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
HALF = [torch.bfloat16, torch.float16]
COEFS, KNOTS = torch.tensor([[0.3, -0.4], [-0.05, 0.02]]), torch.tensor([[-0.2, 0.4], [0.1, -0.3]])
Options = dict[str, Any]

# every function, with options that lead to each of its paths
CASES: dict[str, tuple[str, Options]] = {
    "softmax": ("softmax", {}),
    "softmax, warm": ("softmax", {"temperature": 0.7}),
    "multimax": ("multimax", {"coefs": COEFS, "knots": KNOTS}),
    "sparsemax": ("sparsemax", {}),
    "entmax15": ("entmax15", {}),
    "entmax, 1.3": ("entmax", {"alpha": 1.3}),
    "entmax, 2": ("entmax", {"alpha": 2.0}),
    "entmax, 2.5": ("entmax", {"alpha": 2.5}),
    "evsoftmax": ("evsoftmax", {}),
    "evsoftmax, trained": ("evsoftmax", {"eps": 0.05}),
    "sparsehourglass": ("sparsehourglass", {"q": 0.3}),
    "topk": ("topk", {"k": 3}),
    "topk, share": ("topk", {"k": 0.4}),
    "attnscale": ("attnscale", {"omega": 0.6}),
    "attnscale, flatter": ("attnscale", {"omega": torch.tensor(-0.25)}),
}
every = pytest.mark.parametrize("case", CASES)
impls = pytest.mark.parametrize("impl", ["auto", "reference"])


def of(case: str, **more: Any) -> Callable[..., Tensor]:
    name, options = CASES[case]
    return reweighting.get(name, **{**options, **more})


def run(case: str, x: Tensor, grad: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Weights, and the gradient of x."""
    leaf = x.detach().requires_grad_()
    weights = of(case)(leaf, **options)
    return weights.detach(), torch.autograd.grad(weights, leaf, grad)[0]


def both(function: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.detach().clone().requires_grad_()
    weights = function(leaf)
    return weights.detach(), torch.autograd.grad(weights, leaf, grad)[0]


def test_every_function_has_a_case() -> None:
    assert {name for name, _ in CASES.values()} == set(reweighting.names())
    assert set(reweighting.names()) <= set(reweighting.__all__)


# ---- the formulas, by loops over numbers


def slow_sparsemax(row: list[float]) -> list[float]:
    """Exactly, in fractions: the threshold after the largest k for which they are all above it."""
    exact = [Fraction(v) for v in row]
    ranked = sorted(exact, reverse=True)
    threshold = max((sum(ranked[:k]) - 1) / Fraction(k) for k in range(1, len(row) + 1))
    return [float(max(v - threshold, Fraction(0))) for v in exact]


def slow_entmax(row: list[float], alpha: float) -> list[float]:
    """The threshold by halving an interval until there is no number between its ends."""
    scaled = [(alpha - 1) * (v - max(row)) for v in row]
    low, high = -1.0, 0.0
    while low < (middle := (low + high) / 2) < high:
        total = math.fsum(max(s - middle, 0.0) ** (1 / (alpha - 1)) for s in scaled)
        low, high = (middle, high) if total >= 1 else (low, middle)
    return [max(s - low, 0.0) ** (1 / (alpha - 1)) for s in scaled]


def slow_softmax(row: list[float], factors: list[float] | None = None) -> list[float]:
    factors = factors or [1.0] * len(row)
    terms = [f * math.exp(v - max(row)) for v, f in zip(row, factors, strict=True)]
    return [t / math.fsum(terms) for t in terms]


def slow_sigma(v: float) -> float:
    result = v
    for n in range(2):
        result += COEFS[n, 0].item() * max(KNOTS[n, 0].item() - v, 0) ** (n + 1)
        result += COEFS[n, 1].item() * max(v - KNOTS[n, 1].item(), 0) ** (n + 1)
    return result


def slow(case: str, row: list[float]) -> list[float]:
    name, options = CASES[case]
    if not row:
        return []
    if name == "softmax":
        return slow_softmax([v / options.get("temperature", 1.0) for v in row])
    if name == "multimax":
        return slow_softmax([slow_sigma(v) for v in row])
    if name == "sparsemax" or options.get("alpha") == 2:
        return slow_sparsemax(row)
    if name in ("entmax15", "entmax"):
        return slow_entmax(row, options.get("alpha", 1.5))
    if name == "evsoftmax":
        mean = sum(map(Fraction, row)) / len(row)
        return slow_softmax(row, [(Fraction(v) >= mean) + options.get("eps", 0.0) for v in row])
    if name == "sparsehourglass":
        q, size = options["q"], len(row)
        return slow_sparsemax([v * (1 + size * q) / (abs(math.fsum(row)) + size * q) for v in row])
    if name == "attnscale":
        return [1 / len(row) + (1 + float(options["omega"])) * (v - 1 / len(row)) for v in slow_softmax(row)]
    assert name == "topk"
    k = options["k"] if isinstance(options["k"], int) else math.ceil(Fraction(str(options["k"])) * len(row))
    least = sorted(row, reverse=True)[:k][-1]
    return slow_softmax(row, [float(v >= least) for v in row])


@every
@impls
@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_formula(case: str, impl: str, scale: float) -> None:
    x = torch.randn(12, 11, dtype=torch.float64) * scale + 0.2
    mask = torch.rand(x.shape) < 0.7
    mask[0], mask[1] = True, False
    weights = of(case)(x, mask=mask, impl=impl)
    for row_weights, row, on in zip(weights, x, mask, strict=True):
        expected = torch.tensor(slow(case, row[on].tolist()), dtype=torch.float64)
        torch.testing.assert_close(row_weights[on], expected, rtol=1e-11, atol=1e-13)
        assert (row_weights[~on] == 0).all()


# ---- the package


def quantised(x: Tensor) -> Tensor:
    """So that a shift of 1e6 loses nothing."""
    return (x * 2**20).round() / 2**20


PACKAGE_INPUTS: dict[str, Callable[[], Tensor]] = {
    "random": lambda: torch.randn(30, 41),
    "wide": lambda: 5 * torch.randn(30, 41),
    "narrow": lambda: 0.05 * torch.randn(30, 41),
    "tied": lambda: torch.randn(30, 13).repeat_interleave(3, 1)[:, torch.randperm(39)],
    "all equal": lambda: torch.randn(5, 1).expand(5, 33).clone(),
    "large": lambda: 1e4 * torch.randn(30, 41),
    "large and close": lambda: 1e4 * torch.randint(-1, 2, (30, 41)) + torch.randn(30, 41),
    "one entry": lambda: torch.randn(4, 1),
    "long": lambda: torch.randn(3, 3000),
}
shifts = pytest.mark.parametrize("shift", [0.0, 1e3, -1e3, 1e6])


@impls
@shifts
@pytest.mark.parametrize("kind", PACKAGE_INPUTS)
def test_the_packages_exact_functions(kind: str, shift: float, impl: str) -> None:
    x = quantised(PACKAGE_INPUTS[kind]().double())
    grad = torch.randn_like(x)
    for ours, theirs in (
        (reweighting.sparsemax, package.sparsemax),
        (reweighting.entmax15, package.entmax15),
        (lambda x, impl: reweighting.entmax(x, alpha=2, impl=impl), package.sparsemax),
        (lambda x, impl: reweighting.entmax(x, alpha=1.5, impl=impl), package.entmax15),
    ):
        expected = both(theirs, x, grad)
        for result, judge in zip(both(lambda t, ours=ours: ours(t, impl=impl), x + shift, grad), expected, strict=True):
            torch.testing.assert_close(result, judge, rtol=0, atol=1e-12)


@pytest.mark.parametrize("alpha", [1.05, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0])
@pytest.mark.parametrize("kind", PACKAGE_INPUTS)
def test_the_packages_bisection(kind: str, alpha: float) -> None:
    x = quantised(PACKAGE_INPUTS[kind]().double())
    grad = torch.randn_like(x)
    # the slope of a weight above the edge of the support is p^(2 - alpha): infinite at the edge for alpha > 2, where
    # both lose digits
    tolerance = 1e-11 if alpha <= 2 else 1e-9
    for shape, shift in (((), 0.0), ((1,), 1e3), ((x.shape[0], 1), 0.0), ((x.shape[0], 1), 1e6)):
        spread = torch.linspace(0, 1e-3, math.prod(shape), dtype=torch.float64).reshape(shape)
        a = (alpha + spread).requires_grad_()
        leaf = x.clone().requires_grad_()
        # bisection in numbers of 1e4 (alpha - 1) is no better than this; the package's own, on what is near its largest
        near = (leaf - leaf.amax(-1, keepdim=True).detach()).clamp(min=-1e3)
        expected = package.entmax_bisect(near, a, n_iter=100)
        judges = [expected, *torch.autograd.grad(expected, (leaf, a), grad)]
        result = reweighting.entmax(moved := (x + shift).requires_grad_(), alpha=a)
        for ours, judge in zip([result, *torch.autograd.grad(result, (moved, a), grad)], judges, strict=True):
            size = max(1.0, judge.abs().max().item())
            torch.testing.assert_close(ours, judge, rtol=0, atol=tolerance * size / min(1, (alpha - 1) ** 2))
    if alpha not in (1.5, 2):  # these numbers go elsewhere
        as_number = reweighting.entmax(x, alpha=alpha)
        assert torch.equal(as_number, reweighting.entmax(x, alpha=torch.tensor(alpha, dtype=torch.float64)))


def test_alphas_that_broadcast() -> None:
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    for dim, shape in (
        (-1, (3, 1, 1)),
        (-1, (2, 1, 4, 1)),
        (1, (2, 1, 1, 5)),
        (1, (1, 1, 5)),
        (0, (3, 4, 1)),
        (2, (5,)),
    ):
        alpha = 1.2 + torch.rand(shape, dtype=torch.float64)
        result = reweighting.entmax(x, alpha=alpha.requires_grad_(), dim=dim)
        grad = torch.randn_like(x)
        expected = package.entmax_bisect(
            x.movedim(dim, -1),
            alpha.expand([1 if d == dim % 4 else s for d, s in enumerate(x.shape)]).movedim(dim, -1),
            -1,
            100,
        ).movedim(-1, dim)
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
        ours, theirs = (torch.autograd.grad(p, alpha, grad)[0] for p in (result, expected))
        assert ours.shape == alpha.shape
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def fails(function: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Whether it crashes or gives NaN."""
    try:
        return bool(function(x).isnan().any())
    except (RuntimeError, IndexError):
        return True


PAIRS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "sparsemax": (reweighting.sparsemax, package.sparsemax),
    "entmax15": (reweighting.entmax15, package.entmax15),
    "entmax, 1.3": (lambda x: reweighting.entmax(x, alpha=1.3), lambda x: package.entmax_bisect(x, 1.3)),
    "entmax, 3": (lambda x: reweighting.entmax(x, alpha=3.0), lambda x: package.entmax_bisect(x, 3.0)),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_right_where_the_package_fails(pair: str, dtype: torch.dtype) -> None:
    ours, theirs = PAIRS[pair]
    # a row with nothing left
    x = torch.randn(3, 5).to(dtype)
    x[1] = -INF
    assert fails(theirs, x)
    weights, grad = both(ours, x, torch.randn(3, 5).to(dtype))
    assert (weights[1] == 0).all()
    assert (grad[1] == 0).all()
    assert torch.equal(weights[[0, 2]], ours(x[[0, 2]]))
    # a row of nothing
    assert fails(theirs, x[:, :0])
    assert ours(x[:, :0]).shape == (3, 0)
    # rows padded with the lowest number instead
    x = torch.full((1, 4), torch.finfo(dtype).min, dtype=dtype)
    assert fails(theirs, x) or theirs(x).sum() > 0.9  # it hands weight to what is masked
    assert (ours(x) == 0).all()
    # scores that, times (alpha - 1), are no numbers of the dtype any more
    if pair == "entmax, 3" and dtype != torch.float64:
        x = torch.tensor([[0.9 * torch.finfo(dtype).max, 1.0, 0.0]]).to(dtype)
        assert fails(theirs, x)
        assert ours(x).tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_precision_where_the_package_is_off(pair: str, dtype: torch.dtype) -> None:
    ours, theirs = PAIRS[pair]
    x, grad = (torch.rand(20, 400) / (1 if "3" in pair else 10)).to(dtype), torch.randn(20, 400).to(dtype)
    judges = both(ours, x.double(), grad.double())
    rounding = torch.finfo(dtype).eps
    for result, other, judge in zip(both(ours, x, grad), both(theirs, x, grad), judges, strict=True):
        error, their_error = ((t.double() - judge).norm() / judge.norm() for t in (result, other))
        assert error < rounding / 2  # one rounding, at the end
        assert their_error > 2 * error


# ---- limits


@impls
def test_entmax_from_softmax_to_sparsemax(impl: str) -> None:
    x = 2 * torch.randn(20, 30, dtype=torch.float64)
    softmax = torch.softmax(x, -1)
    for alpha in (1 + 1e-3, 1 + 1e-6, 1 + 1e-9):
        # the difference is of first order in alpha - 1; 5 is a bound for the derivative on these inputs
        assert (reweighting.entmax(x, alpha=alpha) - softmax).abs().max() < 5 * (alpha - 1)
    # in float32 too, down to alphas that are, there, no longer above 1
    for alpha in (1 + 1e-6, 1 + 2e-7, 1 + 1e-7, 1 + 3e-8, 1 + 1e-12):
        assert (reweighting.entmax(x.float(), alpha=alpha, impl=impl) - softmax).abs().max() < 1e-5
    for alpha, closed in ((1.5, reweighting.entmax15(x, impl=impl)), (2.0, reweighting.sparsemax(x, impl=impl))):
        assert torch.equal(reweighting.entmax(x, alpha=alpha, impl=impl), closed)
        for close in (alpha - 1e-9, alpha + 1e-9, torch.tensor(alpha, dtype=torch.float64)):
            torch.testing.assert_close(reweighting.entmax(x, alpha=close), closed, rtol=0, atol=1e-7)
    one_hot = nn.functional.one_hot(x.argmax(-1), 30).double()
    torch.testing.assert_close(reweighting.entmax(x, alpha=1000.0), one_hot, rtol=0, atol=1e-2)


@impls
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cold_softmax_is_sparsemaxs_vertex(impl: str, dtype: torch.dtype) -> None:
    x = torch.randn(20, 30).to(dtype)
    x[range(20), torch.randint(30, (20,))] = (x.amax() + 1.5).item()
    sparse = reweighting.sparsemax(x, impl=impl)
    assert (sparse.amax(-1) == 1).all()
    for temperature in (1e-3, 1e-4, 1e-10, 1e-30, 1e-38, 1e-42, 1e-300):
        assert torch.equal(reweighting.softmax(x, temperature=temperature, impl=impl), sparse)
        as_tensor = torch.tensor(temperature, dtype=torch.float64)
        assert torch.equal(reweighting.softmax(x, temperature=as_tensor, impl=impl), sparse)
    flat = reweighting.softmax(x, temperature=1e30, impl=impl)
    torch.testing.assert_close(flat, torch.full_like(x, 1 / 30))


@impls
def test_temperature_one_is_torchs_softmax(impl: str) -> None:
    x = torch.randn(7, 30)
    for temperature in (1, 1.0, torch.tensor(1.0)):
        torch.testing.assert_close(reweighting.softmax(x, temperature=temperature, impl=impl), torch.softmax(x, -1))
    torch.testing.assert_close(reweighting.softmax(x, temperature=3, impl=impl), torch.softmax(x / 3, -1))


@impls
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_evsoftmax_keeps_what_is_at_or_above_the_mean(impl: str, dtype: torch.dtype) -> None:
    # numbers of a few bits, whose sums are exact, and means that are entries
    x = torch.randint(-8, 9, (400, 8)).to(dtype)
    weights = reweighting.evsoftmax(x, impl=impl)
    at = 0
    for row_weights, row in zip(weights, x, strict=True):
        values = [Fraction(v) for v in row.tolist()]
        mean = sum(values) / 8
        at += mean in values
        assert (row_weights > 0).tolist() == [v >= mean for v in values]
    assert at > 20  # rows with an entry exactly at the mean
    # no rounding of a mean may lose them all
    for value in (0.1, 1e-3, 1 / 3, 77.7, -3e4):
        for length in (3, 7, 10, 1000):
            row = torch.full((length,), value).to(dtype)
            torch.testing.assert_close(
                reweighting.evsoftmax(row, impl=impl).double(),
                torch.full((length,), 1 / length).double(),
                rtol=1e-2,
                atol=0,
            )


@impls
def test_evsoftmax_in_training(impl: str) -> None:
    x = torch.randn(9, 20, dtype=torch.float64)
    sharp = reweighting.evsoftmax(x, impl=impl)
    before = INF
    for eps in (1e-1, 1e-3, 1e-6, 1e-12):
        trained = reweighting.evsoftmax(x, eps=eps, impl=impl)
        assert (trained > 0).all()
        torch.testing.assert_close(trained.sum(-1), torch.ones(9).double())
        distance = (trained - sharp).abs().max().item()
        assert distance < min(before, 20 * eps)
        before = distance
    assert torch.equal(reweighting.evsoftmax(x, eps=0, impl=impl), sharp)
    huge = reweighting.evsoftmax(x, eps=1e12, impl=impl)  # all alike: softmax
    torch.testing.assert_close(huge, torch.softmax(x, -1), rtol=1e-9, atol=0)


@impls
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_topk_keeps_exactly_k(impl: str, dtype: torch.dtype) -> None:
    x = torch.randint(-2, 3, (50, 20)).to(dtype)  # full of ties
    mask = torch.rand(50, 20) < 0.6
    mask[0], mask[1] = False, True
    for k in (1, 2, 7, 19, 20, 21, 1000):
        weights = reweighting.topk(x, k=k, impl=impl)
        assert ((weights > 0).sum(-1) == min(k, 20)).all()
        kept = torch.where(weights > 0, x, INF).amin(-1)
        assert (torch.where(weights > 0, -INF, x).amax(-1) <= kept).all()
        masked = reweighting.topk(x, k=k, mask=mask, impl=impl)
        assert torch.equal((masked > 0).sum(-1), mask.sum(-1).clamp(max=k))
        assert (masked[~mask] == 0).all()


@impls
def test_topk_of_a_share(impl: str) -> None:
    # every share in percent of every number up to 200, in rows that are masked beyond it; exactly, by integers
    lengths = torch.arange(1, 201)
    x = torch.randn(200, 200)
    mask = torch.arange(200) < lengths[:, None]
    for percent in range(1, 101, 1 if impl == "auto" else 7):
        wanted = torch.tensor([-(-percent * n // 100) for n in lengths.tolist()])
        for share, masked in ((percent / 100, {"mask": mask}), (percent / 100, {})):
            rows = x if masked else x.masked_fill(~mask, -INF)
            kept = (reweighting.topk(rows, k=share, impl=impl, **masked) > 0).sum(-1)
            wrong = kept != wanted
            assert not wrong.any(), f"{share} of {lengths[wrong].tolist()}: {kept[wrong].tolist()}"
    for share in (1 / 3, 2 / 3):
        kept = (reweighting.topk(x, k=share, mask=mask, impl=impl) > 0).sum(-1)
        assert torch.equal(kept[2::3], lengths[2::3] * round(3 * share) // 3)


@impls
def test_topk_of_all_is_softmax(impl: str) -> None:
    x = torch.randn(5, 20)
    for k in (20, 10**9, 1.0):
        torch.testing.assert_close(reweighting.topk(x, k=k, impl=impl), torch.softmax(x, -1))


@impls
def test_sparsehourglass_between_its_limits(impl: str) -> None:
    x = torch.randn(20, 9, dtype=torch.float64)
    mask = torch.rand(20, 9) < 0.8
    for more in ({}, {"mask": mask}):
        sparsemax = reweighting.sparsemax(x, impl=impl, **more)
        assert torch.equal(reweighting.sparsehourglass(x, q=INF, impl=impl, **more), sparsemax)
        for q in (1e6, 1e9, 1e12):
            assert (reweighting.sparsehourglass(x, q=q, impl=impl, **more) - sparsemax).abs().max() < 30 / q
    total = x.sum(-1, keepdim=True).abs()
    torch.testing.assert_close(
        reweighting.sparsehourglass(x, q=1e-12, impl=impl), reweighting.sparsemax(x / total), rtol=0, atol=1e-9
    )
    probabilities = torch.softmax(x, -1)  # of sum 1: the factor is 1 for every q
    for q in (1e-3, 1.0, 1e3):
        torch.testing.assert_close(
            reweighting.sparsehourglass(probabilities, q=q, impl=impl), probabilities, rtol=1e-12, atol=1e-15
        )
    # the paper's reason for it: sparsemax knows no scale, this one stays soft for large inputs
    assert (reweighting.sparsehourglass(1e3 * x[:1].abs(), q=1e-3, impl=impl) > 0).sum() > 1
    assert (reweighting.sparsemax(1e3 * x[:1].abs()) > 0).sum() == 1


# ---- the rules for all


@every
@impls
@pytest.mark.parametrize("fill", ["mask", "-inf", "lowest", "half", "both"])
def test_masked_entries(case: str, impl: str, fill: str) -> None:
    for dtype in DTYPES:
        masked_entries(case, impl, dtype, fill)


def masked_entries(case: str, impl: str, dtype: torch.dtype, fill: str) -> None:
    x = torch.randn(6, 40).to(dtype)
    off = torch.rand(x.shape) < 0.4
    off[1], off[2] = True, False
    lowest = torch.finfo(dtype).min
    mask = None
    if fill == "mask":
        mask = ~off
        x[off] = torch.tensor([NAN, INF, 1e4, -INF]).to(dtype)[torch.randint(4, (int(off.sum()),))]
    elif fill == "both":
        first = torch.rand(x.shape) < 0.5
        mask = ~(off & first)
        x[off & ~first] = -INF
    else:
        x[off] = {"-inf": -INF, "lowest": lowest, "half": lowest / 2}[fill]
    grad = torch.randn(x.shape).to(dtype)
    grad[off] = torch.tensor([INF, NAN, 1.0]).to(dtype)[torch.randint(3, (int(off.sum()),))]
    weights, of_x = run(case, x, grad, mask=mask, impl=impl)
    assert (weights[off] == 0).all()
    assert (of_x[off] == 0).all()
    assert weights.isfinite().all()
    assert of_x.isfinite().all()
    sums = weights.double().sum(-1)
    assert sums[1] == 0
    torch.testing.assert_close(sums[[0, 2, 3, 4, 5]], torch.ones(5).double(), rtol=0, atol=40 * torch.finfo(dtype).eps)
    # what is masked reaches nothing else
    # (beyond alpha = 2 the slope at the edge of the support is infinite, and a rounding of the threshold counts more)
    rounding = torch.finfo(dtype).eps * (30 if "2.5" in case else 1)
    tolerance = {"rtol": 4 * rounding, "atol": 8 * rounding}
    for row in (0, 2, 3):
        on = ~off[row]
        alone = run(case, x[row][on], grad[row][on], impl=impl)
        torch.testing.assert_close(weights[row][on], alone[0], **tolerance)
        torch.testing.assert_close(of_x[row][on], alone[1], **tolerance)


LEARNED: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x, t, **o: reweighting.softmax(x, temperature=t, **o),
    "entmax": lambda x, t, **o: reweighting.entmax(x, alpha=1 + t, **o),
    "entmax beyond 2": lambda x, t, **o: reweighting.entmax(x, alpha=2 + t, **o),
    "multimax": lambda x, t, **o: reweighting.multimax(x, t * COEFS.to(t.dtype), KNOTS, **o),
    "attnscale": lambda x, t, **o: reweighting.attnscale(x, omega=t.reshape(()), **o),
}


@pytest.mark.parametrize("case", LEARNED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_masked_entry_reaches_what_is_learned(case: str, dtype: torch.dtype) -> None:
    x = torch.randn(5, 30).to(dtype)
    off = torch.rand(x.shape) < 0.4
    off[1] = True
    grad = torch.randn(x.shape).to(dtype)
    grads = []
    for fill in (-INF, torch.finfo(dtype).min, None):
        t = torch.full((1, 1), 0.6, dtype=torch.float64, requires_grad=True)
        masked = {"mask": ~off} if fill is None else {}
        values = x.masked_fill(off, NAN if fill is None else fill)  # under a mask there may be anything
        LEARNED[case](values, t, **masked).backward(grad.masked_fill(off, NAN))
        grads.append(t.grad.item())
    assert grads[0] == grads[1] == grads[2]
    assert math.isfinite(grads[0])
    alone = torch.full((1, 1), 0.6, dtype=torch.float64, requires_grad=True)
    for row in (0, 2, 3, 4):
        LEARNED[case](x[row : row + 1, ~off[row]], alone).backward(grad[row : row + 1, ~off[row]])
    assert grads[0] == pytest.approx(alone.grad.item(), rel=1e-4, abs=1e-4)


@every
@impls
@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize("what", [NAN, INF])
def test_nan_shows_in_its_row_only(case: str, impl: str, dim: int, what: float) -> None:
    x = torch.randn(20, 20)
    x[3, 5] = what
    x[3, 6], x[6, 5], x[4, 4] = -INF, -INF, -INF
    mask = torch.ones(20, 20, dtype=torch.bool)
    mask[3, 7], mask[7, 5] = False, False
    weights, of_x = run(case, x, torch.randn(20, 20), dim=dim, mask=mask, impl=impl)
    in_row = torch.zeros(20, 20, dtype=torch.bool)
    in_row[(3, slice(None)) if dim == -1 else (slice(None), 5)] = True
    off = ~mask | (x == -INF)
    assert weights[in_row & ~off].isnan().all()
    assert (weights[off] == 0).all()
    assert (of_x[off] == 0).all()
    assert weights[~in_row].isfinite().all()
    assert of_x[~in_row].isfinite().all()


@every
@impls
def test_nan_under_a_mask_takes_no_part(case: str, impl: str) -> None:
    x, mask = torch.randn(3, 30), torch.ones(3, 30, dtype=torch.bool)
    x[1, 7], mask[1, 7] = NAN, False
    for value in run(case, x, torch.randn(3, 30), mask=mask, impl=impl):
        assert value.isfinite().all()


def distinct(rows: int, length: int) -> Tensor:
    """Rows of numbers that are still different in half precision, in random order."""
    values = torch.linspace(-1.5, 1.7, length) ** 3
    return torch.stack([values[torch.randperm(length)] for _ in range(rows)])


def assert_as_good_as_reference(case: str, draws: list[Tensor]) -> None:
    """Errors against float64 at most 2 times (forward) and 3 times (backward) those of the reference in that dtype."""
    squares = torch.zeros(2, 3, dtype=torch.float64)
    for x in draws:
        grad = torch.randn(x.shape).to(x.dtype)
        exact = run(case, x.double(), grad.double(), impl="reference")
        eager = run(case, x, grad, impl="reference")
        ours = run(case, x, grad)
        for i, (judge, theirs, result) in enumerate(zip(exact, eager, ours, strict=True)):
            assert result.dtype == theirs.dtype == x.dtype
            for j, value in enumerate((result.double() - judge, theirs.double() - judge, judge)):
                squares[i, j] += value.square().sum()
    for factor, row in zip((2, 3), squares.sqrt().tolist(), strict=True):
        error, allowed, size = row
        rounding = size * torch.finfo(draws[0].dtype).eps
        if draws[0].dtype == torch.float64:
            allowed = 30 * rounding  # the judge is no better than the judged
        assert error <= max(factor * allowed, 0.5 * rounding), f"{error / allowed:.2f} times the reference's error"


@every
def test_precision(isa: str, case: str) -> None:
    for dtype in DTYPES:
        assert_as_good_as_reference(case, [(distinct(20, 65) * (1 + i / 16)).to(dtype) for i in range(6)])


@every
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_precision_is_computed_in_float32(case: str, dtype: torch.dtype) -> None:
    x = distinct(20, 65).to(dtype)
    assert torch.equal(of(case)(x), of(case)(x.float()).to(dtype))


@every
def test_lengths(isa: str, case: str) -> None:
    lengths = sorted({1, 2, 3, 1000, 5000, 33000} | {2**k + d for k in range(2, 9) for d in (-1, 0, 1)})
    for length in lengths:
        x = torch.randn(3, length) * 2
        grad = torch.randn(3, length)
        ours, judges = run(case, x, grad), run(case, x.double(), grad.double(), impl="reference")
        for result, judge in zip(ours, judges, strict=True):
            # entmax beyond alpha = 2 has an infinite slope at the edge of the support: there a rounding counts more
            tolerance = 2e-6 if "2.5" not in case else 1e-3
            torch.testing.assert_close(result.double(), judge, rtol=50 * tolerance, atol=tolerance)


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(4, 5, 17, dtype=torch.float64),
    "transposed": lambda: torch.randn(17, 5, 4, dtype=torch.float64).transpose(0, 2),
    "middle": lambda: torch.randn(4, 17, 5, dtype=torch.float64).transpose(1, 2),
    "channels last": lambda: torch.randn(2, 19, 3, 5, dtype=torch.float64).contiguous(
        memory_format=torch.channels_last
    ),
    "sliced": lambda: torch.randn(4, 10, 80, dtype=torch.float64)[:, ::2, 3:77:2],
    "expanded": lambda: torch.randn(4, 1, 17, dtype=torch.float64).expand(4, 5, 17),
    "expanded along dim": lambda: torch.randn(4, 5, 1, dtype=torch.float64).expand(4, 5, 17),
    "one row": lambda: torch.randn(30, dtype=torch.float64),
    "one entry": lambda: torch.randn(1, 1, 1, dtype=torch.float64),
}


@every
@impls
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_dims(case: str, impl: str, layout: str) -> None:
    x = LAYOUTS[layout]()
    if case.startswith("topk") and layout == "expanded along dim":
        return  # which of equal entries remain is free
    for dim in range(-1, x.ndim - 1):
        for grad in (torch.randn_like(x), torch.randn((), dtype=x.dtype).expand(x.shape)):
            plain = x.movedim(dim, -1).contiguous(), grad.movedim(dim, -1).contiguous()
            judges = [t.movedim(-1, dim) for t in run(case, *plain, impl="reference")]
            for result, judge in zip(run(case, x, grad, dim=dim, impl=impl), judges, strict=True):
                assert result.shape == x.shape
                # at the edge of the support entmax beyond alpha = 2 has an infinite slope
                torch.testing.assert_close(result, judge, rtol=1e-7, atol=1e-10)


@every
@impls
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (3, 0, 4), (), (1,), (7, 1)])
def test_empty_and_single(case: str, impl: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    for dim in range(-max(len(shape), 1), max(len(shape), 1)):
        weights, of_x = run(case, x, torch.randn(shape), dim=dim, impl=impl)
        assert weights.shape == of_x.shape == x.shape
        if not shape or shape[dim] == 1:
            assert (weights == 1).all()
            torch.testing.assert_close(of_x, torch.zeros(shape), rtol=0, atol=1e-6)
    if CASES[case][0] == "entmax" and shape:
        alpha = torch.full((*shape[:-1], 1), 1.3, requires_grad=True)
        reweighting.entmax(x.requires_grad_(), alpha=alpha, impl=impl).sum().backward()
        assert alpha.grad is None or torch.equal(alpha.grad, torch.zeros_like(alpha))  # nothing of memory not written
        x = x.detach()
    for fill in (-INF, torch.finfo().min):
        for value in run(case, torch.full(shape, fill), torch.ones(shape), impl=impl):
            assert (value == 0).all()
    off = torch.zeros(shape, dtype=torch.bool)
    for value in run(case, x, torch.ones(shape), mask=off, impl=impl):
        assert (value == 0).all()


@every
@impls
def test_masks_that_broadcast(case: str, impl: str) -> None:
    x = torch.randn(4, 5, 17)
    for shape in ((4, 5, 17), (1, 5, 17), (5, 1), (17,), (4, 1, 1), ()):
        mask = torch.rand(shape) < 0.6
        for dim in (-1, 0, 1):
            result = of(case)(x, dim=dim, mask=mask, impl=impl)
            filled = of(case)(x.masked_fill(~mask, -INF), dim=dim, impl=impl)
            assert torch.equal(result, filled)


@every
@impls
def test_inputs_are_left_alone(case: str, impl: str) -> None:
    x, mask = torch.randn(5, 9), torch.rand(5, 9) < 0.7
    before = x.clone(), mask.clone()
    run(case, x, torch.ones(5, 9), mask=mask, impl=impl)
    assert torch.equal(x, before[0])
    assert torch.equal(mask, before[1])


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bitwise_equal_in_two_runs_and_with_any_number_of_threads(case: str, dtype: torch.dtype) -> None:
    x, grad = (torch.randn(150, 997).to(dtype) for _ in range(2))
    first = run(case, x, grad)
    for threads in (2, 1):
        torch.set_num_threads(threads)
        for ours, again in zip(first, run(case, x, grad), strict=True):
            assert torch.equal(ours, again)


# ---- as torch sees them


@every
@impls
def test_gradcheck_and_double_backward(case: str, impl: str) -> None:
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[0, 2:4], mask[1] = False, False
    for more in ({}, {"mask": mask}):
        function = lambda x, more=more: of(case)(x, impl=impl, **more)  # noqa: E731
        assert torch.autograd.gradcheck(function, x)
        assert torch.autograd.gradgradcheck(function, x, fast_mode=bool(more) or impl == "reference")


@pytest.mark.parametrize("case", LEARNED)
def test_gradcheck_of_what_is_learned(case: str) -> None:
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    t = (0.3 + torch.rand(3 if "max" in case and case != "multimax" else 1, 1)).double().requires_grad_()
    assert torch.autograd.gradcheck(LEARNED[case], (x, t))
    assert torch.autograd.gradgradcheck(LEARNED[case], (x, t), fast_mode=True)
    # and without the input's
    (alone,) = torch.autograd.grad(LEARNED[case](x.detach(), t)[:, 0].sum(), t)
    together = torch.autograd.grad(LEARNED[case](x, t)[:, 0].sum(), t)[0]
    assert torch.equal(alone, together)


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_torch_func(case: str, dtype: torch.dtype) -> None:
    x = distinct(12, 9).reshape(3, 4, 9).to(dtype)
    function = of(case)

    def loss(x: Tensor) -> Tensor:
        return function(x).double().square().sum()

    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    leaf = x.clone().requires_grad_()
    loss(leaf).backward()
    torch.testing.assert_close(torch.func.grad(loss)(x), leaf.grad, **tolerance)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(x), leaf.grad, **tolerance)
    for dim in (0, 1):
        torch.testing.assert_close(torch.func.vmap(function, dim, dim)(x), function(x), **tolerance)
    inner = torch.func.vmap(lambda x: function(x, dim=0), 2, 2)(x)
    torch.testing.assert_close(inner, function(x, dim=0), **tolerance)
    mask = torch.rand(3, 9) < 0.7
    mapped = torch.func.vmap(lambda x, mask: function(x, mask=mask))(x, mask)
    torch.testing.assert_close(mapped, function(x, mask=mask[:, None]), **tolerance)
    if dtype == torch.float64:
        row = x[0, 0]
        jacobian = torch.autograd.functional.jacobian(function, row)
        torch.testing.assert_close(torch.func.jacrev(function)(row), jacobian)
        torch.testing.assert_close(torch.func.jacfwd(function)(row), jacobian)
        hessian = torch.autograd.functional.hessian(loss, row)
        torch.testing.assert_close(torch.func.jacrev(torch.func.jacrev(loss))(row), hessian)
        torch.testing.assert_close(torch.func.hessian(loss)(row), hessian)


@every
def test_forward_mode(case: str) -> None:
    x, tangent = torch.randn(3, 9, dtype=torch.float64), torch.randn(3, 9, dtype=torch.float64)
    x[1], x[2, :4] = -INF, -INF
    leaf = x.clone().requires_grad_()
    function = of(case)
    value, along = torch.func.jvp(function, (x,), (tangent,))
    torch.testing.assert_close(value, function(x), rtol=1e-12, atol=1e-14)
    upstream = torch.randn_like(x)
    (back,) = torch.autograd.grad(function(leaf), leaf, upstream)
    assert along.isfinite().all()
    torch.testing.assert_close((along * upstream).sum(), (back * tangent).sum(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", LEARNED)
def test_torch_func_of_what_is_learned(case: str) -> None:
    x, upstream = torch.randn(4, 3, 9, dtype=torch.float64), torch.randn(3, 9, dtype=torch.float64)
    t = torch.full((1, 1), 0.6, dtype=torch.float64)

    def loss(x: Tensor, t: Tensor) -> Tensor:
        return (LEARNED[case](x, t) * upstream).sum()

    each = torch.func.vmap(torch.func.grad(loss, (0, 1)), (0, None))(x, t)
    for i, row in enumerate(x):
        leaves = row.clone().requires_grad_(), t.clone().requires_grad_()
        for ours, judge in zip(each, torch.autograd.grad(loss(*leaves), leaves), strict=True):
            torch.testing.assert_close(ours[i], judge)
    tangents = torch.randn_like(x[0]), torch.randn_like(t)
    _, along = torch.func.jvp(loss, (x[0], t), tangents)
    leaves = x[0].clone().requires_grad_(), t.clone().requires_grad_()
    grads = torch.autograd.grad(loss(*leaves), leaves)
    torch.testing.assert_close(along, sum((g * v).sum() for g, v in zip(grads, tangents, strict=True)))


def compiles(function: Callable[..., Tensor], backend: str, dynamic: bool, dtype: torch.dtype, *others: Tensor) -> None:
    torch._dynamo.reset()

    def loss(x: Tensor, mask: Tensor, *others: Tensor) -> Tensor:
        weights = function(x * 2, *others, mask=mask)
        return (weights * torch.arange(weights.shape[-1])).square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend=backend)
    for length in (9, 16, 21) if dynamic else (9,):
        x, mask = distinct(12, length).reshape(3, 4, length).to(dtype), torch.rand(4, length) < 0.8
        results = []
        for one in (compiled, loss):
            leaves = [t.clone().requires_grad_() for t in (x, *others)]
            value = one(leaves[0], mask, *leaves[1:])
            results.append([value, *torch.autograd.grad(value, leaves)])
        with torch.no_grad():
            results[0].append(compiled(x, mask, *others))
            results[1].append(loss(x, mask, *others))
        for ours, judge in zip(*results, strict=True):
            tolerance = 1e-4 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(ours, judge, rtol=tolerance, atol=tolerance)
    torch._dynamo.reset()


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("entmax, 2", "entmax, 2.5", "topk, share")])
def test_compile(case: str) -> None:
    compiles(of(case), "aot_eager", True, torch.float32)


@pytest.mark.parametrize("case", ["softmax", "entmax", "attnscale"])
def test_compile_what_is_learned(case: str) -> None:
    compiles(LEARNED[case], "aot_eager", False, torch.float32, torch.full((1, 1), 0.6))


@pytest.mark.parametrize("case", ["sparsemax", "topk, share"])
def test_compile_to_code(case: str) -> None:
    compiles(of(case), "inductor", True, torch.bfloat16)


def test_compile_modules() -> None:
    torch._dynamo.reset()
    x, mask = torch.randn(2, 4, 5, 8), torch.rand(5, 8) < 0.7
    for layer in (
        reweighting.Entmax(1.3, learn=True, heads=4),
        reweighting.Softmax(0.5, learn=True, heads=4),
        reweighting.AttnScaledSoftmax(0.5, heads=4),
    ):
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x, mask), layer(x, mask))
    torch._dynamo.reset()


@every
@impls
def test_autocast_does_as_softmax_does(case: str, impl: str) -> None:
    for dtype in DTYPES:
        x = torch.randn(4, 9).to(dtype).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            weights = of(case)(x, impl=impl)
            assert weights.dtype == torch.softmax(x, -1).dtype
        assert torch.equal(weights, of(case)(x, impl=impl))
        weights.backward(torch.ones_like(weights))
        assert x.grad.dtype == dtype


@every
def test_other_devices_take_the_reference(case: str) -> None:
    name, options = CASES[case]
    options = {key: t.to("meta") if isinstance(t, Tensor) else t for key, t in options.items()}
    weights = reweighting.get(name, **options)(torch.randn(3, 4, device="meta"))
    assert weights.shape == (3, 4)
    assert weights.is_meta


@needs_kernels
@pytest.mark.parametrize("case", ["sparsemax", "entmax15", "entmax, 2", "sparsehourglass", "topk", "evsoftmax"])
def test_an_impl_given_outright_runs(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5, 30)
    cpu = of(case)(x, impl="cpu")
    assert torch.equal(cpu, of(case)(x))
    torch.testing.assert_close(cpu, of(case)(x, impl="reference"))
    # and really there: without the reference's formulas it still does
    for name in ("sparsemax", "entmax15"):
        monkeypatch.setattr(reference, name, None)
    assert torch.equal(of(case)(x, impl="cpu"), cpu)
    with pytest.raises(RuntimeError, match="impl='cpu' cannot run: the input is on meta"):
        of(case)(x.to("meta"), impl="cpu")
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward-mode derivatives"):
        of(case)(torch.autograd.forward_ad.make_dual(x, x), impl="cpu")


# ---- properties

numbers = st.floats(-50, 50, width=32)
rows = st.lists(numbers, min_size=1, max_size=40)
# numbers to which shifts can be added without rounding
grid = st.lists(st.integers(-(2**14), 2**14).map(lambda i: i / 2**10), min_size=1, max_size=40)
alphas = st.floats(1.01, 4.0)
SHIFT_INVARIANT = [case for case in CASES if CASES[case][0] not in ("multimax", "sparsehourglass")]
quick = settings(max_examples=40, deadline=None, derandomize=True)


@every
@quick
@given(row=rows, dtype=st.sampled_from(DTYPES), data=st.data())
def test_weights_are_a_distribution_and_keep_the_order(
    case: str, row: list[float], dtype: torch.dtype, data: st.DataObject
) -> None:
    x = torch.tensor(row).to(dtype)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(row), max_size=len(row))))
    weights = of(case)(x, mask=mask)
    if case != "attnscale":  # whose weights may be negative
        assert (weights >= 0).all()
    assert (weights[~mask] == 0).all()
    wanted = float(mask.any())
    assert weights.double().sum().item() == pytest.approx(wanted, abs=len(row) * torch.finfo(dtype).eps)
    if CASES[case][0] != "multimax":  # sigma need not be monotone
        order = x[mask].argsort(stable=True)
        ranked = weights[mask][order]
        if CASES[case][0] == "topk":  # of equal entries some remain
            ranked = (
                torch.where(ranked > 0, ranked, 0).sort().values if x[mask].unique().numel() < len(ranked) else ranked
            )
        assert (ranked.diff() >= 0).all()
    if CASES[case][0] != "topk":
        for value in x[mask].unique():
            assert weights[mask & (x == value)].unique().numel() == 1


@pytest.mark.parametrize("case", SHIFT_INVARIANT)
@quick
@given(row=grid, shift=st.integers(-(2**20), 2**20))
def test_a_constant_changes_nothing(case: str, row: list[float], shift: int) -> None:
    x = torch.tensor(row, dtype=torch.float64)
    torch.testing.assert_close(of(case)(x + shift), of(case)(x), rtol=1e-9, atol=1e-12)


@every
@quick
@given(row=rows, seed=st.integers(0, 2**31))
def test_permutations_go_through(case: str, row: list[float], seed: int) -> None:
    x = torch.tensor(row, dtype=torch.float64)
    order = torch.randperm(len(row), generator=torch.Generator().manual_seed(seed))
    ours, judge = of(case)(x[order]), of(case)(x)[order]
    if CASES[case][0] == "topk":
        ours, judge = ours.sort().values, judge.sort().values
    torch.testing.assert_close(ours, judge, rtol=1e-9, atol=1e-12)


@quick
@given(row=rows, first=alphas, second=alphas)
def test_the_support_shrinks_as_alpha_grows(row: list[float], first: float, second: float) -> None:
    x = torch.tensor(row, dtype=torch.float64)
    low, high = (reweighting.entmax(x, alpha=alpha) for alpha in sorted((first, second)))
    assert (low[high > 1e-6] > 0).all()
    assert high.max() >= low.max() - 1e-9


@every
@quick
@given(row=rows, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_kernels_and_reference_agree(case: str, row: list[float], dtype: torch.dtype) -> None:
    x = torch.tensor(row).to(dtype)
    if CASES[case][0] == "sparsehourglass" and abs(sum(row)) < 1e-3 * sum(map(abs, row)):
        return  # a sum that cancels: its rounding is in the factor of all
    scale = max(1.0, x.abs().max().item())
    torch.testing.assert_close(
        of(case)(x), of(case)(x, impl="reference"), rtol=0, atol=8 * scale * torch.finfo(dtype).eps
    )


# ---- what is refused

X = torch.randn(2, 3, 4, 5)
BAD: dict[str, tuple[str, Options, type[Exception], str]] = {
    "alpha 1": ("entmax", {"alpha": 1}, ValueError, "multimax: expected alpha above 1 and finite, got 1"),
    "alpha 1.0": ("entmax", {"alpha": 1.0}, ValueError, "multimax: expected alpha above 1 and finite, got 1.0"),
    "alpha 0.5": ("entmax", {"alpha": 0.5}, ValueError, "multimax: expected alpha above 1 and finite, got 0.5"),
    "alpha -2": ("entmax", {"alpha": -2}, ValueError, "expected alpha above 1 and finite, got -2"),
    "alpha nan": ("entmax", {"alpha": NAN}, ValueError, "expected alpha above 1 and finite, got nan"),
    "alpha inf": ("entmax", {"alpha": INF}, ValueError, "expected alpha above 1 and finite, got inf"),
    "alpha text": ("entmax", {"alpha": "1.5"}, TypeError, "expected alpha to be a number or a tensor, got str"),
    "alpha bool": ("entmax", {"alpha": True}, TypeError, "expected alpha to be a number or a tensor, got bool"),
    "alpha none": ("entmax", {"alpha": None}, TypeError, "expected alpha to be a number or a tensor, got NoneType"),
    "alphas, one of 1": (
        "entmax",
        {"alpha": torch.tensor([1.5, 1.0, 2.0])[:, None, None]},
        ValueError,
        "multimax: expected alpha above 1 and finite, got 1",
    ),
    "alphas, one nan": (
        "entmax",
        {"alpha": torch.tensor([1.5, NAN, 2.0])[:, None, None]},
        ValueError,
        "expected alpha above 1 and finite, got nan",
    ),
    "alpha a tensor of integers": ("entmax", {"alpha": torch.tensor(2)}, TypeError, "expected alpha of dtype float32"),
    "alphas of another shape": (
        "entmax",
        {"alpha": torch.full((3,), 1.5)},
        ValueError,
        "multimax: expected alpha that broadcasts to (2, 3, 4, 1), the input's shape with 1 in dim 3, got (3,)",
    ),
    "alphas along dim": ("entmax", {"alpha": torch.full((5,), 1.5)}, ValueError, "expected alpha that broadcasts to"),
    "alphas of more dims": (
        "entmax",
        {"alpha": torch.full((1, 1, 1, 1, 1), 1.5)},
        ValueError,
        "expected alpha that broadcasts to (2, 3, 4, 1)",
    ),
    "alpha elsewhere": (
        "entmax",
        {"alpha": torch.tensor(1.5, device="meta")},
        ValueError,
        "expected alpha on the input's device, cpu, got meta",
    ),
    "temperature 0": (
        "softmax",
        {"temperature": 0},
        ValueError,
        "multimax: expected temperature above 0 and finite, got 0",
    ),
    "temperature -1": ("softmax", {"temperature": -1.0}, ValueError, "expected temperature above 0 and finite, got -1"),
    "temperature nan": (
        "softmax",
        {"temperature": NAN},
        ValueError,
        "expected temperature above 0 and finite, got nan",
    ),
    "temperature inf": (
        "softmax",
        {"temperature": INF},
        ValueError,
        "expected temperature above 0 and finite, got inf",
    ),
    "temperatures, one of 0": (
        "softmax",
        {"temperature": torch.tensor([[1.0], [0.0], [1.0], [2.0]])},
        ValueError,
        "expected temperature above 0 and finite, got 0",
    ),
    "temperatures of another shape": (
        "softmax",
        {"temperature": torch.ones(2, 1, 1)},
        ValueError,
        "multimax: expected temperature that broadcasts to (2, 3, 4, 1)",
    ),
    "temperature a list": ("softmax", {"temperature": [1.0]}, TypeError, "expected temperature to be a number"),
    "eps -1": ("evsoftmax", {"eps": -1e-9}, ValueError, "multimax: expected eps"),
    "eps nan": ("evsoftmax", {"eps": NAN}, ValueError, "multimax: expected eps"),
    "eps inf": ("evsoftmax", {"eps": INF}, ValueError, "multimax: expected eps"),
    "eps text": ("evsoftmax", {"eps": "a"}, TypeError, "multimax: expected eps to be a number, got str"),
    "eps a tensor": ("evsoftmax", {"eps": torch.tensor(0.1)}, TypeError, "expected eps to be a number, got Tensor"),
    "q 0": ("sparsehourglass", {"q": 0.0}, ValueError, "multimax: expected q above 0"),
    "q -1": ("sparsehourglass", {"q": -1}, ValueError, "multimax: expected q above 0"),
    "q -inf": ("sparsehourglass", {"q": -INF}, ValueError, "multimax: expected q above 0"),
    "q nan": ("sparsehourglass", {"q": NAN}, ValueError, "multimax: expected q above 0"),
    "q none": ("sparsehourglass", {"q": None}, TypeError, "multimax: expected q to be a number"),
    "q a tensor": ("sparsehourglass", {"q": torch.tensor(1.0)}, TypeError, "multimax: expected q to be a number"),
    "q tensors": ("sparsehourglass", {"q": torch.ones(4, 1)}, TypeError, "multimax: expected q to be a number"),
    "omega nan": ("attnscale", {"omega": NAN}, ValueError, "multimax: expected omega above -inf and finite, got nan"),
    "omega inf": ("attnscale", {"omega": INF}, ValueError, "multimax: expected omega above -inf and finite, got inf"),
    "omega -inf": ("attnscale", {"omega": -INF}, ValueError, "expected omega above -inf and finite, got -inf"),
    "omega text": ("attnscale", {"omega": "0"}, TypeError, "multimax: expected omega to be a number, got str"),
    "omegas of other heads": (
        "attnscale",
        {"omega": torch.zeros(4)},
        ValueError,
        "multimax: expected omega of shape () or (3,) for weights of shape (2, 3, 4, 5), got (4,)",
    ),
    "omegas of more dims": ("attnscale", {"omega": torch.zeros(3, 1, 1)}, ValueError, "expected omega of shape ()"),
    "omega of integers": ("attnscale", {"omega": torch.tensor(1)}, TypeError, "expected omega of dtype float32"),
    "omega elsewhere": (
        "attnscale",
        {"omega": torch.tensor(0.5, device="meta")},
        ValueError,
        "expected omega on the input's device",
    ),
    "k 0": ("topk", {"k": 0}, ValueError, "multimax: expected k of at least 1, got 0"),
    "k -3": ("topk", {"k": -3}, ValueError, "multimax: expected k of at least 1, got -3"),
    "k 0.0": ("topk", {"k": 0.0}, ValueError, "multimax: expected k as a share to be in (0, 1], got 0.0"),
    "k 1.5": (
        "topk",
        {"k": 1.5},
        ValueError,
        "multimax: expected k as a share to be in (0, 1], got 1.5; a number of entries is an int",
    ),
    "k -0.5": ("topk", {"k": -0.5}, ValueError, "expected k as a share to be in (0, 1], got -0.5"),
    "k nan": ("topk", {"k": NAN}, ValueError, "expected k as a share to be in (0, 1], got nan"),
    "k inf": ("topk", {"k": INF}, ValueError, "expected k as a share to be in (0, 1], got inf"),
    "k bool": ("topk", {"k": True}, TypeError, "multimax: expected k to be an int or a float, got bool"),
    "k a tensor": (
        "topk",
        {"k": torch.tensor(3)},
        TypeError,
        "multimax: expected k to be an int or a float, got Tensor",
    ),
}


@pytest.mark.parametrize("case", BAD)
@impls
def test_bad_options(case: str, impl: str) -> None:
    name, options, error, text = BAD[case]
    with pytest.raises(error, match=re.escape(text)):
        reweighting.get(name, **options)(X, impl=impl)
    with pytest.raises(error, match=re.escape(text)):
        getattr(reweighting, name)(X, impl=impl, **options)


BAD_INPUT: dict[str, tuple[Any, Options, type[Exception], str]] = {
    "x is a list": ([1.0], {}, TypeError, "multimax: expected x to be a tensor, got list"),
    "x of integers": (torch.arange(4), {}, TypeError, "multimax: expected x of dtype float32, float64, bfloat16"),
    "x of booleans": (torch.ones(4) > 0, {}, TypeError, "got torch.bool; convert it with .float()"),
    "x complex": (X.to(torch.complex64), {}, TypeError, "got torch.complex64"),
    "x sparse": (X.to_sparse(), {}, TypeError, "multimax: expected x to be a dense tensor"),
    "dim too large": (X, {"dim": 4}, ValueError, "multimax: expected dim in [-4, 3] for an input of 4 dims, got 4"),
    "dim too small": (X, {"dim": -5}, ValueError, "multimax: expected dim in [-4, 3] for an input of 4 dims, got -5"),
    "dim of a scalar": (X[0, 0, 0, 0], {"dim": 1}, ValueError, "expected dim in [-1, 0] for an input of 0 dims, got 1"),
    "dim no int": (X, {"dim": 1.0}, TypeError, "multimax: expected dim to be an int, got float"),
    "dim none": (X, {"dim": None}, TypeError, "multimax: expected dim to be an int, got NoneType"),
    "float mask": (X, {"mask": torch.ones(5)}, TypeError, "expected mask to be a boolean tensor, True where an entry"),
    "mask a list": (X, {"mask": [True]}, TypeError, "expected mask to be a boolean tensor"),
    "mask too long": (
        X,
        {"mask": torch.ones(6, dtype=torch.bool)},
        ValueError,
        "multimax: expected a mask that broadcasts to the input's shape (2, 3, 4, 5), got (6,)",
    ),
    "mask of more dims": (X, {"mask": torch.ones(1, 1, 1, 1, 5) > 0}, ValueError, "expected a mask that broadcasts to"),
    "mask elsewhere": (
        X,
        {"mask": torch.ones(5, device="meta") > 0},
        ValueError,
        "expected mask on the input's device",
    ),
    "unknown impl": (X, {"impl": "gpu"}, ValueError, "multimax: expected impl to be one of 'auto', 'reference', 'cpu'"),
    "no triton": (X, {"impl": "triton"}, RuntimeError, "multimax: impl='triton' cannot run"),
}


@pytest.mark.parametrize("wrong", BAD_INPUT)
def test_bad_input(wrong: str) -> None:
    x, options, error, text = BAD_INPUT[wrong]
    for case, impl in itertools.product(CASES, ("auto", "reference")):
        with pytest.raises(error, match=re.escape(text)):
            of(case)(x, **{"impl": impl, **options})


# ---- the registry


def test_registry() -> None:
    assert reweighting.names() == (
        "softmax",
        "multimax",
        "sparsemax",
        "entmax15",
        "entmax",
        "evsoftmax",
        "sparsehourglass",
        "topk",
        "attnscale",
    )
    function = reweighting.get("topk", k=2)
    assert (function.name, dict(function.options)) == ("topk", {"k": 2})
    x = torch.randn(3, 5)
    for case, (name, options) in CASES.items():
        assert torch.equal(of(case)(x), getattr(reweighting, name)(x, **options))
        assert torch.equal(pickle.loads(pickle.dumps(of(case)))(x), of(case)(x))
        assert torch.equal(copy.deepcopy(of(case))(x), of(case)(x))
    assert torch.equal(reweighting.get("softmax")(x, dim=0), reweighting.softmax(x, dim=0))


@pytest.mark.parametrize(
    ("name", "options", "error", "text"),
    [
        ("sparsmax", {}, ValueError, "multimax: expected name to be one of 'softmax', 'multimax', 'sparsemax'"),
        ("Softmax", {}, ValueError, "got 'Softmax'"),
        (None, {}, ValueError, "expected name to be one of"),
        (["softmax"], {}, ValueError, "expected name to be one of"),
        ("entmax15", {"alpha": 1.5}, TypeError, "multimax: expected options of entmax15 out of: none, got alpha"),
        ("entmax", {"apha": 1.5}, TypeError, "multimax: expected options of entmax out of: alpha, got apha"),
        ("topk", {"k": 3, "n": 3, "p": 1}, TypeError, "multimax: expected options of topk out of: k, got n, p"),
        ("softmax", {"dim": 0}, TypeError, "multimax: expected options of softmax out of: temperature, got dim"),
        ("softmax", {"mask": None}, TypeError, "out of: temperature, got mask"),
        ("topk", {}, TypeError, "multimax: expected k for topk, got no such option"),
        (
            "multimax",
            {},
            TypeError,
            "multimax: expected coefs and knots for multimax, got no such option; a multimax.MultiMax module has its",
        ),
        ("multimax", {"coefs": COEFS}, TypeError, "multimax: expected knots for multimax, got no such option"),
        (
            "attnscale",
            {},
            TypeError,
            "multimax: expected omega for attnscale, got no such option; a reweighting.AttnScaledSoftmax module has",
        ),
        ("attnscale", {"alpha": 1.5}, TypeError, "multimax: expected options of attnscale out of: omega, got alpha"),
    ],
    ids=str,
)
def test_bad_names_and_options(name: Any, options: Options, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        reweighting.get(name, **options)


# ---- the modules

LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "Softmax": (lambda: reweighting.Softmax(), reweighting.softmax),
    "Softmax(2)": (lambda: reweighting.Softmax(2), lambda x, **o: reweighting.softmax(x, temperature=2, **o)),
    "Softmax, learned": (
        lambda: reweighting.Softmax(0.5, learn=True),
        lambda x, **o: reweighting.softmax(x, temperature=0.5, **o),
    ),
    "Softmax, per head": (
        lambda: reweighting.Softmax(0.5, learn=True, heads=3),
        lambda x, **o: reweighting.softmax(x, temperature=0.5, **o),
    ),
    "Sparsemax": (lambda: reweighting.Sparsemax(), reweighting.sparsemax),
    "Entmax15": (lambda: reweighting.Entmax15(), reweighting.entmax15),
    "Entmax": (lambda: reweighting.Entmax(), reweighting.entmax15),
    "Entmax(1.2)": (lambda: reweighting.Entmax(1.2), lambda x, **o: reweighting.entmax(x, alpha=1.2, **o)),
    "Entmax, learned": (
        lambda: reweighting.Entmax(1.2, learn=True),
        lambda x, **o: reweighting.entmax(x, alpha=1.2, **o),
    ),
    "Entmax, per head": (
        lambda: reweighting.Entmax(2.2, learn=True, heads=3, bounds=(1.5, 4)),
        lambda x, **o: reweighting.entmax(x, alpha=2.2, **o),
    ),
    "EvSoftmax": (lambda: reweighting.EvSoftmax(0.1), lambda x, **o: reweighting.evsoftmax(x, eps=0.1, **o)),
    "Sparsehourglass": (
        lambda: reweighting.Sparsehourglass(0.3),
        lambda x, **o: reweighting.sparsehourglass(x, q=0.3, **o),
    ),
    "TopK": (lambda: reweighting.TopK(2), lambda x, **o: reweighting.topk(x, k=2, **o)),
    "TopK, share": (lambda: reweighting.TopK(0.3), lambda x, **o: reweighting.topk(x, k=0.3, **o)),
    "AttnScaledSoftmax": (
        lambda: reweighting.AttnScaledSoftmax(0.7, learn=False),
        lambda x, **o: reweighting.attnscale(x, omega=0.7, **o),
    ),
    "AttnScaledSoftmax, learned": (lambda: reweighting.AttnScaledSoftmax(), reweighting.softmax),
    "AttnScaledSoftmax, per head": (
        lambda: reweighting.AttnScaledSoftmax(0.7, heads=3),
        lambda x, **o: reweighting.attnscale(x, omega=0.7, **o),
    ),
}
layers = pytest.mark.parametrize("layer", LAYERS)


@layers
def test_modules_are_the_functions(layer: str) -> None:
    make, function = LAYERS[layer]
    module = make()
    x, mask = torch.randn(2, 3, 4, 5), torch.rand(4, 5) < 0.7
    torch.testing.assert_close(module(x), function(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(module(x, mask), function(x, mask=mask), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(module.function()(x), function(x), rtol=1e-5, atol=1e-6)
    for dim in (0, 1, -2, -1):
        module.dim = dim
        if "head" not in layer:
            torch.testing.assert_close(module(x), function(x, dim=dim), rtol=1e-5, atol=1e-6)
    if "head" not in layer:
        module.dim = -1
        torch.testing.assert_close(module(x[0, 0, 0]), function(x[0, 0, 0]), rtol=1e-5, atol=1e-6)
        assert module(x[0, 0, 0, 0]) == 1
    assert isinstance(module, reweighting.Reweighter)


@layers
def test_modules_save_load_and_copy(layer: str) -> None:
    module, x = LAYERS[layer][0](), torch.randn(2, 3, 4, 5)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    expected = module(x)
    other = LAYERS[layer][0]()
    other.load_state_dict(module.state_dict())
    for again in (other, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(again(x), expected)
    keys = {"Softmax": ["log_temperature"], "Entmax": ["shape"], "AttnScaledSoftmax": ["omega"]}
    keys = keys.get(layer.split(",")[0], [])
    assert list(module.state_dict()) == (keys if "learned" in layer or "head" in layer else [])
    assert list(LAYERS[layer][0]().to("meta").state_dict()) == list(module.state_dict())
    repr(module.to("meta"))


def test_modules_learn() -> None:
    x = torch.randn(2, 3, 4, 5)
    for make, name in (
        (reweighting.Softmax, "temperature"),
        (reweighting.Entmax, "alpha"),
        (reweighting.AttnScaledSoftmax, "omega"),
    ):
        for heads in (None, 3):
            module = make(1.4, learn=True, heads=heads)
            torch.testing.assert_close(getattr(module, name), torch.full(() if heads is None else (3,), 1.4))
            module(x).square().sum().backward()
            (parameter,) = module.parameters()
            assert parameter.shape == (() if heads is None else (3,))
            assert (parameter.grad != 0).all()
            before = module(x).square().sum()
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad / parameter.grad.norm()
            assert module(x).square().sum() < before
            assert module.double()(x.double()).dtype == torch.float64
            module.reset_parameters()
            torch.testing.assert_close(getattr(module, name).float(), torch.full(() if heads is None else (3,), 1.4))


def test_each_head_has_its_own() -> None:
    x = torch.randn(2, 3, 4, 5)
    temperatures, alphas = torch.tensor([0.5, 1.0, 2.0]), torch.tensor([1.1, 1.5, 1.9])
    softmax, entmax = (make(1.4, learn=True, heads=3) for make in (reweighting.Softmax, reweighting.Entmax))
    with torch.no_grad():
        softmax.log_temperature.copy_(temperatures.log())
        share = (alphas - 1.01) / 0.99
        entmax.shape.copy_((share / (1 - share)).log())
    for dim, arranged in (
        (-1, x),
        (3, x),
        (1, x.permute(0, 3, 1, 2)),
        (0, x.permute(3, 0, 1, 2)),
        (-2, x.transpose(2, 3)),
    ):
        softmax.dim = entmax.dim = dim
        back = arranged.movedim(dim, -1)
        for head in range(3):
            result = softmax(arranged).movedim(dim, -1)[:, head]
            torch.testing.assert_close(result, torch.softmax(back[:, head] / temperatures[head], -1))
            result = entmax(arranged).movedim(dim, -1)[:, head]
            judge = reweighting.entmax(back[:, head], alpha=alphas[head].item())
            torch.testing.assert_close(result, judge, rtol=1e-4, atol=1e-5)
    omegas = torch.tensor([0.5, -0.3, 2.0])
    scaled = reweighting.AttnScaledSoftmax(heads=3)
    scaled.omega.data.copy_(omegas)
    for dim, arranged in ((-1, x), (1, x.permute(0, 3, 1, 2)), (0, x.permute(3, 0, 1, 2)), (-2, x.transpose(2, 3))):
        scaled.dim = dim
        for head in range(3):
            judge = reweighting.attnscale(x[:, head], omega=omegas[head].item())
            torch.testing.assert_close(scaled(arranged).movedim(dim, -1)[:, head], judge)
    softmax.dim = -1
    rows = softmax(x[0, :, 0])  # heads and keys alone
    torch.testing.assert_close(rows, torch.softmax(x[0, :, 0] / temperatures[:, None], -1))
    for ndim in (0, 1):
        with pytest.raises(
            ValueError, match=rf"multimax: expected an input of \(..., heads, queries, keys\), got {ndim}"
        ):
            softmax(torch.zeros([5] * ndim))
    with pytest.raises(ValueError, match="multimax: expected temperature that broadcasts to"):
        softmax(torch.zeros(2, 4, 4, 5))


def test_alpha_stays_within_its_bounds() -> None:
    module = reweighting.Entmax(1.5, learn=True, bounds=(1.1, 3.0))
    x = torch.randn(4, 9)
    for value, bound in ((-1e4, 1.1), (1e4, 3.0)):
        with torch.no_grad():
            module.shape.fill_(value)
        assert module.alpha.item() == pytest.approx(bound)
        assert module(x).isfinite().all()
    assert module.double().alpha.dtype == torch.float64


def test_evsoftmax_trains_softly_and_evaluates_sharply() -> None:
    module, x = reweighting.EvSoftmax(), torch.randn(4, 9)
    assert torch.equal(module(x), reweighting.evsoftmax(x, eps=1e-6))
    assert (module(x) > 0).all()
    assert torch.equal(module.eval()(x), reweighting.evsoftmax(x))
    assert (module(x) == 0).any()
    assert torch.equal(reweighting.EvSoftmax(0)(x), reweighting.evsoftmax(x))


@impls
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attnscale_is_attn_scale_of_softmax(impl: str, dtype: torch.dtype) -> None:
    x = (2 * torch.randn(2, 3, 4, 9)).to(dtype)
    mask = torch.rand(4, 9) < 0.6
    mask[1] = False
    x[..., 2] = torch.finfo(dtype).min  # takes no part either
    wide = torch.where(mask, x.double(), -INF).masked_fill(x == torch.finfo(dtype).min, -INF)
    exact = {"dtype": torch.float64, "requires_grad": True}
    for values in (0.5, [0.5, -0.3, 2.0]):
        omega, judges = torch.tensor(values, **exact), torch.tensor(values, **exact)
        result = reweighting.attnscale(x, omega=omega, mask=mask, impl=impl)
        judge = attn_scale(torch.softmax(wide, -1).nan_to_num(), judges, wide > -INF)
        rounding = torch.finfo(dtype).eps
        torch.testing.assert_close(result.double(), judge, rtol=0, atol=4 * rounding)
        assert (result < 0).any()  # said in its text: no distribution
        result.double().pow(3).sum().backward()
        judge.pow(3).sum().backward()
        torch.testing.assert_close(omega.grad, judges.grad, rtol=8 * rounding, atol=4 * rounding)


@impls
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attnscale_at_zero_is_softmax_to_the_last_bit(impl: str, dtype: torch.dtype) -> None:
    x, mask = torch.randn(2, 3, 4, 9).to(dtype), torch.rand(4, 9) < 0.6
    layers = reweighting.AttnScaledSoftmax(), reweighting.AttnScaledSoftmax(heads=3)
    for dim in (-1, 0):
        for part in (None, mask):
            softmax = reweighting.softmax(x, dim=dim, mask=part, impl=impl)
            for omega in (0.0, torch.tensor(0.0), layers[0].omega):
                assert torch.equal(reweighting.attnscale(x, omega=omega, dim=dim, mask=part, impl=impl), softmax)
            for layer in layers if dim == -1 and impl == "auto" else ():
                assert torch.equal(layer(x, part), softmax)


@quick
@given(row=rows, omega=st.floats(-1, 5))
def test_attnscales_weights_have_a_lower_bound(row: list[float], omega: float) -> None:
    """Of n weights none is below -omega / n, nor below 0 if omega is negative; and they sum to 1."""
    weights = reweighting.attnscale(torch.tensor(row, dtype=torch.float64), omega=omega)
    assert weights.sum().item() == pytest.approx(1, abs=1e-12)
    assert weights.min().item() >= -max(omega, 0.0) / len(row) - 1e-12


def test_modules_by_name() -> None:
    for name in reweighting.names():
        options = {"k": 3} if name == "topk" else {}
        module = reweighting.module(name, **options)
        assert torch.allclose(module(torch.randn(2, 5)).sum(-1), torch.ones(2))
        if name != "multimax":
            assert module.reweighting_name == name
    assert isinstance(reweighting.module("multimax", order=1), multimax.MultiMax)
    assert reweighting.MultiMax is multimax.MultiMax
    assert reweighting.module("entmax", alpha=1.2, learn=True).shape.shape == ()


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (lambda: reweighting.Softmax(), "Softmax(temperature=1)"),
        (lambda: reweighting.Softmax(0.5, dim=1), "Softmax(temperature=0.5, dim=1)"),
        (lambda: reweighting.Softmax(0.5, learn=True), "Softmax(learned temperature=0.5)"),
        (lambda: reweighting.Softmax(0.5, learn=True, heads=2), "Softmax(learned temperature=[0.5, 0.5])"),
        (lambda: reweighting.Sparsemax(), "Sparsemax()"),
        (lambda: reweighting.Sparsemax(dim=0), "Sparsemax(dim=0)"),
        (lambda: reweighting.Entmax15(), "Entmax15()"),
        (lambda: reweighting.Entmax(1.25), "Entmax(alpha=1.25)"),
        (lambda: reweighting.Entmax(1.25, learn=True), "Entmax(learned alpha=1.25)"),
        (lambda: reweighting.EvSoftmax(), "EvSoftmax(eps=1e-06)"),
        (lambda: reweighting.Sparsehourglass(2, dim=0), "Sparsehourglass(q=2, dim=0)"),
        (lambda: reweighting.TopK(8), "TopK(k=8)"),
        (lambda: reweighting.TopK(0.5), "TopK(k=0.5)"),
        (lambda: reweighting.Entmax(1.25, learn=True).to("meta"), "Entmax(learned alpha)"),
        (lambda: reweighting.AttnScaledSoftmax(), "AttnScaledSoftmax(learned omega=0)"),
        (lambda: reweighting.AttnScaledSoftmax(0.5, heads=2), "AttnScaledSoftmax(learned omega=[0.5, 0.5])"),
        (lambda: reweighting.AttnScaledSoftmax(0.5, learn=False, dim=0), "AttnScaledSoftmax(omega=0.5, dim=0)"),
    ],
    ids=range(17),
)
def test_reprs(module: Callable[[], nn.Module], text: str) -> None:
    assert repr(module()) == text


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: reweighting.Softmax(0), ValueError, "multimax: expected temperature above 0 and finite, got 0"),
        (lambda: reweighting.Softmax(NAN), ValueError, "expected temperature above 0 and finite, got nan"),
        (lambda: reweighting.Softmax(heads=3), ValueError, "multimax: expected learn=True with heads"),
        (
            lambda: reweighting.Softmax(learn=True, heads=0),
            ValueError,
            "expected heads to be an int of at least 1, got 0",
        ),
        (lambda: reweighting.Softmax(learn=True, heads=1.0), ValueError, "expected heads to be an int of at least 1"),
        (lambda: reweighting.Softmax(dim=1.0), TypeError, "multimax: expected dim to be an int, got float"),
        (lambda: reweighting.Entmax(1.0), ValueError, "multimax: expected alpha above 1 and finite, got 1.0"),
        (
            lambda: reweighting.Entmax(2.0, learn=True),
            ValueError,
            "multimax: expected 1 < low < alpha < high for a trained",
        ),
        (lambda: reweighting.Entmax(1.5, learn=True, bounds=(1.0, 2.0)), ValueError, "got 1.0, 1.5, 2.0"),
        (lambda: reweighting.Entmax(1.5, learn=True, bounds=(1.1, INF)), ValueError, "got 1.1, 1.5, inf"),
        (lambda: reweighting.Entmax(1.5, learn=True, bounds=(1.6, 1.9)), ValueError, "got 1.6, 1.5, 1.9"),
        (lambda: reweighting.Entmax(heads=3), ValueError, "multimax: expected learn=True with heads"),
        (lambda: reweighting.EvSoftmax(-1), ValueError, "multimax: expected eps"),
        (lambda: reweighting.EvSoftmax(INF), ValueError, "multimax: expected eps"),
        (lambda: reweighting.Sparsehourglass(0), ValueError, "multimax: expected q above 0"),
        (lambda: reweighting.TopK(0), ValueError, "multimax: expected k of at least 1, got 0"),
        (lambda: reweighting.TopK(1.5), ValueError, "multimax: expected k as a share to be in (0, 1], got 1.5"),
        (lambda: reweighting.module("relu"), ValueError, "multimax: expected name to be one of"),
        (lambda: reweighting.module("topk"), TypeError, "multimax: expected the options of TopK, got none"),
        (lambda: reweighting.module("sparsemax", alpha=2), TypeError, "expected the options of Sparsemax, got alpha"),
        (lambda: reweighting.module("entmax", alpha="a"), TypeError, "expected alpha to be a number"),
        (lambda: reweighting.module("multimax", k=2), TypeError, "multimax: expected the options of MultiMax, got k"),
        (lambda: reweighting.AttnScaledSoftmax(NAN), ValueError, "multimax: expected omega above -inf and finite, got"),
        (lambda: reweighting.AttnScaledSoftmax(learn=False, heads=3), ValueError, "expected learn=True with heads"),
        (lambda: reweighting.AttnScaledSoftmax(heads=0), ValueError, "expected heads to be an int of at least 1"),
    ],
    ids=range(25),
)
def test_bad_modules(make: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        make()
