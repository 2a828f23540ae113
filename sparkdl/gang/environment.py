"""The environment variables that torchrun sets, for the ranks of a gang, because libraries read them.

Accelerate, Lightning and DeepSpeed read ``LOCAL_RANK`` to find the GPU of a process. If it is
missing, they assume a process that trains alone. So the ranks of a node are numbered in the order
of their GPUs, as torch counts them: if they have all GPUs of the node, each finds its own.
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
    """The location of a rank."""

    node: str
    gpu: int | None = None  # torch's number
    slot: str | None = None  # the hardware slot of its GPU
    port: int = 0  # on rank 0: reserved for it


def gpus_of_ranks(ranks: Sequence[Where]) -> set[tuple[str, str]]:
    """Return the GPUs of the ranks."""
    return {(where.node, where.slot) for where in ranks if where.slot is not None}


def check_unshared(ranks: Sequence[Where]) -> None:
    """Check that ranks do not share a GPU if the user has not set their number."""
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
    """Return, for each rank, the variables that torchrun would set."""
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
"""The values that torchrun sets unless the variables are set already."""


@dataclass(frozen=True)
class Announce:
    """The command that sets the variables until the rank ends.

    ``told`` has the variables of each rank.
    """

    told: Sequence[Mapping[str, str]]

    def __call__(self, member: RankContext) -> None:
        own = self.told[member.rank]
        said = {**LEFT_AS_THEY_ARE, **os.environ}
        say(member.at_end, {**{key: said[key] for key in LEFT_AS_THEY_ARE}, **own})


def tell_of_other_gpu(member: RankContext) -> None:
    """Warn if a library that takes the GPU number ``LOCAL_RANK`` would not take this rank's GPU."""
    gpu, told = member.device.index, os.environ.get("LOCAL_RANK")
    if gpu is not None and str(gpu) != told:
        logger.warning(
            "rank %s computes on GPU %s of its node, and a library that looks at LOCAL_RANK takes %s: "
            "let CUDA_VISIBLE_DEVICES of the executors name the GPUs of this session alone, and use "
            "no more ranks than GPUs.",
            member.rank,
            gpu,
            told,
        )


def say(at_end: contextlib.ExitStack, said: Mapping[str, str]) -> None:
    """Set these variables.

    ``at_end`` restores them, since a worker runs other tasks afterwards.
    """
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
    """Reserve a port of the node until the rank ends, so that the system assigns it to nobody else.

    The port is bound but nothing listens on it, so whoever is told the number can listen.
    """
    family = socket.getaddrinfo(member.address, 0, type=socket.SOCK_STREAM)[0][0]
    kept = member.at_end.enter_context(socket.socket(family, socket.SOCK_STREAM))
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind((member.address, 0))
    port = int(kept.getsockname()[1])
    if sys.platform != "linux":  # on other systems nobody else can use a bound port
        kept.close()
    return port
