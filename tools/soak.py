"""Very many small calls, forward and backward, of every operation: does memory stay flat?

    python tools/soak.py                  # a million calls
    python tools/soak.py --calls 20000    # a short look

Memory is this process's, as the system sees it (Linux), after a tenth of the calls and at the end. Exits with 1 if it
has grown by more than --most MiB.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import multimax
from multimax import reweighting


def resident() -> float:
    """MiB that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def operations() -> list[Callable[[], torch.Tensor]]:
    """Small calls with gradients, of every operation and of shapes that change."""
    coefs, knots = (torch.randn(2, 2, requires_grad=True) for _ in range(2))
    made: list[Callable[[], torch.Tensor]] = []
    for size in (3, 17, 64):
        x = torch.randn(4, size, requires_grad=True)
        heads = torch.randn(1, 2, size, 8, requires_grad=True)
        target, weight = torch.randint(size, (4,)), torch.randn(9, size, requires_grad=True)
        mask = torch.rand(size, size) < 0.7
        made += [
            lambda x=x: multimax.multimax(x, coefs, knots),
            lambda x=x: multimax.log_multimax(x, coefs, knots, dim=0),
            lambda x=x: reweighting.sparsemax(x),
            lambda x=x: reweighting.entmax15(x),
            lambda heads=heads: multimax.multimax_attention(heads, heads, heads, coefs, knots, is_causal=True),
            lambda heads=heads, mask=mask: multimax.multimax_attention(
                heads, heads, heads, coefs, knots, attn_mask=mask, dropout_p=0.1
            ),
            lambda x=x, target=target: multimax.multimax_cross_entropy(x, target, coefs, knots),
            lambda x=x, target=target % 9, weight=weight: multimax.linear_multimax_cross_entropy(
                x, weight, target, coefs, knots
            ),
        ]
    return made


def main() -> int:
    """Runs the calls; the exit code."""
    words = __doc__ or ""
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1_000_000, help="how many (default: a million)")
    parser.add_argument("--most", type=float, default=8, help="MiB that memory may grow by (default: 8)")
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(2)
    made, begun, before = operations(), time.monotonic(), 0.0
    for i in range(given.calls):
        result = made[i % len(made)]()
        if i % 3 == 0:  # some graphs are dropped without a backward
            result.sum().backward()
        if i == given.calls // 10:
            before = resident()
        if i % max(given.calls // 20, 1) == 0:
            print(f"{i:>9,} calls, {resident():.1f} MiB, {time.monotonic() - begun:.0f} s", file=sys.stderr)
    grown = resident() - before
    print(f"{given.calls:,} calls: memory has grown by {grown:.1f} MiB since the first tenth")
    return int(grown > given.most)


if __name__ == "__main__":
    sys.exit(main())
