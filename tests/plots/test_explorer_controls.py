"""The explorer's controls: sliders, boxes, points that are dragged, keys, undo, play; and how it looks."""

import re
from typing import Any

import pytest
import torch

import multimax
from browser import Watched
from explorer_page import KEYS, agree, follow, in_python, link, random_states, state_of, until
from multimax.metrics import least_slope

# From layer 12 of DeiT-small: sigma falls between these scores, and M is above 1.
FALLING = (
    "#v=1&order=2&t_b=0.16383016,3.2074118&t_d=-1,0.99102634&b=1.6852132,0.9796309&d=-0.04795134,2.1836245&x=3,2,-1"
)


def entries_of(page: Any, letter: str) -> list[str]:
    return page.locator(f"#{letter} td span").evaluate_all("spans => spans.map(span => span.className)")


# ---- figures ----


def test_figures_show_the_numbers(page: Any):
    """Back from the pictures' coordinates, which browsers keep to single precision, to numbers."""
    follow(page, "#x=2,1.5,-1,0.25&threshold=0")
    result = page.evaluate("result")
    ends = "line => ['x1', 'y1', 'x2', 'y2'].map(end => line[end].baseVal.value)"
    x1, y1, x2, y2 = page.locator("#sigma .identity").evaluate(ends)  # from (-5, -5) to (5, 5)
    drawn = [pair.split(",") for pair in page.locator("#sigma .curve").get_attribute("points").split()]
    assert [(float(x) - x1) / (x2 - x1) * 10 - 5 for x, _ in drawn] == pytest.approx(result["curve"]["x"], abs=1e-4)
    assert [(float(y) - y1) / (y2 - y1) * 10 - 5 for _, y in drawn] == pytest.approx(result["curve"]["y"], abs=1e-4)

    corners = torch.tensor(page.evaluate("corners"), dtype=torch.float64)
    inverse = torch.linalg.inv(torch.cat([corners.T, torch.ones(1, 3, dtype=torch.float64)]))

    def weights(x: float, y: float) -> list[float]:
        return (inverse @ torch.tensor([x, y, 1.0], dtype=torch.float64)).tolist()

    path = page.locator("#simplex .path").get_attribute("points").split()
    for pair, temperature in zip(path, page.evaluate("TEMPERATURES"), strict=True):
        expected = torch.softmax(torch.tensor([2.0, 1.5, -1.0], dtype=torch.float64) / temperature, -1)
        agree(weights(*map(float, pair.split(","))), expected, f"T = {temperature}", 1e-6)
    centre = """mark => { const b = mark.getBBox(), at = mark.closest(".handle")?.transform.baseVal[0].matrix;
        return [b.x + b.width / 2 + (at?.e ?? 0), b.y + b.height / 2 + (at?.f ?? 0)]; }"""
    for key in KEYS:
        # the middle of the mark; the triangle's is not that of its box
        found = weights(*page.locator(f"#simplex .mark.of-{key}").evaluate(centre))
        assert found == pytest.approx(result["simplex"][key], abs=0.015)

    left, right, bottom, top = page.evaluate(
        """(() => { const lines = [...document.querySelectorAll("#trade-off line")], all = end =>
            lines.map(line => line[end].baseVal.value); return [Math.min(...all("x1")), Math.max(...all("x2")),
            Math.max(...all("y2")), Math.min(...all("y1"))]; })()"""
    )
    points = [pair.split(",") for pair in page.locator("#trade-off .path").get_attribute("points").split()]
    assert [(float(x) - left) / (right - left) for x, _ in points] == pytest.approx(
        [one["S"] for one in result["tradeOff"]], abs=1e-4
    )
    assert [(bottom - float(y)) / (bottom - top) for _, y in points] == pytest.approx(
        [one["M"] for one in result["tradeOff"]], abs=1e-4
    )
    for key in KEYS:
        x, y = page.locator(f"#trade-off .mark.of-{key}").evaluate(centre)
        assert (x - left) / (right - left) == pytest.approx(result["S"][key], abs=0.015)
        assert (bottom - y) / (bottom - top) == pytest.approx(result["M"][key], abs=0.015)


