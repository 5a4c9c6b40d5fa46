"""Cross-entropy of MultiMax row by row: the sums behind it by the compiled library or by plain PyTorch, the loop over
chunks of logits, and the gradients.

Shapes: R rows, C classes, D entries of a hidden state. A target is (R,) of class indices or (R, C) of probabilities.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from multimax import checks, ops, reference

# Planes of the rows' sums, as in csrc/loss.h.
TOP, TOTAL, SCORE, MASS, DOT, SPREAD, BEST = range(7)


class Rows(NamedTuple):
    """What is found of each row, (R,) each; the last two only if asked for, else empty."""

    losses: Tensor
    log_sum: Tensor
    entropy: Tensor
    best: Tensor  # the class with the largest weight


@dataclass(frozen=True)
class Setting:
    """All that a loss depends on beside the logits, the target and the parameters."""

    weight: Tensor | None  # (C,) for each class
    ignore_index: int
    smoothing: float
    impl: str  # "cpu", or "plain" for plain PyTorch
    full: bool  # entropy and best class too
    first_class: int = 0
    classes: int | None = None  # of all processes, where each has a part
    group: Any = None

    def own_weight(self, x: Tensor) -> Tensor | None:
        """The weights of x's classes, in the dtype it is computed in."""
        if self.weight is None:
            return None
        own = self.weight[self.first_class : self.first_class + x.shape[1]]
        return own.to(reference.compute_dtype(x.dtype)).contiguous()

    def kernel_arguments(self, x: Tensor, target: Tensor, coefs: Tensor, knots: Tensor) -> tuple[Any, ...]:
        """As the compiled library wants them."""
        hard, soft = (target.contiguous(), None) if _indices(target) else (None, side_by_side(target))
        if soft is not None and soft.dtype not in (x.dtype, reference.compute_dtype(x.dtype)):
            soft = soft.to(reference.compute_dtype(x.dtype))
        tensors = (x, hard, soft, coefs, knots, self.own_weight(x))
        return *tensors, self.smoothing, self.classes or x.shape[1], self.first_class, self.ignore_index


def side_by_side(t: Tensor) -> Tensor:
    """With the entries of a row next to each other in memory."""
    return t if t.shape[1] <= 1 or t.stride(1) == 1 else t.contiguous()


