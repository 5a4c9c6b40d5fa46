"""The explorer: its server, and its page in a real browser, whose numbers are compared with Python's."""

import contextlib
import io
import json
import math
import random
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import multimax
from browser import Watched, browser  # noqa: F401, a fixture
from multimax import metrics, plots, reweighting
from multimax.plots import explorer

KEYS = ("softmax", "sparsemax", "entmax15", "evsoftmax", "multimax")
OTHERS = {key: getattr(reweighting, key) for key in KEYS[:-1]}
PYTHON_NAMES = dict(zip(KEYS, ("softmax", "sparsemax", "entmax-1.5", "Ev-SoftMax", "MultiMax"), strict=True))


# ---- the server ----


def test_the_packaged_page_holds_the_presets():
    text = explorer.FILE.read_text(encoding="utf-8")
    assert explorer.page() == text, "run multimax explore --save src/multimax/plots/explorer/page.html"
    found = json.loads(re.search(r'id="presets">\n(.*?)\n</script>', text, re.DOTALL)[1])
    assert list(found) == list(multimax.presets)
    for name, layers in multimax.presets.items():
        assert [[tuple(row) for row in layer] for layer in found[name]["layers"]] == [list(layer) for layer in layers]


def test_the_page_is_one_file_without_markup_from_data():
    text = explorer.FILE.read_text(encoding="utf-8")
    assert re.findall(r"https?://[^\"'\s]+", text) == ["http://www.w3.org/2000/svg"]  # a name, which is not fetched
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    colours = [re.search(rf"--{key}: (#\w+);", text)[1] for key in KEYS]
    assert len(set(colours)) == len(KEYS)
    assert set(colours) <= set(plots.COLOURS)


@pytest.fixture
def served() -> Iterator[str]:
    with explorer.server(port=0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


def test_serves_the_page_and_nothing_else(served: str):
    with urllib.request.urlopen(served) as answer:
        assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
        assert answer.read().decode() == explorer.page()
    for path in ("page.html", "../cli.py", "favicon.ico"):
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(served + path)
        assert error.value.code == 404
        error.value.close()


def test_answers_for_this_machine_alone(served: str):
    """A page elsewhere that gives its own name this machine's address gets nothing."""
    port = served.rpartition(":")[2].strip("/")
    for host in ("127.0.0.1", f"localhost:{port}", "LOCALHOST:9000"):  # another port: through a tunnel
        with urllib.request.urlopen(urllib.request.Request(served, headers={"Host": host})) as answer:
            assert answer.status == 200
    for host in ("evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", "localhost.evil.example"):
        with pytest.raises(urllib.error.HTTPError, match="multimax: only for this machine itself") as error:
            urllib.request.urlopen(urllib.request.Request(served, headers={"Host": host}))
        assert error.value.code == 403
        error.value.close()


def test_a_connection_closed_early_is_no_error(capfd: pytest.CaptureFixture[str]):
    with explorer.server(port=0) as server:
        for error in (ConnectionResetError("closed"), BrokenPipeError("closed")):
            try:
                raise error
            except OSError:
                server.handle_error(None, ("127.0.0.1", 1))
        assert capfd.readouterr().err == ""
        try:
            raise ValueError("of ours")
        except ValueError:
            server.handle_error(None, ("127.0.0.1", 1))
        assert "of ours" in capfd.readouterr().err


# ---- the page ----


FILE = explorer.FILE.as_uri()


@pytest.fixture
def watched(browser: Any) -> Iterator[Watched]:  # noqa: F811
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(20_000)
    watched = Watched(context.new_page())
    yield watched
    context.close()
    assert watched.said == []
    outside = [url for url in watched.requests if not url.startswith((FILE, "http://127.0.0.1:", "about:", "data:"))]
    assert outside == []


@pytest.fixture
def page(watched: Watched) -> Any:
    return watched.open(FILE)


def until(page: Any, condition: str) -> None:
    """Waits. Not by playwright's wait_for_function: it evaluates text in the page, whose policy forbids that."""
    for _ in range(400):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"waited 20 seconds in vain for: {condition}")


def state_of(page: Any) -> dict[str, Any]:
    return page.evaluate("state")


