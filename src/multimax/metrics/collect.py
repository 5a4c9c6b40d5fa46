"""Measures of every attention layer of a model, gathered while it runs, without keeping the scores.

Shapes: B batches, H heads, Lq queries, Lk keys, L positions of self-attention.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from multimax.metrics import sources
from multimax.metrics.features import mean_average_distance, patch_similarity
from multimax.metrics.histogram import LogHistogram
from multimax.metrics.rollout import Rollout
from multimax.metrics.statistics import AttentionStatistics, LayerStatistics, Moments
from multimax.metrics.weights import entropy, mean_score, multi_modality, sparsity, support, top_mass
from multimax.ops import checks, dtypes, observing
from multimax.ops.observing import Blocks

OF_ROWS = ("multi_modality", "sparsity", "entropy", "support", "top_mass")
OF_FEATURES = ("patch_similarity", "mean_average_distance")
MEASURES = (*OF_ROWS, "histogram", *OF_FEATURES, "rollout_discrepancy")


@dataclass
class _Run:
    """One attention of a layer: the shape of its scores, and which positions any of its queries could see."""

    layer: LayerStatistics
    shape: tuple[int, ...]
    seen: Tensor | None  # (B, Lk)


@dataclass
class _Frame:
    """A module that is running."""

    name: str
    module: nn.Module
    reported: bool = False  # some attention in it, or in a module that it called
    runs: int = 0  # attentions of its own
    features: list[_Run] = field(default_factory=list)  # attentions whose measures of features wait for its output


class _Places:
    """Where a layer is in the model: its block, and the stack of such blocks."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self._found: dict[str, tuple[str, str | None]] = {}

    def _elements(self, name: str) -> Iterator[tuple[str, str, str]]:
        """The elements of lists on the way from a module up: (list, element, path from there to the module)."""
        parts = name.split(".") if name else []
        for i in range(len(parts), 0, -1):
            container = ".".join(parts[: i - 1])
            # a module with two names is listed under the first alone, and then its parent may be missing here
            if isinstance(self.modules.get(container), nn.ModuleList | nn.Sequential | nn.ModuleDict):
                yield container, ".".join(parts[:i]), ".".join(parts[i:])

    def of(self, name: str) -> tuple[str, str | None]:
        """Block, and stack (None if there is none), of a layer.

        The stack is the closest list that has the same kind of layer at the same place in another element, which the
        list of a block's own parts has not. In a model of one layer it is the closest list above the layer, if any.
        """
        if name not in self._found:
            self._found[name] = self._search(name)
        return self._found[name]

    def _search(self, name: str) -> tuple[str, str | None]:
        above = list(self._elements(name))
        # a list of the layers themselves comes last, since its elements may as well run side by side, as heads do
        for container, element, path in sorted(above, key=lambda own: not own[2]):
            for index in self.modules[container]._modules:
                other = ".".join(part for part in (container, index, path) if part)
                if other != name and type(self.modules.get(other)) is type(self.modules[name]):
                    return element, container
        return next(((element, container) for container, element, path in above if path), (name, None))


def _first_tensor(output: object) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, tuple | list):
        return next((found for found in map(_first_tensor, output) if found is not None), None)
    return None


def _sequences(output: object, runs: list[_Run], batch_first: bool) -> list[tuple[Tensor, Tensor | None]]:
    """A block's output as features (B, L, d), with the positions that take part; packed sequences one by one."""
    features = _first_tensor(output)
    if features is None or not features.is_floating_point():
        return []
    (batch, _, queries, keys), seen = runs[0].shape, runs[0].seen
    if features.is_nested:
        features = features.to_padded_tensor(0.0)
    if features.ndim == 2:
        features = features[None]
    elif features.ndim == 3 and (batch != queries or not batch_first) and features.shape[:2] == (queries, batch):
        features = features.transpose(0, 1)
    if features.ndim != 3:
        return []
    lengths = [run.shape[2] for run in runs]
    if len(runs) > 1:  # packed sequences, or who knows what
        packed = len(features) == 1 and features.shape[1] == sum(lengths)
        return [(part, None) for part in features.split(lengths, 1)] if packed else [(features, None)]
    return [(features, seen if queries == keys and features.shape[:2] == (batch, keys) else None)]


