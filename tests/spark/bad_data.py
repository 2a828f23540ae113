"""Mistakes in the data: columns, rows, records of an RDD, the query behind them."""

from __future__ import annotations

import shutil
import sys
from typing import Any

import numpy as np
import torch
from bad_inputs import Mistake, data_error, row_error
from pyspark import cloudpickle
from pyspark.ml.linalg import Matrices
from pyspark.sql import functions

import sparkdl
from sparkdl import TrainingError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SHAPE = "Every row must have the same shape: filter out, pad or truncate such rows."
VARYING = (
    f'{SHAPE} Rows of varying length are padded with columns={{"features": sparkdl.Sequence()}}.'
)
IN_ARRAYS = (
    "dropna does not look into arrays: filter out such rows with functions.exists, or fill them "
    "with functions.transform."
)
MEND = "Filter out such records, or fix them with rdd.map."
LEAVES_OUT = (
    "A loss that leaves out what is missing, such as sparkdl.MaskedLoss(loss), would get such rows, "
    'and the loss here does not; handle_invalid="skip" leaves them out, and columns={"label": '
    "sparkdl.Masked()} gives them to any loss."
)


WAY_OUT = (
    " Take a number of it in Spark, such as a field or the days since a start (functions.datediff), or "
    'give columns={{"{}": sparkdl.Convert(function)}}, a function of its Python value.'
).format
LABELLED = "features array<double>, label double"


def letters(texts: list[str]) -> list[list[int]]:
    return [[ord(letter) for letter in text] for text in texts]


COLUMNS = [
    data_error(
        "missing column",
        lambda fit: fit(fit.good(), features="feature"),
        'feature column "feature" is missing. Did you mean "features"? '
        "The DataFrame has: features, label, n, s.",
    ),
    data_error(
        "missing label",
        lambda fit: fit(fit.good().drop("label")),
        'label column "label" is missing. The DataFrame has: features, n, s. '
        "To train without a label, set label=None.",
    ),
    data_error(
        "timestamp column",
        lambda fit: fit(fit.good().withColumn("label", functions.current_timestamp())),
        'label column "label" is of type timestamp, which cannot become a tensor: use numbers, '
        "arrays of numbers or pyspark.ml.linalg vectors." + WAY_OUT("label"),
    ),
    data_error(
        "a stream",
        lambda fit: fit(
            fit.spark.readStream.format("rate").load().selectExpr("value features", "value label")
        ),
        "the DataFrame is a stream, which never ends: write it to a table and pass that, or pass "
        "each of its batches, in writeStream.foreachBatch. Only predictions work on a stream.",
    ),
    data_error(
        "two columns of one name",
        lambda fit: fit(fit.good().selectExpr("features", "label", "n label")),
        'column "label" is ambiguous, the DataFrame has label and label: rename or drop all '
        "but one.",
    ),
    data_error(
        "two columns whose names differ in case",
        lambda fit: fit(fit.good().selectExpr("features", "label", "n LABEL")),
        'column "label" is ambiguous, the DataFrame has label and LABEL: rename or drop all '
        "but one.",
    ),
    data_error(
        "null column",
        lambda fit: fit(fit.good().selectExpr("features", "null label")),
        'label column "label" is of type void, which cannot become a tensor: use numbers, '
        "arrays of numbers or pyspark.ml.linalg vectors.",
    ),
    data_error(
        "variant column",
        lambda fit: fit(fit.good().selectExpr("features", "parse_json('1') label")),
        'label column "label" is of type variant, which cannot become a tensor: use numbers, '
        "arrays of numbers or pyspark.ml.linalg vectors.",
    ),
    data_error(
        "matrix column",
        lambda fit: fit(
            fit.spark.createDataFrame([(Matrices.dense(1, 1, [1.0]), 1.0)], ["features", "label"])
        ),
        'feature column "features" is of type matrix, which cannot become a tensor: use '
        "numbers, arrays of numbers or pyspark.ml.linalg vectors." + WAY_OUT("features"),
    ),
    data_error(
        "binary column",
        lambda fit: fit(fit.good().selectExpr("binary(s) features", "label")),
        'feature column "features" is of type binary, which cannot become a tensor by itself: say '
        'what it holds, as columns={"features": sparkdl.Image()} for encoded images, or with '
        "sparkdl.Convert(function).",
    ),
    data_error(
        "image of numbers",
        lambda fit: fit(fit.good(), columns={"features": sparkdl.Image()}),
        'feature column "features" is of type array<double>, which is not an image: give encoded '
        'bytes (binary), or what spark.read.format("image") reads.',
    ),
    data_error(
        "sequence of numbers",
        lambda fit: fit(fit.good(), columns={"label": sparkdl.Sequence()}),
        'label column "label" is of type double: a sparkdl.Sequence is an array of numbers.',
    ),
    data_error(
        "missing weight",
        lambda fit: fit(fit.good(), weight="w"),
        'weight column "w" is missing. The DataFrame has: features, label, n, s. To train '
        "without weights, set weight=None.",
    ),
    data_error(
        "weight of several numbers",
        lambda fit: fit(fit.good(), weight="features"),
        'weight column "features" is of type array<double>: a weight is one number. Cast the column, '
        "or compute a number in Spark.",
    ),
    data_error(
        "no columns",
        lambda fit: fit(fit.good().select()),
        "2 problems:\n"
        '  - feature column "features" is missing. The DataFrame has: no columns.\n'
        '  - label column "label" is missing. The DataFrame has: no columns. To train '
        "without a label, set label=None.",
    ),
]

