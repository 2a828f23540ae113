"""A small run, played to callbacks as the loop plays one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sparkdl
from sparkdl.loop.state import TrainState, Validated
from sparkdl.slices.update import Histogram

PER_EPOCH, BATCH = 4, 10


def a_trainer(**values: Any) -> sparkdl.Trainer:
    given = {
        "model": partial(nn.Linear, 3, 1),
        "loss": nn.MSELoss(),
        "optimizer": partial(torch.optim.SGD, lr=0.5, momentum=0.25),
    }
    return sparkdl.Trainer(**(given | values))


def states(first: int = 1, last: int = 8) -> list[TrainState]:
    """The state before iteration ``first``, then one after each; validated at the epochs' ends."""
    return [_state(i) for i in range(first - 1, last + 1)]


def _state(i: int) -> TrainState:
    if i == 0:
        return TrainState(iterations_per_epoch=PER_EPOCH)
    return TrainState(
        iteration=i,
        epoch=i // PER_EPOCH,
        position=i % PER_EPOCH,
        samples=BATCH * i,
        loss=8.0 / i,
        learning_rates=(0.5 / i,),
        seconds=0.25 * i,
        iterations_per_epoch=PER_EPOCH,
        gradient_norm=2.0 * i,
        skipped=int(i >= 3),
        loss_scale=4.0,
        timings={"forward": 0.01 * i, "iteration": 0.02 * i},
        histograms=_histograms(i) if i % 3 == 0 else None,
        validations=tuple(
            Validated(iteration=at, epoch=at // PER_EPOCH, metrics=_metrics(at))
            for at in range(PER_EPOCH, i, PER_EPOCH)
        ),
    )


def _metrics(i: int) -> dict[str, float]:
    return {"loss": 9.0 / i, "accuracy": 0.1 * i}


def _histograms(i: int) -> dict[str, Histogram]:
    return {"weights/weight": Histogram.of(torch.tensor([-1.0, 0.0, 0.5, 0.5, 2.0 * i]))}


def play(
    callbacks: Sequence[sparkdl.Callback],
    run: Sequence[TrainState],
    trainer: sparkdl.Trainer | None = None,
    finish: bool = True,
) -> None:
    """Call the hooks in the loop's order; without ``finish`` it ends as a failed fit does."""
    trainer = trainer or a_trainer()

    def tell(hook: str, state: TrainState) -> None:
        for callback in callbacks:
            getattr(callback, hook)(trainer, state)

    tell("on_fit_start", run[0])
    for before, state in itertools.pairwise(run):
        if before.iteration % PER_EPOCH == 0:
            tell("on_epoch_start", before)
        tell("on_iteration_start", before)
        tell("on_iteration_end", state)
        if state.iteration % PER_EPOCH == 0:
            tell("on_validation_end", validated(state))
            tell("on_epoch_end", validated(state))
    if finish:
        tell("on_fit_end", run[-1])


def validated(state: TrainState) -> TrainState:
    """The state once the validation of its iteration is in it."""
    i = state.iteration
    last = Validated(iteration=i, epoch=state.epoch, metrics=_metrics(i))
    return dataclasses.replace(state, validations=(*state.validations, last))


def tensorboard_events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"histograms": 0, "scalars": 0}).Reload()


def tensorboard_scalars(folder: Path) -> dict[str, dict[int, float]]:
    found = tensorboard_events(folder)
    return {
        name: {event.step: event.value for event in found.Scalars(name)}
        for name in found.Tags()["scalars"]
    }
