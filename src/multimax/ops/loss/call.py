"""Calls of the losses as one structure each, and the operators that take them.

Shapes: R rows, C classes, D entries of a hidden state, N the order of sigma. A target is (R,) of class indices or
(R, C) of probabilities.
"""

from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from multimax.ops import dtypes
from multimax.ops.operators import LIBRARY, Mutable, define, one_device


class Rows(NamedTuple):
    """The results of each row, (R,) each; the last two only if asked for, else empty."""

    losses: Tensor
    log_sum: Tensor
    entropy: Tensor
    best: Tensor  # the class with the largest weight

    def in_compute_dtype(self, dtype: torch.dtype) -> "Rows":
        """As the operators return them for logits of that dtype."""
        wide = dtypes.compute_dtype(dtype)
        return Rows(self.losses.to(wide), self.log_sum.to(wide), self.entropy.to(wide), self.best)


class Setting(NamedTuple):
    """Everything that a loss depends on besides the logits, the target and the parameters."""

    weight: Tensor | None  # (C,) for each class
    ignore_index: int
    smoothing: float
    impl: str  # the implementation that computes the rows
    full: bool  # entropy and best class too
    first_class: int = 0
    classes: int | None = None  # of all processes, where each has a part
    group: str = ""


class Logits(NamedTuple):
    """Logits of some rows, (R, C) with contiguous rows, with everything that their loss depends on."""

    x: Tensor
    target: Tensor
    coefs: Tensor  # (N, 2)
    knots: Tensor
    setting: Setting

    def weight(self) -> Tensor | None:
        """The weights of these classes, in the compute dtype."""
        setting = self.setting
        if setting.weight is None:
            return None
        part = setting.weight[setting.first_class : setting.first_class + self.x.shape[1]]
        return part.to(dtypes.compute_dtype(self.x.dtype)).contiguous()


class LossCall(NamedTuple):
    """The loss of logits; it returns the rows' results and what the backward needs."""

    x: Tensor
    target: Tensor
    coefs: Tensor
    knots: Tensor
    weight: Tensor | None
    ignore_index: int
    smoothing: float
    impl: str
    full: bool

    def logits(self) -> Logits:
        """What the rows' implementations take."""
        setting = Setting(self.weight, self.ignore_index, self.smoothing, self.impl, self.full)
        return Logits(self.x, self.target, self.coefs, self.knots, setting)


class LossBackwardCall(NamedTuple):
    """Its gradients, of x, coefs and knots, from the gradients of losses and log-sums."""

    grad_losses: Tensor
    grad_log_sum: Tensor
    x: Tensor
    target: Tensor
    coefs: Tensor
    knots: Tensor
    weight: Tensor | None
    ignore_index: int
    smoothing: float
    impl: str
    full: bool
    saved: Tensor
    params_grad: bool

    def call(self) -> LossCall:
        """The call whose gradients these are."""
        return LossCall(*(getattr(self, field) for field in LossCall._fields))


class LinearLossCall(NamedTuple):
    """The loss of a linear layer's logits."""

    input: Tensor  # (R, D)
    linear_weight: Tensor  # (C, D)
    linear_bias: Tensor | None  # (C,)
    target: Tensor
    coefs: Tensor
    knots: Tensor
    weight: Tensor | None
    ignore_index: int
    smoothing: float
    impl: str
    full: bool
    first_class: int
    classes: int
    group: str
    chunk: int  # rows whose logits are held at once
    dtype: torch.dtype  # of the products

    def setting(self) -> Setting:
        """What the rows' implementations take."""
        return Setting(
            self.weight,
            self.ignore_index,
            self.smoothing,
            self.impl,
            self.full,
            self.first_class,
            self.classes,
            self.group,
        )


class LinearLossBackwardCall(NamedTuple):
    """Its gradients: those of input, weight, bias, coefs and knots that are needed."""

    grad_losses: Tensor
    grad_log_sum: Tensor
    input: Tensor
    linear_weight: Tensor
    linear_bias: Tensor | None
    target: Tensor
    coefs: Tensor
    knots: Tensor
    weight: Tensor | None
    ignore_index: int
    smoothing: float
    impl: str
    full: bool
    first_class: int
    classes: int
    group: str
    chunk: int
    dtype: torch.dtype
    needed: list[bool]

    def call(self) -> LinearLossCall:
        """The call whose gradients these are."""
        return LinearLossCall(*(getattr(self, field) for field in LinearLossCall._fields))


