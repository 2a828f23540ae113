"""A stage of pyspark.ml: text labels in, tuned by cross-validation, saved and loaded as a pipeline.

Scikit-learn's wines (178 bottles, 13 measurements, three growers) go through Spark's own stages. What
differs from digits.py: Params instead of a trainer, and a PipelineModel instead of a module.
"""

from __future__ import annotations

import tempfile

from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import IndexToString, StandardScaler, StringIndexer, VectorAssembler
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import SparkSession
from sklearn.datasets import load_wine
from torch import nn

import sparkdl
from sparkdl.ml import TorchClassifier, loading


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 3))


def main(spark: SparkSession, epochs: int = 2) -> dict[str, float]:
    wine = load_wine()
    measures = [name.replace("/", "_") for name in wine.feature_names]
    rows = [
        (*map(float, values), f"grower {label}")
        for values, label in zip(wine.data, wine.target, strict=True)
    ]
    wines = spark.createDataFrame(rows, [*measures, "grower"])
    train, test = wines.randomSplit([0.7, 0.3], seed=1)

    accuracy = MulticlassClassificationEvaluator(metricName="accuracy")
    classifier = TorchClassifier(model=make_model, batchSize=32, maxEpochs=epochs)
    validator = CrossValidator(
        estimator=classifier,
        estimatorParamMaps=ParamGridBuilder()
        .addGrid(classifier.learningRate, [0.001, 0.03])
        .build(),
        evaluator=accuracy,
        numFolds=2,
        parallelism=2,
    )
    pipeline = Pipeline(
        stages=[
            StringIndexer(inputCol="grower", outputCol="label"),
            VectorAssembler(inputCols=measures, outputCol="measures"),
            StandardScaler(inputCol="measures", outputCol="features", withMean=True),
            validator,
        ]
    )
    *prepare, tuned = pipeline.fit(train).stages

    best = PipelineModel([*prepare, tuned.bestModel])
    with tempfile.TemporaryDirectory() as folder:
        best.write().overwrite().save(folder)
        # a function of a module that can be imported needs no loading(): its name is saved
        with loading(model=make_model):
            scored = PipelineModel.load(folder).transform(test).cache()

    guesses = IndexToString(inputCol="prediction", outputCol="guess").transform(scored)
    guesses.select("grower", "guess", "probability").show(3, truncate=60)
    result = {"accuracy": accuracy.evaluate(scored)}
    print(f"accuracy by learning rate {tuned.avgMetrics}, test accuracy {result['accuracy']:.3f}")
    return result


if __name__ == "__main__":
    session = sparkdl.session("local[2]")
    try:
        main(session)
    finally:
        session.stop()
