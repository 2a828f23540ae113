"""Settings: every key in one place, and conf/ in step with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from mistakes import message_of

import sparkdl
from sparkdl.errors import ParameterError, SessionError
from sparkdl.session import _MASTER
from sparkdl.settings import (
    NEEDED_FOR_SPEED,
    PREFIX,
    SETTINGS,
    SPARK_SETTINGS,
    Setting,
    Settings,
)

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
