"""Going on where an earlier fit ended: start=, partial_fit, Structured Streaming."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from launch import soak_but
from pyspark import cloudpickle
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, OneCycleLR, ReduceLROnPlateau

import sparkdl
from sparkdl.checkpoint import save as checkpointing
from sparkdl.loop import state as loop_state

pytestmark = pytest.mark.spark
WIDTH, CLASSES = 5, 3


def model(hidden: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, CLASSES))


def with_buffers() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, CLASSES)
    )


cloudpickle.register_pickle_by_value(sys.modules[__name__])


def rows(count: int, seed: int) -> list[tuple[list[float], int]]:
    generator = np.random.default_rng(seed)
    return [
        (generator.normal(size=WIDTH).astype("float32").tolist(), int(generator.integers(CLASSES)))
        for _ in range(count)
    ]


SCHEMA = "features array<float>, label long"


@pytest.fixture(scope="module")
def frame(spark):
    made = {}

    def get(count: int, seed: int = 0, partitions: int = 2):
        key = count, seed, partitions
        if key not in made:
            records = spark.sparkContext.parallelize(rows(count, seed), partitions)
            made[key] = spark.createDataFrame(records, SCHEMA)
        return made[key]

    return get


def trainer(**changes) -> sparkdl.Trainer:
    values = {
        "model": model,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.Adam, lr=1e-2),
        "batch_size": 8,
        "replicas": 2,
        "slices": 3,
        "engine": "local",
        "stop": sparkdl.max_epoch(1),
    }
    return sparkdl.Trainer(**{**values, **changes})


def bits(trained: sparkdl.TrainedModel) -> dict[str, bytes]:
    return {k: v.numpy().tobytes() for k, v in trained.module.state_dict().items()}


# start=


@pytest.mark.parametrize("engine", soak_but(["local"], ["local", "shuffle"]))
def test_with_the_optimizers_state_two_fits_are_one(frame, engine):
    """A row a replica, so that an epoch is one iteration and has one order."""
    df = frame(4, partitions=4)
    whole = trainer(engine=engine, batch_size=4, replicas=4, ema=0.9, keep_optimizer_state=True)
    once = replace(whole, stop=sparkdl.max_epoch(6)).fit(df)
    first = replace(whole, stop=sparkdl.max_epoch(4)).fit(df)
    second = replace(whole, slices=2, stop=sparkdl.max_epoch(2)).fit(df, start=first)
    assert bits(second) == bits(once)
    assert bits(second.ema) == bits(once.ema)
    assert second.history.losses == once.history.losses[4:]
    assert [record["iteration"] for record in second.history] == [1, 2]
    without = replace(whole, stop=sparkdl.max_epoch(2)).fit(df, start=first, optimizer_state=False)
    assert without.history.losses[0] == once.history.losses[4]
    assert bits(without) != bits(once)


class Narrow(sparkdl.Callback):
    """From the end of the training on a job may bring less to the driver than the state takes."""

    def __init__(self, context) -> None:
        self.conf = context._jsc.sc().conf()

    def on_fit_end(self, trainer, state) -> None:
        self.conf.set("spark.driver.maxResultSize", "100k")


@pytest.mark.soak
def test_state_that_cannot_be_brought_to_the_driver_does_not_cost_the_model(
    spark, frame, caplog, nothing_left
):
    """The weights take 52 kB, with Adam's moments three times that."""
    run = trainer(engine="shuffle", model=partial(model, 1400), keep_optimizer_state=True)
    narrow = Narrow(spark.sparkContext)
    expected = run.fit(frame(16))
    assert expected.optimizer_state is not None
    before = narrow.conf.get("spark.driver.maxResultSize", "1g")
    try:
        with caplog.at_level("WARNING", logger="sparkdl"):
            trained = replace(run, callbacks=[narrow]).fit(frame(16))
        with pytest.raises(sparkdl.TrainingError, match="maxResultSize"):
            online(engine="shuffle", model=partial(model, 1400)).partial_fit(frame(16))
    finally:
        narrow.conf.set("spark.driver.maxResultSize", before)
    assert bits(trained) == bits(expected)
    assert trained.optimizer_state is None
    (said,) = [r.getMessage() for r in caplog.records if "has no optimizer state" in r.getMessage()]
    assert "spark.driver.maxResultSize" in said
    nothing_left()


def test_buffers_begin_where_they_ended(frame):
    df = frame(16)
    first = trainer(model=with_buffers, keep_optimizer_state=True).fit(df)
    still = trainer(model=with_buffers, optimizer=partial(torch.optim.SGD, lr=0.0))
    second = still.fit(df, start=first, optimizer_state=False)
    for name, value in first.module.state_dict().items():
        same = torch.equal(value, second.module.state_dict()[name])
        assert same == (not name.startswith("1.") or name in ("1.weight", "1.bias")), name
    count = int(first.module.state_dict()["1.num_batches_tracked"])
    assert int(second.module.state_dict()["1.num_batches_tracked"]) == 2 * count > 0


class Centered(nn.Module):
    """A running mean that no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.rand(WIDTH), persistent=False)
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.linear(x - self.mean)


def test_buffers_of_no_state_dict_begin_where_they_ended_too(frame):
    df = frame(16)
    first = trainer(model=Centered).fit(df)
    stopped = trainer(model=Centered, seed=3, callbacks=[StopAtOnce()]).fit(df, start=first)
    assert torch.equal(stopped.module.mean, first.module.mean)
    assert not torch.equal(trainer(model=Centered, seed=3).fit(df).module.mean, first.module.mean)


class StopAtOnce(sparkdl.Callback):
    def on_fit_start(self, trainer, state) -> None:
        raise sparkdl.StopTraining


def mistake(call) -> str:
    with pytest.raises(sparkdl.UserError) as caught:
        call()
    return str(caught.value)


def test_what_start_cannot_be(frame):
    df = frame(8)
    kept = trainer(keep_optimizer_state=True).fit(df)
    plain = trainer().fit(df)
    other = trainer(model=partial(model, 4))
    assert mistake(lambda: other.fit(df, start=plain)) == (
        'weights do not fit the model: "0.weight" is [8, 5] in the weights and [4, 5] in the model; '
        '"0.bias" is [8] in the weights and [4] in the model; '
        '"2.weight" is [3, 8] in the weights and [3, 4] in the model. '
        "To load what fits by name, pass strict_weights=False."
    )
    assert mistake(lambda: trainer().fit(df, start=plain, optimizer_state=True)) == (
        "the model in start= has no optimizer state, because it was trained without "
        "Trainer(keep_optimizer_state=True). Train it with that, or pass optimizer_state=False."
    )
    sgd = trainer(optimizer=partial(torch.optim.SGD, lr=0.1))
    assert mistake(lambda: sgd.fit(df, start=kept)) == (
        "the optimizer state of the model in start= does not fit: the optimizer is SGD here and "
        "Adam in start. Pass optimizer_state=False to continue with the weights alone."
    )
    sgd.fit(df, start=kept, optimizer_state=False)
    frozen = trainer(freeze=["0"])
    assert mistake(lambda: frozen.fit(df, start=kept)) == (
        'the optimizer state of the model in start= does not fit: parameter "0.weight" of start is '
        'not in this model; parameter "0.bias" of start is not in this model. Pass '
        "optimizer_state=False to continue with the weights alone."
    )
    trained = frozen.fit(df, start=kept, optimizer_state=False)
    for name in ("0.weight", "0.bias"):
        assert bits(trained)[name] == bits(kept)[name]


# partial_fit


def plain_torch(batches, seed: int = 0) -> nn.Module:
    """One process, each batch as one step, the schedule stepped after each."""
    torch.manual_seed(seed)
    module = model()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
    schedule = ExponentialLR(optimizer, 0.5)
    for batch in batches:
        inputs = torch.tensor([features for features, _ in batch])
        labels = torch.tensor([label for _, label in batch])
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(inputs), labels).backward()
        optimizer.step()
        schedule.step()
    return module


def online(**changes) -> sparkdl.Trainer:
    values = {
        "optimizer": partial(torch.optim.Adam, lr=0.05),
        "schedule": partial(ExponentialLR, gamma=0.5),
        "batch_size": 100,
    }
    return trainer(**{**values, **changes})


@pytest.mark.parametrize("engine", soak_but(["shuffle"], ["local", "shuffle"]))
def test_three_batches_are_three_steps_of_plain_torch(frame, nothing_left, engine):
    """Each batch is one global batch: Adam's moments and the learning rate go on."""
    batches = [rows(count, seed) for seed, count in enumerate((12, 7, 9))]
    expected = plain_torch(batches)
    run = online(engine=engine)
    for seed, batch in enumerate(batches):
        trained = run.partial_fit(frame(len(batch), seed))
        nothing_left()
    for one, other in zip(trained.module.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)
    history = list(trained.history)
    assert [record["iteration"] for record in history] == [1, 2, 3]
    assert [record["epoch"] for record in history] == [1, 2, 3]
    assert [record["samples"] for record in history] == [12, 19, 28]
    assert [record["learning_rate"] for record in history] == [0.05, 0.025, 0.0125]


