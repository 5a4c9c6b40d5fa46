"""What leaves the library: operators decomposed to torch's own, the reference by a switch, traces of torch.jit."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import multimax
from machine import needs_kernels
from multimax import reweighting
from multimax.ops import dispatch, kernels
from multimax.ops.operators import DECOMPOSED

OPS = torch.ops.multimax
COEFS, KNOTS = multimax.from_paper(t_b=[2.0, 1.3], t_d=[0.5, 0.9], b=[-0.2, 0.0], d=[0.4, 0.8])


class Operators(TorchDispatchMode):
    """The library's operators that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "multimax":
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Backend:
    """A backend of torch.compile that notes the library's operators."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found = [node.target for node in graph.graph.nodes if hasattr(node.target, "namespace")]
        self.names += [target.name() for target in found if target.namespace == "multimax"]
        return graph


def attention(dtype: torch.dtype, *, inside: bool = False, for_backward: bool = False, **options: Any) -> Any:
    query, key, value = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 5)
    query[0, 0, 0] = torch.nan if options.pop("nan", False) else query[0, 0, 0]
    if inside:
        query, key, value = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value))
    settings = {"mask": None, "bias": None, "seed": None, "p": 0.0, "causal": False, "left": -1, "right": -1} | options
    tensors = (query.to(dtype), key.to(dtype), value.to(dtype), COEFS, KNOTS, settings["mask"], settings["bias"])
    numbers = (settings["p"], 0.4, settings["causal"], settings["left"], settings["right"])
    return OPS.attention_forward.default, (*tensors, None, None, settings["seed"], *numbers, for_backward)


def calls() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Every operator that has a decomposition, with arguments of many kinds."""
    torch.manual_seed(0)
    x = torch.randn(3, 4, 5)
    masked = x.masked_fill(torch.rand(3, 4, 5) < 0.2, -torch.inf)
    masked[1, 2] = -torch.inf
    masked[2, 3, 1] = torch.nan
    mask = torch.rand(2, 1, 6, 7) < 0.7
    mask[0, 0, 2] = False
    target = torch.tensor([1, -100, 3, 0])
    logits, hidden, weight = torch.randn(4, 5), torch.randn(4, 3), torch.randn(5, 3)
    soft = torch.randn(4, 5).softmax(-1)
    found: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    for kind in range(3):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            found[f"rows {kind} {dtype}"] = OPS.rows_forward.default, (x.to(dtype), COEFS, KNOTS, None, 2, kind)
    found["rows, masked"] = OPS.rows_forward.default, (masked, COEFS, KNOTS, torch.rand(3, 4, 5) < 0.8, 2, 0)
    found["rows, logarithm, masked"] = OPS.rows_forward.default, (masked, COEFS, KNOTS, None, 2, 1)
    found["rows, first dim"] = OPS.rows_forward.default, (x, COEFS, KNOTS, None, 0, 0)
    found["rows, transposed"] = OPS.rows_forward.default, (x.transpose(0, 2), COEFS, KNOTS, None, 1, 0)
    found["rows, per head"] = (
        OPS.rows_forward.default,
        (x, COEFS.repeat(3, 1, 1, 1), KNOTS.repeat(3, 1, 1, 1), None, 2, 0),
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found[f"attention {dtype}"] = attention(dtype)
        found[f"attention, training, {dtype}"] = attention(dtype, inside=True, for_backward=True)
    found["attention, causal"] = attention(torch.float32, causal=True)
    found["attention, window"] = attention(torch.float32, left=2, right=0)
    found["attention, boolean mask"] = attention(torch.float32, mask=mask)
    found["attention, mask in numbers"] = attention(torch.float32, mask=torch.where(mask, 0.3, -torch.inf))
    found["attention, bias"] = attention(torch.float32, bias=torch.randn(1, 4, 6, 7))
    found["attention, dropout"] = attention(torch.float32, seed=torch.tensor([7]), p=0.3)
    found["attention, NaN"] = attention(torch.float32, nan=True)
    for kind in range(3):
        alpha = 1.2 + torch.rand(3, 4) if kind == 2 else None
        found[f"entmax {kind}"] = OPS.entmax_forward.default, (masked, alpha, None, kind, 0.0)
        found[f"entmax {kind}, half"] = OPS.entmax_forward.default, (x.bfloat16(), alpha, None, kind, 0.0)
    for kind, option in enumerate((2.0, 0.7, 0.1, 3.0, 0.4), 3):
        found[f"entmax {kind}"] = OPS.entmax_forward.default, (masked, None, None, kind, option)
        found[f"entmax {kind}, half"] = OPS.entmax_forward.default, (x.bfloat16(), None, x > -0.5, kind, option)
    found["temperatures"] = OPS.entmax_forward.default, (masked, 0.2 + torch.rand(3, 4), x > -0.5, 4, 0.0)
    for full in (False, True):
        setting = (torch.rand(5), -100, 0.1, "cpu", full)
        found[f"loss, {full}"] = OPS.loss_rows.default, (logits, target, COEFS, KNOTS, *setting)
        found[f"loss, probabilities, {full}"] = OPS.loss_rows.default, (logits, soft, COEFS, KNOTS, *setting)
        linear = (hidden, weight, torch.randn(5), target, COEFS, KNOTS, *setting, 0, 5, "", 2, torch.float32)
        found[f"linear loss, {full}"] = OPS.linear_loss.default, linear
    found["loss, half"] = OPS.loss_rows.default, (logits.half(), target, COEFS, KNOTS, None, -100, 0.0, "cpu", True)
    half = (hidden.bfloat16(), weight, None, target, COEFS, KNOTS, None, -100, 0.0, "cpu", True, 0, 5, "", 2)
    found["linear loss, half"] = OPS.linear_loss.default, (*half, torch.bfloat16)
    return found


CALLS = calls() if kernels.unavailable is None else {}
# What a decomposition need not compute: it is for the backward by the kernels.
SAVED = {"rows_forward": 1, "entmax_forward": 1, "attention_forward": 2, "loss_rows": 4}


@needs_kernels
def test_every_forward_operator_has_a_decomposition() -> None:
    schemas = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("multimax::")}
    ours = {operator.name() for operator in DECOMPOSED}
    # backwards are in no exported program; the compiled part of the losses is called by their operators
    inner = {"multimax::loss_add", "multimax::loss_forward", "multimax::use_isa"}
    assert ours == {name for name in schemas if "backward" not in name} - inner
    assert ours == {operator.name() for operator, _ in CALLS.values()}


