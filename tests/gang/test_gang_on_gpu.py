"""A gang on GPUs: every rank's own, and the same training as on the CPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pyspark import cloudpickle
from torch import nn

import sparkdl

pytestmark = [
    pytest.mark.gang,
    pytest.mark.spark,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )


def sum_on_device() -> tuple[str, float]:
    value = torch.ones(4, device=torch.device("cuda", torch.cuda.current_device()))
    dist.all_reduce(value)
    return str(dist.get_backend()), float(value.sum())


@pytest.mark.parametrize("ranks", [1, 2])
def test_tensors_on_the_gpu_are_summed(spark: Any, ranks: int) -> None:
    """With two ranks on one GPU by Gloo."""
    found = sparkdl.gang.run(sum_on_device, ranks=ranks, device="cuda")
    assert [value for _, value in found] == [4.0 * ranks] * ranks


@pytest.mark.parametrize(
    ("strategy", "replicas"),
    [
        ("ddp", 1),
        ("ddp", 2),
        (sparkdl.DDP(bucket_cap_mb=0.0005), 1),  # several buckets
        (sparkdl.DDP(bucket_cap_mb=0.0005), 2),
        ("zero1", 1),
        ("zero1", 2),
        ("fsdp", 1),
        ("fsdp", 2),
        (sparkdl.FSDP(cpu_offload=True), 1),
        ("tensor", 1),
        (sparkdl.Pipeline(micro_batches=1), 1),  # which batch norm would see
    ],
)
def test_training_is_that_of_the_cpu(spark: Any, strategy: Any, replicas: int) -> None:
    generator = np.random.default_rng(1)
    rows = [(generator.normal(size=6).tolist(), int(i % 3)) for i in range(48)]
    rdd = spark.sparkContext.parallelize(rows, replicas)
    df = spark.createDataFrame(rdd, "features array<double>, label long")
    values: dict[str, Any] = {
        "model": model,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        "batch_size": 12,
        "replicas": replicas,
        "clip_norm": 1.0,
        "ema": 0.9,
        "stop": sparkdl.max_epoch(2),
        "validation": sparkdl.Validation(df, metrics=["accuracy"], best="loss"),
    }
    there = sparkdl.Trainer(**values, engine="gang", strategy=strategy).fit(df)
    here = sparkdl.Trainer(**values, engine="local").fit(df)
    assert there.history.losses == pytest.approx(here.history.losses, rel=1e-4)
    for one, other in zip(here.module.parameters(), there.module.parameters(), strict=True):
        assert other.device.type == "cpu"
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "consistency", [sparkdl.Gossip(), sparkdl.DiLoCo(inner_steps=2)], ids=["gossip", "diloco"]
)
def test_replicas_of_their_own_are_those_of_the_cpu(spark: Any, consistency: Any) -> None:
    df = spark.range(48).selectExpr(
        "transform(sequence(0, 5), k -> sin(id * k)) AS features", "id % 3 AS label"
    )
    run = sparkdl.Trainer(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.05),
        batch_size=12,
        replicas=2,
        consistency=consistency,
        engine="gang",
        stop=sparkdl.max_epoch(2),
    )
    there, here = run.fit(df), replace(run, engine="local").fit(df)
    assert there.history.losses == pytest.approx(here.history.losses, rel=1e-4)
    for one, other in zip(here.module.parameters(), there.module.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


class Root(nn.Module):
    """Of a column of zeros the root is finite, its gradient is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 8), nn.Linear(8, 2, bias=False)
        nn.init.zeros_(self.first.weight)
        nn.init.zeros_(self.first.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.sqrt(self.first(x).abs()))


@pytest.mark.parametrize("strategy", ["ddp", sparkdl.DDP(bucket_cap_mb=0.00005)])
def test_a_gradient_that_is_not_finite_is_named(spark: Any, strategy: Any) -> None:
    df = spark.range(16).selectExpr("array(double(id), 1.0) AS features", "id % 2 AS label")
    run = sparkdl.Trainer(
        model=Root,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.05),
        batch_size=8,
        replicas=1,
        engine="gang",
        strategy=strategy,
        stop=sparkdl.max_epoch(1),
    )
    with pytest.raises(sparkdl.TrainingError, match=r'the gradient of "first\.(weight|bias)"'):
        run.fit(df)
