"""What ``fit`` returns: the module, and ways to use it on DataFrames and RDDs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pyspark.core.rdd import RDD
from pyspark.sql import DataFrame
from torch import nn

from sparkdl.data.columns import Convert, Sequence, Specs
from sparkdl.data.handle import Field
from sparkdl.data.records import feature_names, named
from sparkdl.errors import DataError, ModelError, ParameterError
from sparkdl.infer.evaluate import Evaluation, check_metrics, evaluate
from sparkdl.infer.metrics import Judging, Metrics, resolve, suited
from sparkdl.infer.output import Output
from sparkdl.infer.predict import Finish, predict_dataframe, predict_rdd
from sparkdl.infer.predictor import Dimensions, ShippedModule, sender_to
from sparkdl.infer.scoring import Scorer
from sparkdl.plain import plain
from sparkdl.step.loss import check_averages
from sparkdl.train.continuing import KeptState
from sparkdl.train.history import History


class TrainedModel:
    """A trained module with the columns it was trained on.

    ``module`` is a plain ``torch.nn.Module`` on the CPU, in evaluation mode; ``history`` the
    training's :class:`sparkdl.History`. ``best`` has the weights of the best validation
    (``Validation(best=...)``) and ``ema`` their moving average (``Trainer(ema=...)``), else None.
    """

    ema: TrainedModel | None = None
    best: TrainedModel | None = None
    optimizer_state: KeptState | None = None
    """The state of every slice, with ``Trainer(keep_optimizer_state=True)`` and after each
    ``partial_fit``; it is not saved."""

    def __init__(
        self,
        *,
        module: nn.Module,
        model: Any,
        loss: Callable[..., Any] | None,
        features: tuple[str, ...],
        label: tuple[str, ...],
        fields: tuple[Field, ...],
        num_features: int,
        float_dtype: str,
        output: Output | None,
        history: History,
        columns: Specs | None = None,
        seed: int = 0,
        judging: Judging | None = None,
    ) -> None:
        """``seed``: with which ``model`` is called. ``judging``: how an accuracy takes output and label
        where there is no ``loss``."""
        self.module = module
        self.model = model
        self.loss = loss
        self.features = features
        self.label = label
        self.fields = fields
        self.num_features = num_features
        self.float_dtype = float_dtype
        self.output = output
        self.history = history
        self.columns = dict(columns or {})
        self.seed = seed
        self._judging = judging
        self._shipped: ShippedModule | None = None

    @property
    def judging(self) -> Judging:
        """How an accuracy takes output and label: as the loss does."""
        return (self._judging or Judging()) if self.loss is None else Judging.of(self.loss)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or what a pickle makes, ships for itself."""
        return {**vars(self), "_shipped": None}

    def transform(
        self,
        data: DataFrame,
        prediction_col: str = "prediction",
        batch_size: int = 1024,
        postprocess: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> DataFrame:
        """``data`` with the model's output as a column: a number, or (nested) arrays of numbers.

        Lazy; only the feature columns travel to Python, as Arrow batches; works on a streaming
        DataFrame. ``prediction_col``: a new name. ``postprocess`` maps a batch's output (rows, ...) to
        what the column shall hold, such as ``partial(torch.argmax, dim=1)``. ``batch_size``: rows a
        forward pass.
        """
        _check_kind("transform", data, DataFrame, "a DataFrame", "For an RDD use predict.")
        if not isinstance(prediction_col, str):
            raise ParameterError(f"prediction_col={prediction_col!r}: give a column name.")
        output = self._output(postprocess)
        return predict_dataframe(
            data,
            self._ship(data),
            self.features,
            output,
            self.float_dtype,
            prediction_col,
            _batch_size(batch_size),
            postprocess,
            self.columns,
            self.fields,
            self._dimensions(output),
        )

    def predict(self, records: RDD, batch_size: int = 1024, postprocess: Finish = None) -> RDD:
        """An RDD with one prediction (a number or an array) for each record, in the same order.

        Records are features, ``(features, label)`` pairs, :class:`sparkdl.Sample`, or have the names
        of the feature columns (a Row, say); a tuple of as many values as the model has inputs is
        features. ``batch_size``, ``postprocess``: see
        :meth:`transform`.
        """
        _check_kind("predict", records, RDD, "an RDD", "For a DataFrame use transform.")
        output = self._output(postprocess)
        return predict_rdd(
            records,
            self._ship(records),
            self.features,
            self.num_features,
            self.float_dtype,
            _batch_size(batch_size),
            postprocess,
            self._specs_of_records(self.num_features),
            self.fields,
            self._dimensions(output),
        )

    def evaluate(
        self,
        data: DataFrame | RDD,
        metrics: Metrics = (),
        batch_size: int = 1024,
    ) -> dict[str, float]:
        """``loss``, the mean over all samples, and each of ``metrics``, by name.

        Computed on the executors in evaluation mode, ``batch_size`` rows a forward pass. A metric is a
        name ("accuracy", "top@5", "mae", "mse", "auc", "hit_ratio@10", "ndcg@10"), a
        :class:`sparkdl.Metric`, a ``torchmetrics.Metric``, or a pair (name, metric); see
        docs/guide/metrics.md. Raises :class:`ParameterError` for a metric that does not go with the
        output or the label, and :class:`ModelError` for a loss that adds up.
        """
        _check_kind("evaluate", data, (DataFrame, RDD), "a DataFrame or an RDD")
        resolved = suited(resolve(metrics), self.loss, self._judging)
        if self.loss is None and not resolved:
            raise ParameterError(
                "nothing to evaluate: a loaded model has no loss. Name metrics, or load it with "
                "sparkdl.load(path, loss=...)."
            )
        if self.loss is not None:
            check_averages(self.loss, "batches")
        if resolved and len(self.label) != 1:
            raise ParameterError(f"metrics need one label; the model has {len(self.label)}.")
        check_metrics(resolved)
        records = isinstance(data, RDD)
        specs = self._specs_of_records(len(self.fields)) if records else self.columns
        size, before = _batch_size(batch_size), self._shipped
        module = ShippedModule.of(self.module, sender_to(data), before, self.model)
        scorer = Scorer(self.loss, resolved, self.output.dimensions if self.output else None)
        try:
            return evaluate(
                data,
                Evaluation(module, scorer, self.num_features, size),
                self.features,
                self.label,
                self.float_dtype,
                specs,
                self.fields,
            )
        finally:
            if module is not before:
                module.destroy()

    def save(self, path: str | os.PathLike[str], overwrite: bool = False) -> Path:
        """Write the model into the folder ``path``: safetensors, JSON, and the recipe.

        Where the recipe has no name it is written as a pickle, and a warning says why. Raises
        FileExistsError where it holds a model, unless ``overwrite``.
        """
        from sparkdl.train.persistence import save

        return save(self, path, overwrite)

    def _ship(self, data: DataFrame | RDD) -> ShippedModule:
        """The module on its way to the workers, which stays there, since what uses it is lazy; a large
        one is sent once, not at each call."""
        self._shipped = ShippedModule.of(self.module, sender_to(data), self._shipped, self.model)
        return self._shipped

    def _specs_of_records(self, count: int) -> Specs:
        """:attr:`columns` of the first ``count`` fields, by the names which a record's fields have.
        The images of records are arrays already.

        Raises :class:`DataError` for a function, of which nobody knows whether it was applied.
        """
        labels = (None,) * (len(self.fields) - self.num_features)
        names = feature_names(self.num_features) + [name for name, _ in named("label", labels)]
        specs = {}
        for field, name in zip(self.fields[:count], names, strict=False):
            spec = self.columns.get(field.name)
            if isinstance(spec, Convert):
                raise DataError(
                    f'columns["{field.name}"] is a sparkdl.Convert, which is for DataFrames, not for '
                    "the records of an RDD: give transform or evaluate a DataFrame with this column."
                )
            if isinstance(spec, Sequence):
                specs[name] = spec
        return specs

    def _output(self, postprocess: Finish) -> Output:
        if self.output is None:
            raise ModelError(
                "this model's output is not one tensor with a row for each sample, so there is no "
                "column to make of it. Use trained.module directly."
            )
        if postprocess is None:
            return self.output
        example = torch.zeros(2, *self.output.shape, dtype=getattr(torch, self.output.dtype))
        if not callable(postprocess):
            raise ParameterError(f"postprocess is a {type(postprocess).__name__}: give a function.")
        try:
            finished = postprocess(example)
        except Exception as error:
            raise ParameterError(
                f"postprocess fails on a tensor of shape {list(example.shape)}: "
                f"{type(error).__name__}: {error}. It is given the model's output for a batch."
            ) from error
        if not isinstance(finished, torch.Tensor) or finished.ndim == 0 or len(finished) != 2:
            raise ParameterError(
                "postprocess must map a tensor of shape (rows, ...) to one with as many rows."
            )
        return Output.of(finished)

    def _dimensions(self, finished: Output) -> Dimensions:
        """Of what the module puts out for a batch, and of what is made of it."""
        assert self.output is not None
        return self.output.dimensions, finished.dimensions


def _check_kind(method: str, data: Any, kind: Any, wanted: str, hint: str = "") -> None:
    if not isinstance(data, kind):
        found = f"{type(data).__module__}.{type(data).__qualname__}"
        raise ParameterError(f"{method} takes {wanted}, not {found}. {hint}".rstrip())


def _batch_size(value: int) -> int:
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ParameterError(f"batch_size={value!r}: give a whole number of at least 1.")
    return value
