"""Training is a function: the same bits on any number of executors, by references and by bytes."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import train_digest
from launch import digest, launch
from pyspark import cloudpickle

pytestmark = pytest.mark.spark
SCRIPT = Path(train_digest.__file__)

# Workers of the session in this process cannot import the script.
cloudpickle.register_pickle_by_value(sys.modules["train_digest"])


@pytest.fixture(scope="module")
def parquet(spark, tmp_path_factory) -> str:
    """Three files, so that the trainer redistributes the rows into four partitions."""
    generator = np.random.default_rng(0)
    rows = [
        (generator.normal(size=train_digest.WIDTH).tolist(), int(generator.integers(4)))
        for _ in range(150)
    ]
    path = str(tmp_path_factory.mktemp("data") / "rows.parquet")
    df = spark.createDataFrame(rows, "features array<float>, label long")
    df.repartition(3).write.parquet(path)
    return path


@pytest.fixture(scope="module")
def expected(spark, parquet) -> dict:
    """The local engine: no Spark job computes anything."""
    trained = train_digest.trainer(engine="local").fit(spark.read.parquet(parquet))
    return {"digest": digest(trained.module), "losses": trained.history.losses}


def runs(parquet: str, folder: Path, masters: list[str], slabs: str) -> dict:
    settings = {"spark.sparkdl.slab.dir": slabs}
    return launch(SCRIPT, folder, masters=masters, parquet=parquet, settings=settings)


def test_this_session(spark, parquet, expected):
    trained = train_digest.trainer().fit(spark.read.parquet(parquet))
    assert digest(trained.module) == expected["digest"]
    assert trained.history.losses == expected["losses"]


def test_the_digest_sees_one_bit(spark, parquet, expected):
    trained = train_digest.trainer(engine="local").fit(spark.read.parquet(parquet))
    with torch.no_grad():
        trained.module[4].bias.view(torch.int32)[1] ^= 1
    assert digest(trained.module) != expected["digest"]


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "masters",
    [["local[1]", "local[4]"], ["local-cluster[2,1,1024]", "local-cluster[3,1,1024]"]],
    ids="+".join,
)
def test_other_masters_by_references(parquet, expected, tmp_path, masters):
    """Executors of one host share a slab root: no gradient travels as bytes."""
    for result in runs(parquet, tmp_path, masters, "auto").values():
        assert result["digest"] == expected["digest"]
        assert result["losses"] == expected["losses"]
        assert result["bytes_sent"] == [0] * 12
        assert result["roots"] == 1


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_executors_with_roots_apart_by_bytes(parquet, expected, tmp_path):
    """A relative slab directory lies in each executor's own working directory."""
    masters = ["local-cluster[2,1,1024]", "local-cluster[3,1,1024]"]
    results = runs(parquet, tmp_path, masters, "slabs")
    for executors, result in zip([2, 3], results.values(), strict=True):
        assert result["digest"] == expected["digest"]
        assert result["losses"] == expected["losses"]
        assert result["roots"] == executors
        assert len(result["bytes_sent"]) == 12
        assert all(result["bytes_sent"])
