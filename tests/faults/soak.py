"""Train while processes are killed and slabs deleted at random: same bits, and nothing is left.

    PYTHONPATH=tests python tests/faults/soak.py [--iterations 2000] [--every 6] [--seed 0]
                                                 [--strategy ddp]

A script of its own for the long form; tests/faults/test_soak.py runs a short one. Two executors with
slab roots of their own, snapshots every second, a checkpoint every 50 iterations: where both
executors are killed within seconds, all snapshots are gone. A thread of the driver strikes every few
seconds and iterations, what and when is drawn from a seed: a Python worker, an executor's JVM, or a
node's slabs. With ``--strategy`` it is a gang that trains.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fork_server
from gang_lost import DDP, FSDP, PIPELINE, TENSOR, ZERO1
from harness import processes
from harness.cluster import PATIENT
from harness.faulty import frame, outcome, trainer
from harness.slabs import slabs_apart

import sparkdl

GAP, LOOKS = 10, 20
LOOK_SECONDS = 0.005
WITHIN_SECONDS = 0.1
"""Not just where an iteration begins."""
STEADY = 0.1
"""Of the iterations: at either end, compared with each other."""
SETTINGS = {
    "spark.sparkdl.slab.dir": "slabs",
    "spark.sparkdl.snapshot.seconds": "1",
    "spark.executor.memory": "512m",
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": DDP,
    "zero1": ZERO1,
    "fsdp": FSDP,
    "tensor": TENSOR,
    "pipeline": PIPELINE,
}


class Strikes(threading.Thread):
    """Faults, until stopped. Which they are, and how many iterations come between two, follows from the
    seed: ``GAP`` to twice as many, on a slow machine as on a fast one; and at least some seconds, about
    ``every``. One that finds nothing to strike, as the executor struck before has not come back, waits
    until it does."""

    def __init__(self, driver: bytes, every: float, seed: int, done: Callable[[], int]) -> None:
        super().__init__(daemon=True)
        self._driver, self._every, self._iterations = driver, every, done
        self._draw, self._draw_victim = random.Random(seed), random.Random(seed)
        self._stopped = threading.Event()
        self.done: Counter[str] = Counter()

    def run(self) -> None:
        before = 0
        while not self._stopped.is_set():
            kind = self._draw.choice(["worker", "worker", "executor", "slabs"])
            due = before + self._draw.randint(GAP, 2 * GAP)
            self._stopped.wait(self._draw.uniform(0.5, 1.5) * self._every)
            while self._iterations() < due and not self._stopped.wait(LOOK_SECONDS):
                pass
            self._stopped.wait(self._draw.uniform(0, WITHIN_SECONDS))
            strike = getattr(self, f"_{kind}")
            while not self._stopped.is_set():
                before = self._iterations()
                if strike():
                    self.done[kind] += 1
                    break
                self._stopped.wait(20 * LOOK_SECONDS)

    def stop(self) -> None:
        self._stopped.set()
        self.join()

    def _executor(self) -> bool:
        found = processes.executors(self._driver)
        if len(found) < 2:
            return False
        processes.kill(self._draw_victim.choice(sorted(found)))
        return True

    def _worker(self) -> bool:
        above, parents = set(processes.executors(self._driver)), fork_server.parents()
        daemons = {pid for pid, parent in parents.items() if parent in above}
        workers = [pid for pid, parent in parents.items() if parent in daemons]
        if workers:
            processes.kill(self._draw_victim.choice(sorted(workers)))
        return bool(workers)

    def _slabs(self) -> bool:
        found = slabs_apart()
        if found:
            shutil.rmtree(self._draw_victim.choice(found), ignore_errors=True)
        return bool(found)


class Memory(sparkdl.Callback):
    """Of the driver: resident MB of its Python and seconds, after every iteration, and whether
    gradients went between nodes in it, or all replicas ran on one of them; the MB of its JVM's heap
    that are in use after a collection, ``LOOKS`` times."""

    def __init__(self, context: Any, iterations: int) -> None:
        self._jvm, self._every = context._jvm, max(1, iterations // LOOKS)
        self.python: list[float] = []
        self.heap: list[float] = []
        self.seconds: list[float] = []
        self.apart: list[bool] = []

    def on_iteration_end(self, trainer: Any, state: Any) -> None:
        self.python.append(resident(os.getpid()))
        self.seconds.append(state.timings["iteration"])
        self.apart.append(state.bytes_sent > 0)
        if state.iteration % self._every == 0:
            self._jvm.System.gc()
            runtime = self._jvm.java.lang.Runtime.getRuntime()
            self.heap.append((runtime.totalMemory() - runtime.freeMemory()) / (1 << 20))

    def of(self, apart: bool) -> list[float]:
        """Seconds of the iterations that ran so."""
        return [s for s, a in zip(self.seconds, self.apart, strict=True) if a == apart]


def started_here() -> list[int]:
    """Executors, and the daemons and Python workers below them: they work in folders of their own."""
    found = []
    for pid in processes.all_pids():
        with contextlib.suppress(OSError):
            if Path(os.readlink(f"/proc/{pid}/cwd")).is_relative_to(Path.cwd() / "spark" / "work"):
                found.append(pid)
    return found


def resident(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def ends(values: list[float]) -> tuple[float, float]:
    """The medians of the first and of the last part, after what warms up."""
    warm = values[len(values) // 5 :]
    part = max(1, round(STEADY * len(values)))
    return statistics.median(warm[:part]), statistics.median(warm[-part:])


def by_fifth(values: list[float]) -> list[float]:
    """The median of each fifth."""
    cuts = [round(len(values) * n / 5) for n in range(6)]
    return [statistics.median(values[a:b]) for a, b in itertools.pairwise(cuts) if a < b]


def how(strategy: str) -> dict[str, Any]:
    """What a trainer is told; an empty ``strategy``: no gang."""
    return {"engine": "gang", **STRATEGIES[strategy]} if strategy else {}


def soak(
    master: str, iterations: int, every: float, seed: int, strategy: str = ""
) -> dict[str, Any]:
    """Train disturbed in the working directory; what came of it."""
    from launch import session

    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sparkdl").addHandler(handler)
    with session(master, **PATIENT, **SETTINGS) as spark:
        context = spark.sparkContext
        memory = Memory(context, iterations)
        strikes = Strikes(processes.driver(context), every, seed, lambda: len(memory.seconds))
        strikes.start()
        started = time.perf_counter()
        kept = sparkdl.Checkpoint(Path.cwd() / "checkpoints", every=sparkdl.every(50))
        given = {"iterations": iterations, "callbacks": [memory], "checkpoint": kept}
        run = trainer(2, **given, **how(strategy))
        trained = run.fit(frame(spark, 2))
        seconds = time.perf_counter() - started
        strikes.stop()
        left = {
            "slabs": list(map(str, slabs_apart())),
            "persisted": context._jsc.getPersistentRDDs().size(),
        }
    deadline = time.monotonic() + 30
    while started_here() and time.monotonic() < deadline:
        time.sleep(0.2)
    return {
        **outcome(trained),
        "iterations": iterations,
        "seconds": seconds,
        "strikes": dict(strikes.done),
        "recoveries": [line for line in logged if "Continued from" in line],
        "driver MB": [ends(memory.python), ends(memory.heap)],
        "iteration ms": {
            where: [1000 * value for value in by_fifth(some)]
            for where in ("on two nodes", "on one node")
            if (some := memory.of(where == "on two nodes"))
        },
        "heap MB": by_fifth(memory.heap),
        "left": left | {"processes": started_here()},
    }


def undisturbed(iterations: int, strategy: str) -> dict[str, Any]:
    """The same without any fault, in one process where it is no gang."""
    from launch import session

    same = {"engine": "local", **how(strategy)}
    with session("local[2]") as spark:
        return outcome(trainer(2, iterations=iterations, **same).fit(frame(spark, 2)))


def shown(values: list[float]) -> str:
    return " ".join(f"{value:.0f}" for value in values)


def main() -> None:
    from launch import answer, launch, spec

    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        given = spec()
        alone = given.pop("alone")
        answer(undisturbed(given["iterations"], given["strategy"]) if alone else soak(**given))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--every", type=float, default=6.0, help="seconds between faults, at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", choices=STRATEGIES, default="", help="of a gang")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        common = {
            "seconds": 4 * 3600,
            "iterations": options.iterations,
            "strategy": options.strategy,
        }
        script, path = Path(__file__).resolve(), Path(folder)
        expected = launch(script, path / "alone", alone=True, **common)
        found = launch(
            script,
            path / "soak",
            alone=False,
            master="local-cluster[2,1,1024]",
            every=options.every,
            seed=options.seed,
            **common,
        )
    same = all(found[name] == expected[name] for name in expected)
    print(
        f"{found['iterations']} iterations in {found['seconds']:.0f} s, faults: {found['strikes']}"
    )
    print(f"recoveries from lost state: {len(found['recoveries'])}; equal to the bit: {same}")
    python, heap = found["driver MB"]
    print(
        f"driver's Python, MB: {python[0]:.0f} -> {python[1]:.0f}; live in its JVM's heap: "
        f"{heap[0]:.0f} -> {heap[1]:.0f}, by fifth of the run: {shown(found['heap MB'])}"
    )
    for where, fifths in found["iteration ms"].items():
        print(f"median iteration {where}, ms, by fifth of these: {shown(fifths)}")
    print(f"left: {found['left']}")
    sys.exit(not same)


if __name__ == "__main__":
    main()
