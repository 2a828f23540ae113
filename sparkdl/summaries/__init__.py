"""Callbacks that show a training run: in TensorBoard, in MLflow, as files and as curves.

Not imported by ``import sparkdl``; each one's library is an extra.
"""

from sparkdl.summaries.curves import Curves, plot_history
from sparkdl.summaries.history_file import HistoryFile
from sparkdl.summaries.tensorboard import TensorBoard
from sparkdl.summaries.tracking import MLflow

__all__ = ["Curves", "HistoryFile", "MLflow", "TensorBoard", "plot_history"]
