"""Faults, said fluently: ``at(job="sync", iteration=7, partition=1).kill_worker()``.

A fault strikes in one task of one iteration, however often that task is tried, as many times as it
says and no more. Each time leaves a note in a folder that all processes share: so an attempt knows
that it was done, and a test that it happened.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyspark import TaskContext

from harness import processes

JOBS = ("fb", "sync", "validation")
LARGEST_DISK = 1 << 30
"""Bytes. What is larger is no file system that a test made, and is not filled."""


@dataclass(frozen=True)
class Site:
    """Where a fault strikes. ``iteration`` counts from 1; for a validation: the iteration before it."""

    job: str
    iteration: int
    partition: int

    def kill_worker(self, times: int = 1) -> Fault:
        """SIGKILL for the Python worker that runs the task."""
        return Fault(self, "kill_worker", times)

    def kill_executor(self, times: int = 1) -> Fault:
        """SIGKILL for the executor's JVM, whose Python workers then end."""
        return Fault(self, "kill_executor", times)

    def kill_host(self) -> Fault:
        """SIGKILL for the standalone worker above the executor, then the executor: lost for good."""
        return Fault(self, "kill_host", 1)

    def raise_once(self) -> Fault:
        return Fault(self, "raise_error", 1)

    def raise_always(self) -> Fault:
        return Fault(self, "raise_error", 1 << 10)

    def sleep(self, seconds: float) -> Fault:
        """A straggler: for speculation."""
        return Fault(self, "sleep", 1, seconds=seconds)

    def delete_slabs(self, files: str = "*") -> Fault:
        """Of all runs' roots that this task's node has: the files that match; all: the roots, too."""
        return Fault(self, "delete_slabs", 1, files=files)

    def delete_shuffle_files(self, folder: Path) -> Fault:
        """All below ``folder``, which holds the local directories of the executors."""
        return Fault(self, "delete_shuffle_files", 1, folder=str(folder))

    def fill_disk(self, folder: Path) -> Fault:
        """Leave no room on the file system of ``folder``, which must be a small one."""
        return Fault(self, "fill_disk", 1, folder=str(folder))


def at(*, job: str, iteration: int, partition: int) -> Site:
    """``job``: "fb", "sync" or "validation"; ``partition``: of the job, hence a replica or a slice.

    Where an iteration is one stage, a replica's task updates all slices of the iteration before: there
    the partition of "sync" is that replica.
    """
    assert job in JOBS, job
    return Site(job, iteration, partition)


@dataclass(frozen=True)
class Fault:
    """``kind`` at ``site``, ``times`` times. ``slabs``: where slab roots are, as sparkdl is told."""

    site: Site
    kind: str
    times: int
    seconds: float = 0.0
    files: str = ""
    folder: str = ""
    notes: str = ""
    slabs: str = "slabs"

    def into(self, notes: Path, slabs: str = "slabs") -> Fault:
        """The same with a folder of its own for its notes."""
        name = f"{self.kind} in {self.site.job} {self.site.iteration}.{self.site.partition}"
        (notes / name).mkdir(parents=True)
        return replace(self, notes=str(notes / name), slabs=slabs)

    def strike(self, job: str, iteration: int) -> None:
        """Called by a task at a site: does it, where it is due there and then."""
        context = TaskContext.get()
        if context is None or (job, iteration) != (self.site.job, self.site.iteration):
            return
        if context.partitionId() != self.site.partition:
            return
        number = next((k for k in range(self.times) if self._note(f"struck-{k}", context)), None)
        if number is None:
            self._note(f"passed-{context.attemptNumber()}", context)
        else:
            deleted = _KINDS[self.kind](self)
            if deleted is not None:
                self._note(f"deleted-{number}", context, deleted=deleted)

    def _note(self, name: str, context: TaskContext, **more: Any) -> bool:
        """Write a note, complete from the first moment; False: there is one of that name."""
        draft = Path(self.notes) / f".{name}-{os.getpid()}"
        text = {
            "attempt": context.attemptNumber(),
            "worker": os.getpid(),
            "executor": executor_here(),
            "time": time.time(),
            **more,
        }
        draft.write_text(json.dumps(text))
        try:
            os.link(draft, Path(self.notes) / name)
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        return True

    def told(self, what: str = "struck") -> list[dict[str, Any]]:
        """The notes, in order: what attempts it struck, or which ``passed`` when it was over; how many
        files it ``deleted``."""
        found = sorted(Path(self.notes).glob(f"{what}-*"), key=lambda note: note.name)
        return [json.loads(note.read_text()) for note in found]


def executor_here() -> int:
    """The JVM of the executor that this Python worker belongs to; 0 in local mode."""
    pid = os.getpid()
    while pid > 1:
        if processes.is_executor(pid):
            return pid
        pid = processes.parent(pid)
    return 0


def _raise_error(fault: Fault) -> None:
    raise OSError(f"injected into {fault.site.job}")


def _kill_worker(fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _kill_executor(fault: Fault) -> None:
    pid = executor_here()
    assert pid, "no executor above this process"
    os.kill(pid, signal.SIGKILL)
    time.sleep(60)  # the daemon ends with its JVM, and this process with the daemon


def _kill_host(fault: Fault) -> None:
    executor = executor_here()
    os.kill(processes.parent(executor), signal.SIGKILL)
    os.kill(executor, signal.SIGKILL)
    time.sleep(60)


def _sleep(fault: Fault) -> None:
    time.sleep(fault.seconds)


def _delete_slabs(fault: Fault) -> int:
    paths = list(Path(fault.slabs).glob(f"sparkdl-*/{fault.files}"))
    for path in paths:
        path.unlink(missing_ok=True)
    if fault.files == "*":
        for root in Path(fault.slabs).glob("sparkdl-*"):
            shutil.rmtree(root, ignore_errors=True)
    return len(paths)


def _delete_shuffle_files(fault: Fault) -> int:
    paths = list(Path(fault.folder).glob("**/blockmgr-*/*/shuffle_*"))
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)


def _fill_disk(fault: Fault) -> None:
    status = os.statvfs(fault.folder)
    assert status.f_blocks * status.f_frsize <= LARGEST_DISK, fault.folder
    with contextlib.ExitStack() as files:
        step = 1 << 20
        ballast = files.enter_context((Path(fault.folder) / "ballast").open("wb"))
        while step >= status.f_frsize:
            try:
                os.posix_fallocate(ballast.fileno(), ballast.seek(0, os.SEEK_END), step)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                step //= 2


_KINDS: dict[str, Callable[[Fault], int | None]] = {
    "raise_error": _raise_error,
    "kill_worker": _kill_worker,
    "kill_executor": _kill_executor,
    "kill_host": _kill_host,
    "sleep": _sleep,
    "delete_slabs": _delete_slabs,
    "delete_shuffle_files": _delete_shuffle_files,
    "fill_disk": _fill_disk,
}
