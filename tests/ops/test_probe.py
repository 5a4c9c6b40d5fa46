"""The probe for torch's bfloat16 products."""

import subprocess
import sys

import pytest

from multimax.ops import probe


def test_products_that_work_need_no_remedy() -> None:
    found = probe.bfloat16_products([sys.executable, "-c", ""])
    assert (found.outcome, found.remedy, str(found)) == ("work", {}, "work")


def test_products_that_die_with_sigill_name_the_remedy() -> None:
    found = probe.bfloat16_products(["sh", "-c", "kill -ILL $$"])
    assert (found.outcome, found.remedy) == ("die", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"})
    assert str(found) == "die with SIGILL; set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ([sys.executable, "-c", "raise OSError('no torch here')"], "OSError: no torch here"),
        (["sh", "-c", "exit 3"], "exit code 3"),
        (["sh", "-c", "kill -SEGV $$"], "exit code -11"),
        (["no-such-program"], "No such file or directory: 'no-such-program'"),
    ],
)
def test_another_failure_keeps_its_error_and_has_no_remedy(command: list[str], error: str) -> None:
    found = probe.bfloat16_products(command)
    assert (found.outcome, found.remedy) == ("fail", {})
    assert found.error.endswith(error)
    assert str(found) == f"fail: {found.error}"


def test_a_child_that_hangs_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "SECONDS", 0.1)
    assert "timed out" in probe.bfloat16_products(["sleep", "60"]).error


def test_the_environment_replaces_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIMAX_PROBE_COMMAND", "sh -c 'kill -ILL $$'")
    assert probe.bfloat16_products().outcome == "die"


def test_a_product_is_tried_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def run(command: list[str], **_: object) -> object:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.delenv("MULTIMAX_PROBE_COMMAND", raising=False)
    monkeypatch.setattr(subprocess, "run", run)
    assert probe.bfloat16_products().outcome == "work"
    assert commands == [(sys.executable, "-c", probe.PRODUCT)]


def test_the_real_product_ends_in_one_of_the_ways_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MULTIMAX_PROBE_COMMAND", raising=False)
    assert probe.bfloat16_products().outcome in ("work", "die")


def test_the_file_needs_no_package() -> None:
    code = f"import runpy, sys; runpy.run_path({probe.__file__!r}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
