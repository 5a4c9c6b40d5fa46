"""What modules return, read as features.

Shapes: B batches, Lq queries, Lk keys, L positions, d features.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor


class Positions(NamedTuple):
    """The positions of one attention: the shape of its scores, and which positions any query could see."""

    shape: tuple[int, ...]  # (B, H, Lq, Lk)
    seen: Tensor | None  # (B, Lk)


class Sequences(NamedTuple):
    """Features of sequences of one length, and which positions take part, all if None."""

    features: Tensor  # (B, L, d)
    part: Tensor | None  # (B, L)


def first_tensor(output: object) -> Tensor | None:
    """The first tensor in what a module returned, which may be a tuple, a mapping, or nested ones."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, tuple | list):
        return next((found for found in map(first_tensor, output) if found is not None), None)
    return None


def sequences(output: object, attentions: Sequence[Positions], batch_first: bool) -> list[Sequences]:
    """A block's output as features; packed sequences, with one attention each, come one by one."""
    features = first_tensor(output)
    if features is None or not features.is_floating_point():
        return []
    first, *others = attentions
    batch, _, queries, keys = first.shape
    if features.is_nested:
        features = features.to_padded_tensor(0.0)
    if features.ndim == 2:
        features = features[None]
    elif features.ndim == 3 and (batch != queries or not batch_first) and features.shape[:2] == (queries, batch):
        features = features.transpose(0, 1)
    if features.ndim != 3:
        return []
    if others:  # packed sequences, or something unknown
        lengths = [queries for _, _, queries, _ in (attention.shape for attention in attentions)]
        packed = len(features) == 1 and features.shape[1] == sum(lengths)
        return [Sequences(part, None) for part in features.split(lengths, 1)] if packed else [Sequences(features, None)]
    known = queries == keys and features.shape[:2] == (batch, keys)
    return [Sequences(features, first.seen if known else None)]
