"""Tests of conversion with timm; test_timm.py runs them where timm can be imported."""

import contextlib
import copy
import importlib
import io
import math
import runpy
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import RelPosBias
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.overrides import _get_current_function_mode_stack as active_modes

import multimax
import wrapping
from multimax import reweighting
from multimax.convert.outline import Outline
from multimax.convert.timm import CONVERTER, FORMS, REFUSED
from places import ROOT

SOFTMAX = (Tensor.softmax, torch.softmax, F.softmax)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape)


def rope(length: int, size: int) -> Tensor:
    """Sine and cosine of random angles, (length, 2 * size)."""
    angles = 3 * randn(length, size)
    return torch.cat([angles.sin(), angles.cos()], -1)


BIAS4 = partial(RelPosBias, window_size=(4, 4))
# Small modules of every class that is converted, and what their forward takes.
CASES: dict[str, Callable[[Any], tuple[nn.Module, tuple[Any, ...]]]] = {
    "layers.attention.Attention": lambda c: (
        c(32, 4, qkv_bias=True, qk_norm=True, scale_norm=True, gated=True, norm_layer=nn.LayerNorm),
        (randn(2, 7, 32),),
    ),
    "layers.attention.AttentionRope": lambda c: (
        c(32, 4, qkv_fused=False, num_kv_heads=2, gated=True),
        (randn(2, 7, 32), rope(6, 8)),
    ),
    "layers.attention2d.Attention2d": lambda c: (c(32, num_heads=4), (randn(2, 32, 3, 4),)),
    "layers.attention2d.MultiQueryAttention2d": lambda c: (c(32, num_heads=4, kv_stride=2), (randn(2, 32, 4, 4),)),
    "layers.attention2d.MultiQueryAttentionV2": lambda c: (c(32, num_heads=4, key_dim=8), (randn(2, 32, 3, 4),)),
    "layers.attention_pool.AttentionPoolLatent": lambda c: (c(32, num_heads=4, latent_len=2), (randn(2, 7, 32),)),
    "layers.attention_pool.AttentionPoolPrr": lambda c: (c(32, num_heads=4), (randn(2, 7, 32),)),
    "layers.attention_pool2d.AttentionPool2d": lambda c: (c(32, feat_size=3, head_dim=8), (randn(2, 32, 3, 3),)),
    "layers.attention_pool2d.RotAttentionPool2d": lambda c: (c(32, ref_feat_size=3, head_dim=8), (randn(2, 32, 3, 3),)),
    "layers.bottleneck_attn.BottleneckAttn": lambda c: (c(32, feat_size=(3, 4), num_heads=4), (randn(2, 32, 3, 4),)),
    "layers.halo_attn.HaloAttn": lambda c: (
        c(32, feat_size=(4, 4), num_heads=4, block_size=2, halo_size=1),
        (randn(2, 32, 4, 4),),
    ),
    "layers.non_local_attn.NonLocalAttn": lambda c: (c(32, rd_channels=8), (randn(2, 32, 3, 4),)),
    "layers.other_pool.SimPool1d": lambda c: (c(32, num_heads=4), (randn(2, 7, 32),)),
    "layers.other_pool.SimPool2d": lambda c: (c(32, num_heads=4), (randn(2, 32, 3, 4),)),
    "models.beit.Attention": lambda c: (
        c(32, 4, qkv_bias=True, window_size=(3, 3)),
        (randn(2, 10, 32), randn(1, 4, 10, 10)),
    ),
    "models.cait.ClassAttn": lambda c: (c(32, 4), (randn(2, 7, 32),)),
    "models.convit.MHSA": lambda c: (c(32, 4), (randn(2, 7, 32),)),
    "models.cpubone.ConvAttention": lambda c: (c(128, att_stride=2, att_kernel=3), (randn(2, 128, 6, 6),)),
    "models.crossvit.CrossAttention": lambda c: (c(32, 4), (randn(2, 7, 32),)),
    "models.davit.ChannelAttention": lambda c: (c(32, 4), (randn(2, 7, 32),)),
    "models.davit.ChannelAttentionV2": lambda c: (c(32, 4), (randn(2, 7, 32),)),
    "models.davit.WindowAttention": lambda c: (c(32, (3, 3), 4), (randn(2, 9, 32),)),
    "models.edgenext.CrossCovarianceAttn": lambda c: (c(32, 4), (randn(2, 7, 32),)),
    "models.efficientformer.Attention": lambda c: (c(32, 8, 4, resolution=3), (randn(2, 9, 32),)),
    "models.efficientformer_v2.Attention2dDownsample": lambda c: (
        c(32, 8, 4, resolution=(4, 4), out_dim=32),
        (randn(2, 32, 4, 4),),
    ),
    "models.efficientvit_msra.CascadedGroupAttention": lambda c: (
        c(32, 8, 4, attn_ratio=1, resolution=4, kernels=(3, 3, 3, 3)),
        (randn(2, 32, 4, 4),),
    ),
    "models.eva.EvaAttention": lambda c: (
        c(32, 4, norm_layer=nn.LayerNorm, qk_norm=True),
        (randn(2, 7, 32), rope(6, 8)),
    ),
    "models.fastvit.Attention": lambda c: (c(32, head_dim=8), (randn(2, 32, 3, 4),)),
    "models.gcvit.WindowAttentionGlobal": lambda c: (c(32, 4, (3, 3)), (randn(4, 9, 32), randn(2, 3, 3, 32))),
    "models.gemma4_vit.Gemma4Attention": lambda c: (
        c(32, 4, head_dim=8, num_kv_heads=2),
        (randn(2, 7, 32), randn(2, 7, 8), randn(2, 7, 8)),
    ),
    "models.hiera.MaskUnitAttention": lambda c: (
        c(32, 32, 4, q_stride=2, window_size=2, use_mask_unit_attn=True),
        (randn(2, 12, 32),),
    ),
    "models.hieradet_sam2.MultiScaleAttention": lambda c: (c(32, 32, 4, nn.MaxPool2d(2)), (randn(2, 4, 4, 32),)),
    "models.iformer.SHMA": lambda c: (c(32, window_size=2), (randn(2, 32, 3, 4),)),
    "models.levit.Attention": lambda c: (c(32, 8, 4, resolution=(3, 3)), (randn(2, 9, 32),)),
    "models.levit.AttentionDownsample": lambda c: (c(32, 48, 8, 4, resolution=(4, 4)), (randn(2, 16, 32),)),
    "models.lowformer.ConvAttention": lambda c: (c(128, att_stride=2, att_kernel=3), (randn(2, 128, 6, 6),)),
    "models.maxxvit.Attention2d": lambda c: (c(32, dim_head=8, rel_pos_cls=BIAS4), (randn(2, 32, 4, 4),)),
    "models.maxxvit.AttentionCl": lambda c: (c(32, dim_head=8, rel_pos_cls=BIAS4), (randn(2, 4, 4, 32),)),
    "models.metaformer.Attention": lambda c: (c(32, head_dim=8), (randn(2, 7, 32),)),
    "models.mvitv2.MultiScaleAttention": lambda c: (
        c(32, 32, (4, 4), 4, kernel_kv=(3, 3), stride_kv=(2, 2)),
        (randn(2, 17, 32), [4, 4]),
    ),
    "models.nest.Attention": lambda c: (c(32, 4), (randn(2, 3, 7, 32),)),
    "models.nextvit.EfficientAttention": lambda c: (c(32, head_dim=8, sr_ratio=2), (randn(2, 16, 32),)),
    "models.pvt_v2.Attention": lambda c: (c(32, 4, sr_ratio=2), (randn(2, 16, 32), [4, 4])),
    "models.shvit.SHSA": lambda c: (c(32, 8, 16), (randn(2, 32, 3, 4),)),
    "models.swin_transformer.WindowAttention": lambda c: (
        c(32, 4, window_size=(3, 3)),
        (randn(6, 9, 32), window_mask(3, 9)),
    ),
    "models.swin_transformer_v2.WindowAttention": lambda c: (
        c(32, (3, 3), 4),
        (randn(6, 9, 32), window_mask(3, 9)),
    ),
    "models.swin_transformer_v2_cr.WindowMultiHeadAttention": lambda c: (
        c(32, 4, (3, 3)),
        (randn(6, 9, 32), window_mask(3, 9)),
    ),
    "models.tiny_vit.Attention": lambda c: (c(32, 8, 4, resolution=(3, 3)), (randn(2, 9, 32),)),
    "models.tnt.Attention": lambda c: (c(32, 16, 4), (randn(2, 7, 32),)),
    "models.twins.GlobalSubSampleAttn": lambda c: (c(32, 4, sr_ratio=2), (randn(2, 16, 32), (4, 4))),
    "models.twins.LocallyGroupedAttn": lambda c: (c(32, 4, ws=2), (randn(2, 12, 32), (3, 4))),
    "models.visformer.Attention": lambda c: (c(32, 4), (randn(2, 32, 3, 4),)),
    "models.vision_transformer.ParallelScalingBlock": lambda c: (c(32, 4, qkv_bias=True), (randn(2, 7, 32),)),
    "models.vision_transformer_relpos.RelPosAttention": lambda c: (
        c(32, 4, rel_pos_cls=BIAS4, qk_norm=True),
        (randn(2, 16, 32),),
    ),
    "models.vision_transformer_sam.Attention": lambda c: (
        c(32, 4, use_rel_pos=True, input_size=(3, 4)),
        (randn(2, 3, 4, 32),),
    ),
    "models.volo.Attention": lambda c: (c(32, 4), (randn(2, 3, 4, 32),)),
    "models.volo.ClassAttention": lambda c: (c(32, 4), (randn(2, 7, 32),)),
    "models.volo.OutlookAttention": lambda c: (c(32, 4, stride=2), (randn(2, 4, 4, 32),)),
    "models.xcit.XCA": lambda c: (c(32, 4), (randn(2, 7, 32),)),
}
WITH_HEADS = [name for name in CASES if FORMS[name].heads]


