"""The process groups of a rank: torch's ``DeviceMesh``, a group for each dimension."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sparkdl.errors import SessionError
from sparkdl.parallel.plan import ParallelPlan

_gangs = itertools.count()


def check_carried(parallel: ParallelPlan, device: torch.device) -> None:
    """Raise :class:`sparkdl.SessionError` where ranks share a GPU, so that Gloo joins them, and would
    send each other what is on it, which Gloo does not."""
    cut = [part.word for name, part in parallel.parts.items() if name in ("pipe", "tensor")]
    if cut and device.type == "cuda" and "cuda:nccl" not in dist.get_backend_config():
        raise SessionError(
            f'strategy="{cut[0]}" needs a GPU for each rank, and here ranks share one: use as many '
            'replicas as there are GPUs, or strategy="ddp".'
        )


class Groups:
    """Made on all ranks at once, for each dimension that has several ranks or a strategy.

    A process may be a rank of one gang after another, and torch remembers how tensors on a mesh are
    computed with, by the mesh's shape and names, and with it the groups, which end with their gang. So
    every mesh has names of its own.
    """

    def __init__(self, parallel: ParallelPlan, device: torch.device) -> None:
        """Raises what :func:`check_carried` does."""
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
        """The first sum of every group. NCCL connects the ranks of a group with what they first do
        together, which all of them must do: a message from one to another is too few."""
        for own in self._mesh.mesh_dim_names or ():
            dist.all_reduce(torch.zeros(1, device=device), group=self._mesh.get_group(own))

    def _own(self, *names: str) -> tuple[str, ...]:
        return tuple(name + self._suffix for name in names)

    def mesh(self, *names: str) -> DeviceMesh:
        """Of these dimensions, in this order."""
        return self._mesh[self._own(*names)]

    def along(self, name: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one in this dimension alone; None where it is not there."""
        (own,) = self._own(name)
        return self._mesh.get_group(own) if own in (self._mesh.mesh_dim_names or ()) else None