def link(state: dict[str, Any]) -> str:
    lists = "&".join(f"{key}={','.join(map(repr, state[key]))}" for key in ("t_b", "t_d", "b", "d", "x"))
    return f"#order={state['order']}&{lists}&threshold={state['threshold']}"


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
        state["threshold"] = choose.choice(("mean", some(-wide, wide, 0.05, 1, free)[0]))
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
    at = torch.linspace(min(-5, *state["x"]), max(5, *state["x"]), 201, dtype=torch.float64)

    def weights(x: torch.Tensor, key: str) -> torch.Tensor:
        return multimax.multimax(x, coefs, knots) if key == "multimax" else OTHERS[key](x)

    by_key = {key: weights(x, key) for key in KEYS}
    return {
        "weights": by_key,
        "M": {key: metrics.multi_modality(x, by_key[key], threshold=threshold) for key in KEYS},
        "S": {key: metrics.sparsity(x, by_key[key], threshold=threshold) for key in KEYS},
        "simplex": {key: weights(x[:3], key) for key in KEYS},
        "sigma": multimax.modulate(x, coefs, knots),
        "curve": {"x": at, "y": multimax.modulate(at, coefs, knots)},
    }


def agree(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, dict):
        for key, value in expected.items():
            agree(found[key], value, f"{where} {key}")
        return
    numbers, others = (side if isinstance(side, list) else [side] for side in (found, expected.tolist()))
    assert len(numbers) == len(others), where
    for one, other in zip(numbers, others, strict=True):
        assert abs(one - other) <= 1e-6 or (math.isnan(one) and math.isnan(other)), f"{where}: {one}, in Python {other}"


# Goes from link to link and reads the tables as they stand on the page, and what the figures are drawn from.
READ_ALL = """async links => {
  const found = [];
  for (const link of links) {
    const changed = new Promise(done => addEventListener("hashchange", done, { once: true }));
    location.hash = link;
    await changed;
    const row = element => [...element.querySelectorAll("td")].map(cell => Number(cell.dataset.value));
    found.push({
      rows: [...document.querySelectorAll("#entries tr")].map(row), M: row($("M")), S: row($("S")),
      state, drawn: { ...result, path: null }, message: $("message").hidden,
    });
  }
  return found;
}"""


def test_numbers_agree_with_python(page: Any):
    states = random_states(200)
    found = page.evaluate(READ_ALL, [link(state) for state in states])
    undefined = 0
    for i, (state, read) in enumerate(zip(states, found, strict=True)):
        assert read["message"], "the link was refused"
        assert read["state"] == state
        expected = in_python(state)
        agree(read["drawn"], expected, f"state {i}")
        shown = {key: [row[k] for row in read["rows"]] for k, key in enumerate(KEYS)}
        agree(shown, expected["weights"], f"state {i}, table")
        for letter in ("M", "S"):
            agree(dict(zip(KEYS, read[letter], strict=True)), expected[letter], f"state {i}, {letter} of the table")
            undefined += math.isnan(read[letter][0])
    assert 0 < undefined < 100  # NaN, where there is no such entry, is among what was compared, and most is not


def test_equal_and_far_entries(page: Any):
    """Ties, and entries so far apart that softmax has nothing left for some of them."""
    base = random_states(1)[0] | {"order": 2}
    vectors = ([0.0] * 10, [1.0, 1.0, -1.0], [10.0, -10.0, -10.0], [2.0, 1.0, 0.0], [-10.0] * 4 + [10.0] * 5)
    states = [base | {"x": list(x), "threshold": threshold} for x in vectors for threshold in ("mean", 0.0)]
    for i, read in enumerate(page.evaluate(READ_ALL, [link(state) for state in states])):
        agree(read["drawn"], in_python(states[i]), f"state {i}")


def test_figures_show_the_numbers(page: Any):
    """Back from the pictures' coordinates, which browsers keep to single precision, to numbers."""
    page.evaluate("link => { location.hash = link; }", "#x=2,1.5,-1,0.25&threshold=0")
    until(page, "state.x.length === 4")
    result = page.evaluate("result")
    ends = "line => ['x1', 'y1', 'x2', 'y2'].map(end => line[end].baseVal.value)"
    x1, y1, x2, y2 = page.locator("#curve .identity").evaluate(ends)  # from (-5, -5) to (5, 5)
    drawn = [pair.split(",") for pair in page.locator("#curve polyline").get_attribute("points").split()]
    assert [(float(x) - x1) / (x2 - x1) * 10 - 5 for x, _ in drawn] == pytest.approx(result["curve"]["x"], abs=1e-4)
    assert [(float(y) - y1) / (y2 - y1) * 10 - 5 for _, y in drawn] == pytest.approx(result["curve"]["y"], abs=1e-4)

    corners = torch.tensor(page.evaluate("CORNERS"), dtype=torch.float64)
    inverse = torch.linalg.inv(torch.cat([corners.T, torch.ones(1, 3, dtype=torch.float64)]))

    def weights(x: float, y: float) -> list[float]:
        return (inverse @ torch.tensor([x, y, 1.0], dtype=torch.float64)).tolist()

    path = page.locator("#simplex .path").get_attribute("points").split()
    for pair, temperature in zip(path, page.evaluate("TEMPERATURES"), strict=True):
        expected = torch.softmax(torch.tensor([2.0, 1.5, -1.0], dtype=torch.float64) / temperature, -1)
        agree(weights(*map(float, pair.split(","))), expected, f"T = {temperature}")
    for key in KEYS:
        # the middle of the mark; the triangle's is not that of its box
        box = page.locator(f"#simplex [data-function={key}]").evaluate(
            "mark => { const b = mark.getBBox(); return [b.x + b.width / 2, b.y + b.height / 2]; }"
        )
        assert weights(*box) == pytest.approx(result["simplex"][key], abs=0.01)


