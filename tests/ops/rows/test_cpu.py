"""The CPU kernels against the reference in float64: outputs, every gradient, every path."""

import itertools

import pytest
import torch
from torch import Tensor

import multimax
from draws import parameters
from machine import KERNEL, needs_kernels, needs_the_library
from multimax.ops import kernels

pytestmark = needs_kernels

FUNCTIONS = {"multimax": multimax.multimax, "log_multimax": multimax.log_multimax, "modulate": multimax.modulate}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
HALF = (torch.bfloat16, torch.float16)
INTERPRETED = kernels.INTERPRETED  # and slow: fewer draws, and smaller tensors where only size matters


def run(name: str, impl: str, grad: Tensor | None, *inputs: Tensor, **options: object) -> list[Tensor]:
    """Output and gradients of x, coefs and knots."""
    leaves = [value.detach().clone().requires_grad_() for value in inputs]
    if inputs[0].stride() != leaves[0].stride():  # clone makes what is expanded dense
        leaves[0] = inputs[0].detach().requires_grad_()
    output = FUNCTIONS[name](*leaves, impl=impl, **options)
    if grad is None:
        return [output.detach()]
    grads = torch.autograd.grad(output, leaves, grad)
    return [output.detach(), *grads]


def assert_as_good_as_eager(
    name: str, grad: Tensor, *inputs: Tensor, params: bool = True, **options: object
) -> list[Tensor]:
    """Errors against float64 at most 2 times (forward) and 3 times (backward) those of plain PyTorch in that dtype.

    Plain PyTorch here is the reference itself, which computes half precision in float32: the strictest choice. Errors
    are root mean squares, over all entries, several scales of x and several upstream gradients: the gradient of a
    parameter is one number, whose error in a single draw says little. Less than half a rounding of the typical value is
    no error.
    """
    labels = ("y", "x", "coefs", "knots")
    squares = {label: torch.zeros(3, dtype=torch.float64) for label in labels}
    kernel = []
    first = inputs[0]
    draws = 32 if grad.numel() < 1000 else 8 if grad.numel() < 200_000 else 2
    if INTERPRETED:
        draws = 8 if grad.numel() < 50_000 else 2
    for draw in range(draws):
        upstream = grad if draw == 0 else torch.randn(grad.shape).to(grad.dtype)
        inputs = (first * (1 + draw / 64), *inputs[1:])
        exact = run(name, "reference", upstream.double(), *(value.double() for value in inputs), **options)
        eager = run(name, "reference", upstream, *inputs, **options)
        ours = run(name, KERNEL, upstream, *inputs, **options)
        kernel = kernel or ours
        for label, judge, theirs, result in zip(labels, exact, eager, ours, strict=True):
            assert result.dtype == theirs.dtype
            assert result.shape == theirs.shape
            assert torch.equal(result.isnan(), theirs.isnan()), label
            assert torch.equal(result.isinf(), theirs.isinf()), label
            finite = judge.isfinite() & theirs.isfinite()
            for i, value in enumerate((result.double() - judge, theirs.double() - judge, judge)):
                squares[label][i] += value[finite].square().sum()
    for label, factor in zip(labels if params else labels[:2], (2, 3, 3, 3), strict=False):
        error, allowed, size = squares[label].sqrt().tolist()
        # a float64 input's parameters get gradients in their own dtype
        dtype = inputs[0].dtype if label in ("y", "x") else inputs[1].dtype
        rounding = size * torch.finfo(dtype).eps
        if inputs[0].dtype == torch.float64:  # the judge is no better than the judged
            allowed = 30 * rounding
        assert error <= max(factor * allowed, 0.5 * rounding), f"{label}: {error / allowed:.2f} times eager's error"
    return kernel


def assert_close_to_reference(name: str, grad: Tensor, *inputs: Tensor, **options: object) -> list[Tensor]:
    """The same as the float64 reference up to rounding: for all that is about which entries, not how exactly."""
    exact = run(name, "reference", grad.double(), *(value.double() for value in inputs), **options)
    kernel = run(name, KERNEL, grad, *inputs, **options)
    for label, judge, result in zip(("y", "x", "coefs", "knots"), exact, kernel, strict=True):
        assert result.shape == judge.shape
        finite = judge[judge.isfinite()]
        scale = finite.abs().max().item() if finite.numel() else 0.0
        if label != "y":  # gradients are sums of terms of this size, of which most may cancel
            terms = grad.numel() if label in ("coefs", "knots") else 1
            scale = max(scale, grad.abs().max().item() * terms**0.5)
        tolerance = scale * {torch.float64: 1e-12, torch.float32: 1e-5}.get(result.dtype, 1e-2)
        torch.testing.assert_close(result.double(), judge, atol=tolerance, rtol=0, equal_nan=True)
    return kernel


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_orders_and_dtypes(isa: str, name: str, order: int, dtype: torch.dtype) -> None:
    coefs, knots = parameters(order)
    x = torch.randn(6, 7, 65).mul(2).to(dtype)
    assert_as_good_as_eager(name, torch.randn(x.shape).to(dtype), x, coefs, knots)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 197, 1000, 4095, 4097, 32000])
