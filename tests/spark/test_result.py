"""What ``fit`` returns: predictions, metrics, and nothing of the user's touched."""

from __future__ import annotations

import copy
import gc
import logging
import os
import pickle
import random
import re
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launch import in_turn, soak_but
from pyspark import cloudpickle
from pyspark.ml.linalg import Vectors
from pyspark.sql import Row, functions
from structured import KINDS, Structured
from torch import nn
from torch.nn.utils import parametrizations

import sparkdl
from sparkdl.data.fields import Field
from sparkdl.infer.forward import INLINE_BYTES, ShippedModule
from sparkdl.infer.outputs import Output
from sparkdl.model.recipe import Part, Signature, part_of

pytestmark = pytest.mark.spark
for _module in (__name__, Structured.__module__):
    cloudpickle.register_pickle_by_value(sys.modules[_module])


def trained(
    module: nn.Module,
    features: tuple[str, ...] = ("x",),
    label: tuple[str, ...] = ("y",),
    loss: Any = None,
    example: tuple[torch.Tensor, ...] = (torch.zeros(1, 2),),
    dtype: str = "float32",
) -> sparkdl.TrainedModel:
    """A model as if it had been trained, with no fit."""
    module = module.eval()
    shapes = {name: tuple(x.shape[1:]) for name, x in zip(features, example, strict=False)}
    return sparkdl.TrainedModel(
        module=module,
        model=module,
        loss=loss,
        features=features,
        label=label,
        fields=tuple(
            Field(name, "int64" if name in WHOLE else dtype, shape)
            for name, shape in (*shapes.items(), *((name, ()) for name in label))
        ),
        num_features=len(features),
        float_dtype=dtype,
        output=Output.of(module(*example)),
        history=sparkdl.History(),
    )


WHOLE = "i", "y", "word"


def linear(inputs: int = 2, outputs: int = 3, dtype: Any = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)
    return nn.Sequential(*layers).to(dtype)


class Join(nn.Module):
    """A number, an array and an index: several inputs, one output a row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table, self.linear = nn.Embedding(5, 2), nn.Linear(5, 1)

    def forward(self, number: Any, values: Any, index: Any) -> torch.Tensor:
        joined = torch.cat([number[:, None], values, self.table(index)], dim=1)
        return self.linear(joined)[:, 0]


@pytest.fixture(scope="module")
def table(spark: Any) -> Any:
    """20 rows in 4 partitions; ``i`` numbers them, ``x`` is two floats, ``y`` a class of three."""
    return spark.range(0, 20, 1, 4).selectExpr(
        "id as i",
        "array(float(id / 10), float(sin(id))) as x",
        "double(id / 7) as number",
        "int(id % 5) as word",
        "int(id % 3) as y",
    )


def predictions(frame: Any, column: str = "prediction") -> np.ndarray:
    return np.array([row[column] for row in sorted(frame.collect(), key=lambda row: row.i)])


def inputs_of(table: Any, column: str, dtype: Any = torch.float32) -> torch.Tensor:
    rows = sorted(table.collect(), key=lambda row: row.i)
    values = [row[column] for row in rows]
    values = [v.toArray().tolist() if hasattr(v, "toArray") else v for v in values]
    return torch.tensor(values, dtype=dtype)


def close(found: Any, expected: torch.Tensor) -> None:
    np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-6, atol=1e-6)


# transform


FORMS: dict[str, tuple[Callable[[Any], Any], Callable[[], nn.Module], str, Any, str]] = {
    "numbers": (
        lambda table: table,
        lambda: nn.Sequential(nn.Unflatten(0, (-1, 1)), linear(1, 1), nn.Flatten(0)),
        *("number", torch.zeros(2), "float"),
    ),
    "arrays": (lambda table: table, linear, "x", torch.zeros(1, 2), "array<float>"),
    "nested arrays": (
        lambda table: table.selectExpr("i", "array(x, x, array(1f, 2f)) AS x"),
        lambda: nn.Linear(2, 4),
        *("x", torch.zeros(1, 3, 2), "array<array<float>>"),
    ),
    "vectors": (
        lambda table: table.sparkSession.createDataFrame(
            [
                *((i, Vectors.sparse(2, {i % 2: float(i)})) for i in range(5)),
                (5, Vectors.dense([1.0, 2.0])),
            ],
            ["i", "x"],
        ),
        *(linear, "x", torch.zeros(1, 2), "array<float>"),
    ),
    "any name": (
        lambda table: table.withColumnRenamed("x", "a`b. c"),
        *(linear, "a`b. c", torch.zeros(1, 2), "array<float>"),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_columns_of_any_form(table: Any, form: str) -> None:
    make, module, column, example, kind = FORMS[form]
    data, model = make(table), trained(module(), (column,), example=(example,))
    found = model.transform(data)
    assert found.schema["prediction"].dataType.simpleString() == kind
    close(predictions(found), model.module(inputs_of(data, column)))


@pytest.mark.parametrize(("rows", "batch_size"), in_turn([1, 3, 7, 10_000], [2, 1, 5, 1024]))
def test_predictions_are_beside_their_rows(table: Any, rows: int, batch_size: int) -> None:
    """Spark sends ``rows`` at a time; what comes back is cut elsewhere."""
    session = table.sparkSession
    model = trained(linear())
    session.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", rows)
    try:
        found = model.transform(table.coalesce(2), batch_size=batch_size).collect()
    finally:
        session.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    assert sorted(row.i for row in found) == list(range(20))
    expected = model.module(torch.tensor([row.x for row in found]))
    close([row.prediction for row in found], expected)


def test_whole_numbers_where_floats_were_trained(spark: Any, tmp_path: Path) -> None:
    """Of an array, a vector's place, a number and a label: a CSV that happens to have no fractions."""
    rows = [(i, [i, 2 * i], i % 3, i % 2 == 1, i) for i in range(12)]
    whole = spark.createDataFrame(rows, "i long, x array<int>, n tinyint, b boolean, y int")
    floats = whole.selectExpr(
        "i", "cast(x as array<float>) as x", "float(n) as n", "float(b) as b", "double(y) as y"
    )
    fitted = sparkdl.Trainer(
        model=Three, loss=nn.MSELoss(), optimizer=torch.optim.Adam, features=["x", "n", "b"],
        label="y", batch_size=4, engine="local", stop=sparkdl.max_iteration(2),
    ).fit(floats)  # fmt: skip
    loaded = sparkdl.load(fitted.save(tmp_path / "model"), model=Three, loss=nn.MSELoss())
    expected = predictions(fitted.transform(floats)).tolist()
    for model in (fitted, loaded):
        assert predictions(model.transform(whole)).tolist() == expected
        assert model.evaluate(whole, ["mae"]) == fitted.evaluate(floats, ["mae"])
    records = whole.rdd.map(lambda r: ((np.array(r.x), r.n, r.b), r.y))
    assert sorted(loaded.predict(records).collect()) == sorted(expected)
    assert loaded.evaluate(records, ["mae"]) == pytest.approx(fitted.evaluate(floats, ["mae"]))


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Any, n: Any, b: Any) -> torch.Tensor:
        return self.linear(torch.cat([x, n[:, None], b[:, None]], dim=1))[:, 0]


