"""The tasks of fits by group: train one group in this process, and predict with its model."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from sparkdl.care.hints import check_labels
from sparkdl.data.columns.base import Column
from sparkdl.data.columns.numeric import to_numpy
from sparkdl.data.fields import SampleHandle, check_total_weight
from sparkdl.data.partition_reader import close_partitions
from sparkdl.data.partition_writer import PartitionWriter
from sparkdl.data.ragged import Rows
from sparkdl.data.row_errors import RowError
from sparkdl.data.sample_set import SampleSet
from sparkdl.errors import DataError
from sparkdl.infer.forward import run_batches
from sparkdl.infer.outputs import as_numpy, to_arrow
from sparkdl.loop.history import History
from sparkdl.loop.schedule import Schedule
from sparkdl.model.flat import filled
from sparkdl.model.recipe import Signature
from sparkdl.process.determinism import Numerics
from sparkdl.process.system import label_output
from sparkdl.slab.root import SlabConfig
from sparkdl.train.engine_inputs import run_spec
from sparkdl.train.local_fit import local_engine, train_here
from sparkdl.train.prepare import PreparedModel, prepare
from sparkdl.train.recipes import build_model

if TYPE_CHECKING:
    from sparkdl.train.trainer import Trainer

RESULT = "rows bigint, iterations bigint, loss double, seconds double, error string, weights binary"
"""The columns of a group's result, after its keys."""
_prepared: OrderedDict[str, PreparedModel] = OrderedDict()
"""The model of each run of this process, of the last few."""
MOST_PREPARED = 4


@dataclass(frozen=True)
class FitGroup:
    """The function of ``applyInArrow``: a group's rows in, its model or the reason why not out."""

    trainer: Trainer  # of the engine "local"
    columns: tuple[Column, ...]
    num_features: int
    slab: SlabConfig  # removed by the driver after all groups
    threads: int
    numerics: Numerics  # those of the driver

    def __call__(self, key: tuple[pa.Scalar, ...], rows: pa.Table) -> pa.Table:
        began, found = time.perf_counter(), History()
        weights, reason = None, None
        label_output(f"group {', '.join(str(one.as_py()) for one in key)}")
        try:
            handle = self._written(rows)
            try:
                weights = self._fit(handle, found).numpy().tobytes()
            finally:
                close_partitions()
                _remove(handle)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        label_output("")
        epochs = found.epochs()
        result = {
            "rows": rows.num_rows,
            "iterations": len(found),
            "loss": epochs[-1]["loss"] if epochs else None,
            "seconds": time.perf_counter() - began,
            "error": reason,
            "weights": weights,
        }
        types = (pa.int64(), pa.int64(), pa.float64(), pa.float64(), pa.string(), pa.binary())
        keys = {f"k{i}": pa.array([one.as_py()], one.type) for i, one in enumerate(key)}
        values = zip(result.items(), types, strict=True)
        return pa.table(keys | {name: pa.array([value], kind) for (name, value), kind in values})

    def _fit(self, handle: SampleHandle, history: History) -> torch.Tensor:
        """Train on the rows, and return the flat vector of the weights; ``history`` grows."""
        self.numerics.use()
        trainer, model = self.trainer, self._model()
        weighted = self.columns[-1].weight
        labels = len(self.columns) - self.num_features - weighted
        samples = SampleSet(None, (handle,), handle.fields, self.num_features, [], labels, weighted)
        check_labels(trainer.objective, samples)
        run = run_spec(trainer, model, samples, self.slab, self.threads)
        engine = local_engine(trainer, model, samples, run)
        schedule = Schedule(
            model.optimizer, trainer.schedule, trainer.schedule_per, trainer.schedule_metric
        )
        train_here(trainer, engine, schedule, [], [], history)
        return engine.weights()

    def _model(self) -> PreparedModel:
        """Return the prepared model, made once in a process."""
        run = self.slab.name
        if run not in _prepared:
            _prepared[run] = prepare(self.trainer, None)
            while len(_prepared) > MOST_PREPARED:
                _prepared.popitem(last=False)
        return _prepared[run]

    def _written(self, rows: pa.Table) -> SampleHandle:
        """Write the rows into the slab root. Raises DataError."""
        weighted = self.columns[-1].weight
        writer = PartitionWriter(self.slab, weighted=weighted)
        try:
            names = [column.name for column in self.columns]
            labels = [i for i, column in enumerate(self.columns) if column.label]
            writer.add(names, arrays_of(rows, self.columns), labels=labels)
        except RowError as error:
            writer.fail(error.problem)
            raise DataError(error.problem.message("the group")) from None
        handle = writer.finish()
        if weighted:
            check_total_weight([handle], len(handle.fields) - 1, "the weight of the group")
        return handle


def _remove(handle: SampleHandle) -> None:
    """Remove the files of a group's samples."""
    for path in (*(segment.path for segment in handle.segments), handle.order_path):
        for file in Path(path).parent.glob(f"{Path(path).name}*"):
            file.unlink(missing_ok=True)


@dataclass(frozen=True)
class PredictGroup:
    """The function of a cogroup's ``applyInArrow``: rows and model in, predictions out."""

    payload: bytes
    dtype: str  # of the weights, by its NumPy name
    features: tuple[Column, ...]
    signature: Signature
    dimensions: int  # of a batch's output
    prediction_col: str
    type: pa.DataType
    batch_size: int

    def __call__(self, rows: pa.Table, models: pa.Table) -> pa.Table:
        weights = models.column("weights")[0].as_py() if models.num_rows else None
        if weights is None or not rows.num_rows:
            return rows.append_column(self.prediction_col, pa.nulls(rows.num_rows, self.type))
        flat = torch.from_numpy(np.frombuffer(weights, self.dtype).copy())
        module = filled(build_model(self.payload), flat).eval()
        try:
            arrays = arrays_of(rows, self.features, names=True)
        except RowError as error:
            raise DataError(error.problem.message("the group")) from None
        found = run_batches(module, arrays, self.batch_size, self.dimensions, self.signature)
        parts = [to_arrow(as_numpy(output)).cast(self.type) for output, _ in found]
        return rows.append_column(self.prediction_col, pa.chunked_array(parts, self.type))


def arrays_of(rows: pa.Table, columns: Sequence[Column], names: bool = False) -> list[Rows]:
    """Return the tensors of a table's columns, which have their names or are called c0, c1, ...

    Raises RowError.
    """
    found = []
    for i, column in enumerate(columns):
        chunks: Any = rows.column(column.name if names else f"c{i}").combine_chunks()
        found.append(to_numpy(chunks, column))
    return found
