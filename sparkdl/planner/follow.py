"""A fit beside its plan: what it has chosen, what it took, and what a gang would take in its place."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import pyspark
import torch

from sparkdl.errors import UserError
from sparkdl.gang.slots import check_slots
from sparkdl.loop.callbacks import Callback
from sparkdl.loop.history import History
from sparkdl.loop.progress import log_line
from sparkdl.loop.state import TrainState
from sparkdl.model.flat import Layout
from sparkdl.planner.cache import CACHE, digest
from sparkdl.planner.choice import GANG, PLAINNESS, SHUFFLE, Choice
from sparkdl.planner.cluster import OVERHEADS
from sparkdl.session import SessionFacts

FEW = 50
"""The iterations below which nothing is measured, and after which the schedule is looked at."""
MEASURED = 20
"""The least iterations of a fit that are compared with its plan."""


def own_choice(trainer: Any, replicas: int) -> Choice:
    """Return the choice that a trainer without "auto" has made."""
    if trainer.engine != GANG:
        return Choice(SHUFFLE, replicas)
    parts = trainer.parts
    plain = trainer.strategy in PLAINNESS and trainer.mesh is None
    words = "+".join(part.word for part in parts.values())
    if words == "ddp" and any(part.shards_update for part in parts.values()):
        words = "zero1"
    mesh = tuple((name, size) for name, size in (trainer.mesh or {}).items() if size > 1)
    count = max((part.micro_batches for part in parts.values()), default=1)
    several = mesh if len(mesh) > 1 else ()
    return Choice(GANG, replicas, words, several, count if "pipe" in parts else 0, own=not plain)


def key_of(trainer: Any, layout: Layout, facts: SessionFacts) -> str:
    """Return a name for what the time of an iteration depends on beside the choice."""
    shapes = [(segment.name, segment.shape) for segment in layout.segments]
    how = (trainer.batch_size, trainer.options.local_steps, trainer.precision, trainer.accumulate)
    return digest(shapes, how, facts.context.master, pyspark.__version__, torch.__version__)


class ScheduleShare(Callback):
    """A line in the log, once, where Spark's schedule is most of an iteration and a gang could run."""

    def __init__(self, trainer: Any, facts: SessionFacts, replicas: int) -> None:
        self._trainer, self._facts, self._replicas = trainer, facts, replicas
        self._seconds: list[tuple[float, float]] = []

    def on_iteration_end(self, trainer: Any, state: TrainState) -> None:
        if len(self._seconds) >= FEW:
            return
        whole = state.timings.get("iteration", 0.0)
        self._seconds.append((state.timings.get("schedule", 0.0), whole))
        if len(self._seconds) == FEW:
            self._tell()

    def _tell(self) -> None:
        late = self._seconds[FEW // 2 :]
        schedule, whole = (statistics.median(each) for each in zip(*late, strict=True))
        if schedule <= whole / 2:
            return
        context = self._facts.context
        try:
            replace(self._trainer, engine=GANG)
            check_slots(context, self._replicas, 0.0)
        except UserError:
            return
        fixed, each = OVERHEADS[GANG]
        gang_takes = whole - schedule + fixed + each * self._replicas
        log_line(
            f"the schedule of Spark's jobs takes {1e3 * schedule:.0f} of {1e3 * whole:.0f} ms of an "
            f'iteration: engine="gang" would take about {1e3 * gang_takes:.0f} ms; '
            'sparkdl.plan(trainer, data) measures it, engine="auto" decides by that'
        )


def compare(
    trainer: Any, layout: Layout, facts: SessionFacts, replicas: int, history: History
) -> None:
    """Say what was planned and what was measured, and keep the pair for the next plan."""
    if trainer.engine not in (SHUFFLE, GANG):
        return
    key, choice = key_of(trainer, layout, facts), own_choice(trainer, replicas)
    planned = CACHE.planned(key, choice)
    if planned is None or len(history) <= MEASURED:
        return
    clock = [row["seconds"] for row in history.last(10 * MEASURED)]
    late = clock[len(clock) // 2 :]
    measured = (late[-1] - late[0]) / (len(late) - 1)
    log_line(f"planned {1e3 * planned:.1f} ms an iteration, measured {1e3 * measured:.1f}")
    CACHE.keep_measured(key, choice, measured, facts.settings.plan_cache)