def passes(run: sparkdl.Trainer, frame, seeds) -> sparkdl.TrainedModel:
    for seed in seeds:
        trained = run.partial_fit(frame(20, seed))
    return trained


def test_it_is_a_function_of_what_it_was_given(frame):
    validation = sparkdl.Validation(frame(10, 99), best="loss")
    runs = [
        online(engine=engine, model=with_buffers, batch_size=7, ema=0.9, validation=validation)
        for engine in ("local", "shuffle")
    ]
    one, other = (passes(run, frame, range(2)) for run in runs)
    assert bits(other) == bits(one)
    assert bits(other.ema) == bits(one.ema)
    assert bits(other.best) == bits(one.best)
    assert other.history.losses == one.history.losses
    assert [v["epoch"] for v in one.history.validations] == [1, 2]


def test_the_best_of_an_earlier_batch_is_kept(frame):
    """The learning rate ruins the model in the second and third batch."""
    validation = sparkdl.Validation(frame(12, 0), best="loss")
    run = online(
        optimizer=partial(torch.optim.SGD, lr=0.01),
        schedule=partial(ExponentialLR, gamma=1000.0),
        validation=validation,
        batch_size=4,
    )
    first = run.partial_fit(frame(4, 0))
    later = passes(run, frame, (1, 2))
    losses = [v["metrics"]["loss"] for v in later.history.validations]
    assert losses[0] == min(losses)
    assert bits(later.best) == bits(first.best) == bits(first)
    assert bits(later) != bits(first)


def test_an_empty_batch_changes_nothing(spark, frame):
    run = online()
    first = run.partial_fit(frame(12))
    assert run.partial_fit(spark.createDataFrame([], SCHEMA)) is first
    second = run.partial_fit(frame(9, 2))
    assert [record["samples"] for record in second.history] == [12, 21]
    assert [record["samples"] for record in first.history] == [12]  # its own copy
    assert mistake(lambda: online().partial_fit(spark.createDataFrame([], SCHEMA))) == (
        "the data is empty: it has no rows."
    )


def test_stop_plays_no_part(frame):
    """Also not where a schedule has an end: three batches of two iterations, of OneCycle's six."""
    run = online(
        schedule=partial(OneCycleLR, max_lr=0.1, total_steps=6),
        stop=sparkdl.max_iteration(1000),
        batch_size=10,
    )
    trained = passes(run, frame, range(3))
    module = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
    schedule = OneCycleLR(optimizer, max_lr=0.1, total_steps=6)
    expected = []
    for step in range(6):
        expected.append(optimizer.param_groups[0]["lr"])
        if step < 5:
            optimizer.step()
            schedule.step()
    assert [record["learning_rate"] for record in trained.history] == expected


@pytest.mark.soak
def test_a_new_trainer_goes_on_from_the_checkpoint(frame, tmp_path):
    """As after the driver was restarted between two batches; with the bits of another engine."""
    changes = {
        "model": with_buffers,
        "batch_size": 7,
        "ema": 0.9,
        "validation": sparkdl.Validation(frame(10, 99), best="loss"),
    }
    expected = passes(online(**changes), frame, range(3))
    kept = {**changes, "checkpoint": sparkdl.Checkpoint(tmp_path, keep=1), "engine": "shuffle"}
    passes(online(**kept), frame, range(1))
    restarted = online(**kept)
    restarted.partial_fit(frame(20, 1), resume="latest")
    trained = restarted.partial_fit(frame(20, 2), resume="latest")  # has its own state by now
    assert bits(trained) == bits(expected)
    assert bits(trained.ema) == bits(expected.ema)
    assert bits(trained.best) == bits(expected.best)
    assert trained.history.losses == expected.history.losses
    assert trained.history.validations == expected.history.validations
    assert len(list(tmp_path.iterdir())) == 1
    wider = online(**{**kept, "model": partial(model, 9)})
    said = mistake(lambda: wider.partial_fit(frame(20, 4), resume="latest"))
    assert 'parameter "0.weight" is [9, 5] here and [8, 5] in the checkpoint' in said