def test_what_is_not_defined_is_said(page: Any):
    follow(page, "#x=1,-1,-2&threshold=0")
    assert "M needs a relevant score" in page.locator("#trade-off").text_content()
    assert page.locator("#M td span").first.inner_text() == "\N{EN DASH}"
    follow(page, "#x=3,2,1&threshold=0")
    assert "S needs a score below the threshold" in page.locator("#trade-off").text_content()
    assert page.locator("#summary").is_hidden()


def test_edges_of_the_simplex_are_seen(watched: Watched, address: str):
    """What is read is 3 to 1, as for all graphics (WCAG 1.4.11): the triangle, and the functions' colours."""
    luminance = """rgb => { const part = value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
        const [r, g, b] = rgb.match(/\\d+/g).map(value => part(value / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; }"""
    for scheme in ("light", "dark"):
        watched.page.emulate_media(color_scheme=scheme)
        page = watched.open(address)
        card = page.evaluate(f"({luminance})(getComputedStyle(document.querySelector('.card')).backgroundColor)")
        for part, kind in (("#simplex .edge", "stroke"), ("#sigma .curve", "stroke"), ("#simplex .path", "stroke")):
            ink = page.evaluate(f"({luminance})(getComputedStyle(document.querySelector('{part}')).{kind})")
            assert (max(ink, card) + 0.05) / (min(ink, card) + 0.05) >= 3, (scheme, part)


# ---- sliders and boxes ----


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
    assert not page.locator("#t_b2-point").is_visible()
    agree(page.evaluate("result"), in_python(state_of(page)), "order 1")
    page.locator("#reset").click()
    assert state_of(page) == page.evaluate("defaultState()")


def test_temperature_and_alpha(page: Any):
    for key, slider, number in (("temperature", "-1", 0.1), ("temperature", "0", 1), ("temperature", "1", 10)):
        page.locator(f"#{key}").fill(slider)
        assert state_of(page)[key] == number
    page.locator("#temperature-number").fill("2.5")
    assert float(page.locator("#temperature").input_value()) == pytest.approx(0.4, abs=0.01)
    for alpha in ("1.01", "2", "3.5"):
        page.locator("#alpha").fill(alpha)
        agree(page.evaluate("result"), in_python(state_of(page)), f"alpha {alpha}")
    assert "T = 2.5" in page.locator("#names").inner_text()
    assert "\N{GREEK SMALL LETTER ALPHA} = 3.5" in page.locator("#names").inner_text()


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


def test_boxes_go_beyond_the_sliders(page: Any):
    page.locator("#t_d1-number").fill("40")
    assert state_of(page)["t_d"][0] == 40
    assert page.locator("#t_d1").input_value() == "6"
    assert page.locator("#t_d1-point").get_attribute("aria-valuemax") == "40"


def test_entries_come_and_go(page: Any):
    rows = page.locator("#entries tr")
    while rows.count() < 10:
        count = rows.count()
        page.locator("#add").click()
        assert rows.count() == count + 1
        assert page.evaluate("document.activeElement.id") == f"x{count + 1}"
    assert page.locator("#add").is_disabled()
    page.get_by_label("Remove x2").click()
    assert state_of(page)["x"] == [2.4, 0.3, -0.2, -1.0, 0, 0, 0, 0, 0]
    while rows.count() > 3:
        page.locator("#entries button").last.click()
    assert page.locator("#entries button:disabled").count() == 3
    assert page.evaluate("document.activeElement.id") == "x3"
    agree(page.evaluate("result"), in_python(state_of(page)), "three entries")


# ---- points that are dragged ----


def middle(page: Any, id_: str) -> tuple[float, float]:
    box = page.locator(f"#{id_} .reach").bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def drag(page: Any, id_: str, dx: float, dy: float) -> None:
    page.locator(f"#{id_}").scroll_into_view_if_needed()
    x, y = middle(page, id_)
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + dx / 2, y + dy / 2)
    page.mouse.move(x + dx, y + dy)
    page.mouse.up()


