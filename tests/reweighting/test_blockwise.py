"""Attention with any function, in blocks: against the matrix written out, in its memory, and as a module."""

import copy
import itertools
import math
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.profiler import ProfilerActivity, profile

import multimax
from multimax import reweighting
from multimax.reweighting import blockwise, recomputing


@pytest.fixture(autouse=True)
def one_thread(same_start: None) -> None:
    """Many small operations: where threads matter, tests set their own number."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is said, a few queries of one head at a time."""
    monkeypatch.setattr(recomputing, "IN_CACHES", 30)


INF, NAN = math.inf, math.nan
Options = dict[str, Any]
COEFS, KNOTS = torch.tensor([[0.3, -0.4], [-0.05, 0.02]]), torch.tensor([[-0.2, 0.4], [0.1, -0.3]])

# the function as it is given, and as it is called on a matrix of scores, (scores, numbers of the mask, what takes part)
CASES: dict[str, Any] = {
    "softmax": "softmax",
    "softmax, warm": reweighting.get("softmax", temperature=1.7),
    "multimax": reweighting.get("multimax", coefs=COEFS.double(), knots=KNOTS.double()),
    "sparsemax": "sparsemax",
    "entmax15": "entmax15",
    "entmax": reweighting.get("entmax", alpha=1.3),
    "evsoftmax": "evsoftmax",
    "sparsehourglass": "sparsehourglass",
    "topk": reweighting.get("topk", k=3),
    "attnscale": reweighting.get("attnscale", omega=0.6),
}
every = pytest.mark.parametrize("case", CASES)


def test_every_function_has_a_case() -> None:
    assert {case.split(",")[0] for case in CASES} == set(reweighting.names())


def weights_of(function: Any, scores: Tensor, added: Tensor | None, part: Tensor) -> Tensor:
    """The rule for masks of numbers: after sigma, after the temperature, and otherwise part of the score."""
    function = reweighting.get(function) if isinstance(function, str) else function
    if added is None:
        return function(scores, mask=part, impl="reference")
    name = getattr(function, "name", None)
    if name == "multimax":
        scores = multimax.modulate(scores, function.options["coefs"], function.options["knots"])
        return reweighting.softmax(scores + added, mask=part, impl="reference")
    if name == "softmax":
        return reweighting.softmax(
            scores / function.options.get("temperature", 1.0) + added, mask=part, impl="reference"
        )
    return function(scores + added, mask=part, impl="reference")


def explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    function: Any,
    *,
    attn_mask: Tensor | None = None,
    score_bias: Tensor | None = None,
    is_causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    attn_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The whole matrix, entry by entry where it matters."""
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = (query @ key.transpose(-1, -2)) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if score_bias is not None:
        scores = scores + score_bias
    queries, keys = scores.shape[-2:]
    part = torch.ones(queries, keys, dtype=torch.bool)
    for i, j in itertools.product(range(queries), range(keys)):
        if is_causal and j > i:
            part[i, j] = False
        if window is not None:
            place = j - (i + keys - queries)
            if window[0] is not None and place < -window[0]:
                part[i, j] = False
            if window[1] is not None and place > window[1]:
                part[i, j] = False
    part = part.expand(scores.shape)
    added = None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        part = part & attn_mask
    elif attn_mask is not None:
        there = attn_mask > torch.finfo(attn_mask.dtype).min / 2
        part, added = part & there, torch.where(there, attn_mask, 0.0)
    part = part & (scores > torch.finfo(scores.dtype).min / 2)
    weights = weights_of(function, scores, added, part)
    if attn_scale is not None:
        count = part.sum(-1, keepdim=True).clamp(min=1)
        mean = weights.sum(-1, keepdim=True) / count
        omega = attn_scale.reshape(-1, 1, 1) if attn_scale.ndim else attn_scale
        weights = torch.where(part, mean + (1 + omega) * (weights - mean), 0.0)
    return weights @ value, weights


def tensors(lead: tuple[int, ...] = (2, 3), lq: int = 7, lk: int = 9, d: int = 4, dv: int = 5) -> list[Tensor]:
    shapes = ((*lead, lq, d), (*lead, lk, d), (*lead, lk, dv))
    return [1.5 * torch.randn(shape, dtype=torch.float64) for shape in shapes]


def compare(function: Any, values: list[Tensor], blocks: tuple[int | None, ...] = (1, 5, None), **options: Any) -> None:
    """Output, weights, and every gradient, for each size of a block."""
    names = [n for n, t in options.items() if isinstance(t, Tensor) and t.is_floating_point()]

    def call(one: Callable[..., Any], **more: Any) -> tuple[Tensor, list[Tensor]]:
        leaves = [t.detach().clone().requires_grad_() for t in values]
        given = {n: options[n].detach().clone().requires_grad_() for n in names}
        out = one(*leaves, **{**options, **given}, **more)
        out = out[0] if isinstance(out, tuple) else out
        upstream = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
        return out.detach(), list(torch.autograd.grad(out, [*leaves, *given.values()], upstream))

    judge, grads = call(lambda *a, **o: explicit(*a, function, **o))
    for block in blocks:
        ours, our_grads = call(reweighting.attention, reweight=function, block=block)
        torch.testing.assert_close(ours, judge, rtol=1e-9, atol=1e-11)
        for label, a, b in zip(["query", "key", "value", *names], our_grads, grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10, msg=lambda m, label=label: f"{label}: {m}")
    out, weights = reweighting.attention(*values, reweight=function, return_weights=True, block=3, **options)
    expected = explicit(*values, function, **options)
    torch.testing.assert_close(out, expected[0], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(weights, expected[1], rtol=1e-9, atol=1e-11)
    out, weights = call(lambda *a, **o: reweighting.attention(*a, reweight=function, return_weights=True, **o))
    torch.testing.assert_close(out, judge, rtol=1e-9, atol=1e-11)
    for a, b in zip(weights, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def boolean(shape: tuple[int, ...] = (2, 3, 7, 9)) -> Tensor:
    mask = torch.rand(shape) < 0.6
    mask[..., 2, :] = False  # a query for which nothing is left
    return mask


def numbers(shape: tuple[int, ...] = (2, 3, 7, 9)) -> Tensor:
    mask = torch.randn(shape, dtype=torch.float64)
    mask[torch.rand(shape) < 0.3] = -INF
    mask[torch.rand(shape) < 0.1] = torch.finfo(torch.float64).min
    mask[..., 2, :] = -INF
    return mask


SETTINGS: dict[str, Callable[[], Options]] = {
    "plain": lambda: {},
    "scale": lambda: {"scale": 0.3},
    "boolean mask": lambda: {"attn_mask": boolean()},
    "boolean mask for keys": lambda: {"attn_mask": torch.rand(2, 1, 1, 9) < 0.6},
    "numbers": lambda: {"attn_mask": numbers()},
    "numbers for all": lambda: {"attn_mask": numbers((7, 9))},
    "causal": lambda: {"is_causal": True},
    "causal and boolean mask": lambda: {"is_causal": True, "attn_mask": boolean()},
    "causal and numbers": lambda: {"is_causal": True, "attn_mask": numbers()},
    "window": lambda: {"window": (2, 1)},
    "window to the left": lambda: {"window": (1, 0)},
    "no bound to the left": lambda: {"window": (None, 0)},
    "no bound to the right": lambda: {"window": (0, None)},
    "window, causal, mask": lambda: {"window": (4, 2), "is_causal": True, "attn_mask": boolean((3, 7, 9))},
    "bias": lambda: {"score_bias": torch.randn(2, 3, 7, 9, dtype=torch.float64)},
    "bias for heads": lambda: {"score_bias": torch.randn(3, 1, 9, dtype=torch.float64)},
    "bias that masks": lambda: {"score_bias": numbers((3, 7, 9))},
    "bias and numbers": lambda: {
        "score_bias": torch.randn(7, 9, dtype=torch.float64),
        "attn_mask": numbers((2, 1, 7, 9)),
    },
    "attn_scale": lambda: {"attn_scale": torch.tensor([0.5, -0.3, 1.0], dtype=torch.float64)},
    "attn_scale of one, causal": lambda: {"attn_scale": torch.tensor(0.5, dtype=torch.float64), "is_causal": True},
    "attn_scale, boolean mask": lambda: {
        "attn_scale": torch.tensor([0.5, -0.3, 1.0], dtype=torch.float64),
        "attn_mask": boolean(),
    },
    "attn_scale, numbers": lambda: {
        "attn_scale": torch.tensor([0.5, -0.3, 1.0], dtype=torch.float64),
        "attn_mask": numbers(),
        "score_bias": numbers((3, 7, 9)),
        "window": (3, 3),
    },
}


@every
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_matrix_written_out(case: str, setting: str) -> None:
    compare(CASES[case], tensors(), **SETTINGS[setting]())


@every
def test_more_queries_than_keys(case: str) -> None:
    values = tensors(lq=9, lk=5)
    for options in ({}, {"is_causal": True}, {"window": (1, 1)}, {"window": (None, 0)}, {"window": (0, None)}):
        compare(CASES[case], values, **options)


@every
def test_torchs_causal_bias(case: str) -> None:
    values = tensors()
    for bias, option in (
        (causal_upper_left(7, 9), {"is_causal": True}),
        (causal_lower_right(7, 9), {"window": (None, 0)}),
    ):
        for block in (None, 3):
            expected = reweighting.attention(*values, reweight=CASES[case], block=block, **option)
            assert torch.equal(
                reweighting.attention(*values, reweight=CASES[case], block=block, attn_mask=bias), expected
            )


@every
def test_grouped_queries(case: str) -> None:
    query = torch.randn(2, 6, 7, 4, dtype=torch.float64)
    for heads in (1, 2, 3, 6):
        key, value = torch.randn(2, heads, 9, 4).double(), torch.randn(2, heads, 9, 5).double()
        compare(
            CASES[case], [query, key, value], (3,), enable_gqa=True, is_causal=True, attn_mask=boolean((2, 6, 7, 9))
        )


@every
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3), (2, 1, 2, 3)])
def test_dims(case: str, lead: tuple[int, ...]) -> None:
    values = tensors(lead)
    compare(CASES[case], values, (3,), attn_mask=boolean((*lead, 7, 9)))
    compare(CASES[case], values, (4,), score_bias=torch.randn(7, 9, dtype=torch.float64))
    # a batch that broadcasts
    if len(lead) > 1:
        query, key, value = values
        compare(CASES[case], [query, key[:1], value[:1]], (3,), is_causal=True)


@every
def test_layouts(case: str) -> None:
    query, key, value = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors())
    compare(CASES[case], [query, key, value], (4,))
    ours = reweighting.attention(query[..., ::2], key[..., ::2], value[..., ::2], reweight=CASES[case], block=2)
    judge = explicit(query[..., ::2], key[..., ::2], value[..., ::2], CASES[case])[0]
    torch.testing.assert_close(ours, judge, rtol=1e-9, atol=1e-11)


LEARNED: dict[str, Callable[[Tensor], Any]] = {
    "alpha": lambda t: reweighting.get("entmax", alpha=1 + t),
    "alphas": lambda t: reweighting.get(
        "entmax", alpha=1.2 + t * torch.tensor([0.5, 1.0, 1.5]).double()[:, None, None]
    ),
    "temperature": lambda t: reweighting.get("softmax", temperature=t),
    "temperatures": lambda t: reweighting.get(
        "softmax", temperature=t * torch.tensor([0.5, 1.0, 1.5]).double()[:, None, None]
    ),
    "coefs": lambda t: reweighting.get("multimax", coefs=t * COEFS.double(), knots=t * KNOTS.double()),
    "coefs of heads": lambda t: reweighting.get(
        "multimax",
        coefs=t * COEFS.double().expand(3, 2, 2) * torch.arange(1.0, 4)[:, None, None],
        knots=KNOTS.double().expand(3, 2, 2),
    ),
    "omega": lambda t: reweighting.get("attnscale", omega=t),
    "omegas": lambda t: reweighting.get("attnscale", omega=t * torch.tensor([0.5, -1.0, 1.5]).double()),
}


@pytest.mark.parametrize("case", LEARNED)
@pytest.mark.parametrize("numbered", [False, True])
def test_what_is_learned_gets_its_gradient(case: str, numbered: bool) -> None:
    values = tensors()
    options: Options = {"attn_mask": numbers() if numbered else boolean(), "is_causal": True}
    grads = []
    for block in (None, 1, 3, "matrix", "explicit"):
        t = torch.tensor(0.6, dtype=torch.float64, requires_grad=True)
        function = LEARNED[case](t)
        if block == "explicit":
            if case == "coefs of heads" and numbered:
                function = reweighting.get(
                    "multimax", coefs=function.options["coefs"][:, None], knots=function.options["knots"][:, None]
                )
            out = explicit(*values, function, **options)[0]
        elif block == "matrix":
            out = reweighting.attention(*values, reweight=function, return_weights=True, **options)[0]
        else:
            out = reweighting.attention(*values, reweight=function, block=block, **options)
        out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape))
        grads.append(t.grad.item())
    assert grads[:-1] == pytest.approx([grads[-1]] * 4, rel=1e-9)
    assert abs(grads[-1]) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("setting", [setting for setting in SETTINGS if "attn_scale" not in setting])
def test_attnscale_is_softmax_with_attn_scale(setting: str, heads: bool, dtype: torch.dtype) -> None:
    options = {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in SETTINGS[setting]().items()
    }
    values = [t.to(dtype) for t in tensors()]
    omega = torch.tensor([0.5, -0.3, 2.0] if heads else 0.5)
    layer = reweighting.AttnScaledSoftmax(heads=3 if heads else None)
    layer.omega.data.copy_(omega)
    for block in (2, None):
        results = []
        for kind in ("option", "name", "module"):
            leaves = [t.clone().requires_grad_() for t in values]
            trained = layer.omega if kind == "module" else omega.clone().requires_grad_()
            given: Options = {"reweight": layer if kind == "module" else reweighting.get("attnscale", omega=trained)}
            if kind == "option":
                given = {"attn_scale": trained}
            out = reweighting.attention(*leaves, **given, **options, block=block)
            weights = reweighting.attention(*leaves, **given, **options, return_weights=True)[1]
            results.append([out, weights, *torch.autograd.grad(out.square().sum(), [*leaves, trained])])
        assert (results[0][1] < 0).any()
        for judge, *others in zip(*results, strict=True):
            for other in others:
                torch.testing.assert_close(other, judge, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)


def test_numbers_in_a_mask_have_a_gradient() -> None:
    for case in CASES:
        values, mask = tensors(), torch.randn(3, 7, 9, dtype=torch.float64)
        compare(CASES[case], values, (2, None), attn_mask=mask)


@every
@pytest.mark.parametrize("shape", ["no batch", "no queries", "no keys", "no entries", "no values", "no heads"])
def test_empty(case: str, shape: str) -> None:
    query, key, value = tensors()
    query, key, value = {
        "no batch": (query[:0], key[:0], value[:0]),
        "no queries": (query[:, :, :0], key, value),
        "no keys": (query, key[:, :, :0], value[:, :, :0]),
        "no entries": (query[..., :0], key[..., :0], value),
        "no values": (query, key, value[..., :0]),
        "no heads": (query[:, :0], key[:, :0], value[:, :0]),
    }[shape]
    leaves = [t.clone().requires_grad_() for t in (query, key, value)]
    for options in ({}, {"block": 2}, {"is_causal": True, "block": 2}, {"return_weights": True}):
        out = reweighting.attention(*leaves, reweight=CASES[case], **options)
        out, weights = out if isinstance(out, tuple) else (out, None)
        assert out.shape == (*query.shape[:-1], value.shape[-1])
        assert weights is None or weights.shape == (*query.shape[:-1], key.shape[-2])
        if shape == "no keys":
            assert (out == 0).all()
        for grad in torch.autograd.grad(out.sum(), leaves, allow_unused=True):
            assert grad is None or grad.isfinite().all()


@every
def test_queries_that_see_no_key(case: str) -> None:
    # whole blocks of them: the first queries of a decode step with fewer keys
    query, key, value = tensors(lq=12, lk=4)
    compare(CASES[case], [query, key, value], (1, 2, 3, 5, None), window=(None, 0))
    compare(CASES[case], [query, key, value], (1, 2, 3, 5, None), window=(0, 0))
    compare(CASES[case], [key, query, torch.randn(2, 3, 12, 5).double()], (1, 2, None), window=(0, 0), is_causal=True)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_precision(case: str, dtype: torch.dtype) -> None:
    """Errors at most 2 times (forward) and 3 times (backward) those of the matrix, computed in float32 and rounded."""
    name = CASES[case]
    values = [t.to(dtype) for t in tensors((2, 3), 33, 65, 16, 16)]
    results = []
    for kind in ("judge", "eager", "ours"):
        leaves = [
            t.to(dtype if kind == "ours" else torch.float64 if kind == "judge" else torch.float32) for t in values
        ]
        leaves = [t.clone().requires_grad_() for t in leaves]
        if kind == "ours":
            out = reweighting.attention(*leaves, reweight=name, is_causal=True, block=7)
        else:
            out = explicit(*leaves, name, is_causal=True)[0]
        assert kind != "ours" or out.dtype == dtype
        upstream = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(dtype).to(out.dtype)
        grads = torch.autograd.grad(out, leaves, upstream)
        results.append(
            [t.detach().to(dtype).double() if kind == "eager" else t.detach().double() for t in (out, *grads)]
        )
    for factor, judge, eager, ours in zip((2, 3, 3, 3), *results, strict=True):
        error, allowed, size = ((t).norm() for t in (ours - judge, eager - judge, judge))
        assert error <= max(factor * allowed, 0.5 * size * torch.finfo(dtype).eps)


def test_autocast_is_that_of_torchs() -> None:
    query, key, value = (t.float() for t in tensors())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = F.scaled_dot_product_attention(query, key, value)
        for case in CASES:
            if case == "multimax":
                continue
            out, weights = reweighting.attention(query, key, value, reweight=CASES[case], return_weights=True)
            assert out.dtype == weights.dtype == theirs.dtype == torch.bfloat16
            plain = reweighting.attention(query, key, value, reweight=CASES[case], block=2)
            torch.testing.assert_close(plain, out, rtol=0.02, atol=0.02)


# ---- the fused kernels


@pytest.mark.parametrize("case", ["softmax", "softmax, warm", "multimax", "module", "softmax module"])
def test_multimax_and_softmax_go_to_the_fused_kernels(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def spy(*args: Any, **options: Any) -> Tensor:
        calls.append(args)
        return multimax.multimax_attention(*args, **options)

    monkeypatch.setattr(blockwise, "multimax_attention", spy)
    layer = multimax.MultiMax(heads=3)
    nn.init.normal_(layer.coefs, std=0.3)
    function = {
        "module": layer,
        "softmax module": reweighting.Softmax(0.5, learn=True, heads=3),
        "multimax": reweighting.get("multimax", coefs=COEFS, knots=KNOTS),
    }.get(case) or CASES[case]
    values = [t.float() for t in tensors()]
    for options in ({}, {"is_causal": True}, {"attn_mask": boolean()}, {"attn_mask": numbers((7, 9)).float()}):
        out = reweighting.attention(*values, reweight=function, **options)
        judge, _ = reweighting.attention(*values, reweight=function, return_weights=True, **options)
        torch.testing.assert_close(out, judge, rtol=1e-4, atol=1e-5)
        if case == "softmax" and "attn_mask" not in options:
            torch.testing.assert_close(out, F.scaled_dot_product_attention(*values, **options), rtol=1e-4, atol=1e-5)
        if case == "multimax":
            assert torch.equal(out, multimax.multimax_attention(*values, COEFS, KNOTS, **options))
    assert len(calls) == 4
    # but not where they cannot
    reweighting.attention(*values, reweight=function, attn_scale=torch.zeros(3))
    assert len(calls) == 4
    reweighting.attention(*values, reweight="entmax15")
    assert len(calls) == 4


def test_softmax_with_torchs_numbers() -> None:
    values = tensors()
    mask = torch.rand(2, 3, 7, 9) < 0.7
    mask[..., 0] = True
    for options in (
        {},
        {"is_causal": True},
        {"attn_mask": mask},
        {"attn_mask": torch.randn(7, 9).double()},
        {"scale": 0.2},
    ):
        theirs = F.scaled_dot_product_attention(*values, **options)
        for more in ({}, {"attn_scale": torch.zeros(3).double()}, {"return_weights": True}):
            out = reweighting.attention(*values, **options, **more)
            torch.testing.assert_close(out[0] if "return_weights" in more else out, theirs)


def test_temperatures_of_any_shape_or_an_error() -> None:
    """What one path takes, the other takes: fused or as a matrix."""
    values = tensors()
    for shape in ((), (1,), (3, 1, 1), (1, 3, 1, 1), (2, 1, 1, 1), (2, 3, 7, 1)):
        function = reweighting.get("softmax", temperature=0.5 + torch.rand(shape, dtype=torch.float64))
        whole, _ = reweighting.attention(*values, reweight=function, return_weights=True)
        torch.testing.assert_close(reweighting.attention(*values, reweight=function), whole)
    for shape in ((), (3, 1, 1), (2, 1, 1, 1), (2, 3, 7, 1)):
        function = reweighting.get("entmax", alpha=1.2 + torch.rand(shape, dtype=torch.float64))
        whole, _ = reweighting.attention(*values, reweight=function, return_weights=True)
        for block in (None, 2):
            torch.testing.assert_close(reweighting.attention(*values, reweight=function, block=block), whole)


# ---- memory


@pytest.mark.parametrize("name", ["sparsemax", "entmax15", "evsoftmax", "topk"])
@pytest.mark.parametrize("causal", [False, True])
def test_no_more_than_a_block_is_held(name: str, causal: bool) -> None:
    length, block = 256, 16
    function = reweighting.get(name, **({"k": 8} if name == "topk" else {}))
    seen: list[int] = []

    def recorded(x: Tensor, *, dim: int, mask: Tensor | None) -> Tensor:
        seen.append(x.numel())
        return function(x, dim=dim, mask=mask)

    leaves = [torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3)]
    matrix = 2 * length * length * 4
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = reweighting.attention(*leaves, reweight=recorded, block=block, is_causal=causal)
    assert len(seen) == length // block
    assert max(seen) == 2 * block * length
    if causal:  # what no query of a block sees is not computed
        assert seen == [2 * block * (i + 1) * block for i in range(length // block)]
    # the inputs, the output and little else: nothing of the size of the scores, alone or together
    assert sum(kept.values()) < matrix / 4
    out.sum().backward()
    assert len(seen) == 2 * length // block  # once more, each
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        reweighting.attention(*leaves, reweight=recorded, block=length, is_causal=causal)
    assert sum(kept.values()) > matrix  # in one block there is nothing to gain, and it is kept
    with torch.no_grad():
        seen.clear()
        reweighting.attention(*leaves, reweight=recorded, block=block)
        assert len(seen) == length // block


def test_the_default_block_has_a_bound() -> None:
    seen = []

    def recorded(x: Tensor, *, dim: int, mask: Tensor | None) -> Tensor:
        seen.append(tuple(x.shape))
        return torch.softmax(x, dim)

    values = [torch.randn(1, 2, 3000, 4) for _ in range(3)]
    reweighting.attention(*values, reweight=recorded)
    assert len(seen) > 1
    assert sum(shape[2] for shape in seen) == 3000
    assert max(math.prod(shape) for shape in seen) <= 2**23 + 2**16  # see blockwise


BOUNDED: dict[str, Callable[[int], Options]] = {
    "plain": lambda length: {},
    "causal": lambda length: {"is_causal": True},
    "padding": lambda length: {"attn_mask": torch.rand(1, 1, 1, length) < 0.8},
    "numbers": lambda length: {"attn_mask": torch.randn(4, 1, length)},
    "bias": lambda length: {"score_bias": torch.randn(4, 1, length, requires_grad=True)},
    "dropout": lambda length: {"dropout_p": 0.2},
    "window, softcap": lambda length: {"window": (None, 0), "softcap": 5.0},
    "attn_scale": lambda length: {"attn_scale": torch.tensor(0.3, requires_grad=True)},
}


def peak(length: int, dtype: torch.dtype, function: Any, setting: str) -> int:
    """Bytes alive at once, at most, in forward and backward."""
    leaves = [torch.randn(1, heads, length, 8, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]
    options = BOUNDED[setting](length)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        reweighting.attention(*leaves, reweight=function, enable_gqa=True, **options).sum().backward()
    events = profiler.profiler.kineto_results.events()
    found = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    return max(itertools.accumulate(size for _, size in sorted(found)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("setting", BOUNDED)
def test_memory_grows_with_the_length_not_its_square(
    setting: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = 2**14
    monkeypatch.setattr(recomputing, "IN_CACHES", block)
    for function in ("entmax15", reweighting.get("topk", k=5), reweighting.get("entmax", alpha=torch.tensor(1.3))):
        for length in (256, 1024):
            tensors = 4 * length * 8 * 4  # bytes of the query in float32
            matrix = 4 * length * length * 4
            # a few tensors of the query's size, and some that hold a block's scores
            bound = 14 * tensors + 9 * 4 * block
            assert peak(length, dtype, function, setting) < bound
        assert bound < matrix / 4


HUNGRY = """
import resource, torch
from multimax import reweighting

