"""Random hard inputs, one case per seed: drawn, given to the package, and compared with the oracle."""

from collections.abc import Callable
from typing import Any

import losses
import numpy as np
import oracle
import torch
from common import (
    DTYPES,
    LENGTHS,
    Differences,
    broadcast,
    compare_parameters,
    computing,
    layout,
    masked,
    numbers,
    only,
    parameters,
    pick,
    product,
    torch_dtype,
)
from numpy.random import Generator
from oracle import Bounded, Sigma, Weights, Wide, wide
from torch import Tensor

import multimax
from multimax import reweighting
from multimax.ops import kernels


def as_rows(t: Tensor, dim: int) -> Wide:
    """(R, K), for the oracle."""
    return wide(t.double().movedim(dim, -1).reshape(-1, t.shape[dim]).numpy())


def as_result(t: Tensor, dim: int) -> Tensor:
    """(R, K), of the package."""
    return t.detach().movedim(dim, -1).reshape(-1, t.shape[dim])


def rows(rng: Generator, hard: bool) -> tuple[str, Differences]:
    """multimax, log_multimax or modulate along a dim."""
    dtype, kind = pick(rng, DTYPES), pick(rng, ("multimax", "multimax", "log_multimax", "modulate"))
    ndim = int(rng.integers(1, 4))
    shape = tuple(int(s) for s in rng.integers(1, 5, ndim))
    dim = -1 if kind == "modulate" else int(rng.integers(ndim))
    shape = tuple(pick(rng, LENGTHS) if i == dim % ndim else size for i, size in enumerate(shape))
    if rng.random() < 0.02:
        shape = (0, *shape[1:])
    x = layout(rng, numbers(rng, shape, dtype, hard))
    others = tuple(size for i, size in enumerate(shape) if i != dim % ndim)
    lead = tuple(size if rng.random() < 0.5 else 1 for size in others) if rng.random() < 0.3 else ()
    coefs, knots = parameters(rng, lead, dtype, hard)
    mask = None
    if kind != "modulate" and rng.random() < 0.4:
        mask = torch.from_numpy(np.asarray(rng.random(shape) < pick(rng, (0.1, 0.5, 0.9))))
    grad = layout(rng, numbers(rng, shape, dtype, False))
    impl = pick(rng, ("cpu", "cpu", "cpu", "reference"))
    label = f"{kind} {dtype} {shape} dim={dim} coefs={tuple(coefs.shape)} mask={mask is not None} impl={impl}"
    leaves = [t.detach().requires_grad_() for t in (x, coefs, knots)]
    options: dict[str, Any] = {} if kind == "modulate" else {"dim": dim, "mask": mask}
    out = getattr(multimax, kind)(*leaves, impl=impl, **options)
    of_x, of_coefs, of_knots = torch.autograd.grad(out, leaves, grad)

    differences = Differences()
    if x.numel() == 0:
        return label, differences
    compute = computing(dtype)
    rough = as_rows(x, dim)
    part = ~masked(x)
    if mask is not None:
        part &= mask.numpy()
    part = np.moveaxis(part, dim, -1).reshape(rough.shape)
    sets = [broadcast(t.to(torch_dtype(compute)), others, len(rough)) for t in (coefs, knots)]
    lost = np.isnan(rough) & part
    sigma = Sigma(np.where(np.isnan(rough), 0, rough), part & ~lost, *sets, compute, by_autograd=impl != "cpu")
    g = np.where(part, as_rows(grad, dim), 0)
    nan, unclear = sigma.rows()
    nan = nan | lost.any(1)
    if kind == "modulate":
        value = Bounded(sigma.value, sigma.error)
        value = Bounded(np.where(part, value.value, rough), np.where(part, value.bound, 0))
        ds = Bounded(g, np.zeros_like(g))
        nans = lost
        skip = sigma.unclear | (~np.isfinite(sigma.plain) & part)
        differences.compare("output", as_result(out, dim), only(value, ~skip), nans & ~sigma.unclear)
        skip = skip | lost
        settled = not skip.any()
    else:
        weights = Weights(np.where(sigma.plain == -np.inf, -np.inf, sigma.value), sigma.error, sigma.part, compute)
        skip = (unclear | nan | weights.loose)[:, None] & part
        if kind == "multimax":
            value, ds = Bounded(weights.p, weights.error), weights.backward(g)
        else:
            value = Bounded(
                np.where(part, sigma.value - weights.log_sum[:, None], -np.inf),
                np.where(
                    part, sigma.error + weights.unsure[:, None] + 8 * weights.eps * (1 + abs(weights.top))[:, None], 0
                ),
            )
            sunk = (part & (sigma.plain == -np.inf)).any(1)  # what then becomes of its gradient is open
            skip = skip | (sunk[:, None] & part)
            total, size = g.sum(1, keepdims=True), np.abs(g).sum(1, keepdims=True)
            error = weights.error * np.abs(total) + weights.eps * (4 * np.abs(g) + 16 * weights.p * size)
            ds = Bounded(g - weights.p * total, error)
        nans = (nan & ~unclear)[:, None] & part
        differences.compare("output", as_result(out, dim), only(value, ~skip), nans)
        settled = not skip.any()
    differences.compare("gradient of x", as_result(of_x, dim), only(oracle.to_input(sigma, ds), ~skip))
    compare_parameters(differences, sigma, ds, settled, (of_coefs, of_knots), others)
    return label, differences


