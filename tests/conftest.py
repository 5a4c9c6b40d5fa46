"""What all tests share."""

import os
from collections.abc import Iterator

import pytest
import torch

from multimax import ops


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


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test once for each instruction set."""
    before = ops.use_isa()
    yield ops.use_isa(request.param)
    ops.use_isa(before)


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    """The same random numbers, two threads, and NaN in every tensor that an operation forgets to write."""
    torch.manual_seed(0)
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
