"""Fixtures of the whole suite."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import fork_server
import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--secured",
        action="store_true",
        help="with Spark's authentication and encryption in every session",
    )


def pytest_configure(config: pytest.Config) -> None:
    # All at once want two cores: two threads that share a few numbers would wait for each other.
    os.environ["OMP_NUM_THREADS"] = "1"
    if not hasattr(config, "workerinput"):
        fork_server.begin()  # one for all processes of this run
    if config.getoption("dist", "no") == "no":  # else others run the tests
        _set_up(config)


def _set_up(config: pytest.Config) -> None:
    import hypothesis
    import secured
    import torch
    from hosted import RUN
    from launch import NO_CONFIGURATION, SHORT_LIVES

    os.environ[RUN] = str(os.getpid())
    torch.set_num_threads(1)
    os.environ["SPARK_SUBMIT_OPTS"] = SHORT_LIVES  # of every session's JVM, whoever starts it
    # No test is timed, and each run has other examples.
    hypothesis.settings.register_profile("suite", deadline=None, max_examples=50)
    hypothesis.settings.load_profile("suite")
    if config.getoption("--secured"):
        folder = Path(tempfile.mkdtemp())
        config.add_cleanup(functools.partial(shutil.rmtree, folder))
        secured.turn_on(folder)
    else:
        os.environ["SPARK_CONF_DIR"] = NO_CONFIGURATION


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m gpu`` only files that have such tests are read: a machine with a GPU may have little of
    what others import."""
    if config.option.markexpr == "gpu" and collection_path.name.startswith("test_"):
        return "mark.gpu" not in collection_path.read_text() or None
    return None


@pytest.fixture(scope="session")
def spark(request: pytest.FixtureRequest) -> Iterator[SparkSession]:
    """One quiet local[2] session for the whole run."""
    import secured

    import sparkdl
    from sparkdl.spark import executors

    os.environ["PYSPARK_PYTHON"] = fork_server.start()
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
    if request.config.getoption("--secured"):
        conf = session.sparkContext.getConf()
        assert {key: conf.get(key) for key in secured.SETTINGS} == secured.SETTINGS
    executors._begun.add(session.sparkContext)  # a job of the first fit that tests would count
    yield session
    session.stop()


@pytest.fixture(scope="module", autouse=True)
def nothing_persisted() -> Iterator[None]:
    """Fail the file whose tests leave a persisted RDD in a session, and unpersist it for the others."""
    from pyspark import SparkContext

    yield
    context = SparkContext._active_spark_context
    if context is not None:
        left = dict(context._jsc.getPersistentRDDs())
        names = [rdd.toString() for rdd in left.values()]
        for rdd in left.values():
            rdd.unpersist()
        assert not names
