"""Fits that have the same bits in a classic session and in one of Spark Connect."""

from __future__ import annotations

import logging
import os
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch
from torch import nn

import sparkdl

REPLICAS = 2
ROWS = 300


def write_data(path: Path) -> str:
    """A file: DataFrames of it are hashed into partitions, in either kind of session."""
    random = np.random.default_rng(3)
    x = random.normal(size=(ROWS, 5)).astype(np.float32)
    words = [random.integers(1, 7, random.integers(1, 6)).tolist() for _ in range(ROWS)]
    columns = {
        "x": list(x),
        "kind": random.integers(0, 7, ROWS).astype(np.int32),
        "words": pa.array(words, pa.list_(pa.int64())),
        "weight": random.random(ROWS).astype(np.float32),
        "y": (x.sum(1) > 0).astype(np.int64),
        "z": x[:, 0] * 2 + 1,
        "lists": pa.array([[[1, 2]] * (i % 3) + [[3]] * (i == 7) for i in range(ROWS)]),
        "seldom": np.where(np.arange(ROWS) == 250, np.nan, x[:, 1]),
    }
    pyarrow.parquet.write_table(pa.table(columns), path)
    return str(path)


class Mixed(nn.Module):
    """Embedding, batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.layers = nn.Sequential(
            nn.Linear(9, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2)
        )

    def forward(self, x: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.cat([x, self.table(kind)], 1))


class Words(nn.Module):
    """A model that takes rows of varying length."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(8, 4), nn.Linear(4, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(words).sum(1))


class Lists(Words):
    """A model that takes lists of lists."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return super().forward(words.flatten(1))[:, 0]


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))


def _line() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 1), nn.Flatten(0))


def step(model: Any, batch: Any) -> Any:
    """A user's own step."""
    return nn.functional.mse_loss(model(batch["x"]), batch["z"])


def fits(data: Any) -> dict[str, sparkdl.Trainer]:
    """The trainers by name, whose validation is on a part of ``data``."""
    make = partial(
        sparkdl.Trainer,
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.Adam,
        features="x",
        label="y",
        batch_size=64,
        replicas=REPLICAS,
        engine="gang",
        stop=sparkdl.max_epoch(2),
    )
    # another type than that of the training data, which it keeps
    other = data.where("kind < 3").withColumn("kind", data["kind"].cast("long"))
    validation = sparkdl.Validation(other, metrics=["accuracy"], best="accuracy")
    mixed = partial(make, model=Mixed, features=["x", "kind"], validation=validation)
    return {
        "perceptron": make(model=_perceptron, keep_optimizer_state=True),
        "mixed": mixed(ema=0.9),
        "weighted": make(
            model=_line, loss=nn.MSELoss(), label="z", weight="weight", optimizer=torch.optim.SGD
        ),
        "sequence": make(model=Words, features="words", columns={"words": sparkdl.Sequence()}),
        "sampled": mixed(
            sampling=sparkdl.Balanced("kind", rows=200), class_weights="balanced", weight="weight"
        ),
        "adapting": make(  # in one row of one partition, each
            model=Lists,
            features="lists",
            columns={"lists": sparkdl.Sequence()},
            label="seldom",
            loss=sparkdl.MaskedLoss(nn.MSELoss()),
        ),
        "equal rows": make(model=partial(nn.Embedding, 8, 2), features="kind"),
        "clipped": make(model=_perceptron, clip_norm=0.1, accumulate=2, precision="bf16"),
        "perceptron, fsdp": make(model=_perceptron, strategy="fsdp"),
        "mixed, fsdp": mixed(strategy="fsdp"),
        "mixed, gossip": mixed(consistency=sparkdl.Gossip()),
    }


class Kill(sparkdl.Callback):
    """Kills its process once, after an iteration."""

    def __init__(self, flag: Path, iteration: int) -> None:
        self.flag, self.iteration = str(flag), iteration

    def on_iteration_end(self, trainer: Any, state: Any) -> None:
        if state.iteration == self.iteration and not os.path.exists(self.flag):
            Path(self.flag).touch()
            os.kill(os.getpid(), signal.SIGKILL)


