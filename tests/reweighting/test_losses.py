"""The losses of the sparse functions: against loops over numbers, the `entmax` package, and what they should mean."""

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import entmax as package
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multimax import reweighting


@pytest.fixture(autouse=True)
def one_thread(same_start: None) -> None:
    """Many small operations: where threads matter, tests set their own number."""
    torch.set_num_threads(1)


INF, NAN = math.inf, math.nan
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
Options = dict[str, Any]
# name: the loss, its function, alpha
FENCHEL_YOUNG: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], float]] = {
    "sparsemax": (reweighting.sparsemax_loss, reweighting.sparsemax, 2.0),
    "entmax15": (reweighting.entmax15_loss, reweighting.entmax15, 1.5),
    "entmax, 1.3": (
        lambda *a, **o: reweighting.entmax_loss(*a, alpha=1.3, **o),
        lambda x, **o: reweighting.entmax(x, alpha=1.3, **o),
        1.3,
    ),
    "entmax, 2.5": (
        lambda *a, **o: reweighting.entmax_loss(*a, alpha=2.5, **o),
        lambda x, **o: reweighting.entmax(x, alpha=2.5, **o),
        2.5,
    ),
    "entmax, tensor": (
        lambda input, target, **o: reweighting.entmax_loss(
            input, target, alpha=torch.tensor(1.7, dtype=torch.float64), **o
        ),
        lambda x, **o: reweighting.entmax(x, alpha=1.7, **o),
        1.7,
    ),
}
LOSSES: dict[str, Callable[..., Tensor]] = {name: loss for name, (loss, *_) in FENCHEL_YOUNG.items()} | {
    "evsoftmax": lambda *a, **o: reweighting.evsoftmax_loss(*a, eps=0.01, **o)
}
every = pytest.mark.parametrize("name", LOSSES)
each = pytest.mark.parametrize("name", FENCHEL_YOUNG)


def entropy(p: list[float], alpha: float) -> float:
    return math.fsum((v - v**alpha) / (alpha * (alpha - 1)) for v in p)


def slow(name: str, row: list[float], wanted: list[float]) -> float:
    """The definition, on numbers; what is masked, and not wanted, takes no part."""
    if name == "evsoftmax":
        mean = math.fsum(row) / len(row)
        terms = [((v >= mean) + 0.01) * math.exp(v) for v in row]
        return -math.fsum(y * math.log(t / math.fsum(terms)) for y, t in zip(wanted, terms, strict=True))
    _, function, alpha = FENCHEL_YOUNG[name]
    p = function(torch.tensor(row, dtype=torch.float64), impl="reference").tolist()
    inner = math.fsum((a - b) * v for a, b, v in zip(p, wanted, row, strict=True))
    return inner + entropy(p, alpha) - entropy(wanted, alpha)


def smoothed(target: Tensor, classes: int, smoothing: float) -> Tensor:
    wanted = target.double() if target.is_floating_point() else F.one_hot(target.clamp(min=0), classes).double()
    return (1 - smoothing) * wanted + smoothing / classes


