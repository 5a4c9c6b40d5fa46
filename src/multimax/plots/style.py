"""The one style of all figures: colours, sizes, panels; and how they are written."""

import io
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from multimax.ops import checks
from multimax.plots.dark import adaptive
from multimax.plots.dark import dark as dark_version

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart; yellow, hard to see on white, is second to last.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")
INK = "0.1"  # of what is neither text nor a run
LINES: tuple[Any, ...] = ("-", "--", "-.", ":")
TITLE, TEXT, TICKS = 9, 8, 7  # font sizes in points
LETTER = 0.57  # mean width of one, in font sizes
LEGEND_ROW = 0.18  # inches


def plain(text: str, width: int = 36) -> str:
    r"""A label exactly as given: matplotlib would typeset $...$ as mathematics and hide what begins with _.

    Long ones are broken into lines of at most ``width`` characters, and cut after the third.

    Example:
        >>> from multimax.plots.style import plain
        >>> plain("$5"), plain("_label"), plain("a label of many words", width=12)
        ('\\$5', ' _label', 'a label of\nmany words')
    """
    lines = [part for line in text.split("\n") for part in textwrap.wrap(line, width) or [""]]
    if len(lines) > 3:
        lines = [*lines[:2], lines[2][: width - 1] + "\N{HORIZONTAL ELLIPSIS}"]
    shown = "\n".join(lines).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def figure(rows: int, columns: int, width: float, height: float) -> "Figure":
    """An empty figure for rows x columns panels of a size in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'multimax: expected matplotlib for figures, got none; pip install "multimax[plots]"'
        ) from error
    return Figure(figsize=(width * columns, height * rows), layout="constrained")


def grid_of(number: int, columns: int) -> tuple[int, int]:
    """Rows and columns for a number of panels, at most so many columns, and no more than the rows need."""
    if not isinstance(columns, int) or isinstance(columns, bool) or columns < 1:
        raise ValueError(f"multimax: expected columns of at least 1, got {columns!r}")
    rows = -(-number // columns)
    return rows, -(-number // rows)


def panel(figure: "Figure", rows: int, columns: int, number: int, title: str = "", **options: Any) -> "Axes":
    """The next panel, counted from 0, with a light grid behind what is drawn."""
    axes: Axes = figure.add_subplot(rows, columns, number + 1, **options)
    dress(axes, title, figure.get_figwidth() / columns)
    return axes


def dress(axes: "Axes", title: str, width: float) -> None:
    """Title, marks and grid of a panel that is so many inches wide."""
    longest = max(map(len, title.split("\n")))
    # points; not the whole panel, as a title is centred on axes that the tick labels push to the right
    room = 0.85 * 72 * width
    axes.set_title(title, fontsize=min(TITLE, room / (LETTER * max(longest, 1))))
    axes.tick_params(labelsize=TICKS)
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def picture_panel(figure: "Figure", rows: int, columns: int, number: int, title: str = "") -> "Axes":
    """The next panel, for a picture: without axes, but with room for a label at its left."""
    axes = figure.add_subplot(rows, columns, number + 1)
    axes.set_title(title, fontsize=TEXT)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)
    return axes


def labels(figure: "Figure", x: str, y: str) -> None:
    """Axis labels that all panels share."""
    figure.supxlabel(x, fontsize=TITLE)
    figure.supylabel(y, fontsize=TITLE)


def legend(figure: "Figure", handles: Sequence[Any], columns: int = 6) -> None:
    """A legend above all panels, which keep their size."""
    longest = max(len(line) for handle in handles for line in str(handle.get_label()).split("\n"))
    room = int(figure.get_figwidth() / (0.5 + 0.06 * longest))  # inches of the line and of a letter
    across = max(min(len(handles), columns, room), 1)
    rows = -(-len(handles) // across) * max(str(handle.get_label()).count("\n") + 1 for handle in handles)
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW * max(rows - 2, 0))  # for two there is room
    figure.legend(handles=handles, loc="outside upper center", ncols=across, fontsize=TEXT, frameon=False)


def bar(figure: "Figure", shown: Any, label: str, **place: Any) -> Any:
    """A bar of colours, without seams between them in files of vectors."""
    made: Any = figure.colorbar(shown, ax=figure.axes, aspect=30, pad=0.02, **place)
    made.solids.set_edgecolor("face")
    made.set_label(label, fontsize=TEXT)
    made.ax.tick_params(labelsize=TICKS)
    return made


def colours(name: str, low: float, high: float) -> "Colormap":
    """A part of one of matplotlib's colour maps, in so few steps that a bar of it stays one of vectors."""
    import matplotlib
    from matplotlib.colors import ListedColormap

    return ListedColormap(matplotlib.colormaps[name](torch.linspace(low, high, 48).numpy()))


