"""The kernels of sparsemax, entmax15 and entmax: exact arithmetic, rows made to be difficult, the operations."""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

import entmax as package
import pytest
import torch
from torch import Tensor

from machine import ISAS, KERNEL, needs_kernels, needs_the_library
from multimax import reweighting
from multimax.ops import kernels as library
from multimax.ops.entmax import call as ops


@pytest.fixture(autouse=True)
def one_thread(same_start: None) -> None:
    """Many small operations: where threads matter, tests set their own number."""
    torch.set_num_threads(1)


pytestmark = needs_kernels

INF, NAN = math.inf, math.nan
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
EPS = {dtype: torch.finfo(dtype).eps for dtype in DTYPES}
KINDS = {"sparsemax": 2.0, "entmax15": 1.5, "1.3": 1.3, "1.9": 1.9, "2.5": 2.5}
kinds = pytest.mark.parametrize("kind", KINDS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def function(kind: str, impl: str = KERNEL) -> Callable[[Tensor], Tensor]:
    return lambda x: reweighting.entmax(x, alpha=KINDS[kind], impl=impl)


def run(kind: str, x: Tensor, grad: Tensor, impl: str = KERNEL) -> list[Tensor]:
    """Weights, and the gradients of x and, where there is one, of alpha."""
    leaf = x.detach().requires_grad_()
    if kind in ("sparsemax", "entmax15"):
        weights = function(kind, impl)(leaf)
        return [weights.detach(), *torch.autograd.grad(weights, leaf, grad)]
    alpha = torch.full((*x.shape[:-1], 1), KINDS[kind], dtype=torch.float64, requires_grad=True)
    weights = reweighting.entmax(leaf, alpha=alpha, impl=impl)
    return [weights.detach(), *torch.autograd.grad(weights, (leaf, alpha), grad)]


@contextmanager
def instructions(isa: str) -> Iterator[None]:
    """Within it, the compiled kernels use an instruction set."""
    if library.INTERPRETED:
        yield
        return
    before = library.use_isa()
    library.use_isa(isa)
    yield
    library.use_isa(before)


# the raw operations, in one place


def raw_forward(x: Tensor, kind: int, alpha: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return torch.ops.multimax.entmax_forward.default(x, alpha, None, kind, 0.0)


def raw_backward(
    grad: Tensor, x: Tensor, stats: Tensor, kind: int, alpha: Tensor | None = None, alpha_grad: bool = False
) -> tuple[Tensor, Tensor]:
    return torch.ops.multimax.entmax_backward.default(grad, x, None, stats, alpha, None, kind, 0.0, alpha_grad)


def alpha_for(x: Tensor, kind: int) -> Tensor | None:
    if ops.KINDS[kind] != "entmax":
        return None
    return torch.full(x.shape[:-1], 1.3, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


# ---- exact arithmetic


def exact_sparsemax(row: list[float]) -> list[Fraction]:
    values = [Fraction(v) for v in row]
    ranked = sorted(values, reverse=True)
    total, threshold = Fraction(0), None
    for k, value in enumerate(ranked, 1):
        total += value
        if threshold is None or (total - 1) / k > threshold:
            threshold = (total - 1) / k
        elif value < threshold:
            break
    return [max(v - threshold, Fraction(0)) for v in values]


def exact_entmax(row: list[float], alpha: float) -> list[float]:
    """With 40 digits: the threshold by halving the interval that it lies in."""
    with localcontext() as context:
        context.prec = 40
        scale = Decimal(alpha) - 1
        top = Decimal(max(row))
        values = [scale * (Decimal(v) - top) for v in row]
        low, high = Decimal(-1), Decimal(0)
        for _ in range(110):
            middle = (low + high) / 2
            total = sum(((v - middle) ** (1 / scale) for v in values if v > middle), Decimal(0))
            low, high = (middle, high) if total >= 1 else (low, middle)
        return [float((v - low) ** (1 / scale)) if v > low else 0.0 for v in values]


def ulps(start: float, count: int, dtype: torch.dtype) -> Tensor:
    """Numbers one rounding apart."""
    values = [torch.tensor(start, dtype=dtype)]
    for _ in range(count - 1):
        values.append(torch.nextafter(values[-1], torch.tensor(-INF, dtype=dtype)))
    return torch.stack(values)


def geometric(ratio: float, count: int) -> Tensor:
    """Each far below the one before, as seen from the next: steps of Newton's method that remove few entries."""
    return -torch.tensor([ratio**k for k in range(count, 0, -1)], dtype=torch.float64)


ROWS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "halves": lambda d: geometric(0.5, 40),
    "halves, reversed": lambda d: geometric(0.5, 40).flip(0),
    "thirds of one, twice each": lambda d: geometric(1 / 3, 30).repeat_interleave(2),
    "slowly": lambda d: geometric(0.97, 300),
    "harmonic": lambda d: -1 / torch.arange(1, 200, dtype=torch.float64),
    "growing harmonic sums": lambda d: -torch.cumsum(1 / torch.arange(1, 100, dtype=torch.float64) ** 2, 0),
    "more and more, closer and closer": lambda d: torch.cat([torch.full((2**k,), -(2.0**-k)) for k in range(9)]),
    "equal": lambda d: torch.full((257,), 0.3),
    "equal pairs": lambda d: torch.tensor([0.3, 0.3, 0.1, 0.1, -0.4, -0.4]),
    "one outlier": lambda d: torch.cat([torch.tensor([5000.0]), torch.randn(100)]),
    "one outlier below": lambda d: torch.cat([torch.randn(100) / 10, torch.tensor([-5000.0])]),
    "within one rounding": lambda d: torch.cat([ulps(1.0, 2, d)] * 20),
    "roundings apart": lambda d: ulps(1.0, 60, d),
    "at the threshold": lambda d: torch.tensor([1.0, 0.0, 0.0, 0.0, -1.0]),
    "two at the threshold of two": lambda d: torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0, -1.0]),
    "one rounding above the threshold": lambda d: torch.cat([torch.tensor([1.0]).to(d), ulps(1e-3, 3, d)]),
    "smaller than normal": lambda d: torch.arange(20) * torch.finfo(d).tiny / 16,
    "zeros of both signs": lambda d: torch.tensor([0.0, -0.0] * 9),
    "huge and apart": lambda d: torch.tensor([0.45, 0.4, -0.45, 0.0]).double() * torch.finfo(d).max,
    "huge and equal": lambda d: torch.full((7,), 0.9).double() * torch.finfo(d).max,
    "far below": lambda d: torch.randn(20) - 3000,
    "one": lambda d: torch.tensor([7.0]),
    "many": lambda d: torch.randn(777),
}


