"""Which task hosts which ranks, and which GPU each of them takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparkdl.errors import SessionError
from sparkdl.spark.device import Gpu


@dataclass(frozen=True)
class TaskLocation:
    """Where a task is: its ``node``, by a name that each process there knows; the node's address; the
    GPUs that it may use, its own ones where Spark has ``assigned`` them, else all of the node."""

    node: str
    address: str
    gpus: tuple[Gpu, ...] = ()
    assigned: bool = False


def assign_ranks(ranks: Sequence[str], tasks: Sequence[str]) -> list[list[int]]:
    """The ranks of each task. ``ranks``: for each rank the node of its samples; ``tasks``: for each
    task the node that it is on.

    The tasks of a node share its ranks evenly, neighbours side by side. Who belongs to none of the
    nodes goes where fewest are.
    """
    shares: list[list[int]] = [[] for _ in tasks]
    for node in dict.fromkeys(tasks):
        here = [task for task, at in enumerate(tasks) if at == node]
        wanted = [rank for rank, at in enumerate(ranks) if at == node]
        for i, rank in enumerate(wanted):
            shares[here[i * len(here) // len(wanted)]].append(rank)
    for rank, at in enumerate(ranks):
        if at not in tasks:
            min(shares, key=len).append(rank)
    return shares


def gpus_shared_out(
    places: Sequence[TaskLocation], shares: Sequence[Sequence[int]]
) -> dict[int, Gpu | None]:
    """The GPU of each rank, None: the CPU. Raises :class:`SessionError` where two would share one,
    which NCCL refuses."""
    found: dict[int, Gpu | None] = {}
    on_node: dict[str, int] = {}
    for place, share in zip(places, shares, strict=True):
        taken = 0 if place.assigned else on_node.get(place.address, 0)
        if place.gpus and taken + len(share) > len(place.gpus):
            raise SessionError(
                f"{len(places)} task slots are too few for {sum(map(len, shares))} ranks on GPUs: on "
                f"{place.address} {taken + len(share)} ranks would share {len(place.gpus)}, and each "
                "needs one of its own. With min_ranks several ranks of a task need as many GPUs "
                "(spark.task.resource.gpu.amount), or none; else bring the lost executors back."
            )
        for i, rank in enumerate(share):
            found[rank] = place.gpus[taken + i] if place.gpus else None
        on_node[place.address] = taken + len(share)
    return found
