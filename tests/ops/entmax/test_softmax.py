"""The kernels of softmax at a temperature, Ev-SoftMax, top-k and Sparsehourglass: which entries remain, every gradient,
masks of any layout, the operations."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from machine import needs_kernels, needs_the_library
from multimax import reweighting
from multimax.ops import kernels as library
from multimax.ops.entmax import call as ops


@pytest.fixture(autouse=True)
def one_thread(same_start: None) -> None:
    """Many small operations: where threads matter, tests set their own number."""
    torch.set_num_threads(1)


pytestmark = [needs_kernels, needs_the_library]

INF, NAN = math.inf, math.nan
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
EPS = {dtype: torch.finfo(dtype).eps for dtype in DTYPES}
CASES: dict[str, Callable[..., Tensor]] = {
    "softmax": lambda x, **o: reweighting.softmax(x, temperature=0.7, **o),
    "evsoftmax": reweighting.evsoftmax,
    "evsoftmax, trained": lambda x, **o: reweighting.evsoftmax(x, eps=0.05, **o),
    "topk": lambda x, **o: reweighting.topk(x, k=5, **o),
    "topk, beyond a vector": lambda x, **o: reweighting.topk(x, k=23, **o),
    "topk, share": lambda x, **o: reweighting.topk(x, k=0.3, **o),
    "sparsehourglass": lambda x, **o: reweighting.sparsehourglass(x, q=0.3, **o),
    "sparsehourglass, sharp": lambda x, **o: reweighting.sparsehourglass(x, q=1e-3, **o),
}
cases = pytest.mark.parametrize("case", CASES)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def run(case: str, x: Tensor, grad: Tensor, **options: Any) -> list[Tensor]:
    """Weights, and the gradient of x."""
    leaf = x.detach().requires_grad_()
    weights = CASES[case](leaf, **options)
    return [weights.detach(), *torch.autograd.grad(weights, leaf, grad)]


# ---- which entries remain


def first_largest(row: list[float], k: int) -> list[bool]:
    """By sorting: of equal ones the first."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
    return [i in order for i in range(len(row))]


def check_largest(x: Tensor, k: int) -> None:
    """The entries that remain, and the gradient, which must know them too."""
    kept = torch.tensor([first_largest(row, k) for row in x.tolist()])
    for impl in ("cpu", "reference"):
        grad = torch.linspace(-1, 2, x.shape[-1]).to(x.dtype).expand(x.shape)
        weights, of_x = both(x, grad, k, impl)
        judge, of_judge = both(torch.where(kept, x.double(), -INF), grad.double(), 10**6, "reference")
        torch.testing.assert_close(weights.double(), judge, rtol=2 * EPS[x.dtype], atol=4e-6)
        torch.testing.assert_close(of_x.double(), of_judge, rtol=4 * EPS[x.dtype], atol=4e-6)
        assert (weights[~kept] == 0).all()
        assert (of_x[~kept] == 0).all()


def both(x: Tensor, grad: Tensor, k: int, impl: str) -> tuple[Tensor, Tensor]:
    leaf = x.detach().clone().requires_grad_()
    weights = reweighting.topk(leaf, k=k, impl=impl)
    return weights.detach(), torch.autograd.grad(weights, leaf, grad)[0]


@dtypes
def test_of_equal_entries_the_first_remain(isa: str, dtype: torch.dtype) -> None:
    for length, values in itertools.product((1, 3, 16, 17, 40, 70), (1, 2, 3, 30)):
        x = (torch.randint(0, values, (4, length)) / 8).to(dtype)
        for k in {1, 2, length // 2, length - 1, length} - {0}:
            check_largest(x, k)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, 1e-45, 3e38, -1e38, 1.0000001, 1e-38, 0.5]),
            st.floats(-(2.0**126), 2.0**127, width=32),
        ),
        min_size=1,
        max_size=60,
    ),
    st.integers(1, 60),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_the_largest_of_any_numbers(row: list[float], k: int, dtype: torch.dtype) -> None:
    x = torch.tensor(row, dtype=dtype)
    kept = torch.tensor(first_largest(x.tolist(), k))
    expected = torch.where(kept, x, -INF)
    for impl in ("cpu", "reference"):
        weights = reweighting.topk(x, k=k, impl=impl)
        torch.testing.assert_close(weights, torch.softmax(expected, -1), rtol=1e-5, atol=1e-6)
        assert (weights[~kept] == 0).all()


