"""Predictions with any model: :func:`predict`, and :func:`embed` and :func:`classify` for texts."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import torch
from pyspark import RDD
from pyspark.sql import DataFrame
from torch import nn

from sparkdl.data.columns.base import KINDS, Column, ColumnSpec, padding_of
from sparkdl.data.schema import check_specs
from sparkdl.errors import (
    ModelError,
    ParameterError,
    kind_of,
    nearest,
    raise_all,
    shown,
    wrong_data,
)
from sparkdl.infer.outputs import named_parts
from sparkdl.infer.score import Inference, Inputs, ModelSource, Options, prepare
from sparkdl.infer.source import longest, read_model, tensors_of, tokenizer_of
from sparkdl.infer.written import write_parts
from sparkdl.model.recipe import Part, Signature, described
from sparkdl.plain import plain
from sparkdl.usercode.content import content_digest

TEXT = ("string", "char", "varchar")
POOLINGS = ("mean", "cls", "max", "last")
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
    ready = prepare_any(
        *(data, model, features, outputs, columns, tokenizer, max_length, prediction_col),
        options=options,
        weights=weights,
        example=example,
    )
    return _computed(ready, data, path, partitions, overwrite)


def prepare_any(
    data: DataFrame | RDD,
    model: Any,
    features: Any,
    outputs: Any,
    columns: Mapping[str, ColumnSpec] | None,
    tokenizer: Any,
    max_length: int | None,
    prediction_col: str,
    *,
    options: Options,
    weights: Any = None,
    example: DataFrame | None = None,
) -> Inference:
    """Return the work that :func:`predict` does; see there for the arguments."""
    source = read_model(model, weights)
    _check(data, prediction_col, example)
    inputs = inputs_of(data, source, features, columns, tokenizer, max_length)
    parts = named_parts(outputs, prediction_col)
    if parts is None and source.part is not None:
        parts = {prediction_col: source.part}
    return prepare(data, source, inputs, parts, prediction_col, options, example=example)


def _check(data: Any, prediction_col: Any, example: Any = None) -> None:
    if not isinstance(data, (DataFrame, RDD)):
        raise wrong_data("predict", data, "a DataFrame or an RDD")
    if not isinstance(example, (DataFrame, type(None))):
        raise wrong_data("example=", example, "a DataFrame")
    if not isinstance(prediction_col, str):
        raise ParameterError(f"prediction_col={shown(prediction_col)}: give a column name.")


def _computed(ready: Inference, data: Any, path: Any, partitions: int, overwrite: bool) -> Any:
    """Return the data with predictions: lazily, or as read from ``path`` once it is there."""
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
    outputs = [(column.name, column.part, column.labels) for column in task.outputs]
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
    padding_side: str | None = None,
) -> Inputs:
    """Return the inputs of a model; ``padding_side`` None is that of the tokenizer."""
    known = source.inputs
    if known is not None:
        if features != "features" and _names(features)[0] != known.names:
            raise ParameterError(
                f"features={shown(features)}: the model was trained here, and takes the columns "
                f"{', '.join(known.names)}. Leave features= out, or pass trained.module."
            )
        return replace(known, specs={**known.specs, **(columns or {})})
    names, keywords = _names(features)
    specs = dict(columns or {})
    raise_all(ParameterError, list(check_specs(specs, names, ())))
    keywords = _add_text(data, source, names, keywords, specs, tokenizer, max_length, padding_side)
    inputs: list[str] = []  # with the lengths and masks of sequences
    for keyword, name in zip(keywords, names, strict=False):
        padding = padding_of(specs, name)
        inputs += [keyword] if padding is None else padding.names(keyword)
    floats = [t.dtype for t in tensors_of(source.module).values() if t.is_floating_point()]
    dtype = "float64" if floats and floats[0] == torch.float64 else "float32"
    return Inputs(names, specs, Signature(tuple(inputs)), dtype, (), keywords)


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
    data: DataFrame | RDD,
    source: ModelSource,
    names: tuple[str, ...],
    keywords: tuple[str, ...],
    specs: dict[str, Any],
    tokenizer: Any,
    max_length: int | None,
    side: str | None,
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
        limit = max_length or longest(source.module, found)
        text: Any = KINDS["text"]
        specs |= {name: text(found, max_length=limit, padding_side=side) for name in texts}
    if not keywords and len(names) == 1 and _of_transformers(source):
        return ("input_ids",)
    return keywords


def _of_transformers(source: ModelSource) -> bool:
    """Return whether the model is called as those of transformers are, with ``input_ids``."""
    return getattr(source.module, "main_input_name", None) == "input_ids"


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
    ready = prepare_embedding(
        data, model, text, pooling, normalize, tokenizer, max_length, output_col, options
    )
    return _computed(ready, data, path, partitions, overwrite)


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
    _check_text(data, text, output_col)
    embedder = Embedder(source.module, chosen, bool(normalize)).eval()
    given = replace(source, module=embedder, build=embedder, inner=source.module)
    # on the right: a text's vector does not depend on the others of its batch
    inputs = inputs_of(data, given, text, None, tokenizer, max_length, "right")
    return prepare(data, given, inputs, None, output_col, options)


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
    ready = prepare_classes(
        data, model, text, tokenizer, max_length, prediction_col, score_col, scores_col, options
    )
    return _computed(ready, data, path, partitions, overwrite)


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
    _check_text(data, text, prediction_col)
    several = getattr(config, "problem_type", None) == "multi_label_classification"
    outputs: dict[str, Part] = {
        prediction_col: partial(_best, several),
        score_col: partial(_best_score, several),
    }
    if scores_col is not None:
        outputs[scores_col] = partial(_score, several)
    names = tuple(str(labels[number]) for number in sorted(labels))
    inputs = inputs_of(data, source, text, None, tokenizer, max_length, "right")
    parts, texts = named_parts(outputs, prediction_col), {prediction_col: names}
    return prepare(data, source, inputs, parts, prediction_col, options, labels=texts)


def _check_text(data: Any, text: Any, column: Any) -> None:
    """Raise a UserError for no DataFrame, no names, or a column that is there and is no text."""
    if not isinstance(data, DataFrame):
        raise wrong_data("predict", data, "a DataFrame")
    _check(data, column)
    if not isinstance(text, str):
        raise ParameterError(f"text={shown(text)}: give the name of a column.")
    kinds = {field.name: field.dataType for field in data.schema}
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
        use: What the function does: :func:`sparkdl.predict`, :func:`sparkdl.embed` or
            :func:`sparkdl.classify`.
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
    if use not in _PREPARED:
        raise ParameterError("use: give sparkdl.predict, sparkdl.embed or sparkdl.classify.")
    if arguments.get("handle_invalid") == "skip":
        raise ParameterError(
            'handle_invalid="skip": a function of SQL cannot leave out rows. Use "keep".'
        )
    options = Options(**{key: arguments.pop(key) for key in _OPTIONS & arguments.keys()})
    defaults = {
        parameter.name: parameter.default
        for parameter in inspect.signature(use).parameters.values()
        if parameter.name not in _NO_ARGUMENTS
    }
    for unknown in arguments.keys() - defaults.keys():
        raise ParameterError(
            f"{use.__name__} as a function of SQL has no argument {shown(unknown)}."
            f"{nearest(unknown, defaults)}"
        )
    if features is not None:
        arguments["features" if use is predict else "text"] = features
    if use is predict:
        defaults["example"] = example
    ready = _PREPARED[use](example, model, options=options, **{**defaults, **arguments})
    return example.sparkSession.udf.register(name, ready.function(example))


_OPTIONS = {"batch_size", "precision", "quantize", "handle_invalid", "error_col"}
_NO_ARGUMENTS = {"data", "model", "example", "path", "partitions", "overwrite", *_OPTIONS}
_PREPARED: dict[Any, Callable[..., Inference]] = {
    predict: prepare_any,
    embed: prepare_embedding,
    classify: prepare_classes,
}
