"""The parameter server under the names of MXNet's KVStore."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch

from sparkdl.collectives.key_range import MakeOptimizer
from sparkdl.collectives.parameter_server import ParameterServer
from sparkdl.errors import ParameterError, nearest, shown

KINDS = {"dist_sync": "synchronous", "dist_async": "asynchronous"}


class KVStore:
    """A :class:`ParameterServer` with the names and rules of MXNet's distributed KVStore.

    Under "dist_sync" a step takes the *sum* of all workers' gradients, and under "dist_async" each
    gradient is a step. Without an optimizer, what is pushed replaces the value. For everything
    else, such as staleness or replay, use :class:`ParameterServer`.

    Args:
        type: "dist_sync" or "dist_async".
        owners: The ranks that have the values. None means all ranks.
        timeout: The seconds that any call may wait.

    Attributes:
        type: The type.
        server: The parameter server below.
    """

    def __init__(
        self,
        type: str = "dist_sync",
        *,
        owners: Iterable[int] | None = None,
        timeout: float = 300.0,
    ) -> None:
        if not isinstance(type, str) or type not in KINDS:
            known = " or ".join(f'"{word}"' for word in KINDS)
            raise ParameterError(f"type = {shown(type)}: give {known}.{nearest(str(type), KINDS)}")
        self.type = type
        self.server = ParameterServer(
            Assign, consistency=KINDS[type], owners=owners, average=False, timeout=timeout
        )

    @property
    def rank(self) -> int:
        """Return the rank of this worker."""
        return self.server.rank

    @property
    def num_workers(self) -> int:
        """Return the number of workers."""
        return self.server.size

    def init(self, key: Any, value: Any) -> None:
        """Give a key, or each of a list of keys, its first value, that of rank 0."""
        self.server.init(key, value)

    def push(self, key: Any, value: Any) -> None:
        """Push a value, or a sparse COO tensor with the rows that it has."""
        if isinstance(value, torch.Tensor) and value.layout == torch.sparse_coo:
            rows = value.coalesce()
            self.server.push_rows(key, rows.indices()[0], rows.values())
        else:
            self.server.push(key, value)

    def pull(self, key: Any, out: Any = None) -> Any:
        """Return the value of a key, or copy it into ``out``."""
        return self.server.pull(key, out)

    def row_sparse_pull(
        self, key: Hashable, row_ids: Any, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return some rows of a key, or copy them into the same rows of ``out``."""
        values = self.server.pull_rows(key, row_ids)
        if out is None:
            return values
        with torch.no_grad():
            out[torch.as_tensor(row_ids)] = values.to(out.device)
        return out

    def set_optimizer(self, optimizer: MakeOptimizer) -> None:
        """Let the owners update with an optimizer; called on every worker with the same one."""
        self.server.set_optimizer(optimizer)

    def barrier(self) -> None:
        """Return when all workers have called this."""
        self.server.barrier()

    def close(self) -> None:
        """Wait for all workers and end the server."""
        self.server.close()

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, *error: Any) -> None:
        self.server.__exit__(*error)


class Assign(torch.optim.Optimizer):
    """Replace the values by what is pushed: MXNet's rule where there is no optimizer."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Copy every gradient into its tensor; of a sparse one, the rows that it has."""
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None and tensor.grad.is_sparse:
                    tensor[tensor.grad.indices()[0]] = tensor.grad.values()
                elif tensor.grad is not None:
                    tensor.copy_(tensor.grad)
