import pytest
import torch
from torch import nn

from multimax.metrics.evaluation import evaluating


def test_every_module_is_in_its_mode_again() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), nn.BatchNorm1d(3)))
    model[1].eval()
    before = [module.training for module in model.modules()]
    x = torch.randn(4, 3)
    with evaluating(model):
        assert not any(module.training for module in model.modules())
        assert torch.equal(model[0](x), x)
    assert [module.training for module in model.modules()] == before == [True, True, False, False, False]
    with pytest.raises(KeyError), evaluating(model):
        raise KeyError
    assert [module.training for module in model.modules()] == before
    model.eval()
    with evaluating(model):
        model.train()
    assert not any(module.training for module in model.modules())
