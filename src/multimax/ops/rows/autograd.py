"""The row functions under autograd, torch.func and vmap: over the operators, whoever implements them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from multimax.ops.operators import apply_of, front, traced
from multimax.ops.rows import reference
from multimax.ops.rows.call import KINDS, RowsBackwardCall, RowsCall, saves


def _params_front(params: Tensor, dim: int | None, size: int, ndim: int) -> Tensor:
    """One set of parameters for each of the mapped inputs, which have ndim dims each."""
    mapped = front(params, dim, size)
    assert mapped is not None
    if mapped.ndim == 3:  # (size, order, 2): one set for a whole input
        mapped = mapped.reshape(size, *[1] * (ndim - 1), *mapped.shape[-2:])
    return mapped


def _formula(kind: int, dim: int, mask: Tensor | None) -> Callable[..., Tensor]:
    """The reference of that kind as a function of x, coefs and knots."""
    if KINDS[kind] == "modulate":
        return reference.modulate
    return partial(getattr(reference, KINDS[kind]), dim=dim, mask=mask)


class Rows(torch.autograd.Function):
    """multimax, log_multimax or modulate along one dim; takes the fields of a RowsCall."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        """The row function of that kind, and what its backward may need for each row."""
        result: tuple[Tensor, Tensor] = torch.ops.multimax.rows_forward.default(*args)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keeps the input and either the output or the rows' statistics."""
        call = RowsCall(*inputs)
        y, stats = output
        ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)  # a gradient of zeros for stats would be of no use
        ctx.dim, ctx.kind = call.dim, call.kind
        saved = {"output": y, "stats": stats, None: None}[saves(call.x, call.kind)]
        ctx.save_for_backward(call.x, saved, call.coefs, call.knots, call.mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        """Gradients of x, coefs and knots."""
        if grad is None:
            return (None,) * len(RowsCall._fields)
        needs: Any = RowsCall(*ctx.needs_input_grad)
        x, saved, coefs, knots, mask = ctx.saved_tensors
        params_grad = needs.coefs or needs.knots
        backward = RowsBackward.apply if traced(grad, x, coefs, knots) else torch.ops.multimax.rows_backward.default
        result = backward(grad, x, saved, coefs, knots, mask, ctx.dim, ctx.kind, params_grad)
        of_x, of_coefs, of_knots = result
        if not params_grad:
            of_coefs = of_knots = None
        return of_x, of_coefs, of_knots, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int | None]]:
        """One call for all: the mapped dim is a further dim of rows."""
        call = RowsCall(*args)
        dims: Any = RowsCall(*in_dims)
        size = info.batch_size
        ndim = call.x.ndim - (dims.x is not None)
        results = Rows.apply(
            front(call.x, dims.x, size),
            _params_front(call.coefs, dims.coefs, size, ndim),
            _params_front(call.knots, dims.knots, size, ndim),
            front(call.mask, dims.mask, size),
            call.dim + 1,
            call.kind,
        )
        return results, (0, 1 if saves(call.x, call.kind) == "stats" else None)


class RowsBackward(torch.autograd.Function):
    """The gradients of Rows; takes the fields of a RowsBackwardCall. Second derivatives go through the reference."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of x, coefs and knots, the latter two empty unless params_grad."""
        result: tuple[Tensor, Tensor, Tensor] = torch.ops.multimax.rows_backward.default(*args)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keeps what the reference needs: everything but what the forward saved, which follows from the rest."""
        call = RowsBackwardCall(*inputs)
        ctx.dim, ctx.kind, ctx.params_grad = call.dim, call.kind, call.params_grad
        ctx.save_for_backward(call.grad, call.x, call.coefs, call.knots, call.mask)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The second derivative, by differentiating the reference twice."""
        *inputs, mask = ctx.saved_tensors
        function = _formula(ctx.kind, ctx.dim, mask)

        def gradients(grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            results: tuple[Tensor, ...] = torch.func.vjp(function, *inputs)[1](grad)
            return results if ctx.params_grad else results[:1]

        vjp = torch.func.vjp(gradients, *inputs)[1]
        of_grad, of_x, of_coefs, of_knots = vjp(grads if ctx.params_grad else grads[:1])
        return of_grad, of_x, None, of_coefs, of_knots, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
        """As for Rows; parameters shared by all get a gradient for each."""
        call = RowsBackwardCall(*args)
        dims: Any = RowsBackwardCall(*in_dims)
        size = info.batch_size
        ndim = call.x.ndim - (dims.x is not None)
        saved = front(call.saved, dims.saved, size)
        if saved is not None and saves(call.x, call.kind) == "stats":  # (2, rows): the mapped dim is one of the rows'
            saved = saved.transpose(0, 1).contiguous()
        of_x, of_coefs, of_knots = RowsBackward.apply(
            front(call.grad, dims.grad, size),
            front(call.x, dims.x, size),
            saved,
            _params_front(call.coefs, dims.coefs, size, ndim),
            _params_front(call.knots, dims.knots, size, ndim),
            front(call.mask, dims.mask, size),
            call.dim + 1,
            call.kind,
            call.params_grad,
        )
        if not call.params_grad:
            return (of_x, of_coefs, of_knots), (0, None, None)
        single = call.coefs.shape if dims.coefs is None else call.coefs.movedim(dims.coefs, 0).shape[1:]
        return (of_x, of_coefs.reshape(size, *single), of_knots.reshape(size, *single)), (0, 0, 0)


def rows(call: RowsCall) -> Tensor:
    """A row function by the operators, with gradients where any are needed."""
    apply: Callable[..., tuple[Tensor, Tensor]] = torch.ops.multimax.rows_forward.default
    if traced(call.x, call.coefs, call.knots):
        apply = apply_of(Rows)
    output, _ = apply(*call)
    return output
