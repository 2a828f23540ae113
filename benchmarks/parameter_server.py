"""Pushes and pulls of a parameter server on this machine, beside an all-reduce of the same size.

    python benchmarks/parameter_server.py [--ranks 2] [--sizes 4,1024] [--rounds 200]

One process a rank, one thread each, Gloo over loopback, float32; sizes in KB of 1,024 bytes, of a key
that all ranks own parts of. A push and a pull are of the last rank alone, which owns a part and is not
the one that gives turns; the others wait in a barrier. A step is a pull and a push of every rank at
once. "rows" are 64 of them, of 64 bytes each. A time is the median of the rounds, in milliseconds; that
of pushes includes the steps of SGD, for which a last pull waits.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import hardware, markdown, options, write_json

from sparkdl.collectives import ParameterServer

WIDTH, ROWS = 16, 64
SGD = functools.partial(torch.optim.SGD, lr=1e-6)
COLUMNS = ("push", "pull", "step", "push rows", "pull rows", "all_reduce")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default="4,1024", help="in KB")
    parser.add_argument("--rounds", type=int, default=200)
    chosen = parser.parse_args()
    sizes = [int(word) for word in chosen.sizes.split(",")]
    figures = on_ranks(chosen.ranks, sizes, 20 if chosen.quick else chosen.rounds)
    print(f"{hardware()} {chosen.ranks} ranks.\n")
    rows = [[size, *(its[name] for name in COLUMNS)] for size, its in figures.items()]
    print(markdown(["KB", *(f"{name}, ms" for name in COLUMNS)], rows))
    write_json(chosen.json, figures)


def on_ranks(ranks: int, sizes: list[int], rounds: int) -> dict[str, Any]:
    """Start ``ranks`` processes, and return the figures of the last rank."""
    start = multiprocessing.get_context("forkserver")
    start.set_forkserver_preload(["torch", "torch.distributed", "sparkdl.collectives"])
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            start.Process(target=be_rank, args=(rank, ranks, folder, sizes, rounds))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return json.loads(Path(folder, "figures.json").read_text())


def be_rank(rank: int, ranks: int, folder: str, sizes: list[int], rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    with ParameterServer(SGD) as server:
        figures = {size: measured(server, size, rounds) for size in sizes}
    if rank == ranks - 1:
        Path(folder, "figures.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


def measured(server: ParameterServer, kilobytes: int, rounds: int) -> dict[str, float]:
    """Milliseconds by what is done."""
    value = torch.zeros(kilobytes * 256 // WIDTH, WIDTH)
    rows = torch.randint(len(value), (ROWS,), generator=torch.Generator().manual_seed(0))
    server.init(kilobytes, value)

    def step() -> None:
        server.pull(kilobytes)
        server.push(kilobytes, value)

    alone: dict[str, Callable[[], Any]] = {
        "push": lambda: server.push(kilobytes, value),
        "pull": lambda: server.pull(kilobytes),
        "push rows": lambda: server.push_rows(kilobytes, rows, value[:ROWS]),
        "pull rows": lambda: server.pull_rows(kilobytes, rows),
    }
    found = {}
    for name, do in alone.items():
        server.barrier()
        if server.rank == server.size - 1:
            found[name] = median_ms(do, rounds, functools.partial(server.pull_rows, kilobytes, [0]))
        server.barrier()
    found["step"] = median_ms(step, rounds)
    found["all_reduce"] = median_ms(lambda: dist.all_reduce(value), rounds)
    return found


def median_ms(do: Callable[[], Any], rounds: int, settle: Callable[[], Any] | None = None) -> float:
    """Return the median milliseconds of a call. Ten in a row are measured at a time, and settled."""
    found = []
    for _ in range(max(3, rounds // 10)):
        started = time.perf_counter()
        for _ in range(10):
            do()
        if settle is not None:
            settle()
        found.append((time.perf_counter() - started) / 10)
    return statistics.median(found) * 1e3


if __name__ == "__main__":
    main()
