"""The package as text: the rules of tests/architecture read it and import nothing."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from places import ROOT

PACKAGE = ROOT / "src" / "multimax"
CORE = ("ops", "reweighting", "nn", "metrics", "training")  # rooms of the core


def sources(package: Path = PACKAGE) -> dict[str, str]:
    """The text of every file, by its path below the package."""
    return {str(path.relative_to(package)): path.read_text("utf-8") for path in sorted(package.rglob("*.py"))}


def room(path: str) -> str:
    """The first part of a file's path: a room, or a file of the top level without its ending."""
    return path.split("/")[0].removesuffix(".py")


def imports(files: Mapping[str, str]) -> Iterator[tuple[str, int, str]]:
    """Every import of one file by another, wherever it stands: the importing file, the line, the imported file.

    What is imported from a package is the submodule of that name, or the package's ``__init__.py`` where there is none.
    """
    by_module = {_module(path): path for path in files}
    for path, text in files.items():
        package = _module(path).split(".")
        if not path.endswith("__init__.py"):
            package.pop()
        for node in ast.walk(ast.parse(text, path)):
            if isinstance(node, ast.Import):
                wanted = [(alias.name, "") for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) + 1 - node.level] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                wanted = [(base, alias.name) for alias in node.names]
            else:
                continue
            for base, name in wanted:
                found = by_module.get(f"{base}.{name}") or by_module.get(base)
                if found and found != path:
                    yield path, node.lineno, found


def nothing(found: list[str]) -> None:
    """A rule found nothing, or all of it is listed."""
    assert not found, "\n".join(["", *found])


def _module(path: str) -> str:
    parts = ("multimax", *path.removesuffix(".py").split("/"))
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
