"""Predictions: prepared and tried on the driver, computed partition by partition on the executors."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark import RDD
from pyspark.sql import DataFrame, Row, functions
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import DataType, StringType, StructField, StructType
from torch import nn

from sparkdl.compat import arrow_udf
from sparkdl.data.arrow_tasks import check_new_columns, check_unambiguous, numbered, of_structs
from sparkdl.data.columns.base import Specs, names_read
from sparkdl.data.fields import Field, with_fields
from sparkdl.data.records import Names
from sparkdl.data.schema import columns_of, quoted
from sparkdl.errors import DataError, ParameterError, raise_all, shown
from sparkdl.infer.forward import (
    PRECISIONS,
    Forward,
    ShippedModule,
    Trial,
    device_of,
    for_convolutions,
    in_halves,
    made_up,
    quantized,
    rows_to_try,
    sender_to,
    zeros_like,
)
from sparkdl.infer.manifest import ModelData
from sparkdl.infer.outputs import Finish, Output, OutputColumn, lengths_of, pieces, sequences_of
from sparkdl.infer.read import (
    ANOTHER_FORM,
    Group,
    ReadColumns,
    Reader,
    ReadRecords,
    Window,
    another_form,
    form_of,
    record_specs,
)
from sparkdl.model.recipe import Part, Signature, problems_of_part
from sparkdl.plain import is_whole, plain
from sparkdl.session import context_of, is_connected
from sparkdl.spark.worker import finish_task, mistakes_told_briefly
from sparkdl.usercode import accompanied

TENSOR_BYTES = 8 << 20
"""The most bytes of a layer's result on the CPU."""
LEAST_ROWS = 8
WINDOW_BATCHES = 64
WINDOW_BYTES = 256 << 20
"""The limits of a window: so many batches, and so many bytes of predictions."""
_CHOICES: Mapping[str, Collection[Any]] = {
    "precision": PRECISIONS,
    "quantize": (None, "int8"),
    "handle_invalid": ("error", "skip", "keep"),
}
HELD = "sparkdl_predictions"
"""The column that holds the predictions before each gets a column of its own."""


@dataclass(frozen=True)
class Options:
    """The options that all predictions share, see :func:`sparkdl.predict`."""

    batch_size: int = 256
    precision: str = "fp32"
    quantize: str | None = None
    handle_invalid: str = "error"
    error_col: str = "error"

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch_size", whole_batch(self.batch_size))
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                names = ", ".join(map(str, choices))
                raise ParameterError(f"{name}={shown(value)}: use one of {names}.")
        if self.quantize and self.precision != "fp32":
            raise ParameterError(
                f"quantize={shown(self.quantize)} and precision={shown(self.precision)} exclude each "
                "other: leave one of them out."
            )


def whole_batch(value: Any) -> int:
    """Return a batch size as an int. Raises ParameterError."""
    size = plain(value)
    if not is_whole(size, 1):
        raise ParameterError(f"batch_size={shown(size)}: give a whole number of at least 1.")
    return size


@dataclass(frozen=True)
class Inputs:
    """The inputs of a model: the columns or fields of records, and how it is called with them."""

    names: tuple[str, ...]
    specs: Specs
    signature: Signature
    float_dtype: str
    fields: tuple[Field, ...] = ()  # of the training; (): it was not trained here
    keywords: tuple[str, ...] = ()

    def reader(self, data: DataFrame | RDD, rows: int, trained: ModelData | None = None) -> Reader:
        """Return how ``data`` is read, for batches of so many ``rows``; with the labels of ``trained``.

        Raises DataError, or SessionError if its session was stopped.
        """
        if not is_connected(data):
            context_of(data)
        label: tuple[str, ...] = ()
        fields, count = self.fields, len(self.names)
        if trained is not None:
            label, fields, count = trained.label, trained.fields, trained.num_features
        if isinstance(data, RDD):
            names = [field.name for field in fields] or self.names
            specs = record_specs(names, len(names) if trained is None else count, self.specs)
            records = Names(self.names, label, inputs=self.keywords)
            return ReadRecords(records, count, self.float_dtype, rows, specs, fields)
        columns, labels = columns_of(
            data.schema, self.names, label, self.float_dtype, self.specs, fields
        )
        check_unambiguous(data, names_read(self.names, self.specs))
        for column, field in with_fields(columns, fields):
            if column.spec is None and another_form(column.depth + column.vector, field):
                kind = data.schema[column.name].dataType.simpleString()
                raise DataError(
                    f'feature column "{column.name}" is of type {kind}, and the model was trained on '
                    f"{field}. {ANOTHER_FORM}"
                )
        return ReadColumns.of((*columns, *labels), rows)


