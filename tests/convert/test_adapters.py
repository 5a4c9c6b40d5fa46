"""Converted models with PEFT's adapters and with accelerate's offloading."""

import copy
import functools
import warnings

import accelerate
import pytest
import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from safetensors.torch import load_file
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
)

import multimax
from architectures import ROTARY, SIZES
from multimax import reweighting
from wrapping import move

IDS = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(0))


def llama():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**ROTARY)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_proj" in name:
                parameter.mul_(8)
    return model


def converted(where=("attention",), **options):
    model = llama()
    multimax.convert_(model, where=where, **options)
    return model


def lora(modules=("multimax",), target=("v_proj",), **options):
    return LoraConfig(target_modules=list(target), modules_to_save=list(modules), init_lora_weights=False, **options)


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize(
    ("options", "modules", "trained"),
    [
        ({}, ["multimax"], 4),
        ({"per_head": True}, ["multimax"], 4),
        ({"where": ("attention", "output")}, ["multimax"], 6),
        ({"where": ("attention", "output")}, ["self_attn.multimax", "lm_head"], 6),
        ({"where": "output"}, ["lm_head"], 2),
        ({"reweight": reweighting.Softmax(2.0, learn=True)}, ["reweight"], 2),
    ],
)
def test_lora_trains_saves_and_loads(options, modules, trained, tmp_path):
    base = converted(**options)
    move(base)
    start = logits(base)
    model = get_peft_model(copy.deepcopy(base), lora(modules)).train()
    parameters = dict(multimax.reweighting_parameters(model))
    assert sum(p.requires_grad for p in parameters.values()) == trained
    groups = multimax.param_groups(model, lr=0.02, weight_decay=0.0)
    assert len(groups[1]["params"]) == trained
    before = {name: p.detach().clone() for name, p in parameters.items()}
    optimizer = torch.optim.AdamW(groups)
    for _ in range(2):
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = [name for name, p in parameters.items() if (p - before[name]).abs().max() > 1e-3]
    assert len(moved) == trained
    assert all(".modules_to_save.default." in name for name in moved)
    model.eval()
    after = logits(model)
    assert (after - start).abs().max() > 1e-2
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    names = {name.replace(".modules_to_save.default", "") for name in moved}
    assert names <= set(saved)

    again = multimax.load_adapter(copy.deepcopy(base), tmp_path).eval()
    assert torch.equal(logits(again), after)
    assert not any(p.requires_grad for p in again.parameters())
    assert any(
        p.requires_grad for p in multimax.load_adapter(copy.deepcopy(base), tmp_path, is_trainable=True).parameters()
    )
    with again.disable_adapter():
        torch.testing.assert_close(logits(again), start)
    merged = again.merge_and_unload()
    torch.testing.assert_close(logits(merged), after, rtol=1e-4, atol=1e-4)
    assert not any("modules_to_save" in name for name, _ in merged.named_modules())


def test_two_adapters_have_their_own_functions(tmp_path):
    model = get_peft_model(converted(), lora())
    move(model)
    model.add_adapter("second", lora())
    model.set_adapter("default")
    first = logits(model)
    model.set_adapter("second")
    for name, parameter in multimax.reweighting_parameters(model):
        if ".second." in name:
            parameter.data += 0.5
    assert not torch.allclose(logits(model), first)
    model.set_adapter("default")
    assert torch.equal(logits(model), first)


def test_the_adapter_does_not_load_where_the_model_is_not_converted(tmp_path):
    get_peft_model(converted(), lora()).save_pretrained(tmp_path)
    for base, got in ((llama(), "none"), (converted(order=1), r"\(1, 2\)"), (converted(per_head=True), r"\(4, 2, 2\)")):
        before = list(base.state_dict())
        with pytest.raises(
            ValueError, match=rf"expected '.*multimax.coefs' of \(2, 2\) in LlamaForCausalLM.* got {got}"
        ):
            multimax.load_adapter(base, tmp_path)
        assert list(base.state_dict()) == before  # unchanged
    with pytest.raises(TypeError, match="expected"):
        multimax.load_adapter("model", tmp_path)


