"""Which modules are running, and models in evaluation mode for a while."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from multimax.metrics.evaluation import evaluating
from multimax.metrics.outputs import Positions, first_tensor, sequences
from multimax.metrics.running import Frame, RunningModules


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fails = False

    def forward(self, x: Tensor, *, bias: float = 0.0) -> Tensor:
        if self.fails:
            raise RuntimeError("a bug of the model's")
        return x * x + bias


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Inner(), Inner()

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = self.first(x, bias=1.0)
        except RuntimeError:
            x = 2 * x
        return self.second(x, bias=2.0)


def watched(model: nn.Module) -> tuple[RunningModules[Frame], list[list[str]]]:
    """The modules of a model, and what is running whenever one of them returns."""
    stacks: list[list[str]] = []
    names = {module: name for name, module in model.named_modules()}
    running = RunningModules(names, Frame, lambda *_: stacks.append([frame.name for frame in running.frames]))
    return running, stacks


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_the_innermost_comes_last() -> None:
    model = Outer()
    running, stacks = watched(model)
    innermost: list[str | None] = []
    model.second.register_forward_hook(lambda *_: innermost.append(running.innermost and running.innermost.name))
    with running.watch():
        assert running.innermost is None
        model(torch.zeros(2))
    assert stacks == [["", "first"], ["", "second"], [""]]
    assert innermost == ["second"]
    assert running.frames == []
    assert hooks(model) == 1  # that of the test


def test_what_a_module_was_called_with_and_what_it_returned() -> None:
    model, found = Outer(), []
    with RunningModules(
        {model.second: "b"}, Frame, lambda frame, args, kwargs, output: found.append((frame, args, kwargs, output))
    ).watch():
        out = model(torch.zeros(2))
    ((frame, (x,), kwargs, output),) = found
    assert frame == Frame("b", model.second)
    assert x.tolist() == [1.0, 1.0]
    assert kwargs == {"bias": 2.0}
    assert output is out


def test_frames_of_modules_that_raise_are_gone() -> None:
    model = Outer()
    running, stacks = watched(model)
    model.first.fails = True  # which the model survives
    with running.watch():
        model(torch.zeros(2))
    assert stacks == [["", "second"], [""]]
    stacks.clear()
    model.second.fails = True  # which it does not
    with running.watch():
        with pytest.raises(RuntimeError, match="a bug of the model's"):
            model(torch.zeros(2))
        assert running.frames == []
        model.first.fails = model.second.fails = False
        model(torch.zeros(2))
    assert stacks == [["", "first"], ["", "second"], [""]]
    assert hooks(model) == 0


def test_a_callback_that_raises_leaves_no_frame() -> None:
    def left(frame: Frame, *_: object) -> None:
        if frame.name == "second":
            raise ValueError("a bug of the callback's")

    model = Outer()
    running = RunningModules({module: name for name, module in model.named_modules()}, Frame, left)
    with pytest.raises(ValueError, match="a bug of the callback's"), running.watch():
        model(torch.zeros(2))
    assert running.frames == []
    assert hooks(model) == 0


def test_a_hook_of_somebody_elses_that_raises_before_the_forward() -> None:
    """Its module is entered, and never left: the frame goes with the next module around it."""

    def broken(module: nn.Module, args: object) -> None:
        raise RuntimeError("a bug in a hook")

    model = Outer()
    running, stacks = watched(model)
    handle = model.first.register_forward_pre_hook(broken)
    with running.watch():
        model(torch.zeros(2))
        handle.remove()
        assert stacks[-1] == [""]
        model(torch.zeros(2))
    assert stacks[-3:] == [["", "first"], ["", "second"], [""]]
    assert running.frames == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_computes_again_is_not_running(reentrant: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    model, calls = Model(), []
    running, stacks = watched(model)
    model.inner.register_forward_pre_hook(lambda *_: calls.append(running.innermost and running.innermost.name))
    x = torch.zeros(2, requires_grad=True)
    with running.watch():
        model(x).sum().backward()
    assert stacks == [["", "inner"], [""]]
    assert calls == ["inner", None]  # the second in the backward


def test_modes_are_restored_after_evaluation() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Dropout().eval(), nn.Sequential(nn.Dropout()).eval())
    model[2][0].train()
    modes = [module.training for module in model.modules()]
    assert modes == [True, True, False, False, True]
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(RuntimeError, match="a bug"), evaluating(model):
        raise RuntimeError("a bug")
    assert [module.training for module in model.modules()] == modes
    with evaluating(model.eval()):
        model.train()  # of the user's, within
    assert not any(module.training for module in model.modules())


def test_the_first_tensor_of_an_output() -> None:
    x, y = torch.zeros(1), torch.ones(1)
    for output in (x, (x, y), [None, x], {"loss": None, "logits": (x,)}, ((), (None, [x]), y)):
        assert first_tensor(output) is x
    for nothing in (None, (), [None, "text"], {}, 1.0):
        assert first_tensor(nothing) is None


def test_outputs_as_features() -> None:
    one = Positions((2, 4, 3, 3), torch.ones(2, 3, dtype=torch.bool))
    ((features, part),) = sequences((torch.zeros(2, 3, 5), None), [one], True)
    assert features.shape == (2, 3, 5)
    assert part is one.seen
    ((features, part),) = sequences(torch.zeros(3, 2, 5), [one], False)
    assert features.shape == (2, 3, 5)
    ((features, part),) = sequences(torch.zeros(3, 5), [Positions((1, 4, 3, 3), None)], True)
    assert features.shape == (1, 3, 5)
    # fewer positions than keys: which of them take part is not known
    ((features, part),) = sequences(torch.zeros(2, 2, 5), [one], True)
    assert part is None
    packed = sequences(torch.zeros(1, 7, 5), [Positions((1, 4, 3, 3), None), Positions((1, 4, 4, 4), None)], True)
    assert [tuple(features.shape) for features, _ in packed] == [(1, 3, 5), (1, 4, 5)]
    assert sequences(torch.zeros(2, 3, 5, 1), [one], True) == []
    assert sequences(torch.zeros(2, 3, 5).long(), [one], True) == []
    assert sequences(None, [one], True) == []
