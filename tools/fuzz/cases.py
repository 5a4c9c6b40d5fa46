"""Random hard inputs, one case per seed: drawn, given to the package, and compared with the oracle."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import oracle
import torch
from numpy.random import Generator
from oracle import Bounded, Flags, Sigma, Weights, Wide, wide
from torch import Tensor

import multimax
from multimax import reweighting
from multimax.ops import kernels

DTYPES = ("float32", "float64", "bfloat16", "float16")
LENGTHS = (1, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 129, 257)


class Differences(list[str]):
    """What differed, in words."""

    def compare(self, name: str, got: Tensor, want: Bounded, nan: Flags | None = None) -> None:
        """A result of the package with the oracle's value, NaN where that is wanted."""
        dtype = str(got.dtype).removeprefix("torch.")
        found = wide(got.detach().double().numpy())
        if found.shape != want.value.shape:
            self.append(f"{name}: shape {found.shape} instead of {want.value.shape}")
            return
        with np.errstate(invalid="ignore", over="ignore"):
            bound = want.bound + np.abs(want.value) * 2 * oracle.EPS[dtype] + oracle.SMALLEST[dtype]
            open_end = ~(
                np.abs(want.value) + bound < oracle.LARGEST[dtype] / 2
            )  # may round to infinity; or not compared
            exact = (want.value == 0) & (want.bound == 0)
            right = np.where(exact, found == 0, np.abs(found - want.value) <= bound)
            right |= found == want.value  # infinities
            right |= open_end & ~np.isfinite(want.value + want.bound)
            right |= open_end & ~np.isnan(found)
        if nan is not None:
            right = np.where(nan, np.isnan(found), right)
        if right.all():
            return
        wrong = ~right
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        expected = (
            "nan" if nan is not None and nan[at] else f"{float(want.value[at]):.9g} within {float(bound[at]):.3g}"
        )
        self.append(
            f"{name}: {int(wrong.sum())} of {wrong.size} differ, first {at}: {float(found[at]):.9g}, not {expected}"
        )


def torch_dtype(name: str) -> torch.dtype:
    """A dtype by name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def pick(rng: Generator, choices: Iterable[Any]) -> Any:
    """One of several."""
    choices = list(choices)
    return choices[int(rng.integers(len(choices)))]


def numbers(rng: Generator, shape: tuple[int, ...], dtype: str, hard: bool) -> Tensor:
    """Numbers of that dtype, some or all of them extreme if hard."""
    largest = oracle.LARGEST[dtype]
    x = rng.standard_normal(shape) * pick(rng, (1, 1, 3, 10))
    if hard:
        kind = int(rng.integers(7))
        if kind == 0:
            x = rng.standard_normal(shape) * 10.0 ** rng.uniform(0, np.log10(largest))
        elif kind == 1:
            x = rng.uniform(-1, 1, shape) * largest
        elif kind == 2:
            x = np.full(shape, rng.standard_normal() * 10.0 ** rng.uniform(-5, 5))
        elif kind == 3:
            x = x * 10.0 ** rng.uniform(-45, 0)
        else:
            special = [0.0, -0.0, 1e4, -1e4, largest, -largest, largest / 4, -largest / 4, -np.inf, -largest / 2]
            special += [largest / 1e3, -largest / 1e3, np.sqrt(largest), -np.sqrt(largest)]
            special += [np.nan, np.inf] if kind == 6 else []
            spots = rng.random(shape) < pick(rng, (0.02, 0.2, 0.7))
            x = np.where(spots, rng.choice(special, shape), x)
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.asarray(x)).to(torch_dtype(dtype))


def parameters(rng: Generator, lead: tuple[int, ...], dtype: str, hard: bool) -> tuple[Tensor, Tensor]:
    """Coefs and knots of orders 1 to 4, up to the limits of what is computed in if hard."""
    order = pick(rng, (1, 2, 2, 3, 4))
    shape = (*lead, order, 2)
    kind = pick(rng, DTYPES[:2] if dtype != "float64" else ("float64",))
    largest = oracle.LARGEST[computing(dtype)]
    coefs, knots = rng.standard_normal(shape) * pick(rng, (0.05, 0.3, 1)), rng.standard_normal(shape)
    if hard:
        scale = pick(rng, (0, 1, 30, 1e6, 1e30, largest / 4, 1e-30))
        coefs = np.where(rng.random(shape) < 0.5, rng.standard_normal(shape) * scale, coefs)
        coefs = np.where(rng.random(shape) < 0.2, 0, coefs)
        scale = pick(rng, (0, 1, 1e3, 1e18, largest / 4))
        knots = np.where(rng.random(shape) < 0.4, rng.uniform(-1, 1, shape) * scale, knots)
    made = (torch.from_numpy(np.asarray(t)).to(torch_dtype(kind)) for t in (coefs, knots))
    coefs_t, knots_t = made
    return coefs_t, knots_t


def layout(rng: Generator, x: Tensor) -> Tensor:
    """The same values with other strides."""
    kind = int(rng.integers(4))
    if kind == 1 and x.ndim > 1:
        a, b = (int(d) for d in rng.choice(x.ndim, 2, replace=False))
        return x.transpose(a, b).contiguous().transpose(a, b)
    if kind == 2:
        return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]
    if kind == 3 and x.ndim:
        return torch.cat([torch.full_like(x[..., :1], torch.nan), x], -1)[..., 1:]
    return x


def masked(x: Tensor) -> Flags:
    """By value."""
    limit = -oracle.LARGEST[str(x.dtype).removeprefix("torch.")] / 2
    found: Flags = x.double().numpy() <= limit
    return found


def computing(dtype: str) -> str:
    """The dtype of computation."""
    return "float64" if dtype == "float64" else "float32"


def as_rows(t: Tensor, dim: int) -> Wide:
    """(R, K), for the oracle."""
    return wide(t.double().movedim(dim, -1).reshape(-1, t.shape[dim]).numpy())


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


def only(want: Bounded, compared: Flags) -> Bounded:
    """The same, with nothing to compare elsewhere."""
    return Bounded(want.value, np.where(compared, want.bound, np.inf))


def as_result(t: Tensor, dim: int) -> Tensor:
    """(R, K), of the package."""
    return t.detach().movedim(dim, -1).reshape(-1, t.shape[dim])


def broadcast(t: Tensor, others: tuple[int, ...], count: int) -> Wide:
    """Parameters for each row, (R, N, 2)."""
    return wide(t.double().expand(*others, *t.shape[-2:]).reshape(count, *t.shape[-2:]).numpy())


def compare_parameters(
    differences: Differences,
    sigma: Sigma,
    ds: Bounded,
    settled: bool,
    got: tuple[Tensor, Tensor],
    others: tuple[int, ...],
) -> None:
    """The parameters' gradients, unless a row leaves them open."""
    if not settled:
        return
    for name, want, found in zip(("coefs", "knots"), oracle.to_parameters(sigma, ds), got, strict=True):
        lead = found.shape[:-2]
        value, bound = (t.reshape(*others, *t.shape[1:]) for t in want)
        if lead:
            axes = tuple(i for i, size in enumerate(lead) if size == 1)
            value, bound = (t.sum(axes, keepdims=True) for t in (value, bound))
        else:
            axes = tuple(range(len(others)))
            value, bound = value.sum(axes), bound.sum(axes)
        # the sum of rows may overflow where each does not
        size = np.abs(value) + bound
        bound = np.where(size > sigma.largest / 64, np.inf, bound + 64 * sigma.eps * size)
        bound = np.where(size == 0, 0, bound + oracle.SMALLEST[sigma.compute])
        differences.compare(f"gradient of {name}", found, Bounded(value, bound))


