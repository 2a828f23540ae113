"""Three and four ranks on two nodes, in one session: every engine is the training of one process.

Torch sums the gradients of several ranks in an order of its own, so here bits may differ; not where
they travel compressed, and the ranks sum them.
"""

from __future__ import annotations

from pathlib import Path

import contract
import on_nodes
import pytest
from launch import asked_for, launch_together, soak_but

pytestmark = [pytest.mark.gang, pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(1800)]
TOO_MANY = (
    "ParameterError: a gang of 3 ranks needs 3 task slots at once, and this session has 2: ask for at "
    "most 2 ranks, or for more executors or cores."
)
ASKS = (
    "ParameterError: resource_profile asks for executors (cores), which Spark starts with dynamic "
    "allocation only, and a gang does not go with that: leave cores out."
)


@pytest.fixture(scope="module")
def found(request, tmp_path_factory) -> dict:
    """What the modules have found, by name."""
    folder = tmp_path_factory.mktemp("nodes")
    (folder / "threads").mkdir()
    parts = {
        "on_nodes": {"runs": asked_for(request, "how", "way")},
        "profiles": {"notes": str(folder / "threads")},
        "contract": {"runs": asked_for(request, "model", "engine")},
    }
    slabs = {"spark.sparkdl.slab.dir": "slabs"}
    master, path = "local-cluster[2,2,1024]", Path(__file__).parent
    result = launch_together(path, folder, master, parts, seconds=1700, settings=slabs)
    result["threads"] = [int(note.read_text()) for note in (folder / "threads").iterdir()]
    return result


def test_there_are_two_nodes(found):
    assert found["on_nodes"]["nodes"] == 2


# Rows of others


ROWS = [("read or sent", "layers"), ("read or sent", "stages of layers"), ("augmented", "stages")]
"""What is always tried; the others soak."""


@pytest.mark.parametrize(
    ("how", "way"), soak_but(ROWS, [(how, way) for how in on_nodes.HOW for way in on_nodes.WAYS])
)
def test_rows_come_together(found, how, way):
    whole = found["on_nodes"][f"{how}, local"]
    assert found["on_nodes"][f"{how}, {way}"] == pytest.approx(whole, rel=1e-4, abs=1e-5)


def test_augmenting_matters(found):
    assert found["on_nodes"]["augmented, local"] != found["on_nodes"]["read or sent, local"]


# Cores of a resource profile


def test_each_rank_has_two_cores(found):
    """So that two of them cannot be on one executor of two."""
    told = found["profiles"]
    assert told["executors"] == 2
    assert told["too many"] == TOO_MANY
    assert told["asks"] == ASKS
    assert told["losses"] == pytest.approx(told["expected"], rel=1e-6)
    assert found["threads"].count(2) >= 2  # the ranks; the driver's own passes have one


# Every engine


RUNS = [run for run in contract.all_runs() if run[1] != "local"]
QUICK = [
    ("conv", "shuffle"),
    ("conv", "gang, ddp in buckets"),
    ("conv", "gang, zero1"),
    ("chain", "gang, fsdp"),
    ("chain", "gang, pipeline"),
    ("chain", "gang, tensor"),
    ("compressed", "gang, zero1"),
]


@pytest.mark.parametrize(("model", "engine"), soak_but(QUICK, RUNS))
def test_the_loss_curve_is_that_of_one_process(found, model, engine):
    """Within 1e-5, with three replicas."""
    losses, expected = (found["contract"][f"{model}: {name}"] for name in (engine, "local"))
    assert len(expected) == 2 * contract.ROWS / 18
    assert losses == pytest.approx(expected, rel=0, abs=1e-5)
    assert model != "compressed" or losses == expected
    assert len(set(expected)) == len(expected)
