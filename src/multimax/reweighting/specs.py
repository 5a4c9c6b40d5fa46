"""The functions by name."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from multimax.ops import checks
from multimax.reweighting import functions

FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    name: getattr(functions, name)
    for name in (
        "softmax",
        "multimax",
        "sparsemax",
        "entmax15",
        "entmax",
        "evsoftmax",
        "sparsehourglass",
        "topk",
        "attnscale",
    )
}
LEARNED = {"multimax": "multimax.MultiMax", "attnscale": "reweighting.AttnScaledSoftmax"}  # have options of their own
COMMON = ("x", "dim", "mask", "impl")


@dataclass(frozen=True)
class Reweighting:
    """A function with its options, to be called as ``function(x, dim=-1, mask=None, impl="auto")``."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, x: Tensor, *, dim: int = -1, mask: Tensor | None = None, impl: str = "auto") -> Tensor:
        """Weights of the shape and dtype of x."""
        return FUNCTIONS[self.name](x, **self.options, dim=dim, mask=mask, impl=impl)


def names() -> tuple[str, ...]:
    """The names that :func:`get` knows.

    Example:
        >>> from multimax import reweighting
        >>> reweighting.names()
        ('softmax', 'multimax', 'sparsemax', 'entmax15', 'entmax', 'evsoftmax', 'sparsehourglass', 'topk', 'attnscale')
    """
    return tuple(FUNCTIONS)


def get(name: str, **options: Any) -> Reweighting:
    """A reweighting function by name, with its options.

    Args:
        name: one of :func:`names`.
        options: what the function takes beside x, dim, mask and impl: ``temperature`` (softmax), ``coefs`` and
            ``knots`` (multimax), ``alpha`` (entmax), ``eps`` (evsoftmax), ``q`` (sparsehourglass), ``k`` (topk),
            ``omega`` (attnscale).

    Returns:
        A callable of x, dim, mask and impl.

    Example:
        >>> import torch
        >>> from multimax import reweighting
        >>> reweighting.get("entmax15")(torch.tensor([1.0, 0.6, -1.0]), dim=-1)
        tensor([0.6400, 0.3600, 0.0000])
        >>> reweighting.get("topk", k=2)(torch.tensor([3.0, 2.0, -1.0]))
        tensor([0.7311, 0.2689, 0.0000])
    """
    checks.choice("name", name, names())
    parameters = {key: p for key, p in inspect.signature(FUNCTIONS[name]).parameters.items() if key not in COMMON}
    unknown = [key for key in options if key not in parameters]
    if unknown:
        known = ", ".join(parameters) or "none"
        raise TypeError(f"multimax: expected options of {name} out of: {known}, got {', '.join(unknown)}")
    missing = [key for key, p in parameters.items() if p.default is p.empty and key not in options]
    if missing:
        remedy = f"; a {LEARNED[name]} module has its own" if name in LEARNED else ""
        raise TypeError(f"multimax: expected {' and '.join(missing)} for {name}, got no such option{remedy}")
    return Reweighting(name, options)
