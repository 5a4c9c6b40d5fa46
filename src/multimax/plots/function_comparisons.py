"""Reweighting functions side by side, without a model: on the simplex, by their two measures, and on two entries."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from multimax import reweighting
from multimax.metrics import multi_modality, sparsity
from multimax.ops.presets import presets
from multimax.ops.rows.api import multimax as multimax_function
from multimax.plots import style
from multimax.plots.sigma import POINTS, Parameters, stored

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Function = Callable[[Tensor], Tensor]
# The second entry rises to the first, which then falls; the third is small, but not so small that softmax would ignore
# it. The paper does not print its inputs.
SERIES = (
    *((3.0, step / 4, 0.0) for step in range(13)),
    *((3.0 - step / 4, 3.0, 0.0) for step in range(1, 13)),
)
# Two modes over noise, as `multimax weights` prints them, and the threshold of relevant entries.
TWO_MODES, RELEVANT = (2.4, 2.0, 0.3, 0.0, -0.2, -0.6, -1.0, -2.0), 1.0
TEMPERATURES = (0.25, 0.5, 1.0, 2.0, 4.0, 16.0)
LAYER = 9  # a hidden layer; the paper does not say which it used
OTHERS: dict[str, Function] = {
    "sparsemax": reweighting.sparsemax,
    "entmax-1.5": reweighting.entmax15,
    "Ev-SoftMax": reweighting.evsoftmax,
}
# softmax has the first of the colours, MultiMax the second
OTHER_COLOURS = style.COLOURS[2:6]
MARKERS = ("s", "^", "D", "v", "P")  # one more than colours: each of many functions has its own pair
CORNERS = ((0.0, 0.0), (1.0, 0.0), (0.5, math.sqrt(3) / 2))
UNIMODAL = 0.99  # a weight above it leaves next to nothing for the others


def _rows(inputs: object, length: int | None = None) -> Tensor:
    """Inputs as rows in float64."""
    rows = style.numbers("inputs", inputs, finite=True)
    rows = rows[None] if rows.ndim == 1 else rows
    if rows.ndim != 2 or 0 in rows.shape or (length is not None and rows.shape[1] != length):
        wanted = f"(inputs, {length or 'entries'})"
        raise ValueError(f"multimax: expected inputs of shape {wanted}, got {tuple(rows.shape)}")
    return rows


def _temperatures(temperatures: Sequence[float]) -> list[float]:
    values: list[float] = style.numbers("temperatures", temperatures).reshape(-1).tolist()
    if not values or not all(0 < value < math.inf for value in values):
        raise ValueError(f"multimax: expected temperatures above 0, at least one, got {values}")
    return sorted(values)


def _with_parameters(multimax: Mapping[str, Parameters] | None) -> dict[str, Function]:
    """MultiMax by label; a layer of the paper's DeiT-small unless given."""
    if multimax is None:
        multimax = {f"MultiMax, layer {LAYER}": presets["deit_small"][LAYER - 1]}
    found: dict[str, Function] = {}
    for label, parameters in style.runs_by_label(multimax, "parameters of MultiMax").items():
        coefs, knots = stored(parameters)
        found[label] = partial(multimax_function, coefs=coefs, knots=knots)
    return found


def _others(functions: Mapping[str, Function] | None) -> dict[str, Function]:
    found = OTHERS if functions is None else functions
    if not isinstance(found, Mapping) or not all(map(callable, found.values())):
        raise TypeError(f"multimax: expected functions by label, from rows to rows of weights, got {found!r}")
    return {str(label): function for label, function in found.items()}


def _applied(label: str, function: Function, rows: Tensor) -> Tensor:
    weights = function(rows)
    if not isinstance(weights, Tensor) or weights.shape != rows.shape:
        got = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(f"multimax: expected weights of shape {tuple(rows.shape)} from {label!r}, got {got}")
    return style.numbers(f"the weights of {label!r}", weights, finite=True)


def _temperature_colours(temperatures: Sequence[float]) -> tuple[Any, Any]:
    """Colour map and scale, from low to high."""
    from matplotlib.colors import LogNorm

    low, high = temperatures[0], temperatures[-1]
    return style.colours("plasma", 0.0, 0.85), LogNorm(low, high if high > low else 2 * low)


def _number(value: float) -> str:
    return f"{value:.4g}".replace("-", "\N{MINUS SIGN}")


def _on_simplex(weights: Tensor) -> Tensor:
    """(n, 2): where rows of three weights are in the triangle."""
    return weights @ torch.tensor(CORNERS, dtype=torch.float64)


