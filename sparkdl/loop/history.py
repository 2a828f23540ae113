"""The history of a run: numbers of every iteration, and validations."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.consistency.turns import commits_of
from sparkdl.errors import ParameterError
from sparkdl.loop import history_files, history_tables
from sparkdl.loop.history_files import KINDS
from sparkdl.loop.state import TrainState, Validated
from sparkdl.replica.iteration import MICRO_BATCHES, STALENESS, Decisions

if TYPE_CHECKING:
    import pandas

_TIMINGS, _LOSSES = "timings/", "losses/"
_DECISIONS = "decisions"
_NO_NORM = -1.0  # a norm is never negative; NaN is a measured value
_CODES: dict[type, Any] = {int: "q", float: "d", bool: "q"}  # "skipped" is kept as a count


class History:
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

    @staticmethod
    def after(state: TrainState) -> History:
        """Return an empty history of a run that continues from ``state``, with the validations so
        far."""
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
        """Return a history that continues from here, while this one stays as it is.

        The cost does not depend on the length.
        """
        history = History()
        history._columns, history._timings = dict(self._columns), dict(self._timings)
        history._losses, history._decided = dict(self._losses), dict(self._decided)
        history._length = self._length
        history._validations, history._validated = self._validations, self._validated
        history._start = dict(self._start)
        return history

    def tail(self, count: int) -> History:
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

    @property
    def staleness(self) -> dict[int, int]:
        """Return for each iteration, by its number from 1, by how many versions its gradients were
        behind the weights that they were applied to, see :class:`sparkdl.StaleSynchronous`."""
        return {number: made.get(STALENESS, 0) for number, made in self.decisions.items()}

    @property
    def micro_batches(self) -> dict[int, tuple[int, ...]]:
        """Return how many micro-batches each replica did, by the number of the iteration from 1.

        It has only the iterations in which a replica left some out, see :class:`sparkdl.Synchronous`.
        """
        names = [name for name in self._decided if name.startswith(MICRO_BATCHES)]
        names.sort(key=lambda name: int(name.removeprefix(MICRO_BATCHES)))
        rows = {n: tuple(made.get(k, 0) for k in names) for n, made in self.decisions.items()}
        return {number: row for number, row in rows.items() if any(row)}

    @property
    def commits(self) -> dict[int, tuple[tuple[int, int, int], ...]]:
        """Return the gradients that were applied in each iteration of :class:`sparkdl.Asynchronous`,
        in order, by its number from 1.

        A gradient is its group, the number of steps that were made between its weights and its
        application, and its mini-batch: how many iterations the group is ahead of this one.
        """
        rows = {number: tuple(commits_of(made)) for number, made in self.decisions.items()}
        return {number: row for number, row in rows.items() if row}

    @property
    def decisions(self) -> dict[int, Decisions]:
        """Return what the consistency model decided on each iteration, by its number from 1."""
        numbers = self._columns["iteration"][: self._length]
        return {
            number: {name: column[i] for name, column in self._decided.items() if column[i]}
            for i, number in enumerate(numbers)
        }

    @property
    def losses(self) -> list[float]:
        """Return the loss of each iteration."""
        return list(self._columns["loss"][: self._length])

    @property
    def named_losses(self) -> dict[str, list[float]]:
        """Return the named losses of each iteration, by name, if ``Trainer(step=)`` returned such.

        A loss that an iteration did not have is NaN.
        """
        return {name: list(column[: self._length]) for name, column in self._losses.items()}

    @property
    def validations(self) -> list[dict[str, Any]]:
        """Return one record for each validation: iteration and epoch (how many were complete), and
        metrics."""
        return [
            {
                "iteration": v.iteration,
                "epoch": v.epoch,
                "metrics": {name: float(value) for name, value in v.metrics.items()},
            }
            for v in self._known
        ]

    def epochs(self) -> list[dict[str, Any]]:
        """Return one record for each epoch: epoch, mean loss over its samples, iterations, samples,
        seconds.

        Iterations whose loss is not finite, because ``on_nan="skip"`` skipped them or no sample had
        any weight, are not part of the mean. It is NaN if no iteration is left.
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
        """Return for each activity ``mean`` and ``median`` seconds, and its ``share`` of the
        iterations.

        Only iterations that had the activity are counted. The tasks of an activity run in parallel
        and the slowest one counts, so the shares need not add up to 1. ``share`` is NaN if the
        total time of the iterations was not recorded.
        """
        return history_tables.timings(
            {name: column[: self._length] for name, column in self._timings.items()}
        )

    def timing_table(self) -> str:
        """Return :meth:`timings` as lines of text."""
        return history_tables.timing_table(self.timings())

    def __repr__(self) -> str:
        return f"<sparkdl.History: {self.summary()}>"

    def summary(self) -> str:
        """Return in one line how far the run went, its last loss, and why it ended early."""
        last = self.last(1)[-1] if len(self) else {"epoch": 0, "loss": math.nan}
        return history_tables.as_line(len(self), int(last["epoch"]), last["loss"], self.stopped)

    def _repr_html_(self) -> str:
        """Return the view in a notebook: progress, loss, last metrics, and the curves."""
        iterations = self._columns["iteration"][: self._length]
        return history_tables.as_html(iterations, self.losses, self.epochs(), self.validations)

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row for each iteration, with the columns of a CSV of :meth:`save`."""
        return history_tables.to_pandas(self._content())

    def save(self, path: str | Path) -> None:
        """Write the history to a file: everything as ``.json``, or one row for each iteration as
        ``.csv``.

        JSON is an object with the keys "iterations", "epochs", "validations", "timings", "start",
        "stopped" and, if there are any, "losses". The columns of CSV are the keys of a record,
        ``timings/NAME``, ``losses/NAME``, and ``validation/NAME``, which is filled at the iterations
        that were validated.

        Raises:
            ParameterError: The file has another suffix.
        """
        history_files.write(Path(path), self._content())

    @staticmethod
    def load(path: str | Path) -> History:
        """Read a file that :meth:`save` wrote.

        A history from JSON is identical to the last bit. A CSV contains only the iteration of a
        validation; its epoch is taken from the row.

        Raises:
            ParameterError: The file has another suffix or contains no history.
        """
        return History._of(history_files.read(Path(path)), str(path))

    def to_bytes(self) -> bytes:
        """Return the whole history as a safetensors file, for a checkpoint."""
        named = {_TIMINGS + name: column for name, column in self._timings.items()}
        named |= {_LOSSES + name: column for name, column in self._losses.items()}
        named |= {name: array("d", column) for name, column in self._decided.items()}
        rest = {
            "validations": self.validations,
            "timings": list(self._timings),
            "losses": list(self._losses),
            _DECISIONS: list(self._decided),
            "start": self._start,
            "stopped": self.stopped,
        }
        return history_files.to_safetensors({**self._columns, **named}, self._length, rest)

    @staticmethod
    def from_bytes(content: bytes) -> History:
        """Read the bytes of :meth:`to_bytes`.

        Raises:
            ParameterError: They contain no history.
        """
        return _explained(History._unpacked, content, "it")

    @staticmethod
    def _unpacked(content: bytes) -> History:
        codes = {name: _CODES[kind] for name, kind in KINDS.items()}
        columns, rest = history_files.from_safetensors(content, codes)
        history = History()
        history._columns = {name: columns.pop(name) for name in codes}
        history._timings = {name: columns.pop(_TIMINGS + name) for name in rest["timings"]}
        losses = rest.get("losses", [])
        history._losses = {name: columns.pop(_LOSSES + name) for name in losses}
        decided = {name: map(int, columns.pop(name)) for name in rest.get(_DECISIONS, [])}
        history._decided = {name: array("q", column) for name, column in decided.items()}
        if columns:
            raise ValueError(f"it has no {', '.join(columns)}")
        history._length = len(history._columns["loss"])
        history._read_rest(rest)
        return history

    def to_json_bytes(self) -> bytes:
        """Return the JSON of :meth:`save` without spaces, as UTF-8."""
        return history_files.to_json(self._content()).encode()

    @staticmethod
    def from_json_bytes(content: bytes) -> History:
        """Read the bytes of :meth:`to_json_bytes`.

        Raises:
            ParameterError: They contain no history.
        """
        return History._of(history_files.from_json(content))

    def _content(self) -> dict[str, Any]:
        """Return the whole history as plain values."""
        rows = list(self)
        for row in rows:
            del row["timings"]
            row.pop("losses", None)
            for name in self._decided:
                del row[name]
        named = {name: _or_none(column) for name, column in self.named_losses.items()}
        decided = {name: list(column[: self._length]) for name, column in self._decided.items()}
        return {
            "iterations": rows,
            "epochs": self.epochs(),
            "validations": self.validations,
            "timings": {
                name: _or_none(column[: self._length]) for name, column in self._timings.items()
            },
            **({"losses": named} if named else {}),
            **({_DECISIONS: decided} if decided else {}),
            "start": dict(self._start),
            "stopped": self.stopped,
        }

    @staticmethod
    def _of(content: dict[str, Any], where: str = "it") -> History:
        """Return the history of a :meth:`_content`. Keys that older files lack have their defaults.

        Raises :class:`sparkdl.ParameterError` if it is none, with ``where`` as its name.
        """
        return _explained(History._read, content, where)

    @staticmethod
    def _read(content: dict[str, Any]) -> History:
        history = History()
        history._read_rest(content)
        timings, losses = content.get("timings", {}), content.get("losses", {})
        skipped, decided = history._start["skipped"], content.get(_DECISIONS, {})
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
        stopped = content.get("stopped")
        self.stopped = None if stopped is None else str(stopped)
        for record in content.get("validations", []):
            metrics = {str(name): float(value) for name, value in record["metrics"].items()}
            iteration, epoch = int(record["iteration"]), int(record["epoch"])
            self.append_validation(Validated(iteration=iteration, epoch=epoch, metrics=metrics))


def _or_none(column: Iterable[float]) -> list[float | None]:
    return [None if math.isnan(value) else value for value in column]


def _explained(read: Callable[[Any], History], content: Any, where: str) -> History:
    """Return ``read(content)``, or raise ParameterError if that is no history, with ``where`` as
    its name."""
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
            f"{where} is not a history ({type(error).__name__}: {error})."
        ) from error
