"""The process groups of a rank: torch's ``DeviceMesh``, a group for each dimension."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sparkdl.train.parallel.parallel import Parallel

_gangs = itertools.count()


class Groups:
    """Made on all ranks at once, for each dimension that has several ranks or a strategy.

    A process may be a rank of one gang after another, and torch remembers how tensors on a mesh are
    computed with, by the mesh's shape and names, and with it the groups, which end with their gang. So
    every mesh has names of its own.
    """

    def __init__(self, parallel: Parallel, device: torch.device) -> None:
        sizes = parallel.mesh.sizes
        names = tuple(name for name, size in sizes.items() if size > 1 or name in parallel.parts)
        self._suffix = f"-{next(_gangs)}"
        self._mesh = init_device_mesh(
            device.type, tuple(sizes[name] for name in names), mesh_dim_names=self._own(*names)
        )

    def _own(self, *names: str) -> tuple[str, ...]:
        return tuple(name + self._suffix for name in names)

    def mesh(self, *names: str) -> DeviceMesh:
        """Of these dimensions, in this order."""
        return self._mesh[self._own(*names)]

    def along(self, name: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one in this dimension alone; None where it is not there."""
        (own,) = self._own(name)
        return self._mesh.get_group(own) if own in (self._mesh.mesh_dim_names or ()) else None
