"""The history of a run: numbers of every iteration, and validations."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.consistency.asynchronous import commits_of
from sparkdl.errors import ParameterError
from sparkdl.loop import history_files, history_tables
from sparkdl.loop.history_rows import DECISIONS, LOSSES, TIMINGS, Rows
from sparkdl.replica.iteration import INNER_STEPS, MICRO_BATCHES, STALENESS, Decisions

if TYPE_CHECKING:
    import pandas


class History(Rows):
    """Numbers of every iteration, and every validation."""

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
        names = [name for name in self._decided if name.startswith(prefix)]
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

        A loss that an iteration did not have is NaN. :class:`sparkdl.Gossip` adds
        "replica_distance".
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
        "stopped" and, if there are any, "settings", "losses" and "decisions". The columns of CSV
        are the keys of a record, ``timings/NAME``, ``losses/NAME``, the decisions of a consistency
        model, and ``validation/NAME``, which is filled at the iterations that were validated.
        Decisions are ``staleness``, ``micro_batches/REPLICA`` and ``inner_steps/REPLICA`` (0 if the
        replica left nothing out), and ``commits/N``, an encoded number that :attr:`commits` decodes.

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
        named = {TIMINGS + name: column for name, column in self._timings.items()}
        named |= {LOSSES + name: column for name, column in self._losses.items()}
        named |= {name: array("d", column) for name, column in self._decided.items()}
        rest = {
            "validations": self.validations,
            "timings": list(self._timings),
            "losses": list(self._losses),
            DECISIONS: list(self._decided),
            "start": self._start,
            "settings": self._settings,
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
            **({DECISIONS: decided} if decided else {}),
            "start": dict(self._start),
            **({"settings": self.settings} if self._settings else {}),
            "stopped": self.stopped,
        }

    @staticmethod
    def _of(content: dict[str, Any], where: str = "it") -> History:
        """Return the history of a :meth:`_content`. Keys that older files lack have their defaults.

        Raises :class:`sparkdl.ParameterError` if it is none, with ``where`` as its name.
        """
        return _explained(History._read, content, where)


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
