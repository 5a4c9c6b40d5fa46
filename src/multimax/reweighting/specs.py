"""The reweighting functions, each in one place: a new one needs its function, its module and a Spec here."""

from multimax.ops.entmax.api import entmax, entmax15, sparsemax
from multimax.ops.rows.api import multimax
from multimax.reweighting import losses, modules, sigma
from multimax.reweighting.layer import SYMBOLS, MultiMax
from multimax.reweighting.registry import BY_NAME, Spec
from multimax.reweighting.softmax_family import attnscale, evsoftmax, softmax, topk
from multimax.reweighting.sparse_hourglass import sparsehourglass


def _number(ndim: int) -> tuple[int, int, int]:
    return -4, -3, -2  # (batch, heads, queries, 1), or the last of these


def _pairs(ndim: int) -> tuple[int | None, int, int | None]:
    return (None, -3, None) if ndim == 3 else (-5, -4, -3)  # (heads, order, 2), or (batch, heads, queries, order, 2)


def _heads(ndim: int) -> tuple[None, int, None]:
    return None, -1, None


SPECS = (
    Spec(
        name="softmax",
        function=softmax,
        module=modules.Softmax,
        learns=("temperature",),
        differentiable={"temperature": _number},
        sigma=sigma.SOFTMAX,
    ),
    Spec(
        name="multimax",
        function=multimax,
        module=MultiMax,
        learns=SYMBOLS,
        differentiable={"coefs": _pairs, "knots": _pairs},
        sigma=sigma.MULTIMAX,
        home="multimax",
    ),
    Spec(
        name="sparsemax",
        function=sparsemax,
        module=modules.Sparsemax,
        loss=losses.sparsemax_loss,
        loss_module=losses.SparsemaxLoss,
    ),
    Spec(
        name="entmax15",
        function=entmax15,
        module=modules.Entmax15,
        loss=losses.entmax15_loss,
        loss_module=losses.Entmax15Loss,
    ),
    Spec(
        name="entmax",
        function=entmax,
        module=modules.Entmax,
        loss=losses.entmax_loss,
        loss_module=losses.EntmaxLoss,
        learns=("alpha",),
        differentiable={"alpha": _number},
    ),
    Spec(
        name="evsoftmax",
        function=evsoftmax,
        module=modules.EvSoftmax,
        loss=losses.evsoftmax_loss,
        loss_module=losses.EvSoftmaxLoss,
    ),
    Spec(name="sparsehourglass", function=sparsehourglass, module=modules.Sparsehourglass),
    Spec(name="topk", function=topk, module=modules.TopK),
    Spec(
        name="attnscale",
        function=attnscale,
        module=modules.AttnScaledSoftmax,
        learns=("omega",),
        differentiable={"omega": _heads},
    ),
)
BY_NAME.update({spec.name: spec for spec in SPECS})