def exact_dtype(device: torch.device) -> torch.dtype:
    """For sums over many rows: float64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def _indices(target: Tensor) -> bool:
    return not target.is_floating_point()


def _wanted(x: Tensor, target: Tensor, setting: Setting) -> Tensor:
    """(R or 1, C): q of csrc/loss.h, what the loss wants of each class but for an index."""
    dtype = reference.compute_dtype(x.dtype)
    q = x.new_full((1, 1), setting.smoothing / max(setting.classes or x.shape[1], 1), dtype=dtype)
    if not _indices(target):
        q = q + (1 - setting.smoothing) * target.to(dtype)
    weight = setting.own_weight(x)
    return q.expand(-1, x.shape[1]) if weight is None else q * weight


def _entry(x: Tensor, target: Tensor, setting: Setting) -> tuple[Tensor, Tensor]:
    """Where in a row its index points to, and whether it lies in this part of the row."""
    entry = target - setting.first_class
    here = (entry >= 0) & (entry < x.shape[1]) & (target != setting.ignore_index)
    return torch.where(here, entry, 0)[:, None], here


def _sums(x: Tensor, target: Tensor, coefs: Tensor, knots: Tensor, setting: Setting) -> Tensor:
    """The seven planes of csrc/loss.h, (7, R)."""
    if setting.impl == "cpu":
        arguments = setting.kernel_arguments(x, target, coefs, knots)
        result: Tensor = torch.ops.multimax.loss_forward.default(*arguments, setting.full)
        return result
    masked, s = reference.scores(x, coefs, knots)
    planes = s.new_zeros(7, x.shape[0])
    if x.shape[1] == 0:
        planes[TOP] = -torch.inf
        return planes
    planes[TOP], best = s.max(-1)
    shifted = s - torch.where(planes[TOP] == -torch.inf, 0, planes[TOP])[:, None]
    exp = shifted.exp()
    planes[TOTAL] = exp.sum(-1)
    if _indices(target):
        entry, here = _entry(x, target, setting)
        planes[SCORE] = torch.where(here, s.gather(1, entry)[:, 0], 0)
    if setting.smoothing or not _indices(target):
        q = _wanted(x, target, setting)
        planes[MASS] = torch.where(masked, 0, q).sum(-1)
        planes[DOT] = torch.where((s == -torch.inf) & (q == 0), 0, q * shifted).sum(-1)
    if setting.full:
        planes[SPREAD] = torch.where(exp == 0, 0, exp * shifted).sum(-1)
        planes[BEST] = torch.where(planes[TOP] == -torch.inf, -1, best + setting.first_class).to(s.dtype)
    return torch.where(target == setting.ignore_index, 0, planes) if _indices(target) else planes


def _times(a: Tensor, b: Tensor) -> Tensor:
    """a b, and 0 where a is 0, whatever b."""
    return torch.where(a == 0, 0, a * b)


def _joined(sums: Tensor, setting: Setting) -> Tensor:
    """The sums of whole rows, from those of the parts that the processes of a group have."""
    if setting.group is None:
        return sums
    import torch.distributed as dist

    assert setting.classes is not None
    top = sums[TOP].clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group=setting.group)
    highest = sums[TOP] == top
    below = torch.where(highest, 0, sums[TOP] - top)  # also where both are -inf
    factor = below.exp()
    best = torch.where(highest, sums[BEST], setting.classes)
    joined = sums.clone()
    joined[SPREAD] = _times(factor, sums[SPREAD] + _times(sums[TOTAL], below))
    joined[DOT] = sums[DOT] + _times(sums[MASS], below)
    joined[TOTAL] *= factor
    dist.all_reduce(joined, dist.ReduceOp.SUM, group=setting.group)
    dist.all_reduce(best, dist.ReduceOp.MIN, group=setting.group)
    joined[TOP], joined[BEST] = top, best
    return joined


def _rows_of(sums: Tensor, target: Tensor, setting: Setting) -> tuple[Rows, Tensor]:
    """Losses and the rest from the sums, and the sum of all that a row's loss wants."""
    log_total = sums[TOTAL].log()
    log_sum = sums[TOP] + log_total
    losses, mass = _times(sums[MASS], log_total) - sums[DOT], sums[MASS]
    if _indices(target):
        ignored = target == setting.ignore_index
        share = torch.full_like(log_sum, 1 - setting.smoothing)
        if setting.weight is not None:
            share = share * setting.weight.to(share.dtype)[torch.where(ignored, 0, target)]
        absent = sums[SCORE] == -torch.inf
        losses = losses + share * torch.where(absent, torch.inf, (sums[TOP] - sums[SCORE]) + log_total)
        mass = mass + torch.where(absent, 0, share)
        losses, log_sum, mass = (torch.where(ignored, 0, value) for value in (losses, log_sum, mass))
    if not setting.full:
        return Rows(losses, log_sum, losses.new_empty(0), target.new_empty(0, dtype=torch.int64)), mass
    entropy = torch.where(sums[TOTAL] > 0, log_total - sums[SPREAD] / sums[TOTAL], 0)
    entropy = torch.where(sums[TOTAL].isnan(), torch.nan, entropy)
    return Rows(losses, log_sum, entropy, sums[BEST].to(torch.int64)), mass


