"""Every row of the fault table that a run survives: the fault happened, and the bits are the same.

Faults strike on a standalone cluster whose master, workers and executors are real processes: two
replicas on two executors and six on three, whose slab roots are one (references travel) or apart
(bytes do), always with speculation on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import fault_table
import pytest
from harness import processes
from harness.cluster import PATIENT, Standalone
from harness.faulty import frame, outcome, trainer
from launch import launch

import sparkdl

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "50ms",
    "spark.speculation.quantile": "0.4",
    "spark.speculation.minTaskRuntime": "300ms",
}


@dataclass(frozen=True)
class Shape:
    """``executors`` with ``cores`` each."""

    replicas: int
    executors: int
    cores: int
    way: str

    def __str__(self) -> str:
        return f"{self.replicas} on {self.executors}, {self.way}"


SHAPES = [
    Shape(2, 2, 1, "references"),
    pytest.param(Shape(2, 2, 1, "bytes"), marks=pytest.mark.soak),
    pytest.param(Shape(6, 3, 2, "references"), marks=pytest.mark.soak),
    Shape(6, 3, 2, "bytes"),
]


def train(shape: Shape, folder: Path, rows: list[str], **settings: str) -> dict:
    slabs = "slabs" if shape.way == "bytes" else str(folder / "slabs")
    with Standalone(shape.executors, shape.cores, folder / "cluster") as cluster:
        return launch(
            Path(fault_table.__file__),
            folder,
            seconds=850,
            master=cluster.url,
            local=str(folder / "cluster"),
            slabs=slabs,
            notes=str(folder / "notes"),
            replicas=shape.replicas,
            rows=rows,
            settings={
                **PATIENT,
                "spark.cores.max": str(shape.executors * shape.cores),
                "spark.executor.cores": str(shape.cores),
                **settings,
            },
        )


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def shape(request) -> Shape:
    return request.param


@pytest.fixture(scope="module")
def results(shape, tmp_path_factory) -> dict:
    return train(shape, tmp_path_factory.mktemp("table"), [], **SPECULATION)


@pytest.fixture(scope="module")
def undisturbed(spark, shape) -> dict:
    """What comes of one process, which knows no faults."""
    df = frame(spark, shape.replicas)
    validation = sparkdl.Validation(df, metrics=["accuracy"], every=sparkdl.every(4))
    return outcome(trainer(shape.replicas, engine="local", validation=validation).fit(df))


@pytest.mark.parametrize("row", fault_table.rows(fault_table.Cluster(2, Path(), "slabs")))
def test_the_fault_happened_and_the_bits_are_the_same(results, undisturbed, row):
    result = results[row]
    assert result["struck"] == result["expected"]
    assert {name: result.get(name, result.get("error")) for name in undisturbed} == undisturbed
    assert all(files > 0 for files in result["deleted"])
    assert not any(map(processes.alive, result["killed executors"]))


def test_a_twin_ran_while_the_straggler_slept(results):
    result = results["straggler"]
    assert result["passed"] != [[]]
    assert result["seconds"] < fault_table.STRAGGLER_SECONDS


def test_a_lost_host_is_not_replaced(results, shape):
    assert results["executors left"] == shape.executors - 1
