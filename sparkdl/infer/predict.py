"""Predictions with any model: :func:`predict`, and :func:`register_function` for SQL."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any, TypeVar

import torch
from pyspark import RDD
from pyspark.sql import DataFrame
from torch import nn

from sparkdl.data.columns.base import KINDS, Column, ColumnSpec
from sparkdl.data.schema import check_specs
from sparkdl.errors import ParameterError, nearest, raise_all, shown, wrong_data
from sparkdl.infer.new_forward import names_of, signature_of
from sparkdl.infer.outputs import named_parts
from sparkdl.infer.score import Inference, Inputs, ModelSource, Options, prepare
from sparkdl.infer.source import longest, read_model, tensors_of, tokenizer_of
from sparkdl.infer.written import write_parts
from sparkdl.usercode.content import content_digest

TEXT = ("string", "char", "varchar")
Data = TypeVar("Data", DataFrame, RDD[Any])


def predict(
    data: Data,
    model: Any,
    features: str | Sequence[str] | Mapping[str, str] = "features",
    *,
    outputs: Any = None,
    weights: Mapping[str, torch.Tensor] | str | os.PathLike[str] | None = None,
    columns: Mapping[str, ColumnSpec] | None = None,
    tokenizer: Any = None,
    max_length: int | None = None,
    prediction_col: str = "prediction",
    batch_size: int = 256,
    precision: str = "fp32",
    quantize: str | None = None,
    handle_invalid: str = "error",
    error_col: str = "error",
    example: DataFrame | None = None,
    path: str | os.PathLike[str] | None = None,
    partitions: int = 32,
    overwrite: bool = False,
) -> Data:
    """Return ``data`` with the outputs of any model as columns; the model need not be trained here.

    For an RDD, return an RDD with a prediction for each record, in the same order: a number or an
    array, or a Row of several outputs.

    The result is lazy, and ``data`` may be a stream or belong to Spark Connect. Rows whose lengths
    vary (text, :class:`sparkdl.Sequence`) are sorted by length within windows of a partition, and
    come back in their order. The model is tried on the driver first.

    Args:
        data: A DataFrame with the feature columns, or an RDD of features as for
            :meth:`sparkdl.TrainedModel.predict`.
        model: One of these: a ``torch.nn.Module``; a function that builds one; an exported program; a
            :class:`sparkdl.TrainedModel`; or the path of a TorchScript file, of an exported program
            (``.pt2``), or of a folder that ``save_pretrained`` or ``trained.save`` wrote. Paths are
            the driver's.
        features: The feature column, or a list of columns that are passed by position. A mapping
            passes them by keyword: ``{"input_ids": "ids"}``.
        outputs: The parts of what the model returns that become columns: a mapping from column names
            to parts, a list of parts, or one part (a key, an attribute, a number, or a function of
            what it returns). None takes every tensor that has a row for each row, or the keys of a
            list with a mapping for each row. A function may return a list with a value for each row,
            whose length varies: a tensor, a text, or lists and mappings of such.
        weights: For a function that builds the module: a state_dict, or the path of a safetensors
            file or of a state_dict that ``torch.save`` wrote.
        columns: The conversions of columns to tensors, as ``Trainer.columns``.
        tokenizer: The tokenizer of a text column, or the path of its folder; None is that in the
            model's folder.
        max_length: The most tokens of a text; None is the limit of model and tokenizer.
        prediction_col: The name of the new column if there is only one.
        batch_size: The number of rows of a forward pass.
        precision: The precision of the forward pass, by autocast: "fp32", "bf16" or "fp16".
        quantize: "int8" quantizes linear and recurrent layers; the model then runs on the CPU.
        handle_invalid: The way to handle rows that cannot be read, or on which the model fails:
            "error" fails the job, "skip" leaves them out, "keep" gives null predictions and the reason
            in ``error_col``.
        error_col: The name of the column of reasons.
        example: A DataFrame with rows like those of ``data`` to try the model on; needed for most
            streams. None looks at the first rows of ``data``, if made-up ones do not do.
        path: A folder, or the URI of one, to write the result to as Parquet. It is computed at once.
            After a failure, the same call goes on with the partitions that are missing. A folder with
            predictions of another model or of other rows is an error.
        partitions: The number of files at ``path``.
        overwrite: Replace other predictions at ``path``, once the new ones are complete.

    Returns:
        The data with the new columns; with ``path``, as read from there.

    Raises:
        UserError: The data, an argument or the model does not fit.
    """
    options = Options(batch_size, precision, quantize, handle_invalid, error_col)
    source = read_model(model, weights)
    if not isinstance(data, (DataFrame, RDD)):
        raise wrong_data("predict", data, "a DataFrame or an RDD")
    if not isinstance(example, (DataFrame, type(None))):
        raise wrong_data("example=", example, "a DataFrame")
    inputs = inputs_of(data, source, features, columns, tokenizer, max_length)
    parts = named_parts(outputs, prediction_col)
    if parts is None and source.part is not None:
        parts = {prediction_col: source.part}
    ready = prepare(data, source, inputs, parts, prediction_col, options, example=example)
    return computed(ready, data, path, partitions, overwrite)


def computed(ready: Inference, data: Any, path: Any, partitions: int, overwrite: bool) -> Any:
    """Return the data with predictions: lazily, or as read from ``path`` once it is there.

    Return ``ready`` itself where ``path`` is :data:`NOWHERE`.
    """
    if path is NOWHERE:
        return ready
    if isinstance(data, RDD):
        if path is not None:
            raise ParameterError(
                "path= is for a DataFrame: save the RDD of predictions, for example with "
                "saveAsPickleFile, or make a DataFrame of the records."
            )
        return ready.over(data)
    if path is None:
        return ready.applied(data)
    scored, reason = ready, None
    if ready.options.handle_invalid == "skip":  # the file leaves them out, but knows of them
        reason = "sparkdl_reason"
        options = replace(ready.options, handle_invalid="keep", error_col=reason)
        scored = replace(ready, options=options, task=replace(ready.task, error_col=reason))
    identity = _identity(ready)
    return write_parts(data, scored.applied, path, partitions, overwrite, identity, reason)


def _identity(ready: Inference) -> str:
    """Return a digest of model, columns and options, which is the same in another process."""
    task, options = ready.task, replace(ready.options, batch_size=1)
    columns = [(column.name, column.dtype, _spec(column)) for column in task.reader.columns]
    outputs = [(column.name, column.part) for column in task.outputs]
    return content_digest((ready.module, options, task.signature, columns, outputs))[:16]


def _spec(column: Column) -> Any:
    """Return the specification of a column, or its description with its tokenizer if it is of text."""
    try:
        described = None if column.spec is None else column.spec.to_json(column.name)
    except ParameterError:  # its function has no name
        return column.spec
    held = vars(column.spec).values() if column.spec is not None else ()
    return described, [one for one in held if isinstance(one, (FunctionType, partial, nn.Module))]


def inputs_of(
    data: DataFrame | RDD,
    source: ModelSource,
    features: Any,
    columns: Mapping[str, ColumnSpec] | None = None,
    tokenizer: Any = None,
    max_length: int | None = None,
    text: Mapping[str, Any] | None = None,
) -> Inputs:
    """Return the inputs of a model; ``text`` are further arguments of its :class:`sparkdl.Text`."""
    known = source.inputs
    if known is not None:
        if features != "features" and names_of(features)[0] != known.names:
            raise ParameterError(
                f"features={shown(features)}: the model was trained here, and takes the columns "
                f"{', '.join(known.names)}. Leave features= out, or pass trained.module."
            )
        return replace(known, specs={**known.specs, **(columns or {})})
    names, keywords = names_of(features)
    specs = dict(columns or {})
    raise_all(ParameterError, list(check_specs(specs, names, ())))
    options = {"max_length": max_length, **(text or {})}
    keywords = _add_text(data, source, names, keywords, specs, tokenizer, options)
    floats = [t.dtype for t in tensors_of(source.module).values() if t.is_floating_point()]
    dtype = "float64" if floats and floats[0] == torch.float64 else "float32"
    return Inputs(names, specs, signature_of(names, keywords, specs), dtype, (), keywords)


def _add_text(
    data: DataFrame | RDD,
    source: ModelSource,
    names: tuple[str, ...],
    keywords: tuple[str, ...],
    specs: dict[str, Any],
    tokenizer: Any,
    options: Mapping[str, Any],
) -> tuple[str, ...]:
    """Give text columns without a specification one, and return the keywords of the features."""
    schema = data.schema if isinstance(data, DataFrame) else ()
    kinds = {field.name: field.dataType.typeName() for field in schema}
    texts = [name for name in names if name not in specs and kinds.get(name) in TEXT]
    if tokenizer is not None and not texts:
        raise ParameterError(
            f"tokenizer= is given, and no feature column ({', '.join(names)}) is text without a "
            "specification of its own: leave it out, or name the column of text in features=."
        )
    if texts and (tokenizer is not None or source.folder is not None or _of_transformers(source)):
        found = tokenizer_of(tokenizer, source.folder, texts[0])
        limit = options["max_length"] or longest(source.module, found)
        text: Any = KINDS["text"]
        specs |= {name: text(found, **{**options, "max_length": limit}) for name in texts}
    if not keywords and len(names) == 1 and _of_transformers(source):
        return ("input_ids",)
    return keywords


def _of_transformers(source: ModelSource) -> bool:
    """Return whether the model is called as those of transformers are, with ``input_ids``."""
    return getattr(source.module, "main_input_name", None) == "input_ids"


def register_function(
    name: str,
    model: Any,
    example: DataFrame,
    features: Any = None,
    *,
    use: Callable[..., DataFrame] = predict,
    **arguments: Any,
) -> Any:
    """Register a function of SQL that predicts, in the session of ``example``.

    ``SELECT score(features) FROM measurements`` then computes predictions. Several outputs are the
    fields of a struct.

    Args:
        name: The name of the function.
        model: The model, see :func:`sparkdl.predict`.
        example: A DataFrame with some rows like those that the function will get. Its columns give the
            types of the function's arguments.
        features: The columns of ``example`` that are the arguments of the function, in order: as for
            ``use``, whose default this is.
        use: What the function does: :func:`sparkdl.predict`, :func:`sparkdl.embed`,
            :func:`sparkdl.classify`, :func:`sparkdl.rerank` or :func:`sparkdl.generate`.
        arguments: Further arguments of that, except for those on writing; of ``handle_invalid`` only
            "error" and "keep".

    Returns:
        The function, which takes columns: ``df.select(score("features"))``.

    Raises:
        UserError: An argument or the model does not fit.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ParameterError(f"name={shown(name)}: give a name of letters, digits and underscores.")
    if not isinstance(example, DataFrame):
        raise wrong_data("register_function", example, "a DataFrame as example")
    if use not in FUNCTIONS:
        names = ", ".join(f"sparkdl.{function.__name__}" for function in FUNCTIONS)
        raise ParameterError(f"use: give one of {names}.")
    if arguments.get("handle_invalid") == "skip":
        raise ParameterError(
            'handle_invalid="skip": a function of SQL cannot leave out rows. Use "keep".'
        )
    known = [
        parameter.name
        for parameter in inspect.signature(use).parameters.values()
        if parameter.name not in _NO_ARGUMENTS
        and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    for unknown in arguments.keys() - {*known}:
        raise ParameterError(
            f"{use.__name__} as a function of SQL has no argument {shown(unknown)}."
            f"{nearest(unknown, known)}"
        )
    if features is not None:
        arguments[known[0]] = features
    if use is predict:
        arguments["example"] = example
    ready: Any = use(example, model, path=NOWHERE, **arguments)
    return example.sparkSession.udf.register(name, ready.function(example))


_NO_ARGUMENTS = {"data", "model", "example", "path", "partitions", "overwrite"}
NOWHERE: Any = object()
"""The ``path`` of a call that shall only prepare the work."""
FUNCTIONS: list[Callable[..., Any]] = [predict]
"""The functions that predict; other modules add theirs."""
