"""What the few parameters of the reweighting functions need in training: no decay, a separate rate and clipping."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from multimax.nn.output import LinearMultiMaxCrossEntropyLoss
from multimax.ops import checks
from multimax.reweighting.high_pass import AttnScale
from multimax.reweighting.registry import Reweighter

MODES = ("scaled", "separate")


def reweighting_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of each reweighting function in a model, in order, by type: :class:`multimax.MultiMax`, the
    modules of ``multimax.reweighting``, and :class:`multimax.oversmoothing.AttnScale`.

    Example:
        >>> import multimax
        >>> from multimax import training
        >>> dict(training.reweighting_modules(multimax.MultiMaxHead(16, 1000, init="identity")))
        {'multimax': MultiMax(order=2, t_b=[1, 1], t_d=[1, 1], b=[-0.5, -1], d=[0.5, 1])}
    """
    checks.module(model)
    for name, module in model.named_modules():
        if isinstance(module, Reweighter | AttnScale):
            yield name, module


def reweighting_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Name and parameter of everything that the reweighting functions of a model learn, each parameter once.

    These are ``coefs`` and ``knots`` of MultiMax, a trained temperature, the shape of a trained alpha, and the omega of
    AttnScale; whether they require a gradient or not.

    Example:
        >>> import multimax
        >>> [name for name, _ in multimax.reweighting_parameters(multimax.MultiheadAttention(64, 4))]
        ['multimax.coefs', 'multimax.knots']
    """
    seen = set()
    for prefix, module in reweighting_modules(model):
        for name, parameter in module.named_parameters(prefix):
            if parameter not in seen:
                seen.add(parameter)
                yield name, parameter


def param_groups(
    model: nn.Module, *, lr: float | Tensor, weight_decay: float, multimax_lr_factor: float = 1.0
) -> list[dict[str, Any]]:
    r"""Two groups for an optimizer: the reweighting functions' parameters, which are never decayed, and all others.

    .. math:: \text{rate} = \text{lr} \cdot \text{factor}, \qquad \text{decay} = 0

    for the reweighting parameters. Decay would pull them towards softmax, and the knots towards 0, whatever the loss.

    ``coefs`` and ``knots`` have two dims, but are not matrices: optimizers that orthogonalise, such as
    ``torch.optim.Muon``, must not get them, and a split by ``ndim == 2`` would hand them over. Split only the
    first group, and give the second to AdamW (see the example). It is marked ``use_muon: False`` for optimizers that
    combine the two.

    Args:
        model: converted or not.
        lr: the learning rate.
        weight_decay: of all other parameters.
        multimax_lr_factor: the reweighting parameters' learning rate, as a multiple of lr.

    Returns:
        [others, reweighting], dicts as ``torch.optim`` takes them. Each parameter that requires a gradient is in
        exactly one group, also where modules share it. Without reweighting parameters, as in a baseline, the second
        group is empty.

    Example:
        >>> import torch, multimax
        >>> layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
        >>> layer.self_attn = multimax.MultiheadAttention(64, 4, batch_first=True)
        >>> others, reweighting = multimax.param_groups(layer, lr=1e-3, weight_decay=0.05, multimax_lr_factor=10)
        >>> reweighting["lr"], reweighting["weight_decay"], [tuple(p.shape) for p in reweighting["params"]]
        (0.01, 0.0, [(2, 2), (2, 2)])
        >>> optimizer = torch.optim.AdamW([others, reweighting])
        >>> matrices = [p for p in others["params"] if p.ndim == 2]  # none of MultiMax's among them
        >>> muon = torch.optim.Muon(matrices, lr=0.02)
        >>> others["params"] = [p for p in others["params"] if p.ndim != 2]
        >>> adamw = torch.optim.AdamW([others, reweighting])
    """
    checks.finite("multimax_lr_factor", multimax_lr_factor)
    reweighting = dict.fromkeys(p for _, p in reweighting_parameters(model))
    others = [p for p in model.parameters() if p.requires_grad and p not in reweighting]
    return [
        {"params": others, "lr": lr, "weight_decay": weight_decay},
        {
            "params": [p for p in reweighting if p.requires_grad],
            "lr": lr * multimax_lr_factor,
            "weight_decay": 0.0,
            "use_muon": False,
        },
    ]


def output_linear(parent: nn.Module) -> nn.Linear | None:
    """The linear layer of an output layer that holds a reweighting module."""
    if isinstance(parent, LinearMultiMaxCrossEntropyLoss):
        return parent.linear
    return parent if isinstance(parent, nn.Linear) else None


def _classes(model: nn.Module) -> dict[nn.Parameter, int]:
    """The number of classes for each reweighting parameter of an output layer."""
    found = {}
    for name, module in reweighting_modules(model):
        while name:  # the module may be wrapped by others inside of the layer
            name = name.rpartition(".")[0]
            linear = output_linear(model.get_submodule(name))
            if linear is not None:
                found.update(dict.fromkeys(module.parameters(), linear.out_features))
                break
    return found


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    *,
    mode: str = "scaled",
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    r"""``torch.nn.utils.clip_grad_norm_`` that a few shared scalars cannot dominate.

    .. math:: g \leftarrow g \cdot \min\left(1, \frac{\text{max\_norm}}{N + 10^{-6}}\right)

    The gradient of MultiMax in the output layer is a sum over all classes of all tokens, and may be most of a model's
    norm. With one norm for all, that would slow every other parameter. In place, one of:

    - "scaled": one N for all, in which the gradient of an output layer's reweighting parameters counts divided by
      :math:`\sqrt{V}`, V its number of classes:
      :math:`N = \lVert (g_{others}, g_{MultiMax} / \sqrt{V}) \rVert`. The division is for N alone. All gradients are
      then multiplied by one factor: the direction of the step stays the same, nothing changes below max_norm, and a
      second call does nothing. For Adam, which divides by the gradient's size, nothing else matters.
    - "separate": the reweighting parameters of all layers together are clipped by one norm, and all other parameters
      by another, each to max_norm.

    An output layer is an ``nn.Linear`` that holds the reweighting module, as :class:`multimax.MultiMaxHead` does, or a
    module with both it and an ``nn.Linear`` called ``linear``. Parameters of attention always count in full in
    "scaled": their number of keys depends on the batch, not on the module. A model without reweighting parameters is
    clipped as in torch.

    Args:
        model: after the backward; its gradients may be DTensors, as under ``fully_shard``.
        max_norm: the largest N that is left unclipped.
        mode: "scaled" or "separate".
        norm_type: p of the norm, ``inf`` for the largest.
        error_if_nonfinite: raise if a norm is NaN or infinite, before anything is changed.

    Returns:
        The norm before clipping: N for "scaled", the norm of all gradients for "separate". A DTensor if the
        gradients are, as in torch: its ``full_tensor()`` is the number.

    Example:
        >>> import torch, multimax
        >>> head = multimax.MultiMaxHead(16, 10000)
        >>> head(torch.randn(8, 16), torch.randint(10000, (8,))).backward()
        >>> norm = multimax.clip_grad_norm_(head, 0.01)
        >>> torch.nn.utils.get_total_norm([head.weight.grad, head.bias.grad]) < 0.01
        tensor(True)
    """
    checks.module(model)
    checks.choice("mode", mode, MODES)
    grads = {p: p.grad for p in model.parameters() if p.grad is not None}
    if mode == "scaled":
        classes = _classes(model)
        scaled = [grad / math.sqrt(classes[p]) if p in classes else grad for p, grad in grads.items()]
        total = get_total_norm(scaled, norm_type, error_if_nonfinite)
        clip_grads_with_norm_(grads, max_norm, total)
        return total
    reweighting = {p for _, p in reweighting_parameters(model)}
    both = [p for p in grads if p in reweighting], [p for p in grads if p not in reweighting]
    groups = [group for group in both if group]
    norms = [get_total_norm([grads[p] for p in group], norm_type, error_if_nonfinite) for group in groups]
    for group, norm in zip(groups, norms, strict=True):
        clip_grads_with_norm_(group, max_norm, norm)
    return get_total_norm(norms, norm_type)


@dataclass
class TrainOnly:
    """Which parameters :func:`train_only_reweighting_` left to train, and how to undo it; also a context manager."""

    model: nn.Module
    names: tuple[str, ...]  # of the parameters that are trained
    numel: int  # how many numbers they hold
    before: dict[str, bool]  # requires_grad of every parameter

    def undo(self) -> None:
        """Every parameter requires a gradient again if it did before."""
        # by name: the parameters themselves may have been replaced, as fully_shard does
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(self.before.get(name, parameter.requires_grad))

    def __enter__(self) -> "TrainOnly":
        """Itself: the parameters are already frozen."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Undoes it."""
        self.undo()

    def __repr__(self) -> str:
        """How much is trained."""
        return f"TrainOnly({len(self.names)} parameters, {self.numel} numbers)"


