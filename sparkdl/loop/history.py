"""What happened, iteration by iteration."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sparkdl.errors import ParameterError
from sparkdl.loop import history_columns, history_tables
from sparkdl.loop import history_formats as history_files
from sparkdl.loop.history_formats import KINDS
from sparkdl.loop.state import TrainState, Validated

_TIMINGS = "timings/"
_NO_NORM = -1.0  # a norm is never negative; NaN is one that was measured
_CODES: dict[type, Any] = {int: "q", float: "d", bool: "q"}  # "skipped" is kept as a count


class History:
    """Figures of every iteration, about 150 bytes each, and every validation.

    [Note: histories with a common beginning] That of a run which goes on is that of the run before it
    and more. Both refer to the same columns, each to the first ``_length`` rows of them. Who has all
    rows adds to them in place; who has not copies its own first. Rows are never changed, nor taken
    away.
    """

    stopped: str | None = None
    """Why the training ended before its stop trigger said so: "interrupted", or "callback" (and what
    :class:`sparkdl.StopTraining` was given); None where it did not."""

    def __init__(self) -> None:
        self._columns = {name: array(_CODES[kind]) for name, kind in KINDS.items()}
        self._timings: dict[str, array[float]] = {}
        self._length = 0
        self._validations: list[Validated] = []
        self._validated = 0
        self._start: dict[str, Any] = {"samples": 0, "seconds": 0.0, "skipped": 0}

    @staticmethod
    def after(state: TrainState) -> History:
        """An empty history of a run that goes on from ``state``, with the validations so far."""
        history = History()
        history._start = {
            "samples": state.samples,
            "seconds": state.seconds,
            "skipped": state.skipped,
        }
        history._validations = list(state.validations)
        history._validated = len(state.validations)
        return history

    def branch(self) -> History:
        """A history that goes on from here while this one stays as it is; it costs the same however
        long they are."""
        history = History()
        history._columns, history._timings = dict(self._columns), dict(self._timings)
        history._length = self._length
        history._validations, history._validated = self._validations, self._validated
        history._start = dict(self._start)
        return history

    def tail(self, count: int) -> History:
        """The last ``count`` iterations and the validations after them, as a history that begins
        there; one that is not longer as it is."""
        first = self._length - count
        if first <= 0:
            return self
        history = self.branch()
        for name in self._start:
            history._start[name] = self._columns[name][first - 1]
        for columns in (history._columns, history._timings):
            for name, column in columns.items():
                columns[name] = column[first : self._length]
        history._length = count
        begin = self._columns["iteration"][first]
        history._validations = [v for v in self._known if v.iteration >= begin]
        history._validated = len(history._validations)
        history.stopped = self.stopped
        return history

    def append(self, state: TrainState, epoch: int) -> None:
        """Record an iteration; ``epoch`` is the one it belongs to, from 1."""
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
        if len(self._columns["loss"]) > self._length:  # another history has gone on
            for columns in (self._columns, self._timings):
                for name, column in columns.items():
                    columns[name] = column[: self._length]
        for activity in state.timings:
            if activity not in self._timings:
                self._timings[activity] = array("d", [math.nan]) * self._length
        for activity, column in self._timings.items():
            column.append(state.timings.get(activity, math.nan))
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
    def _known(self) -> list[Validated]:
        return self._validations[: self._validated]

    def truncate(self, iteration: int) -> None:
        """Forget what came after ``iteration``: a run goes back to it."""
        self._length = bisect_right(self._columns["iteration"], iteration, hi=self._length)
        self._validations = [v for v in self._known if v.iteration <= iteration]
        self._validated = len(self._validations)

    def follow(self, state: TrainState) -> None:
        """The run goes on from ``state``: what a CSV does not tell of the time before it is counted."""
        counts = self._columns["skipped"] = self._columns["skipped"][: self._length]
        offset = state.skipped - (counts[-1] if counts else self._start["skipped"])
        self._start["skipped"] += offset
        for i in range(len(counts)):
            counts[i] += offset

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """One record an iteration: iteration (from 1), epoch, loss, learning_rate (of the first
        parameter group), samples (seen so far), seconds (since the start), gradient_norm (before
        clipping; None where it was not measured), loss_scale, skipped (whether this iteration's
        update was left out), bytes_sent (between nodes) and timings (seconds by activity), see
        :class:`sparkdl.TrainState`."""
        return self._records(0)

    def last(self, count: int) -> list[dict[str, Any]]:
        """So many of these records, from the end; fewer where there are no more."""
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
            yield record

    @property
    def losses(self) -> list[float]:
        """The loss of each iteration."""
        return list(self._columns["loss"][: self._length])

    @property
    def validations(self) -> list[dict[str, Any]]:
        """One record a validation: iteration and epoch (how many were complete), and metrics."""
        return [
            {
                "iteration": v.iteration,
                "epoch": v.epoch,
                "metrics": {name: float(value) for name, value in v.metrics.items()},
            }
            for v in self._known
        ]

    def epochs(self) -> list[dict[str, Any]]:
        """One record an epoch: epoch, mean loss over its samples, iterations, seconds it took.

        Iterations whose loss is not finite, left out by ``on_nan="skip"`` or without a sample of any
        weight, do not count in the mean; NaN where none is left.
        """
        records: list[dict[str, Any]] = []
        counted: list[int] = []
        seen, clock = self._start["samples"], self._start["seconds"]
        names = ("epoch", "loss", "samples", "seconds")
        rows = zip(*(self._columns[name][: self._length] for name in names), strict=True)
        for epoch, loss, samples, seconds in rows:
            if not records or records[-1]["epoch"] != epoch:
                empty = {"loss": 0.0, "iterations": 0, "samples": 0, "seconds": 0.0}
                records.append({"epoch": epoch, **empty})
                counted.append(0)
            record, count = records[-1], samples - seen
            if math.isfinite(loss):
                record["loss"] += loss * count
                counted[-1] += count
            record["samples"] += count
            record["iterations"] += 1
            record["seconds"] += seconds - clock
            seen, clock = samples, seconds
        for record, count in zip(records, counted, strict=True):
            record["loss"] = record["loss"] / count if count else math.nan
        return records

    def timings(self) -> dict[str, dict[str, float]]:
        """For each activity ``mean`` and ``median`` seconds, and its ``share`` of the iterations.

        Over the iterations that had it. The tasks of an activity run side by side and the slowest
        one counts, so the shares need not add up to 1. ``share`` is NaN where the whole of the
        iterations was not recorded.
        """
        return history_tables.timings(
            {name: column[: self._length] for name, column in self._timings.items()}
        )

    def timing_table(self) -> str:
        """:meth:`timings` as lines of text: where the time of an iteration went."""
        return history_tables.timing_table(self.timings())

    def __repr__(self) -> str:
        return f"<sparkdl.History: {self.summary()}>"

    def summary(self) -> str:
        """Return in one line how far the run went, its last loss, and why it ended before its time."""
        last = self.last(1)[-1] if len(self) else {"epoch": 0, "loss": math.nan}
        return history_tables.as_line(len(self), int(last["epoch"]), last["loss"], self.stopped)

    def _repr_html_(self) -> str:
        """What a notebook shows: how far it went, the loss, the last metrics."""
        return history_tables.as_html(
            len(self), self.losses[-1] if len(self) else math.nan, self.epochs(), self.validations
        )

    def save(self, path: str | Path) -> None:
        """Write a file: all of it as ``.json``, or one row an iteration as ``.csv``.

        JSON: ``{"iterations": [...], "epochs": [...], "validations": [...], "timings": {...},
        "start": {...}, "stopped": ...}``. CSV: columns as in a record, ``timings/NAME``, and
        ``validation/NAME``, filled at the iterations that were validated. Raises
        :class:`sparkdl.ParameterError` for another suffix.
        """
        history_files.write(Path(path), self._content())

    @staticmethod
    def load(path: str | Path) -> History:
        """Read what :meth:`save` wrote.

        From JSON it is the same to the last bit. A CSV tells a validation's iteration only: its
        epoch is taken for that of the row. Raises :class:`sparkdl.ParameterError` for another suffix,
        and where the file holds no history.
        """
        return History._of(history_files.read(Path(path)), str(path))

    def to_bytes(self) -> bytes:
        """All of it as a safetensors file, for a checkpoint."""
        timings = {_TIMINGS + name: column for name, column in self._timings.items()}
        rest = {
            "validations": self.validations,
            "timings": list(self._timings),
            "start": self._start,
            "stopped": self.stopped,
        }
        return history_columns.pack({**self._columns, **timings}, self._length, rest)

    @staticmethod
    def from_bytes(content: bytes) -> History:
        """Read what :meth:`to_bytes` gave. Raises :class:`sparkdl.ParameterError` for other bytes."""
        return _explained(History._unpacked, content, "it")

    @staticmethod
    def _unpacked(content: bytes) -> History:
        codes = {name: _CODES[kind] for name, kind in KINDS.items()}
        columns, rest = history_columns.unpack(content, codes)
        history = History()
        history._columns = {name: columns.pop(name) for name in codes}
        history._timings = {name: columns.pop(_TIMINGS + name) for name in rest["timings"]}
        if columns:
            raise ValueError(f"nothing is known of its {', '.join(columns)}")
        history._length = len(history._columns["loss"])
        history._read_rest(rest)
        return history

    def to_json_bytes(self) -> bytes:
        """The JSON of :meth:`save` without spaces, as UTF-8."""
        return history_files.to_json(self._content()).encode()

    @staticmethod
    def from_json_bytes(content: bytes) -> History:
        """Read what :meth:`to_json_bytes` gave. Raises :class:`sparkdl.ParameterError` for other
        bytes."""
        return History._of(history_files.from_json(content))

    def _content(self) -> dict[str, Any]:
        """All of it, of plain values."""
        rows = list(self)
        for row in rows:
            del row["timings"]
        return {
            "iterations": rows,
            "epochs": self.epochs(),
            "validations": self.validations,
            "timings": {
                name: [None if math.isnan(value) else value for value in column[: self._length]]
                for name, column in self._timings.items()
            },
            "start": dict(self._start),
            "stopped": self.stopped,
        }

    @staticmethod
    def _of(content: dict[str, Any], where: str = "it") -> History:
        """The history of :meth:`_content`; keys that older files lack have their defaults.

        Raises :class:`sparkdl.ParameterError` where it is none, and calls it ``where``.
        """
        return _explained(History._read, content, where)

    @staticmethod
    def _read(content: dict[str, Any]) -> History:
        history = History()
        history._read_rest(content)
        timings = content.get("timings", {})
        skipped = history._start["skipped"]
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
                timings={k: v[i] for k, v in timings.items() if v[i] is not None},
            )
            history.append(state, row["epoch"])
        return history

    def _read_rest(self, content: dict[str, Any]) -> None:
        """All but the iterations."""
        for name, before in self._start.items():
            self._start[name] = type(before)(content.get("start", {}).get(name, before))
        stopped = content.get("stopped")
        self.stopped = None if stopped is None else str(stopped)
        for record in content.get("validations", []):
            metrics = {str(name): float(value) for name, value in record["metrics"].items()}
            iteration, epoch = int(record["iteration"]), int(record["epoch"])
            self.append_validation(Validated(iteration=iteration, epoch=epoch, metrics=metrics))


def _explained(read: Callable[[Any], History], content: Any, where: str) -> History:
    """``read(content)``. Raises :class:`ParameterError` where that is no history, and calls it
    ``where``."""
    try:
        return read(content)
    except (
        ArithmeticError,
        AttributeError,
        IndexError,
        KeyError,
        TypeError,
        ValueError,
    ) as error:
        raise ParameterError(
            f"{where} holds no history ({type(error).__name__}: {error})."
        ) from error
