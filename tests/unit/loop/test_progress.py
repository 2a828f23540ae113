"""From one state of a run to the next: counters, skips, and what is said of numbers not finite."""

from __future__ import annotations

import io
import logging
import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mistakes import message_of
from torch import nn

import sparkdl
from sparkdl.errors import TrainingError
from sparkdl.loop import progress
from sparkdl.loop.advance import (
    FIRST_SCALE,
    GROWTH_ITERATIONS,
    IterationResult,
    advance,
    catch_up,
    describe,
    first_state,
    next_iteration,
    next_scale,
)
from sparkdl.loop.history import History
from sparkdl.loop.loop import LoopConfig
from sparkdl.loop.progress import LiveCurves
from sparkdl.loop.schedule import Schedule
from sparkdl.loop.state import TrainState, Validated
from sparkdl.loop.validation import is_better
from sparkdl.model.buffers import TrainingOptions
from sparkdl.model.recipe import Recipe
from sparkdl.slices.optimizer import OptimizerSpec

STATE = TrainState(
    iteration=11, epoch=2, position=3, samples=100, loss=0.5, skipped=1, iterations_per_epoch=4
)
FP16, FP32 = TrainingOptions(precision="fp16"), TrainingOptions()


def after(
    state: TrainState, result: IterationResult, options: TrainingOptions = FP32
) -> TrainState:
    return advance(state, result, options, (0.1, 0.2), 7.5)


def test_counters() -> None:
    result = IterationResult(0.25, 8, {"forward": 1.0}, gradient_norm=3.0, histograms=None)
    found = after(replace(STATE, position=1), result)
    assert (found.iteration, found.epoch, found.position, found.samples) == (12, 2, 2, 108)
    assert (found.loss, found.learning_rates, found.seconds) == (0.25, (0.1, 0.2), 7.5)
    assert (found.gradient_norm, found.timings) == (3.0, {"forward": 1.0})
    assert (found.skipped, found.loss_scale, found.loss_scale_age) == (1, 1.0, 0)


BAD = IterationResult(math.nan, 8, not_finite={1: "the loss (nan)", 3: 'the gradient of "a.b"'})


def test_raise_says_where_and_what_to_do() -> None:
    assert message_of(TrainingError, after, STATE, BAD) == (
        "iteration 12, epoch 3: not finite: the loss (nan) in replica 1; "
        'the gradient of "a.b" in replica 3 (mean loss nan). Lower the learning rate, clip with '
        'clip_norm=1.0, or pass on_nan="skip".'
    )


def test_raise_knows_that_fp16_ends_early() -> None:
    told = message_of(TrainingError, after, STATE, BAD, TrainingOptions(wire="fp16"))
    assert 'fp16 overflows above 65,504: use wire="bf16". Otherwise: lower' in told


@pytest.mark.parametrize("options", [FP32, FP16], ids=["no scale", "the scale is 1"])
def test_what_no_loss_scale_can_mend_is_an_error_or_skipped(options: TrainingOptions) -> None:
    with pytest.raises(TrainingError):
        after(STATE, BAD, options)
    found = after(STATE, BAD, replace(options, on_nan="skip"))
    assert (found.iteration, found.skipped, found.epoch, found.loss_scale) == (12, 2, 3, 1.0)


@pytest.mark.parametrize("on_nan", ["raise", "skip"])
def test_an_overflow_is_the_loss_scales_to_mend(on_nan: str) -> None:
    state = replace(STATE, loss_scale=1024.0, loss_scale_age=5)
    found = after(state, BAD, replace(FP16, on_nan=on_nan))
    assert (found.loss_scale, found.loss_scale_age, found.skipped) == (512.0, 0, 2)
    fine = after(state, IterationResult(0.1, 8), FP16)
    assert (fine.loss_scale, fine.loss_scale_age, fine.skipped) == (1024.0, 6, 1)


def test_first_state() -> None:
    assert first_state(FP32) == TrainState()
    assert first_state(FP16).loss_scale == torch.amp.GradScaler("cpu").get_scale()
    assert first_state(TrainingOptions(precision="bf16")).loss_scale == 1.0


