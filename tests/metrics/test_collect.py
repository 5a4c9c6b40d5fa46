"""The collector against measures of score matrices that are kept as a whole."""

import copy
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import multimax
from multimax import metrics
from multimax.metrics import MEASURES, LogHistogram, Moments, collect
from multimax.metrics.weights import mean_score
from multimax.ops import observing
from multimax.ops.attention import blocks as score_blocks
from multimax.ops.attention import reference

ROWS = ("multi_modality", "sparsity", "entropy", "support", "top_mass", "histogram")
FEATURES = ("patch_similarity", "mean_average_distance")
B, H, L, D = 2, 4, 7, 8
E = H * D
Matrix = tuple[Tensor, Tensor, Tensor]  # scores, weights, what takes part: (B, H, Lq, Lk)

# what nn.TransformerEncoder says of itself, and what is torch's own to say of nested tensors
pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two queries at a time for the usual shape here, so that every test goes through several blocks; and one thread,
    since two that wait for each other after each of many tiny operations take minutes where another process runs."""
    monkeypatch.setattr(score_blocks, "ELEMENTS", 2 * B * H * L)
    torch.set_num_threads(1)


def params(order: int = 2, heads: int | None = None) -> tuple[Tensor, Tensor]:
    shape = (order, 2) if heads is None else (heads, order, 2)
    return 0.3 * torch.randn(shape, dtype=torch.float64), 0.3 * torch.randn(shape, dtype=torch.float64)


def check_values(moments: Moments, values: list[Tensor], tolerance: float) -> None:
    """Numbers of a measure against all its values, (B, H, n) each time, NaN for none."""
    heads = torch.cat([value.double().transpose(0, 1).flatten(1) for value in values], 1)  # (H, values)
    rows = [row[~row.isnan()] for row in heads]
    everything = torch.cat(rows)
    assert moments.count == len(everything) > 0
    assert moments.head_counts == [len(row) for row in rows]
    close = {"rel": tolerance, "abs": tolerance, "nan_ok": True}
    assert moments.mean == pytest.approx(everything.mean().item(), **close)
    assert moments.std == pytest.approx(everything.std(correction=0).item(), **close)
    assert moments.head_means == pytest.approx([row.mean().item() for row in rows], **close)
    assert moments.head_stds == pytest.approx([row.std(correction=0).item() for row in rows], **close)


def check_rows(layer: metrics.LayerStatistics, kept: list[Matrix], tolerance: float = 1e-11, k: int = 5) -> None:
    """All measures of rows against those of matrices."""
    functions: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "multi_modality": lambda x, w, p: metrics.multi_modality(x, w, threshold=mean_score(x, mask=p), mask=p),
        "sparsity": lambda x, w, p: metrics.sparsity(x, w, threshold=mean_score(x, mask=p), mask=p),
        "entropy": lambda x, w, p: metrics.entropy(w),
        "support": lambda x, w, p: metrics.support(w).double(),
        "top_mass": lambda x, w, p: metrics.top_mass(w, k),
    }
    for name, function in functions.items():
        values = [torch.where(p.any(-1), function(x, w, p), torch.nan) for x, w, p in kept]
        check_values(layer[name], values, tolerance)
    assert layer.rows == sum(int(p.any(-1).sum()) for _, _, p in kept)
    assert layer.nan_rows == 0
    histogram = LogHistogram()
    for _, w, p in kept:
        histogram.update(w, p)
    assert layer.histogram is not None
    assert layer.histogram.as_dict() == histogram.as_dict()
    assert layer.histogram.total > 0


def all_hooks(model: nn.Module) -> list[dict[str, list[object]]]:
    """What every module has of dicts of hooks."""
    return [
        {
            name: list(value.items())
            for name, value in vars(module).items()
            if "hook" in name and isinstance(value, OrderedDict | dict)
        }
        for module in model.modules()
    ]


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No observer outlives its test."""
    yield
    assert observing._observers == []


