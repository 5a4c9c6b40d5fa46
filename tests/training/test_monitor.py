"""The monitor and the Trainer's callback: what they log, what they warn of, and that training is as without them."""

import copy
import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from multimax.oversmoothing import AttnScale
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

import multimax
from multimax import metrics, presets, reweighting
from multimax.metrics.monotonicity import least_slope
from multimax.ops import observing
from multimax.training.callback import MultiMaxCallback
from multimax.training.monitor import Monitor

E, H, V = 16, 2, 20


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Two that wait for each other after each of many tiny operations take long where another process runs."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    yield
    assert observing._observers == []


def layer(dropout: float = 0.0, **options: Any) -> nn.Module:
    encoder = nn.TransformerEncoderLayer(E, H, 32, dropout, batch_first=True)
    encoder.self_attn = multimax.MultiheadAttention(E, H, dropout, batch_first=True, **options)
    return encoder


class Model(nn.Module):
    """Two layers and an output layer; gives what the Trainer wants."""

    def __init__(self, dropout: float = 0.0, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, E)
        self.layers = nn.ModuleList(layer(dropout, **options) for _ in range(2))
        self.head = multimax.MultiMaxHead(E, V)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embedding(tokens)
        for encoder in self.layers:
            hidden = encoder(hidden)
        return {"loss": self.head(hidden, labels)}


def batch() -> tuple[Tensor, Tensor]:
    tokens, labels = torch.randint(V, (2, 4, 7))
    return tokens, labels


def hooks(model: nn.Module) -> int:
    dicts = [d for m in model.modules() for name, d in vars(m).items() if "hook" in name]
    return sum(len(d) for d in dicts if isinstance(d, OrderedDict | dict))


# monotonicity


def sampled(coefs: Tensor, knots: Tensor, low: float, high: float) -> float:
    """The least slope by autograd at many points, the pieces' ends among them, from both sides."""
    ends = torch.cat([knots.flatten(), torch.tensor([low, high], dtype=torch.float64)])
    ends = torch.cat([ends - 1e-9, ends + 1e-9]).clamp(low, high)
    x = torch.cat([torch.linspace(low, high, 20001, dtype=torch.float64), ends]).requires_grad_()
    (slope,) = torch.autograd.grad(multimax.modulate(x, coefs, knots).sum(), x)
    return slope.min().item()


@pytest.mark.parametrize("order", [1, 2, 3, 4, 6])
def test_least_slope_is_that_of_autograd(order: int) -> None:
    inner = 0
    for _ in range(50):
        coefs = torch.randn(order, 2, dtype=torch.float64)
        knots = 2 * torch.randn(order, 2, dtype=torch.float64)
        low, high = sorted((3 * torch.randn(2)).tolist())
        slope, x = least_slope(coefs, knots, low, high)
        expected = sampled(coefs, knots, low, high)
        assert slope == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert low <= x <= high
        inner += not any(abs(x - end) < 1e-6 for end in [low, high, *knots.flatten().tolist()])
    # between knots there are minima from the third order on, which need the roots
    assert (inner > 0) == (order > 2)


def test_least_slope_finds_a_narrow_dip() -> None:
    """Between samples: the slope is (x - 1)^2 - 1e-8 near 1."""
    # sigma' = 1 + 2 e_2 (x - d) + 3 e_3 (x - d)^2 with d = 0: 1 - 2 x + x^2, and a little less
    coefs = torch.tensor([[0.0, -1e-8], [0.0, -1.0], [0.0, 1 / 3]], dtype=torch.float64)
    knots = torch.zeros(3, 2, dtype=torch.float64)
    slope, x = least_slope(coefs, knots, -3, 3)
    assert slope == pytest.approx(-1e-8, rel=1e-3)
    assert x == pytest.approx(1.0)
    assert least_slope(coefs, knots, -3, 0.9)[0] > 0