def test_sliders_and_boxes_move_the_state(page: Any):
    weight = "Number(document.querySelector('#entries td:last-child').dataset.value)"
    for key in ("t_b", "t_d", "b", "d"):
        for n in (1, 2):
            before = page.evaluate(weight)
            page.locator(f"#{key}{n}").fill("0.4")
            assert state_of(page)[key][n - 1] == 0.4
            assert page.locator(f"#{key}{n}-number").input_value() == "0.4"
            page.locator(f"#{key}{n}-number").fill("0.123456")
            assert state_of(page)[key][n - 1] == 0.123456
            assert page.evaluate(weight) != before
    agree(page.evaluate("result"), in_python(state_of(page)), "after the sliders")
    assert page.locator("#preset").input_value() == ""  # none of the paper's any more
    page.locator("#x2").fill("-3.5")
    page.locator("#threshold").fill("0.5")
    assert state_of(page)["x"][1] == -3.5
    assert state_of(page)["threshold"] == 0.5
    page.locator("#mean").check()
    assert state_of(page)["threshold"] == "mean"
    page.get_by_label("order 1", exact=True).check()
    assert state_of(page)["order"] == 1
    assert page.locator("#t_b2").is_disabled()
    agree(page.evaluate("result"), in_python(state_of(page)), "order 1")
    page.locator("#reset").click()
    assert state_of(page) == page.evaluate("defaultState()")


def test_boxes_refuse_what_is_no_number(page: Any):
    box, before = page.locator("#x1-number"), state_of(page)
    for text in ("", "11", "-10.001"):
        box.fill(text)
        assert box.get_attribute("aria-invalid") == "true"
        assert "x1: expected a number between -10 and 10" in page.locator("#status").inner_text()
        assert state_of(page) == before
    box.blur()
    assert box.input_value() == "2.4"
    assert box.get_attribute("aria-invalid") == "false"


def test_entries_come_and_go(page: Any):
    rows = page.locator("#entries tr")
    while rows.count() < 10:
        count = rows.count()
        page.locator("#add").click()
        assert rows.count() == count + 1
        assert page.evaluate("document.activeElement.id") == f"x{count + 1}"
    assert page.locator("#add").is_disabled()
    page.get_by_label("Remove x2").click()
    assert state_of(page)["x"] == [2.4, -1.0, 0.3, -0.2, 0, 0, 0, 0, 0]
    while rows.count() > 3:
        page.locator("#entries button").last.click()
    assert page.locator("#entries button:disabled").count() == 3
    assert page.evaluate("document.activeElement.id") == "x3"
    agree(page.evaluate("result"), in_python(state_of(page)), "three entries")


def test_edges_of_the_simplex_are_seen(watched: Watched):
    """The triangle is what the points are read against: 3 to 1, as for all graphics (WCAG 1.4.11)."""
    luminance = """rgb => { const part = value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
        const [r, g, b] = rgb.match(/\\d+/g).map(value => part(value / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; }"""
    for scheme in ("light", "dark"):
        watched.page.emulate_media(color_scheme=scheme)
        page = watched.open(FILE)
        edge = page.evaluate(f"({luminance})(getComputedStyle(document.querySelector('#simplex polygon')).stroke)")
        card = page.evaluate(f"({luminance})(getComputedStyle(document.querySelector('.card')).backgroundColor)")
        assert (max(edge, card) + 0.05) / (min(edge, card) + 0.05) >= 3


