"""Fits of a tiny model that find out what an engine itself costs, and short fits of the user's."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from sparkdl.loop.callbacks import Callback, none_added
from sparkdl.loop.state import TrainState
from sparkdl.loop.triggers import max_iteration
from sparkdl.planner.choice import Choice
from sparkdl.planner.probe import Trial, processor_seconds
from sparkdl.planner.profile import Timed
from sparkdl.session import SessionFacts
from sparkdl.spark.frames import is_local
from sparkdl.train.request import FitRequest
from sparkdl.train.spec import TrainerSpec

ROWS = 4
"""The rows of a tiny fit's batch, for each replica."""
Run = Callable[[Any, FitRequest, SessionFacts], Any]
"""The type of :func:`sparkdl.train.fit.run`."""


def tiny_model() -> nn.Module:
    """Return four linear layers, 1,152 bytes of parameters in eight tensors."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())]
    return nn.Sequential(*layers)


@dataclass
class LastThird(Callback):
    """Times of the last third of some iterations, all processes of this machine together."""

    iterations: int
    everything: bool  # this machine runs the executors too
    times: list[Timed] = field(default_factory=list)

    def on_iteration_end(self, trainer: Any, state: TrainState) -> None:
        if state.iteration in (self.iterations - self.iterations // 3, self.iterations):
            spent = processor_seconds() if self.everything else 0.0
            self.times.append(Timed(time.perf_counter(), spent))

    @property
    def each(self) -> Timed:
        """The times of an iteration."""
        (clock, spent), (end, total) = self.times
        count = self.iterations // 3
        return Timed((end - clock) / count, (total - spent) / count)


def timed_fit(
    trainer: TrainerSpec, data: Any, facts: SessionFacts, iterations: int, run: Run
) -> Timed:
    """Return the times of an iteration of a fit, which shows and keeps nothing."""
    watch = LastThird(iterations, is_local(facts.context))
    short = replace(
        trainer,
        stop=max_iteration(iterations),
        callbacks=[watch],
        validation=None,
        checkpoint=None,
        keep_optimizer_state=False,
        on_nan="skip",
    )
    with none_added():
        run(data, FitRequest(trainer=short, quiet=True), facts)
    return watch.each


def tiny_trial(facts: SessionFacts, run: Run) -> Trial:
    """Return a function that times fits of the tiny model in a session."""

    def trial(choice: Choice, iterations: int) -> Timed:
        count = choice.replicas
        row = np.linspace(-1, 1, 8, dtype=np.float32)
        rows = [(row * n, row) for n in range(2 * ROWS * count)]
        trainer = TrainerSpec(
            model=tiny_model,
            loss=nn.MSELoss(),
            optimizer=functools.partial(torch.optim.SGD, lr=0.01),
            batch_size=ROWS * count,
            **choice.fields(),
        )
        return timed_fit(trainer, facts.context.parallelize(rows, count), facts, iterations, run)

    return trial
