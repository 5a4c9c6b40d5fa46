"""The modulators that layers have learned."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from multimax.metrics.layer_names import layer_names
from multimax.ops import checks
from multimax.ops.parameters import from_paper
from multimax.ops.presets import PaperParameters, presets
from multimax.ops.rows.api import modulate
from multimax.plots import style
from multimax.reweighting.layer import MultiMax
from multimax.training.groups import reweighting_modules
from multimax.training.monitor import layer_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OUTPUT = "output"  # of layer_names
POINTS = 201  # above 128, matplotlib leaves out those that make no visible difference
Parameters = Mapping[str, Sequence[float]] | PaperParameters  # t_b, t_d, b and d of a layer, one value per order


def stored(parameters: object) -> tuple[Tensor, Tensor]:
    """Coefs and knots in float64, from parameters in the paper's symbols."""
    if isinstance(parameters, PaperParameters):
        parameters = parameters._asdict()
    if not isinstance(parameters, Mapping) or not set(PaperParameters._fields) <= set(parameters):
        got = f"only {', '.join(map(str, parameters))}" if isinstance(parameters, Mapping) else repr(parameters)
        raise ValueError(
            f"multimax: expected parameters with t_b, t_d, b and d, got {got}; multimax.presets has the paper's"
        )
    t_b, t_d, b, d = (style.numbers(symbol, parameters[symbol], finite=True) for symbol in PaperParameters._fields)
    return from_paper(t_b, t_d, b, d)


def _of_model(model: nn.Module) -> Iterator[tuple[str, list[tuple[Tensor, Tensor]]]]:
    """The parameters in use by layer, one set per head."""
    for name, module in reweighting_modules(model):
        if isinstance(module, MultiMax):
            both = zip(("coefs", "knots"), module.parameters_in_use(), strict=True)
            coefs, knots = (style.numbers(f"{which} of {name}", parameter, finite=True) for which, parameter in both)
            sets = [parameter.reshape(-1, *parameter.shape[-2:]) for parameter in (coefs, knots)]
            yield layer_name(name), list(zip(*sets, strict=True))


