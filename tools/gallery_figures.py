"""Draws the pictures of docs/gallery.md and of the README, all but those of `multimax figures`.

    multimax figures --out docs/figures --format svg
    multimax sweep main --preset cpu-digits --seeds 10 --out runs/digits
    python tools/gallery_figures.py runs/digits

They are of the runs of one seed, which is not chosen: the first.
"""

import argparse
from pathlib import Path

import torch

import multimax
from multimax import plots
from multimax.convert.observable import observable_attention
from multimax.experiments.report.models import load
from multimax.experiments.settings import CONFIG, Settings, read_json
from multimax.experiments.tasks.loading import task_of

ROOT = Path(__file__).parents[1]
METHODS = {"softmax": "softmax", "MultiMax": "multimax-both"}
EXAMPLES, PICTURES, QUERY, DIGIT = 400, 5, 6, 3


def draw(sweep: Path, out: Path, seed: int, ending: str = "svg") -> None:
    """Draws every figure of the gallery that comes from a sweep."""
    folders = {label: sweep / name / f"seed-{seed}" for label, name in METHODS.items()}
    logs = {label: plots.read_metrics(folder) for label, folder in folders.items()}
    models = {label: load(folder / "model") for label, folder in folders.items()}
    task = task_of(Settings(**read_json(folders["softmax"] / CONFIG)))
    chosen = [task.evaluation[i] for i in range(EXAMPLES)]
    pixels = torch.stack([example["pixel_values"] for example in chosen])
    labels = torch.tensor([int(example["labels"]) for example in chosen])

    statistics = {}
    for label, model in models.items():
        with (
            torch.no_grad(),
            observable_attention(model),
            multimax.metrics.collect(model, ("histogram", "rollout_discrepancy")) as found,
        ):
            model(pixel_values=pixels)
        statistics[label] = found
    weights = {label: list(plots.attention_of(model, pixels[DIGIT][None]).values()) for label, model in models.items()}
    attention = {f"layer {n}": {label: found[n - 1] for label, found in weights.items()} for n in (1, 4)}
    cams = {label: plots.class_activation(model, pixels[:PICTURES]) for label, model in models.items()}
    figures = {
        "patch-similarity": plots.patch_similarity(logs),
        "histograms": plots.attention_histograms(statistics, columns=2),
        "cumulative": plots.cumulative_attention(statistics, columns=2),
        "attention-maps": plots.attention_maps(pixels[DIGIT], attention, query=QUERY),
        "rollout": plots.rollout_discrepancy(statistics),
        "grad-cam": plots.grad_cam(pixels[:PICTURES], cams),
        "training": plots.training_curves({"MultiMax": logs["MultiMax"]}),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        plots.save(figure, out / f"{name}.{ending}")
    with torch.no_grad():
        said = {label: model(pixel_values=pixels).logits.argmax(-1) for label, model in models.items()}
    for label, found in said.items():
        right = (found == labels).float().mean().item()
        print(
            f"{label}: takes the digits {labels[:PICTURES].tolist()} for {found[:PICTURES].tolist()}, {right:.1%} right"
        )
    print(f"attention of a {labels[DIGIT]}: {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", default="svg")
    options = parser.parse_args()
    draw(options.sweep, options.out, options.seed, options.format)
