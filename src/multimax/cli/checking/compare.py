"""One case, in one dtype, by several implementations: errors against float64 next to those of plain PyTorch."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from multimax.cli.checking.cases import PARAMETERS, Case, Draws, Options, Problem, Results, Values, seeded
from multimax.ops import dispatch, gpu

FORWARD, BACKWARD = 2.0, 3.0  # how many times plain PyTorch's error is allowed
MOST_DRAWS = 15  # for a case that fails with fewer: the error of a single draw is a lottery for both sides
# where a parameter's terms cancel down to a few roundings of their sum, plain PyTorch is exact by luck
CANCELLED = 64
EXACT = 1e-10  # relative, in float64: the judge is no better than the judged
CANNOT = "cannot run: "
LONGEST = 300  # characters of an error: torch lists all its backends in one line


class Ratio(NamedTuple):
    """An error as a multiple of plain PyTorch's, the multiple that is allowed, and of what it is."""

    value: float
    limit: float
    of: str

    @property
    def fine(self) -> bool:
        """Whether it is within its limit; NaN is not."""
        return self.value <= self.limit


class Outcome(NamedTuple):
    """How an implementation did in a case. Where it failed there is a sentence that says how, and where it could not
    run, the reason that it gave."""

    case: Case
    dtype: torch.dtype
    impl: str
    worst: Ratio | None = None
    repeatable: bool | None = None
    failure: str | None = None
    not_run: str | None = None


class Place(NamedTuple):
    """Where the operations run, and where the float64 that judges them is computed."""

    device: torch.device
    judge: torch.device


def place(device: torch.device) -> Place:
    """A device, and itself or, if it has no float64, the CPU."""
    try:
        torch.ones(2, dtype=torch.float64, device=device).sum().item()
    except (RuntimeError, TypeError):
        return Place(device, torch.device("cpu"))
    return Place(device, device)


def first_line(error: BaseException) -> str:
    """An error in one line."""
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text[:LONGEST]}"


def compare(case: Case, dtype: torch.dtype, impls: Iterable[str], where: Place, draws: int) -> list[Outcome]:
    """How each implementation does in a case, judged from several draws."""
    found: dict[str, Outcome] = {}
    errors: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for impl in impls:
        if impl in ("auto", *dispatch.TABLE[case.room]):
            errors[impl] = {}
        elif impl in dispatch.NAMES:  # some rooms have one more, which others need not have
            found[impl] = Outcome(case, dtype, impl, not_run="there is no such implementation of this operation")
    running = list(errors)
    repeatable: dict[str, bool] = {}
    for number in range(max(draws, MOST_DRAWS)):
        if number >= draws:
            running = [impl for impl in running if not _worst(errors[impl], dtype).fine]
        if not running:
            break
        try:
            trial = _Trial(case, dtype, number, where)
        except Exception as error:  # plain PyTorch cannot do it here, or the device has died
            reason = f"plain PyTorch: {first_line(error)}"
            found |= {impl: Outcome(case, dtype, impl, failure=reason) for impl in running}
            break
        for impl in tuple(running):
            try:
                # with all threads where it costs little: dtypes share the loops over rows and heads
                with _one_thread(number > 0 or dtype != torch.float32):
                    ours = trial.run(impl)
                    if number == 0:
                        repeatable[impl] = _same(ours, trial.run(impl))
                wrong = trial.judge(ours, errors[impl])
            except Exception as error:
                why = _cannot(error)
                if why is None:
                    found[impl] = Outcome(case, dtype, impl, failure=first_line(error))
                elif gpu.overrule(why):  # their first use failed: a failure, and here is more to be learned about it
                    found[impl] = Outcome(case, dtype, impl, failure=why)
                else:
                    found[impl] = Outcome(case, dtype, impl, not_run=why)
                running.remove(impl)
                continue
            if wrong:
                found[impl] = Outcome(case, dtype, impl, None, repeatable[impl], failure=wrong)
                running.remove(impl)
            trial.remember(impl, ours)
        last = trial
    for impl, of_impl in errors.items():
        if impl not in found:
            worst = _worst(of_impl, dtype)
            failure = None if worst.fine else last.explain(impl, worst, of_impl)
            found[impl] = Outcome(case, dtype, impl, worst, repeatable[impl], failure)
    return list(found.values())


