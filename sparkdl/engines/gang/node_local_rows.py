"""Rows of other ranks that lie on this rank's node: read from their files instead of being sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sparkdl.data.partition_reader import open_partition
from sparkdl.data.prefetch import AHEAD
from sparkdl.engines.gang.rank_records import SampleLocation
from sparkdl.model.live_replica import LiveReplica
from sparkdl.replica.compute import MiniBatch
from sparkdl.replica.run import RunSpec
from sparkdl.replica.step import ReplicaIteration, to_mini_batch


class NodeLocalRows:
    """What augments rows costs more than a message: rows that are augmented are sent."""

    def __init__(
        self,
        samples: Sequence[SampleLocation],
        rank: int,
        ranks: Sequence[int],
        run: RunSpec,
        live: LiveReplica,
    ) -> None:
        """``samples``: of all ranks. ``ranks``: those whose rows may be wanted."""
        self._run, self._live = run, live
        self._tokens = [each.token for each in samples]
        self._sent = live.recipe.augment is not None
        self._partitions = {
            r: open_partition(samples[r].handle)
            for r in ranks
            if self.reaches(r, rank) and samples[r].handle.num_rows
        }
        AHEAD.serve(1 + len(self._partitions))

    def reaches(self, source: int, reader: int) -> bool:
        """Whether rank ``reader`` reads rows of rank ``source`` by itself."""
        return source != reader and not self._sent and self._tokens[source] == self._tokens[reader]

    def read(self, work: ReplicaIteration, source: int) -> MiniBatch:
        """The rows that rank ``source`` has in this iteration; what the loss takes of them is reckoned
        for all rows together."""
        theirs = replace(work, replica=source, share=self._run.shares[source])
        (arrays,) = theirs.mini_batches(self._live, self._partitions[source])
        return to_mini_batch(arrays, self._live, masses=False)
