"""Train on executors whose slab roots are apart, under Spark's security settings. One more run does
everything that a run can, while somebody looks at what listens."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from pyspark import cloudpickle
from torch import nn

import sparkdl
from sparkdl.engines.shuffle import forms
from sparkdl.engines.shuffle.engine import ShuffleEngine
from sparkdl.spark import broadcasts

cloudpickle.register_pickle_by_value(sys.modules[__name__])
WIDTH, CLASSES, NAMES = 16, 4, 40


def model() -> nn.Module:
    """No buffers, and lengths that are multiples of 64 bytes: the flat vector has no padding."""
    return nn.Sequential(
        nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16)
    )


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 16)
    )


class Tagged(nn.Module):
    """A dense layer and a sparse table, whose rows travel as rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 8)
        self.table = nn.Embedding(NAMES, 8, sparse=True)
        self.out = nn.Linear(8, 16)

    def forward(self, x):
        tags = (x[:, :3].abs() * 10).long().clamp(max=NAMES - 1)
        return self.out(torch.tanh(self.inner(x) + self.table(tags).sum(1)))


CASES = {
    "even": {},
    "buffers": {"model": normed, "slices": 3},
    "clip_norm": {"clip_norm": 0.3, "slices": 3},
    "clip_norm, one slice": {"clip_norm": 0.3, "slices": 1},
    "three replicas": {"replicas": 3, "model": normed},
    "bf16": {"wire": "bf16"},
    "table": {"model": Tagged, "optimizer": partial(torch.optim.SGD, lr=0.1)},
    "local steps": {"local_steps": 2},
    "few rows": {"batch_size": 3},
    "stale": {"consistency": sparkdl.StaleSynchronous(staleness=2)},
    "asynchronous": {"consistency": sparkdl.Asynchronous(groups=2, quorum=2)},
    "DiLoCo": {"consistency": sparkdl.DiLoCo(inner_steps=2)},
}


def trainer(case: str, **changes) -> sparkdl.Trainer:
    values = {
        "model": model,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.Adam, lr=1e-2),
        "batch_size": 24,
        "replicas": 4,
        "stop": sparkdl.max_iteration(5),
        "seed": 3,
    }
    return sparkdl.Trainer(**{**values, **CASES[case], **changes})


def frame(spark, rows: int = 120):
    generator = np.random.default_rng(5)
    found = [
        (generator.normal(size=WIDTH).tolist(), int(generator.integers(CLASSES)))
        for _ in range(rows)
    ]
    records = spark.sparkContext.parallelize(found, 5)  # never as many as there are replicas
    return spark.createDataFrame(records, "features array<float>, label long")


def wide() -> nn.Module:
    """1.3 MB, and with Adam's moments 4."""
    return nn.Sequential(nn.Linear(WIDTH, 10_000), nn.Tanh(), nn.Linear(10_000, 16))


def brought(spark, df) -> dict[str, list[str]]:
    """Weights, averages, and what a second fit makes of the state that was kept, with slabs that the
    driver cannot see and jobs whose results may take 1 MB; of one process, too."""
    from launch import digest

    conf, found = spark.sparkContext._jsc.sc().conf(), {}
    conf.set("spark.driver.maxResultSize", "1m")
    with mock.patch.object(broadcasts, "PIECE_BYTES", 500_000):
        for engine in ("local", "shuffle", "gang"):
            changes = {"model": wide, "engine": engine, "replicas": 2}
            if engine == "gang":
                changes["strategy"] = "zero1"
            first = trainer("even", **changes, ema=0.9, keep_optimizer_state=True).fit(df)
            second = trainer("even", **changes).fit(df, start=first)
            kept = first.optimizer_state is not None
            digests = [digest(each.module) for each in (first, first.ema, second) if each]
            found[engine] = [*digests, f"kept: {kept}"]
    conf.remove("spark.driver.maxResultSize")
    return found


