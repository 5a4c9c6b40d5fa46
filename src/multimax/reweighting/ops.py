"""sparsemax and entmax15 of the compiled library: what the compiler has to know of them, and their gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multimax import ops
from multimax.reweighting import reference

KINDS = ("sparsemax", "entmax15")  # as in csrc/entmax.h

if ops.unavailable is None:

    @torch.library.register_fake("multimax::entmax_forward")
    def _(x: Tensor, kind: int) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        return torch.empty_like(x), x.new_empty((*x.shape[:-1], 2), dtype=dtype)

    @torch.library.register_fake("multimax::entmax_backward")
    def _(grad: Tensor, x: Tensor, stats: Tensor, kind: int) -> Tensor:
        ops.one_device(grad, x, stats)
        return torch.empty_like(x)


def _reference(kind: int) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        weights: Tensor = getattr(reference, KINDS[kind])(*reference.split(x, -1, None))
        return weights.to(x.dtype)

    return function


class Entmax(torch.autograd.Function):
    """sparsemax or entmax15 along the last dim of a contiguous x, and two numbers a row for the backward."""

    @staticmethod
    def forward(x: Tensor, kind: int) -> tuple[Tensor, Tensor]:
        """As the operation."""
        result: tuple[Tensor, Tensor] = torch.ops.multimax.entmax_forward.default(x, kind)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keeps the input: the output has lost what rounding to half precision took."""
        x, ctx.kind = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None]:
        """The gradient of x."""
        x, stats = ctx.saved_tensors
        function = EntmaxBackward.apply if ops.traced(grad, x) else torch.ops.multimax.entmax_backward.default
        return function(grad.contiguous(), x, stats, ctx.kind), None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, kind: int
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """The mapped dim is one more in front."""
        return Entmax.apply(x.movedim(in_dims[0], 0).contiguous(), kind), (0, 0)


class EntmaxBackward(torch.autograd.Function):
    """The gradient of Entmax. Its own gradients go through the reference."""

    @staticmethod
    def forward(grad: Tensor, x: Tensor, stats: Tensor, kind: int) -> Tensor:
        """As the operation."""
        result: Tensor = torch.ops.multimax.entmax_backward.default(grad, x, stats, kind)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keeps what the reference needs."""
        grad, x, _, ctx.kind = inputs
        ctx.save_for_backward(grad, x)

    @staticmethod
    def backward(ctx: Any, grad_of_grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """The second derivative, by differentiating the reference twice."""
        function = _reference(ctx.kind)

        def gradient(grad: Tensor, x: Tensor) -> Tensor:
            result: Tensor = torch.func.vjp(function, x)[1](grad)[0]
            return result

        of_grad, of_x = torch.func.vjp(gradient, *ctx.saved_tensors)[1](grad_of_grad)
        return of_grad, of_x, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        """As for Entmax."""
        *tensors, kind = args
        size = info.batch_size
        moved = [
            (t.unsqueeze(0).expand(size, *t.shape) if dim is None else t.movedim(dim, 0)).contiguous()
            for t, dim in zip(tensors, in_dims, strict=False)
        ]
        return EntmaxBackward.apply(*moved, kind), 0


def entmax(x: Tensor, kind: str) -> Tensor:
    """sparsemax or entmax15 along the last dim by the CPU kernels, with a gradient where one is needed."""
    x = x.contiguous()
    apply = Entmax.apply if ops.traced(x) else torch.ops.multimax.entmax_forward.default
    weights: Tensor = apply(x, KINDS.index(kind))[0]
    return weights
