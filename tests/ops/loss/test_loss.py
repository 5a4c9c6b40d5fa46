"""The losses against the formulas in float64 and against torch's, for every option, with every gradient."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import multimax
from machine import KERNEL, needs_kernels
from multimax.ops import dispatch, kernels
from multimax.ops.loss import chunks, reference
from multimax.ops.loss.call import LinearGrads, LinearLossCall, LossBackwardCall, LossCall
from multimax.ops.rows import reference as rows_reference

HALF = (torch.bfloat16, torch.float16)
# the interpreter takes its time: less of everything then, and only what it runs
INTERPRETED = kernels.INTERPRETED
FALLBACK = "reference" if INTERPRETED else "auto"  # "auto" is Triton there, and nothing else
IMPLS = ["auto"] if INTERPRETED else ["auto", "reference", "torch"]


def parameters(order: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    scale = torch.tensor([0.5 / (n + 1) ** 2 for n in range(order)])[:, None]
    return torch.randn(order, 2, generator=generator) * scale, torch.randn(order, 2, generator=generator)


def zero() -> tuple[Tensor, Tensor]:
    return torch.zeros(2, 2), torch.randn(2, 2)


def make_target(kind: str, rows: int, classes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    if kind == "probabilities":
        return torch.softmax(2 * torch.randn(rows, classes), -1).to(dtype)
    target = torch.randint(classes, (rows,))
    if kind == "ignored":
        target[::3] = -100
    if kind == "all ignored":
        target[:] = -100
    return target


def leaves(*tensors: Tensor | None) -> list[Any]:
    return [None if t is None else t.detach().clone().requires_grad_() for t in tensors]


def exact_loss(x: Tensor, target: Tensor, coefs: Tensor, knots: Tensor, **options: Any) -> Tensor:
    """Torch's loss functions on log multimax: nothing of ops/loss in it."""
    weight, smoothing = options.get("weight"), options.get("label_smoothing", 0.0)
    ignore, reduction, z_loss = (
        options.get("ignore_index", -100),
        options.get("reduction", "mean"),
        options.get("z_loss", 0.0),
    )
    # sigma, and then torch: softmax(sigma(x)) is what the paper defines
    s = rows_reference.modulate(x, coefs, knots)
    loss = F.cross_entropy(s, target, weight, ignore_index=ignore, reduction=reduction, label_smoothing=smoothing)
    if z_loss:
        extra = z_loss * torch.logsumexp(s, -1).square()
        count = target.shape[0]
        if not target.is_floating_point():
            extra = torch.where(target == ignore, 0, extra)
            count = int((target != ignore).sum())
        loss = loss + (extra if reduction == "none" else extra.sum() / (count if reduction == "mean" else 1))
    return loss


def torchs_linear_cross_entropy(
    h: Tensor, w: Tensor, target: Tensor, linear_bias: Tensor | None, **options: Any
) -> Tensor:
    """Torch's, or, before it had one, its loss of all logits."""
    if hasattr(F, "linear_cross_entropy"):
        return F.linear_cross_entropy(h, w, target, linear_bias=linear_bias, **options)
    logits = torch.tensordot(h, w, ([-1], [-1]))  # (R, C, ...)
    return F.cross_entropy(logits if linear_bias is None else logits + linear_bias, target, **options)


def gradients(loss: Tensor, upstream: Tensor | None, inputs: list[Tensor | None]) -> list[Tensor]:
    given = [t for t in inputs if t is not None]
    return [loss.detach(), *torch.autograd.grad(loss, given, upstream)]


OPTIONS = [
    {"reduction": reduction, "label_smoothing": smoothing, "weight": weight, "z_loss": z_loss}
    for reduction, smoothing, weight, z_loss in itertools.product(
        ("mean", "sum", "none"), (0.0, 0.15), (False, True), (0.0, 0.01)
    )
]
KINDS = ("indices", "ignored", "probabilities")


def name_of(options: dict[str, Any]) -> str:
    return "-".join(str(value) for value in options.values())


class TestExact:
    """In float64, to 1e-10, against torch's loss of sigma(x)."""

    @pytest.mark.parametrize("impl", IMPLS)
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("options", OPTIONS, ids=name_of)
    def test_logits(self, impl: str, kind: str, options: dict[str, Any]) -> None:
        rows, classes = 13, 37
        options = {**options, "weight": torch.rand(classes).double() if options["weight"] else None}
        target = make_target(kind, rows, classes, torch.float64)
        inputs = [2 * torch.randn(rows, classes).double(), *(p.double() for p in parameters())]
        upstream = torch.randn(rows).double() if options["reduction"] == "none" else None
        x, *params = leaves(*inputs)
        expected = gradients(exact_loss(x, target, *params, **options), upstream, [x, *params])
        x, *params = leaves(*inputs)
        loss = multimax.multimax_cross_entropy(x, target, *params, **options, impl=impl)
        for grad, judge in zip(gradients(loss, upstream, [x, *params]), expected, strict=True):
            torch.testing.assert_close(grad, judge, rtol=1e-10, atol=1e-10)

    @pytest.mark.parametrize("impl", IMPLS)
    @pytest.mark.parametrize("chunk", [5] if INTERPRETED else [None, 1, 5])
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("options", OPTIONS, ids=name_of)
    def test_hidden_states(self, impl: str, chunk: int | None, kind: str, options: dict[str, Any]) -> None:
        rows, width, classes = 13, 6, 37
        options = {**options, "weight": torch.rand(classes).double() if options["weight"] else None}
        target = make_target(kind, rows, classes, torch.float64)
        tensors = [torch.randn(rows, width), torch.randn(classes, width), torch.randn(classes), *parameters()]
        upstream = torch.randn(rows).double() if options["reduction"] == "none" else None
        h, w, b, *params = given = leaves(*(t.double() for t in tensors))
        expected = gradients(exact_loss(F.linear(h, w, b), target, *params, **options), upstream, given)
        h, w, b, *params = given = leaves(*(t.double() for t in tensors))
        loss = multimax.linear_multimax_cross_entropy(
            h, w, target, *params, linear_bias=b, **options, chunk=chunk, impl=impl
        )
        for grad, judge in zip(gradients(loss, upstream, given), expected, strict=True):
            torch.testing.assert_close(grad, judge, rtol=1e-10, atol=1e-10)

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_gradcheck(self, reduction: str) -> None:
        target = make_target("ignored", 5, 7)
        x, coefs, knots = leaves(torch.randn(5, 7).double(), *(p.double() for p in parameters()))

        def of_logits(*inputs: Tensor) -> Tensor:
            x, coefs, knots = inputs
            return multimax.multimax_cross_entropy(
                x, target, coefs, knots, reduction=reduction, label_smoothing=0.1, z_loss=0.01
            )

        def of_hidden(*inputs: Tensor) -> Tensor:
            h, w, b, coefs, knots = inputs
            return multimax.linear_multimax_cross_entropy(
                h, w, target, coefs, knots, linear_bias=b, reduction=reduction, z_loss=0.01, chunk=2
            )

        hidden = leaves(torch.randn(5, 3).double(), torch.randn(7, 3).double(), torch.randn(7).double())
        for function, inputs in ((of_logits, (x, coefs, knots)), (of_hidden, (*hidden, coefs, knots))):
            assert torch.autograd.gradcheck(function, inputs, fast_mode=INTERPRETED)
            assert torch.autograd.gradgradcheck(function, inputs, fast_mode=INTERPRETED)


