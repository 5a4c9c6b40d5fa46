"""How attention weights are distributed, over many powers of ten."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from multimax.metrics import AttentionStatistics, LogHistogram
from multimax.metrics.layer_names import layer_names
from multimax.plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Histograms = AttentionStatistics | Mapping[str, LogHistogram]


def _of_run(label: str, run: object) -> dict[str, LogHistogram]:
    """Histograms by layer."""
    if isinstance(run, AttentionStatistics):
        found = {name: layer.histogram for name, layer in run.layers.items() if layer.histogram is not None}
        if not found:
            raise ValueError(
                f"multimax: expected histograms among the statistics of {label!r}, got none; give them to collect: "
                "measures=('histogram',)"
            )
        return found
    if isinstance(run, Mapping) and run and all(isinstance(histogram, LogHistogram) for histogram in run.values()):
        return dict(run)
    raise TypeError(
        f"multimax: expected AttentionStatistics, or LogHistograms by layer, for {label!r}, got {type(run).__name__}"
    )


def _by_layer(runs: object) -> dict[str, dict[str, LogHistogram]]:
    """Layers, and in each the histograms by label."""
    found = {label: _of_run(label, run) for label, run in style.runs_by_label(runs, "runs").items()}
    (first, layers), *others = found.items()
    for label, of_run in others:
        if list(of_run) != list(layers):
            raise ValueError(
                f"multimax: expected the same layers in all runs, {', '.join(layers)} of {first!r}, got "
                f"{', '.join(of_run)} of {label!r}"
            )
    for label, run in found.items():
        for name, histogram in run.items():
            if not histogram.edges.equal(layers[name].edges):
                raise ValueError(f"multimax: expected histograms of the same edges, got others in {name} of {label!r}")
            if not histogram.total:
                raise ValueError(f"multimax: expected counted weights in {name} of {label!r}, got none")
    return {name: {label: run[name] for label, run in found.items()} for name in layers}


def _panels(
    runs: object, columns: int, y: str, draw: "Callable[[Axes, LogHistogram, int, str, str], None]"
) -> "Figure":
    """One panel per layer, one line per run."""
    layers = _by_layer(runs)
    rows, columns = style.grid_of(len(layers), columns)
    figure = style.figure(rows, columns, 2.6, 2.2)
    for number, (name, shown) in enumerate(layer_names(layers).items()):
        axes, of_layer = style.panel(figure, rows, columns, number, style.plain(shown)), layers[name]
        axes.set_xscale("log")
        for place, (label, histogram) in enumerate(of_layer.items()):
            draw(axes, histogram, place, style.plain(label), style.colours_of(of_layer)[label])
        edges = next(iter(of_layer.values())).edges
        axes.set_xlim(edges[0].item(), edges[-1].item())
    if len(of_layer) > 1:
        handles, _ = figure.axes[0].get_legend_handles_labels()
        style.legend(figure, handles)
    style.labels(figure, "attention weight", y)
    return figure


def _outside(histogram: LogHistogram) -> Iterator[str]:
    """The weights that fit no bin, in words."""
    low, high = (f"{histogram.edges[i].item():.2g}".replace("e-0", "e-") for i in (0, -1))
    for count, where in ((histogram.zeros + histogram.below, f"below {low}"), (histogram.above, f"at least {high}")):
        share = count / histogram.total
        if count:
            yield f"{f'{share:.1%}' if share >= 0.001 else 'some'} {where}"
    if histogram.nans:
        yield f"{histogram.nans} NaN"


def attention_histograms(runs: Mapping[str, Histograms], *, columns: int = 3) -> "Figure":
    """Histograms of attention weights at each layer, both scales logarithmic: Figure 5 of the paper.

    Args:
        runs: by label, what :func:`multimax.metrics.collect` found with "histogram" among its measures, or one
            :class:`multimax.metrics.LogHistogram` per layer. All runs have the same layers.
        columns: panels per row.

    Returns:
        A figure with one panel per layer: one line per run, one step per bin. Weights below the first bin, including
        exact zeros, cannot be shown on such a scale, and the last bin ends before 1: where there are such weights, the
        panel says what share they have.

    Example:
        >>> import torch
        >>> from multimax import metrics, plots
        >>> histogram = metrics.LogHistogram()
        >>> histogram.update(torch.softmax(torch.randn(100, 20), -1))
        >>> figure = plots.attention_histograms({"softmax": {"layers.0.attention": histogram}})
        >>> int(figure.axes[0].patches[0].get_data().values.sum())
        2000
    """

    def draw(axes: "Axes", histogram: LogHistogram, place: int, label: str, colour: str) -> None:
        axes.stairs(
            histogram.counts.tolist(),
            histogram.edges.tolist(),
            baseline=None,
            color=colour,
            linestyle=style.LINES[place % len(style.LINES)],
            linewidth=1.3,
            label=label,
        )
        for text in _outside(histogram):
            where = (0.03, 0.95 - 0.1 * len(axes.texts))  # below the previous ones
            axes.annotate(text, where, xycoords="axes fraction", color=colour, fontsize=6.5, va="top")

    figure = _panels(runs, columns, "number of weights", draw)
    for axes in figure.axes:
        if not any(step.get_data().values.any() for step in axes.patches):  # type: ignore[attr-defined]
            axes.set_ylim(0.7, 10)  # there is nothing to fit a scale to
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.7)  # below one there is none
    return figure


def cumulative_attention(runs: Mapping[str, Histograms], *, columns: int = 3) -> "Figure":
    """The share of attention weights below each value, at each layer: Figure 8 of the paper.

    Args:
        runs: as for :func:`attention_histograms`.
        columns: panels per row.

    Returns:
        A figure with one panel per layer: one line per run, which begins at the share of weights below the first bin.

    Example:
        >>> import torch
        >>> from multimax import metrics, plots
        >>> histogram = metrics.LogHistogram()
        >>> histogram.update(torch.softmax(torch.randn(100, 20), -1))
        >>> figure = plots.cumulative_attention({"softmax": {"layers.0.attention": histogram}})
        >>> float(figure.axes[0].get_lines()[0].get_ydata()[-1])
        1.0
    """

    def draw(axes: "Axes", histogram: LogHistogram, place: int, label: str, colour: str) -> None:
        axes.plot(
            histogram.edges.tolist(),
            histogram.cumulative().tolist(),
            color=colour,
            linestyle=style.LINES[place % len(style.LINES)],
            linewidth=1.3,
            label=label,
        )
        axes.set_ylim(-0.03, 1.03)

    return _panels(runs, columns, "share of weights below", draw)
