"""The result of a search: the table of its trials, and the best model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ParameterError, counted
from sparkdl.infer.model import TrainedModel
from sparkdl.train.trainer import Trainer
from sparkdl.tune.plot import plot_trials
from sparkdl.tune.record import FAILED, Objective, TrialRecord
from sparkdl.tune.space import Domain
from sparkdl.tune.tasks import trainer_of

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The trials of a search and the best of them; :func:`sparkdl.tune.search` returns it.

    Attributes:
        trials: Every finished trial, by number.
        best: The best completed trial, or None if none was completed.
        stopped: "interrupted" if the user ended the search early, else None.
    """

    trials: tuple[TrialRecord, ...]
    best: TrialRecord | None
    stopped: str | None
    _objective: Objective
    _space: Mapping[str, Domain]
    _trainer: Trainer
    _model: TrainedModel | None

    @property
    def best_model(self) -> TrainedModel:
        """The trained model of the best trial, which is used like the result of any fit.

        If the validation keeps the best weights by the search's metric, the model has those.

        Raises:
            ParameterError: No trial was completed.
        """
        if self._model is None:
            raise self._nothing()
        return self._model

    @property
    def best_trainer(self) -> Trainer:
        """The trainer with the values of the best trial, to train once more, on all data for example.

        Raises:
            ParameterError: No trial was completed.
        """
        if self.best is None:
            raise self._nothing()
        return trainer_of(self._trainer, self._space, self.best.arguments)

    @property
    def higher_is_better(self) -> bool:
        """True if more of the search's metric is better."""
        return self._objective.higher

    def rows(self) -> list[dict[str, Any]]:
        """Return the table as one mapping for each trial.

        The keys are "trial", the names of the space, the names of the metrics (the one that was
        sought first), "status", "epochs", "iterations", "seconds" and "reason". A value that is
        missing is None.
        """
        names = dict.fromkeys(
            [self._objective.metric, *(name for one in self.trials for name in one.metrics)]
        )
        return [
            {
                "trial": one.number,
                **one.arguments,
                **{name: one.metrics.get(name) for name in names},
                "status": one.status,
                "epochs": one.epochs,
                "iterations": one.iterations,
                "seconds": one.seconds,
                "reason": one.reason,
            }
            for one in self.trials
        ]

    def to_pandas(self) -> pandas.DataFrame:
        """Return the table of :meth:`rows` as a pandas DataFrame, with the trials as its index."""
        import pandas as pd

        return pd.DataFrame(self.rows()).set_index("trial")

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw parallel coordinates, and return the figure, which a notebook shows.

        Each trial is a line through its values to its metric.

        A line is coloured by the metric, and the best one is thick. Pruned trials are dashed, and
        failed ones are grey. It needs the extra ``plots``.

        Args:
            path: The file to write as well; its suffix (.png, .svg, .pdf, ...) is the format.

        Returns:
            The figure of matplotlib, to be changed or saved again.

        Raises:
            ParameterError: The extra is not installed.
        """
        return plot_trials(self.trials, self._space, self._objective, path)

    def __repr__(self) -> str:
        found = "none completed"
        if self.best is not None:
            found = (
                f"best {self._objective.metric} {self.best.value:.4g} in trial {self.best.number}"
            )
        return f"<sparkdl.tune.SearchResult: {counted(len(self.trials), 'trial')}, {found}>"

    def _repr_html_(self) -> str:
        """Return the view in a notebook: the table, the best trials first."""
        metric = self._objective.metric
        table = self.to_pandas().sort_values(metric, ascending=not self._objective.higher)
        return str(table.to_html())

    def _nothing(self) -> ParameterError:
        reason = next((one.reason for one in self.trials if one.status == FAILED), "")
        return ParameterError(
            "no trial was completed, so there is no best one"
            + (f"; the first one that failed says: {reason}" if reason else ".")
        )
