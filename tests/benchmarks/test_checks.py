"""The benchmarks time what is right, and refuse what is wrong."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from machine import needs_kernels
from places import ROOT

FORWARD, BACKWARD = "forward", "forward+backward"


def names(figures: dict, which: str) -> list[str]:
    return [row["name"] for row in figures["rows"] if row["pass"] == which]


@needs_kernels
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_rows(benchmark: Any) -> None:
    x, params = torch.randn(4, 9), torch.zeros(2, 2)
    benchmark.check(benchmark.KERNEL, lambda x, coefs, knots: torch.softmax(x, -1), x, params, params)
    with pytest.raises(AssertionError, match="is off by"):
        benchmark.check(benchmark.KERNEL, lambda x, coefs, knots: torch.softmax(2 * x, -1), x, params, params)
    figures = benchmark.measure((16, 33), torch.float32, 0.0, True)
    assert names(figures, FORWARD) == names(figures, BACKWARD) == [figures["baseline"], *figures["ours"]]
    assert [row["bytes"] for row in figures["rows"]] == [2 * 16 * 33 * 4, 5 * 16 * 33 * 4] * 2


@needs_kernels
@pytest.mark.parametrize("benchmark", ["attention"], indirect=True)
def test_attention(benchmark: Any) -> None:
    tensors = [torch.randn(1, 2, 9, 4) for _ in range(3)] + [torch.zeros(2, 2), torch.zeros(2, 2)]
    right = torch.nn.functional.scaled_dot_product_attention(*tensors[:3], is_causal=True)
    benchmark.check(benchmark.KERNEL, right, tensors, True)
    with pytest.raises(AssertionError, match="is off by"):
        benchmark.check(benchmark.KERNEL, 2 * right, tensors, True)
    figures = benchmark.measure((1, 2, 33, 8), torch.float32, True, 0.0, True)
    assert names(figures, FORWARD) == names(figures, BACKWARD) == [benchmark.TORCH, benchmark.KERNEL]


@needs_kernels
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning", "ignore:flex_attention called without")
@pytest.mark.parametrize(
    ("benchmark", "arguments"),
    [("rows", ((16, 33), torch.float32)), ("attention", ((1, 2, 33, 8), torch.float32, True))],
    indirect=["benchmark"],
)
def test_rivals(benchmark: Any, arguments: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # it would take most of a minute
    figures = benchmark.measure(*arguments, 0.0, False)
    assert names(figures, FORWARD)[:2] == [figures["baseline"], *figures["ours"]]
    assert len(names(figures, FORWARD)) == {"rows": 5, "attention": 7}[benchmark.__name__]
    assert set(names(figures, BACKWARD)) == {*names(figures, FORWARD)} - {"FlexAttention"}


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(2, 3, 3, 8), (1, 2, 6, 8)])
@pytest.mark.parametrize("benchmark", ["attention"], indirect=True)
def test_decode_steps(benchmark: Any, heads: tuple[int, ...], dtype: torch.dtype) -> None:
    figures = benchmark.measure(heads, 64, 2, dtype, 0.0, True)
    assert names(figures, FORWARD) == [benchmark.TORCH, benchmark.KERNEL, benchmark.READ]
    assert figures["ours"] == [benchmark.KERNEL]
    assert (
        figures["read_bytes"] == 2 * heads[0] * heads[1] * 64 * heads[3] * torch.empty((), dtype=dtype).element_size()
    )
    batch, key_heads, query_heads, width = heads
    query = torch.randn(batch, query_heads, 2, width)
    key, value = torch.randn(2, batch, key_heads, 64, width).unbind(0)
    for form in benchmark.forms(query, key, value).values():
        benchmark.check(benchmark.TORCH, form(), [query, key, value, torch.zeros(2, 2), torch.zeros(2, 2)], False)


@needs_kernels
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("benchmark", ["reweighting"], indirect=True)
def test_reweighting(benchmark: Any, masked: bool) -> None:
    x, grad = torch.randn(4, 30, requires_grad=True), torch.randn(4, 30)
    mask = torch.rand(4, 30) > 0.25 if masked else None
    for name, function in benchmark.competitors(False, mask).items():
        weights = function(x)
        gradient = torch.autograd.grad(weights, x, grad)[0]
        benchmark.check(name, weights, gradient, x, grad, mask)
        with pytest.raises(AssertionError, match="is off by"):
            benchmark.check(name, weights, gradient + 1, x, grad, mask)
    figures = benchmark.measure((4, 30), masked, 0.0, True)
    assert names(figures, BACKWARD) == [benchmark.TORCH, *benchmark.OURS]
    if masked:
        assert benchmark.softmax(x, mask)[~mask].abs().max() == 0


@needs_kernels
@pytest.mark.parametrize("benchmark", ["loss"], indirect=True)
def test_loss(benchmark: Any) -> None:
    figures = benchmark.measure(50, torch.float32, 64, 0.0, True)
    assert figures["rows"][0]["name"] == benchmark.TORCH
    assert benchmark.KERNEL in names(figures, BACKWARD)

    def wrong(*arguments: Tensor) -> Tensor:
        return 2 * torch.nn.functional.linear_cross_entropy(*arguments[:3])

    tensors = [torch.randn(64, 8), torch.randn(50, 8), torch.zeros(2, 2), torch.zeros(2, 2)]
    with pytest.raises(AssertionError, match="is off by"):
        benchmark.check(benchmark.TORCH, wrong, tensors, torch.randint(50, (64,)))


@needs_kernels
@pytest.mark.parametrize("benchmark", ["threads"], indirect=True)
def test_threads(benchmark: Any) -> None:
    before = torch.get_num_threads()
    small = [
        (benchmark.rows, ((3, 50),)),
        (benchmark.attention, ((1, 2, 70, 8), True)),
        (benchmark.decode, (2, 70, 8)),
        (benchmark.cross_entropy, (4, 50)),
        (benchmark.linear, (4, 8, 50)),
    ]
    assert {make for make, _ in small} == {case.arguments[0] for case in benchmark.CASES}
    try:
        for make, arguments in small:
            torch.set_num_threads(2)
            figures = benchmark.measure(make, arguments, 0.0, True)
            assert names(figures, FORWARD) == [benchmark.ONE, "2 threads"] * (make is not benchmark.linear)
            assert names(figures, BACKWARD) == [benchmark.ONE, "2 threads"] * (make is not benchmark.decode)
        leaves = [torch.zeros(3, requires_grad=True)]
        with pytest.raises(AssertionError, match="results on 1 and on 2 threads differ"):
            benchmark.check(lambda x: x * torch.get_num_threads(), leaves, torch.ones(3), (1, 2))
        torch.set_num_threads(1)
        with pytest.raises(SystemExit, match="at least 2 threads"):
            benchmark.measure(*small[0], 0.0, True)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(torch.cuda.is_available() or torch.xpu.is_available(), reason="has a GPU")
def test_gpu_benchmark_needs_one() -> None:
    script = str(ROOT / "benchmarks" / "gpu.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("expected a GPU, got none")


@pytest.mark.parametrize("benchmark", ["gpu"], indirect=True)
def test_gpu_benchmark_refuses_what_is_wrong(benchmark: Any) -> None:
    bench = benchmark.Bench(torch.device("cpu"), "auto", 0.0)
    benchmark.rows(bench, (16, 33), torch.float32)
    assert [row["name"] for row in bench.rows] == ["torch.softmax", *benchmark.MULTIMAX] * 2
    assert bench.rows[0]["ratio"] == 1
    bench.measure({"group": "none", "shape": [1], "dtype": "float32", "causal": False}, {"none": torch.ones}, [], False)
    assert bench.rows[-1]["error"].startswith("TypeError: ")
    shown = benchmark.table({"machine": benchmark.machine(bench.device, "auto"), "rows": bench.rows})
    assert "| none | - |" in shown
    with pytest.raises(AssertionError, match="is off by"):
        benchmark.check("multimax", torch.ones(3), torch.ones(3, dtype=torch.float64) * 2)


@needs_kernels
def test_a_script_measures_in_children_and_saves(tmp_path: Path) -> None:
    """On a machine whose bfloat16 products die, the remedy reaches the child, and is recorded."""
    out = tmp_path / "new" / "reweighting.json"
    script = [sys.executable, str(ROOT / "benchmarks" / "reweighting.py")]
    command = [*script, "--quick", "--seconds", "0", "--only", "with a mask, (4, 12", "--out", str(out)]
    variables = {**os.environ, "MULTIMAX_PROBE_COMMAND": "sh -c 'kill -ILL $$'"}
    variables.pop("ONEDNN_MAX_CPU_ISA", None)
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    assert done.returncode == 0, done.stderr
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16." in done.stdout
    table = subprocess.run([*script, "--table", str(out)], capture_output=True, text=True, check=True).stdout
    assert table in done.stdout
    assert [path.name for path in out.parent.iterdir()] == [out.name]
