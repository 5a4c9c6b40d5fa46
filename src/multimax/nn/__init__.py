"""The modules."""

from multimax.nn.multihead import MultiheadAttention
from multimax.nn.output import LinearMultiMaxCrossEntropyLoss, MultiMaxCrossEntropyLoss, MultiMaxHead
from multimax.reweighting.layer import MultiMax

__all__ = [
    "LinearMultiMaxCrossEntropyLoss",
    "MultiMax",
    "MultiMaxCrossEntropyLoss",
    "MultiMaxHead",
    "MultiheadAttention",
]
