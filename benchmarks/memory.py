"""Peak memory of a replica, beside a rank of DDP: 25 M parameters, Adam.

    python benchmarks/memory.py [--depth 25] [--iterations 20] [--quick] [--json FILE]

25 square layers of 1000 (``--depth``: 4 MB each), M = N = 2 in ``local[2]``, against DDP with 2 ranks.
Every 0.2 s ``/proc/PID/smaps_rollup`` of all Python workers, or of all ranks, is read. A page that n
processes map counts 1/n for each, so that sums are true:

* private: anonymous memory, which no other process sees (torch itself, activations, copies);
* shared: shared memory that is mapped. For sparkdl that is slabs: gradients, the state of the slices;
* files: pages of libraries and other mapped files, which the kernel drops when it wants them.

The peak is of private and shared together, over the whole run; the figure of a replica is the sum over
all workers divided by M. "steady" is the median of the last third of the samples. Slabs that no process
maps at the moment count nowhere among these: the slab directory's size is beside them. "imports" is a
Python process that has imported sparkdl and torch and does nothing.

Optimizer state: the bytes of the moments in the file of each slice of a checkpoint, for several N.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import ddp
from harness import (
    RANKS,
    hardware,
    in_fresh_process,
    markdown,
    options,
    session,
    trainer,
    write_json,
)
from models import squares
from safetensors import safe_open
from usage import SHARES, Watch, shares

import sparkdl

WIDTH = 1000
MB = 1_000_000
SHARED_MEMORY = "/dev/shm"

Figures = dict[str, dict[str, float]]
"""Row -> MB by column."""


@dataclass
class EndWatch(sparkdl.Callback):
    """Ends the watch after an iteration, and takes the size of the slabs."""

    watch: Watch
    iteration: int
    slabs: Path
    nbytes: int = 0

    def on_iteration_end(self, trainer, state) -> None:
        if state.iteration == self.iteration:
            self.watch.end()
            files = [path.stat() for path in self.slabs.rglob("*") if path.is_file()]
            self.nbytes = sum(512 * file.st_blocks for file in files)


def with_sparkdl(depth: int, iterations: int) -> Figures:
    """What the workers of a fit hold."""
    work = squares(WIDTH, depth)
    slabs = Path(tempfile.mkdtemp(prefix="memory-", dir=SHARED_MEMORY))
    spark = session(**{"spark.sparkdl.slab.dir": str(slabs)})
    try:
        watch = Watch()
        watch.start()
        end = EndWatch(watch, iterations, slabs)
        stop = sparkdl.max_iteration(iterations)
        trainer(work, work.batches[0], stop, callbacks=[end]).fit(work.rdd(spark, RANKS))
    finally:
        watch.end()
        spark.stop()
        shutil.rmtree(slabs)
    rows = figures(watch)
    rows["slab directory / replicas"] = {"shared": end.nbytes / RANKS / MB}
    return rows


def with_ddp(depth: int, iterations: int) -> Figures:
    """What the ranks hold."""
    watch = Watch()
    watch.start()
    ddp.step_ms(f"{WIDTH}x{depth}", squares(WIDTH, depth).batches[0], iterations, 0)
    watch.end()
    return figures(watch)


def imports() -> Figures:
    """What a process holds that has only imported the two."""
    code = "import sparkdl, torch; print(torch.zeros(9).sum(), flush=True); input()"
    command = [sys.executable, "-c", code]
    pipes = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipes, stdout=pipes) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = shares(process.pid)
        process.communicate(b"\n")
    return {"imports": {part: value / MB for part, value in found.items()}}


def figures(watch: Watch) -> Figures:
    """Peak and steady share of each replica or rank, and the peak of the largest process."""
    totals = [
        {part: sum(process[part] for process in sample) / RANKS / MB for part in SHARES}
        for sample in watch.samples
        if sample
    ]
    each = [
        {part: process[part] / MB for part in SHARES}
        for sample in watch.samples
        for process in sample
    ]
    late = totals[-len(totals) // 3 :]
    return {
        "peak": max(totals, key=held),
        "steady": {part: statistics.median(total[part] for total in late) for part in SHARES},
        "peak of one process": max(each, key=held),
    }


def held(parts: dict[str, float]) -> float:
    return parts.get("private", 0.0) + parts.get("shared", 0.0)


def optimizer_state(depth: int, slices: int) -> list[float]:
    """MB of moments in each slice's file of a checkpoint."""
    work = squares(WIDTH, depth)
    spark = session()
    try:
        with tempfile.TemporaryDirectory(prefix="memory-") as folder:
            keep = sparkdl.Checkpoint(folder, every=sparkdl.every(2))
            stop = sparkdl.max_iteration(2)
            run = trainer(work, work.batches[0], stop, slices=slices, checkpoint=keep)
            run.fit(work.rdd(spark, RANKS))
            return [moments(path) / MB for path in sorted(Path(folder).rglob("slice-*"))]
    finally:
        spark.stop()


def moments(path: Path) -> int:
    """Bytes of all that has a value for each parameter, the weights apart."""
    with safe_open(path, "pt") as file:
        return sum(file.get_tensor(name).nbytes for name in file.keys() if name != "weights")  # noqa: SIM118


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--depth", type=int, default=25, help="layers, 4 MB each")
    parser.add_argument("--iterations", type=int, default=20)
    given = parser.parse_args()
    iterations = 8 if given.quick else given.iterations
    size = 4 * WIDTH**2 * given.depth / MB
    print(hardware(), "\n", flush=True)
    found = {
        "Python": imports(),
        "sparkdl, M = N = 2": in_fresh_process(with_sparkdl, given.depth, iterations),
        "DDP, 2 ranks": in_fresh_process(with_ddp, given.depth, iterations),
    }
    print(f"P = {size:.0f} MB of parameters, Adam. MB for each replica or rank:\n")
    head = ("", "", *SHARES, "private + shared", "in P")
    rows = [
        (name, row, *(parts.get(part) for part in SHARES), held(parts), held(parts) / size)
        for name, some in found.items()
        for row, parts in some.items()
    ]
    print(markdown(head, rows), "\n")
    counts = (2,) if given.quick else (1, 2, 4)
    state = {n: in_fresh_process(optimizer_state, given.depth, n) for n in counts}
    print(f"Optimizer state of a task; a rank of DDP holds all of it, {2 * size:.0f} MB:\n")
    head = ("N", "MB of each slice", "largest, of the whole")
    rows = [
        (n, ", ".join(f"{each:.1f}" for each in some), max(some) / (2 * size))
        for n, some in state.items()
    ]
    print(markdown(head, rows))
    write_json(given.json, {"memory": found, "optimizer state": state})


if __name__ == "__main__":
    main()
