"""The scores that the MultiMax modules of a model get while it trains, from the least to the largest."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multimax.metrics.running import Frame, RunningModules
from multimax.ops import masking, observing
from multimax.training.groups import output_linear

ROWS = 64  # whose logits are computed for the range of an output layer


class ScoreRanges:
    """The least and the largest score that each MultiMax module gets."""

    def __init__(self, modules: Mapping[str, nn.Module], model: nn.Module) -> None:
        self.modules = modules
        self.parents = {name: model.get_submodule(name.rpartition(".")[0]) for name in modules if name}
        # frames of the parents, each by the name of the MultiMax in it
        self.running = RunningModules({parent: name for name, parent in self.parents.items()}, Frame)
        self.seen: dict[str, tuple[float, float]] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Observes the scores within the context."""
        with ExitStack() as hooks:
            for name, module in self.modules.items():
                hooks.callback(module.register_forward_hook(self._called(name), with_kwargs=True).remove)
            for name, parent in self.parents.items():
                if (linear := output_linear(parent)) is not None:
                    # before its forward: a sharded weight does not stay whole after it
                    hooks.callback(parent.register_forward_pre_hook(self._logits(name, linear)).remove)
            hooks.enter_context(self.running.watch())
            hooks.enter_context(observing.observe(self._observe))
            yield

    def _observe(self, order: int, shape: tuple[int, ...], blocks: observing.Blocks) -> None:
        """An attention function that some module has called."""
        frame = self.running.innermost
        if frame is not None and order:
            for scores, _, part in blocks():
                self._add(frame.name, scores[part])

    def _called(self, name: str) -> Callable[..., None]:
        """The hook of a MultiMax that is given scores."""

        @torch.no_grad()
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: object) -> None:
            given = {**dict(zip(("x", "mask"), args, strict=False)), **kwargs}
            x, mask = given["x"], given.get("mask")
            if x is not None:  # else attention has asked for the options, and its scores are observed
                part = masking.takes_part(x)
                self._add(name, x.detach()[part if mask is None else part & mask])

        return hook

    def _logits(self, name: str, linear: nn.Linear) -> Callable[..., None]:
        """The hook of an output layer, which may never hold its logits."""

        @torch.no_grad()
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            hidden = next(iter(args), None)
            if isinstance(hidden, Tensor):
                rows = hidden.detach().reshape(-1, linear.in_features)[:ROWS]
                self._add(name, F.linear(rows, linear.weight, linear.bias))

        return hook

    def _add(self, name: str, scores: Tensor) -> None:
        scores = scores[scores.isfinite()]
        if scores.numel():
            low, high = (bound.item() for bound in scores.aminmax())
            least, largest = self.seen.get(name, (low, high))
            self.seen[name] = (min(low, least), max(high, largest))
