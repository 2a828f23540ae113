"""A run begins, and begins again, with the recipe's weights, whatever a process holds. No JVM."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from pyspark import cloudpickle
from torch import nn

from sparkdl.data.batches import BatchSpec
from sparkdl.data.fields import SampleHandle
from sparkdl.data.partition_writer import PartitionWriter
from sparkdl.data.samples import SampleSet
from sparkdl.engines.local.engine import LocalEngine
from sparkdl.engines.shuffle.replica_context import (
    RecipeSource,
    check_replica,
    initial_state,
    prepare_replica,
    prepare_slice,
)
from sparkdl.engines.shuffle.store import load_weights, map_weights
from sparkdl.errors import ModelError, StaleReferenceError
from sparkdl.model.recipe import LiveReplica, Recipe
from sparkdl.replica.iteration import Iteration, SliceHandle, SliceReport
from sparkdl.replica.run import ReplicaHandle, RunSpec, open_replica, plans_of
from sparkdl.slab.pool import open_pool, release
from sparkdl.slab.root import SlabConfig, remove_root

SLICES = 2


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(200, 300), nn.BatchNorm1d(300), nn.Linear(300, 3))


class Process:
    """A process of a run, with its tasks called one after another. ``ticks``: of the states written."""

    def __init__(self, folder: Path, built_from: object) -> None:
        slab = SlabConfig.new(str(folder), "beginning")
        self.run = RunSpec(slab, 0, 1, SLICES, None, (6,), threads=1)  # type: ignore[arg-type]
        recipe = Recipe(built_from, nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.1), 0)  # type: ignore[arg-type]
        source = RecipeSource(cloudpickle.dumps(recipe))
        handle = pickle.dumps(ReplicaHandle(self.run, 0, 0))
        samples = pickle.dumps(SampleHandle("", (), "", 0, (), 0))
        self.seat = (next(prepare_replica(source, 0, [handle])), samples)
        self.owners = [list(prepare_slice(self.run, source, 1, n, [])) for n in range(SLICES)]
        self.submissions = 0

    def begin(self) -> list[SliceReport]:
        """The first version of each slice, as the owners write it."""
        self.submissions += 1
        return [initial_state(None, "state", self.submissions, n, self.run) for n in range(SLICES)]

    def digest(self) -> str:
        """Of the initial weights, as a replica tells it to the driver."""
        return pickle.loads(next(check_replica({}, 0, iter([self.seat]))))[1].digest

    def bytes(self, states: list[SliceHandle]) -> list[bytes]:
        return [open_pool(self.run.slab).read(state.weights).tobytes() for state in states]

    def begun(self) -> list[bytes]:
        return self.bytes([report.state for report in self.begin()])  # type: ignore[misc]


@pytest.fixture
def process(tmp_path) -> Iterator[Callable[[object], Process]]:
    made: list[Process] = []

    def start(built_from: object) -> Process:
        made.append(Process(tmp_path, built_from))
        return made[-1]

    yield start
    for one in made:
        release(one.run.slab.name)
        remove_root(one.run.slab)


def train(live: LiveReplica) -> None:
    """Change what training changes."""
    live.flat.flat.add_(1.0)
    live.flat.refresh()


def borrow(process: Process, live: LiveReplica) -> None:
    """Compute with weights where they lie: what was in the replica is lost."""
    pool, states = open_pool(process.run.slab), [report.state for report in process.begin()]
    live = open_replica(process.run)
    map_weights(live, plans_of(process.run).slices, states, pool)  # type: ignore[arg-type]
    live.flat.module(torch.ones(2, 200))
    live.flat.give_back()


def load_half(process: Process, live: LiveReplica) -> None:
    """Another version, of which a slice is gone."""
    pool, states = open_pool(process.run.slab), [report.state for report in process.begin()]
    live = open_replica(process.run)
    pool.read(states[0].weights)[:] = 1  # type: ignore[union-attr]
    Path(states[1].weights.path).unlink()  # type: ignore[union-attr]
    pool.close()
    plans = plans_of(process.run).slices
    with pytest.raises(StaleReferenceError):
        load_weights(live, plans, states, {}, open_pool(process.run.slab))  # type: ignore[arg-type]


DISTURBED = {
    "untouched": lambda process, live: None,
    "trained": lambda process, live: train(live),
    "borrowed": borrow,
    "half loaded": load_half,
    "buffers changed": lambda process, live: live.flat.module(torch.ones(2, 200)),
}


@pytest.mark.parametrize("disturb", DISTURBED.values(), ids=DISTURBED)
@pytest.mark.parametrize("built_from", [model, "an instance"], ids=["function", "instance"])
def test_a_run_that_begins_again_has_the_same_weights(process, built_from, disturb):
    here = process(model() if built_from == "an instance" else built_from)
    first, digest = here.begun(), here.digest()
    disturb(here, open_replica(here.run))
    assert here.digest() == digest
    disturb(here, open_replica(here.run))
    assert here.begun() == first
    assert any(any(weights) for weights in first)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(lambda kept: kept, id="the module"),
        pytest.param(lambda kept: nn.Sequential(kept[0], nn.Linear(300, 3)), id="a part of it"),
    ],
)
def test_a_model_that_keeps_what_is_trained_is_refused(process, monkeypatch, given):
    """It would go on from trained weights where it is to begin. The recipe is the same each time, as
    what an imported module holds is."""
    recipe = Recipe(partial(given, model()), nn.CrossEntropyLoss(), torch.optim.SGD, 0)
    monkeypatch.setattr("sparkdl.replica.run._load_recipe", lambda run: recipe)
    here = process(model)
    here.digest()
    (problem, *_) = here.begin()
    assert isinstance(problem, ModelError)
    assert str(problem) == (
        'model() returned the parameter "0.weight" that it had returned before, and that has been '
        "trained since: each call must build all trained modules anew. Create the modules inside "
        "the function, or pass a module itself (model=module)."
    )


def test_what_is_frozen_may_be_shared(process, monkeypatch):
    """A backbone, which no training changes."""
    backbone = nn.Linear(200, 300).requires_grad_(False)
    recipe = Recipe(
        lambda: nn.Sequential(backbone, nn.Linear(300, 3)),
        nn.CrossEntropyLoss(),
        torch.optim.SGD,
        0,
    )
    monkeypatch.setattr("sparkdl.replica.run._load_recipe", lambda run: recipe)
    here = process(model)
    assert here.digest() == here.digest()
    assert here.begun() == here.begun()


@pytest.mark.parametrize("built_from", [model, model()], ids=["function", "instance"])
def test_so_it_has_in_one_process(tmp_path, built_from):
    slab = SlabConfig.new(str(tmp_path), "one-process")
    batch_spec = BatchSpec(num_features=1, num_labels=1)
    run = RunSpec(slab, 0, 1, SLICES, batch_spec, (6,), threads=1)
    recipe = Recipe(built_from, nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.1), 0)
    writer = PartitionWriter(slab)
    rows = np.random.default_rng(0).normal(size=(6, 200)).astype("float32")
    writer.add(["features", "label"], [rows, np.arange(6) % 3])
    handle = writer.finish()
    samples = SampleSet(None, (handle,), handle.fields, 1, [], num_labels=1)
    engine = LocalEngine(samples, run, cloudpickle.dumps(recipe), batch_size=6)
    engine.load()
    first = engine.weights().clone()
    engine.run(Iteration(index=0, epoch=0, batch=0, hyperparameters=None))
    assert not torch.equal(engine.weights(), first)
    engine.load()
    assert torch.equal(engine.weights(), first)
    remove_root(slab)
