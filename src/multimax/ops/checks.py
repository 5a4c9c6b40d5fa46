"""Every check on arguments, once. The errors say what was expected, what was given, and the remedy if there is one."""

import contextlib
import inspect
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def shape(tensor: Tensor) -> str:
    """A shape as the messages print it."""
    return str(tuple(tensor.shape))


def broadcasts(sizes: Sequence[int], full: Sequence[int]) -> bool:
    """Whether a tensor of the first shape broadcasts to the second."""
    if len(sizes) > len(full):
        return False
    # equal first: whether a size that is unknown while exporting is 1 cannot be asked
    return all(size in (whole, 1) for size, whole in zip(sizes[::-1], full[::-1], strict=False))


def choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """One of several words."""
    if value not in allowed:
        raise ValueError(f"multimax: expected {name} to be one of {', '.join(map(repr, allowed))}, got {value!r}")


def instruction_set(name: object, known: tuple[str, ...]) -> None:
    """One of the instruction sets that kernels are compiled for."""
    if name not in known:
        raise ValueError(f"multimax: expected an instruction set out of {', '.join(known)}, got {name!r}")


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
    if value.layout != torch.strided or value.is_nested:
        dense(name, value)


def paper_values(t_b: Tensor, t_d: Tensor, b: Tensor, d: Tensor) -> None:
    """The paper's symbols, each with one value per order."""
    values = (t_b, t_d, b, d)
    if any(value.shape != t_b.shape for value in values):
        got = ", ".join(shape(value) for value in values)
        raise ValueError(f"multimax: expected t_b, t_d, b and d of one shape, got {got}")


def published(key: str, value: Tensor) -> None:
    """An entry of a state_dict in the published code's flat layout."""
    if value.ndim != 1 or len(value) == 0 or len(value) % 2:
        raise ValueError(f"multimax: expected {key} of shape (2 * order,) as in the published code, got {shape(value)}")


def first_entry(name: str, key: str, entries: Mapping[str, Tensor]) -> None:
    """A name that is not taken yet."""
    if name in entries:
        raise ValueError(f"multimax: expected one entry for {name}, got two; {key} is the second")


def partner_entry(name: str, key: str, entries: Mapping[str, Tensor]) -> None:
    """Knots for coefs, or coefs for knots, of the same shape."""
    if name not in entries or entries[name].shape != entries[key].shape:
        raise ValueError(f"multimax: expected {name} of shape {shape(entries[key])} with {key}, got none of that shape")


def gumbel_temperature(tau: object) -> None:
    """A temperature that samples can be divided by."""
    if number("tau", tau, 0, float("inf")) == 0:
        raise ValueError("multimax: expected tau above 0, got 0; hard=True gives one-hot samples")


def not_all_masked(log_weights: Tensor) -> None:
    """Rows of log-weights in which something is left."""
    if bool((log_weights == -torch.inf).all(-1).any()):
        raise ValueError("multimax: expected logits with at least one entry that is not masked in each row")


def module(model: object) -> None:
    """A model, not its parameters, which do not say what they belong to."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"multimax: expected model to be an nn.Module, got {type(model).__name__}")


def readable(value: Tensor) -> bool:
    """Whether this process has a tensor's values: not on the meta device, nor spread over several."""
    return type(value) in (Tensor, torch.nn.Parameter) and not value.is_meta


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
    sizes = coefs.shape
    if len(sizes) < 2 or sizes[-1] != 2:
        remedy = (
            "; the published flat layout [b1, d1, b2, d2] becomes that by .reshape(-1, 2)" if coefs.ndim == 1 else ""
        )
        raise ValueError(
            f"multimax: expected coefs of shape (order, 2) or (heads, order, 2), got {shape(coefs)}{remedy}"
        )
    if sizes[-2] < 1:
        raise ValueError(f"multimax: expected coefs of an order of at least 1, got {shape(coefs)}")
    if knots.shape != sizes:
        raise ValueError(f"multimax: expected knots of the shape of coefs, {shape(coefs)}, got {shape(knots)}")


def integer(name: str, value: object) -> int:
    """An int that is not a bool, or something that is one, such as NumPy's or a tensor without dims."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    truth = isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool)
    if isinstance(value, SupportsIndex) and not truth:
        with contextlib.suppress(TypeError):  # of a tensor with dims, or of floats
            return operator.index(value)
    raise TypeError(f"multimax: expected {name} to be an int, got {type(value).__name__}")


def flag(name: str, value: object) -> None:
    """True or False, also NumPy's, as in torch, and nothing that is merely truthy or falsy."""
    if value is True or value is False:  # nearly always: the rest takes longer
        return
    if isinstance(value, (bool, torch.SymBool)):
        return
    kind = type(value)
    if kind.__module__ != "numpy" or not kind.__name__.startswith("bool"):
        raise TypeError(f"multimax: expected {name} to be True or False, got {value!r}")


