"""What all tests share."""

import os
from collections.abc import Iterator

import pytest
import torch

from interpreter import large_tiles, patch_once, round_to_nearest
from machine import ISAS
from multimax.ops import kernels, probe
from multimax.ops.dispatch import implementation
from sharing import pytest_xdist_make_scheduler as pytest_xdist_make_scheduler

IN_WORKER = "PYTEST_XDIST_WORKER" in os.environ
# two, or one in each of the processes that pytest-xdist shares the tests between; the interpreter has but one
THREADS = 1 if IN_WORKER or kernels.INTERPRETED else min(2, os.cpu_count() or 1)
PRODUCTS = pytest.StashKey[probe.Products]()
if kernels.INTERPRETED:
    round_to_nearest()
    patch_once()
    large_tiles()


def pytest_configure(config: pytest.Config) -> None:
    """Sets the environment before torch's first product, when oneDNN reads it; workers and children inherit it."""
    if IN_WORKER:
        return
    found = probe.bfloat16_products()
    config.stash[PRODUCTS] = found
    os.environ.update(found.remedy)
    if config.getoption("numprocesses", None):  # children of a worker must not take the other worker's core
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_report_header(config: pytest.Config) -> list[str]:
    found = config.stash.get(PRODUCTS, probe.Products("work"))  # a worker's header is not shown
    if found.outcome == "die":
        return [f"bf16 products: die with SIGILL here; these tests run with {probe.VARIABLE}={probe.LIMIT}"]
    return [] if found.outcome == "work" else [f"bf16 products: {found}"]


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test once for each instruction set."""
    if kernels.INTERPRETED:
        yield request.param
        return
    before = kernels.use_isa()
    yield kernels.use_isa(request.param)
    kernels.use_isa(before)


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    """The same random numbers, the same threads, and NaN in every tensor that an operation forgets to write."""
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    if kernels.INTERPRETED:  # where "auto" is Triton and nothing else
        with implementation("auto"):
            yield
    else:
        yield
    torch.use_deterministic_algorithms(False)
