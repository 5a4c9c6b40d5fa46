"""The other reweighting functions of the field behind one door: functions, modules, losses, attention, and a registry.

>>> import torch
>>> from multimax import reweighting
>>> x = torch.tensor([2.0, 1.6, -1.0])
>>> for name in ("softmax", "sparsemax", "entmax15", "evsoftmax"):
...     print(f"{name:10}", reweighting.get(name)(x))
softmax    tensor([0.5814, 0.3897, 0.0289])
sparsemax  tensor([0.7000, 0.3000, 0.0000])
entmax15   tensor([0.6400, 0.3600, 0.0000])
evsoftmax  tensor([0.5987, 0.4013, 0.0000])

"""

from multimax.reweighting.blockwise import attention
from multimax.reweighting.functions import (
    attnscale,
    entmax,
    entmax15,
    evsoftmax,
    multimax,
    softmax,
    sparsehourglass,
    sparsemax,
    topk,
)
from multimax.reweighting.layer import MultiMax
from multimax.reweighting.losses import (
    Entmax15Loss,
    EntmaxLoss,
    EvSoftmaxLoss,
    SparsemaxLoss,
    entmax15_loss,
    entmax_loss,
    evsoftmax_loss,
    sparsemax_loss,
)
from multimax.reweighting.modules import (
    AttnScaledSoftmax,
    Entmax,
    Entmax15,
    EvSoftmax,
    Reweighter,
    Softmax,
    Sparsehourglass,
    Sparsemax,
    TopK,
    module,
)
from multimax.reweighting.specs import Reweighting, get, names

__all__ = [
    "AttnScaledSoftmax",
    "Entmax",
    "Entmax15",
    "Entmax15Loss",
    "EntmaxLoss",
    "EvSoftmax",
    "EvSoftmaxLoss",
    "MultiMax",
    "Reweighter",
    "Reweighting",
    "Softmax",
    "Sparsehourglass",
    "Sparsemax",
    "SparsemaxLoss",
    "TopK",
    "attention",
    "attnscale",
    "entmax",
    "entmax15",
    "entmax15_loss",
    "entmax_loss",
    "evsoftmax",
    "evsoftmax_loss",
    "get",
    "module",
    "multimax",
    "names",
    "softmax",
    "sparsehourglass",
    "sparsemax",
    "sparsemax_loss",
    "topk",
]
