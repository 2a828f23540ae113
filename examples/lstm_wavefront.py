"""A stacked LSTM whose layers lie on two ranks, scheduled by a dependency engine.

Each rank has half of the layers. Layer l at time t needs layer l at t - 1 and layer l - 1 at t, so the
work goes through the layers as a wavefront: while rank 1 computes time t, rank 0 is at t + 1. Nobody
writes this schedule down. Each operation says what it reads and what it changes, and the engine runs it
as soon as it may; messages are ordered, so that both ranks have them in the same order.
"""

from __future__ import annotations

import time
from functools import partial

import torch
import torch.distributed as dist
from pyspark.sql import SparkSession
from torch import nn

import sparkdl

LAYERS, TIMES, BATCH, WIDTH = 4, 12, 32, 192
Span = tuple[float, float]


def make_cells() -> list[nn.LSTMCell]:
    torch.manual_seed(0)
    return [nn.LSTMCell(WIDTH, WIDTH) for _ in range(LAYERS)]


def make_inputs() -> torch.Tensor:
    return torch.randn(TIMES, BATCH, WIDTH, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def run_layers() -> tuple[torch.Tensor | None, list[Span]]:
    """Runs on every rank. Returns the last layer's outputs, on the last rank, and when it computed."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    mine = make_cells()[rank * LAYERS // ranks : (rank + 1) * LAYERS // ranks]
    states = [(torch.zeros(BATCH, WIDTH), torch.zeros(BATCH, WIDTH)) for _ in mine]
    values = make_inputs() if rank == 0 else torch.empty(TIMES, BATCH, WIDTH)
    spans: list[Span] = []

    def compute(layer: int, value: torch.Tensor) -> None:
        """Change the state of a layer, and pass its output on in place of its input."""
        begun = time.time()
        with torch.no_grad():
            states[layer] = mine[layer](value, states[layer])
            value.copy_(states[layer][0])
        spans.append((begun, time.time()))

    with sparkdl.collectives.Engine(threads=3) as engine:
        for value in values.unbind():
            if rank > 0:
                engine.push(partial(dist.recv, value, rank - 1), mutate=[value], ordered=True)
            for layer in range(len(mine)):
                engine.push(partial(compute, layer, value), mutate=[value, ("state", layer)])
            if rank + 1 < ranks:
                engine.push(partial(dist.send, value, rank + 1), read=[value], ordered=True)
    return (values if rank + 1 == ranks else None), spans


@torch.no_grad()
def in_one_process() -> torch.Tensor:
    values = make_inputs()
    for cell in make_cells():
        state = None
        for value in values.unbind():
            state = cell(value, state)
            value.copy_(state[0])
    return values


def main(spark: SparkSession) -> dict[str, float]:
    (_, first), (outputs, last) = sparkdl.gang.run(run_layers, ranks=2, device="cpu", spark=spark)
    agreement = float(((outputs - in_one_process()).abs() < 1e-5).float().mean())
    early = sum(begun < max(end for _, end in first) for begun, _ in last) / len(last)
    print(f"{agreement:.3f} of the outputs are those of one process, to 1e-5")
    print(f"{early:.3f} of rank 1's cells began before rank 0 had ended")
    return {"agreement": agreement, "early": early}


if __name__ == "__main__":
    session = sparkdl.session("local[2]")
    try:
        main(session)
    finally:
        session.stop()
