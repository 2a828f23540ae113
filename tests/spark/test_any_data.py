"""Whatever is in a DataFrame: it trains, or one sentence says which column or parameter is wrong."""

from __future__ import annotations

import datetime
import math
import sys
from typing import Any

import pytest
import torch
from any_values import EXAMPLES, SPECS, columns
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark import cloudpickle
from pyspark.sql import types as sql
from torch import nn

import sparkdl

pytestmark = pytest.mark.spark
cloudpickle.register_pickle_by_value(sys.modules[__name__])

NAMES = ["a", "B", "b", "c.d", "e`f", "prediction", "Å", " "]


class Mean(nn.Module):
    """Takes any inputs, of any shapes."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.linear = nn.Linear(1, max(1, outputs))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        means = [x.reshape(len(x), -1).float().mean(1) for x in inputs]
        out = self.linear(torch.stack(means).mean(0).clamp(-9, 9)[:, None])
        return out if self.outputs else out[:, 0]


def mean_of_output(output: torch.Tensor, *_: Any) -> torch.Tensor:
    return output.square().mean()


LOSSES = [nn.MSELoss(), nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss(), mean_of_output]


@st.composite
def tables(draw: st.DrawFn) -> tuple[sql.StructType, list[tuple[Any, ...]]]:
    """A schema of one to three columns, and as many values of each."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3))
    found = [draw(columns()) for _ in names]
    rows = min(len(values) for _, values in found)
    schema = sql.StructType(
        [sql.StructField(name, kind) for name, (kind, _) in zip(names, found, strict=True)]
    )
    return schema, list(zip(*[values[:rows] for _, values in found], strict=True))


@settings(
    max_examples=EXAMPLES or 40,
    derandomize=not EXAMPLES,
    deadline=datetime.timedelta(seconds=30),
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.data())
def test_any_table_trains_or_is_told(spark: Any, data: st.DataObject) -> None:
    schema, rows = data.draw(tables(), label="table")
    name = st.sampled_from([*schema.names, *schema.names, "a"])
    features = data.draw(st.lists(name, min_size=1, max_size=2), label="features")
    label = data.draw(st.none() | name | st.lists(name, min_size=1, max_size=2), label="label")
    weight = data.draw(st.none() | st.none() | name, label="weight")
    specs = data.draw(st.dictionaries(name, SPECS.filter(bool), max_size=1), label="columns")
    outputs = data.draw(st.integers(0, 3), label="outputs")
    loss = data.draw(st.sampled_from(LOSSES), label="loss")
    frame = spark.createDataFrame(rows, schema).coalesce(1)
    try:
        trainer = sparkdl.Trainer(
            model=Mean(outputs),
            loss=loss,
            optimizer=torch.optim.Adam,
            features=features,
            label=label,
            weight=weight,
            columns=specs,
            batch_size=2,
            replicas=1,
            engine="local",
            stop=sparkdl.max_iteration(2),
        )
        trained = trainer.fit(frame)
    except (sparkdl.UserError, sparkdl.TrainingError) as error:
        trained, told = None, str(error)
    if trained is None:
        named = [f'"{n}"' for n in (*features, *schema.names, *specs)]
        known = ("the loss", "the data is empty", "class_weights", "features", "weights of samples")
        assert any(name in told for name in (*named, *known)), told
        assert "Traceback" not in told
    else:
        assert len(trained.history) == 2 if len(rows) else not rows
        assert all(math.isfinite(record["loss"]) for record in trained.history)
