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

POINTS = 201  # above 128, matplotlib leaves out those that change nothing to the eye
SYMBOLS = ("t_b", "t_d", "b", "d")
Parameters = Mapping[str, Sequence[float]] | PaperParameters  # t_b, t_d, b and d of a layer, a value an order


def stored(parameters: object) -> tuple[Tensor, Tensor]:
    """Coefs and knots in float64, of parameters in the paper's symbols."""
    if isinstance(parameters, PaperParameters):
        values: list[object] = list(parameters)
    elif isinstance(parameters, Mapping) and set(SYMBOLS) <= set(parameters):
        values = [parameters[symbol] for symbol in SYMBOLS]
    else:
        got = f"only {', '.join(map(str, parameters))}" if isinstance(parameters, Mapping) else repr(parameters)
        raise ValueError(
            f"multimax: expected parameters with t_b, t_d, b and d, got {got}; multimax.presets has the paper's"
        )
    t_b, t_d, b, d = (style.numbers(symbol, own, finite=True) for symbol, own in zip(SYMBOLS, values, strict=True))
    return from_paper(t_b, t_d, b, d)


def _of_model(model: nn.Module) -> Iterator[tuple[str, list[tuple[Tensor, Tensor]]]]:
    """The parameters in use by layer, a set a head."""
    for name, module in reweighting_modules(model):
        if isinstance(module, MultiMax):
            both = zip(("coefs", "knots"), module.parameters_in_use(), strict=True)
            coefs, knots = (style.numbers(f"{which} of {name}", own, finite=True) for which, own in both)
            sets = [own.reshape(-1, *own.shape[-2:]) for own in (coefs, knots)]
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
                "multimax.convert_(model) puts it there"
            )
        short = style.layer_names(found)
        return {short[name]: own for name, own in found.items()}
    if isinstance(layers, Mapping):
        if not layers or not all(layers.values()):
            raise ValueError("multimax: expected at least one layer with parameters, and a set for each, got none")
        return {str(name): [stored(run) for run in runs] for name, runs in layers.items()}
    if isinstance(layers, Sequence) and layers:
        return {f"layer {number}": [stored(own)] for number, own in enumerate(layers, start=1)}
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
    r"""The modulator that each layer has learned, against the identity that softmax is: Figures 3 and 10 of the paper.

    .. math:: \sigma(x) = x + \sum_n (1 - t_{b,n}) \max(b_n - x, 0)^n + (t_{d,n} - 1) \max(x - d_n, 0)^n

    Where it is steeper than the identity, differences between entries grow, as at a low temperature; where it is
    flatter, they shrink.

    Args:
        layers: a name of :data:`multimax.presets`; or a model, in which a head with parameters of its own has a line of
            its own; or the parameters in the paper's symbols, a set a layer; or, by name, those of one or several runs,
            as ``multimax table`` has them.
        low: least score.
        high: largest score.
        columns: panels a row.

    Returns:
        A figure with a panel a layer: a line a run, and the identity dashed.

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
