"""Callbacks: what may happen around the loop, as documented no-ops, and the progress bar."""

from __future__ import annotations

import sys
import time
from typing import Any

from sparkdl.loop.state import TrainState


class StopTraining(Exception):
    """A callback raises it to end the training: ``fit`` returns the model as it stands.

    The other callbacks still hear of the event, the iteration under way is completed (of a gang also
    those that its ranks have begun), and ``history.stopped`` is "callback", or "callback: " and what
    this was given.
    """


class Callback:
    """Override what you need. Each hook is given the trainer and an immutable state.

    The ranks of a gang may be some iterations ahead of the hooks, which hear of each in its turn.
    :class:`sparkdl.StopTraining` ends the training well; what else a hook raises ends the fit.
    """

    def on_fit_start(self, trainer: Any, state: TrainState) -> None:
        """Samples, replicas and state are in place; no iteration has run."""

    def on_epoch_start(self, trainer: Any, state: TrainState) -> None:
        """Before the first iteration of an epoch."""

    def on_iteration_start(self, trainer: Any, state: TrainState) -> None:
        """Before the jobs of an iteration are submitted."""

    def on_iteration_end(self, trainer: Any, state: TrainState) -> None:
        """An iteration is committed; ``state`` counts it."""

    def on_epoch_end(self, trainer: Any, state: TrainState) -> None:
        """After the last iteration of an epoch."""

    def on_validation_end(self, trainer: Any, state: TrainState) -> None:
        """Metrics of a validation are in the state."""

    def on_checkpoint(self, trainer: Any, state: TrainState) -> None:
        """A checkpoint is committed."""

    def on_recovery(self, trainer: Any, state: TrainState) -> None:
        """State that was lost with an executor has been brought back: the run goes on from ``state``.
        No iteration is told of twice."""

    def on_fit_end(self, trainer: Any, state: TrainState) -> None:
        """The last iteration is committed; not called where the fit fails, or is interrupted a second
        time."""


class ProgressBar(Callback):
    """A tqdm bar with epoch, loss and samples/s.

    ``mode`` is ``spark.sparkdl.progress``: "true", "false", or "auto" (terminals and notebooks).
    ``one_pass``: only the epoch that begins is shown, of a run over data that come in parts.
    """

    _REFRESH_SECONDS = 0.2

    def __init__(self, mode: str = "auto", one_pass: bool = False) -> None:
        self._one_pass = one_pass
        self._shown = mode == "true" or (mode == "auto" and (sys.stderr.isatty() or _in_notebook()))
        self._bar: Any = None
        self._refreshed = 0.0

    def on_fit_start(self, trainer: Any, state: TrainState) -> None:
        if not self._shown:
            return
        from tqdm.auto import tqdm

        done, total = state.iteration, trainer.stop.limit(state.iterations_per_epoch)
        if self._one_pass:
            done, total = state.position, state.iterations_per_epoch
        epoch = f"epoch {state.epoch + 1}"
        self._bar = tqdm(total=total, initial=done, unit="it", dynamic_ncols=True, desc=epoch)

    def on_iteration_end(self, trainer: Any, state: TrainState) -> None:
        if self._bar is None:
            return
        self._bar.update()
        now = time.perf_counter()
        if now - self._refreshed > self._REFRESH_SECONDS:
            self._refreshed = now
            self._show(state)

    def on_fit_end(self, trainer: Any, state: TrainState) -> None:
        if self._bar is not None:
            self._show(state)
        self.close()

    def close(self) -> None:
        """Leave the terminal's line; also called where the fit fails."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _show(self, state: TrainState) -> None:
        running = state.position != 0
        self._bar.set_description(f"epoch {state.epoch + running}", refresh=False)
        rate = state.samples / max(state.seconds, 1e-9)
        self._bar.set_postfix_str(f"loss {state.loss:.4g}, {rate:,.0f} samples/s")


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    return shell is not None and type(shell.get_ipython()).__name__ == "ZMQInteractiveShell"
