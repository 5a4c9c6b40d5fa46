"""MultiheadAttention: torch's own module as the oracle at zero coefs, and its place in torch's Transformer layers."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multimax


def pair(**settings: Any) -> tuple[nn.MultiheadAttention, multimax.MultiheadAttention]:
    """Torch's module and ours with its weights."""
    theirs = nn.MultiheadAttention(32, 4, **settings)
    for bias in (theirs.in_proj_bias, theirs.out_proj.bias):
        if bias is not None:
            nn.init.normal_(bias)
    ours = multimax.MultiheadAttention(32, 4, **settings)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs(settings: dict[str, Any], batched: bool = True, same: bool = True) -> list[Tensor]:
    lengths = (7, 7, 7) if same else (7, 9, 9)
    widths = (32, settings.get("kdim") or 32, settings.get("vdim") or 32)
    values = [torch.randn(3, length, width) for length, width in zip(lengths, widths, strict=True)]
    if same and widths == (32, 32, 32):
        values = [values[0]] * 3
    if not batched:
        return [t[0] for t in values]
    return values if settings.get("batch_first") else [t.transpose(0, 1) for t in values]


def results(module: nn.MultiheadAttention, values: list[Tensor], **options: Any) -> list[Tensor]:
    """Output, weights if any, and gradients of the inputs and of all that both modules have."""
    leaves = {id(t): t.detach().clone().requires_grad_() for t in values}
    module.zero_grad()
    out, weights = module(*(leaves[id(t)] for t in values), **options)
    loss = (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).sum()
    if weights is not None:
        loss = loss + (weights * torch.linspace(0, 1, weights.numel()).reshape(weights.shape)).sum()
    loss.backward()
    grads = [p.grad for name, p in module.named_parameters() if not name.startswith("multimax")]
    return [out, *([] if weights is None else [weights]), *(leaf.grad for leaf in leaves.values()), *grads]


SETTINGS: list[dict[str, Any]] = [
    {},
    {"batch_first": True},
    {"bias": False},
    {"add_bias_kv": True},
    {"add_zero_attn": True, "batch_first": True},
    {"add_bias_kv": True, "add_zero_attn": True},
    {"kdim": 24, "vdim": 40},
    {"kdim": 24, "batch_first": True, "bias": False},
]
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "boolean": {"attn_mask": "boolean"},
    "numbers": {"attn_mask": "numbers"},
    "a head each": {"attn_mask": "heads"},
    "padding": {"key_padding_mask": "boolean"},
    "padding, numbers": {"key_padding_mask": "numbers"},
    "both": {"attn_mask": "boolean", "key_padding_mask": "boolean"},
    "both, mixed": {"attn_mask": "numbers", "key_padding_mask": "numbers"},
    "causal": {"attn_mask": "causal", "is_causal": True},
}


