"""Every check on arguments, once: what was expected, what came, and the remedy where there is one."""

import inspect
from collections.abc import Mapping

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def shape(tensor: Tensor) -> str:
    """A shape as the messages print it."""
    return str(tuple(tensor.shape))


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
    dense(name, value)


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
    own = tuple(value.shape)
    if len(own) > len(sizes) or any(a not in (1, b) for a, b in zip(own[::-1], sizes[::-1], strict=False)):
        raise ValueError(
            f"multimax: expected {name} that broadcasts to {tuple(sizes)}, the input's shape with 1 in dim {dim}, "
            f"got {own}"
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
    flag("learn", learn)
    if heads is None:
        return
    at_least("heads", heads, 1)
    if not learn:
        raise ValueError("multimax: expected learn=True with heads: what is not learned is the same for all")


def attention_inputs(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, shapes: str) -> None:
    """Query, key and value that belong together; heads on dim -3, entries on -1, lengths on -2."""
    for name, own in (("query", query), ("key", key), ("value", value)):
        tensor(name, own)
        if own.ndim < 2:
            raise ValueError(f"multimax: expected {name} of shape {shapes}, got {shape(own)}")
        same_device(name, own, query)
        if own.dtype != query.dtype:
            raise TypeError(f"multimax: expected {name} of the query's dtype, {query.dtype}, got {own.dtype}")
        if own.ndim != query.ndim:
            raise ValueError(f"multimax: expected {name} of as many dims as the query, {query.ndim}, got {own.ndim}")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"multimax: expected key of the query's last size, {query.shape[-1]}, got {shape(key)} for {shape(query)}"
        )
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(f"multimax: expected value of the key's length, {key.shape[-2]}, got {shape(value)}")
    if query.ndim < 3:
        return
    heads, key_heads, value_heads = (own.shape[-3] for own in (query, key, value))
    if key_heads != value_heads:
        raise ValueError(f"multimax: expected value of as many heads as the key, {key_heads}, got {value_heads}")
    if enable_gqa:
        if key_heads == 0 or heads % key_heads:
            raise ValueError(f"multimax: expected query heads in groups of the key's {key_heads} heads, got {heads}")
    elif key_heads != heads:
        remedy = "; enable_gqa=True shares key heads" if key_heads and heads % key_heads == 0 else ""
        raise ValueError(f"multimax: expected key of as many heads as the query, {heads}, got {key_heads}{remedy}")


def attention_parameters(query: Tensor, coefs: Tensor, knots: Tensor, heads: int) -> None:
    """One set, or one a head."""
    pair(coefs, knots)
    same_device("coefs", coefs, query)
    same_device("knots", knots, query)
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
    own = tuple(value.shape)
    if len(own) > len(full) or any(size not in (1, all_) for size, all_ in zip(own[::-1], full[::-1], strict=False)):
        raise ValueError(f"multimax: expected {name} that broadcasts to the scores' shape {full}, got {own}")


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


def starts(name: str, value: object, query: Tensor) -> None:
    """Where packed sequences begin and end."""
    if not isinstance(value, Tensor) or value.dtype not in (torch.int32, torch.int64) or value.ndim != 1:
        got = f"{value.dtype} of shape {shape(value)}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"multimax: expected {name} to be a tensor of int32 or int64 of shape (B + 1,), got {got}")
    same_device(name, value, query)
    if value.shape[0] < 1:
        raise ValueError(f"multimax: expected {name} of shape (B + 1,), got {shape(value)}")


def rising(name: str, value: Tensor, total: int) -> list[int]:
    """The starts' values: from 0 to the number of rows, none below its predecessor."""
    values: list[int] = value.tolist()
    if values[0] != 0 or values[-1] != total or sorted(values) != values:
        raise ValueError(f"multimax: expected {name} to rise from 0 to {total}, the number of its rows, got {values}")
    return values


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


