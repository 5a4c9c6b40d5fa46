"""What people put around modules of a model, for tests that wrap the functions of converted layers."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from multimax.convert.sites import NAMES, marked


class Passes(nn.Module):
    """Any wrapper that passes on what it gets."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class OneInput(Passes):
    """A wrapper that knows of one input only."""

    def forward(self, x: Any) -> Any:
        return self.inner(x)


class AroundLinear(Passes):
    """A wrapper of a linear layer, whose weight and bias others look at."""

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.inner.weight
        return weight

    @property
    def bias(self) -> Tensor | None:
        bias: Tensor | None = self.inner.bias
        return bias


class Changes(Passes):
    """A wrapper with a function of its own."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.inner(2.0 * x, mask)
        return out


class Doubles(Passes):
    """Another, which changes what is returned."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * self.inner(*args, **kwargs)


def trained_with_adapter(module: nn.Module) -> nn.Module:
    from peft.utils import ModulesToSaveWrapper

    wrapper: nn.Module = ModulesToSaveWrapper(module, "default")
    return wrapper


def compiled(module: nn.Module) -> nn.Module:
    wrapper: nn.Module = torch.compile(module, backend="aot_eager", fullgraph=True)
    return wrapper


def fully_sharded(module: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    wrapper: nn.Module = fully_shard(module, reshard_after_forward=True)
    return wrapper


SIMPLE: dict[str, Callable[[nn.Module], nn.Module]] = {
    "passes": Passes,
    "one input": OneInput,
    "PEFT": trained_with_adapter,
}
WRAPPERS = SIMPLE | {"compile": compiled, "FSDP2": fully_sharded}


def wrap(model: nn.Module, wrapper: Callable[[nn.Module], nn.Module]) -> int:
    """Wraps the function of every converted layer. Returns how many there are."""
    wrapped = 0
    for _, module, _ in marked(model):
        for name in NAMES:
            child = module._modules.get(name)
            if child is not None:
                module._modules[name] = wrapper(child)
                wrapped += 1
    return wrapped


@torch.no_grad()
def move(model: nn.Module, scale: float = 0.3, seed: int = 0) -> None:
    """Parameters away from the identity, different in every layer, with knots where the scores are."""
    from multimax import reweighting_parameters

    generator = torch.Generator().manual_seed(seed)
    for name, parameter in reweighting_parameters(model):
        if name.endswith("knots"):
            parameter.zero_()
        parameter += scale * torch.randn(parameter.shape, generator=generator)


def same(a: Tensor, b: Tensor) -> None:
    """As equal as two runs of one computation are."""
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def trained(model: nn.Module) -> list[Tensor]:
    """The gradients of the reweighting functions, where there are any, in order."""
    from multimax import reweighting_parameters

    found = [p.grad for _, p in reweighting_parameters(model) if p.grad is not None]
    return [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in found]


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """A process group of one, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        store = torch.distributed.FileStore(os.path.join(folder, "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()
