"""Two executors with slab roots apart, under Spark's authentication and encryption, in one session.

Without a gang bytes are as theory says, the bits are those of one process, and nothing of Python's
listens. With three and four ranks every engine is the training of one process. Torch sums the gradients
of several ranks in an order of its own, so there bits may differ; not where they travel compressed, and
the ranks sum them.
"""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path

import contract
import listening
import on_nodes
import pytest
import secured
import train_between_nodes as script
from launch import asked_for, digest, launch_together, soak_but

import sparkdl
from sparkdl.engines.shuffle.messages import least_bytes

pytestmark = [pytest.mark.gang, pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(1800)]
CASES = ["even", "buffers", "clip_norm", "three replicas", "table"]
PLAIN = ["local steps", "few rows", "clip_norm, one slice", "stale", "asynchronous", "DiLoCo"]
"""Tried only where no nodes sum."""
ROWS = [(case, way) for case in CASES for way in ("summed", "plain")]
ROWS += [(case, "plain") for case in PLAIN]
ALWAYS = [("even", "summed"), ("even", "plain")]
STAGES = {
    "even, plain": 3,
    "even, summed": 4,
    "clip_norm, plain": 4,
    "local steps, plain": 3,
    "clip_norm, one slice, plain": 3,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture(scope="module")
def found(request, folder) -> dict:
    """Return the results of the modules, by name, on two nodes with two task slots each."""
    asked, stages = asked_for(request, "case", "way"), asked_for(request, "staged")
    (folder / "threads").mkdir()
    parts = {
        "train_between_nodes": {
            "rows": [
                row for row in ROWS if row in ALWAYS or row in asked or ", ".join(row) in stages
            ],
            "checkpoints": str(folder / "checkpoints"),
            "more": asked_for(request, "more"),
        },
        "on_nodes": {"runs": asked_for(request, "how", "way")},
        "contract": {"runs": asked_for(request, "model", "engine")},
    }
    if asked_for(request, "cores"):
        parts["profiles"] = {"notes": str(folder / "threads")}
    settings = {"spark.sparkdl.slab.dir": "slabs", **secured.SETTINGS}
    master, path = "local-cluster[2,2,1024]", Path(__file__).parent
    result = launch_together(path, folder, master, parts, seconds=1700, settings=settings)
    result["threads"] = [int(note.read_text()) for note in (folder / "threads").iterdir()]
    return result


@pytest.fixture(scope="module")
def results(found) -> dict:
    """Nodes sum, and they do not."""
    return found["train_between_nodes"]


@pytest.mark.parametrize(("case", "way"), soak_but(ALWAYS, ROWS))
def test_the_bits_are_those_of_one_process(spark, results, case, way):
    df = script.frame(spark)
    validation = sparkdl.Validation(df, every=sparkdl.every(3))
    trained = script.trainer(case, engine="local", validation=validation).fit(df)
    found = results[f"{case}, {way}"]
    assert found["digest"] == digest(trained.module)
    assert found["losses"] == trained.history.losses
    assert found["validations"] == trained.history.validations
    assert {record["bytes_sent"] for record in trained.history} == {0}


@pytest.mark.parametrize(
    ("case", "way", "nodes"),
    soak_but(
        [("even", "summed", (0, 0, 1, 1))],
        [("even", "summed", (0, 0, 1, 1)), ("three replicas", "summed", (0, 0, 1))],
    ),
)
def test_replicas_side_by_side_share_a_node(results, case, way, nodes):
    assert tuple(results[f"{case}, {way}"]["nodes"]) == nodes


def test_where_nodes_sum_they_send_the_least_there_is(results):
    """A model without buffers, whose lengths are multiples of 64 bytes: payloads to the byte."""
    parameters = 4 * sum(parameter.numel() for parameter in script.model().parameters())
    least = least_bytes(parameters, nodes=2)
    summed, plain = results["even, summed"], results["even, plain"]
    assert summed["bytes_sent"] == [least] * 5
    assert plain["bytes_sent"] == [2 * least] * 5
    for nodes in summed["traffic"]:
        assert len(nodes) == 2
        for gradients_sent, weights_sent, gradients_received, weights_received in nodes:
            assert gradients_sent + weights_sent == least
            assert gradients_received + weights_received == least
        assert sum(node[0] for node in nodes) == sum(node[1] for node in nodes) == parameters


@pytest.mark.parametrize("staged", soak_but(["even, plain", "even, summed"], STAGES))
def test_an_iteration_has_as_many_stages_as_it_needs(results, staged):
    """The weights, forward-backward, synchronization; the norm; sums on the nodes."""
    assert results[staged]["stages"] == [STAGES[staged]] * 5


def test_an_iteration_is_submitted_once_and_stores_nothing(results):
    assert results["even, plain"]["submissions"] == [1, 2, 3, 4, 5]
    assert len(set(results["even, plain"]["persisted"])) == 1


@pytest.mark.soak
def test_groups_send_what_replicas_send_where_nodes_do_not_sum(results):
    assert results["asynchronous, plain"]["bytes_sent"] == results["even, plain"]["bytes_sent"]


def test_less_is_sent_where_nodes_sum(results):
    both = [case for case in CASES if {f"{case}, plain", f"{case}, summed"} <= results.keys()]
    assert both
    for case in both:
        summed, plain = (results[f"{case}, {way}"]["bytes_sent"] for way in ("summed", "plain"))
        assert len(summed) == len(plain) == 5
        assert all(0 < a < b for a, b in zip(summed, plain, strict=True)), case


@pytest.mark.soak
@pytest.mark.parametrize("more", ["brought"])
def test_what_is_larger_than_a_job_s_results_comes_from_other_nodes(results, more):
    local, shuffle, gang = (results[more][e] for e in ("local", "shuffle", "gang"))
    assert shuffle == local
    assert len(gang) == len(local)
    assert local[-1] == gang[-1] == "kept: True"


# Security


def test_a_run_gives_all_that_one_process_gives(spark, results):
    found, df = results["watched"], script.frame(spark)
    assert found["settings"].items() >= secured.SETTINGS.items()
    assert found["bytes"] > 0
    expected = script.outcome(script.secured(df, engine="local").fit(df), df)
    assert {key: found[key] for key in expected} == expected


def test_its_checkpoint_goes_on(spark, results, folder):
    df = script.frame(spark)
    kept = sorted((folder / "checkpoints").iterdir())
    assert len(kept) == 3  # with that of the end
    resumed = script.secured(df, engine="local").fit(df, resume=kept[0])
    assert digest(resumed.module) == results["watched"]["digest"]
    assert results["watched"]["slabs"] == []


def test_no_python_process_listens_on_a_port(results):
    """The JVMs' ports are Spark's own, Py4J's among them. PySpark's accumulators and its daemons
    listen on Unix sockets, since ``spark.python.unix.domain.socket.enabled`` is set."""
    assert results["watched"]["looks"] > 10
    assert results["watched"]["roles"] == ["daemon", "driver", "worker"]
    assert results["watched"]["ports"] == []


def test_unix_sockets_are_for_this_user_alone(results):
    sockets = {}
    for role, own, directory in results["watched"]["sockets"]:
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


# Ranks on two nodes


def test_there_are_two_nodes(found):
    assert found["on_nodes"]["nodes"] == 2


# Rows of others


SENT = [("read or sent", "layers")]
"""The rows that are always tried; the others soak."""


@pytest.mark.parametrize(
    ("how", "way"), soak_but(SENT, [(how, way) for how in on_nodes.HOW for way in on_nodes.WAYS])
)
def test_rows_come_together(found, how, way):
    whole = found["on_nodes"][f"{how}, local"]
    assert found["on_nodes"][f"{how}, {way}"] == pytest.approx(whole, rel=1e-4, abs=1e-5)


def test_augmenting_matters(found):
    assert found["on_nodes"]["augmented, local"] != found["on_nodes"]["read or sent, local"]


# Cores of a resource profile


TOO_MANY = (
    "ParameterError: a gang of 3 ranks needs 3 task slots at once, and this session has 2: ask for at "
    "most 2 ranks, or for more executors or cores."
)
ASKS = (
    "ParameterError: resource_profile asks for executors (cores), which Spark starts with dynamic "
    "allocation only, and a gang does not go with that: leave cores out."
)


@pytest.mark.soak
@pytest.mark.parametrize("cores", [2])
def test_each_rank_has_cores_of_its_own(found, cores):
    """So that two of them cannot be on one executor of two."""
    told = found["profiles"]
    assert told["executors"] == 2
    assert told["too many"] == TOO_MANY
    assert told["asks"] == ASKS
    assert told["losses"] == pytest.approx(told["expected"], rel=1e-6)
    assert found["threads"].count(cores) >= 2  # the ranks; the driver's own passes have one


# Every engine


RUNS = [run for run in contract.all_runs() if run[1] != "local"]
QUICK = [("chain", "gang, fsdp")]


@pytest.mark.parametrize(("model", "engine"), soak_but(QUICK, RUNS))
def test_the_loss_curve_is_that_of_one_process(found, model, engine):
    """Within 1e-5, with three replicas."""
    losses, expected = (found["contract"][f"{model}: {name}"] for name in (engine, "local"))
    assert len(expected) == 2 * contract.ROWS / 18
    assert losses == pytest.approx(expected, rel=0, abs=1e-5)
    assert model != "compressed" or losses == expected
    assert len(set(expected)) == len(expected)
