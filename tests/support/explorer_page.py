"""The explorer's page in a browser, opened from the disk, and what Python says of a state."""

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import multimax
from browser import Watched, browser  # noqa: F401, a fixture
from multimax import metrics, reweighting
from multimax.plots import explorer

KEYS = ("softmax", "sparsemax", "entmax", "evsoftmax", "multimax")
LISTS = ("t_b", "t_d", "b", "d", "x")
CLOSE = 1e-12  # of numbers below 1, and relative to larger ones


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    file: Path = tmp_path_factory.mktemp("explorer") / "explorer.html"
    file.write_text(explorer.page(), encoding="utf-8")
    return file.as_uri()


@pytest.fixture
def watched(browser: Any, address: str) -> Iterator[Watched]:  # noqa: F811
    """A page that has to stay silent and to ask for nothing."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True)
    context.set_default_timeout(60_000)
    watched = Watched(context.new_page())
    yield watched
    context.close()
    assert watched.said == []
    allowed = (address, "http://127.0.0.1:", "about:", "data:", "blob:")
    assert [url for url in watched.requests if not url.startswith(allowed)] == []


@pytest.fixture
def page(watched: Watched, address: str) -> Any:
    return watched.open(address)


def until(page: Any, condition: str) -> None:
    """Waits. Not by playwright's wait_for_function: it evaluates text in the page, whose policy forbids that."""
    for _ in range(1200):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"waited a minute in vain for: {condition}")


def state_of(page: Any) -> dict[str, Any]:
    return page.evaluate("state")


def follow(page: Any, hash_: str) -> None:
    """As by a click on a link to the page that is open."""
    page.evaluate(
        """hash => new Promise(done => {
            addEventListener("hashchange", done, { once: true });
            location.hash = hash;
        })""",
        hash_,
    )


def link(state: dict[str, Any]) -> str:
    lists = "&".join(f"{key}={','.join(map(repr, state[key]))}" for key in LISTS)
    numbers = "&".join(f"{key}={state[key]}" for key in ("order", "threshold", "temperature", "alpha"))
    return f"#v=1&{lists}&{numbers}"


def random_states(count: int) -> list[dict[str, Any]]:
    """Half with any numbers, half with numbers that the sliders stop at, in which entries are equal now and then."""
    choose = random.Random(0)

    def some(low: float, high: float, step: float, number: int, any_number: bool) -> list[float]:
        if any_number:
            return [choose.uniform(low, high) for _ in range(number)]
        return [round(low + step * choose.randrange(round((high - low) / step) + 1), 2) for _ in range(number)]

    states = []
    for i in range(count):
        free = i % 2 == 0
        wide = choose.choice((1.0, 3.0, 10.0))
        state: dict[str, Any] = {"order": choose.choice((1, 2))}
        state |= {key: some(-2, 6, 0.01, 2, free) for key in ("t_b", "t_d")}
        state |= {key: some(-5, 5, 0.05, 2, free) for key in ("b", "d")}
        state["x"] = some(-wide, wide, 0.05, choose.randint(3, 10), free)
        # on which side of their mean an entry falls that lies on it is a matter of rounding
        while min(abs(value - sum(state["x"]) / len(state["x"])) for value in state["x"]) < 1e-9:
            state["x"] = some(-wide, wide, 0.05, len(state["x"]), free)
        state["threshold"] = choose.choice(("mean", some(-wide, wide, 0.05, 1, free)[0]))
        state["temperature"] = choose.choice((1.0, some(0.1, 10, 0.01, 1, free)[0]))
        state["alpha"] = choose.choice((1.5, 2.0, 1.01, *some(1.02, 4, 0.01, 3, free)))
        states.append(state)
    return states


def parameters(state: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    order = state["order"]
    return multimax.from_paper(
        *(torch.tensor(state[key][:order], dtype=torch.float64) for key in ("t_b", "t_d", "b", "d"))
    )


def in_python(state: dict[str, Any]) -> dict[str, Any]:
    """What the page has to show of a state, by the functions of the package in float64."""
    x = torch.tensor(state["x"], dtype=torch.float64)
    coefs, knots = parameters(state)
    threshold = x.mean() if state["threshold"] == "mean" else state["threshold"]
    low, high = min(-5, *state["x"]), max(5, *state["x"])
    at = torch.linspace(low, high, 201, dtype=torch.float64)
    functions = {
        "softmax": lambda x: reweighting.softmax(x, temperature=state["temperature"]),
        "sparsemax": reweighting.sparsemax,
        "entmax": lambda x: reweighting.entmax(x, alpha=state["alpha"]),
        "evsoftmax": reweighting.evsoftmax,
        "multimax": lambda x: multimax.multimax(x, coefs, knots),
    }
    weights = {key: function(x) for key, function in functions.items()}
    least, _ = metrics.least_slope(coefs, knots, min(state["x"]), max(state["x"]))
    return {
        "weights": weights,
        "M": {key: metrics.multi_modality(x, weights[key], threshold=threshold) for key in KEYS},
        "S": {key: metrics.sparsity(x, weights[key], threshold=threshold) for key in KEYS},
        "simplex": {key: function(x[:3]) for key, function in functions.items()},
        "sigma": multimax.modulate(x, coefs, knots),
        "curve": {"x": at, "y": multimax.modulate(at, coefs, knots)},
        "falls": {"least": torch.tensor(least, dtype=torch.float64)},
    }


def agree(found: Any, expected: Any, where: str, close: float = CLOSE) -> None:
    if isinstance(expected, dict):
        for key, value in expected.items():
            agree(found[key], value, f"{where} {key}", close)
        return
    numbers, others = (side if isinstance(side, list) else [side] for side in (found, expected.tolist()))
    assert len(numbers) == len(others), where
    for one, other in zip(numbers, others, strict=True):
        near = abs(one - other) <= close * max(1, abs(other))
        assert near or (math.isnan(one) and math.isnan(other)), f"{where}: {one}, in Python {other}"
