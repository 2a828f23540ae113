"""What training is compared with, each by itself on this machine.

    python benchmarks/baselines.py [--quick] [--json FILE]

(a) an empty PySpark job of one and of two stages; (b) plain PyTorch in one process with all cores;
(c) DDP over Gloo, 2 ranks of one thread each, by torchrun, and its parts (``ddp.py``); (d)
TorchDistributor on a DataFrame (``distributor.py``; ``end_to_end.py`` runs it); (e) a memory copy; (f)
BigDL's figures (``bigdl.py``). The other benchmarks measure those they need in their own run.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from typing import Any

import bigdl
import ddp
import torch
from empty_jobs import jobs_ms, one_stage_job, two_stage_job
from harness import hardware, in_fresh_process, markdown, median_ms, options, session, write_json
from models import WORKS, work_named
from strategies import plain_step

MB = 1_000_000


def fresh_jobs_ms(jobs: int) -> tuple[float, float]:
    """Of one stage and of two, in a session of their own, after so many of both."""
    spark = session()
    try:
        for job in (one_stage_job, two_stage_job):
            jobs_ms(spark, job, jobs)
        return jobs_ms(spark, one_stage_job, jobs), jobs_ms(spark, two_stage_job, jobs)
    finally:
        spark.stop()


def one_process_ms(work: str, batch: int, steps: int, warm_up: int) -> float:
    """Milliseconds of a step of plain PyTorch on all cores, batches gathered from tensors in memory."""
    return in_fresh_process(_one_process, work, batch, steps, warm_up)


def _one_process(name: str, batch: int, steps: int, warm_up: int) -> float:
    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(0)
    work = work_named(name)
    module = work.make()
    x, y = work.tensors(max(work.samples, batch))
    feed = ddp.batches(x, y, batch)
    step = plain_step(work, module, work.optimizers(module), feed)
    seconds = ddp.time_steps(step, warm_up + steps)
    return median_ms(seconds[warm_up:])


def copy_ms(nbytes: int, processes: int = 1, times: int = 20) -> float:
    """Milliseconds to copy ``nbytes`` in memory by one thread, in so many processes at once; each
    copies all of them. The slowest process counts."""
    start = multiprocessing.get_context("spawn")
    barrier, found = start.Barrier(processes), start.SimpleQueue()
    arguments = (nbytes, times, barrier, found)
    copiers = [start.Process(target=_copy, args=arguments) for _ in range(processes)]
    for copier in copiers:
        copier.start()
    seconds = [found.get() for _ in copiers]
    for copier in copiers:
        copier.join()
    return median_ms(map(max, zip(*seconds, strict=True)))


def _copy(nbytes: int, times: int, barrier: Any, found: Any) -> None:
    torch.set_num_threads(1)
    source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    seconds = []
    for _ in range(times):
        barrier.wait()
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    found.put(seconds)


def bigdl_table() -> str:
    """BigDL 2.4 on the same kind of machine."""
    head = ("BigDL 2.4, ms", "batch", "early", "warm", "computing", "records/s", "local[1], warm")
    figures = {key: vars(found).values() for key, found in bigdl.MEASURED.items()}
    return markdown(head, ((WORKS[work].name, n, *found) for (work, n), found in figures.items()))


def main() -> None:
    given = options(__doc__).parse_args()
    steps = 40 if given.quick else 300
    print(hardware(), "\n", flush=True)
    one, two = in_fresh_process(fresh_jobs_ms, steps)
    print(markdown(["empty PySpark job", "ms"], [("one stage", one), ("two stages", two)]), "\n")
    figures: dict[str, Any] = {"empty": [one, two], "steps": []}
    for name, work in WORKS.items():
        for batch in work.batches[:1] if given.quick else work.batches:
            count = (2 if given.quick else 6) if work.large else steps
            pace = (name, batch, count, 1 + count // 4)
            figures["steps"].append((name, batch, one_process_ms(*pace), ddp.step_ms(*pace)))
    head = ("model", "batch", "one process, ms", "samples/s", "DDP x 2, ms", "samples/s")
    print(
        markdown(
            head,
            (
                (WORKS[name].name, batch, one, batch / one * 1e3, two, batch / two * 1e3)
                for name, batch, one, two in figures["steps"]
            ),
        ),
        "\n",
    )
    sizes = [(500, 1), (500, 10), (1000, 25)]
    figures["parts"] = ddp.parts_ms(sizes, 10 if given.quick else 30)
    figures["copies"] = [[copy_ms(4 * w * w * d, n) for n in (1, 2)] for w, d in sizes]
    head = ("MB", *figures["parts"][0], "memory copy", "two at once")
    print("Of the parameters, on 2 ranks at once, ms:\n")
    print(
        markdown(
            head,
            (
                (4 * w * w * d // MB, *parts.values(), *copies)
                for (w, d), parts, copies in zip(
                    sizes, figures["parts"], figures["copies"], strict=True
                )
            ),
        ),
        "\n",
    )
    print(bigdl_table())
    write_json(given.json, figures)


if __name__ == "__main__":
    main()
