"""Figures, by what is drawn in them: lines, points, counts and pixels, against values computed here."""

import base64
import copy
import io
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import entmax
import numpy
import pytest
import torch
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.layout_engine import LayoutEngine
from matplotlib.transforms import Bbox
from PIL import Image
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

import gallery_figures
import multimax
from multimax import metrics, plots
from multimax.cli import main
from multimax.convert.sites import marked
from multimax.experiments.run import train
from multimax.experiments.settings import override, preset
from places import DATA, ROOT

DEIT = multimax.presets["deit_small"]
PHOTOS = DATA / "photos"


def sigma(x: Tensor, parameters: Any) -> Tensor:
    t_b, t_d, b, d = (torch.tensor(values).double() for values in parameters)
    total = x.clone()
    for n in range(len(t_b)):
        total += (1 - t_b[n]) * (b[n] - x).clamp(min=0) ** (n + 1) + (t_d[n] - 1) * (x - d[n]).clamp(min=0) ** (n + 1)
    return total


def evsoftmax(x: Tensor) -> Tensor:
    kept = torch.where(x >= x.mean(-1, keepdim=True), x.exp(), 0)
    return kept / kept.sum(-1, keepdim=True)


def layer9(x: Tensor) -> Tensor:
    return torch.softmax(sigma(x, DEIT[8]), -1)


EXPECTED: dict[str, Callable[[Tensor], Tensor]] = {
    "sparsemax": lambda x: entmax.sparsemax(x, -1),
    "entmax-1.5": lambda x: entmax.entmax15(x, -1),
    "Ev-SoftMax": evsoftmax,
    "MultiMax, layer 9": layer9,
}


def data(line: Any) -> Tensor:
    return torch.stack(
        [torch.tensor(values, dtype=torch.float64) for values in (line.get_xdata(), line.get_ydata())], -1
    )


def close(one: Any, other: Any) -> None:
    one, other = (torch.as_tensor(numpy.asarray(values), dtype=torch.float64) for values in (one, other))
    torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


# sigma


def test_learned_sigma_draws_the_function() -> None:
    layers: Any = {f"layer {n}": [layer._asdict()] for n, layer in enumerate(DEIT, start=1)}
    layers["two runs"] = [DEIT[0]._asdict(), DEIT[11]]
    figure = plots.learned_sigma(layers, low=-3, high=3, columns=4, line="seed")
    all_layers, *panels = figure.axes
    assert [axes.get_title() for axes in panels] == list(layers)
    expected = []
    for axes, runs in zip(panels, layers.values(), strict=True):
        identity, *lines = axes.get_lines()
        assert list(identity.get_xdata()) == list(identity.get_ydata()) == [-3, 3]
        assert len(lines) == len(runs)
        curves = []
        for line, run in zip(lines, runs, strict=True):
            x, y = data(line).T
            curves.append(sigma(x, run.values() if isinstance(run, dict) else run))
            close(y, curves[-1])
        expected.append(torch.stack(curves).mean(0))
    # all of them once more in one panel, in the colours of their own, a mean where there are several
    assert all_layers.get_title() == "all layers, mean of each"
    for line, axes, mean in zip(all_layers.get_lines()[1:], panels, expected, strict=True):
        close(data(line)[:, 1], mean)
        assert line.get_color() == axes.get_lines()[1].get_color()
    colours = [line.get_color() for line in all_layers.get_lines()[1:]]
    assert len(set(colours)) == len(colours)
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["identity: softmax", "a layer's: each line is a seed"]


def test_a_single_layer_has_one_panel() -> None:
    (axes,) = plots.learned_sigma([DEIT[0]]).axes
    assert len(axes.get_lines()) == 2
    legend = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert legend == ["identity: softmax"]  # there are no several lines to tell of


def test_long_names_of_layers_stay_in_the_figure() -> None:
    names = [f"model.decoder.layers.{n}.encoder_attn" for n in range(3)]
    figure = plots.learned_sigma({name: [DEIT[0]] for name in names})
    figure.draw_without_rendering()
    edge = figure.bbox
    for axes in figure.axes:
        box = axes.title.get_window_extent()
        assert edge.x0 <= box.x0 < box.x1 <= edge.x1


def test_learned_sigma_of_a_preset_shows_what_the_caption_says() -> None:
    panels = plots.learned_sigma("deit_small").axes[1:]
    assert [axes.get_title() for axes in panels] == [f"layer {n}" for n in range(1, 13)]
    below_at_both_ends, falls = [], []
    for axes in panels:
        x, y = data(axes.get_lines()[1]).T
        below_at_both_ends.append(bool(y[0] < x[0] and y[-1] < x[-1]))
        falls.append(bool((y.diff() < 0).any()))
        # much steeper than the identity for small scores, but in the first two layers
        assert ((y[1] - y[0]) / (x[1] - x[0]) > 3) == (axes not in panels[:2])
    assert below_at_both_ends[:2] == [False, False]
    assert below_at_both_ends[5:] == [True] * 7
    assert [number for number, fall in enumerate(falls, start=1) if fall] == [5, 12]
    # against the claim: the first layers of the language model raise small scores and lower large ones
    small = [data(axes.get_lines()[1]) for axes in plots.learned_sigma("wikitext103_lm").axes[1:]]
    assert [bool(y[0] > x[0]) for x, y in (line.T for line in small)] == [True, True, True, False, True, False]
    assert [bool(y[-1] < x[-1]) for x, y in (line.T for line in small)][:3] == [True, True, True]


def test_learned_sigma_of_a_model() -> None:
    model = nn.ModuleDict({"0": multimax.MultiheadAttention(8, 2, per_head=True), "1": nn.Linear(2, 2)})
    function = model["0"].multimax
    with torch.no_grad():
        function.coefs.normal_()
        function.knots.normal_()
    (axes,) = plots.learned_sigma(model).axes
    _, *lines = axes.get_lines()
    assert len(lines) == 2  # a head each
    for head, line in enumerate(lines):
        x, y = data(line).T
        close(y, sigma(x, [getattr(function, s)[head].tolist() for s in ("t_b", "t_d", "b", "d")]))


# functions


def test_simplex_draws_each_function() -> None:
    figure = plots.simplex()
    softmax, *panels, third, _ = figure.axes
    inputs = torch.tensor(plots.function_comparisons.SERIES, dtype=torch.float64)
    corners = torch.tensor([[0, 0], [1, 0], [0.5, math.sqrt(0.75)]], dtype=torch.float64)
    lines = {round(step, 2): line for step, line in zip((0.25, 0.5, 1, 2, 4, 16), softmax.get_lines(), strict=True)}
    for step, line in lines.items():
        close(data(line), torch.softmax(inputs / step, -1) @ corners)
    assert [axes.get_title().splitlines()[0] for axes in panels] == list(EXPECTED)
    for axes, function in zip(panels, EXPECTED.values(), strict=True):
        weights = function(inputs)
        points = axes.collections[-1]
        close(points.get_offsets(), weights @ corners)
        close(points.get_array(), range(len(inputs)))
        close(data(axes.get_lines()[-1]), weights @ corners)
        alone = int((weights.amax(-1) > 0.99).sum())
        assert axes.get_title().splitlines()[1] == f"{alone} of 25 at a corner"
        assert axes.get_title().splitlines()[2] == f"$x_3$ gets at most {weights[:, 2].max():.3f}"
    # softmax at T = 1 has its count too, and every temperature its label
    at_one = torch.softmax(inputs, -1)
    alone = int((at_one.amax(-1) > 0.99).sum())
    assert softmax.get_title().splitlines()[1:] == [
        f"{alone} of 25 at a corner at T = 1",
        f"$x_3$ gets at most {at_one[:, 2].max():.3f}",
    ]
    labels = [text.get_text() for text in softmax.texts if "T" in text.get_text()]
    assert labels == [f"T = {step}" for step in (0.25, 0.5, 1, 2, 4, 16)]
    heights = [text.get_position()[1] for text in softmax.texts if "T" in text.get_text()]
    assert min(numpy.diff(heights)) > 0.08  # none upon another
    for line, weights in zip(third.get_lines(), (at_one, *(f(inputs) for f in EXPECTED.values())), strict=True):
        close(data(line)[:, 1], weights[:, 2])


