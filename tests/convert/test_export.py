"""Converted models outside of Python and of this library: torch.export, AOTInductor, ONNX."""

from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import multimax
from architectures import ARCHITECTURES
from machine import needs_kernels
from wrapping import move

ANY = torch.export.Dim.DYNAMIC
BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
NAMES = ("ViT", "BERT", "GPT2")
pytestmark = [
    needs_kernels,
    pytest.mark.filterwarnings("ignore:.*torchvision:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the exporters' own parts
]


class Logits(nn.Module):
    """A model as a function of tensors."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return self.model(x).logits
        return self.model(x, attention_mask=mask, use_cache=False).logits


def model_of(name: str) -> nn.Module:
    model = BY_NAME[name].build()
    multimax.convert_(model, where=("attention", "output"))
    move(model)
    return Logits(model).eval()


def batch(name: str, size: int, length: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(size)
    if name == "ViT":
        pixels = BY_NAME[name].inputs()["pixel_values"]
        return (torch.randn(size, *pixels.shape[1:], generator=generator),)
    mask = torch.ones(size, length, dtype=torch.long)
    mask[-1, length // 2 :] = 0
    return torch.randint(3, 50, (size, length), generator=generator), mask


def dynamic(name: str) -> tuple[dict[int, Any], ...]:
    return ({0: ANY},) if name == "ViT" else ({0: ANY, 1: ANY},) * 2


def operators(program: torch.export.ExportedProgram) -> list[str]:
    named = [node.target.name() for node in program.graph.nodes if hasattr(node.target, "namespace")]
    return [name for name in named if name.startswith("multimax::")]


@pytest.mark.parametrize("name", NAMES)
def test_export(name: str) -> None:
    model, inputs = model_of(name), batch(name, 2, 6)
    program = torch.export.export(model, inputs, dynamic_shapes=dynamic(name))
    assert sorted(set(operators(program))) == ["multimax::attention_forward", "multimax::rows_forward"]
    plain = program.run_decompositions()
    assert operators(plain) == []
    with multimax.implementation("reference"):
        assert operators(torch.export.export(model, inputs, dynamic_shapes=dynamic(name))) == []
    for other in (inputs, batch(name, 3, 9)):
        expected = model(*other)
        torch.testing.assert_close(program.module()(*other), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(plain.module()(*other), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "reweight"), [("BERT", "entmax15"), ("BERT", "sparsemax"), ("Gemma2", "multimax")])
def test_attention_in_blocks_is_exported_for_any_length(name: str, reweight: str) -> None:
    model = BY_NAME[name].build()
    multimax.convert_(model, reweight=reweight)
    program = torch.export.export(Logits(model), batch(name, 2, 6), dynamic_shapes=dynamic(name))
    for other in (batch(name, 2, 6), batch(name, 3, 9)):
        torch.testing.assert_close(program.module()(*other), Logits(model)(*other), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("program", [False, True], ids=["model", "program"])
def test_onnx(name: str, program: bool, tmp_path: Path) -> None:
    model, inputs, path = model_of(name), batch(name, 2, 6), tmp_path / "model.onnx"
    exported: Any = model
    if program:  # with this library's operators in it
        exported = torch.export.export(model, inputs, dynamic_shapes=dynamic(name))
        assert operators(exported)
        onnx = torch.onnx.export(exported, dynamo=True, verbose=False)
    else:
        onnx = torch.onnx.export(model, inputs, dynamic_shapes=dynamic(name), dynamo=True, verbose=False)
    onnx.save(path)
    assert {node.domain for node in onnx.model.graph} == {""}  # ONNX's own
    session = onnxruntime.InferenceSession(path)
    names = [given.name for given in session.get_inputs()]
    for other in (inputs, batch(name, 3, 9)):
        (got,) = session.run(None, {key: value.numpy() for key, value in zip(names, other, strict=True)})
        np.testing.assert_allclose(got, model(*other).detach().numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_aot_inductor(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")  # where inductor refuses operators that stand in torch's tables of decompositions
    model, inputs = model_of(name), batch(name, 2, 6)
    with torch.no_grad():
        program = torch.export.export(model, inputs, dynamic_shapes=dynamic(name))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        with ZipFile(path) as package:
            files = [package.read(name) for name in package.namelist()]
        assert any(b"multimax::attention_forward" in file for file in files)  # the kernels are kept
        compiled = torch._inductor.aoti_load_package(path)
        for other in (inputs, batch(name, 3, 9)):
            torch.testing.assert_close(compiled(*other), model(*other), rtol=1e-5, atol=1e-5)
