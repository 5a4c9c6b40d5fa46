"""LoRA of PEFT on torch.nn's attention, which reads how its weights are kept, and changes them around each call."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import multimax
from wrapping import move

X = torch.randn(3, 6, 32, generator=torch.Generator().manual_seed(1))
PADDING = torch.arange(6) >= torch.tensor([6, 2, 4])[:, None]
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # it is a prototype


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True), 2)


def adapted(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(target_modules=["self_attn"], init_lora_weights=False))


def slow(model: nn.Module) -> torch.Tensor:
    """By the modules themselves: torch's fast path would read the weights without the adapter."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            out: torch.Tensor = model(X, src_key_padding_mask=PADDING)
            return out[~PADDING]
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_the_adapter_counts_in_evaluation() -> None:
    plain, model = encoder(), encoder()
    multimax.convert_(model)
    before = slow(model.eval())
    expected = slow(adapted(plain).eval())
    assert (expected - before).abs().max() > 1e-2
    model = adapted(model).eval()
    with torch.no_grad():
        found = model(X, src_key_padding_mask=PADDING)[~PADDING]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)  # at zero coefs
    move(model)
    with torch.no_grad():
        moved = model(X, src_key_padding_mask=PADDING)[~PADDING]
    assert (moved - found).abs().max() > 1e-3
    torch.testing.assert_close(moved, slow(model), rtol=1e-4, atol=1e-5)


def test_functions_inside_are_frozen_or_named() -> None:
    """PEFT saves nothing inside of a layer that LoRA takes, and says so itself if it is asked to."""
    model = encoder()
    multimax.convert_(model)
    config = LoraConfig(target_modules=["self_attn"], modules_to_save=["multimax"])
    with pytest.raises(ValueError, match="not the intended behavior"):
        get_peft_model(copy.deepcopy(model), config)
    model = adapted(model).train()
    assert not any(p.requires_grad for _, p in multimax.reweighting_parameters(model))
    for _, parameter in multimax.reweighting_parameters(model):
        parameter.requires_grad_()
    with pytest.warns(UserWarning, match="outside of it: they are not saved with it"):
        model(X).square().mean().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert "in_proj_weight" not in name


def test_merged() -> None:
    model = encoder()
    multimax.convert_(model)
    model = adapted(model).eval()
    move(model)
    with torch.no_grad():
        expected = model(X)
        merged = model.merge_and_unload()
        assert not any("lora" in name for name, _ in merged.named_modules())
        torch.testing.assert_close(merged(X), expected, rtol=1e-4, atol=1e-5)
