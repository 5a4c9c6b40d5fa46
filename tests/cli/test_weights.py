"""`multimax weights`."""

import re

import pytest
import torch

import multimax
from multimax import cli, metrics
from multimax.cli import weights

DEIT = multimax.presets["deit_small"]


def printed(x: torch.Tensor, layer: int) -> str:
    found = multimax.multimax(x, *multimax.from_paper(*DEIT[layer - 1]))
    return " ".join(f"{weight:.3f}" for weight in found.tolist())


def test_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["weights"]) == 0
    text = capsys.readouterr().out
    # three vectors, each with two tables of one softmax and 12 or 6 layers
    assert text.count("softmax  ") == 6
    assert len(re.findall(r"^layer \d", text, re.MULTILINE)) == 3 * (12 + 6)
    # the first vector with the sixth layer of DeiT-small, by the functions themselves
    assert printed(torch.tensor(weights.EXAMPLES["two modes over noise"].scores), 6) in text


def test_scores_a_preset_and_a_layer_of_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    scores = [3.0, 2.5, -1.0]
    words = ["weights", *map(str, scores), "--preset", "deit_small", "--layer", "9", "--threshold", "0.5"]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert "your scores: x = [3, 2.5, -1], relevant above 0.5" in text
    assert "WikiText" not in text
    (line,) = re.findall(r"^layer .*", text, re.MULTILINE)
    x = torch.tensor(scores)
    assert line.endswith(printed(x, 9))
    found = multimax.multimax(x, *multimax.from_paper(*DEIT[8]))
    m, s = (f(x, found, threshold=0.5).item() for f in (metrics.multi_modality, metrics.sparsity))
    assert line.split()[:4] == ["layer", "9", f"{m:.2f}", f"{s:.2f}"]
    # the threshold is the mean unless given
    assert cli.main(["weights", "1", "2", "6"]) == 0
    assert "relevant above 3" in capsys.readouterr().out


def test_rows_in_which_the_largest_score_loses_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    """The last layer of DeiT-small falls between its knots."""
    assert cli.main(["weights", "1.7", "0.9", "-2", "--preset", "deit_small"]) == 0
    lines = re.findall(r"^(layer \d+) *(!?)", capsys.readouterr().out, re.MULTILINE)
    x = torch.tensor([1.7, 0.9, -2.0])
    falls = [bool((w := multimax.multimax(x, *multimax.from_paper(*layer)))[0] < w.max()) for layer in DEIT]
    assert [bool(mark) for _, mark in lines] == falls
    assert falls[-1]
    assert not all(falls)


def test_many_scores_stay_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["weights", *map(str, range(30)), "--layer", "3"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--layer", "13"], "expected --layer from 1 to 12, got 13"),
        (["--preset", "wikitext103_lm", "--layer", "7"], "expected --layer from 1 to 6, got 7"),
        (["1"], "expected two or more finite scores, got [1.0]"),
        (["1", "nan"], "expected two or more finite scores, got [1.0, nan]"),
        (["--threshold", "1"], "expected --threshold beside scores, got it without"),
    ],
)
def test_mistakes(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["weights", *words]) == 1
    assert f"multimax: {text}" in capsys.readouterr().err
