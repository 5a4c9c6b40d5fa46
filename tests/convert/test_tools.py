"""Converted models in the tools that people use around them: quantization, Lightning, sentence-transformers."""

import copy
import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, BertTokenizer

import multimax
import quantizing
from architectures import ARCHITECTURES
from places import ROOT
from wrapping import move

BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
IDS = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(0))


def converted(name: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = BY_NAME[name].build().eval()
    multimax.convert_(model, where=("attention", "output"), **settings)
    move(model)
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(IDS).logits
    return result


# ---- quantization ----


def test_torchao() -> None:
    if not quantizing.FOLDER.is_dir():
        missing = f"no torchao in {quantizing.FOLDER.name}/ of the virtual environment; make test puts it there"
        if os.environ.get("MULTIMAX_TEST_EXTRAS"):
            pytest.fail(missing)
        pytest.skip(missing)
    path = os.pathsep.join(filter(None, [str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(quantizing.__file__)]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert len(found) == len(quantizing.NAMES) * len(quantizing.KINDS)
    for weight, near, far in found.values():
        assert weight not in ("Tensor", "Parameter")  # the converted output layer is quantized too
        assert 0 < near < far / 5  # far: as softmax


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def test_quantize_dynamic_passes_the_output_layer_over_and_says_so() -> None:
    quantize = torch.ao.quantization.quantize_dynamic
    model, x = Classifier(), torch.randn(3, 8)
    multimax.convert_(model, where="output", output="head")
    move(model)
    expected = model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: it is deprecated
        quantized = quantize(model, {nn.Linear})
    assert type(quantized.body) is not nn.Linear
    assert type(quantized.head) is multimax.MultiMaxHead
    with pytest.warns(UserWarning, match=r"expected 'head' to be quantized .* got floating point.*torchao"):
        torch.testing.assert_close(quantized(x), expected, atol=0.05, rtol=0.05)
    quantized(x)  # once is enough
    model(x)


# ---- Lightning ----


def test_lightning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lightning

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

        class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.model = BY_NAME["BERT"].build()
                multimax.convert_(self.model, where=("attention", "output"))

            def training_step(self, batch: Tensor, _: int) -> Tensor:
                loss: Tensor = self.model(batch, labels=batch).loss
                return loss

            def configure_optimizers(self) -> torch.optim.Optimizer:
                groups = multimax.param_groups(self.model, lr=1e-2, weight_decay=0.01, multimax_lr_factor=3)
                return torch.optim.AdamW(groups)

        torch.manual_seed(0)
        module = Module()
        move(module)
        start = {name: p.detach().clone() for name, p in multimax.reweighting_parameters(module)}
        options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
        options |= {"enable_model_summary": False, "default_root_dir": tmp_path, "enable_checkpointing": False}
        trainer = lightning.Trainer(max_steps=2, **options)
        loader = torch.utils.data.DataLoader([IDS[0], IDS[1]], batch_size=1)
        trainer.fit(module, loader)
        path = tmp_path / "two.ckpt"
        trainer.save_checkpoint(path)
        again = Module.load_from_checkpoint(path, weights_only=True)
        further = lightning.Trainer(max_steps=3, **options)
        resumed = Module()
        further.fit(resumed, loader, ckpt_path=path, weights_only=True)
    module.eval(), again.eval()
    found = dict(multimax.reweighting_parameters(again))
    for name, parameter in multimax.reweighting_parameters(module):
        assert not torch.equal(parameter, start[name]), name
        assert torch.equal(found[name], parameter)
    assert torch.equal(logits(again.model), logits(module.model))
    assert further.global_step == 3
    assert all(not torch.equal(p, found[name]) for name, p in multimax.reweighting_parameters(resumed))


# ---- sentence-transformers ----


def test_sentence_transformers(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import sentence_transformers as library

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "sleeps", "here", "and", "there"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    model = BY_NAME["BERT"].build().bert
    for folder in ("plain", "saved"):
        (tmp_path / folder).mkdir()
    model.save_pretrained(tmp_path / "plain")
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "plain")
    sentences = ["a cat sleeps", "here and there"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        embedder = library.SentenceTransformer(str(tmp_path / "plain"), device="cpu")
        before = torch.tensor(embedder.encode(sentences))
        assert len(multimax.convert_(embedder)) == 2
        torch.testing.assert_close(torch.tensor(embedder.encode(sentences)), before, rtol=1e-5, atol=1e-6)
        move(embedder)
        expected = torch.tensor(embedder.encode(sentences))
        assert (expected - before).abs().max() > 1e-4
        embedder.save(str(tmp_path / "saved"))
        with pytest.raises(ValueError, match=r"load with multimax.from_pretrained"):
            library.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
        again = library.SentenceTransformer(str(tmp_path / "plain"), device="cpu")
        again[0].model = multimax.from_pretrained(AutoModel, tmp_path / "saved")
        assert torch.equal(torch.tensor(again.encode(sentences)), expected)
        assert not torch.equal(torch.tensor(copy.deepcopy(embedder).encode(sentences)), before)
