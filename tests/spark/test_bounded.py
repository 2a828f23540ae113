"""What a run holds stays flat, over any number of iterations and for models of any size."""

from __future__ import annotations

import contextlib
import gc
import pathlib
import sys
import tracemalloc
from array import array
from functools import partial
from pathlib import Path
from unittest import mock

import innards
import numpy as np
import pytest
import torch
from innards import eventually
from pyspark import SparkContext, cloudpickle
from torch import nn

import sparkdl
from sparkdl.engines import resources

pytestmark = pytest.mark.spark
WIDTH = 8


def model(hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, 2))


cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def df(spark):
    generator = np.random.default_rng(0)
    rows = [(generator.normal(size=WIDTH).tolist(), i % 2) for i in range(64)]
    records = spark.sparkContext.parallelize(rows, 2)
    return spark.createDataFrame(records, "features array<float>, label long")


def trainer(iterations: int, hidden: int, *callbacks: sparkdl.Callback) -> sparkdl.Trainer:
    return sparkdl.Trainer(
        model=partial(model, hidden),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=1e-3),
        batch_size=16,
        replicas=2,
        stop=sparkdl.max_iteration(iterations),
        callbacks=callbacks,
    )


def slab_files(context: SparkContext) -> set[str]:
    roots = [d for base in ("/dev/shm", "/tmp") for d in Path(base).glob("sparkdl-*")]
    mine = [root for root in roots if context.applicationId in root.name]
    return {str(path) for root in mine for path in root.iterdir()}


def traced_bytes() -> int:
    """What Python holds, but for what this count itself notes."""
    own = [__file__, innards.__file__, pathlib.__file__, tracemalloc.__file__]
    filters = [tracemalloc.Filter(False, name) for name in own]
    snapshot = tracemalloc.take_snapshot().filter_traces(filters)
    return sum(statistic.size for statistic in snapshot.statistics("filename"))


class Census(sparkdl.Callback):
    """Counts what there is after some iterations."""

    def __init__(self, context: SparkContext, at: set[int]) -> None:
        self.context, self.at = context, at
        self.slabs_before = slab_files(context)
        self.counts: dict[int, dict[str, object]] = {}
        self.rdds, self.jobs = array("q"), array("q")
        self.python_bytes: dict[int, int] = {}

    def on_fit_start(self, trainer, state) -> None:
        tracemalloc.start()

    def on_iteration_end(self, trainer, state) -> None:
        # RDD numbers and jobs used so far; asking for an RDD number uses one
        self.rdds.append(self.context._jsc.sc().newRddId())
        self.jobs.append(innards.jobs(self.context))
        if state.iteration in self.at:
            for _ in range(2):  # the first count is 6 to 40 kB too high, all after it are the same
                gc.collect()
                innards.drain_py4j(self.context)
                self.python_bytes[state.iteration] = traced_bytes()
            self.counts[state.iteration] = {
                "persisted RDDs": innards.persisted(self.context),
                "cached blocks": innards.blocks(self.context, "rdd"),
                "shuffles": innards.shuffles(self.context),
                "shuffle files": innards.files(self.context, "shuffle"),
                "slabs": slab_files(self.context) - self.slabs_before,
            }

    def on_fit_end(self, trainer, state) -> None:
        tracemalloc.stop()


def worker_memory(context: SparkContext) -> dict[int, float]:
    """Return the MB of its own that each Python worker of the session has."""
    found = {}
    for worker in innards.workers(context):
        with contextlib.suppress(OSError, StopIteration):
            lines = Path(f"/proc/{worker}/status").read_text().splitlines()
            line = next(line for line in lines if line.startswith("RssAnon"))
            found[worker] = int(line.split()[1]) / 1e3
    return found


def mapped(context: SparkContext) -> list[int]:
    """Return the Python workers of the session that still map slabs of a fit."""
    found = []
    for worker in innards.workers(context):
        with contextlib.suppress(OSError):
            if "/sparkdl-" in Path(f"/proc/{worker}/maps").read_text():
                found.append(worker)
    return found


class Mapped(sparkdl.Callback):
    """Notes the workers that map slabs while a fit runs."""

    def __init__(self, context: SparkContext) -> None:
        self.context, self.workers = context, set[int]()

    def on_iteration_end(self, trainer, state) -> None:
        self.workers.update(mapped(self.context))


