"""What a reweighting function is to the rest of the package, and how it is found by name.

The functions themselves are listed once, in :mod:`multimax.reweighting.specs`. All are called as ``function(x, *,
dim=-1, mask=None, impl="auto", ...)``. x is of any shape, float32, float64, bfloat16 or float16; half precision is
computed in float32 and returned in its dtype. ``mask`` is boolean, broadcastable to x, True where an entry takes part;
an entry that is -inf, or at or below half of its dtype's lowest finite value, takes no part either. Such entries have
weight 0 and no gradient, and a row with nothing left is all zeros. A NaN makes its whole row NaN. ``impl`` is "auto",
"cpu" (the compiled kernels) or "reference" (plain PyTorch), as for :func:`multimax.multimax`.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from multimax.ops import checks

Function = Callable[..., Tensor]
COMMON = ("x", "dim", "mask", "impl")  # what every function takes
NAME = "reweighting_name"  # beside the options that a module returns


# Where a setting of attention, as a tensor of so many dims, may have one value per batch, head and query: dims counted
# from the end, or None.
Dims = Callable[[int], tuple[int | None, int | None, int | None]]


class Sigma(NamedTuple):
    """How a function that is the softmax of modulated scores, softmax(sigma(x)), fits the fused attention."""

    # sigma of attention scores: called as (x, **options)
    scores: Callable[..., Tensor]
    # coefs and knots that make MultiMax of it, None if there are none: called as (heads, like, **options)
    parameters: Callable[..., tuple[Tensor, Tensor] | None]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A reweighting function.

    Args:
        name: of the function, for :func:`get`.
        function: called as ``function(x, *, dim, mask, impl, **options)``.
        module: the class that holds its options and what it learns.
        loss: for training a classifier that ends in the function; None if there is none.
        loss_module: the same as a module.
        learns: attributes of the module that hold what it has learned.
        differentiable: the options that may be tensors with a gradient, and which of their dims are batches, heads and
            queries.
        sigma: for a function that is the softmax of modulated scores.
        home: the package that users find the module in.
    """

    name: str
    function: Function
    module: type["Reweighter"]
    loss: Function | None = None
    loss_module: type[nn.Module] | None = None
    learns: tuple[str, ...] = ()
    differentiable: Mapping[str, Dims] = field(default_factory=dict)
    sigma: Sigma | None = None
    home: str = "reweighting"
    options: Mapping[str, inspect.Parameter] = field(init=False)  # what the function takes besides COMMON

    def __post_init__(self) -> None:
        """Reads the function's signature, once."""
        parameters = inspect.signature(self.function).parameters
        object.__setattr__(self, "options", {n: p for n, p in parameters.items() if n not in COMMON})

    def takes_heads(self) -> bool:
        """Whether the module can have parameters per head."""
        return "heads" in inspect.signature(self.module).parameters


BY_NAME: dict[str, Spec] = {}  # in the order of specs.py, which fills it


@dataclass  # not frozen: the compiler of torch 2.10 cannot make such objects
class Reweighting:
    """A function with its options, to be called as ``function(x, dim=-1, mask=None, impl="auto")``."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def spec(self) -> Spec:
        """The function's Spec."""
        return BY_NAME[self.name]

    def __call__(self, x: Tensor, *, dim: int = -1, mask: Tensor | None = None, impl: str = "auto") -> Tensor:
        """Weights of the shape and dtype of x."""
        return BY_NAME[self.name].function(x, **self.options, dim=dim, mask=mask, impl=impl)


class Reweighter(nn.Module):
    """What the modules share: a dim, and a function with the current options."""

    reweighting_name: ClassVar[str]

    def __init__(self, *, dim: int = -1) -> None:
        super().__init__()
        dim = checks.integer("dim", dim)
        self.dim = dim

    def options(self, ndim: int, dim: int) -> dict[str, Any]:
        """The function's options for an input with that many dims."""
        return {}

    def settings(self) -> dict[str, Any]:
        """What the module was made with, as plain data, except for the dim and initial parameters given as tensors."""
        return {}

    def function(self, ndim: int = 4, dim: int = -1) -> Reweighting:
        """The function with its current options: for attention scores, or for an input of ndim dims."""
        if self.reweighting_name not in BY_NAME:
            checks.choice("reweighting_name", self.reweighting_name, names())
        return Reweighting(self.reweighting_name, self.options(ndim, dim))

    def learned(self) -> dict[str, Tensor]:
        """What the module has learned, by symbol, () or (heads,) each."""
        return {name: getattr(self, name) for name in BY_NAME[self.reweighting_name].learns} if _learns(self) else {}

    def forward(self, x: Tensor | None, mask: Tensor | None = None) -> Any:
        """Weights of the shape of x; mask is True where an entry takes part. Without x, the options: see `in_use`."""
        if x is None:
            # copies, since FSDP frees the parameters' memory after the call
            options = {n: v.clone() if isinstance(v, Tensor) else v for n, v in self.function().options.items()}
            return {NAME: self.reweighting_name, **options}
        return self.function(x.ndim, self.dim)(x, dim=self.dim, mask=mask)

    def extra_repr(self) -> str:
        """The settings."""
        return "" if self.dim == -1 else f"dim={self.dim}"


