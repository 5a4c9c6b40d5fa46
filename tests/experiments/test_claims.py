"""What the documents say in words about results and presets."""

import json
import re
from typing import Any

import pytest
import transformers

from multimax.experiments.settings import preset
from places import ROOT

RESULTS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
EXPERIMENTS = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
IMAGENET = 1_281_167


def words(text: str) -> str:
    return " ".join(text.split())


def images_seen(name: str, images: int) -> int:
    return images * int(preset(name).trainer["num_train_epochs"])


def numbers_of(name: str) -> Any:
    return json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def learned(name: str, label: str) -> dict[str, dict[str, list[float]]]:
    """By layer and symbol: means over the seeds."""
    runs = [run["result"]["parameters"] for run in numbers_of(name)["runs"] if run["label"] == label]
    assert len(runs) > 1
    return {
        layer: {
            symbol: [sum(values) / len(runs) for values in zip(*(run[layer][symbol] for run in runs), strict=True)]
            for symbol in ("t_b", "t_d")
        }
        for layer in runs[0]
    }


def test_how_many_more_images_the_papers_models_saw() -> None:
    paper = images_seen("paper-deit-small", IMAGENET)
    found = re.search(r"saw ([\d,]+) times as many images .* and ([\d,]+) times as many", words(RESULTS))
    assert found is not None
    said = [int(number.replace(",", "")) for number in found.groups()]
    for times, small in zip(said, (images_seen("cpu-fashion", 60_000), images_seen("cpu-digits", 1_347)), strict=True):
        assert times == pytest.approx(paper / small, rel=0.01)
    assert "thousands of times" not in words(RESULTS)


def test_how_much_larger_the_papers_models_are() -> None:
    found = re.search(
        r"([\d]+) times as many parameters for images, (\d+) times for language and (\d+) times", words(RESULTS)
    )
    assert found is not None
    millions = (22, 156, 37)  # as docs/experiments.md has them
    for times, paper, name in zip(found.groups(), millions, ("fashion", "wikitext2", "multi30k"), strict=True):
        assert f"{paper}" in EXPERIMENTS
        small = numbers_of(name)["runs"][0]["result"]["model_parameters"]
        assert int(times) == pytest.approx(paper * 1e6 / small, rel=0.02)


def test_which_slopes_are_below_1_in_translation() -> None:
    above = {
        (layer, symbol, n + 1): value
        for layer, symbols in learned("multi30k", "MultiMax both").items()
        for symbol, values in symbols.items()
        for n, value in enumerate(values)
        if "lm_head" not in layer and value >= 1
    }
    ((layer, symbol, n), value), *others = above.items()
    assert not others
    assert (symbol, n) == ("t_b", 2)
    assert re.search(r"encoder\.layers\.1\b", layer), layer
    assert f"but for t_b2 of the second encoder layer, {value:.2f} on average" in words(RESULTS)


def test_where_top_k_and_attnscale_stand() -> None:
    text = words(EXPERIMENTS)
    assert "Table 2 of the paper ticks top-k and AttnScale under *output*, which seems to be a slip" in text
    table = json.loads((ROOT / "src/multimax/experiments/tables/comparison.json").read_text())
    methods = {label: set(settings) for label, settings in table["methods"].items()}
    for label in ("top-k", "AttnScale"):
        assert "attention" in methods[label]
        assert "output" not in methods[label]


def test_the_initial_values_are_not_called_the_papers() -> None:
    """It names none; the published code has them."""
    assert "`paper`, the initial values of the published code" in words(EXPERIMENTS)
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        assert not re.search(r"paper's initiali[sz]ation", path.read_text(encoding="utf-8")), path


def test_how_presets_differ_from_fairseq() -> None:
    text = words(EXPERIMENTS)
    translation, language, images = (
        preset(name) for name in ("paper-iwslt14", "paper-wikitext103", "paper-deit-small")
    )
    assert transformers.MarianConfig(**translation.model).init_std == 0.02
    assert "All weights are drawn with a standard deviation of 0.02" in text
    assert translation.trainer["load_best_model_at_end"]
    assert translation.trainer["metric_for_best_model"] == "loss"
    assert (
        "the best validation loss, checked every 1,000 of 50,000 steps; fairseq's recipe in its later versions" in text
    )
    assert (translation.trainer["eval_steps"], translation.trainer["max_steps"]) == (1_000, 50_000)
    assert "load_best_model_at_end" not in language.trainer
    assert "of the last model, in windows that overlap by one token; fairseq's recipe takes" in text
    assert "(here `--stride 112`)" in text
    assert language.length - 112 == 400
    assert text.count("Biases and layer norms are not decayed; fairseq decays all parameters") == 2
    epoch = IMAGENET // 1_024
    assert images.trainer["warmup_steps"] == 5 * epoch
    assert "takes the 295 epochs that are left; DeiT's takes all 300, of which the warm-up covers the first 5" in text
