"""Attention by the compiled kernels."""

import torch

from multimax.ops import kernels
from multimax.ops.attention.autograd import attention as run
from multimax.ops.attention.call import AttentionCall

__all__ = ["run", "why_not"]


def why_not(call: AttentionCall) -> str | None:
    """Why the kernels cannot run this call."""
    return kernels.why_not(call.query.device, _unable(call))


def _unable(call: AttentionCall) -> str | None:
    """What the kernels do not have."""
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