class _Collector:
    """Follows which module is running, takes what is reported, and keeps the numbers."""

    def __init__(
        self,
        model: nn.Module,
        measures: tuple[str, ...],
        layers: Collection[str] | None,
        threshold: float | None,
        reference: float | None,
        support_threshold: float,
        k: int,
        residual: bool,
        histogram: Callable[[], LogHistogram],
    ) -> None:
        self.measures, self.wanted, self.residual, self.histogram = measures, layers, residual, histogram
        self.statistics = AttentionStatistics(measures)
        self.places = _Places(model)
        self.names = {module: name for name, module in self.places.modules.items()}
        self.unwanted: dict[str, None] = {}  # layers that report but were not asked for, in order
        self.stack: list[_Frame] = []
        # of the forward that is running: rollouts by stack and sequence, and the layer that each block has in them
        self.rollouts: dict[tuple[str | None, int], Rollout] = {}
        self.in_rollout: dict[tuple[str | None, str], str] = {}

        def epsilon(x: Tensor, part: Tensor) -> float | Tensor:
            return mean_score(x, mask=part) if threshold is None else threshold

        self.of_rows: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
            "multi_modality": lambda x, w, part: multi_modality(x, w, threshold=epsilon(x, part), mask=part),
            "sparsity": lambda x, w, part: sparsity(x, w, threshold=epsilon(x, part), reference=reference, mask=part),
            "entropy": lambda x, w, part: entropy(w),
            "support": lambda x, w, part: support(w, threshold=support_threshold),
            "top_mass": lambda x, w, part: top_mass(w, k),
        }

    def enter(self, module: nn.Module, args: object, kwargs: object) -> None:
        """Before a module's forward."""
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpoint that runs its part again in the backward, which was counted the first time
        if not self.stack:
            self.rollouts, self.in_rollout = {}, {}
        self.stack.append(_Frame(self.names[module], module))

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: object) -> None:
        """After a module's forward, also if it raised: then the output is None."""
        places = [i for i, frame in enumerate(self.stack) if frame.module is module]
        if not places or torch._C._current_graph_task_id() != -1:
            return
        frame = self.stack[places[-1]]
        del self.stack[places[-1] :]
        if output is None:
            return
        with torch.no_grad():
            self.look_at(frame, args, kwargs, output)
            if frame.features:
                self.add_features(frame, output)

    def look_at(self, frame: _Frame, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: object) -> None:
        """Takes the scores of modules that do not report themselves."""
        module = frame.module
        if frame.reported:
            return
        if sources.is_function(module):
            source = sources.of_function(module, args, kwargs, output)
            alone = isinstance(module, nn.Softmax) and isinstance(output, Tensor) and output.ndim < 3
            if source is not None and (not alone or (self.wanted is not None and frame.name in self.wanted)):
                self.gather(frame, *source)
        elif isinstance(module, nn.MultiheadAttention):
            if type(module).forward is nn.MultiheadAttention.forward:
                source, cross = sources.of_torch(module, args, kwargs)
                self.gather(frame, *source, cross=cross)
        elif "Attention" in type(module).__name__:
            source = sources.of_output(module, output)
            if source is not None:
                self.gather(frame, *source)

    def observe(self, order: int, shape: tuple[int, ...], blocks: Blocks) -> None:
        """What our attention functions report: it belongs to the innermost module that is running."""
        if self.stack and torch._C._current_graph_task_id() == -1:
            self.gather(self.stack[-1], shape, blocks)

    def gather(self, frame: _Frame, shape: tuple[int, ...], blocks: Blocks, cross: bool = False) -> None:
        """Takes all measures of one attention."""
        for outer in (*self.stack, frame):
            outer.reported = True
        if self.wanted is not None and frame.name not in self.wanted:
            self.unwanted[frame.name] = None
            return
        layer = self.statistics.layers.setdefault(frame.name, LayerStatistics(frame.name))
        rollout = "rollout_discrepancy" in self.measures
        why_not = self.why_no_rollout(frame, shape, cross) if rollout else ""
        features = any(measure in self.measures for measure in OF_FEATURES)
        maps, seen = [], None
        for scores, weights, part in blocks():
            self.add_rows(layer, scores, weights, part)
            if features:  # padding is what no query can see
                found = part.any(2).any(1)  # (B, Lk)
                seen = found if seen is None else seen | found
            if rollout and not why_not:
                maps.append(weights.mean(1))  # (B, q, L)
        block, stack = self.places.of(frame.name)
        if maps:
            self.add_rollout(layer, (stack, frame.runs), torch.cat(maps, 1))
        elif why_not:
            layer.left_out["rollout_discrepancy"] = why_not
        holder = next((own for own in (frame, *reversed(self.stack)) if own.name == block), None)
        if features and holder is not None:
            holder.features.append(_Run(layer, shape, seen))
        frame.runs += 1

    def add_rows(self, layer: LayerStatistics, scores: Tensor, weights: Tensor, part: Tensor) -> None:
        """Measures of a block, (B, H, q, Lk)."""
        some = part.any(-1)  # (B, H, q)
        broken = (part & (scores.isnan() | weights.isnan())).any(-1)
        layer.rows += int(some.sum())
        layer.nan_rows += int(broken.sum())
        for measure in self.measures:
            if measure in OF_ROWS:
                values = self.of_rows[measure](scores, weights, part).double()
                values = torch.where(some & ~broken, values, torch.nan)
                layer.measures.setdefault(measure, Moments()).update(values)
        if "histogram" in self.measures:
            if layer.histogram is None:
                layer.histogram = self.histogram()
            layer.histogram.update(weights, mask=part)

    def why_no_rollout(self, frame: _Frame, shape: tuple[int, ...], cross: bool) -> str:
        """Why this attention cannot be part of a rollout; empty if it can."""
        block, stack = self.places.of(frame.name)
        if cross or shape[2] != shape[3]:
            return f"cross attention, of {shape[2]} queries to {shape[3]} keys"
        first = self.in_rollout.setdefault((stack, block), frame.name)
        if stack is not None and first != frame.name:
            return f"taken for cross attention, since {first} comes before it in the same block"
        before = self.rollouts.get((stack, frame.runs))
        if before is not None and before.map is not None and before.map.shape[:2] != (shape[0], shape[2]):
            length = tuple(before.map.shape[:2])
            return f"{shape[0]} x {shape[2]} positions, after layers of {length[0]} x {length[1]}"
        return ""

    def add_rollout(self, layer: LayerStatistics, key: tuple[str | None, int], map_: Tensor) -> None:
        """The next layer of a rollout, (B, L, L)."""
        with dtypes.without_autocast(map_.device):
            accumulated = self.rollouts.setdefault(key, Rollout(residual=self.residual))
            accumulated.update(map_)
            values = accumulated.discrepancy(map_)
        layer.measures.setdefault("rollout_discrepancy", Moments()).update(values[:, None, None])

    def add_features(self, frame: _Frame, output: object) -> None:
        """Measures of a block's output, for the attention layers in it."""
        by_layer: dict[str, list[_Run]] = {}
        for run in frame.features:
            by_layer.setdefault(run.layer.name, []).append(run)
        for name, runs in by_layer.items():
            layer = runs[0].layer
            batch_first = getattr(self.places.modules[name], "batch_first", True) is not False
            sequences = _sequences(output, runs, batch_first)
            for measure in OF_FEATURES:
                if measure in self.measures and not sequences:
                    where = frame.name or "the model"
                    layer.left_out[measure] = f"the output of {where} has no features of shape (batch, length, size)"
            for features, seen in sequences:
                with dtypes.without_autocast(features.device):
                    if "patch_similarity" in self.measures:
                        values = patch_similarity(features, seen)
                        layer.measures.setdefault("patch_similarity", Moments()).update(values[:, None, None])
                    if "mean_average_distance" in self.measures:
                        pairs = None if seen is None else seen[:, :, None] & seen[:, None, :]
                        values = mean_average_distance(features, pairs)
                        layer.measures.setdefault("mean_average_distance", Moments()).update(values[:, None, None])


