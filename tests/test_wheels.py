"""What tools/wheel_test.py decides without installing anything."""

import re
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
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


def test_the_workflow_tries_what_is_supported() -> None:
    """Every Python and every torch of the table, with tools and targets that are there."""
    text = (ROOT / ".github" / "workflows" / "wheels.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    matrix = jobs["test"]["strategy"]["matrix"]
    assert (matrix["python"], matrix["torch"]) == (list(wheel_test.PYTHONS), list(wheel_test.TORCHES))
    assert matrix["exclude"] == [{"python": "3.10", "torch": "2.15"}]
    machines = {build["machine"] for build in jobs["build"]["strategy"]["matrix"]["include"]}
    assert {*matrix["machine"], *(further["machine"] for further in matrix["include"])} == machines
    assert jobs["test"]["needs"] == "build"
    commands = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    for tool in re.findall(r"tools/\w+\.py", "\n".join(commands)):
        assert (ROOT / tool).is_file(), tool
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = {target for command in commands for target in re.findall(r"\bmake ([\w-]+)", command)}
    assert {"wheel", "selftest", "selftest-clang", "selftest-arm"} <= asked <= targets


def test_the_project_says_what_is_true() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    lowest = re.search(r'"torch>=(\d+\.\d+)"', text)
    assert lowest is not None
    assert lowest[1] == wheel_test.TORCHES[0]
    assert f'requires-python = ">={wheel_test.PYTHONS[0]}"' in text
    assert 'readme = "README.md"' in text  # the long description
    for system in ("POSIX :: Linux", "MacOS"):  # those that setup.py builds kernels on
        assert f'"Operating System :: {system}"' in text
    assert (ROOT / "src" / "multimax" / "py.typed").is_file()
    assert '"Typing :: Typed"' in text