def test_simplex_shows_what_the_caption_says() -> None:
    """Sparse functions go to a corner where MultiMax stays between two, at their edge; warm softmax leaves it."""
    softmax, sparsemax, entmax15, _, multimax_axes, third, _ = plots.simplex().axes
    place = {
        axes: torch.tensor(axes.collections[-1].get_offsets().tolist()) for axes in (sparsemax, entmax15, multimax_axes)
    }
    second = plots.function_comparisons.SERIES.index((3.0, 1.0, 0.0))  # the second more than the third
    assert place[sparsemax][second].tolist() == place[entmax15][second].tolist() == [0, 0]
    assert 0.2 < place[multimax_axes][second][0] < 0.8
    assert place[multimax_axes][:, 1].max() < 0.004  # on the edge all the time
    warm = data(softmax.get_lines()[4])
    assert warm[:, 1].min() > 0.1
    # softmax at T = 1 gives the third up to 4.5%, MultiMax a tenth of it, the sparse ones nothing
    softmax_third, sparse, _, _, multimax_third = (data(line)[:, 1] for line in third.get_lines())
    assert softmax_third.max() == pytest.approx(0.0453, abs=1e-4)
    assert 0 == sparse.max() < multimax_third.max() < softmax_third.max() / 10
    # against it: at the ends it is closer to the corners than softmax, and a third entry of 1 gets more than softmax's
    assert multimax_axes.get_title().splitlines()[1] == "2 of 25 at a corner"
    assert softmax.get_title().splitlines()[1] == "0 of 25 at a corner at T = 1"
    row = torch.tensor([[3.0, 0.0, 1.0]], dtype=torch.float64)
    assert layer9(row)[0, 2] == pytest.approx(0.286, abs=1e-3)
    assert torch.softmax(row, -1)[0, 2] == pytest.approx(0.114, abs=1e-3)


def test_simplex_of_given_inputs_and_functions() -> None:
    inputs = numpy.array([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])
    half = {"half": lambda x: torch.full_like(x, 1 / 3)}
    figure = plots.simplex(inputs, functions=half, multimax={"mine": DEIT[3]}, temperatures=[1], columns=2)
    _, first, second, _, _ = figure.axes
    close(first.collections[-1].get_offsets(), [[0.5, math.sqrt(0.75) / 3]] * 2)
    weights = torch.softmax(sigma(torch.tensor(inputs), DEIT[3]), -1)
    close(second.collections[-1].get_offsets()[:, 1], weights[:, 2] * math.sqrt(0.75))


def test_functions_may_compute_in_any_dtype() -> None:
    figure = plots.simplex([[0.0, 1.0, 2.0]], functions={"single": lambda x: torch.softmax(x.float(), -1)})
    weights = torch.softmax(torch.tensor([[0.0, 1.0, 2.0]]), -1)
    close(figure.axes[1].collections[-1].get_offsets()[:, 1], weights[:, 2] * math.sqrt(0.75))


def test_inputs_may_be_a_list_of_tensors() -> None:
    rows = [torch.tensor(row) for row in ([3.0, 0.0, -1.0], [3.0, 3.0, -1.0], [0.0, 3.0, -1.0])]
    path = data(plots.simplex(rows, temperatures=[1]).axes[0].get_lines()[0])
    close(path[:, 1], torch.softmax(torch.stack(rows), -1)[:, 2] * math.sqrt(0.75))


def measures(x: Tensor, weights: Tensor, threshold: float) -> tuple[float, float]:
    """S and M of one row, by their definitions."""
    small = torch.softmax(x, -1).min()
    s = (-weights[x < threshold] / small).exp().mean()
    peak = weights[x.argmax()]
    relevant = (x > threshold) & (x < x.max())
    return s.item(), 1 - (peak - weights[relevant]).mean().item()


def test_trade_off_draws_both_measures() -> None:
    x = torch.tensor([2.4, 2.0, 0.3, 0.0, -0.2, -0.6, -1.0, -2.0], dtype=torch.float64)
    (axes,) = plots.trade_off().axes
    softmax, *others, layers = axes.collections
    close(softmax.get_offsets(), [measures(x, torch.softmax(x / t, -1), 1.0) for t in (0.1, 0.25, 0.5, 1, 2, 4)])
    for points, name in zip(others, ("sparsemax", "entmax-1.5", "Ev-SoftMax"), strict=True):
        assert points.get_label() == name
        close(points.get_offsets(), [measures(x, EXPECTED[name](x), 1.0)])
    close(layers.get_offsets(), [measures(x, torch.softmax(sigma(x, layer), -1), 1.0) for layer in DEIT])
    # no temperature has as much of both as a layer, but for the second
    curve = data(axes.get_lines()[0])
    for number, place in enumerate(torch.tensor(layers.get_offsets().tolist()).double(), start=1):
        reached = bool((curve >= place).all(-1).any())
        assert reached == (number == 2)


def test_trade_off_writes_long_labels_beside_the_points() -> None:
    (axes,) = plots.trade_off(multimax={"layer 6": DEIT[5], "layer 9": DEIT[8]}).axes
    texts = {text.get_text(): text for text in axes.texts}
    assert texts["layer 6"].get_color() != "white"
    assert texts["layer 6"].get_position()[0] > 5
    five = {f"f{n}": multimax.reweighting.sparsemax for n in range(5)}
    (axes,) = plots.trade_off(functions=five).axes
    marks = [
        str((points.get_paths()[0].vertices.tolist(), points.get_facecolor().tolist()))
        for points in axes.collections[1:6]
    ]
    assert len(set(marks)) == 5  # each can be told from the others


def test_trade_off_is_a_mean_over_inputs_that_have_both() -> None:
    rows = torch.tensor([[3.0, 2.0, -1.0], [2.0, 1.0, -1.0], [2.0, -1.0, -1.0]], dtype=torch.float64)
    (axes,) = plots.trade_off(rows, threshold=0.0, multimax={"one": DEIT[8]}).axes
    found = [measures(row, layer9(row), 0.0) for row in rows[:2]]  # the third has no second relevant entry
    close(axes.collections[-1].get_offsets(), torch.tensor(found).mean(0, keepdim=True))


