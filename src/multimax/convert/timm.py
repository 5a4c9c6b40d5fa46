"""Models of timm: its attention modules run their own code, in which softmax is another function.

A converted module has a class derived from the one it had. Its forward is timm's, with every projection, norm, rotary
embedding and gate of the version that is installed; only the call of ``scaled_dot_product_attention``, or of softmax
where timm has no fused branch, is redirected. A forward that does not reach exactly that call raises.

Channel attention (XCiT, DaViT, EdgeNeXt) has softmax over scores too, between channels: it is converted like any other.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from multimax.convert.library import Library
from multimax.convert.outline import Outline
from multimax.convert.sites import Mark, Site, function_module, mark_of, put_function, take_function
from multimax.convert.softmax_code import computes_softmax, package
from multimax.reweighting.blocks import weights_of
from multimax.reweighting.blockwise import attention
from multimax.reweighting.registry import Reweighting, in_use

SOFTMAX = (Tensor.softmax, torch.softmax, F.softmax)


class Form(NamedTuple):
    """How a class of timm computes attention.

    Args:
        heads: the attribute with the number of heads; None if heads are not the dim before the queries.
        bias: numbers given as the mask of scaled_dot_product_attention are a bias, part of the score.
        scores: softmax is called on scores that include any bias, for lack of a fused branch, or of dropout in it.
        windows: the second argument of forward is the mask of shifted windows, which timm adds to the bias.
        several: softmax is called several times in a forward, once per head.
    """

    heads: str | None = "num_heads"
    bias: bool = False
    scores: bool = False
    windows: bool = False
    several: bool = False


PLAIN, BIAS, SCORES = Form(), Form(bias=True), Form(scores=True)

FORMS = {
    "layers.attention.Attention": PLAIN,
    "layers.attention.AttentionRope": PLAIN,
    "layers.attention2d.Attention2d": PLAIN,
    "layers.attention2d.MultiQueryAttention2d": PLAIN,
    "layers.attention2d.MultiQueryAttentionV2": Form(None, scores=True),
    "layers.attention_pool.AttentionPoolLatent": PLAIN,
    "layers.attention_pool.AttentionPoolPrr": PLAIN,
    "layers.attention_pool2d.AttentionPool2d": PLAIN,
    "layers.attention_pool2d.RotAttentionPool2d": PLAIN,
    "layers.bottleneck_attn.BottleneckAttn": Form(None, scores=True),
    "layers.halo_attn.HaloAttn": Form(None, scores=True),
    "layers.non_local_attn.NonLocalAttn": Form(None, scores=True),
    "layers.other_pool.SimPool1d": PLAIN,
    "layers.other_pool.SimPool2d": PLAIN,
    "models.beit.Attention": BIAS,
    "models.cait.ClassAttn": PLAIN,
    "models.convit.MHSA": SCORES,
    "models.cpubone.ConvAttention": PLAIN,
    "models.crossvit.CrossAttention": SCORES,
    "models.davit.ChannelAttention": SCORES,
    "models.davit.ChannelAttentionV2": Form("groups", scores=True),
    "models.davit.WindowAttention": PLAIN,
    "models.edgenext.CrossCovarianceAttn": SCORES,
    "models.efficientformer.Attention": SCORES,
    "models.efficientformer_v2.Attention2dDownsample": SCORES,
    "models.efficientvit_msra.CascadedGroupAttention": Form(None, scores=True, several=True),
    "models.eva.EvaAttention": PLAIN,
    "models.fastvit.Attention": PLAIN,
    "models.gcvit.WindowAttentionGlobal": SCORES,
    "models.gemma4_vit.Gemma4Attention": PLAIN,
    "models.hiera.MaskUnitAttention": Form(None),
    "models.hieradet_sam2.MultiScaleAttention": PLAIN,
    "models.iformer.SHMA": Form(None),
    "models.levit.Attention": SCORES,
    "models.levit.AttentionDownsample": SCORES,
    "models.lowformer.ConvAttention": PLAIN,
    "models.maxxvit.Attention2d": BIAS,
    "models.maxxvit.AttentionCl": BIAS,
    "models.metaformer.Attention": PLAIN,
    "models.mvitv2.MultiScaleAttention": SCORES,
    "models.nest.Attention": Form(None),
    "models.nextvit.EfficientAttention": PLAIN,
    "models.pvt_v2.Attention": PLAIN,
    "models.shvit.SHSA": Form(None, scores=True),
    "models.swin_transformer.WindowAttention": Form(bias=True, windows=True),
    "models.swin_transformer_v2.WindowAttention": Form(scores=True, windows=True),
    "models.swin_transformer_v2_cr.WindowMultiHeadAttention": Form(scores=True, windows=True),
    "models.tiny_vit.Attention": BIAS,
    "models.tnt.Attention": SCORES,
    "models.twins.GlobalSubSampleAttn": PLAIN,
    "models.twins.LocallyGroupedAttn": PLAIN,
    "models.visformer.Attention": PLAIN,
    "models.vision_transformer.Attention": PLAIN,  # see OLDER
    "models.vision_transformer.ParallelScalingBlock": PLAIN,
    "models.vision_transformer_relpos.RelPosAttention": BIAS,
    "models.vision_transformer_sam.Attention": Form(None, bias=True),
    "models.volo.Attention": PLAIN,
    "models.volo.ClassAttention": SCORES,
    "models.volo.OutlookAttention": Form(None, scores=True),
    "models.xcit.XCA": SCORES,
}

OLDER = ("models.vision_transformer.Attention",)  # where layers.attention.Attention was before timm 1.0.16

_TALKING = "it mixes the heads before and after softmax"
_DIFFERENCE = "it is the difference of two softmax attentions"
_NO_SCORES = "its softmax is not over scores of keys"
REFUSED = {
    "layers.diff_attention.DiffAttention": _DIFFERENCE,
    "layers.global_context.GlobalContext": _NO_SCORES,
    "layers.lambda_layer.LambdaLayer": _NO_SCORES,
    "layers.selective_kernel.SelectiveKernelAttn": _NO_SCORES,
    "layers.split_attn.RadixSoftmax": _NO_SCORES,
    "models.cait.TalkingHeadAttn": _TALKING,
    "models.coat.FactorAttnConvRelPosEnc": _NO_SCORES,
    "models.convit.GPSA": "it mixes the softmax of the scores with a softmax of positions",
    "models.csatv2.SpatialTransformerBlock": "its scores are between the images of a batch",
    "models.efficientformer_v2.Attention2d": _TALKING,
    "models.efficientvim.EfficientViM": _NO_SCORES,
    "models.efficientvim.EfficientViMDistilled": _NO_SCORES,
    "models.efficientvim.HSMSSD": _NO_SCORES,
    "models.mobilevit.LinearSelfAttention": _NO_SCORES,
    "models.vision_transformer.DiffParallelScalingBlock": _DIFFERENCE,
}


def _known_as(cls: type) -> str:
    """A class's place in timm, as in the tables."""
    return f"{cls.__module__}.{cls.__qualname__}".removeprefix("timm.")


