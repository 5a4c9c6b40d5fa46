"""The figures of a report, those that apply."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from multimax import plots
from multimax.experiments import table as tables
from multimax.experiments.results import Sweep
from multimax.metrics import AttentionStatistics
from multimax.plots.style import layer_names
from multimax.report.models import Measured
from multimax.report.sources import Group

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Parameters = Mapping[str, Sequence[float]]


class NotHere(Exception):
    """Why a figure does not apply."""


@dataclass(frozen=True)
class Drawing:
    """A figure to be drawn.

    Attributes:
        name: for links.
        title: in words.
        caption: how to read it.
        draw: makes it; raises :class:`NotHere` if it does not apply.
    """

    name: str
    title: str
    caption: str
    draw: Callable[[], "Figure"]


class Drawings:
    """All figures of a group.

    Args:
        group: of runs or models.
        measured: its models, by label.
        parameters: what runs and models have learned.
        without: why models were not run on data, if they were not.
    """

    def __init__(self, group: Group, measured: Mapping[str, Measured], parameters: Sweep, without: str) -> None:
        self.group, self.measured, self.without = group, measured, without
        self.learned = {
            label: tables.learned_layers(parameters, label)
            for label in parameters.labels
            if _has_multimax(parameters, label)
        }

    def __iter__(self) -> Iterator[Drawing]:
        """In the order in which they are shown."""
        yield Drawing(
            "learning",
            "Loss and metrics",
            "Over the steps of training; what begins with eval is of the evaluations in between.",
            self.learning,
        )
        for label, layers in self.learned.items():
            yield Drawing(
                f"sigma-{label}",
                f"Learned sigma: {label}",
                "The modulator that each layer has learned, against the identity (dashed), which is softmax: steeper "
                "than the identity, differences between scores grow; flatter, they shrink. A line a seed and head. "
                "Figures 3 and 10 of the paper.",
                partial(plots.learned_sigma, _short(layers)),
            )
        yield Drawing(
            "simplex",
            "Paths on the simplex",
            "Where a series of inputs, from (3, 0, -1) over (3, 3, -1) to (0, 3, -1), ends on the simplex: corners are "
            "one mode, edges two. MultiMax with the parameters that the layers have learned. Figure 1a of the paper.",
            lambda: plots.simplex(multimax=self.of_layers()),
        )
        yield Drawing(
            "trade-off",
            "Sparsity against multi-modality",
            "Of two modes over noise. Softmax moves along its curve with the temperature; right of and above it is "
            "what no temperature reaches. The numbers are layers, with the parameters that they have learned. "
            "Figure 1b of the paper.",
            lambda: plots.trade_off(multimax=self.of_layers(numbered=True)),
        )
        yield Drawing(
            "two-entries",
            "The weight of an entry beside a fixed one",
            "For the inputs [-2, x] and [2, x]. Functions of differences alone draw one curve twice, moved. Figure 2 "
            "of the paper.",
            lambda: plots.two_entries(multimax=dict(list(self.of_layers().items())[-1:])),
        )
        yield Drawing(
            "patch-similarity",
            "Patch similarity by layer and epoch",
            "How alike the patches are after each layer; close to 1 is oversmoothed. Figure 4 of the paper.",
            self.patch_similarity,
        )
        yield Drawing(
            "histograms",
            "Histograms of attention weights",
            "By layer, both scales logarithmic: sparse attention has many weights far to the left. Figure 5 of the "
            "paper.",
            lambda: plots.attention_histograms(self.statistics()),
        )
        yield Drawing(
            "cumulative",
            "Cumulative distributions of attention weights",
            "The share of weights below each value. Figure 8 of the paper.",
            lambda: plots.cumulative_attention(self.statistics()),
        )
        yield Drawing(
            "attention-maps",
            "Where the heads look",
            "From the patch that is marked, in the middle of the first photo; each row has its own scale. Figure 7 of "
            "the paper.",
            self.attention_maps,
        )
        yield Drawing(
            "rollout",
            "Rollout discrepancy",
            "How far the attention accumulated up to a layer is from that layer's own: total variation, with a band of "
            "one standard deviation over the examples. Figure 9 of the paper.",
            self.rollout,
        )
        yield Drawing(
            "grad-cam",
            "Grad-CAM",
            "Which patches speak for the class that the model predicts. Figure 6 of the paper.",
            self.grad_cam,
        )
        yield Drawing(
            "parameters",
            "Parameters over the steps of training",
            "Of each layer, in the paper's symbols.",
            lambda: self.curves("multimax/"),
        )
        yield Drawing(
            "measures",
            "Measures over the steps of training",
            "Of the attention of each layer, at the evaluations.",
            lambda: self.curves("measures/"),
        )

    def logs(self) -> dict[str, list[dict[str, Any]]]:
        """By label, of those that have logged."""
        found = {source.label: source.log for source in self.group.sources if source.log}
        if not found:
            raise NotHere("there is no log of training")
        return found

    def learning(self) -> "Figure":
        """Loss and metrics, of no layer."""
        logs = self.logs()
        there = {name for log in logs.values() for entry in log for name in entry}
        names = ["loss", "eval_loss", *(f"eval_{name}" for name in ("accuracy", "perplexity", "bleu"))]
        names = [name for name in names if name in there]
        if not names:
            raise NotHere("no loss was logged")
        return plots.training_curves(logs, names=names)

    def of_layers(self, numbered: bool = False) -> dict[str, Parameters]:
        """Parameters by layer of attention, or of output if there are no others, of the last method and first seed."""
        if not self.learned:
            raise NotHere("there is no MultiMax among them")
        label, layers = list(self.learned.items())[-1]
        short = layer_names(layers)
        chosen = {short[name]: own[0] for name, own in layers.items()}
        numbers = {name: own for name, own in chosen.items() if name.startswith("layer ")}
        chosen = numbers or chosen
        if numbered and len(chosen) > 1:
            return {str(place): own for place, own in enumerate(chosen.values(), start=1)}
        names = list(chosen)
        shown = dict.fromkeys((names[0], names[len(names) // 2], names[-1]))
        return {f"{label},\n{name}": chosen[name] for name in shown}

    def patch_similarity(self) -> "Figure":
        """Of runs on images."""
        logs = self.logs()
        if not any(name.endswith("/patch_similarity") for log in logs.values() for entry in log for name in entry):
            raise NotHere("patch similarity was not logged; it is measured in vision")
        return plots.patch_similarity(logs)

    def statistics(self) -> dict[str, AttentionStatistics]:
        """By label."""
        found = {label: own.statistics for label, own in self.measured.items() if own.statistics is not None}
        if not found:
            raise NotHere(self.without or "there is no trained model")
        return found

    def rollout(self) -> "Figure":
        """Of models whose layers follow on one another."""
        found = {}
        for label, own in self.statistics().items():
            if any("rollout_discrepancy" in layer.measures for layer in own.layers.values()):
                found[label] = own
        if not found:
            raise NotHere("the layers are not all self-attention of one length, one after the other")
        return plots.rollout_discrepancy(found)

    def attention_maps(self) -> "Figure":
        """Of the first photo, some layers of each model."""
        found = {label: own.photos for label, own in self.measured.items() if own.photos is not None}
        if not found:
            raise NotHere(self.without or "only models of images look at photos")
        maps: dict[str, Tensor] = {}
        for label, photos in found.items():
            short = layer_names(photos.attention)
            maps |= {f"{label},\n{short[name]}": own for name, own in photos.attention.items()}
        rows, columns = photos.grid
        query = rows // 2 * columns + columns // 2
        return plots.attention_maps(photos.pixels[0], maps, query=query, grid=photos.grid)

    def grad_cam(self) -> "Figure":
        """Of some photos, a row a model."""
        found = {label: own.photos for label, own in self.measured.items() if own.photos is not None}
        if not found:
            raise NotHere(self.without or "only models of images look at photos")
        first = next(iter(found.values()))
        return plots.grad_cam(first.pixels, {label: own.activation for label, own in found.items()})

    def curves(self, kind: str) -> "Figure":
        """What was logged of layers."""
        logs = self.logs()
        names: dict[str, None] = {}
        for log in logs.values():
            for entry in log:
                names |= {name.rpartition("/")[2]: None for name in entry if name.startswith(kind)}
        names.pop("grad_norm", None)
        if not names:
            what = "parameters of reweighting functions" if kind == "multimax/" else "measures"
            raise NotHere(f"no {what} were logged")
        chosen = {
            label: log for label, log in logs.items() if any(name.startswith(kind) for entry in log for name in entry)
        }
        return plots.training_curves(chosen, names=list(names))


def _has_multimax(sweep: Sweep, label: str) -> bool:
    symbols = set(tables.SYMBOLS)
    return any(symbols <= set(own) for run in sweep.of(label) for own in (run.result.get("parameters") or {}).values())


def _short(layers: Mapping[str, Any]) -> dict[str, Any]:
    short = layer_names(layers)
    return {short[name]: own for name, own in layers.items()}


def link(text: str) -> str:
    """A name for a link."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
