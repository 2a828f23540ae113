"""Ranks that are processes, joined by Gloo: started once, then given one function after another."""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from forked import forkserver

from sparkdl.collectives.communicator import Communicator

WORLD = 8
PATIENCE = 60.0
_impatient: list[Any] = []
"""In a rank: groups for one use each."""


class Ranks:
    """Runs functions on the *last* ``size`` ranks of the world, so that numbers differ."""

    def __init__(self, pipes: list[Connection]) -> None:
        self.pipes = pipes

    def run(self, size: int, do: Callable[..., Any], *args: Any) -> list[Any]:
        """``do(communicator, *args)`` on every rank of the group; AssertionError if any raises."""
        pipes = self.pipes[-size:]
        for pipe in pipes:
            pipe.send_bytes(pickle.dumps((size, do, args)))
        found = []
        for pipe in pipes:
            assert pipe.poll(PATIENCE), "a rank does not answer"
            found.append(pickle.loads(pipe.recv_bytes()))
        failed = [text for fine, text in found if not fine]
        assert not failed, "\n".join(failed)
        return [value for _, value in found]


@contextlib.contextmanager
def real_ranks() -> Iterator[Ranks]:
    """WORLD processes, forked from one that has imported torch."""
    start = forkserver()
    with tempfile.TemporaryDirectory() as folder:
        ends = [start.Pipe() for _ in range(WORLD)]
        store = os.path.join(folder, "store")
        processes = [
            start.Process(target=serve, args=(rank, store, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(ends)
        ]
        for process, (_, theirs) in zip(processes, ends, strict=True):
            process.start()
            theirs.close()
        try:
            yield Ranks([ours for ours, _ in ends])
        finally:
            for ours, _ in ends:
                ours.close()
            for process in processes:
                process.join(5)
                process.kill()


def serve(rank: int, store: str, pipe: Connection) -> None:
    """The life of one rank."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD,
        timeout=timedelta(seconds=PATIENCE / 2),
    )  # fmt: skip
    groups: dict[int, Any] = {
        size: dist.new_group(range(WORLD - size, WORLD)) for size in range(1, WORLD)
    }
    groups[WORLD] = None
    last_two, soon = [WORLD - 2, WORLD - 1], timedelta(seconds=1)
    _impatient.extend(dist.new_group(last_two, timeout=soon) for _ in range(3))
    with contextlib.suppress(EOFError):
        while True:
            size, do, args = pickle.loads(pipe.recv_bytes())
            try:
                answer = True, do(Communicator(groups[size]), *args)
            except Exception:
                answer = False, traceback.format_exc()
            pipe.send_bytes(pickle.dumps(answer))


def impatient() -> Communicator:
    """Return a group of the last two ranks with a short timeout, for what breaks it."""
    return Communicator(_impatient.pop())
