"""A fit beside its plan: what it has chosen, what it took, and what a gang would take in its place.

Predictions, what fits then took, and probes of sessions are kept for the next plan: in ``plans.json``
in the user's cache directory, :data:`MOST` rows at most.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
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
from sparkdl.planner.choice import GANG, PLAINNESS, SHUFFLE, Choice
from sparkdl.planner.probe import OVERHEADS, Probe
from sparkdl.session import SessionFacts
from sparkdl.settings import __version__

MOST = 200
"""The most rows that are kept."""
SECONDS = 30 * 86400
"""How long the probe of a session counts."""


def place() -> Path:
    """Return the file of the user's plans."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sparkdl" / "plans.json"


def digest(*parts: object) -> str:
    """Return a short name for what a row depends on."""
    return hashlib.sha256(repr((__version__, *parts)).encode()).hexdigest()[:20]


class PlanCache:
    """Rows of this process, and those of the file where they are ``shared`` with other processes."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, Any]] = {}

    def note_plan(self, key: str, choice: Choice, seconds: float) -> None:
        """Note a prediction of this process, with which a fit is compared."""
        self._rows[f"planned {key} {choice}"] = {"seconds": seconds}

    def planned(self, key: str, choice: Choice) -> float | None:
        """Return the prediction for a fit, if this process has made one."""
        row = self._rows.get(f"planned {key} {choice}")
        return None if row is None else float(row["seconds"])

    def measured(self, key: str, choice: Choice, shared: bool) -> float | None:
        """Return the seconds of an iteration that an earlier fit took."""
        seconds = self._find(f"{key} {choice}", shared).get("measured")
        return float(seconds) if isinstance(seconds, (int, float)) and seconds > 0 else None

    def keep_measured(self, key: str, choice: Choice, seconds: float, shared: bool) -> None:
        """Keep what a fit took beside its prediction."""
        row = {"planned": self.planned(key, choice), "measured": seconds}
        self._keep(f"{key} {choice}", row, shared)

    def probe(self, key: str, shared: bool) -> Probe | None:
        """Return the probe of such a session, if it is known and not old."""
        row = self._find(f"probe {key}", shared)
        with contextlib.suppress(KeyError, TypeError, ValueError):
            if time.time() - row["at"] < SECONDS:
                fields = dict(row["probe"])
                overheads = {(str(n), int(m)): float(s) for n, m, s in fields.pop("overheads")}
                sums = {int(r): [(int(n), float(s)) for n, s in p] for r, p in fields.pop("sums")}
                return Probe(**fields, overheads=overheads, sums=sums)
        return None

    def keep_probe(self, key: str, probe: Probe, shared: bool) -> None:
        """Keep the probe of a session for its like."""
        plain = {f.name: getattr(probe, f.name) for f in dataclasses.fields(probe)}
        plain["overheads"] = [[name, n, seconds] for (name, n), seconds in probe.overheads.items()]
        plain["sums"] = [[ranks, [*points]] for ranks, points in probe.sums.items()]
        self._keep(f"probe {key}", {"probe": plain}, shared)

    def _find(self, name: str, shared: bool) -> dict[str, Any]:
        return self._rows.get(name) or (_read().get(name, {}) if shared else {})

    def _keep(self, name: str, row: dict[str, Any], shared: bool) -> None:
        self._rows[name] = row = {**row, "at": time.time()}
        if shared:
            rows = {**_read(), name: row}
            newest = sorted(rows.items(), key=lambda item: item[1].get("at", 0.0))[-MOST:]
            with contextlib.suppress(OSError):  # a home that cannot be written harms no fit
                place().parent.mkdir(parents=True, exist_ok=True)
                beside = place().with_suffix(f".{os.getpid()}")
                beside.write_text(json.dumps(dict(newest), indent=1), encoding="utf-8")
                beside.replace(place())


def _read() -> dict[str, dict[str, Any]]:
    """Return the rows of the file; none where it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        content = json.loads(place().read_text(encoding="utf-8"))
        return {name: row for name, row in content.items() if isinstance(row, dict)}
    return {}


CACHE = PlanCache()
"""The plans that this process knows."""


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
