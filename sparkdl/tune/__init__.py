"""Search for good values of a trainer's arguments: trials side by side, or one after another.

``sparkdl.tune.search`` chooses the values by a grid, at random or with Optuna, on data that is read
once. Its result has the table of the trials and the best model.

May import: ``train``, ``infer`` and every room below them. Must not know: how an engine works.
"""

from sparkdl.tune.algorithms import Optuna
from sparkdl.tune.folder import Score, TrialRecord
from sparkdl.tune.result import SearchResult
from sparkdl.tune.search import search
from sparkdl.tune.space import choice, integers, loguniform, uniform
from sparkdl.tune.sweep import LearningRates, Threshold, find_lr, threshold

__all__ = [
    "LearningRates",
    "Optuna",
    "Score",
    "SearchResult",
    "Threshold",
    "TrialRecord",
    "choice",
    "find_lr",
    "integers",
    "loguniform",
    "search",
    "threshold",
    "uniform",
]
