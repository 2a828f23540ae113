"""Faults at moments of their own: a thread of the driver that strikes while it trains."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import fork_server

from harness import processes
from harness.slabs import all_slabs

LOOK_SECONDS = 0.005
WITHIN_SECONDS = 0.1
"""Not just where an iteration begins."""
Strike = tuple[str, int, float]
"""A kind, and when it is due: so many iterations and seconds after the strike before."""


class Strikes(threading.Thread):
    """Faults, one after another, until there is no other or they are stopped. One that finds nothing to
    strike, as the executor struck before has not come back, waits until it does.

    Args:
        context: The SparkContext, of executors in processes of their own or of local mode.
        plan: The strikes.
        seed: Draws the victims, and the moments within an iteration.
        iterations: Returns how many are done.
        ready: Returns whether the driver may be killed.
    """

    def __init__(
        self,
        context: Any,
        plan: Iterable[Strike],
        seed: int | str,
        iterations: Callable[[], int],
        ready: Callable[[], bool] = bool,
    ) -> None:
        super().__init__(daemon=True)
        self._driver = processes.driver(context)
        self._jvm = int(context._jvm.java.lang.ProcessHandle.current().pid())
        self._plan, self._iterations, self._ready = plan, iterations, ready
        self._draw = random.Random(seed)
        self._stopped = threading.Event()
        self.done: Counter[str] = Counter()

    def run(self) -> None:
        before = 0
        for kind, iterations, seconds in self._plan:
            if self._stopped.is_set():
                break
            self._stopped.wait(seconds)
            while self._iterations() < before + iterations and not self._stopped.is_set():
                self._stopped.wait(LOOK_SECONDS)
            self._stopped.wait(self._draw.uniform(0, WITHIN_SECONDS))
            strike = getattr(self, f"_{kind.replace(' ', '_')}")
            while not self._stopped.is_set():
                before = self._iterations()
                if strike():
                    self.done[kind] += 1
                    break
                self._stopped.wait(20 * LOOK_SECONDS)

    def stop(self) -> None:
        self._stopped.set()
        self.join()

    def _kill(self, pids: Iterable[int]) -> bool:
        pids = list(pids)
        for pid in pids:
            processes.kill(pid)
        return bool(pids)

    def _one(self, pids: Iterable[int]) -> list[int]:
        return [self._draw.choice(some)] if (some := sorted(pids)) else []

    def _executor(self) -> bool:
        found = processes.executors(self._driver)
        return len(found) > 1 and self._kill(self._one(found))

    def _two_executors(self) -> bool:
        found = sorted(processes.executors(self._driver))
        return len(found) > 2 and self._kill(self._draw.sample(found, 2))

    def _daemons(self) -> dict[int, int]:
        """The processes that fork Python workers, each with the JVM above it."""
        above = set(processes.executors(self._driver)) or {self._jvm}
        return {pid: parent for pid, parent in fork_server.parents().items() if parent in above}

    def _worker(self) -> bool:
        daemons = self._daemons()
        return self._kill(
            self._one(pid for pid, above in fork_server.parents().items() if above in daemons)
        )

    def _daemon(self) -> bool:
        daemons = self._daemons()
        chosen = self._one(set(daemons.values()))
        return self._kill(pid for pid, above in daemons.items() if above in chosen)

    def _slabs(self) -> bool:
        found = all_slabs()
        if found:
            shutil.rmtree(self._draw.choice(found), ignore_errors=True)
        return bool(found)

    def _driver_itself(self) -> bool:
        if self._ready():
            processes.kill(os.getpid())
        return False