def test_knots_are_dragged_along_sigma(page: Any):
    for key, n in (("b", 0), ("d", 0), ("b", 1), ("d", 1)):
        page.locator("#reset").click()
        before, per_x = state_of(page), page.evaluate("plot.perX")
        drag(page, f"{key}{n + 1}-point", 40, 3)
        after = state_of(page)
        assert after[key][n] == pytest.approx(before[key][n] + 40 / per_x, abs=0.03)
        after[key][n] = before[key][n]
        assert after == before  # nothing else has moved


def test_slopes_follow_the_pointer(page: Any):
    """The point stays under the pointer: sigma there changes by as much as the pointer moves."""
    for key, n, dy in (("t_b", 0, 12), ("t_d", 0, -25), ("t_b", 1, -12), ("t_d", 1, 25)):
        page.locator("#reset").click()
        page.locator("#sigma").scroll_into_view_if_needed()
        start, before = middle(page, f"{key}{n + 1}-point"), state_of(page)
        drag(page, f"{key}{n + 1}-point", 0, dy)
        assert state_of(page)[key][n] != before[key][n]
        assert middle(page, f"{key}{n + 1}-point") == pytest.approx((start[0], start[1] + dy), abs=2)


def test_points_of_the_simplex_are_dragged(page: Any):
    for key in ("softmax", "multimax"):
        page.locator("#reset").click()
        page.locator("#simplex").scroll_into_view_if_needed()
        x, y = middle(page, f"{key}-point")
        drag(page, f"{key}-point", 20, -60)
        assert middle(page, f"{key}-point") == pytest.approx((x + 20, y - 60), abs=2), key
        found = state_of(page)
        assert max(found["x"][:3]) == 2.4  # the largest is kept
        assert found["x"][3:] == [-0.2, -1]
        agree(page.evaluate("result"), in_python(found), f"dragged {key}")
        drag(page, f"{key}-point", 2000, 2000)  # far outside: the scores stay within their limits
        assert all(-10 <= score <= 10 for score in state_of(page)["x"])


def test_the_nearest_of_two_points_is_taken(page: Any):
    follow(page, "#v=1&order=1&t_b=2,1&t_d=0.5,1&b=0,0&d=0.25,0")
    (bx, by), (dx, _) = middle(page, "b1-point"), middle(page, "d1-point")
    assert dx - bx < 24  # they lie on each other
    page.mouse.move(bx - 3, by)
    page.mouse.down()
    page.mouse.move(bx - 83, by)
    page.mouse.up()
    found = state_of(page)
    assert (found["b"][0] < -1, found["d"][0]) == (True, 0.25)


def test_points_are_touched(browser: Any, address: str):
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(address)
    page.locator("#b1-point").scroll_into_view_if_needed()
    x, y = middle(page, "b1-point")
    client = context.new_cdp_session(page)
    for kind, points in (("Start", [[x, y]]), ("Move", [[x - 20, y]]), ("Move", [[x - 50, y]]), ("End", [])):
        client.send(
            "Input.dispatchTouchEvent", {"type": f"touch{kind}", "touchPoints": [{"x": x, "y": y} for x, y in points]}
        )
    expected = 2.675157 - 50 / page.evaluate("plot.perX")
    until(page, f"Math.abs(state.b[0] - {expected}) < 0.06")
    context.close()


# ---- keys ----


NAME = """(() => { const item = document.activeElement, ring = item.querySelector(".ring");
    const isOutlined = getComputedStyle(item).outlineStyle !== "none";
    const isRinged = item.matches(".handle") && getComputedStyle(ring).stroke !== "none";
    return [item.id || item.getAttribute("aria-label") || item.tagName + item.textContent, isOutlined || isRinged];
})()"""