def at_least(name: str, value: object, least: int) -> None:
    """An int of at least that size."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"multimax: expected {name} to be an int of at least {least}, got {value!r}")


def dimension(dim: int, ndim: int) -> int:
    """A dim of a tensor, counted from the front."""
    dim = integer("dim", dim)
    size = max(ndim, 1)  # as in torch, a scalar may be addressed as if it had one dim
    if not -size <= dim < size:
        raise ValueError(f"multimax: expected dim in [{-size}, {size - 1}] for an input of {ndim} dims, got {dim}")
    return dim % size


def parameters(x: Tensor, coefs: Tensor, knots: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Parameters that fit the input, as (order, 2) or with one leading dim for every dim of x but `dim`.

    (heads, order, 2) alone is the layout of attention scores, (..., heads, queries, keys): the heads are on the
    second to last of x's dims without `dim`. Any other place is given in full, by leading dims that broadcast.
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
    if not broadcasts(aligned, rows):
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


def real(name: str, value: object) -> float:
    """A number, or something that converts to one, such as a tensor without dims."""
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"multimax: expected {name} to be a number, got {type(value).__name__}")
    return float(value)


def number(name: str, value: object, low: float, high: float) -> float:
    """A number in an interval, its ends included."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"multimax: expected {name} to be a number, got {type(value).__name__}")
    if not low <= value <= high:
        raise ValueError(f"multimax: expected {name} in [{low:g}, {high:g}], got {value}")
    return float(value)


def finite(name: str, value: object) -> float:
    """A number of at least 0 that is not infinite."""
    if value == float("inf"):
        raise ValueError(f"multimax: expected {name} to be finite, got {value}")
    return number(name, value, 0, float("inf"))


def number_above(name: str, value: object, low: float, *, infinite: bool = False) -> None:
    """A number, not a tensor, above a bound."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"multimax: expected {name} to be a number, got {type(value).__name__}")
    if not low < value or (value == float("inf") and not infinite):
        raise ValueError(f"multimax: expected {name} above {low:g}{'' if infinite else ' and finite'}, got {value}")


def above(name: str, value: object, low: float, x: Tensor, dim: int) -> None:
    """A number above a bound, or a tensor of such numbers that broadcasts against x, with size 1 along dim. Its values
    are checked on the CPU alone: elsewhere the host would have to wait for them."""
    if not isinstance(value, Tensor):
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise TypeError(f"multimax: expected {name} to be a number or a tensor, got {type(value).__name__}")
        return number_above(name, value, low)
    tensor(name, value)
    same_device(name, value, x)
    sizes = [1 if i == dim else size for i, size in enumerate(x.shape)]
    if not broadcasts(value.shape, sizes):
        raise ValueError(
            f"multimax: expected {name} that broadcasts to {tuple(sizes)}, the input's shape with 1 in dim {dim}, "
            f"got {shape(value)}"
        )
    tracing = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if value.device.type == "cpu" and not tracing:
        wrong = ~((value > low) & (value < float("inf")))
        if wrong.any():
            raise ValueError(f"multimax: expected {name} above {low:g} and finite, got {value[wrong][0].item():g}")


def count_or_share(name: str, value: object) -> None:
    """An int of at least 1, or a float in (0, 1]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"multimax: expected {name} to be an int or a float, got {type(value).__name__}")
    if isinstance(value, int) and value < 1:
        raise ValueError(f"multimax: expected {name} of at least 1, got {value}")
    if isinstance(value, float) and not 0 < value <= 1:
        raise ValueError(
            f"multimax: expected {name} as a share to be in (0, 1], got {value}; a number of entries is an int"
        )


def heads_to_learn(heads: object, learn: bool) -> None:
    """None, or a number of heads whose parameters are trained."""
    flag("learn", learn)
    if heads is None:
        return
    at_least("heads", heads, 1)
    if not learn:
        raise ValueError("multimax: expected learn=True with heads: what is not learned is the same for all")


def attention_inputs(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, shapes: str) -> None:
    """Query, key and value that belong together; heads on dim -3, entries on -1, lengths on -2."""
    device, dtype, ndim = query.device, query.dtype, query.ndim
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.ndim < 2:
            raise ValueError(f"multimax: expected {name} of shape {shapes}, got {shape(t)}")
        if t.device != device:
            same_device(name, t, query)
        if t.dtype != dtype:
            raise TypeError(f"multimax: expected {name} of the query's dtype, {dtype}, got {t.dtype}")
        if t.ndim != ndim:
            raise ValueError(f"multimax: expected {name} of as many dims as the query, {ndim}, got {t.ndim}")
    sizes, key_sizes, value_sizes = query.shape, key.shape, value.shape
    if key_sizes[-1] != sizes[-1]:
        raise ValueError(
            f"multimax: expected key of the query's last size, {sizes[-1]}, got {shape(key)} for {shape(query)}"
        )
    if value_sizes[-2] != key_sizes[-2]:
        raise ValueError(f"multimax: expected value of the key's length, {key_sizes[-2]}, got {shape(value)}")
    if ndim < 3:
        return
    heads, key_heads, value_heads = sizes[-3], key_sizes[-3], value_sizes[-3]
    if key_heads != value_heads:
        raise ValueError(f"multimax: expected value of as many heads as the key, {key_heads}, got {value_heads}")
    if enable_gqa:
        if key_heads == 0 or heads % key_heads:
            raise ValueError(f"multimax: expected query heads in groups of the key's {key_heads} heads, got {heads}")
    elif key_heads != heads:
        remedy = "; enable_gqa=True shares key heads" if key_heads and heads % key_heads == 0 else ""
        raise ValueError(f"multimax: expected key of as many heads as the query, {heads}, got {key_heads}{remedy}")


