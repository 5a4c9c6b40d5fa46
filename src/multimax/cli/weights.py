"""`multimax weights`: softmax next to MultiMax with the parameters that the paper's models learned."""

import argparse
import math
import textwrap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multimax import metrics, reweighting
from multimax.cli import layout
from multimax.cli.errors import Refused
from multimax.ops.parameters import from_paper
from multimax.ops.presets import PaperParameters, presets
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
WIDTH = 80
EXAMPLE = """

examples:
  multimax weights                          three inputs, all layers of both
  multimax weights 2.4 2.0 0.3 -1           your own scores
  multimax weights 3 2.9 0 --preset deit_small --layer 9
"""
ABOUT = """\
M is the paper's multi-modality (how close the relevant entries come to the largest), S its sparsity (how close the
irrelevant ones come to zero); both are better when larger. The weights follow, shaded and printed."""
END = """\
! marks rows in which the largest score does not get the largest weight: sigma falls on the way to it, and M says
nothing. Not every layer is better in both: the paper's models learned what each layer needs (docs/theory.md)."""


def add(commands: Any) -> None:
    """Adds the subcommand."""
    text = "compare softmax and others with MultiMax, with the parameters that the paper's models learned"
    command = layout.command(commands, "weights", text, f"{text[0].upper()}{text[1:]}.{EXAMPLE}")
    command.add_argument(
        "scores",
        nargs="*",
        type=float,
        metavar="SCORE",
        help="your own scores, two or more; three examples unless given",
    )
    command.add_argument("--preset", choices=tuple(TABLES), help="the paper's model; both unless given")
    command.add_argument("--layer", type=int, metavar="N", help="of the model, from 1; all unless given")
    command.add_argument(
        "--threshold",
        type=float,
        help="scores above it are relevant, for M and S; the mean of your scores unless given",
    )
    command.set_defaults(function=weights)


def _examples(options: argparse.Namespace) -> dict[str, Example]:
    """Scores by title."""
    if not options.scores:
        if options.threshold is not None:
            raise Refused("multimax: expected --threshold beside scores, got it without; give scores, or leave it out")
        return EXAMPLES
    if len(options.scores) < 2 or not all(map(math.isfinite, options.scores)):
        raise Refused(f"multimax: expected two or more finite scores, got {options.scores}")
    mean = sum(options.scores) / len(options.scores)
    return {"your scores": Example(options.scores, mean if options.threshold is None else options.threshold)}


def _layers(options: argparse.Namespace) -> dict[str, dict[int, PaperParameters]]:
    """Layers by number, of each model."""
    found = {}
    for name in TABLES if options.preset is None else (options.preset,):
        layers = dict(enumerate(presets[name], start=1))
        if options.layer is not None:
            layers = {number: layer for number, layer in layers.items() if number == options.layer}
        if layers:
            found[name] = layers
    if not found:
        most = max(len(presets[name]) for name in TABLES if options.preset in (None, name))
        raise Refused(f"multimax: expected --layer from 1 to {most}, got {options.layer}")
    return found


def _line(label: str, x: Tensor, weights: Tensor, threshold: float) -> str:
    measures = (
        metrics.multi_modality(x, weights, threshold=threshold).item(),
        metrics.sparsity(x, weights, threshold=threshold).item(),
    )
    both = " ".join("   -" if math.isnan(value) else f"{value:4.2f}" for value in measures)
    # one shade per entry, by its square root: the small weights are the interesting ones
    shades = "".join(SHADES[min(int(weight**0.5 * len(SHADES)), len(SHADES) - 1)] for weight in weights.tolist())
    values = [f"{weight:.3f}" for weight in weights.tolist()]
    falls = "!" if weights[x.argmax()] < weights.max() else " "
    start = f"{label:<10}{falls}{both} |{shades}|"
    if len(start) + 6 * len(values) <= WIDTH:
        return f"{start} {' '.join(values)}"
    return f"{start}\n{textwrap.fill(' '.join(values), WIDTH, initial_indent=' ' * 11, subsequent_indent=' ' * 11)}"


def weights(options: argparse.Namespace) -> None:
    """Prints the weights for some vectors of scores."""
    examples, models = _examples(options), _layers(options)
    print(textwrap.fill(ABOUT, WIDTH))
    for title, (scores, threshold) in examples.items():
        x = torch.tensor(scores)
        told = f"{title}: x = [{', '.join(f'{score:g}' for score in scores)}], relevant above {threshold:g}"
        print("\n" + textwrap.fill(told, WIDTH))
        for name, layers in models.items():
            print(f"\n{TABLES[name]}\n{'':<11}{'M':>4} {'S':>4}")
            print(_line("softmax", x, torch.softmax(x, -1), threshold))
            for label, function in OTHERS.items():
                print(_line(label, x, reweighting.get(function)(x), threshold))
            for layer, parameters in layers.items():
                print(_line(f"layer {layer}", x, multimax(x, *from_paper(*parameters)), threshold))
    print(f"\n{textwrap.fill(END, WIDTH)}")
