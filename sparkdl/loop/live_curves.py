"""The curves of a run while it trains, in a notebook."""

from __future__ import annotations

import math
import sys
import threading
import time
from typing import Any, ClassVar

from sparkdl.loop.history_svg import curves
from sparkdl.loop.state import TrainState, Validated

REFRESH_SECONDS = 1.0
"""The least time between two pictures."""


class LiveCurves:
    """The losses and validations of a run so far, drawn below its bar and drawn again as it goes on.

    A cell of a notebook has one such picture. It shows the fit that the cell runs at present, so that
    a cell with many fits stays short. Fits in other threads than the main one are not drawn.
    """

    _cell: ClassVar[tuple[int, Any] | None] = None
    """The number of the last cell with a picture, and the display of it."""

    def __init__(self) -> None:
        self._iterations: list[int] = []
        self._losses: list[float] = []
        self._epochs: list[dict[str, Any]] = []
        self._validations: tuple[Validated, ...] = ()
        self._epoch = self._in_epochs = 0
        self._next = time.monotonic() + REFRESH_SECONDS

    def add(self, state: TrainState) -> None:
        """Add the state after an iteration, and draw if the last picture is old."""
        if not self._iterations:
            self._epoch = state.epoch - (state.position == 0)
        elif state.iteration <= self._iterations[-1]:
            return  # ranks were lost, and the run repeats what is drawn
        self._iterations.append(state.iteration)
        self._losses.append(state.loss)
        self._validations = state.validations
        if state.epoch > self._epoch:
            counted = [x for x in self._losses[self._in_epochs :] if math.isfinite(x)]
            mean = sum(counted) / len(counted) if counted else math.nan
            begun = self._iterations[self._in_epochs]
            self._epochs.append({"loss": mean, "iterations": 1 + state.iteration - begun})
            self._epoch, self._in_epochs = state.epoch, len(self._losses)
        if time.monotonic() >= self._next:
            self.draw()

    def end(self, state: TrainState) -> None:
        """Draw the whole run, with the last validation."""
        self._validations = state.validations
        self.draw()

    def draw(self) -> None:
        """Draw the curves so far."""
        if threading.current_thread() is not threading.main_thread():
            return
        validations = [
            {"iteration": one.iteration, "metrics": one.metrics} for one in self._validations
        ]
        picture = Picture(curves(self._iterations, self._losses, self._epochs, validations))
        self._next = time.monotonic() + REFRESH_SECONDS
        if not picture.svg:
            return
        from IPython.display import display

        cell = sys.modules["IPython"].get_ipython().execution_count
        if LiveCurves._cell is not None and LiveCurves._cell[0] == cell:
            LiveCurves._cell[1].update(picture)
        else:
            LiveCurves._cell = (cell, display(picture, display_id=True))


class Picture:
    """A picture as notebooks show it."""

    def __init__(self, svg: str) -> None:
        self.svg = svg

    def __repr__(self) -> str:
        return "<curves of the training>"

    def _repr_html_(self) -> str:
        return f"<div>{self.svg}</div>"