def secured(df: Any, **changes: Any) -> sparkdl.Trainer:
    """The trainer of the run that is watched."""
    validation = sparkdl.Validation(df, metrics=["accuracy"], every=sparkdl.every(3))
    return trainer("buffers", replicas=2, slices=2, validation=validation, **changes)


def outcome(trained: sparkdl.TrainedModel, df: Any) -> dict[str, Any]:
    """All that a run gives, as JSON values."""
    from launch import digest

    rows = trained.transform(df).orderBy("features").select("prediction").collect()
    return {
        "digest": digest(trained.module),
        "losses": trained.history.losses,
        "validations": trained.history.validations,
        "evaluated": trained.evaluate(df, metrics=["accuracy"]),
        "predictions": [list(row.prediction) for row in rows],
    }


def watched(spark: Any, df: Any, folder: str) -> dict[str, Any]:
    """A run with checkpoints, what it gives, and what listened meanwhile."""
    from listening import watching

    kept = sparkdl.Checkpoint(folder, every=sparkdl.every(2))
    with watching() as found:
        trained = secured(df, checkpoint=kept).fit(df)
    conf = spark.sparkContext.getConf().getAll()
    return outcome(trained, df) | {
        "settings": dict(conf),
        "bytes": min(record["bytes_sent"] for record in trained.history),
        "roles": sorted(found.roles),
        "ports": sorted(found.ports),
        "sockets": sorted(found.sockets),
        "looks": found.looks,
        "slabs": [str(path) for path in Path("spark/work").glob("**/sparkdl-*")],
    }


def stages_of_last_job(context) -> int:
    """Those that were run."""
    spark = context._jsc.sc()
    spark.listenerBus().waitUntilEmpty()  # the store follows the scheduler
    return spark.statusStore().jobsList(None).apply(0).numCompletedStages()


def run(
    spark: Any, rows: Sequence[tuple[str, str]], checkpoints: str, more: Sequence[str]
) -> dict[str, Any]:
    """Train.

    Args:
        spark: The session.
        rows: A case each, and whether the nodes sum ("summed") or do not ("plain"), whatever the size
            of the model.
        checkpoints: The folder of those of the run that is watched.
        more: "brought", or nothing.
    """
    import innards
    from launch import digest

    notes: list[list[tuple[int, ...]]] = []
    stages: list[int] = []
    submissions: list[int] = []
    persisted: list[int] = []
    step, hand_on = ShuffleEngine.run, []

    def noted(self, iteration, then=()):
        result = step(self, iteration)
        stages.append(stages_of_last_job(self._context))
        submissions.append(self._versions._submission)
        persisted.append(innards.persisted(self._context))
        node_ids = self._placement.replica_nodes
        names = {node_id: i for i, node_id in enumerate(dict.fromkeys(node_ids))}
        hand_on[:] = [names[node_id] for node_id in node_ids]
        notes.append(
            [
                (n.gradients_sent, n.weights_sent, n.gradients_received, n.weights_received)
                for n in result.traffic.values()
            ]
        )
        return result

    results = {}
    df = frame(spark)
    for case, way in rows:
        for noted_so_far in (notes, stages, submissions, persisted):
            noted_so_far.clear()
        validation = sparkdl.Validation(df, every=sparkdl.every(3))
        with (
            mock.patch.object(ShuffleEngine, "run", noted),
            mock.patch.object(forms, "BYTES_PER_SECOND", 1e-9 if way == "summed" else 1e99),
        ):
            trained = trainer(case, validation=validation).fit(df)
        results[f"{case}, {way}"] = {
            "digest": digest(trained.module),
            "losses": trained.history.losses,
            "validations": trained.history.validations,
            "bytes_sent": [record["bytes_sent"] for record in trained.history],
            "nodes": list(hand_on),
            "traffic": [list(note) for note in notes],
            "stages": list(stages),
            "submissions": list(submissions),
            "persisted": list(persisted),
        }
    results["watched"] = watched(spark, df, checkpoints)
    if "brought" in more:
        results["brought"] = brought(spark, df)
    return results
