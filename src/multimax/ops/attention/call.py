"""A call of attention as one structure, and the operators that take it.

Shapes: B batches, H query heads, Hkv key heads, Lq queries, Lk keys, D and Dv entries per head, N the order of sigma.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from multimax.ops.operators import define, one_device

DIFFERENTIABLE = ("query", "key", "value", "coefs", "knots", "bias")


class AttentionCall(NamedTuple):
    """Arguments as `checks` and `inputs` leave them: tensors first, then numbers."""

    query: Tensor  # (B, H, Lq, D), like key and value with contiguous rows
    key: Tensor  # (B, Hkv, Lk, D)
    value: Tensor  # (B, Hkv, Lk, Dv)
    coefs: Tensor  # (N, 2) or (H, N, 2)
    knots: Tensor
    mask: Tensor | None  # boolean, or added after sigma; of 4 dims that broadcast to (B, H, Lq, Lk)
    bias: Tensor | None  # added before sigma, likewise
    query_starts: Tensor | None  # (sequences + 1,): packed sequences, in one batch
    key_starts: Tensor | None
    seed: Tensor | None  # (1,): dropout, from a hash of it
    dropout_p: float
    scale: float
    causal: bool
    left: int  # -left <= j - (i + Lk - Lq) <= right; negative for no bound
    right: int

    def tensors(self) -> tuple[Any, ...]:
        """What autograd keeps."""
        return self[:TENSORS]

    def numbers(self) -> tuple[Any, ...]:
        """The rest."""
        return self[TENSORS:]


TENSORS = AttentionCall._fields.index("seed") + 1


class AttentionBackwardCall(NamedTuple):
    """The same with the incoming gradients, what the forward saved, and which gradients are wanted."""

    grad_out: Tensor
    grad_lse: Tensor | None
    query: Tensor
    key: Tensor
    value: Tensor
    coefs: Tensor
    knots: Tensor
    mask: Tensor | None
    bias: Tensor | None
    query_starts: Tensor | None
    key_starts: Tensor | None
    seed: Tensor | None
    out: Tensor
    stats: Tensor
    rest: Tensor
    dropout_p: float
    scale: float
    causal: bool
    left: int
    right: int
    params_grad: bool
    bias_grad: bool

    def call(self) -> AttentionCall:
        """The call whose gradients these are."""
        return AttentionCall(*(getattr(self, field) for field in AttentionCall._fields))


def unable(call: AttentionCall) -> str | None:
    """What no kernels have."""
    if call.query.dtype == torch.float64:
        return "the attention kernels have no float64"
    if call.mask is not None:
        if call.mask.dtype == torch.float64:
            return "the attention kernels take no float64 attn_mask"
        if call.mask.requires_grad and torch.is_grad_enabled():
            return "the attention kernels give no gradient to attn_mask"
    if call.bias is not None and call.bias.dtype == torch.float64:
        return "the attention kernels take no float64 score_bias"
    return None


def log_sums(stats: Tensor) -> Tensor:
    """(B, H, Lq), the log of each row's sum, from its largest score and its sum of exp(score - largest)."""
    top, total = stats.unbind(0)
    return top + total.log()


def heads_inside(like: Tensor) -> bool:
    """Whether results have the layout (B, L, H, D) in memory, as `like` does: as csrc/bindings/attention.cpp has it."""
    return like.stride(1) < like.stride(2)


def heads_like(like: Tensor, length: int, width: int) -> Tensor:
    """(B, H, L, D) in the layout of `like`."""
    b, h = like.shape[:2]
    if heads_inside(like):
        return like.new_empty(b, length, h, width).transpose(1, 2)
    return like.new_empty(b, h, length, width)


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *fields, for_backward = args
    call = AttentionCall(*fields)
    one_device(*call.tensors())
    query = call.query
    out = heads_like(query, query.shape[2], call.value.shape[3])
    with_rest = for_backward and query.dtype != torch.float32
    rest = heads_like(query, query.shape[2], call.value.shape[3]) if with_rest else query.new_empty(0)
    return out, query.new_empty((2, *query.shape[:3]), dtype=torch.float32), rest


def _fake_backward(*args: Any) -> tuple[Tensor, ...]:
    call = AttentionBackwardCall(*args)
    one_device(call.grad_out, call.grad_lse, *call.call().tensors(), call.out, call.stats, call.rest)
    size = call.coefs.shape if call.params_grad else (0,)
    bias_size = call.bias.shape if call.bias is not None and call.bias_grad else (0,)
    return (
        call.query.new_empty(call.query.shape),
        heads_like(call.key, call.key.shape[2], call.key.shape[3]),
        heads_like(call.value, call.value.shape[2], call.value.shape[3]),
        call.coefs.new_empty(size),
        call.knots.new_empty(size),
        call.query.new_empty(bias_size, dtype=torch.float32),
    )


# the output, each row's statistics (see `log_sums`), and what rounding took from the output, for the backward alone
define("attention_forward", AttentionCall, 3, _fake_forward, for_backward=bool)
define("attention_backward", AttentionBackwardCall, 6, _fake_backward)  # gradients, in the order of DIFFERENTIABLE
