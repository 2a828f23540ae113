"""Logging of a run's parameters, metrics and history to MLflow."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparkdl.codec.redaction import without_credentials
from sparkdl.errors import ParameterError
from sparkdl.loop.state import TrainState
from sparkdl.loop.triggers import Every, Trigger
from sparkdl.slices.histogram import Histogram
from sparkdl.summaries.base import Recorder, Summaries, extra_needed

if TYPE_CHECKING:
    from sparkdl.infer.trained_model import TrainedModel
    from sparkdl.train.trainer import Trainer

_OPEN: set[str] = set()
"""The runs that a summary started and has not ended."""


class MLflow(Summaries, Recorder):
    """A callback that logs to MLflow: to the active run, or to one of its own, which it ends.

    - When the fit starts: the trainer's plain values as parameters (see
      :func:`sparkdl.codec.describe.plain_parameters`).
    - Then the scalars of :class:`Summaries`.
    - At the end: the artifact ``history.json``.

    The step in MLflow is the number of iterations. If a fit fails, its own run becomes ``FAILED`` as
    soon as the next fit starts or the program ends. The callback needs the extra ``mlflow``.

    Args:
        run_name: The name of a run that the callback starts.
        every: The trigger that logs scalars; None is every 10 iterations.

    Raises:
        ParameterError: The extra is not installed; or, when the fit starts, MLflow cannot log.
    """

    def __init__(self, run_name: str | None = None, every: Trigger | None = None) -> None:
        self._run = TrackedRun(run_name)
        super().__init__(self._run, Every(10) if every is None else every)

    @property
    def run_id(self) -> str:
        """The id of the run that it logs to or logged to last; empty before the first fit."""
        return self._run.run_id

    def on_fit_end(self, trainer: Trainer, state: TrainState) -> None:
        self._run.text(self.history.to_json_bytes().decode(), "history.json")
        super().on_fit_end(trainer, state)

    def log_model(self, trained: TrainedModel, name: str = "model") -> None:
        """Add the saved model to the run, as the artifact folder ``name``; call it after the fit.

        :func:`sparkdl.load` reads the folder that ``mlflow.artifacts.download_artifacts`` downloads.

        Raises:
            ParameterError: There is no run yet.
        """
        if not self.run_id:
            raise ParameterError("MLflow.log_model: there is no run yet; call it after fit.")
        with tempfile.TemporaryDirectory() as folder:
            trained.save(folder)
            self._run.folder(folder, name)


class TrackedRun:
    """A writer to a run of MLflow: the active one, or one that it starts.

    Args:
        name: The name of a run that it starts.

    Raises:
        ParameterError: The extra ``mlflow`` is not installed.
    """

    def __init__(self, name: str | None) -> None:
        try:
            _library()
        except ImportError:
            raise extra_needed("MLflow", "mlflow", "mlflow-skinny") from None
        self._name = name
        self._client: Any = None
        self.run_id = ""

    def open(self, params: Mapping[str, str], iteration: int) -> None:
        try:
            self._begin()
            self._log_parameters(params)
        except (_library().exceptions.MlflowException, OSError) as error:
            store = without_credentials(str(_library().get_tracking_uri()))
            said = without_credentials(str(error)).strip().removesuffix(".")
            raise ParameterError(
                f"MLflow cannot log to {store}: {said}. Choose a store that it can reach, with "
                "MLFLOW_TRACKING_URI or mlflow.set_tracking_uri; for a database, install the full "
                "mlflow package."
            ) from None  # MLflow's own error has the address with its credentials

    def _begin(self) -> None:
        """Find the active run, or start one."""
        active = _library().active_run()
        self._client = _library().MlflowClient()
        if active is not None and active.info.run_id in _OPEN:  # its fit failed
            self._end(active.info.run_id, "FAILED")
            active = None
        if active is None:
            active = _library().start_run(run_name=self._name)
            _OPEN.add(active.info.run_id)
        self.run_id = active.info.run_id

    def _log_parameters(self, params: Mapping[str, str]) -> None:
        run = self._client.get_run(self.run_id)
        parameters = [
            _library().entities.Param(name, text)
            for name, text in _named(params).items()
            if name not in run.data.params  # MLflow allows no changes: a resumed run keeps its own
        ]
        self._client.log_batch(self.run_id, params=parameters)

    def scalars(self, values: Mapping[str, float], iteration: int) -> None:
        now = int(time.time() * 1000)
        metrics = [
            _library().entities.Metric(name, float(value), now, iteration)
            for name, value in _named(values).items()
        ]
        self._client.log_batch(self.run_id, metrics=metrics)

    def histograms(self, values: Mapping[str, Histogram], iteration: int) -> None:
        """Do nothing: MLflow knows no histograms."""

    def flush(self) -> None:
        """Do nothing: every call is written at once."""

    def text(self, content: str, name: str) -> None:
        """Add a file to the run."""
        self._client.log_text(self.run_id, content, name)

    def folder(self, path: str, name: str) -> None:
        """Add the content of a folder to the run, as the folder ``name``."""
        self._client.log_artifacts(self.run_id, path, name)

    def close(self, status: str) -> None:
        if self.run_id in _OPEN:
            self._end(self.run_id, status.upper())

    def _end(self, run_id: str, status: str) -> None:
        """End a run that a summary started."""
        _OPEN.remove(run_id)
        active = _library().active_run()
        if active is not None and active.info.run_id == run_id:
            _library().end_run(status)
        else:  # started by another thread, or no longer active
            self._client.set_terminated(run_id, status)


def _library() -> Any:
    """Return the library, which a pickle of a writer must not hold."""
    import mlflow

    return mlflow


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
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
