"""torch's fast path for evaluation, which reads weights and computes softmax: layers with our attention are never on
it, though they say truly how their weights are kept. Nested tensors, which come with it."""

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import multimax
from multimax.nn.fast_path import HOOK

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # it is a prototype
PADDING = torch.arange(6) >= torch.tensor([6, 2, 4])[:, None]
X = torch.randn(3, 6, 32, generator=torch.Generator().manual_seed(1))


def encoder_layer(dtype: torch.dtype = torch.float32, **options: Any) -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    options = {"dropout": 0.0, "batch_first": True, **options}
    layer = nn.TransformerEncoderLayer(32, 4, 48, dtype=dtype, **options)
    with torch.no_grad():
        layer.self_attn.in_proj_weight[:64] *= 3
    return layer


def with_ours(layer: nn.TransformerEncoderLayer) -> nn.TransformerEncoderLayer:
    layer = copy.deepcopy(layer)
    ours = multimax.MultiheadAttention(32, 4, batch_first=True, dtype=layer.norm1.weight.dtype)
    ours.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = ours
    return layer


def converted(layer: nn.TransformerEncoderLayer) -> nn.TransformerEncoderLayer:
    layer = copy.deepcopy(layer)
    multimax.convert_(layer)
    return layer


def encoder(layer: nn.TransformerEncoderLayer) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(layer, 2)  # with nested tensors, as by default


def before(layer: nn.TransformerEncoderLayer) -> nn.TransformerEncoder:
    model = encoder(layer)
    multimax.convert_(model)
    return model


def one_of_two(layer: nn.TransformerEncoderLayer) -> nn.TransformerEncoder:
    model = encoder(layer)
    multimax.convert_(model.layers[1])
    return model


def put_in(layer: nn.TransformerEncoderLayer) -> nn.TransformerEncoder:
    """Into an encoder that has decided on nested tensors already."""
    model = encoder(layer)
    for i, part in enumerate(model.layers):
        model.layers[i] = with_ours(part)
    return model


MODELS: dict[str, Callable[[nn.TransformerEncoderLayer], nn.Module]] = {
    "a layer with ours": with_ours,
    "a converted layer": converted,
    "an encoder of layers with ours": lambda layer: encoder(with_ours(layer)),
    "an encoder of converted layers": lambda layer: encoder(converted(layer)),
    "a converted encoder": before,
    "an encoder with one converted layer": one_of_two,
    "an encoder with ours put in": put_in,
}
MASKS: dict[str, dict[str, Tensor]] = {
    "no mask": {},
    "padding": {"src_key_padding_mask": PADDING},
    "padding in numbers": {"src_key_padding_mask": torch.zeros(3, 6).masked_fill(PADDING, -torch.inf)},
    "padding on the left": {"src_key_padding_mask": PADDING.flip(1)},
    "a mask": {"mask": nn.Transformer.generate_square_subsequent_mask(6)},
}


def move(model: nn.Module) -> None:
    for _, parameter in multimax.reweighting_parameters(model):
        parameter.data += torch.linspace(-0.9, 0.6, parameter.numel()).reshape(parameter.shape)


@contextmanager
def slow_path() -> Iterator[None]:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def run(model: nn.Module, x: Tensor, options: dict[str, Tensor]) -> Tensor:
    if isinstance(model, nn.TransformerEncoderLayer):
        options = {"src_mask" if name == "mask" else name: t for name, t in options.items()}
    out: Tensor = model(x, **options)
    return out


def seen(options: dict[str, Tensor]) -> Tensor:
    mask = options.get("src_key_padding_mask")
    return torch.ones(3, 6, dtype=torch.bool) if mask is None else mask == 0


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("grad", [False, True])
def test_it_is_never_softmax(kind: str, masks: str, grad: bool) -> None:
    plain = encoder_layer()
    model, options = MODELS[kind](plain).eval(), MASKS[masks]
    whole = (encoder(plain) if isinstance(model, nn.TransformerEncoder) else plain).eval()
    places = seen(options)
    with torch.set_grad_enabled(grad):
        softmax = run(whole, X, options)
        torch.testing.assert_close(run(model, X, options)[places], softmax[places], rtol=1e-4, atol=1e-5)
        move(model)
        with slow_path():
            expected = run(model, X, options)
        found = run(model, X, options)  # before there are hooks of this test, which would keep it off
        calls: list[bool] = []
        for module in model.modules():
            if isinstance(module, multimax.MultiheadAttention):
                function = module.multimax
                function.register_forward_pre_hook(lambda *_: calls.append(True))
        run(model, X, options)
    assert len(calls) == sum(isinstance(module, multimax.MultiheadAttention) for module in model.modules())
    torch.testing.assert_close(found[places], expected[places], rtol=1e-4, atol=1e-5)
    assert (found - softmax)[places].abs().max() > 1e-2


