"""Figures: each function takes numbers and returns a matplotlib figure. Needs the extra ``plots``.

The figures are made without pyplot: nothing global is changed, and nothing has to be closed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from multimax.functional import modulate
from multimax.parameters import from_paper

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")
POINTS = 201  # above 128, matplotlib leaves out those that change nothing to the eye
Parameters = Mapping[str, Sequence[float]]  # t_b, t_d, b and d of a layer, a value an order


def _figure(rows: int, columns: int, width: float, height: float) -> "Figure":
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'multimax: expected matplotlib for figures, got none; pip install "multimax[plots]"'
        ) from error
    return Figure(figsize=(width * columns, height * rows), layout="constrained")


def save(figure: "Figure", file: str | Path) -> None:
    """Writes a figure; equal figures give equal files.

    Args:
        figure: of one of these functions.
        file: its ending says the format.
    """
    import matplotlib

    svg = str(file).endswith(".svg")
    with matplotlib.rc_context({"svg.hashsalt": "multimax"}):
        figure.savefig(file, metadata={"Date": None} if svg else None)


def learned_sigma(
    layers: Mapping[str, Sequence[Parameters]], *, low: float = -5.0, high: float = 5.0, columns: int = 3
) -> "Figure":
    r"""The modulator that each layer has learned, against the identity that softmax is.

    .. math:: \sigma(x) = x + \sum_n (1 - t_{b,n}) \max(b_n - x, 0)^n + (t_{d,n} - 1) \max(x - d_n, 0)^n

    Args:
        layers: by name, the parameters of one or several runs in the paper's symbols, as ``multimax table`` has them.
        low: least score.
        high: largest score.
        columns: panels a row.

    Returns:
        A figure with a panel a layer: a line a run, and the identity dashed.

    Example:
        >>> import multimax
        >>> from multimax import plots
        >>> table = multimax.presets["deit_small"]
        >>> figure = plots.learned_sigma({f"layer {n}": [own._asdict()] for n, own in enumerate(table, start=1)})
        >>> len(figure.axes)
        12
    """
    if not layers:
        raise ValueError("multimax: expected at least one layer with parameters, got none")
    x = torch.linspace(low, high, POINTS, dtype=torch.float64)
    columns = min(columns, len(layers))
    figure = _figure(-(-len(layers) // columns), columns, 2.6, 2.2)
    for number, (name, runs) in enumerate(layers.items()):
        axes = figure.add_subplot(-(-len(layers) // columns), columns, number + 1)
        axes.plot([low, high], [low, high], color="black", linestyle="--", linewidth=1)
        for run in runs:
            coefs, knots = from_paper(*(run[symbol] for symbol in ("t_b", "t_d", "b", "d")))
            y = modulate(x, coefs.double(), knots.double())
            axes.plot(x.tolist(), y.tolist(), color=COLOURS[0], linewidth=1.2, alpha=0.7)
        axes.set_title(name, fontsize=9)
        axes.set_xlim(low, high)
        axes.set_ylim(low - (high - low) / 4, high + (high - low) / 4)
        axes.tick_params(labelsize=7)
        axes.grid(color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
    figure.supxlabel("score x", fontsize=9)
    figure.supylabel(r"$\sigma(x)$", fontsize=9)
    return figure
