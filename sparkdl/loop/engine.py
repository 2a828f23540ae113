"""The interfaces of an engine: its state, for checkpoints, and its iterations, for the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sparkdl.codec.packed import ByParameter
from sparkdl.data.epoch import EpochPlan
from sparkdl.loop.advance import IterationResult
from sparkdl.replica.iteration import Iteration
from sparkdl.slices.spec import SliceSpec, SliceState
from sparkdl.slices.update import EMA, EVALUATED

ReadState = Callable[[SliceSpec, torch.dtype], SliceState]
"""The type of a function that returns the state of a slice from elsewhere, such as a checkpoint or
an earlier run. It runs in tasks."""
ReadResiduals = Callable[[int], ByParameter | None]
"""The type of a function that returns the residual of a replica from elsewhere, such as a
checkpoint. It runs in tasks."""

CURRENT, AVERAGE, BEST = "current", "average", "best"
"""The kinds of weights: those of the last iteration, their moving average, or the best ones that
were kept."""


ARRAYS = {CURRENT: EVALUATED, AVERAGE: EMA}
"""The arrays of a slice's state that hold such weights, where it has them, up to its buffers."""


def weights_of(state: SliceState, which: str) -> torch.Tensor:
    """Return a slice's weights, or their moving average, without a copy if possible."""
    array = state.arrays.get(ARRAYS.get(which, ""))
    if array is None:
        return state.weights
    return torch.cat([array, state.weights[len(array) :]])


@dataclass(frozen=True)
class StateWork:
    """A set of functions to run on a state.

    ``use(index, plan, state)`` is called for every slice, with the kind of weights that stands
    beside it, and ``use(replica, kept)`` for every replica that keeps a residual.
    """

    states: tuple[tuple[Callable[[int, SliceSpec, SliceState], Any], str], ...]
    residuals: Callable[[int, ByParameter], Any]


@dataclass(frozen=True)
class StateWorkResult:
    """The results of a :class:`StateWork`."""

    states: tuple[list[Any], ...]  # for each of StateWork.states, in the order of the slices
    residuals: list[Any]


class PendingStateWork(Protocol):
    """Work on a snapshot of the state that is in progress while training continues."""

    @property
    def ready(self) -> bool:
        """Return whether all of it is done, as far as is known."""

    def used(self) -> StateWorkResult | None:
        """Wait for the results and return them, or None if the state was lost before.

        An exception of the work is raised here.
        """


class StateAccess(Protocol):
    """A state in slices that can be read and written where the slices lie.

    It is all that checkpoints need, whatever holds the state: slabs, ranks or a process.
    """

    def load(self, read: ReadState | None = None, which: str = CURRENT) -> None:
        """Write version 0 of the state, or the weights that are kept as the best.

        Args:
            read: Returns the state of a slice; None: the state is the recipe's.
            which: CURRENT for the state, BEST for the best weights.

        Raises:
            DamagedCheckpoint: The first that ``read`` raised, wherever it ran.
        """

    def map_slices(
        self, use: Callable[[int, SliceSpec, SliceState], Any], which: str = CURRENT
    ) -> list[Any]:
        """Run ``use(index, plan, state)`` for every slice, where the slice lies. Return the results
        in order."""

    def load_residuals(self, read: ReadResiduals) -> None:
        """Give every replica the residual that ``read`` returns, as if its last iteration had left
        it.

        Raises:
            DamagedCheckpoint: The first that ``read`` raised, wherever it ran.
        """

    def map_residuals(self, use: Callable[[int, ByParameter], Any]) -> list[Any]:
        """Run ``use(replica, kept)`` for every replica that keeps a residual, where it lies.

        Return the results in order.
        """


class Engine(StateAccess, Protocol):
    """An object that runs iterations. Its resources in Spark belong to the fit's ``Resources``."""

    plan: EpochPlan

    @property
    def begins_ahead(self) -> bool:
        """Return whether it begins iterations that are announced in the ``then`` of :meth:`run`."""

    def run(self, iteration: Iteration, then: Sequence[Iteration] = ()) -> IterationResult:
        """Run and commit an iteration.

        Args:
            iteration: The iteration.
            then: The iterations that :meth:`run` will be called with next, without another request
                in between that concerns the state. The engine may begin them.
        """

    def score(self) -> list[Any]:
        """Score the validation samples that the engine was built with, with the current weights.

        Returns:
            The states of the scorer, merged over all partitions.
        """

    def keep_best(self) -> None:
        """Keep a copy of the current weights as the best, in place of the one before."""

    def weights(self, which: str = CURRENT) -> torch.Tensor:
        """Return the flat vector, collected on the driver."""


@dataclass(frozen=True)
class Recovery:
    """The restoration of lost state: what was lost and repeated, in words, and the seconds it took."""

    text: str
    seconds: float


class TrainingEngine(Engine, Protocol):
    """An engine that can train a whole run: it restores state that it loses, or cannot lose any."""

    recoveries: Sequence[Recovery]
    """The times that lost state has been restored, in order."""


class RestorableEngine(Engine, Protocol):
    """An engine whose state can be lost and restored."""

    def take_snapshot(self) -> Any:
        """Return a copy of the state that survives the loss of any single executor."""

    def drop(self, snapshot: Any) -> None:
        """Release a snapshot that is no longer needed."""

    def forget(self) -> None:
        """Give up what remains of the state; a ``load`` or ``restore`` must follow."""

    @property
    def capacity_note(self) -> str:
        """Return a remark about the capacity with which the engine continues, or an empty string."""

    def restore(self, snapshot: Any) -> None:
        """Reset the state to ``snapshot``.

        Raises:
            sparkdl.TrainingError: The snapshot is lost too.
        """
