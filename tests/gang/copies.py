"""Script: four ranks, two copies of a model each cut in two; then on with another strategy."""

from __future__ import annotations

import sys
from functools import partial

import numpy as np
import torch
from gang_training import CLASSES, WIDTH, trainer_of
from pyspark import cloudpickle
from torch import nn

import sparkdl

cloudpickle.register_pickle_by_value(sys.modules[__name__])
RANKS, BEGUN, STOP = 4, 6, sparkdl.max_iteration(9)
ENDS: dict[str, dict] = {
    "local": {"engine": "local"},
    "zero1": {"strategy": "zero1"},
    "one copy": {"strategy": "fsdp"},
    "two copies": {"strategy": sparkdl.FSDP(copies=2)},
}


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, CLASSES)
    )


def main() -> None:
    from launch import answer, session, spec

    given = spec()
    with session(given["master"]) as spark:
        generator = np.random.default_rng(1)
        rows = [
            (generator.normal(size=WIDTH).tolist(), int(generator.integers(CLASSES)))
            for _ in range(60)
        ]
        records = spark.sparkContext.parallelize(rows, RANKS)
        df = spark.createDataFrame(records, "features array<double>, label long").cache()
        common = partial(
            trainer_of, model=model, replicas=RANKS, batch_size=12, clip_norm=0.3, ema=0.8
        )
        begun = common(
            strategy=sparkdl.FSDP(units=["0"], copies=2),
            checkpoint=sparkdl.Checkpoint(given["path"], every=sparkdl.every(3)),
            validation=sparkdl.Validation(df, metrics=["accuracy"], every=sparkdl.every(3)),
            histograms=sparkdl.every(1),
        )
        found = {
            "whole": told(common(engine="local", stop=STOP).fit(df)),
            "begun": told(begun.fit(df)),
        }
        for name, how in ENDS.items():
            found[name] = told(common(stop=STOP, **how).fit(df, resume=given["path"]))
    answer(found)


def told(trained: sparkdl.TrainedModel) -> dict:
    models = [trained.module, trained.ema.module if trained.ema else None]
    weights = [torch.cat([p.detach().flatten() for p in m.parameters()]) for m in models if m]
    return {"losses": trained.history.losses, "weights": torch.cat(weights).tolist()}


if __name__ == "__main__":
    main()
