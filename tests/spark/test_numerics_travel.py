"""torch's settings of the driver hold in the tasks of fits and predictions, and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from pyspark import cloudpickle
from torch import nn

import sparkdl
from sparkdl.process.determinism import Numerics

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Centred(nn.Linear):
    """What it makes is of the default dtype, when it is built and when it runs."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("centre", torch.tensor([0.5, 1.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(2, 2) @ torch.eye(2)
        return super().forward((x - self.centre) @ ones)


@pytest.fixture
def _float64() -> Iterator[None]:
    before = Numerics.here()
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    yield
    before._set(Numerics.here())


@pytest.fixture(scope="module")
def table(spark: Any) -> Any:
    return spark.range(24).selectExpr(
        "array(float(id % 7), float(id % 5)) AS features", "id % 2 AS label"
    )


@pytest.mark.usefixtures("_float64")
def test_the_defaults_of_the_driver_hold_in_its_tasks(spark: Any, table: Any) -> None:
    found = {}
    for engine in ("local", "shuffle", "gang"):
        trained = sparkdl.Trainer(
            model=Centred,
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(torch.optim.Adam, lr=0.1),
            batch_size=8,
            replicas=2,
            engine=engine,
            stop=sparkdl.max_epoch(1),
        ).fit(table)
        assert trained.module.weight.dtype == torch.float64
        found[engine] = trained.history.losses
    assert found["shuffle"] == found["local"]
    assert found["gang"] == found["local"]
    rows = trained.transform(table).collect()
    own = trained.module(torch.tensor([row.features for row in rows]))
    assert torch.equal(own, torch.tensor([row.prediction for row in rows]))
    assert trained.evaluate(table)["loss"] > 0

    def plain(_: int) -> bool:
        return (
            torch.get_default_dtype() == torch.float32
            and not torch.are_deterministic_algorithms_enabled()
        )

    assert all(spark.sparkContext.parallelize(range(8), 8).map(plain).collect())