def test_lengths(isa: str, name: str, length: int) -> None:
    coefs, knots = parameters()
    x = torch.randn(5 if length < 32000 else 2, length) * 2
    assert_as_good_as_eager(name, torch.randn(x.shape), x, coefs, knots)


@pytest.mark.parametrize("name", ["multimax", "log_multimax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_of_more_than_a_million(isa: str, name: str, dtype: torch.dtype) -> None:
    coefs, knots = parameters()
    x = torch.randn(1, 131_075 if INTERPRETED else 1_050_003).to(dtype)
    assert_as_good_as_eager(name, torch.randn(x.shape).to(dtype), x, coefs, knots)


LAYOUTS = {
    "contiguous": lambda: torch.randn(4, 5, 37),
    "transposed": lambda: torch.randn(37, 5, 4).transpose(0, 2),
    "middle": lambda: torch.randn(4, 37, 5).transpose(1, 2),
    "channels last": lambda: torch.randn(2, 19, 3, 5).contiguous(memory_format=torch.channels_last),
    "sliced": lambda: torch.randn(4, 10, 80)[:, ::2, 3:77:2],
    "sliced rows": lambda: torch.randn(9, 50)[::2, 4:41],
    "expanded": lambda: torch.randn(4, 1, 37).expand(4, 5, 37),
    "expanded along dim": lambda: torch.randn(4, 5, 1).expand(4, 5, 37),
    "one entry": lambda: torch.randn(1, 1, 1),
    "one row": lambda: torch.randn(300),
    "many short rows": lambda: torch.randn(3000, 3),
    "long columns": lambda: torch.randn(600, 21).t(),
    "scalar": lambda: torch.randn(()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_layouts_and_dims(isa: str, name: str, layout: str, dtype: torch.dtype) -> None:
    coefs, knots = parameters()
    x = LAYOUTS[layout]()
    x = x.to(dtype) if "expanded" not in layout else x  # .to would make it dense
    dims = [-1] if name == "modulate" else range(-max(x.ndim, 1), max(x.ndim, 1))
    for dim in dims:
        options = {} if name == "modulate" else {"dim": dim}
        for grad in (torch.randn(x.shape).to(x.dtype), torch.randn((), dtype=x.dtype).expand(x.shape)):
            output = assert_close_to_reference(name, grad, x, coefs, knots, **options)[0]
            assert output.stride() == torch.empty_like(x).stride()


# Short rows go a vector's width at once, exchanged in registers but for the last ones of a call and other strides.
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("length", [2, 3, 15, 16, 17, 31, 32, 33, 47, 48, 49, 95, 96, 97])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_short_rows(isa: str, name: str, length: int, dtype: torch.dtype) -> None:
    coefs, knots = parameters(heads=2)
    x = torch.randn(2, 37, length + 3).to(dtype)[..., 1:-2]
    x[0, 5, 0] = -torch.inf
    if not INTERPRETED:  # Triton's kernels differ in which of the parameters' gradients a NaN reaches
        x[1, 20, 1] = torch.nan
    grad = torch.randn(2, 37, 2 * length).to(dtype)[..., ::2]
    mask = torch.rand(37, length) < 0.7
    mask[11] = False
    for options in ({},) if name == "modulate" else ({}, {"mask": mask}):
        lead = (coefs[:, None], knots[:, None])
        output = assert_close_to_reference(name, grad, x, *lead, **options)[0]
        assert output[0].isfinite().sum() >= 37 * length // 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_short_rows_have_the_same_weights_beside_any_others(isa: str, dtype: torch.dtype) -> None:
    coefs, knots = parameters()
    x = torch.randn(37, 20).to(dtype)
    output = run("multimax", KERNEL, None, x, coefs, knots)[0]
    for rows in (slice(0, 1), slice(3, 8), slice(20, 37)):
        assert torch.equal(run("multimax", KERNEL, None, x[rows], coefs, knots)[0], output[rows])


# A row is split where there are few: the same threads or not, masks, strides and what does not count in some stretch.
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["rows", "columns", "strided"])
def test_few_long_rows(isa: str, name: str, dtype: torch.dtype, layout: str) -> None:
    length = 3000 if layout == "columns" or INTERPRETED else 20_011
    coefs, knots = parameters()
    x = torch.randn(3, length, 1 if layout == "rows" else 2)[..., 0]
    x = x.t().contiguous().t() if layout == "columns" else x
    x = x.to(dtype)
    x[0, 100:-200] = -torch.inf
    x[1, 7] = 30.0
    grad = torch.randn(x.shape).to(dtype)
    grad[0, 100] = torch.inf  # of an entry that is masked
    mask = torch.rand(x.shape) < 0.8
    mask[2] = False
    for options in ({},) if name == "modulate" else ({}, {"mask": mask}):
        first = assert_close_to_reference(name, grad, x, coefs, knots, **options)
        for threads in (2, 1):
            torch.set_num_threads(threads)
            for ours, again in zip(first, run(name, KERNEL, grad, x, coefs, knots, **options), strict=True):
                assert torch.equal(ours, again)


@pytest.mark.parametrize("name", ["multimax", "log_multimax"])
def test_nan_in_a_long_row(isa: str, name: str) -> None:
    coefs, knots = parameters()
    x = torch.randn(2, 20_011)
    x[0, 15_000], x[0, 3] = torch.nan, -torch.inf
    kernel, reference = (run(name, impl, torch.ones_like(x), x, coefs, knots) for impl in (KERNEL, "reference"))
    for ours, theirs in zip(kernel, reference, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (3, 0, 4), (0, 0)])
def test_empty(name: str, shape: tuple[int, ...]) -> None:
    coefs, knots = parameters()
    dims = [-1] if name == "modulate" else range(len(shape))
    for dim in dims:
        options = {} if name == "modulate" else {"dim": dim}
        x = torch.randn(shape)
        output, grad_x, *grads = run(name, KERNEL, torch.randn(shape), x, coefs, knots, **options)
        assert output.shape == grad_x.shape == x.shape
        assert all(torch.equal(grad, torch.zeros(2, 2)) for grad in grads)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads(isa: str, name: str, dtype: torch.dtype) -> None:
    coefs, knots = parameters(heads=3)
    x = torch.randn(2, 3, 10, 33).to(dtype)
    output, *grads = assert_close_to_reference(name, torch.ones_like(x), x, coefs, knots)
    for head in range(3):
        alone = run(name, KERNEL, torch.ones_like(x[:, head]), x[:, head], coefs[head], knots[head])
        assert torch.equal(output[:, head], alone[0])
        for of_all, of_head in zip(grads[1:], alone[2:], strict=True):
            torch.testing.assert_close(of_all[head], of_head)


@pytest.mark.parametrize("lead", [(1, 1, 10), (2, 1, 1), (2, 3, 10), (1, 3, 1), (3, 10), (10,)])
def test_heads_on_any_axis(isa: str, lead: tuple[int, ...]) -> None:
    coefs, knots = (torch.randn(*lead, 2, 2) * 0.3 for _ in range(2))
    x = torch.randn(2, 3, 10, 33)
    if lead == (10,):  # without a batch: the only other dim
        x = x[0, 0]
    for dim in (-1, -2) if len(lead) == 3 and lead[-1] == 1 else (-1,):
        if dim == -2:
            x = x.transpose(-1, -2).contiguous()
        assert_close_to_reference("multimax", torch.randn(x.shape), x, coefs, knots, dim=dim)


@pytest.mark.parametrize("name", ["multimax", "log_multimax"])
@pytest.mark.parametrize("shape", [(4, 5, 37), (1, 5, 37), (5, 1), (37,), (4, 1, 1), ()])
def test_masks(isa: str, name: str, shape: tuple[int, ...]) -> None:
    coefs, knots = parameters()
    x = torch.randn(4, 5, 37)
    mask = torch.rand(shape) < 0.6
    for dim in (-1, 0, 1):
        output, grad_x, *_ = assert_close_to_reference(name, torch.randn(x.shape), x, coefs, knots, dim=dim, mask=mask)
        off = ~mask.expand(x.shape)
        assert (output[off] == (0 if name == "multimax" else -torch.inf)).all()
        assert (grad_x[off] == 0).all()


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fill", ["-inf", "lowest", "half"])
@pytest.mark.parametrize("zero", [True, False])
def test_masked_entries_in_the_input(isa: str, name: str, dtype: torch.dtype, fill: str, zero: bool) -> None:
    coefs, knots = parameters()
    coefs = coefs * (0 if zero else 1)
    x = torch.randn(5, 40).to(dtype)
    lowest = torch.finfo(dtype).min
    off = torch.rand(x.shape) < 0.3
    off[1] = True
    off[2] = False
    x[off] = {"-inf": -torch.inf, "lowest": lowest, "half": lowest / 2}[fill]
    grad = torch.randn(x.shape).to(dtype)
    grad[off] = torch.tensor([torch.inf, torch.nan, 1.0]).to(dtype)[torch.randint(3, (int(off.sum()),))]
    kernel, reference = (run(name, impl, grad, x, coefs, knots) for impl in (KERNEL, "reference"))
    output, grad_x, *grads = kernel
    assert (output[off] == {"multimax": 0, "log_multimax": -torch.inf, "modulate": x[off]}[name]).all()
    assert (grad_x[off] == 0).all()
    assert all(value.isfinite().all() for value in (output[~off], grad_x, *grads))
    if name == "multimax":
        assert (output[1] == 0).all()
        torch.testing.assert_close(output[[0, 2, 3, 4]].float().sum(-1), torch.ones(4), atol=1e-2, rtol=0)
    if name != "modulate":
        # nothing of a masked entry reaches the rest
        alone = run(name, KERNEL, grad[0][~off[0]], x[0][~off[0]], coefs, knots)
        torch.testing.assert_close(output[0][~off[0]], alone[0])
        torch.testing.assert_close(grad_x[0][~off[0]], alone[1])
    torch.testing.assert_close(output, reference[0])


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dim", [-1, 0])
def test_nan_shows_in_its_row_only(isa: str, name: str, dim: int) -> None:
    coefs, knots = parameters()
    x = torch.randn(20, 20)
    x[3, 5] = torch.nan
    x[4, 4], x[3, 6], x[6, 5] = -torch.inf, -torch.inf, -torch.inf
    options = {} if name == "modulate" else {"dim": dim}
    kernel = run(name, KERNEL, torch.ones_like(x), x, coefs, knots, **options)
    reference = run(name, "reference", torch.ones_like(x), x, coefs, knots, **options)
    for ours, theirs in zip(kernel[:2], reference[:2], strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    if name != "modulate":
        row = kernel[0][3] if dim == -1 else kernel[0][:, 5]
        assert row.isnan().sum() == 19
        assert kernel[0].isnan().sum() == 19
        assert kernel[2].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_nan_shows_whatever_its_bits(isa: str, dtype: torch.dtype) -> None:
    integers, quiet = {
        torch.float32: (torch.int32, 0x7FC00000),
        torch.float64: (torch.int64, 0x7FF8000000000000),
        torch.bfloat16: (torch.int16, 0x7FC0),
        torch.float16: (torch.int16, 0x7E00),
    }[dtype]
    coefs, knots = parameters()
    for payload in (0, 1, 2, 5, 63):
        for length in (5, 64, 5000):
            x = torch.randn(3, length).to(dtype)
            x[1, 3] = torch.tensor([quiet + payload], dtype=integers).view(dtype)[0]
            for name in ("multimax", "log_multimax"):
                output = run(name, KERNEL, None, x, coefs, knots)[0]
                assert output[1].isnan().all()
                assert not output[[0, 2]].isnan().any()


def test_nan_shows_in_the_gradients_of_modulate(isa: str) -> None:
    for order in (1, 2, 3):
        coefs, knots = parameters(order)
        x = torch.tensor([1.0, torch.nan, -2.0])
        kernel, reference = (run("modulate", impl, torch.ones(3), x, coefs, knots) for impl in (KERNEL, "reference"))
        assert kernel[2].isnan().all()
        assert torch.equal(kernel[2].isnan(), reference[2].isnan())


def test_nan_under_a_mask_takes_no_part(isa: str) -> None:
    coefs, knots = parameters()
    x = torch.randn(3, 30)
    mask = torch.ones(3, 30, dtype=torch.bool)
    x[1, 7], mask[1, 7] = torch.nan, False
    for value in run("multimax", KERNEL, torch.ones_like(x), x, coefs, knots, mask=mask):
        assert value.isfinite().all()


@pytest.mark.parametrize("big", [1e4, 1e19, 1e20, 3e38])
def test_huge_values_at_zero_coefs_are_softmax(isa: str, big: float) -> None:
    x = torch.randn(4, 50)
    x[0, 3], x[1, 4], x[2, :2], x[3, 5] = big, -big / 2.5, big, -big / 4
    _, knots = parameters()
    output = multimax.multimax(x, torch.zeros(2, 2), knots, impl=KERNEL)
    torch.testing.assert_close(output, torch.softmax(x, -1))
    grad_x, grad_coefs, grad_knots = run("multimax", KERNEL, torch.randn(x.shape), x, torch.zeros(2, 2), knots)[1:]
    assert grad_x.isfinite().all()
    assert grad_knots.isfinite().all()
    assert big > 1e19 or grad_coefs.isfinite().all()  # beyond, the square of an entry is infinite, and is their factor


def test_large_offsets_lose_nothing(isa: str) -> None:
    coefs, knots = torch.zeros(2, 2), torch.randn(2, 2)
    for offset in (1000.0, -1000.0, 1e5):
        x = torch.randn(8, 197) + offset
        # the parameters' gradients have the offset's square as a factor, and all of it cancels
        assert_as_good_as_eager("multimax", torch.randn(x.shape), x, coefs, knots, params=False)
        assert_as_good_as_eager("log_multimax", torch.randn(x.shape), x, coefs, knots, params=False)


SINKING = torch.tensor([[0.0, 0.0], [-1.0, 0.0]]), torch.zeros(2, 2)  # sigma(-1e30) overflows to -inf
RISING = torch.tensor([[0.0, 0.0], [0.0, 1.0]]), torch.zeros(2, 2)  # sigma(1e30) overflows to inf


@pytest.mark.parametrize("name", ["multimax", "log_multimax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("length", [1, 33, 5000])
def test_what_overflows_to_minus_infinity_counts_as_masked(
    isa: str, name: str, dtype: torch.dtype, length: int
) -> None:
    far = -1e200 if dtype == torch.float64 else -1e30
    for impl in (KERNEL, "reference"):
        for first in (far, 1.0):
            x = torch.full((2, length), far, dtype=dtype)
            x[:, 0] = first
            leaves = [t.clone().requires_grad_() for t in (x, *SINKING)]
            out = getattr(multimax, name)(*leaves, impl=impl)
            weights = torch.zeros_like(x)
            weights[:, 0] = float(first == 1.0)
            assert torch.equal(out, weights if name == "multimax" else weights.log()), impl
            grad = torch.zeros_like(x)
            grad[:, 0] = 1.0
            for gradient in torch.autograd.grad(out, leaves, grad):
                assert torch.all(gradient == 0), impl


@pytest.mark.parametrize("name", ["multimax", "log_multimax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [33, 5000])
def test_what_overflows_to_infinity_makes_its_row_nan_but_for_what_is_masked(
    isa: str, name: str, dtype: torch.dtype, length: int
) -> None:
    x = torch.randn(2, length).to(dtype)
    x[0, 3] = 1e30
    x[:, 5] = -torch.inf
    mask = torch.rand(2, length) < 0.7
    mask[:, 3] = True
    off = ~mask | (x == -torch.inf)
    for impl in (KERNEL, "reference"):
        leaves = [t.clone().requires_grad_() for t in (x, *RISING)]
        out = getattr(multimax, name)(*leaves, mask=mask, impl=impl)
        assert out[0][~off[0]].isnan().all()
        assert torch.all(out[off] == (0 if name == "multimax" else -torch.inf))
        assert not out[1][~off[1]].isnan().any()
        grad = torch.autograd.grad(out, leaves[0], torch.randn(x.shape).to(dtype))[0]
        assert torch.all(grad[off] == 0), impl
        assert grad[1].isfinite().all()


def test_an_entry_of_weight_0_adds_nothing_though_its_powers_overflow(isa: str) -> None:
    x, coefs, knots = torch.tensor([[0.0, -1e20, -1e38]]), torch.zeros(4, 2), torch.zeros(4, 2)
    for impl in (KERNEL, "reference"):
        leaves = [t.clone().requires_grad_() for t in (x, coefs, knots)]
        out = multimax.multimax(*leaves, impl=impl)
        for gradient in torch.autograd.grad(out, leaves, torch.tensor([[1.0, 2.0, 3.0]])):
            assert torch.all(gradient == 0), impl


def test_far_below_the_maximum_is_exactly_zero(isa: str) -> None:
    coefs, knots = torch.zeros(1, 2), torch.zeros(1, 2)
    x = torch.tensor([0.0, -80.0, -87.0, -200.0, -1e6, -1e30])
    output = multimax.multimax(x, coefs, knots, impl=KERNEL)
    torch.testing.assert_close(output, torch.softmax(x, -1), atol=1e-37, rtol=1e-5)
    assert (output[3:] == 0).all()
    assert (output[:3] > 0).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bitwise_equal_in_two_runs_and_with_any_number_of_threads(isa: str, name: str) -> None:
    coefs, knots = parameters(heads=4)
    shape = (2, 4, 50, 97) if INTERPRETED else (16, 4, 50, 197)
    x, grad = torch.randn(shape), torch.randn(shape)
    first = run(name, KERNEL, grad, x, coefs, knots)
    for threads in (2, 1):
        torch.set_num_threads(threads)
        for ours, again in zip(first, run(name, KERNEL, grad, x, coefs, knots), strict=True):
            assert torch.equal(ours, again)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    "needs", [(True, False, False), (False, True, False), (False, False, True), (False, True, True)]
)
def test_gradients_only_where_needed(name: str, needs: tuple[bool, ...]) -> None:
    inputs = [value.requires_grad_(need) for value, need in zip((torch.randn(4, 9), *parameters()), needs, strict=True)]
    everything = run(name, KERNEL, torch.ones(4, 9), *inputs)[1:]
    FUNCTIONS[name](*inputs, impl=KERNEL).backward(torch.ones(4, 9))
    for value, need, grad in zip(inputs, needs, everything, strict=True):
        assert (value.grad is not None) == need
        assert not need or torch.equal(value.grad, grad)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("params", [torch.float32, torch.float64, "same"], ids=str)
def test_parameters_of_another_dtype(dtype: torch.dtype, params: torch.dtype | str) -> None:
    params_dtype = dtype if params == "same" else params
    coefs, knots = parameters(dtype=params_dtype)
    output, grad_x, grad_coefs, grad_knots = run(
        "multimax", KERNEL, torch.ones(4, 99, dtype=dtype), torch.randn(4, 99).to(dtype), coefs, knots
    )
    assert output.dtype == grad_x.dtype == dtype
    assert grad_coefs.dtype == grad_knots.dtype == params_dtype


def test_every_half_value_converts_both_ways(isa: str) -> None:
    # sigma at zero coefs is the identity: what comes out is what went in, for every finite value of the type
    for dtype in HALF:
        x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        x = x[x.isfinite()]
        if dtype == torch.bfloat16 and isa == "avx512_bf16":  # its instruction makes 0 of what is not normal
            x = x[(x == 0) | (x.abs() >= torch.finfo(dtype).tiny)]
        assert torch.equal(multimax.modulate(x, torch.zeros(1, 2), torch.zeros(1, 2), impl=KERNEL), x)
    # and rounding from float32 is that of torch
    coefs, knots = torch.full((1, 2), 1 / 3), torch.zeros(1, 2)
    values = torch.randn(100_003).mul(torch.logspace(-12, 3, 100_003))
    for dtype in HALF:
        x = values.to(dtype)
        exact = multimax.modulate(x.float(), coefs, knots, impl=KERNEL).to(dtype)
        assert torch.equal(multimax.modulate(x, coefs, knots, impl=KERNEL), exact)


@needs_the_library
def test_each_instruction_set_was_really_switched(isa: str) -> None:
    assert kernels.use_isa() == isa


@needs_the_library
def test_instruction_sets_agree() -> None:
    if len(kernels.ISAS) < 2:
        pytest.skip("one instruction set only")
    coefs, knots = parameters()
    x = torch.randn(7, 300)
    results = {}
    best = kernels.use_isa()
    for name in kernels.ISAS:
        try:
            kernels.use_isa(name)
        except RuntimeError:
            continue
        results[name] = run("multimax", KERNEL, torch.ones_like(x), x, coefs, knots)
    kernels.use_isa(best)
    for one, other in itertools.combinations(results.values(), 2):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_rows_whose_entries_lie_further_apart_than_32_bits_count() -> None:
    far = torch.empty(2**31 + 2**20, dtype=torch.float16)  # memory that is not touched is not taken
    x = far.as_strided((5, 3), (1, 2**30 + 8))
    values = torch.randn(5, 3).half()
    x.copy_(values)
    params = parameters()
    for function in FUNCTIONS.values():
        torch.testing.assert_close(function(x, *params, impl=KERNEL), function(values, *params, impl=KERNEL))
