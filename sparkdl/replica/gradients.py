"""The gradients of a replica, as backward has left them in the parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparkdl.model.layout import local
from sparkdl.model.live_replica import LiveReplica
from sparkdl.slices.section import SparseRows


@dataclass(frozen=True)
class Gradients:
    """The gradients of a replica."""

    dense: list[torch.Tensor | None]  # None: there is none, or it is elsewhere
    tables: dict[int, SparseRows]
    written: frozenset[int] = frozenset()  # the parameters whose gradients are in sections
    not_finite: frozenset[int] | None = None  # None: not checked yet

    @property
    def absent(self) -> frozenset[int]:
        elsewhere = self.written | self.tables.keys()
        return frozenset(n for n, g in enumerate(self.dense) if g is None and n not in elsewhere)


@torch.no_grad()
def take_gradients(replica: LiveReplica) -> Gradients:
    """Take the gradients that backward left in the parameters' ``grad``, which is cleared."""
    dense: list[torch.Tensor | None] = []
    tables: dict[int, SparseRows] = {}
    for number, (segment, parameter) in enumerate(replica.flat.parameters):
        gradient = None if parameter.grad is None else local(parameter.grad)
        if gradient is None:
            dense.append(None)
        elif segment.sparse:
            dense.append(None)
            tables[number] = _rows(gradient)
        else:
            dense.append(gradient.to_dense() if gradient.is_sparse else gradient)
    replica.clear_gradients()
    return Gradients(dense, tables)


def _rows(gradient: torch.Tensor) -> SparseRows:
    """Return the touched rows of a table's gradient (ascending) and their values, on the CPU."""
    if not gradient.is_sparse:  # the table is used densely elsewhere in the model too
        return torch.arange(len(gradient)), gradient.cpu()
    gradient = gradient.coalesce()
    return gradient.indices()[0].cpu(), gradient.values().cpu()
