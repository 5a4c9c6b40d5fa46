"""Measures of every attention layer of a model, gathered while it runs, without keeping the scores.

Shapes: B batches, H heads, Lq queries, Lk keys, L positions of self-attention.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from multimax.metrics import sources
from multimax.metrics.features import mean_average_distance, patch_similarity
from multimax.metrics.histogram import LogHistogram
from multimax.metrics.outputs import Positions, sequences
from multimax.metrics.places import Places
from multimax.metrics.rollout import Rollout
from multimax.metrics.running import Frame, RunningModules
from multimax.metrics.statistics import AttentionStatistics, LayerStatistics
from multimax.metrics.weights import entropy, mean_score, multi_modality, sparsity, support, top_mass
from multimax.ops import checks, dtypes, observing
from multimax.ops.observing import Blocks


def _distance(features: Tensor, part: Tensor | None) -> Tensor:
    """The mean average distance of the positions that take part, (B, L)."""
    return mean_average_distance(features, None if part is None else part[:, :, None] & part[:, None, :])


OF_ROWS = ("multi_modality", "sparsity", "entropy", "support", "top_mass")
OF_FEATURES: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "patch_similarity": patch_similarity,
    "mean_average_distance": _distance,
}
MEASURES = (*OF_ROWS, "histogram", *OF_FEATURES, "rollout_discrepancy")
OnWeights = Callable[[str, Tensor, Tensor], object]


@dataclass(frozen=True)
class _Options:
    """What to collect, and how: the arguments of :func:`collect`, checked."""

    measures: tuple[str, ...]
    layers: frozenset[str] | None
    threshold: float | None
    reference: float | None
    support_threshold: float
    k: int
    residual: bool
    histogram: Callable[[], LogHistogram]
    on_weights: OnWeights | None


@dataclass
class _Frame(Frame):
    """A module that is running, and what the attentions in it still have to do."""

    reported: bool = False  # some attention in it, or in a module that it called
    runs: int = 0  # attentions that it called itself
    features: list[tuple[LayerStatistics, Positions]] = field(default_factory=list)  # waiting for its output
    # in the outermost module: rollouts by stack and sequence, and the layer that each block has in them
    rollouts: dict[tuple[str | None, int], Rollout] = field(default_factory=dict)
    in_rollout: dict[tuple[str | None, str], str] = field(default_factory=dict)


class _Collector:
    """Receives what the running modules report, and keeps the numbers."""

    def __init__(self, model: nn.Module, options: _Options) -> None:
        self.options, self.measures = options, options.measures
        self.statistics = AttentionStatistics(options.measures)
        self.places = Places(model)
        self.unwanted: dict[str, None] = {}  # layers that report but were not asked for, in order
        names = {module: name for name, module in self.places.modules.items()}
        self.running = RunningModules(names, _Frame, self.left)

        def epsilon(x: Tensor, part: Tensor) -> float | Tensor:
            return mean_score(x, mask=part) if options.threshold is None else options.threshold

        self.of_rows: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
            "multi_modality": lambda x, w, part: multi_modality(x, w, threshold=epsilon(x, part), mask=part),
            "sparsity": lambda x, w, part: sparsity(
                x, w, threshold=epsilon(x, part), reference=options.reference, mask=part
            ),
            "entropy": lambda x, w, part: entropy(w),
            "support": lambda x, w, part: support(w, threshold=options.support_threshold),
            "top_mass": lambda x, w, part: top_mass(w, options.k),
        }

    @torch.no_grad()
    def left(self, frame: _Frame, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: object) -> None:
        """After a module's forward."""
        if not frame.reported:
            self.look_at(frame, args, kwargs, output)
        if frame.features:
            self.add_features(frame, output)

    def look_at(self, frame: _Frame, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: object) -> None:
        """Takes the scores of modules that do not report them."""
        module, wanted = frame.module, self.options.layers
        if sources.is_function(module):
            source = sources.of_function(module, args, kwargs, output)
            alone = isinstance(module, nn.Softmax) and isinstance(output, Tensor) and output.ndim < 3
            if source is not None and (not alone or (wanted is not None and frame.name in wanted)):
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
        frame = self.running.innermost
        if frame is not None:
            self.gather(frame, shape, blocks)

    def gather(self, frame: _Frame, shape: tuple[int, ...], blocks: Blocks, cross: bool = False) -> None:
        """Takes all measures of one attention, which belongs to the innermost frame."""
        for outer in self.running.frames:
            outer.reported = True
        if self.options.layers is not None and frame.name not in self.options.layers:
            self.unwanted[frame.name] = None
            return
        layer = self.statistics.layers.setdefault(frame.name, LayerStatistics(frame.name))
        rollout = "rollout_discrepancy" in self.measures
        why_not = self.why_no_rollout(frame, shape, cross) if rollout else ""
        features = any(measure in self.measures for measure in OF_FEATURES)
        maps, seen = [], None
        for scores, weights, part in blocks():
            self.add_rows(layer, scores, weights, part)
            if self.options.on_weights is not None:
                self.options.on_weights(layer.name, weights, part)
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
        holder = next((outer for outer in reversed(self.running.frames) if outer.name == block), None)
        if features and holder is not None:
            holder.features.append((layer, Positions(shape, seen)))
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
                layer.add(measure, values)
        if "histogram" in self.measures:
            if layer.histogram is None:
                layer.histogram = self.options.histogram()
            layer.histogram.update(weights, mask=part)

    @property
    def outermost(self) -> _Frame:
        """The frame of the forward that is running."""
        outermost, *_ = self.running.frames
        return outermost

    def why_no_rollout(self, frame: _Frame, shape: tuple[int, ...], cross: bool) -> str:
        """Why this attention cannot be part of a rollout; empty if it can."""
        batch, _, queries, keys = shape
        block, stack = self.places.of(frame.name)
        if cross or queries != keys:
            return f"cross attention, of {queries} queries to {keys} keys"
        first = self.outermost.in_rollout.setdefault((stack, block), frame.name)
        if stack is not None and first != frame.name:
            return f"taken for cross attention, since {first} comes before it in the same block"
        before = self.outermost.rollouts.get((stack, frame.runs))
        if before is not None and before.map is not None:
            batch_before, length_before, _ = before.map.shape
            if (batch_before, length_before) != (batch, queries):
                return f"{batch} x {queries} positions, after layers of {batch_before} x {length_before}"
        return ""

    def add_rollout(self, layer: LayerStatistics, key: tuple[str | None, int], map_: Tensor) -> None:
        """The next layer of a rollout, (B, L, L)."""
        with dtypes.without_autocast(map_.device):
            accumulated = self.outermost.rollouts.setdefault(key, Rollout(residual=self.options.residual))
            accumulated.update(map_)
            values = accumulated.discrepancy(map_)
        layer.add("rollout_discrepancy", values)

    def add_features(self, frame: _Frame, output: object) -> None:
        """Measures of a block's output, for the attention layers in it."""
        by_layer: dict[str, list[Positions]] = {}
        for layer, positions in frame.features:
            by_layer.setdefault(layer.name, []).append(positions)
        for name, attentions in by_layer.items():
            layer = self.statistics.layers[name]
            batch_first = getattr(self.places.modules[name], "batch_first", True) is not False
            found = sequences(output, attentions, batch_first)
            for measure, function in OF_FEATURES.items():
                if measure not in self.measures:
                    continue
                if not found:
                    where = frame.name or "the model"
                    layer.left_out[measure] = f"the output of {where} has no features of shape (batch, length, size)"
                for features, part in found:
                    with dtypes.without_autocast(features.device):
                        layer.add(measure, function(features, part))


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
    on_weights: OnWeights | None = None,
) -> Iterator[AttentionStatistics]:
    r"""Gathers measures of every attention layer while a model runs, over as many batches as it is given.

    For each head and for each layer as a whole: mean, standard deviation and number, in float64. Scores are read a
    few queries at a time and not kept. The model's results, gradients, random numbers and settings do not change:
    weights are computed separately, and all hooks are removed after the context, also when the model raises. Only
    evaluation without gradients in ``nn.TransformerEncoderLayer`` differs, by rounding, since its fast path cannot be
    observed and is not taken.

    Attention is observed

    - in :func:`multimax.multimax_attention`, :func:`multimax.multimax_attention_varlen` and
      :func:`multimax.reweighting.attention`, called from any module, so also in :class:`multimax.MultiheadAttention`;
    - in modules that map scores to weights: :class:`multimax.MultiMax`, the modules of ``multimax.reweighting``,
      and ``nn.Softmax`` where its output has at least three dims or ``layers`` names it. With four dims or more, the
      third from the end is the heads;
    - in ``nn.MultiheadAttention``;
    - in modules with "Attention" in the name of their class that return their weights, (B, H, Lq, Lk), after their
      result, as in transformers with eager attention. There the scores are the logarithm of the weights,
      which differ from them by a constant per row: a given ``threshold`` has no meaning then.

    Where one contains another, the innermost counts. Code under ``torch.compile`` cannot be observed. What a checkpoint
    computes again in the backward counts once.

    Masked keys do not count, nor do queries without any key, nor rows where a measure is not defined (see each), so the
    counts of two measures may differ. Rows with NaN are counted (``nan_rows``), but are in no mean.

    Args:
        model: any module; only what runs inside it counts.
        measures: names of functions of ``multimax.metrics``: multi_modality, sparsity, entropy, support and top_mass of
            each row of weights; histogram of all weights (:class:`LogHistogram`); patch_similarity and
            mean_average_distance of the output of the block that the layer is in, without the positions that no query
            can see, which are padding; and rollout_discrepancy, of self-attention of one length in a stack of blocks,
            restarted at each call of the model. A measure that does not apply is missing, and ``left_out`` says why.
            A block is an element of the closest ``nn.ModuleList`` or ``nn.Sequential`` with the same kind of layer in
            another element; else the closest element of one around the layer; else the layer itself.
        layers: full names of the modules to observe, all unless given.
        threshold: of multi_modality and sparsity; each row's mean score unless given.
        reference: s of sparsity; each row's smallest weight by softmax unless given.
        support_threshold: the weight above which an entry counts in support.
        k: how many entries top_mass adds up.
        residual: the residual connection in rollout_discrepancy, see :class:`Rollout`.
        histogram: makes a layer's histogram, for bins other than the default.
        on_weights: called as ``on_weights(layer, weights, mask)`` for every few queries of every attention: the full
            name of the layer; the weights before dropout, (B, H, some of the Lq, Lk), without a graph and in float32 or
            better; and, of that shape, True where a key takes part. Queries come in order:
            ``torch.cat(blocks, 2)`` has all of one attention. Its return value is not used. With it, measures may be
            ``()``, for the weights alone.

    Returns:
        A context manager that gives an :class:`AttentionStatistics`, which is filled while the model runs: a
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
    options = _Options(
        measures=checks.measures(measures, MEASURES, optional=on_weights is not None),
        layers=checks.layers(layers, model),
        threshold=threshold,
        reference=reference,
        support_threshold=support_threshold,
        k=k,
        residual=residual,
        histogram=histogram,
        on_weights=on_weights,
    )
    for name, value in (("threshold", threshold), ("reference", reference), ("support_threshold", support_threshold)):
        checks.real_number(name, value, optional=True)
    k = checks.positive_integer("k", k)
    checks.observable(model)
    collector = _Collector(model, options)
    with collector.running.watch(), observing.observe(collector.observe):
        yield collector.statistics
    checks.attention_ran(collector.statistics.layers, collector.unwanted)
