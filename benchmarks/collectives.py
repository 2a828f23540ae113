"""Collectives on this machine: each algorithm's time beside the library's and its cost formula.

    python benchmarks/collectives.py [--ranks 2,4,8] [--sizes 1,16,256] [--operations reduce]

One process a rank, one thread each, Gloo, float32; sizes in KB of 1,024 bytes, of the whole vector.
Algorithms take turns; a time is the slowest rank's, from a barrier on, the median of the rounds.
Beside it, after the slash, what the formula says with alpha, beta and gamma of the same ranks, fitted
(relative least squares) to vectors of the same sizes. The model knows no cores that ranks share, so
there are two fits: linear and tree take that of one message at a time, ring and halving-doubling that
of all ranks sending to the next at once. gamma is of all ranks adding two vectors at once.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import hardware, markdown, options, write_json

from sparkdl.collectives.algorithms import ALGORITHMS, GroupLink, cost, even_bounds
from sparkdl.collectives.communicator import Communicator

NAMES = ("linear", "tree", "ring", "halving-doubling")
WARM_UP = 2
ADDITIONS = 8


@dataclass(frozen=True)
class Plan:
    kilobytes: list[int]
    operations: list[str]
    rounds: int


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--sizes", default="1,16,256,1024,4096,16384", help="in KB")
    parser.add_argument("--operations", default=",".join(ALGORITHMS))
    parser.add_argument("--rounds", type=int, default=9)
    chosen = parser.parse_args()
    plan = Plan(numbers(chosen.sizes), chosen.operations.split(","), chosen.rounds)
    if chosen.quick:
        plan = Plan([1, 1024], plan.operations, 3)
    print(f"{hardware()}\n")
    figures = {ranks: on_ranks(ranks, plan) for ranks in numbers(chosen.ranks)}
    print(network_table(figures))
    for operation in plan.operations:
        print(f"\n{operation}, ms: measured / formula\n")
        print(times_table(figures, operation))
    print("\nmeasured / formula: median (median factor between them, either way)\n")
    print(error_table(figures))
    write_json(chosen.json, figures)


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def on_ranks(ranks: int, plan: Plan) -> dict[str, Any]:
    """What rank 0 of as many new processes found."""
    start = multiprocessing.get_context("forkserver")
    start.set_forkserver_preload(["torch", "torch.distributed", "sparkdl.collectives.communicator"])
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            start.Process(target=be_rank, args=(rank, ranks, folder, plan)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return json.loads(Path(folder, "figures.json").read_text())


def be_rank(rank: int, ranks: int, folder: str, plan: Plan) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    figures = {
        "network": fitted(plan),
        "notes": notes_seconds(plan.rounds),
        "seconds": {
            operation: {
                kilobytes: timed(operation, kilobytes, plan) for kilobytes in plan.kilobytes
            }
            for operation in plan.operations
        },
    }
    if rank == 0:
        Path(folder, "figures.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


def timed(operation: str, kilobytes: int, plan: Plan) -> dict[str, float]:
    """Median seconds by algorithm, "library" among them."""
    link = GroupLink(dist.group.WORLD)
    flat = torch.zeros(kilobytes * 256 // link.size * link.size)  # Gloo gathers equal blocks only
    bounds = even_bounds(len(flat), link.size)
    ways = {"library": library(operation, flat, bounds, link.rank)}
    for name, algorithm in ALGORITHMS[operation].items():
        ends = [bounds] if operation in ("reduce_scatter", "all_gather") else []
        combine = [add] if operation not in ("broadcast", "all_gather") else []
        ways[name] = functools.partial(algorithm, link, flat, *ends, *combine)
    return in_turns(ways, plan.rounds)


def add(into: torch.Tensor, received: torch.Tensor) -> None:
    torch.add(into, received, out=into)


def library(operation: str, flat: torch.Tensor, bounds: list[int], rank: int) -> Callable[[], Any]:
    blocks = [flat[begin:end] for begin, end in itertools.pairwise(bounds)]
    return {
        "broadcast": lambda: dist.broadcast(flat, 0),
        "reduce": lambda: dist.reduce(flat, 0),
        "all_reduce": lambda: dist.all_reduce(flat),
        "reduce_scatter": lambda: dist.reduce_scatter(blocks[rank], blocks),
        "all_gather": lambda: dist.all_gather(blocks, blocks[rank]),
    }[operation]


def in_turns(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of the slowest rank, each way once a round."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(WARM_UP + rounds):
        for name, do in ways.items():
            dist.barrier()
            started = time.perf_counter()
            do()
            taken = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            seconds[name].append(float(taken))
    return {name: statistics.median(its[WARM_UP:]) for name, its in seconds.items()}


def fitted(plan: Plan) -> dict[str, dict[str, float]]:
    """alpha, beta and gamma by what is going on besides: "one" message, or "all" ranks at once."""
    nbytes = [kilobytes << 10 for kilobytes in plan.kilobytes]
    seconds = [two_vectors(n // 4, 2 * plan.rounds) for n in nbytes]
    gamma = line(nbytes, [its["add"] / ADDITIONS for its in seconds])[1]
    found = {}
    for pattern, messages in (("one", 2), ("all", 1)):
        alpha, beta = line(nbytes, [its[pattern] / messages for its in seconds])
        found[pattern] = {"alpha": alpha, "beta": beta, "gamma": gamma}
    return found


def two_vectors(length: int, rounds: int) -> dict[str, float]:
    """Seconds of a message from rank 0 to 1 and one back; of a step around the ring, all ranks
    at once; of ``ADDITIONS`` additions."""
    link = GroupLink(dist.group.WORLD)
    ours, theirs = torch.zeros(length), torch.zeros(length)
    behind, before = (link.rank + 1) % link.size, (link.rank - 1) % link.size

    def there_and_back() -> None:
        if link.rank == 0:
            link.send(ours, 1)
            link.receive(theirs, 1)
        elif link.rank == 1:
            link.receive(theirs, 0)
            link.send(ours, 0)

    def add_often() -> None:
        for _ in range(ADDITIONS):
            add(ours, theirs)

    exchange = functools.partial(link.exchange, ours, behind, theirs, before)
    return in_turns({"one": there_and_back, "all": exchange, "add": add_often}, rounds)


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope, such that relative errors are least; none is negative."""
    weights = 1 / torch.tensor(y, dtype=torch.float64)
    terms = torch.stack([weights, torch.tensor(x, dtype=torch.float64) * weights], 1)
    intercept, slope = torch.linalg.lstsq(terms, torch.ones(len(y), 1).double()).solution.flatten()
    return max(float(intercept), 0.0), max(float(slope), 0.0)


