"""The function of a converted layer, wrapped by something else: MultiMax as before, or an error, never softmax."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import multimax
import wrapping
from architectures import ARCHITECTURES
from multimax import reweighting
from multimax.convert.sites import NAMES, marked
from places import ROOT
from wrapping import move

BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
FUNCTIONS = ["multimax", "entmax15", pytest.param(reweighting.Softmax(2.0, learn=True), id="temperature")]
# torch.compile looks at everything that the tensors it is given have
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(params=list(wrapping.WRAPPERS))
def wrapper(request):
    """Every wrapper, with what it needs around it."""
    if request.param != "FSDP2":
        yield wrapping.WRAPPERS[request.param]
        return
    if not torch.distributed.is_gloo_available():
        pytest.skip("torch without gloo")
    if "temperature" in request.node.name:
        pytest.skip("FSDP2 takes no parameters without dims")
    if "entmax15" in request.node.name:
        pytest.skip("FSDP2 has nothing to shard")
    with wrapping.one_process():
        yield wrapping.WRAPPERS[request.param]


def compare(model, run, wrapper):
    """Values and gradients before and after the function of every converted layer was wrapped."""
    move(model)
    wrapped = copy.deepcopy(model)
    assert wrapping.wrap(wrapped, wrapper) == len(marked(model))
    expected, got = run(model), run(wrapped)
    wrapping.same(got, expected)
    expected.square().sum().backward()
    got.square().sum().backward()
    gradients = wrapping.trained(model)
    assert len(gradients) == sum(p.requires_grad for _, p in multimax.reweighting_parameters(model))
    assert all(gradient.abs().max() > 0 for gradient in gradients if gradient.ndim > 1)
    found = wrapping.trained(wrapped)
    assert len(found) == len(gradients)
    for gradient, other in zip(gradients, found, strict=True):
        wrapping.same(other, gradient)


# ---- transformers ----


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("simple", wrapping.SIMPLE)
def test_every_architecture(name, simple):
    architecture = BY_NAME[name]
    model = architecture.build()
    multimax.convert_(model, where=("attention", "output") if architecture.output else ("attention",))
    inputs = architecture.inputs()

    def run(model):
        output = model(**inputs)
        return output["logits"] if "logits" in output else output["pooler_output"]

    compare(model, run, wrapping.SIMPLE[simple])


@pytest.mark.parametrize("reweight", FUNCTIONS)
def test_every_wrapper_in_transformers(wrapper, reweight):
    architecture = BY_NAME["Llama"]
    model = architecture.build()
    where = ("attention",) if reweight == "entmax15" else ("attention", "output")
    multimax.convert_(model, where=where, reweight=reweight)
    compare(model, lambda model: model(**architecture.inputs())["logits"], wrapper)


def test_attention_weights(wrapper):
    architecture = BY_NAME["BERT"]
    model = architecture.build()
    multimax.convert_(model)
    compare(model, lambda model: model(**architecture.inputs(), output_attentions=True)["attentions"][1], wrapper)


def logits_or_pooled(model, inputs):
    output = model(**inputs)
    return output["logits"] if "logits" in output else output["pooler_output"]


@pytest.mark.parametrize("name", BY_NAME)
def test_layers_wrapped_as_a_whole(name):
    architecture = BY_NAME[name]
    model = architecture.build()
    multimax.convert_(model, where=("attention", "output") if architecture.output else ("attention",))
    move(model)
    wrapped = copy.deepcopy(model)
    layers = [layer.name for layer in marked(wrapped)]
    for layer in layers:
        parent, _, child = layer.rpartition(".")
        inner = wrapped.get_submodule(layer)
        wrapper = wrapping.AroundLinear if isinstance(inner, nn.Linear) else wrapping.Passes
        wrapped.get_submodule(parent)._modules[child] = wrapper(inner)
    expected, got = (logits_or_pooled(either, architecture.inputs()) for either in (model, wrapped))
    wrapping.same(got, expected)
    for out in (expected, got):
        out.square().sum().backward()
    gradients, found = wrapping.trained(model), wrapping.trained(wrapped)
    assert len(gradients) == 2 * len(layers)
    for gradient, other in zip(gradients, found, strict=True):
        wrapping.same(other, gradient)


class FromTheWeight(wrapping.Passes):
    """A wrapper of a linear layer that does not call it, as low-rank adapters may be written."""

    def forward(self, x):
        return nn.functional.linear(x, self.inner.weight, self.inner.bias)


@pytest.mark.parametrize("ran", [False, True])
def test_an_output_layer_that_is_not_called_raises(ran):
    model, inputs = BY_NAME["Llama"].build(), BY_NAME["Llama"].inputs()
    multimax.convert_(model, where="output")
    if ran:
        model(**inputs)
    head = model.lm_head
    model.lm_head = wrapping.Passes(head)
    for _ in range(2):
        model(**inputs)
    model.lm_head = FromTheWeight(head)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"FromTheWeight in the place of 'lm_head' to call|to reach every converted"
        ):
            model(**inputs)
    model.lm_head = head
    multimax.revert_(model)
    model(**inputs)
    assert not head._forward_hooks


def test_a_file_that_knows_functions_by_other_names_does_not_make_them_softmax():
    for model, inputs in ((BY_NAME["Llama"].build(), BY_NAME["Llama"].inputs()), (Classifier(), None)):
        options = {"output": "head"} if inputs is None else {}
        multimax.convert_(model, where=("attention", "output"), **options)
        move(model)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        wrapping.wrap(model, lambda module: torch.compile(module, backend="eager"))
        before = [p.detach().clone() for _, p in multimax.reweighting_parameters(model)]
        found = model.load_state_dict(state, strict=False)
        assert len(found.missing_keys) == len(found.unexpected_keys) > 3
        for parameter, value in zip(multimax.reweighting_parameters(model), before, strict=True):
            assert torch.equal(parameter[1], value)


class Chooses(nn.Module):
    """A wrapper that holds two functions and uses the second."""

    def __init__(self, module):
        super().__init__()
        self.other, self.module = reweighting.Softmax(), module

    def forward(self, *args):
        return self.module(*args)


def test_the_function_that_is_called_counts():
    model, inputs = BY_NAME["BERT"].build(), BY_NAME["BERT"].inputs()
    multimax.convert_(model, reweight="entmax15")
    expected = model(**inputs)["logits"]
    wrapping.wrap(model, Chooses)
    assert torch.equal(model(**inputs)["logits"], expected)


@pytest.mark.parametrize("name", ["BERT", "Llama", "GPT2", "ViT", "T5"])
def test_traces(name, tmp_path):
    model = BY_NAME[name].build()
    multimax.convert_(model, where=("attention", "output"))
    move(model)
    inputs = BY_NAME[name].inputs()
    main = inputs.get("pixel_values", inputs.get("input_ids"))

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            more = {"decoder_input_ids": x} if name == "T5" else {}
            return self.model(x, **more, return_dict=True)["logits"]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(Logits(), (main,))
        torch.jit.save(traced, tmp_path / "model.pt")
        loaded = torch.jit.load(tmp_path / "model.pt")
    torch.testing.assert_close(loaded(main), Logits()(main), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_function_that_was_removed_or_replaced_raises(name):
    architecture = BY_NAME[name]
    model = architecture.build()
    multimax.convert_(model)
    for _, module, _ in marked(model):
        module.multimax = nn.Identity()
    with pytest.raises(RuntimeError, match="got Identity without any"):
        model(**architecture.inputs())
    for _, module, _ in marked(model):
        del module.multimax
    with pytest.raises(RuntimeError, match="expected 'multimax' or 'reweight' in a converted"):
        model(**architecture.inputs())
    multimax.revert_(model)
    model(**architecture.inputs())


# ---- torch.nn ----


class Classifier(nn.Module):
    """Attention of torch.nn, a softmax module and an output layer."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.pool = nn.Linear(32, 1)
        self.softmax = nn.Softmax(1)
        self.head = nn.Linear(32, 7)

    def forward(self, x):
        x = self.encoder(x, mask=3 * torch.tril(torch.randn(9, 9, generator=torch.Generator().manual_seed(2))))
        return self.head((self.softmax(self.pool(x)) * x).sum(1))


