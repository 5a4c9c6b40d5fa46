"""Attention in plain PyTorch by blocks: the reference's results, in bounded memory, without the host."""

from itertools import accumulate
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import multimax
from multimax import multimax_attention, multimax_attention_varlen, reweighting
from multimax.ops.attention import plain, reference
from multimax.ops.attention.call import AttentionCall

B, H, LQ, LK = 2, 4, 13, 17


def real(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


MASKS: dict[str, Any] = {
    "none": dict,
    "causal": lambda: {"is_causal": True},
    "window": lambda: {"window": (3, 2)},
    "causal window": lambda: {"window": (5, 0)},
    "decode": lambda: {"window": (None, 0)},
    "far window": lambda: {"window": (0, 0), "is_causal": True},  # causal and this have no key in common
    "boolean": lambda: {"attn_mask": torch.rand(B, H, LQ, LK) < 0.7},
    "boolean, all heads": lambda: {"attn_mask": torch.rand(B, 1, LQ, LK) < 0.7},
    "padding, causal": lambda: {"attn_mask": torch.arange(LK) < torch.tensor([5, 11])[:, None, None, None]}
    | {"is_causal": True},
    "numbers": lambda: {"attn_mask": real(LQ, LK)},
    "numbers for queries": lambda: {"attn_mask": real(B, 1, LQ, 1)},
    "numbers and -inf": lambda: {"attn_mask": torch.where(torch.rand(B, 1, LQ, LK) < 0.3, -torch.inf, real(LQ, LK))},
    "rows without keys": lambda: {"attn_mask": (torch.arange(LQ) % 3 > 0)[:, None].expand(LQ, LK)},
    "dropout": lambda: {"dropout_p": 0.3},
    "dropout, causal": lambda: {"dropout_p": 0.3, "is_causal": True},
    "scale": lambda: {"scale": 0.4},
}  # fmt: skip


def make(key_heads: int = H, per_head: bool = False, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    sets = (H, 2, 2) if per_head else (2, 2)
    shapes = (B, H, LQ, 6), (B, key_heads, LK, 6), (B, key_heads, LK, 5), sets, sets
    return [real(*shape).to(dtype) for shape in shapes]


def run(impl: str, inputs: list[Tensor], *, twice: bool = False, **options: Any) -> list[Tensor]:
    """Output, log-sums and the gradients of everything that has one."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    names = [name for name in ("attn_mask", "score_bias") if options.get(name) is not None]
    names = [name for name in names if options[name].is_floating_point()]
    options |= {name: options[name].clone().requires_grad_() for name in names}
    torch.manual_seed(3)
    out, lse = multimax_attention(*leaves, return_lse=True, enable_gqa=True, impl=impl, **options)
    leaves += [options[name] for name in names]
    loss = out.sin().sum() + lse.masked_fill(lse == -torch.inf, 0).cos().sum()
    grads = torch.autograd.grad(loss, leaves, create_graph=twice)
    if twice:
        grads += torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves)
    return [out, lse, *grads]


def assert_equal(inputs: list[Tensor], **options: Any) -> None:
    pairs = zip(run("torch", inputs, **options), run("reference", inputs, **options), strict=True)
    for ours, exact in pairs:
        torch.testing.assert_close(ours, exact)


# of all scores; of some batches; of one batch; of some heads; of one head; of some queries; of less than one query
SIZES = [2 * 4 * 13 * 17, 4 * 13 * 17, 2 * 13 * 17, 13 * 17, 5 * 17, 10]


@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("kind", MASKS)
def test_equals_the_reference(kind: str, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "ELEMENTS", elements)
    assert_equal(make(), **MASKS[kind]())


@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("key_heads", [1, 2])
def test_shared_key_heads(key_heads: int, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "ELEMENTS", elements)
    assert_equal(make(key_heads, per_head=True), is_causal=True, dropout_p=0.2)


@pytest.mark.parametrize(
    "shape", [(B, H, LQ, LK), (1, H, LQ, LK), (B, 1, LQ, LK), (LQ, LK), (H, 1, LK), (B, H, LQ, 1), (B, 1, 1, 1), (1,)]
)
@pytest.mark.parametrize("elements", [2 * 13 * 17, 5 * 17])
def test_gradients_of_biases(shape: tuple[int, ...], elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "ELEMENTS", elements)
    assert_equal(make(2), score_bias=real(*shape), window=(4, 3))
    assert_equal(make(2), score_bias=real(*shape), attn_mask=real(*shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "ELEMENTS", 5 * 17)
    inputs = make(2, dtype=dtype)
    ours, exact = (run(impl, inputs, is_causal=True) for impl in ("torch", "reference"))
    for found, wanted in zip(ours, exact, strict=True):
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def test_second_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "ELEMENTS", 5 * 17)
    assert_equal(make(2, per_head=True), twice=True, is_causal=True, dropout_p=0.2, score_bias=real(H, LQ, LK))


def test_dropout_drops_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "ELEMENTS", 40)
    query, key, coefs, knots = torch.randn(B, H, LQ, 6), torch.randn(B, H, LK, 6), *torch.zeros(2, 1, 2)
    value = torch.eye(LK).expand(B, H, LK, LK)  # the output is the weights
    kept = []
    for impl in ("torch", "reference"):
        torch.manual_seed(1)
        kept.append(multimax_attention(query, key, value, coefs[None], knots[None], dropout_p=0.4, impl=impl) != 0)
    assert torch.equal(*kept)
    assert 0.5 < kept[0].float().mean() < 0.7


def test_one_block_is_the_reference() -> None:
    inputs = make()
    for ours, exact in zip(run("torch", inputs), run("reference", inputs), strict=True):
        assert torch.equal(ours, exact)


@pytest.mark.parametrize("shape", [(0, 4, 13, 17), (2, 0, 13, 17), (2, 4, 0, 17), (2, 4, 13, 0)])
def test_empty(shape: tuple[int, int, int, int]) -> None:
    b, h, queries, keys = shape
    tensors = [real(b, h, length, 3).requires_grad_() for length in (queries, keys, keys)]
    out, lse = multimax_attention(*tensors, *real(2, 2, 2), return_lse=True, impl="torch")
    assert out.shape == (b, h, queries, 3)
    assert (lse == -torch.inf).all()
    out.sum().backward()


# ---- packed sequences ----

PACKED: list[dict[str, Any]] = [{}, {"is_causal": True}, {"window": (2, 1)}, {"dropout_p": 0.3, "window": (None, 0)}]


def packed(impl: str, inputs: list[Tensor], starts: list[Tensor], **options: Any) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in inputs]
    torch.manual_seed(3)
    out, lse = multimax_attention_varlen(*leaves, *starts, enable_gqa=True, return_lse=True, impl=impl, **options)
    loss = out.sin().sum() + lse.masked_fill(lse == -torch.inf, 0).cos().sum()
    return [out, lse, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("options", PACKED, ids=str)
@pytest.mark.parametrize("elements", [10**6, 150, 20])
@pytest.mark.parametrize("index", [False, True], ids=["one by one", "by index"])
def test_packed_sequences(options: dict[str, Any], elements: int, index: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off the CPU they are told apart by index: here too, if asked to."""
    starts = [torch.tensor([0, 5, 5, 6, 13]), torch.tensor([0, 4, 7, 7, 17], dtype=torch.int32)]
    sets = (4, 2, 2), (4, 2, 2)
    inputs = [real(*shape) for shape in ((13, 4, 6), (17, 2, 6), (17, 2, 5), *sets)]
    exact = packed("reference", inputs, starts, **options)
    monkeypatch.setattr(plain, "ELEMENTS", elements)
    monkeypatch.setattr(reference, "together", lambda call: index)
    for impl in ("torch", "reference"):
        for ours, wanted in zip(packed(impl, inputs, starts, **options), exact, strict=True):
            torch.testing.assert_close(ours, wanted)


def test_no_packed_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "together", lambda call: True)
    none = torch.zeros(1, dtype=torch.int64)
    inputs = [real(0, 4, 6), real(0, 4, 6), real(0, 4, 5), real(2, 2), real(2, 2)]
    for impl in ("torch", "reference"):
        assert packed(impl, inputs, [none, none])[0].shape == (0, 4, 5)


def test_wrong_starts_stay_inside_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "together", lambda call: True)
    call = AttentionCall(
        real(1, 2, 5, 3), real(1, 2, 6, 3), real(1, 2, 6, 3), real(2, 2), real(2, 2), mask=None, bias=None,
        query_starts=torch.tensor([0, 3]), key_starts=torch.tensor([0, 90]), seed=None, dropout_p=0.0, scale=1.0,
        causal=True, left=-1, right=-1,
    )  # fmt: skip
    assert reference.run(call)[0].shape == (1, 2, 5, 3)


