"""Ranks of one model on two nodes. Of the rows of others a rank reads some from their files,
some are sent to it; those that are augmented always are."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gang_training import CLASSES, WIDTH, trainer_of
from pyspark import cloudpickle
from strategy_models import paired

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


def run(spark: Any, runs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """``runs``: some of HOW and WAYS; each of HOW in one process, too."""
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
    for name, way in [*((name, "local") for name in HOW), *runs]:
        strategy = WAYS.get(way, {"engine": "local"})
        trainer = trainer_of(model=paired, replicas=RANKS, batch_size=12, **HOW[name], **strategy)
        trained = trainer.fit(df)
        weights = torch.cat([p.detach().flatten() for p in trained.module.parameters()])
        found[f"{name}, {way}"] = [*trained.history.losses, *weights.tolist()]
    return found