def test_two_entries_draws_the_weight_of_x() -> None:
    figure = plots.two_entries()
    for axes, fixed in zip(figure.axes, (-2.0, 2.0), strict=True):
        lines = {line.get_label(): data(line) for line in axes.get_lines()}
        x = lines["sparsemax"][:, 0]
        rows = torch.stack([torch.full_like(x, fixed), x], -1)
        apart = (x - fixed).abs() > 1e-9  # where they are equal, rounding decides what Ev-SoftMax keeps
        for name, function in EXPECTED.items():
            close(lines[name][apart, 1], function(rows)[apart, 1])
        for step in (0.5, 1, 2):
            close(lines[f"softmax, T = {step}"][:, 1], torch.sigmoid((x - fixed) / step))
    # among small entries MultiMax decides early, among large ones both live
    early, late = (
        line[(line[:, 0] - (fixed - 0.5)).abs().argmin(), 1]
        for line, fixed in zip((data(axes.get_lines()[-1]) for axes in figure.axes), (-2, 2), strict=True)
    )
    assert early < 0.01
    assert late > 0.4


# logs


def entries() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"loss": 2.0, "step": 5, "epoch": 0.5}]
    for epoch in (1, 2, 3):
        values = {f"measures/vit.layers.{n}.attention/patch_similarity": n / 10 + epoch / 100 for n in range(3)}
        values |= {f"measures/vit.layers.{n}.attention/entropy": 2.0 - n for n in range(3)}
        values |= {f"multimax/vit.layers.{n}.attention/t_b_1": 1.0 + n * epoch for n in range(3)}
        values |= {"multimax/classifier/t_b_1": -1.0, "multimax/classifier/grad_norm": 9.0, "multimax/grad_norm": 5.0}
        found.append({**values, "step": 10 * epoch, "epoch": float(epoch)})
    return found


def test_patch_similarity_by_layer_and_epoch() -> None:
    given = {7: [0.5, 0.25], 1: torch.tensor([0.125, 0.75])}
    figure = plots.patch_similarity({"log": entries(), "given": given})
    log, given, _ = figure.axes
    assert [axes.get_title() for axes in (log, given)] == ["log", "given"]
    assert log.get_ylim() == given.get_ylim()
    for epoch, line in zip((1, 2, 3), log.get_lines(), strict=True):
        close(data(line), [[n + 1, n / 10 + epoch / 100] for n in range(3)])
    close(data(given.get_lines()[0])[:, 1], [0.125, 0.75])
    close(data(given.get_lines()[1])[:, 1], [0.5, 0.25])
    # the later the darker, on one scale
    light = [sum(line.get_color()[:3]) for line in (*log.get_lines(), given.get_lines()[1])]
    assert light == sorted(light, reverse=True)
    assert given.get_lines()[0].get_color() == log.get_lines()[0].get_color()


def test_rollout_discrepancy_by_layer() -> None:
    maps = [torch.softmax(torch.randn(5, 2, 9, 9), -1) for _ in range(3)]
    values = metrics.rollout_discrepancy(maps, heads_dim=1)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2).eval()
    with torch.no_grad(), metrics.collect(model, ("rollout_discrepancy",)) as found:
        model(torch.randn(4, 5, 8))
    (axes,) = plots.rollout_discrepancy({"maps": values, "numbers": [0.5, 0.25], "model": found}).axes
    first, second, third = axes.get_lines()
    close(data(first), [[n + 1, value.mean()] for n, value in enumerate(values)])
    close(data(second), [[1, 0.5], [2, 0.25]])
    by_layer = [found[name]["rollout_discrepancy"] for name in found]
    close(data(third)[:, 1], [moments.mean for moments in by_layer])
    (band,) = axes.collections
    top = band.get_paths()[0].vertices[:, 1].max()
    assert top == pytest.approx(max(moments.mean + moments.std for moments in by_layer))


def test_training_curves() -> None:
    other = [{"step": 1, "multimax/classifier/t_b_1": 3.0, "loss": float("nan")}, {"step": 2, "loss": 1.0}]
    figure = plots.training_curves({"one": entries(), "other": other}, names=["t_b_1", "loss"])
    slopes, loss = figure.axes
    assert [axes.get_title() for axes in figure.axes] == ["$t_{b_1}$", "loss"]
    *layers, classifier, single = slopes.get_lines()
    for n, line in enumerate(layers):
        close(data(line), [[10 * epoch, 1.0 + n * epoch] for epoch in (1, 2, 3)])
    close(data(classifier)[:, 1], [-1, -1, -1])
    close(data(single), [[1, 3]])
    assert single.get_color() == classifier.get_color()
    assert single.get_linestyle() != classifier.get_linestyle()
    close(data(loss.get_lines()[0]), [[5, 2]])
    assert data(loss.get_lines()[1])[0, 1].isnan()
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["layer 1", "layer 2", "layer 3", "output", "one", "other"]
    # all of layers unless named, but for the gradients
    titles = [axes.get_title() for axes in plots.training_curves({"one": entries()}).axes]
    assert titles == ["patch similarity", "entropy", "$t_{b_1}$"]


def test_metrics_are_read_from_a_run(tmp_path: Path) -> None:
    lines = [*entries(), {"loss": "nan", "step": 40}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = plots.read_metrics(tmp_path)
    assert found[:-1] == entries() == plots.read_metrics(tmp_path / "metrics.jsonl")[:-1]
    assert math.isnan(found[-1]["loss"])
    assert plots.by_epoch(found, "entropy")[2.0] == {f"vit.layers.{n}.attention": 2.0 - n for n in range(3)}


# weights


def histograms() -> tuple[dict[str, Tensor], dict[str, metrics.LogHistogram]]:
    weights = {f"layers.{n}.attn": torch.softmax((4 + n) * torch.randn(200, 16).double(), -1) for n in range(2)}
    weights["layers.1.attn"][:30, 0] = 0
    weights["layers.1.attn"][0, 1] = 1e-12
    made = {}
    for name, values in weights.items():
        made[name] = metrics.LogHistogram()
        made[name].update(values)
    return weights, made


def test_attention_histograms() -> None:
    weights, made = histograms()
    figure = plots.attention_histograms({"one": made, "same": made})
    assert [axes.get_title() for axes in figure.axes] == ["layer 1", "layer 2"]
    for axes, values in zip(figure.axes, weights.values(), strict=True):
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        edges = numpy.logspace(-8, 0, 81)
        for patch in axes.patches:
            close(patch.get_data().edges, edges)
            close(patch.get_data().values, numpy.histogram(values.numpy(), edges)[0])
    share = (weights["layers.1.attn"] < 1e-8).double().mean().item()
    assert [text.get_text() for text in figure.axes[1].texts] == [f"{share:.1%} below 1e-8"] * 2


def test_histograms_say_what_fits_no_bin() -> None:
    hard = metrics.LogHistogram()
    hard.update(torch.tensor([1.0, 0.0, 0.0, 0.5, math.nan]))
    nothing = metrics.LogHistogram(low=2e-5)
    nothing.update(torch.zeros(3))
    for histogram, words in (
        (hard, ["50.0% below 1e-8", "25.0% at least 1", "1 NaN"]),
        (nothing, ["100.0% below 2e-5"]),
    ):
        figure = plots.attention_histograms({"one": {"x": histogram}})
        figure.draw_without_rendering()
        assert [text.get_text() for text in figure.axes[0].texts] == words
        low, high = figure.axes[0].get_ylim()
        assert 0 < low < 1 < high


def test_cumulative_attention() -> None:
    weights, made = histograms()
    figure = plots.cumulative_attention({"one": made})
    for axes, values in zip(figure.axes, weights.values(), strict=True):
        x, y = data(axes.get_lines()[0]).T
        for place in (0, 17, 55, 80):
            assert y[place].item() == pytest.approx((values < x[place]).double().mean().item(), abs=1e-3)


def test_histograms_of_a_model() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2).eval()
    with torch.no_grad(), metrics.collect(model, ("histogram",)) as found:
        model(torch.randn(3, 5, 8))
    figure = plots.attention_histograms({"softmax": found})
    assert [axes.patches[0].get_data().values.sum() for axes in figure.axes] == [3 * 2 * 5 * 5] * 2


