"""Models of Hugging Face transformers, through its attention and mask interfaces.

Shapes: B batches, H query heads, Hkv key heads, Lq queries, Lk keys, D entries a head.
"""

import copy
import inspect
import itertools
from collections.abc import Iterator
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask
from transformers.utils import output_capturing

from multimax import reweighting
from multimax.convert.functions import describe
from multimax.convert.sites import (
    KINDS,
    Mark,
    Site,
    function_module,
    function_of,
    mark_of,
    marked,
    put_function,
    take_function,
    within,
)
from multimax.ops.attention.api import multimax_attention
from multimax.ops.masking import takes_part
from multimax.reweighting.layer import MultiMax

LIBRARY = "transformers"
# The attention implementation: with masks as for sdpa, or in numbers, as what the model had before.
NAME, NAME_IN_NUMBERS = NAMES = ("multimax", "multimax_mask_in_numbers")
BEFORE = "_multimax_attn_before"  # a module's attention implementation and configuration before
LEFT = "_multimax_left"  # on attention modules that stay with softmax in a converted model
VERSION = 1  # of what is written into a configuration

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
# Attention modules that get scores of their own as their mask, with a mask in it: what is not the dtype's lowest value,
# nor -inf, is part of the score.
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
# Models that compute with the mask before attention, and need it in numbers even where they know sdpa.
MASK_IN_NUMBERS = ("beit", "deepseek_v4", "gemma4_audio")
CLASSIFIERS = (
    "classifier",
    "score",
    "qa_outputs",
    "classification_head",
    "cls_classifier",
    "distillation_classifier",
    "lm_head",  # for CTC, where it is no output embedding
    "ctc_head",
)
# Settings of models that change the logits of words after the output layer, which would then come after sigma.
AFTER_HEAD = (
    "final_logit_softcapping",
    "logits_soft_cap",
    "logit_scale",
    "logits_scaling",
    "output_multiplier",
    "lm_head_multiplier",
)


def _calls_interface(module: nn.Module) -> bool:
    """Whether a module gets its attention function from the interface."""
    return _mentions(module, "ALL_ATTENTION_FUNCTIONS")


def _mentions(module: nn.Module, words: str) -> bool:
    """Whether words stand in the source of a module's forward."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and words in _source(code)


@cache
def _source(code: CodeType) -> str:
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):
        return ""


def _heads(module: nn.Module) -> int | None:
    for holder in (module, getattr(module, "config", None)):
        for name in HEADS:
            value = getattr(holder, name, None)
            if isinstance(value, int):
                return value
    return None


def sites(model: nn.Module) -> list[Site]:
    """Attention modules that use the interface."""
    return [
        Site(name, module, "attention", LIBRARY, _heads(module), _why_not(module), _only(module))
        for name, module in model.named_modules()
        if _calls_interface(module)
    ]


def _why_not(module: nn.Module) -> str | None:
    if _mentions(module, "block_indices=") and getattr(module, "indexer", None) is not None:
        return f"{type(module).__name__} chooses blocks of keys outside of its mask"
    return None


def _only(module: nn.Module) -> tuple[str, ...]:
    """Attention sinks take part in a softmax's sum."""
    return ("multimax",) if _mentions(module, "s_aux=") else ()


def output_names(model: nn.Module) -> list[str]:
    """The layer, or layers, that give the logits."""
    if not isinstance(model, PreTrainedModel):
        return []
    names = {id(module): name for name, module in model.named_modules()}
    head = model.get_output_embeddings()
    if head is not None and id(head) in names:
        return [names[id(head)]]
    found = []
    for name in CLASSIFIERS:
        module = model._modules.get(name)
        if module is not None:  # the last linear layer of a head with several
            linears = [own for own, m in module.named_modules(prefix=name) if isinstance(m, nn.Linear)]
            found += linears[-1:]
    return found


