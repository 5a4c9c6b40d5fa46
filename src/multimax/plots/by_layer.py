"""Measures by layer."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from torch import Tensor

from multimax.metrics import AttentionStatistics
from multimax.plots import logs, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Epochs = Mapping[float, Sequence[float] | Mapping[str, float]]


def _epochs(label: str, run: object, measure: str) -> dict[float, list[float]]:
    """Values by layer, at each epoch."""
    if not isinstance(run, Mapping):
        run = logs.by_epoch(logs.checked(run, label), measure)
    found: dict[float, list[float]] = {}
    if not all(isinstance(epoch, Real) and math.isfinite(epoch) for epoch in run):
        raise ValueError(f"multimax: expected epochs of {label!r} to be finite numbers, got {', '.join(map(str, run))}")
    for epoch in sorted(run):
        layers = run[epoch]
        by_layer = list(layers.values()) if isinstance(layers, Mapping) else layers
        values = style.numbers(f"{measure} of {label!r}", by_layer)
        if values.ndim != 1 or len(values) == 0:
            raise ValueError(
                f"multimax: expected one value per layer for epoch {epoch} of {label!r}, got shape "
                f"{tuple(values.shape)}"
            )
        found[float(epoch)] = values.tolist()
    if not found:
        raise ValueError(f"multimax: expected at least one epoch for {label!r}, got none")
    return found


def _layers(axes: "Axes", number: int) -> None:
    """Marks for layers, counted from 1."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlim(1 - 0.05 * max(number - 1, 1), number + 0.05 * max(number - 1, 1))


def patch_similarity(runs: Mapping[str, Epochs | logs.Entries], *, measure: str = "patch_similarity") -> "Figure":
    """How alike the patches are after each layer, as training goes on: Figure 4 of the paper.

    Args:
        runs: by label, what a run has logged (:func:`read_metrics`), or by epoch the values of the layers, in order.
        measure: which one to take from a log; anything that is logged by layer can be drawn.

    Returns:
        A figure with one panel per run, all on one scale, and one line per epoch, darker for later ones.

    Example:
        >>> from multimax import plots
        >>> softmax = {10: [0.2, 0.3, 0.4], 300: [0.3, 0.6, 0.8]}
        >>> figure = plots.patch_similarity({"softmax": softmax, "MultiMax": {10: [0.2, 0.3, 0.4]}})
        >>> [axes.get_title() for axes in figure.axes[:2]]
        ['softmax', 'MultiMax']
    """
    found = {label: _epochs(label, run, measure) for label, run in style.runs_by_label(runs, "runs").items()}
    epochs = [epoch for run in found.values() for epoch in run]
    figure = style.figure(1, len(found), 3.0, 2.8)
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    scale = Normalize(min(epochs), max(epochs) if max(epochs) > min(epochs) else min(epochs) + 1)
    shades = style.colours("Blues", 0.3, 1.0)
    first: Any = None
    for number, (label, run) in enumerate(found.items()):
        axes = style.panel(figure, 1, len(found), number, style.plain(label), sharey=first)
        first = first or axes
        for epoch, values in run.items():
            places = range(1, len(values) + 1)
            label = f"epoch {epoch:g}"
            axes.plot(places, values, color=shades(scale(epoch)), marker="o", markersize=3, linewidth=1.2, label=label)
        _layers(axes, max(map(len, run.values())))
    style.labels(figure, "layer", style.plain(style.words(measure)))
    if min(epochs) < max(epochs):
        style.bar(figure, ScalarMappable(scale, shades), "epoch")
    return figure


def _with_spread(label: str, run: object, measure: str) -> tuple[list[float], list[float]]:
    """Values by layer, and their standard deviations where they are known."""
    if isinstance(run, AttentionStatistics):
        moments = [layer.measures[measure] for layer in run.layers.values() if measure in layer.measures]
        if not moments:
            why = {layer.left_out[measure] for layer in run.layers.values() if measure in layer.left_out}
            remedy = f"left out: {'; '.join(sorted(why))}" if why else f"give it to collect: measures=({measure!r},)"
            raise ValueError(f"multimax: expected {measure} among the statistics of {label!r}, got none; {remedy}")
        return [moment.mean for moment in moments], [moment.std for moment in moments]
    if isinstance(run, Sequence) and not isinstance(run, str):  # a tensor is a layer's, of several examples
        run = [value.double().mean() if isinstance(value, Tensor) else value for value in run]
    values = style.numbers(f"{measure} of {label!r}", run)
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(f"multimax: expected one value per layer for {label!r}, got shape {tuple(values.shape)}")
    return values.tolist(), []


def rollout_discrepancy(
    runs: Mapping[str, AttentionStatistics | Sequence[float | Tensor]], *, measure: str = "rollout_discrepancy"
) -> "Figure":
    """How far accumulated attention is from each layer's attention: Figure 9 of the paper.

    Args:
        runs: by label, what :func:`multimax.metrics.collect` found, or what
            :func:`multimax.metrics.rollout_discrepancy` returned, or numbers: one per layer.
        measure: which one to take; any other that was collected by layer can be drawn as well.

    Returns:
        A figure with one panel: one line per run, with a band of one standard deviation over the examples where it
        is known.

    Example:
        >>> import torch
        >>> from multimax import metrics, plots
        >>> maps = [torch.softmax(torch.randn(2, 4, 9, 9), -1) for _ in range(3)]
        >>> figure = plots.rollout_discrepancy({"softmax": metrics.rollout_discrepancy(maps, heads_dim=1)})
        >>> len(figure.axes[0].get_lines()[0].get_ydata())
        3
    """
    found = {label: _with_spread(label, run, measure) for label, run in style.runs_by_label(runs, "runs").items()}
    figure = style.figure(1, 1, 4.2, 3.0)
    axes = style.panel(figure, 1, 1, 0)
    colours = style.colours_of(found)
    for number, (label, (values, spread)) in enumerate(found.items()):
        colour = colours[label]
        places = list(range(1, len(values) + 1))
        line = style.LINES[number % len(style.LINES)]
        axes.plot(places, values, color=colour, linestyle=line, marker="o", markersize=4, label=style.plain(label))
        if spread:
            low = [value - deviation for value, deviation in zip(values, spread, strict=True)]
            high = [value + deviation for value, deviation in zip(values, spread, strict=True)]
            axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
    _layers(axes, max(len(values) for values, _ in found.values()))
    axes.set_xlabel("layer", fontsize=style.TITLE)
    axes.set_ylabel(style.plain(style.words(measure)), fontsize=style.TITLE)
    axes.legend(fontsize=style.TEXT, frameon=False, ncols=1 + (len(found) - 1) // 8)
    return figure
