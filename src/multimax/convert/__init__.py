"""Another function in the place of softmax in the models people have: torch.nn, transformers and timm."""

from multimax.convert.conversion import convert_, revert_
from multimax.convert.pretrained import from_pretrained
from multimax.convert.report import Layer, Report

__all__ = ["Layer", "Report", "convert_", "from_pretrained", "revert_"]
