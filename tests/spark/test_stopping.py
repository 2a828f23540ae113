"""A training that ends before its stop trigger says so: interrupted by the user, or by a callback."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from launch import soak_but
from pyspark import cloudpickle
from torch import nn

import sparkdl
from sparkdl.checkpoint.store import CheckpointStore

pytestmark = pytest.mark.spark
ENGINES = ["local", "shuffle", "gang"]
WIDTH = 4


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 2))


cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def df(spark):
    generator = np.random.default_rng(0)
    rows = [(generator.normal(size=WIDTH).tolist(), i % 2) for i in range(32)]
    records = spark.sparkContext.parallelize(rows, 2)
    return spark.createDataFrame(records, "features array<float>, label long")


def trainer(engine: str = "local", **changes) -> sparkdl.Trainer:
    values = {
        "model": model,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.Adam, lr=1e-2),
        "batch_size": 8,
        "replicas": 2,
        "engine": engine,
        "stop": sparkdl.max_iteration(400),
    }
    return sparkdl.Trainer(**{**values, **changes})


def bits(trained: sparkdl.TrainedModel) -> list[bytes]:
    return [value.numpy().tobytes() for value in trained.module.state_dict().values()]


class At(sparkdl.Callback):
    """Does something in a hook of an iteration, as soon as it is told of it."""

    def __init__(self, action, iteration: int = 6, hook: str = "on_iteration_end") -> None:
        self.action, self.iteration, self.ended = action, iteration, False
        setattr(self, hook, self.told)

    def told(self, trainer, state) -> None:
        if state.iteration == self.iteration:
            self.action()

    def on_fit_end(self, trainer, state) -> None:
        self.ended = True


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def stop_training() -> None:
    raise sparkdl.StopTraining


def stop_with_a_reason() -> None:
    raise sparkdl.StopTraining("flat")


ENDS = {
    "interrupted": (interrupt, "on_iteration_end"),
    "interrupted before an iteration": (interrupt, "on_iteration_start"),
    "callback": (stop_training, "on_iteration_end"),
    "callback: flat": (stop_with_a_reason, "on_epoch_end"),
}


ENDS_IN_CI = [
    ("interrupted", "local"),
    ("interrupted", "gang"),
    ("interrupted before an iteration", "shuffle"),
    ("callback", "shuffle"),
    ("callback: flat", "gang"),
]


@pytest.mark.parametrize(
    ("row", "engine"), soak_but(ENDS_IN_CI, [(row, engine) for row in ENDS for engine in ENGINES])
)
def test_the_model_comes_as_it_stands(df, tmp_path, nothing_left, caplog, engine, row):
    """That of a run of as many iterations, with its last checkpoint, from which a run can go on. The
    ranks of a gang have begun some that are completed."""
    action, hook = ENDS[row]
    handler = signal.getsignal(signal.SIGINT)
    at, heard = At(action, 8 if "epoch" in hook else 6, hook), At(lambda: None)
    checkpoint = sparkdl.Checkpoint(tmp_path, every=sparkdl.every(1000), keep=None)
    trained = trainer(engine, callbacks=[at, heard], checkpoint=checkpoint).fit(df)
    done = len(trained.history)
    least = at.iteration + (hook == "on_iteration_start")
    assert least <= done < 100
    assert done == least or engine == "gang"
    assert trained.history.stopped == row.removesuffix(" before an iteration")
    assert at.ended
    assert heard.ended
    assert signal.getsignal(signal.SIGINT) is handler
    nothing_left()
    told = [m for m in caplog.messages if m.startswith("interrupted: ")]
    assert len(told) == ("interrupted" in row)
    straight = trainer(engine, stop=sparkdl.max_iteration(done)).fit(df)
    assert straight.history.stopped is None
    assert bits(trained) == bits(straight)
    assert trained.history.losses == straight.history.losses
    ((uri, manifest),) = CheckpointStore(tmp_path).candidates()
    assert manifest.iteration == done
    if engine == "local":
        longer = replace(trainer(engine), stop=sparkdl.max_iteration(done + 5))
        resumed = longer.fit(df, resume=uri)
        assert bits(resumed) == bits(replace(longer, checkpoint=None).fit(df))
        assert resumed.history.stopped is None


def test_a_second_interrupt_ends_the_fit_at_once(df, nothing_left):
    handler = signal.getsignal(signal.SIGINT)
    twice = [At(interrupt, 3), At(interrupt, 3)]
    with pytest.raises(KeyboardInterrupt):
        trainer("shuffle", callbacks=twice).fit(df)
    assert not any(at.ended for at in twice)
    assert signal.getsignal(signal.SIGINT) is handler
    nothing_left()


def test_an_interrupt_while_rows_are_read_ends_the_fit_at_once(df, nothing_left, caplog):
    """Without the stacks of Py4J, whose call into the JVM it interrupts, and of PySpark's handler."""
    driver, handler = os.getpid(), signal.getsignal(signal.SIGINT)
    last = df.collect()[-1].features

    def press(value):
        if os.getpid() != driver and list(value) == last:
            os.kill(driver, signal.SIGINT)
        return value

    with pytest.raises(KeyboardInterrupt) as caught:
        trainer("shuffle", columns={"features": sparkdl.Convert(press)}).fit(df)
    assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1
    assert not [record for record in caplog.records if "py4j" in record.pathname]
    assert signal.getsignal(signal.SIGINT) is handler
    nothing_left()


