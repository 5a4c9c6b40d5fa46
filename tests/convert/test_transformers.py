"""Conversion of transformers' models, on every architecture of architectures.py."""

import copy
import dataclasses
import json
import math
import re
import subprocess
import sys
from collections import Counter

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, BertConfig, BertModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

import multimax
from architectures import ARCHITECTURES, OUTSIDE, ROTARY, SEQ2SEQ, SIZES, VISION, VOCABULARY, causal, translation
from multimax.convert.sites import function_module, mark_of, marked
from multimax.convert.transformers.configuration import REFUSED
from multimax.ops import kernels

BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
GENERATING = [architecture.name for architecture in ARCHITECTURES if architecture.generates]
PADDING = [architecture.name for architecture in ARCHITECTURES if architecture.pads]


@pytest.fixture(params=list(BY_NAME))
def architecture(request):
    return BY_NAME[request.param]


def both(architecture, **options):
    """The model as it was, and converted."""
    original = architecture.build()
    model = copy.deepcopy(original)
    report = multimax.convert_(model, **options)
    return original, model, report


def main_output(output):
    return output["logits"] if "logits" in output else output["pooler_output"]


def loss_of(output):
    return output["loss"] if output.get("loss") is not None else main_output(output)[..., 0].mean()


@torch.no_grad()
def move(model, seed=0, scale=0.1):
    """Parameters away from the identity, different in every layer."""
    generator = torch.Generator().manual_seed(seed)
    for _, module, _ in marked(model):
        for parameter in function_module(module).parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)


class Calls(TorchFunctionMode):
    """Counts what is called."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen[function] += 1
        return function(*args, **kwargs or {})

    @property
    def softmax(self):
        names = (nn.functional.softmax, torch.softmax, torch.Tensor.softmax, nn.functional.log_softmax)
        return sum(self.seen[name] for name in names)

    @property
    def sdpa(self):
        return self.seen[nn.functional.scaled_dot_product_attention]


class Operations(TorchDispatchMode):
    """Counts operations."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen[function.name()] += 1
        return function(*args, **kwargs or {})


# ---- what it computes ----


def test_identity(architecture):
    original, model, report = both(architecture)
    assert len(report) == architecture.layers
    assert report.parameters == 8 * architecture.layers
    inputs = architecture.inputs()
    expected = original(**inputs)
    with Calls() as calls, Operations() as operations:
        got = model(**inputs)
    assert calls.sdpa == 0
    assert calls.softmax == architecture.elsewhere
    fused = 0 if "in blocks" in architecture.attention else architecture.layers
    assert operations.seen["multimax::attention_forward"] == (0 if kernels.unavailable else fused)
    assert all(mark.reached for _, _, mark in marked(model))
    assert (main_output(got) - main_output(expected)).abs().max() < 2e-6
    torch.testing.assert_close(loss_of(got), loss_of(expected), rtol=0, atol=2e-6)
    loss_of(expected).backward()
    loss_of(got).backward()
    before = {name: p.grad for name, p in original.named_parameters() if p.grad is not None}
    total = torch.cat([g.flatten() for g in before.values()]).norm()
    after = dict(model.named_parameters())
    for name, gradient in before.items():
        # keys' biases have no gradient but rounding: hence the floor
        error = (after[name].grad - gradient).norm() / max(gradient.norm(), 1e-3 * total)
        assert error < 1e-5, name
    for name, module, _ in marked(model):
        assert function_module(module).coefs.grad.abs().max() > 0, name


def test_training_mode_with_dropout(architecture):
    _, model, _ = both(architecture)
    model.train()
    inputs = architecture.inputs()
    torch.manual_seed(3)
    first = loss_of(model(**inputs))
    first.backward()
    torch.manual_seed(3)
    torch.testing.assert_close(loss_of(model(**inputs)), first, rtol=0, atol=0)


def oracle(module, query, key, value, attention_mask, scaling=None, dropout=0.0, position_bias=None, **kwargs):
    """Attention as its formula says, in float64, with the whole matrix; parameters from the module's `oracle`."""
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1).double() for t in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query.double() @ key.mT * scale
    if type(module).__name__ == "SwinAttention":
        bias = module.relative_position_bias().double()
        attention_mask, position_bias = attention_mask.double() - bias, bias
    if position_bias is not None:
        scores = scores + position_bias
    if kwargs.get("softcap") is not None:
        scores = kwargs["softcap"] * (scores / kwargs["softcap"]).tanh()
    b, d = module.oracle[1].unbind(-1)
    first, second = module.oracle[0].unbind(-1)
    sigma = scores
    for n in range(2):
        sigma = sigma + first[n] * (b[n] - scores).clamp(min=0) ** (n + 1)
        sigma = sigma + second[n] * (scores - d[n]).clamp(min=0) ** (n + 1)
    if attention_mask is not None:
        sigma = torch.where(attention_mask < -1e30, -math.inf, sigma + attention_mask.double())
    if kwargs.get("s_aux") is not None:
        sink = kwargs["s_aux"].double().reshape(1, -1, 1, 1).expand(*sigma.shape[:3], 1)
        weights = torch.cat([sigma, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = sigma.softmax(-1)
    return (weights @ value).transpose(1, 2).to(query.dtype), weights


AttentionInterface.register("oracle", oracle)
AttentionMaskInterface.register("oracle", eager_mask)


def test_moved_parameters_equal_the_formula(architecture):
    original, model, _ = both(architecture)
    move(model)
    for name, module, _ in marked(model):
        function = function_module(module)
        original.get_submodule(name).oracle = (function.coefs.detach().double(), function.knots.detach().double())
    inputs = architecture.inputs()
    plain = main_output(original(**inputs))
    original.set_attn_implementation("oracle")
    expected = original(**inputs)
    got = model(**inputs)
    torch.testing.assert_close(main_output(got), main_output(expected), rtol=2e-5, atol=5e-6)
    assert (main_output(got) - plain).abs().max() > 1e-3
    loss_of(expected).backward()
    loss_of(got).backward()
    for name, parameter in original.named_parameters():
        if parameter.grad is not None:
            scale = parameter.grad.abs().max().item()
            torch.testing.assert_close(
                model.get_parameter(name).grad, parameter.grad, rtol=1e-3, atol=1e-4 * scale + 1e-7
            )


@pytest.mark.parametrize("name", PADDING)
def test_padded_batches(name):
    architecture = BY_NAME[name]
    original, model, _ = both(architecture)
    inputs = architecture.inputs()
    mask = torch.ones_like(inputs["input_ids"])
    if architecture.generates and not original.config.is_encoder_decoder:
        mask[0, :4] = 0  # from the left, as for generation
        inputs["labels"][0, 4] = -100  # its logits are those of padding
    else:
        mask[0, -4:] = 0
    inputs["attention_mask"] = mask
    if inputs["labels"].shape == mask.shape:
        inputs["labels"] = inputs["labels"].masked_fill(mask == 0, -100)
    expected, got = original(**inputs), model(**inputs)
    difference = (got.logits - expected.logits).abs().amax(-1)
    if difference.shape == mask.shape:
        difference = difference[mask.bool()]  # what is padding counts nowhere
    assert difference.max() < 2e-6
    torch.testing.assert_close(got.loss, expected.loss, rtol=0, atol=2e-6)
    # it did count
    assert (got.logits - model(**{**inputs, "attention_mask": torch.ones_like(mask)}).logits).abs().max() > 1e-4


@pytest.mark.parametrize("name", [architecture.name for architecture in ARCHITECTURES if architecture.packs])
def test_packed_sequences(name):
    architecture = BY_NAME[name]
    original, model, _ = both(architecture)
    move(model)
    ids = torch.randint(3, VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    alone = [model(input_ids=part, use_cache=False).logits for part in ids.split([5, 7], 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=0, atol=2e-6)
    assert original(input_ids=ids, position_ids=positions, use_cache=False).logits.shape == packed.shape


@pytest.mark.parametrize("name", GENERATING)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_cache": False},
        {"num_beams": 3},
        {"num_beams": 3, "use_cache": False},
        {"cache_implementation": "static"},
    ],
    ids=["greedy", "greedy, no cache", "beams", "beams, no cache", "static cache"],
)
def test_generate(name, options):
    architecture = BY_NAME[name]
    original, model, _ = both(architecture)
    inputs = {key: value for key, value in architecture.inputs().items() if key != "labels"}
    if architecture.pads:
        mask = torch.ones_like(inputs["input_ids"])
        mask[0, :3] = 0
        inputs["attention_mask"] = mask
    common = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "disable_compile": True, **options}
    expected = original.generate(**inputs, **common)
    with Calls() as calls:
        got = model.generate(**inputs, **common)
    assert calls.sdpa == 0
    assert torch.equal(got, expected)


@pytest.mark.parametrize("name", GENERATING)
def test_generate_with_a_cache_equals_without(name):
    architecture = BY_NAME[name]
    _, model, _ = both(architecture)
    move(model)
    inputs = {key: value for key, value in architecture.inputs().items() if key != "labels"}
    common = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "disable_compile": True}
    common |= {"return_dict_in_generate": True, "output_scores": True}
    expected = model.generate(**inputs, **common, use_cache=False)
    for cache in ({}, {"cache_implementation": "static"}):
        got = model.generate(**inputs, **common, **cache)
        torch.testing.assert_close(torch.stack(got.scores), torch.stack(expected.scores), rtol=1e-5, atol=5e-6)


