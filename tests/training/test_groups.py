"""Groups for the optimizer, clipping and freezing, against plain computations."""

import math

import pytest
import torch
from multimax.oversmoothing import AttnScale
from torch import Tensor, nn

import multimax
from multimax import reweighting, training

V = 50


class Model(nn.Module):
    """Two attention layers of different functions, and an output layer tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, 16)
        attentions = (
            multimax.MultiheadAttention(16, 2, batch_first=True, per_head=True, attn_scale=True),
            multimax.MultiheadAttention(16, 2, batch_first=True, reweight=reweighting.Entmax(learn=True)),
            multimax.MultiheadAttention(16, 2, batch_first=True, reweight=reweighting.Softmax(learn=True)),
        )
        self.layers = nn.ModuleList()
        for attention in attentions:
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            layer.self_attn = attention
            self.layers.append(layer)
        self.head = multimax.MultiMaxHead(16, V)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        loss: Tensor = self.head(hidden, target)
        return loss


NAMES = [
    "layers.0.self_attn.multimax.coefs",
    "layers.0.self_attn.multimax.knots",
    "layers.0.self_attn.attn_scale.omega",
    "layers.1.self_attn.reweight.shape",
    "layers.2.self_attn.reweight.log_temperature",
    "head.multimax.coefs",
    "head.multimax.knots",
]


def backward(model: Model) -> None:
    tokens, target = torch.randint(V, (2, 4, 7))
    model(tokens, target).backward()


def trained() -> Model:
    model = Model()
    backward(model)
    return model


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def norm(tensors: list[Tensor], norm_type: float = 2.0) -> float:
    return torch.cat([t.double().flatten() for t in tensors]).norm(norm_type).item()


def test_names() -> None:
    model = Model()
    assert [name for name, _ in training.reweighting_parameters(model)] == NAMES
    parameters = dict(model.named_parameters())
    assert all(parameters[name] is p for name, p in training.reweighting_parameters(model))
    # by type, wherever they are; a function without parameters has none, a shared module is one
    shared = multimax.MultiMax()
    odd = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, AttnScale(), reweighting.TopK(2))})
    assert [name for name, _ in training.reweighting_parameters(odd)] == ["a.coefs", "a.knots", "b.1.omega"]
    assert [name for name, _ in training.reweighting_parameters(shared)] == ["coefs", "knots"]
    tied = nn.ModuleList([shared, multimax.MultiMax()])
    tied[1].coefs = shared.coefs
    assert [name for name, _ in training.reweighting_parameters(tied)] == ["0.coefs", "0.knots", "1.knots"]


def test_param_groups() -> None:
    model = Model()
    model.layers[1].linear1.weight.requires_grad_(False)
    model.head.multimax.knots.requires_grad_(False)
    others, reweighting_group = training.param_groups(model, lr=0.1, weight_decay=0.3, multimax_lr_factor=5)
    assert (others["lr"], others["weight_decay"]) == (0.1, 0.3)
    assert (reweighting_group["lr"], reweighting_group["weight_decay"]) == (0.5, 0.0)
    named = {id(p): name for name, p in model.named_parameters()}
    assert [named[id(p)] for p in reweighting_group["params"]] == NAMES[:-1]
    given = [id(p) for p in others["params"] + reweighting_group["params"]]
    # the tied weight once, what is frozen never
    assert sorted(given) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    assert len(set(given)) == len(given)
    assert named[given[0]] == "embedding.weight"


def test_no_decay_and_the_learning_rate_in_a_step() -> None:
    model = Model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(training.param_groups(model, lr=0.1, weight_decay=0.5, multimax_lr_factor=3))
    backward(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        expected = before[name] - 0.3 if name in NAMES else before[name] - 0.1 * (1 + 0.5 * before[name])
        torch.testing.assert_close(p.detach(), expected)


def test_learning_rate_as_a_tensor() -> None:
    groups = training.param_groups(Model(), lr=torch.tensor(0.5), weight_decay=0.0, multimax_lr_factor=2)
    assert groups[1]["lr"] == torch.tensor(1.0)


def test_muon_gets_no_multimax_parameter() -> None:
    model = nn.Sequential(
        nn.Linear(8, 8, bias=False), nn.LayerNorm(8), multimax.MultiMaxHead(8, 4, bias=False, init="identity")
    )
    parameters = dict(training.reweighting_parameters(model))
    # what a split by dims would hand over
    assert all(p.ndim == 2 for p in parameters.values())
    others, reweighting_group = training.param_groups(model, lr=1e-2, weight_decay=0.1)
    assert reweighting_group["use_muon"] is False
    muon = torch.optim.Muon([p for p in others["params"] if p.ndim == 2], lr=0.02)
    adamw = torch.optim.AdamW([{**others, "params": [p for p in others["params"] if p.ndim != 2]}, reweighting_group])
    of_muon = {id(p) for group in muon.param_groups for p in group["params"]}
    assert of_muon == {id(model[0].weight), id(model[2].weight)}
    assert not of_muon & {id(p) for p in parameters.values()}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    x, target = torch.randn(6, 8), torch.randint(4, (6,))
    losses = []
    for _ in range(20):
        loss = model[2](model[1](model[0](x)), target)
        loss.backward()
        losses.append(loss.item())
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
    assert losses[-1] < losses[0]
    assert all(not torch.equal(before[name], p) for name, p in model.named_parameters())


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.05, 1e4])
def test_clip_scaled(norm_type: float, max_norm: float) -> None:
    model = trained()
    before = grads(model)
    scaled = [grad / math.sqrt(V) if name.startswith("head.multimax") else grad for name, grad in before.items()]
    expected = norm(scaled, norm_type)
    total = training.clip_grad_norm_(model, max_norm, norm_type=norm_type)
    assert total.item() == pytest.approx(expected, rel=1e-5)
    factor = min(1.0, max_norm / (expected + 1e-6))
    assert (factor < 1) == (max_norm < 1)
    for name, grad in grads(model).items():
        torch.testing.assert_close(grad, before[name] * factor, msg=name)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_clip_separate(norm_type: float) -> None:
    model = trained()
    before = grads(model)
    norms = [
        norm([g for n, g in before.items() if (n in NAMES) == reweighting_ones], norm_type)
        for reweighting_ones in (False, True)
    ]
    max_norm = min(norms) / 2
    total = training.clip_grad_norm_(model, max_norm, mode="separate", norm_type=norm_type)
    assert total.item() == pytest.approx(norm(list(before.values()), norm_type), rel=1e-5)
    for name, grad in grads(model).items():
        torch.testing.assert_close(grad, before[name] * max_norm / (norms[name in NAMES] + 1e-6), msg=name)


def test_clip_separate_does_not_slow_the_others() -> None:
    model = trained()
    for name, p in model.named_parameters():
        if name in NAMES:
            p.grad *= 1e6
    before = grads(model)
    others = norm([grad for name, grad in before.items() if name not in NAMES])
    training.clip_grad_norm_(model, 2 * others, mode="separate")
    after = grads(model)
    assert all(torch.equal(after[name], grad) for name, grad in before.items() if name not in NAMES)
    assert norm([grad for name, grad in after.items() if name in NAMES]) == pytest.approx(2 * others, rel=1e-4)


def test_clip_knows_output_layers() -> None:
    """What holds V, and attention, whose length is the batch's, which does not."""
    criterion = multimax.LinearMultiMaxCrossEntropyLoss(8, 100)
    with_hook = nn.Linear(8, 64)
    with_hook.add_module("multimax", multimax.MultiMax())
    model = nn.ModuleDict(
        {
            "loss": criterion,
            "head": with_hook,
            "attention": multimax.MultiheadAttention(8, 2, attn_scale=True),
            "rows": nn.Sequential(nn.Linear(8, 8), multimax.MultiMax()),
        }
    )
    sizes = {name: 1.0 for name, _ in model.named_parameters()}
    for which in ("coefs", "knots"):
        sizes[f"loss.multimax.{which}"], sizes[f"head.multimax.{which}"] = 100, 64
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    expected = norm([p.grad / math.sqrt(sizes[name]) for name, p in model.named_parameters()])
    assert training.clip_grad_norm_(model, 1.0).item() == pytest.approx(expected, rel=1e-5)