def test_functions_outside_the_adapter_are_named():
    model = get_peft_model(converted(), LoraConfig(target_modules=["v_proj"]))
    frozen = copy.deepcopy(model).train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frozen(IDS)  # nothing of them is trained
    for _, parameter in multimax.reweighting_parameters(model):
        parameter.requires_grad_()
    model.eval()(IDS)
    with pytest.warns(UserWarning, match=r"got model.layers.0.self_attn.multimax.coefs, .*modules_to_save="):
        model.train()(IDS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(IDS)  # once is enough
        multimax.revert_(model)
        model(IDS)


@pytest.mark.parametrize("where", ["attention", "output"])
def test_models_with_an_adapter_are_not_converted(where):
    for model in (get_peft_model(llama(), LoraConfig(target_modules=["v_proj"])), llama()):
        if not isinstance(model, PeftModel):
            model.add_adapter(LoraConfig(target_modules=["v_proj"]))  # transformers' own way
        before = str(model)
        with pytest.raises(
            ValueError, match=r"expected a model without adapters, got .*PEFT's .*convert the model first"
        ):
            multimax.convert_(model, where=where)
        assert str(model) == before


def test_lora_on_a_converted_output_layer():
    model = get_peft_model(converted("output"), LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(RuntimeError, match=r"sigma to come last in 'lm_head'.*modules_to_save=\['lm_head'\]"):
        model(IDS)


def test_classifiers_are_saved_whole(tmp_path):
    """PEFT itself trains and saves the classifier, whatever the configuration says."""
    torch.manual_seed(0)
    base = BertForSequenceClassification(BertConfig(**SIZES, num_labels=3)).eval()
    multimax.convert_(base, where=("attention", "output"))
    move(base)
    expected = logits(base)
    model = get_peft_model(
        copy.deepcopy(base),
        LoraConfig(task_type=TaskType.SEQ_CLS, target_modules=["query"], modules_to_save=["self.multimax"]),
    ).eval()
    torch.testing.assert_close(logits(model), expected)
    model(IDS).logits.square().sum().backward()
    gradients = [
        p.grad for name, p in multimax.reweighting_parameters(model) if p.requires_grad and "classifier" in name
    ]
    assert len(gradients) == 2
    assert all(gradient.abs().max() > 0 for gradient in gradients)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(multimax.load_adapter(base, tmp_path).eval()), expected)


@pytest.mark.parametrize("kind", ["lm_head", "classifier"])
def test_functions_saved_apart_from_their_layer(kind):
    """PEFT would train and save a copy of the function that the forward does not use."""
    if kind == "lm_head":
        base, config, attention = converted(("attention", "output")), lora(["multimax", "lm_head"]), "self_attn"
    else:
        base, attention = BertForSequenceClassification(BertConfig(**SIZES, num_labels=3)), "self"
        multimax.convert_(base, where=("attention", "output"))
        config = LoraConfig(task_type=TaskType.SEQ_CLS, target_modules=["query"], modules_to_save=["multimax"])
    model = get_peft_model(base, config)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"modules_to_save=\['{attention}.multimax', '{kind}'\]"):
            model(IDS)


@pytest.mark.parametrize("case", ["tokens", "classes"])
def test_functions_in_wrappers_in_wrappers(case):
    """PEFT wraps what it saves for such tasks after all else, and could not load that again."""
    torch.manual_seed(0)
    if case == "tokens":
        base, kind, names = BertForTokenClassification(BertConfig(**SIZES, num_labels=3)), TaskType.TOKEN_CLS, "self"
    else:
        base, kind = RobertaForSequenceClassification(RobertaConfig(**SIZES, num_labels=3)), TaskType.SEQ_CLS
        names = "self"
    multimax.convert_(base.eval(), where=("attention", "output"))
    move(base)
    wrong, right = (
        get_peft_model(
            copy.deepcopy(base),
            LoraConfig(task_type=kind, target_modules=["query"], modules_to_save=[name], init_lora_weights=False),
        )
        for name in ("multimax", f"{names}.multimax")
    )
    with pytest.raises(RuntimeError, match=rf"save 'classifier'.*modules_to_save=\['{names}.multimax', 'classifier'\]"):
        wrong(IDS)
    right.train()(IDS).logits.square().sum().backward()
    trained = [p for _, p in multimax.reweighting_parameters(right) if p.requires_grad]
    assert len(trained) == 6
    assert all(p.grad is not None for p in trained)


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"trainable_token_indices": {"embed_tokens": [3, 4]}},
            "TrainableTokensWrapper, which computes logits from its",
        ),
        ({"modules_to_save": ["lm_head"], "ensure_weight_tying": True}, "got one without; leave ensure_weight_tying"),
    ],
)
def test_output_layers_that_peft_computes_itself(ran, options, words):
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(**{**ROTARY, "tie_word_embeddings": True})).eval()
    multimax.convert_(base, where="output")
    if ran:
        base(IDS)
    model = get_peft_model(base, LoraConfig(target_modules=["v_proj"], **options))
    with pytest.raises(RuntimeError, match=words):
        model(IDS)


def test_compiled_models_with_adapters():
    torch._dynamo.reset()
    model = get_peft_model(converted(("attention", "output")), lora())
    move(model)
    expected = logits(model)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(IDS).logits, expected)
    wrong = torch.compile(get_peft_model(converted(("attention", "output")), lora(["multimax", "lm_head"])))
    with pytest.raises(RuntimeError, match="name functions of other layers alone"):
        wrong(IDS)
    torch._dynamo.reset()


