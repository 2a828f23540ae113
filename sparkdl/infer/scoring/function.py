"""Predictions as a function of SQL: :func:`register_function`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyspark.sql import DataFrame

from sparkdl.errors import ParameterError, nearest, shown, wrong_data
from sparkdl.infer.scoring.inference import Inference, Options
from sparkdl.infer.scoring.predict import predict
from sparkdl.infer.scoring.prepare import prepare
from sparkdl.infer.scoring.source import read_model
from sparkdl.infer.scoring.text import classify, embed, prepare_classes, prepare_embedding

_OPTIONS = {"batch_size", "precision", "quantize", "handle_invalid", "error_col"}


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
    prepared, defaults = _PREPARED[use]
    options = Options(**{key: arguments.pop(key) for key in _OPTIONS & arguments.keys()})
    for unknown in arguments.keys() - defaults.keys():
        raise ParameterError(
            f"{use.__name__} as a function of SQL has no argument {shown(unknown)}."
            f"{nearest(unknown, defaults)}"
        )
    if features is not None:
        arguments["features" if use is predict else "text"] = features
    found: Inference = prepared(example, model, options=options, **{**defaults, **arguments})
    return example.sparkSession.udf.register(name, found.udf(example))


def _predicting(
    data: DataFrame,
    model: Any,
    *,
    options: Options,
    weights: Any,
    **arguments: Any,
) -> Inference:
    source = read_model(model, weights)
    return prepare(data, source, options=options, example=data, **arguments)


_TEXT = {"text": "text", "tokenizer": None, "max_length": None}
_PREPARED: dict[Any, tuple[Callable[..., Inference], dict[str, Any]]] = {
    predict: (
        _predicting,
        {
            "features": "features",
            "weights": None,
            "outputs": None,
            "columns": None,
            "tokenizer": None,
            "max_length": None,
            "prediction_col": "prediction",
        },
    ),
    embed: (
        prepare_embedding,
        _TEXT | {"pooling": None, "normalize": True, "output_col": "embedding"},
    ),
    classify: (
        prepare_classes,
        _TEXT | {"prediction_col": "prediction", "score_col": "score", "scores_col": None},
    ),
}
"""The function that prepares each use, and its further arguments with their defaults."""