def test_least_slope_at_the_edges() -> None:
    coefs, knots = multimax.from_paper([2.0], [0.5], [0.0], [1.0])
    assert least_slope(coefs, knots, -5, 5) == (0.5, 1.0)  # from above the knot
    assert least_slope(coefs, knots, -5, 0.5)[0] == 1
    assert least_slope(coefs, knots, 2, 2) == (0.5, 2.0)
    # a leading term too small to divide by: 1 - 2 x + x^2 + a subnormal
    tiny = torch.tensor([[0.0, 0.0], [0.0, -1.0], [0.0, 1 / 3], [0.0, 1e-320]], dtype=torch.float64)
    slope, x = least_slope(tiny, torch.zeros(4, 2, dtype=torch.float64), -1, 3)
    assert (slope, x) == (pytest.approx(0, abs=1e-12), pytest.approx(1))
    for wrong in ((1.0, 0.0), (0.0, math.inf), (math.nan, 1.0)):
        with pytest.raises(ValueError, match="multimax: expected finite low <= high"):
            least_slope(coefs, knots, *wrong)
    with pytest.raises(ValueError, match="one set"):
        least_slope(torch.zeros(3, 2, 2), torch.zeros(3, 2, 2), 0, 1)


def test_the_papers_layers() -> None:
    """Most rise over usual scores; those that fall do so by autograd too."""
    for layers in presets.values():
        for values in layers:
            coefs, knots = (parameter.double() for parameter in multimax.from_paper(*values))
            slope, _ = least_slope(coefs, knots, -5, 5)
            assert slope == pytest.approx(sampled(coefs, knots, -5, 5), rel=1e-4, abs=1e-6)


# what is logged


def run(model: nn.Module, monitor: Monitor | None, steps: int = 5) -> list[float]:
    """A loop with dropout, accumulation and an optimizer."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        if monitor is not None:
            monitor.__enter__()
        for _ in range(2):
            loss = model(*batch())["loss"]
            loss.backward()
            losses.append(loss.item())
        if monitor is not None:
            monitor.__exit__(None, None, None)
        optimizer.step()
    return losses


def test_training_is_as_without() -> None:
    model = Model(dropout=0.2)
    other = copy.deepcopy(model)
    logged: list[int] = []
    monitor = Monitor(model, lambda values, step: logged.append(step), every=2)
    assert run(model, monitor) == run(other, None)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    assert logged == [0, 2, 4]
    assert hooks(model) == hooks(other)


def test_values() -> None:
    torch.manual_seed(0)
    model = Model(per_head=True)
    x = batch()
    with metrics.collect(model, ("multi_modality", "sparsity", "entropy")) as found:
        model(*x)
    found_once: list[tuple[dict[str, float], int]] = []
    monitor = Monitor(model, lambda values, step: found_once.append((values, step)))
    with monitor:
        model(*x)["loss"].backward()
    ((values, step),) = found_once
    assert step == 0
    assert values == monitor.values
    function = model.layers[1].self_attn.multimax
    for symbol in ("t_b", "t_d", "b", "d"):
        for n in range(2):
            key = f"multimax/layers.1.self_attn/{symbol}_{n + 1}"
            assert values[key] == pytest.approx(getattr(function, symbol)[:, n].mean().item(), rel=1e-6)
            key = f"multimax/head/{symbol}_{n + 1}"
            assert values[key] == pytest.approx(getattr(model.head.multimax, symbol)[n].item(), rel=1e-6)
    for measure in ("multi_modality", "sparsity", "entropy"):
        expected = found["layers.1.self_attn"][measure].mean
        assert values[f"multimax/layers.1.self_attn/{measure}"] == pytest.approx(expected, rel=1e-6)
    norms = {}
    for name, module in (("layers.0.self_attn", model.layers[0].self_attn), ("head", model.head)):
        both = torch.cat([p.grad.flatten() for p in module.multimax.parameters()])
        norms[name] = both.norm().item()
        assert values[f"multimax/{name}/grad_norm"] == pytest.approx(norms[name], rel=1e-5)
        assert norms[name] > 0
    all_norms = [value for key, value in values.items() if key.endswith("/grad_norm") and key.count("/") == 2]
    assert values["multimax/grad_norm"] == pytest.approx(math.hypot(*all_norms), rel=1e-5)
    # 8 parameters, 3 measures and a norm for two layers; no measures for the output layer; one norm for all
    assert len(values) == 2 * 12 + 9 + 1
    assert all(isinstance(value, float) for value in values.values())


def test_each_head() -> None:
    model = layer(per_head=True)
    monitor = Monitor(model, per_head=True, measures=())
    with monitor:
        model(torch.randn(2, 5, E)).sum().backward()
    expected = model.self_attn.multimax.t_d.tolist()
    for h in range(H):
        assert monitor.values[f"multimax/self_attn/head_{h}/t_d_2"] == expected[h][1]
    assert "multimax/self_attn/t_d_2" not in monitor.values


class Rows(nn.Module):
    """MultiMax called as a module, with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.multimax = multimax.MultiMax(1, terms="lower")

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.multimax(x, mask=mask)
        return out


