"""What this machine can run."""

import pytest

from multimax.ops import kernels


def isas() -> list[str]:
    """The instruction sets that this machine can run; where kernels are interpreted, that counts as the only one."""
    if kernels.INTERPRETED:
        return ["interpreter"]
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
KERNEL = "triton" if kernels.INTERPRETED else "cpu"  # the implementation whose kernels run on tensors here
needs_kernels = pytest.mark.skipif(
    bool(kernels.unavailable) and not kernels.INTERPRETED, reason=f"no CPU kernels: {kernels.unavailable}"
)
needs_the_library = pytest.mark.skipif(
    bool(kernels.unavailable), reason=f"about the compiled library itself: {kernels.unavailable}"
)
