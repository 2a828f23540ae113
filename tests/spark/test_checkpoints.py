"""Checkpoints of a run on Spark: who writes them, what is kept, what a bad path does."""

from __future__ import annotations

import gc
import os
import re
import secrets
import sys
import tracemalloc
from dataclasses import replace
from functools import partial
from pathlib import Path

import innards
import made_by_name
import numpy as np
import pytest
import torch
from launch import soak_but
from made_by_name import Waves
from pyspark import TaskContext, cloudpickle
from torch import nn

import sparkdl
from sparkdl.checkpoint.store import CheckpointStore
from sparkdl.engines.shuffle.engine import ShuffleEngine

pytestmark = pytest.mark.spark
WIDTH = 6


def model(hidden: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, 2))


cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(made_by_name)


@pytest.fixture(scope="module")
def df(spark):
    generator = np.random.default_rng(0)
    rows = [(generator.normal(size=WIDTH).tolist(), i % 2) for i in range(32)]
    records = spark.sparkContext.parallelize(rows, 2)
    return spark.createDataFrame(records, "features array<float>, label long")


def trainer(folder, iterations: int = 6, every: int = 2, keep=None, **changes) -> sparkdl.Trainer:
    values = {
        "model": model,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.Adam, lr=1e-2),
        "batch_size": 16,
        "replicas": 2,
        "slices": 3,
        "stop": sparkdl.max_iteration(iterations),
        "checkpoint": sparkdl.Checkpoint(folder, every=sparkdl.every(every), keep=keep),
    }
    return sparkdl.Trainer(**{**values, **changes})


def iterations_of(folder) -> list[int]:
    return [manifest.iteration for _, manifest in CheckpointStore(folder).candidates()]


def where(index, plan, state) -> tuple[int, bool, int]:
    return os.getpid(), TaskContext.get() is not None, len(state.weights)


@pytest.mark.soak
def test_slices_are_written_by_tasks_in_parallel(spark, df, tmp_path, num_jobs, monkeypatch):
    """One job for the slices: a task each, in processes that are not the driver's."""
    seen, jobs = [], []
    original = ShuffleEngine.map_slices

    def map_slices(self, use, *rest):
        self._versions.settled()  # a job of its own, where the last iteration was one stage
        before = num_jobs()
        results = original(self, use, *rest)
        jobs.append((type(use).__name__, num_jobs() - before))
        if type(use).__name__ == "WriteSlice":
            seen.append(original(self, where, *rest))
        return results

    monkeypatch.setattr(ShuffleEngine, "map_slices", map_slices)
    trained = trainer(tmp_path, iterations=4).fit(df)
    assert jobs == [("TryFolder", 1), ("WriteSlice", 1), ("WriteSlice", 1)]
    for places in seen:
        assert len(places) == 3
        assert all(in_task and pid != os.getpid() for pid, in_task, _ in places)
        total = sum(length for *_, length in places)
        assert total >= sum(p.numel() for p in trained.module.parameters())
    for uri, manifest in CheckpointStore(tmp_path).candidates():
        assert len(manifest.files) == 3
        names = {path.name for path in Path(uri).iterdir()}
        assert names == {
            "manifest.json",
            "history.safetensors",
            *(file.name for file in manifest.files),
        }


class Peak(sparkdl.Callback):
    """The most memory that Python's allocators of the driver held since the first iteration."""

    def on_iteration_end(self, trainer, state) -> None:
        if state.iteration == 1:
            gc.collect()
            tracemalloc.start()

    def on_fit_end(self, trainer, state) -> None:
        self.bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()


def test_the_driver_never_holds_the_weights(df, tmp_path):
    """A checkpoint of 60 MB (weights and Adam's two moments) costs the driver nothing."""
    small, large = Peak(), Peak()
    changes = {"iterations": 4, "keep": 1}
    trainer(tmp_path / "small", callbacks=[small], **changes).fit(df)
    trainer(tmp_path / "large", callbacks=[large], model=partial(model, 500_000), **changes).fit(df)
    (folder,) = (tmp_path / "large").iterdir()
    assert sum(path.stat().st_size for path in folder.iterdir()) > 50e6
    assert large.bytes < small.bytes + 0.5e6


