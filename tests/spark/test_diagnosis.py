"""What sparkdl says of a session: the engines that train in it, and those that do not."""

from __future__ import annotations

import pytest
from pyspark import SparkConf

import sparkdl
from sparkdl import __main__

pytestmark = pytest.mark.spark


def test_each_engine_trains_and_nothing_changes(spark, caplog):
    before = spark.conf.get("spark.sparkdl.progress", None)
    found = sparkdl.diagnose(spark)
    assert found.reasons == {}
    assert all(0 < found.milliseconds[engine] < 10_000 for engine in ("local", "shuffle", "gang"))
    facts = dict(found.facts)
    assert "2 tasks at once" in facts["session"]
    assert any("GB free in /dev/shm" in text for text in facts.values())
    assert "gang" in str(found)
    assert spark.conf.get("spark.sparkdl.progress", None) == before
    assert not caplog.records


def test_engines_that_cannot_train_say_why(spark, monkeypatch, capsys):
    monkeypatch.setattr(spark, "stop", lambda: None)
    conf = SparkConf(loadDefaults=False).setAll(spark.sparkContext._conf.getAll())
    conf.set("spark.dynamicAllocation.enabled", "true")
    with monkeypatch.context() as patch:
        patch.setattr(spark.sparkContext, "_conf", conf)
        __main__.main(["session"])
    printed = capsys.readouterr().out
    assert "not here: a gang needs all of its ranks at once" in printed
    assert "ms, Spark jobs" in printed
