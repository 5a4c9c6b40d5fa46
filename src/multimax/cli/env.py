"""`multimax env`: what an error report should say."""

import argparse
import platform
import sys
from typing import Any

import torch

from multimax import __version__
from multimax.ops import kernels
from multimax.ops.probe import bfloat16_products


def add(commands: Any) -> None:
    """Adds the subcommand."""
    text = "versions and kernels on this machine, for an error report"
    command = commands.add_parser("env", help=text, description=text[0].upper() + text[1:] + ".")
    command.set_defaults(function=env)


def env(_: argparse.Namespace) -> None:
    """Prints it, one line each."""
    loaded = kernels.unavailable or (
        f"loaded, using {kernels.use_isa()}; set {kernels.ISA_VARIABLE} to force one of {kernels.ISAS}"
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
        print(f"{name + ':':<13} {value}")
