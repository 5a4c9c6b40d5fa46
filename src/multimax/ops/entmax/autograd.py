"""Entmax of the compiled library: what the compiler has to know of it, and its gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multimax.ops import kernels, operators
from multimax.ops.dtypes import compute_dtype
from multimax.ops.entmax import reference

KINDS = ("sparsemax", "entmax15", "entmax")  # as in csrc/entmax/entmax.h

if kernels.unavailable is None:

    @torch.library.register_fake("multimax::entmax_forward")
    def _(x: Tensor, alpha: Tensor | None, kind: int) -> tuple[Tensor, Tensor]:
        operators.one_device(x, alpha)
        return torch.empty_like(x), x.new_empty((*x.shape[:-1], 2), dtype=compute_dtype(x.dtype))

    @torch.library.register_fake("multimax::entmax_backward")
    def _(
        grad: Tensor, x: Tensor, stats: Tensor, alpha: Tensor | None, kind: int, alpha_grad: bool
    ) -> tuple[Tensor, Tensor]:
        operators.one_device(grad, x, stats, alpha)
        size = alpha.shape if alpha is not None and alpha_grad else (0,)
        return torch.empty_like(x), x.new_empty(size, dtype=compute_dtype(x.dtype))


def _reference(kind: int) -> Callable[..., Tensor]:
    """The reference of that kind as a function of x and, for entmax, of the rows' alphas."""

    def function(x: Tensor, *alpha: Tensor) -> Tensor:
        rows = [own.unsqueeze(-1) for own in alpha]
        weights: Tensor = getattr(reference, KINDS[kind])(*reference.split(x, -1, None), *rows)
        return weights.to(x.dtype)

    return function


def _mapped(info: Any, in_dims: tuple[Any, ...], tensors: list[Tensor | None]) -> list[Tensor | None]:
    """Tensors with the mapped dim in front, as the operations want them."""
    moved = [operators.front(t, dim, info.batch_size) for t, dim in zip(tensors, in_dims, strict=False)]
    return [None if t is None else t.contiguous() for t in moved]


class Entmax(torch.autograd.Function):
    """Entmax along the last dim of a contiguous x, with an alpha a row or none, and two numbers a row beside."""

    @staticmethod
    def forward(x: Tensor, alpha: Tensor | None, kind: int) -> tuple[Tensor, Tensor]:
        """As the operation."""
        result: tuple[Tensor, Tensor] = torch.ops.multimax.entmax_forward.default(x, alpha, kind)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keeps the input: the output has lost what rounding to half precision took."""
        x, alpha, ctx.kind = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, alpha, output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        """The gradients of x and alpha."""
        x, alpha, stats = ctx.saved_tensors
        traced = operators.traced(grad, x) or (alpha is not None and operators.traced(alpha))
        function = EntmaxBackward.apply if traced else torch.ops.multimax.entmax_backward.default
        of_x, of_alpha = function(grad.contiguous(), x, stats, alpha, ctx.kind, ctx.needs_input_grad[1])
        return of_x, of_alpha if ctx.needs_input_grad[1] else None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """The mapped dim is one more in front."""
        *tensors, kind = args
        return Entmax.apply(*_mapped(info, in_dims, tensors), kind), (0, 0)


class EntmaxBackward(torch.autograd.Function):
    """The gradients of Entmax. Their own gradients go through the reference."""

    @staticmethod
    def forward(
        grad: Tensor, x: Tensor, stats: Tensor, alpha: Tensor | None, kind: int, alpha_grad: bool
    ) -> tuple[Tensor, Tensor]:
        """As the operation."""
        result: tuple[Tensor, Tensor] = torch.ops.multimax.entmax_backward.default(
            grad, x, stats, alpha, kind, alpha_grad
        )
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keeps what the reference needs."""
        grad, x, _, alpha, ctx.kind, ctx.alpha_grad = inputs
        ctx.save_for_backward(grad, x, alpha)

    @staticmethod
    def backward(ctx: Any, of_x: Tensor, of_alpha: Tensor) -> tuple[Tensor | None, ...]:
        """The second derivative, by differentiating the reference twice."""
        grad, *inputs = (t for t in ctx.saved_tensors if t is not None)
        function = _reference(ctx.kind)

        def gradients(grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            results: tuple[Tensor, ...] = torch.func.vjp(function, *inputs)[1](grad)
            return results if ctx.alpha_grad else results[:1]

        vjp = torch.func.vjp(gradients, grad, *inputs)[1]
        of_grad, *of_inputs = vjp((of_x, of_alpha) if ctx.alpha_grad else (of_x,))
        return of_grad, of_inputs[0], None, of_inputs[1] if len(of_inputs) > 1 else None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int | None]]:
        """As for Entmax."""
        *tensors, kind, alpha_grad = args
        return EntmaxBackward.apply(*_mapped(info, in_dims, tensors), kind, alpha_grad), (0, 0 if alpha_grad else None)


def entmax(x: Tensor, kind: str, alpha: Tensor | None = None) -> Tensor:
    """Entmax along the last dim by the CPU kernels, with gradients where any are needed.

    alpha, for the kind "entmax" alone, broadcasts against x and has size 1 in the last dim.
    """
    x = x.contiguous()
    if alpha is not None:
        alpha = alpha.to(compute_dtype(x.dtype)).expand(*x.shape[:-1], 1)[..., 0].contiguous()
    traced = operators.traced(x) or (alpha is not None and operators.traced(alpha))
    apply = Entmax.apply if traced else torch.ops.multimax.entmax_forward.default
    weights: Tensor = apply(x, alpha, KINDS.index(kind))[0]
    return weights
