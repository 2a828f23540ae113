"""The history of a run: numbers of every iteration, and validations; in files and in checkpoints."""

from __future__ import annotations

import contextlib
import csv
import json
import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.numpy

from sparkdl.codec.files import parse_json, parse_tensors
from sparkdl.consistency.asynchronous import commits_of
from sparkdl.errors import ParameterError
from sparkdl.loop import history_tables
from sparkdl.loop.history_tables import (
    DTYPES,
    EMPTY,
    KINDS,
    LOSSES,
    METRICS,
    TIMINGS,
    code_of,
    from_csv,
    is_decision,
    to_csv,
    with_prefix,
)
from sparkdl.loop.run_notes import RunNotes
from sparkdl.loop.state import TrainState, Validated
from sparkdl.replica.iteration import INNER_STEPS, MICRO_BATCHES, STALENESS, Decisions

if TYPE_CHECKING:
    import pandas

_NO_NORM = -1.0  # a norm is never negative; NaN is a measured value
_REST = "history"


class History(RunNotes):
    """Numbers of every iteration, about 150 bytes each, and every validation.

    One table has a column for each key of :data:`KINDS`, ``timings/ACTIVITY`` and ``losses/NAME`` (NaN
    where there is none), and what a consistency model decided, by its name (0 where there is none).

    [Note: histories with a common beginning] The history of a run that continues another one begins
    with the other's history. Both refer to the same columns, each to their first ``_length`` rows.
    A history that uses all rows appends to them in place; any other copies its own rows first. Rows
    are never changed or removed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._table: dict[str, array[Any]] = {name: array(code_of(name)) for name in KINDS}
        self._length = 0
        self._validations: list[Validated] = []
        self._validated = 0
        self._start: dict[str, Any] = {"samples": 0, "seconds": 0.0, "skipped": 0}

    @staticmethod
    def after(state: TrainState) -> History:
        """Return an empty history of a run that continues from ``state``, with the validations so
        far."""
        history = History()
        history._start = {name: getattr(state, name) for name in history._start}
        history._validations = list(state.validations)
        history._validated = len(state.validations)
        return history

    def branch(self) -> History:
        """Return a history that continues from here, while this one stays as it is.

        The cost does not depend on the length.
        """
        history = History()
        history._table, history._length = dict(self._table), self._length
        history._validations, history._validated = self._validations, self._validated
        history._start = dict(self._start)
        history._take_notes(self)
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
            history._start[name] = self._table[name][first - 1]
        history._table = {name: c[first : self._length] for name, c in self._table.items()}
        history._length = count
        begin = self._table["iteration"][first]
        history._events = [event for event in self._events if event["iteration"] >= begin]
        history._validations = [v for v in self._known if v.iteration >= begin]
        history._validated = len(history._validations)
        history.stopped, history.ended_by = self.stopped, self.ended_by
        return history

    def append(self, state: TrainState, epoch: int) -> None:
        """Record an iteration. ``epoch`` is the epoch that it belongs to, from 1."""
        row: dict[str, Any] = {
            "iteration": state.iteration,
            "epoch": epoch,
            "loss": state.loss,
            "learning_rate": state.learning_rates[0] if state.learning_rates else math.nan,
            "samples": state.samples,
            "seconds": state.seconds,
            "gradient_norm": _NO_NORM if state.gradient_norm is None else state.gradient_norm,
            "loss_scale": state.loss_scale,
            "skipped": state.skipped,
            "bytes_sent": state.bytes_sent,
            **{TIMINGS + name: value for name, value in state.timings.items()},
            **{LOSSES + name: value for name, value in state.losses.items()},
            **state.decisions,
        }
        if len(self._table["loss"]) > self._length:  # another history has appended rows
            self._table = {name: column[: self._length] for name, column in self._table.items()}
        for name in row:
            if name not in self._table:
                self._table[name] = array(code_of(name), [EMPTY[code_of(name)]]) * self._length
        for name, column in self._table.items():
            column.append(row.get(name, EMPTY[column.typecode]))
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
        """Remove all records after ``iteration``, because the run goes back to it."""
        self._length = bisect_right(self._table["iteration"], iteration, hi=self._length)
        self._validations = [v for v in self._known if v.iteration <= iteration]
        self._validated = len(self._validations)
        self._events = [event for event in self._events if event["iteration"] <= iteration]

    def follow(self, state: TrainState) -> None:
        """Correct the counts of skipped iterations to those of ``state``, from which the run
        continues.

        A history that was read from CSV does not contain the count at its start.
        """
        counts = self._table["skipped"][: self._length]
        offset = state.skipped - (counts[-1] if counts else self._start["skipped"])
        self._start["skipped"] += offset
        self._table["skipped"] = array("q", [count + offset for count in counts])

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
        skips = self._table["skipped"][first - 1] if first else self._start["skipped"]
        timings, losses = (with_prefix(self._table, prefix) for prefix in (TIMINGS, LOSSES))
        decided = {name: column for name, column in self._table.items() if is_decision(name)}
        for i in range(first, len(self)):
            record: dict[str, Any] = {name: self._table[name][i] for name in KINDS}
            if record["gradient_norm"] == _NO_NORM:
                record["gradient_norm"] = None
            skips, record["skipped"] = record["skipped"], record["skipped"] > skips
            record["timings"] = {k: c[i] for k, c in timings.items() if not math.isnan(c[i])}
            if losses:
                record["losses"] = {name: column[i] for name, column in losses.items()}
            yield record | {name: column[i] for name, column in decided.items()}

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
        return self._by_replica(MICRO_BATCHES)

    @property
    def inner_steps(self) -> dict[int, tuple[int, ...]]:
        """Return how many steps of its own each replica made, by the number of the iteration from 1.

        It has only the iterations in which a replica left some out, see :class:`sparkdl.DiLoCo`.
        """
        return self._by_replica(INNER_STEPS)

    def _by_replica(self, prefix: str) -> dict[int, tuple[int, ...]]:
        """Return the decisions of each replica whose names begin with ``prefix``, by iteration."""
        names = [name for name in self._table if name.startswith(prefix)]
        names.sort(key=lambda name: int(name.removeprefix(prefix)))
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
        decided = {name: column for name, column in self._table.items() if is_decision(name)}
        return {
            self._table["iteration"][i]: {name: c[i] for name, c in decided.items() if c[i]}
            for i in range(len(self))
        }

    @property
    def losses(self) -> list[float]:
        """Return the loss of each iteration."""
        return self._column("loss")

    @property
    def named_losses(self) -> dict[str, list[float]]:
        """Return the named losses of each iteration, by name, if ``Trainer(step=)`` returned such.

        A loss that an iteration did not have is NaN. :class:`sparkdl.Gossip` adds
        "replica_distance".
        """
        return {name: list(column) for name, column in self._columns(LOSSES).items()}

    @property
    def validations(self) -> list[dict[str, Any]]:
        """Return one record for each validation: iteration and epoch (how many were complete), metrics,
        and, if there are any, arrays: the curves and matrices by name."""
        return [
            {
                **{"iteration": v.iteration, "epoch": v.epoch, "metrics": _floats(v.metrics)},
                **({"arrays": dict(v.arrays)} if v.arrays else {}),
            }
            for v in self._known
        ]

    def epochs(self) -> list[dict[str, Any]]:
        """Return one record for each epoch: epoch, mean loss over its samples, iterations, samples,
        seconds.

        Each iteration counts by its samples, also where its own loss is a mean by weights of rows or
        over a count. Iterations whose loss is not finite, because ``on_nan="skip"`` skipped them or no
        sample had any weight, are not part of the mean. It is NaN if no iteration is left.
        """
        records: list[dict[str, Any]] = []
        counted: list[int] = []
        seen, clock = self._start["samples"], self._start["seconds"]
        names = ("epoch", "loss", "samples", "seconds")
        for epoch, loss, samples, seconds in zip(*map(self._column, names), strict=True):
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
        return history_tables.timings(self._columns(TIMINGS))

    def timing_table(self) -> str:
        """Return :meth:`timings` as lines of text."""
        return history_tables.timing_table(self.timings())

    def __repr__(self) -> str:
        return f"<sparkdl.History: {self.summary()}>"

    def summary(self) -> str:
        """Return in one line how far the run went, its last loss, and why it ended."""
        last = self.last(1)[-1] if len(self) else {"epoch": 0, "loss": math.nan}
        return history_tables.as_line(len(self), int(last["epoch"]), last["loss"], self.end)

    def _repr_html_(self) -> str:
        """Return the view in a notebook: progress, loss, last metrics, and the curves."""
        return history_tables.as_html(
            self._column("iteration"), self.losses, self.epochs(), self.validations
        )

    def report(self, path: str | Path, title: str = "Training") -> Path:
        """Write a page about the run: curves, times, faults, and what was trained where.

        It is one file of HTML that needs no network, of at most 2 MB. The function needs the extra
        ``report``.

        Args:
            path: The file to write, such as ``report.html``.
            title: The heading of the page.

        Returns:
            The path.

        Raises:
            ParameterError: The extra is not installed, or the path is a folder.
        """
        from sparkdl.loop.report import write

        return write(self, path, title)

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row for each iteration, with the columns of a CSV of :meth:`save`.

        What was not measured is NaN.
        """
        import pandas

        columns = self._flat()
        dtypes = {name: DTYPES[code_of(name)] for name in columns} | {"skipped": "bool"}
        return pandas.DataFrame({n: pandas.Series(columns[n], dtype=dtypes[n]) for n in columns})

    def save(self, path: str | Path) -> None:
        """Write the history to a file: everything as ``.json``, or one row for each iteration as
        ``.csv``.

        JSON is an object with the keys "iterations", "epochs", "validations", "timings", "start",
        "stopped", "ended_by" and, if there are any, "settings", "plan", "facts", "events", "losses"
        and "decisions". The columns of CSV are the keys of a record, ``timings/NAME``,
        ``losses/NAME``, the decisions of a consistency model, and ``validation/NAME``, which is
        filled at the iterations that were validated.
        Decisions are ``staleness``, ``micro_batches/REPLICA`` and ``inner_steps/REPLICA`` (0 if the
        replica left nothing out), and ``commits/N``, an encoded number that :attr:`commits` decodes.

        Raises:
            ParameterError: The file has another suffix.
        """
        text = (
            to_csv(self._flat()) if _is_csv(path) else json.dumps(self._content(), indent=1) + "\n"
        )
        Path(path).write_text(text, encoding="utf-8", newline="")

    @staticmethod
    def load(path: str | Path) -> History:
        """Read a file that :meth:`save` wrote.

        A history from JSON is identical to the last bit. A CSV contains only the iteration of a
        validation; its epoch is taken from the row.

        Raises:
            ParameterError: The file has another suffix or contains no history.
        """
        is_csv, content = _is_csv(path), Path(path).read_bytes()
        with _explained(path):
            return History._of(from_csv(content.decode()) if is_csv else parse_json(content))

    def to_bytes(self) -> bytes:
        """Return the whole history as a safetensors file, for a checkpoint."""
        # by way of torch, each new length would leave a ctypes class behind
        count = self._length
        arrays = {
            name: np.frombuffer(c, c.typecode, count) if count else np.empty(0, c.typecode)
            for name, c in self._table.items()
        }
        decided = [name for name in arrays if is_decision(name)]
        arrays |= {name: arrays[name].astype("d") for name in decided}
        rest = {
            "validations": self.validations,
            "timings": list(with_prefix(self._table, TIMINGS)),
            "losses": list(with_prefix(self._table, LOSSES)),
            "decisions": decided,
            "start": self._start,
            **self._notes(),
        }
        return safetensors.numpy.save(arrays, {_REST: json.dumps(rest)})

    @staticmethod
    def from_bytes(content: bytes) -> History:
        """Read the bytes of :meth:`to_bytes`.

        Raises:
            ParameterError: They contain no history.
        """
        with _explained():
            tensors, metadata = parse_tensors(content)
            rest = parse_json(metadata[_REST].encode())
            others = [TIMINGS + name for name in rest["timings"]]
            others += [LOSSES + name for name in rest.get("losses", [])]
            others += rest.get("decisions", [])
            codes = {name: code_of(name) for name in KINDS} | dict.fromkeys(others, "d")
            if tensors.keys() != codes.keys():
                raise ValueError(f"it has the columns {', '.join(tensors)}")
            history = History()
            for name, code in codes.items():
                tensor = tensors[name]
                if tensor.ndim != 1 or str(tensor.dtype) != f"torch.{DTYPES[code]}":
                    raise ValueError(f"its {name} is {list(tensor.shape)} of {tensor.dtype}")
                column: array[Any] = array(code)
                column.frombytes(tensor.numpy().tobytes())
                history._table[name] = array(
                    code_of(name), map(int, column) if is_decision(name) else column
                )
            (history._length,) = {len(column) for column in history._table.values()}
            history._read_rest(rest)
        return history

    def to_json_bytes(self) -> bytes:
        """Return the JSON of :meth:`save` without spaces, as UTF-8."""
        return json.dumps(self._content(), separators=(",", ":")).encode()

    @staticmethod
    def from_json_bytes(content: bytes) -> History:
        """Read the bytes of :meth:`to_json_bytes`.

        Raises:
            ParameterError: They contain no history.
        """
        with _explained():
            return History._of(parse_json(content))

    def _column(self, name: str) -> list[Any]:
        return list(self._table[name][: self._length])

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the columns of the table as arrays, NaN or 0 where nothing was measured."""
        return {name: np.array(column[: self._length]) for name, column in self._table.items()}

    def _columns(self, prefix: str) -> dict[str, array[float]]:
        """Return the columns whose names begin with ``prefix``, by the rest of their names."""
        columns = with_prefix(self._table, prefix)
        return {name: column[: self._length] for name, column in columns.items()}

    def _content(self) -> dict[str, Any]:
        """Return the whole history as plain values."""
        losses = {name: _or_none(column) for name, column in self._columns(LOSSES).items()}
        decided = {name: self._column(name) for name in self._table if is_decision(name)}
        return {
            "iterations": [{name: row[name] for name in KINDS} for row in self],
            "epochs": self.epochs(),
            "validations": self.validations,
            "timings": {name: _or_none(c) for name, c in self._columns(TIMINGS).items()},
            **({"losses": losses} if losses else {}),
            **({"decisions": decided} if decided else {}),
            "start": dict(self._start),
            **self._notes(),
        }

    def _flat(self) -> dict[str, list[Any]]:
        """Return the columns of a CSV; None where nothing was measured."""
        content, validated = self._content(), dict[int, dict[str, float]]()
        for one in self._known:
            validated.setdefault(one.iteration, {}).update(one.metrics)
        metrics = dict.fromkeys(name for one in validated.values() for name in one)
        numbers = self._column("iteration")
        return {
            **{name: [row[name] for row in content["iterations"]] for name in KINDS},
            **{TIMINGS + name: values for name, values in content["timings"].items()},
            **{LOSSES + name: values for name, values in content.get("losses", {}).items()},
            **content.get("decisions", {}),
            **{METRICS + m: [validated.get(n, {}).get(m) for n in numbers] for m in metrics},
        }

    @staticmethod
    def _of(content: dict[str, Any]) -> History:
        """Return the history of a :meth:`_content`; keys that older files lack have their defaults."""
        history = History()
        history._read_rest(content)
        timings, losses = content.get("timings", {}), content.get("losses", {})
        skipped, decided = history._start["skipped"], content.get("decisions", {})
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
        self._read_notes(content)
        for record in content.get("validations", []):
            iteration, epoch = int(record["iteration"]), int(record["epoch"])
            metrics = _floats(record["metrics"])
            arrays = {str(name): value for name, value in record.get("arrays", {}).items()}
            self.append_validation(
                Validated(iteration=iteration, epoch=epoch, metrics=metrics, arrays=arrays)
            )


def _floats(metrics: Mapping[Any, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in metrics.items()}


def _or_none(column: Iterable[float]) -> list[float | None]:
    return [None if math.isnan(value) else value for value in column]


def _is_csv(path: str | Path) -> bool:
    suffix = Path(path).suffix.lower()
    if suffix not in (".csv", ".json"):
        raise ParameterError(f'history file "{path}": end its name in .json or .csv.')
    return suffix == ".csv"


@contextlib.contextmanager
def _explained(where: str | Path = "it") -> Iterator[None]:
    """Convert what content that is no history raises to a ParameterError that names it."""
    try:
        yield
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        csv.Error,
    ) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ParameterError(f"{where} is not a history ({reason}).") from error
