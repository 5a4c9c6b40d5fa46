"""Attention: the kernels against the reference in float64, torch's attention as the oracle at zero coefs."""

import itertools
import statistics
import sys
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import multimax
from draws import parameters
from machine import KERNEL, needs_kernels
from multimax import multimax_attention, multimax_attention_varlen
from multimax.ops.attention import reference

HALF = (torch.bfloat16, torch.float16)
INTERPRETED = KERNEL == "triton"  # which takes its time: smaller cases, where only their number is less for it
DRAWS = 5 if INTERPRETED else 15
B, H = (1, 2) if INTERPRETED else (2, 4)  # batches and heads
LABELS = ("out", "query", "key", "value", "coefs", "knots", "bias")


def heads(b: int, h: int, length: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(b, h, length, width).to(dtype)


def run(impl: str, grad: Tensor, inputs: list[Tensor], **options: Any) -> list[Tensor]:
    """Output and gradients of query, key, value, coefs, knots and, if there is one, score_bias."""
    leaves = [value.detach().clone().requires_grad_() for value in inputs]
    names = {} if len(leaves) == 5 else {"score_bias": leaves[5]}
    torch.manual_seed(7)  # for dropout
    out = multimax_attention(*leaves[:5], impl=impl, **names, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def eager(grad: Tensor, inputs: list[Tensor], **options: Any) -> list[Tensor]:
    """What `run` gives, the way people write attention: products in the inputs' dtype, weights in between."""
    if inputs[0].dtype == torch.float32:
        return run("reference", grad, inputs, **options)
    leaves = [value.detach().clone().requires_grad_() for value in inputs]
    query, key, value, coefs, knots, *bias = leaves
    group = query.shape[1] // key.shape[1]
    scale = options.get("scale", query.shape[-1] ** -0.5)
    x = (query * scale) @ key.repeat_interleave(group, 1).transpose(-1, -2)
    left, right = (-1 if bound is None else bound for bound in options.get("window", (None, None)))
    band = (options.get("is_causal", False), left, right)
    mask = options.get("attn_mask")
    weights = reference.attention_weights(x.float(), coefs, knots, mask, bias[0] if bias else None, *band)[0]
    if options.get("dropout_p"):
        torch.manual_seed(7)
        seed = torch.randint(-(2**63), 2**63 - 1, (1,))
        every = torch.arange(x.shape[0] * x.shape[1])
        weights = weights * reference.dropout(seed, options["dropout_p"], every, *x.shape[2:]).reshape(x.shape).float()
    out = weights.to(value.dtype) @ value.repeat_interleave(group, 1)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def wide(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def assert_as_good_as_eager(inputs: list[Tensor], **options: Any) -> None:
    """Errors against float64 at most 2 times (forward) and 3 times (backward) those of plain PyTorch in that dtype.

    Relative root mean squares, of which the median over several draws of upstream gradient and parameters counts: the
    gradient of a parameter is one number, a sum of thousands that nearly cancel in one draw and not in another, and the
    error of a single draw is a lottery for both sides. Less than half a rounding is no error.
    """
    query, value = inputs[0], inputs[2]
    errors: dict[str, list[tuple[float, float]]] = {label: [] for label in LABELS[: len(inputs) + 1]}
    single = any(t.numel() == 1 for t in inputs[5:])  # one number's error takes all the draws to tell from luck
    for draw in range(15 if single else DRAWS):
        grad = torch.randn(*query.shape[:-1], value.shape[-1]).to(query.dtype)
        per_head = inputs[3].shape[0] if inputs[3].ndim == 3 else None
        params = parameters(inputs[3].shape[-2], per_head) if draw else inputs[3:5]
        scaled = [inputs[0] * (1 + draw / 16), *inputs[1:3], *params, *inputs[5:]]
        double = {name: wide(option) for name, option in options.items()}
        exact = run("reference", grad.double(), [v.double() for v in scaled], **double)
        plain = eager(grad, scaled, **options)
        ours = run(KERNEL, grad, scaled, **options)
        for label, judge, theirs, result in zip(LABELS, exact, plain, ours, strict=False):
            assert result.dtype == theirs.dtype
            assert result.shape == theirs.shape
            assert torch.equal(result.isnan(), theirs.isnan()), label
            finite = judge.isfinite()
            size = judge[finite].norm()
            errors[label].append(tuple(((t.double() - judge)[finite].norm() / size).item() for t in (result, theirs)))
    for label, pairs in errors.items():
        error, allowed = (statistics.median(values) for values in zip(*pairs, strict=True))
        rounding = torch.finfo(query.dtype if label in LABELS[:4] else inputs[3].dtype).eps
        factor = 2 if label == "out" else 3
        if query.dtype == torch.float32 and label in ("coefs", "knots"):
            # where a parameter's terms cancel down to a few roundings of their sum, eager is exact by luck
            rounding *= 64
        assert error <= max(factor * allowed, 0.5 * rounding), f"{label}: {error / allowed:.2f} times eager's error"


def assert_close_to_reference(inputs: list[Tensor], **options: Any) -> list[Tensor]:
    """The same as the float64 reference up to rounding: for all that is about which entries, not how exactly."""
    grad = torch.randn(*inputs[0].shape[:-1], inputs[2].shape[-1]).to(inputs[0].dtype)
    exact = run("reference", grad.double(), [v.double() for v in inputs], **{k: wide(v) for k, v in options.items()})
    ours = run(KERNEL, grad, inputs, **options)
    eps = torch.finfo(inputs[0].dtype).eps
    for label, judge, result in zip(LABELS, exact, ours, strict=False):
        scale = 1 + judge.abs().max().item() if judge.numel() else 0.0
        # a parameter's gradient is a sum over all scores that nearly cancels
        terms = inputs[0].shape[-2] * inputs[1].shape[-2] if label in ("coefs", "knots") else 1
        atol = eps * scale * max(300, terms**0.5 * 30)
        torch.testing.assert_close(result.double(), judge, rtol=0, atol=atol, msg=lambda m, n=label: f"{n}: {m}")
    return ours


MASKS = {
    "none": lambda b, h, q, k: {},
    "causal": lambda b, h, q, k: {"is_causal": True},
    "window": lambda b, h, q, k: {"window": (11, 3)},
    "causal window": lambda b, h, q, k: {"window": (20, 0)},
    "decode": lambda b, h, q, k: {"window": (None, 0)},
    "boolean": lambda b, h, q, k: {"attn_mask": torch.rand(b, h, q, k) < 0.7},
    "boolean, all heads": lambda b, h, q, k: {"attn_mask": torch.rand(b, 1, q, k) < 0.7},
    "padding": lambda b, h, q, k: {"attn_mask": torch.arange(k) < torch.randint(1, k + 1, (b, 1, 1, 1))},
    "padding, causal": lambda b, h, q, k: {
        "attn_mask": torch.arange(k) < torch.randint(1, k + 1, (b, 1, 1, 1)),
        "is_causal": True,
    },
    "numbers": lambda b, h, q, k: {"attn_mask": torch.randn(q, k)},
    "numbers and -inf": lambda b, h, q, k: {
        "attn_mask": torch.randn(b, 1, q, k).masked_fill(torch.rand(b, 1, q, k) < 0.3, -torch.inf)
    },
    "finfo.min": lambda b, h, q, k: {
        "attn_mask": torch.zeros(b, 1, q, k).masked_fill(torch.rand(b, 1, q, k) < 0.3, torch.finfo(torch.float32).min)
    },
    "dropout": lambda b, h, q, k: {"dropout_p": 0.3},
    "dropout, causal": lambda b, h, q, k: {"dropout_p": 0.3, "is_causal": True},
    "scale": lambda b, h, q, k: {"scale": 0.4},
}


def make(
    b: int = B,
    h: int = H,
    queries: int = 65,
    keys: int = 65,
    width: int = 16,
    value_width: int | None = None,
    key_heads: int | None = None,
    dtype: torch.dtype = torch.float32,
    order: int = 2,
    per_head: bool = False,
) -> list[Tensor]:
    key_heads = key_heads or h
    return [
        heads(b, h, queries, width, dtype),
        heads(b, key_heads, keys, width, dtype),
        heads(b, key_heads, keys, value_width or width, dtype),
        *parameters(order, h if per_head else None),
    ]


@needs_kernels
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_masks(kind: str, dtype: torch.dtype) -> None:
    assert_as_good_as_eager(make(queries=63, keys=197, dtype=dtype), **MASKS[kind](B, H, 63, 197))
    assert_close_to_reference(make(dtype=dtype), **MASKS[kind](B, H, 65, 65))


@needs_kernels
@pytest.mark.parametrize("kind", MASKS)
def test_masks_on_every_instruction_set(isa: str, kind: str) -> None:
    inputs = make(queries=70, keys=100, width=20, value_width=33, key_heads=H // 2, per_head=True)
    assert_close_to_reference(inputs, enable_gqa=True, **MASKS[kind](B, H, 70, 100))


@needs_kernels
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 47, 48, 49, 63, 64, 65, 127, 128, 129, 197])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(isa: str, length: int, causal: bool) -> None:
    assert_close_to_reference(make(queries=length, keys=length), is_causal=causal)
    assert_close_to_reference(make(b=1, queries=7, keys=length), is_causal=causal)
    assert_close_to_reference(make(b=1, queries=length, keys=7), is_causal=causal)


@needs_kernels
@pytest.mark.parametrize("width", [1, 2, 8, 15, 16, 17, 63, 64, 65, 80, 128, 129, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_head_sizes(width: int, dtype: torch.dtype) -> None:
    if INTERPRETED and dtype == torch.float32 and width > 128:
        pytest.skip("wider than the Triton kernels take")
    assert_as_good_as_eager(make(b=1, h=2, width=width, dtype=dtype))
    assert_as_good_as_eager(make(b=1, h=2, width=width, value_width=24, dtype=dtype))
    assert_as_good_as_eager(make(b=1, h=2, width=24, value_width=width, dtype=dtype))


@needs_kernels
@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize("per_head", [False, True])
def test_orders(isa: str, order: int, per_head: bool) -> None:
    assert_close_to_reference(make(order=order, per_head=per_head), is_causal=True)


@needs_kernels
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_shared_key_heads(key_heads: int, dtype: torch.dtype) -> None:
    for queries in (1, 65, 100 if INTERPRETED else 600):  # 600: several items per group
        inputs = make(b=1, h=4, queries=queries, keys=70, key_heads=key_heads, dtype=dtype, per_head=True)
        assert_as_good_as_eager(inputs, enable_gqa=True)


BIASES = [(B, H, 65, 70), (1, H, 65, 70), (B, 1, 65, 70), (1, 1, 65, 70), (65, 70), (H, 1, 70), (B, H, 65, 1), (1,)]


@needs_kernels
@pytest.mark.parametrize("shape", BIASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_score_bias(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = [*make(keys=70, dtype=dtype, key_heads=H // 2), torch.randn(shape).to(dtype)]
    assert_as_good_as_eager(inputs, enable_gqa=True)
    assert_as_good_as_eager(inputs, enable_gqa=True, is_causal=True, attn_mask=torch.rand(65, 70) < 0.8)


@needs_kernels
def test_score_bias_rules_out(isa: str) -> None:
    inputs = [*make(), torch.randn(65, 65).masked_fill(torch.rand(65, 65) < 0.3, -torch.inf)]
    *_, bias = assert_close_to_reference(inputs)
    assert torch.all(bias[inputs[-1] == -torch.inf] == 0)


@needs_kernels
@pytest.mark.parametrize("lengths", [(65, 65), (40, 70), (70, 40)], ids=str)
def test_a_window_of_any_size_is_no_bound(lengths: tuple[int, int]) -> None:
    inputs = make(b=1, h=1, queries=lengths[0], keys=lengths[1])
    grad = torch.randn(inputs[0].shape)
    for open_end, end in ((None, 0), (0, None), (None, None)):
        window = (open_end, end)
        expected = run(KERNEL, grad, inputs, window=window)
        for size in (110, 2**31 - 20, 2**31 - 1, 2**31, sys.maxsize, 2**70):
            sized = tuple(size if bound is None else bound for bound in window)
            for result, other in zip(run(KERNEL, grad, inputs, window=sized), expected, strict=True):
                torch.testing.assert_close(result, other)


@needs_kernels
@pytest.mark.parametrize("lengths", [(9, 9), (4, 12), (12, 4)], ids=str)
@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")  # in torch; here zeros
def test_torchs_causal_bias(lengths: tuple[int, int]) -> None:
    inputs = make(b=1, h=2, queries=lengths[0], keys=lengths[1])
    grad = torch.randn(inputs[0].shape)
    whole = torch.ones(lengths, dtype=torch.bool)
    masks = {
        causal_upper_left(*lengths): whole.tril(),
        causal_lower_right(*lengths): whole.tril(lengths[1] - lengths[0]),
    }
    for bias, mask in masks.items():
        for impl in (KERNEL, "torch", "reference"):
            for window in (None, (2, None), (None, 1)):
                for result, other in zip(
                    run(impl, grad, inputs, attn_mask=bias, window=window),
                    run(impl, grad, inputs, attn_mask=mask, window=window),
                    strict=True,
                ):
                    torch.testing.assert_close(result, other)
        if lengths[0] <= lengths[1]:
            plain = [*inputs[:3], torch.zeros(2, 2), torch.zeros(2, 2)]
            theirs = F.scaled_dot_product_attention(*inputs[:3], attn_mask=bias)
            torch.testing.assert_close(multimax_attention(*plain, attn_mask=bias), theirs, rtol=1e-4, atol=1e-5)


def test_torchs_causal_bias_under_compile() -> None:
    inputs = make(b=1, h=2, queries=4, keys=12)
    for bias in (causal_upper_left(4, 12), causal_lower_right(4, 12)):
        expected = multimax_attention(*inputs, attn_mask=bias)
        compiled = torch.compile(lambda *args, bias=bias: multimax_attention(*args, attn_mask=bias))
        torch.testing.assert_close(compiled(*inputs), expected)


FEW = {  # queries, keys, width, width of values, and options
    "one": (1, 197, 64, 64, {}),
    "split": (1, 1300, 20, 33, {}),
    "several": (3, 700, 33, 20, {"window": (None, 0)}),
    "window": (2, 1131, 40, 64, {"window": (601, 7)}),
    "narrow window": (4, 1200, 16, 120, {"window": (3, 0)}),
    "causal": (4, 600, 16, 16, {"is_causal": True}),
    "boolean": (2, 90, 64, 64, {"attn_mask": torch.rand(2, 90, generator=torch.Generator().manual_seed(0)) < 0.5}),
    "padding": (1, 1100, 16, 48, {"attn_mask": torch.arange(1100) < 130}),
    "numbers": (2, 75, 8, 8, {"attn_mask": torch.linspace(-3, 3, 150).view(2, 75)}),
    "dropout": (1, 700, 16, 16, {"dropout_p": 0.3}),
}


@needs_kernels
@pytest.mark.parametrize("case", FEW)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_few_queries(isa: str, case: str, dtype: torch.dtype) -> None:
    queries, keys, width, value_width, options = FEW[case]
    inputs = make(1, 4, queries, keys, width, value_width, 2, dtype=dtype, per_head=True)
    assert_close_to_reference(inputs, enable_gqa=True, **options)


@needs_kernels
def test_few_queries_of_packed_sequences() -> None:
    lengths, key_lengths = [1, 0, 4, 2], [1700, 5, 0, 33]
    starts = [torch.tensor([0, *itertools.accumulate(sizes)]) for sizes in (lengths, key_lengths)]
    values = [torch.randn(7, 4, 16), torch.randn(1738, 2, 16), torch.randn(1738, 2, 24), *parameters(heads=4)]
    exact, found = (
        multimax_attention_varlen(*values, *starts, enable_gqa=True, return_lse=True, impl=impl)
        for impl in ("reference", KERNEL)
    )
    for result, other in zip(found, exact, strict=True):
        torch.testing.assert_close(result, other)


@needs_kernels
def test_one_head_is_split_into_chunks_of_keys(isa: str) -> None:
    for extra in ({}, {"is_causal": True}, {"window": (100, 50)}):
        assert_close_to_reference(make(b=1, h=1, queries=130, keys=2100), **extra)
    inputs = [*make(b=2, h=2, queries=70, keys=1300), torch.randn(1, 1, 70, 1300)]
    assert_close_to_reference(inputs)


@needs_kernels
@pytest.mark.parametrize("case", ["boolean", "numbers", "window", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_rows_without_keys_are_zero(isa: str, case: str, dtype: torch.dtype) -> None:
    inputs = make(queries=80, keys=70, dtype=dtype)
    empty = torch.zeros(80, dtype=torch.bool)
    empty[3:60] = True
    options: dict[str, Any] = {
        "boolean": {"attn_mask": ~empty[:, None].expand(80, 70)},
        "numbers": {"attn_mask": torch.zeros(80, 70).masked_fill(empty[:, None], -torch.inf)},
        "window": {"window": (None, 0)},  # the first ten queries lie before all keys
        "causal": {"attn_mask": torch.arange(70) >= 10, "is_causal": True},
    }[case]
    if case in ("window", "causal"):
        empty = torch.arange(80) < 10
    out, grad_query, *_ = run(KERNEL, torch.ones_like(inputs[0]), inputs, **options)
    assert torch.all(out[:, :, empty] == 0)
    assert torch.all(grad_query[:, :, empty] == 0)
    assert torch.all(out[:, :, ~empty].abs().amax(-1) > 0)
    lse = multimax_attention(*inputs, **options, return_lse=True)[1]
    assert torch.equal(lse == -torch.inf, empty.expand(lse.shape))
    assert_close_to_reference(inputs, **options)


@needs_kernels
@pytest.mark.parametrize("shape", [(0, 4, 5, 6), (2, 0, 5, 6), (2, 4, 0, 6), (2, 4, 5, 0), (0, 0, 0, 0)], ids=str)
def test_empty(shape: tuple[int, int, int, int]) -> None:
    b, h, queries, keys = shape
    inputs = make(b=b, h=1, queries=queries, keys=keys)
    inputs[:3] = [t.expand(b, h, *t.shape[2:]) if h != 1 else t for t in (t[:, :h] for t in inputs[:3])]
    for transposed in (False, True):
        if transposed:
            inputs[:3] = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in inputs[:3]]
        for grad in (torch.zeros(b, h, queries, 16), torch.zeros(()).expand(b, h, queries, 16)):
            out, *grads = run(KERNEL, grad, inputs, attn_mask=torch.ones(keys, queries, dtype=torch.bool).T)
            assert out.shape == (b, h, queries, 16)
            assert torch.all(out == 0)
            assert all(torch.all(grad == 0) for grad in grads)


@needs_kernels
def test_nan_shows_in_its_row_alone(isa: str) -> None:
    inputs = make(b=1, h=1, queries=60, keys=300)
    inputs[0][0, 0, 7] = torch.nan
    out = multimax_attention(*inputs, impl=KERNEL)
    assert torch.equal(out.isnan().any(-1)[0, 0], torch.arange(60) == 7)


@needs_kernels
@pytest.mark.parametrize("options", [{"is_causal": True}, {"attn_mask": torch.ones(60, 60).tril() > 0}], ids=list)
def test_nan_does_not_reach_values_that_its_row_does_not_see(options: dict[str, Any]) -> None:
    inputs = make(b=1, h=1, queries=60, keys=60)
    inputs[0][0, 0, 7, 3] = torch.nan
    _, _, _, of_value, *_ = run(KERNEL, torch.randn(inputs[0].shape), inputs, **options)
    assert torch.equal(of_value.isnan().any(-1)[0, 0], torch.arange(60) <= 7)


@needs_kernels
@pytest.mark.parametrize("number", [-1e3, -1e9])
def test_rows_masked_by_a_finite_number(number: float) -> None:
    """All of such a row's scores are far below 0, and none is ruled out: their sum must not be lost beside them."""
    mask = torch.zeros(63, 70)
    mask[::3] = number
    inputs = make(b=1, queries=63, keys=70)
    grad = torch.randn(inputs[0].shape)
    exact = run("reference", grad, inputs, attn_mask=mask)
    if number < -1e6:  # in float32 all scores of such a row are equal
        rows = torch.arange(63) % 3 == 0
        weights = torch.full((70,), 1 / 70)
        torch.testing.assert_close(exact[0][:, :, rows], (weights @ inputs[2])[:, :, None].expand(-1, -1, 21, -1))
    for label, judge, result in zip(LABELS, exact, run(KERNEL, grad, inputs, attn_mask=mask), strict=False):
        atol = 2e-4 * judge.abs().max().item()
        torch.testing.assert_close(result, judge, rtol=0, atol=atol, msg=lambda m, n=label: f"{n}: {m}")


@needs_kernels
def test_masks_and_biases_of_more_than_2_to_31_entries() -> None:
    """As strides say, of which few are read."""
    far = torch.empty(2**31 + 1000, dtype=torch.bool)  # memory that is not touched is not taken
    row = 2**30 + 8
    mask = far.as_strided((3, 40), (row, 1))
    values = torch.rand(3, 40) < 0.7
    mask.copy_(values)
    inputs = make(b=1, h=1, queries=3, keys=40)
    for result, expected in zip(
        run(KERNEL, inputs[0], inputs, attn_mask=mask), run(KERNEL, inputs[0], inputs, attn_mask=values), strict=True
    ):
        torch.testing.assert_close(result, expected)


@needs_kernels
def test_nan_is_not_skipped_with_its_tile() -> None:
    # all other scores of the second tile are far below those of the first
    query, key, value = torch.ones(1, 1, 5, 4), torch.full((1, 1, 256, 4), -500.0), torch.randn(1, 1, 256, 4)
    key[:, :, :128] = 500.0
    params = torch.zeros(1, 2), torch.zeros(1, 2)
    assert not multimax_attention(query, key, value, *params, impl=KERNEL).isnan().any()
    key[:, :, 200] = torch.nan
    assert multimax_attention(query, key, value, *params, impl=KERNEL).isnan().all()


@needs_kernels
@pytest.mark.parametrize("case", ["far below", "masked", "causal", "window"])
def test_tiles_that_cannot_matter_are_not_touched(isa: str, case: str) -> None:
    # a NaN among the values of a tile whose weights are 0 shows if the product is computed: 0 * NaN is NaN
    query, key, value = torch.ones(1, 1, 20, 4), torch.zeros(1, 1, 512, 4), torch.randn(1, 1, 512, 4)
    value[:, :, 300:] = torch.nan
    options: dict[str, Any] = {
        "far below": {},
        "masked": {"attn_mask": torch.arange(512) < 200},
        "causal": {"is_causal": True},
        "window": {"window": (None, 0), "attn_mask": torch.arange(512) < 256},
    }[case]
    if case == "far below":
        key[:, :, 256:] = -100.0  # scores of 0 and of -200
    leaves = [t.requires_grad_() for t in (query, key, value, torch.zeros(1, 2), torch.zeros(1, 2))]
    out = multimax_attention(*leaves, impl=KERNEL, **options)
    assert out.isfinite().all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), leaves))


@needs_kernels
def test_skipped_tiles_change_nothing() -> None:
    # the same keys once in an order that lets tiles be skipped, once mixed so that none can
    coefs, knots = multimax.from_paper(t_b=[1.0, 9.0], t_d=[1.0, 1.0], b=[0.0, 0.0], d=[0.0, 0.0])
    query, key, value = (torch.randn(1, 2, 512, 32) for _ in range(3))
    key[:, :, :128] += 2 * query.mean(2, keepdim=True)
    key[:, :, 128:] *= 30
    grad = torch.randn(1, 2, 512, 32)
    mixed = torch.randperm(512)
    one = run(KERNEL, grad, [query, key, value, coefs, knots])
    other = run(KERNEL, grad, [query, key[:, :, mixed], value[:, :, mixed], coefs, knots])
    for i, (a, b) in enumerate(zip(one, other, strict=True)):
        expected = a[:, :, mixed] if i in (2, 3) else a
        torch.testing.assert_close(b, expected, rtol=1e-4, atol=1e-4 * a.abs().max().item())


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_bitwise_equal_repeats(dtype: torch.dtype) -> None:
    queries, keys = (130, 200) if INTERPRETED else (300, 1100)
    inputs = [*make(b=1, h=2, queries=queries, keys=keys, dtype=dtype), torch.randn(1, 1, queries, keys).to(dtype)]
    grad = torch.randn(1, 2, queries, 16).to(dtype)
    results = []
    for threads in (1, 2, 2, 1):
        torch.set_num_threads(threads)
        results.append(run(KERNEL, grad, inputs, dropout_p=0.2, is_causal=True))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


BIASES = {"none": None, "all": (1, 2, 300, 350), "keys": (1, 1, 1, 350), "queries": (2, 1, 300, 1), "one": (1, 1, 1, 1)}


@needs_kernels
@pytest.mark.skipif(INTERPRETED, reason="about threads of the CPU's kernels")
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (100, 20)}], ids=str)
def test_blocks_of_keys_take_turns(bias: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Several threads add to the gradients of the same queries, and sometimes of the same bias."""
    inputs = make(2, 2, 300, 350, 16, 24, 1, dtype=dtype, per_head=True)
    if BIASES[bias] is not None:
        inputs.append(torch.randn(BIASES[bias]))
    options = options | {"enable_gqa": True}
    grad = torch.randn(2, 2, 300, 24).to(dtype)
    results = []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        results.append(run(KERNEL, grad, inputs, **options))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    assert_close_to_reference(inputs, **options)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("gqa", [False, True])
def test_zero_coefs_are_torchs_attention(dtype: torch.dtype, causal: bool, gqa: bool) -> None:
    leaves = [t.requires_grad_() for t in make(queries=100, keys=100, key_heads=H // 2 if gqa else H, dtype=dtype)[:3]]
    coefs, knots = torch.zeros(2, 2), torch.randn(2, 2)
    ours = multimax_attention(*leaves, coefs, knots, is_causal=causal, enable_gqa=gqa, impl=KERNEL)
    theirs = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=gqa)
    grad = torch.randn(ours.shape).to(dtype)
    eps = 20 * torch.finfo(dtype).eps
    torch.testing.assert_close(ours, theirs, rtol=eps, atol=eps)
    for a, b in zip(torch.autograd.grad(ours, leaves, grad), torch.autograd.grad(theirs, leaves, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=eps, atol=2 * eps)


@needs_kernels
def test_layouts(isa: str) -> None:
    expected = None
    query, key, value, *params = make(width=24)
    layouts = {
        "contiguous": lambda t: t,
        "(B, L, H, D)": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        "(L, B, H, D)": lambda t: t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
        "sliced": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
        "packed": lambda t: torch.stack([t, t], 2)[:, :, 0],
        "last dim apart": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    }
    grad = torch.randn(query.shape)
    for layout in layouts.values():
        leaves = [layout(t).detach().requires_grad_() for t in (query, key, value)]
        out = multimax_attention(*leaves, *params, impl=KERNEL)
        results = [out, *torch.autograd.grad(out, leaves, layout(grad))]
        expected = expected or results
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    out = multimax_attention(*(layouts["(B, L, H, D)"](t) for t in (query, key, value)), *params, impl=KERNEL)
    assert out.transpose(1, 2).is_contiguous()  # what a model does next costs no copy


@needs_kernels
def test_expanded_inputs_and_gradients() -> None:
    query, key, value, *params = make(b=3)
    shared = [t[:1].clone().requires_grad_() for t in (key, value)]
    out = multimax_attention(query, *(t.expand(3, H, 65, 16) for t in shared), *params, impl=KERNEL)
    exact = multimax_attention(query, *shared, *params, impl="reference")
    for a, b in zip(torch.autograd.grad(out.sum(), shared), torch.autograd.grad(exact.sum(), shared), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@needs_kernels
@pytest.mark.parametrize("shape", [(9, 16), (3, 9, 16), (2, 3, 9, 16), (2, 5, 3, 9, 16)], ids=str)
def test_any_number_of_leading_dims(shape: tuple[int, ...]) -> None:
    query, key, value = (torch.randn(shape) for _ in range(3))
    params = parameters(heads=3) if len(shape) > 2 else parameters()
    mask = torch.rand(*shape[:-2], 9, 9) < 0.8
    for extra in ({}, {"attn_mask": mask}, {"attn_mask": mask[..., :1, :]}, {"attn_mask": torch.rand(9, 9) < 0.8}):
        out, lse = multimax_attention(query, key, value, *params, **extra, return_lse=True, impl=KERNEL)
        exact = multimax_attention(query, key, value, *params, **extra, return_lse=True, impl="reference")
        assert out.shape == shape
        assert lse.shape == shape[:-1]
        torch.testing.assert_close(out, exact[0])
        torch.testing.assert_close(lse, exact[1])


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_log_sums_and_their_gradient(dtype: torch.dtype) -> None:
    values = make(dtype=dtype, queries=50, keys=70)
    results = []
    for impl, cast in ((KERNEL, dtype), ("reference", torch.float64)):
        leaves = [v.to(cast if i < 3 else v.dtype).requires_grad_() for i, v in enumerate(values)]
        out, lse = multimax_attention(*leaves, return_lse=True, is_causal=True, impl=impl)
        assert lse.dtype == (torch.float32 if impl == KERNEL else torch.float64)
        weights = torch.linspace(-1, 1, lse.numel()).reshape(lse.shape)  # rounded to half precision for out
        weights = weights.bfloat16().float() if dtype != torch.float32 else weights
        both = torch.autograd.grad((out * weights[..., None]).sum() + (lse * weights).sum(), leaves, retain_graph=True)
        alone = torch.autograd.grad((lse * weights).sum(), [leaves[0], leaves[1], leaves[3], leaves[4]])
        results.append([lse, *both, *alone])
    for ours, exact in zip(*results, strict=True):
        # weights are rounded for products, by Triton's kernels and in bfloat16: the parameters' gradients show that
        rounds = INTERPRETED or dtype == torch.bfloat16
        eps = torch.finfo(dtype if ours.ndim == 4 or (ours.ndim == 2 and rounds) else torch.float32).eps
        eps *= 1 if ours.ndim == 2 and rounds and dtype != torch.float32 else 30
        atol = eps * (1 + exact.abs().max().item()) * (10 if ours.ndim == 2 and not rounds else 1)
        torch.testing.assert_close(ours.double(), exact.double(), rtol=eps, atol=atol)


@needs_kernels
@pytest.mark.parametrize("impl", [KERNEL, "reference"])
def test_merged_parts_are_the_whole(impl: str) -> None:
    values = make(keys=100)
    mask = torch.rand(B, 1, 65, 100) < 0.5
    mask[:, :, 3] = False  # a row with nothing in any part
    mask[:, :, 4, :40] = False  # and one with nothing in the first
    results = []
    for parts in ([slice(0, 100)], [slice(0, 40), slice(40, 41), slice(41, 100)]):
        leaves = [v.clone().requires_grad_() for v in values]
        query, key, value, coefs, knots = leaves
        pieces = [
            multimax_attention(
                query, key[:, :, p], value[:, :, p], coefs, knots, attn_mask=mask[..., p], return_lse=True, impl=impl
            )
            for p in parts
        ]
        out, lse = multimax.merge_attention(*zip(*pieces, strict=True))
        results.append([out, lse, *torch.autograd.grad(out.square().sum(), leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * max(1, a[a.isfinite()].abs().max().item()))


# --- dropout


@needs_kernels
def test_dropout_follows_the_seed() -> None:
    inputs = make(b=1)
    torch.manual_seed(3)
    first, second = (multimax_attention(*inputs, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(first, multimax_attention(*inputs, dropout_p=0.5))
    assert not torch.equal(first, second)
    assert torch.equal(multimax_attention(*inputs, dropout_p=0.0), multimax_attention(*inputs))
    assert torch.all(multimax_attention(*inputs, dropout_p=1.0) == 0)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_is_fair(p: float) -> None:
    factor = reference.dropout(torch.tensor([123]), p, torch.arange(4), 300, 300)
    kept = factor != 0
    n = kept.numel()
    assert abs(kept.double().mean().item() - (1 - p)) < 5 * (p * (1 - p) / n) ** 0.5
    torch.testing.assert_close(factor[kept], torch.full_like(factor[kept], 1 / (1 - p)))
    # neighbours along every dim, and the same place under the next seed, are independent
    other = reference.dropout(torch.tensor([124]), p, torch.arange(4), 300, 300) != 0
    pairs = [(kept[1:], kept[:-1]), (kept[:, 1:], kept[:, :-1]), (kept[..., 1:], kept[..., :-1]), (kept, other)]
    for a, b in pairs:
        both = (a & b).double().mean().item()
        assert abs(both - (1 - p) ** 2) < 6 * ((1 - p) ** 2 / a.numel()) ** 0.5


@needs_kernels
def test_dropout_of_the_kernel_is_the_references(isa: str) -> None:
    # the values are the rows of the identity: the output is the weights
    query, key = torch.randn(2, 3, 40, 8), torch.randn(2, 3, 90, 8)
    value = torch.eye(90).expand(2, 3, 90, 90)
    outs = []
    for impl in (KERNEL, "reference"):
        torch.manual_seed(11)
        outs.append(multimax_attention(query, key, value, *parameters(1), dropout_p=0.4, impl=impl) == 0)
    assert torch.equal(*outs)
    assert 0.35 < outs[0].double().mean() < 0.45


# --- packed sequences


@needs_kernels
@pytest.mark.parametrize("lengths", [[5], [0, 3, 70, 1, 0, 129, 48], []], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (9, 0)}, {"dropout_p": 0.3}], ids=str)
def test_packed_sequences(lengths: list[int], dtype: torch.dtype, options: dict[str, Any]) -> None:
    key_lengths = [length + 3 * (i % 2) for i, length in enumerate(lengths)]
    starts = [torch.tensor([0, *itertools.accumulate(sizes)]) for sizes in (lengths, key_lengths)]
    values = [
        torch.randn(sum(lengths), 4, 20).to(dtype),
        torch.randn(sum(key_lengths), 2, 20).to(dtype),
        torch.randn(sum(key_lengths), 2, 24).to(dtype),
        *parameters(heads=4),
    ]
    results = []
    for impl, cast in ((KERNEL, dtype), ("reference", torch.float64)):
        leaves = [v.to(cast if i < 3 else v.dtype).requires_grad_() for i, v in enumerate(values)]
        torch.manual_seed(5)
        out, lse = multimax_attention_varlen(
            *leaves, starts[0].int(), starts[1], enable_gqa=True, return_lse=True, impl=impl, **options
        )
        assert out.shape == (sum(lengths), 4, 24)
        assert lse.shape == (4, sum(lengths))
        results.append([out, *torch.autograd.grad((out * torch.arange(24)).sum(), leaves)])
    for ours, exact in zip(*results, strict=True):
        eps = 40 * torch.finfo(dtype).eps
        scale = 1 + exact.abs().max().item() if exact.numel() else 0.0
        torch.testing.assert_close(ours.double(), exact.double(), rtol=eps, atol=eps * scale)


@needs_kernels
def test_starts_of_packed_sequences_with_any_stride() -> None:
    values = [*(torch.randn(30, 2, 8) for _ in range(3)), *parameters()]
    starts = torch.tensor([[0, 0], [12, 5], [30, 30]])
    expected = multimax_attention_varlen(*values, *(starts[:, i].contiguous() for i in range(2)), impl=KERNEL)
    assert torch.equal(multimax_attention_varlen(*values, starts[:, 0], starts[:, 1], impl=KERNEL), expected)


@needs_kernels
def test_packed_sequences_are_separate() -> None:
    values = [torch.randn(30, 2, 8) for _ in range(3)]
    params = parameters()
    starts = torch.tensor([0, 12, 30])
    out = multimax_attention_varlen(*values, *params, starts, starts)
    for rows in (slice(0, 12), slice(12, 30)):
        single = multimax_attention(*(t[rows].transpose(0, 1) for t in values), *params)
        torch.testing.assert_close(out[rows], single.transpose(0, 1))


# --- bad input

SQUARE = (2, 4, 9, 16)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"key": torch.zeros(2, 4, 9, 8)}, ValueError, "expected key of the query's last size, 16, got (2, 4, 9, 8)"),
        ({"value": torch.zeros(2, 4, 8, 16)}, ValueError, "expected value of the key's length, 9, got (2, 4, 8, 16)"),
        ({"key": torch.zeros(4, 9, 16)}, ValueError, "expected key of as many dims as the query, 4, got 3"),
        ({"key": torch.zeros(2, 2, 9, 16), "value": torch.zeros(2, 2, 9, 16)}, ValueError, "enable_gqa=True shares"),
        ({"value": torch.zeros(2, 2, 9, 16)}, ValueError, "expected value of as many heads as the key, 4, got 2"),
        ({"key": torch.zeros(2, 4, 9, 16).half()}, TypeError, "expected key of the query's dtype, torch.float32"),
        ({"query": torch.zeros(2, 4, 9, 16).int()}, TypeError, "expected query of dtype float32"),
        ({"query": [1.0]}, TypeError, "expected query to be a tensor, got list"),
        ({"coefs": torch.zeros(3, 2, 2), "knots": torch.zeros(3, 2, 2)}, ValueError, "(4, order, 2) for 4 heads"),
        ({"knots": torch.zeros(1, 2)}, ValueError, "expected knots of the shape of coefs, (2, 2), got (1, 2)"),
        ({"attn_mask": torch.zeros(9, 8)}, ValueError, "broadcasts to the scores' shape (2, 4, 9, 9), got (9, 8)"),
        ({"attn_mask": torch.zeros(9, 9).int()}, TypeError, "expected attn_mask to be a boolean or floating-point"),
        ({"score_bias": torch.ones(9, 9).bool()}, TypeError, "expected score_bias to be a floating-point tensor"),
        ({"attn_mask": causal_upper_left(9, 8)}, ValueError, "lengths of query and key, (9, 9), got one for (9, 8)"),
        ({"score_bias": causal_upper_left(9, 9)}, TypeError, "got torch's CausalBias, which has no values"),
        ({"dropout_p": 1.5}, ValueError, "expected dropout_p in [0, 1], got 1.5"),
        ({"dropout_p": "x"}, TypeError, "expected dropout_p to be a number, got str"),
        ({"window": 5}, TypeError, "expected window to be a pair (left, right), got 5; (w - 1, 0) is a causal"),
        ({"window": (-1, 0)}, ValueError, "expected window of ints of at least 0 or None, got (-1, 0)"),
        ({"key": torch.zeros(3, 4, 9, 16)}, ValueError, "with batch dims that broadcast"),
        ({"impl": "gpu"}, ValueError, "expected impl to be one of"),
        ({"query": torch.zeros(2)}, ValueError, "expected query of shape (..., H, L, D), got (2,)"),
        ({"is_causal": "no"}, TypeError, "expected is_causal to be True or False, got 'no'"),
        ({"is_causal": 1}, TypeError, "expected is_causal to be True or False, got 1"),
        ({"enable_gqa": None}, TypeError, "expected enable_gqa to be True or False, got None"),
        ({"return_lse": "yes"}, TypeError, "expected return_lse to be True or False, got 'yes'"),
        ({"scale": "a"}, TypeError, "expected scale to be a number, got str"),
        ({"scale": True}, TypeError, "expected scale to be a number, got bool"),
        ({"scale": [1.0]}, TypeError, "expected scale to be a number, got list"),
    ],
    ids=str,
)
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_bad_input(change: dict[str, Any], error: type[Exception], words: str, impl: str) -> None:
    arguments: dict[str, Any] = {name: torch.zeros(SQUARE) for name in ("query", "key", "value")}
    arguments |= {"coefs": torch.zeros(2, 2), "knots": torch.zeros(2, 2), "impl": impl, **change}
    with pytest.raises(error) as caught:
        multimax_attention(**arguments)
    assert str(caught.value).startswith("multimax: ")
    assert words in str(caught.value)


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_numpys_truth_is_taken_as_torch_takes_it(impl: str) -> None:
    inputs = make()
    plain = multimax_attention(*inputs, is_causal=True, impl=impl)
    assert torch.equal(multimax_attention(*inputs, is_causal=numpy.bool_(True), impl=impl), plain)
    assert torch.equal(
        multimax_attention(*inputs, scale=numpy.float32(0.25), impl=impl),
        multimax_attention(*inputs, scale=0.25, impl=impl),
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"cu_seqlens_q": torch.tensor([0, 3])},
            "cu_seqlens_q to rise from 0 to 9, the number of its rows, got [0, 3]",
        ),
        (
            {"cu_seqlens_k": torch.tensor([1, 9])},
            "cu_seqlens_k to rise from 0 to 9, the number of its rows, got [1, 9]",
        ),
        ({"cu_seqlens_q": torch.tensor([0, 5, 3, 9])}, "expected cu_seqlens_k of the shape of cu_seqlens_q"),
        ({"cu_seqlens_k": torch.tensor([0.0, 9.0])}, "expected cu_seqlens_k to be a tensor of int32 or int64"),
        ({"query": torch.zeros(2, 9, 4, 16)}, "expected query of shape (all rows, heads, size)"),
    ],
    ids=str,
)
@pytest.mark.parametrize("impl", ["auto", "reference"])
@needs_kernels
def test_bad_packed_input(change: dict[str, Any], words: str, impl: str) -> None:
    arguments: dict[str, Any] = {name: torch.zeros(9, 4, 16) for name in ("query", "key", "value")}
    arguments |= {"coefs": torch.zeros(2, 2), "knots": torch.zeros(2, 2)}
    arguments |= {"cu_seqlens_q": torch.tensor([0, 9]), "cu_seqlens_k": torch.tensor([0, 9])}
    with pytest.raises((ValueError, TypeError), match="multimax: ") as caught:
        multimax_attention_varlen(**{**arguments, **change}, impl=impl)
    assert words in str(caught.value)


@needs_kernels
def test_what_the_kernels_cannot_do() -> None:
    inputs = make()
    with pytest.raises(RuntimeError, match=f"impl='{KERNEL}' cannot run: the attention kernels have no float64"):
        multimax_attention(*(t.double() for t in inputs), impl=KERNEL)
    mask = torch.zeros(65, 65, requires_grad=True)
    with pytest.raises(RuntimeError, match="the attention kernels give no gradient to attn_mask"):
        multimax_attention(*inputs, attn_mask=mask, impl=KERNEL)
    multimax_attention(*inputs, attn_mask=mask).sum().backward()  # "auto" takes the reference
    assert mask.grad is not None


# --- as torch sees it


def small(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    shapes = [(1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 3), (2, 2), (2, 2), (1, 2, 3, 5)]
    return tuple(torch.randn(shape).to(dtype).requires_grad_() for shape in shapes)


def scored(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    *first, bias = tensors
    return multimax_attention(*first, score_bias=bias, return_lse=True, **options)


def test_gradcheck_of_the_reference() -> None:
    assert torch.autograd.gradcheck(lambda *t: scored(*t, is_causal=True), small())
    assert torch.autograd.gradgradcheck(scored, small())


@needs_kernels
@pytest.mark.parametrize("bias", [False, True])
def test_double_backward_equals_the_references(bias: bool) -> None:
    values = small(torch.float32)
    seconds = []
    for impl, cast in ((KERNEL, torch.float32), ("reference", torch.float64)):
        leaves = [v.detach().to(cast).requires_grad_() for v in values][: 6 if bias else 5]
        options = {"score_bias": leaves[5]} if bias else {}
        torch.manual_seed(1)
        out, lse = multimax_attention(*leaves[:5], dropout_p=0.2, return_lse=True, impl=impl, **options)
        grads = torch.autograd.grad(out.square().sum() + lse.sum(), leaves, create_graph=True)
        seconds.append(torch.autograd.grad(sum(g.square().sum() for g in grads), leaves))
    for ours, exact in zip(*seconds, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-3, atol=1e-4 * exact.abs().max().item())


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    query, key, value, coefs, knots = make(b=2, h=4, queries=9, keys=11, key_heads=2, dtype=dtype)
    inside = query.transpose(1, 2).contiguous().transpose(1, 2)
    seed, bias = torch.tensor([4]), torch.randn(1, 4, 9, 11).to(dtype)
    for queries, mask in ((query, torch.rand(2, 1, 9, 11) < 0.8), (inside, None)):
        arguments = (queries, key, value, coefs, knots, mask, bias, None, None, seed, 0.3, 0.25, True, -1, -1)
        for training in (True, False):
            torch.library.opcheck(torch.ops.multimax.attention_forward.default, (*arguments, training))
        out, stats, rest = torch.ops.multimax.attention_forward(*arguments, True)
        grad, lse = torch.randn(out.shape).to(dtype), torch.randn(out.shape[:3])
        for wanted in ((True, True), (False, False)):
            backward = (grad, lse, *arguments[:10], out, stats, rest, *arguments[10:], *wanted)
            torch.library.opcheck(torch.ops.multimax.attention_backward.default, backward)


@needs_kernels
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compile(dynamic: bool, dtype: torch.dtype) -> None:
    torch._dynamo.reset()

    def loss(query: Tensor, key: Tensor, value: Tensor, coefs: Tensor, knots: Tensor) -> Tensor:
        out = multimax_attention(query * 2, key, value, coefs, knots, is_causal=True)
        return out.float().square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic)
    for length in (9, 20) if dynamic else (9,):
        results = []
        for function in (loss, compiled):
            leaves = [t.requires_grad_() for t in make(queries=length, keys=length, dtype=dtype)]
            torch.manual_seed(0)
            with torch.no_grad():
                for leaf in leaves:
                    leaf.copy_(torch.randn(leaf.shape))
            value = function(*leaves)
            results.append([value, *torch.autograd.grad(value, leaves)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)


@needs_kernels
def test_compiled_dropout_follows_the_seed() -> None:
    torch._dynamo.reset()
    inputs = make(b=1, queries=20, keys=20)
    compiled = torch.compile(lambda *t: multimax_attention(*t, dropout_p=0.5), fullgraph=True)
    torch.manual_seed(3)
    first, second = compiled(*inputs), compiled(*inputs)
    torch.manual_seed(3)
    assert torch.equal(first, compiled(*inputs))
    assert not torch.equal(first, second)


@needs_kernels
def test_export() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.multimax = multimax.MultiMax()

        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return multimax_attention(query, key, value, *self.multimax.parameters_in_use(), is_causal=True)

    inputs = tuple(make()[:3])
    model = Model()
    exported = torch.export.export(model, inputs)
    torch.testing.assert_close(exported.module()(*inputs), model(*inputs))


@needs_kernels
def test_compile_with_one_tensor_in_several_places() -> None:
    x, coefs, target = torch.randn(1, 3, 5, 8), torch.full((2, 2), 0.1), torch.tensor([1, 0, 7])
    functions = [
        lambda x, coefs: multimax_attention(x, x, x, coefs, coefs, impl=KERNEL),
        lambda x, coefs: multimax.multimax(x, coefs, coefs, impl=KERNEL),
        lambda x, coefs: multimax.multimax_cross_entropy(x[0, :, 0], target, coefs, coefs, impl=KERNEL),
        lambda x, coefs: multimax.linear_multimax_cross_entropy(
            x[0, :, 0], x[0].flatten(0, 1), target, coefs, coefs, impl=KERNEL
        ),
    ]
    for function in functions:
        leaves = [t.clone().requires_grad_() for t in (x, coefs)]
        torch._dynamo.reset()
        results = []
        for run_it in (torch.compile(function, fullgraph=True), function):
            out = run_it(*leaves)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        for result, other in zip(*results, strict=True):
            torch.testing.assert_close(result, other)


@needs_kernels
def test_func_grad_and_vmap() -> None:
    query, key, value, coefs, knots = make(b=1, queries=20, keys=20)

    def loss(query: Tensor, coefs: Tensor, impl: str = KERNEL) -> Tensor:
        return multimax_attention(query, key, value, coefs, knots, impl=impl).square().sum()

    found = torch.func.grad(loss, argnums=(0, 1))(query, coefs)
    exact = torch.func.grad(loss, argnums=(0, 1))(query, coefs, "reference")
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    queries, sets = torch.randn(3, *query.shape), torch.randn(3, 2, 2) * 0.1
    for dims in ((0, None), (None, 0), (0, 0)):
        arguments = (queries if dims[0] == 0 else query, sets if dims[1] == 0 else coefs)
        mapped = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=dims)(*arguments)
        for i in range(3):
            single = torch.func.grad(loss, argnums=(0, 1))(
                queries[i] if dims[0] == 0 else query, sets[i] if dims[1] == 0 else coefs
            )
            for a, b in zip(mapped, single, strict=True):
                torch.testing.assert_close(a[i], b)


@needs_kernels
def test_autocast_is_that_of_torchs_attention() -> None:
    inputs = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = multimax_attention(*inputs)
        theirs = F.scaled_dot_product_attention(*inputs[:3])
        mixed = multimax_attention(inputs[0].bfloat16(), *inputs[1:])
    assert ours.dtype == theirs.dtype == mixed.dtype == torch.bfloat16


@needs_kernels
def test_activation_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    results = []
    for again in (False, True):
        torch.manual_seed(0)
        leaves = [t.requires_grad_() for t in make()]
        call = lambda *t: multimax_attention(*t, dropout_p=0.3)  # noqa: E731
        out = checkpoint(call, *leaves, use_reentrant=False) if again else call(*leaves)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@needs_kernels
@pytest.mark.parametrize("needed", list(itertools.product([False, True], repeat=5))[1:], ids=str)
def test_gradients_only_where_they_are_wanted(needed: tuple[bool, ...]) -> None:
    values = make(b=1, h=2, queries=20, keys=20)
    everything = run(KERNEL, torch.ones(1, 2, 20, 16), values)[1:]
    leaves = [v.clone().requires_grad_(need) for v, need in zip(values, needed, strict=True)]
    multimax_attention(*leaves).sum().backward()
    for leaf, need, grad in zip(leaves, needed, everything, strict=True):
        assert (leaf.grad is not None) == need
        assert not need or torch.equal(leaf.grad, grad)