def why_not_output(model: nn.Module, name: str) -> str | None:
    """Why logits of this model cannot be modulated in this layer."""
    if not isinstance(model, PreTrainedModel):
        return None
    own, config = type(model).__name__, model.config
    if model.get_output_embeddings() is model.get_submodule(name):
        for setting, value in itertools.chain.from_iterable(_settings(config)):
            if setting in AFTER_HEAD and value is not None and value != 1:
                return f"{own} changes the logits after it ({setting}={value}), and sigma must come last"
        added = getattr(model, "final_logits_bias", None)
        if isinstance(added, Tensor) and bool(added.any()):
            return f"{own} adds final_logits_bias to the logits after it, and sigma must come last"
    elif getattr(config, "classifier_pooling", None) == "late":
        return f"{own} takes means of the logits after it, and sigma must come last"
    elif config.problem_type in ("regression", "multi_label_classification"):
        return f"{own} has no softmax after it (problem_type={config.problem_type!r})"
    elif config.num_labels == 1:
        return f"{own} has no softmax after it (num_labels=1)"
    return None


def _settings(config: Any) -> Iterator[Any]:
    """Names and values of a configuration, and of those in it."""
    yield config.__dict__.items()
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            yield from _settings(getattr(config, name))


def attach(model: nn.Module, site: Site, function: nn.Module, mark: Mark) -> nn.Module:
    """Gives the attention module the function as a child; the attention function finds it there."""
    put_function(site.module, function)
    return site.module


def detach(model: nn.Module, name: str, module: nn.Module) -> None:
    """Takes the child away."""
    take_function(module)


def finish(model: nn.Module) -> None:
    """Sets the attention implementation of the model's configurations, or brings back the one before.

    The configurations become the model's own: others made from the same objects keep theirs.
    """
    found = list(marked(model))
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    for module in model.modules():
        _forget_hooks(module)
    if not found:
        _switch_off(model)
        return
    attention = any(mark.library == LIBRARY for _, _, mark in found)
    if models or attention:
        _own_configurations(model)
    if attention:
        _switch_on(model)
    _write_settings(model)


