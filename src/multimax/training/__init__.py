"""Training: parameter groups, clipping, the monitor, and remedies against over-smoothing."""

from multimax.training.groups import (
    MODES,
    TrainOnly,
    clip_grad_norm_,
    param_groups,
    reweighting_modules,
    reweighting_parameters,
    train_only_reweighting_,
)
from multimax.training.monitor import Monitor

__all__ = [
    "MODES",
    "Monitor",
    "TrainOnly",
    "clip_grad_norm_",
    "param_groups",
    "reweighting_modules",
    "reweighting_parameters",
    "train_only_reweighting_",
]
