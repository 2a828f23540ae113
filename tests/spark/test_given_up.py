"""Tasks that have failed, while a Python process of theirs goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fail_early
import pyarrow as pa
import pytest
from launch import launch
from pyspark import cloudpickle
from pyspark.errors import PythonException

from sparkdl.data.partition_writer import PartitionWriter
from sparkdl.engines.resources import FitResources
from sparkdl.engines.shuffle import state_reads
from sparkdl.errors import TrainingError
from sparkdl.slab.root import SlabConfig, open_root, remove_root
from sparkdl.spark.frames import map_frames

pytestmark = pytest.mark.spark
cloudpickle.register_pickle_by_value(sys.modules[__name__])

WAIT_SECONDS = 20.0


def wait_for(path: Path) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while not path.exists():
        assert time.monotonic() < until, f"waited for {path}"
        time.sleep(0.01)


def fail(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    raise ValueError("the mistake of a user")
    yield


def write_late(
    folder: Path, config: SlabConfig, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """As a process that was slow to begin: it opens the root when the job has failed and ended."""
    wait_for(folder / "over")
    try:
        PartitionWriter(config)
    finally:
        end = "given up" if isinstance(sys.exc_info()[1], BrokenPipeError) else "wrote"
        (folder / end).touch()
    yield from batches


@pytest.mark.parametrize("there", [False, True], ids=["no root", "a root that others use"])
def test_it_makes_no_slab_root(spark: Any, tmp_path: Path, slabs: Any, there: bool) -> None:
    context = spark.sparkContext
    config = SlabConfig.new("auto", context.applicationId)
    if there:
        assert open_root(config, create=True) is not None
    held = slabs()
    query = spark.range(0, 1, 1, 1).mapInArrow(fail, "id long")  # one task, which has ended then
    with pytest.raises(PythonException, match="the mistake of a user"):
        query.mapInArrow(partial(write_late, tmp_path, config), "id long").collect()
    (tmp_path / "over").touch()
    wait_for(tmp_path / ("wrote" if there else "given up"))
    assert slabs() == held
    assert len(held) == there
    remove_root(config)


def kept(partition: int, frames: Iterator[bytes]) -> Iterator[bytes]:
    yield from frames


def lost(partition: int, frames: Iterator[bytes]) -> Iterator[bytes]:
    raise ValueError("no space left")


def test_nothing_is_left_of_a_snapshot_whose_other_half_fails(spark: Any, monkeypatch: Any) -> None:
    """It is taken again and again, and the disks are full, say."""
    context = spark.sparkContext
    owners = context.parallelize([b"state"], 1)
    places = SimpleNamespace(
        slice_rdd=owners, tasks_without_weights=lambda task: map_frames(owners, lost)
    )
    monkeypatch.setattr(state_reads, "TakeSnapshot", lambda *state: kept)
    monkeypatch.setattr(state_reads, "TakeResidual", lambda *state: SimpleNamespace(count=1))
    before = context._jsc.getPersistentRDDs().size()
    with FitResources(context, SlabConfig.new("auto", context.applicationId)) as resources:
        reader = state_reads.StateReader(places, resources)  # type: ignore[arg-type]
        with pytest.raises(TrainingError, match="no space left"):
            reader.take_snapshot((), (), (object(),))  # type: ignore[arg-type]
        assert context._jsc.getPersistentRDDs().size() == before


@pytest.mark.soak
def test_a_fit_that_failed_awaits_tasks_that_the_tracker_does_not_know(tmp_path: Path) -> None:
    found = launch(Path(fail_early.__file__), tmp_path)
    assert "ValueError: the mistake of a user" in found["error"]
    assert found["slabs"] == []