def batch_shape(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    """The batch dims of query, key and value, (..., H, L, D), broadcast."""
    batch = query.shape[:-3]
    if batch == key.shape[:-3] == value.shape[:-3]:
        return batch
    try:
        broadcast: torch.Size = torch.broadcast_shapes(batch, key.shape[:-3], value.shape[:-3])
        return broadcast
    except RuntimeError:
        raise ValueError(
            "multimax: expected query, key and value with batch dims that broadcast, got "
            f"{shape(query)}, {shape(key)} and {shape(value)}"
        ) from None


def packed(query: object, key: object, value: object) -> None:
    """Query, key and value of packed sequences."""
    for name, t in (("query", query), ("key", key), ("value", value)):
        tensor(name, t)
        assert isinstance(t, Tensor)
        if t.ndim != 3:
            raise ValueError(f"multimax: expected {name} of shape (all rows, heads, size), got {shape(t)}")


def attention_parameters(query: Tensor, coefs: Tensor, knots: Tensor) -> None:
    """One set, or one per head, for a query of (B, H, Lq, D)."""
    pair(coefs, knots)
    device = query.device
    if coefs.device != device or knots.device != device:
        same_device("coefs", coefs, query)
        same_device("knots", knots, query)
    if coefs.ndim == 2:
        return
    heads = query.shape[1]
    if coefs.ndim > 3 or coefs.shape[0] not in (1, heads):
        raise ValueError(
            f"multimax: expected coefs of shape (order, 2) or ({heads}, order, 2) for {heads} heads, got {shape(coefs)}"
        )


def numbers(name: str, value: object, boolean: bool) -> None:
    """A dense floating-point tensor, or, if that is allowed, a boolean one."""
    allowed = isinstance(value, Tensor) and (value.dtype in DTYPES or (boolean and value.dtype == torch.bool))
    if not allowed or is_causal_bias(value):
        kind = "a boolean or floating-point tensor" if boolean else "a floating-point tensor"
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        if is_causal_bias(value):
            got = "torch's CausalBias, which has no values; write it out, with torch.ones and tril"
        raise TypeError(f"multimax: expected {name} to be {kind}, got {got}")
    assert isinstance(value, Tensor)
    dense(name, value)


def is_causal_bias(value: object) -> bool:
    """Whether it is torch's CausalBias. By its module's name: to import that would import Triton."""
    return type(value).__module__ == "torch.nn.attention.bias"


def causal_bias(value: Any, query: Tensor, key: Tensor) -> None:
    """torch's causal bias, made for these lengths."""
    lengths = (query.shape[-2], key.shape[-2])
    if (value.seq_len_q, value.seq_len_kv) != lengths:
        raise ValueError(
            f"multimax: expected a causal bias for the lengths of query and key, {lengths}, "
            f"got one for {(value.seq_len_q, value.seq_len_kv)}"
        )


def scores(name: str, value: object, query: Tensor, full: tuple[int, ...], boolean: bool) -> None:
    """A mask or a bias that broadcasts to the scores."""
    numbers(name, value, boolean)
    assert isinstance(value, Tensor)
    same_device(name, value, query)
    if not broadcasts(value.shape, full):
        raise ValueError(f"multimax: expected {name} that broadcasts to the scores' shape {full}, got {shape(value)}")


def window_bounds(window: object) -> tuple[int, int]:
    """(left, right), -1 where there is no bound."""
    if window is None:
        return -1, -1
    remedy = "(w - 1, 0) is a causal window of w keys, None in it is no bound"
    if not isinstance(window, tuple) or len(window) != 2:
        raise TypeError(f"multimax: expected window to be a pair (left, right), got {window!r}; {remedy}")
    for bound in window:
        if bound is not None and (not isinstance(bound, int) or isinstance(bound, bool) or bound < 0):
            raise ValueError(f"multimax: expected window of ints of at least 0 or None, got {window!r}; {remedy}")
    # no sequence is that long; sys.maxsize, for "no bound", would overflow where lengths are added to it
    left, right = (-1 if bound is None else min(bound, 2**60) for bound in window)
    return left, right


def starts(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, query: Tensor, key: Tensor) -> None:
    """Where packed sequences begin and end, for a query of (1, H, all queries, D) and a key likewise. Their values are
    checked on the CPU alone: elsewhere the host would have to wait for them."""
    for name, value in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(value, Tensor) or value.dtype not in (torch.int32, torch.int64) or value.ndim != 1:
            got = f"{value.dtype} of shape {shape(value)}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"multimax: expected {name} to be a tensor of int32 or int64 of shape (B + 1,), got {got}")
        same_device(name, value, query)
        if value.shape[0] < 1:
            raise ValueError(f"multimax: expected {name} of shape (B + 1,), got {shape(value)}")
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"multimax: expected cu_seqlens_k of the shape of cu_seqlens_q, {shape(cu_seqlens_q)}, "
            f"got {shape(cu_seqlens_k)}"
        )
    # the kernels check too, but cannot raise Python errors
    if query.device.type == "cpu" and not torch.compiler.is_compiling():
        rising("cu_seqlens_q", cu_seqlens_q, query.shape[2])
        rising("cu_seqlens_k", cu_seqlens_k, key.shape[2])


