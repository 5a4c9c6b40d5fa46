"""AttnScale and the losses of Patch Diversification: by hand, against slow loops, and what they are for."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from multimax.oversmoothing import (
    AttnScale,
    attn_scale,
    patch_contrastive_loss,
    patch_cosine_loss,
    patch_mixing,
    patch_mixing_loss,
)
from torch import Tensor

PROPERTY = settings(deadline=None, derandomize=True, max_examples=60)
ROUNDING = 1e-12
HALVES = [torch.float16, torch.bfloat16]


def double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def attention(*shape: int) -> Tensor:
    """Softmax weights."""
    return torch.softmax(2 * double(*shape), -1)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=ROUNDING, atol=ROUNDING)


def not_worse_than_eager(result: Tensor, eager: Tensor, exact: Tensor) -> None:
    """Low precision: the error against float64 is at most twice that of plain torch in the dtype, or its rounding."""
    assert result.dtype == eager.dtype
    rounding = (exact.to(result.dtype).double() - exact).abs().max()
    error, allowed = (result.double() - exact).abs().max(), (eager.double() - exact).abs().max()
    assert error <= max(2 * allowed, rounding)


# AttnScale


def test_attn_scale_by_hand() -> None:
    weights = torch.tensor([[0.5, 0.25, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    got = attn_scale(weights, torch.tensor(2.0, dtype=torch.float64))
    assert got.tolist() == [[1.0, 0.25, 0.25, -0.5], [2.5, -0.5, -0.5, -0.5]]


@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "mask"])
def test_attn_scale_is_the_papers_formula_in_loops(masked: bool) -> None:
    weights, omega = attention(2, 3, 4, 5), double(3)
    mask = torch.rand(2, 3, 4, 5) < 0.7 if masked else torch.ones(2, 3, 4, 5, dtype=torch.bool)
    mask[..., 0] = True
    weights = torch.where(mask, weights, 0)
    weights = weights / weights.sum(-1, keepdim=True)
    expected = torch.zeros_like(weights)
    for b in range(2):
        for h in range(3):
            for q in range(4):
                n = int(mask[b, h, q].sum())
                for k in range(5):
                    if mask[b, h, q, k]:
                        expected[b, h, q, k] = 1 / n + (1 + omega[h]) * (weights[b, h, q, k] - 1 / n)
    close(attn_scale(weights, omega, mask if masked else None), expected)


@PROPERTY
@given(st.integers(1, 7), st.floats(-2, 4), st.integers(0, 99))
def test_attn_scale_keeps_the_sum_of_a_row_whatever_it_is(keys: int, omega: float, seed: int) -> None:
    torch.manual_seed(seed)
    weights = double(2, 3, keys)
    got = attn_scale(weights, torch.tensor(omega, dtype=torch.float64))
    close(got.sum(-1), weights.sum(-1))


def test_attn_scale_leaves_the_constant_signal_and_scales_what_differs() -> None:
    n, omega = 6, torch.tensor(0.8, dtype=torch.float64)
    weights = attention(n, n)
    dc = torch.full((n, n), 1 / n, dtype=torch.float64)
    high = torch.eye(n, dtype=torch.float64) - dc
    got = attn_scale(weights, omega)
    close(got @ dc, weights @ dc)
    close(got @ high, 1.8 * weights @ high)
    # the same said in frequencies: of the row as a filter, only the one at zero keeps its gain
    before, after = torch.fft.fft(weights), torch.fft.fft(got)
    close(after[:, 0], before[:, 0])
    close(after[:, 1:], 1.8 * before[:, 1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "mask"])
def test_attn_scale_at_zero_is_the_identity_to_the_last_bit(dtype: torch.dtype, masked: bool) -> None:
    mask = torch.ones(4, 5, dtype=torch.bool).tril() if masked else None
    weights = attention(2, 3, 4, 5).to(dtype)
    if mask is not None:
        weights = torch.where(mask, weights, 0)
    assert torch.equal(attn_scale(weights, torch.zeros(3), mask), weights)


def test_attn_scale_of_minus_one_is_the_mean() -> None:
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    weights = torch.softmax(double(4, 4).masked_fill(~mask, -torch.inf), -1)
    got = attn_scale(weights, torch.tensor(-1.0, dtype=torch.float64), mask)
    close(got, mask / mask.sum(-1, keepdim=True).double())


def test_masked_keys_weigh_exactly_nothing_and_empty_rows_stay_zero() -> None:
    mask = torch.tensor([[True, True, False], [False, False, False], [True, True, True]])
    weights = torch.full((3, 3), torch.nan, dtype=torch.float64)  # what is masked is not even read
    weights[0, :2] = torch.tensor([0.75, 0.25])
    weights[2] = torch.tensor([0.5, 0.5, 0.0])
    weights.requires_grad_()
    omega = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    got = attn_scale(weights, omega, mask)
    assert got[:2].tolist() == [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    close(got[2].detach(), torch.tensor([2 / 3, 2 / 3, -1 / 3], dtype=torch.float64))
    got.square().sum().backward()
    assert weights.grad is not None
    assert omega.grad is not None
    assert weights.grad[~mask].eq(0).all()
    assert torch.isfinite(weights.grad).all()
    assert torch.isfinite(omega.grad)


def test_a_row_without_weight_stays_zero_without_a_mask() -> None:
    assert attn_scale(torch.zeros(2, 3), torch.tensor(3.0)).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("shape", [(2, 3, 1, 4), (1, 4), (4,), (2, 1, 5, 1)], ids=str)
def test_a_mask_broadcasts(shape: tuple[int, ...]) -> None:
    weights, omega = attention(2, 3, 5, 4), double(3)
    mask = torch.rand(shape) < 0.6
    assert torch.equal(attn_scale(weights, omega, mask), attn_scale(weights, omega, mask.expand(weights.shape).clone()))


@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "mask"])
def test_attn_scale_gradients(masked: bool) -> None:
    mask = torch.tensor([[True, True, False], [False, False, False]]) if masked else None
    weights, omega = attention(2, 2, 2, 3).requires_grad_(), double(2).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, o: attn_scale(a, o, mask), (weights, omega))
    assert torch.autograd.gradgradcheck(lambda a, o: attn_scale(a, o, mask), (weights, omega))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_attn_scale_in_half_precision(dtype: torch.dtype) -> None:
    weights, omega = attention(4, 3, 8, 16).to(dtype), torch.rand(3)
    mask = torch.rand(8, 16) < 0.7
    mask[:, 0] = True
    count = mask.sum(-1, keepdim=True)
    for on in (None, mask):
        low = weights if on is None else torch.where(on, weights, 0)
        mean = low.mean(-1, keepdim=True) if on is None else low.sum(-1, keepdim=True) / count
        eager = mean + (1 + omega.to(dtype)[:, None, None]) * (low - mean)
        eager = eager if on is None else torch.where(on, eager, 0)
        exact = attn_scale(low.double(), omega.double(), on)
        not_worse_than_eager(attn_scale(low, omega, on), eager.to(dtype), exact)
        assert torch.equal(attn_scale(low, omega, on), attn_scale(low.float(), omega, on).to(dtype))


@pytest.mark.parametrize("heads", [None, 3])
def test_layer(heads: int | None) -> None:
    layer = AttnScale(heads)
    assert [(name, tuple(p.shape)) for name, p in layer.named_parameters()] == [
        ("omega", () if heads is None else (heads,))
    ]
    assert repr(layer) == f"AttnScale(heads={heads})"
    weights = attention(2, 3, 4, 5).float()
    mask = torch.ones(4, 5, dtype=torch.bool).tril()
    assert torch.equal(layer(weights), weights)
    with torch.no_grad():
        layer.omega.copy_(torch.arange(3.0)[: heads or 1].reshape(layer.omega.shape) + 0.5)
    assert torch.equal(layer(weights, mask), attn_scale(weights, layer.omega, mask))
    layer(weights).square().sum().backward()
    assert layer.omega.grad is not None
    assert layer.omega.grad.ne(0).all()
    layer.reset_parameters()
    assert layer.omega.eq(0).all()


def test_layer_learns_to_undo_over_smoothing() -> None:
    """Its purpose: patches that attention made alike differ more with a larger omega."""
    weights, patches = attention(1, 8, 8), double(1, 8, 4)
    spread = [
        (attn_scale(weights, torch.tensor(omega, dtype=torch.float64)) @ patches).std(1).sum().item()
        for omega in (-0.5, 0.0, 0.5, 2.0)
    ]
    assert spread == sorted(spread)
    mean, rest = patches.mean(1, keepdim=True), weights @ patches - patches.mean(1, keepdim=True)
    close(attn_scale(weights, torch.tensor(2.0, dtype=torch.float64)) @ patches, mean + 3 * rest)


@pytest.mark.parametrize("leading", [(), (2,), (2, 5)], ids=str)
def test_heads_are_the_third_dim_from_the_end(leading: tuple[int, ...]) -> None:
    weights, omega = attention(*leading, 3, 4, 4), double(3)
    got = attn_scale(weights, omega)
    for head in range(3):
        close(got[..., head, :, :], attn_scale(weights[..., head, :, :], omega[head]))


@pytest.mark.parametrize("shape", [(0, 3, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)], ids=str)
def test_attn_scale_of_nothing(shape: tuple[int, ...]) -> None:
    assert attn_scale(torch.zeros(shape), torch.ones(3), torch.ones(shape, dtype=torch.bool)).shape == shape
    assert attn_scale(torch.zeros(shape), torch.ones(3)).shape == shape


def test_attn_scale_compiles_whole() -> None:
    weights, omega, mask = attention(2, 3, 4, 5), double(3), torch.rand(4, 5) < 0.7
    compiled = torch.compile(attn_scale, fullgraph=True, backend="aot_eager")
    close(compiled(weights, omega, mask), attn_scale(weights, omega, mask))


@pytest.mark.parametrize(
    ("weights", "omega", "mask", "message"),
    [
        (torch.ones(2, 3, 4, 5), torch.ones(2), None, r"omega of shape \(\) or \(3,\) for weights of shape \(2, 3, 4"),
        (
            torch.ones(4, 5),
            torch.ones(4),
            None,
            r"omega of shape \(\) for weights of shape \(4, 5\), got \(4,\); one",
        ),
        (torch.ones(3, 4, 5), torch.ones(3, 1), None, r"omega of shape \(\) or \(3,\).*, got \(3, 1\)"),
        (torch.tensor(1.0), torch.tensor(1.0), None, r"weights of shape \(..., heads, queries, keys\), got \(\)"),
        (torch.ones(3, 4, 5), torch.ones(3), torch.ones(4, dtype=torch.bool), r"mask that broadcasts.*\(3, 4, 5\)"),
    ],
    ids=["wrong heads", "no heads", "two dims", "scalar", "mask"],
)
def test_attn_scale_wrong_shapes(weights: Tensor, omega: Tensor, mask: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match="multimax: expected .*" + message):
        attn_scale(weights, omega, mask)


def test_attn_scale_wrong_types() -> None:
    with pytest.raises(TypeError, match=r"expected weights of dtype float32, .* got torch.int64"):
        attn_scale(torch.ones(2, 2, dtype=torch.long), torch.tensor(1.0))
    with pytest.raises(TypeError, match="expected omega to be a tensor, got float"):
        attn_scale(torch.ones(2, 2), 1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected mask to be a boolean tensor, True where an entry takes part"):
        attn_scale(torch.ones(2, 2), torch.tensor(1.0), torch.ones(2, 2))
    with pytest.raises(ValueError, match="expected heads to be an int of at least 1, got 0"):
        AttnScale(0)
    with pytest.raises(TypeError, match="expected heads to be an int, got float"):
        AttnScale(2.0)  # type: ignore[arg-type]


# Patch Diversification: the cosine loss


def test_cosine_by_hand() -> None:
    # cosines 3/5, 4/5 and 0 in the first image, all 1 in the second
    features = torch.tensor([[[1.0, 0.0], [3.0, -4.0], [0.0, 2.0]], [[1.0, 1.0], [2.0, 2.0], [-3.0, -3.0]]])
    close(patch_cosine_loss(features.double()), torch.tensor((1.4 / 3 + 1) / 2, dtype=torch.float64))


def test_cosine_is_the_papers_formula_in_loops() -> None:
    h = double(3, 5, 4)
    total = 0.0
    for image in h:
        for i in range(5):
            for j in range(5):
                if i != j:
                    total += abs(float(image[i] @ image[j] / (image[i].norm() * image[j].norm())))
    assert patch_cosine_loss(h).item() == pytest.approx(total / (3 * 5 * 4), rel=ROUNDING)


@PROPERTY
@given(st.integers(2, 6), st.integers(1, 5), st.integers(0, 99))
def test_cosine_is_between_orthogonal_and_parallel(n: int, d: int, seed: int) -> None:
    torch.manual_seed(seed)
    h = double(2, n, d)
    loss = patch_cosine_loss(h).item()
    assert 0 <= loss <= 1 + ROUNDING
    lengths = 0.1 + torch.rand(2, n, 1, dtype=torch.float64)
    assert patch_cosine_loss(h * lengths).item() == pytest.approx(loss, rel=1e-9)  # lengths do not matter,
    signs = torch.randint(2, (2, n, 1)) * 2 - 1
    assert patch_cosine_loss(h * signs).item() == pytest.approx(loss, rel=1e-9)  # nor signs,
    assert patch_cosine_loss(h[:, torch.randperm(n)]).item() == pytest.approx(loss, rel=1e-9)  # nor order
    assert patch_cosine_loss(h[:, :1] * lengths * signs).item() == pytest.approx(1, rel=1e-9)


def test_cosine_is_least_for_orthogonal_patches_and_patches_of_zeros() -> None:
    assert patch_cosine_loss(3 * torch.eye(4, dtype=torch.float64)[None]).item() == 0
    h = torch.zeros(1, 3, 4, dtype=torch.float64, requires_grad=True)
    loss = patch_cosine_loss(h)
    loss.backward()
    assert loss.item() == 0
    assert h.grad is not None
    assert h.grad.eq(0).all()


def test_a_step_down_the_cosine_makes_patches_differ() -> None:
    h = (1 + 0.1 * double(2, 6, 8)).requires_grad_()
    before = patch_cosine_loss(h)
    (gradient,) = torch.autograd.grad(before, h)
    assert patch_cosine_loss(h - gradient) < before


def test_cosine_gradient() -> None:
    assert torch.autograd.gradcheck(patch_cosine_loss, (double(2, 4, 3).requires_grad_(),))


# the contrastive loss


def test_contrastive_by_hand() -> None:
    # a patch with its own first layer, and with the mean of the others: 2 and 1/2, 1 and 1/2, 1 and 3/2
    first = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.5]]], dtype=torch.float64)
    last = torch.tensor([[[2.0, 1.0], [0.0, 1.0], [1.0, 0.0]]], dtype=torch.float64)
    expected = sum(math.log(1 + math.exp(-x)) for x in (2 - 0.5, 1 - 0.5, 1 - 1.5)) / 3
    assert patch_contrastive_loss(first, last).item() == pytest.approx(expected, rel=ROUNDING)


def test_contrastive_is_the_papers_formula_in_loops() -> None:
    first, last = double(3, 5, 4), double(3, 5, 4)
    total = 0.0
    for g, h in zip(first, last, strict=True):
        for i in range(5):
            others = sum(h[j] for j in range(5) if j != i) / 4
            same, other = math.exp(g[i] @ h[i]), math.exp(g[i] @ others)
            total -= math.log(same / (same + other)) / (3 * 5)
    assert patch_contrastive_loss(first, last).item() == pytest.approx(total, rel=ROUNDING)


def test_contrastive_bounds() -> None:
    first = torch.eye(4, dtype=torch.float64).expand(2, 4, 4)
    same = double(2, 1, 4).expand(2, 4, 4)
    assert patch_contrastive_loss(first, same).item() == pytest.approx(math.log(2), rel=ROUNDING)
    losses = [patch_contrastive_loss(first, scale * first).item() for scale in (-1.0, 0.0, 1.0, 10.0, 1000.0)]
    assert losses == sorted(losses, reverse=True)
    assert losses[1] == pytest.approx(math.log(2), rel=ROUNDING)
    assert losses[4] == 0
    # far out, where the exponentials themselves overflow, it is the difference of the exponents
    assert patch_contrastive_loss(first, -1e6 * first).item() == pytest.approx(1e6, rel=ROUNDING)


def test_the_first_layer_is_a_fixed_target() -> None:
    first, last = double(2, 4, 3).requires_grad_(), double(2, 4, 3).requires_grad_()
    patch_contrastive_loss(first, last).backward()
    assert first.grad is None
    assert last.grad is not None
    assert last.grad.ne(0).all()
    assert torch.autograd.gradcheck(lambda h: patch_contrastive_loss(first, h), (last,))


# mixing by patches


def patches_of(images: Tensor, size: tuple[int, int]) -> Tensor:
    """(B, n, channels * height * width) in a convolution's order, that of patch embeddings."""
    return F.unfold(images, size, stride=size).mT