def test_every_control_is_reached_by_keys(page: Any):
    everything = page.evaluate("""[...document.querySelectorAll(
        "a, button, select, input, summary, pre, [tabindex]")].filter(item => item.checkVisibility() && !item.disabled
        && (item.type !== "radio" || item.checked)).length""")
    page.locator("summary").focus()
    page.keyboard.press("Enter")  # the code below it is reached too
    page.evaluate("document.activeElement.blur()")
    page.evaluate("window.scrollTo(0, 0)")
    reached: list[str] = []
    for _ in range(200):
        page.keyboard.press("Tab")
        name, is_seen = page.evaluate(NAME)
        if name.startswith("BODY"):  # from the end to the beginning
            continue
        if name in reached:
            break
        assert is_seen, f"{name} does not show that it has the focus"
        reached.append(name)
    assert len(set(reached)) == everything + 1, reached
    points = [f"{key}{n}-point" for n in (1, 2) for key in ("t_b", "b", "t_d", "d")]
    for name in (*points, "softmax-point", "multimax-point", "play", "preset", "undo", "temperature", "alpha", "load"):
        assert name in reached


def test_keyboard_alone(page: Any):
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


def test_points_by_keys(page: Any):
    for key, step, ends in (("t_b", 0.01, (-2, 6)), ("t_d", 0.01, (-2, 6)), ("b", 0.05, (-5, 5)), ("d", 0.05, (-5, 5))):
        for n in (0, 1):
            point = page.locator(f"#{key}{n + 1}-point")
            point.focus()
            page.keyboard.press("Home")
            assert state_of(page)[key][n] == ends[0]
            page.keyboard.press("PageUp")
            page.keyboard.press("ArrowUp")
            page.keyboard.press("ArrowRight")
            page.keyboard.press("ArrowDown")
            assert state_of(page)[key][n] == pytest.approx(ends[0] + 11 * step)
            page.keyboard.press("End")
            assert state_of(page)[key][n] == ends[1]
            assert point.get_attribute("role") == "slider"
            assert (point.get_attribute("aria-valuemin"), point.get_attribute("aria-valuemax")) == tuple(map(str, ends))
            assert point.get_attribute("aria-valuenow") == str(ends[1])
            assert page.evaluate("document.activeElement.id") == f"{key}{n + 1}-point"  # it is not drawn anew
            assert f"= {ends[1]}" in page.locator("#sigma .bubble").text_content()
    page.locator("#reset").click()
    for key in ("softmax", "multimax"):
        page.locator(f"#{key}-point").focus()
        before = page.evaluate("result.simplex")[key]
        for _ in range(5):
            page.keyboard.press("ArrowUp")
        after = page.evaluate("result.simplex")[key]
        assert after[2] == pytest.approx(before[2] + 0.05 * 2 / 3**0.5, abs=0.01)
        for _ in range(5):
            page.keyboard.press("ArrowLeft")
        assert page.evaluate("result.simplex")[key][0] == pytest.approx(after[0] + 0.05, abs=0.01)
        assert page.locator(f"#{key}-point").get_attribute("aria-valuetext").count(",") == 2


def test_every_control_has_a_name(page: Any):
    unnamed = page.evaluate(
        """[...document.querySelectorAll("input, select, button, svg[role], [role=slider]")].filter(
        item => !item.getAttribute("aria-label") && !item.labels?.length && !item.textContent.trim()).length"""
    )
    assert unnamed == 0


# ---- undo ----


