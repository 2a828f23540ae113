"""The shuffle engine and predictions on a GPU: the same as on the CPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark import cloudpickle
from torch import nn

import sparkdl

pytestmark = [
    pytest.mark.spark,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Pooled(nn.Module):
    """Rows of a table, and what is dense."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 6, sparse=sparse)
        # the gradient of a bias before batch norm is rounding errors, of which Adagrad makes steps
        self.body = nn.Sequential(
            nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)
        )

    def forward(self, number: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return self.body(self.table(number) + features)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"clip_norm": 1.0, "ema": 0.9, "l2": 1e-3, "accumulate": 2},
        {"local_steps": 2, "model": partial(Pooled, sparse=False)},
        {"compression": sparkdl.TopK(0.2)},
        {"wire": "bf16", "replicas": 3, "slices": 2},
        {"optimizer": partial(torch.optim.Adagrad, lr=0.05), "on_nan": "skip"},
        {"class_weights": [1.0, 2.0, 0.5], "weight": "weight", "histograms": sparkdl.every(2)},
        {"consistency": sparkdl.DiLoCo(inner_steps=2), "model": partial(Pooled, sparse=False)},
        {"consistency": sparkdl.StaleSynchronous(staleness=1)},
        {"freeze": ["table.*"], "activation_checkpointing": ["body"]},
    ],
    ids=lambda more: ", ".join(more) or "plain",
)
def test_training_is_that_of_the_cpu(spark: Any, more: dict[str, Any]) -> None:
    generator = np.random.default_rng(1)
    rows = [(i % 20, generator.normal(size=6).tolist(), int(i % 3), 1.0 + i % 2) for i in range(48)]
    rdd = spark.sparkContext.parallelize(rows, 2)
    df = spark.createDataFrame(
        rdd, "number long, features array<double>, label long, weight double"
    )
    values: dict[str, Any] = {
        "model": Pooled,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        "features": ["number", "features"],
        "batch_size": 12,
        "replicas": 2,
        "stop": sparkdl.max_epoch(2),
        "validation": sparkdl.Validation(df, metrics=["accuracy"], best="loss"),
        **more,
    }
    there = sparkdl.Trainer(**values, engine="shuffle").fit(df)
    here = sparkdl.Trainer(**values, engine="local").fit(df)
    assert there.history.losses == pytest.approx(here.history.losses, rel=1e-3)
    for one, other in zip(here.module.parameters(), there.module.parameters(), strict=True):
        assert other.device.type == "cpu"
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_half_precision_learns(spark: Any) -> None:
    generator = np.random.default_rng(1)
    points = generator.normal(size=(256, 6))
    rows = [(i % 20, point.tolist(), int(point[0] > 0)) for i, point in enumerate(points)]
    df = spark.createDataFrame(rows, "number long, features array<double>, label long")
    for precision in ("bf16", "fp16"):
        trained = sparkdl.Trainer(
            model=Pooled,
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(torch.optim.Adagrad, lr=0.1),
            features=["number", "features"],
            batch_size=32,
            replicas=2,
            precision=precision,
            stop=sparkdl.max_epoch(5),
        ).fit(df)
        assert trained.history.losses[-1] < 0.5 * trained.history.losses[0]


@pytest.mark.parametrize("engine", ["shuffle", "gang"])
def test_a_resumed_run_has_the_bits_of_one_that_ran_through(
    spark: Any, tmp_path: Path, engine: str
) -> None:
    run = sparkdl.Trainer(
        model=partial(Pooled, sparse=False),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=0.05),
        features=["number", "features"],
        batch_size=16,
        replicas=1,
        engine=engine,
        stop=sparkdl.max_iteration(8),
    )
    df = spark.range(64).selectExpr(
        "id % 20 AS number",
        "transform(sequence(0, 5), k -> sin(id * k)) AS features",
        "id % 3 AS label",
    )
    through = run.fit(df)
    saved = sparkdl.Checkpoint(tmp_path, every=sparkdl.every(2), asynchronous=engine == "gang")
    replace(run, checkpoint=saved, stop=sparkdl.max_iteration(4)).fit(df)
    resumed = replace(run, checkpoint=saved).fit(df, resume="latest")
    for one, other in zip(through.module.parameters(), resumed.module.parameters(), strict=True):
        assert torch.equal(one, other)


class Wasteful(nn.Linear):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if features.is_cuda:
            features = features + torch.empty(1 << 40, device=features.device)[0]
        return super().forward(features)


@pytest.mark.parametrize("engine", ["shuffle", "gang"])
def test_a_full_gpu_is_told_and_the_next_fit_has_room(spark: Any, engine: str) -> None:
    df = spark.range(64).selectExpr("array(double(id), 1D) AS features", "id % 2 AS label")
    run = sparkdl.Trainer(
        model=partial(Wasteful, 2, 2),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.01),
        batch_size=16,
        replicas=1,
        engine=engine,
        stop=sparkdl.max_epoch(1),
    )
    with pytest.raises(
        sparkdl.TrainingError, match=r"OutOfMemoryError: .*Give the GPU less to hold"
    ):
        run.fit(df)
    assert len(replace(run, model=partial(nn.Linear, 2, 2)).fit(df).history.losses) == 4


class Marked(nn.Module):
    """Outputs say where they were computed: on a GPU they are 100 more."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.body(features) + 100.0 * features.is_cuda


def found_on_the_cpu(output: torch.Tensor) -> torch.Tensor:
    assert not output.is_cuda
    return output + torch.zeros(3)


def test_predictions_are_those_of_the_cpu(spark: Any) -> None:
    generator = np.random.default_rng(1)
    points = generator.normal(size=(50, 6)).astype(np.float32)
    rows = [(point.tolist(), int(point[0] > 0)) for point in points]
    df = spark.createDataFrame(rows, "features array<float>, label long").repartition(3)
    trained = sparkdl.Trainer(
        model=Marked,
        loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5])),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        batch_size=10,
        engine="local",
        stop=sparkdl.max_epoch(2),
    ).fit(df)
    found = trained.transform(df, batch_size=8, postprocess=found_on_the_cpu).collect()
    with torch.no_grad():
        outputs = trained.module.eval()(torch.tensor([row.features for row in found]))
    there = torch.tensor([row.prediction for row in found])
    torch.testing.assert_close(there, outputs + 100.0, rtol=1e-4, atol=1e-4)
    records = spark.sparkContext.parallelize([row.features for row in found], 2)
    of_records = torch.tensor(np.array(trained.predict(records).collect()))
    torch.testing.assert_close(of_records, there, rtol=1e-4, atol=1e-4)

    labels = torch.tensor([row.label for row in found])
    scores = trained.evaluate(df, metrics=["accuracy"], batch_size=8)
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]))(outputs, labels)
    assert scores["loss"] == pytest.approx(float(weighted), rel=1e-3)
    assert scores["accuracy"] == pytest.approx(float((outputs.argmax(1) == labels).double().mean()))