@pytest.mark.parametrize("size", [4, (2, 4), (8, 3)], ids=str)
@pytest.mark.parametrize("soft", [False, True], ids=["indices", "probabilities"])
@pytest.mark.parametrize("share", [None, 0.0, 0.3, 1.0])
def test_each_patch_is_whole_and_has_the_target_of_its_image(
    size: int | tuple[int, int], soft: bool, share: float | None
) -> None:
    height, width = size if isinstance(size, tuple) else (size, size)
    images = torch.randn(5, 3, 16, 24)
    targets = torch.softmax(torch.randn(5, 7), -1) if soft else torch.tensor([3, 1, 4, 0, 2])
    mixed, patch_targets = patch_mixing(images, targets, size, share=share)
    n = (16 // height) * (24 // width)
    assert mixed.shape == images.shape
    assert patch_targets.shape == ((5, n, 7) if soft else (5, n))
    assert patch_targets.dtype == targets.dtype
    before, after = patches_of(images, (height, width)), patches_of(mixed, (height, width))
    for image in range(5):
        for patch in range(n):
            (source,) = (before[:, patch] == after[image, patch]).all(-1).nonzero()[0].tolist()
            assert torch.equal(patch_targets[image, patch], targets[source])


def test_the_other_patches_are_a_rectangle_of_the_share_asked_for() -> None:
    images, targets = torch.randn(6, 1, 20, 20), torch.arange(6)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        _, patch_targets = patch_mixing(images, targets, 2, share=0.36, generator=generator)
        taken = (patch_targets != targets[:, None]).reshape(6, 10, 10)
        for mask in taken:
            if mask.any():  # a permutation may leave an image to itself
                rows, columns = mask.any(1).nonzero().flatten(), mask.any(0).nonzero().flatten()
                assert mask[rows][:, columns].all()
                assert (len(rows), len(columns)) == (6, 6)
                assert (rows[-1] - rows[0], columns[-1] - columns[0]) == (5, 5)


def test_shares_and_places_vary_over_their_whole_range() -> None:
    images, targets = torch.zeros(2, 1, 4, 4), torch.arange(2)
    sizes, corners = set(), set()
    for _ in range(300):
        _, patch_targets = patch_mixing(images, targets, 1)
        taken = (patch_targets[0] != 0).reshape(4, 4)
        sizes.add(int(taken.sum()))
        if taken.sum() == 4:
            corners.add(tuple(taken.nonzero()[0].tolist()))
    assert sizes == {0, 1, 4, 9, 16}
    assert corners == {(i, j) for i in range(3) for j in range(3)}


def test_all_or_nothing() -> None:
    images, targets = torch.randn(8, 2, 6, 6), torch.arange(8)
    mixed, patch_targets = patch_mixing(images, targets, 3, share=0.0)
    assert torch.equal(mixed, images)
    assert torch.equal(patch_targets, targets[:, None].expand(8, 4))
    mixed, patch_targets = patch_mixing(images, targets, 3, share=1.0)
    partner = patch_targets[:, 0]
    assert sorted(partner.tolist()) == list(range(8))
    assert torch.equal(mixed, images[partner])


def test_the_mean_of_the_patch_targets_is_the_mixed_target_of_the_image() -> None:
    targets = torch.eye(4, dtype=torch.float64)
    mixed, patch_targets = patch_mixing(torch.arange(4.0).reshape(4, 1, 1, 1).expand(4, 1, 8, 8), targets, 2, share=0.3)
    for image in range(4):
        area = torch.stack([(mixed[image] == source).double().mean() for source in range(4)])
        close(patch_targets[image].mean(0), area)


def test_the_seed_decides() -> None:
    images, targets = torch.randn(4, 1, 8, 8), torch.arange(4)

    def drawn(generator: torch.Generator | None = None) -> list[Tensor]:
        return [tensor for _ in range(5) for tensor in patch_mixing(images, targets, 2, generator=generator)]

    torch.manual_seed(7)
    first = drawn()
    torch.manual_seed(7)
    assert all(map(torch.equal, first, drawn()))
    torch.manual_seed(7)
    seeded = drawn(torch.Generator().manual_seed(3))
    assert all(map(torch.equal, first, drawn()))  # a generator of one's own leaves the global one alone
    assert all(map(torch.equal, seeded, drawn(torch.Generator().manual_seed(3))))
    assert not all(map(torch.equal, seeded, first))


def test_inputs_are_left_alone_and_gradients_go_to_their_images() -> None:
    images, targets = torch.randn(3, 2, 4, 4, requires_grad=True), torch.arange(3)
    before = images.detach().clone()
    mixed, _ = patch_mixing(images, targets, 2, share=0.25)
    mixed.sum().backward()
    assert torch.equal(images.detach(), before)
    assert images.grad is not None
    assert images.grad.sum() == images.numel()


# the loss of mixed patches


def test_mixing_loss_in_loops() -> None:
    logits, targets = double(2, 3, 4), torch.tensor([[0, 3, 1], [2, 2, 0]])
    total = 0.0
    for b in range(2):
        for i in range(3):
            total -= math.log(torch.softmax(logits[b, i], -1)[targets[b, i]]) / 6
    assert patch_mixing_loss(logits, targets).item() == pytest.approx(total, rel=ROUNDING)
    assert patch_mixing_loss(logits, targets.int()).item() == pytest.approx(total, rel=ROUNDING)
    assert patch_mixing_loss(logits, F.one_hot(targets, 4).double()).item() == pytest.approx(total, rel=ROUNDING)


def test_mixing_loss_is_least_at_its_targets() -> None:
    targets = torch.tensor([[0, 3, 1]])
    assert patch_mixing_loss(1000 * F.one_hot(targets, 4).double(), targets).item() == 0
    y = torch.softmax(double(1, 3, 4), -1)
    entropy = -(y * y.log()).sum(-1).mean().item()
    assert patch_mixing_loss(y.log(), y).item() == pytest.approx(entropy, rel=ROUNDING)
    assert patch_mixing_loss(y.log() + 0.1 * double(1, 3, 4), y).item() > entropy


def test_mixing_loss_options() -> None:
    logits, targets = double(2, 3, 4), torch.tensor([[0, 3, 1], [2, -100, 0]])
    smooth = 0.8 * F.one_hot(targets.clamp(min=0), 4).double() + 0.2 / 4
    kept = targets != -100
    expected = -(smooth * logits.log_softmax(-1)).sum(-1)[kept].mean()
    close(patch_mixing_loss(logits, targets, label_smoothing=0.2), expected)


def test_mixing_loss_gradient() -> None:
    targets = torch.tensor([[0, 3], [2, 0]])
    assert torch.autograd.gradcheck(lambda z: patch_mixing_loss(z, targets), (double(2, 2, 4).requires_grad_(),))
    y = torch.softmax(double(2, 2, 4), -1)
    assert torch.autograd.gradcheck(lambda z: patch_mixing_loss(z, y), (double(2, 2, 4).requires_grad_(),))


def test_mixing_and_its_loss_belong_together() -> None:
    """A classifier that sees the colour of a patch has no loss on mixed images; one that sees the image's has."""
    images = torch.arange(4.0).reshape(4, 1, 1, 1).expand(4, 1, 8, 8)
    mixed, patch_targets = patch_mixing(images, torch.arange(4), 2, share=0.25)
    colours = patches_of(mixed, (2, 2)).mean(-1)
    right = 100 * F.one_hot(colours.long(), 4).float()
    assert patch_mixing_loss(right, patch_targets).item() == 0
    whole = 100 * F.one_hot(torch.arange(4), 4).float()[:, None].expand(4, 16, 4)
    moved = (patch_targets != torch.arange(4)[:, None]).any(1)
    assert moved.any()
    expected = 100 * 0.25 * moved.float().mean()
    torch.testing.assert_close(patch_mixing_loss(whole, patch_targets), expected)


# all losses


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_losses_in_half_precision(dtype: torch.dtype) -> None:
    h, g = (1 + 0.3 * double(2, 32, 16)).to(dtype), double(2, 32, 16).to(dtype)
    unit = h / h.norm(dim=-1, keepdim=True)
    cosine = (unit @ unit.mT).abs()
    eager = (cosine.sum() - cosine.diagonal(dim1=-2, dim2=-1).sum()) / (2 * 32 * 31)
    not_worse_than_eager(patch_cosine_loss(h), eager, patch_cosine_loss(h.double()))
    others = (h.sum(1, keepdim=True) - h) / 31
    same, other = (g * h).sum(-1), (g * others).sum(-1)
    eager = -(same - torch.logaddexp(same, other)).mean()
    not_worse_than_eager(patch_contrastive_loss(g, h), eager, patch_contrastive_loss(g.double(), h.double()))
    targets = torch.randint(16, (2, 32))
    eager = F.cross_entropy(h.flatten(0, 1), targets.flatten())
    not_worse_than_eager(patch_mixing_loss(h, targets), eager, patch_mixing_loss(h.double(), targets))
    # computed in float32, and rounded once
    assert torch.equal(patch_cosine_loss(h), patch_cosine_loss(h.float()).to(dtype))
    assert torch.equal(patch_contrastive_loss(g, h), patch_contrastive_loss(g.float(), h.float()).to(dtype))
    assert torch.equal(patch_mixing_loss(h, targets), patch_mixing_loss(h.float(), targets).to(dtype))


def test_autocast_does_not_round_the_cosines() -> None:
    h = 1 + 0.01 * torch.randn(2, 32, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = patch_cosine_loss(h)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, patch_cosine_loss(h))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 3), r"of shape \(batch, patches, features\), got \(2, 3\)"),
        ((2, 1, 3), r"of at least 2 patches, \(batch, patches, features\), got \(2, 1, 3\)"),
        ((2, 0, 3), r"of at least 2 patches, \(batch, patches, features\), got \(2, 0, 3\)"),
    ],
    ids=["two dims", "one patch", "no patch"],
)
def test_features_of_the_wrong_shape(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match="multimax: expected features " + message):
        patch_cosine_loss(torch.zeros(shape))
    with pytest.raises(ValueError, match="multimax: expected first " + message):
        patch_contrastive_loss(torch.zeros(shape), torch.zeros(2, 4, 3))
    with pytest.raises(ValueError, match="multimax: expected last " + message):
        patch_contrastive_loss(torch.zeros(2, 4, 3), torch.zeros(shape))


