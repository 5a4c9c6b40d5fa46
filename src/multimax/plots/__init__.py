"""Figures: each function takes numbers, or a model, and returns a matplotlib figure. Needs the extra ``plots``.

The figures are made without pyplot: nothing global is changed, and nothing has to be closed.
"""

from multimax.plots.attention import attention_maps, attention_of
from multimax.plots.by_layer import patch_similarity, rollout_discrepancy
from multimax.plots.function_comparisons import simplex, trade_off, two_entries
from multimax.plots.grad_cam import class_activation, grad_cam
from multimax.plots.histograms import attention_histograms, cumulative_attention
from multimax.plots.logs import by_epoch, read_metrics
from multimax.plots.paper import paper_figures
from multimax.plots.sigma import learned_sigma
from multimax.plots.style import COLOURS, save
from multimax.plots.training import training_curves

__all__ = [
    "COLOURS",
    "attention_histograms",
    "attention_maps",
    "attention_of",
    "by_epoch",
    "class_activation",
    "cumulative_attention",
    "grad_cam",
    "learned_sigma",
    "paper_figures",
    "patch_similarity",
    "read_metrics",
    "rollout_discrepancy",
    "save",
    "simplex",
    "trade_off",
    "training_curves",
    "two_entries",
]
