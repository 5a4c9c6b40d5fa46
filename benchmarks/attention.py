"""Times MultiMax attention against torch's softmax attention and other ways to use a score function, interleaved.

    python benchmarks/attention.py                      everything: about ten minutes
    python benchmarks/attention.py --quick              torch's attention and the kernel only: about two minutes
    python benchmarks/attention.py --tiles              what skipping tiles saves with the paper's parameters
    python benchmarks/attention.py --table FILE.json    print the tables of a saved run

measuring.py says how times are taken. Every competitor is checked against the float64 reference before it is timed, in
its first sequence or, where that would not fit into memory, in its last queries. Competitors that hold the score matrix
are left out where it alone would take over 512 MiB, or 128 MiB if not causal: they take most of the time. Memory is the
peak of the process above its state before the call, results included.

In a decode step few queries meet many keys, and reading these is most of the work. torch's attention there is the
fastest of three: with enable_gqa, with repeated key heads, and with the query heads of a key head as if they were
queries. The read rate is that of torch.sum over keys and values, viewed as float32 or as int64, whichever is faster, in
the same rounds. On two threads of a Zen 5 nothing else in torch or numpy read faster (max, or, dot, norm, products with
a vector).
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import measuring
import multimax
from measuring import BACKWARD, FORWARD, Case
from multimax.cli.checking import speed
from multimax.ops.rows import reference

SHAPES = [(8, 6, 197, 64), (2, 12, 1024, 64), (1, 8, 4096, 64)]
LONG = (1, 8, 16384, 64)
HEADS = [(4, 12, 12, 64), (1, 8, 32, 128)]  # of decode steps: batch, key heads, query heads, width
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TORCH, KERNEL, ZERO = "torch SDPA (softmax)", "multimax (kernel)", "multimax, zero coefs"
EAGER, COMPILED, ENTMAX = "reference, eager", "reference, torch.compile", "entmax15 (entmax)"
FLEX, READ = "FlexAttention", "a plain read"
MATRIX = 2**29  # bytes; a quarter of it where all of them count
Function = Callable[..., Tensor]


def _cases() -> list[Case]:
    found = []
    for name, dtype in DTYPES.items():
        for shape in SHAPES:
            for causal in (False, True):
                found.append(Case(name, f"{shape}{', causal' * causal}", (shape, dtype, causal)))
    found.append(Case("bfloat16", f"{LONG}, causal", (LONG, torch.bfloat16, True)))
    for name, dtype in DTYPES.items():
        for heads in HEADS:
            batch, key_heads, query_heads, width = heads
            shared = f", {query_heads // key_heads} queries share each" if query_heads > key_heads else ""
            for keys in (4096, 32768):
                for queries in (1, 4):
                    counted = f"{queries} quer{'y' if queries == 1 else 'ies'}"
                    what = f"{batch} x {key_heads} heads of {width}{shared}, {keys} keys, {counted}"
                    found.append(Case(f"decode step, {name}", what, (heads, keys, queries, dtype)))
    return found


CASES = _cases()


def _reference(query: Tensor, key: Tensor, value: Tensor, coefs: Tensor, knots: Tensor, causal: bool) -> Tensor:
    """Attention as people write it."""
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
    mask = None
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
    return reference.multimax(scores, coefs, knots, mask=mask) @ value


def _entmax(query: Tensor, key: Tensor, value: Tensor, coefs: Tensor, knots: Tensor, causal: bool) -> Tensor:
    from entmax import entmax15

    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -1e4)
    return entmax15(scores.float(), -1).to(value.dtype) @ value


def competitors(quick: bool, tensors: list[Tensor], causal: bool) -> dict[str, Function]:
    """Names and functions of query, key, value, coefs, knots and causal; the first is what all are compared with."""
    functions: dict[str, Function] = {
        TORCH: lambda q, k, v, coefs, knots, causal: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
        KERNEL: lambda q, k, v, coefs, knots, causal: multimax.multimax_attention(
            q, k, v, coefs, knots, is_causal=causal, impl="cpu"
        ),
    }
    if quick:
        return functions
    query, key, _, coefs, knots = tensors
    functions[ZERO] = lambda q, k, v, coefs, knots, causal: multimax.multimax_attention(
        q, k, v, torch.zeros_like(coefs), knots, is_causal=causal, impl="cpu"
    )
    flex = speed.flex(coefs, knots, key.shape[-2], causal, torch.device("cpu"))  # the mask's blocks are found once
    functions[FLEX] = lambda q, k, v, coefs, knots, causal: flex(q.detach(), k.detach(), v.detach())
    matrix = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] * 4
    if matrix <= (MATRIX if causal else MATRIX // 4):
        functions |= {EAGER: _reference, COMPILED: torch.compile(_reference, dynamic=False), ENTMAX: _entmax}
    return functions


def check(name: str, found: Tensor, tensors: list[Tensor], causal: bool) -> None:
    """Refuses to time what is wrong, in the first sequence's last queries."""
    if name == ENTMAX:
        return
    query, key, value, *params = (t.detach() for t in tensors)
    last = max(min(query.shape[-2], 2**24 // (query.shape[1] * key.shape[-2])), 1)
    sample = [query[:1, :, -last:].double(), *(t[:1].double() for t in (key, value))]
    sample[1:] = [t.repeat_interleave(query.shape[1] // key.shape[1], 1) for t in sample[1:]]
    coefs, knots = (p.double() for p in params)
    exact = _reference(*sample, torch.zeros_like(coefs) if name in (TORCH, ZERO) else coefs, knots, causal)
    error = (found.detach()[:1, :, -last:].double() - exact).abs().max().item()
    if not error <= (0.05 if query.dtype == torch.bfloat16 else 1e-4):
        raise AssertionError(f"{name} is off by {error} on {tuple(query.shape)} {query.dtype}")


def _parameters() -> tuple[Tensor, Tensor]:
    """Those of the paper's eleventh DeiT-small layer: all terms are active."""
    return multimax.from_paper(*multimax.presets["deit_small"][10])


def measure(*arguments: object) -> dict:
    """A case of either kind."""
    return decode(*arguments) if len(arguments) == 6 else whole(*arguments)


def whole(shape: tuple[int, ...], dtype: torch.dtype, causal: bool, seconds: float, quick: bool) -> dict:
    """All queries against all keys, forward and with the backward."""
    torch.manual_seed(0)
    tensors = [torch.randn(shape).to(dtype) for _ in range(3)] + list(_parameters())
    grad = torch.randn(shape).to(dtype)
    for tensor in tensors:
        tensor.requires_grad_()

    torch._dynamo.reset()
    functions = competitors(quick, tensors, causal)
    calls = {}
    for name, function in functions.items():
        calls |= measuring.passes(name, lambda function=function: function(*tensors, causal), tensors, grad)
    calls.pop((FLEX, BACKWARD), None)  # it has none on a CPU

    @torch.no_grad()
    def checked(name: str) -> None:
        check(name, functions[name](*tensors, causal), tensors, causal)

    return measuring.compare(calls, seconds, TORCH, [KERNEL], [COMPILED, FLEX], memory=BACKWARD, check=checked)


def forms(query: Tensor, key: Tensor, value: Tensor) -> dict[str, Callable[[], Tensor]]:
    """The ways in which torch's attention can share key heads."""
    heads = key.shape[1]
    shared = query.shape[1] // heads
    if shared == 1:
        return {"as it is": lambda: F.scaled_dot_product_attention(query, key, value)}

    def folded() -> Tensor:
        queries = query.unflatten(1, (heads, shared)).flatten(2, 3)  # no mask: a query is a query
        out = F.scaled_dot_product_attention(queries, key, value)
        return out.unflatten(2, (shared, -1)).flatten(1, 2)

    def repeated() -> Tensor:
        return F.scaled_dot_product_attention(query, *(t.repeat_interleave(shared, 1) for t in (key, value)))

    return {
        "enable_gqa": lambda: F.scaled_dot_product_attention(query, key, value, enable_gqa=True),
        "repeated key heads": repeated,
        "query heads as queries": folded,
    }


def fastest(calls: dict[str, Callable[[], object]]) -> str:
    """The name of the call with the shortest time of four, without the first."""
    found: dict[str, float] = {}
    for _ in range(4):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            passed = time.perf_counter() - begin
            found[name] = min(found[name], passed) if name in found else float("inf")
    return min(found, key=lambda name: found[name])


def decode(heads: tuple[int, ...], keys: int, queries: int, dtype: torch.dtype, seconds: float, quick: bool) -> dict:
    """Few queries against many keys, forward."""
    measuring.keep_memory()
    torch.manual_seed(0)
    batch, key_heads, query_heads, width = heads
    query = torch.randn(batch, query_heads, queries, width).to(dtype)
    key, value = (torch.randn(batch, key_heads, keys, width).to(dtype) for _ in range(2))
    coefs, knots = _parameters()
    # a pair of bfloat16 numbers, read as one float32, is about the second of them: no number is subnormal
    reads = {
        str(kind).removeprefix("torch."): (lambda kind=kind: [t.view(kind).sum() for t in (key, value)])
        for kind in (torch.float32, torch.int64)
    }
    with torch.no_grad():
        ways = forms(query, key, value)
        for way in ways.values():
            check(TORCH, way(), [query, key, value, coefs, knots], False)
        chosen, read_as = fastest(ways), fastest(reads)
        calls: dict[tuple[str, str], Callable[[], object]] = {
            (TORCH, FORWARD): ways[chosen],
            (KERNEL, FORWARD): lambda: multimax.multimax_attention(
                query, key, value, coefs, knots, enable_gqa=query_heads > key_heads, impl="cpu"
            ),
            (READ, FORWARD): reads[read_as],
        }
        check(KERNEL, calls[KERNEL, FORWARD](), [query, key, value, coefs, knots], False)
        figures = measuring.compare(calls, seconds, TORCH, [KERNEL, READ])
    size = 2 * key.numel() * key.element_size()
    return figures | {"ours": [KERNEL], "read": READ, "read_bytes": size, "read_as": read_as, "torch_form": chosen}


def tiles(seconds: float) -> None:
    """Time with the paper's learned parameters, as a multiple of the time with zero coefs, layer by layer.

    Once for tokens in no order, where every tile has some large score, and once for the most favourable order: two
    groups of tokens, one after the other, whose scores are about 8 within a group and about -8 across.
    """
    torch.manual_seed(0)
    query, key, value, grad = torch.randn(4, 1, 8, 4096, 64).unbind(0)
    group = (torch.arange(4096) < 2048).float()[:, None] * 2 - 1
    grouped = [0.5 * t + group * torch.eye(64)[0] * 8 for t in (query, key)]
    data = {"no order": (query, key, 0.5), "two groups": (*grouped, 0.125)}
    print("| layer | " + " | ".join(f"{name}, forward | forward+backward" for name in data) + " |\n|---|" + "---|" * 4)
    layers = [("deit_small", n) for n in range(12)] + [("wikitext103_lm", n) for n in range(6)]
    for name, layer in layers:
        coefs, knots = multimax.from_paper(*multimax.presets[name][layer])
        ratios = []
        for q, k, scale in data.values():
            for backward in (False, True):

                def call(coefs: Tensor, q: Tensor = q, k: Tensor = k, scale: float = scale, backward: bool = backward):
                    leaves = [t.detach().requires_grad_(backward) for t in (q, k, value, coefs, knots)]  # noqa: B023
                    out = multimax.multimax_attention(*leaves, scale=scale)
                    if backward:
                        out.backward(grad)

                calls = {"zero": lambda: call(torch.zeros_like(coefs)), "learned": lambda: call(coefs)}  # noqa: B023
                times, _ = measuring.interleaved(calls, seconds, always=calls)
                ratios.append(statistics.median(times["learned"]) / statistics.median(times["zero"]))
        print(f"| {name} {layer + 1} | " + " | ".join(f"{ratio:.2f}x" for ratio in ratios) + " |", flush=True)


def main() -> None:
    """The command line."""
    parser = measuring.command_line(__doc__, 3.0)
    parser.add_argument("--tiles", action="store_true", help="what skipping tiles saves, layer by layer of the paper")
    options = parser.parse_args()
    if not measuring.begin(options):
        return
    if options.tiles:
        tiles(options.seconds)
    else:
        measuring.measured(options, "attention", CASES, measure)


if __name__ == "__main__":
    main()
