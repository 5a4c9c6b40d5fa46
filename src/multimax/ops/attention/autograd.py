"""The attention operations of the compiled library: what the compiler has to know of them, and their gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multimax.ops import kernels, operators
from multimax.ops.attention import reference

# Arguments of the forward operation, in order. Tensors: query, key, value, coefs, knots, mask, bias, query_starts,
# key_starts, seed; then dropout_p, scale, causal, left, right.
TENSORS = 10
DIFFERENTIABLE = (0, 1, 2, 3, 4, 6)  # query, key, value, coefs, knots, bias


def _heads_like(like: Tensor, length: int, width: int) -> Tensor:
    """(B, H, L, D), laid out in memory as (B, L, H, D) if `like` is: as csrc/attention_bindings.cpp has it."""
    b, h = like.shape[:2]
    if like.stride(1) < like.stride(2):
        return like.new_empty(b, length, h, width).transpose(1, 2)
    return like.new_empty(b, h, length, width)


if kernels.unavailable is None:

    @torch.library.register_fake("multimax::attention_forward")
    def _(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        query, value, for_backward = args[0], args[2], args[-1]
        operators.one_device(*args[:TENSORS])
        out = _heads_like(query, query.shape[2], value.shape[3])
        with_rest = for_backward and query.dtype != torch.float32
        rest = _heads_like(query, query.shape[2], value.shape[3]) if with_rest else query.new_empty(0)
        return out, query.new_empty((2, *query.shape[:3]), dtype=torch.float32), rest

    @torch.library.register_fake("multimax::attention_backward")
    def _(grad_out: Tensor, grad_lse: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
        query, key, value, coefs, knots, _mask, bias = args[:7]
        params_grad, bias_grad = args[-2:]
        operators.one_device(grad_out, grad_lse, *args[: TENSORS + 3])
        size = coefs.shape if params_grad else (0,)
        return (
            query.new_empty(query.shape),
            _heads_like(key, key.shape[2], key.shape[3]),
            _heads_like(value, value.shape[2], value.shape[3]),
            coefs.new_empty(size),
            knots.new_empty(size),
            query.new_empty(bias.shape if bias_grad else (0,), dtype=torch.float32),
        )


def _mapped_one_by_one(function: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """A vmap rule: one call after the other. Each is a large piece of work with threads of its own."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        results = []
        for i in range(info.batch_size):
            own = [arg if dim is None else arg.select(dim, i) for arg, dim in zip(args, in_dims, strict=True)]
            results.append(function(*own))
        stacked = tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*results, strict=True))
        return stacked, tuple(None if part is None else 0 for part in stacked)

    return rule


def _reference(*args: Any) -> tuple[Tensor, Tensor]:
    """The reference for a call's arguments, packed sequences one after the other."""
    query, key, value, coefs, knots, mask, bias, query_starts, key_starts, seed, *options = args
    if query_starts is None:
        return reference.attention(query, key, value, coefs, knots, mask, bias, seed, *options)
    q, k = query_starts.tolist(), key_starts.tolist()
    outs, lses = [], []
    for i in range(len(q) - 1):
        queries, keys = slice(q[i], q[i + 1]), slice(k[i], k[i + 1])
        own = (query[:, :, queries], key[:, :, keys], value[:, :, keys])
        first = i * query.shape[1]
        out, lse = reference.attention(*own, coefs, knots, mask, bias, seed, *options, first_head=first)
        outs.append(out)
        lses.append(lse)
    if not outs:  # no sequences: nothing, of everything
        return reference.attention(query, key, value, coefs, knots, mask, bias, seed, *options)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _rows_side_by_side(t: Tensor) -> Tensor:
    return t if t.shape[-1] <= 1 or t.stride(-1) == 1 else t.contiguous()


