"""Every row of the fault table that a run survives: the fault happened, and the bits are the same.

Faults strike on a standalone cluster whose master, workers and executors are real processes: two
replicas on two executors and six on three, whose slab roots are one (references travel) or apart
(bytes do), always with speculation on; and in local mode, the rows that can.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fault_table
import pytest
from harness import processes
from harness.cluster import PATIENT, Standalone
from harness.faulty import frame, outcome, trainer
from launch import asked_for, launch_together

import sparkdl

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "50ms",
    "spark.speculation.quantile": "0.4",
    "spark.speculation.minTaskRuntime": "300ms",
}


ROWS = fault_table.all_rows(fault_table.Cluster(2, Path(), "slabs"))
LOCAL_ROWS = fault_table.all_rows(fault_table.Cluster(2, Path(), "slabs", executors=False))


@dataclass(frozen=True)
class Shape:
    """``executors`` with ``cores`` each; none: local mode. ``quick``: the rows that are always tried;
    the others soak."""

    replicas: int
    executors: int
    cores: int
    way: str
    quick: tuple[str, ...] = ()

    def __str__(self) -> str:
        place = f"on {self.executors}" if self.executors else "in local mode"
        return f"{self.replicas} {place}, {self.way}"

    @property
    def rows(self) -> dict[str, fault_table.Row]:
        return ROWS if self.executors else LOCAL_ROWS

    def group(self, row: str) -> list[str]:
        """Rows that may be tried in one session with ``row``."""
        return [other for other in self.rows if (other in self.quick) == (row in self.quick)]


QUICK = ("straggler", "slabs deleted", "begun again, weights borrowed")
"""Others are tried always too, elsewhere: killed workers by ``test_retry.py``, a killed executor by
``test_state_lost.py``."""
SHAPES = [
    Shape(2, 0, 2, "references"),
    Shape(2, 2, 1, "references", QUICK),
    Shape(2, 2, 1, "bytes"),
    Shape(6, 3, 2, "references"),
    Shape(6, 3, 2, "bytes"),
]
CASES = [
    pytest.param(
        shape, row, id=f"{shape}: {row}", marks=() if row in shape.quick else pytest.mark.soak
    )
    for shape in SHAPES
    for row in shape.rows
]


def train(shape: Shape, folder: Path, rows: list[str]) -> dict:
    """What comes of the rows in one session."""
    local = str(folder / "cluster") if shape.executors else ""
    table = {
        "replicas": shape.replicas,
        "local": local,
        "slabs": "slabs" if shape.way == "bytes" else str(folder / "slabs"),
        "notes": str(folder / "notes"),
        "often": "0" if shape.way == "bytes" else "30",
        "rows": rows,
    }
    with contextlib.ExitStack() as stack:
        master = f"local[{shape.cores},8]"
        if shape.executors:
            cluster = Standalone(shape.executors, shape.cores, folder / "cluster")
            master = stack.enter_context(cluster).url
        settings = {
            **PATIENT,
            **SPECULATION,
            "spark.cores.max": str(max(1, shape.executors) * shape.cores),
            "spark.executor.cores": str(shape.cores),
        }
        parts = {"fault_table": table}
        found = launch_together(
            Path(__file__).parent, folder, master, parts, seconds=850, settings=settings
        )
        return found["fault_table"]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory) -> Callable[[Shape, str], dict]:
    """What came of the session in which a row was tried."""
    asked = asked_for(request, "shape", "row")

    @functools.cache
    def tried(shape: Shape, rows: tuple[str, ...]) -> dict:
        wanted = [row for row in rows if (shape, row) in asked]
        return train(shape, tmp_path_factory.mktemp("table"), wanted)

    return lambda shape, row: tried(shape, tuple(shape.group(row)))


@pytest.fixture(scope="module")
def undisturbed(spark) -> Callable[[int, str], dict]:
    """What comes of one process, which knows no faults."""

    @functools.cache
    def trained(replicas: int, changes: tuple[tuple[str, Any], ...]) -> dict:
        df = frame(spark, replicas)
        validation = sparkdl.Validation(df, metrics=["accuracy"], every=sparkdl.every(4))
        given = {"engine": "local", "validation": validation, **dict(changes)}
        return outcome(trainer(replicas, **given).fit(df))

    return lambda replicas, row: trained(replicas, tuple(ROWS[row].changes.items()))


@pytest.mark.parametrize(("shape", "row"), CASES)
def test_the_fault_happened_and_the_bits_are_the_same(results, undisturbed, shape, row):
    tried, expected = results(shape, row), undisturbed(shape.replicas, row)
    result = tried[row]
    assert "error" not in result, result["error"]
    assert {name: result[name] for name in expected} == expected
    assert result["struck"] == result["expected"]
    assert all(files > 0 for files in result["deleted"])
    assert not any(map(processes.alive, result["killed executors"]))
    if not shape.rows[row].snapshots:
        assert any("Continued from the beginning" in line for line in result["log"]), result["log"]
    if row == "straggler":
        assert result["passed"] != [[]]  # a twin ran while it slept
        assert result["seconds"] < fault_table.STRAGGLER_SECONDS
    if row == "host lost":
        assert tried["executors left"] == shape.executors - 1