def train_only_reweighting_(model: nn.Module) -> TrainOnly:
    """Freezes everything in a model but the parameters of its reweighting functions, in place.

    A model of 12 attention layers of order 2 then trains 96 numbers. Frozen parameters lose their gradient, since
    optimizers also apply one that is left over. Do it before ``DistributedDataParallel`` or ``fully_shard``, which
    look at ``requires_grad`` once.

    Args:
        model: with at least one reweighting parameter.

    Returns:
        A :class:`TrainOnly` with ``names`` and ``numel`` of what is trained; ``undo()``, or the end of a ``with``,
        gives every parameter the ``requires_grad`` that it had.

    Example:
        >>> import multimax
        >>> head = multimax.MultiMaxHead(16, 1000)
        >>> only = multimax.train_only_reweighting_(head)
        >>> only, only.names
        (TrainOnly(2 parameters, 8 numbers), ('multimax.coefs', 'multimax.knots'))
        >>> only.undo()
        >>> head.weight.requires_grad
        True
    """
    reweighting = dict(reweighting_parameters(model))
    checks.some_reweighting_parameters(model, reweighting)
    trained = set(reweighting.values())
    before = {}
    for name, parameter in model.named_parameters():
        before[name] = parameter.requires_grad
        parameter.requires_grad_(parameter in trained)
        if parameter not in trained:
            parameter.grad = None
    return TrainOnly(model, tuple(reweighting), sum(p.numel() for p in trained), before)
