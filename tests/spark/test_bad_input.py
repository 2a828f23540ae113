"""Every mistake a user can make, and the whole message that answers it, before anything trains.

The mistakes are rows of the tables in bad_data, bad_recipes, bad_settings and bad_uses.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import innards
import numpy as np
import pytest
import torch
from bad_data import COLUMNS, IN_ARRAYS, QUERIES, RECORDS, ROWS
from bad_inputs import Fit, Mistake, batch_normed, expect, two_classes
from bad_recipes import LOSSES, MODELS, OPTIMIZERS
from bad_settings import DAMAGED, PARAMETERS, PATHS, RESUMED, Resumed
from bad_uses import USES
from launch import in_turn, soak_but
from pyspark import SparkConf, cloudpickle
from pyspark.errors import PythonException
from torch import nn

import sparkdl
from sparkdl import CheckpointError, DataError, ModelError, ParameterError, SessionError
from sparkdl.session import context_of, settings_of

pytestmark = pytest.mark.spark
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ON_ROWS = [*ROWS, *RECORDS]
OTHERS = [*COLUMNS, *MODELS, *LOSSES, *OPTIMIZERS, *PARAMETERS, *PATHS]
MISTAKES = [*ON_ROWS, *OTHERS]


def name_of(given: Any) -> str:
    return given.name if isinstance(given, Mistake) else given


@pytest.fixture
def spent(spark: Any, num_jobs: Any) -> Callable[[], tuple[int, int]]:
    """How many Spark jobs were submitted in the test so far, and how many of their tasks failed."""
    context = spark.sparkContext._jsc.sc()
    before = num_jobs()

    def measure() -> tuple[int, int]:
        context.listenerBus().waitUntilEmpty()
        jobs = range(before, num_jobs())
        return len(jobs), sum(context.statusStore().job(job).numFailedTasks() for job in jobs)

    return measure


def check_price(mistake: Mistake, jobs: int, failed_tasks: int) -> None:
    """A mistake costs no more jobs than it says, and no task is tried twice for it: none fails but
    for the user's own query, of whose two partitions each may fail once."""
    assert jobs <= mistake.jobs
    assert 1 <= failed_tasks <= 2 if mistake.tasks_fail else failed_tasks == 0


@pytest.mark.parametrize(
    ("mistake", "engine"),
    [
        *in_turn(ON_ROWS, ["shuffle", "local"]),
        *((mistake, "local" if mistake.jobs else "shuffle") for mistake in OTHERS),
    ],
    ids=name_of,
)
def test_a_mistake_is_told_before_training(
    mistake: Mistake, engine: str, spark: Any, spent: Any, tmp_path: Path, nothing_left: Any
) -> None:
    fit = Fit(spark, tmp_path, engine)
    with expect(mistake.error, mistake.message, tmp_path) as caught:
        mistake.make(fit)
    assert type(caught.value) is mistake.error
    assert not fit.started
    if mistake in OTHERS or engine == "shuffle":
        check_price(mistake, *spent())


@pytest.mark.parametrize("mistake", QUERIES, ids=lambda mistake: mistake.name)
def test_a_query_that_fails_is_told_before_training(
    mistake: Mistake, spark: Any, spent: Any, tmp_path: Path, nothing_left: Any
) -> None:
    fit = Fit(spark, tmp_path)
    with expect(mistake.error, mistake.message, tmp_path) as caught:
        mistake.make(fit)
    innards.wait_for_tasks(spark.sparkContext)  # what they leave is not the next test's
    assert type(caught.value) is mistake.error
    assert not fit.started
    check_price(mistake, *spent())


def test_the_tables_are_large() -> None:
    everything = [*MISTAKES, *QUERIES, *USES]
    assert len({mistake.name for mistake in everything}) == len(everything)
    assert len(everything) >= 165


