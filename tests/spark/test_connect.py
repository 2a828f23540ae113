"""Spark Connect, with a real server: models that were saved score there, and nothing trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import score_connected as script
import torch
from launch import launch
from torch import nn

import sparkdl
from sparkdl.data.fields import Field
from sparkdl.infer.output import Output
from sparkdl.infer.shipped_module import INLINE_BYTES

pytestmark = [pytest.mark.spark, pytest.mark.slow]
BALLAST_BYTES = {"small": 0, "large": 4 * INLINE_BYTES}
"""A large model travels apart from the query."""


def module(ballast: int) -> nn.Module:
    torch.manual_seed(ballast)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), nn.Flatten(0))
    net.register_buffer("ballast", torch.zeros(ballast // 4))
    return net.eval()


@pytest.fixture(scope="module")
def rows() -> list[tuple[list[float], float]]:
    random = np.random.default_rng(7)
    return [(x.tolist(), float(x.sum())) for x in random.normal(size=(20, 3)).astype(np.float32)]


@pytest.fixture(scope="module")
def found(rows: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("connect")
    models = {}
    for name, ballast in BALLAST_BYTES.items():
        net = module(ballast)
        trained = sparkdl.TrainedModel(
            module=net,
            model=net,
            loss=None,
            features=("x",),
            label=("y",),
            fields=(Field("x", "float32", (3,)), Field("y", "float32", ())),
            num_features=1,
            float_dtype="float32",
            output=Output.of(net(torch.zeros(1, 3))),
            history=sparkdl.History(),
        )
        models[name] = str(trained.save(folder / name))
    written = str(folder / "written")
    return launch(Path(script.__file__), folder, rows=rows, models=models, written=written)


def test_it_is_a_session_of_spark_connect(found: Any) -> None:
    assert found["session"] == "pyspark.sql.connect.session"


@pytest.mark.parametrize("size", BALLAST_BYTES)
def test_a_saved_model_scores_as_in_torch(found: Any, rows: Any, size: str) -> None:
    features, labels = (torch.tensor(values) for values in zip(*rows, strict=True))
    with torch.no_grad():
        expected = module(BALLAST_BYTES[size])(features)
    answers = found[size]
    torch.testing.assert_close(torch.tensor(answers["predictions"]), expected)
    assert answers["again"] == 3
    assert answers["apart"] == {"small": "NoneType", "large": "Artifact"}[size]
    error = nn.functional.mse_loss(expected, labels).item()
    assert answers["evaluated"] == {"mse": pytest.approx(error, rel=1e-5)}


def test_any_model_scores_as_column_as_files_and_in_sql(found: Any) -> None:
    expected = pytest.approx(found["large"]["predictions"], rel=1e-5)
    assert [value for value, _ in found["any model"]] == expected
    assert {error for _, error in found["any model"]} == {None}
    assert found["written"] == expected
    assert found["function"] == expected


def test_training_says_that_there_are_no_rdds(found: Any) -> None:
    assert found["fit"] == (
        "this DataFrame belongs to a Spark Connect session, which has no RDDs, but training needs "
        "them. Start a classic session on the cluster: sparkdl.session(master), or spark-submit "
        "your script; do not set spark.remote or SPARK_REMOTE."
    )
    assert found["gang"] == (
        "spark is a pyspark.sql.connect.session.SparkSession, and ranks are tasks of a classic "
        "SparkSession: Spark Connect has no RDDs. Start one, with sparkdl.session(master)."
    )
