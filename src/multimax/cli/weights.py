"""`multimax weights`: softmax next to MultiMax with the parameters that the paper's models learned."""

import argparse
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multimax import metrics, reweighting
from multimax.ops.parameters import from_paper
from multimax.ops.presets import presets
from multimax.ops.rows.api import multimax


class Example(NamedTuple):
    """Scores as one query sees them, and the threshold above which an entry is relevant."""

    scores: list[float]
    threshold: float


EXAMPLES = {
    "two modes over noise": Example([2.4, 2.0, 0.3, 0.0, -0.2, -0.6, -1.0, -2.0], 1.0),
    "one mode": Example([2.5, 0.4, 0.2, 0.0, -0.3, -0.8, -1.2, -1.6], 0.3),
    "three modes, far below the rest": Example([3.0, 2.7, 2.4, -2.0, -2.2, -2.5, -3.0, -4.0], 0.0),
}
TABLES = {
    "deit_small": "DeiT-small on ImageNet-1k, 12 attention layers",
    "wikitext103_lm": "language model on WikiText-103, 6 attention layers",
}
OTHERS = {"sparsemax": "sparsemax", "entmax-1.5": "entmax15", "Ev-SoftMax": "evsoftmax"}
SHADES = " .:-=+*#%@"


def add(commands: Any) -> None:
    """Adds the subcommand."""
    text = "compare softmax and others with MultiMax, with the parameters that the paper's models learned"
    command = commands.add_parser("weights", help=text, description=text[0].upper() + text[1:] + ".")
    command.set_defaults(function=weights)


def _line(label: str, x: Tensor, weights: Tensor, threshold: float) -> str:
    modality = metrics.multi_modality(x, weights, threshold=threshold).item()
    sparsity = metrics.sparsity(x, weights, threshold=threshold).item()
    # one shade per entry, by its square root: the small weights are the interesting ones
    shades = "".join(SHADES[min(int(weight**0.5 * len(SHADES)), len(SHADES) - 1)] for weight in weights.tolist())
    values = " ".join(f"{weight:.3f}" for weight in weights.tolist())
    return f"  {label:<10} {modality:6.3f} {sparsity:6.3f}  |{shades}|  {values}"


def weights(_: argparse.Namespace) -> None:
    """Prints the weights for some vectors of scores."""
    print("M is the paper's multi-modality (how close the relevant entries come to the largest), S its sparsity (how")
    print(
        "close the irrelevant ones come to zero); both are better when larger. The weights follow, shaded and printed."
    )
    for title, (scores, threshold) in EXAMPLES.items():
        x = torch.tensor(scores)
        print(f"\n{title}: x = {scores}, relevant above {threshold}")
        for name, model in TABLES.items():
            print(f"\n  {model}\n  {'':<10} {'M':>6} {'S':>6}")
            print(_line("softmax", x, torch.softmax(x, -1), threshold))
            for label, function in OTHERS.items():
                print(_line(label, x, reweighting.get(function)(x), threshold))
            for layer, parameters in enumerate(presets[name], start=1):
                print(_line(f"layer {layer}", x, multimax(x, *from_paper(*parameters)), threshold))
    print("\nNot every layer is better in both: the paper's models learned what each layer needs (docs/theory.md).")
