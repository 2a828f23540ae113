"""Many small models: one fit for each group of a DataFrame's rows, inside Spark's tasks."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from pyspark.sql import DataFrame, functions
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import StructField, StructType

from sparkdl.care.hints import check_labels, check_there
from sparkdl.care.rules import BALANCED
from sparkdl.compat import apply_in_arrow
from sparkdl.data.arrow_tasks import columns_named, numbered
from sparkdl.data.columns.base import Column
from sparkdl.data.fields import SampleHandle, check_total_weight
from sparkdl.data.partition_reader import close_partitions
from sparkdl.data.partition_writer import PartitionWriter
from sparkdl.data.row_errors import RowError
from sparkdl.data.samples import SampleSet, materialize_here
from sparkdl.data.schema import quoted, sample_columns
from sparkdl.engines.local.engine import local_engine
from sparkdl.errors import DataError, ParameterError, UserError, raise_all, wrong_data
from sparkdl.infer.model import TrainedModel
from sparkdl.infer.outputs import Output
from sparkdl.loop.advance import catch_up, first_state
from sparkdl.loop.engine import BEST, CURRENT
from sparkdl.loop.history import History
from sparkdl.loop.interrupt import Interrupt
from sparkdl.loop.loop import LoopConfig, PeriodicTask, train
from sparkdl.loop.schedule import Schedule
from sparkdl.loop.validation import Validator
from sparkdl.process.determinism import Numerics
from sparkdl.process.system import label_output
from sparkdl.slab.root import SlabConfig
from sparkdl.spark.failures import reading_explained
from sparkdl.train.engine_inputs import run_spec
from sparkdl.train.group_models import RESULT, GroupModels, arrays_of, group_columns
from sparkdl.train.placed_samples import (
    balanced_weights,
    check_validation,
    source,
    validation_set,
    with_draws,
)
from sparkdl.train.plain_tasks import PlainTasks
from sparkdl.train.preflight import preflight, with_dimensions
from sparkdl.train.prepare import PreparedModel, prepare
from sparkdl.train.request import begin_batch
from sparkdl.train.result import result_maker
from sparkdl.train.trainer import Trainer
from sparkdl.usercode import accompanied

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
    names = group_columns(data, names)
    trainer = replace(trainer.settled(), engine="local", replicas=1, slices=1)
    scored: Any = None
    if trainer.validation is not None:
        scored = trainer.validation.data
        if not isinstance(scored, DataFrame):
            raise wrong_data("Validation for fit_groups", scored, "a DataFrame")
        group_columns(scored, names)
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
        + [StructField(name, from_arrow_type(kind)) for name, kind in RESULT.items()]
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
    output, _ = preflight(trainer, model, samples, validation, False, tasks.facts.settings.care)
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
        keys = {f"k{i}": one for i, one in enumerate(key)}
        schema = pa.schema({name: one.type for name, one in keys.items()} | RESULT)
        row = {name: one.as_py() for name, one in keys.items()} | result
        return pa.Table.from_pylist([row], schema)

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
