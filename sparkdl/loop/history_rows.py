"""The rows of a history: one for each iteration, in columns, and the validations."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Any, Self

from sparkdl.loop.history_files import KINDS, from_safetensors
from sparkdl.loop.state import TrainState, Validated

_CODES: dict[type, Any] = {int: "q", float: "d", bool: "q"}  # "skipped" is kept as a count
TIMINGS, LOSSES, DECISIONS = "timings/", "losses/", "decisions"
_NO_NORM = -1.0  # a norm is never negative; NaN is a measured value


class Rows:
    """Numbers of every iteration, about 150 bytes each, and every validation.

    [Note: histories with a common beginning] The history of a run that continues another one begins
    with the other's history. Both refer to the same columns, each to their first ``_length`` rows.
    A history that uses all rows appends to them in place; any other copies its own rows first. Rows
    are never changed or removed.
    """

    stopped: str | None = None
    """Why the training ended before its stop trigger was true: "interrupted", or "callback" (and
    the argument of :class:`sparkdl.StopTraining`); None if it did not."""

    def __init__(self) -> None:
        self._columns = {name: array(_CODES[kind]) for name, kind in KINDS.items()}
        self._timings: dict[str, array[float]] = {}
        self._losses: dict[str, array[float]] = {}
        self._decided: dict[str, array[int]] = {}  # no column as long as all are 0
        self._length = 0
        self._validations: list[Validated] = []
        self._validated = 0
        self._start: dict[str, Any] = {"samples": 0, "seconds": 0.0, "skipped": 0}
        self._settings: dict[str, int] = {}

    @property
    def settings(self) -> dict[str, int]:
        """Return the settings by which the run drew numbers and divided rows: seed, replicas,
        batch_size, accumulate. It is empty if the history comes from CSV or from an older file."""
        return dict(self._settings)

    def note_settings(self, settings: Mapping[str, int]) -> None:
        """Record the :attr:`settings` of the run that goes on with this history."""
        self._settings = dict(settings)

    @classmethod
    def after(cls, state: TrainState) -> Self:
        """Return an empty history of a run that continues from ``state``, with the validations so
        far."""
        history = cls()
        history._start = {
            "samples": state.samples,
            "seconds": state.seconds,
            "skipped": state.skipped,
        }
        history._validations = list(state.validations)
        history._validated = len(state.validations)
        return history

    def branch(self) -> Self:
        """Return a history that continues from here, while this one stays as it is.

        The cost does not depend on the length.
        """
        history = type(self)()
        history._columns, history._timings = dict(self._columns), dict(self._timings)
        history._losses, history._decided = dict(self._losses), dict(self._decided)
        history._length = self._length
        history._validations, history._validated = self._validations, self._validated
        history._start, history._settings = dict(self._start), self._settings
        return history

    def tail(self, count: int) -> Self:
        """Return the last ``count`` iterations and the validations after them, as a history that
        begins there.

        If there are not more than ``count`` iterations, return this history itself.
        """
        first = self._length - count
        if first <= 0:
            return self
        history = self.branch()
        for name in self._start:
            history._start[name] = self._columns[name][first - 1]
        for columns in history._tables:
            for name, column in columns.items():
                columns[name] = column[first : self._length]
        history._length = count
        begin = self._columns["iteration"][first]
        history._validations = [v for v in self._known if v.iteration >= begin]
        history._validated = len(history._validations)
        history.stopped = self.stopped
        return history

    def append(self, state: TrainState, epoch: int) -> None:
        """Record an iteration. ``epoch`` is the epoch that it belongs to, from 1."""
        rates, norm = state.learning_rates, state.gradient_norm
        row = (
            state.iteration,
            epoch,
            state.loss,
            rates[0] if rates else math.nan,
            state.samples,
            state.seconds,
            _NO_NORM if norm is None else norm,
            state.loss_scale,
            state.skipped,
            state.bytes_sent,
        )
        if len(self._columns["loss"]) > self._length:  # another history has appended rows
            for columns in self._tables:
                for name, column in columns.items():
                    columns[name] = column[: self._length]
        for columns, values in ((self._timings, state.timings), (self._losses, state.losses)):
            for name in values:
                if name not in columns:
                    columns[name] = array("d", [math.nan]) * self._length
            for name, column in columns.items():
                column.append(values.get(name, math.nan))
        for name in state.decisions:
            if name not in self._decided:
                self._decided[name] = array("q", [0]) * self._length
        for name, decided in self._decided.items():
            decided.append(state.decisions.get(name, 0))
        for column, value in zip(self._columns.values(), row, strict=True):
            column.append(value)
        self._length += 1

    def append_validation(self, validated: Validated) -> None:
        """Record a validation."""
        if len(self._validations) > self._validated:
            self._validations = self._known
        self._validations.append(validated)
        self._validated += 1

    @property
    def _tables(self) -> tuple[dict[str, array[Any]], ...]:
        return self._columns, self._timings, self._losses, self._decided

    @property
    def _known(self) -> list[Validated]:
        return self._validations[: self._validated]

    def truncate(self, iteration: int) -> None:
        """Remove all records after ``iteration``, because the run goes back to it."""
        self._length = bisect_right(self._columns["iteration"], iteration, hi=self._length)
        self._validations = [v for v in self._known if v.iteration <= iteration]
        self._validated = len(self._validations)

    def follow(self, state: TrainState) -> None:
        """Correct the counts of skipped iterations to those of ``state``, from which the run
        continues.

        A history that was read from CSV does not contain the count at its start.
        """
        counts = self._columns["skipped"] = self._columns["skipped"][: self._length]
        offset = state.skipped - (counts[-1] if counts else self._start["skipped"])
        self._start["skipped"] += offset
        for i in range(len(counts)):
            counts[i] += offset

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield one record for each iteration.

        Its keys are iteration (from 1), epoch, loss, learning_rate (of the first parameter group),
        samples (seen so far), seconds (since the start), gradient_norm (before clipping; None if it
        was not measured), loss_scale, skipped (whether the update of this iteration was skipped),
        bytes_sent (between nodes), timings (seconds by activity); if a step returns named losses,
        losses (by name); and what a consistency model decided, such as staleness. See
        :class:`sparkdl.TrainState`.
        """
        return self._records(0)

    def last(self, count: int) -> list[dict[str, Any]]:
        """Return the last ``count`` records, or all if there are fewer."""
        return list(self._records(max(0, len(self) - count)))

    def _records(self, first: int) -> Iterator[dict[str, Any]]:
        skips = self._columns["skipped"][first - 1] if first else self._start["skipped"]
        for i in range(first, len(self)):
            record = {name: column[i] for name, column in self._columns.items()}
            if record["gradient_norm"] == _NO_NORM:
                record["gradient_norm"] = None
            skips, record["skipped"] = record["skipped"], record["skipped"] > skips
            timings = {name: column[i] for name, column in self._timings.items()}
            record["timings"] = {k: v for k, v in timings.items() if not math.isnan(v)}
            if self._losses:
                record["losses"] = {name: column[i] for name, column in self._losses.items()}
            for name, decided in self._decided.items():
                record[name] = decided[i]
            yield record

    @classmethod
    def _unpacked(cls, content: bytes) -> Self:
        """Read a safetensors file of :func:`sparkdl.loop.history_files.to_safetensors`.

        Any of several built-in exceptions says that it contains no history.
        """
        codes = {name: _CODES[kind] for name, kind in KINDS.items()}
        columns, rest = from_safetensors(content, codes)
        history = cls()
        history._columns = {name: columns.pop(name) for name in codes}
        history._timings = {name: columns.pop(TIMINGS + name) for name in rest["timings"]}
        losses = rest.get("losses", [])
        history._losses = {name: columns.pop(LOSSES + name) for name in losses}
        decided = {name: map(int, columns.pop(name)) for name in rest.get(DECISIONS, [])}
        history._decided = {name: array("q", column) for name, column in decided.items()}
        if columns:
            raise ValueError(f"it has no {', '.join(columns)}")
        history._length = len(history._columns["loss"])
        history._read_rest(rest)
        return history

    @classmethod
    def _read(cls, content: dict[str, Any]) -> Self:
        """Read the plain values of a JSON or CSV file. Keys that older files lack have their defaults.

        Any of several built-in exceptions says that they are no history.
        """
        history = cls()
        history._read_rest(content)
        timings, losses = content.get("timings", {}), content.get("losses", {})
        skipped, decided = history._start["skipped"], content.get(DECISIONS, {})
        for i, row in enumerate(content["iterations"]):
            skipped += row.get("skipped", False)
            state = TrainState(
                iteration=row["iteration"],
                loss=row["loss"],
                samples=row["samples"],
                seconds=row["seconds"],
                learning_rates=(row["learning_rate"],),
                gradient_norm=row.get("gradient_norm"),
                loss_scale=row.get("loss_scale", 1.0),
                skipped=skipped,
                bytes_sent=row.get("bytes_sent") or 0,
                decisions={name: int(made[i]) for name, made in decided.items() if made[i]},
                timings={k: v[i] for k, v in timings.items() if v[i] is not None},
                losses={k: v[i] for k, v in losses.items() if v[i] is not None},
            )
            history.append(state, row["epoch"])
        return history

    def _read_rest(self, content: dict[str, Any]) -> None:
        """Read everything but the iterations."""
        for name, before in self._start.items():
            self._start[name] = type(before)(content.get("start", {}).get(name, before))
        self.note_settings({str(k): int(v) for k, v in content.get("settings", {}).items()})
        stopped = content.get("stopped")
        self.stopped = None if stopped is None else str(stopped)
        for record in content.get("validations", []):
            metrics = {str(name): float(value) for name, value in record["metrics"].items()}
            iteration, epoch = int(record["iteration"]), int(record["epoch"])
            self.append_validation(Validated(iteration=iteration, epoch=epoch, metrics=metrics))
