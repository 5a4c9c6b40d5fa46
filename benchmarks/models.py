"""Times a training step of whole models, converted and as they were.

    python benchmarks/models.py                      everything: about two minutes
    python benchmarks/models.py --quick              without the eager formula
    python benchmarks/models.py --table FILE.json    print the tables of a saved run

A step is forward, backward and AdamW, in float32, without dropout. The models are from transformers, with random
weights: a ViT of DeiT-small's size on four images (197 tokens, 6 heads, 12 layers), and a GPT2 of six layers on
sequences of 512 tokens.
"softmax" is the model as transformers makes it, with torch's scaled_dot_product_attention; "MultiMax" is the same model
converted, in attention or in attention and output, with the parameters of the paper's Table for DeiT-small; "MultiMax,
eager" is the formula in plain PyTorch on the whole matrix of scores, as the published code computes it. Before they are
timed, the converted models' losses and gradients are compared with the formula's. measuring.py says how times are
taken.
"""

import copy
import itertools

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification
from transformers import logging as transformers_logging
from transformers.masking_utils import AttentionMaskInterface, eager_mask

import measuring
import multimax
from measuring import Case

STEP = "training step"
SOFTMAX, ATTENTION, BOTH, EAGER = "softmax", "MultiMax", "MultiMax, output too", "MultiMax, eager"


def vit() -> tuple[nn.Module, dict[str, Tensor]]:
    """DeiT-small's size."""
    sizes = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536}
    model = ViTForImageClassification(ViTConfig(**sizes, num_labels=1000, hidden_dropout_prob=0.0))
    return model, {"pixel_values": torch.randn(4, 3, 224, 224), "labels": torch.randint(1000, (4,))}


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    """Six layers, causal."""
    sizes = {"n_embd": 384, "n_layer": 6, "n_head": 6, "vocab_size": 8192, "n_positions": 512}
    none = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    ids = torch.randint(8192, (2, 512))
    return GPT2LMHeadModel(GPT2Config(**sizes, **none)), {"input_ids": ids, "labels": ids}


MODELS = {"ViT, DeiT-small's size, batch 4": vit, "GPT2, 6 layers, 2 x 512 tokens": gpt2}
CASES = [Case("float32", name, (name,)) for name in MODELS]


def formula(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """As in the published code: the score matrix, sigma by elementary operations, then softmax."""
    x = query @ key.mT * scaling
    coefs, knots = module.formula
    sigma = x
    for n in range(len(coefs)):
        sigma = sigma + coefs[n, 0] * (knots[n, 0] - x).relu() ** (n + 1)
        sigma = sigma + coefs[n, 1] * (x - knots[n, 1]).relu() ** (n + 1)
    if attention_mask is not None:
        sigma = sigma + attention_mask
    return (sigma.softmax(-1) @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("formula", formula)
AttentionMaskInterface.register("formula", eager_mask)


def competitors(model: nn.Module, quick: bool) -> dict[str, nn.Module]:
    """The same model in several ways; the first is what all are compared with."""
    presets = itertools.cycle(multimax.presets["deit_small"])
    models = {SOFTMAX: model, ATTENTION: copy.deepcopy(model), BOTH: copy.deepcopy(model)}
    multimax.convert_(models[ATTENTION])
    multimax.convert_(models[BOTH], where=("attention", "output"))
    if not quick:
        models[EAGER] = copy.deepcopy(model)
        models[EAGER].set_attn_implementation("formula")
    for name, layer in models[ATTENTION].named_modules():
        if isinstance(layer, multimax.MultiMax):
            coefs, knots = (t.float() for t in multimax.from_paper(*next(presets)))
            for converted in (models[ATTENTION], models[BOTH]):
                converted.get_submodule(name).coefs.data.copy_(coefs)
                converted.get_submodule(name).knots.data.copy_(knots)
            if not quick:
                parent = models[EAGER].get_submodule(name.rpartition(".")[0])
                parent.formula = nn.ParameterList([nn.Parameter(coefs.clone()), nn.Parameter(knots.clone())])
    return models


def check(models: dict[str, nn.Module], inputs: dict[str, Tensor]) -> None:
    """Refuses to time what is wrong, in the loss or in the gradient."""
    if EAGER not in models:
        return
    expected = models[EAGER](**inputs).loss
    expected.backward()
    for name in (ATTENTION, BOTH):
        loss = models[name](**inputs).loss
        loss.backward()
        others = [(key, p) for key, p in models[EAGER].named_parameters() if "formula" not in key]
        pairs = [(p.grad, models[name].get_parameter(key).grad) for key, p in others]
        error = max((a - b).norm().item() for a, b in pairs) / max(a.norm().item() for a, _ in pairs)
        if not ((loss - expected).abs() < 1e-4 and error < 1e-3):
            raise AssertionError(f"{name} is off: loss {loss.item()} for {expected.item()}, gradients by {error}")


def measure(name: str, seconds: float, quick: bool) -> dict:
    """The model in all its ways."""
    transformers_logging.set_verbosity_error()
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    models = competitors(model.train(), quick)
    check(models, inputs)
    optimizers = {variant: torch.optim.AdamW(m.parameters(), lr=0.0) for variant, m in models.items()}

    def step(variant: str) -> None:
        models[variant](**inputs).loss.backward()
        optimizers[variant].step()
        optimizers[variant].zero_grad()

    calls = {(variant, STEP): (lambda variant=variant: step(variant)) for variant in models}
    return measuring.compare(calls, seconds, SOFTMAX, [ATTENTION, BOTH])


if __name__ == "__main__":
    measuring.main("models", __doc__, 30.0, CASES, measure)