def test_layers_of_different_shapes() -> None:
    with pytest.raises(
        ValueError, match=r"first of the shape of last, \(2, 4, 3\), got \(2, 5, 3\); both without the c"
    ):
        patch_contrastive_loss(torch.zeros(2, 5, 3), torch.zeros(2, 4, 3))
    with pytest.raises(TypeError, match="expected features of dtype"):
        patch_cosine_loss(torch.zeros(2, 4, 3, dtype=torch.long))


def test_mixing_errors() -> None:
    images, targets = torch.zeros(2, 3, 8, 12), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match=r"patch_size that divides .* \(8, 12\), got 3; crop or resize the images"):
        patch_mixing(images, targets, 3)
    with pytest.raises(ValueError, match=r"patch_size that divides .*, got 0"):
        patch_mixing(images, targets, 0)
    with pytest.raises(ValueError, match=r"an int or a pair \(height, width\), got \(2, 2, 2\)"):
        patch_mixing(images, targets, (2, 2, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected patch_size to be an int, got float"):
        patch_mixing(images, targets, 2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"images of shape \(batch, channels, height, width\), got \(3, 8, 12\)"):
        patch_mixing(images[0], targets, 2)
    with pytest.raises(ValueError, match=r"of shape \(2,\) or probabilities of shape \(2, classes\), got \(3,\)"):
        patch_mixing(images, torch.zeros(3, dtype=torch.long), 2)
    with pytest.raises(ValueError, match=r"expected targets to be .*, got int"):
        patch_mixing(images, 1, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected target to be class indices"):
        patch_mixing(images, torch.zeros(2, 5, dtype=torch.long), 2)
    with pytest.raises(ValueError, match=r"expected share in \[0, 1\], got 1.5"):
        patch_mixing(images, targets, 2, share=1.5)


def test_mixing_loss_errors() -> None:
    logits = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match=r"patch_logits of shape \(batch, patches, classes\), got \(2, 3\)"):
        patch_mixing_loss(logits[..., 0], torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"indices of shape \(2, 3\) or probabilities of shape \(2, 3, 4\), got ind"):
        patch_mixing_loss(logits, torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match=r"expected targets in \[0, 3\] or ignore_index=-100, got 4"):
        patch_mixing_loss(logits, torch.full((2, 3), 4))
    with pytest.raises(ValueError, match=r"expected label_smoothing in \[0, 1\], got 2"):
        patch_mixing_loss(logits, torch.zeros(2, 3, dtype=torch.long), label_smoothing=2)
