"""Attention by Triton kernels."""

import torch
from torch import Tensor

from multimax.ops import dispatch, gpu
from multimax.ops.attention.autograd import attention as run
from multimax.ops.attention.call import AttentionCall, unable

__all__ = ["compare", "run", "why_not"]

# entries of a head, at most: wider tiles do not fit the registers
WIDEST = {torch.float32: 128, torch.bfloat16: 256, torch.float16: 256}


def why_not(call: AttentionCall) -> str | None:
    """Why the kernels cannot run this call."""
    device, dtype = call.query.device, call.query.dtype
    return gpu.why_not(device, unable(call) or _too_wide(call)) or gpu.broken("attention", device, dtype, compare)


def _too_wide(call: AttentionCall) -> str | None:
    width, most = max(call.query.shape[-1], call.value.shape[-1]), WIDEST[call.query.dtype]
    if width <= most:
        return None
    return f"the attention kernels take heads of at most {most} entries in {call.query.dtype}, got {width}"


def compare(device: torch.device, dtype: torch.dtype) -> list[tuple[str, Tensor, Tensor]]:
    """Results of a small input, and what they should be."""
    query, key, value, coefs, knots, grad = gpu.draws(
        (1, 4, 130, 64), (1, 2, 150, 64), (1, 2, 150, 64), (2, 2), (2, 2), (1, 4, 130, 64)
    )
    query, key, value, grad = (t.to(dtype) for t in (query, key, value, grad))
    call = AttentionCall(
        query, key, value, coefs * 0.5, knots, mask=None, bias=None, query_starts=None, key_starts=None, seed=None,
        dropout_p=0.0, scale=0.125, causal=False, left=-1, right=0,
    )  # fmt: skip
    names = ("query", "key", "value", "coefs", "knots")
    judge = gpu.gradients(dispatch.load("attention")["reference"].run, call, names, grad, None)
    ours = gpu.gradients(run, call, names, grad, device)
    return [(name, ours[name], judge[name]) for name in judge]


gpu.register("attention_forward", "multimax.ops.attention.triton.launch", "forward")
gpu.register("attention_backward", "multimax.ops.attention.triton.launch", "backward")
