"""The explorer: how it is put together and served, its numbers beside Python's, its links and its Python."""

import base64
import contextlib
import hashlib
import html
import io
import json
import math
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import multimax
from browser import Watched
from explorer_page import (
    KEYS,
    agree,
    follow,
    in_python,
    link,
    random_states,
    state_of,
    until,
)
from multimax import plots
from multimax.plots import explorer

PYTHON_NAMES = dict(zip(KEYS, ("softmax", "sparsemax", "entmax", "Ev-SoftMax", "MultiMax"), strict=True))
SITE, REPOSITORY = "https://example.org/multimax", "https://example.org/code?a=1&b=2"


# ---- one file ----


def test_the_page_holds_the_presets_and_every_script():
    text = explorer.page()
    found = json.loads(re.search(r'id="presets">\n(.*?)\n</script>', text, re.DOTALL)[1])
    assert list(found) == list(multimax.presets)
    for name, layers in multimax.presets.items():
        assert [[tuple(row) for row in layer] for layer in found[name]["layers"]] == [list(layer) for layer in layers]
    assert sorted(explorer.SCRIPTS) == sorted(file.stem for file in (explorer.FOLDER / "script").iterdir())
    assert "{{" not in text


def test_the_page_is_one_file_without_markup_from_data():
    text = explorer.page()
    loaded = re.findall(r"<(?:script|img|iframe|link|video|object|embed)[^>]*(?:src|href)=\"(?!data:)[^\"]*", text)
    assert loaded == []
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|import\(", text)
    colours = [re.search(rf"--{key}: (#\w+);", text)[1] for key in KEYS]
    assert len(set(colours)) == len(KEYS)
    assert set(colours) <= set(plots.COLOURS)


def test_the_policy_allows_its_own_script_alone():
    text = explorer.page()
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1])
    assert f"script-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none';")


def test_addresses_are_filled_in():
    text = explorer.page(repository=REPOSITORY, site=SITE)
    assert f'<a href="{html.escape(REPOSITORY)}" rel="noopener">Repository</a>' in text
    assert f'<a href="{SITE}" rel="noopener">Documentation</a>' in text
    assert f'<a href="{explorer.PAPER}" rel="noopener">Paper</a>' in text
    assert f'<meta property="og:image" content="{SITE}/{explorer.PREVIEW}">' in text
    assert f'<link rel="canonical" href="{SITE}/explorer.html">' in text
    for wrong in ("example.org", "javascript:alert(1)", 'https://x/"><script>'):
        with pytest.raises(ValueError, match="multimax: expected repository to be an address such as https://"):
            explorer.page(repository=wrong)
        with pytest.raises(ValueError, match="multimax: expected site to be an address such as https://"):
            explorer.page(site=wrong)


def test_addresses_come_from_the_package(monkeypatch: pytest.MonkeyPatch):
    class Metadata:
        def get_all(self, name: str) -> list[str] | None:
            return [f"Repository, {REPOSITORY}", "Changelog, https://example.org/"]

    monkeypatch.setattr(explorer.importlib.metadata, "metadata", lambda name: Metadata())
    text = explorer.page()
    assert html.escape(REPOSITORY) in text
    assert "og:image" not in text

    def missing(name: str) -> None:
        raise explorer.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(explorer.importlib.metadata, "metadata", missing)
    assert re.findall(r'<a href="([^"]*)"', explorer.page()) == [explorer.PAPER]


# ---- the server ----


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
    for path in ("page.html", "../cli.py", "script/page.js", "favicon.ico"):
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


