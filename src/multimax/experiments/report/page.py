"""The page of a report: HTML that needs nothing from outside."""

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

MARK = "<!-- multimax report -->"
STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --soft: #555; --line: #d0d0d0; --head: #f3f5f7; --link: #0059a3;
  --paper: #fff; --warn: #8a3b00; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e7e7e7; --soft: #b4b4b4; --line: #444; --head: #242424; --link: #8cc4ff; --paper: #141414;
    --warn: #ffb27d; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; } h2 { font-size: 1.3rem; margin: 2.2rem 0 .5rem; }
h3 { font-size: 1.05rem; margin: 1.8rem 0 .4rem; }
p, li { max-width: 46rem; } a { color: var(--link); }
nav ul { columns: 2; padding-left: 1.2rem; } nav li { break-inside: avoid; }
.wide { overflow-x: auto; margin: .5rem 0; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
caption { text-align: left; color: var(--soft); padding: .2rem 0; }
th, td { border: 1px solid var(--line); padding: .25rem .55rem; text-align: left; vertical-align: top; }
thead th { background: var(--head); } tbody th { font-weight: 600; background: var(--paper); }
.settings td, .settings thead th { overflow-wrap: anywhere; }
.few { color: var(--warn); white-space: nowrap; }
figure { margin: 1.5rem 0; break-inside: avoid; } figure img { max-width: 100%; height: auto; display: block; }
figcaption { color: var(--soft); font-size: .9rem; max-width: 46rem; margin-top: .3rem; }
.notes { color: var(--soft); font-size: .9rem; }
code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: .9em; overflow-wrap: anywhere; }
@media screen and (max-width: 40rem) {
  body { padding: .8rem; } nav ul { columns: 1; }
  figure img { max-width: none; } /* small pictures of large figures cannot be read: they are moved sideways */
  table:not(.settings) tbody th { position: sticky; left: 0; } td { white-space: nowrap; }
  .settings td { white-space: normal; min-width: 8rem; } }
@media print { body { max-width: none; padding: 0; font-size: 10pt; } nav { display: none; }
  a { color: inherit; text-decoration: none; } h2, h3 { break-after: avoid; }
  .wide { overflow: visible; } table { font-size: 7.5pt; } tr { break-inside: avoid; }
  figure img { max-height: 20cm; } @page { margin: 1.5cm; } }
"""
FORMULA = (
    "<p>MultiMax is softmax of "
    "<i>&sigma;</i>(<i>x</i>) = <i>x</i> + &Sigma;<sub><i>n</i></sub> [(1 &minus; <i>t</i><sub>b,<i>n</i></sub>) "
    "max(<i>b<sub>n</sub></i> &minus; <i>x</i>, 0)<sup><i>n</i></sup> + (<i>t</i><sub>d,<i>n</i></sub> &minus; 1) "
    "max(<i>x</i> &minus; <i>d<sub>n</sub></i>, 0)<sup><i>n</i></sup>]. With all <i>t</i> = 1 it is softmax itself.</p>"
)


def symbol(name: str) -> str:
    """t_b1 and d2 as the paper has them; other names as they are."""
    found = re.fullmatch(r"(?:(t)_)?([bd])(\d+)", name)
    if found is None:
        return escape(name)
    if found[1]:
        return f"<i>t</i><sub>{found[2]}<sub>{found[3]}</sub></sub>"
    return f"<i>{found[2]}</i><sub>{found[3]}</sub>"


def _warned(cell: str) -> str:
    """A cell, with the warning of few seeds so that it is seen."""
    return re.sub(r"\(only \d+ seeds\)", r'<strong class="few">\g<0></strong>', escape(cell))


def table(rows: Sequence[Sequence[str]], caption: str = "", kind: str = "") -> str:
    """The first row is the head, the first cell of each the name of its row."""
    head, *body = rows
    lines = [f'<div class="wide" tabindex="0"><table{f" class={kind!r}" if kind else ""}>']
    if caption:
        lines.append(f"<caption>{escape(caption)}</caption>")
    lines.append("<thead><tr>" + "".join(f'<th scope="col">{symbol(cell)}</th>' for cell in head) + "</tr></thead>")
    lines.append("<tbody>")
    for first, *others in body:
        cells = "".join(f"<td>{_warned(cell)}</td>" for cell in others)
        lines.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
    lines.append("</tbody></table></div>")
    return "\n".join(lines)


def listed(texts: Iterable[str]) -> str:
    """Notes below a table."""
    items = "\n".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<ul class="notes">\n{items}\n</ul>' if items else ""


def figure(name: str, title: str, caption: str, words: str, svg: bytes) -> str:
    """A picture in the page itself; as an image of its own, so that its parts cannot be taken for another's.

    Args:
        name: its anchor.
        title: in words.
        caption: how to read it.
        words: what is to be seen in it.
        svg: the picture.
    """
    data = base64.b64encode(svg).decode()
    return (
        f'<figure id="{escape(name)}">\n<h3>{escape(title)}</h3>\n'
        f'<div class="wide" tabindex="0"><img alt="{escape(words)}" src="data:image/svg+xml;base64,{data}"></div>\n'
        f"<figcaption>{escape(caption)}</figcaption>\n</figure>"
    )


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Settings as words, parts by name and point."""
    found: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = str(value)
    return found


def settings_tables(settings: Mapping[str, Mapping[str, Any]]) -> str:
    """Settings in which the runs differ, then those that all have in common."""
    runs = {label: flat(values) for label, values in settings.items()}
    names = list(dict.fromkeys(name for values in runs.values() for name in values))
    differing = [name for name in names if len({values.get(name, "") for values in runs.values()}) > 1]
    text = ""
    if differing:
        rows = [
            ["setting", *runs],
            *([name, *(values.get(name, "") for values in runs.values())] for name in differing),
        ]
        text += table(rows, "in which they differ", "settings") + "\n"
    first = next(iter(runs.values()))
    shared = [
        [name, first[name]] for name in names if name not in differing and first.get(name, "") not in ("", "None")
    ]
    return text + table([["setting", "value"], *shared], "of all" if len(runs) > 1 else "", "settings")


class Part(NamedTuple):
    """A part of a section, for the table of contents."""

    anchor: str
    title: str


class Section(NamedTuple):
    """A section of the page: its anchor, its title, its HTML, and its parts."""

    anchor: str
    title: str
    html: str
    parts: Sequence[Part]


def page(title: str, sections: Sequence[Section], about: str) -> str:
    """The whole page.

    Args:
        title: its title.
        sections: in their order.
        about: what made it.
    """
    contents = []
    for section in sections:
        inner = "".join(f'<li><a href="#{escape(p.anchor)}">{escape(p.title)}</a></li>' for p in section.parts)
        contents.append(f'<p><a href="#{escape(section.anchor)}">{escape(section.title)}</a></p>\n<ul>{inner}</ul>')
    body = "\n".join(
        f'<section id="{escape(section.anchor)}">\n<h2>{escape(section.title)}</h2>\n{section.html}\n</section>'
        for section in sections
    )
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return f"""<!DOCTYPE html>
{MARK}
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p class="notes">{escape(about)}</p>
{FORMULA}
</header>
<nav aria-label="contents">
{chr(10).join(contents)}
</nav>
<main>
{body}
</main>
</body>
</html>
"""