class _Crash(sparkdl.Callback):
    """Ends the process, as far as the run can tell, after an iteration."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def on_epoch_start(self, trainer, state) -> None:
        if state.iteration == self.iteration:
            raise KeyboardInterrupt

    def on_iteration_start(self, trainer, state) -> None:
        self.on_epoch_start(trainer, state)


def test_each_batch_of_a_stream_is_trained_on_once(frame, tmp_path, caplog):
    """Whether the crash came after a batch, or within one; in the same program, too."""
    expected = passes(online(batch_size=7), frame, range(3))
    kept = {"batch_size": 7, "checkpoint": sparkdl.Checkpoint(tmp_path, every=sparkdl.every(2))}
    first = online(**kept)
    for _ in range(2):
        first.partial_fit(frame(20, 0), resume="latest", batch=0)
    crashing = online(**kept, callbacks=[_Crash(5)])  # 3 iterations a batch; the checkpoint is of 4
    with pytest.raises(KeyboardInterrupt):
        crashing.partial_fit(frame(20, 1), resume="latest", batch=1)
    for _ in range(2):  # the second time, the batch is done
        restarted = online(**kept)
        trained = restarted.partial_fit(frame(20, 1), resume="latest", batch=1)
    assert "batch 1 changes nothing: the model was trained on the batches up to 1." in caplog.text
    trained = restarted.partial_fit(frame(20, 2), resume="latest", batch=2)
    assert bits(trained) == bits(expected)
    assert trained.history.losses == expected.history.losses
    with pytest.raises(KeyboardInterrupt):
        online(**kept, callbacks=[_Crash(11)]).partial_fit(frame(20, 3), resume="latest", batch=3)
    assert "count twice" not in caplog.text
    online(**kept).partial_fit(frame(20, 4), resume="latest", batch=3)
    assert "batch 3 of the stream has other rows" in caplog.text
    assert "foreachBatch passes second" in mistake(
        lambda: online().partial_fit(frame(8), batch="1")
    )


def test_latest_of_nothing_is_the_beginning(frame, tmp_path):
    run = online(checkpoint=sparkdl.Checkpoint(tmp_path / "run"))
    assert bits(run.partial_fit(frame(12), resume="latest")) == bits(
        online().partial_fit(frame(12))
    )
    assert len(list((tmp_path / "run").iterdir())) == 1


def test_data_that_cannot_be_read_is_told_in_a_later_pass_too(spark, frame):
    run = online()
    run.partial_fit(frame(20))
    with pytest.raises(sparkdl.DataError, match="the data cannot be read: "):
        run.partial_fit(frame(20).where("CAST('x' || label AS long) = 0"))
    with pytest.raises(sparkdl.DataError, match="fit takes a DataFrame or an RDD, not"):
        run.partial_fit([([1.0] * WIDTH, 0)])


def test_a_pass_that_fails_changes_nothing(spark, frame):
    run = online()
    first = run.partial_fit(frame(12))
    bad = spark.createDataFrame([([1.0, 2.0], 0)], SCHEMA)
    with pytest.raises(sparkdl.UserError):
        run.partial_fit(bad)
    expected = online()
    expected.partial_fit(frame(12))
    assert bits(run.partial_fit(frame(9, 1))) == bits(expected.partial_fit(frame(9, 1)))
    assert len(first.history) == 1


# As many passes as there may be


class Counted:
    """A schedule's function; how often it is called in a pass."""

    calls = 0

    def __call__(self, step: int) -> float:
        Counted.calls += 1
        return 1 / (1 + step)


class FailsOnce(sparkdl.Callback):
    def on_iteration_end(self, trainer, state) -> None:
        if state.iteration == 5:
            self.on_iteration_end = lambda *_: None
            raise ArithmeticError("once")


@pytest.mark.soak
def test_a_pass_costs_the_same_however_many_came_before(frame, tmp_path):
    """Neither the schedule nor the history is gone through again; where a pass fails, the next one
    makes its schedule anew, and that stands where it would."""
    df, per_pass, values = frame(16), [], []
    made = {"schedule": partial(LambdaLR, lr_lambda=Counted()), "batch_size": 8}
    run = online(**made, callbacks=[FailsOnce()])
    for _ in range(5):
        Counted.calls = 0
        try:
            values.append(run.partial_fit(df))
        except ArithmeticError:
            continue
        per_pass.append(Counted.calls)
    assert [len(one.history) for one in values] == [2, 4, 6, 8]
    assert per_pass[3] == per_pass[1]  # the one between, after a failure, is the exception
    rates = [record["learning_rate"] for record in values[-1].history]
    assert rates == pytest.approx([0.05 / (1 + step) for step in range(8)])
    assert [record["iteration"] for record in values[0].history] == [1, 2]