def classifier(reweight="multimax"):
    torch.manual_seed(0)
    model = Classifier()
    with torch.no_grad():
        for layer in model.encoder.layers:
            layer.self_attn.in_proj_weight *= 4
    output = {"output": "head"} if reweight != "entmax15" else {}
    multimax.convert_(model, where=("attention", "output") if output else ("attention",), reweight=reweight, **output)
    return model


@pytest.mark.parametrize("reweight", FUNCTIONS)
def test_torch_nn(wrapper, reweight):
    model = classifier(reweight)
    # where softmax was a module, the function is the module itself: it is called, whatever wraps it
    x = torch.randn(3, 9, 32)
    move(model)
    expected = model(x)
    expected.square().sum().backward()
    wrapped = classifier(reweight)
    move(wrapped)
    assert wrapping.wrap(wrapped, wrapper) == (3 if reweight != "entmax15" else 2)
    wrapped.softmax = wrapper(wrapped.softmax)
    got = wrapped(x)
    got.square().sum().backward()
    wrapping.same(got, expected)
    gradients = wrapping.trained(model)
    assert len(gradients) == {"multimax": 8, "entmax15": 0}.get(reweight, 4)
    for gradient, other in zip(gradients, wrapping.trained(wrapped), strict=True):
        wrapping.same(other, gradient)


