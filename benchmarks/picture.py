"""Bars as SVG, with text as text, on a ground of its own that follows the reader's light or dark setting."""

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, LEFT, RIGHT, TOP = 860, 370, 70, 64
BAR, GAP, BETWEEN = 13, 2, 11
# light and dark: ground, text, grid, the line at 1, and the series' colours (for all kinds of colour vision)
LIGHT = ("#ffffff", "#1f2328", "#d8dee4", "#1f2328", ("#0072b2", "#d55e00", "#009e73", "#cc79a7"))
DARK = ("#0d1117", "#e6edf3", "#30363d", "#e6edf3", ("#56b4e9", "#e69f00", "#3fb88f", "#e29ac4"))


def _style() -> str:
    """The two settings."""

    def rules(colours: tuple) -> str:
        ground, text, grid, one, series = colours
        found = f".ground{{fill:{ground}}}text{{fill:{text}}}.grid{{stroke:{grid}}}.one{{stroke:{one}}}"
        found += f".value{{stroke:{ground}}}"
        return found + "".join(f".s{n}{{fill:{colour}}}" for n, colour in enumerate(series))

    font = "text{font:13px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}.title{font-weight:600}"
    font += ".value{stroke-width:5px;paint-order:stroke}"  # a number beside the line at 1 keeps it off
    return f"{font}{rules(LIGHT)}@media(prefers-color-scheme:dark){{{rules(DARK)}}}"


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    css = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{css}>{escape(text)}</text>'


def bars(title: str, labels: Sequence[str], series: Mapping[str, Sequence[float | None]]) -> str:
    """Horizontal bars, one for each label and series, and a line at 1."""
    largest = max((value for values in series.values() for value in values if value is not None), default=1.0)
    end = max(1.25, (int(largest * 4) + 1) / 4)
    step = 0.25 if end <= 2.5 else 1.0
    per_unit = (WIDTH - LEFT - RIGHT) / end
    count = max(len(series), 1)
    each = count * (BAR + GAP) + BETWEEN
    bottom = TOP + len(labels) * each
    numbers = []
    parts = [_text(16, 24, title, kind="title")]
    x = 16.0
    for n, name in enumerate(series):
        parts.append(f'<rect class="s{n % 4}" x="{x:g}" y="36" width="12" height="12" rx="2"/>')
        parts.append(_text(x + 18, 47, name))
        x += 40 + 7.5 * len(name)
    for tick in (n * step for n in range(int(end / step) + 1)):
        at = LEFT + tick * per_unit
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(_text(round(at, 1), bottom + 18, f"{tick:g}x", "middle"))
    for position, label in enumerate(labels):
        y = TOP + position * each + BETWEEN / 2
        parts.append(_text(LEFT - 10, y + count * (BAR + GAP) / 2 + 4, label, "end"))
        for n, values in enumerate(series.values()):
            value = values[position]
            if value is None:
                continue
            width, top = value * per_unit, y + n * (BAR + GAP)
            parts.append(f'<rect class="s{n % 4}" x="{LEFT}" y="{top:g}" width="{width:.1f}" height="{BAR}" rx="2"/>')
            numbers.append(_text(round(LEFT + width + 6, 1), top + 11, f"{value:.2f}x", kind="value"))
    at = LEFT + per_unit
    parts.append(f'<line class="one" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}" stroke-width="2"/>')
    parts += numbers
    height = bottom + 30
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        f' role="img" aria-label="{escape(title)}">\n<style>{_style()}</style>\n'
        f'<rect class="ground" width="{WIDTH}" height="{height}" rx="8"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )
