"""Several ranks in one task, each as a process of its own, and the commands for such a task.

[Note: fewer task slots than ranks] A gang always has the same number of ranks, because its results
depend on it. If executors are lost and ``min_slots`` allows it, the barrier stage has as many tasks
as there are slots, and each task *hosts* some ranks. First an ordinary job collects the content of
each partition: a small record, which tells on which node the samples are. Then the tasks connect
from wherever Spark has started them and report their nodes. Only then does the driver assign the
ranks, each to a task on the node of its samples. The tasks take all slots, so there is one on every
node. If a rank finds that its samples are gone nevertheless, it reports that as in any gang, and
they are computed again.

The processes connect to the driver themselves. To the driver and to each other they are ranks like
any others. They are not forks, because torch has threads. Each reads from a pipe to its task until
the task is gone, and then exits at once, whatever it does. A task ends when its ranks have ended.
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
from sparkdl.gang.channel import END_SECONDS
from sparkdl.gang.rank_task import Introduction, RankContext, Rendezvous
from sparkdl.spark.device import Gpu, gpus_here, use_gpu

MODULE = "sparkdl.gang.process"
STOP_SECONDS = END_SECONDS + 1.0
"""The time in which a rank must end after its channel has ended."""


@dataclass(frozen=True)
class Oversubscription:
    """The permission for several ranks to share a task. See the note above."""

    min_slots: int
    node_of: Callable[[list[Any]], str]  # of a partition, from its records
    node_here: Callable[[], str]


def pack_records(partition: int, records: Iterable[Any]) -> Iterator[bytes]:
    """Run as the body of an ordinary job's tasks: yield the records of a partition as one frame."""
    yield pickle.dumps(list(records))


@dataclass(frozen=True)
class HostedRank:
    """One rank of a task, with its GPU (None means the CPU) and the frames of its partition."""

    rank: int
    gpu: Gpu | None
    frames: list[Any]


def describe_task(node_here: Callable[[], str], device: str, member: RankContext) -> TaskLocation:
    """Run as a command: return the location of a task; ``device`` is as in :class:`Rendezvous`."""
    node = node_here()
    gpus, assigned = gpus_here(device, BarrierTaskContext.get())
    return TaskLocation(node, member.address, tuple(gpus), assigned and bool(gpus))


def start_rank_processes(
    job: int, size: int, ranks: Sequence[HostedRank], member: RankContext
) -> None:
    """Run as a command: start the processes of these of ``size`` ranks, which run until the task ends.

    The command does not carry the key that they need; it is that of the task.
    """
    assert member.meeting is not None
    meeting = replace(member.meeting, job=job)
    processes: dict[int, subprocess.Popen[bytes]] = {}
    member.kept["processes"] = processes
    member.at_end.callback(_end, processes)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for hosted in ranks:
        processes[hosted.rank] = subprocess.Popen(
            [sys.executable, "-m", MODULE], stdin=subprocess.PIPE, env=environment
        )
    task = BarrierTaskContext.get().taskAttemptId()  # type: ignore[no-untyped-call]
    for hosted in ranks:
        hello = Introduction(hosted.rank, job, task, size, socket.gethostname())
        stream = processes[hosted.rank].stdin
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already, see ended
            stream.write(cloudpickle.dumps((meeting, hello, member.address, hosted)))
            stream.flush()


def run_hosted_rank(
    meeting: Rendezvous, hello: Introduction, address: str, hosted: HostedRank
) -> None:
    """Be a rank until it ends, in a process of its own, as its task says."""

    def member(at_end: contextlib.ExitStack) -> RankContext:
        device = torch.device("cpu") if hosted.gpu is None else use_gpu(hosted.gpu)
        return RankContext(hosted.rank, hello.ranks, address, device, hosted.frames, at_end)

    meeting.serve(hello, member)


def ended(member: RankContext) -> dict[int, int]:
    """Run as a command: return the exit status, or minus the signal, of ranks that have ended."""
    found = {rank: process.poll() for rank, process in member.kept["processes"].items()}
    return {rank: status for rank, status in found.items() if status is not None}


def _end(processes: Mapping[int, subprocess.Popen[bytes]]) -> None:
    """Wait until the processes have ended, and kill those that do not."""
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
    """The location of a task."""

    node: str  # a name that is the same for all processes there
    address: str
    gpus: tuple[Gpu, ...] = ()  # its own if Spark assigned some, else all of the node
    assigned: bool = False


def assign_ranks(ranks: Sequence[str], tasks: Sequence[str]) -> list[list[int]]:
    """Assign ranks, by the nodes of their samples, to tasks, by their nodes.

    The tasks of a node share its ranks evenly, with neighbouring ranks in the same task. A rank
    whose samples are on none of the nodes goes to the task with the fewest ranks.
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
    """Return the GPU of each rank, or None for the CPU."""
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
