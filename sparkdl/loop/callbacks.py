"""Callbacks: hooks for the events of a training, which do nothing by default."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from sparkdl.loop.state import TrainState


class StopTraining(Exception):
    """The exception with which a callback ends the training: ``fit`` returns the current model.

    The other callbacks still get the event, and the current iteration is completed (in a gang also
    those that its ranks have begun). ``history.stopped`` is "callback", or "callback: " and the
    argument of this exception.
    """


class Callback:
    """Base class of callbacks: override the hooks that you need.

    Each hook gets the trainer and an immutable state. The ranks of a gang may be some iterations
    ahead of the hooks, which are called for each iteration in turn. :class:`sparkdl.StopTraining`
    ends the training normally; any other exception of a hook makes the fit fail.
    """

    def on_fit_start(self, trainer: Any, state: TrainState) -> None:
        """Handle the start: samples, replicas and state are in place, and no iteration has run."""

    def on_epoch_start(self, trainer: Any, state: TrainState) -> None:
        """Handle the start of an epoch, before its first iteration."""

    def on_iteration_start(self, trainer: Any, state: TrainState) -> None:
        """Handle the start of an iteration, before its jobs are submitted."""

    def on_iteration_end(self, trainer: Any, state: TrainState) -> None:
        """Handle the end of an iteration: it is committed, and ``state`` counts it."""

    def on_epoch_end(self, trainer: Any, state: TrainState) -> None:
        """Handle the end of an epoch, after its last iteration."""

    def on_validation_end(self, trainer: Any, state: TrainState) -> None:
        """Handle the end of a validation, whose metrics are in ``state``."""

    def on_checkpoint(self, trainer: Any, state: TrainState) -> None:
        """Handle a checkpoint that has been committed."""

    def on_recovery(self, trainer: Any, state: TrainState) -> None:
        """Handle a recovery: state that was lost with an executor is restored, and the run
        continues from ``state``.

        No iteration is reported twice.
        """

    def on_fit_end(self, trainer: Any, state: TrainState) -> None:
        """Handle the end, after the last iteration is committed.

        It is not called if the fit fails or is interrupted a second time.
        """

    def on_result(self, trainer: Any, trained: Any) -> None:
        """Handle the result: the :class:`sparkdl.TrainedModel` that ``fit`` is about to return."""

    def for_search(self) -> Any:
        """Return the log of a search, which then takes the place of this callback in the trials.

        It has the methods of :class:`sparkdl.tune.search.SearchLog`. None, the default, leaves this
        callback in each trial.
        """
        return None


def tell_result(callbacks: Iterable[Callback], trainer: Any, trained: Any) -> None:
    """Call :meth:`Callback.on_result` of each callback; :class:`StopTraining` has no effect then."""
    for callback in callbacks:
        with contextlib.suppress(StopTraining):
            callback.on_result(trainer, trained)


_OF_EVERY_FIT: dict[type[Callback], Callable[[], Callback]] = {}
_ADDED = ContextVar("_ADDED", default=True)


def add_to_every_fit(kind: type[Callback], make: Callable[[], Callback]) -> None:
    """Give each fit of this process a new callback, unless its trainer has one of type ``kind``."""
    _OF_EVERY_FIT[kind] = make


def remove_from_every_fit(kind: type[Callback]) -> None:
    """End what :func:`add_to_every_fit` began for this type of callback, if it did."""
    _OF_EVERY_FIT.pop(kind, None)


def added_callbacks(own: Sequence[Callback]) -> Iterator[Callback]:
    """Yield a new callback of each type that every fit has and that is not in ``own``."""
    for kind, make in _OF_EVERY_FIT.items() if _ADDED.get() else ():
        if not any(isinstance(callback, kind) for callback in own):
            yield make()


@contextlib.contextmanager
def none_added() -> Iterator[None]:
    """Give fits in the block, in this thread, no callbacks but those of their trainers."""
    token = _ADDED.set(False)
    try:
        yield
    finally:
        _ADDED.reset(token)
