"""Attention the way people write it: what the kernels' errors are measured by."""

import torch
from torch import Tensor

from multimax.ops import dtypes
from multimax.ops.attention import reference
from multimax.ops.attention.call import AttentionCall


def attention(call: AttentionCall, first_head: int = 0) -> tuple[Tensor, Tensor]:
    """Output and log-sums, with products in the inputs' dtype and the weights rounded to it in between. In float32 that
    is the reference itself, which computes half precision in float32: a stricter measure than anybody's model."""
    query, key, value = call.query, call.key, call.value
    if dtypes.compute_dtype(query.dtype) == query.dtype:
        return reference.attention(call, first_head)
    group = query.shape[1] // key.shape[1]
    x = (query * call.scale) @ key.repeat_interleave(group, 1).transpose(-1, -2)
    weights, lse = reference.attention_weights(
        x.float(), call.coefs, call.knots, call.mask, call.bias, call.causal, call.left, call.right
    )
    if call.seed is not None:
        heads = first_head + torch.arange(x.shape[0] * x.shape[1], device=x.device)
        kept = reference.dropout(call.seed, call.dropout_p, heads, x.shape[2], x.shape[3])
        weights = weights * kept.reshape(x.shape).float()
    return weights.to(value.dtype) @ value.repeat_interleave(group, 1), lse


def run(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """The same for any call: packed sequences one after the other."""
    if call.query_starts is None:
        return attention(call)
    heads = call.query.shape[1]
    parts = [attention(each, i * heads) for i, each in enumerate(reference.sequences(call))]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)
