"""The formulas of the functions of the field, on any device and in any dtype: the oracle for the kernels.

Differentiable twice. Arguments are not checked here; `api` checks them.

Shapes: z is (..., K) in the compute dtype, masked (..., K) says which entries take no part; every function returns the
weights, (..., K): 0 where masked, NaN wherever else there is a NaN in the row.
"""

import math

import torch
from torch import Tensor

from multimax.ops import checks, masking
from multimax.ops.dtypes import compute_dtype, softmax_dtype
from multimax.ops.entmax.call import KINDS, EntmaxCall, fake_forward
from multimax.ops.operators import decompose, recorded


def split(x: Tensor, dim: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """z and masked, with `dim` last."""
    masked = masking.masked(x)
    if mask is not None:
        masked = masked | ~mask
    return x.movedim(dim, -1).to(compute_dtype(x.dtype)), masked.movedim(dim, -1)


def from_the_largest(z: Tensor, masked: Tensor) -> Tensor:
    """z minus the largest entry that takes part; -inf where masked; NaN in the whole row if it holds NaN or +inf.

    All these functions are the same for z + c, so the largest counts as a constant for gradients.
    """
    if z.shape[-1] == 0:
        return z
    top = torch.where(masked, -torch.inf, z).amax(-1, keepdim=True).detach()
    top = torch.where(top == torch.inf, torch.nan, torch.where(masked.all(-1, keepdim=True), 0.0, top))
    return torch.where(masked, -torch.inf, z - top)


def sparsemax(z: Tensor, masked: Tensor) -> Tensor:
    """argmin over p in the simplex of |p - z|^2, which is max(z - tau, 0) (Martins and Astudillo 2016)."""
    u = from_the_largest(z, masked)
    if z.shape[-1] == 0:
        return u
    with torch.no_grad():
        # no entry at or below -1 is in the support; cut off there, far ones cannot spoil the sums
        ranked = u.clamp(min=-2).sort(-1, descending=True).values
        k = torch.arange(1, u.shape[-1] + 1, dtype=u.dtype, device=u.device)
        size = (1 + k * ranked > ranked.cumsum(-1)).sum(-1, keepdim=True).clamp(min=1)
        least = ranked.gather(-1, size - 1)
        support = ((u >= least) & (u > -1)) | u.isnan()
    inside = torch.where(support, u, 0.0)
    tau = (inside.sum(-1, keepdim=True) - 1) / support.sum(-1, keepdim=True)
    return torch.where(support, torch.relu(inside - tau), 0.0)


def entmax15(z: Tensor, masked: Tensor) -> Tensor:
    """max(z / 2 - tau, 0)^2, entmax at alpha = 1.5 (Peters, Niculae and Martins 2019)."""
    u = from_the_largest(z, masked) / 2
    if z.shape[-1] == 0:
        return u
    with torch.no_grad():
        ranked = u.clamp(min=-2).sort(-1, descending=True).values
        k = torch.arange(1, u.shape[-1] + 1, dtype=u.dtype, device=u.device)
        mean = ranked.cumsum(-1) / k
        spread = ranked.square().cumsum(-1) - k * mean.square()
        tau = mean - ((1 - spread) / k).clamp(min=0).sqrt()
        size = (tau <= ranked).sum(-1, keepdim=True).clamp(min=1)
        least = ranked.gather(-1, size - 1)
        support = ((u >= least) & (u > -1)) | u.isnan()
    size = support.sum(-1, keepdim=True)
    inside = torch.where(support, u, 0.0)
    # on the support, sum (u - tau)^2 = 1 is a quadratic equation; a row without support gets any tau
    mean = inside.sum(-1, keepdim=True) / size.clamp(min=1)
    spread = torch.where(support, inside - mean, 0.0).square().sum(-1, keepdim=True)
    tau = mean - ((1 - spread) / size.clamp(min=1)).sqrt()
    return torch.where(support, torch.relu(inside - tau).square(), 0.0)


NEAR = 1.25  # up to here alpha counts as close to 1


def _power(u: Tensor, masked: Tensor, tau: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """p = r^(1 / (alpha - 1)) and dp/du = p / r, both 0 outside the support. u is finite throughout.

    r is 1 at the largest entry if that takes everything, and K^(1 - alpha) if all are equal. For alpha near 1 both are
    close to 1: so r = 1 + (alpha - 1)(u - tau), whose logarithm is taken without 1; alpha to 1 is exp(u - tau), to
    rounding. For larger alpha r may be tiny: so r = (alpha - 1) u + tau, with tau itself as small.
    """
    a = alpha - 1
    near = alpha < NEAR
    scaled = a * torch.where(near, u - tau, u)
    inside = ((torch.where(near, scaled + 1, scaled + tau) > 0) | u.isnan()) & ~masked
    # unused entries must not be infinite: their gradient, 0, would become NaN
    scaled = torch.where(inside, scaled, 0.0)
    r = torch.where(near, scaled + 1, torch.where(inside, scaled + tau, 1.0))
    log_r = torch.where(near, torch.log1p(torch.where(near, scaled, 0.0)), torch.where(near, 1.0, r).log())
    p = torch.where(inside, (log_r / a).exp(), 0.0)
    return p, torch.where(inside, p / r, 0.0)


def entmax(z: Tensor, masked: Tensor, alpha: Tensor) -> Tensor:
    """max((alpha - 1) z - tau, 0)^(1 / (alpha - 1)) for alpha > 1, (..., 1) (Peters, Niculae and Martins 2019).

    With u = z - max z instead of z, in one of the two forms of `_power`. For alpha <= 2 the norm
    (sum of p)^(alpha - 1) is convex in tau, and Newton's method on it from where the largest weight is 1 never goes too
    far; for alpha > 2 the interval in which tau lies is halved, on a logarithmic scale as long as it is wide.
    """
    u = torch.where(masked, 0.0, from_the_largest(z, masked))  # -inf times a gradient of 0 would be NaN
    if z.shape[-1] == 0:
        return u
    alpha = alpha.to(u.dtype)
    # may not look at values, or would have to wait for them
    graph = z.device.type != "cpu" or not checks.readable(z) or torch.compiler.is_compiling() or recorded()
    graph = graph or torch._C._are_functorch_transforms_active()
    empty = masked.all(-1, keepdim=True)
    with torch.no_grad():
        a, near = alpha - 1, alpha < NEAR
        high = torch.ones_like(u[..., :1] + alpha)
        low = (high * -a * math.log(u.shape[-1])).exp().clamp(min=torch.finfo(u.dtype).tiny)
        tau = torch.where(near, 0.0, torch.where(alpha <= 2, high, (low * high).sqrt()))
        for _ in range(60 if u.dtype == torch.float32 else 120):
            p, slope = _power(u, masked, tau, alpha)
            total = p.sum(-1, keepdim=True)
            low, high = torch.where(total >= 1, low, tau), torch.where(total >= 1, tau, high)
            middle = torch.where(high > 4 * low, low.sqrt() * high.sqrt(), low + (high - low) / 2)
            step = -torch.expm1(-a * total.log()) * total / slope.sum(-1, keepdim=True)
            before = tau
            tau = torch.where(near, tau + step / a, torch.where(alpha <= 2, tau - step, middle))
            # NaN stays, as settled
            moved = (tau - before).abs() > torch.finfo(u.dtype).eps * torch.where(near, tau.clamp(min=0.01), tau)
            if not graph and not bool((moved & ~empty).any()):
                break
        tau = torch.where(empty, 1.0, tau)  # any number will do
        slope = _power(u, masked, tau, alpha)[1].sum(-1, keepdim=True)
        slope = torch.where(empty, 1.0, torch.where(near, slope, -slope / a))  # with respect to tau
    # Two more steps, now with gradients. If u or alpha change, tau is off to first order in that change, to second
    # order after one step and to third order after two, although the slope is a constant: so the result has the first
    # two derivatives of the root.
    for _ in range(2):
        total = _power(u, masked, tau, alpha)[0].sum(-1, keepdim=True)
        # for alpha > 2 tau itself stays: next to an entry that enters the support, steeply, a step would go astray
        wanted = torch.where(alpha > 2, total.detach(), 1.0)
        tau = tau + torch.where(empty, 0.0, (total - wanted) / slope)
    return _power(u, masked, tau, alpha)[0]


def hourglass(z: Tensor, masked: Tensor, inverse_q: float) -> Tensor:
    """What Sparsehourglass projects on the simplex: z (1 + K q) / (|sum z| + K q) (Laha et al. 2018).

    Divided by q throughout: q to infinity, sparsemax, is a number like any other. K counts the entries that take part.
    """
    taking_part = torch.where(masked, 0.0, z)
    count = (~masked).sum(-1, keepdim=True).to(z.dtype)
    factor = (inverse_q + count) / (taking_part.sum(-1, keepdim=True).abs() * inverse_q + count)
    return torch.where(masked, -torch.inf, taking_part * factor)


def softmax(z: Tensor, masked: Tensor) -> Tensor:
    """exp(z) / sum exp(z) of what is not masked."""
    # a row without entries still gets a softmax, to avoid NaN, and is zeroed with the rest
    scores = torch.where(masked & ~masked.all(-1, keepdim=True), -torch.inf, torch.where(masked, 0.0, z))
    return torch.where(masked, 0.0, torch.softmax(scores, -1))


def cooled(z: Tensor, masked: Tensor, temperature: Tensor) -> Tensor:
    """z / temperature up to a constant in each row. Numbers that overflow stay finite."""
    u = torch.where(masked, 0.0, from_the_largest(z, masked))  # -inf times a gradient of 0 would be NaN
    limits = torch.finfo(u.dtype)
    return (u / temperature.to(u.dtype).clamp(min=limits.tiny)).clamp(min=limits.min / 4)


def at_or_above_the_mean(z: Tensor, masked: Tensor) -> Tensor:
    """Which entries Ev-SoftMax keeps (Chen, Itkina, Senanayake and Kochenderfer 2021).

    The mean is taken of z - max z: rounding cannot lift the mean of numbers that are never positive above all of them.
    """
    with torch.no_grad():
        u = from_the_largest(z, masked)
        count = (~masked).sum(-1, keepdim=True)
        return ~(u < torch.where(masked, 0.0, u).sum(-1, keepdim=True) / count) & ~masked


def lowered(z: Tensor, high: Tensor, eps: float) -> Tensor:
    """Scores whose softmax is Ev-SoftMax's training-time form: entries that are not `high` (at or above the mean) are
    lowered by the logarithm of (1 + eps) / eps."""
    return torch.where(high, z, z - (math.log1p(eps) - math.log(eps)))


def largest(z: Tensor, masked: Tensor, k: float, share: bool) -> Tensor:
    """The k largest entries, or that share of those that take part, rounded up; of equal ones the first: k remain."""
    length = z.shape[-1]
    if length == 0:
        return ~masked
    with torch.no_grad():
        z = torch.where(masked, -torch.inf, z)
        # a share of 0.07 of 100 entries is 7, however the product rounds
        most = min(max(math.ceil(k * length - 1e-9), 1) if share else int(k), length)
        ranked = z.topk(most, -1).values  # NaN first
        size = torch.full_like(ranked[..., :1], most, dtype=torch.int64)
        if share:
            size = torch.ceil(k * (~masked).sum(-1, keepdim=True).double() - 1e-9).long().clamp(min=1)
        least = ranked.gather(-1, size - 1)
        above, equal = z > least, z == least
        kept = above | (equal & (equal.cumsum(-1) <= size - above.sum(-1, keepdim=True)))
        # a row with a NaN or an infinity is kept whole, and propagates it
        return (kept | ~(z < torch.inf).all(-1, keepdim=True)) & ~masked


def of_call(call: EntmaxCall) -> Tensor:
    """The weights of a call, in the compute dtype."""
    z, masked = split(call.x, -1, call.mask)
    kind, option = KINDS[call.kind], call.option
    if kind == "entmax":
        assert call.parameter is not None
        return entmax(z, masked, call.parameter.unsqueeze(-1))
    if kind == "entmax15":
        return entmax15(z, masked)
    if kind in ("sparsemax", "sparsehourglass"):
        return sparsemax(z if kind == "sparsemax" else hourglass(z, masked, option), masked)
    if kind == "softmax":
        t = z.new_tensor(option) if call.parameter is None else call.parameter.unsqueeze(-1)
        return softmax(cooled(z, masked, t), masked)
    if kind == "evsoftmax":
        high = at_or_above_the_mean(z, masked)
        return softmax(lowered(z, high, option), masked) if option > 0 else softmax(z, ~high)
    return softmax(z, ~largest(z, masked, option, kind == "topshare"))


def why_not(call: EntmaxCall) -> str | None:
    """The formulas can run any call."""
    return None


def run(call: EntmaxCall) -> Tensor:
    """The weights, in the dtype that torch.softmax would give."""
    return of_call(call).to(softmax_dtype(call.x))


def _decomposition(call: EntmaxCall) -> tuple[Tensor, Tensor]:
    """What the operator returns. Its statistics are of use to the kernels' backward alone, and NaN here."""
    _, stats = fake_forward(*call)
    return of_call(call).to(call.x.dtype), torch.full_like(stats, torch.nan)


decompose("entmax_forward", EntmaxCall, _decomposition)