# photos


@pytest.fixture
def vit() -> ViTForImageClassification:
    config = ViTConfig(
        image_size=24,
        patch_size=8,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=16,
        initializer_range=0.5,
        num_labels=5,
    )
    return ViTForImageClassification(config).train()


def eager(model: ViTForImageClassification, pixels: Tensor) -> Any:
    twin = ViTForImageClassification._from_config(copy.deepcopy(model.config), attn_implementation="eager").eval()
    twin.load_state_dict(model.state_dict())
    return twin(pixels, output_attentions=True, output_hidden_states=True)


def test_attention_of_a_model_is_what_it_computes(vit: ViTForImageClassification) -> None:
    pixels = torch.randn(2, 3, 24, 24)
    before = vit.eval()(pixels).logits
    vit.train()
    for inputs in (pixels, {"pixel_values": pixels}):
        found = plots.attention_of(vit, inputs)
        for weights, expected in zip(found.values(), eager(vit, pixels).attentions, strict=True):
            torch.testing.assert_close(weights, expected.detach(), atol=1e-5, rtol=1e-4)
    assert vit.training
    assert not list(marked(vit))
    assert torch.equal(vit.eval()(pixels).logits, before)
    multimax.convert_(vit, init="paper")
    (one,) = plots.attention_of(vit, pixels, layers=["vit.layers.1.attention"]).values()
    assert one.shape == (2, 4, 10, 10)
    assert not torch.allclose(one, found["vit.layers.1.attention"], atol=1e-4)


def shares(scale: float, map_: Tensor) -> Tensor:
    return (map_.double() / scale).clamp(0, 1)


def heat(grey: Tensor, share: Tensor) -> Tensor:
    """What a patch looks like: between the photo in grey and the colour of its share, by the share."""
    colour = torch.tensor(plots.style.colours("inferno", 0.25, 0.97)(share.numpy()))[..., :3]
    cover = (0.15 + 0.7 * share)[..., None]
    return (255 * (cover * colour + (1 - cover) * 0.75 * grey[..., None])).round()


