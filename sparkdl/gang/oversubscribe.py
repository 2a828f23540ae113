"""Several ranks in one task, each a process of its own: commands for such a task.

[Note: fewer task slots than ranks] A gang always has as many ranks, since what it computes depends
on them. Where executors are gone and ``min_slots`` allows it, its barrier stage has as many tasks as
there are slots, and each *hosts* some ranks. First an ordinary job collects what lies in each
partition: a small record, which says on which node the samples are. Then the tasks come, wherever
Spark puts them, and say on which nodes they are; only then does the driver share the ranks out, each
to a task on the node of its samples. The tasks take all slots, so that every node has one. A rank
that finds its samples gone all the same says so as in any gang, and they are computed again.

The processes connect to the driver by themselves; for it, and for each other, they are ranks like any.
They are no forks: torch has threads. Each one reads from its task until that is gone, and is then gone
itself, in the middle of anything. A task ends when its ranks have ended.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from pyspark import BarrierTaskContext, cloudpickle

from sparkdl.errors import SessionError
from sparkdl.gang.command_queue import END_SECONDS
from sparkdl.gang.rank_task import Introduction, RankContext, Rendezvous, gpus_here
from sparkdl.spark.device import Gpu, use_gpu

MODULE = "sparkdl.gang.process"
STOP_SECONDS = END_SECONDS + 1.0
"""After its channel has ended, a rank has so long to end by itself."""


@dataclass(frozen=True)
class Oversubscription:
    """That several ranks may share a task, see the note above. ``min_slots``: the fewest tasks.
    ``node_of``: the node of a partition, from its records; ``node_here``: the one of a task."""

    min_slots: int
    node_of: Callable[[list[Any]], str]
    node_here: Callable[[], str]


@dataclass(frozen=True)
class PackRecords:
    """Task of an ordinary job: a partition's records as one frame."""

    def __call__(self, partition: int, records: Iterable[Any]) -> Iterator[bytes]:
        yield pickle.dumps(list(records))


@dataclass(frozen=True)
class HostedRank:
    """A rank's: which one, its GPU (None: the CPU), the frames of its partition."""

    rank: int
    gpu: Gpu | None
    frames: list[Any]


@dataclass(frozen=True)
class DescribeTask:
    """Command: where a task is. ``device``: of its ranks, as :class:`Rendezvous` says it."""

    node_here: Callable[[], str]
    device: str

    def __call__(self, member: RankContext) -> TaskLocation:
        node = self.node_here()
        gpus, assigned = gpus_here(self.device, BarrierTaskContext.get())
        return TaskLocation(node, member.address, tuple(gpus), assigned and bool(gpus))


@dataclass(frozen=True)
class StartRankProcesses:
    """Command: start the processes of these ranks, of ``size`` in all, until the task ends; ``job`` is
    the number that they name. The key that they need is the task's, and none travels with this."""

    job: int
    size: int
    seats: tuple[HostedRank, ...]

    def __call__(self, member: RankContext) -> None:
        assert member.meeting is not None
        meeting = replace(member.meeting, job=self.job)
        processes: dict[int, subprocess.Popen[bytes]] = {}
        member.kept["processes"] = processes
        member.at_end.callback(_end, processes)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        for seat in self.seats:
            processes[seat.rank] = subprocess.Popen(
                [sys.executable, "-m", MODULE], stdin=subprocess.PIPE, env=environment
            )
        task = BarrierTaskContext.get().taskAttemptId()  # type: ignore[no-untyped-call]
        for seat in self.seats:
            hello = Introduction(seat.rank, self.job, task, self.size, socket.gethostname())
            part = RunHostedRank(meeting, hello, member.address, seat)
            stream = processes[seat.rank].stdin
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):  # it is dead already, see ended
                stream.write(cloudpickle.dumps(part))
                stream.flush()


@dataclass(frozen=True)
class RunHostedRank:
    """What the process of a rank is told by its task, and does."""

    meeting: Rendezvous
    hello: Introduction
    address: str
    seat: HostedRank

    def __call__(self) -> None:
        self.meeting.serve(self.hello, self._member)

    def _member(self, at_end: contextlib.ExitStack) -> RankContext:
        device = torch.device("cpu")
        if self.seat.gpu is not None:
            device = use_gpu(self.seat.gpu)
        hello = self.hello
        return RankContext(hello.rank, hello.ranks, self.address, device, self.seat.frames, at_end)


def ended(member: RankContext) -> dict[int, int]:
    """Command: the ranks whose processes have ended, and how: exit status, or minus a signal."""
    found = {rank: process.poll() for rank, process in member.kept["processes"].items()}
    return {rank: status for rank, status in found.items() if status is not None}


def _end(processes: Mapping[int, subprocess.Popen[bytes]]) -> None:
    """Wait until they have ended, and kill what has not."""
    until = time.monotonic() + STOP_SECONDS
    for process in processes.values():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
    for process in processes.values():
        process.kill()
        process.wait()
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


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
