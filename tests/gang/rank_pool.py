"""Gangs without Spark: in place of a barrier stage there is a pool of processes."""

from __future__ import annotations

import contextlib
import itertools
import pickle
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

from forked import forkserver
from pooled_rank import live
from without_spark import Partitions, without_spark

from sparkdl.engines.gang import engine as gang_start
from sparkdl.errors import StateLostError
from sparkdl.gang import driver
from sparkdl.gang.rank_task import Introduction, Rendezvous
from sparkdl.train import preflight

PATIENCE = 60.0


class RankPool:
    """Processes that serve one gang after another, each started when it is needed, or needed again."""

    def __init__(self) -> None:
        self._processes: dict[int, tuple[Any, Connection]] = {}
        self._busy: set[int] = set()
        self._tasks = itertools.count()

    def serve(self, source: Partitions, meeting: Rendezvous) -> None:
        """Let a rank for each partition meet its driver, when those of the gang before have ended."""
        self.wait()
        for rank, record in enumerate(source.frames):
            hello = Introduction(rank, meeting.job, next(self._tasks), len(source.frames), "here")
            asked = pickle.dumps((meeting, hello, record, source.slab))
            self._process(rank)[1].send_bytes(asked)
            self._busy.add(rank)

    def lost(self) -> bool:
        """Return whether a process has ended that was to serve."""
        return any(not self._processes[rank][0].is_alive() for rank in self._busy)

    def wait(self) -> None:
        """Wait until all have left the gang that they served."""
        for rank in sorted(self._busy):
            process, pipe = self._processes[rank]
            assert pipe.poll(PATIENCE), f"rank {rank} still serves a gang that has gone"
            try:
                pipe.recv_bytes()
            except EOFError:
                process.join()
                del self._processes[rank]
        self._busy.clear()

    def close(self) -> None:
        for process, pipe in self._processes.values():
            pipe.close()
            process.join(5)
            process.kill()

    def _process(self, rank: int) -> tuple[Any, Connection]:
        if rank not in self._processes:
            start = forkserver()
            ours, theirs = start.Pipe()
            process = start.Process(target=live, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._processes[rank] = process, ours
        return self._processes[rank]


class PooledJob:
    """The pool in place of a :class:`sparkdl.gang.driver.BarrierJob`."""

    def __init__(self, pool: RankPool) -> None:
        self._pool = pool

    def submit(self, source: Partitions, meeting: Rendezvous, description: str) -> None:
        self._pool.serve(source, meeting)

    def cancel(self) -> None:
        """Do nothing: ranks end with their connections."""

    def check(self) -> None:
        if self._pool.lost():
            raise StateLostError("the gang did not come together: a rank ended at once.")

    def close(self) -> None:
        self._pool.wait()


@contextlib.contextmanager
def gangs_of(pool: RankPool) -> Iterator[None]:
    """In the block ``Trainer.fit`` needs no Spark, and the ranks of its gangs are of the pool."""

    def enough(context: Any, ranks: int, *args: Any, **how: Any) -> int:
        return ranks

    with (
        without_spark(),
        mock.patch.object(preflight, "check_slots", enough),
        mock.patch.object(driver, "check_slots", enough),
        mock.patch.object(driver, "BarrierJob", side_effect=lambda *args: PooledJob(pool)),
        mock.patch.object(gang_start, "zip_frames", Partitions.zipped),
    ):
        yield