def assert_shows(image: Any, photo: Tensor, map_: Tensor, scale: float) -> None:
    """The picture of an axes is the map over the photo in grey, in plain colours, patch by patch."""
    drawn = torch.from_numpy(numpy.array(image.get_array()))
    assert drawn.dtype == torch.uint8
    assert drawn.shape[-1] == 3  # nothing is transparent
    assert image.get_alpha() is None
    height, width = photo.shape[:2]
    finer = drawn.shape[0] // height
    assert drawn.shape[:2] == (height * finer, width * finer)
    grey = photo.double().mean(-1)
    rows, columns = map_.shape
    for y in range(height):
        for x in range(width):
            share = shares(scale, map_[y * rows // height, x * columns // width])
            expected = heat(grey[y, x], share)
            found = drawn[y * finer : (y + 1) * finer, x * finer : (x + 1) * finer].double()
            torch.testing.assert_close(found, expected.expand_as(found), atol=1.0, rtol=0)


def stretched(pixels: Tensor) -> Tensor:
    low, high = pixels.min(), pixels.max()
    return ((pixels - low) / (high - low)).movedim(0, -1)


def test_attention_maps_show_the_weights_of_the_query(vit: ViTForImageClassification) -> None:
    pixels = torch.randn(1, 3, 24, 24)
    figure = plots.attention_maps(pixels[0], vit, query=5, inputs=pixels)
    expected = eager(vit, pixels).attentions
    photo, *rest = figure.axes
    assert photo.get_title() == "query"
    close(photo.images[0].get_array(), stretched(pixels[0]))
    square = photo.patches[-1]
    assert (*square.get_xy(), square.get_width(), square.get_height()) == (15.5, 7.5, 8, 8)  # row 1, column 2
    assert [axes.get_ylabel() for axes in rest[:4]] == ["head 1", "head 2", "head 3", "head 4"]
    for number, weights in enumerate(expected):  # a column each, with a bar
        *heads, bar = rest[number * 5 : number * 5 + 5]
        assert heads[0].get_title() == f"layer {number + 1}"
        largest = weights[0, :, 6, 1:].max().item()
        assert bar.get_xlim()[1] == pytest.approx(largest, abs=1e-5)
        for head, axes in enumerate(heads):
            map_ = weights[0, head, 1 + 5, 1:].detach().reshape(3, 3)  # after the class token
            assert_shows(axes.images[-1], stretched(pixels[0]), map_, largest)
            assert axes.images[-1].get_extent() == [-0.5, 23.5, 23.5, -0.5]
            place = divmod(int(map_.argmax()), 3)
            assert axes.images[-1].get_label() == f"largest in row {place[0] + 1} of 3, column {place[1] + 1} of 3"


def test_what_is_compared_has_one_scale() -> None:
    first, second = torch.softmax(torch.randn(2, 7, 7), -1), torch.softmax(5 * torch.randn(2, 7, 7), -1)
    image = numpy.zeros((20, 30), numpy.uint8)
    figure = plots.attention_maps(image, {"a": first, "b": second}, query=4, grid=(2, 3))
    _, *maps, bar = figure.axes
    assert [axes.get_title() for axes in maps] == ["a", "", "b", ""]  # side by side, a row for each head
    assert [axes.get_subplotspec().colspan.start for axes in maps] == [1, 1, 2, 2]
    largest = max(first[:, 5, 1:].max().item(), second[:, 5, 1:].max().item())
    assert bar.get_xlim() == (0, pytest.approx(largest))
    black = torch.zeros(20, 30, 3)
    for axes, weights in zip(maps, (first[0], first[1], second[0], second[1]), strict=True):
        assert_shows(axes.images[-1], black, weights[5, 1:].reshape(2, 3), largest)
    # layers have scales of their own
    layers = {"layer 1": {"a": first, "b": first / 2}, "layer 4": {"a": second, "b": second}}
    figure = plots.attention_maps(image, layers, query=4, grid=(2, 3))
    bars = [axes.get_xlim()[1] for axes in figure.axes if axes.get_label() == "<colorbar>"]
    assert bars == [pytest.approx(first[:, 5, 1:].max().item()), pytest.approx(second[:, 5, 1:].max().item())]
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titles == ["query", "layer 1\na", "layer 1\nb", "layer 4\na", "layer 4\nb"]


def test_the_bar_has_the_colours_that_are_drawn() -> None:
    """Along it the values, across it the photo from black to white."""
    image = torch.tensor([[0.0, 1.0]])
    maps = {"one": torch.tensor([[[0.0, 0.0], [1.0, 1.0]]])}
    figure = plots.grad_cam(image[None, None].repeat(1, 3, 2, 1), maps)
    _, drawn, bar = figure.axes
    shown = drawn.images[0].get_array()
    (of_bar,) = bar.images
    colours = of_bar.get_array()
    assert of_bar.get_extent()[2:] == [0, 1]
    assert of_bar.origin == "lower"
    for row, value in ((0, 0), (-1, -1)):
        for column in (0, -1):
            close(shown[row, column], colours[value, column])
    assert not any(mesh.get_visible() for mesh in bar.collections if isinstance(mesh, QuadMesh))


def embedded(svg: str) -> list[Any]:
    """The pictures in an SVG file."""
    found = re.findall(r"data:image/png;base64,\s*([A-Za-z0-9+/=\s]+)\"", svg)
    return [numpy.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGBA")) for data in found]


def test_maps_are_the_same_in_every_format(tmp_path: Path) -> None:
    """Vectors and dots, without transparency, which matplotlib would apply twice."""
    torch.manual_seed(0)
    figure = plots.attention_maps(torch.rand(8, 8), {"a": torch.rand(1, 4, 4)}, query=1)
    plots.save(figure, tmp_path / "maps.svg")
    plots.save(figure, tmp_path / "maps.png", dpi=100)
    plots.save(figure, tmp_path / "maps.pdf")
    axes = figure.axes[1]
    expected = axes.images[0].get_array()
    (match,) = (found for found in embedded((tmp_path / "maps.svg").read_text()) if found.shape[:2] == (256, 256))
    assert (match[..., 3] == 255).all()
    # matplotlib stores it upside down, or not, by its origin
    assert any(numpy.array_equal(turned[..., :3], expected) for turned in (match, match[::-1]))
    with Image.open(tmp_path / "maps.png") as image:
        dots = numpy.asarray(image.convert("RGB"))
    x0, y0, x1, y1 = axes.get_window_extent().transformed(figure.dpi_scale_trans.inverted()).extents * 100
    for row, column in ((0.25, 0.25), (0.75, 0.75), (0.75, 0.25)):  # within patches, away from the mark of the query
        seen = dots[int(len(dots) - y1 + row * (y1 - y0)), int(x0 + column * (x1 - x0))]
        there = expected[int(row * 256), int(column * 256)]
        assert abs(seen.astype(int) - there.astype(int)).max() <= 40  # a pixel of the photo beside it, at most
    assert b"/SMask" not in (tmp_path / "maps.pdf").read_bytes()


def test_pictures_of_every_layout() -> None:
    colours = torch.rand(4, 5, 3)
    expected = colours.double()
    for image in (
        colours,
        colours.movedim(-1, 0),
        colours.numpy(),
        torch.cat([colours, torch.ones(4, 5, 1)], -1),
        (colours * 255).round().to(torch.uint8),
        Image.fromarray((colours * 255).round().to(torch.uint8).numpy()),
    ):
        shown = plots.pictures.picture(image)
        torch.testing.assert_close(shown, expected, atol=0.003, rtol=0)
    for grey in (colours[..., 0], colours[None, ..., 0], colours[..., :1]):
        torch.testing.assert_close(plots.pictures.picture(grey), expected[..., :1].expand(4, 5, 3))
    scaled = plots.pictures.picture(torch.tensor([[-2.0, 0.0], [1.0, 2.0]]))
    close(scaled[..., 0], [[0, 0.5], [0.75, 1]])


def test_large_photos_are_made_smaller() -> None:
    photo = torch.arange(3000.0).expand(10, 3000)
    shown = plots.pictures.picture(photo)
    assert shown.shape == (4, 1000, 3)
    close(shown[0, :, 0] * 2997, photo[0, ::3])


def test_every_module_stays_in_its_mode(vit: ViTForImageClassification) -> None:
    vit.vit.layers[0].eval()  # as frozen layers are
    before = {name: module.training for name, module in vit.named_modules()}
    pixels = torch.randn(1, 3, 24, 24)
    with torch.inference_mode():
        plots.attention_of(vit, pixels)
        plots.class_activation(vit, pixels)
    assert {name: module.training for name, module in vit.named_modules()} == before


def by_hand(features: Tensor, gradient: Tensor) -> Tensor:
    """Grad-CAM with loops."""
    cams = torch.zeros(len(features), features.shape[1])
    for image in range(len(features)):
        alpha = gradient[image].mean(0)
        for patch in range(features.shape[1]):
            cams[image, patch] = max(float(alpha @ features[image, patch]), 0.0)
    return cams


@pytest.mark.parametrize("pooling", ["class", "average"])
def test_grad_cam_of_a_block(vit: ViTForImageClassification, pooling: str) -> None:
    """With a class token the last block's patches reach nothing, and the one before it is taken."""
    pixels = torch.randn(2, 3, 24, 24)
    model: nn.Module = vit
    if pooling == "average":

        class Average(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.vit = vit.vit

            def forward(self, pixels: Tensor) -> Tensor:
                return self.vit(pixels).last_hidden_state[:, 1:].mean(1)

        model = Average()
    model.requires_grad_(False)
    vit.vit.eval()
    place = -1 if pooling == "average" else -2
    target = torch.tensor([3, 1])

    # the same, from a copy of the block's features that goes the rest of the way
    hidden: dict[int, Tensor] = {}
    hooks = []
    for number, layer in enumerate(vit.vit.layers):

        def keep(_: Any, __: Any, output: Any, number: int = number) -> Any:
            features = (output if isinstance(output, Tensor) else output[0]).detach().requires_grad_()
            hidden[number] = features
            return features if isinstance(output, Tensor) else (features, *output[1:])

        hooks.append(layer.register_forward_hook(keep) if number == len(vit.vit.layers) + place else None)
    output = model.eval()(pixels)
    logits = output if pooling == "average" else output.logits
    logits[[0, 1], target].sum().backward()
    for hook in hooks:
        if hook is not None:
            hook.remove()
    ((_, features),) = hidden.items()
    assert features.grad is not None
    expected = by_hand(features[:, 1:].detach(), features.grad[:, 1:]).reshape(2, 3, 3)
    model.train()
    found = plots.class_activation(model, pixels, target=target)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    predicted = plots.class_activation(model, pixels)
    each = plots.class_activation(model, pixels, target=logits.argmax(-1).tolist())
    assert torch.equal(predicted, each)
    named = plots.class_activation(model, pixels, target=target, block=f"vit.layers.{3 + place}")
    assert torch.equal(named, found)
    if pooling == "class":
        with pytest.raises(ValueError, match=r"got gradients of 0; .* earlier one"):
            plots.class_activation(model, pixels, block="vit.layers.2")


def test_grad_cam_shows_models_side_by_side(vit: ViTForImageClassification) -> None:
    pixels = torch.rand(2, 3, 24, 24)
    given = torch.rand(2, 24, 24)  # as fine as the photo, where smoothing changes nothing
    figure = plots.grad_cam(pixels, {"softmax": vit, "given": given}, inputs={"pixel_values": pixels})
    expected = plots.class_activation(vit, pixels)
    assert [axes.get_title() for axes in figure.axes[:3]] == ["photo", "softmax", "given"]
    for row in range(2):
        photo, first, second, bar = figure.axes[4 * row : 4 * row + 4]
        close(photo.images[0].get_array(), pixels[row].movedim(0, -1))
        largest = max(expected[row].max().item(), given[row].max().item())  # one scale for both
        assert bar.get_ylim() == (0, pytest.approx(largest))
        grey = pixels[row].movedim(0, -1).double()
        drawn = torch.from_numpy(numpy.array(second.images[0].get_array())).double()
        middle = drawn[5::11, 5::11]  # of the pixels, 11 dots each
        torch.testing.assert_close(middle, heat(grey.mean(-1), shares(largest, given[row])), atol=2.0, rtol=0)
        row_of, column_of = divmod(int(expected[row].argmax()), 3)
        assert first.images[0].get_label() == f"largest in row {row_of + 1} of 3, column {column_of + 1} of 3"


@pytest.mark.skipif(not PHOTOS.is_dir(), reason="no photos in ../shared/data/photos")
def test_real_photos(vit: ViTForImageClassification) -> None:
    images = [Image.open(PHOTOS / name).convert("RGB").resize((24, 24)) for name in ("chelsea.png", "astronaut.png")]
    pixels = torch.stack([torch.from_numpy(numpy.array(image)).movedim(-1, 0) / 127.5 - 1 for image in images])
    figure = plots.attention_maps(images[0], vit, query=0, inputs=pixels[:1])
    close(figure.axes[0].images[0].get_array(), numpy.array(images[0]) / 255)
    assert len(plots.grad_cam(images, {"softmax": vit}, inputs=pixels).axes) == 6


# all of them

DRAWN: dict[str, Callable[[], Any]] = {
    "simplex": plots.simplex,
    "trade_off": plots.trade_off,
    "two_entries": plots.two_entries,
    "learned_sigma": lambda: plots.learned_sigma("wikitext103_lm"),
    "patch_similarity": lambda: plots.patch_similarity({"log": entries()}),
    "attention_histograms": lambda: plots.attention_histograms({"one": histograms()[1]}),
    "cumulative_attention": lambda: plots.cumulative_attention({"one": histograms()[1]}),
    "attention_maps": lambda: plots.attention_maps(torch.rand(8, 8), torch.rand(1, 4, 4), query=0),
    "rollout_discrepancy": lambda: plots.rollout_discrepancy({"one": [0.5]}),
    "grad_cam": lambda: plots.grad_cam(torch.rand(1, 3, 8, 8), {"one": torch.rand(1, 2, 2)}),
    "training_curves": lambda: plots.training_curves({"one": entries()}),
}


@pytest.mark.parametrize("name", DRAWN)
def test_equal_figures_give_equal_files(name: str, tmp_path: Path) -> None:
    for number in range(2):
        torch.manual_seed(0)
        figure = DRAWN[name]()
        for suffix in ("png", "svg"):
            plots.save(figure, tmp_path / f"{number}.{suffix}", dpi=40)
    for suffix in ("png", "svg"):
        first, second = ((tmp_path / f"{number}.{suffix}").read_bytes() for number in range(2))
        assert first == second
    with Image.open(tmp_path / "0.png") as image:
        assert numpy.asarray(image).std() > 1  # something is drawn


LABELS: dict[str, Callable[[str], Any]] = {
    "simplex": lambda label: plots.simplex(multimax={label: DEIT[0]}),
    "trade_off, one": lambda label: plots.trade_off(multimax={label: DEIT[0]}, functions={}),
    "trade_off, two": lambda label: plots.trade_off(multimax={label: DEIT[0], "other": DEIT[8]}),
    "trade_off, function": lambda label: plots.trade_off(functions={label: multimax.reweighting.sparsemax}),
    "two_entries": lambda label: plots.two_entries(multimax={label: DEIT[0]}),
    "learned_sigma": lambda label: plots.learned_sigma({label: [DEIT[0]]}),
    "patch_similarity": lambda label: plots.patch_similarity({label: entries()}),
    "rollout_discrepancy": lambda label: plots.rollout_discrepancy({label: [0.5], "other": [1.0]}),
    "attention_histograms": lambda label: plots.attention_histograms({label: histograms()[1], "b": histograms()[1]}),
    "cumulative_attention": lambda label: plots.cumulative_attention({"a": {label: histograms()[1]["layers.0.attn"]}}),
    "attention_maps": lambda label: plots.attention_maps(torch.rand(8, 8), {label: torch.rand(1, 4, 4)}, query=0),
    "grad_cam": lambda label: plots.grad_cam(torch.rand(1, 3, 8, 8), {label: torch.rand(1, 2, 2)}),
    "training_curves": lambda label: plots.training_curves({label: entries(), "other": entries()}),
    "training_curves, value": lambda label: plots.training_curves({"a": [{"step": 1, label: 2.0}]}, names=[label]),
}


@pytest.mark.parametrize("name", LABELS)
def test_labels_are_shown_as_they_are(name: str, tmp_path: Path) -> None:
    """Not as mathematics, not hidden, and however long without a warning, which would be an error here."""
    label = r"_$\frac$ < 5"
    plots.save(LABELS[name](label), tmp_path / "labelled.svg")
    if name == "training_curves, value":
        label = label.replace("_", " ")  # as in the names of all measures
    texts = re.findall(r"<text[^>]*>([^<]*)<", (tmp_path / "labelled.svg").read_text())  # text, not outlines
    assert any(label.strip().replace("<", "&lt;") in text for text in texts)
    LABELS[name]("words, and a " + "w" * 200).draw_without_rendering()


def test_many_layers_leave_room_for_the_panel() -> None:
    log = [{"step": step, **{f"multimax/layers.{n}.attn/t_b_1": 1.0 for n in range(24)}} for step in (1, 2)]
    figure = plots.training_curves({"MultiMax": log})
    figure.draw_without_rendering()  # with the warning of matplotlib that there is no room, an error here
    assert figure.axes[0].get_window_extent().height / figure.dpi > 0.8


def test_values_that_are_no_parameters_are_no_mathematics() -> None:
    log = [{"step": numpy.int64(1), "d_loss": numpy.float32(2.0), "multimax/x/d_1": 1.0}]
    figure = plots.training_curves({"a": log}, names=["d_loss", "d_1"])
    assert [axes.get_title() for axes in figure.axes] == ["d loss", "$d_1$"]


@pytest.mark.parametrize("name", DRAWN)
def test_without_matplotlib(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [module for module in sys.modules if module.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ImportError, match=r'expected matplotlib for figures, got none; pip install "multimax\[plots\]"'
    ):
        DRAWN[name]()


def test_every_figure_is_tried() -> None:
    others = {"COLOURS", "attention_of", "by_epoch", "class_activation", "paper_figures", "read_metrics", "save"}
    assert set(plots.__all__) == others | set(DRAWN)


def test_nothing_global_is_changed() -> None:
    code = (
        "import sys, matplotlib\n"
        "def settings(): return {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != 'backend'}\n"
        "before = settings()\n"
        "from multimax import plots\n"
        "for name, figure in plots.paper_figures(): figure.draw_without_rendering()\n"
        "assert before == settings()\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def broken_multimax() -> multimax.MultiMax:
    module = multimax.MultiMax()
    with torch.no_grad():
        module.coefs.fill_(math.nan)
    return module


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "no layers": (lambda: plots.learned_sigma({}), "expected at least one layer"),
    "an unknown preset": (
        lambda: plots.learned_sigma("deit_huge"),
        "one of 'deit_small', 'wikitext103_lm', got 'deit_h",
    ),
    "a model without MultiMax": (
        lambda: plots.learned_sigma(nn.Linear(2, 2)),
        r"got Linear without; multimax.convert_",
    ),
    "half of the parameters": (lambda: plots.learned_sigma([{"t_b": [1.0], "b": [1.0]}]), "got only t_b, b"),
    "low above high": (lambda: plots.learned_sigma("deit_small", low=3, high=-3), "expected low < high, got 3 and -3"),
    "no columns": (lambda: plots.learned_sigma("deit_small", columns=0), "columns of at least 1, got 0"),
    "inputs of two": (lambda: plots.simplex([[1.0, 2.0]]), r"shape \(inputs, 3\), got \(1, 2\)"),
    "inputs in words": (lambda: plots.simplex([["a", "b", "c"]]), "expected inputs to be numbers"),
    "inputs of NaN": (lambda: plots.simplex([[math.nan, 1, 2]]), "expected inputs to be finite"),
    "temperature 0": (lambda: plots.simplex(temperatures=[0, 1]), r"above 0, at least one, got \[0.0, 1.0\]"),
    "parameters without a label": (lambda: plots.simplex(multimax=DEIT[0]), "by label, such as .* got PaperParameters"),
    "a function of another shape": (
        lambda: plots.simplex(functions={"sum": lambda x: x.sum(-1)}),
        r"weights of shape \(25, 3\) from 'sum', got \(25,\)",
    ),
    "a threshold above all": (lambda: plots.trade_off(threshold=9.0), "choose another threshold"),
    "parameters of NaN": (
        lambda: plots.learned_sigma([{**DEIT[0]._asdict(), "b": [1.0, math.nan]}]),
        "expected b to be finite, got NaN",
    ),
    "a model of NaN": (
        lambda: plots.learned_sigma(nn.Sequential(broken_multimax())),
        "expected coefs of 0 to be finite, got NaN",
    ),
    "a layer without runs": (lambda: plots.learned_sigma({"a": []}), "a set for each, got none"),
    "endless scores": (lambda: plots.learned_sigma("deit_small", low=-math.inf), "low and high to be finite"),
    "endless x": (lambda: plots.two_entries(high=math.inf), "low and high to be finite"),
    "functions without labels": (lambda: plots.two_entries(functions=[torch.softmax]), "functions by label, .* got "),
    "no function": (lambda: plots.trade_off(functions={"a": "softmax"}), "functions by label, .* 'softmax'"),
    "a function of NaN": (
        lambda: plots.simplex(functions={"a": lambda x: x * math.nan}),
        "the weights of 'a' to be finite",
    ),
    "one label for two": (
        lambda: plots.simplex(functions={"a": torch.sigmoid}, multimax={"a": DEIT[0]}),
        "a different label for each function, got a twice",
    ),
    "a threshold in words": (lambda: plots.trade_off(threshold="mean"), "threshold to be numbers, got str"),
    "a fixed entry of NaN": (lambda: plots.two_entries([math.nan]), "fixed to be finite"),
    "no fixed entry": (lambda: plots.two_entries([]), "at least one fixed entry"),
    "no runs": (lambda: plots.patch_similarity({}), "expected runs by label, got none"),
    "a run that is a path": (lambda: plots.patch_similarity({"a": "runs/a"}), r"plots.read_metrics\(FOLDER\)"),
    "a log without measures": (lambda: plots.patch_similarity({"a": [{"loss": 1.0}]}), "got no measures at all"),
    "a measure that is not there": (
        lambda: plots.patch_similarity({"a": entries()}, measure="support"),
        "expected support .* got only patch_similarity, entropy",
    ),
    "layers of layers": (
        lambda: plots.patch_similarity({"a": {1: [[0.5]]}}),
        r"for epoch 1 of 'a', got shape \(1, 1\)",
    ),
    "epochs in words": (
        lambda: plots.patch_similarity({"a": {"last": [0.5], 1: [0.5]}}),
        "epochs of 'a' to be finite numbers, got last, 1",
    ),
    "a measure in words": (
        lambda: plots.by_epoch([{"epoch": 1, "measures/a/entropy": "high"}], "entropy"),
        "measures/a/entropy to be a number, got 'high'",
    ),
    "no epoch": (
        lambda: plots.by_epoch([{"epoch": None, "measures/a/entropy": 1.0}], "entropy"),
        "expected epoch to be a number, got None",
    ),
    "no discrepancy": (
        lambda: plots.rollout_discrepancy({"a": metrics.AttentionStatistics(())}),
        r"give it to collect: measures=\('rollout_discrepancy',\)",
    ),
    "no histogram": (
        lambda: plots.attention_histograms({"a": metrics.AttentionStatistics(())}),
        r"give them to collect: measures=\('histogram',\)",
    ),
    "counts": (lambda: plots.attention_histograms({"a": [1, 2]}), "LogHistograms by layer, for 'a', got list"),
    "empty histograms": (
        lambda: plots.cumulative_attention({"a": {"x": metrics.LogHistogram()}}),
        "expected counted weights in x of 'a', got none",
    ),
    "other layers": (
        lambda: plots.cumulative_attention({"a": histograms()[1], "b": {"x": metrics.LogHistogram()}}),
        "same layers in all runs, .* got x of 'b'",
    ),
    "other edges": (
        lambda: plots.cumulative_attention(
            {"a": {"x": histograms()[1]["layers.0.attn"]}, "b": {"x": metrics.LogHistogram(bins=4)}}
        ),
        "same edges, got others in x of 'b'",
    ),
    "unknown names": (
        lambda: plots.training_curves({"a": entries()}, names=["t_c"]),
        "names out of loss, .* got 't_c'",
    ),
    "only the loss": (lambda: plots.training_curves({"a": [{"loss": 1.0, "step": 1}]}), "got only loss; name what"),
    "no folder": (lambda: plots.read_metrics("nowhere"), "folder of a run, with metrics.jsonl in it, got 'nowhere'"),
    "no image": (
        lambda: plots.attention_maps(None, torch.rand(1, 4, 4), query=0),
        "an image as an array, got NoneType",
    ),
    "an image of 5 channels": (
        lambda: plots.attention_maps(torch.rand(8, 8, 5), torch.rand(1, 4, 4), query=0),
        r"1, 3 or 4 channels, got \(8, 8, 5\)",
    ),
    "attention of two images": (
        lambda: plots.attention_maps(torch.rand(8, 8), torch.rand(2, 1, 4, 4), query=0),
        r"\(heads, queries, keys\), got \(2, 1, 4, 4\)",
    ),
    "a query outside": (
        lambda: plots.attention_maps(torch.rand(8, 8), torch.rand(1, 5, 5), query=4),
        r"query in \[0, 3\], a patch of 2 x 2, got 4",
    ),
    "tokens of no square": (
        lambda: plots.attention_maps(torch.rand(8, 8), torch.rand(1, 7, 7), query=0),
        r"got 7 tokens; give grid=\(rows, columns\)",
    ),
    "a grid too large": (
        lambda: plots.attention_maps(torch.rand(8, 8), torch.rand(1, 7, 7), query=0, grid=(3, 3)),
        "a grid of at most 7 patches, got 3 x 3",
    ),
    "a grid of one number": (
        lambda: plots.attention_maps(torch.rand(8, 8), torch.rand(1, 4, 4), query=0, grid=4),
        r"grid=\(rows, columns\), whole numbers of at least 1, got 4",
    ),
    "a grid of halves": (
        lambda: plots.attention_maps(torch.rand(8, 8), torch.rand(1, 4, 4), query=0, grid=(1.5, 2)),
        r"whole numbers of at least 1, got \(1.5, 2\)",
    ),
    "attention of NaN": (
        lambda: plots.attention_maps(torch.rand(8, 8), torch.full((1, 4, 4), math.nan), query=0),
        "attention weights to be finite",
    ),
    "maps of NaN": (
        lambda: plots.grad_cam(torch.rand(1, 3, 8, 8), {"a": torch.full((1, 2, 2), math.nan)}),
        "the maps of 'a' to be finite",
    ),
    "a single number for images": (lambda: plots.grad_cam(torch.tensor(1.0), {"a": 1}), "images as a list, .* Tensor"),
    "a model without inputs": (
        lambda: plots.attention_maps(torch.rand(8, 8), nn.Linear(2, 2), query=0),
        "expected the model's inputs, got none; give inputs=",
    ),
    "a model without attention": (
        lambda: plots.attention_maps(torch.rand(8, 8), nn.Linear(2, 2), query=0, inputs=torch.rand(1, 2)),
        "multimax: expected .*attention",
    ),
    "no stack": (lambda: plots.class_activation(nn.Linear(2, 2), torch.rand(1, 2)), "a stack of blocks, got Linear"),
    "no such block": (
        lambda: plots.class_activation(nn.Linear(2, 2), torch.rand(1, 2), block="head"),
        "full name of one of the model's modules, got 'head'",
    ),
    "features of two dims": (
        lambda: plots.class_activation(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.rand(1, 2)),
        r"features of shape \(images, tokens, features\) from '0', '1', got none",
    ),
    "no logits": (
        lambda: plots.class_activation(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.rand(1, 4, 2)),
        r"logits of shape \(images, classes\), got \(1, 4, 2\)",
    ),
    "maps of other images": (
        lambda: plots.grad_cam(torch.rand(2, 3, 8, 8), {"a": torch.rand(1, 2, 2)}),
        r"maps of shape \(2, rows, columns\) for 'a', one per image, got \(1, 2, 2\)",
    ),
    "no images": (lambda: plots.grad_cam([], {"a": torch.rand(1, 2, 2)}), "at least one image, got none"),
    "no dots": (lambda: plots.save(plots.two_entries(), "figure.png", dpi=0), "dpi above 0"),
    "an unknown format": (
        lambda: plots.save(plots.two_entries(), "figure.doc"),
        "a file that ends in .* got 'figure.doc'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_says_what_is_expected(case: str) -> None:
    call, words = WRONG[case]
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=words) as error:
        call()
    assert str(error.value).startswith("multimax: expected")


def test_grad_cam_of_classes_that_are_not_there(vit: ViTForImageClassification) -> None:
    for target in (5, -1, [1, 2, 3], 1.5):
        with pytest.raises(ValueError, match=r"target in \[0, 4\], one for all or one for each of 2 images"):
            plots.class_activation(vit, torch.randn(2, 3, 24, 24), target=target)


def test_broken_logs(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    for text, words in (
        (b'{"step": 1}\n{"st\n', "got line 2: .*; remove the line"),
        (b'{"st\n{"step": 1}\n', "got line 1"),
        (b"[1]\n", r"names with numbers in .* got line 1: \[1\]"),
        (b"{}\n\xff", "a line of JSON in .* got line 2"),
    ):
        file.write_bytes(text)
        with pytest.raises(ValueError, match=words):
            plots.read_metrics(tmp_path)
    file.write_bytes(b'{"step": 1}\n{"step": 2, "lo')  # as a run leaves it that is killed while it writes
    assert plots.read_metrics(tmp_path) == [{"step": 1}]


# the command


def test_figures_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["figures", "--out", str(tmp_path / "new" / "folder")]) == 0
    printed = [Path(line) for line in capsys.readouterr().out.splitlines()]
    names = ["simplex", "trade-off", "two-entries", "sigma-deit-small", "sigma-wikitext103-lm"]
    assert printed == [tmp_path / "new" / "folder" / f"{name}.png" for name in names]
    for file in printed:
        with Image.open(file) as image:
            assert image.size[0] > 600
    assert main(["figures", "--out", str(tmp_path), "--format", "svg"]) == 0
    assert (tmp_path / "simplex.svg").read_text().startswith("<?xml")
    light = Image.open(printed[0]).convert("L")
    assert main(["figures", "--out", str(tmp_path / "new" / "folder"), "--dark"]) == 0
    dark = Image.open(printed[0]).convert("L")
    assert dark.size == light.size
    assert light.getpixel((1, 1)) == 255
    assert dark.getpixel((1, 1)) < 40


def test_figures_command_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    assert main(["figures", "--out", str(tmp_path / "file")]) == 1
    assert "multimax: expected a folder to write figures to, got" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["figures", "--out", str(tmp_path)]) == 1
    assert 'pip install "multimax[plots]"' in capsys.readouterr().err


def test_gallery_is_drawn_from_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gallery_figures, "EXAMPLES", 20)
    short = {"trainer": {"max_steps": 4, "eval_steps": 2, "logging_steps": 2}, "measured": 20, "tensorboard": False}
    for folder, methods in (("softmax", {}), ("multimax-both", {"attention": "multimax", "output": "multimax"})):
        settings = override(preset("cpu-digits"), {**short, **methods})
        train(settings, tmp_path / "runs" / folder / "seed-0", progress=False)
    gallery_figures.draw(tmp_path / "runs", tmp_path / "figures", 0)
    drawn = {file.stem for file in (tmp_path / "figures").iterdir()}
    shown = {file.stem for file in (ROOT / "docs" / "figures").glob("*.svg")} - {"speed", "readme"}
    assert shown == drawn | {name for name, _ in plots.paper_figures()}
    assert [file.name for file in (ROOT / "docs" / "figures").glob("*.png")] == ["explorer.png"]


class Shaky(LayoutEngine):
    """A layout whose last digits change, as constrained layout's do now and then."""

    _adjust_compatible = _colorbar_gridspec = True

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def execute(self, fig: Figure) -> None:
        for axes in fig.axes:
            axes.set_position(Bbox([[0.1 + self.by, 0.1], [0.9, 0.9 - self.by]]))


def test_the_last_digits_of_a_layout_do_not_show_in_an_svg() -> None:
    figures = [Figure(layout=Shaky(by)) for by in (0, 1e-13)]
    for figure in figures:
        figure.add_subplot().plot([1, 2, 3])
    first, second = (plots.style.as_svg(figure) for figure in figures)
    assert b"clip-path" in first
    assert first == second
