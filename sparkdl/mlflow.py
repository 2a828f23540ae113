"""Trained models as models of MLflow, and logging of every fit.

:func:`log_model` logs a model in three flavors: ``sparkdl``, which :func:`load_model` reads;
``pyfunc``, for ``mlflow.pyfunc`` (``spark_udf``, serving); and ``pytorch``, the plain module. The
functions need the extra ``mlflow``.
"""

import functools

from sparkdl.loop.callbacks import add_to_every_fit, remove_from_every_fit
from sparkdl.summaries.mlflow import MLflow
from sparkdl.summaries.mlflow_model import _load_pyfunc, load_model, log_model, save_model
from sparkdl.summaries.mlflow_pyfunc import PyFunc

__all__ = ["PyFunc", "_load_pyfunc", "autolog", "load_model", "log_model", "save_model"]


def autolog(disable: bool = False, log_models: bool = True) -> None:
    """Log each fit of this process to MLflow: parameters, metrics, curves and the model, as one run.

    A fit whose trainer has the callback :class:`sparkdl.summaries.MLflow` itself is left to that.
    Inside an active run, the first fit is logged to it and others are child runs; those of a
    ``CrossValidator`` and of other threads all are.

    Args:
        disable: End the logging.
        log_models: Log the trained model, too.

    Raises:
        ParameterError: The extra is not installed.
    """
    remove_from_every_fit(MLflow)
    if not disable:
        make = functools.partial(MLflow, log_models=log_models, nested=True)
        make()  # an error now, where the library is not installed
        add_to_every_fit(MLflow, make)
