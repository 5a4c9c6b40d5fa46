"""`multimax report`: what stands on the page, and the page in a real browser."""

import base64
import json
import re
import shutil
import statistics
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForImageClassification,
    BertConfig,
    BertForMaskedLM,
    ResNetConfig,
    ResNetForImageClassification,
    SwinConfig,
    SwinForImageClassification,
    TrainerCallback,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

import experiment_data
import multimax
from browser import Watched, browser  # noqa: F401, a fixture
from multimax import cli
from multimax.experiments import results
from multimax.experiments.report import drawing, models, report, sources
from multimax.experiments.report import page as html
from multimax.experiments.run import train
from multimax.experiments.settings import Settings, override, preset
from multimax.experiments.trainer import Diverged

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the Trainer uses

STEPS = {"max_steps": 4, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 16}
STEPS |= {
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_steps": 4,
    "gradient_accumulation_steps": 1,
}
FEW = {"trainer": STEPS, "measured": 8, "tensorboard": False, "watch": 1}
BOTH = {"attention": "multimax", "output": "multimax"}
FUNCTIONS = ["Paths on the simplex", "Sparsity against multi-modality", "The weight of an entry beside a fixed one"]
OF_MODELS = ["Histograms of attention weights", "Cumulative distributions of attention weights", "Rollout discrepancy"]
OF_IMAGES = ["Where the heads look", "Grad-CAM"]
LAYERS = ["Where the heads look: layer 1", "Where the heads look: layer 2"]
OF_LOGS = ["Loss and metrics", "Patch similarity by layer and epoch", "Measures over the steps of training"]
OF_PARAMETERS = "Parameters over the steps of training"
LACKING = "Figures that do not apply"


class Page(HTMLParser):
    """What a reader sees: below each heading its tables, notes, picture and caption."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.text = file.read_text(encoding="utf-8")
        self.sections: dict[str, dict[str, dict[str, Any]]] = {}
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.part: dict[str, Any] = {}
        self.words = ""
        self.feed(self.text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.tags.add(tag)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found["href"]] if tag == "a" else []
        if tag in ("h2", "h3", "th", "td", "li", "figcaption", "caption"):
            self.words = ""
        if tag == "table":
            self.part["tables"].append([])
        if tag == "tr":
            self.part["tables"][-1].append([])
        if tag == "img":
            self.part["alt"] = found["alt"]
            head, data = found["src"].split(",")
            assert head == "data:image/svg+xml;base64"
            self.part["svg"] = base64.b64decode(data).decode()

    def handle_data(self, data: str) -> None:
        self.words += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "h2":
            self.sections[self.words] = {}
        elif tag == "h3":
            parts = list(self.sections.values())[-1]
            assert self.words not in parts
            self.part = parts[self.words] = {"title": self.words, "tables": [], "notes": [], "svg": None}
        elif tag in ("th", "td"):
            self.part["tables"][-1][-1].append(self.words)
        elif tag == "li" and self.part:
            self.part["notes"].append(self.words)
        elif tag == "figcaption":
            self.part["caption"] = self.words

    @property
    def parts(self) -> dict[str, dict[str, Any]]:
        """Of the only section."""
        (found,) = self.sections.values()
        return found

    @property
    def figures(self) -> list[str]:
        return [title for title, part in self.parts.items() if part["svg"]]

    @property
    def lacking(self) -> dict[str, str]:
        """Figures that do not apply, with their reasons."""
        return reasons(self.parts)


def reasons(parts: dict[str, dict[str, Any]]) -> dict[str, str]:
    found = (re.fullmatch(r"((?:Where the heads look: [^:]*)?[^:]*): (.*)", note) for note in parts[LACKING]["notes"])
    return {match[1]: match[2] for match in found}


class Runs:
    """Small runs, trained when they are asked for, and kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, name: str, base: str = "cpu-digits", label: str = "", **values: Any) -> Path:
        folder = self.folder / name
        if not folder.exists():
            train(override(self.settings(base), {**values, "label": label or name}), folder, progress=False)
        return folder

    def settings(self, name: str) -> Settings:
        settings = override(preset(name), FEW)
        if settings.task == "vision":
            return override(settings, {"model": experiment_data.SMALL_VIT})
        data = self.folder / f"data-{name}"
        if settings.task == "language":
            data.exists() or experiment_data.text(data)
            return override(
                settings, {"model": experiment_data.SMALL_GPT, "length": 16, "vocabulary": 300, "data": str(data)}
            )
        data.exists() or experiment_data.parallel(data, test=settings.test_set or "test")
        return override(
            settings,
            {"model": experiment_data.SMALL_MARIAN, "length": 24, "vocabulary": 120, "beams": 2, "data": str(data)},
        )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    table = {
        "about": "two methods",
        "baseline": "softmax",
        "seeds": 2,
        "methods": {"softmax": {}, "MultiMax both": BOTH},
    }
    (folder / "two.json").write_text(json.dumps(table))
    words = ["sweep", str(folder / "two.json"), "--preset", "cpu-digits", "--out", str(folder / "digits"), "--quiet"]
    words += ["--no-tensorboard", "--measured", "8", "--watch", "1", "--set"]
    words += [f"model.{name}={value}" for name, value in experiment_data.SMALL_VIT.items()]
    words += [f"trainer.{name}={value}" for name, value in STEPS.items()]
    assert cli.main(words) == 0
    return folder / "digits"