# ---- memory ----


class Largest(TorchDispatchMode):
    """The most entries of any result."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = [t.untyped_storage().nbytes() // t.element_size() for t in tree_leaves(result) if isinstance(t, Tensor)]
        self.entries = max([self.entries, *found])
        return result


@pytest.mark.parametrize("options", [{}, {"is_causal": True, "dropout_p": 0.1}, {"window": (20, 0)}], ids=str)
def test_memory_is_bounded_by_a_block(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    length, width = 256, 8
    monkeypatch.setattr(plain, "ELEMENTS", 4096)
    leaves = [torch.randn(2, heads, length, width, requires_grad=True) for heads in (4, 2, 2)]
    leaves += [torch.randn(2, 2, requires_grad=True) for _ in range(2)]
    entries = {}
    for impl in ("torch", "reference"):
        with Largest() as mode:
            multimax_attention(*leaves, enable_gqa=True, impl=impl, **options).sum().backward()
        entries[impl] = mode.entries
    assert entries["reference"] >= 2 * 4 * length * length
    assert entries["torch"] <= max(4096, 2 * 4 * length * width)  # or the query itself


def peak(length: int, impl: str) -> int:
    """Bytes alive at once, at most, in forward and backward."""
    leaves = [torch.randn(1, 1, length, 4, requires_grad=True) for _ in range(3)]
    parameters = torch.randn(2, 2, 2)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        multimax_attention(*leaves, *parameters, impl=impl).sum().backward()
    events = profiler.profiler.kineto_results.events()
    sizes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    return max(accumulate(size for _, size in sorted(sizes)))


def test_blocks_are_freed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is alive at once does not grow with the number of blocks, except by the inputs' own gradients."""
    monkeypatch.setattr(plain, "ELEMENTS", 2**14)
    run("torch", make())  # whatever is allocated once
    assert peak(1024, "torch") < 1.5 * peak(256, "torch") < peak(256, "reference") < 0.1 * peak(1024, "reference")


