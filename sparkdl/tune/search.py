"""The search: its arguments, and trial after trial until the algorithm has no more.

While it runs it shows the table of its trials. Logs, such as runs of MLflow, are what callbacks of the
trainer or of every fit offer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from pyspark import RDD
from pyspark.sql import DataFrame

from sparkdl.codec.describe import describe, describe_trainer
from sparkdl.errors import ModelError, ParameterError, kind_of, nearest, raise_all, shown
from sparkdl.gang.slots import SLOT_SECONDS, task_slots
from sparkdl.infer.model import TrainedModel
from sparkdl.loop.callbacks import added_callbacks, none_added
from sparkdl.loop.history import History
from sparkdl.loop.interrupt import INTERRUPTED, Interrupt, interruptible
from sparkdl.loop.progress import LOG_SECONDS, log_line, shows_bar
from sparkdl.metrics.named import resolve, scalar_names
from sparkdl.metrics.scorer import Scorer
from sparkdl.plain import is_whole, plain
from sparkdl.session import SessionFacts
from sparkdl.spark.executors import own_properties, warming_up
from sparkdl.train.course import LocalFit
from sparkdl.train.fit import with_fields_decided
from sparkdl.train.trainer import Trainer
from sparkdl.tune.algorithms import Algorithm, Grid, Optuna, OptunaSearch, Random
from sparkdl.tune.arguments import problems_of_names, trainer_of
from sparkdl.tune.folder import Objective, SearchFolder, TrialOutcome, TrialRecord
from sparkdl.tune.result import SearchResult
from sparkdl.tune.runner import (
    ConnectedTrials,
    FitsHere,
    Placements,
    Proposed,
    Runner,
    RunningTrial,
    SearchInterrupted,
    SideBySide,
    check_search,
)
from sparkdl.tune.space import Domain, domains_of

if TYPE_CHECKING:
    from sparkdl.tune.result import SearchResult


class SearchLog(Protocol):
    """A place where a search is logged, by the driver."""

    def open(self, trainer: Trainer, space: Mapping[str, str]) -> None:
        """Begin to log a search over ``space`` in words; raise ParameterError if that cannot be."""

    def add(self, trainer: Trainer | None, record: TrialRecord, history: History | None) -> None:
        """Log a trial that has ended; ``history`` is None if only the record is known."""

    def close(self, result: Any) -> None:
        """End the log; ``result`` is None if the search failed."""


class SearchLogs:
    """All logs of one search.

    Use it as a context manager: leaving it ends the logs.
    """

    def __init__(
        self, logs: Sequence[SearchLog], trainer: Trainer, space: Mapping[str, Domain]
    ) -> None:
        self._logs, self._trainer, self._space = logs, trainer, space
        self.result: SearchResult | None = None
        """The result, once it is there."""

    @staticmethod
    def of(trainer: Trainer, space: Mapping[str, Domain]) -> tuple[SearchLogs, Trainer]:
        """Return the logs that callbacks offer, and the trainer with the other callbacks alone."""
        own = [(callback, callback.for_search()) for callback in trainer.callbacks]
        added = [callback.for_search() for callback in added_callbacks(trainer.callbacks)]
        logs: list[SearchLog] = [
            log for log in (*(log for _, log in own), *added) if log is not None
        ]
        others = [callback for callback, log in own if log is None]
        return SearchLogs(logs, trainer, space), replace(trainer, callbacks=others)

    def __bool__(self) -> bool:
        return bool(self._logs)

    def add(self, record: TrialRecord, history: History | None) -> None:
        """Log a trial that has ended, see :meth:`SearchLog.add`."""
        if not self._logs:
            return
        own: Trainer | None
        try:
            own = trainer_of(self._trainer, self._space, record.arguments)
        except (ModelError, ParameterError):
            own = None
        for log in self._logs:
            log.add(own, record, history)

    def __enter__(self) -> SearchLogs:
        words = {name: describe(domain) for name, domain in self._space.items()}
        for log in self._logs:
            log.open(self._trainer, words)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for log in self._logs:
            log.close(self.result)


class TrialTable:
    """The finished trials while a search runs, in a folder too if there is one.

    It is a context manager that shows the progress.
    """

    def __init__(
        self,
        objective: Objective,
        folder: SearchFolder | None,
        progress: str,
        trials: int,
        logs: SearchLogs,
    ) -> None:
        self._logs = logs
        self._objective, self._trials, self._progress = objective, trials, progress
        self.folder = folder
        self.earlier = {} if folder is None else dict(folder.records)
        self.records: dict[int, TrialRecord] = {}
        self.best: TrialRecord | None = None
        self.best_outcome: TrialOutcome | None = None  # also None if only the folder has it
        self._bar: Any = None
        self._told_at = time.monotonic()

    def add(self, outcome: TrialOutcome) -> None:
        """Add a trial that has just ended."""
        if self.folder is not None:
            self.folder.add(outcome)
        record = outcome.record
        self._logs.add(record, outcome.history)
        if self._note(record):
            self.best_outcome = outcome
        now = time.monotonic()
        if self._progress == "auto" and self._bar is None and now - self._told_at > LOG_SECONDS:
            self._told_at = now
            log_line(f"search: {len(self.records)} of {self._trials} trials{self._best_so_far}")

    def add_earlier(self, number: int) -> TrialRecord:
        """Add a trial that the folder has, and return it."""
        record = self.earlier[number]
        self._logs.add(record, None)
        if self._note(record):
            self.best_outcome = None
        return record

    def _note(self, record: TrialRecord) -> bool:
        """Add a record, and return whether it is the best one now."""
        self.records[record.number] = record
        better = self._objective.is_better(record, self.best)
        if better:
            self.best = record
        if self._bar is not None:
            self._bar.update()
            self._bar.set_postfix_str(self._best_so_far.removeprefix(", "))
        return better

    @property
    def _best_so_far(self) -> str:
        if self.best is None:
            return ""
        return f", best {self._objective.metric} {self.best.value:.4g} in trial {self.best.number}"

    def __enter__(self) -> TrialTable:
        if shows_bar(self._progress):
            from tqdm.auto import tqdm

            self._bar = tqdm(total=self._trials, unit="trial", dynamic_ncols=True, desc="search")
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


logger = logging.getLogger("sparkdl")
ALGORITHMS = ("grid", "random", "optuna")
WAIT_SECONDS = 0.005
_TOLD = (
    "interrupted: the search ends, and returns the trials that are finished. Interrupt again to end at "
    "once, without them."
)


def search(
    trainer: Trainer,
    data: DataFrame | RDD[Any],
    space: Mapping[str, Any],
    *,
    metric: str = "loss",
    trials: int | None = None,
    algorithm: str | Optuna = "random",
    parallel: int | None = None,
    seed: int = 0,
    path: str | os.PathLike[str] | None = None,
) -> SearchResult:
    """Train with different values of some arguments, and return the results and the best model.

    The data is read once. A trial that fails is a row of the table with the reason, and the others go
    on. The same arguments give the same table, apart from the times::

        result = sparkdl.tune.search(
            trainer,
            df,
            {
                "optimizer.lr": sparkdl.tune.loguniform(1e-4, 1e-1),
                "model.hidden": [16, 32, 64],
                "batch_size": [64, 256],
            },
            metric="accuracy",
        )
        result.to_pandas()
        result.best_model.transform(df)

    Args:
        trainer: The trainer; its validation scores the trials.
        data: The training data, as for ``Trainer.fit``.
        space: The values to try, by the names of arguments: a field of the trainer (``"batch_size"``)
            or a keyword argument of what it builds with (``"model.hidden"``, ``"optimizer.lr"``,
            ``"schedule.gamma"``, ``"stop.epochs"``). The values are a list, :func:`uniform`,
            :func:`loguniform` or :func:`integers`.
        metric: The metric of the validation to make as good as possible. A trial counts by its last
            validation; or by its best one with ``Validation(best=metric)``, whose weights are kept.
        trials: The number of trials. None is all combinations of a grid, and otherwise 16. A grid and
            a random search try each combination once, and end when there is no other.
        algorithm: "random", "grid" (all combinations), "optuna", or :class:`Optuna` with settings.
        parallel: The number of trials that run at once, each in one task of Spark, by the local
            engine, on CPUs. None is as many as the cluster runs tasks at once. 1 makes one trial
            after another, each by the engine of the trainer on the whole cluster: for models that
            need it.
        seed: The seed of the algorithm. The trials themselves have the trainer's seed.
        path: A folder or a URI for the finished trials. The same call goes on from what is there,
            after the driver was killed for example.

    Returns:
        The table of trials and the best model.

    Raises:
        UserError: An argument, the space or the data cannot work.
        TrainingError: Spark has ended.
        CheckpointError: ``path`` cannot be read or written.
        KeyboardInterrupt: The user interrupted twice.
    """
    facts = SessionFacts.of(data, "search")
    context, settings = facts.context, facts.settings
    connected = context is None
    trials, parallel, seed = plain(trials), plain(parallel), plain(seed)
    raise_all(
        ParameterError,
        list(
            _problems_of_search(
                trainer, space, metric, trials, algorithm, parallel, seed, connected
            )
        ),
    )
    if connected:
        check_search(trainer, path)
    domains = domains_of(space)
    objective = _objective(trainer, metric)
    logs, own = SearchLogs.of(trainer, domains)
    together = parallel != 1
    trainer_here, slots = own, 1
    if together and not connected:
        here = own.number_of_replicas or 1
        trainer_here = replace(own.settled(), engine="local", replicas=here)
        slots = parallel or task_slots(context, seconds=min(SLOT_SECONDS, settings.timeout or 30))
    elif not connected:
        trainer_here = with_fields_decided(own, data)
    folder = None
    if path is not None:
        told = _described(trainer, domains, objective, algorithm, together, seed)
        folder = SearchFolder.open(path, told, objective)
    search_id = folder.search_id if folder else secrets.token_hex(8)
    chosen = _algorithm(algorithm, domains, trials, seed, objective, search_id)
    with contextlib.ExitStack() as stack:
        if not connected:
            stack.enter_context(warming_up(context))
            stack.enter_context(own_properties(context))
        placements = stack.enter_context(Placements(data, list(domains), folder))
        stack.enter_context(logs)
        runner: Runner
        if connected:
            runner = ConnectedTrials(data, own, domains, objective, parallel)
        elif together:
            group = f"sparkdl-{search_id}"
            runner = SideBySide(
                context,
                trainer_here,
                domains,
                objective,
                placements,
                slots,
                group,
                settings,
                bool(logs),
            )
        else:
            runner = FitsHere(context, trainer_here, domains, objective, placements)
            runner.keep = folder is not None
            if logs:
                stack.enter_context(none_added())
        stack.enter_context(runner)
        trial_table = TrialTable(objective, folder, settings.progress, chosen.trials, logs)
        asked = interruptible(_TOLD) if together else contextlib.nullcontext(Interrupt())
        with asked as interrupt, trial_table:
            stopped = _make_trials(chosen, runner, trial_table, interrupt)
        best = trial_table.best
        model = None
        if best is not None:
            model = _model(trial_table, trainer_here, domains, placements, objective)
        elif trial_table.records:
            first = trial_table.records[min(trial_table.records)]
            logger.warning("no trial was completed; the first one says: %s", first.reason)
        records = tuple(trial_table.records[number] for number in sorted(trial_table.records))
        logs.result = SearchResult(records, best, stopped, objective, domains, trainer, model)
    return logs.result


def _make_trials(
    algorithm: Algorithm, runner: Runner, table: TrialTable, interrupt: Interrupt
) -> str | None:
    """Make all trials, and return why the search ended early, or None.

    An algorithm that learns is asked for trial k when exactly the trials up to k - slots have been
    told, whichever others have ended: so what it chooses does not depend on how fast tasks are.
    """
    running: dict[int, RunningTrial] = {}
    asked = told = 0
    while len(table.records) < algorithm.trials:
        if interrupt.asked:
            return INTERRUPTED
        while algorithm.learns and told <= asked - runner.slots and told in table.records:
            algorithm.tell(table.records[told])
            told += 1
        ready = not algorithm.learns or told > asked - runner.slots
        if asked < algorithm.trials and len(running) < runner.slots and ready:
            earlier = table.earlier.get(asked)
            arguments = algorithm.ask(asked, earlier.arguments if earlier else None)
            if earlier is not None:
                table.add_earlier(asked)
            else:
                try:
                    trial = Proposed(asked, arguments, algorithm.pruning(), table.best)
                    running[asked] = runner.start(trial)
                except SearchInterrupted:
                    return INTERRUPTED
            asked += 1
            continue
        ended = [number for number, trial in running.items() if trial.done()]
        for number in ended:
            table.add(running.pop(number).result())
        if not ended:
            time.sleep(WAIT_SECONDS)
    for number in range(told, algorithm.trials):
        algorithm.tell(table.records[number])
    return None


def _model(
    table: TrialTable,
    trainer: Trainer,
    space: Mapping[str, Domain],
    placements: Placements,
    objective: Objective,
) -> TrainedModel:
    """Return the trained model of the best trial."""
    best, outcome = table.best, table.best_outcome
    assert best is not None
    trained = None if outcome is None else outcome.trained
    if trained is None:
        if outcome is not None and outcome.history is not None:
            weights, history = outcome.weights, outcome.history
        else:
            assert table.folder is not None
            weights, history = table.folder.model(best.number)
        own = trainer_of(trainer, space, best.arguments)
        placed = placements.of(own, best.arguments)
        fit = LocalFit(placed.training, placed.validation, placed.float_dtype)
        trained = fit.trained(own, list(weights), weights.__getitem__, history)
    return trained if trained.best is None or not objective.best else trained.best


def _algorithm(
    algorithm: str | Optuna,
    space: Mapping[str, Domain],
    trials: int | None,
    seed: int,
    objective: Objective,
    search_id: str,
) -> Algorithm:
    """Return the algorithm that the user asked for."""
    if algorithm == "grid":
        return Grid(space, trials)
    if algorithm == "random":
        return Random(space, trials, seed)
    options = algorithm if isinstance(algorithm, Optuna) else Optuna()
    return OptunaSearch(options, space, trials, seed, objective, search_id)


def _objective(trainer: Trainer, metric: str) -> Objective:
    validation = trainer.validation
    assert validation is not None
    directions = Scorer(trainer.objective, tuple(resolve(validation.metrics))).higher_is_better
    return Objective(metric, directions[metric], validation.best == metric)


def _described(
    trainer: Trainer,
    space: Mapping[str, Domain],
    objective: Objective,
    algorithm: str | Optuna,
    together: bool,
    seed: int,
) -> dict[str, str]:
    """Return what is searched, in words: what must be the same for a search to go on."""
    told = describe_trainer(trainer)
    for name in ("callbacks", "validation", "checkpoint"):
        told.pop(name, None)
    validation, options = trainer.validation, algorithm
    assert validation is not None
    if isinstance(algorithm, Optuna):
        options = f"optuna, {describe(algorithm.sampler)}, {describe(algorithm.pruner)}"
    return {
        "space": describe(space),
        "metric": objective.metric,
        "algorithm": str(options),
        "trials run": "side by side" if together else "one after another",
        "seed": str(seed),
        "validation": describe([validation.every, validation.best]),
        **{f"trainer.{name}": text for name, text in told.items()},
    }


def _problems_of_search(
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
        names = scalar_names(trainer.validation.metrics)
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