@pytest.mark.parametrize("rows", ROWS)
def test_exactly_sparsemax(isa: str, rows: str) -> None:
    for dtype in DTYPES:
        exactly_sparsemax(dtype, rows)


def exactly_sparsemax(dtype: torch.dtype, rows: str) -> None:
    row = ROWS[rows](dtype).to(dtype)
    # differences from the largest, of up to 1, and the threshold are rounded, then the result
    wide = EPS[torch.float64] if dtype == torch.float64 else EPS[torch.float32]
    exact = exact_sparsemax(row.tolist())
    for x in (row, row.flip(0), row[torch.randperm(len(row))]):
        order = {float(v): e for v, e in zip(row.tolist(), exact, strict=True)}
        judge = torch.tensor([float(order[v]) for v in x.tolist()], dtype=torch.float64)
        result = reweighting.sparsemax(x, impl=KERNEL)
        torch.testing.assert_close(result.double(), judge, rtol=EPS[dtype], atol=2 * wide)
        # one number is off by a rounding, their sum by no more than the threshold's for each
        assert abs(result.double().sum().item() - 1) <= EPS[dtype] + len(row) * (
            wide if dtype == torch.float64 else wide / 2
        )


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("alpha", [1.5, 1.25, 1.9])
def test_exactly_entmax(alpha: float, rows: str) -> None:
    for dtype in (torch.float32, torch.float64):
        row = ROWS[rows](dtype).to(dtype)
        row = row[torch.randperm(len(row))[:25]]
        judge = torch.tensor(exact_entmax(row.tolist(), alpha), dtype=torch.float64)
        for isa in ISAS:
            with instructions(isa):
                result = reweighting.entmax(row, alpha=alpha, impl=KERNEL).double()
            # alpha itself is rounded to the dtype, and with it 1 / (alpha - 1)
            torch.testing.assert_close(result, judge, rtol=20 * EPS[dtype], atol=4 * EPS[dtype])