def test_weights_when_asked_for(architecture):
    original, model, _ = both(architecture)
    original.set_attn_implementation("eager")
    inputs = architecture.inputs()
    expected = original(**inputs, output_attentions=True)
    got = model(**inputs, output_attentions=True)
    names = [name for name in expected if name.endswith("attentions") and expected[name]]
    assert names
    for name in names:
        assert len(got[name]) == len(expected[name])
        for value, other in zip(got[name], expected[name], strict=True):
            torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)
    assert (main_output(got) - main_output(expected)).abs().max() < 5e-6


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(architecture, reentrant):
    _, model, _ = both(architecture)
    move(model)
    if reentrant and architecture.name == "Swin":
        pytest.skip("Swin itself loses its gradients with reentrant checkpoints")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train()
    again = copy.deepcopy(model)
    again.gradient_checkpointing_enable({"use_reentrant": reentrant})  # the name that every version has
    if reentrant and "input_ids" in architecture.inputs():
        again.enable_input_require_grads()
    for either in (model, again):
        inputs = architecture.inputs()
        if reentrant and "pixel_values" in inputs:
            inputs["pixel_values"].requires_grad_()
        torch.manual_seed(0)
        loss_of(either(**inputs)).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and again.get_parameter(name).grad is not None:
            torch.testing.assert_close(again.get_parameter(name).grad, parameter.grad)
    for name, module, _ in marked(again):
        assert function_module(module).coefs.grad is not None, name


def test_bfloat16(architecture):
    exact = main_output(architecture.build()(**architecture.inputs()))
    original, model, _ = both(architecture)
    inputs = {key: t.bfloat16() if t.is_floating_point() else t for key, t in architecture.inputs().items()}
    errors = []
    for either in (original, model):
        # as transformers loads a checkpoint with dtype=: what is to stay in float32 stays
        half = copy.deepcopy(either).to(torch.bfloat16)
        got = main_output(half(**inputs))
        assert got.dtype == torch.bfloat16
        errors.append((got.float() - exact).square().mean().sqrt())
    assert errors[1] < 2 * errors[0]


def test_parameters_of_a_half_precision_model_are_float32():
    model = BertModel(BertConfig(**SIZES)).to(torch.bfloat16)
    multimax.convert_(model)
    function = model.encoder.layer[0].attention.self.multimax
    assert function.coefs.dtype == function.knots.dtype == torch.float32
    output = model(input_ids=torch.tensor([[5, 6, 7]])).last_hidden_state
    output.sum().backward()
    assert output.dtype == torch.bfloat16
    assert function.coefs.grad.dtype == torch.float32


NOT_THE_NEWEST = Version(torch.__version__) < Version("2.13")


def skip_unless_compiled(original, inputs):
    """Where the compiler cannot do the model as it was, it need not do the converted one."""
    torch._dynamo.reset()
    try:
        torch.compile(original, fullgraph=True, backend="eager")(**inputs)
    except torch._dynamo.exc.Unsupported as error:
        pytest.skip(f"torch {torch.__version__} does not compile it unconverted: {str(error).splitlines()[0]}")


# the first architecture of each way to attention, and of encoders with decoders, by AOT Autograd too; without GPT-OSS,
# whose experts transformers cannot compile with gradients
BY_AOT = ("GPT2", "Llama", "Mistral", "Gemma2", "Swin", "T5", "BART")


