"""Where nodes sum before they send: the same bits and fewer bytes. The tasks without Spark."""

from __future__ import annotations

import pickle
from functools import partial

import pytest
import torch
from nodes_here import Machine, Tagged, gradient_bytes

from sparkdl.data.batches import BatchSpec
from sparkdl.engines.shuffle import forms
from sparkdl.engines.shuffle.forms import NodeReducePlan
from sparkdl.engines.shuffle.messages import MOVED, SliceBytes, planned
from sparkdl.engines.shuffle.update_tasks import receive_weights, send_weights
from sparkdl.model.buffers import TrainingOptions
from sparkdl.model.flat import Layout, TensorRange, layout_of
from sparkdl.replica.iteration import SliceHandle
from sparkdl.replica.run import RunSpec
from sparkdl.slab.pool import Reference
from sparkdl.slab.root import SlabConfig
from sparkdl.slices.spec import slice_specs


@pytest.fixture
def machine(tmp_path):
    made = []

    def make(name: str, *args, **kwargs) -> Machine:
        (tmp_path / name).mkdir()
        made.append(Machine(tmp_path / name, *args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


CASES = {
    "two and two": ("aabb", "aabb", (4, 4, 4, 4), {}),
    "apart": ("abab", "ab", (4, 3, 2, 4), {}),
    "two and one, N != M": ("aab", "ba", (4, 4, 4), {}),
    "three and one": ("abbb", "abab", (4, 3, 2, 2), {}),
    "an owner without replicas": ("aabb", "abc", (4, 4, 4, 4), {}),
    "no rows": ("aabb", "aab", (4, 0, 0, 4), {}),
    "a node without rows": ("aaaabb", "ab", (3, 3, 3, 3, 0, 0), {}),
    "clip_norm": ("aabb", "aab", (4, 4, 4, 4), {"clip_norm": 0.1}),
    "bf16": ("aabb", "ab", (4, 4, 4, 4), {"wire": "bf16"}),
    "bf16, four": ("aaaab", "ab", (4, 4, 4, 4, 3), {"wire": "bf16"}),
    "table": ("aabb", "abb", (4, 4, 4, 4), {"tagged": True}),
    "more slices than there is to cut": ("aab", "abababab", (2, 2, 2), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_the_same_wherever_the_sums_are_made(machine, case):
    replicas, slices, rows, changes = CASES[case]
    alone = machine("alone", "x" * len(replicas), "x" * len(slices), rows, **changes)
    plain = machine("plain", replicas, slices, rows, **changes)
    summed = machine("summed", replicas, slices, rows, **changes)
    for iteration in range(2):
        before = alone.content()
        here = alone.plain()
        theirs, ours = plain.plain(), summed.summed()
        assert not any(report.faults for report in [*here, *theirs, *ours])
        assert alone.content() == plain.content() == summed.content()
        assert alone.content() != before
        for a, b, c in zip(here, theirs, ours, strict=True):
            assert a.norm == b.norm == c.norm
        losses = [[r.loss for r in reports[0].replicas] for reports in (here, theirs, ours)]
        assert sorted(losses[0]) == sorted(losses[1]) == sorted(losses[2])
        assert gradient_bytes(here) == 0
        assert gradient_bytes(ours) <= gradient_bytes(theirs), iteration
    if all(rows):
        plans = slice_specs(layout_of(Tagged(changes.get("tagged", False))), len(slices))
        assert gradient_bytes(theirs) - gradient_bytes(ours) == saving(summed, plans, changes)


def saving(machine: Machine, plans, changes) -> int:
    """By plan; a gradient begins at a multiple of 64 bytes."""
    wire = 2 if "wire" in changes else 4
    sizes = [
        SliceBytes(-(-plan.dense_length * wire // 64) * 64, -(-plan.dense_length * 4 // 64) * 64, 0)
        for plan in plans
    ]
    plain, summed = (planned(machine.nodes, sizes, way) for way in (False, True))
    return sum(node.gradients_sent for node in plain.values()) - sum(
        node.gradients_sent for node in summed.values()
    )


def test_weights_arrive_once_a_node_and_outlive_their_twins(machine):
    one = machine("one", "aaabb", "ab", (2, 2, 2, 2, 2))
    for _ in range(6):
        one.summed()
        sizes = {
            node: {n: copy.weights.nbytes for n, copy in one.copies.get(node_id, {}).items()}
            for node, node_id in (("a", one.node_id("a")), ("b", one.node_id("b")))
        }
        assert sizes["a"].keys() == {1}
        assert sizes["b"].keys() == {0}
    for node in "ab":
        files = list((one._folder / node / "slabs").glob("*/weights-*"))
        assert len(files) <= 3 * 2  # the first of all, version t and t + 1, each by two twins


def test_weights_that_arrive_are_written_before_the_next_are_read(machine):
    """Together they may be a whole model."""
    one, alive = machine("one", "aab", "aaaa", (2, 2, 2)), [0]

    class Frame(bytes):
        def __del__(self):
            alive[0] -= 1

    def arriving(pairs):
        for frame, replica in pairs:
            alive.append(alive[0])
            alive[0] += 1
            yield Frame(frame), replica

    sent = one.stage(partial(send_weights, one.states, one.nodes), one.owners, one.slices)
    arrived = one.zip(one.shuffle(sent, 3), one.counted(4))
    with one.on("b"):
        (frame,) = receive_weights(one.step(), 2, arriving(arrived[2]))
    assert pickle.loads(frame).copies.keys() == {0, 1, 2, 3}
    assert max(alive[1:]) <= 1  # the one before, until the next has taken its name


def test_a_task_that_finds_itself_elsewhere_reports_it(machine):
    """The tasks that sum are placed where their replicas are; here the last one is not."""
    one = machine("one", "aabb", "ab", (4, 4, 4, 4))
    before = one.states
    reports = one.summed(combine_on="aaba")
    faults = {fault for report in reports for fault in report.faults}
    assert {(fault.kind, fault.partition, fault.node_id) for fault in faults} == {
        (MOVED, 3, one.node_id("a"))
    }
    assert one.states == before
    assert not any(report.faults for report in one.summed())


# The rule


def layout(megabytes: int) -> Layout:
    length = megabytes * 250_000
    segment = TensorRange("w", "parameter", 0, length, (length,), torch.float32)
    return Layout((segment,), torch.float32, length)


def chosen(megabytes: int, replicas: str, slices: str, **options):
    rows, spec = (1,) * len(replicas), BatchSpec(num_features=1, num_labels=1)
    run = RunSpec(SlabConfig("", ""), 0, len(replicas), len(slices), spec, rows, 1)
    states = [SliceHandle(Reference("", "", node_id, 0, 0)) for node_id in slices]
    plan = NodeReducePlan(layout(megabytes), run, TrainingOptions(**options))
    return plan.chosen(tuple(replicas), states)


def test_nodes_sum_where_it_saves_more_than_a_stage_costs():
    least = forms.MORE_STAGES * forms.STAGE_SECONDS * forms.BYTES_PER_SECOND / 1e6
    assert chosen(int(least) - 1, "aabb", "aabb") is None
    nodes = chosen(int(least) + 1, "aabb", "aabb")
    assert nodes.replicas == tuple("aabb")


@pytest.mark.parametrize(
    ("replicas", "slices", "options"),
    [("ab", "ab", {}), ("aaaa", "aa", {}), ("aabb", "aabb", {"local_steps": 2})],
)
def test_nodes_do_not_sum_where_there_is_nothing_to_gain(replicas, slices, options):
    assert chosen(1000, replicas, slices, **options) is None
