"""Logging of a run's parameters, metrics and history to MLflow."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from sparkdl.errors import ParameterError
from sparkdl.loop.state import TrainState
from sparkdl.loop.triggers import Every, Trigger
from sparkdl.summaries.base import Recorder, Summaries
from sparkdl.summaries.mlflow_model import check_model, log_model
from sparkdl.summaries.mlflow_run import TrackedRun
from sparkdl.summaries.mlflow_search import SearchRuns

if TYPE_CHECKING:
    from sparkdl.infer.model import TrainedModel
    from sparkdl.train.trainer import Trainer


class MLflow(Summaries, Recorder):
    """A callback that logs to MLflow: to the active run, or to one of its own, which it ends.

    - When the fit starts: the trainer's plain values as parameters (see
      :func:`sparkdl.codec.describe.plain_parameters`).
    - Then the scalars of :class:`Summaries`.
    - At the end: the artifacts ``history.json``, and ``report.html`` if Bokeh is installed.
    - Then the data set: columns, number of rows, and a digest that the same rows always have.
    - With ``log_models``: the trained model, by :func:`sparkdl.mlflow.log_model`.

    The step in MLflow is the number of iterations. If a fit fails, its own run becomes ``FAILED`` as
    soon as the next fit starts or the program ends. If the store fails during a fit, a warning says
    so, and the fit goes on. What could not be logged is kept and logged when the store works again;
    the attempts take at most a twentieth of the time. The callback needs the extra ``mlflow``.

    A search (:func:`sparkdl.tune.search`) is one run, with a nested run for each trial; see
    :class:`sparkdl.summaries.mlflow_search.SearchRuns`.

    Args:
        run_name: The name of a run that the callback starts.
        every: The trigger that logs scalars; None is every 10 iterations.
        log_models: Log the trained model after the fit.
        nested: Make a child run where the active run has a fit already, or where another thread has
            begun the active run, as with the fits of a ``CrossValidator``.

    Raises:
        ParameterError: The extra is not installed; or, when the fit starts, MLflow cannot log.
    """

    def __init__(
        self,
        run_name: str | None = None,
        every: Trigger | None = None,
        log_models: bool = False,
        nested: bool = False,
    ) -> None:
        self._run, self._log_models = TrackedRun(run_name, log_models, nested), log_models
        self._run_name = run_name
        super().__init__(self._run, Every(10) if every is None else every)

    @property
    def run_id(self) -> str:
        """The id of the run that it logs to or logged to last; empty before the first fit."""
        return self._run.run_id

    def for_search(self) -> SearchRuns:
        return SearchRuns(self._run_name, self._log_models)

    def on_fit_end(self, trainer: Trainer, state: TrainState) -> None:
        self._run.attempt("its history", self._log_history)
        super().on_fit_end(trainer, state)

    def on_result(self, trainer: Trainer, trained: TrainedModel) -> None:
        self._run.attempt("the data set", lambda: self._run.data_set(trained.history.facts))
        if self._log_models:
            self._run.attempt("the model", lambda: log_model(trained, run_id=self.run_id))
            self._run.end("FINISHED")

    def _log_history(self) -> None:
        self._run.text(self.history.to_json_bytes().decode(), "history.json")
        if len(self.history) and importlib.util.find_spec("bokeh") is not None:
            with tempfile.TemporaryDirectory() as folder:
                self.history.report(Path(folder, "report.html"))
                self._run.folder(folder, "")

    def log_model(self, trained: TrainedModel, name: str = "model") -> None:
        """Add the saved model to the run, as the artifact folder ``name``; call it after the fit.

        :func:`sparkdl.load` reads the folder that ``mlflow.artifacts.download_artifacts`` downloads.

        Raises:
            ParameterError: There is no run yet, or it is not the model of a fit.
        """
        check_model("MLflow.log_model", trained)
        if not self.run_id:
            raise ParameterError("MLflow.log_model: there is no run yet; call it after fit.")
        with tempfile.TemporaryDirectory() as folder:
            trained.save(folder)
            self._run.folder(folder, name)