@every
@pytest.mark.parametrize("kind", ["indices", "ignored", "probabilities", "sparse probabilities"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_the_definition(name: str, kind: str, smoothing: float, reduction: str) -> None:
    x = 1.5 * torch.randn(7, 9, dtype=torch.float64)
    target = torch.randint(9, (7,))
    if kind == "ignored":
        target[[1, 4]] = -100
    if kind == "probabilities":
        target = torch.softmax(torch.randn(7, 9).double(), -1)
    if kind == "sparse probabilities":
        target = reweighting.sparsemax(2 * torch.randn(7, 9).double())
    on = torch.ones(7, dtype=torch.bool) if target.is_floating_point() else target != -100
    wanted = smoothed(target, 9, smoothing)
    each_row = [slow(name, row, y) for row, y in zip(x.tolist(), wanted.tolist(), strict=True)]
    expected = torch.tensor(each_row, dtype=torch.float64) * on
    if reduction != "none":
        expected = expected.sum() / (on.sum() if reduction == "mean" else 1)
    x.requires_grad_()
    loss = LOSSES[name](x, target, label_smoothing=smoothing, reduction=reduction)
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-11, atol=1e-12)
    # the gradient is p - y
    upstream = torch.randn_like(loss)
    (grad,) = torch.autograd.grad(loss, x, upstream)
    if name == "evsoftmax":
        p = reweighting.evsoftmax(x.detach(), eps=0.01)
    else:
        p = FENCHEL_YOUNG[name][1](x.detach(), impl="reference")
    rows = upstream[:, None] if reduction == "none" else upstream / (on.sum() if reduction == "mean" else 1)
    torch.testing.assert_close(grad, rows * (p - wanted) * on[:, None], rtol=1e-9, atol=1e-12)
    assert (grad[~on] == 0).all()


PACKAGE: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], type[nn.Module]]] = {
    "sparsemax": (reweighting.sparsemax_loss, package.sparsemax_loss, package.SparsemaxLoss),
    "entmax15": (reweighting.entmax15_loss, package.entmax15_loss, package.Entmax15Loss),
    "entmax": (
        lambda *a, **o: reweighting.entmax_loss(*a, alpha=1.3, **o),
        lambda x, y: package.entmax_bisect_loss(x, y, 1.3, 100),
        lambda **o: package.EntmaxBisectLoss(1.3, 100, **o),
    ),
}


@pytest.mark.parametrize("name", PACKAGE)
@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_the_package(name: str, scale: float) -> None:
    ours, theirs, _ = PACKAGE[name]
    x, y = scale * torch.randn(20, 30, dtype=torch.float64), torch.randint(30, (20,))
    upstream = torch.randn(20, dtype=torch.float64)
    results = []
    for loss in (lambda x: ours(x, y, reduction="none"), lambda x: theirs(x, y)):
        leaf = x.clone().requires_grad_()
        value = loss(leaf)
        results.append([value, *torch.autograd.grad(value, leaf, upstream)])
    for result, judge in zip(*results, strict=True):
        torch.testing.assert_close(result, judge, rtol=1e-10, atol=1e-12 * max(scale, 1))
    for reduction, their_name in (("mean", "elementwise_mean"), ("sum", "sum")):
        judge = PACKAGE[name][2](reduction=their_name)(x, y)
        torch.testing.assert_close(ours(x, y, reduction=reduction), judge, rtol=1e-10, atol=0)
    # an index that is ignored, where the package's must not be negative
    y[::3] = 7
    judge = PACKAGE[name][2](ignore_index=7)(x, y)
    torch.testing.assert_close(ours(x, y, ignore_index=7), judge, rtol=1e-10, atol=0)
    y[::3] = -100
    torch.testing.assert_close(ours(x, y), judge, rtol=1e-10, atol=0)
    with pytest.raises(RuntimeError, match="index -100 is out of bounds"):
        PACKAGE[name][2]()(x, y)


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [0.3, 3.0, 300.0])
def test_never_negative_and_zero_where_there_is_nothing_to_learn(name: str, dtype: torch.dtype, scale: float) -> None:
    loss, function, _ = FENCHEL_YOUNG[name]
    x = scale * torch.randn(4000, 8, dtype=dtype)
    best = x.argmax(-1)
    p = function(x)
    losses = loss(x, best, reduction="none")
    done = (p == F.one_hot(best, 8)).all(-1)
    assert (losses[done] == 0).all()
    assert (losses >= 0).all(), f"{losses.min().item():g}"
    clear = p.gather(-1, best[:, None])[:, 0] < 0.99
    assert (losses[clear] > 0).all()
    other = loss(x, (best + 1) % 8, reduction="none")
    assert (other > 0).all()
    # soft targets: its own weights cost nothing, and nothing is learned from them
    leaf = x.clone().requires_grad_()
    result = loss(leaf, p, reduction="none")
    assert (result.detach().abs() <= 100 * scale * torch.finfo(dtype).eps).all()
    (grad,) = torch.autograd.grad(result.sum(), leaf)
    assert (grad.abs() <= 100 * torch.finfo(dtype).eps).all()