@pytest.fixture(scope="module")
def checkpoints(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one checkpoint, after the two iterations of an epoch."""
    path = tmp_path_factory.mktemp("checkpoints")
    fit = Fit(spark, engine="local")
    fit(fit.good(), checkpoint=sparkdl.Checkpoint(path), stop=sparkdl.max_epoch(1))
    return path


@pytest.mark.parametrize("resumed", RESUMED, ids=lambda resumed: resumed.name)
def test_a_checkpoint_of_another_run(resumed: Resumed, spark: Any, checkpoints: Path) -> None:
    fit = Fit(spark, engine="local")
    changes = dict(resumed.changes)
    rows = changes.pop("rows", None)
    data = fit.good().limit(rows) if rows else fit.good()
    message = (
        f"the checkpoint {next(checkpoints.iterdir())} belongs to another run: {resumed.message}. "
        "Use what it was made with, or fit without resume= (in another folder)."
    )
    if resumed.name not in ("another model", "another optimizer"):
        message += " To continue with this data anyway, pass any_data=True."
    with expect(ParameterError, message):
        fit(data, resume=checkpoints, **changes)
    assert not fit.started


@pytest.mark.parametrize(("name", "damage", "said"), DAMAGED)
def test_a_damaged_checkpoint(
    name: str, damage: Any, said: str, spark: Any, checkpoints: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoints, copy)
    (file,) = copy.glob(name)
    damage(file)
    fit = Fit(spark, engine="local")
    said = said.replace("{folder}", str(file.parent)).replace("{file}", file.name)
    message = f"there is no checkpoint to resume from in {copy}.\n  - {file.parent}: {said}"
    with expect(CheckpointError, message):
        fit(fit.good(), resume=copy)
    assert not fit.started


def test_a_good_fit_is_none_of_these(spark: Any, nothing_left: Any) -> None:
    fit = Fit(spark)
    fit(fit.good())
    assert fit.started


def test_a_bad_row_leaves_nothing_in_the_local_directories(spark: Any, slabs: Any) -> None:
    fit = Fit(spark)
    with pytest.raises(DataError):
        fit(fit.labels("double", 1.0, None))
    assert slabs(local=True) == []


@pytest.mark.parametrize("data", ["DataFrame", "RDD"])
def test_a_query_that_fails_leaves_nothing_where_samples_had_no_room(
    spark: Any, slabs: Any, monkeypatch: pytest.MonkeyPatch, data: str
) -> None:
    """A task before it wrote some."""
    fit = Fit(spark)
    rows = [(1.0, "1")] * 40 + [(2.0, "two")]
    frame = spark.createDataFrame(spark.sparkContext.parallelize(rows, 8), "x double, s string")
    given = frame.selectExpr("array(x, 1D) AS features", "cast(s AS double) AS label")
    if data == "RDD":
        given = frame.rdd.map(lambda row: ([row.x], float(row.s)))
    with pytest.raises(DataError):
        fit(given)
    assert slabs(local=True) == []


def own_shape(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output.squeeze(1), target)


def flat_shape(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.l1_loss(output.reshape(target.shape), target)


@pytest.mark.parametrize("loss", [own_shape, flat_shape])
def test_a_loss_may_bring_shapes_together_by_itself(spark: Any, loss: Any) -> None:
    fit = Fit(spark)
    fit(fit.good(), model=lambda: nn.Linear(2, 1), loss=loss)
    assert fit.started


def one_number(output: torch.Tensor, target: torch.Tensor) -> float:
    return float(((output - target) ** 2).mean())


def of_each(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target) ** 2


@pytest.mark.parametrize("loss", [one_number, of_each])
def test_shapes_are_told_before_what_else_is_wrong_with_the_loss(spark: Any, loss: Any) -> None:
    fit = Fit(spark)
    with pytest.raises(ModelError, match="torch would broadcast them against each other"):
        fit(fit.good(), model=lambda: nn.Linear(2, 1), loss=loss)


class Full(nn.Linear):
    """Fails on mini-batches, not on the two rows of a trial, as torch does where a GPU is full."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if self.training and len(features) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. ")
        return super().forward(features)