def notes_seconds(rounds: int) -> float:
    """What a communicator's collective takes beyond the library's, for a tensor of one number."""
    communicator, one = Communicator(), torch.zeros(1)
    ways = {"with": lambda: communicator.all_reduce(one), "without": lambda: dist.all_reduce(one)}
    found = in_turns(ways, 4 * rounds)
    return found["with"] - found["without"]


def network_table(figures: dict[int, dict[str, Any]]) -> str:
    rows = [
        [ranks, pattern, network["alpha"] * 1e6]
        + [1e-9 / (network[name] or math.nan) for name in ("beta", "gamma")]
        + [its["notes"] * 1e6]
        for ranks, its in figures.items()
        for pattern, network in its["network"].items()
    ]
    return markdown(
        ["ranks", "at a time", "alpha, us", "1 / beta, GB/s", "1 / gamma, GB/s", "notes, us"], rows
    )


def times_table(figures: dict[int, dict[str, Any]], operation: str) -> str:
    names = [name for name in NAMES if name in ALGORITHMS[operation]]
    rows = [
        [ranks, int(kilobytes), digits(seconds["library"])]
        + [
            f"{digits(seconds[name])} / {digits(formula(its, operation, name, ranks, kilobytes))}"
            for name in names
        ]
        for ranks, its in figures.items()
        for kilobytes, seconds in its["seconds"][operation].items()
    ]
    return markdown(["ranks", "KB", "library", *names], rows)


def formula(its: dict[str, Any], operation: str, name: str, ranks: int, kilobytes: str) -> float:
    network = its["network"]["one" if name in ("linear", "tree") else "all"]
    return cost(name, operation, int(kilobytes) << 10, ranks, **network)


def error_table(figures: dict[int, dict[str, Any]]) -> str:
    """Over all operations and sizes."""
    rows = []
    for ranks, its in figures.items():
        row: list[Any] = [ranks]
        for name in NAMES:
            ratios = [
                seconds[name] / formula(its, operation, name, ranks, kilobytes)
                for operation, by_size in its["seconds"].items()
                for kilobytes, seconds in by_size.items()
                if name in seconds
            ]
            if not ratios:
                row.append(None)
                continue
            off = statistics.median(max(ratio, 1 / ratio) for ratio in ratios)
            row.append(f"{statistics.median(ratios):.2f} ({off:.2f})")
        rows.append(row)
    return markdown(["ranks", *NAMES], rows)


def digits(seconds: float) -> str:
    """Milliseconds, two digits or as many as are whole."""
    return f"{seconds * 1e3:.2g}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


if __name__ == "__main__":
    main()