def test_functions_unfrozen_late_are_named():
    model = get_peft_model(converted(), LoraConfig(target_modules=["v_proj"])).train()
    model(IDS)
    for _, parameter in multimax.reweighting_parameters(model):
        parameter.requires_grad_()
    with pytest.warns(UserWarning, match="outside of it: they are not saved"):
        model(IDS)


def test_a_second_adapter_is_loaded_with_the_check(tmp_path):
    first = get_peft_model(converted(("attention", "output")), lora()).eval()
    move(first)
    expected = logits(first)
    first.save_pretrained(tmp_path)
    model = get_peft_model(converted(("attention", "output")), lora()).eval()
    assert multimax.load_adapter(model, tmp_path, adapter_name="second") is model
    assert not torch.allclose(logits(model), expected)
    model.set_adapter("second")
    torch.testing.assert_close(logits(model), expected)
    with pytest.raises(ValueError, match=r"expected 'lm_head.multimax.coefs' of .* got none"):
        multimax.load_adapter(get_peft_model(converted(), lora()), tmp_path, adapter_name="second")


def test_an_adapter_without_functions_that_the_model_has(tmp_path):
    get_peft_model(converted(), lora()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"expected 'lm_head.multimax.coefs' of LlamaForCausalLM in the adapter"):
        multimax.load_adapter(converted(("attention", "output")), tmp_path)


def test_clipping_knows_the_classes_through_wrappers():
    """The scalars of an output layer count divided by the root of its number of classes."""
    norms = []
    for wrap in (lambda model: model, lambda model: get_peft_model(model, lora(target=["o_proj"]))):
        model = converted("output")
        move(model)
        model = wrap(model).train()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("multimax" in name and "original_module" not in name)
        model(IDS, labels=IDS).loss.backward()
        norms.append(multimax.clip_grad_norm_(model, 1e9))
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        whole = torch.nn.utils.get_total_norm(gradients)
        torch.testing.assert_close(norms[-1], whole / model.config.vocab_size**0.5)


# ---- accelerate ----


def dispatched(kind, model):
    cpu = torch.device("cpu")
    if kind == "offload":
        accelerate.cpu_offload(model, execution_device=cpu)
    elif kind == "hook":
        accelerate.hooks.add_hook_to_module(model.lm_head, accelerate.hooks.ModelHook())
    else:
        model.lm_head.forward = functools.partial(torch.nn.Linear.forward, model.lm_head)


@pytest.mark.parametrize("kind", ["offload", "hook", "forward"])
def test_models_that_are_dispatched_already_are_refused(kind):
    """Their output layer would go on calling the forward of nn.Linear."""
    model = llama()
    dispatched(kind, model)
    before = list(model.state_dict())
    with pytest.raises(ValueError, match=r"'lm_head': its forward is accelerate's.*convert the model first"):
        multimax.convert_(model, where="output")
    assert list(model.state_dict()) == before
    if kind == "offload":
        with pytest.raises(ValueError, match=r"self_attn': its forward is accelerate's"):
            multimax.convert_(model)
    if kind == "hook":  # the remedy
        accelerate.hooks.remove_hook_from_submodules(model)
        multimax.convert_(model, where="output")
        move(model)
        assert not torch.equal(logits(model), logits(llama()))


def test_revert_after_hooks():
    model = converted(("attention", "output"))
    accelerate.hooks.add_hook_to_module(model.lm_head, accelerate.hooks.ModelHook())
    with pytest.raises(ValueError, match=r"'lm_head' with the forward of its class.*remove_hook_from_submodules"):
        multimax.revert_(model)
    accelerate.hooks.remove_hook_from_submodules(model)
    multimax.revert_(model)
    assert torch.equal(logits(model), logits(llama()))


@pytest.mark.parametrize("reweight", ["multimax", "entmax15", reweighting.Softmax(2.0, learn=True)])
@pytest.mark.parametrize("kind", ["cpu", "disk", "device map"])
def test_offload(kind, reweight, tmp_path):
    model = converted(("attention",) if reweight == "entmax15" else ("attention", "output"), reweight=reweight)
    move(model)
    expected = logits(model)
    cpu = torch.device("cpu")
    if kind == "cpu":
        accelerate.cpu_offload(model, execution_device=cpu)
    elif kind == "disk":
        accelerate.disk_offload(model, str(tmp_path), execution_device=cpu)
    else:
        model.save_pretrained(tmp_path / "model")
        places = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu", "model.norm": "cpu"}
        places |= {"model.rotary_emb": "cpu", "lm_head": "disk"}
        model = multimax.from_pretrained(
            LlamaForCausalLM, tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
        )
    if reweight != "entmax15":
        assert any(p.is_meta for _, p in multimax.reweighting_parameters(model))
    assert torch.equal(logits(model), expected)
    assert torch.equal(logits(model), expected)
