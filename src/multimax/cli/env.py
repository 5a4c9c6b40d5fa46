"""`multimax env`: what an error report should say."""

import argparse
import platform
import sys
import textwrap
from typing import Any

import torch

from multimax import __version__
from multimax.cli import layout
from multimax.ops import kernels
from multimax.ops.probe import bfloat16_products


def add(commands: Any) -> None:
    """Adds the subcommand."""
    command = layout.command(commands, "env", "versions and kernels on this machine, for an error report")
    command.set_defaults(function=env)


def env(_: argparse.Namespace) -> None:
    """Prints it, one line each."""
    loaded = kernels.unavailable or (
        f"loaded, using {kernels.use_isa()}; set {kernels.ISA_VARIABLE} to force one of {', '.join(kernels.ISAS)}"
    )
    for name, value in {
        "multimax": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "cpu kernels": loaded,
        "bf16 products": bfloat16_products(),
    }.items():
        print(textwrap.fill(f"{name + ':':<13} {value}", 80, subsequent_indent=" " * 14, break_on_hyphens=False))
