"""An embedding model trained by asynchronous clients of a parameter server.

Each rank has the events of some users. In a step it pulls the rows of its mini-batch, computes their
gradient and pushes it; no rank waits for another. Beside it, one process takes as many steps on the
same events. Both rank an item that was held out of each user's events among 99 that the user does not
know.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from pyspark.sql import SparkSession
from torch.nn import functional

import sparkdl
from sparkdl.metrics.named import resolve

USERS, ITEMS, WIDTH, LIKED, NEGATIVES = 400, 300, 16, 12, 4
OPTIMIZER = partial(torch.optim.Adagrad, lr=0.2)


def make_events() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The events (user, item), an item held out of each user's, and 99 more that it does not know."""
    generator = torch.Generator().manual_seed(0)
    tastes, kinds = (torch.randn(n, 6, generator=generator) for n in (USERS, ITEMS))
    order = (tastes @ kinds.T).argsort(1, descending=True)
    liked = order[:, :LIKED].gather(1, torch.rand(USERS, LIKED, generator=generator).argsort(1))
    unknown = order[:, LIKED:].gather(1, torch.rand(USERS, ITEMS - LIKED).argsort(1))[:, :99]
    users = torch.arange(USERS)[:, None].expand(-1, LIKED - 1)
    return torch.stack([users, liked[:, 1:]], -1).view(-1, 2), liked[:, 0], unknown


def first_tables() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [0.1 * torch.randn(n, WIDTH, generator=generator) for n in (USERS, ITEMS)]


def draw(events: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """The users of a mini-batch, (128,), and for each an item of an event and random ones."""
    chosen = events[torch.randint(len(events), (128,), generator=generator)]
    others = torch.randint(ITEMS, (len(chosen), NEGATIVES), generator=generator)
    return chosen[:, 0], torch.cat([chosen[:, 1:], others], 1)


def loss_of(users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    scores = (users[:, None] * items).sum(-1)
    return functional.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64))


def client(events: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """Runs on every rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, generator = events[events[:, 0] % size == rank], torch.Generator().manual_seed(2 + rank)
    with sparkdl.collectives.ParameterServer(OPTIMIZER) as server:
        server.init(["users", "items"], first_tables())
        for _ in range(steps // size):
            users, items = draw(mine, generator)
            user_rows = server.pull_rows("users", users).requires_grad_()
            item_rows = server.pull_rows("items", items.flatten()).requires_grad_()
            loss_of(user_rows, item_rows.view(*items.shape, WIDTH)).backward()
            server.push_rows("users", users, user_rows.grad)
            server.push_rows("items", items.flatten(), item_rows.grad)
        server.barrier()
        return server.pull(["users", "items"]) if rank == 0 else []


def one_process(events: torch.Tensor, steps: int) -> list[torch.Tensor]:
    tables, generator = [its.requires_grad_() for its in first_tables()], torch.Generator()
    optimizer = OPTIMIZER(tables)
    for _ in range(steps):
        users, items = draw(events, generator)
        rows = [functional.embedding(n, t, sparse=True) for n, t in zip([users, items], tables)]  # noqa: B905
        loss_of(*rows).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [its.detach() for its in tables]


def main(spark: SparkSession, steps: int = 600) -> dict[str, float]:
    events, held_out, unknown = make_events()
    candidates, results = torch.cat([held_out[:, None], unknown], 1), {}
    print(f"{'':24}HitRatio@10  NDCG@10")
    for name, (users, items) in {
        "asynchronous clients": sparkdl.gang.run(client, events, steps, ranks=2, spark=spark)[0],
        "one process": one_process(events, steps),
        "untrained": first_tables(),
    }.items():
        scores = (users[:, None] * items[candidates]).sum(-1)
        target = torch.zeros(USERS, dtype=torch.int64)
        found = [m.value(m.update(m.start(), scores, target)) for m in resolve(["hit_ratio", "ndcg"])]
        results[name] = found[0]
        print(f"{name:24}{found[0]:11.3f}{found[1]:9.3f}")
    return {"hit ratio": results["asynchronous clients"], **results}


if __name__ == "__main__":
    session = sparkdl.session("local[2]")
    try:
        main(session)
    finally:
        session.stop()
