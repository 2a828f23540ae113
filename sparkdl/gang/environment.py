"""What torchrun says in a process's environment, said to the ranks of a gang: libraries look there.

Accelerate, Lightning and DeepSpeed ask ``LOCAL_RANK`` which GPU is theirs, and take a process where it
is missing for one that trains alone. So the ranks of a node are numbered in the order of their GPUs,
as torch counts them: where they have all of the node's, each finds its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparkdl.errors import SessionError
from sparkdl.gang.rank_task import RankContext

logger = logging.getLogger("sparkdl")


@dataclass(frozen=True)
class Where:
    """Where a rank is: its node's address, the GPU that it has there, by torch's number and by the slot
    that it is in, if any; and on rank 0 the port that is kept for it."""

    node: str
    gpu: int | None = None
    slot: str | None = None
    port: int = 0


def gpus_of_ranks(ranks: Sequence[Where]) -> set[tuple[str, str]]:
    """The GPUs that they have."""
    return {(where.node, where.slot) for where in ranks if where.slot is not None}


def check_unshared(ranks: Sequence[Where]) -> None:
    """Raise :class:`SessionError` where ranks share a GPU, though nobody has said how many there be."""
    on_gpus = sum(where.slot is not None for where in ranks)
    gpus = len(gpus_of_ranks(ranks))
    if gpus < on_gpus:
        raise SessionError(
            f"{on_gpus} ranks, one for each task slot, would share {gpus} GPU{'s' * (gpus > 1)}. Let "
            "Spark assign them: spark.executor.resource.gpu.amount and .discoveryScript say how many "
            "an executor has, spark.task.resource.gpu.amount=1 gives each rank one. ranks= says how "
            'many shall be there all the same; device="cpu" leaves GPUs alone.'
        )


def variables(ranks: Sequence[Where], gang: str) -> list[dict[str, str]]:
    """For each rank, what torchrun would say to it."""
    nodes = list(dict.fromkeys(where.node for where in ranks))
    size, found = str(len(ranks)), []
    for rank, where in enumerate(ranks):
        beside = [other for other, there in enumerate(ranks) if there.node == where.node]
        beside.sort(key=lambda other: (ranks[other].gpu or 0, other))
        found.append(
            {
                "RANK": str(rank),
                "WORLD_SIZE": size,
                "LOCAL_RANK": str(beside.index(rank)),
                "LOCAL_WORLD_SIZE": str(len(beside)),
                "GROUP_RANK": str(nodes.index(where.node)),
                "GROUP_WORLD_SIZE": str(len(nodes)),
                "ROLE_NAME": "default",
                "ROLE_RANK": str(rank),
                "ROLE_WORLD_SIZE": size,
                "MASTER_ADDR": ranks[0].node,
                "MASTER_PORT": str(ranks[0].port),
                "TORCHELASTIC_RUN_ID": gang,
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_MAX_RESTARTS": "0",
                "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 serves at the port, if anyone
            }
        )
    return found


LEFT_AS_THEY_ARE = {"OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
"""What torchrun says where nobody has said otherwise."""


@dataclass(frozen=True)
class Announce:
    """Command: say it, until the rank ends; ``told``: for each rank."""

    told: Sequence[Mapping[str, str]]

    def __call__(self, member: RankContext) -> None:
        gpu, own = member.device.index, self.told[member.rank]
        if gpu is not None and str(gpu) != own["LOCAL_RANK"]:
            logger.warning(
                "rank %s computes on GPU %s of its node, and a library that looks at LOCAL_RANK takes "
                "%s: let CUDA_VISIBLE_DEVICES of the executors name the GPUs of this session alone.",
                member.rank,
                gpu,
                own["LOCAL_RANK"],
            )
        said = {**LEFT_AS_THEY_ARE, **os.environ}
        say(member.at_end, {**{key: said[key] for key in LEFT_AS_THEY_ARE}, **own})


def say(at_end: contextlib.ExitStack, said: Mapping[str, str]) -> None:
    """Set these variables; ``at_end`` they are what they were, since a worker has other tasks then."""
    before = {key: os.environ.get(key) for key in said}
    at_end.callback(_restore, before)
    os.environ.update(said)


def _restore(before: Mapping[str, str | None]) -> None:
    for key, value in before.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value


def keep_port(member: RankContext) -> int:
    """A port of the node that the system gives to nobody, until the rank ends. It is bound, and not
    listened at: who is told of it can."""
    family = socket.getaddrinfo(member.address, 0, type=socket.SOCK_STREAM)[0][0]
    kept = member.at_end.enter_context(socket.socket(family, socket.SOCK_STREAM))
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind((member.address, 0))
    port = int(kept.getsockname()[1])
    if sys.platform != "linux":  # elsewhere a port that is bound is taken
        kept.close()
    return port