@pytest.mark.parametrize("engine", ["shuffle", "gang"])
def test_a_full_gpu_is_told_with_what_to_change(spark: Any, engine: str) -> None:
    df = spark.range(16).selectExpr("array(float(id)) AS features", "array(float(id)) AS label")
    run = sparkdl.Trainer(
        model=lambda: Full(1, 1),
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD,
        batch_size=8,
        replicas=2,
        engine=engine,
    )
    told = (
        r"OutOfMemoryError: CUDA out of memory\. Tried to allocate 20\.00 GiB\. Give the GPU less"
    )
    with pytest.raises(sparkdl.TrainingError, match=told):
        run.fit(df)


class Counting(nn.MSELoss):
    calls = 0

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(*args)


def noisy(x: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    return x + np.random.normal(size=x.shape).astype(x.dtype)


def test_trying_out_changes_nothing_of_the_users(spark: Any) -> None:
    fit, loss = Fit(spark), Counting()
    data = fit.good()
    before = np.random.get_state()[2], torch.random.get_rng_state()
    fit(data, loss=loss, augment=noisy, validation=sparkdl.Validation(data))
    assert loss.calls == 0
    assert np.random.get_state()[2] == before[0]
    assert torch.equal(torch.random.get_rng_state(), before[1])


def test_validation_data_may_be_an_rdd_beside_a_dataframe(spark: Any) -> None:
    fit = Fit(spark)
    samples = fit.rdd(([1.0, 2.0], 1.0), ([0.0, 1.0], 0.5))
    trained = fit(
        fit.good().withColumnRenamed("features", "x"),
        features="x",
        stop=sparkdl.max_epoch(1),
        validation=sparkdl.Validation(samples),
    )
    assert len(trained.history.validations) == 1


@pytest.mark.parametrize("ignored", soak_but([1], [-100, 1]))
def test_labels_that_the_loss_ignores_are_allowed(spark: Any, ignored: int) -> None:
    fit = Fit(spark)
    data = fit.labels("int", 0, 1, 0, ignored)
    fit(data, model=two_classes, loss=nn.CrossEntropyLoss(ignore_index=ignored))
    assert fit.started


def test_a_short_run_never_meets_the_single_row(spark: Any) -> None:
    fit = Fit(spark)
    fit(fit.good(), model=batch_normed, stop=sparkdl.max_iteration(1))
    assert fit.started


@pytest.mark.parametrize("make", [list, np.array, tuple])
def test_fit_on_local_data(spark: Any, num_jobs: Any, make: Any) -> None:
    before = num_jobs()
    data = make([[1.0, 2.0]])
    kind = f"{type(data).__module__}.{type(data).__qualname__}"
    with expect(DataError, f"fit takes a DataFrame or an RDD, not {kind}.…"):
        Fit(spark)(data)
    assert num_jobs() == before


def test_fit_on_a_pandas_frame(spark: Any) -> None:
    frame = Fit(spark).good().toPandas()
    said = "fit takes a DataFrame or an RDD, not pandas.core.frame.DataFrame. Pass "
    with expect(DataError, f"{said}spark.createDataFrame(df)."):
        Fit(spark)(frame)
    with expect(DataError, f"validation data: {said}spark.createDataFrame(df)."):
        Fit(spark)(Fit(spark).good(), validation=sparkdl.Validation(frame))
    with expect(
        DataError, "fit takes a DataFrame or an RDD, not pyspark.…DataFrame. Pass df.to_spark()."
    ):
        Fit(spark)(Fit(spark).good().pandas_api())


class ContextWith:
    """The part of a SparkContext that settings are read from."""

    def __init__(self, **settings: str) -> None:
        self._conf = SparkConf(loadDefaults=False)
        for key, value in settings.items():
            self._conf.set(key, value)


def test_unknown_settings_and_choices() -> None:
    settings = {
        "spark.sparkdl.slab.dri": "/tmp",
        "spark.sparkdl.progress": "yes",
        "spark.app.name": "x",
    }
    with expect(
        ParameterError,
        "2 problems:\n"
        '  - unknown setting "spark.sparkdl.slab.dri". Did you mean "spark.sparkdl.slab.dir"? '
        "Known: spark.sparkdl.slab.dir, spark.sparkdl.stages, spark.sparkdl.snapshot.seconds, "
        "spark.sparkdl.timeout.seconds, spark.sparkdl.client.seconds, spark.sparkdl.progress, "
        "spark.sparkdl.care, spark.sparkdl.plan.cache.\n"
        '  - spark.sparkdl.progress = "yes": use one of auto, true, false.',
    ):
        settings_of(ContextWith(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["DataFrame", "RDD"])
def test_a_bad_setting_stops_a_fit(spark: Any, num_jobs: Any, kind: str) -> None:
    fit = Fit(spark)
    data = fit.good() if kind == "DataFrame" else spark.sparkContext.parallelize([([1.0], 0)])
    before = num_jobs()
    spark.conf.set("spark.sparkdl.progress", "yes")
    try:
        with expect(
            ParameterError, 'spark.sparkdl.progress = "yes": use one of auto, true, false.'
        ):
            fit(data)
    finally:
        spark.conf.unset("spark.sparkdl.progress")
    assert num_jobs() == before
    assert not fit.started


@pytest.mark.parametrize("engine", soak_but(["local"], ["local", "shuffle"]))
def test_what_says_how_a_gang_shares_the_work_is_nothing_to_others(
    spark: Any, nothing_left: Any, engine: str
) -> None:
    """One word changes the engine, to debug with, say."""
    fit = Fit(spark, engine=engine)
    gangs = {"strategy": "pipeline", "mesh": {"data": 2, "pipe": 4}}
    data = fit.good()
    assert fit(data, **gangs).history.losses == fit(data).history.losses
    with pytest.raises(ModelError, match="in iteration 1 of each epoch a replica gets one"):
        fit(
            fit.features("array<double>", *[[1.0, float(i)] for i in range(4)]),
            model=batch_normed,
            batch_size=2,
            mesh={"tensor": 2},
        )


@pytest.mark.parametrize("engine", ["local", "shuffle"])
def test_a_slab_directory_that_cannot_be_made(
    spark: Any, tmp_path: Path, nothing_left: Any, engine: str
) -> None:
    fit = Fit(spark, engine=engine)
    (tmp_path / "file").touch()
    spark.conf.set("spark.sparkdl.slab.dir", f"{tmp_path}/file/slabs")
    try:
        with pytest.raises(sparkdl.TrainingError) as caught:
            fit(fit.good())
    finally:
        spark.conf.unset("spark.sparkdl.slab.dir")
    assert (
        str(caught.value)
        .partition("\n")[0]
        .endswith(
            f"slabs cannot be written to {tmp_path}/file/slabs (Not a directory). Point "
            "spark.sparkdl.slab.dir at a writable directory that each node has for itself."
        )
    )
    assert not fit.started


@pytest.fixture(scope="module")
def trained(spark: Any) -> sparkdl.TrainedModel:
    fit = Fit(spark)
    return fit(fit.good(), engine="local")


@dataclass
class Use(Fit):
    model: Any = None


@pytest.mark.parametrize("mistake", USES, ids=lambda mistake: mistake.name)
def test_a_mistake_in_using_a_model(mistake: Mistake, spark: Any, spent: Any, trained: Any) -> None:
    with expect(mistake.error, mistake.message):
        mistake.make(Use(spark, model=trained))
    check_price(mistake, *spent())


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (None, 'is null. Drop such rows with df.dropna(subset=["features"]), or fill them.'),
        ([1.0, float("nan")], f"holds NaN. {IN_ARRAYS}"),
    ],
    ids=["null", "NaN"],
)
def test_a_bad_row_in_transform(spark: Any, trained: Any, row: Any, said: str) -> None:
    """It comes to light when Spark computes the column, and Spark tells it in its own way."""
    data = Fit(spark).features("array<double>", [1.0, 2.0], row)
    message = f'sparkdl.errors.DataError: column "features", row 0 of partition 1: {said}'
    with pytest.raises(PythonException, match=re.escape(message)):
        trained.transform(data).collect()


