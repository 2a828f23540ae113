"""What two ranks do with a parameter server; each function runs on both, in one gang."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import SGD, Adagrad, Adam, SparseAdam

import sparkdl
from sparkdl.collectives import Engine, KVStore, ParameterServer

SHAPES = ((), (1,), (0, 3), (7,), (5, 2, 3))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
OPTIMIZERS = {
    "sgd": partial(SGD, lr=0.1, momentum=0.9),
    "adam": partial(Adam, lr=0.1),
    "none": None,
}
SPARSE = {
    "sgd": partial(SGD, lr=0.1),
    "adagrad": partial(Adagrad, lr=0.1),
    "sparse adam": partial(SparseAdam, lr=0.1),
    "none": None,
}
ROUNDS = 4
ROWS = torch.tensor([[9, 0, 9], [3, 9, 4]])
"""The rows that each rank pushes."""


@contextlib.contextmanager
def told() -> Iterator[list[str]]:
    """Catch an error, and add its kind and text to the list."""
    found: list[str] = []
    try:
        yield found
    except sparkdl.SparkdlError as error:
        found.append(f"{type(error).__name__}: {error}")


def gradient(rank: int, number: int, shape: tuple[int, ...] = (10, 3)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * rank + number))


def values_of_every_kind() -> list[Any]:
    rank = dist.get_rank()
    with ParameterServer() as server:
        keys = [(shape, str(dtype)) for shape in SHAPES for dtype in DTYPES]
        first = [torch.full(shape, 1 + rank).to(dtype) for shape in SHAPES for dtype in DTYPES]
        server.init(keys, first)  # those of rank 0 count
        server.barrier()
        for key, value in zip(keys, first, strict=True):
            server.push(key, value)
        server.push(keys, first)
        server.barrier()
        out = torch.zeros(5, 2, 3)
        server.pull(((5, 2, 3), "torch.float32"), out=out)
        return [*server.pull(keys), out]


def synchronous(optimizer: str, owners: list[int] | None) -> tuple[list[torch.Tensor], int]:
    rank, seen = dist.get_rank(), []
    with ParameterServer(OPTIMIZERS[optimizer], consistency="synchronous", owners=owners) as server:
        server.init("weight", torch.ones(10, 3))
        for number in range(ROUNDS - rank):  # rank 0 makes the last one alone
            time.sleep(0.01 * ((rank + number) % 2))
            server.push("weight", gradient(rank, number))
            seen.append(server.pull("weight"))
    return seen, len(server.order)


def stale() -> list[float]:
    """Rank 0 is fast. Returns what it has seen after each of its pushes."""
    rank, seen = dist.get_rank(), []
    with ParameterServer(consistency="synchronous", staleness=1, average=False) as server:
        server.init("count", torch.tensor(0.0))
        for _ in range(6):
            time.sleep(0.02 * rank)
            server.push("count", torch.tensor(1.0))
            seen.append(float(server.pull("count")))
    return seen


def rows(optimizer: str, consistency: str) -> list[torch.Tensor]:
    rank = dist.get_rank()
    with ParameterServer(SPARSE[optimizer], consistency=consistency) as server:
        server.init("table", torch.arange(20.0).view(10, 2))
        if consistency == "asynchronous" and rank == 1:
            server.barrier()
        for number in range(2):
            server.push_rows("table", ROWS[rank], gradient(rank, number, (3, 2)))
        if consistency == "asynchronous" and rank == 0:
            server.barrier()
        server.barrier()
        picked = torch.tensor([9, 1, 9, 0])
        return [server.pull("table"), server.pull_rows("table", picked)]


def momentum(replay: Any, slow: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """An order matters here: steps with momentum, and gradients that depend on what was pulled."""
    rank, seen = dist.get_rank(), []
    with ParameterServer(partial(SGD, lr=0.1, momentum=0.9), replay=replay) as server:
        server.init(["weight", "bias"], [torch.ones(10, 3), torch.zeros(3)])
        for number in range(12):
            time.sleep(0.003 * (rank == slow) + 0.001 * (number % 2))
            weight, bias = server.pull(["weight", "bias"])
            server.push("weight", weight + gradient(rank, number))
            server.push_rows("bias", [number % 3], bias[:1])
            seen.append(weight)
    return seen, server.order


def mistakes() -> dict[str, list[str]]:
    rank, found = dist.get_rank(), {}
    with told() as found["word"]:
        ParameterServer(consistency="synchron")
    with told() as found["owners"]:
        ParameterServer(owners=[0, 2], staleness=-1, timeout=0)
    with told() as found["kinds"]:
        ParameterServer(owners=1, average="no", replay="01")
    with told() as found["optimizer"]:
        ParameterServer(SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1))
    with told() as found["whole tensors"]:
        ParameterServer(partial(sparkdl.optim.LARS, lr=0.1))
    with told() as found["ranks differ"]:
        ParameterServer(staleness=rank)
    server = ParameterServer(partial(Adam, lr=0.1))
    server.init("weight", torch.ones(4, 3))
    with told() as found["unknown key"]:
        server.pull("weigth")
    with told() as found["shape"]:
        server.push("weight", torch.ones(3))
    with told() as found["dtype"]:
        server.push("weight", torch.ones(4, 3, dtype=torch.float64))
    with told() as found["no row"]:
        server.pull_rows("weight", [1, 4])
    with told() as found["sparse"]:
        server.push_rows("weight", [1], torch.ones(1, 3))
    with told() as found["no tensor"]:
        server.push_rows("weight", [1], [[1.0, 1.0, 1.0]])
    with told() as found["again"]:
        server.init("weight", torch.ones(4, 3))
    with told() as found["dtype of a key"]:
        server.init("count", torch.tensor(1))
    with told() as found["key"]:
        server.init({}, torch.tensor(1.0))
    with told() as found["init differs"]:
        server.init("bias", torch.ones(2 + rank))
    with told() as found["calls differ"]:
        server.barrier() if rank else server.init("bias", torch.ones(2))
    with told() as found["early order"]:
        server.order  # noqa: B018
    server.push("weight", torch.ones(4, 3))  # it can still be used
    server.close()
    server.close()
    with told() as found["closed"]:
        server.push("weight", torch.ones(4, 3))
    return found


def late() -> tuple[list[str], float, torch.Tensor]:
    """Rank 0 waits for the push of rank 1, in vain."""
    rank = dist.get_rank()
    with ParameterServer(consistency="synchronous", timeout=0.5) as server:
        server.init("weight", torch.zeros(2))
        begun = time.monotonic()
        with told() as found:
            if rank == 0:
                server.push("weight", torch.ones(2))
                server.pull("weight")
        waited = time.monotonic() - begun
        if rank == 1:
            time.sleep(0.7)
        server.push("weight", torch.ones(2)) if rank == 1 else None
        return found, waited, server.pull("weight")


class Picky(SGD):
    """It fails in its third step on a range, after those with which it is tried."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        if self.steps > 2:
            raise ArithmeticError("enough")
        super().step()


