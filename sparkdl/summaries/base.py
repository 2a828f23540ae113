"""The common parts of the summaries: when they write, what they show, and files that appear whole."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sparkdl.checkpoint.resume import history_in
from sparkdl.codec.describe import plain_parameters
from sparkdl.errors import ParameterError
from sparkdl.loop.callbacks import Callback
from sparkdl.loop.history import History
from sparkdl.loop.state import TrainState
from sparkdl.loop.triggers import Trigger, no_trigger
from sparkdl.slices.update import Histogram

if TYPE_CHECKING:
    from sparkdl.train.trainer import Trainer


class PeriodicCallback(Callback):
    """A callback that calls :meth:`write` when ``every`` fires, and at the end of the fit in any case.

    If an iteration at which it fires is followed by a validation, ``write`` is called once more
    after that.

    Raises:
        ParameterError: ``every`` is not a trigger.
    """

    def __init__(self, every: Trigger) -> None:
        if not isinstance(every, Trigger):
            place = f"{type(self).__name__}(every={{}})"
            raise ParameterError(no_trigger(place, every, "sparkdl.every_epoch()"))
        self._every = every
        self._last = TrainState()
        self._due = False

    def write(self, trainer: Trainer, state: TrainState) -> None:
        """Show the run up to ``state``; subclasses define it."""
        raise TypeError(f"{type(self).__name__} does not define write(trainer, state)")

    def on_fit_start(self, trainer: Trainer, state: TrainState) -> None:
        self._last, self._due = state, False

    def on_iteration_end(self, trainer: Trainer, state: TrainState) -> None:
        self._due = self._every(self._last, state)
        self._last = state
        if self._due:
            self.write(trainer, state)

    def on_validation_end(self, trainer: Trainer, state: TrainState) -> None:
        if self._due:
            self.write(trainer, state)

    def on_fit_end(self, trainer: Trainer, state: TrainState) -> None:
        self.write(trainer, state)


class Recorder(PeriodicCallback):
    """A periodic callback that records every iteration and every validation."""

    def __init__(self, every: Trigger) -> None:
        super().__init__(every)
        self.history = History()
        """The history of the run, including the time before this fit: what this callback recorded
        itself, else the history of the checkpoint that the fit continues from."""

    def on_fit_start(self, trainer: Trainer, state: TrainState) -> None:
        if not state.iteration or not _same(self._last, state):
            self.history = _until(state)
        self.history.note_facts({"Arguments": [[*pair] for pair in trainer.changed().items()]})
        super().on_fit_start(trainer, state)

    def on_iteration_end(self, trainer: Trainer, state: TrainState) -> None:
        self.history.append(state, self._last.epoch + 1)
        super().on_iteration_end(trainer, state)

    def on_validation_end(self, trainer: Trainer, state: TrainState) -> None:
        self.history.append_validation(state.validations[-1])
        super().on_validation_end(trainer, state)


class SummaryWriter(Protocol):
    """The interface of a place where figures go, such as a folder or a server.

    :class:`Summaries` calls it, from one thread, and opens it again for the next fit. It must be
    possible to pickle a writer that has not been opened.
    """

    def open(self, params: Mapping[str, str], iteration: int) -> None:
        """Begin to show a fit.

        Args:
            params: The trainer's plain values as text, secrets hidden
                (:func:`sparkdl.codec.describe.plain_parameters`).
            iteration: The iteration after which the fit begins. What an earlier fit showed of later
                iterations is out of date.

        Raises:
            ParameterError: Nothing can be written there.
        """

    def scalars(self, values: Mapping[str, float], iteration: int) -> None:
        """Show numbers by name."""

    def histograms(self, values: Mapping[str, Histogram], iteration: int) -> None:
        """Show the distributions of weights and gradients by name."""

    def flush(self) -> None:
        """Write what is buffered. It is called at the end of an epoch."""

    def close(self, status: str) -> None:
        """End what :meth:`open` began.

        Args:
            status: ``"finished"``, or ``"failed"`` if the fit did not reach its end; then the call
                comes when the callback is used again or deleted, or when the program exits. It
                comes even if :meth:`open` raised an error.
        """


class Summaries(PeriodicCallback):
    """A callback that shows the figures of a run with one writer.

    - When ``every`` fires, and at the end: ``loss``, ``learning_rate`` (``learning_rate/0`` and so
      on with several parameter groups), ``samples_per_second`` since the last time,
      ``gradient_norm``, ``loss_scale``, ``bytes_sent`` between nodes, and ``timings/ACTIVITY`` in
      seconds.
    - After each validation: ``validation/METRIC``.
    - At each trigger of ``Trainer.histograms``: ``weights/NAME`` and ``gradients/NAME``.

    Args:
        writer: The place where the figures go.
        every: The trigger for the figures of an iteration.
    """

    def __init__(self, writer: SummaryWriter, every: Trigger) -> None:
        super().__init__(every)
        self._writer = writer
        self._written = TrainState()
        self._failed: weakref.finalize[..., Any] | None = None

    def write(self, trainer: Trainer, state: TrainState) -> None:
        if state.iteration > self._written.iteration:
            self._writer.scalars(dict(scalars(self._written, state)), state.iteration)
            self._written = state

    def on_fit_start(self, trainer: Trainer, state: TrainState) -> None:
        super().on_fit_start(trainer, state)
        if self._failed is not None:
            self._failed()
        self._written = state
        # A callback does not learn that a fit has failed.
        self._failed = weakref.finalize(self, self._writer.close, "failed")
        self._writer.open(plain_parameters(trainer, (Trigger,)), state.iteration)

    def on_iteration_end(self, trainer: Trainer, state: TrainState) -> None:
        if state.histograms is not None and state.histograms is not self._last.histograms:
            self._writer.histograms(state.histograms, state.iteration)
        super().on_iteration_end(trainer, state)

    def on_validation_end(self, trainer: Trainer, state: TrainState) -> None:
        super().on_validation_end(trainer, state)
        last = state.validations[-1]
        values = {f"validation/{name}": value for name, value in last.metrics.items()}
        self._writer.scalars(values, last.iteration)

    def on_epoch_end(self, trainer: Trainer, state: TrainState) -> None:
        self._writer.flush()

    def on_fit_end(self, trainer: Trainer, state: TrainState) -> None:
        super().on_fit_end(trainer, state)
        if self._failed is not None:
            self._failed.detach()
            self._failed = None
        self._writer.close("finished")


def _same(last: TrainState, state: TrainState) -> bool:
    """Return whether a run continues from the end of the last fit, as with ``partial_fit``."""
    return (last.iteration, last.seconds) == (state.iteration, state.seconds)


def _until(state: TrainState) -> History:
    """Return the history before a fit that continues from ``state``, as far as it is known."""
    if state.iteration and state.checkpoint is not None:
        history = history_in(state.checkpoint)
        if [row["iteration"] for row in history.last(1)] == [state.iteration]:
            return history
    return History.after(state)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path beside ``path``; its file is renamed to ``path`` when the block succeeds.

    So a reader never sees half a file, and a failure leaves the previous file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.stem}.{secrets.token_hex(8)}.part{path.suffix}")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def check_replaceable(what: str, path: Path) -> None:
    """Raise :class:`ParameterError` if :func:`replacing` cannot write ``path``; create its folder."""
    if path.is_dir():
        raise ParameterError(f'{what}("{path}") is a folder: give the name of a file in it.')
    check_writable(what, path, path.parent)


def check_writable(what: str, named: str | Path, folder: Path) -> None:
    """Raise ParameterError if no file can be written in ``folder``, which is created."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ParameterError(
            f'{what}("{named}"): no file can be written there ({error.strerror}: {error.filename}). '
            "Give a path in a folder that you may write to."
        ) from error


def scalars(before: TrainState, state: TrainState) -> Iterator[tuple[str, float]]:
    """Yield the names and values to show for an iteration; ``before`` is the state shown last."""
    yield "loss", state.loss
    for name, value in state.losses.items():
        yield f"losses/{name}", value
    several = len(state.learning_rates) > 1
    for i, rate in enumerate(state.learning_rates):
        yield (f"learning_rate/{i}" if several else "learning_rate"), rate
    seconds = state.seconds - before.seconds
    if seconds > 0:
        yield "samples_per_second", (state.samples - before.samples) / seconds
    if state.gradient_norm is not None:
        yield "gradient_norm", state.gradient_norm
    yield "loss_scale", state.loss_scale
    if state.bytes_sent:
        yield "bytes_sent", state.bytes_sent
    for activity, taken in state.timings.items():
        yield f"timings/{activity}", taken