@every
@pytest.mark.parametrize("shift", [100.0, 1e4, -1e4])
def test_a_constant_changes_nothing(name: str, shift: float) -> None:
    """As in torch's cross-entropy: what the scores have in common is no reason to lose digits."""
    x, y = torch.randint(-4000, 4000, (50, 9)) / 1024, torch.randint(9, (50,))  # shifted without rounding
    soft = torch.softmax(torch.randn(50, 9), -1)
    for target in (y, soft):
        plain, moved = (LOSSES[name](t, target, reduction="none") for t in (x, x + shift))
        torch.testing.assert_close(moved, plain, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(F.cross_entropy(x + shift, target), F.cross_entropy(x, target), rtol=1e-5, atol=2e-5)


@every
def test_dims_are_rows(name: str) -> None:
    x, y = torch.randn(2, 9, 3, 4, dtype=torch.float64), torch.randint(9, (2, 3, 4))
    y[0, 1, 2] = -100
    soft = torch.softmax(torch.randn_like(x), 1)
    rows = x.movedim(1, -1).reshape(-1, 9)
    for target, flat in ((y, y.reshape(-1)), (soft, soft.movedim(1, -1).reshape(-1, 9))):
        for reduction, smoothing in itertools.product(("none", "sum", "mean"), (0.0, 0.2)):
            options = {"reduction": reduction, "label_smoothing": smoothing}
            leaf, flat_leaf = x.clone().requires_grad_(), rows.clone().requires_grad_()
            result, judge = LOSSES[name](leaf, target, **options), LOSSES[name](flat_leaf, flat, **options)
            assert result.shape == ((2, 3, 4) if reduction == "none" else ())
            torch.testing.assert_close(result.reshape(-1), judge.reshape(-1))
            result.sum().backward()
            judge.sum().backward()
            torch.testing.assert_close(leaf.grad.movedim(1, -1).reshape(-1, 9), flat_leaf.grad)
    alone = LOSSES[name](x[0, :, 0, 0], y[0, 0, 0])
    torch.testing.assert_close(alone, LOSSES[name](x[:1, :, 0, 0], y[:1, 0, 0]))
    assert LOSSES[name](x[0, :, 0, 0], y[0, 0, 0], reduction="none").shape == ()
    torch.testing.assert_close(
        LOSSES[name](x[0, :, 0, 0], soft[0, :, 0, 0]), LOSSES[name](x[:1, :, 0, 0], soft[:1, :, 0, 0])
    )


@every
def test_soft_and_hard_agree(name: str) -> None:
    x, y = torch.randn(20, 9, dtype=torch.float64), torch.randint(9, (20,))
    hot = F.one_hot(y, 9).double()
    for smoothing in (0.0, 0.3):
        results = []
        for target in (y, hot, y.int(), y.to(torch.uint8), hot.float()):
            leaf = x.clone().requires_grad_()
            loss = LOSSES[name](leaf, target, label_smoothing=smoothing)
            results.append((loss, *torch.autograd.grad(loss, leaf)))
        for other in results[1:]:
            for a, b in zip(results[0], other, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@every
def test_ignored_rows_count_for_nothing(name: str) -> None:
    x, y = torch.randn(8, 5, dtype=torch.float64), torch.randint(5, (8,))
    off = torch.tensor([1, 0, 0, 1, 0, 1, 0, 0], dtype=torch.bool)
    for ignore in (-100, -1, 3, 255):
        target = torch.where(off, ignore, torch.where(y == ignore, 0, y))
        leaf = x.clone()
        leaf[off] = torch.tensor([NAN, INF, -INF, 1e300, 0.0]).double()  # whatever is there
        leaf.requires_grad_()
        options = {} if ignore == -100 else {"ignore_index": ignore}
        loss = LOSSES[name](leaf, target, **options)
        alone = leaf.detach()[~off].requires_grad_()
        judge = LOSSES[name](alone, target[~off])
        torch.testing.assert_close(loss, judge)
        loss.backward()
        judge.backward()
        assert (leaf.grad[off] == 0).all()
        torch.testing.assert_close(leaf.grad[~off], alone.grad)
        none = LOSSES[name](leaf, target, reduction="none", **options)
        assert (none[off] == 0).all()
    everything = torch.full((8,), -100)
    assert LOSSES[name](x, everything, reduction="sum") == 0
    assert LOSSES[name](x, everything).isnan() == F.cross_entropy(x, everything).isnan()
    assert LOSSES[name](x[:0], y[:0], reduction="sum") == 0
    assert LOSSES[name](x[:0], y[:0], reduction="none").shape == (0,)


@every
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_logits(name: str, dtype: torch.dtype) -> None:
    x, y = torch.randn(6, 9).to(dtype), torch.randint(5, (6,))
    for fill in (-INF, torch.finfo(dtype).min, torch.finfo(dtype).min / 2):
        masked = x.clone()
        masked[:, 5:] = fill
        masked.requires_grad_()
        alone = x[:, :5].clone().requires_grad_()
        soft = torch.softmax(torch.randn(6, 5), -1)
        for target, wide in ((y, y), (soft, F.pad(soft, (0, 4)))):
            masked.grad = alone.grad = None
            result, judge = LOSSES[name](masked, wide), LOSSES[name](alone, target)
            torch.testing.assert_close(result, judge)
            result.backward()
            judge.backward()
            torch.testing.assert_close(masked.grad[:, :5], alone.grad)
            assert (masked.grad[:, 5:] == 0).all()
    # to want what is masked costs infinitely much, as in torch
    masked = x.detach().clone()
    masked[0, 2] = -INF
    assert LOSSES[name](masked[:1], torch.tensor([2])) == INF
    assert F.cross_entropy(masked[:1], torch.tensor([2])) == INF


@every
def test_nan_shows_in_its_row_only(name: str) -> None:
    x, y = torch.randn(4, 9), torch.randint(9, (4,))
    x[1, 3] = NAN
    x.requires_grad_()
    losses = LOSSES[name](x, y, reduction="none")
    assert losses.isnan().tolist() == [False, True, False, False]
    (grad,) = torch.autograd.grad(losses[[0, 2, 3]].sum(), x)
    assert grad[[0, 2, 3]].isfinite().all()


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    """Computed in float32: one rounding at the end."""
    x, y = (3 * torch.randn(40, 200)).to(dtype), torch.randint(200, (40,))
    soft = torch.softmax(torch.randn(40, 200), -1).to(dtype)
    for target in (y, soft):
        judge_target = target.double() if target.is_floating_point() else target
        leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
        result, judge = (
            LOSSES[name](leaf, target, reduction="none"),
            LOSSES[name](wide, judge_target, reduction="none"),
        )
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), judge, rtol=torch.finfo(dtype).eps, atol=1e-4)
        result.sum().backward()
        judge.sum().backward()
        assert leaf.grad.dtype == dtype
        torch.testing.assert_close(leaf.grad.double(), wide.grad, rtol=torch.finfo(dtype).eps, atol=1e-5)