@pytest.mark.parametrize("kind", MODELS)
def test_without_any_other_hook(kind: str) -> None:
    """The same where nothing but our own hook could keep it off the path."""
    plain = encoder_layer()
    model = MODELS[kind](plain).eval()
    for module in model.modules():  # conversion's, such as those that look whether all is reached
        module._forward_pre_hooks.clear()
        for key in set(module._forward_hooks) - {HOOK}:
            del module._forward_hooks[key]
    move(model)
    with torch.no_grad():
        found = run(model, X, MASKS["padding"])
        with slow_path():
            expected = run(model, X, MASKS["padding"])
    torch.testing.assert_close(found[~PADDING], expected[~PADDING], rtol=1e-4, atol=1e-5)


def test_how_weights_are_kept_is_said_truly() -> None:
    """As code that reads it takes for granted, torch's own initialisation among it."""
    for options in ({}, {"kdim": 16}, {"vdim": 16}, {"kdim": 32, "vdim": 32}):
        theirs, ours = nn.MultiheadAttention(32, 4, **options), multimax.MultiheadAttention(32, 4, **options)
        model = copy.deepcopy(theirs)
        multimax.convert_(model)
        for module in (ours, model, pickle.loads(pickle.dumps(ours)), copy.deepcopy(model)):
            assert module._qkv_same_embed_dim == theirs._qkv_same_embed_dim
            assert module._qkv_same_embed_dim == (module.in_proj_weight is not None)
        multimax.revert_(model)
        assert model._qkv_same_embed_dim == theirs._qkv_same_embed_dim
        for module in (theirs, ours):
            torch.manual_seed(0)
            module._reset_parameters()
        for name, parameter in theirs.named_parameters():
            assert name == "out_proj.weight" or torch.equal(ours.get_parameter(name), parameter), name


def test_a_hook_that_was_removed_is_an_error_not_softmax() -> None:
    for kind in ("a layer with ours", "a converted layer", "an encoder of layers with ours"):
        model = MODELS[kind](encoder_layer()).eval()
        for module in model.modules():
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
        for options in ({}, MASKS["padding"]):
            with torch.no_grad(), pytest.raises(RuntimeError, match="got torch's fast path, which computes softmax"):
                run(model, X, options)
        with torch.no_grad(), slow_path():  # the remedies
            expected = run(model, X, {})
        with torch.no_grad():
            torch.testing.assert_close(run(copy.deepcopy(model), X, {}), expected)


def test_copies_and_pickles_stay_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("a layer with ours", "a converted layer"):
        model = MODELS[kind](encoder_layer()).eval()
        move(model)
        with torch.no_grad():
            expected = run(model, X, {})
        monkeypatch.setattr(RemovableHandle, "next_id", 0)  # as in a new process
        for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            handles = [again.self_attn.register_forward_hook(lambda *_: None) for _ in range(3)]
            for handle in handles:
                handle.remove()
            with torch.no_grad():
                assert torch.equal(run(again, X, {}), expected)


def test_a_reverted_layer_may_take_it_again() -> None:
    plain = encoder_layer().eval()
    layer = converted(plain)
    multimax.revert_(layer)
    assert not layer.self_attn._forward_hooks
    with torch.no_grad():
        fast = layer(X)
        assert torch.equal(fast, plain(X))
        with slow_path():
            assert not torch.equal(fast, layer(X))  # it rounds differently


