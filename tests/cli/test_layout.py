"""Help in 80 columns, with examples on lines of their own."""

import re
import sys

import pytest

from multimax import cli
from multimax.experiments import tasks
from multimax.experiments.settings import preset, preset_names

COMMANDS = [[], ["weights"], ["env"], ["check"], ["figures"], ["demo"], ["train"], ["sweep"], ["presets"], ["table"]]
COMMANDS += [["report"], ["explore"], *(["train", name] for name in tasks.names())]


def helped(words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        cli.main([*words, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_fits_80_columns(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = helped(words, capsys, monkeypatch).splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if re.search(r"(cpu|paper|deit)-$", line)]  # names stay whole
    for number, line in enumerate(lines):
        if line == "examples:":
            assert lines[number - 1] == ""
            assert lines[number + 1].startswith("  ")
            assert "multimax" in lines[number + 1]


def test_examples_of_the_command_have_lines_of_their_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, examples = helped([], capsys, monkeypatch).partition("examples:\n")
    lines = examples.splitlines()
    assert len(lines) > 2
    assert all(line.startswith("  multimax ") for line in lines)


def test_sweep_offers_what_it_takes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = helped(["sweep"], capsys, monkeypatch)
    offered = set(re.findall(r"--[a-z][a-z0-9-]+", text))
    assert {"--seeds", "--preset", "--order", "--methods"} <= offered
    assert not {"--seed", "--attention", "--output"} & offered


@pytest.mark.parametrize("task", tasks.names())
def test_train_offers_what_concerns_its_task(
    task: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = helped(["train", task], capsys, monkeypatch)
    shown = {name for name in preset_names() if re.search(rf"(?<![\w-]){name}(?![\w-])", text)}
    assert shown == {name for name in preset_names() if preset(name).task == task}
    assert f"multimax train {task}" in text
    for spec in tasks.SPECS:
        if spec.name != task:
            assert f"multimax train {spec.name}" not in text
            for setting in set(spec.only) - set(tasks.get(task).only):
                assert f"--{setting.replace('_', '-')} " not in text
    words = " ".join(text.split())
    assert f"one of {', '.join(tasks.get(task).sizes)}" in words


@pytest.mark.parametrize("words", [["weights"], ["presets"], ["env"]], ids=" ".join)
def test_what_is_printed_fits_80_columns(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("MULTIMAX_PROBE_COMMAND", "true")
    assert cli.main(words) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    assert sys.stdout is not None