def _gradients(
    x: Tensor,
    target: Tensor,
    coefs: Tensor,
    knots: Tensor,
    setting: Setting,
    sums: Tensor,
    scale: Tensor,
    p_scale: Tensor,
    params_grad: bool,
    out: Tensor,
) -> tuple[Tensor, Tensor]:
    """Writes the gradient of x to out, which may be x; returns those of coefs and knots.

    The gradient of s is p_scale p - scale q, with a scale of each for every row.
    """
    none = coefs.new_zeros(coefs.shape if params_grad else 0, dtype=exact_dtype(x.device))
    if x.shape[1] == 0:
        return none, none.clone()
    if setting.impl == "cpu":
        arguments = setting.kernel_arguments(x, target, coefs, knots)
        scales = (sums.contiguous(), scale.double().contiguous(), p_scale.double().contiguous())
        result: tuple[Tensor, Tensor] = torch.ops.multimax.loss_backward.default(*arguments, *scales, params_grad, out)
        return result
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (x, coefs, knots)]
        masked, s = reference.scores(*leaves)
    weights = (s.detach() - sums[TOP][:, None].to(s.dtype)).exp() * (p_scale / sums[TOTAL]).to(s.dtype)[:, None]
    grad = weights - scale.to(s.dtype)[:, None] * _wanted(x, target, setting)
    if _indices(target):
        entry, here = _entry(x, target, setting)
        share = (1 - setting.smoothing) * scale.to(s.dtype)
        weight = setting.own_weight(x)
        if weight is not None:
            share = share * weight[entry[:, 0]]
        grad = grad.scatter_add(1, entry, torch.where(here, -share, 0)[:, None])
        masked = masked | (target == setting.ignore_index)[:, None]
    grads = torch.autograd.grad(s, leaves, torch.where(masked, 0, grad), allow_unused=True)
    out.copy_(grads[0])
    if not params_grad:
        return none, none
    return grads[1].to(none.dtype), grads[2].to(none.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Logits that are there already.


def _loss_rows(x: Tensor, target: Tensor, coefs: Tensor, knots: Tensor, setting: Setting) -> tuple[Rows, Tensor]:
    """The rows' results, and what the backward needs: (3, R), the first two sums and the mass."""
    sums = _sums(x, target, coefs, knots, setting)
    rows, mass = _rows_of(sums, target, setting)
    return rows, torch.stack([sums[TOP], sums[TOTAL], mass])


def _loss_rows_backward(
    grad_losses: Tensor,
    grad_log_sum: Tensor,
    x: Tensor,
    target: Tensor,
    coefs: Tensor,
    knots: Tensor,
    saved: Tensor,
    setting: Setting,
    params_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    out = x.new_empty(x.shape)
    p_scale = grad_losses * saved[2] + grad_log_sum
    params = _gradients(x, target, coefs, knots, setting, saved[:2], grad_losses, p_scale, params_grad, out)
    return out, *params


# ---------------------------------------------------------------------------------------------------------------------
# Logits that are made from hidden states, chunk by chunk.


class LinearGrads(NamedTuple):
    """Gradients, None where they are not wanted."""

    input: Tensor | None
    linear_weight: Tensor | None
    linear_bias: Tensor | None
    coefs: Tensor | None
    knots: Tensor | None


def _add(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total.add_(part)


@torch.no_grad()
def _linear(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    coefs: Tensor,
    knots: Tensor,
    setting: Setting,
    chunk: int,
    dtype: torch.dtype,
    upstream: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    needed: tuple[bool, ...] = (False,) * 5,
    keep_wide: bool = False,
) -> tuple[Rows, LinearGrads]:
    """Rows of the loss, and, for the gradients that `upstream` gives of losses and log-sums, those that are needed.

    Logits live in one buffer of `chunk` rows: they are made, reduced to sums, overwritten by their gradient, and used
    for the products that follow from it. Rows to be ignored are left out of all of it. upstream is called with the
    chunk's rows and log-sums. keep_wide: gradients in the dtype that they are summed in, not in that of the tensors.
    """
    rows, width, classes = input.shape[0], input.shape[1], linear_weight.shape[0]
    counted = None
    if _indices(target) and bool((target == setting.ignore_index).any()):
        counted = (target != setting.ignore_index).nonzero()[:, 0]
    count = rows if counted is None else counted.shape[0]
    projection = linear_weight.to(dtype)
    bias = None if linear_bias is None else linear_bias.to(dtype)
    wide = reference.compute_dtype(dtype)
    buffer = input.new_empty((min(chunk, count), classes), dtype=dtype)
    found: list[Tensor] | None = None
    grads: list[Tensor | None] = [None] * 5
    if needed[0]:
        make = input.new_empty if counted is None else input.new_zeros
        grads[0] = make((rows, width), dtype=wide if keep_wide else input.dtype)

    for start in range(0, max(count, 1), chunk):
        end = min(start + chunk, count)
        own = torch.arange(start, end, device=input.device) if counted is None else counted[start:end]
        hidden = (input[start:end] if counted is None else input[own]).to(dtype)
        targets = target[start:end] if counted is None else target[own]
        logits = buffer[: end - start]
        if bias is None:
            torch.mm(hidden, projection.t(), out=logits)
        else:
            torch.addmm(bias, hidden, projection.t(), out=logits)
        sums = _joined(_sums(logits, targets, coefs, knots, setting), setting)
        part, mass = _rows_of(sums, targets, setting)
        if found is None:
            found = [t.new_zeros(rows if t.ndim and (i < 2 or setting.full) else 0) for i, t in enumerate(part)]
        for whole, t in zip(found, part, strict=True):
            if whole.shape[0]:
                whole[own] = t
        if upstream is None or not any(needed):
            continue
        grad_losses, grad_log_sum = upstream(own, part.log_sum)
        p_scale = grad_losses * mass + grad_log_sum
        params = _gradients(
            logits, targets, coefs, knots, setting, sums[:2], grad_losses, p_scale, needed[3] or needed[4], logits
        )
        if needed[3] or needed[4]:
            grads[3], grads[4] = (_add(total, part) for total, part in zip(grads[3:], params, strict=True))
        if needed[0]:
            assert grads[0] is not None
            if counted is None and grads[0].dtype == dtype:
                torch.mm(logits, projection, out=grads[0][start:end])
            else:
                grads[0][own] = torch.mm(logits, projection).to(grads[0].dtype)
        if needed[1]:
            if grads[1] is None:
                one = end - start == count
                grads[1] = torch.mm(logits.t(), hidden) if one else torch.mm(logits.t(), hidden).to(wide)
            elif dtype == wide:
                grads[1].addmm_(logits.t(), hidden)
            else:
                grads[1].add_(torch.mm(logits.t(), hidden))
        if needed[2]:
            grads[2] = _add(grads[2], logits.sum(0, dtype=wide))

    if setting.group is not None:
        import torch.distributed as dist

        for i in (0, 3, 4):  # these depend on all parts of the weight
            grad = grads[i]
            if grad is not None:
                grad = grad.to(wide) if i == 0 else grad
                dist.all_reduce(grad, group=setting.group)
                grads[i] = grad
    assert found is not None
    shapes = (input, linear_weight, linear_bias, coefs, knots)
    final: list[Tensor | None] = []
    for grad, like, need in zip(grads, shapes, needed, strict=True):
        if not need or like is None:
            final.append(None)
        elif grad is None:
            final.append(like.new_zeros(like.shape))
        else:
            final.append(grad if keep_wide else grad.to(like.dtype))
    return Rows(*found), LinearGrads(*final)


def default_chunk(linear_weight: Tensor, dtype: torch.dtype) -> int:
    """Rows whose logits take half the memory of the weight's gradient while it is summed, in float32 for half
    precision; but enough for the products to be quick, and no more than that takes."""
    return min(max(linear_weight.shape[1] * reference.compute_dtype(dtype).itemsize // (2 * dtype.itemsize), 64), 512)


# ---------------------------------------------------------------------------------------------------------------------
# As operations, which the compiler takes as they are. A group of processes goes by its name.

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
    rows, saved = _loss_rows(x, target, coefs, knots, _setting(*args))
    return *_in_compute_dtype(rows, x.dtype), saved


@torch.library.impl(_library, "loss_rows_backward", "CompositeExplicitAutograd")
def _(
    grad_losses: Tensor, grad_log_sum: Tensor, x: Tensor, target: Tensor, coefs: Tensor, knots: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    *setting, saved, params_grad = args
    out, grad_coefs, grad_knots = _loss_rows_backward(
        grad_losses, grad_log_sum, x, target, coefs, knots, saved, _setting(*setting), params_grad
    )
    return out, grad_coefs.to(coefs.dtype), grad_knots.to(knots.dtype)


@torch.library.impl(_library, "linear_loss", "CompositeExplicitAutograd")
def _(*args: Any) -> tuple[Tensor, ...]:
    input, linear_weight, linear_bias, target, coefs, knots, *setting, chunk, dtype = args
    checks.target_values(target, setting[6], setting[1])
    rows, _ = _linear(input, linear_weight, linear_bias, target, coefs, knots, _setting(*setting), chunk, dtype)
    return _in_compute_dtype(rows, dtype)


@torch.library.impl(_library, "linear_loss_backward", "CompositeExplicitAutograd")
def _(grad_losses: Tensor, grad_log_sum: Tensor, *args: Any) -> tuple[Tensor, ...]:
    input, linear_weight, linear_bias, target, coefs, knots, *setting, chunk, dtype, needed = args
    _, grads = _linear(
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
    dtype = reference.compute_dtype(dtype)
    return *(t.to(dtype) for t in rows[:3]), rows.best


def _like_rows(count: Any, like: Tensor, dtype: torch.dtype, full: bool) -> tuple[Tensor, ...]:
    dtype = reference.compute_dtype(dtype)
    some = count if full else 0
    sizes = ((count, dtype), (count, dtype), (some, dtype), (some, torch.int64))
    return tuple(like.new_empty(size, dtype=dtype) for size, dtype in sizes)


@torch.library.register_fake("multimax::loss_rows", lib=_library)
def _(x: Tensor, target: Tensor, coefs: Tensor, knots: Tensor, *args: Any) -> tuple[Tensor, ...]:
    ops.one_device(x, target, coefs, knots)
    stats = torch.float64 if args[3] == "cpu" else reference.compute_dtype(x.dtype)
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
    ops.one_device(*args[:2], *args[3:6])
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


# ---------------------------------------------------------------------------------------------------------------------
# Gradients.


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
        both = _both(grads[0], grads[1], saved[0].to(reference.compute_dtype(x.dtype)))
        none = (None,) * (1 + len(ctx.setting))
        if ops.traced(*both, x, coefs, knots):
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
        if ops.traced(*both, *(t for t in tensors if t is not None)):
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

        rows, ctx.grads = _linear(
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
        if ops.traced(grad, *(t for t in differentiable if t is not None)):

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
