"""Trained models in MLflow's format, in the flavors ``sparkdl``, ``pyfunc`` and ``pytorch``."""

from __future__ import annotations

import logging
import platform
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyspark
import torch
from pyspark.sql import DataFrame

from sparkdl.data.columns.base import names_read
from sparkdl.errors import ParameterError, UserError, kind_of, optional_library
from sparkdl.infer.model import TrainedModel, load
from sparkdl.settings import DISTRIBUTION, __version__
from sparkdl.summaries.mlflow_pyfunc import PyFunc

logger = logging.getLogger("sparkdl")
FLAVOR = "sparkdl"
LOADER = "sparkdl.mlflow"
"""The module whose ``_load_pyfunc`` MLflow calls; stored models name it."""
_FOLDER, _TORCH = "sparkdl", "data"
EXAMPLE_ROWS = 5


def log_model(
    trained: TrainedModel,
    name: str = "model",
    *,
    input_example: DataFrame | pd.DataFrame | None = None,
    signature: Any = None,
    registered_model_name: str | None = None,
    alias: str | None = None,
    run_id: str | None = None,
    code_paths: Sequence[str | Path] = (),
    pip_requirements: Sequence[str] | None = None,
) -> Any:
    """Log a trained model to the active run of MLflow, or to a new one.

    Args:
        trained: The model.
        name: The name of the model in the run.
        input_example: Rows with the feature columns; the first five are stored. The signature
            follows from them.
        signature: A signature of MLflow, instead of that of the example. With neither, the signature
            follows from the types and shapes of the training, unless a column is an image or has a
            conversion of your own. It has the types of the results, which ``spark_udf`` takes.
        registered_model_name: Register the model under this name as well, in Unity Catalog
            ``catalog.schema.name``.
        alias: Give this alias, such as "champion", to the new version of the registered model.
        run_id: The run to log to, instead of the active one.
        code_paths: Files and folders of modules that the model needs, which are logged with it.
        pip_requirements: The packages that loading needs; None is this package and its own, in the
            present versions.

    Returns:
        The ``ModelInfo`` of MLflow; its ``model_uri`` is what the functions that load take.

    Raises:
        ParameterError: The extra is not installed, or the example is no table of the features.
        UserError: The model cannot be saved.
    """
    _mlflow("sparkdl.mlflow.log_model")
    check_model("sparkdl.mlflow.log_model", trained)
    if alias is not None and registered_model_name is None:
        raise ParameterError(
            f"log_model(alias={alias!r}): an alias is of a registered model: give "
            "registered_model_name, too."
        )
    import mlflow
    from mlflow.models import Model

    info = Model.log(
        artifact_path=None,
        name=name,
        flavor=SimpleNamespace(__name__=LOADER, save_model=save_model),
        registered_model_name=registered_model_name,
        run_id=run_id,
        trained=trained,
        input_example=input_example,
        signature=signature,
        code_paths=code_paths,
        pip_requirements=pip_requirements,
    )
    if alias is not None:
        version = info.registered_model_version
        mlflow.MlflowClient().set_registered_model_alias(registered_model_name, alias, version)
    return info


def save_model(
    trained: TrainedModel,
    path: str | Path,
    *,
    mlflow_model: Any = None,
    input_example: DataFrame | pd.DataFrame | None = None,
    signature: Any = None,
    code_paths: Sequence[str | Path] = (),
    pip_requirements: Sequence[str] | None = None,
) -> None:
    """Write a trained model into a new folder in MLflow's format; see :func:`log_model`.

    Args:
        trained: The model.
        path: The folder, which must be empty or not exist.
        mlflow_model: The description to complete; MLflow passes it.
        input_example: See :func:`log_model`.
        signature: See :func:`log_model`.
        code_paths: See :func:`log_model`.
        pip_requirements: See :func:`log_model`.

    Raises:
        UserError: The example does not fit, or the model cannot be saved.
        FileExistsError: The folder is not empty.
    """
    _mlflow("sparkdl.mlflow.save_model")
    check_model("sparkdl.mlflow.save_model", trained)
    from mlflow import pyfunc
    from mlflow.models import Model
    from mlflow.models.utils import _save_example
    from mlflow.utils.model_utils import _validate_and_copy_code_paths

    folder = Path(path)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: give a new folder.")
    described = Model() if mlflow_model is None else mlflow_model
    example = None if input_example is None else _example(trained, input_example)
    shown = _example_of_zeros(trained) if example is None else example
    if signature is None and shown is not None:
        try:
            signature = _signature(shown, PyFunc(trained).predict(shown))
        except UserError as error:
            if example is not None:
                raise
            logger.warning(
                "the model is logged without a signature, as it takes no rows of zeros: give "
                "input_example=. %s",
                error,
            )
    folder.mkdir(parents=True, exist_ok=True)
    trained.save(folder / _FOLDER)
    _save_torch(trained.module, folder / _TORCH)
    code = _validate_and_copy_code_paths([*map(str, code_paths)] or None, str(folder))
    described.signature = signature
    if example is not None:
        _save_example(described, example, str(folder))
    needed = _requirements() if pip_requirements is None else [*pip_requirements]
    (folder / "requirements.txt").write_text("\n".join(needed) + "\n", encoding="utf-8")
    environment = f"python: {platform.python_version()}\ndependencies:\n- -r requirements.txt\n"
    (folder / "python_env.yaml").write_text(environment, encoding="utf-8")
    described.add_flavor(FLAVOR, sparkdl_version=__version__, model_data=_FOLDER, code=code)
    described.add_flavor(
        "pytorch", model_data=_TORCH, pytorch_version=str(torch.__version__), code=code
    )
    pyfunc.add_to_model(
        described, loader_module=LOADER, data=_FOLDER, code=code, python_env="python_env.yaml"
    )
    described.save(str(folder / "MLmodel"))


