"""The figures of a report, those that apply."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from multimax import plots
from multimax.experiments import table as tables
from multimax.experiments import tasks
from multimax.experiments.report.alternative import described
from multimax.experiments.report.models import Measured
from multimax.experiments.report.sources import Group
from multimax.experiments.results import Sweep
from multimax.metrics import AttentionStatistics
from multimax.metrics.layer_names import layer_names
from multimax.plots import attention_of, class_activation
from multimax.plots.sigma import OUTPUT
from multimax.plots.style import as_svg
from multimax.reweighting.layer import SYMBOLS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NO_MODEL = "there is no trained model"
Parameters = Mapping[str, Sequence[float]]


class NotHere(Exception):
    """Why a figure does not apply."""


@dataclass(frozen=True)
class Drawing:
    """A figure to be drawn.

    Attributes:
        title: in words.
        caption: how to read it.
        draw: makes it; raises :class:`NotHere` if it does not apply.
    """

    title: str
    caption: str
    draw: Callable[[], "Figure"]

    def drawn(self) -> tuple[bytes, str]:
        """The figure as SVG, and in words. What its function does not take, such as NaN, is a reason against it."""
        try:
            figure = self.draw()
            return as_svg(figure), described(figure)
        except ValueError as error:
            if not str(error).startswith("multimax: "):
                raise
            raise NotHere(str(error).removeprefix("multimax: ")) from error


class Drawings:
    """All figures of a group.

    Args:
        group: of runs or models.
        measured: its models, by label.
        parameters: what runs and models have learned.
        without: why models were not run on data, if they were not.
    """

    def __init__(self, group: Group, measured: Mapping[str, Measured], parameters: Sweep, without: str) -> None:
        self.group, self.measured, self.without, self.parameters = group, measured, without, parameters
        self.learned = {
            label: tables.learned_layers(parameters, label)
            for label in parameters.labels
            if _has_multimax(parameters, label)
        }
        self.photos = {label: model for label, model in measured.items() if model.pixels is not None}
        # figures of functions are of one model: the last method's, with the seed that other figures have
        self.of, self.layers = "", {}
        if self.learned:
            label = list(self.learned)[-1]
            seed = next(
                (source.settings.seed for source in group.sources if source.label == label and source.settings), None
            )
            runs = [run for run in parameters.of(label) if run.result.get("parameters")]
            run = min(runs, key=lambda run: run.seed != seed)
            layers = tables.learned_layers(replace(parameters, runs=[run]), label)
            self.of = f"{label}{'' if len(runs) == 1 else f', seed {run.seed}'}"
            self.of += ", first head" * any(len(sets) > 1 for sets in layers.values())
            self.layers = {name: sets[0] for name, sets in layers.items()}

    def __iter__(self) -> Iterator[Drawing]:
        """In the order in which they are shown."""
        yield Drawing(
            "Loss and metrics",
            "Over the steps of training; what begins with eval is of the evaluations in between.",
            self.learning,
        )
        for label, layers in self.learned.items():
            yield Drawing(
                f"Learned sigma: {label}",
                "The modulator that each layer has learned, against the identity (dashed), which is softmax: steeper "
                "than the identity, differences between scores grow; flatter, they shrink; where it falls, a larger "
                "score gets less weight. Figures 3 and 10 of the paper.",
                partial(plots.learned_sigma, layers, line=tables.line_of(self.parameters, label)),
            )
        yield Drawing(
            "Paths on the simplex",
            "Where a series of inputs, from (3, 0, 0) over (3, 3, 0) to (0, 3, 0), ends on the simplex: corners are "
            "one mode, edges two, the height is the weight of the third entry. MultiMax with the parameters that "
            f"layers of {self.of} have learned. Figure 1a of the paper.",
            lambda: plots.simplex(multimax=self.of_layers()),
        )
        yield Drawing(
            "Sparsity against multi-modality",
            "Of two modes over noise. Softmax moves along its curve with the temperature; right of and above it is "
            f"what no temperature reaches. MultiMax with the parameters that layers of {self.of} have learned. Figure "
            "1b of the paper.",
            lambda: plots.trade_off(multimax=self.of_layers(numbered=True)),
        )
        yield Drawing(
            "The weight of an entry beside a fixed one",
            "For the inputs [-2, x] and [2, x]. Functions of differences alone draw one curve twice, moved. MultiMax "
            f"with the parameters that the last layer of {self.of} has learned. Figure 2 of the paper.",
            lambda: plots.two_entries(multimax=dict(list(self.of_layers().items())[-1:])),
        )
        yield Drawing(
            "Patch similarity by layer and epoch",
            "How alike the patches are after each layer; close to 1 is oversmoothed. Figure 4 of the paper.",
            self.patch_similarity,
        )
        yield Drawing(
            "Histograms of attention weights",
            "By layer, both scales logarithmic: sparse attention has many weights far to the left. Figure 5 of the "
            "paper.",
            lambda: plots.attention_histograms(self.statistics()),
        )
        yield Drawing(
            "Cumulative distributions of attention weights",
            "The share of weights below each value. Figure 8 of the paper.",
            lambda: plots.cumulative_attention(self.statistics()),
        )
        yield from self.looking()
        yield Drawing(
            "Rollout discrepancy",
            "How far the attention accumulated up to a layer is from that layer's own: total variation, with a band of "
            "one standard deviation over the examples. Figure 9 of the paper.",
            self.rollout,
        )
        yield Drawing(
            "Grad-CAM",
            "Which patches speak for the class that each model predicts, which need not be the same. The maps of a row "
            "share a scale, that of the logits, which differs between models; the bar shows a colour over dark and "
            "over bright parts of the photo. Figure 6 of the paper.",
            self.grad_cam,
        )
        yield Drawing(
            "Parameters over the steps of training",
            "Of each layer, in the paper's symbols.",
            lambda: self.curves("multimax/"),
        )
        yield Drawing(
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
        names = ["loss", "eval_loss", *(f"eval_{name}" for name in tasks.main_metrics())]
        names = [name for name in names if name in there]
        if not names:
            raise NotHere("no loss was logged")
        return plots.training_curves(logs, names=names)

    def of_layers(self, numbered: bool = False) -> dict[str, Parameters]:
        """Parameters by layer of attention, or of output if there are no others."""
        if not self.layers:
            raise NotHere("there is no MultiMax among them")
        chosen = {name: parameters for name, parameters in self.layers.items() if name != OUTPUT} or self.layers
        if numbered and len(chosen) > 1:
            return {str(place): parameters for place, parameters in enumerate(chosen.values(), start=1)}
        return {f"MultiMax,\n{name}": parameters for name, parameters in _some(chosen).items()}

    def patch_similarity(self) -> "Figure":
        """Of runs on images."""
        logs = self.logs()
        if not any(name.endswith("/patch_similarity") for log in logs.values() for entry in log for name in entry):
            raise NotHere("patch similarity was not logged; it is measured in vision")
        return plots.patch_similarity(logs)

    def statistics(self) -> dict[str, AttentionStatistics]:
        """By label."""
        found = {label: model.statistics for label, model in self.measured.items() if model.statistics is not None}
        if not found:
            raise NotHere(self.without or NO_MODEL)
        return found

    def rollout(self) -> "Figure":
        """Of models whose layers follow on one another."""
        found = {}
        for label, statistics in self.statistics().items():
            if any("rollout_discrepancy" in layer.measures for layer in statistics.layers.values()):
                found[label] = statistics
        if not found:
            raise NotHere("the layers are not all self-attention of one length, one after the other")
        return plots.rollout_discrepancy(found)

    def looking(self) -> Iterator[Drawing]:
        """Where the heads look: a figure for some layers of models that take photos alike, side by side."""
        alike: dict[object, dict[str, Measured]] = {}
        for label, model in self.photos.items():
            assert model.pixels is not None
            patch = str(getattr(model.model.config, "patch_size", label))
            layers = tuple(layer_names(() if model.statistics is None else model.statistics.layers).items())
            alike.setdefault((model.pixels.shape, patch, layers), {})[label] = model
        for (_, _, layers), models in alike.items():  # type: ignore[misc]
            for name, shown in _some(dict(layers)).items():
                yield Drawing(
                    f"Where the heads look: {shown}" + f" of {', '.join(models)}" * (len(alike) > 1),
                    "From the patch that is marked, in the middle of the first photo. All maps share a scale; the bar "
                    "shows a colour over dark and over bright parts of the photo. Figure 7 of the paper.",
                    partial(self.attention_maps, name, models),
                )
        if not alike:
            yield Drawing("Where the heads look", "", lambda: self.attention_maps("", {}))

    def attention_maps(self, layer: str, models: Mapping[str, Measured]) -> "Figure":
        """One layer of each model, of the first photo."""
        first = self.pictured(next(iter(models), ""))
        assert first.pixels is not None
        found = {
            label: attention_of(model.model, first.pixels[:1], layers=[layer])[layer] for label, model in models.items()
        }
        rows, columns = first.grid
        query = rows // 2 * columns + columns // 2
        return plots.attention_maps(first.pixels[0], found, query=query, grid=first.grid)

    def grad_cam(self) -> "Figure":
        """Of some photos, the models side by side."""
        first = self.pictured(next(iter(self.photos), ""))
        found = {
            label: class_activation(model.model, model.pixels, grid=model.grid) for label, model in self.photos.items()
        }
        return plots.grad_cam(first.pixels, found)

    def pictured(self, label: str) -> Measured:
        """A model of images."""
        if label not in self.photos:
            raise NotHere(self.without or ("only models of images look at photos" if self.measured else NO_MODEL))
        return self.photos[label]

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
    symbols = set(SYMBOLS)
    return any(
        symbols <= set(parameters)
        for run in sweep.of(label)
        for parameters in (run.result.get("parameters") or {}).values()
    )


def _some(layers: Mapping[str, Any]) -> dict[str, Any]:
    """The first, the middle and the last."""
    names = list(layers)
    return {name: layers[name] for name in dict.fromkeys((names[0], names[len(names) // 2], names[-1]))}