# ---- numbers ----

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
      state, drawn: result, message: $("message").hidden,
    });
  }
  return found;
}"""


def test_numbers_agree_with_python(page: Any):
    states = random_states(200)
    found = page.evaluate(READ_ALL, [link(state) for state in states])
    undefined = falling = 0
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
        falling += bool(read["drawn"]["falls"]["parts"])
        assert bool(read["drawn"]["falls"]["parts"]) == (expected["falls"]["least"] < 0)
    assert 0 < undefined < 100  # NaN, where there is no such entry, is among what was compared, and most is not
    assert 20 < falling < 180


def test_softmax_at_every_temperature(page: Any):
    for state in random_states(5):
        follow(page, link(state))
        result, temperatures = page.evaluate("[result, TEMPERATURES]")
        for i in (0, 30, 60, 90, 120):
            expected = in_python(state | {"temperature": temperatures[i]})
            agree(result["path"][i], expected["simplex"]["softmax"], f"T = {temperatures[i]}")
            agree(result["tradeOff"][i], {k: expected[k]["softmax"] for k in "MS"}, f"T = {temperatures[i]}")


def test_where_sigma_falls(page: Any):
    """Against the slope of the formula, by autograd, at many scores."""
    for state in random_states(40):
        x = torch.linspace(-5, 5, 1001, dtype=torch.float64, requires_grad=True)
        coefs, knots = (
            parameter.requires_grad_(False)
            for parameter in multimax.from_paper(
                *(torch.tensor(state[key][: state["order"]], dtype=torch.float64) for key in ("t_b", "t_d", "b", "d"))
            )
        )
        (slopes,) = torch.autograd.grad(multimax.modulate(x, coefs, knots).sum(), x)
        parts = page.evaluate("state => falls(-5, 5, state).parts", state)
        assert all(-5 <= start < end <= 5 for start, end in parts)
        for score, slope in zip(x.tolist(), slopes.tolist(), strict=True):
            if min((abs(score - edge) for part in parts for edge in part), default=1) > 1e-9:
                assert any(start < score < end for start, end in parts) == (slope < 0), (state, score)


def test_equal_and_far_entries(page: Any):
    """Ties, and entries so far apart that softmax has nothing left for some of them."""
    base = random_states(1)[0] | {"order": 2}
    vectors = ([0.0] * 10, [1.0, 1.0, -1.0], [10.0, -10.0, -10.0], [2.0, 1.0, 0.0], [-10.0] * 4 + [10.0] * 5)
    states = [base | {"x": list(x), "threshold": threshold} for x in vectors for threshold in ("mean", 0.0)]
    for i, read in enumerate(page.evaluate(READ_ALL, [link(state) for state in states])):
        agree(read["drawn"], in_python(states[i]), f"state {i}")


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


# ---- links ----


def test_link_carries_the_whole_state(watched: Watched, address: str):
    page = watched.open(address)
    page.locator("#x1-number").fill("1.2345678901234567")
    page.locator("#t_d2").fill("-1.5")
    page.locator("#mean").check()
    page.locator("#temperature").fill("0.5")
    page.locator("#alpha").fill("2.25")
    page.locator("#add").click()
    page.get_by_label("order 1", exact=True).check()
    expected = state_of(page)
    assert (expected["temperature"], expected["alpha"]) == (3.16, 2.25)
    until(page, "location.hash === toHash(state)")  # the address follows a little later
    watched.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("#copy-link").click()
    until(page, "$('status').textContent === 'Link copied'")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == page.url
    assert "#v=1&" in copied
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
        ("d=1,-1e9", "expected d2 between -100 and 100"),
        ("x=1,2", "expected x with 3 to 10 numbers, got 2"),
        ("x=" + ",".join("1" * 11), "expected x with 3 to 10 numbers, got 11"),
        ("b=1", "expected b with 2 numbers, got 1"),
        ("v=2&x=1,2,3", "expected version 1 of links, got “2”"),
        ("temperature=0", "expected temperature between 0.1 and 10, got “0”"),
        ("temperature=mean", "expected a number for temperature, got “mean”"),
        ("alpha=1", "expected alpha between 1.01 and 4, got “1”"),
        ("order=3", "expected order 1 or 2, got “3”"),
        ("threshold=median", "expected a number for threshold, got “median”"),
        ("order=1&order=2", "expected order once, got it twice"),
        ("layer=3", "expected v, order, t_b, b, t_d, d, x, threshold, temperature, alpha with values, got “layer=3”"),
        (
            "toString=3",
            "expected v, order, t_b, b, t_d, d, x, threshold, temperature, alpha with values, got “toString=3”",
        ),
        ("__proto__=3", "expected v, order, t_b, b, t_d, d, x, threshold, temperature, alpha with values"),
        ("x", "expected v, order, t_b, b, t_d, d, x, threshold, temperature, alpha with values, got “x”"),
        ("%E0%A4%A=%", "expected v, order, t_b, b, t_d, d, x, threshold, temperature, alpha with values"),
        ("x=" + "1" * 5000, "expected at most 4000 characters, got 5002"),
        ("x=1,2,<img/src=x/onerror=document.title=1>", "expected a number for x3, got “"),
    ],
)
def test_wrong_links(watched: Watched, address: str, wrong: str, words: str):
    page = watched.open(f"{address}#{wrong}")
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


# ---- Python ----


@pytest.mark.parametrize(
    "hash_",
    [
        "",
        "#order=1&t_b=2,3&t_d=0.5,-1&b=0,0&d=1,0&x=3,2,-1&threshold=mean",
        "#x=1,-2e-7,3,0.5,0.25,0,0,0,0,10&t_b=3,2.5&threshold=-0.5",
        "#t_b=1,1&t_d=1,1",
        "#v=1&temperature=2.5&alpha=1.25",
    ],
)
def test_copied_python_runs_and_gives_the_same(watched: Watched, address: str, hash_: str):
    page = watched.open(address + hash_)
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
    assert page.locator("#by-hand").input_value() == page.evaluate("link()")
    assert page.evaluate("document.activeElement.id") == "by-hand"
    assert page.evaluate("document.activeElement.selectionEnd") > 100
    page.locator("#dismiss").click()
    assert page.locator("#message").is_hidden()


def test_served_page_asks_for_nothing_else(watched: Watched, served: str):
    page = watched.open(served + "#x=1,2,3")
    page.locator("#preset").select_option("deit_small:12")
    until(page, "location.hash === toHash(state)")
    agree(page.evaluate("result"), in_python(state_of(page)), "served")
    page.wait_for_load_state("networkidle")
    assert [url for url in watched.requests if not url.startswith("about:")] == [served]


def test_links_from_a_disk_lead_to_the_site(watched: Watched, tmp_path: Path, served: str):
    file = tmp_path / "explorer.html"
    file.write_text(explorer.page(site=SITE), encoding="utf-8")
    page = watched.page
    page.goto(file.as_uri())
    assert page.evaluate("link()").startswith(f"{SITE}/explorer.html#v=1&order=2&")
    watched.requests.clear()  # this file is not the one that the fixture knows
    assert watched.open(served).evaluate("link()").startswith(f"{served}#v=1&")
