"""What is to be seen in a figure, in words: for readers who cannot see it."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS, LINES = 12, 6  # that are told of one by one
IDENTITY = "identity"  # a line that is the same in all panels


def _words(text: str) -> str:
    """A label without line breaks and mathematics."""
    return re.sub(r"\s+", " ", re.sub(r"[${}\\]", "", text).replace("t_b_", "t_b").replace("t_d_", "t_d")).strip()


def _number(value: float) -> str:
    return f"{value:.3g}"


def _listed(parts: Sequence[str]) -> str:
    more = len(parts) - LINES
    return ", ".join(parts[:LINES]) + (f", and {more} more" if more > 0 else "")


def _label(artist: Any) -> str:
    """Empty for what has none but matplotlib's own."""
    text = str(artist.get_label() or "")
    return "" if text.startswith("_") else _words(text)


def _seen(axes: "Axes") -> Iterator[str]:
    """What each thing in a panel shows."""
    for line in axes.get_lines():
        label = _label(line)
        pairs: Any = zip(line.get_xdata(), line.get_ydata(), strict=True)  # type: ignore[arg-type]
        finite = [(float(x), float(y)) for x, y in pairs if math.isfinite(y)]
        if not label or not finite or label.startswith(IDENTITY):
            continue
        first, last = finite[0][1], finite[-1][1]
        if first < 0.05 and 0.95 < last <= 1.0:  # shares and weights, which all have the same ends
            yield f"{label} reaches a half at {_number(next(x for x, y in finite if y >= 0.5))}"
        elif _number(first) == _number(last):
            yield f"{label} stays at {_number(first)}"
        else:
            yield f"{label} goes from {_number(first)} to {_number(last)}"
    for steps in axes.patches:
        if _label(steps) and hasattr(steps, "get_data"):
            counts, edges, _ = steps.get_data()
            place = int(counts.argmax())
            yield f"{_label(steps)} has most weights around {_number(math.sqrt(edges[place] * edges[place + 1]))}"
    for points in axes.collections:
        places: Any = points.get_offsets()
        if _label(points) and len(places) and hasattr(points, "get_sizes"):
            shown = [f"({', '.join(_number(value) for value in place)})" for place in places.tolist()]
            yield f"{_label(points)} at {_listed(shown)}"
    for image in axes.images:
        if _label(image):
            yield _label(image)


def described(figure: "Figure") -> str:
    """A figure's panels one after the other: what is drawn in them, and where it begins, ends or is largest.

    Args:
        figure: of :mod:`multimax.plots`.

    Example:
        >>> from multimax import plots
        >>> from multimax.experiments.report.alternative import described
        >>> print(described(plots.rollout_discrepancy({"softmax": [0.5, 0.25], "MultiMax": [0.5, 0.5]})))
        rollout discrepancy by layer: softmax goes from 0.5 to 0.25, MultiMax stays at 0.5.
    """
    panels = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    columns: dict[int | None, str] = {}  # titles stand above the first row of pictures, names of rows at their left
    told = []
    for axes in panels:
        spec = axes.get_subplotspec()
        column, row = (None, None) if spec is None else (spec.colspan.start, spec.rowspan.start)
        title = _words(axes.get_title())
        if axes.images:
            title = columns.setdefault(column, title)
            left = next((_words(a.get_ylabel()) for a in panels if a.images and a.get_ylabel() and _row(a) == row), "")
            title = ", ".join(part for part in (title, left or (f"row {row + 1}" if row else "")) if part)
        seen = _listed(list(_seen(axes)))
        if seen or not axes.images:  # there is nothing to say of a photo
            told.append(": ".join(part for part in (title, seen) if part))
    x = _words(figure.get_supxlabel() or (panels[0].get_xlabel() if len(panels) == 1 else ""))
    y = _words(figure.get_supylabel() or (panels[0].get_ylabel() if len(panels) == 1 else ""))
    about = f"{y} by {x}" if x and y else y or (f"by {x}" if x else "")
    told = [part for part in told if part]
    more = [f"and {len(told) - PANELS} more panels"] if len(told) > PANELS else []
    text = "; ".join([*told[:PANELS], *more])
    return f"{': '.join(part for part in (about, text) if part)}."


def _row(axes: "Axes") -> int | None:
    spec = axes.get_subplotspec()
    return None if spec is None else spec.rowspan.start
