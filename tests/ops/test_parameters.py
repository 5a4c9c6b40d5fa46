"""The paper's symbols, its tables, and the published code's checkpoints."""

import pytest
import torch

import multimax
from multimax.ops.presets import PaperParameters


def test_presets_are_the_papers_tables() -> None:
    assert {name: len(layers) for name, layers in multimax.presets.items()} == {"deit_small": 12, "wikitext103_lm": 6}
    # first and last rows, and sums over the columns t_b1, t_d1, t_b2, t_d2, b1, d1, b2, d2 as printed
    assert multimax.presets["deit_small"][0] == PaperParameters(
        (1.8347933, 0.9864913), (2.815388, 0.68440557), (1.185235, -2.1076407), (-1.208543, 1.9158255)
    )
    assert multimax.presets["deit_small"][11] == PaperParameters(
        (0.16383016, 3.2074118), (0.25565386, 0.99102634), (1.6852132, 0.9796309), (-0.04795134, 2.1836245)
    )
    assert multimax.presets["wikitext103_lm"][5] == PaperParameters(
        (1.1514893, 0.98441315), (1.152832, 1.0156403), (0.1751709, -0.13269043), (0.05374146, -0.08825684)
    )
    sums = {
        "deit_small": [
            7.95804868,
            14.45048320,
            30.4663353,
            10.69738753,
            22.99057632,
            2.89055146,
            13.26092732,
            19.16865033,
        ],
        "wikitext103_lm": [
            5.23648075,
            5.30975339,
            5.95043946,
            6.0012360,
            0.44769286,
            0.76766967,
            0.75830077,
            -0.18554688,
        ],
    }
    for name, expected in sums.items():
        rows = [[*layer.t_b, *layer.t_d, *layer.b, *layer.d] for layer in multimax.presets[name]]
        columns = torch.tensor(rows, dtype=torch.float64)
        found = columns.sum(0)[[0, 2, 1, 3, 4, 6, 5, 7]]
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=0)
    with pytest.raises(TypeError):
        multimax.presets["other"] = ()


def test_to_and_from_the_paper() -> None:
    for layer in (*multimax.presets["deit_small"], *multimax.presets["wikitext103_lm"]):
        coefs, knots = multimax.from_paper(*layer)
        assert coefs.dtype == torch.get_default_dtype()
        for found, printed in zip(multimax.to_paper(coefs, knots), layer, strict=True):
            torch.testing.assert_close(found, torch.tensor(printed))
    assert torch.equal(coefs[1, 1], torch.tensor(1.0156403 - 1))
    tensors = [torch.randn(6, 2, dtype=torch.float64) for _ in range(4)]
    coefs, knots = multimax.from_paper(*tensors)
    assert coefs.shape == (6, 2, 2)
    assert coefs.dtype == torch.float64
    for found, given in zip(multimax.to_paper(coefs, knots), tensors, strict=True):
        torch.testing.assert_close(found, given)
    assert multimax.from_paper(2.0, 0.5, 0.0, 1.0)[0].tolist() == [[-1.0, -0.5]]


def test_from_paper_refuses_what_does_not_match() -> None:
    with pytest.raises(ValueError, match=r"multimax: expected t_b, t_d, b and d of one shape, got \(2,\), \(1,\)"):
        multimax.from_paper([1.0, 2.0], [1.0], [0.0, 0.0], [0.0, 0.0])


def test_published_checkpoints_load_by_name() -> None:
    ranges, ts = torch.randn(4), torch.randn(4)
    published = {
        "blocks.0.attn.qkv.weight": torch.randn(3, 3),
        "blocks.0.attn.ranges": ranges,
        "blocks.0.attn.ts": ts,
        "decoder.layers.1.self_attn.multimax_ranges": ranges + 1,
        "decoder.layers.1.self_attn.multimax_ts": ts + 1,
        "ranges": ranges + 2,
        "ts": ts + 2,
    }
    kept = dict(published)
    mapped = multimax.from_published(published)
    assert published == kept
    assert set(mapped) == {
        "blocks.0.attn.qkv.weight",
        "blocks.0.attn.multimax.knots",
        "blocks.0.attn.multimax.coefs",
        "decoder.layers.1.self_attn.multimax.knots",
        "decoder.layers.1.self_attn.multimax.coefs",
        "multimax.knots",
        "multimax.coefs",
    }
    layer = multimax.MultiMax()
    layer.load_state_dict(multimax.from_published({"ranges": ranges, "ts": ts}, name=""))
    x = torch.randn(5, 8)
    lower = ts[0] * torch.relu(ranges[0] - x) + ts[2] * torch.relu(ranges[2] - x) ** 2
    upper = ts[1] * torch.relu(x - ranges[1]) + ts[3] * torch.relu(x - ranges[3]) ** 2
    torch.testing.assert_close(layer(x), torch.softmax(x + lower + upper, -1))


@pytest.mark.parametrize(
    ("state_dict", "text"),
    [
        ({"a.ranges": torch.zeros(3), "a.ts": torch.zeros(3)}, "expected a.ranges of shape"),
        ({"a.ranges": torch.zeros(2, 2), "a.ts": torch.zeros(2, 2)}, "expected a.ranges of shape"),
        ({"a.ranges": torch.zeros(4)}, "expected a.multimax.coefs of shape"),
        ({"a.ranges": torch.zeros(4), "a.ts": torch.zeros(2)}, "with a.multimax"),
        (
            {"a.ranges": torch.zeros(4), "a.ts": torch.zeros(4), "a.multimax_ranges": torch.zeros(4)},
            "expected one entry for a.multimax.knots, got two",
        ),
    ],
)
def test_broken_checkpoints_are_refused(state_dict: dict[str, torch.Tensor], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        multimax.from_published(state_dict)


def test_the_published_models_top_level_pair_belongs_to_the_output_layer() -> None:
    old = {"ranges": torch.arange(4.0), "ts": torch.ones(4), "blocks.0.attn.ranges": torch.zeros(4)}
    old["blocks.0.attn.ts"] = torch.zeros(4)
    new = multimax.from_published(old, output="head")
    assert set(new) == {
        "head.multimax.knots",
        "head.multimax.coefs",
        "blocks.0.attn.multimax.knots",
        "blocks.0.attn.multimax.coefs",
    }
    assert new["head.multimax.knots"].tolist() == [[0, 1], [2, 3]]
