"""Hybrid sharding, copies of a model that is cut: the training of one process; others go on."""

from __future__ import annotations

from pathlib import Path

import copies
import pytest
from launch import launch

pytestmark = [pytest.mark.gang, pytest.mark.spark, pytest.mark.slow]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("copies")
    path, master = str(folder / "checkpoints"), f"local[{copies.RANKS}]"
    return launch(Path(copies.__file__), folder, master=master, path=path)


def test_it_is_the_training_of_one_process(found):
    """With a norm that is clipped, so that each copy's counts once."""
    losses = found["begun"]["losses"]
    assert len(losses) == copies.BEGUN
    assert losses == pytest.approx(found["whole"]["losses"][: copies.BEGUN], rel=0, abs=1e-5)


@pytest.mark.parametrize("end", copies.ENDS)
def test_others_go_on_from_its_checkpoint(found, end):
    assert found[end]["losses"] == pytest.approx(found["whole"]["losses"], rel=0, abs=1e-5)
    assert found[end]["weights"] == pytest.approx(found["whole"]["weights"], rel=1e-4, abs=1e-5)