def masks(kind: str, keys: int, batched: bool) -> dict[str, Any]:
    options = dict(MASKS[kind])
    off = torch.rand(7, keys) < 0.3
    off[:, 0] = False  # every row keeps a key: what torch gives otherwise is NaN
    numbers = torch.randn(7, keys).masked_fill(off, -torch.inf)
    every = off.expand(3 if batched else 1, 4, 7, keys).flatten(0, 1)
    padding = torch.zeros(3, keys, dtype=torch.bool)
    padding[1, -2:] = True
    if not batched:
        padding = padding[1]
    causal = torch.ones(7, keys, dtype=torch.bool).triu(1)
    attn = {"boolean": off, "numbers": numbers, "heads": every, "causal": causal}
    pads = {"boolean": padding, "numbers": torch.zeros(padding.shape).masked_fill(padding, -torch.inf)}
    if "attn_mask" in options:
        options["attn_mask"] = attn[options["attn_mask"]]
    if "key_padding_mask" in options:
        options["key_padding_mask"] = pads[options["key_padding_mask"]]
    return options


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_zero_coefs_are_torchs_module(settings: dict[str, Any], kind: str) -> None:
    theirs, ours = pair(**settings)
    for batched, same, weights in itertools.product([True, False], [True, False], [None, "averaged", "each"]):
        values = inputs(settings, batched, same)
        options = masks(kind, 7 if same else 9, batched)
        options |= {"need_weights": weights is not None, "average_attn_weights": weights != "each"}
        if kind == "causal" and weights is None and ("add_bias_kv" in settings or "add_zero_attn" in settings):
            continue  # torch then hides the keys that it has added itself, unless weights are asked for; we never do
        for a, b in zip(results(ours, values, **options), results(theirs, values, **options), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_dropout_drops_what_torch_drops() -> None:
    theirs, ours = pair(dropout=0.5)
    x = torch.randn(7, 3, 32)
    outs = []
    for module in (theirs, ours):
        torch.manual_seed(2)
        outs.append(module(x, x, x))
    for a, b in zip(*outs, strict=True):
        torch.testing.assert_close(a, b)
    first, second = (ours(x, x, x, need_weights=False)[0] for _ in range(2))
    assert not torch.equal(first, second)
    ours.eval()
    assert torch.equal(ours(x, x, x, need_weights=False)[0], ours(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("kind", MASKS)
def test_with_and_without_weights_agree(per_head: bool, kind: str) -> None:
    module = multimax.MultiheadAttention(32, 4, batch_first=True, per_head=per_head)
    nn.init.normal_(module.multimax.coefs, std=0.5)
    assert module.multimax.coefs.shape == ((4, 2, 2) if per_head else (2, 2))
    x = torch.randn(3, 7, 32)
    options = masks(kind, 7, True)
    grads = []
    for need in (True, False):
        module.zero_grad()
        out = module(x, x, x, need_weights=need, **options)[0]
        out.square().sum().backward()
        grads.append([out, *(p.grad for p in module.parameters())])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_rows_without_keys_are_zero() -> None:
    module = multimax.MultiheadAttention(32, 4, batch_first=True, bias=False)
    x = torch.randn(2, 5, 32)
    padding = torch.tensor([[True] * 5, [False] * 5])
    for need in (True, False):
        out = module(x, x, x, key_padding_mask=padding, need_weights=need)[0]
        assert torch.all(out[0] == 0)
        assert torch.all(out[1].abs().amax(-1) > 0)


def test_state_dicts() -> None:
    theirs, ours = pair()
    assert set(ours.state_dict()) == {*theirs.state_dict(), "multimax.coefs", "multimax.knots"}
    assert torch.all(ours.multimax.coefs == 0)  # torch's weights come with torch's softmax
    nn.init.normal_(ours.multimax.coefs)
    again = multimax.MultiheadAttention(32, 4)
    again.load_state_dict(ours.state_dict())
    assert torch.equal(again.multimax.coefs, ours.multimax.coefs)
    with pytest.raises(RuntimeError, match=r"multimax\.knots"):
        again.load_state_dict({k: v for k, v in ours.state_dict().items() if k != "multimax.knots"})
    with pytest.raises(RuntimeError, match="Missing key"):
        again.load_state_dict({})
    outer, plain = nn.ModuleDict({"a": again}), nn.ModuleDict({"a": theirs})
    outer.load_state_dict(plain.state_dict())
    assert torch.all(again.multimax.coefs == 0)
    assert torch.equal(copy.deepcopy(ours).multimax.coefs, ours.multimax.coefs)


def sharp(module: nn.Module) -> nn.Module:
    """The layer with our attention in the place of torch's, of torch's weights and strong parameters."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.MultiheadAttention):
            replacement = multimax.MultiheadAttention(32, 4, batch_first=child.batch_first)
            replacement.load_state_dict(child.state_dict())
            with torch.no_grad():
                replacement.multimax.coefs.copy_(torch.tensor([[-2.0, 1.0], [0.5, 0.3]]))
            setattr(module, name, replacement)
        else:
            sharp(child)
    return module


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")  # torch says that a layer is not eligible: as it should be
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("which", ["encoder layer", "encoder", "decoder layer", "transformer"])
@pytest.mark.parametrize("training", [False, True])
def test_in_torchs_layers(which: str, batch_first: bool, training: bool) -> None:
    common = {"dim_feedforward": 48, "dropout": 0.0, "batch_first": batch_first}
    layers: dict[str, Any] = {
        "encoder layer": lambda: nn.TransformerEncoderLayer(32, 4, **common),
        "encoder": lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 4, **common),
            2,
            enable_nested_tensor=False,  # else torch's own has zeros for what is padded
        ),
        "decoder layer": lambda: nn.TransformerDecoderLayer(32, 4, **common),
        "transformer": lambda: nn.Transformer(32, 4, 2, 2, **common),
    }
    plain = layers[which]()
    module = sharp(copy.deepcopy(plain))
    x = torch.randn(3, 6, 32)
    arguments = (x, x) if "encoder" not in which else (x,)
    padding = torch.zeros((3, 6) if batch_first else (6, 3), dtype=torch.bool)
    padding[1, -1] = True
    options = {"src_key_padding_mask": padding} if "encoder" in which else {}
    calls = []
    hooks = [
        child.register_forward_hook(lambda *_: calls.append(1))
        for child in module.modules()
        if isinstance(child, multimax.MultiheadAttention)
    ]
    plain.train(training)
    module.train(training)
    with torch.set_grad_enabled(training):
        out = module(*arguments, **options)
        assert len(calls) == len(hooks)  # every one was really called
        assert (out - plain(*arguments, **options)).abs().max() > 1e-3  # and its parameters count
        for child in module.modules():
            if isinstance(child, multimax.MultiheadAttention):
                child.multimax.coefs.data.zero_()
        torch.testing.assert_close(module(*arguments, **options), plain(*arguments, **options), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attn_mask": torch.zeros(6, 7)}, "expected attn_mask of shape (7, 7) or (12, 7, 7), got (6, 7)"),
        ({"key_padding_mask": torch.zeros(2, 7)}, "expected key_padding_mask of shape (3, 7), got (2, 7)"),
        ({"is_causal": True}, "expected an attn_mask with is_causal=True"),
        ({"query": torch.zeros(1, 3, 7, 32)}, "expected query, key and value all of 2 or all of 3 dims"),
        ({"key": torch.zeros(7, 32)}, "all of 2 or all of 3 dims, got (7, 3, 32), (7, 32) and (7, 3, 32)"),
        ({"query": torch.zeros(7, 1, 32)}, "of one batch, on dim 1, got (7, 1, 32), (7, 3, 32) and (7, 3, 32)"),
        ({"value": torch.zeros(7, 1, 32)}, "of one batch, on dim 1, got (7, 3, 32), (7, 3, 32) and (7, 1, 32)"),
    ],
    ids=str,
)
def test_bad_input(options: dict[str, Any], words: str) -> None:
    x = torch.zeros(7, 3, 32)
    with pytest.raises(ValueError, match="multimax: ") as caught:
        multimax.MultiheadAttention(32, 4)(**{"query": x, "key": x, "value": x, **options})
    assert words in str(caught.value)


def test_padding_has_a_batch_dim_if_the_query_has() -> None:
    module, padding = multimax.MultiheadAttention(32, 4), torch.zeros(7, dtype=torch.bool)
    single, one = torch.zeros(7, 32), torch.zeros(7, 1, 32)
    assert module(single, single, single, key_padding_mask=padding)[0].shape == (7, 32)
    assert module(one, one, one, key_padding_mask=padding[None])[0].shape == (7, 1, 32)
    with pytest.raises(ValueError, match=r"expected key_padding_mask of shape \(1, 7\), got \(7,\)"):
        module(one, one, one, key_padding_mask=padding)
    with pytest.raises(ValueError, match=r"expected key_padding_mask of shape \(7,\), got \(1, 7\)"):
        module(single, single, single, key_padding_mask=padding[None])


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.filterwarnings("ignore")  # shapes in Python, and torch.jit itself
def test_traces(need_weights: bool, grad: bool) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = multimax.MultiheadAttention(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.attention(x, x, x, need_weights=need_weights)[0]
            return out

    module, x = Wrapped(), torch.randn(7, 3, 32)
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(module, (x,))
    torch.testing.assert_close(traced(x), module(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int32])
@pytest.mark.parametrize("options", [{}, {"need_weights": False, "is_causal": True}], ids=str)
def test_masks_of_integers_are_refused(name: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    x = torch.zeros(7, 3, 32)
    mask = torch.zeros((3, 7) if name == "key_padding_mask" else (7, 7), dtype=dtype)
    causal = torch.ones(7, 7, dtype=torch.bool).triu(1)
    masks = {"attn_mask": causal, name: mask}
    with pytest.raises(TypeError, match=f"expected {name} to be a boolean or floating-point tensor, got {dtype}"):
        multimax.MultiheadAttention(32, 4)(x, x, x, **masks, **options)


def test_masks_of_integers_are_refused_in_a_decoder_layer() -> None:
    layer = sharp(nn.TransformerDecoderLayer(32, 4, 48))
    x = torch.zeros(7, 3, 32)
    with pytest.raises(TypeError, match="expected key_padding_mask to be a boolean or floating-point tensor"):
        layer(x, x, memory_key_padding_mask=torch.zeros(3, 7, dtype=torch.long))
