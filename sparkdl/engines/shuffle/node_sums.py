"""The choice of whether nodes sum their replicas' gradients before sending, by the bytes it saves."""

from __future__ import annotations

from collections.abc import Sequence

from sparkdl.engines.shuffle.forms import STAGE_SECONDS
from sparkdl.engines.shuffle.traffic import Nodes, SliceBytes, planned
from sparkdl.loop.iteration_result import busiest
from sparkdl.model.layout import Layout
from sparkdl.model.options import TrainingOptions
from sparkdl.replica.iteration import SliceHandle
from sparkdl.replica.run import RunSpec
from sparkdl.slices.spec import slice_specs

MORE_STAGES = 2
"""The additional stages if nodes sum: one to combine gradients and one to install weights."""
BYTES_PER_SECOND = 2e8
"""The approximate throughput of the shuffle between two nodes.

The network is a small part of it: writing and reading take Spark and Python 10 ns of processor time
per byte (benchmarks/between_nodes.py).
"""


class NodeReducePlan:
    """The decision made from the nodes of replicas and owners; the bits are the same either way."""

    def __init__(self, layout: Layout, run: RunSpec, options: TrainingOptions) -> None:
        wire = (options.wire_dtype or layout.dtype).itemsize
        flat = layout.dtype.itemsize
        # After local steps, optimizer state travels too; compressed gradients cannot be summed yet.
        self._possible = options.local_steps == 1 and not run.keeps_tensors
        self._slices = [
            SliceBytes(plan.dense_length * wire, plan.dense_length * flat, plan.length * flat)
            for plan in slice_specs(layout, run.slices, whole=run.whole_tensors)
        ]

    def chosen(self, node_ids: tuple[str, ...], states: Sequence[SliceHandle]) -> Nodes | None:
        """Return the nodes if they should sum; None if each replica should send its own gradients.

        Args:
            node_ids: The node id of each replica.
            states: The committed version of every slice.
        """
        nodes = Nodes(node_ids, tuple(state.node_id for state in states))
        if not self._possible or len({*nodes.replicas, *nodes.slices}) == 1:
            return None
        plain, summed = (busiest(planned(nodes, self._slices, way)) for way in (False, True))
        saved = (plain - summed) / BYTES_PER_SECOND
        return nodes if saved > MORE_STAGES * STAGE_SECONDS else None