def failing_update() -> list[list[str]]:
    server = ParameterServer(partial(Picky, lr=0.1), owners=[0])
    server.init("weight", torch.zeros(2))
    server.barrier()
    with told() as first:
        server.push("weight", torch.ones(2))
        server.push("weight", torch.ones(2))
        server.pull("weight")
    with told() as second:
        server.close()
    return [first, second]


def replay_of_another_run() -> list[str]:
    server = ParameterServer(replay=[0, 1, 0, 1], timeout=5)
    with told() as found:
        server.init("weight", torch.zeros(2))
        for _ in range(3):
            server.push("weight", torch.ones(2))
        server.barrier()
    server.abandon()
    return found


def kvstore() -> list[Any]:
    with KVStore("dist_sync") as store:
        store.init(3, torch.zeros(2, 3))
        store.push(3, torch.ones(2, 3) * (1 + store.rank))
        found = [store.type, store.num_workers, store.pull(3)]
        store.push(3, torch.eye(2, 3).to_sparse(1))
        found.append(store.row_sparse_pull(3, [1], out=torch.zeros(2, 3)))
        store.set_optimizer(partial(SGD, lr=0.5))
        store.push(3, torch.ones(2, 3))
        found.append(store.pull(3, out=torch.empty(2, 3)))
        store.barrier()
        return found


KEPT = {"weight": (10, 3), ("a", 2): (), "empty": (0, 3), "long": (7,)}


def steps(server: ParameterServer, numbers: Any, by_rows: bool) -> list[torch.Tensor]:
    rank = dist.get_rank()
    for number in numbers:
        if by_rows:
            server.push_rows("weight", ROWS[rank], gradient(rank, number, (3, 3)))
        else:
            server.push(list(KEPT), [gradient(rank, number, shape) for shape in KEPT.values()])
    found: list[torch.Tensor] = server.pull(list(KEPT))
    return found


