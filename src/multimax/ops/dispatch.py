"""The one table of implementations: which ones each operation has, and which one runs a call.

An implementation is a module with two functions: ``why_not(call)``, the reason it cannot run that call here, or
None, and ``run(call)``. To add one, write the module and name it in the table.
"""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any, Protocol

from multimax.ops import checks, kernels
from multimax.ops.operators import recorded

# In the order in which "auto" tries them. The reference comes last, and can run anything.
TABLE = {
    "attention": {
        "cpu": "multimax.ops.attention.cpu",
        "triton": "multimax.ops.attention.triton",
        "torch": "multimax.ops.attention.plain",
        "reference": "multimax.ops.attention.reference",
    },
    "loss": {
        "cpu": "multimax.ops.loss.cpu",
        "triton": "multimax.ops.loss.triton",
        "torch": "multimax.ops.loss.plain",
        "reference": "multimax.ops.loss.reference",
    },
    "entmax": {
        "cpu": "multimax.ops.entmax.cpu",
        "triton": "multimax.ops.entmax.triton",
        "reference": "multimax.ops.entmax.reference",
    },
    "rows": {
        "cpu": "multimax.ops.rows.cpu",
        "triton": "multimax.ops.rows.triton",
        "reference": "multimax.ops.rows.reference",
    },
}
NAMES = ("auto", "reference", "cpu", "triton")
VARIABLE = "MULTIMAX_IMPL"  # what "auto" means in this process

_default = os.environ.get(VARIABLE) or "auto"
checks.choice(VARIABLE, _default, NAMES)
_requests = [[_default]]

_warned: set[str] = set()


class Implementation(Protocol):
    """What the modules in the table provide."""

    def why_not(self, call: Any, /) -> str | None:
        """Why this implementation cannot run the call here; None if it can."""

    def run(self, call: Any, /) -> Any:
        """The operation's result."""


@cache
def load(operation: str) -> dict[str, Any]:
    """An operation's implementations by name, imported."""
    return {name: import_module(module) for name, module in TABLE[operation].items()}


def choose(implementations: dict[str, Any], impl: str, call: Any) -> Any:
    """The implementation that runs a call: the first that can for "auto", else the one of that name or an error."""
    if impl == "auto":
        impl = _default
        if impl == "auto" and recorded():  # torch.jit cannot save operators with a gradient
            impl = "reference"
    if impl == "auto":
        for implementation in implementations.values():
            why = implementation.why_not(call)
            if why is None:
                return implementation
            if isinstance(why, kernels.Unavailable):
                _warn(why)
    else:
        names = ("auto", *implementations)
        checks.choice("impl", impl, (*NAMES, *(name for name in names if name not in NAMES)))
        implementation = implementations[impl]
        why = implementation.why_not(call)
        if why is None:
            return implementation
    raise RuntimeError(f"multimax: impl={impl!r} cannot run: {why}")


@contextmanager
def implementation(impl: str) -> Iterator[None]:
    """Within it, ``impl="auto"`` means another implementation: in every call and module of this library.

    ``implementation("reference")`` is plain PyTorch, with no operators and no kernels of this library: to compare with,
    or to export what runs without ``multimax``. Calls that name their ``impl`` are not affected. It holds for all
    threads; the environment variable ``MULTIMAX_IMPL`` does the same for a whole process.

    Args:
        impl: "auto", "reference", "cpu" or "triton". Where one other than "auto" cannot run a call, that raises.

    Example:
        >>> import torch, multimax
        >>> layer = multimax.MultiMax().eval()
        >>> with multimax.implementation("reference"):
        ...     program = torch.export.export(layer, (torch.randn(2, 5),))
        >>> any("multimax." in str(node.target) for node in program.graph.nodes)
        False
    """
    global _default
    checks.choice("impl", impl, NAMES)
    request = [impl]  # a list of its own, to be found among others that are equal
    _requests.append(request)
    _default = impl
    try:
        yield
    finally:
        # threads may leave in another order than they came
        _requests[:] = [other for other in _requests if other is not request]
        _default = _requests[-1][0]


def _warn(why: str) -> None:
    """Says once that kernels cannot be used, at the line that called the library."""
    if why in _warned:
        return
    _warned.add(why)
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] in ("multimax", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(f"multimax: using slower plain PyTorch, because {why}", stacklevel=level)
