"""Ranks that have one model together, on two nodes: the training of one process."""

from __future__ import annotations

from pathlib import Path

import on_nodes
import pytest
from launch import launch

pytestmark = [pytest.mark.gang, pytest.mark.spark, pytest.mark.slow]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("on_nodes")
    return launch(Path(on_nodes.__file__), folder, master="local-cluster[2,2,1024]")


def test_there_are_two_nodes(found):
    assert found["nodes"] == 2


@pytest.mark.parametrize("how", on_nodes.HOW)
@pytest.mark.parametrize("way", on_nodes.WAYS)
def test_rows_come_together(found, how, way):
    whole = found[f"{how}, local"]
    assert found[f"{how}, {way}"] == pytest.approx(whole, rel=1e-4, abs=1e-5)


def test_augmenting_matters(found):
    assert found["augmented, local"] != found["read or sent, local"]