def run(length):
    leaves = [torch.randn(1, 8, length, 64, requires_grad=True) for _ in range(3)]
    for name in ("entmax15", "topk"):
        function = reweighting.get(name, **({"k": 16} if name == "topk" else {}))
        reweighting.attention(*leaves, reweight=function, is_causal=name == "topk").sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

torch.set_num_threads(1)
before = run(64)
print((run(2048) - before) // 1024)
"""


def test_memory_that_the_system_counts() -> None:
    """Less than the matrix would take, 128 MiB, leaves and their gradients included: what is freed is used again."""
    result = subprocess.run([sys.executable, "-c", HUNGRY], capture_output=True, text=True, check=True)
    assert int(result.stdout) < 128


# ---- dropout


@pytest.mark.parametrize("block", [1, 3, None])
@pytest.mark.parametrize("case", ["sparsemax", "entmax15", "evsoftmax", "topk"])
def test_dropout_is_the_same_in_the_backward(case: str, block: int | None) -> None:
    leaves = [t.requires_grad_() for t in tensors((1, 2), 4, 5, 3, 2)]

    def function(*args: Tensor) -> Tensor:
        torch.manual_seed(5)
        return reweighting.attention(*args, reweight=CASES[case], dropout_p=0.4, block=block)

    assert torch.autograd.gradcheck(function, leaves)


def test_dropout_drops_its_share() -> None:
    query, key = torch.randn(2, 4, 64, 8), torch.randn(2, 4, 64, 8)
    value = torch.randn(2, 4, 64, 8)
    function = reweighting.get("topk", k=0.5)
    plain, weights = reweighting.attention(query, key, value, reweight=function, return_weights=True)
    out, dropped = reweighting.attention(query, key, value, reweight=function, return_weights=True, dropout_p=0.25)
    share = (dropped[weights > 0] == 0).double().mean().item()
    assert share == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / (weights > 0).sum().item()))
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], weights[kept] / 0.75)
    torch.testing.assert_close(out, dropped @ value, rtol=1e-4, atol=1e-5)
    mean = torch.zeros_like(plain)
    for _ in range(200):
        mean += reweighting.attention(query, key, value, reweight=function, dropout_p=0.25, block=16) / 200
    assert (mean - plain).abs().mean() < 0.05
    first, second = (reweighting.attention(query, key, value, reweight=function, dropout_p=0.25) for _ in range(2))
    assert not torch.equal(first, second)
    assert (reweighting.attention(query, key, value, reweight=function, dropout_p=1.0) == 0).all()
    torch.manual_seed(3)
    first = reweighting.attention(query, key, value, reweight=function, dropout_p=0.25)
    torch.manual_seed(3)
    assert torch.equal(first, reweighting.attention(query, key, value, reweight=function, dropout_p=0.25))


# ---- what can be given as a function


def test_a_users_own_function() -> None:
    def squares(x: Tensor, *, dim: int, mask: Tensor | None) -> Tensor:
        y = torch.relu(x).square()
        y = y if mask is None else torch.where(mask, y, 0.0)
        return y / y.sum(dim, keepdim=True).clamp(min=1e-6)

    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.power = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            y = torch.relu(x) ** self.power
            y = y if mask is None else torch.where(mask, y, 0.0)
            return y / y.sum(-1, keepdim=True).clamp(min=1e-6)

    values = [t.requires_grad_() for t in tensors()]
    module = Squares()
    grads = []
    for function, block in itertools.product((squares, module), (None, 2)):
        out = reweighting.attention(*values, reweight=function, is_causal=True, block=block)
        scores = values[0] @ values[1].transpose(-1, -2) / 2
        mask = torch.ones(7, 9, dtype=torch.bool).tril()
        judge = squares(scores, dim=-1, mask=mask) @ values[2]
        torch.testing.assert_close(out, judge)
        for a, b in zip(*(torch.autograd.grad(t.square().sum(), values) for t in (out, judge)), strict=True):
            torch.testing.assert_close(a, b)
        if function is module:
            again = reweighting.attention(*values, reweight=module, block=block)
            grads.append(torch.autograd.grad(again.square().sum(), module.power)[0])
    torch.testing.assert_close(grads[0], grads[1])
    # nothing to mask: the function hears so
    seen = []
    reweighting.attention(*values, reweight=lambda x, dim, mask: seen.append(mask) or torch.softmax(x, dim))
    assert seen == [None]


def test_modules_of_the_package() -> None:
    values = tensors()
    layers: dict[str, tuple[nn.Module, Any]] = {
        "Softmax": (reweighting.Softmax(2.0), reweighting.get("softmax", temperature=2.0)),
        "Sparsemax": (reweighting.Sparsemax(), "sparsemax"),
        "Entmax15": (reweighting.Entmax15(), "entmax15"),
        "Entmax": (reweighting.Entmax(1.3), reweighting.get("entmax", alpha=1.3)),
        "EvSoftmax": (reweighting.EvSoftmax(0.1), reweighting.get("evsoftmax", eps=0.1)),
        "EvSoftmax, evaluated": (reweighting.EvSoftmax(0.1).eval(), "evsoftmax"),
        "Sparsehourglass": (reweighting.Sparsehourglass(0.3), reweighting.get("sparsehourglass", q=0.3)),
        "TopK": (reweighting.TopK(0.3), reweighting.get("topk", k=0.3)),
        "AttnScaledSoftmax": (
            reweighting.AttnScaledSoftmax(0.5, learn=False),
            reweighting.get("attnscale", omega=0.5),
        ),
    }
    for layer, function in layers.values():
        ours, judge = (reweighting.attention(*values, reweight=one, block=3) for one in (layer, function))
        assert torch.equal(ours, judge)
    learned = reweighting.Entmax(1.3, learn=True, heads=3).double()
    reweighting.attention(*values, reweight=learned, block=3).square().sum().backward()
    assert learned.shape.grad.shape == (3,)
    assert (learned.shape.grad != 0).all()


def test_torchs_own_softmax_module() -> None:
    values = tensors()
    out = reweighting.attention(*values, reweight=nn.Softmax(-1))
    torch.testing.assert_close(out, F.scaled_dot_product_attention(*values))


def test_gradcheck_and_torch_func() -> None:
    values = tensors((1, 2), 3, 4, 2, 2)
    leaves = [t.clone().requires_grad_() for t in values]
    for case in ("sparsemax", "entmax15", "topk", "sparsehourglass", "entmax"):

        def function(*args: Tensor, case: str = case) -> Tensor:
            return reweighting.attention(*args, reweight=CASES[case], block=2)

        assert torch.autograd.gradcheck(function, leaves)
        assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)
        grads = torch.func.grad(lambda *a, f=function: f(*a).square().sum(), (0, 1, 2))(*values)
        judges = torch.autograd.grad(function(*leaves).square().sum(), leaves)
        for a, b in zip(grads, judges, strict=True):
            torch.testing.assert_close(a, b)
        mapped = torch.func.vmap(function)(*(t.expand(3, *t.shape[1:]) for t in values))
        torch.testing.assert_close(mapped, function(*values).expand(3, 2, 3, 2))


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_second_derivatives_in_buffers(dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputing, "IN_CACHES", 8)
    leaves = [t.requires_grad_() for t in tensors((1, 2), 3, 4, 2, 2)]
    alpha = torch.tensor([[[1.3]], [[1.6]]], dtype=torch.float64, requires_grad=True)

    def function(query: Tensor, key: Tensor, value: Tensor, alpha: Tensor, **options: Any) -> Tensor:
        torch.manual_seed(5)
        entmax = reweighting.get("entmax", alpha=alpha)
        return reweighting.attention(query, key, value, reweight=entmax, dropout_p=dropout, **options)

    assert torch.autograd.gradcheck(function, [*leaves, alpha])
    assert torch.autograd.gradgradcheck(function, [*leaves, alpha])
    # one tensor in three places
    x = leaves[0]
    assert torch.autograd.gradgradcheck(lambda x, alpha: function(x, x, x, alpha, is_causal=True), [x, alpha])


@pytest.mark.parametrize("case", ["sparsemax", "topk"])
@pytest.mark.parametrize("block", [None, 3])
def test_compile(case: str, block: int | None) -> None:
    torch._dynamo.reset()
    values = [t.float() for t in tensors()]

    def loss(*args: Tensor) -> Tensor:
        return reweighting.attention(*args, reweight=CASES[case], is_causal=True, block=block).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    results = []
    for one in (compiled, loss):
        leaves = [t.clone().requires_grad_() for t in values]
        value = one(*leaves)
        results.append([value, *torch.autograd.grad(value, leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()


def test_two_runs_are_bitwise_equal() -> None:
    for case, dtype in itertools.product(CASES, (torch.float32, torch.bfloat16)):
        if case == "multimax":
            continue
        results = []
        for threads in (2, 2, 1):
            torch.set_num_threads(threads)
            torch.manual_seed(1)
            leaves = [torch.randn(2, 2, 40, 8).to(dtype).requires_grad_() for _ in range(3)]
            out = reweighting.attention(*leaves, reweight=CASES[case], block=9)
            results.append([out, *torch.autograd.grad(out.sum(), leaves)])
        for a, b in zip(results[0], results[1], strict=True):
            assert torch.equal(a, b)


def test_nan_shows_in_its_query_only() -> None:
    for case in CASES:
        query, key, value = tensors()
        query[0, 1, 3] = NAN
        out = reweighting.attention(query, key, value, reweight=CASES[case], block=2)
        hit = torch.zeros(2, 3, 7, dtype=torch.bool)
        hit[0, 1, 3] = True
        assert out[hit].isnan().all()
        assert out[~hit].isfinite().all()


# ---- what is refused

Q = torch.randn(2, 3, 7, 4)
K = torch.randn(2, 3, 9, 4)
V = torch.randn(2, 3, 9, 5)
BAD: dict[str, tuple[Options, type[Exception], str]] = {
    "unknown name": ({"reweight": "relu"}, ValueError, "multimax: expected name to be one of 'softmax', 'multimax'"),
    "topk without k": ({"reweight": "topk"}, TypeError, "multimax: expected k for topk, got no such option"),
    "attnscale without omega": ({"reweight": "attnscale"}, TypeError, "a reweighting.AttnScaledSoftmax module has its"),
    "multimax without parameters": ({"reweight": "multimax"}, TypeError, "a multimax.MultiMax module has its own"),
    "a number": (
        {"reweight": 1.5},
        TypeError,
        "multimax: expected reweight to be a name, a module or a function of (x, dim, mask), got 1.5",
    ),
    "none": ({"reweight": None}, TypeError, "multimax: expected reweight to be a name, a module or a function"),
    "block 0": ({"block": 0}, ValueError, "multimax: expected block to be an int of at least 1, got 0"),
    "block 1.0": ({"block": 1.0}, ValueError, "multimax: expected block to be an int of at least 1, got 1.0"),
    "block True": ({"block": True}, ValueError, "multimax: expected block to be an int of at least 1, got True"),
    "query a list": ({"query": [1.0]}, TypeError, "multimax: expected query to be a tensor, got list"),
    "key a list": ({"key": [1.0]}, TypeError, "multimax: expected key to be a tensor, got list"),
    "query of integers": ({"query": Q.long()}, TypeError, "multimax: expected query of dtype float32"),
    "query of one dim": (
        {"query": Q[0, 0, 0]},
        ValueError,
        "multimax: expected query of shape (..., H, L, D), got (4,)",
    ),
    "key of another dtype": ({"key": K.double()}, TypeError, "multimax: expected key of the query's dtype"),
    "key of another size": ({"key": K[..., :3]}, ValueError, "multimax: expected key of the query's last size, 4"),
    "value of another length": ({"value": V[..., :8, :]}, ValueError, "expected value of the key's length, 9"),
    "other heads": ({"key": K[:, :1], "value": V[:, :1]}, ValueError, "enable_gqa=True shares key heads"),
    "groups": (
        {"key": K[:, :2], "value": V[:, :2], "enable_gqa": True},
        ValueError,
        "expected query heads in groups of the key's 2 heads, got 3",
    ),
    "mask of integers": ({"attn_mask": torch.ones(7, 9).long()}, TypeError, "expected attn_mask to be a boolean or"),
    "mask of another shape": ({"attn_mask": torch.ones(7, 8) > 0}, ValueError, "broadcasts to the scores' shape"),
    "boolean bias": ({"score_bias": torch.ones(7, 9) > 0}, TypeError, "expected score_bias to be a floating-point"),
    "window": ({"window": 3}, TypeError, "multimax: expected window to be a pair (left, right), got 3"),
    "window of -1": ({"window": (-1, 0)}, ValueError, "multimax: expected window of ints of at least 0 or None"),
    "dropout 1.5": ({"dropout_p": 1.5}, ValueError, "multimax: expected dropout_p in [0, 1], got 1.5"),
    "dropout nan": ({"dropout_p": NAN}, ValueError, "multimax: expected dropout_p in [0, 1], got nan"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", ["softmax", "entmax15"])
@pytest.mark.parametrize("weights", [False, True])
def test_bad_input(bad: str, name: str, weights: bool) -> None:
    options, error, text = BAD[bad]
    with pytest.raises(error, match=re.escape(text)):
        reweighting.attention(
            **{"query": Q, "key": K, "value": V, "reweight": name, "return_weights": weights, **options}
        )


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (reweighting.get("entmax", alpha=1.0), ValueError, "multimax: expected alpha above 1 and finite, got 1.0"),
        (reweighting.get("entmax", alpha=torch.ones(3, 1, 1)), ValueError, "expected alpha above 1 and finite, got 1"),
        (
            reweighting.get("entmax", alpha=torch.full((3,), 1.5)),
            ValueError,
            "multimax: expected alpha that broadcasts",
        ),
        (reweighting.get("softmax", temperature=0), ValueError, "expected temperature above 0 and finite, got 0"),
        (reweighting.get("softmax", temperature=torch.zeros(3, 1, 1)), ValueError, "above 0 and finite, got 0"),
        (reweighting.get("softmax", temperature=torch.ones(3)), ValueError, "expected temperature that broadcasts"),
        (reweighting.get("topk", k=0), ValueError, "multimax: expected k of at least 1, got 0"),
        (reweighting.get("attnscale", omega=torch.ones(2)), ValueError, "multimax: expected omega of shape () or (3,)"),
    ],
    ids=range(8),
)
def test_bad_options(function: Any, error: type[Exception], text: str) -> None:
    for weights in (False, True):
        with pytest.raises(error, match=re.escape(text)):
            reweighting.attention(Q, K, V, reweight=function, return_weights=weights)


@pytest.mark.parametrize("omega", [torch.zeros(2), torch.zeros(3, 1), 0.5, torch.zeros(3).long()], ids=range(4))
def test_bad_attn_scale(omega: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="multimax: expected omega"):
        reweighting.attention(Q, K, V, attn_scale=omega)


# ---- the module

NAMES = [name for name in reweighting.names() if name not in ("multimax", "topk")]
REWEIGHTERS: dict[str, Callable[[], Any]] = {name: (lambda name=name: name) for name in NAMES} | {
    "TopK": lambda: reweighting.TopK(3),
    "Softmax, per head": lambda: reweighting.Softmax(0.6, learn=True, heads=4),
    "Entmax, per head": lambda: reweighting.Entmax(1.3, learn=True, heads=4),
    "Entmax, learned": lambda: reweighting.Entmax(1.3, learn=True),
    "AttnScaledSoftmax, per head": lambda: reweighting.AttnScaledSoftmax(0.7, heads=4),
    "MultiMax": lambda: multimax.MultiMax(1, heads=4),
}
modules = pytest.mark.parametrize("name", REWEIGHTERS)


def by_hand(
    module: multimax.MultiheadAttention, x: Tensor, function: Callable[..., Tensor], part: Tensor
) -> list[Tensor]:
    """(B, L, E) by the module's own projections; part is True where a key takes part, (B, 1 or H, L, L)."""
    q, k, v = F.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
    heads, size = module.num_heads, module.head_dim
    q, k, v = (t.unflatten(-1, (heads, size)).transpose(1, 2) for t in (q, k, v))
    weights = function(q @ k.transpose(-1, -2) / math.sqrt(size), mask=part)
    if module.attn_scale is not None:
        count = part.sum(-1, keepdim=True).clamp(min=1).expand(weights.shape)
        mean = weights.sum(-1, keepdim=True) / count
        omega = module.attn_scale.omega[:, None, None]
        weights = torch.where(part, mean + (1 + omega) * (weights - mean), 0.0)
    out = (weights @ v).transpose(1, 2).flatten(2)
    return [F.linear(out, module.out_proj.weight, module.out_proj.bias), weights]


@modules
@pytest.mark.parametrize("scaled", [False, True])
def test_multihead_attention(name: str, scaled: bool) -> None:
    module = multimax.MultiheadAttention(
        16, 4, batch_first=True, dtype=torch.float64, reweight=REWEIGHTERS[name](), attn_scale=scaled
    )
    if scaled:
        nn.init.normal_(module.attn_scale.omega)
    x = torch.randn(3, 7, 16, dtype=torch.float64)
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 5:], padding[2] = True, True
    causal = torch.ones(7, 7, dtype=torch.bool).triu(1)
    for options, part in (
        ({}, torch.ones(1, 1, 7, 7, dtype=torch.bool)),
        ({"key_padding_mask": padding}, ~padding[:, None, None].expand(3, 1, 7, 7)),
        ({"attn_mask": causal, "is_causal": True}, ~causal[None, None]),
        ({"attn_mask": causal, "key_padding_mask": padding}, ~causal & ~padding[:, None, None]),
    ):
        judge, weights = by_hand(module, x, module.reweight, part)
        expected = torch.autograd.grad(judge.square().sum(), list(module.parameters()), allow_unused=True)
        for need, average in ((False, True), (True, True), (True, False)):
            out, given = module(x, x, x, need_weights=need, average_attn_weights=average, **options)
            torch.testing.assert_close(out, judge)
            assert need or given is None
            if need:
                torch.testing.assert_close(given, weights.mean(1) if average else weights)
            grads = torch.autograd.grad(out.square().sum(), list(module.parameters()), allow_unused=True)
            for a, b in zip(grads, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


@modules
@pytest.mark.parametrize("scaled", [False, True])
def test_state_dicts(name: str, scaled: bool) -> None:
    theirs = nn.MultiheadAttention(16, 4)
    nn.init.normal_(theirs.in_proj_bias)
    module = multimax.MultiheadAttention(16, 4, reweight=REWEIGHTERS[name](), attn_scale=scaled)
    added = {n: p.clone() for n, p in module.named_parameters() if n.startswith(("reweight.", "attn_scale."))}
    result = module.load_state_dict(theirs.state_dict(), strict=True)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert torch.equal(module.in_proj_weight, theirs.in_proj_weight)
    for n, value in added.items():
        assert torch.equal(module.state_dict()[n], value)  # as it was
    if scaled:
        assert (module.attn_scale.omega == 0).all()
    x = torch.randn(7, 3, 16)
    if name == "softmax":
        for a, b in zip(module(x, x, x), theirs(x, x, x), strict=True):
            torch.testing.assert_close(a, b)
    # its own, with what was learned
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    again = multimax.MultiheadAttention(16, 4, reweight=REWEIGHTERS[name](), attn_scale=scaled)
    again.load_state_dict(module.state_dict())
    for other in (again, copy.deepcopy(module)):
        for a, b in zip(other(x, x, x), module(x, x, x), strict=True):
            assert torch.equal(a, b)
    extra = {key for key in module.state_dict() if key not in theirs.state_dict()}
    assert extra == set(added)
    for key in extra if len(extra) > 1 else ():  # one alone is missing in torch's too
        partly = {k: v for k, v in module.state_dict().items() if k != key}
        with pytest.raises(RuntimeError, match=re.escape(key)):
            again.load_state_dict(partly)
    # as a part of a model
    nn.ModuleDict({"a": module}).load_state_dict(nn.ModuleDict({"a": theirs}).state_dict())


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@modules
@pytest.mark.parametrize("training", [False, True])
def test_in_torchs_layers(name: str, training: bool) -> None:
    plain = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
    layer = copy.deepcopy(plain)
    layer.self_attn = multimax.MultiheadAttention(16, 4, batch_first=True, reweight=REWEIGHTERS[name]())
    layer.self_attn.load_state_dict(plain.self_attn.state_dict())
    with torch.no_grad():  # scores that are far enough apart for each function to differ from softmax
        layer.self_attn.in_proj_weight.mul_(3)
        plain.self_attn.in_proj_weight.mul_(3)
    plain.train(training)
    layer.train(training)
    x = torch.randn(3, 6, 16)
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[1, -2:] = True
    with torch.set_grad_enabled(training):
        out = layer(x, src_key_padding_mask=padding)
        theirs = plain(x, src_key_padding_mask=padding)
        attended, _ = layer.self_attn(x, x, x, key_padding_mask=padding)
        hidden = layer.norm1(x + attended)
        expected = layer.norm2(hidden + layer.linear2(F.relu(layer.linear1(hidden))))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    far = (out - theirs)[~padding].abs().max()
    assert far < 1e-4 if name in ("softmax", "attnscale") else far > 1e-3  # omega is still 0


def test_evsoftmax_trains_softly_and_evaluates_sharply() -> None:
    module, x = multimax.MultiheadAttention(16, 4, reweight="evsoftmax"), torch.randn(7, 3, 16)
    assert (module(x, x, x, average_attn_weights=False)[1] > 0).all()
    assert (module.eval()(x, x, x, average_attn_weights=False)[1] == 0).any()


def test_dropout_in_training_only() -> None:
    module, x = multimax.MultiheadAttention(16, 4, dropout=0.5, reweight="entmax15"), torch.randn(7, 3, 16)
    for need in (True, False):
        module.train()
        assert not torch.equal(*(module(x, x, x, need_weights=need)[0] for _ in range(2)))
        module.eval()
        assert torch.equal(*(module(x, x, x, need_weights=need)[0] for _ in range(2)))


def test_what_is_added_to_the_keys() -> None:
    x = torch.randn(7, 3, 16)
    for settings in ({"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 16, "vdim": 16, "bias": False}):
        theirs = nn.MultiheadAttention(16, 4, **settings)
        module = multimax.MultiheadAttention(16, 4, reweight="softmax", **settings)
        module.load_state_dict(theirs.state_dict())
        for a, b in zip(module(x, x, x), theirs(x, x, x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        sparse = multimax.MultiheadAttention(16, 4, reweight="sparsemax", **settings)
        assert sparse(x, x, x)[1].shape == theirs(x, x, x)[1].shape


def test_multimax_is_the_default_and_takes_attn_scale() -> None:
    module = multimax.MultiheadAttention(16, 4, attn_scale=True, order=1, per_head=True)
    assert module.multimax.coefs.shape == (4, 1, 2)
    x = torch.randn(7, 3, 16)
    plain = multimax.MultiheadAttention(16, 4, order=1, per_head=True)
    plain.load_state_dict({k: v for k, v in module.state_dict().items() if not k.startswith("attn_scale")})
    for need in (True, False):  # omega = 0 changes nothing
        torch.testing.assert_close(module(x, x, x, need_weights=need)[0], plain(x, x, x, need_weights=need)[0])
    module(x, x, x, need_weights=False)[0].square().sum().backward()
    assert (module.attn_scale.omega.grad != 0).all()
    assert (module.multimax.coefs.grad != 0).any()


@pytest.mark.parametrize(
    "options", [{"order": 1}, {"terms": "lower"}, {"per_head": True}, {"init": "identity"}, {"monotone": True}], ids=str
)
def test_multimaxs_options_with_another_function(options: Options) -> None:
    text = "multimax: expected order, terms, per_head, init and monotone with reweight='multimax' only"
    for reweight in ("entmax15", reweighting.Sparsemax(), multimax.MultiMax()):
        with pytest.raises(ValueError, match=re.escape(text)):
            multimax.MultiheadAttention(16, 4, reweight=reweight, **options)


@pytest.mark.parametrize(
    ("reweight", "error", "text"),
    [
        ("relu", ValueError, "multimax: expected name to be one of"),
        ("topk", TypeError, "multimax: expected the options of TopK, got none"),
        (None, TypeError, "multimax: expected reweight to be a name or a module, got None"),
        (torch.softmax, TypeError, "multimax: expected reweight to be a name or a module"),
        (reweighting.get("topk", k=2), TypeError, "multimax: expected reweight to be a name or a module"),
    ],
    ids=range(5),
)
def test_bad_modules(reweight: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        multimax.MultiheadAttention(16, 4, reweight=reweight)


def test_heads_that_do_not_fit() -> None:
    module, x = (
        multimax.MultiheadAttention(16, 4, reweight=reweighting.Entmax(1.3, learn=True, heads=3)),
        torch.randn(7, 3, 16),
    )
    for need in (True, False):
        with pytest.raises(ValueError, match="multimax: expected alpha that broadcasts to"):
            module(x, x, x, need_weights=need)