def _triangle(axes: "Axes") -> None:
    from matplotlib.patches import Polygon

    axes.add_patch(Polygon(CORNERS, closed=True, facecolor="0.97", edgecolor="0.4", linewidth=0.8, zorder=0))
    for (x, y), text, up in zip(CORNERS, ("1", "2", "3"), (-0.07, -0.07, 0.03), strict=True):
        axes.annotate(
            f"$x_{text}$",
            (x, y + up),
            ha="center",
            va="bottom" if up > 0 else "top",
            fontsize=style.TEXT,
        )
    axes.set_xlim(-0.08, 1.08)
    axes.set_ylim(-0.16, 0.94)
    axes.set_aspect("equal")
    axes.set_axis_off()


def simplex(
    inputs: object = SERIES,
    *,
    multimax: Mapping[str, Parameters] | None = None,
    functions: Mapping[str, Function] | None = None,
    temperatures: Sequence[float] = TEMPERATURES,
    columns: int = 3,
) -> "Figure":
    """Where functions put a series of inputs on the simplex: Figure 1a of the paper.

    The corners are distributions of one mode, the edges of two, the inside of three. By default the
    second entry rises to the first, which then falls, and the third is 0. Softmax at a low temperature, and the sparse
    functions, stay at the corner of the larger entry until the other is close; softmax at a high temperature leaves the
    edge, since it gives weight to the third. MultiMax stays near the edge, and between the corners; at their ends it
    comes closer to them than softmax at T = 1.

    Args:
        inputs: (n, 3), in the order of the path.
        multimax: parameters by label, in the paper's symbols; the ninth layer of DeiT-small unless given.
        functions: others by label, each from rows to rows of weights; sparsemax, entmax-1.5 and Ev-SoftMax unless
            given.
        temperatures: of softmax, one path each.
        columns: panels per row.

    Returns:
        A figure with a panel for softmax and one for each of the functions, with softmax's paths in grey behind, and a
        last one with the third entry's weight. A point is an input, a line joins them in their order. Each title says
        how many inputs end at a corner, with a weight above 0.99, where a grey disc is as large as their number, and
        the largest weight that the third entry gets; softmax's are those at T = 1.

    Example:
        >>> import multimax
        >>> from multimax import plots
        >>> table = multimax.presets["deit_small"]
        >>> figure = plots.simplex(multimax={"layer 6": table[5], "layer 9": table[8]})
        >>> [axes.get_title().splitlines()[0] for axes in figure.axes[:-2]]
        ['softmax', 'sparsemax', 'entmax-1.5', 'Ev-SoftMax', 'layer 6', 'layer 9']
    """
    rows = _rows(inputs, 3)
    steps = _temperatures(temperatures)
    others, layers = _others(functions), _with_parameters(multimax)
    if both := set(others) & set(layers):
        raise ValueError(f"multimax: expected a different label for each function, got {', '.join(both)} twice")
    softmax = torch.softmax(rows, -1)
    weights = {label: _applied(label, function, rows) for label, function in {**others, **layers}.items()}
    down, across = style.grid_of(len(weights) + 2, columns)
    figure = style.figure(down, across, 2.7, 2.6)
    paths = {step: _on_simplex(torch.softmax(rows / step, -1)) for step in steps}

    def panel(number: int, label: str, found: Tensor) -> "Axes":
        alone = (found > UNIMODAL).sum(0).tolist()  # at each corner
        third = f"$x_3$ gets at most {found[:, 2].max().item():.3f}"
        title = f"{style.plain(label)}\n{sum(alone)} of {len(rows)} at a corner{' at T = 1' * (number == 0)}\n{third}"
        axes = style.panel(figure, down, across, number, title)
        _triangle(axes)
        for corner, count in zip(CORNERS, alone, strict=True):
            if count:  # which lie on top of each other
                axes.scatter(*corner, s=45 * count, color="0.82", linewidths=0, zorder=1, clip_on=False)
        return axes

    _temperature_paths(panel(0, "softmax", softmax), paths)
    order = style.colours("viridis", 0.0, 0.92)
    shown = None
    for number, (label, found) in enumerate(weights.items(), start=1):
        axes = panel(number, label, found)
        for path in paths.values():
            axes.plot(*path.T.tolist(), color="0.85", linewidth=0.8, zorder=1)
        x, y = _on_simplex(found).T.tolist()
        axes.plot(x, y, color="0.3", linewidth=0.8, zorder=2)
        shown = axes.scatter(
            x,
            y,
            c=list(range(len(x))),
            cmap=order,
            s=34,
            edgecolors="white",
            linewidths=0.5,
            zorder=3,
            clip_on=False,
        )
    last = style.panel(figure, down, across, len(weights) + 1, "weight of $x_3$")
    _thirds(last, {"softmax, T = 1": softmax, **weights}, len(others))
    if shown is not None:
        ends = [f"({', '.join(map(_number, rows[i].tolist()))})" for i in (0, -1)]
        bar = style.bar(figure, shown, "input, from the first to the last", location="bottom", shrink=0.45)
        bar.set_ticks([0, len(rows) - 1] if len(rows) > 1 else [0], labels=ends[: len(rows)])
        bar.ax.tick_params(labelsize=style.TEXT, length=0)
        bar.outline.set_visible(False)
    return figure