def rising(name: str, value: Tensor, total: int) -> None:
    """Starts that go from 0 to the number of rows, none below its predecessor."""
    values: list[int] = value.tolist()
    if values[0] != 0 or values[-1] != total or sorted(values) != values:
        raise ValueError(f"multimax: expected {name} to rise from 0 to {total}, the number of its rows, got {values}")


def partial_results(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    """Attention over parts of the keys: outputs of one shape, and their log-sums."""
    if not outputs or len(outputs) != len(lses):
        raise ValueError(f"multimax: expected as many lses as outputs, got {len(lses)} and {len(outputs)}")
    for out, lse in zip(outputs, lses, strict=True):
        tensor("outputs", out)
        tensor("lses", lse)
        if out.shape != outputs[0].shape or lse.shape != out.shape[:-1]:
            raise ValueError(
                f"multimax: expected outputs of one shape, {shape(outputs[0])}, with lses of that shape but its "
                f"last dim, got {shape(out)} with {shape(lse)}"
            )


REDUCTIONS = ("mean", "sum", "none")


def one_set(x: Tensor, coefs: Tensor, knots: Tensor) -> None:
    """One set of parameters for all rows."""
    pair(coefs, knots)
    same_device("coefs", coefs, x)
    same_device("knots", knots, x)
    if coefs.ndim != 2:
        raise ValueError(f"multimax: expected coefs of shape (order, 2) for a loss, got {shape(coefs)}")


def target(value: object, like: Tensor, hard: tuple[int, ...], soft: tuple[int, ...], ignore_index: int) -> None:
    """Class indices of one shape, or probabilities of another."""
    wanted = f"class indices of shape {hard} or probabilities of shape {soft}"
    if not isinstance(value, Tensor):
        raise TypeError(f"multimax: expected target to be {wanted}, got {type(value).__name__}")
    dense("target", value)
    same_device("target", value, like)
    if value.is_floating_point():
        if tuple(value.shape) != soft:
            raise ValueError(f"multimax: expected target to be {wanted}, got probabilities of shape {shape(value)}")
        if ignore_index >= 0:
            raise ValueError(
                f"multimax: expected no ignore_index with probabilities, got {ignore_index}; "
                "rows are ignored by their index, which probabilities do not have"
            )
        return
    if value.dtype not in (torch.int64, torch.int32, torch.uint8):
        raise TypeError(f"multimax: expected target to be {wanted}, got {value.dtype}; convert it with .long()")
    if tuple(value.shape) != hard:
        raise ValueError(f"multimax: expected target to be {wanted}, got indices of shape {shape(value)}")


# How far the sum of target probabilities may be from 1: they may have been computed in half precision, whatever their
# dtype now. Two roundings of each, as of smoothing and mixup in bfloat16, change the sum by at most the dtype's eps;
# probabilities next to float16's smallest number, as of smoothing over many classes, by half of that each.
ROUNDING = torch.finfo(torch.bfloat16).eps
SMALLEST = torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps


def target_values(value: Tensor, classes: int, ignore_index: int) -> None:
    """Indices below the number of classes, or valid probabilities. On the CPU alone: elsewhere the host would have to
    wait for the values, and a row with a wrong index has a loss of NaN instead."""
    if value.numel() == 0 or value.device.type != "cpu":
        return
    if not value.is_floating_point():
        wrong = (value != ignore_index) & ((value < 0) | (value >= classes))
        if wrong.any():
            got = value[wrong][0].item()
            raise ValueError(
                f"multimax: expected targets in [0, {classes - 1}] or ignore_index={ignore_index}, got {got}"
            )
        return
    low, high = (bound.item() for bound in value.aminmax())
    if not (low >= 0 and high <= 1 + ROUNDING):
        raise ValueError(f"multimax: expected target probabilities in [0, 1], got values from {low:g} to {high:g}")
    total = value.sum(-1, dtype=torch.float32 if value.dtype != torch.float64 else value.dtype)
    off = (total - 1).abs().max().item()
    if not off <= ROUNDING + value.shape[-1] * SMALLEST / 2:
        raise ValueError(f"multimax: expected target probabilities that sum to 1 in each row, got a sum off by {off:g}")


def logits(value: object) -> None:
    """Logits with a dim of classes."""
    tensor("input", value)
    assert isinstance(value, Tensor)
    if value.ndim < 1:
        raise ValueError(f"multimax: expected input of shape (C,), (R, C) or (R, C, ...), got {shape(value)}")


def loss_options(reduction: object, label_smoothing: object, z_loss: object) -> None:
    """How a loss is put together."""
    choice("reduction", reduction, REDUCTIONS)
    number("label_smoothing", label_smoothing, 0, 1)
    number("z_loss", z_loss, 0, float("inf"))


def rows_of_a_chunk(chunk: object) -> int:
    """How many rows' logits are held at once."""
    rows = integer("chunk", chunk)
    if rows < 1:
        raise ValueError(f"multimax: expected chunk of at least 1 row, got {rows}")
    return rows


def whole_rows(target: Tensor, places: tuple[int, ...]) -> None:
    """What a weight that is split over processes can be used with."""
    if target.is_floating_point() or places:
        raise ValueError(
            "multimax: expected class indices and a linear_weight of shape (classes, in_features) with a group"
        )


def class_weight(value: object, x: Tensor, classes: int) -> None:
    """None, or one weight per class."""
    if value is None:
        return
    tensor("weight", value)
    assert isinstance(value, Tensor)
    same_device("weight", value, x)
    if tuple(value.shape) != (classes,):
        raise ValueError(f"multimax: expected weight of shape ({classes},), one per class, got {shape(value)}")
    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError("multimax: expected weight without gradient, as in torch; detach it")


def linear(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, autocast: bool) -> None:
    """Hidden states, already checked, and a layer that belong together; of any dtypes under autocast."""
    tensor("linear_weight", linear_weight)
    if input.ndim < 1:
        raise ValueError(f"multimax: expected input of shape (..., in_features), got {shape(input)}")
    if linear_weight.ndim < 2 or linear_weight.shape[-1] != input.shape[-1]:
        raise ValueError(
            f"multimax: expected linear_weight of shape (classes, {input.shape[-1]}) for input of {shape(input)}, "
            f"got {shape(linear_weight)}"
        )
    if linear_weight.ndim > 2 and input.ndim != 2:
        raise ValueError(
            f"multimax: expected input of shape (rows, in_features) with linear_weight of {shape(linear_weight)}, "
            f"got {shape(input)}"
        )
    given = [("linear_weight", linear_weight)]
    if linear_bias is not None:
        tensor("linear_bias", linear_bias)
        given.append(("linear_bias", linear_bias))
        if linear_bias.shape != linear_weight.shape[:-1]:
            raise ValueError(
                f"multimax: expected linear_bias of shape {tuple(linear_weight.shape[:-1])}, got {shape(linear_bias)}"
            )
    for name, value in given:
        same_device(name, value, input)
        if value.dtype != input.dtype and not autocast:
            raise TypeError(f"multimax: expected {name} of the input's dtype, {input.dtype}, got {value.dtype}")


# metrics, training, oversmoothing


def real_number(name: str, value: object, *, optional: bool = False) -> None:
    """Any number, including NaN and infinity; also None if it is optional."""
    if value is None and optional:
        return
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        wanted = "a number or None" if optional else "a number"
        raise TypeError(f"multimax: expected {name} to be {wanted}, got {type(value).__name__}")


def positive_integer(name: str, value: object) -> int:
    """An int of at least 1."""
    number = integer(name, value)
    if number < 1:
        raise ValueError(f"multimax: expected {name} of at least 1, got {number}")
    return number


def weights_for(x: Tensor, weights: Tensor) -> None:
    """The weights that a reweighting function gave for x."""
    tensor("x", x)
    tensor("weights", weights)
    if weights.shape != x.shape:
        raise ValueError(f"multimax: expected weights of the shape of x, {shape(x)}, got {shape(weights)}")
    same_device("weights", weights, x)


def one_or_per_row(value: Tensor, rows: torch.Size) -> None:
    """One number, or one per row."""
    if value.numel() != 1 and value.shape != rows:
        raise ValueError(f"multimax: expected one number or one per row, of shape {tuple(rows)}, got {shape(value)}")


def bin_range(low: object, high: object) -> tuple[float, float]:
    """The ends of a logarithmic scale."""
    first, last = number("low", low, 0, float("inf")), number("high", high, 0, float("inf"))
    if not 0 < first < last < float("inf"):
        raise ValueError(f"multimax: expected 0 < low < high, both finite, got {first:g} and {last:g}")
    return first, last


def same_edges(histogram: object, other: object, edges: Tensor, other_edges: Tensor) -> None:
    """Histograms that can be added."""
    if not torch.equal(edges, other_edges):
        raise ValueError(f"multimax: expected a histogram of the same edges, got {other!r} for {histogram!r}")


def thresholds(values: Tensor, low: float, high: float) -> None:
    """Numbers in the range of a histogram's bins."""
    if not bool(((values >= low) & (values <= high)).all()):
        raise ValueError(
            f"multimax: expected thresholds in [{low:g}, {high:g}], the range of the bins, got {values.tolist()}; "
            "make the histogram with another low or high"
        )


def features(value: Tensor) -> None:
    """Features of patches."""
    tensor("features", value)
    if value.ndim < 2:
        raise ValueError(f"multimax: expected features of shape (..., patches, features), got {shape(value)}")


def features_mask(mask: object, value: Tensor, full: tuple[int, ...], of: str) -> Tensor | None:
    """A boolean mask of the patches, or of their pairs, of features; in the full shape."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"multimax: expected mask to be a boolean tensor, True for {of} that take part, got {got}")
    same_device("mask", mask, value)
    try:
        return mask.expand(full)
    except RuntimeError:
        raise ValueError(
            f"multimax: expected a mask that broadcasts to {full}, the {of} of features of shape {shape(value)}, "
            f"got {shape(mask)}"
        ) from None


def self_attention(attention: Tensor, heads_dim: int | None) -> int | None:
    """Attention whose queries are its keys; returns the dim of the heads, counted from the front."""
    tensor("attention", attention)
    dim = None if heads_dim is None else dimension(heads_dim, attention.ndim)
    if dim is not None and dim >= attention.ndim - 2:
        raise ValueError(
            "multimax: expected heads_dim to be a dim before the queries and keys of attention of shape "
            f"{shape(attention)}, got {heads_dim}"
        )
    sizes = tuple(size for place, size in enumerate(attention.shape) if place != dim)
    if len(sizes) < 2 or sizes[-1] != sizes[-2]:
        raise ValueError(
            f"multimax: expected self-attention, (..., L, L), or with heads_dim one more dim, got {sizes}; rollout is "
            "not defined for cross attention"
        )
    return dim


def next_of_rollout(attention: Tensor, before: Tensor | None) -> None:
    """A layer's map, of the same length as the maps of the layers before."""
    if before is not None and attention.shape[-2:] != before.shape[-2:]:
        raise ValueError(
            f"multimax: expected attention of one length in all layers, {before.shape[-1]}, got {attention.shape[-1]}"
        )


def begun(rollout: Tensor | None) -> Tensor:
    """A rollout that has at least one layer."""
    if rollout is None:
        raise ValueError("multimax: expected a layer before the discrepancy, got none; call update first")
    return rollout


def single_set(coefs: Tensor, knots: Tensor) -> None:
    """One set of parameters, not one per head."""
    pair(coefs, knots)
    if coefs.ndim != 2:
        raise ValueError(f"multimax: expected coefs of shape (order, 2), one set, got {shape(coefs)}")


def finite_interval(low: float, high: float) -> None:
    """Two finite numbers in order."""
    if not float("-inf") < low <= high < float("inf"):
        raise ValueError(f"multimax: expected finite low <= high, got {low} and {high}")


def measures(names: object, known: tuple[str, ...], *, optional: bool) -> tuple[str, ...]:
    """Names of measures; none only if they are optional."""
    if isinstance(names, str) or not isinstance(names, Collection) or not (names or optional):
        raise TypeError(f"multimax: expected measures to be several names, got {names!r}; out of {', '.join(known)}")
    for name in names:
        choice("measures", name, known)
    return tuple(names)


def layers(names: object, model: torch.nn.Module) -> frozenset[str] | None:
    """Full names of modules of a model; None for all."""
    if names is None:
        return None
    if isinstance(names, str) or not isinstance(names, Collection):
        raise TypeError(f"multimax: expected layers to be several full names of modules, got {names!r}")
    known = dict(model.named_modules())
    for name in names:
        if name not in known:
            raise ValueError(
                f"multimax: expected layers to be full names of the model's modules, {', '.join(map(repr, known))}, "
                f"got {name!r}"
            )
    return frozenset(names)


# transformers' attention functions that compute no weights, by the beginning of their names
WITHOUT_WEIGHTS = ("sdpa", "flash", "flex", "paged")


def observable(model: torch.nn.Module) -> None:
    """A model whose attention can be observed."""
    for name, part in model.named_modules():
        place = f"{name or 'the model'} ({type(part).__name__})"
        if hasattr(part, "_orig_mod") or part._compiled_call_impl is not None:
            raise ValueError(
                f"multimax: expected a model that is not compiled, got {place} under torch.compile, whose attention "
                "cannot be observed; collect from the model before it was compiled"
            )
        implementation = getattr(getattr(part, "config", None), "_attn_implementation", None)
        if "Attention" not in type(part).__name__ or not isinstance(implementation, str):
            continue
        if implementation.startswith(WITHOUT_WEIGHTS) or "/" in implementation:
            raise ValueError(
                f"multimax: expected eager attention, which returns its weights, got {implementation!r} in {place}; "
                'make the model with attn_implementation="eager", or call model.set_attn_implementation("eager")'
            )


def before_dropout(module: torch.nn.Module) -> None:
    """A module in evaluation, if its weights would not sum to 1 in training."""
    if module.training:
        raise ValueError(
            f"multimax: expected weights before dropout, got {type(module).__name__}'s after dropout, which do not "
            "sum to 1; call model.eval(), or set the attention's dropout to 0"
        )


def no_dropout(name: str, module: torch.nn.Module, drops: bool) -> None:
    """Attention with softmax that does not drop weights in training."""
    if drops and module.training:
        raise ValueError(
            f"multimax: expected attention with a reweighting module, got {name} ({type(module).__name__}) with "
            "softmax and dropout, whose weights can only be seen after dropout; set its dropout to 0"
        )


def attention_ran(ran: Collection[str], elsewhere: Collection[str]) -> None:
    """At least one layer of those asked for."""
    if ran:
        return
    if elsewhere:
        raise ValueError(
            "multimax: expected attention in the given layers, got none; it is in " + ", ".join(map(repr, elsewhere))
        )
    raise ValueError(
        "multimax: expected attention to run inside collect, got none; call the model itself in the context, and "
        "not under torch.compile; custom attention is observed if it calls multimax.multimax_attention or a "
        "module such as multimax.MultiMax or nn.Softmax, or if its class is named ...Attention and returns "
        "(result, weights)"
    )


def some_multimax(found: Collection[object]) -> None:
    """A model with MultiMax in it."""
    if not found:
        raise ValueError("multimax: expected a model with MultiMax in it, got one without any multimax.MultiMax module")


def some_reweighting_modules(model: torch.nn.Module, found: Collection[object]) -> None:
    """A model with reweighting functions in it."""
    if not found:
        raise ValueError(
            f"multimax: expected a model with reweighting modules, got {type(model).__name__} with none; "
            "convert it first"
        )


def some_reweighting_parameters(model: torch.nn.Module, found: Collection[object]) -> None:
    """A model with reweighting functions that learn."""
    if not found:
        raise ValueError(
            f"multimax: expected a model with parameters of a reweighting function, got {type(model).__name__} with "
            "none; convert it first, or use multimax.MultiheadAttention or multimax.MultiMaxHead in it"
        )


def score_range(value: tuple[float, float] | None) -> None:
    """The range of the scores; None if it is to be observed."""
    if value is None:
        return
    if len(value) != 2 or not value[0] < value[1]:
        raise ValueError(f"multimax: expected score_range of (low, high), low < high, got {value!r}")


def patches(name: str, value: Tensor) -> None:
    """Features of at least two patches, since each is compared with the others."""
    tensor(name, value)
    if value.ndim != 3:
        raise ValueError(f"multimax: expected {name} of shape (batch, patches, features), got {shape(value)}")
    if value.shape[1] < 2:
        raise ValueError(
            f"multimax: expected {name} of at least 2 patches, (batch, patches, features), got {shape(value)}"
        )


def first_and_last(first: Tensor, last: Tensor) -> None:
    """Features of the same patches in two layers."""
    patches("first", first)
    patches("last", last)
    if first.shape != last.shape:
        raise ValueError(
            f"multimax: expected first of the shape of last, {shape(last)}, got {shape(first)}; "
            "both without the class token"
        )
    same_device("first", first, last)


def patch_size(value: object, images: Tensor) -> tuple[int, int]:
    """Height and width of the patches that images are cut into."""
    tensor("images", images)
    if images.ndim != 4:
        raise ValueError(f"multimax: expected images of shape (batch, channels, height, width), got {shape(images)}")
    sides = value if isinstance(value, tuple) else (value, value)
    if len(sides) != 2:
        raise ValueError(f"multimax: expected patch_size to be an int or a pair (height, width), got {value!r}")
    sides = tuple(integer("patch_size", side) for side in sides)
    size = tuple(images.shape[-2:])
    if min(sides) < 1 or any(length % side for length, side in zip(size, sides, strict=True)):
        raise ValueError(
            f"multimax: expected a patch_size that divides the images' height and width, {size}, got {value!r}; "
            "crop or resize the images"
        )
    return sides


def image_targets(value: object, images: Tensor) -> None:
    """A class, or probabilities of classes, for each image."""
    batch = images.shape[0]
    if not isinstance(value, Tensor) or value.ndim not in (1, 2) or value.shape[0] != batch:
        got = shape(value) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"multimax: expected targets to be class indices of shape ({batch},) or probabilities of shape "
            f"({batch}, classes), got {got}"
        )
    target(value, images, (batch,), tuple(value.shape), -100)


