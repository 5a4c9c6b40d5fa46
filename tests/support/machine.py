"""What this machine can run."""

import pytest

from multimax.ops import kernels as ops


def isas() -> list[str]:
    """The instruction sets that this machine can run."""
    if ops.unavailable:
        return []
    best = ops.use_isa()
    found = []
    for name in ops.ISAS:
        try:
            found.append(ops.use_isa(name))
        except RuntimeError:
            continue
    ops.use_isa(best)
    return found


ISAS = isas()
needs_kernels = pytest.mark.skipif(bool(ops.unavailable), reason=f"no CPU kernels: {ops.unavailable}")