class Attention(torch.autograd.Function):
    """Output, log-sum of each row, and what only the backward needs: the rows' statistics, and what rounding took."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As the operation, and the log-sums beside."""
        out, stats, rest = torch.ops.multimax.attention_forward.default(*args, True)
        return out, stats[0] + stats[1].log(), stats, rest

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keeps the tensors, the output and what belongs to it."""
        out, _, stats, rest = output
        ctx.mark_non_differentiable(stats, rest)
        ctx.set_materialize_grads(False)
        ctx.options = inputs[TENSORS:]
        ctx.save_for_backward(*inputs[:TENSORS], out, stats, rest)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of query, key, value, coefs, knots and bias."""
        none = (None,) * (TENSORS + len(ctx.options))
        grad_out, grad_lse, *_ = grads
        if grad_out is None and grad_lse is None:
            return none
        *tensors, out, stats, rest = ctx.saved_tensors
        grad_out = torch.zeros_like(out) if grad_out is None else _rows_side_by_side(grad_out)
        grad_lse = None if grad_lse is None else grad_lse.contiguous()
        needs = ctx.needs_input_grad
        wanted = (needs[3] or needs[4], needs[6])
        traced = operators.traced(grad_out, *(tensors[i] for i in DIFFERENTIABLE if tensors[i] is not None))
        function = AttentionBackward.apply if traced else torch.ops.multimax.attention_backward.default
        found = function(grad_out, grad_lse, *tensors, out, stats, rest, *ctx.options, *wanted)
        result: list[Tensor | None] = list(none)
        for i, grad in zip(DIFFERENTIABLE, found, strict=True):
            if needs[i]:
                result[i] = grad if i != 6 else grad.to(tensors[6].dtype)
        return tuple(result)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        """One call after the other."""
        return _mapped_one_by_one(Attention.apply)(info, in_dims, *args)


class AttentionBackward(torch.autograd.Function):
    """The gradients of Attention. Their own gradients go through the reference."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        """As the operation."""
        result: tuple[Tensor, ...] = torch.ops.multimax.attention_backward.default(*args)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keeps what the reference needs."""
        grad_out, grad_lse, *rest = inputs
        *ctx.options, ctx.params_grad, ctx.bias_grad = rest[TENSORS + 3 :]
        ctx.save_for_backward(grad_out, grad_lse, *rest[:TENSORS])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The second derivative, by differentiating the reference twice."""
        grad_out, grad_lse, *tensors = ctx.saved_tensors
        places = [i for i in DIFFERENTIABLE if tensors[i] is not None]
        # the gradients that the first backward gave: query, key, value, and parameters and bias if asked for
        given = [i for i in places if i < 3 or (i in (3, 4) and ctx.params_grad) or (i == 6 and ctx.bias_grad)]
        of_given = [grads[DIFFERENTIABLE.index(i)] for i in given]

        def forward(*values: Tensor) -> tuple[Tensor, Tensor]:
            full = list(tensors)
            for i, value in zip(places, values, strict=True):
                full[i] = value
            return _reference(*full, *ctx.options)

        def gradients(grad_out: Tensor, grad_lse: Tensor | None, *values: Tensor) -> tuple[Tensor, ...]:
            (_, lse), vjp = torch.func.vjp(forward, *values)[:2]
            found = vjp((grad_out, torch.zeros_like(lse) if grad_lse is None else grad_lse.to(lse.dtype)))
            kept = [grad for i, grad in zip(places, found, strict=True) if i in given]
            return tuple(g.float() if i == 6 else g for i, g in zip(given, kept, strict=True))

        values = [tensors[i] for i in places]
        if grad_lse is None:
            vjp = torch.func.vjp(lambda grad, *rest: gradients(grad, None, *rest), grad_out, *values)[1]
            of_out, *of_values = vjp(tuple(of_given))
            of_lse = None
        else:
            vjp = torch.func.vjp(gradients, grad_out, grad_lse, *values)[1]
            of_out, of_lse, *of_values = vjp(tuple(of_given))
        result: list[Tensor | None] = [None] * (TENSORS + 7 + len(ctx.options))
        result[0], result[1] = of_out, of_lse
        for i, grad in zip(places, of_values, strict=True):
            result[2 + i] = grad
        return tuple(result)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        """One call after the other."""
        return _mapped_one_by_one(AttentionBackward.apply)(info, in_dims, *args)


def attention(impl: str, *args: Any) -> tuple[Tensor, Tensor]:
    """Output and log-sums by the kernels ("cpu") or the reference; arguments as the operation takes them."""
    if impl == "reference":
        return _reference(*args)
    tensors = [args[i] for i in DIFFERENTIABLE if args[i] is not None]
    if operators.traced(*tensors):
        plain = not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())
        # Attention.apply inspects signatures at every call, for the sake of torch.func and the compiler
        apply = super(torch.autograd.Function, Attention).apply if plain else Attention.apply
        out, lse, *_ = apply(*args)
        return out, lse
    out, stats, _ = torch.ops.multimax.attention_forward.default(*args, False)
    return out, stats[0] + stats[1].log()