def product(equation: str, a: Bounded, b: Wide, compute: str) -> Bounded:
    """A product with what is exact; not compared where its sums may overflow."""
    value, size = np.einsum(equation, a.value, b), np.einsum(equation, np.abs(a.value), np.abs(b))
    bound = np.einsum(equation, a.bound, np.abs(b)) + 64 * oracle.EPS[compute] * size
    return Bounded(value, np.where(size + bound < oracle.LARGEST[compute] / 64, bound, np.inf))


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
    off = (width + 4) * eps * size
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
    with np.errstate(invalid="ignore"):
        of_q = Bounded(
            *(factor * np.einsum("bhij,bhjd->bhid", a, c) for a, c in ((dx.value, wk), (dx.bound, np.abs(wk))))
        )
        of_k = Bounded(
            *(factor * np.einsum("bhij,bhid->bhjd", a, c) for a, c in ((dx.value, wq), (dx.bound, np.abs(wq))))
        )
    of_v = Bounded(*(np.einsum("bhij,bhid->bhjd", a, c) for a, c in ((p, wg), (p_error, np.abs(wg)))))
    largest = oracle.LARGEST[compute] / 64
    of_q, of_k = (
        Bounded(t.value, np.where(np.abs(t.value) + t.bound < largest, t.bound + 64 * eps * np.abs(t.value), np.inf))
        for t in (of_q, of_k)
    )
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