def test_undo_and_redo(page: Any):
    states = [state_of(page)]
    page.locator("#preset").select_option("deit_small:3")
    states.append(state_of(page))
    page.locator("#add").click()
    states.append(state_of(page))
    page.locator("#t_b1-point").focus()
    for _ in range(5):
        page.keyboard.press("ArrowUp")  # one movement: undone at once
    states.append(state_of(page))
    drag(page, "d1-point", 30, 0)
    states.append(state_of(page))
    page.locator("#reset").click()
    for expected in reversed(states):
        page.locator("#undo").click()
        assert state_of(page) == expected
    assert page.locator("#undo").get_attribute("aria-disabled") == "true"
    page.locator("#undo").click(force=True)  # nothing is left
    assert state_of(page) == states[0]
    for expected in (*states[1:], states[0]):
        page.keyboard.press("ControlOrMeta+Shift+z")
        assert state_of(page) == expected
    assert page.locator("#redo").get_attribute("aria-disabled") == "true"
    page.keyboard.press("ControlOrMeta+z")
    assert state_of(page) == states[-1]
    page.locator("#x1").fill("1")  # a new way: the old one is gone
    page.keyboard.press("ControlOrMeta+y")
    assert state_of(page)["x"][0] == 1
    until(page, "location.hash === toHash(state)")


def test_a_link_that_is_followed_can_be_undone(page: Any):
    before = state_of(page)
    follow(page, "#v=1&x=1,2,3")
    page.locator("#undo").click()
    assert state_of(page) == before


# ---- play ----


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_plays_the_layers(watched: Watched, address: str, motion: str):
    watched.page.emulate_media(reduced_motion=motion)
    page = watched.open(address)
    before = state_of(page)
    page.evaluate(
        """() => { window.seen = []; const before = render; render = () => { before();
            window.seen.push({ place: { ...chosen }, t_b: [...state.t_b], shown: $("preset").value }); }; }"""
    )
    assert page.locator("#play").inner_text() == "Play layers 1 to 12"
    page.locator("#play").focus()
    page.keyboard.press("Enter")
    assert page.locator("#play").inner_text() == "Pause"
    until(page, "!playing")
    seen = page.evaluate("window.seen")
    layers = [tuple(layer.t_b) for layer in multimax.presets["deit_small"]]
    assert list(dict.fromkeys(frame["place"]["layer"] for frame in seen)) == list(range(12))
    assert all(frame["shown"] == f"deit_small:{frame['place']['layer'] + 1}" for frame in seen)
    stood = [tuple(frame["t_b"]) for frame in seen]
    assert set(layers) <= set(stood)
    assert (set(stood) <= set(layers)) == (motion == "reduce")  # nothing between the layers, if so wished
    assert page.locator("#preset").input_value() == "deit_small:12"
    assert page.locator("#play").inner_text() == "Play layers 1 to 12"
    page.locator("#undo").click()
    assert state_of(page) == before


def test_pauses_at_a_layer(page: Any):
    page.locator("#preset").select_option("wikitext103_lm:2")
    assert page.locator("#play").inner_text() == "Play layers 1 to 6"
    page.locator("#play").click()
    until(page, "chosen.layer === 2")
    page.locator("#play").click()
    layer = int(page.locator("#preset").input_value().split(":")[1])
    assert 3 <= layer < 6
    assert tuple(state_of(page)["b"]) == multimax.presets["wikitext103_lm"][layer - 1].b
    page.locator("#play").click()
    until(page, "chosen.layer === 1")
    page.locator("#x1").fill("1")  # whoever takes over stops it
    assert page.locator("#play").inner_text() == "Play layers 1 to 6"
    assert state_of(page)["x"][0] == 1


# ---- where sigma falls ----


def test_the_badge_where_sigma_falls(page: Any):
    assert page.locator("#falls.badge").count() == 0
    assert "best" in entries_of(page, "M")[KEYS.index("multimax")]
    follow(page, FALLING)
    result = page.evaluate("result")
    assert result["M"]["multimax"] > max(result["M"][key] for key in KEYS[:-1])  # it would be the best
    assert result["weights"]["multimax"][0] < 0.5 * max(result["weights"]["multimax"])
    text = page.locator("#falls.badge").inner_text()
    assert "there a larger score gets less weight" in text
    start, end = map(float, re.search(r"from (\S+) to (\S+):", text.replace("\N{MINUS SIGN}", "-")).groups())
    coefs, knots = multimax.from_paper(*(torch.tensor(state_of(page)[key]) for key in ("t_b", "t_d", "b", "d")))
    assert start <= least_slope(coefs, knots, -1, 3)[1] <= end
    for letter in ("M", "S"):
        kinds = entries_of(page, letter)
        assert kinds[-1] == "doubtful"
        assert "best" in kinds[:-1]
        assert "not comparable" in page.locator(f"#{letter} td").last.get_attribute("title")
    assert page.locator("#sigma .falling").count() >= 1


