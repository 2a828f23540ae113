"""Many small models: one fit for each group of a DataFrame's rows, inside Spark's tasks."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from pyspark.sql import DataFrame, SparkSession, functions
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import StructField, StructType, _parse_datatype_string

from sparkdl.care.hints import check_labels, check_there
from sparkdl.care.rules import BALANCED
from sparkdl.checkpoint.files import Folder
from sparkdl.codec.files import MAX_JSON_BYTES, is_changed, parse_json, with_checksum
from sparkdl.codec.safe import from_plain, to_plain
from sparkdl.compat import apply_in_arrow
from sparkdl.data.arrow_tasks import check_unambiguous, columns_named, numbered, of_structs
from sparkdl.data.columns.base import Column
from sparkdl.data.columns.numeric import to_numpy
from sparkdl.data.fields import SampleHandle, check_total_weight
from sparkdl.data.partition_reader import close_partitions
from sparkdl.data.partition_writer import PartitionWriter
from sparkdl.data.ragged import Rows
from sparkdl.data.row_errors import RowError
from sparkdl.data.samples import SampleSet, materialize_here
from sparkdl.data.schema import columns_of, quoted, sample_columns
from sparkdl.engines.local.engine import local_engine
from sparkdl.errors import (
    DataError,
    ModelError,
    ParameterError,
    UserError,
    nearest,
    raise_all,
    wrong_data,
)
from sparkdl.infer.forward import run_batches
from sparkdl.infer.model import TrainedModel, load
from sparkdl.infer.outputs import Output, as_numpy, to_arrow
from sparkdl.infer.written import as_read
from sparkdl.loop.advance import catch_up, first_state
from sparkdl.loop.engine import BEST, CURRENT
from sparkdl.loop.history import History
from sparkdl.loop.interrupt import Interrupt
from sparkdl.loop.loop import LoopConfig, PeriodicTask, train
from sparkdl.loop.schedule import Schedule
from sparkdl.loop.validation import Validator
from sparkdl.model.flat import filled, layout_of
from sparkdl.model.preparation import dumps
from sparkdl.model.recipe import Signature
from sparkdl.process.determinism import Numerics
from sparkdl.process.system import label_output
from sparkdl.slab.root import SlabConfig
from sparkdl.spark.failures import reading_explained
from sparkdl.train.engine_inputs import run_spec
from sparkdl.train.placed_samples import (
    balanced_weights,
    check_validation,
    source,
    validation_set,
    with_draws,
)
from sparkdl.train.plain_tasks import PlainTasks
from sparkdl.train.preflight import preflight, with_dimensions
from sparkdl.train.prepare import PreparedModel, build_model, prepare
from sparkdl.train.request import begin_batch
from sparkdl.train.result import result_maker
from sparkdl.train.trainer import Trainer
from sparkdl.usercode import accompanied

RESULT = (
    "rows bigint, iterations bigint, loss double, seconds double, metrics map<string,double>, "
    "error string, weights binary"
)
"""The columns of a group's result, after its keys."""
SCORED = "scored"
"""The column that tells the rows of the validation from those of the training."""
TASKS_PER_SLOT = 4
"""The tasks for each slot, so that groups of unlike size keep all slots at work."""
FIRST_ROWS = 64
"""The rows on which the trainer is tried before any group is trained."""
LOOKS = 3
"""The most groups on which it is tried."""
_NOT_BY_GROUP = (
    "checkpoint", "callbacks", "histograms", "ema", "keep_optimizer_state",
    "handle_invalid", "key",
)  # fmt: skip


