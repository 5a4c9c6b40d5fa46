"""The cases of `multimax check`: every operation, with every option that has a path of its own in some kernel."""

import math
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multimax.cli.checking import eager
from multimax.ops import checks, dispatch
from multimax.ops.attention import reference
from multimax.ops.attention.api import multimax_attention, multimax_attention_varlen
from multimax.ops.attention.call import AttentionCall
from multimax.ops.attention.inputs import seed_of
from multimax.ops.entmax.api import entmax, entmax15, sparsemax
from multimax.ops.entmax.call import EntmaxCall
from multimax.ops.loss.api import linear_multimax_cross_entropy, multimax_cross_entropy
from multimax.ops.loss.call import LossCall
from multimax.ops.rows.api import log_multimax, modulate, multimax
from multimax.ops.rows.call import RowsCall

PARAMETERS = ("coefs", "knots", "alpha")  # float32 beside inputs of any dtype
SEED = 7  # for dropout

Values = dict[str, Tensor]
Options = dict[str, Any]
Results = dict[str, Tensor]


class Sizes(NamedTuple):
    """How large the cases are, and from how many draws a case is judged at first."""

    rows: int
    row: int
    long: int
    batch: int
    heads: int
    queries: int
    keys: int
    width: int
    tokens: int
    classes: int
    hidden: int
    draws: int


FULL = Sizes(40, 197, 20000, 2, 4, 130, 197, 64, 64, 1000, 48, 3)  # on a GPU
MEDIUM = Sizes(20, 197, 9000, 1, 4, 70, 130, 32, 32, 500, 32, 3)  # the same on a CPU
QUICK = Sizes(12, 65, 5000, 1, 4, 33, 70, 32, 24, 200, 24, 3)
TINY = Sizes(3, 37, 300, 1, 2, 9, 37, 16, 8, 60, 16, 2)  # an interpreted kernel takes milliseconds for each program