@pytest.mark.parametrize("name", [name for name in BY_NAME if name != "GPT-OSS"])
def test_compile(name):
    architecture = BY_NAME[name]
    if "encoder_layers" in architecture.settings:  # one of each is three kinds of attention already
        fewer = {**architecture.settings, "encoder_layers": 1, "decoder_layers": 1}
        architecture = dataclasses.replace(architecture, settings=fewer, layers=3)
    original, model, _ = both(architecture)
    move(model)
    inputs = architecture.inputs()
    labels = inputs.pop("labels", None)
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = labels
    if NOT_THE_NEWEST:
        skip_unless_compiled(original, inputs)
    expected = model(**inputs)
    loss_of(expected).backward()
    before = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager" if name in BY_AOT else "eager")
    got = compiled(**inputs)
    torch.testing.assert_close(main_output(got), main_output(expected), rtol=1e-5, atol=1e-5)
    loss_of(got).backward()
    for key, gradient in before.items():
        atol = 1e-5 * gradient.abs().max().item() + 1e-7
        torch.testing.assert_close(model.get_parameter(key).grad, gradient, rtol=1e-3, atol=atol)
    torch._dynamo.reset()


# ---- the output layer ----

WITH_OUTPUT = [architecture.name for architecture in ARCHITECTURES if architecture.output]


@pytest.mark.parametrize("name", WITH_OUTPUT)
def test_output_layer(name):
    architecture = BY_NAME[name]
    original, model, report = both(architecture, where=("attention", "output"))
    assert [layer.name for layer in report if layer.kind == "output"] == [architecture.output]
    assert len(report) == architecture.layers + 1
    inputs = architecture.inputs()
    expected, got = original(**inputs), model(**inputs)
    assert (got.logits - expected.logits).abs().max() < 2e-6
    torch.testing.assert_close(got.loss, expected.loss, rtol=0, atol=2e-6)
    head = model.get_submodule(architecture.output)
    with torch.no_grad():
        head.multimax.coefs.copy_(torch.tensor([[-0.5, -0.4], [-0.1, 0.05]]))
        head.multimax.knots.copy_(torch.tensor([[0.02, -0.02], [0.01, -0.01]]))
    got = model(**inputs)
    modulated = multimax.modulate(expected.logits, head.multimax.coefs, head.multimax.knots)
    torch.testing.assert_close(got.logits, modulated, rtol=1e-5, atol=5e-6)
    got.loss.backward()
    assert head.multimax.coefs.grad.abs().min() > 0
    assert head.weight is model.get_submodule(architecture.output).weight


@pytest.mark.parametrize("name", [architecture.name for architecture in ARCHITECTURES if not architecture.output])
def test_no_output_layer(name):
    architecture = BY_NAME[name]
    model = architecture.build()
    before = model.state_dict()
    with pytest.raises(ValueError, match=r"final_logit_softcapping|expected an output layer in CLIPVisionModel"):
        multimax.convert_(model, where=("attention", "output"))
    assert model.state_dict().keys() == before.keys()
    assert model.config._attn_implementation != "multimax"


def test_output_layer_generates():
    architecture = BY_NAME["GPT2"]
    original, model, _ = both(architecture, where=("output",))
    ids = architecture.inputs()["input_ids"]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(original.generate(ids, **options), model.generate(ids, **options))
    assert model.lm_head.weight is model.transformer.wte.weight  # still tied


def test_output_layer_at_a_temperature():
    original, model, _ = both(
        BY_NAME["GPT2"], where=("output",), reweight=multimax.reweighting.Softmax(2.0, learn=True)
    )
    ids = BY_NAME["GPT2"].inputs()["input_ids"]
    got = model(ids).logits
    torch.testing.assert_close(got, original(ids).logits / 2)
    got.logsumexp(-1).mean().backward()
    assert model.lm_head.reweight.log_temperature.grad != 0


def test_heads_of_classifiers():
    common = {"num_labels": 3, **SIZES}
    for name, output in (
        ("BertForSequenceClassification", ["classifier"]),
        ("RobertaForSequenceClassification", ["classifier.out_proj"]),
        ("BertForQuestionAnswering", ["qa_outputs"]),
        ("BertForTokenClassification", ["classifier"]),
    ):
        config = BertConfig if name.startswith("Bert") else transformers.RobertaConfig
        model = getattr(transformers, name)(config(**common))
        report = multimax.convert_(model, where="output")
        assert [layer.name for layer in report] == output
    settings = {**BY_NAME["DeiT"].settings, "num_labels": 3}
    model = transformers.DeiTForImageClassificationWithTeacher(transformers.DeiTConfig(**settings))
    report = multimax.convert_(model, where="output")
    assert [layer.name for layer in report] == ["cls_classifier", "distillation_classifier"]
    config = transformers.GPT2Config(**BY_NAME["GPT2"].settings)
    assert [
        layer.name for layer in multimax.convert_(transformers.GPT2ForSequenceClassification(config), where="output")
    ] == ["score"]


# ---- other functions ----


@pytest.mark.parametrize(
    "reweight", ["entmax15", "sparsemax", "evsoftmax", "sparsehourglass", multimax.reweighting.TopK(3)]
)
@pytest.mark.parametrize("name", ["GPT2", "Llama", "T5", "Gemma2", "Swin"])
def test_other_functions(name, reweight):
    architecture = BY_NAME[name]
    original, model, report = both(architecture, reweight=reweight)
    assert report.parameters == 0
    inputs = architecture.inputs()
    got = model(**inputs)
    assert (got.logits - original(**inputs).logits).abs().max() > 1e-5
    got.loss.backward()
    multimax.revert_(model)
    assert torch.equal(model(**inputs).logits, original(**inputs).logits)


def test_softmax_with_a_trained_temperature():
    architecture = BY_NAME["BERT"]
    original, model, report = both(architecture, reweight=multimax.reweighting.Softmax(1.0, learn=True, heads=4))
    assert report.parameters == 8
    inputs = architecture.inputs()
    got = model(**inputs)
    assert (got.logits - original(**inputs).logits).abs().max() < 2e-6
    got.loss.backward()
    assert model.bert.encoder.layer[0].attention.self.reweight.log_temperature.grad.abs().min() > 0