@pytest.fixture(scope="module")
def whole(sweep: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the sweep, as it is."""
    return report([sweep], tmp_path_factory.mktemp("whole") / "report.html", examples=20, progress=False)


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Page]:
    """A report whose figures are made, and not written out, which takes most of the time."""
    monkeypatch.setattr(
        "multimax.experiments.report.drawing.as_svg", lambda figure: b"<svg/>" if figure.axes else pytest.fail("empty")
    )

    def made(*paths: Path, examples: int = 4, **options: Any) -> Page:
        return Page(report(paths, tmp_path / "report.html", examples=examples, progress=False, **options))

    return made


def markdown(text: str) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [row for row in rows if not set("".join(row)) <= {"-"}]


# ---- what stands on the page ----


def test_results_are_those_of_the_table(sweep: Path, whole: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["table", str(sweep)]) == 0
    said = capsys.readouterr().out
    shown = Page(whole).parts["Results"]
    assert shown["tables"] == [markdown(said)]
    assert len(shown["tables"][0]) == 3
    notes = [line[2:] for line in said.splitlines() if line.startswith("- ")]
    assert shown["notes"][: len(notes)] == notes
    assert shown["notes"][len(notes) :] == [
        "Tables are of all seeds. Figures of models are of seed 0, which was not chosen."
    ]


def test_learned_parameters_are_those_of_the_saved_models(sweep: Path, whole: Path):
    found: dict[str, list[list[float]]] = {}
    for seed in (0, 1):
        folder = sweep / f"multimax-both/seed-{seed}/model"
        model = multimax.from_pretrained(AutoModelForImageClassification, folder)
        for name, module in model.named_modules():
            if isinstance(module, multimax.MultiMax):
                columns = [column[order] for order in (0, 1) for column in (module.t_b, module.t_d)]
                columns += [column[order] for order in (0, 1) for column in (module.b, module.d)]
                layer = {"ijepa.layers.0": "layer 1", "ijepa.layers.1": "layer 2"}.get(name.rsplit(".", 2)[0], "output")
                found.setdefault(layer, []).append([column.item() for column in columns])
    head, *rows = Page(whole).parts["Learned parameters: MultiMax both"]["tables"][0]
    assert head == ["layer", "tb1", "td1", "tb2", "td2", "b1", "d1", "b2", "d2"]
    assert [row[0] for row in rows] == ["layer 1", "layer 2", "output"]
    assert set(found) == {row[0] for row in rows}
    for name, *cells in rows:
        pairs = list(zip(*found[name], strict=True))
        assert cells == [f"{statistics.fmean(pair):.4f} ± {statistics.stdev(pair):.4f}" for pair in pairs]


def test_every_figure_of_a_sweep_with_multimax(whole: Path):
    page = Page(whole)
    expected = ["Learned sigma: MultiMax both", *FUNCTIONS, *OF_MODELS, *OF_LOGS, OF_PARAMETERS, "Grad-CAM"]
    assert sorted(page.figures) == sorted([*expected, *LAYERS])
    assert LACKING not in page.parts
    for title in page.figures:
        assert page.parts[title]["svg"].startswith("<?xml")
        assert page.parts[title]["caption"]
    pictures = [page.parts[title]["svg"] for title in page.figures]
    assert len(set(pictures)) == len(pictures)
    for title in FUNCTIONS:
        assert "of MultiMax both, seed 0 ha" in page.parts[title]["caption"]


def test_alternatives_say_what_is_to_be_seen(whole: Path):
    page = Page(whole)
    said = {title: page.parts[title]["alt"] for title in page.figures}
    assert len(set(said.values())) == len(said)
    assert all(title != words and len(words) > 30 for title, words in said.items())
    assert re.search(r"eval accuracy: softmax (goes from|stays at) 0\.\d+", said["Loss and metrics"])
    assert "layer 1: layer 1 goes from" in said["Learned sigma: MultiMax both"]
    assert "sparsemax 18 of 25 at a corner" in said["Paths on the simplex"]
    assert "sparsemax at (1, 0.6)" in said["Sparsity against multi-modality"]
    assert re.search(r"softmax, head 1: largest in row \d of 4, column \d of 4", said[LAYERS[0]])
    assert re.search(r"MultiMax both, row 2: largest in row", said["Grad-CAM"])
    assert "softmax has most weights around 0." in said["Histograms of attention weights"]
    assert "softmax reaches a half at 0." in said["Cumulative distributions of attention weights"]


def test_text_in_figures_is_text_and_they_are_dark_where_the_page_is(whole: Path):
    page = Page(whole)
    for title in page.figures:
        assert "<text" in page.parts[title]["svg"]
        assert "prefers-color-scheme: dark" in page.parts[title]["svg"]
    assert "prefers-color-scheme: dark" in re.sub(r"base64,[^\"]+", "", page.text)


def test_few_seeds_are_warned_of_beside_the_interval(whole: Path):
    (cell,) = re.findall(r"<td>[^<]*\[[^<]*<strong class=\"few\">\(only 2 seeds\)</strong></td>", whole.read_text())
    assert cell.count("only 2 seeds") == 1


def test_settings_that_differ_and_those_in_common(whole: Path):
    differ, common = Page(whole).parts["Settings"]["tables"]
    assert differ == [
        ["setting", "softmax", "MultiMax both"],
        ["label", "softmax", "MultiMax both"],
        ["attention", "softmax", "multimax"],
        ["output", "softmax", "multimax"],
    ]
    assert common[0] == ["setting", "value"]
    assert ["trainer.max_steps", "4"] in common
    assert ["model.hidden_size", "16"] in common
    assert ["data", "digits"] in common
    assert not {"label", "attention", "output", "start"} & {row[0] for row in common}


def test_measures_are_on_the_data_that_is_named(whole: Path, sweep: Path):
    shown = Page(whole).parts["Measured for this report"]
    assert shown["notes"] == [
        "Of the attention, on at most 20 examples of the test set of digits, means over the layers."
    ]
    head, softmax, both = shown["tables"][0]
    assert head[:4] == ["model", "parameters", "attention layers", "multi-modality"]
    assert softmax[2] == both[2] == "2"
    for row, folder in ((softmax, "softmax"), (both, "multimax-both")):
        result = json.loads((sweep / folder / "seed-0/result.json").read_text())
        assert int(row[1].replace(",", "")) == result["model_parameters"]
        assert float(row[3]) == pytest.approx(result["metrics"]["multi_modality"], abs=0.1)  # of other examples


def test_contents_and_ids(whole: Path):
    page = Page(whole)
    assert len(set(page.ids)) == len(page.ids)
    assert {link.removeprefix("#") for link in page.links} == set(page.ids)
    assert "script" not in page.tags
    assert re.findall(r"https?://", re.sub(r"base64,[^\"]+", "", page.text)) == []


def test_equal_inputs_give_equal_bytes(runs: Runs, tmp_path: Path):
    paths = [runs("MultiMax both", **BOTH)]
    one, two = (report(paths, tmp_path / name, examples=4, progress=False) for name in ("one.html", "two.html"))
    assert one.read_bytes() == two.read_bytes()


def test_another_seed_of_a_sweep(sweep: Path, quick: Callable[..., Page]):
    page = quick(sweep, seed=1)
    assert (
        "Tables are of all seeds. Figures of models are of seed 1, which was not chosen."
        in page.parts["Results"]["notes"]
    )
    assert ["seed", "1"] in page.parts["Settings"]["tables"][1]
    assert "of MultiMax both, seed 1 ha" in page.parts[FUNCTIONS[0]]["caption"]
    (group,) = sources.read([sweep], seed=1, preset_name=None, data=None)
    drawn = drawing.Drawings(group, {}, models.parameters_of(group, {}), "").layers
    learned = json.loads((sweep / "multimax-both/seed-1/result.json").read_text())["parameters"]
    assert list(drawn) == ["layer 1", "layer 2", "output"]
    assert drawn["layer 2"] == learned["ijepa.layers.1.attention"]
    page = quick(sweep, seed=7, examples=0)
    assert "softmax: no run with seed 7 that is over, so there are no figures of it." in page.parts["Results"]["notes"]


def test_runs_side_by_side(runs: Runs, quick: Callable[..., Page]):
    page = quick(runs("softmax"), runs("MultiMax both", **BOTH))
    head, *rows = page.parts["Results"]["tables"][0]
    assert [row[0] for row in rows] == ["softmax", "MultiMax both"]
    assert head[-1] == "difference to softmax (95%)"
    for row in rows:
        accuracy = json.loads((runs.folder / row[0] / "result.json").read_text())["metrics"]["accuracy"]
        assert row[1] == f"{100 * accuracy:.2f}"
    assert set(page.figures) > {*FUNCTIONS, *OF_MODELS, *OF_LOGS, "Grad-CAM"}
    assert page.parts["Learned parameters: MultiMax both"]["notes"] == ["MultiMax both: one seed."]


def test_two_seeds_of_one_method_are_one_row(runs: Runs, quick: Callable[..., Page]):
    page = quick(runs("softmax"), runs("softmax-1", label="softmax", seed=1), examples=0)
    rows = page.parts["Results"]["tables"][0]
    assert len(rows) == 2
    assert rows[1][-2] == "2"
    words = "Tables are of all runs. Figures of models are of the first run of each method."
    assert words in page.parts["Results"]["notes"]


def test_other_settings_are_another_method(runs: Runs, quick: Callable[..., Page]):
    slow = runs("slow", label="softmax", seed=1, trainer={"learning_rate": 1e-5})
    rows = quick(runs("softmax"), slow, examples=0).parts["Results"]["tables"][0]
    assert [row[0] for row in rows[1:]] == ["softmax (softmax)", "softmax (slow)"]


def test_a_folder_given_twice_counts_once(runs: Runs, quick: Callable[..., Page], monkeypatch: pytest.MonkeyPatch):
    folder = runs("softmax")
    monkeypatch.chdir(folder)
    rows = quick(folder, Path("."), folder / "../softmax", examples=0).parts["Results"]["tables"][0]
    assert [row[0] for row in rows[1:]] == ["softmax"]
    assert rows[1][-2] == "1"


def test_softmax_alone_names_what_does_not_apply(runs: Runs, quick: Callable[..., Page]):
    page = quick(runs("softmax"))
    assert set(page.lacking) == {*FUNCTIONS, OF_PARAMETERS}
    assert page.lacking[FUNCTIONS[0]] == "there is no MultiMax among them."
    assert page.lacking[OF_PARAMETERS] == "no parameters of reweighting functions were logged."
    assert not [title for title in page.parts if title.startswith("Learned")]


def test_no_examples_run_no_model(runs: Runs, quick: Callable[..., Page]):
    page = quick(runs("softmax"), examples=0)
    assert {page.lacking[title] for title in (*OF_MODELS, *OF_IMAGES)} == {"models were not run on data."}
    assert "Measured for this report" not in page.parts


def test_a_run_that_is_not_over(runs: Runs, tmp_path: Path, quick: Callable[..., Page]):
    folder = shutil.copytree(runs("MultiMax both", **BOTH), tmp_path / "begun")
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "model")
    page = quick(folder)
    assert "Results" not in page.parts
    words = "MultiMax both, seed 0: not over, so only what it has logged is shown."
    assert page.parts["To be known"]["notes"] == [words]
    assert sorted(page.figures) == sorted([*OF_LOGS, OF_PARAMETERS])
    assert page.lacking["Grad-CAM"] == "there is no trained model."
    (folder / "metrics.jsonl").unlink()
    page = quick(folder)
    assert page.figures == []
    assert page.lacking["Loss and metrics"] == "there is no log of training."


class Break(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 2:
            next(model.parameters()).data.fill_(torch.nan)


def test_a_run_that_diverged(runs: Runs, tmp_path: Path, quick: Callable[..., Page]):
    settings = override(runs.settings("cpu-digits"), {**BOTH, "label": "MultiMax both"})
    with pytest.raises(Diverged):
        train(settings, tmp_path / "run", progress=False, callbacks=[Break()])
    page = quick(tmp_path / "run")
    assert page.parts["Results"]["tables"][0][1][-2] == "1 of 1 diverged"
    notes = page.parts["Results"]["notes"]
    assert "MultiMax both, seed 0: diverged, so only what it has logged is shown." in notes
    assert any(note.startswith("Diverged, and in no mean: MultiMax both seed 0 (multimax: expected") for note in notes)
    assert "Loss and metrics" in page.figures
    assert page.lacking[FUNCTIONS[0]] == "there is no MultiMax among them."


def test_figures_of_a_sweep_are_of_a_run_that_finished(sweep: Path, tmp_path: Path, quick: Callable[..., Page]):
    folder = shutil.copytree(sweep, tmp_path / "sweep")
    first = folder / "softmax/seed-0"
    shutil.rmtree(first / "model")
    (first / "result.json").write_text(json.dumps({"status": "diverged", "reason": "said so", "metrics": {}}))
    page = quick(folder)
    assert page.parts["Results"]["tables"][0][1][-2] == "1 of 2 diverged"
    words = "Tables are of all seeds. Figures of models are of seed 0, 1, which was not chosen."
    assert words in page.parts["Results"]["notes"]
    assert [row[0] for row in page.parts["Measured for this report"]["tables"][0][1:]] == ["softmax", "MultiMax both"]


def test_a_run_whose_model_was_deleted(runs: Runs, tmp_path: Path, quick: Callable[..., Page]):
    folder = shutil.copytree(runs("MultiMax both", **BOTH), tmp_path / "run")
    shutil.rmtree(folder / "model")
    page = quick(folder)
    words = "MultiMax both, seed 0: no folder model is left, so there are no figures of its model."
    assert words in page.parts["Results"]["notes"]
    assert set(page.lacking) == {*OF_MODELS, *OF_IMAGES}
    assert "Learned parameters: MultiMax both" in page.parts  # which the result has


def test_a_file_of_numbers(sweep: Path, tmp_path: Path, quick: Callable[..., Page], capsys: pytest.CaptureFixture[str]):
    results.save(results.read(sweep), tmp_path / "saved.json")
    assert cli.main(["table", str(tmp_path / "saved.json"), "--parameters", "MultiMax both"]) == 0
    table = markdown(capsys.readouterr().out)
    page = quick(tmp_path / "saved.json")
    assert list(page.sections) == ["saved: two methods"]
    assert page.parts["Results"]["tables"][0] == table[:3]
    learned = page.parts["Learned parameters: MultiMax both"]["tables"][0]
    assert [row[1:] for row in learned[1:]] == [row[1:] for row in table[4:]]
    assert page.figures == ["Learned sigma: MultiMax both", *FUNCTIONS]
    assert ["attention", "softmax", "multimax"] in page.parts["Settings"]["tables"][0]
    assert ["trainer.max_steps", "4"] in page.parts["Settings"]["tables"][1]


def test_runs_of_several_kinds_have_sections_of_their_own(sweep: Path, runs: Runs, quick: Callable[..., Page]):
    language = runs("language", "cpu-wikitext2", **BOTH)
    page = quick(sweep, runs("softmax"), language)
    assert [title.partition(":")[0] for title in page.sections] == ["digits", "cpu-digits", "cpu-wikitext2"]
    assert len(set(page.ids)) == len(page.ids)
    text = list(page.sections.values())[-1]
    head, row = text["Results"]["tables"][0]
    assert head[1] == "perplexity ↓"
    perplexity = json.loads((language / "result.json").read_text())["metrics"]["perplexity"]
    assert row[1] == f"{perplexity:.2f}"
    lacking = reasons(text)
    assert set(lacking) == {*OF_IMAGES, "Patch similarity by layer and epoch"}
    assert lacking["Grad-CAM"] == "only models of images look at photos."
    assert text["Rollout discrepancy"]["svg"]


def test_runs_with_other_tokens_are_each_given_their_own(
    runs: Runs, quick: Callable[..., Page], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [runs("language", "cpu-wikitext2", **BOTH), runs("short", "cpu-wikitext2", length=8, vocabulary=280)]
    given = []
    measure = models.measure
    monkeypatch.setattr(
        models, "measure", lambda m, task, *rest, **o: given.append(task) or measure(m, task, *rest, **o)
    )
    quick(*paths, examples=2)
    assert [len(task.test[0]["input_ids"]) for task in given] == [16, 8]
    assert len(given[0].tokenizer) > len(given[1].tokenizer)


def test_translation(runs: Runs, quick: Callable[..., Page]):
    page = quick(runs("translation", "cpu-multi30k", **BOTH))
    assert page.parts["Results"]["tables"][0][0][1] == "BLEU ↑"
    layers = [row[0] for row in page.parts["Learned parameters: translation"]["tables"][0][1:]]
    assert layers == ["encoder layer 1", "decoder layer 1", "cross layer 1", "output"]
    assert set(page.lacking) == {*OF_IMAGES, "Patch similarity by layer and epoch"}
    assert {*FUNCTIONS, *OF_MODELS, OF_PARAMETERS} <= set(page.figures)


def test_parameters_of_heads(runs: Runs, quick: Callable[..., Page]):
    page = quick(runs("per head", **BOTH, per_head=True))
    result = json.loads((runs.folder / "per head/result.json").read_text())
    t_b = result["parameters"]["ijepa.layers.0.attention"]["t_b"]
    assert len(t_b) == 2  # heads
    row = page.parts["Learned parameters: per head"]["tables"][0][1]
    assert row[1] == f"{statistics.fmean(values[0] for values in t_b):.4f}"
    assert "of per head, first head ha" in page.parts[FUNCTIONS[0]]["caption"]


def test_trained_temperature(runs: Runs, quick: Callable[..., Page]):
    page = quick(runs("temperature", temperature="trained"))
    head, *rows = page.parts["Learned parameters: temperature"]["tables"][0]
    assert head == ["layer", "temperature"]
    result = json.loads((runs.folder / "temperature/result.json").read_text())
    learned = [parameters["temperature"] for parameters in result["parameters"].values()]
    assert [row[1] for row in rows] == [f"{value:.4f}" for value in learned]
    assert OF_PARAMETERS in page.figures
    assert page.lacking[FUNCTIONS[0]] == "there is no MultiMax among them."


def test_class_token_and_order_1(runs: Runs, quick: Callable[..., Page]):
    page = quick(runs("class token", **BOTH, pooling="class", order=1))
    assert page.parts["Learned parameters: class token"]["tables"][0][0] == ["layer", "tb1", "td1", "b1", "d1"]
    assert LACKING not in page.parts
    assert {"Grad-CAM", *LAYERS} <= set(page.figures)


def test_data_for_the_figures_is_not_said_to_be_the_runs_own(
    runs: Runs, tmp_path: Path, quick: Callable[..., Page]
) -> None:
    page = quick(runs("softmax"), data=str(experiment_data.idx(tmp_path / "other", n=10)))
    assert "of the test set of other, means" in page.parts["Measured for this report"]["notes"][0]
    assert ["data", "digits"] in page.parts["Settings"]["tables"][0]


# ---- saved models ----


def vit(folder: Path, kind: Any = ViTForImageClassification, **options: Any) -> Path:
    torch.manual_seed(0)
    plain = {**experiment_data.SMALL_VIT, "image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
    kind(ViTConfig(**{**plain, **options})).save_pretrained(folder)
    return folder


def test_a_saved_model_without_data(tmp_path: Path, quick: Callable[..., Page]):
    model = ViTForImageClassification(
        ViTConfig(**experiment_data.SMALL_VIT, image_size=8, patch_size=2, num_channels=1)
    )
    multimax.convert_(model)
    model.save_pretrained(tmp_path / "own")
    page = quick(tmp_path / "own")
    assert list(page.sections) == ["saved models"]
    assert page.figures == ["Learned sigma: own", *FUNCTIONS]
    first = next(module for module in model.modules() if isinstance(module, multimax.MultiMax))
    assert page.parts["Learned parameters: own"]["tables"][0][1][1] == f"{first.t_b[0].item():.4f}"
    assert page.lacking["Grad-CAM"] == "there is no data for saved models; give --preset and --data."
    assert page.lacking["Loss and metrics"] == "there is no log of training."


def test_a_saved_model_on_data(tmp_path: Path, quick: Callable[..., Page]):
    page = quick(vit(tmp_path / "own"), preset="cpu-digits")
    count = ViTForImageClassification.from_pretrained(tmp_path / "own").num_parameters()
    assert next(iter(page.sections)).startswith("cpu-digits: scikit-learn")
    assert page.figures == [*OF_MODELS[:2], *LAYERS, "Rollout discrepancy", "Grad-CAM"]
    assert page.parts["Measured for this report"]["tables"][0][1][:3] == ["own", f"{count:,}", "2"]


def test_models_that_take_images_in_their_own_way(
    tmp_path: Path, quick: Callable[..., Page], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [vit(tmp_path / "plain"), vit(tmp_path / "flat", patch_size=[2, 4])]
    folders += [vit(tmp_path / "large", image_size=16, patch_size=4, pooler_act="tanh")]
    shown = []
    monkeypatch.setattr(
        drawing.plots, "attention_maps", lambda image, maps, **options: shown.append((image.shape, options)) or drawn()
    )
    page = quick(*folders, preset="cpu-digits")
    expected = [
        (torch.Size([1, 8, 8]), {"query": 10, "grid": (4, 4)}),
        (torch.Size([1, 8, 8]), {"query": 5, "grid": (4, 2)}),
        (torch.Size([1, 16, 16]), {"query": 10, "grid": (4, 4)}),
    ]
    assert shown == [each for each in expected for _ in LAYERS]  # each of them alone, layer by layer
    assert [title for title in page.figures if "heads" in title] == [
        f"{title} of {name}" for name in ("plain", "flat", "large") for title in LAYERS
    ]
    assert "Grad-CAM" in page.figures


def drawn() -> Any:
    return multimax.plots.two_entries()


def test_models_of_images_that_have_no_logits_or_no_grid(tmp_path: Path, quick: Callable[..., Page]):
    page = quick(vit(tmp_path / "base", ViTModel), preset="cpu-digits")
    assert page.lacking["Grad-CAM"].startswith("expected a model that returns logits")
    assert LAYERS[0] in page.figures
    options = {"patch_size": 1, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 2}
    model = SwinForImageClassification(SwinConfig(image_size=8, num_channels=1, num_labels=10, **options))
    model.save_pretrained(tmp_path / "swin")
    page = quick(tmp_path / "swin", preset="cpu-digits")
    assert page.lacking["Where the heads look: layer 1.1"].startswith("expected attention of one image")
    assert page.lacking["Grad-CAM"].startswith("expected a grid of at most 16 patches")
    assert OF_MODELS[0] in page.figures


def test_models_of_one_name_are_told_apart(tmp_path: Path, quick: Callable[..., Page]):
    page = quick(vit(tmp_path / "a/model"), vit(tmp_path / "b/model"), preset="cpu-digits")
    names = [row[0] for row in page.parts["Measured for this report"]["tables"][0][1:]]
    assert names == ["model (a/model)", "model (b/model)"]


def test_the_folder_here_has_a_name(tmp_path: Path, quick: Callable[..., Page], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(vit(tmp_path / "own"))
    page = quick(Path("."), preset="cpu-digits")
    assert page.parts["Measured for this report"]["tables"][0][1][0] == "own"


# ---- wrong input ----


def refused(capsys: pytest.CaptureFixture[str], out: Path, *words: Any) -> str:
    """What the command says; it writes nothing."""
    before = {file: file.stat().st_mtime_ns for file in out.parent.iterdir()} if out.parent.is_dir() else {}
    capsys.readouterr()
    assert cli.main(["report", *map(str, words), "--out", str(out), "--quiet"]) == 1
    if before:
        assert {file: file.stat().st_mtime_ns for file in out.parent.iterdir()} == before
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("multimax: expected ") or "\nmultimax: expected " in captured.err
    assert "Traceback" not in captured.err
    assert ", got" in captured.err
    return captured.err


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages/beside.txt").write_text("stays")
    return tmp_path / "pages/report.html"


def test_folders_that_are_no_runs(tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]):
    words = (
        "multimax: expected the folder of a run, of a sweep or of a saved model, or a file of `multimax table --save`"
    )
    assert f"{words}, got none at '{tmp_path / 'nowhere'}'" in refused(capsys, out, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert f"{words}, got one without config.json" in refused(capsys, out, tmp_path / "empty")
    for content in ("[1]", "{}", '"word"'):
        (tmp_path / "empty/config.json").write_text(content)
        assert f"{words}, got one whose config.json is neither" in refused(capsys, out, tmp_path / "empty")
    assert "expected JSON in" in refused(capsys, out, out.parent / "beside.txt")


DAMAGED = [
    ("config.json", b'{"task": "vision", ', "config.json' to be a file of JSON, got"),
    ("config.json", b"\xff\xfe", "config.json' to be a file of JSON, got"),
    ("config.json", b'{"task": "vision", "trainer": {}, "colour": 1}', "expected settings out of"),
    ("config.json", b'{"task": "vision", "trainer": {}, "seed": "x"}', "expected the setting seed to be of type int"),
    ("result.json", b"{", "result.json, got a damaged file"),
    ("result.json", b'{"status": "who knows"}', "expected 'status' in"),
    ("result.json", b'{"status": "finished", "metrics": {"accuracy": "good"}}', "expected 'accuracy' in"),
    ("environment.json", b"[]", "expected a JSON object in"),
    ("model/config.json", b"[]", "expected a model's settings in"),
    ("model/config.json", b"{", "to be a file of JSON, got"),
    ("model/model.safetensors", b"\x08\x00", "expected a model that transformers can load in"),
]


@pytest.mark.parametrize(("name", "content", "words"), DAMAGED)
def test_damaged_files(
    name: str, content: bytes, words: str, runs: Runs, tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
):
    folder = shutil.copytree(runs("softmax"), tmp_path / "run")
    (folder / name).write_bytes(content)
    assert words in refused(capsys, out, folder)


def test_a_damaged_log_is_a_note(runs: Runs, tmp_path: Path, quick: Callable[..., Page]):
    folder = shutil.copytree(runs("softmax"), tmp_path / "run")
    (folder / "metrics.jsonl").write_bytes(b"\xff\xfe\x00")
    page = quick(folder)
    assert any("its log is not shown: expected a line of JSON in" in note for note in page.parts["Results"]["notes"])
    assert page.lacking["Loss and metrics"] == "there is no log of training."
    (folder / "metrics.jsonl").write_bytes(b'{"loss": 1, "step": 1}\n{"los')  # killed while it wrote
    assert not any("its log" in note for note in quick(folder).parts["Results"]["notes"])


def test_a_damaged_run_of_a_sweep_is_a_note(sweep: Path, tmp_path: Path, quick: Callable[..., Page]):
    folder = shutil.copytree(sweep, tmp_path / "sweep")
    (folder / "softmax/seed-0/result.json").write_bytes(b'{"status": "fin')
    page = quick(folder)
    (note,) = (note for note in page.parts["Results"]["notes"] if note.startswith("Damaged"))
    assert "softmax/seed-0/result.json, got a damaged file" in note
    assert "delete the file, and give the run's command again" in note
    assert [row[0] for row in page.parts["Results"]["tables"][0][1:]] == ["softmax", "MultiMax both"]


def test_models_that_cannot_be_shown(tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]):
    options = {"num_channels": 1, "embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1]}
    ResNetForImageClassification(ResNetConfig(**options)).save_pretrained(tmp_path / "resnet")
    for words in ([], ["--preset", "cpu-digits"]):
        said = refused(capsys, out, tmp_path / "resnet", *words)
        assert "expected softmax attention in ResNetForImageClassification, got none" in said
    folder = vit(tmp_path / "vit")
    digits = ["--preset", "cpu-digits"]
    config = json.loads((folder / "config.json").read_text())
    for named in (None, [], [1], "ViT", ["os"], ["PreTrainedModel"], ["AutoModel"], ["MyOwnModel"]):
        (folder / "config.json").write_text(json.dumps({**config, "architectures": named}))
        assert f"got architectures {named!r}" in refused(capsys, out, folder)
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 32}))
    assert "expected a model that transformers can load" in refused(capsys, out, folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    assert "got: Error no file named model.safetensors" in refused(capsys, out, folder)
    base = vit(tmp_path / "base", ViTModel)
    (base / "config.json").write_text(json.dumps({**config, "architectures": ["ViTForImageClassification"]}))
    said = refused(capsys, out, base)
    assert "expected all weights of ViTForImageClassification" in said
    assert "got none of classifier.bias, classifier.weight" in said
    said = refused(capsys, out, vit(tmp_path / "rgb", num_channels=3), *digits)
    assert "rgb' to take the data 'digits', got: Make sure that the channel dimension" in said
    said = refused(capsys, out, vit(tmp_path / "wide", image_size=[8, 16]), *digits)
    assert "wide' to take the data 'digits', got: Input image size" in said
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertForMaskedLM(BertConfig(vocab_size=50, **small)).save_pretrained(tmp_path / "bert")
    assert "bert' to take the data 'digits', got" in refused(capsys, out, tmp_path / "bert", *digits)
    said = refused(capsys, out, tmp_path / "bert", "--preset", "cpu-text")  # it has no tokenizer
    assert f"expected data of 'cpu-text' for the model in '{tmp_path / 'bert'}', got" in said


def test_wrong_options(runs: Runs, tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]):
    run, model = runs("softmax"), vit(tmp_path / "vit")
    assert "expected examples of at least 0, got -1" in refused(capsys, out, run, "--examples", "-1")
    said = refused(capsys, out, model, "--preset", "cpu-fashion", "--data", tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in said
    assert str(tmp_path / "nowhere") in refused(capsys, out, run, "--data", tmp_path / "nowhere")
    assert "expected --preset beside --data" in refused(capsys, out, model, "--data", "digits")
    assert "expected a preset out of" in refused(capsys, out, model, "--preset", "nope")
    assert "expected a saved model beside --preset, got none" in refused(capsys, out, run, "--preset", "cpu-digits")
    assert "expected a sweep beside --seed, got none" in refused(capsys, out, run, "--seed", "1")
    with pytest.raises(TypeError, match="multimax: expected a list of paths, got 'run'; put it into one"):
        report("run", out)
    with pytest.raises(ValueError, match="multimax: expected at least one run"):
        report([], out)


def test_places_that_a_report_is_not_written_to(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = runs("softmax")
    said = refused(capsys, tmp_path / "nowhere/report.html", run)
    assert f"expected a folder {tmp_path / 'nowhere'} to write report.html to, got none; make it" in said
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "folder").mkdir()
    assert "expected a file to write the report to, got the folder" in refused(capsys, tmp_path / "folder", run)
    other = tmp_path / "thesis.html"
    other.write_text("<!DOCTYPE html><title>my thesis</title>")
    said = refused(capsys, other, run)
    assert f"expected {other} to be new or a report, got another file, which stays as it is" in said
    assert other.read_text() == "<!DOCTYPE html><title>my thesis</title>"


def test_a_report_is_written_over_and_nothing_is_left_beside_it(runs: Runs, out: Path, quick: Callable[..., Page]):
    del quick  # its pictures are enough
    for _ in range(2):
        assert cli.main(["report", str(runs("softmax")), "--out", str(out), "--examples", "0", "--quiet"]) == 0
    assert {file.name for file in out.parent.iterdir()} == {"beside.txt", "report.html"}


# ---- labels that may be anything ----

HOSTILE = [
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>&amp;&lt;",
    r"costs $\nope$ more",
    "_hidden",
    "_hidden too",
    "x" * 300 + " " + "y" * 300,
    "x" * 300 + " " + "z" * 300,
    "--> <!-- ]]>",
]


@pytest.fixture(scope="module")
def hostile(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run under labels of all kinds."""
    folder = tmp_path_factory.mktemp("hostile <b>&")
    paths = []
    for number, label in enumerate(HOSTILE):
        run = shutil.copytree(runs("MultiMax both", **BOTH), folder / f"{number}")
        config = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps({**config, "label": label, "about": label}))
        paths.append(run)
    return report(paths, folder / "report.html", examples=0, progress=False)


