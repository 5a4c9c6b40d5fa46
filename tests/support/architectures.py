"""The architectures of transformers that conversion is tested on, built small and at random; docs/convert.md lists
them."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

VOCABULARY = 61
VALUES = r"v_proj|value|o_proj|out_proj|attention\.output\.dense|attn\.c_proj|\.v\.|\.o\."
SCORES = r"q_proj|k_proj|query|key|c_attn|\.q\.|\.k\.|relative_position_bias"
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    **TOKENS,
}
ROTARY = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 24,
    "patch_size": 4,
    "num_labels": 5,
}
SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    **TOKENS,
}


def _ids(seed: int, length: int = 11) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed))


def causal() -> dict[str, Any]:
    ids = _ids(1)
    return {"input_ids": ids, "labels": ids.clone()}


def masked() -> dict[str, Any]:
    return {"input_ids": _ids(1), "labels": _ids(2)}


def pixels() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(1))}


def labelled() -> dict[str, Any]:
    return {**pixels(), "labels": torch.tensor([1, 3])}


def translation() -> dict[str, Any]:
    return {"input_ids": _ids(1), "labels": _ids(2, 7)}


def speech() -> dict[str, Any]:
    features = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(1))
    return {"input_features": features, "labels": _ids(2, 7)}


@dataclass(frozen=True)
class Architecture:
    """One architecture: classes by name, the configuration's settings, inputs, and what the table says of it."""

    name: str
    model: str
    config: str
    settings: dict[str, Any]
    inputs: Callable[[], dict[str, Any]]
    layers: int  # attention modules
    attention: str = "fused"
    output: str | None = None  # the output layer's name
    no_output: str = ""  # why there is none
    generates: bool = False
    pads: bool = False
    packs: bool = False
    elsewhere: int = 0  # softmax calls a forward that are not attention
    gain: float = 10.0  # of the weights that make the scores

    def build(self) -> Any:
        """A new model, the same each time, in evaluation mode. Queries, keys and position biases are larger than
        transformers' own at the start: else scores would be near zero, and errors in attention would not be seen."""
        torch.manual_seed(0)
        model = getattr(transformers, self.model)(getattr(transformers, self.config)(**self.settings))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1 and re.search(SCORES, name):
                    parameter.mul_(self.gain)
                elif parameter.ndim > 1 and re.search(VALUES, name):
                    parameter.mul_(4)
        return model.eval()


ARCHITECTURES = [
    Architecture(
        "GPT2",
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 64, **TOKENS},
        causal,
        2,
        output="lm_head",
        generates=True,
        pads=True,
        packs=True,
    ),
    Architecture(
        "Llama",
        "LlamaForCausalLM",
        "LlamaConfig",
        ROTARY,
        causal,
        2,
        "fused, grouped queries",
        output="lm_head",
        generates=True,
        pads=True,
        packs=True,
    ),
    Architecture(
        "Mistral",
        "MistralForCausalLM",
        "MistralConfig",
        {**ROTARY, "sliding_window": 5},
        causal,
        2,
        "fused, grouped queries, window",
        output="lm_head",
        generates=True,
        pads=True,
        packs=True,
    ),
    Architecture(
        "Gemma2",
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**ROTARY, "sliding_window": 5, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
        causal,
        2,
        "in blocks (softcap)",
        no_output="final_logit_softcapping",
        generates=True,
        pads=True,
        packs=True,
    ),
    Architecture(
        "GPT-OSS",
        "GptOssForCausalLM",
        "GptOssConfig",
        {**ROTARY, "sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1},
        causal,
        2,
        "fused, sinks by the log-sum",
        output="lm_head",
        generates=True,
        pads=True,
        elsewhere=2,
    ),
    Architecture(
        "BERT", "BertForMaskedLM", "BertConfig", SIZES, masked, 2, output="cls.predictions.decoder", pads=True
    ),
    Architecture(
        "RoBERTa", "RobertaForMaskedLM", "RobertaConfig", SIZES, masked, 2, output="lm_head.decoder", pads=True
    ),
    Architecture("ViT", "ViTForImageClassification", "ViTConfig", VISION, labelled, 2, output="classifier"),
    Architecture("DeiT", "DeiTForImageClassification", "DeiTConfig", VISION, labelled, 2, output="classifier"),
    Architecture("DINOv2", "Dinov2ForImageClassification", "Dinov2Config", VISION, labelled, 2, output="classifier"),
    Architecture(
        "Swin",
        "SwinForImageClassification",
        "SwinConfig",
        {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 3, "image_size": 24, "patch_size": 2}
        | {"num_labels": 5},
        labelled,
        4,
        "fused, position bias before sigma",
        output="classifier",
    ),
    Architecture(
        "CLIP vision",
        "CLIPVisionModel",
        "CLIPVisionConfig",
        {key: value for key, value in VISION.items() if key != "num_labels"},
        pixels,
        2,
        no_output="no logits",
        gain=1.5,
    ),
    Architecture(
        "T5",
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
        | {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2},
        translation,
        6,
        "fused, position bias before sigma",
        output="lm_head",
        generates=True,
        pads=True,
        gain=1.0,  # its scores are not scaled
    ),
    Architecture(
        "BART",
        "BartForConditionalGeneration",
        "BartConfig",
        SEQ2SEQ,
        translation,
        6,
        output="lm_head",
        generates=True,
        pads=True,
    ),
    Architecture(
        "Marian", "MarianMTModel", "MarianConfig", SEQ2SEQ, translation, 6, output="lm_head", generates=True, pads=True
    ),
    Architecture(
        "Whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {key: value for key, value in SEQ2SEQ.items() if key != "max_position_embeddings"}
        | {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 32, "suppress_tokens": None}
        | {"begin_suppress_tokens": None},
        speech,
        6,
        output="proj_out",
        generates=True,
    ),
]

# Those that do not use transformers' attention interface: class, configuration, settings.
OUTSIDE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Bloom": ("BloomForCausalLM", "BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50}),
    "DeBERTa-v2": ("DebertaV2Model", "DebertaV2Config", SIZES),
    "Longformer": ("LongformerModel", "LongformerConfig", {**SIZES, "attention_window": 4}),
    "GPT-Neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 50, "attention_types": [[["global"], 2]]},
    ),
}
