"""The progress of a run: a bar, in notebooks also curves; without either, lines in the log.

Before the first iteration one line says what the fit does, and for how long. Fits that run side by side
in this process show a number: "fit 2: ...".
"""

from __future__ import annotations

import contextlib
import html
import itertools
import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from weakref import WeakSet

from sparkdl.loop.callbacks import Callback
from sparkdl.loop.history import History
from sparkdl.loop.history_tables import curves
from sparkdl.loop.interrupt import interrupts_held
from sparkdl.loop.state import TrainState

logger = logging.getLogger("sparkdl")
LOG_SECONDS = 30.0
"""The interval between log lines, in seconds. A fit that ends earlier logs none."""
_REFRESH_SECONDS = 0.2
OPENING_SECONDS = 10.0
"""The time after which the log says what a fit does before its first iteration."""
_MOVE_SECONDS = 0.5
PICTURE_SECONDS = 1.0
"""The least time between two pictures of the curves."""


class Progress(Callback):
    """Base class that shows nothing. :meth:`close` is called even if the fit fails."""

    def doing(self, what: str, detail: Callable[[], str] | None = None) -> None:
        """Show what is done before the first iteration; ``detail`` says how far that is."""

    def describe(self, facts: str) -> None:
        """Take note of what is trained, in words."""

    def follow(self, trainer: Any, state: TrainState) -> None:
        """Show the state of a run whose hooks are called elsewhere, now and then."""

    def advise(self, text: str) -> None:
        """Show what would have made the run faster."""

    def close(self) -> None:
        """Release the terminal's line."""


class Opening:
    """The line that moves between the call of a fit and the end of its first iteration.

    A thread calls ``show`` twice a second, until :meth:`end`, with a function that returns the line.
    """

    def __init__(self, show: Callable[[Callable[[], str]], None]) -> None:
        self.show = show
        self._steps: list[tuple[str, float]] = []
        self._detail: Callable[[], str] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._move, name="sparkdl-opening", daemon=True)

    def doing(self, what: str, detail: Callable[[], str] | None = None) -> None:
        """Begin another step."""
        self._steps.append((what, time.monotonic()))
        self._detail = detail
        if len(self._steps) == 1:
            self._thread.start()

    def line(self) -> str:
        """Return the present step, how far it is, and how long the fit runs."""
        (what, _), detail = self._steps[-1], self._detail
        far = ""
        if detail is not None:
            with contextlib.suppress(Exception):  # Spark may have ended
                far = detail()
        seconds = time.monotonic() - self._steps[0][1]
        return f"{what}{' ' if far else ''}{far}, {seconds:.0f} s"

    def summary(self) -> str:
        """Return all steps with their seconds."""
        ends = [began for _, began in self._steps[1:]] + [time.monotonic()]
        steps = [
            f"{what} {end - began:.1f} s"
            for (what, began), end in zip(self._steps, ends, strict=True)
        ]
        return f"training after {ends[-1] - self._steps[0][1]:.1f} s: {', '.join(steps)}"

    def end(self) -> None:
        """End the thread; a second call does nothing."""
        self._ended.set()
        if self._thread.is_alive():  # an interrupt may have come before its start
            self._thread.join()

    def _move(self) -> None:
        while not self._ended.wait(_MOVE_SECONDS):
            with contextlib.suppress(Exception):  # a display that fails ends no fit
                self.show(self.line)


class _Shown(Progress):
    """Progress that is shown. Its name is "fit 2: " while others run beside it, and from then on."""

    _numbers = itertools.count(1)
    _running: ClassVar[WeakSet[_Shown]] = WeakSet()

    def __init__(self) -> None:
        self._number, self._has_name = next(_Shown._numbers), False
        _Shown._running.add(self)
        self._opening: Opening | None = None  # until the first iteration has ended

    @property
    def name(self) -> str:
        self._has_name = self._has_name or len(_Shown._running) > 1
        return f"fit {self._number}: " if self._has_name else ""

    def doing(self, what: str, detail: Callable[[], str] | None = None) -> None:
        if self._opening is None:
            self._opening = Opening(self._open)
        self._opening.doing(what, detail)

    def advise(self, text: str) -> None:
        log_line(self.name + text)

    def close(self) -> None:
        self._end_opening()
        _Shown._running.discard(self)

    def _open(self, line: Callable[[], str]) -> None:
        """Show the line before the first iteration; called in a thread of its own."""

    def _end_opening(self) -> Opening | None:
        """End the line before the first iteration, and return it if there was one."""
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.end()
        return opening


