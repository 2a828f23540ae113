"""A gang that loses a rank, or an executor with its samples and slabs, ends with the same bits."""

from __future__ import annotations

import functools
from pathlib import Path

import gang_lost
import pytest
from harness.cluster import PATIENT, Standalone
from harness.faulty import frame, outcome, trainer
from launch import launch

import sparkdl

pytestmark = [
    pytest.mark.faults,
    pytest.mark.gang,
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("gang")
    with Standalone(2, 1, folder / "cluster") as cluster:
        return launch(
            Path(gang_lost.__file__),
            folder,
            master=cluster.url,
            local=str(folder / "cluster"),
            notes=str(folder / "notes"),
            settings={
                **PATIENT,
                "spark.sparkdl.snapshot.seconds": "0",
                "spark.cores.max": "2",
                "spark.executor.cores": "1",
            },
        )


@pytest.fixture(scope="module")
def undisturbed(spark, results) -> dict[str, dict]:
    """What comes of one process, by row; of what rounds otherwise, what comes of it left alone."""
    df = frame(spark, gang_lost.REPLICAS)
    validation = sparkdl.Validation(df, metrics=["accuracy"], every=sparkdl.every(4))

    @functools.cache  # rows that differ in their faults only
    def one_process(slices: int, compression: sparkdl.TopK | None) -> dict:
        same = {"compression": compression, "validation": validation}
        return outcome(trainer(gang_lost.REPLICAS, engine="local", slices=slices, **same).fit(df))

    found = {}
    for row, (how, _) in gang_lost.rows().items():
        if f"none, {how['strategy']}" in results:
            alone = results[f"none, {how['strategy']}"]
            found[row] = {name: alone[name] for name in found["none"]}
            continue
        slices = 2 if how["strategy"] == "zero1" else 1
        found[row] = one_process(slices, how.get("compression"))
    return found


@pytest.mark.parametrize("row", gang_lost.rows())
def test_same_bits_after(results, undisturbed, row):
    result, (_, faults) = results[row], gang_lost.rows()[row]
    assert "error" not in result, result
    assert result["struck"] == result["expected"] == [fault.times for fault in faults]
    assert {key: result[key] for key in undisturbed[row]} == undisturbed[row]


def test_checkpoints_are_written_all_the_same(results):
    """One that was lost with its rank is written again, of the state then."""
    found = results["executor killed, writing"]["checkpoints"]
    assert found[0] == 10
    assert {2, 4} <= set(found)
    assert len(found) >= 4