@pytest.mark.parametrize("heads", [None, 4])
def test_attnscale(tmp_path, heads):
    """From softmax on, watched, to a file and back."""
    architecture = BY_NAME["ViT"]
    layer = multimax.reweighting.AttnScaledSoftmax(heads=heads)
    original, model, report = both(architecture, reweight=layer)
    assert report.parameters == 2 * (heads or 1)
    inputs = architecture.inputs()
    expected = original(**inputs).logits
    assert (model(**inputs).logits - expected).abs().max() < 2e-6
    groups = multimax.param_groups(model, lr=0.1, weight_decay=0.5)
    new = [p for name, p in model.named_parameters() if name.endswith("omega")]
    assert len(new) == 2
    assert {id(p) for group in groups if group["weight_decay"] == 0 for p in group["params"]} >= {id(p) for p in new}
    monitor = multimax.Monitor(model, per_head=True, measures=("multi_modality",))
    with monitor:
        model(**inputs).loss.backward()
    assert sum(name.endswith("/omega") and value == 0 for name, value in monitor.values.items()) == report.parameters
    for parameter in new:
        assert (parameter.grad != 0).all()
    with torch.no_grad():
        for n, parameter in enumerate(new):
            parameter.copy_(3 + n + torch.arange(parameter.numel()).reshape(parameter.shape) / 4)
    moved = model(**inputs).logits
    assert (moved - expected).abs().max() > 1e-3
    with multimax.metrics.collect(model, ("top_mass",)) as found:
        model(**inputs)
    assert len(found.layers) == 2
    assert all(layer.measures["top_mass"].mean > 1 for layer in found.layers.values())  # others are negative
    model.save_pretrained(tmp_path)
    again = multimax.from_pretrained(transformers.AutoModelForImageClassification, tmp_path)
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))
    assert torch.equal(again(**inputs).logits, moved)
    for converted in (model, again):
        multimax.revert_(converted)
        assert torch.equal(converted(**inputs).logits, expected)


def test_attnscale_by_name_learns_and_is_refused_in_the_output_layer():
    architecture = BY_NAME["ViT"]
    _, _, report = both(architecture, reweight="attnscale")
    assert report.parameters == 2
    assert [layer.now for layer in report] == ["AttnScaledSoftmax(learned omega=0)"] * 2
    with pytest.raises(ValueError, match="attnscale of logits is not the softmax of other logits"):
        both(architecture, reweight="attnscale", where="output")
    with pytest.raises(ValueError, match="it has 4 heads, and the parameters are for 3"):
        both(architecture, reweight=multimax.reweighting.AttnScaledSoftmax(heads=3))


@torch.no_grad()
def fill(model, omega):
    for _, module, _ in marked(model):
        function_module(module).omega.fill_(omega)


@pytest.mark.parametrize("name", ["Llama", "T5", "BERT"])
def test_attnscale_of_minus_one_knows_no_scores(name):
    """What is left is the mean of the keys that take part: in causal, grouped and cross-attention."""
    architecture = BY_NAME[name]
    original, model, _ = both(architecture, reweight="attnscale")
    inputs = architecture.inputs()
    expected = main_output(original(**inputs))
    assert (main_output(model(**inputs)) - expected).abs().max() < 2e-6
    fill(model, -1.0)
    got = main_output(model(**inputs))
    assert (got - expected).abs().max() > 1e-4
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if re.search(r"q_proj|query|\.q\.", key):
                parameter.mul_(-3)
    assert (main_output(model(**inputs)) - got).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_attnscale_gives_a_later_token_no_weight(name):
    """Neither one of its own nor by its number among the keys."""
    _, model, _ = both(BY_NAME[name], reweight="attnscale")
    fill(model, 2.0)
    ids = BY_NAME[name].inputs()["input_ids"]
    got, shorter = model(input_ids=ids).logits, model(input_ids=ids[:, :-3]).logits
    assert (got[:, :-3] - shorter).abs().max() < 1e-5


def test_sinks_need_multimax():
    with pytest.raises(ValueError, match=r"'model.layers.0.self_attn': it takes multimax only"):
        both(BY_NAME["GPT-OSS"], reweight="entmax15")


def test_per_head(architecture):
    if architecture.name == "Swin":
        assert len({function_module(m).heads for _, m, _ in marked(both(architecture, per_head=True)[1])}) == 2
    original, model, report = both(architecture, per_head=True)
    inputs = architecture.inputs()
    assert (main_output(model(**inputs)) - main_output(original(**inputs))).abs().max() < 2e-6
    assert report.parameters == sum(8 * function_module(m).heads for _, m, _ in marked(model))


def test_monotone_prototype():
    _, model, _ = both(BY_NAME["BERT"], reweight=multimax.MultiMax(1, terms="lower", monotone=True, init="identity"))
    function = model.bert.encoder.layer[1].attention.self.multimax
    assert function.monotone
    assert function.terms == "lower"
    assert function is not model.bert.encoder.layer[0].attention.self.multimax


# ---- in place, and back ----


def test_revert_brings_back_everything(architecture):
    original = architecture.build()
    model = copy.deepcopy(original)
    modules = dict(model.named_modules())
    inputs = architecture.inputs()
    expected = main_output(original(**inputs))
    where = ("attention", "output") if architecture.output else ("attention",)
    multimax.convert_(model, where=where)
    move(model)
    assert (main_output(model(**inputs)) - expected).abs().max() > 1e-5
    report = multimax.revert_(model)
    assert len(report) == architecture.layers + (architecture.output is not None)
    assert torch.equal(main_output(model(**inputs)), expected)
    assert {name: type(m) for name, m in model.named_modules()} == {n: type(m) for n, m in original.named_modules()}
    assert all(modules[name] is module for name, module in model.named_modules())
    assert model.config.to_dict() == original.config.to_dict()
    assert model.config._attn_implementation == original.config._attn_implementation
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    multimax.convert_(model)  # and again
    assert (main_output(model(**inputs)) - expected).abs().max() < 2e-6


def test_a_shared_configuration_stays():
    config = BertConfig(**SIZES)
    first, second = BertModel(config).eval(), BertModel(config).eval()
    multimax.convert_(first)
    assert config._attn_implementation == second.config._attn_implementation == "sdpa"
    assert "multimax" not in config.to_dict()
    second(input_ids=torch.tensor([[5, 6, 7]]))
    first(input_ids=torch.tensor([[5, 6, 7]]))


def test_deepcopy_of_a_converted_model():
    _, model, _ = both(BY_NAME["BERT"], where=("attention", "output"))
    again = copy.deepcopy(model)
    move(again)
    inputs = BY_NAME["BERT"].inputs()
    assert (model(**inputs).logits - again(**inputs).logits).abs().max() > 1e-4
    multimax.revert_(again)
    with pytest.raises(ValueError, match="without converted layers"):
        multimax.revert_(again)
    assert mark_of(model.bert.encoder.layer[0].attention.self) is not None
    model(**inputs)


def test_some_layers():
    original, model, report = both(BY_NAME["BERT"], layers=["bert.encoder.layer.1"])
    assert [layer.name for layer in report] == ["bert.encoder.layer.1.attention.self"]
    assert [layer.name for layer in report.left] == ["bert.encoder.layer.0.attention.self"]
    assert "not asked for" in str(report)
    inputs = {**BY_NAME["BERT"].inputs(), "attention_mask": torch.ones(2, 11, dtype=torch.long)}
    inputs["attention_mask"][0, 7:] = 0
    assert (model(**inputs).logits - original(**inputs).logits)[0, :7].abs().max() < 2e-6
    _, model, report = both(BY_NAME["GPT2"], filter_fn=lambda module, name: "h.0" in name)
    assert [layer.name for layer in report] == ["transformer.h.0.attn"]
    _, model, report = both(BY_NAME["T5"], layers=["encoder"])
    assert len(report) == 2
    assert len(report.left) == 4