def progress_of(mode: str, facts: str, began: float, one_pass: bool = False) -> Progress:
    """Return the callback that shows the progress of a run, as ``spark.sparkdl.progress`` says.

    ``began`` is a time of ``time.monotonic()``.
    """
    if shows_bar(mode):
        draws = _in_notebook() and not one_pass
        return NotebookProgress() if draws else ProgressBar(one_pass)
    return ProgressLog(facts, began, one_pass) if mode == "auto" else Progress()


def shows_bar(mode: str) -> bool:
    """Return whether ``spark.sparkdl.progress`` asks for a bar: on terminals and in notebooks, if it
    is "auto"."""
    return mode == "true" or (mode == "auto" and (sys.stderr.isatty() or _in_notebook()))


class ProgressBar(_Shown):
    """A tqdm bar with epoch, loss, samples/s, a metric of the last validation, and what training is
    waiting for (a validation, a checkpoint)."""

    def __init__(self, one_pass: bool = False) -> None:
        super().__init__()
        self._one_pass = one_pass
        self._bar: Any = None
        self._line: Any = None  # before the bar is there
        self._refreshed = 0.0
        self._previous = TrainState()
        self._own_line = contextlib.ExitStack()

    def _open(self, line: Callable[[], str]) -> None:
        if self._bar is not None:
            self._bar.refresh()  # its clock goes on
        elif self._line is None:
            self._line = bar_class()(desc=self.name + line(), bar_format="{desc}", leave=False)
            self._own_line.enter_context(_cleared_for_messages(self._line))
        else:
            self._line.set_description_str(self.name + line())

    def _close_line(self) -> None:
        self._own_line.close()
        if self._line is not None:
            self._line.close()
            self._line = None

    def on_fit_start(self, trainer: Any, state: TrainState) -> None:
        moves = self._end_opening() is not None
        self._close_line()
        done, total = state.iteration, trainer.stop.limit(state.iterations_per_epoch)
        if self._one_pass:
            done, total = state.position, state.iterations_per_epoch
        epoch = f"{self.name}epoch {state.epoch + 1}"
        self._bar = bar_class()(
            total=total, initial=done, unit="it", dynamic_ncols=True, desc=epoch
        )
        self._own_line.enter_context(_cleared_for_messages(self._bar))
        self._previous = state
        if moves:  # until the first iteration has ended
            self._bar.set_postfix_str(f"iteration {state.iteration + 1}")
            self.doing("iteration 1")

    def on_iteration_end(self, trainer: Any, state: TrainState) -> None:
        self._end_opening()
        self._bar.update()
        validation = trainer.validation
        if validation is not None and validation.every(self._previous, state):
            self._show(trainer, state, "validating")
        elif not self._tell_of_checkpoint(trainer, state):
            now = time.perf_counter()
            if now - self._refreshed > _REFRESH_SECONDS:
                self._refreshed = now
                self._show(trainer, state)
            self._previous = state

    def follow(self, trainer: Any, state: TrainState) -> None:
        if self._bar is None:
            self.on_fit_start(trainer, state)
        else:
            self._end_opening()
        done = state.position if self._one_pass else state.iteration
        self._bar.update(done - self._bar.n)  # less than before if ranks were lost
        self._show(trainer, state)

    def on_validation_end(self, trainer: Any, state: TrainState) -> None:
        if not self._tell_of_checkpoint(trainer, state):
            self._show(trainer, state)
        self._previous = state

    def on_checkpoint(self, trainer: Any, state: TrainState) -> None:
        self._show(trainer, state)
        self._previous = state

    def on_fit_end(self, trainer: Any, state: TrainState) -> None:
        self._show(trainer, state)
        self.close()

    def close(self) -> None:
        """Release the terminal's line; called even if the fit fails."""
        super().close()
        self._close_line()
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _tell_of_checkpoint(self, trainer: Any, state: TrainState) -> bool:
        """Show that training waits for a checkpoint, and return whether it does."""
        checkpoint = trainer.checkpoint
        if checkpoint is None or checkpoint.asynchronous:
            return False
        if due := checkpoint.every(self._previous, state):
            self._show(trainer, state, "writing a checkpoint")
        return due

    def _show(self, trainer: Any, state: TrainState, doing: str = "") -> None:
        running = state.position != 0
        self._bar.set_description(f"{self.name}epoch {state.epoch + running}", refresh=False)
        rate = state.samples / max(state.seconds, 1e-9)
        shown = [
            f"loss {state.loss:.4g}",
            f"{rate:,.0f} samples/s",
            *_metric(trainer, state),
            doing,
        ]
        self._bar.set_postfix_str(", ".join(filter(None, shown)))


