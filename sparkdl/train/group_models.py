"""The models that were trained for groups of rows: predictions, a saved folder."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyspark.sql import DataFrame, SparkSession, functions
from pyspark.sql.types import StructType

from sparkdl.checkpoint.files import Folder
from sparkdl.codec.files import MAX_JSON_BYTES, is_changed, parse_json, with_checksum
from sparkdl.codec.safe import from_plain, to_plain
from sparkdl.compat import apply_in_arrow
from sparkdl.data.arrow_tasks import check_unambiguous, columns_named, of_structs
from sparkdl.data.columns.base import Column
from sparkdl.data.columns.numeric import to_numpy
from sparkdl.data.ragged import Rows
from sparkdl.data.row_errors import RowError
from sparkdl.data.schema import columns_of, quoted
from sparkdl.errors import DataError, ModelError, ParameterError, nearest, raise_all
from sparkdl.infer.forward import run_batches
from sparkdl.infer.model import TrainedModel, load
from sparkdl.infer.outputs import as_numpy, sql_type, to_arrow
from sparkdl.infer.written import as_read
from sparkdl.model.flat import filled, layout_of
from sparkdl.model.preparation import dumps
from sparkdl.model.recipe import Signature
from sparkdl.spark.failures import reading_explained
from sparkdl.train.prepare import build_model
from sparkdl.usercode import accompanied

RESULT = {
    "rows": pa.int64(),
    "iterations": pa.int64(),
    "loss": pa.float64(),
    "seconds": pa.float64(),
    "metrics": pa.map_(pa.string(), pa.float64()),
    "error": pa.string(),
    "weights": pa.binary(),
}
"""The columns of a group's result, after its keys."""


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
        group_columns(data, self.by)
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
        task: PredictGroup = accompanied(
            PredictGroup(
                self._payload,
                self._places,
                template.float_dtype,
                features,
                template.signature,
                template.output.dimensions,
                prediction_col,
                template.output.kind,
                batch_size,
            )
        )

        def predict(rows: pa.Table, models: pa.Table) -> pa.Table:
            return task(rows, models)

        keys = [quoted(name) for name in self.by]
        models = self.table.select(*keys, "weights")
        schema = StructType([*data.schema.fields]).add(
            prediction_col, sql_type(template.output.kind)
        )
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


def group_columns(data: DataFrame, by: Sequence[str]) -> tuple[str, ...]:
    """Return the DataFrame's own names of the groups' columns; raise DataError if one is missing."""
    problems = [
        f'by names "{name}", and the DataFrame has no such column.{nearest(name, data.columns)}'
        for name in by
        if not columns_named(data, name)
    ]
    problems += [
        f'by names "{name}", which is a column of the result too: rename the column.'
        for name in by
        if name.lower() in RESULT
    ]
    raise_all(DataError, problems)
    check_unambiguous(data, by)
    return tuple(columns_named(data, name)[0] for name in by)


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