# ---- nothing silently softmax ----


def test_first_forward_looks():
    _, model, _ = both(BY_NAME["BERT"])
    layer = model.bert.encoder.layer[1]
    layer.forward = lambda hidden, *args, **kwargs: hidden  # the layer is passed by
    with pytest.raises(RuntimeError, match=r"got none to 'bert.encoder.layer.1.attention.self'"):
        model(**BY_NAME["BERT"].inputs())


def test_probe_looks_at_once_and_leaves_the_model():
    model = BY_NAME["BERT"].build().train()
    model.bert.encoder.layer[1].forward = lambda hidden, *args, **kwargs: hidden
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="got none to"):
        multimax.convert_(model, probe=BY_NAME["BERT"].inputs())
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert not list(marked(model))
    assert not any("multimax" in name for name in model.state_dict())
    model = BY_NAME["BERT"].build().train()
    multimax.convert_(model, probe=BY_NAME["BERT"].inputs())
    assert model.training
    assert not model._forward_hooks


def test_layerdrop_may_pass_layers_by():
    model = transformers.BartForConditionalGeneration(
        transformers.BartConfig(**{**BY_NAME["BART"].settings, "encoder_layerdrop": 1.0})
    ).train()
    multimax.convert_(model)
    model(**BY_NAME["BART"].inputs())
    with torch.no_grad():
        model.eval()(**BY_NAME["BART"].inputs())  # here all are reached
    assert not model._forward_hooks


@pytest.mark.parametrize("name", OUTSIDE)
def test_architectures_outside_the_interface(name):
    model, config, settings = OUTSIDE[name]
    model = getattr(transformers, model)(getattr(transformers, config)(**settings))
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match="does not use transformers' attention interface"):
        multimax.convert_(model)
    assert model.config._attn_implementation == before
    assert not any("multimax" in name for name, _ in model.named_parameters())


def test_another_implementation_afterwards_is_an_error():
    _, model, _ = both(BY_NAME["BERT"])
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match=r"expected the attention implementation 'multimax'.*got 'sdpa'"):
        model(**BY_NAME["BERT"].inputs())
    model.set_attn_implementation("multimax")
    model(**BY_NAME["BERT"].inputs())


def test_another_output_layer_afterwards_is_an_error():
    settings = {**BY_NAME["GPT2"].settings, "tie_word_embeddings": False}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings))
    multimax.convert_(model, where="output")
    model.resize_token_embeddings(VOCABULARY + 8)
    with pytest.raises(RuntimeError, match=r"expected 'lm_head' to be converted, got Linear in its place"):
        model(**BY_NAME["GPT2"].inputs())


def test_a_module_without_parameters_is_an_error():
    model = BertModel(BertConfig(**SIZES)).eval()
    multimax.convert_(BertModel(BertConfig(**SIZES)))  # the name is known now
    model.set_attn_implementation("multimax")
    with pytest.raises(RuntimeError, match="BertSelfAttention to be converted"):
        model(input_ids=torch.tensor([[5, 6, 7]]))


# ---- saving and loading ----


def test_save_and_load(architecture, tmp_path):
    where = ("attention", "output") if architecture.output else ("attention",)
    _, model, _ = both(architecture, where=where)
    move(model)
    model.save_pretrained(tmp_path)
    again = multimax.from_pretrained(type(model), tmp_path)
    assert type(again) is type(model)
    inputs = architecture.inputs()
    assert torch.equal(main_output(again(**inputs)), main_output(model(**inputs)))
    assert all(mark.reached for _, _, mark in marked(again))
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    multimax.revert_(again)
    assert again.config._attn_implementation == architecture.build().config._attn_implementation


def test_plain_from_pretrained_refuses(architecture, tmp_path):
    _, model, _ = both(architecture)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r'attn_implementation="load with multimax.from_pretrained"'):
        type(model).from_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attn_implementation"] == REFUSED


# Attention outside transformers' interface: with the output converted, or a softmax module in it.
OUTPUT_ONLY = {name: kind for name, kind in OUTSIDE.items() if kind[0].endswith("CausalLM")} | {
    "DeBERTa-v2": ("DebertaV2ForMaskedLM", "DebertaV2Config", SIZES),
    "Longformer": ("LongformerForMaskedLM", "LongformerConfig", {**SIZES, "attention_window": 4}),
    "XGLM": (
        "XGLMForCausalLM",
        "XGLMConfig",
        {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "vocab_size": VOCABULARY},
    ),
}


@pytest.mark.parametrize("name", [*OUTPUT_ONLY, "SqueezeBERT"])
def test_plain_from_pretrained_refuses_attention_outside_the_interface(name, tmp_path):
    groups = ("q_groups", "k_groups", "v_groups", "post_attention_groups", "intermediate_groups", "output_groups")
    squeeze = ("SqueezeBertModel", "SqueezeBertConfig", {**SIZES, "embedding_size": 32} | dict.fromkeys(groups, 1))
    cls, config, settings = OUTPUT_ONLY.get(name, squeeze)
    torch.manual_seed(0)
    model = getattr(transformers, cls)(getattr(transformers, config)(**settings)).eval()
    ids = torch.randint(3, 50, (2, 8))
    before = model(ids)[0]
    multimax.convert_(model, where="attention" if name == "SqueezeBERT" else "output")
    move(model, scale=0.5)
    expected = model(ids)[0]
    assert (expected - before).abs().max() > 1e-5
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"load with multimax.from_pretrained"):
        type(model).from_pretrained(tmp_path)
    assert torch.equal(multimax.from_pretrained(type(model), tmp_path)(ids)[0], expected)


def test_files_of_earlier_versions_load(tmp_path):
    _, model, _ = both(BY_NAME["BERT"])
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attn_implementation": "multimax"}))
    again = multimax.from_pretrained(type(model), tmp_path)
    multimax.revert_(again)
    assert not hasattr(again.config, "attn_implementation")