class GroupModels:
    """The result of :func:`fit_groups`: a table with a row for each group, and the groups' models.

    Attributes:
        table: A DataFrame with the columns of the groups, ``rows``, ``iterations``, ``loss`` (the
            mean of the last epoch), ``seconds``, ``metrics`` (of the validation, by name),
            ``error`` (the reason why the group has no model, or null) and ``weights``. It is
            persisted; :meth:`unpersist` releases it.
        by: The columns of the groups.
    """

    def __init__(
        self,
        table: DataFrame,
        by: tuple[str, ...],
        payload: bytes,
        template: TrainedModel,
        places: Mapping[str, int] | None = None,
    ) -> None:
        self.table, self.by = table, by
        self._payload, self._template = payload, template  # the pickled recipe of a model
        self._places = places  # of its tensors in the weights, if these were read

    def __repr__(self) -> str:
        kind = type(self._template.module).__name__
        return f"<sparkdl.GroupModels: a {kind} for each {', '.join(self.by)}>"

    @property
    def errors(self) -> DataFrame:
        """The groups that have no model, with the reason."""
        chosen = [*map(quoted, self.by), "rows", "error"]
        return self.table.where("error IS NOT NULL").select(*chosen)

    def model(self, *key: Any) -> TrainedModel:
        """Return the trained model of one group; its history is empty.

        Args:
            key: The value of each column of the groups.

        Raises:
            ParameterError: There is no such group, or it has no model.
        """
        if len(key) != len(self.by):
            raise ParameterError(f"model takes a value for each of {', '.join(self.by)}.")
        found = self.table
        for name, value in zip(self.by, key, strict=True):
            found = found.where(functions.col(quoted(name)).eqNullSafe(functions.lit(value)))
        row = found.select("error", "weights").first()
        if row is None or row.weights is None:
            reason = "there is no such group" if row is None else f"its fit failed: {row.error}"
            text = f"no model of {', '.join(map(repr, key))}: {reason}"
            raise ParameterError(f"{text.rstrip('.')}.")
        flat = torch.from_numpy(np.frombuffer(row.weights, self._template.float_dtype).copy())
        return self._trained(filled(build_model(self._payload), flat, self._places))

    def _trained(self, module: torch.nn.Module) -> TrainedModel:
        """Return a trained model like the template with another module."""
        return replace(self._template, module=module.eval())

    def transform(
        self, data: DataFrame, prediction_col: str = "prediction", batch_size: int = 1024
    ) -> DataFrame:
        """Return ``data`` with the prediction of each row by the model of its group.

        Rows of groups without a model have null.

        Args:
            data: A DataFrame with the columns of the groups and the features.
            prediction_col: The name of the new column.
            batch_size: The number of rows of a forward pass.

        Raises:
            UserError: The columns do not fit, or an output is not one tensor.
        """
        template = self._template
        if template.output is None:
            raise ParameterError("the model's output is not one tensor: choose it with output=.")
        _group_columns(data, self.by)
        if taken := columns_named(data, prediction_col):
            raise DataError(f'the DataFrame already has a column "{taken[0]}": drop it.')
        features, _ = columns_of(
            data.schema,
            template.features,
            (),
            template.float_dtype,
            template.columns,
            template.fields,
        )
        kind = _parse_datatype_string(template.output.sql_type)
        task: PredictGroup = accompanied(
            PredictGroup(
                self._payload,
                self._places,
                template.float_dtype,
                features,
                template.signature,
                template.output.dimensions,
                prediction_col,
                to_arrow_type(kind),
                batch_size,
            )
        )

        def predict(rows: pa.Table, models: pa.Table) -> pa.Table:
            return task(rows, models)

        keys = [quoted(name) for name in self.by]
        models = self.table.select(*keys, "weights")
        schema = StructType([*data.schema.fields]).add(prediction_col, kind)
        return apply_in_arrow(predict, schema, keys, data, models)

    def save(self, path: str | os.PathLike[str], overwrite: bool = False) -> str:
        """Write the table and the models of all groups into a folder, and return it.

        :func:`load_groups` reads it. The table lies there as Parquet, written by Spark. Where models
        are replaced, the old ones can be read until the new ones are complete.

        Args:
            path: A folder that executors reach, too, or the URI of one.
            overwrite: Replace models of groups that are there.

        Raises:
            FileExistsError: The folder holds models of groups, and ``overwrite`` is False.
            UserError: The model cannot be saved.
        """
        folder, mark = Folder.of(path), secrets.token_hex(4)
        before = folder.entries()
        if GROUPS in before and not overwrite:
            raise FileExistsError(
                f"{folder} already holds models of groups: pass overwrite=True to replace them."
            )
        places = self._places or {
            one.name: one.start for one in layout_of(build_model(self._payload)).segments
        }
        saved = _SavedGroups(self.by, places, f"table-{mark}", f"model-{mark}")
        self._template.save(folder.folder(saved.model).uri)
        with reading_explained("saving the models of the groups"):
            table = folder.folder(saved.table).uri
            self.table.write.parquet(table if "://" in table else f"file://{table}")
        content = with_checksum(to_plain(saved, _SavedGroups))
        folder.write(GROUPS, json.dumps(content, indent=1).encode())
        for name in before:
            if _PART_OF_GROUPS.fullmatch(name):
                _remove_folder(folder.folder(name))
        return str(folder)

    def unpersist(self) -> None:
        """Release the table's memory; what uses it afterwards trains the groups again."""
        self.table.unpersist()