def patch_logits(value: Tensor) -> None:
    """Logits for each patch."""
    tensor("patch_logits", value)
    if value.ndim != 3:
        raise ValueError(f"multimax: expected patch_logits of shape (batch, patches, classes), got {shape(value)}")


# reweighting, nn


def rows(x: object, dim: int, mask: object) -> tuple[int, Tensor | None]:
    """An input; returns its dim, counted from the front, and its mask, in the input's shape."""
    tensor("x", x)
    assert isinstance(x, Tensor)
    return dimension(dim, x.ndim), mask_for(x, mask)


def function_options(
    name: str, given: Mapping[str, object], known: Mapping[str, inspect.Parameter], module: str | None
) -> None:
    """Options of a reweighting function, with all that are required; a module may supply those that are missing."""
    unknown = [key for key in given if key not in known]
    if unknown:
        raise TypeError(
            f"multimax: expected options of {name} out of: {', '.join(known) or 'none'}, got {', '.join(unknown)}"
        )
    missing = [key for key, parameter in known.items() if parameter.default is parameter.empty and key not in given]
    if missing:
        remedy = "" if module is None else f"; a {module} module has its own"
        raise TypeError(f"multimax: expected {' and '.join(missing)} for {name}, got no such option{remedy}")


def module_options(module: type[torch.nn.Module], given: Mapping[str, object]) -> None:
    """Options that a module's class takes."""
    try:
        inspect.signature(module).bind(**given)
    except TypeError as error:
        raise TypeError(
            f"multimax: expected the options of {module.__name__}, got {', '.join(given) or 'none'}: {error}"
        ) from None


