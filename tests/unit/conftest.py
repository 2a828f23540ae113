"""Fixtures of the tests without a JVM."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sparkdl.slab.root import SlabConfig


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[SlabConfig]:
    """A root of slabs that is not open yet; what the test opens in it goes with it."""
    from sparkdl.data.partition_reader import close_partitions
    from sparkdl.slab.pool import release
    from sparkdl.slab.root import SlabConfig, remove_root

    config = SlabConfig.new(str(tmp_path), "test")
    yield config
    close_partitions()
    release(config.name)
    remove_root(config)


@pytest.fixture
def mlflow_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a store of files, which mlflow-skinny reaches without a database."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    yield tmp_path
    mlflow = sys.modules.get("mlflow")
    while mlflow and mlflow.active_run():
        mlflow.end_run()