@pytest.mark.parametrize("impl", [KERNEL, "reference"])
@pytest.mark.parametrize("alpha", [1.05, 1.3, 1.5, 1.9, 2.0, 2.5, 3.0, 4.0, 10.0])
@dtypes
def test_ten_thousand_equal_entries(impl: str, alpha: float, dtype: torch.dtype) -> None:
    # The weights are r^(1 / (alpha - 1)), with r = 1e-4^(alpha - 1) far below the largest that r could be. For what
    # keeps r's own digits, the result has a rounding times 1 / (alpha - 1) or times the logarithm of the weight.
    wide = EPS[torch.float64] if dtype == torch.float64 else EPS[torch.float32]
    x, grad = torch.full((2, 10000), 0.7).to(dtype), torch.randn(2, 10000).to(dtype)
    alphas = (alpha, torch.full((2, 1), alpha, dtype=torch.float64))
    for a in alphas[1:] if library.INTERPRETED else alphas:
        leaf = x.clone().requires_grad_()
        weights = reweighting.entmax(leaf, alpha=a, impl=impl)
        assert (weights == weights[0, 0]).all()
        assert weights[0, 0].item() == pytest.approx(1e-4, rel=EPS[dtype] / 2 + wide * (20 + 2 / (alpha - 1)))
        weights.backward(grad)
        # for equal weights p the derivative is p^(2 - alpha) (grad - its mean)
        wide_grad = grad.double()
        smallest = torch.finfo(dtype).tiny * EPS[dtype]
        exact = 1e-4 ** (2 - alpha) * (wide_grad - wide_grad.mean(-1, keepdim=True))
        if exact.abs().max() < torch.finfo(dtype).max:
            tolerance = {"rtol": EPS[dtype] + 200 * wide, "atol": 1e-4 ** (2 - alpha) * 1e-5 + smallest}
            torch.testing.assert_close(leaf.grad.double(), exact, **tolerance)


@pytest.mark.parametrize("impl", [KERNEL, "reference"])
@pytest.mark.parametrize("alpha", [1.3, 1.9, 2.1, 2.5, 3.0])
def test_many_close_entries(impl: str, alpha: float) -> None:
    # as above, for rows that are not all equal: no worse than four times the package, which keeps r's digits
    for scale in (0.1, 0.01, 0.001):
        x = scale * torch.randn(2 if library.INTERPRETED else 10, 3000)
        exact = package.entmax_bisect(x.double(), alpha, n_iter=100)
        error, allowed = (
            (t.double() - exact).norm()
            for t in (reweighting.entmax(x, alpha=alpha, impl=impl), package.entmax_bisect(x, alpha, n_iter=50))
        )
        assert error <= 4 * allowed, f"{error / allowed:.1f} times the package's error at scale {scale}"


@kinds
@pytest.mark.parametrize("size", [5e3, 1e6, 3e30, 3e38])
def test_one_huge_entry(isa: str, kind: str, size: float) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(3, 100)
        x[0, 3], x[1, 99], x[2, [5, 50]] = size, size, size
        x[0, 7] = -size / 3
        weights, of_x, *of_alpha = run(kind, x.to(dtype), torch.randn(3, 100).to(dtype))
        expected = torch.zeros(3, 100)
        expected[0, 3] = expected[1, 99] = 1
        expected[2, [5, 50]] = 0.5
        torch.testing.assert_close(weights.float(), expected, rtol=1e-5, atol=0)
        assert all(t.isfinite().all() for t in (of_x, *of_alpha))
        assert (of_x[expected == 0] == 0).all()
        assert (of_x[:2].abs() < 1e-5).all()


def test_the_edge_of_the_support_has_no_gradient(isa: str) -> None:
    # exactly at the threshold: weight 0, and not of the support
    for row, support in (([1.0, 0.0, 0.0], 1), ([0.5, 0.5, 0.0], 2), ([0.25] * 4 + [0.0] * 9, 4)):
        x = torch.tensor(row)
        grad = torch.arange(1.0, len(row) + 1)
        weights, of_x = run("sparsemax", x, grad)
        assert (weights > 0).sum() == support
        torch.testing.assert_close(of_x[:support], grad[:support] - grad[:support].mean())
        assert (of_x[support:] == 0).all()