class Known(sparkdl.Callback):
    """How many validations the state knows after each."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_validation_end(self, trainer, state) -> None:
        self.counts.append(len(state.validations))


@pytest.mark.soak
@pytest.mark.parametrize("follows", [False, True])
def test_validations_of_a_stream_do_not_grow_for_ever(frame, tmp_path, monkeypatch, follows):
    """Except where the place of a schedule follows from all of them."""
    monkeypatch.setattr(loop_state, "MOST_VALIDATIONS", 1)
    known = Known()
    run = online(
        validation=sparkdl.Validation(frame(10, 99)),
        checkpoint=sparkdl.Checkpoint(tmp_path),
        callbacks=[known],
        schedule=partial(ReduceLROnPlateau, patience=0) if follows else None,
    )
    expected = passes(run, frame, range(7))
    told = json.loads(max(tmp_path.glob("*/manifest.json")).read_text())["validations"]
    assert len(expected.history.validations) == 7
    if follows:
        assert known.counts == [1, 2, 3, 4, 5, 6, 7]
        assert len(told) == 7
    else:
        assert known.counts[:2] == [1, 2]
        assert max(known.counts) <= 1 + 2 + 1
        assert told[-1]["iteration"] == 7
        assert len(told) <= 4


def test_a_checkpoint_of_a_pass_does_not_grow_for_ever(frame, tmp_path, monkeypatch):
    """It holds the end of the history, from which a new trainer goes on."""
    monkeypatch.setattr(checkpointing, "TAIL", 3)
    kept = {"checkpoint": sparkdl.Checkpoint(tmp_path, keep=None), "batch_size": 8}
    expected = passes(online(**kept), frame, (0, 0, 0))
    sizes = [p.stat().st_size for p in sorted(tmp_path.glob("*/history.safetensors"))]
    assert len(expected.history) == 9
    assert max(sizes) < 1.2 * sizes[0]
    fourth = online(**kept).partial_fit(frame(20), resume="latest")
    assert [record["iteration"] for record in fourth.history] == [7, 8, 9, 10, 11, 12]
    assert fourth.history.losses[:3] == expected.history.losses[6:]
    assert fourth.history.epochs()[-1]["samples"] == 20


# Structured Streaming


@pytest.mark.timeout(200)
def test_each_micro_batch_of_a_file_stream(spark, frame, tmp_path, nothing_left):
    """Two files, one a micro-batch; then a restart of the query with a new trainer and file."""
    source, state = tmp_path / "files", tmp_path / "state"
    source.mkdir()
    seen: list[tuple[int, int, int]] = []

    def arrive(seed: int) -> None:
        made = tmp_path / f"made-{seed}"
        frame(20, seed).coalesce(1).write.parquet(str(made))
        (file,) = made.glob("*.parquet")
        file.rename(source / f"{seed}.parquet")

    def learn(run: sparkdl.Trainer) -> sparkdl.TrainedModel:
        results = []

        def on_batch(batch, number: int) -> None:
            trained = run.partial_fit(batch, resume="latest")
            nothing_left_but_the_stream()
            results.append(trained)
            seen.append((number, batch.count(), len(trained.history)))

        def nothing_left_but_the_stream() -> None:
            assert not list(Path("/dev/shm").glob(f"sparkdl-{spark.sparkContext.applicationId}-*"))
            assert spark.sparkContext._jsc.getPersistentRDDs().isEmpty()

        stream = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
        query = (
            stream.parquet(str(source))
            .writeStream.foreachBatch(on_batch)
            .option("checkpointLocation", str(state))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return results[-1]

    def run() -> sparkdl.Trainer:
        checkpoint = sparkdl.Checkpoint(tmp_path / "run", keep=1)
        return online(engine="shuffle", batch_size=10, checkpoint=checkpoint)

    for seed in range(2):
        arrive(seed)
    learn(run())
    arrive(2)
    trained = learn(run())
    assert seen == [(0, 20, 2), (1, 20, 4), (2, 20, 6)]
    by_hand = online(batch_size=10)
    for seed in range(3):
        data = spark.read.schema(SCHEMA).parquet(str(source / f"{seed}.parquet"))
        expected = by_hand.partial_fit(data)
    assert bits(trained) == bits(expected)
    assert trained.history.losses == expected.history.losses
    assert copy.copy(trained).optimizer_state is not None