def test_other_functions_and_names() -> None:
    model = nn.ModuleDict(
        {
            "entmax": layer(reweight=reweighting.Entmax(1.5, learn=True, heads=H), attn_scale=True),
            "softmax": layer(reweight=reweighting.Softmax(2.0, learn=True)),
            "topk": layer(reweight="sparsemax"),
            "rows": Rows(),
            "scale": AttnScale(),
        }
    )
    x = torch.randn(2, 5, E)
    monitor = Monitor(model, measures=("entropy",))
    with monitor:
        nn.Sequential(model["entmax"], model["softmax"], model["topk"])(x).sum().backward()
        model["rows"](torch.randn(2, 3, 4, 4)).sum().backward()
    values = monitor.values
    assert values["multimax/entmax.self_attn/alpha"] == pytest.approx(1.5)
    assert values["multimax/entmax.self_attn/omega"] == 0
    assert values["multimax/softmax.self_attn/temperature"] == pytest.approx(2.0)
    assert values["multimax/scale/omega"] == 0
    entropies = [key.split("/")[1] for key in values if key.endswith("entropy")]
    assert sorted(entropies) == ["entmax.self_attn", "rows", "softmax.self_attn", "topk.self_attn"]
    # a term that is off is not there
    assert {key for key in values if "rows" in key} == {
        f"multimax/rows/{value}" for value in ("t_b_1", "b_1", "entropy", "grad_norm")
    }
    alone = Monitor(multimax.MultiMax(1), measures=())
    with alone:
        pass
    assert set(alone.values) == {f"multimax/model/{symbol}_1" for symbol in ("t_b", "t_d", "b", "d")}


def test_costs_nothing_between() -> None:
    model = Model()
    before = hooks(model)
    monitor = Monitor(model, every=3)
    counts = []
    for _ in range(4):
        with monitor:
            counts.append((hooks(model) - before, len(observing._observers)))
            model(*batch())["loss"].backward()
        assert hooks(model) == before
        assert observing._observers == []
    assert counts[0][0] > 0
    assert counts[0][1] == 2
    assert counts == [counts[0], (0, 0), (0, 0), counts[0]]


def test_a_step_that_raises() -> None:
    model = Model()
    before = hooks(model)
    monitor = Monitor(model)
    with pytest.raises(IndexError), monitor:
        model(torch.tensor([[V]]), torch.tensor([[0]]))
    assert monitor.values == {}
    assert hooks(model) == before
    monitor.step = 0
    monitor.__enter__()
    with pytest.raises(RuntimeError, match="multimax: expected the previous step to have ended"):
        monitor.__enter__()
    monitor.close()
    assert hooks(model) == before
    monitor.close()


def test_gradients_of_frozen_parameters() -> None:
    model = layer()
    model.self_attn.multimax.requires_grad_(False)
    monitor = Monitor(model)
    with monitor:
        model(torch.randn(2, 5, E)).sum().backward()
    assert not [key for key in monitor.values if "grad_norm" in key]


# what is warned of


def falling() -> tuple[Tensor, Tensor]:
    """Slope -1 below -3, and 1 above."""
    return multimax.from_paper([-1.0], [1.0], [-3.0], [0.0])