def loss(rng: Generator, hard: bool) -> tuple[str, Differences]:
    """multimax_cross_entropy. (The linear loss is not here: its products round.)"""
    dtype = pick(rng, DTYPES)
    count, classes = int(rng.integers(1, 6)), pick(rng, (2, 3, 9, 17, 33, 100, 300))
    coefs, knots = parameters(rng, (), dtype, hard)
    x = layout(rng, numbers(rng, (count, classes), dtype, hard))
    smoothing, z_loss = pick(rng, (0.0, 0.0, 0.1, 1.0)), pick(rng, (0.0, 0.0, 0.01))
    weight = (
        torch.from_numpy(rng.uniform(0.1, 2, classes)).to(torch_dtype(computing(dtype))) if rng.random() < 0.3 else None
    )
    ignore = pick(rng, (-100, 0))
    soft = rng.random() < 0.3
    if soft:
        target = torch.softmax(torch.from_numpy(rng.standard_normal((count, classes))), -1).to(
            torch_dtype(computing(dtype))
        )
        ignore = -100
    else:
        target = torch.from_numpy(rng.integers(0, classes, count))
        target[torch.from_numpy(rng.random(count) < 0.2)] = ignore
    impl = pick(rng, ("cpu", "cpu", "torch", "reference"))
    stats = bool(rng.random() < 0.3)
    label = (
        f"loss {dtype} {(count, classes)} order={coefs.shape[0]} smoothing={smoothing} z_loss={z_loss} weight="
        f"{weight is not None} ignore_index={ignore} soft={soft} stats={stats} impl={impl}"
    )
    leaves = [t.detach().requires_grad_() for t in (x, coefs, knots)]
    losses = multimax.multimax_cross_entropy(
        leaves[0], target, *leaves[1:], weight=weight, ignore_index=ignore, reduction="none", label_smoothing=smoothing,
        z_loss=z_loss, return_stats=stats, impl=impl,
    )  # fmt: skip
    losses = losses[0] if stats else losses
    up = numbers(rng, (count,), "float32", False).to(losses.dtype)
    grads = torch.autograd.grad(losses, leaves, up)

    compute = computing(dtype)
    eps = oracle.EPS[compute]
    rough = wide(x.detach().double().numpy())
    wanted = np.zeros((count, classes), dtype=np.longdouble)
    counts = np.ones(count, dtype=bool)
    if soft:
        wanted = wide(target.double().numpy())
    else:
        counts = target.numpy() != ignore
        wanted[np.arange(count)[counts], target.numpy()[counts]] = 1
    by_class = wide(np.ones(classes)) if weight is None else wide(weight.double().numpy())
    q = by_class * (wanted * (1 - smoothing) + np.longdouble(smoothing) / classes)
    q = np.where(counts[:, None], q, 0)
    part = ~masked(x.detach())
    lost = np.isnan(rough)
    sets = [broadcast(t.to(torch_dtype(compute)), (count,), count) for t in (coefs, knots)]
    sigma = Sigma(np.where(lost, 0, rough), part & ~lost, *sets, compute, by_autograd=impl != "cpu")
    nan, unclear = sigma.rows()
    weights = Weights(np.where(sigma.plain == -np.inf, -np.inf, sigma.value), sigma.error, sigma.part, compute)
    dead = ~part | (sigma.plain == -np.inf)
    infinite = (dead & (q > 0)).any(1)
    # an infinite loss, or one that is NaN, leaves its gradients open
    open_rows = unclear | nan | lost.any(1) | weights.loose | infinite | ~part.any(1) | (part & dead).any(1)
    mass, log_sum = q.sum(1), weights.log_sum
    score = np.where(dead, 0, q * sigma.value).sum(1)
    value = mass * log_sum - score + np.where(counts, z_loss * log_sum**2, 0)
    size = np.where(dead, 0, q * np.abs(sigma.value)).sum(1) + mass * np.abs(log_sum)
    bound = np.where(dead, 0, q * sigma.error).sum(1) + (mass + 2 * z_loss * np.abs(log_sum)) * (
        weights.unsure + 8 * eps * (1 + np.abs(weights.top))
    )
    bound = bound + 32 * eps * (size + z_loss * log_sum**2)
    differences = Differences()
    broken = np.broadcast_to(counts & (lost.any(1)), count)
    differences.compare(
        "loss",
        losses,
        only(Bounded(np.where(counts, value, 0), np.where(counts, bound, 0)), ~open_rows | ~counts),
        broken,
    )
    pull = np.where(counts, wide(up.double().numpy()), 0)[:, None]
    outer = (mass + 2 * z_loss * log_sum)[:, None]
    outer_error = 2 * z_loss * weights.log_error[:, None] + 8 * eps * np.abs(outer)
    both = q + weights.p * np.abs(outer)
    error = weights.error * np.abs(outer) + weights.p * outer_error + 8 * eps * both
    ds = Bounded(pull * (weights.p * outer - q), np.abs(pull) * error)
    if impl != "cpu" and dtype != compute:  # autograd adds parts that were rounded
        ds = Bounded(ds.value, ds.bound + 4 * oracle.EPS[dtype] * np.abs(pull) * both)
    skip = np.broadcast_to(open_rows[:, None], part.shape)
    differences.compare("gradient of input", grads[0], only(oracle.to_input(sigma, ds), ~skip))
    compare_parameters(differences, sigma, ds, not skip.any(), (grads[1], grads[2]), (count,))
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
    "losses": loss,
    "entmax": entmax,
}


def run(seed: int, only_kind: str | None = None) -> tuple[str, list[str]]:
    """What the case of that seed is, and what differed in it."""
    rng = np.random.default_rng(seed)
    kind = pick(rng, ("rows", "rows", "attention", "losses", "entmax"))
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
