"""Conversion of timm's models: the tests in timm_tests.py, run in a process of their own (see timm_environment.py)."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

import timm_environment
from places import ROOT

INSIDE = Path(__file__).parent / "timm_tests.py"
NAMES = re.findall(r"^def (test_\w+)", INSIDE.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What went wrong in each test that ran, by its name."""
    if not timm_environment.FOLDER.is_dir():
        missing = f"no timm in {timm_environment.FOLDER.name}/ of the virtual environment; make test puts it there"
        if os.environ.get("MULTIMAX_TEST_EXTRAS"):
            pytest.fail(missing)
        pytest.skip(missing)
    report = tmp_path_factory.mktemp("timm") / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "timm_environment"]
    command += [f"--junitxml={report}", str(INSIDE)]
    path = os.pathsep.join(filter(None, [str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH")]))
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, timeout=900)
    if not report.exists():
        pytest.fail(f"pytest came to no end, with code {run.returncode}:\n{run.stdout}\n{run.stderr}")
    found: dict[str, list[str]] = {}
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        failures = found.setdefault(case.get("name", "").partition("[")[0], [])
        failures += [f"{case.get('name')}: {p.get('message')}\n{p.text}" for p in case if p.tag in ("failure", "error")]
    if run.returncode and not any(found[name] for name in found if name in NAMES):
        pytest.fail(f"pytest failed beside the tests, with code {run.returncode}:\n{run.stdout}\n{run.stderr}")
    return found


@pytest.mark.parametrize("name", NAMES)
def test_timm(results: dict[str, list[str]], name: str) -> None:
    assert name in results, "did not run"
    assert not results[name], "\n".join(results[name])


def test_this_process_has_no_timm() -> None:
    assert "timm" not in sys.modules
    assert "torchvision" not in sys.modules
