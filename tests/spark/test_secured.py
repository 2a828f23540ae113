"""Under Spark's authentication and encryption: the same bits, and nothing of Python's listens."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from pathlib import Path

import listening
import pytest
import secured
import train_between_nodes
import train_secured as script
from launch import launch
from pyspark import cloudpickle

pytestmark = [pytest.mark.spark, pytest.mark.slow]
cloudpickle.register_pickle_by_value(sys.modules["train_between_nodes"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("secured")


@pytest.fixture(scope="module")
def found(folder) -> dict:
    """Two nodes that send each other bytes, with everything turned on."""
    checkpoints = str(folder / "checkpoints")
    return launch(Path(script.__file__), folder, settings=secured.SETTINGS, checkpoints=checkpoints)


def test_the_bits_are_those_of_one_process(spark, found):
    assert found["settings"] == secured.SETTINGS
    assert found["sent"] == ["bytes"]
    df = train_between_nodes.frame(spark)
    expected = script.outcome(script.trainer(df, engine="local").fit(df), df)
    assert {key: found[key] for key in expected} == expected


def test_its_checkpoint_goes_on(spark, found, folder):
    df = train_between_nodes.frame(spark)
    kept = sorted((folder / "checkpoints").iterdir())
    assert len(kept) == 3  # with that of the end
    resumed = script.trainer(df, engine="local").fit(df, resume=kept[0])
    assert script.outcome(resumed, df)["digest"] == found["digest"]
    assert found["slabs"] == []


def test_no_python_process_listens_on_a_port(found):
    """The JVMs' ports are Spark's own, Py4J's among them. PySpark's accumulators and its daemons
    listen on Unix sockets, since ``spark.python.unix.domain.socket.enabled`` is set."""
    assert found["looks"] > 10
    assert found["roles"] == ["daemon", "driver", "worker"]
    assert found["ports"] == []


def test_unix_sockets_are_for_this_user_alone(found):
    sockets = {}
    for role, own, directory in found["sockets"]:
        sockets.setdefault(role, []).append((own, directory))
    assert sockets.keys() >= {"daemon", "driver"}
    assert {directory for _, directory in sockets["daemon"]} == {0o700}
    # That of the accumulators is PySpark's, in a directory of all users: its mode protects it.
    assert all(own & 0o022 == 0 for own, _ in sockets["driver"])


@pytest.mark.parametrize("kind", ["tcp", "tcp6", "udp", "udp6"])
def test_what_listens_would_be_seen(kind):
    family = socket.AF_INET6 if kind.endswith("6") else socket.AF_INET
    how = socket.SOCK_STREAM if kind.startswith("tcp") else socket.SOCK_DGRAM
    with contextlib.closing(socket.socket(family, how)) as opened:
        opened.bind(("::1" if kind.endswith("6") else "127.0.0.1", 0))
        if how == socket.SOCK_STREAM:
            opened.listen()
        with listening.watching(0.01) as found:
            time.sleep(0.3)
    assert any(port.startswith(f"driver {kind} ") for port in found.ports)
