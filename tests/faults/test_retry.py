"""A task that fails and is run again changes no bit; one that fails every time is one clear error."""

from __future__ import annotations

import contextlib
import pickle
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import lose_executors
import numpy as np
import pytest
import torch
import train_with_faults
from launch import asked_for, digest, launch, soak_but
from pyspark import cloudpickle

import sparkdl
from sparkdl.codec.packed import decode
from sparkdl.data.batches import BatchSpec
from sparkdl.data.fields import SampleHandle
from sparkdl.data.partition_writer import PartitionWriter
from sparkdl.engines.shuffle.messages import RESIDUAL_FOREIGN, IterationMessage, raise_unrecoverable
from sparkdl.engines.shuffle.replica_context import (
    RecipeSource,
    at_replicas,
    initial_state,
    prepare_replica,
    prepare_slice,
)
from sparkdl.engines.shuffle.replica_tasks import send_gradients
from sparkdl.engines.shuffle.update_tasks import at_slice, synchronize, to_driver
from sparkdl.errors import StaleReferenceError
from sparkdl.model.recipe import Recipe
from sparkdl.replica.iteration import ResidualHandle, SliceHandle, SliceReport
from sparkdl.replica.run import ReplicaHandle, RunSpec
from sparkdl.slab.pool import Pool, open_pool, release
from sparkdl.slab.root import SlabConfig, remove_root

pytestmark = pytest.mark.faults
SCRIPT = Path(train_with_faults.__file__)
MASTERS = {
    "references": "local[2,4]",
    "bytes": "local-cluster[2,1,1024]",
    "sums": "local-cluster[2,2,1024]",  # replicas 0 and 1 share a node and are summed there
}


@pytest.fixture(scope="module")
def undisturbed(spark) -> str:
    """The digest from this session, which knows no faults."""
    df = train_with_faults.frame(spark)
    return digest(train_with_faults.trainer(engine="local").fit(df).module)


