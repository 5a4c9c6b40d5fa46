"""Off the CPU nothing of a loss is read by the host, which would have to wait for it."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import multimax
from multimax.ops import gpu
from multimax.ops.loss.call import Setting
from multimax.ops.loss.sums import rows_of


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_linear_layers_loss(impl: str, soft: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without values raise where one is asked for: everything here runs but the launches themselves."""
    if impl == "triton":
        if gpu.missing():
            pytest.skip(gpu.missing())
        launched: list[Any] = []
        monkeypatch.setattr(gpu, "launch", lambda *args, **options: launched.append(args))
        monkeypatch.setattr(gpu, "guard", lambda device: nullcontext())
        monkeypatch.setattr(gpu, "broken", lambda *args: None)
        monkeypatch.setitem(gpu.KEYS, "meta", "Meta")
    with torch.device("meta"):
        h, w, b = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((20, 4), (31, 4), (31,)))
        coefs, knots = (torch.randn(2, 2, requires_grad=True) for _ in range(2))
        target = torch.rand(20, 31) if soft else torch.randint(31, (20,))
        weight = torch.rand(31)
    for options in ({}, {"label_smoothing": 0.1, "z_loss": 0.1, "weight": weight, "return_stats": True}):
        found = multimax.linear_multimax_cross_entropy(
            h, w, target, coefs, knots, linear_bias=b, chunk=8, impl=impl, **options
        )
        loss = found[0] if options else found
        loss.backward()
        assert all(t.grad.is_meta for t in (h, w, b, coefs, knots))
    if impl == "triton":
        assert len(launched) == 2 * 2 * 3  # forward and backward of three chunks, twice


def test_a_wrong_index_gives_nan() -> None:
    """Where nobody has looked at the targets."""
    sums = torch.rand(7, 4)
    for weight in (None, torch.ones(5)):
        setting = Setting(weight, -100, 0.0, "torch", False)
        rows, mass = rows_of(sums, torch.tensor([3, 5, -100, -1]), setting, 5)
        assert rows.losses.isnan().tolist() == mass.isnan().tolist() == [False, True, False, True]
        assert rows.losses[2] == 0
