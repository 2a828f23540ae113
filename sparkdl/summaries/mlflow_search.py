"""A search as a run of MLflow, with a nested run for each trial."""

from __future__ import annotations

import csv
import functools
import io
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sparkdl.codec.describe import plain_parameters
from sparkdl.loop.history import History
from sparkdl.loop.triggers import Trigger
from sparkdl.summaries.mlflow_model import log_model
from sparkdl.summaries.mlflow_run import (
    MOST_METRICS,
    PARENT,
    TrackedRun,
    allowed_names,
    library,
    parameters_of,
)

if TYPE_CHECKING:
    from sparkdl.train.trainer import Trainer

EVERY = 10
"""The iterations from one figure of a curve to the next."""


class SearchRuns:
    """The log of a search: the active run of MLflow or one of its own, and nested runs.

    - The run has the parameters of the trainer that all trials share, the values that are tried as
      ``space/NAME``, at the end the metrics of the best trial, the table of all trials as
      ``trials.csv``, and with ``log_models`` the best model.
    - When a trial ends, it becomes a nested run with its parameters, the curves of its losses and
      its validations, and its status. The tags ``trial.status`` and ``trial.reason`` say more.

    All of it is logged by the driver. If the store fails, a warning says so, and the search goes on.
    """

    def __init__(self, run_name: str | None, log_models: bool) -> None:
        self._run, self._log_models = TrackedRun(run_name, awaits_model=True), log_models
        self._shared: dict[str, str] = {}

    @property
    def run_id(self) -> str:
        """The id of the run of the search."""
        return self._run.run_id

    def open(self, trainer: Trainer, space: Mapping[str, str]) -> None:
        self._shared = plain_parameters(trainer, (Trigger,))
        shared = {name: text for name, text in self._shared.items() if name not in space}
        tried = {f"space/{name}": text for name, text in space.items()}
        self._run.open({**shared, **tried}, 0)

    def add(self, trainer: Trainer | None, record: Any, history: History | None) -> None:
        log = functools.partial(self._add, trainer, record, history)
        self._run.attempt(f"trial {record.number}", log)

    def _add(self, trainer: Trainer | None, record: Any, history: History | None) -> None:
        client, ended = self._run.client, int(time.time() * 1000)
        began = ended - int(1000 * record.seconds)
        parent = client.get_run(self.run_id).info
        tags = {PARENT: self.run_id, "trial.status": record.status}
        if record.reason:
            tags["trial.reason"] = record.reason
        run = client.create_run(
            parent.experiment_id, began, tags, run_name=f"trial {record.number}"
        ).info.run_id
        own = self._shared if trainer is None else plain_parameters(trainer, (Trigger,))
        given = {name: str(value) for name, value in record.arguments.items()}
        entities = library().entities
        client.log_batch(run, params=parameters_of({**own, **given}))
        metrics = [
            entities.Metric(name, float(value), began + int(1000 * seconds), iteration)
            for iteration, seconds, values in _figures(record, history)
            for name, value in allowed_names(values).items()
        ]
        for first in range(0, len(metrics), MOST_METRICS):
            client.log_batch(run, metrics=metrics[first : first + MOST_METRICS])
        if history is not None:
            client.log_text(run, history.to_json_bytes().decode(), "history.json")
        status = "FAILED" if record.status == "failed" else "FINISHED"
        client.set_terminated(run, status, ended)

    def close(self, result: Any) -> None:
        if result is not None:
            self._run.attempt("the result of the search", lambda: self._log_result(result))
            if result.best is not None and self._log_models:
                model = result.best_model
                self._run.attempt("the model", lambda: log_model(model, run_id=self.run_id))
        self._run.end("FAILED" if result is None else "FINISHED")

    def _log_result(self, result: Any) -> None:
        if result.trials:
            table = io.StringIO()
            rows = result.rows()
            writer = csv.DictWriter(table, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
            self._run.text(table.getvalue(), "trials.csv")
        if result.best is not None:
            best = result.best
            values = {f"validation/{name}": value for name, value in best.metrics.items()}
            self._run.scalars({**values, "best_trial": best.number}, best.iterations)


def _figures(record: Any, history: History | None) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Yield iteration, seconds since the start, and figures by name, as the callback logs them."""
    if history is None:
        values = {f"validation/{name}": value for name, value in record.metrics.items()}
        yield record.iterations, record.seconds, values
        return
    seconds = {}
    for row in history:
        seconds[row["iteration"]] = row["seconds"]
        if row["iteration"] % EVERY and row["iteration"] != len(history):
            continue
        values = {"loss": row["loss"], "learning_rate": row["learning_rate"]}
        values |= {f"losses/{name}": value for name, value in row.get("losses", {}).items()}
        if row["gradient_norm"] is not None:
            values["gradient_norm"] = row["gradient_norm"]
        yield row["iteration"], row["seconds"], values
    for one in history.validations:
        values = {f"validation/{name}": value for name, value in one["metrics"].items()}
        yield one["iteration"], seconds.get(one["iteration"], record.seconds), values