def reweight_function(reweight: object) -> None:
    """Something that can be called as a reweighting function."""
    if not callable(reweight):
        raise TypeError(
            f"multimax: expected reweight to be a name, a module or a function of (x, dim, mask), got {reweight!r}"
        )


def reweight_module(reweight: object, default_options: bool) -> None:
    """The name or the module of a function other than MultiMax, without MultiMax's options."""
    if not default_options:
        raise ValueError(
            "multimax: expected order, terms, per_head, init and monotone with reweight='multimax' only, got "
            f"them with {reweight!r}; give its module with the options it takes"
        )
    if not isinstance(reweight, (str, torch.nn.Module)):
        raise TypeError(f"multimax: expected reweight to be a name or a module, got {reweight!r}")


def dims_with_heads(ndim: int) -> None:
    """Dims with one for the heads among them."""
    if ndim < 2:
        raise ValueError(f"multimax: expected an input of (..., heads, queries, keys), got {ndim} dims")


def trained_alpha(alpha: float, low: float, high: float) -> None:
    """An alpha within the bounds that it is trained in."""
    if not 1 < low < alpha < high < float("inf"):
        raise ValueError(f"multimax: expected 1 < low < alpha < high for a trained alpha, got {low}, {alpha}, {high}")


def initial_pair(init: tuple[Tensor, Tensor], size: tuple[int, ...], monotone: bool) -> None:
    """Initial coefs and knots of a module."""
    if not isinstance(init, (tuple, list)) or len(init) != 2:
        raise TypeError(f"multimax: expected init to be a name or a pair of tensors (coefs, knots), got {init!r}")
    coefs, knots = init
    pair(coefs, knots)
    if tuple(coefs.shape) != size:
        raise ValueError(f"multimax: expected init tensors of shape {size}, got {shape(coefs)}")
    if monotone:
        raise ValueError(
            "multimax: expected init to be 'paper' or 'identity' with monotone=True, got tensors; "
            "the stored tensors are not the ones in use then"
        )