@needs_kernels
@pytest.mark.parametrize("case", CALLS)
def test_decompositions_equal_the_operators(case: str) -> None:
    operator, arguments = CALLS[case]
    expected, got = operator(*arguments), DECOMPOSED[operator](*arguments)
    saved = SAVED.get(operator.name().removeprefix("multimax::"))
    assert len(got) == len(expected)
    for i, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride()), i
        if i == saved:
            continue
        if operator == OPS.attention_forward.default and i == 1:
            ours, theirs = (top + total.log() for top, total in (ours, theirs))
        half = theirs.dtype in (torch.bfloat16, torch.float16)
        exact = {"rtol": 1e-2, "atol": 1e-2} if half else {"rtol": 1e-5, "atol": 2e-6}
        torch.testing.assert_close(ours, theirs, equal_nan=True, **exact)


@needs_kernels
@pytest.mark.parametrize("case", CALLS)
def test_decompositions_leave_only_torchs_operators(case: str) -> None:
    operator, arguments = CALLS[case]
    tensors = {i: a for i, a in enumerate(arguments) if isinstance(a, Tensor)}

    def function(*values: Tensor) -> Any:
        given = dict(zip(tensors, values, strict=True))
        return operator(*(given.get(i, a) for i, a in enumerate(arguments)))

    graph = make_fx(function, decomposition_table=DECOMPOSED, tracing_mode="symbolic")(*tensors.values())
    assert not [node for node in graph.graph.nodes if "multimax" in str(node.target)]
    first, *_ = graph(*tensors.values())
    expected, *_ = operator(*arguments)
    half = first.dtype in (torch.bfloat16, torch.float16)
    torch.testing.assert_close(
        first, expected, equal_nan=True, rtol=1e-2 if half else 1e-5, atol=1e-2 if half else 2e-6
    )


