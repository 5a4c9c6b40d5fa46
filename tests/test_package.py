"""The package as users meet it: names, imports, documentation, wheels."""

import doctest
import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import convert_table
import multimax
from machine import needs_kernels
from multimax.ops import kernels
from places import ROOT

PACKAGE = Path(multimax.__file__).parent


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env={**os.environ, **variables}, check=False
    )


def test_public_names() -> None:
    assert multimax.__all__ == [
        "LinearMultiMaxCrossEntropyLoss",
        "LossStats",
        "Monitor",
        "MultiMax",
        "MultiMaxCategorical",
        "MultiMaxCrossEntropyLoss",
        "MultiMaxHead",
        "MultiheadAttention",
        "__version__",
        "clip_grad_norm_",
        "convert_",
        "count",
        "from_paper",
        "from_pretrained",
        "from_published",
        "gumbel_multimax",
        "implementation",
        "linear_multimax_cross_entropy",
        "load_adapter",
        "log_multimax",
        "merge_attention",
        "metrics",
        "modulate",
        "multimax",
        "multimax_attention",
        "multimax_attention_varlen",
        "multimax_cross_entropy",
        "oversmoothing",
        "param_groups",
        "presets",
        "revert_",
        "reweighting",
        "reweighting_parameters",
        "to_paper",
        "train_only_reweighting_",
    ]
    assert all(hasattr(multimax, name) for name in multimax.__all__)
    assert multimax.MultiMaxCallback.__name__ == "MultiMaxCallback"  # not among them: it needs transformers


def test_import_pulls_in_nothing_optional() -> None:
    code = "import torch, sys; before = set(sys.modules); import multimax; print(*(set(sys.modules) - before))"
    modules = run("-c", code).stdout.split()
    assert "multimax" in modules
    optional = ("triton", "transformers", "timm", "matplotlib", "sklearn", "numpy", "tqdm", "hypothesis")
    assert not [name for name in modules if name.split(".")[0] in optional]


@pytest.mark.parametrize("module", [found.name for found in pkgutil.walk_packages(multimax.__path__, "multimax.")])
def test_docstring_examples(module: str) -> None:
    if module == "multimax.ops._kernels":
        pytest.skip("not a Python module")
    if ".triton" in module or module == "multimax.ops.jit":
        pytest.importorskip("triton")
    failures, _ = doctest.testmod(importlib.import_module(module))
    assert failures == 0


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name
)
def test_documentation_snippets_run(path: Path) -> None:
    names: dict[str, object] = {}
    for number, block in enumerate(python_blocks(path)):
        if ">>>" not in block:
            exec(compile(block, str(path), "exec"), names)
            continue
        test = doctest.DocTestParser().get_doctest(block, names, f"{path.name} {number}", str(path), 0)
        runner = doctest.DocTestRunner()
        runner.run(test, clear_globs=False)
        names.update(test.globs)
        assert runner.summarize(verbose=False).failed == 0
    assert path.name != "README.md" or names


@pytest.mark.parametrize(
    "path",
    [path for path in sorted((ROOT / "examples").glob("*.py")) if path.name != "convert_timm.py"],
    ids=lambda path: path.name,
)
def test_examples_run(path: Path) -> None:
    result = run(str(path), "--steps", "3")
    assert result.returncode == 0, result.stderr
    assert re.search(r"^multimax: +loss [+-]?\d", result.stdout, re.MULTILINE)
    told = run(str(path), "--help", COLUMNS="80").stdout
    assert "--steps" in told
    assert max(map(len, told.splitlines())) <= 80


def test_the_table_of_conversions_is_that_of_the_tests() -> None:
    def without_versions(text: str) -> list[str]:
        lines = text.strip().splitlines()
        return [line.rpartition(" | ")[0] if line.startswith("| ") else line for line in lines]

    saved = (ROOT / "docs" / "convert.md").read_text().partition("<!-- table -->")[2].partition("<!-- /table -->")[0]
    assert without_versions(saved) == without_versions(convert_table.table()), "run python tools/convert_table.py"


@needs_kernels
def test_instruction_set_by_environment() -> None:
    code = "from multimax.ops import kernels; print(kernels.use_isa())"
    assert run("-c", code, MULTIMAX_ISA="baseline").stdout.strip() == "baseline"
    failed = run("-c", code, MULTIMAX_ISA="mmx")
    assert failed.returncode != 0
    assert (
        "multimax: expected an instruction set out of baseline, avx2, avx512, avx512_bf16, got 'mmx'" in failed.stderr
    )


@needs_kernels
def test_kernels_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    # a build for one machine alone, on a machine without its instructions
    monkeypatch.setattr(torch.ops.multimax, "use_isa", lambda isa: -1)
    assert "built for another machine's instructions; build them again" in (kernels._load() or "")


TRY = """
import warnings, torch, multimax
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    x = torch.randn(3, 5, requires_grad=True)
    layer = multimax.MultiMax()
    for _ in range(2):
        layer(x).square().sum().backward()
        multimax.log_multimax(x, layer.coefs, layer.knots)
        multimax.modulate(x, layer.coefs, layer.knots)
print(len(caught), caught[0].message, layer.coefs.grad.isfinite().all().item(), multimax.__file__)
"""


def copy_package(to: Path) -> None:
    shutil.copytree(PACKAGE, to, ignore=shutil.ignore_patterns("*.so", "__pycache__"))


def test_broken_library_is_not_called_missing(tmp_path: Path) -> None:
    copy_package(tmp_path / "multimax")
    (tmp_path / "multimax" / "ops" / "_kernels.abi3.so").write_bytes(b"not a library")
    result = run("-c", TRY, PYTHONPATH=str(tmp_path))
    assert result.stdout.startswith("1 multimax: using slower plain PyTorch, because the CPU kernels were built but")
    assert "file too short" in result.stdout or "invalid ELF" in result.stdout


def test_wheel_without_torch_is_pure_and_works(tmp_path: Path) -> None:
    """Built where torch cannot be imported, then used where it can."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__"))
    shutil.copytree(ROOT / "csrc", source / "csrc")
    (tmp_path / "hidden" / "torch").mkdir(parents=True)
    (tmp_path / "hidden" / "torch" / "__init__.py").write_text("raise ImportError('hidden')\n")
    built = run(
        *("-m", "pip", "wheel", "--verbose", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)),
        str(source),
        PYTHONPATH=str(tmp_path / "hidden"),
    )
    assert built.returncode == 0, built.stderr
    assert "multimax: torch is not importable here, so the wheel has no CPU kernels" in built.stdout + built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    there = {path.relative_to(PACKAGE).as_posix() for end in ("json", "html") for path in PACKAGE.rglob(f"*.{end}")}
    assert there
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        assert {f"multimax/{name}" for name in there} <= set(archive.namelist())
        archive.extractall(site)
    result = run("-c", TRY, PYTHONPATH=str(site))
    assert result.stdout.startswith("1 multimax: using slower plain PyTorch, because the CPU kernels were not built;")
    assert "pip install --no-build-isolation ." in result.stdout
    assert f"True {site}" in result.stdout