def learned_init(name: str, order: int, monotone: bool, depth: object) -> None:
    """An init by the name of a model whose learned parameters the paper prints: of order 2, and not monotone."""
    if order > 2:
        raise ValueError(f"multimax: expected an order of at most 2 with init={name!r}, got {order}")
    if monotone:
        raise ValueError(
            f"multimax: expected init to be 'paper' or 'identity' with monotone=True, got {name!r}, whose layers are "
            "not monotone"
        )
    if isinstance(depth, bool) or not isinstance(depth, (int, float)) or not 0 <= depth <= 1:
        raise ValueError(f"multimax: expected depth from 0, the first layer, to 1, the last, got {depth!r}")


def omega(value: object, like: Tensor, weights: tuple[int, ...]) -> None:
    """Omega of AttnScale, for weights of a shape (..., heads, queries, keys)."""
    tensor("omega", value)
    assert isinstance(value, Tensor)
    same_device("omega", value, like)
    if len(weights) < 1:
        raise ValueError(f"multimax: expected weights of shape (..., heads, queries, keys), got {weights}")
    heads = weights[-3] if len(weights) > 2 else None
    if value.ndim and (value.ndim != 1 or value.shape[0] != heads):
        wanted = "shape ()" if heads is None else f"shape () or ({heads},)"
        raise ValueError(
            f"multimax: expected omega of {wanted} for weights of shape {weights}, "
            f"got {shape(value)}; one value, or one per head for weights (..., heads, queries, keys)"
        )


