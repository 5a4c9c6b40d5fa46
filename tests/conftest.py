"""What all tests share."""

import os
from collections.abc import Iterator

import pytest
import torch

from machine import ISAS
from multimax.ops import kernels as ops

# two, or one in each of the processes that pytest-xdist shares the tests between
THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test once for each instruction set."""
    before = ops.use_isa()
    yield ops.use_isa(request.param)
    ops.use_isa(before)


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    """The same random numbers, the same threads, and NaN in every tensor that an operation forgets to write."""
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
