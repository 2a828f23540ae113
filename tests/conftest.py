"""Fixtures of the whole suite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One quiet local[2] session for the whole run."""
    import sparkdl

    session = sparkdl.session(
        "local[2]",
        **{
            "spark.app.name": "sparkdl tests",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.shuffle.partitions": "2",
            "spark.sparkdl.progress": "false",
        },
    )
    yield session
    session.stop()