def attention(rng: Generator, hard: bool) -> tuple[str, Differences]:
    """multimax_attention."""
    dtype = pick(rng, ("float32", "float32", "float64", "bfloat16", "float16"))
    b, h = int(rng.integers(1, 3)), int(rng.integers(1, 3))
    queries, keys = pick(rng, (1, 2, 7, 17, 33, 65)), pick(rng, (1, 3, 16, 40, 65, 130))
    width, value_width = pick(rng, (1, 3, 8, 16, 20)), pick(rng, (1, 5, 16, 24))
    scale = pick(rng, (None, 1.0, 0.1))
    small = hard and dtype in ("float32", "float64")
    q, k = (numbers(rng, (b, h, n, width), dtype, small and rng.random() < 0.5) for n in (queries, keys))
    v = numbers(rng, (b, h, keys, value_width), dtype, False)
    q, k, v = (layout(rng, t) for t in (q, k, v))
    coefs, knots = parameters(rng, (h,) if rng.random() < 0.3 else (), dtype, hard)
    full = (b, h, queries, keys)
    choice, options = int(rng.integers(6)), {}
    inside = np.ones(full, dtype=bool)
    added = np.zeros(full, dtype=np.longdouble)
    if choice == 1:
        options["is_causal"] = True
        inside &= np.tri(queries, keys, dtype=bool)
    elif choice == 2:
        left, right = (pick(rng, (None, 0, 2, 50)) for _ in range(2))
        options["window"] = (left, right)
        places = np.arange(keys)[None] - (np.arange(queries)[:, None] + keys - queries)
        if left is not None:
            inside &= places >= -left
        if right is not None:
            inside &= places <= right
    shape = tuple(size if rng.random() < 0.6 else 1 for size in full)
    if choice == 3:
        mask = torch.from_numpy(np.asarray(rng.random(shape) < 0.6))
        options["attn_mask"] = mask
        inside &= mask.numpy()
    elif choice == 4:
        mask = numbers(rng, shape, "float32", False)
        mask[torch.from_numpy(rng.random(shape) < 0.3)] = -torch.inf
        options["attn_mask"] = mask
        inside &= ~masked(mask)
        added = added + np.where(masked(mask), 0, wide(mask.double().numpy()))
    bias = numbers(rng, shape, dtype, hard and dtype != "float16") if choice == 5 else None
    impl = pick(rng, ("cpu", "cpu", "cpu", "torch", "reference") if dtype != "float64" else ("torch", "reference"))
    grad = numbers(rng, (b, h, queries, value_width), dtype, False)
    label = (
        f"attention {dtype} {full} width={width}, {value_width} coefs={tuple(coefs.shape)} scale={scale} "
        f"{sorted(options)} bias={None if bias is None else tuple(bias.shape)} impl={impl}"
    )
    leaves = [t.detach().requires_grad_() for t in (q, k, v, coefs, knots)]
    given = leaves if bias is None else [*leaves, bias.detach().requires_grad_()]
    named = {} if bias is None else {"score_bias": given[-1]}
    out = multimax.multimax_attention(*leaves, scale=scale, impl=impl, **named, **options)
    grads = torch.autograd.grad(out, given, grad)

    compute = computing(dtype)
    eps = oracle.EPS[compute]
    wq, wk, wv, wg = (wide(t.detach().double().numpy()) for t in (q, k, v, grad))
    factor = np.longdouble(1 / np.sqrt(width) if scale is None else scale)
    lost = np.isnan(wq).any(-1)[..., None] | np.isnan(wk).any(-1)[:, :, None]
    wq, wk = (
        np.nan_to_num(wq, nan=0, posinf=np.inf, neginf=-np.inf),
        np.nan_to_num(wk, nan=0, posinf=np.inf, neginf=-np.inf),
    )
    differences = Differences()
    with np.errstate(all="ignore"):
        x = factor * np.einsum("bhid,bhjd->bhij", wq, wk)
        size = abs(factor) * np.einsum("bhid,bhjd->bhij", np.abs(wq), np.abs(wk))
    if not np.isfinite(size).all() or (size > oracle.LARGEST[compute] / 64).any() or lost.any():
        return label + " (not compared)", differences  # how products overflow is not the library's to say
    off = (width + 4) * (eps * size + oracle.SMALLEST[compute])
    if bias is not None:
        wb = np.broadcast_to(wide(bias.double().numpy()), full)
        lost = lost | np.isnan(wb)
        if lost.any() or np.isposinf(wb).any():
            return label + " (not compared)", differences
        out_of_reach = np.broadcast_to(masked(bias), full)
        inside = inside & ~out_of_reach
        x = x + np.where(out_of_reach, 0, wb)
        off = off + 2 * eps * (np.abs(x) + np.abs(np.where(out_of_reach, 0, wb)))
    limit = -oracle.LARGEST[compute] / 2
    if (np.abs(x - limit) <= np.abs(limit) / 2).any():
        return label + " (not compared)", differences
    flat = (b * h * queries, keys)
    part = (inside & ~(x <= limit)).reshape(flat)
    sets: list[Any] = [t.to(torch_dtype(compute)).double() for t in (coefs, knots)]
    sets = [
        wide((t if t.ndim == 2 else t[:, None]).expand(b, h, queries, *t.shape[-2:]).reshape(-1, *t.shape[-2:]).numpy())
        for t in sets
    ]
    sigma = Sigma(x.reshape(flat), part, *sets, compute, off.reshape(flat), by_autograd=impl != "cpu")
    nan, unclear = sigma.rows()
    scores = np.where(sigma.plain == -np.inf, -np.inf, sigma.value + added.reshape(flat))
    weights = Weights(scores, sigma.error + 2 * eps * np.abs(added.reshape(flat)), part, compute)
    open_rows = (unclear | nan | weights.loose).reshape(full[:3])
    # half precision also rounds weights, and the gradient of scores, before products
    rounding = 4 * oracle.EPS[dtype] if dtype != compute else 16 * eps
    p, p_error = weights.p.reshape(full), weights.error.reshape(full) + rounding * weights.p.reshape(full)
    want = np.einsum("bhij,bhjd->bhid", p, wv)
    bound = np.einsum("bhij,bhjd->bhid", p_error, np.abs(wv))
    nans = np.broadcast_to((nan & ~unclear).reshape(full[:3])[..., None], want.shape)
    differences.compare("output", out, only(Bounded(want, bound), ~open_rows[..., None]), nans)
    dp = np.einsum("bhid,bhjd->bhij", wg, wv)
    dp_error = (8 * eps + (rounding if dtype != compute else 0)) * np.einsum("bhid,bhjd->bhij", np.abs(wg), np.abs(wv))
    ds = weights.backward(dp.reshape(flat), dp_error.reshape(flat))
    ds = Bounded(ds.value, ds.bound + rounding * np.abs(ds.value))
    dx = oracle.to_input(sigma, ds)
    dx = Bounded(dx.value.reshape(full), dx.bound.reshape(full) + rounding * np.abs(dx.value.reshape(full)))
    settled = not open_rows.any()
    scaled = Bounded(factor * dx.value, abs(factor) * dx.bound)
    of_q = product("bhij,bhjd->bhid", scaled, wk, compute)
    of_k = product("bhij,bhid->bhjd", scaled, wq, compute)
    of_v = Bounded(*(np.einsum("bhij,bhid->bhjd", a, c) for a, c in ((p, wg), (p_error, np.abs(wg)))))
    differences.compare("gradient of query", grads[0], only(of_q, ~open_rows[..., None]))
    if settled:
        differences.compare("gradient of key", grads[1], of_k)
        differences.compare("gradient of value", grads[2], of_v)
        if bias is not None:
            axes = tuple(i for i, size in enumerate(bias.shape) if size == 1)
            # what is masked by the bias's own value has no gradient; the rest of it may be
            differences.compare(
                "gradient of bias",
                grads[5],
                Bounded(dx.value.sum(axes, keepdims=True), dx.bound.sum(axes, keepdims=True)),
            )
    others = (b, h, queries)
    found = tuple(t if t.ndim == 2 else t[:, None] for t in grads[3:5])
    if found[0].ndim == 4:  # (H, 1, N, 2), for (B, H, Lq)
        found = tuple(t[None] for t in found)
    compare_parameters(differences, sigma, ds, settled, found, others)  # type: ignore[arg-type]
    return label, differences