COLUMNS += [
    data_error(
        f"a gang on {name}",
        lambda fit, make=make: fit(make(fit), engine="gang"),
        "coalesce(), union() or the like made these partitions of others, and over such Spark runs no "
        "barrier stage, which a gang needs: divide the rows anew with repartition(2).",
    )
    for name, make in {
        "a coalesced DataFrame": lambda fit: in_partitions(fit, 4).toDF(LABELLED).coalesce(2),
        "a coalesced RDD": lambda fit: in_partitions(fit, 4).coalesce(2),
        "a union": lambda fit: in_partitions(fit, 1).union(in_partitions(fit, 1)),
    }.items()
]


def in_partitions(fit: Any, count: int) -> Any:
    rows = [([float(n), 1.0], float(n)) for n in range(8)]
    return fit.spark.sparkContext.parallelize(rows, count)


ROWS = [
    row_error(
        "null",
        lambda fit: fit(fit.labels("double", 1.0, 1.0, 1.0, 1.0, None, 1.0)),
        'column "label", row 1 of partition 1: is null. '
        'Drop such rows with df.dropna(subset=["label"]), or fill them. ' + LEAVES_OUT,
    ),
    row_error(
        "ragged in a later Arrow batch",
        lambda fit: fit(
            fit.spark.range(0, 12_000, 1, 1).selectExpr(
                "if(id < 11000, array(1.0, 2.0), array(1.0)) features", "1.0 label"
            ),
            replicas=1,
        ),
        'column "features", row 11000 of partition 0: has 1 values where row 10000 has 2. '
        + VARYING,
    ),
    row_error(
        "partitions disagree",
        lambda fit: fit(fit.features("array<double>", *[[1.0, 2.0]] * 3, *[[1.0, 2.0, 3.0]] * 3)),
        'column "features", row 0 of partition 1: is float32[3] where row 0 of partition 0 is '
        f"float32[2]. {SHAPE}",
    ),
    row_error(
        "empty DataFrame",
        lambda fit: fit(fit.good().filter("n < 0")),
        "the data is empty: it has no rows.",
    ),
    data_error(
        "weights that are all 0",
        lambda fit: fit(fit.good().selectExpr("*", "0 w"), weight="w"),
        'column "w": all weights are 0, so no sample counts. Give some rows a weight above 0, or '
        "train with weight=None.",
        jobs=3,
    ),
    data_error(
        "validation data without a row",
        lambda fit: fit(fit.good(), validation=sparkdl.Validation(fit.good().filter("n < 0"))),
        "validation data: the data is empty: it has no rows.",
        jobs=5,
    ),
    data_error(
        "validation data of another width",
        lambda fit: fit(
            fit.good(), validation=sparkdl.Validation(fit.features("array<double>", [1.0]))
        ),
        'validation data: "features" is float32[1], in the training data float32[2]: give both alike. '
        'Rows of varying length are padded with columns={"features": sparkdl.Sequence()}.',
        jobs=6,
    ),
    data_error(
        "validation data of two inputs",
        lambda fit: fit(fit.good(), validation=sparkdl.Validation(fit.rdd((([1.0], [2.0]), 1.0)))),
        "validation data: a sample has 2 inputs and 1 labels, in the training data 1 and 1.",
        jobs=6,
    ),
    data_error(
        "labels on the other side of the tokens",
        lambda fit: fit(
            fit.frame("features string, label array<int>", ("ab", [1, 2]), ("a", [1])),
            columns={
                "features": sparkdl.Text(letters, padding_side="left"),
                "label": sparkdl.Sequence(padding=-100),
            },
        ),
        '"features" is padded on the left and "label" on the right, and both are equally long in each '
        "row, so their elements would not be side by side: give both the same padding_side=, as in "
        'columns={"labels": sparkdl.Sequence(padding=-100, padding_side="left")}.',
        jobs=3,
    ),
    data_error(
        "a field of an RDD, of a DataFrame",
        lambda fit: fit(fit.good(), columns={"features[0]": sparkdl.Sequence(max_length=2)}),
        'columns names "features[0]", a field of an RDD\'s records, but the data is a DataFrame: '
        "name one of its columns, features, label.",
    ),
]

