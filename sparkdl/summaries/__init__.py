"""Callbacks that show a training run (in TensorBoard, MLflow, files, pages), and models in MLflow.

``import sparkdl`` does not import them; the library that each needs is an extra.

May import: ``loop``, ``codec`` and ``infer``. Must not know: how an engine works.
"""

from sparkdl.summaries.base import Summaries, SummaryWriter
from sparkdl.summaries.files import HistoryFile, Report
from sparkdl.summaries.mlflow import MLflow
from sparkdl.summaries.tensorboard import TensorBoard

__all__ = ["HistoryFile", "MLflow", "Report", "Summaries", "SummaryWriter", "TensorBoard"]