@dataclass(frozen=True)
class ModelSource:
    """A model to predict with."""

    module: nn.Module  # on the CPU
    build: Any  # the function that builds it if it does not pickle, or the module
    inputs: Inputs | None = None  # of the training
    part: Part = None  # of what it returns
    output: Output | None = None  # the form of that part, if it is known
    seed: int = 0
    folder: Any = None  # of ``save_pretrained``
    inner: nn.Module | None = None  # as it was found, if ``module`` was made of it


def source_of(trained: ModelData) -> ModelSource:
    """Return a trained model as predictions take it."""
    fields, inputs = trained.fields[: trained.num_features], list(trained.signature.inputs)
    keywords = []  # those of the model's inputs that are not lengths and masks
    for one in fields if inputs else ():
        keywords.append(inputs.pop(0))
        if one.padding is not None:
            del inputs[: len(one.padding.names("")) - 1]
    signature, part = replace(trained.signature, part=None), trained.signature.part
    known = Inputs(
        *(trained.features, trained.columns, signature, trained.float_dtype),
        *(fields, tuple(keywords)),
    )
    return ModelSource(trained.module, trained.model, known, part, trained.output, trained.seed)


@dataclass(frozen=True)
class Score:
    """The work on a partition: read rows, run the model, put predictions in the order of the rows."""

    module: ShippedModule
    reader: Any  # a Reader
    outputs: tuple[OutputColumn, ...]
    signature: Signature
    batch_size: int
    unit_bytes: int = 0  # of a row's (or element's) largest tensor; 0: unknown; see rows_at_once
    precision: str = "fp32"
    error_col: str | None = None  # for the reason why a row has no predictions; None: raise
    by_length: bool = True  # sort the rows of a window by length

    def scored(self, items: Iterable[Any]) -> Iterator[tuple[Window, Iterator[_Scored]]]:
        """Yield each window of ``items`` with its scored batches; these come in any order."""
        # tasks share the cores, and tokenizers run in a thread of this one
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        forward = Forward(self.module.load(), self.signature, self.precision)
        for window in self.reader.windows(items, self.error_col is not None):
            yield window, self._batches(forward, window)

    def _batches(self, forward: Forward, window: Window) -> Iterator[_Scored]:
        on_cpu = device_of(forward.module).type == "cpu"
        size = self.rows_at_once if on_cpu else lambda length: self.batch_size
        for group in window.groups:
            for batch in group.batches(size, self.by_length):
                yield from self._run(forward, batch, window.problems)

    def rows_at_once(self, length: int) -> int:
        """Return the number of rows of a batch on the CPU, for rows of this length.

        It is lower than :attr:`batch_size` if tensors would be so large that the memory of each is
        mapped and cleared anew, which takes longer than computing it.
        """
        if self.unit_bytes <= 0:
            return self.batch_size
        return min(self.batch_size, max(LEAST_ROWS, TENSOR_BYTES // (self.unit_bytes * length)))

    def _run(self, forward: Forward, batch: Group, problems: dict[int, str]) -> Iterator[_Scored]:
        """Yield the values of a batch, see :func:`in_halves`; bad rows have a problem, if kept."""

        def computed(part: Group) -> list[np.ndarray]:
            return forward.predictions(part.arrays, self.outputs)

        def note(row: Group, reason: str) -> None:
            problems[int(row.places[0])] = reason

        bad = None if self.error_col is None else note
        return in_halves(batch, len(batch.places), computed, Group.some, bad)

    @property
    def alone(self) -> bool:
        """Return whether a prediction is one value, and not a struct of several."""
        return len(self.outputs) == 1 and self.error_col is None


_Scored = tuple[Group, list[np.ndarray]]
"""A batch, and the values of each output column."""


@dataclass(frozen=True)
class ScoreColumns(Score):
    """The body of the Arrow UDF: feature columns in, predictions out."""

    @property
    def type(self) -> DataType:
        """The type of what is yielded: one column, or a struct of several."""
        if self.alone:
            return self.outputs[0].type
        fields = [StructField(column.name, column.type) for column in self.outputs]
        more = [] if self.error_col is None else [StructField(self.error_col, StringType())]
        return StructType([*fields, *more])

    def __call__(self, batches: Iterator[tuple[pa.Array, ...] | pa.Array]) -> Iterator[pa.Array]:
        arrays = (
            of_structs(batch if isinstance(batch, tuple) else (batch,), self.reader.columns)
            for batch in batches
        )
        with mistakes_told_briefly():
            for window, scored in self.scored(arrays):
                groups = window.groups if self.by_length else ()
                if self.error_col is None and all(lengths_of(g.arrays) is None for g in groups):
                    for _, values in scored:  # at once: an output may be much larger than its input
                        yield from self._in_order(values)
                else:
                    yield self._joined(self._placed(window, scored), window)
        finish_task()

    def _in_order(self, values: Sequence[np.ndarray]) -> Iterator[pa.Array]:
        if len(values) == 1:
            column = self.outputs[0]
            yield from (column.to_arrow(part, None) for part in pieces(values[0]))
        else:
            pairs = zip(self.outputs, values, strict=True)
            yield self._joined([column.to_arrow(part, None) for column, part in pairs], None)

    def _placed(self, window: Window, scored: Iterator[_Scored]) -> list[pa.Array]:
        """Return an array per column, in the order of the rows; null where there is no prediction."""
        parts: list[tuple[np.ndarray, list[pa.Array]]] = []
        for batch, values in scored:
            sequences, pairs = sequences_of(batch.arrays), zip(self.outputs, values, strict=True)
            parts.append((batch.places, [column.to_arrow(v, sequences) for column, v in pairs]))
        if not parts:
            return [pa.nulls(window.count, column.kind) for column in self.outputs]
        places = np.concatenate([places for places, _ in parts])
        positions = np.full(window.count, -1)
        positions[places] = np.arange(len(places))
        order = pa.array(positions, mask=positions < 0)
        columns = zip(*(arrays for _, arrays in parts), strict=True)
        return [pa.concat_arrays(list(arrays)).take(order) for arrays in columns]

    def _joined(self, arrays: list[pa.Array], window: Window | None) -> pa.Array:
        if self.alone:
            return arrays[0]
        names = [column.name for column in self.outputs]
        if self.error_col is not None and window is not None:
            reasons = [window.problems.get(place) for place in range(window.count)]
            arrays, names = [*arrays, pa.array(reasons, pa.string())], [*names, self.error_col]
        return pa.StructArray.from_arrays(arrays, names)


@dataclass(frozen=True)
class ScoreRecords(Score):
    """The task over an RDD: a prediction for each record, in order.

    It is a number or an array; a :class:`Row` of several, or beside the reason why there is none.
    """

    skip: bool = False  # leave out records without a prediction

    def __call__(self, records: Iterable[Any]) -> Iterator[Any]:
        told = self.error_col is not None and not self.skip
        names = [*(column.name for column in self.outputs), *([self.error_col] if told else [])]
        with mistakes_told_briefly():
            for window, scored in self.scored(records):
                rows = self._rows(scored)
                for place in range(window.count) if not self.skip else sorted(rows):
                    row = rows.get(place) or (None,) * len(self.outputs)
                    row = (*row, window.problems.get(place)) if told else row
                    yield row[0] if len(names) == 1 else Row(*names)(*row)
        finish_task()

    def _rows(self, scored: Iterator[_Scored]) -> dict[int, tuple[Any, ...]]:
        """Return the predictions of a window's records by their places."""
        rows: dict[int, tuple[Any, ...]] = {}
        for batch, values in scored:
            sequences, pairs = sequences_of(batch.arrays), zip(self.outputs, values, strict=True)
            columns = [column.to_python(part, sequences) for column, part in pairs]
            rows |= zip(batch.places.tolist(), zip(*columns, strict=True), strict=True)
        return rows


@dataclass(frozen=True)
class Inference:
    """Predictions that are ready to be computed."""

    task: Any  # ScoreColumns or ScoreRecords
    options: Options
    module: nn.Module  # before it is quantized

    def udf(self, example: DataFrame) -> Any:
        """Return the work as a function of columns of the types that ``example`` has."""
        types = [example.schema[name].dataType for name in self._names()]
        return arrow_udf(accompanied(self.task), types, self.task.type)

    def _names(self) -> list[str]:
        """Return the columns of the DataFrame that are read."""
        return [name for column in self.task.reader.columns for name in column.names]

    def function(self, example: DataFrame) -> Any:
        """Return :meth:`udf` for SQL, where columns may be of types that ``example`` does not have."""
        reader = self.task.reader
        schema = example.select(*numbered(reader.columns)).schema
        kinds = [to_arrow_type(field.dataType) for field in schema]
        reader = replace(reader, forms=tuple(map(form_of, kinds)))
        return replace(self, task=replace(self.task, reader=reader)).udf(example)

    def applied(self, data: DataFrame) -> DataFrame:
        """Return the data with the columns of predictions."""
        names = [column.name for column in self.task.outputs]
        keep = self.options.handle_invalid == "keep"
        fields = [*names, *([self.options.error_col] if keep else [])]
        how = "=" if self.task.alone else "=, outputs= or error_col="
        check_new_columns(data, fields, f" with prediction_col{how}")
        inputs = [functions.col(quoted(name)) for name in self._names()]
        # not deterministic: Spark would compute it again for each filter on a prediction
        computed = self.udf(data).asNondeterministic()(*inputs)
        if self.task.alone:
            return data.withColumn(names[0], computed)
        found = data.withColumn(HELD, computed)
        if self.options.handle_invalid == "skip":
            found = found.where(functions.col(HELD)[self.task.error_col].isNull())
        columns = [functions.col(HELD)[name].alias(name) for name in fields]
        return found.select("*", *columns).drop(HELD)

    def over(self, records: RDD) -> RDD:
        """Return the predictions for an RDD."""
        return records.mapPartitions(accompanied(self.task))


def prepare(
    data: DataFrame | RDD,
    source: ModelSource,
    inputs: Inputs,
    parts: Mapping[str, Part] | None,
    prediction_col: str,
    options: Options,
    *,
    example: DataFrame | None = None,
    columns: Sequence[OutputColumn] | None = None,
    exact: bool = False,
    finish: Finish = None,
) -> Inference:
    """Return predictions, checked and tried; ``example`` are rows to try in place of made-up ones.

    ``columns`` are what the outputs become, if they are known; then nothing is tried. If ``exact``,
    batches are rows in their order, and the module stays as it is. If not, it may get a faster layout
    and smaller batches, and rows are sorted by length.
    """
    module, fixed = source.module, getattr(source.module, "fixed_rows", None)
    rows = fixed or options.batch_size
    reader = inputs.reader(data, rows)
    known = source.output if exact and parts == {prediction_col: source.part} else None
    if not exact:
        module = (quantized if options.quantize else for_convolutions)(module)
    forward = Forward(module, inputs.signature, options.precision)
    made = None
    if example is None and inputs.fields:
        made = zeros_like(inputs.fields)
    elif example is None and isinstance(data, DataFrame) and isinstance(reader, ReadColumns):
        made = made_up(reader.columns, [data.schema[name].dataType for name in inputs.names])
    keep = options.handle_invalid != "error"
    if columns is None:
        tried = data if example is None else example
        trial = Trial(forward, parts, prediction_col, finish, known)
        found, unit_bytes = trial.run(made, partial(rows_to_try, tried, reader, keep))
    else:
        found, unit_bytes = tuple(columns), 0
    if exact or fixed:
        unit_bytes = 0
    outputs = tuple(replace(one, by_element=one.by_element and not exact) for one in found)
    shipped = ShippedModule.of(
        module,
        sender_to(data),
        module if options.quantize else source.build,
        source.seed,
        (source.inner or source.module, None if exact else (options.quantize, "fast")),
    )
    on_cpu = options.quantize or getattr(module, "on_cpu", False)
    task: dict[str, Any] = {
        "module": replace(shipped, on_cpu=True) if on_cpu else shipped,
        "outputs": outputs,
        "signature": inputs.signature,
        "batch_size": rows,
        "unit_bytes": unit_bytes,
        "precision": options.precision,
        "error_col": options.error_col if keep else None,
        "by_length": not exact,
    }
    if not isinstance(reader, ReadColumns):
        skip = options.handle_invalid == "skip"
        return Inference(ScoreRecords(reader=reader, skip=skip, **task), options, source.module)
    if not exact:
        row_bytes = max(1, sum(column.row_bytes for column in outputs))
        window = max(rows, min(WINDOW_BATCHES * rows, WINDOW_BYTES // row_bytes))
        reader = replace(reader, rows=window)
    return Inference(ScoreColumns(reader=reader, **task), options, source.module)


def prepare_trained(
    data: DataFrame | RDD,
    trained: ModelData,
    part: Part,
    prediction_col: str,
    options: Options,
    finish: Finish = None,
) -> Inference:
    """Return the exact predictions of a trained model."""
    raise_all(ParameterError, problems_of_part(part))
    source = source_of(trained)
    assert source.inputs is not None
    parts = {prediction_col: source.part if part is None else part}
    return prepare(
        data, source, source.inputs, parts, prediction_col, options, exact=True, finish=finish
    )