class _Trial:
    """One draw of a case: the same problem for everyone."""

    def __init__(self, case: Case, dtype: torch.dtype, number: int, where: Place) -> None:
        self.case, self.dtype, self.number, self.where = case, dtype, number, where
        drawn = case.draw(Draws(number))
        options = _options(drawn.options, where.device, torch.float64 if dtype == torch.float64 else None)
        values = {name: t.to(where.device, _dtype_of(name, dtype)) for name, t in drawn.values.items()}
        self.problem = Problem(values, options)
        self.seeded = seeded(options, where.device)
        self.dtypes: dict[str, torch.dtype] = {}
        with _one_thread():
            self.plain = self._evaluate(case.plain, values, self.seeded)
        self.exact: Results | None = None
        self.kept: dict[str, Results] = {}

    def run(self, impl: str) -> Results:
        """Results and gradients of an implementation."""
        return self._evaluate(lambda values, options: self.case.run(values, options, impl), *self.problem)

    def remember(self, impl: str, results: Results) -> None:
        """Keeps what a failure would be explained with."""
        self.kept[impl] = results

    def judges(self) -> Results:
        """Results and gradients in float64, computed when somebody needs them."""
        if self.exact is None:
            device = self.where.judge
            values = {name: t.to(device).double() for name, t in self.problem.values.items()}
            options = _options(self.seeded, device, torch.float64)
            with _one_thread():
                self.exact = self._evaluate(self.case.exact, values, options)
        return self.exact

    def judge(self, ours: Results, errors: dict[str, list[tuple[float, float]]]) -> str | None:
        """Adds the relative errors of both sides; returns what is wrong beyond numbers."""
        for label, judge in self.judges().items():
            result, plain = ours[label], self.plain[label]
            if (result.shape, result.dtype) != (plain.shape, plain.dtype):
                return (
                    f"{label}: expected {tuple(plain.shape)} in {plain.dtype}, "
                    f"got {tuple(result.shape)} in {result.dtype}"
                )
            result, theirs = (t.to(judge.device).double() for t in (result, plain))
            rounded = judge.to(plain.dtype).double()
            if not any(_same_kinds(result, other) for other in (theirs, rounded)):
                return f"{label}: expected {_kinds(rounded)}, got {_kinds(result)}"
            finite = judge.isfinite() & theirs.isfinite() & result.isfinite()
            size = judge[finite].norm().item() or 1.0
            pair = tuple((t - judge)[finite].norm().item() / size for t in (result, theirs))
            errors.setdefault(label, []).append((pair[0], pair[1]))
        return None

    def explain(self, impl: str, worst: Ratio, errors: dict[str, list[tuple[float, float]]]) -> str:
        """A failure in words, with the entry that is furthest off."""
        error, plain = _medians(errors[worst.of])
        judge = self.judges()[worst.of]
        result = self.kept[impl][worst.of].to(judge.device).double()
        at = int((result - judge).nan_to_num().abs().argmax())
        place = list(torch.unravel_index(torch.tensor(at), judge.shape)) if judge.ndim else []
        index = [int(i) for i in place]
        return (
            f"{worst.of}: expected a relative error of at most {worst.limit:g} times {plain:.2g}, plain PyTorch's, "
            f"got {error:.2g}; furthest off at {index}: expected {judge.flatten()[at].item():.6g}, "
            f"got {result.flatten()[at].item():.6g}"
        )

    def _evaluate(self, function: Callable[[Values, Options], Results], values: Values, options: Options) -> Results:
        """Outputs, and the gradients of all values."""
        leaves = {name: t.detach().clone().requires_grad_() for name, t in values.items()}
        outputs = function(leaves, options)
        self.dtypes = self.dtypes or {name: t.dtype for name, t in outputs.items()}
        draws = Draws(1000 + self.number)
        # rounded as the first who comes here needs them: upstream gradients are the same for everyone
        upstream = [draws.normal(*t.shape).to(self.dtypes[name]).to(t.device, t.dtype) for name, t in outputs.items()]
        grads = torch.autograd.grad(list(outputs.values()), list(leaves.values()), upstream)
        results = {name: t.detach() for name, t in outputs.items()}
        return results | {f"grad of {name}": grad for name, grad in zip(leaves, grads, strict=True)}


@contextmanager
def _one_thread(wanted: bool = True) -> Iterator[None]:
    """Many small operations on a CPU: where others are at work, threads would wait for each other after each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if wanted else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if name in PARAMETERS and dtype != torch.float64 else dtype


def _options(options: Options, device: torch.device, dtype: torch.dtype | None) -> Options:
    """Tensors among the options, on a device; those of floating point in that dtype."""
    return {
        name: option.to(device, dtype if option.is_floating_point() else None) if isinstance(option, Tensor) else option
        for name, option in options.items()
    }


def _cannot(error: Exception) -> str | None:
    """The reason with which an implementation declined a call."""
    text = str(error)
    if isinstance(error, RuntimeError) and text.startswith("multimax: impl=") and CANNOT in text:
        return text.partition(CANNOT)[2]
    return None


def _same(one: Results, other: Results) -> bool:
    """Bit by bit, with NaN equal to NaN."""
    return all(bool(((a == other[name]) | (a.isnan() & other[name].isnan())).all()) for name, a in one.items())


def _same_kinds(one: Tensor, other: Tensor) -> bool:
    """NaN and infinities in the same places."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(
        one.nan_to_num(0.0, 1.0, -1.0) * one.isinf(), other.nan_to_num(0.0, 1.0, -1.0) * other.isinf()
    )


def _kinds(t: Tensor) -> str:
    return f"{int(t.isnan().sum())} NaN and {int(t.isinf().sum())} infinities among {t.numel()}"


def _medians(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    ours, theirs = zip(*pairs, strict=True)
    return statistics.median(ours), statistics.median(theirs)


def _worst(errors: dict[str, list[tuple[float, float]]], dtype: torch.dtype) -> Ratio:
    """The ratio that is closest to its limit, or furthest beyond. Less than half a rounding is no error."""
    ratios = []
    for label, pairs in errors.items():
        error, plain = _medians(pairs)
        gradient = label.startswith("grad of ")
        limit = BACKWARD if gradient else FORWARD
        own = label.removeprefix("grad of ") in PARAMETERS
        floor = 0.5 * torch.finfo(_dtype_of("coefs", dtype) if own or label == "lse" else dtype).eps
        if own:
            floor *= CANCELLED  # far below any error of plain PyTorch's with products in half precision
        if dtype == torch.float64:
            floor = EXACT
        ratios.append(Ratio(error / max(plain, floor / limit), limit, label))
    return max(ratios, key=lambda ratio: math.inf if math.isnan(ratio.value) else ratio.value / ratio.limit)