def test_keep(df, tmp_path, caplog):
    """The newest two; what is not sparkdl's stays. Another run is told what it deletes."""
    (tmp_path / "notes.txt").write_text("mine")
    told = []

    class Told(sparkdl.Callback):
        def on_checkpoint(self, trainer, state) -> None:
            told.append(
                (state.iteration, Path(state.checkpoint).name, len(iterations_of(tmp_path)))
            )

    run = trainer(tmp_path, 7, every=1, keep=2, engine="local", callbacks=[Told()])
    run.fit(df)
    assert iterations_of(tmp_path) == [7, 6]
    assert [(iteration, count) for iteration, _, count in told] == [
        (1, 1),
        *((i, 2) for i in range(2, 8)),
    ]
    assert all(name.startswith(f"iteration-{iteration:010d}-") for iteration, name, _ in told)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["notes.txt", *(name for _, name, _ in told[-2:])]
    )
    longer = replace(run, stop=sparkdl.max_iteration(8))
    longer.fit(df, resume="latest")
    assert iterations_of(tmp_path) == [8, 7]
    assert not caplog.messages
    replace(run, stop=sparkdl.max_iteration(1)).fit(df)
    assert caplog.messages == [
        f"{tmp_path} holds checkpoints of another run, the newest of iteration 8, and this run "
        "deletes them when it writes its own (keep=2). Use another folder, or continue that run "
        'with resume="latest".'
    ]


def test_a_run_goes_on_where_older_checkpoints_cannot_be_deleted(df, caplog):
    """As in a bucket that retains its objects; the checkpoint itself is whole. It is told once."""
    fsspec = pytest.importorskip("fsspec")
    memory = pytest.importorskip("fsspec.implementations.memory")

    class Retaining(memory.MemoryFileSystem):
        protocol = "retaining"

        def rm(self, path, *args, **kwargs) -> None:
            if path.endswith("manifest.json"):
                raise PermissionError("it is retained")
            super().rm(path, *args, **kwargs)

    fsspec.register_implementation("retaining", Retaining, clobber=True)
    path = f"retaining://{secrets.token_hex(4)}/run"
    trained = trainer(path, 5, every=1, keep=2, engine="local").fit(df)
    assert len(trained.history) == 5
    assert iterations_of(path) == [5, 4, 3, 2, 1]
    (message,) = [m for m in caplog.messages if "older" in m]
    assert re.fullmatch(
        rf"older checkpoints in {path} cannot be deleted and are kept: cannot delete "
        rf"{path}/iteration-0000000001-\w+/manifest\.json: it is retained\.",
        message,
    )