def _learns(module: nn.Module) -> bool:
    return any(parameter is not None for parameter in module._parameters.values())


def names() -> tuple[str, ...]:
    """The names that :func:`get` knows.

    Example:
        >>> from multimax import reweighting
        >>> reweighting.names()
        ('softmax', 'multimax', 'sparsemax', 'entmax15', 'entmax', 'evsoftmax', 'sparsehourglass', 'topk', 'attnscale')
    """
    return tuple(BY_NAME)


def get(name: str, **options: Any) -> Reweighting:
    """A reweighting function by name, with its options.

    Args:
        name: one of :func:`names`.
        options: what the function takes besides x, dim, mask and impl: ``temperature`` (softmax), ``coefs`` and
            ``knots`` (multimax), ``alpha`` (entmax), ``eps`` (evsoftmax), ``q`` (sparsehourglass), ``k`` (topk),
            ``omega`` (attnscale).

    Returns:
        A callable of x, dim, mask and impl.

    Example:
        >>> import torch
        >>> from multimax import reweighting
        >>> reweighting.get("entmax15")(torch.tensor([1.0, 0.6, -1.0]), dim=-1)
        tensor([0.6400, 0.3600, 0.0000])
        >>> reweighting.get("topk", k=2)(torch.tensor([3.0, 2.0, -1.0]))
        tensor([0.7311, 0.2689, 0.0000])
    """
    checks.choice("name", name, names())
    spec = BY_NAME[name]
    checks.function_options(name, options, spec.options, f"{spec.home}.{spec.module.__name__}" if spec.learns else None)
    return Reweighting(name, options)


def module(name: str, **options: Any) -> nn.Module:
    """A reweighting module by name: ``module("entmax", learn=True)`` is ``Entmax(learn=True)``.

    Args:
        name: one of :func:`names`.
        options: what the module's class takes.

    Example:
        >>> from multimax import reweighting
        >>> reweighting.module("topk", k=8)
        TopK(k=8)
    """
    checks.choice("name", name, names())
    checks.module_options(BY_NAME[name].module, options)
    return BY_NAME[name].module(**options)


def function_of(reweight: str | Function) -> Function:
    """The function that a name, a module or a callable stands for."""
    if isinstance(reweight, str):
        return get(reweight)
    if isinstance(reweight, Reweighter):
        return in_use(reweight)
    if isinstance(reweight, nn.Softmax):  # torch's, which takes no mask
        return get("softmax")
    if isinstance(reweight, nn.Module):  # the user's, called like the modules here
        return lambda x, dim, mask: reweight(x, mask=mask)
    checks.reweight_function(reweight)
    return reweight


def inner(module: nn.Module) -> Reweighter | None:
    """The reweighting module that a module is, or wraps."""
    return next((m for m in module.modules() if isinstance(m, Reweighter)), None)


def in_use(module: nn.Module) -> Reweighting:
    """The function of a reweighting module, or of what wraps one, with its current options.

    The module is called, with None instead of scores, and not read: PEFT's and FSDP's wrappers, ``torch.compile`` and
    accelerate's hooks choose the parameters, or bring them to the device, in the call alone.
    """
    if isinstance(module, Reweighter):
        return _from_options(module(None))
    function = inner(module)
    if function is None:
        raise RuntimeError(
            f"multimax: expected a reweighting module, or one that wraps it, got {type(module).__name__} without any"
        )
    options, why = None, None
    try:
        options = module(None)
    except Exception as error:
        why = error
    if not isinstance(options, Mapping) or options.get(NAME) not in BY_NAME:
        raise RuntimeError(
            f"multimax: expected {type(module).__name__} around {type(function).__name__} to pass on its arguments and "
            "what is returned, got something else; a function of its own can be given as reweight= to "
            "multimax.reweighting.attention"
        ) from why
    return _from_options(options)


def _from_options(options: Mapping[str, Any]) -> Reweighting:
    return Reweighting(options[NAME], {name: value for name, value in options.items() if name != NAME})


def learned(module: nn.Module) -> dict[str, Tensor]:
    """What a reweighting module has learned, by symbol, () or (heads,) each: MultiMax in the paper's symbols.

    Args:
        module: one of this package, or any other, whose parameters are then returned as they are.

    Example:
        >>> from multimax import reweighting
        >>> {name: value.item() for name, value in reweighting.learned(reweighting.Softmax(2.0, learn=True)).items()}
        {'temperature': 2.0}
        >>> list(reweighting.learned(reweighting.MultiMax(order=1)))
        ['t_b_1', 't_d_1', 'b_1', 'd_1']
        >>> reweighting.learned(reweighting.Softmax(2.0))
        {}
    """
    if isinstance(module, Reweighter) and module.reweighting_name in BY_NAME:
        return module.learned()
    return {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