def test_labels_are_text(hostile: Path):
    page = Page(hostile)
    assert not {"script", "b"} & page.tags
    assert [row[0] for row in page.parts["Results"]["tables"][0][1:]] == HOSTILE
    assert page.text.count("<img ") == len(page.figures)
    assert len(set(page.ids)) == len(page.ids)
    assert {f"Learned sigma: {label}" for label in HOSTILE} < set(page.figures)


# ---- in the browser ----


@pytest.fixture
def opened(browser: Any) -> Any:  # noqa: F811
    context = browser.new_context(viewport={"width": 1100, "height": 900}, offline=True)
    watched = Watched(context.new_page())
    yield watched
    context.close()
    assert watched.said == []
    assert watched.failed == []
    assert [url for url in watched.requests if not url.startswith(("file:", "data:", "about:"))] == []


@pytest.mark.parametrize("name", ["whole", "hostile"])
def test_the_page_in_a_browser(name: str, opened: Watched, request: pytest.FixtureRequest):
    file: Path = request.getfixturevalue(name)
    page = opened.open(file.as_uri())
    pictures = page.evaluate(
        "[...document.images].map(image => [image.complete, image.naturalWidth, image.naturalHeight])"
    )
    assert len(pictures) == len(Page(file).figures)
    assert all(complete and width > 100 and height > 100 for complete, width, height in pictures)
    lost = "[...document.querySelectorAll('nav a')].filter(link => !document.querySelector(link.getAttribute('href')))"
    assert page.evaluate("document.querySelectorAll('nav a').length") > 10
    assert page.evaluate(f"{lost}.length") == 0
    assert page.evaluate("document.title") == "MultiMax report"
    for width in (1100, 390):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") == width


