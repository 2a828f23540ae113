"""Estimators and models of pyspark.ml: in pipelines, grids and folders, with the stages of Spark."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any
from unittest import mock

import fork_server
import numpy as np
import pytest
import torch
from launch import ROOT, soak_but
from made_by_name import perceptron
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import (
    BinaryClassificationEvaluator,
    MulticlassClassificationEvaluator,
    RegressionEvaluator,
)
from pyspark.ml.feature import IndexToString, StandardScaler, StringIndexer, VectorAssembler
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder, TrainValidationSplit
from pyspark.sql import DataFrame, SparkSession, functions
from pyspark.sql.types import DoubleType, IntegerType, StructType
from torch import nn

import sparkdl
from sparkdl.infer.remote import HadoopFolder
from sparkdl.ml import (
    TorchClassificationModel,
    TorchClassifier,
    TorchEstimator,
    TorchModel,
    TorchRegressor,
)
from sparkdl.train.placed_samples import PlacedSamples

pytestmark = pytest.mark.spark
SPECIES = ("setosa", "versicolor", "virginica")
PARTS = ["a", "b", "c", "d"]
HERE = {"engine": "local", "replicas": 2, "batchSize": 32, "learningRate": 0.1}


@pytest.fixture(scope="module")
def flowers(spark: SparkSession) -> DataFrame:
    """Measurements around three centres, and the species as text."""
    generator = np.random.default_rng(3)
    centres = generator.normal(scale=3.0, size=(3, 4))
    rows = []
    for number in range(90):
        kind = number % 3
        values = (centres[kind] + generator.normal(size=4)).tolist()
        rows.append((number, *values, SPECIES[kind], number % 4 == 0, float(1 + number % 2)))
    schema = (
        "id int, a double, b double, c double, d double, species string, held boolean, w double"
    )
    return spark.createDataFrame(rows, schema).coalesce(2)


@pytest.fixture(scope="module")
def table(flowers: DataFrame) -> DataFrame:
    """The measurements as a vector, and class numbers of type double, as StringIndexer makes them."""
    stages = [
        StringIndexer(inputCol="species", outputCol="label", stringOrderType="alphabetAsc"),
        VectorAssembler(inputCols=PARTS, outputCol="features"),
    ]
    return Pipeline(stages=stages).fit(flowers).transform(flowers)


def classifier(**changes: Any) -> TorchClassifier:
    return TorchClassifier(**{"model": perceptron, "maxEpochs": 3, **HERE, **changes})


def numbers(frame: DataFrame, name: str = "prediction") -> list[Any]:
    return [row[name] for row in frame.orderBy("id").select(name).collect()]


def weights(model: TorchModel) -> dict[str, list[Any]]:
    return {name: value.tolist() for name, value in model.module.state_dict().items()}


# Whole jobs


@pytest.mark.soak
def test_a_pipeline_through_cross_validation_into_another_process(
    flowers: DataFrame, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    indexer = StringIndexer(inputCol="species", outputCol="label")
    torch_stage = TorchClassifier(
        model=perceptron, featuresCol="scaled", batchSize=32, maxEpochs=3, engine="local"
    )
    stages = [
        indexer,
        VectorAssembler(inputCols=PARTS, outputCol="features"),
        StandardScaler(inputCol="features", outputCol="scaled", withMean=True),
        torch_stage,
        IndexToString(inputCol="prediction", outputCol="guess"),
    ]
    pipeline = Pipeline(stages=stages)
    grid = ParamGridBuilder().addGrid(torch_stage.learningRate, [0.0001, 0.1]).build()
    accuracy = MulticlassClassificationEvaluator(metricName="accuracy")
    validator = CrossValidator(
        estimator=pipeline,
        estimatorParamMaps=grid,
        evaluator=accuracy,
        numFolds=2,
        parallelism=2,
        seed=1,
    )
    validated = validator.fit(flowers)
    assert validated.avgMetrics[1] > 0.9 > validated.avgMetrics[0]
    best = validated.bestModel
    scored = best.transform(flowers)
    assert accuracy.evaluate(scored) > 0.9
    assert set(numbers(scored, "guess")) == set(SPECIES)
    assert best.stages[3].labels == list(best.stages[0].labels)

    flowers.write.parquet(f"{tmp_path}/rows")
    best.write().save(f"file://{tmp_path}/pipeline")
    validated.save(f"{tmp_path}/validated")
    assert sorted(path.name for path in (tmp_path / "pipeline").glob("stages/3_*/model/*")) == [
        "history.json",
        "model.json",
        "model.safetensors",
    ]
    metadata = "".join(
        path.read_text() for path in tmp_path.glob("pipeline/stages/3_*/metadata/part*")
    )
    assert "scaled" in metadata
    assert "weight" not in metadata
    module = torch_stage.copy({torch_stage.model: perceptron(hidden=8), torch_stage.maxEpochs: 1})
    unnamed = Pipeline(stages=[*stages[:3], module]).fit(flowers)
    unnamed.save(f"{tmp_path}/pickled")
    Pipeline(stages=[module]).save(f"{tmp_path}/untrained")
    messages = [record.getMessage() for record in caplog.records]
    told = [message for message in messages if "pickle" in message]
    assert len(told) == 1
    assert f"{tmp_path}/untrained/stages/0_{module.uid}/objects.pkl: the estimator" in told[0]

    done = subprocess.run(
        [fork_server.start(), ROOT / "tests/spark/score_pipeline.py", tmp_path],
        capture_output=True, text=True, timeout=200, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["predictions"] == numbers(scored)
    assert found["names"] == numbers(scored, "guess")
    assert found["metrics"] == validated.avgMetrics
    assert found["rates"] == [0.0001, 0.1]
    assert found["without_code"] == numbers(unnamed.transform(flowers))
    assert found["untrained"].startswith(f"TrustError: {tmp_path}/untrained/stages/0_")
    assert found["given"] == numbers(unnamed.transform(flowers))


@pytest.mark.soak
@pytest.mark.slow
def test_a_grid_places_the_samples_of_each_fold_once(
    table: DataFrame, nothing_left: Callable[[], None]
) -> None:
    estimator = classifier(engine="shuffle", maxEpochs=1)
    grid = ParamGridBuilder().addGrid(estimator.learningRate, [0.001, 0.1]).build()
    validator = CrossValidator(
        estimator=estimator,
        estimatorParamMaps=grid,
        evaluator=MulticlassClassificationEvaluator(metricName="logLoss"),
        numFolds=2,
        parallelism=2,
    )
    with mock.patch.object(PlacedSamples, "of", side_effect=PlacedSamples.of) as placed:
        validated = validator.fit(table)
    assert placed.call_count == 2
    assert len(set(validated.avgMetrics)) == len(validated.avgMetrics) == 2


@pytest.mark.soak
def test_points_that_read_otherwise_have_samples_of_their_own(
    table: DataFrame, nothing_left: Callable[[], None]
) -> None:
    estimator = classifier(maxEpochs=1)
    double = partial(nn.Linear, 4, 3, dtype=torch.float64)
    maps: list[dict[Any, Any]] = [
        {estimator.seed: 1},
        {estimator.weightCol: "w"},
        {estimator.model: double},
        {estimator.trainerArgs: {"clip_norm": 0.1}},
        {estimator.trainerArgs: {"handle_invalid": "skip"}},
        {estimator.validationIndicatorCol: "held"},
    ]
    with mock.patch.object(PlacedSamples, "of", side_effect=PlacedSamples.of) as placed:
        together = estimator.fit(table, maps)
    assert placed.call_count == 5
    for found, params in zip(together, maps, strict=True):
        assert weights(found) == weights(estimator.fit(table, params))
    assert together[2].module.weight.dtype == torch.float64


@pytest.mark.soak
def test_fits_of_a_grid_in_threads_and_one_that_is_given_up(
    table: DataFrame, nothing_left: Callable[[], None]
) -> None:
    estimator = classifier(engine="shuffle", maxEpochs=1)
    maps = [{estimator.learningRate: rate} for rate in (0.01, 0.1)]
    alone = [weights(estimator.fit(table, params)) for params in maps]
    fits = estimator.fitMultiple(table, maps)
    with ThreadPool(2) as pool:
        found = dict(pool.map(next, [fits] * 2, chunksize=1))
    assert [weights(found[index]) for index in range(2)] == alone
    with pytest.raises(StopIteration):
        next(fits)
    nothing_left()
    fits = estimator.fitMultiple(table, maps)
    next(fits)
    del fits
    for thread in threading.enumerate():
        if thread.name == "sparkdl-give-back":
            thread.join()


@pytest.mark.soak
def test_a_regressor_through_a_train_validation_split(table: DataFrame) -> None:
    estimator = TorchRegressor(
        model=partial(perceptron, 4, 8, 1), labelCol="d", maxEpochs=3, **HERE
    )
    grid = (
        ParamGridBuilder().addGrid(estimator.optimizer, [torch.optim.SGD, torch.optim.Adam]).build()
    )
    split = TrainValidationSplit(
        estimator=estimator,
        estimatorParamMaps=grid,
        evaluator=RegressionEvaluator(labelCol="d"),
        parallelism=2,
        seed=0,
    )
    model = split.fit(table)
    assert len(model.validationMetrics) == 2
    scored = model.bestModel.transform(table)
    assert dict(scored.dtypes)["prediction"] == "double"
    spread = RegressionEvaluator(labelCol="d", metricName="r2").evaluate(scored)
    assert spread > 0.3
    assert model.bestModel.numFeatures == 4


# What comes out


def test_a_classifiers_columns(table: DataFrame) -> None:
    model = classifier().fit(table)
    assert isinstance(model, TorchClassificationModel)
    assert (model.numClasses, model.numFeatures, model.labels) == (3, 4, list(SPECIES))
    scored = model.transform(table)
    new = scored.columns[len(table.columns) :]
    assert new == ["rawPrediction", "probability", "prediction"]
    types = dict(scored.dtypes)
    assert [types[name] for name in new] == ["vector", "vector", "double"]
    inputs = torch.tensor(
        [row.features.toArray().tolist() for row in table.orderBy("id").collect()]
    )
    logits = model.module(inputs.float()).detach().double()
    for name, expected in (("rawPrediction", logits), ("probability", logits.softmax(1))):
        rows = [value.toArray().tolist() for value in numbers(scored, name)]
        found = torch.tensor(rows, dtype=torch.float64)
        assert torch.allclose(found, expected, atol=1e-6)
    assert numbers(scored) == logits.argmax(1).tolist()
    assert scored.schema["prediction"].metadata["ml_attr"]["vals"] == list(SPECIES)
    names = IndexToString(inputCol="prediction", outputCol="guess").transform(scored)
    assert numbers(names, "guess") == [SPECIES[int(number)] for number in numbers(scored)]
    few = model.copy(
        {model.rawPredictionCol: "", model.probabilityCol: "", model.predictionCol: "p"}
    )
    assert few.transform(table).columns == [*table.columns, "p"]
    other = table.withColumnRenamed("features", "x")
    assert numbers(model.copy().setFeaturesCol("x").transform(other)) == numbers(scored)
    wanted = model.copy({model.thresholds: [1e-9, 1.0, 1.0]})
    assert set(numbers(wanted.transform(table))) == {0.0}


def test_wide_sparse_vectors_and_a_missing_label(spark: SparkSession) -> None:
    """The model knows how both columns were read, also of a column by another name."""
    size = 1 << 14
    rows = [
        (Vectors.sparse(size, [i % 9, 9 + i], [1.0, 2.0]), None if i == 3 else i / 9)
        for i in range(12)
    ]
    kinds = StructType().add("features", VectorUDT()).add("label", DoubleType())
    data = spark.createDataFrame(rows, kinds)
    model = TorchRegressor(
        model=lambda: nn.Sequential(nn.Linear(size, 1), nn.Flatten(0)),
        loss=sparkdl.MaskedLoss(nn.MSELoss()),
        optimizer=torch.optim.SGD,
        maxEpochs=2,
        **HERE,
    ).fit(data)
    assert model.trained.columns == {"features": sparkdl.Sparse(size), "label": sparkdl.Masked()}
    assert model.numFeatures == size
    other = model.copy().setFeaturesCol("x").transform(data.withColumnRenamed("features", "x"))
    found = [row.prediction for row in other.collect()]
    assert found == [row.prediction for row in model.transform(data).collect()]


@pytest.mark.parametrize("probability", soak_but([True], [False, True]))
def test_one_output_for_two_classes(table: DataFrame, probability: bool) -> None:
    two = table.where("label < 2")
    head: list[nn.Module] = [nn.Linear(4, 1), nn.Flatten(0)]
    model = nn.Sequential(*head, *[nn.Sigmoid()] * probability)
    loss = nn.BCELoss() if probability else nn.BCEWithLogitsLoss()
    fitted = classifier(model=model, loss=loss, maxEpochs=5).fit(two)
    scored = fitted.transform(two)
    assert fitted.numClasses == 2
    assert BinaryClassificationEvaluator().evaluate(scored) > 0.95
    assert MulticlassClassificationEvaluator(metricName="accuracy").evaluate(scored) > 0.9
    certain = [vector[1] > 0.5 for vector in numbers(scored, "probability")]
    assert certain == [bool(number) for number in numbers(scored)]


def size_of_the_code(module: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return module(batch["features"]).square().mean()


def test_an_estimator_of_any_module(table: DataFrame) -> None:
    """An autoencoder: no label, and a vector comes out."""
    trainer = sparkdl.Trainer(
        model=partial(perceptron, 4, 3, 4),
        loss=lambda output: output.square().mean(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        label=None,
        features="features",
        batch_size=30,
        replicas=2,
        engine="local",
        stop=sparkdl.max_epoch(2),
        seed=4,
        clip_norm=1.0,
    )
    estimator = TorchEstimator(trainer=trainer, predictionCol="code")
    assert estimator.getTrainerArgs() == {"label": None, "clip_norm": 1.0}
    assert (estimator.getBatchSize(), estimator.getMaxEpochs(), estimator.getSeed()) == (30, 2, 4)
    model = estimator.fit(table)
    assert weights(model) == {
        name: value.tolist() for name, value in trainer.fit(table).module.state_dict().items()
    }
    stepped = replace(trainer, loss=None, step=size_of_the_code)
    assert weights(TorchEstimator(trainer=stepped).fit(table)) == weights(model)
    scored = model.transform(table)
    assert dict(scored.dtypes)["code"] == "vector"
    assert len(numbers(scored, "code")[0]) == 4


def test_the_summary_has_the_curves(table: DataFrame, tmp_path: Path) -> None:
    estimator = classifier(
        validationIndicatorCol="held",
        weightCol="w",
        trainerArgs={"validation": {"metrics": ["accuracy"], "best": "accuracy"}},
    )
    model = estimator.fit(table)
    summary = model.summary
    assert model.hasSummary
    assert summary.totalIterations == len(summary.objectiveHistory) == 3 * 3
    assert len(summary.epochLosses) == 3
    assert summary.epochLosses[-1] < summary.epochLosses[0]
    assert {name: len(curve) for name, curve in summary.validationMetrics.items()} == {
        "loss": 3,
        "accuracy": 3,
    }
    trainer = sparkdl.Trainer(
        model=perceptron,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=0.1),
        weight="w",
        batch_size=32,
        replicas=2,
        engine="local",
        stop=sparkdl.max_epoch(3),
        validation=sparkdl.Validation(
            table.where("held").withColumn("label", table.label.cast("long")),
            ["accuracy"],
            best="accuracy",
        ),
    )
    rows = table.where("not held").withColumn("label", table.label.cast("long"))
    expected = trainer.fit(rows)
    assert summary.objectiveHistory == expected.history.losses
    assert expected.best is not None
    assert weights(model) == {k: v.tolist() for k, v in expected.best.module.state_dict().items()}
    model.save(f"{tmp_path}/model")
    loaded = TorchClassificationModel.load(f"{tmp_path}/model")
    assert loaded.summary.validationMetrics == summary.validationMetrics
    assert loaded.extractParamMap().keys() == model.extractParamMap().keys()
    assert weights(loaded) == weights(model)


# Rows that cannot be read


def test_invalid_rows(
    spark: SparkSession, table: DataFrame, nothing_left: Callable[[], None]
) -> None:
    bad = spark.createDataFrame(
        [
            (100, Vectors.dense([1.0, float("nan"), 0.0, 0.0]), 0.0),
            (101, None, 1.0),
            (102, Vectors.sparse(4, {1: float("inf")}), 1.0),
            (103, Vectors.dense([1.0, 1.0, 1.0, 1.0]), None),
        ],
        StructType()
        .add("id", IntegerType())
        .add("features", VectorUDT())
        .add("label", DoubleType()),
    )
    rows = table.select("id", "features", "label").union(bad)
    with pytest.raises(
        sparkdl.DataError, match=r'column "(features|label)".* (is null|holds NaN|inf)'
    ):
        classifier().fit(rows)
    model = classifier(handleInvalid="skip").fit(rows)
    assert weights(model) == weights(classifier().fit(rows.where("id < 100")))
    assert numbers(model.transform(rows), "id")[-2:] == [89, 103]
    kept = model.copy({model.handleInvalid: "keep"}).transform(rows)
    assert kept.columns == [*rows.columns, "rawPrediction", "probability", "prediction"]
    *usual, first, second, third, last = kept.orderBy("id").collect()
    assert [row.prediction for row in usual] == numbers(model.transform(rows.where("id < 100")))
    for row in (first, second, third):
        assert np.isnan([row.prediction, *row.probability, *row.rawPrediction]).all()
    assert last.prediction in (0.0, 1.0, 2.0)
    assert second.features is None
    assert np.isnan(first.features[1])
    arrays = spark.createDataFrame(
        [(0, [1.0, 2.0, 3.0, 4.0]), (1, None), (2, [1.0, None, 1.0, 1.0])],
        "id int, features array<double>",
    )
    kept = model.copy({model.handleInvalid: "keep"}).transform(arrays)
    assert [not np.isnan(value) for value in numbers(kept)] == [True, False, False]


# Mistakes: one message each, before the training


def refused(work: Callable[[], Any], kind: type[Exception] = sparkdl.ParameterError) -> str:
    with pytest.raises(kind) as error:
        work()
    return str(error.value)


def test_mistakes_in_params(table: DataFrame) -> None:
    assert refused(lambda: TorchClassifier().fit(table)) == (
        "TorchClassifier has no model: give TorchClassifier(model=make_model, ...)."
    )
    assert refused(lambda: TorchEstimator(model=perceptron).fit(table)) == (
        "TorchEstimator has no loss: give TorchEstimator(loss=nn.L1Loss(), ...)."
    )
    assert refused(lambda: classifier(handleInvalid="drop")) == (
        'handleInvalid="drop": use one of error, skip, keep.'
    )
    assert refused(lambda: classifier().setTrainerArgs(clip_nrm=1.0)) == (
        'trainerArgs: Trainer has no argument "clip_nrm". Did you mean "clip_norm"?'
    )
    assert refused(lambda: classifier(trainer="one")) == "trainer is a str: give a sparkdl.Trainer."
    assert "batch_size=0: give a whole number" in refused(
        lambda: classifier(batchSize=0).fit(table)
    )
    assert refused(lambda: classifier(optimizer=lambda module: None).fit(table)) == (
        "learningRate=0.1 goes with a torch.optim class or a partial of one, and optimizer is a "
        "function: set the learning rate in it."
    )
    assert refused(lambda: classifier(validationIndicatorCol="w").fit(table)) == (
        'validationIndicatorCol="w" is of type double: give a boolean column, true for the rows to '
        "validate with."
    )
    given = {"validation": sparkdl.Validation(table)}
    both = classifier(validationIndicatorCol="held", trainerArgs=given)
    assert refused(lambda: both.fit(table)) == (
        'validationIndicatorCol="held" and validation= in trainerArgs both name rows to validate with: '
        "leave one of them out, or give validation= as a dict without data."
    )
    no_data = classifier(trainerArgs={"validation": {"metrics": ["auc"]}})
    assert refused(lambda: no_data.fit(table)) == (
        "trainerArgs: validation= has no data: set validationIndicatorCol, or give a "
        "sparkdl.Validation(data, ...)."
    )
    with pytest.raises(TypeError, match="keyword"):
        TorchClassifier(perceptron)


def test_mistakes_in_the_data(table: DataFrame) -> None:
    assert 'label column "species" is of type string' in refused(
        lambda: classifier(labelCol="species").fit(table), sparkdl.DataError
    )
    told = refused(lambda: classifier(labelCol="a").fit(table), sparkdl.DataError)
    assert told.startswith('reading the data: label column "a" holds ')
    assert told.endswith("or use TorchRegressor for numbers.")
    unknown = table.selectExpr("id", "features", "label", "IF(id = 3, NULL, held) AS held")
    validated = classifier(validationIndicatorCol="held", maxEpochs=1)
    assert 'column "held", which says which rows to validate with, is null in a row' in refused(
        lambda: validated.fit(unknown), sparkdl.DataError
    )
    held = validated.copy({validated.validationIndicatorCol: "all"})
    for where in ("true", "false"):
        chosen = table.selectExpr("features", "label", f"{where} AS all")
        for params in (None, [{}]):
            assert 'validationIndicatorCol="all" must be false in some rows' in refused(
                lambda chosen=chosen, params=params: held.fit(chosen, params), sparkdl.DataError
            )
    without = validated.fit(unknown.where("id <> 3"))
    assert weights(validated.setHandleInvalid("skip").fit(unknown)) == weights(without)
    infinite = table.withColumn("label", functions.lit(float("inf")))
    assert 'label column "label" holds Infinity, and class numbers are whole' in refused(
        lambda: classifier().fit(infinite), sparkdl.DataError
    )
    assert 'feature column "x" is missing' in refused(
        lambda: classifier(featuresCol="x").fit(table), sparkdl.DataError
    )
    assert "fit takes a DataFrame or an RDD, not builtins.list" in refused(
        lambda: classifier().fit([1]), sparkdl.DataError
    )


def test_mistakes_with_models(table: DataFrame, tmp_path: Path) -> None:
    model = classifier(maxEpochs=1).fit(table)
    assert refused(lambda: model.transform(model.transform(table)), sparkdl.DataError) == (
        'TorchClassificationModel: the DataFrame already has a column "rawPrediction": drop it, or '
        "choose another name for the output."
    )
    upper = table.withColumn("PREDICTION", functions.lit(0))
    assert refused(lambda: model.transform(upper), sparkdl.DataError) == (
        'TorchClassificationModel: the DataFrame already has a column "PREDICTION": drop it, or '
        "choose another name for the output."
    )
    assert refused(lambda: model.copy({model.thresholds: [0.5]}).transform(table)) == (
        "thresholds=[0.5]: give one number above 0 for each of 3 classes."
    )
    assert "this TorchModel was not trained" in refused(lambda: TorchModel().transform(table))
    model.save(f"{tmp_path}/model")
    assert refused(lambda: TorchModel.load(f"{tmp_path}/model")) == (
        f"{tmp_path}/model holds a sparkdl.ml.classifier.TorchClassificationModel, not a TorchModel: "
        "use TorchClassificationModel.load."
    )
    flat = classifier(model=nn.Sequential(perceptron(), nn.Unflatten(1, (3, 1))), maxEpochs=1)
    label = table.selectExpr("*", "array(cast(label AS bigint)) AS labels")
    wrong = flat.copy({flat.labelCol: "labels"}).fit(label)
    assert "the output of the model is of shape ['rows', 3, 1]" in refused(
        lambda: wrong.transform(table), sparkdl.ModelError
    )


# Folders


def test_an_estimator_in_a_folder(table: DataFrame, tmp_path: Path) -> None:
    estimator = classifier(
        model=partial(perceptron, hidden=5),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, momentum=0.9),
        trainerArgs={
            "clip_norm": 1.0,
            "class_weights": [1.0, 2.0, 1.0],
            "stop": sparkdl.max_epoch(9) | sparkdl.min_loss(0.2),
        },
    )
    uri = f"file://{tmp_path}/one"
    Pipeline(stages=[estimator]).write().save(uri)
    Pipeline(stages=[estimator]).write().overwrite().save(uri)
    (loaded,) = Pipeline.load(uri).getStages()
    assert loaded.uid == estimator.uid
    assert loaded.getTrainerArgs() == estimator.getTrainerArgs()
    assert weights(loaded.fit(table)) == weights(estimator.fit(table))
    smooth = estimator.copy().setLoss(nn.CrossEntropyLoss(label_smoothing=0.1))
    smooth.save(f"{tmp_path}/smooth")
    assert "holds an estimator with a pickle" in refused(
        lambda: TorchClassifier.load(f"{tmp_path}/smooth"), sparkdl.TrustError
    )
    with sparkdl.ml.loading(trust=True):
        again = TorchClassifier.load(f"{tmp_path}/smooth")
    assert weights(again.fit(table)) == weights(smooth.fit(table))


class Killed(BaseException):
    """The end of a process."""


@pytest.mark.parametrize("killed_at", [0, 1, 2, None])
def test_a_stage_that_replaces_another_leaves_one_when_it_is_killed(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int | None
) -> None:
    """While it is written, or around one of two renames; paths may have blanks and any letters."""
    (tmp_path / "ein \u00fcbler %20 ordner").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "ein \u00fcbler %20 ordner"))
    smooth = nn.CrossEntropyLoss(label_smoothing=0.1)  # a pickle, in a file beside the metadata
    path, rates = f"{tmp_path}/die stufe \u00fc", (0.5, 0.25)
    first, second = (classifier(loss=smooth).setLearningRate(rate) for rate in rates)
    first.write().overwrite().save(path)
    rename, renames = HadoopFolder._rename, []

    def step(self: HadoopFolder, *paths: Any) -> None:
        if len(renames) + 1 == killed_at:
            raise Killed
        renames.append(paths)
        rename(self, *paths)

    with monkeypatch.context() as patched:
        patched.setattr(HadoopFolder, "_rename", step)
        if killed_at == 0:
            patched.setattr(HadoopFolder, "upload", mock.Mock(side_effect=Killed))
        if killed_at is None:
            second.write().overwrite().save(path)
        else:
            with pytest.raises(Killed):
                second.write().overwrite().save(path)
    with sparkdl.ml.loading(trust=True):
        found = TorchClassifier.load(path).getLearningRate()
        assert found == (rates[0] if killed_at in (0, 1) else rates[1])
        first.write().overwrite().save(path)
        assert TorchClassifier.load(path).getLearningRate() == rates[0]
    assert len(list(tmp_path.iterdir())) == 2


def test_params_are_those_of_pyspark(table: DataFrame) -> None:
    estimator = classifier()
    other = estimator.copy({estimator.maxEpochs: 1})
    assert (other.getMaxEpochs(), estimator.getMaxEpochs(), other.uid) == (1, 3, estimator.uid)
    assert "maxEpochs: The most epochs" in estimator.explainParams()
    assert isinstance(estimator.getLoss(), nn.CrossEntropyLoss)
    assert TorchEstimator().getOptimizer() is torch.optim.Adam
    assert "(default: CrossEntropyLoss()" in estimator.explainParam("loss")
    assert estimator.setParams(batchSize=8, labelCol="label").getBatchSize() == 8
    model = other.fit(table)
    assert model.uid == estimator.uid
    assert (model.getMaxEpochs(), model.getLearningRate(), model.getBatchSize()) == (1, 0.1, 32)
    assert not any(isinstance(v, torch.Tensor) for v in model.extractParamMap().values())
    assert model.copy().trained is model.trained
