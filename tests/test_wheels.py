"""What tools/wheel_test.py decides without installing anything."""

import re
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import wheel_test
from places import ROOT


def test_classifiers_name_the_pythons_that_are_tried() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert tuple(re.findall(r"Python :: (3\.\d+)\"", text)) == wheel_test.PYTHONS


def test_this_interpreter_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    version = "{}.{}".format(*sys.version_info[:2])
    (tmp_path / f"python{version}").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert wheel_test.interpreter(version) is not None
    assert wheel_test.interpreter("3.1") is None


def test_requirements_of_torch(tmp_path: Path) -> None:
    wheel = tmp_path / "torch.whl"
    lines = [
        "Metadata-Version: 2.1",
        "Requires-Dist: sympy>=1.13",
        'Requires-Dist: cuda-toolkit[cublas,cusolver,nvtx]==13.2; platform_system == "Linux"',
        'Requires-Dist: nvidia-nvtx-cu12==12.8; platform_system == "Linux"',
        'Requires-Dist: triton~=3.9; platform_system == "Linux"',
        'Requires-Dist: setuptools; python_version < "3.12"',
        'Requires-Dist: optree; extra == "optree"',
    ]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("torch-2.0.dist-info/METADATA", "\n".join(lines))
    found = [str(r) for r in wheel_test.requirements(wheel, "3.12") if wheel_test.loaded(r)]
    assert found == ["sympy>=1.13", str(Requirement("cuda-toolkit[cublas]==13.2"))]


def test_table_hides_nothing() -> None:
    results = {
        "torch 2.10, Python 3.10": {"result": "passed", "torch": "2.10.0+cu128", "compile": "passed"},
        "torch 2.10, Python 3.11": {"result": "passed", "torch": "2.10.0+cu128", "compile": "no compiler"},
        "torch 2.11, Python 3.10": {"result": "no such build"},
    }
    assert wheel_test.table(results, ["2.10", "2.11"], ["3.10", "3.11"]).splitlines()[2:] == [
        "| 2.10 | 2.10.0+cu128: passed | 2.10.0+cu128: passed, no compiler |",
        "| 2.11 | no such build | not tried |",
    ]
