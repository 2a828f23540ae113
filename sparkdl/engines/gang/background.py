"""Work that a rank does in the background, on a copy of its state, while it continues to train."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sparkdl.codec.packed import ByParameter
from sparkdl.slices.state import SliceState


def copied(state: SliceState) -> SliceState:
    """Return a copy of a state, which later training does not change."""
    arrays = {name: _aside(array) for name, array in state.arrays.items()}
    others = copy.deepcopy(state.others)
    return SliceState(_aside(state.weights), arrays, dict(state.held), others)


def _aside(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor.

    The copy of a GPU tensor is in pinned CPU memory, because a GPU has no room for a second one. It
    is made asynchronously: synchronize before reading it.
    """
    if tensor.device.type != "cuda":
        return tensor.clone()
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return there.copy_(tensor, non_blocking=True)


def copied_residuals(kept: ByParameter) -> ByParameter:
    """Return a copy of the compression residuals of a rank."""
    return copy.deepcopy(dict(kept))


@dataclass
class BackgroundResult:
    """The results of one rank's background work."""

    states: list[dict[int, Any]] = field(default_factory=list)  # for each use, by slice
    residuals: list[Any] = field(default_factory=list)
    error: Exception | None = None


class Background:
    """A thread that makes a series of calls, one after another."""

    def __init__(
        self,
        name: str,
        states: Sequence[Mapping[int, Callable[[], Any]]],
        residuals: Sequence[Callable[[], Any]],
    ) -> None:
        self.name = name
        self._states, self._residuals = list(states), list(residuals)
        self._results = BackgroundResult()
        self._copied = torch.cuda.Event() if torch.cuda.is_initialized() else None
        if self._copied is not None:
            self._copied.record()
        self._thread = threading.Thread(target=self._run, name="sparkdl-background", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._thread.is_alive()

    def results(self) -> BackgroundResult:
        """Wait for the calls to finish and return their results."""
        self._thread.join()
        return self._results

    def _run(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        try:
            while self._states:  # this frees each copy as soon as it has been used
                calls = self._states.pop(0)
                self._results.states.append({n: call() for n, call in calls.items()})
            self._results.residuals.extend([call() for call in self._residuals])
        except Exception as error:
            self._results = replace(self._results, error=error)
        finally:
            self._states, self._residuals = [], []


def on_copies(
    use: Callable[..., Any], plans: Mapping[int, Any], states: Mapping[int, SliceState]
) -> dict[int, Callable[[], Any]]:
    """Return calls ``use(index, plan, state)`` with copies of the states, which are made now."""
    return {n: functools.partial(use, n, plans[n], copied(state)) for n, state in states.items()}
