"""`multimax env`."""

import pytest
import torch

from multimax import cli


@pytest.mark.parametrize(
    ("probe", "line"),
    [
        ("true", "bf16 products: work"),
        ("sh -c 'kill -ILL $$'", "bf16 products: die with SIGILL; set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"),
        ("sh -c 'echo no torch here >&2; exit 1'", "bf16 products: fail: no torch here"),
    ],
)
def test_env_says_what_an_error_report_needs(
    probe: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MULTIMAX_PROBE_COMMAND", probe)
    assert cli.main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"torch:        {torch.__version__}" in lines
    assert lines[-1] == line
