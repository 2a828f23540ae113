"""The result of a search: the table of its trials, its page, and the best model."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.codec.charts import Page, ParallelCoordinates
from sparkdl.codec.files import path_here
from sparkdl.errors import ParameterError, counted
from sparkdl.infer.model import TrainedModel
from sparkdl.loop.history_tables import duration
from sparkdl.plain import is_number
from sparkdl.train.trainer import Trainer
from sparkdl.tune.arguments import SearchSpec
from sparkdl.tune.folder import FAILED, Objective, TrialRecord

if TYPE_CHECKING:
    import pandas


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
    _spec: SearchSpec
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
        return self._spec.trainer_of(self.best.arguments)

    @property
    def higher_is_better(self) -> bool:
        """True if more of the search's metric is better."""
        return self._spec.objective.higher

    def rows(self) -> list[dict[str, Any]]:
        """Return the table as one mapping for each trial.

        The keys are "trial", the names of the space, the names of the metrics (the one that was
        sought first), "status", "epochs", "iterations", "seconds" and "reason". A value that is
        missing is None.
        """
        names = dict.fromkeys(
            [self._spec.objective.metric, *(name for one in self.trials for name in one.metrics)]
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

    def report(self, path: str | os.PathLike[str], title: str = "Search") -> Path:
        """Write a page: trials as parallel coordinates, the best of them, and what mattered.

        It is one file of HTML that needs no network. The function needs the extra ``report``.

        Args:
            path: The file to write, such as ``search.html``.
            title: The heading of the page.

        Returns:
            The path.

        Raises:
            ParameterError: The extra is not installed.
        """
        return search_page(self.trials, self._spec.objective, title).save(path_here(path))

    def __repr__(self) -> str:
        found = "none completed"
        if self.best is not None:
            metric = self._spec.objective.metric
            found = f"best {metric} {self.best.value:.4g} in trial {self.best.number}"
        return f"<sparkdl.tune.SearchResult: {counted(len(self.trials), 'trial')}, {found}>"

    def _repr_html_(self) -> str:
        """Return the view in a notebook: the table, the best trials first."""
        table = self.to_pandas()
        metric, higher = self._spec.objective.metric, self.higher_is_better
        return str(table.sort_values(metric, ascending=not higher).to_html())

    def _nothing(self) -> ParameterError:
        reason = next((one.reason for one in self.trials if one.status == FAILED), "")
        return ParameterError(
            "no trial was completed, so there is no best one"
            + (f"; the first one that failed says: {reason}" if reason else ".")
        )


BEST = 10
"""The number of trials in the table of the best ones."""


def search_page(records: Sequence[TrialRecord], objective: Objective, title: str) -> Page:
    """Return the page of a search."""
    page, metric = Page(title), objective.metric
    done = [one for one in records if math.isfinite(one.value)]
    done.sort(key=lambda one: (objective.sign * one.value, one.number))
    names = list(dict.fromkeys(name for one in records for name in one.arguments))
    states = Counter(one.status for one in records)
    best: TrialRecord | None = None
    for one in records:
        best = one if objective.is_better(one, best) else best
    page.figures(
        {
            **({f"{metric} of trial {best.number}, the best": f"{best.value:.5g}"} if best else {}),
            **{status: f"{count:,}" for status, count in states.items()},
            "time of all trials": duration(sum(one.seconds for one in records)),
        }
    )
    page.heading(
        "Trials", "A line is a trial, and the thick one is the best; hover for its values."
    )
    columns = {name: [one.arguments.get(name) for one in done] for name in names}
    columns[metric] = [one.value for one in done]
    if done:
        places, ticks = zip(*map(_scale, columns.values()), strict=True)
        rows = list(zip(*columns.values(), strict=True))
        page.chart(
            ParallelCoordinates(
                names=list(columns),
                ticks=list(ticks),
                places=[[*row] for row in zip(*places, strict=True)],
                texts=[[*map(_short, row)] for row in rows],
                shades=[-objective.sign * one.value for one in done],
                best=None if best is None else done.index(best),
            )
        )
    page.heading("The best trials")
    cells = [
        [
            *(str(one.number), f"{one.value:.5g}", *(_short(columns[n][i]) for n in names)),
            *(str(one.epochs), duration(one.seconds), one.status),
        ]
        for i, one in enumerate(done[:BEST])
    ]
    page.table([["trial", metric, *names, "epochs", "time", "status"], *cells])
    shares = {name: _importance(columns[name], [one.value for one in done]) for name in names}
    page.heading(
        "Which arguments mattered",
        f"The share of the variance of {metric} that an argument explains by itself, corrected for "
        "chance. It says little of few trials, and nothing of arguments that matter together only.",
    )
    page.table(
        [[name, f"{share:.0%}"] for name, share in sorted(shares.items(), key=lambda x: -x[1])]
    )
    failed = [[str(one.number), one.status, one.reason] for one in records if one.status == FAILED]
    if failed:
        page.heading("Trials that failed")
        page.table([["trial", "status", "reason"], *failed[:100]])
    return page


def _importance(keys: Sequence[Any], measured: Sequence[float]) -> float:
    """Return the share of the variance of values that is between groups of arguments (epsilon squared).

    Numbers are grouped into quarters by their order.
    """
    values = np.array(measured)
    kinds = set(map(repr, keys))
    if len(kinds) > 4 and all(is_number(key) for key in keys):
        order = np.argsort(np.argsort(np.array(keys, np.float64), kind="stable"), kind="stable")
        labels = order * 4 // len(keys)
    else:
        labels = np.array([sorted(kinds).index(repr(key)) for key in keys])
    groups = [values[labels == label] for label in np.unique(labels)]
    within = sum(float(((group - group.mean()) ** 2).sum()) for group in groups)
    whole = float(((values - values.mean()) ** 2).sum()) if len(values) else 0.0
    free = len(values) - len(groups)
    if whole <= 0 or free <= 0:
        return 0.0
    return max(0.0, (whole - within - (len(groups) - 1) * within / free) / whole)


def _scale(values: Sequence[Any]) -> tuple[list[float], list[tuple[float, str]]]:
    """Return where values lie on an axis, from 0 to 1, and the places and texts of its ticks."""
    labels = sorted(dict.fromkeys(map(_short, values)), key=_by_number)
    if len(labels) < 5 or not all(is_number(value) for value in values):
        at = {label: (n + 0.5) / len(labels) for n, label in enumerate(labels)}
        return [at[_short(value)] for value in values], [
            (at[label], label) for label in labels[:40]
        ]
    ends, steps = np.array([min(values), max(values)], np.float64), np.linspace(0, 1, 5)
    log = ends[0] > 0 and ends[1] > 30 * ends[0]
    low, high = np.log(ends) if log else ends
    numbers = np.log(values) if log else np.array(values, np.float64)
    ticks = np.exp(low + (high - low) * steps) if log else low + (high - low) * steps
    texts = [(float(step), f"{tick:.3g}") for step, tick in zip(steps, ticks, strict=True)]
    return ((numbers - low) / (high - low)).tolist(), texts


def _by_number(text: str) -> tuple[float, str]:
    try:
        return float(text), text
    except ValueError:
        return math.inf, text


def _short(value: Any) -> str:
    """Return a value without the modules of classes and functions, and not too long."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = re.sub(r"[\w.]+:(?=\w)", "", str(value))
    return text if len(text) <= 24 else f"{text[:23]}…"
