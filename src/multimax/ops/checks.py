"""Every check on arguments, once: what was expected, what came, and the remedy where there is one."""

from collections.abc import Mapping, Sequence

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
    return all(size in (1, whole) for size, whole in zip(sizes[::-1], full[::-1], strict=False))


def choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """One of several words."""
    if value not in allowed:
        raise ValueError(f"multimax: expected {name} to be one of {', '.join(map(repr, allowed))}, got {value!r}")


def instruction_set(name: object, known: tuple[str, ...]) -> None:
    """One of those that kernels are compiled for."""
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
    """The paper's symbols, each of one value per order."""
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
    """Knots beside coefs, or coefs beside knots, of one shape."""
    if name not in entries or entries[name].shape != entries[key].shape:
        raise ValueError(f"multimax: expected {name} of shape {shape(entries[key])} beside {key}, got none such")


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


def flag(name: str, value: object) -> None:
    """True or False, and nothing that merely counts as one of them."""
    if not isinstance(value, (bool, torch.SymBool)):
        raise TypeError(f"multimax: expected {name} to be True or False, got {value!r}")


def at_least(name: str, value: object, least: int) -> None:
    """An int of at least so much."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"multimax: expected {name} to be an int of at least {least}, got {value!r}")


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
    """A number, or what turns into one, such as a tensor without dims."""
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"multimax: expected {name} to be a number, got {type(value).__name__}")
    return float(value)


def number(name: str, value: object, low: float, high: float) -> float:
    """A number of an interval, its ends included."""
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
    """A number, and no tensor, above a bound."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"multimax: expected {name} to be a number, got {type(value).__name__}")
    if not low < value or (value == float("inf") and not infinite):
        raise ValueError(f"multimax: expected {name} above {low:g}{'' if infinite else ' and finite'}, got {value}")


def above(name: str, value: object, low: float, x: Tensor, dim: int) -> None:
    """A number above a bound, or a tensor of such that broadcasts against x, with size 1 along dim."""
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
    if not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active():
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
    if heads is None:
        return
    at_least("heads", heads, 1)
    if not learn:
        raise ValueError("multimax: expected learn=True with heads: what is not learned is the same for all")


def attention_inputs(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, shapes: str) -> None:
    """Query, key and value that belong together; heads on dim -3, entries on -1, lengths on -2."""
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.ndim < 2:
            raise ValueError(f"multimax: expected {name} of shape {shapes}, got {shape(t)}")
        if t.device != query.device:
            same_device(name, t, query)
        if t.dtype != query.dtype:
            raise TypeError(f"multimax: expected {name} of the query's dtype, {query.dtype}, got {t.dtype}")
        if t.ndim != query.ndim:
            raise ValueError(f"multimax: expected {name} of as many dims as the query, {query.ndim}, got {t.ndim}")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"multimax: expected key of the query's last size, {query.shape[-1]}, got {shape(key)} for {shape(query)}"
        )
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(f"multimax: expected value of the key's length, {key.shape[-2]}, got {shape(value)}")
    if query.ndim < 3:
        return
    heads, key_heads, value_heads = query.shape[-3], key.shape[-3], value.shape[-3]
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
    same_device("coefs", coefs, query)
    same_device("knots", knots, query)
    heads = query.shape[1]
    if coefs.ndim > 3 or (coefs.ndim == 3 and coefs.shape[0] not in (1, heads)):
        raise ValueError(
            f"multimax: expected coefs of shape (order, 2) or ({heads}, order, 2) for {heads} heads, got {shape(coefs)}"
        )


def scores(name: str, value: object, query: Tensor, full: tuple[int, ...], boolean: bool) -> None:
    """A mask or a bias that broadcasts to the scores."""
    kind = "a boolean or floating-point tensor" if boolean else "a floating-point tensor"
    if not isinstance(value, Tensor) or (value.dtype not in DTYPES and not (boolean and value.dtype == torch.bool)):
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"multimax: expected {name} to be {kind}, got {got}")
    dense(name, value)
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
    # no sequence is so long; sys.maxsize, for "no bound", would overflow where lengths are added to it
    left, right = (-1 if bound is None else min(bound, 2**60) for bound in window)
    return left, right


def starts(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, query: Tensor, key: Tensor) -> None:
    """Where packed sequences begin and end, for a query of (1, H, all queries, D) and a key likewise."""
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
    if not torch.compiler.is_compiling():  # the kernels look too, but know no Python errors
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
                "a row is left out by its target, and these have no index"
            )
        return
    if value.dtype not in (torch.int64, torch.int32, torch.uint8):
        raise TypeError(f"multimax: expected target to be {wanted}, got {value.dtype}; convert it with .long()")
    if tuple(value.shape) != hard:
        raise ValueError(f"multimax: expected target to be {wanted}, got indices of shape {shape(value)}")


def target_values(value: Tensor, classes: int, ignore_index: int) -> None:
    """Indices below the number of classes, or probabilities that are some."""
    if value.numel() == 0:
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
    if not (low >= 0 and high <= 1.001):
        raise ValueError(f"multimax: expected target probabilities in [0, 1], got values from {low:g} to {high:g}")
    # half precision rounds each of the entries
    total = value.sum(-1, dtype=torch.float32 if value.dtype != torch.float64 else value.dtype)
    off = (total - 1).abs().max().item()
    if not off <= max(1e-3, torch.finfo(value.dtype).eps * 4):
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


def rows_of_a_chunk(chunk: int) -> None:
    """How many rows' logits are held at once."""
    integer("chunk", chunk)
    if chunk < 1:
        raise ValueError(f"multimax: expected chunk of at least 1 row, got {chunk}")


def whole_rows(target: Tensor, places: tuple[int, ...]) -> None:
    """What a weight in parts over processes can be used with."""
    if target.is_floating_point() or places:
        raise ValueError(
            "multimax: expected class indices and a weight (classes, in_features) with one in parts over processes"
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
        raise ValueError("multimax: expected weight without gradient, as torch does; detach it")


def linear(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, autocast: bool) -> None:
    """Hidden states, checked before, and a layer that belong together; of any dtypes under autocast."""
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
