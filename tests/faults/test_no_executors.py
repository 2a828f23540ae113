"""No executor is there, or none any more: the fit ends in time, and says so."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import wait_in_vain as script
from harness.cluster import PATIENT, Standalone
from harness.processes import wait_until
from launch import launch

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.soak, pytest.mark.timeout(400)]
DOING = {"none from the beginning": "reading the data", "all lost": "iteration 3, epoch 1"}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    """A master without any worker; one comes when a fit has ended, and is lost for good."""
    folder = tmp_path_factory.mktemp("vain")
    told = folder / "told"
    with Standalone(0, 2, folder / "cluster") as cluster, ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            launch,
            Path(script.__file__),
            folder,
            seconds=300,
            master=cluster.url,
            told=str(told),
            notes=str(folder / "notes"),
            settings={**PATIENT, "spark.sparkdl.slab.dir": "slabs"},
        )
        wait_until(lambda: told.exists() or running.done(), 120, "the first fit ends")
        if not running.done():
            cluster.add_worker()
        return running.result()


@pytest.mark.parametrize("name", script.BOUNDS)
def test_the_fit_ends_and_says_that_no_executor_is_there(results, name):
    bound = script.BOUNDS[name]
    assert results[name]["error"] == (
        f"StalledError: {DOING[name]}: sparkdl waited {bound} s for an executor: there is none, so "
        "no task can run. Nothing happened in that time. If the cluster really takes that long, "
        "raise spark.sparkdl.timeout.seconds."
    )
    assert bound <= results[name]["seconds"] < bound + 60
    assert results["struck"] == 1