class TestAsTorch:
    """At zero coefs the losses are torch's."""

    @pytest.mark.parametrize("shape", [(7,), (5, 7), (5, 7, 3), (2, 7, 3, 4), (0, 7), (2, 7, 0)], ids=str)
    @pytest.mark.parametrize("soft", [False, True])
    @pytest.mark.parametrize("options", OPTIONS[::2], ids=name_of)
    def test_shapes(self, shape: tuple[int, ...], soft: bool, options: dict[str, Any]) -> None:
        dim = 0 if len(shape) == 1 else 1
        options = {**options, "weight": torch.rand(7) if options["weight"] else None}
        x = torch.randn(shape)
        if soft:
            target = torch.softmax(torch.randn(shape), dim)
        else:
            target = torch.randint(7, shape[:dim] + shape[dim + 1 :])
            if target.numel() > 3:
                target.view(-1)[1] = -100
        ours, theirs = leaves(x, x)
        z_loss = options.pop("z_loss")
        assert z_loss == 0
        expected = F.cross_entropy(theirs, target, **options)
        loss = multimax.multimax_cross_entropy(ours, target, *zero(), **options)
        assert loss.shape == expected.shape
        torch.testing.assert_close(loss, expected, equal_nan=True)
        upstream = torch.randn(loss.shape)
        torch.testing.assert_close(
            torch.autograd.grad(loss, ours, upstream),
            torch.autograd.grad(expected, theirs, upstream),
            rtol=1e-5,
            atol=1e-6,
            equal_nan=True,
        )

    @pytest.mark.parametrize("kind", ["indices", "ignored", "all ignored", "probabilities"])
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("options", OPTIONS[::2], ids=name_of)
    def test_linear(self, kind: str, bias: bool, options: dict[str, Any]) -> None:
        rows, width, classes = 9, 6, 21
        options = {**options, "weight": torch.rand(classes) if options["weight"] else None}
        options.pop("z_loss")
        target = make_target(kind, rows, classes)
        tensors = [torch.randn(rows, width), torch.randn(classes, width), torch.randn(classes) if bias else None]
        h, w, b = given = leaves(*tensors)
        expected = torchs_linear_cross_entropy(h, w, target, linear_bias=b, **options)
        upstream = torch.randn(expected.shape)
        theirs = gradients(expected, upstream, given)
        h, w, b = given = leaves(*tensors)
        loss = multimax.linear_multimax_cross_entropy(h, w, target, *zero(), linear_bias=b, **options, chunk=4)
        for grad, judge in zip(gradients(loss, upstream, given), theirs, strict=True):
            torch.testing.assert_close(grad, judge, rtol=1e-5, atol=1e-5, equal_nan=True)


@needs_kernels
class TestAsGoodAsEager:
    """Errors against float64 at most 2 times (forward) and 3 times (backward) those of plain PyTorch in that dtype."""

    @staticmethod
    def check(function: Any, plain: Any, inputs: list[Tensor], names: list[str]) -> None:
        squares = torch.zeros(len(names), 3, dtype=torch.float64)
        for draw in range(3 if INTERPRETED else 8):
            scaled = [inputs[0] * (1 + draw / 16), *inputs[1:]]
            results = []
            for call, dtype in ((plain, torch.float64), (plain, None), (function, None)):
                given = leaves(*(t if dtype is None else t.to(dtype) for t in scaled))
                results.append([r.double() for r in gradients(call(*given), None, given)])
            exact, eager, ours = results
            for i in range(len(names)):
                for j, value in enumerate((ours[i] - exact[i], eager[i] - exact[i], exact[i])):
                    squares[i, j] += value.square().sum()
        for i, name in enumerate(names):
            error, allowed, size = squares[i].sqrt().tolist()
            dtype = inputs[0].dtype if i == 0 else inputs[i - 1].dtype
            rounding = size * torch.finfo(dtype).eps
            factor = 2 if i == 0 else 3
            assert error <= max(factor * allowed, 0.5 * rounding), f"{name}: {error / allowed:.2f} times eager's error"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("classes", [10, 5000] if INTERPRETED else [10, 1000, 32000])
    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    def test_logits(self, isa: str, dtype: torch.dtype, kind: str, classes: int, smoothing: float) -> None:
        coefs, knots = parameters()
        rows = 24 if classes < 32000 else 6
        target = make_target(kind, rows, classes, torch.float32)

        counted = rows if target.is_floating_point() else int((target != -100).sum())

        def plain(x: Tensor, coefs: Tensor, knots: Tensor) -> Tensor:
            call = LossCall(x, target, coefs, knots, None, -100, smoothing, "reference", False)
            losses = reference.cross_entropy(call)[0]
            return (losses.sum() / counted).to(x.dtype)

        def fused(x: Tensor, coefs: Tensor, knots: Tensor) -> Tensor:
            return multimax.multimax_cross_entropy(x, target, coefs, knots, label_smoothing=smoothing, impl=KERNEL)

        self.check(
            fused, plain, [torch.randn(rows, classes).to(dtype) * 2, coefs, knots], ["loss", "x", "coefs", "knots"]
        )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("chunk", [40] if INTERPRETED else [7, 64])
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        "options",
        [{}, {"weight": True}, {"label_smoothing": 0.1}, {"z_loss": 0.01}, {"reduction": "none"}, {"reduction": "sum"}],
        ids=str,
    )
    def test_hidden_states(self, dtype: torch.dtype, chunk: int, kind: str, options: dict[str, Any]) -> None:
        coefs, knots = parameters()
        target = make_target(kind, 64, 500)
        if "weight" in options:
            options = {"weight": torch.rand(500)}
        upstream = torch.randn(64) if options.get("reduction") == "none" else torch.ones(())
        tensors = [torch.randn(64, 32), torch.randn(500, 32) / 5, torch.randn(500) / 5]

        def run(impl: str) -> Any:
            def call(h: Tensor, w: Tensor, b: Tensor, coefs: Tensor, knots: Tensor) -> Tensor:
                loss = multimax.linear_multimax_cross_entropy(
                    h, w, target, coefs, knots, linear_bias=b, chunk=chunk, impl=impl, **options
                )
                return (loss * upstream.to(loss.dtype)).sum()

            return call

        names = ["loss", "input", "weight", "bias", "coefs", "knots"]
        self.check(run(KERNEL), run("reference"), [*(t.to(dtype) for t in tensors), coefs, knots], names)


