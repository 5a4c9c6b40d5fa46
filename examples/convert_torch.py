"""MultiMax in an existing torch.nn.TransformerEncoder, in attention and in the output layer.

A model of torch.nn learns to sort. Then it is converted, which changes nothing at first, and trained further, with
softmax and with MultiMax. Run: python examples/convert_torch.py [--steps 60]
"""

import argparse
import copy

import torch
import torch.nn.functional as F
from torch import nn

import multimax

DIGITS, LENGTH = 12, 10


class Sorter(nn.Module):
    """Sorts numbers in rising order: nothing in it is from multimax."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(DIGITS, 64)
        self.position = nn.Parameter(torch.randn(LENGTH, 64) * 0.1)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, DIGITS)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Logits, (batch, length, digits)."""
        return self.head(self.encoder(self.embedding(numbers) + self.position))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """The last loss."""
    torch.manual_seed(1)
    loss = torch.tensor(float("nan"))
    for _ in range(steps):
        numbers = torch.randint(DIGITS, (64, LENGTH))
        loss = F.cross_entropy(model(numbers).flatten(0, 1), numbers.sort(-1).values.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    """Trains, converts, and trains on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60, help="before and after the conversion")
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    model = Sorter()
    print(f"before:   loss {train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), steps):.4f}")

    converted = copy.deepcopy(model)
    print(multimax.convert_(converted, where=("attention", "output"), output="head"))
    numbers = torch.randint(DIGITS, (8, LENGTH))
    print(f"the converted model differs by {(converted(numbers) - model(numbers)).abs().max():.1e}\n")

    print(f"softmax:  loss {train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), steps):.4f}")
    groups = multimax.param_groups(converted, lr=1e-3, weight_decay=0.01, multimax_lr_factor=3)
    print(f"multimax: loss {train(converted, torch.optim.AdamW(groups), steps):.4f}")
    print(f"encoder.layers.0: {converted.encoder.layers[0].self_attn.multimax}")


if __name__ == "__main__":
    main()
