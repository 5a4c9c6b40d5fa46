"""torchao on converted models, in a process of its own: it is slow to import, and transformers and PEFT do so wherever
they find it. ``make test`` puts it into a folder of its own.

Prints, as JSON, for each architecture and kind of quantization: the class of the output layer's weight, and how far
logits are from those before, as MultiMax and as softmax.
"""

import json
import sys
from pathlib import Path

import torch

FOLDER = Path(sys.prefix) / "torchao"
KINDS = ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig")
NAMES = ("Llama", "BERT")


def quantized(name: str, kind: str) -> tuple[str, float, float]:
    from torchao import quantization

    import multimax
    from architectures import ARCHITECTURES
    from wrapping import move

    model = next(architecture for architecture in ARCHITECTURES if architecture.name == name).build().eval()
    multimax.convert_(model, where=("attention", "output"))
    move(model, 0.5)
    ids = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = model(ids).logits
        quantization.quantize_(model, getattr(quantization, kind)())
        weight = type(model.get_output_embeddings().weight).__name__
        near = (model(ids).logits - before).abs().max().item()
        multimax.revert_(model)
        return weight, near, (model(ids).logits - before).abs().max().item()


if __name__ == "__main__":
    sys.path.append(str(FOLDER))
    print(json.dumps({f"{name} {kind}": quantized(name, kind) for name in NAMES for kind in KINDS}))
