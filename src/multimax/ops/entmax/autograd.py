"""Entmax under autograd, torch.func and vmap: over the operators, whoever implements them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multimax.ops.entmax import reference
from multimax.ops.entmax.call import EntmaxBackwardCall, EntmaxCall
from multimax.ops.operators import apply_of, front, traced


def _formula(kind: int) -> Callable[..., Tensor]:
    """The reference of that kind as a function of x and, for entmax, of the rows' alphas."""
    return lambda x, alpha=None: reference.of_call(EntmaxCall(x, alpha, kind)).to(x.dtype)


def _rows_front(value: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """A tensor with vmap's dim in front, contiguous."""
    mapped = front(value, dim, size)
    return None if mapped is None else mapped.contiguous()


class Entmax(torch.autograd.Function):
    """Entmax along the last dim of a contiguous x, and two numbers per row; takes the fields of an EntmaxCall."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        """As the operator."""
        result: tuple[Tensor, Tensor] = torch.ops.multimax.entmax_forward.default(*args)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keeps the input: the output has been rounded to half precision."""
        call = EntmaxCall(*inputs)
        _, stats = output
        ctx.mark_non_differentiable(stats)
        ctx.kind = call.kind
        ctx.save_for_backward(call.x, call.alpha, stats)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        """The gradients of x and alpha."""
        needs: Any = EntmaxCall(*ctx.needs_input_grad)
        x, alpha, stats = ctx.saved_tensors
        backward = EntmaxBackward.apply if traced(grad, x, alpha) else torch.ops.multimax.entmax_backward.default
        of_x, of_alpha = backward(grad.contiguous(), x, stats, alpha, ctx.kind, needs.alpha)
        return of_x, of_alpha if needs.alpha else None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """The mapped dim is one more dim in front."""
        call, size = EntmaxCall(*args), info.batch_size
        dims: Any = EntmaxCall(*in_dims)
        alpha = _rows_front(call.alpha, dims.alpha, size)
        return Entmax.apply(_rows_front(call.x, dims.x, size), alpha, call.kind), (0, 0)


class EntmaxBackward(torch.autograd.Function):
    """The gradients of Entmax; takes the fields of an EntmaxBackwardCall. The reference gives second derivatives."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        """As the operator."""
        result: tuple[Tensor, Tensor] = torch.ops.multimax.entmax_backward.default(*args)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keeps what the reference needs."""
        call = EntmaxBackwardCall(*inputs)
        ctx.kind, ctx.alpha_grad = call.kind, call.alpha_grad
        ctx.save_for_backward(call.grad, call.x, call.alpha)

    @staticmethod
    def backward(ctx: Any, of_x: Tensor, of_alpha: Tensor) -> tuple[Tensor | None, ...]:
        """The second derivative, by differentiating the reference twice."""
        grad, *inputs = (t for t in ctx.saved_tensors if t is not None)
        function = _formula(ctx.kind)

        def gradients(grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            results: tuple[Tensor, ...] = torch.func.vjp(function, *inputs)[1](grad)
            return results if ctx.alpha_grad else results[:1]

        vjp = torch.func.vjp(gradients, grad, *inputs)[1]
        grad_grad, grad_x, *grad_alpha = vjp((of_x, of_alpha) if ctx.alpha_grad else (of_x,))
        return grad_grad, grad_x, None, *(grad_alpha or (None,)), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int | None]]:
        """As for Entmax."""
        call, size = EntmaxBackwardCall(*args), info.batch_size
        dims: Any = EntmaxBackwardCall(*in_dims)
        results = EntmaxBackward.apply(
            _rows_front(call.grad, dims.grad, size),
            _rows_front(call.x, dims.x, size),
            _rows_front(call.stats, dims.stats, size),
            _rows_front(call.alpha, dims.alpha, size),
            call.kind,
            call.alpha_grad,
        )
        return results, (0, 0 if call.alpha_grad else None)


def entmax(call: EntmaxCall) -> Tensor:
    """Entmax by the operators, with gradients where any are needed."""
    apply = apply_of(Entmax) if traced(call.x, call.alpha) else torch.ops.multimax.entmax_forward.default
    weights, _ = apply(*call)
    result: Tensor = weights
    return result