@pytest.fixture(scope="module", params=soak_but(["bytes"], MASTERS))
def results(request, tmp_path_factory) -> dict:
    """All runs of the script on one master.

    Slab roots of executors are apart, so that on the cluster bytes travel, on one node references.
    """
    folder = tmp_path_factory.mktemp("faults")
    how, notes = request.param, str(folder / "notes")
    lasting, deleted = asked_for(request, "fault"), asked_for(request, "deleted")
    lost = asked_for(request, "name") if how == "bytes" else []
    return launch(
        SCRIPT,
        folder,
        master=MASTERS[how],
        sums=how == "sums",
        notes=notes,
        lasting=lasting,
        compressed=bool(asked_for(request, "compressed")),
        deleted=deleted,
        lost=lost,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.spark
def test_a_run_without_a_fault_is_the_same(results, undisturbed):
    assert results["undisturbed"] == undisturbed


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.spark
def test_a_fault_in_one_attempt_changes_no_bit(results, undisturbed):
    """The task raises, or its Python worker is killed by SIGKILL, in the middle of its writing."""
    assert results["faults"] == {"digest": undisturbed, "struck": [1, 1, 1, 1]}


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.spark
@pytest.mark.parametrize("compressed", [True])
def test_nor_where_replicas_keep_residuals(results, spark, compressed):
    """On the cluster these lie on several nodes, each with slabs of its own."""
    df = train_with_faults.frame(spark)
    here = train_with_faults.trainer(engine="local", **train_with_faults.COMPRESSION).fit(df)
    assert results["compressed"] == {"digest": digest(here.module), "struck": 1}
    assert results["compressed"]["digest"] != results["undisturbed"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.spark
@pytest.mark.parametrize(
    "deleted", soak_but(["shuffle, after every iteration"], train_with_faults.DELETED)
)
def test_slabs_may_go_at_any_moment_and_any_number_of_times(results, spark, deleted):
    engine, when = train_with_faults.DELETED[deleted]
    slices = {"slices": 2, "engine": "local"}
    result = results[deleted]
    assert result["times"] > (2 if engine == "shuffle" or "placed" in when else 0)
    if when == "without end":
        assert "TrainingError" in result["error"]
        assert 'If something deletes the folders "sparkdl-*" there' in result["error"]
    else:
        assert "error" not in result, result
        assert result["outcome"] == train_with_faults.fit_moved(spark, **slices)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.spark
@pytest.mark.parametrize(
    "fault", soak_but(["lasting in forward-backward"], train_with_faults.LASTING)
)
def test_a_task_that_fails_every_attempt_is_one_error(results, fault):
    site = train_with_faults.LASTING[fault].site
    error = results[fault]
    assert error["attempts"] == [0, 1, 2, 3]
    assert error["type"] == "TrainingError"
    assert error["shown alone"]
    # Where an iteration is one stage, as measured in the first three, the next begins with its update.
    told = f"\nThis is the update at the end of iteration {site.iteration}."
    pending = error["message"].endswith(told)
    iteration = site.iteration + pending
    epoch = (iteration - 1) // 4 + 1  # 60 samples in batches of 16
    where = f"iteration {iteration}, epoch {epoch}: partition {site.partition}"
    place = where + r" on \S.* failed 4 times\. "
    if "kill" in fault:
        reason = r"The Python worker died: it was killed, ran out of memory, or crashed\."
        assert re.fullmatch(place + reason, error["message"])
    else:
        raised = f"OSError: injected into {site.job}"
        trace = r"\nTraceback \(most recent call last\):\n(  .*\n)+"
        assert re.fullmatch(place + raised + trace + raised, error["message"].removesuffix(told))
        file = {"fb": "replica_tasks.py", "sync": "update_tasks.py"}[site.job]
        assert f"sparkdl/engines/shuffle/{file}" in error["message"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.spark
def test_failed_runs_leave_nothing_behind(results):
    before, after = results["leftovers"]
    assert before["slabs"] == []
    assert before["active stages"] == []
    assert after == before
    for fault in results["lasting"]:
        assert results[fault]["after"] == before


RESUMED = r".+\. Continued from {} and repeated \d+ iterations?: \d+\.\d s\."


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.spark
@pytest.mark.parametrize("results", ["bytes"], indirect=True)
@pytest.mark.parametrize(
    "name",
    soak_but(["slabs and an executor, with all that a state can hold"], lose_executors.CASES),
)
def test_the_run_goes_on_with_the_same_bits_and_says_from_where(results, spark, name):
    """State that is lost with an executor, on two that have slab roots of their own."""
    case, result = lose_executors.CASES[name], results["lost"][name]
    assert result["struck"] == [fault.times for fault in case.faults]
    assert result["outcome"] == lose_executors.fit(spark, case, engine="local")
    told = [line for line in result["log"] if "cannot be read" not in line]
    points = [re.compile(RESUMED.format(point)) for point in case.points]
    assert all(any(point.fullmatch(line) for line in told) for point in points), result["log"]
    assert all(any(point.fullmatch(line) for point in points) for line in told), result["log"]
    assert len(result["recoveries"]) == len(told)
    assert all(0 < done < lose_executors.ITERATIONS for done in result["recoveries"])
    assert result["persisted"] == 0


# Twins: two attempts of one task, as speculation runs them, here one after the other by hand.


def model() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(6, 40),
        torch.nn.BatchNorm1d(40),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(40, 3),
    )


class Bench:
    """The task bodies of a run with 2 replicas and 3 slices, run in this process without Spark."""

    def __init__(self, folder: Path, compression=None) -> None:
        slab = SlabConfig.new(str(folder), "twins")
        self.run = RunSpec(
            slab,
            0,
            2,
            3,
            BatchSpec(num_features=1, num_labels=1),
            (6, 6),
            threads=1,
            whole_tensors=compression is not None,
        )
        recipe = Recipe(
            model,
            torch.nn.CrossEntropyLoss(),
            partial(torch.optim.Adam, lr=1e-2),
            seed=0,
            compression=compression,
        )
        source = RecipeSource(cloudpickle.dumps(recipe))
        generator = np.random.default_rng(0)
        self.seats = []
        for index in range(2):
            samples = self._samples(generator, 12)
            handle = ReplicaHandle(self.run, index, samples.checksum)
            (replica,) = prepare_replica(source, index, [pickle.dumps(handle)])
            self.seats.append((replica, pickle.dumps(samples)))
        self.owners = [list(prepare_slice(self.run, source, 2, n, [])) for n in range(3)]
        self.states: tuple[SliceHandle, ...] = tuple(
            initial_state(None, "state", 0, n, self.run).state for n in range(3)
        )
        self.step = IterationMessage(
            index=0,
            epoch=0,
            submission=1,
            oldest_needed=0,
            rows=((0, 6), (0, 6)),
            residuals=(None, None),
        )

    def _samples(self, generator: np.random.Generator, rows: int) -> SampleHandle:
        writer = PartitionWriter(self.run.slab)
        columns = [
            generator.normal(size=(rows, 6)).astype("float32"),
            generator.integers(3, size=rows),
        ]
        writer.add(["features", "label"], columns)
        return writer.finish()

    @property
    def now(self) -> IterationMessage:
        return replace(self.step, states=self.states)

    @property
    def pool(self) -> Pool:
        return open_pool(self.run.slab)

    def forward_backward(self, index: int) -> list[bytes]:
        """The frames of one attempt, one a slice (each sent after its address)."""
        task, seat = partial(send_gradients, self.now, None), self.seats[index]
        return list(at_replicas(task, self.states, None, {}, index, iter([seat])))[1::2]

    def synchronize(self, n: int, gradients: list[bytes]) -> SliceReport:
        pairs = zip(gradients, self.owners[n], strict=True)
        work = partial(synchronize, self.now)
        return pickle.loads(next(iter(list(at_slice(work, to_driver, n, pairs)))))

    def content(self, state: SliceHandle) -> list[bytes]:
        return [self.pool.read(reference).tobytes() for reference in state.references()]

    def commit(self, states: tuple[SliceHandle, ...], residuals=None) -> None:
        """As the driver does: the next iteration, from these states."""
        step = self.step
        self.states = states
        self.step = replace(
            step,
            index=step.index + 1,
            submission=step.submission + 1,
            oldest_needed=step.submission,
            residuals=residuals or step.residuals,
        )

    def files(self, role: str) -> int:
        return len(list(Path(self.run.slab.directory, self.run.slab.name).glob(f"{role}-*")))


@pytest.fixture(params=[None, sparkdl.PowerSGD(2)], ids=["plain", "compressed"])
def bench(request, tmp_path):
    made = Bench(tmp_path, request.param)
    yield made
    release(made.run.slab.name)
    remove_root(made.run.slab)


def residuals_of(frames: list[list[bytes]]) -> tuple[ResidualHandle | None, ...]:
    """Return what each replica keeps of its compressed gradients."""
    return tuple(decode(gradients[0])[0].report.residual for gradients in frames)


def kept(bench: Bench, handles: tuple[ResidualHandle | None, ...]) -> list[bytes]:
    return [bench.pool.read(handle.reference).tobytes() for handle in handles if handle]


def test_twins_of_a_forward_backward_task_send_the_same_values(bench):
    first, second = bench.forward_backward(0), bench.forward_backward(0)
    for one, other in zip(first, second, strict=True):
        (left, left_bytes), (right, right_bytes) = decode(one), decode(other)
        assert len(left_bytes) == len(right_bytes) == 0
        assert left.reference != right.reference
        assert left.reference.path != right.reference.path
        assert np.array_equal(bench.pool.read(left.reference), bench.pool.read(right.reference))
        for header in (left, right):
            bench.pool.check(header.reference)
        assert replace(left, reference=None, report=None) == replace(
            right, reference=None, report=None
        )
        if left.report:
            assert left.report.loss == right.report.loss


def test_twins_write_the_same_state_and_keep_the_same_residuals(bench):
    """Each reads another twin's gradients, and none touches what is committed; so does one after a
    skip."""
    committed = []
    for iteration in range(4):
        frames = [[bench.forward_backward(m) for m in range(2)] for _ in range(2)]
        first, second = map(residuals_of, frames)
        values = kept(bench, first)
        assert values == kept(bench, second)
        assert kept(bench, bench.step.residuals) == committed
        for one, other in zip(first, second, strict=True):
            if one is not None:
                assert one.reference.path != other.reference.path
                assert one.version == other.version == iteration + 1
        assert not committed or values[0] != committed[0]
        old = [bench.content(state) for state in bench.states]
        for n in range(3):
            twins = [
                bench.synchronize(n, [frames[k][m][n] for m in range(2)]).state for k in range(2)
            ]
            assert twins[0].version != twins[1].version
            assert bench.content(twins[0]) == bench.content(twins[1]) != old[n]
            assert bench.content(bench.states[n]) == old[n]  # version t is untouched
        bench.step = replace(bench.step, submission=bench.step.submission + 1)  # a skip
        gradients = [bench.forward_backward(m) for m in range(2)]
        again = residuals_of(gradients)
        states = tuple(bench.synchronize(n, [g[n] for g in gradients]).state for n in range(3))
        committed = kept(bench, again)
        assert committed == values
        bench.commit(states, again)


def test_a_late_twin_cannot_touch_what_is_committed(bench):
    """A zombie of an earlier iteration runs on: it fails, or writes beside."""
    steps = []
    for _ in range(3):
        gradients = [bench.forward_backward(m) for m in range(2)]
        steps.append((bench.step, bench.states, gradients))
        states = tuple(bench.synchronize(n, [g[n] for g in gradients]).state for n in range(3))
        bench.commit(states, residuals_of(gradients))
    now = bench.step, bench.states
    committed = [bench.content(state) for state in states], kept(bench, bench.step.residuals)
    sent, content = [], []
    for n, (step, before, gradients) in reversed(list(enumerate(steps))):
        if n == 1:  # the next iteration has sent, in what the last one read
            frames = [frame for m in range(2) for frame in bench.forward_backward(m)]
            sent = [decode(frame)[0].reference for frame in frames]
            content = [bench.pool.read(reference).tobytes() for reference in sent]
        bench.step, bench.states = step, before
        stale = pytest.raises(StaleReferenceError) if n < 2 else contextlib.nullcontext()
        with stale:  # what the last one reads is there yet: it writes beside
            bench.forward_backward(0)
        if n < 2:
            with pytest.raises(StaleReferenceError):
                bench.synchronize(0, [g[0] for g in gradients])
        bench.step, bench.states = now
        found = [bench.content(state) for state in states], kept(bench, bench.step.residuals)
        assert found == committed
        assert [bench.pool.read(reference).tobytes() for reference in sent] == content


def test_twins_do_not_make_the_pool_grow(bench):
    """Every task runs twice, and files of losing twins are used again. Neither do attempts that are
    skipped, nor a replica that has no rows for long."""
    counts = []
    for iteration in range(16):
        bench.step = replace(bench.step, rows=((0, 6), (0, 6 if iteration in (0, 12) else 0)))
        for _ in range(3):  # two of them skipped
            bench.step = replace(bench.step, submission=bench.step.submission + 1)
            twins = [[bench.forward_backward(m) for m in range(2)] for _ in range(2)]
        reports = [
            [bench.synchronize(n, [g[n] for g in gradients]) for n in range(3)]
            for gradients in twins
        ]
        assert not any(report.faults for both in reports for report in both)
        found, before = residuals_of(twins[0]), bench.step.residuals
        compressed = found[0] is not None
        assert (found[1] is not None) == (compressed and iteration in (0, 12))
        states = tuple(report.state for report in reports[1])
        bench.commit(states, tuple(new or old for new, old in zip(found, before, strict=True)))
        for handle in filter(None, bench.step.residuals):
            bench.pool.check(handle.reference)
        counts.append([bench.files(role) for role in ("gradient", "state", "residual.0.[01]")])
    assert counts[3:] == [counts[3]] * 13
    gradients, _, residuals = counts[-1]
    assert gradients == 2 * 2  # two replicas, two attempts
    assert residuals == 2 * 2 * compressed  # two versions, two attempts


@pytest.mark.parametrize("bench", [sparkdl.PowerSGD(2)], indirect=True, ids=str)
def test_a_replica_without_its_residual_reports_it(bench):
    gradients = [bench.forward_backward(m) for m in range(2)]
    mine, other = residuals_of(gradients)
    foreign = replace(mine, reference=replace(mine.reference, node_id="elsewhere"))
    bench.step = replace(bench.step, submission=2, residuals=(foreign, other))
    frames = bench.forward_backward(0)
    assert [decode(f)[0].fault.kind for f in frames] == [RESIDUAL_FOREIGN] * 3
    report = bench.synchronize(0, [frames[0], bench.forward_backward(1)[0]])
    assert [fault.kind for fault in report.faults] == [RESIDUAL_FOREIGN]
    with pytest.raises(
        sparkdl.StateLostError, match="what replica 0 keeps between iterations is out of reach"
    ):
        raise_unrecoverable(report.faults, "iteration 2, epoch 1")


def test_faults_are_no_part_of_the_product():
    source = Path(sparkdl.__file__).parent
    assert not any("harness" in path.read_text() for path in source.rglob("*.py"))
