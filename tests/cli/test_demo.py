"""`multimax demo`."""

import re
from pathlib import Path

import pytest

from multimax import cli
from multimax.experiments.demo import demo

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the Trainer uses


def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    few = {"num_train_epochs": 1, "eval_steps": 100}
    options = [("model", small), ("trainer", few), ("measured", 8)]
    text = demo(tmp_path / "demo", 2, options).text
    said = capsys.readouterr().err  # no terminal: no bar
    assert re.fullmatch(r"(\d of 4: (softmax|MultiMax), seed [01]: accuracy 0\.\d{4}\n){4}", said)
    assert "| softmax " in text
    assert "| MultiMax " in text
    assert "ms per step" in text
    assert "| layer 1 " in text
    assert "| output " in text
    assert "(only 2 seeds)" in text
    monkeypatch.setattr("multimax.experiments.demo.on_terminal", lambda: True)
    assert demo(tmp_path / "demo", 2, options).text == text  # nothing is trained again
    assert demo(tmp_path / "demo", 3, options).text != text
    assert "44/44" in capsys.readouterr().err  # 2 methods, 22 steps
    monkeypatch.setattr(
        "multimax.experiments.demo.demo", lambda folder, seeds, width: demo(folder, seeds, options, width)
    )
    assert cli.main(["demo", "--seeds", "3", "--out", str(tmp_path / "demo")]) == 0
    page = tmp_path / "demo" / "report.html"
    assert f"A page with all figures, for the browser: {page}\n" in capsys.readouterr().out
    assert "data:image/svg+xml" in page.read_text(encoding="utf-8")
    narrow = demo(tmp_path / "demo", 3, options, 80).text
    assert max(map(len, narrow.splitlines())) <= 80
    assert "|" not in narrow


def test_where_sigma_falls_is_one_line_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not a warning of Python's amid the bar."""
    monkeypatch.setattr("multimax.training.monitor.least_slope", lambda *_: (-1.0, 0.5))
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    options = [("model", small), ("trainer", {"max_steps": 2, "eval_steps": 100}), ("measured", 8), ("watch", 1)]
    monkeypatch.setattr(
        "multimax.experiments.demo.demo", lambda folder, seeds, width: demo(folder, seeds, options, width)
    )
    monkeypatch.setattr("multimax.experiments.report.report", lambda paths, out: out)
    assert cli.main(["demo", "--seeds", "2", "--out", str(tmp_path / "demo")]) == 0
    said = capsys.readouterr()
    assert "Warning" not in said.err
    lines = [line for line in said.out.splitlines() if "Sigma falls" in line]
    where = "layer 1, seed 0, 1; layer 2, seed 0, 1; output, seed 0, 1"
    assert lines == [f"Sigma falls (docs/training.md) in {where}."]
    assert said.out.index("Sigma falls") > said.out.index("A page with all figures")
