"""Nested tensors of sequences, which nn.TransformerEncoder makes of padded batches in evaluation."""

import torch
from torch import Tensor


def padded(sequences: Tensor) -> tuple[Tensor, Tensor]:
    """Sequences as (B, L, E), with zeros behind shorter ones, and (B, L), True where these are."""
    lengths = torch.tensor([len(sequence) for sequence in sequences.unbind()], device=sequences.device)
    dense = sequences.to_padded_tensor(0.0)
    return dense, torch.arange(dense.shape[1], device=dense.device) >= lengths[:, None]


def packed(dense: Tensor, padding: Tensor) -> Tensor:
    """The reverse."""
    lengths = (~padding).sum(1).tolist()
    rows = [row[:length] for row, length in zip(dense.unbind(), lengths, strict=True)]
    return torch.nested.as_nested_tensor(rows, dtype=dense.dtype, device=dense.device)
