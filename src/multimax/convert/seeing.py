"""Attention of any model, so that its weights can be looked at."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from multimax.convert.conversion import convert_, revert_
from multimax.convert.sites import marked


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """A model in evaluation mode; afterwards each of its modules is in the mode that it was in."""
    training = [own for own in model.modules() if own.training]
    model.eval()
    try:
        yield
    finally:
        for own in training:
            own.training = True


@contextmanager
def seen(model: nn.Module) -> Iterator[None]:
    """Attention of a model with plain softmax, so that it can be measured: elsewhere the weights are never there."""
    if next(marked(model), None) is not None:  # a converted model shows all of its attention
        yield
        return
    convert_(model, reweight="softmax")
    try:
        yield
    finally:
        revert_(model)
