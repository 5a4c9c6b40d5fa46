"""Attention under autograd, torch.func and vmap: over the operators, whoever implements them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multimax.ops.attention import reference
from multimax.ops.attention.call import DIFFERENTIABLE, AttentionBackwardCall, AttentionCall, log_sums
from multimax.ops.layout import contiguous_rows
from multimax.ops.operators import apply_of, traced


def _one_by_one(function: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    """A vmap rule: one call after the other. Each is a large piece of work that threads share."""
    results = []
    for i in range(info.batch_size):
        selected = [arg if dim is None else arg.select(dim, i) for arg, dim in zip(args, in_dims, strict=True)]
        results.append(function(*selected))
    stacked = tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, tuple(None if part is None else 0 for part in stacked)


class Attention(torch.autograd.Function):
    """Attention of the fields of an AttentionCall: output, log-sum of each row, and what only the backward needs, the
    rows' statistics and what rounding took."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As the operator, and also the log-sums."""
        out, stats, rest = torch.ops.multimax.attention_forward.default(*args, True)
        return out, log_sums(stats), stats, rest

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keeps the tensors, the output and what belongs to it."""
        call = AttentionCall(*inputs)
        out, _, stats, rest = output
        ctx.mark_non_differentiable(stats, rest)
        ctx.set_materialize_grads(False)
        ctx.numbers = call.numbers()
        ctx.save_for_backward(*call.tensors(), out, stats, rest)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of query, key, value, coefs, knots and bias."""
        grad_out, grad_lse, *_ = grads
        if grad_out is None and grad_lse is None:
            return (None,) * len(AttentionCall._fields)
        *tensors, out, stats, rest = ctx.saved_tensors
        call = AttentionCall(*tensors, *ctx.numbers)
        needs: Any = AttentionCall(*ctx.needs_input_grad)
        grad_out = torch.zeros_like(out) if grad_out is None else contiguous_rows(grad_out)
        grad_lse = None if grad_lse is None else grad_lse.contiguous()
        wanted = (needs.coefs or needs.knots, needs.bias)
        function: Callable[..., Any] = torch.ops.multimax.attention_backward.default
        if traced(grad_out, call.query, call.key, call.value, call.coefs, call.knots, call.bias):
            function = AttentionBackward.apply
        found = function(grad_out, grad_lse, *tensors, out, stats, rest, *ctx.numbers, *wanted)
        of_query, of_key, of_value, of_coefs, of_knots, of_bias = found
        return (
            of_query if needs.query else None,
            of_key if needs.key else None,
            of_value if needs.value else None,
            of_coefs if needs.coefs else None,
            of_knots if needs.knots else None,
            None,
            of_bias.to(call.bias.dtype) if needs.bias and call.bias is not None else None,
            *(None,) * (len(AttentionCall._fields) - len(DIFFERENTIABLE) - 1),
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        """One call after the other."""
        return _one_by_one(Attention.apply, info, in_dims, *args)


class AttentionBackward(torch.autograd.Function):
    """The gradients of Attention; takes the fields of an AttentionBackwardCall. Second derivatives go through the
    reference."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        """As the operator."""
        result: tuple[Tensor, ...] = torch.ops.multimax.attention_backward.default(*args)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keeps what the reference needs."""
        backward = AttentionBackwardCall(*inputs)
        call = backward.call()
        ctx.numbers, ctx.params_grad, ctx.bias_grad = call.numbers(), backward.params_grad, backward.bias_grad
        ctx.save_for_backward(backward.grad_out, backward.grad_lse, *call.tensors())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The second derivative, by differentiating the reference twice."""
        grad_out, grad_lse, *tensors = ctx.saved_tensors
        call = AttentionCall(*tensors, *ctx.numbers)
        names = [name for name in DIFFERENTIABLE if getattr(call, name) is not None]
        values = [getattr(call, name) for name in names]
        # the gradients that the first backward gave: of query, key, value, and of parameters and bias if asked for
        skipped = ([] if ctx.params_grad else ["coefs", "knots"]) + ([] if ctx.bias_grad else ["bias"])
        given = [name for name in names if name not in skipped]
        incoming = dict(zip(DIFFERENTIABLE, grads, strict=True))

        def forward(*values: Tensor) -> tuple[Tensor, Tensor]:
            replaced: dict[str, Any] = dict(zip(names, values, strict=True))
            return reference.run(call._replace(**replaced))

        def gradients(grad_out: Tensor, grad_lse: Tensor | None, *values: Tensor) -> tuple[Tensor, ...]:
            (_, lse), vjp = torch.func.vjp(forward, *values)[:2]
            found = vjp((grad_out, torch.zeros_like(lse) if grad_lse is None else grad_lse.to(lse.dtype)))
            by_name = dict(zip(names, found, strict=True))
            return tuple(by_name[name].float() if name == "bias" else by_name[name] for name in given)

        of_lse = None
        if grad_lse is None:
            vjp = torch.func.vjp(lambda grad, *rest: gradients(grad, None, *rest), grad_out, *values)[1]
            of_out, *of_values = vjp(tuple(incoming[name] for name in given))
        else:
            vjp = torch.func.vjp(gradients, grad_out, grad_lse, *values)[1]
            of_out, of_lse, *of_values = vjp(tuple(incoming[name] for name in given))
        found = dict(zip(names, of_values, strict=True)) | {"grad_out": of_out, "grad_lse": of_lse}
        return tuple(found.get(name) for name in AttentionBackwardCall._fields)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        """One call after the other."""
        return _one_by_one(AttentionBackward.apply, info, in_dims, *args)


def attention(call: AttentionCall, with_lse: bool = True) -> tuple[Tensor, Tensor | None]:
    """Output and, if asked for, log-sums by the operators, with gradients where any are needed."""
    if traced(call.query, call.key, call.value, call.coefs, call.knots, call.bias):
        out, lse, *_ = apply_of(Attention)(*call)
        return out, lse
    out, stats, _ = torch.ops.multimax.attention_forward.default(*call, False)
    return out, log_sums(stats) if with_lse else None
