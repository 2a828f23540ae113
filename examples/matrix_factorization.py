"""An embedding model trained by asynchronous clients of a parameter server.

Each rank has the events of some users, and waits for no other. Beside it, one process makes as many
steps. Both rank the best item of each user, which was held out, among 99 that the user does not know.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from pyspark.sql import SparkSession

import sparkdl
from sparkdl.metrics.named import resolve

USERS, ITEMS, WIDTH, LIKED = 400, 300, 16, 12
OPTIMIZER = partial(torch.optim.Adagrad, lr=0.2)
FIRST = 0.1 * torch.randn(USERS + ITEMS, WIDTH, generator=torch.Generator().manual_seed(1))
METRICS = resolve(["hit_ratio@10", "ndcg@10"])


def make_events() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the table: user and item of each event; for each user the held-out item and 99 others."""
    tastes, kinds = (
        torch.randn(n, 6, generator=torch.Generator().manual_seed(n)) for n in (USERS, ITEMS)
    )
    best = USERS + (tastes @ kinds.T).argsort(1, descending=True)
    known, users = best[:, 1:LIKED], torch.arange(USERS)[:, None]
    events = torch.stack([users.expand_as(known), known], -1).view(-1, 2)
    return events, torch.cat([best[:, :1], best[:, LIKED : LIKED + 99]], 1)


def draw(events: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The rows of a mini-batch, (128, 6): a user, an item of its events, and four random ones."""
    chosen = events[torch.randint(len(events), (128,), generator=generator)]
    return torch.cat([chosen, USERS + torch.randint(ITEMS, (128, 4), generator=generator)], 1)


def loss_of(vectors: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("bw,bcw->bc", vectors[:, 0], vectors[:, 1:])
    return -scores.log_softmax(1)[:, 0].mean()


def client(events: torch.Tensor, steps: int) -> torch.Tensor:  # runs on every rank
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, generator = events[events[:, 0] % size == rank], torch.Generator().manual_seed(rank)
    with sparkdl.collectives.ParameterServer(OPTIMIZER) as server:
        server.init("table", FIRST)
        for _ in range(steps // size):
            rows = draw(mine, generator)
            vectors = server.pull_rows("table", rows.flatten()).requires_grad_()
            loss_of(vectors.view(*rows.shape, WIDTH)).backward()
            server.push_rows("table", rows.flatten(), vectors.grad)
        server.barrier()
        return server.pull("table")


def one_process(events: torch.Tensor, steps: int) -> torch.Tensor:
    table, generator = FIRST.clone().requires_grad_(), torch.Generator().manual_seed(0)
    optimizer = OPTIMIZER([table])
    for _ in range(steps):
        table.grad = torch.autograd.grad(loss_of(table[draw(events, generator)]), table)[0]
        optimizer.step()
    return table.detach()


def main(spark: SparkSession, steps: int = 300) -> dict[str, float]:
    (events, candidates), found = make_events(), {}
    print(f"{'':20} HitRatio@10  NDCG@10")
    for name, table in {
        "asynchronous clients": sparkdl.gang.run(client, events, steps, ranks=2, spark=spark)[0],
        "one process": one_process(events, steps),
        "no training": FIRST,
    }.items():
        scores = torch.einsum("uw,ucw->uc", table[:USERS], table[candidates])
        hits, gain = (m.value(m.update(m.start(), scores, torch.zeros(USERS))) for m in METRICS)
        print(f"{name:20} {hits:11.3f}  {gain:7.3f}")
        found[name] = hits
    return found


if __name__ == "__main__":
    session = sparkdl.session("local[2]")
    try:
        main(session)
    finally:
        session.stop()