@pytest.mark.parametrize("make", [multimax.MultiMaxCrossEntropyLoss, None])
def test_losses(wrapper, make):
    torch.manual_seed(0)
    criterion = multimax.LinearMultiMaxCrossEntropyLoss(8, 5) if make is None else make()
    move(criterion)
    x, target = torch.randn(6, 8 if make is None else 5), torch.randint(5, (6,))
    wrapped = copy.deepcopy(criterion)
    wrapped.multimax = wrapper(wrapped.multimax)
    losses = [module(x, target) for module in (criterion, wrapped)]
    wrapping.same(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    for gradient, other in zip(wrapping.trained(criterion), wrapping.trained(wrapped), strict=True):
        wrapping.same(other, gradient)


def test_attn_scale(wrapper):
    torch.manual_seed(0)
    layer = multimax.MultiheadAttention(16, 2, attn_scale=True)
    move(layer)
    wrapped = copy.deepcopy(layer)
    wrapped.attn_scale = wrapper(wrapped.attn_scale)
    x = torch.randn(5, 2, 16)
    expected, got = (module(x, x, x)[0] for module in (layer, wrapped))
    wrapping.same(got, expected)
    for out in (expected, got):
        out.square().sum().backward()
    for gradient, other in zip(wrapping.trained(layer), wrapping.trained(wrapped), strict=True):
        wrapping.same(other, gradient)


# ---- whatever is there ----


@pytest.mark.parametrize("kind", [wrapping.Changes, wrapping.Doubles])
@pytest.mark.parametrize("where", ["attention", "output", "torch"])
def test_a_wrapper_that_changes_something_raises(kind, where):
    if where == "torch":
        model, inputs = classifier(), {"x": torch.randn(3, 9, 32)}
    else:
        model, inputs = BY_NAME["Llama"].build(), BY_NAME["Llama"].inputs()
        multimax.convert_(model, where=where)
    wrapping.wrap(model, kind)
    with pytest.raises(RuntimeError, match=f"expected {kind.__name__} around MultiMax to pass on its arguments"):
        model(**inputs)


def test_a_module_of_the_users_is_called_as_it_is():
    torch.manual_seed(0)
    layer = multimax.MultiheadAttention(16, 2, reweight=wrapping.Changes(multimax.MultiMax(init="identity")))
    plain = multimax.MultiheadAttention(16, 2, reweight=reweighting.Softmax(0.5))
    plain.load_state_dict({name: value for name, value in layer.state_dict().items() if "reweight" not in name})
    x = torch.randn(5, 2, 16)
    torch.testing.assert_close(layer(x, x, x)[0], plain(x, x, x)[0])


def test_no_line_of_conversion_falls_back_to_softmax():
    for path in Path(ROOT, "src", "multimax", "convert").rglob("*.py"):
        assert 'or "softmax"' not in path.read_text(), path


@pytest.mark.parametrize("name", NAMES)
def test_forward_hooks_see_the_options_in_use(name):
    """A hook on the function's module, as accelerate's, takes part in the call."""
    model = BY_NAME["BERT"].build()
    multimax.convert_(model, reweight="multimax" if name == "multimax" else "entmax15")
    seen = []
    layer = marked(model)[0].module
    layer._modules[name].register_forward_pre_hook(lambda module, args: seen.append(args))
    model(**BY_NAME["BERT"].inputs())
    assert seen == [(None,)]
