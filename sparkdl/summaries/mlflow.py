"""Logging of a run's parameters, metrics and history to MLflow."""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.codec.redaction import without_credentials
from sparkdl.errors import ParameterError
from sparkdl.loop.state import TrainState
from sparkdl.loop.triggers import Every, Trigger
from sparkdl.slices.histogram import Histogram
from sparkdl.summaries.base import Recorder, Summaries, extra_needed
from sparkdl.summaries.files import plot_history
from sparkdl.summaries.mlflow_model import log_model

if TYPE_CHECKING:
    from sparkdl.infer.trained_model import TrainedModel
    from sparkdl.train.trainer import Trainer

logger = logging.getLogger("sparkdl")
MOST_METRICS = 1000
"""The most metrics that MLflow takes at once."""
MOST_UNSENT = 100_000
"""The most metrics that are kept while the store fails; earlier ones are dropped."""
PAUSE_SECONDS = 10.0
"""The least time between two attempts to log to a store that fails."""
_OPEN: set[str] = set()
"""The runs that a summary started and has not ended."""


class MLflow(Summaries, Recorder):
    """A callback that logs to MLflow: to the active run, or to one of its own, which it ends.

    - When the fit starts: the trainer's plain values as parameters (see
      :func:`sparkdl.codec.describe.plain_parameters`).
    - Then the scalars of :class:`Summaries`.
    - At the end: the artifacts ``history.json``, and ``curves.png`` if matplotlib is installed.
    - With ``log_models``: the trained model, by :func:`sparkdl.mlflow.log_model`.

    The step in MLflow is the number of iterations. If a fit fails, its own run becomes ``FAILED`` as
    soon as the next fit starts or the program ends. If the store fails during a fit, a warning says
    so, and the fit goes on. What could not be logged is kept and logged when the store works again;
    the attempts take at most a twentieth of the time. The callback needs the extra ``mlflow``.

    Args:
        run_name: The name of a run that the callback starts.
        every: The trigger that logs scalars; None is every 10 iterations.
        log_models: Log the trained model after the fit.

    Raises:
        ParameterError: The extra is not installed; or, when the fit starts, MLflow cannot log.
    """

    def __init__(
        self, run_name: str | None = None, every: Trigger | None = None, log_models: bool = False
    ) -> None:
        self._run, self._log_models = TrackedRun(run_name, log_models), log_models
        super().__init__(self._run, Every(10) if every is None else every)

    @property
    def run_id(self) -> str:
        """The id of the run that it logs to or logged to last; empty before the first fit."""
        return self._run.run_id

    def on_fit_end(self, trainer: Trainer, state: TrainState) -> None:
        self._run.attempt("its history", self._log_history)
        super().on_fit_end(trainer, state)

    def on_result(self, trainer: Trainer, trained: TrainedModel) -> None:
        if self._log_models:
            self._run.attempt("the model", lambda: log_model(trained, run_id=self.run_id))
            self._run.end("FINISHED")

    def _log_history(self) -> None:
        self._run.text(self.history.to_json_bytes().decode(), "history.json")
        if len(self.history) and importlib.util.find_spec("matplotlib") is not None:
            with tempfile.TemporaryDirectory() as folder:
                plot_history(self.history, Path(folder, "curves.png"))
                self._run.folder(folder, "")

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
        awaits_model: The run goes on after the fit, until :meth:`end`.

    Raises:
        ParameterError: The extra ``mlflow`` is not installed.
    """

    def __init__(self, name: str | None, awaits_model: bool = False) -> None:
        try:
            _library()
        except ImportError:
            raise extra_needed("MLflow", "mlflow", "mlflow-skinny") from None
        self._name, self._awaits_model = name, awaits_model
        self._client: Any = None
        self._unsent: list[Any] = []
        self._next_try = 0.0
        self.run_id = ""

    def open(self, params: Mapping[str, str], iteration: int) -> None:
        self._unsent, self._next_try = [], 0.0
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
        self._unsent += [
            _library().entities.Metric(name, float(value), now, iteration)
            for name, value in _named(values).items()
        ]
        if time.monotonic() >= self._next_try:
            self._send()

    def _send(self) -> None:
        """Log the metrics that have not been logged."""
        while self._unsent:
            metrics = self._unsent[:MOST_METRICS]
            log = functools.partial(self._client.log_batch, self.run_id, metrics=metrics)
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
        self._client.log_text(self.run_id, content, name)

    def folder(self, path: str, name: str) -> None:
        """Add the content of a folder to the run, in the folder ``name`` unless that is empty."""
        self._client.log_artifacts(self.run_id, path, name or None)

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
