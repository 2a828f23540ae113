"""Many small models: one fit for each group of a DataFrame's rows, inside Spark's tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyspark.sql import DataFrame, functions
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import StructField, StructType, _parse_datatype_string

from sparkdl.compat import apply_in_arrow
from sparkdl.data.arrow_tasks import check_unambiguous, columns_named
from sparkdl.data.samples import materialize_here
from sparkdl.data.schema import columns_of, quoted, read_schema
from sparkdl.errors import DataError, ParameterError, UserError, nearest, raise_all, wrong_data
from sparkdl.infer.model import TrainedModel
from sparkdl.loop.history import History
from sparkdl.model.flat import filled
from sparkdl.process.determinism import Numerics
from sparkdl.slab.root import SlabConfig
from sparkdl.spark.failures import reading_explained
from sparkdl.train.fit_result import result_maker
from sparkdl.train.group_tasks import RESULT, FitGroup, PredictGroup
from sparkdl.train.place_samples import source
from sparkdl.train.plain_tasks import PlainTasks
from sparkdl.train.preflight import preflight
from sparkdl.train.prepare import PreparedModel, prepare
from sparkdl.train.recipes import build_model
from sparkdl.train.trainer import Trainer
from sparkdl.usercode import accompanied

TASKS_PER_SLOT = 4
"""The tasks for each slot, so that groups of unlike size keep all slots at work."""
FIRST_ROWS = 64
"""The rows on which the trainer is tried before any group is trained."""
LOOKS = 3
"""The most groups on which it is tried."""
_NOT_BY_GROUP = (
    "validation", "checkpoint", "callbacks", "histograms", "ema", "keep_optimizer_state",
)  # fmt: skip


class GroupModels:
    """The result of :func:`fit_groups`: a table with a row for each group, and the groups' models.

    Attributes:
        table: A DataFrame with the columns of the groups, ``rows``, ``iterations``, ``loss`` (the
            mean of the last epoch), ``seconds``, ``error`` (the reason why the group has no model,
            or null) and ``weights``. It is persisted; :meth:`unpersist` releases it.
        by: The columns of the groups.
    """

    def __init__(
        self, table: DataFrame, by: tuple[str, ...], model: PreparedModel, template: TrainedModel
    ) -> None:
        self.table, self.by = table, by
        self._model, self._template = model, template

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
        flat = torch.from_numpy(np.frombuffer(row.weights, self._model.float_dtype).copy())
        return self._trained(filled(build_model(self._model.payload), flat))

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
                self._model.payload,
                self._model.float_dtype,
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

    def unpersist(self) -> None:
        """Release the table's memory; what uses it afterwards trains the groups again."""
        self.table.unpersist()


def fit_groups(data: DataFrame, by: str | Sequence[str], trainer: Trainer) -> GroupModels:
    """Train one model for each group of rows, many groups at a time, each in a single task.

    A group's fit has the bits of ``trainer.fit`` on its rows with the local engine and one replica.
    A group whose fit fails is a row with the reason, and the others go on.

    Args:
        data: The rows of all groups. A group must fit into the memory of a task.
        by: The column or columns whose values make a group.
        trainer: The trainer of each. ``engine``, ``replicas`` and ``slices`` have no effect, and it
            has no validation, checkpoint, callbacks, histograms, ``ema`` or kept optimizer state.

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
    trainer = replace(trainer, engine="local", replicas=1, slices=1)
    tasks = PlainTasks.of(data)
    model = prepare(trainer, None)
    trainer = replace(trainer, weights=model.recipe.weights)  # not a path, which tasks may lack
    inputs, labels, weights = read_schema(
        data.schema,
        trainer.feature_columns,
        trainer.label_columns,
        trainer.weight,
        model.float_dtype,
        trainer.columns,
    )
    columns = (*inputs, *labels, *weights)
    task: Callable[..., pa.Table] = accompanied(
        FitGroup(trainer, columns, len(inputs), tasks.slab, tasks.threads, Numerics.here())
    )

    def fit(key: tuple[pa.Scalar, ...], rows: pa.Table) -> pa.Table:
        return task(key, rows)

    keys = [f"k{i}" for i in range(len(names))]
    chosen = [functions.col(quoted(n)).alias(k) for n, k in zip(names, keys, strict=True)]
    chosen += [functions.col(quoted(c.name)).alias(f"c{i}") for i, c in enumerate(columns)]
    schema = StructType(
        [StructField(k, data.schema[n].dataType) for n, k in zip(names, keys, strict=True)]
        + _parse_datatype_string(RESULT).fields  # type: ignore[attr-defined]
    )
    parts = TASKS_PER_SLOT * tasks.slots
    rows = data.select(*chosen).repartition(parts, *keys)
    table = apply_in_arrow(fit, schema, keys, rows)
    table = table.toDF(*names, *table.columns[len(names) :])
    with tasks.running("training the groups"):
        template = _tried(trainer, data, names, model, tasks.slab)
        table = table.persist()
        try:
            with reading_explained("training the groups"):
                table.count()
        except BaseException:
            table.unpersist()
            raise
    return GroupModels(table, names, model, template)


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
    trainer: Trainer, data: DataFrame, by: Sequence[str], model: PreparedModel, slab: SlabConfig
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
            return _tried_on(trainer, rest.where(of_group).limit(FIRST_ROWS), model, slab)
        except UserError as error:
            problem, rest = problem or error, rest.where(~of_group)
    raise problem or DataError("the data is empty: it has no row.")


def _tried_on(
    trainer: Trainer, data: DataFrame, model: PreparedModel, slab: SlabConfig
) -> TrainedModel:
    """Try the trainer on these rows; return a model with untrained weights. Raises UserError."""
    with reading_explained():
        samples = materialize_here(source(trainer, data, 1, model.float_dtype, slab))
    output, _ = preflight(trainer, model, samples, None, endless=False)
    make = result_maker(trainer, model, samples, output)
    return make(module=model.module, history=History())
