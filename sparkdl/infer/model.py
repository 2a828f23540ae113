"""The result of ``fit``: a module, and methods to use it on DataFrames and RDDs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyspark import RDD
from pyspark.sql import DataFrame, functions
from torch import nn

from sparkdl.codec.describe import table, titled
from sparkdl.data.fields import Field
from sparkdl.data.schema import quoted
from sparkdl.errors import ParameterError, counted, raise_all, wrong_data
from sparkdl.infer.evaluate import evaluate
from sparkdl.infer.export import export
from sparkdl.infer.manifest import ModelData
from sparkdl.infer.new_forward import Around, fields_of, names_of, recipe_and_module, signature_of
from sparkdl.infer.outputs import Finish, ml_column
from sparkdl.infer.saved import StoredState, read, save
from sparkdl.infer.score import Options, prepare_trained
from sparkdl.loop.history_tables import timings_as_html
from sparkdl.metrics.named import Metrics
from sparkdl.model.recipe import Part, problems_of_part


class TrainedModel(ModelData):
    """A trained module with the columns that it was trained on.

    ``fit`` and :func:`sparkdl.load` return it; it is not constructed directly.

    Attributes:
        module: The module, a plain ``torch.nn.Module`` on the CPU in evaluation mode.
        history: The :class:`sparkdl.History` of the training.
        loss: The loss; None if the model was loaded without one.
        features: The names of the feature columns.
        label: The names of the label columns.
        columns: The conversions of columns to tensors, by name.
        best: The model with the weights of the best validation (``Validation(best=...)``), or None.
        ema: The model with the moving average of the weights (``Trainer(ema=...)``), or None.
    """

    ema: TrainedModel | None = None
    best: TrainedModel | None = None
    optimizer_state: StoredState | None = None
    """The state of every slice, after ``Trainer(keep_optimizer_state=True)`` and each
    ``partial_fit``, or None. It is not saved."""

    def __repr__(self) -> str:
        size = counted(
            sum(parameter.numel() for parameter in self.module.parameters()), "parameter"
        )
        kind = type(self.module).__name__
        return f"<sparkdl.TrainedModel: {kind} of {size}, {self.history.summary()}>"

    def _repr_html_(self) -> str:
        """Return the view in a notebook: the fields, the training, and where its time went."""
        size = counted(sum(p.numel() for p in self.module.parameters()), "parameter")
        rows = [
            (field.name, "feature" if i < self.num_features else "label", str(field))
            for i, field in enumerate(self.fields)
        ]
        if self.output is not None:
            rows.append(("", "output", str(Field("", self.output.dtype, self.output.shape))))
        return titled(
            f"sparkdl.TrainedModel: {type(self.module).__name__} of {size}",
            table(("column", "role", "values"), rows),
            self.history._repr_html_(),
            timings_as_html(self.history.timings()),
        )

    def transform(
        self,
        data: DataFrame,
        prediction_col: str = "prediction",
        batch_size: int = 1024,
        postprocess: Callable[[Any], Any] | None = None,
        output: Part = None,
        ml_types: bool = False,
        handle_invalid: str = "error",
        error_col: str = "error",
    ) -> DataFrame:
        """Return ``data`` with the model's output as a column: numbers, or (nested) arrays of numbers.

        The column is lazy, and ``data`` may be a streaming DataFrame. Only the feature columns
        travel to Python, as Arrow batches.

        Args:
            data: A DataFrame with the feature columns.
            prediction_col: The name of the new column, which must not exist.
            batch_size: The number of rows of a forward pass.
            postprocess: A function that maps the output of a batch (rows, ...) to the content of the
                column, such as ``partial(torch.argmax, dim=1)``: a tensor, or a list with a value for
                each row, see :func:`sparkdl.predict`. If it fails on rows like those of
                the training, a Spark job gets the first two rows of ``data`` to try it on.
            output: The part of the model's result that is the output, as ``Trainer.output``; None is
                the part from the training.
            ml_types: Make the column what evaluators of ``pyspark.ml`` accept: a number, or an array
                of one number, becomes a double, and a longer array a vector.
            handle_invalid: The way to handle rows that cannot be read, or on which the model fails, as
                in :func:`sparkdl.predict`: "error", "skip" or "keep".
            error_col: The name of the column with the reason why a row that is kept has no prediction.

        Raises:
            UserError: The data, an argument or the model does not fit.
        """
        if not isinstance(data, DataFrame):
            raise wrong_data("transform", data, "a DataFrame", "For an RDD, use predict.")
        options = Options(batch_size, handle_invalid=handle_invalid, error_col=error_col)
        ready = prepare_trained(data, self, output, prediction_col, options, postprocess)
        predicted = ready.applied(data)
        if not ml_types:
            return predicted
        column = functions.col(quoted(prediction_col))
        return predicted.withColumn(prediction_col, ml_column(column, ready.task.outputs[0]))

    def predict(
        self,
        records: RDD,
        batch_size: int = 1024,
        postprocess: Finish = None,
        output: Part = None,
        handle_invalid: str = "error",
        error_col: str = "error",
    ) -> RDD:
        """Return an RDD with one prediction (a number or an array) for each record, in the same order.

        Args:
            records: Features, ``(features, label)`` pairs, :class:`sparkdl.Sample`, or records with
                the names of the feature columns (such as Row). A tuple with as many values as the
                model has inputs counts as features.
            batch_size: The number of rows of a forward pass.
            postprocess: A function of a batch's output, see :meth:`transform`.
            output: The part of the model's result that is the output, see :meth:`transform`.
            handle_invalid: The way to handle records that cannot be read, or on which the model fails:
                "error", "skip", or "keep", which makes each prediction a Row with the fields
                "prediction" and ``error_col``.
            error_col: The field with the reason why a record that is kept has no prediction.

        Raises:
            UserError: The data, an argument or the model does not fit.
        """
        if not isinstance(records, RDD):
            raise wrong_data("predict", records, "an RDD", "For a DataFrame, use transform.")
        options = Options(batch_size, handle_invalid=handle_invalid, error_col=error_col)
        ready = prepare_trained(records, self, output, "prediction", options, postprocess)
        return ready.over(records)

    def evaluate(
        self,
        data: DataFrame | RDD,
        metrics: Metrics = (),
        batch_size: int = 1024,
        output: Part = None,
        handle_invalid: str = "error",
    ) -> dict[str, Any]:
        """Return the mean loss over all samples as ``loss``, and each of the metrics, by name.

        A value is a number; that of a curve or a matrix is a dictionary or nested lists. They are
        computed on the executors, in evaluation mode.

        Args:
            data: A DataFrame or an RDD with features and labels, as for ``fit``.
            metrics: Metrics: names ("accuracy", "f1", "auc", "log_loss", "rmse", "confusion_matrix",
                "ndcg@10"), objects of :class:`sparkdl.Metric` or ``torchmetrics.Metric``, or pairs
                (name, metric); see docs/guide/metrics.md.
            batch_size: The number of rows of a forward pass.
            output: The part of the model's result that the metrics use, as ``Trainer.output``; None
                is the part from the training, which the loss uses in any case.
            handle_invalid: "skip" leaves out rows that cannot be read, or on which the model fails, and
                the log tells how many.

        Raises:
            ParameterError: A metric does not go with the output or the label, or nothing is to be
                computed.
            ModelError: The loss adds up instead of averaging, or the model fails.
            DataError: There is no row, or a row is bad.
        """
        return evaluate(self, data, metrics, batch_size, output, handle_invalid)

    def with_module(
        self,
        module: Around,
        features: str | Sequence[str] | Mapping[str, str] | None = None,
        output: Part = None,
    ) -> TrainedModel:
        """Return a model with another forward, which shares the trained weights.

        It predicts, evaluates metrics and is saved as this one. It has no loss.

        Args:
            module: A class or function that makes the new module of the trained one, such as a
                ``class TopItems(nn.Module)`` with ``__init__(self, trained)``; or the module itself.
            features: The columns that the new module takes, as ``Trainer.features``, of those that
                were features or labels of the training. None is the features of this model.
            output: The part of the new module's result that is the output, as ``Trainer.output``.

        Raises:
            UserError: There is no module, or a column is not known.
        """
        recipe, made = recipe_and_module(module, self.module, self.model)
        raise_all(ParameterError, problems_of_part(output))
        names, signature = self.features, replace(self.signature, part=output)
        if features is not None:
            names, keywords = names_of(features)
            signature = signature_of(names, keywords, self.columns, output)
        columns = (*self.features, *self.label)
        known = dict(zip(columns, self.fields, strict=False))
        return replace(
            self,
            module=made,
            model=recipe,
            loss=None,
            features=names,
            fields=fields_of((*names, *self.label), known),
            num_features=len(names),
            output=None,
            signature=signature,
        )

    def report(self, path: str | os.PathLike[str], title: str = "") -> Path:
        """Write a page about the training; see :meth:`sparkdl.History.report`.

        Args:
            path: The file to write, such as ``report.html``.
            title: The heading of the page; the module's name if it is empty.

        Returns:
            The path.

        Raises:
            ParameterError: The extra ``report`` is not installed, or the path is a folder.
        """
        return self.history.report(Path(path), title or type(self.module).__name__)

    def save(self, path: str | os.PathLike[str], overwrite: bool = False) -> Path | str:
        """Write the model into the folder ``path``, and return that; :func:`sparkdl.load` reads it.

        The folder has safetensors, JSON, and the recipe of the module. A recipe without an
        importable name is written as a pickle, and a warning says why.

        Args:
            path: A path of this machine, or a URI: of any file system that Spark reaches by its
                Hadoop, or that checkpoints reach.
            overwrite: Replace a model that is there.

        Raises:
            FileExistsError: The folder holds a model, and ``overwrite`` is False.
            UserError: The model cannot be saved.
            CheckpointError: The URI cannot be written to.
        """
        return save(self, path, overwrite)

    def export(
        self, path: str | os.PathLike[str], format: str = "torch.export", overwrite: bool = False
    ) -> Path:
        """Write the module as a program that runs without its code, and return the path of the file.

        It takes any number of rows, and any length of rows whose length varies. What it returns is what
        the module returns. :func:`sparkdl.predict` takes the path of an exported program; its
        columns must be said there.

        Args:
            path: A file of this machine, such as "model.pt2" or "model.onnx".
            format: "torch.export", or "onnx", which needs the extra ``onnx``.
            overwrite: Replace a file that is there.

        Raises:
            FileExistsError: The file is there, and ``overwrite`` is False.
            ModelError: torch cannot make a program of the module.
            ParameterError: The format is not known, or the extra is not installed.
        """
        return export(self, path, format, overwrite)


def load(
    path: str | os.PathLike[str],
    model: Callable[[], nn.Module] | nn.Module | None = None,
    loss: Callable[..., Any] | None = None,
    trust: bool = False,
) -> TrainedModel:
    """Load a trained model that :meth:`sparkdl.TrainedModel.save` wrote, or the model of a checkpoint.

    Links in the folder are not followed.

    Args:
        path: The folder of the model; or a checkpoint, or a folder of checkpoints, of which the
            newest whole one is loaded. It may be a URI.
        model: A module, which is copied, or a function that builds it, instead of the saved recipe.
            The function is called with seeded random numbers, as in ``fit``.
        loss: The loss for ``evaluate``, which a saved model does not contain.
        trust: Allow the folder to run code of its own choice: its pickle, or any function that it
            names. Without it only ``torch.nn.Module`` classes and functions that are annotated
            ``-> torch.nn.Module`` are called.

    Returns:
        The trained model, with ``best`` and ``ema`` if the checkpoint has them.

    Raises:
        TrustError: The folder would run code, and ``trust`` is False.
        ModelError: A file is damaged, or the weights do not fit the model.
        CheckpointError: There is no checkpoint that can be read.
        FileNotFoundError: There is no model in the folder.
    """
    models = {
        name: TrainedModel(**{**vars(data), "loss": loss})
        for name, data in read(path, model, trust).items()
    }
    trained = models.pop("")
    trained.ema, trained.best = models.get("ema"), models.get("best")
    return trained
