"""The reweighting module that a converted layer gets, and the same as plain data, for saving."""

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from multimax.ops import checks
from multimax.ops.presets import presets
from multimax.reweighting import module, names
from multimax.reweighting.layer import MultiMax
from multimax.reweighting.registry import Reweighter


class Recipe:
    """How to make the reweighting module of a layer.

    Args:
        reweight: a name of :mod:`multimax.reweighting`, or one of its modules, which is copied for every layer.
        order: order of sigma, for the name "multimax".
        per_head: one set of parameters per head, for the name "multimax".
        init: initial parameters, for the name "multimax".
    """

    def __init__(
        self,
        reweight: str | nn.Module,
        order: int = 2,
        per_head: bool = False,
        init: str | tuple[Tensor, Tensor] = "identity",
    ) -> None:
        if not isinstance(reweight, (str, MultiMax, Reweighter)):
            raise TypeError(
                "multimax: expected reweight to be a name or a module of multimax.reweighting, got "
                f"{reweight if isinstance(reweight, type) else type(reweight).__name__}"
            )
        if not isinstance(per_head, bool):
            raise TypeError(f"multimax: expected per_head to be a bool, got {per_head!r}")
        self.per_head = per_head
        self.prototype: MultiMax | Reweighter
        if reweight == "multimax":
            pair = isinstance(init, tuple) and len(init) == 2 and all(isinstance(t, Tensor) for t in init)
            if not isinstance(init, str) and not pair:
                raise TypeError(
                    f"multimax: expected init to be a name or a pair of tensors (coefs, knots), got {init!r}"
                )
            heads = None if isinstance(init, str) or init[0].ndim < 3 else init[0].shape[0]
            self.prototype = MultiMax(order, init=init, heads=heads)
            return
        if isinstance(reweight, str):
            checks.choice("reweight", reweight, names())
        if not isinstance(init, str) or (order, per_head, init) != (2, False, "identity"):
            raise ValueError(
                "multimax: expected order, per_head and init with reweight='multimax' only, got them with "
                f"{reweight!r}; give a module with the options it takes"
            )
        made = module(reweight) if isinstance(reweight, str) else reweight
        assert isinstance(made, MultiMax | Reweighter)
        self.prototype = made

    @property
    def name(self) -> str:
        """The function's name."""
        return name_of(self.prototype)

    @property
    def heads(self) -> int | None:
        """How many heads a layer must have; None for any number."""
        heads: int | None = self.prototype.settings().get("heads")
        return heads

    def make(self, heads: int | None, depth: float | None = None) -> nn.Module:
        """The module for a layer.

        Args:
            heads: of the layer.
            depth: of the layer in its model, from 0 to 1; None for an output layer, of which the paper prints nothing:
                it starts as softmax.
        """
        prototype = self.prototype
        if not isinstance(prototype, MultiMax):
            return copy.deepcopy(prototype)
        if self.per_head and self.heads is None:
            made = MultiMax(prototype.order, init=prototype.init, heads=heads)
        else:
            made = copy.deepcopy(prototype)
        if prototype.init in presets:
            made.init, made.depth = (prototype.init, depth) if depth is not None else ("identity", 1.0)
            made.reset_parameters()
        return made

    def why_not_output(self) -> str | None:
        """Why the function cannot be used in the output layer, after which the model itself computes softmax."""
        if self.heads is not None:
            return "an output layer has no heads"
        if self.name in ("multimax", "softmax"):
            return None
        return (
            f"{self.name} of logits is not the softmax of other logits, but the model's loss is for softmax; "
            "train with a loss of multimax.reweighting instead"
        )


def name_of(function: MultiMax | Reweighter) -> str:
    """The name of a reweighting module's function."""
    return "multimax" if isinstance(function, MultiMax) else function.reweighting_name


def describe(function: MultiMax | Reweighter) -> dict[str, Any]:
    """A reweighting module without its parameters, as plain data."""
    return {"name": name_of(function), **function.settings()}


def from_description(description: Mapping[str, Any]) -> nn.Module:
    """The module that :func:`describe` described, with initial parameters."""
    options = dict(description)
    name = options.pop("name", None)
    checks.choice("the name of a reweighting function", name, names())
    if name == "multimax":
        options["init"] = "identity"
    if "bounds" in options:
        options["bounds"] = tuple(options["bounds"])  # lists, in JSON
    return module(name, **options)