def bar_class() -> Any:
    """Return the class of bars.

    [Note: the lock of a bar] All bars of a process share tqdm's lock, and tqdm keeps it for good where
    a terminal that is gone, or KeyboardInterrupt, ends its ``clear`` and ``refresh``: any other thread
    that draws would then wait without end, and the fit with it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without ipywidgets the bar is text
        from tqdm.auto import tqdm
    from tqdm.std import tqdm as every

    class Bar(tqdm):  # type: ignore[misc, type-arg]
        def clear(self, *_: Any, **__: Any) -> None:
            with interrupts_held(), every.get_lock():
                super().clear(nolock=True)

        def refresh(self, *_: Any, **__: Any) -> None:
            with interrupts_held(), every.get_lock():
                super().refresh(nolock=True)

    return Bar


class NotebookProgress(ProgressBar):
    """The bar, and below it the curves of the run. Above it stays, also in an exported notebook, how
    long the fit took to its first iteration."""

    _display: Any = None

    def doing(self, what: str, detail: Callable[[], str] | None = None) -> None:
        super().doing(what, detail)
        if self._display is None and self._opening is not None:
            self._put(self._opening.line())  # here: a cell owns what its own thread shows first

    def _open(self, line: Callable[[], str]) -> None:
        if self._bar is not None:
            super()._open(line)
        else:
            self._put(line())

    def _put(self, text: str) -> None:
        self._display = _displayed(html.escape(self.name + text), self._display)

    def on_fit_start(self, trainer: Any, state: TrainState) -> None:
        opening = self._opening
        super().on_fit_start(trainer, state)
        if opening is not None:
            self._put(opening.summary())
        self._curves = LiveCurves(state)

    def on_iteration_end(self, trainer: Any, state: TrainState) -> None:
        super().on_iteration_end(trainer, state)
        self._curves.add(state)

    def follow(self, trainer: Any, state: TrainState) -> None:
        super().follow(trainer, state)
        self._curves.add(state)

    def on_fit_end(self, trainer: Any, state: TrainState) -> None:
        super().on_fit_end(trainer, state)
        self._curves.draw(state)


class LiveCurves:
    """The losses and validations of a run so far, drawn below its bar and drawn again as it goes on.

    A cell of a notebook has one such picture. It shows the fit that the cell runs at present, so that
    a cell with many fits stays short. Fits in other threads than the main one are not drawn.
    """

    _cell: ClassVar[tuple[int, Any] | None] = None
    """The number of the last cell with a picture, and the display of it."""

    def __init__(self, begun: TrainState) -> None:
        self._history, self._last = History.after(begun), begun.iteration
        self._numbers: list[int] = []
        self._next = time.monotonic() + PICTURE_SECONDS

    def add(self, state: TrainState) -> None:
        """Add the state after an iteration, and draw if the last picture is old."""
        if state.iteration <= self._last:
            return  # ranks were lost, and the run repeats what is drawn
        self._history.append(state, state.epoch + (state.position != 0))
        self._last = state.iteration
        self._numbers.append(state.iteration)
        if time.monotonic() >= self._next:
            self.draw(state)

    def draw(self, state: TrainState) -> None:
        """Draw the curves so far, with all validations of ``state``."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._next = time.monotonic() + PICTURE_SECONDS
        validations = [{"iteration": v.iteration, "metrics": v.metrics} for v in state.validations]
        svg = curves(self._numbers, self._history.losses, self._history.epochs(), validations)
        if not svg:
            return
        cell = sys.modules["IPython"].get_ipython().execution_count
        before, place = LiveCurves._cell or (None, None)
        LiveCurves._cell = (cell, _displayed(svg, place if before == cell else None))


def _displayed(content: str, place: Any) -> Any:
    """Show content in a notebook, in place of what is at ``place`` if it is given; return its place."""
    from IPython.display import HTML, display

    picture = HTML(f"<div>{content}</div>")
    if place is None:
        return display(picture, display_id=True)
    place.update(picture)
    return place