def test_clip_without_reweighting_is_torchs() -> None:
    for mode in training.MODES:
        one, other = nn.Linear(4, 4), nn.Linear(4, 4)
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        total = training.clip_grad_norm_(one, 0.1, mode=mode)
        torch.testing.assert_close(total, nn.utils.clip_grad_norm_(other.parameters(), 0.1))
        torch.testing.assert_close(one.weight.grad, other.weight.grad)
    assert training.clip_grad_norm_(nn.Linear(4, 4), 1.0) == 0  # no gradients yet
    assert training.clip_grad_norm_(nn.Linear(4, 4), 1.0, mode="separate") == 0


@pytest.mark.parametrize("mode", training.MODES)
def test_clip_nonfinite(mode: str) -> None:
    model = trained()
    model.head.multimax.coefs.grad[0, 0] = math.nan
    before = grads(model)
    with pytest.raises(RuntimeError, match="non-finite"):
        training.clip_grad_norm_(model, 1e-3, mode=mode, error_if_nonfinite=True)
    for name, grad in grads(model).items():
        torch.testing.assert_close(grad, before[name], equal_nan=True, rtol=0, atol=0)
    assert training.clip_grad_norm_(model, 1e-3, mode=mode).isnan()


def test_train_only_reweighting() -> None:
    model = trained()
    frozen, switched_on = model.layers[0].linear1.weight, model.head.multimax.coefs
    frozen.requires_grad_(False)
    switched_on.requires_grad_(False)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    with training.train_only_reweighting_(model) as only:
        assert list(only.names) == NAMES
        assert only.numel == 2 * 8 + 2 + 1 + 1 + 8
        assert repr(only) == "TrainOnly(7 parameters, 28 numbers)"
        assert [name for name, p in model.named_parameters() if p.requires_grad] == NAMES
        # no gradient is left over for an optimizer to apply
        assert {name for name, p in model.named_parameters() if p.grad is not None} <= set(NAMES)
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        backward(model)
        optimizer.step()
        changed = {name for name, p in model.named_parameters() if not torch.equal(p, values[name])}
        assert changed == set(NAMES)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    assert not frozen.requires_grad