@given(st.lists(st.booleans(), max_size=60), st.integers(0, GROWTH_ITERATIONS - 1))
def test_the_loss_scale_moves_as_torchs(overflows: list[bool], age: int) -> None:
    """torch's update, with its default growth; below 1 ours does not fall."""
    scale, torchs, tracker = FIRST_SCALE, torch.tensor(FIRST_SCALE), torch.tensor(age).int()
    for overflow in overflows:
        scale, age = next_scale(scale, age, overflow)
        found = torch.tensor(float(overflow))
        torch._amp_update_scale_(torchs, tracker, found, 2.0, 0.5, GROWTH_ITERATIONS)
        if float(torchs) < 1.0:
            assert scale == 1.0
            return
        assert (scale, age) == (float(torchs), int(tracker))


def test_the_loss_scale_at_its_edges() -> None:
    scaler = torch.amp.GradScaler("cpu")
    assert scaler.get_growth_interval() == GROWTH_ITERATIONS
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor()) == (2.0, 0.5)
    assert next_scale(1.5, 0, True) == next_scale(1.0, 0, True) == (1.0, 0)
    assert next_scale(8.0, GROWTH_ITERATIONS - 2, False) == (8.0, GROWTH_ITERATIONS - 1)
    assert next_scale(8.0, GROWTH_ITERATIONS - 1, False) == (16.0, 0)


def test_next_iteration() -> None:
    module = nn.Linear(2, 2)
    recipe = Recipe(module, nn.MSELoss(), partial(torch.optim.SGD, lr=0.5), 0)
    plan = OptimizerSpec.of(recipe, list(module.parameters()), module)
    schedule = Schedule(plan, partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5))
    state = replace(STATE, loss_scale=8.0)
    schedule.catch_up(replace(TrainState(), iteration=2))
    found = next_iteration(state, schedule, True)
    assert (found.index, found.epoch, found.batch) == (11, 2, 3)
    assert (found.loss_scale, found.histograms) == (8.0, True)
    assert found.hyperparameters[0]["lr"] == 0.125
    assert found.description == "sparkdl: epoch 3 · iteration 12 · loss 0.5"
    assert describe(TrainState()) == "sparkdl: epoch 1 · iteration 1"  # there is no loss yet


@pytest.mark.parametrize(("gamma", "warned"), [(0.5, 0), (0.25, 1), (None, 0)])
def test_a_schedule_that_is_another_one_on_resuming_is_told(
    gamma: float | None, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Not another learning rate without a schedule, which is the user's choice."""
    module, history = nn.Linear(2, 2), History()
    for number in (1, 2, 3):
        history.append(TrainState(iteration=number, learning_rates=(0.5**number,)), number)
    recipe = Recipe(module, nn.MSELoss(), partial(torch.optim.SGD, lr=0.5), 0)
    make = gamma and partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=gamma)
    schedule = Schedule(OptimizerSpec.of(recipe, list(module.parameters()), module), make)
    catch_up(schedule, TrainState(iteration=3, iterations_per_epoch=9, position=3), history)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warned
    if warned:
        text = (
            "gives iteration 3 the learning rate 0.0312, and the run before had 0.125. The schedule"
        )
        assert text in caplog.messages[0]


@pytest.mark.parametrize("trigger", [sparkdl.every(3), sparkdl.every_epoch()], ids=str)
def test_histograms_are_asked_for_the_iteration_that_makes_the_trigger_true(trigger) -> None:
    config = LoopConfig(stop=sparkdl.max_epoch(9), options=TrainingOptions(), histograms=trigger)
    state, asked, due = TrainState(iterations_per_epoch=4), [], []
    before = state
    for _ in range(13):
        asked.append(config.wants_histograms(before, state))
        before, state = state, after(state, IterationResult(0.1, 1))
        due.append(trigger(before, state))
    assert asked == due
    assert sum(due) in (3, 4)
    assert not replace(config, histograms=None).wants_histograms(state, state)


