"""Faults: the reasons why a task does no work, and errors for those that no submission resolves."""

from __future__ import annotations

from collections.abc import Sequence

from sparkdl.engines.resources import samples_changed
from sparkdl.errors import StateLostError
from sparkdl.replica.iteration import Fault

MOVED = "moved"
"""The task runs on another node than its references are for; sending bytes resolves that."""
SAMPLES_FOREIGN = "samples foreign"
"""The task was given samples that lie on another node."""
SAMPLES_CHANGED = "samples changed"
"""The partition was recomputed and holds other rows, because its source is not deterministic."""
STATE_FOREIGN = "state foreign"
"""The synchronization task does not run on the node that holds the slice's state."""
UNLIKE = "unlike"
"""The owner of a slice was given the gradient of another attempt of a replica than others were, and the
two attempts did not stop after as many micro-batches."""
RESIDUAL_FOREIGN = "residual foreign"
"""The task does not run on the node that holds its replica's residuals."""


def raise_unrecoverable(faults: Sequence[Fault], doing: str) -> None:
    """Raise an error if another submission could not resolve one of the faults."""
    for fault in faults:
        if fault.kind == STATE_FOREIGN:
            raise StateLostError(
                f"{doing}: the state of slice {fault.partition} is out of reach (its node or "
                "executor is gone)."
            )
        if fault.kind == RESIDUAL_FOREIGN:
            raise StateLostError(
                f"{doing}: what replica {fault.partition} keeps between iterations is "
                "out of reach (its node or executor is gone)."
            )
        if fault.kind == SAMPLES_CHANGED:
            raise samples_changed(doing, fault.partition)
