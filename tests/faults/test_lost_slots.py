"""A gang whose executor is lost for good goes on with fewer task slots where it may: same bits."""

from __future__ import annotations

import re
from pathlib import Path

import lose_slots as script
import pytest
from harness.cluster import PATIENT, local_cluster
from launch import launch

pytestmark = [
    pytest.mark.faults,
    pytest.mark.gang,
    pytest.mark.spark,
    pytest.mark.soak,
    pytest.mark.timeout(600),
]
WAYS = {
    "slabs that executors share": (local_cluster(2, 2), 4, script.SHARED),
    "slabs apart": (local_cluster(3, 1), 3, "slabs"),
}


def lose(folder: Path, way: str, fits: dict, **settings: str) -> dict:
    master, replicas, slabs = WAYS[way]
    if slabs == script.SHARED:
        (folder / slabs).mkdir()
        slabs = str(folder / slabs)
    return launch(
        Path(script.__file__),
        folder,
        master=master,
        replicas=replicas,
        fits=fits,
        settings={**PATIENT, "spark.sparkdl.slab.dir": slabs, **settings},
    )


@pytest.mark.parametrize(("way", "strategy"), [*zip(WAYS, ["ddp", "zero1"], strict=True)])
def test_it_goes_on_with_fewer_slots(tmp_path, way, strategy):
    """Also where an executor is killed, in the next fit, while its tasks host several ranks."""
    fewer = {"strategy": strategy, "min_ranks": 2}
    fits = {"undisturbed": {"strategy": strategy}, "lost": fewer, "killed": fewer}
    settings = {"spark.sparkdl.snapshot.seconds": "0", "spark.sparkdl.timeout.seconds": "120"}
    results = lose(tmp_path, way, fits, **settings)
    undisturbed = results.pop("undisturbed")
    said = f"2 task slots now do the work of {WAYS[way][1]} ranks."
    for result in results.values():
        assert "error" not in result, result
        assert result["digest"] == undisturbed["digest"]
        assert result["losses"] == undisturbed["losses"]
        (line,) = [line for line in result["log"] if "Continued from" in line]
        assert line.endswith(f" s. {said}")
        assert result["left"] == []
    assert results["killed"]["log"][0] == said  # before anything is lost


def test_without_leave_to_do_so_it_is_an_error(tmp_path):
    bound = {"spark.sparkdl.timeout.seconds": "20"}
    lost = lose(tmp_path, "slabs that executors share", {"lost": {}}, **bound)["lost"]
    assert re.fullmatch(
        r"StalledError: executors were lost, and none came in their place within \d+ s: the gang needs "
        r"4 task slots at once, and this session has 2\. Fit again where there are as many, with "
        r"resume= from a checkpoint; or let fewer task slots do the work: min_ranks says how few\.",
        lost["error"],
    ), lost
    (seconds,) = lost["seconds"]
    assert seconds < 20 + 25
    assert lost["left"] == []
