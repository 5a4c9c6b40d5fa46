"""Files that the explorer opens, and pictures that it saves."""

import io
import json
import struct
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

import multimax
from browser import Watched
from explorer_page import agree, follow, in_python, state_of, until
from multimax.plots import explorer
from places import ROOT

safetensors = pytest.importorskip("safetensors.torch", reason="no safetensors; pip install safetensors")
SYMBOLS = ("t_b", "t_d", "b", "d")


def load(page: Any, name: str, content: bytes) -> None:
    page.locator("#file").set_input_files({"name": name, "mimeType": "application/octet-stream", "buffer": content})


def message(page: Any) -> str:
    until(page, "!$('message').hidden")
    return page.locator("#message-text").inner_text()


def paper(state: dict[str, Any]) -> list[list[float]]:
    return [state[key][: state["order"]] for key in SYMBOLS]


def stored(module: multimax.MultiMax) -> list[torch.Tensor]:
    return list(multimax.to_paper(module.coefs.detach().double(), module.knots.detach().double()))


def model(heads: int | None = None, order: int = 2, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Eleven layers, so that their names in the order of letters are not their order."""
    blocks = [torch.nn.ModuleDict({"attn": multimax.MultiMax(order, heads=heads)}) for _ in range(11)]
    made = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList(blocks), "head": torch.nn.Linear(3, 3)})
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made.to(dtype)


# ---- safetensors ----


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [None, 3])
def test_layers_of_a_model(page: Any, dtype: torch.dtype, heads: int | None):
    made = model(heads, dtype=dtype)
    load(page, "model.safetensors", safetensors.save(made.state_dict()))
    until(page, "$('status').textContent.startsWith('11 layers')")
    for i in (0, 2, 10):
        page.locator("#preset").select_option(f"file:{i + 1}")
        name = page.locator("#preset option:checked").inner_text()
        assert name == f"{i + 1}: blocks.{i}.attn"
        expected = stored(made["blocks"][i]["attn"])
        for head in range(heads or 1):
            if heads:
                page.locator("#head").select_option(str(head + 1))
            found = state_of(page)
            assert paper(found) == [(value[head] if heads else value).tolist() for value in expected]
            agree(page.evaluate("result"), in_python(found), f"layer {i}, head {head}")
    assert page.locator("#head").is_visible() == bool(heads)
    assert page.locator("#sigma .ghost").count() == (heads or 11)
    assert page.locator("#play").inner_text() == "Play layers 1 to 11"


def test_order_one(page: Any):
    made = model(order=1)
    load(page, "model.safetensors", safetensors.save(made.state_dict()))
    until(page, "state.order === 1")
    assert paper(state_of(page)) == [value.tolist() for value in stored(made["blocks"][0]["attn"])]


def test_files_of_the_published_code(page: Any):
    tensors = {f"blocks.0.attn.{name}": torch.randn(4) for name in ("ranges", "ts")}
    tensors |= {f"multimax_{name}": torch.randn(4) for name in ("ranges", "ts")}
    load(page, "published.safetensors", safetensors.save(tensors))
    until(page, "$('status').textContent.startsWith('2 layers')")
    ours = multimax.from_published(tensors, "")
    for number, prefix in ((1, "blocks.0.attn."), (2, "")):
        page.locator("#preset").select_option(f"file:{number}")
        coefs, knots = (ours[f"{prefix}{name}"].double() for name in ("coefs", "knots"))
        assert paper(state_of(page)) == [value.tolist() for value in multimax.to_paper(coefs, knots)]


ORIGIN = "The file does not say if this layer has monotone=True. If so, "


@pytest.mark.parametrize("heads", [None, 3])
@pytest.mark.parametrize("order", [1, 2])
def test_monotone_layers(page: Any, order: int, heads: int | None):
    """They store something else than they use, which a file does not say: the page has both, and asks."""
    layers = [multimax.MultiMax(order, heads=heads, monotone=True, dtype=torch.float64) for _ in range(2)]
    made = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList(layers)})
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    load(page, "model.safetensors", safetensors.save(made.state_dict()))
    until(page, "$('status').textContent.startsWith('2 layers')")
    groups = page.locator("#preset optgroup").evaluate_all("groups => groups.map(group => group.label)")
    assert groups[-2:] == ["model.safetensors", "model.safetensors, with monotone=True"]
    assert page.locator("#origin").inner_text() == ORIGIN + "choose it in the last group listed."
    assert paper(state_of(page)) == [(value[0] if heads else value).tolist() for value in stored(layers[0])]
    for i, layer in enumerate(layers):
        page.locator("#preset").select_option(f"monotone:{i + 1}")
        assert page.locator("#preset option:checked").inner_text() == f"{i + 1}: blocks.{i}, monotone"
        assert page.locator("#origin").inner_text() == "Taken as a layer with monotone=True."
        used = [getattr(layer, symbol) for symbol in SYMBOLS]
        for head in range(heads or 1):
            if heads:
                page.locator("#head").select_option(str(head + 1))
            for values, expected in zip(paper(state_of(page)), used, strict=True):
                assert values == pytest.approx((expected[head] if heads else expected).tolist(), rel=1e-14)
            assert page.evaluate("result.falls.least") >= 0
    page.locator("#t_b1").press("ArrowRight")  # the figure below does not jump when its points are moved
    assert page.locator("#origin").is_visible()
    page.locator("#undo").click()
    assert page.locator("#preset").input_value() == "monotone:2"
    page.locator("#preset").select_option("deit_small:9")
    assert not page.locator("#origin").is_visible()


def filled(value: float) -> bytes:
    return safetensors.save({f"a.{name}": torch.full((1, 2), value) for name in ("coefs", "knots")})


def test_only_what_can_be_monotone_is_asked_about(page: Any):
    load(page, "published.safetensors", safetensors.save({"a.ranges": torch.randn(4), "a.ts": torch.randn(4)}))
    until(page, "$('status').textContent.startsWith('1 layer')")
    assert not page.locator("#origin").is_visible()
    load(page, "large.safetensors", filled(50.0))
    until(page, "state.t_d[0] === 51")
    assert page.locator("#origin").inner_text() == ORIGIN + "it cannot be shown: its slopes are beyond 100."
    load(page, "small.safetensors", filled(1.0))
    until(page, "state.t_d[0] === 2")
    page.locator("#preset").select_option("monotone:1")
    load(page, "layers.json", json.dumps({"a": SET | {"t_b": [3, 1]}}).encode())
    until(page, "state.t_b[0] === 3")
    assert not page.locator("#origin").is_visible()
    assert page.locator("#preset optgroup").count() == len(multimax.presets) + 1


def test_a_file_is_opened_while_another_is_played(page: Any):
    load(page, "model.safetensors", safetensors.save(model().state_dict()))
    until(page, "chosen?.table === 'file'")
    page.locator("#play").click()
    until(page, "playing && chosen.layer > 2")
    load(page, "layers.json", json.dumps([SET, SET | {"t_b": [3, 1]}]).encode())
    until(page, "$('status').textContent.startsWith('2 layers')")
    assert page.locator("#play").inner_text() == "Play layers 1 to 2"
    assert page.evaluate("chosen.layer") == 0


def raw(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def pair(**changes: Any) -> dict[str, Any]:
    """A header with coefs and knots of order 2, eight numbers, and changes of coefs."""
    coefs = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | changes
    return {"a.coefs": coefs, "a.knots": {"dtype": "F32", "shape": [2, 2], "data_offsets": [16, 32]}}


ZEROS = bytes(32)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "expected a safetensors file, whose first 8 bytes tell the length of its header, got a file of 0 bytes"),
        (b"PK\x03\x04 this is a zip archive", "got a length of"),
        (raw(b"{nonsense"), "expected a safetensors file with a header in JSON, got "),
        (raw([1, 2]), "expected a safetensors file with tensors by name, got “[1,2]”"),
        (raw({}), "expected layers with coefs and knots, as multimax.MultiMax stores them, got no tensors"),
        (raw({"a.weight": {}}), "got 1 tensors such as “a.weight”"),
        (raw({"a.coefs": pair()["a.coefs"]}, ZEROS), "expected a.knots beside a.coefs, got none"),
        (raw(pair(dtype="I64"), ZEROS), "expected a.coefs in F64, F32, F16, BF16, got “I64”"),
        (raw(pair(dtype="toString"), ZEROS), "expected a.coefs in F64, F32, F16, BF16, got “toString”"),
        (raw(pair(shape=[4]), ZEROS), "expected a.coefs and a.knots of one shape, got (4) and (2,2)"),
        (raw(pair(shape="2,2"), ZEROS), "expected a.coefs with a shape, got"),
        (raw(pair(shape=[2, -2]), ZEROS), "expected a.coefs with a shape, got “[2,-2]”"),
        (raw(pair(data_offsets=[0, 12]), ZEROS), "expected a.coefs with 16 bytes inside the file, got “[0,12]”"),
        (
            raw(pair(data_offsets=[1000, 1016]), ZEROS),
            "expected a.coefs with 16 bytes inside the file, got “[1000,1016]”",
        ),
        (raw(pair()), "expected a.coefs with 16 bytes inside the file, got “[0,16]”"),
        (raw(pair(shape=[1 << 40, 2, 2]), ZEROS), "bytes inside the file, got “[0,16]”"),
        (
            raw(pair(), struct.pack("<8f", *[float("nan")] * 8)),
            "expected t_b of a to be a number between -100 and 100, got",
        ),
        (raw(pair(), struct.pack("<8f", *[1e30] * 8)), "expected t_b of a to be a number between -100 and 100, got"),
    ],
)
def test_wrong_safetensors(page: Any, content: bytes, words: str):
    before = state_of(page)
    load(page, "model.safetensors", content)
    text = message(page)
    assert text.startswith("model.safetensors was not loaded: ")
    assert words in text
    assert state_of(page) == before
    page.locator("#x1").fill("1")  # and the page goes on
    assert state_of(page)["x"][0] == 1


def test_wrong_shapes(page: Any):
    for shape in ((3, 2), (2, 3), (1, 1, 2, 2), (0, 2, 2)):
        tensors = {"a.coefs": torch.zeros(shape), "a.knots": torch.zeros(shape)}
        load(page, "model.safetensors", safetensors.save(tensors))
        wanted = "expected a.coefs of shape (1, 2), (2, 2) or (heads, 1 or 2, 2), got"
        assert f"{wanted} ({', '.join(map(str, shape))})" in message(page)
        page.locator("#dismiss").click()


# ---- JSON ----


def test_layers_in_json(page: Any):
    """Written as docs/explorer.md shows, of layers that store something else than they use."""
    made = torch.nn.ModuleDict(
        {"one": multimax.MultiMax(monotone=True), "two": multimax.MultiMax(heads=2, terms="lower")}
    )
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    layers = {
        name: {symbol: getattr(module, symbol).tolist() for symbol in SYMBOLS}
        for name, module in made.named_modules()
        if isinstance(module, multimax.MultiMax)
    }
    load(page, "layers.json", json.dumps(layers).encode())
    until(page, "$('status').textContent.startsWith('2 layers')")
    assert paper(state_of(page)) == [layers["one"][symbol] for symbol in SYMBOLS]
    page.locator("#preset").select_option("file:2")
    page.locator("#head").select_option("2")
    assert paper(state_of(page)) == [layers["two"][symbol][1] for symbol in SYMBOLS]


def test_layers_in_a_list(page: Any):
    layers = [dict(zip(SYMBOLS, layer, strict=True)) for layer in multimax.presets["deit_small"]]
    load(page, "layers.json", json.dumps(layers).encode())
    until(page, "$('status').textContent.startsWith('12 layers')")
    page.locator("#preset").select_option("file:12")
    assert [tuple(values) for values in paper(state_of(page))] == list(multimax.presets["deit_small"][11])


SET = {"t_b": [1, 1], "t_d": [1, 1], "b": [0, 0], "d": [0, 0]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "expected a file in JSON, got "),
        ("{", "expected a file in JSON, got "),
        ("3", "expected layers in a list or by name, got “3”"),
        ("[]", "expected at least one layer, got none"),
        ("[[1]]", "expected layer 1 with lists t_b, b, t_d, d, got “[[1]]”".replace("[[1]]”", "[1]”")),
        (json.dumps({"a": {"t_b": [1]}}), "expected a with lists t_b, b, t_d, d, got"),
        (
            json.dumps([SET | {"t_d": [1, "<img src=x>"]}]),
            "expected t_d of layer 1 to be a number between -100 and 100",
        ),
        (
            json.dumps([SET | {"t_d": [1, None]}]),
            "expected t_d of layer 1 to be a number between -100 and 100, got “null”",
        ),
        (json.dumps([SET | {"b": [1000, 0]}]), "expected b of layer 1 to be a number between -100 and 100, got “1000”"),
        (json.dumps([SET | {"b": [0]}]), "expected b of layer 1 with 2 numbers, got 1"),
        (json.dumps([{key: [1, 1, 1] for key in SET}]), "expected t_b of layer 1 with one number per order, 1 or 2"),
        (
            json.dumps([{key: [[1, 1]] for key in SET} | {"d": [1, 1]}]),
            "expected d of layer 1 with one number per order",
        ),
        (json.dumps({"__proto__": SET, "x": 1}).replace('"x": 1', '"x": {}'), "expected x with lists"),
    ],
)
def test_wrong_json(page: Any, content: str, words: str):
    before = state_of(page)
    load(page, "layers.json", content.encode())
    text = message(page)
    assert text.startswith("layers.json was not loaded: ")
    assert words in text
    assert state_of(page) == before
    assert page.locator("img").count() == 0


def test_other_files(page: Any):
    load(page, "model.bin", b"12345678")
    assert "expected a file that ends in .safetensors or .json, got “model.bin”" in message(page)


def test_a_file_is_dropped(page: Any):
    page.evaluate(
        """text => { const data = new DataTransfer(); data.items.add(new File([text], "layers.json"));
            dispatchEvent(new DragEvent("drop", { dataTransfer: data, cancelable: true })); }""",
        json.dumps({"mine": {key: [0.5] for key in SET}}),
    )
    until(page, "$('preset').value === 'file:1'")
    assert state_of(page)["t_b"][0] == 0.5


# ---- pictures ----


def test_the_preview(browser: Any, tmp_path: Path):
    """That it is still taken, and of the size that the one in the documents has."""
    from PIL import Image

    tool, out = ROOT / "tools" / "explorer_preview.py", tmp_path / "preview.png"
    subprocess.run([sys.executable, str(tool), "--out", str(out)], check=True)
    with Image.open(out) as taken, Image.open(ROOT / "docs" / explorer.PREVIEW) as kept:
        assert taken.size == kept.size
        assert taken.width / taken.height == pytest.approx(1200 / 630, rel=0.01)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("figure", ["sigma", "simplex", "trade-off"])
def test_pictures_are_saved(watched: Watched, address: str, tmp_path: Path, figure: str, scheme: str):
    watched.page.emulate_media(color_scheme=scheme)
    page = watched.open(address)
    follow(page, "#v=1&x=2,1.5,-1,0.25&threshold=0")
    files = {}
    for place, form in enumerate(("svg", "png")):
        with page.expect_download() as download:
            page.locator(f"[data-save={figure}] button").nth(place).click()
        assert download.value.suggested_filename == f"multimax-{figure}.{form}"
        files[form] = tmp_path / f"{figure}.{form}"
        download.value.save_as(files[form])
    root = ElementTree.parse(files["svg"]).getroot()
    text = files["svg"].read_text(encoding="utf-8")
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "var(" not in text  # it stands alone
    assert "class=" not in text
    assert "NaN" not in text
    width, height = (float(root.get(name)) for name in ("width", "height"))
    from PIL import Image, ImageChops

    with Image.open(io.BytesIO(files["png"].read_bytes())) as image:
        assert image.size == (3 * width, 3 * height)
        pixels = image.convert("RGB")
        assert len(pixels.getcolors(1 << 24)) > 20  # something is drawn
        dark = sum(pixels.getpixel((1, 1))) < 300
        assert dark == (scheme == "dark")
    # the file, opened by itself, looks like the figure: orange and blue are where they were
    watched.requests.clear()
    page.goto(files["svg"].as_uri())
    shown = Image.open(io.BytesIO(page.screenshot(clip={"x": 0, "y": 0, "width": width, "height": height}))).convert(
        "RGB"
    )
    small = pixels.resize(shown.size)
    different = ImageChops.difference(shown, small).convert("L").point(lambda value: 255 * (value > 90))
    assert different.histogram()[255] < 0.01 * shown.size[0] * shown.size[1]
    watched.requests.clear()