def test_ninety_six_numbers() -> None:
    layers = [multimax.MultiheadAttention(16, 2) for _ in range(12)]
    assert training.train_only_reweighting_(nn.ModuleList(layers)).numel == 96


def test_undo_after_parameters_were_replaced() -> None:
    """As fully_shard does it."""
    model = multimax.MultiMaxHead(4, 3)
    only = training.train_only_reweighting_(model)
    model.weight = nn.Parameter(model.weight.detach().clone(), requires_grad=False)
    only.undo()
    assert model.weight.requires_grad


def test_nothing_to_train() -> None:
    for model in (nn.Linear(2, 2), nn.Sequential(reweighting.TopK(3))):
        with pytest.raises(ValueError, match=r"multimax: expected a model with parameters of a reweighting.*convert"):
            training.train_only_reweighting_(model)


def test_groups_of_a_baseline() -> None:
    model = nn.Sequential(nn.Linear(2, 2), reweighting.TopK(3))
    others, none = training.param_groups(model, lr=0.1, weight_decay=0.01, multimax_lr_factor=10)
    assert others == {"params": list(model.parameters()), "lr": 0.1, "weight_decay": 0.01}
    assert none == {"params": [], "lr": 1.0, "weight_decay": 0.0, "use_muon": False}
    before = model[0].weight.detach().clone()
    optimizer = torch.optim.AdamW([others, none])
    model[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


def test_errors() -> None:
    model = multimax.MultiMax()
    with pytest.raises(ValueError, match="multimax: expected mode to be one of 'scaled', 'separate', got 'both'"):
        training.clip_grad_norm_(model, 1.0, mode="both")
    with pytest.raises(TypeError, match=r"multimax: expected model to be an nn\.Module, got generator"):
        training.clip_grad_norm_(model.parameters(), 1.0)  # type: ignore[arg-type]
    for function in (training.train_only_reweighting_, lambda m: training.param_groups(m, lr=0.1, weight_decay=0.0)):
        with pytest.raises(TypeError, match=r"multimax: expected model to be an nn\.Module, got list"):
            function([])
    with pytest.raises(ValueError, match="multimax: expected multimax_lr_factor in"):
        training.param_groups(model, lr=0.1, weight_decay=0.0, multimax_lr_factor=-1)
