"""Every mistake a user can make, and the whole message that answers it, before anything trains.

In a message "…" stands for text that torch or Spark words.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from pyspark import SparkConf, cloudpickle
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions
from torch import nn

import sparkdl
from sparkdl import DataError, ModelError, ParameterError, SessionError
from sparkdl.session import context_of, settings_of

pytestmark = pytest.mark.spark
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SHAPE = "Every row must have the same shape: filter, pad or cut such rows."
IN_ARRAYS = (
    "dropna does not look into arrays: filter such rows with functions.exists, or fill them with "
    "functions.transform."
)
MEND = "Filter such records out, or mend them with rdd.map."


def scalar_model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 1), nn.Flatten(0))


def two_classes() -> nn.Module:
    return nn.Linear(2, 2)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 1)

    def forward(self, word: torch.Tensor) -> torch.Tensor:
        return self.table(word)[:, 0]


class SumOfInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.linear(a + b)[:, 0]


@dataclass
class Fit:
    """Fits on something, and knows whether a fit got as far as training."""

    spark: Any
    engine: str = "shuffle"
    started: bool = False

    def __call__(self, data: Any, **changes: Any) -> sparkdl.TrainedModel:
        values: dict[str, Any] = {
            "model": scalar_model,
            "loss": nn.MSELoss(),
            "optimizer": partial(torch.optim.SGD, lr=0.01),
            "batch_size": 4,
            "replicas": 2,
            "engine": self.engine,
            "stop": sparkdl.max_iteration(1),
            "callbacks": [Started(self)],
            **changes,
        }
        return sparkdl.Trainer(**values).fit(data)

    def frame(self, schema: str, *rows: Any, template: Any = None) -> Any:
        """A DataFrame of two partitions, the first half of the rows in the first."""
        return self.spark.createDataFrame(list(rows), schema)

    def rdd(self, *records: Any) -> Any:
        return self.spark.sparkContext.parallelize(list(records), 2)

    def good(self) -> Any:
        return self.frame(
            "features array<double>, label double, n int, s string",
            *[([float(i), 1.0], float(i), i, "x") for i in range(6)],
        )

    def features(self, kind: str, *values: Any) -> Any:
        return self.frame(f"features {kind}, label double", *[(v, 1.0) for v in values])

    def labels(self, kind: str, *values: Any) -> Any:
        return self.frame(
            f"features array<double>, label {kind}", *[([1.0, 2.0], v) for v in values]
        )


@dataclass
class Started(sparkdl.Callback):
    fit: Fit

    def on_fit_start(self, trainer: Any, state: Any) -> None:
        self.fit.started = True

    def __reduce__(self) -> Any:
        raise TypeError("a callback never leaves the driver")


@dataclass(frozen=True)
class Mistake:
    """``jobs``: whether finding it may take Spark jobs (the data must be read for it)."""

    name: str
    make: Callable[[Fit], Any]
    error: type[Exception]
    message: str
    jobs: bool = False


class HoldsLock(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 1)
        self.lock = threading.Lock()


def holding(spark: Any) -> Callable[[], nn.Module]:
    def make_model() -> nn.Module:
        spark.range(1).count()
        return scalar_model()

    return make_model


def raising() -> nn.Module:
    raise KeyError("no such layer")


def vector_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square()


def float_loss(output: torch.Tensor, target: torch.Tensor) -> Any:
    return (output - target).square().mean().item()


def detached_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.detach() - target).square().mean()


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def frozen() -> nn.Module:
    return nn.Linear(2, 1).requires_grad_(False)


def batch_normed() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1), nn.Flatten(0))


FOREIGN = nn.Linear(3, 3)
cross_entropy = {"model": two_classes, "loss": nn.CrossEntropyLoss()}

COLUMNS = [
    Mistake(
        "missing column",
        lambda fit: fit(fit.good(), features="feature"),
        DataError,
        'feature column "feature" is missing. Did you mean "features"? '
        "The DataFrame has: features, label, n, s.",
    ),
    Mistake(
        "missing label",
        lambda fit: fit(fit.good().drop("label")),
        DataError,
        'label column "label" is missing. The DataFrame has: features, n, s. '
        "To train without a label, set label=None.",
    ),
    Mistake(
        "several at once",
        lambda fit: fit(fit.good(), features=["featres", "n", "s"], label="labels"),
        DataError,
        "3 problems:\n"
        '  - feature column "featres" is missing. Did you mean "features"? '
        "The DataFrame has: features, label, n, s.\n"
        '  - feature column "s" is of type string: turn text into numbers first, for example with '
        "pyspark.ml.feature.StringIndexer, or cast it where it holds numbers.\n"
        '  - label column "labels" is missing. Did you mean "label"? '
        "The DataFrame has: features, label, n, s. To train without a label, set label=None.",
    ),
    Mistake(
        "string column",
        lambda fit: fit(fit.good(), features="s"),
        DataError,
        'feature column "s" is of type string: turn text into numbers first, for example with '
        "pyspark.ml.feature.StringIndexer, or cast it where it holds numbers.",
    ),
    Mistake(
        "array of strings",
        lambda fit: fit(fit.features("array<string>", ["a"])),
        DataError,
        'feature column "features" is of type array<string>: turn text into numbers first, for '
        "example with pyspark.ml.feature.StringIndexer, or cast it where it holds numbers.",
    ),
    Mistake(
        "timestamp column",
        lambda fit: fit(fit.good().withColumn("label", functions.current_timestamp())),
        DataError,
        'label column "label" is of type timestamp, which cannot become a tensor: use numbers, '
        "arrays of numbers or pyspark.ml.linalg vectors.",
    ),
    Mistake(
        "struct column",
        lambda fit: fit(fit.features("struct<a:double,b:double>", (1.0, 2.0))),
        DataError,
        'feature column "features" is of type struct<a:double,b:double>, which cannot become a '
        "tensor: use numbers, arrays of numbers or pyspark.ml.linalg vectors.",
    ),
    Mistake(
        "array of vectors",
        lambda fit: fit(
            fit.spark.createDataFrame([([Vectors.dense([1.0])], 1.0)], ["features", "label"])
        ),
        DataError,
        'feature column "features" is an array of vectors: use nested arrays, or one vector a row.',
    ),
    Mistake(
        "a stream",
        lambda fit: fit(
            fit.spark.readStream.format("rate").load().selectExpr("value features", "value label")
        ),
        DataError,
        "the DataFrame is a stream, which has no end: write it to a table, and use that table. "
        "trained.transform does work on a stream.",
    ),
]

ROWS = [
    Mistake(
        "null",
        lambda fit: fit(fit.labels("double", 1.0, 1.0, 1.0, 1.0, None, 1.0)),
        DataError,
        'column "label", row 1 of partition 1: is null. '
        'Drop such rows with df.dropna(subset=["label"]), or fill them.',
        jobs=True,
    ),
    Mistake(
        "null array",
        lambda fit: fit(fit.features("array<double>", [1.0, 2.0], [1.0, 2.0], None, [1.0, 2.0])),
        DataError,
        'column "features", row 0 of partition 1: is null. '
        'Drop such rows with df.dropna(subset=["features"]), or fill them.',
        jobs=True,
    ),
    Mistake(
        "null in an array",
        lambda fit: fit(fit.features("array<double>", [1.0, 2.0], [1.0, None])),
        DataError,
        f'column "features", row 0 of partition 1: holds a null. {IN_ARRAYS}',
        jobs=True,
    ),
    Mistake(
        "null in a nested array",
        lambda fit: fit(
            fit.features(
                "array<array<int>>", *[[[1, 2], [3, 4], [5, 6]]] * 2, [[1, 2], [3, None], [5, 6]]
            ),
            replicas=1,
        ),
        DataError,
        f'column "features", row …: holds a null. {IN_ARRAYS}',
        jobs=True,
    ),
    Mistake(
        "null vector",
        lambda fit: fit(
            fit.spark.createDataFrame(
                [(Vectors.dense([1.0, 2.0]), 1.0), (None, 1.0)], ["features", "label"]
            )
        ),
        DataError,
        'column "features", row 0 of partition 1: is null. '
        'Drop such rows with df.dropna(subset=["features"]), or fill them.',
        jobs=True,
    ),
    Mistake(
        "NaN",
        lambda fit: fit(fit.labels("double", 1.0, float("nan"), 1.0, 1.0)),
        DataError,
        'column "label", row 1 of partition 0: is NaN. '
        'Drop such rows with df.dropna(subset=["label"]), or fill them.',
        jobs=True,
    ),
    Mistake(
        "NaN in an array",
        lambda fit: fit(fit.features("array<float>", [1.0, 2.0], [1.0, 2.0], [1.0, float("nan")])),
        DataError,
        f'column "features", row 1 of partition 1: holds NaN. {IN_ARRAYS}',
        jobs=True,
    ),
    Mistake(
        "NaN in a vector",
        lambda fit: fit(
            fit.spark.createDataFrame(
                [(Vectors.sparse(2, {0: float("nan")}), 1.0)], ["features", "label"]
            )
        ),
        DataError,
        'column "features", row 0 of partition …: holds NaN. dropna does not look into vectors: '
        "mend them where they are made, or turn them into arrays with "
        "pyspark.ml.functions.vector_to_array and filter those with functions.exists.",
        jobs=True,
    ),
    Mistake(
        "ragged arrays",
        lambda fit: fit(fit.features("array<double>", *[[1.0, 2.0]] * 5, [1.0, 2.0, 3.0])),
        DataError,
        f'column "features", row 2 of partition 1: has 3 values where row 0 has 2. {SHAPE}',
        jobs=True,
    ),
    Mistake(
        "ragged nested arrays",
        lambda fit: fit(
            fit.features("array<array<double>>", *[[[1.0], [2.0]]] * 3, [[1.0], [2.0, 3.0]])
        ),
        DataError,
        f'column "features", row 1 of partition 1: has 2 values where row 0 has 1. {SHAPE}',
        jobs=True,
    ),
    Mistake(
        "ragged in a later Arrow batch",
        lambda fit: fit(
            fit.spark.range(0, 12_000, 1, 1).selectExpr(
                "if(id < 11000, array(1.0, 2.0), array(1.0)) features", "1.0 label"
            ),
            replicas=1,
        ),
        DataError,
        'column "features", row 11000 of partition 0: has 1 values where row 10000 has 2. ' + SHAPE,
        jobs=True,
    ),
    Mistake(
        "partitions disagree",
        lambda fit: fit(fit.features("array<double>", *[[1.0, 2.0]] * 3, *[[1.0, 2.0, 3.0]] * 3)),
        DataError,
        'column "features", row 0 of partition 1: is float32[3] where row 0 of partition 0 is '
        f"float32[2]. {SHAPE}",
        jobs=True,
    ),
    Mistake(
        "vector sizes",
        lambda fit: fit(
            fit.spark.createDataFrame(
                [(Vectors.dense([1.0, 2.0]), 1.0)] * 3 + [(Vectors.sparse(3, {0: 1.0}), 1.0)],
                ["features", "label"],
            )
        ),
        DataError,
        f'column "features", row 1 of partition 1: has 3 values where row 0 has 2. {SHAPE}',
        jobs=True,
    ),
    Mistake(
        "empty array",
        lambda fit: fit(fit.features("array<double>", [], [])),
        DataError,
        'column "features", row 0 of partition 0: is an empty array. '
        "Filter such rows, or leave the column out.",
        jobs=True,
    ),
    Mistake(
        "empty vector",
        lambda fit: fit(
            fit.spark.createDataFrame([(Vectors.dense([]), 1.0)] * 2, ["features", "label"])
        ),
        DataError,
        'column "features", row 0 of partition 0: is an empty vector. '
        "Filter such rows, or leave the column out.",
        jobs=True,
    ),
    Mistake(
        "empty DataFrame",
        lambda fit: fit(fit.good().filter("n < 0")),
        DataError,
        "the data is empty: there is no row to train on.",
        jobs=True,
    ),
]

RECORDS = [
    Mistake(
        "empty RDD",
        lambda fit: fit(fit.rdd()),
        DataError,
        "the data is empty: there is no row to train on.",
        jobs=True,
    ),
    Mistake(
        "RDD of strings",
        lambda fit: fit(fit.rdd("a", "b")),
        DataError,
        'field "record", row 0 of partition 0: is a str. '
        "Give (features, label) pairs or sparkdl.Sample(features, label).",
        jobs=True,
    ),
    Mistake(
        "RDD of pairs of strings",
        lambda fit: fit(fit.rdd(([1.0, 2.0], 1.0), ([1.0, 2.0], "b"))),
        DataError,
        'field "label", row 0 of partition 1: is a str, not a number or an array of numbers. '
        + MEND,
        jobs=True,
    ),
    Mistake(
        "RDD of triples",
        lambda fit: fit(fit.rdd((1.0, 2.0, 3.0), (1.0, 2.0, 3.0))),
        DataError,
        'field "record", row 0 of partition 0: is a tuple of 3. '
        "Give (features, label) pairs or sparkdl.Sample(features, label).",
        jobs=True,
    ),
    Mistake(
        "RDD of mappings",
        lambda fit: fit(fit.rdd(({"a": 1.0}, 1.0), ({"a": 1.0}, 1.0))),
        DataError,
        'field "features", row 0 of partition 0: is a dict, not a number or an array of numbers. '
        + MEND,
        jobs=True,
    ),
    Mistake(
        "RDD with None",
        lambda fit: fit(fit.rdd(([1.0, 2.0], 1.0), ([1.0, 2.0], None))),
        DataError,
        'field "label", row 0 of partition 1: is None, not a number or an array of numbers. '
        + MEND,
        jobs=True,
    ),
    Mistake(
        "Sample without label",
        lambda fit: fit(fit.rdd(sparkdl.Sample([1.0, 2.0]), sparkdl.Sample([1.0, 2.0]))),
        DataError,
        'field "label", row 0 of partition 0: is None. '
        "Give Sample(features, label), or train with label=None.",
        jobs=True,
    ),
    Mistake(
        "RDD with NaN",
        lambda fit: fit(fit.rdd(([1.0, 2.0], 1.0), ([1.0, float("nan")], 1.0))),
        DataError,
        f'field "features", row 0 of partition 1: holds NaN. {MEND}',
        jobs=True,
    ),
    Mistake(
        "ragged record",
        lambda fit: fit(fit.rdd(([1.0, 2.0], 1.0), ([[1.0], [2.0, 3.0]], 1.0))),
        DataError,
        'field "features", row 0 of partition 1: is ragged: its parts differ in length. ' + SHAPE,
        jobs=True,
    ),
    Mistake(
        "records of mixed shapes",
        lambda fit: fit(fit.rdd(*[([1.0, 2.0], 1.0)] * 3, ([1.0], 1.0))),
        DataError,
        'field "features", row 1 of partition 1: is float32[1] where row 0 is float32[2]. ' + SHAPE,
        jobs=True,
    ),
    Mistake(
        "partitions of mixed shapes",
        lambda fit: fit(fit.rdd(([1.0, 2.0], 1.0), ([1.0], 1.0))),
        DataError,
        'field "features", row 0 of partition 1: is float32[1] where row 0 of partition 0 is '
        f"float32[2]. {SHAPE}",
        jobs=True,
    ),
    Mistake(
        "records of mixed widths",
        lambda fit: fit(fit.rdd(*[([1.0], 1.0)] * 3, (([1.0], [2.0]), 1.0))),
        DataError,
        'field "features", row 1 of partition 1: has features[0], features[1], label where row 0 '
        f"has features, label. {SHAPE}",
        jobs=True,
    ),
    Mistake(
        "partitions of mixed widths",
        lambda fit: fit(fit.rdd(([1.0], 1.0), (([1.0], [2.0]), 1.0))),
        DataError,
        "row 0 of partition 1 has features[0], features[1], label where row 0 of partition 0 has "
        f"features, label. {SHAPE}",
        jobs=True,
    ),
    Mistake(
        "empty record",
        lambda fit: fit(fit.rdd(([], 1.0), ([], 1.0))),
        DataError,
        f'field "features", row 0 of partition 0: is an empty array. {MEND}',
        jobs=True,
    ),
    Mistake(
        "bad records to be redistributed",
        lambda fit: fit(fit.rdd("a", "b"), replicas=3),
        DataError,
        'field "record", row 0 of partition 0: is a str. '
        "Give (features, label) pairs or sparkdl.Sample(features, label).",
        jobs=True,
    ),
]

MODELS = [
    Mistake(
        "model with a lock",
        lambda fit: fit(fit.good(), model=HoldsLock()),
        ModelError,
        "model cannot be pickled, so it cannot travel to the executors (TypeError: cannot pickle "
        "'_thread.lock' object). Pass a function that builds the module (model=make_model), and "
        "open files, locks, connections and Spark sessions inside it.",
    ),
    Mistake(
        "model with a session",
        lambda fit: fit(fit.good(), model=holding(fit.spark)),
        ModelError,
        "model cannot be pickled, so it cannot travel to the executors (PySparkRuntimeError: …). "
        "Pass a function that builds the module (model=make_model), and "
        "open files, locks, connections and Spark sessions inside it.",
    ),
    Mistake(
        "loss with a lock",
        lambda fit: fit(fit.good(), loss=partial(mean_square, target=threading.Lock())),
        ModelError,
        "loss cannot be pickled, so it cannot travel to the executors (TypeError: cannot pickle "
        "'_thread.lock' object). Use a function or class of an importable module, with no open "
        "resource in it.",
    ),
    Mistake(
        "model that raises",
        lambda fit: fit(fit.good(), model=raising),
        ModelError,
        "model() raised KeyError: 'no such layer'. It is called without arguments; the traceback "
        "above shows where it failed.",
    ),
    Mistake(
        "model that wants arguments",
        lambda fit: fit(fit.good(), model=nn.Linear),
        ModelError,
        "model() raised TypeError: …. It is called without arguments; the traceback above shows "
        "where it failed.",
    ),
    Mistake(
        "no module",
        lambda fit: fit(fit.good(), model=lambda: [nn.Linear(2, 1)]),
        ModelError,
        "model() returned a list: it must return a torch.nn.Module.",
    ),
    Mistake(
        "no trainable parameter",
        lambda fit: fit(fit.good(), model=frozen),
        ModelError,
        "the model has no trainable parameter (all have requires_grad=False).",
    ),
    Mistake(
        "wrong input size",
        lambda fit: fit(fit.good(), model=lambda: nn.Linear(3, 1)),
        ModelError,
        'the model fails on the first rows ("features" [2, 2]; float32): RuntimeError: …shapes '
        "cannot be multiplied (2x2 and 3x1).",
        jobs=True,
    ),
    Mistake(
        "two columns for one input",
        lambda fit: fit(fit.good(), features=["features", "label"]),
        ModelError,
        'the model fails on the first rows ("features" [2, 2], "label" [2]; float32, float32): '
        "TypeError: … takes 2 positional arguments but 3 were given. Each of the 2 feature columns "
        "is an input of its own, model(a, b, ...); for one input join them first: "
        "VectorAssembler, or functions.array(...).",
        jobs=True,
    ),
    Mistake(
        "integers into Linear",
        lambda fit: fit(fit.features("array<int>", [1, 2], [3, 4])),
        ModelError,
        'the model fails on the first rows ("features" [3, 2]; int64): RuntimeError: …. Integer '
        "columns stay integers; cast a column that holds measurements: "
        'df.withColumn(name, df[name].cast("float")) or .cast("array<float>").',
        jobs=True,
    ),
    Mistake(
        "an index beyond the embedding, in a late row",
        lambda fit: fit(fit.features("int", 0, 1, 2, 0, 1, 2, 0, 1, 5, 0), model=Embedded),
        ModelError,
        'the model fails on the first rows ("features" [3]; int64): IndexError: index out of range '
        'in self. The data goes in "features" from 0 to 5: an embedding needs one row for each '
        "number from 0 on.",
        jobs=True,
    ),
    Mistake(
        "one row a mini-batch for batch norm",
        lambda fit: fit(fit.good(), model=batch_normed, stop=sparkdl.max_epoch(1)),
        ModelError,
        "the model needs mini-batches of more than one row (…), and in iteration 2 of each epoch a "
        "replica gets one: 6 rows, batch_size=4, replicas=2. Choose another batch_size or fewer "
        "replicas.",
        jobs=True,
    ),
]

LOSSES = [
    Mistake(
        "vector loss",
        lambda fit: fit(fit.good(), loss=vector_loss),
        ModelError,
        "the loss returned a tensor of shape [2]: it must return one number, the mean over the "
        'batch (reduction="mean" in torch.nn losses).',
        jobs=True,
    ),
    Mistake(
        "unreduced loss",
        lambda fit: fit(fit.good(), loss=nn.MSELoss(reduction="none")),
        ModelError,
        "the loss returned a tensor of shape [2]: it must return one number, the mean over the "
        'batch (reduction="mean" in torch.nn losses).',
        jobs=True,
    ),
    Mistake(
        "float loss",
        lambda fit: fit(fit.good(), loss=float_loss),
        ModelError,
        "the loss returned a float: it must return one number, the mean over the batch "
        '(reduction="mean" in torch.nn losses).',
        jobs=True,
    ),
    Mistake(
        "detached loss",
        lambda fit: fit(fit.good(), loss=detached_loss),
        ModelError,
        "the loss cannot be differentiated: RuntimeError: …. It must depend on the model's output "
        "through torch operations.",
        jobs=True,
    ),
    *[
        Mistake(
            f"output [B, 1] and label [B], {type(loss).__name__}",
            lambda fit, loss=loss: fit(fit.good(), model=lambda: nn.Linear(2, 1), loss=loss),
            ModelError,
            'the output has shape [2, 1] and the label "label" [2] (2 rows): torch would broadcast '
            "them against each other; end the model with torch.nn.Flatten(0) or .squeeze(-1).",
            jobs=True,
        )
        for loss in (nn.MSELoss(), mean_square)
    ],
    Mistake(
        "output [B] and label [B, 1]",
        lambda fit: fit(fit.labels("array<double>", [1.0], [2.0])),
        ModelError,
        'the output has shape [2] and the label "label" [2, 1] (2 rows): torch would broadcast '
        "them against each other; give the model an output of that shape, for example "
        ".unsqueeze(-1).",
        jobs=True,
    ),
    Mistake(
        "MSELoss of other shapes",
        lambda fit: fit(fit.labels("array<double>", [1.0], [2.0]), model=two_classes),
        ModelError,
        "the loss fails on output [2, 2] float32 and label [2, 1] float32: UserWarning: Using a "
        "target size (torch.Size([2, 1])) that is different to the input size (torch.Size([2, 2]))"
        '…. If "label" holds class numbers, cast it: '
        'df.withColumn("label", df["label"].cast("array<long>")).',
        jobs=True,
    ),
    Mistake(
        "class numbers as doubles",
        lambda fit: fit(fit.good(), **cross_entropy),
        ModelError,
        "the loss fails on output [2, 2] float32 and label [2] float32: RuntimeError: …. "
        'If "label" holds class numbers, cast it: '
        'df.withColumn("label", df["label"].cast("long")).',
        jobs=True,
    ),
    Mistake(
        "a class beyond the outputs, in a late row",
        lambda fit: fit(fit.labels("int", 0, 1, 0, 1, 0, 1, 0, 1, 7, 0), **cross_entropy),
        ModelError,
        "the loss fails on output [4, 2] float32 and label [4] int64: IndexError: Target 7 is out "
        'of bounds. "label" goes from 0 to 7: give the model an output for each class from 0 on, '
        "or number the classes anew (pyspark.ml.feature.StringIndexer).",
        jobs=True,
    ),
    Mistake(
        "a negative class",
        lambda fit: fit(fit.labels("int", 0, 1, 0, 1, 0, 1, 0, 1, -1, 0), **cross_entropy),
        ModelError,
        "the loss fails on output [3, 2] float32 and label [3] int64: IndexError: Target -1 is out "
        'of bounds. "label" goes from -1 to 1: give the model an output for each class from 0 on, '
        "or number the classes anew (pyspark.ml.feature.StringIndexer).",
        jobs=True,
    ),
    Mistake(
        "integer labels for BCE",
        lambda fit: fit(fit.labels("int", 0, 1), loss=nn.BCEWithLogitsLoss()),
        ModelError,
        "the loss fails on output [3] float32 and label [3] int64: RuntimeError: …. "
        'If "label" holds measurements, cast it: '
        'df.withColumn("label", df["label"].cast("float")).',
        jobs=True,
    ),
]

OPTIMIZERS = [
    Mistake(
        "no optimizer",
        lambda fit: fit(fit.good(), optimizer=lambda module: "adam"),
        ModelError,
        "optimizer gave a str: give a torch.optim class, a partial of one, or a callable(module) "
        "that returns a torch.optim.Optimizer.",
    ),
    Mistake(
        "optimizer by name",
        lambda fit: fit(fit.good(), optimizer="adam"),
        ParameterError,
        "optimizer is a str: give a torch.optim class, or a partial of one such as "
        "partial(torch.optim.Adam, lr=1e-3).",
    ),
    Mistake(
        "optimizer instance",
        lambda fit: fit(fit.good(), optimizer=torch.optim.Adam(FOREIGN.parameters())),
        ParameterError,
        "optimizer is already built; give its recipe: partial(torch.optim.Adam, lr=...).",
    ),
    Mistake(
        "optimizer of parameters, not of the module",
        lambda fit: fit(fit.good(), optimizer=lambda parameters: torch.optim.SGD(parameters)),
        ModelError,
        "the optimizer cannot be built (TypeError: …). Give a "
        "torch.optim class, a partial of one such as partial(torch.optim.Adam, lr=1e-3), or a "
        "callable that is given the module and returns an optimizer.",
    ),
    Mistake(
        "bad learning rate",
        lambda fit: fit(fit.good(), optimizer=partial(torch.optim.SGD, lr=-1.0)),
        ModelError,
        "the optimizer cannot be built (ValueError: Invalid learning rate: -1.0). Give a "
        "torch.optim class, a partial of one such as partial(torch.optim.Adam, lr=1e-3), or a "
        "callable that is given the module and returns an optimizer.",
    ),
    Mistake(
        "LBFGS",
        lambda fit: fit(fit.good(), optimizer=torch.optim.LBFGS),
        ModelError,
        "optimizer LBFGS evaluates the loss more than once in a step, and an iteration here is one "
        "pass over one batch. Let each step be one evaluation: for LBFGS, "
        "partial(torch.optim.LBFGS, max_iter=1) without line_search_fn.",
    ),
    Mistake(
        "LBFGS on several slices",
        lambda fit: fit(fit.good(), optimizer=partial(torch.optim.LBFGS, max_iter=1), slices=2),
        ModelError,
        "optimizer LBFGS looks at all parameters together, so they must be in one slice, and there "
        "are 2: set slices=1.",
    ),
    Mistake(
        "SparseAdam on dense gradients",
        lambda fit: fit(fit.good(), optimizer=torch.optim.SparseAdam),
        ModelError,
        "optimizer SparseAdam fails on a parameter of 1 dimension with a dense gradient (…). Give "
        "parameters that need another one their own, by name or pattern: "
        'optimizer={"encoder": torch.optim.Muon, "embedding": torch.optim.SparseAdam, "": '
        "torch.optim.AdamW}.",
    ),
    Mistake(
        "no optimizer of that name",
        lambda fit: fit(fit.good(), optimizer={"heat": torch.optim.SGD, "": torch.optim.Adam}),
        ModelError,
        'optimizer: "heat" is no submodule or parameter of the model.',
    ),
    Mistake(
        "foreign parameters",
        lambda fit: fit(
            fit.good(), optimizer=lambda module: torch.optim.SGD(FOREIGN.parameters(), lr=0.1)
        ),
        ModelError,
        "the optimizer holds a parameter of shape [3, 3] that is not one of the module's: build it "
        "from the module it is given.",
    ),
    Mistake(
        "no schedule",
        lambda fit: fit(fit.good(), schedule=lambda optimizer: None),
        ModelError,
        "schedule gave a NoneType, not a torch.optim.lr_scheduler.LRScheduler.",
    ),
    Mistake(
        "schedule that cannot be built",
        lambda fit: fit(fit.good(), schedule=torch.optim.lr_scheduler.StepLR),
        ModelError,
        "schedule cannot be built on the optimizer (TypeError: …). Give a partial of a "
        "torch.optim.lr_scheduler class, such as "
        "partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=100).",
    ),
    Mistake(
        "plateau without validation",
        lambda fit: fit(fit.good(), schedule=torch.optim.lr_scheduler.ReduceLROnPlateau),
        ModelError,
        "schedule ReduceLROnPlateau follows a metric of the validation, and there is none: give "
        "validation=..., or a schedule that follows the iterations.",
        jobs=True,
    ),
]

WHOLE = "give a whole number of at least 1."
PARAMETERS = [
    *[
        Mistake(
            f"{name}={value!r}",
            lambda fit, name=name, value=value: fit(fit.good(), **{name: value}),
            ParameterError,
            f"{name}={value!r}: {WHOLE}",
        )
        for name, value in [
            ("batch_size", 0),
            ("batch_size", -1),
            ("batch_size", 2.5),
            ("batch_size", True),
            ("batch_size", None),
            ("batch_size", "32"),
            ("replicas", 0),
            ("slices", 0),
        ]
    ],
    Mistake(
        "unknown engine",
        lambda fit: fit(fit.good(), engine="shufle"),
        ParameterError,
        'engine="shufle": use one of local, shuffle. Did you mean "shuffle"?',
    ),
    Mistake(
        "no features",
        lambda fit: fit(fit.good(), features=[]),
        ParameterError,
        "features is empty: name at least one column.",
    ),
    Mistake(
        "features by number",
        lambda fit: fit(fit.good(), features=[0]),
        ParameterError,
        "features=[0]: give a column name, or a list of names.",
    ),
    Mistake(
        "label by Column",
        lambda fit: fit(fit.good(), label=3),
        ParameterError,
        "label=3: give a column name, or a list of names.",
    ),
    Mistake(
        "loss class",
        lambda fit: fit(fit.good(), loss=nn.MSELoss),
        ParameterError,
        "loss is the class MSELoss: give an instance, MSELoss().",
    ),
    Mistake(
        "loss by name",
        lambda fit: fit(fit.good(), loss="mse"),
        ParameterError,
        "loss is a str: give a function of (output, target), such as torch.nn.MSELoss().",
    ),
    Mistake(
        "model by state",
        lambda fit: fit(fit.good(), model={}),
        ParameterError,
        "model is a dict: give a function that builds a torch.nn.Module, or a module.",
    ),
    Mistake(
        "stop by number",
        lambda fit: fit(fit.good(), stop=10),
        ParameterError,
        "stop is a int: give a trigger, such as sparkdl.max_epoch(10).",
    ),
    Mistake(
        "trigger of nothing",
        lambda fit: fit(fit.good(), stop=sparkdl.max_epoch(0)),
        ParameterError,
        "max_epoch(0): give a whole number of at least 1.",
    ),
    Mistake(
        "schedule that is none",
        lambda fit: fit(fit.good(), schedule=0.1),
        ParameterError,
        "schedule is a float: give a partial of a torch.optim.lr_scheduler class, such as "
        "partial(StepLR, step_size=10).",
    ),
    Mistake(
        "callback that is none",
        lambda fit: fit(fit.good(), callbacks=[3]),
        ParameterError,
        "callback 3 is not a sparkdl.Callback.",
    ),
    Mistake(
        "callback class",
        lambda fit: fit(fit.good(), callbacks=[Started]),
        ParameterError,
        "callback Started is a class: give an instance of it.",
    ),
    Mistake(
        "a callback without its list",
        lambda fit: fit(fit.good(), callbacks=sparkdl.Callback()),
        ParameterError,
        "callbacks is a Callback: give a list of sparkdl.Callback objects.",
    ),
    Mistake(
        "seed",
        lambda fit: fit(fit.good(), seed=0.5),
        ParameterError,
        "seed=0.5: give a whole number.",
    ),
    Mistake(
        "all at once",
        lambda fit: fit(fit.good(), batch_size=0, replicas=-2, engine="gpu", features=[]),
        ParameterError,
        "4 problems:\n"
        f"  - batch_size=0: {WHOLE}\n"
        f"  - replicas=-2: {WHOLE}\n"
        '  - engine="gpu": use one of local, shuffle.\n'
        "  - features is empty: name at least one column.",
    ),
]

MISTAKES = [*COLUMNS, *ROWS, *RECORDS, *MODELS, *LOSSES, *OPTIMIZERS, *PARAMETERS]


def expect(error: type[Exception], message: str) -> Any:
    """``pytest.raises`` on the whole message; "…" matches any text."""
    pattern = re.escape(message).replace("…", "(.|\n)*")
    return pytest.raises(error, match=f"^{pattern}$")


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_told_before_training(
    mistake: Mistake, spark: Any, num_jobs: Any, nothing_left: Any
) -> None:
    on_rows = mistake in ROWS or mistake in RECORDS
    fit = Fit(spark, engine="shuffle" if on_rows or not mistake.jobs else "local")
    before = num_jobs()
    with expect(mistake.error, mistake.message) as caught:
        mistake.make(fit)
    assert type(caught.value) is mistake.error
    assert not fit.started
    if not mistake.jobs:
        assert num_jobs() == before


ROWS_LOCALLY = [m for m in (*ROWS, *RECORDS) if "partition …" not in m.message]


@pytest.mark.parametrize("mistake", ROWS_LOCALLY[::3], ids=lambda mistake: mistake.name)
def test_the_local_engine_tells_the_same(mistake: Mistake, spark: Any, nothing_left: Any) -> None:
    fit = Fit(spark, engine="local")
    with expect(mistake.error, mistake.message):
        mistake.make(fit)
    assert not fit.started


def test_a_good_fit_is_none_of_these(spark: Any, nothing_left: Any) -> None:
    fit = Fit(spark)
    fit(fit.good())
    assert fit.started


def test_a_bad_loss_leaves_nothing_in_the_cluster(spark: Any, nothing_left: Any) -> None:
    fit = Fit(spark)
    with pytest.raises(ModelError, match="the loss returned a tensor of shape"):
        fit(fit.good(), loss=vector_loss)
    assert not fit.started


def test_a_bad_row_leaves_nothing_in_the_local_directories(spark: Any, slabs: Any) -> None:
    fit = Fit(spark)
    with pytest.raises(DataError):
        fit(fit.labels("double", 1.0, None))
    assert slabs(local=True) == []


@pytest.mark.parametrize("ignored", [-100, 1])
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
    with expect(sparkdl.UserError, f"fit takes a DataFrame or an RDD, not {kind}.…"):
        Fit(spark)(data)
    assert num_jobs() == before


def test_fit_on_a_pandas_frame(spark: Any) -> None:
    frame = Fit(spark).good().toPandas()
    with expect(sparkdl.UserError, "fit takes a DataFrame or an RDD, not pandas.…DataFrame.…"):
        Fit(spark)(frame)


def test_fit_on_a_spark_connect_frame() -> None:
    frame = type("DataFrame", (), {"__module__": "pyspark.sql.connect.dataframe"})()
    with expect(
        SessionError,
        "this DataFrame belongs to a Spark Connect session, which has no RDDs, and training needs "
        "them. Start a classic session on the cluster: sparkdl.session(master), or spark-submit "
        "your script; do not set spark.remote or SPARK_REMOTE.",
    ):
        context_of(frame)


class ContextWith:
    """The part of a SparkContext that settings are read from."""

    def __init__(self, **settings: str) -> None:
        self.conf = SparkConf(loadDefaults=False)
        for key, value in settings.items():
            self.conf.set(key, value)

    def getConf(self) -> SparkConf:
        return self.conf


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
        "Known: spark.sparkdl.slab.dir, spark.sparkdl.stages, spark.sparkdl.progress….\n"
        '  - spark.sparkdl.progress = "yes": use one of auto, true, false.',
    ):
        settings_of(ContextWith(**settings))  # type: ignore[arg-type]


def test_a_bad_setting_stops_a_fit(
    spark: Any, num_jobs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = ContextWith(**{"spark.sparkdl.progress": "yes"})
    monkeypatch.setattr(
        "sparkdl.train.fit.settings_of",
        lambda context: settings_of(bad),  # type: ignore[arg-type]
    )
    fit, before = Fit(spark), num_jobs()
    with expect(ParameterError, 'spark.sparkdl.progress = "yes": use one of auto, true, false.'):
        fit(fit.good())
    assert num_jobs() == before
    assert not fit.started


@pytest.fixture(scope="module")
def trained(spark: Any) -> sparkdl.TrainedModel:
    fit = Fit(spark)
    return fit(fit.good(), engine="local")


USES = [
    Mistake(
        "existing prediction column",
        lambda t: t.model.transform(t.good().withColumn("prediction", functions.lit(1))),
        DataError,
        'the DataFrame already has a column "prediction": drop it, or choose another name with '
        "prediction_col=.",
    ),
    Mistake(
        "existing column of the chosen name",
        lambda t: t.model.transform(t.good(), prediction_col="label"),
        DataError,
        'the DataFrame already has a column "label": drop it, or choose another name with '
        "prediction_col=.",
    ),
    Mistake(
        "transform without the column",
        lambda t: t.model.transform(t.good().drop("features")),
        DataError,
        'feature column "features" is missing. The DataFrame has: label, n, s.',
    ),
    Mistake(
        "transform of strings",
        lambda t: t.model.transform(t.features("string", "a")),
        DataError,
        'feature column "features" is of type string: turn text into numbers first, for example '
        "with pyspark.ml.feature.StringIndexer, or cast it where it holds numbers.",
    ),
    Mistake(
        "batch size",
        lambda t: t.model.transform(t.good(), batch_size=0),
        ParameterError,
        f"batch_size=0: {WHOLE}",
    ),
    Mistake(
        "postprocess that sums up",
        lambda t: t.model.transform(t.good(), postprocess=torch.sum),
        ParameterError,
        "postprocess must map a tensor of shape (rows, ...) to one with as many rows.",
    ),
    Mistake(
        "unknown metric",
        lambda t: t.model.evaluate(t.good(), metrics=["acuracy"]),
        ParameterError,
        'unknown metric "acuracy". Did you mean "accuracy"? '
        "Known: loss, accuracy, top1, top5, top@k, mae, mse, auc, hit_ratio@k, ndcg@k, or a "
        "sparkdl.Metric or torchmetrics.Metric.",
    ),
    Mistake(
        "evaluate without the label",
        lambda t: t.model.evaluate(t.good().drop("label")),
        DataError,
        'label column "label" is missing. The DataFrame has: features, n, s. '
        "To train without a label, set label=None.",
    ),
    Mistake(
        "evaluate on a stream",
        lambda t: t.model.evaluate(
            t.spark.readStream.format("rate").load().selectExpr("array(1.0) features", "1.0 label")
        ),
        DataError,
        "the DataFrame is a stream, which has no end: write it to a table, and use that table. "
        "trained.transform does work on a stream.",
    ),
    Mistake(
        "evaluate nothing",
        lambda t: t.model.evaluate(t.good().filter("n < 0")),
        DataError,
        "the data is empty: there is no row to evaluate.",
        jobs=True,
    ),
]


@dataclass
class Use(Fit):
    model: Any = None


@pytest.mark.parametrize("mistake", USES, ids=lambda mistake: mistake.name)
def test_a_mistake_in_using_a_model(
    mistake: Mistake, spark: Any, num_jobs: Any, trained: Any
) -> None:
    before = num_jobs()
    with expect(mistake.error, mistake.message):
        mistake.make(Use(spark, model=trained))
    if not mistake.jobs:
        assert num_jobs() == before


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            [[1.0, 2.0], None],
            'column "features", row 0 of the partition: is null. Drop such rows with '
            'df.dropna(subset=["features"]), or fill them.',
        ),
        (
            [[1.0, 2.0], [1.0, float("nan")]],
            f'column "features", row 0 of the partition: holds NaN. {IN_ARRAYS}',
        ),
    ],
    ids=["null", "NaN"],
)
def test_bad_rows_in_transform_and_evaluate(
    spark: Any, trained: Any, values: Any, message: str
) -> None:
    data = Fit(spark).features("array<double>", *values)
    for use in (lambda: trained.transform(data).collect(), lambda: trained.evaluate(data)):
        with pytest.raises(Exception, match=re.escape(message)) as caught:
            use()
        assert "DataError" in str(caught.value)