class LinearGrads(NamedTuple):
    """For each tensor that may have a gradient: the gradient, or None, or whether one is needed."""

    input: Any
    linear_weight: Any
    linear_bias: Any
    coefs: Any
    knots: Any


class KernelCall(NamedTuple):
    """What the compiled library takes for some rows of logits."""

    x: Tensor
    target: Tensor | None  # indices
    probabilities: Tensor | None
    coefs: Tensor
    knots: Tensor
    weight: Tensor | None
    smoothing: float
    total_classes: int
    first_class: int
    ignore_index: int


# The operators know a group of processes by its name.
_groups: WeakValueDictionary[str, Any] = WeakValueDictionary()


def group_name(group: Any) -> str:
    """The name by which the operators know a group."""
    _groups[group.group_name] = group
    name: str = group.group_name
    return name


def group_of(name: str) -> Any:
    """The group of that name; None for ""."""
    return _groups[name] if name else None


def _like_rows(count: Any, like: Tensor, dtype: torch.dtype, full: bool) -> Rows:
    wide = dtypes.compute_dtype(dtype)
    some = count if full else 0
    return Rows(
        like.new_empty(count, dtype=wide),
        like.new_empty(count, dtype=wide),
        like.new_empty(some, dtype=wide),
        like.new_empty(some, dtype=torch.int64),
    )


def saved_dtype(call: LossCall) -> torch.dtype:
    """The dtype of what the backward needs."""
    return torch.float64 if call.impl == "cpu" else dtypes.compute_dtype(call.x.dtype)


def _fake_loss(*args: Any) -> tuple[Tensor, ...]:
    call = LossCall(*args)
    one_device(call.x, call.target, call.coefs, call.knots)
    rows = _like_rows(call.x.shape[0], call.x, call.x.dtype, call.full)
    return *rows, call.x.new_empty((3, call.x.shape[0]), dtype=saved_dtype(call))


def _fake_loss_backward(*args: Any) -> tuple[Tensor, ...]:
    call = LossBackwardCall(*args)
    size = call.coefs.shape if call.params_grad else (0,)
    return call.x.new_empty(call.x.shape), call.coefs.new_empty(size), call.knots.new_empty(size)


def _fake_linear(*args: Any) -> tuple[Tensor, ...]:
    call = LinearLossCall(*args)
    one_device(call.input, call.linear_weight, call.target, call.coefs, call.knots)
    return tuple(_like_rows(call.input.shape[0], call.input, call.dtype, call.full))


def _fake_linear_backward(*args: Any) -> tuple[Tensor, ...]:
    call = LinearLossBackwardCall(*args)
    tensors = LinearGrads(call.input, call.linear_weight, call.linear_bias, call.coefs, call.knots)
    return tuple(
        t.new_empty(t.shape) if need and t is not None else call.input.new_empty(0)
        for t, need in zip(tensors, call.needed, strict=True)
    )


def _fake_kernel(*args: Any) -> Tensor:
    *fields, _full = args
    x = KernelCall(*fields).x
    return x.new_empty((7, x.shape[0]), dtype=torch.float64)


def _fake_kernel_backward(*args: Any) -> tuple[Tensor, Tensor]:
    *fields, _stats, _scale, _p_scale, params_grad, _out = args
    call = KernelCall(*fields)
    size = call.coefs.shape if params_grad else (0,)
    return call.coefs.new_empty(size, dtype=torch.float64), call.knots.new_empty(size, dtype=torch.float64)


define("loss_rows", LossCall, 5, _fake_loss)
define("loss_rows_backward", LossBackwardCall, 3, _fake_loss_backward)
define("linear_loss", LinearLossCall, 4, _fake_linear)
define("linear_loss_backward", LinearLossBackwardCall, 5, _fake_linear_backward)
# the compiled row part, called from within those above: sums of each row, and the gradients of x, coefs and knots
define("loss_forward", KernelCall, 1, _fake_kernel, full=bool)
define(
    "loss_backward",
    KernelCall,
    2,
    _fake_kernel_backward,
    stats=Tensor,
    scale=Tensor,
    p_scale=Tensor,
    params_grad=bool,
    out=Mutable,
)
# adds to a sum in the compute dtype what has the dtype of the products
LIBRARY.define("loss_add(Tensor(a!) sum, Tensor part) -> ()")
torch.library.register_fake("multimax::loss_add", lambda sum, part: None, lib=LIBRARY)
