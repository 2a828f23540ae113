"""The process groups of a rank, from torch's ``DeviceMesh``: one for each dimension of the mesh."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sparkdl.errors import SessionError
from sparkdl.parallel.plan import ParallelPlan

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
