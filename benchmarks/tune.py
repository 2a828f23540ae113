"""A search of 16 small trials on two cores, beside fits in turn and beside Optuna with plain PyTorch.

    python benchmarks/tune.py [--quick] [--json FILE]

(a) ``sparkdl.tune.search``: trials side by side, a Spark task each. (b) The same 16 fits in turn: a
loop over ``trainer.fit(df)`` by the local engine, which reads the data each time. (c) Optuna with
``n_jobs=2``: a loop of plain PyTorch in each thread, over tensors that are in memory already. All draw
the same kinds of values, train as long, and validate after each epoch; each is warm, by two trials
before. The three take turns, and each ratio is that of one round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import optuna
import torch
from harness import RANKS, hardware, in_fresh_process, markdown, options, session, write_json
from models import work_named
from torch import optim
from work import Work

import sparkdl
from sparkdl import tune

WORKS = ("lenet", "mlp")
BATCH = 256
LOW, HIGH = 1e-4, 1e-2


def search_trainer(work: Work, held: Any, epochs: int) -> sparkdl.Trainer:
    return sparkdl.Trainer(
        model=work.make,
        loss=work.loss,
        optimizer=partial(optim.SGD, lr=LOW),
        batch_size=BATCH,
        engine="local",
        replicas=1,
        stop=sparkdl.max_epoch(epochs),
        validation=sparkdl.Validation(held, metrics=["accuracy"]),
    )


def plain_objective(
    work: Work, tensors: tuple[torch.Tensor, ...], epochs: int, trial: optuna.Trial
) -> float:
    """Run the search as a user of Optuna and PyTorch writes it."""
    x, y, held_x, held_y = tensors
    torch.manual_seed(trial.number)
    module = work.make()
    optimizer = optim.SGD(module.parameters(), lr=trial.suggest_float("lr", LOW, HIGH, log=True))
    accuracy = 0.0
    for _ in range(epochs):
        module.train()
        for rows in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            work.loss(module(x[rows]), y[rows]).backward()
            optimizer.step()
        module.eval()
        with torch.no_grad():
            outputs = module(held_x)
            work.loss(outputs, held_y).item()
            accuracy = (outputs.argmax(1) == held_y).float().mean().item()
    return accuracy


def measure(name: str, rows: int, epochs: int, trials: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way, a figure a round."""
    work = work_named(name)
    spark = session()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        df, held = work.dataframe(spark, RANKS, rows).cache(), work.dataframe(spark, RANKS, 1024)
        held = held.cache()
        df.count(), held.count()
        tensors = (*work.tensors(rows), *work.tensors(1024, seed=1))
        trainer = search_trainer(work, held, epochs)
        space = {"optimizer.lr": tune.loguniform(LOW, HIGH)}

        def side_by_side(count: int) -> None:
            found = tune.search(trainer, df, space, metric="accuracy", trials=count)
            assert all(one.status == "completed" for one in found.trials)

        def in_turn(count: int) -> None:
            for number in range(count):
                lr = LOW * (HIGH / LOW) ** (number / max(1, count - 1))
                replace(trainer, optimizer=partial(optim.SGD, lr=lr)).fit(df)

        def in_threads(count: int) -> None:
            study = optuna.create_study(
                direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0)
            )
            objective = partial(plain_objective, work, tensors, epochs)
            study.optimize(objective, n_trials=count, n_jobs=RANKS)

        ways: dict[str, Callable[[int], None]] = {
            "search": side_by_side,
            "fits in turn": in_turn,
            "Optuna, threads": in_threads,
        }
        for way in ways.values():
            way(2)
        seconds: dict[str, list[float]] = {key: [] for key in ways}
        for _ in range(rounds):
            for key, way in ways.items():
                started = time.perf_counter()
                way(trials)
                seconds[key].append(time.perf_counter() - started)
        return seconds
    finally:
        spark.stop()


def main() -> None:
    chosen = options(__doc__).parse_args()
    rows, epochs, trials, rounds = (1024, 1, 4, 1) if chosen.quick else (4096, 3, 16, 3)
    table, figures = [], {}
    for name in WORKS:
        found = figures[name] = in_fresh_process(measure, name, rows, epochs, trials, rounds)
        ratios = [
            statistics.median(b / a for a, b in zip(found["search"], found[other], strict=True))
            for other in ("fits in turn", "Optuna, threads")
        ]
        medians = [statistics.median(seconds) for seconds in found.values()]
        table.append([work_named(name).name, *medians, *ratios])
    head = ["", "search, s", "in turn, s", "Optuna, s", "in turn / search", "Optuna / search"]
    print(f"{trials} trials of {epochs * rows // BATCH} iterations. {hardware()}\n")
    print(markdown(head, table))
    write_json(chosen.json, figures)


if __name__ == "__main__":
    main()