class StillConverted:
    """A forward pre-hook of a converted attention module. ``set_attn_implementation``, and what calls it in
    transformers, would bring softmax back.

    Args:
        name: the attention implementation that the module needs.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, module: nn.Module, args: object) -> None:
        """Raises if the module would compute something else."""
        own = module.config._attn_implementation  # type: ignore[union-attr]
        if own != self.name:
            raise RuntimeError(
                f"multimax: expected the attention implementation {self.name!r} in a converted model, got {own!r}; set "
                f"it back with model.set_attn_implementation({self.name!r}), or take the conversion back with "
                "multimax.revert_"
            )


def _forget_hooks(module: nn.Module) -> None:
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, StillConverted):
            module._forward_pre_hooks.pop(key, None)


def _holders(model: nn.Module) -> list[Any]:
    """Modules whose configuration says which attention runs: those that call it and the models around them."""
    names = [name for name, module in model.named_modules() if _calls_interface(module)]
    return [
        module
        for name, module in model.named_modules()
        if hasattr(module.__dict__.get("config"), "_attn_implementation") and any(within(own, name) for own in names)
    ]


def _own_configurations(model: nn.Module) -> None:
    """Copies of the configurations, for this model alone, and for each of several models in it alone."""
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    copies: dict[int, dict[int, Any]] = {}
    for outer in models:  # from the outside
        if id(outer) not in copies:
            own: dict[int, Any] = {}
            copies |= {id(module): own for module in outer.modules()}
    rest: dict[int, Any] = {}
    for module in model.modules():
        config: Any = module.__dict__.get("config")
        if hasattr(config, "_attn_implementation"):
            module.__dict__[BEFORE] = (config, config._attn_implementation)
            module.config = copy.deepcopy(config, copies.get(id(module), rest))


def _switch_on(model: nn.Module) -> None:
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    for module in _holders(model):
        config, before = module.__dict__[BEFORE]
        if before in NAMES:  # a configuration of another converted model
            before = "sdpa" if all(own._supports_sdpa for own in models) else "eager"
            module.__dict__[BEFORE] = (config, before)
        numbers = before == "eager" or module.config.model_type in MASK_IN_NUMBERS
        module.config._attn_implementation_internal = NAME_IN_NUMBERS if numbers else NAME
        if mark_of(module) is not None:
            module.register_forward_pre_hook(StillConverted(module.config._attn_implementation))
        elif _calls_interface(module):
            if reason := _why_not(module):
                raise ValueError(
                    f"multimax: expected to leave {type(module).__name__} with softmax, got one that cannot stand "
                    f"beside converted layers: {reason}"
                )
            module.__dict__[LEFT] = True


def _switch_off(model: nn.Module) -> None:
    holders: list[Any] = [module for module in model.modules() if BEFORE in module.__dict__]
    copies: dict[int, tuple[Any, Any]] = {}
    for module in holders:
        config, before = module.__dict__[BEFORE]
        module.config._attn_implementation_internal = before
        forget_settings(module.config)
        copies[id(module.config)] = (module.config, config)
    # the very objects that were there before, unless somebody has changed something since
    same = all(own.to_dict() == config.to_dict() for own, config in copies.values())
    for module in holders:
        config, before = module.__dict__.pop(BEFORE)
        if same and config._attn_implementation == before:
            module.config = config
    for module in model.modules():
        module.__dict__.pop(LEFT, None)


def _write_settings(model: nn.Module) -> None:
    """Says in the configuration of every model in it, the outermost first, which layers are converted, and how."""
    written = set()
    for module in model.modules():
        if not isinstance(module, PreTrainedModel) or id(module.config) in written:
            continue
        found = list(marked(module))
        if found:
            written.add(id(module.config))
            module.config.multimax = {"version": VERSION} | {
                kind: {name: describe(function_of(own)) for name, own, mark in found if mark.kind == kind}
                for kind in KINDS
            }
            module.config.attn_implementation = NAME  # with this in its file, plain from_pretrained refuses it


def forget_settings(config: Any) -> None:
    """Takes out of a configuration, and of those in it, what says that a model is converted."""
    config.__dict__.pop("multimax", None)
    if config.__dict__.get("attn_implementation") in NAMES:
        del config.attn_implementation
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            forget_settings(getattr(config, name))


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
        attention_mask: boolean, or numbers, where the dtype's lowest is a key that takes no part; None for all keys,
            or for causal attention if the module is causal.
        scaling: factor of the dot products.
        dropout: probability with which a weight is dropped.
        is_causal: in the place of the module's own.
        position_bias: part of the score.
        softcap: bound of the scores, by a tangent.
        s_aux: (H,), the attention sinks: a score a head that takes part in the sum and has no value.
        indices: (B, Lq, k), the only keys that take part for each query.
        kwargs: what transformers passes besides.

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
    causal = queries > 1 and attention_mask is None and causal
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
    function = function_module(module)
    options: dict[str, Any] = {
        "attn_mask": attention_mask,
        "score_bias": position_bias,
        "dropout_p": dropout,
        "is_causal": causal,
        "scale": scaling,
        "enable_gqa": query.shape[1] != key.shape[1],
    }
    weights = None
    if s_aux is not None:
        if softcap is not None:
            raise NotImplementedError("multimax: expected attention sinks or a softcap, got both")
        out, weights = _with_sinks(function, query, key, value, s_aux, wanted, options)
    elif wanted:
        out, weights = reweighting.attention(
            query, key, value, reweight=function or "softmax", softcap=softcap, return_weights=True, **options
        )
    else:
        out = reweighting.attention(query, key, value, reweight=function or "softmax", softcap=softcap, **options)
    return out.transpose(1, 2).contiguous(), weights


def _apart(module: nn.Module, mask: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Mask and bias out of what a module passes as its mask."""
    if mask.dtype == torch.bool:
        return mask, None
    names = [own.__name__ for own in type(module).__mro__]
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
    function: nn.Module | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    wanted: bool,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """A sink adds its exponential to each row's sum: all weights shrink by one factor, which the log-sum gives."""
    if not isinstance(function, MultiMax | None):
        raise NotImplementedError(
            f"multimax: expected MultiMax or softmax in a model with attention sinks, got {type(function).__name__}"
        )
    coefs, knots = query.new_zeros(2, 1, 2) if function is None else function.parameters_in_use()
    out, lse = multimax_attention(query, key, value, coefs, knots, return_lse=True, **options)
    kept = torch.sigmoid(lse - sinks.reshape(-1, 1)).to(out.dtype)[..., None]  # (B, H, Lq, 1)
    if not wanted:
        return out * kept, None
    out, weights = reweighting.attention(
        query, key, value, reweight=function or "softmax", return_weights=True, **options
    )
    return out * kept, weights * kept


for name, mask_function in ((NAME, sdpa_mask), (NAME_IN_NUMBERS, eager_mask)):
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, mask_function)
