"""What layers are called where they are shown."""

import pytest

from multimax.metrics.layer_names import layer_names

MARIAN = {
    "model.encoder.layers.0.self_attn": "encoder layer 1",
    "model.encoder.layers.1.self_attn": "encoder layer 2",
    "model.decoder.layers.0.self_attn": "decoder layer 1",
    "model.decoder.layers.1.self_attn": "decoder layer 2",
    "model.decoder.layers.0.encoder_attn": "cross layer 1",
    "model.decoder.layers.1.encoder_attn": "cross layer 2",
    "lm_head": "output",
}


@pytest.mark.parametrize(
    "expected",
    [
        {f"ijepa.layers.{n}.attention": f"layer {n + 1}" for n in range(12)} | {"classifier": "output"},
        {"transformer.h.0.attn": "layer 1", "lm_head": "output"},
        {"vit.layers.4.attention": "layer 5"},  # one of many, asked for alone
        MARIAN,
        {
            "encoder.block.0.layer.0.SelfAttention": "encoder layer 1",
            "encoder.block.1.layer.0.SelfAttention": "encoder layer 2",
            "decoder.block.0.layer.0.SelfAttention": "decoder layer 1",
            "decoder.block.0.layer.1.EncDecAttention": "cross layer 1",
        },
        {
            "swin.encoder.layers.0.blocks.1.attention": "layer 1.2",
            "swin.encoder.layers.1.blocks.0.attention": "layer 2.1",
        },
        {"layers.0.self_attn": "self layer 1", "layers.0.multihead_attn": "cross layer 1"},
        {"transformer.decoder.layers.0.attn": "layer 1"},
        {"text.layers.0.attn": "text.layers.0.attn", "vision.layers.0.attn": "vision.layers.0.attn"},
        {"self_attn": "self_attn"},
        {"": "model"},
        {"a.head": "a.head", "b.head": "b.head"},  # two outputs are told apart
        {},
    ],
)
def test_names_and_their_order(expected: dict[str, str]) -> None:
    for names in (expected, reversed(expected)):
        found = layer_names(names)
        assert found == expected
        assert len(set(found.values())) == len(found)
        if all(name != shown for name, shown in found.items()):  # others stay in their order
            assert list(found) == list(expected)
