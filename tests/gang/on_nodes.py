"""Script: ranks of one model on two nodes. Of the rows of others a rank reads some from their files,
some are sent to it; those that are augmented always are."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import torch
from copies import paired
from gang_training import CLASSES, WIDTH, trainer_of
from pyspark import cloudpickle

cloudpickle.register_pickle_by_value(sys.modules[__name__])
RANKS = 4
WAYS: dict[str, dict[str, Any]] = {
    "layers": {"strategy": "tensor"},
    "stages": {"strategy": "pipeline"},
    "stages of layers": {"mesh": {"pipe": 2, "tensor": 2}},
}


def noisy(features: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return features + rng.normal(scale=0.1, size=WIDTH).astype(features.dtype)


HOW: dict[str, dict[str, Any]] = {
    "read or sent": {"weight": "weight"},
    "augmented": {"augment": noisy},
}


def main() -> None:
    from launch import answer, session, spec

    with session(spec()["master"], **{"spark.sparkdl.slab.dir": "slabs"}) as spark:
        random = np.random.default_rng(1)
        rows = [
            (random.normal(size=WIDTH).tolist(), int(random.integers(CLASSES)), n % 5 / 2)
            for n in range(60)
        ]
        numbered = spark.sparkContext.parallelize(range(RANKS), RANKS)
        cuts = [0, 25, 28, 48, 60]
        df = spark.createDataFrame(
            numbered.flatMap(lambda n: rows[cuts[n] : cuts[n + 1]]),
            "features array<double>, label long, weight double",
        ).cache()
        df.count()
        found: dict[str, Any] = {"nodes": len(set(numbered.map(lambda _: os.getcwd()).collect()))}
        for name, how in HOW.items():
            for way, strategy in {"local": {"engine": "local"}, **WAYS}.items():
                run = trainer_of(model=paired, replicas=RANKS, batch_size=12, **how, **strategy)
                trained = run.fit(df)
                weights = torch.cat([p.detach().flatten() for p in trained.module.parameters()])
                found[f"{name}, {way}"] = [*trained.history.losses, *weights.tolist()]
    answer(found)


if __name__ == "__main__":
    main()
