"""The command line as a whole: help, mistakes, exit codes."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

import multimax.cli
import results_tables
from multimax import cli
from multimax.cli import command

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the Trainer uses


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, text in (
        (["--help"], "demo"),
        (["weights", "--help"], "with MultiMax"),
        (["train", "vision", "--help"], "--preset"),
        (["sweep", "--help"], "comparison"),
        (["table", "--help"], "--save"),
        (["--version"], "0."),
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == 0
        assert text in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        cli.main(["unknown"])
    assert stop.value.code == 2


def test_every_subcommand_has_a_file_of_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(multimax.cli.__file__).parent
    shared = {"__init__", "command", "errors", "layout", "runs"}
    files = {file.stem for file in folder.glob("*.py")} - shared
    assert files == {module.__name__.rpartition(".")[2] for module in command.COMMANDS}
    for name in files:
        with pytest.raises(SystemExit) as stop:
            cli.main([name, "--help"])
        assert stop.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: multimax {name} ")


def test_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "multimax", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"multimax {multimax.__version__}\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["train", "vision", "--preset", "cpu-text"], "expected a preset for vision"),
        (["train", "vision", "--preset", "nope"], "expected a preset out of cpu-cifar10"),
        (["train", "vision", "--attention", "nope"], "expected attention to be one of"),
        (["train", "vision", "--set", "nope=1"], "expected settings out of"),
        (["train", "vision", "--set", "seed.x=1"], "expected a setting with parts"),
        (["train", "vision", "--set", "trainer.nope=1"], "expected options of transformers' TrainingArguments"),
        (["train", "vision", "--size", "huge"], "expected a size of vision out of digits"),
        (
            ["train", "translation"],
            "expected the data of the preset cpu-multi30k, got none; name it by --data: a folder",
        ),
        (["train", "vision", "--preset", "cpu-fashion"], "expected the data of the preset cpu-fashion, got none"),
        (
            ["train", "vision", "--preset", "paper-deit-tiny"],
            "expected the data of the preset paper-deit-tiny, got none",
        ),
        (["train", "language", "--preset", "cpu-wikitext2"], "expected the data of the preset cpu-wikitext2, got none"),
        (["sweep", "main", "--preset", "cpu-fashion"], "expected the data of the preset cpu-fashion, got none"),
        (["train", "vision", "--order", "1"], "expected --order with multimax in attention or output, got it without"),
        (["train", "vision", "--attention", "topk", "--init", "identity"], "expected --init with multimax"),
        (["train", "vision", "--attention", "topk", "--set", "terms=lower"], "expected --terms with multimax"),
        (["train", "vision", "--per-head", "--output", "multimax"], "expected --per-head with multimax, or a trained"),
        (["train", "vision", "--multimax-lr-factor", "2"], "expected --multimax-lr-factor with a function that learns"),
        (["train", "vision", "--set", "beams=3"], "expected beams for translation, got it for vision"),
        (["sweep", "main", "--preset", "cpu-digits", "--beams", "5"], "expected --beams for translation"),
        (
            ["sweep", "output", "--preset", "cpu-digits", "--per-head"],
            "expected --per-head with multimax, or a trained",
        ),
        (["sweep", "temperature", "--preset", "cpu-text"], "expected pooling for vision, got it for language"),
        (["train", "vision", "--set", "trainer.save_strategy=best"], "expected trainer.metric_for_best_model beside"),
        (["train", "vision", "--set", "trainer.metric_for_best_model=bleu"], "to be one of loss, accuracy, got 'bleu'"),
        (
            ["train", "vision", "--set", "model.hidden_size=65"],
            "hidden_size to be a multiple of num_attention_heads, got 65",
        ),
        (["train", "vision", "--set", "model.num_attention_heads=5"], "num_attention_heads, got 64 and 5"),
        (
            ["train", "vision", "--set", "model.patch_size=3"],
            "expected image_size to be a multiple of patch_size, got 8",
        ),
        (["train", "language", "--set", "model.n_head=3"], "expected n_embd to be a multiple of n_head, got 128 and 3"),
        (["train", "language", "--data", "/nowhere/at/all"], "/nowhere/at/all"),
        (["sweep", "nope", "--preset", "cpu-digits"], "expected a table out of ablation"),
        (["sweep", "main", "--preset", "cpu-digits", "--methods", "sparsemax"], "expected methods of the table main"),
        (["sweep", "main", "--preset", "cpu-digits", "--seeds", "0"], "expected at least one seed"),
        (["sweep", "main", "--preset", "cpu-digits", "--seed", "3"], "expected --seeds, how many"),
        (["sweep", "main", "--preset", "cpu-digits", "--attention", "multimax"], "expected attention to be left to"),
        (["sweep", "main", "--preset", "cpu-fashion", "--data", "/nowhere/at/all"], "/nowhere/at/all"),
        (["train", "vision", "--out", "/dev/null/x"], "expected files that can be read and written"),
        (["demo", "--seeds", "0"], "expected at least one seed"),
        (["table", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    words: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 1
    said = capsys.readouterr()
    assert said.err.startswith("multimax: expected")
    assert text in said.err
    assert said.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("encoding", "head"), [("latin-1", "accuracy, % (higher)"), ("ascii", "97.76 +- 0.55")])
def test_a_terminal_that_has_not_all_signs(encoding: str, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = results_tables.FOLDER / "results" / "digits.json"
    with io.TextIOWrapper(io.BytesIO(), encoding=encoding) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert cli.main(["table", str(file)]) == 0
        assert head in stream.buffer.getvalue().decode(encoding)


def test_a_reader_that_has_seen_enough() -> None:
    file = results_tables.FOLDER / "results" / "digits.json"
    code = f"import sys; from multimax import cli; sys.exit(cli.main(['table', *[{str(file)!r}] * 20]))"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("| method")
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0