def _temperature_paths(axes: "Axes", paths: Mapping[float, Tensor]) -> None:
    """Softmax's paths, each with its temperature at the right of the triangle."""
    heat, scale = _temperature_colours(list(paths))
    height = -0.1  # of the last label; the next is above it
    for step, path in paths.items():  # the coldest is the lowest
        colour = heat(scale(step))
        axes.plot(*path.T.tolist(), color=colour, marker="o", markersize=2.5, linewidth=1.2, clip_on=False)
        x, y = path[-1].tolist()
        height = max(y, height + 0.085)
        line = {"arrowstyle": "-", "color": "0.75", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 2}
        text: Any = axes.annotate(f"T = {_number(step)}", (x, y), (1.06, height), arrowprops=line, va="center")
        text.set(fontsize=7, annotation_clip=False)


def _thirds(axes: "Axes", weights: Mapping[str, Tensor], others: int) -> None:
    """The weight of the third entry over the series, one line per function."""
    for number, (label, found) in enumerate(weights.items()):
        colour = style.COLOURS[0] if not number else OTHER_COLOURS[(number - 1) % 4]
        colour = style.COLOURS[1] if number > others else colour
        line = "-" if not number else style.LINES[1 + (number - 1) % 3]
        line = style.LINES[(number - others - 1) % 4] if number > others else line
        label = style.plain(label.replace("\n", " "))
        axes.plot(found[:, 2].tolist(), color=colour, linestyle=line, linewidth=1.6, label=label)
    axes.set_xticks([])
    axes.set_xlabel("input", fontsize=style.TEXT)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.7 * (high - low))  # room for the legend
    axes.legend(fontsize=6.5, frameon=False, loc="upper center", ncols=2)


def trade_off(
    inputs: object = TWO_MODES,
    *,
    multimax: Mapping[str, Parameters] | None = None,
    functions: Mapping[str, Function] | None = None,
    temperatures: Sequence[float] = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0),
    threshold: float = RELEVANT,
) -> "Figure":
    """Sparsity against multi-modality: Figure 1b of the paper.

    Softmax moves along a curve with its temperature: more of one is less of the other. No temperature reaches the
    region right of and above the curve.

    Args:
        inputs: (n, entries); the measures are means over those inputs for which both are defined.
        multimax: parameters by label, in the paper's symbols; all layers of DeiT-small, by number, unless given.
        functions: others by label, as for :func:`simplex`.
        temperatures: of softmax, one point each on its curve, which goes from the least to the largest.
        threshold: of both measures, above which an entry is relevant.

    Returns:
        A figure with one panel: a curve, and one point per function.

    Example:
        >>> from multimax import plots
        >>> figure = plots.trade_off([[2.4, 2.0, 0.3, 0.0, -0.2, -0.6, -1.0, -2.0]], threshold=1.0)
        >>> axes = figure.axes[0]
        >>> axes.get_xlabel(), axes.get_ylabel()
        ('sparsity S', 'multi-modality M')
    """
    rows = _rows(inputs)
    steps = _temperatures(temperatures)
    threshold = style.numbers("threshold", threshold, finite=True).item()
    if multimax is None:
        multimax = {str(number): layer for number, layer in enumerate(presets["deit_small"], start=1)}
    layers = _with_parameters(multimax)

    def measured(function: Function, label: str = "softmax") -> tuple[float, float]:
        weights = _applied(label, function, rows)
        s, m = (f(rows, weights, threshold=threshold) for f in (sparsity, multi_modality))
        both = ~(s.isnan() | m.isnan())
        if not both.any():
            raise ValueError(
                f"multimax: expected inputs with entries below {threshold:g}, and besides the largest above it, got "
                "none; choose another threshold"
            )
        return s[both].mean().item(), m[both].mean().item()

    figure = style.figure(1, 1, 5.2, 3.8)
    axes = style.panel(figure, 1, 1, 0)
    heat, scale = _temperature_colours(steps)
    fine = torch.logspace(math.log10(steps[0]), math.log10(steps[-1]), POINTS, dtype=torch.float64).tolist()
    curve = [measured(partial(reweighting.softmax, temperature=step)) for step in fine]
    axes.plot(*zip(*curve, strict=True), color="0.6", linewidth=1.2, zorder=1)
    points = [measured(partial(reweighting.softmax, temperature=step)) for step in steps]
    axes.scatter(
        [s for s, _ in points],
        [m for _, m in points],
        c=[heat(scale(step)) for step in steps],
        marker="o",
        s=30,
        label="softmax at temperature T",
        zorder=2,
    )
    for step, (s, m) in zip(steps, points, strict=True):
        side, across = ((7, 3), "left") if s < 0.5 else ((-5, -6), "right")  # where there is room
        text = f"T = {_number(step)}"
        axes.annotate(text, (s, m), side, textcoords="offset points", fontsize=7, ha=across, va="center")
    for number, (label, function) in enumerate(_others(functions).items()):
        axes.scatter(
            *measured(function, label),
            color=OTHER_COLOURS[number % 4],
            marker=MARKERS[number % 5],
            s=44,
            label=style.plain(label),
            zorder=4,
            clip_on=False,
        )
    found = [measured(function, label) for label, function in layers.items()]
    axes.scatter(
        [s for s, _ in found],
        [m for _, m in found],
        color=style.COLOURS[1],
        marker="o",
        s=95,
        label="MultiMax, by layer" if len(found) > 1 else style.plain(next(iter(layers))),
        zorder=3,
        clip_on=False,
    )
    if len(found) > 1:
        inside = all(len(label) <= 2 for label in layers)  # otherwise there is no room on the points
        for label, place in zip(layers, found, strict=True):
            shown: Any = axes.annotate(
                style.plain(label, 20), place, (0 if inside else 7, 0), textcoords="offset points"
            )
            shown.set(fontsize=6.5, va="center_baseline" if inside else "center", zorder=5)
            if inside:
                shown.set(color="white", ha="center")
    axes.set_xlabel("sparsity S", fontsize=style.TITLE)
    axes.set_ylabel("multi-modality M", fontsize=style.TITLE)
    axes.legend(fontsize=style.TEXT, frameon=False, loc="lower left")
    return figure


