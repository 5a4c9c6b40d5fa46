"""The row functions by the compiled kernels."""

from multimax.ops import kernels
from multimax.ops.rows.autograd import rows as run
from multimax.ops.rows.call import RowsCall

__all__ = ["run", "why_not"]


def why_not(call: RowsCall) -> str | None:
    """Why the kernels cannot run this call."""
    return kernels.why_not(call.x.device)