def _is_timm(cls: type) -> bool:
    return package(cls) == "timm"


class Redirect(TorchFunctionMode):
    """While it is active, and in this thread, another function runs instead of softmax.

    Args:
        function: the function.
        form: how the code that runs computes attention.
        mask: numbers for the scores, (windows, queries, keys), to add after sigma; windows vary fastest in the batch.
    """

    def __init__(self, function: Reweighting, form: Form, mask: Tensor | None = None) -> None:
        super().__init__()
        self.function = function
        self.form = form
        self.mask = mask
        self.calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The attention, the weights, or what the call would have returned."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and not self.form.scores:
            self.calls += 1
            return self._attend(*args, **kwargs)
        if func in SOFTMAX and self.form.scores:
            self.calls += 1
            return self._reweight(*args, **kwargs)
        if func is F.scaled_dot_product_attention or func in SOFTMAX:
            expected = "softmax" if self.form.scores else "scaled_dot_product_attention"
            raise RuntimeError(
                f"multimax: expected {expected} in a converted attention module of timm, got {func.__name__}; "
                "this version of timm computes it differently, or a hook within it calls it"
            )
        return func(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        bias = None
        if self.form.bias and attn_mask is not None and attn_mask.dtype != torch.bool:
            bias, attn_mask = attn_mask, None
        if self.mask is not None:
            attn_mask = self._on_batch(self.mask, query)
        return attention(
            query,
            key,
            value,
            reweight=self.function,
            attn_mask=attn_mask,
            score_bias=bias,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa or (key.ndim > 2 and key.shape[-3] == 1),  # torch lets a single head broadcast
        )

    def _reweight(self, scores: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
        if dim not in (-1, scores.ndim - 1) or kwargs.get("dtype") is not None:
            raise RuntimeError(
                f"multimax: expected softmax over the last dim in a converted attention module of timm, got dim={dim}, "
                f"dtype={kwargs.get('dtype')}; this version of timm computes it differently"
            )
        added = None if self.mask is None else self._on_batch(self.mask, scores)
        return weights_of(self.function, scores, None, added)

    @staticmethod
    def _on_batch(mask: Tensor, like: Tensor) -> Tensor:
        return mask.repeat(like.shape[0] // mask.shape[0], 1, 1)[:, None]  # (B * windows, 1, queries, keys)


class Reweighted(nn.Module):
    """The base class of converted attention modules, before the original class of each."""

    original: ClassVar[type[nn.Module]]
    form: ClassVar[Form]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As timm computes it, with another function instead of softmax."""
        return self._redirected(None, *args, **kwargs)

    def _redirected(self, mask: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        redirect = Redirect(in_use(function_module(self)), self.form, mask)
        with redirect:  # torch.compile does not support `as` here
            result = self.original.forward(self, *args, **kwargs)
        if redirect.calls != 1 and not (self.form.several and redirect.calls):
            raise RuntimeError(
                f"multimax: expected one softmax attention in a forward of timm's {self.original.__name__}, got "
                f"{redirect.calls}; this version of timm computes it differently"
            )
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For pickle, which cannot find the class by its name."""
        return _empty, (self.original,), self.__dict__.copy()


class ReweightedWindows(Reweighted):
    """The same for windows that may be shifted."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        """Keeps the mask from timm, which would add it to the bias, before sigma."""
        return self._redirected(mask, x)


@cache
def _reweighted(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of a converted module."""
    form = FORMS[_known_as(cls)]
    base = ReweightedWindows if form.windows else Reweighted
    return type(f"Reweighted{cls.__name__}", (base, cls), {"original": cls, "form": form, "__doc__": base.__doc__})


def _empty(cls: type[nn.Module]) -> nn.Module:
    made = _reweighted(cls)  # type: ignore[arg-type]
    module: nn.Module = made.__new__(made)
    return module


class Timm(Library):
    """timm."""

    name = "timm"

    def sites(self, outline: Outline) -> list[Site]:
        """Every module of timm, or of a subclass of one, that computes softmax in its own code."""
        types = {cls for cls in outline.types if any(map(_is_timm, cls.__mro__))}
        found = []
        for name, module in outline.modules.items():
            cls = type(module)
            if cls in types and (hasattr(module, "fused_attn") or computes_softmax(cls)):
                form = FORMS.get(_known_as(cls))
                heads = getattr(module, form.heads, None) if form is not None and form.heads else None
                found.append(Site(name, module, "attention", self.name, heads, _why_not(module)))
        return found

    def attach(self, model: nn.Module, site: Site, function: nn.Module, mark: Mark) -> nn.Module:
        """Gives the attention module the function as a child, and a class that uses it."""
        module = site.module
        put_function(module, function)
        if "fused_attn" in module.__dict__:
            mark.before["fused_attn"] = module.__dict__["fused_attn"]
            module.__dict__["fused_attn"] = not FORMS[_known_as(type(module))].scores
        module.__class__ = _reweighted(type(module))  # type: ignore[arg-type]
        return module

    def detach(self, model: nn.Module, name: str, module: nn.Module) -> None:
        """Removes both."""
        mark = mark_of(module)
        assert mark is not None
        take_function(module)
        if isinstance(module, Reweighted):
            module.__class__ = module.original  # type: ignore[assignment]
        module.__dict__.update(mark.before)

    def output_names(self, outline: Outline) -> list[str]:
        """The classifier; both classifiers of a distilled model."""
        model = outline.model
        if not _is_timm(type(model)) or not hasattr(model, "get_classifier"):
            return []
        found = model.get_classifier()  # type: ignore[operator]
        heads = list(found) if isinstance(found, (tuple, list, nn.ModuleList)) else [found]
        names = [outline.name_of(head) for head in heads if not isinstance(head, nn.Identity)]
        return [name for name in names if name is not None]

    def why_not_output(self, model: nn.Module, name: str) -> str | None:
        """Why logits of this model cannot be modulated in this layer."""
        known_as = _known_as(type(model))
        if known_as == "models.crossvit.CrossVit" or known_as.startswith("models.efficientvim."):
            return (
                f"the logits of {type(model).__name__} are the mean of several layers' logits, and sigma must come last"
            )
        if known_as == "models.volo.VOLO" and getattr(model, "aux_head", None) is not None:
            return "VOLO adds the logits of its aux_head and its head, and sigma must come last"
        return None


def _why_not(module: nn.Module) -> str | None:
    cls = type(module)
    known_as = _known_as(cls)
    if known_as in REFUSED:
        return REFUSED[known_as]
    if not _is_timm(cls):
        bases = ", ".join(base.__name__ for base in cls.__mro__ if _is_timm(base))
        return f"{cls.__name__}, a subclass of timm's {bases}, may compute anything"
    if known_as not in FORMS:
        return f"timm's {cls.__name__} is not known to be plain softmax attention"
    if "forward" in module.__dict__:
        return "its forward was replaced"
    return None


CONVERTER = Timm()
