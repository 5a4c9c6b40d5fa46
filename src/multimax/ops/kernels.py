"""The boundary to the compiled library: loading it, what the compiler has to know of it, and its gradients."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multimax.ops import reference

BUILD_COMMAND = "pip install --no-build-isolation ."
ISAS = ("baseline", "avx2", "avx512", "avx512_bf16")
KINDS = ("multimax", "log_multimax", "modulate")  # as in csrc/rows.h
ISA_VARIABLE = "MULTIMAX_ISA"


def _load() -> str | None:
    """Loads the library. Returns why it cannot be used, or None."""
    path = Path(__file__).with_name("_kernels.abi3.so")
    if not path.exists():
        return f"the CPU kernels were not built; with torch installed, build them with `{BUILD_COMMAND}`"
    try:
        torch.ops.load_library(path)
    except OSError as error:
        why = error.__cause__ or error  # torch wraps what the system said
        return (
            f"the CPU kernels were built but could not be loaded with torch {torch.__version__} ({why}); "
            f"build them again with `{BUILD_COMMAND}`"
        )
    if torch.ops.multimax.use_isa(-1) < 0:
        return f"the CPU kernels were built for another machine's instructions; build them again with `{BUILD_COMMAND}`"
    return None


def use_isa(name: str | None = None) -> str:
    """The instruction set that the CPU kernels use, after changing it if a name is given."""
    if name is None:
        return ISAS[torch.ops.multimax.use_isa(-1)]
    if name not in ISAS:
        raise ValueError(f"multimax: expected an instruction set out of {', '.join(ISAS)}, got {name!r}")
    try:
        return ISAS[torch.ops.multimax.use_isa(ISAS.index(name))]
    except RuntimeError:
        raise RuntimeError(f"multimax: this machine or this build has no {name} kernels") from None


def _saves(x: Tensor, kind: int) -> str | None:
    """What the backward needs of the forward's results, as in csrc/rows.h."""
    if KINDS[kind] == "modulate":
        return None
    return "stats" if x.dtype in (torch.float16, torch.bfloat16) else "output"


def one_device(*tensors: Tensor | None) -> None:
    """What the real operation gets from the dispatcher, the fake has to see to itself."""
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) > 1:
        raise RuntimeError(f"multimax: expected all tensors on one device, got {sorted(map(str, devices))}")


unavailable = _load()

