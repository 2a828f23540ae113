"""Predictions for texts by models of transformers: embed, classify, and rerank pairs."""

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

from sparkdl.data.arrow_tasks import check_new_columns
from sparkdl.errors import ModelError, ParameterError, kind_of, shown, wrong_data
from sparkdl.infer.outputs import named_parts
from sparkdl.infer.predict import FUNCTIONS, TEXT, computed, inputs_of
from sparkdl.infer.score import Inputs, ModelSource, Options, prepare
from sparkdl.infer.source import read_model
from sparkdl.model.recipe import Part, described
from sparkdl.model.windows import Windows

POOLINGS = ("mean", "cls", "max", "last")
Names = str | tuple[str, str]
"""A column of text, or those of the first and of the second texts of pairs."""


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
    """Return the probabilities of a model's logits: a softmax, or sigmoids for several labels or a
    single class."""
    logits = returned if isinstance(returned, torch.Tensor) else returned["logits"]
    alone = several or logits.shape[1] == 1
    return torch.sigmoid(logits.float()) if alone else torch.softmax(logits.float(), 1)


def _best(several: bool, names: tuple[str, ...], returned: Any) -> list[str]:
    return [names[number] for number in _score(several, returned).argmax(1).tolist()]


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
        max_length: The most tokens of a text; None is what a folder of sentence-transformers says, else
            the limit of model and tokenizer.
        output_col: The name of the new column, an ``array<float>``.
        batch_size: The number of texts of a forward pass.
        precision: See :func:`sparkdl.predict`, also for the arguments that follow.

    Raises:
        UserError: The data, an argument or the model does not fit.
    """
    options = Options(batch_size, precision, quantize, handle_invalid, error_col)
    source = read_model(model, head="none")
    chosen = pooling or _pooling_of(source.folder)
    if chosen not in POOLINGS:
        raise ParameterError(f"pooling={shown(chosen)}: use one of {', '.join(POOLINGS)}.")
    if max_length is None:
        max_length = _json(source.folder, "sentence_bert_config.json").get("max_seq_length")
    _check_text(data, text, 1)
    embedder = Embedder(source.module, chosen, bool(normalize)).eval()
    given = replace(source, module=embedder, build=embedder, inner=source.module)
    # on the right: a text's vector does not depend on the others of its batch
    inputs = inputs_of(data, given, text, None, tokenizer, max_length, {"padding_side": "right"})
    ready = prepare(data, given, inputs, None, output_col, options)
    return computed(ready, data, path, partitions, overwrite)


def classify(
    data: DataFrame,
    model: Any,
    text: Names = "text",
    *,
    tokenizer: Any = None,
    max_length: int | None = None,
    stride: int | None = None,
    pooling: str = "mean",
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
        text: The column of text, or two columns of pairs: ``("premise", "hypothesis")``.
        tokenizer: The tokenizer or its folder; None is that in the model's folder.
        max_length: The most tokens of a text; None is the limit of model and tokenizer.
        stride: Divide longer texts into windows of ``max_length`` tokens, each of which begins with
            this many of the one before; None cuts them.
        pooling: The logits of a text of several windows: the "mean" of theirs, or the "max".
        prediction_col: The name of the new column with the name of the most likely class.
        score_col: The name of the new column with its probability.
        scores_col: The name of a column with the probabilities of all classes, or None for none.
        batch_size: The number of texts of a forward pass.
        precision: See :func:`sparkdl.predict`, also for the arguments that follow.

    Raises:
        UserError: The data, an argument or the model does not fit.
    """
    options = Options(batch_size, precision, quantize, handle_invalid, error_col)
    source = read_model(model, head="classes")
    config = getattr(source.module, "config", None)
    labels = getattr(config, "id2label", None)
    if not isinstance(labels, Mapping) or not labels:
        raise ModelError(
            f"the model is {kind_of(source.module)} whose configuration names no classes (id2label): "
            "classify takes a model of transformers that classifies sequences; for others use predict."
        )
    _check_text(data, text)
    kind = getattr(config, "problem_type", None)
    if kind == "regression":
        raise ModelError(
            "the model gives numbers (problem_type: regression), not classes: use sparkdl.predict, or "
            'sparkdl.rerank(..., activation="none") for pairs.'
        )
    several = kind == "multi_label_classification"
    classes = tuple(str(labels[number]) for number in sorted(labels))
    check_new_columns(data, [n for n in (prediction_col, score_col, scores_col) if n], "")
    outputs: dict[str, Part] = {
        prediction_col: partial(_best, several, classes),
        score_col: partial(_best_score, several),
    }
    if scores_col is not None:
        outputs[scores_col] = partial(_score, several)
    source, inputs = _of_scores(data, source, text, tokenizer, max_length, stride, pooling)
    parts = named_parts(outputs, prediction_col)
    ready = prepare(data, source, inputs, parts, prediction_col, options)
    return computed(ready, data, path, partitions, overwrite)


def _of_scores(
    data: DataFrame,
    source: ModelSource,
    text: Names,
    tokenizer: Any,
    max_length: int | None,
    stride: int | None,
    pooling: str,
) -> tuple[ModelSource, Inputs]:
    """Return a model that scores texts or pairs, whole or in windows, and its inputs."""
    first, second = (text, None) if isinstance(text, str) else text
    how = {"padding_side": "right", "text_pair": second, "stride": stride}
    if stride is not None:
        whole = Windows(source.module, pooling)
        source = replace(source, module=whole, build=whole, inner=source.module)
    return source, inputs_of(data, source, first, None, tokenizer, max_length, how)


