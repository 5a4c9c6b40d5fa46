"""Figures on a dark background: one rule for colours, for files of dots and for SVG, which carries both versions."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NEUTRAL = 0.04  # chroma below which a colour is a grey
PAPER, INK = 0.19, 0.93  # lightness that white and black become
# Ottosson's OKLab, in which equal steps look equal: from linear RGB to the cones' answers, and from those to the colour
CONES = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)
LAB = (
    (0.2104542553, 0.7936177850, -0.0040720468),
    (1.9779984951, -2.4285922050, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.8086757660),
)


def darkened(colour: str) -> str:
    """What a colour becomes on a dark background: greys are turned over, others are made lighter, with their hue.

    Args:
        colour: as "#rrggbb".

    Example:
        >>> from multimax.plots.dark import darkened
        >>> darkened("#ffffff"), darkened("#000000")
        ('#141414', '#e8e8e8')
    """
    cones, lab = (torch.tensor(matrix, dtype=torch.float64) for matrix in (CONES, LAB))
    rgb = torch.tensor([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)], dtype=torch.float64)
    linear = torch.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    light, a, b = (lab @ (cones @ linear) ** (1 / 3)).tolist()
    grey = (a * a + b * b) ** 0.5 < NEUTRAL
    light = INK - (INK - PAPER) * light**2 if grey else 0.58 + 0.4 * light  # squared: a pale grid is not to be lost
    answers = torch.linalg.solve(lab, torch.tensor([light, a, b], dtype=torch.float64))
    linear = torch.linalg.solve(cones, answers**3).clamp(0, 1)
    rgb = torch.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb.tolist())


def adaptive(svg: str) -> str:
    """An SVG file that is dark where the reader's system is, by a style that other programs pass over."""
    rules = [f"text {{ fill: {darkened('#000000')} }}"]
    for what, colour in sorted(set(re.findall(r"(fill|stroke): (#[0-9a-f]{6})", svg))):
        rules.append(f'[style*="{what}: {colour}"] {{ {what}: {darkened(colour)} !important }}')
    style = "@media screen and (prefers-color-scheme: dark) {\n" + "\n".join(rules) + "\n}\n"
    return svg.replace("</style>", f"\n{style}</style>", 1)


def _paints(artist: Any) -> Iterator[tuple[Callable[[Any], Any], Any]]:
    """Ways to set the colours of an artist, and the colours."""
    from matplotlib.collections import Collection
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.text import Text

    if isinstance(artist, Collection):
        if artist.get_array() is not None:
            artist.update_scalarmappable()
            faces = artist.get_facecolor()
            yield artist.set_array, artist.get_array()
            yield artist.set_facecolor, faces
        else:
            yield artist.set_facecolor, artist.get_facecolor()
        yield artist.set_edgecolor, artist.get_edgecolor()
    elif isinstance(artist, Patch):
        yield artist.set_facecolor, artist.get_facecolor()
        yield artist.set_edgecolor, artist.get_edgecolor()
    elif isinstance(artist, Line2D):
        faces, edges = artist.get_markerfacecolor(), artist.get_markeredgecolor()
        yield artist.set_color, artist.get_color()
        yield artist.set_markerfacecolor, faces
        yield artist.set_markeredgecolor, edges
    elif isinstance(artist, Text):
        yield artist.set_color, artist.get_color()
        arrow = getattr(artist, "arrow_patch", None)  # which is not among the figure's own
        if arrow is not None:
            yield from _paints(arrow)


def _turned(colours: Any) -> Any:
    from matplotlib.colors import to_hex, to_rgba, to_rgba_array

    def one(rgba: Any) -> Any:
        return (*to_rgba(darkened(to_hex(rgba)))[:3], rgba[3])

    if isinstance(colours, str) and colours == "none":
        return colours
    several = to_rgba_array(colours)
    turned = [one(rgba) for rgba in several]
    return turned if getattr(colours, "ndim", 1) == 2 else turned[0]


@contextmanager
def dark(figure: "Figure") -> Iterator[None]:
    """The figure in its dark version, for the moment. Photos stay as they are."""
    figure.draw_without_rendering()  # makes the marks of the axes
    restore: list[tuple[Callable[[Any], Any], Any]] = []
    try:
        for artist in figure.findobj():
            for paint, colours in list(_paints(artist)):
                restore.append((paint, colours))
                paint(None if paint.__name__ == "set_array" else _turned(colours))
        yield
    finally:
        for paint, colours in restore:
            paint(colours)
