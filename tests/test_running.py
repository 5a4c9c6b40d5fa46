"""How tests and benchmarks are started: on a machine whose bfloat16 products die, they live."""

import argparse
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from multimax.ops import probe
from places import ROOT
from sharing import TOGETHER

DIES = "sh -c 'kill -ILL $$'"
INSIDE = """
import os
import torch

def test_inside():
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_FP16"
    product = torch.ones(64, 64).bfloat16() @ torch.ones(64, 64).bfloat16()
    assert product.unique().tolist() == [64]
    assert torch.get_num_threads() == 1
"""


def test_tests_where_products_die(tmp_path: Path) -> None:
    inside = tmp_path / "test_inside.py"
    inside.write_text(INSIDE)
    inherited = ("PYTEST_XDIST", "OMP_NUM_THREADS", probe.VARIABLE)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(inherited)}
    # a test below tests/ has to be named, else conftest.py is not loaded
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", "-c", "pyproject.toml"]
    command += [str(inside), "tests/ops/test_probe.py", "-k", "inside or sigill"]
    variables |= {probe.COMMAND_VARIABLE: DIES}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert (
        "bf16 products: die with SIGILL here; these tests run with ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16" in done.stdout
    )
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def test_files_that_make_something_once_stay_together() -> None:
    files = {path.name: path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    once = re.compile(r'^@pytest.fixture\(scope="(module|class|session)"|^from browser import ', re.MULTILINE)
    assert sorted(name for name, text in files.items() if once.search(text)) == sorted(TOGETHER)


@pytest.mark.parametrize(("command", "limit"), [(DIES, probe.LIMIT), ("true", None)])
def test_benchmarks_where_products_die(
    command: str, limit: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    measuring = importlib.import_module("measuring")
    monkeypatch.setattr(os, "environ", {**os.environ, probe.COMMAND_VARIABLE: command})  # a copy: nothing stays
    os.environ.pop(probe.VARIABLE, None)
    assert measuring.begin(argparse.Namespace(table=None, threads=None))
    assert os.environ.get(probe.VARIABLE) == limit == measuring.machine()["onednn_max_cpu_isa"]
    said = capsys.readouterr().out
    assert said == (f"bf16 products: die with SIGILL here; measured with {probe.VARIABLE}={limit}\n" if limit else "")