def test_plain_from_pretrained_refuses_in_a_new_process(tmp_path):
    _, model, _ = both(BY_NAME["BERT"], where=("output",))  # even if only the output is converted
    model.save_pretrained(tmp_path)
    code = (
        "import sys, transformers\n"
        "for cls in (transformers.AutoModelForMaskedLM, transformers.BertForMaskedLM, transformers.AutoModel):\n"
        "    try: cls.from_pretrained(sys.argv[1])\n"
        "    except ValueError as error: assert 'load with multimax.from_pretrained' in str(error), error\n"
        "    else: raise AssertionError('loaded')\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True)


def test_auto_classes_and_base_models(tmp_path):
    _, model, _ = both(BY_NAME["BERT"], where=("attention", "output"), per_head=True)
    move(model)
    model.save_pretrained(tmp_path)
    inputs = {"input_ids": BY_NAME["BERT"].inputs()["input_ids"]}
    again = multimax.from_pretrained(transformers.AutoModelForMaskedLM, tmp_path)
    assert torch.equal(again(**inputs).logits, model(**inputs).logits)
    base = multimax.from_pretrained(transformers.AutoModel, tmp_path)
    assert torch.equal(base(**inputs).last_hidden_state, model.bert(**inputs).last_hidden_state)
    half, info = multimax.from_pretrained(
        transformers.AutoModelForMaskedLM, tmp_path, dtype=torch.bfloat16, output_loading_info=True
    )
    assert half.dtype == torch.bfloat16
    assert half.bert.encoder.layer[0].attention.self.multimax.coefs.dtype == torch.float32
    assert not info["missing_keys"]
    base.save_pretrained(tmp_path / "base")
    again = multimax.from_pretrained(transformers.AutoModel, tmp_path / "base")
    assert torch.equal(base(**inputs).last_hidden_state, again(**inputs).last_hidden_state)


def test_from_pretrained_of_other_functions(tmp_path):
    for reweight in (
        multimax.reweighting.TopK(3),
        multimax.reweighting.Entmax(1.4, learn=True, heads=4, bounds=(1.1, 1.9)),
        multimax.MultiMax(3, terms="lower", monotone=True),
    ):
        _, model, _ = both(BY_NAME["BERT"], reweight=reweight)
        move(model)
        model.save_pretrained(tmp_path)
        again = multimax.from_pretrained(transformers.AutoModelForMaskedLM, tmp_path)
        inputs = BY_NAME["BERT"].inputs()
        assert torch.equal(again(**inputs).logits, model(**inputs).logits)
        layer = again.bert.encoder.layer[0].attention.self
        assert str(function_module(layer)) == str(function_module(model.bert.encoder.layer[0].attention.self))


def test_from_pretrained_errors(tmp_path):
    BY_NAME["BERT"].build().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="configuration without 'multimax'"):
        multimax.from_pretrained(transformers.AutoModelForMaskedLM, tmp_path)
    _, model, _ = both(BY_NAME["BERT"])
    state = {name: t for name, t in model.state_dict().items() if "layer.1.attention.self.multimax" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match=r"layer.1.attention.self.multimax.coefs.* in the weights"):
        multimax.from_pretrained(transformers.AutoModelForMaskedLM, tmp_path)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expected an Auto class that knows BertConfig"):
        multimax.from_pretrained(transformers.AutoModelForSpeechSeq2Seq, tmp_path)
    good = json.loads((tmp_path / "config.json").read_text())
    for bad, message in (
        ({"version": 99}, "version 1"),
        ("yes", "version 1"),
        ({"version": 1, "attention": []}, "attention layers"),
        ({"version": 1, "attention": {"no.such": {"name": "multimax"}}, "output": {}}, "'no.such' in BertForMaskedLM"),
        (
            {"version": 1, "attention": {"bert.encoder.layer.0.attention.self": {"name": "os.system"}}, "output": {}},
            "reweighting function",
        ),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**good, "multimax": bad}))
        with pytest.raises(ValueError, match=message):
            multimax.from_pretrained(transformers.AutoModelForMaskedLM, tmp_path)


def test_plain_weights_load_into_a_converted_model():
    original, model, _ = both(BY_NAME["BERT"], where=("attention", "output"))
    move(model)
    model.load_state_dict(original.state_dict())
    inputs = BY_NAME["BERT"].inputs()
    assert (model(**inputs).logits - original(**inputs).logits).abs().max() < 2e-6
    move(model)
    again = both(BY_NAME["BERT"], where=("attention", "output"))[1]
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(**inputs).logits, model(**inputs).logits)
    state = model.state_dict()
    del state["bert.encoder.layer.0.attention.self.multimax.coefs"]  # half of it is missing: no softmax by accident
    with pytest.raises(RuntimeError, match=r"multimax.coefs"):
        again.load_state_dict(state)


def test_safetensors(tmp_path):
    from safetensors.torch import load_model, save_model

    _, model, _ = both(BY_NAME["BERT"], where=("attention", "output"))
    move(model)
    save_model(model, str(tmp_path / "model.safetensors"))
    again = both(BY_NAME["BERT"], where=("attention", "output"))[1]
    load_model(again, str(tmp_path / "model.safetensors"))
    inputs = BY_NAME["BERT"].inputs()
    assert torch.equal(again(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("name", ["CLIP", "Siglip"])
def test_models_of_several_models(name, tmp_path):
    vision = {key: value for key, value in BY_NAME["ViT"].settings.items() if key != "num_labels"}
    text = {**SIZES, "max_position_embeddings": 16}
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision)
    original = getattr(transformers, f"{name}Model")(config).eval()
    model = copy.deepcopy(original)
    report = multimax.convert_(model)
    # Siglip has a multi-head attention of torch.nn in its vision part
    assert [layer.was.rpartition(".")[0] for layer in report] == ["transformers"] * 4 + ["torch.nn"] * (
        name == "Siglip"
    )
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 2]]), "pixel_values": BY_NAME["ViT"].inputs()["pixel_values"]}
    assert (model(**inputs).logits_per_image - original(**inputs).logits_per_image).abs().max() < 1e-5
    move(model)
    model.save_pretrained(tmp_path)
    again = multimax.from_pretrained(transformers.AutoModel, tmp_path)
    assert (again(**inputs).logits_per_image - model(**inputs).logits_per_image).abs().max() < 1e-6
    # a part that is saved alone says so too
    model.vision_model.save_pretrained(tmp_path / "vision")
    again = multimax.from_pretrained(type(model.vision_model), tmp_path / "vision")
    pixels = inputs["pixel_values"]
    assert (again(pixels).pooler_output - model.vision_model(pixels).pooler_output).abs().max() < 1e-6
    multimax.revert_(model)
    assert (model(**inputs).logits_per_image - original(**inputs).logits_per_image).abs().max() < 1e-6
    assert not any("multimax" in key for key in model.state_dict())
    assert "multimax" not in str(model.config.to_dict())


