"""The functions of the field by the compiled kernels."""

from torch import Tensor

from multimax.ops import kernels
from multimax.ops.entmax.autograd import entmax
from multimax.ops.entmax.call import EntmaxCall


def why_not(call: EntmaxCall) -> str | None:
    """Why the kernels cannot run this call."""
    return kernels.why_not(call.x.device)


def run(call: EntmaxCall) -> Tensor:
    """The weights; the kernels read one row after the other."""
    parameter = None if call.parameter is None else call.parameter.contiguous()
    return entmax(call._replace(x=call.x.contiguous(), parameter=parameter))
