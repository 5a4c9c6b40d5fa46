"""Times the fused output loss, forward and backward, against torch's losses for softmax, interleaved.

    python benchmarks/loss.py                      everything: about four minutes
    python benchmarks/loss.py --quick              torch's fused losses and the kernel only: about two minutes
    python benchmarks/loss.py --table FILE.json    print the tables of a saved run

2048 tokens of 512 entries; measuring.py says how times are taken. torch's F.linear_cross_entropy comes three times:
with its defaults (it then holds the logits), with its default options for chunks, and with the chunks that ours takes.
cut-cross-entropy (its form for torch.compile; `pip install cut-cross-entropy`, which needs Triton) is left out where it
is not installed. Every competitor is checked against the float64 reference before it is timed. Memory is the peak of
the process above its state before the call, gradients included.
"""

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import LinearCrossEntropyOptions

import measuring
import multimax
from measuring import BACKWARD, Case

TOKENS, WIDTH = 2048, 512
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TORCH, CHUNKED, SAME_CHUNKS = "F.linear_cross_entropy", "the same, in its chunks", "the same, in our chunks"
KERNEL = "linear_multimax_cross_entropy"
LOGITS, LOGITS_MULTIMAX = "F.linear, F.cross_entropy", "F.linear, multimax_cross_entropy"
CCE = "cut-cross-entropy, torch.compile"
SOFTMAX = (TORCH, CHUNKED, SAME_CHUNKS, LOGITS, CCE)
Function = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
CASES = [
    Case(dtype, f"{classes} classes", (classes, DTYPES[dtype], TOKENS))
    for dtype, classes in (("float32", 32000), ("bfloat16", 32000), ("bfloat16", 128256))
]


def competitors(quick: bool) -> dict[str, Function]:
    """Names and functions of hidden states, weight, target, coefs and knots; all are compared with the first."""
    ours = LinearCrossEntropyOptions(batch_chunk_size=WIDTH // 2, chunking_method=None)
    functions: dict[str, Function] = {
        TORCH: lambda h, w, y, c, k: F.linear_cross_entropy(h, w, y),
        CHUNKED: lambda h, w, y, c, k: F.linear_cross_entropy(h, w, y, options=LinearCrossEntropyOptions()),
        SAME_CHUNKS: lambda h, w, y, c, k: F.linear_cross_entropy(h, w, y, options=ours),
        KERNEL: lambda h, w, y, c, k: multimax.linear_multimax_cross_entropy(h, w, y, c, k, impl="cpu"),
    }
    if quick:
        return functions
    functions[LOGITS] = lambda h, w, y, c, k: F.cross_entropy(F.linear(h, w), y)
    functions[LOGITS_MULTIMAX] = lambda h, w, y, c, k: multimax.multimax_cross_entropy(F.linear(h, w), y, c, k)
    if importlib.util.find_spec("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy

        functions[CCE] = lambda h, w, y, c, k: linear_cross_entropy(h, w, y, impl="torch_compile")
    else:
        print(f"{CCE} is not installed and is left out: pip install cut-cross-entropy")
    return functions


def check(name: str, function: Function, tensors: list[Tensor], target: Tensor) -> None:
    """Refuses to time what is wrong, in the loss of the first rows or in a gradient."""
    dtype, target = tensors[0].dtype, target[:64]
    given = [t.detach()[:64] if i == 0 else t.detach() for i, t in enumerate(tensors)]
    exact_given = [t.double().requires_grad_() for t in given]
    given = [t.requires_grad_() for t in given]
    hidden, linear_weight, coefs, knots = exact_given
    coefs = torch.zeros_like(coefs) if name in SOFTMAX else coefs
    exact = multimax.multimax_cross_entropy(F.linear(hidden, linear_weight), target, coefs, knots, impl="reference")
    loss = function(given[0], given[1], target, *given[2:])
    count = 2 if name in SOFTMAX else 4
    pairs = [(loss, exact)]
    pairs += zip(torch.autograd.grad(loss, given[:count]), torch.autograd.grad(exact, exact_given[:count]), strict=True)
    errors = [((a.double() - b).norm() / b.norm()).item() for a, b in pairs]
    if not max(errors) <= (0.03 if dtype == torch.bfloat16 else 1e-4):
        raise AssertionError(f"{name} is off by {errors} in the loss and its gradients, {dtype}")


def measure(classes: int, dtype: torch.dtype, tokens: int, seconds: float, quick: bool) -> dict:
    """All competitors, forward and backward."""
    torch.manual_seed(0)
    coefs, knots = multimax.from_paper(*multimax.presets["wikitext103_lm"][5])
    tensors = [torch.randn(tokens, WIDTH).to(dtype), (torch.randn(classes, WIDTH) / 20).to(dtype), coefs, knots]
    for tensor in tensors:
        tensor.requires_grad_()
    hidden, linear_weight = tensors[:2]
    target = torch.randint(classes, (tokens,))
    one = torch.ones(())

    torch._dynamo.reset()
    functions = competitors(quick)
    calls = {}
    for name, function in functions.items():

        def loss(function: Function = function) -> Tensor:
            return function(hidden, linear_weight, target, coefs, knots)

        calls[name, BACKWARD] = measuring.passes(name, loss, tensors, one)[name, BACKWARD]

    def checked(name: str) -> None:
        check(name, functions[name], tensors, target)

    return measuring.compare(calls, seconds, TORCH, [KERNEL], [CCE], memory=BACKWARD, check=checked)


if __name__ == "__main__":
    measuring.main("loss", __doc__, 5.0, CASES, measure)
