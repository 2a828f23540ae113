"""Preparation of predictions: arguments are checked, and the model is tried on some rows."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from pyspark.sql import DataFrame
from torch import nn

from sparkdl.data.arrow_tasks import check_unambiguous
from sparkdl.data.columns.base import KINDS, Column, ColumnSpec, padding_of
from sparkdl.data.schema import check_specs, columns_of
from sparkdl.errors import (
    DataError,
    ModelError,
    ParameterError,
    UserError,
    raise_all,
    shown,
    wrong_data,
)
from sparkdl.infer.scoring.forward import Forward, for_convolutions, quantized
from sparkdl.infer.scoring.inference import Inference, Options
from sparkdl.infer.scoring.outputs import OutputColumn, named_parts
from sparkdl.infer.scoring.pretrained import longest, tokenizer_of
from sparkdl.infer.scoring.programs import tensors_of
from sparkdl.infer.scoring.source import ModelSource
from sparkdl.infer.scoring.task import ScoreRows
from sparkdl.infer.scoring.trial import made_up, rows_to_try, tried_columns
from sparkdl.infer.shipped_module import ShippedModule, sender_to
from sparkdl.model.recipe import Signature
from sparkdl.plain import plain

WINDOW_BATCHES = 64
WINDOW_BYTES = 256 << 20
"""The limits of a window: so many batches, and so many bytes of predictions."""
TEXT = ("string", "char", "varchar")
_sent: weakref.WeakKeyDictionary[nn.Module, dict[str | None, ShippedModule]] = (
    weakref.WeakKeyDictionary()
)
"""The form in which each module was sent last: a large one is sent once while it stays the same."""


def prepare(
    data: DataFrame,
    source: ModelSource,
    features: str | Sequence[str] | Mapping[str, str],
    outputs: Any,
    columns: Mapping[str, ColumnSpec] | None,
    tokenizer: Any,
    max_length: int | None,
    prediction_col: str,
    options: Options,
    example: DataFrame | None,
    finish: Callable[[OutputColumn], OutputColumn] = lambda column: column,
    padding_side: str | None = None,
) -> Inference:
    """Return the work that :func:`predict` does, checked and tried; see there for the arguments.

    ``finish`` changes the columns found; ``padding_side`` None is that of the tokenizer.
    """
    for name, given in (("predict", data), ("example=", example)):
        if not isinstance(given, DataFrame) and (given is not None or name == "predict"):
            raise wrong_data(name, given, "a DataFrame")
    if not isinstance(prediction_col, str):
        raise ParameterError(f"prediction_col={shown(prediction_col)}: give a column name.")
    trained = source.trained
    if trained is None:
        names, keywords = _names(features)
        specs = dict(columns or {})
        raise_all(ParameterError, list(check_specs(specs, names, ())))
        keywords = _add_text(
            data, source, names, keywords, specs, tokenizer, max_length, padding_side
        )
        signature = _signature(names, keywords, specs)
    else:
        if features != "features" and _names(features)[0] != trained.features:
            raise ParameterError(
                f"features={shown(features)}: the model was trained here, and takes the columns "
                f"{', '.join(trained.features)}. Leave features= out, or pass trained.module."
            )
        names, specs = trained.features, {**trained.columns, **(columns or {})}
        signature = replace(trained.signature, part=None)
    module = source.module
    float_dtype = _float_dtype(module) if trained is None else trained.float_dtype
    fields = () if trained is None else trained.fields[: trained.num_features]
    inputs, _ = columns_of(data.schema, names, (), float_dtype, specs, fields)
    check_unambiguous(data, names)
    parts = named_parts(outputs, prediction_col)
    if parts is None and trained is not None and trained.signature.part is not None:
        parts = {prediction_col: trained.signature.part}
    module = (quantized if options.quantize else for_convolutions)(module)
    forward = Forward(module, signature, options.precision)
    made = made_up(inputs, fields, [data.schema[name].dataType for name in names])
    found, unit_bytes = _tried(forward, made, example, data, inputs, parts, prediction_col, options)
    found = tuple(map(finish, found))
    rows = options.batch_size
    if (fixed := getattr(module, "fixed_rows", None)) is not None:
        rows = fixed
    row_bytes = sum(column.row_bytes for column in found)
    build = module if options.quantize else source.build
    known = _sent.setdefault(source.origin, {})
    shipped = ShippedModule.of(module, sender_to(data), known.get(options.quantize), build)
    known[options.quantize] = shipped
    task = ScoreRows(
        replace(shipped, on_cpu=True) if options.quantize else shipped,
        inputs,
        found,
        forward.signature,
        rows,
        0 if fixed else unit_bytes,
        max(rows, min(WINDOW_BATCHES * rows, WINDOW_BYTES // max(1, row_bytes))),
        options.precision,
        None if options.handle_invalid == "error" else options.error_col,
    )
    return Inference(task, options, source.module)


def _names(features: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the feature columns, and the keywords for them."""
    found: Any = plain(features)
    keywords: tuple[Any, ...] = ()
    if isinstance(found, Mapping):
        keywords, found = tuple(found), list(found.values())
    names = (found,) if isinstance(found, str) else tuple(found or ())
    if not names or not all(isinstance(name, str) for name in (*names, *keywords)):
        raise ParameterError(
            f"features={shown(features)}: give a column name, a list of names, or a mapping "
            "from keywords "
            "of the model to names."
        )
    return names, keywords


