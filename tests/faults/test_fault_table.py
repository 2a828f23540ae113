"""Every row of the fault table that a run survives: the fault happened, and the bits are the same.

Faults strike on a standalone cluster whose master, workers and executors are real processes: two
replicas on two executors and six on three, whose slab roots are one (references travel) or apart
(bytes do), always with speculation on; and in local mode, the rows that can. On the first cluster ranks
of a gang are lost, too: the run goes on from what is kept.

All of it soaks: ``test_retry.py`` always tries failed tasks, killed workers, deleted slabs and a lost
executor, tests of gangs lost ranks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fault_table
import gang_lost
import pytest
from harness import processes
from harness.cluster import PATIENT, Standalone
from harness.faulty import frame, outcome, trainer
from launch import asked_for, launch_together

import sparkdl

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.soak, pytest.mark.timeout(1800)]
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
    """``executors`` with ``cores`` each; none: local mode."""

    replicas: int
    executors: int
    cores: int
    way: str

    def __str__(self) -> str:
        place = f"on {self.executors}" if self.executors else "in local mode"
        return f"{self.replicas} {place}, {self.way}"

    @property
    def rows(self) -> dict[str, fault_table.Row]:
        return ROWS if self.executors else LOCAL_ROWS


TWO = Shape(2, 2, 1, "references")
SHAPES = [
    Shape(2, 0, 2, "references"),
    TWO,
    Shape(2, 2, 1, "bytes"),
    Shape(6, 3, 2, "references"),
    Shape(6, 3, 2, "bytes"),
]
CASES = [pytest.param(shape, row, id=f"{shape}: {row}") for shape in SHAPES for row in shape.rows]


def train(shape: Shape, folder: Path, parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the results of some modules in one session."""
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
        path = Path(__file__).parent
        return launch_together(path, folder, master, parts, seconds=1700, settings=settings)


def table(shape: Shape, folder: Path, rows: list[str]) -> dict[str, Any]:
    """The arguments of ``fault_table``."""
    return {
        "replicas": shape.replicas,
        "local": str(folder / "cluster") if shape.executors else "",
        "slabs": "slabs" if shape.way == "bytes" else str(folder / "slabs"),
        "notes": str(folder / "notes"),
        "often": "0" if shape.way == "bytes" else "30",
        "rows": rows,
    }


@pytest.fixture(scope="module")
def found(request, tmp_path_factory) -> Callable[[Shape], dict[str, Any]]:
    """Return a function of a shape that gives the results of its session, by module."""
    asked, lost = asked_for(request, "shape", "row"), asked_for(request, "gang")

    @functools.cache
    def tried(shape: Shape) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("table")
        rows = [row for row in shape.rows if (shape, row) in asked]
        parts: dict[str, dict[str, Any]] = {}
        if shape == TWO:  # first: a row of the table loses a host
            parts["gang_lost"] = {
                "local": str(folder / "cluster"),
                "notes": str(folder / "lost"),
                "rows": [row for row in GANGS if row in lost or row in map(unharmed, lost)],
            }
        parts["fault_table"] = table(shape, folder, rows)
        return train(shape, folder, parts)

    return tried


@pytest.fixture(scope="module")
def undisturbed(spark) -> Callable[..., dict]:
    """Return the results of one process without faults; rows that differ only in faults share one."""

    @functools.cache
    def trained(replicas: int, changes: tuple[tuple[str, Any], ...]) -> dict:
        df = frame(spark, replicas)
        validation = sparkdl.Validation(df, metrics=["accuracy"], every=sparkdl.every(4))
        given = {"engine": "local", "validation": validation, **dict(changes)}
        return outcome(trainer(replicas, **given).fit(df))

    return lambda replicas, **changes: trained(replicas, tuple(changes.items()))


@pytest.mark.parametrize(("shape", "row"), CASES)
def test_the_fault_happened_and_the_bits_are_the_same(found, undisturbed, shape, row):
    tried, expected = found(shape)["fault_table"], undisturbed(shape.replicas, **ROWS[row].changes)
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


GANGS = gang_lost.all_rows()


def unharmed(row: str) -> str:
    """The row of the same strategy without a fault, where it is not that of one process."""
    return f"none, {GANGS[row][0]['strategy']}"


@pytest.mark.gang
@pytest.mark.parametrize("gang", GANGS)
def test_a_gang_ends_with_the_same_bits(found, undisturbed, gang):
    results, (how, faults) = found(TWO)["gang_lost"], GANGS[gang]
    same = {name: how[name] for name in ("compression", "consistency") if name in how}
    slices = 2 if how["strategy"] == "zero1" else 1
    expected = undisturbed(gang_lost.REPLICAS, slices=slices, **same)
    alone, result = results.get(unharmed(gang), expected), results[gang]
    assert "error" not in result, result
    assert result["struck"] == result["expected"] == [fault.times for fault in faults]
    assert {name: result[name] for name in expected} == {name: alone[name] for name in expected}
    if gang == gang_lost.WRITES:
        # A checkpoint that was lost with its rank is written again, of the state then
        assert result["checkpoints"][0] == 10
        assert {2, 4} <= set(result["checkpoints"])
        assert len(result["checkpoints"]) >= 4
