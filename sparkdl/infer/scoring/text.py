"""Texts as vectors and as classes, with models of transformers: :func:`embed` and :func:`classify`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pyspark.sql import DataFrame
from torch import nn

from sparkdl.errors import ModelError, ParameterError, kind_of, shown
from sparkdl.infer.scoring.inference import Inference, Options
from sparkdl.infer.scoring.outputs import OutputColumn
from sparkdl.infer.scoring.prepare import TEXT, prepare
from sparkdl.infer.scoring.source import read_model
from sparkdl.model.recipe import described

POOLINGS = ("mean", "cls", "max", "last")


class Embedder(nn.Module):
    """A model whose last hidden states become one vector a text.

    ``pooling`` takes the "mean" or "max" of the tokens, the first ("cls") or the "last" one.
    """

    main_input_name = "input_ids"

    def __init__(self, model: nn.Module, pooling: str, normalize: bool) -> None:
        super().__init__()
        self.model, self.pooling, self.normalize = model, pooling, normalize
        self.config = getattr(model, "config", None)

    def extra_repr(self) -> str:
        """Return the options."""
        return f"pooling={self.pooling!r}, normalize={self.normalize}"

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the vectors, (rows, width), in float32."""
        returned = self.model(input_ids=input_ids, attention_mask=attention_mask)
        hidden = getattr(returned, "last_hidden_state", None)
        if hidden is None:
            raise ModelError(
                f"the model returns {described(returned)}, without last_hidden_state: embed takes a "
                "model without a head, as transformers.AutoModel."
            )
        hidden, mask = hidden.float(), attention_mask[..., None].to(torch.bool)
        if self.pooling == "mean":
            pooled = (hidden * mask).sum(1) / mask.sum(1)
        elif self.pooling == "max":
            pooled = hidden.masked_fill(~mask, -torch.inf).amax(1)
        elif self.pooling == "cls":
            pooled = hidden[:, 0]
        else:
            rows = torch.arange(len(hidden), device=hidden.device)
            pooled = hidden[rows, attention_mask.sum(1) - 1]
        return nn.functional.normalize(pooled, dim=1) if self.normalize else pooled


def _score(several: bool, returned: Any) -> torch.Tensor:
    """Return the probabilities of a model's logits: a softmax, or sigmoids for several labels."""
    logits = returned["logits"].float()
    return torch.sigmoid(logits) if several else torch.softmax(logits, 1)


def _best(several: bool, returned: Any) -> torch.Tensor:
    return _score(several, returned).argmax(1)


def _best_score(several: bool, returned: Any) -> torch.Tensor:
    return _score(several, returned).amax(1)


def embed(
    data: DataFrame,
    model: Any,
    text: str = "text",
    *,
    pooling: str | None = None,
    normalize: bool = True,
    tokenizer: Any = None,
    max_length: int | None = None,
    output_col: str = "embedding",
    batch_size: int = 64,
    precision: str = "fp32",
    quantize: str | None = None,
    handle_invalid: str = "error",
    error_col: str = "error",
    path: str | os.PathLike[str] | None = None,
    partitions: int = 32,
    overwrite: bool = False,
) -> DataFrame:
    """Return ``data`` with a vector for each text, by a model of transformers.

    Args:
        data: A DataFrame with a column of text.
        model: The folder of the model and its tokenizer, or the model.
        text: The column of text.
        pooling: The vector of a text: "mean" or "max" of its tokens' vectors, that of the first token
            ("cls") or of the last ("last"). None is what a folder of sentence-transformers says, else
            "mean".
        normalize: Scale each vector to length 1, so that products are cosines.
        tokenizer: The tokenizer or its folder; None is that in the model's folder.
        max_length: The most tokens of a text; None is the limit of model and tokenizer.
        output_col: The name of the new column, an ``array<float>``.
        batch_size: The number of texts of a forward pass.
        precision: See :func:`sparkdl.predict`, also for the arguments that follow.

    Raises:
        UserError: The data, an argument or the model does not fit.
    """
    options = Options(batch_size, precision, quantize, handle_invalid, error_col)
    found = prepare_embedding(
        data, model, text, pooling, normalize, tokenizer, max_length, output_col, options
    )
    return found.compute(data, path, partitions, overwrite)