def rerank(
    data: DataFrame,
    model: Any,
    query: str = "query",
    text: str = "text",
    *,
    activation: str | None = None,
    tokenizer: Any = None,
    max_length: int | None = None,
    stride: int | None = None,
    pooling: str = "max",
    score_col: str = "score",
    batch_size: int = 64,
    precision: str = "fp32",
    quantize: str | None = None,
    handle_invalid: str = "error",
    error_col: str = "error",
    path: str | os.PathLike[str] | None = None,
    partitions: int = 32,
    overwrite: bool = False,
) -> DataFrame:
    """Return ``data`` with the relevance of each text for its query, by a cross-encoder.

    Args:
        data: A DataFrame with a query and a text in each row.
        model: The folder of a model that classifies sequences, with one class, and of its tokenizer; or
            the model.
        query: The column of queries.
        text: The column of texts.
        activation: "sigmoid" makes scores between 0 and 1, "none" leaves logits. None is what a folder
            of sentence-transformers says, else "sigmoid".
        tokenizer: The tokenizer or its folder; None is that in the model's folder.
        max_length: The most tokens of a pair; None is the limit of model and tokenizer.
        stride: Divide longer texts into windows, see :func:`sparkdl.classify`; None cuts pairs.
        pooling: The logit of a text of several windows: the "max" of theirs, or the "mean".
        score_col: The name of the new column.
        batch_size: The number of pairs of a forward pass.
        precision: See :func:`sparkdl.predict`, also for the arguments that follow.

    Raises:
        UserError: The data, an argument or the model does not fit.
    """
    options = Options(batch_size, precision, quantize, handle_invalid, error_col)
    source = read_model(model, head="classes")
    config = getattr(source.module, "config", None)
    if (count := getattr(config, "num_labels", 1)) != 1:
        raise ModelError(
            f"the model scores {count} classes, and rerank takes one score a pair: use "
            f"sparkdl.classify(df, model, ({shown(query)}, {shown(text)}))."
        )
    told = getattr(config, "sentence_transformers", None) or {}
    named = str(told.get("activation_fn", "")).endswith("Identity")
    chosen = activation or ("none" if named else "sigmoid")
    if chosen not in ("none", "sigmoid"):
        raise ParameterError(f'activation={shown(activation)}: use "sigmoid" or "none".')
    _check_text(data, (query, text))
    source, inputs = _of_scores(data, source, (query, text), tokenizer, max_length, stride, pooling)
    parts = named_parts({score_col: partial(_relevance, chosen == "sigmoid")}, score_col)
    ready = prepare(data, source, inputs, parts, score_col, options)
    return computed(ready, data, path, partitions, overwrite)


def _relevance(sigmoid: bool, returned: Any) -> torch.Tensor:
    """Return one score a pair."""
    logits = returned if isinstance(returned, torch.Tensor) else returned["logits"]
    scores = logits.float().reshape(len(logits))
    return torch.sigmoid(scores) if sigmoid else scores


def _check_text(data: Any, text: Any, most: int = 2) -> None:
    """Raise a UserError for no DataFrame, no names, or a column that is there and is no text."""
    if not isinstance(data, DataFrame):
        raise wrong_data("predict", data, "a DataFrame")
    names = (text,) if isinstance(text, str) else text
    good = isinstance(names, (tuple, list)) and all(isinstance(name, str) for name in names)
    if not good or not 1 <= len(names) <= most:
        pairs = ", or two names for pairs" if most > 1 else ""
        raise ParameterError(f"text={shown(text)}: give the name of a column{pairs}.")
    kinds = {field.name: field.dataType for field in data.schema}
    for name in names:
        if name in kinds and kinds[name].typeName() not in TEXT:
            raise ParameterError(
                f'column "{name}" is of type {kinds[name].simpleString()}, not text: for numbers '
                "use sparkdl.predict."
            )


def _pooling_of(folder: Path | None) -> str:
    """Return the pooling that a folder of sentence-transformers says, else "mean".

    Raises ModelError if the folder makes vectors in a way that :func:`embed` does not know.
    """
    steps = [str(step.get("type")).rpartition(".")[2] for step in _json(folder, "modules.json")]
    told = _json(folder, "1_Pooling/config.json")
    modes = [name for name, on in told.items() if name.startswith("pooling_mode_") and on]
    modes = modes or [told.get("pooling_mode", "mean")]
    others = [step for step in steps if step not in ("Transformer", "Pooling", "Normalize")]
    others += [mode for mode in modes if mode not in _MODES] if len(modes) == 1 else modes
    if others:
        raise ModelError(
            f'the folder "{folder}" makes vectors with {", ".join(others)}, which embed does not know: '
            "with pooling= it takes the model without that; or give sparkdl.predict a module with it."
        )
    return _MODES[modes[0]]


def _json(folder: Path | None, name: str) -> Any:
    """Return what a file of the folder holds; nothing if it is not there."""
    try:
        assert folder is not None
        return json.loads((folder / name).read_text(encoding="utf-8"))
    except (AssertionError, OSError, ValueError):
        return {}


_MODES = {
    **{name: name for name in POOLINGS},
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "lasttoken": "last",
}
"""The poolings by their names in a folder of sentence-transformers."""


FUNCTIONS.extend((embed, classify, rerank))