def warned(function: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(warning.message) for warning in caught]


def test_warns_of_a_falling_sigma_where_scores_are() -> None:
    model = Rows()
    model.multimax = multimax.MultiMax(1, init=falling())
    monitor = Monitor(model, every=1)

    def step(*values: float, mask: Tensor | None = None) -> list[str]:
        def forward() -> None:
            with monitor:
                model(torch.tensor(values).expand(1, 1, 2, -1), mask=mask)

        return warned(forward)

    assert step(-2.9, 0.0, 5.0) == []  # the scores seen are above -3
    assert step(-math.inf, 0.0, 5.0) == []
    assert step(-4.0, 0.0, 5.0, mask=torch.tensor([False, True, True])) == []
    (text,) = step(-4.0, 0.0, 5.0)
    assert text == (
        "multimax: expected sigma to rise, got a slope of -1 at -4 in model, over scores seen from -4 to 5: a larger "
        "score gets less weight there; MultiMax(monotone=True) prevents it"
    )
    assert step(-4.0, 0.0, 5.0) == []  # once


def test_warns_of_what_attention_sees() -> None:
    torch.manual_seed(0)
    model = Model(order=1, init=falling())
    with torch.no_grad():
        model.layers[1].self_attn.in_proj_weight *= 30
    monitor = Monitor(model)

    def forward() -> None:
        with monitor:
            model(*batch())

    (text,) = warned(forward)
    assert "layers.1.self_attn, over scores seen from -" in text
    # and with a range that is given, in every layer
    texts = warned(lambda: Monitor(model, score_range=(-4.0, 4.0)).__enter__().__exit__(None, None, None))
    assert [text for text in texts if "-1 at -4" in text and "over scores from -4 to 4" in text] == texts[-2:]
    assert len(texts) == 3
    assert "expected attention to run inside collect" in texts[0]


def test_warns_of_what_the_output_layer_sees() -> None:
    head = multimax.MultiMaxHead(E, V, order=1, init=falling())
    loss = multimax.LinearMultiMaxCrossEntropyLoss(E, V, order=1, init=falling())
    hidden, target = torch.randn(2, 5, E), torch.randint(V, (2, 5))

    def step(model: nn.Module, scale: float) -> list[str]:
        def forward() -> None:
            with Monitor(model, measures=()):
                model(scale * hidden, target)

        return warned(forward)

    for model, linear in ((head, head), (loss, loss.linear)):
        assert step(model, 1.0) == []
        (text,) = step(model, 20.0)
        low, high = (bound.item() for bound in nn.functional.linear(20 * hidden, linear.weight, linear.bias).aminmax())
        assert f"in model, over scores seen from {low:.4g} to {high:.4g}" in text
    # nothing was run
    (text,) = warned(lambda: Monitor(head, measures=()).__enter__().__exit__(None, None, None))
    assert "got a slope of -1 at -10 in model, over scores from -10 to 10" in text


def test_each_head_is_checked() -> None:
    coefs, knots = torch.zeros(H, 1, 2), torch.zeros(H, 1, 2)
    coefs[1, 0, 1] = -2
    one = multimax.MultiMax(1, heads=H, init=(coefs, knots))
    assert len(warned(lambda: Monitor(one, measures=()).__enter__().__exit__(None, None, None))) == 1
    kept = multimax.MultiMax(3, heads=H, monotone=True)
    with torch.no_grad():
        kept.coefs.normal_()
    assert warned(lambda: Monitor(kept, measures=()).__enter__().__exit__(None, None, None)) == []


