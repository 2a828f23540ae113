"""Script: the digests of eight fits, predictions and a pipeline, equal on every version of Spark.

    python tests/matrix/eight_fits.py FOLDER [--resume] [--only FIT ...]

FOLDER keeps a checkpoint of the last fit. With ``--resume`` that fit goes on from the checkpoint that
another version left there. With ``--only`` the other fits before it are left out. The last line of the
output is JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyspark
import torch
from pyspark import cloudpickle
from pyspark.ml import Pipeline
from torch import nn

import sparkdl
from sparkdl.ml import TorchClassifier

cloudpickle.register_pickle_by_value(sys.modules[__name__])
WIDTH, CLASSES = 8, 4


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, CLASSES))


def with_state() -> nn.Module:
    layers = [nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3)]
    return nn.Sequential(*layers, nn.Linear(32, CLASSES))


def trainer(model: Any = with_state, **changes: Any) -> sparkdl.Trainer:
    values = {
        "model": model,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.AdamW, lr=1e-2),
        "batch_size": 32,
        "replicas": 2,
        "slices": 3,
        "stop": sparkdl.max_iteration(12),
        "seed": 11,
    }
    return sparkdl.Trainer(**{**values, **changes})


FITS: dict[str, sparkdl.Trainer] = {
    "local": trainer(engine="local"),
    "shuffle": trainer(),
    "shuffle, clipped by norm": trainer(plain, clip_norm=0.5),
    "shuffle, accumulated and averaged": trainer(accumulate=2, ema=0.9),
    "gang": trainer(engine="gang", slices=None),
    "gang, zero1": trainer(plain, engine="gang", slices=None, strategy="zero1"),
    "shuffle, compressed": trainer(plain, wire="bf16"),
}
RESUMED = "shuffle, from a checkpoint"


def hexdigest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def digest(module: nn.Module) -> str:
    return hexdigest(*(value.numpy().tobytes() for value in module.state_dict().values()))


def rows(spark: Any) -> Any:
    """Numbers without a random generator of Spark's, which may differ between versions."""
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(160, WIDTH, generator=generator)
    labels = torch.randint(CLASSES, (160,), generator=generator)
    pairs = list(zip(features.tolist(), labels.tolist(), strict=True))
    return spark.createDataFrame(pairs, "features array<float>, label long")


def digests(
    spark: Any, folder: Path, only: Sequence[str] = tuple(FITS), resume: bool = False
) -> dict[str, str]:
    """Return the digests of the fits in ``only`` and of all that comes after them.

    The last fit goes on from a checkpoint in ``folder``, which is made there unless ``resume``.
    """
    df = rows(spark)
    found = {name: digest(FITS[name].fit(df).module) for name in only}
    half = trainer(stop=sparkdl.max_iteration(6), checkpoint=sparkdl.Checkpoint(str(folder)))
    if not resume:
        half.fit(df)
    whole = trainer().fit(df, resume=str(folder))
    found[RESUMED] = digest(whole.module)

    predicted = [row.prediction for row in whole.transform(df).select("prediction").collect()]
    found["transform"] = hexdigest(json.dumps(predicted).encode())
    scored = sparkdl.predict(df, whole.module, outputs={"best": lambda out: out.argmax(1)})
    found["predict"] = hexdigest(json.dumps([row.best for row in scored.collect()]).encode())
    stage = TorchClassifier(
        model=plain, learningRate=0.01, batchSize=32, maxEpochs=1, trainerArgs={"replicas": 2}
    )
    pipeline = Pipeline(stages=[stage]).fit(df)
    classes = [row.prediction for row in pipeline.transform(df).select("prediction").collect()]
    found["pipeline"] = hexdigest(json.dumps(classes).encode())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--only", nargs="*", default=[*FITS])
    given = parser.parse_args()
    spark = sparkdl.session(
        "local[2]", **{"spark.ui.enabled": "false", "spark.sparkdl.progress": "false"}
    )
    found = digests(spark, given.folder, given.only, given.resume)
    spark.stop()
    print(json.dumps({"spark": pyspark.__version__, "digests": found}))


if __name__ == "__main__":
    main()