if unavailable is None:
    if os.environ.get(ISA_VARIABLE):
        use_isa(os.environ[ISA_VARIABLE])

    @torch.library.register_fake("multimax::rows_forward")
    def _(x: Tensor, coefs: Tensor, knots: Tensor, mask: Tensor | None, dim: int, kind: int) -> tuple[Tensor, Tensor]:
        one_device(x, coefs, knots, mask)
        rows = (2, *x.shape[:dim], *x.shape[dim + 1 :])
        size = rows if _saves(x, kind) == "stats" else (0,)
        return torch.empty_like(x), x.new_empty(size, dtype=torch.float32)

    @torch.library.register_fake("multimax::rows_backward")
    def _(
        grad: Tensor,
        x: Tensor,
        saved: Tensor | None,
        coefs: Tensor,
        knots: Tensor,
        mask: Tensor | None,
        dim: int,
        kind: int,
        params_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        one_device(grad, x, saved, coefs, knots, mask)
        size = coefs.shape if params_grad else (0,)
        return torch.empty_like(x), coefs.new_empty(size), knots.new_empty(size)


def front(value: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """A tensor with the mapped dim in front, added if it has none."""
    if value is None:
        return None
    return value.unsqueeze(0).expand(size, *value.shape) if dim is None else value.movedim(dim, 0)


def _params_front(params: Tensor, dim: int | None, size: int, ndim: int) -> Tensor:
    """Parameters of their own for each of the mapped inputs, which have ndim dims each."""
    mapped = front(params, dim, size)
    assert mapped is not None
    if mapped.ndim == 3:  # (size, order, 2): one set for a whole input
        mapped = mapped.reshape(size, *[1] * (ndim - 1), *mapped.shape[-2:])
    return mapped


def _reference(kind: int, dim: int, mask: Tensor | None) -> Callable[..., Tensor]:
    """The reference of that kind as a function of x, coefs and knots."""
    if KINDS[kind] == "modulate":
        return reference.modulate
    return partial(getattr(reference, KINDS[kind]), dim=dim, mask=mask)


def traced(*tensors: Tensor) -> bool:
    """Whether a call has to go through autograd: the raw operation is quicker, but knows nothing of gradients and of
    torch.func's transforms."""
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return needs_grad or torch._C._are_functorch_transforms_active()


class Rows(torch.autograd.Function):
    """multimax, log_multimax or modulate along one dim; arguments as `checks` leaves them, x with at least one dim."""

    @staticmethod
    def forward(
        x: Tensor, coefs: Tensor, knots: Tensor, mask: Tensor | None, dim: int, kind: int
    ) -> tuple[Tensor, Tensor]:
        """The row function of that kind, and what its backward may need of each row."""
        result: tuple[Tensor, Tensor] = torch.ops.multimax.rows_forward.default(x, coefs, knots, mask, dim, kind)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keeps the input and either the output or the rows' statistics."""
        x, coefs, knots, mask, ctx.dim, ctx.kind = inputs
        y, stats = output
        ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)  # there is no use for zeros in the place of a gradient of stats
        ctx.save_for_backward(x, {"output": y, "stats": stats, None: None}[_saves(x, ctx.kind)], coefs, knots, mask)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, coefs and knots."""
        if grads[0] is None:
            return (None,) * 6
        params_grad = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        x, saved, coefs, knots, mask = ctx.saved_tensors
        differentiable = traced(grads[0], x, coefs, knots)
        backward = RowsBackward.apply if differentiable else torch.ops.multimax.rows_backward.default
        result = backward(grads[0], x, saved, coefs, knots, mask, ctx.dim, ctx.kind, params_grad)
        grad_x, grad_coefs, grad_knots = result
        if not params_grad:
            grad_coefs = grad_knots = None
        return grad_x, grad_coefs, grad_knots, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int | None]]:
        """One call for all: the mapped dim is a further dim of rows."""
        x, coefs, knots, mask, dim, kind = args
        size = info.batch_size
        ndim = x.ndim - (in_dims[0] is not None)
        results = Rows.apply(
            front(x, in_dims[0], size),
            _params_front(coefs, in_dims[1], size, ndim),
            _params_front(knots, in_dims[2], size, ndim),
            front(mask, in_dims[3], size),
            dim + 1,
            kind,
        )
        return results, (0, 1 if _saves(x, kind) == "stats" else None)


class RowsBackward(torch.autograd.Function):
    """The gradients of Rows. Their own gradients go through the reference."""

    @staticmethod
    def forward(
        grad: Tensor,
        x: Tensor,
        saved: Tensor | None,
        coefs: Tensor,
        knots: Tensor,
        mask: Tensor | None,
        dim: int,
        kind: int,
        params_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of x, coefs and knots, the latter two empty unless params_grad."""
        result: tuple[Tensor, Tensor, Tensor] = torch.ops.multimax.rows_backward.default(
            grad, x, saved, coefs, knots, mask, dim, kind, params_grad
        )
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keeps what the reference needs: all but what the forward found, which follows from the rest."""
        grad, x, _, coefs, knots, mask, ctx.dim, ctx.kind, ctx.params_grad = inputs
        ctx.save_for_backward(grad, x, coefs, knots, mask)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The second derivative, by differentiating the reference twice."""
        *inputs, mask = ctx.saved_tensors
        function = _reference(ctx.kind, ctx.dim, mask)

        def gradients(grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            results: tuple[Tensor, ...] = torch.func.vjp(function, *inputs)[1](grad)
            return results if ctx.params_grad else results[:1]

        vjp = torch.func.vjp(gradients, *inputs)[1]
        of_grad, of_x, of_coefs, of_knots = vjp(grads if ctx.params_grad else grads[:1])
        return of_grad, of_x, None, of_coefs, of_knots, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
        """As for Rows; parameters shared by all get a gradient for each."""
        grad, x, saved, coefs, knots, mask, dim, kind, params_grad = args
        size = info.batch_size
        ndim = x.ndim - (in_dims[1] is not None)
        saved = front(saved, in_dims[2], size)
        if saved is not None and _saves(x, kind) == "stats":  # (2, rows): the mapped dim is one of the rows'
            saved = saved.transpose(0, 1).contiguous()
        grad_x, grad_coefs, grad_knots = RowsBackward.apply(
            front(grad, in_dims[0], size),
            front(x, in_dims[1], size),
            saved,
            _params_front(coefs, in_dims[3], size, ndim),
            _params_front(knots, in_dims[4], size, ndim),
            front(mask, in_dims[5], size),
            dim + 1,
            kind,
            params_grad,
        )
        if not params_grad:
            return (grad_x, grad_coefs, grad_knots), (0, None, None)
        single = coefs.shape if in_dims[3] is None else coefs.movedim(in_dims[3], 0).shape[1:]
        return (grad_x, grad_coefs.reshape(size, *single), grad_knots.reshape(size, *single)), (0, 0, 0)


def rows(x: Tensor, coefs: Tensor, knots: Tensor, mask: Tensor | None, dim: int, kind: str) -> Tensor:
    """A row function by the CPU kernels, with gradients where any are needed."""
    index = KINDS.index(kind)
    if x.ndim == 0:
        return rows(x[None], coefs, knots, None if mask is None else mask[None], 0, kind)[0]
    apply: Callable[..., tuple[Tensor, Tensor]] = torch.ops.multimax.rows_forward.default
    if traced(x, coefs, knots):
        # Rows.apply inspects signatures at every call, for the sake of torch.func and the compiler: 50 microseconds
        plain = not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())
        apply = super(torch.autograd.Function, Rows).apply if plain else Rows.apply
    return apply(x, coefs, knots, mask, dim, index)[0]