def test_dark_and_narrow(opened: Watched, whole: Path):
    page = opened.open(whole.as_uri())
    colours = (
        "['color', 'backgroundColor'].map(name => getComputedStyle(document.body)[name].match(/\\d+/g).map(Number))"
    )
    light = page.evaluate(colours)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(colours)
    assert min(light[1]) == 255
    assert max(light[0]) < 60
    assert max(dark[1]) < 40
    assert min(dark[0]) > 200
    page.emulate_media(media="print")  # paper is white
    assert min(page.evaluate(colours)[1]) == 255
    page.emulate_media(media="screen", color_scheme="light")
    # on a telephone figures keep their size, so that their text can be read, and are moved sideways
    page.set_viewport_size({"width": 390, "height": 844})
    shown = page.evaluate(
        "[...document.images].map(i => [i.clientWidth / i.naturalWidth, i.parentElement.clientWidth])"
    )
    assert all(scale == pytest.approx(1, abs=0.02) for scale, _ in shown)
    assert all(width <= 390 for _, width in shown)


def test_a_link_of_the_contents_leads_to_its_part(opened: Watched, whole: Path):
    page = opened.open(whole.as_uri())
    page.click("nav >> text=Grad-CAM")
    top = page.evaluate("document.querySelector(location.hash).getBoundingClientRect().top")
    assert -1 <= top < 900
    assert page.evaluate("document.querySelector(location.hash).textContent").strip().startswith("Grad-CAM")