class Attention(nn.Module):
    """A user's attention, with MultiMax for one set of parameters or one per head, and any options."""

    def __init__(self, key_heads: int = H, per_head: bool = False, causal: bool = False, order: int = 2) -> None:
        super().__init__()
        self.key_heads, self.causal = key_heads, causal
        self.q, self.kv = nn.Linear(E, E), nn.Linear(E, 2 * key_heads * D)
        coefs, knots = params(order, H if per_head else None)
        self.coefs, self.knots = nn.Parameter(coefs), nn.Parameter(knots)
        self.double()

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self.q(x).unflatten(-1, (H, D)).transpose(1, 2)
        k, v = (t.unflatten(-1, (self.key_heads, D)).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
        return q, k, v

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        options = {"is_causal": self.causal, "enable_gqa": self.key_heads != H, **options}
        return multimax.multimax_attention(*self.split(x), self.coefs, self.knots, **options).transpose(1, 2).flatten(2)

    def matrix(
        self,
        x: Tensor,
        part: Tensor | None = None,
        added: Tensor | None = None,
        score_bias: Tensor | None = None,
        scale: float = D**-0.5,
    ) -> Matrix:
        """What the fused function never holds."""
        with torch.no_grad():
            q, k, _ = self.split(x)
            scores = q @ k.repeat_interleave(H // self.key_heads, 1).transpose(-1, -2) * scale
            if score_bias is not None:
                scores = scores + score_bias
            part = (torch.ones(L, L, dtype=torch.bool) if part is None else part).expand(scores.shape)
            if self.causal:
                part = part & torch.ones(L, L, dtype=torch.bool).tril()
            if added is None:
                weights = multimax.multimax(scores, self.coefs, self.knots, mask=part)
            else:  # softmax by MultiMax at zero, for rows with nothing left
                part = part & (added > -torch.inf)
                modulated = multimax.modulate(scores, self.coefs, self.knots) + added
                weights = multimax.multimax(modulated, torch.zeros_like(self.coefs), self.knots, mask=part)
        return scores, weights, part


class Block(nn.Module):
    """Attention and a layer after it, both with residual connections."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention, self.linear, self.norm = attention, nn.Linear(E, E).double(), nn.LayerNorm(E).double()

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        x = x + self.attention(self.norm(x), **options)
        return x + torch.tanh(self.linear(x))


class Stack(nn.Module):
    """Blocks one after the other."""

    def __init__(self, *attentions: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(attention) for attention in attentions)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, **options)
        return x


BOOL = torch.rand(B, 1, L, L, generator=torch.Generator().manual_seed(3)) < 0.6
BOOL[0, :, 2] = False  # a query without keys
BIAS = torch.randn(H, L, L, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
FLOAT = torch.where(BOOL, BIAS, -torch.inf)
FLOAT[0, :, 2] = 0.0
WINDOW = (torch.arange(L) - torch.arange(L)[:, None] <= 1) & (torch.arange(L)[:, None] - torch.arange(L) <= 2)
# options of the module, of the call, and what they mean for the matrix
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "causal, one set per head": ({"causal": True, "per_head": True}, {}, {}),
    "boolean mask": ({}, {"attn_mask": BOOL}, {"part": BOOL}),
    "one mask for all queries": ({}, {"attn_mask": BOOL[:, :, :1]}, {"part": BOOL[:, :, :1]}),
    "boolean mask and causal": ({"causal": True}, {"attn_mask": BOOL}, {"part": BOOL}),
    "numbers after sigma": ({}, {"attn_mask": FLOAT}, {"added": FLOAT}),
    "numbers after sigma and causal": ({"causal": True}, {"attn_mask": FLOAT}, {"added": FLOAT}),
    "bias before sigma": ({"order": 1}, {"score_bias": BIAS}, {"score_bias": BIAS}),
    "window": ({}, {"window": (2, 1)}, {"part": WINDOW}),
    "shared key heads": ({"key_heads": 2}, {"scale": 0.5}, {"scale": 0.5}),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_module_of_ones_own(call: str) -> None:
    settings, options, meaning = CALLS[call]
    model = Attention(**settings)
    batches = [torch.randn(B, L, E, dtype=torch.float64) for _ in range(3)]
    expected = [model(x, **options) for x in batches]
    with collect(model, ROWS) as found:
        for x, out in zip(batches, expected, strict=True):
            assert torch.equal(model(x, **options), out)
    assert list(found) == [""]
    check_rows(found[""], [model.matrix(x, **meaning) for x in batches])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_masks_by_the_value_of_the_bias(dtype: torch.dtype) -> None:
    """By that of its own dtype."""
    model = Attention()
    bias = BIAS.to(dtype)
    x = torch.randn(B, L, E, dtype=torch.float64)
    with collect(model, ROWS) as found:
        model(x, score_bias=torch.where(BOOL, bias, torch.finfo(dtype).min))
    check_rows(found[""], [model.matrix(x, part=BOOL, score_bias=bias.double())])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_and_half_precision(dtype: torch.dtype) -> None:
    """The kernels hold no weights: these are computed again, in float32, from the same query and key."""
    model = Attention(causal=True).to(dtype)
    x = torch.randn(B, L, E, dtype=dtype)
    expected = model(x)
    with collect(model, ROWS) as found:
        assert torch.equal(model(x), expected)
    q, k, _ = model.split(x)
    scores = (q.float() @ k.float().transpose(-1, -2) * D**-0.5).double()
    part = torch.ones(L, L, dtype=torch.bool).tril().expand(scores.shape)
    weights = multimax.multimax(scores, model.coefs.double(), model.knots.double(), mask=part)
    for name, values in (
        ("entropy", metrics.entropy(weights)),
        ("sparsity", metrics.sparsity(scores, weights, threshold=mean_score(scores, mask=part), mask=part)),
    ):
        check_values(found[""][name], [values], 1e-6)


def test_autocast() -> None:
    model = Attention().float()
    x = torch.randn(B, L, E)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        with collect(model, ("entropy", "patch_similarity", "rollout_discrepancy")) as found:
            assert torch.equal(model(x), expected)
        q, k, _ = model.split(x)
    scores = q.bfloat16().float() @ k.bfloat16().float().transpose(-1, -2) * D**-0.5
    weights = multimax.multimax(scores, model.coefs, model.knots)
    check_values(found[""]["entropy"], [metrics.entropy(weights)], 1e-6)
    # products of bfloat16 would show here
    check_values(found[""]["patch_similarity"], [metrics.patch_similarity(expected)[:, None, None]], 1e-6)
    rollout = metrics.rollout_discrepancy([weights], heads_dim=1)
    check_values(found[""]["rollout_discrepancy"], [rollout[0][:, None, None]], 1e-6)


class Packed(Attention):
    """Sequences one after the other, without padding."""

    def forward(self, x: Tensor, starts: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = (t[0].transpose(0, 1) for t in self.split(x[None]))
        out = multimax.multimax_attention_varlen(q, k, v, self.coefs, self.knots, starts, starts, is_causal=True)
        return out.flatten(1)


class PackedStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Packed(causal=True), Packed(causal=True))

    def forward(self, x: Tensor, starts: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, starts)
        return x


def test_packed_sequences() -> None:
    model = PackedStack()
    lengths = [5, 0, 1, L]
    x = torch.randn(sum(lengths), E, dtype=torch.float64)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    expected = model(x, starts)
    with collect(model, MEASURES) as found:
        assert torch.equal(model(x, starts), expected)
    assert list(found) == ["layers.0", "layers.1"]
    hidden, kept = x, {name: [] for name in found}
    outputs = {}
    for name, layer in zip(found, model.layers, strict=True):
        outputs[name] = layer(hidden, starts)
        for part in hidden.split(lengths):
            q, k, _ = layer.split(part[None])
            scores = (q @ k.transpose(-1, -2) * D**-0.5).detach()
            mask = torch.ones(scores.shape, dtype=torch.bool).tril()
            kept[name].append((scores, multimax.multimax(scores, layer.coefs, layer.knots, mask=mask).detach(), mask))
        hidden = hidden + outputs[name]
    for name, matrices in kept.items():
        check_rows(found[name], matrices)
        similarity = [metrics.patch_similarity(part)[None, None, None] for part in outputs[name].split(lengths)]
        check_values(found[name]["patch_similarity"], similarity, 1e-11)
    for i in (0, 2, 3):  # each sequence has a rollout of its own
        kept[f"rollout {i}"] = [kept["layers.0"][i], kept["layers.1"][i]]
    rollouts = [
        metrics.rollout_discrepancy([w for _, w, _ in kept[f"rollout {i}"]], heads_dim=1)[1][:, None, None]
        for i in (0, 2, 3)
    ]
    check_values(found["layers.1"]["rollout_discrepancy"], rollouts, 1e-11)


def test_features_and_rollout_of_a_stack() -> None:
    model = Stack(Attention(), Attention(per_head=True), Attention(causal=True))
    outputs: dict[int, list[Tensor]] = {0: [], 1: [], 2: []}
    inputs: dict[int, list[Tensor]] = {0: [], 1: [], 2: []}
    batches = [torch.randn(b, L, E, dtype=torch.float64) for b in (1, 3)]
    for x in batches:
        for i, block in enumerate(model.blocks):
            inputs[i].append(block.norm(x))
            x = block(x).detach()
            outputs[i].append(x)
    with collect(model, MEASURES) as found:
        for x in batches:
            model(x)
    assert list(found) == [f"blocks.{i}.attention" for i in range(3)]
    rollouts: list[list[Tensor]] = [[], [], []]
    for batch in range(2):
        maps = [block.attention.matrix(inputs[i][batch])[1] for i, block in enumerate(model.blocks)]
        for i, value in enumerate(metrics.rollout_discrepancy(maps, heads_dim=1)):
            rollouts[i].append(value[:, None, None])
    for i, block in enumerate(model.blocks):
        layer = found[f"blocks.{i}.attention"]
        check_rows(layer, [block.attention.matrix(x) for x in inputs[i]])
        for name in FEATURES:
            values = [getattr(metrics, name)(x)[:, None, None] for x in outputs[i]]
            check_values(layer[name], values, 1e-11)
        check_values(layer["rollout_discrepancy"], rollouts[i], 1e-11)
        assert layer["rollout_discrepancy"].count == 4
        assert layer.left_out == {}


def test_rollout_without_the_residual_connection() -> None:
    model = Stack(Attention(), Attention())
    with collect(model, ("rollout_discrepancy",), residual=False) as found:
        model(torch.randn(B, L, E, dtype=torch.float64))
    assert found["blocks.0.attention"]["rollout_discrepancy"].mean == pytest.approx(0, abs=1e-12)
    assert found["blocks.1.attention"]["rollout_discrepancy"].mean > 0.01


def test_settings_of_the_measures() -> None:
    model = Attention()
    x = torch.randn(B, L, E, dtype=torch.float64)
    scores, weights, _ = model.matrix(x)
    with collect(
        model,
        ROWS,
        threshold=0.1,
        reference=0.2,
        support_threshold=0.15,
        k=2,
        histogram=lambda: LogHistogram(low=1e-2, bins=3),
    ) as found:
        model(x)
    layer = found[""]
    check_values(layer["multi_modality"], [metrics.multi_modality(scores, weights, threshold=0.1)], 1e-11)
    check_values(layer["sparsity"], [metrics.sparsity(scores, weights, threshold=0.1, reference=0.2)], 1e-11)
    check_values(layer["support"], [metrics.support(weights, threshold=0.15)], 1e-11)
    check_values(layer["top_mass"], [metrics.top_mass(weights, 2)], 1e-11)
    assert layer.histogram is not None
    assert len(layer.histogram.counts) == 3
    assert layer.histogram.total == weights.numel()


class Explicit(nn.Module):
    """Scores in, weights out, by a module."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.function = function

    def forward(self, scores: Tensor, **options: Any) -> Tensor:
        return self.function(scores, **options)


class TwiceAsSharp(nn.Module):
    """As the modules of multimax.reweighting are."""

    reweighting_name = "twice"
    dim = -1

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return torch.softmax(2 * x if mask is None else torch.where(mask, 2 * x, -torch.inf), -1)


@pytest.mark.parametrize("function", [multimax.MultiMax(), multimax.MultiMax(heads=H), nn.Softmax(-1), TwiceAsSharp()])
def test_modules_that_map_scores_to_weights(function: nn.Module) -> None:
    function = copy.deepcopy(function).double()
    model = Explicit(function)
    scores = torch.randn(B, H, L, L, dtype=torch.float64)
    causal = torch.ones(L, L, dtype=torch.bool).tril()
    masked = scores.masked_fill(~causal, -torch.inf)
    weights = function(masked).detach()
    with collect(model, ROWS) as found:
        assert torch.equal(model(masked), weights)
        if not isinstance(function, nn.Softmax):
            model(scores, mask=causal)
            function(scores, causal)
    times = 1 if isinstance(function, nn.Softmax) else 3
    assert list(found) == ["function"]
    check_rows(found["function"], [(scores, weights, causal.expand(scores.shape))] * times)


def test_heads_of_other_shapes() -> None:
    model = Explicit(multimax.MultiMax(dim=-2).double())
    function = model.function
    three = torch.randn(B, L, 5, dtype=torch.float64)  # along dim -2
    with collect(model, ("entropy",)) as found:
        model(three)
    entropy = metrics.entropy(function(three).detach(), dim=-2)[:, None]
    check_values(found["function"]["entropy"], [entropy], 1e-11)

    model = Explicit(multimax.MultiMax().double())
    function = model.function
    one, two, five = (torch.randn(shape, dtype=torch.float64) for shape in ((6,), (3, 6), (2, 3, H, L, 6)))
    with collect(model, ("entropy",)) as found:
        for x in (one, two, five):
            model(x)
    moments = found["function"]["entropy"]
    values = [metrics.entropy(function(x).detach()) for x in (one[None], two)]
    of_five = metrics.entropy(function(five).detach()).flatten(0, 1)  # (6, H, L)
    assert moments.head_counts == [1 + 3 + 6 * L] + [6 * L] * (H - 1)
    first = torch.cat([values[0], values[1], of_five[:, 0].flatten()])
    assert moments.head_means[0] == pytest.approx(first.mean().item(), rel=1e-12)
    assert moments.head_means[1:] == pytest.approx(of_five.mean((0, 2))[1:].tolist(), rel=1e-12)
    everything = torch.cat([values[0], values[1], of_five.flatten()])
    assert moments.mean == pytest.approx(everything.mean().item(), rel=1e-12)
    assert moments.std == pytest.approx(everything.std(correction=0).item(), rel=1e-12)


def test_softmax_of_an_output_layer_is_no_attention() -> None:
    model = nn.Sequential(OrderedDict(head=nn.Linear(5, 3), softmax=nn.Softmax(-1)))
    x = torch.randn(4, 5)
    with pytest.raises(ValueError, match="expected attention to run inside collect, got none"), collect(model):
        model(x)
    with collect(model, ("entropy",), layers=["softmax"]) as found:
        out = model(x)
    assert found["softmax"]["entropy"].mean == pytest.approx(metrics.entropy(out).mean().item(), rel=1e-6)
    model = nn.Sequential(nn.Softmax())
    x = torch.randn(3, 4, 5)
    with collect(model, ("entropy",)) as found, pytest.warns(UserWarning, match="Implicit dimension choice"):
        model(x)  # along the first dim, by torch's choice
    expected = metrics.entropy(torch.softmax(x, 0), dim=0)
    assert found["0"]["entropy"].count == 20
    assert found["0"]["entropy"].mean == pytest.approx(expected.mean().item(), rel=1e-6)


def mha_matrix(module: nn.MultiheadAttention, *args: Tensor, **kwargs: Any) -> Matrix:
    """By torch's own weights, a head at a time."""
    with torch.no_grad():
        module = copy.deepcopy(module).eval()
        _, weights = module(*args, **{**kwargs, "need_weights": True, "average_attn_weights": False})
    weights = weights if weights.ndim == 4 else weights[None]
    return weights.log(), weights, weights > 0


class OneMultihead(nn.Module):
    """torch's attention, called as the test says."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(E, H, **{"batch_first": True, **settings}).double()

    def forward(self, *args: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        return self.attention(*args, **kwargs)


def same(got: Any, expected: Any) -> None:
    """Bitwise, in what is there and what is not."""
    assert type(got) is type(expected)
    if isinstance(got, Tensor):
        assert torch.equal(got, expected)
    elif isinstance(got, tuple):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            same(one, other)
    else:
        assert got == expected


PADDING = torch.arange(L) >= torch.tensor([[L], [4]])
TORCH_CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "length first": ({"batch_first": False}, {}),
    "no bias": ({"bias": False}, {}),
    "bias and zeros at the keys": ({"add_bias_kv": True, "add_zero_attn": True}, {"key_padding_mask": PADDING}),
    "padding": ({}, {"key_padding_mask": PADDING}),
    "causal": ({}, {"attn_mask": ~torch.ones(L, L, dtype=torch.bool).tril(), "is_causal": True}),
    "a mask a head": ({"add_zero_attn": True}, {"attn_mask": torch.rand(B * H, L, L) < 0.3}),
    "numbers": ({}, {"attn_mask": FLOAT[0, 0]}),
    "numbers and padding": ({}, {"attn_mask": BIAS[0], "key_padding_mask": PADDING.double() * -1e300 * 1e10}),
}


@pytest.mark.parametrize("returned", ["nothing", "averaged", "a head each"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("call", TORCH_CALLS)
def test_torch_multihead_attention(call: str, training: bool, returned: str) -> None:
    settings, options = TORCH_CALLS[call]
    model = OneMultihead(**settings).train(training)
    x = torch.randn(*((B, L) if settings.get("batch_first", True) else (L, B)), E, dtype=torch.float64)
    options = {**options, "need_weights": returned != "nothing", "average_attn_weights": returned == "averaged"}
    with torch.set_grad_enabled(training):  # without, the module has a fast path of its own
        expected = model(x, x, x, **options)
        with collect(model, ROWS) as found:
            same(model(x, x, x, **options), expected)
    assert list(found) == ["attention"]
    check_rows(found["attention"], [mha_matrix(model.attention, x, x, x, **options)])


def test_torch_cross_attention_of_other_sizes() -> None:
    model = OneMultihead(kdim=5, vdim=6)
    query, key, value = (torch.randn(B, *shape, dtype=torch.float64) for shape in ((L, E), (9, 5), (9, 6)))
    with collect(model, MEASURES) as found:
        model(query, key=key, value=value, need_weights=False)
    check_rows(found["attention"], [mha_matrix(model.attention, query, key, value)])
    assert "rollout_discrepancy" not in found["attention"].measures
    assert found["attention"].left_out == {"rollout_discrepancy": "cross attention, of 7 queries to 9 keys"}
    assert "attention: rollout_discrepancy left out: cross attention, of 7 queries to 9 keys." in found.table()


def test_torch_attention_without_batches() -> None:
    model = OneMultihead()
    x = torch.randn(L, E, dtype=torch.float64)
    expected = model(x, x, x, key_padding_mask=PADDING[1])
    with collect(model, MEASURES) as found:
        same(model(x, x, x, key_padding_mask=PADDING[1]), expected)
    check_rows(found["attention"], [mha_matrix(model.attention, x, x, x, key_padding_mask=PADDING[1])])
    similarity = metrics.patch_similarity(expected[0][~PADDING[1]])
    check_values(found["attention"]["patch_similarity"], [similarity[None, None, None]], 1e-11)


def test_torch_dropout_in_training() -> None:
    """Weights before dropout; outputs, gradients and random numbers as without the collector."""
    model = OneMultihead(dropout=0.5).train()
    x = torch.randn(B, L, E, dtype=torch.float64)

    def run() -> tuple[Tensor, list[Tensor], Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        out, weights = model(x, x, x, need_weights=False)
        assert weights is None
        out.square().sum().backward()
        return out, [p.grad.clone() for p in model.parameters()], torch.get_rng_state()

    expected = run()
    with collect(model, ROWS) as found:
        out, grads, state = run()
    assert torch.equal(out, expected[0])
    assert all(torch.equal(*pair) for pair in zip(grads, expected[1], strict=True))
    assert torch.equal(state, expected[2])
    assert model.training
    assert model.attention.training
    check_rows(found["attention"], [mha_matrix(model.attention, x, x, x)])


def encoder(layers: int = 2, **settings: Any) -> nn.TransformerEncoder:
    settings = {"dropout": 0.0, "batch_first": True, **settings}
    layer = nn.TransformerEncoderLayer(E, H, 2 * E, **settings).double()
    model = nn.TransformerEncoder(layer, layers)
    for parameter in model.parameters():  # or all layers would be equal
        nn.init.normal_(parameter, std=0.3)
    return model


def attention_inputs(model: nn.Module, run: Callable[[], object]) -> dict[str, list[tuple[Any, Any]]]:
    """Arguments of every nn.MultiheadAttention in one run, by name, copied."""
    found: dict[str, list[tuple[Any, Any]]] = {}
    handles = [
        module.register_forward_pre_hook(
            lambda module, args, kwargs, name=name: found.setdefault(name, []).append((args, kwargs)), with_kwargs=True
        )
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention)
    ]
    run()
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_encoder(training: bool, batch_first: bool) -> None:
    """In evaluation without gradients the encoder has a fast path, which calls no attention: it must not be taken."""
    model = encoder(batch_first=batch_first).train(training)
    x = torch.randn(B, L, E, dtype=torch.float64)
    x = x if batch_first else x.transpose(0, 1)
    with torch.set_grad_enabled(training):
        expected = model(x)
        inputs = attention_inputs(model, lambda: model(x))
        with collect(model, MEASURES) as found:
            out = model(x)
    if training or not batch_first:
        assert torch.equal(out, expected)
    else:  # the fast path rounds differently
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert list(found) == ["layers.0.self_attn", "layers.1.self_attn"]
    maps = []
    for name, calls in inputs.items():
        matrices = [mha_matrix(model.get_submodule(name), *args, **kwargs) for args, kwargs in calls]
        check_rows(found[name], matrices)
        maps += [weights for _, weights, _ in matrices]
    for name, value in zip(found, metrics.rollout_discrepancy(maps, heads_dim=1), strict=True):
        check_values(found[name]["rollout_discrepancy"], [value[:, None, None]], 1e-11)
    final = out if batch_first else out.transpose(0, 1)
    check_values(
        found["layers.1.self_attn"]["patch_similarity"], [metrics.patch_similarity(final)[:, None, None]], 1e-11
    )


def test_torch_encoder_as_long_as_its_batch() -> None:
    """Where the shape does not tell batch and length apart, batch_first does."""
    x = torch.randn(L, L, E, dtype=torch.float64)
    for batch_first in (True, False):
        model = encoder(1, batch_first=batch_first)
        with collect(model, ("mean_average_distance",)) as found:
            out = model(x)
        out = out if batch_first else out.transpose(0, 1)
        values = metrics.mean_average_distance(out)[:, None, None]
        check_values(found["layers.0.self_attn"]["mean_average_distance"], [values], 1e-11)


@pytest.mark.parametrize("nested", [True, False])
def test_torch_encoder_with_padding(nested: bool) -> None:
    """Which in evaluation becomes a nested tensor, whose padding comes back as zeros."""
    model = encoder().eval()
    x = torch.randn(B, L, E, dtype=torch.float64)
    model.use_nested_tensor = nested
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=PADDING)
        with collect(model, MEASURES) as found:
            out = model(x, src_key_padding_mask=PADDING)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        assert (out[PADDING] == 0).all() == nested
        # one sequence after the other, without padding
        lengths = (~PADDING).sum(1).tolist()
        kept: dict[str, list[Matrix]] = {}
        similarity: dict[str, list[Tensor]] = {}
        for hidden, length in zip(x, lengths, strict=True):
            hidden = hidden[None, :length]
            for i, layer in enumerate(model.layers):
                name = f"layers.{i}.self_attn"
                kept.setdefault(name, []).append(mha_matrix(layer.self_attn, hidden, hidden, hidden))
                hidden = layer(hidden)
                similarity.setdefault(name, []).append(metrics.patch_similarity(hidden)[:, None, None])
    for name in found:
        check_values(found[name]["patch_similarity"], similarity[name], 1e-11)
        if nested:  # else queries of the padding count, as they are computed
            check_rows(found[name], kept[name])
            assert found[name].rows == H * sum(lengths)
        else:
            assert found[name].rows == H * B * L


def test_torch_transformer() -> None:
    """Encoder and decoder are two stacks, and cross attention has no rollout, though all have one length."""
    model = nn.Transformer(E, H, 2, 2, 2 * E, dropout=0.0, batch_first=True).double()
    source, target = (torch.randn(B, L, E, dtype=torch.float64) for _ in range(2))
    causal = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)

    def run() -> Tensor:
        return model(source, target, tgt_mask=causal, tgt_is_causal=True)

    expected = run()
    inputs = attention_inputs(model, run)
    with collect(model, MEASURES) as found:
        assert torch.equal(run(), expected)
    decoder = [f"decoder.layers.{i}.{name}" for i in range(2) for name in ("self_attn", "multihead_attn")]
    assert list(found) == ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn", *decoder]
    maps: dict[str, list[Tensor]] = {}
    for name, [(args, kwargs)] in inputs.items():
        matrix = mha_matrix(model.get_submodule(name), *args, **kwargs)
        check_rows(found[name], [matrix])
        maps.setdefault(name.split(".")[0] + name.split(".")[-1], []).append(matrix[1])
    for stack in ("encoder", "decoder"):
        for i, value in enumerate(metrics.rollout_discrepancy(maps[stack + "self_attn"], heads_dim=1)):
            moments = found[f"{stack}.layers.{i}.self_attn"]["rollout_discrepancy"]
            check_values(moments, [value[:, None, None]], 1e-11)
    for i in range(2):
        assert "rollout_discrepancy" not in found[f"decoder.layers.{i}.multihead_attn"].measures
        assert "cross attention" in found[f"decoder.layers.{i}.multihead_attn"].left_out["rollout_discrepancy"]


@pytest.mark.parametrize("training", [True, False])
def test_our_multihead_attention(training: bool) -> None:
    """It reports by multimax_attention, also inside torch's layers."""
    model = encoder().train(training)
    for layer in model.layers:
        layer.self_attn = multimax.MultiheadAttention(E, H, batch_first=True, per_head=True).double()
    x = torch.randn(B, L, E, dtype=torch.float64)
    with torch.set_grad_enabled(training):
        expected = model(x)
        inputs = attention_inputs(model, lambda: model(x))
        with collect(model, MEASURES) as found:
            assert torch.equal(model(x), expected)
    assert list(found) == list(inputs)
    for name, [(args, kwargs)] in inputs.items():
        module = copy.deepcopy(model.get_submodule(name))
        _, weights = module(*args, **{**kwargs, "need_weights": True, "average_attn_weights": False})
        q, k, _ = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in module._project(*args))
        scores = (q @ k.transpose(-1, -2) * D**-0.5).detach()
        check_rows(found[name], [(scores, weights.detach(), torch.ones(scores.shape, dtype=torch.bool))])
    assert found["layers.1.self_attn"]["rollout_discrepancy"].count == B


def test_our_multihead_attention_as_a_decoder() -> None:
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(E, H, E, dropout=0.0, batch_first=True), 2).double()
    for layer in model.layers:
        for name in ("self_attn", "multihead_attn"):
            setattr(layer, name, multimax.MultiheadAttention(E, H, batch_first=True).double())
    x, memory = (torch.randn(B, L, E, dtype=torch.float64) for _ in range(2))
    with collect(model, ("rollout_discrepancy",)) as found:
        model(x, memory)
    assert found["layers.1.self_attn"]["rollout_discrepancy"].count == B
    why = found["layers.1.multihead_attn"].left_out["rollout_discrepancy"]
    assert why == "taken for cross attention, since layers.1.self_attn comes before it in the same block"


