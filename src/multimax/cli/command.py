"""The command `multimax`."""

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from multimax import __version__, metrics, reweighting
from multimax.experiments.commands import Refused, add_commands
from multimax.ops import kernels as ops
from multimax.ops.parameters import from_paper
from multimax.ops.presets import presets
from multimax.ops.rows.api import multimax
from multimax.plots.explorer import add_command as add_explore

# Scores as one query sees them: what each vector is about, and the threshold above which an entry is relevant.
EXAMPLES: dict[str, tuple[list[float], float]] = {
    "two modes over noise": ([2.4, 2.0, 0.3, 0.0, -0.2, -0.6, -1.0, -2.0], 1.0),
    "one mode": ([2.5, 0.4, 0.2, 0.0, -0.3, -0.8, -1.2, -1.6], 0.3),
    "three modes, far below the rest": ([3.0, 2.7, 2.4, -2.0, -2.2, -2.5, -3.0, -4.0], 0.0),
}
TABLES = {
    "deit_small": "DeiT-small on ImageNet-1k, 12 attention layers",
    "wikitext103_lm": "language model on WikiText-103, 6 attention layers",
}
OTHERS = {"sparsemax": "sparsemax", "entmax-1.5": "entmax15", "Ev-SoftMax": "evsoftmax"}
SHADES = " .:-=+*#%@"


def _line(label: str, x: Tensor, weights: Tensor, threshold: float) -> str:
    modality = metrics.multi_modality(x, weights, threshold=threshold).item()
    sparsity = metrics.sparsity(x, weights, threshold=threshold).item()
    # a shade for each entry, on a scale of its square root: small weights are what it is about
    shades = "".join(SHADES[min(int(weight**0.5 * len(SHADES)), len(SHADES) - 1)] for weight in weights.tolist())
    values = " ".join(f"{weight:.3f}" for weight in weights.tolist())
    return f"  {label:<10} {modality:6.3f} {sparsity:6.3f}  |{shades}|  {values}"


def weights(_: argparse.Namespace) -> None:
    """Softmax beside MultiMax with the parameters that the paper's models learned."""
    print("M is the paper's multi-modality (how close the relevant entries come to the largest), S its sparsity (how")
    print(
        "close the irrelevant ones come to zero); both are better when larger. The weights follow, shaded and printed."
    )
    for example, (values, threshold) in EXAMPLES.items():
        x = torch.tensor(values)
        print(f"\n{example}: x = {values}, relevant above {threshold}")
        for name, title in TABLES.items():
            print(f"\n  {title}\n  {'':<10} {'M':>6} {'S':>6}")
            print(_line("softmax", x, torch.softmax(x, -1), threshold))
            for label, function in OTHERS.items():
                print(_line(label, x, reweighting.get(function)(x), threshold))
            for layer, parameters in enumerate(presets[name], start=1):
                print(_line(f"layer {layer}", x, multimax(x, *from_paper(*parameters)), threshold))
    print("\nNot every layer is better in both: the paper's models learned what each layer needs (docs/theory.md).")


def env(_: argparse.Namespace) -> None:
    """What an error report should say."""
    kernels = ops.unavailable or f"loaded, using {ops.use_isa()}; set {ops.ISA_VARIABLE} to force one of {ops.ISAS}"
    for name, value in {
        "multimax": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "cpu kernels": kernels,
    }.items():
        print(f"{name + ':':<13} {value}")


def figures(options: argparse.Namespace) -> None:
    """The paper's figures that its own parameters draw."""
    from multimax import plots

    try:
        options.out.mkdir(parents=True, exist_ok=True)
        for name, figure in plots.paper_figures():
            file = options.out / f"{name}.{options.format}"
            plots.save(figure, file)
            print(file)
    except ImportError as error:
        raise Refused(str(error)) from error
    except OSError as error:
        raise Refused(f"multimax: expected a folder to write figures to, got {str(options.out)!r}: {error}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="multimax",
        description="MultiMax: softmax over a learned, piece-wise modulated input, sparse and multi-modal at once.",
        epilog="examples:  multimax demo    multimax train vision    multimax COMMAND --help",
    )
    parser.add_argument("--version", action="version", version=f"multimax {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, function, text in (
        ("weights", weights, "softmax and others beside MultiMax, with the parameters that the paper's models learned"),
        ("env", env, "versions and kernels on this machine, for an error report"),
    ):
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.set_defaults(function=function)
    text = "draw the paper's figures that its own parameters draw: simplex, trade-off, two entries, sigma by layer"
    command = commands.add_parser("figures", help=text, description=text[0].upper() + text[1:] + ".")
    command.add_argument("--out", type=Path, default=Path("figures"), help="folder for them, figures unless given")
    command.add_argument("--format", choices=("png", "svg", "pdf"), default="png", help="png unless given")
    command.set_defaults(function=figures)
    add_commands(commands)
    add_explore(commands)
    options = parser.parse_args(arguments)
    try:
        code: int | None = options.function(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except KeyboardInterrupt:
        print(
            "\nmultimax: interrupted; the same command goes on from the last checkpoint, if there is one",
            file=sys.stderr,
        )
        return 130
    except Refused as error:
        print(error, file=sys.stderr)
        return 1
    return code or 0


if __name__ == "__main__":
    sys.exit(main())
