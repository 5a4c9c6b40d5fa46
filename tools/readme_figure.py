"""Draws the picture at the top of the README, from the paper's printed parameters: `python tools/readme_figure.py`."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import multimax
from multimax import plots, reweighting
from multimax.metrics import multi_modality, sparsity
from multimax.plots import style
from multimax.plots.function_comparisons import OTHER_COLOURS, OTHERS, RELEVANT, TWO_MODES, Function

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FILE = Path(__file__).parents[1] / "docs" / "figures" / "readme.svg"
LAYER = 9
TEMPERATURES = (0.5, 1.0, 2.0, 4.0)
SIZE, SMALL = 10, 8.5  # of text, in points; the picture is seen at three quarters of its size


def panel(figure: "Figure", number: int, title: str, x: str, y: str) -> "Axes":
    """One of the two."""
    axes = style.panel(figure, 1, 2, number)
    axes.set_title(title, fontsize=SIZE + 1, loc="left")
    axes.set_xlabel(x, fontsize=SIZE)
    axes.set_ylabel(y, fontsize=SIZE)
    axes.tick_params(labelsize=SMALL)
    return axes


def sigma(axes: "Axes") -> None:
    """What one layer does to scores, and the input of the other panel on it."""
    coefs, knots = multimax.from_paper(*multimax.presets["deit_small"][LAYER - 1])
    x = torch.linspace(-1.6, 4.5, 200)
    axes.plot(x, x, color=style.COLOURS[0], linestyle="--", linewidth=1.6)
    axes.plot(x, multimax.modulate(x, coefs, knots), color=style.COLOURS[1], linewidth=2.4)
    scores = torch.tensor(TWO_MODES)
    scores = scores[scores > x[0]]
    axes.plot(scores, multimax.modulate(scores, coefs, knots), "o", color=style.COLOURS[1], markersize=5)
    axes.set_xlim(-1.6, 4.5)
    axes.set_ylim(-7, 5.2)
    axes.text(3.15, 4.1, "softmax: unchanged", fontsize=SMALL, ha="right")
    axes.text(2.45, 0.8, "large scores\nbrought together", fontsize=SIZE, va="top")
    axes.text(0.45, -3.4, "small scores pushed away", fontsize=SIZE)


def trade_off(axes: "Axes") -> None:
    """Softmax at all temperatures, the other functions, and all layers of the model."""
    x = torch.tensor(TWO_MODES, dtype=torch.float64)

    def measured(function: Function) -> tuple[float, float]:
        weights = function(x)
        s, m = (measure(x, weights, threshold=RELEVANT) for measure in (sparsity, multi_modality))
        return s.item(), m.item()

    fine = torch.logspace(-1.1, 0.7, 200).tolist()
    curve = [measured(partial(reweighting.softmax, temperature=step)) for step in fine]
    axes.plot(*zip(*curve, strict=True), color=style.COLOURS[0], linewidth=1.8, zorder=1)
    for step in TEMPERATURES:
        s, m = measured(partial(reweighting.softmax, temperature=step))
        axes.plot(s, m, "o", color=style.COLOURS[0], markersize=4)
        axes.annotate(f"T = {step:g}", (s, m), (6, 3), textcoords="offset points", fontsize=SMALL, va="center")
    for number, (label, function) in enumerate(OTHERS.items()):
        s, m = measured(function)
        axes.plot(s, m, "s", color=OTHER_COLOURS[number], markersize=6, zorder=5, clip_on=False)
        axes.annotate(label, (s, m), (-7, 0), textcoords="offset points", fontsize=SMALL, ha="right", va="center")
    for number, layer in enumerate(multimax.presets["deit_small"], start=1):
        coefs, knots = multimax.from_paper(*(torch.tensor(values, dtype=torch.float64) for values in layer))
        s, m = measured(partial(multimax.multimax, coefs=coefs, knots=knots))
        axes.plot(s, m, "o", color=style.COLOURS[1], markersize=13, zorder=3, clip_on=False)
        text = axes.annotate(str(number), (s, m), ha="center", va="center_baseline", fontsize=7.5, color="white")
        text.set_zorder(4)
    axes.set_xlim(-0.03, 1.04)
    axes.set_ylim(0.38, 1.02)
    axes.text(0.03, 0.52, "softmax at temperature T", fontsize=SIZE, color=style.COLOURS[0])
    axes.text(0.03, 0.46, "MultiMax, layers 1 to 12", fontsize=SIZE, color=style.COLOURS[1])


def draw() -> "Figure":
    """Both panels."""
    figure = style.figure(1, 2, 5.2, 3.5)
    sigma(panel(figure, 0, f"What layer {LAYER} of DeiT-small has learned", "score x", r"$\sigma(x)$"))
    trade_off(panel(figure, 1, "Two modes over noise: upper right is better", "sparsity S", "multi-modality M"))
    return figure


if __name__ == "__main__":
    plots.save(draw(), FILE)