@every
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_autocast_does_as_cross_entropy_does(name: str, dtype: torch.dtype) -> None:
    x, y = torch.randn(4, 9).to(dtype).requires_grad_(), torch.randint(9, (4,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = LOSSES[name](x, y)
        assert loss.dtype == F.cross_entropy(x, y).dtype
    loss.backward()
    assert x.grad.dtype == dtype


@every
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradcheck(name: str, reduction: str) -> None:
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0, -100, 2, 4])
    soft = torch.softmax(torch.randn(4, 5).double(), -1)
    for target in (y, soft):
        function = lambda x, target=target: LOSSES[name](x, target, reduction=reduction, label_smoothing=0.1)  # noqa: E731
        assert torch.autograd.gradcheck(function, x)
        assert torch.autograd.gradgradcheck(function, x, fast_mode=True)


def test_gradcheck_of_targets() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    scores = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    for name in FENCHEL_YOUNG:
        loss = FENCHEL_YOUNG[name][0]
        assert torch.autograd.gradcheck(lambda x, s, loss=loss: loss(x, torch.softmax(s, -1)), (x, scores))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (6, 1)])
@pytest.mark.parametrize("alpha", [1.2, 1.7, 2.4])
def test_alpha_has_a_gradient(shape: tuple[int, ...], alpha: float) -> None:
    x, y = torch.randn(6, 5, dtype=torch.float64, requires_grad=True), torch.randint(5, (6,))
    y[2] = -100
    spread = torch.linspace(0, 0.2, math.prod(shape), dtype=torch.float64).reshape(shape)
    a = (alpha + spread).requires_grad_()
    soft = torch.softmax(torch.randn(6, 5).double(), -1)
    for target in (y, soft):
        function = lambda x, a, target=target: reweighting.entmax_loss(x, target, alpha=a)  # noqa: E731
        assert torch.autograd.gradcheck(function, (x, a), fast_mode=shape != (6, 1))
        assert torch.autograd.gradgradcheck(function, (x, a), fast_mode=True)
        each_row = reweighting.entmax_loss(x, target, alpha=a, reduction="none")
        for i, value in enumerate(a.expand(6, 1).flatten().tolist()):
            alone = reweighting.entmax_loss(x[i], target[i], alpha=value, reduction="none")
            torch.testing.assert_close(each_row[i], alone)


