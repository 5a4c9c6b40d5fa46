"""`multimax weights`."""

import pytest
import torch

import multimax
from multimax import cli
from multimax.cli import weights


def test_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["weights"]) == 0
    text = capsys.readouterr().out
    # three vectors, each with two tables of one softmax and 12 or 6 layers
    assert text.count("softmax  ") == 6
    assert text.count("  layer ") == 3 * (12 + 6)
    # the first vector with the sixth layer of DeiT-small, by the functions themselves
    x = torch.tensor(weights.EXAMPLES["two modes over noise"].scores)
    found = multimax.multimax(x, *multimax.from_paper(*multimax.presets["deit_small"][5]))
    assert " ".join(f"{weight:.3f}" for weight in found.tolist()) in text