@kinds
@dtypes
def test_lengths_and_places_in_memory(isa: str, kind: str, dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    factor = 1 if kind != "2.5" else 300  # its slope at the edge of the support is infinite
    lengths = sorted({1, 2, 3, 5} | {2**k + d for k in range(2, 8) for d in (-1, 0, 1)})
    if dtype in (torch.float32, torch.bfloat16):
        lengths += [1000, 5000, 33000]
    if library.INTERPRETED:
        lengths = [1, 3, 17, 64, *(length for length in lengths if length > 1000)]
    for length in lengths:
        rows = 3 if length < 10_000 else 1
        memory = (torch.randn(rows * length + 7) * (0.5 if length < 100 else 2)).to(dtype)
        for offset in (length % 4,):  # not where vectors begin
            x = memory[offset : offset + rows * length].view(rows, length)
            grad = torch.randn(rows, length).to(dtype)
            judges = run(kind, x.double(), grad.double(), "reference")
            for result, judge in zip(run(kind, x, grad), judges, strict=True):
                tolerance = factor * (50 if wide == torch.float32 else 1e3) * EPS[wide]
                torch.testing.assert_close(
                    result.double(), judge, rtol=2 * EPS[dtype] + 100 * tolerance, atol=tolerance
                )


@pytest.mark.parametrize("kind", ["1.3", "1.9", "2.5"])
@dtypes
def test_alphas_gradient_is_as_good_as_the_references(isa: str, kind: str, dtype: torch.dtype) -> None:
    squares = torch.zeros(3, dtype=torch.float64)
    for draw in range(4):
        x, grad = ((1 + draw / 5) * torch.randn(30, 65)).to(dtype), torch.randn(30, 65).to(dtype)
        judge, theirs, result = (
            run(kind, *(t.double() for t in (x, grad)), "reference")[2],
            run(kind, x, grad, "reference")[2],
            run(kind, x, grad)[2],
        )
        for i, value in enumerate((result - judge, theirs - judge, judge)):
            squares[i] += value.square().sum()
    error, allowed, size = squares.sqrt().tolist()
    rounding = size * (EPS[torch.float64] * 300 if dtype == torch.float64 else EPS[torch.float32])
    assert error <= max(3 * allowed, rounding), f"{error / allowed:.2f} times the reference's error"


def test_alphas_gradient_close_to_softmax(isa: str) -> None:
    """For alpha to 1 the weight's logarithm is u - t - (alpha - 1) (u - t)^2 / 2 + ..., which has a derivative."""
    x, grad = torch.randn(5, 20, dtype=torch.float64), torch.randn(5, 20, dtype=torch.float64)
    p = torch.softmax(x, -1)
    squares = p.log().square() / 2
    limit = -(p * grad * (squares - (p * squares).sum(-1, keepdim=True))).sum(-1, keepdim=True)
    for dtype, step in itertools.product((torch.float64, torch.float32), (1e-2, 1e-3, 1e-4, 1e-5, 2e-6)):
        alpha = torch.full((5, 1), 1 + step, dtype=dtype, requires_grad=True)
        reweighting.entmax(x.to(dtype), alpha=alpha, impl=KERNEL).backward(grad.to(dtype))
        torch.testing.assert_close(alpha.grad.double(), limit, rtol=0, atol=30 * step + 30 * EPS[dtype])


@kinds
@dtypes
def test_every_nan_shows_whatever_its_bits(isa: str, kind: str, dtype: torch.dtype) -> None:
    integers, quiet = {
        torch.float32: (torch.int32, 0x7FC00000),
        torch.float64: (torch.int64, 0x7FF8000000000000),
        torch.bfloat16: (torch.int16, 0x7FC0),
        torch.float16: (torch.int16, 0x7E00),
    }[dtype]
    payloads, lengths = ((63,), (5, 64)) if library.INTERPRETED else ((0, 1, 63), (5, 64, 1000))
    for payload, length, place in itertools.product(payloads, lengths, (0, -1)):
        x = torch.randn(3, length).to(dtype)
        x[1, place] = torch.tensor([quiet + payload], dtype=integers).view(dtype)[0]
        weights, of_x, *_ = run(kind, x, torch.ones_like(x))
        assert weights[1].isnan().all()
        assert of_x[1].isnan().all()
        assert not weights[[0, 2]].isnan().any()
        assert not of_x[[0, 2]].isnan().any()


@needs_the_library
@kinds
def test_instruction_sets_agree(kind: str) -> None:
    x, grad = torch.randn(7, 300), torch.randn(7, 300)
    results = []
    best = library.use_isa()
    for isa in ISAS:
        library.use_isa(isa)
        results.append(run(kind, x, grad))
    library.use_isa(best)
    for one, other in itertools.combinations(results, 2):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5 if kind != "2.5" else 1e-3, rtol=1e-4)


@pytest.mark.parametrize("kind", range(3), ids=ops.KINDS[:3])
@dtypes
def test_opcheck(kind: int, dtype: torch.dtype) -> None:
    for shape in ((3, 4, 9), (9,), (0, 4), (4, 0)):  # the last: rows of nothing, whose numbers are written all the same
        x, grad = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
        alpha = alpha_for(x, kind)
        torch.library.opcheck(torch.ops.multimax.entmax_forward.default, (x, alpha, None, kind, 0.0))
        stats = raw_forward(x, kind, alpha)[1]
        for alpha_grad in (False, True) if alpha is not None else (False,):
            arguments = (grad, x, None, stats, alpha, None, kind, 0.0, alpha_grad)
            torch.library.opcheck(torch.ops.multimax.entmax_backward.default, arguments)