def test_several_inputs(table: Any) -> None:
    example = (torch.zeros(1), torch.zeros(1, 2), torch.zeros(1, dtype=torch.long))
    model = trained(Join(), ("number", "x", "word"), example=example)
    expected = model.module(
        inputs_of(table, "number"), inputs_of(table, "x"), inputs_of(table, "word", torch.long)
    )
    close(predictions(model.transform(table)), expected)


@pytest.mark.parametrize(
    ("module", "finish", "kind", "dtype"),
    [
        (linear(), partial(torch.argmax, dim=1), "bigint", "float32"),
        (linear(), partial(torch.softmax, dim=1), "array<float>", "float32"),
        (linear(), lambda out: out[:, 0] > 0, "boolean", "float32"),
        (linear(), lambda out: (out * 100).to(torch.uint8), "array<smallint>", "float32"),
        (linear(), lambda out: (out * 100).int(), "array<int>", "float32"),
        (linear(), lambda out: out[:, 0].half(), "float", "float32"),
        (linear(), lambda out: out[:, :0], "array<float>", "float32"),
        (linear(dtype=torch.float64), None, "array<double>", "float64"),
        (linear(dtype=torch.float64), lambda out: out.bfloat16(), "array<float>", "float64"),
    ],
    ids=["argmax", "softmax", "bool", "uint8", "int", "half", "empty", "double", "bfloat16"],
)
def test_postprocess_and_output_types(
    table: Any, module: nn.Module, finish: Any, kind: str, dtype: str
) -> None:
    torch_dtype = getattr(torch, dtype)
    example = (torch.zeros(1, 2, dtype=torch_dtype),)
    model = trained(module, example=example, dtype=dtype)
    found = model.transform(table, postprocess=finish, prediction_col="p")
    assert found.schema["p"].dataType.simpleString() == kind
    with torch.no_grad():
        expected = module(inputs_of(table, "x", torch_dtype))
        expected = finish(expected) if finish else expected
    close(predictions(found, "p"), expected.double() if expected.is_floating_point() else expected)


def test_an_empty_dataframe(table: Any) -> None:
    model = trained(linear())
    found = model.transform(table.filter("i < 0"))
    assert found.collect() == []
    assert found.columns == [*table.columns, "prediction"]


def test_empty_partitions(table: Any) -> None:
    model = trained(linear())
    data = table.filter("i in (3, 17)")
    close(predictions(model.transform(data)), model.module(inputs_of(data, "x")))


