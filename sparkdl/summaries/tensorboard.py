"""Scalars and histograms for TensorBoard."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.errors import ParameterError
from sparkdl.loop.callbacks import Callback
from sparkdl.loop.state import TrainState
from sparkdl.loop.triggers import Every, Trigger, no_trigger
from sparkdl.slices.histogram import EDGES, Histogram
from sparkdl.summaries.base import check_writable, extra_needed, scalars

if TYPE_CHECKING:
    from sparkdl.train.trainer import Trainer

_FLUSH_SECONDS = 5


class TensorBoard(Callback):
    """A callback that writes event files into a folder; ``tensorboard --logdir LOG_DIR`` shows them.

    - When ``every`` fires: ``loss``, ``learning_rate`` (``learning_rate/0`` and so on with several
      parameter groups), ``samples_per_second`` since the last time, ``gradient_norm``, ``loss_scale``,
      ``bytes_sent`` between nodes, and ``timings/ACTIVITY`` in seconds.
    - After each validation: ``validation/METRIC``.
    - At each trigger of ``Trainer.histograms``: ``weights/NAME`` and ``gradients/NAME``.

    The step in TensorBoard is the number of iterations. Values are on disk after 5 seconds, at the
    end of an epoch, and when the fit ends. If earlier fits wrote into the folder, TensorBoard hides
    what they wrote after the iteration that this fit continues from, or everything if it begins
    anew. The callback needs the extra ``tensorboard``.

    Args:
        log_dir: The folder.
        every: The trigger that writes scalars; None is every iteration.

    Raises:
        ParameterError: The extra is not installed; or, when the fit starts, the folder cannot be
            written.
    """

    def __init__(self, log_dir: str | Path, every: Trigger | None = None) -> None:
        every = Every(1) if every is None else every
        if not isinstance(every, Trigger):
            place = "TensorBoard(every={})"
            raise ParameterError(no_trigger(place, every, "sparkdl.every(10)"))
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise extra_needed("TensorBoard", "tensorboard", "tensorboard") from None
        self._new_writer = SummaryWriter
        self._log_dir = str(log_dir)
        self._every = every
        self._writer: Any = None
        self._close: Any = None
        self._last = self._written = TrainState()

    def on_fit_start(self, trainer: Trainer, state: TrainState) -> None:
        self._open(state)

    def on_iteration_end(self, trainer: Trainer, state: TrainState) -> None:
        if self._every(self._last, state):
            for name, value in scalars(self._written, state):
                self._writer.add_scalar(name, value, state.iteration)
            self._written = state
        if state.histograms is not None and state.histograms is not self._last.histograms:
            for name, histogram in state.histograms.items():
                self._add_histogram(name, histogram, state.iteration)
        self._last = state

    def on_validation_end(self, trainer: Trainer, state: TrainState) -> None:
        validated = state.validations[-1]
        for name, value in validated.metrics.items():
            self._writer.add_scalar(f"validation/{name}", value, validated.iteration)

    def on_epoch_end(self, trainer: Trainer, state: TrainState) -> None:
        self._writer.flush()

    def on_fit_end(self, trainer: Trainer, state: TrainState) -> None:
        self._close()

    def _open(self, state: TrainState) -> None:
        if self._close is not None:
            self._close()
        if "://" not in self._log_dir:  # otherwise TensorBoard's file systems handle it
            check_writable("TensorBoard", self._log_dir, Path(self._log_dir))
        # TensorBoard hides what earlier writers wrote from purge_step on.
        purge = state.iteration + 1
        self._writer = self._new_writer(self._log_dir, purge_step=purge, flush_secs=_FLUSH_SECONDS)
        # A callback is not told that a fit has failed; the writer closes at the interpreter's end.
        self._close = weakref.finalize(self, self._writer.close)
        self._last = self._written = state

    def _add_histogram(self, name: str, histogram: Histogram, step: int) -> None:
        found = np.flatnonzero(histogram.counts)
        if len(found) == 0:
            return  # no finite value
        bins = slice(found[0], found[-1] + 1)
        self._writer.add_histogram_raw(
            name,
            min=histogram.smallest,
            max=histogram.largest,
            num=int(histogram.counts.sum()),
            sum=histogram.total,
            sum_squares=histogram.squares,
            # Right borders; the last one may be infinite, which TensorBoard cannot draw.
            bucket_limits=np.minimum(EDGES[1:][bins], np.finfo(np.float64).max).tolist(),
            bucket_counts=histogram.counts[bins].tolist(),
            global_step=step,
        )
