"""The operations as torch sees them: autograd, the compiler, torch.func."""

import pytest
import torch
from torch import Tensor

import multimax
from machine import needs_kernels

pytestmark = needs_kernels

FUNCTIONS = [multimax.multimax, multimax.log_multimax, multimax.modulate]


def inputs(dtype: torch.dtype = torch.float64, heads: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    lead = () if heads is None else (heads,)
    return (
        torch.randn(3, 4, 5, 9, dtype=dtype),
        (torch.randn(*lead, 2, 2) * 0.3).to(dtype),
        torch.randn(*lead, 2, 2).to(dtype),
    )


def leaves(values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(value.detach().clone().requires_grad_() for value in values)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("heads", [None, 4])
def test_gradcheck_and_double_backward(function: object, heads: int | None) -> None:
    x, coefs, knots = inputs(heads=heads)
    arguments = leaves((x[:1, :, :2, :4] if heads else x[0, 0, :2], coefs, knots))
    assert torch.autograd.gradcheck(function, arguments)
    assert torch.autograd.gradgradcheck(function, arguments)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("frozen", [True, False])
def test_double_backward_equals_the_references(function: object, frozen: bool) -> None:
    values = inputs()
    mask = {} if function is multimax.modulate else {"mask": torch.rand(3, 4, 5, 9) < 0.8, "dim": 1}
    seconds = []
    for impl in ("cpu", "reference"):
        x, coefs, knots = leaves(values)
        if frozen:
            coefs, knots = coefs.detach(), knots.detach()
        wanted = [x] if frozen else [x, coefs, knots]
        output = function(x, coefs, knots, impl=impl, **mask)
        output = torch.where(output.isfinite(), output, 0)
        grads = torch.autograd.grad(output.square().sum(), wanted, create_graph=True)
        seconds.append(torch.autograd.grad(sum(grad.square().sum() for grad in grads), wanted))
    for ours, theirs in zip(*seconds, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(kind: int, dtype: torch.dtype) -> None:
    x, coefs, knots = inputs(torch.float32)
    x = x.to(dtype)
    mask = torch.rand(x.shape) < 0.8
    for view in (x, x.transpose(1, 3)):
        arguments = (view, coefs, knots, None if view is not x else mask, 3, kind)
        torch.library.opcheck(torch.ops.multimax.rows_forward.default, arguments)
        output, stats = torch.ops.multimax.rows_forward(*arguments)
        saved = None if kind == 2 else stats if dtype == torch.bfloat16 else output
        for params_grad in (True, False):
            arguments = (torch.randn(view.shape).to(dtype), view, saved, coefs, knots, None, 3, kind, params_grad)
            torch.library.opcheck(torch.ops.multimax.rows_backward.default, arguments)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compile(function: object, dynamic: bool, dtype: torch.dtype) -> None:
    torch._dynamo.reset()

    def loss(x: Tensor, coefs: Tensor, knots: Tensor) -> Tensor:
        return (function(x * 2, coefs, knots) + 1).square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic)
    _, coefs, knots = inputs(torch.float32)
    for length in (9, 16, 21) if dynamic else (9,):
        x = torch.randn(3, 4, length).to(dtype)
        ours, plain = leaves((x, coefs, knots)), leaves((x, coefs, knots))
        compiled(*ours).backward()
        loss(*plain).backward()
        for a, b in zip(ours, plain, strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4 if dtype == torch.float32 else 2e-2, atol=1e-4)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, coefs, knots), loss(x, coefs, knots))
    torch._dynamo.reset()


def test_compile_with_mask_and_module() -> None:
    torch._dynamo.reset()
    layer = multimax.MultiMax(heads=4, monotone=True)
    compiled = torch.compile(layer, fullgraph=True)
    x, mask = torch.randn(2, 4, 6, 8), torch.rand(8) < 0.7
    torch.testing.assert_close(compiled(x, mask), layer(x, mask))
    torch._dynamo.reset()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_torch_func_grad_and_vmap(function: object, dtype: torch.dtype) -> None:
    x, coefs, knots = inputs(torch.float64)
    x = x.to(dtype)

    def loss(x: Tensor, coefs: Tensor, knots: Tensor) -> Tensor:
        return function(x, coefs, knots).double().square().sum()

    everything = (0, 1, 2)
    arguments = leaves((x, coefs, knots))
    loss(*arguments).backward()
    for ours, leaf in zip(torch.func.grad(loss, everything)(x, coefs, knots), arguments, strict=True):
        assert torch.equal(ours, leaf.grad)
    # a gradient of the shared parameters for each sample
    each = torch.func.vmap(torch.func.grad(loss, everything), (0, None, None))(x, coefs, knots)
    for i in range(len(x)):
        for ours, alone in zip(each, torch.func.grad(loss, everything)(x[i], coefs, knots), strict=True):
            torch.testing.assert_close(ours[i], alone)
    # over any dim, over the parameters, and over both
    sets = torch.stack([coefs, coefs * 0.5, coefs * 2])
    mapped = torch.func.vmap(function, (2, None, None), out_dims=2)(x, coefs, knots)
    assert torch.equal(mapped, function(x, coefs, knots))
    mapped = torch.func.vmap(function, (None, 0, None))(x, sets, knots)
    assert torch.equal(mapped, torch.stack([function(x, one, knots) for one in sets]))
    mapped = torch.func.vmap(function, (0, 0, None))(x, sets, knots)
    assert torch.equal(mapped, torch.stack([function(row, one, knots) for row, one in zip(x, sets, strict=True)]))
    twice = torch.func.vmap(torch.func.vmap(function, (0, None, None)), (0, None, None))(x, coefs, knots)
    assert torch.equal(twice, function(x, coefs, knots))