def search(data: Any) -> Any:
    """A search, with the engine that the session has."""
    import sparkdl.tune

    trainer = replace(
        by_group(), validation=sparkdl.Validation(data.where("kind < 3"), metrics=["mae"])
    )
    space = {"batch_size": [32, 64], "optimizer.lr": [0.01, 0.1], "optimizer.eps": [1e-8, -1.0]}
    return sparkdl.tune.search(trainer, data, space, metric="mae", algorithm="grid")


def of_search(found: Any) -> list[Any]:
    """The trials of a search with their values, and the reasons of those that failed."""
    return [[dict(one.arguments), repr(one.value), one.reason] for one in found.trials]


def by_group() -> sparkdl.Trainer:
    """The trainer of a model for each group."""
    return sparkdl.Trainer(
        model=_line,
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.Adam, lr=0.01),
        features="x",
        label="z",
        batch_size=16,
        stop=sparkdl.max_epoch(2),
    )


def of_groups(models: sparkdl.GroupModels) -> list[Any]:
    """What was trained of each group, with all bits."""
    rows = models.table.orderBy("kind").collect()
    return [[row.kind, row.rows, row.iterations, bytes(row.weights).hex()] for row in rows]


BEGUN = "begun"


class LogBegin(sparkdl.Callback):
    """Says in the log that training has begun."""

    def on_iteration_end(self, trainer: Any, state: Any) -> None:
        if state.iteration == 1:
            print("a line of a callback")
            logging.getLogger("sparkdl").warning(BEGUN)


class Sleep(sparkdl.Callback):
    """Makes iterations long, so that there are few."""

    def on_iteration_end(self, trainer: Any, state: Any) -> None:
        time.sleep(0.1)


class SeveralArguments(Exception):
    """An exception with an ``__init__`` of its own, as Python does not unpickle it."""

    def __init__(self, code: int, *, place: str) -> None:
        super().__init__(f"{code} at {place}")


class Raises(sparkdl.Callback):
    """Raises such an exception in the first iteration."""

    def on_iteration_end(self, trainer: Any, state: Any) -> None:
        raise SeveralArguments(7, place="the start")


class Note(sparkdl.Callback):
    """Writes where it is and what it gets."""

    def __init__(self, path: Path) -> None:
        self.path, self.iterations = str(path), 0

    def on_iteration_end(self, trainer: Any, state: Any) -> None:
        self.iterations += 1

    def on_result(self, trainer: Any, trained: Any) -> None:
        from launch import digest

        text = f"{os.getpid()} {self.iterations} {digest(trained.module)}"
        Path(self.path).write_text(text)


class Raise(sparkdl.Callback):
    def on_epoch_end(self, trainer: Any, state: Any) -> None:
        raise KeyError("no such epoch")


class Held(sparkdl.Trigger):
    """A trigger that holds what does not pickle."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __call__(self, before: Any, state: Any) -> bool:
        return state.iteration >= 1


def bad_fits(data: Any) -> dict[str, Any]:
    """Calls that fail in either kind of session with the same message."""
    good = fits(data)["perceptron"]
    null = data.selectExpr("CASE WHEN kind = 3 THEN NULL ELSE x END AS x", "y")
    return {
        "a row": lambda: good.fit(null.coalesce(1)),
        "a stream": lambda: good.fit(
            data.sparkSession.readStream.format("rate").load().selectExpr("array(1f) x", "value y")
        ),
        "a column": lambda: replace(good, features="X1").fit(data),
        "no rows": lambda: good.fit(data.where("kind > 100")),
        "the model": lambda: replace(good, model=partial(nn.Linear, 3, 2)).fit(data),
        "the validation": lambda: replace(
            good, validation=sparkdl.Validation(data.where("kind > 100"))
        ).fit(data),
        "a callback": lambda: replace(good, callbacks=[Raise()]).fit(data),
        "the mesh": lambda: replace(good, mesh={"data": 3}).fit(data),
    }
