"""What MultiMax adds to a model, beside what the paper prints."""

import pytest
import torch
from torch import Tensor, nn

import multimax
from multimax.metrics.counting import operations_per_score

LENGTH, WIDTH, HEADS, LAYERS = 256, 384, 6, 12  # the paper's DeiT-small


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = multimax.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x, x, x, need_weights=False)[0]


def deit_small() -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(LAYERS)))


def test_the_papers_operations_per_score() -> None:
    # section 4.2: 7 x 2 + 1
    assert [operations_per_score(order) for order in (1, 2, 3)] == [8, 15, 22]
    assert operations_per_score(2, "lower") == 7


def test_the_papers_96_parameters() -> None:
    found = multimax.count(deit_small())
    assert found.parameters == 96
    assert [layer.parameters for layer in found.layers.values()] == [8] * 12
    assert found.operations == 0


def test_operations_of_deit_small_beside_the_printed_figure() -> None:
    found = multimax.count(deit_small(), torch.randn(1, LENGTH, WIDTH))
    assert found.scores == LAYERS * HEADS * LENGTH * LENGTH
    assert found.operations == 15 * LAYERS * HEADS * LENGTH * LENGTH == 70_778_880  # 0.0708 G
    # The printed 0.0168 G is one operation chain for each entry of the features, not of the scores, in units of 2^20:
    printed = 15 * LAYERS * LENGTH * WIDTH
    assert printed == 17_694_720
    assert int(printed / 2**20 * 10) / 10_000 == 0.0168
    assert round(printed / 2**20 / 1000 / 4.6 * 100, 2) == 0.37
    assert found.operations == 4 * printed  # 6 heads x 256 keys against 384 entries


@pytest.mark.parametrize("need_weights", [False, True])
def test_attention_modules_of_any_kind(need_weights: bool) -> None:
    layer = multimax.MultiheadAttention(32, 4, order=3, per_head=True, batch_first=True)
    x, y = torch.randn(2, 5, 32), torch.randn(2, 7, 32)
    found = multimax.count(layer, x, y, y, need_weights=need_weights)
    assert list(found.layers) == ["multimax"]
    assert (found.parameters, found.scores, found.operations) == (4 * 12, 2 * 4 * 5 * 7, 2 * 4 * 5 * 7 * 22)


def test_other_functions_add_nothing() -> None:
    model = nn.ModuleDict(
        {"soft": multimax.MultiheadAttention(32, 4, reweight="softmax"), "multi": multimax.MultiheadAttention(32, 4)}
    )

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: Tensor) -> Tensor:
            x = self.parts["soft"](x, x, x, need_weights=False)[0]
            return self.parts["multi"](x, x, x, need_weights=False)[0]

    found = multimax.count(Both(), torch.randn(5, 2, 32))
    assert list(found.layers) == ["parts.multi.multimax"]
    assert found.scores == 2 * 4 * 5 * 5
    assert found.parameters == 8


def test_scores_as_a_matrix_and_the_output_layer() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = multimax.MultiMax(1, terms="lower")
            self.head = multimax.MultiMaxHead(8, 50)

        def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
            x = self.weights(x @ x.transpose(-1, -2)) @ x
            return self.head(x) if target is None else self.head(x, target)

    x, target = torch.randn(3, 6, 8), torch.zeros(3, 6, dtype=torch.long)
    for args in ((x,), (x, target)):
        found = multimax.count(Model(), *args)
        assert found.layers["weights"].scores == 3 * 6 * 6
        assert found.layers["weights"].parameters == 2  # t_b and b
        assert found.layers["weights"].operations == 3 * 6 * 6 * 4
        assert found.layers["head.multimax"].scores == 3 * 6 * 50
    assert multimax.count(multimax.MultiMax(), torch.randn(4, 9)).scores == 36
    logits = torch.randn(4, 9)
    loss = multimax.MultiMaxCrossEntropyLoss()
    assert multimax.count(loss, logits, torch.zeros(4, dtype=torch.long)).scores == 36


def test_the_model_is_left_as_it_was() -> None:
    model = deit_small()
    model[3].eval()

    def hooks() -> list[int]:
        return [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]

    flags, before = [module.training for module in model.modules()], hooks()
    multimax.count(model, torch.randn(1, 4, WIDTH))
    with pytest.raises(ValueError, match="expected"):
        multimax.count(model, torch.randn(1, 2, 3, 4))
    assert [module.training for module in model.modules()] == flags
    assert hooks() == before
    assert not multimax.ops.observing.active()


def test_a_table() -> None:
    text = str(multimax.count(deit_small(), torch.randn(1, 2, WIDTH)))
    assert text.splitlines()[0] == "| layer | parameters | scores | operations |"
    assert text.splitlines()[-1] == "| all | 96 | 288 | 4,320 |"
    assert "| 0.attn.multimax | 8 | 24 | 360 |" in text


def test_errors() -> None:
    with pytest.raises(ValueError, match="expected a model with MultiMax in it"):
        multimax.count(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"expected model to be an nn\.Module, got str"):
        multimax.count("model")  # type: ignore[arg-type]
