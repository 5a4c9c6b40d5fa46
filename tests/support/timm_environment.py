"""timm for the tests, from a folder of its own.

timm needs torchvision, and a torchvision without its operators breaks every library that looks for it: it must not be
where the other tests can import it. ``make test`` puts both into the folder; the tests of timm run in a process of
their own (test_convert_timm.py), with this file as a plugin of pytest, and only there is the folder on the path.
"""

import importlib
import sys
from pathlib import Path

import torch

FOLDER = Path(sys.prefix) / "timm"
# What torchvision registers something for as it is imported.
OPERATORS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def load() -> None:
    """Imports timm. Wheels of torchvision for CUDA have no operators without it: then these are declared, and empty."""
    sys.path.append(str(FOLDER))  # at the end: nothing that is installed is hidden by what else is there
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "does not exist" not in str(error):
            raise
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name, signature in OPERATORS.items():
            torch.library.define(f"torchvision::{name}", signature)
    importlib.import_module("timm")


def pytest_configure() -> None:
    """As a plugin: before any test is imported."""
    load()
