"""The life of a process of the pool: a rank of one gang after another."""

from __future__ import annotations

import contextlib
import gc
import pickle
from multiprocessing.connection import Connection
from typing import Any

import torch

from sparkdl.gang.rank_task import Introduction, RankContext, Rendezvous
from sparkdl.slab.pool import release
from sparkdl.slab.root import SlabConfig


def live(pipe: Connection) -> None:
    """Serve gangs, as the tasks of a barrier stage do, until the pipe is closed."""
    torch.set_num_threads(1)
    gc.freeze()  # what was imported is not looked through at the end of each gang
    with contextlib.suppress(EOFError):
        while True:
            serve(*pickle.loads(pipe.recv_bytes()))
            pipe.send_bytes(b"")


def serve(meeting: Rendezvous, hello: Introduction, record: Any, slab: SlabConfig) -> None:
    """Be a rank of one gang, whose partition has this record."""

    def context(at_end: contextlib.ExitStack) -> RankContext:
        cpu = torch.device("cpu")
        return RankContext(hello.rank, hello.ranks, "127.0.0.1", cpu, [record], at_end)

    meeting.serve(hello, context)
    release(slab.name)