def saved(folder: str, optimizer: Any, by_rows: bool = False) -> list[list[torch.Tensor]]:
    """Returns what comes of a run that saves, and of runs that load, with each number of owners."""
    make = partial(ParameterServer, optimizer, consistency="synchronous")
    with make() as server:
        server.init(list(KEPT), [torch.ones(shape) for shape in KEPT.values()])
        for number in (1, 0, 3):
            steps(server, range(number), by_rows)
            server.barrier()
            if dist.get_rank() == 1:
                server.save(folder)
            server.barrier()
        found = [steps(server, range(3, 6), by_rows)]
    for owners in (None, [1]):
        with make(owners=owners) as server:
            server.load(folder)
            found.append(steps(server, range(3, 6), by_rows))
    return found


def not_saved(folder: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    with ParameterServer(partial(SGD, lr=0.1), consistency="synchronous") as server:
        with told() as found["nothing there"]:
            server.load(f"{folder}/nowhere")
        with told() as found["uri"]:
            server.save("s3://bucket/server")
        server.init("weight", torch.ones(4))
        with told() as found["no folder"]:
            server.save("/dev/null/server")
        if dist.get_rank() == 0:
            server.save(f"{folder}/other")
        server.barrier()
        with told() as found["exists"]:
            server.load(f"{folder}/other")
    with ParameterServer() as server, told() as found["another optimizer"]:
        server.load(f"{folder}/other")
    for file in Path(folder, "other").glob("owner-1-*"):
        file.unlink(missing_ok=True)
    dist.barrier()
    with ParameterServer(partial(SGD, lr=0.1)) as server, told() as found["file lost"]:
        server.load(f"{folder}/other")
    return found


def ordered_sums() -> list[float]:
    """All-reduces that become possible in another order on each rank, and run in one."""
    rank = dist.get_rank()
    tensors = [torch.full((3,), float(number + rank)) for number in range(8)]
    with Engine(threads=3) as engine:
        for number, tensor in enumerate(tensors):
            engine.push(partial(time.sleep, 0.005 * ((number + rank) % 3)), mutate=[tensor])
            engine.push(partial(dist.all_reduce, tensor), mutate=[tensor], ordered=True)
        found = [engine.push(lambda t=t: float(t.sum()), read=[t]) for t in tensors]
    return [future.result() for future in found]


SCENARIOS: dict[str, Any] = {
    "values": values_of_every_kind,
    **{
        f"synchronous, {name}, {owners}": partial(synchronous, name, owners)
        for name in OPTIMIZERS
        for owners in (None, [1])
    },
    "stale": stale,
    **{
        f"rows, {name}, {word}": partial(rows, name, word)
        for name in SPARSE
        for word in ("synchronous", "asynchronous")
    },
    "mistakes": mistakes,
    "late": late,
    "failing update": failing_update,
    "replay of another run": replay_of_another_run,
    "kvstore": kvstore,
    "ordered sums": ordered_sums,
}


def run_all(folder: str) -> tuple[dict[str, Any], list[str]]:
    """Runs on every rank: all scenarios, and the threads that are left."""
    import threading

    found = {name: scenario() for name, scenario in SCENARIOS.items()}
    for name, optimizer in OPTIMIZERS.items():
        found[f"saved, {name}"] = saved(f"{folder}/{name}", optimizer)
    found["saved, rows"] = saved(f"{folder}/rows", SPARSE["adagrad"], by_rows=True)
    found["not saved"] = not_saved(folder)
    recorded = momentum(None, slow=0)
    found["live"], found["replayed"] = recorded, momentum(recorded[1], slow=1)
    return found, [thread.name for thread in threading.enumerate()]


def waits_for_a_killed_rank(seconds: float) -> None:
    import os
    import signal

    with ParameterServer(consistency="synchronous", owners=[1]) as server:
        server.init("weight", torch.zeros(2))
        if dist.get_rank() == 1:
            time.sleep(seconds)
            os.kill(os.getpid(), signal.SIGKILL)
        server.push("weight", torch.ones(2))
        server.pull("weight")


def waits_for_a_failed_rank() -> None:
    server = ParameterServer(consistency="synchronous")
    server.init("weight", torch.zeros(2))
    if dist.get_rank() == 1:
        raise ArithmeticError("rank 1 has its own trouble")
    server.push("weight", torch.ones(2))
    server.pull("weight")


def forgets_to_close() -> float:
    server = ParameterServer()
    server.init("weight", torch.zeros(2))
    server.push("weight", torch.ones(2))
    server.barrier()
    return float(server.pull("weight")[0])


def threads_left() -> list[str]:
    import threading

    return [thread.name for thread in threading.enumerate()]
