"""The result of a search: the table of its trials, their picture, and the best model."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkdl.codec.describe import figure_class
from sparkdl.codec.files import path_here
from sparkdl.errors import ParameterError, counted
from sparkdl.infer.model import TrainedModel
from sparkdl.train.trainer import Trainer
from sparkdl.tune.arguments import trainer_of
from sparkdl.tune.record import FAILED, Objective, TrialRecord
from sparkdl.tune.space import Choice, Domain, Shown

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

_GREY = "#b8b8b8"
_WIDTH = 1.9
"""The inches between two axes."""


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
        return _plot_trials(self.trials, self._space, self._objective, path)

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


def _plot_trials(
    records: Sequence[TrialRecord],
    space: Mapping[str, Domain],
    objective: Objective,
    path: str | os.PathLike[str] | None = None,
) -> Figure:
    """Draw parallel coordinates, return the figure, and write it to ``path`` if there is one.

    There is an axis for each argument, and the metric is at the right. A line is a trial, coloured by
    its value; the best one is thick. Pruned trials are dashed, and failed ones are grey and have no
    value.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize

        make_figure = figure_class()
    except ImportError:
        raise ParameterError(
            "the plot needs a library that is not installed: pip install matplotlib (the extra "
            '"plots")'
        ) from None
    values = [record.value for record in records if math.isfinite(record.value)]
    low, high = min(values, default=0.0), max(values, default=1.0)
    axes_of = {name: _Scale.of(domain) for name, domain in space.items()}
    last = _Scale(low, high if high > low else low + 1)
    figure = make_figure(figsize=(2.5 + _WIDTH * len(space), 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    colours, shade = colormaps["viridis" if objective.higher else "viridis_r"], Normalize(low, high)
    best: TrialRecord | None = None
    for record in records:
        best = record if objective.is_better(record, best) else best
    for record in records:
        places = [axes_of[name].place(record.arguments[name]) for name in space]
        known = math.isfinite(record.value)
        places.append(last.place(record.value) if known else math.nan)
        axes.plot(
            range(len(places)),
            places,
            color=colours(shade(record.value)) if known else _GREY,
            lw=3 if record is best else 1.2,
            ls=":" if record.status == FAILED else "-" if record.status == "completed" else "--",
            alpha=1 if record is best else 0.7,
            zorder=3 if record is best else 2,
        )
    for number, scale in enumerate([*axes_of.values(), last]):
        _draw_axis(axes, number, scale)
    axes.set_xticks(range(len(space) + 1), [*space, objective.metric])
    axes.tick_params(axis="x", length=0)
    axes.set_yticks([])
    axes.set_ylim(-0.05, 1.05)
    axes.set_xlim(-0.4, len(space) + 0.4)
    for side in axes.spines.values():
        side.set_visible(False)
    figure.colorbar(ScalarMappable(shade, colours), ax=axes, label=objective.metric, pad=0.02)
    if path is not None:
        figure.savefig(path_here(path))
    return figure


class _Scale:
    """The scale of an axis: where a value lies on it, from 0 to 1, and the ticks."""

    def __init__(
        self, low: float, high: float, log: bool = False, labels: Sequence[Shown] = ()
    ) -> None:
        self._low, self._high, self._log, self._labels = low, high, log, labels

    @staticmethod
    def of(domain: Domain) -> _Scale:
        """Return the scale of a domain."""
        if isinstance(domain, Choice):
            return _Scale(0, max(1, len(domain.labels) - 1), labels=domain.labels)
        found: Any = domain
        return _Scale(found.low, found.high, found.log)

    def place(self, value: Any) -> float:
        """Return the place of a value."""
        if self._labels:
            value = next(n for n, label in enumerate(self._labels) if repr(label) == repr(value))
            if len(self._labels) == 1:
                return 0.5
        if self._log:
            return math.log(value / self._low) / math.log(self._high / self._low)
        return float((value - self._low) / (self._high - self._low))

    def ticks(self) -> list[tuple[float, str]]:
        """Return the places and the texts of the ticks."""
        if self._labels:
            return [(self.place(label), _short(str(label))) for label in self._labels]
        if self._log:
            ratio = self._high / self._low
            found = [self._low * ratio ** (n / 4) for n in range(5)]
        else:
            found = [self._low + (self._high - self._low) * n / 4 for n in range(5)]
        return [(n / 4, f"{value:.3g}") for n, value in enumerate(found)]


def _draw_axis(axes: Any, number: int, scale: _Scale) -> None:
    axes.axvline(number, color="black", lw=0.8, zorder=1)
    for place, text in scale.ticks():
        axes.annotate(
            text,
            (number, place),
            xytext=(-4, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=8,
            bbox={"boxstyle": "round,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.7},
            zorder=4,
        )


def _short(text: str) -> str:
    """Return a label without the modules of classes and functions, and not too long."""
    text = re.sub(r"[\w.]+:(?=\w)", "", text)
    return text if len(text) <= 24 else f"{text[:23]}…"