SPREADS: dict[str, Callable[[int], Tensor]] = {
    "normal": lambda n: torch.randn(3, n),
    "each far above the next": lambda n: (
        (torch.arange(n) % 250 - 125).double().exp2().expand(3, n)[:, torch.randperm(n)]
    ),
    "one far away": lambda n: torch.cat([torch.randn(3, n - 1), torch.full((3, 1), 1e30)], 1),
    "one far below": lambda n: torch.cat([torch.full((3, 1), -1e37), torch.randn(3, n - 1)], 1),
    "roundings apart": lambda n: 1 + torch.stack([torch.randperm(n) for _ in range(3)]) * 2**-23,
    "around zero": lambda n: torch.stack([torch.randperm(n) - n // 2 for _ in range(3)]) * 1e-42,
    "a few values": lambda n: torch.randint(-3, 4, (3, n)),
}


@pytest.mark.parametrize("spread", SPREADS)
def test_the_edge_is_found_however_numbers_are_spread(isa: str, spread: str) -> None:
    for length, dtype in itertools.product((5, 64, 300, 2000), (torch.float32, torch.float64)):
        x = SPREADS[spread](length).to(dtype)
        for k in {1, 3, 16, 17, length // 3, length - 1} - {0}:
            wanted = torch.tensor([first_largest(row, k) for row in x.tolist()])
            # weights may be 0 for their size alone: the rows' statistics tell which entries there are
            chosen = torch.ops.multimax.entmax_forward.default(x, None, None, ops.KINDS.index("topk"), float(k))
            expected = torch.softmax(torch.where(wanted, x.double(), -INF), -1)
            torch.testing.assert_close(chosen[0].double(), expected, rtol=1e-5, atol=1e-6)
            least = torch.where(wanted, x, INF).amin(-1)
            after = chosen[1][..., 3].contiguous().view(torch.int32 if dtype == torch.float32 else torch.int64)
            places = torch.arange(length)
            limit = chosen[1][..., 2:3]
            kept = (x > limit) | ((x == limit) & (places < after[:, None]))
            assert torch.equal(kept, wanted)
            assert (limit[:, 0] <= least).all()


def test_the_smallest_share_keeps_one() -> None:
    x = torch.randn(4, 30)
    for impl in ("cpu", "reference"):
        weights = reweighting.topk(x, k=1e-12, impl=impl)
        assert torch.equal(weights, torch.nn.functional.one_hot(x.argmax(-1), 30).float())


# ---- values and gradients


@cases
@dtypes
def test_equal_to_the_reference(isa: str, case: str, dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for length, masked in itertools.product((1, 2, 15, 16, 17, 33, 100, 1000), (False, True)):
        # numbers that no rounding of a mean can reach, so that both keep the same entries
        x = (torch.stack([torch.randperm(length) for _ in range(5)]) * 2 + 1.0) / length - 0.7
        x = (x * 4).to(dtype)
        mask = torch.rand(5, length) < 0.8 if masked else None
        if mask is not None:
            mask[0], mask[1] = True, False
        grad = torch.randn(5, length).to(dtype)
        judges = run(case, x.double(), grad.double(), mask=mask, impl="reference")
        if case.startswith("evsoftmax"):  # the mean may be an entry, or half precision may make it one
            same = (judges[0] > 0.05 / length) == (run(case, x, grad, mask=mask)[0].double() > 0.05 / length)
            assert same.double().mean() > 0.97
            judges = [torch.where(same.all(-1, keepdim=True), judge, NAN) for judge in judges]
        for result, judge in zip(run(case, x, grad, mask=mask), judges, strict=True):
            there = ~judge.isnan()
            assert result.dtype == dtype
            torch.testing.assert_close(
                result.double()[there], judge[there], rtol=2 * EPS[dtype] + 100 * EPS[wide], atol=50 * EPS[wide]
            )


@dtypes
@pytest.mark.parametrize("masked", [False, True])
def test_the_temperatures_gradient(isa: str, dtype: torch.dtype, masked: bool) -> None:
    for length in (1, 7, 64, 1000):
        x = (2 * torch.randn(3, 4, length) + 50).to(dtype)  # far from 0: only differences count
        mask = torch.rand(x.shape) < 0.7 if masked else None
        grad = torch.randn(x.shape).to(dtype)
        for shape in ((), (1,), (4, 1), (3, 4, 1)):
            t = 0.3 + torch.rand(shape, dtype=torch.float64)
            found = []
            for values, impl in ((x, "cpu"), (x.double(), "reference")):
                leaf, temperature = values.clone().requires_grad_(), t.clone().requires_grad_()
                weights = reweighting.softmax(leaf, temperature=temperature, mask=mask, impl=impl)
                found.append([weights, *torch.autograd.grad(weights, (leaf, temperature), grad.to(values.dtype))])
            for result, judge, factor in zip(*found, (1, 1, 12), strict=True):
                wide = EPS[torch.float64 if dtype == torch.float64 else torch.float32]
                own = EPS[dtype] if factor == 1 else 0  # the temperature's is not rounded to half precision
                torch.testing.assert_close(result.double(), judge, rtol=2 * own + 100 * wide, atol=factor * 50 * wide)


def test_temperatures_that_overflow_have_finite_gradients(isa: str) -> None:
    x, grad = torch.randn(3, 20), torch.randn(3, 20)
    x[0, 0] = 3e38
    for dtype, value in itertools.product((torch.float32, torch.float64), (1e-300, 1e-42, 1e-38, 1e-3, 1e30, 1e300)):
        leaf = x.to(dtype).detach().clone().requires_grad_()
        t = torch.tensor(value, dtype=torch.float64, requires_grad=True)
        weights = reweighting.softmax(leaf, temperature=t, impl="cpu")
        weights.backward(grad.to(dtype))
        for result in (weights, leaf.grad, t.grad):
            assert result.isfinite().all()
        torch.testing.assert_close(weights.sum(-1), torch.ones(3, dtype=dtype))


def test_a_nan_reaches_the_temperature_of_its_row_only(isa: str) -> None:
    x = torch.randn(3, 20)
    x[1, 4] = NAN
    for dtype in DTYPES:
        t = torch.full((3, 1), 0.5, requires_grad=True)
        reweighting.softmax(x.to(dtype), temperature=t, impl="cpu").backward(torch.ones(3, 20, dtype=dtype))
        assert t.grad[1].isnan().all()
        assert t.grad[[0, 2]].isfinite().all()


def test_sparsehourglass_of_the_largest_numbers(isa: str) -> None:
    for row in ([3e38, 3.2e38, 3.1e38] * 9, [3e38, -1e38, 1e38], [1e38] * 40):
        x = torch.tensor(row)
        judge = reweighting.sparsehourglass(x.double(), q=1.0, impl="reference")
        torch.testing.assert_close(reweighting.sparsehourglass(x, q=1.0, impl="cpu").double(), judge, rtol=0, atol=1e-5)


@cases
def test_what_has_no_weight_has_no_part_in_the_gradient(isa: str, case: str) -> None:
    if case == "evsoftmax, trained" or case.startswith("sparsehourglass"):
        return  # there the others have a gradient
    for dtype in DTYPES:
        x, grad = torch.randn(4, 60).to(dtype), torch.randn(4, 60).to(dtype)
        x[1, :30] = -INF
        off = run(case, x, grad)[0] == 0
        for bad in (INF, NAN):
            for ours, clean in zip(run(case, x, grad.masked_fill(off, bad)), run(case, x, grad), strict=True):
                assert torch.equal(ours, clean)


# ---- masks


@cases
def test_masks_of_any_layout(isa: str, case: str) -> None:
    x, grad = torch.randn(4, 3, 5, 37), torch.randn(4, 3, 5, 37)
    masks = {
        "contiguous": torch.rand(4, 3, 5, 37) < 0.7,
        "for all batches": (torch.rand(5, 37) < 0.7).expand(4, 3, 5, 37),
        "for all heads": (torch.rand(4, 1, 5, 37) < 0.7).expand(4, 3, 5, 37),
        "for all queries": (torch.rand(4, 1, 1, 37) < 0.7).expand(4, 3, 5, 37),
        "for all keys": (torch.rand(4, 3, 5, 1) < 0.7).expand(4, 3, 5, 37),
        "transposed": (torch.rand(37, 5, 3, 4) < 0.7).permute(3, 2, 1, 0),
        "rows transposed": (torch.rand(3, 4, 5, 37) < 0.7).transpose(0, 1),
        "sliced": (torch.rand(4, 3, 10, 80) < 0.7)[:, :, ::2, 3:77:2],
        "one": torch.tensor(True).expand(4, 3, 5, 37),
    }
    for mask in masks.values():
        expected = run(case, x.masked_fill(~mask, -INF), grad, impl="cpu")
        for dim in (-1, 1):
            found = run(case, *(t.movedim(-1, dim) for t in (x, grad)), mask=mask.movedim(-1, dim), dim=dim, impl="cpu")
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.equal(ours, theirs.movedim(-1, dim))


# ---- the operations

SOFT = [ops.KINDS.index(kind) for kind in ops.KINDS[3:]]
OPTIONS = {"sparsehourglass": 2.0, "softmax": 0.7, "evsoftmax": 0.1, "topk": 3.0, "topshare": 0.4}
FORWARD, BACKWARD = torch.ops.multimax.entmax_forward.default, torch.ops.multimax.entmax_backward.default


@pytest.mark.parametrize("kind", SOFT, ids=[ops.KINDS[kind] for kind in SOFT])
@dtypes
def test_opcheck(kind: int, dtype: torch.dtype) -> None:
    option = OPTIONS[ops.KINDS[kind]]
    for shape, masked in itertools.product(((3, 4, 9), (9,), (0, 4), (4, 0)), (False, True)):
        x, grad = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
        mask = torch.rand(shape) < 0.7 if masked else None
        parameters = [None]
        if ops.KINDS[kind] == "softmax":
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            parameters += [torch.full(shape[:-1], 0.7, dtype=wide)]
        for parameter in parameters:
            torch.library.opcheck(FORWARD, (x, parameter, mask, kind, option))
            y, stats = FORWARD(x, parameter, mask, kind, option)
            output = y if ops.saves_output(x, kind) else None
            arguments = (grad, x, output, stats, parameter, mask, kind, option, parameter is not None)
            torch.library.opcheck(BACKWARD, arguments)


def test_raw_operations_refuse_what_does_not_fit() -> None:
    x, mask = torch.randn(3, 4, 9), torch.ones(3, 4, 9, dtype=torch.bool)
    softmax, topk = ops.KINDS.index("softmax"), ops.KINDS.index("topk")
    for arguments in (
        (x, None, mask[..., :8], softmax, 1.0),
        (x, None, mask[0], softmax, 1.0),
        (x, None, mask.float(), softmax, 1.0),
        (x, torch.ones(3, 4), None, topk, 1.0),
        (x, torch.ones(3), None, softmax, 1.0),
        (x, None, None, len(ops.KINDS), 1.0),
    ):
        with pytest.raises(RuntimeError, match="multimax: "):
            FORWARD(*arguments)
    y, stats = FORWARD(x, None, None, softmax, 1.0)
    for arguments in (
        (y, x, None, stats, None, None, softmax, 1.0, False),
        (y, x, y[:2], stats, None, None, softmax, 1.0, False),
        (y, x, y, stats[..., :2].contiguous(), None, None, softmax, 1.0, False),
        (y, x, y, stats, None, None, softmax, 1.0, True),
        (y.half(), x.half(), y.half(), stats, None, None, softmax, 1.0, False),
    ):
        with pytest.raises(RuntimeError, match="multimax: "):
            BACKWARD(*arguments)


@cases
def test_double_backward_equals_the_references(case: str) -> None:
    x, grad = torch.randn(4, 30, dtype=torch.float64), torch.randn(4, 30, dtype=torch.float64)
    mask = torch.rand(4, 30) < 0.8
    mask[1] = False
    seconds = []
    for impl in ("cpu", "reference"):
        leaf = x.clone().requires_grad_()
        first = torch.autograd.grad((CASES[case](leaf, mask=mask, impl=impl) * grad).sum(), leaf, create_graph=True)[0]
        seconds.append(torch.autograd.grad((first**2).sum(), leaf)[0])
    torch.testing.assert_close(*seconds, rtol=1e-8, atol=1e-10)


def test_double_backward_of_the_temperature() -> None:
    x = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    t = torch.tensor([[0.5], [2.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.rand(2, 6) < 0.8

    def function(x: Tensor, t: Tensor) -> Tensor:
        return reweighting.softmax(x, temperature=t, mask=mask, impl="cpu")

    assert torch.autograd.gradcheck(function, (x, t))
    assert torch.autograd.gradgradcheck(function, (x, t))


@cases
def test_under_vmap(case: str) -> None:
    x, mask = torch.randn(3, 4, 30), torch.rand(3, 4, 30) < 0.8
    single = [CASES[case](a, mask=m) for a, m in zip(x, mask, strict=True)]
    mapped = torch.func.vmap(lambda a, m: CASES[case](a, mask=m))(x, mask)
    assert torch.equal(mapped, torch.stack(single))
    shared = torch.func.vmap(lambda a: CASES[case](a, mask=mask[0]), in_dims=1)(x.transpose(0, 1))
    assert torch.equal(shared, torch.stack([CASES[case](a, mask=mask[0]) for a in x]))
    total = torch.func.vmap(torch.func.grad(lambda a, m: CASES[case](a, mask=m).square().sum()))(x, mask)
    for of_x, a, m in zip(total, x, mask, strict=True):
        leaf = a.clone().requires_grad_()
        CASES[case](leaf, mask=m).square().sum().backward()
        torch.testing.assert_close(of_x, leaf.grad)


@cases
def test_compiled(case: str) -> None:
    x, mask = torch.randn(4, 30, requires_grad=True), torch.rand(4, 30) < 0.8

    def function(x: Tensor, mask: Tensor) -> Tensor:
        return CASES[case](x, mask=mask).square().sum(-1)

    expected = function(x, mask)
    (of_x,) = torch.autograd.grad(expected.sum(), x)
    torch._dynamo.reset()
    found = torch.compile(function, fullgraph=True, backend="aot_eager")(x, mask)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), x)[0], of_x)


def test_compiled_temperatures() -> None:
    torch._dynamo.reset()
    function = torch.compile(lambda x, t: reweighting.softmax(x, temperature=t), fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 30)
    for t in (0.5, 0.6, 0.7, torch.tensor(0.8), torch.rand(4, 1) + 0.1):
        torch.testing.assert_close(function(x, t), torch.softmax(x / t, -1))


def test_threads_make_no_difference(isa: str) -> None:
    x, grad, mask = torch.randn(300, 500), torch.randn(300, 500), torch.rand(300, 500) < 0.8
    for case in CASES:
        first = run(case, x, grad, mask=mask)
        torch.set_num_threads(2)
        for ours, again in zip(first, run(case, x, grad, mask=mask), strict=True):
            assert torch.equal(ours, again)
        torch.set_num_threads(1)


@cases
def test_triton_says_why_not(case: str) -> None:
    with pytest.raises(RuntimeError, match="impl='triton' cannot run: there is no Triton kernel for"):
        CASES[case](torch.randn(3, 4), impl="triton")


def test_no_memory_beside_results(isa: str) -> None:
    """What the kernels write to is all of the output: memory that was NaN before shows."""
    assert library.unavailable is None
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    try:
        for case, dtype in itertools.product(CASES, DTYPES):
            for value in run(case, torch.randn(3, 37).to(dtype), torch.randn(3, 37).to(dtype)):
                assert value.isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)
