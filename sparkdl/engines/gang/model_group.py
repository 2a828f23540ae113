"""A model-parallel group: ranks whose samples go through one model together, which is cut over them.

Every rank has samples of its own, as in every engine. The ranks of such a group bring theirs to where
they are computed with, so that the group is one replica with all of its rows. Between nodes they send
them; on one, a rank reads the others' rows from their files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from sparkdl.engines.gang.node_local_rows import NodeLocalRows
from sparkdl.engines.gang.rank_messages import broadcast
from sparkdl.model.live_replica import LiveReplica
from sparkdl.model.loss import masses_of
from sparkdl.model.model_loss import called
from sparkdl.parallel.mesh import Mesh
from sparkdl.replica.compute import MiniBatch, autocasting, evaluating
from sparkdl.replica.step import ReplicaIteration


class ModelGroup:
    """That of ``rank``; ``group``: of its ranks, where there are others. ``like``: some rows of the
    data; ``near``: what can be read of the others."""

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        group: dist.ProcessGroup | None,
        live: LiveReplica,
        like: MiniBatch,
        near: NodeLocalRows,
    ) -> None:
        self.ranks = mesh.model_group(rank)
        self._near = near
        self._all, self._rank, self._group = mesh.model_groups, rank, group
        self._live, self._like = live, like

    def weight(self, weights: Sequence[float]) -> float:
        """What the group's samples count for. ``weights``: what each rank's do."""
        return sum(weights[r] for r in self.ranks)

    def as_one(self, work: ReplicaIteration) -> ReplicaIteration:
        """``work``, as if all rows of each group were its first rank's."""
        rows = [(0, 0)] * len(work.step.rows)
        for group in self._all:
            theirs = [work.step.rows[r] for r in group]
            rows[group[0]] = 0, sum(stop - start for start, stop in theirs)
        return replace(work, replica=self.ranks[0], step=replace(work.step, rows=tuple(rows)))

    def together(
        self, work: ReplicaIteration, weights: Sequence[float], own: MiniBatch | None
    ) -> MiniBatch:
        """All of the group's rows that count, on every rank."""
        counts, to = self.counts(work, weights), self.ranks
        here = self.here(work, counts, own, to)
        return MiniBatch(self.inputs(counts, here, to), *self.targets(counts, here, to))

    def counts(self, work: ReplicaIteration, weights: Sequence[float]) -> dict[int, int]:
        """How many rows each rank of the group brings: those whose rows count for something."""
        rows = work.step.rows
        return {r: rows[r][1] - rows[r][0] for r in self.ranks if weights[r]}

    def here(
        self,
        work: ReplicaIteration,
        counts: Mapping[int, int],
        own: MiniBatch | None,
        to: Sequence[int],
    ) -> dict[int, MiniBatch]:
        """By rank, the rows that this one has or can read, of those that are wanted on the ranks
        ``to``."""
        found = {r: own for r in counts if r == self._rank and own is not None}
        for r in counts if self._rank in to else ():
            if self._near.reaches(r, self._rank):
                found[r] = self._near.read(work, r)
        return found

    def inputs(
        self, counts: Mapping[int, int], here: Mapping[int, MiniBatch], to: Sequence[int]
    ) -> list[torch.Tensor]:
        """Of all rows, on the ranks ``to``; nothing elsewhere. ``here``: of :meth:`here`."""
        known = {r: batch.inputs for r, batch in here.items()}
        return self._brought(counts, self._like.inputs, known, to)

    def targets(
        self, counts: Mapping[int, int], here: Mapping[int, MiniBatch], to: Sequence[int]
    ) -> tuple[list[torch.Tensor], torch.Tensor | None, torch.Tensor | None]:
        """Likewise the targets and weights, and what the loss takes of each row."""
        weighted, many = self._live.recipe.policy.weighted, len(self._like.targets)
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
        """Tensors ``like`` these, of all rows, at the ranks ``to``, in the order of their ranks."""
        me = self._rank
        far = [r for r in to if r != me and not self._near.reaches(me, r)] if me in here else []
        mine = [tensor.contiguous() for tensor in here[me]] if far else []
        # together: NCCL does one after another, so that two ranks that both send first would wait
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

    def scored(self, counts: Sequence[int], score: Callable[[], Any], most: int) -> Any:
        """What ``score`` makes of this rank's batches: those of each rank in turn go through the model
        on all of them. ``counts``: of every rank's batches. A group with fewer than ``most`` goes on
        with rows that count for nothing."""
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
                call = self._live.recipe.signature.bound(module)
                called(self._live.loss, call, self._like.inputs, self._like.targets)
        return result

    def _tell(
        self, module: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        """The others, what this rank calls the model with."""
        if len(self.ranks) > 1:
            broadcast((inputs, named), self._rank, self._group, self._live.device)

    def _told(self, member: int, batches: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        for _ in range(batches):
            yield broadcast(None, member, self._group, self._live.device)
