"""The attention function that transformers' modules call, registered with its attention and mask interfaces.

Shapes: B batches, H query heads, Hkv key heads, Lq queries, Lk keys, D entries per head.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask
from transformers.utils import output_capturing

from multimax.convert.sites import function_module, mark_of
from multimax.ops.attention.api import multimax_attention
from multimax.ops.masking import takes_part
from multimax.reweighting.blockwise import attention
from multimax.reweighting.registry import Reweighting, get, in_use

# The attention implementation: with masks as for sdpa, or in numbers, whichever the model had before.
NAME, NAME_IN_NUMBERS = NAMES = ("multimax", "multimax_mask_in_numbers")
LEFT = "_multimax_left"  # on attention modules that keep softmax in a converted model
# Attention modules whose mask also holds part of the score: whatever is neither the dtype's lowest value nor -inf.
BIAS_IN_MASK = (
    "BeitAttention",
    "DogeAttention",
    "EdgeTamAttention",
    "EdgeTamVideoAttention",
    "EsmFold2DiffusionAttention",
    "GraniteSpeech5EncoderAttention",
    "NemotronAsrStreamingEncoderAttention",
    "ParakeetEncoderAttention",
    "Phi4MultimodalAudioAttention",
    "Sam2Attention",
    "Sam2VideoAttention",
    "Sam3Attention",
    "Sam3TrackerAttention",
    "Sam3TrackerVideoAttention",
    "SamAttention",
    "SamHQAttention",
)


def _weights_wanted(kwargs: dict[str, Any]) -> bool:
    if kwargs.get("output_attentions"):
        return True
    collected = output_capturing._active_collector.get()
    return collected is not None and any("attentions" in key for key in collected)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers' attention modules call: attention with the function that the module carries.

    Args:
        module: the attention module.
        query: (B, H, Lq, D).
        key: (B, Hkv, Lk, D).
        value: (B, Hkv, Lk, D).
        attention_mask: boolean, or numbers, where the dtype's lowest excludes a key; None for all keys,
            or for causal attention if the module is causal.
        scaling: factor of the dot products.
        dropout: probability with which a weight is dropped.
        is_causal: instead of the module's.
        position_bias: part of the score.
        softcap: bound of the scores, by tanh.
        s_aux: (H,), the attention sinks: one score per head, which takes part in the sum and has no value.
        indices: (B, Lq, k), the only keys that take part for each query.
        kwargs: whatever else transformers passes.

    Returns:
        (B, Lq, H, D), and the weights if they were asked for, else None.
    """
    mark = mark_of(module)
    if mark is None and not getattr(module, LEFT, False):
        raise RuntimeError(
            f"multimax: expected {type(module).__name__} to be converted, got one without parameters, in a model whose "
            "configuration asks for MultiMax; load it with multimax.from_pretrained, or convert it with "
            "multimax.convert_"
        )
    if mark is not None and not mark.reached:
        mark.reached = True
    queries, keys = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    causal = bool(queries > 1 and attention_mask is None and causal)  # torch.jit.trace has tensors for sizes
    if position_bias is not None:
        position_bias = position_bias[..., -queries:, :keys]
    if attention_mask is not None:
        attention_mask, bias = _apart(module, attention_mask)
        position_bias = bias if position_bias is None else position_bias
    if indices is not None:
        chosen = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=query.device)
        chosen = chosen.scatter(-1, indices.long(), True)[:, None]  # (B, 1, Lq, Lk)
        attention_mask = chosen if attention_mask is None else _both(attention_mask, chosen)
    wanted = _weights_wanted(kwargs)
    function = get("softmax") if mark is None else in_use(function_module(module))
    options: dict[str, Any] = {
        "attn_mask": attention_mask,
        "score_bias": position_bias,
        "dropout_p": dropout,
        "is_causal": causal,
        "scale": scaling,
        "enable_gqa": bool(query.shape[1] != key.shape[1]),
    }
    weights = None
    if s_aux is not None:
        if softcap is not None:
            raise NotImplementedError("multimax: expected attention sinks or a softcap, got both")
        out, weights = _with_sinks(function, query, key, value, s_aux, wanted, options)
    elif wanted:
        out, weights = attention(query, key, value, reweight=function, softcap=softcap, return_weights=True, **options)
    else:
        out = attention(query, key, value, reweight=function, softcap=softcap, **options)
    return out.transpose(1, 2).contiguous(), weights


def _apart(module: nn.Module, mask: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Mask and bias, from what a module passes as its mask."""
    if mask.dtype == torch.bool:
        return mask, None
    names = [cls.__name__ for cls in type(module).__mro__]
    if "SwinAttention" in names:  # its mask has -100 where a key takes no part
        bias: Tensor = module.relative_position_bias().to(mask.dtype)  # type: ignore[operator]
        return (mask - bias).detach(), bias
    if any(name in BIAS_IN_MASK for name in names):
        part = takes_part(mask)
        return part, torch.where(part, mask, 0.0)
    return mask, None


def _both(mask: Tensor, part: Tensor) -> Tensor:
    return mask & part if mask.dtype == torch.bool else mask.masked_fill(~part, torch.finfo(mask.dtype).min)


def _with_sinks(
    function: Reweighting,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    wanted: bool,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """A sink adds its exponential to each row's sum: all weights shrink by one factor, which the log-sum gives."""
    if function.name == "multimax":
        coefs, knots = function.options["coefs"], function.options["knots"]
    elif function == get("softmax"):
        coefs, knots = query.new_zeros(2, 1, 2)
    else:
        raise NotImplementedError(
            f"multimax: expected MultiMax or softmax in a model with attention sinks, got {function.name}"
        )
    out, lse = multimax_attention(query, key, value, coefs, knots, return_lse=True, **options)
    kept = torch.sigmoid(lse - sinks.reshape(-1, 1)).to(out.dtype)[..., None]  # (B, H, Lq, 1)
    if not wanted:
        return out * kept, None
    out, weights = attention(query, key, value, reweight=function, return_weights=True, **options)
    return out * kept, weights * kept


for name, mask_function in ((NAME, sdpa_mask), (NAME_IN_NUMBERS, eager_mask)):
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, mask_function)
