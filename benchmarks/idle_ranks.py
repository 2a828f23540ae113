"""Measure what the driver of a gang does for each rank, on 64 to 512 ranks of no work.

    python benchmarks/idle_ranks.py [--iterations 200] [--quick] [--json FILE]

The driver's side is the engine's own: its listener, its connections, the messages of an iteration and
what it makes of the reports. The ranks are threads of some processes. They connect as ranks do, and
answer each command with a report as long as a real rank's. "driver" is processor time of the driver's
process; "clock" has also that of the ranks, which are on the same machine. The line through 64 and 256
ranks is carried to 128 and 512 ("held out"). A snapshot is two commands, with the numbers of the nodes
in them, where each rank is on a node of its own.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from cost_model import slope
from harness import hardware, markdown, options, write_json

from sparkdl.data.epoch import EpochPlan
from sparkdl.engines.gang.rank import CallMethod
from sparkdl.engines.gang.rank_messages import RankReport
from sparkdl.gang.channel import RESULT, ChannelError, Listener, connect
from sparkdl.gang.rank_group import ArrivedRanks, ConnectedRanks
from sparkdl.gang.rank_task import Introduction
from sparkdl.loop.advance import slowest, summarize
from sparkdl.model.flat import layout_of
from sparkdl.replica.iteration import Iteration, ReplicaReport

SIZES, FITTED = (64, 128, 256, 512), (64, 256)
A_PROCESS, BATCH, EPOCH = 64, 32, 1000
"""Ranks of a process; rows of a rank in an iteration; iterations of an epoch."""
DOING = "an iteration"


def serve(address: tuple[str, int, bytes], ranks: range, size: int) -> None:
    """Be these ranks, each in a thread, until the driver closes the connections."""
    threads = [threading.Thread(target=_rank, args=(address, n, size)) for n in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _rank(address: tuple[str, int, bytes], rank: int, size: int) -> None:
    seconds = {
        "data": 0.001,
        "forward": 0.02,
        "backward": 0.04,
        "all-reduce": 0.01,
        "update": 0.001,
    }
    report = ReplicaReport(rank, BATCH, float(BATCH), 1.25, f"node-{rank}", seconds)
    answer = pickle.dumps(RankReport(report, [], False, rank))
    channel = connect(*address, Introduction(rank, 1, rank, size, f"host-{rank}"))
    with contextlib.suppress(ChannelError), contextlib.closing(channel):
        while True:
            commands = channel.receive()
            channel.send((RESULT, [(answer, 0.0)] * len(commands)))


def timed(work: Callable[[int], Any], times: int) -> tuple[float, float]:
    """Median milliseconds of ``work``, of this process and by the clock, after a tenth as warm-up."""
    found = []
    for number in range(times + times // 10):
        cpu, clock = time.process_time(), time.perf_counter()
        work(number)
        found.append((time.process_time() - cpu, time.perf_counter() - clock))
    own, whole = zip(*found[times // 10 :], strict=True)
    return statistics.median(own) * 1e3, statistics.median(whole) * 1e3


def measured(size: int, iterations: int) -> dict[str, Any]:
    """Bring ``size`` ranks together and run iterations and snapshots of no work on them."""
    start = multiprocessing.get_context("spawn")
    listener, arrivals = Listener("127.0.0.1"), ArrivedRanks(1, size)
    address = "127.0.0.1", listener.port, listener.key
    shares = [range(n, min(n + A_PROCESS, size)) for n in range(0, size, A_PROCESS)]
    members = [start.Process(target=serve, args=(address, share, size)) for share in shares]
    for member in members:
        member.start()
    cpu = time.process_time()
    while arrivals.missing:
        arrived = listener.accept(1.0)
        if arrived is not None:
            arrivals.admit(*arrived)
    together = (time.process_time() - cpu) * 1e3
    ranks = ConnectedRanks(arrivals, 600.0)
    try:
        layout = layout_of(torch.nn.Linear(8, 8))
        plan = EpochPlan((BATCH * EPOCH,) * size, BATCH * size)

        def iteration(number: int) -> None:
            asked = Iteration(index=number, epoch=0, batch=number % EPOCH)
            ranks.send([CallMethod("run", (asked.with_rows(plan.rows(asked.batch)),))])
            done: Sequence[RankReport] = ranks.answers(DOING)[0]
            reports = [one.with_loss(done) for one in done]
            summarize(reports, [], layout, slowest([report.seconds for report in reports]))

        def snapshot(number: int) -> None:
            nodes = tuple(range(size))
            for method in ("snapshots.save", "snapshots.drop"):
                ranks.call(CallMethod(method, (f"snapshot-{number:016x}", nodes)), DOING)

        own, clock = timed(iteration, iterations)
        kept, _ = timed(snapshot, max(10, iterations // 5))
    finally:
        ranks.close()
        listener.close()
        for member in members:
            member.join()
    return {"ranks": size, "together": together, "driver": own, "clock": clock, "snapshot": kept}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--iterations", type=int, default=200)
    asked = parser.parse_args()
    print(hardware(), flush=True)
    sizes = (8, 16) if asked.quick else SIZES
    found = [measured(size, 10 if asked.quick else asked.iterations) for size in sizes]
    names = ("driver", "snapshot", "together")
    lines = {
        name: slope(
            [(row["ranks"], row[name]) for row in found if asked.quick or row["ranks"] in FITTED]
        )
        for name in names
    }
    head = ["ranks", "clock ms"]
    for name in names:
        head += [f"{name} ms", "line", "off %"]
    rows = []
    for row in found:
        size = row["ranks"]
        cells: list[Any] = [f"{size}" + ("" if size in FITTED else ", held out"), row["clock"]]
        for name in names:
            fixed, each = lines[name]
            guess = fixed + each * size
            cells += [row[name], guess, 100 * (guess / row[name] - 1)]
        rows.append(cells)
    print(markdown(head, rows))
    for name, (fixed, each) in lines.items():
        print(f"{name}: {fixed:.3g} ms, and {each:.3g} ms a rank")
    write_json(asked.json, found)


if __name__ == "__main__":
    main()
