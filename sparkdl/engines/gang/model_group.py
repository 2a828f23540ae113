"""Model-parallel groups: ranks that hold the parts of one model and run their samples through it.

Every rank has samples of its own, as in every engine. The ranks of a group bring their rows to the
ranks that need them, so that the group acts as one replica with all of its rows. Between nodes they
send the rows; on one node, a rank reads the other ranks' rows from their files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from sparkdl.data.partition_reader import open_partition
from sparkdl.data.prefetch import AHEAD
from sparkdl.engines.gang.rank_messages import SampleLocation, broadcast
from sparkdl.model.live_replica import LiveReplica
from sparkdl.model.loss import masses_of
from sparkdl.model.step import output_of
from sparkdl.parallel.mesh import Mesh
from sparkdl.replica.compute import autocasting, evaluating
from sparkdl.replica.mini_batch import MiniBatch
from sparkdl.replica.run import RunSpec
from sparkdl.replica.step import ReplicaIteration, to_mini_batch


class ModelGroup:
    """The model-parallel group of a rank."""

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        group: dist.ProcessGroup | None,
        live: LiveReplica,
        like: MiniBatch,
        near: NodeLocalRows,
    ) -> None:
        self.ranks, self.all = mesh.model_group(rank), mesh.model_groups
        self._near = near
        self._rank, self._group = rank, group
        self._live, self._like = live, like

    def weight(self, weights: Sequence[float]) -> float:
        """Return the weight of the group's samples, given the ``weights`` of all ranks."""
        return sum(weights[r] for r in self.ranks)

    def as_one(self, work: ReplicaIteration) -> ReplicaIteration:
        """Return ``work`` as if the first rank of each group had all of the group's rows."""
        rows = [(0, 0)] * len(work.step.rows)
        for group in self.all:
            theirs = [work.step.rows[r] for r in group]
            rows[group[0]] = 0, sum(stop - start for start, stop in theirs)
        return replace(work, replica=self.ranks[0], step=replace(work.step, rows=tuple(rows)))

    def together(
        self, work: ReplicaIteration, weights: Sequence[float], own: MiniBatch | None
    ) -> MiniBatch:
        """Return, on every rank, all rows of the group that have weight."""
        counts, to = self.counts(work, weights), self.ranks
        here = self.here(work, counts, own, to)
        return MiniBatch(self.inputs(counts, here, to), *self.targets(counts, here, to))

    def counts(self, work: ReplicaIteration, weights: Sequence[float]) -> dict[int, int]:
        """Return the number of rows from each rank of the group, without ranks of weight 0."""
        rows = work.step.rows
        return {r: rows[r][1] - rows[r][0] for r in self.ranks if weights[r]}

    def here(
        self,
        work: ReplicaIteration,
        counts: Mapping[int, int],
        own: MiniBatch | None,
        to: Sequence[int],
    ) -> dict[int, MiniBatch]:
        """Return the rows that this rank has, or can read for ``to``, by the rank that has them."""
        found = {r: own for r in counts if r == self._rank and own is not None}
        for r in counts if self._rank in to else ():
            if self._near.reaches(r, self._rank):
                found[r] = self._near.read(work, r)
        return found

    def inputs(
        self, counts: Mapping[int, int], here: Mapping[int, MiniBatch], to: Sequence[int]
    ) -> list[torch.Tensor]:
        """Return the inputs of all rows on the ranks ``to``, and nothing on other ranks."""
        known = {r: batch.inputs for r, batch in here.items()}
        return self._brought(counts, self._like.inputs, known, to)

    def targets(
        self, counts: Mapping[int, int], here: Mapping[int, MiniBatch], to: Sequence[int]
    ) -> tuple[list[torch.Tensor], torch.Tensor | None, torch.Tensor | None]:
        """Return the targets, the weights and the masses of all rows on the ranks ``to``.

        The masses are how much each row counts in the loss. For the arguments see :meth:`inputs`.
        """
        weighted, many = self._live.recipe.options.weighted, len(self._like.targets)
        like = [*self._like.targets, *([torch.empty(0).double()] if weighted else [])]
        known = {
            r: [*batch.targets, *([] if batch.weights is None else [batch.weights.double()])]
            for r, batch in here.items()
        }
        found = self._brought(counts, like, known, to)
        targets = found[:many]
        masses = masses_of(self._live.recipe.loss, targets)
        return targets, found[-1] if weighted and found else None, masses

    def _brought(
        self,
        counts: Mapping[int, int],
        like: Sequence[torch.Tensor],
        here: Mapping[int, Sequence[torch.Tensor]],
        to: Sequence[int],
    ) -> list[torch.Tensor]:
        """Return all rows of tensors such as ``like``, in rank order, on the ranks ``to``."""
        me = self._rank
        far = [r for r in to if r != me and not self._near.reaches(me, r)] if me in here else []
        mine = [tensor.contiguous() for tensor in here[me]] if far else []
        # in one batch: NCCL runs operations in order, so two ranks that both send first would deadlock
        moves = [dist.P2POp(dist.isend, tensor, r, self._group) for tensor in mine for r in far]
        found: list[torch.Tensor] = []
        if me in to and here.keys() >= counts.keys():
            found = [torch.cat(parts) for parts in zip(*(here[r] for r in counts), strict=True)]
        elif me in to:
            total, device, start = sum(counts.values()), self._live.device, 0
            for one in like:
                found.append(torch.empty((total, *one.shape[1:]), dtype=one.dtype, device=device))
            for rank, count in counts.items():
                for n, tensor in enumerate(found):
                    place = tensor[start : start + count]
                    if rank in here:
                        place.copy_(here[rank][n])
                    else:
                        moves.append(dist.P2POp(dist.irecv, place, rank, self._group))
                start += count
        for work in dist.batch_isend_irecv(moves) if moves else ():
            work.wait()
        return found

    def scored(
        self, counts: Sequence[int], score: Callable[[], Any], most: int, outputs: bool = False
    ) -> Any:
        """Score on each rank in turn, while its whole group runs the model on that rank's batches.

        Groups with fewer than ``most`` batches continue with rows that do not count. With
        ``outputs``, ``score`` runs the model itself after a step.
        """
        module, result = self._live.flat.module, None
        for member in self.ranks:
            if member == self._rank:
                telling = module.register_forward_pre_hook(
                    self._tell, prepend=True, with_kwargs=True
                )
                try:
                    result = score()
                finally:
                    telling.remove()
                continue
            for inputs, named in self._told(member, counts[member]):
                with evaluating(module), autocasting(self._live):
                    module(*inputs, **named)
        for _ in range(most - sum(counts[r] for r in self.ranks)):
            with evaluating(module), autocasting(self._live):
                signature, like = self._live.recipe.signature, self._like
                loss = self._live.loss
                returned = signature.call_for_loss(loss, module, like.inputs, like.targets)
                if outputs:
                    output_of(returned)
        return result

    def _tell(
        self, module: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        """Broadcast the arguments of this rank's model call to the other ranks of the group."""
        if len(self.ranks) > 1:
            broadcast((inputs, named), self._rank, self._group, self._live.device)

    def _told(self, member: int, batches: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        for _ in range(batches):
            yield broadcast(None, member, self._group, self._live.device)


class NodeLocalRows:
    """The rows of other ranks on this node, which this rank reads from their files.

    Augmented rows are sent instead: augmenting them again would cost more than a message.
    """

    def __init__(
        self,
        samples: Sequence[SampleLocation],
        rank: int,
        ranks: Sequence[int],
        run: RunSpec,
        live: LiveReplica,
    ) -> None:
        """Open the partitions that can be read."""
        self._run, self._live = run, live
        self._node_ids = [each.node_id for each in samples]
        self._sent = live.recipe.augment is not None
        self._partitions = {
            r: open_partition(samples[r].handle)
            for r in ranks
            if self.reaches(r, rank) and samples[r].handle.num_rows
        }
        AHEAD.serve(1 + len(self._partitions))

    def reaches(self, source: int, reader: int) -> bool:
        """Return whether rank ``reader`` reads the rows of rank ``source`` itself."""
        return (
            source != reader and not self._sent and self._node_ids[source] == self._node_ids[reader]
        )

    def read(self, work: ReplicaIteration, source: int) -> MiniBatch:
        """Return the rows of rank ``source`` in this iteration, without masses.

        The masses are computed for all rows of the group together.
        """
        theirs = replace(work, replica=source, share=self._run.shares[source])
        (arrays,) = theirs.mini_batches(self._live, self._partitions[source])
        return to_mini_batch(arrays, self._live, masses=False)