def entmax(rng: Generator, hard: bool) -> tuple[str, Differences]:
    """sparsemax, entmax15 and entmax."""
    dtype = pick(rng, DTYPES)
    count, length = int(rng.integers(1, 6)), pick(rng, LENGTHS)
    x = layout(rng, numbers(rng, (count, length), dtype, hard))
    mask = torch.from_numpy(np.asarray(rng.random((count, length)) < 0.5)) if rng.random() < 0.3 else None
    name = pick(rng, ("sparsemax", "entmax15", "entmax"))
    alpha = {"sparsemax": 2.0, "entmax15": 1.5}.get(name, float(pick(rng, (1.2, 1.7, 2.5, 4.0))))
    options = {"alpha": alpha} if name == "entmax" else {}
    impl = pick(rng, ("cpu", "cpu", "reference"))
    label = f"{name} {dtype} {(count, length)} alpha={alpha} mask={mask is not None} impl={impl}"
    leaf = x.detach().requires_grad_()
    out = getattr(reweighting, name)(leaf, mask=mask, impl=impl, **options)
    grad = numbers(rng, (count, length), dtype, False)
    (of_x,) = torch.autograd.grad(out, leaf, grad)
    rough = wide(x.detach().double().numpy())
    part = ~masked(x.detach()) & (True if mask is None else mask.numpy())
    lost = (part & ~(rough < np.inf)).any(1)
    part, differences = part & ~lost[:, None], Differences()
    p, edge = oracle.projection(np.where(part, rough, 0), part, alpha)
    eps = oracle.EPS[computing(dtype)]
    # the steeper the power, the more the threshold's rounding shows
    bound = (
        (64 + length)
        * eps
        * (1 + 1 / (alpha - 1))
        * np.where(part, np.maximum(p ** (2 - alpha), 1) if alpha < 2 else 1 + p, 0)
    )
    if alpha > 2:
        bound = np.where(part, np.maximum(bound, (1e3 * eps) ** (1 / (alpha - 1))), 0)
    beyond = (part & (np.abs((alpha - 1) * rough) > oracle.LARGEST[computing(dtype)] / 16)).any(1)
    nans = np.broadcast_to(lost[:, None], p.shape) & (~masked(x.detach()) & (True if mask is None else mask.numpy()))
    compared = ~((beyond | lost)[:, None] & np.ones_like(part))
    differences.compare("output", out, only(Bounded(p, bound), compared), nans & np.isnan(rough).any(1)[:, None])
    s = np.where(p > 0, p ** wide(2 - alpha), 0)
    total = np.where(s.sum(1) > 0, s.sum(1), 1)[:, None]
    g = np.where(part, wide(grad.double().numpy()), 0)
    value = s * (g - (s * g).sum(1, keepdims=True) / total)
    bound = s * (np.abs(g) + (s * np.abs(g)).sum(1, keepdims=True) / total) * (1e4 * eps if alpha <= 2 else 1e6 * eps)
    certain = compared & ~edge[:, None]
    differences.compare("gradient of x", of_x, only(Bounded(value, bound), certain))
    return label, differences


KINDS: dict[str, Callable[[Generator, bool], tuple[str, Differences]]] = {
    "rows": rows,
    "attention": attention,
    "losses": losses.loss,
    "linear": losses.linear,
    "entmax": entmax,
}


def run(seed: int, only_kind: str | None = None) -> tuple[str, list[str]]:
    """What the case of that seed is, and what differed in it."""
    rng = np.random.default_rng(seed)
    kind = pick(rng, ("rows", "rows", "attention", "losses", "linear", "entmax"))
    kind = only_kind or kind
    available = []
    for isa in kernels.ISAS:
        try:
            kernels.use_isa(isa)
        except RuntimeError:
            continue
        available.append(isa)
    isa = kernels.use_isa(pick(rng, available))
    torch.set_num_threads(pick(rng, (1, 2, 5)))
    hard = bool(rng.random() < 0.75)
    with np.errstate(all="ignore"):
        label, differences = KINDS[kind](rng, hard)
    return f"{label} {isa}", list(differences)
