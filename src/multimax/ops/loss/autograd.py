"""The losses under autograd: the operators' implementation over chunks, and their gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multimax.ops import checks, dtypes
from multimax.ops.loss import reference
from multimax.ops.loss.call import (
    LinearGrads,
    LinearLossBackwardCall,
    LinearLossCall,
    LossBackwardCall,
    LossCall,
    Rows,
)
from multimax.ops.loss.chunks import rows_of_linear, rows_of_logits, rows_of_logits_backward
from multimax.ops.operators import LIBRARY, apply_of, traced


def unable(target: Tensor) -> str | None:
    """What no implementation of these operators supports."""
    if target.requires_grad and torch.is_grad_enabled():
        return "it gives no gradient to the target"
    if torch._C._are_functorch_transforms_active():
        return "it does not support torch.func's transforms"
    return None


@torch.library.impl(LIBRARY, "loss_rows", "CompositeExplicitAutograd")
def _(*args: Any) -> tuple[Tensor, ...]:
    call = LossCall(*args)
    checks.target_values(call.target, call.x.shape[1], call.ignore_index)
    rows, saved = rows_of_logits(call)
    return *rows.in_compute_dtype(call.x.dtype), saved


@torch.library.impl(LIBRARY, "loss_rows_backward", "CompositeExplicitAutograd")
def _(*args: Any) -> tuple[Tensor, ...]:
    call = LossBackwardCall(*args)
    of_x, of_coefs, of_knots = rows_of_logits_backward(call)
    return of_x, of_coefs.to(call.coefs.dtype), of_knots.to(call.knots.dtype)


@torch.library.impl(LIBRARY, "linear_loss", "CompositeExplicitAutograd")
def _(*args: Any) -> tuple[Tensor, ...]:
    call = LinearLossCall(*args)
    checks.target_values(call.target, call.classes, call.ignore_index)
    rows, _ = rows_of_linear(call)
    return tuple(rows.in_compute_dtype(call.dtype))


@torch.library.impl(LIBRARY, "linear_loss_backward", "CompositeExplicitAutograd")
def _(*args: Any) -> tuple[Tensor, ...]:
    backward = LinearLossBackwardCall(*args)

    def upstream(rows: Tensor | slice, _: Tensor) -> tuple[Tensor, Tensor]:
        return backward.grad_losses[rows], backward.grad_log_sum[rows]

    _, grads = rows_of_linear(backward.call(), upstream, LinearGrads(*backward.needed))
    return tuple(backward.input.new_empty(0) if grad is None else grad for grad in grads)


def _both(grad_losses: Tensor | None, grad_log_sum: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    zeros = torch.zeros_like(like) if grad_losses is None or grad_log_sum is None else like
    return zeros if grad_losses is None else grad_losses, zeros if grad_log_sum is None else grad_log_sum


def _by_reference(
    function: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor | None, ...], grads: tuple[Tensor, ...]
) -> list[Tensor | None]:
    """Gradients that can be differentiated again."""
    # aliases: if one input depends on another, as with tied weights, the gradient must not flow on to it here
    aliases = [t if t is None else t.view_as(t) for t in inputs]
    needed = [t for t in aliases if t is not None and t.requires_grad]
    found = iter(
        torch.autograd.grad(
            function(*aliases), needed, grads, create_graph=True, allow_unused=True, materialize_grads=True
        )
    )
    return [next(found) if t is not None and t.requires_grad else None for t in inputs]


class LossRows(torch.autograd.Function):
    """Rows of the loss for logits (R, C); takes the fields of a LossCall."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        """As the operator."""
        result: tuple[Tensor, ...] = torch.ops.multimax.loss_rows.default(*args)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keeps the logits and three numbers per row."""
        call = LossCall(*inputs)
        _, _, entropy, best, saved = output
        ctx.mark_non_differentiable(entropy, best, saved)
        ctx.set_materialize_grads(False)
        ctx.options = (call.ignore_index, call.smoothing, call.impl, call.full)
        ctx.save_for_backward(call.x, call.target, call.coefs, call.knots, call.weight, saved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of x, coefs and knots."""
        grad_losses, grad_log_sum, *_ = grads
        *tensors, saved = ctx.saved_tensors
        call = LossCall(*tensors, *ctx.options)
        needs: Any = LossCall(*ctx.needs_input_grad)
        both = _both(grad_losses, grad_log_sum, saved[0].to(dtypes.compute_dtype(call.x.dtype)))
        none = (None,) * (1 + len(ctx.options))
        if traced(*both, call.x, call.coefs, call.knots):

            def function(x: Tensor, coefs: Tensor, knots: Tensor) -> tuple[Tensor, Tensor]:
                return reference.cross_entropy(call._replace(x=x, coefs=coefs, knots=knots))

            of_x, of_coefs, of_knots = _by_reference(function, (call.x, call.coefs, call.knots), both)
            return of_x, None, of_coefs, of_knots, *none
        params_grad = needs.coefs or needs.knots
        of_x, of_coefs, of_knots = torch.ops.multimax.loss_rows_backward.default(*both, *call, saved, params_grad)
        if not params_grad:
            of_coefs = of_knots = None
        return of_x if needs.x else None, None, of_coefs, of_knots, *none


class LinearLoss(torch.autograd.Function):
    """Rows of the loss for hidden states; takes the fields of a LinearLossCall. The backward makes the logits again."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        """As the operator."""
        result: tuple[Tensor, ...] = torch.ops.multimax.linear_loss.default(*args)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keeps the tensors that it was given."""
        call = LinearLossCall(*inputs)
        losses, _, entropy, best = output
        ctx.mark_non_differentiable(entropy, best)
        ctx.set_materialize_grads(False)
        ctx.options = call[LINEAR_TENSORS:]
        ctx.save_for_backward(*call[:LINEAR_TENSORS], losses)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of input, weight, bias, coefs and knots."""
        grad_losses, grad_log_sum, *_ = grads
        *tensors, losses = ctx.saved_tensors
        call = LinearLossCall(*tensors, *ctx.options)
        needs: Any = LinearLossCall(*ctx.needs_input_grad)
        both = _both(grad_losses, grad_log_sum, losses.detach())
        given = differentiable(call)
        if traced(*both, *given):
            found = LinearGrads(*_by_reference(_all_at_once(call), given, both))
        else:
            found = _linear_backward(both, call, differentiable(needs))
        result = found._asdict()
        return tuple(result.get(field) for field in LinearLossCall._fields)


LINEAR_TENSORS = LinearLossCall._fields.index("weight") + 1


def differentiable(call: LinearLossCall) -> LinearGrads:
    """The tensors of a call that may have a gradient, or whatever takes their places."""
    return LinearGrads(call.input, call.linear_weight, call.linear_bias, call.coefs, call.knots)


def _all_at_once(call: LinearLossCall) -> Callable[..., tuple[Tensor, Tensor]]:
    """Losses and log-sums as a function of input, weight, bias, coefs and knots, to be differentiated to any order."""
    if call.group:
        raise RuntimeError("multimax: a weight that is split over processes has no second derivatives")

    def function(*tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        return reference.linear_cross_entropy(call._replace(**LinearGrads(*tensors)._asdict()))

    return function


def _linear_backward(grads: tuple[Tensor, Tensor], call: LinearLossCall, needed: LinearGrads) -> LinearGrads:
    """Gradients of input, weight, bias, coefs and knots, from logits that are made again."""
    found = torch.ops.multimax.linear_loss_backward.default(*grads, *call, list(needed))
    return LinearGrads(*(grad if need else None for grad, need in zip(found, needed, strict=True)))


class ReducedLinearLoss(torch.autograd.Function):
    """The sum over rows of scale * loss + z_scale * log-sum^2.

    All gradients are known, but for one factor, once the loss is: they are made in the forward, while the logits of a
    chunk are there, and handed over by the first backward. Any further backward makes them again, in the same way.

    float16 cannot represent the gradient of a mean over many rows, and the loss scaling that would help is part of the
    factor, which comes too late. So the gradients are kept in float32 there, for a sum of rows that weigh 1 at most,
    and scaled at the end.
    """

    @staticmethod
    def forward(
        ctx: Any, scale: Tensor, z_scale: Tensor | None, rest: LinearLossCall, *given: Tensor | None
    ) -> tuple[Tensor, ...]:
        """The loss, and the rows' results; given are input, weight, bias, coefs and knots, and ``rest`` is the
        call without them."""
        call = rest._replace(**LinearGrads(*given)._asdict())
        ctx.kept = torch.ones_like(scale)  # the factor that the kept gradients include
        if call.dtype == torch.float16:
            largest = scale if call.weight is None else scale * call.weight.abs().max().to(scale.dtype)
            if z_scale is not None:
                largest = torch.maximum(largest, 2 * z_scale)
            ctx.kept = torch.where(largest.isfinite() & (largest > 0), 1 / largest, 1.0)

        ctx.rest, ctx.scales = rest, (scale, z_scale)
        rows, ctx.grads = ReducedLinearLoss.make(ctx, call)
        ctx.save_for_backward(*given)
        loss = ReducedLinearLoss.reduce(rows.losses, rows.log_sum, scale, z_scale)
        results = rows._replace(losses=loss).in_compute_dtype(call.dtype)
        ctx.mark_non_differentiable(results.log_sum, results.entropy, results.best)
        return tuple(results)

    @staticmethod
    def make(ctx: Any, call: LinearLossCall) -> tuple[Rows, LinearGrads]:
        """The rows' results, and the gradients times the factor that is kept."""
        scale, z_scale = ctx.scales

        def upstream(_: Tensor | slice, log_sum: Tensor) -> tuple[Tensor, Tensor]:
            of_losses = (scale * ctx.kept).to(log_sum.dtype).expand(log_sum.shape)
            if z_scale is None:
                return of_losses, torch.zeros_like(log_sum)
            return of_losses, 2 * (z_scale * ctx.kept).to(log_sum.dtype) * log_sum

        _, _, _, *needed = ctx.needs_input_grad
        return rows_of_linear(call, upstream, LinearGrads(*needed), keep_wide=call.dtype == torch.float16)

    @staticmethod
    def reduce(losses: Tensor, log_sum: Tensor, scale: Tensor, z_scale: Tensor | None) -> Tensor:
        """One number from the rows' numbers."""
        loss = losses.sum() * scale.to(losses.dtype)
        return loss if z_scale is None else loss + log_sum.square().sum() * z_scale.to(losses.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Gradients of input, weight, bias, coefs and knots."""
        given = ctx.saved_tensors
        call = ctx.rest._replace(**LinearGrads(*given)._asdict())
        scale, z_scale = ctx.scales
        if traced(grad, *given):

            def function(*tensors: Tensor | None) -> tuple[Tensor]:
                losses, log_sum = _all_at_once(call)(*tensors)
                return (ReducedLinearLoss.reduce(losses, log_sum, scale, z_scale),)

            return None, None, None, *_by_reference(function, given, (grad,))
        made, ctx.grads = ctx.grads, None
        if made is None:
            _, made = ReducedLinearLoss.make(ctx, call)
        factor = grad / ctx.kept
        scaled = grad.device.type != "cpu" or factor.item() != 1
        found: list[Tensor | None] = []
        for of_tensor, t in zip(made, given, strict=True):
            if of_tensor is not None and scaled:
                of_tensor.mul_(factor)
            found.append(of_tensor if t is None or of_tensor is None else of_tensor.to(t.dtype))
        return None, None, None, *found


def loss(call: LossCall | LinearLossCall) -> Rows:
    """The rows' results by the operators, with gradients where any are needed."""
    if isinstance(call, LinearLossCall):
        if traced(*differentiable(call)):
            return Rows(*apply_of(LinearLoss)(*call))
        return Rows(*torch.ops.multimax.linear_loss.default(*call))
    if traced(call.x, call.coefs, call.knots):
        *rows, _ = apply_of(LossRows)(*call)
    else:
        *rows, _ = torch.ops.multimax.loss_rows.default(*call)
    return Rows(*rows)


def reduced_linear_loss(call: LinearLossCall, scale: Tensor, z_scale: Tensor | None) -> Rows:
    """The sum over rows of scale * loss + z_scale * log-sum^2 instead of the losses, with its gradients computed on
    the way; the targets have been checked."""
    given = differentiable(call)
    rest = call._replace(**dict.fromkeys(LinearGrads._fields))  # type: ignore[arg-type]
    return Rows(*apply_of(ReducedLinearLoss)(scale, z_scale, rest, *given))