def _add_text(
    data: DataFrame,
    source: ModelSource,
    names: tuple[str, ...],
    keywords: tuple[str, ...],
    specs: dict[str, Any],
    tokenizer: Any,
    max_length: int | None,
    side: str | None,
) -> tuple[str, ...]:
    """Give text columns without a specification one, and return the keywords of the features."""
    kinds = {field.name: field.dataType.typeName() for field in data.schema}
    texts = [name for name in names if name not in specs and kinds.get(name) in TEXT]
    if tokenizer is not None and not texts:
        raise ParameterError(
            f"tokenizer= is given, and no feature column ({', '.join(names)}) is text without a "
            "specification of its own: leave it out, or name the column of text in features=."
        )
    if texts and (tokenizer is not None or source.folder is not None or _of_transformers(source)):
        found = tokenizer_of(tokenizer, source.folder, texts[0])
        limit = max_length or longest(source.module, found)
        text: Any = KINDS["text"]
        specs |= {name: text(found, max_length=limit, padding_side=side) for name in texts}
    if not keywords and len(names) == 1 and _of_transformers(source):
        return ("input_ids",)
    return keywords


def _of_transformers(source: ModelSource) -> bool:
    """Return whether the model is called as those of transformers are, with ``input_ids``."""
    return getattr(source.module, "main_input_name", None) == "input_ids"


def _signature(
    names: Sequence[str], keywords: Sequence[str], specs: Mapping[str, ColumnSpec]
) -> Signature:
    """Return the way to call the model, with the lengths and masks of sequences."""
    inputs: list[str] = []
    for keyword, name in zip(keywords, names, strict=False):
        padding = padding_of(specs, name)
        inputs += [keyword] if padding is None else padding.names(keyword)
    return Signature(tuple(inputs))


def _float_dtype(module: nn.Module) -> str:
    """Return the dtype of floating columns: float64 for a model of float64, else float32."""
    floats = [t.dtype for t in tensors_of(module).values() if t.is_floating_point()]
    return "float64" if floats and floats[0] == torch.float64 else "float32"


def _tried(
    forward: Forward,
    made: Any,
    example: DataFrame | None,
    data: DataFrame,
    inputs: Sequence[Column],
    parts: Any,
    name: str,
    options: Options,
) -> tuple[tuple[OutputColumn, ...], int]:
    """Return what :func:`tried_columns` does, for made-up rows or, if these fail, for real ones."""
    failed: UserError | None = None
    if made is not None and example is None:
        try:
            return tried_columns(forward, made, parts, name)
        except ModelError as error:
            failed = error
            if data.isStreaming:
                raise
    keep = options.handle_invalid != "error"
    for rows in rows_to_try(data if example is None else example, inputs, keep):
        try:
            return tried_columns(forward, rows, parts, name)
        except ModelError as error:
            failed = error
    raise failed or DataError(
        "none of the first rows can be read: pass example=, a DataFrame with good rows."
    )
