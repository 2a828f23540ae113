"""Whether nodes sum their replicas' gradients before they send them: by the bytes that saves."""

from __future__ import annotations

from collections.abc import Sequence

from sparkdl.engines.shuffle.form import STAGE_SECONDS
from sparkdl.engines.shuffle.traffic import Nodes, SliceBytes, planned
from sparkdl.loop.engine import busiest
from sparkdl.model.flat import Layout
from sparkdl.model.options import TrainingOptions
from sparkdl.replica.iteration import SliceHandle
from sparkdl.replica.run import RunSpec
from sparkdl.slices.spec import slice_specs

MORE_STAGES = 2
"""Combining and installing."""
BYTES_PER_SECOND = 2e8
"""Of the shuffle between two nodes, roughly. Most of it is not the network: to write and read the bytes
takes Spark and Python 10 ns a byte of processor time (benchmarks/between_nodes.py)."""


class NodeReducePlan:
    """Decides from where replicas and owners are; the bits are the same."""

    def __init__(self, layout: Layout, run: RunSpec, policy: TrainingOptions) -> None:
        wire = (policy.wire_dtype or layout.dtype).itemsize
        flat = layout.dtype.itemsize
        # After local steps optimizer state travels too; what is compressed is no part of a sum yet.
        self._possible = policy.local_steps == 1 and not run.compressed
        self._slices = [
            SliceBytes(plan.dense_length * wire, plan.dense_length * flat, plan.length * flat)
            for plan in slice_specs(layout, run.slices, whole=run.whole_tensors)
        ]

    def chosen(self, tokens: tuple[str, ...], states: Sequence[SliceHandle]) -> Nodes | None:
        """The nodes that sum; None: every replica sends its own. ``tokens``: of the replicas."""
        nodes = Nodes(tokens, tuple(state.token for state in states))
        if not self._possible or len({*nodes.replicas, *nodes.slices}) == 1:
            return None
        plain, summed = (busiest(planned(nodes, self._slices, way)) for way in (False, True))
        saved = (plain - summed) / BYTES_PER_SECOND
        return nodes if saved > MORE_STAGES * STAGE_SECONDS else None
