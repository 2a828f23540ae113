"""State is lost with an executor, or with a rank of a gang: the run goes on from what is kept, with the
bits of one unharmed. All in one session on two executors with slab roots of their own."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import gang_lost
import lose_executors
import pytest
from harness.cluster import PATIENT, Standalone
from harness.faulty import frame, outcome, trainer
from launch import asked_for, launch_together, soak_but

import sparkdl

pytestmark = [
    pytest.mark.faults,
    pytest.mark.gang,
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]
ROWS = gang_lost.all_rows()
RESUMED = r".+\. Continued from {} and repeated \d+ iterations?: \d+\.\d s\."


@pytest.fixture(scope="module")
def found(request, tmp_path_factory) -> dict:
    """What came of each, by module."""
    folder, rows = tmp_path_factory.mktemp("lost"), asked_for(request, "row")
    with Standalone(2, 1, folder / "cluster") as cluster:
        parts = {
            "lose_executors": {
                "notes": str(folder / "notes" / "lost"),
                "names": asked_for(request, "name"),
            },
            "gang_lost": {
                "local": str(folder / "cluster"),
                "notes": str(folder / "notes" / "gang"),
                "rows": [row for row in ROWS if row in rows or row in map(unharmed, rows)],
            },
        }
        settings = {**PATIENT, "spark.cores.max": "2", "spark.executor.cores": "1"}
        path = Path(__file__).parent
        return launch_together(path, folder, cluster.url, parts, seconds=1700, settings=settings)


@pytest.mark.parametrize(
    "name",
    soak_but(["slabs and an executor, with all that a state can hold"], lose_executors.CASES),
)
def test_the_run_goes_on_with_the_same_bits_and_says_from_where(found, spark, name):
    case, result = lose_executors.CASES[name], found["lose_executors"][name]
    assert result["struck"] == [fault.times for fault in case.faults]
    assert result["outcome"] == lose_executors.fit(spark, case, engine="local")
    told = [line for line in result["log"] if "cannot be read" not in line]
    points = [re.compile(RESUMED.format(point)) for point in case.points]
    assert all(any(point.fullmatch(line) for line in told) for point in points), result["log"]
    assert all(any(point.fullmatch(line) for point in points) for line in told), result["log"]
    assert len(result["recoveries"]) == len(told)
    assert all(0 < done < lose_executors.ITERATIONS for done in result["recoveries"])
    assert result["persisted"] == 0


@pytest.fixture(scope="module")
def one_process(spark) -> Any:
    """What comes of one process, which knows no faults; of rows that differ in these, once."""
    df = frame(spark, gang_lost.REPLICAS)
    validation = sparkdl.Validation(df, metrics=["accuracy"], every=sparkdl.every(4))

    @functools.cache
    def trained(slices: int, compression: sparkdl.TopK | None, model: Any) -> dict:
        same = {"compression": compression, "consistency": model, "validation": validation}
        return outcome(trainer(gang_lost.REPLICAS, engine="local", slices=slices, **same).fit(df))

    return trained


def unharmed(row: str) -> str:
    """The row of the same strategy without a fault, where it is not that of one process."""
    return f"none, {ROWS[row][0]['strategy']}"


@pytest.mark.parametrize("row", soak_but(["rank killed in its update", gang_lost.WRITES], ROWS))
def test_a_gang_ends_with_the_same_bits(found, one_process, row):
    results, (how, faults) = found["gang_lost"], ROWS[row]
    slices = 2 if how["strategy"] == "zero1" else 1
    expected = one_process(slices, how.get("compression"), how.get("consistency"))
    alone, result = results.get(unharmed(row), expected), results[row]
    assert "error" not in result, result
    assert result["struck"] == result["expected"] == [fault.times for fault in faults]
    assert {name: result[name] for name in expected} == {name: alone[name] for name in expected}
    if row == gang_lost.WRITES:
        # A checkpoint that was lost with its rank is written again, of the state then
        assert result["checkpoints"][0] == 10
        assert {2, 4} <= set(result["checkpoints"])
        assert len(result["checkpoints"]) >= 4
