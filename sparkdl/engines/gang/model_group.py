"""Model-parallel groups: ranks that hold the parts of one model and run their samples through it.

Every rank has samples of its own, as in every engine. The ranks of a group bring their rows to the
ranks that need them, so that the group acts as one replica with all of its rows. Between nodes they
send the rows; on one node, a rank reads the other ranks' rows from their files.

The process groups of a rank, from torch's ``DeviceMesh``: one for each dimension of the mesh.

Batch norm over the samples of all ranks of a gang.

torch's SyncBatchNorm works on GPUs only, gives every rank the same weight in a mean, and does not
allow a rank without samples. This one sums over samples: its output and gradients are those of a
single process with the global batch, however the samples are distributed (Ioffe & Szegedy, 2015).

A lock that lets one rank of a node at a time build a model that is to be split.

Each rank reads the recipe, which may contain a module or weights, builds the whole model, and frees
the parts that other ranks hold. If all ranks did this at once, a node would need memory for as many
models as it has ranks. In turn, it needs memory for one model and for the parts that the ranks
keep.

The result is bit for bit that of a model that is built whole. Building the model on the device
"meta" and materializing only each rank's shards would not give these bits. A seeded build draws the
values of all tensors from one sequence of random numbers, in the order in which constructors and
initialisers (``torch.nn.init``, ``reset_parameters``, user code) happen to draw, and some tensors
are drawn more than once. On "meta" nothing is drawn, and nothing records what would have been.
"""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.modules.batchnorm import _BatchNorm

from sparkdl.data.partition_reader import open_partition
from sparkdl.data.prefetch import AHEAD
from sparkdl.engines.gang.rank_messages import SampleLocation, broadcast
from sparkdl.errors import SessionError
from sparkdl.model.loss import masses_of, output_of
from sparkdl.model.recipe import LiveReplica
from sparkdl.parallel.base import Mesh
from sparkdl.parallel.plan import ParallelPlan
from sparkdl.replica.compute import MiniBatch, autocasting, evaluating, idle
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
        self.ranks, self.all, self.most = mesh.model_group(rank), mesh.model_groups, mesh.most
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


_gangs = itertools.count()


def check_carried(parallel: ParallelPlan, device: torch.device) -> None:
    """Raise SessionError if a model is split and ranks share a GPU.

    Gloo then connects them, and it does not send GPU tensors.
    """
    cut = [part.word for part in parallel.parts.values() if part.shares_samples]
    if cut and sending_device(device) != device:
        raise SessionError(
            f'strategy="{cut[0]}" needs a GPU for each rank, and here ranks share one: use as many '
            'replicas as there are GPUs, or strategy="ddp".'
        )


def sending_device(device: torch.device) -> torch.device:
    """Return the device from which ranks that compute on ``device`` can send tensors to one another.

    NCCL sends from GPUs. If ranks share a GPU, Gloo connects them, which sends from the CPU only.
    """
    carried = device.type == "cpu" or "cuda:nccl" in dist.get_backend_config()
    return device if carried else torch.device("cpu")


class MeshGroups:
    """A rank's process groups, one for each mesh dimension that has several ranks or a strategy.

    All ranks create them at the same time.

    Every mesh has dimension names of its own. A process may belong to one gang after another, and
    torch caches how to compute with tensors on a mesh by the mesh's shape and names. The cache
    includes the process groups, which end with their gang.
    """

    def __init__(self, parallel: ParallelPlan, device: torch.device) -> None:
        """Create the mesh. Raises what :func:`check_carried` raises."""
        check_carried(parallel, device)
        sizes = parallel.mesh.sizes
        names = tuple(name for name, size in sizes.items() if size > 1 or name in parallel.parts)
        self._suffix = f"-{next(_gangs)}"
        self._mesh = init_device_mesh(
            device.type, tuple(sizes[name] for name in names), mesh_dim_names=self._own(*names)
        )
        if device.type != "cpu":
            self.meet(device)

    def meet(self, device: torch.device) -> None:
        """Run a first all-reduce in every group.

        NCCL connects the ranks of a group in their first operation, in which all of them must take
        part; a message from one rank to another is not enough.
        """
        for own in self._mesh.mesh_dim_names or ():
            dist.all_reduce(torch.zeros(1, device=device), group=self._mesh.get_group(own))

    def _own(self, *names: str) -> tuple[str, ...]:
        return tuple(name + self._suffix for name in names)

    def mesh(self, *names: str) -> DeviceMesh:
        """Return the mesh of these dimensions, in this order."""
        return self._mesh[self._own(*names)]

    def along(self, name: str) -> dist.ProcessGroup | None:
        """Return the ranks that differ from this one in this dimension only, or None."""
        (own,) = self._own(name)
        return self._mesh.get_group(own) if own in (self._mesh.mesh_dim_names or ()) else None


class _Sum(torch.autograd.Function):
    """The sum of a tensor over the ranks. Its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor) -> torch.Tensor:
        total = own.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total)
        return total


class GlobalBatchNorm(_BatchNorm):
    """A replacement for torch's batch norms, for inputs of shape (samples, features, ...)."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.ndim}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize as torch does, in training with the mean and variance over all ranks."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        axes = [axis for axis in range(input.ndim) if axis != 1]
        shape = [-1 if axis == 1 else 1 for axis in range(input.ndim)]
        own, each = 0.0 if idle() else 1.0, input.numel() // input.shape[1]
        # as torch does: the counts and sums of even a few images overflow half precision
        values = input if input.dtype == torch.float64 else input.float()
        count = values.new_full((1,), own * each)
        sums = _Sum.apply(torch.cat([own * values.sum(axes), count]))
        total = sums[-1].detach().clamp(min=1.0)
        mean = sums[:-1] / total
        centred = values - mean.view(shape)
        variance = _Sum.apply(own * centred.square().sum(axes)) / total
        self._follow(mean.detach(), variance.detach(), sums[-1].detach())
        output = centred * torch.rsqrt(variance.view(shape) + self.eps)
        if self.affine:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        return output.to(input.dtype)

    @torch.no_grad()
    def _follow(self, mean: torch.Tensor, variance: torch.Tensor, total: torch.Tensor) -> None:
        """Update the running statistics with the unbiased variance, as torch does.

        Leave them alone if no rank has a sample. ``total`` is the count over all ranks.
        """
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        if idle() and not total:
            return
        self.num_batches_tracked.add_(1)
        factor = self.momentum
        if factor is None:
            factor = 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        unbiased = variance * (total / (total - 1).clamp(min=1.0))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def synchronise(module: nn.Module) -> None:
    """Make every torch batch norm in ``module`` normalize over all ranks.

    Names and values stay the same.
    """
    for child in module.modules():
        if type(child) in _KINDS:
            child.__class__ = GlobalBatchNorm


class BuildLock:
    """A context manager that holds the lock of this node.

    It holds it from the beginning of the block until :meth:`release` is called, or until the end of
    the block. A rank that holds it must not wait for another one.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._file = folder / "building", -1

    def __enter__(self) -> BuildLock:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self._path, flags, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        except BaseException:  # such as an interrupt
            self.release()
            raise
        return self

    def release(self) -> None:
        """Release the lock, once this rank has freed the parts of the model that other ranks hold."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __exit__(self, *exc_info: object) -> None:
        self.release()
