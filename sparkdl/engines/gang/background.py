"""What a rank does with a copy of its state while it trains on."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sparkdl.codec.packed import ByParameter
from sparkdl.slices.state import SliceState


def copied(state: SliceState) -> SliceState:
    """A state that training leaves alone."""
    arrays = {name: _aside(array) for name, array in state.arrays.items()}
    others = copy.deepcopy(state.others)
    return SliceState(_aside(state.weights), arrays, dict(state.held), others)


def _aside(tensor: torch.Tensor) -> torch.Tensor:
    """A copy. Of what is on a GPU it is in pinned memory, and made while the GPU and this thread go on:
    a GPU has no room for two."""
    if tensor.device.type != "cuda":
        return tensor.clone()
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return there.copy_(tensor, non_blocking=True)


def copied_residuals(kept: ByParameter) -> ByParameter:
    """Likewise of what a rank keeps of its gradients."""
    return copy.deepcopy(dict(kept))


@dataclass
class BackgroundResult:
    """Of a rank: by slice, for each use; of its residuals; or what a use raised."""

    states: list[dict[int, Any]] = field(default_factory=list)
    residuals: list[Any] = field(default_factory=list)
    error: Exception | None = None


class Background:
    """Calls in a thread of their own, one after another. ``name``: who asked for them."""

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
        """Wait for them."""
        self._thread.join()
        return self._results

    def _run(self) -> None:
        results = self._results
        if self._copied is not None:
            self._copied.synchronize()
        try:
            while self._states:  # copies are let go of as they are used
                calls = self._states.pop(0)
                results.states.append({n: call() for n, call in calls.items()})
            results.residuals = [call() for call in self._residuals]
        except Exception as error:
            results.error = error
        finally:
            self._states, self._residuals = [], []


def on_copies(
    use: Callable[..., Any], plans: Mapping[int, Any], states: Mapping[int, SliceState]
) -> dict[int, Callable[[], Any]]:
    """``use(index, plan, state)`` of a copy of each state."""
    return {n: functools.partial(use, n, plans[n], copied(state)) for n, state in states.items()}
