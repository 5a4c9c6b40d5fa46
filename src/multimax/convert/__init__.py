"""Another function instead of softmax in existing models: torch.nn, transformers and timm."""

from multimax.convert.adapters import load_adapter
from multimax.convert.conversion import convert_, revert_
from multimax.convert.report import Layer, Report
from multimax.convert.transformers.pretrained import from_pretrained

__all__ = ["Layer", "Report", "convert_", "from_pretrained", "load_adapter", "revert_"]
