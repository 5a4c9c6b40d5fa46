"""`multimax check`: what passes, what is found, what the report says."""

import importlib.util
import io
import os
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import multimax
from machine import needs_kernels
from multimax import cli
from multimax.cli import check
from multimax.cli.checking import cases, compare, speed
from multimax.ops import dispatch, gpu
from multimax.ops.entmax import cpu as entmax_cpu
from multimax.ops.rows import cpu as rows_cpu

CPU = torch.device("cpu")
QUICK = ["check", "--device", "cpu", "--quick", "--no-speed"]


@pytest.fixture(autouse=True)
def one_thread(same_start: None) -> None:
    """Many small operations."""
    torch.set_num_threads(1)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest sizes, in two dtypes."""
    monkeypatch.setattr(cases, "QUICK", cases.TINY)
    monkeypatch.setattr(check, "DTYPES", (torch.float32, torch.bfloat16))
    monkeypatch.setattr(check, "_remedy", lambda device: None)  # conftest.py has done that


def lines_of(text: str, operation: str) -> list[str]:
    """The report's lines about an operation."""
    return [line for line in text.splitlines() if line.startswith(operation + " ")]


@needs_kernels
def test_everything_is_fine_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(QUICK) == 0
    said = capsys.readouterr()
    assert said.err == ""  # no bar where nobody watches
    assert f"{multimax.__version__}, torch {torch.__version__}" in said.out
    assert "auto takes:    attention cpu, loss cpu, entmax cpu, rows cpu" in said.out
    for operation in ("rows", "attention", "varlen", "loss", "linear loss", "entmax"):
        of_cpu = [line for line in lines_of(said.out, operation) if " cpu " in line]
        assert len(of_cpu) == (3 if operation in ("attention", "varlen") else 4), operation
        assert all(" yes " in line and " ok " in line for line in of_cpu)
    assert "cpu: attention in float64, varlen in float64: the attention kernels have no float64" in said.out
    assert "FAILED" not in said.out
    assert said.out.splitlines()[-1].startswith("ok, ")
    assert "speed" not in said.out


@needs_kernels
@pytest.mark.usefixtures("tiny")
def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = rows_cpu.run
    monkeypatch.setattr(rows_cpu, "run", lambda call: right(call._replace(x=2 * call.x.detach() - call.x)))
    assert cli.main([*QUICK, "--impl", "cpu"]) == 1
    out = capsys.readouterr().out
    assert all(" FAILED " in line for line in lines_of(out, "rows"))
    assert all(" ok " in line for line in lines_of(out, "attention"))
    assert "rows, cpu, float32, multimax, long rows: grad of x: expected a relative error of at most 3 times" in out
    assert "; furthest off at [" in out
    assert out.splitlines()[-1].startswith("FAILED, ")


@needs_kernels
@pytest.mark.usefixtures("tiny")
def test_a_crash_is_a_failed_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def crash(call: Any) -> None:
        raise RuntimeError("no such instruction\nand a long story")

    monkeypatch.setattr(entmax_cpu, "run", crash)
    assert cli.main([*QUICK, "--impl", "cpu"]) == 1
    out = capsys.readouterr().out
    assert all(" FAILED " in line for line in lines_of(out, "entmax"))
    assert "entmax, cpu, float32, sparsemax, last dim: RuntimeError: no such instruction\n" in out
    assert "entmax, cpu, float32: and " in out
    assert "long story" not in out
    assert all(" ok " in line for line in lines_of(out, "rows"))


@needs_kernels
@pytest.mark.usefixtures("tiny")
def test_other_bits_the_second_time_are_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right, calls = rows_cpu.run, []

    def unsteady(call: Any) -> torch.Tensor:
        calls.append(call)
        weights: torch.Tensor = right(call)
        return weights * (1 + len(calls) % 2 * torch.finfo(weights.dtype).eps / 2 ** (weights.dtype == torch.float32))

    monkeypatch.setattr(rows_cpu, "run", unsteady)
    assert cli.main([*QUICK, "--impl", "cpu"]) == 1
    out = capsys.readouterr().out
    assert any(" no " in line and " FAILED " in line for line in lines_of(out, "rows"))
    assert "expected the same call to give the same bits, got others" in out


@pytest.mark.usefixtures("tiny")
def test_kernels_whose_first_use_failed_have_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key, why = ("rows", "cpu", torch.float32), "the Triton kernels of rows give a wrong x"
    monkeypatch.setitem(gpu._checked, key, why)
    reference = dispatch.load("rows")["reference"]
    fake = SimpleNamespace(why_not=lambda call: gpu._checked[key], run=reference.run)
    monkeypatch.setitem(dispatch.load("rows"), "triton", fake)
    assert cli.main([*QUICK, "--impl", "triton"]) == 1
    out = capsys.readouterr().out
    assert f"rows, triton, float32, multimax, last dim: {why}" in out
    first, second = (line for line in lines_of(out, "rows") if "triton" in line)
    assert " FAILED " in first  # and yet all others are judged
    assert " of " in first
    assert " ok " in second