def test_inside_another_module(tmp_path):
    inner = BY_NAME["BERT"].build()
    model = nn.ModuleDict({"text": inner, "head": nn.Linear(4, 4)})
    multimax.convert_(model)
    inner.save_pretrained(tmp_path)
    again = multimax.from_pretrained(transformers.AutoModelForMaskedLM, tmp_path)
    assert len(list(marked(again))) == 2


# ---- defects that once were there ----


def nllb_moe():
    settings = {**SEQ2SEQ, "num_experts": 2, "encoder_sparse_step": 2, "decoder_sparse_step": 2, "expert_capacity": 8}
    return transformers.NllbMoeForConditionalGeneration(transformers.NllbMoeConfig(**settings)).eval()


def pegasus_x():
    settings = {**SEQ2SEQ, "num_global_tokens": 2, "block_size": 4, "forced_eos_token_id": None}
    return transformers.PegasusXForConditionalGeneration(transformers.PegasusXConfig(**settings)).eval()


@pytest.mark.parametrize("build", [nllb_moe, pegasus_x])
@pytest.mark.parametrize("where", ["attention", "output"])
def test_models_that_know_no_sdpa_keep_their_masks(build, where):
    """Their modules do not say that they are causal, and other layers add the mask as numbers."""
    torch.manual_seed(0)
    original = build()
    inputs = {**translation(), "attention_mask": torch.ones(2, 11, dtype=torch.long)}
    inputs["attention_mask"][0, 8:] = 0
    if build is pegasus_x and where == "attention":
        with pytest.raises(ValueError, match="PegasusXGlobalLocalAttention does not use"):
            multimax.convert_(copy.deepcopy(original), where=where)
    model = copy.deepcopy(original)
    multimax.convert_(model, where=where, strict=False)
    assert (model(**inputs).logits - original(**inputs).logits).abs().max() < 2e-6


def test_converting_the_output_alone_leaves_attention_alone():
    _, model, report = both(BY_NAME["BERT"], where="output")
    assert model.config._attn_implementation == "sdpa"
    with Calls() as calls:
        model(**BY_NAME["BERT"].inputs())
    assert calls.sdpa == 2
    assert len(report) == 1


def test_a_part_of_a_checkpoint_says_nothing_of_the_rest(tmp_path):
    from transformers.trainer_utils import load_sharded_checkpoint

    _, model, _ = both(BY_NAME["BERT"], where=("attention", "output"))
    move(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for key in before:
        if "multimax" not in key:
            model.load_state_dict({key: before[key]}, strict=False)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    # files of which each has a few tensors, in any order
    model.save_pretrained(tmp_path, max_shard_size="2KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    again = both(BY_NAME["BERT"], where=("attention", "output"))[1]
    load_sharded_checkpoint(again, tmp_path, strict=False)
    for key, value in again.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_weights_that_files_hold_once_count_once():
    original, model, _ = both(BY_NAME["GPT2"], where=("attention", "output"))
    move(model)
    state = original.state_dict()
    del state["lm_head.weight"]  # tied to the embedding
    model.load_state_dict(state, strict=False)
    inputs = BY_NAME["GPT2"].inputs()
    assert (model(**inputs).logits - original(**inputs).logits).abs().max() < 2e-6


@pytest.mark.parametrize("way", ["forward", "layers", "inner"])
def test_compiled_parts_are_reached(way):
    original, model, _ = both(BY_NAME["BERT"])
    torch._dynamo.reset()
    if way == "forward":
        model.forward = torch.compile(model.forward, backend="eager")
    elif way == "layers":
        for layer in model.bert.encoder.layer:
            layer.compile(backend="eager")
    else:
        model.bert = torch.compile(model.bert, backend="eager")
    ids = BY_NAME["BERT"].inputs()["input_ids"]
    with torch.no_grad():
        for _ in range(2):
            assert (model(input_ids=ids).logits - original(input_ids=ids).logits).abs().max() < 2e-6
    assert not model._forward_hooks
    torch._dynamo.reset()


def test_another_implementation_is_an_error_in_parts_and_compiled():
    _, model, _ = both(BY_NAME["BERT"])
    ids = BY_NAME["BERT"].inputs()["input_ids"]
    model(input_ids=ids)
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="expected the attention implementation"):
        model.bert(input_ids=ids)
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match="expected the attention implementation"):
        torch.compile(model, backend="eager")(input_ids=ids)
    torch._dynamo.reset()


def test_softmax_in_modules_with_modules_like_attention_in_them():
    from transformers.models.rf_detr.modeling_rf_detr import RfDetrMultiscaleDeformableAttention

    config = transformers.RfDetrConfig()
    model = nn.Sequential(RfDetrMultiscaleDeformableAttention(config, 4, 4), nn.Softmax(-1))
    with pytest.raises(ValueError, match="'0': RfDetrMultiscaleDeformableAttention does not use"):
        multimax.convert_(model)


def test_a_batch_without_images():
    """What does not run is looked at when it does."""
    vision = {key: value for key, value in BY_NAME["ViT"].settings.items() if key != "num_labels"}
    config = transformers.CLIPConfig(text_config={**SIZES, "max_position_embeddings": 16}, vision_config=vision)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            model = transformers.CLIPModel(config)
            self.text, self.images = model.text_model, model.vision_model

        def forward(self, ids=None, pixels=None):
            text = None if ids is None else self.text(ids).pooler_output
            return text if pixels is None else self.images(pixels).pooler_output

    ids, pixels = torch.tensor([[5, 6, 7, 2]]), BY_NAME["ViT"].inputs()["pixel_values"]
    model = Both().eval()
    multimax.convert_(model)
    model(ids)
    assert model._forward_hooks  # still waiting
    model(pixels=pixels)
    assert not model._forward_hooks
    multimax.revert_(model)
    with pytest.raises(RuntimeError, match=r"got none to 'images"):
        multimax.convert_(model, probe={"ids": ids})  # a probe has to reach all
    multimax.convert_(model)
    model.images.encoder.layers[1].forward = lambda hidden, *args, **kwargs: hidden
    model(ids)
    with pytest.raises(RuntimeError, match=r"got none to 'images.encoder.layers.1.self_attn'"):
        model(pixels=pixels)


def test_a_part_of_what_was_saved(tmp_path):
    vision = {key: value for key, value in BY_NAME["ViT"].settings.items() if key != "num_labels"}
    config = transformers.CLIPConfig(text_config={**SIZES, "max_position_embeddings": 16}, vision_config=vision)
    model = transformers.CLIPModel(config).eval()
    multimax.convert_(model)
    move(model)
    model.save_pretrained(tmp_path)
    again = multimax.from_pretrained(transformers.CLIPVisionModel, tmp_path)
    pixels = BY_NAME["ViT"].inputs()["pixel_values"]
    difference = again(pixels).pooler_output - model.vision_model(pixels).pooler_output
    assert difference.abs().max() < 1e-6
    with pytest.raises(ValueError, match=r"expected a BertConfig for BertModel .* got CLIPConfig"):
        multimax.from_pretrained(BertModel, tmp_path)
    with pytest.raises(TypeError, match="model class of transformers, got 'bert'"):
        multimax.from_pretrained("bert", tmp_path)