def _remove_folder(folder: Folder) -> None:
    """Delete a folder of files; that of a local one has hidden ones, too, by Hadoop."""
    if "://" not in folder.uri:
        shutil.rmtree(folder.uri, ignore_errors=True)
        return
    for name in folder.entries():
        folder.delete(name)
    folder.delete_empty()


GROUPS = "groups.json"
_PART_OF_GROUPS = re.compile(r"(table|model)-[0-9a-f]{8}")


@dataclass(frozen=True)
class _SavedGroups:
    """The content of the file beside the models of groups."""

    by: tuple[str, ...]
    places: Mapping[str, int]  # where tensors begin in the weights; the others are the same in all
    table: str
    model: str


@dataclass(frozen=True)
class _Recipe:
    """The recipe of models that were saved: a module whose weights are replaced."""

    module: torch.nn.Module

    def build(self, reported: bool = False) -> torch.nn.Module:
        """Return the module, a new one each time that this was unpickled."""
        return self.module


def load_groups(
    path: str | os.PathLike[str],
    model: Callable[[], torch.nn.Module] | torch.nn.Module | None = None,
    loss: Callable[..., Any] | None = None,
    trust: bool = False,
    session: SparkSession | None = None,
) -> GroupModels:
    """Load the models of groups that :meth:`sparkdl.GroupModels.save` wrote.

    Args:
        path: The folder, or its URI.
        model: A module, or a function that builds it, as for :func:`sparkdl.load`.
        loss: The loss for ``evaluate`` of a group's model, which is not saved.
        trust: Allow the folder to run code of its own choice, as for :func:`sparkdl.load`.
        session: The session whose executors predict; None is the active one.

    Returns:
        The table of the groups, which is read from there, and their models.

    Raises:
        FileNotFoundError: There are no models of groups in the folder.
        UserError: The folder is damaged, or would run code, and ``trust`` is False.
    """
    folder = Folder.of(path)
    if GROUPS not in folder.entries():
        raise FileNotFoundError(f"{folder} holds no models of groups ({GROUPS} is missing).")
    try:
        content = parse_json(folder.read(GROUPS, MAX_JSON_BYTES))
        if is_changed(content):
            raise ValueError("its checksum differs")
        saved: _SavedGroups = from_plain(content, _SavedGroups)
        if not all(map(_PART_OF_GROUPS.fullmatch, (saved.table, saved.model))):
            raise ValueError("it names another folder")
    except ValueError as error:
        raise ModelError(f"{folder}/{GROUPS} is damaged: {error}.") from error
    template = load(folder.folder(saved.model).uri, model, loss, trust)
    for name, parameter in template.module.named_parameters():
        parameter.requires_grad_(name in saved.places)
    spark = session or SparkSession.active()
    table = spark.read.parquet(as_read(folder.folder(saved.table)))
    payload = dumps(accompanied(_Recipe(template.module)))
    return GroupModels(table, saved.by, payload, template, saved.places)


