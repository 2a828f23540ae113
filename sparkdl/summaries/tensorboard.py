"""Scalars and histograms for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sparkdl.errors import optional_library
from sparkdl.loop.triggers import Every, Trigger
from sparkdl.slices.update import EDGES, Histogram
from sparkdl.summaries.base import Summaries, check_writable

_FLUSH_SECONDS = 5


class TensorBoard(Summaries):
    """A callback that writes event files into a folder; ``tensorboard --logdir LOG_DIR`` shows them.

    It shows what :class:`Summaries` does. The step in TensorBoard is the number of iterations. Values
    are on disk after 5 seconds, at the end of an epoch, and when the fit ends. If earlier fits wrote
    into the folder, TensorBoard hides what they wrote after the iteration that this fit continues
    from, or everything if it begins anew. The callback needs the extra ``tensorboard``.

    Args:
        log_dir: The folder.
        every: The trigger that writes scalars; None is every iteration.

    Raises:
        ParameterError: The extra is not installed; or, when the fit starts, the folder cannot be
            written.
    """

    def __init__(self, log_dir: str | Path, every: Trigger | None = None) -> None:
        super().__init__(EventFiles(log_dir), Every(1) if every is None else every)


class EventFiles:
    """A writer of TensorBoard's event files into a folder."""

    def __init__(self, log_dir: str | Path) -> None:
        events = optional_library(
            "torch.utils.tensorboard", "TensorBoard", "tensorboard", "tensorboard"
        )
        self._new_events = events.SummaryWriter
        there = "://" in str(log_dir)  # the callback may run where the working directory is another
        self._log_dir = str(log_dir if there else Path(log_dir).absolute())
        self._events: Any = None

    def open(self, params: Mapping[str, str], iteration: int) -> None:
        if "://" not in self._log_dir:  # otherwise TensorBoard's file systems handle it
            check_writable("TensorBoard", self._log_dir, Path(self._log_dir))
        # TensorBoard hides what earlier writers wrote from purge_step on.
        self._events = self._new_events(
            self._log_dir, purge_step=iteration + 1, flush_secs=_FLUSH_SECONDS
        )

    def scalars(self, values: Mapping[str, float], iteration: int) -> None:
        for name, value in values.items():
            self._events.add_scalar(name, value, iteration)

    def histograms(self, values: Mapping[str, Histogram], iteration: int) -> None:
        for name, histogram in values.items():
            found = np.flatnonzero(histogram.counts)
            if len(found) == 0:
                continue  # no finite value
            bins = slice(found[0], found[-1] + 1)
            self._events.add_histogram_raw(
                name,
                min=histogram.smallest,
                max=histogram.largest,
                num=int(histogram.counts.sum()),
                sum=histogram.total,
                sum_squares=histogram.squares,
                # Right borders; the last one may be infinite, which TensorBoard cannot draw.
                bucket_limits=np.minimum(EDGES[1:][bins], np.finfo(np.float64).max).tolist(),
                bucket_counts=histogram.counts[bins].tolist(),
                global_step=iteration,
            )

    def flush(self) -> None:
        self._events.flush()

    def close(self, status: str) -> None:
        if self._events is not None:
            self._events.close()
