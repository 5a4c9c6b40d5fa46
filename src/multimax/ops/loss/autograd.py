"""The losses as operations, which the compiler takes as they are, and their gradients."""

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from multimax.ops import checks, dtypes, operators
from multimax.ops.loss import reference
from multimax.ops.loss.chunks import Rows, Setting, rows_of_linear, rows_of_logits, rows_of_logits_backward

# A group of processes goes by its name.

_groups: WeakValueDictionary[str, Any] = WeakValueDictionary()


def group_name(group: Any) -> str:
    """The name by which the operations know a group; "" for none."""
    if group is None:
        return ""
    _groups[group.group_name] = group
    name: str = group.group_name
    return name


def part_of(linear_weight: Tensor, group: Any) -> tuple[int, int]:
    """The first class of this process's part of a weight, and the number of all classes."""
    if group is None:
        return 0, linear_weight.shape[0]
    import torch.distributed as dist

    sizes = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=linear_weight.device)
    rank = dist.get_rank(group)
    sizes[rank] = linear_weight.shape[0]
    dist.all_reduce(sizes, group=group)
    return int(sizes[:rank].sum()), int(sizes.sum())


_SETTING = "Tensor? weight, int ignore_index, float smoothing, str impl, bool full"
_PART = "int first_class, int classes, str group"
_LINEAR = (
    "Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor target, Tensor coefs, Tensor knots, "
    f"{_SETTING}, {_PART}, int chunk, ScalarType dtype"
)
_library = torch.library.Library("multimax", "FRAGMENT")
_library.define(
    f"loss_rows(Tensor x, Tensor target, Tensor coefs, Tensor knots, {_SETTING})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "loss_rows_backward(Tensor grad_losses, Tensor grad_log_sum, Tensor x, Tensor target, Tensor coefs, Tensor knots, "
    f"{_SETTING}, Tensor saved, bool params_grad) -> (Tensor, Tensor, Tensor)"
)
_library.define(f"linear_loss({_LINEAR}) -> (Tensor, Tensor, Tensor, Tensor)")
_library.define(
    f"linear_loss_backward(Tensor grad_losses, Tensor grad_log_sum, {_LINEAR}, bool[] needed)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _setting(*args: Any) -> Setting:
    """From an operation's arguments."""
    weight, ignore_index, smoothing, impl, full, *part = args
    if not part:
        return Setting(weight, ignore_index, smoothing, impl, full)
    first_class, classes, group = part
    return Setting(weight, ignore_index, smoothing, impl, full, first_class, classes, _groups[group] if group else None)


@torch.library.impl(_library, "loss_rows", "CompositeExplicitAutograd")
def _(x: Tensor, target: Tensor, coefs: Tensor, knots: Tensor, *args: Any) -> tuple[Tensor, ...]:
    checks.target_values(target, x.shape[1], args[1])
    rows, saved = rows_of_logits(x, target, coefs, knots, _setting(*args))
    return *_in_compute_dtype(rows, x.dtype), saved


@torch.library.impl(_library, "loss_rows_backward", "CompositeExplicitAutograd")
def _(
    grad_losses: Tensor, grad_log_sum: Tensor, x: Tensor, target: Tensor, coefs: Tensor, knots: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    *setting, saved, params_grad = args
    out, grad_coefs, grad_knots = rows_of_logits_backward(
        grad_losses, grad_log_sum, x, target, coefs, knots, saved, _setting(*setting), params_grad
    )
    return out, grad_coefs.to(coefs.dtype), grad_knots.to(knots.dtype)


@torch.library.impl(_library, "linear_loss", "CompositeExplicitAutograd")
def _(*args: Any) -> tuple[Tensor, ...]:
    input, linear_weight, linear_bias, target, coefs, knots, *setting, chunk, dtype = args
    checks.target_values(target, setting[6], setting[1])
    rows, _ = rows_of_linear(input, linear_weight, linear_bias, target, coefs, knots, _setting(*setting), chunk, dtype)
    return _in_compute_dtype(rows, dtype)


@torch.library.impl(_library, "linear_loss_backward", "CompositeExplicitAutograd")
def _(grad_losses: Tensor, grad_log_sum: Tensor, *args: Any) -> tuple[Tensor, ...]:
    input, linear_weight, linear_bias, target, coefs, knots, *setting, chunk, dtype, needed = args
    _, grads = rows_of_linear(
        input,
        linear_weight,
        linear_bias,
        target,
        coefs,
        knots,
        _setting(*setting),
        chunk,
        dtype,
        lambda rows, _: (grad_losses[rows], grad_log_sum[rows]),
        tuple(needed),
    )
    return tuple(input.new_empty(0) if grad is None else grad for grad in grads)


def _in_compute_dtype(rows: Rows, dtype: torch.dtype) -> tuple[Tensor, ...]:
    dtype = dtypes.compute_dtype(dtype)
    return *(t.to(dtype) for t in rows[:3]), rows.best


def _like_rows(count: Any, like: Tensor, dtype: torch.dtype, full: bool) -> tuple[Tensor, ...]:
    dtype = dtypes.compute_dtype(dtype)
    some = count if full else 0
    sizes = ((count, dtype), (count, dtype), (some, dtype), (some, torch.int64))
    return tuple(like.new_empty(size, dtype=dtype) for size, dtype in sizes)


@torch.library.register_fake("multimax::loss_rows", lib=_library)
def _(x: Tensor, target: Tensor, coefs: Tensor, knots: Tensor, *args: Any) -> tuple[Tensor, ...]:
    operators.one_device(x, target, coefs, knots)
    stats = torch.float64 if args[3] == "cpu" else dtypes.compute_dtype(x.dtype)
    rows = _like_rows(x.shape[0], x, x.dtype, args[4])
    return *rows, x.new_empty((3, x.shape[0]), dtype=stats)


@torch.library.register_fake("multimax::loss_rows_backward", lib=_library)
def _(
    grad_losses: Tensor, grad_log_sum: Tensor, x: Tensor, target: Tensor, coefs: Tensor, knots: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    size = coefs.shape if args[-1] else (0,)
    return x.new_empty(x.shape), coefs.new_empty(size), knots.new_empty(size)


@torch.library.register_fake("multimax::linear_loss", lib=_library)
def _(*args: Any) -> tuple[Tensor, ...]:
    input, dtype, full = args[0], args[-1], args[10]
    operators.one_device(*args[:2], *args[3:6])
    return _like_rows(input.shape[0], input, dtype, full)


@torch.library.register_fake("multimax::linear_loss_backward", lib=_library)
def _(grad_losses: Tensor, grad_log_sum: Tensor, *args: Any) -> tuple[Tensor, ...]:
    input, linear_weight, linear_bias, _, coefs, knots = args[:6]
    needed = args[-1]
    tensors = (input, linear_weight, linear_bias, coefs, knots)
    return tuple(
        t.new_empty(t.shape) if need and t is not None else input.new_empty(0)
        for t, need in zip(tensors, needed, strict=True)
    )


def _both(grad_losses: Tensor | None, grad_log_sum: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    zeros = torch.zeros_like(like) if grad_losses is None or grad_log_sum is None else like
    return zeros if grad_losses is None else grad_losses, zeros if grad_log_sum is None else grad_log_sum


def _by_reference(
    function: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor | None], grads: tuple[Tensor, ...]
) -> list[Tensor | None]:
    """Gradients that can be differentiated again."""
    # aliases: an input that depends on another, as with tied weights, is not to be followed back to it here
    aliases = [t if t is None else t.view_as(t) for t in inputs]
    needed = [t for t in aliases if t is not None and t.requires_grad]
    found = iter(
        torch.autograd.grad(
            function(*aliases), needed, grads, create_graph=True, allow_unused=True, materialize_grads=True
        )
    )
    return [next(found) if t is not None and t.requires_grad else None for t in inputs]


class LossRows(torch.autograd.Function):
    """Rows of the loss for logits (R, C)."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        """As the operation."""
        result: tuple[Tensor, ...] = torch.ops.multimax.loss_rows.default(*args)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keeps the logits and three numbers a row."""
        x, target, coefs, knots, weight, *ctx.setting = inputs
        _, _, entropy, best, saved = output
        ctx.mark_non_differentiable(entropy, best, saved)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, target, coefs, knots, weight, saved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of x, coefs and knots."""
        x, target, coefs, knots, weight, saved = ctx.saved_tensors
        both = _both(grads[0], grads[1], saved[0].to(dtypes.compute_dtype(x.dtype)))
        none = (None,) * (1 + len(ctx.setting))
        if operators.traced(*both, x, coefs, knots):
            ignore_index, smoothing, *_ = ctx.setting
            found = _by_reference(
                lambda x, coefs, knots: reference.cross_entropy(
                    x, target, coefs, knots, weight, ignore_index, smoothing
                ),
                [x, coefs, knots],
                both,
            )
            return found[0], None, found[1], found[2], *none
        needs = ctx.needs_input_grad
        params_grad = needs[2] or needs[3]
        out, grad_coefs, grad_knots = torch.ops.multimax.loss_rows_backward.default(
            *both, x, target, coefs, knots, weight, *ctx.setting, saved, params_grad
        )
        if not params_grad:
            grad_coefs = grad_knots = None
        return out if needs[0] else None, None, grad_coefs, grad_knots, *none


class LinearLoss(torch.autograd.Function):
    """Rows of the loss for hidden states; the backward makes the logits again."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        """As the operation."""
        result: tuple[Tensor, ...] = torch.ops.multimax.linear_loss.default(*args)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keeps the tensors that it was given."""
        *tensors, weight = inputs[:7]
        ctx.setting = inputs[7:]
        losses, _, entropy, best = output
        ctx.mark_non_differentiable(entropy, best)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, weight, losses)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of input, weight, bias, coefs and knots."""
        *tensors, weight, losses = ctx.saved_tensors
        both = _both(grads[0], grads[1], losses.detach())
        if operators.traced(*both, *(t for t in tensors if t is not None)):
            found = _by_reference(_all_at_once(tensors[3], weight, ctx.setting), [*tensors[:3], *tensors[4:]], both)
        else:
            found = _linear_backward(both, tensors, weight, ctx.setting, ctx.needs_input_grad)
        return *found[:3], None, *found[3:], *(None,) * (1 + len(ctx.setting))


def _all_at_once(target: Tensor, weight: Tensor | None, setting: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Losses and log-sums as a function of input, weight, bias, coefs and knots, to be differentiated to any order."""
    ignore_index, smoothing, _, _, _, _, group, _, dtype = setting
    if group:
        raise RuntimeError("multimax: a weight in parts over processes gives no second derivatives")

    def function(
        input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, coefs: Tensor, knots: Tensor
    ) -> tuple[Tensor, Tensor]:
        options = (weight, ignore_index, smoothing, dtype)
        return reference.linear_cross_entropy(input, linear_weight, linear_bias, target, coefs, knots, *options)

    return function


def _linear_backward(
    grads: tuple[Tensor, Tensor],
    tensors: list[Tensor],
    weight: Tensor | None,
    setting: Any,
    needs: tuple[bool, ...],
) -> list[Tensor | None]:
    """Gradients of input, weight, bias, coefs and knots, from logits that are made again."""
    needed = [needs[0], needs[1], needs[2], needs[4], needs[5]]
    found = torch.ops.multimax.linear_loss_backward.default(*grads, *tensors, weight, *setting, needed)
    return [grad if need else None for grad, need in zip(found, needed, strict=True)]


class ReducedLinearLoss(torch.autograd.Function):
    """The sum over rows of scale * loss + z_scale * log-sum^2.

    All gradients are known, but for one factor, once the loss is: they are made in the forward, while the logits of a
    chunk are there, and handed over by the first backward. Any further backward makes the logits again.

    float16 has no room for the gradient of a mean over many rows, and the loss scaling that makes some is part of the
    factor, which comes too late: there the gradients are kept for a sum of rows that weigh 1 at most, in float32, and
    brought to the right size at last.
    """

    @staticmethod
    def forward(
        ctx: Any, scale: Tensor, z_scale: Tensor | None, tensors: tuple[Any, ...], *differentiable: Tensor | None
    ) -> tuple[Tensor, ...]:
        """The loss, and the rows' results beside; differentiable are input, weight, bias, coefs and knots."""
        target, weight, *setting = tensors
        *part, chunk, dtype = setting
        input, linear_weight, linear_bias, coefs, knots = differentiable
        assert input is not None
        assert linear_weight is not None
        assert coefs is not None
        assert knots is not None
        ctx.kept = torch.ones_like(scale)  # what the gradients are kept times
        if dtype == torch.float16:
            largest = 1 if weight is None else weight.abs().max().to(scale.dtype)
            ctx.kept = torch.where((scale * largest).isfinite() & (scale * largest > 0), 1 / (scale * largest), 1.0)

        def upstream(rows: Tensor, log_sum: Tensor) -> tuple[Tensor, Tensor]:
            of_losses = (scale * ctx.kept).to(log_sum.dtype).expand(rows.shape)
            if z_scale is None:
                return of_losses, torch.zeros_like(log_sum)
            return of_losses, 2 * (z_scale * ctx.kept).to(log_sum.dtype) * log_sum

        rows, ctx.grads = rows_of_linear(
            input,
            linear_weight,
            linear_bias,
            target,
            coefs,
            knots,
            _setting(weight, *part),
            chunk,
            dtype,
            upstream,
            ctx.needs_input_grad[3:],
            keep_wide=dtype == torch.float16,
        )
        ctx.tensors, ctx.scales = tensors, (scale, z_scale)
        ctx.save_for_backward(*differentiable, rows.log_sum)
        loss = ReducedLinearLoss.reduce(rows.losses, rows.log_sum, scale, z_scale)
        results = _in_compute_dtype(Rows(loss, *rows[1:]), dtype)
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    def reduce(losses: Tensor, log_sum: Tensor, scale: Tensor, z_scale: Tensor | None) -> Tensor:
        """One number from those of the rows."""
        loss = losses.sum() * scale.to(losses.dtype)
        return loss if z_scale is None else loss + log_sum.square().sum() * z_scale.to(losses.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of input, weight, bias, coefs and knots."""
        grad = grads[0]
        *differentiable, log_sum = ctx.saved_tensors
        target, weight, *setting = ctx.tensors
        scale, z_scale = ctx.scales
        if operators.traced(grad, *(t for t in differentiable if t is not None)):

            def function(*inputs: Tensor | None) -> tuple[Tensor]:
                rows = _all_at_once(target, weight, setting)(*inputs)
                return (ReducedLinearLoss.reduce(*rows, scale, z_scale),)

            return None, None, None, *_by_reference(function, differentiable, (grad,))
        made, ctx.grads = ctx.grads, None
        if made is not None:
            factor = grad / ctx.kept
            if grad.device.type != "cpu" or factor.item() != 1:
                for own in made:
                    if own is not None:
                        own.mul_(factor)
            like = (
                own if t is None or own is None else own.to(t.dtype)
                for own, t in zip(made, differentiable, strict=True)
            )
            return None, None, None, *like
        of_log_sum = torch.zeros_like(log_sum) if z_scale is None else 2 * grad * z_scale * log_sum
        both = ((grad * scale).expand(log_sum.shape[0]), of_log_sum.to(grad.dtype))
        input, linear_weight, linear_bias, coefs, knots = differentiable
        tensors = [input, linear_weight, linear_bias, target, coefs, knots]
        needs = ctx.needs_input_grad[3:]
        found = _linear_backward(both, tensors, weight, setting, (*needs[:3], False, *needs[3:]))
        return None, None, None, *found