def fit_groups(data: DataFrame, by: str | Sequence[str], trainer: Trainer) -> GroupModels:
    """Train one model for each group of rows, many groups at a time, each in a single task.

    A group's fit has the bits of ``trainer.fit`` on its rows with the local engine and one replica.
    A group whose fit fails is a row with the reason, and the others go on.

    Args:
        data: The rows of all groups. A group must fit into the memory of a task.
        by: The column or columns whose values make a group.
        trainer: The trainer of each. ``engine``, ``replicas`` and ``slices`` have no effect, and it
            has no checkpoint, callbacks, histograms, ``ema`` or kept optimizer state. The rows of
            its ``validation`` have the columns of the groups, too, and a group is scored on its
            own; with ``best``, its weights are those of its best validation, else the last ones.

    Returns:
        The table of all groups, and their models.

    Raises:
        UserError: The data or the trainer cannot work; raised before the training.
        TrainingError: Spark fails.
    """
    if not isinstance(data, DataFrame):
        raise wrong_data("fit_groups", data, "a DataFrame")
    names = (by,) if isinstance(by, str) else tuple(by)
    raise_all(ParameterError, list(_problems_of(trainer, names)))
    names = _group_columns(data, names)
    trainer = replace(trainer.settled(), engine="local", replicas=1, slices=1)
    scored: Any = None
    if trainer.validation is not None:
        scored = trainer.validation.data
        if not isinstance(scored, DataFrame):
            raise wrong_data("Validation for fit_groups", scored, "a DataFrame")
        _group_columns(scored, names)
        alone = replace(trainer.validation, data=None)  # type: ignore[arg-type]
        trainer = replace(trainer, validation=alone)
    tasks = PlainTasks.of(data)
    model = prepare(trainer, None)
    trainer = replace(trainer, weights=model.recipe.weights)  # not a path, which tasks may lack
    features, labels = trainer.feature_columns, trainer.label_columns
    columns = sample_columns(
        *(data.schema, features, labels, trainer.weight, model.float_dtype),
        *(trainer.columns, trainer.sampling),
    )
    keys = [f"k{i}" for i in range(len(names))]
    chosen = [functions.col(quoted(n)).alias(k) for n, k in zip(names, keys, strict=True)]
    chosen += numbered(columns)
    schema = StructType(
        [StructField(k, data.schema[n].dataType) for n, k in zip(names, keys, strict=True)]
        + _parse_datatype_string(RESULT).fields  # type: ignore[attr-defined]
    )
    rows = data.select(*chosen, functions.lit(False).alias(SCORED))
    if scored is not None:
        read = [*names, *(name for column in columns for name in column.names)]
        rows = rows.union(_scored(scored, chosen, read, rows))
    rows = rows.repartition(TASKS_PER_SLOT * tasks.slots, *keys)
    with tasks.running("training the groups"):
        template = _tried(trainer, data, names, model, tasks)
        how = tasks.slab, tasks.threads, Numerics.here(), template.output
        task: Callable[..., pa.Table] = accompanied(FitGroup(trainer, columns, len(features), *how))

        def fit(key: tuple[pa.Scalar, ...], rows: pa.Table) -> pa.Table:
            return task(key, rows)

        table = apply_in_arrow(fit, schema, keys, rows)
        table = table.toDF(*names, *table.columns[len(names) :]).persist()
        try:
            with reading_explained("training the groups"):
                table.count()
        except BaseException:
            table.unpersist()
            raise
    return GroupModels(table, names, model.payload, template)


def _scored(
    scored: DataFrame, chosen: Sequence[Any], names: Sequence[str], rows: DataFrame
) -> DataFrame:
    """Return the rows of the validation, whose columns must be like those of the training."""
    if missing := [name for name in names if not columns_named(scored, name)]:
        raise DataError(f"validation data: there is no column {', '.join(missing)}.")
    found = scored.select(*chosen, functions.lit(True).alias(SCORED))
    for one, other in zip(found.schema, rows.schema, strict=True):
        if one.dataType.simpleString() != other.dataType.simpleString():
            raise DataError(
                f"validation data: of the columns {', '.join(names)} one is "
                f"{one.dataType.simpleString()}, in the training data {other.dataType.simpleString()}."
            )
    return found