def bert(**settings: Any) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=E, num_hidden_layers=3, num_attention_heads=H, intermediate_size=48, **settings
    )
    return transformers.BertModel._from_config(config, attn_implementation="eager").double().eval()


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=40, n_embd=E, n_layer=3, n_head=H, n_positions=32)
    return transformers.GPT2LMHeadModel._from_config(config, attn_implementation="eager").double().eval()


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=E, num_hidden_layers=3, num_attention_heads=H, intermediate_size=48, image_size=8, patch_size=4
    )
    return transformers.ViTModel._from_config(config, attn_implementation="eager").double().eval()


TOKENS = torch.randint(0, 40, (B, L), generator=torch.Generator().manual_seed(5))
TRANSFORMERS: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor], str, str]] = {
    "bert": (bert, {"input_ids": TOKENS, "attention_mask": (~PADDING).long()}, "encoder.layer.{}", ".attention.self"),
    "gpt2": (gpt2, {"input_ids": TOKENS}, "transformer.h.{}", ".attn"),
    "vit": (vit, {"pixel_values": torch.randn(B, 3, 8, 8, dtype=torch.float64)}, "layers.{}", ".attention"),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name: str) -> None:
    make, inputs, block, attention = TRANSFORMERS[name]
    model = make()
    outputs: dict[int, Tensor] = {}
    handles = [
        model.get_submodule(block.format(i)).register_forward_hook(
            lambda module, args, out, i=i: outputs.__setitem__(i, out[0] if isinstance(out, tuple) else out)
        )
        for i in range(3)
    ]
    with torch.no_grad():
        result = model(**inputs, output_attentions=True)
        expected = model(**inputs)[0]
        for handle in handles:
            handle.remove()
        with collect(model, MEASURES) as found:
            assert torch.equal(model(**inputs)[0], expected)
    assert list(found) == [(block + attention).format(i) for i in range(3)]
    rollout = metrics.rollout_discrepancy(result.attentions, heads_dim=1)
    seen = ~PADDING if name == "bert" else None
    for i, (layer, weights) in enumerate(zip(found, result.attentions, strict=True)):
        check_rows(found[layer], [(weights.log(), weights, weights > 0)])
        check_values(found[layer]["rollout_discrepancy"], [rollout[i][:, None, None]], 1e-11)
        similarity = metrics.patch_similarity(outputs[i], seen)
        check_values(found[layer]["patch_similarity"], [similarity[:, None, None]], 1e-11)


