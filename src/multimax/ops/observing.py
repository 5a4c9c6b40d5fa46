"""Observers of the attention functions, and what they are told: order, shape and, if they ask, the scores in blocks.

An attention function that has computed its result says so in two lines, which cost nothing without observers:

    if observing.active():
        observing.report(order, (B, H, Lq, Lk), blocks)

Observers are shared by all threads. Code under ``torch.compile`` reports nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# Scores, which are the input of the reweighting function (before sigma, with their bias), weights,
# which are its output before dropout, and True where a key takes part: (B, H, a few of the queries, Lk) each.
Block = tuple[Tensor, Tensor, Tensor]
Blocks = Callable[[], Iterator[Block]]
Observer = Callable[[int, tuple[int, ...], Blocks], None]

_observers: list[Observer] = []
_orders: list[int] = []  # what to report instead of the order


def active() -> bool:
    """Whether there are observers. Always false while compiling, which also leaves no guard in compiled code."""
    return not torch.compiler.is_compiling() and bool(_observers)


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Within the context, calls ``observer(order, shape, blocks)`` after each attention.

    Args:
        observer: gets the order of sigma (0 for another function), the shape (B, H, Lq, Lk) of the scores, and a
            function of no arguments that computes them block by block. An observer that needs no values does not
            call it. The observer runs without gradients.

    Example:
        >>> import torch, multimax
        >>> from multimax.ops import observing
        >>> seen = []
        >>> query, key, value = torch.randn(3, 2, 4, 9, 8).unbind(0)
        >>> with observing.observe(lambda order, shape, blocks: seen.append((order, shape))):
        ...     out = multimax.multimax_attention(query, key, value, torch.zeros(2, 2), torch.zeros(2, 2))
        >>> seen
        [(2, (2, 4, 9, 9))]
    """
    _observers.append(observer)
    try:
        yield
    finally:
        # by identity and from the end: the same observer may be registered twice
        last = max(i for i, other in enumerate(_observers) if other is observer)
        del _observers[last]


@contextmanager
def as_order(order: int) -> Iterator[None]:
    """Within the context, reports calls with this order: for softmax, say, that runs as a special case of MultiMax."""
    if not active():
        yield
        return
    _orders.append(order)
    try:
        yield
    finally:
        _orders.pop()


def report(order: int, shape: tuple[int, ...], blocks: Blocks) -> None:
    """Reports one call to every observer. ``blocks`` must give the same blocks each time it is called."""
    with torch.no_grad():
        for observer in tuple(_observers):
            observer(_orders[-1] if _orders else order, shape, blocks)