def test_every_preset(page: Any):
    names = [(table, n) for table, layers in multimax.presets.items() for n in range(len(layers))]
    assert len(names) == 18
    for table, n in names:
        page.locator("#preset").select_option(f"{table}:{n + 1}")
        found = state_of(page)
        assert [tuple(found[key]) for key in ("t_b", "t_d", "b", "d")] == list(multimax.presets[table][n])
        assert page.locator("#preset").input_value() == f"{table}:{n + 1}"
        agree(page.evaluate("result"), in_python(found), f"{table} {n}")
    page.locator("#preset").select_option("softmax")
    result = page.evaluate("result")
    assert result["weights"]["multimax"] == result["weights"]["softmax"]
    assert result["curve"]["x"] == result["curve"]["y"]


def test_link_carries_the_whole_state(watched: Watched):
    page = watched.open(FILE)
    page.locator("#x1-number").fill("1.2345678901234567")
    page.locator("#t_d2").fill("-1.5")
    page.locator("#mean").check()
    page.locator("#add").click()
    page.get_by_label("order 1", exact=True).check()
    expected = state_of(page)
    until(page, "location.hash === toHash(state)")  # the address follows a little later
    watched.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("#copy-link").click()
    until(page, "$('status').textContent === 'Link copied'")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == page.url
    page = watched.open(copied)
    assert state_of(page) == expected
    for mailed in (copied.replace(",", "%2C"), copied.replace("&", "%26").replace("=", "%3d")):  # as programs like it
        page = watched.open(mailed)
        assert state_of(page) == expected
        assert page.locator("#message").is_hidden()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("t_b=a,1", "expected a number for t_b1, got “a”"),
        ("t_b=1,NaN", "expected a number for t_b2, got “NaN”"),
        ("x=1,2,Infinity", "expected a number for x3, got “Infinity”"),
        ("x=1,\N{MINUS SIGN}2,3", "expected a number for x2, got “\N{MINUS SIGN}2”"),
        ("x=1,,3", "expected a number for x2, got “”"),
        ("x=1,2,1e999", "expected x3 between -10 and 10, got “1e999”"),
        ("d=1,-1e9", "expected d2 between -5 and 5"),
        ("x=1,2", "expected 3 to 10 entries of x, got 2"),
        ("x=" + ",".join("1" * 11), "expected 3 to 10 entries of x, got 11"),
        ("b=1", "expected b with 2 numbers, one per order, got 1"),
        ("order=3", "expected order 1 or 2, got “3”"),
        ("threshold=median", "expected a number for threshold, got “median”"),
        ("order=1&order=2", "expected order once, got it twice"),
        ("layer=3", "expected order, t_b, t_d, b, d, x, threshold with values, got “layer=3”"),
        ("toString=3", "expected order, t_b, t_d, b, d, x, threshold with values, got “toString=3”"),
        ("__proto__=3", "expected order, t_b, t_d, b, d, x, threshold with values"),
        ("x", "expected order, t_b, t_d, b, d, x, threshold with values, got “x”"),
        ("%E0%A4%A=%", "expected order, t_b, t_d, b, d, x, threshold with values"),
        ("x=" + "1" * 5000, "expected at most 4000 characters, got 5002"),
        ("x=1,2,<img/src=x/onerror=document.title=1>", "expected a number for x3, got “"),
    ],
)
def test_wrong_links(watched: Watched, wrong: str, words: str):
    page = watched.open(f"{FILE}#{wrong}")
    text = page.locator("#message").inner_text()
    assert text.startswith("The link was not understood: ")
    assert words in text
    assert "What you see is the default state." in text
    assert state_of(page) == page.evaluate("defaultState()")
    assert page.title() == "MultiMax explorer"
    assert page.locator("img").count() == 0
    agree(page.evaluate("result"), in_python(state_of(page)), "by default")
    page.locator("#x1").fill("1")  # and the page goes on
    assert page.locator("#message").is_hidden()
    assert state_of(page)["x"][0] == 1


@pytest.mark.parametrize(
    "hash_",
    [
        "",
        "#order=1&t_b=2,3&t_d=0.5,-1&b=0,0&d=1,0&x=3,2,-1&threshold=mean",
        "#x=1,-2e-7,3,0.5,0.25,0,0,0,0,10&t_b=3,2.5&threshold=-0.5",
        "#t_b=1,1&t_d=1,1",
    ],
)
def test_copied_python_runs_and_gives_the_same(watched: Watched, hash_: str):
    page = watched.open(FILE + hash_)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("#copy-python").click()
    until(page, "$('status').textContent === 'Python copied'")
    text = page.evaluate("navigator.clipboard.readText()")
    page.locator("summary").click()
    assert page.locator("#python").inner_text().strip() == text.strip()
    assert max(map(len, text.splitlines())) <= 120
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(text, "copied", "exec"), names)
    result = page.evaluate("result")
    agree(result["weights"], {key: names["weights"][PYTHON_NAMES[key]] for key in KEYS}, "weights")
    lines = printed.getvalue().splitlines()
    for key, line in zip(KEYS, lines, strict=True):
        measures = f"M {result['M'][key]:.3f}  S {result['S'][key]:.3f}"
        assert line.startswith(f"{PYTHON_NAMES[key]:<10}  {measures}".replace("NaN", "nan"))


