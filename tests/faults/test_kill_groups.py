"""What times of machines decided is repeated with the same bits, though an executor was killed."""

from __future__ import annotations

import sys
from pathlib import Path

import kill_groups as script
import pytest
from launch import digest, launch
from pyspark import cloudpickle

import sparkdl

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.soak, pytest.mark.timeout(600)]
cloudpickle.register_pickle_by_value(sys.modules["kill_groups"])


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    """Two executors with slab roots of their own, and a slot more than replicas each."""
    folder = tmp_path_factory.mktemp("killed")
    return launch(Path(script.__file__), folder, master="local-cluster[2,3,1024]")


@pytest.mark.parametrize("name", script.MODELS)
def test_the_history_repeats_the_run(results, spark, name):
    found = results[name]
    assert found["recoveries"] >= 1
    history = sparkdl.History.from_json_bytes(found["history"].encode())
    assert list(history.decisions) == list(range(1, script.ITERATIONS + 1))
    data = script.rows(spark.sparkContext)
    for engine in ("local", "shuffle"):
        again = script.trainer(name, 0.0, engine=engine).fit(data, replay=history)
        assert digest(again.module) == found["digest"]
        assert again.history.losses == history.losses