@needs_kernels
def test_what_cannot_be_decomposed_stays() -> None:
    operator, arguments = attention(torch.float32)
    starts = torch.tensor([0, 6])
    packed = [*arguments]
    packed[7:9] = starts, torch.tensor([0, 7])
    assert DECOMPOSED[operator](*packed) is NotImplemented
    _, linear = CALLS["linear loss, False"]
    split = [*linear]
    split[13] = "group"
    assert DECOMPOSED[OPS.linear_loss.default](*split) is NotImplemented


@needs_kernels
def test_compilers_keep_the_kernels() -> None:
    backend = Backend()
    layer = multimax.MultiheadAttention(8, 2, batch_first=True).eval()
    torch._dynamo.reset()
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        torch.compile(layer, backend=aot_autograd(fw_compiler=backend), fullgraph=True)(x, x, x, need_weights=False)
    assert backend.names == ["multimax::attention_forward"]
    torch._dynamo.reset()


# ---- exported programs ----


class Layer(nn.Module):
    """Attention, a function of rows and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = multimax.MultiheadAttention(8, 2, batch_first=True, init="paper")
        self.rows = reweighting.Entmax15()
        self.head = multimax.MultiMaxHead(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.head(x * self.rows(x))


def operators_in(program: torch.export.ExportedProgram) -> list[str]:
    """The library's, in the parts of the program too."""
    graphs = [part.graph for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    targets = [node.target for graph in graphs for node in graph.nodes]
    return [target.name() for target in targets if getattr(target, "namespace", None) == "multimax"]


@needs_kernels
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs(grad: bool, strict: bool) -> None:
    torch.manual_seed(0)
    model, x, other = Layer().eval(), torch.randn(2, 5, 8), torch.randn(3, 9, 8)
    dynamic = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    with torch.set_grad_enabled(grad):
        program = torch.export.export(model, (x,), dynamic_shapes=dynamic, strict=strict)
    plain = program.run_decompositions()
    assert len(operators_in(program)) == 3
    assert operators_in(plain) == operators_in(program.run_decompositions({})) == []
    for batch in (x, other):
        expected = model(batch)
        torch.testing.assert_close(program.module()(batch), expected)
        torch.testing.assert_close(plain.module()(batch), expected, rtol=1e-5, atol=1e-6)


class Selected(nn.Module):
    """Attention of the rows that are wanted: their number is not known when the program is made."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        x = x[wanted]
        mask = torch.ones(x.shape[0], 1, x.shape[2], x.shape[2], dtype=torch.bool).tril()
        if self.name == "entmax15":
            return reweighting.attention(x, x, x, reweight=self.name, attn_mask=mask)
        coefs, knots = torch.full((2, 2), 0.1), torch.zeros(2, 2)
        bias = {"score_bias": mask.to(x.dtype)} if self.name == "bias" else {"attn_mask": mask}
        return multimax.multimax_attention(x, x, x, coefs, knots, **bias)


@needs_kernels
@pytest.mark.parametrize("name", ["mask", "bias", "entmax15"])
def test_a_batch_of_unknown_size(name: str) -> None:
    model, x = Selected(name), torch.randn(4, 2, 5, 8)
    with torch.no_grad():
        program = torch.export.export(model, (x, torch.tensor([True, False, True, False])), strict=False)
    for wanted in ([True, True, True, False], [False, True, False, False]):
        arguments = (x, torch.tensor(wanted))
        torch.testing.assert_close(program.module()(*arguments), model(*arguments))


# ---- the switch ----


@needs_kernels
def test_the_switch_to_the_reference() -> None:
    model, x = Layer().eval(), torch.randn(2, 5, 8)

    def operators() -> list[str]:
        with torch.no_grad(), Operators() as seen:
            model(x)
        return seen.names

    usual = operators()
    assert len(usual) == 3
    with multimax.implementation("reference"):
        assert operators() == []
        with Operators() as seen:  # a name given outright holds
            multimax.multimax(x, COEFS, KNOTS, impl="cpu")
        assert seen.names == ["multimax::rows_forward"]
        with multimax.implementation("auto"):
            assert operators() == usual
        assert operators() == []
    assert operators() == usual
    with pytest.raises(ZeroDivisionError), multimax.implementation("reference"):
        raise ZeroDivisionError
    assert operators() == usual


def test_the_switch_left_in_another_order() -> None:
    """As two threads may do."""
    first, second = multimax.implementation("reference"), multimax.implementation("reference")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert dispatch._default == "reference"
    second.__exit__(None, None, None)
    assert dispatch._default == (os.environ.get(dispatch.VARIABLE) or "auto")


@needs_kernels
def test_the_switch_under_a_compiler() -> None:
    torch._dynamo.reset()
    backend, x = Backend(), torch.randn(3, 5)
    compiled = torch.compile(lambda x: multimax.multimax(x, COEFS, KNOTS), backend=backend, fullgraph=True)
    with multimax.implementation("reference"):
        expected = compiled(x)
    assert backend.names == []
    for _ in range(2):
        torch.testing.assert_close(compiled(x), expected)
    assert backend.names == ["multimax::rows_forward"]  # compiled again, once
    torch._dynamo.reset()


def test_errors_of_the_switch() -> None:
    with (
        pytest.raises(ValueError, match="expected impl to be one of 'auto', 'reference', 'cpu', 'triton', got 'fast'"),
        multimax.implementation("fast"),
    ):
        pass
    with (
        multimax.implementation("cpu"),
        pytest.raises(RuntimeError, match="impl='cpu' cannot run: the attention kernels have no float64"),
    ):
        multimax.multimax_attention(*torch.randn(3, 1, 2, 3, 4).double(), COEFS, KNOTS)


def in_a_new_process(code: str, *arguments: object, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 or variables, done.stderr
    return done.stdout + done.stderr


def test_the_environment_variable() -> None:
    code = (
        "import torch, multimax; print(multimax.multimax(torch.ones(2), *multimax.from_paper([1.], [1.], [0.], [0.])))"
    )
    check = f"from multimax.ops import dispatch; {code}; print(dispatch._default)"
    assert "reference" in in_a_new_process(check, **{dispatch.VARIABLE: "reference"})
    said = in_a_new_process(code, **{dispatch.VARIABLE: "fast"})
    assert "ValueError: multimax: expected MULTIMAX_IMPL to be one of 'auto', 'reference', 'cpu', 'triton'" in said
    assert "cannot run" in in_a_new_process(code, **{dispatch.VARIABLE: "triton"})


# ---- torch.jit ----


@pytest.mark.parametrize("grad", [False, True])
def test_traces_are_saved_trained_and_loaded_without_the_library(grad: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, other = Layer().eval(), torch.randn(2, 5, 8), torch.randn(3, 9, 8)
    with warnings.catch_warnings(), torch.set_grad_enabled(grad):
        warnings.simplefilter("ignore")  # shapes in Python, and torch.jit itself
        traced = torch.jit.trace(model, (x,))
        torch.jit.save(traced, tmp_path / "model.pt")
        loaded = torch.jit.load(tmp_path / "model.pt")
    for batch in (x, other):
        torch.testing.assert_close(loaded(batch), model(batch), rtol=1e-5, atol=1e-6)
    for either in (loaded, model):
        either(x).square().sum().backward()
    gradients = dict(loaded.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(gradients[name].grad, parameter.grad, rtol=1e-4, atol=1e-5, msg=name)
    code = "import sys, torch; print(torch.jit.load(sys.argv[1])(torch.ones(1, 2, 8)).shape, 'multimax' in sys.modules)"
    assert in_a_new_process(code, tmp_path / "model.pt").startswith("torch.Size([1, 2, 5]) False\n")
