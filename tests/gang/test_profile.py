"""What a task takes of an executor: GPUs; and cores of a resource profile, which local mode has not."""

from __future__ import annotations

from pathlib import Path

import gpus
import pytest
from gang_training import trainer_of
from launch import launch
from mistakes import message_of
from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

import sparkdl
from sparkdl import ParameterError, SessionError

pytestmark = [pytest.mark.gang, pytest.mark.spark]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.soak
@pytest.mark.parametrize("parallelism", [None, 1, 2000])
def test_by_default_there_are_as_many_ranks_as_gpus(tmp_path, parallelism):
    """And not as cores, or as a cluster sets for queries: what waits makes iterations longer."""
    settings = {} if parallelism is None else {"spark.default.parallelism": str(parallelism)}
    found = launch(Path(gpus.__file__), tmp_path, settings=settings)
    assert found["cores"] == (parallelism or 4)
    for told in found["told"].values():  # before the data are read: never silently on the CPU
        assert told.startswith(
            "SessionError: Spark assigned the GPU 'GPU-1f2e3d4c' to this task, but torch sees "
            "none: "
        )
    assert len(found["places"]) == len(set(found["places"])) == 2
    partitions = 1 if parallelism == 1 else 2
    assert found["replicas"] == {"shuffle": partitions, "gang": 2, "local": partitions}
    assert found["logged"] == (parallelism == 2000)


def test_there_are_none_in_local_mode(spark):
    two = ResourceProfileBuilder().require(TaskResourceRequests().cpus(2)).build
    assert message_of(SessionError, sparkdl.gang.run, print, ranks=1, resource_profile=two) == (
        "resource_profile needs a cluster: Spark has no resource profiles in local mode. Leave it out "
        "here."
    )
    with pytest.raises(ParameterError, match="resource_profile is a str: give a pyspark"):
        trainer_of(resource_profile="two cores")