@pytest.mark.soak
def test_workers_keep_nothing_of_a_fit_that_has_ended(spark, df):
    """Neither its slabs nor its replica, also where the next task is one that predicts."""
    context, one = spark.sparkContext, trainer(2, 8)
    with sparkdl.PlacedSamples.of(one, df) as placed:
        one.fit(placed)
    usual = max(worker_memory(context).values())
    large = trainer(2, 1_000_000, Mapped(context))  # 44 MB
    large.fit(df)
    assert len(large.callbacks[0].workers) >= 2
    assert eventually(lambda: not mapped(context))
    assert eventually(lambda: max(worker_memory(context).values()) < usual + 22)


@pytest.mark.soak
@pytest.mark.parametrize("stages", ["shuffle", "two", "one"])
def test_iterations_leave_everything_flat(spark, df, set_stages, stages):
    set_stages(stages)
    context = spark.sparkContext
    innards.collect_garbage(context)
    broadcasts = set(innards.blocks(context, "broadcast"))
    persisted, shuffles = innards.persisted(context), innards.shuffles(context)
    files, slabs = innards.files(context, "shuffle"), slab_files(context)
    census = Census(context, at={20, 60, 110, 170})
    lineage = []
    forget = resources.forget_shuffles

    def noted(rdd):
        if len(census.rdds) % 25 == 0:
            lineage.append(len(rdd._jrdd.toDebugString().splitlines()))
        forget(rdd)

    with mock.patch.object(resources, "forget_shuffles", noted):
        trained = trainer(170, 16, census).fit(df)

    assert len(trained.history) == 170
    first = census.counts[20]
    for iteration, counts in census.counts.items():
        for what in ("persisted RDDs", "cached blocks", "slabs"):
            assert counts[what] == first[what], (what, iteration)
        # deleted while the next iteration runs, though not always before the driver goes on
        assert counts["shuffles"] <= shuffles + 2
        assert len(counts["shuffle files"]) <= len(files) + 2 * 3 * 2
    assert first["persisted RDDs"] == persisted + 3  # samples, replicas, owners
    buffers = sorted(Path(p).name.split("-")[0] for p in first["slabs"] if "-" in Path(p).name)
    pending = stages == "one"
    assert buffers.count("gradient") == (4 if pending else 2)  # pending ones are kept
    assert len(buffers) < (60 if pending else 40)  # there every replica writes the state
    assert set(np.diff(census.jobs)) == {2 if stages == "two" else 1}
    assert len(set(np.diff(census.rdds))) == 1
    assert len(lineage) == (6 if stages == "shuffle" else 0)
    assert len(set(lineage)) <= 1
    per_iteration = (census.python_bytes[170] - census.python_bytes[60]) / 110
    assert per_iteration < 400  # a few numbers of the history; one kept Py4J object is 1 kB

    assert slab_files(context) == slabs
    assert innards.persisted(context) == persisted
    assert innards.eventually(lambda: innards.shuffles(context) <= shuffles)
    assert innards.eventually(lambda: len(innards.files(context, "shuffle")) <= len(files))
    innards.collect_garbage(context)
    left = lambda: set(innards.blocks(context, "broadcast")) - broadcasts  # noqa: E731
    assert innards.eventually(lambda: not left()), left()


class Memory(sparkdl.Callback):
    """Memory of the driver's Python between iterations 3 and the end, in bytes.

    ``traced``: the peak that tracemalloc sees (pickles, frames, NumPy arrays). ``resident``: the
    growth of the peak of the process, which has torch's memory in it too.
    """

    def on_iteration_end(self, trainer, state) -> None:
        if state.iteration == 3:
            tracemalloc.start()
            Path("/proc/self/clear_refs").write_text("5")
            self._resident = _status("VmRSS")

    def on_fit_end(self, trainer, state) -> None:
        self.traced = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        self.resident = _status("VmHWM") - self._resident


def _status(key: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024


class LiveLayers(sparkdl.Callback):
    """The layers of this process with so many outputs, after each iteration."""

    def __init__(self, outputs: int) -> None:
        self._outputs, self.counts = outputs, []

    def on_iteration_end(self, trainer, state) -> None:
        gc.collect()
        layers = (one for one in gc.get_objects() if type(one) is nn.Linear)
        self.counts.append(sum(one.out_features == self._outputs for one in layers))


def test_the_driver_has_no_module_while_it_trains(df):
    layers = LiveLayers(37)
    trainer(1, 37, layers).fit(df)
    assert set(layers.counts) == {0}


@pytest.mark.soak
def test_driver_memory_does_not_grow_with_the_model(df):
    small, large = Memory(), Memory()
    trainer(10, 2_400, small).fit(df)  # 0.1 MB of parameters
    trained = trainer(10, 480_000, large).fit(df)
    assert sum(p.numel() * 4 for p in trained.module.parameters()) > 20e6
    assert small.traced < 1e6
    assert large.traced < small.traced + 0.1e6
    assert large.resident < 5e6