def test_transformers_that_attend_unseen() -> None:
    model = bert()
    model.set_attn_implementation("sdpa")
    hooks = all_hooks(model)
    with pytest.raises(
        ValueError, match=r"got 'sdpa' in encoder.layer.0.attention.self .*attn_implementation=\"eager\""
    ):
        collect(model).__enter__()
    assert all_hooks(model) == hooks
    model.set_attn_implementation("eager")
    with collect(model) as found:
        model(TOKENS)
    assert len(found) == 3


def test_transformers_with_dropout() -> None:
    model = bert(attention_probs_dropout_prob=0.3, hidden_dropout_prob=0.0).train()
    with (
        pytest.raises(ValueError, match=r"got BertSelfAttention's after dropout, .* call model\.eval\(\)"),
        collect(model),
    ):
        model(TOKENS)
    model = bert(attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0).train()
    with collect(model, ("entropy",)) as found:
        model(TOKENS)
    assert found["encoder.layer.0.attention.self"]["entropy"].count == B * H * L


@pytest.mark.parametrize("training", [True, False])
def test_transformers_that_return_a_bias_before_the_weights(training: bool) -> None:
    config = transformers.T5Config(
        vocab_size=40,
        d_model=E,
        d_kv=D,
        d_ff=48,
        num_layers=2,
        num_heads=H,
        decoder_start_token_id=0,
        dropout_rate=0.0,
        use_cache=False,
    )
    model = transformers.T5ForConditionalGeneration._from_config(config, attn_implementation="eager").double()
    model.train(training)
    inputs = {"input_ids": TOKENS, "decoder_input_ids": TOKENS}
    with torch.no_grad():
        result = model(**inputs, output_attentions=True)
        with collect(model, MEASURES) as found:
            model(**inputs)
    groups = {
        "encoder.block.{}.layer.0.SelfAttention": result.encoder_attentions,
        "decoder.block.{}.layer.0.SelfAttention": result.decoder_attentions,
        "decoder.block.{}.layer.1.EncDecAttention": result.cross_attentions,
    }
    assert len(found) == 6
    for name, attentions in groups.items():
        rollout = metrics.rollout_discrepancy(attentions, heads_dim=1)
        for i, weights in enumerate(attentions):
            layer = found[name.format(i)]
            check_rows(layer, [(weights.log(), weights, weights > 0)])
            if "EncDec" in name:
                assert "cross attention" in layer.left_out["rollout_discrepancy"]
            else:
                check_values(layer["rollout_discrepancy"], [rollout[i][:, None, None]], 1e-11)


