"""The functions of the field under autograd, torch.func and vmap: over the operators, whoever implements them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multimax.ops.entmax import reference
from multimax.ops.entmax.call import EntmaxBackwardCall, EntmaxCall, saves_output
from multimax.ops.operators import apply_of, front, traced


def _formula(mask: Tensor | None, kind: int, option: float) -> Callable[..., Tensor]:
    """The reference of that kind as a function of x and, where there is one, of the rows' parameter."""
    return lambda x, parameter=None: reference.of_call(EntmaxCall(x, parameter, mask, kind, option)).to(x.dtype)


def _rows_front(value: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """A tensor with vmap's dim in front, contiguous."""
    mapped = front(value, dim, size)
    return None if mapped is None else mapped.contiguous()


class Entmax(torch.autograd.Function):
    """Weights along the last dim of a contiguous x, and a few numbers per row; takes the fields of an EntmaxCall."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        """As the operator."""
        result: tuple[Tensor, Tensor] = torch.ops.multimax.entmax_forward.default(*args)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keeps the input, the rows' numbers, and the output where the backward needs it."""
        call = EntmaxCall(*inputs)
        weights, stats = output
        ctx.mark_non_differentiable(stats)
        ctx.kind, ctx.option = call.kind, call.option
        needed = weights if saves_output(call.x, call.kind) else None
        ctx.save_for_backward(call.x, needed, stats, call.parameter, call.mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        """The gradients of x and the parameter."""
        needs: Any = EntmaxCall(*ctx.needs_input_grad)
        x, *saved, parameter, mask = ctx.saved_tensors
        backward = EntmaxBackward.apply if traced(grad, x, parameter) else torch.ops.multimax.entmax_backward.default
        args = (grad.contiguous(), x, *saved, parameter, mask, ctx.kind, ctx.option, needs.parameter)
        of_x, of_parameter = backward(*args)
        return of_x, of_parameter if needs.parameter else None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """The mapped dim is one more dim in front."""
        call, size = EntmaxCall(*args), info.batch_size
        dims: Any = EntmaxCall(*in_dims)
        results = Entmax.apply(
            _rows_front(call.x, dims.x, size),
            _rows_front(call.parameter, dims.parameter, size),
            front(call.mask, dims.mask, size),
            call.kind,
            call.option,
        )
        return results, (0, 0)


class EntmaxBackward(torch.autograd.Function):
    """The gradients of Entmax; takes the fields of an EntmaxBackwardCall. The reference gives second derivatives."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        """As the operator."""
        result: tuple[Tensor, Tensor] = torch.ops.multimax.entmax_backward.default(*args)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keeps what the reference needs: what the forward saved follows from it."""
        call = EntmaxBackwardCall(*inputs)
        ctx.kind, ctx.option, ctx.parameter_grad = call.kind, call.option, call.parameter_grad
        ctx.save_for_backward(call.grad, call.x, call.parameter, call.mask)

    @staticmethod
    def backward(ctx: Any, of_x: Tensor, of_parameter: Tensor) -> tuple[Tensor | None, ...]:
        """The second derivative, by differentiating the reference twice."""
        *saved, mask = ctx.saved_tensors
        grad, *inputs = (t for t in saved if t is not None)
        function = _formula(mask, ctx.kind, ctx.option)

        def gradients(grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            results: tuple[Tensor, ...] = torch.func.vjp(function, *inputs)[1](grad)
            return results if ctx.parameter_grad else results[:1]

        vjp = torch.func.vjp(gradients, grad, *inputs)[1]
        grad_grad, grad_x, *grad_parameter = vjp((of_x, of_parameter) if ctx.parameter_grad else (of_x,))
        return grad_grad, grad_x, None, None, *(grad_parameter or (None,)), None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int | None]]:
        """As for Entmax."""
        call, size = EntmaxBackwardCall(*args), info.batch_size
        dims: Any = EntmaxBackwardCall(*in_dims)
        results = EntmaxBackward.apply(
            _rows_front(call.grad, dims.grad, size),
            _rows_front(call.x, dims.x, size),
            _rows_front(call.output, dims.output, size),
            _rows_front(call.stats, dims.stats, size),
            _rows_front(call.parameter, dims.parameter, size),
            front(call.mask, dims.mask, size),
            call.kind,
            call.option,
            call.parameter_grad,
        )
        return results, (0, 0 if call.parameter_grad else None)


def entmax(call: EntmaxCall) -> Tensor:
    """The weights by the operators, with gradients where any are needed."""
    apply = apply_of(Entmax) if traced(call.x, call.parameter) else torch.ops.multimax.entmax_forward.default
    weights, _ = apply(*call)
    result: Tensor = weights
    return result
