"""Conversion of torch.nn's modules, and what holds for every library."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import multimax
from multimax.convert.sites import marked


def encoder(**options):
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True, **options)
    torch.manual_seed(0)
    return nn.TransformerEncoder(layer, 2)


def sharp(model):
    """Scores far from zero, so that errors in attention are seen."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "in_proj_weight" in name:
                parameter[: 2 * parameter.shape[1]].mul_(2)
    return model


@torch.no_grad()
def move(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith(("coefs", "knots", "omega")):
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)


X = torch.randn(3, 9, 32, generator=torch.Generator().manual_seed(1))
PADDING = torch.zeros(3, 9, dtype=torch.bool)
PADDING[1, 6:] = True
CAUSAL = nn.Transformer.generate_square_subsequent_mask(9)


# ---- torch.nn ----


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("options", [{}, {"src_key_padding_mask": PADDING}, {"mask": CAUSAL, "is_causal": True}])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # torch's own fast path, in the original
def test_transformer_encoder(training, grad, options):
    original = sharp(encoder()).train(training)
    model = copy.deepcopy(original)
    report = multimax.convert_(model)
    assert [layer.name for layer in report] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert report.parameters == 16
    with torch.set_grad_enabled(grad):
        expected, got = original(X, **options), model(X, **options)
        seen = ~options.get("src_key_padding_mask", torch.zeros(3, 9, dtype=torch.bool))
        assert (got - expected)[seen].abs().max() < 2e-6
        move(model)
        assert (model(X, **options) - expected)[seen].abs().max() > 1e-3  # its fast path is not taken
    if grad:
        original(X, **options)[seen].sum().backward()
        multimax.revert_(model)
        model(X, **options)[seen].sum().backward()
        for (name, p), q in zip(original.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), name


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_transformer(training):
    torch.manual_seed(0)
    original = sharp(nn.Transformer(32, 4, 2, 2, 48, dropout=0.0, batch_first=True)).train(training)
    model = copy.deepcopy(original)
    report = multimax.convert_(model, per_head=True)
    assert len(report) == 6
    assert report.parameters == 6 * 8 * 4
    options = {"tgt_mask": CAUSAL, "tgt_is_causal": True}
    expected, got = original(X, X, **options), model(X, X, **options)
    assert (got - expected).abs().max() < 2e-6
    expected[..., 0].sum().backward()
    got[..., 0].sum().backward()
    total = torch.cat([p.grad.flatten() for p in original.parameters()]).norm()
    for name, parameter in original.named_parameters():
        gradient = model.get_parameter(name).grad
        assert (gradient - parameter.grad).norm() < 1e-5 * max(parameter.grad.norm(), 1e-3 * total), name


@pytest.mark.parametrize(
    "options", [{}, {"kdim": 16, "vdim": 24}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"bias": False}]
)
def test_multihead_attention_alone(options):
    torch.manual_seed(0)
    original = nn.MultiheadAttention(32, 4, batch_first=True, **options)
    model = copy.deepcopy(original)
    multimax.convert_(model)
    key, value = X[..., : options.get("kdim", 32)], X[..., : options.get("vdim", 32)]
    for need_weights in (True, False):
        expected = original(X, key, value, need_weights=need_weights)
        got = model(X, key, value, need_weights=need_weights)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    multimax.revert_(model)
    assert type(model) is nn.MultiheadAttention
    assert model.__dict__.keys() == original.__dict__.keys()
    assert list(model._modules) == list(original._modules)
    assert torch.equal(model(X, key, value)[0], original(X, key, value)[0])


