"""Every check on arguments, once: what was expected, what came, and the remedy where there is one."""

import torch
from torch import Tensor

IMPLS = ("auto", "reference", "cpu", "triton")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def shape(tensor: Tensor) -> str:
    """A shape as the messages print it."""
    return str(tuple(tensor.shape))


def choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """One of several words."""
    if value not in allowed:
        raise ValueError(f"multimax: expected {name} to be one of {', '.join(map(repr, allowed))}, got {value!r}")


def dense(name: str, value: Tensor) -> None:
    """Not sparse, nested or otherwise special."""
    if value.layout != torch.strided or value.is_nested:
        layout = "a nested tensor" if value.is_nested else value.layout
        raise TypeError(f"multimax: expected {name} to be a dense tensor, got {layout}; convert it with .to_dense()")


def tensor(name: str, value: object) -> None:
    """A floating-point tensor of a dtype that the functions compute in."""
    if not isinstance(value, Tensor):
        raise TypeError(f"multimax: expected {name} to be a tensor, got {type(value).__name__}")
    if value.dtype not in DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f"multimax: expected {name} of dtype {allowed}, got {value.dtype}; convert it with .float()")
    dense(name, value)


def same_device(name: str, value: Tensor, x: Tensor) -> None:
    """On the input's device."""
    if value.device != x.device:
        raise ValueError(
            f"multimax: expected {name} on the input's device, {x.device}, got {value.device}; "
            f"move it with .to({str(x.device)!r})"
        )


def pair(coefs: Tensor, knots: Tensor) -> None:
    """Parameters that belong together, of any number of sets."""
    tensor("coefs", coefs)
    tensor("knots", knots)
    if coefs.ndim < 2 or coefs.shape[-1] != 2:
        remedy = (
            "; the published flat layout [b1, d1, b2, d2] becomes that by .reshape(-1, 2)" if coefs.ndim == 1 else ""
        )
        raise ValueError(
            f"multimax: expected coefs of shape (order, 2) or (heads, order, 2), got {shape(coefs)}{remedy}"
        )
    if coefs.shape[-2] < 1:
        raise ValueError(f"multimax: expected coefs of an order of at least 1, got {shape(coefs)}")
    if knots.shape != coefs.shape:
        raise ValueError(f"multimax: expected knots of the shape of coefs, {shape(coefs)}, got {shape(knots)}")


def integer(name: str, value: object) -> None:
    """An int that is no bool."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"multimax: expected {name} to be an int, got {type(value).__name__}")


def dimension(dim: int, ndim: int) -> int:
    """A dim of a tensor, counted from the front."""
    integer("dim", dim)
    size = max(ndim, 1)  # as torch has it, a scalar may be addressed as if it had one dim
    if not -size <= dim < size:
        raise ValueError(f"multimax: expected dim in [{-size}, {size - 1}] for an input of {ndim} dims, got {dim}")
    return dim % size


def parameters(x: Tensor, coefs: Tensor, knots: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Parameters that fit the input, as (order, 2) or with one leading dim for every dim of x but `dim`.

    (heads, order, 2) alone is the layout of attention scores, (..., heads, queries, keys): the heads are on the last
    but one of x's dims without `dim`. Any other place is said in full, by leading dims that broadcast against these.
    """
    pair(coefs, knots)
    same_device("coefs", coefs, x)
    same_device("knots", knots, x)
    lead = tuple(coefs.shape[:-2])
    if not lead:
        return coefs, knots
    rows = tuple(x.shape[:dim]) + tuple(x.shape[dim + 1 :])
    aligned = (lead[0], 1) if len(lead) == 1 and len(rows) > 1 else lead
    aligned = (1,) * (len(rows) - len(aligned)) + aligned
    if len(aligned) > len(rows) or any(size not in (1, own) for size, own in zip(aligned, rows, strict=True)):
        raise ValueError(
            f"multimax: expected coefs with leading dims that broadcast against the input's other dims {rows}, "
            f"got {shape(coefs)}; (heads, order, 2) stands for (heads, 1, order, 2), "
            "heads before queries as in attention scores"
        )
    return tuple(p.reshape(*aligned, *p.shape[-2:]) for p in (coefs, knots))  # type: ignore[return-value]


def mask_for(x: Tensor, mask: object) -> Tensor | None:
    """A boolean mask of the input's shape."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"multimax: expected mask to be a boolean tensor, True where an entry takes part, got {got}")
    dense("mask", mask)
    same_device("mask", mask, x)
    try:
        return mask.expand(x.shape)
    except RuntimeError:
        raise ValueError(
            f"multimax: expected a mask that broadcasts to the input's shape {shape(x)}, got {shape(mask)}"
        ) from None
