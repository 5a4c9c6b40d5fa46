"""The formulas of the paper, line by line, on any device and in any dtype: the oracle for every kernel.

Differentiable to any order. Arguments are not checked here; `api` checks them.

Shapes: x is (..., K, ...) with K entries along `dim`, S is x's shape without `dim`; coefs and knots are
(*lead, N, 2) with `lead` broadcasting against S; mask broadcasts against x.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from multimax.ops import dtypes, masking
from multimax.ops.operators import decompose, recorded, traced
from multimax.ops.rows.call import KINDS, RowsCall, fake_forward


def modulated(x: Tensor, coefs: Tensor, knots: Tensor) -> Tensor:
    """sigma(x), without a gradient where it overflows to -inf: the weight there is 0, and 0 * inf would be NaN."""
    if not traced(x, coefs, knots) and not recorded():  # what torch.jit records may need a gradient later
        return sigma(x, coefs, knots)
    with torch.no_grad():
        sunk = sigma(x, coefs, knots) == -torch.inf
    return torch.where(sunk, -torch.inf, sigma(torch.where(sunk, 0.0, x), coefs, knots))


def sigma(x: Tensor, coefs: Tensor, knots: Tensor) -> Tensor:
    """Equation 6, with coefs = (1 - t_b, t_d - 1) and knots = (b, d).

    Each term is multiplied out from its coefficient, (c u) u and not c (u^2): where the square would overflow, a zero
    coefficient still gives zero.
    """
    result = x  # (*S, K)
    for n in range(coefs.shape[-2]):
        lower = torch.relu(knots[..., n, 0, None] - x)  # (*S, K), Max(b - x, 0)
        upper = torch.relu(x - knots[..., n, 1, None])  # (*S, K), Max(x - d, 0)
        lower_term, upper_term = coefs[..., n, 0, None], coefs[..., n, 1, None]  # (*lead, 1)
        for _ in range(n + 1):
            lower_term, upper_term = lower_term * lower, upper_term * upper
        result = result + lower_term + upper_term
    return result


def _prepare(
    x: Tensor, coefs: Tensor, knots: Tensor, dim: int, mask: Tensor | None, formula: Callable[..., Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """With `dim` last and in the compute dtype: x, where it is masked, and sigma(x) by that formula."""
    dtype = dtypes.compute_dtype(x.dtype)
    masked = masking.masked(x)
    if mask is not None:
        masked = masked | ~mask
    x, masked = x.movedim(dim, -1), masked.movedim(dim, -1)
    # sigma of a masked entry is never taken: even its gradient could not be kept free of inf and NaN
    safe = torch.where(masked, 0.0, x.to(dtype))
    return x.to(dtype), masked, formula(safe, coefs.to(dtype), knots.to(dtype))


def modulate(x: Tensor, coefs: Tensor, knots: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """sigma(x); masked entries pass through unchanged and without gradient."""
    wide, masked, values = _prepare(x, coefs, knots, -1, None, sigma)
    return torch.where(masked, wide.detach(), values).to(dtype or x.dtype)


def _scores(x: Tensor, coefs: Tensor, knots: Tensor, dim: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """With `dim` last: sigma(x), -inf where masked, and what is masked. A row in which nothing is left is 0, to have a
    softmax without NaN, and masked as a whole."""
    _, masked, values = _prepare(x, coefs, knots, dim, mask, modulated)
    values = torch.where(masked, float("-inf"), values)
    empty = (values == -torch.inf).all(-1, keepdim=True)
    return torch.where(empty, 0.0, values), masked | empty


def multimax(
    x: Tensor,
    coefs: Tensor,
    knots: Tensor,
    *,
    dim: int = -1,
    mask: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """softmax(sigma(x)); masked entries, and rows without any others, are 0."""
    scores, masked = _scores(x, coefs, knots, dim, mask)
    weights = torch.where(masked, 0.0, torch.softmax(scores, -1))
    return weights.to(dtype or x.dtype).movedim(-1, dim)


def log_multimax(
    x: Tensor,
    coefs: Tensor,
    knots: Tensor,
    *,
    dim: int = -1,
    mask: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """log softmax(sigma(x)); masked entries, and rows without any others, are -inf."""
    scores, masked = _scores(x, coefs, knots, dim, mask)
    return torch.where(masked, float("-inf"), torch.log_softmax(scores, -1)).to(dtype or x.dtype).movedim(-1, dim)


def scores(x: Tensor, coefs: Tensor, knots: Tensor) -> tuple[Tensor, Tensor]:
    """Which entries are masked, and sigma(x), -inf there."""
    _, masked, values = _prepare(x, coefs, knots, -1, None, modulated)
    return masked, torch.where(masked, float("-inf"), values)


def why_not(call: RowsCall) -> str | None:
    """The formulas can run any call."""
    return None


def _of_kind(call: RowsCall, dtype: torch.dtype) -> Tensor:
    """The row function of that kind, in that dtype."""
    if KINDS[call.kind] == "modulate":
        return modulate(call.x, call.coefs, call.knots, dtype=dtype)
    function = multimax if KINDS[call.kind] == "multimax" else log_multimax
    return function(call.x, call.coefs, call.knots, dim=call.dim, mask=call.mask, dtype=dtype)


def run(call: RowsCall) -> Tensor:
    """The row function of that kind, in the dtype that torch.softmax would give."""
    return _of_kind(call, dtypes.softmax_dtype(call.x))


def _decomposition(call: RowsCall) -> tuple[Tensor, Tensor]:
    """What the operator returns, laid out as it is there. Its statistics are of use to the kernels' backward alone, and
    NaN here."""
    empty, stats = fake_forward(*call)
    out = _of_kind(call, call.x.dtype)
    out = out.contiguous() if empty.is_contiguous() else empty.copy_(out)
    return out, torch.full_like(stats, torch.nan)


decompose("rows_forward", RowsCall, _decomposition)