def test_an_iteration_that_fails_after_an_interrupt_is_an_interrupt(df, monkeypatch):
    """Ctrl-C goes to all processes of a terminal: Spark may end with it."""
    from sparkdl.engines.local.engine import LocalEngine

    step = LocalEngine.run

    def fails(self, iteration, then=()):
        if iteration.index == 4:
            raise ConnectionError("the JVM is gone")
        return step(self, iteration, then)

    monkeypatch.setattr(LocalEngine, "run", fails)
    with pytest.raises(ConnectionError):
        trainer().fit(df)
    with pytest.raises(KeyboardInterrupt) as caught:
        trainer(callbacks=[At(interrupt, 4, "on_iteration_start")]).fit(df)
    assert isinstance(caught.value.__cause__, ConnectionError)


def test_before_the_first_iteration(df, tmp_path):
    """The model is the initial one; there is nothing to keep."""
    at = At(interrupt, 0, "on_fit_start")
    checkpoint = sparkdl.Checkpoint(tmp_path)
    trained = trainer(callbacks=[at], checkpoint=checkpoint).fit(df)
    assert len(trained.history) == 0
    assert trained.history.stopped == "interrupted"
    assert not list(tmp_path.iterdir())


def test_at_the_result_there_is_nothing_left_to_stop(df):
    class Late(sparkdl.Callback):
        def on_result(self, trainer, trained) -> None:
            raise sparkdl.StopTraining

    trained = trainer(callbacks=[Late()], stop=sparkdl.max_iteration(8)).fit(df)
    assert (len(trained.history), trained.history.stopped) == (8, None)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.default_int_handler])
def test_handlers_of_others(df, handler):
    """Where SIGINT is ignored it stays so; what a callback puts there stays."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        ignored = trainer(callbacks=[At(interrupt)], stop=sparkdl.max_iteration(8)).fit(df)
        assert len(ignored.history) == (8 if handler == signal.SIG_IGN else 6)
        assert signal.getsignal(signal.SIGINT) is handler

        def other(*_) -> None:
            pass

        own = At(lambda: signal.signal(signal.SIGINT, other))
        trainer(callbacks=[own], stop=sparkdl.max_iteration(8)).fit(df)
        assert signal.getsignal(signal.SIGINT) is other
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread_nothing_is_changed(df):
    seen = []
    handler = signal.getsignal(signal.SIGINT)

    def fit() -> None:
        look = At(lambda: seen.append(signal.getsignal(signal.SIGINT)))
        trained = trainer(callbacks=[look, At(stop_training)]).fit(df)
        seen.append(trained.history.stopped)

    thread = threading.Thread(target=fit)
    thread.start()
    thread.join()
    assert seen == [handler, "callback"]


def test_a_pass_that_is_cut_short(df, tmp_path):
    """Its work is kept, in a checkpoint too; the next pass goes on from there."""
    checkpoint = sparkdl.Checkpoint(tmp_path, every=sparkdl.every(1000))
    at = At(interrupt, 2)
    online = trainer(callbacks=[at], checkpoint=checkpoint)
    cut = online.partial_fit(df)
    assert (len(cut.history), cut.history.stopped) == (2, "interrupted")
    assert [m.iteration for _, m in CheckpointStore(tmp_path).candidates()] == [2]
    whole = online.partial_fit(df)
    assert (len(whole.history), whole.history.stopped) == (6, None)
    assert [e["iterations"] for e in whole.history.epochs()] == [2, 4]  # each pass is an epoch
    assert cut.history.stopped == "interrupted"
    assert [m.iteration for _, m in CheckpointStore(tmp_path).candidates()] == [2]


# The last checkpoint

EVERY = {4: [8, 4], 3: [8, 6, 3], 1000: [8]}


@pytest.mark.parametrize(
    ("every", "asynchronous"),
    soak_but(
        [(3, True), (1000, False)],
        [(every, asynchronous) for every in EVERY for asynchronous in (False, True)],
    ),
)
def test_a_run_leaves_a_checkpoint_of_its_end(df, tmp_path, every, asynchronous):
    """One only, also where one is written then anyway, and where nothing was left to be done."""
    checkpoint = sparkdl.Checkpoint(
        tmp_path / "run", every=sparkdl.every(every), keep=None, asynchronous=asynchronous
    )
    engine = "gang" if asynchronous else "local"
    run = trainer(engine, checkpoint=checkpoint, stop=sparkdl.max_iteration(8))
    run.fit(df)
    found = list(CheckpointStore(tmp_path / "run").candidates())
    assert [manifest.iteration for _, manifest in found] == EVERY[every]
    run.fit(df, resume="latest")
    assert list(CheckpointStore(tmp_path / "run").candidates()) == found
    other = sparkdl.Checkpoint(Path(tmp_path) / "other")
    replace(run, engine="local", checkpoint=other).fit(df, resume=tmp_path / "run")
    assert [m.iteration for _, m in CheckpointStore(tmp_path / "other").candidates()] == [8]