# ---- compilers and transforms ----


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@torch._inductor.config.patch(fallback_random=True)  # torch's generator, for the same seed of dropout
def test_compile(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(plain, "ELEMENTS", 2 * 5 * 17)
    options: dict[str, Any] = {"is_causal": True, "dropout_p": 0.2, "enable_gqa": True, "impl": "torch"}
    compiled = torch.compile(lambda *args: multimax_attention(*args, **options), fullgraph=True, backend=backend)
    results = []
    for function in (compiled, lambda *args: multimax_attention(*args, **{**options, "impl": "reference"})):
        torch.manual_seed(2)
        leaves = [t[:1].requires_grad_() if t.ndim == 4 else t.requires_grad_() for t in make(2, dtype=torch.float32)]
        torch.manual_seed(5)
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()


def test_compiled_packed_sequences() -> None:
    torch._dynamo.reset()
    starts = torch.tensor([0, 5, 5, 13])
    inputs = [*torch.randn(3, 13, 2, 4), *torch.randn(2, 2, 2)]
    for impl in ("torch", "reference"):
        compiled = torch.compile(
            lambda *args, impl=impl: multimax_attention_varlen(*args, starts, starts, impl=impl),
            fullgraph=True,
            backend="aot_eager",
        )
        torch.testing.assert_close(compiled(*inputs), multimax_attention_varlen(*inputs, starts, starts))
    torch._dynamo.reset()


def test_transforms_are_left_to_the_reference() -> None:
    inputs = make()

    def loss(query: Tensor, impl: str) -> Tensor:
        return multimax_attention(query.reshape(B, H, LQ, 6), *inputs[1:], impl=impl).sum()

    for transform in (torch.func.grad(loss), torch.func.vmap(loss, (0, None))):
        transform(inputs[0][None], "auto")
        with pytest.raises(RuntimeError, match="impl='torch' cannot run: it does not support"):
            transform(inputs[0][None], "torch")
    with pytest.raises(RuntimeError, match="impl='torch' cannot run: it has no forward-mode derivatives"):
        torch.func.jvp(lambda query: loss(query, "torch"), (inputs[0],), (inputs[0],))


def test_auto_takes_it_for_what_the_kernels_cannot_do() -> None:
    called = AttentionCall(
        *(t for t in make()), mask=None, bias=None, query_starts=None, key_starts=None, seed=None, dropout_p=0.0,
        scale=1.0, causal=False, left=-1, right=-1,
    )  # fmt: skip
    assert multimax.ops.dispatch.choose(multimax.ops.dispatch.load("attention"), "auto", called) is plain


# ---- the host ----


def meta(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta", requires_grad=True)


IMPLS = ("reference", "torch")
HOST: dict[str, Any] = {
    "attention": lambda impl: multimax_attention(
        meta(2, 4, 13, 6), meta(2, 2, 17, 6), meta(2, 2, 17, 5), meta(2, 2), meta(2, 2), enable_gqa=True,
        attn_mask=meta(13, 17), score_bias=meta(4, 1, 17), dropout_p=0.1, window=(3, 3), impl=impl,
    ),
    "packed": lambda impl: multimax_attention_varlen(
        meta(13, 4, 6), meta(17, 4, 6), meta(17, 4, 5), meta(2, 2), meta(2, 2),
        torch.zeros(4, dtype=torch.int32, device="meta"), torch.zeros(4, dtype=torch.int64, device="meta"),
        dropout_p=0.1, window=(3, 0), impl=impl,
    ),
    "loss": lambda impl: multimax.multimax_cross_entropy(
        meta(7, 11), torch.zeros(7, dtype=torch.int64, device="meta"), meta(2, 2), meta(2, 2), impl=impl
    ),
    "linear loss": lambda impl: multimax.linear_multimax_cross_entropy(
        meta(7, 3), meta(11, 3), torch.zeros(7, dtype=torch.int64, device="meta"), meta(2, 2), meta(2, 2), impl=impl
    ),
    "multimax": lambda _: multimax.multimax(meta(3, 5), meta(2, 2), meta(2, 2), impl="reference"),
    "log_multimax": lambda _: multimax.log_multimax(meta(3, 5), meta(2, 2), meta(2, 2), impl="reference"),
    "sparsemax": lambda _: reweighting.sparsemax(meta(3, 5), impl="reference"),
    "entmax15": lambda _: reweighting.entmax15(meta(3, 5), impl="reference"),
    "entmax": lambda _: reweighting.entmax(meta(3, 5), alpha=meta(3, 1), impl="reference"),
}  # fmt: skip


@pytest.mark.parametrize("operation", HOST)
@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_is_read_off_the_cpu(operation: str, impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without values raise where one is asked for."""
    monkeypatch.setattr(plain, "ELEMENTS", 100)
    result = HOST[operation](impl)
    assert result.is_meta
    result.sum().backward()
