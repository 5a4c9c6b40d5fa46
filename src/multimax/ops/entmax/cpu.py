"""Entmax by the compiled kernels."""

from torch import Tensor

from multimax.ops import kernels
from multimax.ops.entmax.autograd import entmax
from multimax.ops.entmax.call import EntmaxCall


def why_not(call: EntmaxCall) -> str | None:
    """Why the kernels cannot run this call."""
    return kernels.why_not(call.x.device)


def run(call: EntmaxCall) -> Tensor:
    """The weights; the kernels read one row after the other."""
    alpha = None if call.alpha is None else call.alpha.contiguous()
    return entmax(EntmaxCall(call.x.contiguous(), alpha, call.kind))