def test_histograms_by_time_are_asked_for_the_iteration_after() -> None:
    """How long an iteration takes is not known beforehand."""
    every = sparkdl.every_seconds(10)
    config = LoopConfig(stop=sparkdl.max_epoch(9), options=TrainingOptions(), histograms=every)
    before = state = TrainState(iterations_per_epoch=4)
    asked = []
    for _ in range(9):
        asked.append(config.wants_histograms(before, state))
        then = replace(after(state, IterationResult(0.1, 1)), seconds=state.seconds + 4)
        before, state = state, then
    assert asked == [False, False, False, True, False, True, False, False, True]


class Bar:
    """A bar of tqdm's that keeps what it shows."""

    said: list[Any]

    def __init__(self, total: int = 0, initial: int = 0, desc: str = "", **_: Any) -> None:
        self.said.append((initial, total, desc) if total else desc)

    def set_description_str(self, text: str) -> None:
        self.said.append(text)

    def update(self) -> None: ...
    def close(self) -> None: ...
    def refresh(self, nolock: bool = False) -> None: ...
    def clear(self, nolock: bool = False) -> None:
        self.said.append("clear")

    def set_postfix_str(self, text: str) -> None:
        self.said.append(re.sub(r"loss [\d.]+, [\d,]+ samples/s", "…", text))

    def set_description(self, text: str, refresh: bool) -> None:
        self.said.append(text)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect what the bars of a test have shown."""
    import tqdm.auto

    monkeypatch.setattr(Bar, "said", [], raising=False)
    monkeypatch.setattr(tqdm.auto, "tqdm", Bar)
    return Bar.said


def four_epochs(**changes: Any) -> sparkdl.Trainer:
    return sparkdl.Trainer(
        model=nn.Linear(2, 2),
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD,
        stop=sparkdl.max_epoch(4),
        **changes,
    )


def show_one(state: TrainState, one_pass: bool) -> None:
    bar = progress.progress_of("true", "", 0.0, one_pass)
    bar.on_fit_start(four_epochs(), state)
    bar.on_iteration_end(four_epochs(), after(state, IterationResult(0.1, 1)))
    bar.close()


def test_the_bar_of_a_resumed_run_goes_on(said: list[Any]) -> None:
    begun = TrainState(iterations_per_epoch=5)
    show_one(begun, False)
    show_one(replace(begun, iteration=12, epoch=2, position=2), False)
    assert said == [(0, 20, "epoch 1"), "epoch 1", "…", (12, 20, "epoch 3"), "epoch 3", "…"]


def test_the_bar_of_a_pass_over_new_data_shows_that_pass(said: list[Any]) -> None:
    """Passes may be of any length, so what was before says nothing of it."""
    show_one(TrainState(iterations_per_epoch=7, iteration=11, epoch=2), True)
    assert said == [(0, 7, "epoch 3"), "epoch 3", "…"]


def test_the_bar_says_what_training_waits_for(said: list[Any]) -> None:
    trainer = four_epochs(
        validation=sparkdl.Validation(None, metrics=["accuracy"], every=sparkdl.every(1)),
        checkpoint=sparkdl.Checkpoint("unused", every=sparkdl.every(1)),
    )
    state = TrainState(iterations_per_epoch=5)
    bar = progress.progress_of("true", "", 0.0)
    bar.on_fit_start(trainer, state)
    state = after(state, IterationResult(0.1, 1))
    bar.on_iteration_end(trainer, state)
    found = Validated(iteration=1, epoch=0, metrics={"loss": 0.2, "accuracy": 0.75})
    state = replace(state, validations=(found,))
    bar.on_validation_end(trainer, state)
    bar.on_checkpoint(trainer, state)
    bar.close()
    assert [text for text in said[1:] if text != "epoch 1"] == [
        "…, validating",
        "…, validation accuracy 0.75, writing a checkpoint",
        "…, validation accuracy 0.75",
    ]


def test_a_message_begins_on_a_line_of_its_own(said: list[Any]) -> None:
    bar = progress.progress_of("true", "", 0.0)
    bar.on_fit_start(four_epochs(), TrainState(iterations_per_epoch=5))
    logging.getLogger("sparkdl").warning("interrupted")
    bar.close()
    logging.getLogger("sparkdl").warning("another")
    assert said == [(0, 20, "epoch 1"), "clear"]


class Display:
    """A display of IPython's that keeps what it shows."""

    def __init__(self) -> None:
        self.pictures: list[str] = []
        self.handles = 0

    def display(self, picture: Any, display_id: bool) -> Display:
        self.handles += 1
        self.update(picture)
        return self

    def update(self, picture: Any) -> None:
        self.pictures.append(picture._repr_html_())


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Display:
    """Return the pictures that a cell of a notebook shows."""
    found = Display()
    display = pytest.importorskip("IPython.display")
    shell = SimpleNamespace(execution_count=3)
    monkeypatch.setattr(display, "display", found.display)
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    monkeypatch.setattr(LiveCurves, "_cell", None)
    return found


