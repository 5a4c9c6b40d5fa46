"""Times this library's operations on one thread and on all, interleaved: how well their work divides.

    python benchmarks/threads.py                      everything: about two minutes
    python benchmarks/threads.py --table FILE.json    print the tables of a saved run

measuring.py says how times are taken. The shapes are those that are hard to divide: few rows or heads, or very many.
Before anything is timed, results and gradients on one thread and on all must be equal to the last bit. How work would
divide among more threads than this machine has: tools/division.cpp.
"""

from collections.abc import Callable

import torch
from torch import Tensor

import measuring
import multimax
from measuring import BACKWARD, FORWARD, Case

ONE = "1 thread"
Run = tuple[list[Tensor], Callable[..., Tensor]]  # what gradients are taken of, and the function of it


def rows(shape: tuple[int, ...]) -> Run:
    """multimax along the last dim."""
    return [torch.randn(shape), *parameters()], lambda x, c, k: multimax.multimax(x, c, k, impl="cpu")


def attention(shape: tuple[int, ...], causal: bool) -> Run:
    """All queries against all keys."""

    def function(q: Tensor, k: Tensor, v: Tensor, coefs: Tensor, knots: Tensor) -> Tensor:
        return multimax.multimax_attention(q, k, v, coefs, knots, is_causal=causal, impl="cpu")

    return [*(torch.randn(shape) for _ in range(3)), *parameters()], function


def decode(heads: int, keys: int, width: int) -> Run:
    """One query of a head against a long cache."""
    query, key, value = (torch.randn(1, heads, length, width) for length in (1, keys, keys))
    return [query, key, value, *parameters()], lambda *args: multimax.multimax_attention(*args, impl="cpu")


def cross_entropy(tokens: int, classes: int) -> Run:
    """The loss of logits."""
    target = torch.randint(classes, (tokens,))
    return [torch.randn(tokens, classes), *parameters()], lambda x, c, k: multimax.multimax_cross_entropy(
        x, target, c, k, impl="cpu"
    )


def linear(tokens: int, width: int, classes: int) -> Run:
    """The loss with its linear layer: mostly products of torch's."""
    target = torch.randint(classes, (tokens,))
    tensors = [torch.randn(tokens, width), torch.randn(classes, width) / 20, *parameters()]
    return tensors, lambda h, w, c, k: multimax.linear_multimax_cross_entropy(h, w, target, c, k, impl="cpu")


CASES = [
    *(Case("rows, float32", str(shape), (rows, (shape,))) for shape in ((1, 10_000_000), (1_000_000, 16))),
    *(
        Case("attention, float32", f"{shape}{', causal' * causal}", (attention, (shape, causal)))
        for shape in ((1, 1, 16384, 64), (1, 8, 4096, 64), (64, 12, 197, 64))
        for causal in (False, True)
        if shape[0] == 1 or not causal
    ),
    Case("decode step, float32", "8 heads of 128, 32768 keys", (decode, (8, 32768, 128))),
    Case("output loss, float32", "(2048, 32000) logits", (cross_entropy, (2048, 32000))),
    Case("output loss, float32", "2048 x 512, 32000 classes, with the linear layer", (linear, (2048, 512, 32000))),
]


def parameters() -> tuple[Tensor, Tensor]:
    """Those of the paper's eleventh DeiT-small layer: all terms are active."""
    return multimax.from_paper(*multimax.presets["deit_small"][10])


def check(function: Callable[..., Tensor], leaves: list[Tensor], grad: Tensor, counts: tuple[int, int]) -> None:
    """Refuses to time what depends on the number of threads."""
    found = []
    for count in counts:
        torch.set_num_threads(count)
        out = function(*leaves)
        found.append((out.detach(), *torch.autograd.grad(out, leaves, grad)))
    if not all(map(torch.equal, *found)):
        raise AssertionError(f"results on {counts[0]} and on {counts[1]} threads differ")


def measure(make: Callable[..., Run], arguments: tuple, seconds: float, quick: bool) -> dict:
    """One thread against all, forward and, where it is trained, with the backward."""
    many = torch.get_num_threads()
    if many == 1:
        raise SystemExit("expected at least 2 threads to compare with one, got 1: try --threads 2")
    torch.manual_seed(0)
    tensors, function = make(*arguments)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    grad = torch.randn_like(function(*leaves))
    calls = {}
    for name, count in ((ONE, 1), (f"{many} threads", many)):
        for (_, which), call in measuring.passes(name, lambda: function(*leaves), leaves, grad).items():

            def run(call: Callable[[], object] = call, count: int = count) -> None:
                torch.set_num_threads(count)
                call()

            if make is not decode or which == FORWARD:
                calls[name, which] = run
    if make is linear:  # torch's products need not agree
        calls = {key: call for key, call in calls.items() if key[1] == BACKWARD}
    else:
        check(function, leaves, grad, (1, many))
    return measuring.compare(calls, seconds, ONE, [f"{many} threads"])


if __name__ == "__main__":
    measuring.main("threads", __doc__, 3.0, CASES, measure)
