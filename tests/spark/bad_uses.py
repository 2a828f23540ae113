"""Mistakes in using a trained model."""

from __future__ import annotations

import sys

import torch
from bad_inputs import WHOLE, data_error, locked, model_error, parameter_error
from pyspark import cloudpickle
from pyspark.sql import functions
from torch import nn

import sparkdl

cloudpickle.register_pickle_by_value(sys.modules[__name__])

OF_CONNECT = type("DataFrame", (), {"__module__": "pyspark.sql.connect.dataframe"})()
"""A DataFrame of Spark Connect as Spark 3.5 has it: none of pyspark.sql."""
NOT_ON_35 = (
    "{} takes a DataFrame{}, not pyspark.sql.connect.dataframe.DataFrame. Over Spark Connect sparkdl "
    "needs Spark 4.0 or newer, in client and server: start a classic session, "
    "sparkdl.session(master), or spark-submit your script."
)

USES = [
    *(
        data_error(
            f"{name} over Spark Connect of 3.5",
            use,
            NOT_ON_35.format(name, " or an RDD" if name == "predict" else ""),
        )
        for name, use in {
            "fit": lambda t: t(OF_CONNECT),
            "fit_groups": lambda t: sparkdl.fit_groups(OF_CONNECT, "n", None),
            "predict": lambda t: sparkdl.predict(OF_CONNECT, nn.Linear(2, 1)),
            "search": lambda t: sparkdl.tune.search(None, OF_CONNECT, {}),
            "transform": lambda t: t.model.transform(OF_CONNECT),
        }.items()
    ),
    parameter_error(
        "metric that holds a lock",
        lambda t: t.model.evaluate(t.good(), metrics=[locked()]),
        'metric "gap" cannot be pickled, so it cannot travel to the executors (TypeError: cannot '
        "pickle '_thread.lock' object). Use a function or class of an importable module, with no "
        "open resource in it.",
    ),
    data_error(
        "existing prediction column",
        lambda t: t.model.transform(t.good().withColumn("prediction", functions.lit(1))),
        'the DataFrame already has a column "prediction": drop it, or choose another name with '
        "prediction_col=.",
    ),
    data_error(
        "transform without the column",
        lambda t: t.model.transform(t.good().drop("features")),
        'feature column "features" is missing. The DataFrame has: label, n, s.',
    ),
    data_error(
        "transform of strings",
        lambda t: t.model.transform(t.features("string", "a")),
        'feature column "features" is of type string: tokenize text with columns={...: '
        "sparkdl.Text(tokenizer)}, number categories with pyspark.ml.feature.StringIndexer, or cast "
        "it if it holds numbers.",
    ),
    parameter_error(
        "batch size", lambda t: t.model.transform(t.good(), batch_size=0), f"batch_size=0: {WHOLE}"
    ),
    parameter_error(
        "postprocess that sums up",
        lambda t: t.model.transform(t.good(), postprocess=torch.sum),
        "postprocess returned a tensor of shape [] for a batch of 2 rows: it must return a tensor "
        "with one value for each row, of shape [2, ...], as partial(torch.argmax, dim=1) does.",
    ),
    data_error(
        "evaluate without the label",
        lambda t: t.model.evaluate(t.good().drop("label")),
        'label column "label" is missing. The DataFrame has: features, n, s.',
    ),
    data_error(
        "evaluate on a stream",
        lambda t: t.model.evaluate(
            t.spark.readStream.format("rate").load().selectExpr("array(1.0) features", "1.0 label")
        ),
        "the DataFrame is a stream, which never ends: write it to a table and pass that, or pass "
        "each of its batches, in writeStream.foreachBatch. Only predictions work on a stream.",
    ),
    data_error(
        "evaluate nothing",
        lambda t: t.model.evaluate(t.good().filter("n < 0")),
        "the data is empty: there are no rows to evaluate.",
        jobs=1,
    ),
    data_error(
        "evaluate a list",
        lambda t: t.model.evaluate([1.0]),
        "evaluate takes a DataFrame or an RDD, not builtins.list.",
    ),
    data_error(
        "transform an RDD",
        lambda t: t.model.transform(t.rdd(1.0)),
        "transform takes a DataFrame, not pyspark.core.rdd.RDD. For an RDD, use predict.",
    ),
    data_error(
        "predict on a DataFrame",
        lambda t: t.model.predict(t.good()),
        "predict takes an RDD, not pyspark.sql.classic.dataframe.DataFrame. For a DataFrame, use "
        "transform.",
    ),
    data_error(
        "predict on a frame of pandas",
        lambda t: t.model.predict(t.good().toPandas()),
        "predict takes an RDD, not pandas.core.frame.DataFrame. Pass spark.createDataFrame(df) to "
        "transform.",
        jobs=1,
    ),
    parameter_error(
        "metric of classes",
        lambda t: t.model.evaluate(t.good(), metrics=["top5"]),
        'metric "top5" failed: …',
        jobs=1,
    ),
    data_error(
        "existing column in another case",
        lambda t: t.model.transform(t.good(), prediction_col="LABEL"),
        'the DataFrame already has a column "label": drop it, or choose another name with '
        "prediction_col=.",
    ),
    parameter_error(
        "postprocess of complex numbers",
        lambda t: t.model.transform(t.good(), postprocess=lambda output: output + 1j),
        "Spark has no column type for complex64: convert the output with postprocess=, for example "
        "to torch.float32.",
    ),
    parameter_error(
        "postprocess that raises",
        lambda t: t.model.transform(t.good(), postprocess=lambda output: 1 / 0),
        "postprocess fails on a tensor of shape [2]: ZeroDivisionError: division by zero. It gets "
        "the model's output for a batch.",
        jobs=2,  # the first rows may lie in two partitions
    ),
    data_error(
        "evaluate a null",
        lambda t: t.model.evaluate(t.features("array<double>", [1.0, 2.0], None)),
        'column "features", row 0 of partition 1: is null. Drop such rows with '
        'df.dropna(subset=["features"]), or fill them.',
        jobs=1,
    ),
    model_error(
        "evaluate other widths",
        lambda t: t.model.evaluate(t.features("array<double>", [1.0, 2.0, 3.0])),
        "the model fails on a batch of [1, 3] float32: RuntimeError: mat1 and mat2 shapes "
        "cannot be multiplied (1x3 and 2x1).",
        jobs=1,
    ),
    model_error(
        "evaluate other labels",
        lambda t: t.model.evaluate(
            t.labels(
                "array<double>", [1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]
            )
        ),
        "the loss fails on output (2,) float32 and label (2, 3) float32: RuntimeError: The "
        "size of tensor a (2) must match the size of tensor b (3) at non-singleton dimension "
        "1. Give a label of the kind and range that the model was trained on.",
        jobs=1,
    ),
    data_error(
        "evaluate records of strings",
        lambda t: t.model.evaluate(t.rdd("a", "b")),
        'field "record", row 0 of partition 0: is a str. Give (features, label) pairs or '
        "sparkdl.Sample(features, label).",
        jobs=1,
    ),
]