def test_without_a_clipboard(page: Any):
    page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('no')); }")
    page.locator("#copy-link").click()
    assert "does not let this page copy. Link to copy by hand" in page.locator("#message").inner_text()
    assert page.locator("#by-hand").input_value() == page.evaluate("location.href.split('#')[0] + toHash(state)")
    assert page.evaluate("document.activeElement.id") == "by-hand"
    assert page.evaluate("document.activeElement.selectionEnd") > 100
    page.locator("#dismiss").click()
    assert page.locator("#message").is_hidden()


def test_keyboard_alone(page: Any):
    reached = []
    for _ in range(100):
        page.keyboard.press("Tab")
        name, outlined = page.evaluate(
            "[document.activeElement.id || document.activeElement.getAttribute('aria-label') "
            "|| document.activeElement.tagName, getComputedStyle(document.activeElement).outlineStyle !== 'none']"
        )
        if name == "BODY" or name in reached:
            break
        assert outlined, f"{name} does not show that it has the focus"
        reached.append(name)
    # three buttons, five entries with three elements each, the row below, the modulator (order: one stop), the summary
    assert len(reached) == 3 + 5 * 3 + 4 + 1 + 1 + 8 * 2 + 1, reached
    page.locator("#t_d1").focus()
    page.keyboard.press("Home")
    assert state_of(page)["t_d"][0] == -2
    page.keyboard.press("End")
    assert state_of(page)["t_d"][0] == 6
    page.keyboard.press("ArrowLeft")
    assert state_of(page)["t_d"][0] == 5.99
    page.keyboard.press("Tab")
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("0.75")
    assert state_of(page)["t_d"][0] == 0.75
    page.keyboard.press("ArrowUp")
    assert state_of(page)["t_d"][0] == 0.76
    page.locator("#preset").focus()
    page.keyboard.type("WikiText-103 LM, layer 2")
    assert tuple(state_of(page)["t_b"]) == multimax.presets["wikitext103_lm"][1].t_b
    page.locator("#reset").focus()
    page.keyboard.press("Enter")
    assert state_of(page) == page.evaluate("defaultState()")


def test_every_control_has_a_name(page: Any):
    assert (
        page.evaluate("""[...document.querySelectorAll("input, select, button, svg[role=img]")].filter(
        item => !item.getAttribute("aria-label") && !item.labels?.length && !item.textContent.trim()).length""")
        == 0
    )


@pytest.mark.parametrize("width", [320, 360, 768, 1100])
def test_narrow_screens_do_not_scroll_sideways(watched: Watched, width: int):
    watched.page.set_viewport_size({"width": width, "height": 740})
    ten = ",".join(["-9.123456789"] * 10)
    for hash_ in ("", f"#x={ten}&threshold=mean", "#x=" + "y" * 3000):
        page = watched.open(FILE + hash_)
        page.locator("summary").click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        # nothing is cut off either
        assert page.evaluate("""[...document.querySelectorAll("button, input, select, td, th, svg")].every(
            part => part.getBoundingClientRect().right <= innerWidth)""")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(watched: Watched, scheme: str):
    watched.page.emulate_media(color_scheme=scheme)
    page = watched.open(FILE)
    ink, paper = page.evaluate("""["color", "backgroundColor"].map(
        name => getComputedStyle(document.body)[name].match(/\\d+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0))""")
    assert (ink < paper) == (scheme == "light")


def test_prints_without_its_controls(page: Any):
    page.emulate_media(media="print")
    assert not page.locator("#t_b1").is_visible()
    assert not page.locator("#reset").is_visible()
    for shown in ("#t_b1-number", "#curve", "#simplex", "#M", "#x1-number"):
        assert page.locator(shown).is_visible()


def test_served_page_asks_for_nothing_else(watched: Watched, served: str):
    page = watched.open(served + "#x=1,2,3")
    page.locator("#preset").select_option("deit_small:12")
    until(page, "location.hash === toHash(state)")
    agree(page.evaluate("result"), in_python(state_of(page)), "served")
    page.wait_for_load_state("networkidle")
    assert [url for url in watched.requests if not url.startswith("about:")] == [served]
