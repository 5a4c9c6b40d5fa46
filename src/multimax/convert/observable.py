"""Attention of any model, made observable."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from multimax.convert.conversion import convert_, revert_
from multimax.convert.sites import marked


@contextmanager
def observable_attention(model: nn.Module) -> Iterator[None]:
    """Attention of a model with plain softmax, computed by this library for the moment: otherwise the weights never
    exist to be measured."""
    if marked(model):  # a converted model shows all of its attention
        yield
        return
    convert_(model, reweight="softmax")
    try:
        yield
    finally:
        revert_(model)