def test_other_columns_pass_through(spark: Any, table: Any) -> None:
    vectors = spark.createDataFrame(
        [(i, Vectors.sparse(3, {1: float(i)}) if i % 2 else None) for i in range(20)], ["i", "v"]
    )
    data = table.join(vectors, "i").select(
        "*",
        functions.when(functions.col("i") > 5, functions.col("i").cast("string")).alias("s"),
        functions.expr("if(i % 3 = 0, null, i / 3) as nulls"),
        functions.expr("named_struct('a', i, 'b', array('x', null)) as nested"),
        functions.expr("map(cast(i as string), null) as m"),
        functions.expr("cast('héé' as binary) as bytes"),
        functions.expr("timestamp_seconds(i) as at"),
        functions.expr("cast(i as decimal(20, 3)) as d"),
    )
    found = trained(linear()).transform(data)
    assert found.columns == [*data.columns, "prediction"]
    assert found.drop("prediction").schema == data.schema
    key = lambda row: row.i  # noqa: E731
    before, after = sorted(data.collect(), key=key), sorted(found.collect(), key=key)
    assert [row[:-1] for row in map(tuple, after)] == [tuple(row) for row in before]


def test_transform_is_lazy(table: Any, num_jobs: Any) -> None:
    before = num_jobs()
    trained(linear()).transform(table)
    assert num_jobs() == before


def test_transform_after_transform_and_sql(spark: Any, table: Any) -> None:
    model = trained(linear())
    twice = model.transform(model.transform(table), "again")
    twice.createOrReplaceTempView("predicted")
    rows = spark.sql("select count(*) n from predicted where prediction = again").collect()
    assert rows[0].n == 20


def test_a_filter_on_predictions_does_not_compute_them_twice(table: Any) -> None:
    model = trained(linear())
    scored = model.transform(table).where("prediction[0] > 0").where("prediction[1] < 1")
    plan = scored._jdf.queryExecution().optimizedPlan().toString()
    assert plan.count("predict(") == 1
    found = model.module(inputs_of(table, "x"))
    assert scored.count() == int(((found[:, 0] > 0) & (found[:, 1] < 1)).sum())


# Structured Streaming


@pytest.fixture
def stream(spark: Any, table: Any, tmp_path: Path) -> Any:
    path = str(tmp_path / "in")
    table.coalesce(2).write.parquet(path)
    return spark.readStream.schema(table.schema).parquet(path)