def _layers(layers: object) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Coefs and knots by layer, one set or several."""
    if isinstance(layers, str):
        checks.choice("layers", layers, tuple(presets))
        layers = presets[layers]
    if isinstance(layers, nn.Module):
        found = dict(_of_model(layers))
        if not found:
            raise ValueError(
                f"multimax: expected a model with MultiMax in it, got {type(layers).__name__} without; "
                "multimax.convert_(model) adds it"
            )
        return {shown: found[name] for name, shown in layer_names(found).items()}
    if isinstance(layers, Mapping):
        if not layers or not all(layers.values()):
            raise ValueError("multimax: expected at least one layer with parameters, and a set for each, got none")
        return {str(name): [stored(run) for run in runs] for name, runs in layers.items()}
    if isinstance(layers, Sequence) and layers:
        return {f"layer {number}": [stored(layer)] for number, layer in enumerate(layers, start=1)}
    raise ValueError(
        "multimax: expected at least one layer with parameters: a name of multimax.presets, a model, a list, or lists "
        f"by name, got {layers!r}"
    )


def learned_sigma(
    layers: Mapping[str, Sequence[Parameters]] | Sequence[Parameters] | nn.Module | str,
    *,
    low: float = -5.0,
    high: float = 5.0,
    columns: int = 3,
    line: str = "",
) -> "Figure":
    r"""The modulator that each layer has learned, against the identity (softmax): Figures 3 and 10 of the paper.

    .. math:: \sigma(x) = x + \sum_n (1 - t_{b,n}) \max(b_n - x, 0)^n + (t_{d,n} - 1) \max(x - d_n, 0)^n

    Where it is steeper than the identity, differences between entries grow, as at a low temperature; where it is
    flatter, they shrink.

    Args:
        layers: a name of :data:`multimax.presets`; or a model, with one line per head where heads have separate
            parameters; or the parameters in the paper's symbols, one set per layer; or, by name, the parameters
            of one or several runs, as in ``multimax table``.
        low: least score.
        high: largest score.
        columns: small panels per row.
        line: what one of several lines of a layer is, for the legend: a head of a model, a run of others unless given.

    Returns:
        A figure with one panel for all layers, coloured by depth, the mean where there are several lines; and beside it
        one small panel per layer in its colour: one line per run, and the identity dashed. A single layer has the one
        panel.

    Example:
        >>> from multimax import plots
        >>> figure = plots.learned_sigma("deit_small", columns=4)
        >>> [axes.get_title() for axes in figure.axes[:3]]
        ['all layers', 'layer 1', 'layer 2']
    """
    sets = _layers(layers)
    low, high = style.interval(low, high)
    x = torch.linspace(low, high, POINTS, dtype=torch.float64)
    curves = {name: [modulate(x, coefs, knots) for coefs, knots in runs] for name, runs in sets.items()}
    rows, columns = style.grid_of(len(sets), columns)
    several = len(sets) > 1
    small, large = ((1.6, 1.5), 3.4) if several else ((3.4, 3.0), 0.0)
    height = max(rows * small[1], 2.9 * several) + 0.35  # with the legend
    figure = style.figure(1, 1, large + columns * small[0], height)
    outer = figure.add_gridspec(1, 2, width_ratios=(large, columns * small[0])) if several else None
    inner = (figure.add_gridspec(1, 1) if outer is None else outer[1].subgridspec(rows, columns)).__getitem__
    colours = _by_depth(curves)
    named = {name: style.plain(name, 20) for name in curves}
    from matplotlib.ticker import MaxNLocator

    def dressed(axes: "Axes", title: str, width: float) -> None:
        style.dress(axes, title, width)
        axes.plot([low, high], [low, high], color=style.INK, linestyle="--", linewidth=1, label="identity: softmax")
        axes.set_xlim(low, high)
        axes.set_ylim(low - (high - low) / 4, high + (high - low) / 4)
        axes.xaxis.set_major_locator(MaxNLocator(4 if width < 2 else 6, integer=high - low > 2))

    most = max(map(len, curves.values()))
    if outer is not None:
        axes = figure.add_subplot(outer[0])
        dressed(axes, f"all layers{', mean of each' * (most > 1)}", large)
        for name, lines in curves.items():
            mean = torch.stack(lines).mean(0).tolist()
            style_of = "-." if name == OUTPUT else "-"
            axes.plot(x.tolist(), mean, color=colours[name], linewidth=1.3, label=named[name], linestyle=style_of)
        handles = axes.get_lines()[1:]
        axes.legend(handles=handles, fontsize=6, loc="lower right", ncols=1 + (len(handles) > 6), handlelength=1.2)
    first: Any = None
    for number, (name, lines) in enumerate(curves.items()):
        axes = figure.add_subplot(inner((number // columns, number % columns)), sharex=first, sharey=first)
        first = first or axes
        dressed(axes, named[name], small[0])
        for y in lines:
            axes.plot(x.tolist(), y.tolist(), color=colours[name], linewidth=1.2, label=named[name])
        # marks at the edges of the grid alone
        axes.tick_params(labelbottom=number + columns >= len(curves), labelleft=number % columns == 0)
    style.labels(figure, "score x", r"$\sigma(x)$")
    _legend(figure, line or ("head" if isinstance(layers, nn.Module) else "run"), most)
    return figure


def _by_depth(layers: Mapping[str, object]) -> dict[str, Any]:
    """A colour for each layer, from dark to light, but the output's."""
    shades = style.colours("viridis", 0.0, 0.88)
    inner = [name for name in layers if name != OUTPUT]
    found: dict[str, Any] = {name: shades(place / max(len(inner) - 1, 1)) for place, name in enumerate(inner)}
    return {name: found.get(name, style.COLOURS[1]) for name in layers}


def _legend(figure: "Figure", line: str, most: int) -> None:
    """What the dashed line is, and what a line of a layer with several is."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=style.INK, linestyle="--", linewidth=1, label="identity: softmax")]
    if most > 1:
        handles.append(Line2D([], [], color="0.5", linewidth=1.2, label=f"a layer's: each line is a {line}"))
    figure.legend(handles=handles, loc="outside upper center", ncols=2, fontsize=style.TEXT, frameon=False)
