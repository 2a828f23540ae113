"""Many small models: a group has the bits of its own fit, and a bad one is a row with the reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from pyspark.sql import functions
from torch import nn

import sparkdl

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def series(spark: Any) -> Any:
    """Three series of unlike length, the last of which has a value that is none."""
    return spark.range(90).selectExpr(
        "CASE WHEN id < 50 THEN 'a' WHEN id < 80 THEN 'b' ELSE 'c' END AS series",
        "id % 2 AS `part 2`",
        "array(double(id % 7), rand(3)) AS x",
        "IF(id = 85, double('NaN'), double(id % 7) / 3) AS y",
    )


@pytest.fixture(scope="module")
def trainer() -> sparkdl.Trainer:
    return sparkdl.Trainer(
        model=lambda: nn.Sequential(
            *(nn.BatchNorm1d(2, affine=False), nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.1)),
            *(nn.Linear(4, 1), nn.Flatten(0)),
        ),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.Adam, lr=0.01),
        schedule=partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.5),
        features="x",
        label="y",
        batch_size=16,
        freeze=["4.bias"],
        stop=sparkdl.max_epoch(2),
    )


@pytest.fixture(scope="module")
def models(series: Any, trainer: sparkdl.Trainer) -> Any:
    found = sparkdl.fit_groups(series, by="series", trainer=trainer)
    yield found
    found.unpersist()


def test_a_row_for_each_group(models: sparkdl.GroupModels) -> None:
    rows = {row.series: row for row in models.table.collect()}
    assert {name: row.rows for name, row in rows.items()} == {"a": 50, "b": 30, "c": 10}
    assert {name: row.iterations for name, row in rows.items()} == {"a": 8, "b": 4, "c": 0}
    assert rows["a"].error is rows["b"].error is rows["c"].weights is None
    assert rows["c"].error.startswith('DataError: column "y", row 5 of the group: is NaN')
    assert all(row.seconds > 0 for row in rows.values())
    assert [tuple(row) for row in models.errors.collect()] == [("c", 10, rows["c"].error)]
    assert repr(models) == "<sparkdl.GroupModels: a Sequential for each series>"


def test_the_bits_are_those_of_a_fit(
    series: Any, trainer: sparkdl.Trainer, models: sparkdl.GroupModels
) -> None:
    mine = series.where("series = 'b'")
    alone = replace(trainer, engine="local", replicas=1, slices=1).fit(mine)
    found = models.model("b")
    for one, other in zip(found.module.parameters(), alone.module.parameters(), strict=True):
        assert torch.equal(one, other)
    loss = models.table.where("series = 'b'").first().loss
    assert loss == pytest.approx(alone.history.epochs()[-1]["loss"])
    scored = models.transform(series).where("series = 'b'").collect()
    wanted = {tuple(row.x): row.prediction for row in alone.transform(mine).collect()}
    assert {tuple(row.x): row.prediction for row in scored} == pytest.approx(wanted)
    assert scored[0].asDict().keys() == {"series", "part 2", "x", "y", "prediction"}


def test_saved_models_are_the_same(
    series: Any, trainer: sparkdl.Trainer, models: sparkdl.GroupModels, tmp_path: Any
) -> None:
    """A folder that is written twice holds the second ones, whose frozen weights come along."""
    for overwrite in (False, True):
        models.save(tmp_path / "all of them", overwrite=overwrite)
    assert len(list((tmp_path / "all of them").iterdir())) == 3
    with pytest.raises(FileExistsError, match="overwrite=True"):
        models.save(tmp_path / "all of them")
    loaded = sparkdl.load_groups(tmp_path / "all of them", model=trainer.model)
    assert sorted(map(tuple, loaded.errors.collect())) == sorted(
        map(tuple, models.errors.collect())
    )
    for one, other in zip(
        loaded.model("b").module.parameters(), models.model("b").module.parameters(), strict=True
    ):
        assert torch.equal(one, other)
    found, expected = (
        {tuple(row.x): row.prediction for row in some.transform(series).collect()}
        for some in (loaded, models)
    )
    assert found == expected
    without_code = sparkdl.load_groups(tmp_path / "all of them").transform(series).collect()
    assert {tuple(row.x): row.prediction for row in without_code} == expected
    with pytest.raises(FileNotFoundError, match="holds no models of groups"):
        sparkdl.load_groups(tmp_path)
    (tmp_path / "groups.json").write_text(
        '{"by": ["series"], "places": {}, "table": "table-00000000", "model": "../other"}'
    )
    with pytest.raises(
        sparkdl.ModelError, match=r"groups\.json is damaged: it names another folder"
    ):
        sparkdl.load_groups(tmp_path)


def test_groups_without_a_model_have_no_predictions(
    spark: Any, series: Any, models: sparkdl.GroupModels
) -> None:
    new = (
        series.where("series = 'c'")
        .drop("y")
        .union(spark.sql("SELECT 'z', bigint(1), array(double(1), double(2))"))
    )
    assert [row.prediction for row in models.transform(new).collect()] == [None] * 11
    for key, reason in (("z", "there is no such group"), ("c", "its fit failed: DataError")):
        with pytest.raises(sparkdl.ParameterError, match=f"no model of '{key}': {reason}"):
            models.model(key)


def test_a_loss_that_is_not_finite_is_the_reason(series: Any, trainer: sparkdl.Trainer) -> None:
    """The other groups go on."""
    wild = series.where("series != 'c'").withColumn(
        "y", functions.expr("IF(series = 'a', 1e30, y)")
    )
    found = sparkdl.fit_groups(wild, by="series", trainer=trainer)
    rows = {row.series: row for row in found.table.collect()}
    assert rows["a"].error.startswith("TrainingError: iteration 1")
    assert (rows["b"].error, rows["b"].iterations) == (None, 4)
    found.unpersist()


def test_each_group_is_validated_on_its_own_rows(series: Any, trainer: sparkdl.Trainer) -> None:
    """It stops when that group is no better, and has the bits and metrics of its best validation."""
    held = series.where("series = 'a' AND x[1] < 0.4")
    validated = replace(
        trainer,
        optimizer=partial(torch.optim.Adam, lr=0.5),
        stop=sparkdl.max_epoch(9) | sparkdl.plateau("mae", 1),
        validation=sparkdl.Validation(held, metrics=["mae"], best="mae"),
    )
    found = sparkdl.fit_groups(series, by="series", trainer=validated)
    rows = {row.series: row for row in found.table.collect()}
    alone = replace(validated, engine="local", replicas=1, slices=1).fit(
        series.where("series = 'a'")
    )
    assert rows["a"].iterations == len(alone.history) < 36
    scored = {one["metrics"]["mae"]: one["metrics"] for one in alone.history.validations}
    assert len(scored) > 1
    assert rows["a"].metrics == pytest.approx(scored[min(scored)])
    pairs = (found.model("a").module.parameters(), alone.best.module.parameters())
    assert all(torch.equal(one, other) for one, other in zip(*pairs, strict=True))
    assert rows["b"].error == "DataError: the validation of the group has no rows"
    other = replace(validated.validation, data=held.drop("x"))
    with pytest.raises(sparkdl.DataError, match="validation data: there is no column x"):
        sparkdl.fit_groups(series, by="series", trainer=replace(validated, validation=other))
    found.unpersist()


@pytest.mark.soak
def test_several_columns_make_a_group(
    series: Any, trainer: sparkdl.Trainer, slabs: Callable[..., list[str]]
) -> None:
    some = series.where("series != 'c'")
    found = sparkdl.fit_groups(some, by=["SERIES", "part 2"], trainer=trainer)
    assert found.by == ("series", "part 2"), "the DataFrame's own names"
    assert slabs() == []
    rows = found.table.collect()
    assert sorted((row.series, row["part 2"], row.rows) for row in rows) == [
        ("a", 0, 25), ("a", 1, 25), ("b", 0, 15), ("b", 1, 15),
    ]  # fmt: skip
    assert all(math.isfinite(row.loss) for row in rows)
    assert found.model("a", 1).module[1].weight.shape == (4, 2)
    assert found.transform(some).count() == 80
    found.unpersist()


def test_mistakes_are_told_before_any_group_is_trained(
    series: Any, trainer: sparkdl.Trainer
) -> None:
    fit = partial(sparkdl.fit_groups, series)
    with pytest.raises(sparkdl.DataError, match=r'no such column\. Did you mean "series"'):
        fit(by="serie", trainer=trainer)
    for name in ("Error", "rows", "weights"):
        with pytest.raises(
            sparkdl.DataError, match=f'"{name}", which is a column of the result too'
        ):
            sparkdl.fit_groups(series.withColumnRenamed("series", name), name, trainer)
    with pytest.raises(sparkdl.ParameterError, match=r"(?s)2 problems:.*callbacks= has no meaning"):
        fit(by="series", trainer=replace(trainer, ema=0.9, callbacks=[sparkdl.Callback()]))
    with pytest.raises(sparkdl.DataError, match='feature column "words" is missing'):
        fit(by="series", trainer=replace(trainer, features="words"))
    with pytest.raises(sparkdl.ModelError, match="the model fails on"):
        fit(by="series", trainer=replace(trainer, model=partial(nn.Linear, 3, 1), freeze=()))


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_thousand_groups(spark: Any, trainer: sparkdl.Trainer) -> None:
    data = spark.range(2000 * 40).selectExpr(
        "id % 2000 AS series", "array(rand(1), rand(2)) AS x", "rand(3) AS y"
    )
    found = sparkdl.fit_groups(data, by="series", trainer=trainer)
    assert found.table.where("error IS NULL AND iterations = 6").count() == 2000
    assert found.transform(data).where("prediction IS NULL").count() == 0
    found.unpersist()
