"""Parameters and measures over the steps of training."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from multimax.metrics.layer_names import layer_names
from multimax.plots import logs, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOT_SHOWN = ("grad_norm",)  # unless asked for
Curves = dict[str, dict[str, tuple[list[float], list[float]]]]  # value, layer: steps and values


def _title(value: str) -> str:
    """Parameters in the paper's symbols, measures in words."""
    symbol, _, order = value.rpartition("_")
    if order.isdigit() and symbol in ("t_b", "t_d"):
        return f"${symbol[0]}_{{{symbol[2]}_{order}}}$"
    if order.isdigit() and symbol in ("b", "d"):
        return f"${symbol}_{order}$"
    return style.plain(style.words(value))


def _curves(entries: logs.Entries) -> Curves:
    """Everything that was logged by step; values without a layer are under the layer ""."""
    found: Curves = {}
    for entry in entries:
        if not isinstance(entry.get("step"), Real):
            continue
        for name, value in entry.items():
            if name in ("step", "epoch") or not isinstance(value, Real):
                continue
            layer, which = logs.split(name) or ("", name)
            steps, values = found.setdefault(which, {}).setdefault(layer, ([], []))
            steps.append(float(entry["step"]))
            values.append(float(value))
    return found


def training_curves(
    runs: Mapping[str, logs.Entries], *, names: Sequence[str] | None = None, columns: int = 4
) -> "Figure":
    """The learned parameters and the measures of every layer over the steps of training.

    Args:
        runs: by label, what a run has logged (:func:`read_metrics`, or ``trainer.state.log_history``).
        names: what to show: parameters such as "t_b_1", measures such as "entropy", or values without a layer, such
            as "loss"; all parameters and measures unless given.
        columns: panels per row.

    Returns:
        A figure with one panel per value: a line for each layer and run, layers by colour, dark to light, runs by
        style; values without a layer have the colours of the runs.

    Example:
        >>> from multimax import plots
        >>> entries = [{"step": s, "multimax/layers.0.attention/t_b_1": 1 + s / 100, "loss": 2.0} for s in (0, 50)]
        >>> figure = plots.training_curves({"MultiMax": entries}, names=["t_b_1", "loss"])
        >>> [axes.get_title() for axes in figure.axes]
        ['$t_{b_1}$', 'loss']
    """
    curves = {label: _curves(logs.checked(run, label)) for label, run in style.runs_by_label(runs, "entries").items()}
    there = list(dict.fromkeys(value for run in curves.values() for value in run))
    if names is None:
        of_layers = {value for run in curves.values() for value, layers in run.items() if any(layers)}
        names = [value for value in there if value in of_layers and value not in NOT_SHOWN]
        if not names:
            raise ValueError(
                "multimax: expected parameters or measures of layers among the entries, got only "
                f"{', '.join(there) or 'none'}; name what to show with names="
            )
    for name in names:
        if name not in there:
            raise ValueError(f"multimax: expected names out of {', '.join(there)}, got {name!r}")
    if not names:
        raise ValueError("multimax: expected at least one name, got none")
    short = layer_names(layer for run in curves.values() for v in names for layer in run.get(v, ()) if layer)
    layers = list(short)
    rows, columns = style.grid_of(len(names), columns)
    figure = style.figure(rows, columns, 2.4, 1.9)
    from matplotlib.lines import Line2D

    shades = style.colours("viridis", 0.0, 0.9)
    of_runs = style.colours_of(curves)  # for values without a layer
    colours: dict[str, Any] = {layer: shades(place / max(len(layers) - 1, 1)) for place, layer in enumerate(layers)}
    for number, name in enumerate(names):
        axes = style.panel(figure, rows, columns, number, _title(name))
        for place, (label, run) in enumerate(curves.items()):
            for layer, (steps, values) in run.get(name, {}).items():
                shown = [value if math.isfinite(value) else math.nan for value in values]
                line = style.LINES[place % len(style.LINES)]
                mark = "o" if len(steps) == 1 else ""
                axes.plot(
                    steps,
                    shown,
                    color=colours.get(layer, of_runs[label]),
                    linestyle=line,
                    linewidth=1.2,
                    marker=mark,
                    label=style.plain(", ".join(part for part in (label, short.get(layer, layer)) if part)),
                )
    handles = [Line2D([], [], color=colours[layer], label=style.plain(short[layer])) for layer in layers]
    if len(curves) > 1:
        for place, label in enumerate(curves):
            colour = "0.3" if layers else of_runs[label]
            line = style.LINES[place % len(style.LINES)]
            handles.append(Line2D([], [], color=colour, linestyle=line, label=style.plain(label)))
    if handles:
        style.legend(figure, handles, columns=2 * columns)
    figure.supxlabel("step", fontsize=style.TITLE)
    return figure
