"""The fits of a grid of Params, over samples that are placed once."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Protocol

from pyspark.sql import DataFrame

from sparkdl.infer.model import TrainedModel
from sparkdl.ml.model import TorchModel
from sparkdl.ml.plan import FitPlan
from sparkdl.train.placed_samples import PlacedSamples, SharedSamples


class GridPoint(Protocol):
    """An estimator with the Params of one point."""

    def _plan(self) -> FitPlan: ...

    def _fitted(self, trained: TrainedModel, labels: Sequence[str]) -> TorchModel: ...


class _Group:
    """Points of a grid that read the data alike, and their samples, once the first of them starts."""

    def __init__(self, plan: FitPlan) -> None:
        self.plan = plan
        self.validation: DataFrame | None = None
        self._lock = threading.Lock()
        self._samples: SharedSamples | None = None

    def samples(self, dataset: DataFrame) -> SharedSamples:
        """Return the samples; other threads wait until they are in place."""
        with self._lock:
            if self._samples is None:
                training, self.validation = self.plan.rows(dataset)
                trainer = self.plan.trainer_with(self.validation)
                self._samples = PlacedSamples.of(trainer, training)
            return self._samples

    def close(self) -> None:
        """Give the samples back."""
        with self._lock:
            if self._samples is not None:
                self._samples.close()


class GridFits(Iterator[tuple[int, TorchModel]]):
    """Fits one point of a grid at each ``next``, which several threads may call at once.

    The samples are given back when the last fit has ended, or when the iterator is dropped before.
    """

    def __init__(self, points: Sequence[GridPoint], dataset: DataFrame) -> None:
        """Create the iterator. Nothing is read until the first ``next``."""
        self._points, self._dataset = points, dataset
        self._lock = threading.Lock()
        self._next = self._running = 0
        self._plans = [point._plan() for point in points]
        groups: list[_Group] = []
        self._group_of = []
        for plan in self._plans:
            alike = [group for group in groups if group.plan.same_reading(plan)]
            if not alike:
                alike = [_Group(plan)]
                groups += alike
            self._group_of.append(alike[0])
        self._groups = groups
        self._dropped = weakref.finalize(self, _close_later, groups)
        self._dropped.atexit = False

    def __next__(self) -> tuple[int, TorchModel]:
        with self._lock:
            index = self._next
            if index >= len(self._points):
                raise StopIteration
            self._next += 1
            self._running += 1
        try:
            point, plan, group = self._points[index], self._plans[index], self._group_of[index]
            with plan.explaining_no_rows():
                samples = group.samples(self._dataset)
                trained = plan.trainer_with(group.validation).fit(samples)
            return index, point._fitted(trained, plan.label_names(self._dataset))
        finally:
            with self._lock:
                self._running -= 1
                ended = not self._running and self._next >= len(self._points)
            if ended:
                self._dropped.detach()
                _close(self._groups)


def _close(groups: Sequence[_Group]) -> None:
    for group in groups:
        group.close()


def _close_later(groups: Sequence[_Group]) -> None:
    """Close in a thread: the garbage collector may be at work in the middle of a call to Spark."""
    threading.Thread(target=_close, args=(groups,), name="sparkdl-give-back").start()
