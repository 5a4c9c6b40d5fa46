"""MultiMax in a vision transformer of timm, in attention and in the output layer, as in the paper's experiments.

The paper's DeiT averages over the patches instead of using a class token, after the norm. Run, with timm installed:
python examples/convert_timm.py [--model deit_small_patch16_224] [--images 4]
"""

import argparse

import timm
import torch
import torch.nn.functional as F

import multimax


def main() -> None:
    """Converts a model and trains it for one step on noise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="deit_small_patch16_224")
    parser.add_argument("--images", type=int, default=4)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    # pretrained=True has a class token and biases in qkv: leave out the options for it
    model = timm.create_model(arguments.model, class_token=False, global_pool="avg", fc_norm=False, qkv_bias=False)
    report = multimax.convert_(model, where=("attention", "output"))
    print(report)

    images, labels = torch.randn(arguments.images, 3, 224, 224), torch.randint(model.num_classes, (arguments.images,))
    optimizer = torch.optim.AdamW(multimax.param_groups(model, lr=1e-3, weight_decay=0.05))
    loss = F.cross_entropy(model(images), labels)  # the model's usual loss: its logits are already modulated
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.3f} before the step, {F.cross_entropy(model(images), labels).item():.3f} after")
    print(f"blocks.0.attn.multimax after the step: {model.blocks[0].attn.multimax}")


if __name__ == "__main__":
    main()
