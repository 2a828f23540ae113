"""Logging of a run's parameters, metrics and history to MLflow."""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.codec.describe import plain_parameters
from sparkdl.codec.redaction import without_credentials
from sparkdl.errors import ParameterError
from sparkdl.loop.state import TrainState
from sparkdl.loop.triggers import Every, Trigger
from sparkdl.summaries.base import Recorder, extra_needed, scalars
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


class MLflow(Recorder):
    """A callback that logs to MLflow: to the active run, or to one of its own, which it ends.

    - When the fit starts: the trainer's plain values as parameters (see
      :func:`sparkdl.codec.describe.plain_parameters`).
    - When ``every`` fires: the scalars that :class:`TensorBoard` shows.
    - After each validation: ``validation/METRIC``.
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
        super().__init__(Every(10) if every is None else every)
        try:
            import mlflow
        except ImportError:
            raise extra_needed("MLflow", "mlflow", "mlflow-skinny") from None
        self._mlflow: Any = mlflow
        self._run_name = run_name
        self._log_models = log_models
        self._shown = TrainState()
        self._unsent: list[Any] = []
        self._next_try = 0.0
        self._client: Any = None
        self._fail: Any = None
        self.run_id: str = ""
        """The id of the run that it logs to or logged to last; empty before the first fit."""

    def on_fit_start(self, trainer: Trainer, state: TrainState) -> None:
        super().on_fit_start(trainer, state)
        self._shown, self._unsent, self._next_try = state, [], 0.0
        try:
            self._begin()
            self._log_parameters(trainer)
        except (self._mlflow.exceptions.MlflowException, OSError) as error:
            store = without_credentials(str(self._mlflow.get_tracking_uri()))
            said = without_credentials(str(error)).strip().removesuffix(".")
            raise ParameterError(
                f"MLflow cannot log to {store}: {said}. Give it a store that it reaches, in "
                "MLFLOW_TRACKING_URI or by mlflow.set_tracking_uri; a database takes the full mlflow, "
                "not mlflow-skinny alone."
            ) from None  # MLflow's own error has the address with its credentials

    def _log_parameters(self, trainer: Trainer) -> None:
        run = self._client.get_run(self.run_id)
        parameters = [
            self._mlflow.entities.Param(name, text)
            for name, text in _named(plain_parameters(trainer, (Trigger,))).items()
            if name not in run.data.params  # MLflow allows no changes: a resumed run keeps its own
        ]
        self._client.log_batch(self.run_id, params=parameters)

    def on_validation_end(self, trainer: Trainer, state: TrainState) -> None:
        super().on_validation_end(trainer, state)
        last = state.validations[-1]
        self._log({f"validation/{k}": v for k, v in last.metrics.items()}, last.iteration)

    def on_fit_end(self, trainer: Trainer, state: TrainState) -> None:
        super().on_fit_end(trainer, state)
        self._send()
        self._attempt("its history", self._log_history)
        if not self._log_models:
            self._finish()

    def on_result(self, trainer: Trainer, trained: TrainedModel) -> None:
        if self._log_models:
            self._attempt("the model", lambda: log_model(trained, run_id=self.run_id))
            self._finish()

    def _finish(self) -> None:
        """End the run that the callback started."""
        if self._fail is not None:
            self._fail.detach()
            self._fail = None
            end = functools.partial(_end, self._mlflow, self._client, self.run_id, "FINISHED")
            self._attempt("the end of the run", end)

    def _log_history(self) -> None:
        content = self.history.to_json_bytes().decode()
        self._client.log_text(self.run_id, content, "history.json")
        if len(self.history) and importlib.util.find_spec("matplotlib") is not None:
            with tempfile.TemporaryDirectory() as folder:
                plot_history(self.history, Path(folder, "curves.png"))
                self._client.log_artifact(self.run_id, str(Path(folder, "curves.png")))

    def write(self, trainer: Trainer, state: TrainState) -> None:
        if state.iteration > self._shown.iteration:
            self._log(dict(scalars(self._shown, state)), state.iteration)
            self._shown = state

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
            self._client.log_artifacts(self.run_id, folder, name)

    def _begin(self) -> None:
        """Find the active run, or start one."""
        active = self._mlflow.active_run()
        self._client = self._mlflow.MlflowClient()
        if active is not None and active.info.run_id in _OPEN:  # its fit failed
            _end(self._mlflow, self._client, active.info.run_id, "FAILED")
            active = None
        if active is None:
            active = self._mlflow.start_run(run_name=self._run_name)
            _OPEN.add(active.info.run_id)
            # A callback is not told that a fit has failed.
            self._fail = weakref.finalize(
                self, _end, self._mlflow, self._client, active.info.run_id, "FAILED"
            )
        self.run_id = active.info.run_id

    def _log(self, values: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        self._unsent += [
            self._mlflow.entities.Metric(name, float(value), now, step)
            for name, value in _named(values).items()
        ]
        if time.monotonic() >= self._next_try:
            self._send()

    def _send(self) -> None:
        """Log the metrics that have not been logged."""
        while self._unsent:
            metrics = self._unsent[:MOST_METRICS]
            log = functools.partial(self._client.log_batch, self.run_id, metrics=metrics)
            if not self._attempt("metrics", log):
                del self._unsent[:-MOST_UNSENT]
                break
            del self._unsent[: len(metrics)]

    def _attempt(self, what: str, log: Callable[[], Any]) -> bool:
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


def _end(mlflow: Any, client: Any, run_id: str, status: str) -> None:
    """End a run that a summary started, unless it has ended."""
    if run_id not in _OPEN:
        return
    _OPEN.remove(run_id)
    active = mlflow.active_run()
    if active is not None and active.info.run_id == run_id:
        mlflow.end_run(status)
    else:  # started by another thread, or no longer active
        client.set_terminated(run_id, status)
