"""Copies of a model that is cut into shards, or stages: the training of one process; others go on."""

from __future__ import annotations

from pathlib import Path

import copies
import pytest
from launch import asked_for, launch, soak_but

pytestmark = [pytest.mark.gang, pytest.mark.spark, pytest.mark.slow]


QUICK = {"shards": ["local", "one copy"], "pipelines": ["one pipeline"], "layers": ["local"]}
"""What is always tried; the others soak."""
GOING_ON = [(name, end) for name, (_, _, ends) in copies.BEGINNINGS.items() for end in ends]


@pytest.fixture(scope="module")
def found(request, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("copies")
    path, master = str(folder / "checkpoints"), f"local[{copies.RANKS}]"
    runs: dict[str, list[str]] = {name: [] for name in asked_for(request, "beginning")}
    for name, end in asked_for(request, "beginning", "end"):
        runs[name].append(end)
    return launch(Path(copies.__file__), folder, master=master, path=path, runs=runs)


@pytest.mark.parametrize("beginning", soak_but(QUICK, copies.BEGINNINGS))
def test_it_is_the_training_of_one_process(found, beginning):
    """With a norm that is clipped, so that each copy's counts once."""
    losses, whole = found[beginning]["begun"]["losses"], found[beginning]["whole"]["losses"]
    assert len(losses) == copies.BEGUN
    assert losses == pytest.approx(whole[: copies.BEGUN], rel=0, abs=1e-5)
    validated = found[beginning]["begun"]["validated"]
    assert len(validated) == 2
    for one, other in zip(validated, found[beginning]["whole"]["validated"], strict=False):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("beginning", "end"),
    soak_but([(name, end) for name, ends in QUICK.items() for end in ends], GOING_ON),
)
def test_others_go_on_from_its_checkpoint(found, beginning, end):
    ended, whole = found[beginning][end], found[beginning]["whole"]
    assert ended["losses"] == pytest.approx(whole["losses"], rel=0, abs=1e-5)
    assert ended["weights"] == pytest.approx(whole["weights"], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("beginning", soak_but(QUICK, copies.SHARED))
def test_copies_that_share_the_update_do_half_of_it_each(found, beginning):
    """What both ranks of a model-parallel group have, they both update."""
    made, _, _ = copies.BEGINNINGS[beginning]
    sizes = {name: p.numel() for name, p in made().named_parameters()}
    of_all = sum(sizes.values())
    if "layers" in beginning:
        of_all += sum(n for name, n in sizes.items() if name == "2.bias" or name[0] > "2")
    assert sum(found[beginning]["updated"]) == of_all