@needs_kernels
class TestKernels:
    """Each instruction set, each type, each length: the sums and gradients of plain PyTorch."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("order", [1, 2, 3, 5])
    @pytest.mark.parametrize("kind", KINDS)
    def test_against_plain(self, isa: str, dtype: torch.dtype, order: int, kind: str) -> None:
        coefs, knots = (p.double() if dtype == torch.float64 else p for p in parameters(order))
        for classes in (1, 17, 4097) if INTERPRETED else (1, 2, 15, 16, 17, 63, 300, 4096, 4097, 9001):
            x = torch.randn(3, classes).to(dtype)
            x[0, classes // 2] = -torch.inf
            target = make_target(kind, 3, classes, torch.float32)
            if not target.is_floating_point():
                target[0] = 0 if classes == 1 else (classes // 2 + 1) % classes
            else:
                target[0, classes // 2] = 0
            weight = torch.rand(classes)
            results = []
            for impl in (KERNEL, "torch"):
                call = LossCall(x, target, coefs, knots, weight, -100, 0.0, impl, True)
                rows, saved = chunks.rows_of_logits(call)
                scale = torch.rand(3, generator=torch.Generator().manual_seed(1)).double()
                grads = chunks.rows_of_logits_backward(LossBackwardCall(scale, scale / 2, *call, saved, True))
                results.append([*rows, *grads])
            exact = 1e-10 if dtype == torch.float64 else 2e-5
            for i, (result, judge) in enumerate(zip(*results, strict=True)):
                tolerance = 1e-2 if i == 4 and dtype in HALF else exact * (1 if i < 4 else 10)
                torch.testing.assert_close(
                    result.double(),
                    judge.double(),
                    rtol=tolerance,
                    atol=tolerance,
                    equal_nan=True,
                    msg=str((i, classes)),
                )

    def test_in_place(self, isa: str) -> None:
        x = torch.randn(5, 300)
        coefs, knots = parameters()
        target = make_target("ignored", 5, 300)
        logits = LossCall(x, target, coefs, knots, None, -100, 0.1, KERNEL, False).logits()
        kernel = dispatch.load("loss")[KERNEL]
        sums = kernel.sums(logits)
        scale = torch.rand(5).double()
        apart, both = torch.empty_like(x), x.clone()
        one = kernel.gradients(logits, sums[:2], scale, scale, True, apart)
        two = kernel.gradients(logits._replace(x=both), sums[:2], scale, scale, True, both)
        assert torch.equal(apart, both)
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))

    def test_equal_runs_are_bitwise_equal(self) -> None:
        tensors = [torch.randn(70, 24), torch.randn(3000, 24), *parameters()]
        whole = [torch.randn(70, 3000), *parameters()]
        target = make_target("ignored", 70, 3000)
        runs = []
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            h, w, *params = given = leaves(*tensors)
            loss = multimax.linear_multimax_cross_entropy(h, w, target, *params, label_smoothing=0.1, chunk=16)
            x, *others = logits = leaves(*whole)
            of_logits = multimax.multimax_cross_entropy(x, target, *others, label_smoothing=0.1)
            runs.append(gradients(loss, None, given) + gradients(of_logits, None, logits))
        assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


class TestEdges:
    """DESIGN's rules for masked entries, empty rows and NaN, and rows that do not count."""

    @pytest.mark.parametrize("impl", ["auto", "reference"])
    def test_masked_classes(self, impl: str) -> None:
        coefs, knots = parameters()
        x = torch.randn(2, 9)
        without = torch.cat([x[:, :3], x[:, 4:]], 1)
        target = torch.tensor([1, 5])
        for fill in (-torch.inf, torch.finfo(torch.float32).min):
            masked = x.clone()
            masked[:, 3] = fill
            logits, other = leaves(masked, without)
            loss = multimax.multimax_cross_entropy(logits, target, coefs, knots, impl=impl)
            expected = multimax.multimax_cross_entropy(other, torch.tensor([1, 4]), coefs, knots, impl=impl)
            torch.testing.assert_close(loss, expected)
            loss.backward()
            expected.backward()
            assert (logits.grad[:, 3] == 0).all()
            torch.testing.assert_close(torch.cat([logits.grad[:, :3], logits.grad[:, 4:]], 1), other.grad)

    @pytest.mark.parametrize("impl", ["auto", "reference"])
    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    def test_what_cannot_be_costs_infinitely(self, impl: str, smoothing: float) -> None:
        coefs, knots = parameters()
        x = torch.randn(3, 9)
        x[0, 2] = -torch.inf  # the target's class
        x[1] = -torch.inf  # nothing left
        x = x.requires_grad_()
        options = {"reduction": "none", "label_smoothing": smoothing, "impl": impl}
        losses = multimax.multimax_cross_entropy(x, torch.tensor([2, 4, 5]), coefs, knots, **options)
        assert losses[:2].tolist() == [float("inf")] * 2
        assert losses[2].isfinite()
        losses.sum().backward()
        assert x.grad.isfinite().all()
        assert (x.grad[1] == 0).all()
        assert x.grad[0, 2] == 0

    @needs_kernels
    @pytest.mark.parametrize("kind", ["index", "ignored", "probabilities"])
    def test_rows_in_parts(self, isa: str, kind: str) -> None:
        """More classes than the kernel takes at once; one part is masked, and the largest entry is there twice."""
        x, target = torch.randn(4, 20011, dtype=torch.float64), make_target(kind, 4, 20011, torch.float64)
        if kind != "probabilities":
            x[:, 8192:16384] = -torch.inf
            target = torch.where(target < 0, target, target % 8192)
            target[1] = 20010
            x[2, [7, 20010]] = 9.0
            target[2] = 7
        results = []
        for impl in (KERNEL, "reference"):
            given = leaves(x, *(t.double() for t in parameters()))
            loss, stats = multimax.multimax_cross_entropy(
                given[0], target, *given[1:], reduction="sum", z_loss=0.1, return_stats=True, impl=impl
            )
            results.append([loss, *stats, *torch.autograd.grad(loss, given)])
        assert results[0][0].isfinite()
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)

    @pytest.mark.parametrize("impl", IMPLS)
    @pytest.mark.parametrize("smoothing", [0.0, 1.0])
    def test_what_is_not_wanted_costs_nothing(self, smoothing: float, impl: str) -> None:
        """A masked target, if smoothing leaves nothing of it or its class has no weight."""
        x, target = torch.randn(3, 5), torch.tensor([1, 1, 2])
        x[:, 1] = -torch.inf
        weight = torch.tensor([1.0, 0.0, 1.0, 2.0, 0.5])
        (x,) = leaves(x)
        losses = multimax.multimax_cross_entropy(
            x, target, *zero(), weight=weight, label_smoothing=smoothing, z_loss=0.1, reduction="none", impl=impl
        )
        s = x[:, [0, 2, 3, 4]]
        log_p = s.log_softmax(-1)
        rest = torch.where(target == 1, 0.0, -log_p[:, 1])
        if smoothing:
            rest = -(log_p * weight[[0, 2, 3, 4]]).sum(-1) / 5
        torch.testing.assert_close(losses, rest + 0.1 * s.logsumexp(-1).square())
        (grad,) = torch.autograd.grad(losses.sum(), x)
        assert grad.isfinite().all()
        assert (grad[:, 1] == 0).all()

    @pytest.mark.parametrize("impl", ["auto", "reference"])
    def test_nan_shows_in_its_row(self, impl: str) -> None:
        coefs, knots = parameters()
        x = torch.randn(3, 9)
        x[1, 4] = torch.nan
        x = x.requires_grad_()
        losses = multimax.multimax_cross_entropy(x, torch.tensor([0, 1, 2]), coefs, knots, reduction="none", impl=impl)
        assert losses.isnan().tolist() == [False, True, False]
        losses.sum().backward()
        assert x.grad.isnan().all(1).tolist() == [False, True, False]

    @pytest.mark.parametrize("rows", [0, 4])
    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    def test_no_row_counts(self, rows: int, reduction: str) -> None:
        h, w, b, *params = given = leaves(torch.randn(rows, 3), torch.randn(11, 3), torch.randn(11), *parameters())
        target = torch.full((rows,), -100)
        loss, stats = multimax.linear_multimax_cross_entropy(
            h, w, target, *params, linear_bias=b, reduction=reduction, return_stats=True
        )
        if reduction == "mean":
            assert loss.isnan()  # as torch
        else:
            assert (loss == 0).all()
        assert stats.accuracy.isnan()
        loss.sum().backward()
        assert all((t.grad == 0).all() for t in given)

    def test_strides(self) -> None:
        """Targets, logits and weights that do not lie as they are read."""
        params = parameters()
        labels = torch.randint(9, (6, 2))
        x = torch.randn(6, 9)
        expected = multimax.multimax_cross_entropy(x, labels[:, 0].contiguous(), *params)
        assert torch.equal(multimax.multimax_cross_entropy(x, labels[:, 0], *params), expected)
        assert torch.equal(multimax.multimax_cross_entropy(x.t().contiguous().t(), labels[:, 0], *params), expected)
        one = torch.tensor(3).expand(6)
        assert torch.equal(
            multimax.multimax_cross_entropy(x, one, *params), multimax.multimax_cross_entropy(x, one.clone(), *params)
        )
        soft = torch.softmax(torch.randn(6, 9), -1)
        turned = soft.t().contiguous().t()
        expected = multimax.multimax_cross_entropy(x, soft, *params)
        assert torch.equal(multimax.multimax_cross_entropy(x, turned, *params), expected)
        single = x.t()[None]  # (1, 9, 6): one batch of six places
        logits = single.clone().requires_grad_()
        loss = multimax.multimax_cross_entropy(logits, soft.t()[None], *params)
        torch.testing.assert_close(loss, expected)
        loss.backward()
        h, w = torch.randn(6, 4), torch.randn(4, 9)
        given = leaves(h, w)
        loss = multimax.linear_multimax_cross_entropy(given[0], given[1].t(), labels[:, 0], *params)
        other = leaves(h, w)
        judge = multimax.multimax_cross_entropy(other[0] @ other[1], labels[:, 0], *params)
        for a, b in zip(gradients(loss, None, given), gradients(judge, None, other), strict=True):
            torch.testing.assert_close(a, b)
        overlapping = torch.randn(12).unfold(0, 9, 1).requires_grad_()
        multimax.multimax_cross_entropy(overlapping, torch.tensor([0, 1, 2, 3]), *params).backward()

    def test_no_classes(self) -> None:
        for reduction in ("sum", "none"):
            x = torch.randn(3, 0, requires_grad=True)
            loss = multimax.multimax_cross_entropy(x, torch.rand(3, 0), *parameters(), reduction=reduction)
            loss.sum().backward()
            assert x.grad.shape == (3, 0)

    @pytest.mark.parametrize("impl", ["auto", "reference"])
    def test_where_sigma_overflows(self, impl: str) -> None:
        coefs, knots = torch.tensor([[0.0, 0.0], [-1.0, 0.0]]), torch.zeros(2, 2)
        x = torch.tensor([[1.0, 2.0, -1e20]])
        for stats in (False, True):
            found = multimax.multimax_cross_entropy(x, torch.tensor([0]), coefs, knots, return_stats=stats, impl=impl)
            loss = found[0] if stats else found
            torch.testing.assert_close(loss, F.cross_entropy(x[:, :2], torch.tensor([0])))
            if stats:
                p = torch.softmax(x[:, :2], -1)
                torch.testing.assert_close(found[1].entropy, -(p * p.log()).sum(-1))

    @pytest.mark.parametrize("impl", ["auto", "torch"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_an_offset_costs_no_digits(self, impl: str, kind: str) -> None:
        x = torch.randn(20, 500).round(decimals=2) + 1024
        target = make_target(kind, 20, 500)
        exact = F.cross_entropy(
            x.double(), target.double() if target.is_floating_point() else target, label_smoothing=0.1
        )
        theirs = F.cross_entropy(x, target, label_smoothing=0.1)
        ours = multimax.multimax_cross_entropy(x, target, *zero(), label_smoothing=0.1, impl=impl)
        assert (ours - exact).abs() <= 2 * (theirs - exact).abs() + 1e-6

    def test_places(self) -> None:
        """A weight for several places, as torch has it."""
        h, w, b = torch.randn(5, 4), torch.randn(7, 2, 3, 4), torch.randn(7, 2, 3)
        for target in (torch.randint(7, (5, 2, 3)), torch.softmax(torch.randn(5, 7, 2, 3), 1)):
            given, other = leaves(h, w, b), leaves(h, w, b)
            ours = multimax.linear_multimax_cross_entropy(
                given[0], given[1], target, *zero(), linear_bias=given[2], ignore_index=None
            )
            theirs = torchs_linear_cross_entropy(other[0], other[1], target, linear_bias=other[2])
            for a, judge in zip(gradients(ours, None, given), gradients(theirs, None, other), strict=True):
                torch.testing.assert_close(a, judge, rtol=1e-5, atol=1e-6)

    def test_nothing_left_and_not_accurate(self) -> None:
        x = torch.full((2, 5), -torch.inf)
        x[1, 0] = 1.0
        _, stats = multimax.multimax_cross_entropy(x, torch.tensor([0, 0]), *parameters(), return_stats=True)
        assert stats.accuracy == 0.5

    def test_a_single_hidden_state(self) -> None:
        h, w = torch.randn(3), torch.randn(11, 3)
        loss = multimax.linear_multimax_cross_entropy(h, w, torch.tensor(4), *parameters())
        expected = multimax.linear_multimax_cross_entropy(h[None], w, torch.tensor([4]), *parameters())
        assert loss.shape == ()
        assert torch.equal(loss, expected)


class TestStats:
    @pytest.mark.parametrize("impl", ["auto", "reference"])
    @pytest.mark.parametrize("linear", [False, True])
    @pytest.mark.parametrize("kind", ["ignored", "probabilities"])
    def test_values(self, impl: str, linear: bool, kind: str) -> None:
        coefs, knots = parameters()
        h, w = torch.randn(12, 5), torch.randn(40, 5)
        x = h @ w.T
        target = make_target(kind, 12, 40)
        if kind == "ignored":
            target[1::3] = multimax.modulate(x, coefs, knots)[1::3].argmax(-1)  # some that are right
        if linear:
            loss, stats = multimax.linear_multimax_cross_entropy(
                h, w, target, coefs, knots, return_stats=True, impl=impl, chunk=5
            )
        else:
            loss, stats = multimax.multimax_cross_entropy(x, target, coefs, knots, return_stats=True, impl=impl)
        assert loss.isfinite()
        s = multimax.modulate(x, coefs, knots)
        p = torch.softmax(s, -1)
        counts = target != -100 if kind == "ignored" else torch.ones(12, dtype=torch.bool)
        torch.testing.assert_close(stats.log_sum, torch.where(counts, torch.logsumexp(s, -1), 0))
        torch.testing.assert_close(stats.entropy, torch.where(counts, -(p * p.log()).sum(-1), 0))
        wanted = target if kind == "ignored" else target.argmax(-1)
        torch.testing.assert_close(stats.accuracy, (s.argmax(-1) == wanted)[counts].float().mean())
        if kind == "ignored":
            assert stats.accuracy >= 0.4

    def test_the_first_of_several_counts(self) -> None:
        for at in (3, 20, 5000):
            x = torch.zeros(1, 6000)
            x[0, [at, 5500]] = 9.0
            options = {"return_stats": True}
            assert multimax.multimax_cross_entropy(x, torch.tensor([at]), *parameters(), **options)[1].accuracy == 1
            assert multimax.multimax_cross_entropy(x, torch.tensor([5500]), *parameters(), **options)[1].accuracy == 0

    def test_shapes(self) -> None:
        h, w = torch.randn(2, 3, 5), torch.randn(40, 5)
        _, stats = multimax.linear_multimax_cross_entropy(
            h, w, torch.randint(40, (2, 3)), *parameters(), return_stats=True
        )
        assert stats.log_sum.shape == stats.entropy.shape == (2, 3)
        x = torch.randn(2, 7, 3, 4)
        _, stats = multimax.multimax_cross_entropy(x, torch.randint(7, (2, 3, 4)), *parameters(), return_stats=True)
        assert stats.log_sum.shape == stats.entropy.shape == (2, 3, 4)
        torch.testing.assert_close(stats.log_sum, torch.logsumexp(multimax.modulate(x, *parameters()), 1))


class TestTraining:
    """What training does with a loss."""

    def test_tied_embedding(self) -> None:
        coefs, knots = parameters()
        tokens = torch.randint(50, (20,))
        grads = []
        for fused in (True, False):
            (table,) = leaves(torch.randn(50, 8, generator=torch.Generator().manual_seed(3)))
            hidden = torch.tanh(table[tokens])
            if fused:
                loss = multimax.linear_multimax_cross_entropy(hidden, table, tokens.roll(1), coefs, knots, chunk=7)
            else:
                loss = multimax.multimax_cross_entropy(hidden @ table.T, tokens.roll(1), coefs, knots)
            loss.backward()
            grads.append(table.grad)
        torch.testing.assert_close(*grads)

    @pytest.mark.parametrize("frozen", range(5))
    def test_frozen(self, frozen: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """What needs no gradient gets none, and no product is made for it."""
        products = []
        mm = torch.mm
        monkeypatch.setattr(torch, "mm", lambda *args, **kwargs: products.append(1) or mm(*args, **kwargs))
        tensors = leaves(torch.randn(6, 3), torch.randn(11, 3), torch.randn(11), *parameters())
        tensors[frozen].requires_grad_(False)
        h, w, b, *params = tensors
        loss = multimax.linear_multimax_cross_entropy(h, w, torch.randint(11, (6,)), *params, linear_bias=b)
        loss.backward()
        assert tensors[frozen].grad is None
        assert all(t.grad is not None for i, t in enumerate(tensors) if i != frozen)
        assert len(products) == (1 if frozen in (0, 1) else 2)  # logits are made by addmm

    def test_accumulation_and_scaling(self) -> None:
        coefs, knots = parameters()
        h, w = torch.randn(12, 4), torch.randn(30, 4)
        target = torch.randint(30, (12,))
        whole, parts = leaves(w, w)
        multimax.linear_multimax_cross_entropy(h, whole, target, coefs, knots, reduction="sum").backward()
        for hidden, wanted in zip(h.split(4), target.split(4), strict=True):
            loss = multimax.linear_multimax_cross_entropy(hidden, parts, wanted, coefs, knots, reduction="mean")
            (loss * 4).backward()
        torch.testing.assert_close(whole.grad, parts.grad)

    def test_a_second_backward(self) -> None:
        tensors = [torch.randn(6, 3), torch.randn(11, 3), *parameters()]
        target = make_target("ignored", 6, 11)
        h, w, *params = given = leaves(*tensors)
        loss = multimax.linear_multimax_cross_entropy(h, w, target, *params, z_loss=0.1, chunk=2)
        first = torch.autograd.grad(loss, given, retain_graph=True)
        second = torch.autograd.grad(loss * 3, given)
        for a, b in zip(first, second, strict=True):
            torch.testing.assert_close(3 * a, b)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF], ids=str)
    @pytest.mark.parametrize("kind", ["index", "all ignored"])
    def test_a_second_backward_is_the_first_again(self, kind: str, dtype: torch.dtype) -> None:
        """To the last bit; in float16 the gradients of a mean over many rows would vanish otherwise."""
        target = make_target(kind, 40, 11)
        given = leaves(torch.randn(40, 3, dtype=dtype), torch.randn(11, 3, dtype=dtype), *parameters())
        h, w, *params = given
        loss = multimax.linear_multimax_cross_entropy(
            h, w, target, *params, weight=torch.rand(11) * 1e-4, z_loss=1e-5, chunk=16
        )
        first = torch.autograd.grad(loss, given, retain_graph=True)
        second = torch.autograd.grad(loss, given, retain_graph=True)
        for a, b in zip(first, second, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
            assert a.isfinite().all()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    def test_autocast(self, dtype: torch.dtype) -> None:
        """As a linear layer and torch's loss under autocast."""
        tensors = [torch.randn(40, 16), torch.randn(100, 16)]
        target = make_target("ignored", 40, 100)
        h, w = given = leaves(tensors[0].to(dtype), tensors[1])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = multimax.linear_multimax_cross_entropy(h, w, target, *zero(), chunk=16)
        ours = gradients(loss, None, given)
        h, w = given = leaves(tensors[0].to(dtype), tensors[1])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(F.linear(h, w), target)
        theirs = gradients(loss, None, given)
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = torch.randn(3, 5, dtype=torch.bfloat16)
            assert multimax.multimax_cross_entropy(x, torch.tensor([1, 2, 3]), *zero()).dtype == torch.float32

    def test_tied_embedding_with_a_graph_of_the_gradient(self) -> None:
        """create_graph=True follows an input that depends on another once, not twice."""
        coefs, knots = parameters()
        tokens = torch.randint(50, (20,))
        for reduction in ("mean", "none"):
            (table,) = leaves(torch.randn(50, 8))
            loss = multimax.linear_multimax_cross_entropy(
                torch.tanh(table[tokens]), table, tokens.roll(1), coefs, knots, reduction=reduction, chunk=7
            ).sum()
            (plain,) = torch.autograd.grad(loss, table, retain_graph=True)
            (with_graph,) = torch.autograd.grad(loss, table, create_graph=True)
            torch.testing.assert_close(plain, with_graph)

    def test_float16_with_large_weights_and_nothing_that_counts(self) -> None:
        h, w = torch.randn(8, 4).half(), torch.randn(11, 4).half()
        target = torch.randint(11, (8,))
        results = []
        for weight in (None, torch.full((11,), 5000.0)):
            given = leaves(h, w)
            loss = multimax.linear_multimax_cross_entropy(*given, target, *zero(), weight=weight)
            results.append(gradients(loss, None, given))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-3, atol=1e-4)
        given = leaves(h, w)
        loss = multimax.linear_multimax_cross_entropy(*given, torch.full((8,), -100), *zero())
        assert all((grad == 0).all() for grad in torch.autograd.grad(loss, given))

    @pytest.mark.parametrize("of", ["hidden states", "weight"])
    def test_float16_whose_products_do_not_fit(self, of: str) -> None:
        """A mean's gradient that fits in the end is not lost on the way to it."""
        h, w = torch.randn(64, 4), torch.randn(11, 4)
        if of == "hidden states":
            h, w = h * 1e-6, torch.full((11, 4), -6e4)
            w[0] = 6e4
        else:
            h, w = (h + 2) * 5e3, w * 1e-4
        results = []
        for dtype in (torch.float16, torch.float64):
            given = leaves(h.half().to(dtype), w.half().to(dtype))
            target = torch.zeros(64, dtype=torch.int64)
            loss = multimax.linear_multimax_cross_entropy(*given, target, *zero(), chunk=32)
            results.append(torch.autograd.grad(loss, given)[of == "weight"])
        grad, exact = results
        unscaled = exact.abs().max() * (64 if of == "hidden states" else 32)  # of a row, or of half of all rows
        assert exact.abs().max() < 65504 < unscaled
        assert (grad.double() - exact).norm() < 3e-3 * exact.norm()

    def test_loss_scaling_in_float16(self) -> None:
        """The gradient of a mean over many rows does not vanish before the loss scaling can save it."""
        rows, classes = 512 if INTERPRETED else 4096, 500
        h, w, target = torch.randn(rows, 8), torch.randn(classes, 8) / 10, torch.randint(classes, (rows,))
        scale = 2.0**14
        results = []
        for dtype in (torch.float16, torch.float64):
            given = leaves(h.to(dtype), w.to(dtype))
            loss = multimax.linear_multimax_cross_entropy(*given, target, *zero(), z_loss=1e-3)
            results.append(torch.autograd.grad(loss.double() * scale, given))
        for grad, exact in zip(*results, strict=True):
            assert (grad.double() - exact).norm() < 2e-3 * exact.norm()

    def test_only_a_chunk_of_logits(self) -> None:
        """No tensor of the classes' size but the weight, its gradient and one chunk."""
        from torch.utils._python_dispatch import TorchDispatchMode

        sizes: list[tuple[int, ...]] = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = func(*args, **(kwargs or {}))
                for t in out if isinstance(out, tuple) else (out,):
                    if isinstance(t, Tensor) and 997 in t.shape:
                        sizes.append(tuple(t.shape))
                return out

        h, w = torch.randn(64, 8), torch.randn(997, 8)
        impl = "torch" if kernels.unavailable and not kernels.INTERPRETED else KERNEL
        tensors = (h, w, None, torch.randint(997, (64,)), *parameters(), None)
        call = LinearLossCall(*tensors, -100, 0.0, impl, True, 0, 997, "", 16, torch.float32)
        with Watch():
            chunks.rows_of_linear(
                call, lambda rows, log_sum: (torch.ones_like(log_sum), log_sum), LinearGrads(*(True,) * 5)
            )
        assert (16, 997) in sizes
        assert all(min(size) <= 16 or size == (997,) for size in sizes)


@needs_kernels
class TestOperations:
    def arguments(self) -> dict[str, tuple[Any, ...]]:
        coefs, knots = parameters()
        target = make_target("ignored", 6, 11)
        x, h, w, b = torch.randn(6, 11), torch.randn(6, 3), torch.randn(11, 3), torch.randn(11)
        rows = torch.rand(6)
        setting = (torch.rand(11), -100, 0.1, KERNEL, True)
        saved = torch.ops.multimax.loss_rows.default(x, target, coefs, knots, *setting)[4]
        linear = (h, w, b, target, coefs, knots, *setting, 0, 11, "", 4, torch.float32)
        return {
            "loss_rows": (x, target, coefs, knots, *setting),
            "loss_rows_backward": (rows, rows, x, target, coefs, knots, *setting, saved, True),
            "linear_loss": linear,
            "linear_loss_backward": (rows, rows, *linear, [True] * 5),
        }

    @pytest.mark.parametrize("name", ["loss_rows", "loss_rows_backward", "linear_loss", "linear_loss_backward"])
    def test_opcheck(self, name: str) -> None:
        torch.library.opcheck(getattr(torch.ops.multimax, name).default, self.arguments()[name])

    @pytest.mark.parametrize("dynamic", [False, True])
    @pytest.mark.parametrize("linear", [False, True])
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_compile(self, dynamic: bool, linear: bool, reduction: str) -> None:
        def function(h: Tensor, w: Tensor, coefs: Tensor, knots: Tensor, target: Tensor) -> Tensor:
            options = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 0.01}
            if linear:
                return multimax.linear_multimax_cross_entropy(h, w, target, coefs, knots, **options).sum()
            return multimax.multimax_cross_entropy(h @ w.T, target, coefs, knots, **options).sum()

        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
        for rows in (6, 9):
            tensors = [torch.randn(rows, 3), torch.randn(11, 3), *parameters()]
            target = make_target("ignored", rows, 11)
            results = []
            for call in (function, compiled):
                given = leaves(*tensors)
                results.append(gradients(call(*given, target), None, given))
            for a, b in zip(*results, strict=True):
                torch.testing.assert_close(a, b)

    def test_func(self) -> None:
        coefs, knots = parameters()
        h, w, target = torch.randn(4, 6, 3), torch.randn(11, 3), torch.randint(11, (4, 6))

        def loss(h: Tensor, w: Tensor, target: Tensor) -> Tensor:
            return multimax.linear_multimax_cross_entropy(h, w, target, coefs, knots, impl=FALLBACK)

        mapped = torch.func.vmap(torch.func.grad(loss), (0, None, 0))(h, w, target)
        for i in range(4):
            hidden = h[i].clone().requires_grad_()
            torch.testing.assert_close(mapped[i], torch.autograd.grad(loss(hidden, w, target[i]), hidden)[0])