RECORDS = [
    row_error("empty RDD", lambda fit: fit(fit.rdd()), "the data is empty: it has no rows."),
    row_error(
        "RDD of strings",
        lambda fit: fit(fit.rdd("a", "b")),
        'field "record", row 0 of partition 0: is a str. '
        "Give (features, label) pairs or sparkdl.Sample(features, label).",
    ),
    row_error(
        "RDD of pairs of strings",
        lambda fit: fit(fit.rdd(([1.0, 2.0], 1.0), ([1.0, 2.0], "b"))),
        'field "label", row 0 of partition 1: is a str, not a number or an array of numbers. '
        + MEND,
    ),
    row_error(
        "RDD of triples",
        lambda fit: fit(fit.rdd((1.0, 2.0, 3.0), (1.0, 2.0, 3.0))),
        'field "record", row 0 of partition 0: is a tuple of 3. '
        "Give (features, label) pairs or sparkdl.Sample(features, label).",
    ),
    row_error(
        "RDD of mappings",
        lambda fit: fit(fit.rdd(({"a": 1.0}, 1.0), ({"a": 1.0}, 1.0))),
        'field "features", row 0 of partition 0: is a dict, not a number or an array of numbers. '
        + MEND,
    ),
    row_error(
        "RDD with None",
        lambda fit: fit(fit.rdd(([1.0, 2.0], 1.0), ([1.0, 2.0], None))),
        'field "label", row 0 of partition 1: is None, not a number or an array of numbers. '
        + MEND,
    ),
    row_error(
        "Sample without label",
        lambda fit: fit(fit.rdd(sparkdl.Sample([1.0, 2.0]), sparkdl.Sample([1.0, 2.0]))),
        'field "label", row 0 of partition 0: is None. '
        "Give Sample(features, label), or train with label=None.",
    ),
    row_error(
        "RDD with NaN",
        lambda fit: fit(fit.rdd(([1.0, 2.0], 1.0), ([1.0, float("nan")], 1.0))),
        f'field "features", row 0 of partition 1: holds NaN. {MEND}',
    ),
    row_error(
        "RDD with a masked value",
        lambda fit: fit(
            fit.rdd(([1.0, 2.0], 1.0), (np.ma.masked_equal([1.0, 9.9e36], 9.9e36), 1.0))
        ),
        f'field "features", row 0 of partition 1: holds a masked value. {MEND}',
    ),
    row_error(
        "ragged record",
        lambda fit: fit(fit.rdd(([1.0, 2.0], 1.0), ([[1.0], [2.0, 3.0]], 1.0))),
        'field "features", row 0 of partition 1: is ragged: its parts differ in length. ' + SHAPE,
    ),
    row_error(
        "records of mixed shapes",
        lambda fit: fit(fit.rdd(*[([1.0, 2.0], 1.0)] * 3, ([1.0], 1.0))),
        'field "features", row 1 of partition 1: is float32[1] where row 0 is float32[2]. ' + SHAPE,
    ),
    row_error(
        "partitions of mixed shapes",
        lambda fit: fit(fit.rdd(([1.0, 2.0], 1.0), ([1.0], 1.0))),
        'field "features", row 0 of partition 1: is float32[1] where row 0 of partition 0 is '
        f"float32[2]. {SHAPE}",
    ),
    row_error(
        "records of mixed widths",
        lambda fit: fit(fit.rdd(*[([1.0], 1.0)] * 3, (([1.0], [2.0]), 1.0))),
        'field "features", row 1 of partition 1: has features[0], features[1], label where row 0 '
        f"has features, label. {SHAPE}",
    ),
    row_error(
        "partitions of mixed widths",
        lambda fit: fit(fit.rdd(([1.0], 1.0), (([1.0], [2.0]), 1.0))),
        "row 0 of partition 1 has features[0], features[1], label where row 0 of partition 0 has "
        f"features, label. {SHAPE}",
    ),
    row_error(
        "empty record",
        lambda fit: fit(fit.rdd(([], 1.0), ([], 1.0))),
        f'field "features", row 0 of partition 0: is an empty array. {MEND}',
    ),
    row_error(
        "bad records to be redistributed",
        lambda fit: fit(fit.rdd("a", "b"), replicas=3),
        'field "record", row 0 of partition 0: is a str. '
        "Give (features, label) pairs or sparkdl.Sample(features, label).",
    ),
    row_error(
        "RDD of rows with other names",
        lambda fit: fit(fit.good().selectExpr("label y", "features x").rdd, replicas=3),
        'field "record", row 0 of partition 0: is a Row of y, x, which has no features, label. '
        "Records with named values are read by name: give the trainer these names, as "
        "Trainer(features=..., label=...), or make (features, label) pairs with rdd.map.",
    ),
    row_error(
        "RDD of rows without the weight",
        lambda fit: fit(fit.good().rdd, weight="w"),
        'field "record", row 0 of partition 0: is a Row of features, label, n, s, which has no w. '
        "Records with named values are read by name: give the trainer these names, as "
        "Trainer(features=..., label=...), or make (features, label) pairs with rdd.map.",
    ),
    row_error(
        "RDD with inf",
        lambda fit: fit(fit.rdd(([1.0, 2.0], 1.0), ([1.0, float("inf")], 1.0))),
        'field "features", row 0 of partition 1: holds inf. It is infinite, or beyond the 3.4e+38 '
        "of float32: filter out such rows, or scale the numbers.",
    ),
    row_error(
        "RDD with numbers beyond 64 bits",
        lambda fit: fit(fit.rdd(([1.0, 2.0], 1), ([1.0, 2.0], 2**70))),
        'field "label", row 0 of partition 1: holds a whole number that does not fit into int64. '
        "Filter out such records, or fix them with rdd.map.",
    ),
    row_error(
        "RDD of complex numbers",
        lambda fit: fit(fit.rdd(([1j, 2.0], 1.0), ([1j, 2.0], 1.0))),
        'field "features", row 0 of partition 0: is a list, not a number or an array of numbers. '
        "Filter out such records, or fix them with rdd.map.",
    ),
    row_error(
        "RDD of sparse tensors",
        lambda fit: fit(fit.rdd((torch.eye(2).to_sparse(), 1.0)), replicas=1),
        'field "features", row 0 of partition 0: is a Tensor that cannot become an array (can\'t '
        "convert Sparse layout tensor to numpy. Use Tensor.to_dense() first.). Filter out such "
        "records, or fix them with rdd.map.",
    ),
    row_error(
        "RDD of integers here and floats there",
        lambda fit: fit(fit.rdd(([1, 2], 1.0), ([1.0, 2.0], 1.0))),
        'field "features", row 0 of partition 1: is float32[2] where row 0 of partition 0 is '
        "int64[2]. Every row must be of the same type: write 1.0, not 1, where a measurement is "
        "meant, or fix them with rdd.map.",
    ),
    row_error(
        "Sample without weight",
        lambda fit: fit(fit.rdd(*[sparkdl.Sample([1.0, 2.0], 1.0)] * 2), weight="w"),
        'field "weight", row 0 of partition 0: is None. Give Sample(features, label, '
        "weight), or train with weight=None.",
    ),
    data_error(
        "images of an RDD",
        lambda fit: fit(fit.rdd(([1.0], 1.0), ([1.0], 1.0)), columns={"features": sparkdl.Image()}),
        'columns["features"] is a sparkdl.Image, which is for DataFrames: records of an RDD must '
        "hold numbers and arrays already. Convert them with rdd.map.",
    ),
]


