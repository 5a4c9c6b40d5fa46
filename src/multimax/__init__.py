"""MultiMax: softmax over a learned, piece-wise modulated input, sparse and multi-modal at once."""

from importlib.metadata import version as _version
from typing import TYPE_CHECKING

from multimax import metrics, oversmoothing, reweighting
from multimax.attention import merge_attention, multimax_attention, multimax_attention_varlen
from multimax.convert import convert_, from_pretrained, revert_
from multimax.counting import count
from multimax.distributions import MultiMaxCategorical, gumbel_multimax
from multimax.functional import log_multimax, modulate, multimax
from multimax.loss_modules import LinearMultiMaxCrossEntropyLoss, MultiMaxCrossEntropyLoss, MultiMaxHead
from multimax.losses import LossStats, linear_multimax_cross_entropy, multimax_cross_entropy
from multimax.modules import MultiMax
from multimax.monitoring import Monitor
from multimax.multihead import MultiheadAttention
from multimax.parameters import from_paper, from_published, to_paper
from multimax.presets import presets
from multimax.training import clip_grad_norm_, param_groups, reweighting_parameters, train_only_reweighting_

if TYPE_CHECKING:  # else only when it is asked for
    from multimax.trainer_callback import MultiMaxCallback as MultiMaxCallback

__version__ = _version("multimax")

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
    "linear_multimax_cross_entropy",
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
        from multimax.trainer_callback import MultiMaxCallback

        return MultiMaxCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
