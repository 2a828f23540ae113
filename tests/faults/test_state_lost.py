"""Executors are killed and their slabs go with them: the run goes on, with the bits of one unharmed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import lose_executors as script
import pytest
from launch import digest, launch
from pyspark import cloudpickle

import sparkdl

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]
cloudpickle.register_pickle_by_value(sys.modules["lose_executors"])

SNAPSHOTS = [*script.CASES, *(f"{way}: executor in forward-backward" for way in script.WAYS)]
OTHER = "compressed: executor in synchronization"
RESUMED = r".+\. Went on from {} and repeated \d+ iterations?: \d+\.\d s\."
SNAPSHOT = r"the snapshot after iteration \d+"
SOME_POINT = f"({SNAPSHOT}|the beginning)"
"""Before a new executor is there, a snapshot has one copy, which the next loss may take."""


def run(folder: Path, cases: list[str], snapshots: str, checkpoints: bool) -> dict:
    return launch(
        Path(script.__file__),
        folder,
        master="local-cluster[2,1,1024]",
        cases=cases,
        notes=str(folder / "notes"),
        snapshots=snapshots,
        checkpoints=checkpoints,
    )


@pytest.fixture(scope="module")
def undisturbed(spark):
    """What a way of training comes to, in one process."""
    found: dict[str, dict] = {}

    def reference(name: str) -> dict:
        way = name.rpartition(": ")[0]
        if way not in found:
            df = script.frame(spark)
            validation = sparkdl.Validation(df, every=sparkdl.every(4), best="loss")
            changes = {**script.WAYS.get(way, {}), "engine": "local", "validation": validation}
            trained = script.trainer(**changes).fit(df)
            found[way] = {
                "digest": digest(trained.module),
                "best": digest(trained.best.module),
                "losses": trained.history.losses,
                "validations": trained.history.validations,
            }
        return found[way]

    return reference


def check(result: dict, name: str, undisturbed, point: str) -> None:
    losses = script.CASES[name.rpartition(": ")[2]]
    assert result["struck"] == sorted("-".join(map(str, loss)) for loss in losses)
    expected = undisturbed(name)
    assert {key: result[key] for key in expected} == expected
    told = [line for line in result["log"] if "cannot be read" not in line]
    assert told
    assert all(re.fullmatch(RESUMED.format(point), line) for line in told), result["log"]
    assert len(told) == len(result["log"]) or len(losses) > 1, result["log"]
    assert result["persisted"] == 0


@pytest.fixture(scope="module")
def with_snapshots(tmp_path_factory) -> dict:
    return run(tmp_path_factory.mktemp("snapshots"), SNAPSHOTS, "0", checkpoints=False)


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_from_a_snapshot(with_snapshots, undisturbed, name):
    several = len(script.CASES[name.rpartition(": ")[2]]) > 1
    check(with_snapshots[name], name, undisturbed, SOME_POINT if several else SNAPSHOT)


@pytest.mark.parametrize(
    ("checkpoints", "point"),
    [(True, r"the checkpoint after iteration 4"), (False, "the beginning")],
)
def test_without_snapshots(tmp_path, undisturbed, checkpoints, point):
    found = run(tmp_path / "run", [OTHER], "off", checkpoints)
    check(found[OTHER], OTHER, undisturbed, point)
