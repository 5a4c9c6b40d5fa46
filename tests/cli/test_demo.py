"""`multimax demo`."""

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
    bar = capsys.readouterr().err
    assert "88/88" in bar  # 2 methods, 2 seeds, 22 steps
    assert "| softmax " in text
    assert "| MultiMax " in text
    assert "ms per step" in text
    assert "layers.0" in text
    assert demo(tmp_path / "demo", 2, options) == text  # nothing is trained again
    monkeypatch.setattr("multimax.experiments.demo.demo", lambda folder, seeds: demo(folder, seeds, options))
    assert cli.main(["demo", "--seeds", "2", "--out", str(tmp_path / "demo")]) == 0
    page = tmp_path / "demo" / "report.html"
    assert f"A page with all figures, for the browser: {page}\n" in capsys.readouterr().out
    assert "data:image/svg+xml" in page.read_text(encoding="utf-8")
