"""The notebook of the documentation: run without Jupyter, and shown as Markdown.

python tools/site_notebook.py docs/start.ipynb    # runs it, and keeps what it prints
"""

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

Cell = dict[str, Any]


def read(path: Path) -> list[Cell]:
    """The cells of a notebook."""
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def printed(cell: Cell) -> str:
    """What is kept of a cell's output."""
    return "".join("".join(output["text"]) for output in cell.get("outputs", []))


def run(cells: list[Cell]) -> list[str]:
    """What each cell prints, with the value of its last line as Jupyter shows it; "" for text."""
    names: dict[str, Any] = {"__name__": "__main__"}
    found = []
    for number, cell in enumerate(cells):
        out = io.StringIO()
        if cell["cell_type"] == "code":
            tree = ast.parse("".join(cell["source"]), f"cell {number}")
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            with contextlib.redirect_stdout(out):
                exec(compile(tree, f"cell {number}", "exec"), names)
                if last is not None:
                    value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
                    if value is not None:
                        print(repr(value))
        found.append(out.getvalue())
    return found


def as_markdown(cells: list[Cell]) -> str:
    """A page: text as it is, code and what it prints in boxes."""
    parts = []
    for cell in cells:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        if text := printed(cell):
            parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def main(path: Path) -> None:
    """Runs a notebook and writes its outputs anew."""
    whole = json.loads(path.read_text(encoding="utf-8"))
    for cell, text in zip(whole["cells"], run(whole["cells"]), strict=True):
        if cell["cell_type"] == "code":
            stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
            cell["outputs"] = [stream] if text else []
    path.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
