"""Notes of a run beside its numbers: settings, plan, cluster, faults, and rows left out."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from sparkdl.data.row_errors import FIRST
from sparkdl.parallel.plan import strategy_of


class RunNotes:
    """Notes of a run, as plain values; the base of :class:`sparkdl.History`."""

    stopped: str | None = None
    """Why the training ended before its stop trigger was true: "interrupted", or "callback" (and
    the argument of :class:`sparkdl.StopTraining`); None if it did not."""
    ended_by: str | None = None
    """The stop trigger that was true, such as "Plateau(metric='accuracy', patience=3,
    min_delta=0.0)", and of several the first; None if the training ended before."""

    def __init__(self) -> None:
        self._settings: dict[str, int] = {}
        self._plan: dict[str, Any] = {}
        self._invalid: dict[str, Any] = {}
        self._facts: dict[str, list[list[str]]] = {}
        self._events: list[dict[str, Any]] = []

    @property
    def end(self) -> dict[str, str]:
        """Return why the training ended, as ``{"ended by": trigger}`` or ``{"stopped": reason}``."""
        ends = {"stopped": self.stopped, "ended by": None if self.stopped else self.ended_by}
        return {name: reason for name, reason in ends.items() if reason}

    @property
    def facts(self) -> dict[str, list[list[str]]]:
        """Return what was trained and where, as tables of text by their titles.

        A table of two columns has names and values; the first row of any other is its head. It is
        empty if the history comes from CSV or from an older file.
        """
        return dict(self._facts)

    @property
    def events(self) -> list[dict[str, Any]]:
        """Return the recoveries and checkpoints of the run: kind ("recovery" or "checkpoint"),
        iteration after which it came, seconds that it took, and text."""
        return [dict(event) for event in self._events]

    def note_facts(self, facts: Mapping[str, Sequence[Sequence[str]]]) -> None:
        """Record the :attr:`facts` of the run that goes on with this history."""
        self._facts = {title: [list(row) for row in rows] for title, rows in facts.items()}

    def note_event(self, kind: str, iteration: int, seconds: float, text: str) -> None:
        """Add to the :attr:`events`."""
        event = {"kind": kind, "iteration": iteration, "seconds": seconds, "text": text}
        self._events.append(event)

    @property
    def plan(self) -> dict[str, Any] | None:
        """Return the plan by which the run was divided, if its trainer left that to a plan.

        ``replace(trainer, **history.plan["fields"])`` runs so without measuring again. "seconds" and
        "range" are those that were predicted for an iteration, "instead" is the best other engine.
        """
        if not self._plan:
            return None
        plan = copy.deepcopy(self._plan)
        fields = plan["fields"]
        parts = fields.pop("micro_batches", 0)
        if "strategy" in fields:
            fields["strategy"] = strategy_of(fields["strategy"], parts)
        return plan

    def note_plan(self, plan: Mapping[str, Any] | None) -> None:
        """Record the plan of the run that goes on with this history, as plain values."""
        self._plan = {} if plan is None else copy.deepcopy(dict(plan))

    @property
    def plan_record(self) -> dict[str, Any]:
        """Return :attr:`plan` as plain values; it is empty where there is none."""
        return copy.deepcopy(self._plan)

    @property
    def settings(self) -> dict[str, int]:
        """Return the settings by which the run drew numbers and divided rows: seed, replicas,
        batch_size, accumulate. It is empty if the history comes from CSV or from an older file."""
        return dict(self._settings)

    def note_settings(self, settings: Mapping[str, int]) -> None:
        """Record the :attr:`settings` of the run that goes on with this history."""
        self._settings = dict(settings)

    @property
    def invalid(self) -> dict[str, Any]:
        """Return what could not be read of the data, where ``Trainer(handle_invalid=)`` allows that.

        By "training" and "validation": the number of ``rows``, the ``count`` of those that could not be
        read, and ``first``, the key, the column and the reason of the first ten. A part that could all
        be read is not there.
        """
        return dict(self._invalid)

    def note_invalid(self, role: str, found: Mapping[str, Any], further: bool = False) -> None:
        """Record what could not be read of a part of the data; ``further``: beside what was before."""
        before = self._invalid.get(role) if further else None
        if before is not None:
            counts = {name: before[name] + found[name] for name in ("rows", "count")}
            found = {**counts, "first": [*before["first"], *found["first"]][:FIRST]}
        self._invalid = {**self._invalid, role: dict(found)}

    def _take_notes(self, other: RunNotes) -> None:
        """Begin with the notes of another history; each goes on by itself."""
        self._settings, self._plan, self._invalid = other._settings, other._plan, other._invalid
        self._facts, self._events = other._facts, list(other._events)

    def _notes(self) -> dict[str, Any]:
        """Return the notes for a file; those that are empty are left out."""
        notes = {
            "settings": dict(self._settings),
            "plan": self._plan,
            "invalid": dict(self._invalid),
            "facts": self._facts,
            "events": self._events,
        }
        ends = {"stopped": self.stopped, "ended_by": self.ended_by}
        return {name: note for name, note in notes.items() if note} | ends

    def _read_notes(self, content: Mapping[str, Any]) -> None:
        """Take what :meth:`_notes` wrote into a file."""
        self.note_settings({str(k): int(v) for k, v in content.get("settings", {}).items()})
        plan = content.get("plan")
        self.note_plan(plan if isinstance(plan, dict) and "fields" in plan else None)
        self._invalid = dict(content.get("invalid", {}))
        for title, rows in content.get("facts", {}).items():
            self._facts[str(title)] = [[str(cell) for cell in row] for row in rows]
        for event in content.get("events", []):
            when, seconds = int(event["iteration"]), float(event["seconds"])
            self.note_event(str(event["kind"]), when, seconds, str(event["text"]))
        for name in ("stopped", "ended_by"):
            reason = content.get(name)
            setattr(self, name, None if reason is None else str(reason))