def _problems_of(trainer: Trainer, by: Sequence[str]) -> Iterator[str]:
    """Yield what does not go with fits by group."""
    if not by:
        yield "by=[]: name at least one column."
    for one in fields(trainer):
        default = one.default if one.default_factory is MISSING else one.default_factory()
        if one.name in _NOT_BY_GROUP and getattr(trainer, one.name) not in (default, [], ()):
            yield f"{one.name}= has no meaning for fit_groups: leave it out of this trainer."


def _group_columns(data: DataFrame, by: Sequence[str]) -> tuple[str, ...]:
    """Return the DataFrame's own names of the groups' columns; raise DataError if one is missing."""
    problems = [
        f'by names "{name}", and the DataFrame has no such column.{nearest(name, data.columns)}'
        for name in by
        if not columns_named(data, name)
    ]
    problems += [
        f'by names "{name}", which is a column of the result too: rename the column.'
        for name in by
        if name.lower() in RESULT.split()[::2]
    ]
    raise_all(DataError, problems)
    check_unambiguous(data, by)
    return tuple(columns_named(data, name)[0] for name in by)


def _tried(
    trainer: Trainer, data: DataFrame, by: Sequence[str], model: PreparedModel, tasks: PlainTasks
) -> TrainedModel:
    """Try the trainer on the first rows of a group, here; return a model with untrained weights.

    If it fails, the next group is tried, up to :data:`LOOKS` of them: a single group may have bad
    rows. Raises the first :class:`sparkdl.UserError`.
    """
    keys, problem, rest = [functions.col(quoted(name)) for name in by], None, data
    for _ in range(LOOKS):
        with reading_explained():
            first = rest.select(*keys).first()
        if first is None:
            break
        of_group = functions.lit(True)
        for key, value in zip(keys, first, strict=True):
            of_group = of_group & key.eqNullSafe(functions.lit(value))
        try:
            return _tried_on(trainer, rest.where(of_group).limit(FIRST_ROWS), model, tasks)
        except UserError as error:
            problem, rest = problem or error, rest.where(~of_group)
    raise problem or DataError("the data is empty: it has no row.")


