"""A run of MLflow that is written to, while its store may fail."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sparkdl.codec.describe import without_credentials
from sparkdl.errors import ParameterError, optional_library
from sparkdl.slices.update import Histogram

logger = logging.getLogger("sparkdl")
MOST_METRICS = 1000
"""The most metrics that MLflow takes at once."""
MOST_UNSENT = 100_000
"""The most metrics that are kept while the store fails; earlier ones are dropped."""
PAUSE_SECONDS = 10.0
"""The least time between two attempts to log to a store that fails."""
PARENT = "mlflow.parentRunId"
"""The tag by which MLflow shows a run inside another one."""
_OPEN: set[str] = set()
"""The runs that a summary started and has not ended."""


@dataclass(frozen=True)
class TrackingSettings:
    """The settings of MLflow in a process, which go with a callback to the process that runs it."""

    process: tuple[str, int]
    store: str
    run_id: str  # of the active run; "" without one
    experiment: str | None  # of further runs; None: MLflow's own choice

    @staticmethod
    def here() -> TrackingSettings:
        """Return the settings of this process."""
        active, experiment = library().active_run(), None
        if active is None:
            with contextlib.suppress(library().exceptions.MlflowException, OSError):
                experiment = library().tracking.fluent._get_experiment_id()
        run_id = "" if active is None else active.info.run_id
        return TrackingSettings(_process(), library().get_tracking_uri(), run_id, experiment)


def _process() -> tuple[str, int]:
    return socket.gethostname(), os.getpid()


class TrackedRun:
    """A writer to a run of MLflow: the active one, or one that it starts.

    It may travel to another process, as over Spark Connect. There it writes to the store, the active
    run and the experiment of the process that it comes from. If it ``awaits_model``, the run goes
    on after the fit, until :meth:`end`. With ``nested``, a fit in a run that has one, or that another
    thread has begun, gets a child run of that.
    """

    def __init__(self, name: str | None, awaits_model: bool = False, nested: bool = False) -> None:
        optional_library("mlflow", "MLflow", "mlflow", "mlflow-skinny")
        self._name, self._awaits_model, self._nested = name, awaits_model, nested
        self.client: Any = None
        self._unsent: list[Any] = []
        self._next_try = 0.0
        self.run_id = ""
        self._from: TrackingSettings | None = None

    def __getstate__(self) -> dict[str, Any]:
        there = None if self._elsewhere() else TrackingSettings.here()
        return {**vars(self), "client": None, "_from": there}

    def _elsewhere(self) -> bool:
        """Return whether the writer has come from another process."""
        return self._from is not None and self._from.process != _process()

    def open(self, params: Mapping[str, str], iteration: int) -> None:
        self._unsent, self._next_try = [], 0.0
        try:
            self._begin()
            self._log_parameters(params)
        except (library().exceptions.MlflowException, OSError) as error:
            store = without_credentials(str(library().get_tracking_uri()))
            said = without_credentials(str(error)).strip().removesuffix(".")
            raise ParameterError(
                f"MLflow cannot log to {store}: {said}. Choose a store that it can reach, with "
                "MLFLOW_TRACKING_URI or mlflow.set_tracking_uri; for a database, install the full "
                "mlflow package."
            ) from None  # MLflow's own error has the address with its credentials

    def _begin(self) -> None:
        """Find the active run, or start one."""
        experiment = None
        if self._from is not None and self._elsewhere():
            library().set_tracking_uri(self._from.store)
            self.run_id, experiment = self._from.run_id, self._from.experiment
            if self.run_id:
                self.client = library().MlflowClient()
                return
        active = library().active_run()
        self.client = library().MlflowClient()
        if active is not None and active.info.run_id in _OPEN:  # its fit failed
            self._end(active.info.run_id, "FAILED")
            active = None
        parent = self._parent(active) if self._nested else None
        if parent is not None:
            tags = {PARENT: parent.info.run_id}
            active = self.client.create_run(
                parent.info.experiment_id, tags=tags, run_name=self._name
            )
            _OPEN.add(active.info.run_id)
        elif active is None:
            active = library().start_run(run_name=self._name, experiment_id=experiment)
            _OPEN.add(active.info.run_id)
        self.run_id = active.info.run_id

    def _parent(self, active: Any) -> Any:
        """Return the run whose child this fit is: one that has a fit, or that another thread began."""
        if active is not None:
            params = self.client.get_run(active.info.run_id).data.params
            return active if "batch_size" in params else None
        latest = getattr(library().tracking.fluent, "_get_latest_active_run", lambda: None)()
        return None if latest is None or latest.info.run_id in _OPEN else latest

    def _log_parameters(self, params: Mapping[str, str]) -> None:
        run = self.client.get_run(self.run_id)
        # MLflow allows no changes: a resumed run keeps its own
        parameters = [one for one in parameters_of(params) if one.key not in run.data.params]
        self.client.log_batch(self.run_id, params=parameters)

    def scalars(self, values: Mapping[str, float], iteration: int) -> None:
        now = int(time.time() * 1000)
        self._unsent += [
            library().entities.Metric(name, float(value), now, iteration)
            for name, value in allowed_names(values).items()
        ]
        if time.monotonic() >= self._next_try:
            self._send()

    def _send(self) -> None:
        """Log the metrics that have not been logged."""
        while self._unsent:
            metrics = self._unsent[:MOST_METRICS]
            log = functools.partial(self.client.log_batch, self.run_id, metrics=metrics)
            if not self.attempt("metrics", log):
                del self._unsent[:-MOST_UNSENT]
                break
            del self._unsent[: len(metrics)]

    def attempt(self, what: str, log: Callable[[], Any]) -> bool:
        """Log something and return whether that succeeded; a warning says why it did not."""
        began = time.monotonic()
        try:
            log()
        except Exception as error:  # a store may raise anything
            seconds = time.monotonic() - began
            self._next_try = time.monotonic() + max(PAUSE_SECONDS, 20 * seconds)
            logger.warning(
                "the training goes on, but MLflow could not log %s: %s",
                what,
                without_credentials(str(error)).strip().partition("\n")[0],
            )
            return False
        return True

    def histograms(self, values: Mapping[str, Histogram], iteration: int) -> None:
        """Do nothing: MLflow knows no histograms."""

    def flush(self) -> None:
        """Do nothing: what can be written is written at once."""

    def text(self, content: str, name: str) -> None:
        """Add a file to the run."""
        self.client.log_text(self.run_id, content, name)

    def folder(self, path: str, name: str) -> None:
        """Add the content of a folder to the run, in the folder ``name`` unless that is empty."""
        self.client.log_artifacts(self.run_id, path, name or None)

    def data_set(self, facts: Mapping[str, list[list[str]]]) -> None:
        """Log the data set in the facts of a fit: columns, the number of rows and their digest."""
        training = dict(row for row in facts.get("Training", []) if len(row) == 2)
        if not {"rows", "digest of the rows"} <= training.keys():
            return
        columns = [
            {"name": name, "type": f"{kind} ({role})"} for name, role, kind in facts["Columns"][1:]
        ]
        entities = library().entities
        data = entities.Dataset(
            name="training",
            digest=training["digest of the rows"],
            source_type="code",
            source=json.dumps({"tags": {}}),
            schema=json.dumps({"mlflow_colspec": columns}),
            profile=json.dumps({"num_rows": int(training["rows"].replace(",", ""))}),
        )
        tags = [entities.InputTag("mlflow.data.context", "training")]
        self.client.log_inputs(self.run_id, [entities.DatasetInput(data, tags)])

    def close(self, status: str) -> None:
        self._send()
        if status != "finished" or not self._awaits_model:
            self.end(status.upper())

    def end(self, status: str) -> None:
        """End the run if the callback started it."""
        if self.run_id in _OPEN:
            end = functools.partial(self._end, self.run_id, status)
            self.attempt("the end of the run", end)

    def _end(self, run_id: str, status: str) -> None:
        """End a run that a summary started."""
        _OPEN.remove(run_id)
        active = library().active_run()
        if active is not None and active.info.run_id == run_id:
            library().end_run(status)
        else:  # started by another thread, or no longer active
            self.client.set_terminated(run_id, status)


def library() -> Any:
    """Return the library, which a pickle of a writer must not hold."""
    import mlflow

    return mlflow


def parameters_of(values: Mapping[str, str]) -> list[Any]:
    """Return MLflow's parameters of values; an argument that is None says nothing, and is left out."""
    told = {name: text for name, text in values.items() if text != "None"}
    return [library().entities.Param(name, text) for name, text in allowed_names(told).items()]


def allowed_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` by names that MLflow allows; names that become equal are numbered."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        plain = allowed = re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)
        number = 1
        while plain in found:
            number += 1
            plain = f"{allowed} {number}"
        found[plain] = value
    return found
