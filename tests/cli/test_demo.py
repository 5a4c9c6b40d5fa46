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
    text = demo(tmp_path / "demo", 2, options)
    said = capsys.readouterr().err  # no terminal: no bar
    assert re.fullmatch(r"(\d of 4: (softmax|MultiMax), seed [01]: accuracy 0\.\d{4}\n){4}", said)
    assert "| softmax " in text
    assert "| MultiMax " in text
    assert "ms per step" in text
    assert "layers.0" in text
    monkeypatch.setattr("multimax.experiments.demo.on_terminal", lambda: True)
    assert demo(tmp_path / "demo", 2, options) == text  # nothing is trained again
    assert demo(tmp_path / "demo", 3, options) != text
    assert "44/44" in capsys.readouterr().err  # 2 methods, 22 steps
    monkeypatch.setattr("multimax.experiments.demo.demo", lambda folder, seeds: demo(folder, seeds, options))
    assert cli.main(["demo", "--seeds", "3", "--out", str(tmp_path / "demo")]) == 0
    page = tmp_path / "demo" / "report.html"
    assert f"A page with all figures, for the browser: {page}\n" in capsys.readouterr().out
    assert "data:image/svg+xml" in page.read_text(encoding="utf-8")
