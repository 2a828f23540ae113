"""What a task takes of an executor: cores of a resource profile, and GPUs."""

from __future__ import annotations

from pathlib import Path

import gpus
import profiles
import pytest
from gang_training import trainer_of
from launch import launch
from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

import sparkdl
from sparkdl import ParameterError, SessionError

pytestmark = [pytest.mark.gang, pytest.mark.spark]
TOO_MANY = (
    "ParameterError: a gang of 3 ranks needs 3 task slots at once, and this session has 2: ask for at "
    "most 2 ranks, or for more executors or cores."
)
ASKS = (
    "ParameterError: resource_profile asks for executors (cores), which Spark starts with dynamic "
    "allocation only, and a gang does not go with that: leave cores out."
)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("profiles")
    (folder / "threads").mkdir()
    path, script = str(folder / "threads"), Path(profiles.__file__)
    result = launch(script, folder, master="local-cluster[2,2,1024]", notes=path)
    notes = [int(note.read_text()) for note in (folder / "threads").iterdir()]
    return {**result, "threads": notes}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_rank_has_two_cores(found):
    """So that two of them cannot be on one executor of two."""
    assert found["executors"] == 2
    assert found["too many"] == TOO_MANY
    assert found["asks"] == ASKS


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_trainers_gang_has_them_too(found):
    assert found["losses"] == pytest.approx(found["expected"], rel=1e-6)
    assert found["threads"].count(2) >= 2  # the ranks; the driver's own passes have one


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
    with pytest.raises(SessionError) as caught:
        sparkdl.gang.run(print, ranks=1, resource_profile=two)
    assert str(caught.value) == (
        "resource_profile needs a cluster: Spark has no resource profiles in local mode. Leave it out "
        "here."
    )
    with pytest.raises(ParameterError, match="resource_profile is a str: give a pyspark"):
        trainer_of(resource_profile="two cores")
