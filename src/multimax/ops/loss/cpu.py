"""The losses by the compiled kernels: the sums of each row, and the gradients that follow from them."""

import torch
from torch import Tensor

from multimax.ops import dtypes, kernels
from multimax.ops.layout import contiguous_rows
from multimax.ops.loss.autograd import loss as run
from multimax.ops.loss.autograd import unable
from multimax.ops.loss.call import KernelCall, LinearLossCall, Logits, LossCall
from multimax.ops.loss.sums import is_indices

__all__ = ["NAME", "gradients", "run", "sums", "why_not"]

NAME = "cpu"


def why_not(call: LossCall | LinearLossCall) -> str | None:
    """Why the kernels cannot run this call."""
    return kernels.why_not(call.target.device, unable(call.target))


def _kernel_call(logits: Logits) -> KernelCall:
    """The call in the form that the compiled library takes."""
    x, target, setting = logits.x, logits.target, logits.setting
    indices = probabilities = None
    if is_indices(target):
        indices = target.contiguous()
    else:
        probabilities = contiguous_rows(target)
        if probabilities.dtype not in (x.dtype, dtypes.compute_dtype(x.dtype)):
            probabilities = probabilities.to(dtypes.compute_dtype(x.dtype))
    return KernelCall(
        x,
        indices,
        probabilities,
        logits.coefs,
        logits.knots,
        logits.weight(),
        smoothing=setting.smoothing,
        total_classes=setting.classes or x.shape[1],
        first_class=setting.first_class,
        ignore_index=setting.ignore_index,
    )


def sums(logits: Logits) -> Tensor:
    """The seven planes of csrc/loss/loss.h, (7, R) in float64."""
    result: Tensor = torch.ops.multimax.loss_forward.default(*_kernel_call(logits), logits.setting.full)
    return result


def gradients(
    logits: Logits, sums: Tensor, scale: Tensor, p_scale: Tensor, params_grad: bool, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Writes the gradient of x to out, which may be x; returns the gradients of coefs and knots in float64.

    The gradient of s is p_scale p - scale q, with one scale of each for every row.
    """
    result: tuple[Tensor, Tensor] = torch.ops.multimax.loss_backward.default(
        *_kernel_call(logits),
        sums.contiguous(),
        scale.double().contiguous(),
        p_scale.double().contiguous(),
        params_grad,
        out,
    )
    return result