def colours_of(labels: Iterable[str]) -> dict[str, str]:
    """A colour for each run: softmax has the first of all, others have the next, as in the figures of functions."""
    found: dict[str, str] = {}
    place = 1
    for label in labels:
        if label.startswith("softmax") and COLOURS[0] not in found.values():
            found[label] = COLOURS[0]
        else:
            found[label] = COLOURS[place % len(COLOURS)]
            place += 1
    return found


def words(name: str) -> str:
    """A measure's name in words."""
    return {"multi_modality": "multi-modality"}.get(name, name.replace("_", " "))


def save(figure: "Figure", file: str | Path, *, dpi: int = 200, dark: bool = False) -> None:
    """Writes a figure; equal figures give equal files, in the formats png, svg and pdf.

    An SVG file is dark by itself where the reader's system is, in a browser; its text is text, which can be searched.

    Args:
        figure: of one of these functions.
        file: its extension gives the format: png, svg, pdf and others that matplotlib supports.
        dpi: dots per inch, for formats that have dots.
        dark: on a dark background, in any format.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from multimax import plots
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     plots.save(plots.two_entries(), Path(folder) / "two-entries.png")
    """
    checks.number_above("dpi", dpi, 0)
    suffix = Path(file).suffix.lower()
    known = {f".{ending}" for ending in figure.canvas.get_supported_filetypes()}
    if suffix not in known:
        raise ValueError(
            f"multimax: expected a file that ends in {', '.join(sorted(known))}, got {str(file)!r}; the ending says "
            "the format"
        )
    with dark_version(figure) if dark else nullcontext():
        if suffix == ".svg" and not dark:
            Path(file).write_bytes(as_svg(figure))
        else:
            _write(figure, file, suffix.removeprefix("."), dpi)


def as_svg(figure: "Figure") -> bytes:
    """The text of an SVG file, light and dark; equal figures give equal texts."""
    file = io.BytesIO()
    _write(figure, file, "svg", 200)
    return adaptive(file.getvalue().decode()).encode()


def _write(figure: "Figure", file: Any, format: str, dpi: int) -> None:
    import matplotlib
    from matplotlib.transforms import Bbox

    if figure.get_layout_engine() is not None:  # places differ from one drawing to the next: those of the second stay
        for _ in range(2):
            figure.draw_without_rendering()
        figure.set_layout_engine("none")
        for axes in figure.axes:  # the layout's last digits depend on chance, and names in an SVG on all digits
            axes.set_position(Bbox(axes.get_position(original=True).get_points().round(6)))
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    # text as text: SVG names the font, PDF has it
    with matplotlib.rc_context({"svg.hashsalt": "multimax", "svg.fonttype": "none", "pdf.fonttype": 42}):
        figure.savefig(file, format=format, metadata=dates.get(format), dpi=dpi)


def runs_by_label(runs: object, of: str) -> dict[str, Any]:
    """What is compared: something by label, at least one."""
    if not isinstance(runs, Mapping):
        raise TypeError(
            f"multimax: expected {of} by label, such as {{'softmax': ..., 'MultiMax': ...}}, got {type(runs).__name__}"
        )
    if not runs:
        raise ValueError(f"multimax: expected {of} by label, got none")
    return {str(label): run for label, run in runs.items()}


def numbers(name: str, values: object, *, finite: bool = False) -> Tensor:
    """Numbers of any shape in float64, from a tensor, an array or a list."""
    if isinstance(values, Sequence) and any(isinstance(value, Tensor) for value in values):
        values = [value.tolist() if isinstance(value, Tensor) else value for value in values]
    try:
        found = torch.as_tensor(values, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"multimax: expected {name} to be numbers, got {type(values).__name__}: {error}") from None
    if finite and not found.isfinite().all():
        raise ValueError(f"multimax: expected {name} to be finite, got NaN or infinity among them")
    return found


def interval(low: object, high: object) -> tuple[float, float]:
    """The range of a figure."""
    first, last = numbers("low and high", [low, high], finite=True).tolist()
    if not 0 < last - first < math.inf:
        raise ValueError(f"multimax: expected low < high, got {low} and {high}")
    return first, last