def no_loss_options(given: Mapping[str, object]) -> None:
    """Options of a loss, where none is computed."""
    if given:
        raise TypeError(f"multimax: expected no {', '.join(given)} without a target; these are options of the loss")


def nested_inputs(query: Tensor, key: Tensor, value: Tensor, batch_first: bool, no_masks: bool) -> None:
    """Nested tensors as the inputs of an attention module, which torch's takes for self-attention alone."""
    if query is not key or key is not value or query.layout != torch.strided or not batch_first or not no_masks:
        raise TypeError(
            "multimax: expected a nested tensor as query, key and value at once, strided, with batch_first=True and "
            "without masks; pad what is to be attended otherwise, with torch.nested.to_padded_tensor"
        )


def module_inputs(query: Tensor, key: Tensor, value: Tensor, batch_dim: int) -> None:
    """The inputs of an attention module: (L, E), (B, L, E) or (L, B, E)."""
    expected = None
    if query.dim() not in (2, 3) or key.dim() != query.dim() or value.dim() != query.dim():
        expected = "all of 2 or all of 3 dims"
    elif query.dim() == 3 and not query.shape[batch_dim] == key.shape[batch_dim] == value.shape[batch_dim]:
        expected = f"of one batch, on dim {batch_dim}"
    if expected:
        got = f"{shape(query)}, {shape(key)} and {shape(value)}"
        raise ValueError(f"multimax: expected query, key and value {expected}, got {got}")


def causal_hint(is_causal: object, attn_mask: Tensor | None) -> None:
    """torch's hint, which describes a mask but is not one."""
    flag("is_causal", is_causal)
    if is_causal and attn_mask is None:
        raise ValueError("multimax: expected an attn_mask with is_causal=True, which is only a hint, as in torch")


def module_mask(name: str, value: object, *allowed: tuple[int, ...]) -> None:
    """A mask of an attention module, of one of several shapes."""
    numbers(name, value, boolean=True)
    assert isinstance(value, Tensor)
    if tuple(value.shape) not in allowed:
        raise ValueError(f"multimax: expected {name} of shape {' or '.join(map(str, allowed))}, got {shape(value)}")
