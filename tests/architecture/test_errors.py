"""Errors about arguments come from one place."""

import ast
from collections.abc import Mapping

import pytest

from source import CORE, nothing, room, sources

CHECKS = "ops/checks.py"
ERRORS = {"ValueError", "TypeError"}


def errors_elsewhere(files: Mapping[str, str]) -> list[str]:
    """Where the core makes a ValueError or TypeError outside ops/checks.py."""
    found = []
    for path, text in files.items():
        if room(path) in CORE and path != CHECKS:
            for node in ast.walk(ast.parse(text, path)):
                made = node.func if isinstance(node, ast.Call) else node.exc if isinstance(node, ast.Raise) else None
                if isinstance(made, ast.Name) and made.id in ERRORS:
                    found.append(f"{path}:{node.lineno} {made.id}")
    return found


def test_errors_about_arguments_come_from_checks() -> None:
    nothing(errors_elsewhere(sources()))


@pytest.mark.parametrize(
    "text",
    [
        "raise ValueError('no')",
        "raise TypeError",
        "raise ValueError('no') from error",
        "def f(x):\n    if x:\n        raise TypeError(f'{x}')",
        "error = ValueError('no')\nraise error",
    ],
)
@pytest.mark.parametrize("path", [f"{name}/file.py" for name in CORE])
def test_an_error_elsewhere_is_seen(path: str, text: str) -> None:
    (found,) = errors_elsewhere({path: text})
    assert found.startswith(f"{path}:")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (CHECKS, "raise ValueError('no')"),
        ("convert/timm.py", "raise ValueError('no')"),
        ("ops/rows/api.py", "raise RuntimeError('no')"),
        ("ops/rows/api.py", "raise NotImplementedError"),
        ("ops/rows/api.py", "try:\n    f()\nexcept (TypeError, ValueError):\n    raise"),
    ],
)
def test_other_errors_are_allowed(path: str, text: str) -> None:
    assert errors_elsewhere({path: text}) == []