class Draws:
    """Random numbers on the CPU, the same for every device and implementation, without touching torch's generator."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.scale = 1 + seed / 16

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(shape, generator=self.generator)

    def below(self, share: float, *shape: int) -> Tensor:
        """True with that probability."""
        return torch.rand(shape, generator=self.generator) < share

    def indices(self, end: int, *shape: int) -> Tensor:
        """Whole numbers from 0 to before the end."""
        return torch.randint(end, shape, generator=self.generator)

    def parameters(self, order: int = 2, heads: int | None = None) -> Values:
        """Coefs and knots; the coefs shrink with the order, or else all weights would be one-hot vectors."""
        shape = (order, 2) if heads is None else (heads, order, 2)
        shrink = torch.tensor([0.5**n / (n + 1) for n in range(order)])[:, None]
        return {"coefs": self.normal(*shape) * shrink, "knots": self.normal(*shape)}


class Problem(NamedTuple):
    """One draw of a case: tensors that get a gradient, and what else the operation is given."""

    values: Values
    options: Options


class Case(NamedTuple):
    """An operation with certain options.

    Args:
        operation: the line of the report that it belongs to.
        room: the operation's name in dispatch's table.
        name: of the case.
        draw: makes a problem.
        run: the results of values and options by an implementation.
        plain: the same in plain PyTorch, in the values' dtype.
        exact: the same by the formulas of the reference; both are ``run`` with the reference unless given.
    """

    operation: str
    room: str
    name: str
    draw: Callable[[Draws], Problem]
    run: Callable[[Values, Options, str], Results]
    plain: Callable[[Values, Options], Results]
    exact: Callable[[Values, Options], Results]


def cases(sizes: Sizes) -> list[Case]:
    """All of them, those of an operation side by side."""
    return [*_rows(sizes), *_attention(sizes), *_packed(sizes), *_losses(sizes), *_linear(sizes), *_entmax(sizes)]


def small_call(room: str, device: torch.device) -> Any:
    """A call of that operation, to ask which implementation "auto" takes."""
    x, zero = torch.zeros(2, 4, device=device), torch.zeros(2, 2, device=device)
    if room == "rows":
        return RowsCall(x, zero, zero, None, 1, 0)
    if room == "entmax":
        return EntmaxCall(x, None, None, 0)
    if room == "loss":
        target = torch.zeros(2, dtype=torch.int64, device=device)
        return LossCall(x, target, zero, zero, None, -100, 0.0, "auto", False)
    return _call(
        {"query": x[None, None], "key": x[None, None], "value": x[None, None], "coefs": zero, "knots": zero}, {}
    )


def in_use(room: str, device: torch.device) -> str:
    """The name of the implementation that "auto" takes there."""
    implementations = dispatch.load(room)
    try:
        chosen = dispatch.choose(implementations, "auto", small_call(room, device))
    except (RuntimeError, KeyError):  # MULTIMAX_IMPL names one that cannot
        return "none"
    return next(name for name, module in implementations.items() if module is chosen)


def _reference(run: Callable[[Values, Options, str], Results]) -> Callable[[Values, Options], Results]:
    return lambda values, options: run(values, options, "reference")


def _simple(
    operation: str,
    room: str,
    name: str,
    draw: Callable[[Draws], Problem],
    run: Callable[[Values, Options, str], Results],
) -> Case:
    """A case whose reference is plain PyTorch too."""
    return Case(operation, room, name, draw, run, _reference(run), _reference(run))


# --- rows


def _rows(sizes: Sizes) -> Iterator[Case]:
    def last(draws: Draws) -> Problem:
        x = draws.normal(3, sizes.rows, sizes.row) * 2 * draws.scale
        return Problem({"x": x} | draws.parameters(), {})

    def third_order(draws: Draws) -> Problem:
        return Problem({"x": draws.normal(sizes.rows, sizes.row)} | draws.parameters(3), {})

    def long(draws: Draws) -> Problem:
        return Problem({"x": draws.normal(2, sizes.long) * draws.scale} | draws.parameters(1), {})

    def per_head(draws: Draws) -> Problem:
        x = draws.normal(2, sizes.heads, sizes.rows // 2 + 1, sizes.row) * draws.scale
        return Problem({"x": x} | draws.parameters(heads=sizes.heads), {})

    def middle(draws: Draws) -> Problem:
        x = draws.normal(3, sizes.row, sizes.rows) * 2 * draws.scale
        return Problem({"x": x} | draws.parameters(), {"dim": 1})

    def masked(draws: Draws) -> Problem:
        mask = draws.below(0.6, 3, sizes.rows, sizes.row)
        mask[1, 1] = False  # a row with nothing left
        return Problem(last(draws).values, {"mask": mask})

    def minus_infinity(draws: Draws) -> Problem:
        values = last(draws).values
        values["x"][draws.below(0.3, *values["x"].shape)] = -torch.inf
        return Problem(values, {})

    common = {
        "last dim": last,
        "third order": third_order,
        "long rows": long,
        "per head": per_head,
        "-inf": minus_infinity,
    }
    for function in (multimax, log_multimax, modulate):
        more = {} if function is modulate else {"middle dim": middle, "mask": masked}

        def run(values: Values, options: Options, impl: str, function: Any = function) -> Results:
            return {"weights": function(*values.values(), **options, impl=impl)}

        for name, draw in (common | more).items():
            yield _simple("rows", "rows", f"{function.__name__}, {name}", draw, run)


# --- attention


def _call(values: Values, options: Options) -> AttentionCall:
    """The call that the public functions build from the same arguments."""
    query, key, value = values["query"], values["key"], values["value"]
    starts = options.get("cu_seqlens_q"), options.get("cu_seqlens_k")
    if starts[0] is not None:
        query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
    left, right = checks.window_bounds(options.get("window"))
    return AttentionCall(
        query,
        key,
        value,
        values["coefs"],
        values["knots"],
        mask=options.get("attn_mask"),
        bias=values.get("score_bias"),
        query_starts=starts[0],
        key_starts=starts[1],
        seed=options.get("seed"),
        dropout_p=options.get("dropout_p", 0.0),
        scale=options.get("scale", 1 / math.sqrt(query.shape[-1])),
        causal=options.get("is_causal", False),
        left=left,
        right=right,
    )


def _results(call: AttentionCall, found: tuple[Tensor, Tensor], options: Options) -> Results:
    out, lse = found
    if call.query_starts is not None:
        out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0)
    return {"out": out, "lse": lse} if options.get("return_lse") else {"out": out}


def _plain_attention(values: Values, options: Options) -> Results:
    call = _call(values, options)
    return _results(call, eager.run(call), options)


def _exact_attention(values: Values, options: Options) -> Results:
    call = _call(values, options)
    return _results(call, reference.run(call), options)


def _named(found: Any) -> Results:
    """Results of the public functions by name."""
    return {"out": found} if isinstance(found, Tensor) else dict(zip(("out", "lse"), found, strict=True))


def _run_attention(values: Values, options: Options, impl: str) -> Results:
    torch.manual_seed(SEED)
    options = {name: option for name, option in options.items() if name != "seed"}
    arguments: dict[str, Any] = {**values, **options, "impl": impl}
    return _named(multimax_attention(**arguments))


def _run_packed(values: Values, options: Options, impl: str) -> Results:
    torch.manual_seed(SEED)
    options = {name: option for name, option in options.items() if name != "seed"}
    arguments: dict[str, Any] = {**values, **options, "impl": impl}
    return _named(multimax_attention_varlen(**arguments))


def seeded(options: Options, device: torch.device) -> Options:
    """With the number that the public functions will draw on that device for dropout."""
    if not options.get("dropout_p"):
        return options
    torch.manual_seed(SEED)
    return {**options, "seed": seed_of(options["dropout_p"], device)}


def _attention(sizes: Sizes) -> Iterator[Case]:
    b, h, queries, keys, width = sizes.batch, sizes.heads, sizes.queries, sizes.keys, sizes.width

    def tensors(
        draws: Draws, queries: int = queries, keys: int = keys, value_width: int = width, key_heads: int = h
    ) -> Values:
        return {
            "query": draws.normal(b, h, queries, width) * draws.scale,
            "key": draws.normal(b, key_heads, keys, width),
            "value": draws.normal(b, key_heads, keys, value_width),
        }

    def case(name: str, make: Callable[[Draws], Problem]) -> Case:
        return Case("attention", "attention", name, make, _run_attention, _plain_attention, _exact_attention)

    def simple(name: str, **options: Any) -> Case:
        return case(name, lambda draws: Problem(tensors(draws) | draws.parameters(), options))

    yield simple("plain")
    yield simple("causal", is_causal=True)
    yield simple("window", window=(11, 3))
    yield simple("sliding window", window=(20, 0))
    yield simple("scale", scale=0.3)
    yield simple("dropout", dropout_p=0.3)
    yield simple("causal dropout", dropout_p=0.3, is_causal=True)
    yield simple("log-sums", return_lse=True)
    yield simple("causal log-sums", return_lse=True, is_causal=True)

    def boolean(draws: Draws) -> Problem:
        mask = draws.below(0.7, b, 1, queries, keys)
        mask[:, :, 3] = False  # a query without keys
        return Problem(tensors(draws) | draws.parameters(), {"attn_mask": mask})

    def padding(draws: Draws) -> Problem:
        mask = torch.arange(keys) < keys // 2 + draws.indices(keys // 2, b, 1, 1, 1)
        return Problem(tensors(draws) | draws.parameters(), {"attn_mask": mask, "is_causal": True})

    def numbers(draws: Draws) -> Problem:
        mask = draws.normal(1, 1, queries, keys)
        mask[draws.below(0.3, *mask.shape)] = -torch.inf
        return Problem(tensors(draws) | draws.parameters(), {"attn_mask": mask})

    def bias(draws: Draws) -> Problem:
        return Problem(tensors(draws) | draws.parameters() | {"score_bias": draws.normal(1, h, queries, keys)}, {})

    def relative_bias(draws: Draws) -> Problem:
        values = tensors(draws) | draws.parameters() | {"score_bias": draws.normal(h, 1, keys)}
        return Problem(values, {"is_causal": True, "attn_mask": draws.below(0.8, 1, 1, queries, keys) | _first(keys)})

    def shared_heads(draws: Draws) -> Problem:
        values = tensors(draws, key_heads=h // 2) | draws.parameters(heads=h)
        return Problem(values, {"enable_gqa": True, "is_causal": True})

    def decode(draws: Draws) -> Problem:
        values = tensors(draws, queries=1, keys=5 * keys, key_heads=h // 2) | draws.parameters()
        return Problem(values, {"enable_gqa": True, "window": (None, 0)})

    def few(draws: Draws) -> Problem:
        values = tensors(draws, queries=3, keys=2 * keys) | draws.parameters(heads=h)
        return Problem(values, {"window": (None, 0), "return_lse": True})

    def head_sizes(draws: Draws) -> Problem:
        return Problem(tensors(draws, value_width=width // 2 + 3) | draws.parameters(), {})

    def per_head(draws: Draws) -> Problem:
        return Problem(tensors(draws) | draws.parameters(heads=h), {})

    def first_order(draws: Draws) -> Problem:
        return Problem(tensors(draws) | draws.parameters(1), {"is_causal": True})

    def third_order(draws: Draws) -> Problem:
        return Problem(tensors(draws) | draws.parameters(3), {})

    def heads_inside(draws: Draws) -> Problem:
        values = {name: t.transpose(1, 2).contiguous().transpose(1, 2) for name, t in tensors(draws).items()}
        return Problem(values | draws.parameters(), {})

    yield case("boolean mask", boolean)
    yield case("causal padding", padding)
    yield case("float mask", numbers)
    yield case("score_bias", bias)
    yield case("shared score_bias", relative_bias)
    yield case("GQA, per head", shared_heads)
    yield case("decode, GQA", decode)
    yield case("few queries", few)
    yield case("unequal head sizes", head_sizes)
    yield case("per head", per_head)
    yield case("first order", first_order)
    yield case("third order", third_order)
    yield case("(B, L, H, D) in memory", heads_inside)


def _first(keys: int) -> Tensor:
    """True for the first key: no query is left without any."""
    return torch.arange(keys) == 0


def _packed(sizes: Sizes) -> Iterator[Case]:
    lengths = [sizes.queries // 2, 0, 1, sizes.queries]
    key_lengths = [length + 5 for length in lengths]
    starts = [torch.tensor([0, *accumulate(each)], dtype=torch.int32) for each in (lengths, key_lengths)]
    bounds = {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}

    def draw(draws: Draws, **options: Any) -> Problem:
        key_heads = sizes.heads // 2 if options.get("enable_gqa") else sizes.heads
        values = {
            "query": draws.normal(sum(lengths), sizes.heads, sizes.width) * draws.scale,
            "key": draws.normal(sum(key_lengths), key_heads, sizes.width),
            "value": draws.normal(sum(key_lengths), key_heads, sizes.width),
        }
        return Problem(values | draws.parameters(), bounds | options)

    kinds: dict[str, Options] = {
        "plain": {},
        "causal, GQA": {"is_causal": True, "enable_gqa": True},
        "sliding window, log-sums": {"window": (9, 0), "return_lse": True},
        "dropout": {"dropout_p": 0.3},
    }
    for name, options in kinds.items():

        def make(draws: Draws, options: Options = options) -> Problem:
            return draw(draws, **options)

        yield Case("varlen", "attention", name, make, _run_packed, _plain_attention, _exact_attention)


# --- losses

TARGETS = ("indices", "ignore_index", "probabilities")
LOSS_OPTIONS: dict[str, Options] = {
    "indices": {},
    "ignore_index": {},
    "probabilities": {},
    "smoothing": {"label_smoothing": 0.1},
    "smoothed probabilities": {"label_smoothing": 0.1},
    "weight": {"weight": True, "label_smoothing": 0.1},
    "sum, z_loss": {"reduction": "sum", "z_loss": 0.01},
    "none": {"reduction": "none"},
}


def _target(name: str, draws: Draws, sizes: Sizes) -> Tensor:
    if "probabilities" in name:
        return torch.softmax(2 * draws.normal(sizes.tokens, sizes.classes), -1)
    target = draws.indices(sizes.classes, sizes.tokens)
    if name in ("ignore_index", "weight", "none"):
        target[::3] = -100
    return target


def _loss_options(name: str, draws: Draws, sizes: Sizes) -> Options:
    options = {**LOSS_OPTIONS[name], "target": _target(name, draws, sizes)}
    if options.get("weight"):
        options["weight"] = draws.normal(sizes.classes).abs()
    return options


def _losses(sizes: Sizes) -> Iterator[Case]:
    def run(values: Values, options: Options, impl: str) -> Results:
        given = {"input": values["logits"], **_without(values, "logits"), **options}
        return {"loss": multimax_cross_entropy(**given, impl=impl)}

    for name in LOSS_OPTIONS:

        def make(draws: Draws, name: str = name) -> Problem:
            logits = draws.normal(sizes.tokens, sizes.classes) * 2 * draws.scale
            return Problem({"logits": logits} | draws.parameters(), _loss_options(name, draws, sizes))

        yield _simple("loss", "loss", name, make, run)


def _linear(sizes: Sizes) -> Iterator[Case]:
    def run(values: Values, options: Options, impl: str) -> Results:
        given = {"input": values["hidden"], **_without(values, "hidden"), **options}
        return {"loss": linear_multimax_cross_entropy(**given, impl=impl)}

    for name in LOSS_OPTIONS:

        def make(draws: Draws, name: str = name) -> Problem:
            values = {
                "hidden": draws.normal(sizes.tokens, sizes.hidden) * draws.scale,
                "linear_weight": draws.normal(sizes.classes, sizes.hidden) / 5,
            }
            if name in ("indices", "weight"):
                values["linear_bias"] = draws.normal(sizes.classes) / 5
            options = _loss_options(name, draws, sizes) | {"chunk": sizes.tokens // 2 - 1}  # of which there are three
            return Problem(values | draws.parameters(), options)

        yield _simple("linear loss", "loss", name, make, run)


def _without(values: Values, name: str) -> Values:
    return {other: value for other, value in values.items() if other != name}


# --- entmax


def _entmax(sizes: Sizes) -> Iterator[Case]:
    def closed(function: Any) -> Callable[[Values, Options, str], Results]:
        return lambda values, options, impl: {"weights": function(**values, **options, impl=impl)}

    def last(draws: Draws) -> Problem:
        return Problem({"x": draws.normal(3, sizes.rows, sizes.row) * draws.scale}, {})

    def middle(draws: Draws) -> Problem:
        return Problem({"x": draws.normal(3, sizes.row, sizes.rows) * draws.scale}, {"dim": 1})

    def masked(draws: Draws) -> Problem:
        mask = draws.below(0.6, 3, sizes.rows, sizes.row)
        mask[1, 1] = False
        return Problem(last(draws).values, {"mask": mask})

    def long(draws: Draws) -> Problem:
        return Problem({"x": draws.normal(2, sizes.long) * 2}, {})

    for function in (sparsemax, entmax15):
        for name, draw in {"last dim": last, "middle dim": middle, "mask": masked, "long rows": long}.items():
            yield _simple("entmax", "entmax", f"{function.__name__}, {name}", draw, closed(function))

    for value in (1.3, 1.9):

        def learned(draws: Draws, value: float = value) -> Problem:
            values = last(draws).values
            return Problem(values | {"alpha": torch.full((3, sizes.rows, 1), value)}, {})

        yield _simple("entmax", "entmax", f"entmax, learned alpha of {value}", learned, closed(entmax))

    def learned_middle(draws: Draws) -> Problem:
        return Problem(middle(draws).values | {"alpha": torch.full((1, 1, sizes.rows), 1.4)}, {"dim": 1})

    yield _simple("entmax", "entmax", "entmax, one alpha for several rows", learned_middle, closed(entmax))
    yield _simple(
        "entmax", "entmax", "entmax, long rows", lambda d: long(d)._replace(options={"alpha": 1.7}), closed(entmax)
    )
