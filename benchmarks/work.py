"""A model with all that its training takes, and its samples wherever they are wanted.

A sample is a row of features and a label, drawn at random on the spot: rows of an RDD or of a DataFrame
by Spark's tasks, tensors by the baselines. Images travel as flat rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyspark import RDD
from pyspark.sql import DataFrame, SparkSession
from torch import nn, optim

Arrays = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Work:
    """A model, and how it is trained. ``optimizer``: as :class:`sparkdl.Trainer` takes it."""

    name: str
    make: Callable[[], nn.Module]
    draw: Callable[[np.random.Generator, int], Arrays]
    batches: tuple[int, ...]
    samples: int = 16_384
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = nn.CrossEntropyLoss()  # noqa: RUF009
    optimizer: Any = partial(optim.SGD, lr=0.01)  # noqa: RUF009
    large: bool = False
    """An iteration computes for a second or so: a few of them do."""

    @property
    def parameters(self) -> int:
        """How many there are, without making them."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.make().parameters())

    def arrays(self, rows: int, seed: int = 0) -> Arrays:
        """Features, one row a sample, and labels."""
        return self.draw(np.random.default_rng(seed), rows)

    def tensors(self, rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self.arrays(rows, seed)
        return torch.from_numpy(x), torch.from_numpy(y)

    def optimizers(self, module: nn.Module) -> list[optim.Optimizer]:
        """What plain PyTorch needs: one optimizer a submodule that :attr:`optimizer` names, the
        longest name first."""
        if not isinstance(self.optimizer, Mapping):
            return [self.optimizer(module.parameters())]
        left, made = dict(module.named_parameters()), []
        for name in sorted(self.optimizer, key=len, reverse=True):
            chosen = [key for key in left if key.startswith(name)]
            made.append(self.optimizer[name]([left.pop(key) for key in chosen]))
        return made

    def rdd(self, spark: SparkSession, partitions: int, samples: int | None = None) -> RDD:
        """``(features, label)`` records, drawn by the tasks; each partition has as many."""
        each = -(-(samples or self.samples) // partitions)
        numbers = spark.sparkContext.parallelize(range(partitions), partitions)
        return numbers.mapPartitionsWithIndex(partial(_records, self, each))

    def dataframe(self, spark: SparkSession, partitions: int, samples: int) -> DataFrame:
        """Columns ``features`` (an array) and ``label``, drawn by the tasks."""
        schema = pa.schema([_arrow(f, c) for f, c in zip(NAMES, self.arrays(1), strict=True)])
        fields = ", ".join(f"{field.name} {_sql(field.type)}" for field in schema)
        numbers = spark.range(0, samples, numPartitions=partitions)
        return numbers.mapInArrow(partial(_batches, self, schema), fields)


NAMES = ("features", "label")


def _records(work: Work, rows: int, partition: int, _: Iterable[int]) -> Iterator[Any]:
    yield from zip(*work.arrays(rows, partition), strict=True)


def _batches(
    work: Work, schema: pa.Schema, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if batch.num_rows:
            columns = work.arrays(batch.num_rows, seed=batch.column(0)[0].as_py())
            values = [_column(array, f.type) for array, f in zip(columns, schema, strict=True)]
            yield pa.RecordBatch.from_arrays(values, schema=schema)


def _column(array: np.ndarray, kind: pa.DataType) -> pa.Array:
    if array.ndim == 1:
        return pa.array(array, kind)
    offsets = np.arange(0, array.size + 1, array.shape[1], dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(array.reshape(-1)))


def _arrow(name: str, array: np.ndarray) -> pa.Field:
    kind = pa.from_numpy_dtype(array.dtype)
    return pa.field(name, pa.list_(kind) if array.ndim == 2 else kind)


def _sql(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"array<{_sql(kind.value_type)}>"
    return {"float": "float", "int64": "bigint"}[str(kind)]
