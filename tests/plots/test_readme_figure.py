"""The README's picture: what it shows is what the functions compute."""

import pytest
import torch

import multimax
import readme_figure
from multimax import metrics
from multimax.plots.function_comparisons import RELEVANT, TWO_MODES


def test_layers_and_sigma_are_where_they_are_computed() -> None:
    sigma, trade_off = readme_figure.draw().axes
    coefs, knots = multimax.from_paper(*multimax.presets["deit_small"][readme_figure.LAYER - 1])
    x, y = (torch.as_tensor(values, dtype=torch.float32) for values in sigma.get_lines()[1].get_data())
    torch.testing.assert_close(y, multimax.modulate(x, coefs, knots))

    scores = torch.tensor(TWO_MODES)
    weights = multimax.multimax(scores, coefs, knots)
    s, m = (f(scores, weights, threshold=RELEVANT).item() for f in (metrics.sparsity, metrics.multi_modality))
    shown = {text.get_text(): text.xy for text in trade_off.texts if hasattr(text, "xy")}
    assert shown[str(readme_figure.LAYER)] == pytest.approx((s, m), abs=1e-5)
    assert {str(layer) for layer in range(1, 13)} < set(shown)


def test_the_file_is_of_this_figure() -> None:
    text = readme_figure.FILE.read_text(encoding="utf-8")
    for axes in readme_figure.draw().axes:
        assert axes.get_title("left") in text
        assert all(label.get_text().split("\n")[0] in text for label in axes.texts)
    assert "prefers-color-scheme: dark" in text
