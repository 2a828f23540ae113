"""Executors whose slab roots are apart: bytes as theory says, and the bits of one process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import train_between_nodes as script
from launch import digest, launch
from pyspark import cloudpickle

import sparkdl
from sparkdl.engines.shuffle.traffic import least_bytes

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]
cloudpickle.register_pickle_by_value(sys.modules["train_between_nodes"])
CASES = ["even", "buffers", "clip_norm", "three replicas", "table"]
PLAIN = ["local steps", "few rows", "clip_norm, one slice", "stale", "asynchronous", "DiLoCo"]
"""Tried only where no nodes sum."""


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    """Two nodes with two task slots each; nodes sum, and they do not."""
    return launch(
        Path(script.__file__),
        tmp_path_factory.mktemp("nodes"),
        seconds=850,
        master="local-cluster[2,2,1024]",
        sums=[True, False],
        cases=CASES,
        plain=PLAIN,
    )


@pytest.mark.parametrize(
    ("case", "way"),
    [(case, way) for case in CASES for way in ("summed", "plain")]
    + [(case, "plain") for case in PLAIN],
)
def test_the_bits_are_those_of_one_process(spark, results, case, way):
    df = script.frame(spark)
    validation = sparkdl.Validation(df, every=sparkdl.every(3))
    trained = script.trainer(case, engine="local", validation=validation).fit(df)
    found = results[f"{case}, {way}"]
    assert found["digest"] == digest(trained.module)
    assert found["losses"] == trained.history.losses
    assert found["validations"] == trained.history.validations
    assert {record["bytes_sent"] for record in trained.history} == {0}


def test_replicas_side_by_side_share_a_node(results):
    assert results["even, summed"]["nodes"] == [0, 0, 1, 1]
    assert results["three replicas, summed"]["nodes"] == [0, 0, 1]


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


@pytest.mark.parametrize(
    ("case", "stages"),
    [
        ("even, plain", 3),
        ("clip_norm, plain", 4),
        ("local steps, plain", 3),
        ("clip_norm, one slice, plain", 3),
        ("even, summed", 4),
    ],
)
def test_an_iteration_has_as_many_stages_as_it_needs(results, case, stages):
    """The weights, forward-backward, synchronization; the norm; sums on the nodes."""
    assert results[case]["stages"] == [stages] * 5


def test_an_iteration_is_submitted_once_and_stores_nothing(results):
    assert results["even, plain"]["submissions"] == [1, 2, 3, 4, 5]
    assert len(set(results["even, plain"]["persisted"])) == 1


def test_groups_send_what_replicas_send_where_nodes_do_not_sum(results):
    assert results["asynchronous, plain"]["bytes_sent"] == results["even, plain"]["bytes_sent"]


@pytest.mark.parametrize("case", CASES)
def test_less_is_sent_where_nodes_sum(results, case):
    summed, plain = (results[f"{case}, {way}"]["bytes_sent"] for way in ("summed", "plain"))
    assert len(summed) == len(plain) == 5
    assert all(0 < a < b for a, b in zip(summed, plain, strict=True))


def test_what_is_larger_than_a_job_s_results_comes_from_other_nodes(results):
    local, shuffle, gang = (results["brought"][e] for e in ("local", "shuffle", "gang"))
    assert shuffle == local
    assert len(gang) == len(local)
    assert local[-1] == gang[-1] == "kept: True"
