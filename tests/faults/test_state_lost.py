"""State is lost with its executor: the run goes on from what is kept, with the bits of one unharmed."""

from __future__ import annotations

import re
from pathlib import Path

import lose_executors as script
import pytest
from launch import asked_for, launch, soak_but

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]
RESUMED = r".+\. Continued from {} and repeated \d+ iterations?: \d+\.\d s\."


@pytest.fixture(scope="module")
def results(request, tmp_path_factory) -> dict:
    """The cases, on two executors with slab roots of their own."""
    folder = tmp_path_factory.mktemp("lost")
    master, notes = "local-cluster[2,1,1024]", str(folder / "notes")
    names = asked_for(request, "name")
    return launch(Path(script.__file__), folder, master=master, notes=notes, names=names)


@pytest.mark.parametrize(
    "name", soak_but(["slabs and an executor, with all that a state can hold"], script.CASES)
)
def test_the_run_goes_on_with_the_same_bits_and_says_from_where(results, spark, name):
    case, result = script.CASES[name], results[name]
    assert result["struck"] == [fault.times for fault in case.faults]
    assert result["outcome"] == script.fit(spark, case, engine="local")
    told = [line for line in result["log"] if "cannot be read" not in line]
    points = [re.compile(RESUMED.format(point)) for point in case.points]
    assert all(any(point.fullmatch(line) for line in told) for point in points), result["log"]
    assert all(any(point.fullmatch(line) for point in points) for line in told), result["log"]
    assert len(result["recoveries"]) == len(told)
    assert all(0 < done < script.ITERATIONS for done in result["recoveries"])
    assert result["persisted"] == 0
