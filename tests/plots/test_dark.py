"""Figures on a dark background."""

import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

import multimax
from browser import browser  # noqa: F401, a fixture
from multimax import plots
from multimax.plots.dark import darkened

BACKGROUND = darkened("#ffffff")


def luminance(colour: str) -> float:
    rgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in rgb)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one: str, other: str) -> float:
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colour", plots.COLOURS)
def test_every_colour_of_runs_is_seen_on_dark(colour: str) -> None:
    assert contrast(darkened(colour.lower()), BACKGROUND) > 4.5


@pytest.mark.parametrize(("name", "low"), [("viridis", 0.0), ("plasma", 0.0), ("Blues", 0.3)])
def test_every_shade_is_seen_on_dark(name: str, low: float) -> None:
    from matplotlib.colors import to_hex

    shades = [to_hex(plots.style.colours(name, low, 1.0)(place)) for place in numpy.linspace(0, 1, 20)]
    assert min(contrast(darkened(shade), BACKGROUND) for shade in shades) > 3
    assert len({darkened(shade) for shade in shades}) == 20


def test_greys_are_turned_over() -> None:
    greys = [darkened(f"#{level:02x}{level:02x}{level:02x}") for level in range(0, 256, 5)]
    lights = [luminance(grey) for grey in greys]
    assert lights == sorted(lights, reverse=True)
    assert contrast(greys[0], greys[-1]) > 14


def test_dark_files_and_the_figure_afterwards(tmp_path: Path) -> None:
    figure = plots.simplex()  # text, lines, patches, points of a colour and of many, a bar
    plots.save(figure, tmp_path / "before.png", dpi=60)
    plots.save(figure, tmp_path / "dark.png", dpi=60, dark=True)
    plots.save(figure, tmp_path / "after.png", dpi=60)
    before, dark, after = (
        numpy.asarray(Image.open(tmp_path / f"{name}.png").convert("L")).astype(int)
        for name in ("before", "dark", "after")
    )
    assert numpy.array_equal(before, after)
    assert (before == 255).mean() > 0.5
    assert (dark < 40).mean() > 0.5
    black = before < 20  # text and axes
    assert numpy.median(dark[black]) > 180
    with plots.style.dark_version(figure):  # lines to labels too
        lines = [text.arrow_patch.get_edgecolor()[0] for text in figure.axes[0].texts if text.arrow_patch is not None]
    assert lines
    assert set(lines) == {int(darkened("#bfbfbf")[1:3], 16) / 255}
    plots.save(figure, tmp_path / "dark.svg", dark=True)
    assert "prefers-color-scheme" not in (tmp_path / "dark.svg").read_text()
    assert BACKGROUND in (tmp_path / "dark.svg").read_text()


def test_photos_stay_as_they_are(tmp_path: Path) -> None:

    figure = plots.grad_cam(torch.rand(1, 3, 8, 8), {"a": torch.rand(1, 2, 2)})
    before = numpy.array(figure.axes[1].images[0].get_array())
    plots.save(figure, tmp_path / "dark.png", dark=True)
    assert numpy.array_equal(before, figure.axes[1].images[0].get_array())


def test_svg_has_text_and_both_versions() -> None:
    svg = plots.style.as_svg(plots.trade_off()).decode()
    assert re.search(r"<text[^>]*>sparsity S</text>", svg)
    style = svg[svg.index("@media screen and (prefers-color-scheme: dark)") : svg.index("</style>")]
    used = set(re.findall(r"(fill|stroke): (#[0-9a-f]{6})", svg[svg.index("</style>") :]))
    rules = dict(re.findall(r'\[style\*="((?:fill|stroke): #[0-9a-f]{6})"\] \{ (?:fill|stroke): (#[0-9a-f]{6})', style))
    assert rules == {f"{what}: {colour}": darkened(colour) for what, colour in used}


def test_svg_is_dark_in_a_browser_that_is(browser: Any, tmp_path: Path) -> None:  # noqa: F811
    plots.save(plots.learned_sigma([multimax.presets["deit_small"][8]]), tmp_path / "sigma.svg")
    seen = {}
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme=scheme)
        page.goto((tmp_path / "sigma.svg").as_uri())
        page.screenshot(path=tmp_path / f"{scheme}.png", clip={"x": 2, "y": 2, "width": 200, "height": 200})
        page.close()
        seen[scheme] = numpy.asarray(Image.open(tmp_path / f"{scheme}.png").convert("L"))
    assert numpy.median(seen["light"]) == 255
    assert numpy.median(seen["dark"]) < 40
    assert seen["dark"].max() > 200  # text
