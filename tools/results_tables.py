"""The tables of docs/results.md, from the numbers of the runs in docs/results.

``python tools/results_tables.py`` puts them there.
"""

import re
from pathlib import Path

from multimax.experiments import results, table

FOLDER = Path(__file__).parents[1] / "docs"
PAGE = FOLDER / "results.md"
PLACE = re.compile(r"(<!-- (table|parameters) (\S+?)(?: \"(.+?)\")? -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def made(match: re.Match[str]) -> str:
    """A place with what belongs there: the table of a sweep, or what one of its methods has learned."""
    begin, kind, name, label, _, end = match.groups()
    sweep = results.read(FOLDER / "results" / f"{name}.json")
    text = table.markdown(sweep) if kind == "table" else table.parameters_markdown(sweep, label)
    return f"{begin}{text}\n{end}"


def page() -> str:
    """The page, with its tables made anew from the saved results."""
    return PLACE.sub(made, PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
