"""Spark's worker daemon with torch imported once, before it forks: workers start in no time."""

import numpy  # noqa: F401
import pyarrow  # noqa: F401
import torch  # noqa: F401
from pyspark.daemon import manager

import sparkdl  # noqa: F401

if __name__ == "__main__":
    manager()
