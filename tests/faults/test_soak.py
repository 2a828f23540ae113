"""Short forms of the soak: random faults for some minutes, the bits of runs that have none."""

from __future__ import annotations

from pathlib import Path

import pytest
import soak
from harness.faulty import frame, outcome, trainer
from launch import launch

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.soak, pytest.mark.timeout(900)]
ITERATIONS = 100
SEED = 22
"""Each kind of fault is among its first three, of which none waits for an executor to come back."""


def test_random_faults_change_no_bit_and_leave_nothing(spark, tmp_path):
    found = launch(
        Path(soak.__file__),
        tmp_path / "run",
        seconds=850,
        alone=False,
        master="local-cluster[2,1,1024]",
        iterations=ITERATIONS,
        every=0.0,
        seed=SEED,
    )
    expected = outcome(trainer(2, iterations=ITERATIONS, engine="local").fit(frame(spark, 2)))
    assert {name: found[name] for name in expected} == expected
    assert set(found["strikes"]) == {"worker", "executor", "slabs"}
    assert found["recoveries"]
    assert found["left"] == {"slabs": [], "persisted": 0, "processes": []}
    python, _ = found["driver MB"]
    assert python[1] < python[0] + 50


@pytest.mark.parametrize(
    ("count", "only"),
    [
        (8, r"^(shuffle|gang, zero1|gang, tensor) on local: (slabs|checkpoint|driver|daemon)"),
        # what replicas keep is restored where they are, not where the snapshot has it
        (4, r"^shuffle, PowerSGD on cluster: (executor|two executors)"),
    ],
    ids=["local", "what replicas keep"],
)
def test_nor_do_faults_of_one_kind_in_short_fits(tmp_path, count, only):
    """Of some configurations and kinds; the script has all."""
    found = soak.soak_fits(count, SEED, only, tmp_path / "soak.jsonl")
    assert {line["outcome"] for line in found} == {"same"}, soak.table(found)
    assert all(line["faults"] for line in found), soak.table(found)