def test_a_file_system_of_fsspec(df):
    """``memory://`` is in this process, as the local engine is."""
    pytest.importorskip("fsspec")
    path = f"memory://{secrets.token_hex(4)}/run"
    straight = trainer(path, 6, engine="local", checkpoint=None).fit(df)
    trainer(path, 4, engine="local", keep=1).fit(df)
    assert iterations_of(path) == [4]
    resumed = trainer(path, 6, engine="local", keep=1).fit(df, resume="latest")
    assert resumed.history.losses == straight.history.losses
    for one, other in zip(straight.module.parameters(), resumed.module.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_path_that_tasks_do_not_share_is_found_before_iteration_1(df, nothing_left):
    """``memory://`` again: what a task writes is in the task's process."""
    pytest.importorskip("fsspec")
    path = f"memory://{secrets.token_hex(4)}/run"
    counter = Counter()
    with pytest.raises(sparkdl.CheckpointError) as caught:
        trainer(path, callbacks=[counter]).fit(df)
    assert str(caught.value) == (
        f"what an executor wrote into {path} is not visible from the driver. The path must be on a "
        "file system that the driver and all executors share."
    )
    assert counter.iterations == 0


class Counter(sparkdl.Callback):
    iterations = 0

    def on_iteration_end(self, trainer, state) -> None:
        self.iterations += 1


def test_nothing_is_left_in_the_folder_of_a_run_without_a_checkpoint(df, tmp_path):
    """Where folders were tried, and no iteration was made."""
    trainer(tmp_path / "run", callbacks=[StopAtOnce()]).fit(df)
    assert list((tmp_path / "run").iterdir()) == []


class StopAtOnce(sparkdl.Callback):
    def on_fit_start(self, trainer, state) -> None:
        raise sparkdl.StopTraining


class Away(sparkdl.Callback):
    """Moves a folder away after iteration 3; a file is in its place."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_iteration_end(self, trainer, state) -> None:
        if state.iteration == 3:
            self.path.rename(f"{self.path}.gone")
            self.path.touch()


@pytest.mark.parametrize("engine", soak_but(["shuffle", "gang"], ["local", "shuffle", "gang"]))
def test_a_checkpoint_that_fails_ends_the_run(df, tmp_path, nothing_left, engine):
    """Its folder is gone in iteration 3: the checkpoint after iteration 4 is one clear error."""
    path = tmp_path / "run"
    counter = Counter()
    slices = None if engine == "gang" else 3
    run = trainer(path, engine=engine, slices=slices, callbacks=[counter, Away(path)])
    with pytest.raises(sparkdl.CheckpointError) as caught:
        run.fit(df)
    assert str(caught.value).startswith(
        f"after iteration 4 no checkpoint could be written: cannot make the folder {path}"
    )
    assert counter.iterations == 4
    gone = Path(f"{path}.gone")
    path.unlink()
    gone.rename(path)
    resumed = replace(run, callbacks=[]).fit(df, resume="latest")
    assert len(resumed.history) == 6
    assert iterations_of(path) == [6, 4, 2]


def begins_in_vain(monkeypatch, which: int) -> None:
    """The folder of the checkpoint of that iteration is not there for the tasks."""
    original = CheckpointStore.begin

    def begin(self, iteration):
        folder = original(self, iteration)
        if iteration == which:
            Path(folder).rmdir()
        return folder

    monkeypatch.setattr(CheckpointStore, "begin", begin)


def test_folders_that_the_driver_makes_are_tried_before_iteration_1(
    df, tmp_path, monkeypatch, nothing_left
):
    """The one that they are in is open to the tasks."""
    begins_in_vain(monkeypatch, 0)
    counter = Counter()
    with pytest.raises(
        sparkdl.CheckpointError,
        match=rf"an executor cannot write {tmp_path}/iteration-0\S+: No such file or directory\. The",
    ):
        trainer(tmp_path, callbacks=[counter]).fit(df)
    assert counter.iterations == 0
    assert list(tmp_path.iterdir()) == []


def test_a_slice_that_cannot_be_written_is_named(df, tmp_path, monkeypatch, nothing_left):
    """The tasks fail, not the driver: still a CheckpointError, with what they said."""
    begins_in_vain(monkeypatch, 2)
    with pytest.raises(sparkdl.CheckpointError) as caught:
        trainer(tmp_path).fit(df)
    first, *_ = str(caught.value).splitlines()
    assert re.fullmatch(
        r"after iteration 2 no checkpoint could be written: reading the state: partition \d on "
        r"\S.* failed once\. .*CheckpointError: cannot write \S+\.safetensors: "
        r"No such file or directory\.",
        first,
    )


# Other data


def frame_of(spark, rows: int, noise: float = 0.0):
    generator = np.random.default_rng(0)
    records = [((generator.normal(size=WIDTH) * (1 + noise)).tolist(), i % 2) for i in range(rows)]
    data = spark.sparkContext.parallelize(records, 2)
    return spark.createDataFrame(data, "features array<float>, label long")


OTHER_DATA = {  # rows, noise, changes -> epochs and place in the epoch where it goes on
    "last bits that moved": (32, 1e-6, {}, (1, 1)),
    "more rows": (48, 0.0, {}, (1, 0)),
    "another batch size": (32, 0.0, {"batch_size": 8}, (1, 0)),
    "more replicas": (32, 0.0, {"replicas": 4}, (1, 0)),
}


class First(sparkdl.Callback):
    def on_fit_start(self, trainer, state) -> None:
        self.state = state


@pytest.mark.parametrize("row", OTHER_DATA)
def test_a_run_goes_on_with_data_that_changed(spark, df, tmp_path, row):
    rows, noise, changes, place = OTHER_DATA[row]
    trainer(tmp_path, 3, engine="local").fit(df)
    first = First()
    run = trainer(tmp_path, 7, **{"engine": "local", "callbacks": [first], **changes})
    data = frame_of(spark, rows, noise)
    with pytest.raises(sparkdl.ParameterError, match="belongs to another run") as caught:
        run.fit(data, resume="latest")
    assert str(caught.value).endswith("To continue with this data anyway, pass any_data=True.")
    trained = run.fit(data, resume="latest", any_data=True)
    assert (first.state.epoch, first.state.position) == place
    assert [record["iteration"] for record in trained.history] == [1, 2, 3, 4, 5, 6, 7]


# The model of a checkpoint


def as_they_are(one: sparkdl.TrainedModel, other: sparkdl.TrainedModel) -> bool:
    """Weights and all buffers, to the bit."""
    pairs = [{**dict(t.module.named_buffers()), **t.module.state_dict()} for t in (one, other)]
    assert pairs[0].keys() == pairs[1].keys()
    return all(torch.equal(value, pairs[1][name]) for name, value in pairs[0].items())


def waves(spark, folder, **changes) -> tuple[sparkdl.TrainedModel, object]:
    rows = frame_of(spark, 32).selectExpr("features", "float(label) AS label")
    values = {
        "model": partial(Waves, names={0: "no", 1: "yes"}),
        "loss": nn.BCELoss(),
        "freeze": ["frozen"],
        "seed": 9,
        "engine": "local",
        "ema": 0.9,
        "validation": sparkdl.Validation(rows, ["accuracy"], best="loss"),
        **changes,
    }
    return trainer(folder, 5, **values).fit(rows), rows


def test_the_model_of_a_checkpoint(spark, tmp_path):
    """As fit returned it: to be scored, applied, saved; and so is what was saved."""
    trained, rows = waves(spark, tmp_path / "run")
    newest = max((tmp_path / "run").iterdir())
    saved = sparkdl.load(trained.save(tmp_path / "model"))
    found = sparkdl.load(newest)
    assert found.module.names == {0: "no", 1: "yes"}
    expected = trained.evaluate(rows, ["accuracy"])["accuracy"]
    for loaded in (
        saved,
        found,
        sparkdl.load(tmp_path / "run"),
        sparkdl.load(found.save(tmp_path / "2")),
    ):
        assert as_they_are(loaded, trained)
        assert loaded.evaluate(rows, ["accuracy"]) == {"accuracy": expected}
        assert loaded.history.losses == trained.history.losses
    assert as_they_are(found.ema, trained.ema)
    assert as_they_are(found.best, trained.best)
    older = sparkdl.load(min((tmp_path / "run").iterdir()))
    assert len(older.history) == 2
    assert not as_they_are(older, trained)
    text = (newest / "manifest.json").read_bytes()
    (newest / "manifest.json").write_bytes(text[:-9])
    assert len(sparkdl.load(tmp_path / "run").history) == 4


def test_a_run_is_told_at_its_start_that_its_model_cannot_be_saved(df, tmp_path, caplog):
    run = trainer(tmp_path / "run", 2, engine="local", output=lambda returned: returned)
    trained = run.fit(df)
    [told] = caplog.messages
    assert told.startswith("the checkpoints of this run can be resumed, but sparkdl.load cannot")
    with pytest.raises(sparkdl.ParameterError) as caught:
        trained.save(tmp_path / "model")
    assert told.endswith(f": {caught.value}")


def test_what_a_checkpoint_does_not_tell_of_its_model(spark, tmp_path):
    """No pickle is in it, and no secret: the model is given to load."""
    trained, _ = waves(spark, tmp_path / "a", model=lambda: Waves())
    with pytest.raises(
        sparkdl.ModelError, match="does not record how its model is built: it is a lambda"
    ):
        sparkdl.load(tmp_path / "a")
    assert as_they_are(sparkdl.load(tmp_path / "a", model=Waves), trained)
    with pytest.raises(sparkdl.ModelError, match="frozen hold other values"):
        sparkdl.load(tmp_path / "a", model=Waves(WIDTH))
    with pytest.raises(sparkdl.ModelError, match=r'"angles" is \[7, 4\] here and \[6, 4\] in the'):
        sparkdl.load(tmp_path / "a", model=partial(Waves, 7))
    waves(spark, tmp_path / "b", model=partial(Waves, names={"api_key": "hunter2"}))
    assert b"hunter2" not in max((tmp_path / "b").glob("*/manifest.json")).read_bytes()
    with pytest.raises(sparkdl.ModelError, match="its arguments look like secrets"):
        sparkdl.load(tmp_path / "b")
    (tmp_path / "none").mkdir()
    with pytest.raises(FileNotFoundError):
        sparkdl.load(tmp_path / "none")


def test_a_model_of_a_checkpoint_elsewhere(spark):
    pytest.importorskip("fsspec")
    path = f"memory://{secrets.token_hex(4)}/run"
    trained, _ = waves(spark, path)
    assert as_they_are(sparkdl.load(path), trained)
    with pytest.raises(sparkdl.ParameterError, match="there is no checkpoint in memory://"):
        sparkdl.load(f"{path}-of-nobody")


# Bounded


def slab_files(context) -> set[str]:
    roots = [d for base in ("/dev/shm", "/tmp") for d in Path(base).glob("sparkdl-*")]
    mine = [root for root in roots if context.applicationId in root.name]
    return {str(path) for root in mine for path in root.iterdir()}


class Census(sparkdl.Callback):
    """Counts what there is after some iterations."""

    def __init__(self, context, at: set[int]) -> None:
        self.context, self.at = context, at
        self.before = slab_files(context)
        self.counts: dict[int, dict[str, object]] = {}
        self.bytes: dict[int, int] = {}

    def on_fit_start(self, trainer, state) -> None:
        tracemalloc.start()

    def on_iteration_end(self, trainer, state) -> None:
        if state.iteration in self.at:
            gc.collect()
            self.bytes[state.iteration] = tracemalloc.get_traced_memory()[0]
            self.counts[state.iteration] = {
                "persisted RDDs": innards.persisted(self.context),
                "cached blocks": innards.blocks(self.context, "rdd"),
                "slabs": len(slab_files(self.context) - self.before),
            }

    def on_fit_end(self, trainer, state) -> None:
        tracemalloc.stop()


@pytest.mark.soak
def test_three_hundred_iterations_with_checkpoints_and_validations_stay_flat(
    spark, df, tmp_path, nothing_left
):
    census = Census(spark.sparkContext, {49, 159, 309})
    validation = sparkdl.Validation(df, ["accuracy"], every=sparkdl.every(10), best="loss")
    run = trainer(tmp_path, 310, every=10, keep=2, validation=validation, callbacks=[census])
    trained = run.fit(df)
    assert len(trained.history.validations) == 31
    assert trained.best is not None
    assert iterations_of(tmp_path) == [310, 300]
    first = census.counts[49]
    assert first == census.counts[159] == census.counts[309]
    assert (census.bytes[309] - census.bytes[159]) / 150 < 600  # history, validations
