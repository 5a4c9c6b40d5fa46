"""What layers are called where they are shown: in figures, tables and reports. Data keeps the modules' full names."""

import re
from collections.abc import Iterable

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # between points
CROSS = re.compile(r"cross|encoder_?attn|enc_?dec|multihead_attn", re.IGNORECASE)
OUTPUTS = ("classifier", "lm_head", "head", "score", "fc", "proj_out", "output")
ROLES = ("encoder", "decoder", "self", "cross")  # in the order in which they are shown


def _role(kind: str) -> str:
    """What layers of a kind, as "decoder.layers.*.self_attn", do."""
    if CROSS.search(kind.rpartition(".*.")[2]):
        return "cross"
    return next((role for role in ("decoder", "encoder") if role in kind), "self")


def _numbered(names: list[str]) -> dict[str, str]:
    """Layers of one kind by the number that tells them apart, from 1; "2.1" where it takes two."""
    numbers = {name: [int(number) + 1 for number in NUMBER.findall(name)] for name in names}
    places = range(len(numbers[names[0]]))
    differing = [place for place in places if len({of_name[place] for of_name in numbers.values()}) > 1] or [0]
    names = sorted(names, key=lambda name: numbers[name])
    return {name: "layer " + ".".join(str(numbers[name][place]) for place in differing) for name in names}


def layer_names(names: Iterable[str]) -> dict[str, str]:
    """The names that are shown, by full name, in the order in which they are shown.

    Layers that differ only in a number are "layer 1" and so on. Where there are several kinds, they are "encoder layer
    1", "decoder layer 1" and "cross layer 1", in this order; an output layer is "output", and comes last. What fits no
    such name keeps its own.

    Args:
        names: full names of modules.

    Example:
        >>> from multimax.metrics.layer_names import layer_names
        >>> layer_names(["classifier", "vit.layers.10.attention", "vit.layers.9.attention"])
        {'vit.layers.9.attention': 'layer 10', 'vit.layers.10.attention': 'layer 11', 'classifier': 'output'}
        >>> both = ["decoder.layers.0.cross_attn", "decoder.layers.0.self_attn", "encoder.layers.0.self_attn"]
        >>> list(layer_names(both).values())
        ['encoder layer 1', 'decoder layer 1', 'cross layer 1']
    """
    names = list(dict.fromkeys(names))
    kinds: dict[str, list[str]] = {}
    for name in names:
        if NUMBER.search(name):
            kinds.setdefault(NUMBER.sub("*", name), []).append(name)
    roles = {kind: _role(kind) for kind in kinds}
    distinct = len(set(roles.values())) == len(roles)
    found: dict[str, str] = {}
    for kind in sorted(kinds, key=lambda kind: ROLES.index(roles[kind])):
        short = _numbered(kinds[kind])
        if len(kinds) > 1:
            short = {name: f"{roles[kind]} {text}" if distinct else name for name, text in short.items()}
        found |= short
    others = [name for name in names if name not in found]
    outputs = [name for name in others if name.rpartition(".")[2] in OUTPUTS]
    for name in sorted(others, key=outputs.__contains__):
        found[name] = "output" if [name] == outputs else name or "model"
    return found
