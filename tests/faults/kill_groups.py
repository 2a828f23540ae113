"""Script: groups at their own pace, and stragglers, on two nodes of which one is killed."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from lose_slots import kill_one
from torch import nn

import sparkdl

MODELS: dict[str, dict[str, Any]] = {
    "asynchronous": {"consistency": sparkdl.Asynchronous()},
    "groups": {"consistency": sparkdl.Asynchronous(groups=2, staleness=1)},
    "stragglers": {"consistency": sparkdl.Synchronous(drop_stragglers=0.25), "accumulate": 4},
    "inner steps": {
        "consistency": sparkdl.DiLoCo(inner_steps=4, drop_stragglers=0.25),
        "batch_size": 8,
    },
}
ITERATIONS = 8


class Slow(nn.Module):
    """A network, which takes four times as long in the replica whose rows say so."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.net, self.seconds = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(self.seconds * (4 if x[0, 0] > 0 else 1))
        found: torch.Tensor = self.net(x)
        return found


class Kill(sparkdl.Callback):
    """Kills an executor after iteration 5."""

    def __init__(self, context: Any) -> None:
        self.context, self.recoveries = context, 0

    def on_iteration_end(self, trainer: Any, state: Any) -> None:
        if state.iteration == 5:
            kill_one(self.context)

    def on_recovery(self, trainer: Any, state: Any) -> None:
        self.recoveries += 1


def trainer(name: str, seconds: float, **changes: Any) -> sparkdl.Trainer:
    return sparkdl.Trainer(
        model=partial(Slow, seconds),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.Adam, lr=0.05),
        replicas=4,
        stop=sparkdl.max_iteration(ITERATIONS),
        **{"batch_size": 32, **MODELS[name], **changes},
    )


def rows(context: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 3, generator=generator)
    x[:, 0] = -1.0
    x[:16, 0] = 1.0
    y = x.sum(1, keepdim=True)
    return context.parallelize(list(zip(x.tolist(), y.tolist(), strict=True)), 4)


def main() -> None:
    from launch import answer, digest, session, spec, wait_for_executors

    found = {}
    with session(spec()["master"], **{"spark.sparkdl.slab.dir": "slabs"}) as spark:
        context = spark.sparkContext
        for name in MODELS:
            wait_for_executors(context, 2)
            kill = Kill(context)
            trained = trainer(name, 0.02, callbacks=[kill]).fit(rows(context))
            found[name] = {
                "recoveries": kill.recoveries,
                "digest": digest(trained.module),
                "history": trained.history.to_json_bytes().decode(),
            }
    answer(found)


if __name__ == "__main__":
    main()
