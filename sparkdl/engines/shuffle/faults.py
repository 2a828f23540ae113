"""Faults that no other submission of a job can resolve, as errors."""

from __future__ import annotations

from collections.abc import Sequence

from sparkdl.engines.resources import samples_changed
from sparkdl.engines.shuffle.messages import RESIDUAL_FOREIGN, SAMPLES_CHANGED, STATE_FOREIGN
from sparkdl.errors import StateLostError
from sparkdl.replica.iteration import Fault


def raise_unrecoverable(faults: Sequence[Fault], doing: str) -> None:
    """Raise an error if another submission could not resolve one of the faults.

    Args:
        faults: The faults that tasks reported.
        doing: What the job does, for messages.

    Raises:
        StateLostError: The state of a slice or the residuals of a replica are lost.
        TrainingError: Samples have changed.
    """
    for fault in faults:
        if fault.kind == STATE_FOREIGN:
            raise StateLostError(
                f"{doing}: the state of slice {fault.partition} is out of reach (its node or "
                "executor is gone)."
            )
        if fault.kind == RESIDUAL_FOREIGN:
            raise StateLostError(
                f"{doing}: what replica {fault.partition} left out of its compressed gradients is "
                "out of reach (its node or executor is gone)."
            )
        if fault.kind == SAMPLES_CHANGED:
            raise samples_changed(doing, fault.partition)