def prepare_embedding(
    data: DataFrame,
    model: Any,
    text: str,
    pooling: str | None,
    normalize: bool,
    tokenizer: Any,
    max_length: int | None,
    output_col: str,
    options: Options,
) -> Inference:
    """Return the work that :func:`embed` does; see there for the arguments."""
    source = read_model(model, head="none")
    chosen = pooling or _pooling_of(source.folder)
    if chosen not in POOLINGS:
        raise ParameterError(f"pooling={shown(chosen)}: use one of {', '.join(POOLINGS)}.")
    _check_text(data, text)
    embedder = Embedder(source.module, chosen, bool(normalize)).eval()
    given = replace(source, module=embedder, build=embedder, inner=source.module)
    return prepare(
        *(data, given, text, None, None, tokenizer, max_length, output_col, options, None),
        padding_side="right",  # a text's vector does not depend on the others of its batch
    )


def classify(
    data: DataFrame,
    model: Any,
    text: str = "text",
    *,
    tokenizer: Any = None,
    max_length: int | None = None,
    prediction_col: str = "prediction",
    score_col: str = "score",
    scores_col: str | None = None,
    batch_size: int = 64,
    precision: str = "fp32",
    quantize: str | None = None,
    handle_invalid: str = "error",
    error_col: str = "error",
    path: str | os.PathLike[str] | None = None,
    partitions: int = 32,
    overwrite: bool = False,
) -> DataFrame:
    """Return ``data`` with the class of each text and its probability, by a model of transformers.

    Args:
        data: A DataFrame with a column of text.
        model: The folder of a model that classifies sequences and of its tokenizer, or the model.
        text: The column of text.
        tokenizer: The tokenizer or its folder; None is that in the model's folder.
        max_length: The most tokens of a text; None is the limit of model and tokenizer.
        prediction_col: The name of the new column with the name of the most likely class.
        score_col: The name of the new column with its probability.
        scores_col: The name of a column with the probabilities of all classes, or None for none.
        batch_size: The number of texts of a forward pass.
        precision: See :func:`sparkdl.predict`, also for the arguments that follow.

    Raises:
        UserError: The data, an argument or the model does not fit.
    """
    options = Options(batch_size, precision, quantize, handle_invalid, error_col)
    found = prepare_classes(
        data, model, text, tokenizer, max_length, prediction_col, score_col, scores_col, options
    )
    return found.compute(data, path, partitions, overwrite)


def prepare_classes(
    data: DataFrame,
    model: Any,
    text: str,
    tokenizer: Any,
    max_length: int | None,
    prediction_col: str,
    score_col: str,
    scores_col: str | None,
    options: Options,
) -> Inference:
    """Return the work that :func:`classify` does; see there for the arguments."""
    source = read_model(model, head="classes")
    config = getattr(source.module, "config", None)
    labels = getattr(config, "id2label", None)
    if not isinstance(labels, Mapping) or not labels:
        raise ModelError(
            f"the model is {kind_of(source.module)} whose configuration names no classes (id2label): "
            "classify takes a model of transformers that classifies sequences; for others use predict."
        )
    _check_text(data, text)
    several = getattr(config, "problem_type", None) == "multi_label_classification"
    outputs = {prediction_col: partial(_best, several), score_col: partial(_best_score, several)}
    if scores_col is not None:
        outputs[scores_col] = partial(_score, several)
    names = tuple(str(labels[number]) for number in sorted(labels))

    def with_labels(column: OutputColumn) -> OutputColumn:
        return replace(column, labels=names) if column.name == prediction_col else column

    return prepare(
        *(data, source, text, outputs, None, tokenizer, max_length, prediction_col, options, None),
        finish=with_labels,
        padding_side="right",
    )


def _check_text(data: Any, text: Any) -> None:
    """Raise :class:`ParameterError` if the column is there and is no text."""
    if not isinstance(text, str):
        raise ParameterError(f"text={shown(text)}: give the name of a column.")
    kinds = {field.name: field.dataType for field in getattr(data, "schema", ())}
    if text in kinds and kinds[text].typeName() not in TEXT:
        raise ParameterError(
            f'column "{text}" is of type {kinds[text].simpleString()}, not text: for numbers '
            "use sparkdl.predict."
        )


def _pooling_of(folder: Path | None) -> str:
    """Return the pooling that a folder of sentence-transformers says, else "mean"."""
    try:
        assert folder is not None
        told = json.loads((folder / "1_Pooling" / "config.json").read_text(encoding="utf-8"))
    except (AssertionError, OSError, ValueError):
        return "mean"
    names = {"cls": "cls_token", "max": "max_tokens", "last": "lasttoken"}
    return next(
        (ours for ours, theirs in names.items() if told.get(f"pooling_mode_{theirs}")), "mean"
    )
