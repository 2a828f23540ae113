"""Settings: every key in one place, and conf/ in step with it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from mistakes import message_of
from pyspark import SparkContext

import sparkdl
from sparkdl import archive
from sparkdl.errors import ParameterError, SessionError
from sparkdl.session import _MASTER
from sparkdl.settings import NEEDED_FOR_SPEED, PREFIX, SETTINGS, SPARK_SETTINGS, Setting, Settings

CONF = Path(__file__).resolve().parents[3] / "conf" / "spark-defaults.conf"


def read(given: dict[str, str]) -> Settings:
    return Settings.read(lambda key, default: given.get(key, default), list(given))


def mistake(given: dict[str, str]) -> str:
    with pytest.raises(ParameterError) as caught:
        read(given)
    return str(caught.value)


def test_defaults_and_values_that_are_set() -> None:
    assert read({}) == Settings(slab_dir="auto", progress="auto")
    given = {"spark.sparkdl.slab.dir": "/fast", "spark.sparkdl.progress": "false"}
    assert read(given) == Settings(slab_dir="/fast", progress="false")


def test_every_setting_is_read() -> None:
    """A key that is documented but read by nobody would be worse than none."""
    defaults = read({})
    for key, setting in SETTINGS.items():
        other = setting.choices[-1] if setting.choices else "something else"
        other = "17.5" if key.endswith(".seconds") else other
        assert other != setting.default
        assert read({key: other}) != defaults, key


@pytest.mark.parametrize("key", SETTINGS)
def test_a_setting_is_documented_and_its_default_allowed(key: str) -> None:
    setting: Setting = SETTINGS[key]
    assert key.startswith(PREFIX)
    assert setting.doc.endswith(".")
    assert not setting.choices or setting.default in setting.choices


def test_a_key_like_no_other() -> None:
    assert mistake({"xyzzy": "1"}) == (
        'unknown setting "xyzzy". '
        "Known: spark.sparkdl.slab.dir, spark.sparkdl.stages, spark.sparkdl.snapshot.seconds, "
        "spark.sparkdl.timeout.seconds, spark.sparkdl.client.seconds, spark.sparkdl.progress, "
        "spark.sparkdl.care, spark.sparkdl.plan.cache."
    )


def test_durations() -> None:
    both = ("spark.sparkdl.snapshot.seconds", "spark.sparkdl.timeout.seconds")
    assert read(dict.fromkeys(both, "off")) == Settings(snapshot_seconds=None, timeout=None)
    assert read(dict.fromkeys(both, "0.5")) == Settings(snapshot_seconds=0.5, timeout=0.5)
    for value in ("often", "-1", "nan", "inf", ""):
        assert mistake({both[0]: value}) == (
            f'{both[0]} = "{value}": give a number of seconds, such as 30, or off.'
        )
    assert read({both[0]: "0"}).snapshot_seconds == 0
    assert mistake({both[1]: "0"}) == (
        f'{both[1]} = "0": give a number of seconds above 0, such as 1800, or off.'
    )
    client = "spark.sparkdl.client.seconds"  # off by default
    assert read({client: "90"}).client_seconds == 90
    assert mistake({client: "long"}) == (
        f'{client} = "long": give a number of seconds above 0, such as 60, or off.'
    )


def test_all_mistakes_are_told_at_once() -> None:
    assert mistake({"spark.sparkdl.progress": "yes", "spark.sparkdl.slabdir": "/x"}) == (
        "2 problems:\n"
        '  - unknown setting "spark.sparkdl.slabdir". Did you mean "spark.sparkdl.slab.dir"? '
        "Known: spark.sparkdl.slab.dir, spark.sparkdl.stages, spark.sparkdl.snapshot.seconds, "
        "spark.sparkdl.timeout.seconds, spark.sparkdl.client.seconds, spark.sparkdl.progress, "
        "spark.sparkdl.care, spark.sparkdl.plan.cache.\n"
        '  - spark.sparkdl.progress = "yes": use one of auto, true, false.'
    )


def test_spark_defaults_are_those_of_the_session() -> None:
    """`spark-submit` reads the file, `sparkdl.session()` the table."""
    lines = [line.split("#")[0].split() for line in CONF.read_text().splitlines()]
    in_file = {line[0]: line[1] for line in lines if line}
    assert in_file == {key: value for key, (value, _) in SPARK_SETTINGS.items()}


def test_what_speed_needs_is_set() -> None:
    assert set(NEEDED_FOR_SPEED) <= SPARK_SETTINGS.keys()
    assert all(reason for _, reason in SPARK_SETTINGS.values())


@pytest.mark.parametrize(
    "master",
    ["local", "local[2]", "local[*]", "local[2,3]", "local[*, 3]", "local-cluster[2,1,1024]",
     "local-cluster[ 2 , 1 , 1024 ]", "yarn", "spark://one:7077,two:7077",
     "k8s://https://host:443", "k8s-of-ours://x"],
)  # fmt: skip
def test_masters_that_spark_knows_are_left_to_it(master: str) -> None:
    assert _MASTER.fullmatch(master)


def test_a_server_of_spark_connect_is_no_master(monkeypatch: pytest.MonkeyPatch) -> None:
    """PySpark takes SPARK_REMOTE for every builder without saying so."""
    told = message_of(SessionError, sparkdl.session, "sc://host:15002")
    assert 'use SparkSession.builder.remote("sc://host:15002").getOrCreate()' in told
    monkeypatch.setenv("SPARK_REMOTE", "sc://host:15002")
    told = message_of(SessionError, sparkdl.session, "local[2]")
    assert told.startswith("this process uses Spark Connect, and sparkdl.session makes classic")


@pytest.mark.parametrize(
    "master",
    ["", "locl[2]", "local[]", "local[0]", "local[-1]", "local[two]", "local(2)", "local[2",
     "local-cluster[2,1]", "Local[2]", "host:7077", "spark://", "yarn-client"],
)  # fmt: skip
def test_what_is_no_master_starts_no_jvm(master: str) -> None:
    assert message_of(SessionError, sparkdl.session, master) == (
        f"master={master!r} is not a Spark master. Give local, local[2] or local[*], yarn, or a "
        "cluster's URL, such as spark://host:7077 or k8s://https://host:443."
    )


@pytest.mark.parametrize(
    ("java", "said"),
    [
        (None, "there is no Java at {java}: install Java 17 or newer, on PATH or in JAVA_HOME."),
        ("#!/bin/sh\nexit 1\n", "The Java is {java}, and Spark 4 needs 17 or newer."),
    ],
)
def test_a_jvm_that_does_not_start_is_told(
    java: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "java"
    program.parent.mkdir()
    if java is not None:
        program.write_text(java, encoding="utf-8")
        program.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setattr(SparkContext, "_gateway", None)
    told = message_of(SessionError, sparkdl.session, "local[1]")
    assert told.endswith(said.format(java=program))


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return the environment that a JVM would be started in, if there is an archive of classes."""
    names = "SPARK_CONF_DIR", "SPARK_SUBMIT_OPTS", "PYSPARK_SUBMIT_ARGS"
    for name in (*names, archive.SWITCH, "PYSPARK_GATEWAY_PORT"):
        monkeypatch.delenv(name, raising=False)
    spark = tmp_path / "spark"
    (spark / "jars").mkdir(parents=True)
    (spark / "jars" / "a.jar").write_text("a", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(archive, "spark_home", lambda: spark)
    path = archive.archive_path(spark)
    assert path is not None
    path.parent.mkdir()
    path.write_text("classes", encoding="utf-8")

    def start(files: dict[str, str], master: str | None = None) -> list[str]:
        (spark / "conf").mkdir(exist_ok=True)
        for name, text in files.items():
            (spark / "conf" / name).write_text(text, encoding="utf-8")
        before = dict(os.environ)
        with archive.used(master):
            found = [os.environ.get(name, "") for name in names]
        assert dict(os.environ) == before
        return [text.replace(str(path), "ARCHIVE").replace(str(spark), "SPARK") for text in found]

    return start


def test_a_jvm_gets_the_archive_of_classes(started: Callable[..., list[str]]) -> None:
    """Without the configuration directory, whose files it gets by name."""
    files = {"spark-defaults.conf": "spark.master local[3]", "log4j2.properties": ""}
    folder, options, arguments = started({**files, "spark-env.sh.template": ""})
    assert not Path(folder).exists()
    assert options.split() == [
        "-XX:SharedArchiveFile=ARCHIVE",
        *("-Xlog:cds=off", "-Xlog:cds+dynamic=off"),
        "-Dlog4j2.configurationFile=file://SPARK/conf/log4j2.properties",
    ]
    assert arguments == "--properties-file SPARK/conf/spark-defaults.conf pyspark-shell"


@pytest.mark.parametrize(
    ("files", "master", "variables"),
    [
        ({"hive-site.xml": ""}, None, {}),
        ({}, "yarn", {}),
        ({"spark-defaults.conf": "spark.master=k8s://https://host"}, None, {}),
        ({}, None, {archive.SWITCH: "off"}),
        ({}, None, {"PYSPARK_SUBMIT_ARGS": "--packages a:b:1 pyspark-shell"}),
        ({}, None, {"SPARK_SUBMIT_OPTS": "-XX:SharedArchiveFile=mine"}),
    ],
)
def test_a_jvm_that_starts_otherwise_gets_no_archive(
    files: dict[str, str],
    master: str | None,
    variables: dict[str, str],
    started: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert "ARCHIVE" not in started(files, master)[1]


def test_another_jar_is_another_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "jars").mkdir()
    found = []
    for text in ("a", "ab", "abc"):
        (tmp_path / "jars" / "a.jar").write_text(text, encoding="utf-8")
        found.append(archive.archive_path(tmp_path))
    assert len(set(found)) == 3
    assert archive.found(tmp_path) is None