def smoothed(classes: int, smoothing: float, dtype: torch.dtype) -> Tensor:
    """One-hot targets, smoothed in that dtype."""
    hard = torch.nn.functional.one_hot(torch.tensor([0, classes - 1]), classes).to(dtype)
    return hard * (1 - smoothing) + smoothing / classes


def mixed(classes: int, dtype: torch.dtype) -> Tensor:
    """Smoothed targets, mixed by pairs as mixup does, in that dtype."""
    targets = smoothed(classes, 0.1, dtype)
    return targets * 0.37 + targets.flip(0) * (1 - 0.37)


class TestRoundedProbabilities:
    """Probabilities that were computed in half precision, which rounds each of them."""

    @pytest.mark.parametrize("now", [torch.float32, torch.float64, None])
    @pytest.mark.parametrize(
        ("classes", "make"),
        [
            (40, lambda n: torch.softmax(torch.randn(200, n), -1).bfloat16()),
            (1000, lambda n: torch.softmax(torch.randn(20, n), -1).bfloat16()),
            (3, lambda n: torch.full((2, n), 1 / n).bfloat16()),
            (1000, lambda n: mixed(n, torch.bfloat16)),
            (1000, lambda n: mixed(n, torch.float16)),
            (262144, lambda n: smoothed(n, 0.1, torch.float16)),
            (262144, lambda n: smoothed(n, 0.0077, torch.float16)),  # every one of them is rounded to 0
            (262144, lambda n: smoothed(n, 0.1, torch.bfloat16)),
        ],
    )
    def test_are_taken(self, classes: int, make: Callable[[int], Tensor], now: torch.dtype | None) -> None:
        target = make(classes)
        target = target if now is None else target.to(now)
        coefs, knots = torch.zeros(1, 2), torch.zeros(1, 2)
        for x in (torch.randn(target.shape), torch.randn(target.shape, dtype=torch.float64)):
            expected = torch.nn.functional.cross_entropy(x, target.to(x.dtype))
            torch.testing.assert_close(
                multimax.multimax_cross_entropy(x, target, coefs, knots), expected, rtol=1e-4, atol=1e-5
            )
        assert multimax.reweighting.sparsemax_loss(x, target).isfinite()

    @pytest.mark.parametrize("factor", [0.0, 0.5, 0.98, 1.02, 2.0])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_others_are_not(self, factor: float, dtype: torch.dtype) -> None:
        target = (torch.full((2, 100), 0.01) * factor).to(dtype)
        with pytest.raises(ValueError, match="that sum to 1 in each row, got a sum off by"):
            multimax.multimax_cross_entropy(torch.randn(2, 100), target, torch.zeros(1, 2), torch.zeros(1, 2))