def _tried_on(
    trainer: Trainer, data: DataFrame, model: PreparedModel, tasks: PlainTasks
) -> TrainedModel:
    """Try the trainer on these rows; return a model with untrained weights. Raises UserError."""
    with reading_explained():
        rows = source(trainer, data, 1, model.float_dtype, tasks.slab)
        samples = materialize_here(replace(rows, adapts=()))
    validation = validation_set(trainer, samples, model.float_dtype)
    output, _ = preflight(trainer, model, samples, validation, False, tasks.settings.care)
    make = result_maker(trainer, model, samples, output)
    return make(module=model.module, history=History())


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
    output: Output | None  # of the model, for one sample

    def __call__(self, key: tuple[pa.Scalar, ...], rows: pa.Table) -> pa.Table:
        began, found = time.perf_counter(), History()
        weights, metrics, reason = None, None, None
        label_output(f"group {', '.join(str(one.as_py()) for one in key)}")
        parts = {"the group": rows}
        if self.trainer.validation is not None:
            scored = rows.column(SCORED)
            parts["the validation of the group"] = rows.filter(scored)
            parts["the group"] = rows = rows.filter(pc.invert(scored))
        handles: list[SampleHandle] = []
        try:
            try:
                for where, some in parts.items():
                    handles.append(self._written(some, where))
                flat, metrics = self._fit(handles, found)
                weights = flat.numpy().tobytes()
            finally:
                close_partitions()
                for handle in handles:
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
            "metrics": metrics,
            "error": reason,
            "weights": weights,
        }
        types = (
            *(pa.int64(), pa.int64(), pa.float64(), pa.float64()),
            *(pa.map_(pa.string(), pa.float64()), pa.string(), pa.binary()),
        )
        keys = {f"k{i}": pa.array([one.as_py()], one.type) for i, one in enumerate(key)}
        values = zip(result.items(), types, strict=True)
        return pa.table(keys | {name: pa.array([value], kind) for (name, value), kind in values})

    def _fit(
        self, handles: Sequence[SampleHandle], history: History
    ) -> tuple[torch.Tensor, list[tuple[str, float]] | None]:
        """Train on the rows, and return the flat vector of the weights and their metrics, if any.

        The second of the handles is that of the validation. ``history`` grows.
        """
        self.numerics.use()
        trainer, model = self.trainer, self._model()
        weighted = self.columns[-1].weight
        labels = len(trainer.label_columns)
        samples, *others = (
            SampleSet(None, (one,), one.fields, self.num_features, [], labels, weighted)
            for one in handles
        )
        if others and trainer.sampling is None:
            check_validation(samples, others[0])
        samples = with_draws(trainer, samples)
        if trainer.class_weights == BALANCED:
            model = replace(model)
            model.weigh_classes(balanced_weights(samples))
        check_labels(trainer.objective, samples)
        check_there(trainer.objective, samples)
        run = run_spec(trainer, model, samples, self.slab, self.threads)
        batch = trainer.batch_size * trainer.options.local_steps
        validation = validation_set(trainer, next(iter(others), None), model.float_dtype)
        validation = with_dimensions(validation, self.output)
        engine = local_engine(
            samples, run, model.payload, batch, validation, trainer.consistency_model
        )
        engine.load()
        schedule = Schedule(
            model.optimizer, trainer.schedule, trainer.schedule_per, trainer.schedule_metric
        )
        state = begin_batch(first_state(trainer.options), engine.plan.num_iterations)
        state = catch_up(schedule, state, history)
        config = LoopConfig(stop=trainer.stop, options=trainer.options)
        tasks: list[PeriodicTask] = []
        if validation is not None and trainer.validation is not None:
            tasks.append(Validator(engine, trainer.validation, validation.scorer, history))
        state = train(trainer, config, engine, schedule, tasks, [], state, history, Interrupt())
        last = state.best or next(reversed(state.validations), None)
        metrics = None if last is None else [*last.metrics.items()]
        return engine.weights(CURRENT if state.best is None else BEST), metrics

    def _model(self) -> PreparedModel:
        """Return the prepared model, made once in a process."""
        run = self.slab.name
        if run not in _prepared:
            _prepared[run] = prepare(self.trainer, None)
            while len(_prepared) > MOST_PREPARED:
                _prepared.popitem(last=False)
        return _prepared[run]

    def _written(self, rows: pa.Table, where: str) -> SampleHandle:
        """Write the rows into the slab root. Raises DataError."""
        if not rows.num_rows:
            raise DataError(f"{where} has no rows")
        weighted = self.columns[-1].weight
        writer = PartitionWriter(self.slab, weighted=weighted)
        try:
            names = [column.name for column in self.columns]
            labels = [i for i, column in enumerate(self.columns) if column.label]
            writer.add(names, arrays_of(rows, self.columns), labels=labels)
        except RowError as error:
            writer.fail(error.problem)
            raise DataError(error.problem.message(where)) from None
        handle = writer.finish()
        if weighted:
            check_total_weight([handle], len(handle.fields) - 1, f"the weight of {where}")
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
    places: Mapping[str, int] | None
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
        module = filled(build_model(self.payload), flat, self.places).eval()
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
    there = [f"c{i}" for i, _ in enumerate(columns)]
    if names:
        there = [name for column in columns for name in column.names]
    arrays: list[Any] = [rows.column(name).combine_chunks() for name in there]
    if names:
        arrays = of_structs(arrays, columns)
    return [to_numpy(array, column) for array, column in zip(arrays, columns, strict=True)]
