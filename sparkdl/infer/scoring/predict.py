"""Predictions with any model: :func:`predict`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pyspark.sql import DataFrame

from sparkdl.data.columns.base import ColumnSpec
from sparkdl.infer.scoring.inference import Options
from sparkdl.infer.scoring.prepare import prepare
from sparkdl.infer.scoring.source import read_model


def predict(
    data: DataFrame,
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
) -> DataFrame:
    """Return ``data`` with the outputs of any model as columns; the model need not be trained here.

    The result is lazy, and ``data`` may be a stream or belong to Spark Connect. Rows whose lengths
    vary (text, :class:`sparkdl.Sequence`) are sorted by length within windows of a partition, and
    come back in their order. The model is tried on the driver first.

    Args:
        data: A DataFrame with the feature columns.
        model: One of these: a ``torch.nn.Module``; a function that builds one; an exported program; a
            :class:`sparkdl.TrainedModel`; or the path of a TorchScript file, of an exported program
            (``.pt2``), or of a folder that ``save_pretrained`` or ``trained.save`` wrote. Paths are
            the driver's.
        features: The feature column, or a list of columns that are passed by position. A mapping
            passes them by keyword: ``{"input_ids": "ids"}``.
        outputs: The parts of what the model returns that become columns: a mapping from column names
            to parts, a list of parts, or one part (a key, an attribute, a number, or a function of
            what it returns). None takes every tensor that has a row for each row.
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
    found = prepare(
        data,
        read_model(model, weights),
        features,
        outputs,
        columns,
        tokenizer,
        max_length,
        prediction_col,
        options,
        example,
    )
    return found.compute(data, path, partitions, overwrite)