def test_warns_of_parameters_that_run_away() -> None:
    model = nn.ModuleList([multimax.MultiMax(1, init="identity") for _ in range(2)] + [AttnScale()])
    monitor = Monitor(model, every=1, measures=(), limit=50.0)

    def step() -> list[str]:
        return warned(lambda: monitor.__enter__().__exit__(None, None, None))

    assert step() == []
    with torch.no_grad():
        model[1].knots[0, 1] = 51
        model[2].omega.fill_(-70)
    assert step() == [
        "multimax: expected parameters within 50, got knots of 1 with 51; a lower multimax_lr_factor in param_groups "
        "may prevent it",
        "multimax: expected parameters within 50, got omega of 2 with 70; a lower multimax_lr_factor in param_groups "
        "may prevent it",
    ]
    assert step() == []
    with torch.no_grad():
        model[1].knots[0, 1] = math.nan
        model[0].coefs[0, 1] = math.inf
    assert step() == [
        "multimax: expected finite parameters, got coefs of 0 with NaN or infinity",
        "multimax: expected finite parameters, got knots of 1 with NaN or infinity",
    ]
    assert math.isnan(monitor.values["multimax/1/d_1"])


def test_compiled_models_are_not_watched() -> None:
    model = layer()
    compiled = torch.compile(model, backend="eager")
    before = hooks(model)
    monitor = Monitor(compiled, every=1)
    counts = []

    def step() -> None:
        with monitor:
            counts.append(hooks(model) - before)
            compiled(torch.randn(2, 5, E)).sum().backward()

    (text,) = warned(step)
    assert text.startswith("multimax: expected a model that is not compiled")
    assert text.endswith("(multimax.Monitor continues without measures)")
    assert warned(step) == []
    assert counts == [0, 0]
    assert len(monitor.values) == 8 + 2  # the parameters and the gradient


def test_attention_that_drops_its_weights() -> None:
    """collect would raise in the midst of the forward."""

    class SomeAttention(nn.Module):
        def __init__(self, p: float) -> None:
            super().__init__()
            self.drop = nn.Dropout(p)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            weights = self.drop(torch.softmax(x @ x.mT, -1))[:, None]
            return weights[:, 0] @ x, weights

    class Mixed(nn.Module):
        def __init__(self, p: float) -> None:
            super().__init__()
            self.one, self.two = SomeAttention(p), layer()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.two(self.one(x)[0])
            return out

    def step(model: nn.Module) -> dict[str, float]:
        monitor = Monitor(model, measures=("entropy",))
        with monitor:
            model(torch.randn(2, 5, E)).sum().backward()
        return monitor.values

    assert {"multimax/one/entropy", "multimax/two.self_attn/entropy"} <= set(step(Mixed(0.0)))
    with pytest.warns(UserWarning, match="got one .SomeAttention. with softmax and dropout, whose weights"):
        values = step(Mixed(0.5))
    assert "multimax/two.self_attn/t_b_1" in values


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"multimax: expected a model with reweighting modules, got Linear.*convert"):
        Monitor(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="multimax: expected every of at least 1, got 0"):
        Monitor(layer(), every=0)
    with pytest.raises(TypeError, match="multimax: expected every to be an int, got float"):
        Monitor(layer(), every=1.5)  # type: ignore[arg-type]


# transformers' Trainer


def trainer_for(model: nn.Module, folder: Path, **options: Any) -> transformers.Trainer:
    torch.manual_seed(0)
    data = [{"tokens": torch.randint(V, (7,)), "labels": torch.randint(V, (7,))} for _ in range(24)]
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=2,
        learning_rate=1e-2,
        save_strategy="no",
        dataloader_pin_memory=False,
        use_cpu=True,
        **{"report_to": [], **options},
    )
    return transformers.Trainer(model, arguments, train_dataset=data)


