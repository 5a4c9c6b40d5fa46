"""The products of a linear layer's loss: a chunk's logits, and the gradients that follow from theirs.

Shapes: R rows, C classes, D entries of a hidden state.
"""

import functools
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from multimax.ops import dtypes, kernels

BLOCK = 2**22  # bytes: what is made block by block, to be added or copied elsewhere, stays in the cache on its way
WORTH_IT = 2**24  # multiplications: below, oneDNN's preparations would show


@functools.cache
def _mkl_is_held_back() -> bool:
    """Whether this is a processor with AVX-512 on which MKL uses AVX2: one of AMD's."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    if not torch.backends.mkl.is_available() or not torch.backends.mkldnn.is_available():
        return False
    try:
        processor = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return False
    return "AuthenticAMD" in processor and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _by_onednn(a: Tensor, b: Tensor) -> bool:
    """Whether a b takes oneDNN, which has AVX-512 everywhere. Half precision is oneDNN's anyway."""
    return (
        a.dtype == torch.float32
        and a.device.type == "cpu"
        and a.shape[0] * b.numel() >= WORTH_IT
        and bool(torch.backends.mkldnn.enabled)
        and _mkl_is_held_back()
    )


def _onednn(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """A b + bias; torch has no public function for it. b is to have contiguous rows, or its transpose is."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(a, b.t(), bias, "none", [], "")
    return product


def _blocks(of: Tensor, entries: int) -> Iterator[slice]:
    """Slices of a tensor (C, ...) if so many entries are to be made for each class; other devices than the CPU get
    all classes at once, to be kept busy."""
    classes = of.shape[0]
    step = max(BLOCK // (max(entries, 1) * of.itemsize), 16) if of.device.type == "cpu" else max(classes, 1)
    for start in range(0, classes, step):
        yield slice(start, min(start + step, classes))


def make_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Out (R, C) = hidden (R, D) times the transpose of weight (C, D), + bias (C,)."""
    if _by_onednn(hidden, weight):
        for block in _blocks(weight, hidden.shape[0]):
            out[:, block] = _onednn(hidden, weight[block].t(), None if bias is None else bias[block])
    elif bias is None:
        torch.mm(hidden, weight.t(), out=out)
    else:
        torch.addmm(bias, hidden, weight.t(), out=out)


def _wide(a: Tensor, b: Tensor) -> Tensor:
    """A b to be scaled or added to in the compute dtype: float16 that does not reach as far is left for float32."""
    product = torch.mm(a, b)
    if product.dtype == torch.float16 and product.device.type == "cpu" and not product.isfinite().all():
        return torch.mm(a.float(), b.float())
    return product


def input_grad(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Out (R, D) = the logits' gradient x (R, C) times weight (C, D), in out's dtype."""
    if _by_onednn(x, weight):
        out.copy_(_onednn(x, weight))
    elif out.dtype == x.dtype:
        torch.mm(x, weight, out=out)
    else:
        out.copy_(_wide(x, weight))


def weight_grad(x: Tensor, hidden: Tensor, so_far: Tensor | None, only: bool) -> Tensor:
    """The product of the transpose of x (R, C), the logits' gradient, with hidden (R, D), added to what there is.

    It is summed in the compute dtype, unless this chunk is the only one, and then no more than a block of a chunk's
    product is there at once.
    """
    wide = dtypes.compute_dtype(x.dtype)
    onednn = _by_onednn(x.t(), hidden)
    if not onednn and only:
        return torch.mm(x.t(), hidden)
    if not onednn and x.dtype == wide and so_far is not None:
        return so_far.addmm_(x.t(), hidden)
    total = x.new_empty((x.shape[1], hidden.shape[1]), dtype=wide) if so_far is None else so_far
    for block in _blocks(x.t(), hidden.shape[1]):
        part = _onednn(x[:, block].t(), hidden) if onednn else _wide(x[:, block].t(), hidden)
        if so_far is None:
            total[block] = part
        elif x.device.type == "cpu" and kernels.unavailable is None:
            torch.ops.multimax.loss_add.default(total[block], part)  # torch would widen the part first, in memory
        else:
            total[block] += part
    return total
