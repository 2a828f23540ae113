"""The common parts of the summaries: a history of their own, a trigger, and files that appear whole."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sparkdl.checkpoint.resume import history_in
from sparkdl.errors import ParameterError
from sparkdl.loop.callbacks import Callback
from sparkdl.loop.history import History
from sparkdl.loop.state import TrainState
from sparkdl.loop.triggers import Trigger, no_trigger

if TYPE_CHECKING:
    from sparkdl.train.trainer import Trainer


class Recorder(Callback):
    """A callback that records every iteration, and calls :meth:`write` when ``every`` fires.

    If an iteration at which it fires is followed by a validation, ``write`` is called once more
    after that. It is also called at the end of the fit in any case.

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
        self.history = History()
        """The history of the run, including the time before this fit: what this callback recorded
        itself, else the history of the checkpoint that the fit continues from."""

    def write(self, trainer: Trainer, state: TrainState) -> None:
        """Show the content of :attr:`history`; subclasses define it."""
        raise TypeError(f"{type(self).__name__} does not define write(trainer, state)")

    def on_fit_start(self, trainer: Trainer, state: TrainState) -> None:
        if not state.iteration or not _same(self._last, state):
            self.history = _until(state)
        self._last, self._due = state, False

    def on_iteration_end(self, trainer: Trainer, state: TrainState) -> None:
        self.history.append(state, self._last.epoch + 1)
        self._due = self._every(self._last, state)
        self._last = state
        if self._due:
            self.write(trainer, state)

    def on_validation_end(self, trainer: Trainer, state: TrainState) -> None:
        self.history.append_validation(state.validations[-1])
        if self._due:
            self.write(trainer, state)

    def on_fit_end(self, trainer: Trainer, state: TrainState) -> None:
        self.write(trainer, state)


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
    """Raise an error if no file can be written in ``folder``, which is created.

    Args:
        what: The name of the summary, for the message.
        named: The path that the user passed to it.
        folder: The folder to check.

    Raises:
        ParameterError: The folder cannot be created or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ParameterError(
            f'{what}("{named}"): no file can be written there ({error.strerror}: {error.filename}). '
            "Give a path in a folder that you may write to."
        ) from error


def extra_needed(what: str, extra: str, library: str) -> ParameterError:
    """Return the error for a library that is not installed.

    It is raised when the summary is created, not during the training.

    Args:
        what: The name of the summary.
        extra: The extra of sparkdl that has the library.
        library: The name of the library for pip.
    """
    return ParameterError(
        f'{what} needs a library that is not installed: pip install {library} (the extra "{extra}")'
    )


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
