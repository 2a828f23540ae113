"""A fit has Spark wait for the places of its tasks, and leaves the session as it was."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from sparkdl.spark.executors import WAIT, executor_awaited, waiting_for_locality

pytestmark = pytest.mark.spark


@pytest.fixture
def cluster(spark):
    """A context as of a cluster, with a SparkConf of its own."""
    conf = spark.sparkContext._jvm.org.apache.spark.SparkConf(False)
    sc = SimpleNamespace(isLocal=lambda: False, conf=lambda: conf)
    return SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: sc)), conf


@pytest.mark.parametrize(
    ("given", "inside"), [("0s", "3s"), ("0", "3s"), ("500ms", "3s"), ("3s", "3s"), ("10s", "10s")]
)
def test_waits_three_seconds_at_least(cluster, given, inside):
    context, conf = cluster
    conf.set(WAIT, given)
    with waiting_for_locality(context):
        assert conf.get(WAIT) == inside
    assert conf.get(WAIT) == given


def test_what_is_not_set_is_left_alone(cluster):
    context, conf = cluster
    with waiting_for_locality(context):
        assert not conf.contains(WAIT)
    assert not conf.contains(WAIT)


def test_is_put_back_after_an_error(cluster):
    context, conf = cluster
    conf.set(WAIT, "0s")
    with pytest.raises(RuntimeError), waiting_for_locality(context):
        raise RuntimeError
    assert conf.get(WAIT) == "0s"


@pytest.mark.parametrize("given", [None, "1s"])
def test_a_task_for_one_executor_waits_for_it(cluster, given):
    context, conf = cluster
    key = f"{WAIT}.process"
    if given is not None:
        conf.set(key, given)
    with executor_awaited(context):
        assert conf.get(key) == "60s"
    assert conf.get(key, None) == given


def test_two_fits_at_once_leave_the_session_as_it_was(cluster):
    """The second begins within the first, and ends after it."""
    context, conf = cluster
    conf.set(WAIT, "0s")
    key = f"{WAIT}.process"
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    for fit in (first, second):
        fit.enter_context(waiting_for_locality(context))
        fit.enter_context(executor_awaited(context))
    first.close()
    assert conf.get(WAIT) == "3s"
    assert conf.get(key) == "60s"
    second.close()
    assert conf.get(WAIT) == "0s"
    assert not conf.contains(key)