def test_trainer_to_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    model = Model(dropout=0.1)
    initial = model.head.multimax.d[0].item()
    trainer = trainer_for(model, tmp_path, report_to=["tensorboard"])
    trainer.add_callback(MultiMaxCallback(trainer, every=2))
    norms = []

    def record(*_: object) -> None:
        norms.append(torch.cat([p.grad.flatten() for p in model.head.multimax.parameters()]).norm().item())

    trainer.create_optimizer().register_step_pre_hook(record)
    trainer.train()
    printed = capsys.readouterr()
    assert "train_runtime" in printed.out + printed.err
    assert "multimax/" not in printed.out + printed.err
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    tags = set(events.Tags()["scalars"])
    for name in ("t_b_1", "t_d_1", "b_2", "d_2", "multi_modality", "sparsity", "entropy", "grad_norm"):
        assert f"train/multimax/layers.1.self_attn/{name}" in tags
    assert {"train/multimax/head/t_b_1", "train/multimax/grad_norm"} <= tags
    assert [point.step for point in events.Scalars("train/loss")] == [2, 4]  # the Trainer's own are still there
    points = events.Scalars("train/multimax/head/d_1")
    assert [point.step for point in points] == [0, 2]
    assert points[0].value == pytest.approx(initial, rel=1e-5)
    assert points[0].value != points[1].value
    # of all micro-batches, as the optimizer gets it
    found = [point.value for point in events.Scalars("train/multimax/head/grad_norm")]
    assert found == pytest.approx([norms[0], norms[2]], rel=1e-5)
    assert [log["step"] for log in trainer.state.log_history if "multimax/grad_norm" in log] == [0, 2]


def test_trainer_trains_as_without(tmp_path: Path) -> None:
    model = Model(dropout=0.1)
    other = copy.deepcopy(model)
    trainer = trainer_for(model, tmp_path)
    trainer.add_callback(MultiMaxCallback(trainer, every=1))
    trainer.train()
    trainer_for(other, tmp_path).train()
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert hooks(model) == hooks(other)


def test_trainer_that_stops_in_a_step(tmp_path: Path) -> None:
    model = Model()
    before = hooks(model)
    trainer = trainer_for(model, tmp_path)
    callback = MultiMaxCallback(trainer, every=1)
    trainer.add_callback(callback)
    forward = model.forward
    model.forward = lambda tokens, labels: forward(tokens + V, labels)  # type: ignore[method-assign]
    with pytest.raises(IndexError):
        trainer.train()
    assert hooks(model) > before
    model.forward = forward  # type: ignore[method-assign]
    trainer.train()
    assert hooks(model) == before
    assert [log["step"] for log in trainer.state.log_history if "multimax/grad_norm" in log] == [0, 1, 2, 3]


def test_trainer_that_goes_on_in_the_middle(tmp_path: Path) -> None:
    """The Trainer's steps count, and one that was interrupted is left when the next begins."""
    model = Model()
    before = hooks(model)
    trainer = trainer_for(model, tmp_path)
    callback = MultiMaxCallback(trainer, every=2)
    callback.on_train_begin(trainer.args, trainer.state, trainer.control)
    for step, watched in ((7, False), (8, True), (10, True), (11, False), (12, True)):
        callback.on_step_begin(trainer.args, transformers.TrainerState(global_step=step), trainer.control)
        assert (hooks(model) > before) == watched, step
    callback.on_train_end(trainer.args, trainer.state, trainer.control)
    assert hooks(model) == before


def test_trainer_that_compiles(tmp_path: Path) -> None:
    model = Model()
    before = hooks(model)
    trainer = trainer_for(model, tmp_path, torch_compile=True, torch_compile_backend="eager")
    trainer.add_callback(MultiMaxCallback(trainer, every=1))
    with pytest.warns(UserWarning, match="multimax: expected a model that is not compiled"):
        trainer.train()
    assert hooks(model) == before
    assert "multimax/layers.0.self_attn/t_b_1" in trainer.state.log_history[0]


def test_a_linear_layer_beside_a_softmax_is_no_output_layer() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(24, 24)
            self.softmax = nn.Softmax(-1)

        def forward(self, x: Tensor) -> Tensor:
            return self.softmax(x @ x.mT) @ self.linear(x)

    model = Attention()
    multimax.convert_(model)
    monitor = multimax.Monitor(model)
    with monitor:
        model(torch.randn(2, 7, 24)).sum().backward()
    assert "multimax/softmax/t_b_1" in monitor.values
    with pytest.raises(ValueError, match="score_range"):
        multimax.Monitor(model, score_range=(5, -5))
    with pytest.raises(ValueError, match="score_range"):
        multimax.Monitor(model, score_range=(5,))