def test_only_a_rising_sigma_is_the_best(page: Any):
    marked = 0
    presets = [link(state_of(page) | layer._asdict()) for layers in multimax.presets.values() for layer in layers]
    for hash_ in (*presets, *map(link, random_states(30))):
        follow(page, hash_)
        result = page.evaluate("result")
        isbest = "best" in entries_of(page, "M")[-1]
        assert not (isbest and result["falls"]["least"] < 0)
        assert (page.locator("#falls.badge").count() == 1) == (result["falls"]["least"] < 0)
        marked += isbest
    assert marked > 0


# ---- screens, paper, no script ----


@pytest.mark.parametrize("width", [320, 360, 390, 768, 1100])
def test_narrow_screens_do_not_scroll_sideways(watched: Watched, address: str, width: int):
    watched.page.set_viewport_size({"width": width, "height": 740})
    ten = ",".join(["-9.123456789"] * 10)
    for hash_ in ("", f"#x={ten}&threshold=mean", FALLING, "#x=" + "y" * 3000):
        page = watched.open(address + hash_)
        page.locator("summary").click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        # nothing is cut off either
        assert page.evaluate("""[...document.querySelectorAll("button, input, select, td, th, svg, .handle")].every(
            part => part.getBoundingClientRect().right <= innerWidth)""")


def test_figures_follow_the_width(page: Any):
    page.set_viewport_size({"width": 500, "height": 740})
    until(page, "$('sigma').viewBox.baseVal.width < 500")
    page.set_viewport_size({"width": 1280, "height": 740})
    until(page, "$('sigma').viewBox.baseVal.width > 600")


@pytest.mark.parametrize("touch", [False, True])
def test_targets_are_large_enough(browser: Any, address: str, touch: bool):
    """24 by 24 pixels (WCAG 2.5.8), points in figures among them."""
    for width in (390, 1280):
        context = browser.new_context(viewport={"width": width, "height": 844}, has_touch=touch, is_mobile=touch)
        page = context.new_page()
        page.goto(address)
        sizes = page.evaluate(
            """[...document.querySelectorAll("a, button, select, input, summary, .handle")].filter(
            item => item.checkVisibility()).map(item => {
                // a radio button and a checkbox are hit by their labels too
                const target = item.matches("[type=radio], [type=checkbox]") ? item.closest("label") : item;
                const { width, height } = target.getBoundingClientRect();
                return [item.id || item.textContent || item.name, width, height];
            })"""
        )
        assert len(sizes) > 50
        assert [one for one in sizes if min(one[1:]) < 24] == []
        context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(watched: Watched, address: str, scheme: str):
    watched.page.emulate_media(color_scheme=scheme)
    page = watched.open(address)
    ink, paper = page.evaluate("""["color", "backgroundColor"].map(
        name => getComputedStyle(document.body)[name].match(/\\d+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0))""")
    assert (ink < paper) == (scheme == "light")


def test_prints_without_its_controls(page: Any):
    page.emulate_media(media="print")
    for hidden in ("#t_b1", "#reset", "#play", "#load", "#add"):
        assert not page.locator(hidden).is_visible()
    for shown in ("#t_b1-number", "#sigma", "#simplex", "#trade-off", "#M", "#x1-number"):
        assert page.locator(shown).is_visible()


def test_without_javascript(browser: Any, address: str):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address)
    assert "This page needs JavaScript." in page.locator("body").inner_text()
    assert not page.locator("#play").is_visible()
    assert page.locator("nav a").first.is_visible()
    context.close()