@pytest.mark.usefixtures("tiny")
def test_the_reference_and_auto_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for impl in ("reference", "auto"):
        assert cli.main([*QUICK, "--impl", impl]) == 0
        out = capsys.readouterr().out
        assert all(f" {impl} " in line for line in lines_of(out, "attention"))
        assert "not run" not in out


@pytest.mark.usefixtures("tiny")
def test_nothing_checked_is_a_failure(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for room in dispatch.TABLE:
        monkeypatch.setitem(dispatch.TABLE, room, {"reference": dispatch.TABLE[room]["reference"]})
    assert cli.main([*QUICK, "--impl", "triton"]) == 1
    out = capsys.readouterr().out
    assert "FAILED: nothing was checked" in out
    assert "there is no such implementation of this operation" in out


def test_results_of_another_kind_are_told() -> None:
    case = cases.cases(cases.TINY)[0]
    for change, told in (
        (lambda t: t.double(), r"expected \(3, 3, 37\) in torch.float32, got \(3, 3, 37\) in torch.float64"),
        (lambda t: t[:1], r"expected \(3, 3, 37\) in torch.float32, got \(1, 3, 37\) in torch.float32"),
        (lambda t: t / 0, "expected 0 NaN and 0 infinities among 333, got 0 NaN and 333 infinities"),
    ):
        changed = case._replace(
            run=lambda values, options, impl, change=change: {"weights": change(case.plain(values, options)["weights"])}
        )
        (outcome,) = compare.compare(changed, torch.float32, ["auto"], compare.place(CPU), 1)
        assert outcome.failure is not None
        assert outcome.failure.startswith("weights: ")
        assert re.search(told, outcome.failure)


@needs_kernels
@pytest.mark.usefixtures("tiny")
def test_speed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "DTYPES", (torch.float32,))
    monkeypatch.setattr(speed, "ON_CPU", speed.Sizes([(1, 2, 16, 8)], [(4, 16)], [(4, 16)]))
    monkeypatch.setattr(speed, "SECONDS", 0.0)
    assert cli.main([*QUICK[:-1], "--impl", "cpu"]) == 0
    out = capsys.readouterr().out
    table = out[out.index("times of impl='cpu'") :].splitlines()
    assert table[1].split() == ["speed", "ms", "torch", "ratio"]
    rows = table[2 : table.index("", 2)]
    assert len(rows) == speed.count(speed.ON_CPU, CPU) == 16
    assert all(row.endswith("x") and " - " not in row for row in rows)
    assert "attention bf16 (1, 2, 16, 8) causal fwd+bwd" in out


def test_what_does_not_work_has_no_time() -> None:
    def broken() -> None:
        raise RuntimeError("no")

    row = speed._row("attention", {speed.OURS: lambda: None, speed.TORCH: broken, speed.FLEX: broken}, CPU, True)
    assert row.ms[speed.TORCH] is None
    cells = speed.table([row])[1].split()
    assert cells[0] == "attention"
    assert cells[2:] == ["-", "-", "-", "-"]


def test_sigma_of_flex_attention_is_the_modulator() -> None:
    coefs, knots = (t.detach() for t in speed.parameters(CPU))
    x = torch.randn(50) * 3
    torch.testing.assert_close(speed._sigma(coefs, knots)(x), multimax.modulate(x, coefs, knots))


def test_progress_for_those_who_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert list(check._progress(range(30), 30, "comparing")) == list(range(30))
    assert terminal.getvalue() == "comparing: 0 of 30\ncomparing: 20 of 30\n"
    monkeypatch.delitem(sys.modules, "tqdm")
    assert list(check._progress(range(30), 30, "comparing")) == list(range(30))
    assert "comparing: " in terminal.getvalue()
    assert "30 [" in terminal.getvalue()  # a bar


def test_mistakes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--device", "abacus"]) == 1
    assert capsys.readouterr().err.startswith("multimax: expected a device that torch can use, got 'abacus' (Runtime")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["check", "--interpret"]) == 1
    assert "got none; pip install triton" in capsys.readouterr().err


def test_interpreted() -> None:
    pytest.importorskip("triton")
    # the interpreter needs most of its time for attention, and tests/ops has that at length
    code = (
        "import sys; from multimax import cli; from multimax.cli.checking import cases\n"
        "every = cases.cases\n"
        "cases.cases = lambda sizes: every(sizes)[::6]\n"
        "sys.exit(cli.main(['check', '--interpret', '--device', 'cpu']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1", "MULTIMAX_IMPL": "triton"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "kernels:       by Triton's interpreter, with tiny sizes" in done.stdout
    assert any(" triton " in line and " ok " in line for line in lines_of(done.stdout, "rows"))
    assert "speed" not in done.stdout


def test_interpreting_starts_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    seen: list[Any] = []

    def run(command: list[str], env: dict[str, str], check: bool) -> Any:
        seen.append((command, env))
        return SimpleNamespace(returncode=3)

    monkeypatch.setattr(subprocess, "run", run)
    assert cli.main(["check", "--interpret"]) == 3
    ((command, env),) = seen
    assert command[:4] == [sys.executable, "-m", "multimax", "check"]
    assert env["TRITON_INTERPRET"] == "1"
    assert env["MULTIMAX_IMPL"] == "triton"
