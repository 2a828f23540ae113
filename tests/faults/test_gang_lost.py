"""A gang that loses a rank, or an executor with its samples and slabs, ends with the same bits."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gang_lost
import pytest
from harness.cluster import PATIENT, Standalone
from harness.faulty import frame, outcome, trainer
from launch import asked_for, launch, soak_but

import sparkdl

pytestmark = [
    pytest.mark.faults,
    pytest.mark.gang,
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]


ROWS = gang_lost.rows()
QUICK = ["none", "rank killed in its update", "executor killed, fsdp", gang_lost.WRITES]
"""What is always tried; the others soak."""


@pytest.fixture(scope="module")
def results(request, tmp_path_factory) -> dict:
    folder, asked = (
        tmp_path_factory.mktemp("gang"),
        ["none", gang_lost.WRITES, *asked_for(request, "row")],
    )
    with Standalone(2, 1, folder / "cluster") as cluster:
        return launch(
            Path(gang_lost.__file__),
            folder,
            master=cluster.url,
            local=str(folder / "cluster"),
            notes=str(folder / "notes"),
            rows=[row for row in ROWS if row in asked or row in map(unharmed, asked)],
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
    def one_process(slices: int, compression: sparkdl.TopK | None, model: Any) -> dict:
        same = {"compression": compression, "consistency": model, "validation": validation}
        return outcome(trainer(gang_lost.REPLICAS, engine="local", slices=slices, **same).fit(df))

    found = {}
    for row in results:
        how, _ = ROWS[row]
        if unharmed(row) in results:
            alone = results[unharmed(row)]
            found[row] = {name: alone[name] for name in found["none"]}
            continue
        slices = 2 if how["strategy"] == "zero1" else 1
        found[row] = one_process(slices, how.get("compression"), how.get("consistency"))
    return found


def unharmed(row: str) -> str:
    """The row of the same strategy without a fault, where it is not that of one process."""
    return f"none, {ROWS[row][0]['strategy']}"


@pytest.mark.parametrize("row", soak_but(QUICK, ROWS))
def test_same_bits_after(results, undisturbed, row):
    result, (_, faults) = results[row], ROWS[row]
    assert "error" not in result, result
    assert result["struck"] == result["expected"] == [fault.times for fault in faults]
    assert {key: result[key] for key in undisturbed[row]} == undisturbed[row]


def test_checkpoints_are_written_all_the_same(results):
    """One that was lost with its rank is written again, of the state then."""
    found = results[gang_lost.WRITES]["checkpoints"]
    assert found[0] == 10
    assert {2, 4} <= set(found)
    assert len(found) >= 4
