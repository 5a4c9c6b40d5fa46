"""The tools that look for what tests do not, each for a short while: tools/fuzz, tools/soak.py, tools/threads.cpp."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from machine import needs_kernels

ROOT = Path(__file__).parent.parent
FUZZ = ROOT / "tools" / "fuzz"


def run(*command: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, *map(str, command)]
    return subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)


@needs_kernels
@pytest.mark.parametrize("only", ["rows", "attention", "losses", "linear", "entmax"])
def test_nothing_differs(only: str, tmp_path: Path) -> None:
    done = run(FUZZ, "--cases", 100, "--only", only, "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "100 cases from seed 0 on: 0 failed" in done.stdout
    assert json.loads((tmp_path / "state.json").read_text())["next"] == 100


CASES = """
import os

def run(seed, only):
    if seed == 3:
        os.abort()
    if seed == 5:
        raise ValueError("an error")
    return f"case {seed}", ["output: wrong"] if seed == 4 else []
"""


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """The program with cases of which the fourth crashes, the fifth differs and the sixth raises."""
    shutil.copy(FUZZ / "__main__.py", tmp_path / "__main__.py")
    (tmp_path / "cases.py").write_text(CASES)
    return tmp_path


def test_failures_and_crashes_are_kept_with_their_seeds(planted: Path) -> None:
    done = run(planted, "--cases", 8, "--out", planted / "out")
    assert done.returncode == 1
    assert "8 cases from seed 0 on: 3 failed" in done.stdout
    failed: list[dict[str, Any]] = json.loads((planted / "out" / "state.json").read_text())["failed"]
    assert [failure["seed"] for failure in failed] == [3, 4, 5]
    assert "the process ended with -6" in failed[0]["differences"][0]
    assert failed[1] == {"seed": 4, "case": "case 4", "differences": ["output: wrong"]}
    assert failed[2]["differences"] == ["ValueError: an error"]
    again = run(planted, "--seed", 4)
    assert again.returncode == 1
    assert again.stdout == "seed 4: case 4\n    output: wrong\n"
    assert run(planted, "--seed", 2).stdout == "seed 2: case 2\n    nothing differed\n"


def test_a_run_goes_on_where_it_was(planted: Path) -> None:
    out = planted / "out"
    assert run(planted, "--cases", 3, "--out", out).returncode == 0
    done = run(planted, "--cases", 8, "--out", out)
    assert "going on at seed 3" in done.stderr
    assert "3 failed" in done.stdout
    other = run(planted, "--cases", 8, "--only", "rows", "--out", out)
    assert "is of another run" in other.stderr


def test_help_teaches() -> None:
    words = run(FUZZ, "--help").stdout
    for part in ("--seed 1234", "--only", "--out", "Ctrl-C", "child processes"):
        assert part in words


@needs_kernels
def test_the_oracle_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FUZZ))
    import cases  # type: ignore[import-not-found]

    import multimax
    from multimax.ops import kernels

    isa = kernels.use_isa()
    functions = {
        "rows": "multimax",
        "attention": "multimax_attention",
        "losses": "multimax_cross_entropy",
        "linear": "linear_multimax_cross_entropy",
    }
    for kind, name in functions.items():
        function = getattr(multimax, name)

        def wrong(*args: Any, function: Any = function, **options: Any) -> Any:
            result = function(*args, **options)
            return (result[0] * 1.1, *result[1:]) if isinstance(result, tuple) else result * 1.1

        with monkeypatch.context() as patched:
            patched.setattr(multimax, name, wrong)
            assert any(cases.run(seed, kind)[1] for seed in range(40)), name
    kernels.use_isa(isa)


@needs_kernels
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_flat() -> None:
    done = run(ROOT / "tools" / "soak.py", "--calls", 6000)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
def test_threads_under_their_sanitizer(tmp_path: Path) -> None:
    program = tmp_path / "threads"
    flags = [
        "-std=c++20",
        "-O1",
        "-g",
        "-Wno-psabi",
        "-fsanitize=thread",
        "-pthread",
        "-Icsrc",
        "-DMULTIMAX_ISA=baseline",
    ]
    sources = ["csrc/attention/attention.cpp", "tools/threads.cpp"]
    subprocess.run(["g++", *flags, *sources, "-o", str(program)], cwd=ROOT, check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": equal") == 8
    assert "WARNING" not in done.stderr
