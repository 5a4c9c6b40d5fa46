"""Every module of the library: attention, the output layer and its losses, and the reweighting functions."""

from multimax.nn.multihead import MultiheadAttention
from multimax.nn.output import LinearMultiMaxCrossEntropyLoss, MultiMaxCrossEntropyLoss, MultiMaxHead
from multimax.reweighting.high_pass import AttnScale
from multimax.reweighting.layer import MultiMax
from multimax.reweighting.losses import Entmax15Loss, EntmaxLoss, EvSoftmaxLoss, SparsemaxLoss
from multimax.reweighting.modules import (
    AttnScaledSoftmax,
    Entmax,
    Entmax15,
    EvSoftmax,
    Softmax,
    Sparsehourglass,
    Sparsemax,
    TopK,
)

__all__ = [
    "AttnScale",
    "AttnScaledSoftmax",
    "Entmax",
    "Entmax15",
    "Entmax15Loss",
    "EntmaxLoss",
    "EvSoftmax",
    "EvSoftmaxLoss",
    "LinearMultiMaxCrossEntropyLoss",
    "MultiMax",
    "MultiMaxCrossEntropyLoss",
    "MultiMaxHead",
    "MultiheadAttention",
    "Softmax",
    "Sparsehourglass",
    "Sparsemax",
    "SparsemaxLoss",
    "TopK",
]
