"""The paper's measures, of weights and of features, and the collector that takes them from every attention layer."""

from multimax.metrics.collect import MEASURES, collect
from multimax.metrics.features import mean_average_distance, patch_similarity
from multimax.metrics.histogram import LogHistogram
from multimax.metrics.monotonicity import least_slope
from multimax.metrics.rollout import Rollout, rollout, rollout_discrepancy
from multimax.metrics.statistics import AttentionStatistics, LayerStatistics, Moments
from multimax.metrics.weights import entropy, multi_modality, sparsity, support, top_mass

__all__ = [
    "MEASURES",
    "AttentionStatistics",
    "LayerStatistics",
    "LogHistogram",
    "Moments",
    "Rollout",
    "collect",
    "entropy",
    "least_slope",
    "mean_average_distance",
    "multi_modality",
    "patch_similarity",
    "rollout",
    "rollout_discrepancy",
    "sparsity",
    "support",
    "top_mass",
]
