"""What MultiMax adds to a model, counted as the paper does."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multimax.metrics.evaluation import evaluating
from multimax.metrics.running import Frame, RunningModules
from multimax.nn.output import LinearMultiMaxCrossEntropyLoss, MultiMaxCrossEntropyLoss, MultiMaxHead
from multimax.ops import checks, observing
from multimax.reweighting.layer import MultiMax


def operations_per_score(order: int = 2, terms: str = "both") -> int:
    """The paper's count for one entry: two subtractions, two maxima, two products and one addition for each order, and
    the residual addition; 15 at order 2. With one term off it is one of each, without the addition.

    Example:
        >>> from multimax.metrics.counting import operations_per_score
        >>> operations_per_score(order=2)
        15
    """
    return (7 if terms == "both" else 3) * order + 1


@dataclass
class LayerCount:
    """What one layer adds."""

    parameters: int
    order: int
    terms: str
    scores: int = 0  # entries that went through sigma

    @property
    def operations(self) -> int:
        """Floating-point operations of sigma in the forward pass."""
        return self.scores * operations_per_score(self.order, self.terms)


@dataclass(frozen=True)
class Count:
    """What MultiMax adds to a model: each layer by name, and all together."""

    layers: dict[str, LayerCount]

    @property
    def parameters(self) -> int:
        """Scalars."""
        return sum(layer.parameters for layer in self.layers.values())

    @property
    def scores(self) -> int:
        """Entries that went through sigma."""
        return sum(layer.scores for layer in self.layers.values())

    @property
    def operations(self) -> int:
        """Floating-point operations in the forward pass."""
        return sum(layer.operations for layer in self.layers.values())

    def __str__(self) -> str:
        """A table in Markdown."""
        lines = ["| layer | parameters | scores | operations |", "|---|---|---|---|"]
        rows = [(name or "(model)", layer) for name, layer in self.layers.items()]
        lines += [f"| {name} | {layer.parameters} | {layer.scores:,} | {layer.operations:,} |" for name, layer in rows]
        lines.append(f"| all | {self.parameters} | {self.scores:,} | {self.operations:,} |")
        return "\n".join(lines)


def _scores_of_output(module: nn.Module, x: Tensor) -> int | None:
    """Entries that a module of the output layer modulates, None for other modules."""
    if isinstance(module, MultiMaxHead):
        return x.numel() // module.in_features * module.out_features
    if isinstance(module, LinearMultiMaxCrossEntropyLoss):
        classes, features = module.linear.weight.shape
        return x.numel() // features * classes
    return x.numel() if isinstance(module, (MultiMaxCrossEntropyLoss, MultiMax)) else None


@contextmanager
def _watched(model: nn.Module, layers: dict[str, LayerCount]) -> Iterator[None]:
    """Counts what runs within."""
    parents = {name: name.rpartition(".")[0] for name in layers if name}

    def add(scores: int, order: int | None = None) -> None:
        """Adds to the MultiMax that is running, or that belongs to the innermost running module that has one."""
        for frame in reversed(running.frames):
            near = [layer for name, layer in layers.items() if frame.name == name or parents.get(name) == frame.name]
            same_order = [layer for layer in near if order in (None, layer.order)]
            if layer := next(iter(same_order or near), None):
                layer.scores += scores
                return

    def left(frame: Frame, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: object) -> None:
        first = next(iter((*args, *kwargs.values())), None)
        scores = _scores_of_output(frame.module, first) if isinstance(first, Tensor) else None
        if scores is not None:
            add(scores)

    def observe(order: int, shape: tuple[int, ...], _: Any) -> None:
        if order:
            add(torch.Size(shape).numel(), order)

    running = RunningModules({module: name for name, module in model.named_modules()}, Frame, left)
    with running.watch(), observing.observe(observe):
        yield


def count(model: nn.Module, *args: Any, **kwargs: Any) -> Count:
    """What MultiMax adds to a model, in parameters and, for one call, in operations, as the paper counts them.

    A layer of order N has 4 N parameters (times its heads, with parameters per head) and 7 N + 1 operations for each
    score that goes through sigma: queries x keys x heads in attention, rows x classes in the output layer. Masked
    scores count too. Only the forward pass is counted.

    Args:
        model: any module with :class:`MultiMax` in it.
        args: what to call the model with, for its operations; if not given, only parameters are counted.
        kwargs: likewise, by name.

    Returns:
        A :class:`Count`: ``.parameters``, ``.operations``, ``.scores``, ``.layers`` by name, and a table as a string.

    Example:
        >>> import torch, multimax
        >>> layer = multimax.MultiheadAttention(384, 6, batch_first=True)
        >>> x = torch.randn(1, 256, 384)
        >>> print(multimax.count(layer, x, x, x, need_weights=False))
        | layer | parameters | scores | operations |
        |---|---|---|---|
        | multimax | 8 | 393,216 | 5,898,240 |
        | all | 8 | 393,216 | 5,898,240 |
    """
    checks.module(model)
    layers: dict[str, LayerCount] = {}
    for name, module in model.named_modules():
        if isinstance(module, MultiMax):
            used = 1 if module.terms == "both" else 2
            parameters = (module.coefs.numel() + module.knots.numel()) // used
            layers[name] = LayerCount(parameters, module.order, module.terms)
    checks.some_multimax(layers)
    if args or kwargs:
        # evaluation: no dropout, no running statistics
        with torch.no_grad(), evaluating(model), _watched(model, layers):
            model(*args, **kwargs)
    return Count(layers)
