"""Who may import whom. Imports inside functions and those for types alone count too."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from source import PACKAGE, imports, nothing, room, sources

# From the top down; a file may import from its own layer and from those below. `__init__` is the public face of what
# stands below it.
LAYERS = (
    "__main__",
    "cli",
    "experiments",
    "plots",
    "__init__",
    "convert",
    "training",
    "metrics",
    "nn",
    "reweighting",
    "ops",
)
IMPLEMENTATIONS = ("cpu", "triton")  # each a file or a folder in a room of ops/
ENTRIES = 12  # of the top level
# Inside of ops/, from the top down; the files beside these rooms are below all of them.
ROOMS = ("attention", "loss", "entmax", "rows")
MAY_USE = {"attention": {"rows"}, "loss": {"rows"}, "entmax": set(), "rows": set()}


def arrows_up(files: Mapping[str, str]) -> list[str]:
    return [
        f"{path}:{line} imports {target}, which is above it"
        for path, line, target in imports(files)
        if LAYERS.index(room(path)) > LAYERS.index(room(target))
    ]


def rooms_that_meet(files: Mapping[str, str]) -> list[str]:
    """Arrows between the rooms of ops/ that are not allowed, and those from what is below them."""
    found = []
    for path, line, target in imports(files):
        (layer, *here), (target_layer, *there) = path.split("/"), target.split("/")
        if layer != "ops" or target_layer != "ops" or len(there) < 2 or here[0] == there[0]:
            continue
        if there[0] in ROOMS and there[0] not in MAY_USE.get(here[0], set()):
            found.append(f"{path}:{line} imports {target}")
    return found


def rooms_without_a_layer(files: Mapping[str, str]) -> list[str]:
    return sorted({room(path) for path in files} - set(LAYERS))


def implementation(path: str) -> tuple[str, str] | None:
    """Room and name of the implementation that a file belongs to; the reference is one of them."""
    parts = path.removesuffix(".py").split("/")
    if len(parts) > 2 and parts[0] == "ops" and parts[2] in (*IMPLEMENTATIONS, "reference"):
        return parts[1], parts[2]
    return None


def implementations_that_meet(files: Mapping[str, str]) -> list[str]:
    """Only a reference may import another reference."""
    found = []
    for path, line, target in imports(files):
        here, there = implementation(path), implementation(target)
        if here and there and here != there and (here[1], there[1]) != ("reference", "reference"):
            found.append(f"{path}:{line} imports {target}, another implementation")
    return found


def cycles(files: Mapping[str, str]) -> list[str]:
    """Files that import each other over any number of others: one line for each knot."""
    targets: dict[str, set[str]] = {path: set() for path in files}
    for path, _, target in imports(files):
        targets[path].add(target)

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = targets[waiting.pop()] - seen
            seen |= new
            waiting += new
        return seen

    reach = {path: reached(path) for path in files}
    knots = {tuple(sorted(other for other in reach[path] if path in reach[other])) for path in files}
    return [" <-> ".join(knot) for knot in sorted(knots) if knot]


def too_many_entries(package: Path) -> list[str]:
    entries = sorted(path.name for path in package.iterdir() if path.name != "__pycache__")
    return entries if len(entries) > ENTRIES else []


def test_arrows_point_down() -> None:
    nothing(arrows_up(sources()))


def test_rooms_of_the_operations() -> None:
    nothing(rooms_that_meet(sources()))


def test_every_room_has_its_layer() -> None:
    nothing(rooms_without_a_layer(sources()))


def test_implementations_do_not_meet() -> None:
    nothing(implementations_that_meet(sources()))


def test_no_cycles() -> None:
    nothing(cycles(sources()))


def test_the_top_level_is_short() -> None:
    nothing(too_many_entries(PACKAGE))


LOW = "ops/rows/api.py"


@pytest.mark.parametrize(
    "text",
    [
        "from multimax.nn.output import MultiMaxHead",
        "from multimax.nn import output",
        "import multimax.nn.output",
        "import multimax.nn.output as output",
        "from ...nn import output",
        "from ...nn.output import MultiMaxHead",
        "from multimax import MultiMaxHead",
        "import multimax",
        "def f():\n    from multimax.nn.output import MultiMaxHead",
        "if TYPE_CHECKING:\n    from multimax.nn.output import MultiMaxHead",
    ],
)
def test_an_arrow_up_is_seen(text: str) -> None:
    files = {"__init__.py": "", "nn/__init__.py": "", "nn/output.py": "", "ops/rows/__init__.py": ""}
    (found,) = arrows_up({**files, LOW: text})
    assert found.startswith(LOW)


@pytest.mark.parametrize(
    ("path", "text", "met"),
    [
        ("ops/rows/api.py", "from multimax.ops.attention import api", True),
        ("ops/loss/chunks.py", "from multimax.ops.attention.api import x", True),
        ("ops/dispatch.py", "from multimax.ops.rows import cpu", True),
        ("ops/attention/reference.py", "from multimax.ops.rows import reference", False),
        ("ops/rows/api.py", "from multimax.ops import checks", False),
        ("nn/output.py", "from multimax.ops.rows import reference", False),
    ],
)
def test_rooms_that_meet_are_seen(path: str, text: str, met: bool) -> None:
    names = ("ops/checks.py", "ops/rows/cpu.py", "ops/rows/reference.py", "ops/attention/api.py")
    assert bool(rooms_that_meet({**dict.fromkeys(names, ""), path: text})) == met


def test_arrows_down_and_sideways_are_allowed() -> None:
    files = {
        "ops/checks.py": "import torch",
        LOW: "from multimax.ops import checks",
        "nn/output.py": "from ..ops import x",
    }
    assert arrows_up({**files, "plots/style.py": "import multimax", "__init__.py": "from multimax.nn import x"}) == []


def test_a_room_without_a_layer_is_seen() -> None:
    assert rooms_without_a_layer({"checks.py": "", "kitchen/stove.py": "", "nn/output.py": ""}) == ["checks", "kitchen"]


@pytest.mark.parametrize(
    ("path", "text", "met"),
    [
        ("ops/rows/cpu.py", "from multimax.ops.rows import triton", True),
        ("ops/rows/cpu.py", "from multimax.ops.rows.reference import multimax", True),
        ("ops/rows/reference.py", "from multimax.ops.rows.cpu import multimax", True),
        ("ops/rows/triton.py", "def f():\n    from multimax.ops.attention.cpu import forward", True),
        ("ops/attention/cpu.py", "from multimax.ops.rows.cpu import multimax", True),
        ("ops/attention/cpu/forward.py", "from multimax.ops.rows import cpu", True),
        ("ops/attention/cpu/forward.py", "from multimax.ops.attention.cpu import backward", False),
        ("ops/attention/reference.py", "from multimax.ops.rows.reference import multimax", False),
        ("ops/rows/api.py", "from multimax.ops.rows import cpu", False),
    ],
)
def test_implementations_that_meet_are_seen(path: str, text: str, met: bool) -> None:
    files = dict.fromkeys(
        ("ops/rows/cpu.py", "ops/rows/triton.py", "ops/rows/reference.py", "ops/attention/cpu.py"), ""
    )
    files["ops/attention/cpu/backward.py"] = ""
    assert bool(implementations_that_meet({**files, path: text})) == met


def test_a_cycle_is_seen() -> None:
    files = {"ops/a.py": "from multimax.ops import b", "ops/b.py": "def f():\n    from multimax.ops.c import x"}
    assert cycles({**files, "ops/c.py": "", "ops/d.py": "import multimax.ops.a"}) == []
    assert cycles({**files, "ops/c.py": "from . import a", "ops/d.py": ""}) == ["ops/a.py <-> ops/b.py <-> ops/c.py"]
    # through the package's own __init__.py
    files = {
        "convert/__init__.py": "from multimax.convert.a import f",
        "convert/a.py": "from multimax.convert import g",
    }
    assert cycles(files) == ["convert/__init__.py <-> convert/a.py"]


def test_too_many_entries_are_seen(tmp_path: Path) -> None:
    for i in range(ENTRIES):
        (tmp_path / f"room{i}").mkdir()
    (tmp_path / "__pycache__").mkdir()
    assert too_many_entries(tmp_path) == []
    (tmp_path / "helpers.py").touch()
    assert len(too_many_entries(tmp_path)) == ENTRIES + 1