def class_weight(value: object, x: Tensor, classes: int) -> None:
    """A weight a class."""
    tensor("weight", value)
    assert isinstance(value, Tensor)
    same_device("weight", value, x)
    if tuple(value.shape) != (classes,):
        raise ValueError(f"multimax: expected weight of shape ({classes},), one a class, got {shape(value)}")


def linear(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, autocast: bool) -> None:
    """Hidden states and a layer that belong together; of any dtypes under autocast."""
    tensor("input", input)
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


# reweighting, nn


def rows(x: object, dim: int, mask: object) -> tuple[int, Tensor | None]:
    """An input with a dim of it, given back as counted from the front, and with a mask, of the input's shape."""
    tensor("x", x)
    assert isinstance(x, Tensor)
    return dimension(dim, x.ndim), mask_for(x, mask)


def function_options(
    name: str, given: Mapping[str, object], known: Mapping[str, inspect.Parameter], module: str | None
) -> None:
    """Options of a reweighting function, all that it needs; a module may have what is missing."""
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
    """What can be called as a reweighting function."""
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
    """Dims among which there is one for the heads."""
    if ndim < 2:
        raise ValueError(f"multimax: expected an input of (..., heads, queries, keys), got {ndim} dims")


def trained_alpha(alpha: float, low: float, high: float) -> None:
    """An alpha that lies within the bounds that it is trained in."""
    if not 1 < low < alpha < high < float("inf"):
        raise ValueError(f"multimax: expected 1 < low < alpha < high for a trained alpha, got {low}, {alpha}, {high}")


def initial_pair(init: tuple[Tensor, Tensor], size: tuple[int, ...], monotone: bool) -> None:
    """Initial coefs and knots of a module."""
    coefs, knots = init
    pair(coefs, knots)
    if tuple(coefs.shape) != size:
        raise ValueError(f"multimax: expected init tensors of shape {size}, got {shape(coefs)}")
    if monotone:
        raise ValueError(
            "multimax: expected init to be 'paper' or 'identity' with monotone=True, got tensors; "
            "what is stored is then not what is used"
        )


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


def class_scores(input: object) -> None:
    """The input of a loss over classes."""
    tensor("input", input)
    assert isinstance(input, Tensor)
    if input.ndim < 1:
        raise ValueError(f"multimax: expected input of shape (C,), (R, C) or (R, C, ...), got {shape(input)}")


def no_loss_options(given: Mapping[str, object]) -> None:
    """Options of a loss, where none is computed."""
    if given:
        raise TypeError(f"multimax: expected no {', '.join(given)} without a target, these are the loss's")


def module_inputs(query: Tensor, key: Tensor, value: Tensor) -> None:
    """The inputs of an attention module: (L, E), (B, L, E) or (L, B, E)."""
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.is_nested:  # nn.TransformerEncoder makes them, in evaluation
            raise TypeError(
                f"multimax: expected {name} to be a dense tensor, got a nested one; make nn.TransformerEncoder "
                "with enable_nested_tensor=False"
            )
    if query.dim() not in (2, 3) or key.dim() != query.dim() or value.dim() != query.dim():
        raise ValueError(
            "multimax: expected query, key and value of 2 or 3 dims, got "
            f"{shape(query)}, {shape(key)} and {shape(value)}"
        )


def causal_hint(is_causal: object, attn_mask: Tensor | None) -> None:
    """torch's hint, which says something of a mask and is none."""
    flag("is_causal", is_causal)
    if is_causal and attn_mask is None:
        raise ValueError("multimax: expected an attn_mask beside is_causal=True, which is only a hint, as in torch")


def one_of_shapes(name: str, value: Tensor, *allowed: tuple[int, ...]) -> None:
    """A tensor of one of some shapes."""
    if tuple(value.shape) not in allowed:
        raise ValueError(f"multimax: expected {name} of shape {' or '.join(map(str, allowed))}, got {shape(value)}")