class Strict(nn.Module):
    """A model of a user that fails on some rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x > 5).any()):
            raise ValueError("too large")
        return x


@pytest.mark.parametrize("use", ["transform", "predict", "any model", "records"])
def test_a_mistake_in_a_row_is_told_in_few_lines(spark: Any, trained: Any, use: str) -> None:
    """Spark's report has the sentence, and no frame of ours, of torch or of PySpark's worker."""
    data = Fit(spark).features("array<double>", [1.0, 2.0, 3.0])
    said = "sparkdl.errors.ModelError: the model fails on a batch of [1, 3] float32: RuntimeError"
    make = {
        "transform": lambda: trained.transform(data),
        "predict": lambda: sparkdl.predict(data, trained),
        "records": lambda: trained.predict(data.rdd.map(lambda row: row.features)),
    }
    if use == "any model":
        said = "sparkdl.errors.ModelError: the model fails on a batch of [1, 2] float32: ValueError"
        data = Fit(spark).features("array<double>", [1.0, 2.0], [1.0, 9.0])
        example = Fit(spark).features("array<double>", [1.0, 2.0])
        made = sparkdl.predict(data, Strict(), example=example, batch_size=1)
    else:
        made = make[use]()
    with pytest.raises(PythonException, match=re.escape(said)) as caught:
        made.collect()
    lines = str(caught.value).splitlines()
    frames = [line for line in lines if line.startswith("  File")]
    assert len(frames) == (use == "any model")  # that of the user's model
    assert len(lines) <= 8


def test_a_mistake_in_a_row_that_is_written_is_raised(
    spark: Any, trained: Any, tmp_path: Any
) -> None:
    data = Fit(spark).features("array<double>", [1.0, 2.0, 3.0])
    said = (
        r"^writing predictions: the model fails on a batch of \[1, 3\] float32: .*1x3 and 2x1\)\.$"
    )
    with pytest.raises(ModelError, match=said):
        sparkdl.predict(data, trained, path=tmp_path / "out", partitions=1)


def test_numbers_where_arrays_were_are_refused(spark: Any, trained: Any) -> None:
    """Two numbers would pass for one row of the two features, and give nonsense."""
    said = r"the model was trained on float32\[2\]\. Give values of the form"
    with pytest.raises(DataError, match=f"is of type double, and {said}"):
        trained.transform(Fit(spark).features("double", 1.0, 2.0))
    records = trained.predict(spark.sparkContext.parallelize([1.0, 2.0], 1))
    with pytest.raises(PythonException, match=f"row 0 of partition 0: is float32, and {said}"):
        records.collect()


def test_a_session_that_was_stopped(
    spark: Any, trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Fit(spark).good()
    message = (
        "the session of this data was stopped: make a new one with sparkdl.session(master), and "
        "load the data again with it."
    )
    for found in (data, data.rdd):
        context = mock.Mock(wraps=spark.sparkContext, _jsc=None)
        given = mock.Mock(spec=type(found), ctx=context, sparkSession=mock.Mock(_sc=context))
        with expect(SessionError, message):
            context_of(given)
    monkeypatch.setattr(data.sparkSession, "_sc", context)
    for predict in (trained.transform, trained.evaluate):
        with expect(SessionError, message):
            predict(data)
