"""MultiMax instead of softmax in an attention layer: the one line that changes, and what it learns.

The task needs two modes and sparsity: each query has to return the mean of the two values whose keys match it, among
distractors. Softmax can only trade one for the other. Run: python examples/attention.py [--steps 300]
"""

import argparse

import torch
from torch import Tensor, nn

import multimax


class Attention(nn.Module):
    """Single-head attention with any reweighting function."""

    def __init__(self, size: int, reweight: nn.Module) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(size, size), nn.Linear(size, size)
        self.reweight = reweight  # nn.Softmax(dim=-1) before, multimax.MultiMax() after

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of queries (B, L, size) over keys and values."""
        scores = self.query(query) @ self.key(key).mT / key.shape[-1] ** 0.5  # (B, L, L)
        return self.reweight(scores) @ value


def batch(size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pairs of equal keys with different values; the target is the mean of a pair."""
    half = torch.randn(32, length // 2, size, generator=generator)
    key = torch.cat([half, half], 1)
    value = torch.randn(32, length, 4, generator=generator)
    mean = (value[:, : length // 2] + value[:, length // 2 :]) / 2
    return key, key, value, torch.cat([mean, mean], 1)


def train(reweight: nn.Module, steps: int) -> float:
    """The loss at the end of training."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = Attention(16, reweight)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    losses = []
    for _ in range(steps):
        query, key, value, target = batch(16, 32, generator)
        loss = (model(query, key, value) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-20:]) / len(losses[-20:])


def main() -> None:
    """Both functions, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="training steps (default 300)")
    steps = parser.parse_args().steps
    layer = multimax.MultiMax()
    print(f"softmax:  loss {train(nn.Softmax(dim=-1), steps):.4f}")
    print(f"multimax: loss {train(layer, steps):.4f}")
    print(f"learned:  {layer}")


if __name__ == "__main__":
    main()