@pytest.mark.parametrize("value", [numpy.int64(2), torch.tensor(2), numpy.array(2)], ids=repr)
def test_integers_of_any_kind(value: Any) -> None:
    coefs, knots = torch.full((2, 2), 0.1), torch.zeros(2, 2)
    x, weight, target = torch.randn(6, 11), torch.randn(11, 11), torch.tensor([0, 2, 2, 4, 2, 5])
    for loss, arguments in (
        (multimax.multimax_cross_entropy, (x, target, coefs, knots)),
        (multimax.linear_multimax_cross_entropy, (x, weight, target, coefs, knots)),
        (multimax.reweighting.sparsemax_loss, (x, target)),
    ):
        assert torch.equal(loss(*arguments, ignore_index=value), loss(*arguments, ignore_index=2))
        for wrong in (torch.tensor([2, 3]), torch.tensor(2.0), torch.tensor(True), numpy.float64(2)):
            with pytest.raises(TypeError, match="expected ignore_index to be an int, got"):
                loss(*arguments, ignore_index=wrong)
    x = torch.randn(2, 3, 4)
    assert torch.equal(multimax.multimax(x, coefs, knots, dim=value), multimax.multimax(x, coefs, knots, dim=2))


class TestErrors:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"input": torch.randn(6, 11).int()}, "expected input of dtype"),
            ({"input": torch.tensor(1.0)}, "expected input of shape"),
            ({"target": torch.randint(11, (5,))}, r"class indices of shape \(6,\) or probabilities of shape \(6, 11\)"),
            ({"target": torch.rand(6, 10)}, "got probabilities of shape"),
            ({"target": torch.full((6,), 11)}, r"expected targets in \[0, 10\] or ignore_index=-100, got 11"),
            ({"target": torch.full((6,), -1)}, "got -1"),
            ({"target": torch.randint(2, (6,)).bool()}, "convert it with .long"),
            ({"target": [1] * 6}, "got list"),
            ({"target": torch.rand(6, 11)}, "sum to 1"),
            ({"target": -torch.rand(6, 11)}, r"in \[0, 1\]"),
            ({"target": torch.full((6, 11), torch.nan)}, r"in \[0, 1\]"),
            ({"target": torch.full((6, 11), 1 / 11), "ignore_index": 3}, "no ignore_index with probabilities"),
            ({"coefs": torch.zeros(3, 2, 2), "knots": torch.zeros(3, 2, 2)}, r"shape \(order, 2\) for a loss"),
            ({"coefs": torch.zeros(4)}, "expected coefs"),
            ({"weight": torch.ones(10)}, r"expected weight of shape \(11,\)"),
            ({"weight": torch.ones(11).int()}, "expected weight of dtype"),
            ({"reduction": "average"}, "expected reduction to be one of 'mean', 'sum', 'none'"),
            ({"label_smoothing": 1.5}, r"expected label_smoothing in \[0, 1\]"),
            ({"label_smoothing": "much"}, "to be a number"),
            ({"z_loss": -1.0}, "expected z_loss"),
            ({"ignore_index": 0.5}, "expected ignore_index to be an int"),
            ({"impl": "fast"}, "expected impl"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
    )
    @pytest.mark.parametrize("impl", ["auto", "reference"])
    def test_logits(self, change: dict[str, Any], message: str, impl: str) -> None:
        coefs, knots = parameters()
        arguments = {"input": torch.randn(6, 11), "target": torch.randint(11, (6,)), "coefs": coefs, "knots": knots}
        arguments = {**arguments, "impl": impl, **change}
        with pytest.raises((ValueError, TypeError), match=message):
            multimax.multimax_cross_entropy(**arguments)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"linear_weight": torch.randn(11, 4)}, r"expected linear_weight of shape \(classes, 3\)"),
            ({"linear_weight": torch.randn(11, 3).double()}, "expected linear_weight of the input's dtype"),
            ({"linear_bias": torch.randn(10)}, r"expected linear_bias of shape \(11,\)"),
            ({"target": torch.full((6,), 11)}, r"expected targets in \[0, 10\]"),
            ({"target": torch.randint(11, (6, 1))}, "class indices of shape"),
            ({"chunk": 0}, "expected chunk of at least 1"),
            ({"chunk": 1.5}, "expected chunk to be an int"),
            ({"reduction": "average"}, "expected reduction"),
            ({"weight": torch.ones(3)}, "expected weight"),
            ({"input": [1.0]}, "expected input to be a tensor, got list"),
            (
                {"target": torch.full((6,), 11), "weight": torch.ones(11)},
                r"targets in \[0, 10\] or ignore_index=-100, got 11",
            ),
            ({"target": torch.full((6,), -50), "weight": torch.ones(11)}, "got -50"),
            ({"return_stats": 1}, "expected return_stats to be True or False, got 1"),
            (
                {"impl": "plain"},
                "expected impl to be one of 'auto', 'reference', 'cpu', 'triton', 'torch', got 'plain'",
            ),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
    )
    @pytest.mark.parametrize("grad", [False, True])
    def test_hidden_states(self, change: dict[str, Any], message: str, grad: bool) -> None:
        coefs, knots = parameters()
        arguments: dict[str, Any] = {
            "input": torch.randn(6, 3, requires_grad=grad),
            "linear_weight": torch.randn(11, 3),
            "target": torch.randint(11, (6,)),
            "coefs": coefs,
            "knots": knots,
        }
        with pytest.raises((ValueError, TypeError), match=message):
            multimax.linear_multimax_cross_entropy(**{**arguments, **change})

    @needs_kernels
    def test_a_path_by_name_runs_or_raises(self) -> None:
        x, target = torch.randn(3, 5), torch.softmax(torch.randn(3, 5), -1).requires_grad_()
        with pytest.raises(RuntimeError, match="no gradient to the target"):
            multimax.multimax_cross_entropy(x, target, *parameters(), impl=KERNEL)
        multimax.multimax_cross_entropy(x, target, *parameters(), impl=FALLBACK).backward()
        with pytest.raises(RuntimeError, match="impl='torch' cannot run: it gives no gradient"):
            multimax.multimax_cross_entropy(x, target, *parameters(), impl="torch")
        expected = -multimax.log_multimax(x, *parameters()) / 3
        torch.testing.assert_close(target.grad, expected)