def test_raw_operations_refuse_what_does_not_fit() -> None:
    x = torch.randn(3, 4, 9)
    out, stats = raw_forward(x, 0)
    alpha = alpha_for(x, 2)
    wrong_forward: list[tuple[Any, ...]] = [
        (x, len(ops.KINDS)),
        (x, -1),
        (x.long(), 0),
        (x.transpose(0, 2), 0),
        (torch.randn(()), 0),
        (x, 2),
        (x, 2, alpha[:2]),
        (x, 2, alpha.double()),
        (x, 2, alpha.to(torch.bfloat16)),
        (x, 2, torch.ones(4, 3).t()),
    ]
    for arguments in wrong_forward:
        with pytest.raises(RuntimeError, match="multimax: "):
            raw_forward(*arguments)
    wrong_backward: list[tuple[Any, ...]] = [
        (out[:2], x, stats, 0),
        (out.double(), x, stats, 0),
        (out.transpose(0, 2), x, stats, 0),
        (out, x, stats[:2], 0),
        (out, x, stats.double(), 0),
        (out, x, stats[..., :1].contiguous(), 0),
        (out, x, stats.transpose(0, 1), 0),
        (out, x.transpose(0, 2), stats, 0),
        (out, x, stats, 2),
        (out, x, stats, 0, None, True),
        (out, x, stats, 2, alpha[:2], True),
    ]
    for arguments in wrong_backward:
        with pytest.raises(RuntimeError, match="multimax: "):
            raw_backward(*arguments)


@needs_the_library
def test_memory_that_was_freed_is_an_error_not_a_crash() -> None:
    x = torch.randn(3, 9)
    x.untyped_storage().resize_(0)
    for kind in KINDS:
        with pytest.raises(RuntimeError, match="out of bounds for storage of size 0"):
            function(kind)(x)
    for kind in range(3):
        with pytest.raises(RuntimeError, match="multimax: expected tensors with memory, got one that was freed"):
            raw_forward(x, kind, alpha_for(x, kind))


def test_double_backward_equals_the_references() -> None:
    x, grad = torch.randn(4, 3, 12, dtype=torch.float64), torch.randn(4, 3, 12, dtype=torch.float64)
    x[0, 0, :5], x[1, 1] = -INF, -INF
    for kind, learned in itertools.product(KINDS, (False, True)):
        seconds = []
        for impl in (KERNEL, "reference"):
            leaf = x.clone().requires_grad_()
            alpha = torch.full((3, 1), KINDS[kind], dtype=torch.float64, requires_grad=True) if learned else None
            leaves = [leaf] if alpha is None else [leaf, alpha]
            weights = reweighting.entmax(leaf, alpha=KINDS[kind] if alpha is None else alpha, impl=impl)
            firsts = torch.autograd.grad((weights * grad).sum(), leaves, create_graph=True)
            seconds.append(torch.autograd.grad(sum((f**2).sum() for f in firsts), leaves))
        for ours, theirs in zip(*seconds, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


def test_gradients_only_where_needed() -> None:
    x, grad = torch.randn(4, 9), torch.randn(4, 9)
    _, of_x, of_alpha = run("1.3", x, grad)
    leaf, alpha = x.clone().requires_grad_(), torch.full((4, 1), 1.3, dtype=torch.float64)
    reweighting.entmax(leaf, alpha=alpha, impl=KERNEL).backward(grad)
    assert torch.equal(leaf.grad, of_x)
    alpha.requires_grad_()
    reweighting.entmax(x, alpha=alpha, impl=KERNEL).backward(grad)
    assert torch.equal(alpha.grad, of_alpha)
    assert not reweighting.entmax(x, alpha=1.3, impl=KERNEL).requires_grad


def test_alphas_of_any_dtype_and_shape(isa: str) -> None:
    x = torch.randn(3, 4, 9)
    for alpha_dtype, dtype in itertools.product(DTYPES, DTYPES):
        alpha = (1.25 + 0.25 * torch.arange(4).reshape(4, 1)).to(alpha_dtype).requires_grad_()
        weights = reweighting.entmax(x.to(dtype), alpha=alpha, impl=KERNEL)
        weights.sum(0).square().sum().backward()
        assert weights.dtype == dtype
        assert alpha.grad.dtype == alpha_dtype
        for i in range(4):
            alone = reweighting.entmax(x[:, i].to(dtype), alpha=1.25 + 0.25 * i, impl="reference")
            torch.testing.assert_close(weights[:, i], alone, rtol=2 * EPS[dtype], atol=20 * max(EPS[dtype], 1e-7))