def _checked_measures(measures: object) -> tuple[str, ...]:
    if isinstance(measures, str) or not isinstance(measures, Collection) or not measures:
        raise TypeError(
            f"multimax: expected measures to be several names, got {measures!r}; out of {', '.join(MEASURES)}"
        )
    for measure in measures:
        checks.choice("measures", measure, MEASURES)
    return tuple(measures)


def _checked_layers(layers: object, model: nn.Module) -> frozenset[str] | None:
    if layers is None:
        return None
    if isinstance(layers, str) or not isinstance(layers, Collection):
        raise TypeError(f"multimax: expected layers to be several full names of modules, got {layers!r}")
    known = dict(model.named_modules())
    for name in layers:
        if name not in known:
            names = ", ".join(repr(own) for own in known)
            raise ValueError(
                f"multimax: expected layers to be full names of the model's modules, {names}, got {name!r}"
            )
    return frozenset(layers)


def _number(name: str, value: object) -> None:
    if value is not None and (not isinstance(value, (int, float)) or isinstance(value, bool)):
        raise TypeError(f"multimax: expected {name} to be a number or None, got {type(value).__name__}")


@contextmanager
def collect(
    model: nn.Module,
    measures: Collection[str] = ("multi_modality", "sparsity"),
    *,
    layers: Collection[str] | None = None,
    threshold: float | None = None,
    reference: float | None = None,
    support_threshold: float = 0.0,
    k: int = 5,
    residual: bool = True,
    histogram: Callable[[], LogHistogram] = LogHistogram,
) -> Iterator[AttentionStatistics]:
    r"""Gathers measures of every attention layer while a model runs, over as many batches as it is given.

    For each head and for a layer as a whole: mean, standard deviation and number, in float64. Scores are looked at a
    few queries at a time and not kept. What the model returns, its gradients, its random numbers and its settings stay
    as they are without: weights are computed again beside it, and all hooks are gone after the context, also when the
    model raises. Only evaluation without gradients in ``nn.TransformerEncoderLayer`` differs, by rounding, since its
    fast path lets nobody look and is not taken.

    Attention is seen

    - in :func:`multimax.multimax_attention`, :func:`multimax.multimax_attention_varlen` and
      :func:`multimax.reweighting.attention`, called from any module, so also in :class:`multimax.MultiheadAttention`;
    - in modules that map scores to weights: :class:`multimax.MultiMax`, those of ``multimax.reweighting``, and
      ``nn.Softmax`` where its output has at least three dims or ``layers`` names it. With four dims or more, the third
      from the end is that of the heads;
    - in ``nn.MultiheadAttention``;
    - in modules with "Attention" in the name of their class that return their weights, (B, H, Lq, Lk), after their
      result, as those of transformers do with eager attention. There the scores are the logarithm of the weights,
      which differ from them by a constant a row: a ``threshold`` of one's own has no meaning then.

    Where one of them contains another, the innermost counts. Code under ``torch.compile`` cannot be seen. What a
    checkpoint computes again in the backward counts once.

    Keys that are masked count nowhere, nor do queries without any key, nor rows where a measure is not defined (see
    each), so that the counts of two measures may differ. Rows with NaN are counted (``nan_rows``) and are in no mean.

    Args:
        model: any module; only what runs inside it counts.
        measures: names of functions of ``multimax.metrics``: multi_modality, sparsity, entropy, support and top_mass of
            each row of weights; histogram of all weights (:class:`LogHistogram`); patch_similarity and
            mean_average_distance of the output of the block that the layer is in, without the positions that no query
            can see, which are padding; and rollout_discrepancy, of self-attention of one length in a stack of blocks,
            begun anew at each call of the model. Where one does not apply it is missing, and ``left_out`` says why.
            A block is an element of the closest ``nn.ModuleList`` or ``nn.Sequential`` with the same kind of layer in
            another element; else the closest element of one around the layer; else the layer itself.
        layers: full names of the modules to look at, all unless given.
        threshold: of multi_modality and sparsity; each row's mean score unless given.
        reference: s of sparsity; each row's smallest weight by softmax unless given.
        support_threshold: the weight above which an entry counts in support.
        k: how many entries top_mass adds up.
        residual: the residual connection in rollout_discrepancy, see :class:`Rollout`.
        histogram: makes a layer's histogram, for other bins than the usual.

    Returns:
        A context manager that gives an :class:`AttentionStatistics`, which fills while the model runs: a
        :class:`LayerStatistics` by the full name of each layer that has run, in order of execution.

    Example:
        >>> import torch, multimax
        >>> from multimax import metrics
        >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2).eval()
        >>> with torch.no_grad(), metrics.collect(model, ("sparsity", "entropy")) as found:
        ...     for _ in range(3):  # batches
        ...         out = model(torch.randn(8, 10, 32))
        >>> list(found)
        ['layers.0.self_attn', 'layers.1.self_attn']
        >>> found["layers.0.self_attn"]["entropy"].count  # batches x batch x heads x queries
        960
        >>> print(found.table().splitlines()[0])
        | layer              | rows | sparsity        | entropy         |
    """
    checks.module(model)
    checked = _checked_measures(measures)
    wanted = _checked_layers(layers, model)
    for name, value in (("threshold", threshold), ("reference", reference), ("support_threshold", support_threshold)):
        _number(name, value)
    checks.integer("k", k)
    if k < 1:
        raise ValueError(f"multimax: expected k of at least 1, got {k}")
    sources.check_can_be_seen(model)
    collector = _Collector(model, checked, wanted, threshold, reference, support_threshold, k, residual, histogram)
    with ExitStack() as hooks:
        for module in collector.names:
            before = module.register_forward_pre_hook(collector.enter, prepend=True, with_kwargs=True)
            after = module.register_forward_hook(collector.leave, with_kwargs=True, always_call=True)
            hooks.callback(before.remove)
            hooks.callback(after.remove)
        hooks.enter_context(observing.observe(collector.observe))
        yield collector.statistics
    if not collector.statistics.layers:
        if collector.unwanted:
            others = ", ".join(map(repr, collector.unwanted))
            raise ValueError(f"multimax: expected attention in the given layers, got none; it is in {others}")
        raise ValueError(
            "multimax: expected attention to run inside collect, got none; call the model itself in the context, and "
            "not under torch.compile; attention of one's own is seen if it calls multimax.multimax_attention or a "
            "module such as multimax.MultiMax or nn.Softmax, or if its class is named ...Attention and returns "
            "(result, weights)"
        )