def two_entries(
    fixed: Sequence[float] = (-2.0, 2.0),
    *,
    multimax: Mapping[str, Parameters] | None = None,
    functions: Mapping[str, Function] | None = None,
    temperatures: Sequence[float] = (0.5, 1.0, 2.0),
    low: float = -5.0,
    high: float = 5.0,
) -> "Figure":
    """The weight of an entry x next to a fixed one, [-2, x] and [2, x]: Figure 2 of the paper.

    A function of differences alone, as softmax and the sparse ones are, gives the same curve in every panel, shifted.
    MultiMax does not: among small entries it decides early, among large ones it keeps both.

    Args:
        fixed: the other entry, one panel each.
        multimax: parameters by label, in the paper's symbols; the ninth layer of DeiT-small unless given.
        functions: others by label, as for :func:`simplex`.
        temperatures: of softmax, one line each.
        low: least x.
        high: largest x.

    Returns:
        A figure with a panel for each fixed entry: one line per function.

    Example:
        >>> from multimax import plots
        >>> figure = plots.two_entries()
        >>> [axes.get_title() for axes in figure.axes]
        ['input [\N{MINUS SIGN}2, x]', 'input [2, x]']
    """
    values = style.numbers("fixed", fixed, finite=True).reshape(-1).tolist()
    if not values:
        raise ValueError("multimax: expected at least one fixed entry, got none")
    low, high = style.interval(low, high)
    steps = _temperatures(temperatures)
    x = torch.linspace(low, high, POINTS, dtype=torch.float64)
    figure = style.figure(1, len(values), 3.6, 3.2)
    for number, value in enumerate(values):
        axes = style.panel(figure, 1, len(values), number, f"input [{_number(value)}, x]")
        rows = torch.stack([torch.full_like(x, value), x], -1)

        def draw(function: Function, label: str, **options: Any) -> None:
            weights = _applied(label, function, rows)  # noqa: B023
            axes.plot(x.tolist(), weights[:, 1].tolist(), label=style.plain(label), **options)  # noqa: B023

        for place, step in enumerate(steps):
            grey = str(0.7 - 0.6 * place / max(len(steps) - 1, 1))
            label = f"softmax, T = {_number(step)}"
            draw(partial(reweighting.softmax, temperature=step), label, color=grey, linewidth=1)
        for place, (label, function) in enumerate(_others(functions).items()):
            draw(function, label, color=OTHER_COLOURS[place % 4], linestyle=style.LINES[1 + place % 3])
        for place, (label, function) in enumerate(_with_parameters(multimax).items()):
            draw(function, label, color=style.COLOURS[1], linewidth=2.2, linestyle=style.LINES[place % 4])
        axes.set_xlim(low, high)
        axes.set_ylim(-0.03, 1.03)
    style.labels(figure, "x", "weight of x")
    style.legend(figure, figure.axes[0].get_lines(), columns=4)
    return figure
