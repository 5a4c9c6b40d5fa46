"""MultiMax: softmax over a learned, piece-wise modulated input, sparse and multi-modal at once."""

import sys as _sys
from importlib.metadata import version as _version
from typing import TYPE_CHECKING

from multimax import metrics, reweighting
from multimax.convert import convert_, from_pretrained, load_adapter, revert_
from multimax.metrics.counting import count
from multimax.nn.multihead import MultiheadAttention
from multimax.nn.output import LinearMultiMaxCrossEntropyLoss, MultiMaxCrossEntropyLoss, MultiMaxHead
from multimax.ops.attention.api import merge_attention, multimax_attention, multimax_attention_varlen
from multimax.ops.dispatch import implementation
from multimax.ops.loss.api import LossStats, linear_multimax_cross_entropy, multimax_cross_entropy
from multimax.ops.parameters import from_paper, from_published, to_paper
from multimax.ops.presets import presets
from multimax.ops.rows.api import log_multimax, modulate, multimax
from multimax.ops.rows.distributions import MultiMaxCategorical, gumbel_multimax
from multimax.reweighting.layer import MultiMax
from multimax.training import oversmoothing
from multimax.training.groups import clip_grad_norm_, param_groups, reweighting_parameters, train_only_reweighting_
from multimax.training.monitor import Monitor

if TYPE_CHECKING:  # else only when it is asked for
    from multimax.training.callback import MultiMaxCallback as MultiMaxCallback

__version__ = _version("multimax")
_sys.modules[f"{__name__}.oversmoothing"] = oversmoothing  # `from multimax.oversmoothing import AttnScale` works too

__all__ = [
    "LinearMultiMaxCrossEntropyLoss",
    "LossStats",
    "Monitor",
    "MultiMax",
    "MultiMaxCategorical",
    "MultiMaxCrossEntropyLoss",
    "MultiMaxHead",
    "MultiheadAttention",
    "__version__",
    "clip_grad_norm_",
    "convert_",
    "count",
    "from_paper",
    "from_pretrained",
    "from_published",
    "gumbel_multimax",
    "implementation",
    "linear_multimax_cross_entropy",
    "load_adapter",
    "log_multimax",
    "merge_attention",
    "metrics",
    "modulate",
    "multimax",
    "multimax_attention",
    "multimax_attention_varlen",
    "multimax_cross_entropy",
    "oversmoothing",
    "param_groups",
    "presets",
    "revert_",
    "reweighting",
    "reweighting_parameters",
    "to_paper",
    "train_only_reweighting_",
]


def __getattr__(name: str) -> object:
    """The callback, when it is asked for: it needs transformers, and nothing else here does."""
    if name == "MultiMaxCallback":
        from multimax.training.callback import MultiMaxCallback

        return MultiMaxCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
