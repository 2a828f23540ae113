"""No room is left, for slabs or for checkpoints: a clear error, and the last checkpoint is whole."""

from __future__ import annotations

import subprocess
from pathlib import Path

import fill_the_disk
import pytest
from harness.faulty import frame, outcome, trainer
from launch import launch

pytestmark = [
    pytest.mark.faults,
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.soak,
    pytest.mark.timeout(300),
]
MOUNT = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=8m tmpfs "$0" && exec "$@"']
"""In front of a command: it sees a small file system in the folder that is named next."""


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("full")
    small = folder / "small"
    small.mkdir()
    prefix = [*MOUNT, str(small)]
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no file system can be mounted here: {tried.stderr.strip()}")
    return launch(
        Path(fill_the_disk.__file__),
        folder,
        host=(prefix, "127.0.0.1"),
        small=str(small),
        runs=str(folder / "run"),
    )


@pytest.fixture(scope="module")
def undisturbed(spark) -> dict:
    return outcome(trainer(2, iterations=16, engine="local").fit(frame(spark, 2)))


def test_without_room_for_slabs(results):
    result = results["slabs"]
    assert result["struck"] == 1
    first, *_ = result["error"].splitlines()
    assert first.startswith("TrainingError: iteration 9, epoch 3: partition ")
    assert "failed 2 times. sparkdl.errors.SlabFullError: there is no room for a slab of " in first
    assert first.endswith("or point spark.sparkdl.slab.dir at a larger directory.")


def test_without_room_for_a_checkpoint(results):
    result = results["checkpoints"]
    assert result["struck"] == 1
    assert result["error"].startswith("CheckpointError: ")
    assert "No space left on device" in result["error"]


@pytest.mark.parametrize("where", ["slabs", "checkpoints"])
def test_with_room_again_the_run_goes_on_from_its_last_checkpoint(results, undisturbed, where):
    result = results[where]
    assert {"iteration-0000000004", "iteration-0000000008"} <= {n[:20] for n in result["left"]}
    assert {name: result[name] for name in undisturbed} == undisturbed
