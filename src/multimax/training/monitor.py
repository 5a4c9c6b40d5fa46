"""What the reweighting functions of a model do while it trains: their parameters, measures and gradients by layer."""

import copy
import math
import warnings
from collections.abc import Callable, Collection
from contextlib import ExitStack
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from multimax.metrics import AttentionStatistics, collect
from multimax.metrics.monotonicity import least_slope
from multimax.nn.multihead import ADDED
from multimax.ops import checks
from multimax.reweighting.layer import MultiMax
from multimax.reweighting.registry import learned
from multimax.training.groups import reweighting_modules
from multimax.training.score_ranges import ScoreRanges

SCORES = (-10.0, 10.0)  # where scores cannot be seen
ROUNDING = 1e-5  # a slope this little below 0 does not count
Log = Callable[[dict[str, float], int], object]


def _unwrapped(model: nn.Module) -> nn.Module:
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def layer_name(name: str) -> str:
    """The layer that a module belongs to: its parent, if the module is only the layer's function."""
    parent, _, last = name.rpartition(".")
    return (parent if last in ADDED else name) or "model"


def _whole(t: Tensor) -> Tensor:
    """A tensor that may be sharded over processes."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def _gathered(module: nn.Module) -> nn.Module:
    """The module with its parameters as they are used, detached and whole."""
    plain = copy.copy(module)
    whole = {name: None if p is None else _whole(p.detach()) for name, p in module._parameters.items()}
    plain.__dict__["_parameters"] = whole
    return plain


def _drops(module: nn.Module) -> bool:
    """Whether there is dropout in a module, or a rate of it among its attributes."""
    return any(isinstance(part, nn.Dropout) and part.p > 0 for part in module.modules()) or any(
        "dropout" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items()
    )


def _watchable(model: nn.Module) -> None:
    """Raises if the measures cannot be taken in training."""
    checks.observable(model)
    functions = [name for name, _ in reweighting_modules(model)]
    for name, module in model.named_modules():
        if "Attention" not in type(module).__name__ or isinstance(module, nn.MultiheadAttention):
            continue
        if not any(one.startswith(f"{name}.") or name.startswith(f"{layer_name(one)}.") for one in functions):
            checks.no_dropout(name, module, _drops(module))


class SigmaFalls(UserWarning):
    """Where a larger score gets less weight than a smaller one.

    Args:
        text: what was seen.
        layer: full name of the layer.
    """

    def __init__(self, text: str, layer: str = "") -> None:
        super().__init__(text)
        self.layer = layer


class Monitor:
    r"""Observes the reweighting functions of a model in any training loop, every few steps.

    A context manager, entered once per step, around the forward and backward of all its micro-batches. On every
    ``every``-th step, the first included, it logs for each layer

    - the parameters: ``t_b_1``, ``t_d_1``, ``b_1``, ``d_1`` and so on for the further orders, in the paper's symbols;
      ``temperature``, ``alpha`` or ``omega`` for the other functions that learn;
    - the measures of this step's batches, taken by :func:`multimax.metrics.collect`;
    - ``grad_norm``, of all reweighting parameters in it, at the end of the block; and one for all layers together.

    Names are ``multimax/<layer>/<value>``, where the layer is the module that holds the function. On these steps it
    also warns, once for each layer and cause, where

    - sigma falls somewhere in the range of scores that the layer has seen in this step: a larger score then gets less
      weight (:func:`multimax.metrics.least_slope`, exact for any order). In an output layer the scores are the logits
      of the first rows; where none can be observed, the range is [-10, 10];
    - a stored parameter is not finite, or beyond ``limit``.

    The model's results, gradients and random numbers do not change. On all other steps nothing is observed, at no cost.
    Where attention cannot be observed, as under ``torch.compile``, it says so once and logs everything but the
    measures.

    Args:
        model: to be trained; may be wrapped by ``DistributedDataParallel``. With several processes, all have to enter
            and leave together, since sharded parameters are gathered; each measures its own batches only.
        log: called as ``log(values, step)``, where values is a dict of floats; None to read ``values`` yourself.
        every: how many steps from one that is observed to the next.
        measures: names of measures, as for :func:`multimax.metrics.collect`; none for no measures.
        per_head: log parameters for each head (``head_0/t_b_1``), not their mean over the heads.
        score_range: (low, high) in which sigma has to rise, instead of the observed range.
        limit: the absolute value beyond which a stored parameter has run away.

    Attributes:
        step: number of the next step, which may be set; ``log`` gets the number of steps before it.
        values: what was logged last.

    Example:
        >>> import torch, multimax
        >>> model = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        >>> model.self_attn = multimax.MultiheadAttention(32, 4, batch_first=True, init="identity")
        >>> optimizer = torch.optim.AdamW(multimax.param_groups(model, lr=1e-3, weight_decay=0.05))
        >>> monitor = multimax.Monitor(model, lambda values, step: print(step, len(values)), every=2)
        >>> for _ in range(4):
        ...     with monitor:
        ...         model(torch.randn(2, 10, 32)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        0 13
        2 13
        >>> list(monitor.values)[:4]  # doctest: +NORMALIZE_WHITESPACE
        ['multimax/self_attn/t_b_1', 'multimax/self_attn/t_d_1', 'multimax/self_attn/b_1', 'multimax/self_attn/d_1']
    """

    def __init__(
        self,
        model: nn.Module,
        log: Log | None = None,
        *,
        every: int = 100,
        measures: Collection[str] = ("multi_modality", "sparsity", "entropy"),
        per_head: bool = False,
        score_range: tuple[float, float] | None = None,
        limit: float = 100.0,
    ) -> None:
        every = checks.positive_integer("every", every)
        checks.number_above("limit", limit, 0)
        checks.score_range(score_range)
        self.modules = dict(reweighting_modules(_unwrapped(model)))
        checks.some_reweighting_modules(model, self.modules)
        self.wrapped, self.model, self.log, self.every = model, _unwrapped(model), log, every
        self.measures, self.per_head, self.score_range, self.limit = tuple(measures), per_head, score_range, limit
        self.step = 0
        self.values: dict[str, float] = {}
        self._hooks: ExitStack | None = None
        self._found: AttentionStatistics | None = None
        self._ranges = ScoreRanges({}, self.model)
        self._warned: set[tuple[str, str]] = set()

    def _warn(self, layer: str, cause: str, text: str | SigmaFalls) -> None:
        """Once for each layer and cause, by one process."""
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if (layer, cause) not in self._warned and (not distributed or torch.distributed.get_rank() == 0):
            warnings.warn(text, stacklevel=4)
        self._warned.add((layer, cause))

    def _no_measures(self, error: ValueError) -> None:
        if self.measures:
            self._warn("", "measures", f"{error} (multimax.Monitor continues without measures)")
        self.measures, self._found = (), None

    def __enter__(self) -> "Monitor":
        """Begins a step."""
        if self._hooks is not None:
            raise RuntimeError("multimax: expected the previous step to have ended, got another within it")
        if self.step % self.every == 0:
            self._hooks = ExitStack()
            self._ranges = ScoreRanges({n: m for n, m in self.modules.items() if isinstance(m, MultiMax)}, self.model)
            try:
                _watchable(self.wrapped)
                if self.measures:
                    self._found = self._hooks.enter_context(collect(self.model, self.measures))
                if self.score_range is None:
                    self._hooks.enter_context(self._ranges.watch())
            except ValueError as error:
                self._no_measures(error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends a step: reads, checks and logs, if it was one to observe and raised nothing."""
        step, hooks = self.step, self._hooks
        self.step, self._hooks = step + 1, None
        if hooks is None:
            return
        if kind is not None:
            hooks.__exit__(kind, error, trace)
            return
        try:
            hooks.close()
        except ValueError as nothing_seen:
            self._no_measures(nothing_seen)
        with torch.no_grad():
            self.values = self._read()
        if self.log is not None:
            self.log(self.values, step)

    def close(self) -> None:
        """Leaves a step that was interrupted, if there is one, and reads nothing."""
        if self._hooks is not None:
            error = RuntimeError("multimax: a step was interrupted")
            self.__exit__(RuntimeError, error, None)

    def _read(self) -> dict[str, float]:
        values: dict[str, float] = {}
        grads: dict[str, list[Tensor]] = {}
        for name, module in self.modules.items():
            layer, plain = layer_name(name), _gathered(module)
            for symbol, value in learned(plain).items():
                heads = value.reshape(-1).tolist()
                if self.per_head and len(heads) > 1:
                    values.update({f"multimax/{layer}/head_{h}/{symbol}": number for h, number in enumerate(heads)})
                else:
                    values[f"multimax/{layer}/{symbol}"] = math.fsum(heads) / len(heads)
            grads.setdefault(layer, []).extend(p.grad for p in module.parameters() if p.grad is not None)
            self._check(name, layer, plain)
        for layer, statistics in ({} if self._found is None else self._found.layers).items():
            for measure, moments in statistics.measures.items():
                if moments.count:
                    values[f"multimax/{layer_name(layer)}/{measure}"] = moments.mean
        for layer, of_layer in grads.items():
            if of_layer:
                values[f"multimax/{layer}/grad_norm"] = _whole(get_total_norm(of_layer)).item()
        if everything := [grad for of_layer in grads.values() for grad in of_layer]:
            values["multimax/grad_norm"] = _whole(get_total_norm(everything)).item()
        return values

    def _check(self, name: str, layer: str, plain: nn.Module) -> None:
        """Warns of parameters that have run away, and of a sigma that falls."""
        for which, p in plain._parameters.items():
            if p is None:
                continue
            if not p.isfinite().all():
                text = f"multimax: expected finite parameters, got {which} of {layer} with NaN or infinity"
                return self._warn(name, "finite", text)
            if p.abs().max() > self.limit:
                text = f"multimax: expected parameters within {self.limit:g}, got {which} of {layer} with "
                text += f"{p.abs().max().item():.4g}; a lower multimax_lr_factor in param_groups may prevent it"
                self._warn(name, "limit", text)
        if not isinstance(plain, MultiMax):
            return None
        low, high = self.score_range or self._ranges.seen.get(name, SCORES)
        sets = [parameter.reshape(-1, plain.order, 2) for parameter in plain.parameters_in_use()]
        slope, x = min(least_slope(coefs, knots, low, high) for coefs, knots in zip(*sets, strict=True))
        if slope < -ROUNDING:
            seen = name in self._ranges.seen and self.score_range is None
            where = f"{'scores seen' if seen else 'scores'} from {low:.4g} to {high:.4g}"
            text = f"multimax: expected sigma to rise, got a slope of {slope:.4g} at {x:.4g} in {layer}, over {where}: "
            text += "a larger score gets less weight there; MultiMax(monotone=True) prevents it"
            self._warn(name, "monotone", SigmaFalls(text, layer))
        return None