def window_mask(windows: int, size: int) -> Tensor:
    """As timm makes them for shifted windows: -100 where two positions have nothing to do with each other."""
    group = torch.randint(2, (windows, size))
    return torch.where(group[:, :, None] == group[:, None, :], 0.0, -100.0)


def class_of(known_as: str) -> Any:
    place, _, name = f"timm.{known_as}".rpartition(".")
    return getattr(importlib.import_module(place), name)


def made(known_as: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """A module in evaluation, none of whose parameters is as initialised, and its inputs."""
    module, inputs = CASES[known_as](class_of(known_as))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    module.eval()
    return module, inputs


def outputs(module: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
    out = module(*inputs)
    return out[0] if isinstance(out, tuple) else out


def gradients(out: Tensor, *of: Tensor) -> Tensor:
    """Of all given tensors, as one vector."""
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    found = torch.autograd.grad((out * weights).sum(), of, allow_unused=True)
    return torch.cat([g.flatten() for g in found if g is not None])


class Calls(TorchFunctionMode):
    """Counts softmax and torch's attention."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is F.scaled_dot_product_attention or func in SOFTMAX
        return func(*args, **(kwargs or {}))


def sigma(x: Tensor, coefs: Tensor, knots: Tensor) -> Tensor:
    """The formula. Parameters per head, (H, N, 2), are for scores (..., H, queries, keys)."""
    result = x
    for n in range(coefs.shape[-2]):
        (c, e), (b, d) = (t[..., n, :, None, None].unbind(-3) for t in (coefs, knots))
        result = result + c * (b - x).clamp(min=0) ** (n + 1) + e * (x - d).clamp(min=0) ** (n + 1)
    return result


class Formula(TorchFunctionMode):
    """Softmax of sigma instead of softmax, in timm's branch without fused attention, where what is masked is -100
    lower."""

    def __init__(self, coefs: Tensor, knots: Tensor, masked: bool) -> None:
        super().__init__()
        self.coefs, self.knots, self.masked = coefs, knots, masked

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not F.scaled_dot_product_attention
        if func not in SOFTMAX:
            return func(*args, **(kwargs or {}))
        scores = args[0]
        mask = torch.where(scores < -50, -100.0, 0.0).double() if self.masked else torch.zeros_like(scores)
        modulated = sigma(scores - mask, self.coefs, self.knots) + mask
        weights = torch.exp(modulated - modulated.amax(-1, keepdim=True))
        return weights / weights.sum(-1, keepdim=True)


def by_formula(module: nn.Module, inputs: tuple[Any, ...], coefs: Tensor, knots: Tensor) -> Tensor:
    """What a module of timm, not converted, computes with the formula, in float64."""
    module = copy.deepcopy(module).double()
    if hasattr(module, "fused_attn"):
        module.fused_attn = False
    inputs = tuple(x.double() if isinstance(x, Tensor) else x for x in inputs)
    with Formula(coefs, knots, masked=hasattr(module, "window_size") and len(inputs) == 2):
        return outputs(module, inputs)


def move(module: nn.Module) -> list[multimax.MultiMax]:
    """Gives every MultiMax other parameters, such that most scores are modulated."""
    found = [m for m in module.modules() if isinstance(m, multimax.MultiMax)]
    for function in found:
        with torch.no_grad():
            function.coefs.copy_(torch.tensor([[-0.7, -0.4], [-0.05, 0.04]]) + 0.1 * torch.randn_like(function.coefs))
            function.knots.copy_(torch.tensor([[0.2, 0.3], [-0.1, 0.5]]) + 0.1 * torch.randn_like(function.knots))
    return found


@pytest.fixture(autouse=True)
def one_thread(same_start: None) -> None:
    """All is small here, and threads that wait for each other are slow where others compute as well."""
    torch.set_num_threads(1)


def test_every_class_that_is_converted_is_tested() -> None:
    assert set(CASES) == {name for name in FORMS if class_of(name).__module__ == f"timm.{name.rpartition('.')[0]}"}
    assert not set(REFUSED) & set(FORMS)


@pytest.mark.parametrize("known_as", CASES)
def test_identity_is_the_same_and_reverts(known_as: str) -> None:
    module, inputs = made(known_as)
    original, keys = copy.deepcopy(module), list(module.state_dict())
    before = {k: copy.copy(v) for k, v in module.__dict__.items()}
    inputs[0].requires_grad_()
    expected = outputs(original, inputs)
    report = multimax.convert_(module)
    assert [layer.was for layer in report] == [f"timm.{type(original).__name__}"]
    assert list(module.state_dict()) == [*keys, "multimax.coefs", "multimax.knots"]
    with Calls() as calls:
        out = outputs(module, inputs)
    assert calls.count == 0
    size = max(1.0, expected.abs().max().item())
    assert (out - expected).abs().max() < 2e-6 * size
    kept = [p for name, p in module.named_parameters() if not name.startswith("multimax")]
    g, wanted = gradients(out, inputs[0], *kept), gradients(expected, inputs[0], *original.parameters())
    assert (g - wanted).norm() <= 1e-5 * wanted.norm()

    multimax.revert_(module)
    assert type(module) is type(original)
    assert {k: v for k, v in module.__dict__.items() if "cache" not in k} == {
        k: v for k, v in before.items() if "cache" not in k
    }
    assert list(module.state_dict()) == keys
    assert torch.equal(outputs(module, inputs), expected)


@pytest.mark.parametrize("known_as", CASES)
def test_formula(known_as: str) -> None:
    module, inputs = made(known_as)
    original = copy.deepcopy(module)
    multimax.convert_(module)
    (function,) = move(module)
    out = outputs(module, inputs)
    coefs, knots = (t.detach().double().requires_grad_() for t in (function.coefs, function.knots))
    expected = by_formula(original, inputs, coefs, knots)
    softmax = outputs(original, inputs)
    size = expected.abs().max()
    assert (softmax - expected).abs().max() > 1e-3 * size  # that it makes a difference
    assert (out - expected).abs().max() < 1e-5 * size
    g, wanted = gradients(out, function.coefs, function.knots), gradients(expected, coefs, knots)
    assert (g - wanted).norm() <= 1e-4 * wanted.norm()


@pytest.mark.parametrize("known_as", WITH_HEADS)
def test_formula_with_parameters_per_head(known_as: str) -> None:
    module, inputs = made(known_as)
    original = copy.deepcopy(module)
    multimax.convert_(module, per_head=True)
    (function,) = move(module)
    heads = getattr(original, FORMS[known_as].heads or "")
    assert heads > 1
    assert function.coefs.shape == (heads, 2, 2)
    expected = by_formula(original, inputs, function.coefs.detach().double(), function.knots.detach().double())
    assert (outputs(module, inputs) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("known_as", sorted(set(CASES) - set(WITH_HEADS)))
def test_no_parameters_per_head_where_heads_are_elsewhere(known_as: str) -> None:
    module, _ = made(known_as)
    with pytest.raises(ValueError, match="its number of heads is not known"):
        multimax.convert_(module, per_head=True)


@pytest.mark.parametrize("kind", ["bool", "numbers", "causal"])
def test_masks_come_after_sigma(kind: str) -> None:
    module = timm.layers.Attention(32, 4).eval()
    multimax.convert_(module)
    (function,) = move(module)
    x, part = randn(2, 7, 32), torch.rand(2, 1, 7, 7) < 0.7
    part[..., 0] = True
    numbers = torch.where(part, randn(2, 1, 7, 7), -torch.inf)
    if kind == "causal":
        part = torch.ones(7, 7, dtype=torch.bool).tril()
    q, k, v = module.qkv(x).reshape(2, 7, 3, 4, 8).permute(2, 0, 3, 1, 4).double()
    scores = q @ k.mT / math.sqrt(8)
    s = sigma(scores, function.coefs.double(), function.knots.double())
    s = s + numbers if kind == "numbers" else s.masked_fill(~part, -torch.inf)
    expected = module.proj((s.softmax(-1) @ v).transpose(1, 2).reshape(2, 7, 32).float())
    options = {"bool": {"attn_mask": part}, "numbers": {"attn_mask": numbers}, "causal": {"is_causal": True}}[kind]
    assert (module(x, **options) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("known_as", [name for name in CASES if FORMS[name].windows])
def test_nothing_comes_from_outside_a_shifted_window(known_as: str) -> None:
    """Before sigma, the -100 of the mask would be lifted by a flat lower slope, and be hardly lower than the rest."""
    module, (x, mask) = made(known_as)
    multimax.convert_(module)
    function = module.multimax
    with torch.no_grad():
        function.coefs.copy_(torch.tensor([[0.99, 0.0], [0.0, 0.0]]))
    x.requires_grad_()
    module(x, mask)[1, 2].sum().backward()
    part = mask[1, 2] == 0
    assert not part.all()
    assert (x.grad[1][part] != 0).any()
    assert x.grad[1][~part].abs().max() < 1e-20
    assert not x.grad[[0, 2, 3, 4, 5]].any()


MODELS: dict[str, dict[str, Any]] = {
    "deit_tiny_patch16_224": {"depth": 2, "img_size": 32},
    "deit_tiny_distilled_patch16_224": {"depth": 2, "img_size": 32},
    "deit3_small_patch16_224": {"depth": 2, "img_size": 32},
    "eva02_tiny_patch14_224": {"depth": 2, "img_size": 28},
    "vit_small_patch16_rope_224": {"depth": 2, "img_size": 32},
    "vit_base_patch16_siglip_224": {"depth": 2, "img_size": 32, "embed_dim": 32, "num_heads": 2},
    "beit_base_patch16_224": {"depth": 2, "img_size": 32, "embed_dim": 32, "num_heads": 2},
    "swin_tiny_patch4_window7_224": {
        "img_size": 64,
        "depths": (2, 2),
        "embed_dim": 16,
        "num_heads": (2, 4),
        "window_size": 4,
    },
    "swinv2_tiny_window8_256": {
        "img_size": 64,
        "depths": (2, 2),
        "embed_dim": 16,
        "num_heads": (2, 4),
        "window_size": 4,
    },
    "davit_tiny": {"depths": (1, 1), "embed_dims": (32, 64), "num_heads": (2, 4)},
    "xcit_nano_12_p16_224": {"depth": 2, "img_size": 32},
    "coatnet_nano_rw_224": {"img_size": 64},
    "pvt_v2_b0": {},
}


def model_of(name: str, **options: Any) -> tuple[nn.Module, Tensor]:
    """A model in evaluation with random weights, also in its head, and images for it."""
    options = MODELS.get(name, {}) | options
    model = timm.create_model(name, num_classes=7, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    size = options.get("img_size", 64)
    return model, randn(2, 3, size, size)


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    model, images = model_of(name)
    before, expected = copy.deepcopy(model.state_dict()), model(images)
    unfused = ("ChannelAttention", "WindowAttention")
    names = [n for n, m in model.named_modules() if hasattr(m, "fused_attn") or type(m).__name__ in unfused]
    heads = [n for n in ("head", "head.fc", "head_dist") if type(dict(model.named_modules()).get(n)) is nn.Linear]
    report = multimax.convert_(model, where=("attention", "output"), probe=images)
    assert [layer.name for layer in report if layer.kind == "attention"] == names
    assert [layer.name for layer in report if layer.kind == "output"] == heads
    assert not report.left
    assert {f"{n}.multimax.{parameter}" for n in names + heads for parameter in ("coefs", "knots")} == (
        set(model.state_dict()) - set(before)
    )
    with Calls() as calls:
        out = model(images)
    assert calls.count == 0
    assert (out - expected).abs().max() < 2e-6 * max(1.0, expected.abs().max().item())
    move(model)
    assert (model(images) - expected).abs().max() > 1e-4
    multimax.revert_(model)
    assert torch.equal(model(images), expected)
    assert list(model.state_dict()) == list(before)


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "deit_small_patch16_224", "deit_base_patch16_224"])
def test_the_papers_models_and_published_checkpoints(name: str) -> None:
    """No class token, the mean over patches after the norm, no biases in qkv, MultiMax in all layers and the output."""
    options = {"img_size": 32, "depth": 2, "class_token": False, "global_pool": "avg"}
    model, images = model_of(name, fc_norm=False, qkv_bias=False, **options)
    assert model.pos_embed.shape[1] == 4
    multimax.convert_(model, where=("attention", "output"))
    published = {key: value for key, value in model.state_dict().items() if "multimax" not in key}
    for place in ("blocks.0.attn.", "blocks.1.attn.", ""):
        published |= {f"{place}ranges": 0.3 * randn(4), f"{place}ts": 0.3 * randn(4)}
    state = multimax.from_published(published)
    for parameter in ("coefs", "knots"):
        state[f"head.multimax.{parameter}"] = state.pop(
            f"multimax.{parameter}"
        )  # the model's own are those of its output
    model.load_state_dict(state)
    out = model(images)

    def selu(x: Tensor, place: str) -> Tensor:
        b1, d1, b2, d2 = published[f"{place}ranges"]
        t = published[f"{place}ts"]
        linear = t[0] * F.relu(b1 - x) + t[1] * F.relu(x - d1)
        return x + linear + t[2] * F.relu(b2 - x) ** 2 + t[3] * F.relu(x - d2) ** 2

    x = model.patch_embed(images) + model.pos_embed
    for i, block in enumerate(model.blocks):
        q, k, v = block.attn.qkv(block.norm1(x)).reshape(2, 4, 3, block.attn.num_heads, 64).permute(2, 0, 3, 1, 4)
        weights = selu(q @ k.mT / 8, f"blocks.{i}.attn.").softmax(-1)
        x = x + block.attn.proj((weights @ v).transpose(1, 2).flatten(2))
        x = x + block.mlp(block.norm2(x))
    expected = selu(F.linear(model.norm(x).mean(1), model.head.weight, model.head.bias), "")
    assert (out - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_checkpoint_from_before_makes_it_softmax() -> None:
    model, images = model_of("deit_tiny_patch16_224")
    state, expected = copy.deepcopy(model.state_dict()), model(images)
    multimax.convert_(model, where=("attention", "output"))
    move(model)
    model.load_state_dict(state)
    assert (model(images) - expected).abs().max() < 2e-6


def test_a_checkpoint_from_after() -> None:
    model, images = model_of("swin_tiny_patch4_window7_224")
    multimax.convert_(model)
    move(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other, _ = model_of("swin_tiny_patch4_window7_224")
    multimax.convert_(other)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(images), model(images))


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_copies_and_pickles_of_the_whole_model(name: str) -> None:
    model, images = model_of(name)
    multimax.convert_(model)
    move(model)
    expected = model(images)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(other(images), expected)
        with torch.no_grad():
            next(m for m in other.modules() if isinstance(m, multimax.MultiMax)).coefs.zero_()
        assert not torch.equal(other(images), expected)
        assert torch.equal(model(images), expected)
        multimax.revert_(other)
        with Calls() as calls:
            other(images)
        assert calls.count > 0


@pytest.mark.parametrize(
    ("known_as", "sizes"),
    [("layers.attention.Attention", (32, 4)), ("models.xcit.XCA", (32, 4)), ("models.tnt.Attention", (32, 16, 4))],
)
def test_dropout_in_training_alone(known_as: str, sizes: tuple[int, ...]) -> None:
    module = class_of(known_as)(*sizes, attn_drop=0.3).eval()
    multimax.convert_(module)
    move(module)
    many = randn(1, 7, 32).expand(1000, -1, -1)
    with torch.no_grad():
        expected = _before_proj(module, many)
        assert torch.equal(expected, _before_proj(module, many))
        module.train()
        seen = _before_proj(module, many)
    assert seen.std(0).mean() > 0.01
    assert ((seen - expected).mean(0) / (seen.std(0) / math.sqrt(1000) + 1e-5)).abs().max() < 5


def _before_proj(module: nn.Module, x: Tensor) -> Tensor:
    """What the last projection gets, in which dropout keeps the mean."""
    seen = []
    handle = module.proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    module(x)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"])
def test_autocast(name: str) -> None:
    model, images = model_of(name)
    expected = model(images)
    with torch.autocast("cpu", torch.bfloat16):
        before = model(images)
    multimax.convert_(model)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(images)
        out.float().sum().backward()
    assert out.dtype == before.dtype
    assert (out - expected).norm() < 2 * (before - expected).norm() + 1e-3 * expected.norm()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"])
def test_compiles_as_one_graph(name: str) -> None:
    model, images = model_of(name)
    multimax.convert_(model)
    move(model)
    expected = model(images)
    wanted = gradients(expected, *model.parameters())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    out = compiled(images)
    assert (out - expected).abs().max() < 1e-5
    g = gradients(out, *model.parameters())
    assert (g - wanted).norm() < 1e-4 * wanted.norm()


@pytest.mark.parametrize("known_as", ["layers.attention.Attention", "models.swin_transformer.WindowAttention"])
@pytest.mark.parametrize("name", ["sparsemax", "entmax15"])
def test_other_functions(known_as: str, name: str) -> None:
    module, inputs = made(known_as)
    original = copy.deepcopy(module)
    softmax = outputs(original, inputs)
    original.fused_attn = False
    multimax.convert_(module, reweight=name)
    assert isinstance(module.reweight, nn.Module)

    class Other(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return reweighting.get(name)(args[0], dim=-1) if func in SOFTMAX else func(*args, **(kwargs or {}))

    with Other():
        expected = outputs(original, inputs)
    assert (outputs(module, inputs) - expected).abs().max() < 1e-5 * expected.abs().max()
    multimax.revert_(module)
    assert torch.equal(outputs(module, inputs), softmax)


def test_training_step_with_gradient_checkpointing() -> None:
    model, images = model_of("deit_tiny_patch16_224")
    multimax.convert_(model)
    move(model)
    model.train()
    model(images).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.set_grad_checkpointing()
    model(images).square().sum().backward()
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, wanted)
    assert model.blocks[0].attn.multimax.coefs.grad.any()


@pytest.mark.parametrize("wrapper", [*wrapping.WRAPPERS, "the whole layer"])
def test_wrapped_functions_and_layers(wrapper: str) -> None:
    with wrapping.one_process() if wrapper == "FSDP2" else contextlib.nullcontext():
        _compare_wrapped(wrapper)


def _compare_wrapped(wrapper: str) -> None:
    model, images = model_of("deit_tiny_patch16_224")
    multimax.convert_(model, where=("attention", "output"))
    move(model)
    wrapped = copy.deepcopy(model)
    if wrapper == "the whole layer":
        for block in wrapped.blocks:
            block.attn = wrapping.Passes(block.attn)
        wrapped.head = wrapping.AroundLinear(wrapped.head)
    else:
        count = wrapping.wrap(wrapped, wrapping.WRAPPERS[wrapper])
        assert count == len(model.blocks) + 1
    expected, got = model(images), wrapped(images)
    wrapping.same(got, expected)
    for out in (expected, got):
        out.square().sum().backward()
    gradients = wrapping.trained(model)
    assert len(gradients) == 2 * (len(model.blocks) + 1)
    for gradient, other in zip(gradients, wrapping.trained(wrapped), strict=True):
        torch.testing.assert_close(other, gradient, rtol=1e-5, atol=1e-6)


def test_nothing_is_left_active() -> None:
    """Not after a forward, not after an error in it, and not in other threads."""
    module, (x,) = made("layers.attention.Attention")
    plain = copy.deepcopy(module)
    expected = plain(x)
    multimax.convert_(module)
    move(module)
    module(x)
    with pytest.raises(RuntimeError):
        module(randn(2, 7, 31))
    assert active_modes() == []
    entered, done, found = threading.Event(), threading.Event(), []

    def wait(*args: Any) -> None:
        entered.set()
        done.wait(10)

    def other() -> None:
        entered.wait(10)
        found.append(plain(x))
        done.set()

    module.proj.register_forward_pre_hook(wait)
    thread = threading.Thread(target=other)
    thread.start()
    module(x)
    thread.join()
    assert torch.equal(found[0], expected)


@pytest.mark.parametrize(
    ("name", "options", "layers", "words"),
    [
        ("cait_xxs24_224", {"img_size": 32, "depth": 2}, ["blocks.0.attn", "blocks.1.attn"], "mixes the heads"),
        (
            "convit_tiny",
            {"img_size": 32, "depth": 2, "local_up_to_layer": 1},
            ["blocks.0.attn"],
            "of positions",
        ),
        ("vit_dwee_patch16_reg1_gap_256", {"img_size": 32, "depth": 1}, ["blocks.0.attn"], "difference of two"),
        ("resnest14d", {}, [f"layer{i}.0.conv2.rsoftmax" for i in (1, 2, 3, 4)], "not over scores"),
    ],
)
def test_what_is_not_plain_is_refused_by_name(name: str, options: Any, layers: list[str], words: str) -> None:
    model, _ = model_of(name, **options)
    with pytest.raises(ValueError, match=f"'{layers[0]}': .*{words}") as error:
        multimax.convert_(model)
    assert all(f"'{layer}'" in str(error.value) for layer in layers)
    assert [site.name for site in CONVERTER.sites(Outline(model)) if site.why_not] == layers


def test_what_is_plain_beside_it() -> None:
    model, images = model_of("cait_xxs24_224", img_size=32, depth=2)
    expected = model(images)
    report = multimax.convert_(model, strict=False)
    assert {layer.was for layer in report} == {"timm.ClassAttn"}
    assert {layer.was for layer in report.left} == {"timm.TalkingHeadAttn"}
    assert (model(images) - expected).abs().max() < 2e-6


@pytest.fixture
def newer() -> Iterator[ModuleType]:
    """A module of a later timm, with attention that nobody has looked at."""
    module = ModuleType("timm.models.newer")
    code = """
import torch
from torch import nn
def attend(x):
    return x.softmax(dim=-1)
class Mixer(nn.Module):
    def forward(self, x):
        return attend(x)
class Other(nn.Module):
    def forward(self, x):
        return x.sigmoid()
"""
    exec(code, module.__dict__)
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_attention_that_is_not_known_is_refused(newer: ModuleType) -> None:
    model = nn.Sequential(newer.Other(), newer.Mixer(), timm.layers.Attention(32, 4))
    assert [(site.name, site.why_not) for site in CONVERTER.sites(Outline(model))] == [
        ("1", "timm's Mixer is not known to be plain softmax attention"),
        ("2", None),
    ]
    with pytest.raises(ValueError, match="'1': timm's Mixer is not known"):
        multimax.convert_(model)


class Mine(timm.layers.Attention):
    pass


def test_what_may_compute_anything_is_refused() -> None:
    with pytest.raises(ValueError, match="Mine, a subclass of timm's Attention, may compute anything"):
        multimax.convert_(nn.Sequential(Mine(32, 4)))
    module = timm.layers.Attention(32, 4)
    module.forward = lambda x: x
    with pytest.raises(ValueError, match="its forward was replaced"):
        multimax.convert_(nn.Sequential(module))


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda self, x: x, "one softmax attention in a forward of timm's Attention, got 0"),
        (lambda self, x: x.softmax(-1), "expected scaled_dot_product_attention .* got softmax"),
        (lambda self, x: self.twice(self.twice(x)), "one softmax attention in a forward of timm's Attention, got 2"),
    ],
)
def test_another_version_of_timm(monkeypatch: pytest.MonkeyPatch, forward: Any, words: str) -> None:
    """A class of a known name that computes something else is an error, and not softmax."""
    monkeypatch.setattr(
        timm.layers.Attention, "twice", lambda self, x: F.scaled_dot_product_attention(x, x, x), raising=False
    )
    monkeypatch.setattr(timm.layers.Attention, "forward", forward)
    module = timm.layers.Attention(32, 4)
    multimax.convert_(module)
    with pytest.raises(RuntimeError, match=words):
        module(randn(2, 7, 32))


class Around(nn.Module):
    """A model that is not timm's: what it does with the logits is not known."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def get_classifier(self) -> nn.Module:
        return self.inner.get_classifier()


def test_output_layers() -> None:
    names = {
        "deit_tiny_patch16_224": ["head"],
        "deit_tiny_distilled_patch16_224": ["head", "head_dist"],
        "swin_tiny_patch4_window7_224": ["head.fc"],
    }
    for name, expected in names.items():
        assert CONVERTER.output_names(Outline(model_of(name)[0])) == expected
    without = timm.create_model("deit_tiny_patch16_224", num_classes=0, depth=1)
    with pytest.raises(ValueError, match="got none that could be found"):
        multimax.convert_(without, where=("output",))
    assert CONVERTER.output_names(Outline(Around(model_of("deit_tiny_patch16_224")[0]))) == []
    with pytest.raises(ValueError, match=r"'head.0': .*mean of several"):
        multimax.convert_(model_of("crossvit_tiny_240")[0], where=("output",))
    with pytest.raises(ValueError, match=r"'head': .*aux_head"):
        multimax.convert_(timm.create_model("volo_d1_224"), where=("output",))


def test_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["convert_timm.py", "--model", "deit_tiny_patch16_224", "--images", "1"])
    runpy.run_path(str(ROOT / "examples" / "convert_timm.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "13 layers converted, 104 parameters gained" in printed