def test_the_curves_grow_in_a_notebook(
    said: list[Any], shown: Display, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A picture a second at most, and one at the end, in one place for all fits of a cell."""
    clock = [0.0]
    monkeypatch.setattr(progress, "_in_notebook", lambda: True)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    for _ in range(2):
        bar = progress.progress_of("auto", "", 0.0)
        state = TrainState(iterations_per_epoch=5)
        bar.on_fit_start(four_epochs(), state)
        for _ in range(10):
            clock[0] += 0.3
            state = after(state, IterationResult(0.1, 1))
            bar.on_iteration_end(four_epochs(), state)
        found = Validated(iteration=10, epoch=2, metrics={"loss": 0.2, "accuracy": 0.75})
        bar.on_fit_end(four_epochs(), replace(state, validations=(found,)))
        bar.close()
    assert shown.handles == 1
    assert len(shown.pictures) == 2 * (2 + 1)
    assert "accuracy" in shown.pictures[-1]
    assert "accuracy" not in shown.pictures[-2]
    assert "iteration 10<" in shown.pictures[-1]
    assert not isinstance(progress.progress_of("auto", "", 0.0, True), progress.NotebookProgress)


def test_a_skipped_iteration_is_not_part_of_the_mean_that_a_curve_shows(shown: Display) -> None:
    """The curves after the run are the same."""
    live, history, losses = LiveCurves(TrainState()), History(), [math.nan, 0.5, 0.25, 0.75]
    for iteration, loss in enumerate(losses, 1):
        epoch, position = divmod(iteration, 2)
        state = TrainState(
            iteration=iteration, epoch=epoch, position=position, samples=8 * iteration, loss=loss
        )
        live.add(state)
        history.append(state, 1 + (iteration - 1) // 2)
    live.draw(state)
    assert shown.pictures[-1] in history._repr_html_()


def run_for(seconds: int, log: progress.Progress, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit of one iteration a second."""
    began = time.monotonic()
    state = TrainState(iterations_per_epoch=25)
    log.on_fit_start(four_epochs(), state)
    for i in range(seconds):
        monkeypatch.setattr(time, "monotonic", lambda i=i: began + i + 1)
        state = replace(after(state, IterationResult(0.1, 8)), seconds=i + 1.0)
        log.on_iteration_end(four_epochs(), state)
    log.on_fit_end(four_epochs(), state)


@pytest.mark.parametrize(("mode", "seconds"), [("auto", 29), ("false", 90)])
def test_a_short_fit_logs_nothing(
    mode: str, seconds: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "sparkdl")
    run_for(seconds, progress.progress_of(mode, "Net", time.monotonic()), monkeypatch)
    assert not caplog.messages


def test_a_long_fit_logs_a_line_each_thirty_seconds(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "sparkdl")
    run_for(70, progress.progress_of("auto", "Net of 6 parameters", time.monotonic()), monkeypatch)
    assert caplog.messages == [
        "training Net of 6 parameters",
        "epoch 2, iteration 30 of 100, loss 0.1, 8 samples/s",
        "epoch 3, iteration 60 of 100, loss 0.1, 8 samples/s",
        "training has ended: epoch 3, iteration 70 of 100, loss 0.1, 8 samples/s",
    ]


def test_the_lines_are_seen_where_logging_is_not_configured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    run_for(31, progress.progress_of("auto", "Net", time.monotonic()), monkeypatch)
    first, second, _ = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d sparkdl: training Net", first)
    assert second.endswith(" sparkdl: epoch 2, iteration 30 of 100, loss 0.1, 8 samples/s")


def open_slowly(bar: progress.Progress, shown: Callable[[], list[Any]]) -> None:
    """Two steps before a first iteration, each until it is shown, in a thread of the progress's own."""

    def step(what: str, **how: Any) -> None:
        bar.doing(what, **how)
        while not any(what in str(line) for line in shown()):
            time.sleep(0.01)

    step("reading rows", detail=lambda: "1.2 of about 4.0 M")
    step("trying the model", detail=lambda: 1 // 0)  # Spark may have ended
    state = TrainState(iterations_per_epoch=25)
    bar.on_fit_start(four_epochs(), state)
    bar.on_iteration_end(four_epochs(), after(state, IterationResult(0.1, 8)))
    bar.close()


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_MOVE_SECONDS", 0.01)
    monkeypatch.setattr(progress, "OPENING_SECONDS", 0.0)


def test_a_bar_says_what_comes_before_the_first_iteration(said: list[Any], quickly: None) -> None:
    open_slowly(progress.progress_of("true", "", 0.0), lambda: said)
    lines = [re.sub(r"\d+ s$", "0 s", text) for text in said if isinstance(text, str)]
    assert list(dict.fromkeys(lines)) == [
        "reading rows 1.2 of about 4.0 M, 0 s",
        "trying the model, 0 s",
        "iteration 1",
        "epoch 1",
        "…",
    ]


def test_an_interrupt_while_a_bar_is_drawn_keeps_no_later_fit_waiting(
    quickly: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        interrupts = 1

        def write(self, text: str) -> int:
            if self.interrupts:
                self.interrupts -= 1
                raise KeyboardInterrupt
            return super().write(text)

    def another() -> None:
        open_slowly(progress.progress_of("true", "", 0.0), lambda: [terminal.getvalue()])

    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    bar = progress.progress_of("true", "", 0.0)
    with pytest.raises(KeyboardInterrupt):
        bar.on_fit_start(four_epochs(), TrainState(iterations_per_epoch=5))
    bar.close()
    fit = threading.Thread(target=another, daemon=True)
    fit.start()
    fit.join(10)
    assert not fit.is_alive()


def test_a_notebook_keeps_how_long_the_start_took(
    said: list[Any], shown: Display, quickly: None
) -> None:
    open_slowly(progress.NotebookProgress(), lambda: shown.pictures)
    assert shown.handles == 1
    times = r"<div>training after [\d.]+ s: reading rows [\d.]+ s, trying the model [\d.]+ s</div>"
    assert re.fullmatch(times, shown.pictures[-1])


def test_the_log_names_fits_that_run_side_by_side(
    caplog: pytest.LogCaptureFixture, quickly: None
) -> None:
    caplog.set_level("INFO", "sparkdl")
    one, other = (progress.progress_of("auto", "Net", time.monotonic()) for _ in range(2))
    open_slowly(one, lambda: caplog.messages)
    other.close()
    first, second, *_ = (re.sub(r"\d+", "0", line) for line in caplog.messages)
    assert (first, second) == (
        "fit 0: reading rows 0.0 of about 0.0 M, 0 s",
        "fit 0: trying the model, 0 s",
    )
    assert not progress.ProgressLog("Net", 0.0).name


def test_what_was_not_measured_is_not_better() -> None:
    best = Validated(iteration=1, epoch=1, metrics={"loss": 1.0, "accuracy": 0.5})
    nothing = Validated(iteration=2, epoch=2, metrics={"loss": 0.5})
    assert not is_better(nothing, best, "accuracy", True)
    assert not is_better(nothing, None, "accuracy", True)
    assert is_better(nothing, best, "loss", False)