def test_print(opened: Watched, whole: Path, tmp_path: Path):
    page = opened.open(whole.as_uri())
    pdf = page.pdf(format="A4")
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) > 3
    # as it is laid out on A4 paper with the page's margins: the title and the results are on the first sheet
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 680, "height": 1009})
    assert page.evaluate("document.querySelector('h1').getBoundingClientRect().top") < 100
    assert page.evaluate("document.querySelector('table').getBoundingClientRect().top") < 700
    assert page.evaluate("document.documentElement.scrollWidth") == 680
    tall = "[...document.querySelectorAll('figure')].filter(figure => figure.getBoundingClientRect().height > 1009)"
    assert page.evaluate(f"{tall}.map(figure => figure.id)") == []


def test_a_tall_picture_fits_on_a_sheet(opened: Watched, tmp_path: Path):
    svg = b'<svg xmlns="http://www.w3.org/2000/svg" width="600" height="3000"><rect width="600" height="3000"/></svg>'
    figure = html.figure("tall", "tall", "words " * 60, "a bar", svg)
    (tmp_path / "tall.html").write_text(html.page("tall", [html.Section("part", "part", figure, [])], ""))
    page = opened.open((tmp_path / "tall.html").as_uri())
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 702, "height": 941})  # letter, without the margins
    assert page.evaluate("document.querySelector('figure').getBoundingClientRect().height") <= 941
    shape = page.evaluate("[document.images[0].clientWidth, document.images[0].clientHeight]")
    assert shape[1] == pytest.approx(5 * shape[0], abs=5)
