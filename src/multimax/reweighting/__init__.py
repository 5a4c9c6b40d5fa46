"""All reweighting functions in one place: functions, modules, losses, attention, and a registry.

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

from multimax.ops.entmax.api import entmax, entmax15, sparsemax
from multimax.ops.rows.api import multimax
from multimax.reweighting.blockwise import attention
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
    Softmax,
    Sparsehourglass,
    Sparsemax,
    TopK,
)
from multimax.reweighting.registry import Reweighter, Reweighting, Spec, get, learned, module, names
from multimax.reweighting.softmax_family import attnscale, evsoftmax, softmax, topk
from multimax.reweighting.sparse_hourglass import sparsehourglass
from multimax.reweighting.specs import SPECS

__all__ = [
    "SPECS",
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
    "Spec",
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
    "learned",
    "module",
    "multimax",
    "names",
    "softmax",
    "sparsehourglass",
    "sparsemax",
    "sparsemax_loss",
    "topk",
]