def test_layers_with_values_where_the_others_have_none_yet(tmp_path):
    """DiffLlama's first parameter is real while transformers loads the others."""
    torch.manual_seed(0)
    model = transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**ROTARY)).eval()
    multimax.convert_(model)
    move(model)
    model.save_pretrained(tmp_path)
    again = multimax.from_pretrained(transformers.AutoModelForCausalLM, tmp_path)
    ids = causal()["input_ids"]
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_plain_weights_into_a_model_without_values():
    original = BY_NAME["BERT"].build()
    with torch.device("meta"):
        model = transformers.BertForMaskedLM(BertConfig(**SIZES)).eval()
        multimax.convert_(model)
    model.load_state_dict(original.state_dict(), strict=False, assign=True)
    function = model.bert.encoder.layer[0].attention.self.multimax
    assert function.coefs.tolist() == [[0, 0], [0, 0]]
    assert function.knots.tolist() == [[-0.5, 0.5], [-1, 1]]


def test_outputs_that_are_not_the_last_word():
    for model, reason in (
        (transformers.BertForSequenceClassification(BertConfig(**SIZES, num_labels=1)), "num_labels=1"),
        (
            transformers.BertForSequenceClassification(BertConfig(**SIZES, problem_type="multi_label_classification")),
            "problem_type='multi_label_classification'",
        ),
        (
            transformers.T5GemmaForConditionalGeneration(
                transformers.T5GemmaConfig(encoder={**ROTARY}, decoder={**ROTARY}, final_logit_softcapping=30.0)
            ),
            "final_logit_softcapping",
        ),
    ):
        with pytest.raises(ValueError, match=f"sigma must come last|{re.escape(reason)}"):
            multimax.convert_(model, where="output")
    model = BY_NAME["Marian"].build()
    model.final_logits_bias[0, 3] = 1.0
    with pytest.raises(ValueError, match="adds final_logits_bias to the logits"):
        multimax.convert_(model, where="output")
    # the words' softcap is none of a classifier's
    model = transformers.Gemma2ForSequenceClassification(transformers.Gemma2Config(**ROTARY, num_labels=3))
    assert [layer.name for layer in multimax.convert_(model, where="output")] == ["score"]
    settings = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    convolutions = {"conv_dim": (8,), "conv_stride": (2,), "conv_kernel": (3,), "num_conv_pos_embedding_groups": 2}
    model = transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**settings, **convolutions, vocab_size=20))
    assert [layer.name for layer in multimax.convert_(model, where="output")] == ["lm_head"]


def test_the_configuration_is_the_same_object_again():
    model = BY_NAME["BERT"].build()
    config = model.config
    multimax.convert_(model)
    assert model.config is not config
    multimax.revert_(model)
    assert model.config is config
    multimax.convert_(model)
    model.config.hidden_dropout_prob = 0.3
    multimax.revert_(model)
    assert model.config.hidden_dropout_prob == 0.3
    model.bert.encoder.layer[1].forward = lambda hidden, *args, **kwargs: hidden
    config = model.config
    with pytest.raises(RuntimeError, match="got none to"):
        multimax.convert_(model, probe={"input_ids": torch.tensor([[5]])})
    assert model.config is config


def test_a_model_made_from_a_converted_models_configuration():
    _, converted, _ = both(BY_NAME["BERT"])
    model = transformers.BertForMaskedLM(converted.config).eval()
    with pytest.raises(RuntimeError, match="expected BertSelfAttention to be converted"):
        model(**BY_NAME["BERT"].inputs())
    multimax.convert_(model)
    model(**BY_NAME["BERT"].inputs())
    multimax.revert_(model)
    assert model.config._attn_implementation == "sdpa"
    model(**BY_NAME["BERT"].inputs())


def test_two_models_of_one_configuration_in_a_model(tmp_path):
    config = transformers.GPT2Config(**BY_NAME["GPT2"].settings)
    model = nn.ModuleDict({"a": transformers.GPT2Model(config), "b": transformers.GPT2Model(config)})
    multimax.convert_(model, layers=["b"])
    model["b"].save_pretrained(tmp_path)
    assert len(list(marked(multimax.from_pretrained(transformers.AutoModel, tmp_path)))) == 2
    multimax.revert_(model)
    assert model["a"].config._attn_implementation == model["b"].config._attn_implementation == "sdpa"


def test_a_bias_in_the_mask_of_a_subclass():
    from transformers.models.swin.modeling_swin import SwinAttention

    class Own(SwinAttention):
        pass

    _, model, _ = both(BY_NAME["Swin"])
    move(model)
    inputs = BY_NAME["Swin"].inputs()
    expected = model(**inputs).logits
    for module in model.modules():
        if type(module) is SwinAttention:
            module.__class__ = Own
    torch.testing.assert_close(model(**inputs).logits, expected, rtol=0, atol=0)


def test_an_output_layer_inside_another_module():
    model = nn.ModuleDict({"lm": BY_NAME["Gemma2"].build()})
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        multimax.convert_(model, where="output", output="lm.lm_head")
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**{**VISION, "num_labels": 1}))
    with pytest.raises(ValueError, match="num_labels=1"):
        multimax.convert_(model, where="output")


def test_from_pretrained_takes_what_transformers_takes(tmp_path):
    _, model, _ = both(BY_NAME["GPT2"])
    model.save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    for _ in range(2):  # the configuration stays as it is
        assert multimax.from_pretrained(transformers.AutoModelForCausalLM, tmp_path, config=config).config is not config
    again = multimax.from_pretrained(transformers.AutoModelForCausalLM, tmp_path, use_cache=False, dtype=torch.bfloat16)
    assert again.config.use_cache is False
    assert again.dtype == torch.bfloat16
    again = multimax.from_pretrained(transformers.AutoModelForCausalLM, tmp_path, config=str(tmp_path))
    assert len(list(marked(again))) == 2


def test_an_output_layer_that_is_none_in_the_file(tmp_path):
    _, model, _ = both(BY_NAME["BERT"])
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["multimax"]["output"] = {"bert.embeddings.LayerNorm": {"name": "multimax"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"exactly nn\.Linear, but is LayerNorm"):
        multimax.from_pretrained(transformers.AutoModelForMaskedLM, tmp_path)
