"""Checks of the arguments of a search, before the data is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sparkdl.errors import kind_of, nearest, shown
from sparkdl.metrics.named import resolve
from sparkdl.plain import is_whole
from sparkdl.train.trainer import Trainer
from sparkdl.tune.arguments import problems_of_names
from sparkdl.tune.optuna_search import Optuna

ALGORITHMS = ("grid", "random", "optuna")


def problems_of_search(
    trainer: Any,
    space: Any,
    metric: Any,
    trials: Any,
    algorithm: Any,
    parallel: Any,
    seed: Any,
    connected: bool = False,
) -> Iterator[str]:
    """Yield what is wrong with the arguments of :func:`sparkdl.tune.search`, in its order.

    In a session of Spark Connect (``connected``) trials are fits of gangs.
    """
    if not isinstance(trainer, Trainer):
        yield f"trainer is {kind_of(trainer)}: give a sparkdl.Trainer."
        return
    if not isinstance(space, Mapping):
        yield f'space is {kind_of(space)}: give a mapping, such as {{"optimizer.lr": [0.01, 0.1]}}.'
    else:
        yield from problems_of_names(trainer, space)
    if trainer.validation is None:
        yield (
            "the trainer has no validation, and a search compares trials by one: give "
            "Trainer(validation=sparkdl.Validation(df, metrics=[...]))."
        )
    else:
        names = ["loss", *(one.name for one in resolve(trainer.validation.metrics))]
        if metric not in names:
            yield (
                f'metric="{metric}" is not in the validation, which has {", ".join(names)}.'
                f"{nearest(str(metric), names)}"
            )
    for name, value in (("trials", trials), ("parallel", parallel)):
        if value is not None and not is_whole(value, 1):
            yield f"{name}={shown(value)}: give a whole number of at least 1, or None."
    if not isinstance(seed, int) or isinstance(seed, bool):
        yield f"seed={shown(seed)}: give a whole number."
    if not isinstance(algorithm, Optuna) and algorithm not in ALGORITHMS:
        yield (
            f"algorithm={shown(algorithm)}: use one of {', '.join(ALGORITHMS)}, or tune.Optuna(...)."
            f"{nearest(str(algorithm), ALGORITHMS)}"
        )
    if parallel != 1:
        for wrong, what in (
            (trainer.engine == "gang" and not connected, 'engine="gang"'),
            (trainer.checkpoint is not None, "checkpoint"),
            (trainer.keep_optimizer_state, "keep_optimizer_state"),
        ):
            if wrong:
                yield (
                    f"the trainer has {what}, and trials side by side are short fits by the local "
                    "engine: leave it out, or give parallel=1, which makes one distributed trial "
                    "after another."
                )