def gone(fit: Any) -> Any:
    """A DataFrame over files that were deleted."""
    path = fit.tmp / "data.parquet"
    fit.good().coalesce(1).write.parquet(str(path))
    data = fit.spark.read.parquet(str(path))
    shutil.rmtree(path)
    return data


QUERIES = [
    row_error(
        "cast that fails",
        lambda fit: fit(fit.good().selectExpr("features", "double(s) label")),
        "the data cannot be read: The value 'x' of the type \"STRING\" cannot be cast to "
        '"DOUBLE" because it is malformed. Correct the value as per the syntax, or change its '
        "target type. Use `try_cast` to tolerate malformed input and return NULL instead. Fix the "
        "query or the function that produces the data; data.count() fails in the same way.",
        tasks_fail=True,
    ),
    row_error(
        "UDF that raises",
        lambda fit: fit(
            fit.good().withColumn("label", functions.udf(lambda n: 1 / 0, "double")("n"))
        ),
        "the data cannot be read: ZeroDivisionError: division by zero\nTraceback (most recent call "
        "last):\n…ZeroDivisionError: division by zero\nFix the query or the function that produces "
        "the data; data.count() fails in the same way.",
        tasks_fail=True,
    ),
    row_error(
        "rdd.map that raises",
        lambda fit: fit(fit.rdd(1, 2).map(lambda n: n / 0)),
        "the data cannot be read: partition … on … failed once. ZeroDivisionError: division by "
        "zero\nTraceback (most recent call last):\n…ZeroDivisionError: division by zero\nFix the "
        "query or the function that produces the data; data.count() fails in the same way.",
        tasks_fail=True,
    ),
    Mistake(
        "files that are gone",
        lambda fit: fit(gone(fit)),
        TrainingError,
        "reading the data: Encountered error while reading file "
        "file://{tmp}/data.parquet/….parquet. "
        "File does not exist. It is possible the underlying files have been updated.",
        jobs=4,
        tasks_fail=True,
    ),
]