def test_hooks_of_the_user_stay() -> None:
    calls: list[int] = []
    layer = encoder_layer().eval()
    layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    multimax.convert_(layer)
    layer(X)
    multimax.revert_(layer)
    layer(X)
    assert calls == [1, 1]


def test_compiled() -> None:
    model = encoder(with_ours(encoder_layer())).eval()
    move(model)
    options = MASKS["padding"]
    with torch.no_grad():
        expected = run(model, X, options)
        torch._dynamo.reset()
        found = torch.compile(model, fullgraph=True, backend="aot_eager")(X, **options)
    torch.testing.assert_close(found[~PADDING], expected[~PADDING], rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


# ---- nested tensors ----


def test_padding_comes_back_as_zeros() -> None:
    """As from torch's own encoder."""
    for kind in ("an encoder of layers with ours", "an encoder with ours put in"):
        model = MODELS[kind](encoder_layer()).eval()
        with torch.no_grad():
            found = run(model, X, MASKS["padding"])
        assert torch.equal((found == 0).all(-1), PADDING)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("need_weights", [False, True])
def test_nested(dtype: torch.dtype, need_weights: bool) -> None:
    module = multimax.MultiheadAttention(32, 4, batch_first=True, dtype=dtype)
    move(module)
    sequences = [torch.randn(length, 32, dtype=dtype) for length in (5, 1, 7)]
    x = torch.nested.as_nested_tensor(sequences)
    out, weights = module(x, x, x, need_weights=need_weights)
    assert out.is_nested
    for i, (part, sequence) in enumerate(zip(out.unbind(), sequences, strict=True)):
        alone, its_weights = module(*[sequence[None]] * 3, need_weights=need_weights)
        close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(part, alone[0], **close)
        if need_weights:
            size = len(sequence)
            torch.testing.assert_close(weights[i, :size, :size], its_weights[0], **close)
            assert torch.all(weights[i, :size, size:] == 0)
        else:
            assert weights is None


def test_nested_gradients() -> None:
    """Only the functions are trained, in evaluation: then torch makes nested tensors although there are gradients."""
    model = encoder(with_ours(encoder_layer(torch.float64))).eval()
    multimax.train_only_reweighting_(model)
    x = X.double().requires_grad_()
    move(model)
    grads = []
    for enabled in (True, False):
        torch.backends.mha.set_fastpath_enabled(enabled)
        for leaf in (x.detach(), x):
            out = model(leaf, src_key_padding_mask=PADDING)
            wanted = [*([leaf] if leaf.requires_grad else []), *(p for _, p in multimax.reweighting_parameters(model))]
            grads.append(torch.autograd.grad(out[~PADDING].square().sum(), wanted))
    torch.backends.mha.set_fastpath_enabled(True)
    for fast, slow in ((grads[0], grads[2]), (grads[1], grads[3])):
        for a, b in zip(fast, slow, strict=True):
            torch.testing.assert_close(a, b)


def test_a_sequence_of_nothing() -> None:
    model = encoder(with_ours(encoder_layer())).eval()
    padding = PADDING.clone()
    padding[1] = True
    with torch.no_grad():
        found = model(X, src_key_padding_mask=padding)
        expected = model(X[[0, 2]], src_key_padding_mask=padding[[0, 2]])
    assert torch.all(found[1] == 0)
    torch.testing.assert_close(found[[0, 2]], expected)


def test_nested_tensors_that_are_refused() -> None:
    sequences = [torch.randn(5, 32), torch.randn(3, 32)]
    x, other = (torch.nested.as_nested_tensor(sequences) for _ in range(2))
    jagged = torch.nested.as_nested_tensor(sequences, layout=torch.jagged)
    module, last = multimax.MultiheadAttention(32, 4, batch_first=True), multimax.MultiheadAttention(32, 4)
    mask = torch.zeros(5, 5, dtype=torch.bool)
    calls: list[Callable[[], object]] = [
        lambda: module(x, other, other),
        lambda: module(X, x, x),
        lambda: module(jagged, jagged, jagged),
        lambda: last(x, x, x),
        lambda: module(x, x, x, attn_mask=mask),
        lambda: module(x, x, x, key_padding_mask=PADDING[:2, :5]),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="multimax: expected a nested tensor as query, key and value at once"):
            call()