def test_generation_with_a_cache() -> None:
    model = gpt2()
    with collect(model, ("entropy", "rollout_discrepancy")) as found:
        model.generate(TOKENS, max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None)
    layer = found["transformer.h.1.attn"]
    assert layer["entropy"].count == B * H * (L + 2)  # the first pass, and two more tokens
    assert layer["rollout_discrepancy"].count == B
    assert layer.left_out == {"rollout_discrepancy": f"cross attention, of 1 queries to {L + 2} keys"}


def test_hooks_are_released() -> None:
    model = Stack(Attention(), OneMultihead().attention)
    model.register_forward_hook(lambda *args: None)  # of the user's, which stays
    before = all_hooks(model)
    with collect(model.blocks[0]) as found:
        assert all_hooks(model) != before
        model.blocks[0](torch.randn(B, L, E, dtype=torch.float64))
    assert all_hooks(model) == before
    assert len(found) == 1


class Breaks(nn.Module):
    """Raises at the second call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = Attention(), 0

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        x = self.inner(x, **options)
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("a bug of the model's")
        return x


def test_hooks_are_released_when_the_model_raises() -> None:
    model = Stack(Attention(), Breaks())
    before = all_hooks(model)
    x = torch.randn(B, L, E, dtype=torch.float64)
    model(x)
    with pytest.raises(RuntimeError, match="a bug of the model's"), collect(model, ROWS):
        model(x)
    assert all_hooks(model) == before


def test_going_on_after_an_exception() -> None:
    """The names are right again although the broken call never came back."""
    model = Stack(Attention(), Breaks())
    x = torch.randn(B, L, E, dtype=torch.float64)
    with collect(model, MEASURES) as found:
        model(x)
        with pytest.raises(RuntimeError, match="a bug of the model's"):
            model(x)
        model(x)
        multimax.multimax_attention(*Attention().split(x), *params())  # outside of the model: not its
    assert list(found) == ["blocks.0.attention", "blocks.1.attention.inner"]
    for layer in found.layers.values():
        assert layer["entropy"].count == 3 * B * H * L
    assert found["blocks.0.attention"]["patch_similarity"].count == 3 * B
    assert found["blocks.1.attention.inner"]["patch_similarity"].count == 2 * B
    assert found["blocks.1.attention.inner"]["rollout_discrepancy"].count == 3 * B


def test_a_hook_of_the_users_that_raises_before_ours() -> None:
    model = Stack(Attention(), Attention())

    def bad(*args: object) -> None:
        raise RuntimeError("a bug in a hook")

    x = torch.randn(B, L, E, dtype=torch.float64)
    with collect(model, ("entropy",)) as found:
        handle = model.blocks[1].register_forward_pre_hook(bad, prepend=True)
        with pytest.raises(RuntimeError, match="a bug in a hook"):
            model(x)
        handle.remove()
        model(x)
    assert found["blocks.0.attention"]["entropy"].count == 2 * B * H * L
    assert found["blocks.1.attention"]["entropy"].count == B * H * L


def test_weights_for_a_callback() -> None:
    """A few queries at a time, in order, with what takes part; and no measures if there are none to take."""
    model = Stack(Attention(causal=True), Attention(key_heads=2))
    x = torch.randn(B, L, E, dtype=torch.float64)
    kept: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def keep(layer: str, weights: Tensor, mask: Tensor) -> None:
        kept.setdefault(layer, []).append((weights, mask))

    with collect(model, (), on_weights=keep) as found:
        model(x)
    assert list(kept) == list(found) == ["blocks.0.attention", "blocks.1.attention"]
    assert found["blocks.0.attention"].measures == {}
    for block in model.blocks:
        _, weights, part = block.attention.matrix(block.norm(x))
        blocks = kept[f"blocks.{list(model.blocks).index(block)}.attention"]
        assert len(blocks) > 1
        assert torch.equal(torch.cat([mask for _, mask in blocks], 2), part)
        got = torch.cat([weights for weights, _ in blocks], 2)
        torch.testing.assert_close(got, weights)
        assert not got.requires_grad
        x = block(x)


def test_a_callback_beside_measures_and_for_some_layers() -> None:
    model = Stack(Attention(), Attention())
    x = torch.randn(B, L, E, dtype=torch.float64)
    names: list[str] = []
    with collect(model, ROWS, layers=["blocks.1.attention"]) as expected:
        model(x)
    with collect(model, ROWS, layers=["blocks.1.attention"], on_weights=lambda layer, *_: names.append(layer)) as found:
        model(x)
    assert set(names) == {"blocks.1.attention"}
    assert found.as_dict() == expected.as_dict()


def test_a_callback_that_raises() -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug of the callback's")

    model = Stack(Attention())
    before = all_hooks(model)
    with pytest.raises(RuntimeError, match="a bug of the callback's"), collect(model, on_weights=broken):
        model(torch.randn(B, L, E, dtype=torch.float64))
    assert all_hooks(model) == before
    with pytest.raises(TypeError, match=r"expected measures to be several names, got \(\)"), collect(model, ()):
        pass
    with pytest.raises(TypeError, match="expected measures to be several names, got 'entropy'"):
        collect(model, "entropy", on_weights=broken).__enter__()


def test_gradients_of_our_attention() -> None:
    model = Stack(Attention(causal=True), Attention(per_head=True)).float()
    x = torch.randn(B, L, E)

    def gradients() -> list[Tensor]:
        torch.manual_seed(2)
        model.zero_grad()
        model(x, dropout_p=0.3).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    with collect(model, MEASURES):
        got = gradients()
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_count_once(reentrant: bool) -> None:
    class Saving(Stack):
        def forward(self, x: Tensor, **options: Any) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    model = Saving(Attention(), Attention())
    with collect(model, MEASURES) as found:
        for _ in range(2):
            model(torch.randn(B, L, E, dtype=torch.float64, requires_grad=True)).sum().backward()
        Attention()(torch.randn(B, L, E, dtype=torch.float64))  # no module of the model's runs any more
    assert list(found) == ["blocks.0.attention", "blocks.1.attention"]
    for layer in found.layers.values():
        assert layer["entropy"].count == 2 * B * H * L
        assert layer["patch_similarity"].count == layer["rollout_discrepancy"].count == 2 * B
    with collect(model, ("rollout_discrepancy",), residual=False) as found:  # begun anew after a backward
        for _ in range(2):
            model(torch.randn(B, L, E, dtype=torch.float64, requires_grad=True)).sum().backward()
    assert found["blocks.0.attention"]["rollout_discrepancy"].mean == pytest.approx(0, abs=1e-12)


def test_only_the_layers_named() -> None:
    model = Stack(Attention(), Attention())
    x = torch.randn(B, L, E, dtype=torch.float64)
    with collect(model, layers=["blocks.1.attention"]) as found:
        model(x)
    assert list(found) == ["blocks.1.attention"]
    with pytest.raises(ValueError, match=r"of the model's modules, '', 'blocks', 'blocks.0', .* got 'blocks.7'"):
        collect(model, layers=["blocks.7"]).__enter__()
    with (
        pytest.raises(
            ValueError, match=r"expected attention in the given layers, got none; it is in 'blocks.0.attention'"
        ),
        collect(model, layers=["blocks.0.linear"]),
    ):
        model(x)


def test_layers_of_other_lengths_have_no_rollout() -> None:
    class Shorter(Stack):
        def forward(self, x: Tensor, **options: Any) -> Tensor:
            x = self.blocks[0](x)
            return self.blocks[1](x[:, ::2])

    model = Shorter(Attention(), Attention())
    with collect(model, ("rollout_discrepancy", "mean_average_distance")) as found:
        model(torch.randn(B, L, E, dtype=torch.float64))
    assert found["blocks.0.attention"]["rollout_discrepancy"].count == B
    assert found["blocks.1.attention"].left_out == {"rollout_discrepancy": "2 x 4 positions, after layers of 2 x 7"}
    assert found["blocks.1.attention"]["mean_average_distance"].count == B
    assert found.as_dict()["blocks.1.attention"]["left_out"]


def test_blocks_without_features() -> None:
    class Count(Attention):
        def forward(self, x: Tensor, **options: Any) -> Tensor:
            super().forward(x)
            return x[0, 0, 0]

    model = Count()
    x = torch.randn(B, L, E, dtype=torch.float64)
    with collect(model, ("patch_similarity", "entropy")) as found:
        Count()(x)  # another model: not its
        assert len(found) == 0
        model(x)
    assert found[""].left_out == {
        "patch_similarity": "the output of the model has no features of shape (batch, length, size)"
    }
    assert found[""]["entropy"].count == B * H * L


def test_nothing_to_collect() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    with (
        pytest.raises(ValueError, match="multimax: expected attention to run inside collect, got none; call the model"),
        collect(model),
    ):
        model(torch.randn(2, 3))


def test_arguments() -> None:
    model = Attention()
    with pytest.raises(
        ValueError, match=r"expected measures to be one of 'multi_modality', 'sparsity', .* got 'speed'"
    ):
        collect(model, ("speed",)).__enter__()
    with pytest.raises(TypeError, match="expected measures to be several names, got 'entropy'"):
        collect(model, "entropy").__enter__()
    with pytest.raises(TypeError, match="expected layers to be several full names"):
        collect(model, layers="blocks").__enter__()
    with pytest.raises(ValueError, match="expected k of at least 1, got 0"):
        collect(model, k=0).__enter__()
    with pytest.raises(TypeError, match="expected threshold to be a number or None, got str"):
        collect(model, threshold="0").__enter__()  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected model to be an nn.Module, got int"):
        collect(3).__enter__()  # type: ignore[arg-type]


def test_compiled_models_cannot_be_seen() -> None:
    model = Stack(Attention())
    with pytest.raises(ValueError, match=r"expected a model that is not compiled, got the model \(OptimizedModule\)"):
        collect(torch.compile(model)).__enter__()
    model.blocks[0].compile()
    with pytest.raises(ValueError, match=r"expected a model that is not compiled, got blocks.0 \(Block\)"):
        collect(model).__enter__()


def test_nan_is_counted_and_not_averaged() -> None:
    model = Explicit(nn.Softmax(-1))
    scores = torch.randn(B, H, L, L, dtype=torch.float64)
    broken = scores.clone()
    broken[1, 2, 3, 4] = math.nan
    with collect(model, ROWS) as found:
        model(broken)
    layer = found["function"]
    assert layer.nan_rows == 1
    assert layer.rows == B * H * L
    assert layer.histogram is not None
    assert layer.histogram.nans == L
    weights = torch.softmax(broken, -1)
    check_values(layer["entropy"], [metrics.entropy(weights)], 1e-11)
    assert "function: 1 of 56 rows hold NaN and are in no mean." in found.table()


def test_table_and_dict() -> None:
    model = Stack(Attention(), Attention())
    with collect(model, MEASURES) as found:
        for b in (1, 3):
            model(torch.randn(b, L, E, dtype=torch.float64))
    lines = found.table().splitlines()
    assert len(lines) == 4
    assert lines[0].split("|")[1].strip() == "layer"
    assert lines[1].replace("-", "").replace("|", "") == ""
    assert len({len(line) for line in lines}) == 1
    assert all(line.count("|") == len(MEASURES) + 3 for line in lines)
    layer = found["blocks.1.attention"]
    assert f"{layer['sparsity'].mean:.4f} ± {layer['sparsity'].std:.4f}" in lines[3]
    as_dict = found.as_dict()
    assert json.loads(json.dumps(as_dict, allow_nan=False)) == as_dict
    numbers = as_dict["blocks.1.attention"]
    assert numbers["rows"] == 4 * H * L
    assert numbers["entropy"]["mean"] == layer["entropy"].mean  # type: ignore[index]
    assert numbers["entropy"]["heads"]["mean"] == layer["entropy"].head_means  # type: ignore[index]
    assert set(numbers) == {"rows", "nan_rows", *MEASURES}
    assert repr(found).startswith("AttentionStatistics(2 layers, multi_modality")


def test_measures_that_are_never_defined() -> None:
    """One key: nothing is relevant beside it, and nothing irrelevant."""
    model = Explicit(nn.Softmax(-1))
    with collect(model, ("sparsity", "entropy")) as found:
        model(torch.randn(2, 3, 4, 1))
        model(torch.randn(2, 3, 4, 0))
    assert found["function"]["sparsity"].count == 0
    assert math.isnan(found["function"]["sparsity"].mean)
    assert found["function"]["entropy"].count == found["function"].rows == 24
    assert found.as_dict()["function"]["sparsity"]["mean"] is None  # type: ignore[index]
    assert found.table().splitlines()[2].split("|")[3].strip() == "-"


def test_two_collectors_at_once() -> None:
    model = Stack(Attention(), Attention())
    x = torch.randn(B, L, E, dtype=torch.float64)
    with collect(model, ("entropy",)) as outer:
        model(x)
        with collect(model.blocks[1], ("entropy",)) as inner:
            model(x)
    assert list(outer) == ["blocks.0.attention", "blocks.1.attention"]
    assert list(inner) == ["attention"]
    assert outer["blocks.1.attention"]["entropy"].count == 2 * inner["attention"]["entropy"].count == 2 * B * H * L


def test_a_layer_that_runs_twice() -> None:
    class Shared(Stack):
        def forward(self, x: Tensor, **options: Any) -> Tensor:
            return self.blocks[0](self.blocks[0](x))

    model = Shared(Attention())
    with collect(model, MEASURES) as found:
        model(torch.randn(B, L, E, dtype=torch.float64))
    layer = found["blocks.0.attention"]
    assert layer["entropy"].count == 2 * B * H * L
    assert layer["rollout_discrepancy"].count == layer["patch_similarity"].count == 2 * B


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


@pytest.mark.parametrize("kind", ["ours", "torch's"])
def test_memory_does_not_grow_with_the_square_of_the_length(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    elements = 2**17  # more than the projections of a model of this size have
    monkeypatch.setattr(score_blocks, "ELEMENTS", elements)
    length = 1024
    matrix = H * length * length
    x = torch.randn(1, length, E)
    model = Attention(causal=True).float() if kind == "ours" else OneMultihead().float()
    shapes = []
    original = score_blocks.query_slices

    def spy(shape: tuple[int, ...]) -> Iterator[slice]:
        for rows in original(shape):
            shapes.append((*shape[:-2], rows.stop - rows.start, shape[-1]))
            yield rows

    monkeypatch.setattr(score_blocks, "query_slices", spy)
    with torch.no_grad(), LargestTensor() as seen, collect(model, ROWS) as found:
        if kind == "ours":
            model(x)
        else:
            model(x, x, x, need_weights=False)
    assert len(shapes) == matrix // elements
    assert all(math.prod(shape) <= elements for shape in shapes)
    # one value per bin of the histogram beside the scores; inputs are smaller
    assert elements <= seen.largest <= elements + 100 < matrix
    (layer,) = found.layers.values()
    assert layer["entropy"].count == H * length


def test_blocks_cover_all_queries() -> None:
    for shape in ((2, 3, 10, 4), (1, 1, 1, 1), (2, 3, 0, 5), (2, 3, 4, 0), (0, 3, 4, 5), (64, 64, 3, 900)):
        rows = [i for block in score_blocks.query_slices(shape) for i in range(block.start, block.stop)]
        assert rows == list(range(shape[2]))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("left", "right"), [(-1, -1), (2, 0), (-1, 1), (0, -1)])
@pytest.mark.parametrize("shape", [(6, 6), (3, 8), (8, 3)])
def test_band_of_some_rows(causal: bool, left: int, right: int, shape: tuple[int, int]) -> None:
    device = torch.device("cpu")
    parts = [
        reference.band(*shape, causal, left, right, device, slice(i, min(i + 2, shape[0])))
        for i in range(0, shape[0], 2)
    ]
    assert torch.equal(torch.cat(parts), reference.band(*shape, causal, left, right, device))


def test_observers_are_told_order_and_shape_and_need_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object) -> None:
        raise AssertionError("values were computed though nobody asked")

    monkeypatch.setattr(score_blocks, "_block", never)
    model = Attention(key_heads=2, order=3)
    told: list[tuple[int, tuple[int, ...]]] = []
    x = torch.randn(B, L, E, dtype=torch.float64)
    model(x)
    assert not observing.active()
    with observing.observe(lambda order, shape, blocks: told.append((order, shape))):
        assert observing.active()
        model(x)
        multimax.multimax_attention(*(torch.randn(9, D) for _ in range(3)), torch.zeros(1, 2), torch.zeros(1, 2))
    assert told == [(3, (B, H, L, L)), (1, (1, 1, 9, 9))]
    with pytest.raises(AssertionError, match="values were computed"), collect(model):
        model(x)


def test_reports_carry_no_gradient_and_can_be_asked_twice() -> None:
    model = Attention()
    seen: list[list[Tensor]] = []

    def look(order: int, shape: tuple[int, ...], blocks: observing.Blocks) -> None:
        for _ in range(2):
            seen.append([torch.cat(parts, 2) for parts in zip(*blocks(), strict=True)])

    x = torch.randn(B, L, E, dtype=torch.float64)
    with observing.observe(look):
        model(x)
    for got, again, expected in zip(*seen, model.matrix(x), strict=True):
        assert not got.requires_grad
        assert torch.equal(got, again)
        torch.testing.assert_close(got, expected)


def test_nothing_is_reported_from_compiled_code() -> None:
    """And watching does not disturb it."""
    model = Attention().float()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    x = torch.randn(B, L, E)
    told: list[int] = []
    with observing.observe(lambda order, shape, blocks: told.append(order)):
        out = compiled(x)
    assert told == []
    torch.testing.assert_close(out, model(x))


def test_moments_do_not_cancel() -> None:
    moments = Moments()
    values = 1e8 + torch.randn(3, 2, 1000, dtype=torch.float64)
    for batch in values.split(100, 2):
        moments.update(batch)
    check_values(moments, [values], 1e-9)


def test_transformers_with_our_attention_in_its_interface() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface, GPT2Config, GPT2Model
    from transformers.masking_utils import sdpa_mask

    coefs, knots = multimax.from_paper(*multimax.presets["deit_small"][8])
    kept: list[Tensor] = []

    def attention_function(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any
    ) -> Any:
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        kept.append(multimax.multimax(scores, coefs, knots, mask=causal))
        out = multimax.multimax_attention(query, key, value, coefs, knots, is_causal=True)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("own_multimax", attention_function)
    AttentionMaskInterface.register("own_multimax", sdpa_mask)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99, bos_token_id=0, eos_token_id=0)
    model = GPT2Model(config).eval()
    model.set_attn_implementation("own_multimax")
    ids = torch.randint(99, (2, 7))
    with torch.no_grad():
        plain = model(ids)[0]
        kept.clear()
        with metrics.collect(model, ("entropy",)) as found:
            assert torch.equal(model(ids)[0], plain)
    assert list(found) == ["h.0.attn", "h.1.attn"]
    for name, weights in zip(found, kept, strict=True):
        assert found[name].rows == 2 * 4 * 7
        assert found[name]["entropy"].mean == pytest.approx(metrics.entropy(weights).mean().item(), rel=1e-5)
