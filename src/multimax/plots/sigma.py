"""The modulators that layers have learned."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from multimax.ops import checks
from multimax.ops.parameters import from_paper
from multimax.ops.presets import PaperParameters, presets
from multimax.ops.rows.api import modulate
from multimax.plots import style
from multimax.reweighting.layer import MultiMax
from multimax.training.groups import reweighting_modules
from multimax.training.monitor import layer_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
        short = style.layer_names(found)
        return {short[name]: sets for name, sets in found.items()}
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
        columns: panels per row.

    Returns:
        A figure with one panel per layer: one line per run, and the identity dashed.

    Example:
        >>> from multimax import plots
        >>> figure = plots.learned_sigma("deit_small")
        >>> len(figure.axes)
        12
    """
    sets = _layers(layers)
    low, high = style.interval(low, high)
    x = torch.linspace(low, high, POINTS, dtype=torch.float64)
    rows, columns = style.grid_of(len(sets), columns)
    figure = style.figure(rows, columns, 2.6, 2.2)
    for number, (name, runs) in enumerate(sets.items()):
        axes = style.panel(figure, rows, columns, number, style.plain(name))
        axes.plot([low, high], [low, high], color="black", linestyle="--", linewidth=1)
        for coefs, knots in runs:
            y = modulate(x, coefs, knots)
            axes.plot(x.tolist(), y.tolist(), color=style.COLOURS[1], linewidth=1.2, alpha=0.7)
        axes.set_xlim(low, high)
        axes.set_ylim(low - (high - low) / 4, high + (high - low) / 4)
    style.labels(figure, "score x", r"$\sigma(x)$")
    return figure