def test_alphas_for_more_dims() -> None:
    x, y = torch.randn(2, 5, 3, dtype=torch.float64), torch.randint(5, (2, 3))
    alpha = (1.2 + torch.rand(2, 1, 3, dtype=torch.float64)).requires_grad_()
    losses = reweighting.entmax_loss(x, y, alpha=alpha, reduction="none")
    for i, j in itertools.product(range(2), range(3)):
        alone = reweighting.entmax_loss(x[i, :, j], y[i, j], alpha=alpha[i, 0, j].item())
        torch.testing.assert_close(losses[i, j], alone)
    losses.sum().backward()
    assert alpha.grad.shape == alpha.shape
    assert (alpha.grad != 0).all()


def test_special_alphas_are_the_special_losses() -> None:
    x, y = torch.randn(6, 5, dtype=torch.float64), torch.randint(5, (6,))
    for alpha, loss in ((1.5, reweighting.entmax15_loss), (2, reweighting.sparsemax_loss)):
        for a in (alpha, torch.tensor(float(alpha), dtype=torch.float64)):
            torch.testing.assert_close(reweighting.entmax_loss(x, y, alpha=a), loss(x, y))
    torch.testing.assert_close(
        reweighting.entmax_loss(x, y, alpha=1 + 1e-7), F.cross_entropy(x, y), rtol=1e-5, atol=1e-5
    )
    assert reweighting.entmax_loss(x, y) == reweighting.entmax15_loss(x, y)