class Attention(nn.Module):
    """As people write it themselves."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.softmax(q @ k.mT / 32**0.5) @ v


def test_softmax_modules():
    torch.manual_seed(0)
    original = nn.Sequential(Attention(), Attention(), nn.Linear(32, 7))
    model = copy.deepcopy(original)
    report = multimax.convert_(model, where=("attention", "output"), output="2")
    assert [layer.name for layer in report] == ["0.softmax", "1.softmax", "2"]
    assert (model(X) - original(X)).abs().max() < 2e-6
    assert isinstance(model[0].softmax, multimax.MultiMax)
    assert model[0].softmax.dim == -1
    assert isinstance(model[2], multimax.MultiMaxHead)
    move(model)
    scores = torch.randn(2, 5)
    function = model[1].softmax
    torch.testing.assert_close(function(scores), multimax.multimax(scores, function.coefs, function.knots))
    model.load_state_dict(original.state_dict())  # as it was before: softmax
    assert (model(X) - original(X)).abs().max() < 2e-6
    multimax.revert_(model)
    assert torch.equal(model(X), original(X))
    assert type(model[0].softmax) is nn.Softmax
    assert type(model[2]) is nn.Linear
    with pytest.raises(RuntimeError, match="Missing key"):  # strict again
        model.load_state_dict({})


def test_softmax_along_another_dim():
    model = nn.Sequential(nn.Linear(6, 4), nn.Softmax(dim=1))
    multimax.convert_(model)
    x = torch.randn(3, 5, 6)
    torch.testing.assert_close(model(x), torch.softmax(model[0](x), 1))


def test_output_layer_by_name():
    model = nn.Sequential(encoder(), nn.Linear(32, 10)).eval()
    expected = model(X)
    report = multimax.convert_(model, where=("output",), output="1", order=1)
    assert [(layer.name, layer.was, layer.parameters) for layer in report] == [("1", "torch.nn.Linear", 4)]
    assert torch.equal(model(X), expected)
    target = torch.randint(10, (3, 9))
    loss = model[1](model[0](X), target)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(expected.flatten(0, 1), target.flatten()))


@pytest.mark.parametrize("reweight", ["softmax", "sparsemax", "entmax15", multimax.reweighting.Entmax(1.3, learn=True)])
def test_other_functions(reweight):
    model = sharp(encoder()).eval()
    expected = model(X)
    report = multimax.convert_(model, reweight=reweight)
    difference = (model(X) - expected).abs().max()
    assert difference < 2e-6 if reweight == "softmax" else difference > 1e-4
    assert report.parameters == (2 if not isinstance(reweight, str) else 0)
    multimax.revert_(model)
    with torch.no_grad():
        assert (model(X) - expected).abs().max() < 2e-6


def test_a_function_for_each_place():
    model = nn.Sequential(sharp(encoder()), nn.Linear(32, 10)).eval()
    only = copy.deepcopy(model)
    multimax.convert_(only, reweight="entmax15")
    places = {"where": ("attention", "output"), "output": "1"}
    report = multimax.convert_(model, reweight={"attention": "entmax15", "output": "multimax"}, order=1, **places)
    assert [(layer.kind, layer.parameters) for layer in report] == [("attention", 0), ("attention", 0), ("output", 4)]
    assert torch.equal(model(X), only(X))  # MultiMax is softmax at first
    with torch.no_grad():
        model[1].multimax.coefs.fill_(0.5)
    assert (model(X) - only(X)).abs().max() > 1e-3
    multimax.revert_(model)
    # the options are MultiMax's, wherever it is; heads are those of attention
    both = {"attention": "multimax", "output": multimax.reweighting.Softmax(2.0)}
    report = multimax.convert_(model, reweight=both, per_head=True, **places)
    assert [layer.parameters for layer in report] == [32, 32, 0]
    multimax.revert_(model)
    report = multimax.convert_(
        model, reweight=dict.fromkeys(("attention", "output"), "multimax"), per_head=True, **places
    )
    assert [layer.parameters for layer in report] == [32, 32, 8]


def test_attnscale():
    for original, heads in ((sharp(encoder()).eval(), 4), (nn.Sequential(Attention(), nn.Softmax(dim=1)), None)):
        model = copy.deepcopy(original)
        multimax.convert_(model, reweight=multimax.reweighting.AttnScaledSoftmax(heads=heads))
        assert (model(X) - original(X)).abs().max() < 2e-6
        model(X).square().sum().backward()
        omegas = {name: p for name, p in model.named_parameters() if name.endswith("omega")}
        assert len(omegas) == 2
        for omega in omegas.values():
            assert omega.shape == (() if heads is None else (heads,))
            assert (omega.grad != 0).all()
        move(model)
        assert (model(X) - original(X)).abs().max() > 1e-3
        again = copy.deepcopy(original)
        multimax.convert_(again, reweight=multimax.reweighting.AttnScaledSoftmax(heads=heads))
        again.load_state_dict(model.state_dict())
        assert torch.equal(again(X), model(X))
        multimax.revert_(model)
        with torch.no_grad():
            assert (model(X) - original(X)).abs().max() < 2e-6


def test_paper_initialisation_and_presets():
    model = encoder()
    multimax.convert_(model, init="paper")
    assert model.layers[0].self_attn.multimax.coefs.abs().max() > 0
    multimax.revert_(model)
    coefs, knots = multimax.from_paper(*multimax.presets["deit_small"][11])
    multimax.convert_(model, init=(coefs, knots))
    assert torch.equal(model.layers[1].self_attn.multimax.coefs, coefs.float())


def test_every_layer_starts_from_the_one_at_its_depth():
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True), 3)
    multimax.convert_(model, init="deit_small", per_head=True)
    learned = multimax.presets["deit_small"]
    for layer, number in zip(model.layers, (0, round(5.5), 11), strict=True):
        expected, _ = multimax.from_paper(*learned[number])
        assert torch.allclose(layer.self_attn.multimax.coefs, expected.expand(2, 2, 2))
    # the stacks of an encoder and a decoder are counted one by one, and a module may be given as well as a name
    model = torch.nn.Transformer(16, 2, 2, 2, 16, batch_first=True)
    multimax.convert_(model, reweight=multimax.MultiMax(1, init="wikitext103_lm"))
    first, last = (multimax.from_paper(*multimax.presets["wikitext103_lm"][n])[0][:1] for n in (0, 5))
    for stack in (model.encoder, model.decoder):
        assert torch.allclose(stack.layers[0].self_attn.multimax.coefs, first)
        assert torch.allclose(stack.layers[1].self_attn.multimax.coefs, last)
    assert torch.allclose(model.decoder.layers[0].multihead_attn.multimax.coefs, first)
    # the paper prints nothing of an output layer, which starts as softmax
    model = torch.nn.Sequential(encoder(), torch.nn.Linear(32, 5))
    multimax.convert_(model, where=("attention", "output"), output="1", init="deit_small")
    assert not model[1].multimax.coefs.any()
    assert model[0].layers[0].self_attn.multimax.coefs.all()


def test_attention_by_its_role():
    def transformer():
        torch.manual_seed(0)
        return torch.nn.Transformer(16, 2, 2, 1, 16, batch_first=True)

    names = {
        "encoder": ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"],
        "decoder": ["decoder.layers.0.self_attn"],
        "cross": ["decoder.layers.0.multihead_attn"],
    }
    for role, expected in names.items():
        assert [layer.name for layer in multimax.convert_(transformer(), where=role)] == expected
    both = multimax.convert_(
        transformer(), where=("decoder", "cross"), reweight={"decoder": "sparsemax", "cross": "multimax"}
    )
    assert ["MultiMax" in layer.now for layer in both] == [False, True]
    with pytest.raises(ValueError, match="expected attention of the kind cross in TransformerEncoder, got none"):
        multimax.convert_(encoder(), where="cross")
    with pytest.raises(ValueError, match="expected where to name all attention or parts of it, got both"):
        multimax.convert_(transformer(), where=("attention", "cross"))


def test_copies_and_pickles():
    model = sharp(encoder()).eval()
    multimax.convert_(model)
    again = copy.deepcopy(model)
    move(again)
    assert (model(X) - again(X)).abs().max() > 1e-3
    thawed = pickle.loads(pickle.dumps(again))
    assert torch.equal(thawed(X), again(X))
    multimax.revert_(thawed)
    assert type(thawed.layers[0].self_attn) is nn.MultiheadAttention


def test_hooks_weights_and_objects_stay():
    model = encoder()
    modules = dict(model.named_modules())
    weights = dict(model.named_parameters())
    seen = []
    model.layers[0].self_attn.register_forward_hook(lambda *_: seen.append(1))
    multimax.convert_(model)
    assert all(model.get_submodule(name) is module for name, module in modules.items())
    assert all(model.get_parameter(name) is weight for name, weight in weights.items())
    model(X)
    assert seen


def test_device_and_dtype():
    model = encoder().double()
    multimax.convert_(model)
    assert model.layers[0].self_attn.multimax.coefs.dtype == torch.float64
    with torch.device("meta"):
        model = encoder()
    multimax.convert_(model)
    assert model.layers[0].self_attn.multimax.coefs.is_meta


def test_inside_a_larger_model():
    inner = encoder()
    multimax.convert_(inner)
    model = nn.ModuleDict({"trunk": inner, "other": nn.Linear(4, 4)})
    assert [layer.name for layer in multimax.revert_(model)] == ["trunk.layers.0.self_attn", "trunk.layers.1.self_attn"]
    inner(X)


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compile(backend):
    model = sharp(encoder()).eval()
    multimax.convert_(model)
    move(model)
    expected = model(X)
    torch._dynamo.reset()
    got = torch.compile(model, fullgraph=True, backend=backend)(X)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_compile_before_any_forward():
    model = sharp(encoder()).eval()
    expected = model(X)
    multimax.convert_(model)
    torch._dynamo.reset()
    got = torch.compile(model, fullgraph=True, backend="aot_eager")(X)
    assert (got - expected).abs().max() < 5e-6


# ---- what is refused ----


def state(model):
    """All that a refused conversion has to leave alone."""
    return {
        "keys": list(model.state_dict()),
        "classes": [type(module) for module in model.modules()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "loading": [len(module._load_state_dict_pre_hooks) for module in model.modules()],
        "attributes": [sorted(module.__dict__) for module in model.modules()],
    }


class OwnAttention(nn.MultiheadAttention):
    pass


def shared():
    attention = Attention()
    return nn.Sequential(attention, nn.Identity(), attention)


REFUSED = {
    "unknown name": (encoder, {"reweight": "softermax"}, ValueError, "reweight to be one of .*'softermax'"),
    "a class": (encoder, {"reweight": nn.Softmax}, TypeError, "expected reweight to be a name or a module"),
    "a foreign module": (
        encoder,
        {"reweight": nn.Softmax(-1)},
        TypeError,
        "expected reweight to be a name or a module",
    ),
    "a function for another place": (encoder, {"reweight": {"output": "multimax"}}, ValueError, "as where says"),
    "options of none of two": (
        encoder,
        {"reweight": {"attention": "entmax15"}, "order": 1},
        ValueError,
        "'multimax' only",
    ),
    "heads of none": (
        encoder,
        {"reweight": {"attention": "entmax15"}, "per_head": True},
        ValueError,
        "expected per_head with 'multimax' in attention, got it with 'entmax15'",
    ),
    "options missing": (encoder, {"reweight": "topk"}, TypeError, "expected the options of TopK"),
    "options of another": (encoder, {"reweight": "entmax15", "order": 1}, ValueError, "'multimax' only"),
    "order": (encoder, {"order": 0}, ValueError, "order to be an int of at least 1, got 0"),
    "init": (encoder, {"init": "zeros"}, ValueError, "init to be one of"),
    "where": (encoder, {"where": ("attention", "ouput")}, ValueError, "where to be one of"),
    "nowhere": (encoder, {"where": ()}, ValueError, "expected where to be some of .*, got none"),
    "where a number": (encoder, {"where": 3}, TypeError, "expected where to be some of"),
    "shared modules": (shared, {}, ValueError, r"got one module as '0.softmax', '2.softmax'"),
    "nothing matches": (
        encoder,
        {"filter_fn": lambda m, n: False},
        ValueError,
        "filter_fn.*'layers.0.self_attn'.*got none",
    ),
    "unknown layer": (encoder, {"layers": ["layers.7"]}, ValueError, "'layers.7'"),
    "layers as a word": (encoder, {"layers": "layers.0"}, TypeError, "several full names"),
    "nothing there": (lambda: nn.Linear(3, 3), {}, ValueError, "expected softmax attention in Linear, got none"),
    "no output named": (encoder, {"where": "output"}, ValueError, 'as output="..."'),
    "unknown output": (encoder, {"where": "output", "output": "head"}, ValueError, "got 'head'"),
    "output not linear": (encoder, {"where": "output", "output": "layers.0"}, ValueError, "exactly nn.Linear"),
    "sparse output": (
        encoder,
        {"where": "output", "output": "layers.1.linear2", "reweight": "sparsemax"},
        ValueError,
        "sparsemax of logits is not the softmax",
    ),
    "subclass": (
        lambda: nn.Sequential(OwnAttention(32, 4)),
        {},
        ValueError,
        "'0': a subclass of nn.MultiheadAttention",
    ),
    "softmax without dim": (lambda: nn.Sequential(nn.Softmax()), {}, ValueError, "'0': nn.Softmax without a dim"),
    "one softmax": (lambda: nn.Softmax(-1), {}, ValueError, "whole model is one softmax"),
    "heads of a softmax": (
        lambda: nn.Sequential(Attention()),
        {"per_head": True},
        ValueError,
        "its number of heads is not known",
    ),
    "heads of another model": (
        encoder,
        {"reweight": multimax.MultiMax(heads=6)},
        ValueError,
        "it has 4 heads, and the parameters are for 6",
    ),
    "init of nothing": (encoder, {"init": None}, TypeError, "expected init to be a name or a pair of tensors"),
    "init of one": (
        encoder,
        {"init": (torch.zeros(2, 2),)},
        TypeError,
        "expected init to be a name or a pair of tensors",
    ),
    "init of lists": (encoder, {"init": ([1.0], [1.0])}, TypeError, "expected init to be a name or a pair of tensors"),
    "filter_fn": (encoder, {"filter_fn": "self_attn"}, TypeError, "function of \\(module, name\\)"),
    "no layers": (encoder, {"layers": []}, ValueError, "at least one layer, got none"),
    "per_head": (encoder, {"per_head": "yes"}, TypeError, "expected per_head to be a bool"),
    "output nowhere": (encoder, {"output": "head"}, ValueError, "with 'output' in where"),
    "probe": (encoder, {"probe": 3}, TypeError, "expected probe to be a tensor or a mapping"),
    "no module": (lambda: "bert", {}, TypeError, "expected model to be an nn.Module, got str"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    build, options, error, message = REFUSED[name]
    model = build()
    before = state(model) if isinstance(model, nn.Module) else None
    with pytest.raises(error, match=message):
        multimax.convert_(model, **options)
    if before:
        assert state(model) == before


def test_twice():
    model = encoder()
    multimax.convert_(model)
    before = state(model)
    with pytest.raises(ValueError, match=r"'layers.0.self_attn', 'layers.1.self_attn' converted; multimax.revert_"):
        multimax.convert_(model)
    assert state(model) == before


def test_wrapped_models():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="not wrapped yet, got DistributedDataParallel"):
            multimax.convert_(DistributedDataParallel(encoder()))
    finally:
        torch.distributed.destroy_process_group()
    with pytest.raises(ValueError, match="OptimizedModule"):
        multimax.convert_(torch.compile(encoder()))


def test_revert_of_what_is_not_converted():
    with pytest.raises(ValueError, match="without converted layers"):
        multimax.revert_(encoder())
    with pytest.raises(TypeError, match=r"nn\.Module"):
        multimax.revert_(3)
    model = encoder()
    multimax.convert_(model)
    with pytest.raises(ValueError, match="got a part of it"):
        multimax.revert_(model.layers[0])


def test_leaving_what_cannot_be_converted():
    model = nn.Sequential(encoder(), OwnAttention(32, 4))
    with pytest.raises(ValueError, match="strict=False"):
        multimax.convert_(model)
    report = multimax.convert_(model, strict=False)
    assert len(report) == 2
    assert [(layer.name, layer.why_left) for layer in report.left] == [
        ("1", "a subclass of nn.MultiheadAttention may compute anything")
    ]
    text = str(report)
    assert "2 layers converted, 16 parameters gained" in text
    assert "1 layer left with softmax" in text
    assert type(model[1]) is OwnAttention


def test_an_error_halfway_leaves_the_model(monkeypatch):
    from multimax.convert.torch_nn import CONVERTER

    attach, calls = CONVERTER.attach, []

    def broken(model, site, function, mark):
        calls.append(site.name)
        if len(calls) == 2:
            raise MemoryError("no more")
        return attach(model, site, function, mark)

    model = encoder()
    before = state(model)
    monkeypatch.setattr(CONVERTER, "attach", broken)
    with pytest.raises(MemoryError):
        multimax.convert_(model)
    assert calls == ["layers.0.self_attn", "layers.1.self_attn"]
    assert state(model) == before


def test_layers_that_are_not_reached():
    model = nn.ModuleList([encoder(), encoder()])
    model.forward = lambda x: model[0](x)
    before = state(model)
    with pytest.raises(RuntimeError, match=r"got none to '1.layers.0.self_attn', '1.layers.1.self_attn'"):
        multimax.convert_(model, probe=X)
    assert state(model) == before
    multimax.convert_(model)
    with pytest.raises(RuntimeError, match="got none to"):
        model(X)
    assert len(list(marked(model))) == 4
    with pytest.raises(RuntimeError, match="got none to"):  # and again
        model(X)
    assert str(multimax.revert_(model)).startswith("4 layers reverted\n")


class CausalSelfAttention(nn.Module):
    """As people write it themselves, without a module that could be another."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]


def test_attention_in_code_of_ones_own():
    model = nn.Sequential(encoder(), CausalSelfAttention())
    with pytest.raises(
        ValueError, match=r"'1': CausalSelfAttention computes softmax in its own code; call multimax\.multi"
    ):
        multimax.convert_(model)
    report = multimax.convert_(model, strict=False)
    assert [layer.name for layer in report.left] == ["1"]
    with pytest.raises(ValueError, match="'': CausalSelfAttention computes"):
        multimax.convert_(CausalSelfAttention())


def test_another_output_layer_afterwards_is_an_error():
    model = nn.Sequential(encoder(), nn.Linear(32, 10))
    multimax.convert_(model, where="output", output="1")
    model[1] = nn.Linear(32, 5)
    with pytest.raises(RuntimeError, match="expected '1' to be converted, got Linear in its place"):
        model(X)


def test_a_library_that_is_not_in_the_model(monkeypatch):
    """Another package may have imported a version that could not be converted."""
    import sys
    import types

    for name in ("transformers", "timm"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.delitem(sys.modules, "multimax.convert.transformers.library", raising=False)
    model = encoder()
    multimax.convert_(model)
    multimax.revert_(model)
