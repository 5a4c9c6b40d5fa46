"""What this machine can run."""

import pytest

from multimax.ops import kernels


def isas() -> list[str]:
    """The instruction sets that this machine can run."""
    if kernels.unavailable:
        return []
    best = kernels.use_isa()
    found = []
    for name in kernels.ISAS:
        try:
            found.append(kernels.use_isa(name))
        except RuntimeError:
            continue
    kernels.use_isa(best)
    return found


ISAS = isas()
needs_kernels = pytest.mark.skipif(bool(kernels.unavailable), reason=f"no CPU kernels: {kernels.unavailable}")