def load_model(model_uri: str, *, loss: Any = None, trust: bool = False) -> TrainedModel:
    """Load a trained model that :func:`log_model` logged.

    Args:
        model_uri: Its URI, such as ``runs:/RUN/model`` or ``models:/NAME/1``.
        loss: The loss for ``evaluate``, as in :func:`sparkdl.load`.
        trust: Allow the model to run code of its own choice, as in :func:`sparkdl.load`.

    Raises:
        ParameterError: The extra is not installed, or the model is not of this flavor.
        UserError: The model cannot be loaded.
    """
    mlflow = _mlflow("sparkdl.mlflow.load_model")
    folder = Path(mlflow.artifacts.download_artifacts(artifact_uri=model_uri))
    if not (folder / _FOLDER).is_dir():
        raise ParameterError(
            f"the model {model_uri} has no flavor {FLAVOR}: log it with sparkdl.mlflow.log_model."
        )
    return load(folder / _FOLDER, loss=loss, trust=trust)


def _load_pyfunc(path: str) -> PyFunc:
    """Return the model in a folder; ``mlflow.pyfunc`` calls it, which runs the code of models."""
    return PyFunc(load(path, trust=True))


def _mlflow(what: str) -> Any:
    """Return the library. Raises ParameterError if it is not installed."""
    return optional_library("mlflow", what, "mlflow", "mlflow-skinny")


def check_model(what: str, trained: Any) -> None:
    """Raise :class:`sparkdl.ParameterError` if what a function was given is not the model of a fit."""
    if not isinstance(trained, TrainedModel):
        raise ParameterError(f"{what} takes what Trainer.fit returns, not {kind_of(trained)}.")


def _example(trained: TrainedModel, rows: DataFrame | pd.DataFrame) -> pd.DataFrame:
    """Return the first rows of the features as a table of pandas. Raises ParameterError."""
    names = names_read(trained.features, trained.columns)
    if isinstance(rows, DataFrame):
        return rows.select(*names).limit(EXAMPLE_ROWS).toPandas()
    if not isinstance(rows, pd.DataFrame) or not {*names} <= {*rows.columns}:
        raise ParameterError(
            f"input_example is {kind_of(rows)}: give a DataFrame with the columns {', '.join(names)}."
        )
    return rows[names].head(EXAMPLE_ROWS)


def _example_of_zeros(trained: TrainedModel) -> pd.DataFrame | None:
    """Return two rows like those of the training; None where a conversion reads what is not known."""
    table: dict[str, Any] = {}
    for name, field in zip(trained.features, trained.fields, strict=False):
        spec = trained.columns.get(name)
        whole = np.dtype(field.dtype).kind in "iub"
        value = np.zeros(field.shape, field.dtype if whole else "float64")
        if spec is not None:
            value = spec.example(field)
            if value is None:
                return None
        for column in names_read([name], trained.columns):
            table[column] = [value, value] if np.ndim(value) else np.array([value, value])
    return pd.DataFrame(table)


def _signature(table: pd.DataFrame, results: Any) -> Any:
    """Return the signature of a table and its results, with the types that Spark gives to these."""
    from mlflow.models import infer_signature

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of whole numbers that may be missing
        if isinstance(results, np.ndarray):
            results = pd.Series(results if results.ndim == 1 else list(results))
        return infer_signature(table, results)


def _save_torch(module: torch.nn.Module, folder: Path) -> None:
    """Write the module as MLflow's flavor of PyTorch does."""
    from mlflow.pytorch import pickle_module

    folder.mkdir()
    (folder / "pickle_module_info.txt").write_text(pickle_module.__name__, encoding="utf-8")
    torch.save(module, folder / "model.pth", pickle_module=pickle_module)


def _requirements() -> list[str]:
    import mlflow

    return [
        f"{DISTRIBUTION}=={__version__}",
        f"mlflow=={mlflow.__version__}",
        f"torch=={torch.__version__}",
        f"pyspark=={pyspark.__version__}",
    ]
