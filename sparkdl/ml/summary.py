"""The summary of a training, under the names that pyspark.ml's summaries have."""

from __future__ import annotations

from dataclasses import dataclass

from sparkdl.loop.history import History


@dataclass(frozen=True)
class TorchTrainingSummary:
    """The curves of a training. It is saved with the model.

    Attributes:
        history: The whole history: every iteration, validation and timing.
    """

    history: History

    @property
    def objectiveHistory(self) -> list[float]:
        """The loss of each iteration."""
        return self.history.losses

    @property
    def epochLosses(self) -> list[float]:
        """The mean loss of each epoch."""
        return [float(epoch["loss"]) for epoch in self.history.epochs()]

    @property
    def validationMetrics(self) -> dict[str, list[float]]:
        """The value of each metric at each validation, by the name of the metric."""
        found: dict[str, list[float]] = {}
        for validation in self.history.validations:
            for name, value in validation["metrics"].items():
                found.setdefault(name, []).append(value)
        return found

    @property
    def totalIterations(self) -> int:
        """The number of iterations."""
        return len(self.history)

    def __repr__(self) -> str:
        return f"<TorchTrainingSummary: {self.history.summary()}>"

    def _repr_html_(self) -> str:
        """Return the view in a notebook."""
        return self.history._repr_html_()