@pytest.mark.parametrize("eps", [1e-6, 1e-2, 1.0])
def test_evsoftmax_is_the_logarithm_of_its_training_form(eps: float) -> None:
    x, y = torch.randn(30, 9, dtype=torch.float64, requires_grad=True), torch.randint(9, (30,))
    upstream = torch.randn(30, dtype=torch.float64)
    result = reweighting.evsoftmax_loss(x, y, eps=eps, reduction="none")
    judge = -reweighting.evsoftmax(x, eps=eps).log().gather(-1, y[:, None])[:, 0]
    torch.testing.assert_close(result, judge, rtol=1e-10, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(t, x, upstream) for t in (result, judge)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert result.isfinite().all()


@every
@pytest.mark.parametrize("soft", [False, True])
def test_compile(name: str, soft: bool) -> None:
    torch._dynamo.reset()
    x, y = torch.randn(6, 9), torch.randint(9, (6,))
    y = torch.softmax(torch.randn(6, 9), -1) if soft else y
    loss = LOSSES[name]
    compiled = torch.compile(lambda x, y: loss(x, y, label_smoothing=0.1), fullgraph=True, backend="aot_eager")
    results = []
    for one in (compiled, lambda x, y: loss(x, y, label_smoothing=0.1)):
        leaf = x.clone().requires_grad_()
        value = one(leaf, y)
        results.append((value, *torch.autograd.grad(value, leaf)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


@every
def test_torch_func(name: str) -> None:
    x, y = torch.randn(3, 6, 9, dtype=torch.float64), torch.randint(9, (3, 6))
    soft = torch.softmax(torch.randn_like(x), -1)
    for target in (y, soft):
        each_batch = torch.func.vmap(torch.func.grad(LOSSES[name]))(x, target)
        for i in range(3):
            leaf = x[i].clone().requires_grad_()
            LOSSES[name](leaf, target[i]).backward()
            torch.testing.assert_close(each_batch[i], leaf.grad)


MODULES: dict[str, tuple[Callable[..., nn.Module], Callable[..., Tensor]]] = {
    "SparsemaxLoss": (reweighting.SparsemaxLoss, reweighting.sparsemax_loss),
    "Entmax15Loss": (reweighting.Entmax15Loss, reweighting.entmax15_loss),
    "EntmaxLoss": (reweighting.EntmaxLoss, reweighting.entmax_loss),
    "EntmaxLoss(1.2)": (
        lambda **o: reweighting.EntmaxLoss(1.2, **o),
        lambda *a, **o: reweighting.entmax_loss(*a, alpha=1.2, **o),
    ),
    "EvSoftmaxLoss": (reweighting.EvSoftmaxLoss, reweighting.evsoftmax_loss),
    "EvSoftmaxLoss(0.1)": (
        lambda **o: reweighting.EvSoftmaxLoss(0.1, **o),
        lambda *a, **o: reweighting.evsoftmax_loss(*a, eps=0.1, **o),
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_the_functions(name: str) -> None:
    make, function = MODULES[name]
    x, y = torch.randn(6, 9), torch.randint(1, 9, (6,))
    y[3] = -100
    for options in ({}, {"reduction": "none"}, {"reduction": "sum", "label_smoothing": 0.2}, {"reduction": "mean"}):
        assert torch.equal(make(**options)(x, y), function(x, y, **options))
    y[3] = 0
    assert torch.equal(make(ignore_index=0)(x, y), function(x, y, ignore_index=0))
    assert not list(make().parameters())


X, Y = torch.randn(4, 5), torch.tensor([0, 1, 2, 3])
BAD: dict[str, tuple[tuple[Any, ...], Options, type[Exception], str]] = {
    "an index too large": (
        (X, Y + 2),
        {},
        ValueError,
        "multimax: expected targets in [0, 4] or ignore_index=-100, got 5",
    ),
    "a negative index": ((X, Y - 1), {}, ValueError, "expected targets in [0, 4] or ignore_index=-100, got -1"),
    "-100 with another": ((X, Y - 100), {"ignore_index": 3}, ValueError, "or ignore_index=3, got -100"),
    "no probabilities": (
        (X, torch.full((4, 5), 0.3)),
        {},
        ValueError,
        "that sum to 1 in each row, got a sum off by 0.5",
    ),
    "one row that is none": (
        (X, F.one_hot(Y, 5) * torch.tensor([1.0, 1.0, 0.5, 1.0])[:, None]),
        {},
        ValueError,
        "multimax: expected target probabilities that sum to 1 in each row, got a sum off by 0.5",
    ),
    "negative probabilities": (
        (X, torch.tensor([[1.5, -0.5, 0, 0, 0]] * 4)),
        {},
        ValueError,
        "multimax: expected target probabilities in [0, 1], got values from -0.5 to 1.5",
    ),
    "nan probabilities": ((X, torch.full((4, 5), NAN)), {}, ValueError, "expected target probabilities in [0, 1]"),
    "too few targets": ((X, Y[:3]), {}, ValueError, "expected target to be class indices of shape (4,)"),
    "targets of another shape": ((X, Y[:, None]), {}, ValueError, "got indices of shape (4, 1)"),
    "probabilities of another shape": ((X, torch.rand(4, 4)), {}, ValueError, "got probabilities of shape (4, 4)"),
    "float indices": ((X, Y.float()), {}, ValueError, "got probabilities of shape (4,)"),
    "int16": ((X, Y.short()), {}, TypeError, "got torch.int16; convert it with .long()"),
    "bool": ((X, Y > 1), {}, TypeError, "got torch.bool"),
    "a list": ((X, [0, 1, 2, 3]), {}, TypeError, "expected target to be class indices of shape (4,) or probabilities"),
    "a scalar": (
        (X[0, 0], Y[0]),
        {},
        ValueError,
        "multimax: expected input of shape (C,), (R, C) or (R, C, ...), got ()",
    ),
    "input of integers": ((Y[None], Y[:1]), {}, TypeError, "multimax: expected input of dtype float32"),
    "input a list": (([[1.0]], Y[:1]), {}, TypeError, "multimax: expected input to be a tensor, got list"),
    "reduction": ((X, Y), {"reduction": "avg"}, ValueError, "multimax: expected reduction to be one of 'mean', 'sum'"),
    "reduction none": ((X, Y), {"reduction": None}, ValueError, "multimax: expected reduction to be one of"),
    "smoothing 1.1": ((X, Y), {"label_smoothing": 1.1}, ValueError, "expected label_smoothing in [0, 1], got 1.1"),
    "smoothing -0.1": ((X, Y), {"label_smoothing": -0.1}, ValueError, "expected label_smoothing in [0, 1], got -0.1"),
    "smoothing nan": ((X, Y), {"label_smoothing": NAN}, ValueError, "expected label_smoothing in [0, 1], got nan"),
    "ignore_index a float": ((X, Y), {"ignore_index": 1.0}, TypeError, "expected ignore_index to be an int, got float"),
    "ignore_index with probabilities": (
        (X, torch.softmax(X, -1)),
        {"ignore_index": 2},
        ValueError,
        "multimax: expected no ignore_index with probabilities, got 2",
    ),
    "elsewhere": ((X, Y.to("meta")), {}, ValueError, "expected target on the input's device, cpu, got meta"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    arguments, options, error, text = BAD[case]
    for loss in LOSSES.values():
        with pytest.raises(error, match=re.escape(text)):
            loss(*arguments, **options)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: reweighting.entmax_loss(X, Y, alpha=1.0),
            ValueError,
            "multimax: expected alpha above 1 and finite, got 1",
        ),
        (lambda: reweighting.entmax_loss(X, Y, alpha=NAN), ValueError, "expected alpha above 1 and finite, got nan"),
        (lambda: reweighting.entmax_loss(X, Y, alpha=torch.ones(())), ValueError, "above 1 and finite, got 1"),
        (
            lambda: reweighting.entmax_loss(X, Y, alpha="2"),
            TypeError,
            "expected alpha to be a number or a tensor, got str",
        ),
        (
            lambda: reweighting.entmax_loss(X, Y, alpha=torch.full((5,), 1.5)),
            ValueError,
            "alpha that broadcasts to (4, 1)",
        ),
        (lambda: reweighting.entmax_loss(X, Y, alpha=torch.full((3, 1), 1.5)), ValueError, "broadcasts to (4, 1)"),
        (
            lambda: reweighting.evsoftmax_loss(X, Y, eps=0.0),
            ValueError,
            "multimax: expected eps above 0 and finite, got 0",
        ),
        (lambda: reweighting.evsoftmax_loss(X, Y, eps=-1), ValueError, "expected eps above 0 and finite, got -1"),
        (lambda: reweighting.evsoftmax_loss(X, Y, eps=INF), ValueError, "expected eps above 0 and finite, got inf"),
        (lambda: reweighting.evsoftmax_loss(X, Y, eps=torch.tensor(0.1)), TypeError, "expected eps to be a number"),
        (lambda: reweighting.EntmaxLoss(1.0), ValueError, "expected alpha above 1 and finite"),
        (lambda: reweighting.EvSoftmaxLoss(0), ValueError, "expected eps above 0 and finite"),
        (lambda: reweighting.SparsemaxLoss(reduction="avg"), ValueError, "expected reduction to be one of"),
        (lambda: reweighting.Entmax15Loss(label_smoothing=2), ValueError, "expected label_smoothing in [0, 1], got 2"),
        (lambda: reweighting.EntmaxLoss(ignore_index=None), TypeError, "expected ignore_index to be an int"),
    ],
    ids=range(15),
)
def test_bad_options(call: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        call()
