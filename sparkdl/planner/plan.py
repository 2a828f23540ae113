"""A plan: the choices ranked, with the reasons in words, as a table on a terminal and in a notebook."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sparkdl.codec.describe import table, titled
from sparkdl.errors import ParameterError, counted, shown
from sparkdl.plain import is_whole
from sparkdl.planner.choice import GANG, SHUFFLE, Choice, Facts
from sparkdl.planner.estimate import Estimate, Formulas
from sparkdl.planner.probe import Probe
from sparkdl.planner.profile import BUSY, Profile
from sparkdl.planner.timeline import draw, keys, picture, simulated

GAIN = 0.15
"""The least gain, as a share, for which a plainer way to run a fit is left."""
SHOWN = 10
"""The most rows of a table."""
_HEAD = ("", "engine", "replicas", "strategy", "ms/iteration", "range", "MB/worker", "why")
_PARTS = {
    "overhead": ("the engine's own work", "#7ba5cf"),
    "driver": ("the driver's work on tasks", "#8e5aa8"),
    "compute": ("computing", "#588157"),
    "sum": ("sums and messages", "#d99a2b"),
    "update": ("the update", "#c8553d"),
}
"""The parts of an iteration in words, and their colours."""


def ranked(estimates: Iterable[Estimate], default: Choice) -> list[Estimate]:
    """Return the estimates in order, the choice first.

    Those that take less than :data:`GAIN` longer than the fastest are level with it: among them the
    ``default`` is chosen, or else the plainest.
    """
    known = sorted((e for e in estimates if e.seconds is not None), key=lambda e: e.milliseconds)
    if not known:
        return []
    level = [e for e in known if _is_level(e, known[0])]
    first = min(level, key=lambda e: (e.choice != default, *e.choice.plainness))
    return [first, *(e for e in known if e is not first)]


def _is_level(estimate: Estimate, other: Estimate) -> bool:
    return other.milliseconds > (1 - GAIN) * estimate.milliseconds


@dataclass(frozen=True)
class Plan:
    """The ways to run a fit, the chosen one first; ``print`` shows them as a table.

    Attributes:
        rows: The choices that can run, in order, each with its ``choice``, ``seconds`` of an iteration
            (``low`` and ``high`` are their range), ``parts`` and ``memory``.
        refused: The choices that cannot run, or whose time is unknown, each with the sentence why.
        others: What would be another algorithm: it changes what is computed.
        facts: What the plan is about.
        profile: What the model costs.
        probe: What the session costs.
    """

    rows: Sequence[Estimate]
    refused: Sequence[Estimate]
    others: Sequence[Estimate]
    facts: Facts
    profile: Profile
    probe: Probe
    subject: str = ""
    measured_in: float | None = None  # seconds; None: known before
    notes: Sequence[str] = ()  # lines on other settings of the session
    _trainer: Any = field(default=None, repr=False)

    @property
    def trainer(self) -> Any:
        """The trainer with the fields of the first row."""
        return self.trainer_of(1)

    def trainer_of(self, row: int) -> Any:
        """Return the trainer with the fields of a row, counted from 1."""
        return dataclasses.replace(self._trainer, **self._row(row).choice.fields())

    def timeline(self, row: int = 1) -> str:
        """Return a picture of an iteration by a row, counted from 1: SVG, with a lane for each rank."""
        choice = self._row(row).choice
        return draw(simulated(choice, Formulas(self.facts, self.profile, self.probe)))

    def _row(self, row: int) -> Estimate:
        if not is_whole(row, 1) or row > len(self.rows):
            raise ParameterError(
                f"row={shown(row)}: give the number of a row, from 1 to {len(self.rows)}."
            )
        return self.rows[row - 1]

    def record(self) -> dict[str, Any]:
        """Return the first row as plain values, for histories and checkpoints."""
        first = self.rows[0]
        other = next((e for e in self.rows if e.choice.engine != first.choice.engine), None)
        record = {
            "fields": first.choice.to_plain(),
            "seconds": first.seconds,
            "range": [first.low, first.high],
        }
        if other is not None:
            record["instead"] = {"fields": other.choice.to_plain(), "seconds": other.seconds}
        return record

    def reason(self, estimate: Estimate) -> str:
        """Return why an estimate is where it is."""
        first = self.rows[0]
        if estimate.measured:
            return "measured in a fit, not predicted"
        if estimate is first:
            return self._reason_of_first()
        words = []
        if estimate.choice.engine == SHUFFLE != first.choice.engine:
            words.append("a lost executor costs some iterations at most")
        longer = (estimate.seconds or 0.0) / (first.seconds or 1.0)
        if longer > 2:
            words.append(f"{longer:.0f} times as long")
        elif _is_level(estimate, first):
            words.append("level with 1" + _plainer(first.choice, estimate.choice))
        words += _difference(first.parts, estimate.parts)[: 2 - min(1, len(words))]
        if estimate.memory < 0.8 * first.memory:
            words.append(f"{_mb(first.memory - estimate.memory)} MB less a rank")
        return "; ".join(words)

    def _reason_of_first(self) -> str:
        first = self.rows[0]
        parts, usual = first.parts, next((e for e in self.rows if e.choice.engine == SHUFFLE), None)
        if first.choice.engine == SHUFFLE:
            gang = any(e.choice.engine == GANG for e in self.rows)
            why = "; a gang gains too little" if gang else ""
            return f"a lost executor costs some iterations at most{why}"
        compute = f"an iteration computes for {_ms(parts.get('compute', 0.0))} ms"
        if usual is None or usual.measured:
            return compute
        schedule = usual.parts.get("overhead", 0.0) + usual.parts.get("driver", 0.0)
        return f"{compute}; as Spark jobs, starting tasks alone would take {_ms(schedule)} ms"

    def __str__(self) -> str:
        lines = [self._title()]
        cells = [_HEAD, *(self._cells(n, e) for n, e in enumerate(self.rows[:SHOWN], 1))]
        widths = [max(len(row[i]) for row in cells) for i in range(len(_HEAD) - 1)]
        for row in cells if self.rows else ():
            told = [
                text.rjust(width) if i in (2, 4, 6) else text.ljust(width)
                for i, (text, width) in enumerate(zip(row, widths, strict=False))
            ]
            lines.append("  ".join([*told, row[-1]]).rstrip())
        return "\n".join([*lines, *("   " + line for line in self._below())])

    def _repr_html_(self) -> str:
        shares = [self._cells(n, e) for n, e in enumerate(self.rows[:SHOWN], 1)]
        below = "".join(f"<div>{html.escape(line)}</div>" for line in self._below())
        return titled(self._title(), table(_HEAD, shares), self._bars(), below)

    def _bars(self) -> str:
        """Return a bar of the parts for each row, on one scale."""
        rows = [e for e in self.rows[:SHOWN] if e.parts]
        longest = max((sum(e.parts.values()) for e in rows), default=0.0)
        if not longest:
            return ""
        drawn = []
        for y, estimate in enumerate(rows):
            x = 0.0
            for name, seconds in estimate.parts.items():
                width = 480 * seconds / longest
                words, colour = _PARTS[name]
                drawn.append(
                    f"<rect x='{x:.1f}' y='{16 * y}' width='{width:.1f}' height='12' fill='{colour}'>"
                    f"<title>{html.escape(words)}: {_ms(seconds)} ms</title></rect>"
                )
                x += width
            label = html.escape(str(estimate.choice))
            drawn.append(f"<text x='{x + 4:.1f}' y='{16 * y + 10}'>{label}</text>")
        drawn += keys(dict(_PARTS.values()), 0, 150, 16 * len(rows) + 14)
        return picture(760, 16 * len(rows) + 20, drawn)

    def _title(self) -> str:
        when = (
            ""
            if self.measured_in is None
            else f"; predicted from {self.measured_in:.0f} s of measuring"
        )
        if self.probe.computed:
            when = "; computed, not run"
        busy = ""
        if max(self.profile.busy, self.probe.busy) > BUSY and not self.probe.computed:
            busy = "; the machine is busy, so ranges are wide"
        return f"{self.facts.describe()}, {self.subject}{when}{busy}"

    def _cells(self, number: int, estimate: Estimate) -> tuple[str, ...]:
        choice = estimate.choice
        return (
            str(number),
            choice.engine,
            str(choice.replicas),
            choice.name,
            _ms(estimate.seconds),
            f"{_ms(estimate.low)} to {_ms(estimate.high)}",
            _mb(estimate.memory),
            self.reason(estimate),
        )

    def _below(self) -> list[str]:
        """Return the lines below the table."""
        left = len(self.rows) - SHOWN
        lines = [f"and {left} slower"] if left > 0 else []
        if self.rows and not self.probe.computed:
            lines.append(
                "train as in row 1: plan.trainer.fit(data); as in row 2: plan.trainer_of(2).fit(data)"
            )
        lines += self.notes
        for estimate in self.others:
            lines.append(f"another algorithm: {estimate.choice}: {_of_other(estimate, self.facts)}")
        told: dict[tuple[str, str], list[Estimate]] = {}
        for estimate in self.refused:
            kind = "not possible" if estimate.refused else "not measured"
            told.setdefault((kind, estimate.refused or estimate.unknown), []).append(estimate)
        for (kind, sentence), same in told.items():
            more = f" and {len(same) - 1} more" if len(same) > 1 else ""
            lines.append(f"{kind}: {same[0].choice}{more}: {sentence}")
        return lines


def _plainer(first: Choice, choice: Choice) -> str:
    """Return why the first of two level choices is the first."""
    if first.engine == choice.engine and first.replicas < choice.replicas:
        return f", which needs {counted(first.replicas, 'task slot')}"
    return ", the plainer one" if first.plainness < choice.plainness else ""


def _difference(one: Mapping[str, float], other: Mapping[str, float]) -> list[str]:
    """Return the largest loss and the largest gain of another choice in words, the larger one first."""
    changes = {name: other.get(name, 0.0) - one.get(name, 0.0) for name in _PARTS}
    loss, gain = max(changes, key=changes.__getitem__), min(changes, key=changes.__getitem__)
    told = []
    if changes[gain] < -0.0002:
        told.append((-changes[gain], f"{_PARTS[gain][0]}: {_ms(-changes[gain])} ms less"))
    if changes[loss] > 0.0002:
        told.append((changes[loss], f"{_PARTS[loss][0]}: {_ms(changes[loss])} ms more"))
    return [words for _, words in sorted(told, reverse=True)]


def _of_other(estimate: Estimate, facts: Facts) -> str:
    more = dict(estimate.choice.more)
    if "local_steps" in more:
        each = f"replicas meet every {more['local_steps']}th batch"
    else:
        share = _ms((estimate.seconds or 0.0) * facts.batch_size / more["batch_size"])
        each = (
            f"{share} ms for {facts.batch_size:,} rows; other gradients, and fewer steps an epoch"
        )
    return f"{_ms(estimate.seconds)} ms a batch; {each}"


def _ms(seconds: float | None) -> str:
    if seconds is None or math.isinf(seconds):
        return "?"
    value = 1e3 * seconds
    return f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.0f}"


def with_measured(estimate: Estimate, seconds: float | None) -> Estimate:
    """Return the estimate with what an earlier fit has measured in place of the prediction."""
    if seconds is None or estimate.refused:
        return estimate
    low, high = 0.9 * seconds, 1.1 * seconds
    return replace(estimate, seconds=seconds, low=low, high=high, measured=True, unknown="")
