"""The tables in the documents, from the numbers of the runs in docs/results.

``python tools/results_tables.py`` puts them there. A place for one is a comment with arguments of ``multimax table``:

    <!-- table recipe/confirm-text --metrics loss perplexity -->      and what is to know of it below
    <!-- rows recipe/confirm-text --metrics loss -->                  the table alone
    <!-- parameters digits "MultiMax both" -->                        what this method has learned
    <!-- end -->
"""

import argparse
import re
import shlex
from pathlib import Path

from multimax.experiments import results, table

FOLDER = Path(__file__).parents[1] / "docs"
PAGES = (FOLDER / "results.md",)
PLACE = re.compile(r"(<!-- (table|rows|parameters) (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def arguments(text: str) -> argparse.Namespace:
    """Those of a place: the name of a file in docs/results, and what to show of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("label", nargs="?")
    parser.add_argument("--metrics", nargs="+")
    parser.add_argument("--baseline")
    return parser.parse_args(shlex.split(text))


def made(match: re.Match[str]) -> str:
    """A place with what belongs there."""
    begin, kind, given, _, end = match.groups()
    options = arguments(given)
    sweep = results.read(FOLDER / "results" / f"{options.name}.json")
    if kind == "parameters":
        text = table.parameters_markdown(sweep, options.label)
    else:
        text = table.markdown(sweep, options.metrics, options.baseline)
    if kind == "rows":
        text = text.partition("\n\n")[0]
    return f"{begin}{text}\n{end}"


def shown() -> set[str]:
    """The names of all files that the pages show."""
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    return {arguments(match[3]).name for text in texts for match in PLACE.finditer(text)}


def anew(page: Path) -> str:
    """A page with its tables made anew from the saved results."""
    return PLACE.sub(made, page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    for file in PAGES:
        file.write_text(anew(file), encoding="utf-8")