class ProgressLog(_Shown):
    """Lines of the logger "sparkdl": what is trained, and every 30 seconds the progress. Before the
    first iteration, after 10 seconds: what is done, again for each step and every 30 seconds.

    Their level is INFO. If logging is not configured they go to the standard error, as warnings do;
    otherwise they go where the configuration says.
    """

    def __init__(self, facts: str, began: float, one_pass: bool = False) -> None:
        super().__init__()
        self._facts, self._one_pass = facts, one_pass
        self._doing = self._step = ""
        self._step_at = 0.0
        self._told_at, self._told_of = began, TrainState()
        self._begun, self._shown = False, False

    def describe(self, facts: str) -> None:
        self._facts = facts

    def doing(self, what: str, detail: Callable[[], str] | None = None) -> None:
        self._doing = what
        super().doing(what, detail)

    def _open(self, line: Callable[[], str]) -> None:
        now = time.monotonic()
        if now - self._told_at < OPENING_SECONDS:
            return
        if self._doing != self._step or now - self._step_at >= LOG_SECONDS:
            self._step, self._step_at = self._doing, now
            self._say(line())

    def _say(self, text: str) -> None:
        log_line(self.name + text)

    def on_fit_start(self, trainer: Any, state: TrainState) -> None:
        self._told_of = state
        if self._opening is not None:
            self.doing(f"iteration {state.iteration + 1}")
        if self._due():  # placing the samples took long
            self._begin()

    def on_iteration_end(self, trainer: Any, state: TrainState) -> None:
        self._end_opening()
        if self._due():
            self._begin()
            self._tell(trainer, state)

    def on_fit_end(self, trainer: Any, state: TrainState) -> None:
        if self._begun and state.iteration:
            self._tell(trainer, state, "training has ended: ")
        self.close()

    def follow(self, trainer: Any, state: TrainState) -> None:
        if self._shown:
            self.on_iteration_end(trainer, state)
        else:
            self._shown = True
            self.on_fit_start(trainer, state)

    def _due(self) -> bool:
        return time.monotonic() - self._told_at >= LOG_SECONDS

    def _begin(self) -> None:
        if not self._begun:
            self._say(f"training {self._facts}")
            self._begun, self._told_at = True, time.monotonic()

    def _tell(self, trainer: Any, state: TrainState, what: str = "") -> None:
        limit = None if self._one_pass else trainer.stop.limit(state.iterations_per_epoch)
        of = "" if limit is None else f" of {limit:,}"
        before = self._told_of
        shown = [
            f"epoch {state.epoch + (state.position != 0)}",
            f"iteration {state.iteration:,}{of}",
            f"loss {state.loss:.4g}",
        ]
        if state.samples > before.samples:
            rate = (state.samples - before.samples) / max(state.seconds - before.seconds, 1e-9)
            shown.append(f"{rate:,.0f} samples/s")
        self._say(what + ", ".join([*shown, *_metric(trainer, state)]))
        self._told_at, self._told_of = time.monotonic(), state


def _metric(trainer: Any, state: TrainState) -> Iterator[str]:
    """Yield a metric of the last validation: the one that selects the best weights, else the first
    that is not the loss."""
    if state.metrics:
        best = trainer.validation.best if trainer.validation else None
        name = best or next((name for name in state.metrics if name != "loss"), "loss")
        if name in state.metrics:
            yield f"validation {name} {state.metrics[name]:.4g}"


def log_line(text: str) -> None:
    """Log ``text``; write it to the standard error if logging is not configured."""
    if logger.level or logger.hasHandlers():
        logger.info("%s", text)
    elif logging.root.manager.disable < logging.INFO:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s", "%H:%M:%S"))
        record = logger.makeRecord(logger.name, logging.INFO, "", 0, text, (), None)
        if logger.filter(record):  # which clears the line of a bar
            handler.handle(record)


@contextlib.contextmanager
def _cleared_for_messages(bar: Any) -> Iterator[None]:
    """Make sparkdl's messages inside the block start on the bar's line; the bar is drawn again
    below them."""

    def clear(record: logging.LogRecord) -> bool:
        bar.clear()
        return True

    logger.addFilter(clear)
    try:
        yield
    finally:
        logger.removeFilter(clear)


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    return shell is not None and type(shell.get_ipython()).__name__ == "ZMQInteractiveShell"