def _one_of_two(rank: int, store: Path, results: Any) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    try:
        torch.manual_seed(0)
        found = []
        for options in (
            {},
            {"label_smoothing": 0.1, "z_loss": 0.01, "weight": torch.rand(31).double(), "return_stats": True},
            {"reduction": "none"},
        ):
            h, w, b = torch.randn(9, 4).double(), torch.randn(31, 4).double(), torch.randn(31).double()
            target = make_target("ignored", 9, 31)
            part = slice(0, 12) if rank == 0 else slice(12, 31)
            tensors = leaves(h, w[part], b[part], *(p.double() for p in parameters()))
            found.append(_loss_and_gradients(tensors, target, {**options, "group": dist.group.WORLD, "chunk": 4}))
        results.put((rank, found))
        results.close()
        results.join_thread()
    finally:
        dist.destroy_process_group()


def _loss_and_gradients(tensors: list[Tensor], target: Tensor, options: dict[str, Any]) -> list[list[float]]:
    h, w, b, *params = tensors
    loss = multimax.linear_multimax_cross_entropy(h, w, target, *params, linear_bias=b, **options)
    stats: Any = ()
    if options.get("return_stats"):
        loss, stats = loss
    (loss * torch.arange(1, 1 + loss.numel()).reshape(loss.shape)).sum().backward()
    return [t.detach().flatten().tolist() for t in (loss, *stats, *(t.grad for t in tensors))]