def test_a_stream_into_a_table(spark: Any, table: Any, stream: Any, tmp_path: Path) -> None:
    model = trained(linear())
    query = (
        model.transform(stream, postprocess=partial(torch.argmax, dim=1))
        .writeStream.format("memory")
        .queryName("classes")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(60)
    expected = model.module(inputs_of(table, "x")).argmax(dim=1)
    close(predictions(spark.table("classes")), expected)


# How the module travels


def as_records(table: Any) -> Any:
    return table.rdd.map(lambda row: (row.x, row.y))


class CountsItsLoads(nn.Linear):
    """Writes its process into a file whenever it is unpickled."""

    def __init__(self, log: str) -> None:
        super().__init__(2, 1)
        self.log = log

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        with open(self.log, "a") as log:
            log.write(f"{os.getpid()}\n")


def test_a_worker_loads_the_module_once(table: Any, tmp_path: Path) -> None:
    log = tmp_path / "loads"
    model = trained(CountsItsLoads(str(log)))
    for _ in range(3):
        assert len(model.transform(table.repartition(6)).collect()) == 20
    loads = log.read_text().split()
    assert str(os.getpid()) not in loads
    assert len(loads) == len(set(loads))


def test_a_large_module_is_broadcast(spark: Any, table: Any) -> None:
    module = linear()
    small = ShippedModule.of(module, spark.sparkContext)
    assert small.apart is None
    module.register_buffer("ballast", torch.zeros(INLINE_BYTES // 4))
    assert ShippedModule.of(module, spark.sparkContext).inline is None
    model = trained(module)
    close(predictions(model.transform(table)), module(inputs_of(table, "x")))
    records = spark.sparkContext.parallelize([[0.5, 1.0]], 1)
    close(np.stack(model.predict(records).collect()), module(torch.tensor([[0.5, 1.0]])))


def large(loss: Any = None) -> sparkdl.TrainedModel:
    """Large enough to be broadcast."""
    module = linear()
    module.register_buffer("ballast", torch.zeros(INLINE_BYTES // 4))
    return trained(module, loss=loss)


@pytest.mark.parametrize("of", [lambda table: table, as_records], ids=["DataFrame", "RDD"])
def test_evaluate_leaves_no_broadcast(spark: Any, table: Any, of: Callable[[Any], Any]) -> None:
    """Nor its file on the driver; what a lazy result uses stays."""
    files = Path(spark.sparkContext._temp_dir)
    model, data = large(nn.CrossEntropyLoss()), of(table)
    before = sorted(files.iterdir())
    for _ in range(2):
        model.evaluate(data)
    with pytest.raises(sparkdl.ParameterError, match="top-9 of 3 classes"):
        model.evaluate(data, ["top@9"])
    assert sorted(files.iterdir()) == before
    lazy = model.transform(table)
    model.evaluate(data)
    assert len(sorted(files.iterdir())) == len(before) + 1
    close(predictions(lazy), model.module(inputs_of(table, "x")))
    with torch.no_grad():
        model.module[0].bias += 1
    model.evaluate(data)
    assert len(sorted(files.iterdir())) == len(before) + 1


def test_a_model_in_use_can_be_copied(table: Any) -> None:
    model = large()
    expected = predictions(model.transform(table)).tolist()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert predictions(copied.transform(table)).tolist() == expected


# predict


def test_predict_keeps_the_order(spark: Any) -> None:
    model = trained(linear())
    rows = [[float(i), float(-i)] for i in range(25)]
    expected = model.module(torch.tensor(rows))
    for records in (
        rows,
        [(row, 1) for row in rows],
        [Row(y=1, x=row) for row in rows],
        [sparkdl.Sample(row) for row in rows],
        [np.array(row) for row in rows],
        [torch.tensor(row) for row in rows],
        [Vectors.dense(row) for row in rows],
    ):
        rdd = spark.sparkContext.parallelize(records, 3)
        found = model.predict(rdd, batch_size=np.int64(4))
        assert found.getNumPartitions() == 3
        close(np.stack(found.collect()), expected)


def slope(prediction: Any) -> float:
    """With gradients of its own, in the process that predicts."""
    x = torch.ones(1, requires_grad=True)
    (x * float(np.sum(prediction))).sum().backward()
    assert x.grad is not None
    return float(x.grad)


def test_what_follows_a_prediction_may_want_gradients(spark: Any) -> None:
    model = trained(linear())
    rows = [[float(i), float(-i)] for i in range(5)]
    found = model.predict(spark.sparkContext.parallelize(rows, 1)).map(slope).collect()
    close(np.array(found), model.module(torch.tensor(rows)).sum(dim=1))


def test_predict_numbers_and_several_inputs(spark: Any) -> None:
    example = (torch.zeros(1), torch.zeros(1, 2), torch.zeros(1, dtype=torch.long))
    model = trained(Join(), ("number", "x", "word"), example=example)
    inputs = [(float(i), [float(i), 1.0], i % 5) for i in range(9)]
    expected = model.module(
        *[torch.tensor(column) for column in map(list, zip(*inputs, strict=True))]
    )
    for records in (
        inputs,
        [(row, 0) for row in inputs],
        [sparkdl.Sample(r) for r in inputs],
        [Row(word=word, x=x, number=number, y=0) for number, x, word in inputs],
        [Row(a=number, b=x, c=word) for number, x, word in inputs],  # names of something else
    ):
        found = model.predict(spark.sparkContext.parallelize(records, 2)).collect()
        assert all(type(value) is float for value in found)
        close(found, expected)


def test_predict_with_postprocess_and_empty_partitions(spark: Any) -> None:
    model = trained(linear())
    records = spark.sparkContext.parallelize([[1.0, 2.0]], 4)
    found = model.predict(records, postprocess=partial(torch.argmax, dim=1)).collect()
    assert found == [int(model.module(torch.tensor([[1.0, 2.0]])).argmax())]


# evaluate


def per_row(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.max(dim=1).values - target


@pytest.mark.parametrize("batch_size", [3, 1024])
@pytest.mark.parametrize("of", [lambda table: table, as_records], ids=["DataFrame", "RDD"])
def test_evaluate_is_what_torch_says(table: Any, of: Callable[[Any], Any], batch_size: int) -> None:
    model = trained(linear(), loss=nn.CrossEntropyLoss())
    metrics = ["accuracy", sparkdl.MeanMetric("margin", per_row)]
    found = model.evaluate(of(table.repartition(3)), metrics, batch_size=batch_size)
    with torch.no_grad():
        output, target = model.module(inputs_of(table, "x")), inputs_of(table, "y", torch.long)
        expected = {
            "loss": float(nn.functional.cross_entropy(output, target)),
            "accuracy": float((output.argmax(dim=1) == target).float().mean()),
            "margin": float((output.max(dim=1).values - target).mean()),
        }
    assert found == pytest.approx(expected, rel=1e-6)
    assert list(found) == ["loss", "accuracy", "margin"]


@pytest.mark.parametrize("of", [lambda table: table, as_records], ids=["DataFrame", "RDD"])
def test_evaluate_regression_with_empty_partitions(table: Any, of: Callable[[Any], Any]) -> None:
    model = trained(nn.Sequential(linear(2, 1), nn.Flatten(0)), loss=nn.L1Loss())
    data = table.filter("i < 7")
    found = model.evaluate(of(data), ["mae", "mse"])
    error = (model.module(inputs_of(data, "x")) - inputs_of(data, "y")).detach()
    expected = {"loss": error.abs().mean(), "mae": error.abs().mean(), "mse": (error**2).mean()}
    assert found == pytest.approx({k: float(v) for k, v in expected.items()}, rel=1e-6)


@pytest.mark.parametrize(
    "loss", [nn.MSELoss(reduction="sum"), partial(nn.functional.mse_loss, reduction="sum")]
)
def test_evaluate_with_a_loss_that_adds_up(table: Any, loss: Any, num_jobs: Any) -> None:
    """Its sum would count for each row of the batch once more."""
    before = num_jobs()
    with pytest.raises(sparkdl.ModelError) as caught:
        trained(linear(2, 2), label=("x",), loss=loss).evaluate(table)
    assert str(caught.value) == (
        'the loss adds up (reduction="sum"), but the losses of batches are averaged, each weighted '
        'by its samples: use reduction="mean", or return (sum, count) from your own function, '
        "where count is the number of values in the sum."
    )
    assert num_jobs() == before


def test_evaluate_an_autoencoder(table: Any) -> None:
    model = trained(linear(2, 2), label=("x",), loss=nn.MSELoss())
    inputs = inputs_of(table, "x")
    expected = nn.functional.mse_loss(model.module(inputs), inputs).item()
    assert model.evaluate(table) == pytest.approx({"loss": expected}, rel=1e-6)


def test_evaluate_runs_in_evaluation_mode(table: Any) -> None:
    module = nn.Sequential(nn.Dropout(0.9), linear(), nn.BatchNorm1d(3))
    model = trained(module, loss=nn.CrossEntropyLoss())
    module.train()
    found = model.evaluate(table)
    assert module.training
    module.eval()
    expected = nn.functional.cross_entropy(
        module(inputs_of(table, "x")), inputs_of(table, "y", torch.long)
    )
    assert found["loss"] == pytest.approx(expected.item(), rel=1e-6)


# data that cannot be read


def digit(row: Any) -> Any:
    return [float(digits[row.i % 11])], 0


digits = dict(enumerate("012345678x", start=1))
MEND = "Fix the query or the function that produces the data; data.count() fails in the same way."


def test_evaluate_data_that_cannot_be_read(
    table: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = trained(nn.Linear(1, 1), loss=nn.MSELoss(), example=(torch.zeros(1, 1),))
    texts = table.selectExpr("concat('x', i) as s", "array(float(1)) as y")
    cast = texts.selectExpr("array(cast(s as float)) as x", "y")
    with pytest.raises(sparkdl.DataError) as caught:
        model.evaluate(cast)
    assert str(caught.value).startswith("the data cannot be read: The value 'x")
    assert str(caught.value).endswith(MEND)
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(logging.getLogger("SQLQueryContextLogger"), "handlers", [caplog.handler])
    for data in (
        cast.repartition(2),
        table.rdd.map(digit),
        texts.withColumn("x", functions.udf(lambda s: [float(s)], "array<float>")("s")),
    ):
        with pytest.raises(sparkdl.DataError) as caught:
            model.evaluate(data)
        told = str(caught.value)
        assert told.startswith("the data cannot be read: ")
        assert re.search("KeyError: 0|could not convert string to float: 'x|The value 'x", told)
        assert told.endswith(MEND)
    assert not caplog.records  # PySpark would log the stack of Java


class Lost(nn.Linear):
    """It cannot be built where it is used."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise KeyError("lost")


@pytest.mark.parametrize("of", [lambda table: table, as_records], ids=["DataFrame", "RDD"])
def test_what_fails_beside_the_data_is_no_mistake_in_them(
    table: Any, of: Callable[[Any], Any]
) -> None:
    model = trained(Lost(2, 3), loss=nn.CrossEntropyLoss())
    with pytest.raises(sparkdl.TrainingError) as caught:
        model.evaluate(of(table))
    first, *_ = str(caught.value).splitlines()
    assert first.startswith("evaluating the model: ")
    assert first.endswith("KeyError: 'lost'")


# an RDD, where a DataFrame's columns were specified


class Lengths(nn.Module):
    """Of a sequence and its lengths and a number: something that cut, padding and lengths change."""

    def forward(self, words: Any, lengths: Any, number: Any) -> torch.Tensor:
        return torch.stack([words.sum(dim=1), lengths + number], dim=1)


SPECS = {
    "words": sparkdl.Sequence(max_length=3, padding=7, lengths=True, pad_to_max=True),
    "marks": sparkdl.Sequence(max_length=2, padding=1, pad_to_max=True),
}


def of_columns(**columns: Any) -> sparkdl.TrainedModel:
    """As if trained on the columns words, number and marks of a DataFrame."""
    example = (torch.zeros(2, 3), torch.zeros(2), torch.zeros(2))
    model = trained(Lengths(), ("words", "number"), ("marks",), nn.L1Loss(), example=example)
    model.columns = columns
    return model


def test_an_rdd_is_read_as_the_columns_that_were_trained(spark: Any) -> None:
    rows = [
        (i, [float(i + k) for k in range(1 + i % 5)], i / 2, [float(i)] * (1 + i % 4))
        for i in range(12)
    ]
    data = spark.createDataFrame(
        rows, "i long, words array<float>, number float, marks array<float>"
    )
    records = data.rdd.map(lambda row: ((row.words, row.number), row.marks))
    model = of_columns(**SPECS)
    expected = predictions(model.transform(data.repartition(3)))
    assert np.stack(model.predict(records, batch_size=5).collect()).tolist() == expected.tolist()
    assert model.evaluate(records, ["mae"]) == pytest.approx(model.evaluate(data, ["mae"]))


def refused(column: str) -> str:
    return (
        f'columns["{column}"] is a sparkdl.Convert, which is for DataFrames, not for the records '
        "of an RDD: pass a DataFrame with this column to transform or evaluate."
    )


def test_what_only_a_column_can_be_is_refused_of_an_rdd(spark: Any) -> None:
    records = spark.sparkContext.parallelize([(([1.0], 2.0), [1.0, 2.0])])
    model = of_columns(**(SPECS | {"number": sparkdl.Convert(len)}))
    for use in (model.predict, model.evaluate):
        with pytest.raises(sparkdl.DataError) as caught:
            use(records)
        assert str(caught.value) == refused("number")
    model = of_columns(**(SPECS | {"marks": sparkdl.Convert(len)}))
    assert len(model.predict(records).collect()) == 1  # it needs no label
    with pytest.raises(sparkdl.DataError) as caught:
        model.evaluate(records)
    assert str(caught.value) == refused("marks")


def test_the_images_of_records_are_arrays_already(spark: Any) -> None:
    records = spark.sparkContext.parallelize([(([1.0], 2.0), [1.0, 2.0])])
    model, plain = of_columns(**(SPECS | {"number": sparkdl.Image()})), of_columns(**SPECS)
    found, expected = (one.predict(records).collect() for one in (model, plain))
    assert np.array_equal(found, expected)


# a row alone


class Squeezed(nn.Module):
    """What it puts out for one row lacks a dimension; as a model does that ends in pooling."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.linear = nn.Linear(2, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).unsqueeze(-1).squeeze()


@pytest.fixture(scope="module")
def binary(table: Any) -> Any:
    return table.selectExpr("i", "x", "float(i % 2) as y")


METRICS = ["auc", "accuracy", "mae", "mse"]


@pytest.mark.parametrize("of", [lambda table: table, as_records], ids=["DataFrame", "RDD"])
def test_evaluate_a_row_alone_that_is_squeezed(binary: Any, of: Callable[[Any], Any]) -> None:
    """Each partition of five rows ends in a batch of one."""
    model = trained(Squeezed(), loss=nn.BCEWithLogitsLoss(), example=(torch.zeros(2, 2),))
    found = model.evaluate(of(binary), METRICS, batch_size=torch.tensor(4))
    assert found == pytest.approx(model.evaluate(of(binary), METRICS, batch_size=5))
    assert set(found) == {"loss", *METRICS}


@pytest.mark.parametrize("of", [lambda table: table, as_records], ids=["DataFrame", "RDD"])
def test_evaluate_classes_of_a_row_alone(table: Any, of: Callable[[Any], Any]) -> None:
    model = trained(Squeezed(3), loss=nn.CrossEntropyLoss(), example=(torch.zeros(2, 2),))
    data = of(table.selectExpr("i", "x", "i % 3 as y"))
    found = model.evaluate(data, ["accuracy", "top@2"], batch_size=4)
    assert found == pytest.approx(model.evaluate(data, ["accuracy", "top@2"], batch_size=5))


def test_predict_several_values_of_a_row_alone(binary: Any) -> None:
    model = trained(Squeezed(3), example=(torch.zeros(2, 2),))
    expected = model.module(inputs_of(binary, "x"))
    close(predictions(model.transform(binary, batch_size=np.array(4))), expected)
    records = binary.rdd.map(lambda row: row.x)
    for finish in (None, torch.squeeze):
        close(model.predict(records, batch_size=4, postprocess=finish).collect(), expected)


def test_predict_a_row_alone_that_is_squeezed(binary: Any) -> None:
    model = trained(Squeezed(), example=(torch.zeros(2, 2),))
    expected = model.module(inputs_of(binary, "x"))
    close(predictions(model.transform(binary, batch_size=4)), expected)
    records = binary.rdd.map(lambda row: row.x)
    for finish in (None, torch.squeeze):
        found = model.predict(records, batch_size=4, postprocess=finish).collect()
        assert all(type(value) is float for value in found)
        close(found, expected)


@pytest.mark.parametrize("engine", soak_but(["shuffle"], ["local", "shuffle"]))
def test_validate_on_a_row_alone_that_is_squeezed(binary: Any, engine: str) -> None:
    held = binary.where("i < 13")
    model = trainer(
        model=Squeezed,
        loss=nn.BCEWithLogitsLoss(),
        engine=engine,
        validation=sparkdl.Validation(held, METRICS, batch_size=1),
        stop=sparkdl.max_epoch(1),
    ).fit(binary)
    [validated] = model.history.validations
    assert validated["metrics"] == pytest.approx(model.evaluate(held, METRICS))


@pytest.mark.parametrize("engine", soak_but(["shuffle"], ["local", "shuffle"]))
def test_validate_classes_of_a_row_alone(table: Any, engine: str) -> None:
    held, metrics = table.where("i < 13"), ["accuracy", "top@2"]
    model = trainer(
        model=partial(Squeezed, 4),
        engine=engine,
        validation=sparkdl.Validation(held, metrics, batch_size=1),
        stop=sparkdl.max_epoch(1),
    ).fit(table)
    [validated] = model.history.validations
    assert validated["metrics"] == pytest.approx(model.evaluate(held, metrics))


# fit


def trainer(**changes: Any) -> sparkdl.Trainer:
    values: dict[str, Any] = {
        "model": linear,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "features": "x",
        "label": "y",
        "batch_size": 10,
        "replicas": 2,
        "stop": sparkdl.max_iteration(3),
        **changes,
    }
    return sparkdl.Trainer(**values)


def test_save_and_load(table: Any, tmp_path: Path, nothing_left: Any) -> None:
    model = trainer().fit(table)
    path = model.save(tmp_path / "model")
    loaded = sparkdl.load(path, model=linear, loss=nn.CrossEntropyLoss())
    expected = model.module(inputs_of(table, "x"))
    close(predictions(model.transform(table)), expected)
    close(predictions(loaded.transform(table)), expected)
    assert loaded.evaluate(table, ["accuracy"]) == model.evaluate(table, ["accuracy"])
    assert loaded.history.losses == model.history.losses
    assert (loaded.features, loaded.label, loaded.output) == (("x",), ("y",), model.output)


class Locked(nn.Linear):
    """Cannot be pickled, and has a tensor that no state_dict holds."""

    def __init__(self) -> None:
        super().__init__(2, 3)
        self.lock = threading.Lock()
        self.register_buffer("shift", torch.rand(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.lock:
            return super().forward(x) + self.shift


def parametrized() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(2, 4)),
        parametrizations.spectral_norm(nn.Linear(4, 4)),
        parametrizations.orthogonal(nn.Linear(4, 3)),
    )


def compiled() -> nn.Module:
    return torch.compile(linear(), backend="eager")  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("make", "given"),
    in_turn([parametrized, compiled, Locked], ["a function", "a module"], spared=[parametrized]),
)
def test_any_module_that_trains_is_used_and_saved(
    table: Any, tmp_path: Path, make: Any, given: str
) -> None:
    """Those, too, that torch or pickle does not let be pickled."""
    if make is Locked and given == "a module":
        pytest.skip("refused before training")
    validation = sparkdl.Validation(table, best="loss")
    model = make if given == "a function" else make()
    result = trainer(model=model, ema=0.5, validation=validation, engine="local").fit(table)
    for one in (result, result.best, result.ema):
        assert one is not None
        expected = one.module(inputs_of(table, "x"))
        close(predictions(one.transform(table)), expected)
    close(
        np.array(result.predict(as_records(table)).collect()), result.module(inputs_of(table, "x"))
    )
    assert result.evaluate(table, ["accuracy"])["loss"] < 10
    again = sparkdl.load(result.save(tmp_path / "model"), trust=True)
    assert not any("_orig_mod" in name for name in again.module.state_dict())
    close(predictions(again.transform(table)), result.module(inputs_of(table, "x")))
    more = trainer(model=make, engine="local").fit(table, start=result)
    assert more.history.losses != result.history.losses


class AuxiliaryHead(nn.Module):
    """Two outputs in training, one in use, as Inception has them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.body(x)
        return (self.head(hidden), hidden) if self.training else self.head(hidden)


def both_heads(output: Any, target: torch.Tensor) -> torch.Tensor:
    return sum(nn.functional.cross_entropy(part, target) for part in output)  # type: ignore[return-value]


def test_the_output_is_the_one_in_evaluation_mode(table: Any) -> None:
    model = trainer(model=AuxiliaryHead, loss=both_heads, engine="local").fit(table)
    assert model.output == Output((3,), "float32")
    close(predictions(model.transform(table)), model.module(inputs_of(table, "x")))


@pytest.mark.parametrize("engine", ["local", "shuffle"])
def test_the_users_module_is_left_alone(table: Any, engine: str, nothing_left: Any) -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5), linear())
    module[2][0].weight.requires_grad_(False)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    result = trainer(model=module, engine=engine).fit(table)
    assert module.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert [p.requires_grad for p in module.parameters()].count(False) == 1
    assert all(p.grad is None for p in module.parameters())
    assert result.module is not module
    assert not result.module.training
    assert not torch.equal(result.module[0].running_mean, module[0].running_mean)
    shared = {p.data_ptr() for p in module.parameters()} & {
        p.data_ptr() for p in result.module.parameters()
    }
    assert not shared


@pytest.mark.parametrize("engine", soak_but(["shuffle"], ["local", "shuffle"]))
def test_the_users_random_states_are_left_alone(table: Any, engine: str) -> None:
    def states() -> list[Any]:
        return [
            torch.get_rng_state().tolist(),
            str(np.random.get_state()),
            random.getstate(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
        ]

    torch.manual_seed(5)
    model = lambda: nn.Sequential(nn.Dropout(0.5), linear())  # noqa: E731
    before = states()
    result = trainer(model=model, engine=engine).fit(table)
    result.evaluate(table)
    result.transform(table).collect()
    assert states() == before


class Gradients(sparkdl.Callback):
    """How many parameters of a model of 7 inputs have a gradient on the driver, while it trains."""

    found = -1

    def on_iteration_end(self, trainer: sparkdl.Trainer, state: sparkdl.TrainState) -> None:
        parameters = [p for p in gc.get_objects() if issubclass(type(p), nn.Parameter)]
        self.found = sum(p.shape == (2, 7) and p.grad is not None for p in parameters)


def test_no_gradients_stay_on_the_driver(spark: Any) -> None:
    df = spark.range(40).selectExpr(
        "array_repeat(double(id % 3), 7) AS features", "id % 2 AS label"
    )
    counting = Gradients()
    sparkdl.Trainer(
        model=partial(nn.Linear, 7, 2),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        batch_size=20,
        replicas=2,
        engine="shuffle",
        stop=sparkdl.max_iteration(1),
        callbacks=[counting],
    ).fit(df)
    assert counting.found == 0


# outputs of several fields, rows of other lengths


def structured(kind: str, part: Part = None) -> sparkdl.TrainedModel:
    module = Structured(kind=kind).eval()
    return sparkdl.TrainedModel(
        module=module,
        model=module,
        loss=lambda output, target: nn.functional.cross_entropy(
            part_of(output, NAMES[kind]), target
        ),
        features=("x",),
        label=("y",),
        fields=(Field("x", "float32", (2,)), Field("y", "int64", ())),
        num_features=1,
        float_dtype="float32",
        output=None,
        history=sparkdl.History(),
        signature=Signature(("x",), part),
    )


NAMES: dict[str, Any] = dict.fromkeys(KINDS, "logits") | {"tuple": 0}


@pytest.mark.parametrize("kind", ["ModelOutput", "tuple"])
def test_a_part_of_what_the_model_returns(table: Any, num_jobs: Any, kind: str) -> None:
    model, part, before = structured(kind), NAMES[kind], num_jobs()
    named = model.transform(table, output=part)
    best = model.transform(table, postprocess=lambda returned: part_of(returned, part).argmax(1))
    assert num_jobs() == before  # both are lazy
    with torch.no_grad():
        expected = part_of(model.module(x=inputs_of(table, "x")), part)
    close(predictions(named), expected)
    assert best.schema["prediction"].dataType.simpleString() == "bigint"
    close(predictions(best), expected.argmax(1))
    close(np.stack(model.predict(table.rdd, output=part).collect()), expected)
    wanted = {
        "loss": float(nn.functional.cross_entropy(expected, inputs_of(table, "y", torch.long))),
        "accuracy": float((expected.argmax(1) == inputs_of(table, "y", torch.long)).float().mean()),
    }
    for data in (table, table.rdd):
        assert model.evaluate(data, ["accuracy"], output=part) == pytest.approx(wanted)


def test_a_prediction_of_no_part_is_told_without_a_job(table: Any, num_jobs: Any) -> None:
    model, before = structured("dict"), num_jobs()
    with pytest.raises(sparkdl.ModelError, match=r"output='logits', or output=function"):
        model.transform(table)
    with pytest.raises(sparkdl.ModelError, match=r'no such part\. Did you mean "logits"'):
        model.predict(table.rdd, output="logit")
    with pytest.raises(sparkdl.ParameterError, match=r"output=1.5: name a field"):
        model.evaluate(table, output=1.5)  # type: ignore[arg-type]
    assert num_jobs() == before


class Candidates(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -x


def best_three(output: torch.Tensor) -> torch.Tensor:
    return output.topk(3, dim=1).indices


def test_postprocess_is_tried_on_rows_like_those_to_be_scored(spark: Any) -> None:
    """They may be longer than those that the model was trained on, which had two candidates."""
    model = trained(Candidates())
    rows = [[float((3 * i + j) % 7) for j in range(7)] for i in range(9)]
    data = spark.createDataFrame([(row,) for row in rows], "x array<float>").coalesce(1)
    expected = torch.tensor(rows).topk(3, dim=1, largest=False).indices.tolist()
    found = model.transform(data, postprocess=best_three).collect()
    assert [row.prediction for row in found] == expected
    records = spark.sparkContext.parallelize(rows, 2)
    assert np.stack(model.predict(records, postprocess=best_three).collect()).tolist() == expected
    with pytest.raises(sparkdl.ParameterError, match=r"on a tensor of shape \[2, 2\]"):
        model.transform(data.limit(0), postprocess=best_three)
    stream = spark.readStream.format("rate").load().selectExpr("array(1.0F) x")
    with pytest.raises(sparkdl.ParameterError, match=r"on a tensor of shape \[2, 2\]"):
        model.transform(stream, postprocess=best_three)
