"""Figures, by what is drawn in them."""

import pytest
import torch

import multimax
from multimax import plots


def test_learned_sigma_draws_the_function():
    table = multimax.presets["deit_small"]
    layers = {f"layer {n}": [own._asdict()] for n, own in enumerate(table, start=1)}
    layers["two runs"] = [table[0]._asdict(), table[11]._asdict()]
    figure = plots.learned_sigma(layers, low=-3, high=3, columns=4)
    assert [axes.get_title() for axes in figure.axes] == list(layers)
    for axes, runs in zip(figure.axes, layers.values(), strict=True):
        identity, *lines = axes.get_lines()
        assert list(identity.get_xdata()) == list(identity.get_ydata()) == [-3, 3]
        assert len(lines) == len(runs)
        for line, run in zip(lines, runs, strict=True):
            x = torch.tensor(line.get_xdata(), dtype=torch.float64)
            coefs, knots = (own.double() for own in multimax.from_paper(**run))
            expected = x.clone()
            for n in range(2):
                expected += coefs[n, 0] * (knots[n, 0] - x).clamp(min=0) ** (n + 1)
                expected += coefs[n, 1] * (x - knots[n, 1]).clamp(min=0) ** (n + 1)
            torch.testing.assert_close(torch.tensor(line.get_ydata(), dtype=torch.float64), expected)


def test_nothing_to_draw():
    with pytest.raises(ValueError, match="expected at least one layer"):
        plots.learned_sigma({})