def test_a_weight_in_parts_over_two_processes(tmp_path: Path) -> None:
    """Loss, statistics and gradients of the whole, with parts of different sizes."""
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=_one_of_two, args=(rank, tmp_path / "store", results)) for rank in range(2)]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    torch.manual_seed(0)
    for i, options in enumerate(
        (
            {},
            {"label_smoothing": 0.1, "z_loss": 0.01, "weight": torch.rand(31).double(), "return_stats": True},
            {"reduction": "none"},
        )
    ):
        h, w, b = torch.randn(9, 4).double(), torch.randn(31, 4).double(), torch.randn(31).double()
        target = make_target("ignored", 9, 31)
        tensors = leaves(h, w, b, *(p.double() for p in parameters()))
        whole = _loss_and_gradients(tensors, target, {**options, "chunk": 4})
        *before, weight_grad, bias_grad, coefs_grad, knots_grad = whole
        for rank in range(2):
            *shared, part_weight, part_bias, part_coefs, part_knots = found[rank][i]
            for value, judge in zip((*shared, part_coefs, part_knots), (*before, coefs_grad, knots_grad), strict=True):
                torch.testing.assert_close(torch.tensor(value), torch.tensor(judge), rtol=1e-10, atol=1e-10)
            part = slice(0, 12) if rank == 0 else slice(12, 31)
            expected = torch.tensor(weight_grad).reshape(31, 4)[part].flatten()
            torch.testing.assert_close(torch.tensor(part_weight), expected, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(torch.tensor(part_bias), torch.tensor(bias_grad)[part], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("classes", "width", "dtype", "rows"),
    [
        (32000, 512, torch.float32, 256),  # half the memory of the weight's gradient
        (32000, 512, torch.bfloat16, 512),  # of its sum in float32
        (128256, 16, torch.float32, 64),
        (128256, 4096, torch.float32, 512),
        (1000, 64, torch.bfloat16, 2097),  # 4 MiB of logits
        (1000, 4096, torch.float64, 524),
        (0, 8, torch.float32, 2**20),
    ],
)
def test_rows_of_a_chunk(classes: int, width: int, dtype: torch.dtype, rows: int) -> None:
    assert chunks.default_chunk(torch.empty(classes, width), dtype) == rows
