"""An embedding model trained by asynchronous clients of a parameter server.

Each rank has the events of some users. In a step it pulls the rows of its mini-batch, computes their
gradient and pushes it; no rank waits for another. Beside it, one process makes as many steps. Both then
rank an item that was held out of each user's events among 99 that the user does not know.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from pyspark.sql import SparkSession
from torch.nn import functional

import sparkdl
from sparkdl.metrics.named import resolve

USERS, ITEMS, WIDTH, LIKED = 400, 300, 16, 12
OPTIMIZER = partial(torch.optim.Adagrad, lr=0.2)
METRICS = resolve(["hit_ratio@10", "ndcg@10"])


def make_events() -> tuple[torch.Tensor, torch.Tensor]:
    """The events (user, item), and for each user an item held out and 99 that it does not know."""
    tastes, kinds = torch.randn(USERS + ITEMS, 6, generator=seeded(0)).split([USERS, ITEMS])
    best = (tastes @ kinds.T).argsort(1, descending=True)
    known = torch.cat([best[:, :5], best[:, 6:LIKED]], 1)
    users = torch.arange(USERS)[:, None].expand_as(known)
    unknown = best[:, LIKED::2][:, :99]
    return torch.stack([users, known], -1).view(-1, 2), torch.cat([best[:, 5:6], unknown], 1)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def first_tables() -> tuple[torch.Tensor, ...]:
    return (0.1 * torch.randn(USERS + ITEMS, WIDTH, generator=seeded(1))).split([USERS, ITEMS])


def draw(events: torch.Tensor, generator: torch.Generator) -> list[torch.Tensor]:
    """The users of a mini-batch, (128,), and for each an item of an event and four random ones."""
    users, items = events[torch.randint(len(events), (128,), generator=generator)].T
    return [
        users,
        torch.cat([items[:, None], torch.randint(ITEMS, (128, 4), generator=generator)], 1),
    ]


def loss_of(users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    scores = (users[:, None] * items).sum(-1)
    return functional.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64))


def client(events: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """Runs on every rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, generator = events[events[:, 0] % size == rank], seeded(2 + rank)
    with sparkdl.collectives.ParameterServer(OPTIMIZER) as server:
        server.init(["users", "items"], list(first_tables()))
        for _ in range(steps // size):
            users, items = draw(mine, generator)
            its_users = server.pull_rows("users", users).requires_grad_()
            its_items = server.pull_rows("items", items.flatten()).requires_grad_()
            loss_of(its_users, its_items.view(*items.shape, WIDTH)).backward()
            server.push_rows("users", users, its_users.grad)
            server.push_rows("items", items.flatten(), its_items.grad)
        server.barrier()
        return server.pull(["users", "items"])


def one_process(events: torch.Tensor, steps: int) -> list[torch.Tensor]:
    users, items = [table.clone().requires_grad_() for table in first_tables()]
    optimizer, generator = OPTIMIZER([users, items]), seeded(2)
    for _ in range(steps):
        of_users, of_items = draw(events, generator)
        optimizer.zero_grad()
        loss_of(users[of_users], items[of_items]).backward()
        optimizer.step()
    return [users.detach(), items.detach()]


def main(spark: SparkSession, steps: int = 600) -> dict[str, float]:
    events, candidates = make_events()
    found, right = {}, torch.zeros(USERS, dtype=torch.int64)
    print(f"{'':20} HitRatio@10  NDCG@10")
    for name, (users, items) in {
        "asynchronous clients": sparkdl.gang.run(client, events, steps, ranks=2, spark=spark)[0],
        "one process": one_process(events, steps),
        "no training": first_tables(),
    }.items():
        scores = (users[:, None] * items[candidates]).sum(-1)
        hits, gain = (m.value(m.update(m.start(), scores, right)) for m in METRICS)
        print(f"{name:20} {hits:11.3f}  {gain:7.3f}")
        found[name] = hits
    return found


if __name__ == "__main__":
    session = sparkdl.session("local[2]")
    try:
        main(session)
    finally:
        session.stop()
