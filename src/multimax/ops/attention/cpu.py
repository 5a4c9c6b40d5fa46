"""Attention by the compiled kernels."""

from multimax.ops import kernels
from multimax.ops.attention.autograd import attention as run
from multimax.ops.attention.call import AttentionCall, unable

__all__ = ["run", "why_not"]


def why_not(call: AttentionCall) -> str | None:
    """Why the kernels cannot run this call."""
    return kernels.why_not(call.query.device, unable(call))