def test_vmap_over_heads_and_masks() -> None:
    x, coefs, knots = inputs(torch.float32, heads=4)
    mask = torch.rand(3, 1, 1, 9) < 0.7
    direct = multimax.multimax(x, coefs, knots, mask=mask)

    def one(x: Tensor, mask: Tensor) -> Tensor:
        return multimax.multimax(x, coefs, knots, mask=mask)

    assert torch.equal(torch.func.vmap(one)(x, mask), direct)
    assert torch.equal(torch.func.vmap(one, (0, None))(x, mask[0]), multimax.multimax(x, coefs, knots, mask=mask[0]))


def test_grad_of_grad() -> None:
    x, coefs, knots = inputs()
    x = x[0, 0, :2]

    def loss(x: Tensor) -> Tensor:
        return multimax.multimax(x, coefs, knots).square().sum()

    hessian = torch.func.jacrev(torch.func.jacrev(loss))(x)
    torch.testing.assert_close(hessian, torch.autograd.functional.hessian(loss, x))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_forward_mode_takes_the_reference(function: object) -> None:
    x, coefs, knots = inputs()
    tangent = torch.randn_like(x)
    _, along = torch.func.jvp(lambda x: function(x, coefs, knots), (x,), (tangent,))
    step = 1e-6
    difference = function(x + step * tangent, coefs, knots) - function(x - step * tangent, coefs, knots)
    torch.testing.assert_close(along, difference / (2 * step), rtol=1e-5, atol=1e-6)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        found = torch.autograd.forward_ad.unpack_dual(function(dual, coefs, knots)).tangent
        torch.testing.assert_close(found, along)
        with pytest.raises(RuntimeError, match="multimax: impl='cpu' cannot run: it has no forward-mode"):
            function(dual, coefs, knots, impl="cpu")

    def loss(coefs: Tensor) -> Tensor:
        return function(x[0, 0], coefs, knots).square().sum()

    torch.testing.assert_close(torch.func.hessian(loss)(coefs), torch.autograd.functional.hessian(loss, coefs))


# what is wrong: the arguments of rows_forward
WRONG = {
    "coefs of one dim": lambda x, c, k: (x, c[0], k[0], None, 3, 0),
    "coefs of three columns": lambda x, c, k: (x, torch.zeros(2, 3), torch.zeros(2, 3), None, 3, 0),
    "knots of another shape": lambda x, c, k: (x, c, k[:1], None, 3, 0),
    "heads that do not fit": lambda x, c, k: (x, c.expand(1, 7, 1, 2, 2), k.expand(1, 7, 1, 2, 2), None, 3, 0),
    "dim out of range": lambda x, c, k: (x, c, k, None, 4, 0),
    "negative dim": lambda x, c, k: (x, c, k, None, -1, 0),
    "unknown kind": lambda x, c, k: (x, c, k, None, 3, 3),
    "mask of another shape": lambda x, c, k: (x, c, k, torch.ones(9, dtype=torch.bool), 3, 0),
    "mask of floats": lambda x, c, k: (x, c, k, torch.ones_like(x), 3, 0),
    "integers": lambda x, c, k: (x.long(), c, k, None, 3, 0),
    "parameters elsewhere": lambda x, c, k: (x, c.to("meta"), k, None, 3, 0),
    "a mask elsewhere": lambda x, c, k: (x, c, k, torch.ones_like(x, dtype=torch.bool, device="meta"), 3, 0),
}


@pytest.mark.parametrize("case", WRONG)
def test_raw_operations_refuse_what_does_not_fit(case: str) -> None:
    with pytest.raises(RuntimeError, match="multimax: "):
        torch.ops.multimax.rows_forward(*WRONG[case](*inputs(torch.float32)))


def test_memory_that_was_freed_is_an_error_not_a_crash() -> None:
    for which in range(3):
        values = [value.clone() for value in inputs(torch.float32)]
        values[which].untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="multimax: expected tensors with memory, got one that was freed"):
            multimax.multimax(*values)


def test_raw_backward_refuses_what_does_not_fit() -> None:
    x, coefs, knots = inputs(torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        value = x.to(dtype)
        for saved in (None, torch.zeros(3), value[0].contiguous()):
            with pytest.raises(RuntimeError, match="multimax: "):
                torch.ops.multimax.rows_backward(value, value, saved, coefs, knots, None, 3, 0, True)
    with pytest.raises(RuntimeError, match="multimax: "):
        torch.ops.multimax.rows_backward(x[0], x, x, coefs, knots, None, 3, 0, True)
    with pytest.raises(RuntimeError, match="multimax: "):
        torch.ops.multimax.rows_backward(x.double(), x, x, coefs, knots, None, 3, 0, True)
