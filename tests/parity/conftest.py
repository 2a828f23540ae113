"""Fixtures of the parity tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from parity_reference import Datasets
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def datasets(spark: SparkSession) -> Iterator[Datasets]:
    """DataFrames with chosen partitions, each made once a module: the slabs go with it."""
    from parity_reference import Datasets

    made = Datasets(spark)
    yield made
    made.close()
